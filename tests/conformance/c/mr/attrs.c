/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */
/* Arguments, attributes and flags of registrations, and the mr_mode bits in fi_getinfo(3). */
#include "mr.h"

#define BITS                                                                                       \
	(FI_MR_LOCAL | FI_MR_RAW | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY |            \
	 FI_MR_MMU_NOTIFY | FI_MR_RMA_EVENT | FI_MR_ENDPOINT | FI_MR_HMEM | FI_MR_COLLECTIVE)

/* "This field is ignored unless the application has requested the FI_HMEM capability." */
static void iface_is_ignored(void)
{
	struct end end = { 0 };
	uint8_t *buffer = pages(PAGE, true);
	struct iovec iov = { buffer, PAGE };

	open_end(&end, form_bits());
	for (int iface = FI_HMEM_SYSTEM; iface <= FI_HMEM_SYNAPSEAI + 40; iface++) {
		struct fi_mr_attr attr = {
			.mr_iov = &iov, .iov_count = 1, .access = ALL_ACCESS, .requested_key = 4, .iface = iface, .device.reserved = 77,
		};
		struct fid_mr *mr;
		int got = fi_mr_regattr(end.domain, &attr, 0, &mr);

		HOLDS(!got, "iface %d: %d (%s)", iface, got, fi_strerror(-got));
		if (!got)
			MUST(fi_close(&mr->fid));
	}
	close_end(&end);
}

/* "This flag is only usable for domains opened with FI_HMEM capability support"; "-FI_EBADFLAGS:
 * ... not supported". */
static void flags_of_device_memory(void)
{
	struct end end = { 0 };
	uint8_t *buffer = pages(PAGE, true);
	struct fid_mr *mr;

	open_end(&end, form_bits());
	for (int i = 0; i < 2; i++) {
		uint64_t flag = i ? FI_HMEM_HOST_ALLOC : FI_HMEM_DEVICE_ONLY;
		int got = fi_mr_reg(end.domain, buffer, PAGE, ALL_ACCESS, 0, 1, flag, &mr, NULL);

		IS(got, -FI_EBADFLAGS);
		if (!got)
			MUST(fi_close(&mr->fid));
	}
	close_end(&end);
}

/* "-FI_EBADFLAGS: Returned if the specified flags are not supported by the provider." */
static void unknown_flags(void)
{
	struct end end = { 0 };
	uint8_t *buffer = pages(PAGE, true);
	struct fid_mr *mr = NULL;

	open_end(&end, form_bits());
	for (int bit = 0; bit < 64; bit++) {
		int got = fi_mr_reg(end.domain, buffer, PAGE, ALL_ACCESS, 0, 1, 1ULL << bit, &mr, NULL);

		if (!got)
			MUST(fi_close(&mr->fid));
		HOLDS(!got || got == -FI_EBADFLAGS, "flag 1 << %d: %d (%s)", bit, got, fi_strerror(-got));
	}
	/* bits that are no flags of fi_mr(3) */
	IS(fi_mr_reg(end.domain, buffer, PAGE, ALL_ACCESS, 0, 1, 1ULL << 63, &mr, NULL), -FI_EBADFLAGS);
	close_end(&end);
}

/* "Must be > 0"; "must be 0"; a call that fails leaves nothing behind and does not write its
 * output. */
