/* Streams of long messages of processes that are killed or stopped, from fi_msg(3), fi_cq(3) and
 * fi_endpoint(3). Each posted operation completes exactly once, within a bounded time; a message whose
 * send has completed is received; no receive completes with success and other bytes than those of its
 * message.
 *
 *   rdm_long_death sender PROV NODE     the sender is killed in the middle; a third process goes on
 *   rdm_long_death receiver PROV NODE   the receiver is killed in the middle; a third process goes on
 *   rdm_long_death stopped PROV NODE    either process is stopped in the middle, for 0.3 s or 3 s
 *
 * WEFT_RDM_LONG=1: more rounds. A further argument `auto` requests FI_PROGRESS_AUTO. Ends with 0, or
 * says what went wrong. Plain libfabric 1.17. */
#define _GNU_SOURCE
#include "rdm_long.h"

enum { STATE = WORD_2, COMPLETED, GONE, ROUND, PIDS = 16 }; /* words of the board */

enum { STREAM = 32, LATER = 60 };

static int rounds(void) { return all_forms() ? 8 : 3; }

/* Sends messages: the tag has the round, the contents the number. COMPLETED: how many of the first have completed. */
static void endless(struct side *side, fi_addr_t to, size_t len, uint64_t tag, uint64_t count)
{
	static struct op ops[STREAM];
	uint8_t *bytes = memory(STREAM * len);

	for (uint64_t i = 0; i < count; i++) {
		struct op *op = &ops[i % STREAM];

		if (i >= STREAM) {
			await(side, op);
			if (op->err)
				die("message %llu: %s", (unsigned long long)i, fi_strerror(op->err));
			if (count == UINT32_MAX)
				put(COMPLETED, i - STREAM + 1);
		}
		memset(op, 0, sizeof *op);
		fill(bytes + i % STREAM * len, len, tag << 32 | i);
		send_to(side, to, bytes + i % STREAM * len, len, tag << 32 | i, 0, op);
	}
	for (uint64_t i = count > STREAM ? count - STREAM : 0; i < count; i++) {
		await(side, &ops[i % STREAM]);
		if (ops[i % STREAM].err)
			die("message %llu: %s", (unsigned long long)i, fi_strerror(ops[i % STREAM].err));
	}
}

static size_t length_of_round(int round) { return round % 4 == 3 ? 6 * MIB : round % 2 ? MIB : 100001; }

static void victim_sender(int round)
{
	struct side side;

	open_long(&side, 1 + 2 * round);
	endless(&side, address(&side, 0), length_of_round(round), 2 * (uint64_t)round + 1, UINT32_MAX);
}

static void third_sender(int round)
{
	struct side side;

	open_long(&side, 2 + 2 * round);
	UNTIL_WITHIN(60, told(STATE) > (uint64_t)round, usleep(1000));
	endless(&side, address(&side, 0), length_of_round(round), 2 * (uint64_t)round + 2, LATER);
	close_side(&side);
}

