/* Endpoints with many peers whose processes are killed, stopped, started again, end, or fork, from
 * fi_endpoint(3), fi_msg(3) and fi_cq(3):
 *
 *   rdm_death killed PROV NODE     a peer is killed with operations under way in both directions:
 *                                  errors within a second, and a third process is not disturbed
 *   rdm_death stopped PROV NODE    SIGSTOP: nothing is lost, and a third process is not disturbed
 *   rdm_death again PROV NODE      a peer that is started again at the same address
 *   rdm_death exits PROV NODE      processes that end after fi_inject and fi_tinject: with exit(3),
 *                                  with and without fi_close, to 1, 2 and 50 peers
 *   rdm_death closes PROV NODE     fi_close with operations under way
 *   rdm_death forks PROV NODE      fork(2) with endpoints open: the parent goes on
 *
 * The next argument is `auto` for FI_PROGRESS_AUTO, or `manual`. The next is the time of a stop in
 * milliseconds, or the number of repetitions; the last, of `killed` alone, the seed of the moments
 * of the kills. Ends with 0, or says what went wrong. Plain libfabric 1.17. */
#include "rdm_processes.h"

#include <fcntl.h>

static uint64_t wanted_number, wanted_seed;

static uint64_t number_or(uint64_t otherwise) { return wanted_number ? wanted_number : otherwise; }

/* Words of the board */
enum { STAGE, DONE, RUN, KILLED_AT, GOING, LONGEST_GAP, RESULT, RESUMED, LEFT, DEAD_AT, ERRORS, LAST, LATER, WAITED, OF_MIDDLE, OF_VICTIM };

static uint64_t nanoseconds(void) { return (uint64_t)(now() * 1e9); }

/* How long this thread has waited for a processor, in nanoseconds (0 on a kernel that does not
 * count it). */
static uint64_t waited(void)
{
	static int fd = -1;
	unsigned long long delay = 0;
	char text[80] = "";

	if (fd < 0)
		fd = open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
	if (pread(fd, text, sizeof text - 1, 0) <= 0 || sscanf(text, "%*u %llu", &delay) != 1)
		return 0;
	return delay;
}

/* ---- two processes that exchange all they can, while one of them and a third do ping-pong ---- */

enum { MIDDLE, VICTIM, THIRD };
enum { DEPTH = 24, LARGE = 200000 };
#define PING (1ULL << 60)

static const size_t LENGTHS[] = { 8, 64, 3000, LARGE };

/* Messages of one direction under way, each in a slot of its own. */
struct stream {
	uint64_t sends, receives; /* posted */
	uint64_t sent, received;  /* completed */
	int sending[DEPTH], receiving[DEPTH];
	uint64_t posted_at[DEPTH]; /* of sends */
	uint8_t *out, *in;
};

static void begin(struct stream *stream)
{
	memset(stream, 0, sizeof *stream);
	stream->out = malloc((size_t)DEPTH * LARGE);
	stream->in = malloc((size_t)DEPTH * LARGE);
}

/* Posts what can be posted: message n has the tag n, and a slot of its own. */
static void post(struct side *side, struct stream *stream, fi_addr_t to, uint64_t most)
{
	int slot = (int)(stream->receives % DEPTH);
	ssize_t ret;

	if (!stream->receiving[slot]) {
		ret = fi_trecv(side->ep, stream->in + (size_t)slot * LARGE, LARGE, NULL, FI_ADDR_UNSPEC, stream->receives, 0, &stream->receiving[slot]);
		if (ret != -FI_EAGAIN) {
			MUST(ret);
			stream->receiving[slot] = 1;
			stream->receives++;
		}
	}
	slot = (int)(stream->sends % DEPTH);
	if (!stream->sending[slot] && stream->sends < most) {
		size_t len = LENGTHS[mixed(stream->sends) % 4];

		fill(stream->out + (size_t)slot * LARGE, len, stream->sends);
		ret = fi_tsend(side->ep, stream->out + (size_t)slot * LARGE, len, NULL, to, stream->sends, &stream->sending[slot]);
		if (ret != -FI_EAGAIN) {
			MUST(ret);
			stream->sending[slot] = 1;
			stream->posted_at[slot] = nanoseconds();
			stream->sends++;
		}
	}
}

/* Whether the completion was one of the stream's. */
static int completed(struct stream *stream, const struct fi_cq_tagged_entry *entry)
{
	int *context = entry->op_context;

	if (context >= stream->sending && context < stream->sending + DEPTH) {
		IS(*context && entry->flags & FI_SEND);
		stream->sent++;
	} else if (context >= stream->receiving && context < stream->receiving + DEPTH) {
		IS(*context && entry->flags & FI_RECV && entry->len == LENGTHS[mixed(entry->tag) % 4]);
		IS(entry->tag % DEPTH == (uint64_t)(context - stream->receiving));
		must_be(stream->in + (entry->tag % DEPTH) * LARGE, entry->len, entry->tag);
		stream->received++;
	} else {
		return 0;
	}
	*context = 0;
	return 1;
}

