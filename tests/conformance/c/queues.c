/* Completion queues that the application does not read, full ones, and event queues with several
 * readers.
 *
 *   queues MODE PROV NODE
 *
 * closed: an endpoint is closed while its queue is full: the completions of all sends that have
 * succeeded remain.
 *
 * ended: the same if the peer closes its endpoint: FI_SHUTDOWN comes at once.
 *
 * key: a write whose key has to be looked up is sent although the application does not read its
 * full queue.
 *
 * revoked: regions that the peer uses are closed while the queue is full: without delay, and the
 * connection stays.
 *
 * reserved: an endpoint that only receives: a region is closed while as many receives are posted as
 * its queue has room for.
 *
 * readers: several threads read an event queue: all receives are flushed before one of the threads
 * gets FI_SHUTDOWN.
 *
 * failed: a read that finds a failed queue returns the completions that were polled before.
 *
 * nothing: the same, polled by a read of no completions: it drives progress.
 *
 * quiet: fi_trywait(3) leaves the descriptors of queues and counters without an event not readable,
 * after passive and active endpoints are bound to them.
 *
 * Exits with 0, or prints the failure. Needs only libfabric 1.17. */
#define MEMORY (1UL << 20)
#include "end.h"

#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/select.h>

#define MESSAGES 64
#define LENGTH 64
#define SMALL 4
#define KEY 7
#define KEYS 15
#define REGIONS 64
/* Shorter than the time after which an initiator examines its keys and polls for them. A process that
 * waits for its processor takes as long, so the shortest of KEYS times is compared: a look-up that
 * waits for that time, or for the application, is late each time. */
#define STEP 0.004
/* One close waits 1 s for a peer that does not acknowledge it. */
#define ACKNOWLEDGED 0.9
#define SOON 0.1

static const char *mode;
static int to_client[2], to_server[2];

/* Whether the application chooses the regions' keys, so that the initiator looks them up. */
static int has_keys(void) { return !strcmp(mode, "key") || !strcmp(mode, "revoked") || !strcmp(mode, "reserved"); }

static struct fi_info *info_for(const char *service, uint64_t flags, int receives_only)
{
	struct fi_info *hints = fi_allocinfo(), *info;

	hints->caps = FI_MSG | FI_RMA;
	if (receives_only)
		hints->caps |= FI_RECV | FI_REMOTE_WRITE;
	hints->mode = FI_CONTEXT | FI_CONTEXT2 | FI_RX_CQ_DATA;
	hints->ep_attr->type = FI_EP_MSG;
	hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | (has_keys() ? 0 : FI_MR_PROV_KEY);
	hints->fabric_attr->prov_name = strdup(provider);
	MUST(fi_getinfo(FI_VERSION(1, 17), node, service, flags, hints, &info));
	fi_freeinfo(hints);
	return info;
}

static struct fid_mr *region(struct end *end, uint64_t key)
{
	uint64_t access = FI_SEND | FI_RECV | FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE;
	struct fid_mr *mr;

	MUST(fi_mr_reg(end->domain, end->memory, MEMORY, access, 0, key, 0, &mr, NULL));
	return mr;
}

static struct fid_cq *queue(struct end *end, size_t size)
{
	struct fi_cq_attr attr = { .format = FI_CQ_FORMAT_CONTEXT, .wait_obj = FI_WAIT_NONE, .size = size };
	struct fid_cq *cq;

	MUST(fi_cq_open(end->domain, &attr, &cq, NULL));
	return cq;
}

static void open_queues(struct end *end, struct fi_info *info, size_t cq_size)
{
	MUST(fi_domain(end->fabric, info, &end->domain, NULL));
	end->cq = queue(end, cq_size);
	end->memory = aligned_alloc(4096, MEMORY);
	memset(end->memory, 0, MEMORY);
	end->mr = region(end, 1);
}

static void open_one(struct end *end, struct fi_info *info, uint64_t flags)
{
	MUST(fi_endpoint(end->domain, info, &end->ep, NULL));
	MUST(fi_ep_bind(end->ep, &end->eq->fid, 0));
	MUST(fi_ep_bind(end->ep, &end->cq->fid, flags));
	MUST(fi_enable(end->ep));
}

