/* outlive: endpoints with many peers while the machine of one peer dies under traffic of all kinds in
 * both directions: tagged messages of 64 to 100,000 bytes, atomics, writes and reads.
 *
 *   outlive -s [-T SECONDS] PROVIDER NODE SERVICE STAYS:SERVICE DIES:SERVICE
 *   outlive PROVIDER NODE SERVICE PEER:SERVICE
 *
 * The first form is the survivor: DIES is the peer whose machine dies, STAYS another one. It prints
 * `running` when traffic of each kind runs with both. Every operation that it has posted to DIES must
 * complete, at least one of them in error, within -T seconds (10) after the last success of one of
 * them; DIES is not lost before. The longest time since then in which the survivor itself did not run
 * is added, up to PAUSE: it cannot read its errors meanwhile. Meanwhile no pause of the traffic with STAYS is longer than
 * PAUSE seconds. Then it ends the traffic with STAYS and closes its objects, within -T seconds too.
 * The second form is one of its peers, which ends when the survivor says so. */
#define _GNU_SOURCE
#define SECONDS 30
#include "../../conformance/c/rdm_side.h"

#include <rdma/fi_atomic.h>

enum {
	LONGEST = 100000,
	WINDOW = 8, /* sends under way to a peer, and receives posted for it */
	ACCESS = 30000, /* bytes of a write and of a read */
	TURNS = 20, /* of each kind, before the survivor is `running` */
	LINGER = 2, /* seconds: of traffic with the peer that stays, after the end of the other one; of answers to the last requests */
	PAUSE = 3,
	PEERS = 2,
};

struct header {
	uint64_t number, last;
	uint64_t addr, key; /* of the sender's memory */
};

/* What the peers of a side access, one for each of them. */
struct region {
	uint64_t sum;
	uint8_t area[ACCESS];
};

enum kind { ADD, WRITE, READ, KINDS };

struct peer {
	const char *name;
	fi_addr_t to;
	uint64_t tag; /* of messages in both directions: the service of the survivor's peer */
	uint8_t *out, *in, *source, *back;
	struct region *mine;
	uint64_t sends, sent, received, turns[KINDS];
	bool sending[WINDOW], receiving[WINDOW], under_way, met, closing, ended;
	enum kind access;
	struct header theirs;
	double good, gap, first_error, last_error;
	uint64_t errors;
	int error;
};

static const size_t lengths[] = { 64, 1000, 9000, 30000, LONGEST };
static struct side side;
static struct peer peers[PEERS];
static unsigned count;
static struct fid_mr *mr;
static double limit = 10;
static double stepped, stalled; /* the last step; the longest time between two since a success of DIES */
static bool survives;

static void progress(struct side *unused) { (void)unused; }

static uint8_t byte_of(uint64_t number, size_t i) { return (uint8_t)(number * 131 + i * 7); }

static bool may_fail(const struct peer *peer) { return survives && peer == &peers[1] && peer->met; }

static void succeeded(struct peer *peer)
{
	double at = now();

	if (peer->good && at - peer->good > peer->gap)
		peer->gap = at - peer->good;
	peer->good = at;
	if (peer == &peers[1])
		stalled = 0;
}

static void failed(struct peer *peer, int error)
{
	if (!may_fail(peer))
		die("%s: error %d (%s)", peer->name, error, fi_strerror(error));
	if (!peer->errors++) {
		peer->first_error = now();
		peer->error = error;
	}
	peer->last_error = now();
}

static void post_receives(struct peer *peer)
{
	for (unsigned slot = 0; slot < WINDOW; slot++) {
		if (peer->receiving[slot] || peer->errors)
			continue;
		uint8_t *at = peer->in + (size_t)slot * LONGEST;
		POST(&side, fi_trecv(side.ep, at, LONGEST, fi_mr_desc(mr), FI_ADDR_UNSPEC, peer->tag, 0, &peer->receiving[slot]));
		peer->receiving[slot] = true;
	}
}

static void post_send(struct peer *peer, bool last)
{
	unsigned slot = (unsigned)(peer->sends % WINDOW);
	uint8_t *at = peer->out + (size_t)slot * LONGEST;
	size_t len = lengths[peer->sends % 5];

	if (peer->sending[slot] || peer->errors || peer->closing)
		return;
	for (size_t i = sizeof(struct header); i < len; i++)
		at[i] = byte_of(peer->sends, i);
	*(struct header *)at = (struct header){ .number = peer->sends, .last = last, .addr = (uintptr_t)peer->mine, .key = fi_mr_key(mr) };
	ssize_t result = fi_tsend(side.ep, at, len, fi_mr_desc(mr), peer->to, peer->tag, &peer->sending[slot]);
	if (result == -FI_EAGAIN)
		return;
	MUST(result);
	peer->sending[slot] = true;
	peer->closing = last;
	peer->sends++;
}

