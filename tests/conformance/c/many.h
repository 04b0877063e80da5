/* Processes with endpoints of type FI_EP_RDM, for the programs rdm_*.c. The processes are forked
 * before any of them calls libfabric; they exchange names and their state in shared memory, the
 * board. */
#ifndef MANY_H
#define MANY_H

#include "end.h"

#include <poll.h>
#include <rdma/fi_tagged.h>
#include <stdatomic.h>
#include <sys/mman.h>

#define SECONDS 30
#define CAPS (FI_MSG | FI_TAGGED)

#define IS(condition)                                                                                                \
	do {                                                                                                         \
		if (!(condition))                                                                                    \
			die("line %d: not so: %s", __LINE__, #condition);                                            \
	} while (0)

#define RETURNS(call, value)                                                                                         \
	do {                                                                                                         \
		long returned = (long)(call);                                                                        \
		if (returned != (value))                                                                             \
			die("line %d: %s: %ld", __LINE__, #call, returned);                                          \
	} while (0)

/* Does something until the condition holds, for at most `limit` seconds. */
#define UNTIL_WITHIN(limit, condition, doing)                                                                        \
	do {                                                                                                         \
		double until = now() + (limit);                                                                      \
		while (!(condition)) {                                                                               \
			doing;                                                                                       \
			if (now() > until)                                                                           \
				die("line %d: not within %.0f s: %s", __LINE__, (double)(limit), #condition);        \
		}                                                                                                    \
	} while (0)

#define UNTIL(condition, doing) UNTIL_WITHIN(SECONDS, condition, doing)

enum { NAMES = 1100, WORDS = 64 };

struct name {
	size_t len;
	uint8_t bytes[64];
};

struct board {
	struct name names[NAMES];
	_Atomic int named[NAMES];
	_Atomic uint64_t words[WORDS]; /* each mode gives them their meaning */
};

static struct board *board;
static int wants_auto;

/* How objects are opened; a mode changes it before it opens them. */
static struct {
	enum fi_wait_obj wait;
	enum fi_threading threading;
	uint64_t caps;
	size_t tx_size, rx_size, tx_queue, rx_queue;
	const char *service; /* the port, or NULL */
} wanted;

/* One endpoint and what it uses. */
struct side {
	struct fi_info *info;
	struct fid_fabric *fabric;
	struct fid_domain *domain;
	struct fid_av *av;
	struct fid_cq *tx, *rx;
	struct fid_cntr *sent, *received;
	struct fid_ep *ep;
};

/* ---- processes ---- */

static inline void make_board(void)
{
	board = mmap(NULL, sizeof *board, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (board == MAP_FAILED)
		die("mmap: %s", strerror(errno));
}

/* Starts a process that calls `main` and ends with 0. */
static inline pid_t start(const char *name, void (*main)(int), int argument)
{
	pid_t pid = child(name);

	if (pid < 0)
		die("fork: %s", strerror(errno));
	if (pid == 0) {
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

static inline void open_domain_of(struct side *side)
{
	struct fi_info *hints = fi_allocinfo();
	struct fi_av_attr attr = { .type = FI_AV_TABLE };

	memset(side, 0, sizeof *side);
	hints->caps = wanted.caps ? wanted.caps : CAPS;
	hints->ep_attr->type = FI_EP_RDM;
	hints->domain_attr->data_progress = wants_auto ? FI_PROGRESS_AUTO : FI_PROGRESS_MANUAL;
	hints->domain_attr->threading = wanted.threading;
	hints->tx_attr->size = wanted.tx_size;
	hints->rx_attr->size = wanted.rx_size;
	hints->fabric_attr->prov_name = strdup(provider);
	MUST(fi_getinfo(FI_VERSION(1, 17), node, wanted.service, FI_SOURCE, hints, &side->info));
	fi_freeinfo(hints);
	if (strcmp(side->info->fabric_attr->prov_name, provider))
		die("the provider is %s", side->info->fabric_attr->prov_name);
	MUST(fi_fabric(side->info->fabric_attr, &side->fabric, NULL));
	MUST(fi_domain(side->fabric, side->info, &side->domain, NULL));
	MUST(fi_av_open(side->domain, &attr, &side->av, NULL));
}

static inline struct fid_cq *queue(struct side *side, size_t size)
{
	struct fi_cq_attr attr = { .format = FI_CQ_FORMAT_TAGGED, .wait_obj = wanted.wait, .size = size };
	struct fid_cq *cq;

	if (attr.wait_obj == 0)
		attr.wait_obj = FI_WAIT_NONE;
	MUST(fi_cq_open(side->domain, &attr, &cq, NULL));
	return cq;
}

static inline struct fid_cntr *counter(struct side *side)
{
	struct fi_cntr_attr attr = { .events = FI_CNTR_EVENTS_COMP, .wait_obj = FI_WAIT_UNSPEC };
	struct fid_cntr *cntr;

	MUST(fi_cntr_open(side->domain, &attr, &cntr, NULL));
	return cntr;
}

/* An enabled endpoint on the side's queues and counters. */
static inline struct fid_ep *endpoint_on(struct side *side, uint64_t selective)
{
	struct fid_ep *ep;

	MUST(fi_endpoint(side->domain, side->info, &ep, NULL));
	MUST(fi_ep_bind(ep, &side->av->fid, 0));
	if (side->tx && side->tx == side->rx) {
		MUST(fi_ep_bind(ep, &side->tx->fid, FI_TRANSMIT | FI_RECV | selective));
	} else {
		if (side->tx)
			MUST(fi_ep_bind(ep, &side->tx->fid, FI_TRANSMIT | selective));
		if (side->rx)
			MUST(fi_ep_bind(ep, &side->rx->fid, FI_RECV | selective));
	}
	if (side->sent)
		MUST(fi_ep_bind(ep, &side->sent->fid, FI_SEND));
	if (side->received)
		MUST(fi_ep_bind(ep, &side->received->fid, FI_RECV));
	MUST(fi_enable(ep));
	return ep;
}

static inline void publish(struct fid_ep *ep, int place)
{
	struct name *name = &board->names[place];

	name->len = sizeof name->bytes;
	MUST(fi_getname(&ep->fid, name->bytes, &name->len));
	atomic_store(&board->named[place], 1);
}

/* The address of the endpoint with this place on the board, which may come later. */
static inline fi_addr_t address(struct side *side, int place)
{
	fi_addr_t addr = FI_ADDR_NOTAVAIL;

	UNTIL(atomic_load(&board->named[place]), pause_ms(1));
	RETURNS(fi_av_insert(side->av, board->names[place].bytes, 1, &addr, 0, NULL), 1);
	return addr;
}

/* A side with an endpoint, its own queues, and its name on the board. */
static inline void open_side(struct side *side, int place)
{
	open_domain_of(side);
	side->tx = queue(side, wanted.tx_queue);
	side->rx = queue(side, wanted.rx_queue);
	side->ep = endpoint_on(side, 0);
	publish(side->ep, place);
}

static inline void close_side(struct side *side)
{
	if (side->ep)
		MUST(fi_close(&side->ep->fid));
	if (side->tx)
		MUST(fi_close(&side->tx->fid));
	if (side->rx && side->rx != side->tx)
		MUST(fi_close(&side->rx->fid));
	if (side->sent)
		MUST(fi_close(&side->sent->fid));
	if (side->received)
		MUST(fi_close(&side->received->fid));
	MUST(fi_close(&side->av->fid));
	MUST(fi_close(&side->domain->fid));
	MUST(fi_close(&side->fabric->fid));
	fi_freeinfo(side->info);
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

/* Repeats a post until it is not -FI_EAGAIN. */
#define POST(side, call)                                                                                             \
	do {                                                                                                         \
		double until = now() + SECONDS;                                                                      \
		long posted;                                                                                         \
		while ((posted = (long)(call)) == -FI_EAGAIN) {                                                      \
			progress(side);                                                                              \
			if (now() > until)                                                                           \
				die("line %d: %s: not possible within %d s", __LINE__, #call, SECONDS);              \
		}                                                                                                    \
		if (posted)                                                                                          \
			die("line %d: %s: %ld (%s)", __LINE__, #call, posted, fi_strerror((int)-posted));            \
	} while (0)

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
