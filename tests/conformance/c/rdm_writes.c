/* RMA of endpoints with many peers, from fi_rma(3), fi_mr(3), fi_cq(3) and fi_cntr(3).
 * The target is another process, which calls nothing while its memory is accessed.
 *
 *   rdm_writes forms PROV NODE MODE PROGRESS   every call, unconnected at first use; contents
 *   rdm_writes data PROV NODE MODE PROGRESS    remote CQ data of 64 bits, behind the data
 *   rdm_writes inject PROV NODE MODE PROGRESS  an injected write lands though neither side calls again
 *   rdm_writes wrong PROV NODE MODE PROGRESS   a wrong key fails its operation; the next ones succeed
 *   rdm_writes order PROV NODE MODE PROGRESS   a message behind a write finds its data
 *   rdm_writes fence PROV NODE MODE PROGRESS   FI_FENCE behind remote CQ data, and behind a message of
 *                                              several buffers; messages behind the fence
 *
 * MODE: native (keys of the device) or keys (mr_mode 0: keys of the application, offsets from 0).
 * PROGRESS: manual or auto. Ends with 0, or says what went wrong. Plain libfabric 1.17. */
#define SECONDS 30
#include "rdm_processes.h"

#include <rdma/fi_rma.h>

enum { SIZE = 3 << 20, KEY = 77, DATA_WORD = 10, PARTS_LENGTH = 80000 };
enum { READY = 0, ADDR = 1, REMOTE_KEY = 2, DONE = 3 };

static const char *mode, *progress_mode;

static bool by_application(void) { return !strcmp(mode, "keys"); }

static struct fi_info *rma_info(void)
{
	struct fi_info *hints = fi_allocinfo(), *info;

	hints->caps = FI_MSG | FI_TAGGED | FI_RMA;
	hints->mode = FI_CONTEXT;
	hints->ep_attr->type = FI_EP_RDM;
	hints->ep_attr->protocol = asked_protocol();
	hints->domain_attr->data_progress = !strcmp(progress_mode, "auto") ? FI_PROGRESS_AUTO : FI_PROGRESS_MANUAL;
	hints->domain_attr->mr_mode = by_application() ? offered_bits(0) : FI_MR_PROV_KEY | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED;
	hints->fabric_attr->prov_name = strdup(provider);
	MUST(fi_getinfo(FI_VERSION(1, 17), node, NULL, FI_SOURCE, hints, &info));
	fi_freeinfo(hints);
	IS((info->caps & (FI_RMA | FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE)) ==
	   (FI_RMA | FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE));
	IS(info->domain_attr->cq_data_size == 8 && info->tx_attr->rma_iov_limit == 4);
	IS(!(info->rx_attr->mode & FI_RX_CQ_DATA));
	return info;
}

static void open_rma(struct side *side, int place)
{
	open_domain_with(side, rma_info());
	side->tx = queue(side, 0);
	side->rx = queue(side, 0);
	side->ep = endpoint_on(side, 0);
	publish(side->ep, place);
}

/* ---- the target ---- */