/* ---- both sides ---- */

static void post_receives(struct end *end, int count)
{
	for (int i = 0; i < count; i++)
		MUST(fi_recv(end->ep, end->memory + i * LENGTH, LENGTH, fi_mr_desc(end->mr), 0, NULL));
}

static void send_messages(struct end *end, int count)
{
	for (int i = 0; i < count; i++)
		MUST(fi_send(end->ep, end->memory, LENGTH, fi_mr_desc(end->mr), 0, NULL));
}

static void must_complete(struct end *end, int count)
{
	for (int i = 0; i < count; i++) {
		int error = completion(end, SETUP_SECONDS);

		if (error)
			die("completion %d of %d: %s", i, count, fi_strerror(error));
	}
}

static void must_be_empty(struct end *end)
{
	struct fi_cq_entry entry;
	ssize_t got = fi_cq_read(end->cq, &entry, 1);

	if (got != -FI_EAGAIN)
		die("%zd from a queue that must be empty", got);
}

static void must_be_connected(struct end *end)
{
	int kind = event(end, 0.3, NULL);

	if (kind != -1)
		die("event %d where the connection was to last", kind);
}

static void say(const int *pipe) { tell(pipe[1], "s", 1); }

static void await(const int *pipe)
{
	char byte;

	hear(pipe[0], &byte, 1);
}

/* ---- the server accepts connections ---- */

struct server {
	struct end end;
	struct fid_pep *pep;
};

static struct fi_info *listen_for(struct server *server, int receives_only)
{
	uint8_t name[128] = { 0 };
	size_t size = sizeof name;
	struct end *end = &server->end;

	end->info = info_for("0", FI_SOURCE, receives_only);
	open_fabric(end);
	MUST(fi_passive_ep(end->fabric, end->info, &server->pep, NULL));
	MUST(fi_pep_bind(server->pep, &end->eq->fid, 0));
	MUST(fi_listen(server->pep));
	MUST(fi_getname(&server->pep->fid, name, &size));
	tell(to_client[1], name, sizeof name);
	return end->info;
}

static void accept_one(struct server *server, uint64_t flags, size_t rx_size, int receives)
{
	struct end *end = &server->end;
	struct fi_info *request;

	expect(end, FI_CONNREQ, &request);
	if (rx_size)
		request->rx_attr->size = rx_size;
	open_one(end, request, flags);
	post_receives(end, receives);
	MUST(fi_accept(end->ep, NULL, 0));
	expect(end, FI_CONNECTED, NULL);
	fi_freeinfo(request);
}

static void tell_remote(struct end *end, uint64_t key)
{
	struct remote remote = { .addr = (uintptr_t)end->memory, .key = key };

	tell(to_client[1], &remote, sizeof remote);
}

/* ---- the client connects ---- */

static void connect_first(struct end *end, uint8_t *name, size_t cq_size)
{
	hear(to_client[0], name, 128);
	end->info = info_for(NULL, 0, 0);
	open_fabric(end);
	open_queues(end, end->info, cq_size);
}

static void connect_one(struct end *end, const uint8_t *name)
{
	open_one(end, end->info, FI_TRANSMIT | FI_RECV);
	MUST(fi_connect(end->ep, name, NULL, 0));
	expect(end, FI_CONNECTED, NULL);
}

/* ---- closed, ended: the end of a connection while the queue is full ---- */

#define ROUNDS 5

static void full_server(void)
{
	struct server server = { 0 };
	struct end *end = &server.end;

	open_queues(end, listen_for(&server, 0), 0);
	for (int i = 0; i < ROUNDS; i++) {
		accept_one(&server, FI_TRANSMIT | FI_RECV, 0, MESSAGES);
		must_complete(end, MESSAGES);
		if (!strcmp(mode, "ended")) {
			MUST(fi_close(&end->ep->fid));
			say(to_client);
		} else {
			say(to_client);
			expect(end, FI_SHUTDOWN, NULL);
			MUST(fi_close(&end->ep->fid));
		}
	}
}