/* The process that has a round trip with the middle one at all times, and measures the longest,
 * without the times in which one of the two waited for a processor. */
static void third(int unused)
{
	struct fi_cq_tagged_entry entry;
	struct side side;
	uint64_t out, in, longest = 0, began;

	(void)unused;
	open_side(&side, THIRD);
	fi_addr_t to = address(&side, MIDDLE);
	for (uint64_t turn = 0; told(GOING) == 0; turn++) {
		uint64_t delayed = waited() + told(WAITED), took;

		began = nanoseconds();
		out = turn;
		in = 0;
		POST(&side, fi_trecv(side.ep, &in, 8, NULL, FI_ADDR_UNSPEC, PING | turn, 0, &in));
		POST(&side, fi_tinject(side.ep, &out, 8, to, PING | turn));
		entry = next(&side, side.rx);
		IS(entry.op_context == &in && in == ~turn);
		/* the first ones set up the connection */
		took = nanoseconds() - began;
		delayed = waited() + told(WAITED) - delayed;
		took = took > delayed ? took - delayed : 0;
		if (turn > 10 && took > longest)
			longest = took;
		put(LONGEST_GAP, longest);
		add(RUN);
	}
	put(LEFT, 1);
	UNTIL(told(DONE), progress(&side));
	close_side(&side);
}

struct answers {
	uint64_t turn, in, armed;
};

static int answered(struct side *side, struct answers *answers, fi_addr_t to, const struct fi_cq_tagged_entry *entry)
{
	uint64_t value;

	if (entry->op_context != answers)
		return 0;
	IS(answers->in == answers->turn && entry->tag == (PING | answers->turn));
	value = ~answers->turn++;
	put(WAITED, waited());
	POST(side, fi_tinject(side->ep, &value, 8, to, entry->tag));
	answers->armed = 0;
	return 1;
}

static void arm(struct side *side, struct answers *answers)
{
	if (answers->armed)
		return;
	POST(side, fi_trecv(side->ep, &answers->in, 8, NULL, FI_ADDR_UNSPEC, PING | answers->turn, 0, answers));
	answers->armed = 1;
}

/* Answers the process, when nothing else is received. */
static void answer(struct side *side, struct answers *answers, fi_addr_t to)
{
	struct fi_cq_tagged_entry entry;

	arm(side, answers);
	if (take(side->rx, &entry, 1))
		IS(answered(side, answers, to, &entry));
	(void)fi_cq_read(side->tx, NULL, 0);
}

/* How many messages a side sends: 4,000 more than at the end of the stop, at most `most`. The other
 * side reads this number from `word`; until then it is 0. */
static uint64_t to_send(const struct stream *stream, int word, uint64_t most)
{
	uint64_t all = stream->sends + 4000;

	if (!told(word) && told(RESUMED))
		put(word, all < most ? all : most);
	return told(word) ? told(word) : most;
}

/* Exchanges with the middle process until it is killed, or, with `most`, until both have had all
 * messages. */
static void victim(int most)
{
	struct fi_cq_tagged_entry entry;
	struct stream stream;
	struct side side;
	uint64_t limit = most ? (uint64_t)most : ~0ULL;

	open_side(&side, VICTIM);
	fi_addr_t to = address(&side, MIDDLE);
	begin(&stream);
	while (stream.sent < to_send(&stream, OF_VICTIM, limit) || !told(OF_MIDDLE) || stream.received < told(OF_MIDDLE)) {
		post(&side, &stream, to, to_send(&stream, OF_VICTIM, limit));
		if (take(side.tx, &entry, 1))
			IS(completed(&stream, &entry));
		if (take(side.rx, &entry, 1))
			IS(completed(&stream, &entry));
	}
	UNTIL(told(DONE), progress(&side));
	close_side(&side);
}

static uint64_t connect_seconds(void)
{
	const char *set = getenv("FI_WEFT_CONNECT_TIMEOUT");

	return set ? strtoull(set, NULL, 0) : 10;
}