static void surviving_receiver(int ignored)
{
	static struct op ops[STREAM], directed;
	struct side side;

	(void)ignored;
	open_long(&side, 0);
	for (int round = 0; round < rounds(); round++) {
		size_t len = length_of_round(round);
		uint64_t victim = 2 * (uint64_t)round + 1, third = victim + 1, expected = 0, came = 0;
		uint8_t *bytes = memory(STREAM * len), *more = memory(len);
		unsigned bad = 0, limit = 5 + (unsigned)round * 7;
		fi_addr_t from = address(&side, 1 + 2 * round);
		pid_t pid;
		double killed = 0;
		bool late = round % 4 == 2;
		static bool arrived[100000];
		uint64_t sent = 0;

		memset(arrived, 0, sizeof arrived);
		put(COMPLETED, 0);
		memset(ops, 0, sizeof ops);
		memset(&directed, 0, sizeof directed);
		receive_from(&side, from, more, len, UINT64_MAX, 0, &directed); /* its message does not come */
		if (late)
			linger(&side, 0.2);
		for (unsigned i = 0; !late && i < STREAM; i++)
			receive_from(&side, FI_ADDR_UNSPEC, bytes + i * len, len, 0, UINT64_MAX >> 1, &ops[i]);
		UNTIL((pid = (pid_t)told(PIDS + round)), usleep(100));
		for (uint64_t next = 0; expected < LATER; next++) {
			struct op *op = &ops[next % STREAM];

			if (!killed && (late || came == limit)) {
				if (!late)
					linger(&side, round * 0.0003);
				kill(pid, SIGKILL);
				killed = now();
				UNTIL(told(GONE) > (uint64_t)round, usleep(100)); /* the victim has ended */
				sent = told(COMPLETED);
				add(STATE); /* the third process sends */
			}
			if (late && next == 0)
				for (unsigned i = 0; i < STREAM; i++)
					receive_from(&side, FI_ADDR_UNSPEC, bytes + i * len, len, 0, UINT64_MAX >> 1, &ops[i]);
			/* any of them */
			UNTIL_WITHIN(BOUND, op->done || ({
				bool any = false;
				for (unsigned i = 0; i < STREAM; i++)
					if (ops[i].done) {
						op = &ops[i];
						any = true;
					}
				any;
			}), take_all(&side));
			if (op->err) {
				IS(killed > 0 && op->err != FI_ETRUNC && op->err != FI_ECANCELED);
				bad++;
			} else {
				uint64_t tag = op->entry.tag;

				IS(op->entry.len == len);
				must_be(bytes + (size_t)(op - ops) * len, len, tag);
				if (tag >> 32 == third)
					expected++;
				else
					IS(tag >> 32 == victim);
				if (tag >> 32 == victim)
					arrived[tag & UINT32_MAX] = true;
				came++;
			}
			memset(op, 0, sizeof *op);
			receive_from(&side, FI_ADDR_UNSPEC, bytes + (size_t)(op - ops) * len, len, 0, UINT64_MAX >> 1, op);
		}
		for (unsigned i = 0; i < STREAM; i++)
			if (!ops[i].done)
				(void)fi_cancel(&side.ep->fid, &ops[i]); /* or it has completed in error */
		(void)fi_cancel(&side.ep->fid, &directed);
		for (unsigned i = 0; i < STREAM; i++) {
			UNTIL_WITHIN(BOUND, ops[i].done, take_all(&side));
			/* a message of the victim can come last */
			if (ops[i].err == 0) {
				IS(ops[i].entry.tag >> 32 == victim && ops[i].entry.len == len);
				must_be(bytes + i * len, len, ops[i].entry.tag);
				arrived[ops[i].entry.tag & UINT32_MAX] = true;
			}
		}
		UNTIL_WITHIN(BOUND, directed.done, take_all(&side));
		for (uint64_t i = 0; i < sent; i++)
			if (!arrived[i])
				die("round %d: message %llu of %llu that had completed did not come", round, (unsigned long long)i, (unsigned long long)sent);
		fprintf(stderr, "round %d: %llu completed, %llu came, %u in error, %.2f s after the kill\n", round, (unsigned long long)sent, (unsigned long long)came, bad, now() - killed);
		munmap(bytes, STREAM * len);
		munmap(more, len);
		add(ROUND);
	}
	close_side(&side);
}

static void sender(void)
{
	pid_t survivor = start("receiver", surviving_receiver, 0);

	for (int round = 0; round < rounds(); round++) {
		int status;
		pid_t victim, third = start("third", third_sender, round);

		victim = start("victim", victim_sender, round);
		put(PIDS + round, (uint64_t)victim);
		IS(waitpid(victim, &status, 0) == victim);
		if (!WIFSIGNALED(status))
			die("the victim: status %x", status);
		add(GONE);
		ends_well(third, "third");
		/* no message of the next victim comes before */
		UNTIL_WITHIN(60, told(ROUND) > (uint64_t)round || waitpid(survivor, &status, WNOHANG) == survivor, usleep(1000));
		if (told(ROUND) <= (uint64_t)round)
			die("the receiver has ended");
	}
	ends_well(survivor, "receiver");
}

static void victim_receiver(int round)
{
	static struct op ops[STREAM];
	struct side side;
	size_t len = length_of_round(round);
	uint8_t *bytes = memory(STREAM * len);

	open_long(&side, 1 + 2 * round);
	address(&side, 0);
	put(PIDS + round, (uint64_t)getpid());
	/* of each 4 messages, one has no receive */
	for (uint64_t i = 0;; i++) {
		struct op *op = &ops[i % STREAM];

		if (i % 4 == 3)
			continue;
		if (i >= STREAM)
			UNTIL_WITHIN(60, op->done, take_all(&side));
		memset(op, 0, sizeof *op);
		receive_from(&side, FI_ADDR_UNSPEC, bytes + i % STREAM * len, len, i, 0, op);
	}
}

static void third_receiver(int ignored)
{
	struct side side;
	uint8_t *bytes = memory(8 * MIB);

	(void)ignored;
	open_long(&side, 100);
	address(&side, 0);
	for (;;) {
		struct op op = { 0 };
		uint64_t tag;

		receive_from(&side, FI_ADDR_UNSPEC, bytes, 8 * MIB, 0, UINT64_MAX, &op);
		UNTIL_WITHIN(60, op.done, take_all(&side));
		IS(op.err == 0);
		tag = op.entry.tag;
		if (tag == UINT64_MAX)
			break;
		must_be(bytes, op.entry.len, tag);
	}
	close_side(&side);
}