static void full_client(void)
{
	struct end end = { 0 };
	uint8_t name[128];
	double best = 1e9;

	connect_first(&end, name, SMALL);
	for (int i = 0; i < ROUNDS; i++) {
		double start;

		connect_one(&end, name);
		send_messages(&end, MESSAGES);
		await(to_client);
		start = now();
		if (!strcmp(mode, "ended"))
			expect(&end, FI_SHUTDOWN, NULL);
		else
			MUST(fi_close(&end.ep->fid));
		if (now() - start < best)
			best = now() - start;
		must_complete(&end, MESSAGES);
		must_be_empty(&end);
		if (!strcmp(mode, "ended"))
			MUST(fi_close(&end.ep->fid));
	}
	if (best > SOON)
		die("the end of a connection takes %.3f s while the queue is full", best);
	printf("%.4f s\n", best);
}

/* ---- key: the look-up completes behind completions that the application does not read ---- */

static int by_size(const void *a, const void *b)
{
	double one = *(const double *)a, other = *(const double *)b;

	return (one > other) - (one < other);
}

static void key_server(void)
{
	struct server server = { 0 };
	struct end *end = &server.end;
	volatile uint8_t *last;
	struct fid_mr *targets[KEYS];
	double took[KEYS];

	open_queues(end, listen_for(&server, 0), 0);
	for (int i = 0; i < KEYS; i++)
		targets[i] = region(end, KEY + i);
	last = end->memory + MEMORY - KEYS;
	accept_one(&server, FI_TRANSMIT | FI_RECV, 0, MESSAGES);
	must_complete(end, MESSAGES);
	tell_remote(end, KEY);
	for (int i = 0; i < KEYS; i++) {
		double start, limit;

		/* the initiator's clock, since this process may begin to look when the write is there */
		hear(to_server[0], &start, sizeof start);
		for (limit = now() + 3; !last[i];)
			if (now() > limit)
				die("the write does not come while the initiator reads nothing");
		took[i] = now() - start;
		say(to_client);
	}
	qsort(took, KEYS, sizeof *took, by_size);
	printf("shortest %.6f s, median %.6f s\n", took[0], took[KEYS / 2]);
	if (took[0] > STEP)
		die("a write whose key is looked up takes %.4f s while the initiator reads nothing", took[0]);
	await(to_server);
	for (int i = 0; i < KEYS; i++)
		MUST(fi_close(&targets[i]->fid));
}

static void key_client(void)
{
	struct end end = { 0 };
	struct remote remote;
	uint8_t name[128];

	connect_first(&end, name, SMALL);
	connect_one(&end, name);
	memset(end.memory, 1, MEMORY);
	send_messages(&end, MESSAGES);
	hear(to_client[0], &remote, sizeof remote);
	for (int i = 0; i < KEYS; i++) {
		uint64_t at = MEMORY - KEYS + i;
		double start = now();

		tell(to_server[1], &start, sizeof start);
		MUST(fi_write(end.ep, end.memory + at, 1, fi_mr_desc(end.mr), 0, remote.addr + at, remote.key + i, NULL));
		await(to_client);
	}
	must_complete(&end, MESSAGES + KEYS);
	must_be_empty(&end);
	say(to_server);
}

/* ---- revoked, reserved: a region is closed; the client, which uses keys, must be notified ---- */

static void write_until_told(struct end *end, struct remote remote)
{
	double start = now();

	say(to_server);
	for (;;) {
		struct timeval none = { 0 };
		fd_set set;

		MUST(fi_write(end->ep, end->memory, LENGTH, fi_mr_desc(end->mr), 0, remote.addr, remote.key, NULL));
		must_complete(end, 1);
		FD_ZERO(&set);
		FD_SET(to_client[0], &set);
		if (select(to_client[0] + 1, &set, NULL, NULL, &none) == 1)
			break;
		if (now() - start > 20)
			die("the server does not end the writes");
	}
	await(to_client);
}

