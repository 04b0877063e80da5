/* Endpoints with many peers in processes whose progress comes from fi_poll(3) alone: a queue or counter is read
 * only if fi_poll has returned its context, and a post that is refused is repeated after fi_poll.
 *
 *   rdm_poll all PROV NODE       four processes send messages of each length to each other
 *   rdm_poll small PROV NODE     the same with queues of 8 sends, 16 receives and 16 completions
 *   rdm_poll idle PROV NODE      the same, then 2.5 s without a call, then again
 *   rdm_poll counters PROV NODE  the same without completion entries: counters are in the set
 *   rdm_poll flood PROV NODE     three processes send to one that posts its receives 1 s later
 *   rdm_poll rma PROV NODE       writes, reads and atomics at a process that calls fi_poll alone
 *   rdm_poll killed PROV NODE    sends to a killed process complete in error, those to others do not
 *   rdm_poll stopped PROV NODE   a process is stopped for 2 s
 *   rdm_poll unasked PROV NODE   a process whose calls of fi_poll leave no room for the context of its counter
 *   rdm_poll set PROV NODE       fi_poll_add, fi_poll_del, the number of contexts, the order of closing
 *
 * A further argument `auto` requests FI_PROGRESS_AUTO. Ends with 0, or says what went wrong. Plain libfabric 1.17. */
#include "rdm_processes.h"

#include <rdma/fi_atomic.h>

enum { RANKS = 4, EACH = 24, LONGEST = 60000, IN = 24, OUT = 4, MEMORY_OF_RMA = 1 << 16 };

/* Words of the board */
enum { STAGE, DONE, GO, STOPPED, KEYS = 8, ADDRS = 16 };

static const size_t lengths[] = { 0, 1, 8, 200, 4096, 4097, 16384, LONGEST };
enum { LENGTHS = sizeof lengths / sizeof *lengths };

static int counted; /* counters instead of entries */

struct member {
	struct side side;
	struct fid_poll *set;
	fi_addr_t to[RANKS];
	int rank, ranks;
	uint8_t *in, *out;
	bool posted[IN], may_send[OUT]; /* by slot: receives posted, and buffers of sends that are free */
	int received, sent, failed;	/* completions */
	bool seen[RANKS][512];		/* messages of each rank: receives complete in any order */
	int progress[RANKS];		/* messages sent to each */
	uint64_t seen_sent, seen_received;
	bool errors;			/* are permitted */
};

static size_t length_of(int from, int to, int number)
{
	return lengths[mixed((uint64_t)(from * 100 + to * 10 + number)) % LENGTHS];
}

static uint64_t seed_of(int from, int to, int number) { return (uint64_t)(from * 16 + to) << 20 | (uint64_t)number; }

static struct fid_cq *open_cq(struct side *side, size_t size, void *context)
{
	struct fi_cq_attr attr = { .format = FI_CQ_FORMAT_TAGGED, .wait_obj = FI_WAIT_NONE, .size = size };
	struct fid_cq *cq;

	MUST(fi_cq_open(side->domain, &attr, &cq, context));
	return cq;
}

static struct fid_cntr *open_cntr(struct side *side, void *context)
{
	struct fi_cntr_attr attr = { .events = FI_CNTR_EVENTS_COMP, .wait_obj = FI_WAIT_NONE };
	struct fid_cntr *cntr;

	MUST(fi_cntr_open(side->domain, &attr, &cntr, context));
	return cntr;
}