static void killed_middle(int posts_on)
{
	struct fi_cq_tagged_entry entry;
	struct fi_cq_err_entry error;
	struct answers answers = { 0 };
	struct stream stream;
	struct side side;
	uint64_t errors = 0, last = 0, later = 0, cancelled = 0, lost = 0;
	double limit = 0;

	open_side(&side, MIDDLE);
	fi_addr_t to = address(&side, VICTIM), other = address(&side, THIRD);
	begin(&stream);
	/* until the victim is dead and every send to it has completed */
	while (!limit || stream.sent + errors < stream.sends) {
		uint64_t at = told(KILLED_AT);

		if (at && !limit)
			limit = (double)at * 1e-9 + (double)connect_seconds() + 2;
		/* in one turn with automatic progress sends are posted for a while after the
		 * death too: to an address at which nothing listens */
		if (!at || (posts_on && nanoseconds() < at + 100000000))
			post(&side, &stream, to, ~0ULL);
		arm(&side, &answers);
		for (int i = 0; i < 2; i++) {
			struct fid_cq *cq = i ? side.tx : side.rx;
			ssize_t got = fi_cq_read(cq, &entry, 1);

			if (got == 1) {
				if (!answered(&side, &answers, other, &entry))
					IS(completed(&stream, &entry));
				put(STAGE, stream.sent < stream.received ? stream.sent : stream.received);
			} else if (got == -FI_EAVAIL) {
				memset(&error, 0, sizeof error);
				RETURNS(fi_cq_readerr(cq, &error, 0), 1);
				/* the kill may have followed the begin of this turn */
				at = told(KILLED_AT);
				IS(at && error.err);
				int *context = error.op_context;
				IS(*context);
				if (error.flags & FI_SEND) {
					uint64_t *time = stream.posted_at[context - stream.sending] < at ? &last : &later;
					/* the kernel ends a process some time after the signal */
					uint64_t dead = told(DEAD_AT);

					*time = dead ? nanoseconds() - dead : 0;
					errors++;
				} else {
					/* a receive that had a part of a message */
					lost++;
				}
				*context = 0;
			} else {
				IS(got == -FI_EAGAIN);
			}
		}
		if (limit && now() > limit)
			die("%llu sends to the dead peer are not complete", (unsigned long long)(stream.sends - stream.sent - errors));
	}
	/* a peer that was killed before the first message passed is an address at which nothing
	 * listens, and so is a dead peer for later sends: the connect timeout counts */
	if (stream.sent + stream.received == 0) {
		later = later > last ? later : last;
		last = 0;
	}
	put(ERRORS, errors + lost);
	put(LAST, last);
	put(LATER, later);
	if (last >= 1000000000 || later >= (connect_seconds() + 1) * 1000000000)
		die("%llu sent, %llu errors, %llu receives in error; the last error of sends before the death after %.3f s, of later ones %.3f s",
		    (unsigned long long)stream.sent, (unsigned long long)errors, (unsigned long long)lost, (double)last * 1e-9, (double)later * 1e-9);
	/* each receive that waits for a message of the dead peer can be cancelled, or has
	 * completed */
	for (int i = 0; i < DEPTH; i++)
		if (stream.receiving[i]) {
			int ret = fi_cancel(&side.ep->fid, &stream.receiving[i]);

			if (ret != -FI_ENOENT)
				MUST(ret);
		}
	for (int i = 0; i < DEPTH; i++)
		cancelled += (uint64_t)stream.receiving[i];
	limit = now() + 2;
	while (cancelled) {
		ssize_t got = fi_cq_read(side.rx, &entry, 1);

		if (got == 1) {
			if (!answered(&side, &answers, other, &entry)) {
				IS(completed(&stream, &entry));
				cancelled--;
			}
			arm(&side, &answers);
		} else if (got == -FI_EAVAIL) {
			memset(&error, 0, sizeof error);
			RETURNS(fi_cq_readerr(side.rx, &error, 0), 1);
			IS(error.err);
			*(int *)error.op_context = 0;
			cancelled--;
		}
		if (now() > limit)
			die("%llu receives were not cancelled", (unsigned long long)cancelled);
	}
	/* the third process goes on after the death */
	uint64_t rounds = told(RUN);
	UNTIL(told(RUN) > rounds + 20, answer(&side, &answers, other));
	put(GOING, 1);
	/* the last round trip of the third process */
	UNTIL(told(LEFT), answer(&side, &answers, other));
	put(DONE, 1);
	if (answers.armed)
		MUST(fi_cancel(&side.ep->fid, &answers));
	close_side(&side);
}

static int ascending(const void *one, const void *other)
{
	uint64_t a = *(const uint64_t *)one, b = *(const uint64_t *)other;

	return (a > b) - (a < b);
}

/* The moments of the kills: of seven in eight up to 50 ms after messages have passed in both
 * directions, otherwise up to 30 ms after the victim has an endpoint, while it connects. */
