/* RMA of endpoints with many peers, from fi_rma(3), fi_mr(3), fi_cq(3), fi_cntr(3) and
 * fi_endpoint(3), between two processes:
 *
 *   rdm_rma lengths PROV NODE    writes and reads of 0 bytes to 8 MiB, aligned and not; the bytes
 *                                around them stay
 *   rdm_rma calls PROV NODE      each call; up to iov_limit local and rma_iov_limit remote buffers
 *   rdm_rma data PROV NODE       remote CQ data: each arrives once, after its bytes, and uses no
 *                                receive
 *   rdm_rma levels PROV NODE     completion levels
 *   rdm_rma fence PROV NODE      FI_FENCE
 *   rdm_rma order PROV NODE      each bit of msg_order that is offered
 *   rdm_rma selective PROV NODE  FI_SELECTIVE_COMPLETION
 *   rdm_rma counters PROV NODE   counters alone, at both sides; fi_cntr_wait
 *   rdm_rma first PROV NODE      each kind of call as the first one of an endpoint
 *   rdm_rma full PROV NODE       calls until -FI_EAGAIN, then their completions
 *   rdm_rma more PROV NODE       FI_MORE
 *
 * A further argument `auto` requests FI_PROGRESS_AUTO; NODE `-` stands for none. Ends with 0,
 * with 77 if the mode is not offered, or says what went wrong. Plain libfabric 1.17. */
#define _GNU_SOURCE
#include "rdm_rma.h"

static void lengths(void)
{
	static const size_t lengths[] = { 0, 1, 2, 7, 8, 9, 63, 64, 65, 255, 1000, 4095, 4096, 4097, 8192, 16385, 65535, 65537, 300001, MIB - 1, MIB, 4 * MIB + 3, LARGEST };
	struct side side;
	uint64_t seed = 0;

	begin(&side, CAPS_RMA);
	for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++)
		for (unsigned how = 0; how < 4; how++) {
			struct op op = { .call = how % 2 ? READ : WRITE, .len = lengths[i], .locals = 1, .remotes = 1, .seed = ++seed, .shift = how / 2 * 3 };

			if (op.len <= side.info->ep_attr->max_msg_size)
				one_op(&side, &op);
		}
	finish(&side);
}

static void calls(void)
{
	static const size_t lengths[] = { 0, 40, 5000, 300001 };
	struct side side;
	uint64_t seed = 0;

	begin(&side, CAPS_RMA);
	size_t most_local = side.info->tx_attr->iov_limit, most_remote = side.info->tx_attr->rma_iov_limit;
	IS(most_local >= 1 && most_remote >= 1 && most_local <= MOST && most_remote <= MOST);
	for (unsigned i = 0; i < sizeof lengths / sizeof *lengths; i++)
		for (int call = 0; call < CALLS; call++) {
			struct op op = { .call = call, .len = lengths[i] };

			if (is_injected(call) && op.len > side.info->tx_attr->inject_size)
				op.len = side.info->tx_attr->inject_size - i + 1;
			for (op.locals = 1; op.locals <= (is_vector(call) || is_msg(call) ? most_local : 1); op.locals++)
				for (op.remotes = 1; op.remotes <= (is_msg(call) ? most_remote : 1); op.remotes++) {
					if (op.remotes > 3 && op.remotes != most_remote)
						continue;
					op.seed = ++seed;
					one_op(&side, &op);
				}
		}
	if (me == 0) {
		size_t most = side.info->tx_attr->inject_size;

		IS(fi_inject_write(side.ep, local, most + 1, side.peer, there[0].addr, there[0].key) < 0);
	}
	finish(&side);
}

