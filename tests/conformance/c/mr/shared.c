/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */
/* Shared regions (weft_mr_ops of weft.h, docs/shared-regions.md) and advice (ibv_advise_mr(3)). */
#include "mr.h"

#include "weft.h"

static const struct weft_mr_ops *ops_of(struct end *end)
{
	void *table = NULL;

	MUST(fi_open_ops(&end->domain->fid, WEFT_MR_OPS, 0, &table, NULL));
	return table;
}

static bool resident(void *page)
{
	unsigned char there = 0;

	return !mincore(page, PAGE, &there) && there & 1;
}

/* The memory is shared: one process loads the values that the other stores, and peers access it
 * through the region of either process. */
static void stores_and_loads(void)
{
	struct end end = { .caps = FI_MSG | FI_RMA | FI_ATOMIC };
	struct weft_mr_attr attr = { .size = sizeof attr, .access = ALL_ACCESS, .requested_key = 1 };
	uint8_t handle[WEFT_MR_HANDLE_SIZE];
	volatile uint64_t *memory;
	struct fid_mr *mr;
	void *addr;
	size_t size = sizeof handle, len = 0;

	if (connected(&end, form_bits())) {
		const struct weft_mr_ops *ops = ops_of(&end);

		MUST(ops->mr_alloc(end.domain, 3 * PAGE, &attr, &addr, &mr));
		memory = addr;
		for (size_t i = 0; i < 3 * PAGE / 8; i++)
			if (memory[i])
				die("not zero");
		MUST(ops->mr_export(mr, ALL_ACCESS, handle, &size));
		IS(size, sizeof handle);
		tell(handle, sizeof handle);
		tell_region(&end, mr, addr);
		meet();
		IS(memory[0], 5);
		IS(memory[1], 6);
		memory[2] = 7;
		meet();
		/* "Memory outlives whoever allocated it" */
		MUST(ops->mr_free(mr));
		meet();
		meet();
	} else {
		const struct weft_mr_ops *ops = ops_of(&end);
		struct remote to;
		uint64_t value = 6, got = 0;

		hear(handle, sizeof handle);
		MUST(ops->mr_import(end.domain, handle, sizeof handle, &attr, &addr, &len, &mr));
		HOLDS(len >= 3 * PAGE, "%zu bytes", len);
		memory = addr;
		to = hear_region(&end);
		memory[0] = 5;
		IS(do_write(&end, &value, 8, &to, 8), 0);
		meet();
		meet();
		IS(memory[2], 7);
		IS(do_read(&end, &got, 8, &to, 16) != 0 || got == 7, true);
		meet();
		IS(memory[1], 6);
		memory[3] = 8;
		IS(ops->mr_import(end.domain, handle, sizeof handle, &attr, &addr, &len, &mr), -FI_ENOENT);
		MUST(ops->mr_free(mr));
		meet();
		forget_region(&end, &to);
	}
	close_end(&end);
}

/* "addr: Where the memory should begin ... or NULL for anywhere": any address is accepted as a
 * hint; with WEFT_MAP_FIXED the call uses this address or returns -FI_EADDRINUSE. */
static void hints_of_addresses(void)
{
	struct end end = { 0 };
	uint8_t *taken = pages(4 * PAGE, true), *nothing = pages(64 * PAGE, false), handle[WEFT_MR_HANDLE_SIZE];
	const struct weft_mr_ops *ops;
	size_t size = sizeof handle, len;
	struct fid_mr *mr, *other;
	void *addr;

	open_end(&end, form_bits());
	ops = ops_of(&end);
	void *hints[] = { NULL, nothing, nothing + 1, nothing + PAGE + 123, taken, taken + 5, (void *)1, (void *)PAGE, (void *)~0ULL,
			  (void *)(~0ULL << 12), (void *)(1ULL << 47), (void *)(1ULL << 63) };

	for (size_t i = 0; i < sizeof hints / sizeof *hints; i++) {
		struct weft_mr_attr attr = { .size = sizeof attr, .access = ALL_ACCESS, .requested_key = 1, .addr = hints[i] };
		int got = ops->mr_alloc(end.domain, PAGE, &attr, &addr, &mr);

		HOLDS(!got, "mr_alloc, hint %p: %d (%s)", hints[i], got, fi_strerror(-got));
		if (got)
			continue;
		HOLDS(addr != taken, "over other memory");
		size = sizeof handle;
		MUST(ops->mr_export(mr, ALL_ACCESS, handle, &size));
		attr.requested_key = 2;
		got = ops->mr_import(end.domain, handle, size, &attr, &addr, &len, &other);
		HOLDS(!got, "mr_import, hint %p: %d (%s)", hints[i], got, fi_strerror(-got));
		if (!got)
			MUST(ops->mr_free(other));
		MUST(ops->mr_free(mr));
	}
	struct weft_mr_attr fixed = { .size = sizeof fixed, .access = ALL_ACCESS, .requested_key = 1, .addr = taken,
				      .map_flags = WEFT_MAP_FIXED };

	IS(ops->mr_alloc(end.domain, PAGE, &fixed, &addr, &mr), -FI_EADDRINUSE);
	fixed.addr = nothing;
	IS(ops->mr_alloc(end.domain, PAGE, &fixed, &addr, &mr), 0);
	HOLDS(addr == nothing, "%p instead of %p", addr, (void *)nothing);
	MUST(fi_close(&mr->fid));
	close_end(&end);
}

