/* One side of a conversation of the connection manager with a queue pair and messages, as
 * rdma_cm(7) describes it. It never waits: the program calls `side_events` and `side_traffic`. */
#ifndef CM_SIDE_H
#define CM_SIDE_H

#include <rdma/rdma_verbs.h>

#include "cm.h"

/* REFUSED: REJECTED, UNREACHABLE or CONNECT_ERROR. */
enum phase { NONE, ASKED, ANSWERED, UP, REFUSED, CLOSED };

/* `BANKS`: connections of a process that exchange messages at the same time */
enum { SENDS = 8, RECEIVES = 16, SIZE = 65536, BANKS = 2 };

/* The private data of a request. */
struct greeting {
	char sender; /* 'V' the victim, 'F' the other peer, 'S' the survivor */
	unsigned int serial;
};

struct side {
	struct rdma_event_channel *channel;
	struct rdma_cm_id *id;
	int bare;     /* without a queue pair */
	int bank;     /* of the messages' memory */
	int hesitate; /* a request is not accepted at once */
	enum phase phase;
	enum rdma_cm_event_type last;
	int status;
	struct greeting greeting; /* of a request */
	double at;		  /* of the last change of the phase */

	struct ibv_mr *mr;
	struct ibv_ah *ah; /* of a datagram service, with its key */
	unsigned int qkey;
	int sending, posted_sends, posted_receives, errors;
	unsigned long sent, received, wanted; /* messages; `wanted`: to be sent */
};

/* SENDS + RECEIVES messages of each bank */
static unsigned char *memory;
static const unsigned int lengths[] = { 16, 4000, 60000 };

static inline unsigned char *buffer(const struct side *side, unsigned int number)
{
	if (!memory)
		CHECK(memory = aligned_alloc(4096, BANKS * (SENDS + RECEIVES) * SIZE));
	return memory + (side->bank * (SENDS + RECEIVES) + number) * SIZE;
}

static inline void message(unsigned char *to, unsigned long serial, unsigned int length)
{
	unsigned int at;

	for (at = 0; at < length; at++)
		to[at] = (unsigned char)(serial * 31 + at);
	memcpy(to, &serial, sizeof serial);
}

static inline struct rdma_conn_param side_param(struct greeting *greeting)
{
	struct rdma_conn_param made = { .responder_resources = 1, .initiator_depth = 1, .retry_count = 7,
					.rnr_retry_count = 7, .qp_num = 7 };

	made.private_data = greeting;
	made.private_data_len = sizeof *greeting;
	return made;
}

static inline void post_receive(struct side *side, unsigned int number)
{
	CHECK(rdma_post_recv(side->id, (void *)(uintptr_t)number, buffer(side, SENDS + number), SIZE, side->mr) == 0);
	side->posted_receives++;
}

static inline void side_queue(struct side *side)
{
	struct ibv_qp_init_attr attr = {
		.cap = { .max_send_wr = SENDS, .max_recv_wr = RECEIVES, .max_send_sge = 1, .max_recv_sge = 1 },
		.qp_type = side->id->qp_type,
		.sq_sig_all = 1,
	};
	int number;

	if (side->bare)
		return;
	CHECK(rdma_create_qp(side->id, NULL, &attr) == 0);
	side->mr = ibv_reg_mr(side->id->pd, buffer(side, 0), (SENDS + RECEIVES) * SIZE, IBV_ACCESS_LOCAL_WRITE);
	CHECK(side->mr);
	if (side->id->qp_type == IBV_QPT_RC)
		for (number = 0; number < RECEIVES; number++)
			post_receive(side, number);
}

static inline void side_phase(struct side *side, enum phase phase)
{
	side->phase = phase;
	side->at = now_ms();
}

static inline void side_resolve(struct side *side, enum rdma_port_space ps, int port)
{
	struct sockaddr_in address = local(port);

	CHECK(rdma_create_id(side->channel, &side->id, NULL, ps) == 0);
	CHECK(rdma_resolve_addr(side->id, NULL, (struct sockaddr *)&address, 2000) == 0);
}

static inline void side_connect(struct side *side, char sender, unsigned int serial)
{
	struct greeting greeting = { sender, serial };
	struct rdma_conn_param param = side_param(&greeting);

	CHECK(await(side->channel, RDMA_CM_EVENT_ADDR_RESOLVED, 0) == side->id);
	CHECK(rdma_resolve_route(side->id, 2000) == 0);
	CHECK(await(side->channel, RDMA_CM_EVENT_ROUTE_RESOLVED, 0) == side->id);
	side_queue(side);
	CHECK(rdma_connect(side->id, &param) == 0);
	side_phase(side, ASKED);
}

/* Accepts a request. A peer that has died meanwhile may make it fail. */
static inline void side_accept(struct side *side)
{
	struct rdma_conn_param param = side_param(&side->greeting);

	side_queue(side);
	side_phase(side, rdma_accept(side->id, &param) ? REFUSED : ANSWERED);
	side->last = RDMA_CM_EVENT_CONNECT_REQUEST;
	/* a datagram service has no further event */
	if (side->phase == ANSWERED && side->id->qp_type == IBV_QPT_UD)
		side_phase(side, UP);
}

