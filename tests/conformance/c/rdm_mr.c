/* The forms of memory registration of fi_mr(3) as targets of RMA, between two processes with
 * endpoints that have many peers. The first access to a region of each mode is also the first use of
 * its endpoint.
 *
 *   rdm_mr scalable PROV NODE   no mr_mode bit: keys of the application, from 0; offsets from 0
 *   rdm_mr virtual PROV NODE    FI_MR_VIRT_ADDR alone
 *   rdm_mr provider PROV NODE   FI_MR_PROV_KEY alone
 *   rdm_mr basic PROV NODE      FI_MR_BASIC
 *   rdm_mr raw PROV NODE        FI_MR_RAW; raw keys are also used where the bit is cleared
 *   rdm_mr endpoint PROV NODE   FI_MR_ENDPOINT
 *   rdm_mr local PROV NODE      FI_MR_LOCAL; local buffers have descriptors if the bit stays set
 *   rdm_mr event PROV NODE      FI_RMA_EVENT: counters of regions, without and with FI_MR_RMA_EVENT
 *   rdm_mr notify PROV NODE     FI_MR_MMU_NOTIFY: pages that come later, and other pages
 *   rdm_mr several PROV NODE    regions of several buffers
 *   rdm_mr space PROV NODE      the whole address space as one region
 *   rdm_mr hole PROV NODE       a region with a page that does not exist
 *   rdm_mr auth PROV NODE       an authorization key
 *   rdm_mr async PROV NODE      asynchronous registration
 *   rdm_mr many PROV NODE       2,000 regions, some of which overlap
 *   rdm_mr inuse PROV NODE      a region is closed while it is accessed; its memory then stays
 *
 * WEFT_TEST_UNKNOWN=1: the device does not report whether a request on a link that breaks was
 * executed, so operations of `inuse` may also fail with FI_ECONNABORTED. WEFT_TEST_SLOW=1: in an
 * emulated machine; `inuse` has 5 rounds instead of 20, since each operation that is refused there
 * costs a new connection of the device, and a round has 18 of them.
 *
 * A further argument `auto` requests FI_PROGRESS_AUTO; NODE `-` stands for none. Ends with 0,
 * with 77 if fi_getinfo does not offer the form, or says what went wrong. Plain libfabric 1.17. */
#define _GNU_SOURCE
#include "rdm_memory.h"

#include <rdma/fi_eq.h>

#define MIB (1UL << 20)
#define CAPS_RMA (FI_MSG | FI_RMA)
#define ALL_REMOTE (FI_REMOTE_READ | FI_REMOTE_WRITE)
#define WRITTEN (FI_RMA | FI_WRITE)
#define READ_DONE (FI_RMA | FI_READ)

static uint8_t *local;	      /* MIB bytes */
static struct region sources; /* `local`, if local buffers need a descriptor */

/* Opens both sides in this form. False, and the mode is not offered, if fi_getinfo refuses it. */
static bool begin_form(struct side *side, int bits, uint64_t caps, const char *what)
{
	needed.mr_mode = bits;
	needed.op_flags = FI_DELIVERY_COMPLETE;
	wanted.caps = caps;
	if (!offers(what)) {
		not_offered = true;
		return false;
	}
	open_memory_pair(side, caps);
	if (bits != FI_MR_BASIC)
		IS((mr_mode(side) & ~offered_bits(bits)) == 0);
	if (me == 0)
		printf("%s: mr_mode %x of %x is needed\n", what, (unsigned)mr_mode(side), (unsigned)bits);
	local = pages(MIB);
	if (mr_mode(side) & FI_MR_LOCAL)
		sources = region_of(side, local, MIB, FI_READ | FI_WRITE, 900);
	return true;
}

/* The endpoint is closed first: a region may be bound to it. */
static void close_endpoint(struct side *side)
{
	meet(side);
	must_be_empty(side);
	MUST(fi_close(&side->ep->fid));
	side->ep = NULL;
}

