/* A table of counters that two processes change, after the process that allocated it has ended.
 *
 *   shared_table [NODE [both]]
 *
 * The owner allocates the table, exports it, and ends without closing anything as soon as the
 * worker has imported it. The worker increments counters by the processor's atomics. The remote
 * process, which has not mapped the memory, increments counters by RMA atomics through the worker's
 * region. Each of the two increments every other counter. With `both` each increments all counters,
 * which needs a device whose atomics are the processor's, as soft0's are for such memory. NODE is
 * an address of this host, 127.0.0.1 by default. */
#include "example.h"

#include <sys/wait.h>

#define COUNTERS 64
#define ROUNDS 50
#define START 1000

/* Virtual addresses and the provider's keys. */
#define MR_MODE (FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY)
#define ACCESS (FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE)

static const char *node = "127.0.0.1";
static int both;

/* From the worker to the remote process: address and key of the table, the worker's address. */
struct place {
	uint64_t addr, key;
	size_t name_len;
	uint8_t name[128];
};

static void put(int fd, const void *data, size_t size)
{
	if (write(fd, data, size) != (ssize_t)size)
		exit(1);
}

static void get(int fd, void *data, size_t size)
{
	if (read(fd, data, size) != (ssize_t)size) {
		fprintf(stderr, "%s: the other process ended early\n", role);
		exit(1);
	}
}

static struct weft_mr_attr attributes(void)
{
	struct weft_mr_attr attr = {.size = sizeof attr, .access = ACCESS, .requested_key = 1};
	return attr;
}

static void owner(int to_worker, int from_worker)
{
	struct weft_mr_attr attr = attributes();
	struct end end = {0};
	struct fid_mr *mr;
	void *addr;
	uint64_t *table;
	uint8_t handle[WEFT_MR_HANDLE_SIZE], ready;
	size_t size = sizeof handle;

	role = "owner";
	open_domain(&end, get_info(node, FI_SOURCE, MR_MODE));
	MUST(end.ops->mr_alloc(end.domain, COUNTERS * sizeof *table, &attr, &addr, &mr));
	table = addr;
	for (int i = 0; i < COUNTERS; i++)
		table[i] = START;
	MUST(end.ops->mr_export(mr, ACCESS, handle, &size));
	put(to_worker, handle, size);
	get(from_worker, &ready, 1);
	printf("owner: the worker has the table, and I go\n");
	fflush(stdout);
	_exit(0); /* closes nothing, as a killed process */
}

static int mine(int counter, int remote) { return both || (counter & 1) == remote; }

static void worker(int from_owner, int to_owner, int to_remote)
{
	struct weft_mr_attr attr = attributes();
	struct end end = {0};
	struct fi_info *request = NULL;
	struct fid_pep *pep;
	struct fid_mr *mr;
	struct place place = {.name_len = sizeof place.name};
	void *addr;
	uint64_t *table, rounds = 0;
	uint32_t event;
	uint8_t handle[WEFT_MR_HANDLE_SIZE], end_of_owner;
	size_t len = 0;

	role = "worker";
	open_domain(&end, get_info(node, FI_SOURCE, MR_MODE));
	get(from_owner, handle, sizeof handle);
	MUST(end.ops->mr_import(end.domain, handle, sizeof handle, &attr, &addr, &len, &mr));
	table = addr;
	put(to_owner, "", 1);
	if (read(from_owner, &end_of_owner, 1) != 0) /* returns 0 when the owner has ended */
		exit(1);
	if (end.ops->mr_import(end.domain, handle, sizeof handle, &attr, &addr, &len, &mr) != -FI_ENOENT) {
		fprintf(stderr, "worker: the owner has gone, and its handle is still good\n");
		exit(1);
	}
	MUST(fi_passive_ep(end.fabric, end.info, &pep, NULL));
	MUST(fi_pep_bind(pep, &end.eq->fid, 0));
	MUST(fi_listen(pep));
	MUST(fi_getname(&pep->fid, place.name, &place.name_len));
	place.addr = (uint64_t)(uintptr_t)table;
	place.key = fi_mr_key(mr);
	put(to_remote, &place, sizeof place);
	await_event(&end, FI_CONNREQ, &request);
	open_endpoint(&end, request);
	MUST(fi_accept(end.ep, NULL, 0));
	await_event(&end, FI_CONNECTED, NULL);
	for (event = 0; !event; rounds++) {
		struct fi_eq_cm_entry entry;

		for (int i = 0; i < COUNTERS; i++)
			if (mine(i, 0))
				__atomic_fetch_add(&table[i], 1, __ATOMIC_RELAXED);
		if (fi_eq_read(end.eq, &event, &entry, sizeof entry, 0) < 0)
			event = 0;
	}
	if (event != FI_SHUTDOWN) {
		fprintf(stderr, "worker: event %u\n", event);
		exit(1);
	}
	for (int i = 0; i < COUNTERS; i++) {
		uint64_t wanted = START + (mine(i, 0) ? rounds : 0) + (mine(i, 1) ? ROUNDS : 0);

		if (table[i] != wanted) {
			fprintf(stderr, "worker: counter %d is %llu, not %llu\n", i, (unsigned long long)table[i],
				(unsigned long long)wanted);
			exit(1);
		}
	}
	printf("worker: %d counters, all of them right\n", COUNTERS);
	fi_freeinfo(request);
	MUST(fi_close(&end.ep->fid));
	MUST(fi_close(&pep->fid));
	MUST(end.ops->mr_free(mr));
	close_domain(&end);
}

