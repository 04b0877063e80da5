/* fi_getinfo for endpoints with many peers:
 *
 *   offered attributes PROV NODE  the attributes of the answer to hints that request only the type
 *   offered hints PROV NODE       what hints may request, and what they may not
 *   offered order PROV NODE       without hints: entries of this type precede those of connected
 *                                 endpoints
 *   offered objects PROV NODE     what a domain and an endpoint may be opened with
 *   offered none PROV NODE        there is no such entry of this provider
 *   offered passive PROV NODE     the address of a passive endpoint that was given none
 *   offered opened PROV NODE      open fabrics and domains in hints and answers
 *
 * Each entry's provider has to be PROV, with nothing layered over it. Ends with 0, or says what
 * went wrong. Plain libfabric 1.17. */
#include "end.h"

#include <sys/socket.h>

#define PRIMARY (FI_MSG | FI_TAGGED | FI_RMA | FI_ATOMIC)
#define SECONDARY (FI_MULTI_RECV | FI_DIRECTED_RECV | FI_SOURCE)
#define CAPS                                                                                                         \
	(PRIMARY | FI_SEND | FI_RECV | FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE | SECONDARY |           \
	 FI_LOCAL_COMM | FI_REMOTE_COMM)
#define ORDER                                                                                                        \
	(FI_ORDER_SAS | FI_ORDER_SAW | FI_ORDER_RAS | FI_ORDER_WAS | FI_ORDER_RMA_RAR | FI_ORDER_RMA_RAW |           \
	 FI_ORDER_RMA_WAW | FI_ORDER_ATOMIC_RAR | FI_ORDER_ATOMIC_RAW | FI_ORDER_ATOMIC_WAR | FI_ORDER_ATOMIC_WAW)

/* FI_PROGRESS_CONTROL_UNIFIED of libfabric 2.0 */
#define UNIFIED (FI_PROGRESS_MANUAL + 1)

