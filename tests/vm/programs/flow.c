/* flow: two hosts send each other numbered messages for some seconds, while a script disturbs the
 * link between them. Nothing may be lost, doubled, reordered or changed:
 *
 *   messages   receive number i must have message number i, with its length and its bytes; each
 *              side sends the number of its messages in the last one
 *   atomics    each side adds 1 to a word of the other one; at the end the word is the number of
 *              additions that the initiator has made
 *   writes     each write is read back by fi_read and compared; the other side compares the last one.
 *              A link of a NIC that breaks leaves the outcome of a write unknown
 *              (FI_ECONNABORTED, docs/protocol-rdm.md); with `-b` it is repeated, otherwise it is a
 *              failure like any other error completion
 *
 *   flow [-b] [-c] [-r] PROVIDER NODE PEER SERVICE SECONDS
 *
 * Both sides run it; each binds to NODE and SERVICE and expects the other one at PEER and SERVICE.
 * -c changes one byte of one message, and the other side must then fail. -r: without
 * reads, for a device that executes them wrongly on such a link: no writes, whose keys are looked up
 * by reads, and with FI_MR_MMU_NOTIFY long messages arrive in parts (docs/rdm.md). Prints, for each
 * direction, the number of messages and the longest time without one. */
#define _GNU_SOURCE
#define SECONDS 60 /* the limit without any progress: more than all retries of a connection */
#include "../../conformance/c/rdm_side.h"

#include <rdma/fi_atomic.h>

enum {
	LONGEST = 100000,
	WINDOW = 16, /* receives that are posted, and sends under way */
	WRITE = 4096,
	ENDING = 1, /* the kind of the last message */
	LINGER = 3, /* seconds */
};

struct header {
	uint64_t number, kind, len;
	/* of the region that the other side accesses */
	uint64_t addr, key;
	uint64_t additions, writes; /* of the last message: how many the sender has made */
};

struct region {
	uint64_t sum; /* of the other side's atomics */
	uint64_t one;
	uint8_t written[WRITE];
};

static const size_t lengths[] = { sizeof(struct header), 64, 1000, 4096, 9000, 30000, LONGEST };
static struct side side;
static struct region *mine;
static uint8_t *buffers[2 * WINDOW], *source, *back;
static struct fid_mr *mr;
static struct header theirs; /* the first message of the other side */
static struct header last;
static uint64_t posted, sent, expected, received_from[WINDOW], unread[WINDOW];
static uint64_t additions, writes, repeated;
static bool breaks, corrupts, without_reads, ended;
static bool adds; /* whether the next access is an atomic */
static double newest, oldest_gap, begun;
static int busy[WINDOW];		    /* sends: 1 under way */
static enum { IDLE, ADDING, WRITING, READING } under_way; /* an access to the other side */

static void progress(struct side *unused) { (void)unused; }

static uint8_t byte_of(uint64_t number, size_t i) { return (uint8_t)(number * 131 + i * 7 + (i >> 8)); }

static void fill(uint8_t *at, uint64_t number, size_t from, size_t len)
{
	for (size_t i = from; i < len; i++)
		at[i] = byte_of(number, i);
}

static void compare(const uint8_t *at, uint64_t number, size_t from, size_t len, const char *what)
{
	for (size_t i = from; i < len; i++)
		if (at[i] != byte_of(number, i))
			die("%s %llu: byte %zu is %02x, not %02x", what, (unsigned long long)number, i, at[i], byte_of(number, i));
}

static void post_receive(unsigned slot)
{
	POST(&side, fi_recv(side.ep, buffers[slot], LONGEST, fi_mr_desc(mr), FI_ADDR_UNSPEC, buffers[slot]));
}

/* Receives complete in any order, but are matched in the order of their posts: slot i % WINDOW has
 * message i. */
