/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */
/* The memory of regions: present or absent pages, replaced pages, refreshed ones, several buffers;
 * and the operations that each access right permits. */
#include "mr.h"

static bool follows(struct end *end) { return !(end->mode & (FI_MR_ALLOCATED | FI_MR_MMU_NOTIFY)); }

/* "The iov parameter is optional": without one the whole region is refreshed. */
static void refresh_of_the_whole_region(void)
{
	enum { LENGTH = 16 * PAGE };
	struct end end = { 0 };
	uint8_t *buffer = pages(LENGTH, false), byte = 7;

	if (pins() && strcmp(form->name, "notify"))
		skip("pages of such regions do not change");
	if (connected(&end, form_bits())) {
		struct fid_mr *mr = reg(&end, buffer, LENGTH, ALL_ACCESS, 1);

		tell_region(&end, mr, buffer);
		map_at(buffer, LENGTH, 0);
		IS(fi_mr_refresh(mr, NULL, 0, 0), 0);
		meet();
		meet();
		for (int i = 0; i < 16; i++)
			IS(buffer[(size_t)i * PAGE + 5], 7);
		/* the pages are replaced */
		map_at(buffer, LENGTH, 1);
		IS(fi_mr_refresh(mr, NULL, 0, 0), 0);
		meet();
		meet();
		for (int i = 0; i < 16; i++)
			IS(buffer[(size_t)i * PAGE + 5], 7);
		MUST(fi_close(&mr->fid));
	} else {
		struct remote to = hear_region(&end);

		for (int round = 0; round < 2; round++) {
			meet();
			for (int i = 0; i < 16; i++)
				IS(do_write(&end, &byte, 1, &to, (size_t)i * PAGE + 5), 0);
			meet();
		}
		forget_region(&end, &to);
	}
	close_end(&end);
}

/* Every second page is mapped and refreshed, one at a time: these can be written to, the pages
 * between them cannot. */
static void refresh_piece_by_piece(void)
{
	enum { COUNT = 64 };
	struct end end = { 0 };
	uint8_t *buffer = pages(COUNT * PAGE, false), byte = 7;

	if (connected(&end, form_bits())) {
		struct fid_mr *mr = reg(&end, buffer, COUNT * PAGE, ALL_ACCESS, 1);

		for (size_t i = 0; i < COUNT; i += 2) {
			struct iovec part = { buffer + i * PAGE, PAGE };
			int got;

			map_at(part.iov_base, PAGE, 0);
			got = fi_mr_refresh(mr, &part, 1, 0);
			if (got)
				die("page %zu: fi_mr_refresh is %d (%s)", i, got, fi_strerror(-got));
		}
		tell_region(&end, mr, buffer);
		meet();
		for (size_t i = 0; i < COUNT; i += 2)
			IS(buffer[i * PAGE], 7);
		/* the device still has resources for other regions */
		MUST(fi_close(&reg(&end, &end, sizeof end, FI_SEND, 2)->fid));
		MUST(fi_close(&mr->fid));
	} else {
		struct remote to = hear_region(&end);

		for (size_t i = 0; i < COUNT; i++) {
			int got;

			/* where the device tracks page mappings itself (on-demand paging), such a
			 * write ends the connection */
			if (i % 2 && follows(&end))
				continue;
			got = do_write(&end, &byte, 1, &to, i * PAGE);
			HOLDS(i % 2 ? got > 0 : !got, "page %zu: %d", i, got);
		}
		IS(next_event(&end, 0, NULL), -1);
		meet();
		forget_region(&end, &to);
	}
	close_end(&end);
}

