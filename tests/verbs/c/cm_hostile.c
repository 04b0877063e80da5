/* Hostile peers of the connection manager: messages that name another process's queue pair,
 * processes of another user at the port, malformed messages.
 *
 *     cm_hostile [SEED]
 */
#include "cm_pair.h"

#include <sys/stat.h>

static unsigned long long seed = 88172645463325252ull;

static unsigned int pick(unsigned int below)
{
	seed ^= seed << 13;
	seed ^= seed >> 7;
	seed ^= seed << 17;
	return seed % below;
}

/* A process with a queue pair, which it names, and later asks the datagram service itself. */
static void bystander(void)
{
	struct side side = { .channel = channel() };

	side_resolve(&side, RDMA_PS_UDP, hear(parent));
	await(side.channel, RDMA_CM_EVENT_ADDR_RESOLVED, 0);
	CHECK(rdma_resolve_route(side.id, 2000) == 0);
	await(side.channel, RDMA_CM_EVENT_ROUTE_RESOLVED, 0);
	side_queue(&side);
	say(parent, (int)side.id->qp->qp_num);
	hear(parent);
	CHECK(rdma_connect(side.id, NULL) == 0);
	await(side.channel, RDMA_CM_EVENT_ESTABLISHED, 0);
	say(parent, 0);
	side_end(&side);
}

/* Asks a datagram service, then is one, in the name of a queue pair that is not its own. */
static void impostor(void)
{
	unsigned char bytes[MOST_BYTES];
	unsigned int port = hear(parent), qp_num = hear(parent);
	int fd, with;

	frame(bytes, 6, qp_num);
	fd = raw(connect, geteuid(), "udp/127.0.0.1", port);
	CHECK(fd >= 0 && write(fd, bytes, SIDR_REQ_BYTES) == SIDR_REQ_BYTES);
	CHECK(read(fd, bytes, sizeof bytes) == SIDR_REP_BYTES && bytes[12] == 0);
	close(fd);
	say(parent, 0);
	port = hear(parent);
	fd = raw(bind, geteuid(), "udp/127.0.0.1", port);
	CHECK(fd >= 0 && listen(fd, 4) == 0);
	say(parent, 0);
	CHECK((with = accept(fd, NULL, NULL)) >= 0);
	CHECK(read(with, bytes, sizeof bytes) == SIDR_REQ_BYTES);
	frame(bytes, 7, qp_num);
	CHECK(write(with, bytes, SIDR_REP_BYTES) == SIDR_REP_BYTES);
	hear(parent);
}

/* The rings that this process has made for others: they are the last part of its shared file, 1,024
 * places of 132 KiB, and each one has its positions in its first page. */
static int rings_made(void)
{
	enum { PLACES = 1024, PLACE = 132 << 10 };
	int count = 0;

	for (int fd = 0; fd < 1024; fd++) {
		char path[64], name[64];
		struct stat file;

		snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
		ssize_t length = readlink(path, name, sizeof name - 1);
		if (length < 0)
			continue;
		name[length] = 0;
		if (strcmp(name, "/memfd:softverbs (deleted)") || fstat(fd, &file))
			continue;
		off_t at = file.st_size - (off_t)PLACES * PLACE - (1 << 16);
		while ((at = lseek(fd, at, SEEK_DATA)) >= 0) {
			count++;
			at += PLACE;
		}
	}
	return count;
}

