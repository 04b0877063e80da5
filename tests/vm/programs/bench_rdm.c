/* bench_rdm: the measurements of bench for endpoints with many peers, on any provider: half round
 * trips of tagged messages, one of 16 messages under way, and completions of RMA reads and writes,
 * per size. Writes have FI_DELIVERY_COMPLETE: without it `tcp` completes a write when it has copied
 * its bytes. The lines and the figure (the first quartile) are those of bench.c.
 *
 *   bench_rdm [-s] PROVIDER NODE SERVICE PEER PEER-SERVICE ITERATIONS BYTES
 *
 * Both sides run it, one with -s; the other one measures. */
#define _GNU_SOURCE
#define SECONDS 60
#include "../../conformance/c/rdm_side.h"

#include <sched.h>

enum { WINDOW = 16 };
enum { PING = 1, STREAM = 2, KEYS = 3, NEXT = 4 };

static const size_t sizes[] = { 8, 64, 512, 4096, 32768, 262144, 1048576 };
static struct side side;
static struct fid_mr *mr;
static uint8_t *out, *in, *area; /* of the largest size each; peers access the area */
static size_t largest;
static uint64_t sent, received, outstanding_in;
static struct keys {
	uint64_t addr, key;
} theirs;

static bool poll_one(struct fid_cq *cq)
{
	struct fi_cq_tagged_entry entry;
	struct fi_cq_err_entry error = { 0 };
	ssize_t got = fi_cq_read(cq, &entry, 1);

	if (got == -FI_EAGAIN)
		return false;
	if (got == -FI_EAVAIL) {
		MUST(fi_cq_readerr(cq, &error, 0));
		die("%s: error %d (%s)", cq == side.tx ? "transmit" : "receive", error.err, fi_strerror(error.err));
	}
	MUST(got);
	if (cq == side.tx)
		sent++;
	else
		received++;
	return true;
}

static void progress(struct side *unused)
{
	(void)unused;
	bool some = poll_one(side.tx);

	if (!(poll_one(side.rx) | some))
		sched_yield();
}

static void receive(size_t len, uint64_t tag)
{
	POST(&side, fi_trecv(side.ep, in, len, fi_mr_desc(mr), side.peer, tag, 0, NULL));
	outstanding_in++;
}

static void message(size_t len, uint64_t tag)
{
	POST(&side, fi_tsend(side.ep, out, len, fi_mr_desc(mr), side.peer, tag, NULL));
}

static void until_sent(uint64_t count) { UNTIL_WITHIN(SECONDS, sent >= count, progress(&side)); }
static void until_received(void) { UNTIL_WITHIN(SECONDS, received == outstanding_in, progress(&side)); }

/* A message each way; the one of the side that measures goes first. */
static void exchange(bool server, size_t len, uint64_t tag)
{
	uint64_t before = sent;

	receive(len, tag);
	if (server)
		until_received();
	message(len, tag);
	until_sent(before + 1);
	until_received();
}

/* WINDOW messages one way, and an answer. */
static void stream(bool server, size_t len)
{
	uint64_t before = sent;

	if (server) {
		for (int i = 0; i < WINDOW; i++)
			receive(len, STREAM);
		until_received();
		message(1, STREAM);
		until_sent(before + 1);
		return;
	}
	receive(1, STREAM);
	for (int i = 0; i < WINDOW; i++)
		message(len, STREAM);
	until_sent(before + WINDOW);
	until_received();
}

static void one_sided(bool read, size_t len)
{
	uint64_t before = sent;

	void *desc = fi_mr_desc(mr);
	struct iovec local = { out, len };
	struct fi_rma_iov remote = { theirs.addr, len, theirs.key };
	struct fi_msg_rma write = { .msg_iov = &local, .desc = &desc, .iov_count = 1, .addr = side.peer, .rma_iov = &remote, .rma_iov_count = 1 };

	if (read)
		POST(&side, fi_read(side.ep, in, len, desc, side.peer, theirs.addr, theirs.key, NULL));
	else
		POST(&side, fi_writemsg(side.ep, &write, FI_COMPLETION | FI_DELIVERY_COMPLETE));
	until_sent(before + 1);
}

