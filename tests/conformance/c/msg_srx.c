/* Connected endpoints with shared receive contexts, from fi_endpoint(3) "Shared contexts", fi_cm(3), fi_cq(3),
 * fi_cntr(3) and fi_msg(3), in processes that know nothing about the transport. WEFT_TEST_XRC=1 requests XRC.
 *
 *   msg_srx flow PROV NODE       two servers, two clients, three endpoints from each client to each server, messages
 *                                in both directions: bytes, and the order on each endpoint
 *   msg_srx small PROV NODE      the same with queues of 4 sends, 8 receives and 16 completions
 *   msg_srx sread PROV NODE      the same, with fi_cq_sread instead of polling
 *   msg_srx fd PROV NODE         the same, with fi_trywait and poll(2)
 *   msg_srx killed PROV NODE     the same, and a server is killed: FI_SHUTDOWN on each of its endpoints within 5 s
 *   msg_srx stopped PROV NODE    the same, and a server is stopped for 2 s
 *   msg_srx left PROV NODE       the same, and clients close and connect endpoints meanwhile
 *   msg_srx orderly PROV NODE    clients close endpoints, and one its context, at the same time and with nothing
 *                                under way: the other connections stay
 *   msg_srx behind PROV NODE     a context closes while a message to it waits behind one to another process
 *   msg_srx idle PROV NODE       the same as flow, then 3 s without a call, then again
 *   msg_srx truncated PROV NODE  a message that is longer than its receive
 *   msg_srx selective PROV NODE  FI_SELECTIVE_COMPLETION, fi_inject, counters
 *   msg_srx waits PROV NODE      messages that find no receive, of one of two contexts
 *   msg_srx undelivered PROV NODE
 *                                one of two connections ends while messages on both find no receive
 *   msg_srx events PROV NODE     data of connections, fi_reject, fi_shutdown, a port without a listener, names
 *   msg_srx missed PROV NODE     the peer is stopped for 2.5 s while two of three connections are ended
 *   msg_srx many PROV NODE       256 endpoints of one process to one other
 *   msg_srx threads PROV NODE    threads that post to one context and send on endpoints of their own
 *   msg_srx forked PROV NODE     a connected process forks
 *
 * More than 800 lines: all modes use the host above them, and its checks of messages.
 *
 * With WEFT_TEST_XRCD=PATH each process opens the XRC domain of this file, and binds it to its endpoints
 * (weft_mr_ops). Ends with 0, or says what went wrong. Plain libfabric 1.17, and weft.h; link with -pthread. */
#include "rdm_processes.h"

#include <fcntl.h>
#include <pthread.h>
#include <rdma/fi_cm.h>
#include <sched.h>

#include <weft.h>

enum { EPS = 3, SERVERS = 2, CLIENTS = 2, MOST = 256, SLOTS = 64, WINDOW = 8, LONGEST = 20000, IDS = 1024 };

/* Words of the board */
enum { STAGE, ENDED, STOP, GO, TURN };

/* How objects are opened. */
static struct {
	size_t tx_size, rx_size, cq_size;
	enum fi_wait_obj wait;
	uint64_t caps;
	int counters, no_posts;
} how;

enum state { NONE, CONNECTING, CONNECTED, SHUT };

struct host {
	struct fi_info *info;
	struct fid_fabric *fabric;
	struct fid_eq *eq;
	struct fid_domain *domain;
	struct fid_cq *cq;
	struct fid_ep *srx;
	struct fid_mr *mr;
	struct fid_pep *pep;
	struct fid *xrcd; /* bound to the endpoints; NULL: none */
	struct fid_ep *ep[MOST];
	struct fid_cntr *sent[MOST], *received;
	enum state state[MOST];
	uint32_t peer[MOST]; /* what the peer has sent with its request */
	int eps;	     /* endpoints opened */
	uint8_t *in, *out;
	size_t slots;
	uint32_t id; /* of this process */

	/* messages */
	int to_send, sent_count[MOST], done_count[MOST];
	int next[IDS], taken, done, want;
};

static struct fi_info *query(const char *service, uint64_t flags)
{
	struct fi_info *hints = fi_allocinfo(), *info;

	hints->caps = how.caps ? how.caps : FI_MSG;
	hints->mode = FI_CONTEXT | FI_CONTEXT2 | FI_RX_CQ_DATA;
	hints->ep_attr->type = FI_EP_MSG;
	hints->ep_attr->protocol = asked_protocol();
	hints->ep_attr->rx_ctx_cnt = FI_SHARED_CONTEXT;
	hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
	hints->domain_attr->threading = FI_THREAD_SAFE;
	hints->tx_attr->size = how.tx_size;
	hints->rx_attr->size = how.rx_size;
	hints->fabric_attr->prov_name = strdup(provider);
	MUST(fi_getinfo(FI_VERSION(1, 17), node, service, flags, hints, &info));
	fi_freeinfo(hints);
	return info;
}

static void post(struct host *host, size_t slot)
{
	double limit = now() + SECONDS;
	ssize_t posted;

	while ((posted = fi_recv(host->srx, host->in + slot * LONGEST, LONGEST, fi_mr_desc(host->mr), FI_ADDR_UNSPEC,
				 (void *)slot)) == -FI_EAGAIN)
		IS(now() < limit);
	MUST(posted);
}

static void open_host(struct host *host, const char *service, uint32_t id)
{
	struct fi_cq_attr attr = { .format = FI_CQ_FORMAT_DATA, .size = how.cq_size, .wait_obj = how.wait };
	struct fi_eq_attr eq_attr = { .wait_obj = FI_WAIT_UNSPEC };
	uint64_t access = FI_SEND | FI_RECV | FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE;
	size_t bytes = (size_t)(SLOTS + WINDOW * 64) * LONGEST;

	memset(host, 0, sizeof *host);
	host->id = id;
	host->info = query(service, FI_SOURCE);
	if (!attr.wait_obj)
		attr.wait_obj = FI_WAIT_NONE;
	MUST(fi_fabric(host->info->fabric_attr, &host->fabric, NULL));
	MUST(fi_eq_open(host->fabric, &eq_attr, &host->eq, NULL));
	MUST(fi_domain(host->fabric, host->info, &host->domain, NULL));
	MUST(fi_cq_open(host->domain, &attr, &host->cq, NULL));
	if (how.counters) {
		struct fi_cntr_attr cntr = { .events = FI_CNTR_EVENTS_COMP, .wait_obj = FI_WAIT_UNSPEC };

		MUST(fi_cntr_open(host->domain, &cntr, &host->received, NULL));
	}
	MUST(fi_srx_context(host->domain, host->info->rx_attr, &host->srx, NULL));
	host->in = aligned_alloc(4096, (bytes + 4095) & ~4095UL);
	host->out = host->in + SLOTS * LONGEST;
	memset(host->in, 0, bytes);
	MUST(fi_mr_reg(host->domain, host->in, bytes, access, 0, 1, 0, &host->mr, NULL));
	if (getenv("WEFT_TEST_XRCD")) {
		const struct weft_mr_ops *ops;

		MUST(fi_open_ops(&host->domain->fid, WEFT_MR_OPS, 0, (void **)&ops, NULL));
		MUST(ops->xrcd_open(host->domain, getenv("WEFT_TEST_XRCD"), -1, O_CREAT, &host->xrcd, NULL));
	}
	host->slots = how.rx_size && how.rx_size < SLOTS ? how.rx_size : SLOTS;
	for (size_t slot = 0; slot < host->slots && !how.no_posts; slot++)
		post(host, slot);
}