/* `eq`: an event queue of the fabric, or NULL. */
static void end_form_with(struct side *side, struct fid_eq *eq)
{
	struct side left = *side;

	if (side->ep)
		close_endpoint(side);
	close_region(&sources);
	sources.desc = NULL;
	munmap(local, MIB);
	if (!eq) {
		close_side(side);
		return;
	}
	/* the domain is bound to the event queue, and closed before it */
	MUST(fi_close(&left.tx->fid));
	MUST(fi_close(&left.rx->fid));
	MUST(fi_close(&left.av->fid));
	MUST(fi_close(&left.domain->fid));
	MUST(fi_close(&eq->fid));
	MUST(fi_close(&left.fabric->fid));
	fi_freeinfo(left.info);
}

static void end_form(struct side *side) { end_form_with(side, NULL); }

static void write_to(struct side *side, size_t len, uint64_t addr, uint64_t key)
{
	POST(side, fi_write(side->ep, local, len, sources.desc, side->peer, addr, key, local));
	DONE(side, local, WRITTEN);
}

static void read_from(struct side *side, size_t len, uint64_t addr, uint64_t key)
{
	memset(local, 0, len);
	POST(side, fi_read(side->ep, local, len, sources.desc, side->peer, addr, key, local));
	DONE(side, local, READ_DONE);
}

static void write_refused(int line, struct side *side, size_t len, uint64_t addr, uint64_t key)
{
	POST(side, fi_write(side->ep, local, len, sources.desc, side->peer, addr, key, &line));
	refused_at(line, side, &line);
}

static void read_refused(int line, struct side *side, size_t len, uint64_t addr, uint64_t key)
{
	POST(side, fi_read(side->ep, local, len, sources.desc, side->peer, addr, key, &line));
	refused_at(line, side, &line);
}

/* Process 0 accesses a region of process 1, which has these bytes and rights: contents, bounds,
 * rights. Both processes call it; the region may be anything in process 0. */
static void exercise(struct side *side, const struct region *region, uint64_t access, unsigned place, uint64_t seed)
{
	if (me == 1) {
		paint(region->bytes, region->len, seed);
		show(side, region, place);
		meet(side);
		meet(side);
		if (access & FI_REMOTE_WRITE) {
			ARRIVES(side, region->bytes, 64, seed + 1);
			ARRIVES(side, region->bytes + region->len - 64, 64, seed + 1);
		} else {
			PAINTED(region->bytes, region->len, seed);
		}
		meet(side);
		return;
	}
	meet(side);
	struct shown at = region_at(side, 1, place);
	if (access & FI_REMOTE_READ) {
		read_from(side, at.len, at.addr, at.key);
		PAINTED(local, at.len, seed);
		read_from(side, 1, at.addr + at.len - 1, at.key);
		read_refused(__LINE__, side, 2, at.addr + at.len - 1, at.key);
		read_refused(__LINE__, side, 1, at.addr - 1, at.key);
	} else {
		read_refused(__LINE__, side, 8, at.addr, at.key);
	}
	paint(local, 64, seed + 1);
	if (access & FI_REMOTE_WRITE) {
		write_to(side, 64, at.addr, at.key);
		write_to(side, 64, at.addr + at.len - 64, at.key);
		write_refused(__LINE__, side, 64, at.addr + at.len - 63, at.key);
		write_refused(__LINE__, side, 64, at.addr + at.len, at.key);
	} else {
		write_refused(__LINE__, side, 64, at.addr, at.key);
	}
	if (at.raw_len)
		MUST(fi_mr_unmap_key(side->domain, at.key));
	meet(side);
	meet(side);
}

/* Three regions of different rights; the first exercise is the first use of the endpoint. */
static void plain_regions(struct side *side, uint64_t first_key)
{
	static const uint64_t access[] = { ALL_REMOTE, FI_REMOTE_READ, FI_REMOTE_WRITE };
	uint8_t *memory = pages(3 * 65536);
	struct region regions[3];

	memset(memory, 0xa5, 3 * 65536);
	for (unsigned i = 0; i < 3; i++)
		regions[i] = region_of(side, memory + 65536 * i + 4001, 30011, access[i], first_key + i);
	if (!(mr_mode(side) & (FI_MR_PROV_KEY | FI_MR_RAW))) {
		struct fid_mr *twice = NULL;

		for (unsigned i = 0; i < 3; i++)
			IS(fi_mr_key(regions[i].mr) == first_key + i);
		RETURNS(fi_mr_reg(side->domain, memory, 4096, ALL_REMOTE, 0, first_key + 1, 0, &twice, NULL), -FI_ENOKEY);
	}
	for (unsigned i = 0; i < 3; i++)
		exercise(side, &regions[i], access[i], i, 10 * i + 1);
	for (unsigned i = 0; i < 3 && me == 1; i++)
		IS(guarded(regions[i].bytes, regions[i].len));
	close_endpoint(side);
	for (unsigned i = 0; i < 3; i++)
		close_region(&regions[i]);
	munmap(memory, 3 * 65536);
}