static void data(void)
{
	enum { COUNT = 2000, LEN = 48 };
	struct side side;
	static uint8_t seen[COUNT], text[16];
	struct outcome outcome;

	begin(&side, CAPS_RMA);
	if (me == 1) {
		POST(&side, fi_recv(side.ep, text, sizeof text, NULL, FI_ADDR_UNSPEC, text));
		meet(&side);
		for (unsigned i = 0; i < COUNT; i++) {
			uint64_t n = REMOTE_DATA(&side) ^ 0xfeedfacecafe0000ULL;

			IS(n < COUNT && !seen[n]);
			seen[n] = 1;
			PAINTED(memory + n * LEN, LEN, n);
		}
		meet(&side);
		outcome = OUTCOME(&side, side.rx);
		IS(outcome.err == 0 && outcome.entry.op_context == text && outcome.entry.len == 5);
		IS(KIND(outcome.entry.flags) == (FI_MSG | FI_RECV) && !memcmp(text, "hello", 5));
	} else {
		unsigned completed = 0;

		meet(&side);
		for (unsigned i = 0; i < COUNT; i++) {
			paint(local + i * LEN, LEN, i);
			if (i % 2)
				POST(&side, fi_inject_writedata(side.ep, local + i * LEN, LEN, i ^ 0xfeedfacecafe0000ULL, side.peer, there[0].addr + i * LEN, there[0].key));
			else
				POST(&side, fi_writedata(side.ep, local + i * LEN, LEN, NULL, i ^ 0xfeedfacecafe0000ULL, side.peer, there[0].addr + i * LEN, there[0].key, local));
			for (; completed < (i + 1) / 2 && i % 50 == 49; completed++)
				DONE(&side, local, WRITTEN);
		}
		for (; completed < COUNT / 2; completed++)
			DONE(&side, local, WRITTEN);
		meet(&side);
		POST(&side, fi_inject(side.ep, "hello", 5, side.peer));
	}
	finish(&side);
}

/* Process 0 writes with `flags`, or as the endpoint's op_flags say, and tells process 1 in shared
 * memory when the completion has come. Process 1 calls nothing. */
static void level(uint64_t flags, uint64_t op_flags, const char *what)
{
	static const size_t lengths[] = { 8, 1000, 20000, MIB + 5 };
	struct side side;
	bool delivered = (flags | op_flags) & (FI_DELIVERY_COMPLETE | FI_COMMIT_COMPLETE);

	needed.op_flags = op_flags;
	needed.region_flags = flags & FI_COMMIT_COMPLETE ? FI_RMA_PMEM : 0;
	wanted.caps = CAPS_RMA | (flags & FI_COMMIT_COMPLETE ? FI_RMA_PMEM : 0);
	if (!offers(what))
		return;
	begin(&side, wanted.caps);
	IS((side.info->tx_attr->op_flags & op_flags) == op_flags);
	for (unsigned i = 0; i < 40; i++) {
		size_t len = lengths[i % 4];
		struct op op = { .call = op_flags ? WRITE : WRITEMSG, .len = len, .locals = 1, .remotes = 1, .seed = i + 1, .flags = flags };

		put(0, 0);
		meet(&side);
		if (me == 0) {
			paint_parts(local, len, 1, op.seed);
			POST(&side, post_op(&side, &op, &op));
			DONE(&side, &op, WRITTEN);
			put(0, 1);
			/* the source can be used again; other bytes must not arrive */
			memset(local, 0x77, len + 2 * GUARD);
		} else {
			/* a provider may need the target's progress for the completion, not after it */
			UNTIL(told(0), progress(&side));
			if (delivered)
				PAINTED(memory + GUARD, len, op.seed);
			else
				ARRIVES(&side, memory + GUARD, len, op.seed);
		}
		meet(&side);
	}
	finish(&side);
	needed.op_flags = 0;
}

static void levels(void)
{
	level(FI_INJECT_COMPLETE, 0, "FI_INJECT_COMPLETE");
	level(FI_TRANSMIT_COMPLETE, 0, "FI_TRANSMIT_COMPLETE");
	level(FI_DELIVERY_COMPLETE, 0, "FI_DELIVERY_COMPLETE");
	level(0, FI_DELIVERY_COMPLETE, "FI_DELIVERY_COMPLETE by default");
	level(0, FI_INJECT_COMPLETE, "FI_INJECT_COMPLETE by default");
	level(0, FI_TRANSMIT_COMPLETE, "FI_TRANSMIT_COMPLETE by default");
	level(FI_COMMIT_COMPLETE, 0, "FI_RMA_PMEM");
}