/* The same with 65,536 parts, in a random order; at the end all pages of the region are present. */
static void refresh_of_many_parts(void)
{
	enum { COUNT = 131072, PARTS = COUNT / 2 };
	static uint32_t order[PARTS];
	struct end end = { 0 };
	uint8_t *buffer = pages(COUNT * PAGE, false), byte = 7;
	unsigned seed = 5;

	if (connected(&end, form_bits())) {
		struct fid_mr *mr = reg(&end, buffer, COUNT * PAGE, ALL_ACCESS, 1);
		double start;

		for (uint32_t i = 0; i < PARTS; i++) {
			uint32_t j = (uint32_t)rand_r(&seed) % (i + 1);

			order[i] = order[j];
			order[j] = i;
		}
		if (mmap(buffer, COUNT * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1,
			 0) != buffer)
			die("mmap");
		start = now();
		for (uint32_t i = 0; i < PARTS; i++) {
			struct iovec part = { buffer + 2 * order[i] * PAGE, PAGE };
			int got = fi_mr_refresh(mr, &part, 1, 0);

			if (got)
				die("part %u: fi_mr_refresh is %d (%s)", i, got, fi_strerror(-got));
		}
		printf("%.3f s\n", now() - start);
		tell_region(&end, mr, buffer);
		meet();
		for (size_t i = 0; i < 1000; i++)
			IS(buffer[i * 130 * PAGE], 7);
		MUST(fi_close(&mr->fid));
	} else {
		struct remote to = hear_region(&end);

		for (size_t i = 0; i < 1000; i++)
			IS(do_write(&end, &byte, 1, &to, i * 130 * PAGE), 0);
		HOLDS(do_write(&end, &byte, 1, &to, 131 * PAGE) > 0 || follows(&end), "a page that was not in the list of ranges");
		meet();
		forget_region(&end, &to);
	}
	close_end(&end);
}

/* "an application can register any range of addresses ..., whether or not those addresses are
 * backed"; "or the data transfers will fail": neither the target nor the connection of others is
 * affected; then the pages are mapped, unmapped, and mapped again. */
static void memory_that_comes_and_goes(void)
{
	struct end end = { 0 };
	uint8_t *buffer = pages(4 * PAGE, false), byte = 7;

	if (pins() && strcmp(form->name, "notify"))
		skip("regions need their memory here (FI_MR_ALLOCATED)");
	if (connected(&end, form_bits())) {
		struct fid_mr *mr = reg(&end, buffer, 4 * PAGE, ALL_ACCESS, 1);
		struct iovec page = { buffer, PAGE };

		tell_region(&end, mr, buffer);
		meet();
		meet();
		MUST(fi_close(&end.ep->fid));
		end.ep = connect_more(&end, true);
		for (int round = 0; round < 3; round++) {
			map_at(buffer, PAGE, 0);
			if (end.mode & FI_MR_MMU_NOTIFY)
				IS(fi_mr_refresh(mr, &page, 1, 0), 0);
			meet();
			meet();
			IS(buffer[0], 7);
			munmap(buffer, PAGE);
			if (end.mode & FI_MR_MMU_NOTIFY)
				IS(fi_mr_refresh(mr, &page, 1, 0), 0);
			meet();
			meet();
			MUST(fi_close(&end.ep->fid));
			end.ep = connect_more(&end, true);
		}
		MUST(fi_close(&mr->fid));
	} else {
		struct remote to = hear_region(&end);

		meet();
		HOLDS(do_write(&end, &byte, 1, &to, 0) > 0, "a write to memory that is not there");
		meet();
		MUST(fi_close(&end.ep->fid));
		while (next_event(&end, 0.2, NULL) != -1)
			;
		end.ep = connect_more(&end, false);
		for (int round = 0; round < 3; round++) {
			meet();
			IS(do_write(&end, &byte, 1, &to, 0), 0);
			meet();
			meet();
			HOLDS(do_write(&end, &byte, 1, &to, 0) > 0, "round %d: a write to memory that went", round);
			meet();
			MUST(fi_close(&end.ep->fid));
			while (next_event(&end, 0.2, NULL) != -1)
				;
			end.ep = connect_more(&end, false);
		}
		forget_region(&end, &to);
	}
	close_end(&end);
}

/* Without FI_MR_ALLOCATED "the underlying virtual address to physical page mapping is allowed to
 * change, and the provider will ensure the corresponding MR is updated accordingly" (current
 * page). */
