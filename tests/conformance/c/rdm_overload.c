/* Endpoints with many peers under more load than fits, from fi_endpoint(3), fi_msg(3),
 * fi_tagged(3), fi_cq(3), fi_cntr(3) and fi_poll(3), between processes:
 *
 *   rdm_overload unread PROV NODE      messages to a receiver that posts nothing: memory is
 *                                      bounded, and all of them come later, in their order
 *   rdm_overload deaf PROV NODE        the same, and the receiver calls nothing
 *   rdm_overload mutual PROV NODE      two processes do that to each other, until one posts
 *   rdm_overload behind PROV NODE      the only message with a receive is the last of many
 *   rdm_overload full PROV NODE        each waits for its sends while its receive queue is full
 *   rdm_overload readerr PROV NODE     fi_cq_readerr is the only call that makes progress
 *   rdm_overload transmit PROV NODE    one process reads its transmit queue alone
 *   rdm_overload counters PROV NODE    both processes only wait in fi_cntr_wait
 *   rdm_overload sread PROV NODE       both wait in fi_cq_sread, on two queues
 *   rdm_overload poll PROV NODE        both wait in poll(2), after fi_trywait
 *   rdm_overload idle PROV NODE        a new peer of an endpoint with many idle ones
 *   rdm_overload dial PROV NODE        both sides send at once, with new endpoints each time
 *   rdm_overload round PROV NODE       one endpoint and 64 peers in turn
 *   rdm_overload shared PROV NODE      16 endpoints with one completion queue
 *   rdm_overload threads PROV NODE     four threads with one endpoint
 *
 * The next argument is `auto` for FI_PROGRESS_AUTO, or `manual`. A last argument is the number
 * of messages, or of repetitions. Ends with 0, or says what went wrong. Plain libfabric 1.17;
 * link with -pthread. */
#include "rdm_processes.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <netinet/in.h>
#include <pthread.h>
#include <sys/resource.h>
#include <sys/stat.h>

static uint64_t count_wanted; /* 0: the mode's own */

static uint64_t count_or(uint64_t otherwise) { return count_wanted ? count_wanted : otherwise; }

/* ---- numbered messages in one direction ---- */

enum { SLOTS = 512, WINDOW = 64, LONGEST = 20000 };
enum { UNTAGGED, TAGGED, BOTH }; /* kinds of messages */

struct kind {
	int tags, injected, longer;
};

/* Of BOTH, every third message is untagged. */
static int is_tagged(struct kind kind, uint64_t number) { return kind.tags == BOTH ? number % 3 != 0 : kind.tags; }

static size_t length_of(struct kind kind, uint64_t number)
{
	uint64_t random = mixed(number);

	if (!kind.longer)
		return 8;
	random >>= 8;
	return (mixed(number) & 3) ? random % 100 : random % (LONGEST + 1);
}

struct outgoing {
	struct kind kind;
	uint64_t count, posted, done;
	fi_addr_t to;
	int idle[SLOTS], idles;
	uint8_t *slots;
};

struct incoming {
	struct kind kind;
	uint64_t count, done;
	uint64_t next[2]; /* the numbers of the messages for the next receives: untagged and tagged */
	uint64_t number[WINDOW * 2]; /* that of the message for each slot's receive */
	int idle[WINDOW * 2], idles;
	uint8_t *slots;
};

static void begin_out(struct outgoing *out, struct kind kind, uint64_t count, fi_addr_t to)
{
	*out = (struct outgoing){ .kind = kind, .count = count, .to = to, .idles = SLOTS };
	for (int i = 0; i < SLOTS; i++)
		out->idle[i] = i;
	out->slots = malloc((size_t)SLOTS * LONGEST);
	memset(out->slots, 1, (size_t)SLOTS * LONGEST); /* so that its pages count from the beginning */
}

static void begin_in(struct incoming *in, struct kind kind, uint64_t count)
{
	*in = (struct incoming){ .kind = kind, .count = count, .idles = WINDOW * 2 };
	for (int i = 0; i < WINDOW * 2; i++)
		in->idle[i] = i;
	for (int tagged = 0; tagged < 2; tagged++)
		while (in->next[tagged] < count && is_tagged(kind, in->next[tagged]) != tagged)
			in->next[tagged]++;
	in->slots = malloc((size_t)WINDOW * 2 * LONGEST);
	memset(in->slots, 1, (size_t)WINDOW * 2 * LONGEST);
}

/* Posts what can be posted, and reads completions of the transmit queue. Returns how many messages
 * were posted or completed. */
static unsigned send_some(struct side *side, struct outgoing *out)
{
	struct fi_cq_tagged_entry entries[16];
	unsigned moved = 0;

	while (out->posted < out->count && out->idles > 0 && moved < 16) {
		int slot = out->idle[out->idles - 1], tagged = is_tagged(out->kind, out->posted);
		uint8_t *bytes = out->slots + (size_t)slot * LONGEST;
		size_t len = length_of(out->kind, out->posted);
		int injected = out->kind.injected && len <= side->info->tx_attr->inject_size;
		ssize_t ret;

		fill(bytes, len, out->posted);
		if (injected)
			ret = tagged ? fi_tinject(side->ep, bytes, len, out->to, out->posted) : fi_inject(side->ep, bytes, len, out->to);
		else
			ret = tagged ? fi_tsend(side->ep, bytes, len, NULL, out->to, out->posted, bytes)
				     : fi_send(side->ep, bytes, len, NULL, out->to, bytes);
		if (ret == -FI_EAGAIN)
			break;
		MUST(ret);
		moved++;
		out->posted++;
		if (injected)
			out->done++;
		else
			out->idles--;
	}
	size_t got = take(side->tx, entries, 16);
	for (size_t i = 0; i < got; i++) {
		uint8_t *context = entries[i].op_context;

		IS((entries[i].flags & (FI_SEND | FI_RECV)) == FI_SEND && out->idles < SLOTS);
		out->idle[out->idles++] = (int)((size_t)(context - out->slots) / LONGEST);
		out->done++;
	}
	return moved + (unsigned)got;
}