static void join(struct member *member, int rank, int ranks)
{
	struct side *side = &member->side;
	struct fi_poll_attr attr = { 0 };

	memset(member, 0, sizeof *member);
	member->rank = rank;
	member->ranks = ranks;
	open_domain_of(side);
	MUST(fi_poll_open(side->domain, &attr, &member->set));
	if (counted) {
		side->sent = open_cntr(side, &side->sent);
		side->received = open_cntr(side, &side->received);
		MUST(fi_poll_add(member->set, &side->sent->fid, 0));
		MUST(fi_poll_add(member->set, &side->received->fid, 0));
	}
	side->tx = open_cq(side, wanted.tx_queue, &side->tx);
	side->rx = open_cq(side, wanted.rx_queue, &side->rx);
	MUST(fi_poll_add(member->set, &side->tx->fid, 0));
	MUST(fi_poll_add(member->set, &side->rx->fid, 0));
	side->ep = endpoint_on(side, counted ? FI_SELECTIVE_COMPLETION : 0);
	member->in = calloc(IN, LONGEST);
	member->out = calloc(OUT, LONGEST);
	for (int i = 0; i < OUT; i++)
		member->may_send[i] = true;
	publish(side->ep, rank);
	for (int i = 0; i < ranks; i++)
		member->to[i] = address(side, i);
}

static void take_receive(struct member *member, size_t slot, size_t len, uint64_t tag, bool known)
{
	uint8_t *bytes = member->in + slot * LONGEST;
	int from = (int)(tag >> 20) / 16, number = (int)(tag & 0xfffff);

	IS(slot < IN && member->posted[slot]);
	member->posted[slot] = false;
	member->received++;
	if (!known)
		return;
	IS(from < RANKS && number < 512 && !member->seen[from][number]);
	member->seen[from][number] = true;
	IS(len == length_of(from, member->rank, number));
	must_be(bytes, len, tag);
}

static void read_queue(struct member *member, struct fid_cq *cq)
{
	struct fi_cq_tagged_entry entry;
	struct fi_cq_err_entry error = { 0 };

	for (;;) {
		ssize_t got = fi_cq_read(cq, &entry, 1);

		if (got == -FI_EAGAIN)
			return;
		if (got == -FI_EAVAIL) {
			MUST(fi_cq_readerr(cq, &error, 0));
			if (!member->errors)
				die("a completion in error: %s (%llx)", fi_strerror(error.err), (unsigned long long)error.flags);
			member->failed++;
			if (error.flags & FI_SEND)
				member->may_send[(size_t)error.op_context] = true;
			continue;
		}
		MUST(got);
		if (cq == member->side.tx) {
			member->sent++;
			if ((size_t)entry.op_context < OUT)
				member->may_send[(size_t)entry.op_context] = true;
		} else {
			take_receive(member, (size_t)entry.op_context, entry.len, entry.tag, true);
		}
	}
}

/* The only call of a process into the library besides its posts and the reads that it leads to. */
static void poll_once(struct member *member)
{
	void *contexts[4];
	struct side *side = &member->side;
	int got = fi_poll(member->set, contexts, 4);

	MUST(got);
	for (int i = 0; i < got; i++) {
		if (contexts[i] == &side->tx)
			read_queue(member, side->tx);
		else if (contexts[i] == &side->rx)
			read_queue(member, side->rx);
		else if (counted && contexts[i] == &side->sent)
			member->seen_sent = fi_cntr_read(side->sent);
		else if (counted && contexts[i] == &side->received)
			member->seen_received = fi_cntr_read(side->received);
		else
			die("an unknown context");
	}
}

/* Posts what can be posted: receives of the untagged kind would lose the sender, so messages are tagged. */
static void post_receives(struct member *member, int limit)
{
	for (size_t slot = 0; slot < IN && limit; slot++) {
		if (member->posted[slot])
			continue;
		ssize_t posted = fi_trecv(member->side.ep, member->in + slot * LONGEST, LONGEST, NULL, FI_ADDR_UNSPEC, 0, ~0ULL,
					  (void *)slot);
		if (posted == -FI_EAGAIN)
			return;
		MUST(posted);
		member->posted[slot] = true;
		limit--;
	}
}