static void memory_that_is_exchanged(void)
{
	struct end end = { 0 };
	uint8_t *buffer = pages(4 * PAGE, true), byte = 0;

	if (pins() && strcmp(form->name, "notify"))
		skip("regions keep their memory here (FI_MR_ALLOCATED)");
	if (connected(&end, form_bits())) {
		struct fid_mr *mr = reg(&end, buffer, 4 * PAGE, ALL_ACCESS, 1);

		tell_region(&end, mr, buffer);
		for (int round = 1; round < 50; round++) {
			map_at(buffer, 4 * PAGE, 100);
			if (end.mode & FI_MR_MMU_NOTIFY)
				IS(fi_mr_refresh(mr, &(struct iovec){ buffer, 4 * PAGE }, 1, 0), 0);
			meet();
			meet();
			IS(buffer[PAGE + 1], round);
			IS(buffer[PAGE + 2], 100);
		}
		MUST(fi_close(&mr->fid));
	} else {
		struct remote to = hear_region(&end);

		for (int round = 1; round < 50; round++) {
			uint8_t got = 0;

			meet();
			byte = (uint8_t)round;
			IS(do_write(&end, &byte, 1, &to, PAGE + 1), 0);
			IS(do_read(&end, &got, 1, &to, PAGE + 2), 0);
			IS(got, 100);
			meet();
		}
		forget_region(&end, &to);
	}
	close_end(&end);
}

/* "all registered memory regions must be backed by physical memory pages at the time": otherwise
 * the call returns an errno and has no other effect. */
static void allocated_memory_only(void)
{
	struct end end = { 0 };
	uint8_t *hole = pages(2 * PAGE, false), *half = pages(2 * PAGE, true);
	struct fid_mr *mr;
	int got;

	munmap(half + PAGE, PAGE);
	open_end(&end, form_bits());
	if (!(end.mode & FI_MR_ALLOCATED))
		skip("FI_MR_ALLOCATED is not used");
	got = fi_mr_reg(end.domain, hole, PAGE, ALL_ACCESS, 0, 1, 0, &mr, NULL);
	HOLDS(got < 0, "memory that is not there is registered");
	got = fi_mr_reg(end.domain, half, 2 * PAGE, ALL_ACCESS, 0, 1, 0, &mr, NULL);
	HOLDS(got < 0, "memory of which one half is not there is registered");
	MUST(fi_mr_reg(end.domain, half, PAGE, ALL_ACCESS, 0, 1, 0, &mr, NULL));
	MUST(fi_close(&mr->fid));
	close_end(&end);
}

/* "Multiple memory buffers are registered as a single memory region": mr_iov_limit of them, one
 * more is refused. */
static void several_buffers(void)
{
	struct end end = { .caps = FI_MSG | FI_RMA | FI_ATOMIC };
	uint8_t *buffer = pages(64 * PAGE, true), from[8192], to_buf[8192];

	if (connected(&end, form_bits())) {
		size_t limit = end.info->domain_attr->mr_iov_limit, total = 0;
		struct iovec iov[64];
		struct fid_mr *mr;
		uint64_t total64;

		HOLDS(limit >= 1 && limit < 60, "mr_iov_limit %zu", limit);
		for (size_t i = 0; i < limit; i++) {
			/* of odd lengths, at descending addresses */
			iov[i] = (struct iovec){ buffer + (60 - i) * PAGE + i * 3, 100 + 37 * i };
			total += iov[i].iov_len;
		}
		iov[limit] = (struct iovec){ buffer, 1 };
		HOLDS(fi_mr_regv(end.domain, iov, limit + 1, ALL_ACCESS, 0, 1, 0, &mr, NULL) < 0, "%zu buffers", limit + 1);
		HOLDS(fi_mr_regv(end.domain, iov, 0, ALL_ACCESS, 0, 1, 0, &mr, NULL) < 0, "no buffers");
		MUST(fi_mr_regv(end.domain, iov, limit, ALL_ACCESS, 0, 1, 0, &mr, NULL));
		tell_region(&end, mr, iov[0].iov_base);
		total64 = total;
		tell(&total64, sizeof total64);
		meet();
		for (size_t i = 0, at = 0; i < limit; i++)
			for (size_t n = 0; n < iov[i].iov_len; n++, at++)
				if (((uint8_t *)iov[i].iov_base)[n] != (uint8_t)(at * 7 + 1))
					die("buffer %zu, byte %zu", i, n);
		for (size_t i = 0; i < limit; i++) {
			IS(((uint8_t *)iov[i].iov_base)[-1], 0);
			IS(((uint8_t *)iov[i].iov_base)[iov[i].iov_len], 0);
		}
		MUST(fi_close(&mr->fid));
	} else {
		struct remote to = hear_region(&end);
		uint64_t total;

		hear(&total, sizeof total);
		for (size_t i = 0; i < total; i++)
			from[i] = (uint8_t)(i * 7 + 1);
		IS(do_write(&end, from, total, &to, 0), 0);
		IS(do_read(&end, to_buf, total, &to, 0), 0);
		HOLDS(!memcmp(from, to_buf, total), "read otherwise than written");
		for (uint64_t at = 0; at + 50 <= total; at += 31)
			IS(do_write(&end, from + at, 50, &to, at), 0);
		HOLDS(do_write(&end, from, 2, &to, total - 1) > 0, "one byte too many");
		meet();
		forget_region(&end, &to);
	}
	close_end(&end);
}