static void fence(void)
{
	struct side side;
	static uint8_t text[8];

	wanted.caps = CAPS_RMA | FI_FENCE;
	if (!offers("FI_FENCE")) {
		not_offered = true;
		return;
	}
	begin(&side, wanted.caps);
	volatile uint64_t *flag = (volatile uint64_t *)(memory + AREA - 64);
	for (uint64_t i = 1; i <= 60; i++) {
		struct op large = { .call = WRITE, .len = i % 2 ? MIB : 3000, .locals = 1, .remotes = 1, .seed = i };
		struct iovec iov = { local + AREA - 64, 8 };
		struct fi_rma_iov rma = { there[1].addr + AREA - 64, 8, there[1].key };
		struct fi_msg_rma msg = { .msg_iov = &iov, .iov_count = 1, .addr = side.peer, .rma_iov = &rma, .rma_iov_count = 1, .context = &iov };
		struct fi_msg text_msg = { .msg_iov = &iov, .iov_count = 1, .addr = side.peer, .context = &iov };

		if (me == 1 && i % 3 == 2)
			POST(&side, fi_recv(side.ep, text, sizeof text, NULL, FI_ADDR_UNSPEC, text));
		meet(&side);
		if (me == 0) {
			paint_parts(local, large.len, 1, i);
			memcpy(iov.iov_base, &i, 8);
			POST(&side, post_op(&side, &large, &large));
			if (i % 3 == 0) {
				POST(&side, fi_writemsg(side.ep, &msg, FI_COMPLETION | FI_FENCE | FI_DELIVERY_COMPLETE));
			} else if (i % 3 == 1) { /* a fenced read sees the write */
				memset(iov.iov_base, 0, 8);
				rma.addr = there[1].addr + GUARD + large.len - 8;
				POST(&side, fi_readmsg(side.ep, &msg, FI_COMPLETION | FI_FENCE));
			} else {
				POST(&side, fi_sendmsg(side.ep, &text_msg, FI_COMPLETION | FI_FENCE | FI_DELIVERY_COMPLETE));
			}
			DONE(&side, &large, WRITTEN);
			DONE(&side, &iov, i % 3 == 0 ? WRITTEN : i % 3 == 1 ? READ_DONE : FI_MSG | FI_SEND);
			if (i % 3 == 1)
				IS(!memcmp(iov.iov_base, local + GUARD + large.len - 8, 8));
		} else if (i % 3 == 0) {
			UNTIL(*flag == i, progress(&side));
			atomic_thread_fence(memory_order_acquire);
			PAINTED(memory + GUARD, large.len, i);
		} else if (i % 3 == 2) {
			struct outcome outcome = OUTCOME(&side, side.rx);

			IS(outcome.err == 0 && outcome.entry.op_context == text);
			PAINTED(memory + GUARD, large.len, i);
		}
		meet(&side);
	}
	finish(&side);
}