/* A datagram's ring is made for the process at the other end of the socket only. */
static void claims(void)
{
	struct peer other = start(bystander), liar = start(impostor);
	struct side server = { .channel = channel() }, client = { .channel = channel(), .bare = 1 };
	struct rdma_cm_id *listener = listen_at(server.channel, RDMA_PS_UDP, 0, 4);
	int rings = rings_made(), port = port_of(listener), qp_num, free_port;
	struct rdma_cm_id *place;

	say(other.wire, port);
	qp_num = hear(other.wire);
	say(liar.wire, port);
	say(liar.wire, qp_num);
	while (server.phase != UP)
		side_events(&server, now_ms() + 1000);
	hear(liar.wire);
	if (rings_made() != rings)
		die("a request of another process has made a ring for the queue pair that it names");
	side_end(&server);
	/* the client of a service that names another process's queue pair */
	place = listen_at(client.channel, RDMA_PS_UDP, 0, 4);
	free_port = port_of(place);
	CHECK(rdma_destroy_id(place) == 0);
	say(liar.wire, free_port);
	hear(liar.wire);
	side_resolve(&client, RDMA_PS_UDP, free_port);
	side_connect(&client, 'S', 0);
	while (client.phase != UP)
		side_events(&client, now_ms() + 1000);
	if (rings_made() != rings)
		die("an answer of another process has made a ring for the queue pair that it names");
	side_end(&client);
	say(liar.wire, 0);
	finish(&liar);
	/* its own request makes one */
	say(other.wire, 0);
	while (server.phase != UP)
		side_events(&server, now_ms() + 1000);
	CHECK(rings_made() == rings + 1);
	side_end(&server);
	hear(other.wire);
	finish(&other);
	CHECK(rdma_destroy_id(listener) == 0);
}

/* ---- processes of another user ---- */

enum { STRANGER = 65534 };

static void become_a_stranger(void)
{
	CHECK(setresgid(STRANGER, STRANGER, STRANGER) == 0 && setresuid(STRANGER, STRANGER, STRANGER) == 0);
}

/* Connects to a port again and again until it is killed, with requests and without. */
static void flood(void)
{
	int port = hear(parent), sockets[64] = { 0 }, at;
	unsigned char bytes[MOST_BYTES];
	unsigned int uid = geteuid();

	become_a_stranger();
	frame(bytes, 1, 5);
	for (at = 0; at < 64; at++)
		sockets[at] = -1;
	for (at = 0;; at = (at + 1) % 64) {
		if (sockets[at] >= 0)
			close(sockets[at]);
		/* a full queue makes a blocking socket wait, as it should here: it gets the next place */
		sockets[at] = raw(connect, uid, "127.0.0.1", port);
		if (sockets[at] >= 0 && at % 2)
			CHECK(write(sockets[at], bytes, REQ_BYTES) == REQ_BYTES || errno == EPIPE || errno == ECONNRESET);
		if (at == 8)
			say(parent, 0);
	}
}

/* Connects 20 times. */
static void guest(void)
{
	struct side side = { .channel = channel(), .bare = 1 };
	int port = hear(parent), round;
	double begin;

	for (round = 0; round < 20; round++) {
		begin = now_ms();
		side_resolve(&side, RDMA_PS_TCP, port);
		side_connect(&side, 'F', round);
		while (side.phase != UP) {
			side_events(&side, now_ms() + 10);
			CHECK(side.phase != REFUSED);
			if (now_ms() - begin > 10000)
				die("another user keeps a connection out for 10 s");
		}
		CHECK(rdma_disconnect(side.id) == 0);
		side_end(&side);
	}
}

/* Accepts every request, which must be a guest's, until `count` connections have ended. */
static void serve(struct rdma_event_channel *at, int count)
{
	struct rdma_conn_param param = { .qp_num = 7 };
	struct rdma_cm_event *event;
	struct greeting greeting;
	struct rdma_cm_id *id;

	while (count) {
		event = next(at);
		id = event->id;
		switch (event->event) {
		case RDMA_CM_EVENT_CONNECT_REQUEST:
			memcpy(&greeting, event->param.conn.private_data, sizeof greeting);
			if (greeting.sender != 'F')
				die("a request of another user arrives");
			CHECK(rdma_ack_cm_event(event) == 0 && rdma_accept(id, &param) == 0);
			continue;
		case RDMA_CM_EVENT_TIMEWAIT_EXIT:
			CHECK(rdma_ack_cm_event(event) == 0 && rdma_destroy_id(id) == 0);
			count--;
			continue;
		default:
			CHECK(rdma_ack_cm_event(event) == 0);
		}
	}
}