static struct fid_ep *open_ep(struct host *host, int at, struct fi_info *info, struct fid_ep *srx)
{
	uint64_t selective = how.counters ? FI_SELECTIVE_COMPLETION : 0;
	struct fid_ep *ep;

	MUST(fi_endpoint(host->domain, info, &ep, (void *)(uintptr_t)(at + 1)));
	MUST(fi_ep_bind(ep, &host->eq->fid, 0));
	MUST(fi_ep_bind(ep, &host->cq->fid, FI_TRANSMIT | selective));
	MUST(fi_ep_bind(ep, &host->cq->fid, FI_RECV));
	MUST(fi_ep_bind(ep, &srx->fid, 0));
	if (host->xrcd)
		MUST(fi_ep_bind(ep, host->xrcd, 0));
	if (how.counters) {
		struct fi_cntr_attr cntr = { .events = FI_CNTR_EVENTS_COMP, .wait_obj = FI_WAIT_UNSPEC };

		MUST(fi_cntr_open(host->domain, &cntr, &host->sent[at], NULL));
		MUST(fi_ep_bind(ep, &host->sent[at]->fid, FI_SEND));
		MUST(fi_ep_bind(ep, &host->received->fid, FI_RECV));
	}
	MUST(fi_enable(ep));
	host->ep[at] = ep;
	host->state[at] = CONNECTING;
	return ep;
}

static void listen_at(struct host *host, int place)
{
	struct name *name = &board->names[place];

	MUST(fi_passive_ep(host->fabric, host->info, &host->pep, NULL));
	MUST(fi_pep_bind(host->pep, &host->eq->fid, 0));
	MUST(fi_listen(host->pep));
	name->len = sizeof name->bytes;
	MUST(fi_getname(&host->pep->fid, name->bytes, &name->len));
	atomic_store(&board->named[place], 1);
}

static int index_of(struct host *host, fid_t fid)
{
	int at = (int)(uintptr_t)fid->context - 1;

	IS(at >= 0 && at < host->eps && host->ep[at] && &host->ep[at]->fid == fid);
	return at;
}

/* Handles the next event; false if there is none. Requests are accepted. */
static bool event_once(struct host *host, int timeout)
{
	struct {
		struct fi_eq_cm_entry entry;
		uint32_t data;
	} got;
	struct fi_eq_err_entry error = { 0 };
	uint32_t kind = 0;
	ssize_t len;

	if (timeout)
		while ((len = fi_eq_sread(host->eq, &kind, &got, sizeof got.entry + 4, timeout, 0)) == -FI_EINTR)
			;
	else
		len = fi_eq_read(host->eq, &kind, &got, sizeof got.entry + 4, 0);
	if (len == -FI_EAGAIN || len == -FI_ETIMEDOUT)
		return false;
	if (len == -FI_EAVAIL) {
		MUST(fi_eq_readerr(host->eq, &error, 0));
		die("event queue: error %d (%s)", error.err, fi_strerror(error.err));
	}
	MUST(len);
	if (kind == FI_CONNREQ) {
		int at = host->eps++;

		IS(at < MOST && (size_t)len >= sizeof got.entry + 4);
		IS(got.entry.fid == &host->pep->fid);
		memcpy(&host->peer[at], (uint8_t *)&got + sizeof got.entry, 4);
		open_ep(host, at, got.entry.info, host->srx);
		MUST(fi_accept(host->ep[at], &host->id, 4));
		fi_freeinfo(got.entry.info);
		return true;
	}
	int at = index_of(host, got.entry.fid);
	if (kind == FI_CONNECTED) {
		IS(host->state[at] == CONNECTING);
		host->state[at] = CONNECTED;
	} else if (kind == FI_SHUTDOWN) {
		IS(host->state[at] == CONNECTED);
		host->state[at] = SHUT;
	} else {
		die("event %u", kind);
	}
	return true;
}

static int in_state(struct host *host, enum state state)
{
	int count = 0;

	for (int i = 0; i < host->eps; i++)
		count += host->state[i] == state;
	return count;
}

static bool take_some(struct host *host, bool errors);

/* Waits for an event; meanwhile messages are taken. */
static void next_event(struct host *host)
{
	/* a peer that closes an endpoint may wait until its messages have found receives */
	if (host->to_send)
		take_some(host, true);
	event_once(host, host->to_send ? 0 : 100);
}

static void await(struct host *host, enum state state, int count)
{
	double limit = now() + SETUP_SECONDS;

	while (in_state(host, state) < count) {
		if (now() > limit)
			die("%d endpoints of %d in state %d", in_state(host, state), count, state);
		next_event(host);
	}
}

/* Waits until no endpoint is connecting. Connections of earlier endpoints may end meanwhile. */
static void await_connections(struct host *host)
{
	double limit = now() + SETUP_SECONDS;

	while (in_state(host, CONNECTING)) {
		if (now() > limit)
			die("%d endpoints of %d are connecting", in_state(host, CONNECTING), host->eps);
		next_event(host);
	}
}

static void connect_to(struct host *host, int place, int count)
{
	UNTIL(atomic_load(&board->named[place]), pause_ms(1));
	for (int i = 0; i < count; i++) {
		uint32_t data = host->id * MOST + (uint32_t)host->eps;
		int at = host->eps++;
		struct fid_ep *ep = open_ep(host, at, host->info, host->srx);

		MUST(fi_connect(ep, board->names[place].bytes, &data, 4));
	}
	await_connections(host);
}

static void close_ep(struct host *host, int at)
{
	MUST(fi_close(&host->ep[at]->fid));
	if (host->sent[at])
		MUST(fi_close(&host->sent[at]->fid));
	host->ep[at] = NULL;
	host->sent[at] = NULL;
	host->state[at] = NONE;
}

static void close_host(struct host *host)
{
	for (int i = 0; i < host->eps; i++)
		if (host->ep[i])
			close_ep(host, i);
	if (host->pep)
		MUST(fi_close(&host->pep->fid));
	MUST(fi_close(&host->srx->fid));
	if (host->xrcd)
		MUST(fi_close(host->xrcd));
	if (host->received)
		MUST(fi_close(&host->received->fid));
	MUST(fi_close(&host->mr->fid));
	MUST(fi_close(&host->cq->fid));
	MUST(fi_close(&host->domain->fid));
	MUST(fi_close(&host->eq->fid));
	MUST(fi_close(&host->fabric->fid));
	fi_freeinfo(host->info);
	free(host->in);
}

/* ---- messages in both directions ---- */

#define SENT_MARK (1UL << 40)

static size_t length_of(uint64_t data) { return mixed(data) % 3 ? mixed(data * 3) % 300 : mixed(data * 5) % (LONGEST + 1); }

/* Sends what can be sent on one endpoint. Returns whether something was. */
static bool send_some(struct host *host, int at)
{
	bool any = false;

	while (host->state[at] == CONNECTED && host->sent_count[at] < host->to_send &&
	       host->sent_count[at] - host->done_count[at] < WINDOW) {
		int seq = host->sent_count[at];
		uint64_t data = (uint64_t)(host->id * 64 + (uint32_t)at) << 16 | (uint64_t)seq;
		uint8_t *out = host->out + (size_t)(at % 64 * WINDOW + seq % WINDOW) * LONGEST;
		size_t len = length_of(data);

		fill(out, len, data);
		ssize_t posted = fi_senddata(host->ep[at], out, len, fi_mr_desc(host->mr), data, 0,
					     (void *)(SENT_MARK | (uintptr_t)at << 20 | (uintptr_t)seq));
		if (posted == -FI_EAGAIN)
			return any;
		if (posted == -FI_ESHUTDOWN || posted == -FI_ENOTCONN) /* its event comes */
			return any;
		MUST(posted);
		host->sent_count[at]++;
		any = true;
	}
	return any;
}

