/* Connections that are being made while other processes end, and such that the accepting side ends at once, from
 * fi_cm(3) and fi_eq(3). WEFT_TEST_XRC=1 requests XRC.
 *
 *   msg_ends others PROV NODE     clients are killed when they have connected, while other processes connect to the
 *                                 same server: each of their requests leads to FI_CONNECTED
 *   msg_ends abandoned PROV NODE  an endpoint is closed after fi_accept: the peer has an event within 5 s
 *   msg_ends killed PROV NODE     a server is killed after fi_accept, of its first connection or of a second one:
 *                                 each endpoint of its peer has an event within 5 s
 *   msg_ends beside PROV NODE     the same while another process of the server's host stays, to which the peer is
 *                                 connected: that connection has no event
 *   msg_ends redirected PROV NODE clients are killed when a second server of the host is about to accept: its endpoint
 *                                 has an event within 5 s
 *   msg_ends exits PROV NODE      clients exit when they are connected, or then shut down or close their endpoint
 *                                 first: the server gets FI_CONNECTED, then FI_SHUTDOWN, within 5 s
 *   msg_ends unanswered PROV NODE clients are killed before the server accepts: fi_accept is -FI_ECONNRESET
 *   msg_ends names PROV NODE      an enabled endpoint has an address; of a connection, each side's own address is that
 *                                 of the peer at the other side, and the accepting side's that of the listener
 *
 * A peer that is not told finds the end after 10 s.
 *
 * Ends with 0, or says what went wrong. Plain libfabric 1.17. */
#include "rdm_processes.h"

#include <arpa/inet.h>

enum { OTHERS = 3, EACH = 3, ROUNDS = 10 };
#define KILLING_SECONDS 6
#define EVENT_SECONDS 5

/* Words of the board */
enum { STOP, FAILED, CONNECTIONS, VICTIM, ENDED, PORT };

struct host {
	struct fi_info *info;
	struct fid_fabric *fabric;
	struct fid_eq *eq;
	struct fid_domain *domain;
	struct fid_cq *cq;
	struct fid_ep *srx;
};

static void open_host(struct host *host, const char *service)
{
	struct fi_info *hints = fi_allocinfo();
	struct fi_cq_attr attr = { .format = FI_CQ_FORMAT_CONTEXT, .wait_obj = FI_WAIT_NONE };
	struct fi_eq_attr eq_attr = { .wait_obj = FI_WAIT_UNSPEC };

	hints->caps = FI_MSG;
	hints->mode = FI_CONTEXT | FI_CONTEXT2 | FI_RX_CQ_DATA;
	hints->ep_attr->type = FI_EP_MSG;
	hints->ep_attr->protocol = asked_protocol();
	hints->ep_attr->rx_ctx_cnt = FI_SHARED_CONTEXT;
	hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
	hints->fabric_attr->prov_name = strdup(provider);
	MUST(fi_getinfo(FI_VERSION(1, 17), node, service, FI_SOURCE, hints, &host->info));
	fi_freeinfo(hints);
	MUST(fi_fabric(host->info->fabric_attr, &host->fabric, NULL));
	MUST(fi_eq_open(host->fabric, &eq_attr, &host->eq, NULL));
	MUST(fi_domain(host->fabric, host->info, &host->domain, NULL));
	MUST(fi_cq_open(host->domain, &attr, &host->cq, NULL));
	MUST(fi_srx_context(host->domain, host->info->rx_attr, &host->srx, NULL));
}

static void close_host(struct host *host)
{
	MUST(fi_close(&host->srx->fid));
	MUST(fi_close(&host->cq->fid));
	MUST(fi_close(&host->domain->fid));
	MUST(fi_close(&host->eq->fid));
	MUST(fi_close(&host->fabric->fid));
	fi_freeinfo(host->info);
}

static struct fid_ep *open_ep(struct host *host, struct fi_info *info)
{
	struct fid_ep *ep;

