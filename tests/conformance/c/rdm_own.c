/* RMA of an endpoint to itself, from fi_rma(3), fi_mr(3) and fi_cntr(3):
 *
 *   rdm_own forms PROV NODE     regions of all forms: keys, offsets, raw keys, several buffers
 *   rdm_own rights PROV NODE    rights, bounds, a key that no region has, a closed region
 *   rdm_own counters PROV NODE  counters of regions and of the endpoint
 *   rdm_own fence PROV NODE     FI_FENCE behind a message that has no receive yet
 *
 * `rdm_rma_peers self` has the calls and lengths. A further argument `auto` requests
 * FI_PROGRESS_AUTO; NODE `-` stands for none. Ends with 0, or says what went wrong. Plain libfabric
 * 1.17. */
#define _GNU_SOURCE
#include "rdm_memory.h"

#define LEN 50021
#define ALL_REMOTE (FI_REMOTE_READ | FI_REMOTE_WRITE)
#define WRITTEN (FI_RMA | FI_WRITE)
#define READ_DONE (FI_RMA | FI_READ)

static uint8_t *local, *memory;
static struct region sources;

static void open_own(struct side *side, int bits, uint64_t caps, const struct counters *counters)
{
	struct name own;

	needed.mr_mode = bits;
	wanted.caps = caps;
	open_queues(side);
	if (!counters)
		side->ep = endpoint_with(side, 0, NULL);
	else
		side->ep = NULL; /* the caller opens it */
	if (side->ep) {
		own = name_of(side->ep);
		side->peer = insert(side, &own);
	}
	local = pages(4 * LEN);
	memory = pages(4 * LEN);
	if (mr_mode(side) & FI_MR_LOCAL)
		sources = region_of(side, local, 4 * LEN, FI_READ | FI_WRITE, 900);
}

static void close_own(struct side *side)
{
	must_be_empty(side);
	MUST(fi_close(&side->ep->fid));
	side->ep = NULL;
	close_region(&sources);
	sources.desc = NULL;
	close_side(side);
	munmap(local, 4 * LEN);
	munmap(memory, 4 * LEN);
}

static void forms(void)
{
	static const int all[] = {
		0, FI_MR_VIRT_ADDR, FI_MR_PROV_KEY, FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY, FI_MR_RAW, FI_MR_ENDPOINT, FI_MR_LOCAL,
	};

	for (unsigned i = 0; i < sizeof all / sizeof *all; i++)
		for (unsigned buffers = 1; buffers <= 20; buffers += 19) {
			struct side side;
			struct region region;

			open_own(&side, all[i], FI_MSG | FI_RMA, NULL);
			clear(memory + GUARD, LEN);
			if (buffers == 1) {
				region = region_of(&side, memory + GUARD, LEN, ALL_REMOTE, 3);
			} else {
				/* adjacent, so that addresses and offsets are those of one buffer */
				struct iovec iov[20];
				struct fid_mr *mr;
				size_t limit = side.info->domain_attr->mr_iov_limit, count = buffers < limit ? buffers : limit;

				for (size_t k = 0; k < count; k++) {
					size_t begin = LEN * k / count, end = LEN * (k + 1) / count;

					iov[k] = (struct iovec){ memory + GUARD + begin, end - begin };
				}
				MUST(fi_mr_regv(side.domain, iov, count, ALL_REMOTE, 0, 4, 0, &mr, NULL));
				region = finish_region(&side, mr, memory + GUARD, LEN);
			}
			show(&side, &region, 0);
			struct shown at = region_at(&side, 0, 0);
			paint(local, LEN, i + 1);
			POST(&side, fi_write(side.ep, local, LEN, sources.desc, side.peer, at.addr, at.key, local));
			DONE(&side, local, WRITTEN);
			PAINTED(memory + GUARD, LEN, i + 1);
			IS(guarded(memory + GUARD, LEN));
			memset(local, 0, LEN);
			POST(&side, fi_read(side.ep, local, LEN - 1, sources.desc, side.peer, at.addr, at.key, local));
			DONE(&side, local, READ_DONE);
			IS(!memcmp(local, memory + GUARD, LEN - 1) && local[LEN - 1] == 0);
			POST(&side, fi_write(side.ep, local, 100, sources.desc, side.peer, at.addr + LEN - 99, at.key, local));
			REFUSED(&side, local);
			IS(guarded(memory + GUARD, LEN));
			if (at.raw_len)
				MUST(fi_mr_unmap_key(side.domain, at.key));
			if (!(mr_mode(&side) & FI_MR_ENDPOINT)) {
				close_region(&region);
				close_own(&side);
				continue;
			}
			must_be_empty(&side);
			MUST(fi_close(&side.ep->fid));
			close_region(&region);
			side.ep = NULL;
			close_side(&side);
		}
}