static void take_entry(struct host *host, struct fi_cq_data_entry *entry)
{
	uint64_t context = (uint64_t)(uintptr_t)entry->op_context;

	if (context & SENT_MARK) {
		int at = (int)(context >> 20 & 0xfffff), seq = (int)(context & 0xfffff);

		IS(entry->flags & FI_SEND);
		IS(host->done_count[at] == seq);
		host->done_count[at]++;
		host->done++;
		return;
	}
	IS(entry->flags & FI_RECV && entry->flags & FI_REMOTE_CQ_DATA && context < SLOTS);
	uint64_t from = entry->data >> 16, seq = entry->data & 0xffff;
	IS(from < IDS);
	if (host->next[from] != (int)seq)
		die("message %d of endpoint %d, expected %d", (int)seq, (int)from, host->next[from]);
	host->next[from]++;
	if (entry->len != length_of(entry->data))
		die("length %zu, expected %zu", entry->len, length_of(entry->data));
	must_be(host->in + context * LONGEST, entry->len, entry->data);
	host->taken++;
	post(host, context);
}

/* Reads completions. Errors are permitted on endpoints that are not connected any more, or will not be. */
static bool take_some(struct host *host, bool errors)
{
	struct fi_cq_data_entry entries[16];
	struct fi_cq_err_entry error = { 0 };
	ssize_t got;

	if (how.wait == FI_WAIT_UNSPEC) {
		got = fi_cq_sread(host->cq, entries, 16, NULL, 20);
	} else if (how.wait == FI_WAIT_FD) {
		struct fid *fid = &host->cq->fid;
		int fd;

		MUST(fi_control(fid, FI_GETWAIT, &fd));
		if (fi_trywait(host->fabric, &fid, 1) == 0) {
			struct pollfd ready = { .fd = fd, .events = POLLIN };

			poll(&ready, 1, 20);
		}
		got = fi_cq_read(host->cq, entries, 16);
	} else {
		got = fi_cq_read(host->cq, entries, 16);
	}
	if (got == -FI_EAVAIL) {
		MUST(fi_cq_readerr(host->cq, &error, 0));
		uint64_t context = (uint64_t)(uintptr_t)error.op_context;
		if (!errors || !(context & SENT_MARK))
			die("a completion in error: %s, flags %llx, context %llx", fi_strerror(error.err),
			    (unsigned long long)error.flags, (unsigned long long)context);
		return true;
	}
	if (got == -FI_EAGAIN || got == -FI_EINTR)
		return false;
	MUST(got);
	for (int i = 0; i < got; i++)
		take_entry(host, &entries[i]);
	return got > 0;
}

/* Sends `messages` further ones on each connected endpoint and receives `expect` further ones. */
static void exchange(struct host *host, int messages, int expect)
{
	double limit = now() + SECONDS;
	bool busy = true;

	host->to_send += messages;
	host->want += expect;
	while (busy || host->taken < host->want) {
		busy = false;
		for (int i = 0; i < host->eps; i++) {
			send_some(host, i);
			busy |= host->state[i] == CONNECTED && host->done_count[i] < host->to_send;
		}
		take_some(host, false);
		if (now() > limit)
			die("%d messages of %d taken, %d done", host->taken, host->want, host->done);
	}
}

static void meet(int stage, int processes)
{
	add(STAGE);
	UNTIL(told(STAGE) >= (uint64_t)(stage * processes), pause_ms(1));
}

static int rounds = 1, messages_each = 300;
static unsigned idle_ms;

static void flow_server(int place)
{
	struct host host;

	open_host(&host, "0", (uint32_t)place + 1);
	listen_at(&host, place);
	await(&host, CONNECTED, EPS * CLIENTS);
	for (int round = 1; round <= rounds; round++) {
		exchange(&host, messages_each, messages_each * EPS * CLIENTS);
		meet(round, SERVERS + CLIENTS);
		pause_ms(round < rounds ? idle_ms : 0);
	}
	UNTIL(told(STOP), pause_ms(1));
	close_host(&host);
}

static void flow_client(int place)
{
	struct host host;

	open_host(&host, NULL, (uint32_t)(SERVERS + place) + 1);
	for (int i = 0; i < SERVERS; i++)
		connect_to(&host, i, EPS);
	for (int round = 1; round <= rounds; round++) {
		exchange(&host, messages_each, messages_each * EPS * SERVERS);
		meet(round, SERVERS + CLIENTS);
		pause_ms(round < rounds ? idle_ms : 0);
	}
	put(STOP, 1);
	close_host(&host);
}

static void run_all(void (*server)(int), int servers, void (*client)(int), int clients)
{
	pid_t pids[8];
	int failed = 0, count = 0;

	for (int i = 0; i < servers; i++)
		pids[count++] = start("server", server, i);
	for (int i = 0; i < clients; i++)
		pids[count++] = start("client", client, i);
	for (int i = 0; i < count; i++)
		failed |= status_of(pids[i], "a process");
	if (failed)
		exit(1);
}

static void check_flow(void) { run_all(flow_server, SERVERS, flow_client, CLIENTS); }

static void check_small(void)
{
	how.tx_size = 4;
	how.rx_size = 8;
	how.cq_size = 16;
	check_flow();
}

static void check_sread(void)
{
	how.wait = FI_WAIT_UNSPEC;
	check_flow();
}

static void check_fd(void)
{
	how.wait = FI_WAIT_FD;
	check_flow();
}

static void check_idle(void)
{
	rounds = 2;
	idle_ms = 3000;
	check_flow();
}

/* ---- the death and the stop of a server ---- */

/* Server 0 is killed or stopped by the main process when all clients are connected to it, and it has taken 200
 * messages. */
static void endless_server(int place)
{
	struct host host;

	open_host(&host, "0", (uint32_t)place + 1);
	listen_at(&host, place);
	host.to_send = 60000;
	while (!told(STOP)) {
		event_once(&host, 0);
		for (int i = 0; i < host.eps; i++)
			send_some(&host, i);
		take_some(&host, told(ENDED));
		if (place == 0 && host.taken > 200 && in_state(&host, CONNECTED) == CLIENTS * EPS)
			put(GO, 1);
	}
	close_host(&host);
}

static int stop_only;

static uint64_t ms_now(void) { return (uint64_t)(now() * 1000); }