#define IS(condition)                                                                                                \
	do {                                                                                                         \
		if (!(condition))                                                                                    \
			die("line %d: not so: %s", __LINE__, #condition);                                            \
	} while (0)

static struct fi_info *hints_of(enum fi_ep_type type)
{
	struct fi_info *hints = fi_allocinfo();

	hints->ep_attr->type = type;
	hints->fabric_attr->prov_name = strdup(provider);
	return hints;
}

/* Each entry is of the provider itself. */
static void must_be_ours(const struct fi_info *list)
{
	for (; list; list = list->next)
		if (strcmp(list->fabric_attr->prov_name, provider))
			die("an entry of %s", list->fabric_attr->prov_name);
}

static struct fi_info *answer(uint32_t version, struct fi_info *hints)
{
	struct fi_info *info = NULL;

	MUST(fi_getinfo(version, node, NULL, FI_SOURCE, hints, &info));
	must_be_ours(info);
	IS(info->ep_attr->type == FI_EP_RDM);
	return info;
}

static void check_attributes(void)
{
	struct fi_info *hints = hints_of(FI_EP_RDM), *info = answer(FI_VERSION(1, 17), hints);

	IS(info->caps == CAPS);
	IS(info->tx_attr->caps == (PRIMARY | FI_SEND | FI_READ | FI_WRITE));
	IS(info->rx_attr->caps == (PRIMARY | FI_RECV | FI_REMOTE_READ | FI_REMOTE_WRITE | SECONDARY));
	IS(info->mode == 0 && info->tx_attr->mode == 0 && info->rx_attr->mode == 0);
	IS(info->addr_format == FI_SOCKADDR_IN && info->src_addr && !info->dest_addr);
	IS(info->tx_attr->size == 1024 && info->rx_attr->size == 65536);
	IS(info->tx_attr->iov_limit == 4 && info->rx_attr->iov_limit == 4);
	IS(info->tx_attr->inject_size == 4096);
	IS(info->tx_attr->msg_order == ORDER && info->rx_attr->msg_order == ORDER);
	IS(info->tx_attr->rma_iov_limit == 4);
	IS(info->tx_attr->comp_order == FI_ORDER_NONE && info->rx_attr->comp_order == FI_ORDER_NONE);
	IS(info->ep_attr->protocol == FI_PROTO_IB_RDM && info->ep_attr->protocol_version == 1);
	IS(info->ep_attr->max_msg_size >= 1UL << 47);
	IS(info->ep_attr->mem_tag_format == 0xaaaaaaaaaaaaaaaaULL);
	IS(info->ep_attr->tx_ctx_cnt == 1 && info->ep_attr->rx_ctx_cnt == 1);
	IS(info->domain_attr->mr_mode == 0 && info->domain_attr->cq_data_size == 8);
	IS(info->domain_attr->resource_mgmt == FI_RM_ENABLED);
	IS(info->domain_attr->control_progress == FI_PROGRESS_AUTO);
	IS(info->domain_attr->data_progress == FI_PROGRESS_MANUAL);
	IS(info->domain_attr->av_type == FI_AV_UNSPEC);
	IS(info->domain_attr->max_ep_srx_ctx == info->domain_attr->ep_cnt && info->domain_attr->max_ep_stx_ctx == 0);
	IS(info->domain_attr->tclass == FI_TC_UNSPEC && info->tx_attr->tclass == FI_TC_UNSPEC);
	IS(!info->domain_attr->domain && !info->fabric_attr->fabric);
	fi_freeinfo(info);
	fi_freeinfo(hints);
}

/* Hints with one change, given by the fields that it sets. */
#define WITH(statement, version, expected)                                                                           \
	do {                                                                                                         \
		struct fi_info *hints = hints_of(FI_EP_RDM), *info = NULL;                                           \
		statement;                                                                                           \
		int returned = fi_getinfo(version, node, NULL, FI_SOURCE, hints, &info);                             \
		if (expected ? returned : returned != -FI_ENODATA)                                                   \
			die("line %d: %s: %d", __LINE__, #statement, returned);                                      \
		must_be_ours(info);                                                                                  \
		fi_freeinfo(info);                                                                                   \
		fi_freeinfo(hints);                                                                                  \
	} while (0)
#define CAN(statement) WITH(statement, FI_VERSION(1, 17), 1)
#define CANNOT(statement) WITH(statement, FI_VERSION(1, 17), 0)

static void check_hints(void)
{
	CANNOT(hints->domain_attr->tx_ctx_cnt = 1UL << 30);
	CANNOT(hints->domain_attr->rx_ctx_cnt = 1UL << 30);
	CAN(hints->domain_attr->tx_ctx_cnt = hints->domain_attr->rx_ctx_cnt = 1000);
	/* capabilities: primary ones only if they are requested */
	static const struct {
		uint64_t asked, got;
	} caps[] = {
		{ FI_MSG, FI_MSG | FI_SEND | FI_RECV },
		{ FI_TAGGED, FI_TAGGED | FI_SEND | FI_RECV },
		{ FI_TAGGED | FI_RECV, FI_TAGGED | FI_RECV },
		{ FI_MSG | FI_TAGGED | FI_SOURCE, FI_MSG | FI_TAGGED | FI_SEND | FI_RECV | FI_SOURCE },
		{ FI_RMA | FI_WRITE | FI_FENCE, FI_RMA | FI_WRITE | FI_FENCE },
		{ FI_ATOMIC, FI_ATOMIC | FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE },
		{ FI_MSG | FI_MULTI_RECV | FI_DIRECTED_RECV, FI_MSG | FI_SEND | FI_RECV | FI_MULTI_RECV | FI_DIRECTED_RECV },
	};
	for (size_t i = 0; i < sizeof caps / sizeof *caps; i++) {
		struct fi_info *hints = hints_of(FI_EP_RDM);
		hints->caps = caps[i].asked;
		struct fi_info *info = answer(FI_VERSION(1, 17), hints);
		if (info->caps != (caps[i].got | FI_LOCAL_COMM | FI_REMOTE_COMM))
			die("caps %#llx for %#llx", (unsigned long long)info->caps, (unsigned long long)caps[i].asked);
		fi_freeinfo(info);
		fi_freeinfo(hints);
	}
	static const uint64_t none[] = { FI_COLLECTIVE, FI_MULTICAST, FI_MSG | FI_VARIABLE_MSG, FI_MSG | FI_NAMED_RX_CTX, FI_MSG | FI_HMEM };
	for (size_t i = 0; i < sizeof none / sizeof *none; i++)
		CANNOT(hints->caps = none[i]);

	/* an application of API 1.0, which has no mr_mode bits, and others */
	WITH(hints->caps = FI_MSG, FI_VERSION(1, 0), 1);
	WITH(hints->domain_attr->mr_mode = FI_MR_BASIC, FI_VERSION(1, 0), 1);
	WITH(hints->domain_attr->mr_mode = FI_MR_SCALABLE, FI_VERSION(1, 4), 1);
	CAN(hints->domain_attr->mr_mode = FI_MR_BASIC);
	CAN(hints->domain_attr->mr_mode = FI_MR_SCALABLE);
	CAN(hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY);
	CAN(hints->mode = ~0ULL);

	/* tags */
	CAN(hints->ep_attr->mem_tag_format = 0xaaaaaaaaaaaaaaaaULL);
	CAN(hints->ep_attr->mem_tag_format = 0xffULL);

	/* sizes */
	CAN(hints->tx_attr->size = 1 << 20);
	CANNOT(hints->tx_attr->size = (1 << 20) + 1);
	CAN(hints->rx_attr->size = 1 << 20);
	CANNOT(hints->rx_attr->size = (1 << 20) + 1);
	CAN(hints->tx_attr->inject_size = 4096);
	CANNOT(hints->tx_attr->inject_size = 4097);
	CAN((hints->tx_attr->iov_limit = 4, hints->rx_attr->iov_limit = 4));
	CANNOT(hints->tx_attr->iov_limit = 5);
	CANNOT(hints->rx_attr->iov_limit = 5);
	CAN(hints->ep_attr->max_msg_size = 1UL << 40);
	CAN(hints->domain_attr->cq_data_size = 8);
	CANNOT(hints->domain_attr->cq_data_size = 9);

	/* orders, flags, contexts */
	CAN(hints->tx_attr->msg_order = FI_ORDER_SAS);
	CANNOT(hints->tx_attr->msg_order = FI_ORDER_SAR);
	CANNOT(hints->tx_attr->comp_order = FI_ORDER_STRICT);
	CAN(hints->tx_attr->op_flags = FI_DELIVERY_COMPLETE | FI_COMPLETION);
	CANNOT(hints->tx_attr->op_flags = FI_MATCH_COMPLETE);
	CAN(hints->rx_attr->op_flags = FI_MULTI_RECV);
	CAN(hints->ep_attr->rx_ctx_cnt = FI_SHARED_CONTEXT);
	CANNOT(hints->ep_attr->tx_ctx_cnt = FI_SHARED_CONTEXT);
	CANNOT(hints->ep_attr->tx_ctx_cnt = 2);
	CANNOT(hints->ep_attr->protocol = FI_PROTO_RDMA_CM_IB_RC);
	CAN(hints->ep_attr->protocol = FI_PROTO_IB_RDM);
	/* endpoints that share a receive context */
	CAN(hints->domain_attr->max_ep_srx_ctx = 64);
	CANNOT(hints->domain_attr->max_ep_srx_ctx = (size_t)-1);

	/* traffic classes: code points, and labels, which are ignored */
	static const struct {
		uint32_t asked, got;
	} classes[] = {
		{ FI_TC_DSCP | 46, FI_TC_DSCP | 46 }, { FI_TC_DSCP, FI_TC_DSCP }, { FI_TC_DSCP | 63, FI_TC_DSCP | 63 },
		{ FI_TC_LOW_LATENCY, FI_TC_UNSPEC }, { FI_TC_BEST_EFFORT, FI_TC_UNSPEC },
	};
	for (size_t i = 0; i < sizeof classes / sizeof *classes; i++) {
		struct fi_info *hints = hints_of(FI_EP_RDM);
		hints->tx_attr->tclass = classes[i].asked;
		struct fi_info *info = answer(FI_VERSION(1, 17), hints);
		IS(info->tx_attr->tclass == classes[i].got && info->domain_attr->tclass == FI_TC_UNSPEC);
		fi_freeinfo(info);
		hints->tx_attr->tclass = FI_TC_UNSPEC;
		hints->domain_attr->tclass = classes[i].asked;
		info = answer(FI_VERSION(1, 17), hints);
		IS(info->tx_attr->tclass == FI_TC_UNSPEC && info->domain_attr->tclass == classes[i].got);
		fi_freeinfo(info);
		fi_freeinfo(hints);
	}
	CANNOT(hints->tx_attr->tclass = FI_TC_DSCP | 64);
	CANNOT(hints->domain_attr->tclass = FI_TC_DSCP | 64);
	/* before API 1.9 there are none */
	WITH(hints->tx_attr->tclass = FI_TC_DSCP | 64, FI_VERSION(1, 8), 1);

	/* what is returned as requested */
	for (uint32_t type = FI_AV_UNSPEC; type <= FI_AV_TABLE; type++)
		for (uint32_t progress = FI_PROGRESS_AUTO; progress <= UNIFIED; progress++)
			for (uint32_t threading = FI_THREAD_SAFE; threading <= FI_THREAD_ENDPOINT; threading++) {
				struct fi_info *hints = hints_of(FI_EP_RDM);
				hints->domain_attr->av_type = type;
				hints->domain_attr->data_progress = progress;
				hints->domain_attr->control_progress = progress;
				hints->domain_attr->threading = threading;
				struct fi_info *info = answer(FI_VERSION(1, 17), hints);
				IS(info->domain_attr->av_type == type);
				IS(info->domain_attr->data_progress == progress);
				IS(info->domain_attr->control_progress == progress);
				IS(info->domain_attr->threading == threading);
				fi_freeinfo(info);
				fi_freeinfo(hints);
			}
	CANNOT(hints->domain_attr->data_progress = UNIFIED + 1);
	CANNOT(hints->domain_attr->control_progress = UNIFIED + 1);

}

static void check_order(void)
{
	struct fi_info *hints = hints_of(FI_EP_UNSPEC), *list;
	int rdm = 0, msg = 0;

	MUST(fi_getinfo(FI_VERSION(1, 17), NULL, NULL, 0, hints, &list));
	must_be_ours(list);
	for (struct fi_info *info = list; info; info = info->next)
		if (info->ep_attr->type == FI_EP_RDM) {
			IS(!msg);
			rdm++;
		} else {
			IS(info->ep_attr->type == FI_EP_MSG);
			msg++;
		}
	IS(rdm && msg);
	fi_freeinfo(list);
	fi_freeinfo(hints);
	/* the same without any hints, among the entries of other providers */
	rdm = msg = 0;
	MUST(fi_getinfo(FI_VERSION(1, 17), NULL, NULL, 0, NULL, &list));
	for (struct fi_info *info = list; info; info = info->next) {
		if (strncmp(info->fabric_attr->prov_name, provider, strlen(provider)))
			continue;
		IS(!strcmp(info->fabric_attr->prov_name, provider));
		rdm += info->ep_attr->type == FI_EP_RDM;
		msg += info->ep_attr->type == FI_EP_MSG;
		IS(info->ep_attr->type != FI_EP_RDM || !msg);
	}
	IS(rdm && msg);
	fi_freeinfo(list);
}

static void check_objects(void)
{
	struct fi_cq_attr cq_attr = { .format = FI_CQ_FORMAT_TAGGED };
	struct fi_info *hints = hints_of(FI_EP_RDM), *info = answer(FI_VERSION(1, 17), hints);
	struct fid_fabric *fabric;
	struct fid_domain *domain, *other, *third;
	struct fid_pep *pep;
	struct fid_ep *ep;
	struct fid_cq *cq;

	MUST(fi_fabric(info->fabric_attr, &fabric, NULL));
	IS(fi_passive_ep(fabric, info, &pep, NULL) == -FI_EINVAL);
	info->domain_attr->control_progress = info->domain_attr->data_progress = UNIFIED;
	MUST(fi_domain(fabric, info, &domain, NULL));
	MUST(fi_endpoint(domain, info, &ep, NULL));
	MUST(fi_close(&ep->fid));
	MUST(fi_srx_context(domain, NULL, &ep, NULL));
	MUST(fi_close(&ep->fid));
	IS(fi_stx_context(domain, NULL, NULL, NULL) == -FI_ENOSYS);
	IS(fi_scalable_ep(domain, info, &ep, NULL) == -FI_ENOSYS);
	MUST(fi_cq_open(domain, &cq_attr, &cq, NULL));
	info->ep_attr->type = FI_EP_MSG;
	info->ep_attr->protocol = info->ep_attr->mem_tag_format = 0;
	info->ep_attr->max_msg_size = 0;
	info->ep_attr->max_order_raw_size = info->ep_attr->max_order_waw_size = info->ep_attr->max_order_war_size = 0;
	info->caps = info->tx_attr->caps = info->rx_attr->caps = FI_MSG;
	info->tx_attr->inject_size = info->tx_attr->size = info->rx_attr->size = info->tx_attr->rma_iov_limit = 0;
	info->domain_attr->cq_data_size = 0;
	MUST(fi_domain(fabric, info, &other, NULL));
	/* connected endpoints and their queues belong to a domain that was opened for them */
	IS(fi_endpoint(domain, info, &ep, NULL) == -FI_EINVAL);
	MUST(fi_endpoint(other, info, &ep, NULL));
	IS(fi_ep_bind(ep, &cq->fid, FI_TRANSMIT | FI_RECV) == -FI_EDOMAIN);
	MUST(fi_close(&ep->fid));
	MUST(fi_close(&cq->fid));
	/* more than was offered */
	info->ep_attr->type = FI_EP_RDM;
	info->caps = FI_MSG | FI_COLLECTIVE;
	IS(fi_endpoint(domain, info, &ep, NULL) == -FI_EINVAL);
	info->ep_attr->type = FI_EP_DGRAM;
	info->caps = FI_MSG;
	IS(fi_endpoint(domain, info, &ep, NULL) == -FI_EINVAL);
	IS(fi_domain(fabric, info, &third, NULL) == -FI_EINVAL);
	/* a domain of connected endpoints has no others */
	info->ep_attr->type = FI_EP_RDM;
	IS(fi_endpoint(other, info, &ep, NULL) == -FI_EINVAL);
	MUST(fi_close(&other->fid));
	MUST(fi_close(&domain->fid));
	MUST(fi_close(&fabric->fid));
	fi_freeinfo(info);
	fi_freeinfo(hints);
}

static void check_none(void)
{
	struct fi_info *list = NULL;
	int ret = fi_getinfo(FI_VERSION(1, 17), NULL, NULL, 0, NULL, &list);

	IS(!ret);
	for (struct fi_info *info = list; info; info = info->next)
		IS(strcmp(info->fabric_attr->prov_name, provider) || info->ep_attr->type == FI_EP_MSG);
	fi_freeinfo(list);
}

/* fi_cm(3), fi_getname: "The address must be in the same format as that specified using fi_info:
 * addr_format when the endpoint was created." */
static void check_passive(void)
{
	static const uint32_t formats[][2] = { { FI_SOCKADDR_IN, AF_INET }, { FI_SOCKADDR_IN6, AF_INET6 } };

	for (size_t i = 0; i < sizeof formats / sizeof *formats; i++) {
		struct fi_info *hints = hints_of(FI_EP_MSG), *info = NULL;
		struct sockaddr_storage name = { 0 };
		size_t len = sizeof name;
		struct fid_fabric *fabric;
		struct fid_pep *pep;

		hints->addr_format = formats[i][0];
		MUST(fi_getinfo(FI_VERSION(1, 17), NULL, NULL, 0, hints, &info));
		MUST(fi_fabric(info->fabric_attr, &fabric, NULL));
		free(info->src_addr);
		info->src_addr = NULL;
		info->src_addrlen = 0;
		IS(info->addr_format == formats[i][0]);
		MUST(fi_passive_ep(fabric, info, &pep, NULL));
		MUST(fi_getname(&pep->fid, &name, &len));
		IS(name.ss_family == formats[i][1]);
		MUST(fi_close(&pep->fid));
		MUST(fi_close(&fabric->fid));
		fi_freeinfo(info);
		fi_freeinfo(hints);
	}
}

static struct fi_info *first_of(struct fi_info *hints)
{
	struct fi_info *info = NULL;

	MUST(fi_getinfo(FI_VERSION(1, 17), node, NULL, FI_SOURCE, hints, &info));
	return info;
}

/* The answer to hints of this type with these open objects; NULL if there is none. */
static struct fi_info *restricted(enum fi_ep_type type, struct fid_fabric *fabric, struct fid_domain *domain)
{
	struct fi_info *hints = hints_of(type), *info = NULL;

	hints->fabric_attr->fabric = fabric;
	hints->domain_attr->domain = domain;
	int result = fi_getinfo(FI_VERSION(1, 17), node, NULL, FI_SOURCE, hints, &info);
	if (result && result != -FI_ENODATA)
		die("fi_getinfo: %d", result);
	fi_freeinfo(hints);
	return info;
}

#define BASIC (FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY)

/* A domain of an info of this type, mr_mode and caps. */
static struct fid_domain *opened(enum fi_ep_type type, int mr_mode, uint64_t caps, struct fid_fabric **fabric)
{
	struct fi_info *hints = hints_of(type);
	struct fid_domain *domain;

	hints->domain_attr->mr_mode = mr_mode;
	hints->caps = caps;
	struct fi_info *info = first_of(hints);
	IS(info->domain_attr->mr_mode == mr_mode);
	MUST(fi_fabric(info->fabric_attr, fabric, NULL));
	MUST(fi_domain(*fabric, info, &domain, NULL));
	fi_freeinfo(info);
	fi_freeinfo(hints);
	return domain;
}

/* An open domain has one mr_mode. Hints that name the domain and offer these bits have an answer, also if without the
 * domain the answer would have another mr_mode. */
static void check_opened_mode(void)
{
	static const struct {
		enum fi_ep_type type;
		int mr_mode, offered;
		uint64_t caps, asked;
	} cases[] = {
		/* messages alone need no bit */
		{ FI_EP_RDM, BASIC, BASIC, FI_TAGGED | FI_RMA, FI_TAGGED },
		{ FI_EP_MSG, FI_MR_VIRT_ADDR | FI_MR_PROV_KEY, BASIC | FI_MR_LOCAL | FI_MR_RAW, FI_RMA, FI_RMA },
	};
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		struct fi_info *hints = hints_of(cases[i].type), *info = NULL;
		struct fid_fabric *fabric;
		struct fid_domain *domain = opened(cases[i].type, cases[i].mr_mode, cases[i].caps, &fabric);
		struct fid_ep *ep;

		hints->caps = cases[i].asked;
		hints->domain_attr->mr_mode = cases[i].offered;
		info = first_of(hints);
		IS(info->domain_attr->mr_mode != cases[i].mr_mode && !info->domain_attr->domain);
		fi_freeinfo(info);
		hints->domain_attr->domain = domain;
		info = first_of(hints);
		IS(info->domain_attr->mr_mode == cases[i].mr_mode && info->domain_attr->domain == domain);
		MUST(fi_endpoint(domain, info, &ep, NULL));
		MUST(fi_close(&ep->fid));
		fi_freeinfo(info);
		/* a bit of the domain that the hints do not offer */
		hints->domain_attr->mr_mode &= ~FI_MR_PROV_KEY;
		info = NULL;
		IS(fi_getinfo(FI_VERSION(1, 17), node, NULL, FI_SOURCE, hints, &info) == -FI_ENODATA);
		hints->domain_attr->domain = NULL;
		MUST(fi_close(&domain->fid));
		MUST(fi_close(&fabric->fid));
		fi_freeinfo(hints);
	}
}

static void set_key(struct fi_info *hints, const char *key)
{
	hints->domain_attr->auth_key = (uint8_t *)strdup(key);
	hints->domain_attr->auth_key_size = strlen(key);
}

/* Hints that request something that an open domain does not have: it is in no answer. */
static void check_opened_terms(void)
{
	static const struct {
		uint32_t protocol;
		uint64_t caps;
		const char *key;
		uint32_t tclass;
	} cases[] = {
		{ FI_PROTO_RDMA_CM_IB_XRC, FI_MSG, NULL, FI_TC_UNSPEC },
		{ FI_PROTO_UNSPEC, FI_RMA | FI_RMA_EVENT, NULL, FI_TC_UNSPEC },
		{ FI_PROTO_UNSPEC, FI_RMA, "another", FI_TC_UNSPEC },
		{ FI_PROTO_UNSPEC, FI_RMA, NULL, FI_TC_DSCP | 46 },
	};
	struct fid_fabric *fabric;
	struct fid_domain *domain = opened(FI_EP_MSG, BASIC, FI_MSG | FI_RMA, &fabric);

	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		struct fi_info *hints = hints_of(FI_EP_MSG), *info = NULL;

		hints->caps = FI_MSG | FI_RMA;
		hints->domain_attr->mr_mode = BASIC;
		info = first_of(hints);
		IS(info->domain_attr->domain == domain);
		fi_freeinfo(info);
		hints->caps = cases[i].caps;
		hints->ep_attr->protocol = cases[i].protocol;
		if (cases[i].protocol == FI_PROTO_RDMA_CM_IB_XRC)
			hints->ep_attr->rx_ctx_cnt = FI_SHARED_CONTEXT;
		hints->domain_attr->tclass = cases[i].tclass;
		if (cases[i].key)
			set_key(hints, cases[i].key);
		info = first_of(hints);
		for (const struct fi_info *each = info; each; each = each->next)
			IS(each->fabric_attr->fabric == fabric && !each->domain_attr->domain);
		fi_freeinfo(info);
		info = NULL;
		hints->domain_attr->domain = domain;
		IS(fi_getinfo(FI_VERSION(1, 17), node, NULL, FI_SOURCE, hints, &info) == -FI_ENODATA);
		hints->domain_attr->domain = NULL;
		fi_freeinfo(hints);
	}
	MUST(fi_close(&domain->fid));
	MUST(fi_close(&fabric->fid));
}