static void flooded(void)
{
	struct peer stranger = start(flood), friend = start(guest);
	struct rdma_event_channel *at = channel();
	struct rdma_cm_id *listener = listen_at(at, RDMA_PS_TCP, 0, 4);

	/* the stranger has its sockets in the queue before anybody else */
	say(stranger.wire, port_of(listener));
	poll(NULL, 0, 100);
	say(friend.wire, port_of(listener));
	serve(at, 20);
	finish(&friend);
	finish_by_kill(&stranger);
	CHECK(rdma_destroy_id(listener) == 0);
}

/* Takes the name of 127.0.0.1 at a port; hears 1: and does not accept, with a full queue. Reads what
 * comes. */
static void squatter(void)
{
	int port = hear(parent), full = hear(parent), fd, with, more[3] = { 0 }, at;
	unsigned int uid = geteuid();
	unsigned char bytes[MOST_BYTES];

	become_a_stranger();
	CHECK((fd = raw(bind, uid, "127.0.0.1", port)) >= 0);
	CHECK(listen(fd, 0) == 0);
	if (full)
		CHECK((more[0] = raw(connect, uid, "127.0.0.1", port)) >= 0);
	say(parent, 0);
	for (at = 0; !full; at++) {
		CHECK((with = accept(fd, NULL, NULL)) >= 0);
		if (read(with, bytes, sizeof bytes) > 0)
			say(parent, 1);
		close(with);
	}
	pause();
}

static int heard_something(int wire)
{
	struct pollfd ready = { .fd = wire, .events = POLLIN };

	return poll(&ready, 1, 20) == 1;
}

/* A listener of all addresses is reached although a stranger has the name of one address; where
 * nobody else listens the stranger gets no byte; and an id cannot bind to a stranger's name. */
static void squatted(void)
{
	struct peer friend = start(guest), later = start(guest), one = start(squatter), two = start(squatter);
	struct sockaddr_in all = { .sin_family = AF_INET }, taken;
	struct side side = { .channel = channel(), .bare = 1 };
	struct rdma_event_channel *at = channel();
	struct rdma_cm_id *listener, *other;

	CHECK(rdma_create_id(at, &listener, NULL, RDMA_PS_TCP) == 0);
	CHECK(rdma_bind_addr(listener, (struct sockaddr *)&all) == 0 && rdma_listen(listener, 8) == 0);
	say(one.wire, port_of(listener));
	say(one.wire, 0);
	hear(one.wire);
	say(friend.wire, port_of(listener));
	serve(at, 20);
	finish(&friend);
	if (heard_something(one.wire))
		die("another user has got a message");
	/* nobody else listens */
	taken = local(port_of(listener));
	CHECK(rdma_destroy_id(listener) == 0);
	side_resolve(&side, RDMA_PS_TCP, ntohs(taken.sin_port));
	side_connect(&side, 'F', 0);
	while (side.phase != REFUSED)
		side_events(&side, now_ms() + 1000);
	CHECK(side.last == RDMA_CM_EVENT_REJECTED && side.status == 8);
	side_end(&side);
	if (heard_something(one.wire))
		die("another user has got a message");
	CHECK(rdma_create_id(at, &other, NULL, RDMA_PS_TCP) == 0);
	FAILS(rdma_bind_addr(other, (struct sockaddr *)&taken), EADDRINUSE);
	CHECK(rdma_bind_addr(other, (struct sockaddr *)&all) == 0 && rdma_listen(other, 8) == 0);
	/* a stranger's full queue */
	say(two.wire, port_of(other));
	say(two.wire, 1);
	hear(two.wire);
	say(later.wire, port_of(other));
	serve(at, 20);
	finish(&later);
	CHECK(rdma_destroy_id(other) == 0);
	finish_by_kill(&one);
	finish_by_kill(&two);
}

/* ---- malformed messages ---- */

static const unsigned int numbers[] = { 0, 1, 2, 0xffffff, 0xfffffe, 0x1000000, 0xffffffff, 0x800000, 0x7fffff };

