/* survive: the events and completions of one side when the other vanishes without notice (killed,
 * cable pulled, device removed).
 *
 * The client is the survivor. Three modes, since the loss is detected by different means:
 *   -m send    sends without pause: the device's retries end in an error
 *   -m write   the same with RMA writes
 *   -m recv    only waits for the peer's messages: has no retries, only a heartbeat detects it
 * It passes when FI_SHUTDOWN came and every posted operation completed within the limit (-T) after
 * the last successful completion, at least one of them in error.
 *
 * watch: prints events and completions as they come, with times, until FI_SHUTDOWN or the limit. */
#include "peer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

extern const char *survive_mode;

struct tally {
	double last_good, first_error, shutdown, drained;
	uint64_t good, bad, in_flight;
	int first_errno;
};

static void count(struct tally *t, const struct done *d)
{
	t->in_flight--;
	if (d->err) {
		if (!t->bad++) {
			t->first_error = now();
			t->first_errno = d->err;
		}
	} else {
		t->good++;
		t->last_good = now();
	}
}

static void post_send(struct peer *p, struct tally *t, int write)
{
	long ret = write ? fi_write(p->ep, peer_rma_area(p), 4096, fi_mr_desc(p->mr), 0, p->remote_addr, p->remote_key, NULL)
			 : fi_send(p->ep, peer_tx_area(p), 4096, fi_mr_desc(p->mr), 0, NULL);
	if (ret == 0)
		t->in_flight++;
	else if (ret != -FI_EAGAIN && !t->bad && !t->shutdown)
		fail("post", ret);
}

/* The victim: receives all messages; in recv mode it also sends one message every 20 ms. */
static int victim(struct peer *p)
{
	int sends = !strcmp(survive_mode, "recv");
	const char *told = NULL;
	double next = now(), give_up = now() + p->opt->seconds;
	struct done d;
	uint32_t event;
	int err;
	while (now() < give_up) {
		if (cq_poll(p->rx, &d)) {
			if (d.err) {
				told = "an error completion";
				break;
			}
			peer_post_rx(p, (int)(((char *)d.context - p->buf) / (ptrdiff_t)p->size));
		}
		if (sends && now() > next) {
			peer_send(p, 4096);
			next = now() + 0.02;
		}
		if (eq_poll(p->eq, &event, &err)) {
			told = event == FI_SHUTDOWN ? "FI_SHUTDOWN" : "an event";
			break;
		}
	}
	printf(told ? "victim: told by %s\n" : "victim: told nothing%s\n", told ? told : "");
	return 0;
}

static int survivor(struct peer *p)
{
	int recv_only = !strcmp(survive_mode, "recv"), write = !strcmp(survive_mode, "write");
	struct tally tx = {.last_good = now()}, rx = {.last_good = now(), .in_flight = DEPTH};
	double limit = p->opt->seconds, start = now();
	uint32_t event;
	int err;
	struct done d;
	for (;;) {
		int over = tx.bad || rx.bad || tx.shutdown;
		if (!recv_only && !over)
			while (tx.in_flight < DEPTH / 2) {
				uint64_t before = tx.in_flight;
				post_send(p, &tx, write);
				if (tx.in_flight == before)
					break;
			}
		while (cq_poll(p->tx, &d))
			count(&tx, &d);
		while (cq_poll(p->rx, &d)) {
			count(&rx, &d);
			if (!d.err) {
				peer_post_rx(p, (int)(((char *)d.context - p->buf) / (ptrdiff_t)p->size));
				rx.in_flight++;
			}
		}
		if (!tx.shutdown && eq_poll(p->eq, &event, &err)) {
			printf("event %u error %d\n", event, err);
			if (event == FI_SHUTDOWN)
				tx.shutdown = now();
		}
		if (tx.shutdown && !tx.in_flight && !rx.in_flight) {
			tx.drained = now();
			break;
		}
		double last = tx.last_good > rx.last_good ? tx.last_good : rx.last_good;
		if (now() - last > limit + 5 || now() - start > 120)
			break;
	}
	double t0 = tx.last_good > rx.last_good ? tx.last_good : rx.last_good;
	double error = tx.bad ? tx.first_error : rx.first_error;
	printf("mode %s: %llu good operations\n", survive_mode, (unsigned long long)(recv_only ? rx.good : tx.good));
	printf("first error completion after %.2f s (errno %d), FI_SHUTDOWN after %.2f s, all completed after %.2f s, "
	       "%llu sends and %llu receives left, %llu errors\n",
	       error ? error - t0 : -1, tx.bad ? tx.first_errno : rx.first_errno, tx.shutdown ? tx.shutdown - t0 : -1,
	       tx.drained ? tx.drained - t0 : -1, (unsigned long long)tx.in_flight, (unsigned long long)rx.in_flight,
	       (unsigned long long)(tx.bad + rx.bad));
	int ok = (recv_only ? rx.good : tx.good) > 0 && tx.bad + rx.bad > 0 && error - t0 <= limit && tx.shutdown &&
		 tx.shutdown - t0 <= limit && tx.drained && tx.drained - t0 <= limit;
	printf("survive: %s\n", ok ? "ok" : "NOT NOTIFIED IN TIME");
	return ok ? 0 : 1;
}

int test_survive(const struct options *opt)
{
	struct peer p;
	peer_open(&p, opt);
	peer_connect(&p);
	printf("connected\n");
	fflush(stdout);
	int status = opt->server ? victim(&p) : survivor(&p);
	peer_close(&p);
	return status;
}

int test_watch(const struct options *opt)
{
	struct peer p;
	struct done d;
	uint32_t event;
	int err, seen = 0, rx_errors = 0;
	peer_open(&p, opt);
	peer_connect(&p);
	printf("connected\n");
	fflush(stdout);
	double start = now();
	while (now() - start < opt->seconds && !(seen && rx_errors == DEPTH)) {
		if (cq_poll(p.rx, &d) && d.err) {
			if (!rx_errors++)
				printf("completion error %d after %.2f s\n", d.err, now() - start);
		}
		if (eq_poll(p.eq, &event, &err)) {
			printf("event %u error %d after %.2f s\n", event, err, now() - start);
			if (event == FI_SHUTDOWN)
				seen = 1;
		}
		fflush(stdout);
		usleep(1000);
	}
	printf("watch: %s, %d of %d receives in error\n", seen ? "FI_SHUTDOWN seen" : "no FI_SHUTDOWN", rx_errors, DEPTH);
	fflush(stdout);
	peer_close(&p);
	return seen && rx_errors == DEPTH ? 0 : 1;
}
