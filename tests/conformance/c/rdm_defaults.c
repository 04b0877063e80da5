/* Default flags, formats of completions and poll sets, from fi_endpoint(3), fi_msg(3), fi_cq(3), fi_cntr(3) and
 * fi_poll(3), between two processes with endpoints of type FI_EP_RDM:
 *
 *   rdm_defaults multi PROV NODE    FI_MULTI_RECV as default flag of receives: by the info, by FI_SETOPSFLAG, and
 *                                   of an alias
 *   rdm_defaults inject PROV NODE   FI_INJECT as default flag: buffers can be reused when the call returns
 *   rdm_defaults levels PROV NODE   each completion level as default and as flag of each call
 *   rdm_defaults formats PROV NODE  each format of completion queues, several entries at once
 *   rdm_defaults source PROV NODE   fi_cq_readfrom with and without FI_SOURCE, and of entries that are no receives
 *   rdm_defaults polled PROV NODE   fi_poll returns counters whose values change, also the value of errors
 *   rdm_defaults closing PROV NODE  objects that are in use are -FI_EBUSY, and work afterwards; each order of closing
 *                                   that the pages permit
 *   rdm_defaults pending PROV NODE  fi_close with operations under way: afterwards no buffer changes
 *   rdm_defaults states PROV NODE   calls before fi_enable, binding after it and twice, missing objects
 *
 * A further argument `auto` requests FI_PROGRESS_AUTO. Ends with 0, or says what went wrong. Plain libfabric 1.17. */
#define _GNU_SOURCE
#define SECONDS 20
#include "rdm_memory.h"

#define CAPS_ALL (FI_MSG | FI_TAGGED | FI_RMA | FI_ATOMIC)
#define ALL_REMOTE (FI_REMOTE_READ | FI_REMOTE_WRITE)
#define AREA (1UL << 20)

static uint8_t *memory, *local;
static struct region region;
static struct shown there;

static void *ctx(size_t i) { return (void *)(0x100000 + 16 * i); }

static void buffers(void)
{
	memory = pages(AREA);
	local = pages(AREA);
}

static void open_region(struct side *side)
{
	region = region_of(side, memory, AREA, ALL_REMOTE, 7);
	show(side, &region, 0);
	meet(side);
	there = region_at(side, 1 - me, 0);
}

static void begin(struct side *side, uint64_t caps)
{
	open_memory_pair(side, caps);
	buffers();
	if (caps & FI_RMA)
		open_region(side);
}

static void finish(struct side *side)
{
	meet(side);
	if (side->ep)
		must_be_empty(side);
	meet(side);
	if (side->ep)
		MUST(fi_close(&side->ep->fid));
	side->ep = NULL;
	close_region(&region);
	close_side(side);
	atomic_store(&board->named[me], 0);
	munmap(memory, AREA);
	munmap(local, AREA);
	meet(NULL);
}

/* A pair whose endpoint is opened by `open`. */
static void begin_custom(struct side *side, uint64_t caps, void (*change)(struct fi_info *))
{
	wanted.caps = caps;
	open_queues(side);
	if (change)
		change(side->info);
	side->ep = endpoint_with(side, 0, NULL);
	publish(side->ep, (int)me);
	meet(side);
	side->peer = address(side, 1 - (int)me);
	buffers();
}

/* ---- multi ---- */

static void with_multi(struct fi_info *info) { info->rx_attr->op_flags |= FI_MULTI_RECV; }