/* Order of operations at one place. `bit`: of msg_order; `most`: a limit of ep_attr, or NULL. */
static void ordered(uint64_t bit, size_t offset_of_most, const char *name)
{
	static const size_t lengths[] = { 8, 256, 5000, 70000, MIB };
	enum { TIMES = 16 };
	struct side side;
	static uint8_t text[8];

	needed.msg_order = bit;
	wanted.caps = CAPS_RMA;
	if (!offers(name))
		return;
	begin(&side, CAPS_RMA);
	IS(side.info->tx_attr->msg_order & bit);
	for (unsigned i = 0; i < sizeof lengths / sizeof *lengths; i++) {
		size_t len = lengths[i], most = offset_of_most ? *(const size_t *)((const char *)side.info->ep_attr + offset_of_most) : SIZE_MAX;
		uint8_t *a = local, *b = local + LARGEST / 2;
		uint64_t addr = there[0].addr, key = there[0].key;
		unsigned seed = 1000 * i;

		/* "both of which are smaller than the size" */
		if (len >= most) {
			if (me == 0)
				printf("%s: not ordered from %zu bytes on\n", name, most);
			break;
		}
		for (unsigned k = 0; k < TIMES; k++) {
			if (me == 1) {
				paint(memory, len, 999999); /* the old contents */
				if (bit == FI_ORDER_SAW)
					POST(&side, fi_recv(side.ep, text, 8, NULL, FI_ADDR_UNSPEC, text));
			}
			meet(&side);
			if (me == 0 && bit == FI_ORDER_SAW) {
				paint(a, len, seed + k);
				POST(&side, fi_write(side.ep, a, len, NULL, side.peer, addr, key, a));
				POST(&side, fi_send(side.ep, b, 8, NULL, side.peer, b));
				IS(OUTCOME(&side, side.tx).err == 0 && OUTCOME(&side, side.tx).err == 0);
			} else if (me == 1 && bit == FI_ORDER_SAW) {
				IS(OUTCOME(&side, side.rx).err == 0);
				PAINTED(memory, len, seed + k);
			} else if (me == 0 && bit == FI_ORDER_RMA_WAW) {
				unsigned last = 6, done = 0;

				for (unsigned n = 0; n <= last; n++) {
					paint(local + n * (LARGEST / 8), len, seed + k + n);
					POST(&side, fi_write(side.ep, local + n * (LARGEST / 8), len, NULL, side.peer, addr, key, a));
				}
				for (; done <= last; done++)
					DONE(&side, a, WRITTEN);
			} else if (me == 1 && bit == FI_ORDER_RMA_WAW) {
				ARRIVES(&side, memory, len, seed + k + 6);
			} else if (me == 0) { /* RAW, WAR */
				bool raw = bit == FI_ORDER_RMA_RAW;

				paint(a, len, seed + k);
				memset(b, 0, len);
				if (raw)
					POST(&side, fi_write(side.ep, a, len, NULL, side.peer, addr, key, a));
				POST(&side, fi_read(side.ep, b, len, NULL, side.peer, addr, key, b));
				if (!raw)
					POST(&side, fi_write(side.ep, a, len, NULL, side.peer, addr, key, a));
				IS(OUTCOME(&side, side.tx).err == 0 && OUTCOME(&side, side.tx).err == 0);
				PAINTED(b, len, raw ? seed + k : 999999);
			}
			meet(&side);
			if (me == 1 && bit == FI_ORDER_RMA_WAW) /* nothing overtook the last write */
				PAINTED(memory, len, seed + k + 6);
			if (me == 1 && bit != FI_ORDER_RMA_WAW)
				ARRIVES(&side, memory, len, seed + k);
			meet(&side);
		}
	}
	finish(&side);
	needed.msg_order = 0;
}

static void order(void)
{
	ordered(FI_ORDER_RMA_WAW, offsetof(struct fi_ep_attr, max_order_waw_size), "FI_ORDER_RMA_WAW");
	ordered(FI_ORDER_RMA_RAW, offsetof(struct fi_ep_attr, max_order_raw_size), "FI_ORDER_RMA_RAW");
	ordered(FI_ORDER_RMA_WAR, offsetof(struct fi_ep_attr, max_order_war_size), "FI_ORDER_RMA_WAR");
	ordered(FI_ORDER_SAW, 0, "FI_ORDER_SAW");
}

static void selective(void)
{
	enum { COUNT = 100 };
	struct side side;
	struct fi_rma_iov rma;
	struct iovec iov = { NULL, 64 };
	struct fi_msg_rma msg = { .msg_iov = &iov, .iov_count = 1, .rma_iov = &rma, .rma_iov_count = 1, .context = &msg };

	needed.selective = FI_SELECTIVE_COMPLETION;
	begin_delivery(&side);
	msg.addr = side.peer;
	meet(&side);
	if (me == 0) {
		paint(local, COUNT * 64, 5);
		for (unsigned i = 0; i < COUNT; i++) {
			rma = (struct fi_rma_iov){ there[0].addr + i * 64, 64, there[0].key };
			iov.iov_base = local + i * 64;
			if (i % 10 == 9) {
				POST(&side, fi_writemsg(side.ep, &msg, FI_COMPLETION | FI_DELIVERY_COMPLETE));
				DONE(&side, &msg, WRITTEN);
			} else if (i % 3 == 0) {
				POST(&side, fi_writemsg(side.ep, &msg, 0));
			} else {
				POST(&side, fi_write(side.ep, iov.iov_base, 64, NULL, side.peer, rma.addr, rma.key, &msg));
			}
		}
	} else {
		ARRIVES(&side, memory, COUNT * 64, 5);
	}
	meet(&side);
	if (me == 0) {
		must_be_empty(&side);
		/* reads without entries; their bytes come nevertheless */
		iov.iov_base = local + MIB;
		POST(&side, fi_read(side.ep, iov.iov_base, 64, NULL, side.peer, there[0].addr, there[0].key, &msg));
		UNTIL(!memcmp(local + MIB, local, 64), progress(&side));
		must_be_empty(&side);
		/* an error has its entry */
		POST(&side, fi_write(side.ep, local, 64, NULL, side.peer, there[0].addr + AREA, there[0].key, &rma));
		REFUSED(&side, &rma);
	}
	finish(&side);
}

