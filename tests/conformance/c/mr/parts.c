/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */
/* Additions of libfabric 2: sub-regions, page_size, FI_MR_SINGLE_USE, FI_MR_DMABUF. Built with
 * headers of 2.x. */
#include "mr.h"

#define API FI_VERSION(2, 0)

static int part(struct end *end, void *buf, size_t len, uint64_t access, uint64_t key, struct fid_mr *base, int iface, size_t page,
		struct fid_mr **mr)
{
	struct iovec iov = { buf, len };
	struct fi_mr_attr attr = { .mr_iov = &iov, .iov_count = 1, .access = access, .requested_key = key, .iface = iface,
				   .page_size = page, .base_mr = base, .sub_mr_cnt = base ? 0 : 10 };

	return fi_mr_regattr(end->domain, &attr, 0, mr);
}

/* "iface, device, hmem_data, page_size" of a sub-region "are ignored". */
static void inherited_attributes_are_ignored(void)
{
	struct end end = { .version = API };
	uint8_t *buffer = pages(4 * PAGE, true);
	struct fid_mr *base, *sub;

	open_end(&end, form_bits());
	base = reg(&end, buffer, 4 * PAGE, ALL_ACCESS, 1);
	for (int iface = 0; iface < 10; iface++) {
		IS(part(&end, buffer, PAGE, ALL_ACCESS, 2, base, iface, 0, &sub), 0);
		if (!failures)
			MUST(fi_close(&sub->fid));
	}
	for (size_t page = 1; page; page <<= 3) {
		IS(part(&end, buffer, PAGE, ALL_ACCESS, 2, base, 0, page + (page & 64), &sub), 0);
		if (!failures)
			MUST(fi_close(&sub->fid));
	}
	if (failures)
		exit(1);
	MUST(fi_close(&base->fid));
	close_end(&end);
}

/* "must be fully contained within the base MR"; "has its own ... access rights"; closing the base
 * "would fail if there are any outstanding sub-MRs"; "The base MR itself can also be a sub-MR". */
static void parts_of_regions(void)
{
	struct end end = { .version = API };
	uint8_t *buffer = pages(4 * PAGE, true), byte = 7, got = 0;

	if (connected(&end, form_bits())) {
		struct fid_mr *base = reg(&end, buffer, 4 * PAGE, FI_REMOTE_READ, 1), *sub, *subsub, *none;

		IS(part(&end, buffer + PAGE, 2 * PAGE, REMOTE, 2, base, 0, 0, &sub), 0);
		IS(part(&end, buffer + PAGE + 8, 64, FI_REMOTE_WRITE, 3, sub, 0, 0, &subsub), 0);
		HOLDS(part(&end, buffer + 4 * PAGE - 1, 2, REMOTE, 4, base, 0, 0, &none) < 0, "beyond the end");
		HOLDS(part(&end, buffer - 1, 2, REMOTE, 4, base, 0, 0, &none) < 0, "before the beginning");
		HOLDS(part(&end, buffer, 8, REMOTE, 4, sub, 0, 0, &none) < 0, "in the base, not in the part");
		IS(fi_close(&base->fid), -FI_EBUSY);
		IS(fi_close(&sub->fid), -FI_EBUSY);
		tell_region(&end, base, buffer);
		tell_region(&end, sub, buffer + PAGE);
		tell_region(&end, subsub, buffer + PAGE + 8);
		meet();
		IS(buffer[PAGE + 2], 7);
		IS(buffer[PAGE + 8 + 63], 7);
		MUST(fi_close(&subsub->fid));
		meet();
		meet();
		IS(buffer[PAGE + 3], 7);
		MUST(fi_close(&sub->fid));
		MUST(fi_close(&base->fid));
	} else {
		struct remote base = hear_region(&end), sub = hear_region(&end), subsub = hear_region(&end);

		IS(do_read(&end, &got, 1, &base, 0), 0);
		IS(do_write(&end, &byte, 1, &sub, 2), 0);
		IS(do_write(&end, &byte, 1, &subsub, 63), 0);
		if (!native(&end)) {
			HOLDS(do_write(&end, &byte, 1, &subsub, 64) > 0, "beyond the part's end");
			HOLDS(do_read(&end, &byte, 1, &subsub, 0) > 0, "a right of the base, not of the part");
			HOLDS(do_write(&end, &byte, 1, &base, 0) > 0, "a right of the part, not of the base");
		}
		meet();
		meet();
		byte = 7;
		IS(do_write(&end, &byte, 1, &sub, 3), 0);
		if (!native(&end))
			HOLDS(do_write(&end, &byte, 1, &subsub, 0) > 0, "a part that was closed");
		meet();
		forget_region(&end, &base);
		forget_region(&end, &sub);
		forget_region(&end, &subsub);
	}
	close_end(&end);
}

