/* atomic: each side in turn changes a word of the other's memory: fetch-and-add, and
 * compare-and-swap with an equal and an unequal comparison. The words and all returned values are
 * compared with the expected ones. */
#include "peer.h"

#include <rdma/fi_atomic.h>
#include <stdio.h>
#include <string.h>

#define ROUNDS 100

static uint64_t *word(struct peer *p) { return (uint64_t *)peer_rma_area(p); }

static void barrier(struct peer *p)
{
	peer_send(p, 1);
	peer_post_rx(p, peer_recv(p, 1));
}

static void expect(const char *what, uint64_t got, uint64_t want)
{
	if (got == want)
		return;
	printf("%s: 0x%llx, expected 0x%llx\n", what, (unsigned long long)got, (unsigned long long)want);
	fail(what, -FI_EIO);
}

/* Returns the word's value before the operation. In the local memory the operand is in the word
 * after the peer's, the result in the one after that. */
static uint64_t fetch_add(struct peer *p, uint64_t add)
{
	uint64_t *mine = word(p);
	void *desc = fi_mr_desc(p->mr);
	mine[1] = add;
	mine[2] = ~0ULL;
	check("fi_fetch_atomic", fi_fetch_atomic(p->ep, &mine[1], 1, desc, &mine[2], desc, 0, p->remote_addr, p->remote_key, FI_UINT64,
						 FI_SUM, NULL));
	peer_wait_tx(p, "sum");
	return mine[2];
}

static uint64_t compare_swap(struct peer *p, uint64_t compare, uint64_t swap)
{
	uint64_t *mine = word(p);
	void *desc = fi_mr_desc(p->mr);
	mine[1] = swap;
	mine[2] = ~0ULL;
	mine[3] = compare;
	check("fi_compare_atomic", fi_compare_atomic(p->ep, &mine[1], 1, desc, &mine[3], desc, &mine[2], desc, 0, p->remote_addr,
						     p->remote_key, FI_UINT64, FI_CSWAP, NULL));
	peer_wait_tx(p, "comparison");
	return mine[2];
}

static void change(struct peer *p, uint64_t start)
{
	uint64_t value = start;
	for (uint64_t i = 1; i <= ROUNDS; i++) {
		/* carries from the lower into the upper half of the word */
		uint64_t add = i << 28 | i;
		expect("before the sum", fetch_add(p, add), value);
		value += add;
		expect("before a comparison that fails", compare_swap(p, value + 1, 7), value);
		expect("before a comparison that stores", compare_swap(p, value, value ^ i), value);
		value ^= i;
	}
}

static uint64_t after(uint64_t value)
{
	for (uint64_t i = 1; i <= ROUNDS; i++)
		value = (value + (i << 28 | i)) ^ i;
	return value;
}

int test_atomic(const struct options *opt)
{
	struct peer p;
	peer_open(&p, opt);
	peer_connect(&p);
	for (int active = 0; active < 2; active++) {
		const uint64_t start = 0x0123456789abcdefULL + (uint64_t)active;
		if (active != opt->server)
			*word(&p) = start;
		barrier(&p);
		if (active == opt->server)
			change(&p, start);
		barrier(&p);
		if (active != opt->server)
			expect("the word in the end", *word(&p), after(start));
	}
	barrier(&p);
	peer_shutdown_pair(&p);
	peer_close(&p);
	printf("atomic: ok, %d operations each way\n", 3 * ROUNDS);
	return 0;
}
