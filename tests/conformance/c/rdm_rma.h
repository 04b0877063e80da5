/* RMA from process 0 to process 1 in all calls, for rdm_rma.c and rdm_rma_peers.c. */
#ifndef RDM_RMA_H
#define RDM_RMA_H

#include "rdm_memory.h"

#include <fcntl.h>

#define MIB (1UL << 20)
#define LARGEST (8 * MIB)
#define AREA (LARGEST + 65536)
#define CAPS_RMA (FI_MSG | FI_TAGGED | FI_RMA)
#define WRITTEN (FI_RMA | FI_WRITE)
#define READ_DONE (FI_RMA | FI_READ)
#define ALL_REMOTE (FI_REMOTE_READ | FI_REMOTE_WRITE)
enum { MOST = 16 };

static uint8_t *memory, *local;	    /* AREA bytes each; the peer has access to the first */
static struct region regions[2];    /* both are `memory` */
static struct shown there[2];	    /* those of the peer */

static char file_name[] = "/var/tmp/rdm_rma.XXXXXX";
static inline void remove_file(void) { unlink(file_name); }

/* A shared mapping of a file on a disk, which can be made durable, or of a part of the device
 * WEFT_TEST_PMEM, which is persistent memory. Called once by a process. */
static inline uint8_t *durable_pages(size_t len)
{
	const char *device = getenv("WEFT_TEST_PMEM");
	int fd = device ? open(device, O_RDWR) : mkstemp(file_name);
	void *bytes;

	if (device)
		IS(fd >= 0);
	else
		IS(fd >= 0 && atexit(remove_file) == 0 && ftruncate(fd, (off_t)len) == 0);
	bytes = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_SHARED, fd, device ? (off_t)(me * 4 * LARGEST) : 0);
	IS(bytes != MAP_FAILED);
	close(fd);
	return bytes;
}

/* Opens endpoints and shows the regions to the peer. */
static inline void begin(struct side *side, uint64_t caps)
{
	open_memory_pair(side, caps);
	memory = needed.region_flags & FI_RMA_PMEM ? durable_pages(AREA) : pages(AREA);
	local = pages(AREA);
	for (unsigned i = 0; i < 2; i++) {
		regions[i] = region_of(side, memory, AREA, ALL_REMOTE, 100 + i);
		show(side, &regions[i], i);
	}
	meet(side);
	for (unsigned i = 0; i < 2; i++)
		there[i] = region_at(side, 1 - me, i);
}

/* As begin(); a success means that the operation has been done at the target. */
static inline void begin_delivery(struct side *side)
{
	needed.op_flags = FI_DELIVERY_COMPLETE;
	begin(side, CAPS_RMA);
}

static inline void finish_ep(struct side *side)
{
	meet(side);
	MUST(fi_close(&side->ep->fid));
	side->ep = NULL;
	close_region(&regions[0]);
	close_region(&regions[1]);
	close_side(side);
	munmap(memory, AREA);
	munmap(local, AREA);
}

static inline void finish(struct side *side)
{
	meet(side);
	must_be_empty(side);
	finish_ep(side);
}

/* ---- contents in several buffers, with GUARD bytes before and after each ---- */

/* The offset in the contents at which buffer i of `count` begins. */
static inline size_t begin_of(size_t len, unsigned count, unsigned i) { return len * (size_t)(i * (i + 1)) / (size_t)(count * (count + 1)); }
static inline size_t length_of(size_t len, unsigned count, unsigned i) { return begin_of(len, count, i + 1) - begin_of(len, count, i); }
static inline size_t place_of(size_t len, unsigned count, unsigned i) { return GUARD + begin_of(len, count, i) + i * 2 * GUARD; }

static inline void wipe(uint8_t *base, size_t len, unsigned count)
{
	for (unsigned i = 0; i < count; i++)
		clear(base + place_of(len, count, i), length_of(len, count, i));
}

static inline void paint_parts(uint8_t *base, size_t len, unsigned count, uint64_t seed)
{
	uint8_t *whole = malloc(len + 1);

	wipe(base, len, count);
	paint(whole, len, seed);
	for (unsigned i = 0; i < count; i++)
		memcpy(base + place_of(len, count, i), whole + begin_of(len, count, i), length_of(len, count, i));
	free(whole);
}

/* Waits for the contents if `side` is not NULL. */
static inline void check_parts(int line, struct side *side, const uint8_t *base, size_t len, unsigned count, uint64_t seed)
{
	uint8_t *whole = malloc(len + 1);
	double limit = now() + SECONDS;
	size_t at;

	for (;;) {
		for (unsigned i = 0; i < count; i++)
			memcpy(whole + begin_of(len, count, i), base + place_of(len, count, i), length_of(len, count, i));
		at = differs(whole, len, seed);
		if (at == len || !side || now() > limit)
			break;
		progress(side);
	}
	if (at != len)
		die("line %d: byte %zu of %zu differs, %u parts, seed %llu", line, at, len, count, (unsigned long long)seed);
	for (unsigned i = 0; i < count; i++)
		if (!guarded(base + place_of(len, count, i), length_of(len, count, i)))
			die("line %d: bytes around part %u of %u changed, length %zu", line, i, count, len);
	free(whole);
}

