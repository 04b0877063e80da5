/* Lists of operations with FI_MORE on few addresses, from fi_endpoint(3), fi_msg(3), fi_tagged(3),
 * fi_rma(3), fi_atomic(3), fi_cq(3) and fi_cntr(3). Each process computes what each of its
 * operations has to find and leave, from the order of its posts, msg_order and its fences.
 *
 *   rdm_lists silent PROV NODE     RMA and atomics at two processes that make no call
 *   rdm_lists busy PROV NODE       the same, with messages and remote CQ data, between three processes
 *   rdm_lists selective PROV NODE  as `busy`, with FI_SELECTIVE_COMPLETION
 *
 * The operations of a list are chosen at random: all but the last one have FI_MORE, any may have
 * FI_FENCE, FI_INJECT and a completion level, up to 4 local buffers and 4 remote ranges. The next
 * argument is `auto` for FI_PROGRESS_AUTO, or `manual`; a last one the number of rounds and a last
 * one the seed. Ends with 0, or says what went wrong. Plain libfabric 1.17. */
#include "rdm_processes.h"

#include <rdma/fi_atomic.h>
#include <rdma/fi_rma.h>

enum { PROCESSES = 3, CELLS = 3, CELL = 1 << 14, AREA = CELLS * CELL, MOST = 48, RECEIVES = 64, ELEMENTS = 16 };
enum { ENDED = WORDS - 1, READY = WORDS - 2, SENT = 0, TOLD = 10, ADDRS = 20, KEYS = 30 };

enum { WRITE, INJECT_WRITE, WRITEDATA, READ, ATOMIC, FETCH, COMPARE, SEND, TSEND, KINDS };
enum { NOTHING, RMA_READ = 1, RMA_WRITE = 2, ATOMIC_ANY = 4 };

struct op {
	int kind, peer;
	uint64_t flags;
	unsigned locals, remotes;
	size_t at, len; /* in the peer's area */
	uint64_t stamp; /* of a write that begins its cell, else 0 */
	uint8_t *buf, *want; /* CELL bytes each; `want` what a read or fetch returns */
	uint64_t operand[ELEMENTS], compare[ELEMENTS], result[ELEMENTS];
	enum fi_op atomic;
	bool awaited, done;
};

static uint8_t *memory; /* of all processes, an area for each other one: shared by them */
static bool talks, selective;
static uint64_t rounds = 60, random_state = 1;

static struct side side;
static struct fid_cntr *written, *was_read;
static int me;
static fi_addr_t addr[PROCESSES];
static struct op ops[MOST];
static uint8_t shadow[PROCESSES][AREA];
static int since_fence[PROCESSES];
static uint64_t stamps[PROCESSES][CELLS], next_stamp = 1;
static unsigned posted; /* operations of this round */
static uint64_t n_written, n_read, n_sent;
/* messages by the peer and by whether they are tagged */
static uint64_t messages_to[PROCESSES][2], messages_from[PROCESSES][2], posted_from[PROCESSES][2];
static uint64_t data_to[PROCESSES], data_from[PROCESSES];
static struct receive {
	uint8_t bytes[CELL];
	uint64_t number;
	int from, tagged;
} receives[PROCESSES][RECEIVES];

static uint64_t any(uint64_t below)
{
	random_state += 0x9e3779b97f4a7c15ULL;
	return mixed(random_state) % below;
}

static uint8_t *area(int of, int by) { return memory + (size_t)(of * PROCESSES + by) * AREA; }
static bool is_atomic(const struct op *op) { return op->kind == ATOMIC || op->kind == FETCH || op->kind == COMPARE; }
static bool is_message(const struct op *op) { return op->kind == SEND || op->kind == TSEND; }
static bool is_write(const struct op *op) { return op->kind == WRITE || op->kind == INJECT_WRITE || op->kind == WRITEDATA; }

static uint64_t word_at(const uint8_t *bytes)
{
	uint64_t word;

	memcpy(&word, bytes, 8);
	return word;
}

/* ---- the model ---- */

/* Whether the order of this operation behind those since the last fence is not that of the posts. */
static bool needs_fence(const struct op *op, int before)
{
	if (is_message(op))
		return false; /* FI_ORDER_SAW and FI_ORDER_SAS; a message does not touch what a read returns */
	if (is_atomic(op))
		return (before & (RMA_READ | RMA_WRITE)) != 0;
	if (before & ATOMIC_ANY)
		return true;
	return op->kind != READ && (before & RMA_READ); /* FI_ORDER_WAR is not offered */
}

