/* Half-open connections and scarce resources of the connection manager: peers that are silent or
 * stopped in the middle of a conversation, a backlog that overflows, 4,096 connections, and
 * processes without free descriptors.
 *
 *     cm_limits
 */
#include "cm_pair.h"

/* SOFTVERBS_CM_TIMEOUT_MS of all processes here, and the time that an event may take after it. */
enum { SILENCE = 400, LATE = 1000 };

static struct rdma_event_channel *in;
static struct rdma_conn_param plain = { .qp_num = 7 };

/* Makes an id without a queue pair and sends its request. */
static struct rdma_cm_id *ask(enum rdma_port_space ps, int port)
{
	struct side side = { .channel = in, .bare = 1 };

	side_resolve(&side, ps, port);
	side_connect(&side, 'F', 0);
	return side.id;
}

/* The next event must be this one and come between `from` and `to` milliseconds after `begin`. */
static struct rdma_cm_id *await_within(enum rdma_cm_event_type kind, int status, double begin, int from, int to)
{
	struct rdma_cm_event *event = next_until(in, begin + to);
	struct rdma_cm_id *id;

	if (!event)
		die("no %s within %d ms", rdma_event_str(kind), to);
	if (event->event != kind || event->status != status || now_ms() - begin < from)
		die("%s, %d after %.0f ms instead of %s, %d", rdma_event_str(event->event), event->status, now_ms() - begin,
		    rdma_event_str(kind), status);
	id = event->id;
	CHECK(rdma_ack_cm_event(event) == 0);
	return id;
}

/* A whole connection between two ids of this process. */
static void connect_here(struct rdma_cm_id *listener)
{
	struct rdma_cm_id *client = ask(RDMA_PS_TCP, port_of(listener)), *request;
	struct rdma_cm_event *event = next(in);

	CHECK(event->event == RDMA_CM_EVENT_CONNECT_REQUEST && event->listen_id == listener);
	request = event->id;
	CHECK(rdma_ack_cm_event(event) == 0 && rdma_accept(request, &plain) == 0);
	CHECK(await(in, RDMA_CM_EVENT_CONNECT_RESPONSE, 0) == client && rdma_establish(client) == 0);
	CHECK(await(in, RDMA_CM_EVENT_ESTABLISHED, 0) == request);
	CHECK(rdma_destroy_id(client) == 0);
	CHECK(await(in, RDMA_CM_EVENT_DISCONNECTED, 0) == request);
	await(in, RDMA_CM_EVENT_TIMEWAIT_EXIT, 0);
	CHECK(rdma_destroy_id(request) == 0);
}

/* ---- half-open connections ---- */

/* Sends nothing, or a part of a request, and keeps the socket. */
static void silent_sockets(void)
{
	int port = hear(parent), at;

	for (at = 0; at < 40; at++)
		CHECK(raw(connect, geteuid(), "127.0.0.1", port) >= 0);
	say(parent, 0);
	hear(parent);
}

static void silent_clients(void)
{
	struct peer other = start(silent_sockets);
	struct rdma_cm_id *listener;

	in = channel();
	listener = listen_at(in, RDMA_PS_TCP, 0, 64);
	say(other.wire, port_of(listener));
	hear(other.wire);
	silence(in);
	connect_here(listener);
	say(other.wire, 0);
	finish(&other);
	silence(in);
	connect_here(listener);
	CHECK(rdma_destroy_id(listener) == 0);
}

/* Sends a request and says so; is then stopped by the other process. */
static void stopped_client_main(void)
{
	struct rdma_cm_event *event;
	struct rdma_cm_id *id;
	double begin;

	in = channel();
	id = ask(RDMA_PS_TCP, hear(parent));
	say(parent, 0);
	CHECK(hear(parent) == 1);
	/* it has been stopped: the listener has answered and given up */
	begin = now_ms();
	CHECK(event = next_until(in, begin + LATE));
	if (event->event == RDMA_CM_EVENT_CONNECT_RESPONSE) {
		CHECK(rdma_ack_cm_event(event) == 0);
		rdma_establish(id);
		CHECK(event = next_until(in, begin + LATE));
	}
	CHECK(event->event == RDMA_CM_EVENT_REJECTED || event->event == RDMA_CM_EVENT_UNREACHABLE);
	CHECK(rdma_ack_cm_event(event) == 0 && rdma_destroy_id(id) == 0);
}

