/* Endpoints with many peers in processes that call nothing or sleep, from fi_domain(3) "Progress
 * Models" and fi_cq(3):
 *
 *   rdm_progress computes PROV NODE    one process calls nothing: others connect to it and send
 *   rdm_progress sender PROV NODE      a process sends 1 MiB, and calls nothing afterwards
 *   rdm_progress receiver PROV NODE    messages to posted receives of a process that calls nothing
 *   rdm_progress asleep PROV NODE      connected processes that sleep: no thread of them wakes
 *   rdm_progress sread PROV NODE       the same, with a thread in fi_cq_sread
 *   rdm_progress crowd PROV NODE       the same as asleep, of which one has 102 connected peers
 *
 * The next argument is `auto` for FI_PROGRESS_AUTO, or `manual`. A last argument is the time of
 * computing or sleeping in milliseconds. Ends with 0, or says what went wrong. Plain libfabric
 * 1.17; link with -pthread. */
#include "rdm_processes.h"

#include <dirent.h>
#include <pthread.h>
#include <sys/syscall.h>

#define LARGE (1UL << 20)

static uint64_t time_wanted = 1500; /* milliseconds */

/* Words of the board */
enum { STAGE, DONE, READY };

enum { RANKS = 4, MOST = 20, ASLEEP_SECONDS = 35 };

static void run_ranks(void (*rank)(int), int count)
{
	pid_t pids[RANKS];
	int failed = 0;

	for (int i = 0; i < count; i++)
		pids[i] = start("rank", rank, i);
	for (int i = 0; i < count; i++)
		failed |= status_of(pids[i], "rank");
	if (failed)
		exit(1);
}

static void finish(struct side *side, int count)
{
	add(DONE);
	UNTIL(told(DONE) >= (uint64_t)count, progress(side));
	close_side(side);
}

/* Rank 0 calls nothing after it has posted receives; the others connect to it and send to it. With
 * manual progress the first messages are buffered and complete without rank 0, with automatic
 * progress all of them. Then rank 0 sends to all. */
static void computes(int rank)
{
	const uint64_t count = wants_auto ? MOST : 2;
	struct side side;
	fi_addr_t to[RANKS];
	uint8_t out[64], in[RANKS][MOST][64];
	int received = 0;

	open_side(&side, rank);
	for (int i = 0; i < RANKS; i++)
		to[i] = address(&side, i);
	for (uint64_t from = 0; from < RANKS; from++)
		for (uint64_t i = 0; i < count && (rank == 0) != (from == 0); i++, received++)
			POST(&side, fi_trecv(side.ep, in[from][i], 64, NULL, FI_ADDR_UNSPEC, from * 1000 + i, 0, in[from][i]));
	add(STAGE);
	UNTIL(told(STAGE) >= RANKS, (void)0);
	double began = now();
	if (rank == 0)
		pause_ms((unsigned)time_wanted);
	for (int peer = 0; peer < RANKS; peer++)
		for (uint64_t i = 0; i < count && (rank == 0) != (peer == 0); i++) {
			fill(out, 64, (uint64_t)rank * 1000 + i);
			if (i % 2) {
				POST(&side, fi_tinject(side.ep, out, 64, to[peer], (uint64_t)rank * 1000 + i));
				continue;
			}
			POST(&side, fi_tsend(side.ep, out, 64, NULL, to[peer], (uint64_t)rank * 1000 + i, &side));
			next(&side, side.tx);
		}
	/* the sends to rank 0 were not held up by it */
	if (rank && now() - began > (double)time_wanted * 0.7e-3)
		die("sends took %.3f s", now() - began);
	for (int i = 0; i < received; i++) {
		struct fi_cq_tagged_entry got = next(&side, side.rx);

		must_be(got.op_context, 64, got.tag);
	}
	finish(&side, RANKS);
}

static void check_computes(void) { run_ranks(computes, RANKS); }

