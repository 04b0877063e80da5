/* Long messages of processes that fork between the post and the completion, from fi_msg(3) and fork(2):
 * the buffers are those of the parent, whichever process writes to the shared pages first. The child
 * writes to its copy of them, and calls nothing of the library.
 *
 *   rdm_long_forked posted PROV NODE   the fork follows the post
 *   rdm_long_forked pages PROV NODE    the post follows the fork, and the child writes meanwhile
 *
 * A further argument `auto` requests FI_PROGRESS_AUTO. Ends with 0, or says what went wrong. Plain
 * libfabric 1.17. */
#define _GNU_SOURCE
#include "rdm_long.h"

enum { CHILD = 0xdd };

static const size_t lengths[] = { 4000, 16 * KIB + 1, 64 * KIB, MIB, 4 * MIB + 1, 8 * MIB };
static bool posted; /* the mode */

static void post(struct side *side, int me, uint8_t *bytes, size_t len, uint64_t tag, struct op *op)
{
	if (me == 0)
		PUT(side, fi_trecv(side->ep, bytes, len, NULL, FI_ADDR_UNSPEC, tag, 0, op));
	else
		PUT(side, fi_tsend(side->ep, bytes, len, NULL, side->peer, tag, op));
}

/* A child that writes to each page of the buffer, twice: before and after it has told so. */
static pid_t writer(uint8_t *bytes, size_t len, int told_by)
{
	pid_t pid = fork();
	char byte = 0;

	IS(pid >= 0);
	if (pid)
		return pid;
	memset(bytes, CHILD, len);
	if (write(told_by, &byte, 1) != 1)
		_exit(1);
	memset(bytes, CHILD + 1, len);
	usleep(2000);
	_exit(bytes[0] == CHILD + 1 && bytes[len - 1] == CHILD + 1 ? 0 : 2);
}

static void forks_of(int me)
{
	struct side side;
	uint64_t tag = 0;
	int from_child[2], status;

	IS(pipe(from_child) == 0);
	open_one_of_two(&side, me);
	for (int round = 0; round < (all_forms() ? 20 : 4); round++)
		for (unsigned i = 0; i < sizeof lengths / sizeof *lengths; i++, tag++) {
			size_t len = lengths[i];
			uint8_t *bytes = memory(len);
			struct op op = { 0 };
			char byte;

			if (me == 1)
				fill(bytes, len, tag);
			if (posted)
				post(&side, me, bytes, len, tag, &op);
			pid_t pid = writer(bytes, len, from_child[1]);
			if (round % 2)
				IS(read(from_child[0], &byte, 1) == 1);
			if (!posted)
				post(&side, me, bytes, len, tag, &op);
			await(&side, &op);
			if (op.err)
				die("message %llu: %s", (unsigned long long)tag, fi_strerror(op.err));
			must_be(bytes, len, tag);
			if (round % 2 == 0)
				IS(read(from_child[0], &byte, 1) == 1);
			IS(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0);
			IS(munmap(bytes, len) == 0);
		}
	meet(&side, 2);
	close_one_of_two(&side);
}

static void after_posts(void)
{
	posted = true;
	run_two(forks_of);
}

static void before_posts(void) { run_two(forks_of); }

int main(int argc, char **argv)
{
	static const struct mode modes[] = { { "posted", after_posts }, { "pages", before_posts } };

	return run_mode(modes, sizeof modes / sizeof *modes, argc, argv);
}
