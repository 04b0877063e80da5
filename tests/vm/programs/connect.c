/* connect: the time from opening an endpoint to its FI_CONNECTED, on a domain, queues and registered
 * memory that are there; with the buffers' receives posted. The output has the format of bench, with
 * 0 bytes. */
#include "peer.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static int by_value(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;
	return (x > y) - (x < y);
}

int test_connect(const struct options *opt)
{
	enum { WARM = 3 };
	struct peer p;
	double *times = calloc((size_t)opt->iterations + 1, sizeof *times);

	peer_open(&p, opt);
	if (opt->server)
		peer_listen(&p);
	for (int i = -WARM; i < opt->iterations; i++) {
		if (opt->server) {
			peer_accept(&p);
			peer_wait_shutdown(&p);
		} else {
			double time = peer_dial(&p);
			if (i >= 0)
				times[i] = time;
			check("fi_shutdown", fi_shutdown(p.ep, 0));
		}
		peer_close_ep(&p);
		/* the server closes its endpoint, and waits for the next request */
		if (!opt->server)
			usleep(20000);
	}
	if (!opt->server) {
		/* the first quartile, as in bench */
		qsort(times, (size_t)opt->iterations, sizeof *times, by_value);
		printf("bench connect 0 %.3f\n", times[opt->iterations / 4] * 1e6);
	}
	peer_close(&p);
	free(times);
	return 0;
}