/* Adjacent buffers of the base region are one range of memory: a sub-region may span them. */
static void a_part_across_adjacent_buffers(void)
{
	struct end end = { .version = API };
	uint8_t *buffer = pages(4 * PAGE, true), data[128];
	struct iovec iov[3] = { { buffer, PAGE }, { buffer + PAGE, PAGE }, { buffer + 3 * PAGE, PAGE } };

	memset(data, 7, sizeof data);
	if (connected(&end, form_bits())) {
		struct fid_mr *base, *sub, *none;

		MUST(fi_mr_regv(end.domain, iov, 3, REMOTE, 0, 1, 0, &base, NULL));
		HOLDS(part(&end, buffer + PAGE, 3 * PAGE, REMOTE, 4, base, 0, 0, &none) < 0, "a sub-region that exceeds the base");
		MUST(part(&end, buffer + PAGE - 64, 128, REMOTE, 2, base, 0, 0, &sub));
		tell_region(&end, sub, buffer + PAGE - 64);
		meet();
		for (size_t i = 0; i < 4 * PAGE; i++)
			if (buffer[i] != (i >= PAGE - 64 && i < PAGE + 64 ? 7 : 0))
				die("byte %zu is %d", i, buffer[i]);
		MUST(fi_close(&sub->fid));
		MUST(fi_close(&base->fid));
	} else {
		struct remote to = hear_region(&end);

		IS(do_write(&end, data, 128, &to, 0), 0);
		meet();
		forget_region(&end, &to);
	}
	close_end(&end);
}

/* "If non-zero, page size must be supported by OS", or may be ignored: an invalid size gives an
 * errno or is ignored, a valid size is accepted. */
static void page_sizes(void)
{
	struct end end = { .version = API };
	uint8_t *buffer = pages(4 * PAGE, true);
	static const size_t sizes[] = { 0, 4096, 2 << 20, 1 << 30 };
	struct fid_mr *mr;

	open_end(&end, form_bits());
	for (int i = 0; i < 4; i++) {
		int got = part(&end, buffer, PAGE, ALL_ACCESS, 2, NULL, 0, sizes[i], &mr);

		HOLDS(!got || i == 3, "page_size %zu: %d", sizes[i], got);
		if (!got)
			MUST(fi_close(&mr->fid));
	}
	close_end(&end);
}

/* "only used for a single operation. After the operation is complete, the key ... can no longer be
 * used". */
static void single_use(void)
{
	struct end end = { .version = API };
	uint8_t *buffer = pages(PAGE, true), byte = 7;

	if (connected(&end, form_bits())) {
		struct fid_mr *mr;

		MUST(fi_mr_reg(end.domain, buffer, PAGE, ALL_ACCESS, 0, 1, FI_MR_SINGLE_USE, &mr, NULL));
		tell_region(&end, mr, buffer);
		meet();
		IS(buffer[0], 7);
		IS(buffer[1], 0);
		MUST(fi_close(&mr->fid));
	} else {
		struct remote to = hear_region(&end);

		IS(do_write(&end, &byte, 1, &to, 0), 0);
		HOLDS(do_write(&end, &byte, 1, &to, 1) > 0, "used twice");
		meet();
		forget_region(&end, &to);
	}
	close_end(&end);
}

/* "This flag is only usable for domains opened with FI_HMEM capability support". */
static void dmabuf_without_hmem(void)
{
	struct end end = { .version = API };
	struct fi_mr_dmabuf dmabuf = { .fd = 0, .len = PAGE };
	struct fi_mr_attr attr = { .dmabuf = &dmabuf, .iov_count = 1, .access = ALL_ACCESS };
	struct fid_mr *mr;
	int got;

	open_end(&end, form_bits());
	got = fi_mr_regattr(end.domain, &attr, FI_MR_DMABUF, &mr);
	HOLDS(got == -FI_EBADFLAGS || got == -FI_ENOSYS || got == -FI_EOPNOTSUPP, "FI_MR_DMABUF: %d (%s)", got, fi_strerror(-got));
	close_end(&end);
}

/* FI_AUTH_KEY: "Only valid with domains configured with FI_AV_AUTH_KEY". */
static void auth_key_flag(void)
{
	struct end end = { .version = API };
	uint8_t *buffer = pages(PAGE, true);
	struct fid_mr *mr;

	open_end(&end, form_bits());
	IS(fi_mr_reg(end.domain, buffer, PAGE, ALL_ACCESS, 0, 1, FI_AUTH_KEY, &mr, NULL), -FI_EBADFLAGS);
	close_end(&end);
}

/* Two adjacent buffers: "multiple memory buffers are registered as a single memory region". */
static struct fid_mr *reg_two(struct end *end, uint8_t *memory, uint64_t access, uint64_t key)
{
	struct iovec two[2] = { { memory, 64 }, { memory + 64, PAGE - 64 } };
	struct fid_mr *mr;

	MUST(fi_mr_regv(end->domain, two, 2, access, 0, key, 0, &mr, NULL));
	return mr;
}

