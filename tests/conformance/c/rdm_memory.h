/* Processes with endpoints of type FI_EP_RDM that access the memory of each other, for the programs
 * rdm_rma.c, rdm_mr.c, rdm_atomic_forms.c and rdm_shmem.c. Each process calls the function of the
 * mode; `me` is its number. Process 0 is the one that the user has started. A program defines _GNU_SOURCE
 * before it includes this file. */
#ifndef RDM_MEMORY_H
#define RDM_MEMORY_H

#include "rdm_processes.h"

#include <rdma/fi_atomic.h>
#include <rdma/fi_rma.h>
#include <sys/uio.h>

enum { PROCESSES = 8, PLACES = 48, GUARD = 64, NOT_OFFERED = 77 };

/* A region as its owner describes it to the other processes. */
struct shown {
	uint64_t addr, key; /* for fi_rma_iov */
	uint64_t base;	    /* for fi_mr_map_raw */
	size_t raw_len;	    /* 0 if the region is not used by its raw key */
	uint8_t raw[128];
	uint8_t *bytes; /* in the owner's process */
	size_t len;
};

static struct meeting {
	_Atomic unsigned arrived, round;
	struct shown shown[PROCESSES][PLACES];
} *meeting;

static unsigned me, processes;
static pid_t others[PROCESSES]; /* in process 0: those of the others, or 0 for a process that has ended */
static bool not_offered;	/* a mode sets it: the program ends with NOT_OFFERED */

/* What an endpoint needs beside `wanted`. */
static struct {
	int mr_mode;
	size_t mr_key_size;
	uint64_t op_flags, msg_order;
	uint64_t selective; /* FI_SELECTIVE_COMPLETION or 0 */
	uint64_t region_flags;
} needed = { .mr_mode = FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY };

/* ---- processes ---- */

/* Ends this process if another one has failed. Called by process 0 while it waits. */
static inline void others_live(void)
{
	for (unsigned i = 1; me == 0 && i < processes; i++) {
		int status;

		if (others[i] && waitpid(others[i], &status, WNOHANG) == others[i]) {
			others[i] = 0;
			if (!WIFEXITED(status) || WEXITSTATUS(status))
				die("process %u has ended with status %x", i, (unsigned)status);
		}
	}
}

/* All processes reach this point. Each makes progress meanwhile, unless `side` is NULL. */
static inline void meet(struct side *side)
{
	unsigned round = atomic_load(&meeting->round);
	double limit = now() + 2 * SECONDS;

	if (atomic_fetch_add(&meeting->arrived, 1) + 1 == processes) {
		atomic_store(&meeting->arrived, 0);
		atomic_store(&meeting->round, round + 1);
		return;
	}
	for (unsigned i = 0; atomic_load(&meeting->round) == round; i++) {
		if (side)
			progress(side);
		others_live();
		if (i >= 20) /* leaves the processor to the others */
			usleep(200);
		if (now() > limit)
			die("the other processes do not come within %d s", 2 * SECONDS);
	}
}

/* The bytes at an address of another process. */
static inline void peek(unsigned process, void *into, const void *from, size_t len)
{
	struct iovec local = { into, len }, remote = { (void *)from, len };

	if (process_vm_readv(others[process], &local, 1, &remote, 1, 0) != (ssize_t)len)
		die("process_vm_readv: %s", strerror(errno));
}

static inline void stop_process(unsigned process)
{
	int status;

	IS(kill(others[process], SIGSTOP) == 0);
	IS(waitpid(others[process], &status, WUNTRACED) == others[process] && WIFSTOPPED(status));
}

struct memory_mode {
	const char *name;
	void (*check)(void);
	unsigned processes;
};