static void wrong_arguments(void)
{
	struct end end = { 0 };
	uint8_t *buffer = pages(PAGE, true);
	struct iovec iov[2] = { { buffer, 16 }, { buffer + 64, 0 } };
	struct fid_mr *mr = (struct fid_mr *)1;

	open_end(&end, form_bits());
	HOLDS(fi_mr_reg(end.domain, buffer, 0, ALL_ACCESS, 0, 1, 0, &mr, NULL) < 0, "no bytes");
	HOLDS(fi_mr_reg(end.domain, buffer, PAGE, ALL_ACCESS, 1, 1, 0, &mr, NULL) < 0, "an offset");
	HOLDS(fi_mr_reg(end.domain, buffer, SIZE_MAX, ALL_ACCESS, 0, 1, 0, &mr, NULL) < 0, "around the end of addresses");
	HOLDS(fi_mr_regv(end.domain, iov, 2, ALL_ACCESS, 0, 1, 0, &mr, NULL) < 0, "a buffer of no bytes");
	HOLDS(fi_mr_regv(end.domain, iov, 1, ALL_ACCESS, 8, 1, 0, &mr, NULL) < 0, "an offset");
	HOLDS(fi_mr_regattr(end.domain, &(struct fi_mr_attr){ .mr_iov = iov, .iov_count = 1, .access = ALL_ACCESS, .offset = 4 }, 0,
			    &mr) < 0, "an offset");
	HOLDS(mr == (struct fid_mr *)1, "mr is written by a call that failed");
	MUST(fi_mr_reg(end.domain, buffer, 1, ALL_ACCESS, 0, 1, 0, &mr, NULL));
	MUST(fi_close(&mr->fid));
	/* each right alone, none, and all */
	for (int i = 0; i < 6; i++) {
		static const uint64_t rights[] = { FI_SEND, FI_RECV, FI_READ, FI_WRITE, FI_REMOTE_READ, FI_REMOTE_WRITE };

		IS(fi_mr_reg(end.domain, buffer, PAGE, rights[i], 0, 1, 0, &mr, NULL), 0);
		MUST(fi_close(&mr->fid));
	}
	close_end(&end);
}

/* FI_COLLECTIVE "should be paired with FI_SEND and/or FI_RECV": one access right among the others.
 * A provider without it returns an errno that the page lists. */
static void collective_access(void)
{
	struct end end = { 0 };
	uint8_t *buffer = pages(PAGE, true);
	struct fid_mr *mr;
	int got;

	open_end(&end, form_bits());
	got = fi_mr_reg(end.domain, buffer, PAGE, FI_SEND | FI_RECV | FI_COLLECTIVE, 0, 1, 0, &mr, NULL);
	printf("FI_COLLECTIVE: %d (%s)\n", got, fi_strerror(-got));
	HOLDS(!got, "\"Supported access permissions are the bitwise OR of\" ... FI_COLLECTIVE: %d", got);
	if (!got)
		MUST(fi_close(&mr->fid));
	close_end(&end);
}

/* auth_key and auth_key_size: "This field is ignored unless the fabric is opened with API version
 * 1.5 or greater." */
static void auth_key_before_1_5(void)
{
	struct end end = { .version = FI_VERSION(1, 4) };
	uint8_t *buffer = pages(PAGE, true);
	struct iovec iov = { buffer, PAGE };
	struct fid_mr *mr;

	open_end(&end, FI_MR_BASIC);
	IS(fi_mr_regattr(end.domain, &(struct fi_mr_attr){ .mr_iov = &iov, .iov_count = 1, .access = ALL_ACCESS,
							    .auth_key_size = 12345, .auth_key = (void *)8 }, 0, &mr), 0);
	MUST(fi_close(&mr->fid));
	close_end(&end);
}

/* "Only peer endpoints that are programmed to use the same authorization key may access the memory
 * region." */
static void auth_key_of_a_region(void)
{
	struct end end = { 0 };
	uint8_t *buffer = pages(PAGE, true), byte = 7, key[] = "a key of some length";
	struct iovec iov = { buffer, PAGE };

	if (connected(&end, form_bits())) {
		struct fid_mr *mr, *other;

		MUST(fi_mr_regattr(end.domain, &(struct fi_mr_attr){ .mr_iov = &iov, .iov_count = 1, .access = ALL_ACCESS, .requested_key = 1,
								      .auth_key_size = sizeof key, .auth_key = key }, 0, &mr));
		MUST(fi_mr_regattr(end.domain, &(struct fi_mr_attr){ .mr_iov = &iov, .iov_count = 1, .access = ALL_ACCESS, .requested_key = 2,
								      .auth_key_size = 0, .auth_key = (void *)8 }, 0, &other));
		tell_region(&end, other, buffer);
		tell_region(&end, mr, buffer);
		meet();
		IS(buffer[0], 7);
		IS(buffer[1], 0);
		MUST(fi_close(&mr->fid));
		MUST(fi_close(&other->fid));
	} else {
		struct remote with = hear_region(&end), without = hear_region(&end);

		IS(do_write(&end, &byte, 1, &with, 0), 0);
		HOLDS(do_write(&end, &byte, 1, &without, 1) > 0, "reached without its authorization key");
		meet();
		forget_region(&end, &with);
		forget_region(&end, &without);
	}
	close_end(&end);
}

/* ---- fi_getinfo ---- */