/* "In libfabric 1.22 and later, the desc parameter must be either valid or NULL": both are
 * accepted, also mixed, and of a region across whose buffers the local one lies. */
static void descriptors_may_be_given(void)
{
	struct end end = { .version = API };
	uint8_t *buffer = pages(PAGE, true), *local = pages(PAGE, true);

	if (connected(&end, form_bits())) {
		struct fid_mr *mr = reg(&end, buffer, PAGE, REMOTE, 1), *own = reg_two(&end, local, FI_RECV, 2);

		tell_region(&end, mr, buffer);
		for (int i = 0; i < 2; i++) {
			MUST(fi_recv(end.ep, local, PAGE, i ? fi_mr_desc(own) : NULL, 0, NULL));
			meet();
			IS(completion(&end, SECONDS), 0);
			IS(local[PAGE - 1], 7);
			memset(local, 0, PAGE);
			meet();
		}
		IS(buffer[PAGE - 1], 7);
		MUST(fi_close(&mr->fid));
		MUST(fi_close(&own->fid));
	} else {
		struct remote to = hear_region(&end);
		struct fid_mr *own = reg_two(&end, local, FI_SEND | FI_WRITE, 2);

		memset(local, 7, PAGE);
		for (int i = 0; i < 2; i++) {
			void *desc = i ? NULL : fi_mr_desc(own);

			meet();
			IS(DO(&end, fi_send(end.ep, local, PAGE, desc, 0, NULL)), 0);
			IS(DO(&end, fi_write(end.ep, local, PAGE, desc, 0, to.addr, to.key, NULL)), 0);
			meet();
		}
		MUST(fi_close(&own->fid));
		forget_region(&end, &to);
	}
	close_end(&end);
}

/* "hmem_data ... is reserved for future use": it is for other interfaces, and is ignored; FI_AV_AUTH_KEY
 * is not offered. */
static void reserved_fields(void)
{
	struct end end = { .version = API };
	uint8_t *buffer = pages(PAGE, true);
	struct iovec iov = { buffer, PAGE };
	struct fi_mr_attr attr = { .mr_iov = &iov, .iov_count = 1, .access = ALL_ACCESS, .sub_mr_cnt = 1 << 20 };
	struct fid_mr *mr;

	open_end(&end, form_bits());
	IS(fi_mr_regattr(end.domain, &attr, 0, &mr), 0);
	MUST(fi_close(&mr->fid));
	attr.hmem_data = buffer;
	IS(fi_mr_regattr(end.domain, &attr, 0, &mr), 0);
	MUST(fi_close(&mr->fid));
	attr.auth_key_size = FI_AV_AUTH_KEY;
	HOLDS(fi_mr_regattr(end.domain, &attr, 0, &mr) < 0, "FI_AV_AUTH_KEY");
	close_end(&end);
}

/* fi_mr_reg, fi_mr_regv and fi_mr_regattr "perform the same general function". */
static void three_ways_to_register(void)
{
	struct end end = { .version = API };
	uint8_t *buffer = pages(PAGE, true), byte = 7;
	struct iovec iov = { buffer, PAGE };
	struct fi_mr_attr attr = { .mr_iov = &iov, .iov_count = 1, .access = ALL_ACCESS, .requested_key = 3 };

	if (connected(&end, form_bits())) {
		for (int i = 0; i < 3; i++) {
			struct fid_mr *mr;

			MUST(i == 0 ? fi_mr_reg(end.domain, buffer, PAGE, ALL_ACCESS, 0, 3, 0, &mr, NULL) :
			     i == 1 ? fi_mr_regv(end.domain, &iov, 1, ALL_ACCESS, 0, 3, 0, &mr, NULL) :
				      fi_mr_regattr(end.domain, &attr, 0, &mr));
			tell_region(&end, mr, buffer);
			meet();
			IS(buffer[i], 7);
			MUST(fi_close(&mr->fid));
		}
	} else {
		for (int i = 0; i < 3; i++) {
			struct remote to = hear_region(&end);

			IS(do_write(&end, &byte, 1, &to, (uint64_t)i), 0);
			meet();
			forget_region(&end, &to);
		}
	}
	close_end(&end);
}

static const struct test tests[] = {
	CASE(inherited_attributes_are_ignored, "keys native handles"),
	CASE(parts_of_regions, "keys native handles rawkeys"),
	CASE(a_part_across_adjacent_buffers, "keys native handles"),
	CASE(page_sizes, "keys native"),
	CASE(single_use, "keys native handles"),
	CASE(dmabuf_without_hmem, "keys native"),
	CASE(auth_key_flag, "keys native"),
	CASE(descriptors_may_be_given, "keys native handles"),
	CASE(reserved_fields, "keys native"),
	CASE(three_ways_to_register, "keys native handles rawkeys"),
	{ 0 },
};
