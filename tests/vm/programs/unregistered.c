/* unregistered: buffers that the application never registers (FI_MR_LOCAL off), at addresses whose
 * pages are replaced between operations in every way that a process has. On a device that pins, a
 * stale registration transfers the old contents. The client sends to the server, which checks the
 * bytes, and writes to it and reads back, and checks the bytes itself. */
#define _GNU_SOURCE
#include "peer.h"

#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define LEN 32768UL /* larger than the buffers that weft copies */

static char *map(void *at)
{
	char *pages = mmap(at, LEN, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | (at ? MAP_FIXED : 0), -1, 0);
	if (pages == MAP_FAILED)
		fail("mmap", -1);
	return pages;
}

/* Replaces the pages at these addresses. */
static void exchange(char *at, int way)
{
	char *aside;
	switch (way % 6) {
	case 0: /* unmapped, then mapped */
		munmap(at, LEN);
		map(at);
		break;
	case 1: /* mapped over */
		map(at);
		break;
	case 2:
		if (madvise(at, LEN, MADV_DONTNEED))
			fail("madvise", -1);
		break;
	case 3: /* moved to another address */
		aside = mremap(at, LEN, LEN, MREMAP_MAYMOVE | MREMAP_FIXED, map(NULL));
		if (aside == MAP_FAILED)
			fail("mremap", -1);
		map(at);
		munmap(aside, LEN);
		break;
	case 4: /* other pages moved to these addresses */
		aside = map(NULL);
		memset(aside, 0x55, LEN);
		if (mremap(aside, LEN, LEN, MREMAP_MAYMOVE | MREMAP_FIXED, at) != at)
			fail("mremap", -1);
		break;
	/* a forked child: the parent's next write replaces pages, on kernels that share them with
	 * the child */
	default: {
		pid_t child = fork();
		if (child < 0)
			fail("fork", -1);
		if (!child) {
			memset(at, 0x33, LEN);
			_exit(0);
		}
		int status = -1;
		if (waitpid(child, &status, 0) != child || status)
			fail("the child", status);
	}
	}
}

static void fill(char *at, int round)
{
	for (size_t i = 0; i < LEN; i++)
		at[i] = (char)(i * 31 + i / 4096 + (size_t)round * 7);
}

static void look(const char *at, int round, const char *what)
{
	for (size_t i = 0; i < LEN; i++)
		if (at[i] != (char)(i * 31 + i / 4096 + (size_t)round * 7)) {
			printf("round %d, byte %zu\n", round, i);
			fail(what, -1);
		}
}

int test_unregistered(const struct options *opt)
{
	struct peer p;
	char *from = map(NULL), *into = map(NULL);
	peer_open(&p, opt);
	if (p.info->domain_attr->mr_mode & FI_MR_LOCAL)
		fail("FI_MR_LOCAL is asked for", -1);
	if (p.size < LEN)
		fail("-z is too small", -1);
	peer_connect(&p);
	for (int round = 0; round < opt->iterations; round++) {
		if (opt->server) {
			int slot = peer_recv(&p, LEN);
			look(peer_rx_slot(&p, slot), round, "sent");
			peer_post_rx(&p, slot);
			peer_send(&p, 1);
			continue;
		}
		exchange(from, round);
		fill(from, round);
		check("fi_send", fi_send(p.ep, from, LEN, NULL, 0, NULL));
		peer_wait_tx(&p, "send");
		peer_post_rx(&p, peer_recv(&p, 1));
		/* a cached registration may serve this one, or not */
		fill(from, round + 100);
		check("fi_write", fi_write(p.ep, from, LEN, NULL, 0, p.remote_addr, p.remote_key, NULL));
		peer_wait_tx(&p, "write");
		exchange(into, round + round / 6);
		check("fi_read", fi_read(p.ep, into, LEN, NULL, 0, p.remote_addr, p.remote_key, NULL));
		peer_wait_tx(&p, "read");
		look(into, round + 100, "read");
	}
	printf("%d rounds\n", opt->iterations);
	peer_shutdown_pair(&p);
	peer_close(&p);
	munmap(from, LEN);
	munmap(into, LEN);
	return 0;
}
