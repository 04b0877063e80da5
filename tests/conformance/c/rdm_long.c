/* Long messages between two processes, from fi_msg(3), fi_tagged(3), fi_mr(3) and fi_cq(3). Each byte of
 * each buffer and each field of each completion is compared; a source is overwritten as soon as its
 * send has completed.
 *
 *   rdm_long sizes PROV NODE      1 byte to 16 MiB around powers of two, tagged and not, before and after the receive
 *   rdm_long vectors PROV NODE    up to four pieces of any alignment at both sides, in both directions
 *   rdm_long reversed PROV NODE   64 messages in both directions, received in reversed order
 *   rdm_long truncated PROV NODE  receives that are shorter than the message
 *   rdm_long levels PROV NODE     FI_INJECT_COMPLETE, FI_TRANSMIT_COMPLETE and FI_DELIVERY_COMPLETE
 *   rdm_long adjacent PROV NODE   receives that share pages, sends of the same bytes
 *   rdm_long remapped PROV NODE   other memory at the same address between messages, at both sides
 *   rdm_long mappings PROV NODE   read-only, shared and file-backed memory
 *
 * WEFT_RDM_LONG=1: more lengths. LONG_MR_LOCAL=1: buffers are in regions (FI_MR_LOCAL). A further
 * argument `auto` requests FI_PROGRESS_AUTO. Ends with 0, or says what went wrong. Plain libfabric 1.17. */
#define _GNU_SOURCE /* memfd_create, mremap */
#include "rdm_long.h"

#include <fcntl.h>

static struct message list[512];
static size_t listed;

static struct message *more(size_t len)
{
	struct message *m = &list[listed];

	IS(listed < sizeof list / sizeof *list);
	memset(m, 0, sizeof *m);
	m->len = m->room = len;
	m->seed = 1 + listed;
	m->tag = 0x1234567800000000ULL + listed;
	m->data = 0xfedcba9800000000ULL + listed;
	listed++;
	return m;
}

/* Transfers the list with receives that are there and with receives that are late. */
static void both_times(struct side *side, int me, struct batch how)
{
	for (int late = 0; late < 2; late++) {
		how.late = late;
		transfer_all(side, me, list, listed, how);
	}
	listed = 0;
}

static void sizes_of(int me)
{
	struct side side;

	open_one_of_two(&side, me);
	for (int tagged = 0; tagged < 2; tagged++) {
		for (size_t power = 1; power <= (all_forms() ? 16 : 4) * MIB; power *= all_forms() ? 2 : 4)
			for (size_t len = power - 1; len <= power + 1; len++) {
				struct message *m = more(len);

				m->tagged = tagged;
				m->with_data = listed % 3 == 0;
				m->room = len + (listed % 2 ? 0 : 1000);
			}
		both_times(&side, me, (struct batch){ 0 });
	}
	close_one_of_two(&side);
}

static void vectors_of(int me)
{
	struct side side;

	open_one_of_two(&side, me);
	for (int i = 0; i < (all_forms() ? 256 : 64); i++) {
		uint64_t chance = mixed((uint64_t)i);
		struct message *m = more(chance % (1UL << (4 + chance / 7 % 17)));

		m->tagged = i % 2;
		m->with_data = i % 5 == 0;
		m->out_pieces = 1 + chance / 3 % 4;
		m->in_pieces = 1 + chance / 5 % 4;
		m->room = m->len + (i % 3 ? 0 : chance % 5000);
	}
	both_times(&side, me, (struct batch){ .both = true });
	close_one_of_two(&side);
}

static void reversed_of(int me)
{
	struct side side;

	open_one_of_two(&side, me);
	for (int round = 0; round < 3; round++) {
		for (size_t i = 0; i < BATCH; i++) {
			struct message *m = more(i * (all_forms() ? 11003 : 3001) + (round == 1 ? 100 * KIB : 1));

			m->tagged = true;
			m->with_data = i % 2;
			m->in_pieces = round == 2 ? 1 + i % 3 : 1;
		}
		both_times(&side, me, (struct batch){ .both = true, .reversed = true });
	}
	close_one_of_two(&side);
}

static void truncated_of(int me)
{
	static const size_t lens[] = { 2, 100, 4096, 8193, 16 * KIB, 64 * KIB + 1, 300000, MIB, 2 * MIB + 5 };
	struct side side;

	open_one_of_two(&side, me);
	for (int pieces = 1; pieces <= 4; pieces += 3)
		for (int tagged = 0; tagged < 2; tagged++) {
			for (size_t i = 0; i < sizeof lens / sizeof *lens - !all_forms(); i++) {
				const size_t rooms[] = { 0, 1, lens[i] / 2, lens[i] - 1, lens[i], lens[i] < 5000 ? 1 : 4999 };

				for (size_t j = 0; j < sizeof rooms / sizeof *rooms; j++) {
					struct message *m = more(lens[i]);

					m->room = rooms[j];
					m->tagged = tagged;
					m->with_data = j % 2;
					m->out_pieces = m->in_pieces = (unsigned)pieces;
				}
			}
			both_times(&side, me, (struct batch){ 0 });
		}
	close_one_of_two(&side);
}

