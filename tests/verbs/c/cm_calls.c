/* Calls of librdmacm that Debian's programs do not make, by the man pages: events without blocking,
 * private data of each length, connections that one side leaves half open (also by SIGKILL), queue
 * pairs of the application, options, migration, shared receive queues, refusals.
 *
 *     cm_calls                  all of them
 *     cm_calls PORT PHASE       (for the former) an active side that stops in PHASE until it is killed
 */
#include <signal.h>
#include <sys/wait.h>

#include <rdma/rdma_verbs.h>

#include "cm.h"

static struct rdma_event_channel *near, *far;

static struct rdma_cm_id *create(struct rdma_event_channel *in, enum rdma_port_space ps)
{
	struct rdma_cm_id *id;

	CHECK(rdma_create_id(in, &id, (void *)&near, ps) == 0);
	CHECK(id->channel == in && id->context == &near && id->ps == ps && !id->qp && !id->verbs);
	CHECK(id->qp_type == (ps == RDMA_PS_UDP ? IBV_QPT_UD : IBV_QPT_RC));
	return id;
}

static struct rdma_cm_id *listener(enum rdma_port_space ps)
{
	struct rdma_cm_id *id = create(far, ps);
	struct sockaddr_in address = local(0);

	CHECK(rdma_bind_addr(id, (struct sockaddr *)&address) == 0);
	CHECK(id->verbs && id->pd && id->port_num == 1 && rdma_get_src_port(id));
	CHECK(rdma_listen(id, 0) == 0);
	return id;
}

static struct rdma_cm_id *routed(enum rdma_port_space ps, int port)
{
	struct rdma_cm_id *id = create(near, ps);
	struct sockaddr_in address = local(port);

	CHECK(rdma_resolve_addr(id, NULL, (struct sockaddr *)&address, 2000) == 0);
	CHECK(await(near, RDMA_CM_EVENT_ADDR_RESOLVED, 0) == id);
	CHECK(id->verbs && id->port_num == 1);
	CHECK(((struct sockaddr_in *)rdma_get_peer_addr(id))->sin_addr.s_addr == address.sin_addr.s_addr);
	CHECK(ntohs(rdma_get_dst_port(id)) == port && rdma_get_src_port(id));
	CHECK(rdma_resolve_route(id, 2000) == 0);
	CHECK(await(near, RDMA_CM_EVENT_ROUTE_RESOLVED, 0) == id);
	CHECK(id->route.num_paths == 1 && id->route.path_rec->mtu);
	return id;
}

static void create_qp(struct rdma_cm_id *id)
{
	struct ibv_qp_init_attr attr = {
		.cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1 },
		.qp_type = id->qp_type,
	};

	CHECK(rdma_create_qp(id, NULL, &attr) == 0);
	CHECK(id->qp && id->send_cq && id->recv_cq && id->send_cq_channel && id->qp->pd == id->pd);
}

static unsigned char data[256];

static struct rdma_conn_param param(int length)
{
	struct rdma_conn_param made = { .private_data = data, .private_data_len = length, .qp_num = 7,
					.responder_resources = 3, .initiator_depth = 2, .retry_count = 6,
					.rnr_retry_count = 5 };
	return made;
}

/* Whether an event has these bytes, and zeros up to the length of the field. */
static void compare(const void *bytes, int got, int sent, int field)
{
	int at;

	CHECK(got == field);
	CHECK(memcmp(bytes, data, sent) == 0);
	for (at = sent; at < field; at++)
		CHECK(((const unsigned char *)bytes)[at] == 0);
}

static void ids_gone(struct rdma_cm_id *one, struct rdma_cm_id *two)
{
	CHECK(rdma_destroy_id(one) == 0);
	if (two)
		CHECK(rdma_destroy_id(two) == 0);
}

