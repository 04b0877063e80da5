/* Connected endpoints on XRC (FI_PROTO_RDMA_CM_IB_XRC), which share receive contexts, in several
 * processes:
 *
 *   msg_xrc messages PROV NODE   two processes, four endpoints of one context in each: messages of
 *                                each length in both directions, RMA and atomics, contents checked
 *   msg_xrc node PROV NODE       one process with two endpoints to each of two others of a node
 *   msg_xrc killed PROV NODE     one of two peers is killed: FI_SHUTDOWN of each of its endpoints,
 *   msg_xrc idle PROV NODE       and no other, while this side sends (killed) or sleeps (idle); a
 *                                successor is connected
 *   msg_xrc shutdown PROV NODE   fi_shutdown and fi_close of single endpoints
 *   msg_xrc broken PROV NODE     a wrong key ends all connections of the circuit, at both sides; others
 *                                are made
 *   msg_xrc reject PROV NODE     fi_reject, of the first request and of one on a circuit
 *   msg_xrc rc PROV NODE         a listener on XRC refuses an endpoint on RC
 *   msg_xrc to_rc PROV NODE      a listener on RC refuses an endpoint on XRC
 *   msg_xrc bound PROV NODE      an XRC domain of the application
 *
 * Ends with 0, or says what went wrong. Plain libfabric 1.17, and weft.h. */
#define MEMORY (1UL << 20)
#include "end.h"

#include <fcntl.h>
#include <rdma/fi_atomic.h>
#include <stdatomic.h>
#include <sys/mman.h>

#include <weft.h>

enum { EPS = 4, LONGEST = 65536, RECVS = 32, SERVERS = 3, PEPS = 2 };
enum { COUNTER = 0, AREA = 4096 }; /* in the memory of a server */

static const size_t sizes[] = { 0, 1, 8, 63, 64, 65, 511, 4096, 4097, 16384, 40001, 65536 };
enum { SIZES = sizeof sizes / sizeof *sizes };

