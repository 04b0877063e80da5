/* Long messages between processes with endpoints of type FI_EP_RDM, for the programs rdm_long*.c:
 * operations whose completions are counted and compared, buffers of several pieces with guard bytes
 * between them, and batches of messages from one process to another. */
#ifndef RDM_LONG_H
#define RDM_LONG_H

#include "rdm_processes.h"

#include <sys/uio.h>

#define KIB (1UL << 10)
#define MIB (1UL << 20)
#define ARENA (48 * MIB)
#define GUARD 0xa5
#define REUSED 0xee
#define BOUND 25 /* seconds within which operations with a dead peer complete */

enum { PIECES = 4, BATCH = 64 };
enum { MET, SENT, WORD_2 }; /* words of the board; a program uses those from the last one on */

/* Whether all forms are wanted, which take minutes: WEFT_RDM_LONG=1. Otherwise a choice of them. */
static inline bool all_forms(void)
{
	const char *all = getenv("WEFT_RDM_LONG");

	return all && !strcmp(all, "1");
}

/* ---- operations ---- */

struct op {
	struct fi_context2 context; /* the context of the operation is the address of the struct */
	struct fi_cq_tagged_entry entry;
	struct fi_cq_err_entry error;
	fi_addr_t source;
	int err;	       /* of its completion; 0 for success */
	_Atomic unsigned done; /* completions */
	void (*then)(struct op *);
};

static unsigned completions; /* all that this process has read */

/* Records the next completion of a queue. Returns whether there was one. */
static inline bool take_one(struct fid_cq *cq)
{
	struct fi_cq_tagged_entry entry = { 0 };
	struct fi_cq_err_entry error = { 0 };
	fi_addr_t source = FI_ADDR_NOTAVAIL;
	ssize_t got = fi_cq_readfrom(cq, &entry, 1, &source);
	struct op *op;

	if (got == -FI_EAGAIN)
		return false;
	if (got == -FI_EAVAIL) {
		got = fi_cq_readerr(cq, &error, 0);
		if (got == -FI_EAGAIN) /* another thread has read it */
			return false;
		IS(got == 1);
		op = error.op_context;
		if (!op)
			die("an error entry without a context: %s (%llx)", fi_strerror(error.err), (unsigned long long)error.flags);
		IS(error.err > 0);
		op->error = error;
		op->err = error.err;
	} else {
		IS(got == 1);
		op = entry.op_context;
		if (!op)
			die("an entry without a context: flags %llx", (unsigned long long)entry.flags);
		op->entry = entry;
		op->source = source;
		op->err = 0;
	}
	completions++;
	if (op->then)
		op->then(op);
	if (atomic_fetch_add(&op->done, 1) != 0)
		die("a second completion of one operation: error %d", op->err);
	return true;
}

static inline void take_all(struct side *side)
{
	if (side->tx)
		while (take_one(side->tx))
			;
	if (side->rx && side->rx != side->tx)
		while (take_one(side->rx))
			;
}