static void check_multi(void)
{
	for (unsigned how = 0; how < 3; how++) {
		struct side side;
		struct fid_ep *alias = NULL, *ep;
		size_t min = 100;

		begin_custom(&side, FI_MSG | FI_TAGGED | FI_MULTI_RECV, how == 0 ? with_multi : NULL);
		ep = side.ep;
		if (how == 1) {
			uint64_t flags = FI_RECV | FI_MULTI_RECV;

			MUST(fi_control(&ep->fid, FI_SETOPSFLAG, &flags));
			flags = FI_RECV;
			MUST(fi_control(&ep->fid, FI_GETOPSFLAG, &flags));
			IS(flags & FI_MULTI_RECV);
		} else if (how == 2) {
			MUST(fi_ep_alias(side.ep, &alias, FI_RECV | FI_MULTI_RECV));
			ep = alias;
		}
		MUST(fi_setopt(&side.ep->fid, FI_OPT_ENDPOINT, FI_OPT_MIN_MULTI_RECV, &min, sizeof min));
		if (me == 1) {
			struct iovec iov = { local + 8192, 100 };
			struct fi_msg msg = { .msg_iov = &iov, .iov_count = 1, .addr = FI_ADDR_UNSPEC, .context = ctx(2) };

			memset(local, 0xa5, 2 * 8192);
			POST(&side, fi_recv(ep, local, 1000, NULL, FI_ADDR_UNSPEC, ctx(1)));
			/* flags of the call replace the default: a plain receive */
			POST(&side, fi_recvmsg(ep, &msg, FI_COMPLETION));
			meet(&side);
			size_t at = 0, count = 0;
			bool released = false;
			unsigned seen = 0;
			while (!released) {
				struct outcome got = OUTCOME(&side, side.rx);

				if (got.err || got.entry.op_context != ctx(1))
					die("way %u: error %d, context %p", how, got.err, got.entry.op_context);
				released = got.entry.flags & FI_MULTI_RECV;
				if (!(got.entry.flags & FI_RECV)) {
					IS(released);
					break;
				}
				uint8_t *bytes = got.entry.buf;
				if (bytes < local || bytes + got.entry.len > local + 1000 || got.entry.len != 95)
					die("way %u: message %zu at %td", how, count, bytes - local);
				unsigned number = 0;
				while (number < 11 && differs(bytes, 95, number) != 95)
					number++;
				IS(number < 11 && !(seen & 1U << number));
				seen |= 1U << number;
				if ((size_t)(bytes - local) + got.entry.len > at)
					at = (size_t)(bytes - local) + got.entry.len;
				count++;
				/* "below the specified minimum" */
				if (released && 1000 - at >= min)
					die("way %u: released with %zu bytes left", how, 1000 - at);
			}
			IS(count == 10 || count == 9);
			IS(seen == (1U << count) - 1);
			for (; count < 11; count++) { /* the next ones are in the plain receive and in further ones */
				struct outcome got;

				if (count < 10) {
					POST(&side, fi_recvmsg(ep, &msg, FI_COMPLETION));
				}
				got = OUTCOME(&side, side.rx);
				IS(got.err == 0 && got.entry.op_context == ctx(2) && !(got.entry.flags & FI_MULTI_RECV));
				PAINTED(local + 8192, 95, count);
			}
		} else {
			meet(&side);
			for (unsigned i = 0; i < 11; i++) {
				paint(local, 95, i);
				POST(&side, fi_send(side.ep, local, 95, NULL, side.peer, ctx(i)));
				DONE(&side, ctx(i), FI_SEND | FI_MSG);
			}
		}
		meet(&side);
		if (alias)
			MUST(fi_close(&alias->fid));
		finish(&side);
	}
}

/* ---- inject ---- */

static void check_inject(void)
{
	struct side side;
	uint64_t flags = FI_TRANSMIT | FI_INJECT;
	size_t inject;

	begin(&side, CAPS_ALL);
	inject = side.info->tx_attr->inject_size;
	if (me == 0) {
		MUST(fi_control(&side.ep->fid, FI_SETOPSFLAG, &flags));
		meet(&side);
		for (unsigned i = 0; i < 200; i++) {
			size_t len = 1 + i * (inject - 1) / 199;

			paint(local, len, i);
			POST(&side, fi_send(side.ep, local, len, NULL, side.peer, ctx(i)));
			memset(local, 0, len);
			paint(local, len, i);
			POST(&side, fi_write(side.ep, local, len, NULL, side.peer, there.addr + i * 4096 % (AREA / 2), there.key, ctx(i)));
			memset(local, 0, len);
			if (i % 16 == 15) /* completions of the last ones */
				for (unsigned k = 0; k < 32; k++)
					IS(OUTCOME(&side, side.tx).err == 0);
		}
		for (unsigned k = 0; k < 2 * (200 % 16); k++)
			IS(OUTCOME(&side, side.tx).err == 0);
		/* longer than inject_size */
		ssize_t result = fi_send(side.ep, local, inject + 1, NULL, side.peer, ctx(1));
		printf("a send of inject_size + 1 bytes with FI_INJECT as default: %zd\n", result);
		if (result == 0)
			IS(OUTCOME(&side, side.tx).err == 0);
		else
			IS(result != -FI_EAGAIN);
		put(0, result == 0 ? 1 : 2);
		struct iovec iov = { local, inject + 1 };
		struct fi_msg msg = { .msg_iov = &iov, .iov_count = 1, .addr = side.peer, .context = ctx(1) };
		IS(fi_sendmsg(side.ep, &msg, FI_INJECT) < 0);
		IS(fi_inject(side.ep, local, inject + 1, side.peer) < 0);
		IS(fi_inject_write(side.ep, local, inject + 1, side.peer, there.addr, there.key) < 0);
	} else {
		for (unsigned i = 0; i < 200; i++)
			POST(&side, fi_recv(side.ep, local + i * 4096, 4096, NULL, FI_ADDR_UNSPEC, ctx(i)));
		meet(&side);
		bool seen[200] = { false };
		for (unsigned n = 0; n < 200; n++) { /* in any order */
			struct outcome got = OUTCOME(&side, side.rx);
			size_t i = ((size_t)got.entry.op_context - 0x100000) / 16, len = 1 + i * (inject - 1) / 199;

			IS(i < 200 && !seen[i]);
			if (got.err || got.entry.len != len)
				die("receive %zu of %zu bytes: error %d, length %zu", i, len, got.err, got.entry.len);
			PAINTED(local + i * 4096, len, i);
			seen[i] = true;
		}
		UNTIL(told(0), progress(&side));
		if (told(0) == 1) {
			POST(&side, fi_recv(side.ep, local, 2 * inject, NULL, FI_ADDR_UNSPEC, ctx(1)));
			IS(OUTCOME(&side, side.rx).entry.len == inject + 1);
		}
	}
	meet(&side);
	if (me == 1)
		for (unsigned i = 200 - 128; i < 200; i++)
			ARRIVES(&side, memory + i * 4096 % (AREA / 2), 1 + i * (inject - 1) / 199, i);
	finish(&side);
}

