/* Connections of endpoints with many peers, from fi_endpoint(3), fi_getinfo(3), fi_cm(3), fi_av(3) and fi_weft(7), with
 * FI_WEFT_RDM=1:
 *
 *   rdm_links all PROV NODE      24 endpoints in 4 processes connect all to all at once
 *   rdm_links idle PROV NODE     an endpoint in the one process, 20 in the other; FI_WEFT_MAX_LINKS=4 keeps none out
 *   rdm_links anywhere PROV NODE an endpoint without source address is reached at each address of the machine
 *   rdm_links forked PROV NODE   children of a process with endpoints close them or end; the parent goes on
 *   rdm_links alias PROV NODE    what an alias keeps in use, and binding by an alias
 *
 * Ends with 0, or says what went wrong. Plain libfabric 1.17. */
#include "end.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netinet/in.h>
#include <rdma/fi_tagged.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/mman.h>

#define SECONDS 40
#define MOST 32

#define IS(condition)                                                                                                \
	do {                                                                                                         \
		if (!(condition))                                                                                    \
			die("line %d: not so: %s", __LINE__, #condition);                                            \
	} while (0)

#define RETURNS(call, value)                                                                                         \
	do {                                                                                                         \
		long returned = (long)(call);                                                                        \
		if (returned != (value))                                                                             \
			die("line %d: %s: %ld", __LINE__, #call, returned);                                          \
	} while (0)

/* An endpoint, with the addresses of all others. */
struct side {
	struct fi_info *info;
	struct fid_fabric *fabric;
	struct fid_domain *domain;
	struct fid_av *av;
	struct fid_cq *cq;
	struct fid_ep *ep;
	fi_addr_t peers[MOST];
	uint64_t in[MOST], out[MOST];
	int sent, received;
};

struct name {
	size_t len;
	uint8_t bytes[64];
};

/* Memory of all processes. */
static struct {
	struct name names[MOST];
	_Atomic int arrived[64];
} *shared;

static void open_side(struct side *side, bool anywhere)
{
	struct fi_av_attr av = { .type = FI_AV_TABLE };
	struct fi_cq_attr cq = { .format = FI_CQ_FORMAT_TAGGED, .wait_obj = FI_WAIT_NONE };
	struct fi_info *hints = fi_allocinfo();

	memset(side, 0, sizeof *side);
	hints->caps = FI_MSG | FI_TAGGED;
	hints->ep_attr->type = FI_EP_RDM;
	hints->fabric_attr->prov_name = strdup(provider);
	hints->addr_format = FI_SOCKADDR;
	MUST(fi_getinfo(FI_VERSION(1, 17), node, NULL, FI_SOURCE, hints, &side->info));
	fi_freeinfo(hints);
	if (strcmp(side->info->fabric_attr->prov_name, provider))
		die("the provider is %s", side->info->fabric_attr->prov_name);
	if (anywhere) {
		free(side->info->src_addr);
		side->info->src_addr = NULL;
		side->info->src_addrlen = 0;
	}
	MUST(fi_fabric(side->info->fabric_attr, &side->fabric, NULL));
	MUST(fi_domain(side->fabric, side->info, &side->domain, NULL));
	MUST(fi_av_open(side->domain, &av, &side->av, NULL));
	MUST(fi_cq_open(side->domain, &cq, &side->cq, NULL));
	MUST(fi_endpoint(side->domain, side->info, &side->ep, NULL));
	MUST(fi_ep_bind(side->ep, &side->av->fid, 0));
	MUST(fi_ep_bind(side->ep, &side->cq->fid, FI_TRANSMIT | FI_RECV));
	MUST(fi_enable(side->ep));
}

static void close_side(struct side *side)
{
	MUST(fi_close(&side->ep->fid));
	MUST(fi_close(&side->cq->fid));
	MUST(fi_close(&side->av->fid));
	MUST(fi_close(&side->domain->fid));
	MUST(fi_close(&side->fabric->fid));
	fi_freeinfo(side->info);
}

static void publish(struct side *side, int place)
{
	struct name *name = &shared->names[place];

	name->len = sizeof name->bytes;
	MUST(fi_getname(&side->ep->fid, name->bytes, &name->len));
}

static void learn(struct side *side, int place)
{
	RETURNS(fi_av_insert(side->av, shared->names[place].bytes, 1, &side->peers[place], 0, NULL), 1);
}

/* Takes completions. */
static void progress(struct side *side)
{
	struct fi_cq_tagged_entry entry;
	struct fi_cq_err_entry error = { 0 };
	ssize_t got;

	while ((got = fi_cq_read(side->cq, &entry, 1)) == 1) {
		if (entry.flags & FI_RECV)
			side->received++;
		else
			side->sent++;
	}
	if (got == -FI_EAVAIL) {
		MUST(fi_cq_readerr(side->cq, &error, 0));
		die("a completion in error: %s", fi_strerror(error.err));
	}
	if (got != -FI_EAGAIN)
		die("fi_cq_read: %zd", got);
}

/* `processes` processes reach this point; each makes progress meanwhile. */
static void barrier(int number, int processes, struct side *sides, int count)
{
	double limit = now() + SECONDS;

	shared->arrived[number]++;
	while (shared->arrived[number] < processes) {
		for (int i = 0; i < count; i++)
			progress(&sides[i]);
		if (now() > limit)
			die("another process does not reach point %d", number);
	}
}

#define POST(side, call)                                                                                             \
	do {                                                                                                         \
		double until = now() + SECONDS;                                                                      \
		long posted;                                                                                         \
		while ((posted = (long)(call)) == -FI_EAGAIN && now() < until)                                       \
			progress(side);                                                                              \
		if (posted)                                                                                          \
			die("line %d: %s: %ld", __LINE__, #call, posted);                                            \
	} while (0)

static void wait_for(struct side *side, int sent, int received)
{
	double limit = now() + SECONDS;

	while (side->sent < sent || side->received < received) {
		progress(side);
		if (now() > limit)
			die("%d of %d sent, %d of %d received", side->sent, sent, side->received, received);
	}
	IS(side->sent == sent && side->received == received);
	side->sent = side->received = 0;
}

/* ---- all to all ---- */

enum { PROCESSES = 4, EACH = 6, ALL = PROCESSES * EACH };

static void be_process(int number)
{
	static struct side sides[EACH];

	for (int i = 0; i < EACH; i++) {
		open_side(&sides[i], false);
		publish(&sides[i], number * EACH + i);
	}
	barrier(0, PROCESSES, sides, EACH);
	for (int i = 0; i < EACH; i++) {
		struct side *side = &sides[i];

		for (int other = 0; other < ALL; other++) {
			learn(side, other);
			POST(side, fi_trecv(side->ep, &side->in[other], 8, NULL, FI_ADDR_UNSPEC, (uint64_t)other, 0, NULL));
		}
	}
	barrier(1, PROCESSES, sides, EACH);
	for (int step = 0; step < ALL; step++) {
		for (int i = 0; i < EACH; i++) {
			struct side *side = &sides[i];
			int own = number * EACH + i, other = (own + step) % ALL;

			side->out[other] = (uint64_t)(own * 1000 + other);
			POST(side, fi_tsend(side->ep, &side->out[other], 8, NULL, side->peers[other], (uint64_t)own, NULL));
		}
	}
	double limit = now() + SECONDS;
	for (int done = 0; done < EACH;) {
		done = 0;
		for (int i = 0; i < EACH; i++) {
			progress(&sides[i]);
			done += sides[i].sent == ALL && sides[i].received == ALL;
		}
		if (now() > limit)
			die("%d of %d endpoints are done", done, EACH);
	}
	for (int i = 0; i < EACH; i++)
		for (int other = 0; other < ALL; other++)
			IS(sides[i].in[other] == (uint64_t)(other * 1000 + number * EACH + i));
	barrier(2, PROCESSES, sides, EACH);
	for (int i = 0; i < EACH; i++) {
		IS(sides[i].sent == ALL && sides[i].received == ALL);
		close_side(&sides[i]);
	}
}

static int check_all(void)
{
	pid_t pids[PROCESSES];
	int status = 0;

	for (int i = 1; i < PROCESSES; i++) {
		pids[i] = child("a process");
		if (pids[i] == 0) {
			be_process(i);
			exit(0);
		}
	}
	be_process(0);
	for (int i = 1; i < PROCESSES; i++)
		status |= status_of(pids[i], "a process");
	return status;
}

/* ---- idle peers ---- */

enum { IDLE = 20, ROUNDS = 2 };

static int check_idle(void)
{
	static struct side sides[IDLE];
	pid_t pid = child("peers");
	bool hub = pid != 0;
	int count = hub ? 1 : IDLE;

	for (int i = 0; i < count; i++) {
		open_side(&sides[i], false);
		publish(&sides[i], hub ? IDLE : i);
	}
	barrier(0, 2, sides, count);
	for (int i = 0; i < count; i++)
		for (int other = 0; other <= IDLE; other++)
			learn(&sides[i], other);
	/* one peer after the other sends to the endpoint with few links and gets an answer */
	for (int turn = 0; turn < IDLE * ROUNDS; turn++) {
		int peer = turn % IDLE;
		struct side *side = &sides[hub ? 0 : peer];
		fi_addr_t to = side->peers[hub ? peer : IDLE];

		side->in[0] = 0;
		side->out[0] = (uint64_t)turn + 5;
		POST(side, fi_recv(side->ep, &side->in[0], 8, NULL, FI_ADDR_UNSPEC, NULL));
		if (hub)
			wait_for(side, 0, 1);
		POST(side, fi_send(side->ep, &side->out[0], 8, NULL, to, NULL));
		wait_for(side, 1, hub ? 0 : 1);
		IS(side->in[0] == (uint64_t)turn + 5);
	}
	barrier(1, 2, sides, count);
	for (int i = 0; i < count; i++)
		close_side(&sides[i]);
	if (!hub)
		exit(0);
	return status_of(pid, "peers");
}

/* ---- addresses ---- */

static int check_anywhere(void)
{
	static struct side side;
	pid_t pid = child("sender");
	bool receiver = pid != 0;
	struct ifaddrs *all, *each;
	int number = 0;

	open_side(&side, receiver);
	publish(&side, receiver);
	barrier(0, 2, &side, 1);
	uint16_t port = ((struct sockaddr_in *)shared->names[1].bytes)->sin_port;
	IS(port);
	MUST(getifaddrs(&all));
	for (each = all; each; each = each->ifa_next) {
		struct sockaddr_in6 addr; /* larger than that of IPv4 */
		fi_addr_t to;

		if (!each->ifa_addr || (each->ifa_addr->sa_family != AF_INET && each->ifa_addr->sa_family != AF_INET6))
			continue;
		memset(&addr, 0, sizeof addr);
		memcpy(&addr, each->ifa_addr,
		       each->ifa_addr->sa_family == AF_INET ? sizeof(struct sockaddr_in) : sizeof addr);
		addr.sin6_port = port; /* both families have it at the same place */
		number++;
		if (receiver) {
			POST(&side, fi_recv(side.ep, &side.in[0], 8, NULL, FI_ADDR_UNSPEC, NULL));
			wait_for(&side, 0, 1);
			IS(side.in[0] == (uint64_t)number);
			continue;
		}
		RETURNS(fi_av_insert(side.av, &addr, 1, &to, 0, NULL), 1);
		side.out[0] = (uint64_t)number;
		POST(&side, fi_send(side.ep, &side.out[0], 8, NULL, to, NULL));
		wait_for(&side, 1, 0);
	}
	freeifaddrs(all);
	IS(number >= 1);
	barrier(1, 2, &side, 1);
	close_side(&side);
	if (!receiver)
		exit(0);
	return status_of(pid, "sender");
}

/* ---- fork ---- */

static void exchange(struct side *side, bool begins, uint64_t number)
{
	side->out[0] = number;
	POST(side, fi_recv(side->ep, &side->in[0], 8, NULL, FI_ADDR_UNSPEC, NULL));
	if (begins)
		POST(side, fi_send(side->ep, &side->out[0], 8, NULL, side->peers[!begins], NULL));
	wait_for(side, begins, 1);
	IS(side->in[0] == number);
	if (!begins) {
		POST(side, fi_send(side->ep, &side->out[0], 8, NULL, side->peers[!begins], NULL));
		wait_for(side, 1, 0);
	}
}

static int check_forked(void)
{
	enum { CHILDREN = 12, MESSAGES = 200 };
	static struct side side;
	pid_t pid = child("peer"), children[CHILDREN];
	bool forks = pid != 0;
	int status = 0;

	open_side(&side, false);
	publish(&side, forks);
	barrier(0, 2, &side, 1);
	learn(&side, 0);
	learn(&side, 1);
	for (int i = 0; i < CHILDREN; i++) {
		uint64_t base = (uint64_t)i * MESSAGES + 1;

		exchange(&side, forks, base);
		if (forks) {
			children[i] = child("child");
			if (children[i] == 0) {
				/* time for the parent to go on, in some of the children */
				if (i % 4 == 3)
					usleep(20000);
				if (i % 2)
					close_side(&side);
				if (i % 3)
					exit(0);
				_exit(0);
			}
		}
		for (uint64_t n = 1; n < MESSAGES; n++)
			exchange(&side, forks, base + n);
		if (forks)
			status |= status_of(children[i], "child");
		exchange(&side, forks, base + MESSAGES);
	}
	barrier(1, 2, &side, 1);
	close_side(&side);
	if (!forks)
		exit(0);
	return status | status_of(pid, "peer");
}

/* ---- aliases ---- */

static int check_alias(void)
{
	struct side side = { 0 };
	struct fi_cq_attr attr = { .format = FI_CQ_FORMAT_TAGGED, .wait_obj = FI_WAIT_NONE };
	struct fid_ep *ep, *alias = NULL;
	struct fid_cq *cq;

	open_side(&side, false);
	MUST(fi_cq_open(side.domain, &attr, &cq, NULL));
	MUST(fi_endpoint(side.domain, side.info, &ep, NULL));
	MUST(fi_ep_bind(ep, &side.av->fid, 0));
	MUST(fi_ep_alias(ep, &alias, FI_TRANSMIT));
	/* binding by the alias is binding of the endpoint */
	MUST(fi_ep_bind(alias, &cq->fid, FI_TRANSMIT | FI_RECV));
	RETURNS(fi_ep_bind(ep, &cq->fid, FI_TRANSMIT | FI_RECV), -FI_EINVAL);
	MUST(fi_enable(alias));
	RETURNS(fi_close(&ep->fid), -FI_EBUSY);
	RETURNS(fi_close(&cq->fid), -FI_EBUSY);
	MUST(fi_close(&alias->fid));
	/* the endpoint is still bound */
	RETURNS(fi_close(&cq->fid), -FI_EBUSY);
	MUST(fi_close(&ep->fid));
	MUST(fi_close(&cq->fid));
	/* FI_MULTI_RECV takes one buffer */
	struct iovec iov[2] = { { side.in, 64 }, { side.out, 64 } };
	struct fi_msg msg = { .msg_iov = iov, .iov_count = 2, .addr = FI_ADDR_UNSPEC };
	RETURNS(fi_recvmsg(side.ep, &msg, FI_MULTI_RECV), -FI_EINVAL);
	msg.iov_count = 1;
	MUST(fi_recvmsg(side.ep, &msg, FI_MULTI_RECV));
	close_side(&side);
	return 0;
}

int main(int argc, char **argv)
{
	static const struct {
		const char *name;
		int (*check)(void);
	} modes[] = {
		{ "all", check_all },	    { "idle", check_idle },   { "anywhere", check_anywhere },
		{ "forked", check_forked }, { "alias", check_alias },
	};

	if (argc != 4)
		die("usage: rdm_links MODE PROV NODE");
	provider = argv[2];
	node = argv[3];
	role = argv[1];
	shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (shared == MAP_FAILED)
		die("mmap: %s", strerror(errno));
	alarm(85);
	for (size_t i = 0; i < sizeof modes / sizeof *modes; i++)
		if (!strcmp(argv[1], modes[i].name))
			return modes[i].check();
	die("no such mode");
}