static void model(struct op *op)
{
	uint8_t *there = shadow[op->peer] + op->at;
	int *before = &since_fence[op->peer];

	if (needs_fence(op, *before))
		op->flags |= FI_FENCE;
	if (op->flags & FI_FENCE)
		*before = NOTHING;
	if (is_write(op)) {
		memcpy(there, op->buf, op->len);
		*before |= RMA_WRITE;
	} else if (op->kind == READ) {
		memcpy(op->want, there, op->len);
		*before |= RMA_READ;
	} else if (is_atomic(op)) {
		*before |= ATOMIC_ANY;
		memcpy(op->want, there, op->len);
		for (size_t i = 0; i < op->len / 8; i++) {
			uint64_t old = word_at(there + 8 * i), new = old;

			if (op->kind == COMPARE)
				new = old == op->compare[i] ? op->operand[i] : old;
			else if (op->atomic == FI_SUM)
				new = old + op->operand[i];
			else if (op->atomic == FI_BXOR)
				new = old ^ op->operand[i];
			else if (op->atomic == FI_ATOMIC_WRITE)
				new = op->operand[i];
			memcpy(there + 8 * i, &new, 8);
		}
	}
}

static void choose(struct op *op, int peer, size_t cell)
{
	static const size_t lengths[] = { 8, 8, 16, 64, 100, 1000, 4096, 4097, CELL };
	static const uint64_t levels[] = { 0, 0, FI_INJECT_COMPLETE, FI_TRANSMIT_COMPLETE, FI_DELIVERY_COMPLETE, FI_DELIVERY_COMPLETE };
	size_t inject = side.info->tx_attr->inject_size;
	uint8_t *buf = op->buf, *want = op->want;

	memset(op, 0, sizeof *op);
	op->buf = buf;
	op->want = want;
	op->peer = peer;
	do
		op->kind = (int)any(KINDS);
	while (!talks && (op->kind >= SEND || op->kind == WRITEDATA));
	op->at = cell * CELL;
	op->flags = levels[any(sizeof levels / sizeof *levels)];
	if (any(8) == 0)
		op->flags |= FI_FENCE;
	op->locals = any(3) ? 1 : 1 + (unsigned)any(4);
	op->remotes = any(3) ? 1 : 1 + (unsigned)any(4);
	if (is_atomic(op)) {
		static const enum fi_op atomics[] = { FI_SUM, FI_BXOR, FI_ATOMIC_WRITE };

		op->at += 8 + 8 * any(20);
		op->len = 8 * (any(2) ? 1 : 1 + any(ELEMENTS));
		op->atomic = op->kind == COMPARE ? FI_CSWAP : atomics[any(3)];
		for (size_t i = 0; i < ELEMENTS; i++) {
			op->operand[i] = any(1000);
			/* of half of the elements: the value that is there */
			op->compare[i] = any(2) ? word_at(shadow[peer] + op->at + 8 * i) : any(1000);
		}
	} else {
		op->len = lengths[any(sizeof lengths / sizeof *lengths)];
		fill(op->buf, op->len, any(1ULL << 40));
		if (any(2) && op->len < CELL / 2 && !is_message(op) && op->kind != WRITEDATA)
			op->at += 8 + any(200);
	}
	if (op->kind != READ && op->len <= inject && any(3) == 0)
		op->flags |= FI_INJECT;
	if (op->kind == INJECT_WRITE) {
		op->len = op->len < inject ? op->len : inject;
		op->locals = op->remotes = 1;
		op->flags = 0;
		/* this call has no flags */
		if (needs_fence(op, since_fence[peer]))
			op->kind = WRITE;
	}
	if (op->len < op->locals * 8)
		op->locals = 1;
	if (op->len < op->remotes * 8)
		op->remotes = 1;
	if (op->kind != INJECT_WRITE && any(3))
		op->flags |= FI_COMPLETION;
	if (is_write(op) && op->at % CELL == 0) {
		op->stamp = next_stamp++;
		memcpy(op->buf, &op->stamp, 8);
		stamps[peer][cell] = op->stamp;
	}
	if (is_message(op)) {
		uint64_t head[4] = { (uint64_t)me, messages_to[peer][op->kind == TSEND]++, cell, stamps[peer][cell] };

		if (op->len < 40)
			op->len = 40;
		fill(op->buf, op->len, head[1] * PROCESSES + (uint64_t)me);
		memcpy(op->buf, head, sizeof head);
		op->remotes = 1;
	}
	op->awaited = op->kind != INJECT_WRITE && (!selective || op->flags & FI_COMPLETION);
	model(op);
}