/* Access: "mr_export grants some of that"; "mr_import asks for some of what the grant has";
 * modified handles. */
static void what_was_not_granted(void)
{
	struct end end = { 0 };
	struct weft_mr_attr attr = { .size = sizeof attr, .access = FI_REMOTE_READ | FI_SEND, .requested_key = 1 };
	uint8_t handle[WEFT_MR_HANDLE_SIZE], changed[WEFT_MR_HANDLE_SIZE], *plain = pages(PAGE, true);
	const struct weft_mr_ops *ops;
	size_t size = 4, len;
	struct fid_mr *mr, *other;
	void *addr;

	open_end(&end, form_bits());
	ops = ops_of(&end);
	MUST(ops->mr_alloc(end.domain, PAGE, &attr, &addr, &mr));
	IS(ops->mr_export(mr, FI_REMOTE_READ, handle, &size), -FI_ETOOSMALL);
	IS(size, WEFT_MR_HANDLE_SIZE);
	IS(ops->mr_export(mr, FI_REMOTE_WRITE, handle, &size), -FI_EACCES);
	MUST(ops->mr_export(mr, FI_REMOTE_READ, handle, &size));
	attr.requested_key = 2;
	attr.access = FI_REMOTE_READ | FI_SEND;
	IS(ops->mr_import(end.domain, handle, size, &attr, &addr, &len, &other), -FI_EACCES);
	attr.access = FI_REMOTE_READ;
	for (size_t i = 0; i < size; i++) {
		int got;

		memcpy(changed, handle, size);
		changed[i] ^= 1;
		got = ops->mr_import(end.domain, changed, size, &attr, &addr, &len, &other);
		HOLDS(got == -FI_EINVAL, "byte %zu changed: %d", i, got);
	}
	IS(ops->mr_import(end.domain, handle, size - 1, &attr, &addr, &len, &other), -FI_EINVAL);
	MUST(ops->mr_import(end.domain, handle, size, &attr, &addr, &len, &other));
	/* the key is in use, unless weft chooses it: after an error nothing is set */
	void *before = addr;
	struct fid_mr *same = NULL;
	len = 12345;
	int again = ops->mr_import(end.domain, handle, size, &attr, &addr, &len, &same);
	if (again) {
		IS(again, -FI_ENOKEY);
		IS(len, 12345);
		HOLDS(addr == before && !same, "%p and %p are set", addr, (void *)same);
	} else {
		MUST(ops->mr_free(same));
	}
	/* "no more than it has" */
	IS(ops->mr_export(other, FI_REMOTE_READ | FI_SEND, handle, &size), -FI_EACCES);
	MUST(ops->mr_free(other));
	MUST(ops->mr_free(mr));
	IS(ops->mr_import(end.domain, handle, size, &attr, &addr, &len, &other), -FI_ENOENT);
	mr = reg(&end, plain, PAGE, ALL_ACCESS, 1);
	IS(ops->mr_export(mr, FI_REMOTE_READ, handle, &size), -FI_EOPNOTSUPP);
	IS(ops->mr_free(mr), -FI_EINVAL);
	MUST(fi_close(&mr->fid));
	close_end(&end);
}

/* "The memory is unmapped here": also while a peer that has accessed it is idle. Many regions of 1
 * MiB, opened and closed, do not add up. */
