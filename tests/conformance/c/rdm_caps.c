/* Capabilities of endpoints of type FI_EP_RDM, from fi_getinfo(3): calls and operations of peers that an
 * endpoint was opened without.
 *
 *   rdm_caps calls PROV NODE      each call on endpoints with each set of capabilities
 *   rdm_caps target PROV NODE     atomics and remote CQ data for endpoints with each set
 *
 * Ends with 0, or says what went wrong. Plain libfabric 1.17. */
#define _GNU_SOURCE
#include "rdm_memory.h"

#include <limits.h>

enum { SEND = 1, RECV = 2, TSEND = 4, TRECV = 8, READ = 16, WRITE = 32, BASE = 64, FETCH = 128, ALL = 255, LEN = 4096 };

/* An endpoint in the domain of `side`, with its queues. */
struct one {
	struct side side;
	struct name name;
};

static struct side first;
static struct region memory;
static int mr_bits = FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;

static void open_first(void)
{
	needed.mr_mode = mr_bits;
	wanted.caps = 0;
	open_queues(&first);
	memory = region_of(&first, pages(LEN), LEN, FI_REMOTE_READ | FI_REMOTE_WRITE, 1);
}

static struct one open_one(uint64_t caps)
{
	struct one one = { .side = first };
	struct fi_info *info = NULL;

	wanted.caps = caps;
	MUST(find_info(&info));
	one.side.info = info;
	one.side.tx = queue(&first, 0);
	one.side.rx = queue(&first, 0);
	one.side.ep = endpoint_with(&one.side, 0, NULL);
	one.name = name_of(one.side.ep);
	return one;
}

static void close_one(struct one *one)
{
	MUST(fi_close(&one->side.ep->fid));
	MUST(fi_close(&one->side.tx->fid));
	MUST(fi_close(&one->side.rx->fid));
	fi_freeinfo(one->side.info);
}

static void close_first(void)
{
	close_region(&memory);
	munmap(memory.bytes, LEN);
	close_side(&first);
}

/* An outcome of `of`, which also makes the progress of `other`. */
static struct outcome outcome_of(struct one *of, struct one *other)
{
	struct outcome outcome, ignored;
	double limit = now() + SECONDS;

	while (!poll_outcome(of->side.tx, &outcome)) {
		(void)poll_outcome(other->side.tx, &ignored);
		if (now() > limit)
			die("no completion within %d s", SECONDS);
	}
	return outcome;
}

/* ---- calls ---- */

static uint64_t caps;
static struct one *from, *to;

/* The call succeeds if one of `kind` is permitted; otherwise it is -FI_EOPNOTSUPP. `entries`: its
 * completions. */
static void check(int line, long result, bool permitted, int entries)
{
	if (result != (permitted ? 0 : -FI_EOPNOTSUPP))
		die("line %d: caps %llx: %ld", line, (unsigned long long)caps, result);
	for (int i = 0; permitted && i < entries; i++) {
		struct outcome outcome = outcome_of(from, to);

		if (outcome.err)
			die("line %d: caps %llx: error %d (%s)", line, (unsigned long long)caps, outcome.err, fi_strerror(outcome.err));
	}
}

#define TRY(kind, entries, call) check(__LINE__, (long)(call), permitted & (kind), entries)

