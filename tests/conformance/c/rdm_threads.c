/* Many threads of two processes on one endpoint each (FI_THREAD_SAFE), from fi_domain(3), fi_endpoint(3),
 * fi_msg(3), fi_rma(3), fi_atomic(3), fi_mr(3), fi_av(3), fi_cq(3) and fi_cntr(3).
 *
 *   rdm_threads polls PROV NODE    one thread reads both queues with fi_cq_read
 *   rdm_threads sleeps PROV NODE   two threads wait in fi_cq_sread
 *   rdm_threads several PROV NODE  four threads read both queues
 *
 * In each process four threads post messages, writes, reads and additions; one posts receives and cancels them;
 * one inserts and removes addresses; two register regions, have the other process write to them, and close them;
 * one opens and closes endpoints, queues, and counters; one waits for a counter. Each operation completes once,
 * contents and the order of messages are compared. The next argument is `auto` for FI_PROGRESS_AUTO, or `manual`;
 * the last one the number of milliseconds. Ends with 0, or says what went wrong. Plain libfabric 1.17. */
#define _GNU_SOURCE
#define SECONDS 30
#include "rdm_memory.h"

#include <pthread.h>

#define CAPS_ALL (FI_MSG | FI_TAGGED | FI_RMA | FI_ATOMIC)
#define ALL_REMOTE (FI_REMOTE_READ | FI_REMOTE_WRITE)
enum { POSTERS = 4, RECEIVES = 16, LONGEST = 40000, AREA = 1 << 20, SLICE = 65536, REGISTRARS = 2 };
enum { POLLS, SLEEPS, SEVERAL };

struct asked { /* a region to which the other process has to write */
	_Atomic uint64_t round, done;
	uint64_t addr, key, len;
};

static struct common {
	struct asked asked[2][REGISTRARS];
	_Atomic uint64_t sent[2][POSTERS], added[2];
	_Atomic int over[2], finished[2];
} *common;

struct operation {
	_Atomic int state; /* 0: free, 1: posted, 2: completed */
	uint64_t number;
	unsigned tag;
	struct fi_cq_tagged_entry entry;
	uint8_t *bytes;
};

static int how;
static struct side side;
static struct fid_cntr *sent_counter;
static uint8_t *memory;
static struct region region;
static struct shown there;
static unsigned milliseconds = 3000;
static _Atomic bool stop, stop_reading;
static struct operation receives[POSTERS][RECEIVES];
static uint64_t received[POSTERS];
static _Atomic uint64_t messages_posted, entries_read, rounds[16];

/* ---- completions ---- */

static void take_entry(struct fid_cq *cq, ssize_t got, struct fi_cq_tagged_entry *entry)
{
	struct fi_cq_err_entry error = { 0 };
	struct operation *op;
	int posted = 1;

	if (got == -FI_EAVAIL) {
		ssize_t result = fi_cq_readerr(cq, &error, 0);

		if (result == -FI_EAGAIN) /* another thread has got it */
			return;
		if (error.err != FI_ECANCELED)
			die("an operation in error: %s, flags %llx", fi_strerror(error.err), (unsigned long long)error.flags);
		memset(entry, 0, sizeof *entry);
		entry->op_context = error.op_context;
		entry->flags = 1ULL << 63; /* cancelled */
	}
	op = entry->op_context;
	op->entry = *entry;
	if (!atomic_compare_exchange_strong(&op->state, &posted, 2))
		die("an entry of an operation in state %d", posted);
	atomic_fetch_add(&entries_read, 1);
}

static void *read_queues(void *argument)
{
	struct fid_cq *queues[2] = { side.tx, side.rx };
	unsigned first_queue = argument ? 1 : 0, count = how == SLEEPS ? 1 : 2;

	while (!atomic_load(&stop_reading)) {
		bool none = true;

		for (unsigned i = 0; i < count; i++) {
			struct fid_cq *cq = queues[(first_queue + i) % 2];
			struct fi_cq_tagged_entry entry;
			ssize_t got = how == SLEEPS ? fi_cq_sread(cq, &entry, 1, NULL, 200) : fi_cq_read(cq, &entry, 1);

			if (got == -FI_EAGAIN || got == -FI_EINTR)
				continue;
			if (got != 1 && got != -FI_EAVAIL)
				die("a read: %zd", got);
			none = false;
			take_entry(cq, got, &entry);
		}
		if (none)
			sched_yield();
	}
	return NULL;
}

