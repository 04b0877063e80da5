/* rejected: writes that the device of the server refuses, each on a connection of its own: the region
 * permits reads only. The client reads its event queue too, so the server's disconnect request can be
 * processed before the negative acknowledgement. Every write must fail with FI_EKEYREJECTED. */
#include "peer.h"

#include <stdio.h>
#include <string.h>

#define LEN 64

struct target {
	uint64_t addr, key;
};

static void serve(struct peer *p)
{
	struct fid_mr *mr = NULL;
	struct done d;
	peer_listen(p);
	for (int round = 0; round < p->opt->iterations; round++) {
		peer_accept(p);
		if (!mr)
			check("fi_mr_reg", fi_mr_reg(p->domain, peer_rma_area(p), LEN, FI_REMOTE_READ, 0, 0, 0, &mr, NULL));
		struct target *target = (struct target *)peer_tx_area(p);
		*target = (struct target){.addr = (uintptr_t)peer_rma_area(p), .key = fi_mr_key(mr)};
		check("fi_send", fi_send(p->ep, target, sizeof *target, fi_mr_desc(p->mr), 0, NULL));
		/* the refusal has moved the queue pair to its error state, perhaps before the device has
		 * processed the acknowledgement of the message */
		peer_wait_shutdown(p);
		while (!cq_poll(p->tx, &d))
			;
		peer_close_ep(p);
		for (size_t i = 0; i < LEN; i++)
			if (peer_rma_area(p)[i])
				fail("a write was executed", (long)i);
	}
	check("close mr", fi_close(&mr->fid));
}

static void write_all(struct peer *p)
{
	for (int round = 0; round < p->opt->iterations; round++) {
		struct done d;
		uint32_t event = 0;
		int err = 0, done = 0, ended = 0;
		peer_dial(p);
		int slot = peer_recv(p, sizeof(struct target));
		struct target *target = (struct target *)peer_rx_slot(p, slot);
		memset(peer_rma_area(p), 1, LEN);
		check("fi_write", fi_write(p->ep, peer_rma_area(p), LEN, fi_mr_desc(p->mr), 0, target->addr, target->key, NULL));
		for (double until = now() + 10; !done || !ended;) {
			if (now() > until)
				fail(done ? "no FI_SHUTDOWN" : "the write does not complete", -FI_ETIMEDOUT);
			if (!ended && eq_poll(p->eq, &event, &err)) {
				if (event != FI_SHUTDOWN)
					fail("expected FI_SHUTDOWN", err ? -err : (long)event);
				ended = 1;
			}
			if (!done && cq_poll(p->tx, &d)) {
				if (d.err != FI_EKEYREJECTED) {
					printf("round %d, FI_SHUTDOWN %s: error %d\n", round, ended ? "before" : "not before", d.err);
					fail("fi_write", -d.err);
				}
				printf("round %d: refused, FI_SHUTDOWN %s\n", round, ended ? "before" : "not before");
				done = 1;
			}
		}
		peer_close_ep(p);
	}
}

int test_rejected(const struct options *opt)
{
	struct peer p;
	peer_open(&p, opt);
	if (opt->server)
		serve(&p);
	else
		write_all(&p);
	peer_close(&p);
	printf("rejected: ok, %d rounds\n", opt->iterations);
	return 0;
}
