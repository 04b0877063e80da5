/* Several threads that wait on one object.
 *
 *   waiters MODE PROV NODE
 *
 * counter: a counter reaches the threshold of one of two waiting threads: that thread returns.
 *
 * failures: a counter's failures change before another thread begins to wait: the first thread
 * returns.
 *
 * channel: the channel of a queue cannot be added to a counter's wait object: completions wake the
 * thread nevertheless.
 *
 * timer: the same without a timer.
 *
 * sread: one of two threads polls two completions in fi_cq_sread and reads one: the other thread
 * reads the other.
 *
 * trywait: the same, polled by fi_trywait.
 *
 * list: fi_trywait refuses a counter and a queue for the queue: the thread keeps no other one from
 * waiting for the counter.
 *
 * signal: fi_cq_signal: all threads in fi_cq_sread return.
 *
 * nothing: fi_cq_sread of no completions returns when there is one, and after its timeout.
 *
 * The second thread is held between the call and the sleep, where a scheduler may interrupt it at
 * any time, so that each fault shows in each run. Link with -rdynamic: weft calls functions of this
 * program. Exits with 0, or prints the failure. */
#define _GNU_SOURCE
#include <rdma/fi_endpoint.h>

/* binds the counter, if there is one */
static int enable(struct fid_ep *ep);
#define fi_enable enable
#include "pair.h"
#undef fi_enable

#include <pthread.h>
#include <stdatomic.h>
#include <sys/epoll.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>

#include <rdma/fi_eq.h>

#define LIMIT_MS 1500
#define SHORT_MS 100
#define LENGTH 64

/* ---- functions that weft calls ---- */

static _Thread_local int held;          /* the calling thread sleeps only after `gate` is opened */
/* called before the next read(2) of the calling thread */
static _Thread_local void (*on_read)(void);
static atomic_int gate, waiting, sleeping;

int epoll_wait(int fd, struct epoll_event *events, int count, int timeout)
{
	if (held && timeout) {
		held = 0;
		atomic_fetch_add(&waiting, 1);
		while (!atomic_load(&gate))
			usleep(100);
	}
	if (timeout)
		atomic_fetch_add(&sleeping, 1);
	return (int)syscall(SYS_epoll_pwait, fd, events, count, timeout, NULL, 8);
}

ssize_t read(int fd, void *data, size_t size)
{
	void (*call)(void) = on_read;

	on_read = NULL;
	if (call)
		call();
	return syscall(SYS_read, fd, data, size);
}

static int refusing; /* no descriptor can be added to an epoll set, and no timer created */

int epoll_ctl(int set, int command, int fd, struct epoll_event *event)
{
	if (refusing && command == EPOLL_CTL_ADD) {
		errno = ENOSPC;
		return -1;
	}
	return (int)syscall(SYS_epoll_ctl, set, command, fd, event);
}

int timerfd_create(int clock, int flags)
{
	if (refusing) {
		errno = EMFILE;
		return -1;
	}
	return (int)syscall(SYS_timerfd_create, clock, flags);
}

/* ---- threads ---- */

static struct pair ends;
static struct fid_cntr *counter;
static uint8_t *memory;

static int enable(struct fid_ep *ep)
{
	int result;

	if (!counter)
		return fi_enable(ep);
	MUST(fi_ep_bind(ep, &counter->fid, FI_RECV));
	refusing = 1;
	result = fi_enable(ep);
	refusing = 0;
	return result;
}

struct waiter {
	pthread_t thread;
	int held, timeout;
	uint64_t threshold;
	size_t count;
	ssize_t result;
	double took;
};

static void begin(struct waiter *waiter, void *(*run)(void *))
{
	int before = atomic_load(waiter->held ? &waiting : &sleeping);

	if (pthread_create(&waiter->thread, NULL, run, waiter))
		die("pthread_create");
	/* the thread sleeps, or is held right before */
	while (atomic_load(waiter->held ? &waiting : &sleeping) == before)
		usleep(100);
	if (!waiter->held)
		usleep(20000);
}

static void end(struct waiter *waiter) { pthread_join(waiter->thread, NULL); }

static void *wait_counter(void *arg)
{
	struct waiter *waiter = arg;
	double start = now();

	held = waiter->held;
	waiter->result = fi_cntr_wait(counter, waiter->threshold, waiter->timeout);
	waiter->took = now() - start;
	return NULL;
}

static void *wait_queue(void *arg)
{
	struct waiter *waiter = arg;
	struct fi_cq_entry entry;
	double start = now();

	held = waiter->held;
	waiter->result = fi_cq_sread(ends.cq, waiter->count ? &entry : NULL, waiter->count, NULL, waiter->timeout);
	waiter->took = now() - start;
	return NULL;
}

static void must(const char *what, const struct waiter *waiter, ssize_t result, double limit)
{
	printf("%s: %zd after %.3f s\n", what, waiter->result, waiter->took);
	if (waiter->result != result)
		die("%s returned %zd (%s) after %.3f s", what, waiter->result, fi_strerror((int)-waiter->result), waiter->took);
	if (waiter->took > limit)
		die("%s took %.3f s", what, waiter->took);
}