static void surviving_sender(int ignored)
{
	static struct op ops[STREAM], others[STREAM];
	struct side side;
	fi_addr_t third;
	struct op last = { 0 };

	(void)ignored;
	open_long(&side, 0);
	third = address(&side, 100);
	for (int round = 0; round < rounds(); round++) {
		size_t len = length_of_round(round);
		uint8_t *bytes = memory(2 * STREAM * len), *more = bytes + STREAM * len;
		fi_addr_t to;
		double killed;
		unsigned good = 0, bad = 0;

		memset(ops, 0, sizeof ops);
		memset(others, 0, sizeof others);
		add(STATE); /* the victim of this round starts */
		to = address(&side, 1 + 2 * round);
		UNTIL(told(PIDS + round), usleep(100));
		for (unsigned i = 0; i < STREAM; i++) {
			fill(bytes + i * len, len, i);
			fill(more + i * len, len, i + 1000 * (uint64_t)round);
		}
		for (unsigned i = 0; i < STREAM; i++) {
			send_to(&side, to, bytes + i * len, len, i, i % 3 ? 0 : FI_DELIVERY_COMPLETE, &ops[i]);
			send_to(&side, third, more + i * len, len, i + 1000 * (uint64_t)round, 0, &others[i]);
		}
		UNTIL(ops[0].done, take_all(&side)); /* the connection exists */
		linger(&side, round * 0.001);
		kill((pid_t)told(PIDS + round), SIGKILL);
		killed = now();
		for (unsigned i = 0; i < STREAM; i++) {
			UNTIL_WITHIN(BOUND, ops[i].done, take_all(&side));
			if (ops[i].err)
				bad++;
			else
				good++;
			UNTIL_WITHIN(BOUND, others[i].done, take_all(&side));
			IS(others[i].err == 0);
		}
		fprintf(stderr, "round %d: %u completed, %u in error, %.2f s after the kill\n", round, good, bad, now() - killed);
		munmap(bytes, 2 * STREAM * len);
	}
	send_to(&side, third, NULL, 0, UINT64_MAX, 0, &last);
	await(&side, &last);
	close_side(&side);
}

static void receiver(void)
{
	pid_t survivor = start("sender", surviving_sender, 0), third = start("third", third_receiver, 0);

	for (int round = 0; round < rounds(); round++) {
		int status;
		pid_t victim;

		UNTIL_WITHIN(60, told(STATE) > (uint64_t)round || waitpid(survivor, &status, WNOHANG) == survivor, usleep(1000));
		if (told(STATE) <= (uint64_t)round)
			die("the sender has ended");
		victim = start("victim", victim_receiver, round);
		IS(waitpid(victim, &status, 0) == victim);
		if (!WIFSIGNALED(status))
			die("the victim: status %x", status);
	}
	ends_well(survivor, "sender");
	ends_well(third, "third");
}

/* ---- SIGSTOP ---- */

static uint64_t stream(void) { return all_forms() ? 1000 : 300; }

static void stopped_of(int me)
{
	static struct op ops[STREAM];
	struct side side;
	size_t len = MIB + 1;

	open_one_of_two(&side, me);
		if (me == 0) {
		endless(&side, side.peer, len, 0, stream());
	} else {
		uint8_t *bytes = memory(STREAM * len);

		for (uint64_t i = 0; i < stream() + STREAM; i++) {
			struct op *op = &ops[i % STREAM];
			uint8_t *place = bytes + i % STREAM * len;

			if (i >= STREAM) {
				await(&side, op);
				if (op->err)
					die("message %llu: %s", (unsigned long long)i - STREAM, fi_strerror(op->err));
				must_be(place, len, i - STREAM);
				add(STATE);
			}
			memset(op, 0, sizeof *op);
			if (i < stream())
				receive_from(&side, FI_ADDR_UNSPEC, place, len, i, 0, op);
		}
	}
	close_one_of_two(&side);
}

static void stopped(void)
{
	pid_t pids[2] = { start("process 0", stopped_of, 0), start("process 1", stopped_of, 1) };

	for (int i = 0; i < 4; i++) {
		UNTIL(told(STATE) >= stream() / 10 + (uint64_t)i * stream() / 5, usleep(300));
		usleep((useconds_t)i * 700);
		kill(pids[i % 2], SIGSTOP);
		usleep(i < 2 && all_forms() ? 3000000 : 300000);
		kill(pids[i % 2], SIGCONT);
	}
	ends_well(pids[0], "process 0");
	ends_well(pids[1], "process 1");
}

int main(int argc, char **argv)
{
	static const struct mode modes[] = { { "sender", sender }, { "receiver", receiver }, { "stopped", stopped } };

	return run_mode(modes, sizeof modes / sizeof *modes, argc, argv);
}
