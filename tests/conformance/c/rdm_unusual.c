/* Arguments that are legal and rare, from fi_msg(3), fi_tagged(3), fi_rma(3), fi_atomic(3), fi_cq(3),
 * fi_cntr(3) and fi_endpoint(3), between two processes with endpoints of type FI_EP_RDM:
 *
 *   rdm_unusual empty PROV NODE      transfers of no bytes by each call: no buffer, no vector, or a
 *                                    vector of empty elements
 *   rdm_unusual vectors PROV NODE    vectors with empty elements in between, at both sides
 *   rdm_unusual selective PROV NODE  which calls leave an entry, for each combination of
 *                                    FI_SELECTIVE_COMPLETION, default flags and flags of the call;
 *                                    counters count all
 *   rdm_unusual left PROV NODE       fi_tx_size_left and fi_rx_size_left
 *   rdm_unusual cancel PROV NODE     fi_cancel of each kind of operation
 *   rdm_unusual counters PROV NODE   fi_cntr_add, -adderr, -set, -seterr, -wait
 *   rdm_unusual errors PROV NODE     fields of error entries; fi_cq_strerror, fi_cq_readerr
 *   rdm_unusual query PROV NODE      fi_query_atomic and the fi_*_atomicvalid calls agree
 *   rdm_unusual signal PROV NODE     fi_cq_signal without a thread that waits
 *   rdm_unusual null PROV NODE       buffers at NULL with a length, to memory of weft_mr_ops.mr_alloc
 *
 * A further argument `auto` requests FI_PROGRESS_AUTO. Ends with 0, or says what went wrong. Plain
 * libfabric 1.17, and weft.h. */
#define _GNU_SOURCE
#define SECONDS 20
#include "rdm_memory.h"

#include "weft.h"

#pragma GCC diagnostic ignored "-Wdeprecated-declarations" /* fi_tx_size_left */

#define CAPS_ALL (FI_MSG | FI_TAGGED | FI_RMA | FI_ATOMIC)
#define ALL_REMOTE (FI_REMOTE_READ | FI_REMOTE_WRITE)
#define AREA (1UL << 20)
#define EMPTY_BASE ((void *)0x10) /* of an element without bytes: nobody may read it */

static uint8_t *memory, *local;
static struct region region;
static struct shown there;

static void begin(struct side *side)
{
	open_memory_pair(side, CAPS_ALL);
	memory = pages(AREA);
	local = pages(AREA);
	region = region_of(side, memory, AREA, ALL_REMOTE, 7);
	show(side, &region, 0);
	meet(side);
	there = region_at(side, 1 - me, 0);
}

static void finish(struct side *side)
{
	meet(side);
	must_be_empty(side);
	meet(side);
	MUST(fi_close(&side->ep->fid));
	side->ep = NULL;
	close_region(&region);
	close_side(side);
}

static void *ctx(size_t i) { return (void *)(0x100000 + 16 * i); }

/* ---- empty ---- */

enum { SENDS = 12, RECVS = 6 };

static ssize_t send_empty(struct side *side, unsigned form, bool tagged, uint64_t tag, void *context)
{
	static const struct iovec nothing[4];
	static const struct iovec bogus[4] = { { EMPTY_BASE, 0 }, { EMPTY_BASE, 0 }, { EMPTY_BASE, 0 }, { EMPTY_BASE, 0 } };
	struct fid_ep *ep = side->ep;
	fi_addr_t to = side->peer;
	struct fi_msg msg = { .addr = to, .context = context, .data = 77 };
	struct fi_msg_tagged tmsg = { .addr = to, .context = context, .data = 77, .tag = tag };
	uint64_t flags = 0;

	switch (form) {
	case 0:
		return tagged ? fi_tsend(ep, NULL, 0, NULL, to, tag, context) : fi_send(ep, NULL, 0, NULL, to, context);
	case 1:
		return tagged ? fi_tsendv(ep, NULL, NULL, 0, to, tag, context) : fi_sendv(ep, NULL, NULL, 0, to, context);
	case 2:
		return tagged ? fi_tsendv(ep, nothing, NULL, 4, to, tag, context) : fi_sendv(ep, nothing, NULL, 4, to, context);
	case 3:
		return tagged ? fi_tsendv(ep, bogus, NULL, 4, to, tag, context) : fi_sendv(ep, bogus, NULL, 4, to, context);
	case 4:
		break;
	case 5:
		flags = FI_INJECT;
		break;
	case 6:
		flags = FI_INJECT | FI_REMOTE_CQ_DATA | FI_DELIVERY_COMPLETE;
		break;
	case 7:
		flags = FI_REMOTE_CQ_DATA | FI_INJECT_COMPLETE;
		msg.msg_iov = bogus, msg.iov_count = 1;
		tmsg.msg_iov = bogus, tmsg.iov_count = 1;
		break;
	case 8:
		return tagged ? fi_tinject(ep, NULL, 0, to, tag) : fi_inject(ep, NULL, 0, to);
	case 9:
		return tagged ? fi_tsenddata(ep, NULL, 0, NULL, 77, to, tag, context) : fi_senddata(ep, NULL, 0, NULL, 77, to, context);
	case 10:
		return tagged ? fi_tinjectdata(ep, NULL, 0, 77, to, tag) : fi_injectdata(ep, NULL, 0, 77, to);
	default:
		flags = FI_FENCE | FI_TRANSMIT_COMPLETE;
		break;
	}
	return tagged ? fi_tsendmsg(ep, &tmsg, flags) : fi_sendmsg(ep, &msg, flags);
}

static bool has_data(unsigned form) { return form == 6 || form == 7 || form == 9 || form == 10; }
static bool has_entry(unsigned form) { return form != 8 && form != 10; }

static ssize_t recv_empty(struct side *side, unsigned form, bool tagged, uint64_t tag, void *context)
{
	static struct iovec nothing[4];
	static struct iovec some[4];
	struct fid_ep *ep = side->ep;
	fi_addr_t any = FI_ADDR_UNSPEC;
	struct fi_msg msg = { .addr = any, .context = context };
	struct fi_msg_tagged tmsg = { .addr = any, .context = context, .tag = tag };

	some[0] = (struct iovec){ EMPTY_BASE, 0 };
	some[1] = (struct iovec){ local, 8 };
	some[2] = (struct iovec){ NULL, 0 };
	some[3] = (struct iovec){ local + 64, 8 };
	switch (form) {
	case 0:
		return tagged ? fi_trecv(ep, NULL, 0, NULL, any, tag, 0, context) : fi_recv(ep, NULL, 0, NULL, any, context);
	case 1:
		return tagged ? fi_trecvv(ep, NULL, NULL, 0, any, tag, 0, context) : fi_recvv(ep, NULL, NULL, 0, any, context);
	case 2:
		return tagged ? fi_trecvmsg(ep, &tmsg, 0) : fi_recvmsg(ep, &msg, 0);
	case 3:
		return tagged ? fi_trecvv(ep, nothing, NULL, 4, any, tag, 0, context) : fi_recvv(ep, nothing, NULL, 4, any, context);
	case 4:
		return tagged ? fi_trecvv(ep, some, NULL, 4, any, tag, 0, context) : fi_recvv(ep, some, NULL, 4, any, context);
	default:
		return tagged ? fi_trecv(ep, local, 16, NULL, any, tag, 0, context) : fi_recv(ep, local, 16, NULL, any, context);
	}
}

