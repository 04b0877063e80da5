/* A survivor whose peers are killed in the middle of large transfers, one after the other.
 *
 *   killed send|recv|write|read PROV NODE ROUNDS
 *
 * The survivor sends to, receives from, writes to or reads from the victim, 1 MiB each.
 *
 * Each round has a new victim, killed at a random moment, while domain, queues and region of the
 * survivor stay open. All posted operations must complete, each one after the first error in error
 * too; FI_SHUTDOWN must come within 10 s; and the next round must start clean. Exits with 0, or
 * prints the failure. */
#define MEMORY (8UL << 20)
#include "end.h"

#define SLOTS 8
#define LARGE (MEMORY / SLOTS)
#define LIMIT 10.0 /* seconds until the survivor detects the death */

struct survivor {
	struct end end;
	struct fid_pep *pep;
	int out;
};

static uint8_t *slot(struct end *end, size_t n) { return end->memory + n * LARGE; }

static void post_recv(struct end *end, size_t n)
{
	MUST(fi_recv(end->ep, slot(end, n), LARGE, fi_mr_desc(end->mr), 0, (void *)n));
}

/* ---- the victims ---- */

static int is(const char *mode, const char *want) { return !strcmp(mode, want); }

/* Connects, sends the address and key of its memory, and takes part until it is killed. */
static void victim(const char *mode, const uint8_t *name, uint8_t mark)
{
	struct end end = { .info = getinfo(NULL, 0) };
	struct fi_cq_entry entry;
	struct remote mine;
	size_t n;

	open_fabric(&end);
	open_endpoint(&end, end.info);
	if (is(mode, "send"))
		for (n = 0; n < SLOTS; n++)
			post_recv(&end, n);
	MUST(fi_connect(end.ep, name, NULL, 0));
	expect(&end, FI_CONNECTED, NULL);
	mine.key = fi_mr_key(end.mr);
	mine.addr = end.info->domain_attr->mr_mode & FI_MR_VIRT_ADDR ? (uintptr_t)end.memory : 0;
	/* the survivor reads this memory as soon as it has the key */
	memset(end.memory, mark, MEMORY);
	MUST(fi_inject(end.ep, &mine, sizeof mine, 0));
	for (n = 0; is(mode, "recv"); n++) {
		ssize_t posted = fi_send(end.ep, slot(&end, n % SLOTS), LARGE, fi_mr_desc(end.mr), 0, NULL);

		if (posted != -FI_EAGAIN)
			MUST(posted);
		fi_cq_read(end.cq, &entry, 1);
	}
	while (is(mode, "send"))
		if (fi_cq_read(end.cq, &entry, 1) == 1)
			post_recv(&end, (size_t)entry.op_context);
	for (;;)
		pause();
}

/* ---- the survivor ---- */

static void accept_one(struct survivor *s, struct remote *remote)
{
	struct end *end = &s->end;
	struct fi_info *request;

	expect(end, FI_CONNREQ, &request);
	if (!end->domain)
		open_domain(end, request);
	bind_endpoint(end, request);
	post_recv(end, 0);
	MUST(fi_accept(end->ep, NULL, 0));
	expect(end, FI_CONNECTED, NULL);
	if (completion(end, LIMIT))
		die("the first message ended in error");
	memcpy(remote, end->memory, sizeof *remote);
	fi_freeinfo(request);
}

static ssize_t post(const char *mode, struct end *end, size_t n, struct remote remote)
{
	void *desc = fi_mr_desc(end->mr), *at = slot(end, n);
	uint64_t there = remote.addr + n * LARGE;

	if (is(mode, "send"))
		return fi_send(end->ep, at, LARGE, desc, 0, (void *)n);
	if (is(mode, "recv"))
		return fi_recv(end->ep, at, LARGE, desc, 0, (void *)n);
	if (is(mode, "write"))
		return fi_write(end->ep, at, LARGE, desc, 0, there, remote.key, (void *)n);
	return fi_read(end->ep, at, LARGE, desc, 0, there, remote.key, (void *)n);
}