static void be_target(int until_done)
{
	struct side side;
	struct fid_mr *mr;
	/* shared, so that the parent's look does not need a call of the target */
	uint8_t *memory = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	(void)until_done;
	IS(memory != MAP_FAILED);
	memset(memory, 0x11, SIZE);
	open_rma(&side, 1);
	MUST(fi_mr_reg(side.domain, memory, SIZE, FI_REMOTE_READ | FI_REMOTE_WRITE, 0, KEY, 0, &mr, NULL));
	put(REMOTE_KEY, fi_mr_key(mr));
	put(ADDR, by_application() ? 0 : (uint64_t)(uintptr_t)memory);
	put(READY, 1);
	if (told(DATA_WORD)) {
		uint64_t seen = 0;
		uint64_t wanted_data = told(DATA_WORD);

		for (uint64_t i = 0; i < wanted_data; i++) {
			struct fi_cq_tagged_entry entry = next(&side, side.rx);

			IS(entry.flags == (FI_RMA | FI_REMOTE_WRITE | FI_REMOTE_CQ_DATA));
			IS(entry.data == 0x123456789abcdef0 + i && entry.len == 8);
			memcpy(&seen, memory + 8 * i, 8);
			IS(seen == ~i);
		}
	} else if (told(DATA_WORD + 1)) {
		/* messages behind writes */
		for (uint64_t i = 0; i < told(DATA_WORD + 1); i++) {
			uint64_t got = 0, seen = 0;

			POST(&side, fi_trecv(side.ep, &got, 8, NULL, FI_ADDR_UNSPEC, i, 0, NULL));
			next(&side, side.rx);
			IS(got == i);
			memcpy(&seen, memory + 4096 * (i % 64), 8);
			IS(seen == i + 1);
			put(DATA_WORD + 2, i + 1);
		}
	} else if (told(DATA_WORD + 5)) {
		static uint8_t parts[PARTS_LENGTH];

		for (uint64_t round = 0; round < told(DATA_WORD + 5); round++) {
			uint64_t small[3], notices = 0;

			for (uint64_t i = 0; i < 3; i++)
				POST(&side, fi_trecv(side.ep, &small[i], 8, NULL, FI_ADDR_UNSPEC, i, 0, NULL));
			POST(&side, fi_trecv(side.ep, parts, sizeof parts, NULL, FI_ADDR_UNSPEC, 3, 0, NULL));
			for (int entries = 0; entries < 6; entries++)
				notices += !!(next(&side, side.rx).flags & FI_REMOTE_CQ_DATA);
			IS(notices == 2);
			for (uint64_t i = 0; i < 3; i++)
				IS(small[i] == round);
			IS(parts[0] == (uint8_t)round && parts[sizeof parts - 1] == (uint8_t)round);
			put(DATA_WORD + 6, round + 1);
		}
	} else if (told(DATA_WORD + 3)) {
		/* the initiator computes, and this process looks at its memory */
		double limit = now() + SECONDS;

		while (*(volatile uint64_t *)(memory + 64) != 0x5151515151515151) {
			pause_ms(1);
			if (now() > limit)
				die("the injected write does not land");
		}
		put(DATA_WORD + 4, 1);
	}
	UNTIL(told(DONE), pause_ms(1));
	MUST(fi_close(&mr->fid));
	close_side(&side);
}

/* ---- the initiator ---- */

static struct side side;
static uint8_t local[SIZE], back[SIZE];

static void wait_one(uint64_t flags, void *context)
{
	struct fi_cq_tagged_entry entry = next(&side, side.tx);

	IS(entry.op_context == context);
	IS((entry.flags & (FI_RMA | FI_READ | FI_WRITE)) == flags);
}

static uint64_t at(size_t offset) { return told(ADDR) + offset; }

/* The bytes of the target, by a read. */
static void contains(size_t offset, const void *bytes, size_t len)
{
	memset(back, 0xee, len + 1);
	POST(&side, fi_read(side.ep, back, len, NULL, side.peer, at(offset), told(REMOTE_KEY), back));
	wait_one(FI_RMA | FI_READ, back);
	if (memcmp(back, bytes, len))
		die("other bytes at %zu (%zu)", offset, len);
	IS(back[len] == 0xee);
}