/* ---- modes ---- */

static void plain(int bits, const char *what)
{
	struct side side;

	if (!begin_form(&side, bits, CAPS_RMA, what))
		return;
	plain_regions(&side, 0);
	end_form(&side);
}

static void scalable(void)
{
	struct side side;
	size_t size;

	plain(0, "no bit");
	if (not_offered)
		return;
	/* the last keys of the range of mr_key_size, and more than one key size requested */
	for (needed.mr_key_size = 1; needed.mr_key_size <= 8; needed.mr_key_size *= 2) {
		if (!begin_form(&side, 0, CAPS_RMA, "key size"))
			return;
		size = side.info->domain_attr->mr_key_size;
		IS(size >= needed.mr_key_size);
		if (needed.mr_key_size == 8) {
			/* weft reserves the last 3 of 65,536 parts of the range (docs/conformance.md, D-key-range) */
			const uint64_t reserved = 0xfffdULL << 48;
			struct fid_mr *mr;

			for (unsigned i = 0; i < 3; i++)
				RETURNS(fi_mr_reg(side.domain, local, 64, ALL_REMOTE, 0, reserved + ((uint64_t)i << 48), 0, &mr, NULL), -FI_EKEYREJECTED);
			RETURNS(fi_mr_reg(side.domain, local, 64, ALL_REMOTE, 0, FI_KEY_NOTAVAIL - 1, 0, &mr, NULL), -FI_EKEYREJECTED);
			plain_regions(&side, reserved - 4);
		} else {
			plain_regions(&side, (1ULL << 8 * needed.mr_key_size) - 4);
		}
		end_form(&side);
	}
}

static void virtual_addresses(void) { plain(FI_MR_VIRT_ADDR, "FI_MR_VIRT_ADDR"); }
static void provider_keys(void) { plain(FI_MR_PROV_KEY, "FI_MR_PROV_KEY"); }
static void basic(void) { plain(FI_MR_BASIC, "FI_MR_BASIC"); }
static void endpoint(void) { plain(FI_MR_ENDPOINT, "FI_MR_ENDPOINT"); }

static void local_buffers(void)
{
	plain(FI_MR_LOCAL, "FI_MR_LOCAL");
	if (!not_offered)
		plain(FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY, "FI_MR_LOCAL and those of FI_MR_BASIC");
}

static void raw(void)
{
	static const int forms[] = { FI_MR_RAW, FI_MR_RAW | FI_MR_PROV_KEY, FI_MR_RAW | FI_MR_PROV_KEY | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED };

	for (unsigned i = 0; i < sizeof forms / sizeof *forms; i++) {
		struct side side;
		uint8_t *memory = pages(65536), small[1];
		size_t size = 0;

		if (!begin_form(&side, forms[i], CAPS_RMA, "FI_MR_RAW"))
			return;
		struct region region = region_of(&side, memory + 100, 5000, ALL_REMOTE, 3);
		struct shown *shown = &meeting->shown[me][0];
		uint64_t base;
		int result = fi_mr_raw_attr(region.mr, &base, small, &size, 0);
		IS(result == -FI_ETOOSMALL && size > 0 && size <= sizeof shown->raw);
		if (mr_mode(&side) & FI_MR_RAW)
			IS(size == side.info->domain_attr->mr_key_size);
		paint(memory + 100, 5000, 8);
		show(&side, &region, 0);
		shown->raw_len = sizeof shown->raw;
		MUST(fi_mr_raw_attr(region.mr, &shown->base, shown->raw, &shown->raw_len, 0));
		IS(shown->raw_len == size);
		meet(&side);
		if (me == 0) {
			struct shown at = region_at(&side, 1, 0);

			/* mapped twice, used by both, of which one is released */
			struct shown again = region_at(&side, 1, 0);
			read_from(&side, 5000, at.addr, at.key);
			PAINTED(local, 5000, 8);
			read_from(&side, 5000, again.addr, again.key);
			MUST(fi_mr_unmap_key(side.domain, again.key));
			read_from(&side, 4000, at.addr + 1000, at.key);
			paint(local, 5000, 9);
			write_to(&side, 5000, at.addr, at.key);
			read_refused(__LINE__, &side, 8, at.addr + 4993, at.key);
			MUST(fi_mr_unmap_key(side.domain, at.key));
		}
		meet(&side);
		if (me == 1)
			ARRIVES(&side, memory + 100, 5000, 9);
		close_endpoint(&side);
		close_region(&region);
		end_form(&side);
		munmap(memory, 65536);
	}
}