static void all_calls(struct fid_ep *ep, fi_addr_t peer, int permitted)
{
	static uint64_t words[4], results[4], compare[4];
	uint64_t addr = mr_mode(&first) & FI_MR_VIRT_ADDR ? (uintptr_t)memory.bytes : 0, key = fi_mr_key(memory.mr);
	struct iovec iov = { words, 8 };
	struct fi_rma_iov remote = { .addr = addr, .len = 8, .key = key };
	struct fi_ioc ioc = { .addr = words, .count = 1 }, result = { .addr = results, .count = 1 }, other = { .addr = compare, .count = 1 };
	struct fi_rma_ioc there = { .addr = addr, .count = 1, .key = key };
	struct fi_msg msg = { .msg_iov = &iov, .iov_count = 1, .addr = peer };
	struct fi_msg_tagged tagged = { .msg_iov = &iov, .iov_count = 1, .addr = peer, .tag = 1 };
	struct fi_msg_rma rma = { .msg_iov = &iov, .iov_count = 1, .addr = peer, .rma_iov = &remote, .rma_iov_count = 1 };
	struct fi_msg_atomic atomic = { .msg_iov = &ioc, .iov_count = 1, .addr = peer, .rma_iov = &there, .rma_iov_count = 1,
					.datatype = FI_UINT64, .op = FI_SUM };
	struct fi_msg_atomic swap = atomic;
	size_t count = 0;

	swap.op = FI_CSWAP;
	TRY(SEND, 1, fi_send(ep, words, 8, NULL, peer, NULL));
	TRY(SEND, 1, fi_sendv(ep, &iov, NULL, 1, peer, NULL));
	TRY(SEND, 1, fi_sendmsg(ep, &msg, FI_COMPLETION));
	TRY(SEND, 0, fi_inject(ep, words, 8, peer));
	TRY(SEND, 1, fi_senddata(ep, words, 8, NULL, 1, peer, NULL));
	TRY(SEND, 0, fi_injectdata(ep, words, 8, 1, peer));
	TRY(TSEND, 1, fi_tsend(ep, words, 8, NULL, peer, 1, NULL));
	TRY(TSEND, 1, fi_tsendv(ep, &iov, NULL, 1, peer, 1, NULL));
	TRY(TSEND, 1, fi_tsendmsg(ep, &tagged, FI_COMPLETION));
	TRY(TSEND, 0, fi_tinject(ep, words, 8, peer, 1));
	TRY(TSEND, 1, fi_tsenddata(ep, words, 8, NULL, 1, peer, 1, NULL));
	TRY(TSEND, 0, fi_tinjectdata(ep, words, 8, 1, peer, 1));
	/* the peer sends nothing */
	TRY(RECV, 0, fi_recv(ep, words, 8, NULL, FI_ADDR_UNSPEC, NULL));
	TRY(RECV, 0, fi_recvv(ep, &iov, NULL, 1, FI_ADDR_UNSPEC, NULL));
	TRY(RECV, 0, fi_recvmsg(ep, &msg, 0));
	TRY(TRECV, 0, fi_trecv(ep, words, 8, NULL, FI_ADDR_UNSPEC, 1, 0, NULL));
	TRY(TRECV, 0, fi_trecvv(ep, &iov, NULL, 1, FI_ADDR_UNSPEC, 1, 0, NULL));
	TRY(TRECV, 0, fi_trecvmsg(ep, &tagged, 0));
	TRY(READ, 1, fi_read(ep, words, 8, NULL, peer, addr, key, NULL));
	TRY(READ, 1, fi_readv(ep, &iov, NULL, 1, peer, addr, key, NULL));
	TRY(READ, 1, fi_readmsg(ep, &rma, FI_COMPLETION));
	TRY(WRITE, 1, fi_write(ep, words, 8, NULL, peer, addr, key, NULL));
	TRY(WRITE, 1, fi_writev(ep, &iov, NULL, 1, peer, addr, key, NULL));
	TRY(WRITE, 1, fi_writemsg(ep, &rma, FI_COMPLETION));
	TRY(WRITE, 0, fi_inject_write(ep, words, 8, peer, addr, key));
	TRY(WRITE, 1, fi_writedata(ep, words, 8, NULL, 1, peer, addr, key, NULL));
	TRY(WRITE, 0, fi_inject_writedata(ep, words, 8, 1, peer, addr, key));
	TRY(BASE, 1, fi_atomic(ep, words, 1, NULL, peer, addr, key, FI_UINT64, FI_SUM, NULL));
	TRY(BASE, 1, fi_atomicv(ep, &ioc, NULL, 1, peer, addr, key, FI_UINT64, FI_SUM, NULL));
	TRY(BASE, 1, fi_atomicmsg(ep, &atomic, FI_COMPLETION));
	TRY(BASE, 0, fi_inject_atomic(ep, words, 1, peer, addr, key, FI_UINT64, FI_SUM));
	TRY(BASE, 0, fi_atomicvalid(ep, FI_UINT64, FI_SUM, &count));
	TRY(FETCH, 1, fi_fetch_atomic(ep, words, 1, NULL, results, NULL, peer, addr, key, FI_UINT64, FI_SUM, NULL));
	TRY(FETCH, 1, fi_fetch_atomicv(ep, &ioc, NULL, 1, &result, NULL, 1, peer, addr, key, FI_UINT64, FI_SUM, NULL));
	TRY(FETCH, 1, fi_fetch_atomicmsg(ep, &atomic, &result, NULL, 1, FI_COMPLETION));
	TRY(FETCH, 0, fi_fetch_atomicvalid(ep, FI_UINT64, FI_SUM, &count));
	TRY(FETCH, 1, fi_compare_atomic(ep, words, 1, NULL, compare, NULL, results, NULL, peer, addr, key, FI_UINT64, FI_CSWAP, NULL));
	TRY(FETCH, 1, fi_compare_atomicv(ep, &ioc, NULL, 1, &other, NULL, 1, &result, NULL, 1, peer, addr, key, FI_UINT64, FI_CSWAP, NULL));
	TRY(FETCH, 1, fi_compare_atomicmsg(ep, &swap, &other, NULL, 1, &result, NULL, 1, FI_COMPLETION));
	TRY(FETCH, 0, fi_compare_atomicvalid(ep, FI_UINT64, FI_CSWAP, &count));
}