static void forms(void)
{
	uint64_t key = told(REMOTE_KEY);

	for (size_t i = 0; i < SIZE; i++)
		local[i] = (uint8_t)(i * 7 + i / 251);
	static const size_t sizes[] = { 0, 1, 8, 100, 511, 4096, 8192, 65536, 1 << 20, SIZE - 1 };
	for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
		POST(&side, fi_write(side.ep, local, sizes[i], NULL, side.peer, at(i % 2), key, local));
		wait_one(FI_RMA | FI_WRITE, local);
		contains(i % 2, local, sizes[i]);
	}
	/* several local buffers, several remote ranges */
	struct iovec iov[4] = { { local + 5, 100 }, { local + 1000, 0 }, { local + 2000, 3 }, { local + 3000, 897 } };
	struct fi_rma_iov ranges[4] = { { at(100), 1, key }, { at(300), 499, key }, { at(900), 0, key }, { at(1000), 500, key } };
	struct fi_msg_rma msg = { .msg_iov = iov, .iov_count = 4, .addr = side.peer, .rma_iov = ranges, .rma_iov_count = 4, .context = iov };

	POST(&side, fi_writemsg(side.ep, &msg, FI_COMPLETION | FI_DELIVERY_COMPLETE));
	wait_one(FI_RMA | FI_WRITE, iov);
	uint8_t joined[1000];
	memcpy(joined, local + 5, 100);
	memcpy(joined + 100, local + 2000, 3);
	memcpy(joined + 103, local + 3000, 897);
	contains(100, joined, 1);
	contains(300, joined + 1, 499);
	contains(1000, joined + 500, 500);
	struct iovec into[3] = { { back + 10, 1 }, { back + 100, 600 }, { back + 1000, 399 } };
	msg = (struct fi_msg_rma){ .msg_iov = into, .iov_count = 3, .addr = side.peer, .rma_iov = ranges, .rma_iov_count = 4, .context = into };
	memset(back, 0, 2000);
	POST(&side, fi_readmsg(side.ep, &msg, FI_COMPLETION | FI_FENCE));
	wait_one(FI_RMA | FI_READ, into);
	IS(!memcmp(back + 10, joined, 1) && !memcmp(back + 100, joined + 1, 600) && !memcmp(back + 1000, joined + 601, 399));
	MUST(fi_writev(side.ep, iov, NULL, 4, side.peer, at(5000), key, iov));
	wait_one(FI_RMA | FI_WRITE, iov);
	contains(5000, joined, 1000);
	MUST(fi_readv(side.ep, into, NULL, 3, side.peer, at(5000), key, into));
	wait_one(FI_RMA | FI_READ, into);
	IS(!memcmp(back + 1000, joined + 601, 399));
	/* lengths that differ, and too many ranges */
	ranges[0].len = 2;
	RETURNS(fi_readmsg(side.ep, &msg, FI_COMPLETION), -FI_EINVAL);
	msg.rma_iov_count = 5;
	RETURNS(fi_readmsg(side.ep, &msg, FI_COMPLETION), -FI_EINVAL);
	for (size_t len = 1; len <= side.info->tx_attr->inject_size; len *= 4) {
		memset(joined, (int)len, sizeof joined);
		uint8_t gone[4096];
		memset(gone, (int)len, sizeof gone);
		POST(&side, fi_inject_write(side.ep, gone, len, side.peer, at(10000), key));
		memset(gone, 0, sizeof gone);
		contains(10000, joined, len < 1000 ? len : 1000);
	}
	RETURNS(fi_inject_write(side.ep, local, side.info->tx_attr->inject_size + 1, side.peer, at(0), key), -FI_EMSGSIZE);
	/* a buffer at NULL has no bytes to transfer */
	struct iovec with_null[2] = { { local, 8 }, { NULL, 8 } };
	RETURNS(fi_write(side.ep, NULL, 100, NULL, side.peer, at(0), key, NULL), -FI_EINVAL);
	RETURNS(fi_read(side.ep, NULL, 100, NULL, side.peer, at(0), key, NULL), -FI_EINVAL);
	RETURNS(fi_inject_write(side.ep, NULL, 100, side.peer, at(0), key), -FI_EINVAL);
	RETURNS(fi_writev(side.ep, with_null, NULL, 2, side.peer, at(0), key, NULL), -FI_EINVAL);
	RETURNS(fi_readv(side.ep, with_null, NULL, 2, side.peer, at(0), key, NULL), -FI_EINVAL);
	/* many at once */
	int posted = 0, done = 0;
	while (done < 3000) {
		struct fi_cq_tagged_entry entries[16];
		if (posted < 3000) {
			ssize_t result = fi_write(side.ep, &local[posted], 8, NULL, side.peer, at(8 * (size_t)posted), key, NULL);
			if (result == 0)
				posted++;
			else
				IS(result == -FI_EAGAIN);
		}
		if (posted == 3000 || posted % 700 == 0)
			done += (int)take(side.tx, entries, 16);
		else if (posted - done > 900)
			done += (int)take(side.tx, entries, 1);
	}
	for (int i = 0; i < 3000; i += 299)
		contains(8 * (size_t)i, &local[i], 8);
}