/* An endpoint of an entry without an authorization key has none, and so the entry names no domain with one. Hints may
 * name that domain. */
static void check_opened_key(void)
{
	struct fi_info *hints = hints_of(FI_EP_RDM), *none = hints_of(FI_EP_RDM), *info;
	struct fid_domain *domain;
	struct fid_fabric *fabric;

	set_key(hints, "its own");
	info = first_of(hints);
	MUST(fi_fabric(info->fabric_attr, &fabric, NULL));
	MUST(fi_domain(fabric, info, &domain, NULL));
	fi_freeinfo(info);
	info = first_of(hints);
	IS(info->domain_attr->domain == domain);
	fi_freeinfo(info);
	info = first_of(none);
	for (const struct fi_info *each = info; each; each = each->next)
		IS(each->fabric_attr->fabric == fabric && !each->domain_attr->domain);
	fi_freeinfo(info);
	none->domain_attr->domain = domain;
	info = first_of(none);
	IS(info->domain_attr->domain == domain);
	fi_freeinfo(info);
	none->domain_attr->domain = NULL;
	MUST(fi_close(&domain->fid));
	MUST(fi_close(&fabric->fid));
	fi_freeinfo(none);
	fi_freeinfo(hints);
}

/* The address vectors of a domain read addresses of its format. A domain that does not read those of an entry is not in
 * it. */
