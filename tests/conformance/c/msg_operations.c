/* Operations of a connected endpoint that fail or are ended, from fi_msg(3), fi_cm(3) and
 * fi_endpoint(3). Both endpoints are in one process.
 *
 *   msg_operations MODE PROV NODE
 *
 * injected: an injected write with a wrong key is an error entry with the context of the endpoint.
 *
 * shutdown: fi_shutdown returns after the entries of the cancelled operations are written.
 *
 * closed: fi_close cancels the operations under way: their entries follow the completion that has
 * arrived. libfabric's provider ofi_rxm frees its buffers by them (fi_weft(7), Ends).
 *
 * early: the same of a receive of an endpoint that was never connected.
 *
 * more: a call that fails posts the writes that wait for further ones (FI_MORE). soft0 executes them
 * then.
 *
 * Exits with 0, or prints the failure. Needs only libfabric 1.17. */
#include "end.h"

#define CONTEXT ((void *)0xc0)

static struct end client, server;

static void open_ends(void)
{
	server.info = getinfo("0", FI_SOURCE);
	open_fabric(&server);
	client.fabric = server.fabric;
	client.eq = server.eq;
	open_domain(&server, server.info);
}

static void bind_client(struct fi_info *info)
{
	open_domain(&client, info);
	MUST(fi_endpoint(client.domain, info, &client.ep, CONTEXT));
	MUST(fi_ep_bind(client.ep, &client.eq->fid, 0));
	MUST(fi_ep_bind(client.ep, &client.cq->fid, FI_TRANSMIT | FI_RECV));
	MUST(fi_enable(client.ep));
}

static void connect_ends(void)
{
	uint64_t name[16];
	size_t length = sizeof name;
	struct fi_info *request;
	struct fid_pep *pep;

	open_ends();
	MUST(fi_passive_ep(server.fabric, server.info, &pep, NULL));
	MUST(fi_pep_bind(pep, &server.eq->fid, 0));
	MUST(fi_listen(pep));
	MUST(fi_getname(&pep->fid, name, &length));
	client.info = getinfo(NULL, 0);
	bind_client(client.info);
	MUST(fi_connect(client.ep, name, NULL, 0));
	expect(&server, FI_CONNREQ, &request);
	bind_endpoint(&server, request);
	MUST(fi_accept(server.ep, NULL, 0));
	expect(&server, FI_CONNECTED, NULL);
	expect(&server, FI_CONNECTED, NULL);
}

static void send_to(struct end *end, uintptr_t context)
{
	MUST(fi_send(end->ep, end->memory, 8, fi_mr_desc(end->mr), 0, (void *)context));
}

static void receive(struct end *end, uintptr_t context)
{
	MUST(fi_recv(end->ep, end->memory + 64, 8, fi_mr_desc(end->mr), 0, (void *)context));
}

/* The next entry, which comes in this time, is that of a failed operation. 0: it is there. */
static struct fi_cq_err_entry failure(struct end *end, double seconds)
{
	struct fi_cq_err_entry error = { 0 };
	struct fi_cq_entry entry;
	double limit = now() + seconds;
	ssize_t got;

	while ((got = fi_cq_read(end->cq, &entry, 1)) == -FI_EAGAIN && now() < limit)
		;
	if (got != -FI_EAVAIL)
		die("fi_cq_read: %zd where an error was to be", got);
	if (fi_cq_readerr(end->cq, &error, 0) != 1)
		die("fi_cq_readerr has no error");
	return error;
}

static void is_empty(struct end *end, double seconds)
{
	struct fi_cq_err_entry error = { 0 };
	struct fi_cq_entry entry;
	double limit = now() + seconds;

	do {
		ssize_t got = fi_cq_read(end->cq, &entry, 1);

		if (got == -FI_EAVAIL)
			fi_cq_readerr(end->cq, &error, 0);
		if (got != -FI_EAGAIN)
			die("fi_cq_read: %zd (%s) where nothing was to be", got, fi_strerror(error.err));
	} while (now() < limit);
}

static void injected(void)
{
	struct fi_cq_err_entry error;

	connect_ends();
	MUST(fi_inject_write(client.ep, client.memory, 8, 0, (uintptr_t)server.memory, fi_mr_key(server.mr) ^ 0x55));
	error = failure(&client, SETUP_SECONDS);
	if (error.err != FI_EKEYREJECTED || error.op_context != CONTEXT || error.flags != (FI_RMA | FI_WRITE))
		die("error %d, context %p, flags %llx", error.err, error.op_context, (unsigned long long)error.flags);
	is_empty(&client, 0.05);
	expect(&server, FI_SHUTDOWN, NULL);
}

