/* Two processes that sleep between messages, from fi_cq(3), fi_cntr(3), fi_poll(3) and fi_domain(3). Each has
 * three endpoints with the same completion queues, counters and wait objects. One of the two begins an operation
 * with any of its endpoints: a message, a write with or without remote CQ data, a read, or an atomic; each waits
 * for its completion; then the other one begins. A wait that does not end in time has lost its event.
 *
 *   rdm_doze sread PROV NODE    fi_cq_sread, on a queue for each direction
 *   rdm_doze one PROV NODE      fi_cq_sread, on one queue for both
 *   rdm_doze counter PROV NODE  fi_cntr_wait; the queues are never read
 *   rdm_doze poll PROV NODE     fi_trywait and poll(2) on the descriptor of the queue or counter that has to change
 *   rdm_doze epoll PROV NODE    fi_trywait and epoll(7) on those of all queues and counters
 *   rdm_doze edge PROV NODE     the same with EPOLLET, and the descriptors are added once
 *   rdm_doze two PROV NODE      two threads, one in fi_cq_sread for each queue
 *
 * The next argument is the wait object: unspec, fd, mutex or yield; then `auto` for FI_PROGRESS_AUTO, or `manual`;
 * then the number of operations and of seconds that are slept every 1,000 operations. Ends with 0, with 77 if the
 * wait object is not supported, or says what went wrong. Plain libfabric 1.17. */
#define _GNU_SOURCE
#define SECONDS 20
#include "rdm_memory.h"

#include <pthread.h>
#include <sys/epoll.h>
#include <sys/resource.h>

#define CAPS_ALL (FI_MSG | FI_TAGGED | FI_RMA | FI_ATOMIC | FI_RMA_EVENT)
#define ALL_REMOTE (FI_REMOTE_READ | FI_REMOTE_WRITE)
#define LIMIT_MS 8000
enum { EPS = 3, LONGEST = 200000, AREA = 1 << 20 };
enum { SREAD, ONE, COUNTER, POLL, EPOLL, EDGE, TWO };
enum { SENT, RECEIVED, WRITTEN, READ, REMOTE, COUNTERS };

static int how;
static const char *const hows[] = { "sread", "one", "counter", "poll", "epoll", "edge", "two" };
static enum fi_wait_obj object = FI_WAIT_UNSPEC;
static unsigned operations = 10000, pause_s = 1;
static struct side side;
static struct fid_ep *eps[EPS];
static fi_addr_t peers[EPS];
static struct fid_cntr *cntrs[COUNTERS];
static uint64_t counts[COUNTERS];
static struct fid *fids[2 + COUNTERS];
static int fds[2 + COUNTERS], epoll_fd;
static unsigned fid_count;
static uint8_t *memory, *out, *in;
static struct region region;
static struct shown there;
static uint64_t blocked, waits;

static uint64_t random_state = 99;
static unsigned pick(unsigned n)
{
	random_state = mixed(random_state + 0x9e3779b97f4a7c15ULL);
	return (unsigned)(random_state % n);
}

/* ---- waiting ---- */

static unsigned round_now, kind_now;
static const char *waiting_for;

static void lost(const char *detail) { die("operation %u of kind %u: lost wake-up: %s within %d ms, in the wait for %s", round_now, kind_now, detail, LIMIT_MS, waiting_for); }

static void sleep_on_fd(struct fid *fid)
{
	struct pollfd ready = { .events = POLLIN };
	int result;

	MUST(fi_control(fid, FI_GETWAIT, &ready.fd));
	result = fi_trywait(side.fabric, &fid, 1);
	if (result == -FI_EAGAIN)
		return;
	if (result)
		die("fi_trywait: %d", result);
	blocked++;
	result = poll(&ready, 1, LIMIT_MS);
	if (result == 0)
		lost("poll returns nothing");
}

static void sleep_on_all(void)
{
	struct epoll_event events[8];
	int result = fi_trywait(side.fabric, fids, (int)fid_count);

	if (result == -FI_EAGAIN)
		return;
	if (result)
		die("fi_trywait of all: %d", result);
	blocked++;
	result = epoll_wait(epoll_fd, events, 8, LIMIT_MS);
	if (result == 0)
		lost("epoll_wait returns nothing");
}

static void sleep_now(struct fid *fid)
{
	if (how == POLL)
		sleep_on_fd(fid);
	else
		sleep_on_all();
}

/* The next entry of the queue. */
static struct fi_cq_tagged_entry next_entry(struct fid_cq *cq, const char *what)
{
	struct fi_cq_tagged_entry entry;
	struct fi_cq_err_entry error = { 0 };
	double began = now();
	ssize_t got;

