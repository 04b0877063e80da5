/* Common code of the examples: opens a message endpoint's objects, and waits for events. */
#ifndef EXAMPLE_H
#define EXAMPLE_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <rdma/fabric.h>
#include <rdma/fi_atomic.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>

#include "weft.h"

/* Seconds to wait for an expected event or completion. */
#define PATIENCE 60

static const char *role = "example";

#define MUST(call)                                                                                  \
	do {                                                                                        \
		long result_ = (long)(call);                                                        \
		if (result_ < 0) {                                                                  \
			fprintf(stderr, "%s: %s: %s\n", role, #call, fi_strerror((int)-result_));   \
			exit(1);                                                                    \
		}                                                                                   \
	} while (0)

struct end {
	struct fi_info *info;
	struct fid_fabric *fabric;
	struct fid_domain *domain;
	struct fid_eq *eq;
	struct fid_cq *cq;
	struct fid_ep *ep;
	const struct weft_mr_ops *ops;
};

/* The provider's info for this address, with at most these bits of mr_mode, or NULL. */
static inline struct fi_info *get_info(const char *node, uint64_t flags, int mr_mode)
{
	struct fi_info *hints = fi_allocinfo(), *info = NULL;
	int ret;

	hints->caps = FI_MSG | FI_RMA | FI_ATOMIC;
	hints->mode = FI_CONTEXT | FI_CONTEXT2 | FI_RX_CQ_DATA;
	hints->ep_attr->type = FI_EP_MSG;
	hints->domain_attr->mr_mode = mr_mode;
	hints->fabric_attr->prov_name = strdup("weft");
	ret = fi_getinfo(FI_VERSION(1, 17), node, NULL, flags, hints, &info);
	fi_freeinfo(hints);
	return ret ? NULL : info;
}

/* Opens all objects except the endpoint, and the provider's table of further calls. */
static inline void open_domain(struct end *end, struct fi_info *info)
{
	struct fi_eq_attr eq_attr = {.wait_obj = FI_WAIT_UNSPEC};
	struct fi_cq_attr cq_attr = {.format = FI_CQ_FORMAT_CONTEXT, .wait_obj = FI_WAIT_UNSPEC};
	void *ops = NULL;

	if (!info) {
		fprintf(stderr, "%s: the provider offers nothing here\n", role);
		exit(77);
	}
	end->info = info;
	MUST(fi_fabric(info->fabric_attr, &end->fabric, NULL));
	MUST(fi_eq_open(end->fabric, &eq_attr, &end->eq, NULL));
	MUST(fi_domain(end->fabric, info, &end->domain, NULL));
	MUST(fi_cq_open(end->domain, &cq_attr, &end->cq, NULL));
	MUST(fi_open_ops(&end->domain->fid, WEFT_MR_OPS, 0, &ops, NULL));
	end->ops = ops;
}

static inline void open_endpoint(struct end *end, struct fi_info *info)
{
	MUST(fi_endpoint(end->domain, info, &end->ep, NULL));
	MUST(fi_ep_bind(end->ep, &end->eq->fid, 0));
	MUST(fi_ep_bind(end->ep, &end->cq->fid, FI_TRANSMIT | FI_RECV));
	MUST(fi_enable(end->ep));
}

/* Waits for this event of the connection manager. Writes its info to *info. */
static inline void await_event(struct end *end, uint32_t wanted, struct fi_info **info)
{
	struct fi_eq_cm_entry entry;
	struct fi_eq_err_entry error = {0};
	uint32_t event = 0;
	ssize_t ret = fi_eq_sread(end->eq, &event, &entry, sizeof entry, PATIENCE * 1000, 0);

	if (ret == -FI_EAVAIL && fi_eq_readerr(end->eq, &error, 0) > 0)
		MUST(-error.err);
	MUST(ret);
	if (event != wanted) {
		fprintf(stderr, "%s: event %u, not %u\n", role, event, wanted);
		exit(1);
	}
	if (info)
		*info = entry.info;
}

/* Waits for one completion. */
static inline void await_completion(struct end *end)
{
	struct fi_cq_entry entry;
	struct fi_cq_err_entry error = {0};
	ssize_t ret = fi_cq_sread(end->cq, &entry, 1, NULL, PATIENCE * 1000);

	if (ret == -FI_EAVAIL && fi_cq_readerr(end->cq, &error, 0) > 0)
		MUST(-error.err);
	MUST(ret);
}

static inline void close_domain(struct end *end)
{
	MUST(fi_close(&end->cq->fid));
	MUST(fi_close(&end->domain->fid));
	MUST(fi_close(&end->eq->fid));
	MUST(fi_close(&end->fabric->fid));
	fi_freeinfo(end->info);
}

#endif
