/* Connections of endpoints with many peers, from fi_endpoint(3), fi_getinfo(3), fi_cm(3), fi_av(3)
 * and fi_weft(7):
 *
 *   rdm_links all PROV NODE      24 endpoints in 4 processes connect all to all at once
 *   rdm_links idle PROV NODE     an endpoint in the one process, 20 in the other;
 *                                FI_WEFT_MAX_LINKS=4 keeps none out
 *   rdm_links anywhere PROV NODE an endpoint without source address is reached at each address of
 *                                the machine
 *   rdm_links forked PROV NODE   children of a process with endpoints close them or end; the parent
 *                                goes on
 *   rdm_links alias PROV NODE    what an alias keeps in use, and binding by an alias
 *
 * Ends with 0, or says what went wrong. Plain libfabric 1.17. */
#define SECONDS 40
#include "rdm_side.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netinet/in.h>
#include <stdatomic.h>
#include <sys/mman.h>

#define MOST 32

/* An endpoint, with the addresses of all others. Its two queues are one. */
struct member {
	struct side side;
	fi_addr_t peers[MOST];
	uint64_t in[MOST], out[MOST];
	int sent, received;
};

/* Memory of all processes. */
static struct {
	struct name names[MOST];
	_Atomic int arrived[64];
} *shared;

static void open_member(struct member *member, bool anywhere)
{
	struct fi_info *info;

	wanted.addr_format = FI_SOCKADDR;
	info = offered();
	if (anywhere) {
		free(info->src_addr);
		info->src_addr = NULL;
		info->src_addrlen = 0;
	}
	memset(member, 0, sizeof *member);
	open_domain_with(&member->side, info);
	member->side.tx = member->side.rx = queue(&member->side, 0);
	member->side.ep = endpoint_on(&member->side, 0);
}

static void publish(struct member *member, int place)
{
	shared->names[place] = name_of(member->side.ep);
}

static void learn(struct member *member, int place)
{
	member->peers[place] = insert(&member->side, &shared->names[place]);
}

/* Takes completions. */
static void progress(struct member *member)
{
	struct fi_cq_tagged_entry entry;
	struct fi_cq_err_entry error = { 0 };
	ssize_t got;

	while ((got = fi_cq_read(member->side.tx, &entry, 1)) == 1) {
		if (entry.flags & FI_RECV)
			member->received++;
		else
			member->sent++;
	}
	if (got == -FI_EAVAIL) {
		MUST(fi_cq_readerr(member->side.tx, &error, 0));
		die("a completion in error: %s", fi_strerror(error.err));
	}
	if (got != -FI_EAGAIN)
		die("fi_cq_read: %zd", got);
}

/* `processes` processes reach this point; each makes progress meanwhile. */
static void barrier(int number, int processes, struct member *members, int count)
{
	double limit = now() + SECONDS;

	shared->arrived[number]++;
	while (shared->arrived[number] < processes) {
		for (int i = 0; i < count; i++)
			progress(&members[i]);
		if (now() > limit)
			die("another process does not reach point %d", number);
	}
}

static void wait_for(struct member *member, int sent, int received)
{
	double limit = now() + SECONDS;

	while (member->sent < sent || member->received < received) {
		progress(member);
		if (now() > limit)
			die("%d of %d sent, %d of %d received", member->sent, sent, member->received, received);
	}
	IS(member->sent == sent && member->received == received);
	member->sent = member->received = 0;
}

/* ---- all to all ---- */

enum { PROCESSES = 4, EACH = 6, ALL = PROCESSES * EACH };

