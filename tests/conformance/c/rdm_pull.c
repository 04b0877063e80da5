/* Messages that the receiver reads from the memory of the sender, from fi_msg(3), fi_tagged(3),
 * fi_mr(3) and fi_cq(3), between endpoints of two processes:
 *
 * In the modes with `stopped`, the receiver stops the process of the sender when a message has been
 * announced, and receives it meanwhile. Such a message is read: parts would need the sender.
 *
 *   rdm_pull computes PROV NODE   after fi_tsend has returned, the sender calls nothing for 0.5 s,
 *                                 or up to 5 s until the receiver has completed, which it has to
 *   rdm_pull lengths PROV NODE    lengths around each limit, with several buffers at both sides; stopped
 *   rdm_pull remapped PROV NODE   other memory at the same addresses between two messages; stopped
 *   rdm_pull unmapped PROV NODE   buffers are unmapped when their operation has completed; stopped
 *   rdm_pull regions PROV NODE    FI_MR_LOCAL: buffers in regions, which permit FI_SEND or FI_RECV alone; stopped
 *   rdm_pull multi PROV NODE      multi-receive buffers; stopped
 *   rdm_pull both PROV NODE       both directions at once
 *   rdm_pull truncated PROV NODE  receives that are shorter than the message; stopped
 *   rdm_pull discarded PROV NODE  FI_DISCARD, fi_cancel
 *   rdm_pull killed PROV NODE     the sender is killed while its messages are read
 *
 * A further argument `auto` requests FI_PROGRESS_AUTO. Ends with 0, or says what went wrong.
 * Plain libfabric 1.17. */
#define _GNU_SOURCE /* process_vm_readv */
#include "rdm_pair.h"

#include <sys/mman.h>
#include <sys/uio.h>

#define MIB (1UL << 20)
#define LARGEST (6 * MIB)

static pid_t second;
static uint8_t *out, *in; /* LARGEST bytes each, and a page */

static void open_side(struct side *side)
{
	wanted.caps = FI_MSG | FI_TAGGED | FI_MULTI_RECV;
	wanted.mr_mode |= FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
	open_domain_of(side);
	side->tx = queue(side, 0);
	side->rx = queue(side, 0);
	side->ep = endpoint_on(side, 0);
}

static void open_pair(struct side *side)
{
	open_side(side);
	struct name own = name_of(side->ep), other;

	tell(to_other[1], &own, sizeof own);
	hear(to_this[0], &other, sizeof other);
	side->peer = insert(side, &other);
}

static void progress(struct side *side)
{
	(void)fi_cq_read(side->tx, NULL, 0);
	(void)fi_cq_read(side->rx, NULL, 0);
}

/* The next entry of a queue: 0, or the error number in `error`. */
static int entry_of(struct side *side, struct fid_cq *cq, struct fi_cq_tagged_entry *entry, struct fi_cq_err_entry *error)
{
	double limit = now() + SECONDS;

	memset(error, 0, sizeof *error);
	for (;;) {
		ssize_t got = fi_cq_read(cq, entry, 1);

		if (got == 1)
			return 0;
		if (got == -FI_EAVAIL) {
			IS(fi_cq_readerr(cq, error, 0) == 1);
			return error->err;
		}
		IS(got == -FI_EAGAIN);
		(void)fi_cq_read(cq == side->tx ? side->rx : side->tx, NULL, 0);
		if (now() > limit)
			die("no completion within %d s", SECONDS);
	}
}

static void done(struct side *side, struct fid_cq *cq, void *context, size_t len)
{
	struct fi_cq_tagged_entry entry;
	struct fi_cq_err_entry error;

	if (entry_of(side, cq, &entry, &error))
		die("a completion in error: %s", fi_strerror(error.err));
	IS(entry.op_context == context);
	IS(cq == side->tx || entry.len == len);
}

static uint8_t byte_of(size_t i, unsigned seed) { return (uint8_t)(seed * 31 + i * 7 + (i >> 8) + (i >> 16)); }

static void fill(uint8_t *bytes, size_t len, unsigned seed)
{
	for (size_t i = 0; i < len; i++)
		bytes[i] = byte_of(i, seed);
}

static void must_be(const uint8_t *bytes, size_t len, unsigned seed)
{
	for (size_t i = 0; i < len; i++)
		if (bytes[i] != byte_of(i, seed))
			die("byte %zu of %zu of message %u", i, len, seed);
}

