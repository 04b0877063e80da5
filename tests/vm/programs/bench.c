/* bench: half round trips of messages, and completions of RMA writes and reads, per size, in
 * microseconds. One line per figure: `bench OPERATION SIZE MICROSECONDS`. The figure is the first
 * quartile of the iterations: two busy programs and the device share one or two emulated CPUs, so
 * the schedulers determine the slower half. */
#include "peer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int by_value(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;
	return (x > y) - (x < y);
}

static void report(const char *op, size_t size, double *times, int n)
{
	qsort(times, (size_t)n, sizeof *times, by_value);
	printf("bench %s %zu %.3f\n", op, size, times[n / 4] * 1e6);
}

static void ping(struct peer *p, size_t len)
{
	peer_send(p, len);
	peer_post_rx(p, peer_recv(p, len));
}

static void pong(struct peer *p, size_t len)
{
	peer_post_rx(p, peer_recv(p, len));
	peer_send(p, len);
}

static const size_t sizes[] = {8, 64, 512, 4096, 32768, 262144, 1048576};

int test_bench(const struct options *opt)
{
	struct peer p;
	double *times = calloc((size_t)opt->iterations, sizeof *times);
	peer_open(&p, opt);
	peer_connect(&p);
	for (size_t k = 0; k < sizeof sizes / sizeof *sizes && sizes[k] <= opt->size; k++) {
		size_t len = sizes[k];
		/* a large transfer takes long on an emulated CPU */
		int n = len > 4096 ? (opt->iterations + 3) / 4 : opt->iterations;
		for (int i = -2; i < n; i++) {
			double start = now();
			if (opt->server)
				pong(&p, len);
			else
				ping(&p, len);
			if (i >= 0)
				times[i] = (now() - start) / 2;
		}
		if (!opt->server)
			report("message", len, times, n);
		for (int read = 0; read < 2 && !opt->server; read++) {
			for (int i = -2; i < n; i++) {
				double start = now();
				if (read)
					peer_read(&p, len);
				else
					peer_write(&p, len);
				if (i >= 0)
					times[i] = now() - start;
			}
			report(read ? "read" : "write", len, times, n);
		}
		/* the server waits in a receive while the client does RMA */
		if (opt->server)
			pong(&p, 1);
		else
			ping(&p, 1);
	}
	peer_shutdown_pair(&p);
	peer_close(&p);
	free(times);
	return 0;
}