static void revoked_server(void)
{
	struct server server = { 0 };
	struct end *end = &server.end;
	struct fid_mr *regions[REGIONS], *target;

	open_queues(end, listen_for(&server, 0), SMALL);
	target = region(end, KEY);
	for (int i = 0; i < REGIONS; i++)
		regions[i] = region(end, 100 + i);
	accept_one(&server, FI_TRANSMIT | FI_RECV, 0, 0);
	send_messages(end, MESSAGES);
	tell_remote(end, KEY);
	await(to_server);
	/* after one second without the peer's acknowledgement the region is closed and the
	 * connection ended. Each close needs the processor for the peer once, so all together may take
	 * longer than one may. */
	for (int i = 0; i < REGIONS; i++) {
		double start = now();

		MUST(fi_close(&regions[i]->fid));
		if (now() - start > ACKNOWLEDGED)
			die("closing region %d takes %.3f s while the queue is full", i, now() - start);
	}
	must_be_connected(end);
	say(to_client);
	await(to_server);
	must_complete(end, MESSAGES);
	must_be_empty(end);
	MUST(fi_close(&target->fid));
}

static void reserved_server(void)
{
	struct server server = { 0 };
	struct end *end = &server.end;
	struct fi_info *info = listen_for(&server, 1);
	struct fid_mr *first, *target;
	struct fid_cq *other;
	struct fi_cq_entry entry;
	double start;

	open_queues(end, info, SMALL);
	target = region(end, KEY);
	first = region(end, 100);
	other = queue(end, 0);
	accept_one(&server, FI_RECV, SMALL, SMALL);
	tell_remote(end, KEY);
	await(to_server);
	/* the messages arrive while another queue is read */
	for (start = now(); now() - start < 0.1;)
		if (fi_cq_read(other, &entry, 1) != -FI_EAGAIN)
			die("a completion in the wrong queue");
	MUST(fi_close(&first->fid));
	must_be_connected(end);
	must_complete(end, SMALL);
	must_be_empty(end);
	say(to_client);
	await(to_server);
	MUST(fi_close(&target->fid));
	MUST(fi_close(&other->fid));
}

static void writing_client(void)
{
	struct end end = { 0 };
	struct remote remote;
	uint8_t name[128];
	int revoked = !strcmp(mode, "revoked");

	connect_first(&end, name, 0);
	connect_one(&end, name);
	hear(to_client[0], &remote, sizeof remote);
	if (revoked) {
		post_receives(&end, MESSAGES);
		must_complete(&end, MESSAGES);
	} else {
		send_messages(&end, SMALL);
		must_complete(&end, SMALL);
	}
	write_until_told(&end, remote);
	must_be_connected(&end);
	say(to_server);
}

/* ---- readers: the threads that read one event queue ---- */

#define READERS 2
#define RECEIVES 32
#define CONNECTIONS 200

static atomic_int over;

/* Control calls, which delay the thread that flushes the endpoint. */
static void *call(void *arg)
{
	struct end *end = arg;

	while (!atomic_load(&over)) {
		uint8_t name[128];
		size_t size = sizeof name;

		MUST(fi_getname(&end->ep->fid, name, &size));
	}
	return NULL;
}

static void *read_events(void *arg)
{
	struct end *end = arg;

	while (!atomic_load(&over)) {
		struct fi_eq_cm_entry entry;
		struct fi_cq_entry done;
		struct fi_cq_err_entry error = { 0 };
		uint32_t kind;
		ssize_t got = fi_eq_read(end->eq, &kind, &entry, sizeof entry, 0);

		if (got == -FI_EAGAIN)
			continue;
		MUST(got);
		if (kind != FI_SHUTDOWN)
			die("event %u instead of FI_SHUTDOWN", kind);
		for (int i = 0; i < RECEIVES; i++) {
			got = fi_cq_read(end->cq, &done, 1);
			if (got != -FI_EAVAIL)
				die("%zd instead of flushed receive %d of %d", got, i, RECEIVES);
			MUST(fi_cq_readerr(end->cq, &error, 0));
			if (error.err != FI_ECANCELED)
				die("receive %d: %s", i, fi_strerror(error.err));
		}
		atomic_store(&over, 1);
	}
	return NULL;
}