/* Keeps receives posted, and checks what came: each kind's messages match its receives in their
 * order. The order of their completions is free. */
static unsigned receive_some(struct side *side, struct incoming *in)
{
	struct fi_cq_tagged_entry entries[16];
	unsigned moved = 0;

	while (in->idles > 0 && moved < 16) {
		/* in the order of the messages, so that neither kind takes all slots */
		int tagged = in->next[1] < in->next[0], slot = in->idle[in->idles - 1];
		uint8_t *bytes = in->slots + (size_t)slot * LONGEST;
		ssize_t ret;

		if (in->next[tagged] >= in->count)
			break;
		ret = tagged ? fi_trecv(side->ep, bytes, LONGEST, NULL, FI_ADDR_UNSPEC, 0, ~0ULL, bytes)
			     : fi_recv(side->ep, bytes, LONGEST, NULL, FI_ADDR_UNSPEC, bytes);
		if (ret == -FI_EAGAIN)
			break;
		MUST(ret);
		in->number[slot] = in->next[tagged];
		do
			in->next[tagged]++;
		while (in->next[tagged] < in->count && is_tagged(in->kind, in->next[tagged]) != tagged);
		in->idles--;
		moved++;
	}
	size_t got = take(side->rx, entries, 16);
	for (size_t i = 0; i < got; i++) {
		int tagged = !!(entries[i].flags & FI_TAGGED);
		uint8_t *bytes = entries[i].op_context;
		int slot = (int)((size_t)(bytes - in->slots) / LONGEST);
		uint64_t number = in->number[slot];

		if (entries[i].len != length_of(in->kind, number) || tagged != is_tagged(in->kind, number) || (tagged && entries[i].tag != number))
			die("instead of message %llu of kind %d: length %zu, tag %llu", (unsigned long long)number, tagged, entries[i].len,
			    (unsigned long long)entries[i].tag);
		must_be(bytes, entries[i].len, number);
		in->idle[in->idles++] = slot;
		in->done++;
	}
	return moved + (unsigned)got;
}

static const struct kind KINDS[] = {
	{ UNTAGGED, 0, 0 }, { UNTAGGED, 1, 0 }, { TAGGED, 0, 0 }, { TAGGED, 1, 0 }, { BOTH, 0, 1 }, { BOTH, 1, 1 },
};
enum { KIND_COUNT = sizeof KINDS / sizeof *KINDS };

/* What a process may use for messages that nobody has asked for. */
#define MEMORY_LIMIT (64UL << 20)

/* Words of the board */
enum { MOVES, MOVES_2, STAGE, STAGE_2, MEMORY_OUT, MEMORY_IN };

static void no_more_than_limit(const char *what, uint64_t before)
{
	uint64_t after = resident();

	fprintf(stderr, "%s: %llu KiB more\n", what, (unsigned long long)(after > before ? (after - before) >> 10 : 0));
	if (after > before + MEMORY_LIMIT)
		die("memory grew from %llu to %llu KiB", (unsigned long long)before >> 10, (unsigned long long)after >> 10);
}

static uint64_t messages_of(struct kind kind) { return kind.longer ? count_or(60000) / 4 + 1 : count_or(60000); }

/* Whether the word has not changed for that long, while something is done. */
#define STANDS(word, seconds, doing)                                                                                 \
	do {                                                                                                         \
		uint64_t last = told(word);                                                                          \
		double since = now();                                                                                \
		while (now() - since < (seconds)) {                                                                  \
			doing;                                                                                       \
			if (told(word) != last) {                                                                    \
				last = told(word);                                                                   \
				since = now();                                                                       \
			}                                                                                            \
		}                                                                                                    \
	} while (0)

static void unread_sender(int unused)
{
	struct outgoing out;
	struct side side;

	(void)unused;
	open_side(&side, 0);
	fi_addr_t to = address(&side, 1);
	for (int i = 0; i < KIND_COUNT; i++) {
		begin_out(&out, KINDS[i], messages_of(KINDS[i]), to);
		uint64_t before = resident();
		double limit = now() + SECONDS + (double)out.count / 20000;

		while (out.done < out.count) {
			if (send_some(&side, &out))
				add(MOVES);
			if (now() > limit)
				die("kind %d: %llu posted, %llu complete", i, (unsigned long long)out.posted, (unsigned long long)out.done);
		}
		no_more_than_limit("sender", before);
		free(out.slots);
		put(STAGE, (uint64_t)i + 1);
		UNTIL(told(STAGE_2) >= (uint64_t)i + 1, progress(&side));
	}
	close_side(&side);
}

static void unread_receiver(int deaf)
{
	struct incoming in;
	struct side side;

	open_side(&side, 1);
	address(&side, 0);
	for (int i = 0; i < KIND_COUNT; i++) {
		struct pollfd none;

		begin_in(&in, KINDS[i], messages_of(KINDS[i]));
		uint64_t before = resident();

		if (deaf)
			STANDS(MOVES, 0.2, poll(&none, 0, 1));
		else
			STANDS(MOVES, 0.2, (void)fi_cq_read(side.rx, NULL, 0));
		no_more_than_limit("receiver", before);
		double limit = now() + SECONDS + (double)in.count / 20000;
		while (in.done < in.count) {
			receive_some(&side, &in);
			if (now() > limit)
				die("kind %d: %llu received", i, (unsigned long long)in.done);
		}
		no_more_than_limit("receiver, at the end", before);
		free(in.slots);
		put(STAGE_2, (uint64_t)i + 1);
		UNTIL(told(STAGE) >= (uint64_t)i + 1, progress(&side));
	}
	close_side(&side);
}

static void two(void (*one)(int), int first, void (*other)(int), int second)
{
	pid_t a = start("first", one, first), b = start("second", other, second);

	int failed = status_of(a, "first");
	failed |= status_of(b, "second");
	if (failed)
		exit(1);
}

