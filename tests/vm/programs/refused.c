/* refused: writes that the device of the peer refuses, on endpoints with many peers on two hosts.
 *
 *   refused -s PROVIDER NODE SERVICE PEER:SERVICE    has a region that may be read only
 *   refused PROVIDER NODE SERVICE PEER:SERVICE       writes to it, ROUNDS times
 *
 * Each write must complete with FI_EKEYREJECTED. It breaks the link, so each one is followed by a
 * message of the same peer, which must arrive. */
#define _GNU_SOURCE
#define SECONDS 60
#include "../../conformance/c/rdm_side.h"

enum { ROUNDS = 10, LENGTH = 64 };

struct message {
	uint64_t round, addr, key;
};

static struct side side;
static fi_addr_t peer;
static uint8_t *memory;
static struct fid_mr *mr;

static void progress(struct side *unused) { (void)unused; }

/* The result of the next completion of a queue. 0, or an errno. */
static int result_of(struct fid_cq *cq)
{
	struct fi_cq_tagged_entry entry;
	struct fi_cq_err_entry error = { 0 };
	double until = now() + SECONDS;
	ssize_t got;

	while ((got = fi_cq_read(cq, &entry, 1)) == -FI_EAGAIN) {
		(void)fi_cq_read(cq == side.tx ? side.rx : side.tx, NULL, 0);
		if (now() > until)
			die("nothing completes for %d s", SECONDS);
	}
	if (got == -FI_EAVAIL) {
		MUST(fi_cq_readerr(cq, &error, 0));
		return error.err;
	}
	MUST(got);
	return 0;
}

static void post_message(struct message *message)
{
	POST(&side, fi_tsend(side.ep, message, sizeof *message, fi_mr_desc(mr), peer, 1, NULL));
	RETURNS(result_of(side.tx), 0);
}

static void take_message(struct message *message)
{
	POST(&side, fi_trecv(side.ep, message, sizeof *message, fi_mr_desc(mr), FI_ADDR_UNSPEC, 1, 0, NULL));
	RETURNS(result_of(side.rx), 0);
}

int main(int argc, char **argv)
{
	bool owner = argc > 1 && !strcmp(argv[1], "-s");
	struct message *out, *in;
	char *colon;

	argv += 1 + owner;
	if (argc != 5 + owner || !(colon = strrchr(argv[3], ':'))) {
		fprintf(stderr, "usage: refused [-s] PROVIDER NODE SERVICE PEER:SERVICE\n");
		return 2;
	}
	provider = argv[0];
	role = node = argv[1];
	wanted.service = argv[2];
	wanted.caps = FI_MSG | FI_TAGGED | FI_RMA;
	wanted.mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_PROV_KEY | FI_MR_ALLOCATED;
	open_domain_of(&side);
	side.tx = queue(&side, 0);
	side.rx = queue(&side, 0);
	side.ep = endpoint_on(&side, 0);
	*colon = 0;
	IS(fi_av_insertsvc(side.av, argv[3], colon + 1, &peer, 0, NULL) == 1);
	if (posix_memalign((void **)&memory, 4096, 4096))
		die("no memory");
	memset(memory, 0, 4096);
	MUST(fi_mr_reg(side.domain, memory, 4096, FI_SEND | FI_RECV | FI_WRITE | FI_REMOTE_READ, 0, 0, 0, &mr, NULL));
	out = (struct message *)memory;
	in = out + 1;
	for (uint64_t round = 0; round < ROUNDS; round++) {
		if (owner) {
			*out = (struct message){ .round = round, .addr = (uintptr_t)memory + 2048, .key = fi_mr_key(mr) };
			post_message(out);
			take_message(in);
		} else {
			take_message(in);
			POST(&side, fi_write(side.ep, memory, LENGTH, fi_mr_desc(mr), peer, in->addr, in->key, NULL));
			int error = result_of(side.tx);

			if (error != FI_EKEYREJECTED)
				die("round %llu: error %d (%s)", (unsigned long long)round, error, fi_strerror(error));
			*out = (struct message){ .round = round };
			post_message(out);
		}
		IS(in->round == round);
	}
	/* the acknowledgement of the last message */
	for (double until = now() + 1; now() < until;)
		(void)fi_cq_read(side.rx, NULL, 0);
	MUST(fi_close(&side.ep->fid));
	side.ep = NULL;
	MUST(fi_close(&mr->fid));
	close_side(&side);
	printf("refused: ok, %d rounds\n", ROUNDS);
	return 0;
}