static void check_opened_format(void)
{
	static const struct {
		uint32_t domain, entry, unspecified;
		int reads;
	} cases[] = {
		{ FI_ADDR_STR, FI_SOCKADDR_IN, FI_ADDR_STR, 0 },
		{ FI_SOCKADDR_IN, FI_ADDR_STR, FI_SOCKADDR_IN, 0 },
		{ FI_SOCKADDR, FI_ADDR_STR, FI_SOCKADDR_IN, 0 },
		{ FI_SOCKADDR, FI_SOCKADDR_IN, FI_SOCKADDR_IN, 1 },
	};
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		struct fi_info *hints = hints_of(FI_EP_RDM), *info;
		struct fid_domain *domain;
		struct fid_fabric *fabric;
		int result;

		hints->addr_format = cases[i].domain;
		info = first_of(hints);
		MUST(fi_fabric(info->fabric_attr, &fabric, NULL));
		MUST(fi_domain(fabric, info, &domain, NULL));
		fi_freeinfo(info);
		hints->addr_format = cases[i].entry;
		info = first_of(hints);
		IS(info->addr_format == cases[i].entry && info->fabric_attr->fabric == fabric);
		IS(info->domain_attr->domain == (cases[i].reads ? domain : NULL));
		fi_freeinfo(info);
		hints->domain_attr->domain = domain;
		info = NULL;
		result = fi_getinfo(FI_VERSION(1, 17), node, NULL, FI_SOURCE, hints, &info);
		IS(result == (cases[i].reads ? 0 : -FI_ENODATA));
		fi_freeinfo(info);
		hints->addr_format = FI_FORMAT_UNSPEC;
		info = first_of(hints);
		IS(info->domain_attr->domain == domain && info->addr_format == cases[i].unspecified);
		fi_freeinfo(info);
		hints->domain_attr->domain = NULL;
		MUST(fi_close(&domain->fid));
		MUST(fi_close(&fabric->fid));
		fi_freeinfo(hints);
	}
}

