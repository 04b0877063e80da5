/* Processes that use endpoints of type FI_EP_RDM to all others without a pause, from fi_msg(3),
 * fi_tagged(3), fi_rma(3), fi_atomic(3) and fi_endpoint(3). Run with fewer connections than a
 * process has peers: no operation fails, and each has its effect once and in its order.
 *
 *   rdm_crowd messages PROV NODE       tagged messages of 8 to 200,000 bytes, with 8 of each
 *                                      process to each other one under way
 *   rdm_crowd oneway PROV NODE         the same, from the first half of the processes to the others
 *   rdm_crowd memory PROV NODE         writes that are read back, and fetching additions, with 4 of
 *                                      each process to each other one under way
 *
 * The next argument is `auto` for FI_PROGRESS_AUTO, or `manual`. A last argument is the number of
 * seconds. Ends with 0 and prints the least and the greatest number of operations of a pair, or
 * says what went wrong. Plain libfabric 1.17. */
#include "rdm_processes.h"

#include <rdma/fi_atomic.h>
#include <rdma/fi_rma.h>

enum { PROCESSES = 6, WINDOW = 8, LONGEST = 200000, CHAINS = 4, PIECE = 20000, KEY = 7 };
enum { ENDED = WORDS - 1 }; /* before it: one more than the operations of each pair, when it ends */

static uint64_t seconds = 2;
static int halves;

static int word_of(int from, int to) { return from * PROCESSES + to; }
static int sends(int from, int to) { return from != to && (!halves || (from < PROCESSES / 2 && to >= PROCESSES / 2)); }

/* ---- messages ---- */

static size_t length_of(uint64_t seed)
{
	uint64_t random = mixed(seed ^ 0x5a5a);

	switch (random % 8) {
	case 0:
		return 8 + (random >> 8) % (LONGEST - 7);
	case 1:
		return 8 + (random >> 8) % 8000;
	default:
		return 8 + (random >> 8) % 93;
	}
}

static uint64_t seed_of(int from, int to, uint64_t number) { return (uint64_t)word_of(from, to) << 40 | number; }

struct direction {
	uint8_t *bytes[WINDOW];
	uint64_t posted, done; /* completions of one direction of a pair may come in any order */
	uint64_t number[WINDOW];
	int busy[WINDOW];
};

/* The context of an operation. */
struct place {
	struct direction *of;
	int peer, slot;
};

static struct direction out[PROCESSES], in[PROCESSES];
static struct place places[2][PROCESSES][WINDOW];

static void post_receive(struct side *side, int me, int from, int slot, fi_addr_t addr)
{
	struct direction *it = &in[from];

	it->number[slot] = it->posted++;
	it->busy[slot] = 1;
	/* all messages of a process have one tag, so they match in their order */
	POST(side, fi_trecv(side->ep, it->bytes[slot], LONGEST, NULL, addr, (uint64_t)from, 0, &places[1][from][slot]));
	(void)me;
}

static void take_all(struct side *side, int me, const fi_addr_t *addr)
{
	struct fid_cq *queues[] = { side->tx, side->rx };
	struct fi_cq_tagged_entry entries[16];

	for (int i = 0; i < 2; i++) {
		size_t got = take(queues[i], entries, 16);

		for (size_t at = 0; at < got; at++) {
			struct place *place = entries[at].op_context;
			struct direction *it = place->of;
			uint64_t number = it->number[place->slot];

			IS(it->busy[place->slot]);
			it->busy[place->slot] = 0;
			it->done++;
			if (i == 0)
				continue;
			uint64_t seed = seed_of(place->peer, me, number);

			IS(entries[at].len == length_of(seed));
			must_be(it->bytes[place->slot], entries[at].len, seed);
			post_receive(side, me, place->peer, place->slot, addr[place->peer]);
		}
	}
}

