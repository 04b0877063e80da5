/* count: calls of the client in functions count_NAME, for callgrind, which counts their
 * instructions (tests/vm/bench --test count). Between a post and the call that reads its completion
 * the program sleeps (-T), so that one call of fi_cq_read suffices; a completion that is late ends
 * it with status 3, because the calls that find nothing would count. Callgrind instruments the
 * program from the first counted call on (--instr-atstart=no): libfabric's start is most of a run.
 * Prints `calls N`. */
#include "peer.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define COUNTED __attribute__((noinline, noclone))
enum { LEN = 64, LATE = 3 };

/* Valgrind's client request VG_USERREQ__START_INSTRUMENTATION of its tool callgrind, by the
 * sequence that Valgrind's headers define for amd64; a processor executes it as no operation. */
static void start_instrumentation(void)
{
	enum { TOOL = 'C' << 24 | 'T' << 16, START = TOOL + 4 };
	volatile uint64_t request[6] = { START };
	uint64_t result = 0;

	__asm__ volatile("rolq $3, %%rdi; rolq $13, %%rdi; rolq $61, %%rdi; rolq $51, %%rdi; xchgq %%rbx, %%rbx"
			 : "+d"(result)
			 : "a"(request)
			 : "cc", "memory");
}

static void one(struct fid_cq *cq)
{
	struct fi_cq_msg_entry entry;
	ssize_t got = fi_cq_read(cq, &entry, 1);

	if (got == -FI_EAGAIN) {
		printf("late\n");
		exit(LATE);
	}
	if (got != 1)
		fail("fi_cq_read", got);
}

COUNTED void count_recv(struct peer *p, int slot) { peer_post_rx(p, slot); }
COUNTED void count_recv_done(struct peer *p) { one(p->rx); }
COUNTED void count_send(struct peer *p) { check("fi_send", fi_send(p->ep, peer_tx_area(p), LEN, fi_mr_desc(p->mr), 0, NULL)); }
COUNTED void count_send_done(struct peer *p) { one(p->tx); }
COUNTED void count_write(struct peer *p)
{
	check("fi_write", fi_write(p->ep, peer_rma_area(p), LEN, fi_mr_desc(p->mr), 0, p->remote_addr, p->remote_key, NULL));
}
COUNTED void count_write_done(struct peer *p) { one(p->tx); }
COUNTED void count_read(struct peer *p)
{
	check("fi_read", fi_read(p->ep, peer_rma_area(p), LEN, fi_mr_desc(p->mr), 0, p->remote_addr, p->remote_key, NULL));
}
COUNTED void count_read_done(struct peer *p) { one(p->tx); }
COUNTED ssize_t count_poll(struct fid_cq *cq)
{
	struct fi_cq_msg_entry entry;

	return fi_cq_read(cq, &entry, 1);
}

int test_count(const struct options *opt)
{
	struct peer p;
	const useconds_t pause = opt->seconds * 1e6;

	peer_open(&p, opt);
	peer_connect(&p);
	start_instrumentation();
	for (int i = 0; i < opt->iterations; i++) {
		if (opt->server) {
			peer_post_rx(&p, peer_recv(&p, LEN));
			peer_send(&p, LEN);
			continue;
		}
		count_send(&p);
		usleep(pause);
		count_send_done(&p);
		count_recv_done(&p);
		/* receives are consumed in their order, behind the one of the connection */
		count_recv(&p, (i + 1) % DEPTH);
		count_write(&p);
		usleep(pause);
		count_write_done(&p);
		count_read(&p);
		usleep(pause);
		count_read_done(&p);
		if (count_poll(p.rx) != -FI_EAGAIN)
			fail("a completion of an empty queue", 0);
	}
	printf("calls %d\n", opt->iterations);
	peer_shutdown_pair(&p);
	peer_close(&p);
	return 0;
}
