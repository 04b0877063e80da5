/* Long messages by several threads, several endpoints, counters and the less common calls of fi_msg(3),
 * fi_tagged(3), fi_cntr(3) and fi_cq(3).
 *
 *   rdm_long_calls threads PROV NODE    4 threads of both processes send and receive on one endpoint (FI_THREAD_SAFE)
 *   rdm_long_calls endpoints PROV NODE  3 endpoints of each process on one completion queue
 *   rdm_long_calls counters PROV NODE   counters, no completion queue
 *   rdm_long_calls selective PROV NODE  FI_SELECTIVE_COMPLETION
 *   rdm_long_calls peek PROV NODE       FI_PEEK, FI_CLAIM and FI_DISCARD of unexpected messages
 *   rdm_long_calls multi PROV NODE      FI_MULTI_RECV, messages with lengths near FI_OPT_MIN_MULTI_RECV
 *
 * A further argument `auto` requests FI_PROGRESS_AUTO. Ends with 0, or says what went wrong. Plain
 * libfabric 1.17. */
#define _GNU_SOURCE
#include "rdm_long.h"

#include <pthread.h>

static void good(const struct op *op)
{
	IS(op->done == 1);
	if (op->err)
		die("%s", fi_strerror(op->err));
}

/* ---- threads ---- */

enum { THREADS = 4, DEPTH = 8 };

static uint64_t messages(void) { return all_forms() ? 160 : 40; }

static struct side shared;
static int this_process;

static void *sends_and_receives(void *argument)
{
	uint64_t thread = (uint64_t)(uintptr_t)argument;
	struct op outgoing[DEPTH] = { 0 }, incoming[DEPTH] = { 0 };
	size_t room = 700001;
	uint8_t *out = memory(DEPTH * room), *in = memory(DEPTH * room);

	for (uint64_t i = 0; i < messages() + DEPTH; i++) {
		uint64_t place = i % DEPTH, seed = thread << 32 | i, own = (uint64_t)this_process << 40, other = (uint64_t)(1 - this_process) << 40;
		size_t len = mixed(i * 4 + thread) % room;

		if (i >= DEPTH) {
			uint64_t old = i - DEPTH;

			await(&shared, &incoming[place]);
			good(&incoming[place]);
			IS(incoming[place].entry.tag == (thread << 32 | old));
			IS(incoming[place].entry.len == mixed(old * 4 + thread) % room);
			must_be(in + place * room, incoming[place].entry.len, other | thread << 32 | old);
			await(&shared, &outgoing[place]);
			good(&outgoing[place]);
		}
		if (i >= messages())
			continue;
		memset(&incoming[place], 0, sizeof *incoming);
		memset(&outgoing[place], 0, sizeof *outgoing);
		fill(out + place * room, len, own | seed);
		if (i % 3)
			PUT(&shared, fi_trecv(shared.ep, in + place * room, room, NULL, FI_ADDR_UNSPEC, seed, 0, &incoming[place]));
		PUT(&shared, fi_tsend(shared.ep, out + place * room, len, NULL, shared.peer, seed, &outgoing[place]));
		if (i % 3 == 0)
			PUT(&shared, fi_trecv(shared.ep, in + place * room, room, NULL, FI_ADDR_UNSPEC, seed, 0, &incoming[place]));
	}
	return NULL;
}

static void threads_of(int me)
{
	pthread_t threads[THREADS];

	this_process = me;
	wanted.threading = FI_THREAD_SAFE;
	open_one_of_two(&shared, me);
	IS(shared.info->domain_attr->threading == FI_THREAD_SAFE);
	for (uintptr_t i = 0; i < THREADS; i++)
		IS(pthread_create(&threads[i], NULL, sends_and_receives, (void *)i) == 0);
	for (int i = 0; i < THREADS; i++)
		IS(pthread_join(threads[i], NULL) == 0);
	close_one_of_two(&shared);
}

/* ---- several endpoints ---- */