static void empty_messages(struct side *side, bool tagged, bool late)
{
	uint64_t kind = tagged ? FI_TAGGED : FI_MSG;

	memset(local, 0xa5, 128);
	meet(side);
	if (me == 1) {
		if (late)
			pause_ms(50);
		for (unsigned i = 0; i < SENDS * RECVS; i++)
			POST(side, recv_empty(side, i / SENDS, tagged, 1000 + i, ctx(i)));
		if (!late)
			meet(side);
		bool seen[SENDS * RECVS] = { false };
		for (unsigned n = 0; n < SENDS * RECVS; n++) { /* in any order */
			struct outcome got = OUTCOME(side, side->rx);
			unsigned i = (unsigned)(((size_t)got.entry.op_context - 0x100000) / 16);

			IS(i < SENDS * RECVS && !seen[i]);
			seen[i] = true;
			if (got.err || KIND(got.entry.flags) != (kind | FI_RECV) || got.entry.len)
				die("receive %u: error %d, context %p, flags %llx, length %zu", i, got.err, got.entry.op_context, (unsigned long long)got.entry.flags, got.entry.len);
			IS(!!(got.entry.flags & FI_REMOTE_CQ_DATA) == has_data(i % SENDS));
			if (has_data(i % SENDS))
				IS(got.entry.data == 77);
			if (tagged)
				IS(got.entry.tag == 1000 + i);
		}
		IS(clean(local, 128));
	} else {
		if (!late)
			meet(side);
		for (unsigned i = 0; i < SENDS * RECVS; i++) {
			POST(side, send_empty(side, i % SENDS, tagged, 1000 + i, ctx(i)));
			if (has_entry(i % SENDS))
				DONE(side, ctx(i), kind | FI_SEND);
		}
	}
	meet(side);
	must_be_empty(side);
}

static void empty_rma(struct side *side)
{
	static const struct iovec nothing[4], bogus[4] = { { EMPTY_BASE, 0 }, { EMPTY_BASE, 0 }, { EMPTY_BASE, 0 }, { EMPTY_BASE, 0 } };
	struct fid_ep *ep = side->ep;
	fi_addr_t to = side->peer;
	uint64_t at = there.addr, key = there.key;

	memset(memory, 0xa5, 128);
	meet(side);
	if (me == 0) {
		struct fi_rma_iov targets[4];
		struct fi_msg_rma msg = { .addr = to, .context = ctx(1), .rma_iov = targets, .data = 99 };

		for (unsigned i = 0; i < 4; i++)
			targets[i] = (struct fi_rma_iov){ .addr = at + 8 * i, .len = 0, .key = key };
		for (unsigned round = 0; round < 3; round++, at += 1) {
			POST(side, fi_write(ep, NULL, 0, NULL, to, at, key, ctx(1)));
			DONE(side, ctx(1), FI_RMA | FI_WRITE);
			POST(side, fi_writev(ep, NULL, NULL, 0, to, at, key, ctx(1)));
			DONE(side, ctx(1), FI_RMA | FI_WRITE);
			POST(side, fi_writev(ep, nothing, NULL, 4, to, at, key, ctx(1)));
			DONE(side, ctx(1), FI_RMA | FI_WRITE);
			POST(side, fi_writev(ep, bogus, NULL, 4, to, at, key, ctx(1)));
			DONE(side, ctx(1), FI_RMA | FI_WRITE);
			POST(side, fi_inject_write(ep, NULL, 0, to, at, key));
			POST(side, fi_writedata(ep, NULL, 0, NULL, 98, to, at, key, ctx(2)));
			DONE(side, ctx(2), FI_RMA | FI_WRITE);
			POST(side, fi_inject_writedata(ep, NULL, 0, 97, to, at, key));
			for (unsigned count = 1; count <= 4; count++) {
				msg.rma_iov_count = count;
				msg.msg_iov = NULL, msg.iov_count = 0;
				POST(side, fi_writemsg(ep, &msg, 0));
				DONE(side, ctx(1), FI_RMA | FI_WRITE);
				POST(side, fi_writemsg(ep, &msg, FI_INJECT));
				DONE(side, ctx(1), FI_RMA | FI_WRITE);
				msg.msg_iov = bogus, msg.iov_count = count;
				POST(side, fi_writemsg(ep, &msg, FI_DELIVERY_COMPLETE));
				DONE(side, ctx(1), FI_RMA | FI_WRITE);
				POST(side, fi_writemsg(ep, &msg, FI_REMOTE_CQ_DATA | FI_DELIVERY_COMPLETE));
				DONE(side, ctx(1), FI_RMA | FI_WRITE);
				POST(side, fi_writemsg(ep, &msg, FI_REMOTE_CQ_DATA | FI_INJECT | FI_INJECT_COMPLETE));
				DONE(side, ctx(1), FI_RMA | FI_WRITE);
				POST(side, fi_readmsg(ep, &msg, 0));
				DONE(side, ctx(1), FI_RMA | FI_READ);
				msg.msg_iov = NULL, msg.iov_count = 0;
				POST(side, fi_readmsg(ep, &msg, 0));
				DONE(side, ctx(1), FI_RMA | FI_READ);
			}
			POST(side, fi_read(ep, NULL, 0, NULL, to, at, key, ctx(3)));
			DONE(side, ctx(3), FI_RMA | FI_READ);
			POST(side, fi_readv(ep, NULL, NULL, 0, to, at, key, ctx(3)));
			DONE(side, ctx(3), FI_RMA | FI_READ);
			POST(side, fi_readv(ep, bogus, NULL, 4, to, at, key, ctx(3)));
			DONE(side, ctx(3), FI_RMA | FI_READ);
		}
		/* no byte is accessed at the end of the region */
		POST(side, fi_write(ep, NULL, 0, NULL, to, there.addr + AREA, key, ctx(1)));
		DONE(side, ctx(1), FI_RMA | FI_WRITE);
		POST(side, fi_read(ep, NULL, 0, NULL, to, there.addr + AREA, key, ctx(1)));
		DONE(side, ctx(1), FI_RMA | FI_READ);
	} else {
		for (unsigned round = 0; round < 3; round++) {
			RETURNS(REMOTE_DATA(side), 98);
			RETURNS(REMOTE_DATA(side), 97);
			for (unsigned count = 0; count < 8; count++)
				RETURNS(REMOTE_DATA(side), 99);
		}
	}
	meet(side);
	IS(clean(memory, 128));
	must_be_empty(side);
}

static void check_empty(void)
{
	struct side side;

	begin(&side);
	for (unsigned i = 0; i < 4; i++)
		empty_messages(&side, i & 1, i & 2);
	empty_rma(&side);
	finish(&side);
}

/* ---- vectors ---- */

static uint64_t random_state = 1;
static unsigned pick(unsigned n)
{
	random_state = mixed(random_state + 0x9e3779b97f4a7c15ULL);
	return (unsigned)(random_state % n);
}

/* Cuts `len` bytes into `count` pieces, some of which are empty; returns the offsets. */
static void cut(size_t len, unsigned count, size_t *lens)
{
	size_t left = len;

	for (unsigned i = 0; i < count; i++) {
		lens[i] = i + 1 == count ? left : pick(3) == 0 ? 0 : pick((unsigned)left + 1);
		left -= lens[i];
	}
	for (unsigned i = 0; i < count; i++) { /* the last one may be empty too */
		unsigned k = pick(count);
		size_t other = lens[k];

		lens[k] = lens[i], lens[i] = other;
	}
}

static void vector_over(uint8_t *bytes, size_t len, unsigned count, struct iovec *iov)
{
	size_t lens[8], at = 0;

	cut(len, count, lens);
	for (unsigned i = 0; i < count; i++) {
		iov[i].iov_len = lens[i];
		iov[i].iov_base = lens[i] ? bytes + at : pick(2) ? NULL : EMPTY_BASE;
		at += lens[i];
	}
}

static size_t some_length(void)
{
	static const unsigned limits[] = { 4, 100, 5000, 20000, 200000 };
	return pick(limits[pick(5)] + 1);
}

