/* The calls of an OpenSHMEM library between four processes with endpoints that have many peers:
 * FI_RMA and FI_ATOMIC alone, no queue for receives, counters for puts and gets, a one-byte key,
 * FI_DELIVERY_COMPLETE as the default, and the address space as one region. Puts, gets, atomics,
 * locks, signals, all-to-all exchanges and barriers in 2,000 rounds.
 *
 *   rdm_shmem plain PROV NODE     no FI_RMA_EVENT; no mr_mode bit
 *   rdm_shmem event PROV NODE     FI_RMA_EVENT; no mr_mode bit
 *   rdm_shmem bits PROV NODE      FI_RMA_EVENT; FI_MR_RMA_EVENT and FI_MR_ENDPOINT
 *   rdm_shmem virtual PROV NODE   no FI_RMA_EVENT; FI_MR_VIRT_ADDR
 *   rdm_shmem late PROV NODE      as `event`; the endpoint is enabled before it has counters, as
 *                                 that of Sandia OpenSHMEM
 *
 * A further argument `auto` requests FI_PROGRESS_AUTO, one after it is the number of rounds; NODE
 * `-` stands for none. Ends with 0, with 77 if the form is not offered, or says what went wrong. Plain
 * libfabric 1.17. */
#define _GNU_SOURCE
#include "rdm_memory.h"

enum { PES = 4, BLOCK = 65536, STEPS = 2 };

/* At the same address in each process. */
struct heap {
	uint8_t from[PES][BLOCK]; /* what each process puts here */
	uint8_t own[BLOCK];	  /* what the others get */
	uint64_t arrived[STEPS];  /* barrier of puts */
	uint64_t entered, released; /* barrier of atomics, in process 0 */
	uint64_t lock, guarded;
	uint64_t sum, signal[PES], tickets;
	uint32_t small[PES];
	double real;
};

static struct heap *heap;
static struct side side;
static struct fid_cntr *put_cntr, *get_cntr, *events; /* `events`: NULL without FI_RMA_EVENT */
static struct fid_mr *space;
static uint64_t puts_issued, gets_issued, epoch;
static uint64_t sent[PES], fetched[PES]; /* operations that write, and those that also fetch */
static fi_addr_t pe_addr[PES];
static uint8_t *scratch;
static unsigned rounds = 2000;
static bool late; /* counters are bound to the enabled endpoint */

/* ---- the library ---- */

static void die_of_error(void)
{
	struct fi_cq_err_entry error = { 0 };

	if (fi_cq_readerr(side.tx, &error, 0) == 1)
		die("an operation has failed: %s, flags %llx", fi_strerror(error.err), (unsigned long long)error.flags);
	die("an operation has failed, without an entry");
}

static void advance(void)
{
	(void)fi_cntr_read(put_cntr);
	(void)fi_cntr_read(get_cntr);
	if (fi_cntr_readerr(put_cntr) || fi_cntr_readerr(get_cntr))
		die_of_error();
}

