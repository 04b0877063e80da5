/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */
/* Odd orders, large numbers and memory that changes, where the page promises an error and no other
 * effect. */
#include "mr.h"

/* A key that is closed and registered again for other memory never accesses the old memory. The
 * initiator needs no message about it. */
static void a_key_for_other_memory(void)
{
	struct end end = { 0 };
	uint8_t *buffer = pages(2 * PAGE, true), byte = 0;

	if (connected(&end, form_bits())) {
		struct fid_mr *mr = reg(&end, buffer, PAGE, ALL_ACCESS, 1);

		tell_region(&end, mr, buffer);
		for (int i = 0; i < 500; i++) {
			uint8_t *at = buffer + (i & 1 ? PAGE : 0), *old = buffer + (i & 1 ? 0 : PAGE);

			meet();
			IS(at[7], (uint8_t)i);
			MUST(fi_close(&mr->fid));
			at[7] = 0xee;
			mr = reg(&end, old, PAGE, ALL_ACCESS, 1);
			meet();
			meet();
			IS(at[7], 0xee);
			IS(old[7], (uint8_t)(i + 1));
			IS(next_event(&end, 0, NULL), -1);
			meet();
		}
		MUST(fi_close(&mr->fid));
	} else {
		struct remote to = hear_region(&end);

		for (int i = 0; i < 500; i++) {
			byte = (uint8_t)i;
			IS(do_write(&end, &byte, 1, &to, 7), 0);
			meet();
			meet();
			byte = (uint8_t)(i + 1);
			IS(do_write(&end, &byte, 1, &to, 7), 0);
			meet();
			meet();
		}
	}
	close_end(&end);
}

/* Keys belong to a domain: two domains of a process use the same key, and each endpoint accesses
 * the region of its own domain. */
static void one_key_in_two_domains(void)
{
	struct end end = { 0 }, second = { 0 };
	uint8_t *buffer = pages(2 * PAGE, true), byte = 7;
	bool target = connected(&end, form_bits());

	open_end(&second, form_bits());
	second.ep = connect_more(&second, target);
	if (target) {
		struct fid_mr *mr = reg(&end, buffer, PAGE, ALL_ACCESS, 1), *other = reg(&second, buffer + PAGE, PAGE, ALL_ACCESS, 1),
			      *lone = reg(&second, buffer + PAGE, PAGE, ALL_ACCESS, 2);

		tell_region(&end, mr, buffer);
		tell_region(&second, other, buffer + PAGE);
		tell_region(&second, lone, buffer + PAGE);
		meet();
		IS(buffer[0], 7);
		IS(buffer[PAGE], 8);
		IS(buffer[1], 0);
		IS(buffer[PAGE + 1], 0);
		MUST(fi_close(&mr->fid));
		MUST(fi_close(&other->fid));
		MUST(fi_close(&lone->fid));
	} else {
		struct remote to = hear_region(&end), other = hear_region(&second), lone = hear_region(&second);

		IS(do_write(&end, &byte, 1, &to, 0), 0);
		byte = 8;
		IS(do_write(&second, &byte, 1, &other, 0), 0);
		if (!(end.mode & FI_MR_RAW))
			HOLDS(do_write(&end, &byte, 1, &lone, 1) > 0, "a key of another domain");
		meet();
		forget_region(&end, &to);
		forget_region(&second, &other);
		forget_region(&second, &lone);
	}
	close_end(&second);
	close_end(&end);
}