static void check_vectors(void)
{
	struct side side;
	unsigned limit, rma_limit;

	begin(&side);
	limit = (unsigned)side.info->tx_attr->iov_limit;
	rma_limit = (unsigned)side.info->tx_attr->rma_iov_limit;
	IS(limit >= 1 && limit <= 8 && rma_limit >= 1 && rma_limit <= 8);
	IS(side.info->rx_attr->iov_limit == limit);
	for (unsigned round = 0; round < 400; round++) {
		size_t len = some_length();
		struct iovec iov[8];
		unsigned count = 1 + pick(limit);
		bool tagged = pick(2), early = pick(2);

		if (me == 1) {
			memset(local, 0xa5, len + 2 * GUARD);
			if (!early)
				meet(&side);
			vector_over(local + GUARD, len, count, iov);
			POST(&side, tagged ? fi_trecvv(side.ep, iov, NULL, count, FI_ADDR_UNSPEC, round, 0, ctx(round)) : fi_recvv(side.ep, iov, NULL, count, FI_ADDR_UNSPEC, ctx(round)));
			if (early)
				meet(&side);
			struct outcome got = OUTCOME(&side, side.rx);
			if (got.err || got.entry.len != len || got.entry.op_context != ctx(round))
				die("round %u of %zu bytes: error %d, length %zu", round, len, got.err, got.entry.len);
			PAINTED(local + GUARD, len, round);
			IS(guarded(local + GUARD, len));
		} else {
			unsigned form = pick(3);

			paint(local, len, round);
			vector_over(local, len, count, iov);
			pick(2);
			struct fi_msg msg = { .msg_iov = iov, .iov_count = count, .addr = side.peer, .context = ctx(round) };
			struct fi_msg_tagged tmsg = { .msg_iov = iov, .iov_count = count, .addr = side.peer, .context = ctx(round), .tag = round };
			uint64_t flags = (form == 1 && len <= side.info->tx_attr->inject_size) ? FI_INJECT : form == 2 ? FI_DELIVERY_COMPLETE : 0;

			meet(&side);
			if (form == 0)
				POST(&side, tagged ? fi_tsendv(side.ep, iov, NULL, count, side.peer, round, ctx(round)) : fi_sendv(side.ep, iov, NULL, count, side.peer, ctx(round)));
			else
				POST(&side, tagged ? fi_tsendmsg(side.ep, &tmsg, flags) : fi_sendmsg(side.ep, &msg, flags));
			if (flags & FI_INJECT)
				memset(local, 0, len);
			DONE(&side, ctx(round), FI_SEND | (tagged ? FI_TAGGED : FI_MSG));
		}
		meet(&side);
		/* both have to be at the same random number again */
		random_state = 1000 + round;
	}
	/* RMA: the local and the remote vectors are cut at different places */
	for (unsigned round = 0; round < 400; round++) {
		size_t len = some_length(), lens[8], at = 64;
		struct fi_rma_iov targets[8];
		struct iovec iov[8];
		unsigned count = 1 + pick(limit), remote = 1 + pick(rma_limit);
		struct fi_msg_rma msg = { .msg_iov = iov, .iov_count = count, .addr = side.peer, .rma_iov = targets, .rma_iov_count = remote, .context = ctx(round) };

		if (me == 1)
			break;
		paint(local, len, round);
		vector_over(local, len, count, iov);
		cut(len, remote, lens);
		for (unsigned i = 0; i < remote; i++) {
			targets[i] = (struct fi_rma_iov){ .addr = there.addr + at, .len = lens[i], .key = there.key };
			at += lens[i] + 16;
		}
		POST(&side, fi_writemsg(side.ep, &msg, len <= side.info->tx_attr->inject_size && pick(2) ? FI_INJECT | FI_DELIVERY_COMPLETE : FI_DELIVERY_COMPLETE));
		DONE(&side, ctx(round), FI_RMA | FI_WRITE);
		at = 64;
		for (unsigned i = 0, done = 0; i < remote; done += (unsigned)lens[i], at += lens[i] + 16, i++) {
			peek(1, memory, there.bytes + at, lens[i]);
			if (memcmp(memory, local + done, lens[i]))
				die("round %u: piece %u of a write of %zu bytes", round, i, len);
		}
		memset(local, 0, len);
		vector_over(local, len, count, iov);
		POST(&side, fi_readmsg(side.ep, &msg, 0));
		DONE(&side, ctx(round), FI_RMA | FI_READ);
		PAINTED(local, len, round);
	}
	finish(&side);
}

/* ---- selective ---- */

enum { CALLS = 10 };

/* A transfer with these flags if `form` is that of a *msg call. */
static ssize_t transfer(struct side *side, struct fid_ep *ep, unsigned form, uint64_t flags, void *context)
{
	static uint64_t one = 1, compare, result;
	static struct iovec iov = { &one, 8 };
	static struct fi_ioc ioc = { &one, 1 }, result_ioc = { &result, 1 };
	fi_addr_t to = side->peer;
	struct fi_rma_iov target = { there.addr, 8, there.key };
	struct fi_rma_ioc atom = { there.addr + 64, 1, there.key };
	struct fi_msg msg = { .msg_iov = &iov, .iov_count = 1, .addr = to, .context = context };
	struct fi_msg_tagged tmsg = { .msg_iov = &iov, .iov_count = 1, .addr = to, .context = context };
	struct fi_msg_rma rma = { .msg_iov = &iov, .iov_count = 1, .addr = to, .context = context, .rma_iov = &target, .rma_iov_count = 1 };
	struct fi_msg_atomic atomic = { .msg_iov = &ioc, .iov_count = 1, .addr = to, .context = context, .rma_iov = &atom, .rma_iov_count = 1, .datatype = FI_UINT64, .op = FI_SUM };

	(void)compare;
	switch (form) {
	case 0:
		return fi_send(ep, &one, 8, NULL, to, context);
	case 1:
		return fi_sendmsg(ep, &msg, flags);
	case 2:
		return fi_tsend(ep, &one, 8, NULL, to, 0, context);
	case 3:
		return fi_tsendmsg(ep, &tmsg, flags);
	case 4:
		return fi_write(ep, &one, 8, NULL, to, there.addr, there.key, context);
	case 5:
		return fi_writemsg(ep, &rma, flags);
	case 6:
		return fi_atomic(ep, &one, 1, NULL, to, there.addr + 64, there.key, FI_UINT64, FI_SUM, context);
	case 7:
		return fi_atomicmsg(ep, &atomic, flags);
	case 8:
		return fi_fetch_atomic(ep, &one, 1, NULL, &result, NULL, to, there.addr + 64, there.key, FI_UINT64, FI_SUM, context);
	default:
		return fi_fetch_atomicmsg(ep, &atomic, &result_ioc, NULL, 1, flags & ~FI_INJECT);
	}
}

static ssize_t injected(struct side *side, struct fid_ep *ep, unsigned form)
{
	uint64_t one = 1;
	fi_addr_t to = side->peer;

	switch (form) {
	case 0:
		return fi_inject(ep, &one, 8, to);
	case 1:
		return fi_injectdata(ep, &one, 8, 5, to);
	case 2:
		return fi_tinject(ep, &one, 8, to, 0);
	case 3:
		return fi_tinjectdata(ep, &one, 8, 5, to, 0);
	case 4:
		return fi_inject_write(ep, &one, 8, to, there.addr, there.key);
	case 5:
		return fi_inject_writedata(ep, &one, 8, 5, to, there.addr, there.key);
	default:
		return fi_inject_atomic(ep, &one, 1, to, there.addr + 64, there.key, FI_UINT64, FI_SUM);
	}
}

struct totals {
	uint64_t sent, written, read;
};

/* Opens the endpoints of both with counters, does all transfers, and counts entries. `defaults`: op_flags
 * of the transmit side. `how`: 0 by the info, 1 by FI_SETOPSFLAG, 2 by an alias. */
