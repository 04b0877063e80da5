/* RMA of endpoints with many peers whose target is idle, refuses the access, or has several
 * initiators, from fi_rma(3), fi_mr(3), fi_cq(3) and fi_domain(3):
 *
 *   rdm_rma_peers idle PROV NODE      the target sleeps in sigwait() from before the first call on
 *   rdm_rma_peers stopped PROV NODE   the process of the target is stopped
 *   rdm_rma_peers injected PROV NODE  injected writes land although neither side makes another call
 *   rdm_rma_peers mixed PROV NODE     writes, reads and messages at once, in both directions
 *   rdm_rma_peers key PROV NODE       wrong keys; later operations succeed
 *   rdm_rma_peers bounds PROV NODE    addresses outside of a region
 *   rdm_rma_peers rights PROV NODE    regions that can be read, or written, alone
 *   rdm_rma_peers closed PROV NODE    a region that has been closed
 *   rdm_rma_peers two PROV NODE       two initiators, one target
 *   rdm_rma_peers self PROV NODE      the endpoint itself is the target
 *   rdm_rma_peers threads PROV NODE   four threads use one endpoint
 *
 * A further argument `auto` requests FI_PROGRESS_AUTO; NODE `-` stands for none. Ends with 0, or
 * says what went wrong. Plain libfabric 1.17. `idle`, `stopped` and `injected` need a provider whose
 * targets take no part in RMA, and the first one a provider that connects without their calls. */
#define _GNU_SOURCE
#include "rdm_rma.h"

#include <pthread.h>

/* Operations from process 0 to process 1, which calls nothing; process 0 looks at the memory. */
static void against_silent_target(struct side *side)
{
	static const size_t lengths[] = { 1, 8, 100, 4096, 30000, MIB + 1, LARGEST };
	uint8_t *seen = pages(AREA);

	for (unsigned i = 0; i < sizeof lengths / sizeof *lengths; i++)
		for (int call = 0; call < CALLS; call++) {
			struct op op = { .call = call, .len = lengths[i], .locals = 1, .remotes = is_msg(call) && lengths[i] > 100 ? 2 : 1, .seed = (uint64_t)i * CALLS + (uint64_t)call + 1 };
			uint64_t before;

			if (has_data(call) || (is_injected(call) && op.len > side->info->tx_attr->inject_size))
				continue; /* remote CQ data may need the target */
			if (is_read(call)) {
				peek(1, seen, there[0].bytes, op.len + 4 * GUARD);
				wipe(local, op.len, 1);
				op.remotes = 1;
			} else {
				paint_parts(local, op.len, 1, op.seed);
			}
			POST(side, post_op(side, &op, &op));
			if (has_completion(call))
				DONE(side, &op, is_read(call) ? READ_DONE : WRITTEN);
			if (is_read(call)) {
				IS(!memcmp(local + GUARD, seen + GUARD, op.len) && guarded(local + GUARD, op.len));
				continue;
			}
			before = (uint64_t)(now() * 1000);
			for (;;) {
				bool same = true;

				peek(1, seen, there[0].bytes, op.len + 4 * GUARD);
				for (unsigned k = 0; k < op.remotes; k++)
					same &= !memcmp(seen + place_of(op.len, op.remotes, k), local + GUARD + begin_of(op.len, op.remotes, k), length_of(op.len, op.remotes, k));
				if (same)
					break;
				progress(side);
				if ((uint64_t)(now() * 1000) - before > SECONDS * 1000)
					die("call %d with %zu bytes does not land", call, op.len);
			}
		}
	munmap(seen, AREA);
}

static void sleep_until_signal(void)
{
	sigset_t set;
	int sig;

	sigemptyset(&set);
	sigaddset(&set, SIGUSR1);
	IS(sigwait(&set, &sig) == 0);
}

static void idle(void)
{
	struct side side;

	begin(&side, CAPS_RMA);
	if (me == 0) {
		against_silent_target(&side);
		IS(kill(others[1], SIGUSR1) == 0);
	} else {
		sleep_until_signal();
	}
	finish(&side);
}

static void stopped(void)
{
	struct side side;
	struct op op = { .call = WRITE, .len = 8, .locals = 1, .remotes = 1, .seed = 1 };

	begin(&side, CAPS_RMA);
	one_op(&side, &op);
	if (me == 0) {
		pause_ms(20); /* the target has entered sigwait */
		stop_process(1);
		against_silent_target(&side);
		IS(kill(others[1], SIGCONT) == 0);
		IS(kill(others[1], SIGUSR1) == 0);
	} else {
		sleep_until_signal();
	}
	finish(&side);
}