static void round_of(const char *mode, struct survivor *s, uint8_t mark)
{
	struct end *end = &s->end;
	struct remote remote;
	unsigned good = 0, bad = 0, posted = 0;
	double limit = now() + 30;
	ssize_t refused = 0;
	int kind;

	accept_one(s, &remote);
	while (!bad && !refused) {
		struct fi_cq_entry entry;
		ssize_t got;

		while (posted < good + bad + SLOTS && !refused) {
			ssize_t ret = post(mode, end, posted % SLOTS, remote);

			if (ret == -FI_EAGAIN)
				break;
			if (ret)
				refused = ret;
			else
				posted++;
		}
		got = fi_cq_read(end->cq, &entry, 1);
		if (got == -FI_EAVAIL) {
			bad += completion(end, 0) != 0;
		} else if (got == 1) {
			size_t n = (size_t)entry.op_context;

			good++;
			if ((is(mode, "recv") || is(mode, "read")) && slot(end, n)[LARGE - 1] != mark)
				die("%s: the last byte is 0x%x, not 0x%x", mode, slot(end, n)[LARGE - 1], mark);
			if (good == 10) {
				/* transfers are pending: the victim may be killed */
				tell(s->out, "b", 1);
				limit = now() + 1 + LIMIT;
			}
		}
		if (now() > limit)
			die("%s: %u completions and no error", mode, good);
	}
	if (refused && refused != -FI_ESHUTDOWN)
		die("%s: refused with %zd", mode, refused);
	while (good + bad < posted)
		if (completion(end, LIMIT))
			bad++;
		else if (bad)
			die("%s: a completion without error after one in error", mode);
		else
			good++;
	kind = event(end, LIMIT, NULL);
	if (kind != FI_SHUTDOWN)
		die("event %d after the peer's death, not FI_SHUTDOWN", kind);
	if (now() > limit)
		die("%s: it took more than %.0f s", mode, LIMIT);
	if (post(mode, end, 0, remote) != -FI_ESHUTDOWN)
		die("a post after FI_SHUTDOWN is not -FI_ESHUTDOWN");
	if (!bad)
		die("%s: FI_SHUTDOWN without an error", mode);
	printf("%s: %u completed, %u in error, then FI_SHUTDOWN\n", mode, good, bad);
	fi_close(&end->ep->fid);
	tell(s->out, "d", 1);
}

static void survivor(const char *mode, int rounds, int out)
{
	struct survivor s = { .end = { .info = getinfo("0", FI_SOURCE) }, .out = out };
	uint8_t name[128] = { 0 };
	size_t size = sizeof name;

	alarm(120);
	open_fabric(&s.end);
	MUST(fi_passive_ep(s.end.fabric, s.end.info, &s.pep, NULL));
	MUST(fi_pep_bind(s.pep, &s.end.eq->fid, 0));
	MUST(fi_listen(s.pep));
	MUST(fi_getname(&s.pep->fid, name, &size));
	tell(out, name, sizeof name);
	for (int i = 0; i < rounds; i++)
		round_of(mode, &s, (uint8_t)(i + 1));
	MUST(fi_close(&s.end.mr->fid));
	MUST(fi_close(&s.end.cq->fid));
	MUST(fi_close(&s.end.domain->fid));
	exit(0);
}

int main(int argc, char **argv)
{
	int pipes[2], status, rounds;
	uint8_t name[128];
	pid_t survivor_pid;
	char byte;

	if (argc != 5)
		die("usage: killed send|recv|write|read PROV NODE ROUNDS");
	provider = argv[2];
	node = argv[3];
	rounds = atoi(argv[4]);
	setvbuf(stdout, NULL, _IONBF, 0);
	srand((unsigned)getpid());
	if (pipe(pipes))
		die("pipe: %s", strerror(errno));
	if (!(survivor_pid = child("survivor"))) {
		close(pipes[0]);
		survivor(argv[1], rounds, pipes[1]);
	}
	role = "parent";
	close(pipes[1]);
	hear(pipes[0], name, sizeof name);
	for (int i = 0; i < rounds; i++) {
		pid_t pid = child("victim");

		if (pid == 0)
			victim(argv[1], name, (uint8_t)(i + 1));
		hear(pipes[0], &byte, 1);
		usleep((useconds_t)(rand() % 30000));
		kill(pid, SIGKILL);
		waitpid(pid, &status, 0);
		if (!WIFSIGNALED(status))
			die("the victim had ended by itself");
		hear(pipes[0], &byte, 1);
	}
	return status_of(survivor_pid, "survivor");
}