/* ---- levels ---- */

static void check_levels(void)
{
	static const struct {
		uint64_t flag;
		const char *name;
	} flags[] = {
		{ FI_INJECT_COMPLETE, "FI_INJECT_COMPLETE" }, { FI_TRANSMIT_COMPLETE, "FI_TRANSMIT_COMPLETE" }, { FI_DELIVERY_COMPLETE, "FI_DELIVERY_COMPLETE" },
		{ FI_MATCH_COMPLETE, "FI_MATCH_COMPLETE" }, { FI_COMMIT_COMPLETE, "FI_COMMIT_COMPLETE" }, { FI_FENCE, "FI_FENCE" }, { FI_MORE, "FI_MORE" },
		{ FI_COMPLETION, "FI_COMPLETION" }, { FI_INJECT, "FI_INJECT" },
	};
	enum { FLAGS = sizeof flags / sizeof *flags };
	struct side side;
	uint64_t result_word, one = 1;
	unsigned sent = 0;

	begin(&side, CAPS_ALL);
	if (me == 1)
		for (unsigned i = 0; i < 4 * FLAGS; i++) {
			POST(&side, fi_recv(side.ep, local, 64, NULL, FI_ADDR_UNSPEC, ctx(1)));
			POST(&side, fi_trecv(side.ep, local, 64, NULL, FI_ADDR_UNSPEC, 0, ~0ULL, ctx(2)));
		}
	meet(&side);
	for (unsigned i = 0; me == 0 && i < FLAGS; i++) {
		struct iovec iov = { local, 8 };
		struct fi_rma_iov target = { there.addr, 8, there.key };
		struct fi_ioc ioc = { &one, 1 }, result_ioc = { &result_word, 1 };
		struct fi_rma_ioc atom = { there.addr + 64, 1, there.key };
		struct fi_msg msg = { .msg_iov = &iov, .iov_count = 1, .addr = side.peer, .context = ctx(5) };
		struct fi_msg_tagged tmsg = { .msg_iov = &iov, .iov_count = 1, .addr = side.peer, .context = ctx(5) };
		struct fi_msg_rma rma = { .msg_iov = &iov, .iov_count = 1, .addr = side.peer, .context = ctx(5), .rma_iov = &target, .rma_iov_count = 1 };
		struct fi_msg_atomic atomic = { .msg_iov = &ioc, .iov_count = 1, .addr = side.peer, .context = ctx(5), .rma_iov = &atom, .rma_iov_count = 1, .datatype = FI_UINT64, .op = FI_SUM };
		ssize_t results[6];

		results[0] = fi_sendmsg(side.ep, &msg, flags[i].flag);
		results[1] = fi_tsendmsg(side.ep, &tmsg, flags[i].flag);
		results[2] = fi_writemsg(side.ep, &rma, flags[i].flag);
		results[3] = fi_readmsg(side.ep, &rma, flags[i].flag);
		results[4] = fi_atomicmsg(side.ep, &atomic, flags[i].flag);
		results[5] = fi_fetch_atomicmsg(side.ep, &atomic, &result_ioc, NULL, 1, flags[i].flag);
		printf("%-22s sendmsg %zd tsendmsg %zd writemsg %zd readmsg %zd atomicmsg %zd fetch_atomicmsg %zd\n", flags[i].name, results[0], results[1], results[2], results[3], results[4], results[5]);
		for (unsigned k = 0; k < 6; k++)
			if (results[k] == 0)
				IS(OUTCOME(&side, side.tx).err == 0);
		uint64_t set = FI_TRANSMIT | flags[i].flag;
		int result = fi_control(&side.ep->fid, FI_SETOPSFLAG, &set);
		printf("%-22s as default: %d\n", flags[i].name, result);
		sent += (results[0] == 0) + (results[1] == 0) + (result == 0);
		if (result == 0) {
			POST(&side, fi_send(side.ep, local, 8, NULL, side.peer, ctx(6)));
			DONE(&side, ctx(6), FI_SEND | FI_MSG);
			POST(&side, fi_read(side.ep, local, 8, NULL, side.peer, there.addr, there.key, ctx(6)));
			DONE(&side, ctx(6), FI_RMA | FI_READ);
		}
		/* each of these is a flag of the pages */
		if (flags[i].flag != FI_MATCH_COMPLETE && flags[i].flag != FI_COMMIT_COMPLETE)
			IS(results[0] == 0 && results[1] == 0 && results[2] == 0);
	}
	if (me == 0)
		put(0, sent);
	meet(&side);
	/* a completion at the sender does not say that the message has arrived */
	for (unsigned i = 0; me == 1 && i < told(0); i++)
		IS(OUTCOME(&side, side.rx).err == 0);
	finish(&side);
}