static void readers_server(void)
{
	struct server server = { 0 };
	struct end *end = &server.end;
	pthread_t threads[2 * READERS];

	open_queues(end, listen_for(&server, 0), 0);
	for (int i = 0; i < CONNECTIONS; i++) {
		accept_one(&server, FI_TRANSMIT | FI_RECV, 0, RECEIVES);
		atomic_store(&over, 0);
		for (int t = 0; t < 2 * READERS; t++)
			pthread_create(&threads[t], NULL, t < READERS ? read_events : call, end);
		say(to_client);
		for (int t = 0; t < 2 * READERS; t++)
			pthread_join(threads[t], NULL);
		MUST(fi_close(&end->ep->fid));
		say(to_client);
	}
}

static void readers_client(void)
{
	struct end end = { 0 };
	uint8_t name[128];

	connect_first(&end, name, 0);
	for (int i = 0; i < CONNECTIONS; i++) {
		connect_one(&end, name);
		await(to_client);
		MUST(fi_close(&end.ep->fid));
		await(to_client);
	}
}

/* ---- failed, nothing: in a forked child, whose queues fail, after completions were polled ---- */

static void failed_server(void)
{
	struct server server = { 0 };
	struct end *end = &server.end;

	open_queues(end, listen_for(&server, 0), 0);
	accept_one(&server, FI_TRANSMIT | FI_RECV, 0, SMALL);
	must_complete(end, SMALL);
	say(to_client);
	expect(end, FI_SHUTDOWN, NULL);
}

static void failed_client(void)
{
	struct fi_cq_entry entries[2 * SMALL];
	struct fi_cntr_attr attr = { .events = FI_CNTR_EVENTS_COMP, .wait_obj = FI_WAIT_NONE };
	struct fid_cntr *counter;
	struct end end = { 0 };
	uint8_t name[128];
	ssize_t got;
	pid_t pid;

	connect_first(&end, name, 0);
	MUST(fi_cntr_open(end.domain, &attr, &counter, NULL));
	MUST(fi_endpoint(end.domain, end.info, &end.ep, NULL));
	MUST(fi_ep_bind(end.ep, &end.eq->fid, 0));
	MUST(fi_ep_bind(end.ep, &end.cq->fid, FI_TRANSMIT | FI_RECV));
	MUST(fi_ep_bind(end.ep, &counter->fid, FI_SEND));
	MUST(fi_enable(end.ep));
	MUST(fi_connect(end.ep, name, NULL, 0));
	expect(&end, FI_CONNECTED, NULL);
	send_messages(&end, SMALL);
	await(to_client);
	if (!strcmp(mode, "nothing")) {
		got = fi_cq_read(end.cq, NULL, 0);
		if (got != 0 && got != -FI_EAGAIN)
			die("a read of nothing: %zd", got);
	} else if (fi_cntr_read(counter) != SMALL) {
		die("the counter is at %d", (int)fi_cntr_read(counter));
	}
	if ((pid = child("forked child")) == 0) {
		got = fi_cq_read(end.cq, entries, 2 * SMALL);
		if (got != SMALL)
			die("%zd instead of the %d completions that were polled", got, SMALL);
		got = fi_cq_read(end.cq, entries, 1);
		if (got >= 0 || got == -FI_EAGAIN)
			die("%zd from a failed queue", got);
		_exit(0);
	}
	if (status_of(pid, "forked child"))
		die("the forked child failed");
	must_complete(&end, SMALL);
	must_be_empty(&end);
	MUST(fi_close(&end.ep->fid));
	MUST(fi_close(&counter->fid));
}

/* ---- quiet ---- */

static void must_be_quiet(struct end *end, struct fid *object, const char *what)
{
	struct pollfd fd = { .events = POLLIN };
	int got;

	MUST(fi_control(object, FI_GETWAIT, &fd.fd));
	for (int i = 0; i < 3; i++) {
		got = fi_trywait(end->fabric, &object, 1);
		if (got)
			die("%s: fi_trywait: %d", what, got);
		if (poll(&fd, 1, 0))
			die("%s: fi_trywait returned 0, and the descriptor is readable", what);
	}
}

