/* Tests in processes of their own, and the sockets of docs/softverbs-cm.md without librdmacm.
 * The first process calls nothing of librdmacm: each test, and each peer of a test, is forked from
 * one that has not opened the device. */
#ifndef CM_PAIR_H
#define CM_PAIR_H

#include <dirent.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>

#include "cm_side.h"

/* Another process: its pid, and a socket to it. */
struct peer {
	pid_t pid;
	int wire;
};

/* The wire to the process that has started this one. */
static int parent = -1;

static inline void say(int wire, int what)
{
	CHECK(write(wire, &what, sizeof what) == sizeof what);
}

static inline int hear(int wire)
{
	int what;

	CHECK(read(wire, &what, sizeof what) == sizeof what);
	return what;
}

static inline struct peer start(void (*body)(void))
{
	struct peer made;
	int wires[2];

	CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, wires) == 0);
	fflush(stdout);
	CHECK((made.pid = fork()) >= 0);
	if (!made.pid) {
		alarm(60);
		close(wires[0]);
		parent = wires[1];
		body();
		fflush(stdout);
		_exit(0);
	}
	close(wires[1]);
	made.wire = wires[0];
	return made;
}

/* Waits for the end of a process that must succeed. */
static inline void finish(struct peer *peer)
{
	int status;

	CHECK(waitpid(peer->pid, &status, 0) == peer->pid);
	close(peer->wire);
	if (WIFSIGNALED(status))
		die("a process ends by signal %d%s", WTERMSIG(status), WTERMSIG(status) == SIGALRM ? ": it hangs" : "");
	CHECK(WEXITSTATUS(status) == 0);
}

/* Kills a process by SIGKILL. */
static inline void finish_by_kill(struct peer *peer)
{
	kill(peer->pid, SIGKILL);
	CHECK(waitpid(peer->pid, NULL, 0) == peer->pid);
	close(peer->wire);
}

static inline void test(const char *name, void (*body)(void))
{
	struct peer one;
	double begin = now_ms();

	snprintf(doing, sizeof doing, "%s", name);
	one = start(body);
	finish(&one);
	doing[0] = 0;
	printf("ok %s (%.1f s)\n", name, (now_ms() - begin) / 1e3);
}

/* Descriptors of this process; with `part`, those whose file has this in its name. */
static inline int descriptors(const char *part)
{
	DIR *folder = opendir("/proc/self/fd");
	struct dirent *entry;
	char path[300], name[300];
	int count = 0;

	CHECK(folder);
	while ((entry = readdir(folder))) {
		ssize_t length;

		snprintf(path, sizeof path, "/proc/self/fd/%s", entry->d_name);
		length = readlink(path, name, sizeof name - 1);
		if (length < 0)
			continue;
		name[length] = 0;
		count += !part || strstr(name, part);
	}
	closedir(folder);
	/* without that of the folder itself */
	return count - !part;
}

static inline int port_of(struct rdma_cm_id *id)
{
	return ntohs(rdma_get_src_port(id));
}

/* ---- sockets of docs/softverbs-cm.md ---- */

/* A socket that is bound or connected to a name of user `uid`; negative: errno. */
static inline int raw(int (*call)(int, const struct sockaddr *, socklen_t), unsigned int uid, const char *host, int port)
{
	struct sockaddr_un name = { .sun_family = AF_UNIX };
	int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0), length;

	CHECK(fd >= 0);
	length = snprintf(name.sun_path + 1, sizeof name.sun_path - 1, "softverbs/%u/%s/%d", uid, host, port);
	if (call(fd, (struct sockaddr *)&name, 2 + 1 + length) == 0)
		return fd;
	length = -errno;
	close(fd);
	return length;
}

enum { REQ_BYTES = 144, REP_BYTES = 240, REJ_BYTES = 164, SIDR_REQ_BYTES = 260, SIDR_REP_BYTES = 176, HEAD_BYTES = 12,
       MOST_BYTES = 260 };

static inline void put(unsigned char *at, unsigned int value)
{
	at[0] = value;
	at[1] = value >> 8;
	at[2] = value >> 16;
	at[3] = value >> 24;
}

static inline void address_of(unsigned char *at, int port)
{
	memcpy(at, "\0\0\0\0\0\0\0\0\0\0\377\377\177\0\0\1", 16);
	at[20] = port;
	at[21] = port >> 8;
}

/* A valid message of this kind (1 REQ to 7 SIDR_REP). Returns its length. */
static inline int frame(unsigned char *bytes, int kind, unsigned int qp_num)
{
	static const int lengths[] = { 0, REQ_BYTES, REP_BYTES, HEAD_BYTES, REJ_BYTES, HEAD_BYTES, SIDR_REQ_BYTES, SIDR_REP_BYTES };

	memset(bytes, 0, MOST_BYTES);
	memcpy(bytes, "SVCM\2", 5);
	bytes[6] = kind;
	if (kind == 1 || kind == 2) {
		put(bytes + 12, qp_num);
		bytes[36] = bytes[37] = 1;
		bytes[39] = 7;
	}
	if (kind == 1) {
		bytes[41] = 7;
		address_of(bytes + 44, 9);
		address_of(bytes + 66, 10);
	}
	if (kind == 4)
		bytes[12] = 28;
	if (kind == 6) {
		put(bytes + 28, qp_num);
		address_of(bytes + 36, 9);
		address_of(bytes + 58, 10);
	}
	if (kind == 7) {
		put(bytes + 16, qp_num);
		put(bytes + 20, RDMA_UDP_QKEY);
	}
	return lengths[kind];
}

#endif
