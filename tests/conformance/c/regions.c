/* Sentences of fi_mr(3) that need a peer: a target that registers memory, and an initiator that
 * accesses it.
 *
 *   regions raw PROV NODE FORM            raw keys are read, mapped and used, without knowledge of
 *                                         the provider
 *   regions unmap PROV NODE FORM ROUNDS   a key is mapped, used and unmapped ROUNDS times; an
 *                                         unmapped key is refused, and no memory is leaked
 *   regions rights PROV NODE FORM         the access rights of the target that atomics need
 *   regions events PROV NODE FORM         which operations a counter of FI_REMOTE_WRITE counts
 *
 * FORM is mr_mode, in hexadecimal; if the target's info does not have all its bits, the program
 * prints this and exits with 77. Otherwise exits with 0, or prints the failure. */
#define MEMORY (1UL << 16)
#include "end.h"

#include <rdma/fi_atomic.h>

#define LEN 4096UL
#define MOST 4096 /* bytes of a raw key */

static int form;
static uint64_t caps = FI_MSG | FI_RMA;

/* The target's description of a region. */
struct region {
	uint64_t base, key, size;
	uint8_t raw[MOST];
};

struct channel {
	int out, in;
};

static int is(const char *mode, const char *want) { return !strcmp(mode, want); }

static struct fi_info *info_in_form(const char *service, uint64_t flags)
{
	struct fi_info *hints = fi_allocinfo(), *list, *info;

	hints->caps = caps;
	hints->mode = FI_CONTEXT | FI_CONTEXT2 | FI_RX_CQ_DATA | (form == FI_MR_BASIC || form == FI_MR_SCALABLE ? FI_LOCAL_MR : 0);
	hints->ep_attr->type = FI_EP_MSG;
	hints->domain_attr->mr_mode = form;
	hints->fabric_attr->prov_name = strdup(provider);
	MUST(fi_getinfo(FI_VERSION(1, 17), node, service, flags, hints, &list));
	for (info = list; info && info->domain_attr->mr_mode != form; info = info->next)
		;
	if (!info) {
		printf("no info with mr_mode %#x\n", form);
		exit(77);
	}
	info = fi_dupinfo(info);
	fi_freeinfo(list);
	fi_freeinfo(hints);
	return info;
}

static void open_end(struct end *end, struct fi_info *info)
{
	struct fi_cq_attr attr = { .format = FI_CQ_FORMAT_CONTEXT, .wait_obj = FI_WAIT_NONE };

	MUST(fi_domain(end->fabric, info, &end->domain, NULL));
	MUST(fi_cq_open(end->domain, &attr, &end->cq, NULL));
	end->memory = aligned_alloc(4096, MEMORY);
	memset(end->memory, 0, MEMORY);
	bind_endpoint(end, info);
}

/* ---- the target ---- */

static void describe(struct end *end, struct fid_mr *mr, struct region *region, int raw)
{
	size_t size = end->info->domain_attr->mr_key_size;

	memset(region, 0, sizeof *region);
	region->key = fi_mr_key(mr);
	if (!raw && !(form & FI_MR_RAW))
		return;
	if (size > sizeof region->raw)
		die("mr_key_size is %zu", size);
	/* "The needed key_size can also be obtained through the mr_key_size domain attribute" */
	MUST(fi_mr_raw_attr(mr, &region->base, region->raw, &size, 0));
	region->size = size;
	size = 0;
	if (fi_mr_raw_attr(mr, NULL, region->raw, &size, 0) != -FI_ETOOSMALL || size != region->size)
		die("a buffer of no bytes for the raw key is not too small");
}

