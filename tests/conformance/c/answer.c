/* A message that arrives on a connection can be answered at once.
 *
 *   answer passive|active|late PROV NODE COUNT native|none
 *
 * Two processes make COUNT connections, one after the other. `native` and `none` select the mr_mode
 * of their regions.
 *
 * passive: The client sends on each connection. The server waits for that message only, then
 * answers from its completion, before it reads its event queue: by a send, a write, a read or a
 * fetching atomic. Then FI_CONNECTED comes once, and FI_SHUTDOWN.
 *
 * active: The server sends as soon as fi_accept has returned. A thread of the client answers from
 * the completion, while another thread reads the event queue.
 *
 * late: As `active`, but the client reads its event queue 1 s later: the server's posted operations
 * stay pending until then. The server accepts when the client has found no event. */
#include "end.h"

#include <pthread.h>
#include <rdma/fi_atomic.h>
#include <sys/socket.h>

#define SIZE 64

struct message {
	uint64_t number, addr, key;
};

static struct end end;
static struct fi_info *info;
static int native;
static uint64_t seen;

/* Opens the objects that all connections of a side share. */
static void open_side(const char *service, uint64_t flags)
{
	struct fi_info *hints = fi_allocinfo();
	struct fi_cq_attr attr = { .format = FI_CQ_FORMAT_MSG, .wait_obj = FI_WAIT_NONE };
	struct fi_eq_attr eq_attr = { .wait_obj = FI_WAIT_UNSPEC };
	uint64_t access = FI_SEND | FI_RECV | FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE;

	hints->caps = FI_MSG | FI_RMA | FI_ATOMIC;
	hints->mode = FI_CONTEXT | FI_CONTEXT2 | FI_RX_CQ_DATA;
	hints->ep_attr->type = FI_EP_MSG;
	hints->domain_attr->mr_mode = native ? FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY : 0;
	hints->domain_attr->threading = FI_THREAD_SAFE;
	hints->fabric_attr->prov_name = strdup(provider);
	MUST(fi_getinfo(FI_VERSION(1, 17), node, service, flags, hints, &info));
	fi_freeinfo(hints);
	MUST(fi_fabric(info->fabric_attr, &end.fabric, NULL));
	MUST(fi_eq_open(end.fabric, &eq_attr, &end.eq, NULL));
	MUST(fi_domain(end.fabric, info, &end.domain, NULL));
	MUST(fi_cq_open(end.domain, &attr, &end.cq, NULL));
	end.memory = aligned_alloc(4096, 4096);
	memset(end.memory, 0, 4096);
	MUST(fi_mr_reg(end.domain, end.memory, 4096, access, 0, 1, 0, &end.mr, NULL));
}

static void *context(int number) { return (void *)(uintptr_t)(number + 1); }

static void open_connection(struct fi_info *from, int number)
{
	struct message *message = (void *)end.memory;

	seen = 0;
	bind_endpoint(&end, from);
	MUST(fi_recv(end.ep, end.memory + 1024, SIZE, fi_mr_desc(end.mr), 0, context(number)));
	message->number = (uint64_t)number;
	message->addr = native ? (uintptr_t)end.memory + 2048 : 2048;
	message->key = fi_mr_key(end.mr);
}

/* Polls only the completion queue, until this connection has had completions with these flags.
 * Completions of earlier connections, whose receives may have been flushed, are ignored. */
static void await(uint64_t flags, int number)
{
	struct fi_cq_msg_entry entry;
	struct fi_cq_err_entry error = { 0 };
	double limit = now() + SETUP_SECONDS;

	while ((seen & flags) != flags) {
		ssize_t got = fi_cq_read(end.cq, &entry, 1);

		if (got == 1 && entry.op_context == context(number)) {
			seen |= entry.flags;
		} else if (got == -FI_EAVAIL) {
			MUST(fi_cq_readerr(end.cq, &error, 0));
			if (error.op_context == context(number))
				die("connection %d: completion in error: %s", number, fi_strerror(error.err));
		} else if (got < 0 && got != -FI_EAGAIN) {
			MUST(got);
		}
		if (now() > limit)
			die("connection %d: no completion within %d s", number, SETUP_SECONDS);
	}
}