static int send_one(struct side *side, const void *bytes, size_t len, void *desc, uint64_t tag)
{
	POST(side, fi_tsend(side->ep, bytes, len, desc, side->peer, tag, (void *)bytes));
	return 0;
}

static int post_one(struct side *side, void *bytes, size_t len, void *desc, uint64_t tag)
{
	POST(side, fi_trecv(side->ep, bytes, len, desc, FI_ADDR_UNSPEC, tag, 0, bytes));
	return 0;
}

static void continue_first(void)
{
	if (!first)
		kill(getppid(), SIGCONT);
}

/* Whether this process can read the memory of the first one itself. If not, a thread of the first one copies. */
static int can_read_first(void)
{
	char byte;
	struct iovec to = { &byte, 1 }, from = { out, 1 };
	static int can = -1;

	if (can == -1) {
		can = process_vm_readv(getppid(), &to, 1, &from, 1, 0) == 1;
		if (!can)
			printf("the sender is not stopped: process_vm_readv: %s\n", strerror(errno));
	}
	return can;
}

/* On XRC each direction has a circuit of its own, which a stopped process cannot accept. That of the second process is
 * there when it has sent a message; no receive matches it. */
static void send_back(struct side *side)
{
	static bool sent;
	static uint8_t nothing;

	if (sent || asked_protocol() == FI_PROTO_UNSPEC)
		return;
	sent = true;
	send_one(side, &nothing, 0, NULL, UINT64_MAX);
	done(side, side->tx, &nothing, 0);
}

static void stop_first(struct side *side)
{
	double limit = now() + SECONDS;
	char path[64], state = 0;

	snprintf(path, sizeof path, "/proc/%d/stat", (int)getppid());
	if (!can_read_first())
		return;
	send_back(side);
	IS(kill(getppid(), SIGSTOP) == 0);
	while (state != 'T') {
		FILE *stat = fopen(path, "r");

		IS(stat && fscanf(stat, "%*d (%*[^)]) %c", &state) == 1);
		fclose(stat);
		IS(now() < limit);
	}
}

/* A message has been announced. */
static void await_message(struct side *side, uint64_t tag, size_t len)
{
	struct fi_msg_tagged msg = { .addr = FI_ADDR_UNSPEC, .tag = tag };
	struct fi_cq_tagged_entry entry;
	struct fi_cq_err_entry error;
	double limit = now() + SECONDS;
	int found;

	do {
		POST(side, fi_trecvmsg(side->ep, &msg, FI_PEEK));
		found = entry_of(side, side->rx, &entry, &error);
		IS(found == 0 || found == FI_ENOMSG);
		IS(now() < limit);
	} while (found);
	IS(entry.len == len);
}

/* The second process receives a message of the first one, which is stopped meanwhile. */
static void receive_stopped(struct side *side, uint8_t *bytes, size_t len, void *desc, uint64_t tag)
{
	await_message(side, tag, len);
	stop_first(side);
	post_one(side, bytes, len, desc, tag);
	done(side, side->rx, bytes, len);
	continue_first();
}

/* ---- modes ---- */

static void computes(void)
{
	static const double LEAST = 0.5, MOST = 5;
	struct side side;

	/* the first message of a connection, then one on a connection that exists */
	for (int round = 0; round < 2; round++) {
		if (round == 0)
			open_pair(&side);
		if (first) {
			struct pollfd ready = { .fd = to_this[0], .events = POLLIN };
			double posted, end;
			char completed;

			fill(out, MIB, 1 + round);
			send_one(&side, out, MIB, NULL, 1);
			posted = now();
			do {
				end = now() + LEAST;
				for (volatile unsigned i = 0; now() < end; i++)
					;
			} while (poll(&ready, 1, 0) == 0 && end < posted + MOST);
			/* this process has called nothing since the send */
			if (poll(&ready, 1, 0) != 1)
				die("the message of round %d has not arrived while this process computed", round);
			hear(to_this[0], &completed, 1);
			done(&side, side.tx, out, 0);
		} else {
			memset(in, 0, MIB);
			post_one(&side, in, MIB, NULL, 1);
			done(&side, side.rx, in, MIB);
			tell(to_other[1], "c", 1);
			must_be(in, MIB, 1 + round);
		}
		barrier(&side);
	}
	close_side(&side);
}

