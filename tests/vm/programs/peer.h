/* A small program over libfabric's MSG endpoints that runs on any provider: the VM tier uses it
 * between `weft` and libfabric's own `verbs`, to check a survivor's events, and to compare the
 * two. */
#ifndef PEER_H
#define PEER_H

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <stddef.h>
#include <stdint.h>

#define DEPTH 16          /* posted receives, and the limit of pending operations */
#define CONNECT_SECONDS 30 /* the other side may start later */

struct options {
	const char *test;
	const char *provider; /* NULL: the first one listed */
	const char *domain;   /* NULL: any; else the connection must use this one */
	const char *address;  /* server: to bind; client: to connect to */
	const char *port;
	int server;
	int iterations;
	size_t size;
	double seconds;
};

struct peer {
	const struct options *opt;
	struct fi_info *info;
	struct fid_fabric *fabric;
	struct fid_domain *domain;
	struct fid_eq *eq;
	struct fid_pep *pep;
	struct fid_ep *ep;
	struct fid_cq *tx, *rx;
	struct fid_mr *mr;
	char *buf; /* DEPTH receive slots, then a send area and an RMA area of `size` bytes each */
	size_t size, buf_len;
	uint64_t remote_addr, remote_key;
	uint64_t rx_done; /* receives that completed */
};

/* one completion, for programs that continue after errors */
struct done {
	uint64_t flags;
	size_t len;
	void *context;
	int err; /* 0 or a positive errno */
	int prov_errno;
};

double now(void);
void fail(const char *what, long ret) __attribute__((noreturn));
void check(const char *what, long ret);

void peer_open(struct peer *p, const struct options *opt);
void peer_connect(struct peer *p); /* both sides; returns when connected and keys are exchanged */
void peer_close(struct peer *p);
/* the parts of peer_connect, without the exchange of keys */
void peer_listen(struct peer *p);
void peer_accept(struct peer *p); /* one connection; opens the domain with the first one */
double peer_dial(struct peer *p); /* returns the seconds from fi_endpoint to FI_CONNECTED */
void peer_close_ep(struct peer *p);
void peer_wait_shutdown(struct peer *p); /* for ten seconds at most, longer in the test count */
/* orderly end: the client shuts down, the server must get FI_SHUTDOWN */
void peer_shutdown_pair(struct peer *p);

char *peer_rx_slot(struct peer *p, int slot);
char *peer_tx_area(struct peer *p);
char *peer_rma_area(struct peer *p);

void peer_post_rx(struct peer *p, int slot);
void peer_send(struct peer *p, size_t len);  /* sends the send area and waits for the completion */
/* waits for a receive of exactly `len` bytes, returns its slot */
int peer_recv(struct peer *p, size_t len);
/* waits until the one pending operation has completed without error */
void peer_wait_tx(struct peer *p, const char *what);
/* writes the RMA area to the peer's and waits for the completion */
void peer_write(struct peer *p, size_t len);
void peer_read(struct peer *p, size_t len);

/* 1: one completion (success or error), 0: none */
int cq_poll(struct fid_cq *cq, struct done *d);
int eq_poll(struct fid_eq *eq, uint32_t *event, int *err);    /* same for events */

int test_transfer(const struct options *opt);
int test_survive(const struct options *opt);
int test_watch(const struct options *opt);
int test_bench(const struct options *opt);
int test_register(const struct options *opt);
int test_atomic(const struct options *opt);
int test_advise(const struct options *opt);
int test_refresh(const struct options *opt);
int test_unregistered(const struct options *opt);
int test_local(const struct options *opt);
int test_reads(const struct options *opt);
int test_connect(const struct options *opt);
int test_count(const struct options *opt);
int test_durable(const struct options *opt);
int test_rejected(const struct options *opt);

#endif
