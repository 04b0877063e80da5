/* Processes with endpoints of type FI_EP_RDM, for the programs rdm_*.c. The processes are forked
 * before any of them calls libfabric; they exchange names and their state in shared memory, the
 * board. */
#ifndef RDM_PROCESSES_H
#define RDM_PROCESSES_H

#include "rdm_side.h"

#include <poll.h>
#include <stdatomic.h>
#include <sys/mman.h>

enum { NAMES = 1100, WORDS = 64 };

struct board {
	struct name names[NAMES];
	_Atomic int named[NAMES];
	_Atomic uint64_t words[WORDS]; /* each mode gives them their meaning */
};

static struct board *board;

/* ---- processes ---- */

static inline void make_board(void)
{
	board = mmap(NULL, sizeof *board, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (board == MAP_FAILED)
		die("mmap: %s", strerror(errno));
}

/* Starts a process that calls `main` and ends with 0. If the environment has WITHOUT_DEVICE_ATOMICS
 * with the name of the process, its device soft0 has only the atomics of verbs. */
static inline pid_t start(const char *name, void (*main)(int), int argument)
{
	const char *without = getenv("WITHOUT_DEVICE_ATOMICS");
	pid_t pid = child(name);

	if (pid < 0)
		die("fork: %s", strerror(errno));
	if (pid == 0) {
		if (without && !strcmp(without, name))
			setenv("SOFTVERBS_ATOMICS", "0", 1);
		alarm(0); /* the program's own limit is that of its parent, at whose end it is killed */
		main(argument);
		exit(0);
	}
	return pid;
}

static inline void pause_ms(unsigned ms) { usleep(ms * 1000); }

static inline uint64_t told(int word) { return atomic_load(&board->words[word]); }
static inline void put(int word, uint64_t value) { atomic_store(&board->words[word], value); }
static inline void add(int word) { atomic_fetch_add(&board->words[word], 1); }

/* ---- objects ---- */

static inline void publish(struct fid_ep *ep, int place)
{
	board->names[place] = name_of(ep);
	atomic_store(&board->named[place], 1);
}

/* The address of the endpoint with this place on the board, which may come later. */
static inline fi_addr_t address(struct side *side, int place)
{
	UNTIL(atomic_load(&board->named[place]), pause_ms(1));
	return insert(side, &board->names[place]);
}

static inline struct fid_cntr *counter(struct side *side) { return counter_of(side, FI_WAIT_UNSPEC); }

/* A side with an endpoint, its own queues, and its name on the board. */
static inline void open_side(struct side *side, int place)
{
	open_domain_of(side);
	side->tx = queue(side, wanted.tx_queue);
	side->rx = queue(side, wanted.rx_queue);
	side->ep = endpoint_on(side, 0);
	publish(side->ep, place);
}

/* ---- messages ---- */

/* Progress without reading a completion. An error completion may be waiting. */
static inline void progress(struct side *side)
{
	if (side->tx)
		(void)fi_cq_read(side->tx, NULL, 0);
	if (side->rx)
		(void)fi_cq_read(side->rx, NULL, 0);
	if (side->sent)
		(void)fi_cntr_read(side->sent);
	if (side->received)
		(void)fi_cntr_read(side->received);
}

/* Up to `count` completions; 0 if there is none. An error completion ends the program. */
static inline size_t take(struct fid_cq *cq, struct fi_cq_tagged_entry *entries, size_t count)
{
	struct fi_cq_err_entry error = { 0 };
	ssize_t got = fi_cq_read(cq, entries, count);

	if (got == -FI_EAVAIL) {
		MUST(fi_cq_readerr(cq, &error, 0));
		die("a completion in error: %s (%llx)", fi_strerror(error.err), (unsigned long long)error.flags);
	}
	if (got != -FI_EAGAIN)
		MUST(got);
	return got > 0 ? (size_t)got : 0;
}

/* The next completion of a queue. */
static inline struct fi_cq_tagged_entry next(struct side *side, struct fid_cq *cq)
{
	struct fi_cq_tagged_entry entry;

	UNTIL(take(cq, &entry, 1), if (side->tx != side->rx) (void)fi_cq_read(cq == side->tx ? side->rx : side->tx, NULL, 0));
	return entry;
}

static inline uint64_t mixed(uint64_t seed)
{
	seed = (seed ^ seed >> 30) * 0xbf58476d1ce4e5b9ULL;
	seed = (seed ^ seed >> 27) * 0x94d049bb133111ebULL;
	return seed ^ seed >> 31;
}

/* The bytes of message `seed`. */
static inline void fill(uint8_t *bytes, size_t len, uint64_t seed)
{
	uint64_t word = mixed(seed + 1);
	size_t i;

	for (i = 0; i + 8 <= len; i += 8, word += 0x0101010101010101ULL)
		memcpy(bytes + i, &word, 8);
	memcpy(bytes + i, &word, len - i);
}

static inline void must_be(const uint8_t *bytes, size_t len, uint64_t seed)
{
	uint64_t word = mixed(seed + 1);
	size_t i;

	for (i = 0; i + 8 <= len; i += 8, word += 0x0101010101010101ULL)
		if (memcmp(bytes + i, &word, 8))
			break;
	if (i < len && memcmp(bytes + i, &word, len - i < 8 ? len - i : 8))
		die("byte %zu of %zu of message %llu", i, len, (unsigned long long)seed);
}

/* Resident memory of this process in bytes. */
static inline uint64_t resident(void)
{
	unsigned long pages = 0;
	FILE *file = fopen("/proc/self/statm", "r");

	if (!file || fscanf(file, "%*u %lu", &pages) != 1)
		die("/proc/self/statm");
	fclose(file);
	return (uint64_t)pages * (uint64_t)sysconf(_SC_PAGESIZE);
}

/* Runs the mode of that name. */
struct mode {
	const char *name;
	void (*check)(void);
};

static inline int run_mode(const struct mode *modes, size_t count, int argc, char **argv)
{
	if (argc < 4)
		die("usage: %s MODE PROV NODE [auto] [COUNT]", argv[0]);
	provider = argv[2];
	node = argv[3];
	wants_auto = argc > 4 && !strcmp(argv[4], "auto");
	wanted.manual = !wants_auto;
	role = argv[1];
	for (size_t i = 0; i < count; i++)
		if (!strcmp(argv[1], modes[i].name)) {
			make_board();
			modes[i].check();
			return 0;
		}
	die("no such mode");
	return 1;
}

#endif
