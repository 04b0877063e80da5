/* Two connected endpoints of one process, whose buffers are not registered (FI_MR_LOCAL off). */
#ifndef PAIR_H
#define PAIR_H

#include "end.h"

struct pair {
	struct fi_info *info;
	struct fid_fabric *fabric;
	struct fid_eq *eq;
	struct fid_domain *domain;
	struct fid_cq *cq;
	struct fid_ep *ep[2];
};

static inline struct fi_info *info_of(const char *service, uint64_t flags, int mr_mode)
{
	struct fi_info *hints = fi_allocinfo(), *info;

	hints->caps = FI_MSG;
	hints->mode = FI_CONTEXT | FI_CONTEXT2 | FI_RX_CQ_DATA;
	hints->ep_attr->type = FI_EP_MSG;
	hints->domain_attr->mr_mode = mr_mode;
	hints->fabric_attr->prov_name = strdup(provider);
	MUST(fi_getinfo(FI_VERSION(1, 17), node, service, flags, hints, &info));
	fi_freeinfo(hints);
	return info;
}

/* Opens all objects except the endpoints. */
static inline void open_pair(struct pair *pair, int mr_mode)
{
	struct fi_eq_attr eq_attr = { .wait_obj = FI_WAIT_UNSPEC };
	struct fi_cq_attr cq_attr = { .format = FI_CQ_FORMAT_CONTEXT, .wait_obj = FI_WAIT_NONE };

	memset(pair, 0, sizeof *pair);
	pair->info = info_of("0", FI_SOURCE, mr_mode);
	MUST(fi_fabric(pair->info->fabric_attr, &pair->fabric, NULL));
	MUST(fi_eq_open(pair->fabric, &eq_attr, &pair->eq, NULL));
	MUST(fi_domain(pair->fabric, pair->info, &pair->domain, NULL));
	MUST(fi_cq_open(pair->domain, &cq_attr, &pair->cq, NULL));
}

static inline void open_one(struct pair *pair, int which, struct fi_info *info)
{
	MUST(fi_endpoint(pair->domain, info, &pair->ep[which], NULL));
	MUST(fi_ep_bind(pair->ep[which], &pair->eq->fid, 0));
	MUST(fi_ep_bind(pair->ep[which], &pair->cq->fid, FI_TRANSMIT | FI_RECV));
	MUST(fi_enable(pair->ep[which]));
}

static inline void expect_one(struct pair *pair, int want, struct fi_info **info)
{
	struct end end = { .eq = pair->eq };

	expect(&end, want, info);
}

static inline void connect_pair(struct pair *pair)
{
	struct fi_info *request, *client = fi_dupinfo(pair->info);
	struct fid_pep *pep;
	uint8_t name[128];
	size_t size = sizeof name;

	MUST(fi_passive_ep(pair->fabric, pair->info, &pep, NULL));
	MUST(fi_pep_bind(pep, &pair->eq->fid, 0));
	MUST(fi_listen(pep));
	MUST(fi_getname(&pep->fid, name, &size));
	open_one(pair, 0, client);
	MUST(fi_connect(pair->ep[0], name, NULL, 0));
	expect_one(pair, FI_CONNREQ, &request);
	open_one(pair, 1, request);
	MUST(fi_accept(pair->ep[1], NULL, 0));
	expect_one(pair, FI_CONNECTED, NULL);
	expect_one(pair, FI_CONNECTED, NULL);
	MUST(fi_close(&pep->fid));
	fi_freeinfo(request);
	fi_freeinfo(client);
}

/* Sends one buffer into the other, and checks the bytes that arrived. */
static inline void transfer(struct pair *pair, const void *from, void *to, size_t len)
{
	struct end end = { .cq = pair->cq };

	memset(to, 0, len);
	MUST(fi_recv(pair->ep[1], to, len, NULL, 0, NULL));
	MUST(fi_send(pair->ep[0], from, len, NULL, 0, NULL));
	for (int i = 0; i < 2; i++) {
		int error = completion(&end, SETUP_SECONDS);

		if (error)
			die("a completion in error: %s", fi_strerror(error));
	}
	if (memcmp(from, to, len))
		die("something else came than was sent");
}

static inline void close_pair(struct pair *pair)
{
	for (int i = 0; i < 2; i++)
		if (pair->ep[i])
			MUST(fi_close(&pair->ep[i]->fid));
	MUST(fi_close(&pair->cq->fid));
	MUST(fi_close(&pair->domain->fid));
	MUST(fi_close(&pair->eq->fid));
	MUST(fi_close(&pair->fabric->fid));
	fi_freeinfo(pair->info);
}

#endif
