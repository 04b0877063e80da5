/* Long messages of processes that compute, sleep, cancel receives, or close their endpoints, from
 * fi_msg(3), fi_cq(3), fi_endpoint(3) and fi_domain(3). Each posted operation completes exactly once, and
 * no receive completes with success and other bytes than those of its message.
 *
 *   rdm_long_ends computes PROV NODE   the sender calls nothing after its sends; with `auto` they complete meanwhile
 *   rdm_long_ends sleeps PROV NODE     the receiver calls nothing after its receives; as above
 *   rdm_long_ends waits PROV NODE      both processes block in fi_cq_sread
 *   rdm_long_ends leaves PROV NODE     the sender closes its endpoint, or ends, at the completion of its send
 *   rdm_long_ends abandons PROV NODE   the sender closes its endpoint before the completion, and reuses its memory
 *   rdm_long_ends closes PROV NODE     the receiver closes its endpoint in the middle, and reuses its memory
 *   rdm_long_ends cancels PROV NODE    fi_cancel of receives in the middle
 *
 * WEFT_RDM_LONG=1: more rounds. A further argument `auto` requests FI_PROGRESS_AUTO. Ends with 0, or
 * says what went wrong. Plain libfabric 1.17. */
#define _GNU_SOURCE
#include "rdm_long.h"

enum { ROUND = WORD_2, POSTED, STATE }; /* words of the board */
enum { RECEIVER = 0 };

static volatile uint64_t computed;

/* Computes, then sleeps, without a call of the library: 0.2 s, or with automatic progress until `done`
 * completions of the other process are on the board. */
static void compute(uint64_t done)
{
	double start = now();

	while (now() - start < 0.1)
		for (int i = 0; i < 100000; i++)
			computed += (uint64_t)i * computed + 1;
	usleep(100000);
	while (wants_auto && told(STATE) < done) {
		if (now() - start > 10)
			die("the other process has no completion while this one computes");
		usleep(1000);
	}
}

static void check_all(const struct message *m, unsigned count, fi_addr_t from, uint8_t *bytes, struct op *ops)
{
	for (unsigned i = 0; i < count; i++) {
		received_well(&ops[i], &m[i], from);
		must_be(bytes + i * m[0].len, m[i].len, m[i].seed);
	}
}

/* ---- progress ---- */

enum { COUNT = 8 };

static void describe(struct message *m, size_t len, uint64_t seed)
{
	for (unsigned i = 0; i < COUNT; i++)
		m[i] = (struct message){ .len = len, .room = len, .tag = i, .seed = seed * 100 + i, .tagged = true };
}

static void computes_of(int me)
{
	static const uint64_t levels[] = { 0, FI_INJECT_COMPLETE, FI_TRANSMIT_COMPLETE, FI_DELIVERY_COMPLETE };
	static struct op ops[COUNT];
	struct message m[COUNT];
	struct side side;
	uint8_t *bytes = memory(COUNT * 2 * MIB);

	open_one_of_two(&side, me);
	for (unsigned round = 0; round < 6; round++) {
		size_t len = round % 2 ? 2 * MIB : 100001;

		describe(m, len, round);
		memset(ops, 0, sizeof ops);
		for (unsigned i = 0; me == 0 && i < COUNT; i++)
			fill(bytes + i * len, len, m[i].seed);
		if (me == 1 && round < 4)
			for (unsigned i = 0; i < COUNT; i++)
				receive_from(&side, FI_ADDR_UNSPEC, bytes + i * len, len, i, 0, &ops[i]);
		if (round != 0) /* the first messages make the connection */
			meet(&side, 2);
		if (me == 0) {
			for (unsigned i = 0; i < COUNT; i++)
				send_to(&side, side.peer, bytes + i * len, len, i, levels[round % 4], &ops[i]);
			compute(round + 1);
		} else if (round >= 4) {
			linger(&side, 0.1);
			for (unsigned i = 0; i < COUNT; i++)
				receive_from(&side, FI_ADDR_UNSPEC, bytes + i * len, len, i, 0, &ops[i]);
		}
		for (unsigned i = 0; i < COUNT; i++)
			await(&side, &ops[i]);
		if (me == 1) {
			add(STATE);
			check_all(m, COUNT, side.peer, bytes, ops);
		}
		meet(&side, 2);
	}
	close_one_of_two(&side);
}

