/* A region whose memory is mapped page by page (FI_MR_MMU_NOTIFY), on a device that pins; another
 * process writes to it.
 *
 *   parts PROV NODE PAGES each|few
 *
 * At first none of the PAGES is mapped. Then every second one is mapped and announced by
 * fi_mr_refresh: each by a call of its own, or all by one call without ranges, which means the
 * whole region. The peer writes to each mapped page; at each other page its write fails with
 * FI_EACCES, and the connection stays. Then the other pages are mapped too, each with a call of its
 * own, and operations span thousands of parts. Then one call makes them a single part. Prints the
 * time that a call takes. Exits with 0, or prints the failure. */
#include <sys/mman.h>

#define MEMORY (64UL << 20)
#include "end.h"

#define PAGE 4096UL
#define WINDOW 32
#define FAR 120.0

/* An address below all that the kernel and the C library choose: nothing else is mapped in the
 * gaps. */
static uint8_t *const AREA = (uint8_t *)0x100000000000;

struct told {
	uint64_t addr, key, pages;
};

static struct fi_info *form(const char *service, uint64_t flags)
{
	struct fi_info *hints = fi_allocinfo(), *info;

	hints->caps = FI_MSG | FI_RMA;
	hints->mode = FI_CONTEXT | FI_CONTEXT2 | FI_RX_CQ_DATA;
	hints->ep_attr->type = FI_EP_MSG;
	hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_PROV_KEY | FI_MR_MMU_NOTIFY;
	hints->fabric_attr->prov_name = strdup(provider);
	MUST(fi_getinfo(FI_VERSION(1, 17), node, service, flags, hints, &info));
	fi_freeinfo(hints);
	if (!(info->domain_attr->mr_mode & FI_MR_MMU_NOTIFY))
		die("the device does not pin: SOFTVERBS_ODP=0");
	return info;
}

static void open_end(struct end *end, struct fi_info *info)
{
	struct fi_cq_attr attr = { .format = FI_CQ_FORMAT_DATA, .wait_obj = FI_WAIT_NONE };

	MUST(fi_domain(end->fabric, info, &end->domain, NULL));
	MUST(fi_cq_open(end->domain, &attr, &end->cq, NULL));
}

/* The next completion; 0 or its errno. */
static int next(struct end *end, struct fi_cq_data_entry *entry)
{
	struct fi_cq_err_entry error = { 0 };
	double limit = now() + FAR;

	for (;;) {
		ssize_t got = fi_cq_read(end->cq, entry, 1);

		if (got == 1)
			return 0;
		if (got == -FI_EAVAIL) {
			MUST(fi_cq_readerr(end->cq, &error, 0));
			entry->op_context = error.op_context;
			return error.err;
		}
		if (got != -FI_EAGAIN)
			MUST(got);
		if (now() > limit)
			die("no completion");
	}
}

/* ---- the initiator ---- */

struct client {
	struct end end;
	struct told to;
	/* pages whose index has this bit set are not mapped; 0: all pages are mapped */
	uint64_t gap;
	size_t done;
};

static int absent(const struct client *client, uint64_t page) { return (page & client->gap) != 0; }

static void finish(struct client *client)
{
	struct fi_cq_data_entry entry;
	int error = next(&client->end, &entry);
	uint64_t page = (uintptr_t)entry.op_context;

	if (page != client->done)
		die("page %zu was to complete, and %lu did", client->done, (unsigned long)page);
	if (error != (absent(client, page) ? FI_EACCES : 0))
		die("page %lu: %d (%s)", (unsigned long)page, error, fi_strerror(error));
	client->done++;
}

/* Writes one word into each page, at offset `at`: the page's number and `mark`. */
static void write_each(struct client *client, uint64_t mark, size_t at)
{
	uint64_t *words = (uint64_t *)client->end.memory;
	size_t page;

	client->done = 0;
	for (page = 0; page < client->to.pages; page++) {
		words[page] = page << 8 | mark;
		while (page - client->done >= WINDOW)
			finish(client);
		MUST(fi_write(client->end.ep, &words[page], 8, fi_mr_desc(client->end.mr), 0, client->to.addr + page * PAGE + at,
			      client->to.key, (void *)page));
	}
	while (client->done < page)
		finish(client);
}

static void expect_error(struct client *client, int want, const char *what)
{
	struct fi_cq_data_entry entry;
	int error = next(&client->end, &entry);

	if (error != want)
		die("%s: %d (%s), expected %d", what, error, fi_strerror(error), want);
}