static void target(const char *mode, struct channel channel)
{
	struct end end = { .info = info_in_form("0", FI_SOURCE) };
	struct fi_cntr_attr cntr_attr = { .events = FI_CNTR_EVENTS_COMP, .wait_obj = FI_WAIT_NONE };
	uint64_t rights[] = { FI_REMOTE_READ | FI_REMOTE_WRITE, FI_REMOTE_WRITE, FI_REMOTE_READ }, counts[2];
	struct fid_cntr *cntr[2];
	struct fid_mr *mr[3];
	struct fid_pep *pep;
	struct fi_info *request;
	struct region region;
	uint8_t name[128] = { 0 };
	size_t size = sizeof name;
	int counted = is(mode, "events");
	char command;

	open_fabric(&end);
	MUST(fi_passive_ep(end.fabric, end.info, &pep, NULL));
	MUST(fi_pep_bind(pep, &end.eq->fid, 0));
	MUST(fi_listen(pep));
	MUST(fi_getname(&pep->fid, name, &size));
	tell(channel.out, name, sizeof name);
	expect(&end, FI_CONNREQ, &request);
	open_end(&end, request);
	MUST(fi_accept(end.ep, NULL, 0));
	expect(&end, FI_CONNECTED, NULL);
	for (int i = 0; i < 2 && counted; i++)
		MUST(fi_cntr_open(end.domain, &cntr_attr, &cntr[i], NULL));
	for (int i = 0; i < 3; i++) {
		uint64_t flags = counted && (form & FI_MR_RMA_EVENT) ? FI_RMA_EVENT : 0;

		MUST(fi_mr_reg(end.domain, end.memory + i * LEN, LEN, rights[i], 0, 100 + i, flags, &mr[i], NULL));
		if (counted) {
			MUST(fi_mr_bind(mr[i], &cntr[0]->fid, FI_REMOTE_WRITE));
			MUST(fi_mr_bind(mr[i], &cntr[1]->fid, FI_REMOTE_READ));
			if (flags)
				MUST(fi_mr_enable(mr[i]));
		}
		describe(&end, mr[i], &region, is(mode, "raw") || is(mode, "unmap"));
		if (form & FI_MR_VIRT_ADDR && !(form & FI_MR_RAW))
			region.base = (uintptr_t)end.memory + i * LEN;
		tell(channel.out, &region, sizeof region);
	}
	for (;;) {
		hear(channel.in, &command, 1);
		if (command == 'q')
			break;
		if (command == 'c') {
			for (int i = 0; i < 2; i++)
				counts[i] = fi_cntr_read(cntr[i]);
			tell(channel.out, counts, sizeof counts);
		}
		if (command == 'm')
			tell(channel.out, end.memory, 3 * LEN);
		fi_cq_read(end.cq, &size, 0);
	}
	for (int i = 0; i < 3; i++)
		MUST(fi_close(&mr[i]->fid));
	fi_close(&end.ep->fid);
	for (int i = 0; i < 2 && counted; i++)
		MUST(fi_close(&cntr[i]->fid));
	fi_close(&pep->fid);
	MUST(fi_close(&end.cq->fid));
	MUST(fi_close(&end.domain->fid));
	exit(0);
}

/* ---- the initiator ---- */

struct initiator {
	struct end end;
	struct channel channel;
	struct region regions[3];
	void *desc;
	uint8_t *buf;
};

static void ask(struct initiator *i, char command, void *answer, size_t size)
{
	tell(i->channel.out, &command, 1);
	for (size_t done = 0; done < size;) {
		ssize_t got = read(i->channel.in, (uint8_t *)answer + done, size - done);

		if (got <= 0)
			die("the target ended early");
		done += (size_t)got;
	}
}

/* The errno of an operation, from the call or from its completion. */
static int outcome(struct initiator *i, ssize_t posted)
{
	return posted ? (int)-posted : completion(&i->end, SETUP_SECONDS);
}

static int write_to(struct initiator *i, size_t len, uint64_t addr, uint64_t key)
{
	return outcome(i, fi_write(i->end.ep, i->buf, len, i->desc, 0, addr, key, NULL));
}

static uint64_t map(struct initiator *i, struct region *region)
{
	uint64_t key = FI_KEY_NOTAVAIL;

	MUST(fi_mr_map_raw(i->end.domain, region->base, region->raw, region->size, &key, 0));
	if (key == FI_KEY_NOTAVAIL)
		die("fi_mr_map_raw gave no key");
	return key;
}

static void must_be(const char *what, long got, long want)
{
	if (got != want)
		die("%s: %ld (%s), not %ld (%s)", what, got, fi_strerror((int)got), want, fi_strerror((int)want));
}