static void calls(void)
{
	static const struct {
		uint64_t caps;
		int permitted;
	} all[] = {
		/* "primary capabilities without modifiers have all modifiers" */
		{ 0, ALL },
		{ FI_MSG, SEND | RECV },
		{ FI_TAGGED, TSEND | TRECV },
		{ FI_RMA, READ | WRITE },
		{ FI_ATOMIC, BASE | FETCH },
		{ FI_MSG | FI_TAGGED | FI_RMA | FI_ATOMIC, ALL },
		{ FI_MSG | FI_RMA, SEND | RECV | READ | WRITE },
		/* with modifiers, these alone */
		{ FI_MSG | FI_TAGGED | FI_SEND, SEND | TSEND },
		{ FI_MSG | FI_TAGGED | FI_RECV, RECV | TRECV },
		{ FI_MSG | FI_SEND | FI_RECV, SEND | RECV },
		{ FI_RMA | FI_READ, READ },
		{ FI_RMA | FI_WRITE | FI_REMOTE_READ, WRITE },
		{ FI_MSG | FI_RMA | FI_ATOMIC | FI_REMOTE_READ | FI_REMOTE_WRITE, SEND | RECV },
		{ FI_MSG | FI_ATOMIC | FI_WRITE, SEND | RECV | BASE },
		{ FI_RMA | FI_ATOMIC | FI_READ, READ | FETCH },
		/* modifiers of an absent capability have no meaning */
		{ FI_MSG | FI_READ | FI_WRITE, SEND | RECV },
		{ FI_RMA | FI_SEND | FI_RECV, READ | WRITE },
	};

	for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
		struct one target, initiator;
		struct fid_ep *alias = NULL;
		fi_addr_t peer;

		caps = all[i].caps;
		open_first();
		target = open_one(0);
		initiator = open_one(caps);
		from = &initiator;
		to = &target;
		peer = insert(&first, &target.name);
		all_calls(initiator.side.ep, peer, all[i].permitted);
		MUST(fi_ep_alias(initiator.side.ep, &alias, FI_TRANSMIT));
		all_calls(alias, peer, all[i].permitted);
		MUST(fi_close(&alias->fid));
		close_one(&initiator);
		close_one(&target);
		close_first();
	}
}

/* ---- the target ---- */

/* The error of the only operation of `initiator`. */
static int error_of(struct one *initiator, struct one *target)
{
	struct outcome outcome = outcome_of(initiator, target);

	return outcome.err;
}

