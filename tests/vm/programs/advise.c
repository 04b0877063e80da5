/* advise: every advice and flag of weft_mr_ops, on a pinned region and on invalid ranges and
 * regions; prints what each call returned. */
#define _GNU_SOURCE
#include "peer.h"

#include "../../../include/weft.h"

#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#define PAGE 4096

static const struct weft_mr_ops *ops;

static int resident(void *buf, size_t pages)
{
	unsigned char there[64];
	int count = 0;
	if (mincore(buf, pages * PAGE, there))
		fail("mincore", -1);
	for (size_t i = 0; i < pages; i++)
		count += there[i] & 1;
	return count;
}

static void say(const char *what, struct fid_domain *domain, uint32_t advice, uint32_t flags, struct fid_mr *mr, void *addr, size_t len)
{
	struct weft_mr_range range = {mr, (uintptr_t)addr, len};
	int ret = ops->advise(domain, advice, flags, &range, 1);
	printf("%s advice %u flags %u: %d %s\n", what, advice, flags, ret, ret ? fi_strerror(-ret) : "ok");
}

static char *fresh(size_t pages, int prot)
{
	char *buf = mmap(NULL, pages * PAGE, prot, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (buf == MAP_FAILED)
		fail("mmap", -1);
	return buf;
}

int test_advise(const struct options *opt)
{
	struct peer p;
	struct fid_domain *other = NULL;
	struct fid_mr *mr = NULL, *foreign = NULL;
	void *table = NULL;
	char *buf = fresh(4, PROT_READ | PROT_WRITE);
	peer_open(&p, opt);
	check("fi_domain", fi_domain(p.fabric, p.info, &p.domain, NULL));
	check("fi_domain", fi_domain(p.fabric, p.info, &other, NULL));
	check("fi_open_ops", fi_open_ops(&p.domain->fid, WEFT_MR_OPS, 0, &table, NULL));
	ops = table;
	if (!WEFT_HAS_OP(ops, advise))
		fail("advise", -FI_ENOSYS);
	check("fi_mr_reg", fi_mr_reg(p.domain, buf, 4 * PAGE, FI_SEND | FI_RECV, 0, 1, 0, &mr, NULL));
	check("fi_mr_reg", fi_mr_reg(other, buf, PAGE, FI_SEND | FI_RECV, 0, 2, 0, &foreign, NULL));
	for (uint32_t flags = 0; flags < 3; flags++)
		for (uint32_t advice = 0; advice < 4; advice++)
			say("pinned", p.domain, advice, flags, mr, buf, PAGE);
	for (uint32_t flags = 0; flags < 2; flags++) {
		say("beyond", p.domain, WEFT_ADVISE_PREFETCH, flags, mr, buf + 4 * PAGE, PAGE);
		say("foreign", p.domain, WEFT_ADVISE_PREFETCH, flags, foreign, buf, PAGE);
		printf("none flags %u: %d\n", flags, ops->advise(p.domain, WEFT_ADVISE_PREFETCH, flags, NULL, 0));
	}
	/* the region stays pinned, and the device has no count of prefetched pages */
	struct iovec iov = {buf, PAGE};
	uint64_t pages = 77;
	printf("refresh: %d\n", fi_mr_refresh(mr, &iov, 1, 0));
	if (!WEFT_HAS_OP(ops, mr_prefetched))
		fail("mr_prefetched", -FI_ENOSYS);
	printf("prefetched: %d, %d\n", ops->mr_prefetched(mr, &pages), pages == 77);
	struct fid *xrcd = NULL;
	printf("xrcd %d\n", ops->xrcd_open(p.domain, NULL, -1, 0, &xrcd, NULL));
	printf("resident %d\n", resident(buf, 4));
	check("close mr", fi_close(&foreign->fid));
	check("close mr", fi_close(&mr->fid));
	say("closed", p.domain, WEFT_ADVISE_PREFETCH, 0, mr, buf, PAGE);
	check("close domain", fi_close(&other->fid));
	check("close domain", fi_close(&p.domain->fid));
	check("close eq", fi_close(&p.eq->fid));
	check("close fabric", fi_close(&p.fabric->fid));
	fi_freeinfo(p.info);
	munmap(buf, 4 * PAGE);
	return 0;
}