/* ---- counters ---- */

static void open_counter(void)
{
	struct fi_cntr_attr attr = { .events = FI_CNTR_EVENTS_COMP, .wait_obj = FI_WAIT_UNSPEC };

	open_pair(&ends, FI_MR_ALLOCATED);
	MUST(fi_cntr_open(ends.domain, &attr, &counter, NULL));
}

static void counter_reaches_one(void)
{
	struct waiter later = { .threshold = 2, .timeout = LIMIT_MS }, sooner = { .held = 1, .threshold = 1, .timeout = LIMIT_MS };

	open_counter();
	begin(&later, wait_counter);
	begin(&sooner, wait_counter);
	MUST(fi_cntr_add(counter, 1));
	usleep(50000); /* the other thread wakes up, and sleeps again */
	atomic_store(&gate, 1);
	end(&sooner);
	must("the thread whose threshold is reached", &sooner, 0, 1);
	MUST(fi_cntr_add(counter, 1));
	end(&later);
	must("the other thread", &later, 0, 1);
}

static void failures_before_another_waits(void)
{
	struct waiter first = { .held = 1, .threshold = 1, .timeout = LIMIT_MS }, second = { .threshold = 1, .timeout = SHORT_MS };

	open_counter();
	begin(&first, wait_counter);
	MUST(fi_cntr_adderr(counter, 1));
	if (pthread_create(&second.thread, NULL, wait_counter, &second))
		die("pthread_create");
	usleep(50000);
	atomic_store(&gate, 1);
	end(&first);
	must("the thread that waited during the change", &first, -FI_EAVAIL, 1);
	end(&second);
	must("the thread that waits since", &second, -FI_ETIMEDOUT, 1);
}

/* ---- completion queues: one endpoint's receives complete in a queue with a wait object ---- */

static void open_waiting_queue(struct fi_cntr_attr *counted)
{
	struct fi_cq_attr attr = { .format = FI_CQ_FORMAT_CONTEXT, .wait_obj = FI_WAIT_FD };
	struct fid_cq *cq;

	open_pair(&ends, FI_MR_ALLOCATED);
	MUST(fi_close(&ends.cq->fid));
	MUST(fi_cq_open(ends.domain, &attr, &cq, NULL));
	ends.cq = cq;
	if (counted)
		MUST(fi_cntr_open(ends.domain, counted, &counter, NULL));
	connect_pair(&ends);
	memory = aligned_alloc(4096, 4096);
	memset(memory, 0, 4096);
}

/* Makes one receive complete in the queue. */
static void complete(int count)
{
	for (int i = 0; i < count; i++)
		MUST(fi_inject(ends.ep[0], memory, LENGTH, 0));
	usleep(50000);
}

static void complete_two(void) { complete(2); }

static void post(int count)
{
	for (int i = 0; i < count; i++)
		MUST(fi_recv(ends.ep[1], memory + (i + 1) * LENGTH, LENGTH, NULL, 0, NULL));
}

static void completions_of_a_queue_that_is_not_added(int timers)
{
	struct waiter waiter = { .threshold = 1, .timeout = LIMIT_MS };
	struct fi_cntr_attr attr = { .events = FI_CNTR_EVENTS_COMP, .wait_obj = FI_WAIT_UNSPEC };

	open_waiting_queue(&attr);
	post(1);
	refusing = !timers;
	begin(&waiter, wait_counter);
	complete(1);
	end(&waiter);
	must("the wait for a receive", &waiter, 0, 1);
}

static void two_completions(int trywait)
{
	struct waiter waiter = { .held = 1, .count = 1, .timeout = LIMIT_MS };
	struct fid *fid;
	struct fi_cq_entry entry;
	ssize_t got;

	open_waiting_queue(NULL);
	post(2);
	begin(&waiter, wait_queue);
	if (trywait) {
		complete(2);
		fid = &ends.cq->fid;
		got = fi_trywait(ends.fabric, &fid, 1);
		if (got != -FI_EAGAIN)
			die("fi_trywait returned %zd where there are two completions", got);
		got = fi_cq_read(ends.cq, &entry, 1);
	} else {
		/* the completions come after the first check of the queue */
		on_read = complete_two;
		got = fi_cq_sread(ends.cq, &entry, 1, NULL, LIMIT_MS);
		if (on_read)
			die("no file descriptor was read");
	}
	if (got != 1)
		die("the first read returned %zd", got);
	atomic_store(&gate, 1);
	end(&waiter);
	must("the thread that slept", &waiter, 1, 1);
}

static void *try_list(void *arg)
{
	struct waiter *waiter = arg;
	struct fid *fids[] = { &counter->fid, &ends.cq->fid };

	waiter->result = fi_trywait(ends.fabric, fids, 2);
	atomic_fetch_add(&sleeping, 1);
	while (!atomic_load(&gate))
		usleep(100);
	return NULL;
}

