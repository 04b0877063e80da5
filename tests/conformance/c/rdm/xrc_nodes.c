/* Endpoints of type FI_EP_RDM on XRC (FI_PROTO_RDMA_CM_IB_XRC), or on RC, in several processes of
 * several emulated nodes, which all send to each other: 8 B to 64 KiB, contents checked.
 *
 *   xrc_nodes all PROV NODE NODES PROCESSES         each node has an address of its own
 *   xrc_nodes one PROV NODE NODES PROCESSES         all at one address
 *   xrc_nodes rc PROV NODE NODES PROCESSES          on RC
 *   xrc_nodes bound PROV NODE NODES PROCESSES FILE  with the application's XRC domain of this file
 *   xrc_nodes spaces PROV NODE DIRECTORY            one node; each process has another file system
 *                                                   at DIRECTORY
 *   xrc_nodes nowhere PROV NODE                     one node without a safe directory
 *   xrc_nodes unsafe PROV NODE                      fi_enable(3) refuses FI_WEFT_XRCD_PATH
 *   xrc_nodes users PROV NODE                       two users at once, two processes each
 */
#define _GNU_SOURCE
#define SECONDS 120
#include "../rdm_processes.h"

#include "weft.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/stat.h>

enum { MOST = 128, LARGEST = 1 << 16, TOGETHER = 8 };
enum { READY, DONE, ENDED, SECOND_USER = 16 }; /* words of the board */
enum { SKIPPED = 77 };

static int nodes, each, count;
static int first; /* place on the board, and word, of the first process */
static bool at_one_address, on_rc;
static const char *file, *directory;
static int at_node;

static const size_t sizes[] = { 8, 8, 200, 4096, 8192, 20000, LARGEST };
enum { ROUNDS = sizeof sizes / sizeof *sizes };

static const struct weft_mr_ops *ops_of(struct side *side)
{
	void *table = NULL;

	MUST(fi_open_ops(&side->domain->fid, WEFT_MR_OPS, 0, &table, NULL));
	return table;
}

/* The info of an endpoint on XRC, or on RC. */
static struct fi_info *info_on(uint32_t protocol)
{
	struct fi_info *hints = fi_allocinfo(), *info;

	hints->caps = CAPS | FI_DIRECTED_RECV;
	hints->ep_attr->type = FI_EP_RDM;
	hints->ep_attr->protocol = protocol;
	hints->domain_attr->data_progress = FI_PROGRESS_MANUAL;
	hints->fabric_attr->prov_name = strdup(provider);
	MUST(fi_getinfo(FI_VERSION(1, 17), node, NULL, FI_SOURCE, hints, &info));
	fi_freeinfo(hints);
	IS(info->ep_attr->protocol == protocol);
	/* all of 127.0.0.0/8 is the loopback interface, which has one address of them */
	IS(info->src_addrlen == sizeof(struct sockaddr_in));
	((struct sockaddr_in *)info->src_addr)->sin_addr.s_addr = htonl(INADDR_LOOPBACK + (at_one_address ? 0 : (uint32_t)at_node));
	return info;
}

static struct fid_ep *opened(struct side *side, struct fi_info *info)
{
	struct fid_ep *ep;

	MUST(fi_endpoint(side->domain, info, &ep, NULL));
	MUST(fi_ep_bind(ep, &side->av->fid, 0));
	MUST(fi_ep_bind(ep, &side->tx->fid, FI_TRANSMIT | FI_RECV));
	return ep;
}

/* Binds the application's domain; the calls that are refused. */
static struct fid *bind_own(struct side *side)
{
	const struct weft_mr_ops *ops = ops_of(side);
	struct fi_info *rc = info_on(FI_PROTO_IB_RDM);
	struct fid *xrcd, *other;
	struct fid_domain *domain;
	struct fid_ep *ep;
	struct side elsewhere = *side;