static long shared_kib(void)
{
	FILE *file = fopen("/proc/self/status", "r");
	char line[256];
	long value = 0;

	while (fgets(line, sizeof line, file))
		sscanf(line, "RssShmem: %ld", &value);
	fclose(file);
	return value;
}

static void memory_goes_with_its_region(void)
{
	enum { ROUNDS = 300, LENGTH = 1 << 20 };
	struct end end = { 0 };
	struct weft_mr_attr attr = { .size = sizeof attr, .access = ALL_ACCESS, .requested_key = 1 };
	uint8_t byte = 7;

	if (connected(&end, form_bits())) {
		const struct weft_mr_ops *ops = ops_of(&end);
		long before = shared_kib();
		struct fid_mr *mr;
		void *addr;

		for (int i = 0; i < ROUNDS; i++) {
			MUST(ops->mr_alloc(end.domain, LENGTH, &attr, &addr, &mr));
			memset(addr, 1, LENGTH);
			tell_region(&end, mr, addr);
			meet();
			MUST(ops->mr_free(mr));
		}
		HOLDS(shared_kib() - before < 8 * LENGTH >> 10, "%ld KiB of closed regions are mapped", shared_kib() - before);
	} else {
		for (int i = 0; i < ROUNDS; i++) {
			struct remote to = hear_region(&end);

			IS(do_write(&end, &byte, 1, &to, 0), 0);
			forget_region(&end, &to);
			meet();
		}
	}
	close_end(&end);
}

/* ibv_advise_mr(3): after the call the pages are present; "EFAULT: when the range requested is out
 * of the MR bounds, or when parts of it are not part of the process address space"; EPERM, ENOENT,
 * EINVAL, ENOTSUP. */
static void advice(void)
{
	struct end end = { 0 };
	uint8_t *buffer = pages(16 * PAGE, false), *other = pages(PAGE, true);
	const struct weft_mr_ops *ops;
	struct fid_mr *mr, *only_read, *pinned;
	uint64_t count = 0;

	if (pins())
		skip("no on-demand paging");
	map_at(buffer, 15 * PAGE, 0);
	madvise(buffer, 15 * PAGE, MADV_DONTNEED);
	open_end(&end, form_bits());
	ops = ops_of(&end);
	mr = reg(&end, buffer, 16 * PAGE, ALL_ACCESS, 1);
	only_read = reg(&end, buffer, PAGE, FI_SEND | FI_REMOTE_READ, 2);
	struct weft_mr_range ranges[2] = { { mr, (uintptr_t)buffer + PAGE + 5, 10 }, { mr, (uintptr_t)buffer + 4 * PAGE - 1, 2 } };

	IS(ops->advise(end.domain, WEFT_ADVISE_PREFETCH_WRITE, WEFT_ADVISE_FLUSH, ranges, 2), 0);
	for (size_t i = 0; i < 15; i++)
		IS(resident(buffer + i * PAGE), i == 1 || i == 3 || i == 4);
	IS(ops->mr_prefetched(mr, &count), 0);
	IS(count, 3);
	/* no page is faulted in */
	ranges[0] = (struct weft_mr_range){ mr, (uintptr_t)buffer, 15 * PAGE };
	IS(ops->advise(end.domain, WEFT_ADVISE_PREFETCH_NO_FAULT, WEFT_ADVISE_FLUSH, ranges, 1), 0);
	HOLDS(!resident(buffer + 8 * PAGE), "a page is faulted in");
	IS(ops->advise(end.domain, WEFT_ADVISE_PREFETCH, WEFT_ADVISE_FLUSH, ranges, 1), 0);
	for (size_t i = 0; i < 15; i++)
		IS(resident(buffer + i * PAGE), true);
	/* ranges outside the address space, and out of bounds: with the flag, and without it (the
	 * page has one list of errors for both) */
	for (uint32_t flags = 0; flags < 2; flags++) {
		ranges[0] = (struct weft_mr_range){ mr, (uintptr_t)buffer + 15 * PAGE, PAGE + 1 };
		HOLDS(ops->advise(end.domain, WEFT_ADVISE_PREFETCH, flags, ranges, 1) == -FI_EFAULT, "flags %u: out of bounds is not EFAULT", flags);
		ranges[0] = (struct weft_mr_range){ mr, (uintptr_t)buffer - 1, 2 };
		HOLDS(ops->advise(end.domain, WEFT_ADVISE_PREFETCH, flags, ranges, 1) == -FI_EFAULT, "flags %u: before is not EFAULT", flags);
		ranges[0] = (struct weft_mr_range){ mr, (uintptr_t)buffer, UINT64_MAX };
		HOLDS(ops->advise(end.domain, WEFT_ADVISE_PREFETCH, flags, ranges, 1) == -FI_EFAULT, "flags %u: around is not EFAULT", flags);
		ranges[0] = (struct weft_mr_range){ only_read, (uintptr_t)buffer, 1 };
		HOLDS(ops->advise(end.domain, WEFT_ADVISE_PREFETCH_WRITE, flags, ranges, 1) == -FI_EPERM, "flags %u: not EPERM", flags);
		IS(ops->advise(end.domain, WEFT_ADVISE_PREFETCH, flags, ranges, 1), 0);
		IS(ops->advise(end.domain, 77, flags, ranges, 1), -FI_EOPNOTSUPP);
		IS(ops->advise(end.domain, WEFT_ADVISE_PREFETCH, flags, ranges, 0), -FI_EINVAL);
	}
	ranges[0] = (struct weft_mr_range){ mr, (uintptr_t)buffer + 15 * PAGE, PAGE };
	IS(ops->advise(end.domain, WEFT_ADVISE_PREFETCH, WEFT_ADVISE_FLUSH, ranges, 1), -FI_EFAULT);
	IS(ops->advise(end.domain, WEFT_ADVISE_PREFETCH, 1U << 7, ranges, 1), -FI_EINVAL);
	MUST(fi_close(&only_read->fid));
	MUST(fi_close(&mr->fid));
	close_end(&end);
	/* a region without on-demand paging */
	struct end native_end = { 0 };

	open_end(&native_end, NATIVE);
	pinned = reg(&native_end, other, PAGE, ALL_ACCESS, 1);
	ranges[0] = (struct weft_mr_range){ pinned, (uintptr_t)other, 1 };
	IS(ops_of(&native_end)->advise(native_end.domain, WEFT_ADVISE_PREFETCH, WEFT_ADVISE_FLUSH, ranges, 1), -FI_ENOENT);
	MUST(fi_close(&pinned->fid));
	close_end(&native_end);
}

