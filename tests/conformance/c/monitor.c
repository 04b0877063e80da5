/* A memory monitor of the application, in libfabric's form, passed to the provider by
 * weft_mr_ops.monitor_import.
 *
 *   monitor PROV NODE
 *
 * For a device without on-demand paging (SOFTVERBS_ODP=0). Correct and wrong use: which calls of
 * the monitor the provider makes, how often and for which ranges; notifications of any range from
 * other threads, while domains close, from within the monitor's calls, and in a forked child. Exits
 * with 0, or prints the failure. */
#define _GNU_SOURCE
#include "pair.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/mman.h>

#include <rdma/fi_ext.h>

#include "weft.h"

#define LENGTH 65536UL
#define PAGE 4096UL
#define NATIVE (FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY)

/* ---- the monitor ---- */

struct range {
	uintptr_t addr;
	size_t len, count;
};

static struct {
	pthread_mutex_t lock;
	struct range ranges[4096];
	size_t known;
	atomic_int started, stopped, subscribed, unsubscribed, asked;
	atomic_bool refuses, invalid, tells, running;
	int start_returns;
} seen = { .lock = PTHREAD_MUTEX_INITIALIZER };

static struct fid_mem_monitor monitor;

/* The entry of a range; with `add`, a missing one is created. */
static struct range *entry(uintptr_t addr, size_t len, bool add)
{
	for (size_t i = 0; i < seen.known; i++)
		if (seen.ranges[i].addr == addr && seen.ranges[i].len == len)
			return &seen.ranges[i];
	if (!add)
		return NULL;
	if (seen.known == sizeof seen.ranges / sizeof *seen.ranges)
		die("too many ranges");
	seen.ranges[seen.known] = (struct range){ addr, len, 0 };
	return &seen.ranges[seen.known++];
}

static void check(struct fid_mem_monitor *which, const char *call)
{
	if (which != &monitor)
		die("%s of another monitor", call);
	if (!seen.running)
		die("%s of one that is not started", call);
}

static int start(struct fid_mem_monitor *which)
{
	if (which != &monitor || seen.running)
		die("start of another monitor, or of one that is started");
	seen.started++;
	if (!which->import_ops || !which->import_ops->notify)
		die("started without a notify function");
	if (!seen.start_returns)
		seen.running = true;
	return seen.start_returns;
}

static void stop(struct fid_mem_monitor *which)
{
	check(which, "stop");
	seen.running = false;
	seen.stopped++;
}

static int subscribe(struct fid_mem_monitor *which, const void *addr, size_t len)
{
	check(which, "subscribe");
	if ((uintptr_t)addr % PAGE || len % PAGE || !len)
		die("subscribe: %p, %zu bytes", addr, len);
	if (seen.refuses)
		return -FI_EINVAL;
	pthread_mutex_lock(&seen.lock);
	entry((uintptr_t)addr, len, true)->count++;
	pthread_mutex_unlock(&seen.lock);
	seen.subscribed++;
	if (seen.tells)
		which->import_ops->notify(which, addr, 1);
	return 0;
}

static void unsubscribe(struct fid_mem_monitor *which, const void *addr, size_t len)
{
	struct range *range;

	check(which, "unsubscribe");
	pthread_mutex_lock(&seen.lock);
	range = entry((uintptr_t)addr, len, false);
	if (!range || !range->count)
		die("unsubscribe: %p, %zu bytes: not subscribed to", addr, len);
	range->count--;
	pthread_mutex_unlock(&seen.lock);
	seen.unsubscribed++;
	if (seen.tells)
		which->import_ops->notify(which, addr, len);
}

static bool valid(struct fid_mem_monitor *which, const void *addr, size_t len)
{
	struct range *range;

	check(which, "valid");
	pthread_mutex_lock(&seen.lock);
	range = entry((uintptr_t)addr, len, false);
	if (!range || !range->count)
		die("valid: %p, %zu bytes: not subscribed to", addr, len);
	pthread_mutex_unlock(&seen.lock);
	seen.asked++;
	if (seen.tells)
		which->import_ops->notify(which, addr, len);
	return !seen.invalid;
}

static struct fi_ops_mem_monitor calls = {
	.size = sizeof calls,
	.start = start,
	.stop = stop,
	.subscribe = subscribe,
	.unsubscribe = unsubscribe,
	.valid = valid,
};

static struct fid_mem_monitor monitor = { .fid.fclass = FI_CLASS_MEM_MONITOR, .export_ops = &calls };

static void notify(const void *addr, size_t len) { monitor.import_ops->notify(&monitor, addr, len); }

/* ---- the cases ---- */