static void selective_once(uint64_t selective, uint64_t defaults, unsigned how)
{
	static const uint64_t each_flags[] = { 0, FI_COMPLETION, FI_INJECT, FI_INJECT | FI_COMPLETION, FI_DELIVERY_COMPLETE, FI_COMPLETION | FI_DELIVERY_COMPLETE,
		FI_COMPLETION | FI_TRANSMIT_COMPLETE | FI_FENCE, FI_INJECT_COMPLETE };
	enum { FLAGS = sizeof each_flags / sizeof *each_flags };
	struct side side;
	struct fid_cntr *sent, *written, *read, *received;
	struct fid_ep *alias = NULL, *ep;
	struct totals totals = { 0 };
	uint64_t messages = 0, events = 0;
	struct fi_info *info = NULL;

	needed.op_flags = 0;
	wanted.caps = CAPS_ALL;
	MUST(find_info(&info));
	open_domain_with(&side, info);
	side.tx = queue(&side, 0);
	side.rx = queue(&side, 0);
	if (how == 0)
		side.info->tx_attr->op_flags = defaults;
	sent = counter(&side), written = counter(&side), read = counter(&side), received = counter(&side);
	MUST(fi_endpoint(side.domain, side.info, &side.ep, NULL));
	MUST(fi_ep_bind(side.ep, &side.av->fid, 0));
	MUST(fi_ep_bind(side.ep, &side.tx->fid, FI_TRANSMIT | selective));
	MUST(fi_ep_bind(side.ep, &side.rx->fid, FI_RECV | selective));
	MUST(fi_ep_bind(side.ep, &sent->fid, FI_SEND));
	MUST(fi_ep_bind(side.ep, &written->fid, FI_WRITE));
	MUST(fi_ep_bind(side.ep, &read->fid, FI_READ));
	MUST(fi_ep_bind(side.ep, &received->fid, FI_RECV));
	MUST(fi_enable(side.ep));
	ep = side.ep;
	if (how == 1) {
		uint64_t flags = FI_TRANSMIT | defaults, now_set = FI_TRANSMIT;

		MUST(fi_control(&side.ep->fid, FI_SETOPSFLAG, &flags));
		MUST(fi_control(&side.ep->fid, FI_GETOPSFLAG, &now_set));
		if ((now_set & ~(uint64_t)FI_TRANSMIT & defaults) != defaults)
			die("FI_GETOPSFLAG: %llx of %llx", (unsigned long long)now_set, (unsigned long long)defaults);
	} else if (how == 2) {
		MUST(fi_ep_alias(side.ep, &alias, FI_TRANSMIT | defaults));
		ep = alias;
	}
	publish(side.ep, (int)me);
	meet(&side);
	side.peer = address(&side, 1 - (int)me);
	if (!memory) {
		memory = pages(AREA);
		local = pages(AREA);
	}
	region = region_of(&side, memory, AREA, ALL_REMOTE, 7);
	show(&side, &region, 0);
	meet(&side);
	there = region_at(&side, 1 - me, 0);
	/* the number of messages: forms 0 to 3 */
	for (unsigned form = 0; form < 4; form++)
		messages += form & 1 ? FLAGS : 1;
	messages += 4;
	if (me == 1) {
		for (uint64_t i = 0; i < messages; i++) {
			/* every second receive has FI_COMPLETION */
			struct iovec iov = { local + 8 * i, 8 };
			struct fi_msg msg = { .msg_iov = &iov, .iov_count = 1, .addr = FI_ADDR_UNSPEC, .context = ctx(i) };
			struct fi_msg_tagged tmsg = { .msg_iov = &iov, .iov_count = 1, .addr = FI_ADDR_UNSPEC, .context = ctx(i), .ignore = ~0ULL };
			uint64_t flags = i % 4 < 2 ? FI_COMPLETION : 0;

			if (i % 2)
				POST(&side, fi_trecvmsg(side.ep, &tmsg, flags));
			else
				POST(&side, fi_recvmsg(side.ep, &msg, flags));
			events += !selective || flags;
		}
		events += 1; /* of the write with remote CQ data */
		meet(&side);
		UNTIL(fi_cntr_read(received) == messages, progress(&side); others_live());
		for (; events; events--) {
			struct outcome got = OUTCOME(&side, side.rx);

			IS(got.err == 0);
		}
		meet(&side);
		IS(fi_cntr_read(received) == messages);
	} else {
		meet(&side);
		for (unsigned form = 0; form < CALLS; form++) {
			for (unsigned i = 0; i < (form & 1 ? FLAGS : 1); i++) {
				uint64_t flags = form & 1 ? each_flags[i] : defaults;
				bool entry = !selective || (flags & FI_COMPLETION);
				uint64_t *total = form < 4 ? &totals.sent : form < 8 ? &totals.written : &totals.read;
				struct fid_cntr *cntr = form < 4 ? sent : form < 8 ? written : read;
				struct outcome got;

				POST(&side, transfer(&side, ep, form, flags, ctx(form)));
				++*total;
				UNTIL(fi_cntr_read(cntr) == *total, progress(&side); others_live());
				if (entry) {
					got = OUTCOME(&side, side.tx);
					IS(got.err == 0 && got.entry.op_context == ctx(form));
				} else if (poll_outcome(side.tx, &got)) {
					die("selective %d, defaults %llx by %u, call %u, flags %llx: an entry with error %d, flags %llx", !!selective, (unsigned long long)defaults, how, form, (unsigned long long)flags, got.err, (unsigned long long)got.entry.flags);
				}
			}
		}
		for (unsigned form = 0; form < 7; form++) {
			uint64_t *total = form < 4 ? &totals.sent : &totals.written;
			struct outcome got;

			POST(&side, injected(&side, ep, form));
			++*total;
			UNTIL(fi_cntr_read(form < 4 ? sent : written) == *total, progress(&side); others_live());
			if (poll_outcome(side.tx, &got))
				die("injected call %u has an entry", form);
		}
		meet(&side);
		IS(fi_cntr_read(sent) == totals.sent);
		IS(fi_cntr_read(written) == totals.written);
		IS(fi_cntr_read(read) == totals.read);
		RETURNS(fi_cntr_readerr(sent), 0);
		RETURNS(fi_cntr_readerr(written), 0);
	}
	meet(&side);
	must_be_empty(&side);
	meet(&side);
	if (alias) {
		RETURNS(fi_close(&alias->fid), 0);
	}
	MUST(fi_close(&side.ep->fid));
	side.ep = NULL;
	close_region(&region);
	MUST(fi_close(&sent->fid));
	MUST(fi_close(&written->fid));
	MUST(fi_close(&read->fid));
	MUST(fi_close(&received->fid));
	close_side(&side);
	atomic_store(&board->named[me], 0);
	meet(NULL);
}

static void check_selective(void)
{
	static const uint64_t defaults[] = { 0, FI_COMPLETION, FI_COMPLETION | FI_DELIVERY_COMPLETE, FI_INJECT_COMPLETE, FI_TRANSMIT_COMPLETE, FI_INJECT | FI_COMPLETION };

	for (unsigned how = 0; how < 3; how++)
		for (unsigned i = 0; i < sizeof defaults / sizeof *defaults; i++)
			for (unsigned s = 0; s < 2; s++)
				selective_once(s ? FI_SELECTIVE_COMPLETION : 0, defaults[i], how);
}

/* ---- left ---- */

enum { MOST_RECEIVES = 2000 };

