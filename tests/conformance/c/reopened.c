/* Objects that are opened and closed again and again by a process that lives long, from
 * fi_mr(3), fi_cq(3), fi_cntr(3), fi_av(3) and fi_endpoint(3). The memory of the process does not
 * grow with their number.
 *
 *   reopened regions PROV NODE    memory regions, of 100 different buffers
 *   reopened queues PROV NODE     completion queues, counters, and address vectors with an address
 *   reopened endpoints PROV NODE  enabled endpoints of type FI_EP_RDM
 *
 * The next argument is `auto` for FI_PROGRESS_AUTO, or `manual`. Then follow the number of objects
 * that come first, which may fill what the provider keeps, and of those that are counted. Ends with 0
 * and prints the growth of the heap, or says what went wrong. Plain libfabric 1.17. */
#include "rdm_processes.h"

#include <malloc.h>

enum { BUFFERS = 100, PAGE = 4096 };
enum { GROWTH = 4 << 10 }; /* bytes of the heap, for all objects of a kind together */

static int first, counted;
static struct side side;
static struct name own;
static uint8_t *bytes;

static size_t in_use(void)
{
	struct mallinfo2 heap = mallinfo2();

	return heap.uordblks + heap.hblkhd;
}

static void reopen(const char *kind, void (*again)(int))
{
	size_t before, after;

	for (int i = 0; i < first; i++)
		again(i);
	before = in_use();
	for (int i = 0; i < counted; i++)
		again(first + i);
	after = in_use();
	printf("%s: %ld B after %d\n", kind, (long)after - (long)before, counted);
	if (after > before + GROWTH)
		die("the heap has grown");
}

static void region(int i)
{
	struct fid_mr *mr;

	MUST(fi_mr_reg(side.domain, bytes + i % BUFFERS * PAGE, PAGE, FI_REMOTE_READ | FI_REMOTE_WRITE, 0, (uint64_t)i + 1, 0, &mr,
		       NULL));
	MUST(fi_close(&mr->fid));
}

static void completion_queue(int unused)
{
	(void)unused;
	MUST(fi_close(&queue(&side, 64)->fid));
}

static void one_counter(int unused)
{
	(void)unused;
	MUST(fi_close(&counter(&side)->fid));
}

static void address_vector(int i)
{
	struct fi_av_attr attr = { .type = i % 2 ? FI_AV_TABLE : FI_AV_MAP };
	struct fid_av *av;
	fi_addr_t addr;

	MUST(fi_av_open(side.domain, &attr, &av, NULL));
	RETURNS(fi_av_insert(av, own.bytes, 1, &addr, 0, NULL), 1);
	MUST(fi_close(&av->fid));
}

static void endpoint(int unused)
{
	(void)unused;
	MUST(fi_close(&endpoint_on(&side, 0)->fid));
}

static void regions(void) { reopen("regions", region); }

static void queues(void)
{
	reopen("completion queues", completion_queue);
	reopen("counters", one_counter);
	reopen("address vectors", address_vector);
}

static void endpoints(void) { reopen("endpoints", endpoint); }

static void in_a_domain(void (*what)(void))
{
	wanted.caps = CAPS | FI_RMA;
	mallopt(M_ARENA_MAX, 1); /* mallinfo2(3) has one arena */
	bytes = aligned_alloc(PAGE, BUFFERS * PAGE);
	IS(bytes);
	open_side(&side, 0);
	own = name_of(side.ep);
	what();
	close_side(&side);
	free(bytes);
}

static void of_regions(void) { in_a_domain(regions); }
static void of_queues(void) { in_a_domain(queues); }
static void of_endpoints(void) { in_a_domain(endpoints); }

int main(int argc, char **argv)
{
	static const struct mode modes[] = { { "regions", of_regions }, { "queues", of_queues }, { "endpoints", of_endpoints } };

	if (argc != 7)
		die("usage: %s MODE PROV NODE auto|manual FIRST COUNTED", argv[0]);
	first = atoi(argv[5]);
	counted = atoi(argv[6]);
	wanted.tx_queue = wanted.rx_queue = 64;
	return run_mode(modes, sizeof modes / sizeof *modes, argc, argv);
}