static void initiator(const uint8_t *name, int in, int out)
{
	struct client client = { .end.info = form(NULL, 0) };
	struct end *end = &client.end;
	uint64_t access = FI_SEND | FI_RECV | FI_READ | FI_WRITE;
	size_t len, i;
	void *desc;

	open_fabric(end);
	open_end(end, end->info);
	end->memory = aligned_alloc(PAGE, MEMORY);
	memset(end->memory, 0, MEMORY);
	MUST(fi_mr_reg(end->domain, end->memory, MEMORY, access, 0, 9, 0, &end->mr, NULL));
	desc = fi_mr_desc(end->mr);
	bind_endpoint(end, end->info);
	MUST(fi_connect(end->ep, name, NULL, 0));
	expect(end, FI_CONNECTED, NULL);

	/* every second page is mapped */
	hear(in, &client.to, sizeof client.to);
	client.gap = 1;
	write_each(&client, 1, 0);
	write_each(&client, 2, 8);
	len = client.to.pages * PAGE < MEMORY / 2 ? client.to.pages * PAGE : MEMORY / 2;
	MUST(fi_write(end->ep, end->memory, 2 * PAGE, desc, 0, client.to.addr, client.to.key, NULL));
	expect_error(&client, FI_EACCES, "a write over a gap");
	MUST(fi_write(end->ep, end->memory, 0, desc, 0, client.to.addr + PAGE, client.to.key, NULL));
	expect_error(&client, 0, "nothing at a gap");
	tell(out, &len, sizeof len);

	/* all pages are mapped, each a part of its own: long operations, then short ones behind
	 * them */
	hear(in, &client.to, sizeof client.to);
	client.gap = 0;
	write_each(&client, 3, 16);
	for (i = 0; i < len; i++)
		end->memory[i] = (uint8_t)(i * 7 ^ i >> 12 ^ i >> 20);
	MUST(fi_write(end->ep, end->memory, len, desc, 0, client.to.addr, client.to.key, (void *)1));
	MUST(fi_writedata(end->ep, end->memory + PAGE / 2, len - PAGE, desc, 77, 0, client.to.addr + PAGE / 2, client.to.key, (void *)2));
	MUST(fi_read(end->ep, end->memory + MEMORY / 2, len, desc, 0, client.to.addr, client.to.key, (void *)3));
	MUST(fi_inject(end->ep, "behind", 6, 0));
	for (i = 1; i <= 3; i++) {
		struct fi_cq_data_entry entry;
		int error = next(end, &entry);

		if (error || (uintptr_t)entry.op_context != i)
			die("operation %zu: %d (%s), %zu", i, error, fi_strerror(error), (size_t)entry.op_context);
	}
	if (memcmp(end->memory, end->memory + MEMORY / 2, len))
		die("the bytes read are not the bytes written");
	tell(out, &len, sizeof len);

	/* the region is a single part again */
	hear(in, &client.to, sizeof client.to);
	write_each(&client, 4, 24);
	tell(out, &len, sizeof len);
	hear(in, &len, sizeof len);
	MUST(fi_write(end->ep, end->memory, 8, desc, 0, client.to.addr, client.to.key, NULL));
	expect_error(&client, FI_EKEYREJECTED, "the closed region");
	close_end(end);
	exit(0);
}

/* ---- the target ---- */

static void check_each(uint64_t pages, unsigned step, uint64_t mark, size_t at)
{
	for (uint64_t page = 0; page < pages; page += step) {
		uint64_t word;

		memcpy(&word, AREA + page * PAGE + at, sizeof word);
		if (word != (page << 8 | mark))
			die("page %lu has %#lx", (unsigned long)page, (unsigned long)word);
	}
}

static void back(uint64_t page)
{
	void *at = AREA + page * PAGE;

	if (mmap(at, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0) != at)
		die("page %lu: %s", (unsigned long)page, strerror(errno));
}

/* Maps every second page from `first` on, and announces each. */
static void grow(struct fid_mr *mr, uint64_t pages, uint64_t first, int each)
{
	uint64_t page, half = pages / 2, count = 0;
	double begun, spent[2] = { 0 };

	for (page = first; page < pages; page += 2) {
		struct iovec iov = { AREA + page * PAGE, PAGE };

		back(page);
		if (!each)
			continue;
		begun = now();
		MUST(fi_mr_refresh(mr, &iov, 1, 0));
		spent[page >= half] += now() - begun;
		count++;
	}
	if (each) {
		printf("%lu calls for a page: %.1f us each in the first half, %.1f us in the second\n", (unsigned long)count,
		       spent[0] / (double)count * 2e6, spent[1] / (double)count * 2e6);
		return;
	}
	begun = now();
	MUST(fi_mr_refresh(mr, NULL, 0, 0));
	printf("one call for all of %lu pages: %.1f us for each\n", (unsigned long)pages, (now() - begun) / (double)pages * 1e6);
}