static void endless_client(int place)
{
	struct host host;
	int from_other = 0;

	open_host(&host, NULL, (uint32_t)(SERVERS + place) + 1);
	connect_to(&host, 0, EPS);
	connect_to(&host, 1, EPS);
	host.to_send = 60000;
	/* a killed server has ended before ENDED is told: its last endpoint may be shut before */
	while (in_state(&host, SHUT) < EPS || !told(ENDED)) {
		uint64_t ended = told(ENDED);

		event_once(&host, 0);
		for (int i = 0; i < host.eps; i++)
			send_some(&host, i);
		take_some(&host, true);
		if (stop_only && ended && ms_now() > ended)
			break;
		/* the ways without an event of the device take 10 s and more */
		if (!stop_only && ended && ms_now() > ended + 5000 && in_state(&host, SHUT) < EPS)
			die("only %d of %d endpoints have ended after 5 s", in_state(&host, SHUT), EPS);
	}
	for (int i = 0; i < EPS && !stop_only; i++)
		IS(host.state[i] == SHUT);
	for (int i = EPS; i < 2 * EPS; i++)
		IS(host.state[i] == CONNECTED);
	/* the other server's messages arrive */
	for (int i = 0; i < IDS; i++)
		from_other += host.next[i] * (i / 64 == 2);
	int before = host.taken, done = host.done;
	UNTIL(host.taken > before + 500 && host.done > done + 500, {
		event_once(&host, 0);
		for (int i = 0; i < host.eps; i++)
			send_some(&host, i);
		take_some(&host, true);
	});
	/* each side stops first, then takes what has come */
	add(STAGE);
	UNTIL(told(STAGE) >= CLIENTS, {
		event_once(&host, 0);
		take_some(&host, true);
	});
	put(STOP, 1);
	pause_ms(100);
	close_host(&host);
	(void)from_other;
}

static void run_endless(int signal)
{
	pid_t pids[SERVERS + CLIENTS];
	int failed = 0;

	for (int i = 0; i < SERVERS; i++)
		pids[i] = start("server", endless_server, i);
	for (int i = 0; i < CLIENTS; i++)
		pids[SERVERS + i] = start("client", endless_client, i);
	UNTIL(told(GO), pause_ms(1));
	kill(pids[0], signal);
	if (signal == SIGSTOP) {
		pause_ms(2000);
		kill(pids[0], SIGCONT);
	}
	/* it needs a processor to end */
	if (signal == SIGKILL)
		waitpid(pids[0], NULL, 0);
	put(ENDED, ms_now());
	for (int i = signal == SIGKILL; i < SERVERS + CLIENTS; i++)
		failed |= status_of(pids[i], "a process");
	if (failed)
		exit(1);
}

static void check_killed(void) { run_endless(SIGKILL); }

static void check_stopped(void)
{
	stop_only = 1;
	run_endless(SIGSTOP);
}

/* ---- endpoints that come and leave under traffic ---- */

static void left_server(int place)
{
	struct host host;

	open_host(&host, "0", (uint32_t)place + 1);
	listen_at(&host, place);
	host.to_send = 60000;
	while (told(ENDED) < CLIENTS) {
		event_once(&host, 0);
		for (int i = 0; i < host.eps; i++) {
			send_some(&host, i);
			if (host.state[i] == SHUT)
				close_ep(&host, i);
		}
		take_some(&host, true);
	}
	close_host(&host);
}

/* Endpoint 0 stays; the others are closed under traffic, and replaced by new ones, without a word. */
static void left_client(int place)
{
	struct host host;

	open_host(&host, NULL, (uint32_t)(SERVERS + place) + 1);
	host.to_send = 60000;
	connect_to(&host, 0, 1);
	for (int round = 0; round < 12; round++) {
		int first = host.eps, want = host.taken + 50 + (int)(mixed((uint64_t)(round + place * 50)) % 100);

		connect_to(&host, round % 2, 2);
		UNTIL(host.taken >= want && host.done_count[0] > 20 * round, {
			event_once(&host, 0);
			if (in_state(&host, SHUT))
				die("round %d: endpoint 0 in state %d, %d and %d in %d and %d", round, host.state[0], first, first + 1,
				    host.state[first], host.state[first + 1]);
			for (int i = 0; i < host.eps; i++)
				send_some(&host, i);
			take_some(&host, true);
		});
		IS(in_state(&host, SHUT) == 0);
		/* on XRC the requests of an endpoint end with those of all others, unless they have completed */
		for (int i = 0; i < host.eps && asked_protocol(); i++)
			if (i >= first)
				UNTIL(host.done_count[i] == host.sent_count[i], take_some(&host, false));
		if (round % 3 == 0)
			MUST(fi_shutdown(host.ep[first], 0));
		close_ep(&host, first);
		close_ep(&host, first + 1);
	}
	IS(host.state[0] == CONNECTED);
	add(ENDED);
	close_host(&host);
}

static void check_left(void) { run_all(left_server, SERVERS, left_client, CLIENTS); }

/* ---- endpoints that leave with nothing under way ---- */

enum { LEAVES = 6, EACH = 20, COMING = 2 };

/* In each round each client has one connection to each server that stays, and COMING new ones to one of the servers,
 * which have sent nothing yet. The sum of the messages of both sides is known, so nothing is under way after it. */
static void orderly_server(int place)
{
	struct host host;

	open_host(&host, "0", (uint32_t)place + 1);
	listen_at(&host, place);
	for (int round = 1; round <= LEAVES; round++) {
		int coming = round % SERVERS == place ? COMING * CLIENTS : 0;

		await(&host, CONNECTED, CLIENTS + coming);
		exchange(&host, EACH, EACH * CLIENTS + EACH * round * coming);
		meet(2 * round - 1, SERVERS + CLIENTS);
		await(&host, SHUT, coming);
		IS(in_state(&host, CONNECTED) == CLIENTS);
		for (int i = 0; i < host.eps; i++)
			if (host.state[i] == SHUT)
				close_ep(&host, i);
		meet(2 * round, SERVERS + CLIENTS);
	}
	await(&host, SHUT, 1);
	exchange(&host, EACH, EACH);
	UNTIL(told(STOP), pause_ms(1));
	close_host(&host);
}

static void orderly_client(int place)
{
	struct host host;

	open_host(&host, NULL, (uint32_t)(SERVERS + place) + 1);
	for (int i = 0; i < SERVERS; i++)
		connect_to(&host, i, 1);
	for (int round = 1; round <= LEAVES; round++) {
		int first = host.eps;

		connect_to(&host, round % SERVERS, COMING);
		exchange(&host, EACH, EACH * SERVERS + EACH * round * COMING);
		meet(2 * round - 1, SERVERS + CLIENTS);
		/* each client at the same time */
		for (int i = first; i < host.eps; i++)
			close_ep(&host, i);
		meet(2 * round, SERVERS + CLIENTS);
		event_once(&host, 0);
		IS(in_state(&host, CONNECTED) == SERVERS);
	}
	/* the context of one client ends; the connections of the other go on */
	if (place != 0) {
		exchange(&host, EACH, EACH * SERVERS);
		event_once(&host, 0);
		IS(in_state(&host, CONNECTED) == SERVERS);
		put(STOP, 1);
	}
	close_host(&host);
}

static void check_orderly(void) { run_all(orderly_server, SERVERS, orderly_client, CLIENTS); }

/* ---- a context that closes while a message to it waits ---- */

/* The message to the second client finds no receive until the first client closes its context, and on a common XRC
 * domain that to the first one waits behind it. The connection to the second client stays. */
static void behind_server(int place)
{
	struct host host;
	int first;

	open_host(&host, "0", (uint32_t)place + 1);
	listen_at(&host, place);
	await(&host, CONNECTED, CLIENTS);
	first = host.peer[0] / MOST == SERVERS + 1 ? 0 : 1;
	host.to_send = 1;
	send_some(&host, !first);
	send_some(&host, first);
	put(GO, 1);
	await(&host, SHUT, 1);
	IS(host.state[first] == SHUT);
	close_ep(&host, first);
	UNTIL(host.done_count[!first] == 1, {
		event_once(&host, 0);
		take_some(&host, true);
	});
	host.to_send = 2;
	UNTIL(host.done_count[!first] == 2, {
		IS(host.state[!first] == CONNECTED);
		send_some(&host, !first);
		event_once(&host, 0);
		take_some(&host, true);
	});
	/* the client has its entries before it gets FI_SHUTDOWN */
	UNTIL(told(TURN), pause_ms(1));
	put(STOP, 1);
	close_host(&host);
}