/* The access right of the target's region that each operation needs. */
static void rights_of_peers(void)
{
	static const struct {
		uint64_t access;
		bool write, read, atomic, fetch;
	} rows[] = {
		{ FI_REMOTE_READ, false, true, false, false },
		/* "the target buffer of an RMA write or atomic operation"; those that fetch "must be enabled for
		 * remote read access" (fi_atomic(3)), which a device with native keys does not check */
		{ FI_REMOTE_WRITE, true, false, true, false },
		{ FI_REMOTE_READ | FI_REMOTE_WRITE, true, true, true, true },
		{ FI_SEND | FI_RECV | FI_READ | FI_WRITE | FI_REMOTE_READ, false, true, false, false },
	};
	enum { OPS = 6 };
	struct end end = { .caps = FI_MSG | FI_RMA | FI_ATOMIC };
	uint64_t *buffer = (uint64_t *)pages(PAGE, true), value = 5, old;

	if (connected(&end, form_bits())) {
		for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
			for (int op = 0; op < OPS; op++) {
				struct fid_mr *mr = reg(&end, buffer, PAGE, rows[i].access, 1);
				uint64_t before = buffer[0] = 0x1234;
				bool fetches = native(&end) ? rows[i].atomic : rows[i].fetch;
				bool may = op == 0 ? rows[i].write : op == 1 ? rows[i].read : op == 2 ? rows[i].atomic : fetches;
				char lost;

				tell_region(&end, mr, buffer);
				meet();
				if (!may)
					HOLDS(buffer[0] == before, "access 0x%" PRIx64 ", operation %d: refused, and done", rows[i].access, op);
				MUST(fi_close(&mr->fid));
				hear(&lost, 1);
				if (lost) {
					MUST(fi_close(&end.ep->fid));
					while (next_event(&end, 0.1, NULL) != -1)
						;
					end.ep = connect_more(&end, true);
				}
			}
	} else {
		static const char *names[] = { "write", "read", "add", "fetch and add", "atomic read", "compare and swap" };

		for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
			for (int op = 0; op < OPS; op++) {
				struct remote to = hear_region(&end);
				bool fetches = native(&end) ? rows[i].atomic : rows[i].fetch;
				bool may = op == 0 ? rows[i].write : op == 1 ? rows[i].read : op == 2 ? rows[i].atomic : fetches;
				int got = op == 0 ? do_write(&end, &value, 8, &to, 0) :
					  op == 1 ? do_read(&end, &value, 8, &to, 0) :
					  op == 2 ? do_add(&end, 1, &to, 0) :
					  op == 3 ? do_fetch_add(&end, 1, &old, &to, 0) :
					  op == 4 ? do_fetch(&end, &old, &to, 0) :
						    do_swap_if(&end, 8, 0x1234, &old, &to, 0);
				char lost;

				HOLDS(may ? !got : got > 0, "access 0x%" PRIx64 ": %s is %d (%s)", rows[i].access, names[op], got,
				      fi_strerror(got < 0 ? -got : got));
				meet();
				forget_region(&end, &to);
				lost = got && native(&end);
				HOLDS(lost || !got || got == FI_EACCES || got == FI_EKEYREJECTED, "the connection is lost: %d", got);
				tell(&lost, 1);
				if (lost) {
					MUST(fi_close(&end.ep->fid));
					while (next_event(&end, 0.1, NULL) != -1)
						;
					end.ep = connect_more(&end, false);
				}
			}
	}
	close_end(&end);
}