static void stopped_client(void)
{
	struct peer other = start(stopped_client_main);
	struct rdma_cm_id *listener, *request;
	double begin;

	in = channel();
	listener = listen_at(in, RDMA_PS_TCP, 0, 4);
	say(other.wire, port_of(listener));
	hear(other.wire);
	CHECK(kill(other.pid, SIGSTOP) == 0);
	request = await(in, RDMA_CM_EVENT_CONNECT_REQUEST, 0);
	begin = now_ms();
	CHECK(rdma_accept(request, &plain) == 0);
	CHECK(await_within(RDMA_CM_EVENT_UNREACHABLE, -ETIMEDOUT, begin, SILENCE - 1, SILENCE + LATE) == request);
	CHECK(rdma_destroy_id(request) == 0);
	connect_here(listener);
	CHECK(kill(other.pid, SIGCONT) == 0);
	say(other.wire, 1);
	finish(&other);
	silence(in);
	CHECK(rdma_destroy_id(listener) == 0);
}

/* Listens and reads no event until it is told; then answers requests of both port spaces. */
static void deaf_server_main(void)
{
	struct rdma_cm_id *one, *two;
	struct rdma_cm_event *event;
	double begin;
	int late = 0;

	in = channel();
	one = listen_at(in, RDMA_PS_TCP, 0, 4);
	two = listen_at(in, RDMA_PS_UDP, 0, 4);
	say(parent, port_of(one));
	say(parent, port_of(two));
	hear(parent);
	/* the clients have given up: a request that is still read cannot be accepted, or leads to an event */
	begin = now_ms();
	while ((event = next_until(in, begin + 100))) {
		struct rdma_cm_id *id = event->id;

		CHECK(event->event == RDMA_CM_EVENT_CONNECT_REQUEST);
		CHECK(rdma_ack_cm_event(event) == 0);
		if (rdma_accept(id, &plain) == 0 && id->qp_type == IBV_QPT_RC)
			await_within(RDMA_CM_EVENT_REJECTED, 28, now_ms(), 0, LATE);
		CHECK(rdma_destroy_id(id) == 0);
		late++;
	}
	CHECK(late <= 2);
	connect_here(one);
	say(parent, 0);
	hear(parent);
}

/* `stop`: the server is stopped; else it runs and does not read its events. */
static void unanswered(int stop)
{
	struct peer other = start(deaf_server_main);
	int ports[2] = { hear(other.wire), hear(other.wire) }, space;
	struct rdma_cm_id *id;
	double begin;

	in = channel();
	if (stop)
		CHECK(kill(other.pid, SIGSTOP) == 0);
	for (space = 0; space < 2; space++) {
		begin = now_ms();
		id = ask(space ? RDMA_PS_UDP : RDMA_PS_TCP, ports[space]);
		CHECK(await_within(RDMA_CM_EVENT_UNREACHABLE, -ETIMEDOUT, begin, SILENCE - 1, SILENCE + LATE) == id);
		CHECK(rdma_destroy_id(id) == 0);
	}
	if (stop)
		CHECK(kill(other.pid, SIGCONT) == 0);
	say(other.wire, 0);
	hear(other.wire);
	say(other.wire, 0);
	finish(&other);
}

static void stopped_server(void)
{
	unanswered(1);
}

static void deaf_server(void)
{
	unanswered(0);
}

/* ---- a backlog that overflows ---- */

enum { BACKLOG = 4, CROWD = 24 };

static void crowd_main(void)
{
	struct rdma_cm_id *ids[CROWD];
	int port = hear(parent), at, established = 0;

	in = channel();
	for (at = 0; at < CROWD; at++)
		ids[at] = ask(RDMA_PS_TCP, port);
	/* nobody is told that the queue is full: the kernel drops such a request, and its sender repeats it */
	poll(NULL, 0, 150);
	silence(in);
	say(parent, 0);
	while (established < CROWD) {
		struct rdma_cm_id *id = await(in, RDMA_CM_EVENT_CONNECT_RESPONSE, 0);

		CHECK(rdma_establish(id) == 0);
		established++;
	}
	hear(parent);
	for (at = 0; at < CROWD; at++)
		CHECK(rdma_destroy_id(ids[at]) == 0);
	/* a second crowd, whose listener ends */
	port = hear(parent);
	for (at = 0; at < CROWD; at++)
		ids[at] = ask(RDMA_PS_TCP, port);
	say(parent, 0);
	for (at = 0; at < CROWD; at++) {
		struct rdma_cm_event *event = next_until(in, now_ms() + LATE);

		if (!event || event->event != RDMA_CM_EVENT_REJECTED)
			die("%s for request %d after its listener's end", event ? rdma_event_str(event->event) : "no event", at);
		CHECK(event->status == 28 || event->status == 8);
		CHECK(rdma_ack_cm_event(event) == 0);
	}
	for (at = 0; at < CROWD; at++)
		CHECK(rdma_destroy_id(ids[at]) == 0);
}