/* One access, which is permitted or not. */
static void access_at(int line, struct side *side, bool reads, uint64_t addr, uint64_t key, size_t len, bool permitted)
{
	uint8_t *before = pages(4 * LEN), *own = pages(4 * LEN);

	memcpy(before, memory, 4 * LEN);
	paint(local, len, (uint64_t)line);
	memcpy(own, local, 4 * LEN);
	if (reads)
		POST(side, fi_read(side->ep, local, len, NULL, side->peer, addr, key, side));
	else
		POST(side, fi_write(side->ep, local, len, NULL, side->peer, addr, key, side));
	if (permitted) {
		done_at(line, side, side, reads ? READ_DONE : WRITTEN);
	} else {
		refused_at(line, side, side);
		IS(!memcmp(before, memory, 4 * LEN) && !memcmp(own, local, 4 * LEN));
	}
	munmap(before, 4 * LEN);
	munmap(own, 4 * LEN);
}

#define ACCESS(...) access_at(__LINE__, __VA_ARGS__)

static void rights(void)
{
	struct side side;

	open_own(&side, 0, FI_MSG | FI_RMA, NULL);
	struct region both = region_of(&side, memory, LEN, ALL_REMOTE, 1);
	struct region readable = region_of(&side, memory + LEN, LEN, FI_REMOTE_READ, 2);
	struct region writable = region_of(&side, memory + 2 * LEN, LEN, FI_REMOTE_WRITE, 3);
	struct region own = region_of(&side, memory + 3 * LEN, LEN, FI_READ | FI_WRITE, 4);

	for (int reads = 0; reads < 2; reads++) {
		ACCESS(&side, reads, 0, 1, LEN, true);
		ACCESS(&side, reads, 5, 2, 100, reads);
		ACCESS(&side, reads, 5, 3, 100, !reads);
		ACCESS(&side, reads, 5, 4, 100, false);
		ACCESS(&side, reads, 5, 77, 100, false);
		ACCESS(&side, reads, LEN - 1, 1, 1, true);
		ACCESS(&side, reads, LEN - 1, 1, 2, false);
		ACCESS(&side, reads, LEN, 1, 1, false);
		ACCESS(&side, reads, UINT64_MAX, 1, 2, false);
		ACCESS(&side, reads, UINT64_MAX - 1, 1, 1, false);
	}
	close_region(&both);
	for (int reads = 0; reads < 2; reads++)
		ACCESS(&side, reads, 0, 1, 8, false);
	both = region_of(&side, memory, LEN, FI_REMOTE_READ, 1);
	ACCESS(&side, true, 0, 1, 8, true);
	ACCESS(&side, false, 0, 1, 8, false);
	close_region(&both);
	close_region(&readable);
	close_region(&writable);
	close_region(&own);
	close_own(&side);
}