/* Up to 4 buffers of one message; the second one is empty if there are 3. */
static size_t buffers(struct iovec *iov, uint8_t *bytes, size_t len, size_t count)
{
	size_t used = 0;

	for (size_t i = 0; i < count; i++) {
		size_t part = i + 1 == count ? len - used : count == 3 && i == 1 ? 0 : len / count + i;

		if (part > len - used)
			part = len - used;
		iov[i] = (struct iovec){ bytes + used, part };
		used += part;
	}
	return count;
}

static void lengths(void)
{
	static const size_t base[] = { 4096, 8192, 16384, 65536, MIB, 2 * MIB, 4 * MIB, 5 * MIB };
	struct side side;
	unsigned seed = 0;

	open_pair(&side);
	for (size_t i = 0; i < sizeof base / sizeof *base; i++)
		for (int more = -1; more <= 1; more++)
			for (int how = 0; how < 12; how++) {
				size_t len = base[i] + (size_t)more, from = 1 + how % 3, to = how / 3 % 2 ? 4 : 1;
				int early = how / 6;
				struct iovec iov[4];

				if (len > 65537 && (how + (int)i + more) % 3)
					continue;
				seed++;
				if (first) {
					fill(out, len, seed);
					if (early)
						barrier(&side);
					buffers(iov, out, len, from);
					POST(&side, fi_tsendv(side.ep, iov, NULL, from, side.peer, seed, out));
					if (!early)
						barrier(&side);
					done(&side, side.tx, out, 0);
				} else {
					int stops = !early && from == 1 && len > MIB;

					if (!early)
						barrier(&side);
					if (stops) {
						await_message(&side, seed, len);
						stop_first(&side);
					}
					memset(in, 0xee, len + 1);
					buffers(iov, in, len, to);
					POST(&side, fi_trecvv(side.ep, iov, NULL, to, FI_ADDR_UNSPEC, seed, 0, in));
					if (early)
						barrier(&side);
					done(&side, side.rx, in, len);
					if (stops)
						continue_first();
					must_be(in, len, seed);
					IS(in[len] == 0xee);
				}
			}
	barrier(&side);
	close_side(&side);
}

static uint8_t *map(void *at, size_t len)
{
	int flags = MAP_PRIVATE | MAP_ANONYMOUS | (at ? MAP_FIXED : 0);
	uint8_t *mapped = mmap(at, len, PROT_READ | PROT_WRITE, flags, -1, 0);

	IS(mapped != MAP_FAILED);
	return mapped;
}

/* `again`: the memory of each message replaces that of the last one at the same addresses. */
static void mapped(int again)
{
	enum { ROUNDS = 30 };
	const size_t len = 2 * MIB + 5, size = 3 * MIB;
	uint8_t *bytes = again ? map(NULL, size) : NULL;
	struct side side;

	open_pair(&side);
	for (unsigned i = 0; i < ROUNDS; i++) {
		switch (again ? i % 3 : 3) {
		case 0:
			map(bytes, size);
			break;
		case 1:
			IS(munmap(bytes, size) == 0);
			IS(map(bytes, size) == bytes);
			break;
		case 2:
			IS(madvise(bytes, size, MADV_DONTNEED) == 0);
			break;
		default:
			bytes = map(NULL, size);
		}
		if (first) {
			fill(bytes, len, i);
			send_one(&side, bytes, len, NULL, i);
			done(&side, side.tx, bytes, 0);
		} else {
			receive_stopped(&side, bytes, len, NULL, i);
			must_be(bytes, len, i);
		}
		if (!again)
			IS(munmap(bytes, size) == 0);
	}
	barrier(&side);
	close_side(&side);
}

static void remapped(void) { mapped(1); }
static void unmapped(void) { mapped(0); }

