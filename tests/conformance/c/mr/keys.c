/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */
/* Keys of memory regions: requested keys, the provider's keys, raw keys, and regions without a
 * key. */
#include "mr.h"

static long resident_kib(void)
{
	FILE *file = fopen("/proc/self/statm", "r");
	long total, resident;

	if (fscanf(file, "%ld %ld", &total, &resident) != 2)
		die("statm");
	fclose(file);
	return resident * (long)(PAGE >> 10);
}

static int try_key(struct end *end, void *buf, uint64_t key, struct fid_mr **mr)
{
	return fi_mr_reg(end->domain, buf, PAGE, ALL_ACCESS, 0, key, 0, mr, NULL);
}

/* "Applications that request their own MR key must select a value within the range specified by"
 * mr_key_size (fi_domain(3)): every key of that range can be requested, except those that weft
 * reserves; "-FI_EKEYREJECTED: The requested_key is not available". */
static void every_key_of_the_range(void)
{
	static const uint64_t keys[] = {
		0, 1, 0xffff, 0x10000, UINT32_MAX, 1ULL << 32, 1ULL << 47, 1ULL << 48, 1ULL << 63, 0xfffcffffffffffff,
	};
	static const uint64_t out_of_range[] = {
		0xfffd000000000000, 0xfffdffffffffffff, 0xfffe000000000000, 0xffff000000000000, 0xfffffffffffffffe, FI_KEY_NOTAVAIL,
	};
	struct end end = { 0 };
	uint8_t *buffer = pages(PAGE, true), byte = 0;

	if (connected(&end, form_bits())) {
		uint64_t largest = end.info->domain_attr->mr_key_size >= 8 ? UINT64_MAX - 1 :
				   (1ULL << (8 * end.info->domain_attr->mr_key_size)) - 1;
		char more = 1;

		HOLDS(end.info->domain_attr->mr_key_size <= 8, "the default is at most 8 bytes");
		for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
			struct fid_mr *mr;
			int got = try_key(&end, buffer, keys[i], &mr);

			if (keys[i] > largest) {
				IS(got, -FI_EKEYREJECTED);
				continue;
			}
			HOLDS(!got, "key 0x%" PRIx64 ": %d", keys[i], got);
			if (got)
				continue;
			IS(fi_mr_key(mr), keys[i]);
			tell(&more, 1);
			tell_region(&end, mr, buffer);
			meet();
			IS(buffer[0], byte + 1);
			byte = buffer[0];
			MUST(fi_close(&mr->fid));
		}
		for (size_t i = 0; i < sizeof out_of_range / sizeof *out_of_range; i++)
			IS(try_key(&end, buffer, out_of_range[i], &(struct fid_mr *){ NULL }), -FI_EKEYREJECTED);
		more = 0;
		tell(&more, 1);
	} else {
		char more;

		for (hear(&more, 1); more; hear(&more, 1)) {
			struct remote to = hear_region(&end);

			byte++;
			IS(do_write(&end, &byte, 1, &to, 0), 0);
			meet();
		}
	}
	close_end(&end);
}

/* "-FI_ENOKEY: The requested_key is already in use"; after fi_close the key is free again. */
static void a_key_in_use(void)
{
	struct end end = { 0 };
	uint8_t *buffer = pages(PAGE, true);
	struct fid_mr *mr, *other = (struct fid_mr *)&end;

	open_end(&end, form_bits());
	for (int i = 0; i < 3; i++) {
		MUST(try_key(&end, buffer, 77, &mr));
		IS(try_key(&end, buffer, 77, &other), -FI_ENOKEY);
		HOLDS(other == (struct fid_mr *)&end, "mr is written although the call failed");
		MUST(fi_close(&mr->fid));
	}
	close_end(&end);
}

/* "Parameter is ignored if FI_MR_PROV_KEY flag is set". */
static void requested_key_is_ignored(void)
{
	struct end end = { 0 };
	uint8_t *buffer = pages(PAGE, true);
	struct fid_mr *mr, *other;

	open_end(&end, form_bits());
	for (uint64_t key = UINT64_MAX - 3; key; key = key > 1 ? key / 7 : 0) {
		MUST(try_key(&end, buffer, key, &mr));
		MUST(try_key(&end, buffer, key, &other));
		HOLDS(fi_mr_key(mr) != fi_mr_key(other) || fi_mr_key(mr) == FI_KEY_NOTAVAIL, "two regions have one key");
		MUST(fi_close(&mr->fid));
		MUST(fi_close(&other->fid));
	}
	MUST(try_key(&end, buffer, FI_KEY_NOTAVAIL, &mr));
	MUST(fi_close(&mr->fid));
	close_end(&end);
}