static void check_killed(void)
{
	uint64_t turns = number_or(3), seed = wanted_seed ? wanted_seed : mixed((uint64_t)getpid() << 32 | (uint32_t)nanoseconds()) % 1000000000;
	uint64_t *delays = calloc(turns, sizeof *delays), with_errors = 0, later = 0, longest = 0;

	fprintf(stderr, "seed %llu\n", (unsigned long long)seed);
	for (uint64_t turn = 0; turn < turns; turn++) {
		uint64_t random = mixed(mixed(seed) + turn), early = turn % 8 == 3;

		memset(board, 0, sizeof *board);
		if (wanted_number)
			alarm(90);
		pid_t middle = start("middle", killed_middle, wants_auto && turn == 1), dies = start("victim", victim, 0), other = start("third", third, 0);

		if (early)
			UNTIL(atomic_load(&board->named[VICTIM]), usleep(100));
		else
			UNTIL(told(STAGE) > 10 && told(RUN) > 50, pause_ms(1));
		usleep((useconds_t)(random % (early ? 30000 : 50000)));
		put(KILLED_AT, nanoseconds());
		kill(dies, SIGKILL);
		waitpid(dies, NULL, 0);
		put(DEAD_AT, nanoseconds());
		int failed = status_of(middle, "middle") | status_of(other, "third");
		/* until the kernel has ended it, the dead process may hold what the middle one waits for */
		if (failed || told(LONGEST_GAP) >= 900000000 + told(DEAD_AT) - told(KILLED_AT))
			die("kill %llu of seed %llu: the longest round trip of the third process: %.3f s", (unsigned long long)turn,
			    (unsigned long long)seed, (double)told(LONGEST_GAP) * 1e-9);
		with_errors += told(ERRORS) > 0;
		delays[turn] = told(LAST);
		later = told(LATER) > later ? told(LATER) : later;
		longest = told(LONGEST_GAP) > longest ? told(LONGEST_GAP) : longest;
	}
	qsort(delays, turns, sizeof *delays, ascending);
	printf("seed %llu, %llu kills, %llu with errors; the last error of sends before the death: median %.3f s, 99 %% %.3f s, longest %.3f s; "
	       "of later sends, and of sends to a peer that was never connected: longest %.3f s; the longest round trip of the third process: %.3f s\n",
	       (unsigned long long)seed, (unsigned long long)turns, (unsigned long long)with_errors, (double)delays[turns / 2] * 1e-9,
	       (double)delays[turns * 99 / 100] * 1e-9, (double)delays[turns - 1] * 1e-9, (double)later * 1e-9, (double)longest * 1e-9);
}

static void stopped_middle(int most)
{
	struct fi_cq_tagged_entry entry;
	struct answers answers = { 0 };
	struct stream stream;
	struct side side;
	bool all = false;

	open_side(&side, MIDDLE);
	fi_addr_t to = address(&side, VICTIM), other = address(&side, THIRD);
	begin(&stream);
	while (!all) {
		uint64_t own = to_send(&stream, OF_MIDDLE, (uint64_t)most);

		post(&side, &stream, to, own);
		arm(&side, &answers);
		if (take(side.tx, &entry, 1))
			IS(completed(&stream, &entry));
		if (take(side.rx, &entry, 1))
			IS(answered(&side, &answers, other, &entry) || completed(&stream, &entry));
		put(STAGE, stream.received);
		all = told(OF_MIDDLE) && stream.sent >= own && told(OF_VICTIM) && stream.received >= told(OF_VICTIM);
	}
	IS(stream.sent == told(OF_MIDDLE) && stream.received == told(OF_VICTIM));
	put(GOING, 1);
	/* the last round trip of the third process */
	UNTIL(told(LEFT), answer(&side, &answers, other));
	put(DONE, 1);
	close_side(&side);
}

static void check_stopped(void)
{
	enum { MOST = 100000 }; /* more than can arrive before the stop */
	pid_t middle = start("middle", stopped_middle, MOST), stops = start("victim", victim, MOST), other = start("third", third, 0);

	UNTIL(told(STAGE) > 100 && told(RUN) > 50, pause_ms(1));
	kill(stops, SIGSTOP);
	uint64_t before = told(RUN), began = nanoseconds();
	pause_ms((unsigned)number_or(3000));
	uint64_t gap = told(LONGEST_GAP), rounds = told(RUN);
	double rate = (double)(rounds - before) / (double)(nanoseconds() - began) * 1e9;
	/* messages of both directions are under way */
	IS(told(STAGE) < MOST);
	/* on a machine with a load of 12 the two processes did not run for 100 ms */
	for (int i = 0; i < 10 && told(RUN) == rounds; i++)
		pause_ms(100);
	if (told(RUN) == rounds)
		die("the third process does not go on");
	kill(stops, SIGCONT);
	put(RESUMED, 1);
	int failed = status_of(middle, "middle") | status_of(stops, "victim") | status_of(other, "third");
	if (failed)
		exit(1);
	printf("the third process: %.0f round trips per second during the stop, the longest took %.3f s\n", rate, (double)gap * 1e-9);
	IS(gap < 900000000 && rate > 20);
}

/* ---- the same address again ---- */

static char port[16];