static void data(void)
{
	static uint64_t words[300];

	for (uint64_t i = 0; i < 300; i++) {
		words[i] = ~i;
		if (i % 3 == 0) {
			POST(&side, fi_writedata(side.ep, &words[i], 8, NULL, 0x123456789abcdef0 + i, side.peer, at(8 * i), told(REMOTE_KEY), words));
			wait_one(FI_RMA | FI_WRITE, words);
		} else if (i % 3 == 1) {
			POST(&side, fi_inject_writedata(side.ep, &words[i], 8, 0x123456789abcdef0 + i, side.peer, at(8 * i), told(REMOTE_KEY)));
		} else {
			struct iovec iov = { &words[i], 8 };
			struct fi_rma_iov range = { at(8 * i), 8, told(REMOTE_KEY) };
			struct fi_msg_rma msg = { .msg_iov = &iov, .iov_count = 1, .addr = side.peer, .rma_iov = &range, .rma_iov_count = 1,
						  .data = 0x123456789abcdef0 + i };

			POST(&side, fi_writemsg(side.ep, &msg, FI_REMOTE_CQ_DATA | FI_COMPLETION));
			wait_one(FI_RMA | FI_WRITE, NULL);
		}
	}
	/* the target has all of them while this process computes */
}

static void wrong(void)
{
	uint64_t key = told(REMOTE_KEY), value = 5;
	struct fi_cq_err_entry error = { 0 };

	for (int round = 0; round < 3; round++) {
		POST(&side, fi_write(side.ep, &value, 8, NULL, side.peer, at(0), key + 0x5000 + (uint64_t)round, &error));
		struct fi_cq_tagged_entry none;
		UNTIL(fi_cq_read(side.tx, &none, 1) == -FI_EAVAIL, (void)fi_cq_read(side.rx, NULL, 0));
		MUST(fi_cq_readerr(side.tx, &error, 0));
		if (error.err != FI_EKEYREJECTED || error.op_context != &error)
			die("a wrong key: %s, context %p", fi_strerror(error.err), error.op_context);
		IS(error.flags == (FI_RMA | FI_WRITE));
		/* operations behind it, and beyond the bounds */
		value = 1000 + (uint64_t)round;
		POST(&side, fi_write(side.ep, &value, 8, NULL, side.peer, at(16), key, &value));
		wait_one(FI_RMA | FI_WRITE, &value);
		contains(16, &value, 8);
		POST(&side, fi_read(side.ep, back, 16, NULL, side.peer, at(SIZE - 8), key, back));
		POST(&side, fi_write(side.ep, &value, 8, NULL, side.peer, at(24), key, &value));
		int failed = 0, succeeded = 0;
		UNTIL(failed + succeeded == 2, ({
			      struct fi_cq_tagged_entry entry;
			      ssize_t got = fi_cq_read(side.tx, &entry, 1);
			      if (got == -FI_EAVAIL) {
				      MUST(fi_cq_readerr(side.tx, &error, 0));
				      if (error.op_context != back)
					      die("another operation fails: %s", fi_strerror(error.err));
				      IS(error.err == FI_EACCES || error.err == FI_EKEYREJECTED);
				      failed++;
			      } else if (got == 1) {
				      IS(entry.op_context == &value);
				      succeeded++;
			      }
			      (void)0;
		      }));
		IS(failed == 1 && succeeded == 1);
		contains(24, &value, 8);
	}
}

static void order(void)
{
	static uint64_t values[2000];
	const uint64_t count = told(DATA_WORD + 1);

	for (uint64_t i = 0; i < count; i++) {
		values[i] = i + 1;
		UNTIL(told(DATA_WORD + 2) + 60 > i, progress(&side));
		POST(&side, fi_inject_write(side.ep, &values[i], 8, side.peer, at(4096 * (i % 64)), told(REMOTE_KEY)));
		uint64_t sent = i;
		POST(&side, fi_tinject(side.ep, &sent, 8, side.peer, i));
	}
	UNTIL(told(DATA_WORD + 2) == count, progress(&side));
}