static void exchanges(int me)
{
	struct side side;
	fi_addr_t addr[PROCESSES];

	wanted.wait = FI_WAIT_NONE;
	open_side(&side, me);
	for (int peer = 0; peer < PROCESSES; peer++) {
		if (peer == me)
			continue;
		addr[peer] = address(&side, peer);
		for (int slot = 0; slot < WINDOW; slot++) {
			out[peer].bytes[slot] = malloc(LONGEST);
			in[peer].bytes[slot] = malloc(LONGEST);
			places[0][peer][slot] = (struct place){ &out[peer], peer, slot };
			places[1][peer][slot] = (struct place){ &in[peer], peer, slot };
			if (sends(peer, me))
				post_receive(&side, me, peer, slot, addr[peer]);
		}
	}
	double end = now() + (double)seconds, limit = end + 60;
	for (int over = 0; !over;) {
		int more = now() < end;

		over = !more;
		for (int peer = 0; peer < PROCESSES; peer++) {
			struct direction *it = &out[peer];

			if (peer == me)
				continue;
			for (int slot = 0; sends(me, peer) && more && slot < WINDOW; slot++) {
				uint64_t seed = seed_of(me, peer, it->posted);
				size_t len = length_of(seed);

				if (it->busy[slot])
					continue;
				fill(it->bytes[slot], len, seed);
				it->number[slot] = it->posted;
				long posted = fi_tsend(side.ep, it->bytes[slot], len, NULL, addr[peer], (uint64_t)me, &places[0][peer][slot]);
				if (posted == -FI_EAGAIN)
					break;
				MUST(posted);
				it->busy[slot] = 1;
				it->posted++;
			}
			if (!more && it->done == it->posted && !told(word_of(me, peer)))
				put(word_of(me, peer), it->posted + 1);
			/* complete are: this process's messages, and those to it */
			over &= it->done == it->posted && told(word_of(peer, me)) && in[peer].done + 1 == told(word_of(peer, me));
		}
		take_all(&side, me, addr);
		if (now() > limit)
			die("process %d: messages are missing", me);
	}
	add(ENDED);
	UNTIL(told(ENDED) == PROCESSES, progress(&side));
	close_side(&side);
}

/* ---- memory ---- */

struct chain {
	int peer, number, step;
	uint64_t rounds, before; /* before: the value that the addition has found */
	uint8_t *bytes, *back;
	size_t len;
};

enum { WRITE, READ, ADD };

/* The region of a process: a counter for each chain of each process, and its piece. */
static size_t place_of(int process, int chain) { return (size_t)(process * CHAINS + chain) * (PIECE + 64); }

static int step(struct side *side, int me, const fi_addr_t *addr, struct chain *it)
{
	static uint64_t one = 1;
	size_t at = place_of(me, it->number);
	fi_addr_t to = addr[it->peer];
	long posted;

	switch (it->step) {
	case WRITE:
		posted = fi_write(side->ep, it->bytes, it->len, NULL, to, at + 64, KEY, it);
		break;
	case READ:
		posted = fi_read(side->ep, it->back, it->len, NULL, to, at + 64, KEY, it);
		break;
	default:
		posted = fi_fetch_atomic(side->ep, &one, 1, NULL, &it->before, NULL, to, at, KEY, FI_UINT64, FI_SUM, it);
		break;
	}
	if (posted != -FI_EAGAIN)
		MUST(posted);
	return posted == 0;
}

static void begin_round(struct chain *it, int me)
{
	uint64_t seed = seed_of(me, it->peer, it->rounds * CHAINS + (uint64_t)it->number);

	it->step = WRITE;
	it->len = 8 + mixed(seed) % ((it->rounds % 4) ? 1000 : PIECE - 8);
	fill(it->bytes, it->len, seed);
}

