/* Many endpoints of type FI_EP_RDM in one process, and threads that sleep on their queues:
 *
 *   rdm_many queues PROV NODE    each endpoint has a queue with a wait object; a message wakes the
 *                                thread that sleeps on the queue of its endpoint, and no other one
 *   rdm_many shared PROV NODE    all endpoints have one queue, on which a thread sleeps
 *   rdm_many polled PROV NODE    a thread sleeps on a queue that another thread polls, and then not
 *                                any more
 *
 * The next argument is `auto` for FI_PROGRESS_AUTO, or `manual`. A last argument is the number of
 * endpoints, or of repetitions. Ends with 0, or says what went wrong. Plain libfabric 1.17; link
 * with -pthread. */
#include "rdm_processes.h"

#include <pthread.h>
#include <sys/resource.h>

static uint64_t count_wanted; /* 0: the mode's own */

static uint64_t count_or(uint64_t otherwise) { return count_wanted ? count_wanted : otherwise; }

/* Words of the board */
enum { READY, DONE, ASKED, ENDED };

enum { PEER = 0, FIRST = 1, SLEEPERS = 8 };

/* An endpoint needs up to 6 descriptors. */
static void allow_descriptors(void)
{
	struct rlimit limit;

	MUST(getrlimit(RLIMIT_NOFILE, &limit));
	limit.rlim_cur = limit.rlim_max;
	MUST(setrlimit(RLIMIT_NOFILE, &limit));
}

static void run(void (*first)(int), void (*second)(int))
{
	pid_t pids[] = { start("first", first, 0), start("second", second, 1) };
	int failed = 0;

	for (int i = 0; i < 2; i++)
		failed |= status_of(pids[i], i ? "second" : "first");
	if (failed)
		exit(1);
}

/* One endpoint that sends message `number` to each endpoint that the other process asks for, and
 * gets an answer. ASKED counts the questions; a question is the number of an endpoint. */
static _Atomic uint64_t *question(void) { return &board->words[WORDS - 1]; }

static void peer(int unused)
{
	struct side side;
	uint64_t count = count_or(300), asked = 0;

	(void)unused;
	allow_descriptors();
	wanted.wait = FI_WAIT_NONE;
	open_side(&side, PEER);
	fi_addr_t *to = calloc(count, sizeof *to);
	for (uint64_t i = 0; i < count; i++)
		to[i] = address(&side, FIRST + (int)i);
	while (!told(ENDED)) {
		uint64_t number, in = 0;

		progress(&side);
		if (told(ASKED) == asked)
			continue;
		asked++;
		number = atomic_load(question());
		POST(&side, fi_trecv(side.ep, &in, 8, NULL, FI_ADDR_UNSPEC, number, 0, &in));
		POST(&side, fi_tsend(side.ep, &number, 8, NULL, to[number], number, &number));
		next(&side, side.tx);
		next(&side, side.rx);
		IS(in == ~number);
		add(DONE);
	}
	close_side(&side);
}

static void ask(uint64_t number)
{
	atomic_store(question(), number);
	add(ASKED);
}

/* Reads one completion, asleep. */
static struct fi_cq_tagged_entry sleep_on(struct fid_cq *cq)
{
	struct fi_cq_tagged_entry entry;
	ssize_t got = fi_cq_sread(cq, &entry, 1, NULL, SECONDS * 1000);

	if (got != 1)
		die("fi_cq_sread: %zd", got);
	return entry;
}

/* ---- a queue for each endpoint ---- */

struct sleeper {
	struct fid_cq *cq;
	uint64_t got;
	_Atomic int woken;
	pthread_t thread;
};

static void *sleeps(void *argument)
{
	struct sleeper *this = argument;

	this->got = sleep_on(this->cq).tag;
	atomic_store(&this->woken, 1);
	return NULL;
}

static void answer(struct side *side, struct fid_ep *ep, fi_addr_t to, uint64_t number)
{
	uint64_t reply = ~number, asked = told(ASKED);

	POST(side, fi_tinject(ep, &reply, 8, to, number));
	/* the inject may wait for a connection, which the driver makes */
	UNTIL(told(DONE) >= asked, (void)0);
}