	MUST(ops->xrcd_open(side->domain, file, -1, O_CREAT, &xrcd, NULL));
	MUST(ops->xrcd_open(side->domain, NULL, -1, O_CREAT, &other, NULL));
	ep = opened(side, rc);
	RETURNS(fi_ep_bind(ep, xrcd, 0), -FI_EINVAL);
	MUST(fi_close(&ep->fid));
	MUST(fi_domain(side->fabric, side->info, &domain, NULL));
	elsewhere.domain = domain;
	MUST(fi_endpoint(elsewhere.domain, side->info, &ep, NULL));
	RETURNS(fi_ep_bind(ep, xrcd, 0), -FI_EDOMAIN);
	MUST(fi_close(&ep->fid));
	MUST(fi_close(&domain->fid));
	RETURNS(fi_ep_bind(side->ep, xrcd, 1), -FI_EBADFLAGS);
	MUST(fi_ep_bind(side->ep, xrcd, 0));
	RETURNS(fi_ep_bind(side->ep, other, 0), -FI_EINVAL);
	RETURNS(fi_close(xrcd), -FI_EBUSY);
	MUST(fi_close(other));
	fi_freeinfo(rc);
	return xrcd;
}

static uint64_t seed_of(int from, int to, int round) { return (uint64_t)((from * MOST + to) * ROUNDS + round); }
static uint64_t tag_of(int from, int round) { return (uint64_t)from << 32 | (uint64_t)round; }

/* One message in each direction with the peers from `shift` on, so many of them. */
static void shift_round(struct side *side, const fi_addr_t *peers, int own, int round, int shift, int many)
{
	static uint8_t *in[MOST], *out[MOST];
	size_t size = sizes[round];

	for (int s = shift; s < shift + many; s++) {
		int to = (own + s) % count, from = (own + count - s) % count;

		if (!in[s]) {
			in[s] = malloc(LARGEST);
			out[s] = malloc(LARGEST);
		}
		memset(in[s], 0xee, size);
		fill(out[s], size, seed_of(own, to, round));
		POST(side, fi_trecv(side->ep, in[s], size, NULL, peers[from], tag_of(from, round), 0, in[s]));
		POST(side, fi_tsend(side->ep, out[s], size, NULL, peers[to], tag_of(own, round), NULL));
	}
	for (int i = 0; i < 2 * many; i++)
		IS(next(side, side->tx).len <= size);
	for (int s = shift; s < shift + many; s++)
		must_be(in[s], size, seed_of((own + count - s) % count, own, round));
}

static void exchange(int own)
{
	fi_addr_t peers[MOST];
	struct side side;
	struct fid *xrcd = NULL;

	memset(&side, 0, sizeof side);
	open_domain_with(&side, info_on(on_rc ? FI_PROTO_IB_RDM : FI_PROTO_RDMA_CM_IB_XRC));
	side.tx = side.rx = queue(&side, 0);
	side.ep = opened(&side, side.info);
	if (file)
		xrcd = bind_own(&side);
	MUST(fi_enable(side.ep));
	publish(side.ep, first + own);
	for (int peer = 0; peer < count; peer++)
		peers[peer] = address(&side, first + peer);
	/* all begin at once */
	add(first + READY);
	UNTIL(told(first + READY) == (uint64_t)count, pause_ms(1));
	for (int round = 0; round < ROUNDS; round++) {
		/* the buffers of all peers would be 1 GiB for 128 processes */
		int many = sizes[round] > 4096 ? TOGETHER : count - 1;

		for (int shift = 1; shift < count; shift += many)
			shift_round(&side, peers, own, round, shift, shift + many > count ? count - shift : many);
	}
	/* at rest before the first one ends */
	add(first + DONE);
	UNTIL(told(first + DONE) == (uint64_t)count, progress(&side));
	for (double until = now() + 0.2; now() < until;)
		progress(&side);
	add(first + ENDED);
	UNTIL(told(first + ENDED) == (uint64_t)count, progress(&side));
	side.rx = side.tx;
	if (xrcd) {
		MUST(fi_close(&side.ep->fid));
		side.ep = NULL;
		MUST(fi_close(xrcd));
	}
	close_side(&side);
}