	MUST(fi_endpoint(host->domain, info, &ep, NULL));
	MUST(fi_ep_bind(ep, &host->eq->fid, 0));
	MUST(fi_ep_bind(ep, &host->cq->fid, FI_TRANSMIT | FI_RECV));
	MUST(fi_ep_bind(ep, &host->srx->fid, 0));
	MUST(fi_enable(ep));
	return ep;
}

/* The server at a place of the board. */
static struct fid_ep *dial_at(struct host *host, int place)
{
	struct fid_ep *ep = open_ep(host, host->info);

	UNTIL(atomic_load(&board->named[place]), pause_ms(1));
	MUST(fi_connect(ep, board->names[place].bytes, NULL, 0));
	return ep;
}

static struct fid_ep *dial(struct host *host) { return dial_at(host, 0); }

static void listen_as(struct host *host, struct fid_pep **pep, int place)
{
	struct name *name = &board->names[place];

	MUST(fi_passive_ep(host->fabric, host->info, pep, NULL));
	MUST(fi_pep_bind(*pep, &host->eq->fid, 0));
	MUST(fi_listen(*pep));
	name->len = sizeof name->bytes;
	MUST(fi_getname(&(*pep)->fid, name->bytes, &name->len));
	atomic_store(&board->named[place], 1);
}

static void listen_at(struct host *host, struct fid_pep **pep) { listen_as(host, pep, 0); }

/* The next event; 0 for an error, -1 if there is none. */
static int next_event(struct host *host, int timeout, struct fi_eq_cm_entry *entry, struct fi_eq_err_entry *error)
{
	uint32_t kind = 0;
	ssize_t len;

	while ((len = fi_eq_sread(host->eq, &kind, entry, sizeof *entry, timeout, 0)) == -FI_EINTR)
		;
	if (len == -FI_EAGAIN || len == -FI_ETIMEDOUT)
		return -1;
	if (len == -FI_EAVAIL) {
		memset(error, 0, sizeof *error);
		MUST(fi_eq_readerr(host->eq, error, 0));
		return 0;
	}
	MUST(len);
	return (int)kind;
}

/* ---- others ---- */

/* Accepts what comes, and closes what has ended. */
static void others_server(int place)
{
	struct host host;
	struct fid_pep *pep;

	open_host(&host, "0");
	listen_as(&host, &pep, place);
	while (told(STOP) < 2) {
		struct fi_eq_cm_entry entry;
		struct fi_eq_err_entry error;
		int kind = next_event(&host, 10, &entry, &error);

		if (kind == FI_CONNREQ) {
			struct fid_ep *ep = open_ep(&host, entry.info);

			/* its client may have been killed */
			if (fi_accept(ep, NULL, 0))
				MUST(fi_close(&ep->fid));
			fi_freeinfo(entry.info);
		} else if (kind == 0 || kind == FI_SHUTDOWN) {
			MUST(fi_close(kind ? entry.fid : error.fid));
		}
	}
	_exit(0);
}

static void killed_client(int count)
{
	struct host host;

	open_host(&host, NULL);
	for (int i = 0; i < count; i++) {
		struct fi_eq_cm_entry entry;
		struct fi_eq_err_entry error;

		dial(&host);
		IS(next_event(&host, 10000, &entry, &error) == FI_CONNECTED);
	}
	kill(getpid(), SIGKILL);
}

static void other_client(int argument)
{
	struct host host;

	(void)argument;
	open_host(&host, NULL);
	while (!told(STOP)) {
		struct fid_ep *ep[EACH];

		for (int i = 0; i < EACH; i++)
			ep[i] = dial(&host);
		for (int i = 0; i < EACH; i++) {
			struct fi_eq_cm_entry entry;
			struct fi_eq_err_entry error;
			int kind = next_event(&host, 20000, &entry, &error);

			if (kind == FI_CONNECTED) {
				add(CONNECTIONS);
				continue;
			}
			fprintf(stderr, "%s: event %d, error %d\n", role, kind, kind ? 0 : error.err);
			add(FAILED);
		}
		for (int i = 0; i < EACH; i++)
			MUST(fi_close(&ep[i]->fid));
	}
	close_host(&host);
}