/* ---- formats ---- */

static void check_formats(void)
{
	static const size_t sizes[] = { 0, sizeof(struct fi_cq_entry), sizeof(struct fi_cq_msg_entry), sizeof(struct fi_cq_data_entry), sizeof(struct fi_cq_tagged_entry) };

	for (unsigned format = FI_CQ_FORMAT_CONTEXT; format <= FI_CQ_FORMAT_TAGGED; format++) {
		struct side side;
		struct fi_cq_attr attr = { .format = format, .wait_obj = FI_WAIT_NONE };
		struct fi_info *info = NULL;
		uint8_t bytes[16 * sizeof(struct fi_cq_tagged_entry) + GUARD];
		unsigned total = 0, seen = 0;

		wanted.caps = FI_MSG | FI_TAGGED;
		MUST(find_info(&info));
		open_domain_with(&side, info);
		MUST(fi_cq_open(side.domain, &attr, &side.tx, NULL));
		MUST(fi_cq_open(side.domain, &attr, &side.rx, NULL));
		side.ep = endpoint_with(&side, 0, NULL);
		publish(side.ep, (int)me);
		meet(NULL);
		side.peer = address(&side, 1 - (int)me);
		buffers();
		if (me == 1)
			for (unsigned i = 0; i < 30; i++)
				POST(&side, fi_trecv(side.ep, local + 64 * i, 64, NULL, FI_ADDR_UNSPEC, 100 + i, 0, ctx(i)));
		meet(NULL);
		if (me == 0)
			for (unsigned i = 0; i < 30; i++)
				POST(&side, fi_tsenddata(side.ep, local, i, NULL, 500 + i, side.peer, 100 + i, ctx(i)));
		struct fid_cq *cq = me ? side.rx : side.tx;
		double limit = now() + SECONDS;
		while (total < 30) {
			unsigned want = total % 7 + 1;
			memset(bytes, 0xa5, sizeof bytes);
			ssize_t got = fi_cq_read(cq, bytes, want);

			IS(now() < limit);
			if (got == -FI_EAGAIN)
				continue;
			IS(got > 0 && got <= (ssize_t)want);
			IS(clean(bytes + (size_t)got * sizes[format], GUARD));
			for (ssize_t i = 0; i < got; i++, total++) {
				struct fi_cq_tagged_entry entry;

				memcpy(&entry, bytes + (size_t)i * sizes[format], sizes[format]);
				size_t number = ((size_t)entry.op_context - 0x100000) / 16;

				IS(number < 30 && !(seen & 1U << number));
				seen |= 1U << number;
				if (format >= FI_CQ_FORMAT_MSG)
					IS(KIND(entry.flags) == (FI_TAGGED | (me ? FI_RECV : FI_SEND)));
				if (me && format >= FI_CQ_FORMAT_MSG)
					IS(entry.len == number && entry.flags & FI_REMOTE_CQ_DATA);
				if (me && format >= FI_CQ_FORMAT_DATA)
					IS(entry.data == 500 + number);
				if (me && format == FI_CQ_FORMAT_TAGGED)
					IS(entry.tag == 100 + number);
			}
		}
		IS(fi_cq_read(cq, bytes, 1) == -FI_EAGAIN);
		meet(NULL);
		MUST(fi_close(&side.ep->fid));
		side.ep = NULL;
		/* other formats */
		attr.format = 77;
		struct fid_cq *other;
		IS(fi_cq_open(side.domain, &attr, &other, NULL) < 0);
		attr.format = FI_CQ_FORMAT_UNSPEC;
		MUST(fi_cq_open(side.domain, &attr, &other, ctx(9)));
		IS(other->fid.context == ctx(9));
		MUST(fi_close(&other->fid));
		close_side(&side);
		atomic_store(&board->named[me], 0);
		meet(NULL);
	}
}

/* ---- source ---- */

