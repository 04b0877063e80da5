/* An endpoint of type FI_EP_RDM with the objects that it uses, for the programs that test these
 * endpoints. A program defines progress(side) before it uses POST. */
#ifndef RDM_SIDE_H
#define RDM_SIDE_H

#include "end.h"

#include <rdma/fi_tagged.h>
#include <stdbool.h>

#ifndef SECONDS
#define SECONDS 30
#endif
#define CAPS (FI_MSG | FI_TAGGED)

#define IS(condition)                                                                                                \
	do {                                                                                                         \
		if (!(condition))                                                                                    \
			die("line %d: not so: %s", __LINE__, #condition);                                            \
	} while (0)

#define RETURNS(call, value)                                                                                         \
	do {                                                                                                         \
		long returned = (long)(call);                                                                        \
		if (returned != (value))                                                                             \
			die("line %d: %s: %ld", __LINE__, #call, returned);                                          \
	} while (0)

/* Does something until the condition holds, for at most `limit` seconds. */
#define UNTIL_WITHIN(limit, condition, doing)                                                                        \
	do {                                                                                                         \
		double until = now() + (limit);                                                                      \
		while (!(condition)) {                                                                               \
			doing;                                                                                       \
			if (now() > until)                                                                           \
				die("line %d: not within %.0f s: %s", __LINE__, (double)(limit), #condition);        \
		}                                                                                                    \
	} while (0)

#define UNTIL(condition, doing) UNTIL_WITHIN(SECONDS, condition, doing)

/* ---- objects ---- */

static bool wants_auto; /* FI_PROGRESS_AUTO */

/* How objects are opened; a program changes it before it opens them. */
static struct {
	bool manual; /* FI_PROGRESS_MANUAL, unless wants_auto; otherwise FI_PROGRESS_UNSPEC */
	enum fi_wait_obj wait;
	enum fi_threading threading;
	uint32_t addr_format;
	uint64_t caps;
	int mr_mode; /* bits that the program supports */
	size_t tx_size, rx_size, tx_queue, rx_queue;
	const char *service; /* the port, or NULL */
} wanted;

struct side {
	struct fi_info *info;
	struct fid_fabric *fabric;
	struct fid_domain *domain;
	struct fid_av *av;
	struct fid_cq *tx, *rx;
	struct fid_cntr *sent, *received;
	struct fid_ep *ep;
	fi_addr_t peer; /* of programs with one peer */
};

struct name {
	size_t len;
	uint8_t bytes[64];
};

/* The protocol of a program's hints. WEFT_TEST_XRC=1: that of endpoints on XRC. */
static inline uint32_t asked_protocol(void)
{
	const char *xrc = getenv("WEFT_TEST_XRC");

	return xrc && !strcmp(xrc, "1") ? FI_PROTO_RDMA_CM_IB_XRC : FI_PROTO_UNSPEC;
}

/* The info of an endpoint of the provider alone, as `wanted` says. */
static inline struct fi_info *offered(void)
{
	struct fi_info *hints = fi_allocinfo(), *info;

	hints->caps = wanted.caps ? wanted.caps : CAPS;
	hints->ep_attr->type = FI_EP_RDM;
	hints->ep_attr->protocol = asked_protocol();
	hints->domain_attr->data_progress = wants_auto ? FI_PROGRESS_AUTO : wanted.manual ? FI_PROGRESS_MANUAL : FI_PROGRESS_UNSPEC;
	hints->domain_attr->threading = wanted.threading;
	hints->domain_attr->mr_mode = offered_bits(wanted.mr_mode);
	hints->tx_attr->size = wanted.tx_size;
	hints->rx_attr->size = wanted.rx_size;
	hints->addr_format = wanted.addr_format;
	hints->fabric_attr->prov_name = strdup(provider);
	MUST(fi_getinfo(FI_VERSION(1, 17), node, wanted.service, FI_SOURCE, hints, &info));
	fi_freeinfo(hints);
	if (strcmp(info->fabric_attr->prov_name, provider))
		die("the provider is %s", info->fabric_attr->prov_name);
	return info;
}

/* The fabric, the domain and the address vector of a side, which gets the info. */
static inline void open_domain_with(struct side *side, struct fi_info *info)
{
	struct fi_av_attr attr = { .type = FI_AV_TABLE };

	memset(side, 0, sizeof *side);
	side->info = info;
	MUST(fi_fabric(side->info->fabric_attr, &side->fabric, NULL));
	MUST(fi_domain(side->fabric, side->info, &side->domain, NULL));
	MUST(fi_av_open(side->domain, &attr, &side->av, NULL));
}

static inline void open_domain_of(struct side *side) { open_domain_with(side, offered()); }

static inline struct fid_cq *queue(struct side *side, size_t size)
{
	struct fi_cq_attr attr = { .format = FI_CQ_FORMAT_TAGGED, .wait_obj = wanted.wait, .size = size };
	struct fid_cq *cq;

	if (attr.wait_obj == 0)
		attr.wait_obj = FI_WAIT_NONE;
	MUST(fi_cq_open(side->domain, &attr, &cq, NULL));
	return cq;
}

static inline struct fid_cntr *counter_of(struct side *side, enum fi_wait_obj wait)
{
	struct fi_cntr_attr attr = { .events = FI_CNTR_EVENTS_COMP, .wait_obj = wait };
	struct fid_cntr *cntr;

	MUST(fi_cntr_open(side->domain, &attr, &cntr, NULL));
	return cntr;
}

/* An enabled endpoint on the side's queues and counters. `selective`: FI_SELECTIVE_COMPLETION or
 * 0. */
static inline struct fid_ep *endpoint_on(struct side *side, uint64_t selective)
{
	struct fid_ep *ep;

	MUST(fi_endpoint(side->domain, side->info, &ep, NULL));
	MUST(fi_ep_bind(ep, &side->av->fid, 0));
	if (side->tx && side->tx == side->rx) {
		MUST(fi_ep_bind(ep, &side->tx->fid, FI_TRANSMIT | FI_RECV | selective));
	} else {
		if (side->tx)
			MUST(fi_ep_bind(ep, &side->tx->fid, FI_TRANSMIT | selective));
		if (side->rx)
			MUST(fi_ep_bind(ep, &side->rx->fid, FI_RECV | selective));
	}
	if (side->sent)
		MUST(fi_ep_bind(ep, &side->sent->fid, FI_SEND));
	if (side->received)
		MUST(fi_ep_bind(ep, &side->received->fid, FI_RECV));
	MUST(fi_enable(ep));
	return ep;
}

static inline struct name name_of(struct fid_ep *ep)
{
	struct name name = { .len = sizeof name.bytes };

	MUST(fi_getname(&ep->fid, name.bytes, &name.len));
	return name;
}

static inline fi_addr_t insert(struct side *side, const struct name *name)
{
	fi_addr_t addr = FI_ADDR_NOTAVAIL;

	RETURNS(fi_av_insert(side->av, name->bytes, 1, &addr, 0, NULL), 1);
	return addr;
}

static inline void close_side(struct side *side)
{
	if (side->ep)
		MUST(fi_close(&side->ep->fid));
	if (side->tx)
		MUST(fi_close(&side->tx->fid));
	if (side->rx && side->rx != side->tx)
		MUST(fi_close(&side->rx->fid));
	if (side->sent)
		MUST(fi_close(&side->sent->fid));
	if (side->received)
		MUST(fi_close(&side->received->fid));
	MUST(fi_close(&side->av->fid));
	MUST(fi_close(&side->domain->fid));
	MUST(fi_close(&side->fabric->fid));
	fi_freeinfo(side->info);
}

/* ---- messages ---- */

/* Repeats a post until it is not -FI_EAGAIN. */
#define POST(side, call)                                                                                             \
	do {                                                                                                         \
		double until = now() + SECONDS;                                                                      \
		long posted;                                                                                         \
		while ((posted = (long)(call)) == -FI_EAGAIN) {                                                      \
			progress(side);                                                                              \
			if (now() > until)                                                                           \
				die("line %d: %s: not possible within %d s", __LINE__, #call, SECONDS);              \
		}                                                                                                    \
		if (posted)                                                                                          \
			die("line %d: %s: %ld (%s)", __LINE__, #call, posted, fi_strerror((int)-posted));            \
	} while (0)

#endif