static void counted(void)
{
	struct side side;
	struct counters counters;
	struct fid_cntr *of_region, *reads_of_region;
	struct name own;

	open_own(&side, 0, FI_MSG | FI_RMA | FI_RMA_EVENT, &counters);
	counters = (struct counters){ counter(&side), counter(&side), counter(&side), counter(&side) };
	of_region = counter(&side);
	reads_of_region = counter(&side);
	side.ep = endpoint_with(&side, 0, &counters);
	own = name_of(side.ep);
	side.peer = insert(&side, &own);
	struct region region = region_of(&side, memory, LEN, ALL_REMOTE, 1);
	MUST(fi_mr_bind(region.mr, &of_region->fid, FI_REMOTE_WRITE));
	MUST(fi_mr_bind(region.mr, &reads_of_region->fid, FI_REMOTE_READ));
	for (unsigned i = 0; i < 7; i++) {
		POST(&side, fi_write(side.ep, local, 100, NULL, side.peer, 0, 1, local));
		DONE(&side, local, WRITTEN);
	}
	for (unsigned i = 0; i < 3; i++) {
		POST(&side, fi_read(side.ep, local, LEN, NULL, side.peer, 0, 1, local));
		DONE(&side, local, READ_DONE);
	}
	/* a call on two ranges is one operation */
	struct iovec from = { local, 16 };
	struct fi_rma_iov to[2] = { { 0, 8, 1 }, { 64, 8, 1 } };
	struct fi_msg_rma msg = { .msg_iov = &from, .iov_count = 1, .addr = side.peer, .rma_iov = to, .rma_iov_count = 2, .context = local };
	POST(&side, fi_writemsg(side.ep, &msg, FI_COMPLETION));
	DONE(&side, local, WRITTEN);
	POST(&side, fi_write(side.ep, local, 100, NULL, side.peer, LEN, 1, local));
	REFUSED(&side, local);
	IS(fi_cntr_read(counters.write) == 8 && fi_cntr_readerr(counters.write) == 1);
	IS(fi_cntr_read(counters.read) == 3 && fi_cntr_readerr(counters.read) == 0);
	IS(fi_cntr_read(counters.remote_write) == 8 && fi_cntr_read(counters.remote_read) == 3);
	IS(fi_cntr_read(of_region) == 8 && fi_cntr_read(reads_of_region) == 3);
	must_be_empty(&side);
	MUST(fi_close(&side.ep->fid));
	side.ep = NULL;
	close_region(&region);
	struct fid_cntr *all[] = { counters.write, counters.read, counters.remote_write, counters.remote_read, of_region, reads_of_region };
	for (unsigned i = 0; i < 6; i++)
		MUST(fi_close(&all[i]->fid));
	close_side(&side);
}

static void fence(void)
{
	struct side side;
	struct iovec iov, from;
	struct fi_rma_iov to = { .addr = 0, .len = LEN, .key = 1 };
	struct fi_msg_rma msg = { .msg_iov = &from, .iov_count = 1, .rma_iov = &to, .rma_iov_count = 1 };
	struct outcome outcome;

	needed.msg_order = FI_ORDER_WAW;
	open_own(&side, 0, FI_MSG | FI_RMA | FI_FENCE, NULL);
	struct region region = region_of(&side, memory, LEN, ALL_REMOTE, 1);

	iov = (struct iovec){ local + LEN, LEN };
	from = (struct iovec){ local, LEN };
	paint(local, LEN, 1);
	paint(local + LEN, LEN, 2);
	POST(&side, fi_send(side.ep, iov.iov_base, iov.iov_len, NULL, side.peer, &iov));
	msg.addr = side.peer;
	msg.context = &msg;
	POST(&side, fi_writemsg(side.ep, &msg, FI_FENCE | FI_COMPLETION));
	/* injected data may be changed at once */
	POST(&side, fi_inject_write(side.ep, local + LEN, 16, side.peer, 0, 1));
	for (unsigned i = 0; i < 200; i++) {
		IS(!poll_outcome(side.tx, &outcome));
		usleep(100);
	}
	IS(memory[100] == 0 && memory[0] == 0); /* "deferred until all previous operations ... have completed" */
	POST(&side, fi_recv(side.ep, local + 2 * LEN, LEN, NULL, FI_ADDR_UNSPEC, &region));
	DONE(&side, &iov, FI_MSG | FI_SEND);
	DONE(&side, &msg, WRITTEN);
	outcome = OUTCOME(&side, side.rx);
	IS(!outcome.err && outcome.entry.op_context == &region);
	PAINTED(local + 2 * LEN, LEN, 2);
	ARRIVES(&side, memory, 16, 2);
	IS(!memcmp(memory + 16, local + 16, LEN - 16));
	close_region(&region);
	close_own(&side);
}

int main(int argc, char **argv)
{
	static const struct memory_mode modes[] = {
		{ "forms", forms, 1 },
		{ "rights", rights, 1 },
		{ "counters", counted, 1 },
		{ "fence", fence, 1 },
	};

	return run_memory_mode(modes, sizeof modes / sizeof *modes, argc, argv);
}