int main(int argc, char **argv)
{
	struct end end = { 0 };
	struct told told = { .addr = (uintptr_t)AREA };
	uint64_t access = FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE;
	struct fi_cq_data_entry entry;
	struct fi_info *info, *request;
	struct fid_pep *pep;
	struct fid_mr *mr;
	uint8_t name[128], message[16] = { 0 };
	size_t size = sizeof name, len, i;
	struct iovec iov = { message, sizeof message };
	int down[2], up[2], each;
	double begun;
	pid_t pid;

	if (argc != 5)
		die("usage: parts PROV NODE PAGES each|few");
	provider = argv[1];
	node = argv[2];
	told.pages = strtoul(argv[3], NULL, 10);
	each = !strcmp(argv[4], "each");
	role = "target";
	setvbuf(stdout, NULL, _IOLBF, 0);
	/* forked before libfabric is used: the region's address comes through a pipe too */
	if (pipe(down) || pipe(up))
		die("pipe: %s", strerror(errno));
	pid = child("initiator");
	if (pid == 0) {
		alarm(300);
		hear(down[0], name, sizeof name);
		initiator(name, down[0], up[1]);
	}
	alarm(300);
	info = form("0", FI_SOURCE);
	end.info = info;
	open_fabric(&end);
	open_end(&end, info);
	MUST(fi_passive_ep(end.fabric, info, &pep, NULL));
	MUST(fi_pep_bind(pep, &end.eq->fid, 0));
	MUST(fi_listen(pep));
	MUST(fi_getname(&pep->fid, name, &size));
	tell(down[1], name, sizeof name);
	expect(&end, FI_CONNREQ, &request);
	bind_endpoint(&end, request);
	MUST(fi_accept(end.ep, NULL, 0));
	expect(&end, FI_CONNECTED, NULL);

	MUST(fi_mr_reg(end.domain, AREA, told.pages * PAGE, access, 0, 7, 0, &mr, NULL));
	told.key = fi_mr_key(mr);
	if (fi_mr_refresh(mr, NULL, 1, 0) != -FI_EINVAL || fi_mr_refresh(mr, NULL, 0, 1) != -FI_EBADFLAGS)
		die("a count without ranges, or flags, are taken");
	grow(mr, told.pages, 0, each);
	tell(down[1], &told, sizeof told);
	hear(up[0], &len, sizeof len);
	check_each(told.pages, 2, 1, 0);
	check_each(told.pages, 2, 2, 8);

	MUST(fi_mr_reg(end.domain, message, sizeof message, FI_RECV, 0, 8, 0, &end.mr, NULL));
	MUST(fi_recv(end.ep, NULL, 0, NULL, 0, NULL));
	MUST(fi_recvv(end.ep, &iov, (void *[]){ fi_mr_desc(end.mr) }, 1, 0, NULL));
	grow(mr, told.pages, 1, 1);
	tell(down[1], &told, sizeof told);
	for (i = 0; i < 2; i++) {
		int error = next(&end, &entry);
		int is_data = (entry.flags & FI_REMOTE_CQ_DATA) != 0;

		if (error || is_data != (i == 0) || (is_data && entry.data != 77))
			die("arrival %zu: %d (%s), flags %#lx", i, error, fi_strerror(error), (unsigned long)entry.flags);
		/* when the write has completed, all its bytes are in memory */
		for (size_t at = 0; i == 0 && at < len; at++)
			if (AREA[at] != (uint8_t)(at * 7 ^ at >> 12 ^ at >> 20))
				die("byte %zu is %#x", at, AREA[at]);
	}
	if (memcmp(message, "behind", 6))
		die("another message came");
	hear(up[0], &len, sizeof len);
	/* the operations posted after the long ones */
	if (len < told.pages * PAGE) {
		uint64_t last = told.pages - 1, word;

		memcpy(&word, AREA + last * PAGE + 16, sizeof word);
		if (word != (last << 8 | 3))
			die("the last page has %#lx", (unsigned long)word);
	}

	begun = now();
	MUST(fi_mr_refresh(mr, NULL, 0, 0));
	printf("one call, with all pages mapped: %.1f us\n", (now() - begun) * 1e6);
	tell(down[1], &told, sizeof told);
	hear(up[0], &len, sizeof len);
	check_each(told.pages, 1, 4, 24);
	begun = now();
	MUST(fi_close(&mr->fid));
	printf("closing: %.1f us\n", (now() - begun) * 1e6);
	tell(down[1], &len, sizeof len);
	if (status_of(pid, "initiator"))
		die("the initiator failed");
	close_end(&end);
	MUST(fi_close(&pep->fid));
	return 0;
}