/* "The needed key_size can also be obtained through the mr_key_size domain attribute"; "usable with
 * all registered memory regions, even if FI_MR_RAW has not been set"; "this routine may be called
 * on any valid key". */
static void raw_key_of_mr_key_size(void)
{
	struct end end = { .caps = FI_MSG | FI_RMA | FI_ATOMIC };
	uint8_t *buffer = pages(PAGE, true), byte = 7, raw[512];
	struct iovec halves[2] = { { buffer, 64 }, { buffer + 512, 64 } };
	uint64_t size64, base, key;

	if (connected(&end, form_bits())) {
		for (int vector = 0; vector < 2; vector++) {
			struct fid_mr *mr;
			size_t size = end.info->domain_attr->mr_key_size;

			MUST(fi_mr_regv(end.domain, halves, 1 + (size_t)vector, ALL_ACCESS, 0, 5, 0, &mr, NULL));
			memset(raw, 0xa5, sizeof raw);
			HOLDS(size <= sizeof raw, "mr_key_size %zu", size);
			IS(fi_mr_raw_attr(mr, &base, raw, &size, 0), 0);
			HOLDS(size <= end.info->domain_attr->mr_key_size, "needs %zu bytes, mr_key_size is %zu", size,
			      end.info->domain_attr->mr_key_size);
			HOLDS(raw[end.info->domain_attr->mr_key_size] == 0xa5, "written beyond the buffer");
			if (failures)
				exit(1);
			if (!(end.mode & FI_MR_RAW)) {
				HOLDS(fi_mr_key(mr) != FI_KEY_NOTAVAIL, "no key without FI_MR_RAW");
			} else {
				HOLDS(fi_mr_key(mr) == FI_KEY_NOTAVAIL, "a key with FI_MR_RAW");
			}
			IS(base, end.mode & FI_MR_VIRT_ADDR ? (uintptr_t)buffer : 0);
			size64 = size;
			tell(&size64, sizeof size64);
			tell(raw, sizeof raw);
			tell(&base, sizeof base);
			meet();
			IS(buffer[0], 7);
			IS(buffer[vector ? 512 : 63], 7);
			memset(buffer, 0, PAGE);
			MUST(fi_close(&mr->fid));
			meet();
		}
	} else {
		for (int vector = 0; vector < 2; vector++) {
			struct remote to = { 0 };

			hear(&size64, sizeof size64);
			hear(raw, sizeof raw);
			hear(&base, sizeof base);
			IS(fi_mr_map_raw(end.domain, base, raw, (size_t)size64, &key, 0), 0);
			to.addr = base;
			to.key = key;
			IS(do_write(&end, &byte, 1, &to, 0), 0);
			IS(do_write(&end, &byte, 1, &to, vector ? 64 : 63), 0);
			meet();
			meet();
			IS(fi_mr_unmap_key(end.domain, key), 0);
		}
	}
	close_end(&end);
}

/* "If the actual key is larger than what can fit into the buffer, it will return -FI_ETOOSMALL. On
 * output, key_size is set to the size of the buffer needed". */
static void raw_key_does_not_fit(void)
{
	struct end end = { 0 };
	uint8_t *buffer = pages(PAGE, true), raw[512];
	uint64_t base = 1;
	size_t size, needed = 0;
	struct fid_mr *mr;

	open_end(&end, form_bits());
	mr = reg(&end, buffer, PAGE, ALL_ACCESS, 5);
	for (size_t room = 0; room <= sizeof raw; room++) {
		int got;

		memset(raw, 0xa5, sizeof raw);
		size = room;
		got = fi_mr_raw_attr(mr, &base, raw, &size, 0);
		if (!needed)
			needed = size;
		IS(size, needed);
		IS(got, room < needed ? -FI_ETOOSMALL : 0);
		for (size_t i = got ? 0 : needed; i < sizeof raw; i++)
			if (raw[i] != 0xa5)
				die("room for %zu bytes: byte %zu is written", room, i);
	}
	HOLDS(needed && needed <= end.info->domain_attr->mr_key_size, "needs %zu bytes, mr_key_size is %zu", needed,
	      end.info->domain_attr->mr_key_size);
	MUST(fi_close(&mr->fid));
	close_end(&end);
}