static void overflow(void)
{
	struct peer other = start(crowd_main);
	struct rdma_cm_id *listener, *requests[CROWD];
	int at, established = 0, asked = 0;

	in = channel();
	listener = listen_at(in, RDMA_PS_TCP, 0, BACKLOG);
	say(other.wire, port_of(listener));
	hear(other.wire);
	while (established < CROWD) {
		struct rdma_cm_event *event = next(in);
		struct rdma_cm_id *id = event->id;
		enum rdma_cm_event_type kind = event->event;

		CHECK(rdma_ack_cm_event(event) == 0);
		if (kind == RDMA_CM_EVENT_CONNECT_REQUEST) {
			CHECK(asked < CROWD);
			requests[asked++] = id;
			CHECK(rdma_accept(id, &plain) == 0);
		} else {
			CHECK(kind == RDMA_CM_EVENT_ESTABLISHED);
			established++;
		}
	}
	say(other.wire, 0);
	for (at = 0; at < CROWD; at++)
		CHECK(rdma_destroy_id(requests[at]) == 0);
	say(other.wire, port_of(listener));
	hear(other.wire);
	CHECK(rdma_destroy_id(listener) == 0);
	finish(&other);
}

/* ---- 4,096 connections ---- */

enum { MANY = 4096, AT_ONCE = 64 };

static void room_for(int count)
{
	struct rlimit limit;

	CHECK(getrlimit(RLIMIT_NOFILE, &limit) == 0);
	limit.rlim_cur = count;
	CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
}

static void many_clients_main(void)
{
	static struct rdma_cm_id *ids[MANY];
	int port = hear(parent), made, at, before, held;

	room_for(MANY + 400);
	in = channel();
	ids[0] = ask(RDMA_PS_TCP, port);
	/* what the device itself opens is open now */
	CHECK(rdma_establish(await(in, RDMA_CM_EVENT_CONNECT_RESPONSE, 0)) == 0);
	before = descriptors(NULL);
	for (made = 1; made < MANY; made += at) {
		for (at = 0; at < AT_ONCE && made + at < MANY; at++) {
			struct side side = { .channel = in, .bare = 1 };

			side_resolve(&side, RDMA_PS_TCP, port);
			await(in, RDMA_CM_EVENT_ADDR_RESOLVED, 0);
			CHECK(rdma_resolve_route(side.id, 2000) == 0);
			await(in, RDMA_CM_EVENT_ROUTE_RESOLVED, 0);
			ids[made + at] = side.id;
		}
		for (at = 0; at < AT_ONCE && made + at < MANY; at++)
			CHECK(rdma_connect(ids[made + at], &plain) == 0);
		for (at = 0; at < AT_ONCE && made + at < MANY; at++)
			CHECK(rdma_establish(await(in, RDMA_CM_EVENT_CONNECT_RESPONSE, 0)) == 0);
	}
	held = descriptors(NULL) - before;
	say(parent, held);
	CHECK(held == MANY - 1);
	pause();
}