static void quiet_server(void)
{
	struct fi_eq_attr eq_attr = { .wait_obj = FI_WAIT_FD };
	struct fi_cq_attr cq_attr = { .format = FI_CQ_FORMAT_CONTEXT, .wait_obj = FI_WAIT_FD };
	struct fi_cntr_attr cntr_attr = { .events = FI_CNTR_EVENTS_COMP, .wait_obj = FI_WAIT_FD };
	struct fid_cntr *counter;
	struct fid_pep *pep;
	struct end end = { .info = info_for("0", FI_SOURCE, 0) };
	struct fid **objects[3] = { (struct fid **)&end.eq, (struct fid **)&end.cq, (struct fid **)&counter };
	static const char *const what[3] = { "event queue", "completion queue", "counter" };

	MUST(fi_fabric(end.info->fabric_attr, &end.fabric, NULL));
	MUST(fi_eq_open(end.fabric, &eq_attr, &end.eq, NULL));
	must_be_quiet(&end, &end.eq->fid, "new event queue");
	MUST(fi_passive_ep(end.fabric, end.info, &pep, NULL));
	MUST(fi_pep_bind(pep, &end.eq->fid, 0));
	must_be_quiet(&end, &end.eq->fid, "event queue of a passive endpoint");
	MUST(fi_listen(pep));
	must_be_quiet(&end, &end.eq->fid, "event queue of a listening endpoint");
	MUST(fi_domain(end.fabric, end.info, &end.domain, NULL));
	MUST(fi_cq_open(end.domain, &cq_attr, &end.cq, NULL));
	MUST(fi_cntr_open(end.domain, &cntr_attr, &counter, NULL));
	MUST(fi_endpoint(end.domain, end.info, &end.ep, NULL));
	MUST(fi_ep_bind(end.ep, &end.eq->fid, 0));
	MUST(fi_ep_bind(end.ep, &end.cq->fid, FI_TRANSMIT | FI_RECV));
	MUST(fi_ep_bind(end.ep, &counter->fid, FI_SEND));
	for (int i = 0; i < 3; i++)
		must_be_quiet(&end, *objects[i], what[i]);
	MUST(fi_enable(end.ep));
	for (int i = 0; i < 3; i++)
		must_be_quiet(&end, *objects[i], what[i]);
	MUST(fi_close(&end.ep->fid));
	for (int i = 0; i < 3; i++)
		must_be_quiet(&end, *objects[i], what[i]);
	MUST(fi_close(&pep->fid));
	must_be_quiet(&end, &end.eq->fid, "event queue without endpoints");
}

static void quiet_client(void) {}

static const struct {
	const char *name;
	void (*server)(void), (*client)(void);
} modes[] = {
	{ "quiet", quiet_server, quiet_client },
	{ "closed", full_server, full_client },
	{ "ended", full_server, full_client },
	{ "key", key_server, key_client },
	{ "revoked", revoked_server, writing_client },
	{ "reserved", reserved_server, writing_client },
	{ "readers", readers_server, readers_client },
	{ "failed", failed_server, failed_client },
	{ "nothing", failed_server, failed_client },
};

int main(int argc, char **argv)
{
	int server_status, client_status;
	pid_t server, client;

	if (argc != 4)
		die("usage: queues MODE PROV NODE");
	mode = argv[1];
	provider = argv[2];
	node = argv[3];
	setvbuf(stdout, NULL, _IONBF, 0);
	if (pipe(to_client) || pipe(to_server))
		die("pipe: %s", strerror(errno));
	for (size_t i = 0; i < sizeof modes / sizeof *modes; i++) {
		if (strcmp(modes[i].name, mode))
			continue;
		if (!(server = child("server"))) {
			close(to_client[0]);
			close(to_server[1]);
			modes[i].server();
			exit(0);
		}
		if (!(client = child("client"))) {
			close(to_client[1]);
			close(to_server[0]);
			modes[i].client();
			exit(0);
		}
		role = "parent";
		close(to_client[0]);
		close(to_client[1]);
		close(to_server[0]);
		close(to_server[1]);
		client_status = status_of(client, "client");
		server_status = status_of(server, "server");
		return client_status ? client_status : server_status;
	}
	die("no mode %s", mode);
	return 1;
}
