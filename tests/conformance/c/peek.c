/* Event queues with several readers, one of which peeks (FI_PEEK).
 *
 *   peek read PROV NODE   a thread peeks at a connection request while another reads the queue:
 *                         the request is read once, with the same info
 *   peek wait PROV NODE   the same, and the other thread waits in fi_eq_sread
 *   peek two PROV NODE    the same with two requests: each has its own info
 *
 * The peeking thread is blocked while libfabric allocates the info. Link with -rdynamic: libfabric
 * calls this program's function. Exits with 0, or prints the failure. */
#include "end.h"

#include <netinet/in.h>
#include <pthread.h>
#include <stdatomic.h>

#define LIMIT 5

extern void *__libc_calloc(size_t count, size_t size);

/* the calling thread's next allocation of an info waits for `gate` */
static _Thread_local int holds;
static atomic_int gate, held;

void *calloc(size_t count, size_t size)
{
	if (holds && count * size == sizeof(struct fi_info)) {
		holds = 0;
		atomic_store(&held, 1);
		while (!atomic_load(&gate))
			usleep(100);
	}
	return __libc_calloc(count, size);
}

static struct end server, client[2];

struct peeked {
	ssize_t result;
	uint32_t kind;
	struct fi_info *info;
};

static ssize_t peek_once(struct peeked *peeked, uint64_t flags)
{
	struct fi_eq_cm_entry entry = { 0 };

	peeked->result = fi_eq_read(server.eq, &peeked->kind, &entry, sizeof entry, flags);
	peeked->info = entry.info;
	return peeked->result;
}

static void *peek(void *arg)
{
	double start = now();

	while (peek_once((holds = 1, arg), FI_PEEK) == -FI_EAGAIN && now() - start < LIMIT)
		;
	holds = 0;
	return NULL;
}

static void *open_gate(void *arg)
{
	(void)arg;
	usleep(100000);
	atomic_store(&gate, 1);
	return NULL;
}

static void dial(struct end *end, const void *name)
{
	end->info = getinfo(NULL, 0);
	open_fabric(end);
	open_endpoint(end, end->info);
	MUST(fi_connect(end->ep, name, NULL, 0));
}

static uint16_t port_of(const struct fi_info *info) { return ((const struct sockaddr_in *)info->dest_addr)->sin_port; }

/* Rejects the request with one byte of data, which a rejection by the provider itself does not
 * have. */
static void reject(struct fid_pep *pep, struct fi_info *info, int clients)
{
	struct fi_eq_err_entry error = { 0 };
	double start = now();

	MUST(fi_reject(pep, info->handle, "x", 1));
	fi_freeinfo(info);
	for (;;) {
		for (int i = 0; i < clients; i++) {
			struct fi_eq_cm_entry entry;
			uint32_t kind;

			if (fi_eq_read(client[i].eq, &kind, &entry, sizeof entry, 0) != -FI_EAVAIL)
				continue;
			MUST(fi_eq_readerr(client[i].eq, &error, 0));
			if (error.err_data_size < 1 || *(char *)error.err_data != 'x')
				die("client %d was refused by the provider", i);
			return;
		}
		if (now() - start > LIMIT)
			die("no client was refused");
	}
}

int main(int argc, char **argv)
{
	struct peeked peeked = { 0 }, got = { 0 };
	struct fid_pep *pep;
	struct fi_eq_cm_entry entry;
	uint8_t name[128];
	size_t size = sizeof name;
	pthread_t peeking, opening;
	double start;
	int clients;

	alarm(60);
	if (argc != 4)
		die("usage: see the source");
	role = argv[1], provider = argv[2], node = argv[3];
	clients = !strcmp(role, "two") ? 2 : 1;
	server.info = getinfo("0", FI_SOURCE);
	open_fabric(&server);
	MUST(fi_passive_ep(server.fabric, server.info, &pep, NULL));
	MUST(fi_pep_bind(pep, &server.eq->fid, 0));
	MUST(fi_listen(pep));
	MUST(fi_getname(&pep->fid, name, &size));
	for (int i = 0; i < clients; i++)
		dial(&client[i], name);
	/* reading their queues drives progress of the clients' connection managers */
	for (start = now(); now() - start < 0.1;)
		for (int i = 0; i < clients; i++)
			if (fi_eq_read(client[i].eq, &got.kind, &entry, sizeof entry, 0) != -FI_EAGAIN)
				die("an event before the answer");
	if (pthread_create(&peeking, NULL, peek, &peeked))
		die("pthread_create");
	for (start = now(); !atomic_load(&held);)
		if (now() - start > LIMIT)
			die("the peeking thread has allocated no info");
	/* the other thread */
	if (!strcmp(role, "wait")) {
		if (pthread_create(&opening, NULL, open_gate, NULL))
			die("pthread_create");
		got.result = fi_eq_sread(server.eq, &got.kind, &entry, sizeof entry, LIMIT * 1000, 0);
		got.info = entry.info;
		pthread_join(opening, NULL);
	} else {
		for (int i = 0; i < 3; i++)
			if (peek_once(&got, i == 0 ? FI_PEEK : 0) != -FI_EAGAIN)
				die("read %d during a peek: %zd", i, got.result);
		atomic_store(&gate, 1);
	}
	pthread_join(peeking, NULL);
	if (peeked.result < 0 || peeked.kind != FI_CONNREQ)
		die("the peek returned %zd", peeked.result);
	for (int i = 0; i < clients; i++) {
		struct fi_info *other = peeked.info;

		if (strcmp(role, "wait")) {
			if (i && peek_once(&peeked, FI_PEEK) < 0)
				die("a second peek returned %zd", peeked.result);
			peek_once(&got, 0);
		}
		if (got.result < 0 || got.kind != FI_CONNREQ)
			die("the read of request %d returned %zd", i, got.result);
		if (got.info != peeked.info)
			die("the read of request %d has another info than the peek", i);
		if (i && port_of(got.info) == port_of(other))
			die("two requests of one address");
		if (!i && clients == 2) {
			/* a copy, for the comparison */
			struct fi_info *copy = fi_dupinfo(got.info);

			reject(pep, got.info, clients);
			peeked.info = copy;
		} else {
			reject(pep, got.info, clients);
		}
	}
	if (peek_once(&got, 0) != -FI_EAGAIN)
		die("a read of an empty queue returned %zd", got.result);
	for (int i = 0; i < clients; i++)
		close_end(&client[i]);
	MUST(fi_close(&pep->fid));
	MUST(fi_close(&server.eq->fid));
	MUST(fi_close(&server.fabric->fid));
	return 0;
}