static void finished(struct operation *op)
{
	double limit = now() + SECONDS;

	for (unsigned i = 0; atomic_load(&op->state) != 2; i++) {
		usleep(20);
		if (i % 64 == 0 && now() > limit)
			die("operation %llu has not completed", (unsigned long long)op->number);
	}
	atomic_store(&op->state, 0);
}

/* Posts until it is not -FI_EAGAIN; the thread that reads makes progress. */
#define AGAIN(op, call)                                                                                              \
	do {                                                                                                         \
		double limit = now() + SECONDS;                                                                      \
		ssize_t posted;                                                                                      \
		IS(atomic_load(&(op)->state) == 0);                                                                  \
		atomic_store(&(op)->state, 1);                                                                       \
		while ((posted = (call)) == -FI_EAGAIN) {                                                            \
			sched_yield();                                                                               \
			if (now() > limit)                                                                           \
				die("line %d: %s: not possible", __LINE__, #call);                                   \
		}                                                                                                    \
		if (posted)                                                                                          \
			die("line %d: %s: %zd", __LINE__, #call, posted);                                            \
	} while (0)

static uint64_t next_random(uint64_t *state)
{
	*state = mixed(*state + 0x9e3779b97f4a7c15ULL);
	return *state;
}

/* ---- threads ---- */

static size_t message_length(unsigned tag, uint64_t number) { return 8 + mixed(number * 8 + tag) % (number % 7 ? 500 : LONGEST - 8); }

static void *post(void *argument)
{
	unsigned tag = (unsigned)(size_t)argument;
	struct operation ops[4] = { 0 }; /* two messages, a write or read, an addition */
	uint64_t state = tag + 10 * me, number = 0, operand = 1, result = 0, before = 0, adds = 0;
	uint8_t *out[2], *slice = pages(SLICE);
	uint64_t at = there.addr + tag * SLICE;
	bool wrote = false;

	for (unsigned i = 0; i < 2; i++)
		out[i] = pages(LONGEST);
	while (!atomic_load(&stop)) {
		for (unsigned i = 0; i < 2; i++) {
			size_t len = message_length(tag, number);

			if (atomic_load(&ops[i].state) == 1)
				finished(&ops[i]);
			atomic_store(&ops[i].state, 0);
			paint(out[i], len, number * 8 + tag);
			ops[i].number = number;
			AGAIN(&ops[i], fi_tsend(side.ep, out[i], len, NULL, side.peer, tag, &ops[i]));
			atomic_fetch_add(&messages_posted, 1);
			number++;
		}
		if (atomic_load(&ops[2].state) != 1) {
			if (atomic_load(&ops[2].state) == 2 && !wrote && rounds[tag])
				PAINTED(slice, SLICE, tag + 1000 * me + rounds[tag] - 1);
			atomic_store(&ops[2].state, 0);
			wrote = !wrote;
			if (wrote) {
				paint(slice, SLICE, tag + 1000 * me + rounds[tag]);
				AGAIN(&ops[2], fi_write(side.ep, slice, SLICE, NULL, side.peer, at, there.key, &ops[2]));
			} else {
				memset(slice, 0, SLICE);
				AGAIN(&ops[2], fi_read(side.ep, slice, SLICE, NULL, side.peer, at, there.key, &ops[2]));
				rounds[tag]++;
			}
		}
		if (atomic_load(&ops[3].state) != 1) {
			if (atomic_load(&ops[3].state) == 2) {
				if (adds > 1 && result <= before)
					die("additions of one thread: %llu after %llu", (unsigned long long)result, (unsigned long long)before);
				before = result;
			}
			atomic_store(&ops[3].state, 0);
			adds++;
			AGAIN(&ops[3], fi_fetch_atomic(side.ep, &operand, 1, NULL, &result, NULL, side.peer, there.addr + POSTERS * SLICE, there.key, FI_UINT64, FI_SUM, &ops[3]));
		}
		if (next_random(&state) % 16 == 0)
			usleep(next_random(&state) % 100);
	}
	for (unsigned i = 0; i < 4; i++)
		if (atomic_load(&ops[i].state))
			finished(&ops[i]);
	atomic_fetch_add(&common->added[me], adds);
	atomic_store(&common->sent[me][tag], number);
	return NULL;
}

static void post_receive(unsigned tag, unsigned i, uint64_t number)
{
	struct operation *op = &receives[tag][i];

	op->number = number;
	op->tag = tag;
	AGAIN(op, fi_trecv(side.ep, op->bytes, LONGEST, NULL, FI_ADDR_UNSPEC, tag, 0, op));
}

/* The n-th receive with a tag takes the n-th message with it. */
static void *receive(void *unused)
{
	uint64_t next[POSTERS] = { 0 }, cancelled = 0, state = 5;
	struct operation never = { 0 };
	double limit = 0;

	(void)unused;
	for (unsigned tag = 0; tag < POSTERS; tag++)
		for (unsigned i = 0; i < RECEIVES; i++)
			post_receive(tag, i, i);
	for (;;) {
		bool all = true, any = false;

		for (unsigned tag = 0; tag < POSTERS; tag++) {
			struct operation *op = &receives[tag][next[tag] % RECEIVES];

			while (atomic_load(&op->state) == 2) {
				if (op->entry.len != message_length(tag, next[tag]) || op->entry.tag != tag)
					die("message %llu of thread %u: length %zu, tag %llx", (unsigned long long)next[tag], tag, op->entry.len, (unsigned long long)op->entry.tag);
				PAINTED(op->bytes, op->entry.len, next[tag] * 8 + tag);
				atomic_store(&op->state, 0);
				post_receive(tag, (unsigned)(next[tag] % RECEIVES), next[tag] + RECEIVES);
				next[tag]++;
				any = true;
				op = &receives[tag][next[tag] % RECEIVES];
			}
			if (!atomic_load(&common->finished[1 - me]) || next[tag] < atomic_load(&common->sent[1 - me][tag]))
				all = false;
		}
		if (all)
			break;
		if (atomic_load(&common->finished[1 - me])) {
			if (limit == 0)
				limit = now() + SECONDS;
			if (now() > limit)
				for (unsigned tag = 0; tag < POSTERS; tag++)
					if (next[tag] < atomic_load(&common->sent[1 - me][tag]))
						die("%llu of %llu messages of thread %u", (unsigned long long)next[tag], (unsigned long long)atomic_load(&common->sent[1 - me][tag]), tag);
		}
		/* one that nothing matches */
		if (next_random(&state) % 32 == 0) {
			AGAIN(&never, fi_trecv(side.ep, memory, 8, NULL, FI_ADDR_UNSPEC, 999, 0, &never));
			RETURNS(fi_cancel(&side.ep->fid, &never), 0);
			finished(&never);
			IS(never.entry.flags == 1ULL << 63);
			cancelled++;
		}
		if (!any)
			usleep(20);
	}
	for (unsigned tag = 0; tag < POSTERS; tag++)
		received[tag] = next[tag];
	rounds[8] = cancelled;
	return NULL;
}

static void *addresses(void *unused)
{
	struct name own = name_of(side.ep), other = board->names[1 - me];
	uint64_t state = 9, count = 0;

	(void)unused;
	while (!atomic_load(&stop)) {
		fi_addr_t added[8];
		struct name found = { .len = sizeof found.bytes };
		unsigned n = 1 + (unsigned)(next_random(&state) % 8);
		uint8_t *many = malloc(n * other.len);

		for (unsigned i = 0; i < n; i++)
			memcpy(many + i * other.len, (next_random(&state) & 1 ? &own : &other)->bytes, other.len);
		RETURNS(fi_av_insert(side.av, many, n, added, 0, NULL), n);
		RETURNS(fi_av_lookup(side.av, added[n - 1], found.bytes, &found.len), 0);
		IS(found.len == other.len && !memcmp(found.bytes, many + (n - 1) * other.len, found.len));
		for (unsigned i = 0; i < n; i++)
			IS(added[i] != side.peer);
		RETURNS(fi_av_remove(side.av, added, n, 0), 0);
		free(many);
		count++;
		usleep(100);
	}
	rounds[9] = count;
	return NULL;
}

/* Registers a region, and has the other process write to it. */
static void *regions(void *argument)
{
	unsigned which = (unsigned)(size_t)argument;
	struct asked *own = &common->asked[me][which], *asked = &common->asked[1 - me][which];
	struct operation op = { 0 };
	uint8_t *bytes = pages(2 * SLICE), *out = pages(SLICE);
	uint64_t state = which + 20, count = 0, answered = 0;
	struct fid_mr *mr = NULL;

	/* the other process may still ask when this one has to stop */
	while (!atomic_load(&stop) || mr || !atomic_load(&common->over[1 - me])) {
		if (!mr && !atomic_load(&stop)) {
			size_t offset = next_random(&state) % SLICE, len = 1 + next_random(&state) % SLICE;
			struct fid_mr *others_mr[3];

			for (unsigned i = 0; i < 3; i++) /* overlapping ones */
				MUST(fi_mr_reg(side.domain, bytes + i * 4096, SLICE, ALL_REMOTE, 0, 1000 + 100 * which + i, 0, &others_mr[i], NULL));
			MUST(fi_mr_reg(side.domain, bytes + offset, len, FI_REMOTE_WRITE, 0, 2000 + which, 0, &mr, NULL));
			for (unsigned i = 0; i < 3; i++)
				MUST(fi_close(&others_mr[i]->fid));
			memset(bytes, 0, 2 * SLICE);
			own->addr = mr_mode(&side) & FI_MR_VIRT_ADDR ? (uint64_t)(uintptr_t)(bytes + offset) : 0;
			own->key = fi_mr_key(mr);
			own->len = len;
			atomic_fetch_add(&own->round, 1);
			count++;
			rounds[12 + which] = offset;
		}
		if (mr && atomic_load(&own->done) == atomic_load(&own->round)) {
			PAINTED(bytes + rounds[12 + which], own->len, count);
			MUST(fi_close(&mr->fid));
			mr = NULL;
		}
		if (atomic_load(&asked->round) != answered) {
			answered++;
			IS(atomic_load(&asked->round) == answered);
			paint(out, asked->len, answered);
			AGAIN(&op, fi_write(side.ep, out, asked->len, NULL, side.peer, asked->addr, asked->key, &op));
			finished(&op);
			atomic_store(&asked->done, answered);
		}
		usleep(30);
	}
	rounds[10 + which] = count;
	return NULL;
}

static void *objects(void *unused)
{
	uint64_t count = 0;

	(void)unused;
	while (!atomic_load(&stop)) {
		struct fid_cq *cq = queue(&side, 64);
		struct fid_cntr *cntr = counter(&side);
		struct fid_ep *ep, *alias = NULL;
		struct name name;

		MUST(fi_endpoint(side.domain, side.info, &ep, NULL));
		MUST(fi_ep_bind(ep, &side.av->fid, 0));
		MUST(fi_ep_bind(ep, &cq->fid, FI_TRANSMIT | FI_RECV));
		MUST(fi_ep_bind(ep, &cntr->fid, FI_SEND));
		MUST(fi_enable(ep));
		name = name_of(ep);
		IS(name.len && fi_inject(ep, &count, 8, FI_ADDR_UNSPEC) != 0);
		MUST(fi_ep_alias(ep, &alias, FI_TRANSMIT | FI_COMPLETION));
		RETURNS(fi_close(&cq->fid), -FI_EBUSY);
		RETURNS(fi_close(&cntr->fid), -FI_EBUSY);
		MUST(fi_close(&alias->fid));
		MUST(fi_close(&ep->fid));
		MUST(fi_close(&cq->fid));
		MUST(fi_close(&cntr->fid));
		count++;
		usleep(500);
	}
	rounds[14] = count;
	return NULL;
}

static void *waits(void *unused)
{
	uint64_t count = 0;

	(void)unused;
	while (!atomic_load(&stop)) {
		uint64_t value = fi_cntr_read(sent_counter);
		int result = fi_cntr_wait(sent_counter, value + 10, 100);

		if (result != 0 && result != -FI_ETIMEDOUT)
			die("fi_cntr_wait: %d", result);
		if (result == 0)
			IS(fi_cntr_read(sent_counter) >= value + 10);
		count++;
	}
	rounds[15] = count;
	return NULL;
}

static void check(void)
{
	pthread_t readers[4], posters[POSTERS], registrars[REGISTRARS], receiver, one, two, three;
	unsigned reader_count = how == POLLS ? 1 : how == SLEEPS ? 2 : 4;
	struct fi_info *info = NULL;
	uint64_t sum, all = 0;

	wanted.caps = CAPS_ALL;
	wanted.threading = FI_THREAD_SAFE;
	wanted.wait = FI_WAIT_UNSPEC;
	needed.op_flags = FI_DELIVERY_COMPLETE;
	MUST(find_info(&info));
	IS(info->domain_attr->threading == FI_THREAD_SAFE);
	open_domain_with(&side, info);
	side.tx = queue(&side, 0);
	side.rx = queue(&side, 0);
	sent_counter = counter(&side);
	MUST(fi_endpoint(side.domain, side.info, &side.ep, NULL));
	MUST(fi_ep_bind(side.ep, &side.av->fid, 0));
	MUST(fi_ep_bind(side.ep, &side.tx->fid, FI_TRANSMIT));
	MUST(fi_ep_bind(side.ep, &side.rx->fid, FI_RECV));
	MUST(fi_ep_bind(side.ep, &sent_counter->fid, FI_SEND));
	MUST(fi_enable(side.ep));
	publish(side.ep, (int)me);
	memory = pages(AREA);
	region = region_of(&side, memory, AREA, ALL_REMOTE, 7);
	show(&side, &region, 0);
	meet(&side);
	side.peer = address(&side, 1 - (int)me);
	there = region_at(&side, 1 - me, 0);
	for (unsigned t = 0; t < POSTERS; t++)
		for (unsigned i = 0; i < RECEIVES; i++)
			receives[t][i].bytes = pages(LONGEST);
	for (unsigned i = 0; i < reader_count; i++)
		IS(pthread_create(&readers[i], NULL, read_queues, (void *)(size_t)(i % 2)) == 0);
	IS(pthread_create(&receiver, NULL, receive, NULL) == 0);
	for (unsigned i = 0; i < POSTERS; i++)
		IS(pthread_create(&posters[i], NULL, post, (void *)(size_t)i) == 0);
	for (unsigned i = 0; i < REGISTRARS; i++)
		IS(pthread_create(&registrars[i], NULL, regions, (void *)(size_t)i) == 0);
	IS(pthread_create(&one, NULL, addresses, NULL) == 0);
	IS(pthread_create(&two, NULL, objects, NULL) == 0);
	IS(pthread_create(&three, NULL, waits, NULL) == 0);
	usleep(milliseconds * 1000);
	atomic_store(&stop, true);
	for (unsigned i = 0; i < POSTERS; i++)
		pthread_join(posters[i], NULL);
	atomic_store(&common->finished[me], 1);
	/* this process asks for no more writes when each of its regions has been written to */
	double limit = now() + SECONDS;
	for (unsigned i = 0; i < REGISTRARS; i++)
		while (atomic_load(&common->asked[me][i].done) != atomic_load(&common->asked[me][i].round)) {
			usleep(100);
			if (now() > limit)
				die("the other process has not written to a region");
		}
	usleep(200000);
	for (unsigned i = 0; i < REGISTRARS; i++)
		IS(atomic_load(&common->asked[me][i].done) == atomic_load(&common->asked[me][i].round));
	atomic_store(&common->over[me], 1);
	for (unsigned i = 0; i < REGISTRARS; i++)
		pthread_join(registrars[i], NULL);
	pthread_join(receiver, NULL);
	pthread_join(one, NULL);
	pthread_join(two, NULL);
	pthread_join(three, NULL);
	meet(NULL);
	/* all receives that are left are cancelled */
	for (unsigned t = 0; t < POSTERS; t++)
		for (unsigned i = 0; i < RECEIVES; i++) {
			RETURNS(fi_cancel(&side.ep->fid, &receives[t][i]), 0);
			finished(&receives[t][i]);
		}
	atomic_store(&stop_reading, true);
	for (unsigned i = 0; i < reader_count; i++)
		pthread_join(readers[i], NULL);
	meet(NULL);
	memcpy(&sum, memory + POSTERS * SLICE, 8);
	if (sum != atomic_load(&common->added[1 - me]))
		die("%llu additions, and the sum is %llu", (unsigned long long)atomic_load(&common->added[1 - me]), (unsigned long long)sum);
	for (unsigned t = 0; t < POSTERS; t++) {
		IS(received[t] == atomic_load(&common->sent[1 - me][t]));
		all += received[t];
	}
	must_be_empty(&side);
	IS(fi_cntr_read(sent_counter) == atomic_load(&messages_posted));
	IS(fi_cntr_readerr(sent_counter) == 0);
	printf("process %u: %llu messages received, %llu additions, %llu cancelled, %llu address rounds, %llu regions, %llu endpoints, %llu waits\n", me, (unsigned long long)all, (unsigned long long)sum, (unsigned long long)rounds[8], (unsigned long long)rounds[9],
	       (unsigned long long)(rounds[10] + rounds[11]), (unsigned long long)rounds[14], (unsigned long long)rounds[15]);
	meet(&side);
	MUST(fi_close(&side.ep->fid));
	side.ep = NULL;
	close_region(&region);
	MUST(fi_close(&sent_counter->fid));
	close_side(&side);
}

int main(int argc, char **argv)
{
	static const struct memory_mode modes[] = { { "polls", check, 2 }, { "sleeps", check, 2 }, { "several", check, 2 } };

	if (argc > 1)
		how = !strcmp(argv[1], "sleeps") ? SLEEPS : !strcmp(argv[1], "several") ? SEVERAL : POLLS;
	if (argc > 5)
		milliseconds = (unsigned)atoi(argv[5]);
	common = mmap(NULL, sizeof *common, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	return run_memory_mode(modes, 3, argc, argv);
}