/* Has sent messages that nobody has received, and messages under way, when it is killed. */
static void first_life(int life)
{
	struct fi_cq_tagged_entry entry;
	struct side side;
	uint64_t out = (uint64_t)life, in[4];
	uint8_t *large = malloc(LARGE);

	wanted.service = port;
	open_side(&side, VICTIM);
	fi_addr_t to = address(&side, MIDDLE);
	for (int i = 0; i < 4; i++)
		POST(&side, fi_trecv(side.ep, &in[i], 8, NULL, FI_ADDR_UNSPEC, 1, 0, &in[i]));
	/* the round trip of this life */
	POST(&side, fi_tsend(side.ep, &out, 8, NULL, to, 2, &out));
	next(&side, side.tx);
	entry = next(&side, side.rx);
	IS(*(uint64_t *)entry.op_context == (uint64_t)life);
	/* what the middle process takes after the death of this one, or never */
	fill(large, LARGE, (uint64_t)life);
	POST(&side, fi_tsend(side.ep, large, LARGE, NULL, to, 3, large));
	put(STAGE, (uint64_t)life);
	for (;;) {
		struct fi_cq_err_entry error = { 0 };
		ssize_t got = fi_cq_read(side.rx, &entry, 1);

		if (got == -FI_EAVAIL)
			RETURNS(fi_cq_readerr(side.rx, &error, 0), 1);
		/* only messages of the middle process for this life */
		if (got == 1 && *(uint64_t *)entry.op_context != (uint64_t)life)
			die("life %d got a message for life %llu", life, (unsigned long long)*(uint64_t *)entry.op_context);
		(void)fi_cq_read(side.tx, NULL, 0);
	}
}

static void must_be_none(struct fid_cq *cq, ssize_t got, int life)
{
	struct fi_cq_err_entry error = { 0 };

	if (got == -FI_EAVAIL) {
		MUST(fi_cq_readerr(cq, &error, 0));
		die("life %d: a completion in error: %s, tag %llu, length %zu", life, fi_strerror(error.err), (unsigned long long)error.tag, error.len);
	}
	IS(got == -FI_EAGAIN);
}

static void again_middle(int lives)
{
	struct fi_cq_tagged_entry entry;
	struct fi_cq_err_entry error;
	struct side side;
	uint8_t *large = malloc(LARGE);
	uint64_t values[64], in;
	fi_addr_t to = FI_ADDR_NOTAVAIL;

	open_side(&side, MIDDLE);
	for (int life = 1; life <= lives; life++) {
		int sends = 0, ends = 0;

		POST(&side, fi_trecv(side.ep, &in, 8, NULL, FI_ADDR_UNSPEC, 2, 0, &in));
		UNTIL(told(GOING) == (uint64_t)life, progress(&side));
		if (life == 1)
			to = address(&side, VICTIM);
		/* the middle process may dial too, with the first message to this life */
		values[0] = (uint64_t)life;
		ssize_t got;
		UNTIL((got = fi_cq_read(side.rx, &entry, 1)) == 1, must_be_none(side.rx, got, life); (void)fi_cq_read(side.tx, NULL, 0));
		IS(in == (uint64_t)life);
		POST(&side, fi_tsend(side.ep, &values[0], 8, NULL, to, 1, &values[0]));
		UNTIL((got = fi_cq_read(side.tx, &entry, 1)) == 1, must_be_none(side.tx, got, life));
		UNTIL(told(STAGE) == (uint64_t)life, progress(&side));
		/* more messages than it has receives for: the rest is under way at its death */
		for (int i = 1; i < 64; i++) {
			values[i] = (uint64_t)life;
			ssize_t ret = fi_tsend(side.ep, &values[i], 8, NULL, to, 1, &values[i]);
			if (ret == -FI_EAGAIN)
				break;
			MUST(ret);
			sends++;
		}
		if (life % 2 == 0) {
			/* a large message of this life has begun, or not */
			POST(&side, fi_trecv(side.ep, large, LARGE, NULL, FI_ADDR_UNSPEC, 3, 0, large));
		}
		put(DONE, (uint64_t)life); /* now it is killed */
		double limit = now() + 2;
		while (ends < sends) {
			got = fi_cq_read(side.tx, &entry, 1);
			if (got == -FI_EAVAIL) {
				memset(&error, 0, sizeof error);
				RETURNS(fi_cq_readerr(side.tx, &error, 0), 1);
				ends++;
			} else if (got == 1) {
				ends++;
			}
			(void)fi_cq_read(side.rx, NULL, 0);
			if (now() > limit)
				die("life %d: %d of %d sends are not complete", life, sends - ends, sends);
		}
		UNTIL(told(RESULT) == (uint64_t)life, (void)fi_cq_read(side.tx, NULL, 0));
		if (life % 2 == 0) {
			/* whole, or an error, or still waiting; in no case bytes of the next
			 * life */
			int over = 0;

			UNTIL_WITHIN(3, over, {
				got = fi_cq_read(side.rx, &entry, 1);
				if (got == 1) {
					IS(entry.tag == 3 && entry.len == LARGE);
					over = 1;
				} else if (got == -FI_EAVAIL) {
					memset(&error, 0, sizeof error);
					RETURNS(fi_cq_readerr(side.rx, &error, 0), 1);
					over = 1;
				} else if (got == -FI_EAGAIN) {
					(void)fi_cancel(&side.ep->fid, large);
				}
			});
		}
	}
	put(GOING, (uint64_t)lives + 1);
	MUST(fi_close(&side.ep->fid));
	side.ep = NULL;
	close_side(&side);
}