/* One message to the peer if there is a buffer and room. */
static bool send_one(struct member *member, int peer, int count)
{
	int number = member->progress[peer];
	uint64_t seed = seed_of(member->rank, peer, number);
	size_t len = length_of(member->rank, peer, number), slot = 0;

	if (number >= count)
		return false;
	while (slot < OUT && !member->may_send[slot])
		slot++;
	if (slot == OUT)
		return false;
	fill(member->out + slot * LONGEST, len, seed);
	ssize_t posted = fi_tsend(member->side.ep, member->out + slot * LONGEST, len, NULL, member->to[peer], seed, (void *)slot);
	if (posted == -FI_EAGAIN)
		return false;
	MUST(posted);
	member->may_send[slot] = false;
	member->progress[peer]++;
	return true;
}

/* `count` messages in all to each rank and from each rank; the tags are matched by any receive. */
static void all_to_all(struct member *member, int count)
{
	int total = count * member->ranks;

	UNTIL(member->received == total && member->sent == total, {
		for (int peer = 0; peer < member->ranks; peer++)
			send_one(member, peer, count);
		post_receives(member, IN);
		poll_once(member);
	});
}

static void leave(struct member *member)
{
	struct side *side = &member->side;

	add(DONE);
	UNTIL(told(DONE) >= (uint64_t)member->ranks, poll_once(member));
	MUST(fi_close(&side->ep->fid));
	side->ep = NULL;
	MUST(fi_poll_del(member->set, &side->tx->fid, 0));
	MUST(fi_poll_del(member->set, &side->rx->fid, 0));
	if (counted) {
		MUST(fi_poll_del(member->set, &side->sent->fid, 0));
		MUST(fi_poll_del(member->set, &side->received->fid, 0));
	}
	MUST(fi_close(&member->set->fid));
	close_side(side);
}

static unsigned idle_ms;

static void rank_all(int rank)
{
	struct member member;

	join(&member, rank, RANKS);
	all_to_all(&member, EACH);
	if (idle_ms) {
		/* the others may still need this process for their last messages */
		add(STAGE);
		UNTIL(told(STAGE) >= RANKS, poll_once(&member));
		pause_ms(idle_ms);
		all_to_all(&member, 2 * EACH);
	}
	leave(&member);
}

static void run(void (*rank)(int), int ranks)
{
	pid_t pids[RANKS];
	int failed = 0;

	for (int i = 0; i < ranks; i++)
		pids[i] = start("rank", rank, i);
	for (int i = 0; i < ranks; i++)
		failed |= status_of(pids[i], "rank");
	if (failed)
		exit(1);
}

static void check_all(void) { run(rank_all, RANKS); }

static void check_small(void)
{
	wanted.tx_size = 8;
	wanted.rx_size = 16;
	wanted.tx_queue = wanted.rx_queue = 16;
	check_all();
}

static void check_idle(void)
{
	idle_ms = 2500;
	check_all();
}

/* ---- counters ---- */

/* Each process sends a message of a fixed length to each, then waits for the counters. */
static void rank_counters(int rank)
{
	struct member member;

	counted = 1;
	join(&member, rank, RANKS);
	for (int i = 0; i < EACH / 2; i++) {
		uint64_t target = (uint64_t)(i + 1) * RANKS;

		for (size_t slot = 0; slot < RANKS; slot++) {
			ssize_t posted;

			UNTIL((posted = fi_recv(member.side.ep, member.in + slot * LONGEST, LONGEST, NULL, FI_ADDR_UNSPEC, NULL)) != -FI_EAGAIN,
			      poll_once(&member));
			MUST(posted);
		}
		for (int peer = 0; peer < RANKS; peer++) {
			ssize_t posted;

			UNTIL((posted = fi_send(member.side.ep, member.out, lengths[i % LENGTHS], NULL, member.to[peer], NULL)) != -FI_EAGAIN,
			      poll_once(&member));
			MUST(posted);
		}
		UNTIL(member.seen_sent == target && member.seen_received >= target, poll_once(&member));
		/* nobody is a round ahead, whose messages would find the receives of this one */
		add(STAGE);
		UNTIL(told(STAGE) >= target, poll_once(&member));
		IS(member.seen_received == target);
	}
	leave(&member);
}