static void injected(void)
{
	struct side side;

	begin(&side, CAPS_RMA);
	for (uint64_t i = 1; i <= 30; i++) {
		size_t most = side.info->tx_attr->inject_size, len = i % 3 ? (most < 16 ? most : 16) : most;

		meet(NULL);
		if (me == 0) {
			/* several, the last of which may wait for room */
			for (unsigned k = 0; k < 1 + i % 4; k++) {
				paint(local, len, i + k);
				POST(&side, fi_inject_write(side.ep, local, len, side.peer, there[0].addr + k * most, there[0].key));
				memset(local, 0xdd, len);
			}
			UNTIL(told(0) == i, pause_ms(1)); /* and no call to libfabric */
		} else {
			for (unsigned k = 0; k < 1 + i % 4; k++)
				UNTIL(differs(memory + k * most, len, i + k) == len, pause_ms(1));
			put(0, i);
		}
	}
	finish(&side);
}

static void mixed_operations(void)
{
	enum { COUNT = 3000, WINDOW = 24, SLOT = 70000 };
	struct side side;
	struct { uint64_t seed; size_t len; int kind; bool busy; } slots[WINDOW] = { 0 };
	uint8_t *texts = pages((size_t)WINDOW * 8192), *got = pages((size_t)WINDOW * 8192);
	unsigned posted = 0, completed = 0, received = 0, expected = 0;
	double limit = now() + 60;

	begin_delivery(&side); /* so that a slot's writes are in order */
	IS((size_t)WINDOW * SLOT * 2 <= AREA);
	/* the first half of `memory` is written by the peer, the second one is read */
	paint(memory + AREA / 2, AREA / 2, 77 + me);
	for (unsigned i = 0; i < COUNT; i++)
		expected += mixed(i * 2 + (1 - me)) % 3 == 2;
	for (unsigned i = 0; i < WINDOW; i++)
		POST(&side, fi_recv(side.ep, got + (size_t)i * 8192, 8192, NULL, FI_ADDR_UNSPEC, got + (size_t)i * 8192));
	meet(&side);
	while (completed < COUNT || received < expected) {
		struct outcome outcome;
		unsigned i = posted % WINDOW;

		if (posted < COUNT && !slots[i].busy) {
			uint64_t random = mixed(posted * 2 + me);
			uint8_t *buffer = local + (size_t)i * SLOT;
			size_t shift = (size_t)i * SLOT;
			ssize_t result;

			slots[i].kind = (int)(random % 3);
			slots[i].len = random >> 8 & 1 ? (random >> 16) % SLOT : (random >> 16) % 200;
			slots[i].seed = random;
			if (slots[i].kind == 0) {
				paint(buffer, slots[i].len, random);
				result = fi_write(side.ep, buffer, slots[i].len, NULL, side.peer, there[0].addr + shift, there[0].key, &slots[i]);
			} else if (slots[i].kind == 1) {
				memset(buffer, 0, slots[i].len);
				result = fi_read(side.ep, buffer, slots[i].len, NULL, side.peer, there[1].addr + AREA / 2 + shift, there[1].key, &slots[i]);
			} else {
				slots[i].len = 8 + slots[i].len % 8000;
				paint(texts + (size_t)i * 8192, slots[i].len, slots[i].len);
				result = fi_send(side.ep, texts + (size_t)i * 8192, slots[i].len, NULL, side.peer, &slots[i]);
			}
			if (result != -FI_EAGAIN) {
				MUST(result);
				slots[i].busy = true;
				posted++;
			}
		}
		if (poll_outcome(side.tx, &outcome)) {
			size_t k = (size_t)((uint8_t *)outcome.entry.op_context - (uint8_t *)slots) / sizeof *slots;

			if (outcome.err)
				die("kind %d, %zu bytes: %s", slots[k].kind, slots[k].len, fi_strerror(outcome.err));
			IS(k < WINDOW && slots[k].busy);
			IS(KIND(outcome.entry.flags) == (slots[k].kind == 0 ? WRITTEN : slots[k].kind == 1 ? READ_DONE : FI_MSG | FI_SEND));
			if (slots[k].kind == 1) {
				for (size_t n = 0; n < slots[k].len; n += 8) {
					uint64_t word = paint_word(77 + (1 - me), k * SLOT + n);

					if (memcmp(local + k * SLOT + n, &word, slots[k].len - n < 8 ? slots[k].len - n : 8))
						die("a read of %zu bytes differs at %zu", slots[k].len, n);
				}
			}
			slots[k].busy = false;
			completed++;
		}
		if (poll_outcome(side.rx, &outcome)) {
			uint8_t *text = outcome.entry.op_context;

			IS(outcome.err == 0 && KIND(outcome.entry.flags) == (FI_MSG | FI_RECV));
			PAINTED(text, outcome.entry.len, outcome.entry.len);
			received++;
			POST(&side, fi_recv(side.ep, text, 8192, NULL, FI_ADDR_UNSPEC, text));
		}
		if (now() > limit)
			die("%u posted, %u completed, %u of %u received", posted, completed, received, expected);
	}
	meet(&side);
	/* what each slot of the peer has written last is here */
	for (unsigned i = 0; i < WINDOW; i++) {
		unsigned n = COUNT;

		while (n > 0 && ((n - 1) % WINDOW != i || mixed((n - 1) * 2 + (1 - me)) % 3 != 0))
			n--;
		if (n > 0) {
			uint64_t random = mixed((n - 1) * 2 + (1 - me));

			ARRIVES(&side, memory + (size_t)i * SLOT, random >> 8 & 1 ? (random >> 16) % SLOT : (random >> 16) % 200, random);
		}
	}
	finish_ep(&side);
}