static void many(void)
{
	struct peer other = start(many_clients_main);
	static struct rdma_cm_id *ids[MANY];
	struct rdma_cm_id *listener;
	int count = 0, up = 0, gone = 0, left = 0, before, held, theirs;
	double begin = now_ms(), made, ended;

	room_for(MANY + 400);
	in = channel();
	listener = listen_at(in, RDMA_PS_TCP, 0, AT_ONCE);
	before = descriptors(NULL);
	say(other.wire, port_of(listener));
	while (up < MANY) {
		struct rdma_cm_event *event = next(in);
		struct rdma_cm_id *id = event->id;
		enum rdma_cm_event_type kind = event->event;

		CHECK(rdma_ack_cm_event(event) == 0);
		if (kind == RDMA_CM_EVENT_CONNECT_REQUEST) {
			CHECK(count < MANY);
			ids[count++] = id;
			CHECK(rdma_accept(id, &plain) == 0);
		} else {
			CHECK(kind == RDMA_CM_EVENT_ESTABLISHED);
			up++;
		}
	}
	made = now_ms();
	theirs = hear(other.wire);
	held = descriptors(NULL) - before;
	CHECK(held == MANY);
	finish_by_kill(&other);
	before--; /* the socket to it */
	ended = now_ms();
	while (left < MANY) {
		struct rdma_cm_event *event = next(in);

		gone += event->event == RDMA_CM_EVENT_DISCONNECTED;
		left += event->event == RDMA_CM_EVENT_TIMEWAIT_EXIT;
		CHECK(rdma_ack_cm_event(event) == 0);
	}
	CHECK(gone == MANY);
	printf("%d connections in %.1f s, %d and %d descriptors for them; all ends %.0f ms after the peer's death\n", MANY,
	       (made - begin) / 1e3, held, theirs + 1, now_ms() - ended);
	for (count = 0; count < MANY; count++)
		CHECK(rdma_destroy_id(ids[count]) == 0);
	if (descriptors(NULL) != before)
		die("%d descriptors after the connections, %d before", descriptors(NULL), before);
	connect_here(listener);
	CHECK(rdma_destroy_id(listener) == 0);
}

/* ---- no free descriptors ---- */

enum { GUESTS = 30, FREE = 9 };

static void guests_main(void)
{
	struct rdma_cm_id *ids[GUESTS];
	int port = hear(parent), at, ended = 0, rejected = 0;

	in = channel();
	for (at = 0; at < GUESTS; at++)
		ids[at] = ask(RDMA_PS_TCP, port);
	say(parent, 0);
	while (ended < GUESTS) {
		struct rdma_cm_event *event = next(in);
		struct rdma_cm_id *id = event->id;
		enum rdma_cm_event_type kind = event->event;

		CHECK(rdma_ack_cm_event(event) == 0);
		if (kind == RDMA_CM_EVENT_CONNECT_RESPONSE)
			CHECK(rdma_establish(id) == 0);
		else if (kind == RDMA_CM_EVENT_TIMEWAIT_EXIT)
			ended++;
		else if (kind == RDMA_CM_EVENT_REJECTED)
			rejected++, ended++;
		else
			CHECK(kind == RDMA_CM_EVENT_DISCONNECTED);
	}
	say(parent, rejected);
	for (at = 0; at < GUESTS; at++)
		CHECK(rdma_destroy_id(ids[at]) == 0);
}

/* A listener without free descriptors serves as many connections as it can, and the others later. */
static void starved_server(void)
{
	struct peer other = start(guests_main);
	struct rdma_cm_id *listener, *request = NULL, *open[GUESTS];
	int count = 0, most = 0, served = 0, refused = 0, before;
	double quiet = 0;

	in = channel();
	listener = listen_at(in, RDMA_PS_TCP, 0, GUESTS);
	before = descriptors(NULL);
	say(other.wire, port_of(listener));
	hear(other.wire);
	room_for(before + FREE);
	while (served < GUESTS) {
		struct rdma_cm_event *event;
		struct pollfd ready = { .fd = in->fd, .events = POLLIN };

		if (rdma_get_cm_event(in, &event)) {
			CHECK(errno == EAGAIN || errno == EMFILE);
			refused += errno == EMFILE;
			poll(&ready, 1, 10);
			/* nothing more arrives: end one of the connections that are up */
			if (!quiet)
				quiet = now_ms();
			if (now_ms() - quiet < 50 || !count)
				continue;
			CHECK(count <= FREE);
			most = count > most ? count : most;
			while (count) {
				CHECK(rdma_disconnect(open[--count]) == 0);
				CHECK(rdma_destroy_id(open[count]) == 0);
				served++;
			}
			quiet = 0;
			continue;
		}
		quiet = 0;
		request = event->id;
		if (event->event == RDMA_CM_EVENT_CONNECT_REQUEST) {
			CHECK(rdma_ack_cm_event(event) == 0);
			/* what it needs was there when the request was taken */
			CHECK(rdma_accept(request, &plain) == 0);
		} else if (event->event == RDMA_CM_EVENT_ESTABLISHED) {
			CHECK(rdma_ack_cm_event(event) == 0);
			open[count++] = request;
		} else {
			die("%s at the server", rdma_event_str(event->event));
		}
	}
	CHECK(hear(other.wire) == 0);
	finish(&other);
	before--; /* the socket to it */
	CHECK(most > 0 && most <= FREE);
	room_for(before + 100);
	printf("%d free descriptors: %d connections, %d at a time, %d calls with EMFILE\n", FREE, served, most, refused);
	CHECK(descriptors(NULL) == before);
	connect_here(listener);
	CHECK(rdma_destroy_id(listener) == 0);
}