/* A region with a counter for writes of others. */
static void event_form(int bits)
{
	enum { COUNT = 500 };
	struct side side;
	struct fid_mr *mr;
	struct fid_cntr *cntr;
	uint8_t *memory = pages(65536);

	if (!begin_form(&side, bits, CAPS_RMA | FI_RMA_EVENT, bits & FI_MR_RMA_EVENT ? "FI_RMA_EVENT with FI_MR_RMA_EVENT" : "FI_RMA_EVENT"))
		return;
	cntr = counter(&side);
	MUST(fi_mr_reg(side.domain, memory, 65536, ALL_REMOTE, 0, 4, mr_mode(&side) & FI_MR_RMA_EVENT ? FI_RMA_EVENT : 0, &mr, NULL));
	MUST(fi_mr_bind(mr, &cntr->fid, FI_REMOTE_WRITE));
	if (mr_mode(&side) & FI_MR_ENDPOINT)
		MUST(fi_mr_bind(mr, &side.ep->fid, 0));
	if (mr_mode(&side) & (FI_MR_ENDPOINT | FI_MR_RMA_EVENT))
		MUST(fi_mr_enable(mr));
	struct region region = { .mr = mr, .bytes = memory, .len = 65536 }, silent = region_of(&side, memory, 65536, ALL_REMOTE, 5);
	show(&side, &region, 0);
	show(&side, &silent, 1);
	meet(&side);
	struct shown at = region_at(&side, 1 - me, 0), other = region_at(&side, 1 - me, 1);
	if (me == 0) {
		unsigned entries = 0;

		for (unsigned i = 0; i < COUNT; i++)
			paint(local + i * 128, 128, i);
		for (unsigned i = 0; i < COUNT; i++) {
			uint64_t addr = at.addr + i * 128;

			if (i % 3 == 0) {
				POST(&side, fi_inject_write(side.ep, local + i * 128, side.info->tx_attr->inject_size < 128 ? 16 : 128, side.peer, addr, at.key));
			} else {
				POST(&side, fi_write(side.ep, local + i * 128, 128, sources.desc, side.peer, addr, at.key, local));
				entries++;
			}
			/* neither reads, nor accesses by another region count */
			if (i % 10 == 0) {
				POST(&side, fi_read(side.ep, local + MIB - 4096, 128, sources.desc, side.peer, at.addr, at.key, local));
				POST(&side, fi_write(side.ep, local, 16, sources.desc, side.peer, other.addr, other.key, local));
				entries += 2;
			}
		}
		for (; entries; entries--)
			IS(OUTCOME(&side, side.tx).err == 0);
	} else {
		UNTIL(fi_cntr_read(cntr) >= COUNT, );
		/* an event means that the bytes are visible */
		for (unsigned i = 1; i < COUNT; i++)
			PAINTED(memory + i * 128, 16, i);
	}
	meet(&side);
	if (me == 1) {
		for (int i = 0; i < 100; i++)
			IS(fi_cntr_read(cntr) == COUNT);
		IS(fi_cntr_readerr(cntr) == 0);
	}
	close_endpoint(&side);
	close_region(&region);
	close_region(&silent);
	MUST(fi_close(&cntr->fid));
	end_form(&side);
	munmap(memory, 65536);
}