static inline int run_memory_mode(const struct memory_mode *modes, size_t count, int argc, char **argv)
{
	static const char *const roles[PROCESSES] = { "process 0", "process 1", "process 2", "process 3", "process 4" };
	const struct memory_mode *mode = NULL;

	if (argc < 4)
		die("usage: %s MODE PROV NODE [auto] [COUNT]", argv[0]);
	provider = argv[2];
	node = strcmp(argv[3], "-") ? argv[3] : NULL;
	wants_auto = argc > 4 && !strcmp(argv[4], "auto");
	wanted.manual = !wants_auto;
	for (size_t i = 0; i < count; i++)
		if (!strcmp(argv[1], modes[i].name))
			mode = &modes[i];
	if (!mode)
		die("no such mode");
	make_board();
	meeting = mmap(NULL, sizeof *meeting, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (meeting == MAP_FAILED)
		die("mmap: %s", strerror(errno));
	processes = mode->processes;
	role = roles[0];
	alarm(90);
	for (unsigned i = 1; i < processes; i++) {
		others[i] = child(roles[i]);
		if (others[i] == 0) {
			me = i;
			alarm(0); /* process 0 has the limit; this one is killed when process 0 ends */
			mode->check();
			return not_offered ? NOT_OFFERED : 0;
		}
	}
	mode->check();
	for (unsigned i = 1; i < processes; i++) {
		int status = others[i] ? status_of(others[i], roles[i]) : 0;

		if (status && !(status == NOT_OFFERED && not_offered))
			return 1;
	}
	return not_offered ? NOT_OFFERED : 0;
}

/* ---- objects ---- */

/* The result of fi_getinfo for an endpoint of the provider alone, as `wanted` and `needed` say. */
static inline int find_info(struct fi_info **info)
{
	struct fi_info *hints = fi_allocinfo(), *list, *each;
	int result;

	hints->caps = wanted.caps;
	hints->mode = FI_CONTEXT | FI_CONTEXT2;
	hints->ep_attr->type = FI_EP_RDM;
	hints->ep_attr->protocol = asked_protocol();
	hints->domain_attr->mr_mode = offered_bits(needed.mr_mode);
	hints->domain_attr->mr_key_size = needed.mr_key_size;
	hints->domain_attr->data_progress = wants_auto ? FI_PROGRESS_AUTO : wanted.manual ? FI_PROGRESS_MANUAL : FI_PROGRESS_UNSPEC;
	hints->domain_attr->threading = wanted.threading;
	hints->domain_attr->resource_mgmt = FI_RM_ENABLED;
	hints->tx_attr->size = wanted.tx_size;
	hints->tx_attr->op_flags = needed.op_flags;
	hints->tx_attr->msg_order = needed.msg_order;
	hints->rx_attr->msg_order = needed.msg_order;
	hints->fabric_attr->prov_name = strdup(provider);
	result = fi_getinfo(FI_VERSION(1, 17), node, NULL, node ? FI_SOURCE : 0, hints, &list);
	fi_freeinfo(hints);
	if (result)
		return result;
	for (each = list; each && strcmp(each->fabric_attr->prov_name, provider); each = each->next)
		;
	*info = each ? fi_dupinfo(each) : NULL;
	fi_freeinfo(list);
	return each ? 0 : -FI_ENODATA;
}

/* Whether `wanted` and `needed` are offered; prints if they are not. */
static inline bool offers(const char *what)
{
	struct fi_info *info = NULL;
	int result = find_info(&info);

	if (result == 0)
		fi_freeinfo(info);
	else if (result != -FI_ENODATA)
		die("fi_getinfo for %s: %d (%s)", what, result, fi_strerror(-result));
	else if (me == 0)
		printf("not offered: %s\n", what);
	return result == 0;
}

struct counters {
	struct fid_cntr *write, *read, *remote_write, *remote_read;
};

static inline struct fid_ep *endpoint_with(struct side *side, uint64_t selective, const struct counters *counters)
{
	struct fid_ep *ep;

	MUST(fi_endpoint(side->domain, side->info, &ep, NULL));
	MUST(fi_ep_bind(ep, &side->av->fid, 0));
	MUST(fi_ep_bind(ep, &side->tx->fid, FI_TRANSMIT | selective));
	MUST(fi_ep_bind(ep, &side->rx->fid, FI_RECV));
	if (counters && counters->write)
		MUST(fi_ep_bind(ep, &counters->write->fid, FI_WRITE));
	if (counters && counters->read)
		MUST(fi_ep_bind(ep, &counters->read->fid, FI_READ));
	if (counters && counters->remote_write)
		MUST(fi_ep_bind(ep, &counters->remote_write->fid, FI_REMOTE_WRITE));
	if (counters && counters->remote_read)
		MUST(fi_ep_bind(ep, &counters->remote_read->fid, FI_REMOTE_READ));
	MUST(fi_enable(ep));
	return ep;
}

static inline void open_queues(struct side *side)
{
	struct fi_info *info = NULL;

	MUST(find_info(&info));
	open_domain_with(side, info);
	side->tx = queue(side, wanted.tx_queue);
	side->rx = queue(side, wanted.rx_queue);
}

static inline void open_memory_side(struct side *side)
{
	open_queues(side);
	side->ep = endpoint_with(side, needed.selective, NULL);
	publish(side->ep, (int)me);
}

/* The peer of a process in a mode with two processes. */
static inline void open_memory_pair(struct side *side, uint64_t caps)
{
	wanted.caps = caps;
	open_memory_side(side);
	meet(side); /* a name of an earlier endpoint is on the board no more */
	side->peer = address(side, 1 - (int)me);
}

/* ---- regions ---- */

struct region {
	struct fid_mr *mr;
	void *desc;
	uint8_t *bytes;
	size_t len;
};

static inline uint8_t *pages(size_t len)
{
	void *bytes = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (bytes == MAP_FAILED)
		die("mmap: %s", strerror(errno));
	return bytes;
}

/* The bits that the domain needs. "The behavior of basic registration is equivalent to requiring"
 * three of them. */
static inline int mr_mode(const struct side *side)
{
	int mode = side->info->domain_attr->mr_mode;

	return mode == FI_MR_BASIC ? FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY : mode;
}

/* A region of the domain that needs no more steps. */
static inline struct region finish_region(struct side *side, struct fid_mr *mr, void *bytes, size_t len)
{
	if (mr_mode(side) & FI_MR_ENDPOINT) {
		MUST(fi_mr_bind(mr, &side->ep->fid, 0));
		MUST(fi_mr_enable(mr));
	}
	return (struct region){ .mr = mr, .desc = fi_mr_desc(mr), .bytes = bytes, .len = len };
}

static inline struct region region_of(struct side *side, void *bytes, size_t len, uint64_t access, uint64_t key)
{
	struct fid_mr *mr;

	MUST(fi_mr_reg(side->domain, bytes, len, access, 0, key, needed.region_flags, &mr, NULL));
	return finish_region(side, mr, bytes, len);
}

static inline void close_region(struct region *region)
{
	if (region->mr)
		MUST(fi_close(&region->mr->fid));
	region->mr = NULL;
}

static inline void show(struct side *side, const struct region *region, unsigned place)
{
	struct shown *shown = &meeting->shown[me][place];

	memset(shown, 0, sizeof *shown);
	shown->bytes = region->bytes;
	shown->len = region->len;
	shown->addr = mr_mode(side) & FI_MR_VIRT_ADDR ? (uint64_t)(uintptr_t)region->bytes : 0;
	if (mr_mode(side) & FI_MR_RAW) {
		shown->raw_len = sizeof shown->raw;
		MUST(fi_mr_raw_attr(region->mr, &shown->base, shown->raw, &shown->raw_len, 0));
	} else {
		shown->key = fi_mr_key(region->mr);
		IS(shown->key != FI_KEY_NOTAVAIL);
	}
}

/* The region that a process has shown, usable for RMA. */
static inline struct shown region_at(struct side *side, unsigned process, unsigned place)
{
	struct shown shown = meeting->shown[process][place];

	if (shown.raw_len)
		MUST(fi_mr_map_raw(side->domain, shown.base, shown.raw, shown.raw_len, &shown.key, 0));
	return shown;
}

/* ---- contents ---- */

static inline uint64_t paint_word(uint64_t seed, size_t i) { return mixed(seed * 0x9e3779b97f4a7c15ULL + i + 1); }

static inline void paint(uint8_t *bytes, size_t len, uint64_t seed)
{
	size_t i;

	for (i = 0; i + 8 <= len; i += 8) {
		uint64_t word = paint_word(seed, i);

		memcpy(bytes + i, &word, 8);
	}
	if (i < len) {
		uint64_t word = paint_word(seed, i);

		memcpy(bytes + i, &word, len - i);
	}
}

/* The number of the first byte that differs, or `len`. A peer may be writing the bytes: each is read once, because
 * memcmp(3) may find a difference and then compare the byte again. */
static inline size_t differs(const uint8_t *bytes, size_t len, uint64_t seed)
{
	const volatile uint8_t *changing = bytes;

	for (size_t i = 0; i < len; i += 8) {
		uint64_t word = paint_word(seed, i);
		size_t n = len - i < 8 ? len - i : 8;

		for (size_t k = 0; k < n; k++)
			if (changing[i + k] != ((const uint8_t *)&word)[k])
				return i + k;
	}
	return len;
}

#define PAINTED(bytes, len, seed)                                                                                    \
	do {                                                                                                         \
		size_t differing = differs(bytes, len, seed);                                                        \
		if (differing != (size_t)(len))                                                                      \
			die("line %d: byte %zu of %zu differs, seed %llu", __LINE__, differing, (size_t)(len),       \
			    (unsigned long long)(seed));                                                             \
	} while (0)

/* The contents arrive, at last; an initiator's completion need not mean that they have arrived. */
#define ARRIVES(side, bytes, len, seed)                                                                              \
	do {                                                                                                         \
		double until = now() + SECONDS;                                                                      \
		while (differs(bytes, len, seed) != (size_t)(len) && now() < until)                                  \
			progress(side);                                                                              \
		PAINTED(bytes, len, seed);                                                                           \
	} while (0)

/* `len` bytes and GUARD bytes on both sides of them, all of which hold 0xa5. */
static inline void clear(uint8_t *bytes, size_t len) { memset(bytes - GUARD, 0xa5, len + 2 * GUARD); }

static inline bool clean(const uint8_t *bytes, size_t len)
{
	for (size_t i = 0; i < len; i++)
		if (bytes[i] != 0xa5)
			return false;
	return true;
}

static inline bool guarded(const uint8_t *bytes, size_t len) { return clean(bytes - GUARD, GUARD) && clean(bytes + len, GUARD); }

/* ---- completions ---- */

struct outcome {
	struct fi_cq_tagged_entry entry; /* of an error: context and flags alone */
	int err;			 /* 0: success */
};

static inline bool poll_outcome(struct fid_cq *cq, struct outcome *outcome)
{
	struct fi_cq_err_entry error = { 0 };
	ssize_t got = fi_cq_read(cq, &outcome->entry, 1);

	if (got == -FI_EAGAIN)
		return false;
	outcome->err = 0;
	if (got == -FI_EAVAIL) {
		RETURNS(fi_cq_readerr(cq, &error, 0), 1);
		memset(&outcome->entry, 0, sizeof outcome->entry);
		outcome->entry.op_context = error.op_context;
		outcome->entry.flags = error.flags;
		outcome->err = error.err ? error.err : FI_EOTHER;
	} else if (got != 1) {
		die("fi_cq_read: %zd", got);
	}
	return true;
}

static inline struct outcome outcome_at(int line, struct side *side, struct fid_cq *cq)
{
	struct outcome outcome;
	double limit = now() + SECONDS;

	while (!poll_outcome(cq, &outcome)) {
		progress(side);
		others_live();
		if (now() > limit)
			die("line %d: no completion within %d s", line, SECONDS);
	}
	return outcome;
}

#define OUTCOME(side, cq) outcome_at(__LINE__, side, cq)

#define KIND(flags) ((flags) & (FI_SEND | FI_RECV | FI_MSG | FI_TAGGED | FI_RMA | FI_ATOMIC | FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE))

/* The next completion of the queue for transmits is a success with this context and these flags. */
static inline void done_at(int line, struct side *side, void *context, uint64_t kind)
{
	struct outcome outcome = outcome_at(line, side, side->tx);

	if (outcome.err)
		die("line %d: a completion in error: %s", line, fi_strerror(outcome.err));
	if (outcome.entry.op_context != context)
		die("line %d: context %p, expected %p", line, outcome.entry.op_context, context);
	if (KIND(outcome.entry.flags) != kind)
		die("line %d: flags %llx, expected %llx", line, (unsigned long long)outcome.entry.flags, (unsigned long long)kind);
}

#define DONE(side, context, kind) done_at(__LINE__, side, context, kind)

/* The next entry of the queue for receives is that of a write with remote CQ data, which is
 * returned. */
static inline uint64_t remote_data_at(int line, struct side *side)
{
	struct outcome outcome = outcome_at(line, side, side->rx);

	if (outcome.err)
		die("line %d: an entry in error: %s", line, fi_strerror(outcome.err));
	/* "may be combined with an FI_RMA ... flag" */
	if ((KIND(outcome.entry.flags) | FI_RMA) != (FI_RMA | FI_REMOTE_WRITE) || !(outcome.entry.flags & FI_REMOTE_CQ_DATA))
		die("line %d: flags %llx of an entry with remote CQ data", line, (unsigned long long)outcome.entry.flags);
	return outcome.entry.data;
}

#define REMOTE_DATA(side) remote_data_at(__LINE__, side)

/* Whether `err` is an error of a refused access to a region. */
static inline bool refused(int err)
{
	return err == FI_EKEYREJECTED || err == FI_EACCES || err == FI_EPERM || err == FI_EINVAL || err == FI_EIO || err == FI_EFAULT || err == FI_EREMOTEIO;
}

/* The next completion is an error of a refused access. */
static inline int refused_at(int line, struct side *side, void *context)
{
	struct outcome outcome = outcome_at(line, side, side->tx);

	if (!outcome.err)
		die("line %d: success of an access that is not permitted", line);
	if (!refused(outcome.err))
		die("line %d: error %d (%s)", line, outcome.err, fi_strerror(outcome.err));
	if (outcome.entry.op_context != context)
		die("line %d: context %p, expected %p", line, outcome.entry.op_context, context);
	return outcome.err;
}

#define REFUSED(side, context) refused_at(__LINE__, side, context)

static inline void must_be_empty(struct side *side)
{
	for (int i = 0; i < 50; i++) {
		struct outcome outcome;

		if (poll_outcome(side->tx, &outcome))
			die("a completion that is not expected: flags %llx, error %d", (unsigned long long)outcome.entry.flags, outcome.err);
		if (poll_outcome(side->rx, &outcome))
			die("an entry that is not expected: flags %llx, error %d", (unsigned long long)outcome.entry.flags, outcome.err);
	}
}

#endif