/* FI_MR_LOCAL: a descriptor of a region with the operation's access right is accepted. Without that
 * bit, before API 1.22, "the desc parameter into data transfer operations will be ignored". */
static void descriptors_are_ignored(void)
{
	struct end end = { .caps = FI_MSG | FI_RMA | FI_ATOMIC };
	uint8_t *buffer = pages(64 * PAGE, true), *local = pages(64 * PAGE, true);
	void *junk[] = { (void *)8, (void *)0xdeadbeefULL, (void *)~7ULL, &end, local };

	if (connected(&end, form_bits())) {
		struct fid_mr *mr = reg(&end, buffer, 64 * PAGE, ALL_ACCESS, 1);

		tell_region(&end, mr, buffer);
		for (size_t i = 0; i < 10; i++)
			MUST(fi_recv(end.ep, local, i < 5 ? 16 : 64 * PAGE, junk[i % 5], 0, NULL));
		meet();
		for (size_t i = 0; i < 10; i++)
			IS(completion(&end, SECONDS), 0);
		meet();
		MUST(fi_close(&mr->fid));
	} else {
		struct remote to = hear_region(&end);
		struct fid_mr *closed = reg(&end, local, PAGE, ALL_ACCESS, 1);
		void *stale = fi_mr_desc(closed);
		size_t lens[] = { 16, 64 * PAGE };

		meet();
		for (size_t n = 0; n < 2; n++)
			for (size_t i = 0; i < 5; i++) {
				memset(local, (int)i + 1, lens[n]);
				IS(DO(&end, fi_send(end.ep, local, lens[n], junk[i], 0, NULL)), 0);
			}
		MUST(fi_close(&closed->fid));
		for (size_t n = 0; n < 2; n++)
			for (size_t i = 0; i < 6; i++) {
				void *desc = i < 5 ? junk[i] : stale;

				IS(DO(&end, fi_write(end.ep, local, lens[n], desc, 0, to.addr, to.key, NULL)), 0);
				IS(DO(&end, fi_read(end.ep, local, lens[n], desc, 0, to.addr, to.key, NULL)), 0);
			}
		meet();
		forget_region(&end, &to);
	}
	close_end(&end);
}

/* "Relaxed enforcement ... is permitted, ... provided security is maintained": a receive into
 * memory that the process itself may not write to fails, whatever access the region was registered
 * with. */
static void local_memory_that_may_not_be_written(void)
{
	struct end end = { 0 };
	uint8_t *buffer = pages(16 * PAGE, true), *other = pages(16 * PAGE, true);
	int got;

	memset(other, 7, 16 * PAGE);
	if (connected(&end, form_bits() | FI_MR_LOCAL)) {
		struct fid_mr *mr;
		ssize_t posted;

		mprotect(buffer, 16 * PAGE, PROT_READ);
		mr = reg(&end, buffer, 16 * PAGE, FI_SEND, 1);
		posted = fi_recv(end.ep, buffer, 16 * PAGE, fi_mr_desc(mr), 0, NULL);
		meet();
		if (!posted)
			HOLDS(completion(&end, SECONDS) > 0, "received into memory that may not be written");
		IS(buffer[0], 0);
		meet();
		MUST(fi_close(&mr->fid));
	} else {
		struct fid_mr *mr = reg(&end, other, 16 * PAGE, FI_SEND, 1);
		ssize_t posted;

		meet();
		posted = fi_send(end.ep, other, 16 * PAGE, fi_mr_desc(mr), 0, NULL);
		meet();
		got = posted ? 0 : poll_one(&end, NULL);
		HOLDS(got != 0 || posted, "the send is a success");
		MUST(fi_close(&end.ep->fid));
		end.ep = NULL;
		MUST(fi_close(&mr->fid));
	}
	close_end(&end);
}