/* One atomic, write or read at a time. A read follows a write, and returns its bytes. */
static void post_access(struct peer *peer)
{
	uint64_t word = peer->theirs.addr + offsetof(struct region, sum), area = peer->theirs.addr + offsetof(struct region, area);
	void *context = &peer->under_way, *desc = fi_mr_desc(mr);
	ssize_t result;

	if (!peer->met || peer->under_way || peer->errors || peer->closing)
		return;
	if (peer->access == ADD) {
		*(uint64_t *)peer->source = 1;
		result = fi_atomic(side.ep, peer->source, 1, desc, peer->to, word, peer->theirs.key, FI_UINT64, FI_SUM, context);
	} else if (peer->access == WRITE) {
		for (size_t i = 0; i < ACCESS; i++)
			peer->source[i] = byte_of(peer->turns[WRITE], i);
		result = fi_write(side.ep, peer->source, ACCESS, desc, peer->to, area, peer->theirs.key, context);
	} else {
		memset(peer->back, 0, ACCESS);
		result = fi_read(side.ep, peer->back, ACCESS, desc, peer->to, area, peer->theirs.key, context);
	}
	if (result == -FI_EAGAIN)
		return;
	MUST(result);
	peer->under_way = true;
}

static void accessed(struct peer *peer)
{
	if (peer->access == READ && memcmp(peer->back, peer->source, ACCESS))
		die("%s: read %llu has not the bytes of the write", peer->name, (unsigned long long)peer->turns[READ]);
	peer->turns[peer->access]++;
	peer->access = (peer->access + 1) % KINDS;
}

static void arrived(struct peer *peer, unsigned slot, size_t len)
{
	const uint8_t *at = peer->in + (size_t)slot * LONGEST;
	struct header header = *(const struct header *)at;

	if (len != lengths[header.number % 5])
		die("%s: message %llu has %zu bytes", peer->name, (unsigned long long)header.number, len);
	for (size_t i = sizeof header; i < len; i++)
		if (at[i] != byte_of(header.number, i))
			die("%s: message %llu: byte %zu is %02x", peer->name, (unsigned long long)header.number, i, at[i]);
	peer->theirs = header;
	peer->met = true;
	peer->ended |= header.last;
	peer->received++;
}

static void completed(void *context, size_t len, int error)
{
	for (struct peer *peer = peers; peer < peers + count; peer++) {
		bool *busy = context;
		bool access = busy == &peer->under_way;
		bool send = busy >= peer->sending && busy < peer->sending + WINDOW;
		bool receive = busy >= peer->receiving && busy < peer->receiving + WINDOW;

		if (!access && !send && !receive)
			continue;
		if (!*busy)
			die("%s: an operation has completed twice", peer->name);
		*busy = false;
		if (error)
			return failed(peer, error);
		succeeded(peer);
		if (access)
			accessed(peer);
		else if (send)
			peer->sent++;
		else
			arrived(peer, (unsigned)(busy - peer->receiving), len);
		return;
	}
	die("a completion of no operation");
}

static void poll_queue(struct fid_cq *cq)
{
	struct fi_cq_tagged_entry entry;
	struct fi_cq_err_entry error = { 0 };
	ssize_t got = fi_cq_read(cq, &entry, 1);

	if (got == -FI_EAGAIN)
		return;
	if (got == -FI_EAVAIL) {
		MUST(fi_cq_readerr(cq, &error, 0));
		return completed(error.op_context, 0, error.err);
	}
	MUST(got);
	completed(entry.op_context, entry.len, 0);
}

static void step(void)
{
	double at = now();

	if (at - stepped > stalled)
		stalled = at - stepped;
	stepped = at;
	for (struct peer *peer = peers; peer < peers + count; peer++) {
		post_receives(peer);
		post_send(peer, false);
		post_access(peer);
	}
	poll_queue(side.tx);
	poll_queue(side.rx);
}