/* ---- calls ---- */

enum { WRITE, WRITEV, WRITEMSG, WRITEMSG_DATA, WRITEMSG_INJECT, INJECT_WRITE, WRITEDATA, INJECT_WRITEDATA, READ, READV, READMSG, CALLS };

struct op {
	int call;
	size_t len;
	unsigned locals, remotes; /* buffers */
	uint64_t seed, flags;
	size_t shift; /* of the remote buffers */
};

static inline bool is_read(int call) { return call >= READ; }
static inline bool has_data(int call) { return call == WRITEMSG_DATA || call == WRITEDATA || call == INJECT_WRITEDATA; }
static inline bool is_injected(int call) { return call == WRITEMSG_INJECT || call == INJECT_WRITE || call == INJECT_WRITEDATA; }
static inline bool is_vector(int call) { return call == WRITEV || call == READV; }
static inline bool is_msg(int call) { return call == WRITEMSG || call == WRITEMSG_DATA || call == WRITEMSG_INJECT || call == READMSG; }
static inline bool has_completion(int call) { return call != INJECT_WRITE && call != INJECT_WRITEDATA; }
static inline uint64_t data_of(uint64_t seed) { return mixed(seed) | 1ULL << 63; }

static inline ssize_t post_op(struct side *side, const struct op *op, void *context)
{
	struct iovec iov[MOST];
	struct fi_rma_iov rma[MOST];
	struct fi_msg_rma msg = { .msg_iov = iov, .iov_count = op->locals, .addr = side->peer, .rma_iov = rma, .rma_iov_count = op->remotes, .context = context, .data = data_of(op->seed) };
	uint64_t flags = FI_COMPLETION | op->flags;
	struct fid_ep *ep = side->ep;
	fi_addr_t to = side->peer;
	uint8_t *buf;

	for (unsigned i = 0; i < op->locals; i++)
		iov[i] = (struct iovec){ local + place_of(op->len, op->locals, i), length_of(op->len, op->locals, i) };
	for (unsigned i = 0; i < op->remotes; i++)
		rma[i] = (struct fi_rma_iov){ there[i % 2].addr + op->shift + place_of(op->len, op->remotes, i), length_of(op->len, op->remotes, i), there[i % 2].key };
	buf = iov[0].iov_base;
	switch (op->call) {
	case WRITE:
		return fi_write(ep, buf, op->len, NULL, to, rma[0].addr, rma[0].key, context);
	case WRITEV:
		return fi_writev(ep, iov, NULL, op->locals, to, rma[0].addr, rma[0].key, context);
	case WRITEMSG:
		return fi_writemsg(ep, &msg, flags);
	case WRITEMSG_DATA:
		return fi_writemsg(ep, &msg, flags | FI_REMOTE_CQ_DATA);
	case WRITEMSG_INJECT:
		return fi_writemsg(ep, &msg, flags | FI_INJECT);
	case INJECT_WRITE:
		return fi_inject_write(ep, buf, op->len, to, rma[0].addr, rma[0].key);
	case WRITEDATA:
		return fi_writedata(ep, buf, op->len, NULL, msg.data, to, rma[0].addr, rma[0].key, context);
	case INJECT_WRITEDATA:
		return fi_inject_writedata(ep, buf, op->len, msg.data, to, rma[0].addr, rma[0].key);
	case READ:
		return fi_read(ep, buf, op->len, NULL, to, rma[0].addr, rma[0].key, context);
	case READV:
		return fi_readv(ep, iov, NULL, op->locals, to, rma[0].addr, rma[0].key, context);
	default:
		return fi_readmsg(ep, &msg, flags);
	}
}

/* One operation from process 0 to process 1, with all its effects checked. */
static inline void one_op(struct side *side, const struct op *op)
{
	if (me == 1) {
		if (is_read(op->call))
			paint_parts(memory + op->shift, op->len, op->remotes, op->seed);
		else
			wipe(memory + op->shift, op->len, op->remotes);
		meet(side);
		if (has_data(op->call)) {
			IS(REMOTE_DATA(side) == data_of(op->seed));
			check_parts(__LINE__, NULL, memory + op->shift, op->len, op->remotes, op->seed);
		} else {
			check_parts(__LINE__, is_read(op->call) ? NULL : side, memory + op->shift, op->len, op->remotes, op->seed);
		}
	} else {
		meet(side);
		if (is_read(op->call))
			wipe(local, op->len, op->locals);
		else
			paint_parts(local, op->len, op->locals, op->seed);
		POST(side, post_op(side, op, memory + op->call));
		if (is_injected(op->call))
			memset(local, 0xdd, op->len + op->locals * 2 * GUARD);
		if (has_completion(op->call))
			DONE(side, memory + op->call, is_read(op->call) ? READ_DONE : WRITTEN);
		if (!is_injected(op->call))
			check_parts(__LINE__, NULL, local, op->len, op->locals, op->seed);
	}
	meet(side);
}

#endif