static void check_left(void)
{
	struct side side;
	size_t posts = 0;
	ssize_t left;

	wanted.tx_size = 16;
	wanted.rx_size = 16;
	begin(&side);
	if (me == 1) {
		left = fi_rx_size_left(side.ep);
		if (left != -FI_ENOSYS && left < 1)
			die("fi_rx_size_left of an unused endpoint: %zd", left);
		/* as many receives as are left can be posted */
		for (ssize_t i = 0; i < left && posts < MOST_RECEIVES; i++, posts++)
			RETURNS(fi_recv(side.ep, local, 8, NULL, FI_ADDR_UNSPEC, ctx(posts)), 0);
		bool full = false;
		while (!full && posts < MOST_RECEIVES) { /* it may be possible to post more than were left */
			full = fi_recv(side.ep, local, 8, NULL, FI_ADDR_UNSPEC, ctx(posts)) == -FI_EAGAIN;
			posts += !full;
		}
		left = fi_rx_size_left(side.ep);
		if (full && left > 0)
			die("fi_rx_size_left of a full endpoint: %zd", left);
		meet(&side);
		/* make progress until the other one has sent them all */
		for (size_t i = 0; i < posts; i++)
			IS(OUTCOME(&side, side.rx).err == 0);
		left = fi_rx_size_left(side.ep);
		if (left != -FI_ENOSYS && left < 1)
			die("fi_rx_size_left after the last receive: %zd", left);
		board->words[0] = posts;
		meet(&side);
	} else {
		meet(&side);
		size_t sent = 0, done = 0, rounds = 0;
		while (!told(0)) {
			left = fi_tx_size_left(side.ep);
			if (left < 0 && left != -FI_ENOSYS)
				die("fi_tx_size_left: %zd", left);
			for (ssize_t i = 0; i < left && rounds < 200; i++, sent++) {
				ssize_t posted = fi_write(side.ep, local, 8, NULL, side.peer, there.addr, there.key, ctx(1));

				if (posted)
					die("round %zu: write %zd of %zd that are left: %zd", rounds, i, left, posted);
			}
			rounds++;
			struct fi_cq_tagged_entry entry;
			if (take(side.tx, &entry, 1))
				done += 1;
			if (rounds == 300) {
				UNTIL(done == sent, done += take(side.tx, &entry, 1));
				break;
			}
		}
		/* now the messages */
		size_t count = 0;
		struct fi_cq_tagged_entry entry;
		double limit = now() + SECONDS;
		while (!told(0)) {
			if (fi_send(side.ep, local, 8, NULL, side.peer, ctx(2)) == 0)
				count++;
			take(side.tx, &entry, 1);
			if (now() > limit)
				die("%zu messages, and the receiver has not as many", count);
			if (count % 8 == 0)
				others_live();
		}
		meet(&side);
	}
	/* messages may be left over */
	MUST(fi_close(&side.ep->fid));
	side.ep = NULL;
	close_region(&region);
	close_side(&side);
}

/* ---- cancel ---- */

/* Cancels the operation with this context. Each operation has to have exactly one entry. */
static void cancelled(struct side *side, struct fid_cq *cq, const char *what, void *context, bool must)
{
	int result = (int)fi_cancel(&side->ep->fid, context);
	struct outcome got;
	double limit = now() + SECONDS;

	if (result && result != -FI_ENOENT && result != -FI_EOPNOTSUPP && result != -FI_ENOSYS)
		die("fi_cancel of %s: %d", what, result);
	if (must && result)
		die("fi_cancel of %s: %d", what, result);
	if (result == 0)
		for (;;) {
			if (poll_outcome(cq, &got))
				break;
			if (now() > limit)
				die("no entry of a cancelled %s", what);
		}
	if (result == 0 && (got.err != FI_ECANCELED || got.entry.op_context != context))
		die("the entry of a cancelled %s: error %d, context %p", what, got.err, got.entry.op_context);
	if (must && (!(got.entry.flags & FI_RECV)))
		die("flags of a cancelled %s: %llx", what, (unsigned long long)got.entry.flags);
}

static void check_cancel(void)
{
	struct side side;
	struct iovec iov[2];
	size_t min = 64;

	needed.mr_mode = 0;
	begin(&side);
	if (me == 1) {
		struct fi_msg msg = { .msg_iov = iov, .iov_count = 1, .addr = FI_ADDR_UNSPEC, .context = ctx(3) };

		MUST(fi_setopt(&side.ep->fid, FI_OPT_ENDPOINT, FI_OPT_MIN_MULTI_RECV, &min, sizeof min));
		iov[0] = (struct iovec){ local, 100000 };
		/* what was never posted */
		RETURNS(fi_cancel(&side.ep->fid, ctx(99)), -FI_ENOENT);
		POST(&side, fi_recv(side.ep, local, 8, NULL, FI_ADDR_UNSPEC, ctx(0)));
		cancelled(&side, side.rx, "receive", ctx(0), true);
		POST(&side, fi_trecv(side.ep, local, 8, NULL, FI_ADDR_UNSPEC, 1, 0, ctx(1)));
		cancelled(&side, side.rx, "tagged receive", ctx(1), true);
		POST(&side, fi_trecv(side.ep, local, 8, NULL, side.peer, 1, ~0ULL, ctx(2)));
		cancelled(&side, side.rx, "receive from one peer", ctx(2), true);
		POST(&side, fi_recvmsg(side.ep, &msg, FI_MULTI_RECV));
		{
			RETURNS(fi_cancel(&side.ep->fid, ctx(3)), 0);
			struct outcome got = OUTCOME(&side, side.rx);
			if (got.err != FI_ECANCELED || got.entry.op_context != ctx(3))
				die("a cancelled multi-receive buffer: %d", got.err);
			if (!(got.entry.flags & FI_MULTI_RECV))
				die("the entry of a cancelled multi-receive buffer does not say that it is released: flags %llx", (unsigned long long)got.entry.flags);
		}
		/* three with one context: each call cancels one */
		for (unsigned i = 0; i < 3; i++)
			POST(&side, fi_recv(side.ep, local, 8, NULL, FI_ADDR_UNSPEC, ctx(4)));
		for (unsigned i = 0; i < 3; i++)
			cancelled(&side, side.rx, "receive of three", ctx(4), true);
		RETURNS(fi_cancel(&side.ep->fid, ctx(4)), -FI_ENOENT);
		/* the cancelled one is skipped by a message */
		for (unsigned i = 0; i < 10; i++)
			POST(&side, fi_recv(side.ep, local + 64 * i, 64, NULL, FI_ADDR_UNSPEC, ctx(20 + i)));
		for (unsigned i = 0; i < 10; i += 2)
			cancelled(&side, side.rx, "every second receive", ctx(20 + i), true);
		meet(&side);
		for (unsigned n = 1, seen = 0; n < 10; n += 2) {
			struct outcome got = OUTCOME(&side, side.rx);
			size_t i = ((size_t)got.entry.op_context - 0x100000) / 16 - 20;

			IS(got.err == 0 && i < 10 && i % 2 && !(seen & 1U << i) && local[64 * i] == i);
			seen |= 1U << i;
		}
		/* one that has completed already */
		RETURNS(fi_cancel(&side.ep->fid, ctx(21)), -FI_ENOENT);
		/* after one message a multi-receive buffer is cancelled */
		POST(&side, fi_recvmsg(side.ep, &msg, FI_MULTI_RECV));
		meet(&side);
		{
			struct outcome got = OUTCOME(&side, side.rx);

			IS(got.err == 0 && got.entry.op_context == ctx(3) && got.entry.len == 1000 && !(got.entry.flags & FI_MULTI_RECV));
			RETURNS(fi_cancel(&side.ep->fid, ctx(3)), 0);
			got = OUTCOME(&side, side.rx);
			IS(got.err == FI_ECANCELED && got.entry.op_context == ctx(3));
			IS(got.entry.flags & FI_MULTI_RECV);
		}
		meet(&side);
		/* a receive that is cancelled while messages come: as many entries as receives, and no message is lost */
		unsigned ok = 0, gone = 0;
		for (unsigned i = 0; i < 2000; i++) {
			POST(&side, fi_recv(side.ep, local, 64, NULL, FI_ADDR_UNSPEC, ctx(5)));
			if (i % 3)
				usleep(i % 7);
			int result = (int)fi_cancel(&side.ep->fid, ctx(5));
			struct outcome got = OUTCOME(&side, side.rx);
			IS(got.entry.op_context == ctx(5));
			if (result == 0 && got.err == FI_ECANCELED)
				gone++;
			else if (got.err == 0) {
				uint64_t number;
				memcpy(&number, local, 8);
				if (number != ok)
					die("message %llu, expected %u", (unsigned long long)number, ok);
				ok++;
			} else
				die("result %d, error %d", result, got.err);
		}
		put(0, 1);
		/* the rest of the messages */
		while (ok < 1500) {
			uint64_t number;
			POST(&side, fi_recv(side.ep, local, 64, NULL, FI_ADDR_UNSPEC, ctx(5)));
			IS(OUTCOME(&side, side.rx).err == 0);
			memcpy(&number, local, 8);
			IS(number == ok);
			ok++;
		}
		printf("%u cancelled\n", gone);
	} else {
		meet(&side);
		for (unsigned i = 1; i < 10; i += 2) {
			local[0] = (uint8_t)i;
			POST(&side, fi_send(side.ep, local, 64, NULL, side.peer, ctx(i)));
			DONE(&side, ctx(i), FI_SEND | FI_MSG);
		}
		meet(&side);
		POST(&side, fi_send(side.ep, local, 1000, NULL, side.peer, ctx(1)));
		DONE(&side, ctx(1), FI_SEND | FI_MSG);
		meet(&side);
		for (uint64_t i = 0; i < 1500; i++) {
			memcpy(local, &i, 8);
			POST(&side, fi_send(side.ep, local, 64, NULL, side.peer, ctx(1)));
			DONE(&side, ctx(1), FI_SEND | FI_MSG);
			if (i % 5 == 0)
				usleep(20);
		}
	}
	meet(&side);
	/* operations to a stopped process: each completes once, cancelled or not */
	if (me == 0) {
		uint64_t result = 0, operand = 1;

		stop_process(1);
		POST(&side, fi_send(side.ep, local, 100000, NULL, side.peer, ctx(50)));
		POST(&side, fi_tsend(side.ep, local, 100000, NULL, side.peer, 1, ctx(51)));
		POST(&side, fi_write(side.ep, local, 1000, NULL, side.peer, there.addr, there.key, ctx(52)));
		POST(&side, fi_read(side.ep, local + 1000, 1000, NULL, side.peer, there.addr, there.key, ctx(53)));
		POST(&side, fi_fetch_atomic(side.ep, &operand, 1, NULL, &result, NULL, side.peer, there.addr, there.key, FI_UINT64, FI_SUM, ctx(54)));
		unsigned seen = 0;
		struct outcome got;
		for (unsigned i = 50; i < 55; i++) {
			int cancel = (int)fi_cancel(&side.ep->fid, ctx(i));

			if (cancel && cancel != -FI_ENOENT && cancel != -FI_ENOSYS && cancel != -FI_EOPNOTSUPP)
				die("fi_cancel of operation %u: %d", i, cancel);
		}
		IS(kill(others[1], SIGCONT) == 0);
		for (unsigned i = 0; i < 5; i++) {
			got = OUTCOME(&side, side.tx);
			size_t number = ((size_t)got.entry.op_context - 0x100000) / 16;

			IS(number >= 50 && number < 55 && !(seen & 1U << (number - 50)));
			IS(got.err == 0 || got.err == FI_ECANCELED);
			seen |= 1U << (number - 50);
		}
		IS(seen == 31);
		put(1, 1);
	} else {
		POST(&side, fi_recv(side.ep, local, 100000, NULL, FI_ADDR_UNSPEC, ctx(60)));
		POST(&side, fi_trecv(side.ep, local, 100000, NULL, FI_ADDR_UNSPEC, 1, 0, ctx(61)));
		UNTIL(told(1), progress(&side));
		for (unsigned i = 0; i < 2; i++)
			IS(OUTCOME(&side, side.rx).err == 0);
	}
	finish(&side);
}