static void open_all(int argc, char **argv)
{
	size_t each = 2 * WINDOW * (size_t)LONGEST + sizeof(struct region) + 2 * ACCESS + 64;
	uint8_t *memory;

	wanted.caps = FI_MSG | FI_TAGGED | FI_RMA | FI_ATOMIC;
	wanted.mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_PROV_KEY | FI_MR_ALLOCATED;
	wanted.service = argv[0];
	open_domain_of(&side);
	side.tx = queue(&side, 0);
	side.rx = queue(&side, 0);
	side.ep = endpoint_on(&side, 0);
	count = (unsigned)argc - 1;
	if (posix_memalign((void **)&memory, 4096, each * count))
		die("no memory");
	memset(memory, 0, each * count);
	MUST(fi_mr_reg(side.domain, memory, each * count, FI_SEND | FI_RECV | FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE, 0, 0, 0, &mr, NULL));
	for (unsigned i = 0; i < count; i++) {
		struct peer *peer = &peers[i];
		char *colon = strrchr(argv[1 + i], ':');

		if (!colon)
			die("%s is no address with a service", argv[1 + i]);
		*colon = 0;
		peer->name = survives ? i ? "the peer that dies" : "the peer that stays" : "the survivor";
		peer->tag = strtoull(survives ? colon + 1 : argv[0], NULL, 10);
		IS(fi_av_insertsvc(side.av, argv[1 + i], colon + 1, &peer->to, 0, NULL) == 1);
		peer->mine = (struct region *)memory;
		peer->source = memory + (sizeof(struct region) + 63) / 64 * 64;
		peer->back = peer->source + ACCESS;
		peer->out = peer->back + ACCESS;
		peer->in = peer->out + WINDOW * (size_t)LONGEST;
		memory += each / 64 * 64;
	}
}

static bool runs(const struct peer *peer)
{
	bool all = peer->received >= TURNS && peer->sent >= TURNS;

	for (int kind = 0; kind < KINDS; kind++)
		all &= peer->turns[kind] >= TURNS;
	return all;
}

static unsigned left(const struct peer *peer)
{
	unsigned number = peer->under_way;

	for (unsigned slot = 0; slot < WINDOW; slot++)
		number += peer->sending[slot];
	return number;
}

/* Whether operations of DIES should have completed. */
static bool late(const struct peer *dies)
{
	return now() - dies->good > limit + (stalled < PAUSE ? stalled : PAUSE);
}

static void survive(void)
{
	struct peer *stays = &peers[0], *dies = &peers[1];

	stepped = now();
	UNTIL_WITHIN(60, runs(stays) && runs(dies), step());
	stays->gap = 0;
	printf("running\n");
	/* the script ends the other machine some seconds from now */
	while (!dies->errors) {
		step();
		if (late(dies))
			die("no error within %.0f s and a pause of %.1f s: %u operations are under way", limit, stalled, left(dies));
	}
	while (left(dies)) {
		step();
		if (late(dies))
			die("%u operations have not completed after %.0f s and a pause of %.1f s, %llu errors", left(dies), limit, stalled,
			    (unsigned long long)dies->errors);
	}
	printf("the peer that dies: %llu messages sent, %llu received, %llu atomics, %llu writes, %llu reads, then the first error after %.2f s (%d, %s), "
	       "the last one after %.2f s, %llu errors; the survivor did not run for %.2f s\n",
	       (unsigned long long)dies->sent, (unsigned long long)dies->received, (unsigned long long)dies->turns[ADD], (unsigned long long)dies->turns[WRITE],
	       (unsigned long long)dies->turns[READ], dies->first_error - dies->good, dies->error, fi_strerror(dies->error), dies->last_error - dies->good,
	       (unsigned long long)dies->errors, stalled);
	for (double until = now() + LINGER; now() < until;)
		step();
	double paused = now() - stays->good > stays->gap ? now() - stays->good : stays->gap;
	printf("the peer that stays: %llu messages received, longest pause %.2f s\n", (unsigned long long)stays->received, paused);
	if (paused > PAUSE)
		die("the traffic with the peer that stays has paused for %.2f s", paused);
}

int main(int argc, char **argv)
{
	int c;

	while ((c = getopt(argc, argv, "sT:")) != -1) {
		survives |= c == 's';
		if (c == 'T')
			limit = atof(optarg);
	}
	if (argc - optind != (survives ? 5 : 4)) {
		fprintf(stderr, "usage: outlive -s [-T SECONDS] PROVIDER NODE SERVICE STAYS:SERVICE DIES:SERVICE\n"
				"       outlive PROVIDER NODE SERVICE PEER:SERVICE\n");
		return 2;
	}
	setvbuf(stdout, NULL, _IOLBF, 0);
	provider = argv[optind];
	role = node = argv[optind + 1];
	open_all(argc - optind - 2, argv + optind + 2);
	if (survives)
		survive();
	else
		UNTIL_WITHIN(120, peers[0].ended, step());
	/* each of the two sides that are left has the last message of the other one */
	UNTIL(peers[0].closing, { post_send(&peers[0], true); step(); });
	UNTIL(peers[0].ended && left(&peers[0]) == 0, step());
	/* answers that the other side waits for */
	for (double until = now() + LINGER; now() < until;)
		step();
	double began = now();
	MUST(fi_close(&side.ep->fid));
	side.ep = NULL;
	MUST(fi_close(&mr->fid));
	close_side(&side);
	printf("outlive: closed within %.2f s\n", now() - began);
	if (now() - began > limit)
		die("the objects were closed after %.2f s", now() - began);
	printf("outlive: ok\n");
	return 0;
}