static void check_unread(void) { two(unread_sender, 0, unread_receiver, 0); }
static void check_deaf(void) { two(unread_sender, 0, unread_receiver, 1); }

/* ---- a message behind many for which there is no receive yet ---- */

enum { CROWD = 15, EACH = 150, CROWD_LENGTH = 4000 };

/* Of each sender, EACH messages, all outstanding, tagged by its place and by their numbers. */
static void crowd_sender(int this)
{
	static uint8_t bytes[EACH][CROWD_LENGTH];
	struct side side;

	open_side(&side, this);
	fi_addr_t to = address(&side, 0);
	for (uint64_t i = 0; i < EACH; i++) {
		uint64_t tag = (uint64_t)this << 32 | i;

		fill(bytes[i], CROWD_LENGTH, tag);
		POST(&side, fi_tsend(side.ep, bytes[i], CROWD_LENGTH, NULL, to, tag, bytes[i]));
	}
	add(STAGE);
	for (int i = 0; i < EACH; i++)
		next(&side, side.tx);
	add(STAGE_2);
	UNTIL(told(STAGE_2) == CROWD + 1, progress(&side));
	close_side(&side);
}

/* Takes the messages of each sender in the reverse order: each receive is that of a message behind
 * all of its sender that have not been received. */
static void crowd_receiver(int unused)
{
	uint8_t bytes[CROWD_LENGTH];
	struct side side;

	(void)unused;
	open_side(&side, 0);
	UNTIL(told(STAGE) == CROWD, progress(&side));
	for (uint64_t i = EACH; i-- > 0;)
		for (uint64_t from = 1; from <= CROWD; from++) {
			uint64_t tag = from << 32 | i;

			POST(&side, fi_trecv(side.ep, bytes, sizeof bytes, NULL, FI_ADDR_UNSPEC, tag, 0, NULL));
			struct fi_cq_tagged_entry got = next(&side, side.rx);
			IS(got.tag == tag && got.len == CROWD_LENGTH);
			must_be(bytes, CROWD_LENGTH, tag);
		}
	add(STAGE_2);
	UNTIL(told(STAGE_2) == CROWD + 1, progress(&side));
	close_side(&side);
}

static void check_behind(void)
{
	pid_t pids[CROWD + 1];
	int failed = 0;

	pids[0] = start("receiver", crowd_receiver, 0);
	for (int i = 1; i <= CROWD; i++)
		pids[i] = start("sender", crowd_sender, i);
	for (int i = 0; i <= CROWD; i++)
		failed |= status_of(pids[i], "behind");
	if (failed)
		exit(1);
}

/* Process 0 posts receives when neither can send more, process 1 when all its sends are
 * complete. */
static void mutual(int this)
{
	struct outgoing out;
	struct incoming in;
	struct side side;

	open_side(&side, this);
	fi_addr_t to = address(&side, !this);
	for (int i = 0; i < KIND_COUNT; i++) {
		int mine = this ? MOVES_2 : MOVES, theirs = this ? MOVES : MOVES_2, receives = 0;
		uint64_t last = 0;
		double since = now(), limit = now() + SECONDS + (double)messages_of(KINDS[i]) / 20000;

		begin_out(&out, KINDS[i], messages_of(KINDS[i]), to);
		begin_in(&in, KINDS[i], messages_of(KINDS[i]));
		uint64_t before = resident();
		while (out.done < out.count || in.done < in.count) {
			if (send_some(&side, &out))
				add(mine);
			if (receives)
				receive_some(&side, &in);
			else if (told(theirs) + told(mine) != last) {
				last = told(theirs) + told(mine);
				since = now();
			} else if (this == 0 ? now() - since > 0.2 : out.done == out.count) {
				receives = 1;
			}
			if (now() > limit)
				die("kind %d: %llu posted, %llu complete, %llu received", i, (unsigned long long)out.posted,
				    (unsigned long long)out.done, (unsigned long long)in.done);
		}
		no_more_than_limit(role, before);
		free(out.slots);
		free(in.slots);
		put(this ? STAGE_2 : STAGE, (uint64_t)i + 1);
		UNTIL(told(this ? STAGE : STAGE_2) >= (uint64_t)i + 1, progress(&side));
	}
	close_side(&side);
}

static void check_mutual(void) { two(mutual, 0, mutual, 1); }

/* ---- queues that are not read ---- */

static void full(int this)
{
	static const size_t lengths[] = { 16, 5000, 300000 };
	enum { ENTRIES = 8, COUNT = 64 };
	struct fi_cq_tagged_entry entry;
	struct side side;

	wanted.rx_queue = ENTRIES;
	open_side(&side, this);
	fi_addr_t to = address(&side, !this);
	for (int i = 0; i < 3; i++) {
		size_t len = lengths[i];
		uint8_t *out = malloc(len), *in = malloc(len * COUNT);

		for (unsigned at = 0; at < COUNT; at++)
			POST(&side, fi_recv(side.ep, in + at * len, len, NULL, FI_ADDR_UNSPEC, in + at * len));
		add(STAGE);
		UNTIL(told(STAGE) >= (uint64_t)(2 * i + 1) * 2, (void)0);
		fill(out, len, (uint64_t)i);
		/* only the transmit queue is read, although the other one has 8 entries for 64
		 * messages */
		unsigned posted = 0, done = 0;
		UNTIL(done == COUNT, {
			if (posted < COUNT) {
				ssize_t ret = fi_send(side.ep, out, len, NULL, to, out);

				if (ret != -FI_EAGAIN)
					MUST(ret);
				posted += ret == 0;
			}
			done += (unsigned)take(side.tx, &entry, 1);
		});
		add(STAGE);
		UNTIL(told(STAGE) >= (uint64_t)(2 * i + 2) * 2, (void)fi_cq_read(side.tx, NULL, 0));
		for (unsigned at = 0; at < COUNT; at++) {
			entry = next(&side, side.rx);
			IS(entry.len == len);
			must_be(entry.op_context, len, (uint64_t)i);
			memset(entry.op_context, 0, len);
		}
		free(out);
		free(in);
	}
	add(STAGE_2);
	UNTIL(told(STAGE_2) >= 2, progress(&side));
	close_side(&side);
}

