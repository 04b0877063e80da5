/* Passive endpoints, and the addresses of active ones, from fi_cm(3) and fi_endpoint(3). All endpoints are in one
 * process.
 *
 *   passive MODE PROV NODE
 *
 * setname: fi_setname with the port that the endpoint has, and with one that another has.
 *
 * reserved: an endpoint that is opened with a passive one (fi_info.handle) has its address at each
 * time, and connects from it.
 *
 * renamed: the same; then fi_setname gives it another address.
 *
 * active: fi_setname of an active endpoint assigns the address, before it is enabled.
 *
 * refused: fi_passive_ep with an fi_info that no device can satisfy.
 *
 * options: fi_getopt and fi_setopt of passive endpoints, of shared receive contexts, and of an endpoint with atomics.
 *
 * older: fi_passive_ep with an fi_info of the sizes of libfabric 1.17, in front of memory that cannot be read.
 *
 * Exits with 0, or prints the failure. Needs only libfabric 1.17. */
#include "end.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/mman.h>

#define IS(condition)                                                                                                \
	do {                                                                                                         \
		if (!(condition))                                                                                    \
			die("line %d: not so: %s", __LINE__, #condition);                                            \
	} while (0)

#define RETURNS(call, expected)                                                                                      \
	do {                                                                                                         \
		long result = (long)(call), want = (long)(expected);                                                 \
		if (result != want)                                                                                  \
			die("line %d: %s: %ld (%s)", __LINE__, #call, result, fi_strerror((int)-result));            \
	} while (0)

static struct end server, client;

static void open_ends(void)
{
	server.info = getinfo("0", FI_SOURCE);
	open_fabric(&server);
	client.fabric = server.fabric;
	client.eq = server.eq;
	open_domain(&server, server.info);
	client.info = getinfo("0", FI_SOURCE);
	open_domain(&client, client.info);
}

static struct sockaddr_in at(const char *host, uint16_t port)
{
	struct sockaddr_in address = { .sin_family = AF_INET, .sin_port = htons(port) };

	IS(inet_pton(AF_INET, host, &address.sin_addr) == 1);
	return address;
}

static struct sockaddr_in name_of(struct fid *fid)
{
	struct sockaddr_in name = { 0 };
	size_t length = sizeof name;

	MUST(fi_getname(fid, &name, &length));
	IS(name.sin_family == AF_INET && name.sin_port);
	return name;
}

static void is_named(struct fid *fid, struct sockaddr_in want)
{
	struct sockaddr_in name = name_of(fid);

	IS(name.sin_port == want.sin_port && name.sin_addr.s_addr == want.sin_addr.s_addr);
}

/* The result of fi_passive_ep at this address. */
static int open_at(struct sockaddr_in address, struct fid_pep **pep)
{
	struct fi_info *info = fi_dupinfo(server.info);
	int result;

	IS(info->src_addrlen == sizeof address);
	memcpy(info->src_addr, &address, sizeof address);
	result = fi_passive_ep(server.fabric, info, pep, NULL);
	fi_freeinfo(info);
	return result;
}

static int set_name(struct fid *fid, struct sockaddr_in address) { return fi_setname(fid, &address, sizeof address); }

/* Connects the client to the listener at this address, and sends it a message. */
static void connect_to(struct sockaddr_in address)
{
	struct fi_info *request;

	MUST(fi_connect(client.ep, &address, NULL, 0));
	expect(&server, FI_CONNREQ, &request);
	bind_endpoint(&server, request);
	MUST(fi_accept(server.ep, NULL, 0));
	expect(&server, FI_CONNECTED, NULL);
	expect(&server, FI_CONNECTED, NULL);
	MUST(fi_recv(server.ep, server.memory, 8, fi_mr_desc(server.mr), 0, NULL));
	MUST(fi_send(client.ep, client.memory, 8, fi_mr_desc(client.mr), 0, NULL));
	if (completion(&server, SETUP_SECONDS) || completion(&client, SETUP_SECONDS))
		die("a message in error");
	fi_freeinfo(request);
}

static void disconnect(void)
{
	MUST(fi_close(&client.ep->fid));
	expect(&server, FI_SHUTDOWN, NULL);
	MUST(fi_close(&server.ep->fid));
}

/* `bound`: the passive endpoint has its event queue before. */
static void rename_one(int bound)
{
	struct fid_pep *pep, *other;
	struct sockaddr_in own, taken;

	MUST(open_at(at(node, 0), &pep));
	if (bound)
		MUST(fi_pep_bind(pep, &server.eq->fid, 0));
	own = name_of(&pep->fid);
	/* the same address, the wildcard of the same port, and the first one again */
	RETURNS(set_name(&pep->fid, own), 0);
	is_named(&pep->fid, own);
	RETURNS(set_name(&pep->fid, at("0.0.0.0", ntohs(own.sin_port))), 0);
	is_named(&pep->fid, at("0.0.0.0", ntohs(own.sin_port)));
	RETURNS(set_name(&pep->fid, own), 0);
	is_named(&pep->fid, own);
	/* an address of another endpoint, and of no device: the old one stays */
	MUST(open_at(at(node, 0), &other));
	taken = name_of(&other->fid);
	RETURNS(set_name(&pep->fid, taken), -FI_EADDRINUSE);
	is_named(&pep->fid, own);
	IS(set_name(&pep->fid, at("198.51.100.7", ntohs(own.sin_port))) != 0);
	is_named(&pep->fid, own);
	RETURNS(open_at(own, &other), -FI_EADDRINUSE);
	if (!bound)
		MUST(fi_pep_bind(pep, &server.eq->fid, 0));
	MUST(fi_listen(pep));
	RETURNS(set_name(&pep->fid, own), -FI_EOPBADSTATE);
	bind_endpoint(&client, client.info);
	connect_to(own);
	disconnect();
	MUST(fi_close(&pep->fid));
	MUST(fi_close(&other->fid));
}

static void setname(void)
{
	open_ends();
	rename_one(0);
	rename_one(1);
}

/* An endpoint that is opened with a passive one at this address, which has an event queue if `bound`.
 * It is not enabled. Stores its address. */
static void open_reserved(const char *host, int bound, struct sockaddr_in *own)
{
	struct fid_pep *pep, *other;
	struct fi_info *info = fi_dupinfo(client.info);

	MUST(open_at(at(host, 0), &pep));
	if (bound)
		MUST(fi_pep_bind(pep, &server.eq->fid, 0));
	*own = name_of(&pep->fid);
	RETURNS(open_at(*own, &other), -FI_EADDRINUSE);
	info->handle = &pep->fid;
	MUST(fi_endpoint(client.domain, info, &client.ep, NULL));
	info->handle = NULL;
	fi_freeinfo(info);
	RETURNS(open_at(*own, &other), -FI_EADDRINUSE);
	IS(fi_listen(pep) != 0);
	MUST(fi_close(&pep->fid));
	RETURNS(open_at(*own, &other), -FI_EADDRINUSE);
	is_named(&client.ep->fid, *own);
}

static void bind_client(void)
{
	MUST(fi_ep_bind(client.ep, &client.eq->fid, 0));
	MUST(fi_ep_bind(client.ep, &client.cq->fid, FI_TRANSMIT | FI_RECV));
}

static struct fid_pep *listener(struct sockaddr_in *address)
{
	struct fid_pep *pep;

	MUST(open_at(at(node, 0), &pep));
	MUST(fi_pep_bind(pep, &server.eq->fid, 0));
	MUST(fi_listen(pep));
	*address = name_of(&pep->fid);
	return pep;
}

static void reserved(void)
{
	struct sockaddr_in address, own;
	struct fid_pep *pep, *other;

	open_ends();
	pep = listener(&address);
	for (int i = 0; i < 4; i++) {
		const char *host = i & 1 ? "0.0.0.0" : node;

		open_reserved(host, i & 2, &own);
		bind_client();
		RETURNS(open_at(own, &other), -FI_EADDRINUSE);
		MUST(fi_enable(client.ep));
		RETURNS(open_at(own, &other), -FI_EADDRINUSE);
		connect_to(address);
		is_named(&client.ep->fid, at(node, ntohs(own.sin_port)));
		disconnect();
		/* free again, also after an endpoint that was never enabled */
		for (int n = 0; n < 2; n++) {
			MUST(open_at(own, &other));
			MUST(fi_close(&other->fid));
			if (n == 0) {
				open_reserved(host, i & 2, &own);
				MUST(fi_close(&client.ep->fid));
			}
		}
	}
	MUST(fi_close(&pep->fid));
}

static void renamed(void)
{
	struct sockaddr_in address, own, name;
	struct fid_pep *pep, *other;

	open_ends();
	pep = listener(&address);
	for (int late = 0; late < 2; late++) {
		open_reserved(node, 0, &own);
		if (!late)
			bind_client();
		MUST(open_at(at(node, 0), &other));
		name = name_of(&other->fid);
		MUST(fi_close(&other->fid));
		MUST(set_name(&client.ep->fid, name));
		is_named(&client.ep->fid, name);
		/* the earlier address is free */
		MUST(open_at(own, &other));
		MUST(fi_close(&other->fid));
		if (late)
			bind_client();
		MUST(fi_enable(client.ep));
		connect_to(address);
		is_named(&client.ep->fid, name);
		disconnect();
	}
	MUST(fi_close(&pep->fid));
}

/* fi_cm(3), fi_setname: "If no service address is specified and a service address has not yet been assigned to the
 * endpoint, then the provider will allocate a service address and assign it to the endpoint. [...] If an address cannot
 * be assigned, [...] an appropriate fabric error number is returned." `bound`: the endpoint has its event queue before. */
static void name_active(int bound, struct sockaddr_in to)
{
	struct sockaddr_in own, taken, none = { 0 };
	size_t length = sizeof none;
	struct fid_pep *pep, *other;
	int foreign;

	MUST(fi_endpoint(client.domain, client.info, &client.ep, NULL));
	if (bound)
		bind_client();
	/* an address of no host: that of a kernel's device is -FI_ENODEV */
	foreign = set_name(&client.ep->fid, at("203.0.113.1", 0));
	IS(foreign == -FI_EADDRNOTAVAIL || foreign == -FI_ENODEV);
	RETURNS(fi_getname(&client.ep->fid, &none, &length), -FI_EOPBADSTATE);
	/* an allocated port, which stays, and which nothing else gets */
	RETURNS(set_name(&client.ep->fid, at(node, 0)), 0);
	own = name_of(&client.ep->fid);
	is_named(&client.ep->fid, at(node, ntohs(own.sin_port)));
	RETURNS(set_name(&client.ep->fid, at(node, 0)), 0);
	is_named(&client.ep->fid, own);
	RETURNS(open_at(own, &other), -FI_EADDRINUSE);
	/* a port in use: the endpoint keeps its own */
	MUST(open_at(at(node, 0), &pep));
	taken = name_of(&pep->fid);
	RETURNS(set_name(&client.ep->fid, taken), -FI_EADDRINUSE);
	IS(set_name(&client.ep->fid, at("203.0.113.1", ntohs(own.sin_port))) == foreign);
	is_named(&client.ep->fid, own);
	RETURNS(open_at(own, &other), -FI_EADDRINUSE);
	/* the wildcard address, with the port that the endpoint has, and back */
	RETURNS(set_name(&client.ep->fid, at("0.0.0.0", 0)), 0);
	is_named(&client.ep->fid, at("0.0.0.0", ntohs(own.sin_port)));
	RETURNS(set_name(&client.ep->fid, own), 0);
	/* another port: the earlier one is free */
	MUST(fi_close(&pep->fid));
	RETURNS(set_name(&client.ep->fid, taken), 0);
	is_named(&client.ep->fid, taken);
	MUST(open_at(own, &other));
	MUST(fi_close(&other->fid));
	/* fi_close without fi_enable frees the port */
	MUST(fi_close(&client.ep->fid));
	MUST(open_at(taken, &other));
	MUST(fi_close(&other->fid));
	/* fi_enable and fi_connect keep the address */
	MUST(fi_endpoint(client.domain, client.info, &client.ep, NULL));
	if (bound)
		bind_client();
	RETURNS(set_name(&client.ep->fid, at(node, 0)), 0);
	own = name_of(&client.ep->fid);
	if (!bound)
		bind_client();
	is_named(&client.ep->fid, own);
	/* a call that is refused does not enable the endpoint */
	RETURNS(fi_connect(client.ep, NULL, NULL, 0), -FI_EINVAL);
	RETURNS(set_name(&client.ep->fid, own), 0);
	is_named(&client.ep->fid, own);
	MUST(fi_enable(client.ep));
	is_named(&client.ep->fid, own);
	RETURNS(set_name(&client.ep->fid, at(node, 0)), -FI_EOPBADSTATE);
	connect_to(to);
	is_named(&client.ep->fid, own);
	disconnect();
	/* from the wildcard address: the route chooses one with that port */
	MUST(fi_endpoint(client.domain, client.info, &client.ep, NULL));
	if (bound)
		bind_client();
	RETURNS(set_name(&client.ep->fid, at("0.0.0.0", 0)), 0);
	own = name_of(&client.ep->fid);
	if (!bound)
		bind_client();
	MUST(fi_enable(client.ep));
	connect_to(to);
	is_named(&client.ep->fid, at(node, ntohs(own.sin_port)));
	disconnect();
}

static void active(void)
{
	struct sockaddr_in address;
	struct fid_pep *pep;

	open_ends();
	pep = listener(&address);
	name_active(0, address);
	name_active(1, address);
	MUST(fi_close(&pep->fid));
}

static void refused(void)
{
	struct fi_info *hints = fi_allocinfo(), *info;
	struct fid_pep *pep;

	server.info = getinfo("0", FI_SOURCE);
	open_fabric(&server);
	server.info->caps |= FI_COLLECTIVE;
	RETURNS(fi_passive_ep(server.fabric, server.info, &pep, NULL), -FI_EINVAL);
	server.info->caps &= ~FI_COLLECTIVE;
	MUST(fi_passive_ep(server.fabric, server.info, &pep, NULL));
	MUST(fi_close(&pep->fid));
	/* endpoints on XRC have no receives of their own */
	hints->ep_attr->type = FI_EP_MSG;
	hints->ep_attr->protocol = FI_PROTO_RDMA_CM_IB_XRC;
	hints->ep_attr->rx_ctx_cnt = FI_SHARED_CONTEXT;
	hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
	hints->fabric_attr->prov_name = strdup(provider);
	MUST(fi_getinfo(FI_VERSION(1, 17), node, "0", FI_SOURCE, hints, &info));
	MUST(fi_passive_ep(server.fabric, info, &pep, NULL));
	MUST(fi_close(&pep->fid));
	info->ep_attr->rx_ctx_cnt = 1;
	RETURNS(fi_passive_ep(server.fabric, info, &pep, NULL), -FI_EINVAL);
}

/* fi_endpoint(3): FI_OPT_CM_DATA_SIZE is read only; of a passive endpoint it is "the maximum size of the data that may be
 * present as part of a connection request event", and other providers send 55 bytes. FI_OPT_INJECT_ATOMIC_SIZE "must be
 * less than or equal to tx_attr->inject_size". An option that there is not is -FI_ENOPROTOOPT. */
static void options(void)
{
	enum { INJECT_ATOMIC_SIZE = 19 /* FI_OPT_INJECT_ATOMIC_SIZE of libfabric 2.0 */, NO_OPTION = 9999 };
	struct fi_info *hints = fi_allocinfo(), *info;
	size_t value = 0, size = sizeof value;
	struct fid_pep *pep;
	struct fid_ep *srx;

	open_ends();
	MUST(open_at(at(node, 0), &pep));
	RETURNS(fi_getopt(&pep->fid, FI_OPT_ENDPOINT, FI_OPT_CM_DATA_SIZE, &value, &size), 0);
	IS(value == 55 && size == sizeof value);
	RETURNS(fi_getopt(&pep->fid, FI_OPT_ENDPOINT, NO_OPTION, &value, &size), -FI_ENOPROTOOPT);
	RETURNS(fi_setopt(&pep->fid, FI_OPT_ENDPOINT, FI_OPT_CM_DATA_SIZE, &value, sizeof value), -FI_ENOPROTOOPT);
	RETURNS(fi_setopt(&pep->fid, FI_OPT_ENDPOINT, NO_OPTION, &value, sizeof value), -FI_ENOPROTOOPT);
	MUST(fi_close(&pep->fid));
	MUST(fi_srx_context(server.domain, NULL, &srx, NULL));
	RETURNS(fi_getopt(&srx->fid, FI_OPT_ENDPOINT, FI_OPT_MIN_MULTI_RECV, &value, &size), -FI_ENOPROTOOPT);
	RETURNS(fi_setopt(&srx->fid, FI_OPT_ENDPOINT, FI_OPT_MIN_MULTI_RECV, &value, sizeof value), -FI_ENOPROTOOPT);
	MUST(fi_close(&srx->fid));
	hints->caps = FI_MSG | FI_ATOMIC;
	hints->ep_attr->type = FI_EP_MSG;
	hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
	hints->fabric_attr->prov_name = strdup(provider);
	MUST(fi_getinfo(FI_VERSION(1, 17), node, "0", FI_SOURCE, hints, &info));
	MUST(fi_endpoint(client.domain, info, &client.ep, NULL));
	MUST(fi_getopt(&client.ep->fid, FI_OPT_ENDPOINT, INJECT_ATOMIC_SIZE, &value, &size));
	IS(value <= 8 && value <= info->tx_attr->inject_size);
	IS(value == 8 || value == info->tx_attr->inject_size);
	MUST(fi_close(&client.ep->fid));
}

/* The domain attributes had 192 bytes before 1.20. */
static void older(void)
{
	enum { OLD = 192 };
	struct fi_domain_attr *whole;
	size_t page = (size_t)sysconf(_SC_PAGESIZE);
	uint8_t *pages = mmap(NULL, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	struct sockaddr_in address;
	struct fid_pep *pep;

	IS(pages != MAP_FAILED && !mprotect(pages + page, page, PROT_NONE));
	open_ends();
	whole = server.info->domain_attr;
	server.info->domain_attr = memcpy(pages + page - OLD, whole, OLD);
	MUST(fi_passive_ep(server.fabric, server.info, &pep, NULL));
	server.info->domain_attr = whole;
	MUST(fi_pep_bind(pep, &server.eq->fid, 0));
	MUST(fi_listen(pep));
	address = name_of(&pep->fid);
	bind_endpoint(&client, client.info);
	connect_to(address);
	disconnect();
	MUST(fi_close(&pep->fid));
	munmap(pages, 2 * page);
}

int main(int argc, char **argv)
{
	static const struct {
		const char *name;
		void (*run)(void);
	} modes[] = { { "setname", setname }, { "reserved", reserved }, { "renamed", renamed }, { "active", active }, { "refused", refused },
		    { "options", options }, { "older", older } };

	if (argc != 4)
		die("usage: passive MODE PROV NODE");
	role = argv[1];
	provider = argv[2];
	node = argv[3];
	alarm(LIMIT_SECONDS);
	for (size_t i = 0; i < sizeof modes / sizeof *modes; i++)
		if (!strcmp(argv[1], modes[i].name)) {
			modes[i].run();
			return 0;
		}
	die("no such mode");
}
