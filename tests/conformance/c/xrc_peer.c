/* Connected endpoints on XRC that share a receive context, in two processes which may have different
 * providers:
 *
 *   xrc_peer server PROV DOMAIN ADDRESS PORT
 *   xrc_peer client PROV DOMAIN ADDRESS PORT
 *
 * The client has three endpoints. The server sends back each message; its first message on each
 * endpoint has the address and the key of its memory, which the client writes and reads. The client
 * has a passive endpoint too: libfabric's provider `verbs` takes reciprocal requests there. Ends
 * with 0, or says what went wrong. Plain libfabric 1.17. */
#define MEMORY (1UL << 20)
#include "end.h"

enum { EPS = 3, SLOTS = 16, LONGEST = 65536, ROUNDS = 3, AREA = 131072 };

static const size_t sizes[] = { 1, 8, 64, 65, 4096, 40001, 65536 };
enum { SIZES = sizeof sizes / sizeof *sizes };

/* the context of a send; libfabric's provider takes -1 for one without completion */
#define SENT ((void *)0x5e47)

static const char *domain_name, *address, *port;
static struct end end;
static struct fid_pep *pep;
static struct fid_ep *eps[EPS];
static uint8_t *buffers;
static struct fid_mr *buffers_mr;

#define IS(condition)                                                                                                \
	do {                                                                                                         \
		if (!(condition))                                                                                    \
			die("line %d: not so: %s", __LINE__, #condition);                                            \
	} while (0)

static struct fi_info *info_of(const char *service, uint64_t flags)
{
	struct fi_info *hints = fi_allocinfo(), *info;

	hints->caps = FI_MSG | FI_RMA;
	hints->mode = ~0ULL;
	hints->ep_attr->type = FI_EP_MSG;
	hints->ep_attr->protocol = FI_PROTO_RDMA_CM_IB_XRC;
	hints->ep_attr->rx_ctx_cnt = FI_SHARED_CONTEXT;
	hints->domain_attr->name = strdup(domain_name);
	hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
	hints->fabric_attr->prov_name = strdup(provider);
	hints->addr_format = FI_SOCKADDR_IN;
	MUST(fi_getinfo(FI_VERSION(1, 17), address, service, flags, hints, &info));
	IS(info->ep_attr->protocol == FI_PROTO_RDMA_CM_IB_XRC);
	fi_freeinfo(hints);
	return info;
}

static void post(size_t slot)
{
	MUST(fi_recv(end.srx, buffers + slot * LONGEST, LONGEST, fi_mr_desc(buffers_mr), 0, (void *)slot));
}

static void open_all(struct fi_info *listens)
{
	struct fi_cq_attr attr = { .format = FI_CQ_FORMAT_MSG, .wait_obj = FI_WAIT_NONE, .size = 8192 };

	MUST(fi_passive_ep(end.fabric, listens, &pep, NULL));
	MUST(fi_pep_bind(pep, &end.eq->fid, 0));
	MUST(fi_listen(pep));
	MUST(fi_domain(end.fabric, end.info, &end.domain, NULL));
	MUST(fi_cq_open(end.domain, &attr, &end.cq, NULL));
	MUST(fi_srx_context(end.domain, end.info->rx_attr, &end.srx, NULL));
	end.memory = aligned_alloc(4096, MEMORY);
	buffers = aligned_alloc(4096, SLOTS * LONGEST);
	MUST(fi_mr_reg(end.domain, end.memory, MEMORY, FI_SEND | FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE, 0,
		       1, 0, &end.mr, NULL));
	MUST(fi_mr_reg(end.domain, buffers, SLOTS * LONGEST, FI_RECV | FI_SEND, 0, 2, 0, &buffers_mr, NULL));
}

static struct fid_ep *endpoint(struct fi_info *info)
{
	struct fid_ep *ep;

	MUST(fi_endpoint(end.domain, info, &ep, NULL));
	MUST(fi_ep_bind(ep, &end.eq->fid, 0));
	MUST(fi_ep_bind(ep, &end.cq->fid, FI_TRANSMIT | FI_RECV));
	MUST(fi_ep_bind(ep, &end.srx->fid, 0));
	MUST(fi_enable(ep));
	return ep;
}

/* The next completion. */
static struct fi_cq_msg_entry next(void)
{
	struct fi_cq_msg_entry entry;
	struct fi_cq_err_entry error = { 0 };
	double limit = now() + 20;
	ssize_t got;

	while ((got = fi_cq_read(end.cq, &entry, 1)) == -FI_EAGAIN)
		if (now() > limit)
			die("no completion");
	if (got == -FI_EAVAIL) {
		MUST(fi_cq_readerr(end.cq, &error, 0));
		die("a completion in error: %s", fi_strerror(error.err));
	}
	MUST(got);
	return entry;
}

static void send_on(struct fid_ep *ep, const void *data, size_t len, void *desc)
{
	ssize_t sent;
	double limit = now() + 20;

	/* an accepting endpoint may be connected a little later */
	while ((sent = fi_send(ep, data, len, desc, 0, SENT)) == -FI_EAGAIN)
		if (now() > limit)
			die("no room");
	MUST(sent);
}

/* Waits for a message and for the completion of a send; returns the slot of the message. */
static size_t message(size_t *len, int sends)
{
	size_t slot = SLOTS;

	while (slot == SLOTS || sends) {
		struct fi_cq_msg_entry entry = next();

		if (entry.op_context == SENT) {
			IS(sends-- > 0);
			continue;
		}
		IS(slot == SLOTS);
		slot = (size_t)entry.op_context;
		*len = entry.len;
		IS(slot < SLOTS);
	}
	return slot;
}

static void server(void)
{
	struct remote mine;

	end.info = info_of(port, FI_SOURCE);
	open_fabric(&end);
	open_all(end.info);
	for (int connected = 0, requested = 0; connected < EPS;) {
		struct fi_eq_cm_entry entry;
		uint32_t kind;

		MUST(fi_eq_sread(end.eq, &kind, &entry, sizeof entry, 20000, 0));
		IS(kind == FI_CONNREQ || kind == FI_CONNECTED);
		if (kind == FI_CONNECTED) {
			connected++;
			continue;
		}
		eps[requested] = endpoint(entry.info);
		if (!requested)
			for (size_t slot = 0; slot < SLOTS; slot++)
				post(slot);
		MUST(fi_accept(eps[requested++], "yes", 4));
	}
	mine = (struct remote){ (uintptr_t)end.memory, fi_mr_key(end.mr) };
	memcpy(end.memory + MEMORY - sizeof mine, &mine, sizeof mine);
	for (int i = 0; i < EPS; i++) {
		send_on(eps[i], end.memory + MEMORY - sizeof mine, sizeof mine, fi_mr_desc(end.mr));
		IS(next().op_context == SENT);
	}
	/* the client sends one message after the other; the first byte is the number of its endpoint */
	for (int count = 0; count < EPS * ROUNDS * SIZES; count++) {
		size_t len, slot = message(&len, 0);
		uint8_t from = buffers[slot * LONGEST];

		IS(from < EPS);
		send_on(eps[from], buffers + slot * LONGEST, len, fi_mr_desc(buffers_mr));
		IS(next().op_context == SENT);
		post(slot);
	}
	/* the last message says that the client has read the memory */
	size_t len;
	message(&len, 0);
}

static void client(void)
{
	struct remote remote[EPS];
	struct fi_info *listens = info_of("0", FI_SOURCE);

	end.info = info_of(port, 0);
	open_fabric(&end);
	open_all(listens);
	for (int i = 0; i < EPS; i++) {
		eps[i] = endpoint(end.info);
		if (!i)
			for (size_t slot = 0; slot < SLOTS; slot++)
				post(slot);
		MUST(fi_connect(eps[i], end.info->dest_addr, "hello", 5));
	}
	for (int i = 0; i < EPS; i++)
		expect(&end, FI_CONNECTED, NULL);
	for (int i = 0; i < EPS; i++) {
		size_t len, slot = message(&len, 0);

		IS(len == sizeof *remote);
		memcpy(&remote[i], buffers + slot * LONGEST, len);
		post(slot);
	}
	for (int i = 0; i < EPS; i++)
		IS(remote[i].key == remote[0].key && remote[i].addr == remote[0].addr);
	for (int round = 0; round < ROUNDS; round++)
		for (int i = 0; i < EPS; i++)
			for (int s = 0; s < SIZES; s++) {
				size_t len;

				for (size_t b = 0; b < sizes[s]; b++)
					end.memory[b] = (uint8_t)(b * 7 + (size_t)(round + s));
				end.memory[0] = (uint8_t)i;
				send_on(eps[i], end.memory, sizes[s], fi_mr_desc(end.mr));
				size_t slot = message(&len, 1);
				IS(len == sizes[s] && !memcmp(buffers + slot * LONGEST, end.memory, len));
				post(slot);
			}
	for (int i = 0; i < EPS; i++) {
		uint64_t at = remote[i].addr + AREA + (uint64_t)i * LONGEST;

		memset(end.memory, i + 1, LONGEST);
		memset(end.memory + LONGEST, 0, LONGEST);
		MUST(fi_write(eps[i], end.memory, LONGEST, fi_mr_desc(end.mr), 0, at, remote[i].key, NULL));
		next();
		MUST(fi_read(eps[i], end.memory + LONGEST, LONGEST, fi_mr_desc(end.mr), 0, at, remote[i].key, NULL));
		next();
		IS(!memcmp(end.memory, end.memory + LONGEST, LONGEST));
	}
	send_on(eps[0], end.memory, 1, fi_mr_desc(end.mr));
	next();
}

int main(int argc, char **argv)
{
	if (argc != 6)
		die("usage: xrc_peer server|client PROV DOMAIN ADDRESS PORT");
	role = argv[1];
	provider = argv[2];
	domain_name = argv[3];
	address = argv[4];
	port = argv[5];
	alarm(80);
	if (!strcmp(role, "server"))
		server();
	else
		client();
	for (int i = 0; i < EPS; i++)
		MUST(fi_close(&eps[i]->fid));
	return 0;
}