static void check_full(void) { two(full, 0, full, 1); }

/* Injected messages, whose sender calls fi_cq_readerr alone, of either queue. */
static void readerr(int this)
{
	struct fi_cq_err_entry error;
	struct incoming in;
	struct side side;
	uint64_t count = count_or(60000);
	uint8_t bytes[8];

	open_side(&side, this);
	fi_addr_t to = address(&side, !this);
	for (int direction = 0; direction < 2; direction++) {
		if (this == direction) {
			for (uint64_t i = 0; i < count; i++) {
				ssize_t ret;

				fill(bytes, 8, i);
				UNTIL((ret = fi_tinject(side.ep, bytes, 8, to, i)) != -FI_EAGAIN, {
					memset(&error, 0, sizeof error);
					RETURNS(fi_cq_readerr(i % 2 ? side.tx : side.rx, &error, 0), -FI_EAGAIN);
				});
				MUST(ret);
			}
			add(STAGE);
			UNTIL(told(STAGE) >= (uint64_t)direction * 2 + 2, RETURNS(fi_cq_readerr(side.tx, &error, 0), -FI_EAGAIN));
		} else {
			begin_in(&in, (struct kind){ TAGGED, 1, 0 }, count);
			double limit = now() + SECONDS;
			while (in.done < count) {
				receive_some(&side, &in);
				if (now() > limit)
					die("%llu received", (unsigned long long)in.done);
			}
			add(STAGE);
			UNTIL(told(STAGE) >= (uint64_t)direction * 2 + 2, progress(&side));
			free(in.slots);
		}
	}
	close_side(&side);
}

static void check_readerr(void) { two(readerr, 0, readerr, 1); }

/* Process 0 has receives and reads its transmit queue alone. */
static void transmit(int this)
{
	static const size_t lengths[] = { 0, 64, 8000, 1UL << 20 };
	enum { COUNT = 40 };
	struct fi_cq_tagged_entry entry;
	struct side side;
	uint8_t *in = malloc(lengths[3] * 4), *out = malloc(lengths[3]);

	open_side(&side, this);
	fi_addr_t to = address(&side, !this);
	for (int i = 0; i < 4; i++) {
		size_t len = lengths[i], count = i == 3 ? 4 : COUNT;

		if (this == 0) {
			for (size_t at = 0; at < count; at++)
				POST(&side, fi_trecv(side.ep, in + at * len, len, NULL, FI_ADDR_UNSPEC, at, 0, NULL));
			put(STAGE, (uint64_t)i + 1);
			UNTIL(told(STAGE_2) >= (uint64_t)i + 1, IS(take(side.tx, &entry, 1) == 0));
			for (size_t at = 0; at < count; at++) {
				entry = next(&side, side.rx);
				IS(entry.len == len && entry.tag == at);
				must_be(in + at * len, len, (uint64_t)i);
			}
		} else {
			fill(out, len, (uint64_t)i);
			UNTIL(told(STAGE) >= (uint64_t)i + 1, (void)0);
			for (size_t at = 0; at < count; at++) {
				struct iovec iov = { out, len };
				struct fi_msg_tagged msg = { .msg_iov = &iov, .iov_count = 1, .addr = to, .tag = at };

				POST(&side, fi_tsendmsg(side.ep, &msg, FI_COMPLETION | FI_DELIVERY_COMPLETE));
				next(&side, side.tx);
			}
			put(STAGE_2, (uint64_t)i + 1);
		}
	}
	add(MOVES);
	UNTIL(told(MOVES) >= 2, progress(&side));
	close_side(&side);
}

static void check_transmit(void) { two(transmit, 0, transmit, 1); }

/* ---- ways of waiting ---- */

static const size_t WAITED[] = { 8, 3000, 70000, 1UL << 20 };
enum { ROUNDS = 100 };

static void counters(int this)
{
	struct side side;
	uint8_t *in = malloc(WAITED[3]), *out = malloc(WAITED[3]);
	uint64_t round = 0;

	open_domain_of(&side);
	side.sent = counter(&side);
	side.received = counter(&side);
	side.ep = endpoint_on(&side, 0);
	publish(side.ep, this);
	fi_addr_t to = address(&side, !this);
	for (int i = 0; i < 4; i++)
		for (int turn = 0; turn < ROUNDS / (i == 3 ? 10 : 1); turn++) {
			size_t len = WAITED[i];

			round++;
			MUST(fi_recv(side.ep, in, len, NULL, FI_ADDR_UNSPEC, NULL));
			if (this == 1)
				RETURNS(fi_cntr_wait(side.received, round, SECONDS * 1000), 0);
			fill(out, len, round * 2 + (uint64_t)this);
			MUST(fi_send(side.ep, out, len, NULL, to, NULL));
			RETURNS(fi_cntr_wait(side.sent, round, SECONDS * 1000), 0);
			if (this == 0)
				RETURNS(fi_cntr_wait(side.received, round, SECONDS * 1000), 0);
			must_be(in, len, round * 2 + !this);
		}
	add(STAGE);
	UNTIL(told(STAGE) >= 2, progress(&side));
	close_side(&side);
}

static void check_counters(void) { two(counters, 0, counters, 1); }

static void wait_in_sread(struct side *side, struct fid_cq *cq, struct fi_cq_tagged_entry *entry)
{
	ssize_t got;

	(void)side;
	while ((got = fi_cq_sread(cq, entry, 1, NULL, SECONDS * 1000)) == -FI_EINTR)
		;
	if (got != 1)
		die("fi_cq_sread: %zd", got);
}