static void has_queues(int unused)
{
	const int count = (int)count_or(300);
	struct fid_cq **queues = calloc((size_t)count, sizeof *queues);
	struct fid_ep **eps = calloc((size_t)count, sizeof *eps);
	uint64_t *in = calloc((size_t)count, sizeof *in);
	struct sleeper sleepers[SLEEPERS] = { 0 };
	struct side side;

	(void)unused;
	allow_descriptors();
	open_domain_of(&side);
	wanted.wait = FI_WAIT_NONE;
	side.tx = queue(&side, 0);
	wanted.wait = FI_WAIT_UNSPEC;
	for (int i = 0; i < count; i++) {
		side.rx = queues[i] = queue(&side, 8);
		eps[i] = endpoint_on(&side, 0);
		publish(eps[i], FIRST + i);
		MUST(fi_trecv(eps[i], &in[i], 8, NULL, FI_ADDR_UNSPEC, (uint64_t)i, 0, &in[i]));
	}
	fi_addr_t to = address(&side, PEER);
	/* one thread, in turn */
	for (int i = 0; i < count; i++) {
		side.rx = queues[i];
		ask((uint64_t)i);
		IS(sleep_on(queues[i]).op_context == &in[i]);
		IS(in[i] == (uint64_t)i);
		answer(&side, eps[i], to, (uint64_t)i);
	}
	/* threads that sleep at once, on queues far from each other */
	for (int i = 0; i < SLEEPERS; i++) {
		int at = i * (count / SLEEPERS);

		MUST(fi_trecv(eps[at], &in[at], 8, NULL, FI_ADDR_UNSPEC, (uint64_t)at, 0, &in[at]));
		sleepers[i].cq = queues[at];
		IS(pthread_create(&sleepers[i].thread, NULL, sleeps, &sleepers[i]) == 0);
	}
	for (int turn = 0; turn < SLEEPERS; turn++) {
		int i = turn * 3 % SLEEPERS, at = i * (count / SLEEPERS);

		pause_ms(20);
		side.rx = NULL;
		ask((uint64_t)at);
		UNTIL(atomic_load(&sleepers[i].woken), pause_ms(1));
		IS(pthread_join(sleepers[i].thread, NULL) == 0);
		IS(sleepers[i].got == (uint64_t)at);
		for (int other = turn + 1; other < SLEEPERS; other++)
			IS(!atomic_load(&sleepers[other * 3 % SLEEPERS].woken));
		answer(&side, eps[at], to, (uint64_t)at);
	}
	put(ENDED, 1);
	for (int i = 0; i < count; i++) {
		MUST(fi_close(&eps[i]->fid));
		MUST(fi_close(&queues[i]->fid));
	}
	close_side(&side);
}

static void check_queues(void) { run(has_queues, peer); }

/* ---- one queue ---- */

static void shares_queue(int unused)
{
	const int count = (int)count_or(300);
	struct fid_ep **eps = calloc((size_t)count, sizeof *eps);
	uint64_t *in = calloc((size_t)count, sizeof *in);
	struct side side;

	(void)unused;
	allow_descriptors();
	open_domain_of(&side);
	wanted.wait = FI_WAIT_NONE;
	side.tx = queue(&side, 0);
	wanted.wait = FI_WAIT_FD;
	side.rx = queue(&side, 0);
	for (int i = 0; i < count; i++) {
		eps[i] = endpoint_on(&side, 0);
		publish(eps[i], FIRST + i);
		MUST(fi_trecv(eps[i], &in[i], 8, NULL, FI_ADDR_UNSPEC, (uint64_t)i, 0, &in[i]));
	}
	fi_addr_t to = address(&side, PEER);
	for (int turn = 0; turn < count; turn++) {
		int i = turn * 7 % count;

		if (count % 7 == 0)
			i = turn;
		ask((uint64_t)i);
		IS(sleep_on(side.rx).op_context == &in[i]);
		IS(in[i] == (uint64_t)i);
		answer(&side, eps[i], to, (uint64_t)i);
	}
	put(ENDED, 1);
	for (int i = 0; i < count; i++)
		MUST(fi_close(&eps[i]->fid));
	close_side(&side);
}

static void check_shared(void) { run(shares_queue, peer); }

/* ---- a queue that is polled and slept on ---- */

static void polls(int unused)
{
	struct side side;
	uint64_t in;

	(void)unused;
	wanted.wait = FI_WAIT_UNSPEC;
	open_side(&side, FIRST);
	fi_addr_t to = address(&side, PEER);
	for (uint64_t round = 0; round < count_or(100); round++) {
		struct sleeper sleeper = { .cq = side.rx };

		MUST(fi_trecv(side.ep, &in, 8, NULL, FI_ADDR_UNSPEC, 0, 0, &in));
		IS(pthread_create(&sleeper.thread, NULL, sleeps, &sleeper) == 0);
		pause_ms(2);
		/* this thread polls the queue, and stops */
		for (int i = 0; i < 80 + (int)(round % 2) * 9000; i++)
			(void)fi_cq_read(side.rx, NULL, 0);
		ask(0);
		UNTIL_WITHIN(10, atomic_load(&sleeper.woken), pause_ms(1));
		IS(pthread_join(sleeper.thread, NULL) == 0);
		answer(&side, side.ep, to, 0);
	}
	put(ENDED, 1);
	close_side(&side);
}

static void polled_peer(int unused)
{
	count_wanted = 1;
	peer(unused);
}

static void check_polled(void) { run(polls, polled_peer); }

int main(int argc, char **argv)
{
	static const struct mode modes[] = {
		{ "queues", check_queues },
		{ "shared", check_shared },
		{ "polled", check_polled },
	};

	if (argc > 5)
		count_wanted = strtoull(argv[5], NULL, 10);
	return run_mode(modes, sizeof modes / sizeof *modes, argc, argv);
}
