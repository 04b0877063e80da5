/* Calls fi_getinfo for the log lines that the calls leave: `queries CASE...` makes the calls of
 * these names, in this order, in one process, and prints each name with the return value and the
 * number of entries of weft, alone or under a layer. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <rdma/fabric.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>

#define RMA (FI_MSG | FI_RMA)

struct query {
	const char *name;
	const char *provider;
	enum fi_ep_type type;
	uint64_t caps;
	int mr_mode;
	const char *domain;
	const char *node;
	uint32_t version;
};

static const struct query queries[] = {
	{.name = "named", .provider = "weft", .type = FI_EP_MSG, .caps = RMA},
	{.name = "any", .type = FI_EP_MSG, .caps = RMA},
	{.name = "layered", .provider = "weft;ofi_rxm", .type = FI_EP_RDM, .caps = RMA},
	/* ofi_rxm makes this query of each provider with message endpoints; the application named
	 * none */
	{.name = "probed", .type = FI_EP_RDM, .caps = RMA},
	{.name = "allocated", .provider = "weft", .type = FI_EP_MSG, .caps = RMA, .mr_mode = FI_MR_ALLOCATED},
	{.name = "notified", .provider = "weft", .type = FI_EP_MSG, .caps = RMA, .mr_mode = FI_MR_MMU_NOTIFY},
	{.name = "scalable", .provider = "weft", .type = FI_EP_MSG, .caps = RMA, .mr_mode = FI_MR_SCALABLE},
	{.name = "old", .provider = "weft", .type = FI_EP_MSG, .caps = RMA, .mr_mode = FI_MR_SCALABLE, .version = FI_VERSION(1, 4)},
	{.name = "pair", .provider = "weft", .type = FI_EP_MSG, .caps = RMA, .mr_mode = FI_MR_SCALABLE | FI_MR_PROV_KEY},
	/* the other attributes of these queries cannot be satisfied either */
	{.name = "tagged", .provider = "weft", .type = FI_EP_MSG, .caps = RMA | FI_TAGGED},
	{.name = "endpoint", .provider = "weft", .type = FI_EP_DGRAM, .caps = RMA},
	{.name = "domain", .provider = "weft", .type = FI_EP_MSG, .caps = RMA, .domain = "no-such-domain"},
	{.name = "node", .provider = "weft", .type = FI_EP_MSG, .caps = RMA, .node = "198.51.100.7"},
};

/* Frees the entries; returns how many of them are weft's, alone or under a layer. */
static int count(struct fi_info *list)
{
	int ours = 0;
	for (struct fi_info *info = list; info; info = info->next)
		ours += !strncmp(info->fabric_attr->prov_name, "weft", 4);
	fi_freeinfo(list);
	return ours;
}

static int ask(const struct query *query, int *entries)
{
	struct fi_info *hints = fi_allocinfo(), *info = NULL;
	if (!hints)
		exit(2);
	hints->caps = query->caps;
	hints->mode = ~0ULL;
	hints->ep_attr->type = query->type;
	hints->domain_attr->mr_mode = query->mr_mode;
	if (query->domain)
		hints->domain_attr->name = strdup(query->domain);
	if (query->provider)
		hints->fabric_attr->prov_name = strdup(query->provider);
	int ret = fi_getinfo(query->version ? query->version : FI_VERSION(1, 17), query->node, query->node ? "7471" : NULL, 0, hints, &info);
	if (!ret)
		*entries = count(info);
	fi_freeinfo(hints);
	return ret;
}

static int without_hints(int *entries)
{
	struct fi_info *info = NULL;
	int ret = fi_getinfo(FI_VERSION(1, 17), NULL, NULL, 0, NULL, &info);
	if (!ret)
		*entries = count(info);
	return ret;
}

int main(int argc, char **argv)
{
	for (int i = 1; i < argc; i++) {
		const struct query *found = NULL;
		for (size_t n = 0; n < sizeof queries / sizeof *queries; n++)
			if (!strcmp(queries[n].name, argv[i]))
				found = &queries[n];
		if (!found && strcmp(argv[i], "none")) {
			fprintf(stderr, "no query %s\n", argv[i]);
			return 2;
		}
		int entries = 0;
		int ret = found ? ask(found, &entries) : without_hints(&entries);
		printf("%s %d %d\n", argv[i], ret, entries);
	}
	return 0;
}