static void endpoints_of(int me)
{
	enum { ENDS = 3, EACH = 6 };
	static struct op in_ops[ENDS][ENDS * EACH], out_ops[ENDS][ENDS][EACH];
	static struct message m[ENDS][ENDS][EACH];
	struct fid_ep *eps[ENDS];
	fi_addr_t others[ENDS];
	size_t room = 2 * MIB;
	uint8_t *out = memory(ENDS * ENDS * EACH * room), *in = memory(ENDS * ENDS * EACH * room);
	struct side side;

	wanted.caps = FI_MSG | FI_TAGGED | FI_SOURCE | FI_DIRECTED_RECV;
	wanted.mr_mode = FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
	open_domain_of(&side);
	side.tx = side.rx = queue(&side, 0);
	for (int i = 0; i < ENDS; i++) {
		eps[i] = endpoint_on(&side, 0);
		publish(eps[i], me * ENDS + i);
	}
	for (int i = 0; i < ENDS; i++)
		others[i] = address(&side, (1 - me) * ENDS + i);
	for (int from = 0; from < ENDS; from++)
		for (int to = 0; to < ENDS; to++)
			for (int i = 0; i < EACH; i++) {
				size_t len = mixed((uint64_t)(from * 100 + to * 10 + i)) % room;

				m[from][to][i] = (struct message){ .len = len, .room = room, .tag = (uint64_t)i, .tagged = true };
				/* one queue: receives from all endpoints, directed by source */
				if (i % 2)
					PUT(&side, fi_trecv(eps[to], in + (size_t)((to * ENDS + from) * EACH + i) * room, room, NULL, others[from], (uint64_t)i, 0,
							    &in_ops[to][from * EACH + i]));
			}
	meet(&side, 2);
	for (int i = 0; i < EACH; i++)
		for (int from = 0; from < ENDS; from++)
			for (int to = 0; to < ENDS; to++) {
				uint8_t *bytes = out + (size_t)((from * ENDS + to) * EACH + i) * room;

				fill(bytes, m[from][to][i].len, (uint64_t)(me * 1000 + from * 100 + to * 10 + i));
				PUT(&side, fi_tsend(eps[from], bytes, m[from][to][i].len, NULL, others[to], (uint64_t)i, &out_ops[from][to][i]));
			}
	linger(&side, 0.05);
	for (int from = 0; from < ENDS; from++)
		for (int to = 0; to < ENDS; to++)
			for (int i = 0; i < EACH; i += 2)
				PUT(&side, fi_trecv(eps[to], in + (size_t)((to * ENDS + from) * EACH + i) * room, room, NULL, others[from], (uint64_t)i, 0,
						    &in_ops[to][from * EACH + i]));
	for (int from = 0; from < ENDS; from++)
		for (int to = 0; to < ENDS; to++)
			for (int i = 0; i < EACH; i++) {
				struct op *op = &in_ops[to][from * EACH + i];

				await(&side, &out_ops[from][to][i]);
				sent_well(&out_ops[from][to][i], &m[from][to][i]);
				await(&side, op);
				received_well(op, &m[from][to][i], others[from]);
				must_be(in + (size_t)((to * ENDS + from) * EACH + i) * room, m[from][to][i].len,
					(uint64_t)((1 - me) * 1000 + from * 100 + to * 10 + i));
			}
	meet(&side, 2);
	for (int i = 0; i < ENDS; i++)
		MUST(fi_close(&eps[i]->fid));
	close_side(&side);
}

/* ---- counters ---- */

static void read_counters(struct side *side)
{
	(void)fi_cntr_read(side->sent);
	(void)fi_cntr_read(side->received);
}

static void meet_counting(struct side *side)
{
	static unsigned meetings;

	meetings++;
	add(MET);
	UNTIL(told(MET) >= 2 * (uint64_t)meetings, read_counters(side));
}

