/* Endpoints that are opened and closed within processes that stay, from fi_endpoint(3), fi_cm(3), fi_msg(3), fi_rma(3)
 * and fi_weft(7).
 *
 *   rdm_reopen brief PROV NODE    three processes open an endpoint for each message, which is injected or awaited, to
 *                                 one that stays: each message arrives once
 *   rdm_reopen same PROV NODE     a process closes its endpoint and opens another one with the same address (fi_setname)
 *                                 while the other one sends to it, reads and writes: each operation completes once,
 *                                 and the new endpoint is reached without fi_av_remove
 *   rdm_reopen both PROV NODE     the same, and both processes do so
 *
 * The next argument is `auto` for FI_PROGRESS_AUTO, or `manual`; the last one the number of endpoints. Ends with 0, or
 * says what went wrong. Plain libfabric 1.17. */
#define _GNU_SOURCE
#define SECONDS 25
#include "rdm_memory.h"

#include <arpa/inet.h>

#define CAPS_ALL (FI_MSG | FI_TAGGED | FI_RMA)
#define ALL_REMOTE (FI_REMOTE_READ | FI_REMOTE_WRITE)
enum { CLIENTS = 3, RECEIVES = 64, LONGEST = 60000, AREA = 1 << 18, WINDOW = 6 };

static unsigned count = 150;
static uint64_t random_state;
static unsigned pick(unsigned n)
{
	random_state = mixed(random_state + 0x9e3779b97f4a7c15ULL);
	return (unsigned)(random_state % n);
}

static struct fid_ep *enabled(struct side *side, const struct name *name)
{
	struct fid_ep *ep;

	MUST(fi_endpoint(side->domain, side->info, &ep, NULL));
	if (name) {
		double limit = now() + SECONDS;
		int result;

		/* the address is free when the old endpoint is closed */
		while ((result = fi_setname(&ep->fid, (void *)name->bytes, name->len)) == -FI_EADDRINUSE && now() < limit)
			usleep(1000);
		if (result)
			die("fi_setname: %d", result);
	}
	MUST(fi_ep_bind(ep, &side->av->fid, 0));
	MUST(fi_ep_bind(ep, &side->tx->fid, FI_TRANSMIT));
	MUST(fi_ep_bind(ep, &side->rx->fid, FI_RECV));
	MUST(fi_enable(ep));
	return ep;
}

/* ---- brief ---- */

static void brief_server(struct side *side)
{
	uint8_t *in[RECEIVES], *seen = calloc(CLIENTS + 1, count);
	unsigned total = 0, writes = 0;
	uint8_t *memory = pages(AREA);
	struct region region = region_of(side, memory, AREA, ALL_REMOTE, 7);

	for (unsigned i = 0; i < RECEIVES; i++) {
		in[i] = pages(LONGEST);
		POST(side, fi_trecv(side->ep, in[i], LONGEST, NULL, FI_ADDR_UNSPEC, 0, ~0ULL, (void *)(size_t)i));
	}
	show(side, &region, 0);
	meet(side);
	while (total < CLIENTS * count) {
		struct outcome got = OUTCOME(side, side->rx);
		unsigned i = (unsigned)(size_t)got.entry.op_context;
		unsigned from = (unsigned)(got.entry.tag >> 32), number = (unsigned)got.entry.tag;

		if (got.err)
			die("a receive fails: %s", fi_strerror(got.err));
		IS(from >= 1 && from <= CLIENTS && number < count);
		PAINTED(in[i], got.entry.len, got.entry.tag);
		if (seen[from * count + number]++)
			die("message %u of client %u comes twice", number, from);
		total++;
		POST(side, fi_trecv(side->ep, in[i], LONGEST, NULL, FI_ADDR_UNSPEC, 0, ~0ULL, (void *)(size_t)i));
	}
	meet(side);
	double limit = now() + 0.3;
	while (now() < limit) {
		struct outcome got;
		IS(!poll_outcome(side->rx, &got));
	}
	for (unsigned i = 0; i < CLIENTS * count; i++)
		writes += memory[8 * (i % (AREA / 8))] != 0;
	printf("%u messages; %u of %u writes that were injected before fi_close\n", total, writes, CLIENTS * count);
	meet(side);
	MUST(fi_close(&side->ep->fid));
	side->ep = NULL;
	close_region(&region);
}