static void check_others(void)
{
	pid_t server = start("server", others_server, 0), others[OTHERS];
	double end = now() + KILLING_SECONDS;

	UNTIL(atomic_load(&board->named[0]), pause_ms(1));
	for (int i = 0; i < OTHERS; i++)
		others[i] = start("other", other_client, 0);
	for (int i = 0; now() < end || !told(CONNECTIONS); i++) {
		pid_t pid = start("killed", killed_client, 1 + i % EACH);
		int status;

		IS(waitpid(pid, &status, 0) == pid && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
	}
	put(STOP, 1);
	for (int i = 0; i < OTHERS; i++)
		IS(status_of(others[i], "other") == 0);
	put(STOP, 2);
	IS(status_of(server, "server") == 0);
	IS(told(FAILED) == 0);
}

/* ---- abandoned ---- */

static void abandoned_client(int argument)
{
	struct host host;

	(void)argument;
	open_host(&host, NULL);
	/* the start of the server does not count */
	UNTIL(atomic_load(&board->named[0]), pause_ms(1));
	for (int i = 0; i < ROUNDS; i++) {
		double begin = now();
		struct fid_ep *ep = dial(&host);
		struct fi_eq_cm_entry entry;
		struct fi_eq_err_entry error;
		int kind = next_event(&host, 20000, &entry, &error);

		if (kind == FI_CONNECTED)
			kind = next_event(&host, 20000, &entry, &error);
		if (now() - begin > EVENT_SECONDS)
			die("event %d, error %d, after %.1f s", kind, kind ? 0 : error.err, now() - begin);
		IS(kind == 0 || kind == FI_SHUTDOWN);
		MUST(fi_close(&ep->fid));
	}
	close_host(&host);
}

static void check_abandoned(void)
{
	pid_t pid = start("client", abandoned_client, 0);
	struct fid_pep *pep;
	struct host host;

	open_host(&host, "0");
	listen_at(&host, &pep);
	for (int i = 0; i < ROUNDS; i++) {
		struct fi_eq_cm_entry entry;
		struct fi_eq_err_entry error;
		struct fid_ep *ep;

		IS(next_event(&host, 20000, &entry, &error) == FI_CONNREQ);
		ep = open_ep(&host, entry.info);
		MUST(fi_accept(ep, NULL, 0));
		fi_freeinfo(entry.info);
		MUST(fi_close(&ep->fid));
	}
	IS(status_of(pid, "client") == 0);
	MUST(fi_close(&pep->fid));
	close_host(&host);
}

/* ---- killed ---- */

/* The number of connections of a round. */
static int connections_of(int round) { return 1 + round % 2; }

static void mortal_server(int round)
{
	struct fi_eq_cm_entry entry;
	struct fi_eq_err_entry error;
	struct fid_pep *pep;
	struct host host;

	open_host(&host, "0");
	listen_as(&host, &pep, round);
	for (int left = connections_of(round); left;) {
		int kind = next_event(&host, 20000, &entry, &error);

		/* the peer may be connected, and dial again, before this side is connected */
		IS(kind == FI_CONNREQ || kind == FI_CONNECTED);
		if (kind == FI_CONNREQ) {
			MUST(fi_accept(open_ep(&host, entry.info), NULL, 0));
			left--;
		}
	}
	kill(getpid(), SIGKILL);
}

static void bereaved_client(int beside)
{
	struct fid_ep *kept = NULL;
	struct host host;

	open_host(&host, NULL);
	if (beside) {
		struct fi_eq_cm_entry entry;
		struct fi_eq_err_entry error;

		kept = dial_at(&host, ROUNDS);
		IS(next_event(&host, 20000, &entry, &error) == FI_CONNECTED);
	}
	for (int round = 0; round < ROUNDS; round++) {
		struct fi_eq_cm_entry entry;
		struct fi_eq_err_entry error;
		struct fid_ep *ep[2];
		int count = connections_of(round), ended = 0;
		double begin;

		for (int i = 0; i < count; i++) {
			ep[i] = dial_at(&host, round);
			if (i + 1 < count)
				IS(next_event(&host, 20000, &entry, &error) == FI_CONNECTED);
		}
		begin = now();
		while (ended < count) {
			int kind = next_event(&host, 20000, &entry, &error);

			if (now() - begin > EVENT_SECONDS)
				die("round %d: event %d, error %d, after %.1f s", round, kind, kind ? 0 : error.err, now() - begin);
			IS(kind == 0 || kind == FI_SHUTDOWN || kind == FI_CONNECTED);
			IS(!kept || (kind ? entry.fid : error.fid) != &kept->fid);
			ended += kind != FI_CONNECTED;
		}
		for (int i = 0; i < count; i++)
			MUST(fi_close(&ep[i]->fid));
	}
	if (kept)
		MUST(fi_close(&kept->fid));
	close_host(&host);
}

static void kill_servers(int beside)
{
	pid_t client = start("client", bereaved_client, beside);

	for (int round = 0; round < ROUNDS; round++) {
		pid_t pid = start("server", mortal_server, round);
		int status;

		IS(waitpid(pid, &status, 0) == pid && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
	}
	IS(status_of(client, "client") == 0);
}

static void check_killed(void) { kill_servers(0); }

static void check_beside(void)
{
	pid_t stays = start("stays", others_server, ROUNDS);

	kill_servers(1);
	put(STOP, 2);
	IS(status_of(stays, "stays") == 0);
}

/* ---- redirected ---- */

/* Is connected to one server of the host, so that its request to the other one names what the first one has. */
static void doomed_client(int argument)
{
	struct fi_eq_cm_entry entry;
	struct fi_eq_err_entry error;
	struct host host;

	(void)argument;
	open_host(&host, NULL);
	dial(&host);
	IS(next_event(&host, 20000, &entry, &error) == FI_CONNECTED);
	put(VICTIM, getpid());
	dial_at(&host, 1);
	for (;;)
		next_event(&host, 1000, &entry, &error);
}

static void second_server(int argument)
{
	struct fid_pep *pep;
	struct host host;

	(void)argument;
	open_host(&host, "0");
	listen_as(&host, &pep, 1);
	for (int i = 0; i < ROUNDS; i++) {
		struct fi_eq_cm_entry entry;
		struct fi_eq_err_entry error;
		struct fid_ep *ep;
		pid_t victim;
		double begin;

		IS(next_event(&host, 20000, &entry, &error) == FI_CONNREQ);
		ep = open_ep(&host, entry.info);
		fi_freeinfo(entry.info);
		victim = (pid_t)told(VICTIM);
		IS(victim > 0 && kill(victim, SIGKILL) == 0);
		/* the first process waits for it */
		UNTIL(kill(victim, 0) == -1 && errno == ESRCH, pause_ms(1));
		begin = now();
		/* it may be known that the client has ended */
		if (fi_accept(ep, NULL, 0) == 0) {
			int kind;

			while ((kind = next_event(&host, 20000, &entry, &error)) == FI_CONNECTED)
				;
			if (now() - begin > EVENT_SECONDS)
				die("event %d, error %d, after %.1f s", kind, kind ? 0 : error.err, now() - begin);
			IS(kind == 0 || kind == FI_SHUTDOWN);
		}
		MUST(fi_close(&ep->fid));
		add(ENDED);
	}
	MUST(fi_close(&pep->fid));
	close_host(&host);
}

static void check_redirected(void)
{
	pid_t first = start("first", others_server, 0), second = start("second", second_server, 0);

	for (int i = 0; i < ROUNDS; i++) {
		pid_t client = start("client", doomed_client, 0);
		int status;

		IS(waitpid(client, &status, 0) == client && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
		/* what is next at the second server is of the next client */
		UNTIL(told(ENDED) == (uint64_t)i + 1, pause_ms(1));
	}
	IS(status_of(second, "second") == 0);
	put(STOP, 2);
	IS(status_of(first, "first") == 0);
}

/* ---- exits ---- */

/* What a client does when it is connected, before it exits. */
enum { NOTHING, SHUTDOWN, CLOSE, BOTH, WAYS };

static void leaving_client(int way)
{
	struct fi_eq_cm_entry entry;
	struct fi_eq_err_entry error;
	struct fid_ep *ep;
	struct host host;

	open_host(&host, NULL);
	ep = dial(&host);
	IS(next_event(&host, 20000, &entry, &error) == FI_CONNECTED);
	if (way & SHUTDOWN)
		MUST(fi_shutdown(ep, 0));
	if (way & CLOSE)
		MUST(fi_close(&ep->fid));
	_exit(0);
}

static void left_server(int argument)
{
	struct fid_pep *pep;
	struct host host;

	(void)argument;
	open_host(&host, "0");
	listen_at(&host, &pep);
	for (int i = 0; i < WAYS * ROUNDS; i++) {
		static const int expected[] = { FI_CONNECTED, FI_SHUTDOWN };
		struct fi_eq_cm_entry entry;
		struct fi_eq_err_entry error;
		struct fid_ep *ep;

		IS(next_event(&host, 20000, &entry, &error) == FI_CONNREQ);
		ep = open_ep(&host, entry.info);
		MUST(fi_accept(ep, NULL, 0));
		fi_freeinfo(entry.info);
		for (int j = 0; j < 2; j++) {
			int kind = next_event(&host, EVENT_SECONDS * 1000, &entry, &error);

			if (kind != expected[j])
				die("way %d: event %d instead of %d, error %d", i % WAYS, kind, expected[j], kind ? 0 : error.err);
		}
		MUST(fi_close(&ep->fid));
		add(ENDED);
	}
	MUST(fi_close(&pep->fid));
	close_host(&host);
}

/* What has ended; the result of a process that has failed is that of the program. */
static int has_ended(pid_t server, int count)
{
	int status;

	if (waitpid(server, &status, WNOHANG) == server && status)
		die("the server has failed");
	return told(ENDED) == (uint64_t)count;
}

static void check_exits(void)
{
	pid_t server = start("server", left_server, 0);

	for (int i = 0; i < WAYS * ROUNDS; i++) {
		IS(status_of(start("client", leaving_client, i % WAYS), "client") == 0);
		UNTIL(has_ended(server, i + 1), pause_ms(1));
	}
}

/* ---- unanswered ---- */

static void impatient_client(int argument)
{
	struct fi_eq_cm_entry entry;
	struct fi_eq_err_entry error;
	struct host host;

	(void)argument;
	open_host(&host, NULL);
	dial(&host);
	for (;;)
		next_event(&host, 1000, &entry, &error);
}

static void late_server(int argument)
{
	struct fid_pep *pep;
	struct host host;

	(void)argument;
	open_host(&host, "0");
	listen_at(&host, &pep);
	for (int i = 0; i < ROUNDS; i++) {
		struct fi_eq_cm_entry entry;
		struct fi_eq_err_entry error;
		struct fid_ep *ep;

		IS(next_event(&host, 20000, &entry, &error) == FI_CONNREQ);
		put(VICTIM, i + 1);
		UNTIL(told(FAILED) == (uint64_t)i + 1, pause_ms(1));
		/* with and without the event of the end at the identifier */
		if (i % 2)
			next_event(&host, 100, &entry, &error);
		ep = open_ep(&host, entry.info);
		fi_freeinfo(entry.info);
		RETURNS(fi_accept(ep, NULL, 0), -FI_ECONNRESET);
		MUST(fi_close(&ep->fid));
		add(ENDED);
	}
	MUST(fi_close(&pep->fid));
	close_host(&host);
}

static void check_unanswered(void)
{
	pid_t server = start("server", late_server, 0);

	for (int i = 0; i < ROUNDS; i++) {
		pid_t pid = start("client", impatient_client, 0);
		int status;

		UNTIL(told(VICTIM) == (uint64_t)i + 1, pause_ms(1));
		IS(kill(pid, SIGKILL) == 0 && waitpid(pid, &status, 0) == pid);
		put(FAILED, i + 1);
		UNTIL(has_ended(server, i + 1), pause_ms(1));
	}
}

/* ---- names ---- */

static int port_of(struct fid_ep *ep, int (*call)(struct fid_ep *, void *, size_t *))
{
	struct sockaddr_in name = { 0 };
	size_t length = sizeof name;
	struct in_addr host;

	MUST(call(ep, &name, &length));
	IS(inet_pton(AF_INET, node, &host) == 1 && name.sin_addr.s_addr == host.s_addr);
	IS(length == sizeof name && name.sin_family == AF_INET && name.sin_port);
	return ntohs(name.sin_port);
}

static int own_name(struct fid_ep *ep, void *name, size_t *length) { return fi_getname(&ep->fid, name, length); }

static void named_client(int argument)
{
	struct fi_eq_cm_entry entry;
	struct fi_eq_err_entry error;
	struct fid_ep *ep, *idle;
	struct host host;
	int port;

	(void)argument;
	open_host(&host, NULL);
	idle = open_ep(&host, host.info);
	port = port_of(idle, own_name);
	IS(port_of(idle, own_name) == port);
	ep = open_ep(&host, host.info);
	IS(port_of(ep, own_name) != port);
	UNTIL(atomic_load(&board->named[0]), pause_ms(1));
	MUST(fi_connect(ep, board->names[0].bytes, NULL, 0));
	IS(next_event(&host, 20000, &entry, &error) == FI_CONNECTED);
	IS(port_of(ep, fi_getpeer) == ntohs(((struct sockaddr_in *)board->names[0].bytes)->sin_port));
	put(PORT, port_of(ep, own_name));
	IS(next_event(&host, 20000, &entry, &error) == FI_SHUTDOWN);
	MUST(fi_close(&ep->fid));
	MUST(fi_close(&idle->fid));
	close_host(&host);
}

static void check_names(void)
{
	pid_t pid = start("client", named_client, 0);
	struct fi_eq_cm_entry entry;
	struct fi_eq_err_entry error;
	struct fid_pep *pep;
	struct fid_ep *ep;
	struct host host;
	int port;

	open_host(&host, "0");
	listen_at(&host, &pep);
	port = ntohs(((struct sockaddr_in *)board->names[0].bytes)->sin_port);
	IS(next_event(&host, 20000, &entry, &error) == FI_CONNREQ);
	ep = open_ep(&host, entry.info);
	fi_freeinfo(entry.info);
	IS(port_of(ep, own_name) == port);
	MUST(fi_accept(ep, NULL, 0));
	IS(next_event(&host, 20000, &entry, &error) == FI_CONNECTED);
	IS(port_of(ep, own_name) == port);
	UNTIL(told(PORT), pause_ms(1));
	IS(port_of(ep, fi_getpeer) == (int)told(PORT));
	MUST(fi_close(&ep->fid));
	IS(status_of(pid, "client") == 0);
	MUST(fi_close(&pep->fid));
	close_host(&host);
}

int main(int argc, char **argv)
{
	static const struct mode modes[] = { { "others", check_others },
					     { "abandoned", check_abandoned },
					     { "killed", check_killed },
					     { "beside", check_beside },
					     { "redirected", check_redirected },
					     { "exits", check_exits },
					     { "unanswered", check_unanswered },
					     { "names", check_names } };

	alarm(80);
	return run_mode(modes, sizeof modes / sizeof *modes, argc, argv);
}