static void be_process(int number)
{
	static struct member members[EACH];

	for (int i = 0; i < EACH; i++) {
		open_member(&members[i], false);
		publish(&members[i], number * EACH + i);
	}
	barrier(0, PROCESSES, members, EACH);
	for (int i = 0; i < EACH; i++) {
		struct member *member = &members[i];

		for (int other = 0; other < ALL; other++) {
			learn(member, other);
			POST(member, fi_trecv(member->side.ep, &member->in[other], 8, NULL, FI_ADDR_UNSPEC, (uint64_t)other, 0, NULL));
		}
	}
	barrier(1, PROCESSES, members, EACH);
	for (int step = 0; step < ALL; step++) {
		for (int i = 0; i < EACH; i++) {
			struct member *member = &members[i];
			int own = number * EACH + i, other = (own + step) % ALL;

			member->out[other] = (uint64_t)(own * 1000 + other);
			POST(member, fi_tsend(member->side.ep, &member->out[other], 8, NULL, member->peers[other], (uint64_t)own, NULL));
		}
	}
	double limit = now() + SECONDS;
	for (int done = 0; done < EACH;) {
		done = 0;
		for (int i = 0; i < EACH; i++) {
			progress(&members[i]);
			done += members[i].sent == ALL && members[i].received == ALL;
		}
		if (now() > limit)
			die("%d of %d endpoints are done", done, EACH);
	}
	for (int i = 0; i < EACH; i++)
		for (int other = 0; other < ALL; other++)
			IS(members[i].in[other] == (uint64_t)(other * 1000 + number * EACH + i));
	barrier(2, PROCESSES, members, EACH);
	for (int i = 0; i < EACH; i++) {
		IS(members[i].sent == ALL && members[i].received == ALL);
		close_side(&members[i].side);
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
	static struct member members[IDLE];
	pid_t pid = child("peers");
	bool hub = pid != 0;
	int count = hub ? 1 : IDLE;

	for (int i = 0; i < count; i++) {
		open_member(&members[i], false);
		publish(&members[i], hub ? IDLE : i);
	}
	barrier(0, 2, members, count);
	for (int i = 0; i < count; i++)
		for (int other = 0; other <= IDLE; other++)
			learn(&members[i], other);
	/* one peer after the other sends to the endpoint with few links and gets an answer */
	for (int turn = 0; turn < IDLE * ROUNDS; turn++) {
		int peer = turn % IDLE;
		struct member *member = &members[hub ? 0 : peer];
		fi_addr_t to = member->peers[hub ? peer : IDLE];

		member->in[0] = 0;
		member->out[0] = (uint64_t)turn + 5;
		POST(member, fi_recv(member->side.ep, &member->in[0], 8, NULL, FI_ADDR_UNSPEC, NULL));
		if (hub)
			wait_for(member, 0, 1);
		POST(member, fi_send(member->side.ep, &member->out[0], 8, NULL, to, NULL));
		wait_for(member, 1, hub ? 0 : 1);
		IS(member->in[0] == (uint64_t)turn + 5);
	}
	barrier(1, 2, members, count);
	for (int i = 0; i < count; i++)
		close_side(&members[i].side);
	if (!hub)
		exit(0);
	return status_of(pid, "peers");
}

/* ---- addresses ---- */

static int check_anywhere(void)
{
	static struct member member;
	pid_t pid = child("sender");
	bool receiver = pid != 0;
	struct ifaddrs *all, *each;
	int number = 0;

	open_member(&member, receiver);
	publish(&member, receiver);
	barrier(0, 2, &member, 1);
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
			POST(&member, fi_recv(member.side.ep, &member.in[0], 8, NULL, FI_ADDR_UNSPEC, NULL));
			wait_for(&member, 0, 1);
			IS(member.in[0] == (uint64_t)number);
			continue;
		}
		RETURNS(fi_av_insert(member.side.av, &addr, 1, &to, 0, NULL), 1);
		member.out[0] = (uint64_t)number;
		POST(&member, fi_send(member.side.ep, &member.out[0], 8, NULL, to, NULL));
		wait_for(&member, 1, 0);
	}
	freeifaddrs(all);
	IS(number >= 1);
	barrier(1, 2, &member, 1);
	close_side(&member.side);
	if (!receiver)
		exit(0);
	return status_of(pid, "sender");
}

/* ---- fork ---- */

static void exchange(struct member *member, bool begins, uint64_t number)
{
	member->out[0] = number;
	POST(member, fi_recv(member->side.ep, &member->in[0], 8, NULL, FI_ADDR_UNSPEC, NULL));
	if (begins)
		POST(member, fi_send(member->side.ep, &member->out[0], 8, NULL, member->peers[!begins], NULL));
	wait_for(member, begins, 1);
	IS(member->in[0] == number);
	if (!begins) {
		POST(member, fi_send(member->side.ep, &member->out[0], 8, NULL, member->peers[!begins], NULL));
		wait_for(member, 1, 0);
	}
}

static int check_forked(void)
{
	enum { CHILDREN = 12, MESSAGES = 200 };
	static struct member member;
	pid_t pid = child("peer"), children[CHILDREN];
	bool forks = pid != 0;
	int status = 0;

	open_member(&member, false);
	publish(&member, forks);
	barrier(0, 2, &member, 1);
	learn(&member, 0);
	learn(&member, 1);
	for (int i = 0; i < CHILDREN; i++) {
		uint64_t base = (uint64_t)i * MESSAGES + 1;

		exchange(&member, forks, base);
		if (forks) {
			children[i] = child("child");
			if (children[i] == 0) {
				/* time for the parent to go on, in some of the children */
				if (i % 4 == 3)
					usleep(20000);
				if (i % 2)
					close_side(&member.side);
				if (i % 3)
					exit(0);
				_exit(0);
			}
		}
		for (uint64_t n = 1; n < MESSAGES; n++)
			exchange(&member, forks, base + n);
		if (forks)
			status |= status_of(children[i], "child");
		exchange(&member, forks, base + MESSAGES);
	}
	barrier(1, 2, &member, 1);
	close_side(&member.side);
	if (!forks)
		exit(0);
	return status | status_of(pid, "peer");
}

/* ---- aliases ---- */

static int check_alias(void)
{
	struct member member = { 0 };
	struct fi_cq_attr attr = { .format = FI_CQ_FORMAT_TAGGED, .wait_obj = FI_WAIT_NONE };
	struct fid_ep *ep, *alias = NULL;
	struct fid_cq *cq;

	open_member(&member, false);
	MUST(fi_cq_open(member.side.domain, &attr, &cq, NULL));
	MUST(fi_endpoint(member.side.domain, member.side.info, &ep, NULL));
	MUST(fi_ep_bind(ep, &member.side.av->fid, 0));
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
	struct iovec iov[2] = { { member.in, 64 }, { member.out, 64 } };
	struct fi_msg msg = { .msg_iov = iov, .iov_count = 2, .addr = FI_ADDR_UNSPEC };
	RETURNS(fi_recvmsg(member.side.ep, &msg, FI_MULTI_RECV), -FI_EINVAL);
	msg.iov_count = 1;
	MUST(fi_recvmsg(member.side.ep, &msg, FI_MULTI_RECV));
	close_side(&member.side);
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