/* A message with faults, seldom without. Returns its length. */
static int spoiled(unsigned char *bytes, int kind)
{
	unsigned int qp_num = pick(2) ? numbers[pick(sizeof numbers / sizeof *numbers)] : pick(1 << 24);
	int length = frame(bytes, kind, qp_num), at;

	switch (pick(9)) {
	case 0: /* truncated */
		return 1 + pick(length);
	case 1: /* too long */
		return length + 1 + pick(MOST_BYTES * 4 - length);
	case 2:
		bytes[4 + pick(2)] = pick(256);
		break;
	case 3:
		bytes[6] = pick(256);
		break;
	case 4: /* somewhere in the description */
		bytes[12 + pick(36)] = pick(256);
		break;
	case 5: /* a length of private data */
		bytes[kind == 1 ? 43 : kind == 2 ? 41 : kind == 4 ? 14 : kind == 6 ? 33 : 13] = pick(256);
		break;
	case 6:
		for (at = 12; at < length; at++)
			bytes[at] = pick(256);
		break;
	case 7:
		for (at = 0; at < length; at++)
			bytes[at] = pick(256);
		break;
	}
	return length;
}

enum { FRAMES = 2000 };

/* Sends faulty messages to a listener of connections and one of datagram services. */
static void attacker(void)
{
	static const int kinds[] = { 1, 1, 1, 1, 6, 6, 6, 2, 3, 4, 5, 7 };
	unsigned char bytes[MOST_BYTES * 5];
	int ports[2], round, fd, more;

	memset(bytes, 0, sizeof bytes);
	ports[0] = hear(parent);
	ports[1] = hear(parent);
	for (round = 0; round < FRAMES; round++) {
		int kind = kinds[pick(12)], udp = kind == 6 ? pick(8) != 0 : pick(8) == 0;

		fd = raw(connect, geteuid(), udp ? "udp/127.0.0.1" : "127.0.0.1", ports[udp]);
		CHECK(fd >= 0);
		more = pick(3);
		do {
			int length = spoiled(bytes, kind);

			/* the listener may have closed the socket */
			if (send(fd, bytes, length, MSG_NOSIGNAL) < 0)
				break;
			kind = 1 + pick(7);
			if (pick(2))
				poll(NULL, 0, pick(3));
		} while (more--);
		/* some sockets end later than their number is used again */
		close(fd);
	}
	say(parent, 0);
}

/* Handles requests and their ends for as long as the attacker lives. */
static void attacked(void)
{
	struct peer liar = start(attacker), friend = start(guest);
	struct rdma_event_channel *at = channel();
	struct rdma_cm_id *one = listen_at(at, RDMA_PS_TCP, 0, 64), *two = listen_at(at, RDMA_PS_UDP, 0, 64);
	struct rdma_cm_id *open[64] = { 0 };
	struct pollfd ready[2] = { { .fd = at->fd, .events = POLLIN }, { .fd = liar.wire, .events = POLLIN } };
	int count = 0, accepted = 0, ended = 0, slot = 0, before = descriptors(NULL), round;

	say(liar.wire, port_of(one));
	say(liar.wire, port_of(two));
	while (!(ready[1].revents & POLLIN)) {
		struct rdma_cm_event *event;

		CHECK(poll(ready, 2, 20000) > 0);
		while (rdma_get_cm_event(at, &event) == 0) {
			struct rdma_conn_param param = { .qp_num = 7, .rnr_retry_count = 7 };
			struct rdma_cm_id *id = event->id;
			enum rdma_cm_event_type kind = event->event;

			CHECK(rdma_ack_cm_event(event) == 0);
			if (kind != RDMA_CM_EVENT_CONNECT_REQUEST) {
				ended++;
				continue;
			}
			count++;
			/* an id is destroyed when its place is needed */
			if (open[slot]) {
				if (open[slot]->qp)
					rdma_destroy_qp(open[slot]);
				CHECK(rdma_destroy_id(open[slot]) == 0);
			}
			open[slot] = id;
			slot = (slot + 1) % 64;
			if (count % 4) {
				struct ibv_qp_init_attr attr = {
					.cap = { .max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 },
					.qp_type = id->qp_type };

				CHECK(rdma_create_qp(id, NULL, &attr) == 0);
			}
			if (count % 8)
				accepted += rdma_accept(id, &param) == 0;
		}
		CHECK(errno == EAGAIN);
	}
	finish(&liar);
	for (round = 0; round < 64; round++) {
		if (!open[round])
			continue;
		if (open[round]->qp)
			rdma_destroy_qp(open[round]);
		CHECK(rdma_destroy_id(open[round]) == 0);
	}
	/* a valid client is served */
	say(friend.wire, port_of(one));
	serve(at, 20);
	finish(&friend);
	printf("%d messages: %d requests, %d accepted, %d other events\n", FRAMES, count, accepted, ended);
	CHECK(count > FRAMES / 20 && accepted > count / 20);
	CHECK(rdma_destroy_id(one) == 0 && rdma_destroy_id(two) == 0);
	if (descriptors(NULL) > before)
		die("%d descriptors, %d before", descriptors(NULL), before);
}