/* ---- counters ---- */

/* "may not be immediately visible" */
#define READS(call, value) UNTIL_WITHIN(2, (call) == (value), progress(side))

static void check_counter(struct side *side, struct fid_cntr *cntr, bool waits)
{
	double began;

	RETURNS(fi_cntr_read(cntr), 0);
	RETURNS(fi_cntr_readerr(cntr), 0);
	RETURNS(fi_cntr_add(cntr, 5), 0);
	READS(fi_cntr_read(cntr), 5);
	RETURNS(fi_cntr_readerr(cntr), 0);
	RETURNS(fi_cntr_adderr(cntr, 3), 0);
	READS(fi_cntr_readerr(cntr), 3);
	RETURNS(fi_cntr_read(cntr), 5);
	RETURNS(fi_cntr_set(cntr, 100), 0);
	READS(fi_cntr_read(cntr), 100);
	RETURNS(fi_cntr_seterr(cntr, 50), 0);
	READS(fi_cntr_readerr(cntr), 50);
	RETURNS(fi_cntr_read(cntr), 100);
	RETURNS(fi_cntr_seterr(cntr, 0), 0);
	READS(fi_cntr_readerr(cntr), 0);
	if (!waits)
		return;
	RETURNS(fi_cntr_wait(cntr, 100, 0), 0);
	RETURNS(fi_cntr_wait(cntr, 0, -1), 0);
	RETURNS(fi_cntr_wait(cntr, 50, 10000), 0);
	began = now();
	RETURNS(fi_cntr_wait(cntr, 101, 200), -FI_ETIMEDOUT);
	if (now() - began < 0.19 || now() - began > 1.5)
		die("a wait of 200 ms takes %f s", now() - began);
	RETURNS(fi_cntr_wait(cntr, 101, 0), -FI_ETIMEDOUT);
	RETURNS(fi_cntr_readerr(cntr), 0);
	RETURNS(fi_cntr_set(cntr, 0), 0);
	READS(fi_cntr_read(cntr), 0);
}