/* The entries of cancelled operations, whose contexts are the bits of this set, and no other one. */
static void cancelled(struct end *end, unsigned operations)
{
	unsigned seen = 0;

	while (seen != operations) {
		struct fi_cq_err_entry error = failure(end, 0);
		unsigned bit = 1U << (uintptr_t)error.op_context;

		if (error.err != FI_ECANCELED || !(bit & operations & ~seen))
			die("error %d of operation %p", error.err, error.op_context);
		seen |= bit;
	}
	is_empty(end, 0.05);
}

static void shut_down(void)
{
	connect_ends();
	receive(&client, 0);
	for (uintptr_t i = 1; i < 4; i++)
		send_to(&client, i); /* the peer has no receive */
	MUST(fi_shutdown(client.ep, 0));
	cancelled(&client, 0xf);
	expect(&server, FI_SHUTDOWN, NULL);
	expect(&server, FI_SHUTDOWN, NULL);
}

static void closed(void)
{
	struct fi_cq_entry entry;

	connect_ends();
	receive(&server, 9);
	receive(&client, 0);
	send_to(&client, 1); /* has its receive */
	if (completion(&server, SETUP_SECONDS))
		die("a failed receive");
	for (uintptr_t i = 2; i < 5; i++)
		send_to(&client, i);
	MUST(fi_close(&client.ep->fid));
	if (fi_cq_read(client.cq, &entry, 1) != 1 || entry.op_context != (void *)1)
		die("the completion of the first message is lost");
	cancelled(&client, 0x1d);
	expect(&server, FI_SHUTDOWN, NULL);
}

static void early(void)
{
	open_ends();
	bind_client(server.info);
	receive(&client, 1);
	MUST(fi_close(&client.ep->fid));
	cancelled(&client, 0x2);
}

/* Writes one byte, as often as `calls` says, with FI_MORE. */
static void write_more(unsigned round, unsigned calls)
{
	for (unsigned i = 0; i < calls; i++) {
		struct iovec iov = { client.memory + i, 1 };
		struct fi_rma_iov remote = { (uintptr_t)server.memory + i, 1, fi_mr_key(server.mr) };
		void *desc = fi_mr_desc(client.mr);
		struct fi_msg_rma msg = { .msg_iov = &iov, .desc = &desc, .iov_count = 1, .rma_iov = &remote, .rma_iov_count = 1 };

		client.memory[i] = (uint8_t)(round + 1);
		MUST(fi_writemsg(client.ep, &msg, FI_MORE | FI_COMPLETION));
	}
}

static void more(void)
{
	connect_ends();
	for (unsigned round = 0; round < 200; round++) {
		struct fi_rma_iov remote = { (uintptr_t)server.memory + 64, 1, fi_mr_key(server.mr) };
		struct iovec iov[2] = { { client.memory, 1 }, { client.memory, MEMORY / 2 } };
		struct fi_msg_rma msg = { .msg_iov = iov, .iov_count = 1, .rma_iov = &remote, .rma_iov_count = 1 };
		ssize_t failed = 0;

		write_more(round, 3);
		switch (round % 6) {
		case 0: /* flags that no write has */
			failed = fi_writemsg(client.ep, &msg, FI_PEEK);
			break;
		case 1: /* too many buffers */
			msg.iov_count = 1000;
			failed = fi_writemsg(client.ep, &msg, FI_COMPLETION);
			break;
		case 2: /* too long to inject */
			msg.msg_iov = iov + 1;
			remote.len = MEMORY / 2;
			failed = fi_writemsg(client.ep, &msg, FI_INJECT);
			break;
		case 3:
			failed = fi_sendmsg(client.ep, NULL, 0);
			break;
		case 4:
			failed = fi_inject(client.ep, client.memory, MEMORY / 2, 0);
			break;
		case 5:
			failed = fi_writev(client.ep, NULL, NULL, 2, 0, (uintptr_t)server.memory, fi_mr_key(server.mr), NULL);
			break;
		}
		if (failed >= 0)
			die("round %u: the call has not failed", round);
		for (unsigned i = 0; i < 3; i++)
			if (((volatile uint8_t *)server.memory)[i] != (uint8_t)(round + 1))
				die("round %u: write %u still waits", round, i);
		for (unsigned i = 0; i < 3; i++)
			if (completion(&client, SETUP_SECONDS))
				die("round %u: write %u has failed", round, i);
	}
}

int main(int argc, char **argv)
{
	static const struct {
		const char *name;
		void (*run)(void);
	} modes[] = { { "injected", injected }, { "shutdown", shut_down }, { "closed", closed }, { "early", early }, { "more", more } };

	if (argc != 4)
		die("usage: msg_operations MODE PROV NODE");
	provider = argv[2];
	node = argv[3];
	role = argv[1];
	alarm(LIMIT_SECONDS);
	for (size_t i = 0; i < sizeof modes / sizeof *modes; i++)
		if (!strcmp(argv[1], modes[i].name)) {
			modes[i].run();
			return 0;
		}
	die("no such mode");
}