/* "releases any resources": an unmapped key gives no access, and mapping and unmapping 60,000 keys
 * does not increase the memory in use. */
static void unmapped_keys(void)
{
	enum { ROUNDS = 60000 };
	struct end end = { 0 };
	uint8_t *buffer = pages(PAGE, true), byte = 7, raw[512];
	uint64_t size64, base, key;
	size_t size = sizeof raw;

	if (connected(&end, form_bits())) {
		struct fid_mr *mr = reg(&end, buffer, PAGE, ALL_ACCESS, 5);

		MUST(fi_mr_raw_attr(mr, &base, raw, &size, 0));
		size64 = size;
		tell(&size64, sizeof size64);
		tell(raw, sizeof raw);
		tell(&base, sizeof base);
		meet();
		meet();
		IS(buffer[1], 0);
		MUST(fi_close(&mr->fid));
	} else {
		struct remote to = { 0 };
		long before = 0, after;

		hear(&size64, sizeof size64);
		hear(raw, sizeof raw);
		hear(&base, sizeof base);
		to.addr = base;
		for (int i = 0; i < ROUNDS && !failures; i++) {
			IS(fi_mr_map_raw(end.domain, base, raw, (size_t)size64, &to.key, 0), 0);
			IS(do_write(&end, &byte, 1, &to, 0), 0);
			IS(fi_mr_unmap_key(end.domain, to.key), 0);
			if (i == ROUNDS / 6)
				before = resident_kib();
		}
		after = resident_kib();
		HOLDS(after - before < 1024, "%d maps, writes and unmaps leave %ld KiB", ROUNDS - ROUNDS / 6, after - before);
		meet();
		key = to.key;
		HOLDS(fi_mr_unmap_key(end.domain, key) < 0, "unmapped twice");
		if (!native(&end))
			HOLDS(do_write(&end, &byte, 1, &to, 1), "an unmapped key still writes");
		meet();
	}
	close_end(&end);
}

/* "All mapped keys must be freed before the corresponding domain is closed." Otherwise fi_close of
 * the domain returns -FI_EBUSY. */
static void domain_with_mapped_keys(void)
{
	struct end end = { 0 };
	uint8_t *buffer = pages(PAGE, true), raw[512];
	uint64_t base, key, other;
	size_t size = sizeof raw;
	struct fid_mr *mr;

	open_end(&end, form_bits());
	mr = reg(&end, buffer, PAGE, ALL_ACCESS, 5);
	MUST(fi_mr_raw_attr(mr, &base, raw, &size, 0));
	MUST(fi_mr_map_raw(end.domain, base, raw, size, &key, 0));
	MUST(fi_mr_map_raw(end.domain, base, raw, size, &other, 0));
	MUST(fi_close(&mr->fid));
	MUST(fi_close(&end.cq->fid));
	IS(fi_close(&end.domain->fid), -FI_EBUSY);
	IS(fi_mr_unmap_key(end.domain, key), 0);
	IS(fi_close(&end.domain->fid), -FI_EBUSY);
	IS(fi_mr_unmap_key(end.domain, other), 0);
	IS(fi_close(&end.domain->fid), 0);
}

/* A raw key mapped twice gives keys that work until each is unmapped. */
static void mapped_twice(void)
{
	struct end end = { 0 };
	uint8_t *buffer = pages(PAGE, true), byte = 7;

	if (connected(&end, form_bits())) {
		struct fid_mr *mr = reg(&end, buffer, PAGE, ALL_ACCESS, 5);

		tell_region(&end, mr, buffer);
		meet();
		IS(buffer[0], 7);
		IS(buffer[1], 7);
		MUST(fi_close(&mr->fid));
	} else {
		struct remote to = hear_region(&end), again = to;

		MUST(fi_mr_map_raw(end.domain, to.base, to.raw, to.raw_size, &again.key, 0));
		IS(do_write(&end, &byte, 1, &to, 0), 0);
		IS(fi_mr_unmap_key(end.domain, to.key), 0);
		IS(do_write(&end, &byte, 1, &again, 1), 0);
		IS(fi_mr_unmap_key(end.domain, again.key), 0);
		meet();
	}
	close_end(&end);
}

