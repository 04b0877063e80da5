/* Hints that releases since 1.17 have added: `newer PROV NODE`. fi_getinfo(3), fi_domain(3):
 * "Providers that cannot meet the requested max_group_id will fail fi_getinfo()". FI_TAGGED_DIRECTED_RECV is a
 * capability of RDM endpoints for applications of API 2.0.
 *
 * Ends with 0, or says what went wrong. Needs the headers of libfabric 2.x. */
#include "end.h"

static int ask(enum fi_ep_type type, size_t keys, uint32_t group, enum fi_progress progress)
{
	struct fi_info *hints = fi_allocinfo(), *info = NULL;
	int result;

	hints->mode = ~0ULL;
	hints->ep_attr->type = type;
	hints->domain_attr->mr_mode = ~(FI_MR_BASIC | FI_MR_SCALABLE);
	hints->domain_attr->max_ep_auth_key = keys;
	hints->domain_attr->max_group_id = group;
	hints->domain_attr->progress = progress;
	hints->fabric_attr->prov_name = strdup(provider);
	result = fi_getinfo(FI_VERSION(2, 0), node, NULL, FI_SOURCE, hints, &info);
	if (!result && info->domain_attr->progress != progress)
		die("progress %d", info->domain_attr->progress);
	fi_freeinfo(hints);
	fi_freeinfo(info);
	return result;
}

/* The result of a query of this API version with FI_TAGGED_DIRECTED_RECV, which its answer has too; a receive
 * context of such a domain accepts it. */
static int ask_directed(enum fi_ep_type type, uint32_t version)
{
	struct fi_info *hints = fi_allocinfo(), *info = NULL;
	struct fi_rx_attr attr = { .caps = FI_TAGGED | FI_TAGGED_DIRECTED_RECV };
	struct fid_fabric *fabric;
	struct fid_domain *domain;
	struct fid_ep *ep, *srx;
	int result;

	hints->mode = ~0ULL;
	hints->caps = (type == FI_EP_RDM ? FI_TAGGED : FI_MSG) | FI_TAGGED_DIRECTED_RECV;
	hints->ep_attr->type = type;
	hints->domain_attr->mr_mode = ~(FI_MR_BASIC | FI_MR_SCALABLE);
	hints->fabric_attr->prov_name = strdup(provider);
	result = fi_getinfo(version, node, NULL, FI_SOURCE, hints, &info);
	fi_freeinfo(hints);
	if (result)
		return result;
	if (!(info->caps & info->rx_attr->caps & FI_TAGGED_DIRECTED_RECV) || info->caps & FI_DIRECTED_RECV)
		die("caps %#llx", (unsigned long long)info->caps);
	MUST(fi_fabric(info->fabric_attr, &fabric, NULL));
	MUST(fi_domain(fabric, info, &domain, NULL));
	MUST(fi_endpoint(domain, info, &ep, NULL));
	MUST(fi_srx_context(domain, &attr, &srx, NULL));
	MUST(fi_close(&srx->fid));
	MUST(fi_close(&ep->fid));
	MUST(fi_close(&domain->fid));
	MUST(fi_close(&fabric->fid));
	fi_freeinfo(info);
	return 0;
}

int main(int argc, char **argv)
{
	if (argc != 4)
		die("usage: newer MODE PROV NODE");
	role = argv[1];
	provider = argv[2];
	node = argv[3];
	for (int i = 0; i < 2; i++) {
		enum fi_ep_type type = i ? FI_EP_RDM : FI_EP_MSG;
		int result;

		MUST(ask(type, 0, 0, FI_PROGRESS_MANUAL));
		MUST(ask(type, 0, 0, FI_PROGRESS_CONTROL_UNIFIED));
		if ((result = ask(type, 0, 15, FI_PROGRESS_MANUAL)) != -FI_ENODATA)
			die("type %d, max_group_id: %d", type, result);
		if ((result = ask(type, 4, 0, FI_PROGRESS_MANUAL)) != -FI_ENODATA)
			die("type %d, max_ep_auth_key: %d", type, result);
	}
	MUST(ask_directed(FI_EP_RDM, FI_VERSION(2, 0)));
	if (ask_directed(FI_EP_RDM, FI_VERSION(1, 22)) != -FI_ENODATA || ask_directed(FI_EP_MSG, FI_VERSION(2, 0)) != -FI_ENODATA)
		die("FI_TAGGED_DIRECTED_RECV is offered where it does not exist");
	return 0;
}