static const struct weft_mr_ops *ops_of(struct fid_domain *domain)
{
	void *table = NULL;

	MUST(fi_open_ops(&domain->fid, WEFT_MR_OPS, 0, &table, NULL));
	if (!WEFT_HAS_OP((const struct weft_mr_ops *)table, monitor_import))
		die("no monitor_import");
	return table;
}

static int import(struct fid_domain *domain, struct fid_mem_monitor *which)
{
	static const struct weft_mr_ops *ops;

	if (!ops)
		ops = ops_of(domain);
	return ops->monitor_import(domain, which);
}

#define IS(expression, want)                                                                                         \
	do {                                                                                                         \
		long is_ = (long)(expression);                                                                       \
		if (is_ != (long)(want))                                                                             \
			die("line %d: %s is %ld, not %ld", __LINE__, #expression, is_, (long)(want));                \
	} while (0)

static void wrong_arguments(struct fid_domain *domain)
{
	struct fi_ops_mem_monitor less = calls;
	struct fid_mem_monitor other = { .fid.fclass = FI_CLASS_MR, .export_ops = &calls };
	struct fi_ops_mem_notify foreign = { .size = sizeof foreign };

	IS(import(domain, NULL), -FI_EINVAL);
	IS(import(NULL, &monitor), -FI_EINVAL);
	IS(import(domain, &other), -FI_EINVAL);
	other.fid.fclass = FI_CLASS_MEM_MONITOR;
	other.export_ops = NULL;
	IS(import(domain, &other), -FI_EINVAL);
	other.export_ops = &less;
	less.size = sizeof less - 1;
	IS(import(domain, &other), -FI_EINVAL);
	for (int missing = 0; missing < 5; missing++) {
		less = calls;
		switch (missing) {
		case 0: less.start = NULL; break;
		case 1: less.stop = NULL; break;
		case 2: less.subscribe = NULL; break;
		case 3: less.unsubscribe = NULL; break;
		case 4: less.valid = NULL; break;
		}
		IS(import(domain, &other), -FI_EINVAL);
	}
	less = calls;
	other.import_ops = &foreign;
	IS(import(domain, &other), -FI_EBUSY);
	IS(other.import_ops == &foreign, 1);
	for (int value = 0; value < 3; value++) {
		const int returns[] = { -FI_EPERM, 7, INT32_MIN }, becomes[] = { -FI_EPERM, -FI_EOTHER, -INT32_MAX };

		seen.start_returns = returns[value];
		IS(import(domain, &monitor), becomes[value]);
		IS(monitor.import_ops == NULL && monitor.fid.ops == NULL, 1);
	}
	seen.start_returns = 0;
	IS(seen.started, 3);
	IS(seen.stopped, 0);
	seen.started = 0;
}

static void nothing_is_kept(void)
{
	struct pair pair;

	open_pair(&pair, NATIVE | FI_MR_LOCAL);
	IS(import(pair.domain, &monitor), -FI_EOPNOTSUPP);
	IS(seen.started, 0);
	close_pair(&pair);
}

/* Makes `count` transfers; returns the number of registrations that they made. */
static int misses(struct pair *pair, uint8_t *from, uint8_t *to, int count)
{
	int before = seen.subscribed;

	for (int i = 0; i < count; i++) {
		memset(from, i + 1, LENGTH);
		transfer(pair, from, to, LENGTH);
	}
	return seen.subscribed - before;
}

static void told(struct pair *pair, uint8_t *from, uint8_t *to)
{
	int before;

	IS(misses(pair, from, to, 100), 2); /* the source and the sink */
	IS(seen.asked >= 198, 1);
	/* one byte inside one buffer, then the last byte of the other */
	notify(from + 5000, 1);
	IS(misses(pair, from, to, 10), 1);
	notify(to + LENGTH - 1, 1);
	IS(misses(pair, from, to, 10), 1);
	/* no effect: a range that was never subscribed to, empty ranges, the end of the address
	 * space */
	notify(from - 2 * PAGE, PAGE);
	notify(NULL, 0);
	notify(from, 0);
	notify((void *)PAGE, 1);
	notify((void *)(UINTPTR_MAX - PAGE), SIZE_MAX);
	IS(misses(pair, from, to, 10), 0);
	notify(NULL, SIZE_MAX);
	IS(misses(pair, from, to, 10), 2);
	/* other pages at the same address */
	IS(mmap(from, LENGTH, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == from, 1);
	notify(from, LENGTH);
	IS(misses(pair, from, to, 10), 1);
	/* the monitor answers that a range is not valid */
	seen.invalid = true;
	IS(misses(pair, from, to, 10), 20);
	seen.invalid = false;
	misses(pair, from, to, 1);
	IS(misses(pair, from, to, 10), 0);
	/* the monitor refuses to subscribe */
	notify(NULL, SIZE_MAX);
	seen.refuses = true;
	IS(misses(pair, from, to, 10), 0);
	seen.refuses = false;
	IS(misses(pair, from, to, 10), 2);
	/* memory changes while it is being registered: each call of the monitor notifies */
	notify(NULL, SIZE_MAX);
	seen.tells = true;
	IS(misses(pair, from, to, 10), 20);
	seen.tells = false;
	before = seen.subscribed;
	misses(pair, from, to, 1);
	IS(misses(pair, from, to, 10), 0);
	IS(seen.subscribed - before <= 2, 1);
}

static atomic_bool over;
static atomic_int told_times;
static uint8_t *told_of;

static void *teller(void *argument)
{
	unsigned seed = (unsigned)(uintptr_t)argument;

	while (!over) {
		size_t at = (size_t)rand_r(&seed) % (2 * LENGTH);

		notify(told_of + at, (size_t)rand_r(&seed) % (2 * PAGE));
		told_times++;
		if (rand_r(&seed) % 64 == 0)
			notify(NULL, SIZE_MAX);
		sched_yield();
	}
	return NULL;
}

/* Two threads notify of random ranges during transfers, and while domains open and close. */
static void threads(struct pair *pair, uint8_t *from, uint8_t *to)
{
	pthread_t tellers[2];

	told_of = from;
	for (uintptr_t i = 0; i < 2; i++)
		if (pthread_create(&tellers[i], NULL, teller, (void *)(i + 1)))
			die("pthread_create");
	while (told_times < 1000)
		misses(pair, from, to, 20);
	for (int i = 0; i < 10; i++) {
		struct pair other;
		int goal = told_times + 50;

		open_pair(&other, NATIVE);
		IS(import(other.domain, &monitor), 0);
		connect_pair(&other);
		while (told_times < goal)
			misses(&other, from, to, 20);
		close_pair(&other);
	}
	over = true;
	for (int i = 0; i < 2; i++)
		pthread_join(tellers[i], NULL);
}

/* A child that unmaps memory notifies of it, as the hooks of a real monitor do. */
static void forked(struct pair *pair, uint8_t *from, uint8_t *to)
{
	int before = seen.subscribed;
	pid_t pid = child("child");

	if (pid == 0) {
		notify(from, LENGTH);
		notify(NULL, SIZE_MAX);
		_exit(seen.subscribed != before);
	}
	IS(status_of(pid, "child"), 0);
	IS(misses(pair, from, to, 10), 2); /* older kernels give the parent other pages */
}

int main(int argc, char **argv)
{
	struct pair pair, other;
	uint8_t *memory, *from, *to;

	role = "monitor";
	if (argc != 3)
		die("usage: monitor PROV NODE");
	provider = argv[1];
	node = argv[2];
	alarm(140);
	memory = mmap(NULL, 8 * LENGTH, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	from = memory + LENGTH;
	to = from + 3 * LENGTH;
	open_pair(&pair, NATIVE);
	wrong_arguments(pair.domain);
	nothing_is_kept();
	IS(import(pair.domain, &monitor), 0);
	IS(import(pair.domain, &monitor), -FI_EBUSY);
	IS(fi_close(&monitor.fid), -FI_EBUSY);
	open_pair(&other, NATIVE);
	IS(import(other.domain, &monitor), 0);
	IS(seen.started, 1);
	connect_pair(&pair);
	told(&pair, from, to);
	threads(&pair, from, to);
	forked(&pair, from, to);
	close_pair(&pair);
	IS(seen.stopped, 0);
	close_pair(&other);
	IS(seen.stopped, 1);
	IS(seen.unsubscribed, seen.subscribed);
	for (size_t i = 0; i < seen.known; i++)
		IS(seen.ranges[i].count, 0);
	/* after the last domain is closed a notification has no effect */
	notify(from, LENGTH);
	IS(fi_close(&monitor.fid), 0);
	/* a second import, after the first monitor was closed */
	open_pair(&pair, NATIVE);
	IS(import(pair.domain, &monitor), 0);
	IS(seen.started, 2);
	connect_pair(&pair);
	IS(misses(&pair, from, to, 10), 2);
	/* this domain has an endpoint: its memory is monitored already */
	open_pair(&other, NATIVE);
	connect_pair(&other);
	IS(import(other.domain, &monitor), -FI_EBUSY);
	close_pair(&other);
	close_pair(&pair);
	IS(seen.stopped, 2);
	IS(seen.unsubscribed, seen.subscribed);
	printf("%d registrations, asked %d times\n", (int)seen.subscribed, (int)seen.asked);
	return 0;
}