/* Both sides of a connection whose queue pairs are the application's. */
static void connection_data(enum rdma_port_space ps, int req, int rep)
{
	struct rdma_cm_id *server = listener(ps), *client, *request;
	struct rdma_conn_param asked = param(req), given = param(rep);
	struct rdma_cm_event *event;

	client = routed(ps, ntohs(rdma_get_src_port(server)));
	CHECK(rdma_connect(client, &asked) == 0);
	event = next(far);
	CHECK(event->event == RDMA_CM_EVENT_CONNECT_REQUEST && event->listen_id == server);
	request = event->id;
	CHECK(request->verbs && request->context == server->context && request->port_num == 1);
	compare(event->param.conn.private_data, event->param.conn.private_data_len, req, REQ);
	/* the peer's depth is this side's resources */
	CHECK(event->param.conn.responder_resources == 2 && event->param.conn.initiator_depth == 3);
	CHECK(event->param.conn.retry_count == 6 && event->param.conn.rnr_retry_count == 5);
	CHECK(event->param.conn.qp_num == 7);
	CHECK(rdma_ack_cm_event(event) == 0);
	CHECK(rdma_accept(request, &given) == 0);
	event = next(near);
	CHECK(event->event == RDMA_CM_EVENT_CONNECT_RESPONSE && event->id == client);
	compare(event->param.conn.private_data, event->param.conn.private_data_len, rep, REP);
	CHECK(rdma_ack_cm_event(event) == 0);
	CHECK(rdma_establish(client) == 0);
	CHECK(await(far, RDMA_CM_EVENT_ESTABLISHED, 0) == request);
	CHECK(rdma_disconnect(client) == 0);
	CHECK(await(far, RDMA_CM_EVENT_DISCONNECTED, 0) == request);
	CHECK(await(near, RDMA_CM_EVENT_DISCONNECTED, 0) == client);
	await(near, RDMA_CM_EVENT_TIMEWAIT_EXIT, 0);
	await(far, RDMA_CM_EVENT_TIMEWAIT_EXIT, 0);
	ids_gone(request, client);
	ids_gone(server, NULL);
}

static void rejection_data(int length)
{
	struct rdma_cm_id *server = listener(RDMA_PS_TCP), *client, *request;
	struct rdma_cm_event *event;

	client = routed(RDMA_PS_TCP, ntohs(rdma_get_src_port(server)));
	create_qp(client);
	CHECK(rdma_connect(client, NULL) == 0);
	request = await(far, RDMA_CM_EVENT_CONNECT_REQUEST, 0);
	CHECK(rdma_reject(request, data, length) == 0);
	event = next(near);
	CHECK(event->event == RDMA_CM_EVENT_REJECTED && event->status == 28);
	compare(event->param.conn.private_data, event->param.conn.private_data_len, length, REJ);
	CHECK(rdma_ack_cm_event(event) == 0);
	rdma_destroy_qp(client);
	CHECK(!client->qp && !client->send_cq);
	ids_gone(request, client);
	ids_gone(server, NULL);
}

static void service_data(int req, int rep)
{
	struct rdma_cm_id *server = listener(RDMA_PS_UDP), *client, *request;
	struct rdma_conn_param asked = param(req), given = param(rep);
	struct rdma_cm_event *event;
	struct ibv_ah *ah;

	client = routed(RDMA_PS_UDP, ntohs(rdma_get_src_port(server)));
	CHECK(rdma_connect(client, &asked) == 0);
	event = next(far);
	CHECK(event->event == RDMA_CM_EVENT_CONNECT_REQUEST && event->listen_id == server);
	request = event->id;
	CHECK(request->qp_type == IBV_QPT_UD && request->ps == RDMA_PS_UDP);
	compare(event->param.ud.private_data, event->param.ud.private_data_len, req, SIDR_REQ);
	CHECK(rdma_ack_cm_event(event) == 0);
	create_qp(request);
	CHECK(rdma_accept(request, &given) == 0);
	event = next(near);
	CHECK(event->event == RDMA_CM_EVENT_ESTABLISHED && event->id == client);
	compare(event->param.ud.private_data, event->param.ud.private_data_len, rep, SIDR_REP);
	CHECK(event->param.ud.qp_num == request->qp->qp_num && event->param.ud.qkey == RDMA_UDP_QKEY);
	ah = ibv_create_ah(client->pd, &event->param.ud.ah_attr);
	CHECK(ah && ibv_destroy_ah(ah) == 0);
	CHECK(rdma_ack_cm_event(event) == 0);
	rdma_destroy_qp(request);
	ids_gone(request, client);
	ids_gone(server, NULL);
}

/* Private data that is one byte too long, and of the longest length that can be said, is refused by
 * each call; the call can be repeated with less. */