/* "FI_KEY_NOTAVAIL will be returned if the registration has not completed": regions that are
 * disabled have no key. */
static void disabled_regions_have_no_key(void)
{
	static const int bits[] = { FI_MR_RMA_EVENT, FI_MR_ENDPOINT, FI_MR_RMA_EVENT | FI_MR_ENDPOINT };

	for (size_t i = 0; i < sizeof bits / sizeof *bits; i++) {
		struct end end = { .caps = FI_MSG | FI_RMA | FI_RMA_EVENT };
		struct fi_cntr_attr cntr_attr = { .events = FI_CNTR_EVENTS_COMP };
		uint8_t *buffer = pages(PAGE, true), raw[512];
		struct fid_cntr *cntr;
		struct fid_mr *mr;
		uint64_t base;
		size_t size = sizeof raw;

		open_end(&end, form_bits() | bits[i]);
		if (end.mode & bits[i]) {
			MUST(fi_mr_reg(end.domain, buffer, PAGE, ALL_ACCESS, 0, 9, FI_RMA_EVENT, &mr, NULL));
			MUST(fi_cntr_open(end.domain, &cntr_attr, &cntr, NULL));
			HOLDS(fi_mr_key(mr) == FI_KEY_NOTAVAIL, "mr_mode 0x%x: a disabled region has key %" PRIu64, end.mode, fi_mr_key(mr));
			HOLDS(fi_mr_raw_attr(mr, &base, raw, &size, 0) < 0, "mr_mode 0x%x: a disabled region has a raw key", end.mode);
			if (end.mode & FI_MR_ENDPOINT) {
				end.ep = make_endpoint(&end, end.info);
				MUST(fi_mr_bind(mr, &end.ep->fid, 0));
			}
			if (end.mode & FI_MR_RMA_EVENT)
				MUST(fi_mr_bind(mr, &cntr->fid, FI_REMOTE_WRITE));
			HOLDS(fi_mr_key(mr) == FI_KEY_NOTAVAIL, "mr_mode 0x%x: a bound, disabled region has a key", end.mode);
			MUST(fi_mr_enable(mr));
			if (!(end.mode & FI_MR_RAW))
				HOLDS(fi_mr_key(mr) != FI_KEY_NOTAVAIL, "mr_mode 0x%x: no key of an enabled region", end.mode);
			size = sizeof raw;
			IS(fi_mr_raw_attr(mr, &base, raw, &size, 0), 0);
			MUST(fi_close(&mr->fid));
			MUST(fi_close(&cntr->fid));
		}
		close_end(&end);
	}
}

/* The same for registrations in the background: the key is available as soon as the event can be
 * read. */