static void arrived(unsigned slot, size_t len)
{
	struct header *header = (struct header *)buffers[slot];
	uint64_t number = received_from[slot];

	if (header->number != number)
		die("receive %llu has message %llu", (unsigned long long)number, (unsigned long long)header->number);
	if (header->len != len || len != (header->kind == ENDING ? sizeof *header : lengths[number % 7]))
		die("message %llu has %zu bytes", (unsigned long long)number, len);
	compare(buffers[slot], number, sizeof *header, len, "message");
	if (number == 0)
		theirs = *header;
	if (header->kind == ENDING) {
		ended = true;
		last = *header;
	}
	expected++;
	if (newest && now() - newest > oldest_gap)
		oldest_gap = now() - newest;
	newest = now();
	received_from[slot] = number + WINDOW;
	unread[slot] = 1;
}

/* Receives are posted again in their order. */
static void repost(void)
{
	static uint64_t next;

	while (unread[next % WINDOW]) {
		unread[next % WINDOW] = 0;
		post_receive((unsigned)(next++ % WINDOW));
	}
}

static bool send_one(uint64_t kind)
{
	unsigned slot = (unsigned)(posted % WINDOW);
	size_t len = kind == ENDING ? sizeof(struct header) : lengths[posted % 7];
	uint8_t *at = buffers[WINDOW + slot];

	if (busy[slot])
		return false;
	fill(at, posted, sizeof(struct header), len);
	*(struct header *)at = (struct header){ .number = posted, .kind = kind, .len = len, .addr = (uint64_t)(uintptr_t)mine,
						.key = fi_mr_key(mr), .additions = additions, .writes = writes };
	if (corrupts && posted == 50)
		at[len - 1] ^= 1;
	ssize_t result = fi_send(side.ep, at, len, fi_mr_desc(mr), side.peer, at);
	if (result == -FI_EAGAIN)
		return false;
	MUST(result);
	busy[slot] = 1;
	posted++;
	return true;
}

/* One atomic, or one write and its read, at a time. */
static void access_one(void)
{
	uint64_t word = theirs.addr + offsetof(struct region, sum), area = theirs.addr + offsetof(struct region, written);
	ssize_t result;

	if (under_way != IDLE)
		return;
	if (adds) {
		mine->one = 1;
		result = fi_atomic(side.ep, &mine->one, 1, fi_mr_desc(mr), side.peer, word, theirs.key, FI_UINT64, FI_SUM, source);
	} else {
		fill(source, writes, 0, WRITE);
		result = fi_write(side.ep, source, WRITE, fi_mr_desc(mr), side.peer, area, theirs.key, source);
	}
	if (result == -FI_EAGAIN)
		return;
	MUST(result);
	under_way = adds ? ADDING : WRITING;
}

static void read_back(void)
{
	uint64_t area = theirs.addr + offsetof(struct region, written);

	memset(back, 0, WRITE);
	POST(&side, fi_read(side.ep, back, WRITE, fi_mr_desc(mr), side.peer, area, theirs.key, back));
	under_way = READING;
}

static void accessed(int error)
{
	if (error) {
		if (!breaks || error != FI_ECONNABORTED || under_way != WRITING)
			die("%s: error %d (%s)", under_way == ADDING ? "atomic" : under_way == WRITING ? "write" : "read", error, fi_strerror(error));
		repeated++;
		under_way = IDLE;
	} else if (under_way == ADDING) {
		additions++;
		adds = without_reads;
		under_way = IDLE;
	} else if (under_way == WRITING) {
		read_back();
	} else {
		compare(back, writes, 0, WRITE, "write");
		writes++;
		adds = true;
		under_way = IDLE;
	}
}

/* One completion of the queue. False if there is none. */
static bool poll_one(struct fid_cq *cq)
{
	struct fi_cq_tagged_entry entry;
	struct fi_cq_err_entry error = { 0 };
	ssize_t got = fi_cq_read(cq, &entry, 1);

	if (got == -FI_EAGAIN)
		return false;
	if (got == -FI_EAVAIL) {
		MUST(fi_cq_readerr(cq, &error, 0));
		entry.op_context = error.op_context;
	} else {
		MUST(got);
	}
	if (entry.op_context == source || entry.op_context == back) {
		accessed(error.err);
		return true;
	}
	if (error.err)
		die("%s: error %d (%s), after %.1f s without a message", cq == side.tx ? "send" : "receive", error.err, fi_strerror(error.err), now() - newest);
	for (unsigned slot = 0; slot < 2 * WINDOW; slot++) {
		if (entry.op_context != buffers[slot])
			continue;
		if (slot < WINDOW) {
			arrived(slot, entry.len);
		} else {
			busy[slot - WINDOW] = 0;
			sent++;
		}
	}
	return true;
}