static void accesses(int me)
{
	struct side side;
	struct fid_mr *mr;
	fi_addr_t addr[PROCESSES];
	struct chain chains[PROCESSES][CHAINS];
	size_t size = place_of(PROCESSES, 0);
	uint8_t *memory = calloc(1, size);
	uint64_t done = 0, left = 0;

	wanted.wait = FI_WAIT_NONE;
	wanted.caps = FI_MSG | FI_TAGGED | FI_RMA | FI_ATOMIC;
	open_domain_of(&side);
	side.tx = queue(&side, 0);
	side.rx = queue(&side, 0);
	MUST(fi_mr_reg(side.domain, memory, size, FI_REMOTE_READ | FI_REMOTE_WRITE, 0, KEY, 0, &mr, NULL));
	side.ep = endpoint_on(&side, 0);
	publish(side.ep, me);
	struct chain *idle[PROCESSES * CHAINS];
	for (int peer = 0; peer < PROCESSES; peer++) {
		if (peer == me)
			continue;
		addr[peer] = address(&side, peer);
		for (int number = 0; number < CHAINS; number++) {
			struct chain *it = &chains[peer][number];

			*it = (struct chain){ .peer = peer, .number = number, .bytes = malloc(PIECE), .back = malloc(PIECE) };
			begin_round(it, me);
			idle[left++] = it;
		}
	}
	const uint64_t all = left;
	double end = now() + (double)seconds, limit = end + 60;
	while (done < all) {
		struct fi_cq_tagged_entry entries[16];
		size_t got;

		for (uint64_t at = 0; at < left;)
			if (step(&side, me, addr, idle[at]))
				idle[at] = idle[--left];
			else
				at++;
		got = take(side.tx, entries, 16);
		for (size_t at = 0; at < got; at++) {
			struct chain *it = entries[at].op_context;

			if (it->step == READ && memcmp(it->bytes, it->back, it->len))
				die("process %d reads other bytes from %d than it has written, round %llu", me, it->peer, (unsigned long long)it->rounds);
			if (it->step++ == ADD) {
				IS(it->before == it->rounds);
				it->rounds++;
				if (now() > end) {
					done++;
					continue;
				}
				begin_round(it, me);
			}
			idle[left++] = it;
		}
		(void)fi_cq_read(side.rx, NULL, 0);
		if (now() > limit)
			die("process %d: operations are missing", me);
	}
	for (int peer = 0; peer < PROCESSES; peer++)
		if (peer != me) {
			uint64_t rounds = 0;

			for (int number = 0; number < CHAINS; number++)
				rounds += chains[peer][number].rounds;
			put(word_of(me, peer), rounds + 1);
		}
	add(ENDED);
	UNTIL_WITHIN(60, told(ENDED) == PROCESSES, progress(&side));
	/* what each other process has added */
	for (int peer = 0; peer < PROCESSES; peer++) {
		uint64_t sum = 0, counted;

		if (peer == me)
			continue;
		for (int number = 0; number < CHAINS; number++) {
			memcpy(&counted, memory + place_of(peer, number), 8);
			sum += counted;
		}
		IS(sum + 1 == told(word_of(peer, me)));
	}
	MUST(fi_close(&side.ep->fid));
	side.ep = NULL;
	MUST(fi_close(&mr->fid));
	close_side(&side);
}

/* ---- modes ---- */

static void run(void (*main)(int))
{
	char names[PROCESSES][16];
	pid_t pids[PROCESSES];
	uint64_t least = UINT64_MAX, most = 0;
	int failed = 0;

	for (int i = 0; i < PROCESSES; i++) {
		snprintf(names[i], sizeof names[i], "process %d", i);
		pids[i] = start(names[i], main, i);
	}
	for (int i = 0; i < PROCESSES; i++)
		failed |= status_of(pids[i], names[i]);
	if (failed)
		exit(1);
	for (int from = 0; from < PROCESSES; from++)
		for (int to = 0; to < PROCESSES; to++)
			if (sends(from, to)) {
				uint64_t count = told(word_of(from, to)) - 1;

				least = count < least ? count : least;
				most = count > most ? count : most;
			}
	printf("%llu to %llu operations of each pair\n", (unsigned long long)least, (unsigned long long)most);
	IS(least > 0);
}

static void messages(void) { run(exchanges); }
static void oneway(void)
{
	halves = 1;
	run(exchanges);
}
static void accessed(void) { run(accesses); }

int main(int argc, char **argv)
{
	static const struct mode modes[] = {
		{ "messages", messages },
		{ "oneway", oneway },
		{ "memory", accessed },
	};

	if (argc > 5)
		seconds = strtoull(argv[5], NULL, 10);
	return run_mode(modes, sizeof modes / sizeof *modes, argc, argv);
}
