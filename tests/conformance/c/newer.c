/* Hints that releases since 1.17 have added: `newer PROV NODE`. fi_getinfo(3), fi_domain(3):
 * "Providers that cannot meet the requested max_group_id will fail fi_getinfo()".
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
	return 0;
}