static void levels_of(int me)
{
	static const uint64_t levels[] = { FI_INJECT_COMPLETE, FI_TRANSMIT_COMPLETE, FI_DELIVERY_COMPLETE };
	struct side side;

	open_one_of_two(&side, me);
	for (size_t i = 0; i < 3; i++) {
		for (size_t len = 1; len <= (all_forms() ? 8 : 2) * MIB; len = len * 3 + 1)
			for (int tagged = 0; tagged < 2; tagged++) {
				struct message *m = more(len);

				m->tagged = tagged;
				m->flags = levels[i] | FI_COMPLETION;
			}
		both_times(&side, me, (struct batch){ .both = true });
	}
	close_one_of_two(&side);
}

static void adjacent_of(int me)
{
	enum { COUNT = 32 };
	static struct op ops[COUNT];
	size_t len = 50001;
	struct side side;

	open_one_of_two(&side, me);
	tight = true;
	for (int i = 0; i < 60; i++)
		more((size_t)(i * 4003 + 1))->tagged = i % 2;
	both_times(&side, me, (struct batch){ .both = true });
	tight = false;
	/* the sources overlap */
	fill(out_arena.bytes, MIB, 7);
	need_flat();
	fill(flat, MIB, 7);
	for (int round = 0; round < (all_forms() ? 4 : 2); round++, len *= 2) {
		memset(ops, 0, sizeof ops);
		memset(in_arena.bytes, GUARD, COUNT * len + 100);
		if (me == 1)
			for (size_t i = 0; i < COUNT; i++)
				PUT(&side, fi_trecv(side.ep, in_arena.bytes + i * len + 3, len, in_arena.desc, FI_ADDR_UNSPEC, i, 0, &ops[i]));
		meet(&side, 2);
		if (me == 0)
			for (size_t i = 0; i < COUNT; i++)
				PUT(&side, fi_tsend(side.ep, out_arena.bytes + i * 1001, len, out_arena.desc, side.peer, i, &ops[i]));
		for (size_t i = 0; i < COUNT; i++) {
			await(&side, &ops[i]);
			IS(ops[i].err == 0);
			if (me == 1) {
				IS(ops[i].entry.len == len && ops[i].entry.tag == i);
				IS(!memcmp(in_arena.bytes + i * len + 3, flat + i * 1001, len));
			}
		}
		if (me == 1)
			IS(all_are(in_arena.bytes, 3, GUARD) && all_are(in_arena.bytes + COUNT * len + 3, 97, GUARD));
		meet(&side, 2);
	}
	close_one_of_two(&side);
}

/* ---- memory ---- */

/* One message from memory of process 0 to memory of process 1. Process 1 posts late if `late`. */
static void move_one(struct side *side, int me, uint8_t *bytes, size_t len, void *desc, uint64_t tag, bool late)
{
	struct op op = { 0 };

	if (me == 1 && !late)
		PUT(side, fi_trecv(side->ep, bytes, len, desc, FI_ADDR_UNSPEC, tag, 0, &op));
	meet(side, 2);
	if (me == 0)
		PUT(side, fi_tsend(side->ep, bytes, len, desc, side->peer, tag, &op));
	if (me == 1 && late) {
		linger(side, 0.002);
		PUT(side, fi_trecv(side->ep, bytes, len, desc, FI_ADDR_UNSPEC, tag, 0, &op));
	}
	await(side, &op);
	if (op.err)
		die("message %llu of %zu bytes: %s", (unsigned long long)tag, len, fi_strerror(op.err));
	if (me == 1)
		IS(op.entry.len == len && op.entry.tag == tag);
}

static uint8_t *map(void *at, size_t len, int prot, int flags, int fd)
{
	uint8_t *bytes = mmap(at, len, prot, flags | (at ? MAP_FIXED : 0), fd, 0);

	IS(bytes != MAP_FAILED);
	return bytes;
}

static struct fid_mr *region(struct side *side, void *bytes, size_t len, uint64_t access, void **desc)
{
	static uint64_t key = 1000;
	struct fid_mr *mr = NULL;

	*desc = NULL;
	if (side->info->domain_attr->mr_mode & FI_MR_LOCAL) {
		MUST(fi_mr_reg(side->domain, bytes, len, access, 0, key++, 0, &mr, NULL));
		*desc = fi_mr_desc(mr);
	}
	return mr;
}

static void end_region(struct fid_mr *mr)
{
	if (mr)
		MUST(fi_close(&mr->fid));
}

static int file_of(size_t len)
{
	int fd = memfd_create("rdm_long", 0);

	IS(fd >= 0 && ftruncate(fd, (off_t)len) == 0);
	return fd;
}