static void data_too_long(enum rdma_port_space ps)
{
	int req = ps == RDMA_PS_UDP ? SIDR_REQ : REQ, rep = ps == RDMA_PS_UDP ? SIDR_REP : REP;
	int rej = ps == RDMA_PS_UDP ? SIDR_REP : REJ;
	struct rdma_conn_param longer = param(req + 1), longest = param(255), most = param(req);
	struct rdma_cm_id *server = listener(ps), *client, *request;
	struct rdma_cm_event *event;

	client = routed(ps, ntohs(rdma_get_src_port(server)));
	FAILS(rdma_connect(client, &longer), EINVAL);
	FAILS(rdma_connect(client, &longest), EINVAL);
	silence(far);
	CHECK(rdma_connect(client, &most) == 0);
	request = await(far, RDMA_CM_EVENT_CONNECT_REQUEST, 0);
	longer.private_data_len = rep + 1;
	FAILS(rdma_accept(request, &longer), EINVAL);
	FAILS(rdma_reject(request, data, rej + 1), EINVAL);
	FAILS(rdma_reject(request, data, 255), EINVAL);
	silence(near);
	CHECK(rdma_reject(request, data, rej) == 0);
	event = next(near);
	CHECK(event->event == (ps == RDMA_PS_UDP ? RDMA_CM_EVENT_UNREACHABLE : RDMA_CM_EVENT_REJECTED));
	if (ps != RDMA_PS_UDP)
		compare(event->param.conn.private_data, event->param.conn.private_data_len, rej, REJ);
	CHECK(rdma_ack_cm_event(event) == 0);
	ids_gone(request, client);
	ids_gone(server, NULL);
}

static void data_of_each_length(void)
{
	int length;

	for (length = 0; length <= REP; length++) {
		connection_data(RDMA_PS_TCP, length < REQ ? length : REQ, length);
		connection_data(RDMA_PS_IB, length < REQ ? length : REQ, length);
	}
	for (length = 0; length <= REJ; length++)
		rejection_data(length);
	for (length = 0; length <= SIDR_REQ; length++)
		service_data(length, length < SIDR_REP ? length : SIDR_REP);
	data_too_long(RDMA_PS_TCP);
	data_too_long(RDMA_PS_IB);
	data_too_long(RDMA_PS_UDP);
}

/* The request's side after its peer has gone: no event, and accepting fails (rdma_accept(3)). */
static void half_open_by_destroying(void)
{
	struct rdma_cm_id *server = listener(RDMA_PS_TCP), *client, *request;
	struct rdma_conn_param none = param(0);
	struct pollfd ready = { .fd = far->fd, .events = POLLIN };
	int port = ntohs(rdma_get_src_port(server));

	/* the listener has not read the request */
	client = routed(RDMA_PS_TCP, port);
	CHECK(rdma_connect(client, &none) == 0);
	ids_gone(client, NULL);
	request = await(far, RDMA_CM_EVENT_CONNECT_REQUEST, 0);
	ids_gone(request, NULL);
	/* it has read the request */
	client = routed(RDMA_PS_TCP, port);
	CHECK(rdma_connect(client, &none) == 0);
	request = await(far, RDMA_CM_EVENT_CONNECT_REQUEST, 0);
	ids_gone(client, NULL);
	CHECK(poll(&ready, 1, 50) == 0);
	silence(far);
	FAILS(rdma_accept(request, &none), EINVAL);
	FAILS(rdma_reject(request, NULL, 0), EINVAL);
	ids_gone(request, NULL);
	/* it has accepted, and the client does not complete the connection */
	client = routed(RDMA_PS_TCP, port);
	CHECK(rdma_connect(client, &none) == 0);
	request = await(far, RDMA_CM_EVENT_CONNECT_REQUEST, 0);
	CHECK(rdma_accept(request, &none) == 0);
	await(near, RDMA_CM_EVENT_CONNECT_RESPONSE, 0);
	ids_gone(client, NULL);
	CHECK(await(far, RDMA_CM_EVENT_REJECTED, 28) == request);
	ids_gone(request, NULL);
	/* the listener ends with a request that it has not read, and with one that it has not answered */
	client = routed(RDMA_PS_TCP, port);
	CHECK(rdma_connect(client, &none) == 0);
	request = routed(RDMA_PS_TCP, port);
	CHECK(rdma_connect(request, &none) == 0);
	ids_gone(await(far, RDMA_CM_EVENT_CONNECT_REQUEST, 0), server);
	await(near, RDMA_CM_EVENT_REJECTED, 28);
	await(near, RDMA_CM_EVENT_REJECTED, 28);
	ids_gone(client, request);
	silence(far);
}