/* Accesses with `addr` and `key` fail; correct ones that are posted around and after them
 * succeed. Correct ones that are under way when an access fails may end in error with it. */
static void refuse(struct side *side, int line, uint64_t addr, uint64_t key, size_t len, bool writes, bool reads)
{
	for (int kind = 0; kind < 2; kind++)
		for (int among = 0; among < 2; among++) {
			struct outcome outcome;
			char bad;
			unsigned good = among ? 16 : 0, failed = 0;

			if ((kind == 0 && !writes) || (kind == 1 && !reads))
				continue;
			memset(local, 0x11, len);
			for (unsigned i = 0; i < good / 2; i++)
				POST(side, fi_write(side->ep, local, 16, NULL, side->peer, there[0].addr + LARGEST, there[0].key, local));
			if (kind == 0)
				POST(side, fi_write(side->ep, local, len, NULL, side->peer, addr, key, &bad));
			else
				POST(side, fi_read(side->ep, local, len, NULL, side->peer, addr, key, &bad));
			for (unsigned i = 0; i < good / 2; i++)
				POST(side, fi_write(side->ep, local, 16, NULL, side->peer, there[0].addr + LARGEST, there[0].key, local));
			for (unsigned i = 0; i < good + 1; i++) {
				outcome = outcome_at(line, side, side->tx);
				if (outcome.entry.op_context == &bad) {
					if (!outcome.err)
						die("line %d: success of an access that is not permitted (kind %d)", line, kind);
					if (!refused(outcome.err))
						die("line %d: error %d (%s)", line, outcome.err, fi_strerror(outcome.err));
					if (!among)
						printf("line %d: %s: %s\n", line, kind ? "read" : "write", fi_strerror(outcome.err));
				} else {
					IS(outcome.entry.op_context == local);
					failed += outcome.err != 0;
				}
			}
			if (failed)
				printf("line %d: %u of %u correct operations under way failed too\n", line, failed, good);
			/* later operations succeed */
			for (unsigned i = 0; i < 4; i++) {
				POST(side, fi_write(side->ep, local, 16, NULL, side->peer, there[0].addr + LARGEST, there[0].key, local));
				DONE(side, local, WRITTEN);
				POST(side, fi_read(side->ep, local, 16, NULL, side->peer, there[1].addr, there[1].key, local));
				DONE(side, local, READ_DONE);
			}
		}
}

static void key(void)
{
	struct side side;

	begin_delivery(&side);
	paint(memory, LARGEST, 3);
	meet(&side);
	if (me == 0) {
		refuse(&side, __LINE__, there[0].addr, there[0].key + 77, 8, true, true);
		refuse(&side, __LINE__, there[0].addr, there[0].key ^ 1ULL << 30, 100000, true, true);
	}
	meet(&side);
	PAINTED(memory, LARGEST, 3);
	finish(&side);
}