static void check_source(void)
{
	for (unsigned with = 0; with < 2; with++) {
		struct side side;
		struct fi_cq_tagged_entry entries[4];
		fi_addr_t from[4];
		ssize_t got;

		begin(&side, CAPS_ALL | (with ? FI_SOURCE : 0));
		bool has = side.info->caps & FI_SOURCE;
		if (with)
			IS(has);
		POST(&side, fi_recv(side.ep, local, 64, NULL, FI_ADDR_UNSPEC, ctx(1)));
		meet(&side);
		POST(&side, fi_send(side.ep, local + 64, 64, NULL, side.peer, ctx(2)));
		from[0] = 12345;
		UNTIL((got = fi_cq_readfrom(side.tx, entries, 1, from)) != -FI_EAGAIN, progress(&side));
		IS(got == 1);
		if (from[0] != FI_ADDR_NOTAVAIL)
			printf("the source of a send: %lld\n", (long long)from[0]);
		from[0] = 12345;
		UNTIL((got = fi_cq_readfrom(side.rx, entries, 1, from)) != -FI_EAGAIN, progress(&side));
		IS(got == 1);
		if (with)
			IS(from[0] == side.peer);
		else if (from[0] != FI_ADDR_NOTAVAIL)
			printf("the source of a receive without FI_SOURCE (caps %s it): %lld\n", has ? "have" : "do not have", (long long)from[0]);
		/* remote CQ data has a source too */
		meet(&side);
		POST(&side, fi_writedata(side.ep, local, 8, NULL, 5, side.peer, there.addr, there.key, ctx(3)));
		DONE(&side, ctx(3), FI_RMA | FI_WRITE);
		from[0] = 12345;
		UNTIL((got = fi_cq_readfrom(side.rx, entries, 4, from)) != -FI_EAGAIN, progress(&side));
		IS(got == 1 && entries[0].flags & FI_REMOTE_CQ_DATA && entries[0].data == 5 && entries[0].op_context == NULL);
		if (with && from[0] != side.peer)
			printf("the source of remote CQ data: %lld\n", (long long)from[0]);
		finish(&side);
	}
}

/* ---- polled ---- */

static void check_polled(void)
{
	struct side side;
	struct fi_poll_attr attr = { 0 };
	struct fid_poll *set;
	struct fid_cntr *cntr;
	void *contexts[4];
	struct fi_cntr_attr cntr_attr = { .events = FI_CNTR_EVENTS_COMP, .wait_obj = FI_WAIT_UNSPEC };
	struct fi_cq_attr cq_attr = { .format = FI_CQ_FORMAT_CONTEXT };
	struct fid_cq *cq;
	struct fid_ep *ep;

	begin(&side, CAPS_ALL);
	MUST(fi_poll_open(side.domain, &attr, &set));
	MUST(fi_cntr_open(side.domain, &cntr_attr, &cntr, ctx(1)));
	MUST(fi_cq_open(side.domain, &cq_attr, &cq, ctx(2)));
	MUST(fi_poll_add(set, &cntr->fid, 0));
	MUST(fi_poll_add(set, &cq->fid, 0));
	MUST(fi_endpoint(side.domain, side.info, &ep, NULL));
	MUST(fi_ep_bind(ep, &side.av->fid, 0));
	MUST(fi_ep_bind(ep, &cq->fid, FI_TRANSMIT | FI_RECV | FI_SELECTIVE_COMPLETION));
	MUST(fi_ep_bind(ep, &cntr->fid, FI_WRITE));
	MUST(fi_enable(ep));
	for (unsigned i = 0; i < 3; i++)
		fi_poll(set, contexts, 4);
	RETURNS(fi_poll(set, contexts, 4), 0);
	MUST(fi_cntr_adderr(cntr, 1));
	UNTIL_WITHIN(1, fi_poll(set, contexts, 4) == 1 && contexts[0] == ctx(1), );
	MUST(fi_cntr_seterr(cntr, 0));
	UNTIL_WITHIN(1, fi_poll(set, contexts, 4) == 1 && contexts[0] == ctx(1), );
	for (unsigned i = 0; i < 3; i++)
		fi_poll(set, contexts, 4);
	RETURNS(fi_poll(set, contexts, 4), 0);
	publish(ep, (int)me + 2);
	meet(&side);
	fi_addr_t peer = address(&side, 3 - (int)me);
	if (me == 0) {
		for (unsigned i = 0; i < 20; i++) {
			POST(&side, fi_write(ep, local, 8, NULL, peer, there.addr, there.key, ctx(3)));
			UNTIL(fi_poll(set, contexts, 4) == 1, );
			IS(contexts[0] == ctx(1));
			IS(fi_cntr_read(cntr) == i + 1);
		}
		/* a failure: the counter and the queue, in one call with room or in two */
		POST(&side, fi_write(ep, local, 8, NULL, peer, there.addr + AREA, there.key, ctx(3)));
		UNTIL(fi_cq_read(cq, contexts, 1) == -FI_EAVAIL, );
		unsigned seen = 0;
		for (unsigned i = 0; i < 10; i++) {
			int got = fi_poll(set, contexts, i % 4 + 1);

			IS(got >= 0 && got <= 2);
			for (int k = 0; k < got; k++)
				seen |= contexts[k] == ctx(1) ? 1 : contexts[k] == ctx(2) ? 2 : 4;
		}
		if (seen != 3)
			die("after a failure fi_poll has returned set %u (1: counter, 2: queue)", seen);
		struct fi_cq_err_entry error = { 0 };
		RETURNS(fi_cq_readerr(cq, &error, 0), 1);
	}
	meet(&side);
	RETURNS(fi_close(&cntr->fid), -FI_EBUSY);
	MUST(fi_close(&ep->fid));
	/* it leaves the set */
	MUST(fi_close(&cq->fid));
	for (unsigned i = 0; i < 3; i++)
		IS(fi_poll(set, contexts, 4) <= 1);
	MUST(fi_poll_del(set, &cntr->fid, 0));
	IS(fi_poll_del(set, &cntr->fid, 0) < 0);
	MUST(fi_close(&cntr->fid));
	MUST(fi_close(&set->fid));
	finish(&side);
}