static void keys_of_registrations_under_way(void)
{
	enum { LENGTH = 256 << 20, REGIONS = 8 };
	struct end end = { 0 };
	uint8_t *buffer = mmap(NULL, LENGTH, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	struct fi_eq_attr eq_attr = { .wait_obj = FI_WAIT_UNSPEC };
	struct fid_mr *mrs[REGIONS] = { NULL };
	struct fid_eq *eq;
	int early = 0;

	open_end(&end, form_bits());
	MUST(fi_eq_open(end.fabric, &eq_attr, &eq, NULL));
	MUST(fi_domain_bind(end.domain, &eq->fid, FI_REG_MR));
	for (int i = 0; i < REGIONS; i++) {
		MUST(fi_mr_reg(end.domain, buffer, LENGTH, ALL_ACCESS, 0, (uint64_t)i, 0, &mrs[i], &mrs[i]));
		if (!mrs[i])
			die("mr is not written by the call");
	}
	/* a region with a key has its event in the queue, or the event is queued at this moment */
	for (int i = 0; i < REGIONS; i++)
		early += !(end.mode & FI_MR_RAW) && fi_mr_key(mrs[i]) != FI_KEY_NOTAVAIL;
	for (int i = 0; i < REGIONS; i++) {
		struct fi_eq_entry entry = { 0 };
		uint32_t kind = 0;
		ssize_t got = fi_eq_sread(eq, &kind, &entry, sizeof entry, i < early ? 0 : SECONDS * 1000, 0);
		struct fid_mr **at = entry.context;

		if (got != sizeof entry)
			die("%d regions had a key, and event %d is %zd", early, i, got);
		IS(kind, FI_MR_COMPLETE);
		HOLDS(at >= mrs && at < mrs + REGIONS, "not the context of a registration");
		HOLDS(entry.fid == &(*at)->fid, "the event of another region");
		if (!(end.mode & FI_MR_RAW))
			HOLDS(fi_mr_key(*at) != FI_KEY_NOTAVAIL, "complete, and no key");
	}
	for (int i = 0; i < REGIONS; i++)
		MUST(fi_close(&mrs[i]->fid));
	MUST(fi_close(&end.cq->fid));
	MUST(fi_close(&end.domain->fid));
	MUST(fi_close(&eq->fid));
}

/* "the user requested key may be ignored if the memory region is for local access only". */
static void local_regions_need_no_key(void)
{
	struct end end = { 0 };
	uint8_t *buffer = pages(PAGE, true);
	struct fid_mr *mr[3];

	open_end(&end, form_bits());
	for (int i = 0; i < 3; i++)
		MUST(fi_mr_reg(end.domain, buffer, PAGE, FI_SEND | FI_RECV | FI_READ | FI_WRITE, 0, 0, 0, &mr[i], NULL));
	for (int i = 0; i < 3; i++)
		MUST(fi_close(&mr[i]->fid));
	close_end(&end);
}

/* An operation with an unknown key completes in error, and the connection stays. */
static void unknown_keys(void)
{
	struct end end = { .caps = FI_MSG | FI_RMA | FI_ATOMIC };
	uint8_t *buffer = pages(PAGE, true), byte = 7;
	unsigned seed = 9;

	if (connected(&end, form_bits())) {
		struct fid_mr *mr = reg(&end, buffer, PAGE, ALL_ACCESS, 1);

		tell_region(&end, mr, buffer);
		meet();
		IS(buffer[0], 7);
		IS(next_event(&end, 0, NULL), -1);
		meet();
		MUST(fi_close(&mr->fid));
	} else {
		struct remote to = hear_region(&end), wrong = to;

		for (int i = 0; i < 3000; i++) {
			uint64_t old;
			int got;

			wrong.key = to.key ^ (i % 3 == 0 ? 1ULL << (i / 3 % 64) :
					      (uint64_t)rand_r(&seed) << 33 | (uint64_t)rand_r(&seed) << 11 | 1);
			got = i % 3 == 0 ? do_write(&end, &byte, 1, &wrong, 1) :
			      i % 3 == 1 ? do_read(&end, &byte, 1, &wrong, 1) :
					   do_fetch_add(&end, 1, &old, &wrong, 8);
			if (got != FI_EKEYREJECTED && got != -FI_EKEYREJECTED)
				die("key 0x%" PRIx64 ": %d", wrong.key, got);
		}
		byte = 7;
		IS(do_write(&end, &byte, 1, &to, 0), 0);
		meet();
		meet();
	}
	close_end(&end);
}

static const struct test tests[] = {
	CASE(every_key_of_the_range, "keys virtual"),
	CASE(a_key_in_use, "keys virtual rawkeys"),
	CASE(requested_key_is_ignored, "native handles raw"),
	CASE(raw_key_of_mr_key_size, "keys native handles virtual raw rawkeys notify"),
	CASE(raw_key_does_not_fit, "keys native handles virtual raw rawkeys notify"),
	CASE(unmapped_keys, "keys native handles virtual raw rawkeys"),
	CASE(domain_with_mapped_keys, "keys native raw rawkeys"),
	CASE(mapped_twice, "raw rawkeys"),
	CASE(disabled_regions_have_no_key, "keys native handles rawkeys"),
	CASE(keys_of_registrations_under_way, "keys native handles rawkeys"),
	CASE(unknown_keys, "keys handles"),
	CASE(local_regions_need_no_key, "keys rawkeys"),
	{ 0 },
};
