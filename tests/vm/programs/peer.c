/* Opening, connecting and the single operations. Each failure ends the program and prints the
 * failed call. */
#include "peer.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

struct keys {
	uint64_t addr, key;
};

double now(void)
{
	struct timespec ts;
	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (double)ts.tv_sec + (double)ts.tv_nsec * 1e-9;
}

void fail(const char *what, long ret)
{
	printf("FAILED: %s: %ld (%s)\n", what, ret, fi_strerror((int)(ret < 0 ? -ret : ret)));
	exit(1);
}

void check(const char *what, long ret)
{
	if (ret)
		fail(what, ret);
}

char *peer_rx_slot(struct peer *p, int slot) { return p->buf + (size_t)slot * p->size; }
char *peer_tx_area(struct peer *p) { return p->buf + DEPTH * p->size; }
char *peer_rma_area(struct peer *p) { return p->buf + (DEPTH + 1) * p->size; }

static struct fi_info *get_hints(const struct options *opt)
{
	struct fi_info *hints = fi_allocinfo();
	if (!hints)
		fail("fi_allocinfo", -FI_ENOMEM);
	hints->ep_attr->type = FI_EP_MSG;
	hints->caps = FI_MSG | FI_RMA | (strcmp(opt->test, "atomic") ? 0 : FI_ATOMIC);
	if (!strcmp(opt->test, "durable"))
		hints->caps |= FI_RMA_PMEM;
	hints->mode = 0;
	hints->addr_format = strchr(opt->address, ':') ? FI_SOCKADDR_IN6 : FI_SOCKADDR_IN;
	/* the bits that the verbs provider requires on a verbs device: the native form of keys */
	hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
	if (!strcmp(opt->test, "refresh"))
		hints->domain_attr->mr_mode |= FI_MR_MMU_NOTIFY;
	/* buffers without a registration: only weft accepts them */
	if (!strcmp(opt->test, "unregistered") || (!strcmp(opt->test, "local") && opt->provider && !strcmp(opt->provider, "weft")))
		hints->domain_attr->mr_mode &= ~FI_MR_LOCAL;
	hints->tx_attr->size = DEPTH * 2;
	hints->rx_attr->size = DEPTH * 2;
	if (opt->provider)
		hints->fabric_attr->prov_name = strdup(opt->provider);
	if (opt->domain)
		hints->domain_attr->name = strdup(opt->domain);
	return hints;
}

static struct fi_info *lookup(const struct options *opt)
{
	struct fi_info *hints = get_hints(opt), *info = NULL;
	check("fi_getinfo", fi_getinfo(FI_VERSION(1, 17), opt->address, opt->port, opt->server ? FI_SOURCE : 0, hints, &info));
	fi_freeinfo(hints);
	return info;
}

void peer_open(struct peer *p, const struct options *opt)
{
	memset(p, 0, sizeof *p);
	p->opt = opt;
	p->size = opt->size < 4096 ? 4096 : opt->size;
	p->info = lookup(opt);
	printf("provider %s domain %s\n", p->info->fabric_attr->prov_name, p->info->domain_attr->name);
	check("fi_fabric", fi_fabric(p->info->fabric_attr, &p->fabric, NULL));
	struct fi_eq_attr eq_attr = {.wait_obj = FI_WAIT_UNSPEC};
	check("fi_eq_open", fi_eq_open(p->fabric, &eq_attr, &p->eq, NULL));
}

static void open_domain(struct peer *p, struct fi_info *info)
{
	p->buf_len = (DEPTH + 2) * p->size;
	check("posix_memalign", posix_memalign((void **)&p->buf, 4096, p->buf_len));
	memset(p->buf, 0, p->buf_len);
	check("fi_domain", fi_domain(p->fabric, info, &p->domain, NULL));
	struct fi_cq_attr cq_attr = {.size = DEPTH * 4, .format = FI_CQ_FORMAT_MSG, .wait_obj = FI_WAIT_UNSPEC};
	check("fi_cq_open", fi_cq_open(p->domain, &cq_attr, &p->tx, NULL));
	check("fi_cq_open", fi_cq_open(p->domain, &cq_attr, &p->rx, NULL));
	check("fi_mr_reg", fi_mr_reg(p->domain, p->buf, p->buf_len,
				     FI_SEND | FI_RECV | FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE, 0, 0, 0, &p->mr, NULL));
}