/* ---- closing ---- */

static void exchange_one(struct side *side, struct fid_ep *ep, fi_addr_t peer, struct fid_cq *tx, struct fid_cq *rx)
{
	static unsigned n;
	struct outcome got;

	n++;
	paint(local, 100, n);
	memset(local + 4096, 0, 100);
	POST(side, fi_recv(ep, local + 4096, 100, NULL, FI_ADDR_UNSPEC, ctx(1)));
	POST(side, fi_send(ep, local, 100, NULL, peer, ctx(2)));
	unsigned seen = 0;
	UNTIL(seen == 3, {
		if (poll_outcome(seen & 2 ? rx : tx, &got)) { /* on one queue they may come in either order */
			IS(got.err == 0 && (got.entry.op_context == ctx(2) || (got.entry.op_context == ctx(1) && (tx == rx || seen & 2))));
			seen |= got.entry.op_context == ctx(2) ? 2 : 1;
		}
		progress(side);
	});
	PAINTED(local + 4096, 100, n);
}

static void check_closing(void)
{
	struct side side;
	struct fid_cntr *cntr, *mr_cntr;
	struct fid_eq *eq;
	struct fi_eq_attr eq_attr = { .wait_obj = FI_WAIT_NONE };
	struct fid_ep *ep;
	struct fid_mr *mr;

	needed.mr_mode = FI_MR_RMA_EVENT | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
	begin(&side, CAPS_ALL | FI_RMA_EVENT);
	cntr = counter(&side), mr_cntr = counter(&side);
	MUST(fi_eq_open(side.fabric, &eq_attr, &eq, NULL));
	MUST(fi_domain_bind(side.domain, &eq->fid, 0));
	RETURNS(fi_close(&side.fabric->fid), -FI_EBUSY);
	RETURNS(fi_close(&side.domain->fid), -FI_EBUSY);
	RETURNS(fi_close(&side.av->fid), -FI_EBUSY);
	RETURNS(fi_close(&side.tx->fid), -FI_EBUSY);
	RETURNS(fi_close(&side.rx->fid), -FI_EBUSY);
	RETURNS(fi_close(&eq->fid), -FI_EBUSY);
	exchange_one(&side, side.ep, side.peer, side.tx, side.rx);
	/* bound and not enabled */
	MUST(fi_endpoint(side.domain, side.info, &ep, NULL));
	struct fid_cq *cq = queue(&side, 0);
	MUST(fi_ep_bind(ep, &cq->fid, FI_TRANSMIT | FI_RECV));
	MUST(fi_ep_bind(ep, &cntr->fid, FI_SEND));
	RETURNS(fi_close(&cq->fid), -FI_EBUSY);
	RETURNS(fi_close(&cntr->fid), -FI_EBUSY);
	MUST(fi_ep_bind(ep, &side.av->fid, 0));
	MUST(fi_enable(ep));
	RETURNS(fi_close(&cq->fid), -FI_EBUSY);
	publish(ep, (int)me + 4);
	meet(&side);
	fi_addr_t peer = address(&side, 5 - (int)me);
	exchange_one(&side, ep, peer, cq, cq);
	IS(fi_cntr_read(cntr) == 1);
	meet(&side);
	/* a region with a counter */
	MUST(fi_mr_reg(side.domain, local + 8192, 4096, ALL_REMOTE, 0, 77, FI_RMA_EVENT, &mr, NULL));
	MUST(fi_mr_bind(mr, &mr_cntr->fid, FI_REMOTE_WRITE));
	RETURNS(fi_close(&mr_cntr->fid), -FI_EBUSY);
	if (mr_mode(&side) & FI_MR_RMA_EVENT)
		MUST(fi_mr_enable(mr));
	RETURNS(fi_close(&mr_cntr->fid), -FI_EBUSY);
	RETURNS(fi_close(&side.domain->fid), -FI_EBUSY);
	MUST(fi_close(&mr->fid));
	MUST(fi_close(&mr_cntr->fid));
	exchange_one(&side, side.ep, side.peer, side.tx, side.rx);
	/* an alias keeps its endpoint */
	struct fid_ep *alias = NULL;
	MUST(fi_ep_alias(ep, &alias, FI_TRANSMIT | FI_DELIVERY_COMPLETE));
	int closed = fi_close(&ep->fid);
	printf("fi_close of an endpoint with an alias: %d\n", closed);
	meet(&side);
	exchange_one(&side, alias, peer, cq, cq);
	meet(&side);
	MUST(fi_close(&alias->fid));
	if (closed)
		MUST(fi_close(&ep->fid));
	MUST(fi_close(&cq->fid));
	MUST(fi_close(&cntr->fid));
	/* queues with unread entries */
	POST(&side, fi_recv(side.ep, local + 4096, 100, NULL, FI_ADDR_UNSPEC, ctx(1)));
	meet(&side);
	POST(&side, fi_inject(side.ep, local, 100, side.peer));
	meet(&side);
	pause_ms(20);
	(void)fi_cq_read(side.rx, NULL, 0);
	meet(NULL);
	MUST(fi_close(&side.ep->fid));
	side.ep = NULL;
	MUST(fi_close(&side.rx->fid));
	side.rx = NULL;
	MUST(fi_close(&side.tx->fid));
	side.tx = NULL;
	/* regions need no endpoint */
	RETURNS(fi_close(&side.domain->fid), -FI_EBUSY);
	close_region(&region);
	MUST(fi_close(&side.av->fid));
	MUST(fi_close(&side.domain->fid));
	RETURNS(fi_close(&side.fabric->fid), -FI_EBUSY);
	MUST(fi_close(&eq->fid));
	MUST(fi_close(&side.fabric->fid));
	fi_freeinfo(side.info);
	meet(NULL);
}

