/* Clients are killed at random moments while they connect; the server must get an event for each.
 *
 *   early PROV NODE COUNT SEED
 *
 * A client that is killed before its connection request leaves nothing. A client that is killed
 * after it leads, within ten seconds of its death, to an error on the event queue, to an error of
 * fi_accept, or to FI_CONNECTED and then FI_SHUTDOWN and a flushed receive. Exits with 0, or prints
 * the failure. Needs only libfabric 1.17; runs on any provider with FI_EP_MSG. */
#include <errno.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>

#define LIMIT 10.0
#define LONGEST 0.02 /* a client's life from the call of fi_connect on, in seconds */
/* further clients, and their life, where none has lived until it was connected: a slow machine */
#define MORE 10
#define LONG_LIFE 1.0
/* the client writes a byte to this descriptor right before it calls fi_connect */
#define READY 3

struct end {
	struct fid_domain *domain;
	struct fid_cq *cq;
	struct fid_mr *mr;
	struct fid_ep *ep;
	uint8_t memory[4096];
};

enum outcome { NOT_ASKED, REFUSED, FAILED, SHUT_DOWN, OUTCOMES };

static const char *const names[OUTCOMES] = { "never asked", "fi_accept failed", "error before connected", "shut down" };
static struct fi_info *info;
static struct fid_fabric *fabric;
static struct fid_eq *eq;

static void die(const char *format, ...)
{
	va_list args;

	va_start(args, format);
	vfprintf(stderr, format, args);
	fprintf(stderr, "\n");
	exit(1);
}