static void check_counters(void) { run(rank_counters, RANKS); }

/* ---- a receiver without receives ---- */

static void rank_flood(int rank)
{
	struct member member;
	enum { MANY = 200 };

	join(&member, rank, RANKS);
	if (rank) {
		UNTIL(member.sent == MANY, {
			send_one(&member, 0, MANY);
			poll_once(&member);
		});
	} else {
		double begin = now() + 1;

		UNTIL(member.received == MANY * (RANKS - 1), {
			if (now() > begin)
				post_receives(&member, 4);
			poll_once(&member);
		});
	}
	leave(&member);
}

static void check_flood(void) { run(rank_flood, RANKS); }

/* ---- RMA ---- */

static void rank_rma(int rank)
{
	struct member member;
	struct fid_mr *mr;
	uint8_t *bytes = aligned_alloc(4096, MEMORY_OF_RMA), *own = aligned_alloc(4096, MEMORY_OF_RMA);
	uint64_t one = 1, before = 0;

	wanted.caps = FI_MSG | FI_TAGGED | FI_RMA | FI_ATOMIC;
	memset(bytes, 0, MEMORY_OF_RMA);
	join(&member, rank, RANKS);
	MUST(fi_mr_reg(member.side.domain, bytes, MEMORY_OF_RMA, FI_REMOTE_READ | FI_REMOTE_WRITE, 0, (uint64_t)rank + 1, 0, &mr, NULL));
	put(KEYS + rank, fi_mr_key(mr));
	put(ADDRS + rank, member.side.info->domain_attr->mr_mode & FI_MR_VIRT_ADDR ? (uint64_t)(uintptr_t)bytes : 0);
	add(STAGE);
	UNTIL(told(STAGE) >= RANKS, poll_once(&member));
	for (int i = 0; i < 30; i++) {
		int peer = (rank + 1 + i % (RANKS - 1)) % RANKS, sent = member.sent;
		uint64_t at = told(ADDRS + peer), part = at + 8192 + (uint64_t)rank * 4096;
		ssize_t posted;

		fill(own, 4096, (uint64_t)(rank * 100 + i));
		UNTIL((posted = fi_write(member.side.ep, own, 4096, NULL, member.to[peer], part, told(KEYS + peer), (void *)100)) != -FI_EAGAIN,
		      poll_once(&member));
		MUST(posted);
		UNTIL(member.sent == sent + 1, poll_once(&member));
		UNTIL((posted = fi_read(member.side.ep, own + 4096, 4096, NULL, member.to[peer], part, told(KEYS + peer), (void *)100)) !=
			      -FI_EAGAIN,
		      poll_once(&member));
		MUST(posted);
		UNTIL(member.sent == sent + 2, poll_once(&member));
		must_be(own + 4096, 4096, (uint64_t)(rank * 100 + i));
		UNTIL((posted = fi_fetch_atomic(member.side.ep, &one, 1, NULL, &before, NULL, member.to[peer], at, told(KEYS + peer), FI_UINT64,
						FI_SUM, (void *)100)) != -FI_EAGAIN,
		      poll_once(&member));
		MUST(posted);
		UNTIL(member.sent == sent + 3, poll_once(&member));
	}
	add(GO);
	UNTIL(told(GO) >= RANKS, poll_once(&member));
	memcpy(&before, bytes, 8);
	IS(before == 30);
	MUST(fi_close(&mr->fid));
	leave(&member);
}

static void check_rma(void) { run(rank_rma, RANKS); }

/* ---- killed and stopped processes ---- */

static int stop_only;

