/* refresh: a region whose pages may change (FI_MR_MMU_NOTIFY). The server replaces the pages of its
 * region; the client reads it before and after the server calls fi_mr_refresh. On a device that
 * pins, the client reads the old pages, then the new ones. The two take turns by messages. */
#define _GNU_SOURCE
#include "peer.h"

#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#define LEN (16 * 4096UL)

static char *fresh(void *at, int fill)
{
	int flags = MAP_PRIVATE | MAP_ANONYMOUS | (at ? MAP_FIXED : 0);
	char *pages = mmap(at, LEN, PROT_READ | PROT_WRITE, flags, -1, 0);
	if (pages == MAP_FAILED)
		fail("mmap", -1);
	memset(pages, fill, LEN);
	return pages;
}

/* A call of fi_mr_refresh that fails has no effect: ranges outside the region, a count without
 * ranges, and flags. */
static void refused(struct fid_mr *mr, char *pages)
{
	struct iovec wrong[] = {{pages, 0}, {pages, LEN + 1}, {pages + LEN, 1}, {pages - 1, 2}, {NULL, LEN}, {pages, (size_t)-1}};
	struct iovec iov = {pages, LEN};
	for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
		printf("refused %zu: %d\n", i, fi_mr_refresh(mr, &wrong[i], 1, 0));
	printf("refused none: %d\n", fi_mr_refresh(mr, NULL, 1, 0));
	printf("refused flag: %d\n", fi_mr_refresh(mr, &iov, 1, 1));
}

/* Waits until the other side has reached this point. */
static void turn(struct peer *p)
{
	if (p->opt->server) {
		peer_post_rx(p, peer_recv(p, 1));
		peer_send(p, 1);
	} else {
		peer_send(p, 1);
		peer_post_rx(p, peer_recv(p, 1));
	}
}

static int seen(struct peer *p, struct fid_mr *mr, char *to, uint64_t addr, uint64_t key, const char *what)
{
	memset(to, 0, LEN);
	check("fi_read", fi_read(p->ep, to, LEN, fi_mr_desc(mr), 0, addr, key, NULL));
	peer_wait_tx(p, what);
	for (size_t i = 1; i < LEN; i++)
		if (to[i] != to[0])
			fail("torn", (long)i);
	printf("%s: %c\n", what, to[0]);
	return to[0];
}

int test_refresh(const struct options *opt)
{
	struct peer p;
	struct fid_mr *mr = NULL;
	char *pages = fresh(NULL, 'o');
	uint64_t told[2];
	peer_open(&p, opt);
	peer_connect(&p);
	check("fi_mr_reg", fi_mr_reg(p.domain, pages, LEN, opt->server ? FI_REMOTE_READ : FI_READ, 0, 77, 0, &mr, NULL));
	if (opt->server) {
		struct iovec iov = {pages, LEN};
		told[0] = p.info->domain_attr->mr_mode & FI_MR_VIRT_ADDR ? (uintptr_t)pages : 0;
		told[1] = fi_mr_key(mr);
		memcpy(peer_tx_area(&p), told, sizeof told);
		peer_send(&p, sizeof told);
		turn(&p); /* the client has read the first contents */
		fresh(pages, 'n');
		refused(mr, pages);
		turn(&p); /* the client reads before the refresh */
		turn(&p);
		check("fi_mr_refresh", fi_mr_refresh(mr, &iov, 1, 0));
		turn(&p); /* the client reads after the refresh */
		turn(&p);
	} else {
		int slot = peer_recv(&p, sizeof told);
		memcpy(told, peer_rx_slot(&p, slot), sizeof told);
		peer_post_rx(&p, slot);
		int first = seen(&p, mr, pages, told[0], told[1], "at first");
		turn(&p);
		turn(&p);
		int before = seen(&p, mr, pages, told[0], told[1], "exchanged");
		turn(&p);
		turn(&p);
		int after = seen(&p, mr, pages, told[0], told[1], "refreshed");
		turn(&p);
		if (first != 'o' || before != 'o' || after != 'n')
			fail("these are not the pages", -1);
	}
	check("close mr", fi_close(&mr->fid));
	peer_shutdown_pair(&p);
	peer_close(&p);
	munmap(pages, LEN);
	return 0;
}