enum { ANSWERS = 600 };

/* Answers requests with faulty messages. */
static void faulty_listener(void)
{
	static const int kinds[] = { 2, 2, 2, 4, 1, 3, 5, 6 };
	unsigned char bytes[MOST_BYTES * 5];
	int port = hear(parent), fds[2], round;

	memset(bytes, 0, sizeof bytes);
	fds[0] = raw(bind, geteuid(), "127.0.0.1", port);
	fds[1] = raw(bind, geteuid(), "udp/127.0.0.1", port);
	CHECK(fds[0] >= 0 && fds[1] >= 0 && listen(fds[0], 4) == 0 && listen(fds[1], 4) == 0);
	say(parent, 0);
	for (round = 0; round < ANSWERS; round++) {
		int udp = round % 3 == 0, fd, length;

		CHECK((fd = accept(fds[udp], NULL, NULL)) >= 0);
		CHECK(read(fd, bytes, sizeof bytes) == (udp ? SIDR_REQ_BYTES : REQ_BYTES));
		length = spoiled(bytes, udp && pick(4) ? 7 : kinds[pick(8)]);
		send(fd, bytes, length, MSG_NOSIGNAL);
		close(fd);
	}
	hear(parent);
}

/* Every attempt ends with one event within a second. */
static void deceived(void)
{
	struct peer liar = start(faulty_listener);
	struct side side = { .channel = channel() };
	struct rdma_cm_id *place = listen_at(side.channel, RDMA_PS_TCP, 0, 1);
	int port = port_of(place), round, before = 0, seen[16] = { 0 }, kind;

	CHECK(rdma_destroy_id(place) == 0);
	say(liar.wire, port);
	hear(liar.wire);
	for (round = 0; round < ANSWERS; round++) {
		int udp = round % 3 == 0;
		double begin;

		side.bare = pick(2);
		side_resolve(&side, udp ? RDMA_PS_UDP : RDMA_PS_TCP, port);
		side_connect(&side, 'S', round);
		begin = now_ms();
		while (side.phase < REFUSED && !(udp && side.phase == UP)) {
			side_events(&side, now_ms() + 100);
			if (now_ms() - begin > 1000)
				die("no event within a second in phase %d", side.phase);
		}
		seen[side.last]++;
		side_end(&side);
		if (round == 50)
			before = descriptors(NULL);
	}
	for (kind = 0; kind < 16; kind++)
		if (seen[kind])
			printf("%s %d; ", rdma_event_str(kind) + strlen("RDMA_CM_EVENT_"), seen[kind]);
	printf("%d answers\n", ANSWERS);
	CHECK(seen[RDMA_CM_EVENT_UNREACHABLE] && seen[RDMA_CM_EVENT_REJECTED]);
	say(liar.wire, 0);
	finish(&liar);
	CHECK(descriptors(NULL) <= before);
}

int main(int count, char **words)
{
	if (count > 1)
		seed += strtoull(words[1], NULL, 10) * 2654435761u;
	test("a queue pair of another process", claims);
	if (geteuid() == 0) {
		test("another user floods the port", flooded);
		test("another user has the port's name", squatted);
	} else {
		printf("skipped: only root can act for another user\n");
	}
	test("malformed requests", attacked);
	test("malformed answers", deceived);
	return 0;
}