static void wait_in_poll(struct side *side, struct fid_cq *cq, struct fi_cq_tagged_entry *entry)
{
	struct fid *fids[] = { &side->tx->fid, &side->rx->fid };
	struct pollfd fds[2] = { { .events = POLLIN }, { .events = POLLIN } };

	for (int i = 0; i < 2; i++)
		MUST(fi_control(fids[i], FI_GETWAIT, &fds[i].fd));
	for (;;) {
		if (take(cq, entry, 1))
			return;
		int ret = fi_trywait(side->fabric, fids, 2);
		if (ret == -FI_EAGAIN) {
			/* the other queue may be what has something: it can't be read here */
			(void)fi_cq_read(cq == side->tx ? side->rx : side->tx, NULL, 0);
			continue;
		}
		MUST(ret);
		if (poll(fds, 2, SECONDS * 1000) < 1)
			die("poll: nothing within %d s", SECONDS);
	}
}

static void (*waits)(struct side *, struct fid_cq *, struct fi_cq_tagged_entry *);

static void waiting(int this)
{
	struct fi_cq_tagged_entry entry;
	struct side side;
	uint8_t *in = malloc(WAITED[3]), *out = malloc(WAITED[3]);
	uint64_t round = 0;

	wanted.wait = waits == wait_in_poll ? FI_WAIT_FD : FI_WAIT_UNSPEC;
	open_side(&side, this);
	fi_addr_t to = address(&side, !this);
	for (int i = 0; i < 4; i++)
		for (int turn = 0; turn < ROUNDS / (i == 3 ? 10 : 1); turn++) {
			size_t len = WAITED[i];
			/* a receive that is posted late, for a message that waits */
			int late = turn % 3 == 0;

			round++;
			if (!late)
				MUST(fi_trecv(side.ep, in, len, NULL, FI_ADDR_UNSPEC, round, 0, in));
			if (this == 1 && !late)
				waits(&side, side.rx, &entry);
			fill(out, len, round * 2 + (uint64_t)this);
			MUST(fi_tsend(side.ep, out, len, NULL, to, round, out));
			/* the peer's receive exists only when its own send is complete, which
			 * may be when this process has taken it */
			if (late)
				MUST(fi_trecv(side.ep, in, len, NULL, FI_ADDR_UNSPEC, round, 0, in));
			waits(&side, side.tx, &entry);
			IS(entry.op_context == out);
			if (this == 0 || late)
				waits(&side, side.rx, &entry);
			must_be(in, len, round * 2 + !this);
		}
	add(STAGE);
	UNTIL(told(STAGE) >= 2, progress(&side));
	close_side(&side);
}

static void check_sread(void)
{
	waits = wait_in_sread;
	two(waiting, 0, waiting, 1);
}

static void check_poll(void)
{
	waits = wait_in_poll;
	two(waiting, 0, waiting, 1);
}

/* ---- many endpoints ---- */

#define WAITING 80 /* seconds */

/* Bytes of an address in the vector to which nothing is sent. */
enum { PER_ADDRESS = 64 };
/* Bytes of an idle connected peer on soft0, private and shared, and bytes that do not depend on the
 * number of peers: 128 to 256 receives, and a ring for each of the other processes. */
enum { PER_PEER = 15 << 10, OWN = 2 << 20 };
enum { CENTRE = 0, FIRST_PEER = 10, MAX_HOLDERS = 3 };
static int peer_count, holders;

/* An endpoint has some descriptors. */
static void allow_descriptors(void)
{
	struct rlimit limit;

	MUST(getrlimit(RLIMIT_NOFILE, &limit));
	limit.rlim_cur = limit.rlim_max;
	MUST(setrlimit(RLIMIT_NOFILE, &limit));
}

/* Resident memory of this process that it shares with no other: on soft0 a process maps the receive
 * queues of its peers. */
static uint64_t private_memory(void)
{
	unsigned long pages = 0, shared = 0;
	FILE *file = fopen("/proc/self/statm", "r");

	if (!file || fscanf(file, "%*u %lu %lu", &pages, &shared) != 2)
		die("/proc/self/statm");
	fclose(file);
	return (uint64_t)(pages - shared) * (uint64_t)sysconf(_SC_PAGESIZE);
}

/* The pages of the files that this process shares with its peers on soft0. It has closed the
 * descriptors of the peers' files. */
static uint64_t shared_memory(void)
{
	DIR *files = opendir("/proc/self/fd");
	struct dirent *entry;
	uint64_t sum = 0;

	if (!files)
		die("/proc/self/fd");
	while ((entry = readdir(files))) {
		char path[300], name[100] = "";
		struct stat status;

		snprintf(path, sizeof path, "/proc/self/fd/%s", entry->d_name);
		if (readlink(path, name, sizeof name - 1) > 0 && !strncmp(name, "/memfd:softverbs", 16) && !stat(path, &status))
			sum += (uint64_t)status.st_blocks * 512;
	}
	closedir(files);
	return sum;
}

/* The memory of addresses in a vector to which nothing is sent. */
static void knows_many(void)
{
	struct side side;
	enum { ADDRESSES = 200000, BATCH = 1000 };
	struct sockaddr_in *names = calloc(BATCH, sizeof *names);
	fi_addr_t *addrs = calloc(BATCH, sizeof *addrs);

	memset(names, 1, BATCH * sizeof *names);
	memset(addrs, 1, BATCH * sizeof *addrs);
	open_domain_of(&side);
	uint64_t before = resident();
	for (uint32_t i = 0; i < ADDRESSES; i += BATCH) {
		for (uint32_t j = 0; j < BATCH; j++)
			names[j] = (struct sockaddr_in){ .sin_family = AF_INET,
							 .sin_addr.s_addr = htonl(0x7f100000 + (i + j) / 50000),
							 .sin_port = htons((uint16_t)(1024 + (i + j) % 50000)) };
		RETURNS(fi_av_insert(side.av, names, BATCH, addrs, 0, NULL), BATCH);
	}
	uint64_t per = (resident() - before) / ADDRESSES;
	fprintf(stderr, "a known peer: %llu B\n", (unsigned long long)per);
	IS(per < PER_ADDRESS);
	close_side(&side);
}