static void regions(void)
{
	static const size_t sizes[] = { 8193, 100000, 3 * MIB };
	struct side side;
	struct fid_mr *mr[3];

	wanted.mr_mode |= FI_MR_LOCAL;
	setenv("FI_WEFT_MR_MODE", "LOCAL,VIRT_ADDR,ALLOCATED,PROV_KEY", 1);
	open_pair(&side);
	IS(side.info->domain_attr->mr_mode & FI_MR_LOCAL);
	uint8_t *bytes = first ? out : in;
	uint64_t access = first ? FI_SEND : FI_RECV, all = FI_SEND | FI_RECV | FI_REMOTE_READ | FI_REMOTE_WRITE;
	struct iovec halves[2] = { { bytes, 4 * MIB }, { bytes + 4 * MIB, 2 * MIB } };

	MUST(fi_mr_reg(side.domain, bytes, LARGEST, access, 0, 1, 0, &mr[0], NULL));
	MUST(fi_mr_reg(side.domain, bytes, LARGEST, all, 0, 2, 0, &mr[1], NULL));
	MUST(fi_mr_regv(side.domain, halves, 2, access, 0, 3, 0, &mr[2], NULL));
	for (unsigned round = 0; round < 4; round++)
		for (int i = 0; i < 3; i++)
			for (int region = 0; region < 3; region++) {
				unsigned seed = round * 9 + (unsigned)(i * 3 + region);
				void *desc = fi_mr_desc(mr[region]);
				size_t len = sizes[i], at = round * 1000;

				if (first) {
					fill(bytes + at, len, seed);
					send_one(&side, bytes + at, len, desc, seed);
					done(&side, side.tx, bytes + at, 0);
				} else {
					memset(bytes + at, 0xee, len + 1);
					receive_stopped(&side, bytes + at, len, desc, seed);
					must_be(bytes + at, len, seed);
					IS(bytes[at + len] == 0xee);
				}
			}
	barrier(&side);
	for (int region = 0; region < 3; region++)
		MUST(fi_close(&mr[region]->fid));
	close_side(&side);
}

/* Messages of both lengths in parts of one buffer, which the last one of them ends. */
static void multi(void)
{
	enum { ROUNDS = 5 };
	static const size_t lengths[] = { MIB, 100, 2 * MIB + 3, 8192, MIB / 2 };
	enum { COUNT = sizeof lengths / sizeof *lengths };
	struct fi_cq_tagged_entry entry;
	struct fi_cq_err_entry error;
	struct side side;

	open_pair(&side);
	for (unsigned round = 0; round < ROUNDS; round++) {
		size_t at = 0;

		if (first) {
			for (unsigned i = 0; i < COUNT; at += lengths[i++]) {
				fill(out + at, lengths[i], round + i);
				POST(&side, fi_send(side.ep, out + at, lengths[i], NULL, side.peer, out + at));
			}
			send_one(&side, out, 1, NULL, round);
			barrier(&side);
			for (unsigned i = 0; i < COUNT + 1; i++)
				IS(entry_of(&side, side.tx, &entry, &error) == 0);
			barrier(&side);
			continue;
		}
		struct iovec iov = { in, LARGEST };
		struct fi_msg msg = { .msg_iov = &iov, .iov_count = 1, .addr = FI_ADDR_UNSPEC, .context = in };
		int last = 0;

		barrier(&side);
		/* the messages before have arrived or been announced */
		await_message(&side, round, 1);
		post_one(&side, in, 1, NULL, round);
		done(&side, side.rx, in, 1);
		stop_first(&side);
		POST(&side, fi_recvmsg(side.ep, &msg, FI_MULTI_RECV));
		for (unsigned i = 0; i < COUNT; i++) {
			IS(entry_of(&side, side.rx, &entry, &error) == 0);
			uint8_t *bytes = entry.buf;
			unsigned which = 0;

			while (which < COUNT && lengths[which] != entry.len)
				which++;
			IS(which < COUNT && bytes >= in && bytes + entry.len <= in + LARGEST);
			must_be(bytes, entry.len, round + which);
			last |= !!(entry.flags & FI_MULTI_RECV);
		}
		continue_first();
		IS(!last);
		MUST(fi_cancel(&side.ep->fid, in));
		IS(entry_of(&side, side.rx, &entry, &error) == FI_ECANCELED);
		barrier(&side);
	}
	close_side(&side);
}

