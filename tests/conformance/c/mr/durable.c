/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */
/* FI_RMA_PMEM and FI_COMMIT_COMPLETE, per operation and as a default. */
#include "mr.h"

static char name[] = "/var/tmp/weft-durable-XXXXXX";

static void remove_file(void) { unlink(name); }

/* A file on a disk; it needs a name as long as it is used. */
static uint8_t *file_memory(size_t len)
{
	int fd = mkstemp(name);
	uint8_t *at;

	if (fd < 0 || ftruncate(fd, (off_t)len))
		die("%s: %s", name, strerror(errno));
	atexit(remove_file);
	at = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (at == MAP_FAILED)
		die("mmap: %s", strerror(errno));
	close(fd);
	memset(at, 0, len);
	return at;
}

static int writemsg(struct end *end, const void *buf, size_t len, struct remote *to, uint64_t at, uint64_t flags)
{
	struct iovec iov = { (void *)buf, len };
	struct fi_rma_iov rma = { to->addr + at, len, to->key };
	struct fi_msg_rma msg = { .msg_iov = &iov, .iov_count = 1, .rma_iov = &rma, .rma_iov_count = 1, .data = 5 };

	return DO(end, fi_writemsg(end->ep, &msg, flags));
}

static void commit(uint64_t op_flags)
{
	struct end end = { .caps = FI_MSG | FI_RMA | FI_RMA_PMEM, .op_flags = op_flags };
	uint8_t *buffer = file_memory(4 * PAGE), data[PAGE];

	memset(data, 7, sizeof data);
	if (connected(&end, form_bits())) {
		struct fid_mr *mr, *plain = reg(&end, buffer + 2 * PAGE, PAGE, ALL_ACCESS, 2);

		MUST(fi_mr_reg(end.domain, buffer, PAGE, ALL_ACCESS, 0, 1, FI_RMA_PMEM, &mr, NULL));
		tell_region(&end, mr, buffer);
		tell_region(&end, plain, buffer + 2 * PAGE);
		meet();
		IS(buffer[0], 7);
		IS(buffer[PAGE - 1], 7);
		MUST(fi_close(&mr->fid));
		MUST(fi_close(&plain->fid));
	} else {
		struct remote to = hear_region(&end), plain = hear_region(&end);

		if (op_flags) {
			IS(do_write(&end, data, PAGE, &to, 0), 0);
		} else {
			IS(writemsg(&end, data, PAGE, &to, 0, FI_COMMIT_COMPLETE | FI_COMPLETION), 0);
			IS(writemsg(&end, data, 16, &to, 16, FI_COMMIT_COMPLETE), 0);
			IS(writemsg(&end, data, 16, &to, 16, FI_DELIVERY_COMPLETE), 0);
			IS(writemsg(&end, data, 16, &plain, 16, 0), 0);
			HOLDS(writemsg(&end, data, 16, &plain, 16, FI_COMMIT_COMPLETE) != 0, "durable, and not registered with FI_RMA_PMEM");
		}
		meet();
		forget_region(&end, &to);
		forget_region(&end, &plain);
	}
	close_end(&end);
}

static void commit_of_one_write(void) { commit(0); }
static void commit_by_default(void) { commit(FI_COMMIT_COMPLETE); }

/* The flag belongs to the capability: without FI_RMA_PMEM it is -FI_EBADFLAGS. */
static void without_the_capability(void)
{
	struct end end = { 0 };
	uint8_t *buffer = file_memory(PAGE), byte = 7;
	struct fid_mr *mr;

	if (connected(&end, form_bits())) {
		IS(fi_mr_reg(end.domain, buffer, PAGE, ALL_ACCESS, 0, 1, FI_RMA_PMEM, &mr, NULL), -FI_EBADFLAGS);
		mr = reg(&end, buffer, PAGE, ALL_ACCESS, 1);
		tell_region(&end, mr, buffer);
		meet();
		IS(buffer[0], 0);
		MUST(fi_close(&mr->fid));
	} else {
		struct remote to = hear_region(&end);

		IS(writemsg(&end, &byte, 1, &to, 0, FI_COMMIT_COMPLETE), -FI_EBADFLAGS);
		meet();
		forget_region(&end, &to);
	}
	close_end(&end);
}

static const struct test tests[] = {
	CASE(commit_of_one_write, "keys native handles"),
	CASE(commit_by_default, "keys native"),
	CASE(without_the_capability, "keys native"),
	{ 0 },
};