static void behind_client(int place)
{
	struct host host;

	how.no_posts = place == 1;
	open_host(&host, NULL, (uint32_t)(SERVERS + place) + 1);
	connect_to(&host, 0, 1);
	UNTIL(told(GO), pause_ms(1));
	if (place == 1) {
		pause_ms(50);
		for (size_t slot = 0; slot < host.slots; slot++)
			post(&host, slot);
		UNTIL(host.taken == 2, {
			event_once(&host, 0);
			IS(host.state[0] == CONNECTED);
			take_some(&host, false);
		});
		put(TURN, 1);
		UNTIL(told(STOP), pause_ms(1));
	}
	close_host(&host);
}

static void check_behind(void) { run_all(behind_server, 1, behind_client, CLIENTS); }

/* ---- truncation ---- */

/* An error completion, or the first after ordinary ones. */
static struct fi_cq_err_entry error_of(struct host *host)
{
	struct fi_cq_err_entry error = { 0 };
	struct fi_cq_data_entry entry;
	ssize_t got;

	UNTIL((got = fi_cq_read(host->cq, &entry, 1)) == -FI_EAVAIL, IS(got == -FI_EAGAIN || got == 1));
	MUST(fi_cq_readerr(host->cq, &error, 0));
	return error;
}

static void truncated_server(int place)
{
	struct host host;

	how.no_posts = 1;
	open_host(&host, "0", (uint32_t)place + 1);
	MUST(fi_recv(host.srx, host.in, 100, fi_mr_desc(host.mr), FI_ADDR_UNSPEC, (void *)77));
	listen_at(&host, place);
	await(&host, CONNECTED, 1);
	put(TURN, 1);
	struct fi_cq_err_entry error = error_of(&host);
	if (error.err != FI_ETRUNC || error.op_context != (void *)77 || !(error.flags & FI_RECV))
		die("error %s, context %p, flags %llx", fi_strerror(error.err), error.op_context, (unsigned long long)error.flags);
	put(GO, 1);
	/* the connection has ended, or it has not: the next one works */
	for (size_t slot = 0; slot < host.slots; slot++)
		post(&host, slot);
	while (in_state(&host, CONNECTED) + in_state(&host, SHUT) < 3)
		event_once(&host, 100);
	exchange(&host, 0, 20);
	put(STOP, 1);
	close_host(&host);
}

static void truncated_client(int place)
{
	struct host host;

	open_host(&host, NULL, (uint32_t)(SERVERS + place) + 1);
	connect_to(&host, 0, 1);
	UNTIL(told(TURN), pause_ms(1));
	MUST(fi_send(host.ep[0], host.out, 101, fi_mr_desc(host.mr), 0, (void *)5));
	struct fi_cq_err_entry error = error_of(&host);
	IS(error.op_context == (void *)5 && error.flags & FI_SEND);
	await(&host, SHUT, 1);
	UNTIL(told(GO), pause_ms(1));
	connect_to(&host, 0, 2);
	exchange(&host, 10, 0);
	UNTIL(told(STOP), pause_ms(1));
	close_host(&host);
}

static void check_truncated(void) { run_all(truncated_server, 1, truncated_client, 1); }

/* ---- selective completion and counters ---- */

enum { SELECTED = 200 };

static void selective_server(int place)
{
	struct host host;

	how.counters = 1;
	open_host(&host, "0", (uint32_t)place + 1);
	listen_at(&host, place);
	await(&host, CONNECTED, 2);
	put(GO, 1);
	for (uint64_t count = 0; count < 2 * SELECTED;) {
		struct fi_cq_data_entry entry;
		ssize_t got = fi_cq_read(host.cq, &entry, 1);

		if (got == -FI_EAGAIN)
			continue;
		MUST(got);
		IS(entry.len == 8);
		post(&host, (size_t)entry.op_context);
		count++;
	}
	MUST(fi_cntr_wait(host.received, 2 * SELECTED, 5000));
	IS(fi_cntr_read(host.received) == 2 * SELECTED && fi_cntr_readerr(host.received) == 0);
	UNTIL(told(STOP), pause_ms(1));
	close_host(&host);
}

static void selective_client(int place)
{
	struct host host;
	struct fi_cq_data_entry entry;
	struct iovec iov;
	int entries = 0, wanted_entries = 0;

	how.counters = 1;
	open_host(&host, NULL, (uint32_t)(SERVERS + place) + 1);
	connect_to(&host, 0, 2);
	UNTIL(told(GO), pause_ms(1));
	iov = (struct iovec){ host.out, 8 };
	void *desc = fi_mr_desc(host.mr);
	for (int i = 0; i < SELECTED; i++)
		for (int e = 0; e < 2; e++) {
			struct fi_msg msg = { .msg_iov = &iov, .desc = &desc, .iov_count = 1, .context = (void *)(uintptr_t)(i + 1) };
			ssize_t posted;

			do {
				posted = i % 10 == 9 ? fi_sendmsg(host.ep[e], &msg, FI_COMPLETION)
					 : i % 3     ? fi_send(host.ep[e], host.out, 8, desc, 0, NULL)
						     : fi_inject(host.ep[e], host.out, 8, 0);
				ssize_t got = fi_cq_read(host.cq, &entry, 1);
				if (got == 1) {
					IS(entry.op_context && (uintptr_t)entry.op_context % 10 == 0);
					entries++;
				} else {
					IS(got == -FI_EAGAIN);
				}
			} while (posted == -FI_EAGAIN);
			MUST(posted);
			wanted_entries += i % 10 == 9;
		}
	for (int e = 0; e < 2; e++) {
		MUST(fi_cntr_wait(host.sent[e], SELECTED, 5000));
		IS(fi_cntr_read(host.sent[e]) == SELECTED);
		IS(fi_cntr_readerr(host.sent[e]) == 0);
	}
	for (ssize_t got; (got = fi_cq_read(host.cq, &entry, 1)) != -FI_EAGAIN; entries++)
		MUST(got);
	if (entries != wanted_entries)
		die("%d entries, expected %d", entries, wanted_entries);
	put(STOP, 1);
	close_host(&host);
}

static void check_selective(void) { run_all(selective_server, 1, selective_client, 1); }

/* ---- messages that find no receive ---- */