static int by_value(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;
	return (x > y) - (x < y);
}

enum what { MESSAGE, STREAMED, WRITTEN, READ, ALL };
static const char *const names[] = { "message", "stream", "write", "read" };

/* Two rounds to warm up, and `n` that count. */
static void measure(bool server, enum what what, size_t len, double *times, int n)
{
	for (int i = -2; i < n; i++) {
		double start = now();

		if (what == MESSAGE)
			exchange(server, len, PING);
		else if (what == STREAMED)
			stream(server, len);
		else
			one_sided(what == READ, len);
		if (i >= 0)
			times[i] = (now() - start) / (what == MESSAGE ? 2 : what == STREAMED ? WINDOW : 1);
	}
	qsort(times, (size_t)n, sizeof *times, by_value);
	if (!server)
		printf("bench %s %zu %.3f\n", names[what], len, times[n / 4] * 1e6);
}

static void open_all(const char *peer, const char *service)
{
	size_t len = 3 * largest;

	wanted.caps = FI_MSG | FI_TAGGED | FI_RMA;
	wanted.mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
	open_domain_of(&side);
	printf("provider %s domain %s\n", side.info->fabric_attr->prov_name, side.info->domain_attr->name);
	side.tx = queue(&side, 4 * WINDOW);
	side.rx = queue(&side, 4 * WINDOW);
	side.ep = endpoint_on(&side, 0);
	IS(fi_av_insertsvc(side.av, peer, service, &side.peer, 0, NULL) == 1);
	if (posix_memalign((void **)&out, 4096, len))
		die("no memory");
	memset(out, 1, len);
	in = out + largest;
	area = in + largest;
	MUST(fi_mr_reg(side.domain, out, len, FI_SEND | FI_RECV | FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE, 0, 0, 0, &mr, NULL));
	if (side.info->domain_attr->mr_mode & FI_MR_ENDPOINT) {
		MUST(fi_mr_bind(mr, &side.ep->fid, 0));
		MUST(fi_mr_enable(mr));
	}
}

int main(int argc, char **argv)
{
	bool server = argc > 1 && !strcmp(argv[1], "-s");

	if (argc - server != 8) {
		fprintf(stderr, "usage: bench_rdm [-s] PROVIDER NODE SERVICE PEER PEER-SERVICE ITERATIONS BYTES\n");
		return 2;
	}
	setvbuf(stdout, NULL, _IOLBF, 0);
	argv += server + 1;
	provider = argv[0];
	role = node = argv[1];
	wanted.service = argv[2];
	int iterations = atoi(argv[5]);
	size_t limit = strtoul(argv[6], NULL, 0);
	double *times = calloc((size_t)iterations + 1, sizeof *times);

	largest = limit < 4096 ? 4096 : limit;
	open_all(argv[3], argv[4]);
	*(struct keys *)out = (struct keys){ (side.info->domain_attr->mr_mode & FI_MR_VIRT_ADDR) ? (uintptr_t)area : 2 * largest, fi_mr_key(mr) };
	exchange(server, sizeof theirs, KEYS);
	theirs = *(struct keys *)in;
	for (size_t k = 0; k < sizeof sizes / sizeof *sizes && sizes[k] <= limit; k++) {
		/* a large transfer takes long on an emulated CPU */
		int n = sizes[k] > 4096 ? (iterations + 3) / 4 : iterations;

		for (enum what what = MESSAGE; what < (server ? WRITTEN : ALL); what++)
			measure(server, what, sizes[k], times, n);
		/* the server progresses in this receive while the other side does RMA */
		exchange(server, 1, NEXT);
	}
	MUST(fi_close(&side.ep->fid));
	side.ep = NULL;
	MUST(fi_close(&mr->fid));
	close_side(&side);
	free(times);
	free(out);
	return 0;
}