static void check_again(void)
{
	int lives = (int)number_or(6);

	snprintf(port, sizeof port, "%d", 20000 + (int)getpid() % 10000);
	pid_t middle = start("middle", again_middle, lives);
	for (int life = 1; life <= lives; life++) {
		atomic_store(&board->named[VICTIM], 0);
		pid_t dies = start("victim", first_life, life);

		UNTIL(atomic_load(&board->named[VICTIM]), pause_ms(1));
		put(GOING, (uint64_t)life);
		UNTIL(told(DONE) == (uint64_t)life, {
			int status;

			if (waitpid(dies, &status, WNOHANG) == dies)
				die("life %d ended with %x", life, status);
			if (waitpid(middle, &status, WNOHANG) == middle)
				die("the middle process ended with %x", status);
			pause_ms(1);
		});
		kill(dies, SIGKILL);
		waitpid(dies, NULL, 0);
		put(RESULT, (uint64_t)life);
	}
	if (status_of(middle, "middle"))
		exit(1);
}

/* ---- ending ---- */

enum { MANY = 50, RECEIVERS = 2 };
static int injects_to, closes_first, injects_tagged;

static void injector(int base)
{
	struct side side;
	fi_addr_t to[MANY];

	open_domain_of(&side);
	side.tx = queue(&side, 0);
	side.rx = queue(&side, 0);
	side.ep = endpoint_on(&side, 0);
	for (int i = 0; i < injects_to; i++)
		to[i] = address(&side, 10 + i);
	for (uint64_t i = 0; i < 3; i++)
		for (int at = 0; at < injects_to; at++) {
			uint64_t value = (uint64_t)base + i;

			if (injects_tagged)
				POST(&side, fi_tinject(side.ep, &value, 8, to[at], value));
			else
				POST(&side, fi_inject(side.ep, &value, 8, to[at]));
		}
	if (closes_first)
		close_side(&side);
}

static void gets_injected(int unused)
{
	struct fid_ep *eps[MANY];
	struct fi_cq_tagged_entry entry;
	struct side side;
	uint64_t in[MANY], run = 0;

	(void)unused;
	open_domain_of(&side);
	side.tx = side.rx = queue(&side, 4096);
	for (int i = 0; i < MANY; i++) {
		eps[i] = endpoint_on(&side, 0);
		publish(eps[i], 10 + i);
	}
	for (;;) {
		int got[MANY] = { 0 }, left;

		run++;
		UNTIL(told(GOING) >= run, progress(&side));
		int peers = (int)told(STAGE), tagged = (int)told(RUN);
		if (peers == 0)
			break;
		uint64_t base = told(RESULT);
		left = peers * 3;
		for (int i = 0; i < peers; i++)
			POST(&side, tagged ? fi_trecv(eps[i], &in[i], 8, NULL, FI_ADDR_UNSPEC, 0, ~0ULL, &in[i])
					   : fi_recv(eps[i], &in[i], 8, NULL, FI_ADDR_UNSPEC, &in[i]));
		double limit = now() + 5;
		while (left) {
			if (now() > limit)
				die("run %llu, %d peers, tagged %d: %d messages are missing", (unsigned long long)run, peers, tagged, left);
			if (!take(side.rx, &entry, 1))
				continue;
			int i = (int)((uint64_t *)entry.op_context - in);
			IS(in[i] == base + (uint64_t)got[i]);
			left--;
			if (++got[i] < 3)
				POST(&side, tagged ? fi_trecv(eps[i], &in[i], 8, NULL, FI_ADDR_UNSPEC, 0, ~0ULL, &in[i])
						   : fi_recv(eps[i], &in[i], 8, NULL, FI_ADDR_UNSPEC, &in[i]));
		}
		put(DONE, run);
	}
	for (int i = 0; i < MANY; i++)
		MUST(fi_close(&eps[i]->fid));
	close_side(&side);
}

static void check_exits(void)
{
	static const int counts[] = { 1, 2, MANY };
	pid_t receiver = start("receiver", gets_injected, 0);
	uint64_t run = 0;

	for (int how = 0; how < 12; how++) {
		injects_to = counts[how % 3];
		closes_first = how / 3 % 2;
		injects_tagged = how / 6;
		run++;
		put(STAGE, (uint64_t)injects_to);
		put(RUN, (uint64_t)injects_tagged);
		put(RESULT, run * 1000);
		double began = now();
		pid_t pid = start("injector", injector, (int)run * 1000);
		put(GOING, run);
		if (status_of(pid, "injector"))
			die("%d peers, closes %d", injects_to, closes_first);
		double ended = now();
		UNTIL(told(DONE) == run, {
			int status;

			if (waitpid(receiver, &status, WNOHANG) == receiver)
				die("%d peers, closes %d, tagged %d: lost", injects_to, closes_first, injects_tagged);
			pause_ms(1);
		});
		fprintf(stderr, "%d peers, closes %d, tagged %d: the sender took %.3f s\n", injects_to, closes_first, injects_tagged, ended - began);
	}
	put(STAGE, 0);
	put(GOING, run + 1);
	if (status_of(receiver, "receiver"))
		exit(1);
}