/* ---- pending ---- */

static void check_pending(void)
{
	for (unsigned round = 0; round < 30; round++) {
		struct side side;
		struct outcome got;

		begin(&side, CAPS_ALL);
		memset(memory, 0x11, AREA);
		meet(&side);
		if (me == 0) {
			for (unsigned i = 0; i < 8; i++) {
				POST(&side, fi_recv(side.ep, local + i * 65536, 65536, NULL, FI_ADDR_UNSPEC, ctx(1)));
				POST(&side, fi_read(side.ep, local + 524288 + i * 32768, 32768, NULL, side.peer, there.addr, there.key, ctx(2)));
				if (i < 4)
					POST(&side, fi_send(side.ep, local + 800000 + i * 50000, 50000, NULL, side.peer, ctx(3)));
			}
			usleep(round * 40);
			if (round & 1)
				progress(&side);
			MUST(fi_close(&side.ep->fid));
			side.ep = NULL;
			memset(local, 0xa5, AREA);
			pause_ms(10);
			IS(clean(local, AREA));
			/* "may discard previously completed operations" */
			while (poll_outcome(side.tx, &got) || poll_outcome(side.rx, &got))
				;
			pause_ms(20);
			IS(clean(local, AREA));
			put(0, round + 1);
			meet(NULL);
		} else {
			for (unsigned i = 0; i < 4; i++)
				POST(&side, fi_recv(side.ep, local + i * 65536, 65536, NULL, FI_ADDR_UNSPEC, ctx(4)));
			unsigned sent = 0, done = 0;
			while (told(0) < round + 1) {
				if (sent - done < 4 && sent < 16 && fi_send(side.ep, local + 600000, 60000, NULL, side.peer, ctx(5)) == 0)
					sent++;
				if (poll_outcome(side.tx, &got))
					done++;
				while (poll_outcome(side.rx, &got))
					;
			}
			meet(NULL);
			/* those to the closed endpoint are not awaited */
			MUST(fi_close(&side.ep->fid));
			side.ep = NULL;
		}
		close_region(&region);
		MUST(fi_close(&side.tx->fid));
		MUST(fi_close(&side.rx->fid));
		side.tx = side.rx = NULL;
		close_side(&side);
		atomic_store(&board->named[me], 0);
		munmap(memory, AREA);
		munmap(local, AREA);
		meet(NULL);
	}
}

/* ---- states ---- */