static void bounds(void)
{
	struct side side;
	struct region small;
	static const size_t len = 10000;

	begin_delivery(&side);
	paint(memory, LARGEST, 3);
	small = region_of(&side, memory + 5 * 4096, len, ALL_REMOTE, 300);
	show(&side, &small, 2);
	meet(&side);
	if (me == 0) {
		struct shown at = region_at(&side, 1, 2);

		refuse(&side, __LINE__, at.addr + len, at.key, 1, true, true);
		refuse(&side, __LINE__, at.addr + len - 7, at.key, 8, true, true);
		refuse(&side, __LINE__, at.addr, at.key, len + 1, true, true);
		refuse(&side, __LINE__, at.addr - 1, at.key, 8, true, true);
		refuse(&side, __LINE__, at.addr + (1ULL << 40), at.key, 8, true, true);
		refuse(&side, __LINE__, ~0ULL - 3, at.key, 8, true, true);
		POST(&side, fi_read(side.ep, local, len, NULL, side.peer, at.addr, at.key, local));
		DONE(&side, local, READ_DONE);
	}
	meet(&side);
	PAINTED(memory, LARGEST, 3);
	meet(&side);
	close_region(&small);
	finish(&side);
}

static void rights(void)
{
	static const uint64_t access[] = { FI_REMOTE_READ, FI_REMOTE_WRITE, FI_READ | FI_WRITE | FI_SEND | FI_RECV };
	struct side side;
	struct region restricted[3];

	begin_delivery(&side);
	paint(memory, LARGEST, 3);
	for (unsigned i = 0; i < 3; i++) {
		restricted[i] = region_of(&side, memory + 4096 * i, 4096, access[i], 300 + i);
		show(&side, &restricted[i], 2 + i);
	}
	meet(&side);
	if (me == 0) {
		struct shown at[3];

		for (unsigned i = 0; i < 3; i++)
			at[i] = region_at(&side, 1, 2 + i);
		refuse(&side, __LINE__, at[0].addr, at[0].key, 8, true, false);
		refuse(&side, __LINE__, at[1].addr, at[1].key, 8, false, true);
		refuse(&side, __LINE__, at[2].addr, at[2].key, 8, true, true);
		POST(&side, fi_read(side.ep, local, 4096, NULL, side.peer, at[0].addr, at[0].key, local));
		DONE(&side, local, READ_DONE);
		PAINTED(local, 4096, 3);
		paint(local, 4096, 4);
		POST(&side, fi_write(side.ep, local, 4096, NULL, side.peer, at[1].addr, at[1].key, local));
		DONE(&side, local, WRITTEN);
	}
	meet(&side);
	PAINTED(memory, 4096, 3);
	if (me == 1)
		ARRIVES(&side, memory + 4096, 4096, 4);
	for (unsigned i = 0; i < 3; i++)
		close_region(&restricted[i]);
	finish(&side);
}

static void closed(void)
{
	struct side side;
	struct region short_lived;

	begin_delivery(&side);
	paint(memory, LARGEST, 3);
	for (unsigned round = 0; round < 8; round++) {
		uint8_t *own = memory + 4096 * (4 + round % 3);

		short_lived = region_of(&side, own, 4096, ALL_REMOTE, 400);
		show(&side, &short_lived, 2);
		meet(&side);
		struct shown at = region_at(&side, 1 - me, 2);
		if (me == 0 && round % 2) {
			POST(&side, fi_read(side.ep, local, 4096, NULL, side.peer, at.addr, at.key, local));
			DONE(&side, local, READ_DONE);
		}
		meet(&side);
		close_region(&short_lived);
		meet(&side);
		if (me == 0)
			refuse(&side, __LINE__, at.addr, at.key, 64, true, true);
		meet(&side);
		PAINTED(memory, LARGEST, 3);
	}
	finish(&side);
}