static void check_counters(void)
{
	static const enum fi_wait_obj objects[] = { FI_WAIT_NONE, FI_WAIT_UNSPEC, FI_WAIT_FD, FI_WAIT_MUTEX_COND, FI_WAIT_YIELD };
	struct side opened, *side = &opened;

	begin(side);
	for (unsigned i = 0; i < sizeof objects / sizeof *objects; i++) {
		struct fi_cntr_attr attr = { .events = FI_CNTR_EVENTS_COMP, .wait_obj = objects[i] };
		struct fid_cntr *cntr, *written;
		struct fid_ep *ep;
		enum fi_wait_obj said = 99;
		int result = fi_cntr_open(side->domain, &attr, &cntr, ctx(1));

		if (result == -FI_ENOSYS || result == -FI_EOPNOTSUPP) {
			printf("no counters with wait object %d\n", objects[i]);
			meet(side);
			meet(side);
			meet(side);
			continue;
		}
		if (result)
			die("fi_cntr_open with wait object %d: %d", objects[i], result);
		IS(cntr->fid.context == ctx(1) && cntr->fid.fclass == FI_CLASS_CNTR);
		check_counter(side, cntr, objects[i] != FI_WAIT_NONE);
		result = fi_control(&cntr->fid, FI_GETWAITOBJ, &said);
		if (result == 0 && said != objects[i] && objects[i] != FI_WAIT_UNSPEC)
			die("FI_GETWAITOBJ of a counter with wait object %d: %d", objects[i], said);
		/* of an endpoint: successes are added to what was set */
		MUST(fi_cntr_open(side->domain, &attr, &written, NULL));
		MUST(fi_endpoint(side->domain, side->info, &ep, NULL));
		MUST(fi_ep_bind(ep, &side->av->fid, 0));
		MUST(fi_ep_bind(ep, &side->tx->fid, FI_TRANSMIT | FI_SELECTIVE_COMPLETION));
		MUST(fi_ep_bind(ep, &side->rx->fid, FI_RECV | FI_SELECTIVE_COMPLETION));
		MUST(fi_ep_bind(ep, &cntr->fid, FI_SEND | FI_RECV));
		MUST(fi_ep_bind(ep, &written->fid, FI_WRITE | FI_READ));
		/* "An endpoint may only be bound to a single CQ or counter for a given type" */
		result = fi_ep_bind(ep, &written->fid, FI_SEND);
		if (result == 0)
			die("two counters with FI_SEND");
		MUST(fi_enable(ep));
		RETURNS(fi_close(&cntr->fid), -FI_EBUSY);
		RETURNS(fi_close(&written->fid), -FI_EBUSY);
		publish(ep, (int)me + 2);
		meet(side);
		fi_addr_t peer = address(side, 3 - (int)me);
		if (me == 0) {
			RETURNS(fi_cntr_set(written, 1000), 0);
			for (unsigned k = 0; k < 20; k++) {
				POST(side, fi_write(ep, local, 8, NULL, peer, there.addr, there.key, NULL));
				POST(side, fi_read(ep, local, 8, NULL, peer, there.addr, there.key, NULL));
				POST(side, fi_inject_write(ep, local, 8, peer, there.addr, there.key));
			}
			if (objects[i] == FI_WAIT_NONE)
				UNTIL(fi_cntr_read(written) == 1060, progress(side));
			else
				RETURNS(fi_cntr_wait(written, 1060, 10000), 0);
			RETURNS(fi_cntr_read(written), 1060);
			/* an error: the success value stays, the error value is 1, and the wait ends */
			POST(side, fi_write(ep, local, 8, NULL, peer, there.addr + AREA, there.key, ctx(7)));
			if (objects[i] == FI_WAIT_NONE) {
				UNTIL(fi_cntr_readerr(written) == 1, progress(side));
			} else {
				double before = now();

				result = fi_cntr_wait(written, 1061, 15000);
				if (result != -FI_EAVAIL)
					die("fi_cntr_wait while an operation fails: %d after %f s", result, now() - before);
			}
			RETURNS(fi_cntr_read(written), 1060);
			RETURNS(fi_cntr_readerr(written), 1);
			REFUSED(side, ctx(7)); /* "Operations that fail asynchronously will still generate completions" */
			/* "Any change in a counter's error value will unblock": without a change it blocks */
			if (objects[i] != FI_WAIT_NONE) {
				RETURNS(fi_cntr_wait(written, 1061, 300), -FI_ETIMEDOUT);
				POST(side, fi_write(ep, local, 8, NULL, peer, there.addr, there.key, NULL));
				RETURNS(fi_cntr_wait(written, 1061, 10000), 0);
			}
		}
		meet(side);
		must_be_empty(side);
		meet(side);
		MUST(fi_close(&ep->fid));
		MUST(fi_close(&cntr->fid));
		MUST(fi_close(&written->fid));
		atomic_store(&board->named[me + 2], 0);
		meet(side);
	}
	finish(side);
}

/* ---- errors ---- */

static void check_errors(void)
{
	struct side opened, *side = &opened;
	struct fi_cq_err_entry error;
	struct fi_cq_tagged_entry entry;
	char text[64], small[5];
	const char *said;

	begin(side);
	/* nothing has failed */
	memset(&error, 0, sizeof error);
	RETURNS(fi_cq_readerr(side->tx, &error, 0), -FI_EAGAIN);
	if (me == 0) {
		for (unsigned i = 0; i < 3; i++)
			POST(side, fi_write(side->ep, local, 8, NULL, side->peer, there.addr + AREA, there.key, ctx(i)));
		UNTIL(fi_cq_read(side->tx, &entry, 1) == -FI_EAVAIL, others_live());
		/* the same again: it is not consumed */
		RETURNS(fi_cq_read(side->tx, &entry, 1), -FI_EAVAIL);
		RETURNS(fi_cq_read(side->tx, NULL, 0), -FI_EAVAIL);
		for (unsigned i = 0; i < 3; i++) {
			uint8_t data[256];
			fi_addr_t from = 0;

			memset(data, 0xa5, sizeof data);
			UNTIL(fi_cq_readfrom(side->tx, &entry, 1, &from) == -FI_EAVAIL, others_live());
			memset(&error, 0, sizeof error);
			if (i == 1) {
				error.err_data = data;
				error.err_data_size = 2;
			}
			RETURNS(fi_cq_readerr(side->tx, &error, 0), 1);
			IS(error.err > 0 && error.op_context == ctx(i));
			IS(KIND(error.flags) == (FI_RMA | FI_WRITE));
			IS(error.olen == 0);
			if (i == 1) {
				IS(error.err_data_size <= 2);
				IS(clean(data + error.err_data_size, sizeof data - error.err_data_size));
			} else if (error.err_data_size) {
				IS(error.err_data);
			}
			said = fi_cq_strerror(side->tx, error.prov_errno, error.err_data, NULL, 0);
			IS(said && *said);
			memset(text, 0x7f, sizeof text);
			said = fi_cq_strerror(side->tx, error.prov_errno, error.err_data, text, sizeof text);
			IS(said && *said && memchr(text, 0, sizeof text));
			/* as a completion queue of connected endpoints names it */
			IS(!strcmp(said, "remote access error"));
			IS(strlen(text) > 0);
			memset(small, 0x7f, sizeof small);
			IS(fi_cq_strerror(side->tx, error.prov_errno, NULL, small, 4));
			IS(small[4] == 0x7f && memchr(small, 0, 4));
		}
		RETURNS(fi_cq_readerr(side->tx, &error, 0), -FI_EAGAIN);
		IS(*fi_cq_strerror(side->tx, 0, NULL, NULL, 0));
		IS(*fi_cq_strerror(side->tx, 123456, NULL, NULL, 0));
		IS(*fi_cq_strerror(side->tx, -1, NULL, text, sizeof text));
		/* an error between successes: each is read once */
		unsigned good = 0, bad = 0;
		for (unsigned i = 0; i < 5; i++)
			POST(side, fi_write(side->ep, local, 8, NULL, side->peer, there.addr + (i == 2 ? AREA : 0), there.key, ctx(10 + i)));
		unsigned seen = 0;
		for (unsigned i = 0; i < 5; i++) {
			struct outcome got = OUTCOME(side, side->tx);
			size_t number = ((size_t)got.entry.op_context - 0x100000) / 16 - 10;

			IS(number < 5 && !(seen & 1U << number));
			seen |= 1U << number;
			if (number == 2)
				bad += !!got.err;
			else
				good += !got.err;
		}
		printf("%u of 4 writes around a refused one succeed\n", good);
		IS(bad == 1);
		meet(side);
		/* a truncated message */
		POST(side, fi_tsenddata(side->ep, local, 100, NULL, 4711, side->peer, 0xabcd, ctx(30)));
		DONE(side, ctx(30), FI_SEND | FI_TAGGED);
		POST(side, fi_senddata(side->ep, local, 50000, NULL, 4712, side->peer, ctx(31)));
		DONE(side, ctx(31), FI_SEND | FI_MSG);
	} else {
		memset(local, 0xa5, 1000);
		POST(side, fi_trecv(side->ep, local + 64, 60, NULL, FI_ADDR_UNSPEC, 0xab00, 0xff, ctx(40)));
		POST(side, fi_recv(side->ep, local + 256, 70, NULL, FI_ADDR_UNSPEC, ctx(41)));
		meet(side);
		for (unsigned i = 0; i < 2; i++) {
			UNTIL(fi_cq_read(side->rx, &entry, 1) == -FI_EAVAIL, );
			memset(&error, 0, sizeof error);
			RETURNS(fi_cq_readerr(side->rx, &error, 0), 1);
			IS(error.op_context == ctx(40 + i));
			IS(error.err == FI_ETRUNC);
			IS(KIND(error.flags) == ((i ? FI_MSG : FI_TAGGED) | FI_RECV));
			if (error.olen != (i ? 50000 - 70 : 40))
				die("olen of truncated message %u: %zu", i, error.olen);
			if (error.len != (i ? 70 : 60))
				die("len of truncated message %u: %zu", i, error.len);
			if (!i)
				IS(error.tag == 0xabcd);
			IS(error.flags & FI_REMOTE_CQ_DATA && error.data == 4711 + i);
		}
		IS(guarded(local + 64, 60) && guarded(local + 256, 70));
	}
	finish(side);
}