/* Two contexts with a queue each. Requests 0, 2, ... belong to the first, and 1, 3, ... to the second. */
static void waits_server(int place)
{
	struct host host;
	struct fid_ep *second;
	struct fid_cq *cq[2];
	struct fi_cq_attr attr = { .format = FI_CQ_FORMAT_DATA, .wait_obj = FI_WAIT_NONE };
	int taken = 0;

	how.no_posts = 1;
	open_host(&host, "0", (uint32_t)place + 1);
	cq[0] = host.cq;
	MUST(fi_cq_open(host.domain, &attr, &cq[1], NULL));
	MUST(fi_srx_context(host.domain, host.info->rx_attr, &second, NULL));
	listen_at(&host, place);
	while (in_state(&host, CONNECTED) < 2) {
		struct fi_eq_cm_entry entry;
		uint32_t kind;

		MUST(fi_eq_sread(host.eq, &kind, &entry, sizeof entry, 10000, 0));
		if (kind == FI_CONNECTED) {
			host.state[index_of(&host, entry.fid)] = CONNECTED;
			continue;
		}
		IS(kind == FI_CONNREQ);
		int at = host.eps++;
		host.cq = cq[at % 2];
		open_ep(&host, at, entry.info, at % 2 ? second : host.srx);
		MUST(fi_accept(host.ep[at], NULL, 0));
		fi_freeinfo(entry.info);
	}
	put(GO, 1);
	/* messages to the first context wait; those to the second one must not */
	for (uintptr_t i = 0; i < 32; i++)
		MUST(fi_recv(second, host.in + i * LONGEST, LONGEST, fi_mr_desc(host.mr), 0, (void *)i));
	UNTIL_WITHIN(5, taken == 32, {
		struct fi_cq_data_entry entry;
		ssize_t got = fi_cq_read(cq[1], &entry, 1);

		if (got != -FI_EAGAIN) {
			MUST(got);
			taken++;
		}
		IS(fi_cq_read(cq[0], &entry, 1) == -FI_EAGAIN);
	});
	pause_ms(1000);
	for (uintptr_t i = 0; i < 32; i++)
		MUST(fi_recv(host.srx, host.in + i * LONGEST, LONGEST, fi_mr_desc(host.mr), 0, (void *)i));
	UNTIL_WITHIN(5, taken == 64, {
		struct fi_cq_data_entry entry;
		ssize_t got = fi_cq_read(cq[0], &entry, 1);

		if (got != -FI_EAGAIN) {
			MUST(got);
			taken++;
		}
	});
	UNTIL(told(STOP), pause_ms(1));
	for (int i = 0; i < 2; i++)
		close_ep(&host, i);
	MUST(fi_close(&second->fid));
	MUST(fi_close(&cq[1]->fid));
	host.cq = cq[0];
	close_host(&host);
}

static void waits_client(int place)
{
	struct host host;

	open_host(&host, NULL, (uint32_t)(SERVERS + place) + 1);
	connect_to(&host, 0, 2);
	UNTIL(told(GO), pause_ms(1));
	for (int at = 0; at < 2; at++)
		for (int i = 0; i < 32; i++) {
			ssize_t posted;

			UNTIL((posted = fi_send(host.ep[at], host.out, 8, fi_mr_desc(host.mr), 0, (void *)1)) != -FI_EAGAIN,
			      (void)fi_cq_read(host.cq, NULL, 0));
			MUST(posted);
		}
	for (int done = 0; done < 64;) {
		struct fi_cq_data_entry entry;
		ssize_t got = fi_cq_read(host.cq, &entry, 1);

		if (got != -FI_EAGAIN) {
			MUST(got);
			done++;
		}
	}
	put(STOP, 1);
	close_host(&host);
}

static void check_waits(void) { run_all(waits_server, 1, waits_client, 1); }

/* ---- the end of a connection whose messages find no receive ---- */

enum { UNDELIVERED = 8 };

static void undelivered_server(int place)
{
	struct host host;
	struct fi_cq_data_entry entry;
	struct fi_cq_err_entry error = { 0 };
	int done = 0;

	open_host(&host, "0", (uint32_t)place + 1);
	listen_at(&host, place);
	await(&host, CONNECTED, 2);
	for (int at = 0; at < 2; at++)
		for (int i = 0; i < UNDELIVERED; i++)
			MUST(fi_send(host.ep[at], host.out, 8, fi_mr_desc(host.mr), 0, (void *)(uintptr_t)(at + 1)));
	put(GO, 1);
	await(&host, SHUT, 1);
	int left = host.state[0] == CONNECTED;
	IS(in_state(&host, SHUT) == 1);
	put(TURN, 1);
	/* the messages of the other connection arrive */
	UNTIL(done == UNDELIVERED, {
		ssize_t got = fi_cq_read(host.cq, &entry, 1);

		if (got == -FI_EAVAIL) {
			MUST(fi_cq_readerr(host.cq, &error, 0));
			IS((int)(uintptr_t)error.op_context == left + 1);
		} else if (got != -FI_EAGAIN) {
			MUST(got);
			done += (int)(uintptr_t)entry.op_context == 2 - left;
		}
		event_once(&host, 0);
		IS(in_state(&host, SHUT) == 1);
	});
	put(STOP, 1);
	close_host(&host);
}

static void undelivered_client(int place)
{
	struct host host;

	how.no_posts = 1;
	open_host(&host, NULL, (uint32_t)(SERVERS + place) + 1);
	connect_to(&host, 0, 1);
	connect_to(&host, 0, 1);
	UNTIL(told(GO), pause_ms(1));
	MUST(fi_shutdown(host.ep[1], 0));
	UNTIL(told(TURN), pause_ms(1));
	/* for those of both connections */
	for (size_t slot = 0; slot < 2 * UNDELIVERED; slot++)
		post(&host, slot);
	UNTIL(told(STOP), pause_ms(1));
	close_host(&host);
}

static void check_undelivered(void) { run_all(undelivered_server, 1, undelivered_client, 1); }

/* ---- events ---- */

static void events_server(int place)
{
	struct host host;
	struct fi_eq_cm_entry *entry;
	uint8_t bytes[sizeof *entry + 64];
	uint32_t kind;
	ssize_t len;

	entry = (struct fi_eq_cm_entry *)bytes;
	open_host(&host, "0", (uint32_t)place + 1);
	listen_at(&host, place);
	/* the first is rejected */
	IS((len = fi_eq_sread(host.eq, &kind, bytes, sizeof bytes, 10000, 0)) > 0);
	IS(kind == FI_CONNREQ && entry->fid == &host.pep->fid);
	IS(len >= (ssize_t)sizeof *entry + 5 && !memcmp(entry->data, "first", 5));
	IS(entry->info->ep_attr->rx_ctx_cnt == FI_SHARED_CONTEXT || !asked_protocol());
	IS(!asked_protocol() || entry->info->ep_attr->protocol == asked_protocol());
	MUST(fi_reject(host.pep, entry->info->handle, "nope", 4));
	fi_freeinfo(entry->info);
	/* the second one is accepted, after a while */
	IS((len = fi_eq_sread(host.eq, &kind, bytes, sizeof bytes, 10000, 0)) > 0);
	IS(kind == FI_CONNREQ && len >= (ssize_t)sizeof *entry + 6 && !memcmp(entry->data, "second", 6));
	pause_ms(300);
	host.eps = 1;
	open_ep(&host, 0, entry->info, host.srx);
	MUST(fi_accept(host.ep[0], "yes", 3));
	fi_freeinfo(entry->info);
	IS(fi_eq_sread(host.eq, &kind, bytes, sizeof bytes, 10000, 0) > 0);
	IS(kind == FI_CONNECTED && entry->fid == &host.ep[0]->fid);
	uint8_t name[64], peer[64];
	size_t name_len = sizeof name, peer_len = sizeof peer;
	MUST(fi_getname(&host.ep[0]->fid, name, &name_len));
	MUST(fi_getpeer(host.ep[0], peer, &peer_len));
	IS(name_len == board->names[place].len && peer_len == name_len);
	add(STAGE);
	/* its client shuts it down */
	IS(fi_eq_sread(host.eq, &kind, bytes, sizeof bytes, 10000, 0) > 0);
	IS(kind == FI_SHUTDOWN && entry->fid == &host.ep[0]->fid);
	ssize_t sent = fi_send(host.ep[0], host.out, 8, fi_mr_desc(host.mr), 0, NULL);
	IS(sent != 0 && sent != -FI_EAGAIN);
	close_ep(&host, 0);
	add(STAGE);
	/* the third request is rejected without data, then the listener closes */
	IS(fi_eq_sread(host.eq, &kind, bytes, sizeof bytes, 10000, 0) > 0);
	IS(kind == FI_CONNREQ);
	MUST(fi_reject(host.pep, entry->info->handle, NULL, 0));
	fi_freeinfo(entry->info);
	MUST(fi_close(&host.pep->fid));
	host.pep = NULL;
	put(GO, 1);
	UNTIL(told(STOP), pause_ms(1));
	IS(fi_eq_read(host.eq, &kind, bytes, sizeof bytes, 0) == -FI_EAGAIN);
	host.eps = 0;
	close_host(&host);
}