static void remote(int from_worker)
{
	struct end end = {0};
	struct fid_mr *mr;
	struct place place;
	uint64_t *local = aligned_alloc(4096, 4096);
	void *desc;

	role = "remote";
	get(from_worker, &place, sizeof place);
	open_domain(&end, get_info(node, FI_SOURCE, MR_MODE));
	MUST(fi_mr_reg(end.domain, local, 4096, FI_READ | FI_WRITE, 0, 1, 0, &mr, NULL));
	desc = fi_mr_desc(mr);
	open_endpoint(&end, end.info);
	MUST(fi_connect(end.ep, place.name, NULL, 0));
	await_event(&end, FI_CONNECTED, NULL);
	local[0] = 1;
	for (int round = 0; round < ROUNDS; round++)
		for (int i = 0; i < COUNTERS; i++)
			if (mine(i, 1)) {
				uint64_t at = place.addr + i * sizeof *local;
				MUST(fi_atomic(end.ep, local, 1, desc, 0, at, place.key, FI_UINT64, FI_SUM, NULL));
				await_completion(&end);
			}
	MUST(fi_read(end.ep, local, COUNTERS * sizeof *local, desc, 0, place.addr, place.key, NULL));
	await_completion(&end);
	for (int i = 0; i < COUNTERS; i++)
		if (local[i] < START + (mine(i, 1) ? ROUNDS : 0)) {
			fprintf(stderr, "remote: counter %d is %llu\n", i, (unsigned long long)local[i]);
			exit(1);
		}
	printf("remote: the whole table in one read\n");
	MUST(fi_shutdown(end.ep, 0));
	MUST(fi_close(&end.ep->fid));
	MUST(fi_close(&mr->fid));
	close_domain(&end);
	free(local);
}

int main(int argc, char **argv)
{
	int table[2], ready[2], place[2], failed = 0, status;
	pid_t children[3];

	if (argc > 1)
		node = argv[1];
	both = argc > 2 && !strcmp(argv[2], "both");
	setvbuf(stdout, NULL, _IOLBF, 0);
	if (pipe(table) || pipe(ready) || pipe(place))
		return 1;
	/* each child opens libfabric, after the fork */
	for (int i = 0; i < 3; i++) {
		children[i] = fork();
		if (children[i])
			continue;
		if (i != 0)
			close(table[1]); /* only the owner keeps the write end */
		switch (i) {
		case 0: owner(table[1], ready[0]); break;
		case 1: worker(table[0], ready[1], place[1]); break;
		default: remote(place[0]);
		}
		return 0;
	}
	close(table[1]);
	close(ready[1]);
	close(place[1]);
	for (int i = 0; i < 3; i++) {
		if (waitpid(children[i], &status, 0) < 0 || !WIFEXITED(status))
			failed = 1;
		else if (WEXITSTATUS(status) && !failed)
			failed = WEXITSTATUS(status);
	}
	return failed;
}