static void counters_of(int me)
{
	enum { COUNT = 24 };
	size_t room = MIB;
	uint8_t *out = memory(COUNT * room), *in = memory(COUNT * room);
	struct side side;
	uint64_t own = (uint64_t)me * 1000, other = (uint64_t)(1 - me) * 1000;

	wanted.caps = FI_MSG | FI_TAGGED;
	wanted.mr_mode = FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
	open_domain_of(&side);
	side.sent = counter(&side);
	side.received = counter(&side);
	side.ep = endpoint_on(&side, 0);
	publish(side.ep, me);
	side.peer = address(&side, 1 - me);
	for (int round = 0; round < 4; round++) {
		for (uint64_t i = 0; i < COUNT; i++)
			fill(out + i * room, room, own + i);
		if (round % 2 == 0)
			for (uint64_t i = 0; i < COUNT; i++)
				POST(&side, fi_trecv(side.ep, in + i * room, room, NULL, FI_ADDR_UNSPEC, i, 0, NULL));
		meet_counting(&side);
		for (uint64_t i = 0; i < COUNT; i++)
			POST(&side, fi_tsend(side.ep, out + i * room, room - i * 30001, NULL, side.peer, i, NULL));
		if (round % 2)
			for (uint64_t i = 0; i < COUNT; i++)
				POST(&side, fi_trecv(side.ep, in + i * room, room, NULL, FI_ADDR_UNSPEC, i, 0, NULL));
		/* the counter that is not waited for makes progress too */
		if (round < 2) {
			UNTIL(fi_cntr_read(side.received) == (uint64_t)(round + 1) * COUNT, (void)fi_cntr_read(side.sent));
			UNTIL(fi_cntr_read(side.sent) == (uint64_t)(round + 1) * COUNT, (void)fi_cntr_read(side.received));
		} else {
			int result = fi_cntr_wait(side.received, (uint64_t)(round + 1) * COUNT, 20000);

			if (result)
				die("fi_cntr_wait: %d: %llu received, %llu sent", result, (unsigned long long)fi_cntr_read(side.received),
				    (unsigned long long)fi_cntr_read(side.sent));
			/* messages of this process may wait for reads of the other one */
			RETURNS(fi_cntr_wait(side.sent, (uint64_t)(round + 1) * COUNT, 20000), 0);
		}
		for (uint64_t i = 0; i < COUNT; i++)
			must_be(in + i * room, room - i * 30001, other + i);
		meet_counting(&side);
	}
	IS(fi_cntr_readerr(side.sent) == 0 && fi_cntr_readerr(side.received) == 0);
	/* a truncated message is one in error, and none that has been received */
	if (me == 1)
		POST(&side, fi_trecv(side.ep, in, 100000, NULL, FI_ADDR_UNSPEC, 1, 0, NULL));
	meet_counting(&side);
	if (me == 0) {
		POST(&side, fi_tsend(side.ep, out, MIB, NULL, side.peer, 1, NULL));
		UNTIL(fi_cntr_read(side.sent) + fi_cntr_readerr(side.sent) == 4 * COUNT + 1, read_counters(&side));
	} else {
		UNTIL(fi_cntr_readerr(side.received) == 1, read_counters(&side));
		IS(fi_cntr_read(side.received) == 4 * COUNT);
	}
	meet_counting(&side);
	close_side(&side);
}

/* ---- FI_SELECTIVE_COMPLETION ---- */