/* ---- posts ---- */

/* Where part i of `count` begins: multiples of 8, and the length at the end. */
static size_t begin_of(size_t len, unsigned count, unsigned i) { return i == count ? len : len * i / count / 8 * 8; }

static ssize_t post(struct op *op, uint64_t more)
{
	struct iovec iov[4];
	struct fi_rma_iov rma[4];
	struct fi_ioc ioc[4], compare[4], result[4];
	struct fi_rma_ioc rma_ioc[4];
	uint64_t base = told(ADDRS + op->peer) + (uint64_t)me * AREA + op->at, key = told(KEYS + op->peer);
	uint64_t flags = op->flags | more;

	for (unsigned i = 0; i < op->locals; i++) {
		size_t from = begin_of(op->len, op->locals, i), to = begin_of(op->len, op->locals, i + 1);

		iov[i] = (struct iovec){ op->buf + from, to - from };
		ioc[i] = (struct fi_ioc){ op->operand + from / 8, (to - from) / 8 };
		compare[i] = (struct fi_ioc){ op->compare + from / 8, (to - from) / 8 };
		result[i] = (struct fi_ioc){ op->result + from / 8, (to - from) / 8 };
	}
	for (unsigned i = 0; i < op->remotes; i++) {
		size_t from = begin_of(op->len, op->remotes, i), to = begin_of(op->len, op->remotes, i + 1);

		rma[i] = (struct fi_rma_iov){ base + from, to - from, key };
		rma_ioc[i] = (struct fi_rma_ioc){ base + from, (to - from) / 8, key };
	}
	struct fi_msg_rma msg = { .msg_iov = iov, .iov_count = op->locals, .addr = addr[op->peer], .rma_iov = rma, .rma_iov_count = op->remotes, .context = op, .data = (uint64_t)me << 56 | (op->at / CELL) << 48 | op->stamp };
	struct fi_msg_atomic at = { .msg_iov = ioc, .iov_count = op->locals, .addr = addr[op->peer], .rma_iov = rma_ioc, .rma_iov_count = op->remotes, .datatype = FI_UINT64, .op = op->atomic, .context = op };
	struct fi_msg send = { .msg_iov = iov, .iov_count = op->locals, .addr = addr[op->peer], .context = op };
	struct fi_msg_tagged tsend = { .msg_iov = iov, .iov_count = op->locals, .addr = addr[op->peer], .tag = 5, .context = op };

	switch (op->kind) {
	case WRITE:
		return fi_writemsg(side.ep, &msg, flags);
	case INJECT_WRITE:
		return fi_inject_write(side.ep, op->buf, op->len, addr[op->peer], base, key);
	case WRITEDATA:
		return fi_writemsg(side.ep, &msg, flags | FI_REMOTE_CQ_DATA);
	case READ:
		return fi_readmsg(side.ep, &msg, flags);
	case ATOMIC:
		return fi_atomicmsg(side.ep, &at, flags);
	case FETCH:
		return fi_fetch_atomicmsg(side.ep, &at, result, NULL, op->locals, flags);
	case COMPARE:
		return fi_compare_atomicmsg(side.ep, &at, compare, NULL, op->locals, result, NULL, op->locals, flags);
	case SEND:
		return fi_sendmsg(side.ep, &send, flags);
	default:
		return fi_tsendmsg(side.ep, &tsend, flags);
	}
}

static const char *names[] = { "write", "inject_write", "writedata", "read", "atomic", "fetch", "compare", "send", "tsend" };

static void wrong(const struct op *op, const char *what)
{
	for (const struct op *each = ops; each < ops + posted; each++)
		fprintf(stderr, "  %zd %s to %d at %zu length %zu parts %u %u flags %llx stamp %llu\n", each - ops, names[each->kind], each->peer, each->at, each->len, each->locals, each->remotes, (unsigned long long)each->flags, (unsigned long long)each->stamp);
	die("process %d, operation %zd, %s: %s", me, op - ops, names[op->kind], what);
}