/* One process with a part of the peers: each sends once, gets an answer, and then is idle. */
static void holds_peers(int which)
{
	int count = peer_count / holders, base = FIRST_PEER + which * count;
	struct fid_ep **eps = calloc((size_t)count, sizeof *eps);
	struct side side;
	uint64_t *in = calloc((size_t)count, sizeof *in);

	open_domain_of(&side);
	side.tx = side.rx = queue(&side, 4096);
	fi_addr_t to = address(&side, CENTRE);
	allow_descriptors();
	for (int i = 0; i < count; i++) {
		uint64_t number = (uint64_t)(base + i);

		eps[i] = endpoint_on(&side, 0);
		publish(eps[i], base + i);
		POST(&side, fi_trecv(eps[i], &in[i], 8, NULL, FI_ADDR_UNSPEC, number, 0, &in[i]));
		POST(&side, fi_tinject(eps[i], &number, 8, to, number));
	}
	for (int i = 0; i < count; i++) {
		struct fi_cq_tagged_entry got = next(&side, side.rx);
		uint64_t *at = got.op_context;

		IS(got.tag == (uint64_t)(base + (at - in)) && *at == ~got.tag);
	}
	add(STAGE);
	UNTIL_WITHIN(WAITING, told(STAGE_2), pause_ms(1));
	for (int i = 0; i < count; i++)
		MUST(fi_close(&eps[i]->fid));
	close_side(&side);
}

static void newcomer(int which)
{
	struct side side;
	uint64_t number = 1, in = 0;

	UNTIL_WITHIN(WAITING, told(STAGE) >= (uint64_t)holders, pause_ms(1));
	open_side(&side, 1 + which);
	fi_addr_t to = address(&side, CENTRE);
	double began = now();
	/* the first newcomer dials, the second one is dialled */
	POST(&side, fi_trecv(side.ep, &in, 8, NULL, FI_ADDR_UNSPEC, 1, 0, &in));
	if (which == 0)
		POST(&side, fi_tinject(side.ep, &number, 8, to, 1));
	next(&side, side.rx);
	if (which == 1)
		POST(&side, fi_tinject(side.ep, &number, 8, to, 1));
	IS(in == 1);
	fprintf(stderr, "a newcomer's round trip: %.3f s\n", now() - began);
	IS(now() - began < 5);
	add(MOVES);
	UNTIL(told(STAGE_2), progress(&side));
	close_side(&side);
}

static void centre(int unused)
{
	struct side side;
	uint64_t *in = calloc(NAMES, sizeof *in), one = 1;

	(void)unused;
	knows_many();
	open_side(&side, CENTRE);
	uint64_t before = private_memory(), shared = shared_memory();
	for (int i = 0; i < peer_count; i++) {
		fi_addr_t from = address(&side, FIRST_PEER + i);
		uint64_t tag = (uint64_t)(FIRST_PEER + i), answer = ~tag;

		POST(&side, fi_trecv(side.ep, &in[i], 8, NULL, FI_ADDR_UNSPEC, tag, 0, &in[i]));
		IS(next(&side, side.rx).tag == tag && in[i] == tag);
		POST(&side, fi_tinject(side.ep, &answer, 8, from, tag));
	}
	UNTIL(told(STAGE) >= (uint64_t)holders, progress(&side));
	uint64_t per = (private_memory() - before) / (uint64_t)peer_count;
	shared = (shared_memory() - shared) / (uint64_t)peer_count;
	fprintf(stderr, "%d idle connected peers: %llu B each, and %llu B of shared files\n", peer_count,
		(unsigned long long)per, (unsigned long long)shared);
	if (!strncmp(side.info->domain_attr->name, "soft0", 5))
		IS((per + shared) * (uint64_t)peer_count < OWN + (uint64_t)peer_count * PER_PEER);
	fi_addr_t comers[2] = { address(&side, 1), address(&side, 2) };
	POST(&side, fi_tinject(side.ep, &one, 8, comers[1], 1));
	for (int i = 0; i < 2; i++) {
		POST(&side, fi_trecv(side.ep, &in[i], 8, NULL, FI_ADDR_UNSPEC, 1, 0, &in[i]));
		next(&side, side.rx);
	}
	POST(&side, fi_tinject(side.ep, &one, 8, comers[0], 1));
	UNTIL(told(MOVES) >= 2, progress(&side));
	put(STAGE_2, 1);
	close_side(&side);
}

static void check_idle(void)
{
	pid_t pids[MAX_HOLDERS + 3];
	int failed = 0;

	holders = MAX_HOLDERS;
	peer_count = (int)count_or(240) / holders * holders;
	pids[0] = start("centre", centre, 0);
	for (int i = 0; i < holders; i++)
		pids[1 + i] = start("holder", holds_peers, i);
	for (int i = 0; i < 2; i++)
		pids[1 + holders + i] = start("newcomer", newcomer, i);
	for (int i = 0; i < holders + 3; i++)
		failed |= status_of(pids[i], "idle");
	if (failed)
		exit(1);
}