	waiting_for = what;
	waits++;
	for (;;) {
		if (how <= ONE || how == TWO) {
			got = fi_cq_sread(cq, &entry, 1, NULL, LIMIT_MS);
		} else {
			got = fi_cq_read(cq, &entry, 1);
			if (how != POLL && got == -FI_EAGAIN)
				(void)fi_cq_read(cq == side.tx ? side.rx : side.tx, NULL, 0);
		}
		if (got == 1)
			return entry;
		if (got == -FI_EAVAIL) {
			RETURNS(fi_cq_readerr(cq, &error, 0), 1);
			die("an entry in error: %s", fi_strerror(error.err));
		}
		if (got != -FI_EAGAIN)
			die("a read: %zd", got);
		if (now() - began > LIMIT_MS / 1000.0 - 0.1) {
			got = fi_cq_read(cq, &entry, 1);
			lost(got == 1 ? "no entry, although there is one," : "no entry");
		}
		if (how > ONE && how != TWO)
			sleep_now(&cq->fid);
	}
}

/* The next entry of a transmit or of a receive. On one queue those of the other kind may come before. */
static struct fi_cq_tagged_entry entry_of(struct fid_cq *cq, const char *what)
{
	static struct fi_cq_tagged_entry kept[4];
	static unsigned count;
	bool transmit = strstr(what, "transmit") != NULL;

	if (how != ONE)
		return next_entry(cq, what);
	for (unsigned i = 0; i < count; i++)
		if (transmit == !(kept[i].flags & (FI_RECV | FI_REMOTE_WRITE))) {
			struct fi_cq_tagged_entry found = kept[i];

			kept[i] = kept[--count];
			return found;
		}
	for (;;) {
		struct fi_cq_tagged_entry entry = next_entry(cq, what);

		if (transmit == !(entry.flags & (FI_RECV | FI_REMOTE_WRITE)))
			return entry;
		IS(count < 4);
		kept[count++] = entry;
	}
}

static void counted(unsigned which, uint64_t value)
{
	static const char *const names[] = { "sent", "received", "written", "read", "remote" };
	struct fid_cntr *cntr = cntrs[which];
	double began = now();

	waiting_for = names[which];
	waits++;
	for (;;) {
		if (how == COUNTER) {
			int result = fi_cntr_wait(cntr, value, LIMIT_MS);

			if (result == -FI_ETIMEDOUT)
				lost(fi_cntr_read(cntr) >= value ? "the counter has not changed, although it has," : "the counter has not changed");
			if (result)
				die("fi_cntr_wait: %d", result);
			break;
		}
		if (fi_cntr_read(cntr) >= value)
			break;
		if (now() - began > LIMIT_MS / 1000.0 - 0.1)
			lost("the counter has not changed");
		/* the counters of the others change too: they have to be read, or fi_trywait returns */
		for (unsigned i = 0; how != POLL && i < COUNTERS; i++)
			(void)fi_cntr_read(cntrs[i]);
		sleep_now(&cntr->fid);
	}
	if (fi_cntr_read(cntr) != value)
		die("counter %s: %llu, expected %llu", names[which], (unsigned long long)fi_cntr_read(cntr), (unsigned long long)value);
	IS(fi_cntr_readerr(cntr) == 0);
}

/* ---- objects ---- */

static struct fid_cq *waited_queue(void)
{
	struct fi_cq_attr attr = { .format = FI_CQ_FORMAT_TAGGED, .wait_obj = how == COUNTER ? FI_WAIT_NONE : object, .size = 4096 };
	struct fid_cq *cq;
	int result = fi_cq_open(side.domain, &attr, &cq, NULL);

	if (result == -FI_ENOSYS || result == -FI_EOPNOTSUPP) {
		printf("no queues with this wait object\n");
		exit(NOT_OFFERED);
	}
	MUST(result);
	return cq;
}

static bool entries(void) { return how != COUNTER; }
static bool counting(void) { return how >= COUNTER && how != TWO; }