/* 100,000 regions, accessed in a random order; half of them are closed in between. */
static void many_regions(void)
{
	enum { COUNT = 100000, STEP = 64 };
	static struct fid_mr *mrs[COUNT];
	struct end end = { 0 };
	uint8_t *buffer = pages((size_t)COUNT * STEP, true), byte = 7;
	unsigned seed = 3;

	if (connected(&end, form_bits())) {
		for (size_t i = 0; i < COUNT; i++)
			mrs[i] = reg(&end, buffer + i * STEP, STEP, ALL_ACCESS, 1000003 * i);
		meet();
		meet();
		for (size_t i = 0; i < COUNT; i += 2)
			MUST(fi_close(&mrs[i]->fid));
		meet();
		meet();
		IS(next_event(&end, 0, NULL), -1);
		meet();
		for (size_t i = 1; i < COUNT; i += 2)
			MUST(fi_close(&mrs[i]->fid));
	} else {
		meet();
		for (int round = 0; round < 2; round++) {
			for (int i = 0; i < 5000; i++) {
				uint64_t n = (uint64_t)rand_r(&seed) % COUNT;
				struct remote to = { .key = 1000003 * n };
				int got = do_write(&end, &byte, 1, &to, n % STEP);

				if (round && n % 2 == 0 ? got <= 0 : got)
					die("round %d, region %" PRIu64 ": %d", round, n, got);
			}
			meet();
			meet();
		}
	}
	close_end(&end);
}

/* "an application can register any range of addresses in their virtual address space". */
static void any_range(void)
{
	struct end end = { 0 };
	uint8_t *buffer = pages(PAGE, true), byte = 7;
	static const uint64_t lens[] = { 1ULL << 30, 1ULL << 40, 1ULL << 46, (1ULL << 47) - PAGE };

	if (pins())
		skip("regions need their memory here (FI_MR_ALLOCATED)");
	if (connected(&end, form_bits())) {
		for (size_t i = 0; i < sizeof lens / sizeof *lens; i++) {
			/* regions that begin at a low address: the buffer is in the last two */
			struct fid_mr *mr;
			int got = fi_mr_reg(end.domain, (void *)(16 * PAGE), lens[i], ALL_ACCESS, 0, 1 + i, 0, &mr, NULL);
			uint64_t at = (uintptr_t)buffer - 16 * PAGE;
			char inside = at < lens[i];

			HOLDS(!got, "0x%" PRIx64 " bytes: %d (%s)", lens[i], got, fi_strerror(-got));
			if (got)
				exit(1);
			tell_region(&end, mr, (void *)(16 * PAGE));
			tell(&at, 8);
			tell(&inside, 1);
			meet();
			IS(buffer[0], inside ? 7 : 0);
			buffer[0] = 0;
			MUST(fi_close(&mr->fid));
		}
	} else {
		for (size_t i = 0; i < sizeof lens / sizeof *lens; i++) {
			struct remote to = hear_region(&end);
			uint64_t at;
			char inside;

			hear(&at, 8);
			hear(&inside, 1);
			if (inside)
				IS(do_write(&end, &byte, 1, &to, at), 0);
			meet();
			forget_region(&end, &to);
		}
	}
	close_end(&end);
}

/* "or the data transfers will fail": local buffers that are not mapped, or may not be written to,
 * end in an error of the operation; the process survives. */