static void remapped_of(int me)
{
	static const size_t lens[] = { 5000, 64 * KIB, 200 * KIB, MIB, 3 * MIB };
	struct side side;
	uint64_t tag = 1;

	open_one_of_two(&side, me);
	for (size_t which = 0; which < sizeof lens / sizeof *lens; which += all_forms() ? 1 : 2) {
		size_t len = lens[which], size = 4 * MIB;
		uint8_t *bytes = map(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1), *elsewhere;
		int fd = file_of(size);

		for (int step = 0; step < 16; step++, tag++) {
			void *desc;
			struct fid_mr *mr;
			pid_t forked;
			int status;

			switch (step % 8) {
			case 1: /* unmapped and mapped */
				munmap(bytes, size);
				map(bytes, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
				break;
			case 2: /* mapped over it */
				map(bytes, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1);
				break;
			case 3: /* a file */
				map(bytes, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd);
				break;
			case 4: /* pages of the file go */
				IS(ftruncate(fd, 0) == 0 && ftruncate(fd, (off_t)size) == 0);
				break;
			case 5: /* a private copy of the file */
				map(bytes, size, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd);
				break;
			case 6: /* other pages move there */
				elsewhere = map(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
				memset(elsewhere, 1, size);
				IS(mremap(elsewhere, size, size, MREMAP_MAYMOVE | MREMAP_FIXED, bytes) == bytes);
				break;
			case 7: /* pages are copied at the next write */
				forked = fork();
				if (forked == 0) {
					usleep(2000);
					_exit(0);
				}
				if (step == 15)
					IS(waitpid(forked, &status, 0) == forked);
				break;
			}
			mr = region(&side, bytes, size, me == 0 ? FI_SEND : FI_RECV, &desc);
			if (me == 0)
				fill(bytes + 7, len, tag);
			else
				memset(bytes, GUARD, size);
			move_one(&side, me, bytes + 7, len, desc, tag, step >= 8);
			if (me == 1) {
				must_be(bytes + 7, len, tag);
				IS(all_are(bytes, 7, GUARD) && all_are(bytes + 7 + len, size - 7 - len, GUARD));
			}
			if (step % 3 == 0)
				madvise(bytes, size, MADV_DONTNEED);
			end_region(mr);
		}
		while (waitpid(-1, NULL, WNOHANG) > 0)
			;
		munmap(bytes, size);
		close(fd);
	}
	close_one_of_two(&side);
}

static void mappings_of(int me)
{
	static const size_t lens[] = { 100, 4096, 20000, 64 * KIB, 200 * KIB, MIB + 1, 2 * MIB };
	struct side side;
	uint64_t tag = 1;

	open_one_of_two(&side, me);
	for (size_t which = 0; which < sizeof lens / sizeof *lens; which += all_forms() ? 1 : 2)
		for (int kind = 0; kind < 8; kind++, tag++) {
			size_t len = lens[which], size = 3 * MIB;
			int fd = file_of(size), read_only;
			uint8_t *bytes = map(NULL, size, PROT_READ | PROT_WRITE, kind % 2 ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS, kind % 2 ? fd : -1);
			char path[64];
			void *desc;
			struct fid_mr *mr;

			if (me == 0)
				fill(bytes, len, tag);
			else
				memset(bytes, GUARD, size);
			snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
			if (me == 0 && kind / 2 == 1) {
				IS(mprotect(bytes, size, PROT_READ) == 0);
			} else if (me == 0 && kind / 2 == 2) {
				/* a mapping of a file that is opened for reading only */
				IS(pwrite(fd, bytes, len, 0) == (ssize_t)len);
				read_only = open(path, O_RDONLY);
				IS(read_only >= 0);
				map(bytes, size, PROT_READ, kind % 2 ? MAP_SHARED : MAP_PRIVATE, read_only);
				close(read_only);
			} else if (me == 0 && kind == 6) {
				/* pages that no process has touched */
				map(bytes, size, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1);
			} else if (me == 1 && kind / 2 == 1) {
				/* receives into pages that are not there yet */
				IS(madvise(bytes, size, MADV_DONTNEED) == 0);
			}
			mr = region(&side, bytes, size, me == 0 ? FI_SEND : FI_RECV, &desc);
			move_one(&side, me, bytes, len, desc, tag, which % 2);
			if (me == 1 && kind == 6)
				IS(all_are(bytes, len, 0));
			else if (me == 1)
				must_be(bytes, len, tag);
			if (me == 1 && kind % 2) {
				need_flat();
				IS(pread(fd, flat, len, 0) == (ssize_t)len && !memcmp(flat, bytes, len));
			}
			end_region(mr);
			munmap(bytes, size);
			close(fd);
		}
	close_one_of_two(&side);
}

static void sizes(void) { run_two(sizes_of); }
static void vectors(void) { run_two(vectors_of); }
static void reversed(void) { run_two(reversed_of); }
static void truncated(void) { run_two(truncated_of); }
static void levels(void) { run_two(levels_of); }
static void adjacent(void) { run_two(adjacent_of); }
static void remapped(void) { run_two(remapped_of); }
static void mappings(void) { run_two(mappings_of); }

int main(int argc, char **argv)
{
	static const struct mode modes[] = {
		{ "sizes", sizes },   { "vectors", vectors },	{ "reversed", reversed }, { "truncated", truncated },
		{ "levels", levels }, { "adjacent", adjacent }, { "remapped", remapped }, { "mappings", mappings },
	};

	return run_mode(modes, sizeof modes / sizeof *modes, argc, argv);
}
