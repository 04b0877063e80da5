/* What the programs of the connection manager share: checks, channels, events and addresses. */
#ifndef CM_H
#define CM_H

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>

#define CHECK(condition)                                                                          \
	do {                                                                                      \
		if (!(condition))                                                                 \
			die("%s:%d: %s (errno %d)", __func__, __LINE__, #condition, errno);       \
	} while (0)
/* a call that fails with this errno */
#define FAILS(call, wanted) CHECK((errno = 0, (call) == -1) && errno == (wanted))

/* maximum private data of request, reply and rejection, and of a datagram service's request and
 * reply: rdma_connect(3), rdma_accept(3) */
enum { REQ = 56, REP = 196, REJ = 148, SIDR_REQ = 180, SIDR_REP = 136 };

/* What the program does at this moment, for the message of a failure. */
static char doing[128];

static inline void __attribute__((noreturn, format(printf, 1, 2))) die(const char *format, ...)
{
	va_list list;

	va_start(list, format);
	if (doing[0])
		printf("%s: ", doing);
	vprintf(format, list);
	va_end(list);
	printf("\n");
	fflush(stdout);
	_exit(1);
}

/* Milliseconds of a clock that does not jump. */
static inline double now_ms(void)
{
	struct timespec at;

	clock_gettime(CLOCK_MONOTONIC, &at);
	return at.tv_sec * 1e3 + at.tv_nsec / 1e6;
}

/* A channel whose descriptor does not block. */
static inline struct rdma_event_channel *channel(void)
{
	struct rdma_event_channel *made = rdma_create_event_channel();

	CHECK(made);
	CHECK(fcntl(made->fd, F_SETFL, fcntl(made->fd, F_GETFL) | O_NONBLOCK) == 0);
	return made;
}

/* The next event, or NULL at the deadline. The descriptor may be readable for another reason. */
static inline struct rdma_cm_event *next_until(struct rdma_event_channel *from, double deadline)
{
	struct pollfd ready = { .fd = from->fd, .events = POLLIN };
	struct rdma_cm_event *event;
	double left;

	while (rdma_get_cm_event(from, &event)) {
		CHECK(errno == EAGAIN);
		left = deadline - now_ms();
		if (left <= 0)
			return NULL;
		CHECK(poll(&ready, 1, (int)left + 1) >= 0);
	}
	return event;
}

/* The next event, within 20 s. */
static inline struct rdma_cm_event *next(struct rdma_event_channel *from)
{
	struct rdma_cm_event *event = next_until(from, now_ms() + 20000);

	CHECK(event);
	return event;
}

static inline void silence(struct rdma_event_channel *from)
{
	struct pollfd ready = { .fd = from->fd, .events = POLLIN };
	struct rdma_cm_event *event;

	poll(&ready, 1, 20);
	FAILS(rdma_get_cm_event(from, &event), EAGAIN);
}

/* Waits for an event of this kind and status and acknowledges it. Returns its id. */
static inline struct rdma_cm_id *await(struct rdma_event_channel *from, enum rdma_cm_event_type kind, int status)
{
	struct rdma_cm_event *event = next(from);
	struct rdma_cm_id *id = event->id;

	if (event->event != kind || event->status != status)
		die("%s, status %d, instead of %s, %d", rdma_event_str(event->event), event->status,
		    rdma_event_str(kind), status);
	CHECK(rdma_ack_cm_event(event) == 0);
	return id;
}

static inline struct sockaddr_in local(int port)
{
	struct sockaddr_in address = { .sin_family = AF_INET, .sin_port = htons(port) };

	address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	return address;
}

/* An id that listens at a port of 127.0.0.1; 0: a free one. */
static inline struct rdma_cm_id *listen_at(struct rdma_event_channel *in, enum rdma_port_space ps, int port, int backlog)
{
	struct sockaddr_in address = local(port);
	struct rdma_cm_id *id;

	CHECK(rdma_create_id(in, &id, NULL, ps) == 0);
	CHECK(rdma_bind_addr(id, (struct sockaddr *)&address) == 0);
	CHECK(rdma_listen(id, backlog) == 0);
	return id;
}

#endif
