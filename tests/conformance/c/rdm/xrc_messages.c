/* Messages between endpoints of type FI_EP_RDM on XRC (FI_PROTO_RDMA_CM_IB_XRC), in processes that
 * all send to each other at once: tagged and untagged, 0 to 64 KiB, contents checked.
 *
 *   xrc_messages pair PROV NODE [auto]    two processes
 *   xrc_messages all PROV NODE [auto]     four, all at one address
 */
#include "../rdm_processes.h"

enum { PEERS = 4, TAGGED = 0, WAYS = 2 };
enum { ENDED }; /* words of the board */

static int count; /* of the processes */

static const size_t sizes[] = { 0,    1,    7,	  8,	31,   32,   33,	   64,	  200,	 511,	512,  513,
				1024, 4056, 4064, 4065, 8191, 8192, 8193, 16384, 40001, 65535, 65536 };
enum { SIZES = sizeof sizes / sizeof *sizes, ROUNDS = 4 };

/* Opens an endpoint whose info is that of XRC. */
static void open_xrc(struct side *side, int place)
{
	struct fi_info *hints = fi_allocinfo(), *info;

	hints->caps = CAPS | FI_DIRECTED_RECV;
	hints->ep_attr->type = FI_EP_RDM;
	hints->ep_attr->protocol = FI_PROTO_RDMA_CM_IB_XRC;
	hints->domain_attr->data_progress = wants_auto ? FI_PROGRESS_AUTO : FI_PROGRESS_MANUAL;
	hints->fabric_attr->prov_name = strdup(provider);
	MUST(fi_getinfo(FI_VERSION(1, 17), node, NULL, FI_SOURCE, hints, &info));
	fi_freeinfo(hints);
	for (struct fi_info *each = info; each; each = each->next) {
		IS(each->ep_attr->type == FI_EP_RDM);
		IS(each->ep_attr->protocol == FI_PROTO_RDMA_CM_IB_XRC);
	}
	open_domain_with(side, info);
	side->tx = queue(side, 0);
	side->rx = queue(side, 0);
	side->ep = endpoint_on(side, 0);
	publish(side->ep, place);
}

static uint64_t seed_of(int from, int to, int way, int number)
{
	return (uint64_t)(((from * PEERS + to) * WAYS + way) * SIZES * ROUNDS + number);
}

static uint64_t tag_of(int from, int number) { return (uint64_t)from << 32 | (uint64_t)number; }

/* The messages between this process and a peer, of one kind. Their receives are directed. */
struct stream {
	uint8_t *in, *out;
	int sent, sends; /* posted, completed */
	int posted, received;
};

static size_t size_of(int number) { return sizes[number % SIZES]; }

static void wait_for_send(struct side *side)
{
	struct fi_cq_tagged_entry entry = next(side, side->tx);

	((struct stream *)entry.op_context)->sends++;
}

static void wait_for_receive(struct side *side, int own, struct stream streams[PEERS][WAYS])
{
	struct fi_cq_tagged_entry entry = next(side, side->rx);
	struct stream *stream = entry.op_context;
	int at = (int)(stream - &streams[0][0]), from = at / WAYS, way = at % WAYS;
	int number = stream->received++;

	IS(entry.len == size_of(number));
	IS(!!(entry.flags & FI_TAGGED) == (way == TAGGED));
	if (way == TAGGED)
		IS(entry.tag == tag_of(from, number));
	must_be(stream->in, entry.len, seed_of(from, own, way, number));
}

/* One message of each stream is under way in each direction. */
static void exchange(int own)
{
	static struct stream streams[PEERS][WAYS];
	fi_addr_t peers[PEERS];
	struct side side;
	int number, peer, way;

	open_xrc(&side, own);
	for (peer = 0; peer < count; peer++) {
		if (peer != own)
			peers[peer] = address(&side, peer);
		for (way = 0; way < WAYS; way++) {
			streams[peer][way].in = malloc(1 << 16);
			streams[peer][way].out = malloc(1 << 16);
		}
	}
	for (number = 0; number < SIZES * ROUNDS; number++) {
		for (peer = 0; peer < count; peer++)
			for (way = 0; way < WAYS && peer != own; way++) {
				struct stream *stream = &streams[peer][way];

				memset(stream->in, 0xee, 1 << 16);
				fill(stream->out, size_of(number), seed_of(own, peer, way, number));
				if (way == TAGGED) {
					POST(&side, fi_trecv(side.ep, stream->in, 1 << 16, NULL, peers[peer],
							     tag_of(peer, number), 0, stream));
					POST(&side, fi_tsend(side.ep, stream->out, size_of(number), NULL, peers[peer],
							     tag_of(own, number), stream));
				} else {
					POST(&side, fi_recv(side.ep, stream->in, 1 << 16, NULL, peers[peer], stream));
					POST(&side, fi_send(side.ep, stream->out, size_of(number), NULL, peers[peer], stream));
				}
			}
		for (peer = 0; peer < WAYS * (count - 1); peer++) {
			wait_for_receive(&side, own, streams);
			wait_for_send(&side);
		}
	}
	add(ENDED);
	UNTIL(told(ENDED) == (uint64_t)count, progress(&side));
	close_side(&side);
}

static void processes(int of)
{
	pid_t pids[PEERS];

	count = of;
	for (int i = 0; i < count; i++)
		pids[i] = start("exchange", exchange, i);
	for (int i = 0; i < count; i++)
		IS(status_of(pids[i], "exchange") == 0);
}

static void pair(void) { processes(2); }

static void all(void) { processes(PEERS); }

int main(int argc, char **argv)
{
	static const struct mode modes[] = { { "pair", pair }, { "all", all } };

	return run_mode(modes, sizeof modes / sizeof *modes, argc, argv);
}