/* fi_domain(3), domain: "On input to fi_getinfo, a user may set this to an opened domain instance to restrict output to
 * the given domain. On output from fi_getinfo, if no domain was specified, but the user has an opened instance of the
 * named domain, this will reference the first opened instance." fi_fabric(3) has the same for fabrics. */
static void check_opened(void)
{
	struct fi_info *hints = hints_of(FI_EP_RDM), *info = answer(FI_VERSION(1, 17), hints), *again, *foreign = NULL;
	struct fid_domain *domain, *second, *other_domain;
	struct fid_fabric *fabric, *other_fabric;
	struct fid_ep *ep;

	MUST(fi_fabric(info->fabric_attr, &fabric, NULL));
	again = first_of(hints);
	IS(again->fabric_attr->fabric == fabric && !again->domain_attr->domain);
	fi_freeinfo(again);
	MUST(fi_domain(fabric, info, &domain, NULL));
	MUST(fi_domain(fabric, info, &second, NULL));
	again = first_of(hints);
	IS(again->fabric_attr->fabric == fabric && again->domain_attr->domain == domain);
	MUST(fi_endpoint(again->domain_attr->domain, again, &ep, NULL));
	MUST(fi_close(&ep->fid));
	fi_freeinfo(again);
	/* those that hints name, in each entry of the answer */
	again = restricted(FI_EP_RDM, fabric, second);
	IS(again);
	for (struct fi_info *each = again; each; each = each->next) {
		IS(each->fabric_attr->fabric == fabric && each->domain_attr->domain == second);
		IS(!strcmp(each->domain_attr->name, info->domain_attr->name));
		MUST(fi_endpoint(second, each, &ep, NULL));
		MUST(fi_close(&ep->fid));
	}
	fi_freeinfo(again);
	again = restricted(FI_EP_UNSPEC, NULL, second);
	for (struct fi_info *each = again; each; each = each->next)
		IS(each->ep_attr->type == FI_EP_RDM);
	fi_freeinfo(again);
	/* the domain has other endpoints, and another mr_mode */
	IS(!restricted(FI_EP_MSG, NULL, domain));
	hints->domain_attr->domain = domain;
	hints->domain_attr->mr_mode = FI_MR_BASIC;
	again = NULL;
	IS(fi_getinfo(FI_VERSION(1, 17), node, NULL, FI_SOURCE, hints, &again) == -FI_ENODATA);
	hints->domain_attr->domain = NULL;
	again = first_of(hints);
	IS(again->domain_attr->mr_mode != info->domain_attr->mr_mode && !again->domain_attr->domain);
	fi_freeinfo(again);
	hints->domain_attr->mr_mode = 0;
	/* those of another provider */
	struct fi_info *any = fi_allocinfo();
	any->fabric_attr->prov_name = strdup("tcp");
	MUST(fi_getinfo(FI_VERSION(1, 17), "127.0.0.1", NULL, FI_SOURCE, any, &foreign));
	MUST(fi_fabric(foreign->fabric_attr, &other_fabric, NULL));
	MUST(fi_domain(other_fabric, foreign, &other_domain, NULL));
	IS(!restricted(FI_EP_RDM, NULL, other_domain));
	IS(!restricted(FI_EP_RDM, other_fabric, NULL));
	MUST(fi_close(&other_domain->fid));
	MUST(fi_close(&other_fabric->fid));
	fi_freeinfo(foreign);
	fi_freeinfo(any);
	/* the next one, and none */
	MUST(fi_close(&domain->fid));
	again = first_of(hints);
	IS(again->domain_attr->domain == second);
	fi_freeinfo(again);
	IS(!restricted(FI_EP_RDM, NULL, domain));
	MUST(fi_close(&second->fid));
	MUST(fi_close(&fabric->fid));
	again = first_of(hints);
	IS(!again->fabric_attr->fabric && !again->domain_attr->domain);
	fi_freeinfo(again);
	fi_freeinfo(info);
	fi_freeinfo(hints);
	check_opened_mode();
	check_opened_terms();
	check_opened_key();
	check_opened_format();
}

int main(int argc, char **argv)
{
	static const struct {
		const char *name;
		void (*check)(void);
	} modes[] = {
		{ "attributes", check_attributes }, { "hints", check_hints }, { "order", check_order },
		{ "objects", check_objects },       { "none", check_none },
		{ "passive", check_passive },       { "opened", check_opened },
	};

	if (argc != 4)
		die("usage: offered MODE PROV NODE");
	role = argv[1];
	provider = argv[2];
	node = argv[3];
	for (size_t i = 0; i < sizeof modes / sizeof *modes; i++)
		if (!strcmp(argv[1], modes[i].name)) {
			modes[i].check();
			return 0;
		}
	die("no such mode");
}