static void sleeps_of(int me)
{
	static struct op ops[COUNT];
	struct message m[COUNT];
	struct side side;
	uint8_t *bytes = memory(COUNT * 2 * MIB);

	open_one_of_two(&side, me);
	for (unsigned round = 0; round < 4; round++) {
		size_t len = round % 2 ? 2 * MIB : 100001;

		describe(m, len, round);
		memset(ops, 0, sizeof ops);
		for (unsigned i = 0; i < COUNT; i++)
			if (me == 0)
				fill(bytes + i * len, len, m[i].seed);
			else
				receive_from(&side, FI_ADDR_UNSPEC, bytes + i * len, len, i, 0, &ops[i]);
		meet(&side, 2);
		if (me == 0) {
			for (unsigned i = 0; i < COUNT; i++)
				send_to(&side, side.peer, bytes + i * len, len, i, round >= 2 ? FI_DELIVERY_COMPLETE : 0, &ops[i]);
		} else {
			compute(round + 1);
			if (wants_auto) {
				for (unsigned i = 0; i < COUNT; i++)
					must_be(bytes + i * len, len, m[i].seed);
				take_all(&side);
				for (unsigned i = 0; i < COUNT; i++)
					IS(ops[i].done == 1);
			}
		}
		for (unsigned i = 0; i < COUNT; i++)
			await(&side, &ops[i]);
		if (me == 1)
			check_all(m, COUNT, side.peer, bytes, ops);
		else
			add(STATE);
		meet(&side, 2);
	}
	close_one_of_two(&side);
}

static void waits_of(int me)
{
	struct side side;
	uint8_t *bytes = memory(4 * MIB);

	wanted.wait = FI_WAIT_UNSPEC;
	open_one_of_two(&side, me);
	for (uint64_t round = 0; round < 40; round++) {
		size_t len = round * 50021 + 1;
		bool sender = (round & 1) == (uint64_t)me;
		struct fid_cq *cq = sender ? side.tx : side.rx;
		struct fi_cq_tagged_entry entry;
		struct op op = { 0 };
		double start = now();
		ssize_t got;

		if (sender) {
			fill(bytes, len, round);
			if (round % 4 < 2)
				usleep(3000);
			send_to(&side, side.peer, bytes, len, round, 0, &op);
		} else {
			if (round % 4 >= 2)
				usleep(3000);
			receive_from(&side, FI_ADDR_UNSPEC, bytes, len, round, 0, &op);
		}
		while ((got = fi_cq_sread(cq, &entry, 1, NULL, 5000)) == -FI_EINTR)
			;
		if (got != 1)
			die("round %llu, %s: fi_cq_sread: %zd after %.1f s", (unsigned long long)round, sender ? "sender" : "receiver", got, now() - start);
		IS(entry.op_context == &op);
		if (!sender) {
			IS(entry.len == len && entry.tag == round);
			must_be(bytes, len, round);
		}
	}
	close_one_of_two(&side);
}

/* ---- endpoints that are closed ---- */

/* Round: the level, how the sender ends, and whether the receive is late. */
static const uint64_t leave_levels[] = { 0, FI_TRANSMIT_COMPLETE, FI_DELIVERY_COMPLETE };
static int leave_rounds(void) { return all_forms() ? 18 : 6; }

static void leaves_of_sender(int round)
{
	struct side side;
	struct op op = { 0 };
	size_t len = (round % 2 ? 3 * MIB : 150001);
	uint8_t *bytes = memory(len);

	open_long(&side, 1 + round);
	side.peer = address(&side, RECEIVER);
	fill(bytes, len, (uint64_t)round);
	UNTIL(told(POSTED) > (uint64_t)round, take_all(&side));
	send_to(&side, side.peer, bytes, len, (uint64_t)round, leave_levels[round % 3], &op);
	await(&side, &op);
	if (op.err)
		die("round %d: %s", round, fi_strerror(op.err));
	if (round / 2 % 3 == 0)
		kill(getpid(), SIGKILL);
	memset(bytes, REUSED, len);
	if (round / 2 % 3 == 1)
		_exit(0);
	MUST(fi_close(&side.ep->fid));
	munmap(bytes, len);
	usleep(20000);
}

static void leaves_of_receiver(int me)
{
	struct side side;
	uint8_t *bytes = memory(4 * MIB);

	open_long(&side, me);
	for (int round = 0; round < leave_rounds(); round++) {
		size_t len = (round % 2 ? 3 * MIB : 150001);
		bool late = round % 4 >= 2;
		struct op op = { 0 };
		fi_addr_t from = address(&side, 1 + round);

		if (!late)
			receive_from(&side, FI_ADDR_UNSPEC, bytes, len, (uint64_t)round, 0, &op);
		add(POSTED);
		if (late) {
			linger(&side, 0.05);
			receive_from(&side, FI_ADDR_UNSPEC, bytes, len, (uint64_t)round, 0, &op);
		}
		await(&side, &op);
		if (op.err)
			die("round %d: %s", round, fi_strerror(op.err));
		IS(op.entry.len == len && op.source == from);
		must_be(bytes, len, (uint64_t)round);
	}
	close_side(&side);
}