/* "Failing to update a range will result in an error being returned" (current page). */
static void refresh_of_what_is_not_there(void)
{
	struct end end = { 0 };
	uint8_t *buffer = pages(4 * PAGE, false);
	struct fid_mr *mr;
	struct iovec part = { buffer + PAGE, 2 * PAGE };

	if (pins())
		skip("a refresh of unmapped pages succeeds on this device");
	open_end(&end, form_bits());
	mr = reg(&end, buffer, 4 * PAGE, ALL_ACCESS, 1);
	map_at(buffer, 2 * PAGE, 0);
	HOLDS(fi_mr_refresh(mr, &part, 1, 0) < 0, "one page of two is not there, and fi_mr_refresh is 0");
	part.iov_len = PAGE;
	IS(fi_mr_refresh(mr, &part, 1, 0), 0);
	MUST(fi_close(&mr->fid));
	close_end(&end);
}

/* A transfer that begins inside a region and ends outside it is refused, and so is one whose end
 * wraps around the address space. */
static void bounds(void)
{
	struct end end = { 0 };
	uint8_t *buffer = pages(4 * PAGE, true), byte[2 * PAGE] = { 7 };

	if (connected(&end, form_bits())) {
		struct fid_mr *mr = reg(&end, buffer + PAGE, PAGE, ALL_ACCESS, 1);

		tell_region(&end, mr, buffer + PAGE);
		meet();
		for (size_t i = 0; i < 4 * PAGE; i++)
			if (buffer[i] && (i < PAGE || i >= 2 * PAGE))
				die("byte %zu is written", i);
		IS(next_event(&end, 0.1, NULL), -1);
		meet();
		MUST(fi_close(&mr->fid));
	} else {
		struct remote to = hear_region(&end);

		IS(do_write(&end, byte, PAGE, &to, 0), 0);
		HOLDS(do_write(&end, byte, PAGE + 1, &to, 0) > 0, "one byte too many");
		HOLDS(do_write(&end, byte, 1, &to, PAGE) > 0, "the byte behind the end");
		HOLDS(do_write(&end, byte, 1, &to, (uint64_t)-1) > 0, "the byte before the beginning");
		HOLDS(do_write(&end, byte, 2 * PAGE, &to, (uint64_t)0 - PAGE) > 0, "around the beginning");
		HOLDS(do_write(&end, byte, 2, &to, UINT64_MAX - to.addr) > 0, "around the end of addresses");
		IS(do_write(&end, byte, 1, &to, PAGE - 1), 0);
		meet();
		meet();
		forget_region(&end, &to);
	}
	close_end(&end);
}

static const struct test tests[] = {
	CASE(refresh_of_the_whole_region, "keys notify"),
	CASE(refresh_piece_by_piece, "notify"),
	CASE(refresh_of_many_parts, "notify"),
	CASE(memory_that_comes_and_goes, "keys handles virtual notify"),
	CASE(memory_that_is_exchanged, "keys handles virtual rawkeys notify"),
	CASE(allocated_memory_only, "native keys handles raw"),
	CASE(several_buffers, "native keys handles virtual rawkeys notify"),
	CASE(rights_of_peers, "native keys handles virtual rawkeys"),
	CASE(descriptors_are_ignored, "keys native handles"),
	CASE(local_memory_that_may_not_be_written, "keys native"),
	CASE(refresh_of_what_is_not_there, "keys handles"),
	CASE(bounds, "keys handles virtual rawkeys"),
	{ 0 },
};