static void raw(struct initiator *i)
{
	static uint8_t there[3 * LEN];
	struct region *region = &i->regions[0];
	uint64_t key = map(i, region), again = map(i, region);

	if (!(form & FI_MR_RAW))
		must_be("bytes of a raw key", (long)region->size, 8);
	for (size_t at = 0; at < LEN; at++)
		i->buf[at] = (uint8_t)(at * 7 + 1);
	must_be("a write by the mapped key", write_to(i, LEN / 2, region->base, key), 0);
	must_be("a write by another mapping", write_to(i, LEN / 2, region->base + LEN / 2, again), 0);
	ask(i, 'm', there, sizeof there);
	if (memcmp(there, i->buf, LEN / 2) || memcmp(there + LEN / 2, i->buf, LEN / 2))
		die("something else was written");
	memset(i->buf, 0, LEN);
	must_be("a read", outcome(i, fi_read(i->end.ep, i->buf, LEN, i->desc, 0, region->base, key, NULL)), 0);
	if (memcmp(there, i->buf, LEN))
		die("something else was read");
	must_be("closing a domain with mapped keys", fi_close(&i->end.domain->fid), -FI_EBUSY);
	must_be("fi_mr_unmap_key", fi_mr_unmap_key(i->end.domain, key), 0);
	must_be("a write by the one left", write_to(i, 8, region->base, again), 0);
	must_be("fi_mr_unmap_key", fi_mr_unmap_key(i->end.domain, again), 0);
}

static long resident(void)
{
	long pages = 0;
	FILE *file = fopen("/proc/self/statm", "r");

	if (!file || fscanf(file, "%*d %ld", &pages) != 1)
		die("/proc/self/statm");
	fclose(file);
	return pages * 4;
}

static void unmap(struct initiator *i, long rounds)
{
	struct region *region = &i->regions[0];
	uint64_t stays = map(i, region), key = 0;
	long before = 0, grown;

	for (long n = 0; n < rounds; n++) {
		if (n == rounds / 10)
			before = resident();
		key = map(i, region);
		must_be("a write by the mapped key", write_to(i, 8, region->base, key), 0);
		must_be("fi_mr_unmap_key", fi_mr_unmap_key(i->end.domain, key), 0);
	}
	grown = resident() - before;
	printf("%ld rounds: %ld KiB more\n", rounds, grown);
	if (grown > 1024)
		die("%ld KiB more after %ld rounds", grown, rounds);
	must_be("a write by an unmapped key", write_to(i, 8, region->base, key), FI_EKEYREJECTED);
	must_be("the same of a key that never was", write_to(i, 8, region->base, key + 1), FI_EKEYREJECTED);
	must_be("unmapping it again", fi_mr_unmap_key(i->end.domain, key), -FI_EINVAL);
	must_be("a write by the one that stays", write_to(i, 8, region->base, stays), 0);
	must_be("fi_mr_unmap_key", fi_mr_unmap_key(i->end.domain, stays), 0);
	must_be("a write by that, unmapped", write_to(i, 8, region->base, stays), FI_EKEYREJECTED);
	if (!(form & FI_MR_RAW))
		must_be("a write by the key itself", write_to(i, 8, region->base, region->key), 0);
}

static int fetch(struct initiator *i, enum fi_op op, uint64_t operand, struct region *region, uint64_t key)
{
	return outcome(i, fi_fetch_atomic(i->end.ep, &operand, 1, i->desc, i->buf, i->desc, 0, region->base, key, FI_UINT64, op, NULL));
}

static ssize_t post_compare(struct initiator *i, size_t slot, uint64_t compare, uint64_t swap, uint64_t addr, uint64_t key)
{
	return fi_compare_atomic(i->end.ep, &swap, 1, i->desc, &compare, i->desc, i->buf + 8 * slot, i->desc, 0, addr, key,
				 FI_UINT64, FI_CSWAP, (void *)slot);
}

static int compare(struct initiator *i, uint64_t compare, uint64_t swap, struct region *region, uint64_t key)
{
	return outcome(i, post_compare(i, 0, compare, swap, region->base, key));
}

static uint64_t result(struct initiator *i, size_t slot)
{
	uint64_t value;

	memcpy(&value, i->buf + 8 * slot, sizeof value);
	return value;
}

static uint64_t key_of(struct initiator *i, struct region *region)
{
	return form & FI_MR_RAW ? map(i, region) : region->key;
}

/* fi_mr(3): "FI_REMOTE_WRITE: The memory buffer may be used as the target buffer of an RMA write or
 * atomic operation." fi_atomic(3): "The target buffer of fetch-atomic operations must be enabled for
 * remote read access." The peer's rkey has one right for all atomics, so it cannot refuse these. */