static void open_ep(struct peer *p, struct fi_info *info)
{
	check("fi_endpoint", fi_endpoint(p->domain, info, &p->ep, NULL));
	check("fi_ep_bind eq", fi_ep_bind(p->ep, &p->eq->fid, 0));
	check("fi_ep_bind tx", fi_ep_bind(p->ep, &p->tx->fid, FI_TRANSMIT));
	check("fi_ep_bind rx", fi_ep_bind(p->ep, &p->rx->fid, FI_RECV));
	check("fi_enable", fi_enable(p->ep));
	for (int slot = 0; slot < DEPTH; slot++)
		peer_post_rx(p, slot);
}

/* Under callgrind in an emulated guest, the start and the end of a program take longer. */
static int connect_seconds(const struct peer *p) { return strcmp(p->opt->test, "count") ? CONNECT_SECONDS : 10 * CONNECT_SECONDS; }

/* Waits for one event. Returns the event, or 0 and the positive errno of an error entry. */
static uint32_t wait_event(struct peer *p, struct fi_eq_cm_entry *entry, size_t room, int *err)
{
	uint32_t event = 0;
	ssize_t got = fi_eq_sread(p->eq, &event, entry, room, connect_seconds(p) * 1000, 0);
	*err = 0;
	if (got >= 0)
		return event;
	if (got != -FI_EAVAIL)
		fail("fi_eq_sread", got);
	struct fi_eq_err_entry bad = {0};
	got = fi_eq_readerr(p->eq, &bad, 0);
	if (got < 0)
		fail("fi_eq_readerr", got);
	*err = bad.err;
	return 0;
}

void peer_listen(struct peer *p)
{
	check("fi_passive_ep", fi_passive_ep(p->fabric, p->info, &p->pep, NULL));
	check("fi_pep_bind", fi_pep_bind(p->pep, &p->eq->fid, 0));
	check("fi_listen", fi_listen(p->pep));
}

void peer_accept(struct peer *p)
{
	struct fi_eq_cm_entry entry;
	int err;
	uint32_t event = wait_event(p, &entry, sizeof entry, &err);
	if (event != FI_CONNREQ)
		fail("no FI_CONNREQ", err ? -err : (long)event);
	if (!p->domain)
		open_domain(p, entry.info);
	open_ep(p, entry.info);
	check("fi_accept", fi_accept(p->ep, NULL, 0));
	fi_freeinfo(entry.info);
	event = wait_event(p, &entry, sizeof entry, &err);
	if (event != FI_CONNECTED)
		fail("no FI_CONNECTED", err ? -err : (long)event);
}

void peer_close_ep(struct peer *p)
{
	struct done d;
	check("close ep", fi_close(&p->ep->fid));
	p->ep = NULL;
	/* its receives are flushed into the queue */
	while (cq_poll(p->rx, &d))
		;
}

double peer_dial(struct peer *p)
{
	struct fi_eq_cm_entry entry;
	int err;
	double give_up = now() + connect_seconds(p);
	if (!p->domain)
		open_domain(p, p->info);
	for (;;) {
		double start = now();
		open_ep(p, p->info);
		check("fi_connect", fi_connect(p->ep, p->info->dest_addr, NULL, 0));
		uint32_t event = wait_event(p, &entry, sizeof entry, &err);
		/* of the endpoint before, which this side has shut down */
		while (event == FI_SHUTDOWN)
			event = wait_event(p, &entry, sizeof entry, &err);
		if (event == FI_CONNECTED)
			return now() - start;
		if (err != FI_ECONNREFUSED || now() > give_up)
			fail("no FI_CONNECTED", err ? -err : (long)event);
		/* no server listens yet */
		peer_close_ep(p);
		usleep(200000);
	}
}

void peer_connect(struct peer *p)
{
	if (p->opt->server) {
		peer_listen(p);
		peer_accept(p);
	} else {
		peer_dial(p);
	}
	struct keys *mine = (struct keys *)peer_tx_area(p);
	mine->addr = (uint64_t)(uintptr_t)peer_rma_area(p);
	mine->key = fi_mr_key(p->mr);
	peer_send(p, sizeof *mine);
	int slot = peer_recv(p, sizeof *mine);
	struct keys *theirs = (struct keys *)peer_rx_slot(p, slot);
	p->remote_addr = theirs->addr;
	p->remote_key = theirs->key;
	peer_post_rx(p, slot);
}