static void check_result(const struct op *op)
{
	if (op->kind == READ && memcmp(op->buf, op->want, op->len))
		wrong(op, "the read has returned other bytes");
	for (size_t i = 0; (op->kind == FETCH || op->kind == COMPARE) && i < op->len / 8; i++)
		if (op->result[i] != word_at(op->want + 8 * i)) {
			fprintf(stderr, "element %zu of atomic %d: %llx instead of %llx, operand %llx, there %llx shadow %llx\n", i, (int)op->atomic, (unsigned long long)op->result[i], (unsigned long long)word_at(op->want + 8 * i), (unsigned long long)op->operand[i], (unsigned long long)word_at(area(op->peer, me) + op->at + 8 * i), (unsigned long long)word_at(shadow[op->peer] + op->at + 8 * i));
			wrong(op, "the atomic has returned another value");
		}
}

/* ---- completions ---- */

static void post_receive(int from, struct receive *it, int tagged)
{
	it->number = posted_from[from][tagged]++;
	it->from = from;
	it->tagged = tagged;
	if (tagged)
		POST(&side, fi_trecv(side.ep, it->bytes, CELL, NULL, addr[from], 5, 0, it));
	else
		POST(&side, fi_recv(side.ep, it->bytes, CELL, NULL, addr[from], it));
}

/* Behind a message or data, the peer's earlier writes are there. */
static void must_have(int from, uint64_t cell, uint64_t stamp)
{
	uint64_t there = *(volatile uint64_t *)(area(me, from) + cell * CELL);

	if (there < stamp)
		die("process %d: stamp %llu of process %d has been announced, %llu is there", me, (unsigned long long)stamp, from, (unsigned long long)there);
}

static void take_sent(void)
{
	static const uint64_t flags[] = {
		FI_RMA | FI_WRITE, 0, FI_RMA | FI_WRITE, FI_RMA | FI_READ, FI_ATOMIC | FI_WRITE, FI_ATOMIC | FI_READ, FI_ATOMIC | FI_READ, FI_MSG | FI_SEND, FI_TAGGED | FI_SEND,
	};
	struct fi_cq_tagged_entry entries[8];
	size_t got = take(side.tx, entries, 8);

	for (size_t i = 0; i < got; i++) {
		struct op *op = entries[i].op_context;

		IS(op >= ops && op < ops + MOST);
		if (!op->awaited || op->done)
			wrong(op, op->done ? "a second entry" : "an entry without FI_COMPLETION");
		if ((entries[i].flags & (FI_RMA | FI_ATOMIC | FI_MSG | FI_TAGGED | FI_READ | FI_WRITE | FI_SEND | FI_RECV)) != flags[op->kind])
			wrong(op, "flags of the entry");
		op->done = true;
		check_result(op);
		if (op->stamp && op->flags & FI_DELIVERY_COMPLETE && *(volatile uint64_t *)(area(op->peer, me) + op->at) < op->stamp)
			wrong(op, "delivered, but not there");
	}
}

static void take_received(void)
{
	struct fi_cq_tagged_entry entries[8];
	size_t got = take(side.rx, entries, 8);

	for (size_t i = 0; i < got; i++) {
		if (entries[i].flags & FI_REMOTE_CQ_DATA) {
			uint64_t data = entries[i].data;
			/* the sender is not in the entry: its number is in the data */
			int from = (int)(data >> 56);

			IS(entries[i].flags & FI_REMOTE_WRITE && entries[i].flags & FI_RMA && from < PROCESSES && from != me);
			data_from[from]++;
			must_have(from, data >> 48 & 0xff, data & 0xffffffffffffULL);
			continue;
		}
		struct receive *it = entries[i].op_context;
		uint64_t head[4];
		uint8_t *copy = malloc(CELL);

		IS(entries[i].flags & FI_RECV && entries[i].len >= 40 && entries[i].len <= CELL);
		memcpy(head, it->bytes, sizeof head);
		/* receives of one kind match in the order of their posts, and so do messages */
		IS((int)head[0] == it->from && head[1] == it->number && !!(entries[i].flags & FI_TAGGED) == it->tagged);
		fill(copy, entries[i].len, head[1] * PROCESSES + head[0]);
		IS(!memcmp(copy + sizeof head, it->bytes + sizeof head, entries[i].len - sizeof head));
		free(copy);
		messages_from[it->from][it->tagged]++;
		must_have(it->from, head[2], head[3]);
		post_receive(it->from, it, it->tagged);
	}
}

static void step(void)
{
	take_sent();
	if (talks)
		take_received();
}