static void rights(struct initiator *i)
{
	struct region *both = &i->regions[0], *written = &i->regions[1], *read = &i->regions[2];
	int native = form & FI_MR_VIRT_ADDR && form & FI_MR_PROV_KEY && !(form & FI_MR_RAW);
	uint64_t key = key_of(i, both), one = 1;
	int fetches = native ? 0 : FI_EACCES, refused;

	must_be("fi_atomic", outcome(i, fi_atomic(i->end.ep, &one, 1, i->desc, 0, both->base, key, FI_UINT64, FI_SUM, NULL)), 0);
	must_be("fi_fetch_atomic", fetch(i, FI_SUM, 4, both, key), 0);
	must_be("the former value", (long)result(i, 0), 1);
	must_be("FI_ATOMIC_READ", fetch(i, FI_ATOMIC_READ, 0, both, key), 0);
	must_be("the former value", (long)result(i, 0), 5);
	must_be("fi_compare_atomic", compare(i, 5, 9, both, key), 0);
	must_be("the former value", (long)result(i, 0), 5);
	if (form & FI_MR_RAW)
		MUST(fi_mr_unmap_key(i->end.domain, key));
	key = key_of(i, written);
	must_be("fi_atomic without FI_REMOTE_READ",
		outcome(i, fi_atomic(i->end.ep, &one, 1, i->desc, 0, written->base, key, FI_UINT64, FI_SUM, NULL)), 0);
	must_be("fi_fetch_atomic without it", fetch(i, FI_SUM, 4, written, key), fetches);
	must_be("FI_ATOMIC_READ without it", fetch(i, FI_ATOMIC_READ, 0, written, key), fetches);
	must_be("fi_compare_atomic without it", compare(i, 5, 9, written, key), fetches);
	if (form & FI_MR_RAW)
		MUST(fi_mr_unmap_key(i->end.domain, key));
	/* without FI_REMOTE_WRITE an atomic fails: the last operation, since a native key ends the
	 * connection */
	key = key_of(i, read);
	refused = fetch(i, FI_ATOMIC_READ, 0, read, key);
	if (!refused)
		die("an atomic on a region of FI_REMOTE_READ alone");
	if (form & FI_MR_RAW)
		MUST(fi_mr_unmap_key(i->end.domain, key));
}

static void counted(struct initiator *i, const char *what, uint64_t *before, uint64_t writes, uint64_t reads)
{
	uint64_t now[2];

	ask(i, 'c', now, sizeof now);
	if (now[0] - before[0] != writes || now[1] - before[1] != reads)
		die("%s: %lu writes and %lu reads, not %lu and %lu", what, now[0] - before[0], now[1] - before[1], writes, reads);
	memcpy(before, now, sizeof now);
}

/* "FI_REMOTE_WRITE: Generates an event whenever a remote RMA write or atomic operation modifies the
 * memory region." */
static void events(struct initiator *i)
{
	enum { MANY = 64 };
	struct region *region = &i->regions[0];
	uint64_t key = key_of(i, region), one = 1, count[2] = { 0 };
	size_t posted = 0, done = 0;

	counted(i, "nothing", count, 0, 0);
	must_be("a write", write_to(i, 64, region->base + 64, key), 0);
	counted(i, "a write", count, 1, 0);
	must_be("a read", outcome(i, fi_read(i->end.ep, i->buf, 64, i->desc, 0, region->base, key, NULL)), 0);
	counted(i, "a read", count, 0, 1);
	must_be("a sum", outcome(i, fi_atomic(i->end.ep, &one, 1, i->desc, 0, region->base, key, FI_UINT64, FI_SUM, NULL)), 0);
	counted(i, "a sum", count, 1, 0);
	must_be("a sum that fetches", fetch(i, FI_SUM, 1, region, key), 0);
	counted(i, "a sum that fetches", count, 1, 0);
	for (int n = 0; n < 3; n++)
		must_be("FI_ATOMIC_READ", fetch(i, FI_ATOMIC_READ, 0, region, key), 0);
	must_be("the former value", (long)result(i, 0), 2);
	counted(i, "three times FI_ATOMIC_READ", count, 0, 3);
	for (int n = 0; n < 5; n++) {
		must_be("a compare that fails", compare(i, 77, 78, region, key), 0);
		must_be("the former value", (long)result(i, 0), 2);
	}
	counted(i, "five compares that fail", count, 0, 5);
	for (uint64_t n = 2; n < 4; n++) {
		must_be("a compare", compare(i, n, n + 1, region, key), 0);
		must_be("the former value", (long)result(i, 0), (long)n);
	}
	counted(i, "two compares", count, 2, 0);
	must_be("a compare outside the region", compare(i, 0, 1, &(struct region){ .base = region->base + LEN }, key), FI_EACCES);
	counted(i, "a refused one", count, 0, 0);

	/* posted back to back, every second one fails; a write follows each */
	while (done < 2 * MANY) {
		struct fi_cq_entry entry;
		ssize_t got;

		if (posted < 2 * MANY) {
			size_t n = posted / 2;
			ssize_t ret = posted % 2 ? fi_write(i->end.ep, i->buf, 8, i->desc, 0, region->base + 128, key, (void *)posted)
					: fi_compare_atomic(i->end.ep, &(uint64_t){ 5 + n / 2 }, 1, i->desc, &(uint64_t){ n % 2 ? 999 : 4 + n / 2 },
						       i->desc, i->buf + LEN + 8 * n, i->desc, 0, region->base, key, FI_UINT64,
						       FI_CSWAP, (void *)posted);

			if (ret != -FI_EAGAIN)
				MUST(ret);
			posted += ret == 0;
		}
		got = fi_cq_read(i->end.cq, &entry, 1);
		if (got == -FI_EAGAIN)
			continue;
		MUST(got);
		if ((size_t)entry.op_context != done)
			die("completion %zu came as number %zu", (size_t)entry.op_context, done);
		done++;
	}
	counted(i, "many", count, MANY / 2 + MANY, MANY / 2);
	must_be("FI_ATOMIC_READ", fetch(i, FI_ATOMIC_READ, 0, region, key), 0);
	must_be("the former value", (long)result(i, 0), 4 + MANY / 2);
	if (form & FI_MR_RAW)
		MUST(fi_mr_unmap_key(i->end.domain, key));
}