/* The value of a counter, once it is at least `want`. */
static uint64_t value_of(struct fid_cntr *cntr, uint64_t want)
{
	double limit = now() + SECONDS;

	while (fi_cntr_read(cntr) < want && now() < limit)
		;
	return fi_cntr_read(cntr);
}

static void counters(void)
{
	enum { COUNT = 300 };
	struct side side;
	struct counters c = { 0 };
	bool events;

	wanted.caps = CAPS_RMA | FI_RMA_EVENT;
	events = offers("FI_RMA_EVENT");
	if (!events)
		wanted.caps = CAPS_RMA;
	needed.op_flags = FI_DELIVERY_COMPLETE;
	open_queues(&side);
	c.write = counter(&side);
	c.read = counter(&side);
	if (events) {
		c.remote_write = counter(&side);
		c.remote_read = counter(&side);
	}
	side.ep = endpoint_with(&side, FI_SELECTIVE_COMPLETION, &c);
	publish(side.ep, (int)me);
	side.peer = address(&side, 1 - (int)me);
	memory = pages(AREA);
	local = pages(AREA);
	struct region region = region_of(&side, memory, AREA, ALL_REMOTE, 9);
	show(&side, &region, 0);
	meet(&side);
	there[0] = region_at(&side, 1 - me, 0);
	if (me == 0) {
		paint(local, COUNT * 512, 1);
		for (unsigned i = 0; i < COUNT; i++) {
			uint64_t addr = there[0].addr + i * 512;

			if (i % 4 == 0)
				POST(&side, fi_inject_write(side.ep, local + i * 512, side.info->tx_attr->inject_size < 512 ? 16 : 512, side.peer, addr, there[0].key));
			else
				POST(&side, fi_write(side.ep, local + i * 512, 512, NULL, side.peer, addr, there[0].key, NULL));
		}
		/* a call on several ranges is one operation (FI_CNTR_EVENTS_COMP) */
		struct iovec from = { local, 3 * 8 };
		struct fi_rma_iov to[3];
		for (unsigned i = 0; i < 3; i++)
			to[i] = (struct fi_rma_iov){ there[0].addr + i * 512, 8, there[0].key };
		struct fi_msg_rma msg = { .msg_iov = &from, .iov_count = 1, .addr = side.peer, .rma_iov = to, .rma_iov_count = 3 };
		IS(value_of(c.write, COUNT) == COUNT && fi_cntr_read(c.read) == 0);
		POST(&side, fi_writemsg(side.ep, &msg, FI_DELIVERY_COMPLETE));
		IS(value_of(c.write, COUNT + 1) == COUNT + 1);
		from.iov_base = local + MIB + 64;
		POST(&side, fi_readmsg(side.ep, &msg, 0));
		IS(value_of(c.read, 1) == 1 && !memcmp(local + MIB + 64, local, 24));
		for (unsigned i = 1; i < COUNT / 3; i++)
			POST(&side, fi_read(side.ep, local + MIB, 8, NULL, side.peer, there[0].addr, there[0].key, NULL));
		/* a sleeping wait */
		MUST(fi_cntr_wait(c.read, COUNT / 3, SECONDS * 1000));
		IS(fi_cntr_read(c.read) == COUNT / 3);
		IS(fi_cntr_read(c.write) == COUNT + 1);
		IS(!memcmp(local, local + MIB, 8));
		/* errors */
		POST(&side, fi_write(side.ep, local, 8, NULL, side.peer, there[0].addr + AREA, there[0].key, &c));
		UNTIL(fi_cntr_readerr(c.write) == 1, (void)fi_cntr_read(c.write));
		IS(fi_cntr_read(c.write) == COUNT + 1 && fi_cntr_readerr(c.read) == 0);
		REFUSED(&side, &c);
	} else if (events) {
		IS(value_of(c.remote_write, COUNT + 1) == COUNT + 1);
		IS(value_of(c.remote_read, COUNT / 3) == COUNT / 3);
		IS(differs(memory, 8, 1) == 8 && differs(memory + 1536, 512, 1) == 0);
	}
	meet(&side);
	if (events && me == 1)
		IS(fi_cntr_read(c.remote_write) == COUNT + 1 && fi_cntr_read(c.remote_read) == COUNT / 3);
	must_be_empty(&side);
	MUST(fi_close(&side.ep->fid));
	side.ep = NULL;
	close_region(&region);
	MUST(fi_close(&c.write->fid));
	MUST(fi_close(&c.read->fid));
	if (events) {
		MUST(fi_close(&c.remote_write->fid));
		MUST(fi_close(&c.remote_read->fid));
	}
	close_side(&side);
}