static void rank_victim(int rank)
{
	struct member member;

	join(&member, rank, RANKS);
	if (rank == RANKS - 1) {
		/* takes messages until it is killed, or has been stopped and all have come */
		UNTIL(told(DONE) >= RANKS - 1, {
			post_receives(&member, IN);
			if (member.received >= 20)
				put(GO, 1);
			poll_once(&member);
		});
		leave(&member);
		return;
	}
	member.errors = !stop_only;
	bool to_victim = true, to_others = true;
	UNTIL(member.received >= EACH * (RANKS - 1) && !to_others && (!to_victim || member.progress[RANKS - 1] >= 400), {
		to_others = false;
		for (int peer = 0; peer < RANKS - 1; peer++) {
			send_one(&member, peer, EACH);
			to_others |= member.progress[peer] < EACH;
		}
		if (to_victim)
			send_one(&member, RANKS - 1, 400);
		to_victim = !member.failed;
		post_receives(&member, IN);
		poll_once(&member);
	});
	if (!stop_only)
		IS(member.failed > 0);
	IS(member.received == EACH * (RANKS - 1));
	/* what is under way completes, in error or not */
	UNTIL(member.sent + member.failed >= EACH * (RANKS - 1) + member.progress[RANKS - 1], poll_once(&member));
	if (!stop_only)
		member.ranks = RANKS - 1;
	leave(&member);
}

static void run_victim(int signal)
{
	pid_t pids[RANKS];
	int failed = 0;

	for (int i = 0; i < RANKS; i++)
		pids[i] = start("rank", rank_victim, i);
	UNTIL(told(GO), pause_ms(1));
	kill(pids[RANKS - 1], signal);
	if (signal == SIGSTOP) {
		pause_ms(2000);
		kill(pids[RANKS - 1], SIGCONT);
	} else {
		waitpid(pids[RANKS - 1], NULL, 0);
	}
	for (int i = 0; i < RANKS - (signal == SIGKILL); i++)
		failed |= status_of(pids[i], "rank");
	if (failed)
		exit(1);
}

static void check_killed(void) { run_victim(SIGKILL); }

static void check_stopped(void)
{
	stop_only = 1;
	run_victim(SIGSTOP);
}

/* ---- no room for contexts ---- */

/* fi_poll(3): "Progresses all completion queues and counters associated with a poll set". Process 0 receives with
 * counters alone. Without room for any context, then with room for that of a queue which is never empty. */
static void rank_unasked(int rank)
{
	struct fi_poll_attr attr = { 0 };
	struct fi_cq_tagged_entry entry;
	uint8_t *in = calloc(1, LONGEST), *out = calloc(1, LONGEST);
	volatile uint8_t *last = in + LONGEST - 1;
	struct fid_cntr *received = NULL;
	struct fid_poll *set = NULL;
	struct fid_ep *full = NULL;
	struct side side;
	void *context;
	fi_addr_t to;

	open_domain_of(&side);
	if (rank == 0) {
		MUST(fi_poll_open(side.domain, &attr, &set));
		side.sent = open_cntr(&side, NULL);
		received = side.received = open_cntr(&side, &side.received);
	} else {
		side.tx = side.rx = open_cq(&side, 0, NULL);
	}
	side.ep = endpoint_on(&side, 0);
	publish(side.ep, rank);
	to = address(&side, 1 - rank);
	if (rank == 0) {
		/* another endpoint, whose queue has an entry that nobody reads, precedes the counter */
		struct side own = side;

		own.sent = own.received = NULL;
		own.tx = own.rx = open_cq(&side, 0, &side.rx);
		full = endpoint_on(&own, 0);
		struct name name = name_of(full);
		fi_addr_t itself = insert(&side, &name);
		MUST(fi_recv(full, in, 1, NULL, FI_ADDR_UNSPEC, NULL));
		MUST(fi_inject(full, in, 1, itself));
		MUST(fi_poll_add(set, &own.rx->fid, 0));
		UNTIL(fi_poll(set, &context, 1) == 1, (void)0);
		side.rx = own.rx;
	}
	for (unsigned i = 0; i < 2; i++) {
		if (rank == 0) {
			if (i == 0)
				MUST(fi_poll_del(set, &side.rx->fid, 0));
			else
				MUST(fi_poll_add(set, &side.rx->fid, 0));
			/* behind the queue */
			if (i == 1)
				MUST(fi_poll_del(set, &received->fid, 0));
			MUST(fi_poll_add(set, &received->fid, 0));
			MUST(fi_recv(side.ep, in, LONGEST, NULL, FI_ADDR_UNSPEC, NULL));
			add(GO);
			UNTIL(*last == i + 1, IS(fi_poll(set, i ? &context : NULL, (int)i) == (int)i));
			IS(!i || context == &side.rx);
			add(DONE);
		} else {
			UNTIL(told(GO) == i + 1, (void)fi_cq_read(side.tx, NULL, 0));
			memset(out, (int)i + 1, LONGEST);
			MUST(fi_send(side.ep, out, LONGEST, NULL, to, NULL));
			UNTIL(told(DONE) == i + 1, (void)fi_cq_read(side.tx, NULL, 0));
			UNTIL(fi_cq_read(side.tx, &entry, 1) == 1, (void)0);
		}
	}
	MUST(fi_close(&side.ep->fid));
	side.ep = full;
	if (rank == 0) {
		MUST(fi_poll_del(set, &side.rx->fid, 0));
		MUST(fi_poll_del(set, &received->fid, 0));
		MUST(fi_close(&set->fid));
	}
	close_side(&side);
}