static inline void post_send(struct side *side)
{
	unsigned int number = side->sent % SENDS, length = lengths[side->sent % 3];

	message(buffer(side, number), side->sent, length);
	CHECK(rdma_post_send(side->id, NULL, buffer(side, number), length, side->mr, IBV_SEND_SIGNALED) == 0);
	side->sent++;
	side->posted_sends++;
}

static inline void side_up(struct side *side, struct rdma_cm_event *event)
{
	side_phase(side, UP);
	side->sending = !side->bare && side->id->qp_type == IBV_QPT_RC;
	if (side->id->qp_type == IBV_QPT_UD) {
		side->qkey = event->param.ud.qkey;
		if (!side->bare)
			side->ah = ibv_create_ah(side->id->pd, &event->param.ud.ah_attr);
	}
}

static inline void side_event(struct side *side, struct rdma_cm_event *event)
{
	const void *data = event->id->qp_type == IBV_QPT_UD ? event->param.ud.private_data : event->param.conn.private_data;
	enum phase phase = side->phase;

	side->last = event->event;
	side->status = event->status;
	if (event->event == RDMA_CM_EVENT_CONNECT_REQUEST) {
		CHECK(!side->id && event->status == 0);
		side->id = event->id;
		memcpy(&side->greeting, data, sizeof side->greeting);
		side_phase(side, ASKED);
	} else {
		CHECK(side->id == event->id);
	}
	switch (event->event) {
	case RDMA_CM_EVENT_CONNECT_REQUEST:
		break;
	case RDMA_CM_EVENT_CONNECT_RESPONSE:
		CHECK(phase == ASKED && side->bare);
		side_phase(side, ANSWERED);
		break;
	case RDMA_CM_EVENT_ESTABLISHED:
		CHECK(phase == ASKED || phase == ANSWERED);
		side_up(side, event);
		break;
	case RDMA_CM_EVENT_REJECTED:
	case RDMA_CM_EVENT_UNREACHABLE:
	case RDMA_CM_EVENT_CONNECT_ERROR:
		CHECK((phase == ASKED || phase == ANSWERED) && event->status != 0);
		side_phase(side, REFUSED);
		break;
	case RDMA_CM_EVENT_DISCONNECTED:
		CHECK(phase == UP || phase == ANSWERED);
		side_phase(side, CLOSED);
		break;
	case RDMA_CM_EVENT_TIMEWAIT_EXIT:
		CHECK(phase == CLOSED || phase == REFUSED);
		break;
	default:
		die("%s, status %d", rdma_event_str(event->event), event->status);
	}
	CHECK(rdma_ack_cm_event(event) == 0);
	if (side->last == RDMA_CM_EVENT_CONNECT_REQUEST && !side->hesitate)
		side_accept(side);
	if (side->last == RDMA_CM_EVENT_CONNECT_RESPONSE) {
		/* the peer may have died: then the event follows */
		if (rdma_establish(side->id) == 0)
			side_phase(side, UP);
	}
}

/* Handles all events that are there, and waits at most until `deadline` for one. */
static inline void side_events(struct side *side, double deadline)
{
	struct rdma_cm_event *event;

	while ((event = next_until(side->channel, deadline))) {
		side_event(side, event);
		deadline = 0;
	}
}

static inline void arrived(struct side *side, const struct ibv_wc *wc)
{
	static unsigned char wanted[SIZE];
	unsigned int number = wc->wr_id;

	CHECK(wc->byte_len == lengths[side->received % 3]);
	message(wanted, side->received, wc->byte_len);
	CHECK(memcmp(wanted, buffer(side, SENDS + number), wc->byte_len) == 0);
	side->received++;
	post_receive(side, number);
}

/* Polls both queues; sends until `wanted` messages are posted. */
static inline void side_traffic(struct side *side)
{
	struct ibv_wc wc;

	if (!side->id || !side->id->qp)
		return;
	while (ibv_poll_cq(side->id->recv_cq, 1, &wc) == 1) {
		side->posted_receives--;
		if (wc.status == IBV_WC_SUCCESS)
			arrived(side, &wc);
		else
			side->errors++;
	}
	while (ibv_poll_cq(side->id->send_cq, 1, &wc) == 1) {
		side->posted_sends--;
		if (wc.status != IBV_WC_SUCCESS) {
			side->errors++;
			side->sending = 0;
		}
	}
	while (side->sending && side->phase == UP && side->posted_sends < SENDS && side->sent < side->wanted)
		post_send(side);
}

/* After DISCONNECTED: every request that was posted must complete. */
static inline void side_flush(struct side *side)
{
	double begin = now_ms();

	rdma_disconnect(side->id);
	side->sending = 0;
	while (side->posted_sends + side->posted_receives) {
		if (now_ms() - begin > 1000)
			die("%d sends and %d receives do not complete", side->posted_sends, side->posted_receives);
		side_traffic(side);
	}
}

/* Destroys everything, whatever the phase. */
static inline void side_end(struct side *side)
{
	struct rdma_event_channel *channel = side->channel;

	if (side->phase == CLOSED && side->id->qp)
		side_flush(side);
	if (side->ah)
		CHECK(ibv_destroy_ah(side->ah) == 0);
	if (side->id) {
		if (side->id->qp)
			rdma_destroy_qp(side->id);
		if (side->mr)
			CHECK(ibv_dereg_mr(side->mr) == 0);
		CHECK(rdma_destroy_id(side->id) == 0);
	}
	memset(side, 0, sizeof *side);
	side->channel = channel;
}

#endif