static void local_memory_that_is_not_there(void)
{
	struct end end = { 0 };
	uint8_t *buffer = pages(64 * PAGE, true), *hole = pages(64 * PAGE, false);

	if (connected(&end, form_bits())) {
		for (int round = 0; round < 2; round++) {
			struct fid_mr *mr = reg(&end, buffer, 64 * PAGE, ALL_ACCESS, 1);

			tell_region(&end, mr, buffer);
			meet();
			MUST(fi_close(&mr->fid));
			MUST(fi_close(&end.ep->fid));
			while (next_event(&end, 0.1, NULL) != -1)
				;
			end.ep = connect_more(&end, true);
		}
	} else {
		for (int round = 0; round < 2; round++) {
			struct remote to = hear_region(&end);
			ssize_t posted;

			mmap(hole, PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
			posted = round ? DO(&end, fi_read(end.ep, hole, 16 * PAGE, NULL, 0, to.addr, to.key, NULL)) :
					 DO(&end, fi_write(end.ep, hole + PAGE, 16 * PAGE, NULL, 0, to.addr, to.key, NULL));
			HOLDS(posted, "round %d: memory that is not there", round);
			meet();
			forget_region(&end, &to);
			MUST(fi_close(&end.ep->fid));
			while (next_event(&end, 0.1, NULL) != -1)
				;
			end.ep = connect_more(&end, false);
		}
	}
	close_end(&end);
}

/* A write to memory that the target may only read fails. */
static void memory_that_may_not_be_written(void)
{
	struct end end = { 0 };
	uint8_t *buffer = pages(PAGE, true), byte = 7;

	if (connected(&end, form_bits())) {
		struct fid_mr *mr;
		char could;

		mprotect(buffer, PAGE, PROT_READ);
		could = !fi_mr_reg(end.domain, buffer, PAGE, REMOTE, 0, 1, 0, &mr, NULL);
		tell(&could, 1);
		if (could) {
			tell_region(&end, mr, buffer);
			meet();
			IS(buffer[0], 0);
			MUST(fi_close(&mr->fid));
		}
	} else {
		char could;

		hear(&could, 1);
		if (could) {
			struct remote to = hear_region(&end);

			HOLDS(do_write(&end, &byte, 1, &to, 0) > 0, "written to");
			meet();
			forget_region(&end, &to);
		}
	}
	close_end(&end);
}

/* Objects that fi_mr_bind(3) and other calls refuse. */
static void wrong_objects(void)
{
	struct end end = { .caps = FI_MSG | FI_RMA | FI_RMA_EVENT };
	struct fi_cntr_attr cntr_attr = { .events = FI_CNTR_EVENTS_COMP };
	uint8_t *buffer = pages(PAGE, true), raw[512];
	struct fid_mr *mr, *other;
	struct fid_cntr *cntr;
	uint64_t base, key;
	size_t size = sizeof raw;

	open_end(&end, form_bits() | FI_MR_RMA_EVENT);
	MUST(fi_cntr_open(end.domain, &cntr_attr, &cntr, NULL));
	MUST(fi_mr_reg(end.domain, buffer, PAGE, ALL_ACCESS, 0, 1, FI_RMA_EVENT, &mr, NULL));
	other = reg(&end, buffer, PAGE, ALL_ACCESS, 2);
	HOLDS(fi_mr_bind(mr, &end.cq->fid, FI_REMOTE_WRITE) < 0, "bound to a completion queue");
	HOLDS(fi_mr_bind(mr, &other->fid, FI_REMOTE_WRITE) < 0, "bound to a region");
	HOLDS(fi_mr_bind(mr, &end.eq->fid, 0) < 0, "bound to an event queue");
	HOLDS(fi_mr_bind(mr, &cntr->fid, 0) < 0, "bound to a counter of nothing");
	HOLDS(fi_mr_bind(mr, &cntr->fid, FI_SEND) < 0, "bound to a counter of sends");
	HOLDS(fi_mr_bind(other, &cntr->fid, FI_REMOTE_WRITE) < 0, "a region without FI_RMA_EVENT is bound");
	HOLDS(fi_mr_raw_attr(other, &base, raw, &size, 1) < 0, "fi_mr_raw_attr takes a flag");
	size = sizeof raw;
	MUST(fi_mr_raw_attr(other, &base, raw, &size, 0));
	HOLDS(fi_mr_map_raw(end.domain, base, raw, size, &key, 1) < 0, "fi_mr_map_raw takes a flag");
	HOLDS(fi_mr_map_raw(end.domain, base, raw, 0, &key, 0) < 0, "a raw key of no bytes");
	HOLDS(fi_mr_refresh(other, &(struct iovec){ buffer, PAGE }, 1, 1) < 0, "fi_mr_refresh takes a flag");
	HOLDS(fi_mr_refresh(other, &(struct iovec){ buffer - 1, PAGE }, 1, 0) < 0, "fi_mr_refresh of a range outside the region");
	HOLDS(fi_mr_refresh(other, &(struct iovec){ buffer + PAGE - 1, 2 }, 1, 0) < 0, "fi_mr_refresh of a range outside the region");
	HOLDS(fi_mr_refresh(mr, &(struct iovec){ buffer, PAGE }, 1, 0) < 0, "fi_mr_refresh of a disabled region");
	MUST(fi_mr_bind(mr, &cntr->fid, FI_REMOTE_WRITE));
	MUST(fi_mr_enable(mr));
	MUST(fi_close(&mr->fid));
	MUST(fi_close(&other->fid));
	MUST(fi_close(&cntr->fid));
	close_end(&end);
}

/* Buffers that overlap in one region, and regions that overlap: each is accessed by its own
 * offsets. */
static void overlapping_buffers(void)
{
	struct end end = { 0 };
	uint8_t *buffer = pages(PAGE, true), data[48];
	struct iovec iov[3] = { { buffer, 16 }, { buffer + 8, 16 }, { buffer, 16 } };

	if (connected(&end, form_bits())) {
		struct fid_mr *mr, *other = reg(&end, buffer + 4, 64, ALL_ACCESS, 2);

		MUST(fi_mr_regv(end.domain, iov, 3, ALL_ACCESS, 0, 1, 0, &mr, NULL));
		for (int i = 0; i < 32; i++)
			buffer[i] = (uint8_t)(i + 1);
		tell_region(&end, mr, buffer);
		meet();
		IS(buffer[9], 99);
		MUST(fi_close(&other->fid));
		MUST(fi_close(&mr->fid));
	} else {
		struct remote to = hear_region(&end);

		IS(do_read(&end, data, 48, &to, 0), 0);
		for (int i = 0; i < 48; i++)
			IS(data[i], (i < 16 ? i : i < 32 ? i - 8 : i - 32) + 1);
		data[0] = 99;
		IS(do_write(&end, data, 1, &to, 17), 0);
		meet();
		forget_region(&end, &to);
	}
	close_end(&end);
}

/* "may fail or result in accesses to invalid memory": a receive is posted with the descriptor of a
 * closed region. The process survives, and the receive completes, with success or in error. */
static void a_descriptor_that_was_closed(void)
{
	struct end end = { 0 };
	uint8_t *buffer = pages(16 * PAGE, true);
	int got;

	if (connected(&end, form_bits() | FI_MR_LOCAL)) {
		struct fid_mr *mr = reg(&end, buffer, 16 * PAGE, ALL_ACCESS, 1);

		MUST(fi_recv(end.ep, buffer, 16 * PAGE, fi_mr_desc(mr), 0, NULL));
		got = fi_close(&mr->fid);
		HOLDS(!got || got == -FI_EBUSY, "fi_close is %d", got);
		meet();
		completion(&end, SECONDS);
		meet();
		if (got)
			MUST(fi_close(&mr->fid));
	} else {
		struct fid_mr *mr = reg(&end, buffer, 16 * PAGE, ALL_ACCESS, 1);

		meet();
		got = DO(&end, fi_send(end.ep, buffer, 16 * PAGE, fi_mr_desc(mr), 0, NULL));
		meet();
		MUST(fi_close(&mr->fid));
	}
	close_end(&end);
}

/* A peer that writes without pause while the region is refreshed: its operations may fail during
 * the refresh, the connection stays. */
static void refreshed_while_written(void)
{
	struct end end = { 0 };
	uint8_t *buffer = pages(16 * PAGE, true), data[3 * PAGE];
	int count = 0, refusals = 0;

	memset(data, 7, sizeof data);
	if (connected(&end, form_bits())) {
		struct fid_mr *mr = reg(&end, buffer, 16 * PAGE, ALL_ACCESS, 1);

		tell_region(&end, mr, buffer);
		meet();
		for (int i = 0; i < 2000; i++) {
			struct iovec part = { buffer + (size_t)(i % 14) * PAGE, 2 * PAGE };
			int got;

			if (i % 3 == 0)
				map_at(part.iov_base, part.iov_len, 1);
			got = fi_mr_refresh(mr, &part, 1, 0);
			if (got)
				die("refresh %d: %d (%s)", i, got, fi_strerror(-got));
		}
		tell("e", 1);
		meet();
		IS(next_event(&end, 0, NULL), -1);
		IS(fi_mr_refresh(mr, &(struct iovec){ buffer, 16 * PAGE }, 1, 0), 0);
		meet();
		meet();
		for (size_t i = 0; i < 3 * PAGE; i++)
			if (buffer[i + 100] != 9)
				die("byte %zu is %d", i, buffer[i + 100]);
		MUST(fi_close(&mr->fid));
	} else {
		struct remote to = hear_region(&end);
		char c;

		meet();
		while (!called()) {
			int got = do_write(&end, data, sizeof data, &to, (uint64_t)(count++ % 13) * PAGE);

			refusals += got == FI_EACCES || got == FI_EKEYREJECTED;
			if (got && got != FI_EACCES && got != FI_EKEYREJECTED)
				die("write %d: %d (%s)", count, got, fi_strerror(got < 0 ? -got : got));
		}
		hear(&c, 1);
		printf("%d writes, %d refused\n", count, refusals);
		meet();
		meet();
		memset(data, 9, sizeof data);
		IS(do_write(&end, data, sizeof data, &to, 100), 0);
		meet();
		forget_region(&end, &to);
	}
	close_end(&end);
}

/* Both sides open, access and close regions at the same time: the closes of the two sides
 * overlap. */
static void both_sides_close(void)
{
	struct end end = { 0 };
	uint8_t *buffer = pages(PAGE, true), byte = 7;
	struct times times = { 0 };

	connected(&end, form_bits());
	for (int i = 0; i < 500 && !failures; i++) {
		struct fid_mr *mr = reg(&end, buffer, PAGE, ALL_ACCESS, 1);
		struct remote to;
		double start;

		tell_region(&end, mr, buffer);
		to = hear_region(&end);
		IS(do_write(&end, &byte, 1, &to, 0), 0);
		meet();
		start = now();
		MUST(fi_close(&mr->fid));
		add_time(&times, now() - start);
		forget_region(&end, &to);
	}
	MUST_BE_SHORT(times, "a close");
	meet();
	IS(next_event(&end, 0, NULL), -1);
	meet();
	close_end(&end);
}

/* The data of a write is in memory when the write has completed: at a message of the initiator the
 * target closes the region at once. */
static void closed_behind_the_completion(void)
{
	struct end end = { 0 };
	uint8_t *buffer = pages(16 * PAGE, true), *data = pages(16 * PAGE, true);

	memset(data, 7, 16 * PAGE);
	if (connected(&end, form_bits())) {
		for (int i = 0; i < 300; i++) {
			struct fid_mr *mr;

			memset(buffer, 0, 16 * PAGE);
			mr = reg(&end, buffer, 16 * PAGE, REMOTE, 1);
			tell_region(&end, mr, buffer);
			meet();
			MUST(fi_close(&mr->fid));
			if (memcmp(buffer, data, 16 * PAGE))
				die("round %d: bytes are missing", i);
		}
	} else {
		for (int i = 0; i < 300; i++) {
			struct remote to = hear_region(&end);

			IS(do_write(&end, data, 16 * PAGE, &to, 0), 0);
			forget_region(&end, &to);
			meet();
		}
	}
	close_end(&end);
}

static const struct test tests[] = {
	CASE(a_key_for_other_memory, "keys"),
	CASE(one_key_in_two_domains, "keys rawkeys"),
	CASE(many_regions, "keys"),
	CASE(any_range, "keys handles virtual"),
	CASE(local_memory_that_is_not_there, "keys native"),
	CASE(memory_that_may_not_be_written, "keys native handles"),
	CASE(wrong_objects, "keys native handles"),
	CASE(overlapping_buffers, "keys handles"),
	CASE(a_descriptor_that_was_closed, "keys native handles"),
	CASE(refreshed_while_written, "notify"),
	CASE(both_sides_close, "keys native handles rawkeys"),
	CASE(closed_behind_the_completion, "keys native handles"),
	{ 0 },
};