static void events(void)
{
	event_form(0);
	not_offered = false;
	event_form(FI_MR_RMA_EVENT | FI_MR_ENDPOINT);
	if (!not_offered)
		event_form(FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_RMA_EVENT);
}

/* Pages that come after the registration, and others in their place. */
static void notify(void)
{
	enum { LEN = 16 * 4096 };
	struct side side;

	if (!begin_form(&side, FI_MR_MMU_NOTIFY, CAPS_RMA, "FI_MR_MMU_NOTIFY"))
		return;
	uint8_t *memory = mmap(NULL, LEN, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	struct region region = region_of(&side, memory, LEN, ALL_REMOTE, 1);
	show(&side, &region, 0);
	for (unsigned round = 0; round < 12; round++) {
		if (me == 1) {
			struct iovec part = { memory + round % 4 * 4096, 4 * 4096 };

			if (round % 2 == 0)
				part = (struct iovec){ memory, LEN };
			if (round == 0)
				IS(mprotect(memory, LEN, PROT_READ | PROT_WRITE) == 0);
			else
				IS(mmap(part.iov_base, part.iov_len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == part.iov_base);
			paint(memory, LEN, round);
			if (mr_mode(&side) & FI_MR_MMU_NOTIFY)
				MUST(fi_mr_refresh(region.mr, &part, 1, 0));
		}
		meet(&side);
		if (me == 0) {
			struct shown at = region_at(&side, 1, 0);

			read_from(&side, LEN, at.addr, at.key);
			PAINTED(local, LEN, round);
			paint(local, LEN, round + 100);
			write_to(&side, LEN, at.addr, at.key);
		}
		meet(&side);
		if (me == 1)
			ARRIVES(&side, memory, LEN, round + 100);
		meet(&side);
	}
	close_endpoint(&side);
	close_region(&region);
	end_form(&side);
	munmap(memory, LEN);
}

/* Buffers in another order than their addresses, of different lengths; offsets from 0. */
static void several(void)
{
	enum { MOST = 16 };
	static const int forms[] = { 0, FI_MR_PROV_KEY };

	for (unsigned form = 0; form < 2; form++) {
		struct side side;
		struct iovec iov[MOST];
		struct fid_mr *mr;
		uint8_t *memory = pages(MOST * 16384), *whole = pages(MOST * 16384);
		size_t count, len = 0;

		if (!begin_form(&side, forms[form], CAPS_RMA, form ? "FI_MR_PROV_KEY" : "no bit"))
			return;
		count = side.info->domain_attr->mr_iov_limit < MOST ? side.info->domain_attr->mr_iov_limit : MOST;
		if (count < 2) {
			printf("not offered: mr_iov_limit is %zu\n", count);
			not_offered = true;
		}
		for (size_t i = 0; i < count; i++) {
			iov[i] = (struct iovec){ memory + (count - 1 - i) * 16384 + 17 * i + GUARD, 1000 + 1237 * (i % 5) };
			len += iov[i].iov_len;
		}
		memset(memory, 0xa5, MOST * 16384);
		MUST(fi_mr_regv(side.domain, iov, count, ALL_REMOTE, 0, 12, 0, &mr, NULL));
		struct region region = finish_region(&side, mr, NULL, len);
		show(&side, &region, 0);
		paint(whole, len, 21);
		for (size_t i = 0, at = 0; i < count; at += iov[i++].iov_len)
			memcpy(iov[i].iov_base, whole + at, iov[i].iov_len);
		meet(&side);
		if (me == 0) {
			struct shown at = region_at(&side, 1, 0);

			read_from(&side, len, at.addr, at.key);
			PAINTED(local, len, 21);
			/* across a border */
			read_from(&side, 500, at.addr + 900, at.key);
			IS(!memcmp(local, whole + 900, 500));
			memset(local, 0x5c, 300);
			write_to(&side, 300, at.addr + 850, at.key);
			read_refused(__LINE__, &side, 2, at.addr + len - 1, at.key);
			write_refused(__LINE__, &side, 8, at.addr + len, at.key);
		}
		meet(&side);
		if (me == 1) {
			memset(whole + 850, 0x5c, 300);
			for (size_t i = 0, at = 0; i < count; at += iov[i++].iov_len) {
				UNTIL(!memcmp(iov[i].iov_base, whole + at, iov[i].iov_len), progress(&side));
				IS(guarded(iov[i].iov_base, iov[i].iov_len));
			}
		}
		close_endpoint(&side);
		close_region(&region);
		end_form(&side);
	}
}

static uint8_t in_data[5000] = { 1 };

/* "An application can register any range of addresses in their virtual address space, whether or
 * not those addresses are backed by physical pages or have been allocated." */
static void space(void)
{
	static const int forms[] = { 0, FI_MR_PROV_KEY, FI_MR_VIRT_ADDR | FI_MR_PROV_KEY, FI_MR_RMA_EVENT | FI_MR_ENDPOINT };
	unsigned done = 0;

	for (unsigned form = 0; form < sizeof forms / sizeof *forms; form++) {
		struct side side;
		struct region region;
		uint8_t on_stack[5000];

		if (!begin_form(&side, forms[form], CAPS_RMA, "the address space"))
			continue;
		done++;
		region = region_of(&side, NULL, SIZE_MAX, ALL_REMOTE, 0);
		show(&side, &region, 0);
		/* these come after the registration */
		uint8_t *mapped = pages(300000), *heap = malloc(5000);
		uint8_t *const places[] = { in_data, on_stack, heap, mapped, mapped + 290001 };
		for (unsigned i = 0; i < 5; i++) {
			paint(places[i], 5000, i + 1);
			meeting->shown[me][1 + i].bytes = places[i];
		}
		meet(&side);
		struct shown at = region_at(&side, 1 - me, 0);
		for (unsigned i = 0; i < 5 && me == 0; i++) {
			uint64_t addr = (uint64_t)(uintptr_t)meeting->shown[1][1 + i].bytes;

			read_from(&side, 5000, addr, at.key);
			PAINTED(local, 5000, i + 1);
			paint(local, 4990, i + 11);
			write_to(&side, 4990, addr, at.key);
		}
		meet(&side);
		for (unsigned i = 0; i < 5 && me == 1; i++)
			ARRIVES(&side, places[i], 4990, i + 11);
		close_endpoint(&side);
		close_region(&region);
		end_form(&side);
		munmap(mapped, 300000);
		free(heap);
	}
	not_offered = done == 0;
}

/* "physical pages must back addresses prior to the addresses being accessed as part of a data
 * transfer operation, or the data transfers will fail" */
static void hole(void)
{
	struct side side;

	if (!begin_form(&side, FI_MR_VIRT_ADDR | FI_MR_PROV_KEY, CAPS_RMA, "regions that are not allocated"))
		return;
	uint8_t *memory = pages(5 * 4096);
	munmap(memory + 4096, 4096);
	struct region region = region_of(&side, memory, 5 * 4096, ALL_REMOTE, 0);
	memset(memory, 0x5a, 4096);
	paint(memory + 2 * 4096, 3 * 4096, 1);
	show(&side, &region, 0);
	meet(&side);
	struct shown at = region_at(&side, 1 - me, 0);
	for (unsigned i = 0; i < 5 && me == 0; i++) {
		read_refused(__LINE__, &side, 8, at.addr + 4096 + 8 * i, at.key);
		write_refused(__LINE__, &side, 8, at.addr + 4096 + 8 * i, at.key);
		read_refused(__LINE__, &side, 4096, at.addr + 1000, at.key);
		read_from(&side, 3 * 4096, at.addr + 2 * 4096, at.key);
		PAINTED(local, 3 * 4096, 1);
		memset(local, 0x5b, 4096);
		write_to(&side, 4096, at.addr, at.key);
	}
	meet(&side);
	if (me == 1)
		UNTIL(memory[0] == 0x5b && !memcmp(memory, memory + 1, 4095), progress(&side));
	close_endpoint(&side);
	close_region(&region);
	end_form(&side);
}

static void auth(void)
{
	struct side side;
	uint8_t *memory = pages(65536), none[1] = { 0 };

	if (!begin_form(&side, FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY, CAPS_RMA, "FI_MR_BASIC's bits"))
		return;
	size_t size = side.info->domain_attr->auth_key_size;
	struct iovec iov = { memory, 65536 };
	struct fi_mr_attr attr = { .mr_iov = &iov, .iov_count = 1, .access = ALL_REMOTE, .requested_key = 6, .auth_key = size ? side.info->domain_attr->auth_key : none, .auth_key_size = size };
	struct fid_mr *mr;
	if (me == 0 && size == 0)
		printf("no authorization keys: auth_key_size is 0\n");
	MUST(fi_mr_regattr(side.domain, &attr, 0, &mr));
	struct region region = finish_region(&side, mr, memory, 65536);
	exercise(&side, &region, ALL_REMOTE, 0, 5);
	close_endpoint(&side);
	close_region(&region);
	end_form(&side);
}

static void async(void)
{
	struct side side;
	struct fi_eq_attr attr = { .wait_obj = FI_WAIT_UNSPEC };
	struct fid_eq *eq;
	struct fi_eq_entry entry = { 0 };
	char marks[20];
	uint8_t *memory = pages(65536);
	uint32_t kind = 0;

	if (!begin_form(&side, FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY, CAPS_RMA, "FI_MR_BASIC's bits"))
		return;
	MUST(fi_eq_open(side.fabric, &attr, &eq, NULL));
	int result = fi_domain_bind(side.domain, &eq->fid, FI_REG_MR);
	if (result == -FI_ENOSYS || result == -FI_EOPNOTSUPP) {
		printf("not offered: asynchronous registration\n");
		not_offered = true;
		close_endpoint(&side);
		end_form_with(&side, eq);
		return;
	}
	MUST(result);
	for (unsigned i = 0; i < 20; i++) {
		struct fid_mr *mr = NULL;
		ssize_t got;

		MUST(fi_mr_reg(side.domain, memory, 65536, ALL_REMOTE, 0, 3 + i, 0, &mr, &marks[i]));
		IS(mr);
		while ((got = fi_eq_sread(eq, &kind, &entry, sizeof entry, SECONDS * 1000, 0)) == -FI_EINTR)
			;
		IS(got == sizeof entry && kind == FI_MR_COMPLETE);
		IS(entry.fid == &mr->fid && entry.context == &marks[i]);
		struct region region = finish_region(&side, mr, memory, 65536);
		exercise(&side, &region, ALL_REMOTE, i, i);
		close_region(&region);
		meet(&side);
	}
	close_endpoint(&side);
	end_form_with(&side, eq);
}

static void many(void)
{
	enum { COUNT = 2000, STEP = 512, LEN = 1500 };
	struct side side;
	static struct region regions[COUNT];
	uint8_t *memory = pages(COUNT * STEP + LEN);

	if (!begin_form(&side, 0, CAPS_RMA, "no bit"))
		return;
	paint(memory, COUNT * STEP + LEN, 4);
	for (unsigned i = 0; i < COUNT; i++)
		regions[i] = region_of(&side, memory + (size_t)i * STEP, LEN, i % 2 ? FI_REMOTE_READ : ALL_REMOTE, 3 * i);
	meet(&side);
	for (unsigned n = 0; n < 3 * COUNT / 2 && me == 0; n++) {
		unsigned i = n < COUNT ? n : (unsigned)(mixed(n) % COUNT);
		size_t shift = mixed(n) >> 20 & 511;

		read_from(&side, 300, shift, 3 * i);
		for (size_t k = 0; k < 300; k++) {
			uint64_t word = paint_word(4, ((size_t)i * STEP + shift + k) / 8 * 8);

			if (local[k] != ((uint8_t *)&word)[(shift + k) % 8])
				die("byte %zu at %zu of region %u", k, shift, i);
		}
		if (n % 50 == 0) {
			read_refused(__LINE__, &side, 8, LEN - 7, 3 * i);
			read_refused(__LINE__, &side, 8, 0, 3 * i + 1);
			write_refused(__LINE__, &side, 8, 0, 3 * (i | 1));
		}
	}
	/* those that stay are not concerned by those that go */
	meet(&side);
	for (unsigned i = 0; i < COUNT; i += 2)
		close_region(&regions[i]);
	meet(&side);
	for (unsigned i = 0; i < COUNT && me == 0; i += 97) {
		if (i % 2)
			read_from(&side, LEN, 0, 3 * i);
		else
			read_refused(__LINE__, &side, 8, 0, 3 * i);
	}
	meet(&side);
	PAINTED(memory, COUNT * STEP + LEN, 4);
	close_endpoint(&side);
	for (unsigned i = 0; i < COUNT; i++)
		close_region(&regions[i]);
	end_form(&side);
}

/* "Once unregistered, further access to the registered memory is not guaranteed. Active or queued
 * operations that reference a memory region being closed may fail"; none changes the memory once
 * fi_close has returned. */
static void inuse(void)
{
	enum { LEN = 32768, WINDOW = 16 };
	struct side side;
	uint8_t *memory = pages(LEN);
	bool opened = begin_form(&side, FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY, CAPS_RMA, "FI_MR_BASIC's bits");
	unsigned failed = 0, succeeded = 0;
	bool unknown = getenv("WEFT_TEST_UNKNOWN"), slow = getenv("WEFT_TEST_SLOW");

	if (!opened)
		return;
	for (unsigned round = 0; round < (slow ? 5 : 20); round++) {
		struct region region = region_of(&side, memory, LEN, ALL_REMOTE, 7);

		show(&side, &region, 0);
		put(0, 0);
		meet(&side);
		struct shown at = region_at(&side, 1 - me, 0);
		if (me == 0) {
			unsigned under_way = 0;
			struct outcome outcome;
			double limit = now() + (slow ? 2 * SECONDS : SECONDS);

			memset(local, (int)round + 1, LEN);
			/* some that succeed before; some after the region has gone */
			for (unsigned after = 0; after < 3 || under_way;) {
				ssize_t result = -FI_EAGAIN;

				if (after < 3 && under_way < WINDOW)
					result = (succeeded + under_way) % 4 == 3 ? fi_read(side.ep, local + LEN, LEN, sources.desc, side.peer, at.addr, at.key, local) : fi_write(side.ep, local, LEN, sources.desc, side.peer, at.addr, at.key, local);
				if (result != -FI_EAGAIN) {
					MUST(result);
					under_way++;
				}
				if (poll_outcome(side.tx, &outcome)) {
					under_way--;
					if (outcome.err && !refused(outcome.err) && !(unknown && outcome.err == FI_ECONNABORTED))
						die("error %d (%s)", outcome.err, fi_strerror(outcome.err));
					succeeded += outcome.err == 0;
					failed += outcome.err != 0;
					add(1);
					if (told(0) && outcome.err)
						after++;
				}
				if (now() > limit)
					die("%u under way, %u succeeded, %u failed", under_way, succeeded, failed);
			}
		} else {
			uint64_t count = told(1);

			UNTIL(told(1) > count + 20, progress(&side));
			close_region(&region);
			memset(memory, 0xee, LEN);
			put(0, 1);
			for (int i = 0; i < 200; i++) {
				progress(&side);
				usleep(100);
				for (size_t k = 0; k < LEN; k += 64)
					if (memory[k] != 0xee)
						die("round %u: byte %zu has changed after fi_close", round, k);
			}
		}
		meet(&side);
		if (me == 1)
			for (size_t k = 0; k < LEN; k++)
				IS(memory[k] == 0xee);
		else
			close_region(&region);
		meet(&side);
	}
	if (me == 0)
		printf("%u operations succeeded, %u failed\n", succeeded, failed);
	end_form(&side);
}

int main(int argc, char **argv)
{
	static const struct memory_mode modes[] = {
		{ "scalable", scalable, 2 },
		{ "virtual", virtual_addresses, 2 },
		{ "provider", provider_keys, 2 },
		{ "basic", basic, 2 },
		{ "raw", raw, 2 },
		{ "endpoint", endpoint, 2 },
		{ "local", local_buffers, 2 },
		{ "event", events, 2 },
		{ "notify", notify, 2 },
		{ "several", several, 2 },
		{ "space", space, 2 },
		{ "hole", hole, 2 },
		{ "auth", auth, 2 },
		{ "async", async, 2 },
		{ "many", many, 2 },
		{ "inuse", inuse, 2 },
	};

	return run_memory_mode(modes, sizeof modes / sizeof *modes, argc, argv);
}