static void first(void)
{
	struct side side;

	for (int call = 0; call < CALLS; call++)
		for (int large = 0; large < 2; large++) {
			struct op op = { .call = call, .len = large ? 3 * MIB : 50, .locals = 1, .remotes = 1, .seed = (uint64_t)call + 1 };

			if (large && is_injected(call))
				continue;
			begin(&side, CAPS_RMA);
			one_op(&side, &op);
			finish(&side);
		}
}

static void full(void)
{
	static const size_t lengths[] = { 8, 2000, 60000 };
	struct side side;

	wanted.tx_size = 64;
	begin(&side, CAPS_RMA);
	for (unsigned round = 0; round < 9; round++) {
		size_t len = lengths[round % 3];
		bool reads = round / 3 % 2;

		if (me == 1)
			paint(memory, AREA, 500 + round);
		meet(&side);
		if (me == 0) {
			unsigned posted = 0, completed = 0;
			size_t slots = LARGEST / len;

			paint(local, AREA, round);
			for (; posted < 20000; posted++) {
				size_t shift = posted % slots * len;
				ssize_t result = reads ? fi_read(side.ep, local + shift, len, NULL, side.peer, there[0].addr + shift, there[0].key, local)
						       : fi_write(side.ep, local + shift, len, NULL, side.peer, there[0].addr + shift, there[0].key, local);

				if (result == -FI_EAGAIN && posted)
					break;
				if (result == -FI_EAGAIN) { /* not connected yet */
					progress(&side);
					posted--;
					continue;
				}
				MUST(result);
			}
			if (round == 0)
				printf("%u operations until -FI_EAGAIN; tx_attr->size is %zu\n", posted, side.info->tx_attr->size);
			IS(posted >= 64);
			for (; completed < posted; completed++)
				DONE(&side, local, reads ? READ_DONE : WRITTEN);
			size_t bytes = posted * len < LARGEST ? posted * len : slots * len;
			if (reads)
				PAINTED(local, bytes, 500 + round);
			put(1, reads ? 0 : bytes);
		}
		meet(&side);
		if (me == 1)
			ARRIVES(&side, memory, told(1), round);
		meet(&side);
	}
	finish(&side);
}

/* Posts a write of LEN bytes to place `at`, or a read from there, with FI_MORE or not. */
static void post_more(struct side *side, bool read, size_t at, uint64_t flags)
{
	struct iovec iov = { local + (read ? MIB : 0) + at * 64, 48 };
	struct fi_rma_iov rma = { there[0].addr + at * 64, 48, there[0].key };
	struct fi_msg_rma msg = { .msg_iov = &iov, .iov_count = 1, .addr = side->peer, .rma_iov = &rma, .rma_iov_count = 1, .context = local + at };

	flags |= FI_COMPLETION;
	if (read)
		POST(side, fi_readmsg(side->ep, &msg, flags));
	else
		POST(side, fi_writemsg(side->ep, &msg, flags));
}

