/* transfer: messages both ways, then RMA writes and reads from both sides, every byte compared,
 * then an orderly end. */
#include "peer.h"

#include <stdio.h>
#include <string.h>

static void paint(char *at, size_t len, unsigned seed)
{
	for (size_t i = 0; i < len; i++)
		at[i] = (char)(seed * 31 + i * 7 + (i >> 8));
}

static void compare(const char *what, const char *at, size_t len, unsigned seed)
{
	for (size_t i = 0; i < len; i++) {
		if (at[i] != (char)(seed * 31 + i * 7 + (i >> 8))) {
			printf("%s: byte %zu of %zu differs\n", what, i, len);
			fail(what, -FI_EIO);
		}
	}
}

static void messages(struct peer *p, size_t len, unsigned round)
{
	unsigned mine = round * 2 + (unsigned)p->opt->server, theirs = round * 2 + !p->opt->server;
	paint(peer_tx_area(p), len, mine);
	peer_send(p, len);
	int slot = peer_recv(p, len);
	compare("message", peer_rx_slot(p, slot), len, theirs);
	memset(peer_rx_slot(p, slot), 0, len);
	peer_post_rx(p, slot);
}

/* A one-byte message each way: neither side continues before both are here. */
static void barrier(struct peer *p)
{
	peer_send(p, 1);
	int slot = peer_recv(p, 1);
	peer_post_rx(p, slot);
}

/* `active` writes to and reads from the other side, which only checks its memory. */
static void rma(struct peer *p, size_t len, int active, unsigned seed)
{
	char *area = peer_rma_area(p);
	if (active) {
		paint(area, len, seed);
		peer_write(p, len);
	}
	barrier(p);
	if (!active) {
		compare("written by the peer", area, len, seed);
		paint(area, len, seed + 1);
	}
	barrier(p);
	if (active) {
		memset(area, 0, len);
		peer_read(p, len);
		compare("read from the peer", area, len, seed + 1);
	}
	barrier(p);
}

int test_transfer(const struct options *opt)
{
	struct peer p;
	unsigned round = 0;
	peer_open(&p, opt);
	peer_connect(&p);
	for (int i = 0; i < opt->iterations; i++)
		for (size_t len = 1; len <= opt->size; len = len < 8 ? 8 : len * 4)
			messages(&p, len, ++round);
	messages(&p, opt->size, ++round);
	/* an odd length ends in the middle of a packet */
	size_t lengths[] = {8, 4095, opt->size};
	for (int active = 0; active < 2; active++)
		for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++)
			rma(&p, lengths[i], active == opt->server, ++round * 2);
	barrier(&p);
	peer_shutdown_pair(&p);
	peer_close(&p);
	printf("transfer: ok, %u rounds, %llu messages received\n", round, (unsigned long long)p.rx_done);
	return 0;
}
