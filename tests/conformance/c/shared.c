/* Two peers send into one shared receive context, and one of them is killed, in each round.
 *
 *   shared PROV NODE ROUNDS
 *
 * In every other round the peers have so few messages pending that a receive is always posted, and
 * the killed peer may have claimed one. The other peer's messages continue, complete and in order.
 * Each receive is returned: it takes a message, or completes in error because the dead peer had
 * claimed it, and is posted again. FI_SHUTDOWN comes for the one connection within 10 s. Exits with
 * 0, or prints the failure. */
#include "end.h"

#define RECVS 64
#define LENGTH (MEMORY / RECVS)
#define LIMIT 10.0

/* ---- the peers: message n is the number n, followed by bytes of the peer's mark ---- */

static void sender(const uint8_t *name, uint8_t mark, unsigned window)
{
	struct end end = { .info = getinfo(NULL, 0) };
	struct fi_cq_entry entry;
	struct fi_cq_err_entry error = { 0 };
	uint64_t next = 0, done = 0;

	open_fabric(&end);
	open_endpoint(&end, end.info);
	memset(end.memory, mark, MEMORY);
	MUST(fi_connect(end.ep, name, NULL, 0));
	expect(&end, FI_CONNECTED, NULL);
	for (;;) {
		uint8_t *at = end.memory + next % RECVS * LENGTH;
		ssize_t got;

		if (next < done + window) {
			ssize_t posted;

			memcpy(at, &next, sizeof next);
			posted = fi_send(end.ep, at, LENGTH, fi_mr_desc(end.mr), 0, NULL);
			if (posted == -FI_ESHUTDOWN)
				exit(0);
			if (posted == 0)
				next++;
			else if (posted != -FI_EAGAIN)
				MUST(posted);
		}
		got = fi_cq_read(end.cq, &entry, 1);
		done += got == 1;
		if (got == -FI_EAVAIL) {
			/* the other side ended the connection: it has all messages that it needs */
			MUST(fi_cq_readerr(end.cq, &error, 0));
			exit(0);
		}
	}
}

/* ---- the receiver ---- */

struct tally {
	uint64_t next[2]; /* the number of the next message of each peer */
	unsigned good[2], bad;
	uint64_t round; /* a bit for each receive that completed since the death */
};

static void post(struct end *end, size_t n)
{
	MUST(fi_recv(end->srx, end->memory + n * LENGTH, LENGTH, fi_mr_desc(end->mr), 0, (void *)n));
}

/* Takes one completion, if there is one, and posts its receive again. */
static void take(struct end *end, struct tally *tally)
{
	struct fi_cq_entry entry;
	struct fi_cq_err_entry error = { 0 };
	ssize_t got = fi_cq_read(end->cq, &entry, 1);
	size_t n;

	if (got == -FI_EAGAIN)
		return;
	if (got == -FI_EAVAIL) {
		MUST(fi_cq_readerr(end->cq, &error, 0));
		n = (size_t)error.op_context;
		tally->bad++;
	} else {
		uint8_t *at;
		uint64_t number;
		int which;

		MUST(got);
		n = (size_t)entry.op_context;
		at = end->memory + n * LENGTH;
		memcpy(&number, at, sizeof number);
		which = at[LENGTH - 1] - 1;
		if (which != 0 && which != 1)
			die("a message of mark %d", which + 1);
		for (size_t i = sizeof number; i < LENGTH; i++)
			if (at[i] != which + 1)
				die("byte %zu of message %llu of peer %d is 0x%x", i, (unsigned long long)number, which, at[i]);
		if (number != tally->next[which])
			die("message %llu of peer %d, not %llu", (unsigned long long)number, which, (unsigned long long)tally->next[which]);
		tally->next[which]++;
		tally->good[which]++;
	}
	if (n >= RECVS)
		die("a receive of context %zu", n);
	tally->round |= 1ULL << n;
	post(end, n);
}

static struct fid_ep *accept_one(struct end *end)
{
	struct fi_info *request;

	expect(end, FI_CONNREQ, &request);
	if (!end->domain) {
		open_domain(end, request);
		MUST(fi_srx_context(end->domain, request->rx_attr, &end->srx, NULL));
		for (size_t n = 0; n < RECVS; n++)
			post(end, n);
	}
	bind_endpoint(end, request);
	MUST(fi_accept(end->ep, NULL, 0));
	expect(end, FI_CONNECTED, NULL);
	fi_freeinfo(request);
	return end->ep;
}

/* Whether the connection of `ep` has ended. */
static int ended(struct end *end, struct fid_ep *ep)
{
	struct fi_eq_cm_entry entry;
	uint32_t kind;
	ssize_t got = fi_eq_read(end->eq, &kind, &entry, sizeof entry, 0);

	if (got == -FI_EAGAIN)
		return 0;
	MUST(got);
	if (kind != FI_SHUTDOWN || entry.fid != &ep->fid)
		die("event %u, not FI_SHUTDOWN of the dead peer's endpoint", kind);
	return 1;
}