/* As POST, for programs whose queues may have entries of which `take_all` has to keep account. */
#define PUT(side, call)                                                                                              \
	do {                                                                                                         \
		double put_until = now() + SECONDS;                                                                  \
		long put_result;                                                                                     \
		while ((put_result = (long)(call)) == -FI_EAGAIN) {                                                  \
			take_all(side);                                                                              \
			if (now() > put_until)                                                                       \
				die("line %d: %s: not possible within %d s", __LINE__, #call, SECONDS);              \
		}                                                                                                    \
		if (put_result)                                                                                      \
			die("line %d: %s: %ld (%s)", __LINE__, #call, put_result, fi_strerror((int)-put_result));    \
	} while (0)

static inline void await(struct side *side, struct op *op) { UNTIL(atomic_load(&op->done), take_all(side)); }

/* All `count` processes reach this point; each makes progress until the others have. */
static inline void meet(struct side *side, unsigned count)
{
	static unsigned meetings;

	meetings++;
	add(MET);
	UNTIL(told(MET) >= (uint64_t)meetings * count, if (side) take_all(side); usleep(50));
}

/* Progress for a time. */
static inline void linger(struct side *side, double seconds)
{
	double until = now() + seconds;

	while (now() < until)
		take_all(side);
}

/* ---- messages ---- */

static inline uint8_t *memory(size_t len)
{
	uint8_t *bytes = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);

	IS(bytes != MAP_FAILED);
	return bytes;
}

struct message {
	size_t len;  /* of the message */
	size_t room; /* of the receive */
	uint64_t tag, data, flags, seed;
	bool tagged, with_data;
	unsigned out_pieces, in_pieces;
};

struct place {
	struct iovec iov[PIECES];
	void *desc[PIECES];
	unsigned count;
	uint8_t *base; /* the pieces and the guard bytes around them */
	size_t span;
};

struct arena {
	uint8_t *bytes;
	size_t used;
	struct fid_mr *mr;
	void *desc;
};

static bool tight; /* no guard bytes between places */

static inline void open_arena(struct side *side, struct arena *arena, uint64_t access)
{
	static uint64_t key = 1;

	arena->bytes = mmap(NULL, ARENA, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	IS(arena->bytes != MAP_FAILED);
	arena->used = 0;
	if (side->info->domain_attr->mr_mode & FI_MR_LOCAL) {
		MUST(fi_mr_reg(side->domain, arena->bytes, ARENA, access, 0, key++, 0, &arena->mr, NULL));
		arena->desc = fi_mr_desc(arena->mr);
	}
}

static inline void close_arena(struct arena *arena)
{
	if (arena->mr)
		MUST(fi_close(&arena->mr->fid));
	munmap(arena->bytes, ARENA);
	memset(arena, 0, sizeof *arena);
}

/* Space that a message takes in an arena at most. */
static inline size_t space(size_t len) { return len + PIECES * 512 + 4096; }

/* Cuts `len` bytes of the arena into pieces at addresses of any alignment. */
static inline void lay(struct arena *arena, struct place *place, size_t len, unsigned pieces, uint64_t seed)
{
	size_t left = len, gap;

	memset(place, 0, sizeof *place);
	place->base = arena->bytes + arena->used;
	place->count = pieces ? pieces : 1;
	for (unsigned i = 0; i < place->count; i++) {
		uint64_t chance = mixed(seed * 16 + i);
		size_t size = i + 1 == place->count ? left : chance % 5 == 0 ? 0 : chance / 8 % (left + 1);

		gap = tight ? 0 : 1 + chance / 64 % 300;
		arena->used += gap;
		place->iov[i].iov_base = arena->bytes + arena->used;
		place->iov[i].iov_len = size;
		place->desc[i] = arena->desc;
		arena->used += size;
		left -= size;
	}
	arena->used += tight ? 0 : 64;
	place->span = (size_t)(arena->bytes + arena->used - place->base);
	IS(arena->used <= ARENA);
}

static uint8_t *flat; /* ARENA bytes */

static inline void need_flat(void)
{
	if (!flat)
		flat = mmap(NULL, ARENA, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	IS(flat != MAP_FAILED);
}

static inline void scatter(const struct place *place, size_t len, uint64_t seed)
{
	size_t at = 0;

	need_flat();
	fill(flat, len, seed);
	for (unsigned i = 0; i < place->count; i++) {
		memcpy(place->iov[i].iov_base, flat + at, place->iov[i].iov_len);
		at += place->iov[i].iov_len;
	}
}

static inline bool all_are(const uint8_t *bytes, size_t len, uint8_t value)
{
	return len == 0 || (bytes[0] == value && !memcmp(bytes, bytes + 1, len - 1));
}

/* The first `len` bytes of the pieces are those of message `seed`; all other bytes are guard bytes. */
static inline void gathered(const struct place *place, size_t len, uint64_t seed)
{
	const uint8_t *end = place->base;
	size_t at = 0;

	need_flat();
	for (unsigned i = 0; i < place->count; i++) {
		uint8_t *base = place->iov[i].iov_base;
		size_t size = place->iov[i].iov_len, part = size < len - at ? size : len - at;

		if (!all_are(end, (size_t)(base - end), GUARD))
			die("bytes before piece %u of message %llu were changed", i, (unsigned long long)seed);
		memcpy(flat + at, base, part);
		at += part;
		end = base + part;
		if (part < size && !all_are(end, size - part, GUARD))
			die("bytes after the %zu of message %llu were changed", len, (unsigned long long)seed);
		end = base + size;
	}
	if (!all_are(end, (size_t)(place->base + place->span - end), GUARD))
		die("bytes after the pieces of message %llu were changed", (unsigned long long)seed);
	must_be(flat, len, seed);
}

static inline void post_send(struct side *side, fi_addr_t to, const struct message *m, const struct place *place, struct op *op)
{
	uint64_t flags = m->flags | (m->with_data ? FI_REMOTE_CQ_DATA : 0);
	struct iovec one = place->iov[0];
	void *desc = place->desc[0];

	if (m->tagged) {
		struct fi_msg_tagged msg = { .msg_iov = place->iov, .desc = (void **)place->desc, .iov_count = place->count, .addr = to,
					     .tag = m->tag, .context = op, .data = m->data };

		if (place->count > 1 || m->flags)
			PUT(side, fi_tsendmsg(side->ep, &msg, flags));
		else if (m->with_data)
			PUT(side, fi_tsenddata(side->ep, one.iov_base, one.iov_len, desc, m->data, to, m->tag, op));
		else
			PUT(side, fi_tsend(side->ep, one.iov_base, one.iov_len, desc, to, m->tag, op));
	} else {
		struct fi_msg msg = { .msg_iov = place->iov, .desc = (void **)place->desc, .iov_count = place->count, .addr = to,
				      .context = op, .data = m->data };

		if (place->count > 1 || m->flags)
			PUT(side, fi_sendmsg(side->ep, &msg, flags));
		else if (m->with_data)
			PUT(side, fi_senddata(side->ep, one.iov_base, one.iov_len, desc, m->data, to, op));
		else
			PUT(side, fi_send(side->ep, one.iov_base, one.iov_len, desc, to, op));
	}
}

static inline void post_receive(struct side *side, fi_addr_t from, const struct message *m, const struct place *place, struct op *op)
{
	struct iovec one = place->iov[0];
	void *desc = place->desc[0];

	if (m->tagged) {
		if (place->count > 1)
			PUT(side, fi_trecvv(side->ep, place->iov, (void **)place->desc, place->count, from, m->tag, 0, op));
		else
			PUT(side, fi_trecv(side->ep, one.iov_base, one.iov_len, desc, from, m->tag, 0, op));
	} else {
		if (place->count > 1)
			PUT(side, fi_recvv(side->ep, place->iov, (void **)place->desc, place->count, from, op));
		else
			PUT(side, fi_recv(side->ep, one.iov_base, one.iov_len, desc, from, op));
	}
}

#define KINDS (FI_SEND | FI_RECV | FI_MSG | FI_TAGGED | FI_RMA | FI_ATOMIC | FI_MULTI_RECV | FI_READ | FI_WRITE)

static inline void sent_well(const struct op *op, const struct message *m)
{
	IS(op->done == 1);
	if (op->err)
		die("a send of %zu bytes: %s", m->len, fi_strerror(op->err));
	IS((op->entry.flags & KINDS) == (FI_SEND | (m->tagged ? FI_TAGGED : FI_MSG)));
}

static inline void received_well(const struct op *op, const struct message *m, fi_addr_t from)
{
	uint64_t flags = FI_RECV | (m->tagged ? FI_TAGGED : FI_MSG);

	IS(op->done == 1);
	if (m->room < m->len) {
		if (op->err != FI_ETRUNC)
			die("a receive of %zu bytes for %zu: error %d", m->room, m->len, op->err);
		if (op->error.olen != m->len - m->room)
			die("a receive of %zu bytes for %zu: olen %zu", m->room, m->len, op->error.olen);
		if (op->error.len != m->room)
			die("a receive of %zu bytes for %zu: len %zu", m->room, m->len, op->error.len);
		IS((op->error.flags & KINDS) == flags);
		IS(!m->tagged || op->error.tag == m->tag);
		IS(!m->with_data || ((op->error.flags & FI_REMOTE_CQ_DATA) && op->error.data == m->data));
		return;
	}
	if (op->err)
		die("a receive of %zu bytes for %zu: %s", m->room, m->len, fi_strerror(op->err));
	if (op->entry.len != m->len)
		die("a receive of %zu bytes for %zu: len %zu", m->room, m->len, op->entry.len);
	IS((op->entry.flags & KINDS) == flags);
	IS(!(op->entry.flags & FI_REMOTE_CQ_DATA) == !m->with_data);
	IS(!m->with_data || op->entry.data == m->data);
	IS(!m->tagged || op->entry.tag == m->tag);
	IS(op->source == from);
}

/* Tagged messages of one piece. */
static inline void send_to(struct side *side, fi_addr_t to, uint8_t *bytes, size_t len, uint64_t tag, uint64_t flags, struct op *op)
{
	struct iovec iov = { bytes, len };
	struct fi_msg_tagged msg = { .msg_iov = &iov, .iov_count = 1, .addr = to, .tag = tag, .context = op };

	if (flags)
		PUT(side, fi_tsendmsg(side->ep, &msg, flags));
	else
		PUT(side, fi_tsend(side->ep, bytes, len, NULL, to, tag, op));
}

static inline void receive_from(struct side *side, fi_addr_t from, uint8_t *bytes, size_t len, uint64_t tag, uint64_t ignore, struct op *op)
{
	PUT(side, fi_trecv(side->ep, bytes, len, NULL, from, tag, ignore, op));
}

/* ---- batches ---- */

struct batch {
	bool late;     /* receives are posted when all sends have been */
	bool reversed; /* the last receive is posted first; tagged messages only */
	bool both;     /* both processes send */
};

static struct place outs[BATCH], ins[BATCH];
static struct op sends[BATCH], receives[BATCH];
static struct arena out_arena, in_arena;

/* The application owns the source when its send has completed. */
static inline void reuse(struct op *op)
{
	struct place *place = &outs[op - sends];

	for (unsigned i = 0; i < place->count; i++)
		memset(place->iov[i].iov_base, REUSED, place->iov[i].iov_len);
}

static inline void post_receives(struct side *side, const struct message *all, size_t count, bool reversed)
{
	for (size_t i = 0; i < count; i++) {
		size_t which = reversed ? count - 1 - i : i;

		post_receive(side, FI_ADDR_UNSPEC, &all[which], &ins[which], &receives[which]);
	}
}

/* Transfers up to BATCH messages from process 0 to process 1, or in both directions. */
static inline void transfer(struct side *side, int me, const struct message *all, size_t count, struct batch how)
{
	bool sender = how.both || me == 0, receiver = how.both || me == 1;
	uint64_t other = how.both && me == 0 ? 1000000 : 0, own = how.both && me == 1 ? 1000000 : 0;
	static uint64_t batches;

	batches++;
	memset(sends, 0, sizeof sends);
	memset(receives, 0, sizeof receives);
	out_arena.used = in_arena.used = 0;
	for (size_t i = 0; i < count; i++) {
		sends[i].then = reuse;
		if (sender) {
			lay(&out_arena, &outs[i], all[i].len, all[i].out_pieces, all[i].seed * 2);
			scatter(&outs[i], all[i].len, all[i].seed + own);
		}
		if (receiver) {
			lay(&in_arena, &ins[i], all[i].room, all[i].in_pieces, all[i].seed * 2 + 1);
			memset(ins[i].base, GUARD, ins[i].span);
		}
	}
	if (receiver && !how.late)
		post_receives(side, all, count, how.reversed);
	meet(side, 2);
	for (size_t i = 0; sender && i < count; i++)
		post_send(side, side->peer, &all[i], &outs[i], &sends[i]);
	add(SENT);
	if (receiver && how.late) {
		UNTIL(told(SENT) >= 2 * batches, take_all(side));
		linger(side, 0.005);
		post_receives(side, all, count, how.reversed);
	}
	for (size_t i = 0; i < count; i++) {
		if (sender) {
			await(side, &sends[i]);
			sent_well(&sends[i], &all[i]);
		}
		if (receiver) {
			await(side, &receives[i]);
			received_well(&receives[i], &all[i], side->peer);
			gathered(&ins[i], all[i].len < all[i].room ? all[i].len : all[i].room, all[i].seed + other);
		}
	}
	meet(side, 2);
}

/* As `transfer`, for any number of messages. */
static inline void transfer_all(struct side *side, int me, const struct message *all, size_t count, struct batch how)
{
	for (size_t from = 0, n; from < count; from += n) {
		size_t bytes = 0;

		for (n = 0; from + n < count && n < BATCH; n++) {
			const struct message *m = &all[from + n];

			bytes += space(m->len > m->room ? m->len : m->room);
			if (bytes > ARENA)
				break;
		}
		IS(n > 0);
		transfer(side, me, all + from, n, how);
	}
}

/* ---- processes ---- */

static inline bool wants_local(void)
{
	const char *local = getenv("LONG_MR_LOCAL");

	return local && !strcmp(local, "1");
}

static inline void open_long(struct side *side, int me)
{
	wanted.caps |= FI_MSG | FI_TAGGED | FI_SOURCE | FI_DIRECTED_RECV;
	wanted.mr_mode = FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | (wants_local() ? FI_MR_LOCAL : 0);
	open_side(side, me);
}

/* The side of one of two processes, with its arenas. */
static inline void open_one_of_two(struct side *side, int me)
{
	open_long(side, me);
	side->peer = address(side, 1 - me);
	open_arena(side, &out_arena, FI_SEND);
	open_arena(side, &in_arena, FI_RECV);
	meet(side, 2);
}

static inline void close_one_of_two(struct side *side)
{
	meet(side, 2);
	MUST(fi_close(&side->ep->fid));
	side->ep = NULL;
	close_arena(&out_arena);
	close_arena(&in_arena);
	close_side(side);
}

static inline void ends_well(pid_t pid, const char *name)
{
	int status;

	IS(waitpid(pid, &status, 0) == pid);
	if (!WIFEXITED(status) || WEXITSTATUS(status))
		die("%s: status %x", name, status);
}

/* Runs two processes, 0 and 1. If one fails, the other one is killed. */
static inline void run_two(void (*main)(int))
{
	pid_t pids[2] = { start("process 0", main, 0), start("process 1", main, 1) };

	for (int left = 2; left > 0; left--) {
		int status;
		pid_t ended = wait(&status);

		if (ended < 0)
			die("wait: %s", strerror(errno));
		if (!WIFEXITED(status) || WEXITSTATUS(status)) {
			fprintf(stderr, "process %d: status %x\n", ended == pids[1], status);
			kill(pids[ended == pids[0]], SIGKILL);
			exit(1);
		}
	}
}

#endif