static bool counted(void) { return fi_cntr_read(written) >= n_written && fi_cntr_read(was_read) >= n_read && fi_cntr_read(side.sent) >= n_sent; }

/* Until all operations of the round have completed: exactly those that have to. */
static void drain(void)
{
	UNTIL(counted(), step());
	for (unsigned i = 0; i < posted; i++)
		if (ops[i].awaited)
			UNTIL_WITHIN(10, ops[i].done, step());
	for (unsigned i = 0; i < 3; i++)
		step();
	IS(fi_cntr_read(written) == n_written && fi_cntr_read(was_read) == n_read && fi_cntr_read(side.sent) == n_sent);
	IS(fi_cntr_readerr(written) == 0 && fi_cntr_readerr(was_read) == 0 && fi_cntr_readerr(side.sent) == 0);
	for (unsigned i = 0; i < posted; i++)
		check_result(&ops[i]);
	for (int peer = 0; peer < PROCESSES; peer++)
		if (peer != me) {
			double limit = now() + 10;

			while (memcmp(area(peer, me), shadow[peer], AREA)) {
				step();
				if (now() > limit) {
					size_t byte = 0;

					while (area(peer, me)[byte] == shadow[peer][byte])
						byte++;
					fprintf(stderr, "memory of %d differs from byte %zu on\n", peer, byte);
					wrong(&ops[posted - 1], "all completed, but the memory is another");
				}
			}
			since_fence[peer] = NOTHING;
		}
}

static void post_list(void)
{
	unsigned len = 1 + (unsigned)any(8);
	int peer = (me + 1 + (int)any(PROCESSES - 1)) % PROCESSES;
	size_t cell = any(CELLS);

	for (unsigned n = 0; n < len && posted < MOST; n++) {
		struct op *op = &ops[posted++];
		uint64_t more = n + 1 < len && posted < MOST ? FI_MORE : 0;
		double limit = now() + SECONDS;
		long result;

		if (any(6) == 0)
			peer = (me + 1 + (int)any(PROCESSES - 1)) % PROCESSES;
		choose(op, peer, cell);
		while ((result = post(op, more)) == -FI_EAGAIN) {
			step();
			if (now() > limit)
				wrong(op, "not possible to post");
		}
		if (result)
			wrong(op, fi_strerror((int)-result));
		if (op->flags & FI_INJECT || op->kind == INJECT_WRITE) {
			memset(op->buf, 0xdd, CELL);
			memset(op->operand, 0xdd, sizeof op->operand);
			memset(op->compare, 0xdd, sizeof op->compare);
		}
		if (is_message(op))
			n_sent++;
		else if (is_write(op) || op->kind == ATOMIC)
			n_written++;
		else
			n_read++;
		data_to[op->peer] += op->kind == WRITEDATA;
	}
}

/* ---- processes ---- */

static struct fid_mr *open_all(void)
{
	struct fid_mr *mr;

	wanted.caps = FI_MSG | FI_TAGGED | FI_RMA | FI_ATOMIC | FI_FENCE | FI_DIRECTED_RECV;
	wanted.wait = FI_WAIT_NONE;
	open_domain_of(&side);
	IS((side.info->tx_attr->msg_order & (FI_ORDER_SAW | FI_ORDER_SAS | FI_ORDER_RMA_RAW | FI_ORDER_RMA_WAW)) == (FI_ORDER_SAW | FI_ORDER_SAS | FI_ORDER_RMA_RAW | FI_ORDER_RMA_WAW));
	IS((side.info->tx_attr->msg_order & (FI_ORDER_ATOMIC_RAW | FI_ORDER_ATOMIC_WAR | FI_ORDER_ATOMIC_WAW)) == (FI_ORDER_ATOMIC_RAW | FI_ORDER_ATOMIC_WAR | FI_ORDER_ATOMIC_WAW));
	IS(side.info->ep_attr->max_order_waw_size >= CELL && side.info->ep_attr->max_order_raw_size >= CELL && side.info->ep_attr->max_order_war_size >= 8 * ELEMENTS);
	side.tx = queue(&side, 0);
	side.rx = queue(&side, 0);
	side.sent = counter(&side);
	written = counter(&side);
	was_read = counter(&side);
	MUST(fi_mr_reg(side.domain, area(me, 0), (size_t)PROCESSES * AREA, FI_REMOTE_READ | FI_REMOTE_WRITE, 0, 9, 0, &mr, NULL));
	MUST(fi_endpoint(side.domain, side.info, &side.ep, NULL));
	MUST(fi_ep_bind(side.ep, &side.av->fid, 0));
	MUST(fi_ep_bind(side.ep, &side.tx->fid, FI_TRANSMIT | (selective ? FI_SELECTIVE_COMPLETION : 0)));
	MUST(fi_ep_bind(side.ep, &side.rx->fid, FI_RECV));
	MUST(fi_ep_bind(side.ep, &side.sent->fid, FI_SEND));
	MUST(fi_ep_bind(side.ep, &written->fid, FI_WRITE));
	MUST(fi_ep_bind(side.ep, &was_read->fid, FI_READ));
	MUST(fi_enable(side.ep));
	put(ADDRS + me, side.info->domain_attr->mr_mode & FI_MR_VIRT_ADDR ? (uintptr_t)area(me, 0) : 0);
	put(KEYS + me, fi_mr_key(mr));
	publish(side.ep, me);
	return mr;
}