/* ibv_open_xrcd(3), called through the domain's table. */
static void xrc_domains(void)
{
	struct end end = { 0 };
	char name[] = "/var/tmp/weft-xrcd-XXXXXX", path[64];
	const struct weft_mr_ops *ops;
	struct fid *first, *second;
	int fd = mkstemp(name);

	if (fd < 0)
		die("mkstemp");
	open_end(&end, form_bits());
	ops = ops_of(&end);
	IS(ops->xrcd_open(end.domain, NULL, fd, 0, &first, NULL), -FI_EAGAIN);
	MUST(ops->xrcd_open(end.domain, NULL, fd, O_CREAT, &first, NULL));
	IS(ops->xrcd_open(end.domain, NULL, fd, O_CREAT | O_EXCL, &second, NULL), -FI_EINVAL);
	/* "If the XRCD exists, this flag has no effect"; the same inode by another name */
	snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
	MUST(ops->xrcd_open(end.domain, path, -1, 0, &second, NULL));
	IS(fi_close(second), 0);
	MUST(ops->xrcd_open(end.domain, NULL, fd, O_CREAT, &second, NULL));
	IS(ops->xrcd_close(second), 0);
	IS(ops->xrcd_close(first), 0);
	/* "If this is the last reference, the XRCD will be destroyed" */
	IS(ops->xrcd_open(end.domain, NULL, fd, 0, &first, NULL), -FI_EAGAIN);
	/* "If fd equals -1, no inode is associated": two such domains are different */
	MUST(ops->xrcd_open(end.domain, NULL, -1, O_CREAT, &first, NULL));
	MUST(ops->xrcd_open(end.domain, NULL, -1, O_CREAT | O_EXCL, &second, NULL));
	IS(fi_close(first), 0);
	IS(fi_close(second), 0);
	close(fd);
	IS(ops->xrcd_open(end.domain, NULL, fd, O_CREAT, &first, NULL), -FI_EBADF);
	unlink(name);
	close_end(&end);
}

static const struct test tests[] = {
	CASE(stores_and_loads, "keys native handles"),
	CASE(hints_of_addresses, "keys native"),
	CASE(what_was_not_granted, "keys native"),
	CASE(memory_goes_with_its_region, "keys native handles"),
	CASE(advice, "keys"),
	CASE(xrc_domains, "any"),
	{ 0 },
};