/* An error event of this endpoint. */
static int failure(struct host *host, struct fid_ep *ep, const char *data, double seconds)
{
	struct fi_eq_cm_entry entry;
	char got[64] = { 0 };
	struct fi_eq_err_entry error = { .err_data = got, .err_data_size = sizeof got };
	uint32_t kind;
	ssize_t len = fi_eq_sread(host->eq, &kind, &entry, sizeof entry, (int)(seconds * 1000), 0);

	if (len != -FI_EAVAIL)
		die("no error event: %zd, event %u", len, kind);
	MUST(fi_eq_readerr(host->eq, &error, 0));
	IS(error.fid == &ep->fid && error.context == ep->fid.context);
	if (data)
		IS(error.err_data_size >= strlen(data) && !memcmp(error.err_data, data, strlen(data)));
	if (error.err == FI_ECONNREFUSED) {
		char text[64] = "";
		const char *whole = fi_eq_strerror(host->eq, error.prov_errno, error.err_data, text, sizeof text);

		IS((strstr(whole, "rejected") || (!data && strstr(whole, "listens"))) && !strncmp(whole, text, sizeof text - 1));
	}
	return error.err;
}

static void events_client(int place)
{
	struct host host;
	uint8_t bytes[sizeof(struct fi_eq_cm_entry) + 64];
	struct fi_eq_cm_entry *entry = (struct fi_eq_cm_entry *)bytes;
	struct name *name = &board->names[0];
	uint32_t kind;
	ssize_t len;

	open_host(&host, NULL, (uint32_t)(SERVERS + place) + 1);
	host.eps = 5;
	UNTIL(atomic_load(&board->named[0]), pause_ms(1));
	IS(fi_send(open_ep(&host, 0, host.info, host.srx), host.out, 8, fi_mr_desc(host.mr), 0, NULL) < 0);
	MUST(fi_connect(host.ep[0], name->bytes, "first", 5));
	IS(failure(&host, host.ep[0], "nope", 10) == FI_ECONNREFUSED);
	/* once in its lifetime */
	IS(fi_connect(host.ep[0], name->bytes, "first", 5) < 0);
	MUST(fi_connect(open_ep(&host, 1, host.info, host.srx), name->bytes, "second", 6));
	IS((len = fi_eq_sread(host.eq, &kind, bytes, sizeof bytes, 10000, 0)) > 0);
	IS(kind == FI_CONNECTED && entry->fid == &host.ep[1]->fid);
	IS(len >= (ssize_t)sizeof *entry + 3 && !memcmp(entry->data, "yes", 3));
	uint8_t peer[64];
	size_t peer_len = sizeof peer;
	MUST(fi_getpeer(host.ep[1], peer, &peer_len));
	IS(peer_len == name->len && !memcmp(peer, name->bytes, 8));
	UNTIL(told(STAGE), pause_ms(1));
	MUST(fi_shutdown(host.ep[1], 0));
	IS(fi_send(host.ep[1], host.out, 8, fi_mr_desc(host.mr), 0, NULL) < 0);
	UNTIL(told(STAGE) == 2, pause_ms(1));
	MUST(fi_connect(open_ep(&host, 2, host.info, host.srx), name->bytes, "third", 5));
	/* depending on the provider the local side of fi_shutdown has an event */
	while ((len = fi_eq_sread(host.eq, &kind, bytes, sizeof bytes, 5000, 0)) > 0)
		IS(kind == FI_SHUTDOWN && entry->fid == &host.ep[1]->fid);
	IS(len == -FI_EAVAIL);
	int error = failure(&host, host.ep[2], NULL, 10);
	IS(error == FI_ECONNREFUSED);
	UNTIL(told(GO), pause_ms(1));
	/* nobody listens there */
	double began = now();
	MUST(fi_connect(open_ep(&host, 3, host.info, host.srx), name->bytes, "fourth", 6));
	error = failure(&host, host.ep[3], NULL, 10);
	IS(error == FI_ECONNREFUSED && now() - began < 5);
	put(STOP, 1);
	host.eps = 4;
	close_host(&host);
}

static void check_events(void) { run_all(events_server, 1, events_client, 1); }

/* ---- the end of one of several connections to a stopped process ---- */

static void missed_server(int place)
{
	struct host host;

	open_host(&host, "0", (uint32_t)place + 1);
	listen_at(&host, place);
	await(&host, CONNECTED, 3);
	put(GO, 1);
	UNTIL(told(STOP), pause_ms(1));
	await(&host, SHUT, 2);
	IS(in_state(&host, CONNECTED) == 1);
	exchange(&host, 20, 20);
	meet(1, 2);
	close_host(&host);
}

static void missed_client(int place)
{
	struct host host;

	open_host(&host, NULL, (uint32_t)(SERVERS + place) + 1);
	connect_to(&host, 0, 3);
	UNTIL(told(TURN), pause_ms(1));
	/* the server is stopped */
	close_ep(&host, 0);
	MUST(fi_shutdown(host.ep[1], 0));
	event_once(&host, 1000);
	host.state[1] = SHUT;
	put(ENDED, 1);
	exchange(&host, 20, 20);
	meet(1, 2);
	close_host(&host);
}

static void check_missed(void)
{
	pid_t server = start("server", missed_server, 0), client = start("client", missed_client, 0);
	int failed;

	UNTIL(told(GO), pause_ms(1));
	pause_ms(100);
	kill(server, SIGSTOP);
	put(TURN, 1);
	UNTIL(told(ENDED), pause_ms(1));
	pause_ms(2500);
	put(STOP, 1);
	kill(server, SIGCONT);
	failed = status_of(server, "server");
	failed |= status_of(client, "client");
	if (failed)
		exit(1);
}

/* ---- many endpoints ---- */

static void many_server(int place)
{
	struct host host;

	open_host(&host, "0", (uint32_t)place + 1);
	listen_at(&host, place);
	UNTIL(in_state(&host, CONNECTED) == MOST, event_once(&host, 100));
	add(STAGE);
	int seen[MOST] = { 0 };
	for (int count = 0; count < 3 * MOST;) {
		struct fi_cq_data_entry entry;
		ssize_t got = fi_cq_read(host.cq, &entry, 1);

		if (got == -FI_EAGAIN)
			continue;
		MUST(got);
		if (entry.op_context == (void *)-1)
			continue;
		uint32_t at;
		memcpy(&at, host.in + (size_t)entry.op_context * LONGEST, 4);
		IS(at < MOST && entry.len == 4 && seen[at] < 3);
		seen[at]++;
		post(&host, (size_t)entry.op_context);
		count++;
	}
	put(GO, 1);
	UNTIL(in_state(&host, SHUT) == MOST, event_once(&host, 100));
	close_host(&host);
}