void peer_shutdown_pair(struct peer *p)
{
	if (p->opt->server)
		peer_wait_shutdown(p);
	else
		check("fi_shutdown", fi_shutdown(p->ep, 0));
}

void peer_wait_shutdown(struct peer *p)
{
	uint32_t event = 0;
	int err = 0;
	double give_up = now() + (strcmp(p->opt->test, "count") ? 10 : connect_seconds(p));
	while (!eq_poll(p->eq, &event, &err))
		if (now() > give_up)
			fail("no FI_SHUTDOWN after the client's", -FI_ETIMEDOUT);
	if (event != FI_SHUTDOWN)
		fail("expected FI_SHUTDOWN", err ? -err : (long)event);
}

void peer_close(struct peer *p)
{
	if (p->ep)
		check("close ep", fi_close(&p->ep->fid));
	if (p->pep)
		check("close pep", fi_close(&p->pep->fid));
	check("close mr", fi_close(&p->mr->fid));
	check("close cq", fi_close(&p->tx->fid));
	check("close cq", fi_close(&p->rx->fid));
	check("close domain", fi_close(&p->domain->fid));
	check("close eq", fi_close(&p->eq->fid));
	check("close fabric", fi_close(&p->fabric->fid));
	fi_freeinfo(p->info);
	free(p->buf);
}

int cq_poll(struct fid_cq *cq, struct done *d)
{
	struct fi_cq_msg_entry entry;
	ssize_t got = fi_cq_read(cq, &entry, 1);
	if (got == -FI_EAGAIN) {
		sched_yield();
		return 0;
	}
	memset(d, 0, sizeof *d);
	if (got == 1) {
		d->flags = entry.flags;
		d->len = entry.len;
		d->context = entry.op_context;
		return 1;
	}
	if (got != -FI_EAVAIL)
		fail("fi_cq_read", got);
	struct fi_cq_err_entry bad = {0};
	got = fi_cq_readerr(cq, &bad, 0);
	if (got != 1)
		fail("fi_cq_readerr", got);
	d->context = bad.op_context;
	d->err = bad.err;
	d->prov_errno = bad.prov_errno;
	return 1;
}

int eq_poll(struct fid_eq *eq, uint32_t *event, int *err)
{
	struct fi_eq_cm_entry entry;
	ssize_t got = fi_eq_read(eq, event, &entry, sizeof entry, 0);
	*err = 0;
	if (got == -FI_EAGAIN)
		return 0;
	if (got >= 0)
		return 1;
	if (got != -FI_EAVAIL)
		fail("fi_eq_read", got);
	struct fi_eq_err_entry bad = {0};
	got = fi_eq_readerr(eq, &bad, 0);
	if (got < 0)
		fail("fi_eq_readerr", got);
	*event = 0;
	*err = bad.err;
	return 1;
}

void peer_wait_tx(struct peer *p, const char *what)
{
	struct done d;
	while (!cq_poll(p->tx, &d))
		;
	if (d.err) {
		printf("provider's error %d\n", d.prov_errno);
		fail(what, -d.err);
	}
}

void peer_post_rx(struct peer *p, int slot)
{
	char *at = peer_rx_slot(p, slot);
	check("fi_recv", fi_recv(p->ep, at, p->size, fi_mr_desc(p->mr), 0, at));
}

void peer_send(struct peer *p, size_t len)
{
	check("fi_send", fi_send(p->ep, peer_tx_area(p), len, fi_mr_desc(p->mr), 0, NULL));
	peer_wait_tx(p, "send");
}

int peer_recv(struct peer *p, size_t len)
{
	struct done d;
	while (!cq_poll(p->rx, &d))
		;
	if (d.err)
		fail("receive", -d.err);
	if (d.len != len) {
		printf("%zu bytes, expected %zu\n", d.len, len);
		fail("receive", -FI_ETRUNC);
	}
	p->rx_done++;
	return (int)(((char *)d.context - p->buf) / (ptrdiff_t)p->size);
}

void peer_write(struct peer *p, size_t len)
{
	check("fi_write", fi_write(p->ep, peer_rma_area(p), len, fi_mr_desc(p->mr), 0, p->remote_addr, p->remote_key, NULL));
	peer_wait_tx(p, "write");
}

void peer_read(struct peer *p, size_t len)
{
	check("fi_read", fi_read(p->ep, peer_rma_area(p), len, fi_mr_desc(p->mr), 0, p->remote_addr, p->remote_key, NULL));
	peer_wait_tx(p, "read");
}