static struct fi_info *list_of(int mr_mode, uint64_t mode, uint32_t version, uint64_t caps, int *ret)
{
	struct end end = { .version = version, .info_mode = mode, .caps = caps };
	struct fi_info *list = NULL;

	*ret = getinfo_of(&end, mr_mode, FI_SOURCE, &list);
	return list;
}

/* "If a provider requires the behavior ... it will leave the bit set ... Otherwise, the provider
 * can clear the bit": every set of bits has an answer, no answer has a bit that was not offered,
 * and the returned info opens a domain. */
static void every_set_of_bits(void)
{
	for (int bits = 0; bits < 1 << 10; bits++) {
		int mr_mode = bits << 2, ret;
		struct fi_info *list = list_of(mr_mode, 0, 0, 0, &ret), *info;
		bool can = !pins() || mr_mode & (FI_MR_ALLOCATED | FI_MR_MMU_NOTIFY);

		HOLDS(can ? !ret : ret == -FI_ENODATA, "mr_mode 0x%x: %d", mr_mode, ret);
		for (info = list; info; info = info->next) {
			int got = info->domain_attr->mr_mode;

			HOLDS(!(got & ~mr_mode), "mr_mode 0x%x of 0x%x", got, mr_mode);
			HOLDS(!(got & (FI_MR_HMEM | FI_MR_COLLECTIVE)), "mr_mode 0x%x without the capability", got);
			HOLDS(got & FI_MR_RAW || info->domain_attr->mr_key_size <= 8, "mr_mode 0x%x: keys of %zu bytes", got,
			      info->domain_attr->mr_key_size);
		}
		if (list)
			fi_freeinfo(list);
		if (failures > 20)
			return;
	}
}

/* FI_MR_BASIC: "must be set alone and not paired with mr_mode bits"; "it will not be cleared".
 * FI_MR_SCALABLE, FI_LOCAL_MR. */
static void basic_and_scalable(void)
{
	static const uint32_t versions[] = { FI_VERSION(1, 3), FI_VERSION(1, 4), FI_VERSION(1, 5), FI_VERSION(1, 8), FI_VERSION(1, 9),
					     FI_VERSION(1, 17) };

	for (size_t i = 0; i < sizeof versions / sizeof *versions; i++) {
		uint32_t version = versions[i];
		int ret;
		struct fi_info *list = list_of(FI_MR_BASIC, 0, version, 0, &ret);

		HOLDS(!ret, "1.%u: FI_MR_BASIC: %d", FI_MINOR(version), ret);
		for (struct fi_info *info = list; info; info = info->next)
			HOLDS(info->domain_attr->mr_mode == FI_MR_BASIC, "1.%u: FI_MR_BASIC is answered by 0x%x", FI_MINOR(version),
			      info->domain_attr->mr_mode);
		if (list)
			fi_freeinfo(list);
		list = list_of(FI_MR_BASIC, FI_LOCAL_MR, version, 0, &ret);
		HOLDS(!ret, "1.%u: FI_MR_BASIC with FI_LOCAL_MR: %d", FI_MINOR(version), ret);
		for (struct fi_info *info = list; info; info = info->next)
			HOLDS(info->domain_attr->mr_mode == FI_MR_BASIC, "1.%u: FI_MR_BASIC is answered by 0x%x", FI_MINOR(version),
			      info->domain_attr->mr_mode);
		if (list)
			fi_freeinfo(list);
		if (!pins()) {
			list = list_of(FI_MR_SCALABLE, 0, version, 0, &ret);
			HOLDS(!ret, "1.%u: FI_MR_SCALABLE: %d", FI_MINOR(version), ret);
			if (list)
				HOLDS(!(list->domain_attr->mr_mode & ~FI_MR_SCALABLE), "1.%u: FI_MR_SCALABLE is answered by 0x%x",
				      FI_MINOR(version), list->domain_attr->mr_mode);
			if (list)
				fi_freeinfo(list);
		}
		for (int other = 0; other < 10; other++) {
			int bit = 4 << other;

			list = list_of(FI_MR_BASIC | bit, 0, version, 0, &ret);
			/* the pages up to 1.8: "either be set alone, or in conjunction with
			 * FI_MR_LOCAL" */
			if (bit == FI_MR_LOCAL && version >= FI_VERSION(1, 5) && version <= FI_VERSION(1, 8))
				HOLDS(!ret, "1.%u: FI_MR_BASIC | FI_MR_LOCAL: %d", FI_MINOR(version), ret);
			else
				HOLDS(ret == -FI_ENODATA, "1.%u: FI_MR_BASIC | 0x%x: %d", FI_MINOR(version), bit,
				      ret);
			if (list)
				fi_freeinfo(list);
		}
	}
}