/* A file system of its own at `directory`. */
static void in_own_space(const char *at)
{
	if (unshare(CLONE_NEWNS) || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) ||
	    mount("weft", at, "tmpfs", 0, "mode=0700"))
		exit(SKIPPED);
}

static void process(int own)
{
	char number[16];

	at_node = own / each;
	snprintf(number, sizeof number, "%d", at_node);
	setenv("SOFTVERBS_NODE", number, 1);
	if (directory)
		in_own_space(directory);
	exchange(own);
}

static void wait_for(const pid_t *pids, int many)
{
	bool skipped = false;

	for (int i = 0; i < many; i++) {
		int status = status_of(pids[i], "process");

		skipped |= status == SKIPPED;
		IS(status == 0 || status == SKIPPED);
	}
	if (skipped)
		exit(SKIPPED);
}

static void run(int of, int processes)
{
	pid_t pids[MOST];

	nodes = of;
	each = processes;
	count = nodes * each;
	IS(count <= MOST);
	for (int i = 0; i < count; i++)
		pids[i] = start("process", process, i);
	wait_for(pids, count);
}

static char **words;
static int word_count;

static void run_words(void)
{
	IS(word_count > 5);
	run(atoi(words[4]), atoi(words[5]));
}

static void all(void) { run_words(); }

static void one(void)
{
	at_one_address = true;
	run_words();
}

static void rc(void)
{
	on_rc = true;
	run_words();
}

static void bound(void)
{
	IS(word_count > 6);
	file = words[6];
	run_words();
}

static void spaces(void)
{
	IS(word_count > 4);
	directory = words[4];
	run(1, 2);
}

/* The directory of last resort is one to which all users can write. */
static void nowhere(void)
{
	char path[64];
	const char *open = "/var/tmp/weft-open";

	snprintf(path, sizeof path, "/dev/shm/weft-%u", geteuid());
	setenv("XDG_RUNTIME_DIR", "/nonexistent", 1);
	mkdir(path, 0700);
	if (mkdir(open, 0777) && errno != EEXIST)
		die("mkdir");
	chmod(open, 0777);
	if (unshare(CLONE_NEWNS) || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) || mount(open, path, NULL, MS_BIND, NULL))
		exit(SKIPPED);
	/* root's is one of a session, which this process may not have */
	snprintf(path, sizeof path, "/run/user/%u", geteuid());
	if (!access(path, F_OK) && mount(open, path, NULL, MS_BIND, NULL))
		exit(SKIPPED);
	run(1, 2);
}

static void refused(int own)
{
	struct side side;

	(void)own;
	memset(&side, 0, sizeof side);
	open_domain_with(&side, info_on(FI_PROTO_RDMA_CM_IB_XRC));
	side.tx = side.rx = queue(&side, 0);
	side.ep = opened(&side, side.info);
	RETURNS(fi_enable(side.ep), -FI_EACCES);
	close_side(&side);
}

static void unsafe(void)
{
	pid_t pid = start("refused", refused, 0);

	wait_for(&pid, 1);
}

/* The second user is nobody: 65534. */
static void of_second_user(int own)
{
	first = SECOND_USER;
	if (setgid(65534) || setuid(65534))
		exit(SKIPPED);
	process(own);
}

static void users(void)
{
	pid_t pids[4];

	if (geteuid() != 0)
		exit(SKIPPED);
	nodes = 1;
	each = count = 2;
	for (int i = 0; i < 2; i++) {
		pids[i] = start("process", process, i);
		pids[2 + i] = start("second user", of_second_user, i);
	}
	wait_for(pids, 4);
}

int main(int argc, char **argv)
{
	static const struct mode modes[] = { { "all", all },	     { "one", one },	       { "rc", rc },
					     { "bound", bound },     { "spaces", spaces },     { "nowhere", nowhere },
					     { "unsafe", unsafe },   { "users", users } };

	words = argv;
	word_count = argc;
	return run_mode(modes, sizeof modes / sizeof *modes, argc, argv);
}