static void round_of(struct end *end, int out)
{
	struct tally tally = { 0 };
	struct fid_ep *eps[2];
	unsigned before;
	double limit;

	for (int i = 0; i < 2; i++) {
		eps[i] = accept_one(end);
		tell(out, "c", 1);
	}
	for (limit = now() + LIMIT; tally.good[0] < 200 || tally.good[1] < 200;) {
		take(end, &tally);
		if (now() > limit)
			die("%u and %u messages", tally.good[0], tally.good[1]);
	}
	tell(out, "b", 1); /* messages are pending: peer 0 may be killed */
	for (limit = now() + 1 + LIMIT; !ended(end, eps[0]);) {
		take(end, &tally);
		if (now() > limit)
			die("no FI_SHUTDOWN within %.0f s", LIMIT);
	}
	tally.round = 0;
	before = tally.good[1];
	for (limit = now() + 2 * LIMIT; ~tally.round || tally.good[1] < before + 4 * RECVS;) {
		take(end, &tally);
		if (now() > limit)
			die("receives 0x%llx did not come back, after %u messages", (unsigned long long)~tally.round, tally.good[1] - before);
	}
	printf("%u messages of the dead peer, %u of the other, %u receives in error\n", tally.good[0], tally.good[1], tally.bad);
	MUST(fi_close(&eps[0]->fid));
	MUST(fi_shutdown(eps[1], 0));
	if (event(end, LIMIT, NULL) != FI_SHUTDOWN)
		die("no FI_SHUTDOWN of the living peer");
	MUST(fi_close(&eps[1]->fid));
	/* receives that completed meanwhile are posted again too */
	for (int i = 0; i < 2 * RECVS; i++) {
		struct fi_cq_entry entry;
		struct fi_cq_err_entry error = { 0 };
		ssize_t got = fi_cq_read(end->cq, &entry, 1);

		if (got == 1)
			post(end, (size_t)entry.op_context);
		else if (got == -FI_EAVAIL && fi_cq_readerr(end->cq, &error, 0) == 1)
			post(end, (size_t)error.op_context);
	}
	tell(out, "d", 1);
}

static void receiver(int rounds, int out)
{
	struct end end = { .info = getinfo_of("0", FI_SOURCE, FI_SHARED_CONTEXT) };
	struct fid_pep *pep;
	uint8_t name[128] = { 0 };
	size_t size = sizeof name;

	alarm(120);
	open_fabric(&end);
	MUST(fi_passive_ep(end.fabric, end.info, &pep, NULL));
	MUST(fi_pep_bind(pep, &end.eq->fid, 0));
	MUST(fi_listen(pep));
	MUST(fi_getname(&pep->fid, name, &size));
	tell(out, name, sizeof name);
	for (int i = 0; i < rounds; i++)
		round_of(&end, out);
	MUST(fi_close(&end.srx->fid));
	MUST(fi_close(&end.mr->fid));
	MUST(fi_close(&end.cq->fid));
	MUST(fi_close(&end.domain->fid));
	exit(0);
}

int main(int argc, char **argv)
{
	int pipes[2], status, rounds;
	uint8_t name[128];
	pid_t receiver_pid, peers[2];
	char byte;

	if (argc != 4)
		die("usage: shared PROV NODE ROUNDS");
	provider = argv[1];
	node = argv[2];
	rounds = atoi(argv[3]);
	setvbuf(stdout, NULL, _IONBF, 0);
	srand((unsigned)getpid());
	if (pipe(pipes))
		die("pipe: %s", strerror(errno));
	if (!(receiver_pid = child("receiver"))) {
		close(pipes[0]);
		receiver(rounds, pipes[1]);
	}
	role = "parent";
	close(pipes[1]);
	hear(pipes[0], name, sizeof name);
	for (int round = 0; round < rounds; round++) {
		for (int i = 0; i < 2; i++) {
			if (!(peers[i] = child(i ? "peer 1" : "peer 0")))
				sender(name, (uint8_t)(i + 1), round % 2 ? RECVS / 16 : RECVS);
			hear(pipes[0], &byte, 1);
		}
		hear(pipes[0], &byte, 1);
		usleep((useconds_t)(rand() % 30000));
		kill(peers[0], SIGKILL);
		waitpid(peers[0], &status, 0);
		if (!WIFSIGNALED(status))
			die("peer 0 had ended by itself");
		hear(pipes[0], &byte, 1);
		if (status_of(peers[1], "peer 1"))
			return 1;
	}
	return status_of(receiver_pid, "receiver");
}
