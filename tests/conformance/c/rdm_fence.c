/* rdm_fence: a message that no receive matches yet, then a message with FI_FENCE to the same endpoint.
 *
 *   rdm_fence MODE PROVIDER NODE
 *
 *   self   an endpoint sends to itself
 *   pair   two endpoints of a process
 *   peer   two processes
 *
 * fi_msg(3): the fenced operation is "deferred until all previous operations targeting the same peer
 * endpoint have completed"; fi_cq(3): its completion means that prior operations have met its
 * completion level. So when the fenced message completes, the first one must have completed, and its
 * buffer may be used again: here it is overwritten then, and what is received is compared.
 *
 * An entry of one endpoint says nothing of entries that another endpoint has written to the same queue
 * (fi_cq(3)): so when the fenced message was received, the queue is read until it is empty, and the
 * first one must be there by then. */
#define _GNU_SOURCE
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_tagged.h>

#define CHECK(call) do { long rc_ = (call); if (rc_ < 0) { fprintf(stderr, "%s: %s\n", #call, fi_strerror((int)-rc_)); exit(2); } } while (0)

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec / 1e9;
}

static struct fid_ep *ep[2];
static struct fid_cq *cq;
static fi_addr_t addr[2];
static char a_ctx, b_ctx, ra_ctx, rb_ctx;
static bool a_done, b_done, ra_done, rb_done;

/* reads one entry; false: there was none */
static bool progress(void)
{
	struct fi_cq_tagged_entry e;
	ssize_t rc = fi_cq_read(cq, &e, 1);

	if (rc == -FI_EAGAIN)
		return false;
	if (rc < 0) {
		struct fi_cq_err_entry x = { 0 };

		fi_cq_readerr(cq, &x, 0);
		fprintf(stderr, "error entry: %s\n", fi_strerror(x.err));
		exit(2);
	}
	a_done |= e.op_context == &a_ctx;
	b_done |= e.op_context == &b_ctx;
	ra_done |= e.op_context == &ra_ctx;
	rb_done |= e.op_context == &rb_ctx;
	return true;
}