/* The phases in which the other process is killed: its request is sent, it has the reply, it is
 * connected. */
enum { ASKED, ANSWERED, CONNECTED, PHASES };

static int child_main(int port, int phase)
{
	struct rdma_conn_param none = param(0);
	struct rdma_cm_id *client;

	client = routed(RDMA_PS_TCP, port);
	CHECK(rdma_connect(client, &none) == 0);
	if (phase > ASKED)
		await(near, RDMA_CM_EVENT_CONNECT_RESPONSE, 0);
	if (phase > ANSWERED)
		CHECK(rdma_establish(client) == 0);
	CHECK(write(STDOUT_FILENO, "x", 1) == 1);
	for (;;)
		pause();
}

static void half_open_by_a_signal(const char *self, int phase)
{
	struct rdma_cm_id *server = listener(RDMA_PS_TCP), *request;
	struct rdma_conn_param none = param(0);
	char port[16], number[16], byte;
	int pipes[2], status;
	pid_t child;

	snprintf(port, sizeof port, "%d", ntohs(rdma_get_src_port(server)));
	snprintf(number, sizeof number, "%d", phase);
	CHECK(pipe(pipes) == 0);
	child = fork();
	CHECK(child >= 0);
	if (!child) {
		dup2(pipes[1], STDOUT_FILENO);
		execl(self, self, port, number, NULL);
		_exit(127);
	}
	close(pipes[1]);
	request = await(far, RDMA_CM_EVENT_CONNECT_REQUEST, 0);
	if (phase > ASKED)
		CHECK(rdma_accept(request, &none) == 0);
	if (phase > ANSWERED)
		await(far, RDMA_CM_EVENT_ESTABLISHED, 0);
	CHECK(read(pipes[0], &byte, 1) == 1);
	close(pipes[0]);
	kill(child, SIGKILL);
	CHECK(waitpid(child, &status, 0) == child && WIFSIGNALED(status));
	if (phase == ASKED) {
		silence(far);
		CHECK(rdma_accept(request, &none) == -1);
	} else if (phase == ANSWERED) {
		CHECK(await(far, RDMA_CM_EVENT_REJECTED, 28) == request);
	} else {
		CHECK(await(far, RDMA_CM_EVENT_DISCONNECTED, 0) == request);
		await(far, RDMA_CM_EVENT_TIMEWAIT_EXIT, 0);
	}
	ids_gone(request, server);
}

/* The application makes the queue pairs and moves them: rdma_init_qp_attr(3). */
static struct ibv_qp *external(struct rdma_cm_id *id)
{
	struct ibv_qp_init_attr attr = {
		.cap = { .max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 },
		.qp_type = IBV_QPT_RC,
	};
	struct ibv_qp *qp;

	attr.send_cq = attr.recv_cq = ibv_create_cq(id->verbs, 4, NULL, NULL, 0);
	CHECK(attr.send_cq);
	qp = ibv_create_qp(id->pd, &attr);
	CHECK(qp);
	return qp;
}

static void move(struct rdma_cm_id *id, struct ibv_qp *qp)
{
	static const enum ibv_qp_state states[] = { IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS };
	struct ibv_qp_attr attr;
	unsigned int at;
	int mask;

	for (at = 0; at < 3; at++) {
		memset(&attr, 0, sizeof attr);
		attr.qp_state = states[at];
		CHECK(rdma_init_qp_attr(id, &attr, &mask) == 0);
		CHECK(ibv_modify_qp(qp, &attr, mask) == 0);
	}
}