static void refused_list(void)
{
	struct fi_cntr_attr attr = { .events = FI_CNTR_EVENTS_COMP, .wait_obj = FI_WAIT_FD };
	struct waiter waiter = { 0 };
	struct fid *fid;
	int first, second;

	open_waiting_queue(NULL);
	MUST(fi_cntr_open(ends.domain, &attr, &counter, NULL));
	post(1);
	complete(1);
	begin(&waiter, try_list);
	MUST(fi_cntr_add(counter, 1));
	fid = &counter->fid;
	first = fi_trywait(ends.fabric, &fid, 1);
	second = fi_trywait(ends.fabric, &fid, 1);
	atomic_store(&gate, 1);
	end(&waiter);
	must("fi_trywait of a counter and a queue with a completion", &waiter, -FI_EAGAIN, 1);
	if (first != -FI_EAGAIN || second)
		die("fi_trywait of the changed counter returned %d, then %d", first, second);
}

static void signal_all(void)
{
	enum { THREADS = 3 };
	struct waiter waiters[THREADS], none = { .count = 1, .timeout = SHORT_MS };

	open_waiting_queue(NULL);
	for (int i = 0; i < THREADS; i++) {
		waiters[i] = (struct waiter){ .held = i == 1, .count = 1, .timeout = LIMIT_MS };
		begin(&waiters[i], wait_queue);
	}
	MUST(fi_cq_signal(ends.cq));
	usleep(50000);
	/* a signal does not affect a thread that comes later: it sleeps */
	if (pthread_create(&none.thread, NULL, wait_queue, &none))
		die("pthread_create");
	end(&none);
	atomic_store(&gate, 1);
	for (int i = 0; i < THREADS; i++) {
		end(&waiters[i]);
		must("a signalled thread", &waiters[i], -FI_EAGAIN, 1);
	}
	must("a thread that came after the signal", &none, -FI_EAGAIN, 1);
	if (none.took < SHORT_MS / 1000.0)
		die("a thread that came after the signal has not slept");
	/* with no thread waiting, the signal makes the next call return, which would wait for LIMIT_MS
	 * otherwise, and not the one behind it */
	MUST(fi_cq_signal(ends.cq));
	for (int i = 0; i < 2; i++) {
		double start = now(), took;
		struct fi_cq_entry entry;
		ssize_t got = fi_cq_sread(ends.cq, &entry, 1, NULL, i == 0 ? LIMIT_MS : SHORT_MS);

		took = now() - start;
		if (got != -FI_EAGAIN || (i == 0 ? took > 1 : took < SHORT_MS / 1000.0))
			die("call %d after a signal returned %zd after %.3f s", i, got, took);
	}
}

static void read_nothing(void)
{
	struct waiter waiter = { .timeout = LIMIT_MS };
	struct fi_cq_entry entry;
	double start = now();
	ssize_t got;

	open_waiting_queue(NULL);
	post(1);
	start = now();
	got = fi_cq_sread(ends.cq, NULL, 0, NULL, SHORT_MS);
	if (got != -FI_EAGAIN || now() - start < SHORT_MS / 1000.0 || now() - start > 1)
		die("fi_cq_sread of nothing returned %zd after %.3f s", got, now() - start);
	begin(&waiter, wait_queue);
	complete(1);
	end(&waiter);
	must("fi_cq_sread of nothing, with a completion", &waiter, 0, 1);
	start = now();
	got = fi_cq_sread(ends.cq, NULL, 0, NULL, LIMIT_MS);
	if (got != 0 || now() - start > 1)
		die("fi_cq_sread of nothing, with a completion, returned %zd after %.3f s", got, now() - start);
	got = fi_cq_read(ends.cq, NULL, 0);
	if (got != 0)
		die("fi_cq_read of nothing, with a completion: %zd", got);
	got = fi_cq_read(ends.cq, &entry, 1);
	if (got != 1)
		die("the completion is lost: %zd", got);
}

int main(int argc, char **argv)
{
	const char *mode = argc == 4 ? argv[1] : "";

	setvbuf(stdout, NULL, _IOLBF, 0);
	alarm(60);
	if (argc == 4)
		provider = argv[2], node = argv[3];
	role = mode;
	if (!strcmp(mode, "counter"))
		counter_reaches_one();
	else if (!strcmp(mode, "failures"))
		failures_before_another_waits();
	else if (!strcmp(mode, "channel") || !strcmp(mode, "timer"))
		completions_of_a_queue_that_is_not_added(!strcmp(mode, "channel"));
	else if (!strcmp(mode, "sread") || !strcmp(mode, "trywait"))
		two_completions(!strcmp(mode, "trywait"));
	else if (!strcmp(mode, "list"))
		refused_list();
	else if (!strcmp(mode, "signal"))
		signal_all();
	else if (!strcmp(mode, "nothing"))
		read_nothing();
	else
		die("usage: see the source");
	if (counter && ends.ep[0]) {
		for (int i = 0; i < 2; i++) {
			MUST(fi_close(&ends.ep[i]->fid));
			ends.ep[i] = NULL;
		}
	}
	if (counter)
		MUST(fi_close(&counter->fid));
	close_pair(&ends);
	return 0;
}