static int run(const char *mode, const char *provider, const char *node, size_t size, uint64_t lv)
{
	const char *xrc = getenv("WEFT_TEST_XRC");
	size_t len;
	struct fi_info *hints = fi_allocinfo(), *info;
	struct fid_fabric *fabric;
	struct fid_domain *domain;
	struct fid_av *av;
	int to_child[2], to_parent[2], nep = !strcmp(mode, "pair") ? 2 : 1, to = !strcmp(mode, "self") ? 0 : 1;
	bool peer = !strcmp(mode, "peer"), child = false;
	uint8_t name[2][64];
	pid_t pid = 0;

	if (pipe(to_child) || pipe(to_parent))
		return 2;
	if (peer) {
		pid = fork();
		child = !pid;
	}
	hints->caps = FI_MSG | FI_TAGGED | FI_FENCE;
	hints->ep_attr->type = FI_EP_RDM;
	if (xrc && !strcmp(xrc, "1"))
		hints->ep_attr->protocol = FI_PROTO_RDMA_CM_IB_XRC;
	hints->fabric_attr->prov_name = strdup(provider);
	CHECK(fi_getinfo(FI_VERSION(1, 17), node, NULL, FI_SOURCE, hints, &info));
	if (strcmp(info->fabric_attr->prov_name, provider))
		return 2;
	CHECK(fi_fabric(info->fabric_attr, &fabric, NULL));
	CHECK(fi_domain(fabric, info, &domain, NULL));
	struct fi_cq_attr ca = { .format = FI_CQ_FORMAT_TAGGED };
	struct fi_av_attr aa = { .type = info->domain_attr->av_type };

	CHECK(fi_cq_open(domain, &ca, &cq, NULL));
	CHECK(fi_av_open(domain, &aa, &av, NULL));
	for (int i = 0; i < nep; i++) {
		CHECK(fi_endpoint(domain, info, &ep[i], NULL));
		CHECK(fi_ep_bind(ep[i], &cq->fid, FI_TRANSMIT | FI_RECV));
		CHECK(fi_ep_bind(ep[i], &av->fid, 0));
		CHECK(fi_enable(ep[i]));
		len = sizeof name[i];
		CHECK(fi_getname(&ep[i]->fid, name[i], &len));
	}
	if (peer) {
		if (write(child ? to_parent[1] : to_child[1], name[0], 64) != 64 || read(child ? to_child[0] : to_parent[0], name[1], 64) != 64)
			return 2;
	}
	for (int i = 0; i < (peer ? 2 : nep); i++)
		if (fi_av_insert(av, name[i], 1, &addr[i], 0, NULL) != 1)
			return 2;
	struct fid_ep *rx = peer ? ep[0] : ep[to];
	uint8_t *a = malloc(size), *b = malloc(8), *ra = malloc(size), *rb = malloc(8);
	bool early = false, corrupt = false, rb_early = false;

	memset(a, 1, size);
	memset(b, 2, 8);
	memset(ra, 0, size);
	if (!peer || child)
		CHECK(fi_trecv(rx, rb, 8, NULL, FI_ADDR_UNSPEC, 2, 0, &rb_ctx));
	if (!child) {
		struct iovec iov = { b, 8 };
		struct fi_msg_tagged m = { .msg_iov = &iov, .iov_count = 1, .addr = addr[to], .tag = 2, .context = &b_ctx };

		CHECK(fi_tsend(ep[0], a, size, NULL, addr[to], 1, &a_ctx));
		CHECK(fi_tsendmsg(ep[0], &m, FI_FENCE | FI_COMPLETION | lv));
	}
	/* for half a second there is no receive for the first message */
	for (double end = now() + 0.5; now() < end;) {
		progress();
		if (!child && b_done && !a_done) {
			early = true;
			memset(a, 9, size);
		}
		if (rb_done && !a_done && !child && !peer) {
			while (progress())
				;
			rb_early |= !a_done;
		}
	}
	if (!peer || child) {
		CHECK(fi_trecv(rx, ra, size, NULL, FI_ADDR_UNSPEC, 1, 0, &ra_ctx));
		for (double end = now() + 5; now() < end && !(ra_done && rb_done);)
			progress();
		if (!ra_done || !rb_done) {
			fprintf(stderr, "not received\n");
			return 2;
		}
		for (size_t i = 0; i < size; i++)
			corrupt |= ra[i] != 1;
	}
	if (!child)
		for (double end = now() + 5; now() < end && !(a_done && b_done);)
			progress();
	if (child) {
		uint8_t c = corrupt;

		if (write(to_parent[1], &c, 1) != 1 || read(to_child[0], &c, 1) != 1)
			return 2;
	} else if (peer) {
		uint8_t c;

		if (read(to_parent[0], &c, 1) != 1 || write(to_child[1], &c, 1) != 1)
			return 2;
		corrupt = c;
	}
	for (int i = 0; i < nep; i++)
		CHECK(fi_close(&ep[i]->fid));
	CHECK(fi_close(&cq->fid));
	CHECK(fi_close(&av->fid));
	CHECK(fi_close(&domain->fid));
	CHECK(fi_close(&fabric->fid));
	if (child)
		_exit(0);
	if (peer)
		waitpid(pid, NULL, 0);
	if (!a_done || !b_done) {
		fprintf(stderr, "the sends did not complete\n");
		return 1;
	}
	if (early || rb_early || corrupt) {
		fprintf(stderr, "%zu bytes: the fenced send%s%s%s\n", size, early ? " completed before the one before it" : "",
			rb_early ? " was received before the one before it had completed" : "",
			corrupt ? ", and the reused buffer was received" : "");
		return 1;
	}
	return 0;
}

int main(int argc, char **argv)
{
	const uint64_t levels[] = { FI_INJECT_COMPLETE, FI_TRANSMIT_COMPLETE, FI_DELIVERY_COMPLETE };
	const size_t sizes[] = { 100, 20000, 300000 };

	if (argc != 4) {
		fprintf(stderr, "usage: rdm_fence MODE PROVIDER NODE\n");
		return 2;
	}
	for (int i = 0; i < 3; i++) {
		/* one process for each: libfabric is not used before a fork */
		pid_t child = fork();
		int status;

		if (!child)
			_exit(run(argv[1], argv[2], argv[3], sizes[i], levels[i]));
		if (waitpid(child, &status, 0) != child || status) {
			fprintf(stderr, "%s, %zu bytes: status %#x\n", argv[1], sizes[i], (unsigned)status);
			return 1;
		}
	}
	printf("rdm_fence: ok\n");
	return 0;
}