static void selective_of(int me)
{
	enum { COUNT = 40 };
	static struct op ops[COUNT], shorts, after;
	size_t room = 500000;
	uint8_t *bytes = memory(COUNT * room);
	struct side side;

	wanted.caps = FI_MSG | FI_TAGGED | FI_SOURCE | FI_DIRECTED_RECV;
	wanted.mr_mode = FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
	open_domain_of(&side);
	side.tx = queue(&side, 0);
	side.rx = queue(&side, 0);
	side.sent = counter(&side);
	side.received = counter(&side);
	side.ep = endpoint_on(&side, FI_SELECTIVE_COMPLETION);
	publish(side.ep, me);
	side.peer = address(&side, 1 - me);
	for (uint64_t i = 0; i < COUNT; i++) {
		struct iovec iov = { bytes + i * room, room };
		struct fi_msg_tagged msg = { .msg_iov = &iov, .iov_count = 1, .addr = FI_ADDR_UNSPEC, .tag = i, .context = &ops[i] };

		if (me == 0)
			fill(bytes + i * room, room, i);
		else if (i % 4 == 0)
			PUT(&side, fi_trecvmsg(side.ep, &msg, FI_COMPLETION));
		else if (i % 4 == 1)
			PUT(&side, fi_trecvmsg(side.ep, &msg, 0));
		else
			PUT(&side, fi_trecv(side.ep, bytes + i * room, room, NULL, FI_ADDR_UNSPEC, i, 0, &ops[i]));
	}
	meet(&side, 2);
	for (uint64_t i = 0; me == 0 && i < COUNT; i++) {
		struct iovec iov = { bytes + i * room, room - i };
		struct fi_msg_tagged msg = { .msg_iov = &iov, .iov_count = 1, .addr = side.peer, .tag = i, .context = &ops[i] };

		if (i % 3 == 0)
			PUT(&side, fi_tsendmsg(side.ep, &msg, FI_COMPLETION | (i % 2 ? FI_DELIVERY_COMPLETE : 0)));
		else if (i % 3 == 1)
			PUT(&side, fi_tsendmsg(side.ep, &msg, i % 2 ? FI_TRANSMIT_COMPLETE : 0));
		else
			PUT(&side, fi_tsend(side.ep, bytes + i * room, room - i, NULL, side.peer, i, &ops[i]));
	}
	UNTIL(fi_cntr_read(me ? side.received : side.sent) == COUNT, take_all(&side));
	linger(&side, 0.02);
	for (uint64_t i = 0; i < COUNT; i++) {
		IS(ops[i].done == (me == 0 ? i % 3 == 0 : i % 4 == 0));
		if (me == 1)
			must_be(bytes + i * room, room - i, i);
		IS(!ops[i].done || ops[i].err == 0);
	}
	/* an error has an entry; what follows it, none */
	if (me == 1) {
		PUT(&side, fi_trecv(side.ep, bytes, 1000, NULL, FI_ADDR_UNSPEC, 100, 0, &shorts));
		PUT(&side, fi_trecv(side.ep, bytes + room, room, NULL, FI_ADDR_UNSPEC, 101, 0, &after));
	}
	meet(&side, 2);
	if (me == 0) {
		PUT(&side, fi_tsend(side.ep, bytes, room, NULL, side.peer, 100, &shorts));
		PUT(&side, fi_tsend(side.ep, bytes, room, NULL, side.peer, 101, &after));
		UNTIL(fi_cntr_read(side.sent) + fi_cntr_readerr(side.sent) == COUNT + 2, take_all(&side));
	} else {
		UNTIL(fi_cntr_read(side.received) == COUNT + 1 && fi_cntr_readerr(side.received) == 1, take_all(&side));
		UNTIL(shorts.done, take_all(&side));
		IS(shorts.err == FI_ETRUNC && shorts.error.olen == room - 1000);
		must_be(bytes + room, room, 0);
	}
	IS(!after.done);
	meet(&side, 2);
	close_side(&side);
}

/* ---- FI_PEEK ---- */

/* A search, or a receive of a message that was claimed. */
static void search(struct side *side, uint8_t *bytes, size_t len, uint64_t tag, uint64_t ignore, uint64_t flags, struct op *op)
{
	struct iovec iov = { bytes, len };
	struct fi_msg_tagged msg = { .msg_iov = &iov, .iov_count = bytes ? 1 : 0, .addr = FI_ADDR_UNSPEC, .tag = tag, .ignore = ignore, .context = op };

	atomic_store(&op->done, 0);
	PUT(side, fi_trecvmsg(side->ep, &msg, flags));
	await(side, op);
}

static void found(const struct op *op, uint64_t tag, size_t len)
{
	if (op->err)
		die("a search for tag %llu: %s", (unsigned long long)tag, fi_strerror(op->err));
	IS((op->entry.flags & (FI_RECV | FI_TAGGED)) == (FI_RECV | FI_TAGGED));
	IS((op->entry.flags & FI_REMOTE_CQ_DATA) && op->entry.data == ~tag);
	IS(op->entry.tag == tag);
	if (op->entry.len != len)
		die("a search for tag %llu: length %zu, not %zu", (unsigned long long)tag, op->entry.len, len);
}

