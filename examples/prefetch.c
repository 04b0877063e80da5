/* Prefetching the pages of an on-demand region by advice.
 *
 *   prefetch [NODE [MIB]]
 *
 * Registers memory without pages, advises the device to fetch the pages of the first half, and
 * measures the first write to each page of either half. The exit status is 77 if the device has no
 * on-demand paging. */
#define _GNU_SOURCE
#include "example.h"

#include <sys/mman.h>
#include <time.h>

#define PAGE 4096UL

static double now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

/* Number of resident pages of a range. */
static size_t resident(char *at, size_t len)
{
	unsigned char *there = malloc(len / PAGE);
	size_t count = 0;

	if (mincore(at, len, there))
		exit(1);
	for (size_t i = 0; i < len / PAGE; i++)
		count += there[i] & 1;
	free(there);
	return count;
}

/* Writes to each page of a range. Returns the mean time per page in nanoseconds. */
static double touch(char *at, size_t len)
{
	double start = now();

	for (size_t i = 0; i < len; i += PAGE)
		((volatile char *)at)[i] = 1;
	return (now() - start) / (double)(len / PAGE);
}

int main(int argc, char **argv)
{
	const char *node = argc > 1 ? argv[1] : "127.0.0.1";
	size_t half = (argc > 2 ? strtoul(argv[2], NULL, 0) : 32) << 19;
	struct weft_mr_range range;
	struct end end = {0};
	struct fid_mr *mr;
	double start, registered, advised;
	size_t first, second;
	/* without FI_MR_ALLOCATED: the device maps pages at their first use */
	int mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_PROV_KEY;
	char *memory = mmap(NULL, 2 * half, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (memory == MAP_FAILED)
		return 1;
	madvise(memory, 2 * half, MADV_NOHUGEPAGE); /* so that all pages have 4 KiB */
	open_domain(&end, get_info(node, FI_SOURCE, mr_mode));
	if (!WEFT_HAS_OP(end.ops, advise))
		return 77;
	start = now();
	MUST(fi_mr_reg(end.domain, memory, 2 * half, FI_RECV | FI_REMOTE_WRITE, 0, 1, 0, &mr, NULL));
	registered = now() - start;
	if (resident(memory, 2 * half)) {
		fprintf(stderr, "pages are there before anybody used them\n");
		return 1;
	}
	range.mr = mr;
	range.addr = (uint64_t)(uintptr_t)memory;
	range.len = half;
	start = now();
	MUST(end.ops->advise(end.domain, WEFT_ADVISE_PREFETCH_WRITE, WEFT_ADVISE_FLUSH, &range, 1));
	advised = now() - start;
	first = resident(memory, half);
	second = resident(memory + half, half);
	printf("registered %zu MiB in %.0f us, fetched %zu pages in %.0f us, %zu of the others\n", half >> 19,
	       registered / 1e3, first, advised / 1e3, second);
	printf("first touch of a page: %.0f ns fetched, %.0f ns not\n", touch(memory, half), touch(memory + half, half));
	if (first != half / PAGE || second != 0) {
		fprintf(stderr, "these are not the pages that were asked for\n");
		return 1;
	}
	MUST(fi_close(&mr->fid));
	close_domain(&end);
	munmap(memory, 2 * half);
	return 0;
}