/* "When FI_MR_LOCAL is set, FI_LOCAL_MR is ignored." */
static void local_mr_is_ignored(void)
{
	int ret;
	struct fi_info *list = list_of(NATIVE | FI_MR_LOCAL, FI_LOCAL_MR, 0, 0, &ret), *without;

	IS(ret, 0);
	without = list_of(NATIVE | FI_MR_LOCAL, 0, 0, 0, &ret);
	IS(ret, 0);
	HOLDS(list->domain_attr->mr_mode == without->domain_attr->mr_mode, "0x%x with, 0x%x without", list->domain_attr->mr_mode,
	      without->domain_attr->mr_mode);
	fi_freeinfo(list);
	fi_freeinfo(without);
}

/* FI_MR_LOCAL: "must register all data buffers ... and provide a valid desc": all six access
 * rights, each by the operation that needs it. */
static void local_descriptors(void)
{
	struct end end = { .caps = FI_MSG | FI_RMA | FI_ATOMIC };
	uint8_t *remote = pages(PAGE, true), *local = pages(PAGE, true);

	if (connected(&end, form_bits() | FI_MR_LOCAL)) {
		struct fid_mr *mr = reg(&end, remote, PAGE, REMOTE, 1), *recv = reg(&end, local, PAGE, FI_RECV, 2);

		if (!(end.mode & FI_MR_LOCAL))
			die("FI_MR_LOCAL is not used");
		tell_region(&end, mr, remote);
		MUST(fi_recv(end.ep, local, PAGE, fi_mr_desc(recv), 0, NULL));
		meet();
		IS(completion(&end, SECONDS), 0);
		IS(local[PAGE - 1], 7);
		meet();
		MUST(fi_close(&mr->fid));
		MUST(fi_close(&recv->fid));
	} else {
		struct remote to = hear_region(&end);
		struct fid_mr *send = reg(&end, local, PAGE, FI_SEND, 1), *write = reg(&end, local, PAGE, FI_WRITE, 2),
			      *read = reg(&end, local, PAGE, FI_READ, 3);

		memset(local, 7, PAGE);
		meet();
		IS(DO(&end, fi_send(end.ep, local, PAGE, fi_mr_desc(send), 0, NULL)), 0);
		IS(DO(&end, fi_write(end.ep, local, PAGE, fi_mr_desc(write), 0, to.addr, to.key, NULL)), 0);
		memset(local, 0, PAGE);
		IS(DO(&end, fi_read(end.ep, local, PAGE, fi_mr_desc(read), 0, to.addr, to.key, NULL)), 0);
		IS(local[5], 7);
		meet();
		MUST(fi_close(&send->fid));
		MUST(fi_close(&write->fid));
		MUST(fi_close(&read->fid));
		forget_region(&end, &to);
	}
	close_end(&end);
}

/* "By default, the cache size is unlimited": the parameter's value when the user has not set it. */
static void cache_parameters(void)
{
	struct end end = { 0 };
	struct fi_param *params;
	int count;

	open_end(&end, NATIVE);
	MUST(fi_getparams(&params, &count));
	for (int i = 0; i < count; i++)
		if (strstr(params[i].name, "MR_CACHE"))
			printf("%s = %s\n", params[i].name, params[i].value ?: "(unset)");
	fi_freeparams(params);
	close_end(&end);
}

static const struct test tests[] = {
	CASE(iface_is_ignored, "keys native handles"),
	CASE(flags_of_device_memory, "keys native"),
	CASE(unknown_flags, "keys native"),
	CASE(wrong_arguments, "keys native handles rawkeys"),
	CASE(collective_access, "keys native"),
	CASE(auth_key_before_1_5, "any"),
	CASE(auth_key_of_a_region, "keys handles native"),
	CASE(every_set_of_bits, "any"),
	CASE(basic_and_scalable, "any"),
	CASE(local_mr_is_ignored, "any"),
	CASE(local_descriptors, "keys native handles"),
	CASE(cache_parameters, "any"),
	{ 0 },
};