static void leaves(void)
{
	pid_t receiver = start("receiver", leaves_of_receiver, RECEIVER);

	for (int round = 0; round < leave_rounds(); round++) {
		int status;
		pid_t pid = start("sender", leaves_of_sender, round);

		IS(waitpid(pid, &status, 0) == pid);
		IS(WIFSIGNALED(status) ? WTERMSIG(status) == SIGKILL && round / 2 % 3 == 0 : WEXITSTATUS(status) == 0);
	}
	ends_well(receiver, "receiver");
}

/* Rounds of `abandons`: the sender closes its endpoint after a pause. */
static int abandon_rounds(void) { return all_forms() ? 16 : 6; }

static void abandons_of(int me)
{
	struct side side;
	unsigned good = 0, bad = 0, cancelled = 0;

	/* process 1, the receiver, has one endpoint */
	if (me == 1)
		open_long(&side, 500);
	for (int round = 0; round < abandon_rounds(); round++) {
		static struct op ops[COUNT];
		size_t len = round % 3 == 2 ? 300001 : round % 3 ? 4 * MIB : 70001;
		uint8_t *bytes = memory(COUNT * len);
		struct message m[COUNT];

		memset(ops, 0, sizeof ops);
		describe(m, len, (uint64_t)round);
		if (me == 0) {
			double start;

			open_long(&side, round);
			side.peer = address(&side, 500);
			for (unsigned i = 0; i < COUNT; i++)
				fill(bytes + i * len, len, m[i].seed);
			meet(&side, 2);
			for (unsigned i = 0; i < COUNT; i++)
				send_to(&side, side.peer, bytes + i * len, len, i, 0, &ops[i]);
			linger(&side, round / (all_forms() ? 4 : 2) * 0.0015);
			start = now();
			MUST(fi_close(&side.ep->fid));
			if (now() - start > 5)
				die("fi_close took %.1f s", now() - start);
			side.ep = NULL;
			memset(bytes, REUSED, COUNT * len);
			if (round % 2)
				munmap(bytes, COUNT * len);
			add(ROUND);
			meet(&side, 2);
			close_side(&side);
			continue;
		}
		address(&side, round);
		memset(bytes, GUARD, COUNT * len);
		if (round % 2)
			for (unsigned i = 0; i < COUNT; i++)
				receive_from(&side, FI_ADDR_UNSPEC, bytes + i * len, len, i, 0, &ops[i]);
		meet(&side, 2);
		if (round % 2 == 0) {
			UNTIL(told(ROUND) > (uint64_t)round, take_all(&side));
			for (unsigned i = 0; i < COUNT; i++)
				receive_from(&side, FI_ADDR_UNSPEC, bytes + i * len, len, i, 0, &ops[i]);
		}
		linger(&side, 0.1);
		for (unsigned i = 0; i < COUNT; i++)
			if (!ops[i].done)
				(void)fi_cancel(&side.ep->fid, &ops[i]);
		for (unsigned i = 0; i < COUNT; i++) {
			await(&side, &ops[i]);
			if (ops[i].err == 0) {
				IS(ops[i].entry.len == len);
				must_be(bytes + i * len, len, m[i].seed);
				good++;
			} else if (ops[i].err == FI_ECANCELED) {
				cancelled++;
			} else {
				bad++;
			}
		}
		meet(&side, 2);
		munmap(bytes, COUNT * len);
	}
	if (me == 1) {
		fprintf(stderr, "abandoned: %u received, %u in error, %u cancelled\n", good, bad, cancelled);
		close_side(&side);
	}
}