/* Peers of `round`: each answers every message of the centre. */
static void answers(int which)
{
	int count = peer_count / holders, base = FIRST_PEER + which * count;
	struct fid_ep **eps = calloc((size_t)count, sizeof *eps);
	struct side side;
	uint64_t (*in)[4] = calloc((size_t)count, sizeof *in);

	open_domain_of(&side);
	side.tx = side.rx = queue(&side, 4096);
	fi_addr_t to = address(&side, CENTRE);
	for (int i = 0; i < count; i++) {
		eps[i] = endpoint_on(&side, 0);
		publish(eps[i], base + i);
		for (int at = 0; at < 4; at++)
			POST(&side, fi_recv(eps[i], &in[i][at], 8, NULL, FI_ADDR_UNSPEC, &in[i][at]));
	}
	for (int done = 0; done < ROUNDS * count; done++) {
		struct fi_cq_tagged_entry got = next(&side, side.rx);
		size_t at = (size_t)((uint64_t *)got.op_context - &in[0][0]);
		uint64_t value = *(uint64_t *)got.op_context;

		POST(&side, fi_recv(eps[at / 4], got.op_context, 8, NULL, FI_ADDR_UNSPEC, got.op_context));
		POST(&side, fi_tinject(eps[at / 4], &value, 8, to, (uint64_t)(base) + at / 4));
	}
	add(STAGE);
	UNTIL(told(STAGE) >= (uint64_t)holders + 1, progress(&side));
	for (int i = 0; i < count; i++)
		MUST(fi_close(&eps[i]->fid));
	close_side(&side);
}

static void goes_round(int unused)
{
	struct side side;
	fi_addr_t *to = calloc((size_t)peer_count, sizeof *to);
	uint64_t *out = calloc((size_t)peer_count, sizeof *out), *in = calloc((size_t)peer_count, sizeof *in);

	(void)unused;
	open_side(&side, CENTRE);
	for (int i = 0; i < peer_count; i++)
		to[i] = address(&side, FIRST_PEER + i);
	for (uint64_t round = 0; round < ROUNDS; round++) {
		for (int i = 0; i < peer_count; i++) {
			out[i] = round * 1000 + (uint64_t)i;
			POST(&side, fi_trecv(side.ep, &in[i], 8, NULL, FI_ADDR_UNSPEC, (uint64_t)(FIRST_PEER + i), 0, &in[i]));
			POST(&side, fi_send(side.ep, &out[i], 8, NULL, to[i], &out[i]));
		}
		for (int i = 0; i < peer_count; i++)
			next(&side, side.tx);
		for (int i = 0; i < peer_count; i++) {
			uint64_t *at = next(&side, side.rx).op_context;

			IS(*at == round * 1000 + (uint64_t)(at - in));
		}
	}
	add(STAGE);
	UNTIL(told(STAGE) >= (uint64_t)holders + 1, progress(&side));
	close_side(&side);
}

static void check_round(void)
{
	pid_t pids[MAX_HOLDERS + 1];
	int failed = 0;

	holders = 4;
	peer_count = (int)count_or(64);
	pids[0] = start("centre", goes_round, 0);
	for (int i = 0; i < holders; i++)
		pids[1 + i] = start("peers", answers, i);
	for (int i = 0; i < holders + 1; i++)
		failed |= status_of(pids[i], "round");
	if (failed)
		exit(1);
}

/* New endpoints each time; both send within some microseconds, before either knows of the other. */
static void dial(int this)
{
	enum { COUNT = 8 };
	uint64_t out[COUNT], in[COUNT], runs = count_or(300);
	struct fi_cq_tagged_entry entry;
	struct side side;

	open_domain_of(&side);
	side.tx = queue(&side, 0);
	side.rx = queue(&side, 0);
	for (uint64_t run = 0; run < runs; run++) {
		int mine = (int)(run % 2 * 2) + this, theirs = (int)(run % 2 * 2) + !this;

		side.ep = endpoint_on(&side, 0);
		publish(side.ep, mine);
		fi_addr_t to = address(&side, theirs);
		add(STAGE);
		UNTIL(told(STAGE) >= run * 2 + 2, (void)0);
		atomic_store(&board->named[theirs], 0); /* for the run after the next */
		for (double until = now() + (double)(mixed(run * 2 + (uint64_t)this) % 300) * 1e-6; now() < until;)
			;
		for (uint64_t i = 0; i < COUNT; i++) {
			out[i] = run * 100 + i;
			POST(&side, fi_trecv(side.ep, &in[i], 8, NULL, FI_ADDR_UNSPEC, 0, ~0ULL, &in[i]));
			POST(&side, fi_tsend(side.ep, &out[i], 8, NULL, to, run * 100 + i, &out[i]));
		}
		for (uint64_t i = 0; i < COUNT; i++) {
			entry = next(&side, side.rx);
			IS(entry.op_context == &in[i] && in[i] == run * 100 + i && entry.tag == in[i]);
		}
		for (uint64_t i = 0; i < COUNT; i++)
			next(&side, side.tx);
		for (int i = 0; i < 20; i++)
			IS(take(side.rx, &entry, 1) == 0);
		add(STAGE_2);
		UNTIL(told(STAGE_2) >= run * 2 + 2, progress(&side));
		MUST(fi_close(&side.ep->fid));
		MUST(fi_av_remove(side.av, &to, 1, 0));
	}
	side.ep = NULL;
	close_side(&side);
}

static void check_dial(void) { two(dial, 0, dial, 1); }