/* Process 0 is the target; the others write and read stripes of their own. */
static void two(void)
{
	enum { STRIPE = 200, STRIPES = 2000, ROUNDS = 400 };
	struct side side;
	struct region region = { 0 };

	wanted.caps = CAPS_RMA;
	needed.op_flags = FI_DELIVERY_COMPLETE;
	open_memory_side(&side);
	memory = pages(STRIPE * STRIPES);
	local = pages(STRIPE * 2);
	if (me == 0) {
		for (unsigned i = 0; i < STRIPES; i++)
			paint(memory + i * STRIPE, STRIPE, i);
		region = region_of(&side, memory, STRIPE * STRIPES, ALL_REMOTE, 5);
		show(&side, &region, 0);
		meet(&side);
	} else {
		static uint64_t version[STRIPES];

		meet(&side);
		struct shown at = region_at(&side, 0, 0);
		side.peer = address(&side, 0);
		for (unsigned i = 0; i < STRIPES; i++)
			version[i] = i;
		for (unsigned n = 0; n < ROUNDS; n++) {
			uint64_t random = mixed(n * 2 + me), i = random % (STRIPES / 2) * 2 + (me - 1);

			POST(&side, fi_read(side.ep, local, STRIPE, NULL, side.peer, at.addr + i * STRIPE, at.key, &side));
			DONE(&side, &side, READ_DONE);
			PAINTED(local, STRIPE, version[i]);
			version[i] = random;
			paint(local, STRIPE, random);
			POST(&side, fi_write(side.ep, local, STRIPE, NULL, side.peer, at.addr + i * STRIPE, at.key, &side));
			DONE(&side, &side, WRITTEN);
		}
	}
	meet(&side);
	if (me == 0) {
		static uint64_t version[STRIPES];

		for (unsigned i = 0; i < STRIPES; i++)
			version[i] = i;
		for (unsigned who = 1; who < 3; who++)
			for (unsigned n = 0; n < ROUNDS; n++) {
				uint64_t random = mixed(n * 2 + who);

				version[random % (STRIPES / 2) * 2 + (who - 1)] = random;
			}
		for (unsigned i = 0; i < STRIPES; i++)
			PAINTED(memory + i * STRIPE, STRIPE, version[i]);
		close_region(&region);
	}
	meet(&side);
	must_be_empty(&side);
	close_side(&side);
}

static void to_itself(void)
{
	static const size_t lengths[] = { 0, 1, 64, 5000, 300001, LARGEST };
	struct side side;
	struct name own;

	wanted.caps = CAPS_RMA;
	needed.op_flags = FI_DELIVERY_COMPLETE;
	open_memory_side(&side);
	own = name_of(side.ep);
	side.peer = insert(&side, &own);
	memory = pages(AREA);
	local = pages(AREA);
	struct region region = region_of(&side, memory, AREA, ALL_REMOTE, 7);
	show(&side, &region, 0);
	there[0] = there[1] = region_at(&side, 0, 0);
	for (unsigned i = 0; i < sizeof lengths / sizeof *lengths; i++)
		for (int call = 0; call < CALLS; call++) {
			struct op op = { .call = call, .len = lengths[i], .locals = 1, .remotes = 1, .seed = i * CALLS + (unsigned)call + 1 };

			if (is_injected(call) && op.len > side.info->tx_attr->inject_size)
				continue;
			if (is_read(call)) {
				paint_parts(memory, op.len, 1, op.seed);
				wipe(local, op.len, 1);
			} else {
				wipe(memory, op.len, 1);
				paint_parts(local, op.len, 1, op.seed);
			}
			POST(&side, post_op(&side, &op, &op));
			if (is_injected(call))
				memset(local, 0, op.len + 2 * GUARD);
			if (has_completion(call))
				DONE(&side, &op, is_read(call) ? READ_DONE : WRITTEN);
			if (has_data(call))
				IS(REMOTE_DATA(&side) == data_of(op.seed));
			check_parts(__LINE__, &side, memory, op.len, 1, op.seed);
			if (!is_injected(call))
				check_parts(__LINE__, NULL, local, op.len, 1, op.seed);
		}
	refuse(&side, __LINE__, there[0].addr + AREA, there[0].key, 8, true, true);
	must_be_empty(&side);
	close_region(&region);
	close_side(&side);
}

/* ---- threads ---- */

enum { THREADS = 4, SLICE = 128 * 1024, THREAD_OPS = 600 };

struct ticket {
	_Atomic int state; /* 0: under way; 1: complete; 2: in error */
};

struct thread {
	struct side *side;
	unsigned number;
	pthread_t id;
};