static void peek_of(int me)
{
	static const size_t lens[] = { 10, 5000, 20000, 70000, 300000, MIB, 6 * MIB };
	enum { FATES = 8 };
	size_t room = 7 * MIB;
	uint8_t *bytes = memory(room), *source;
	struct side side;

	open_one_of_two(&side, me);
	source = memory(FATES * room);
	for (size_t which = 0; which < sizeof lens / sizeof *lens; which += all_forms() ? 1 : 2) {
		static struct op ops[FATES], claims[2];
		struct op op = { 0 };
		size_t len = lens[which];

		memset(ops, 0, sizeof ops);
		memset(claims, 0, sizeof claims);
		meet(&side, 2);
		if (me == 1) {
			search(&side, NULL, 0, 0, 0, FI_PEEK, &op);
			IS(op.err == FI_ENOMSG);
		}
		meet(&side, 2);
		if (me == 0) {
			for (uint64_t i = 0; i < FATES; i++) {
				fill(source + i * room, len + i, which * 100 + i);
				PUT(&side, fi_tsenddata(side.ep, source + i * room, len + i, NULL, ~i, side.peer, i, &ops[i]));
			}
			meet(&side, 2);
			for (uint64_t i = 0; i < FATES; i++) {
				await(&side, &ops[i]);
				if (ops[i].err)
					die("send %llu of %zu bytes: %s", (unsigned long long)i, len, fi_strerror(ops[i].err));
			}
			continue;
		}
		meet(&side, 2);
		/* all messages come in their order */
		UNTIL(op.err == 0, search(&side, NULL, 0, FATES - 1, 0, FI_PEEK, &op));
		found(&op, FATES - 1, len + FATES - 1);
		for (uint64_t i = 0; i < FATES; i++) {
			search(&side, NULL, 0, i, 0, FI_PEEK, &op);
			found(&op, i, len + i);
		}
		/* 0 and 1 are claimed; a search with a mask finds the next one */
		search(&side, NULL, 0, 0, 0, FI_PEEK | FI_CLAIM, &claims[0]);
		found(&claims[0], 0, len);
		search(&side, NULL, 0, 0, UINT64_MAX, FI_PEEK | FI_CLAIM, &claims[1]);
		found(&claims[1], 1, len + 1);
		search(&side, NULL, 0, 0, UINT64_MAX, FI_PEEK, &op);
		found(&op, 2, len + 2);
		search(&side, NULL, 0, 0, 0, FI_PEEK, &op);
		IS(op.err == FI_ENOMSG);
		/* 2 is discarded */
		search(&side, NULL, 0, 2, 0, FI_PEEK | FI_DISCARD, &op);
		found(&op, 2, len + 2);
		search(&side, NULL, 0, 2, 0, FI_PEEK, &op);
		IS(op.err == FI_ENOMSG);
		/* a receive of any tag is given 3 */
		memset(&op, 0, sizeof op);
		memset(bytes, GUARD, room);
		PUT(&side, fi_trecv(side.ep, bytes, room, NULL, FI_ADDR_UNSPEC, 0, UINT64_MAX, &op));
		await(&side, &op);
		found(&op, 3, len + 3);
		must_be(bytes, len + 3, which * 100 + 3);
		/* the claimed ones: the second is received, the first is discarded */
		search(&side, bytes, room, 1, 0, FI_CLAIM, &claims[1]);
		found(&claims[1], 1, len + 1);
		must_be(bytes, len + 1, which * 100 + 1);
		search(&side, NULL, 0, 0, 0, FI_CLAIM | FI_DISCARD, &claims[0]);
		IS(claims[0].err == 0);
		/* 4 is claimed and truncated */
		memset(&claims[0], 0, sizeof claims[0]);
		search(&side, NULL, 0, 4, 0, FI_PEEK | FI_CLAIM, &claims[0]);
		found(&claims[0], 4, len + 4);
		memset(bytes, GUARD, room);
		search(&side, bytes, len - 3, 4, 0, FI_CLAIM, &claims[0]);
		IS(claims[0].err == FI_ETRUNC && claims[0].error.olen == 7 && claims[0].error.len == len - 3);
		IS(bytes[len - 3] == GUARD);
		/* a receive of 5 is cancelled after it has been posted, or completes */
		memset(&op, 0, sizeof op);
		PUT(&side, fi_trecv(side.ep, bytes, room, NULL, FI_ADDR_UNSPEC, 5, 0, &op));
		(void)fi_cancel(&side.ep->fid, &op);
		await(&side, &op);
		if (op.err) {
			IS(op.err == FI_ECANCELED);
			search(&side, NULL, 0, 5, 0, FI_PEEK | FI_DISCARD, &op);
			found(&op, 5, len + 5);
		} else {
			must_be(bytes, len + 5, which * 100 + 5);
		}
		/* a search with a buffer: bytes, or none */
		memset(bytes, GUARD, room);
		search(&side, bytes, room, 6, 0, FI_PEEK, &op);
		found(&op, 6, len + 6);
		if (op.entry.buf)
			must_be(bytes, len + 6, which * 100 + 6);
		for (uint64_t i = 6; i < FATES; i++) {
			memset(&op, 0, sizeof op);
			PUT(&side, fi_trecv(side.ep, bytes, room, NULL, FI_ADDR_UNSPEC, i, 0, &op));
			await(&side, &op);
			found(&op, i, len + i);
			must_be(bytes, len + i, which * 100 + i);
		}
	}
	close_one_of_two(&side);
}