static void brief_client(struct side *side)
{
	uint8_t *out = pages(LONGEST);
	struct shown there;
	double slowest = 0;

	meet(side);
	there = region_at(side, 0, 0);
	side->peer = address(side, 0);
	for (unsigned n = 0; n < count; n++) {
		struct fid_ep *ep = enabled(side, NULL);
		uint64_t tag = ((uint64_t)me << 32) + n, word = 1;
		size_t len = pick(4) ? 8 + pick(400) : 8 + pick(LONGEST - 8);
		bool inject = len <= side->info->tx_attr->inject_size && pick(3);

		paint(out, len, tag);
		if (inject) {
			POST(side, fi_inject_write(ep, &word, 8, side->peer, there.addr + 8 * (((me - 1) * count + n) % (AREA / 8)), there.key));
			POST(side, fi_tinject(ep, out, len, side->peer, tag));
			memset(out, 0, len);
		} else {
			struct iovec iov = { out, len };
			struct fi_msg_tagged msg = { .msg_iov = &iov, .iov_count = 1, .addr = side->peer, .tag = tag, .context = out };

			POST(side, fi_inject_write(ep, &word, 8, side->peer, there.addr + 8 * (((me - 1) * count + n) % (AREA / 8)), there.key));
			POST(side, fi_tsendmsg(ep, &msg, FI_DELIVERY_COMPLETE));
			DONE(side, out, FI_TAGGED | FI_SEND);
		}
		double began = now();
		MUST(fi_close(&ep->fid));
		if (now() - began > slowest)
			slowest = now() - began;
	}
	if (slowest > 3)
		printf("process %u: fi_close takes %.1f s\n", me, slowest);
	meet(side);
	meet(side);
}

static void check_brief(void)
{
	struct side side;

	random_state = me + 1;
	wanted.caps = CAPS_ALL;
	open_queues(&side);
	if (me == 0) {
		side.ep = enabled(&side, NULL);
		publish(side.ep, 0);
		brief_server(&side);
	} else {
		brief_client(&side);
	}
	meet(NULL);
	close_side(&side);
}

/* ---- same ---- */

static bool both;

struct operation {
	bool pending;
	int kind;
	uint8_t *bytes;
	size_t len;
};