static void open_all(void)
{
	struct fi_info *info = NULL;
	uint64_t selective = how == COUNTER ? FI_SELECTIVE_COMPLETION : 0;

	wanted.caps = CAPS_ALL;
	wanted.threading = how == TWO ? FI_THREAD_SAFE : FI_THREAD_UNSPEC;
	needed.mr_mode = FI_MR_RMA_EVENT | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
	MUST(find_info(&info));
	open_domain_with(&side, info);
	side.tx = waited_queue();
	side.rx = how == ONE ? side.tx : waited_queue();
	for (unsigned i = 0; counting() && i < COUNTERS; i++) {
		struct fi_cntr_attr attr = { .events = FI_CNTR_EVENTS_COMP, .wait_obj = object };
		int result = fi_cntr_open(side.domain, &attr, &cntrs[i], NULL);

		if (result == -FI_ENOSYS || result == -FI_EOPNOTSUPP) {
			printf("no counters with this wait object\n");
			exit(NOT_OFFERED);
		}
		MUST(result);
	}
	fids[fid_count++] = &side.tx->fid;
	if (how != ONE)
		fids[fid_count++] = &side.rx->fid;
	for (unsigned i = 0; counting() && i < COUNTERS; i++)
		fids[fid_count++] = &cntrs[i]->fid;
	if (how == EPOLL || how == EDGE) {
		epoll_fd = epoll_create1(0);
		for (unsigned i = 0; i < fid_count; i++) {
			struct epoll_event event = { .events = EPOLLIN | (how == EDGE ? EPOLLET : 0), .data.u32 = i };

			MUST(fi_control(fids[i], FI_GETWAIT, &fds[i]));
			/* several objects may have one descriptor */
			if (epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fds[i], &event) && errno != EEXIST)
				die("epoll_ctl: %s", strerror(errno));
		}
	}
	memory = pages(AREA);
	out = pages(AREA);
	in = pages(AREA);
	for (unsigned i = 0; i < EPS; i++) {
		MUST(fi_endpoint(side.domain, side.info, &eps[i], NULL));
		MUST(fi_ep_bind(eps[i], &side.av->fid, 0));
		if (how == ONE) {
			MUST(fi_ep_bind(eps[i], &side.tx->fid, FI_TRANSMIT | FI_RECV));
		} else {
			MUST(fi_ep_bind(eps[i], &side.tx->fid, FI_TRANSMIT | selective));
			MUST(fi_ep_bind(eps[i], &side.rx->fid, FI_RECV | selective));
		}
		if (counting()) {
			MUST(fi_ep_bind(eps[i], &cntrs[SENT]->fid, FI_SEND));
			MUST(fi_ep_bind(eps[i], &cntrs[RECEIVED]->fid, FI_RECV));
			MUST(fi_ep_bind(eps[i], &cntrs[WRITTEN]->fid, FI_WRITE));
			MUST(fi_ep_bind(eps[i], &cntrs[READ]->fid, FI_READ));
			if (!(mr_mode(&side) & FI_MR_RMA_EVENT))
				MUST(fi_ep_bind(eps[i], &cntrs[REMOTE]->fid, FI_REMOTE_WRITE | FI_REMOTE_READ));
		}
		MUST(fi_enable(eps[i]));
		publish(eps[i], (int)(me * EPS + i));
	}
	MUST(fi_mr_reg(side.domain, memory, AREA, ALL_REMOTE, 0, 7, FI_RMA_EVENT, &region.mr, NULL));
	if (counting() && mr_mode(&side) & FI_MR_RMA_EVENT) {
		MUST(fi_mr_bind(region.mr, &cntrs[REMOTE]->fid, FI_REMOTE_WRITE | FI_REMOTE_READ));
		MUST(fi_mr_enable(region.mr));
	} else if (mr_mode(&side) & FI_MR_RMA_EVENT) {
		MUST(fi_mr_enable(region.mr));
	}
	region.bytes = memory, region.len = AREA;
	show(&side, &region, 0);
	meet(NULL);
	there = region_at(&side, 1 - me, 0);
	for (unsigned i = 0; i < EPS; i++)
		peers[i] = address(&side, (int)((1 - me) * EPS + i));
}

/* ---- operations ---- */

enum { SMALL, LONG, TAGGED_SMALL, INJECTED, DATA, INJECTED_DATA, WRITE_ONLY, READ_ONLY, ADD, FETCH, KINDS };

static uint64_t operand, result_word;