/* ---- closing ---- */

/* Closes an endpoint with sends and receives under way, again and again, next to another one
 * that is in use. */
static void closer(int runs)
{
	static uint8_t out[LARGE], in[8][LARGE];
	struct fi_cq_tagged_entry entry;
	struct fid_ep *ep;
	struct side side;

	open_side(&side, VICTIM);
	fi_addr_t to = address(&side, MIDDLE);
	for (int run = 1; run <= runs; run++) {
		uint64_t value = (uint64_t)run;

		ep = endpoint_on(&side, 0);
		publish(ep, 10);
		UNTIL(told(STAGE) == (uint64_t)run, (void)fi_cq_read(side.tx, NULL, 0); (void)fi_cq_read(side.rx, NULL, 0));
		for (int i = 0; i < 8; i++)
			POST(&side, fi_trecv(ep, in[i], LARGE, NULL, FI_ADDR_UNSPEC, 0, ~0ULL, in[i]));
		for (int i = 0; i < 4; i++) {
			ssize_t ret = fi_tsend(ep, out, i % 2 ? LARGE : 500, NULL, to, 7, out);

			if (ret != -FI_EAGAIN)
				MUST(ret);
		}
		/* what was injected arrives, as the last message of this endpoint */
		POST(&side, fi_tinject(ep, &value, 8, to, 8));
		if (run % 3 == 0)
			for (double until = now() + 0.003; now() < until;)
				(void)fi_cq_read(side.rx, NULL, 0);
		if (run % 3 == 1)
			pause_ms(1);
		MUST(fi_close(&ep->fid));
		atomic_store(&board->named[10], 0);
		put(RESULT, (uint64_t)run);
		/* completions of the closed endpoint may be left: they are read. An endpoint
		 * that was closed writes no memory afterwards. */
		memset(in, 0x5a, sizeof in);
		UNTIL(told(DONE) == (uint64_t)run, {
			struct fi_cq_err_entry error = { 0 };

			for (int i = 0; i < 2; i++)
				if (fi_cq_read(i ? side.tx : side.rx, &entry, 1) == -FI_EAVAIL)
					RETURNS(fi_cq_readerr(i ? side.tx : side.rx, &error, 0), 1);
		});
		for (size_t i = 0; i < sizeof in; i++)
			if (((uint8_t *)in)[i] != 0x5a)
				die("run %d: byte %zu was written after fi_close: %x", run, i, ((uint8_t *)in)[i]);
		/* the other endpoint is as before */
		POST(&side, fi_tsend(side.ep, &value, 8, NULL, to, 9, &value));
		UNTIL(fi_cq_read(side.tx, &entry, 1) == 1 && entry.op_context == &value, (void)fi_cq_read(side.rx, NULL, 0));
	}
	UNTIL(told(GOING), progress(&side));
	close_side(&side);
}

static void closes_middle(int runs)
{
	static uint8_t out[LARGE], in[4][LARGE];
	struct fi_cq_tagged_entry entry;
	struct fi_cq_err_entry error;
	struct side side;

	open_side(&side, MIDDLE);
	address(&side, VICTIM);
	for (int run = 1; run <= runs; run++) {
		uint64_t last = 0, ninth = 0;
		int sends = 0, done = 0, receives = 0, ended = 0, others = 0;
		fi_addr_t to = address(&side, 10);

		for (int i = 0; i < 4; i++, receives++)
			POST(&side, fi_trecv(side.ep, in[i], LARGE, NULL, FI_ADDR_UNSPEC, 7, 0, in[i]));
		POST(&side, fi_trecv(side.ep, &last, 8, NULL, FI_ADDR_UNSPEC, 8, 0, &last));
		POST(&side, fi_trecv(side.ep, &ninth, 8, NULL, FI_ADDR_UNSPEC, 9, 0, &ninth));
		put(STAGE, (uint64_t)run);
		/* a send that is posted when the endpoint has just closed fails when it cannot be connected */
		double limit = now() + 15;
		while (!told(RESULT) || told(RESULT) < (uint64_t)run || done < sends || !ended) {
			if (told(RESULT) < (uint64_t)run && sends - done < 8) {
				ssize_t ret = fi_tsend(side.ep, out, sends % 3 ? 100 : LARGE, NULL, to, 1, out);

				if (ret != -FI_EAGAIN)
					MUST(ret);
				sends += ret == 0;
			}
			for (int i = 0; i < 2; i++) {
				struct fid_cq *cq = i ? side.tx : side.rx;
				ssize_t got = fi_cq_read(cq, &entry, 1);

				if (got == -FI_EAVAIL) {
					memset(&error, 0, sizeof error);
					RETURNS(fi_cq_readerr(cq, &error, 0), 1);
					IS(error.op_context != &last && error.op_context != &ninth);
					if (error.flags & FI_SEND)
						done++;
					else
						receives--;
				} else if (got == 1) {
					if (entry.op_context == &last)
						ended = 1;
					else if (entry.op_context == &ninth)
						others = 1;
					else if (entry.flags & FI_SEND)
						done++;
					else
						receives--;
				}
			}
			if (now() > limit)
				die("run %d: %d of %d sends, the last message: %d", run, done, sends, ended);
		}
		IS(last == (uint64_t)run);
		put(DONE, (uint64_t)run);
		/* receives whose messages were not sent are cancelled */
		for (int i = 0; i < 4; i++)
			(void)fi_cancel(&side.ep->fid, in[i]);
		UNTIL(receives == 0 && others, {
			ssize_t got = fi_cq_read(side.rx, &entry, 1);

			if (got == -FI_EAVAIL) {
				memset(&error, 0, sizeof error);
				RETURNS(fi_cq_readerr(side.rx, &error, 0), 1);
				receives--;
			} else if (got == 1) {
				if (entry.op_context == &ninth)
					others = 1;
				else
					receives--;
			}
		});
		IS(ninth == (uint64_t)run);
		MUST(fi_av_remove(side.av, &to, 1, 0));
	}
	put(GOING, 1);
	close_side(&side);
}