#define ISSUE(call)                                                                                                  \
	do {                                                                                                         \
		long issued;                                                                                         \
		double until = now() + SECONDS;                                                                      \
		while ((issued = (long)(call)) == -FI_EAGAIN && now() < until)                                       \
			advance();                                                                                   \
		if (issued)                                                                                          \
			die("line %d: %s: %ld (%s)", __LINE__, #call, issued, fi_strerror((int)-issued));            \
	} while (0)

/* Without an mr_mode bit the region begins at address 0, with FI_MR_VIRT_ADDR at its own, which is
 * 0 too. */
static uint64_t remote(const void *at) { return (uint64_t)(uintptr_t)at; }

static void put_to(void *to, const void *from, size_t len, unsigned pe)
{
	if (len <= side.info->tx_attr->inject_size)
		ISSUE(fi_inject_write(side.ep, from, len, pe_addr[pe], remote(to), 1));
	else
		ISSUE(fi_write(side.ep, from, len, NULL, pe_addr[pe], remote(to), 1, NULL));
	puts_issued++;
	sent[pe]++;
}

static void wait_counter(struct fid_cntr *cntr, uint64_t value)
{
	int result;

	if (wants_auto && value % 3 == 0) {
		while ((result = fi_cntr_wait(cntr, value, SECONDS * 1000)) == -FI_EINTR)
			;
		if (result == -FI_EAVAIL)
			die_of_error();
		MUST(result);
	}
	UNTIL(fi_cntr_read(cntr) >= value, advance());
}

static void quiet(void) { wait_counter(put_cntr, puts_issued); }

static void get_from(void *into, const void *from, size_t len, unsigned pe)
{
	ISSUE(fi_read(side.ep, into, len, NULL, pe_addr[pe], remote(from), 1, NULL));
	gets_issued++;
}

static void quiet_gets(void) { wait_counter(get_cntr, gets_issued); }

static void atomic_to(void *to, const void *value, enum fi_datatype type, enum fi_op op, unsigned pe)
{
	ISSUE(fi_inject_atomic(side.ep, value, 1, pe_addr[pe], remote(to), 1, type, op));
	puts_issued++;
	sent[pe]++;
}

static uint64_t fetch_from(void *at, uint64_t value, enum fi_op op, unsigned pe)
{
	uint64_t before;

	ISSUE(fi_fetch_atomic(side.ep, &value, 1, NULL, &before, NULL, pe_addr[pe], remote(at), 1, FI_UINT64, op, NULL));
	gets_issued++;
	fetched[pe]++;
	quiet_gets();
	return before;
}

static uint64_t compare_swap(void *at, uint64_t expected, uint64_t value, unsigned pe)
{
	uint64_t before;

	ISSUE(fi_compare_atomic(side.ep, &value, 1, NULL, &expected, NULL, &before, NULL, pe_addr[pe], remote(at), 1, FI_UINT64, FI_CSWAP, NULL));
	gets_issued++;
	fetched[pe]++;
	quiet_gets();
	return before;
}

/* Waits for a word of this process that others write. */
static void wait_word(int line, const uint64_t *word, uint64_t value)
{
	double limit = now() + SECONDS;

	for (unsigned i = 0; __atomic_load_n(word, __ATOMIC_ACQUIRE) < value; i++) {
		advance();
		others_live();
		if (i > 100)
			usleep(20);
		if (now() > limit)
			die("line %d: the word is %llu, not %llu", line, (unsigned long long)*word, (unsigned long long)value);
	}
}

#define WAIT_WORD(word, value) wait_word(__LINE__, word, value)

static void barrier_of_puts(void)
{
	quiet();
	epoch++;
	for (unsigned step = 0; step < STEPS; step++) {
		put_to(&heap->arrived[step], &epoch, 8, (me + (1U << step)) % PES);
		WAIT_WORD(&heap->arrived[step], epoch);
	}
}

static void barrier_of_atomics(void)
{
	static uint64_t barriers;
	uint64_t one = 1;

	quiet();
	barriers++;
	atomic_to(&heap->entered, &one, FI_UINT64, FI_SUM, 0);
	if (me == 0) {
		WAIT_WORD(&heap->entered, barriers * PES);
		for (unsigned pe = 0; pe < PES; pe++)
			put_to(&heap->released, &barriers, 8, pe);
	}
	WAIT_WORD(&heap->released, barriers);
}

static void barrier(unsigned round)
{
	if (round % 2)
		barrier_of_puts();
	else
		barrier_of_atomics();
}

static void open_library(uint64_t caps, int bits)
{
	needed.mr_mode = bits;
	needed.mr_key_size = 1;
	needed.op_flags = FI_DELIVERY_COMPLETE;
	wanted.caps = caps;
	if (!offers("the hints of an OpenSHMEM library")) {
		not_offered = true;
		return;
	}
	struct fi_info *info = NULL;
	MUST(find_info(&info));
	open_domain_with(&side, info);
	side.tx = queue(&side, 0);
	put_cntr = counter(&side);
	get_cntr = counter(&side);
	MUST(fi_endpoint(side.domain, side.info, &side.ep, NULL));
	MUST(fi_ep_bind(side.ep, &side.av->fid, 0));
	MUST(fi_ep_bind(side.ep, &side.tx->fid, FI_TRANSMIT | FI_SELECTIVE_COMPLETION));
	if (late)
		MUST(fi_enable(side.ep));
	MUST(fi_ep_bind(side.ep, &put_cntr->fid, FI_WRITE));
	MUST(fi_ep_bind(side.ep, &get_cntr->fid, FI_READ));
	if (!late)
		MUST(fi_enable(side.ep));
	MUST(fi_mr_reg(side.domain, NULL, SIZE_MAX, FI_REMOTE_READ | FI_REMOTE_WRITE, 0, 1, mr_mode(&side) & FI_MR_RMA_EVENT ? FI_RMA_EVENT : 0, &space, NULL));
	if (caps & FI_RMA_EVENT) {
		events = counter(&side);
		MUST(fi_mr_bind(space, &events->fid, FI_REMOTE_WRITE));
	}
	if (mr_mode(&side) & FI_MR_ENDPOINT)
		MUST(fi_mr_bind(space, &side.ep->fid, 0));
	if (mr_mode(&side) & (FI_MR_ENDPOINT | FI_MR_RMA_EVENT))
		MUST(fi_mr_enable(space));
	IS(fi_mr_key(space) == 1);
	publish(side.ep, (int)me);
	meet(NULL);
	for (unsigned pe = 0; pe < PES; pe++)
		pe_addr[pe] = address(&side, (int)pe);
	/* no process accesses memory before each has registered it */
	meet(NULL);
}

static void close_library(void)
{
	meet(&side);
	RETURNS(fi_cq_read(side.tx, scratch, 1), -FI_EAGAIN);
	MUST(fi_close(&side.ep->fid));
	side.ep = NULL;
	MUST(fi_close(&space->fid));
	MUST(fi_close(&put_cntr->fid));
	MUST(fi_close(&get_cntr->fid));
	if (events)
		MUST(fi_close(&events->fid));
	close_side(&side);
}

/* ---- the application ---- */

static size_t size_of(unsigned round) { return round % 16 == 15 ? BLOCK - round % 8 : 1 + mixed(round) % (round % 4 == 3 ? 8000 : 300); }

static uint64_t seed_of(unsigned round, unsigned from, unsigned to) { return round * 16ULL + from * 4 + to; }

static void all_to_all(unsigned round)
{
	size_t len = size_of(round);

	for (unsigned k = 0; k < PES; k++) {
		unsigned pe = (me + k) % PES;

		paint(scratch + pe * BLOCK, len, seed_of(round, me, pe));
		put_to(heap->from[me], scratch + pe * BLOCK, len, pe);
	}
	barrier(round);
	for (unsigned pe = 0; pe < PES; pe++)
		PAINTED(heap->from[pe], len, seed_of(round, pe, me));
	barrier(round + 1);
}

static void get_all(unsigned round)
{
	size_t len = size_of(round);

	paint(heap->own, len, seed_of(round, me, me));
	barrier(round);
	for (unsigned pe = 0; pe < PES; pe++) {
		memset(scratch + pe * BLOCK, 0, len);
		get_from(scratch + pe * BLOCK, heap->own, len, pe);
	}
	quiet_gets();
	for (unsigned pe = 0; pe < PES; pe++)
		PAINTED(scratch + pe * BLOCK, len, seed_of(round, pe, pe));
	barrier(round + 1);
}

static void add_up(unsigned round)
{
	unsigned pe = round % PES;
	uint64_t tenth = 10, before = heap->sum;
	uint32_t three = 3, small = heap->small[me];
	double half = 0.5, real = heap->real;

	barrier(round);
	for (unsigned i = 0; i < 5; i++) {
		atomic_to(&heap->sum, &tenth, FI_UINT64, FI_SUM, pe);
		atomic_to(&heap->small[me], &three, FI_UINT32, FI_SUM, pe);
		atomic_to(&heap->real, &half, FI_DOUBLE, FI_SUM, pe);
		(void)fetch_from(&heap->sum, 1, FI_SUM, pe);
	}
	barrier(round + 1);
	if (me == pe) {
		IS(heap->sum == before + PES * 55);
		IS(heap->small[me] == small + 15);
		IS(heap->real == real + PES * 2.5);
	}
	/* every ticket is drawn once */
	uint64_t ticket = fetch_from(&heap->tickets, 1, FI_SUM, pe);
	put(8 + (int)me, ticket);
	barrier(round);
	for (unsigned other = 0; other < PES; other++)
		IS(other == me || told(8 + (int)other) != ticket);
	barrier(round + 1);
}

/* A lock of compare-and-swap around a word that is read and written back. */
static void locked(unsigned round)
{
	unsigned pe = round % PES;
	uint64_t before = heap->guarded, one, free_lock = 0;

	barrier(round);
	for (unsigned i = 0; i < 2; i++) {
		UNTIL(compare_swap(&heap->lock, 0, me + 1, pe) == 0, usleep(50));
		get_from(&one, &heap->guarded, 8, pe);
		quiet_gets();
		one++;
		put_to(&heap->guarded, &one, 8, pe);
		quiet();
		put_to(&heap->lock, &free_lock, 8, pe);
		quiet();
	}
	barrier(round + 1);
	if (me == pe)
		IS(heap->guarded == before + 2 * PES && heap->lock == 0);
	barrier(round);
}

/* Bytes, then a signal; the receiver waits for a word of its memory. */
static void signalled(unsigned round)
{
	size_t len = size_of(round);
	unsigned pe = (me + 1 + round % (PES - 1)) % PES, from = (me + PES - 1 - round % (PES - 1)) % PES;
	uint64_t number = round + 1;

	paint(scratch, len, seed_of(round, me, pe));
	put_to(heap->from[me], scratch, len, pe);
	quiet();
	if (round % 2)
		put_to(&heap->signal[me], &number, 8, pe);
	else
		atomic_to(&heap->signal[me], &number, FI_UINT64, FI_ATOMIC_WRITE, pe);
	WAIT_WORD(&heap->signal[from], number);
	PAINTED(heap->from[from], len, seed_of(round, from, me));
	barrier(round);
}

/* The counter of the region, after a barrier: each put and each base atomic counts; whether an
 * atomic operation that fetches does is not said for each of them. */
static void check_events(void)
{
	uint64_t least = 0, most = 0;

	quiet();
	for (unsigned pe = 0; pe < PES; pe++) {
		put(16 + (int)(me * PES + pe), sent[pe]);
		put(32 + (int)(me * PES + pe), sent[pe] + fetched[pe]);
	}
	meet(&side);
	for (unsigned pe = 0; pe < PES; pe++) {
		least += told(16 + (int)(pe * PES + me));
		most += told(32 + (int)(pe * PES + me));
	}
	meet(&side);
	if (!events)
		return;
	wait_counter(events, least);
	for (int i = 0; i < 20; i++)
		IS(fi_cntr_read(events) <= most);
	meet(&side);
}

static void program(uint64_t caps, int bits)
{
	static void (*const parts[])(unsigned) = { all_to_all, get_all, add_up, signalled, all_to_all, signalled, locked, signalled };

	open_library(caps, bits);
	if (not_offered)
		return;
	scratch = pages(PES * BLOCK);
	for (unsigned round = 0; round < rounds; round++) {
		parts[round % (sizeof parts / sizeof *parts)](round);
		if (round % 100 == 99)
			check_events();
	}
	if (me == 0)
		printf("%llu puts and atomics, %llu gets and atomics that fetch by process 0\n", (unsigned long long)puts_issued, (unsigned long long)gets_issued);
	close_library();
}

static void plain(void) { program(FI_RMA | FI_ATOMIC, 0); }
static void event_counter(void) { program(FI_RMA | FI_ATOMIC | FI_RMA_EVENT, 0); }
static void event_bits(void) { program(FI_RMA | FI_ATOMIC | FI_RMA_EVENT, FI_MR_RMA_EVENT | FI_MR_ENDPOINT); }
static void late_counters(void)
{
	late = true;
	event_counter();
}

static void virtual_addresses(void) { program(FI_RMA | FI_ATOMIC, FI_MR_VIRT_ADDR); }

int main(int argc, char **argv)
{
	static const struct memory_mode modes[] = {
		{ "plain", plain, PES },
		{ "event", event_counter, PES },
		{ "bits", event_bits, PES },
		{ "virtual", virtual_addresses, PES },
		{ "late", late_counters, PES },
	};

	if (argc > 5)
		rounds = (unsigned)strtoul(argv[5], NULL, 0);
	heap = (struct heap *)pages(sizeof *heap);
	return run_memory_mode(modes, sizeof modes / sizeof *modes, argc, argv);
}