static void both(void)
{
	enum { ROUNDS = 10, COUNT = 6 };
	struct side side;

	open_pair(&side);
	for (unsigned round = 0; round < ROUNDS; round++) {
		size_t len = MIB - 3 * round;

		fill(out, COUNT * len, round + (unsigned)first);
		memset(in, 0, COUNT * len);
		for (unsigned i = 0; i < COUNT; i++)
			post_one(&side, in + i * len, len, NULL, i);
		for (unsigned i = 0; i < COUNT; i++)
			send_one(&side, out + i * len, len, NULL, i);
		for (unsigned sent = 0, got = 0; sent < COUNT || got < COUNT;) {
			struct fi_cq_tagged_entry entry;
			double limit = now() + SECONDS;

			while (sent < COUNT && fi_cq_read(side.tx, &entry, 1) == 1)
				sent++;
			while (got < COUNT && fi_cq_read(side.rx, &entry, 1) == 1)
				got++;
			IS(now() < limit);
		}
		must_be(in, COUNT * len, round + !first);
		barrier(&side);
	}
	close_side(&side);
}

static void truncated(void)
{
	static const size_t rooms[] = { 0, 1, 8192, 100000, MIB, 3 * MIB / 2 };
	const size_t len = 3 * MIB;
	struct fi_cq_tagged_entry entry;
	struct fi_cq_err_entry error;
	struct side side;
	unsigned seed = 0;

	open_pair(&side);
	for (size_t i = 0; i < sizeof rooms / sizeof *rooms; i++)
		for (int early = 0; early < 2; early++) {
			size_t room = rooms[i];

			seed++;
			if (first) {
				fill(out, len, seed);
				if (early)
					barrier(&side);
				send_one(&side, out, len, NULL, seed);
				if (!early)
					barrier(&side);
				done(&side, side.tx, out, 0);
			} else {
				if (!early)
					barrier(&side);
				memset(in, 0xee, len);
				if (!early) {
					await_message(&side, seed, len);
					stop_first(&side);
				}
				post_one(&side, in, room, NULL, seed);
				if (early)
					barrier(&side);
				IS(entry_of(&side, side.rx, &entry, &error) == FI_ETRUNC);
				continue_first();
				IS(error.op_context == in && error.len == room && error.olen == len - room);
				must_be(in, room, seed);
				IS(in[room] == 0xee);
			}
		}
	barrier(&side);
	close_side(&side);
}

static void discarded(void)
{
	const size_t len = 2 * MIB;
	struct side side;

	open_pair(&side);
	for (unsigned i = 0; i < 6; i++) {
		if (first) {
			fill(out, len, i);
			if (i % 3 == 2)
				barrier(&side);
			send_one(&side, out, len, NULL, i);
			barrier(&side);
			done(&side, side.tx, out, 0);
		} else {
			struct fi_context context = { 0 };
			struct fi_msg_tagged msg = { .addr = FI_ADDR_UNSPEC, .tag = i, .context = &context };
			struct fi_cq_tagged_entry entry;
			struct fi_cq_err_entry error;

			if (i % 3 == 2) {
				/* a receive that is cancelled leaves the message to the next one */
				memset(in, 0xee, len);
				post_one(&side, in, len, NULL, i);
				MUST(fi_cancel(&side.ep->fid, in));
				IS(entry_of(&side, side.rx, &entry, &error) == FI_ECANCELED);
				/* the message is sent now: before, it could have matched */
				barrier(&side);
			}
			barrier(&side);
			if (i % 3 == 2) {
				IS(in[0] == 0xee && in[len - 1] == 0xee);
				post_one(&side, in, len, NULL, i);
				done(&side, side.rx, in, len);
				must_be(in, len, i);
				continue;
			}
			double limit = now() + SECONDS;
			uint64_t flags = FI_PEEK | (i % 3 ? FI_CLAIM : FI_DISCARD);
			int found;

			do {
				POST(&side, fi_trecvmsg(side.ep, &msg, flags));
				found = entry_of(&side, side.rx, &entry, &error);
				IS(found == 0 || found == FI_ENOMSG);
				IS(now() < limit);
			} while (found);
			IS(entry.len == len);
			if (flags & FI_CLAIM) {
				POST(&side, fi_trecvmsg(side.ep, &msg, FI_CLAIM | FI_DISCARD));
				IS(entry_of(&side, side.rx, &entry, &error) == 0);
			}
		}
	}
	barrier(&side);
	close_side(&side);
}

enum { MESSAGES = 64 };

