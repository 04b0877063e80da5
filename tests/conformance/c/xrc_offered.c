/* The protocol of the entries that fi_getinfo lists:
 *
 *   xrc_offered both PROV NODE     without protocol in the hints: each type on RC, then on XRC
 *   xrc_offered first PROV NODE    FI_WEFT_XRC=1: each type on XRC, then on RC
 *   xrc_offered without PROV NODE  FI_WEFT_XRC=0: RC alone, unless the hints name XRC
 *   xrc_offered missing PROV NODE  a device without XRC: RC alone, and -FI_ENODATA for XRC
 *
 * Ends with 0, or says what went wrong. Plain libfabric 1.17. */
#include "end.h"

#define IS(condition)                                                                                                \
	do {                                                                                                         \
		if (!(condition))                                                                                    \
			die("line %d: not so: %s", __LINE__, #condition);                                            \
	} while (0)

enum { XRC = FI_PROTO_RDMA_CM_IB_XRC };

static struct fi_info *answer(enum fi_ep_type type, uint32_t protocol, uint64_t caps, int mr_mode)
{
	struct fi_info *hints = fi_allocinfo(), *list = NULL;

	hints->ep_attr->type = type;
	hints->ep_attr->protocol = protocol;
	hints->caps = caps;
	hints->domain_attr->mr_mode = mr_mode;
	hints->fabric_attr->prov_name = strdup(provider);
	int ret = fi_getinfo(FI_VERSION(1, 17), node, NULL, FI_SOURCE, hints, &list);
	IS(ret == 0 ? list != NULL : ret == -FI_ENODATA);
	fi_freeinfo(hints);
	return list;
}

/* The entries of each type: how many on each transport, and whether those of one transport come
 * before all of the other. */
static void check_order(enum fi_ep_type type, int first_is_xrc, int has_other)
{
	struct fi_info *list = answer(type, FI_PROTO_UNSPEC, 0, ~(FI_MR_BASIC | FI_MR_SCALABLE) & 4095);
	int changes = 0, last = -1;

	IS(list);
	for (struct fi_info *info = list; info; info = info->next) {
		int xrc = info->ep_attr->protocol == XRC;
		/* by which Open MPI distinguishes them */
		IS(type != FI_EP_RDM || (info->ep_attr->max_msg_size == list->ep_attr->max_msg_size) ==
						(info->ep_attr->protocol == list->ep_attr->protocol));
		IS(type == FI_EP_UNSPEC || info->ep_attr->type == type);
		IS(!xrc || !(info->domain_attr->mr_mode & FI_MR_ENDPOINT));
		if (type == FI_EP_UNSPEC)
			continue;
		changes += last != xrc;
		if (last == -1)
			IS(xrc == first_is_xrc);
		last = xrc;
	}
	if (type != FI_EP_UNSPEC)
		IS(changes == (has_other ? 2 : 1));
	fi_freeinfo(list);
}

static void check_named(int has_xrc)
{
	static const enum fi_ep_type types[] = { FI_EP_UNSPEC, FI_EP_RDM };

	for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
		struct fi_info *list = answer(types[i], XRC, 0, 0);
		IS(!list == !has_xrc);
		for (struct fi_info *info = list; info; info = info->next)
			IS(info->ep_attr->protocol == XRC);
		fi_freeinfo(list);
	}
	IS(!answer(FI_EP_RDM, XRC, FI_MSG | FI_COLLECTIVE, 0));
	IS(!answer(FI_EP_MSG, XRC, FI_MSG | FI_COLLECTIVE, 0));
	for (int msg = 0; msg < 2; msg++) {
		uint32_t protocol = msg ? FI_PROTO_RDMA_CM_IB_RC : FI_PROTO_IB_RDM;
		struct fi_info *list = answer(msg ? FI_EP_MSG : FI_EP_RDM, protocol, 0, 0);
		IS(list || (!msg && !has_xrc));
		for (struct fi_info *info = list; info; info = info->next)
			IS(info->ep_attr->protocol == protocol);
		fi_freeinfo(list);
	}
}

int main(int argc, char **argv)
{
	if (argc != 4)
		die("usage: xrc_offered MODE PROV NODE");
	role = argv[1];
	provider = argv[2];
	node = argv[3];
	int both = !strcmp(argv[1], "both"), first = !strcmp(argv[1], "first"), missing = !strcmp(argv[1], "missing");
	if (!both && !first && !missing && strcmp(argv[1], "without"))
		die("no such mode");
	if (!missing)
		check_order(FI_EP_RDM, first, both || first);
	check_order(FI_EP_UNSPEC, first, both || first);
	check_named(!missing);
	/* an entry on RC answers what XRC cannot */
	struct fi_info *list = answer(FI_EP_MSG, FI_PROTO_UNSPEC, FI_MSG, 0);
	IS(list && list->ep_attr->protocol == FI_PROTO_RDMA_CM_IB_RC);
	fi_freeinfo(list);
	return 0;
}