/* Rank 0 sends a large message and calls nothing until the others have it. */
static void sender(int rank)
{
	struct side side;
	uint8_t *bytes = malloc(LARGE);

	open_side(&side, rank);
	for (uint64_t turn = 0; turn < 2; turn++) {
		/* at the first turn there is no connection yet */
		if (rank == 0) {
			fi_addr_t to = address(&side, 1);

			fill(bytes, LARGE, turn);
			UNTIL(told(STAGE) >= turn + 1, (void)0);
			POST(&side, fi_tsend(side.ep, bytes, LARGE, NULL, to, turn, bytes));
			UNTIL_WITHIN(time_wanted * 1e-3, told(READY) >= turn + 1, pause_ms(1));
			IS(next(&side, side.tx).op_context == bytes);
		} else {
			address(&side, 0);
			POST(&side, fi_trecv(side.ep, bytes, LARGE, NULL, FI_ADDR_UNSPEC, turn, 0, bytes));
			put(STAGE, turn + 1);
			IS(next(&side, side.rx).len == LARGE);
			must_be(bytes, LARGE, turn);
			put(READY, turn + 1);
		}
	}
	finish(&side, 2);
}

static void check_sender(void) { run_ranks(sender, 2); }

/* Rank 0 has posted receives and calls nothing. With automatic progress the others' messages are
 * delivered meanwhile: sends with FI_DELIVERY_COMPLETE complete, of any length. */
static void receiver(int rank)
{
	static const size_t lengths[] = { 0, 8, 4000, 30000, LARGE };
	struct side side;
	uint8_t *bytes = malloc(LARGE * 5);

	open_side(&side, rank);
	fi_addr_t to = address(&side, !rank);
	for (uint64_t turn = 0; turn < 2; turn++) {
		if (rank == 0) {
			for (uint64_t i = 0; i < 5; i++)
				POST(&side, fi_trecv(side.ep, bytes + i * LARGE, lengths[i], NULL, FI_ADDR_UNSPEC, i, 0, NULL));
			put(STAGE, turn + 1);
			UNTIL_WITHIN(time_wanted * 1e-3, told(READY) >= turn + 1, pause_ms(1));
			for (uint64_t i = 0; i < 5; i++) {
				struct fi_cq_tagged_entry got = next(&side, side.rx);

				IS(got.len == lengths[got.tag]);
				must_be(bytes + got.tag * LARGE, got.len, turn * 10 + got.tag);
			}
		} else {
			UNTIL(told(STAGE) >= turn + 1, (void)0);
			for (uint64_t i = 0; i < 5; i++) {
				struct iovec iov = { bytes, lengths[i] };
				struct fi_msg_tagged msg = { .msg_iov = &iov, .iov_count = 1, .addr = to, .tag = i };

				fill(bytes, lengths[i], turn * 10 + i);
				POST(&side, fi_tsendmsg(side.ep, &msg, FI_COMPLETION | FI_DELIVERY_COMPLETE));
				next(&side, side.tx);
			}
			put(READY, turn + 1);
		}
	}
	finish(&side, 2);
}

static void check_receiver(void)
{
	if (!wants_auto)
		die("with automatic progress only");
	run_ranks(receiver, 2);
}

/* ---- sleeping ---- */

/* How often threads of this process have begun or ceased to run by their own will, except the
 * calling one. */
static uint64_t wakes(int print)
{
	DIR *threads = opendir("/proc/self/task");
	struct dirent *entry;
	uint64_t sum = 0;

	if (!threads)
		die("/proc/self/task");
	while ((entry = readdir(threads))) {
		char path[300], line[200], name[64] = "?";
		unsigned long value = 0;

		if (atoi(entry->d_name) == 0 || atoi(entry->d_name) == (int)syscall(SYS_gettid))
			continue;
		snprintf(path, sizeof path, "/proc/self/task/%s/status", entry->d_name);
		FILE *file = fopen(path, "r");
		if (!file)
			die("%s", path);
		while (fgets(line, sizeof line, file)) {
			sscanf(line, "Name: %60s", name);
			if (sscanf(line, "voluntary_ctxt_switches: %lu", &value) == 1)
				sum += value;
		}
		fclose(file);
		if (print)
			fprintf(stderr, "  thread %s: %lu\n", name, value);
	}
	closedir(threads);
	return sum;
}

struct sleeper {
	struct fid_cq *cq;
	struct fi_cq_tagged_entry entry;
	ssize_t got;
};

static void *sleeps(void *argument)
{
	struct sleeper *sleeper = argument;

	sleeper->got = fi_cq_sread(sleeper->cq, &sleeper->entry, 1, NULL, -1);
	return NULL;
}

/* There is a time of `time_wanted` in which no other thread of this process wakes, or a later one of
 * twice that. A timer or a loop wakes a thread in each of them. What follows a connection does not: it
 * ends, but late where other processes compute, or at a peer that connected late. */