/* Takes one completion of any thread. */
static void serve(struct fid_cq *cq)
{
	struct fi_cq_tagged_entry entry;
	struct fi_cq_err_entry error = { 0 };
	ssize_t got = fi_cq_read(cq, &entry, 1);

	if (got == 1) {
		atomic_store(&((struct ticket *)entry.op_context)->state, 1);
	} else if (got == -FI_EAVAIL) {
		if (fi_cq_readerr(cq, &error, 0) == 1) /* another thread may have taken it */
			atomic_store(&((struct ticket *)error.op_context)->state, 2);
	} else {
		IS(got == -FI_EAGAIN);
	}
}

static void *thread_main(void *argument)
{
	struct thread *thread = argument;
	struct side *side = thread->side;
	size_t base = (size_t)thread->number * SLICE;

	for (unsigned n = 0; n < THREAD_OPS; n++) {
		uint64_t seed = mixed(n * 64 + thread->number * 4 + me);
		size_t len = seed % 16 ? seed >> 20 & 1023 : seed >> 20 & (SLICE / 2 - 1), shift = base + (seed >> 44) % (SLICE / 2);
		bool wrong = n % 100 == 57;

		for (int reads = 0; reads < 2; reads++) {
			struct ticket ticket = { 0 };
			struct iovec iov = { local + (reads ? AREA / 2 : 0) + base, len };
			struct fi_rma_iov rma = { there[0].addr + shift, len, there[0].key };
			struct fi_msg_rma msg = { .msg_iov = &iov, .iov_count = 1, .addr = side->peer, .rma_iov = &rma, .rma_iov_count = 1, .context = &ticket };
			uint64_t flags = FI_COMPLETION | FI_DELIVERY_COMPLETE;
			double limit = now() + SECONDS;
			ssize_t result;

			if (wrong)
				rma.addr += AREA;
			if (!reads)
				paint(iov.iov_base, len, seed);
			do {
				result = reads ? fi_readmsg(side->ep, &msg, flags) : fi_writemsg(side->ep, &msg, flags);
				if (result == -FI_EAGAIN)
					serve(side->tx);
			} while (result == -FI_EAGAIN && now() < limit);
			MUST(result);
			while (atomic_load(&ticket.state) == 0 && now() < limit)
				serve(side->tx);
			if (wrong && len == 0)
				continue;
			/* an access that fails may take others under way along */
			if (atomic_load(&ticket.state) != (wrong ? 2 : 1)) {
				if (atomic_load(&ticket.state) == 0)
					die("thread %u: no completion, operation %u", thread->number, n);
				if (atomic_load(&ticket.state) == 1)
					die("thread %u: success outside of the region", thread->number);
				add(2);
				break;
			}
			if (reads && !wrong)
				PAINTED(iov.iov_base, len, seed);
		}
	}
	return NULL;
}

static void threads(void)
{
	struct side side;
	struct thread thread[THREADS];

	wanted.threading = FI_THREAD_SAFE;
	begin(&side, CAPS_RMA);
	IS(side.info->domain_attr->threading == FI_THREAD_SAFE);
	meet(&side);
	for (unsigned i = 0; i < THREADS; i++) {
		thread[i] = (struct thread){ .side = &side, .number = i };
		IS(pthread_create(&thread[i].id, NULL, thread_main, &thread[i]) == 0);
	}
	for (unsigned i = 0; i < THREADS; i++)
		IS(pthread_join(thread[i].id, NULL) == 0);
	meet(&side);
	if (me == 0 && told(2))
		printf("%u correct operations failed beside ones with a wrong address\n", (unsigned)told(2));
	IS(told(2) < THREADS * THREAD_OPS / 100 * THREADS * 2);
	finish(&side);
}

int main(int argc, char **argv)
{
	static const struct memory_mode modes[] = {
		{ "idle", idle, 2 },
		{ "stopped", stopped, 2 },
		{ "injected", injected, 2 },
		{ "mixed", mixed_operations, 2 },
		{ "key", key, 2 },
		{ "bounds", bounds, 2 },
		{ "rights", rights, 2 },
		{ "closed", closed, 2 },
		{ "two", two, 3 },
		{ "self", to_itself, 1 },
		{ "threads", threads, 2 },
	};
	sigset_t set;

	/* for sigwait(); inherited by the threads of the provider */
	sigemptyset(&set);
	sigaddset(&set, SIGUSR1);
	sigprocmask(SIG_BLOCK, &set, NULL);
	return run_memory_mode(modes, sizeof modes / sizeof *modes, argc, argv);
}