static void check_states(void)
{
	struct side side;
	struct fid_ep *ep;
	struct fid_cq *cq;
	ssize_t result;

	begin(&side, CAPS_ALL);
	cq = queue(&side, 0);
	MUST(fi_endpoint(side.domain, side.info, &ep, ctx(3)));
	IS(ep->fid.context == ctx(3) && ep->fid.fclass == FI_CLASS_EP);
	/* not enabled */
	result = fi_send(ep, local, 8, NULL, side.peer, NULL);
	if (result >= 0 || result == -FI_EAGAIN)
		die("fi_send before fi_enable: %zd", result);
	result = fi_recv(ep, local, 8, NULL, FI_ADDR_UNSPEC, NULL);
	if (result >= 0 || result == -FI_EAGAIN)
		die("fi_recv before fi_enable: %zd", result);
	result = fi_write(ep, local, 8, NULL, side.peer, there.addr, there.key, NULL);
	if (result >= 0 || result == -FI_EAGAIN)
		die("fi_write before fi_enable: %zd", result);
	IS(fi_cancel(&ep->fid, ctx(1)) < 0);
	/* nothing bound; then no queue */
	IS(fi_enable(ep) < 0);
	MUST(fi_ep_bind(ep, &side.av->fid, 0));
	result = fi_enable(ep);
	printf("fi_enable without queues: %zd\n", result);
	if (result) {
		MUST(fi_ep_bind(ep, &cq->fid, FI_TRANSMIT));
		result = fi_ep_bind(ep, &side.tx->fid, FI_TRANSMIT);
		if (result == 0)
			die("two queues for transmits");
		IS(fi_ep_bind(ep, &side.av->fid, 0) < 0);
		IS(fi_ep_bind(ep, &cq->fid, FI_RECV | FI_SEND | FI_READ) < 0);
		result = fi_enable(ep);
		printf("fi_enable without a queue for receives: %zd\n", result);
		if (result) {
			MUST(fi_ep_bind(ep, &cq->fid, FI_RECV));
			MUST(fi_enable(ep));
		}
	}
	/* enabled */
	struct fid_cntr *cntr = counter(&side);
	/* as libfabric's own providers; each kind has one counter */
	MUST(fi_ep_bind(ep, &cntr->fid, FI_SEND));
	IS(fi_ep_bind(ep, &cntr->fid, FI_SEND) < 0);
	result = fi_enable(ep);
	printf("fi_enable twice: %zd\n", result);
	/* an address that is in no vector */
	result = fi_send(ep, local, 8, NULL, 1000, NULL);
	if (result >= 0)
		die("fi_send to an address that is in no vector: %zd", result);
	result = fi_inject_write(ep, local, 8, 1000, there.addr, there.key);
	if (result >= 0)
		die("fi_inject_write to an address that is in no vector: %zd", result);
	result = fi_send(ep, local, 8, NULL, FI_ADDR_UNSPEC, NULL);
	if (result >= 0)
		die("fi_send to FI_ADDR_UNSPEC: %zd", result);
	MUST(fi_close(&ep->fid));
	MUST(fi_close(&cntr->fid));
	MUST(fi_close(&cq->fid));
	/* an endpoint that can only send has no queue for receives */
	meet(&side);
	finish(&side);
	struct fi_info *info = NULL;
	wanted.caps = FI_MSG | FI_SEND;
	MUST(find_info(&info));
	open_domain_with(&side, info);
	IS(!(info->caps & FI_RECV));
	cq = queue(&side, 0);
	MUST(fi_endpoint(side.domain, side.info, &ep, NULL));
	MUST(fi_ep_bind(ep, &side.av->fid, 0));
	MUST(fi_ep_bind(ep, &cq->fid, FI_TRANSMIT));
	result = fi_enable(ep);
	if (result)
		die("fi_enable of an endpoint that only sends, with a queue for transmits: %zd", result);
	result = fi_recv(ep, &cq, 8, NULL, FI_ADDR_UNSPEC, NULL);
	printf("fi_recv without FI_RECV: %zd\n", result);
	result = fi_write(ep, &cq, 8, NULL, 0, 0, 0, NULL);
	if (result >= 0)
		die("fi_write without FI_RMA: %zd", result);
	MUST(fi_close(&ep->fid));
	MUST(fi_close(&cq->fid));
	side.tx = side.rx = NULL;
	close_side(&side);
	meet(NULL);
}

int main(int argc, char **argv)
{
	static const struct memory_mode modes[] = {
		{ "multi", check_multi, 2 },   { "inject", check_inject, 2 }, { "levels", check_levels, 2 },   { "formats", check_formats, 2 }, { "source", check_source, 2 },
		{ "polled", check_polled, 2 }, { "closing", check_closing, 2 }, { "pending", check_pending, 2 }, { "states", check_states, 2 },
	};

	return run_memory_mode(modes, sizeof modes / sizeof *modes, argc, argv);
}