/* Operations with FI_MORE, a hint: all complete, in lists that end and in lists that do not. */
static void more(void)
{
	static const unsigned counts[] = { 1, 4, 63, 64, 65, 200 };
	enum { PLACES = 1000 };
	struct side side;
	uint8_t text[8];
	size_t at = 0;

	begin(&side, CAPS_RMA);
	if (me == 0)
		for (size_t i = 0; i < PLACES; i++)
			paint(local + i * 64, 48, i);
	/* ended by an operation without the flag, or only by reads of the queue */
	for (unsigned i = 0; me == 0 && i < sizeof counts / sizeof *counts; i++)
		for (unsigned how = 0; how < 4; how++) {
			bool read = how % 2;

			for (unsigned n = 0; n < counts[i]; n++)
				post_more(&side, read, at + n, n + 1 == counts[i] && how < 2 ? 0 : FI_MORE);
			for (unsigned n = 0; n < counts[i]; n++)
				DONE(&side, local + at + n, read ? READ_DONE : WRITTEN);
			for (unsigned n = 0; read && n < counts[i]; n++)
				PAINTED(local + MIB + (at + n) * 64, 48, at + n);
			at += read && how == 3 ? counts[i] : 0;
		}
	meet(&side);
	if (me == 1) {
		for (size_t i = 0; i < 4 + 1 + 63 + 64 + 65 + 200; i++)
			ARRIVES(&side, memory + i * 64, 48, i);
		POST(&side, fi_recv(side.ep, text, sizeof text, NULL, FI_ADDR_UNSPEC, text));
	}
	meet(&side);
	/* other operations end it: a message, a write without flags, an injected one */
	if (me == 0) {
		post_more(&side, false, 500, FI_MORE);
		post_more(&side, false, 501, FI_MORE);
		POST(&side, fi_send(side.ep, "12345678", 8, NULL, side.peer, text));
		for (unsigned done = 0; done < 3; done++)
			IS(OUTCOME(&side, side.tx).err == 0);
		post_more(&side, false, 502, FI_MORE);
		POST(&side, fi_inject_write(side.ep, local + 503 * 64, 16, side.peer, there[0].addr + 503 * 64, there[0].key));
		POST(&side, fi_write(side.ep, local + 504 * 64, 48, NULL, side.peer, there[0].addr + 504 * 64, there[0].key, text));
		DONE(&side, local + 502, WRITTEN);
		DONE(&side, text, WRITTEN);
	} else {
		IS(OUTCOME(&side, side.rx).err == 0 && !memcmp(text, "12345678", 8));
		for (size_t i = 500; i < 505; i++)
			ARRIVES(&side, memory + i * 64, i == 503 ? 16 : 48, i);
	}
	meet(&side);
	/* with automatic progress no further call is needed */
	if (wants_auto && me == 0) {
		post_more(&side, false, 600, FI_MORE);
		UNTIL(told(2) == 1, usleep(1000));
		DONE(&side, local + 600, WRITTEN);
	} else if (wants_auto) {
		ARRIVES(&side, memory + 600 * 64, 48, 600);
		put(2, 1);
	}
	meet(&side);
	/* one that fails: the others complete */
	if (me == 0) {
		unsigned failed = 0;

		for (unsigned n = 0; n < 6; n++)
			post_more(&side, false, n == 3 ? AREA / 64 : 700 + n, n == 5 ? 0 : FI_MORE);
		for (unsigned n = 0; n < 6; n++) {
			struct outcome outcome = OUTCOME(&side, side.tx);

			failed += outcome.err != 0;
			IS((outcome.err != 0) == (outcome.entry.op_context == local + AREA / 64));
		}
		IS(failed == 1);
	} else {
		for (size_t i = 700; i < 706; i++)
			if (i != 703)
				ARRIVES(&side, memory + i * 64, 48, i);
	}
	finish(&side);
}

int main(int argc, char **argv)
{
	static const struct memory_mode modes[] = {
		{ "lengths", lengths, 2 },
		{ "calls", calls, 2 },
		{ "data", data, 2 },
		{ "levels", levels, 2 },
		{ "fence", fence, 2 },
		{ "order", order, 2 },
		{ "selective", selective, 2 },
		{ "counters", counters, 2 },
		{ "first", first, 2 },
		{ "full", full, 2 },
		{ "more", more, 2 },
	};
	return run_memory_mode(modes, sizeof modes / sizeof *modes, argc, argv);
}