static void initiator(const char *mode, const uint8_t *name, struct channel channel, long rounds)
{
	struct initiator i = { .end = { .info = info_in_form(NULL, 0) }, .channel = channel };
	struct fid_mr *mr;

	open_fabric(&i.end);
	open_end(&i.end, i.end.info);
	MUST(fi_connect(i.end.ep, name, NULL, 0));
	expect(&i.end, FI_CONNECTED, NULL);
	for (int n = 0; n < 3; n++)
		ask(&i, 'n', &i.regions[n], sizeof i.regions[n]);
	i.buf = i.end.memory;
	MUST(fi_mr_reg(i.end.domain, i.buf, MEMORY, FI_READ | FI_WRITE, 0, 1, 0, &mr, NULL));
	i.desc = fi_mr_desc(mr);
	if (is(mode, "raw"))
		raw(&i);
	else if (is(mode, "unmap"))
		unmap(&i, rounds);
	else if (is(mode, "rights"))
		rights(&i);
	else
		events(&i);
	tell(channel.out, "q", 1);
	fi_close(&i.end.ep->fid);
	MUST(fi_close(&mr->fid));
	MUST(fi_close(&i.end.cq->fid));
	MUST(fi_close(&i.end.domain->fid));
	exit(0);
}

int main(int argc, char **argv)
{
	int there[2], back[2], ended[2];
	uint8_t name[128];
	pid_t pids[2];

	if (argc < 5)
		die("usage: regions raw|unmap|rights|events PROV NODE FORM [ROUNDS]");
	provider = argv[2];
	node = argv[3];
	form = (int)strtol(argv[4], NULL, 16);
	if (is(argv[1], "rights") || is(argv[1], "events"))
		caps |= FI_ATOMIC;
	if (is(argv[1], "events"))
		caps |= FI_RMA_EVENT;
	setvbuf(stdout, NULL, _IONBF, 0);
	if (pipe(there) || pipe(back))
		die("pipe: %s", strerror(errno));
	if (!(pids[0] = child("target"))) {
		close(there[1]);
		close(back[0]);
		target(argv[1], (struct channel){ .in = there[0], .out = back[1] });
	}
	close(there[0]);
	close(back[1]);
	hear(back[0], name, sizeof name);
	if (!(pids[1] = child("initiator")))
		initiator(argv[1], name, (struct channel){ .in = back[0], .out = there[1] }, argc > 5 ? atol(argv[5]) : 0);
	close(there[1]);
	close(back[0]);
	role = "parent";
	for (int i = 1; i >= 0; i--)
		ended[i] = status_of(pids[i], i ? "initiator" : "target");
	return ended[1] ? ended[1] : ended[0];
}