#define GIVES(error, call)                                                                                           \
	do {                                                                                                         \
		int err;                                                                                             \
		POST(&initiator.side, call);                                                                         \
		err = error_of(&initiator, &target);                                                                 \
		if (err != (error))                                                                                  \
			die("line %d: caps %llx: error %d (%s)", __LINE__, (unsigned long long)caps, err, fi_strerror(err)); \
	} while (0)

/* The number of a queue's entries: waits up to `seconds` for `count` of them. */
static int entries_of(struct fid_cq *cq, int count, double seconds)
{
	struct outcome outcome;
	int entries = 0;

	for (double until = now() + seconds; entries < count && now() < until;) {
		if (!poll_outcome(cq, &outcome))
			continue;
		IS(!outcome.err && outcome.entry.data == 7);
		entries++;
	}
	return entries;
}

static void of_target(uint64_t with, int sum, int fetch, int read, bool data)
{
	struct one target, initiator;
	uint64_t word = 1, result = 0, addr, key;
	fi_addr_t peer;
	int want, entries;

	caps = with;
	open_first();
	addr = mr_mode(&first) & FI_MR_VIRT_ADDR ? (uintptr_t)memory.bytes : 0;
	key = fi_mr_key(memory.mr);
	target = open_one(caps);
	initiator = open_one(0);
	peer = insert(&first, &target.name);
	for (int i = 0; i < 3; i++) {
		GIVES(sum, fi_atomic(initiator.side.ep, &word, 1, NULL, peer, addr, key, FI_UINT64, FI_SUM, NULL));
		GIVES(fetch, fi_fetch_atomic(initiator.side.ep, &word, 1, NULL, &result, NULL, peer, addr, key, FI_UINT64, FI_SUM, NULL));
		GIVES(read, fi_fetch_atomic(initiator.side.ep, NULL, 1, NULL, &result, NULL, peer, addr, key, FI_UINT64, FI_ATOMIC_READ, NULL));
	}
	memcpy(&word, memory.bytes, 8);
	IS(word == (sum ? 0U : 3U) + (fetch ? 0U : 3U));
	/* the device executes a write with a native key */
	for (int i = 0; i < 100 && fi_mr_key(memory.mr) != 1; i++)
		GIVES(0, fi_writedata(initiator.side.ep, &word, 8, NULL, 7, peer, addr, key, NULL));
	want = data && fi_mr_key(memory.mr) != 1 ? 100 : 0;
	entries = entries_of(target.side.rx, want, 20);
	/* and no further ones */
	entries += entries_of(target.side.rx, INT_MAX, 0.05);
	if (entries != want)
		die("caps %llx: %d entries", (unsigned long long)caps, entries);
	close_one(&initiator);
	close_one(&target);
	close_first();
}

static void target(void)
{
	int none = FI_EOPNOTSUPP;

	for (int keys = 0; keys < 2; keys++) {
		mr_bits = keys ? FI_MR_VIRT_ADDR : FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
		of_target(0, 0, 0, 0, true);
		of_target(FI_MSG, none, none, none, false);
		of_target(FI_RMA, none, none, none, true);
		of_target(FI_ATOMIC, 0, 0, 0, false);
		of_target(FI_MSG | FI_RMA | FI_ATOMIC, 0, 0, 0, true);
		of_target(FI_RMA | FI_ATOMIC | FI_READ | FI_WRITE, none, none, none, false);
		of_target(FI_RMA | FI_ATOMIC | FI_REMOTE_READ, FI_EACCES, FI_EACCES, 0, false);
		of_target(FI_RMA | FI_ATOMIC | FI_REMOTE_WRITE, 0, FI_EACCES, FI_EACCES, true);
		of_target(FI_RMA | FI_ATOMIC | FI_REMOTE_READ | FI_REMOTE_WRITE, 0, 0, 0, true);
	}
}

int main(int argc, char **argv)
{
	static const struct memory_mode modes[] = { { "calls", calls, 1 }, { "target", target, 1 } };

	return run_memory_mode(modes, sizeof modes / sizeof *modes, argc, argv);
}