/* Answers by one of four operations; returns the flags that its completion has. */
static uint64_t answer(int number)
{
	const struct message *from = (const void *)(end.memory + 1024);
	void *desc = fi_mr_desc(end.mr);
	uint64_t one = 1;
	ssize_t got;

	if (from->number != (uint64_t)number)
		die("message %llu on connection %d", (unsigned long long)from->number, number);
	switch (number % 4) {
	case 0:
		got = fi_send(end.ep, end.memory, sizeof(struct message), desc, 0, context(number));
		break;
	case 1:
		got = fi_write(end.ep, end.memory, SIZE, desc, 0, from->addr, from->key, context(number));
		break;
	case 2:
		got = fi_read(end.ep, end.memory + 3072, SIZE, desc, 0, from->addr, from->key, context(number));
		break;
	default:
		got = fi_fetch_atomic(end.ep, &one, 1, NULL, end.memory + 3072, desc, 0, from->addr, from->key, FI_UINT64, FI_SUM,
				      context(number));
	}
	if (got)
		die("connection %d: the answer: %ld (%s)", number, (long)got, fi_strerror((int)-got));
	return (const uint64_t[]){ FI_SEND, FI_WRITE, FI_READ, FI_ATOMIC }[number % 4];
}

static void close_connection(void)
{
	MUST(fi_close(&end.ep->fid));
}

static void server(const char *mode, int count, int fd, int answers)
{
	struct fi_info *request;
	struct fid_pep *pep;
	struct sockaddr_storage name = { 0 };
	size_t length = sizeof name;

	role = "server";
	open_side("0", FI_SOURCE);
	MUST(fi_passive_ep(end.fabric, info, &pep, NULL));
	MUST(fi_pep_bind(pep, &end.eq->fid, 0));
	MUST(fi_listen(pep));
	MUST(fi_getname(&pep->fid, &name, &length));
	tell(fd, &name, sizeof name);
	for (int i = 0; i < count; i++) {
		int passive = !strcmp(mode, "passive");
		char looked;

		expect(&end, FI_CONNREQ, &request);
		open_connection(request, i);
		fi_freeinfo(request);
		if (!strcmp(mode, "late"))
			hear(answers, &looked, 1);
		MUST(fi_accept(end.ep, NULL, 0));
		if (passive) {
			await(FI_RECV, i);
			await(answer(i), i);
			tell(fd, "", 1);
		} else {
			ssize_t got = fi_send(end.ep, end.memory, sizeof(struct message), fi_mr_desc(end.mr), 0, context(i));

			if (got)
				die("connection %d: the first message: %ld (%s)", i, (long)got, fi_strerror((int)-got));
		}
		expect(&end, FI_CONNECTED, NULL);
		expect(&end, FI_SHUTDOWN, NULL);
		if (!passive)
			await(FI_SEND, i);
		close_connection();
	}
	MUST(fi_close(&pep->fid));
}

static int turn;

static void *poller(void *unused)
{
	(void)unused;
	await(FI_RECV, turn);
	await(answer(turn), turn);
	return NULL;
}

static void client(const char *mode, int count, int fd, int answers)
{
	struct sockaddr_storage name;
	pthread_t thread;

	role = "client";
	hear(fd, &name, sizeof name);
	open_side(NULL, 0);
	for (int i = 0; i < count; i++) {
		int passive = !strcmp(mode, "passive");

		turn = i;
		open_connection(info, i);
		MUST(fi_connect(end.ep, &name, NULL, 0));
		if (!passive && pthread_create(&thread, NULL, poller, NULL))
			die("pthread_create");
		if (!strcmp(mode, "late")) {
			struct fi_eq_cm_entry entry;
			uint32_t kind;

			/* the address and the route are resolved, but the server has not
			 * answered */
			if (fi_eq_read(end.eq, &kind, &entry, sizeof entry, 0) != -FI_EAGAIN)
				die("an event before the server has answered");
			tell(answers, "", 1);
			sleep(1);
		}
		expect(&end, FI_CONNECTED, NULL);
		if (passive) {
			char done;

			MUST(fi_send(end.ep, end.memory, sizeof(struct message), fi_mr_desc(end.mr), 0, context(i)));
			await(i % 4 ? FI_SEND : FI_SEND | FI_RECV, i);
			hear(fd, &done, 1);
		} else {
			pthread_join(thread, NULL);
		}
		close_connection();
	}
}

int main(int argc, char **argv)
{
	int pipes[2], answers[2], count;
	pid_t pid;

	if (argc != 6)
		die("usage: answer passive|active|late PROV NODE COUNT native|none");
	provider = argv[2];
	node = argv[3];
	count = atoi(argv[4]);
	native = !strcmp(argv[5], "native");
	if (pipe(pipes) || pipe(answers))
		die("pipe: %s", strerror(errno));
	pid = child("client");
	if (pid == 0) {
		close(pipes[1]);
		close(answers[0]);
		client(argv[1], count, pipes[0], answers[1]);
		return 0;
	}
	close(pipes[0]);
	close(answers[1]);
	alarm(60);
	server(argv[1], count, pipes[1], answers[0]);
	if (status_of(pid, "client"))
		return 1;
	printf("%d connections were answered\n", count);
	return 0;
}