static void queue_pairs_of_the_application(void)
{
	struct rdma_cm_id *server = listener(RDMA_PS_TCP), *client, *request;
	struct rdma_conn_param one = param(0), two = param(0);
	struct ibv_qp *active, *passive;
	struct rdma_cm_event *event;
	struct ibv_cq *cq;

	client = routed(RDMA_PS_TCP, ntohs(rdma_get_src_port(server)));
	active = external(client);
	one.qp_num = active->qp_num;
	CHECK(rdma_connect(client, &one) == 0);
	event = next(far);
	request = event->id;
	CHECK(event->param.conn.qp_num == active->qp_num);
	CHECK(rdma_ack_cm_event(event) == 0);
	passive = external(request);
	two.qp_num = passive->qp_num;
	move(request, passive);
	CHECK(rdma_accept(request, &two) == 0);
	FAILS(rdma_notify(request, IBV_EVENT_QP_FATAL), EINVAL);
	await(near, RDMA_CM_EVENT_CONNECT_RESPONSE, 0);
	move(client, active);
	CHECK(rdma_notify(request, IBV_EVENT_COMM_EST) == 0);
	CHECK(await(far, RDMA_CM_EVENT_ESTABLISHED, 0) == request);
	CHECK(rdma_establish(client) == 0);
	CHECK(rdma_establish(client) == -1);
	silence(far);
	cq = active->send_cq;
	CHECK(ibv_destroy_qp(active) == 0 && ibv_destroy_cq(cq) == 0);
	cq = passive->send_cq;
	CHECK(ibv_destroy_qp(passive) == 0 && ibv_destroy_cq(cq) == 0);
	ids_gone(client, NULL);
	await(far, RDMA_CM_EVENT_DISCONNECTED, 0);
	await(far, RDMA_CM_EVENT_TIMEWAIT_EXIT, 0);
	ids_gone(request, server);
}

static void options_and_refusals(void)
{
	struct rdma_cm_id *server = listener(RDMA_PS_TCP), *second = create(far, RDMA_PS_TCP), *id;
	struct sockaddr_in address = local(ntohs(rdma_get_src_port(server)));
	struct sockaddr_in foreign = { .sin_family = AF_INET };
	struct ibv_ece ece = { .vendor_id = 1 };
	struct ibv_context **devices;
	uint8_t timeout = 12, tos = 32, long_timeout = 200;
	int one = 1, count;

	CHECK(rdma_set_option(second, RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, &tos, 1) == 0);
	CHECK(rdma_set_option(second, RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, &timeout, 1) == 0);
	FAILS(rdma_set_option(second, RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, &long_timeout, 1), EINVAL);
	FAILS(rdma_set_option(second, RDMA_OPTION_ID, 99, &one, 4), ENOSYS);
	FAILS(rdma_set_option(second, 99, 0, &one, 4), ENOSYS);
	FAILS(rdma_bind_addr(second, (struct sockaddr *)&address), EADDRINUSE);
	CHECK(rdma_set_option(second, RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR, &one, sizeof one) == 0);
	/* an id that listens shares its address with none */
	FAILS(rdma_bind_addr(second, (struct sockaddr *)&address), EADDRINUSE);
	ids_gone(server, NULL);
	server = create(far, RDMA_PS_TCP);
	CHECK(rdma_set_option(server, RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR, &one, sizeof one) == 0);
	CHECK(rdma_bind_addr(server, (struct sockaddr *)&address) == 0);
	CHECK(rdma_bind_addr(second, (struct sockaddr *)&address) == 0);
	FAILS(rdma_listen(second, 1), EADDRINUSE);
	ids_gone(second, server);

	id = create(near, RDMA_PS_UDP);
	inet_pton(AF_INET, "192.0.2.1", &foreign.sin_addr);
	FAILS(rdma_bind_addr(id, (struct sockaddr *)&foreign), ENODEV);
	address = local(0);
	CHECK(rdma_bind_addr(id, (struct sockaddr *)&address) == 0);
	inet_pton(AF_INET, "239.1.1.1", &foreign.sin_addr);
	FAILS(rdma_join_multicast(id, (struct sockaddr *)&foreign, NULL), ENOSYS);
	FAILS(rdma_leave_multicast(id, (struct sockaddr *)&foreign), EADDRNOTAVAIL);
	CHECK(rdma_set_local_ece(id, &ece) == 0);
	CHECK(rdma_get_remote_ece(id, &ece) == 0 && ece.vendor_id == 0 && ece.options == 0);
	ids_gone(id, NULL);
	FAILS(rdma_create_id(near, &id, NULL, RDMA_PS_IPOIB), EPROTONOSUPPORT);
	FAILS(rdma_create_id(near, &id, NULL, (enum rdma_port_space)1), EINVAL);

	devices = rdma_get_devices(&count);
	CHECK(devices && count == 1 && devices[0] && !devices[1]);
	CHECK(strcmp(ibv_get_device_name(devices[0]->device), "soft0") == 0);
	rdma_free_devices(devices);
	CHECK(strcmp(rdma_event_str(RDMA_CM_EVENT_ADDR_CHANGE), "RDMA_CM_EVENT_ADDR_CHANGE") == 0);
}

