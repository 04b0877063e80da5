/* local: the time of a write from a buffer that the application did not register beforehand, beside
 * one from a registered buffer. Where the provider requires registered local buffers (FI_MR_LOCAL),
 * each operation registers and closes its buffer, which is the use of the provider's cache;
 * elsewhere it passes the buffer without a descriptor. `again`: the same buffer each time; `fresh`:
 * memory that is mapped for each write, and unmapped after it. And fi_mr_reg with fi_close without a
 * write: of the same buffer (`reg_close`), and of fresh memory, for which no cache helps
 * (`reg_fresh`). The output has the format of bench. */
#define _GNU_SOURCE
#include "peer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static const size_t sizes[] = {4096, 65536, 1048576};

static char *map(size_t len)
{
	char *pages = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (pages == MAP_FAILED)
		fail("mmap", -1);
	memset(pages, 1, len);
	return pages;
}

static void write_from(struct peer *p, char *buf, size_t len)
{
	struct fid_mr *mr = NULL;
	if (p->info->domain_attr->mr_mode & FI_MR_LOCAL)
		check("fi_mr_reg", fi_mr_reg(p->domain, buf, len, FI_WRITE, 0, 0, 0, &mr, NULL));
	check("fi_write", fi_write(p->ep, buf, len, mr ? fi_mr_desc(mr) : NULL, 0, p->remote_addr, p->remote_key, NULL));
	peer_wait_tx(p, "write");
	if (mr)
		check("close mr", fi_close(&mr->fid));
}

static void reg(struct peer *p, char *buf, size_t len)
{
	struct fid_mr *mr = NULL;
	check("fi_mr_reg", fi_mr_reg(p->domain, buf, len, FI_WRITE, 0, 7, 0, &mr, NULL));
	check("close mr", fi_close(&mr->fid));
}

enum what { REGISTERED, AGAIN, FRESH, REG, REG_FRESH, ALL };
static const char *const names[] = {"registered", "again", "fresh", "reg_close", "reg_fresh"};

static double one(struct peer *p, enum what what, char *same, size_t len)
{
	char *buf = what == FRESH || what == REG_FRESH ? map(len) : same;
	double start = now();
	switch (what) {
	case REGISTERED: peer_write(p, len); break;
	case REG:
	case REG_FRESH: reg(p, buf, len); break;
	default: write_from(p, buf, len);
	}
	double time = now() - start;
	if (buf != same)
		munmap(buf, len);
	return time;
}

static int by_value(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;
	return (x > y) - (x < y);
}

int test_local(const struct options *opt)
{
	struct peer p;
	double *times = calloc((size_t)opt->iterations, sizeof *times);
	peer_open(&p, opt);
	peer_connect(&p);
	for (size_t k = 0; k < sizeof sizes / sizeof *sizes && sizes[k] <= opt->size && !opt->server; k++) {
		char *same = map(sizes[k]);
		for (enum what what = 0; what < ALL; what++) {
			for (int i = -3; i < opt->iterations; i++) {
				double time = one(&p, what, same, sizes[k]);
				if (i >= 0)
					times[i] = time;
			}
			/* the first quartile, as in bench */
			qsort(times, (size_t)opt->iterations, sizeof *times, by_value);
			printf("bench %s %zu %.3f\n", names[what], sizes[k], times[opt->iterations / 4] * 1e6);
		}
		munmap(same, sizes[k]);
	}
	/* the server waits in a receive meanwhile */
	if (opt->server)
		peer_post_rx(&p, peer_recv(&p, 1));
	else
		peer_send(&p, 1);
	peer_shutdown_pair(&p);
	peer_close(&p);
	free(times);
	return 0;
}