/* ---- FI_MULTI_RECV ---- */

#define LEAST (64 * KIB)
#define STEP (512 * KIB) /* between sources */

static void multi_of(int me)
{
	enum { BUFFERS = 4, MOST = 400 };
	static struct op ops[MOST];
	size_t size = 2 * MIB;
	struct side side;
	uint8_t *bytes = memory(BUFFERS * size), *source;

	wanted.caps = FI_MULTI_RECV;
	open_one_of_two(&side, me);
	/* in the last two rounds, buffers stay posted with less room than the messages have bytes */
	for (int round = 0; round < 8; round++) {
		unsigned count = round < 2 ? 30 : round < 6 ? 120 : 18;
		size_t lens[MOST];

		for (unsigned i = 0; i < count; i++)
			lens[i] = round >= 6	   ? 300000 + i * 1000
				  : round % 3 == 0 ? LEAST - 20 + i
				  : round % 3 == 1 ? LEAST + (i % 2 ? 0 : 1)
						   : mixed(i) % LEAST;
		memset(ops, 0, sizeof ops);
		if (me == 0) {
			source = memory(count * STEP);
			meet(&side, 2);
			for (unsigned i = 0; i < count; i++) {
				fill(source + i * STEP, lens[i], i);
				PUT(&side, fi_senddata(side.ep, source + i * STEP, lens[i], NULL, i, side.peer, &ops[i]));
			}
			add(SENT);
			for (unsigned i = 0; i < count; i++) {
				await(&side, &ops[i]);
				good(&ops[i]);
			}
			meet(&side, 2);
			munmap(source, count * STEP);
			continue;
		}
		{
			size_t used[BUFFERS] = { 0 };
			bool posted[BUFFERS] = { 0 }, released[BUFFERS] = { 0 };
			unsigned came = 0, truncated = 0;
			uint8_t *places[MOST] = { 0 };
			size_t least = LEAST;

			if (round >= 6)
				least = 1000;
			if (round == 0 || round == 6)
				MUST(fi_setopt(&side.ep->fid, FI_OPT_ENDPOINT, FI_OPT_MIN_MULTI_RECV, &least, sizeof least));
			for (int late = round >= 3 && round != 6, i = 0; i < 2; i++) {
				if (i == late)
					for (size_t b = 0; b < BUFFERS; b++) {
						struct iovec iov = { bytes + b * size, size };
						struct fi_msg msg = { .msg_iov = &iov, .iov_count = 1, .addr = FI_ADDR_UNSPEC, .context = (void *)(b + 1) };

						memset(bytes + b * size, GUARD, size);
						PUT(&side, fi_recvmsg(side.ep, &msg, FI_MULTI_RECV));
						posted[b] = true;
					}
				if (i == 0)
					meet(NULL, 2); /* entries of the buffers are read below */
				if (i == 0 && late) {
					UNTIL(told(SENT) > (uint64_t)round, take_all(&side));
					linger(&side, 0.05);
				}
			}
			UNTIL(came + truncated == count, {
				struct fi_cq_tagged_entry entry;
				struct fi_cq_err_entry error = { 0 };
				ssize_t got = fi_cq_read(side.rx, &entry, 1);
				size_t b;

				(void)fi_cq_read(side.tx, NULL, 0);
				if (got == -FI_EAVAIL) {
					IS(fi_cq_readerr(side.rx, &error, 0) == 1);
					if (error.err != FI_ETRUNC)
						die("round %d: message %u: %s", round, came, fi_strerror(error.err));
					truncated++;
					b = (size_t)error.op_context - 1;
					IS(b < BUFFERS && !released[b] && error.data < count && (error.flags & FI_REMOTE_CQ_DATA));
					IS(ops[error.data].done++ == 0 && error.len + error.olen == lens[error.data]);
					must_be(error.buf, error.len, error.data);
					used[b] = size; /* no room is left */
					if (error.flags & FI_MULTI_RECV)
						released[b] = true;
				} else if (got == 1) {
					b = (size_t)entry.op_context - 1;
					IS(b < BUFFERS && posted[b] && !released[b]);
					if (entry.flags & FI_RECV) {
						unsigned which = (unsigned)entry.data;
						uint8_t *at = entry.buf;

						IS((entry.flags & (FI_MSG | FI_TAGGED)) == FI_MSG);
						IS((entry.flags & FI_REMOTE_CQ_DATA) && which < count && ops[which].done == 0);
						ops[which].done = 1;
						IS(entry.len == lens[which]);
						IS(at >= bytes + b * size && at + entry.len <= bytes + (b + 1) * size);
						must_be(at, entry.len, which);
						places[which] = at;
						if (used[b] < (size_t)(at + entry.len - (bytes + b * size)))
							used[b] = (size_t)(at + entry.len - (bytes + b * size));
						came++;
					}
					if (entry.flags & FI_MULTI_RECV) {
						IS(size - used[b] < least + 64);
						released[b] = true;
					}
				} else {
					IS(got == -FI_EAGAIN);
				}
			});
			/* buffers that are left are cancelled, and that releases them */
			for (size_t b = 0; b < BUFFERS; b++)
				if (!released[b])
					(void)fi_cancel(&side.ep->fid, (void *)(b + 1));
			UNTIL(released[0] && released[1] && released[2] && released[3], {
				struct fi_cq_tagged_entry entry;
				struct fi_cq_err_entry error = { 0 };
				ssize_t got = fi_cq_read(side.rx, &entry, 1);

				if (got == -FI_EAVAIL) {
					IS(fi_cq_readerr(side.rx, &error, 0) == 1);
					IS(error.err == FI_ECANCELED);
					released[(size_t)error.op_context - 1] = true;
				} else if (got == 1) {
					IS(entry.flags == FI_MULTI_RECV || (entry.flags & FI_MULTI_RECV));
					released[(size_t)entry.op_context - 1] = true;
				}
			});
			/* no message has been written over another one */
			for (unsigned i = 0; i < count; i++)
				if (places[i])
					must_be(places[i], lens[i], i);
			fprintf(stderr, "round %d: %u came, %u truncated; used %zu %zu %zu %zu\n", round, came, truncated, used[0], used[1], used[2], used[3]);
		}
		meet(&side, 2);
	}
	close_one_of_two(&side);
}

static void threads(void) { run_two(threads_of); }
static void endpoints(void) { run_two(endpoints_of); }
static void counters(void) { run_two(counters_of); }
static void selective(void) { run_two(selective_of); }
static void peek(void) { run_two(peek_of); }
static void multi(void) { run_two(multi_of); }

int main(int argc, char **argv)
{
	static const struct mode modes[] = {
		{ "threads", threads },	    { "endpoints", endpoints }, { "counters", counters },
		{ "selective", selective }, { "peek", peek },		{ "multi", multi },
	};

	return run_mode(modes, sizeof modes / sizeof *modes, argc, argv);
}