static void check_unasked(void) { run(rank_unasked, 2); }

/* ---- the set ---- */

static bool has(struct member *member, void *context)
{
	void *contexts[8];
	int got = fi_poll(member->set, contexts, 8);

	MUST(got);
	for (int i = 0; i < got; i++)
		if (contexts[i] == context)
			return true;
	return false;
}

static void check_set(void)
{
	struct member member;
	struct side *side = &member.side;
	struct fi_cq_tagged_entry entry;
	void *contexts[2];

	join(&member, 0, 1);
	IS(fi_poll(member.set, contexts, 2) == 0);
	post_receives(&member, 2);
	UNTIL(send_one(&member, 0, 2), fi_poll(member.set, contexts, 2));
	UNTIL(has(&member, &side->rx), (void)0);
	UNTIL(has(&member, &side->tx), (void)0);
	/* a queue that is not empty is returned each time, and no more contexts than the array has room for */
	for (int i = 0; i < 3; i++)
		IS(fi_poll(member.set, contexts, 2) == 2 && contexts[0] != contexts[1]);
	contexts[1] = NULL;
	IS(fi_poll(member.set, contexts, 1) == 1 && !contexts[1]);
	/* a removed queue is not returned */
	MUST(fi_poll_del(member.set, &side->rx->fid, 0));
	for (int i = 0; i < 3; i++)
		IS(fi_poll(member.set, contexts, 2) == 1 && contexts[0] == &side->tx);
	MUST(fi_poll_add(member.set, &side->rx->fid, 0));
	IS(fi_poll(member.set, contexts, 2) == 2);
	IS(fi_cq_read(side->tx, &entry, 1) == 1);
	IS(fi_cq_read(side->rx, &entry, 1) == 1);
	UNTIL(fi_poll(member.set, contexts, 2) == 0, (void)0);
	MUST(fi_close(&side->ep->fid));
	side->ep = NULL;
	MUST(fi_poll_del(member.set, &side->tx->fid, 0));
	MUST(fi_poll_del(member.set, &side->rx->fid, 0));
	MUST(fi_close(&member.set->fid));
	close_side(side);
}

int main(int argc, char **argv)
{
	static const struct mode modes[] = {
		{ "all", check_all },	  { "small", check_small }, { "idle", check_idle },	  { "counters", check_counters }, { "flood", check_flood },
		{ "rma", check_rma },	  { "killed", check_killed }, { "stopped", check_stopped }, { "set", check_set },
		{ "unasked", check_unasked },
	};

	alarm(80);
	return run_mode(modes, sizeof modes / sizeof *modes, argc, argv);
}