static void check_closes(void)
{
	int runs = (int)number_or(40);
	pid_t middle = start("middle", closes_middle, runs), other = start("closer", closer, runs);
	int failed = status_of(middle, "middle") | status_of(other, "closer");

	if (failed)
		exit(1);
}

/* ---- fork ---- */

static void echo(int unused)
{
	struct side side;
	uint64_t in;

	(void)unused;
	open_side(&side, VICTIM);
	fi_addr_t to = address(&side, MIDDLE);
	uint8_t *bytes = malloc(LARGE);
	POST(&side, fi_trecv(side.ep, bytes, LARGE, NULL, FI_ADDR_UNSPEC, 0, ~0ULL, bytes));
	while (!told(GOING)) {
		struct fi_cq_tagged_entry entry;

		if (!take(side.rx, &entry, 1))
			continue;
		must_be(bytes, entry.len, entry.tag);
		in = ~entry.tag;
		POST(&side, fi_trecv(side.ep, bytes, LARGE, NULL, FI_ADDR_UNSPEC, 0, ~0ULL, bytes));
		POST(&side, fi_tinject(side.ep, &in, 8, to, 0));
	}
	close_side(&side);
}

static void round_trips(struct side *side, fi_addr_t to, int count)
{
	static uint64_t turn;
	static uint8_t out[LARGE];
	uint64_t in;

	for (int i = 0; i < count; i++, turn++) {
		size_t len = LENGTHS[i % 4];

		fill(out, len, turn);
		POST(side, fi_trecv(side->ep, &in, 8, NULL, FI_ADDR_UNSPEC, 0, 0, &in));
		POST(side, fi_tsend(side->ep, out, len, NULL, to, turn, out));
		next(side, side->rx);
		next(side, side->tx);
		IS(in == ~turn);
	}
}

static void forker(int unused)
{
	struct side side;

	(void)unused;
	open_side(&side, MIDDLE);
	fi_addr_t to = address(&side, VICTIM);
	for (int how = 0; how < 10; how++) {
		round_trips(&side, to, 50);
		pid_t pid = fork();

		if (pid == 0) {
			if (how % 5 == 0)
				_exit(0);
			if (how % 5 == 1)
				exit(0);
			if (how % 5 == 2) {
				execl("/bin/true", "true", NULL);
				_exit(1);
			}
			/* it uses its copy of the memory for some time; the last is killed */
			pause_ms(100);
			if (how % 5 == 3)
				_exit(0);
			pause();
		}
		round_trips(&side, to, 200);
		if (how % 5 == 4)
			kill(pid, SIGKILL);
		else if (status_of(pid, "child"))
			die("child %d", how);
		else
			waitpid(pid, NULL, 0);
		round_trips(&side, to, 50);
	}
	put(GOING, 1);
	close_side(&side);
}

static void check_forks(void)
{
	pid_t one = start("forker", forker, 0), other = start("echo", echo, 0);
	int failed = status_of(one, "forker") | status_of(other, "echo");

	if (failed)
		exit(1);
}

int main(int argc, char **argv)
{
	static const struct mode modes[] = {
		{ "killed", check_killed }, { "stopped", check_stopped }, { "again", check_again },
		{ "exits", check_exits },   { "closes", check_closes },	  { "forks", check_forks },
	};

	if (argc > 5)
		wanted_number = strtoull(argv[5], NULL, 0);
	if (argc > 6)
		wanted_seed = strtoull(argv[6], NULL, 0);
	if (!wanted_number)
		alarm(90);
	return run_mode(modes, sizeof modes / sizeof *modes, argc, argv);
}