/* Every call of a client, with 0 to 11 free descriptors: it fails with EMFILE or by an event, or
 * succeeds, and leaves nothing. */
static void starved_client(void)
{
	struct rdma_event_channel *far;
	struct rdma_cm_id *listener;
	int before, room, failures = 0, successes = 0;

	in = channel();
	far = channel();
	listener = listen_at(in, RDMA_PS_TCP, 0, 4);
	connect_here(listener);
	before = descriptors(NULL);
	for (room = 0; room < 12; room++) {
		struct sockaddr_in address = local(port_of(listener));
		struct rdma_event_channel *own;
		struct rdma_cm_event *event;
		struct rdma_cm_id *id = NULL;
		int done = 0;

		room_for(before + room);
		if ((own = rdma_create_event_channel()))
			CHECK(fcntl(own->fd, F_SETFL, O_NONBLOCK) == 0);
		else
			CHECK(errno == EMFILE);
		if (own && rdma_create_id(own, &id, NULL, RDMA_PS_TCP) == 0 &&
		    rdma_resolve_addr(id, NULL, (struct sockaddr *)&address, 2000) == 0) {
			CHECK(event = next_until(own, now_ms() + LATE));
			if (event->event != RDMA_CM_EVENT_ADDR_RESOLVED && event->status != -EMFILE)
				die("%s, status %d", rdma_event_str(event->event), event->status);
			done = event->event == RDMA_CM_EVENT_ADDR_RESOLVED;
			CHECK(rdma_ack_cm_event(event) == 0);
			if (done && rdma_resolve_route(id, 2000) == 0) {
				await(own, RDMA_CM_EVENT_ROUTE_RESOLVED, 0);
				done = rdma_connect(id, &plain) == 0;
				CHECK(done || errno == EMFILE);
			} else {
				CHECK(!done || errno == EMFILE);
				done = 0;
			}
		} else {
			CHECK(errno == EMFILE);
		}
		done ? successes++ : failures++;
		/* its request may be there; it is gone with the id */
		if (id)
			CHECK(rdma_destroy_id(id) == 0);
		if (own)
			rdma_destroy_event_channel(own);
		room_for(before + 100);
		while ((event = next_until(in, now_ms() + 20))) {
			struct rdma_cm_id *request = event->id;

			CHECK(event->event == RDMA_CM_EVENT_CONNECT_REQUEST);
			CHECK(rdma_ack_cm_event(event) == 0 && rdma_destroy_id(request) == 0);
		}
		if (descriptors(NULL) != before)
			die("%d descriptors after a client with %d, %d before", descriptors(NULL), room, before);
		connect_here(listener);
	}
	printf("a client with 0 to 11 free descriptors: %d times refused, %d times connected\n", failures, successes);
	CHECK(failures && successes);
	CHECK(rdma_destroy_id(listener) == 0);
	rdma_destroy_event_channel(far);
}

int main(void)
{
	char text[16];

	snprintf(text, sizeof text, "%d", SILENCE);
	setenv("SOFTVERBS_CM_TIMEOUT_MS", text, 1);
	test("sockets without a request", silent_clients);
	test("a client is stopped after its request", stopped_client);
	test("a server is stopped", stopped_server);
	test("a server reads no events", deaf_server);
	/* longer than these tests */
	unsetenv("SOFTVERBS_CM_TIMEOUT_MS");
	test("a backlog that overflows", overflow);
	test("4,096 connections", many);
	test("a server without free descriptors", starved_server);
	test("a client without free descriptors", starved_client);
	return 0;
}