/* POST would poll, and poll away what has to wake */
#define NOW(call)                                                                                                    \
	do {                                                                                                         \
		long posted = (long)(call);                                                                          \
		if (posted)                                                                                          \
			die("operation %u: %s: %ld", round_now, #call, posted);                                      \
	} while (0)

/* The first post to a peer may be -FI_EAGAIN: poll then */
#define POST_OR_POLL(call) POST(&side, call)

static void active(unsigned kind, unsigned from, unsigned to, size_t len, uint64_t seed)
{
	struct fid_ep *ep = eps[from];
	fi_addr_t peer = peers[to];
	unsigned cntr = SENT;
	bool entry = true;

	paint(out, len, seed);
	operand = 1;
	switch (kind) {
	case SMALL:
	case LONG:
		POST_OR_POLL(fi_send(ep, out, len, NULL, peer, out));
		break;
	case TAGGED_SMALL:
		POST_OR_POLL(fi_tsend(ep, out, len, NULL, peer, 7, out));
		break;
	case INJECTED:
		POST_OR_POLL(fi_inject(ep, out, len, peer));
		entry = false;
		break;
	case DATA:
		POST_OR_POLL(fi_writedata(ep, out, len, NULL, seed, peer, there.addr, there.key, out));
		cntr = WRITTEN;
		break;
	case INJECTED_DATA:
		POST_OR_POLL(fi_inject_writedata(ep, out, len, seed, peer, there.addr, there.key));
		cntr = WRITTEN;
		entry = false;
		break;
	case WRITE_ONLY:
		POST_OR_POLL(fi_write(ep, out, len, NULL, peer, there.addr, there.key, out));
		cntr = WRITTEN;
		break;
	case READ_ONLY:
		POST_OR_POLL(fi_read(ep, in, len, NULL, peer, there.addr, there.key, out));
		cntr = READ;
		break;
	case ADD:
		POST_OR_POLL(fi_atomic(ep, &operand, 1, NULL, peer, there.addr + AREA - 64, there.key, FI_UINT64, FI_SUM, out));
		cntr = WRITTEN;
		break;
	default:
		POST_OR_POLL(fi_fetch_atomic(ep, &operand, 1, NULL, &result_word, NULL, peer, there.addr + AREA - 64, there.key, FI_UINT64, FI_SUM, out));
		cntr = READ;
		break;
	}
	counts[cntr]++;
	if (entry && entries()) {
		struct fi_cq_tagged_entry got = entry_of(side.tx, "a transmit entry");

		if (got.op_context != out || got.flags & (FI_RECV | FI_REMOTE_WRITE))
			die("operation %u of kind %u: an entry with context %p, flags %llx", round_now, kind, got.op_context, (unsigned long long)got.flags);
	}
	if (counting())
		counted(cntr, counts[cntr]);
}

static uint8_t receive_word;
static void *const receive_context = &receive_word;

static void passive(unsigned kind, size_t len, uint64_t seed)
{
	bool message = kind <= INJECTED, data = kind == DATA || kind == INJECTED_DATA;

	if ((message || data) && entries()) {
		struct fi_cq_tagged_entry got = entry_of(side.rx, "a receive entry");

		if (message && (got.op_context != receive_context || !(got.flags & FI_RECV) || got.len != len))
			die("operation %u of kind %u: an entry with context %p, flags %llx, length %zu", round_now, kind, got.op_context, (unsigned long long)got.flags, got.len);
		if (data && (!(got.flags & FI_REMOTE_CQ_DATA) || got.data != seed))
			die("operation %u of kind %u: an entry with flags %llx, data %llx", round_now, kind, (unsigned long long)got.flags, (unsigned long long)got.data);
	}
	if (counting()) {
		unsigned cntr = message ? RECEIVED : REMOTE;

		counts[cntr]++;
		counted(cntr, counts[cntr]);
	}
	if (message)
		PAINTED(in, len, seed);
	else if (data || (counting() && kind == WRITE_ONLY))
		PAINTED(memory, len, seed);
}

static void receive(unsigned kind, unsigned to, size_t len)
{
	if (kind == TAGGED_SMALL)
		POST_OR_POLL(fi_trecv(eps[to], in, len, NULL, FI_ADDR_UNSPEC, 7, 0, receive_context));
	else if (kind <= INJECTED)
		POST_OR_POLL(fi_recv(eps[to], in, len, NULL, FI_ADDR_UNSPEC, receive_context));
}

static void check(void)
{
	struct rusage used;
	double began;

	open_all();
	meet(NULL);
	began = now();
	for (unsigned i = 0; i < operations; i++) {
		/* the same numbers in both processes */
		random_state = 77777 + i;
		unsigned kind = pick(KINDS), from = pick(EPS), to = pick(EPS), delay = pick(8);
		size_t len = kind == LONG ? 20000 + pick(LONGEST - 20000) : 8 + pick(500);
		bool early = pick(2), begins = i % 2 == me;

		if (!counting() && (kind == WRITE_ONLY || kind == READ_ONLY || kind >= ADD))
			kind = kind == WRITE_ONLY ? DATA : SMALL; /* the other one would not know */
		if (kind == INJECTED || kind == INJECTED_DATA)
			len = 8 + len % 400;
		round_now = i, kind_now = kind;
		if (begins) {
			if (i % 1000 == 500 && pause_s)
				usleep(pause_s * 1000000);
			else if (delay < 3)
				usleep(delay * 70);
			if (delay == 7)
				sched_yield();
			active(kind, from, to, len, i + 1);
		} else {
			if (!early && delay < 5)
				usleep(delay * 40);
			receive(kind, to, len);
			passive(kind, len, i + 1);
		}
	}
	getrusage(RUSAGE_SELF, &used);
	printf("process %u: %u operations in %.1f s, %llu waits, %llu of them with poll or epoll, %.1f s of processor, %ld voluntary switches\n", me, operations, now() - began, (unsigned long long)waits, (unsigned long long)blocked,
	       (double)(used.ru_utime.tv_sec + used.ru_stime.tv_sec) + (double)(used.ru_utime.tv_usec + used.ru_stime.tv_usec) * 1e-6, used.ru_nvcsw);
	meet(&side);
	if (entries()) {
		must_be_empty(&side);
	}
	meet(&side);
	for (unsigned i = 0; i < EPS; i++)
		MUST(fi_close(&eps[i]->fid));
	close_region(&region);
	for (unsigned i = 0; counting() && i < COUNTERS; i++)
		MUST(fi_close(&cntrs[i]->fid));
	close_side(&side);
}

/* ---- two threads: one sends and waits for its sends, one waits for messages and answers ---- */

static _Atomic uint64_t answered;

static void *answering(void *unused)
{
	(void)unused;
	for (unsigned i = 0; i < operations; i++) {
		struct fi_cq_tagged_entry got = entry_of(side.rx, "a message (other thread)");

		IS(got.flags & FI_RECV && got.len == 8);
		IS(fi_recv(eps[0], in, 8, NULL, FI_ADDR_UNSPEC, receive_context) == 0);
		atomic_fetch_add(&answered, 1);
	}
	return NULL;
}

static void check_two(void)
{
	pthread_t thread;

	open_all();
	meet(NULL);
	for (unsigned i = 0; i < 64; i++)
		IS(fi_recv(eps[0], in, 8, NULL, FI_ADDR_UNSPEC, receive_context) == 0);
	meet(NULL);
	pthread_create(&thread, NULL, answering, NULL);
	for (unsigned i = 0; i < operations; i++) {
		ssize_t posted;

		round_now = i;
		while ((posted = fi_send(eps[0], out, 8, NULL, peers[0], out)) == -FI_EAGAIN)
			sched_yield();
		IS(posted == 0);
		IS(entry_of(side.tx, "a send").op_context == out);
		/* at most 32 ahead */
		double limit = now() + SECONDS;
		while (atomic_load(&answered) + 32 < i) {
			usleep(50);
			if (now() > limit)
				die("operation %u: the other thread has got %llu messages", i, (unsigned long long)atomic_load(&answered));
		}
		if (i % 1000 == 500)
			usleep(pause_s * 300000);
		else if (pick(3) == 0)
			usleep(pick(200));
	}
	pthread_join(thread, NULL);
	meet(&side);
	for (unsigned i = 0; i < EPS; i++)
		MUST(fi_close(&eps[i]->fid));
	close_region(&region);
	close_side(&side);
}

int main(int argc, char **argv)
{
	static const char *const objects[] = { "none", "unspec", "set", "fd", "mutex", "yield" };
	struct memory_mode modes[7];
	char *others_arguments[] = { argv[0], argv[1], argv[2], argv[3], NULL, NULL };

	if (argc < 5)
		die("usage: %s MODE PROV NODE unspec|fd|mutex|yield [auto|manual] [OPERATIONS] [SECONDS]", argv[0]);
	for (unsigned i = 0; i < 6; i++)
		if (!strcmp(argv[4], objects[i]))
			object = i;
	for (how = 0; how < TWO && strcmp(argv[1], hows[how]); how++)
		;
	if (argc > 5)
		others_arguments[4] = argv[5];
	if (argc > 6)
		operations = (unsigned)atoi(argv[6]);
	if (argc > 7)
		pause_s = (unsigned)atoi(argv[7]);
	for (unsigned i = 0; i < 7; i++)
		modes[i] = (struct memory_mode){ hows[i], i == TWO ? check_two : check, 2 };
	return run_memory_mode(modes, 7, argc > 5 ? 5 : 4, others_arguments);
}