#define IS(condition)                                                                                                \
	do {                                                                                                         \
		if (!(condition))                                                                                    \
			die("line %d: not so: %s", __LINE__, #condition);                                            \
	} while (0)

struct board {
	_Atomic int named[SERVERS], done[SERVERS], stop, successor;
	uint8_t names[SERVERS][128];
	struct remote remotes[SERVERS];
};
static struct board *board;
static int on_rc[SERVERS]; /* by place of the server, for the modes rc and to_rc */

struct host {
	struct end end;
	struct fid_ep *eps[EPS * SERVERS];
	struct fid_pep *pep;
	uint8_t *buffers;
	struct fid_mr *buffers_mr;
	struct fid *xrcd;
	struct fi_context contexts[RECVS];
};

static struct fi_info *info_xrc(const char *service, uint64_t flags, int rc)
{
	struct fi_info *hints = fi_allocinfo(), *info;

	hints->caps = FI_MSG | FI_RMA | FI_ATOMIC;
	hints->mode = FI_CONTEXT | FI_CONTEXT2 | FI_RX_CQ_DATA;
	hints->ep_attr->type = FI_EP_MSG;
	hints->ep_attr->protocol = rc ? FI_PROTO_RDMA_CM_IB_RC : FI_PROTO_RDMA_CM_IB_XRC;
	hints->ep_attr->rx_ctx_cnt = FI_SHARED_CONTEXT;
	hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
	hints->fabric_attr->prov_name = strdup(provider);
	MUST(fi_getinfo(FI_VERSION(1, 17), node, service, flags, hints, &info));
	IS(info->ep_attr->protocol == hints->ep_attr->protocol);
	fi_freeinfo(hints);
	return info;
}

static void post(struct host *host, size_t slot)
{
	MUST(fi_recv(host->end.srx, host->buffers + slot * LONGEST, LONGEST, fi_mr_desc(host->buffers_mr), 0,
		     (void *)slot));
}

/* Objects without endpoints. `xrcd`: the path of an XRC domain's file, or NULL. */
static void open_host(struct host *host, const char *service, uint64_t flags, int rc, const char *xrcd)
{
	struct fi_cq_attr attr = { .format = FI_CQ_FORMAT_DATA, .wait_obj = FI_WAIT_NONE };
	uint64_t access = FI_SEND | FI_RECV | FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE;
	struct end *end = &host->end;

	memset(host, 0, sizeof *host);
	end->info = info_xrc(service, flags, rc);
	open_fabric(end);
	MUST(fi_domain(end->fabric, end->info, &end->domain, NULL));
	MUST(fi_cq_open(end->domain, &attr, &end->cq, NULL));
	MUST(fi_srx_context(end->domain, end->info->rx_attr, &end->srx, NULL));
	end->memory = aligned_alloc(4096, MEMORY);
	host->buffers = aligned_alloc(4096, RECVS * LONGEST);
	memset(end->memory, 0, MEMORY);
	MUST(fi_mr_reg(end->domain, end->memory, MEMORY, access, 0, 1, 0, &end->mr, NULL));
	MUST(fi_mr_reg(end->domain, host->buffers, RECVS * LONGEST, FI_RECV, 0, 2, 0, &host->buffers_mr, NULL));
	for (size_t slot = 0; slot < RECVS; slot++)
		post(host, slot);
	if (xrcd) {
		const struct weft_mr_ops *ops;

		MUST(fi_open_ops(&end->domain->fid, WEFT_MR_OPS, 0, (void **)&ops, NULL));
		MUST(ops->xrcd_open(end->domain, xrcd, -1, O_CREAT, &host->xrcd, NULL));
	}
}

static struct fid_ep *endpoint(struct host *host, struct fi_info *info)
{
	struct end *end = &host->end;
	struct fid_ep *ep;

	MUST(fi_endpoint(end->domain, info, &ep, NULL));
	MUST(fi_ep_bind(ep, &end->eq->fid, 0));
	MUST(fi_ep_bind(ep, &end->cq->fid, FI_TRANSMIT | FI_RECV));
	MUST(fi_ep_bind(ep, &end->srx->fid, 0));
	if (host->xrcd)
		MUST(fi_ep_bind(ep, host->xrcd, 0));
	MUST(fi_enable(ep));
	return ep;
}

/* The endpoint of the next event, which has to be of this kind. */
static struct fid *event_of(struct host *host, int want, struct fi_info **info, double seconds)
{
	struct fi_eq_cm_entry entry;
	struct fi_eq_err_entry error = { 0 };
	uint32_t kind = 0;
	ssize_t got = fi_eq_sread(host->end.eq, &kind, &entry, sizeof entry, (int)(seconds * 1000), 0);

	if (got == -FI_EAVAIL) {
		MUST(fi_eq_readerr(host->end.eq, &error, 0));
		die("event queue: error %d (%s)", error.err, fi_strerror(error.err));
	}
	MUST(got);
	if ((int)kind != want)
		die("event %u, expected %d", kind, want);
	if (info)
		*info = entry.info;
	return entry.fid;
}

static void listen_at(struct host *host, int place, int rc, const char *xrcd)
{
	size_t size = sizeof board->names[place];

	open_host(host, "0", FI_SOURCE, rc, xrcd);
	MUST(fi_passive_ep(host->end.fabric, host->end.info, &host->pep, NULL));
	MUST(fi_pep_bind(host->pep, &host->end.eq->fid, 0));
	MUST(fi_listen(host->pep));
	MUST(fi_getname(&host->pep->fid, board->names[place], &size));
	board->remotes[place] = (struct remote){ (uintptr_t)host->end.memory, fi_mr_key(host->end.mr) };
	atomic_store(&board->named[place], 1);
}

/* Accepts each request; requests come before earlier ones are connected. */
static void accept_some(struct host *host, int count)
{
	for (int requested = 0, connected = 0; connected < count;) {
		struct fi_eq_cm_entry entry;
		uint32_t kind;

		ssize_t got = fi_eq_sread(host->end.eq, &kind, &entry, sizeof entry, SETUP_SECONDS * 1000, 0);
		if (got < 0)
			die("%d of %d requests, %d connected: %zd", requested, count, connected, got);
		IS(kind == FI_CONNREQ || kind == FI_CONNECTED);
		if (kind == FI_CONNECTED) {
			connected++;
			continue;
		}
		IS(entry.info->ep_attr->protocol == host->end.info->ep_attr->protocol);
		host->eps[requested] = endpoint(host, entry.info);
		MUST(fi_accept(host->eps[requested++], "yes", 4));
		fi_freeinfo(entry.info);
	}
}

static void await_name(int place)
{
	double limit = now() + SETUP_SECONDS;

	while (!atomic_load(&board->named[place])) {
		if (now() > limit)
			die("server %d does not listen", place);
		usleep(1000);
	}
}

/* All at once: requests that find no circuit, and such that do. */
static void connect_some(struct host *host, int first, int count, int place)
{
	await_name(place);
	for (int i = first; i < first + count; i++) {
		host->eps[i] = endpoint(host, host->end.info);
		MUST(fi_connect(host->eps[i], board->names[place], "hi", 3));
	}
	for (int i = 0; i < count; i++)
		event_of(host, FI_CONNECTED, NULL, SETUP_SECONDS);
}

static uint8_t byte_of(uint64_t seed, size_t at) { return (uint8_t)(seed * 131 + at * 7 + (at >> 8)); }

/* Sends a message of each length on each endpoint and takes as many, in any order between the
 * endpoints: the immediate data has the number of the sender's endpoint and that of the message. */
static void exchange(struct host *host, int count, int with)
{
	int sent = 0, done = 0, taken = 0, total = count * SIZES, next[EPS * SERVERS * 2] = { 0 };
	uint8_t *out = host->end.memory + MEMORY / 2;
	double limit = now() + 60;

	while (done < total || taken < total) {
		struct fi_cq_data_entry entry;
		ssize_t got;

		if (now() > limit)
			die("exchange: %d sent, %d done, %d taken of %d", sent, done, taken, total);
		/* one message at a time: there is one buffer */
		if (sent < total && done == sent) {
			int ep = sent % count, number = sent / count;
			size_t len = sizes[number];
			uint64_t seed = (uint64_t)((with + ep) * SIZES + number);
			for (size_t i = 0; i < len; i++)
				out[i] = byte_of(seed, i);
			ssize_t posted = fi_senddata(host->eps[ep], out, len, fi_mr_desc(host->end.mr), seed, 0, (void *)-1);
			if (posted != -FI_EAGAIN)
				MUST(posted);
			sent += !posted;
		}
		got = fi_cq_read(host->end.cq, &entry, 1);
		if (got == -FI_EAVAIL) {
			struct fi_cq_err_entry error = { 0 };
			MUST(fi_cq_readerr(host->end.cq, &error, 0));
			die("a completion in error: %s", fi_strerror(error.err));
		}
		if (got == -FI_EAGAIN)
			continue;
		MUST(got);
		if (entry.op_context == (void *)-1) {
			done++;
			continue;
		}
		size_t slot = (size_t)entry.op_context;
		uint64_t seed = entry.data, from = seed / SIZES, number = seed % SIZES;
		IS(slot < RECVS && entry.flags & FI_REMOTE_CQ_DATA && from < EPS * SERVERS * 2);
		IS(number == (uint64_t)next[from]++ && entry.len == sizes[number]);
		for (size_t i = 0; i < entry.len; i++)
			IS(host->buffers[slot * LONGEST + i] == byte_of(seed, i));
		taken++;
		post(host, slot);
	}
}

static void done_in_order(struct host *host)
{
	struct fi_cq_data_entry entry;
	struct fi_cq_err_entry error = { 0 };
	double limit = now() + SETUP_SECONDS;
	ssize_t got;

	while ((got = fi_cq_read(host->end.cq, &entry, 1)) == -FI_EAGAIN)
		IS(now() < limit);
	if (got == -FI_EAVAIL) {
		MUST(fi_cq_readerr(host->end.cq, &error, 0));
		die("a completion in error: %s", fi_strerror(error.err));
	}
	MUST(got);
}

/* RMA and atomics on each endpoint. */
static void access_remote(struct host *host, int first, int count, int place)
{
	struct remote remote = board->remotes[place];
	uint8_t *own = host->end.memory;
	void *desc = fi_mr_desc(host->end.mr);

	for (int i = first; i < first + count; i++) {
		uint64_t at = remote.addr + AREA + (uint64_t)i * LONGEST;
		uint64_t one = 1, *before = (uint64_t *)(own + 2 * LONGEST);
		for (size_t b = 0; b < LONGEST; b++)
			own[b] = byte_of((uint64_t)i, b);
		MUST(fi_write(host->eps[i], own, LONGEST, desc, 0, at, remote.key, NULL));
		done_in_order(host);
		MUST(fi_read(host->eps[i], own + LONGEST, LONGEST, desc, 0, at, remote.key, NULL));
		done_in_order(host);
		IS(!memcmp(own, own + LONGEST, LONGEST));
		MUST(fi_fetch_atomic(host->eps[i], &one, 1, NULL, before, desc, 0, remote.addr + COUNTER, remote.key,
				     FI_UINT64, FI_SUM, NULL));
		done_in_order(host);
		IS(*before == (uint64_t)(i - first));
	}
}

static void close_host(struct host *host)
{
	struct end *end = &host->end;

	for (size_t i = 0; i < sizeof host->eps / sizeof *host->eps; i++)
		if (host->eps[i])
			MUST(fi_close(&host->eps[i]->fid));
	if (host->pep)
		MUST(fi_close(&host->pep->fid));
	MUST(fi_close(&end->srx->fid));
	if (host->xrcd)
		MUST(fi_close(host->xrcd));
	MUST(fi_close(&end->mr->fid));
	MUST(fi_close(&host->buffers_mr->fid));
	MUST(fi_close(&end->cq->fid));
	MUST(fi_close(&end->domain->fid));
	MUST(fi_close(&end->eq->fid));
	MUST(fi_close(&end->fabric->fid));
	fi_freeinfo(end->info);
}

/* ---- the servers ---- */

static const char *file; /* of the XRC domain, in the mode bound */

static void serve(int place, int count, int messages)
{
	struct host host;

	listen_at(&host, place, on_rc[place], file);
	accept_some(&host, count);
	if (messages)
		exchange(&host, count, EPS * SERVERS + place * EPS);
	atomic_store(&board->done[place], 1);
	while (!atomic_load(&board->stop)) {
		struct fi_eq_cm_entry entry;
		uint32_t kind;

		/* refuses requests of the other transport, and sees the ends of connections */
		ssize_t got = fi_eq_read(host.end.eq, &kind, &entry, sizeof entry, 0);
		IS(got == -FI_EAGAIN || (got > 0 && kind == FI_SHUTDOWN));
		usleep(1000);
	}
	close_host(&host);
}

/* Before any call of libfabric. Server 2 begins when `successor` is set. */
static pid_t server(int place, int count, int messages)
{
	static const char *names[] = { "server 0", "server 1", "server 2" };
	pid_t pid = child(names[place]);

	if (pid == 0) {
		while (place == 2 && !atomic_load(&board->successor))
			usleep(1000);
		serve(place, count, messages);
		exit(0);
	}
	return pid;
}

static void finish(struct host *host, pid_t *pids, int count)
{
	atomic_store(&board->stop, 1);
	close_host(host);
	for (int i = 0; i < count; i++)
		IS(status_of(pids[i], "server") == 0);
}

/* ---- the modes ---- */

static void check_messages(void)
{
	struct host host;
	pid_t pid = server(0, EPS, 1);

	open_host(&host, NULL, 0, 0, file);
	connect_some(&host, 0, EPS, 0);
	exchange(&host, EPS, 0);
	access_remote(&host, 0, EPS, 0);
	finish(&host, &pid, 1);
}

static void check_node(void)
{
	struct host host;
	pid_t pids[] = { server(0, 2, 0), server(1, 2, 0) };

	open_host(&host, NULL, 0, 0, file);
	connect_some(&host, 0, 2, 0);
	connect_some(&host, 2, 2, 1);
	access_remote(&host, 0, 2, 0);
	access_remote(&host, 2, 2, 1);
	finish(&host, pids, 2);
}

/* FI_SHUTDOWN of exactly these endpoints. */
static void ended(struct host *host, int first, int count)
{
	int seen = 0;

	for (int i = 0; i < count; i++) {
		struct fid *fid = event_of(host, FI_SHUTDOWN, NULL, 10);
		for (int ep = first; ep < first + count; ep++)
			if (host->eps[ep] && fid == &host->eps[ep]->fid)
				seen |= 1 << ep;
	}
	IS(seen == ((1 << count) - 1) << first);
	struct fi_eq_cm_entry entry;
	uint32_t kind = 0;
	ssize_t got = fi_eq_sread(host->end.eq, &kind, &entry, sizeof entry, 300, 0);
	for (int ep = 0; got > 0 && ep < EPS * SERVERS; ep++)
		if (host->eps[ep] && entry.fid == &host->eps[ep]->fid)
			die("event %u of endpoint %d too", kind, ep);
	IS(got == -FI_EAGAIN);
}

static void check_killed(int posts)
{
	struct host host;
	pid_t pids[] = { server(0, 3, 0), server(1, 1, 0), server(2, 2, 0) };

	open_host(&host, NULL, 0, 0, file);
	connect_some(&host, 0, 3, 0);
	connect_some(&host, 3, 1, 1);
	while (!atomic_load(&board->done[0]))
		usleep(1000);
	kill(pids[0], SIGKILL);
	/* the first endpoint sends until a send fails */
	for (int failed = 0; posts && !failed;) {
		struct fi_cq_data_entry entry;
		struct fi_cq_err_entry error = { 0 };
		ssize_t sent = fi_send(host.eps[0], host.end.memory, 8, fi_mr_desc(host.end.mr), 0, NULL);
		ssize_t got = fi_cq_read(host.end.cq, &entry, 1);
		if (got == -FI_EAVAIL)
			failed = (int)fi_cq_readerr(host.end.cq, &error, 0);
		failed |= sent != 0 && sent != -FI_EAGAIN;
	}
	ended(&host, 0, 3);
	struct fi_cq_data_entry entry;
	struct fi_cq_err_entry error = { 0 };
	for (ssize_t got; (got = fi_cq_read(host.end.cq, &entry, 1)) != -FI_EAGAIN;)
		if (got == -FI_EAVAIL)
			MUST(fi_cq_readerr(host.end.cq, &error, 0));
	access_remote(&host, 3, 1, 1);
	for (int i = 0; i < 3; i++) {
		MUST(fi_close(&host.eps[i]->fid));
		host.eps[i] = NULL;
	}
	int status;
	IS(waitpid(pids[0], &status, 0) == pids[0]);
	pids[0] = pids[2];
	atomic_store(&board->successor, 1);
	connect_some(&host, 4, 2, 2);
	access_remote(&host, 4, 2, 2);
	finish(&host, pids, 2);
}

static void check_shutdown(void)
{
	struct host host;
	pid_t pid = child("server 0");

	if (pid == 0) {
		listen_at(&host, 0, 0, file);
		accept_some(&host, EPS);
		MUST(fi_shutdown(host.eps[0], 0));
		IS(event_of(&host, FI_SHUTDOWN, NULL, 5) == &host.eps[0]->fid);
		/* the client ends one, when it has seen the end of the first */
		IS(event_of(&host, FI_SHUTDOWN, NULL, 10) != &host.eps[0]->fid);
		MUST(fi_close(&host.eps[2]->fid));
		host.eps[2] = NULL;
		while (!atomic_load(&board->stop))
			usleep(1000);
		close_host(&host);
		exit(0);
	}
	open_host(&host, NULL, 0, 0, file);
	/* one after the other, so that the endpoints have the same order on both sides */
	for (int i = 0; i < EPS; i++)
		connect_some(&host, i, 1, 0);
	ended(&host, 0, 1);
	IS(fi_send(host.eps[0], host.end.memory, 8, fi_mr_desc(host.end.mr), 0, NULL) == -FI_ESHUTDOWN);
	MUST(fi_close(&host.eps[1]->fid));
	host.eps[1] = NULL;
	ended(&host, 2, 1);
	struct remote remote = board->remotes[0];
	MUST(fi_write(host.eps[3], host.end.memory, 8, fi_mr_desc(host.end.mr), 0, remote.addr, remote.key, NULL));
	done_in_order(&host);
	finish(&host, &pid, 1);
}

static void check_broken(void)
{
	struct host host;
	pid_t pid = child("server 0");

	if (pid == 0) {
		listen_at(&host, 0, 0, file);
		accept_some(&host, EPS);
		/* the client has its last FI_CONNECTED before this side has its own */
		atomic_store(&board->done[1], 1);
		ended(&host, 0, EPS);
		for (int i = 0; i < EPS; i++) {
			MUST(fi_close(&host.eps[i]->fid));
			host.eps[i] = NULL;
		}
		atomic_store(&board->done[0], 1);
		accept_some(&host, 2);
		while (!atomic_load(&board->stop))
			usleep(1000);
		close_host(&host);
		exit(0);
	}
	open_host(&host, NULL, 0, 0, file);
	connect_some(&host, 0, EPS, 0);
	struct remote remote = board->remotes[0];
	struct fi_cq_data_entry entry;
	struct fi_cq_err_entry error = { 0 };
	while (!atomic_load(&board->done[1]))
		usleep(1000);
	double limit = now() + SETUP_SECONDS;
	MUST(fi_write(host.eps[1], host.end.memory, 8, fi_mr_desc(host.end.mr), 0, remote.addr, remote.key ^ 0x5a00,
		      NULL));
	ssize_t got;
	while ((got = fi_cq_read(host.end.cq, &entry, 1)) == -FI_EAGAIN)
		IS(now() < limit);
	IS(got == -FI_EAVAIL);
	MUST(fi_cq_readerr(host.end.cq, &error, 0));
	IS(error.err == FI_EKEYREJECTED);
	ended(&host, 0, EPS);
	while (!atomic_load(&board->done[0]))
		usleep(1000);
	connect_some(&host, EPS, 2, 0);
	access_remote(&host, EPS, 2, 0);
	finish(&host, &pid, 1);
}

/* An error event of a connection, with this data of the peer. */
static void refused(struct host *host, struct fid_ep *ep, const char *data)
{
	struct fi_eq_cm_entry entry;
	char got[64] = { 0 };
	struct fi_eq_err_entry error = { .err_data = got, .err_data_size = sizeof got };
	uint32_t kind;

	IS(fi_eq_sread(host->end.eq, &kind, &entry, sizeof entry, 10000, 0) == -FI_EAVAIL);
	MUST(fi_eq_readerr(host->end.eq, &error, 0));
	IS(error.fid == &ep->fid && error.err == FI_ECONNREFUSED);
	IS(!data || (error.err_data_size == strlen(data) + 1 && !strcmp(got, data)));
	IS(data || !error.err_data_size);
}

static void check_reject(void)
{
	struct host host;
	pid_t pid = child("server 0");

	if (pid == 0) {
		struct fi_info *request;
		listen_at(&host, 0, 0, file);
		for (int i = 0; i < 3; i++) {
			event_of(&host, FI_CONNREQ, &request, SETUP_SECONDS);
			if (i == 1) {
				host.eps[0] = endpoint(&host, request);
				MUST(fi_accept(host.eps[0], NULL, 0));
				event_of(&host, FI_CONNECTED, NULL, SETUP_SECONDS);
				/* the next request may arrive before the end of this connection's handshake */
				atomic_store(&board->done[0], 1);
			} else {
				MUST(fi_reject(host.pep, request->handle, "no", 3));
			}
			fi_freeinfo(request);
		}
		while (!atomic_load(&board->stop))
			usleep(1000);
		close_host(&host);
		exit(0);
	}
	open_host(&host, NULL, 0, 0, file);
	await_name(0);
	for (int i = 0; i < 3; i++) {
		host.eps[i] = endpoint(&host, host.end.info);
		MUST(fi_connect(host.eps[i], board->names[0], NULL, 0));
		if (i == 1) {
			event_of(&host, FI_CONNECTED, NULL, SETUP_SECONDS);
			while (!atomic_load(&board->done[0]))
				usleep(1000);
		} else
			refused(&host, host.eps[i], "no");
	}
	finish(&host, &pid, 1);
}

static void meet(int rc)
{
	struct host host;

	on_rc[0] = rc;
	pid_t pid = server(0, 0, 0);
	open_host(&host, NULL, 0, !rc, NULL);
	await_name(0);
	host.eps[0] = endpoint(&host, host.end.info);
	MUST(fi_connect(host.eps[0], board->names[0], "hello", 5));
	refused(&host, host.eps[0], NULL);
	finish(&host, &pid, 1);
}

static void check_rc(void) { meet(0); }
static void check_to_rc(void) { meet(1); }

static void check_bound(void)
{
	struct host host;
	struct fid *xrcd;
	const struct weft_mr_ops *ops;
	char path[] = "/tmp/weft-xrcd-XXXXXX";
	int fd = mkstemp(path);

	IS(fd >= 0);
	file = path;
	pid_t pids[] = { server(0, 2, 0), server(1, 2, 0) };
	open_host(&host, NULL, 0, 0, file);
	MUST(fi_open_ops(&host.end.domain->fid, WEFT_MR_OPS, 0, (void **)&ops, NULL));
	connect_some(&host, 0, 2, 0);
	connect_some(&host, 2, 2, 1);
	access_remote(&host, 0, 2, 0);
	access_remote(&host, 2, 2, 1);
	/* the domain has an endpoint */
	IS(fi_close(host.xrcd) == -FI_EBUSY);
	MUST(ops->xrcd_open(host.end.domain, NULL, -1, O_CREAT, &xrcd, NULL));
	IS(fi_ep_bind(host.eps[0], xrcd, 0) == -FI_EOPBADSTATE);
	struct fid_ep *ep;
	MUST(fi_endpoint(host.end.domain, host.end.info, &ep, NULL));
	IS(fi_ep_bind(ep, xrcd, FI_SEND) == -FI_EBADFLAGS);
	/* an XRC domain of another fi_domain, on the same device */
	struct fid_domain *second;
	struct fid *foreign;
	MUST(fi_domain(host.end.fabric, host.end.info, &second, NULL));
	MUST(ops->xrcd_open(second, NULL, -1, O_CREAT, &foreign, NULL));
	IS(fi_ep_bind(ep, foreign, 0) == -FI_EDOMAIN);
	MUST(fi_close(foreign));
	MUST(fi_close(&second->fid));
	MUST(fi_ep_bind(ep, xrcd, 0));
	IS(fi_ep_bind(ep, host.xrcd, 0) == -FI_EINVAL);
	MUST(fi_close(&ep->fid));
	MUST(fi_close(xrcd));
	finish(&host, pids, 2);
	unlink(path);
	close(fd);
}

static void check_posting(void) { check_killed(1); }
static void check_idle(void) { check_killed(0); }

int main(int argc, char **argv)
{
	static const struct {
		const char *name;
		void (*check)(void);
	} modes[] = {
		{ "messages", check_messages }, { "node", check_node }, { "killed", check_posting }, { "idle", check_idle },
		{ "shutdown", check_shutdown }, { "broken", check_broken }, { "reject", check_reject }, { "rc", check_rc }, { "to_rc", check_to_rc }, { "bound", check_bound },
	};

	if (argc != 4)
		die("usage: msg_xrc MODE PROV NODE");
	role = argv[1];
	provider = argv[2];
	node = argv[3];
	board = mmap(NULL, sizeof *board, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	IS(board != MAP_FAILED);
	alarm(80);
	for (size_t i = 0; i < sizeof modes / sizeof *modes; i++)
		if (!strcmp(argv[1], modes[i].name)) {
			modes[i].check();
			return 0;
		}
	die("no such mode");
}