static void shared(int this)
{
	enum { ENDPOINTS = 16, COUNT = 200, EACH = 4 };
	static uint64_t in[ENDPOINTS][EACH], out[ENDPOINTS];
	struct fid_ep *eps[ENDPOINTS];
	fi_addr_t to[ENDPOINTS];
	int received[ENDPOINTS] = { 0 }, posted[ENDPOINTS] = { 0 }, sending[ENDPOINTS] = { 0 }, left = 2 * ENDPOINTS * COUNT;
	struct side side;

	open_domain_of(&side);
	side.tx = side.rx = queue(&side, 0);
	for (int i = 0; i < ENDPOINTS; i++) {
		eps[i] = endpoint_on(&side, 0);
		publish(eps[i], FIRST_PEER + this * ENDPOINTS + i);
		for (int at = 0; at < EACH; at++)
			POST(&side, fi_recv(eps[i], &in[i][at], 8, NULL, FI_ADDR_UNSPEC, &in[i][at]));
	}
	for (int i = 0; i < ENDPOINTS; i++)
		to[i] = address(&side, FIRST_PEER + !this * ENDPOINTS + i);
	double limit = now() + SECONDS;
	while (left) {
		struct fi_cq_tagged_entry entry;

		for (int i = 0; i < ENDPOINTS; i++)
			if (!sending[i] && posted[i] < COUNT) {
				out[i] = (uint64_t)(i * 1000 + posted[i]);
				ssize_t ret = fi_send(eps[i], &out[i], 8, NULL, to[i], &out[i]);
				if (ret == -FI_EAGAIN)
					continue;
				MUST(ret);
				sending[i] = 1;
				posted[i]++;
			}
		if (now() > limit)
			die("%d completions are left", left);
		if (!take(side.rx, &entry, 1))
			continue;
		left--;
		uint64_t *context = entry.op_context;
		if (entry.flags & FI_SEND) {
			sending[context - out] = 0;
			continue;
		}
		int i = (int)((context - &in[0][0]) / EACH);
		IS(*context == (uint64_t)(i * 1000 + received[i]));
		received[i]++;
		POST(&side, fi_recv(eps[i], context, 8, NULL, FI_ADDR_UNSPEC, context));
	}
	add(STAGE);
	UNTIL(told(STAGE) >= 2, progress(&side));
	for (int i = 0; i < ENDPOINTS; i++)
		MUST(fi_close(&eps[i]->fid));
	close_side(&side);
}

static void check_shared(void) { two(shared, 0, shared, 1); }

/* ---- threads ---- */

enum { THREADS = 4, DEPTH = 16 };

/* One message under way, of the thread that posted it; any thread may read its completion. */
struct flight {
	struct worker *worker;
	uint64_t number;
	_Atomic int busy;
	uint8_t bytes[2000];
};

struct worker {
	struct side *side;
	fi_addr_t to;
	uint64_t index;
	struct flight sends[DEPTH], receives[DEPTH];
	_Atomic uint64_t sent, received;
};

static void completed(struct fid_cq *cq)
{
	struct fi_cq_tagged_entry entries[4];
	size_t got = take(cq, entries, 4);

	for (size_t i = 0; i < got; i++) {
		struct flight *flight = entries[i].op_context;
		struct worker *worker = flight->worker;

		if (entries[i].flags & FI_SEND) {
			atomic_fetch_add(&worker->sent, 1);
		} else {
			size_t len = mixed(flight->number) % sizeof flight->bytes;

			/* the receives of a thread match its messages in their order */
			IS(entries[i].tag == (worker->index << 32 | flight->number) && entries[i].len == len);
			must_be(flight->bytes, len, entries[i].tag);
			atomic_fetch_add(&worker->received, 1);
		}
		atomic_store(&flight->busy, 0);
	}
}

static void *works(void *argument)
{
	struct worker *worker = argument;
	struct side *side = worker->side;
	uint64_t count = count_or(10000), sends = 0, receives = 0, base = worker->index << 32;
	double limit = now() + SECONDS + (double)count / 5000;

	while (atomic_load(&worker->sent) < count || atomic_load(&worker->received) < count) {
		struct flight *flight = &worker->receives[receives % DEPTH];

		if (receives < count && !atomic_load(&flight->busy)) {
			flight->worker = worker;
			flight->number = receives;
			atomic_store(&flight->busy, 1);
			ssize_t ret = fi_trecv(side->ep, flight->bytes, sizeof flight->bytes, NULL, FI_ADDR_UNSPEC, base, 0xffffffff, flight);
			if (ret == -FI_EAGAIN)
				atomic_store(&flight->busy, 0);
			else
				MUST(ret);
			receives += ret == 0;
		}
		flight = &worker->sends[sends % DEPTH];
		if (sends < count && !atomic_load(&flight->busy)) {
			size_t len = mixed(sends) % sizeof flight->bytes;

			flight->worker = worker;
			atomic_store(&flight->busy, 1);
			fill(flight->bytes, len, base | sends);
			ssize_t ret = fi_tsend(side->ep, flight->bytes, len, NULL, worker->to, base | sends, flight);
			if (ret == -FI_EAGAIN)
				atomic_store(&flight->busy, 0);
			else
				MUST(ret);
			sends += ret == 0;
		}
		completed(side->tx);
		completed(side->rx);
		if (now() > limit)
			die("thread %llu: %llu sent, %llu received", (unsigned long long)worker->index,
			    (unsigned long long)atomic_load(&worker->sent), (unsigned long long)atomic_load(&worker->received));
	}
	return NULL;
}

static void threads(int this)
{
	struct worker *workers = calloc(THREADS, sizeof *workers);
	pthread_t ids[THREADS];
	struct side side;

	wanted.threading = FI_THREAD_SAFE;
	open_side(&side, this);
	fi_addr_t to = address(&side, !this);
	for (uint64_t i = 0; i < THREADS; i++) {
		workers[i].side = &side;
		workers[i].to = to;
		workers[i].index = i;
		if (pthread_create(&ids[i], NULL, works, &workers[i]))
			die("pthread_create");
	}
	for (int i = 0; i < THREADS; i++)
		pthread_join(ids[i], NULL);
	add(STAGE);
	UNTIL(told(STAGE) >= 2, progress(&side));
	close_side(&side);
}

static void check_threads(void) { two(threads, 0, threads, 1); }

int main(int argc, char **argv)
{
	static const struct mode modes[] = {
		{ "unread", check_unread },
		{ "deaf", check_deaf },
		{ "mutual", check_mutual },
		{ "behind", check_behind },
		{ "full", check_full },
		{ "readerr", check_readerr },
		{ "transmit", check_transmit },
		{ "counters", check_counters },
		{ "sread", check_sread },
		{ "poll", check_poll },
		{ "idle", check_idle },
		{ "dial", check_dial },
		{ "round", check_round },
		{ "shared", check_shared },
		{ "threads", check_threads },
	};

	if (argc > 5)
		count_wanted = strtoull(argv[5], NULL, 0);
	if (!count_wanted)
		alarm(90);
	return run_mode(modes, sizeof modes / sizeof *modes, argc, argv);
}