/* A fenced write of 8 bytes. */
static void fenced_write(uint64_t *value)
{
	struct iovec iov = { value, 8 };
	struct fi_rma_iov range = { at(64), 8, told(REMOTE_KEY) };
	struct fi_msg_rma msg = { .msg_iov = &iov, .iov_count = 1, .addr = side.peer, .rma_iov = &range, .rma_iov_count = 1 };

	POST(&side, fi_writemsg(side.ep, &msg, FI_FENCE | FI_COMPLETION));
}

static void fence(void)
{
	const uint64_t count = told(DATA_WORD + 5);

	for (uint64_t round = 0; round < count; round++) {
		uint64_t value = round, key = told(REMOTE_KEY);
		struct iovec iov = { &value, 8 };
		struct fi_msg_tagged msg = { .msg_iov = &iov, .iov_count = 1, .addr = side.peer, .tag = 0 };
		struct iovec halves[2] = { { local, PARTS_LENGTH / 2 }, { local + SIZE / 2, PARTS_LENGTH / 2 } };

		/* a fenced message waits for a write whose remote CQ data is a packet of its own */
		POST(&side, fi_writedata(side.ep, &value, 8, NULL, round, side.peer, at(0), key, NULL));
		POST(&side, fi_tsendmsg(side.ep, &msg, FI_FENCE | FI_COMPLETION));
		/* a fenced write does too, and a message is behind it */
		POST(&side, fi_writedata(side.ep, &value, 8, NULL, round, side.peer, at(0), key, NULL));
		fenced_write(&value);
		POST(&side, fi_tsend(side.ep, &value, 8, NULL, side.peer, 1, NULL));
		/* the same behind a long message */
		memset(local, (int)round, SIZE);
		POST(&side, fi_tsendv(side.ep, halves, NULL, 2, side.peer, 3, NULL));
		fenced_write(&value);
		POST(&side, fi_tsend(side.ep, &value, 8, NULL, side.peer, 2, NULL));
		for (int entries = 0; entries < 8; entries++)
			next(&side, side.tx);
		UNTIL(told(DATA_WORD + 6) == round + 1, progress(&side));
	}
}

int main(int count, char **arguments)
{
	if (count != 6)
		die("usage: rdm_writes WHAT PROV NODE MODE PROGRESS");
	const char *what = arguments[1];
	provider = arguments[2];
	node = arguments[3];
	mode = arguments[4];
	progress_mode = arguments[5];
	alarm(100);
	make_board();
	if (!strcmp(what, "data"))
		put(DATA_WORD, 300);
	if (!strcmp(what, "order"))
		put(DATA_WORD + 1, 1500);
	if (!strcmp(what, "fence"))
		put(DATA_WORD + 5, 50);
	if (!strcmp(what, "inject"))
		put(DATA_WORD + 3, 1);
	pid_t target = start("target", be_target, 0);

	open_rma(&side, 0);
	side.peer = address(&side, 1);
	UNTIL(told(READY), pause_ms(1));
	if (!strcmp(what, "forms")) {
		forms();
	} else if (!strcmp(what, "data")) {
		data();
	} else if (!strcmp(what, "wrong")) {
		wrong();
	} else if (!strcmp(what, "order")) {
		order();
	} else if (!strcmp(what, "fence")) {
		fence();
	} else if (!strcmp(what, "inject")) {
		uint64_t value = 0x5151515151515151;

		MUST(fi_inject_write(side.ep, &value, 8, side.peer, at(64), told(REMOTE_KEY)));
		UNTIL(told(DATA_WORD + 4), pause_ms(1));
	} else {
		die("no such test: %s", what);
	}
	put(DONE, 1);
	int status;
	UNTIL(waitpid(target, &status, WNOHANG) == target, progress(&side));
	if (!WIFEXITED(status) || WEXITSTATUS(status))
		die("the target has ended with %x", status);
	close_side(&side);
	return 0;
}