static void step(void)
{
	static double moved;
	bool some = poll_one(side.tx);

	some |= poll_one(side.rx);
	repost();
	if (some || !moved)
		moved = now();
	else if (now() - moved > SECONDS)
		die("nothing completes for %d s: %llu messages sent, %llu received", SECONDS, (unsigned long long)sent, (unsigned long long)expected);
}

static void open_all(const char *peer)
{
	size_t size = 2 * WINDOW * (size_t)LONGEST + sizeof *mine + 2 * WRITE;
	uint8_t *memory;

	wanted.caps = FI_MSG | FI_RMA | FI_ATOMIC;
	wanted.mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_PROV_KEY | (without_reads ? FI_MR_MMU_NOTIFY : FI_MR_ALLOCATED);
	open_domain_of(&side);
	side.tx = queue(&side, 0);
	side.rx = queue(&side, 0);
	side.ep = endpoint_on(&side, 0);
	IS(fi_av_insertsvc(side.av, peer, wanted.service, &side.peer, 0, NULL) == 1);
	if (posix_memalign((void **)&memory, 4096, size))
		die("no memory");
	memset(memory, 0, size);
	MUST(fi_mr_reg(side.domain, memory, size, FI_SEND | FI_RECV | FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE, 0, 0, 0, &mr, NULL));
	mine = (struct region *)memory;
	source = memory + sizeof *mine;
	back = source + WRITE;
	for (unsigned i = 0; i < 2 * WINDOW; i++)
		buffers[i] = back + WRITE + i * (size_t)LONGEST;
	for (unsigned slot = 0; slot < WINDOW; slot++) {
		received_from[slot] = slot;
		post_receive(slot);
	}
}

int main(int argc, char **argv)
{
	int c;

	while ((c = getopt(argc, argv, "bcr")) != -1) {
		breaks |= c == 'b';
		corrupts |= c == 'c';
		adds = without_reads |= c == 'r';
	}
	if (argc - optind != 5) {
		fprintf(stderr, "usage: flow [-b] [-c] [-r] PROVIDER NODE PEER SERVICE SECONDS\n");
		return 2;
	}
	setvbuf(stdout, NULL, _IOLBF, 0);
	argv += optind;
	provider = argv[0];
	role = node = argv[1];
	wanted.service = argv[3];
	open_all(argv[2]);
	/* the other side may not have begun: its endpoint refuses no connection, it is absent */
	while (!send_one(0))
		step();
	UNTIL_WITHIN(SECONDS, sent == 1 && expected > 0, step());
	printf("flow: begins\n");
	begun = now();
	while (now() < begun + atof(argv[4])) {
		send_one(0);
		access_one();
		step();
	}
	UNTIL_WITHIN(SECONDS, under_way == IDLE, step());
	UNTIL_WITHIN(SECONDS, send_one(ENDING), step());
	/* the other side has ended too, and has everything of this side */
	UNTIL_WITHIN(SECONDS, sent == posted && ended && expected == last.number + 1, step());
	if (mine->sum != last.additions)
		die("%llu additions arrived, the other side has made %llu", (unsigned long long)mine->sum, (unsigned long long)last.additions);
	if (last.writes)
		compare(mine->written, last.writes - 1, 0, WRITE, "last write");
	printf("flow: ok, %llu messages sent, %llu received, %llu additions, %llu writes, %llu repeated, longest pause %.1f s\n",
	       (unsigned long long)sent, (unsigned long long)expected, (unsigned long long)additions, (unsigned long long)writes,
	       (unsigned long long)repeated, oldest_gap);
	/* the acknowledgement of the other side's last message may be lost: its device asks again */
	for (double until = now() + LINGER; now() < until;)
		step();
	MUST(fi_close(&side.ep->fid));
	side.ep = NULL;
	MUST(fi_close(&mr->fid));
	close_side(&side);
	return 0;
}