static void close_all(struct fid_mr *mr)
{
	MUST(fi_close(&side.ep->fid));
	side.ep = NULL;
	MUST(fi_close(&written->fid));
	MUST(fi_close(&was_read->fid));
	MUST(fi_close(&mr->fid));
	close_side(&side);
}

static void process(int number)
{
	struct fid_mr *mr;

	me = number;
	random_state = mixed(random_state * PROCESSES + (uint64_t)me);
	mr = open_all();
	for (int peer = 0; peer < PROCESSES; peer++) {
		if (peer == me)
			continue;
		addr[peer] = address(&side, peer);
		for (int i = 0; talks && i < RECEIVES; i++)
			post_receive(peer, &receives[peer][i], i % 2);
	}
	for (int i = 0; i < MOST; i++) {
		ops[i].buf = malloc(CELL);
		ops[i].want = malloc(CELL);
	}
	add(READY);
	UNTIL(told(READY) == PROCESSES, pause_ms(1));
	for (uint64_t round = 0; (talks || me == 0) && round < rounds; round++) {
		unsigned most = 1 + (unsigned)any(MOST);

		posted = 0;
		while (posted < most)
			post_list();
		drain();
		if (any(20) == 0)
			pause_ms(3); /* the connection is idle */
	}
	for (int peer = 0; talks && peer < PROCESSES; peer++)
		if (peer != me) {
			put(SENT + me * PROCESSES + peer, messages_to[peer][0] + messages_to[peer][1] + 1);
			put(TOLD + me * PROCESSES + peer, data_to[peer] + 1);
		}
	for (int peer = 0; talks && peer < PROCESSES; peer++)
		if (peer != me)
			UNTIL(told(SENT + peer * PROCESSES + me) == messages_from[peer][0] + messages_from[peer][1] + 1 && told(TOLD + peer * PROCESSES + me) == data_from[peer] + 1, step());
	add(ENDED);
	if (talks)
		UNTIL(told(ENDED) == PROCESSES, step());
	else
		UNTIL(told(ENDED) >= (me == 0 ? 1 : PROCESSES), pause_ms(1));
	close_all(mr);
}

static void run(void)
{
	static const char *const names[PROCESSES] = { "process 0", "process 1", "process 2" };
	pid_t pids[PROCESSES];
	int failed = 0;

	memory = mmap(NULL, (size_t)PROCESSES * PROCESSES * AREA, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	IS(memory != MAP_FAILED);
	for (int i = 0; i < PROCESSES; i++)
		pids[i] = start(names[i], process, i);
	for (int i = 0; i < PROCESSES; i++)
		failed |= status_of(pids[i], names[i]);
	if (failed)
		exit(1);
}

static void silent(void) { run(); }
static void busy(void)
{
	talks = true;
	run();
}
static void selectively(void)
{
	selective = true;
	busy();
}

int main(int argc, char **argv)
{
	static const struct mode modes[] = {
		{ "silent", silent },
		{ "busy", busy },
		{ "selective", selectively },
	};

	if (argc > 5)
		rounds = strtoull(argv[5], NULL, 10);
	random_state = argc > 6 ? strtoull(argv[6], NULL, 10) : (uint64_t)time(NULL);
	printf("seed %llu\n", (unsigned long long)random_state);
	fflush(stdout);
	return run_mode(modes, sizeof modes / sizeof *modes, argc, argv);
}