/* The receiver closes its endpoint. Its memory is its own afterwards. */
static void closes_of(int me)
{
	struct side side;
	unsigned good = 0, bad = 0;

	if (me == 0)
		open_long(&side, 500);
	for (int round = 0; round < (all_forms() ? 12 : 4); round++) {
		static struct op ops[COUNT];
		size_t len = round % 2 ? 4 * MIB : 300001;
		uint8_t *bytes = memory(COUNT * len);
		double start;

		memset(ops, 0, sizeof ops);
		if (me == 0) {
			fi_addr_t to = address(&side, round);

			for (unsigned i = 0; i < COUNT; i++)
				fill(bytes + i * len, len, i);
			meet(&side, 2);
			for (unsigned i = 0; i < COUNT; i++)
				send_to(&side, to, bytes + i * len, len, i, round % 3 ? 0 : FI_DELIVERY_COMPLETE, &ops[i]);
			start = now();
			for (unsigned i = 0; i < COUNT; i++) {
				UNTIL_WITHIN(BOUND, ops[i].done, take_all(&side));
				if (ops[i].err)
					bad++;
				else
					good++;
			}
			fprintf(stderr, "round %d: %.2f s\n", round, now() - start);
			meet(&side, 2);
			munmap(bytes, COUNT * len);
			continue;
		}
		open_long(&side, round);
		address(&side, 500);
		for (unsigned i = 0; i < COUNT / 2; i++)
			receive_from(&side, FI_ADDR_UNSPEC, bytes + i * len, len, i, 0, &ops[i]);
		meet(&side, 2);
		linger(&side, (all_forms() ? round / 2 : round) * 0.002);
		start = now();
		MUST(fi_close(&side.ep->fid));
		if (now() - start > 5)
			die("fi_close took %.1f s", now() - start);
		side.ep = NULL;
		memset(bytes, GUARD, COUNT * len);
		usleep(100000);
		IS(all_are(bytes, COUNT * len, GUARD));
		munmap(bytes, COUNT * len);
		meet(NULL, 2);
		close_side(&side);
	}
	if (me == 0) {
		fprintf(stderr, "sends to endpoints that close: %u completed, %u in error\n", good, bad);
		close_side(&side);
	}
}

/* Receives that are cancelled in the middle; then the message is received by another receive. */
static void cancels_of(int me)
{
	enum { TIMES = 40 };
	static struct op ops[TIMES], again[TIMES];
	size_t len = 4 * MIB;
	uint8_t *bytes = memory(len), *other = memory(len);
	unsigned cancelled = 0;
	struct side side;

	open_one_of_two(&side, me);
	for (unsigned i = 0; i < TIMES; i++) {
		if (me == 1) {
			memset(other, GUARD, len);
			receive_from(&side, FI_ADDR_UNSPEC, bytes, len, i, 0, &ops[i]);
		}
		fill(bytes, len, i + (me == 1));
		meet(&side, 2);
		if (me == 0) {
			send_to(&side, side.peer, bytes, len, i, i % 2 ? FI_DELIVERY_COMPLETE : 0, &ops[i]);
			await(&side, &ops[i]);
			IS(ops[i].err == 0);
			memset(bytes, REUSED, len);
			meet(&side, 2);
			continue;
		}
		/* until bytes have come, or a time */
		if (i % 4 == 0)
			linger(&side, i * 0.00003);
		else
			UNTIL(((volatile uint8_t *)bytes)[i * 997] != ((uint8_t *)bytes)[0] || ops[i].done || i % 4 == 1, take_all(&side));
		RETURNS(fi_cancel(&side.ep->fid, &ops[i]) == 0 || true, 1);
		await(&side, &ops[i]);
		if (ops[i].err) {
			IS(ops[i].err == FI_ECANCELED);
			IS(ops[i].error.op_context == &ops[i]);
			cancelled++;
			memset(bytes, REUSED, len);
			receive_from(&side, FI_ADDR_UNSPEC, other, len, i, 0, &again[i]);
			await(&side, &again[i]);
			if (again[i].err)
				die("time %u: the receive after a cancelled one: %s", i, fi_strerror(again[i].err));
			must_be(other, len, i);
			IS(all_are(bytes, len, REUSED));
		} else {
			must_be(bytes, len, i);
		}
		meet(&side, 2);
	}
	if (me == 1)
		fprintf(stderr, "%u of %u receives were cancelled\n", cancelled, TIMES);
	close_one_of_two(&side);
}

static void computes(void) { run_two(computes_of); }
static void sleeps(void) { run_two(sleeps_of); }
static void waits(void) { run_two(waits_of); }
static void abandons(void) { run_two(abandons_of); }
static void closes(void) { run_two(closes_of); }
static void cancels(void) { run_two(cancels_of); }

int main(int argc, char **argv)
{
	static const struct mode modes[] = {
		{ "computes", computes }, { "sleeps", sleeps }, { "waits", waits },	{ "leaves", leaves },
		{ "abandons", abandons }, { "closes", closes }, { "cancels", cancels },
	};

	return run_mode(modes, sizeof modes / sizeof *modes, argc, argv);
}