static void check_same(void)
{
	struct side side;
	struct name name;
	struct operation ops[WINDOW] = { 0 };
	uint8_t *in[RECEIVES], *memory = pages(AREA);
	struct region region;
	struct shown there;
	uint64_t posted = 0, ok = 0, failed = 0, received = 0, closings = 0, after = 0, cut = 0;
	bool closes = both || me == 1;
	double until = 0, reopened = 0, closing = 0, slowest = 0, limit = now() + 70, last = now();

	random_state = 77 + me;
	wanted.caps = CAPS_ALL;
	open_queues(&side);
	side.ep = enabled(&side, NULL);
	publish(side.ep, (int)me);
	name = board->names[me];
	paint(memory, AREA / 2, 5);
	region = region_of(&side, memory, AREA, ALL_REMOTE, 7);
	show(&side, &region, 0);
	meet(&side);
	side.peer = address(&side, 1 - (int)me);
	there = region_at(&side, 1 - me, 0);
	for (unsigned i = 0; i < RECEIVES; i++) {
		in[i] = pages(LONGEST);
		POST(&side, fi_trecv(side.ep, in[i], LONGEST, NULL, FI_ADDR_UNSPEC, 0, ~0ULL, (void *)(size_t)(1000 + i)));
	}
	for (unsigned i = 0; i < WINDOW; i++)
		ops[i].bytes = pages(LONGEST);
	put((int)me, 0);
	meet(&side);
	/* words 0, 1: whether the process has ended its closings */
	while (!(told(0) && told(1))) {
		struct outcome got;

		if (now() > limit)
			die("%llu endpoints, %llu operations, %llu ok, %llu failed: not at the end", (unsigned long long)closings, (unsigned long long)posted, (unsigned long long)ok, (unsigned long long)failed);
		for (unsigned i = 0; i < WINDOW; i++) {
			struct operation *op = &ops[i];
			ssize_t result;

			if (op->pending)
				continue;
			op->kind = (int)pick(3);
			op->len = pick(3) ? 8 + pick(400) : 8 + pick(LONGEST - 8);
			if (op->kind == 0) {
				paint(op->bytes, op->len, op->len);
				result = fi_tsend(side.ep, op->bytes, op->len, NULL, side.peer, 1, (void *)(size_t)i);
			} else if (op->kind == 1) {
				memset(op->bytes, 0, op->len);
				result = fi_read(side.ep, op->bytes, op->len, NULL, side.peer, there.addr, there.key, (void *)(size_t)i);
			} else {
				result = fi_write(side.ep, op->bytes, op->len, NULL, side.peer, there.addr + AREA / 2, there.key, (void *)(size_t)i);
			}
			if (result == -FI_EAGAIN)
				break;
			if (result)
				die("a post of kind %d: %zd", op->kind, result);
			op->pending = true;
			posted++;
		}
		for (unsigned n = 0; n < 16 && poll_outcome(side.tx, &got); n++) {
			size_t i = (size_t)got.entry.op_context;

			IS(i < WINDOW && ops[i].pending);
			ops[i].pending = false;
			if (got.err) {
				failed++;
				continue;
			}
			ok++;
			if (now() - last > slowest)
				slowest = now() - last;
			if (now() - last > 2)
				printf("process %u: %.2f s without a success, endpoint %llu\n", me, now() - last, (unsigned long long)closings + 1);
			last = now();
			if (ops[i].kind == 1)
				PAINTED(ops[i].bytes, ops[i].len, 5);
			after++;
		}
		for (unsigned n = 0; n < 16 && poll_outcome(side.rx, &got); n++) {
			size_t i = (size_t)got.entry.op_context - 1000;

			IS(i < RECEIVES);
			if (!got.err) {
				PAINTED(in[i], got.entry.len, got.entry.len);
				received++;
				after++;
			}
			POST(&side, fi_trecv(side.ep, in[i], LONGEST, NULL, FI_ADDR_UNSPEC, 0, ~0ULL, (void *)(size_t)(1000 + i)));
		}
		if (!closes) {
			put((int)me, 1);
			continue;
		}
		if (closings == count) {
			put((int)me, 1);
			continue;
		}
		if (until == 0) {
			until = now() + 0.001 * pick(1 + pick(60));
			reopened = now();
			after = 0;
		}
		/* something has succeeded since */
		if (now() < until || after < 3) {
			if (now() - reopened > 20)
				die("nothing succeeds for 20 s after the endpoint has been opened for time %llu", (unsigned long long)closings + 1);
			continue;
		}
		double began = now();
		MUST(fi_close(&side.ep->fid));
		if (now() - began > closing)
			closing = now() - began;
		if (now() - began > 2)
			printf("process %u: fi_close takes %.2f s, %.3f s after the endpoint was opened\n", me, now() - began, began - reopened);
		/* entries of the closed endpoint are read or lost; none comes after that */
		while (poll_outcome(side.tx, &got) || poll_outcome(side.rx, &got))
			;
		for (unsigned i = 0; i < WINDOW; i++) {
			cut += ops[i].pending;
			ops[i].pending = false;
		}
		for (unsigned i = 0; i < RECEIVES; i++)
			memset(in[i], 0xa5, LONGEST);
		usleep(pick(3) ? 0 : pick(20000));
		IS(clean(in[0], LONGEST) && clean(in[RECEIVES - 1], LONGEST));
		side.ep = enabled(&side, &name);
		struct name again = name_of(side.ep);
		IS(again.len == name.len && !memcmp(again.bytes, name.bytes, name.len));
		for (unsigned i = 0; i < RECEIVES; i++)
			POST(&side, fi_trecv(side.ep, in[i], LONGEST, NULL, FI_ADDR_UNSPEC, 0, ~0ULL, (void *)(size_t)(1000 + i)));
		closings++;
		until = 0;
	}
	printf("process %u: %llu endpoints, %llu operations, %llu ok, %llu failed, %llu given up; %llu messages received; at most %.2f s without a success, %.2f s in fi_close\n", me, (unsigned long long)closings + 1, (unsigned long long)posted, (unsigned long long)ok, (unsigned long long)failed,
	       (unsigned long long)cut, (unsigned long long)received, slowest, closing);
	/* the rest completes */
	double quiet = now() + SECONDS;
	for (unsigned i = 0; i < WINDOW; i++)
		while (ops[i].pending) {
			struct outcome got;

			if (poll_outcome(side.tx, &got)) {
				IS((size_t)got.entry.op_context < WINDOW && ops[(size_t)got.entry.op_context].pending);
				ops[(size_t)got.entry.op_context].pending = false;
				ok += !got.err, failed += !!got.err;
			}
			progress(&side);
			if (now() > quiet)
				die("an operation of kind %d has not completed", ops[i].kind);
		}
	IS(posted == ok + failed + cut || closes);
	meet(&side);
	MUST(fi_close(&side.ep->fid));
	side.ep = NULL;
	meet(NULL);
	close_region(&region);
	close_side(&side);
}

static void check_both(void)
{
	both = true;
	check_same();
}

int main(int argc, char **argv)
{
	static const struct memory_mode modes[] = { { "brief", check_brief, CLIENTS + 1 }, { "same", check_same, 2 }, { "both", check_both, 2 } };

	if (argc > 5)
		count = (unsigned)atoi(argv[5]);
	return run_memory_mode(modes, 3, argc, argv);
}
