/* durable: the client writes with FI_COMMIT_COMPLETE into persistent memory of the server, the device
 * WEFT_TEST_PMEM, and ends with a record that the case reads after both processes have ended. The
 * registration of other memory as persistent must be refused. */
#include "peer.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define LENGTH (4UL << 20)
#define ROUNDS 40
#define RECORD "weft: durable"

struct key {
	uint64_t addr, key;
};

static char byte_of(unsigned round, size_t at) { return (char)(round * 37 + at * 11 + (at >> 9)); }

static void barrier(struct peer *p)
{
	peer_send(p, 1);
	peer_post_rx(p, peer_recv(p, 1));
}

static size_t length_of(const struct peer *p, unsigned round)
{
	const size_t lengths[] = {1, 8, 1000, 4096, 20000, p->size};
	return lengths[round % (sizeof lengths / sizeof *lengths)];
}

static void commit(struct peer *p, size_t len, const struct key *to)
{
	struct iovec iov = {peer_rma_area(p), len};
	void *desc = fi_mr_desc(p->mr);
	struct fi_rma_iov rma = {to->addr, len, to->key};
	struct fi_msg_rma msg = {.msg_iov = &iov, .desc = &desc, .iov_count = 1, .rma_iov = &rma, .rma_iov_count = 1};
	check("fi_writemsg", fi_writemsg(p->ep, &msg, FI_COMPLETION | FI_COMMIT_COMPLETE));
	peer_wait_tx(p, "durable write");
}

static void target(struct peer *p)
{
	const char *device = getenv("WEFT_TEST_PMEM");
	int fd = open(device ? device : "", O_RDWR);
	if (fd < 0)
		fail("open of WEFT_TEST_PMEM", -FI_ENOENT);
	char *bytes = mmap(NULL, LENGTH, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (bytes == MAP_FAILED)
		fail("mmap of WEFT_TEST_PMEM", -FI_ENODEV);
	memset(bytes, 0, LENGTH);
	struct fid_mr *mr;
	const uint64_t access = FI_REMOTE_WRITE | FI_REMOTE_READ;
	int refused = fi_mr_reg(p->domain, peer_rma_area(p), p->size, access, 0, 0, FI_RMA_PMEM, &mr, NULL);
	printf("volatile memory: %d\n", refused);
	check("fi_mr_reg", fi_mr_reg(p->domain, bytes, LENGTH, access, 0, 0, FI_RMA_PMEM, &mr, NULL));
	struct key *mine = (struct key *)peer_tx_area(p);
	mine->addr = (uint64_t)(uintptr_t)bytes;
	mine->key = fi_mr_key(mr);
	peer_send(p, sizeof *mine);
	for (unsigned round = 0; round < ROUNDS; round++) {
		size_t len = length_of(p, round);
		barrier(p);
		for (size_t i = 0; i < len; i++)
			if (bytes[i] != byte_of(round, i)) {
				printf("round %u: byte %zu of %zu differs\n", round, i, len);
				fail("durable write", -FI_EIO);
			}
		barrier(p);
	}
	barrier(p);
	check("close mr", fi_close(&mr->fid));
	munmap(bytes, LENGTH);
}

static void initiator(struct peer *p)
{
	int slot = peer_recv(p, sizeof(struct key));
	struct key theirs = *(struct key *)peer_rx_slot(p, slot);
	peer_post_rx(p, slot);
	for (unsigned round = 0; round < ROUNDS; round++) {
		size_t len = length_of(p, round);
		for (size_t i = 0; i < len; i++)
			peer_rma_area(p)[i] = byte_of(round, i);
		commit(p, len, &theirs);
		barrier(p);
		barrier(p);
	}
	strcpy(peer_rma_area(p), RECORD);
	commit(p, sizeof RECORD, &theirs);
	barrier(p);
}

int test_durable(const struct options *opt)
{
	struct peer p;
	peer_open(&p, opt);
	peer_connect(&p);
	if (opt->server)
		target(&p);
	else
		initiator(&p);
	peer_shutdown_pair(&p);
	peer_close(&p);
	printf("durable: ok, %d writes\n", ROUNDS + 1);
	return 0;
}
