/* A process with a connected endpoint forks in the middle of transfers, and continues them.
 *
 *   forked PROV NODE
 *
 * Some children write to their copy of the region and stay alive for a while. Some call the
 * endpoint, whose calls must return an error, and close it. Children end by exit(3), which runs the
 * handlers and destructors that the parent's libraries have registered, or by _exit(2). The
 * parent's messages come back unchanged, and its connection ends in order. Exits with 0, or prints
 * the failure. */
#include "end.h"

#define LENGTH 65536
#define MESSAGES 300

static void post_recv(struct end *end)
{
	MUST(fi_recv(end->ep, end->memory, LENGTH, fi_mr_desc(end->mr), 0, NULL));
}

/* Sends each message back. */
static void echo(const uint8_t *name)
{
	struct end end = { .info = getinfo(NULL, 0) };

	open_fabric(&end);
	open_endpoint(&end, end.info);
	post_recv(&end);
	MUST(fi_connect(end.ep, name, NULL, 0));
	expect(&end, FI_CONNECTED, NULL);
	for (int i = 0; i < MESSAGES; i++) {
		if (completion(&end, 10))
			die("message %d ended in error", i);
		memcpy(end.memory + LENGTH, end.memory, LENGTH);
		post_recv(&end);
		MUST(fi_send(end.ep, end.memory + LENGTH, LENGTH, fi_mr_desc(end.mr), 0, NULL));
		if (completion(&end, 10))
			die("answer %d ended in error", i);
	}
	expect(&end, FI_SHUTDOWN, NULL);
	close_end(&end);
	exit(0);
}

static pid_t fork_now(struct end *end, int how)
{
	pid_t pid = fork();

	if (pid < 0)
		die("fork: %s", strerror(errno));
	if (pid > 0)
		return pid;
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (how == 0)
		exit(0);
	memset(end->memory, 0xee, MEMORY);
	if (how == 1)
		usleep(200000);
	if (how == 2) {
		if (fi_send(end->ep, end->memory, LENGTH, fi_mr_desc(end->mr), 0, NULL) >= 0)
			die("a child can send");
		if (fi_recv(end->ep, end->memory, LENGTH, fi_mr_desc(end->mr), 0, NULL) >= 0)
			die("a child can post a receive");
		fi_shutdown(end->ep, 0);
		fi_close(&end->ep->fid);
	}
	_exit(0);
}

static void goes_on(int out)
{
	struct end end = { .info = getinfo("0", FI_SOURCE) };
	struct fid_pep *pep;
	struct fi_info *request;
	uint8_t name[128] = { 0 };
	size_t size = sizeof name;
	pid_t children[MESSAGES / 10];
	int count = 0;

	open_fabric(&end);
	MUST(fi_passive_ep(end.fabric, end.info, &pep, NULL));
	MUST(fi_pep_bind(pep, &end.eq->fid, 0));
	MUST(fi_listen(pep));
	MUST(fi_getname(&pep->fid, name, &size));
	tell(out, name, sizeof name);
	expect(&end, FI_CONNREQ, &request);
	open_endpoint(&end, request);
	MUST(fi_accept(end.ep, NULL, 0));
	expect(&end, FI_CONNECTED, NULL);
	for (int i = 0; i < MESSAGES; i++) {
		uint8_t *from = end.memory + LENGTH;

		for (size_t at = 0; at < LENGTH; at++)
			from[at] = (uint8_t)(at * 3 + (size_t)i);
		memset(end.memory, 0, LENGTH);
		post_recv(&end);
		if (i % 10 == 4) /* a receive is posted: its page must remain the parent's */
			children[count] = fork_now(&end, count % 3), count++;
		MUST(fi_send(end.ep, from, LENGTH, fi_mr_desc(end.mr), 0, NULL));
		if (i % 10 == 9 && count < MESSAGES / 10) /* a send is pending */
			children[count] = fork_now(&end, count % 3), count++;
		if (completion(&end, 10) || completion(&end, 10))
			die("message %d ended in error", i);
		if (memcmp(end.memory, from, LENGTH))
			die("message %d came back changed", i);
	}
	for (int i = 0; i < count; i++)
		if (status_of(children[i], "child"))
			die("child %d ended badly", i);
	MUST(fi_shutdown(end.ep, 0));
	expect(&end, FI_SHUTDOWN, NULL);
	close_end(&end);
	printf("%d children, %d messages there and back\n", count, MESSAGES);
	exit(0);
}

int main(int argc, char **argv)
{
	int pipes[2], status;
	uint8_t name[128];
	pid_t parent, peer;

	if (argc != 3)
		die("usage: forked PROV NODE");
	provider = argv[1];
	node = argv[2];
	setvbuf(stdout, NULL, _IONBF, 0);
	if (pipe(pipes))
		die("pipe: %s", strerror(errno));
	if (!(parent = child("forking process")))
		goes_on(pipes[1]);
	role = "first process";
	close(pipes[1]);
	hear(pipes[0], name, sizeof name);
	if (!(peer = child("peer")))
		echo(name);
	status = status_of(parent, "forking process");
	return status_of(peer, "peer") | status;
}