static void stays_asleep(void)
{
	double until = now() + ASLEEP_SECONDS;

	/* timers of connections that were made a moment ago may still run */
	pause_ms(1500);
	for (uint64_t ms = time_wanted;; ms = 2 * time_wanted) {
		uint64_t before = wakes(0), after;

		pause_ms((unsigned)ms);
		after = wakes(0);
		if (after == before)
			return;
		if (now() > until) {
			wakes(1);
			die("%llu wakes in %llu ms", (unsigned long long)(after - before), (unsigned long long)ms);
		}
	}
}

/* All ranks have slept. */
static void await_sleepers(void)
{
	add(READY);
	UNTIL_WITHIN(ASLEEP_SECONDS + 20, told(READY) >= RANKS, pause_ms(1));
}

static int with_thread;

static void asleep(int rank)
{
	struct sleeper sleeper;
	struct side side;
	fi_addr_t to[RANKS];
	uint64_t in[RANKS + 1], out = 1;
	pthread_t id;

	wanted.wait = FI_WAIT_UNSPEC;
	wanted.threading = FI_THREAD_SAFE;
	open_side(&side, rank);
	for (int i = 0; i < RANKS; i++)
		to[i] = address(&side, i);
	for (int i = 0; i < RANKS; i++) {
		POST(&side, fi_recv(side.ep, &in[i], 8, NULL, FI_ADDR_UNSPEC, &in[i]));
		POST(&side, fi_inject(side.ep, &out, 8, to[i]));
	}
	for (int i = 0; i < RANKS; i++)
		next(&side, side.rx);
	add(STAGE);
	UNTIL(told(STAGE) >= RANKS, progress(&side));
	if (with_thread) {
		POST(&side, fi_recv(side.ep, &in[RANKS], 8, NULL, FI_ADDR_UNSPEC, &in[RANKS]));
		sleeper.cq = side.rx;
		if (pthread_create(&id, NULL, sleeps, &sleeper))
			die("pthread_create");
	}
	stays_asleep();
	await_sleepers();
	if (with_thread) {
		/* a message wakes the thread, in a process whose other threads call nothing */
		POST(&side, fi_inject(side.ep, &out, 8, to[(rank + 1) % RANKS]));
		pthread_join(id, NULL);
		IS(sleeper.got == 1 && sleeper.entry.op_context == &in[RANKS]);
	}
	finish(&side, RANKS);
}

static void check_asleep(void) { run_ranks(asleep, RANKS); }

/* One endpoint of rank 0, and a part of its peers in each other rank. */
static void crowd(int rank)
{
	enum { EACH = 34, PEERS = (RANKS - 1) * EACH };
	struct fid_ep *eps[EACH];
	uint64_t in[PEERS], out = 1;
	struct side side;

	if (rank == 0) {
		open_side(&side, 0);
		for (int i = 0; i < PEERS; i++)
			POST(&side, fi_recv(side.ep, &in[i], 8, NULL, FI_ADDR_UNSPEC, &in[i]));
		for (int i = 0; i < PEERS; i++)
			next(&side, side.rx);
	} else {
		open_domain_of(&side);
		side.tx = side.rx = queue(&side, 256);
		fi_addr_t to = address(&side, 0);
		for (int i = 0; i < EACH; i++) {
			eps[i] = endpoint_on(&side, 0);
			POST(&side, fi_inject(eps[i], &out, 8, to));
		}
	}
	add(STAGE);
	UNTIL(told(STAGE) >= RANKS, progress(&side));
	stays_asleep();
	await_sleepers();
	for (int i = 0; rank != 0 && i < EACH; i++)
		MUST(fi_close(&eps[i]->fid));
	finish(&side, RANKS);
}

static void check_crowd(void) { run_ranks(crowd, RANKS); }

static void check_sread(void)
{
	with_thread = 1;
	run_ranks(asleep, RANKS);
}

int main(int argc, char **argv)
{
	static const struct mode modes[] = {
		{ "computes", check_computes }, { "sender", check_sender }, { "receiver", check_receiver },
		{ "asleep", check_asleep },	{ "sread", check_sread },	  { "crowd", check_crowd },
	};

	if (argc > 5)
		time_wanted = strtoull(argv[5], NULL, 0);
	alarm(90);
	return run_mode(modes, sizeof modes / sizeof *modes, argc, argv);
}