#define MUST(call)                                                                                                   \
	do {                                                                                                         \
		long result = (long)(call);                                                                          \
		if (result < 0)                                                                                      \
			die("%s: %ld (%s)", #call, result, fi_strerror((int)-result));                               \
	} while (0)

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void open_fabric(const char *provider, const char *node, const char *service, uint64_t flags)
{
	struct fi_info *hints = fi_allocinfo();
	struct fi_eq_attr attr = { .wait_obj = FI_WAIT_UNSPEC };

	hints->caps = FI_MSG;
	hints->mode = FI_CONTEXT | FI_CONTEXT2 | FI_RX_CQ_DATA;
	hints->ep_attr->type = FI_EP_MSG;
	hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
	hints->fabric_attr->prov_name = strdup(provider);
	MUST(fi_getinfo(FI_VERSION(1, 17), node, service, flags, hints, &info));
	fi_freeinfo(hints);
	MUST(fi_fabric(info->fabric_attr, &fabric, NULL));
	MUST(fi_eq_open(fabric, &attr, &eq, NULL));
}

static void open_end(struct end *end, struct fi_info *from)
{
	struct fi_cq_attr attr = { .format = FI_CQ_FORMAT_CONTEXT, .wait_obj = FI_WAIT_NONE };

	MUST(fi_domain(fabric, from, &end->domain, NULL));
	MUST(fi_cq_open(end->domain, &attr, &end->cq, NULL));
	MUST(fi_mr_reg(end->domain, end->memory, sizeof end->memory, FI_SEND | FI_RECV, 0, 1, 0, &end->mr, NULL));
	MUST(fi_endpoint(end->domain, from, &end->ep, NULL));
	MUST(fi_ep_bind(end->ep, &eq->fid, 0));
	MUST(fi_ep_bind(end->ep, &end->cq->fid, FI_TRANSMIT | FI_RECV));
	MUST(fi_enable(end->ep));
	MUST(fi_recv(end->ep, end->memory, sizeof end->memory, fi_mr_desc(end->mr), 0, end));
}

static void close_end(struct end *end)
{
	MUST(fi_close(&end->ep->fid));
	MUST(fi_close(&end->mr->fid));
	MUST(fi_close(&end->cq->fid));
	MUST(fi_close(&end->domain->fid));
}

/* Connects, and waits to be killed. */
static void client(const char *provider, const char *node, const char *port)
{
	static struct end end;
	struct fi_eq_cm_entry entry;
	uint32_t kind;

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	open_fabric(provider, node, port, 0);
	open_end(&end, info);
	if (write(READY, "", 1) != 1)
		die("pipe: %s", strerror(errno));
	MUST(fi_connect(end.ep, info->dest_addr, NULL, 0));
	for (;;)
		fi_eq_sread(eq, &kind, &entry, sizeof entry, 1000, 0);
}

/* The receive completes in error: no message was ever sent. */
static void expect_flush(struct end *end, double limit)
{
	struct fi_cq_err_entry error = { 0 };
	struct fi_cq_entry entry;
	ssize_t got;

	while ((got = fi_cq_read(end->cq, &entry, 1)) == -FI_EAGAIN)
		if (now() > limit)
			die("connected and shut down, and the receive is still out");
	if (got != -FI_EAVAIL)
		die("the receive: %ld", (long)got);
	if (fi_cq_readerr(end->cq, &error, 0) != 1 || error.op_context != end)
		die("the receive's error entry");
}

/* One client: starts it, kills it after `life` seconds, and waits for the events that it leaves. */
static enum outcome round_of(char **client_argv, double life, double *notice)
{
	static struct end end;
	int asked = 0, connected = 0;
	enum outcome outcome = OUTCOMES;
	double killed = 0, kill_at;
	char ready;
	int fds[2];
	pid_t pid;

	if (pipe(fds))
		die("pipe: %s", strerror(errno));
	pid = fork();
	if (pid == 0) {
		dup2(fds[1], READY);
		execv("/proc/self/exe", client_argv);
		_exit(127);
	}
	close(fds[1]);
	if (read(fds[0], &ready, 1) != 1)
		die("a client ended before it connected");
	close(fds[0]);
	kill_at = now() + life;
	memset(&end, 0, sizeof end);
	while (outcome == OUTCOMES) {
		struct fi_eq_err_entry error = { 0 };
		struct fi_eq_cm_entry entry;
		uint32_t kind = 0;
		double left = killed ? (asked ? 1.0 : 0.3) : kill_at - now();
		ssize_t got = fi_eq_sread(eq, &kind, &entry, sizeof entry, left > 0 ? (int)(left * 1000) + 1 : 0, 0);

		if (!killed && now() >= kill_at) {
			kill(pid, SIGKILL);
			waitpid(pid, NULL, 0);
			killed = now();
			/* its request may have come since the queue was read */
			if (got == -FI_EAGAIN || got == -FI_ETIMEDOUT)
				continue;
		}
		if (got == -FI_EAGAIN || got == -FI_ETIMEDOUT) {
			if (killed && !asked && now() > killed + 0.3)
				outcome = NOT_ASKED;
			if (killed && now() > killed + LIMIT)
				die("asked %d, connected %d, and no event within %.0f s", asked, connected, LIMIT);
		} else if (got == -FI_EAVAIL) {
			MUST(fi_eq_readerr(eq, &error, 0));
			if (!killed)
				die("an error while the client lives: %s", fi_strerror(error.err));
			if (asked)
				outcome = FAILED;
		} else if (got < 0) {
			die("fi_eq_sread: %ld", (long)got);
		} else if (kind == FI_CONNREQ) {
			asked = 1;
			open_end(&end, entry.info);
			if (fi_accept(end.ep, NULL, 0) < 0)
				outcome = REFUSED;
			fi_freeinfo(entry.info);
		} else if (kind == FI_CONNECTED) {
			connected = 1;
		} else if (kind == FI_SHUTDOWN && connected) {
			outcome = SHUT_DOWN;
		} else {
			die("event %u, asked %d, connected %d", kind, asked, connected);
		}
	}
	if (!killed) {
		kill(pid, SIGKILL);
		waitpid(pid, NULL, 0);
		killed = now();
	}
	*notice = now() - killed;
	if (outcome == SHUT_DOWN)
		expect_flush(&end, killed + LIMIT);
	if (asked)
		close_end(&end);
	return outcome;
}

int main(int argc, char **argv)
{
	char port[16];
	struct fid_pep *pep;
	union {
		struct sockaddr_in v4;
		struct sockaddr_in6 v6;
	} address;
	size_t length = sizeof address;
	char *client_argv[] = { argv[0], "client", NULL, NULL, port, NULL };
	unsigned counts[OUTCOMES] = { 0 };
	double longest = 0;
	int i;

	if (argc == 5 && !strcmp(argv[1], "client")) {
		client(argv[2], argv[3], argv[4]);
		return 1;
	}
	if (argc != 5)
		die("early PROV NODE COUNT SEED");
	client_argv[2] = argv[1];
	client_argv[3] = argv[2];
	srand48(atol(argv[4]));
	open_fabric(argv[1], argv[2], NULL, FI_SOURCE);
	MUST(fi_passive_ep(fabric, info, &pep, NULL));
	MUST(fi_pep_bind(pep, &eq->fid, 0));
	MUST(fi_listen(pep));
	MUST(fi_getname(&pep->fid, &address, &length));
	snprintf(port, sizeof port, "%d", ntohs(address.v4.sin_port));
	for (i = 0; i < atoi(argv[3]) || (!counts[SHUT_DOWN] && i < atoi(argv[3]) + MORE); i++) {
		double notice, life = i < atoi(argv[3]) ? drand48() * LONGEST : LONG_LIFE;
		enum outcome outcome = round_of(client_argv, life, &notice);

		counts[outcome]++;
		if (outcome != NOT_ASKED && notice > longest)
			longest = notice;
	}
	for (i = 0; i < OUTCOMES; i++)
		printf("%s: %u\n", names[i], counts[i]);
	printf("longest until the server knew: %.3f s, seed %s\n", longest, argv[4]);
	if (!counts[SHUT_DOWN])
		die("no client lived until it was connected");
	return 0;
}