static void many_client(int place)
{
	struct host host;
	double began = now();
	int done = 0;

	open_host(&host, NULL, (uint32_t)(SERVERS + place) + 1);
	UNTIL(atomic_load(&board->named[0]), pause_ms(1));
	for (int i = 0; i < MOST; i++) {
		uint32_t data = (uint32_t)host.eps;

		open_ep(&host, host.eps, host.info, host.srx);
		MUST(fi_connect(host.ep[host.eps++], board->names[0].bytes, &data, 4));
	}
	UNTIL(in_state(&host, CONNECTED) == MOST, event_once(&host, 100));
	printf("%d connections in %.2f s\n", MOST, now() - began);
	UNTIL(told(STAGE), pause_ms(1));
	for (int round = 0; round < 3; round++)
		for (uint32_t i = 0; i < MOST; i++)
			for (ssize_t posted = -FI_EAGAIN; posted;) {
				struct fi_cq_data_entry entry;
				memcpy(host.out + i * 4, &i, 4);
				posted = fi_send(host.ep[i], host.out + i * 4, 4, fi_mr_desc(host.mr), 0, NULL);
				IS(!posted || posted == -FI_EAGAIN);
				ssize_t got = fi_cq_read(host.cq, &entry, 1);
				IS(got == 1 || got == -FI_EAGAIN);
				done += got == 1;
			}
	UNTIL(done == 3 * MOST, {
		struct fi_cq_data_entry entry;
		ssize_t got = fi_cq_read(host.cq, &entry, 1);
		IS(got == 1 || got == -FI_EAGAIN);
		done += got == 1;
	});
	UNTIL(told(GO), pause_ms(1));
	began = now();
	close_host(&host);
	printf("closed in %.2f s\n", now() - began);
}

static void check_many(void) { run_all(many_server, 1, many_client, 1); }

/* ---- threads ---- */

enum { THREADS = 4, THREADED = 2000 };

struct sender {
	struct host *host;
	int at;
};

static _Atomic int threads_done;

/* Sends messages and takes whatever completions come, of any endpoint. */
static pthread_mutex_t taking = PTHREAD_MUTEX_INITIALIZER;

static void *sends(void *argument)
{
	struct sender *sender = argument;
	struct host *host = sender->host;
	double limit = now() + SECONDS;

	for (int seq = 0; seq < THREADED;) {
		uint64_t data = (uint64_t)(host->id * 64 + (uint32_t)sender->at) << 16 | (uint64_t)seq;
		uint8_t out[64];
		size_t len = mixed(data) % 60;

		fill(out, len, data);
		ssize_t posted = fi_injectdata(host->ep[sender->at], out, len, data, 0);
		if (posted == -FI_EAGAIN) {
			sched_yield();
			if (now() > limit)
				die("thread %d: message %d", sender->at, seq);
			continue;
		}
		MUST(posted);
		seq++;
	}
	atomic_fetch_add(&threads_done, 1);
	return NULL;
}

/* Completions of one receive each; a lock keeps the order between reading and the check. */
static void *takes(void *argument)
{
	struct host *host = argument;
	double limit = now() + SECONDS;

	for (;;) {
		struct fi_cq_data_entry entry;

		pthread_mutex_lock(&taking);
		if (host->taken == THREADS * THREADED) {
			pthread_mutex_unlock(&taking);
			return NULL;
		}
		ssize_t got = fi_cq_read(host->cq, &entry, 1);
		if (got == 1) {
			uint64_t from = entry.data >> 16, seq = entry.data & 0xffff;
			IS(from < IDS && host->next[from] == (int)seq);
			host->next[from]++;
			host->taken++;
			IS(entry.len == mixed(entry.data) % 60);
			must_be(host->in + (size_t)entry.op_context * LONGEST, entry.len, entry.data);
		} else if (got != -FI_EAGAIN) {
			MUST(got);
		}
		pthread_mutex_unlock(&taking);
		if (got == 1)
			post(host, (size_t)entry.op_context);
		if (now() > limit)
			die("%d of %d taken", host->taken, THREADS * THREADED);
	}
}

static void threaded(struct host *host)
{
	pthread_t ids[THREADS + 2];
	struct sender senders[THREADS];

	for (int i = 0; i < THREADS; i++) {
		senders[i] = (struct sender){ host, i };
		IS(!pthread_create(&ids[i], NULL, sends, &senders[i]));
	}
	for (int i = 0; i < 2; i++)
		IS(!pthread_create(&ids[THREADS + i], NULL, takes, host));
	for (int i = 0; i < THREADS + 2; i++)
		pthread_join(ids[i], NULL);
	/* its last messages may still wait for receives; it calls nothing meanwhile */
	meet(1, 2);
	close_host(host);
}

static void threads_server(int place)
{
	struct host host;

	open_host(&host, "0", (uint32_t)place + 1);
	listen_at(&host, place);
	await(&host, CONNECTED, THREADS);
	threaded(&host);
}

static void threads_client(int place)
{
	struct host host;

	open_host(&host, NULL, (uint32_t)(SERVERS + place) + 1);
	connect_to(&host, 0, THREADS);
	threaded(&host);
}

static void check_threads(void) { run_all(threads_server, 1, threads_client, 1); }

/* ---- fork ---- */

static void forked_client(int place)
{
	struct host host;
	int status;

	open_host(&host, NULL, (uint32_t)(SERVERS + place) + 1);
	connect_to(&host, 0, EPS);
	connect_to(&host, 1, EPS);
	exchange(&host, 50, 50 * EPS * SERVERS);
	for (int i = 0; i < 6; i++) {
		pid_t pid = fork();

		IS(pid >= 0);
		if (pid == 0) {
			memset(host.in, 0xee, (size_t)SLOTS * LONGEST);
			if (i % 3 == 1)
				for (int ep = 0; ep < host.eps; ep++)
					fi_close(&host.ep[ep]->fid);
			if (i % 3 == 2)
				exit(0);
			_exit(0);
		}
		if (i % 2)
			exchange(&host, 0, 0);
		IS(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0);
	}
	exchange(&host, 50, 50 * EPS * SERVERS);
	IS(in_state(&host, CONNECTED) == EPS * SERVERS);
	meet(1, SERVERS + 1);
	put(STOP, 1);
	close_host(&host);
}

static void forked_server(int place)
{
	struct host host;

	open_host(&host, "0", (uint32_t)place + 1);
	listen_at(&host, place);
	await(&host, CONNECTED, EPS);
	exchange(&host, 50, 50 * EPS);
	exchange(&host, 50, 50 * EPS);
	while (event_once(&host, 0))
		;
	IS(in_state(&host, CONNECTED) == EPS);
	meet(1, SERVERS + 1);
	UNTIL(told(STOP), pause_ms(1));
	close_host(&host);
}

static void check_forked(void) { run_all(forked_server, SERVERS, forked_client, 1); }

int main(int argc, char **argv)
{
	static const struct mode modes[] = {
		{ "flow", check_flow },		  { "small", check_small },	    { "sread", check_sread },	{ "fd", check_fd },
		{ "killed", check_killed },	  { "stopped", check_stopped },	    { "left", check_left },	{ "idle", check_idle },
		{ "orderly", check_orderly },	  { "behind", check_behind },
		{ "truncated", check_truncated }, { "selective", check_selective }, { "waits", check_waits },	{ "events", check_events },
		{ "missed", check_missed },	  { "undelivered", check_undelivered },	  { "many", check_many },		  { "threads", check_threads },	    { "forked", check_forked },
	};

	alarm(80);
	return run_mode(modes, sizeof modes / sizeof *modes, argc, argv);
}