/* ---- query ---- */

static void check_query(void)
{
	struct side side;

	begin(&side);
	for (unsigned type = 0; type < FI_DATATYPE_LAST; type++)
		for (unsigned op = 0; op < FI_ATOMIC_OP_LAST; op++)
			for (unsigned family = 0; family < 3; family++) {
				static const uint64_t flags[] = { 0, FI_FETCH_ATOMIC, FI_COMPARE_ATOMIC };
				struct fi_atomic_attr attr = { 0 };
				size_t count = 0;
				int valid = family == 0 ? fi_atomicvalid(side.ep, type, op, &count) : family == 1 ? fi_fetch_atomicvalid(side.ep, type, op, &count) : fi_compare_atomicvalid(side.ep, type, op, &count);
				int query = fi_query_atomic(side.domain, type, op, &attr, flags[family]);

				if (valid != query || (valid == 0 && (count != attr.count || !count)))
					die("type %u, operation %u, family %u: %d and %zu, fi_query_atomic %d and %zu", type, op, family, valid, count, query, attr.count);
				if (valid && valid != -FI_EOPNOTSUPP)
					die("type %u, operation %u, family %u: %d", type, op, family, valid);
				/* tagged receive buffers are no targets */
				IS(fi_query_atomic(side.domain, type, op, &attr, flags[family] | FI_TAGGED) != 0);
				IS(fi_query_atomic(side.domain, type, op, &attr, FI_FETCH_ATOMIC | FI_COMPARE_ATOMIC) != 0);
			}
	struct fi_atomic_attr attr;
	MUST(fi_query_atomic(side.domain, FI_LONG_DOUBLE, FI_SUM, &attr, 0));
	IS(attr.size == sizeof(long double));
	MUST(fi_query_atomic(side.domain, FI_UINT8, FI_SUM, &attr, 0));
	IS(attr.size == 1);
	IS(fi_query_atomic(side.domain, 1000, FI_SUM, &attr, 0) < 0);
	IS(fi_query_atomic(side.domain, FI_UINT8, 1000, &attr, 0) < 0);
	finish(&side);
}

/* ---- signal ---- */

static void check_signal(void)
{
	struct fi_cq_attr attr = { .format = FI_CQ_FORMAT_TAGGED, .wait_obj = FI_WAIT_UNSPEC };
	struct fi_cq_tagged_entry entry;
	struct side side;
	struct fid_cq *cq;
	double began;

	begin(&side);
	MUST(fi_cq_open(side.domain, &attr, &cq, NULL));
	MUST(fi_cq_signal(cq));
	began = now();
	/* the signal may be lost or end the next call, but no further one */
	ssize_t got = fi_cq_sread(cq, &entry, 1, NULL, 300);
	printf("fi_cq_sread after a signal: %zd after %.3f s\n", got, now() - began);
	IS(got == -FI_EAGAIN || got == -FI_EINTR || got == -FI_ECANCELED);
	began = now();
	got = fi_cq_sread(cq, &entry, 1, NULL, 300);
	IS(got == -FI_EAGAIN || got == -FI_ETIMEDOUT);
	IS(now() - began > 0.29);
	RETURNS(fi_cq_sread(cq, &entry, 1, NULL, 0), -FI_EAGAIN);
	MUST(fi_close(&cq->fid));
	/* without a wait object */
	attr.wait_obj = FI_WAIT_NONE;
	MUST(fi_cq_open(side.domain, &attr, &cq, NULL));
	IS(fi_cq_signal(cq) < 0);
	IS(fi_cq_sread(cq, &entry, 1, NULL, 0) < 0);
	MUST(fi_close(&cq->fid));
	finish(&side);
}

/* ---- null ---- */

/* fi_weft(7), "Buffers at NULL": "A send, read or write whose buffer is NULL and has a length is refused with
 * -FI_EINVAL." For each kind of memory at the target. */
static void check_null(void)
{
	struct weft_mr_attr attr = { .size = sizeof attr, .access = FI_REMOTE_READ | FI_REMOTE_WRITE, .requested_key = 8 };
	struct weft_mr_ops *ops;
	struct fid_mr *mr;
	struct side side;
	void *bytes, *table;

	begin(&side);
	MUST(fi_open_ops(&side.domain->fid, WEFT_MR_OPS, 0, &table, NULL));
	ops = table;
	MUST(ops->mr_alloc(side.domain, 4096, &attr, &bytes, &mr));
	struct region allocated = { .mr = mr, .bytes = bytes, .len = 4096 };
	show(&side, &allocated, 1);
	meet(&side);
	for (unsigned place = 0; me == 0 && place < 2; place++) {
		struct shown to = region_at(&side, 1, place);
		struct iovec nothing = { NULL, 8 };

		/* the good ones make the connection, and use what the device remembers of the target */
		for (unsigned i = 0; i < 3; i++) {
			paint(local, 8, 40 + i);
			POST(&side, fi_write(side.ep, local, 8, NULL, side.peer, to.addr, to.key, ctx(1)));
			DONE(&side, ctx(1), FI_RMA | FI_WRITE);
			POST(&side, fi_read(side.ep, local + 64, 8, NULL, side.peer, to.addr, to.key, ctx(2)));
			DONE(&side, ctx(2), FI_RMA | FI_READ);
			PAINTED(local + 64, 8, 40 + i);
			RETURNS(fi_write(side.ep, NULL, 8, NULL, side.peer, to.addr, to.key, ctx(3)), -FI_EINVAL);
			RETURNS(fi_writev(side.ep, &nothing, NULL, 1, side.peer, to.addr, to.key, ctx(3)), -FI_EINVAL);
			RETURNS(fi_inject_write(side.ep, NULL, 8, side.peer, to.addr, to.key), -FI_EINVAL);
			RETURNS(fi_read(side.ep, NULL, 8, NULL, side.peer, to.addr, to.key, ctx(3)), -FI_EINVAL);
			RETURNS(fi_read(side.ep, NULL, 4096, NULL, side.peer, to.addr, to.key, ctx(3)), -FI_EINVAL);
		}
		RETURNS(fi_send(side.ep, NULL, 8, NULL, side.peer, ctx(3)), -FI_EINVAL);
	}
	meet(&side);
	if (me == 1)
		PAINTED((uint8_t *)bytes, 8, 42);
	meet(&side);
	MUST(ops->mr_free(mr));
	finish(&side);
}

int main(int argc, char **argv)
{
	static const struct memory_mode modes[] = {
		{ "empty", check_empty, 2 }, { "vectors", check_vectors, 2 }, { "selective", check_selective, 2 },
		{ "left", check_left, 2 },   { "cancel", check_cancel, 2 },   { "counters", check_counters, 2 },
		{ "errors", check_errors, 2 }, { "query", check_query, 2 }, { "signal", check_signal, 2 },
		{ "null", check_null, 2 },
	};

	return run_memory_mode(modes, sizeof modes / sizeof *modes, argc, argv);
}