/* A request waits in the channel of the listener while its id and the listener's move. */
static void migration(void)
{
	struct rdma_event_channel *other = channel();
	struct rdma_cm_id *server = listener(RDMA_PS_TCP), *client, *request;
	struct rdma_conn_param none = param(0);

	client = routed(RDMA_PS_TCP, ntohs(rdma_get_src_port(server)));
	CHECK(rdma_connect(client, &none) == 0);
	request = await(far, RDMA_CM_EVENT_CONNECT_REQUEST, 0);
	CHECK(rdma_migrate_id(request, other) == 0 && request->channel == other);
	CHECK(rdma_migrate_id(server, other) == 0 && server->channel == other);
	CHECK(rdma_accept(request, &none) == 0);
	await(near, RDMA_CM_EVENT_CONNECT_RESPONSE, 0);
	CHECK(rdma_establish(client) == 0);
	CHECK(await(other, RDMA_CM_EVENT_ESTABLISHED, 0) == request);
	silence(far);
	ids_gone(client, NULL);
	await(other, RDMA_CM_EVENT_DISCONNECTED, 0);
	await(other, RDMA_CM_EVENT_TIMEWAIT_EXIT, 0);
	ids_gone(request, server);
	rdma_destroy_event_channel(other);
}

static void shared_receive_queue(void)
{
	struct rdma_cm_id *id = create(near, RDMA_PS_TCP);
	struct sockaddr_in address = local(0);
	struct ibv_srq_init_attr_ex attr = {
		.attr = { .max_wr = 8, .max_sge = 1 },
		.comp_mask = IBV_SRQ_INIT_ATTR_TYPE,
		.srq_type = IBV_SRQT_BASIC,
	};
	struct ibv_qp_init_attr_ex qp = {
		.cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1 },
		.qp_type = IBV_QPT_RC,
	};
	struct ibv_mr *mr;

	CHECK(rdma_bind_addr(id, (struct sockaddr *)&address) == 0);
	CHECK(rdma_create_srq_ex(id, &attr) == 0 && id->srq);
	CHECK(rdma_create_qp_ex(id, &qp) == 0 && id->qp->srq == id->srq);
	mr = rdma_reg_msgs(id, data, sizeof data);
	CHECK(mr && rdma_post_recv(id, NULL, data, sizeof data, mr) == 0);
	rdma_destroy_qp(id);
	rdma_destroy_srq(id);
	CHECK(!id->srq && rdma_dereg_mr(mr) == 0);
	ids_gone(id, NULL);
}

/* An id without a channel waits in each call; nobody listens. */
static void synchronous(void)
{
	struct rdma_addrinfo hints = { .ai_port_space = RDMA_PS_TCP, .ai_flags = RAI_NUMERICHOST }, *found;
	struct ibv_qp_init_attr attr = { .cap = { .max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 } };
	struct rdma_cm_id *id;

	CHECK(rdma_getaddrinfo("127.0.0.1", "9", &hints, &found) == 0);
	CHECK(found->ai_qp_type == IBV_QPT_RC && found->ai_dst_addr->sa_family == AF_INET);
	CHECK(rdma_create_ep(&id, found, NULL, &attr) == 0 && id->qp);
	FAILS(rdma_connect(id, NULL), ECONNREFUSED);
	CHECK(id->event->event == RDMA_CM_EVENT_REJECTED);
	rdma_destroy_ep(id);
	rdma_freeaddrinfo(found);
}

int main(int count, char **words)
{
	int phase, at;

	for (at = 0; at < (int)sizeof data; at++)
		data[at] = 1 + at % 250;
	near = channel();
	if (count == 3)
		return child_main(atoi(words[1]), atoi(words[2]));
	far = channel();
	silence(near);
	data_of_each_length();
	half_open_by_destroying();
	for (phase = 0; phase < PHASES; phase++)
		half_open_by_a_signal("/proc/self/exe", phase);
	queue_pairs_of_the_application();
	options_and_refusals();
	migration();
	shared_receive_queue();
	synchronous();
	rdma_destroy_event_channel(near);
	rdma_destroy_event_channel(far);
	printf("all calls behave as documented\n");
	return 0;
}