static void send_many(void)
{
	struct side side;

	open_pair(&side);
	fill(out, LARGEST, 1);
	for (unsigned i = 0; i < MESSAGES; i++)
		send_one(&side, out, LARGEST, NULL, i);
	for (unsigned i = 0; i < MESSAGES; i++)
		done(&side, side.tx, out, 0);
	close_side(&side);
	exit(0);
}

/* Introduces the receiver to the sender at the other end of the pipes. */
static void introduce(struct side *side)
{
	struct name own = name_of(side->ep), other;

	tell(to_other[1], &own, sizeof own);
	hear(to_this[0], &other, sizeof other);
	side->peer = insert(side, &other);
}

/* Receives from the second process, kills it, and receives from a third one. */
static void killed(void)
{
	struct fi_cq_tagged_entry entry;
	struct fi_cq_err_entry error;
	struct side side;
	int there[2], back[2];
	unsigned ended, failed = 0, cancelled = 0;

	if (!first)
		send_many();
	IS(pipe(there) == 0 && pipe(back) == 0);
	pid_t third = child("third");
	if (third == 0) {
		memcpy(to_other, back, sizeof back);
		memcpy(to_this, there, sizeof there);
		send_many();
	}
	open_side(&side);
	introduce(&side);
	for (unsigned i = 0; i < MESSAGES; i++)
		POST(&side, fi_trecv(side.ep, in, LARGEST, NULL, FI_ADDR_UNSPEC, i, 0, in + i));
	for (ended = 0; ended < 3; ended++)
		IS(entry_of(&side, side.rx, &entry, &error) == 0);
	IS(kill(second, SIGKILL) == 0);
	/* receives that have a message end; the others stay posted, and can be cancelled */
	for (double limit = now() + 3; now() < limit;) {
		ssize_t got = fi_cq_read(side.rx, &entry, 1);

		if (got == -FI_EAVAIL) {
			IS(fi_cq_readerr(side.rx, memset(&error, 0, sizeof error), 0) == 1);
			failed++;
		} else {
			IS(got == 1 || got == -FI_EAGAIN);
		}
		ended += got != -FI_EAGAIN;
	}
	for (unsigned i = 0; i < MESSAGES; i++)
		cancelled += fi_cancel(&side.ep->fid, in + i) == 0;
	printf("%u receives ended, %u of them in error; %u were posted\n", ended, failed, cancelled);
	IS(ended + cancelled == MESSAGES);
	for (unsigned i = 0; i < cancelled; i++)
		IS(entry_of(&side, side.rx, &entry, &error) == FI_ECANCELED);
	memcpy(to_other, there, sizeof there);
	memcpy(to_this, back, sizeof back);
	introduce(&side);
	for (unsigned i = 0; i < MESSAGES; i++) {
		memset(in, 0, 4096);
		post_one(&side, in, LARGEST, NULL, i);
		done(&side, side.rx, in, LARGEST);
		must_be(in, LARGEST, 1);
	}
	IS(status_of(third, "third") == 0);
	close_side(&side);
}

int main(int argc, char **argv)
{
	static const struct {
		const char *name;
		void (*check)(void);
	} modes[] = {
		{ "computes", computes },   { "lengths", lengths }, { "remapped", remapped },
		{ "unmapped", unmapped },   { "regions", regions }, { "both", both }, { "multi", multi },
		{ "truncated", truncated }, { "discarded", discarded }, { "killed", killed },
	};
	int there[2], back[2];

	if (argc != 4 && argc != 5)
		die("usage: rdm_pull MODE PROV NODE [auto]");
	provider = argv[2];
	node = argv[3];
	wants_auto = argc == 5 && !strcmp(argv[4], "auto");
	out = map(NULL, LARGEST + 4096);
	in = map(NULL, LARGEST + 4096);
	for (size_t i = 0; i < sizeof modes / sizeof *modes; i++) {
		if (strcmp(argv[1], modes[i].name))
			continue;
		alarm(90);
		if (pipe(there) || pipe(back))
			die("pipe: %s", strerror(errno));
		second = child("second");
		first = second != 0;
		memcpy(to_other, first ? there : back, sizeof there);
		memcpy(to_this, first ? back : there, sizeof there);
		close(to_other[0]);
		close(to_this[1]);
		if (first)
			role = "first";
		else
			atexit(continue_first);
		modes[i].check();
		if (modes[i].check == killed)
			return 0;
		return first ? status_of(second, "second") : 0;
	}
	die("no such mode");
}
