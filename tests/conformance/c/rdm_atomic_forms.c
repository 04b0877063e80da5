/* Atomic operations of endpoints with many peers, from fi_atomic(3), fi_cq(3) and fi_endpoint(3),
 * between processes:
 *
 *   rdm_atomic_forms all PROV NODE         each operation on each datatype is supported
 *   rdm_atomic_forms each PROV NODE        each operation that is supported, by each call, compared
 *                                          with a model; the bytes around the operands stay
 *   rdm_atomic_forms most PROV NODE        as many operands as one call takes, and one more
 *   rdm_atomic_forms neighbours PROV NODE  the CPU of the target changes the bytes beside it
 *   rdm_atomic_forms sum PROV NODE         two initiators count; each result of a fetch comes once
 *   rdm_atomic_forms silent PROV NODE      the target calls nothing for a second
 *   rdm_atomic_forms stopped PROV NODE     8-byte operations; the process of the target is stopped
 *   rdm_atomic_forms refused PROV NODE     wrong keys, bounds, rights and alignment
 *   rdm_atomic_forms offsets PROV NODE     regions that begin at any address
 *   rdm_atomic_forms order PROV NODE       the order of atomic operations, where it is offered
 *   rdm_atomic_forms counters PROV NODE    counters of the initiator and of the target
 *   rdm_atomic_forms self PROV NODE        the endpoint itself is the target
 *
 * A further argument `auto` requests FI_PROGRESS_AUTO, one after it is the count of `sum`; NODE `-`
 * stands for none. Ends with 0, with 77 if the mode is not offered, or says what went wrong. Plain
 * libfabric 1.17. `stopped` needs a provider whose targets take no part in 8-byte operations. */
#define _GNU_SOURCE
#include "rdm_atomic_model.h"

#define CAPS_ATOMIC (FI_MSG | FI_ATOMIC)
#define ALL_REMOTE (FI_REMOTE_READ | FI_REMOTE_WRITE)
#define CHANGED (FI_ATOMIC | FI_WRITE)
#define FETCHED (FI_ATOMIC | FI_READ)
enum { AREA = 1 << 20, CELL = 256, CELLS = 1024, SEVERAL = 3 };

static uint8_t *memory, *operands, *compares, *results; /* AREA bytes each; peers access the first */
static struct region region;
static struct shown there;
static unsigned long sum_count = 200000;
static uint8_t *seen; /* of `sum`: shared by the processes; whether this result has been fetched */

static void open_memory(struct side *side)
{
	memory = pages(AREA);
	operands = pages(AREA);
	compares = pages(AREA);
	results = pages(AREA);
	region = region_of(side, memory, AREA, ALL_REMOTE, 40 + me);
	show(side, &region, 0);
}

static void begin(struct side *side, uint64_t caps)
{
	needed.op_flags = FI_DELIVERY_COMPLETE;
	open_memory_pair(side, caps);
	open_memory(side);
	meet(side);
	there = region_at(side, 1 - me, 0);
}

static void finish(struct side *side)
{
	meet(side);
	must_be_empty(side);
	MUST(fi_close(&side->ep->fid));
	side->ep = NULL;
	close_region(&region);
	close_side(side);
	munmap(memory, AREA);
}

/* The operands that one call takes; 0 if the operation is not supported. */
static size_t supported(struct side *side, const struct type *type, int op, int form)
{
	static const uint64_t flags[] = { 0, FI_FETCH_ATOMIC, FI_COMPARE_ATOMIC };
	struct fi_atomic_attr attr = { 0 };
	size_t count = 0;
	int query = fi_query_atomic(side->domain, type->type, op, &attr, flags[form]), valid;

	if (form == BASE)
		valid = fi_atomicvalid(side->ep, type->type, op, &count);
	else if (form == FETCH)
		valid = fi_fetch_atomicvalid(side->ep, type->type, op, &count);
	else
		valid = fi_compare_atomicvalid(side->ep, type->type, op, &count);
	if ((query == 0) != (valid == 0))
		die("%s %s %s: query %d, valid %d", form_names[form], op_names[op], type->name, query, valid);
	if (query)
		return 0;
	IS(count >= 1 && attr.count == count);
	if (attr.size != type->size)
		die("%s has %zu bytes, not %zu", type->name, type->size, attr.size);
	return count;
}

/* ---- calls ---- */

enum { SINGLE, VECTOR, MESSAGE, INJECT, WAYS };

struct call {
	const struct type *type;
	int op, form, way;
	size_t count;
	uint8_t *operand, *compare, *result;
	uint64_t addr, key;
	fi_addr_t to;
	void *context;
};

/* The elements in up to two buffers; the first has `first` of them. */
static size_t split(struct fi_ioc *ioc, uint8_t *bytes, const struct call *call, size_t first, bool can)
{
	if (!can || first == 0 || first >= call->count) {
		ioc[0] = (struct fi_ioc){ bytes, call->count };
		return 1;
	}
	ioc[0] = (struct fi_ioc){ bytes, first };
	ioc[1] = (struct fi_ioc){ bytes + first * call->type->size, call->count - first };
	return 2;
}

static ssize_t post_call(struct side *side, const struct call *c)
{
	struct fi_ioc operand[2], compare[2], result[2];
	struct fi_rma_ioc rma[2] = { { c->addr, c->count, c->key } };
	bool can = side->info->tx_attr->iov_limit >= 2;
	size_t rmas = 1, operands = split(operand, c->operand, c, 1, can), compares = split(compare, c->compare, c, c->count / 2, can), results = split(result, c->result, c, c->count - 1, can);
	enum fi_datatype type = c->type->type;
	enum fi_op op = (enum fi_op)c->op;
	struct fid_ep *ep = side->ep;
	/* "may be NULL" */
	void *single = c->op == FI_ATOMIC_READ ? NULL : c->operand;

	if (side->info->tx_attr->rma_iov_limit >= 2 && c->count >= 2) {
		rma[0].count = 1;
		rma[1] = (struct fi_rma_ioc){ c->addr + c->type->size, c->count - 1, c->key };
		rmas = 2;
	}
	struct fi_msg_atomic msg = { .msg_iov = operand, .iov_count = operands, .addr = c->to, .rma_iov = rma, .rma_iov_count = rmas, .datatype = type, .op = op, .context = c->context };

	switch (c->form * WAYS + c->way) {
	case BASE * WAYS + SINGLE:
		return fi_atomic(ep, c->operand, c->count, NULL, c->to, c->addr, c->key, type, op, c->context);
	case BASE * WAYS + VECTOR:
		return fi_atomicv(ep, operand, NULL, operands, c->to, c->addr, c->key, type, op, c->context);
	case BASE * WAYS + MESSAGE:
		return fi_atomicmsg(ep, &msg, FI_COMPLETION | FI_DELIVERY_COMPLETE);
	case BASE * WAYS + INJECT:
		return fi_inject_atomic(ep, c->operand, c->count, c->to, c->addr, c->key, type, op);
	case FETCH * WAYS + SINGLE:
		return fi_fetch_atomic(ep, single, c->count, NULL, c->result, NULL, c->to, c->addr, c->key, type, op, c->context);
	case FETCH * WAYS + VECTOR:
		return fi_fetch_atomicv(ep, operand, NULL, operands, result, NULL, results, c->to, c->addr, c->key, type, op, c->context);
	case FETCH * WAYS + MESSAGE:
		return fi_fetch_atomicmsg(ep, &msg, result, NULL, results, FI_COMPLETION);
	case COMPARE * WAYS + SINGLE:
		return fi_compare_atomic(ep, c->operand, c->count, NULL, c->compare, NULL, c->result, NULL, c->to, c->addr, c->key, type, op, c->context);
	case COMPARE * WAYS + VECTOR:
		return fi_compare_atomicv(ep, operand, NULL, operands, compare, NULL, compares, result, NULL, results, c->to, c->addr, c->key, type, op, c->context);
	default:
		return fi_compare_atomicmsg(ep, &msg, compare, NULL, compares, result, NULL, results, FI_COMPLETION);
	}
}

/* The next completion is that of the call. One that fetches reads, and writes. */
static void call_done_at(int line, struct side *side, const struct call *c)
{
	struct outcome outcome = outcome_at(line, side, side->tx);
	uint64_t kind = KIND(outcome.entry.flags);

	if (outcome.err)
		die("line %d: a completion in error: %s", line, fi_strerror(outcome.err));
	IS(outcome.entry.op_context == c->context);
	if (kind != CHANGED && (c->form == BASE || kind != FETCHED))
		die("line %d: flags %llx of %s", line, (unsigned long long)outcome.entry.flags, form_names[c->form]);
}

#define CALL_DONE(side, c) call_done_at(__LINE__, side, c)

static uint64_t element_seed(unsigned cell, size_t i, unsigned role) { return mixed(cell * 1000003ULL + i * 31 + role); }

/* The values of a cell before the operation, and its operands. */
static void set_values(const struct type *type, unsigned cell, size_t count, uint8_t *target, uint8_t *operand, uint8_t *compare)
{
	for (size_t i = 0; i < count; i++) {
		size_t at = i * type->size;

		type->value(target + at, element_seed(cell, i, 0));
		type->value(operand + at, element_seed(cell, i, 1));
		if (mixed(element_seed(cell, i, 3)) % 2)
			memcpy(compare + at, target + at, type->size);
		else
			type->value(compare + at, element_seed(cell, i, 2));
	}
}

static bool all_equal(const struct type *type, const uint8_t *a, const uint8_t *b, size_t count)
{
	for (size_t i = 0; i < count; i++)
		if (!type->equal(a + i * type->size, b + i * type->size))
			return false;
	return true;
}

static void describe_and_die(const struct call *c, const char *what, const uint8_t *got, const uint8_t *want)
{
	fprintf(stderr, "%s %s %s, call %d, %zu elements: %s\n", form_names[c->form], op_names[c->op], c->type->name, c->way, c->count, what);
	for (size_t i = 0; i < c->count * c->type->size; i++)
		fprintf(stderr, "%s%02x/%02x", i % 16 ? " " : "\n  got/expected: ", got[i], want[i]);
	die("a wrong value");
}

/* ---- modes ---- */

static void all(void)
{
	struct side side;
	unsigned missing = 0, more = 0, offered_count = 0;

	needed.op_flags = FI_DELIVERY_COMPLETE;
	wanted.caps = CAPS_ATOMIC;
	open_memory_side(&side);
	for (unsigned t = 0; t < TYPES; t++)
		for (int op = 0; op < OPS; op++)
			for (int form = 0; form < FORMS; form++) {
				bool yes = supported(&side, &types[t], op, form) != 0;

				offered_count += yes;
				if (is_defined(&types[t], op, form) && !yes) {
					missing++;
					printf("not supported: %s %s %s\n", form_names[form], op_names[op], types[t].name);
				}
				if (yes && !is_defined(&types[t], op, form)) {
					more++;
					printf("supported without a meaning: %s %s %s\n", form_names[form], op_names[op], types[t].name);
				}
			}
	printf("%u operations are supported\n", offered_count);
	close_side(&side);
	if (missing || more)
		die("%u operations are missing, %u have no meaning", missing, more);
}

/* Everything about one datatype. In process 1 memory holds a cell for each call. */
static void each_type(struct side *side, const struct type *type)
{
	unsigned cell = 0;

	memset(memory, 0xa5, AREA);
	memset(results, 0xa5, AREA);
	for (int pass = 0; pass < 2; pass++) {
		cell = 0;
		if (pass)
			meet(side);
		for (int op = 0; op < OPS; op++)
			for (int form = 0; form < FORMS; form++) {
				size_t most = is_defined(type, op, form) ? supported(side, type, op, form) : 0;

				for (int way = 0; way < WAYS && most; way++)
					for (size_t count = 1; count <= SEVERAL; count += SEVERAL - 1, cell++) {
						size_t shift = (size_t)cell * CELL + GUARD, bytes = count * type->size;
						struct call c = { type, op, form, way, count, operands + shift, compares + shift, results + shift, there.addr + shift, there.key, side->peer, memory + shift };
						uint8_t before[SEVERAL * 32], after[SEVERAL * 32];

						if ((way == INJECT && (form != BASE || bytes > side->info->tx_attr->inject_size)) || count > most)
							continue;
						IS(cell < CELLS && 2 * GUARD + bytes <= CELL);
						set_values(type, cell, count, before, operands + shift, compares + shift);
						memcpy(after, before, bytes);
						for (size_t i = 0; i < bytes; i += type->size)
							type->apply((enum fi_op)op, after + i, operands + shift + i, form == COMPARE ? compares + shift + i : NULL);
						if (me == 1 && pass == 0) {
							memcpy(memory + shift, before, bytes);
						} else if (me == 0 && pass == 1) {
							POST(side, post_call(side, &c));
							if (way == INJECT)
								memset(c.operand, 0x3c, bytes);
							else
								CALL_DONE(side, &c);
							if (form != BASE) {
								if (!all_equal(type, c.result, before, count))
									describe_and_die(&c, "the result", c.result, before);
								IS(guarded(c.result, bytes));
							}
						} else if (me == 1) {
							double limit = now() + 10;

							while (!all_equal(type, memory + shift, after, count) && now() < limit)
								progress(side);
							if (!all_equal(type, memory + shift, after, count))
								describe_and_die(&c, "the target", memory + shift, after);
							IS(guarded(memory + shift, bytes));
						}
					}
			}
	}
	meet(side);
	if (me == 0)
		printf("%s: %u calls\n", type->name, cell);
}

static void each(void)
{
	struct side side;

	begin(&side, CAPS_ATOMIC);
	for (unsigned t = 0; t < TYPES; t++)
		each_type(&side, &types[t]);
	/* an operation that is not supported */
	for (unsigned t = 0; t < TYPES && me == 0; t++)
		for (int op = 0; op < OPS; op++)
			for (int form = 0; form < FORMS; form++) {
				struct call c = { &types[t], op, form, SINGLE, 1, operands, compares, results, there.addr, there.key, side.peer, &c };

				if (!supported(&side, &types[t], op, form))
					RETURNS(post_call(&side, &c), -FI_EOPNOTSUPP);
			}
	finish(&side);
}

static void most(void)
{
	static const int ops[FORMS][2] = { { FI_SUM, FI_ATOMIC_WRITE }, { FI_SUM, FI_ATOMIC_READ }, { FI_CSWAP, FI_CSWAP_NE } };
	struct side side;

	begin(&side, CAPS_ATOMIC);
	for (unsigned n = 0; n < TYPES * FORMS * 2; n++) {
		const struct type *type = &types[n / (FORMS * 2)];
		int form = (int)(n / 2 % FORMS), op = ops[form][n % 2];
		size_t count = supported(&side, type, op, form), bytes = count * type->size;
		struct call c = { type, op, form, SINGLE, count, operands + GUARD, compares + GUARD, results + GUARD, there.addr + 4096, there.key, side.peer, &c };
		uint8_t *before = results + AREA / 2, *after = memory + AREA / 2;

		if (count == 0 || bytes > AREA / 4)
			continue;
		set_values(type, n, count, before, c.operand, c.compare);
		memcpy(after, before, bytes);
		for (size_t i = 0; i < bytes; i += type->size)
			type->apply((enum fi_op)op, after + i, c.operand + i, form == COMPARE ? c.compare + i : NULL);
		clear(memory + 4096, bytes);
		clear(results + GUARD, bytes);
		memcpy(memory + 4096, before, bytes);
		meet(&side);
		if (me == 0) {
			POST(&side, post_call(&side, &c));
			CALL_DONE(&side, &c);
			if (form != BASE) {
				IS(all_equal(type, c.result, before, count));
				IS(guarded(c.result, bytes));
			}
			c.count++;
			RETURNS(post_call(&side, &c), -FI_EMSGSIZE);
		}
		meet(&side);
		if (me == 1) {
			UNTIL(all_equal(type, memory + 4096, after, count), progress(&side));
			IS(guarded(memory + 4096, bytes));
		}
		meet(&side);
	}
	finish(&side);
}

/* Each operand is alone in its 64 bytes; the CPU changes the bytes before and after it. The last
 * ones end, and begin, with the region and with its pages. */
static void neighbours(void)
{
	enum { SIZES = 4, ROUNDS = 1500 };
	static const struct { enum fi_datatype type; size_t size; } sizes[SIZES] = { { FI_UINT8, 1 }, { FI_UINT16, 2 }, { FI_UINT32, 4 }, { FI_UINT64, 8 } };
	struct side side;
	uint8_t *alone = mmap(NULL, 3 * 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	begin(&side, CAPS_ATOMIC);
	IS(mprotect(alone + 4096, 4096, PROT_READ | PROT_WRITE) == 0);
	struct region page = region_of(&side, alone + 4096, 4096, ALL_REMOTE, 60);
	show(&side, &page, 1);
	memset(memory, 0, AREA);
	meet(&side);
	struct shown other = region_at(&side, 1 - me, 1);
	if (me == 0) {
		unsigned under_way = 0;
		uint64_t one = 1;

		for (unsigned i = 0; i < ROUNDS; i++)
			for (unsigned k = 0; k < SIZES * 3; k++) {
				unsigned s = k % SIZES;
				/* in the middle of a word; at the page's begin and its end */
				uint64_t addr = k < SIZES ? there.addr + 64 * s + 8 + (s < 3 ? sizes[s].size : 0) : k < 2 * SIZES ? other.addr : other.addr + 4096 - sizes[s].size;
				uint64_t key = k < SIZES ? there.key : other.key;
				struct outcome outcome;

				if (k >= SIZES && s != i % SIZES)
					continue;
				POST(&side, fi_fetch_atomic(side.ep, &one, 1, NULL, results + 8 * k, NULL, side.peer, addr, key, sizes[s].type, FI_SUM, &side));
				under_way++;
				while (under_way && (under_way > 20 || poll_outcome(side.tx, &outcome))) {
					if (under_way > 20)
						outcome = OUTCOME(&side, side.tx);
					IS(outcome.err == 0);
					under_way--;
				}
			}
		for (; under_way; under_way--)
			IS(OUTCOME(&side, side.tx).err == 0);
		put(0, 1);
	} else {
		uint8_t count = 0;

		for (unsigned long n = 0; !told(0); n++) {
			for (unsigned s = 0; s < SIZES; s++) {
				size_t at = 64 * s + 8 + (s < 3 ? sizes[s].size : 0);

				__atomic_fetch_add(&memory[at - 1], 1, __ATOMIC_SEQ_CST);
				__atomic_fetch_add(&memory[at + sizes[s].size], 1, __ATOMIC_SEQ_CST);
			}
			count++;
			if (n % 16 == 0)
				progress(&side);
		}
		for (unsigned s = 0; s < SIZES; s++) {
			size_t at = 64 * s + 8 + (s < 3 ? sizes[s].size : 0);
			uint64_t value = 0, want = ROUNDS;

			memcpy(&value, memory + at, sizes[s].size);
			if (s < 3)
				want &= (1ULL << 8 * sizes[s].size) - 1;
			if (value != want)
				die("%zu bytes: the sum is %llx, expected %llx", sizes[s].size, (unsigned long long)value, (unsigned long long)want);
			if (memory[at - 1] != count || memory[at + sizes[s].size] != count)
				die("%zu bytes: the neighbours are %x and %x, expected %x", sizes[s].size, memory[at - 1], memory[at + sizes[s].size], count);
			for (size_t i = 0; i < 64; i++)
				if (i + 1 + 64 * s < at || i + 64 * s > at + sizes[s].size)
					IS(memory[64 * s + i] == 0);
		}
		for (size_t i = 8; i < 4088; i++)
			IS(alone[4096 + i] == 0);
	}
	meet(&side);
	close_region(&page);
	finish(&side);
}

/* Processes 1 and 2 count in the memory of process 0, by different operations. */
static void sum(void)
{
	enum { WINDOW = 16, CELL_FETCH = 0, CELL_BASE = 64, CELL_LOW = 128, CELL_HIGH = 132, CELL_SWAP = 192, CELL_BITS = 256 };
	struct side side;
	uint64_t total = 0;

	wanted.caps = CAPS_ATOMIC;
	needed.op_flags = FI_DELIVERY_COMPLETE;
	open_memory_side(&side);
	open_memory(&side);
	memset(memory, 0, AREA);
	if (me == 0) {
		/* the result of a fetch is its place; process 1 checks that all have come */
		alarm(900);
		meet(&side);
		while (told(1) < 2) {
			progress(&side);
			others_live();
			usleep(100);
		}
	} else {
		uint64_t *values = (uint64_t *)(void *)results, one = 1, bit = 1ULL << me;
		uint32_t small = 1;
		bool busy[WINDOW] = { false };
		unsigned under_way = 0, swaps = 0;

		meet(&side);
		there = region_at(&side, 0, 0);
		side.peer = address(&side, 0);
		for (unsigned long i = 0; i < sum_count || under_way;) {
			struct outcome outcome;
			unsigned slot = i % WINDOW;

			if (i < sum_count && !busy[slot]) {
				ssize_t result = fi_fetch_atomic(side.ep, &one, 1, NULL, &values[slot], NULL, side.peer, there.addr + CELL_FETCH, there.key, i % 2 ? FI_UINT64 : FI_INT64, FI_SUM, &busy[slot]);

				if (result == 0) {
					busy[slot] = true;
					under_way++;
					i++;
					if (i % 8 == 0)
						POST(&side, fi_inject_atomic(side.ep, &one, 1, side.peer, there.addr + CELL_BASE, there.key, FI_UINT64, FI_SUM));
					if (i % 8 == 1)
						POST(&side, fi_inject_atomic(side.ep, &small, 1, side.peer, there.addr + (me == 1 ? CELL_LOW : CELL_HIGH), there.key, FI_UINT32, FI_SUM));
					if (i % 8 == 2)
						POST(&side, fi_inject_atomic(side.ep, &bit, 1, side.peer, there.addr + CELL_BITS, there.key, FI_UINT64, FI_BXOR));
				} else if (result != -FI_EAGAIN) {
					MUST(result);
				}
			}
			while (poll_outcome(side.tx, &outcome)) {
				size_t k = (size_t)((bool *)outcome.entry.op_context - busy);

				if (outcome.err)
					die("operation %lu: %s", i, fi_strerror(outcome.err));
				IS(k < WINDOW && busy[k] && values[k] < 2 * sum_count);
				if (__atomic_exchange_n(&seen[values[k]], 1, __ATOMIC_SEQ_CST))
					die("%llu has been fetched twice", (unsigned long long)values[k]);
				busy[k] = false;
				under_way--;
			}
		}
		/* a counter made of compare-and-swap */
		for (uint64_t old = 0, found; swaps < sum_count / 40; old = found) {
			uint64_t next_value = old + 1;

			POST(&side, fi_compare_atomic(side.ep, &next_value, 1, NULL, &old, NULL, &found, NULL, side.peer, there.addr + CELL_SWAP, there.key, FI_UINT64, FI_CSWAP, &found));
			IS(OUTCOME(&side, side.tx).err == 0);
			if (found == old) {
				swaps++;
				found = next_value;
			}
		}
		/* the injected operations have been done when a later one has been fetched: not promised
		 * without an order; process 0 waits for them */
		add(1);
	}
	for (unsigned i = 0; me == 0 && i < 2 * sum_count; i++)
		total += seen[i];
	if (me == 0) {
		volatile uint64_t *base = (volatile uint64_t *)(void *)(memory + CELL_BASE);
		volatile uint32_t *low = (volatile uint32_t *)(void *)(memory + CELL_LOW);
		uint64_t eighth = sum_count / 8, value;

		IS(total == 2 * sum_count);
		memcpy(&value, memory + CELL_FETCH, 8);
		IS(value == 2 * sum_count);
		UNTIL(*base == 2 * eighth && low[0] == eighth && low[1] == eighth, progress(&side));
		memcpy(&value, memory + CELL_SWAP, 8);
		IS(value == sum_count / 40 * 2);
		UNTIL((memcpy(&value, memory + CELL_BITS, 8), value == (eighth % 2 ? 6 : 0)), progress(&side));
	}
	finish(&side);
}

/* Every operation on every datatype at once, one after the other, while process 1 sleeps. */
static void silent(void)
{
	struct side side;
	unsigned posted = 0, limit_of_window = 32;

	begin(&side, CAPS_ATOMIC);
	memset(memory, 0, AREA);
	meet(&side);
	if (me == 0) {
		double begun = now();
		unsigned under_way = 0;

		for (unsigned n = 0; n < TYPES * OPS * FORMS; n++) {
			const struct type *type = &types[n / (OPS * FORMS)];
			struct call c = { type, (int)(n / FORMS % OPS), (int)(n % FORMS), SINGLE, 1, operands + n * 32, compares + n * 32, results + n * 32, there.addr + n * 32, there.key, side.peer, &side };

			if (!is_defined(type, c.op, c.form) || !supported(&side, type, c.op, c.form))
				continue;
			type->value(c.operand, n);
			POST(&side, post_call(&side, &c));
			posted++;
			under_way++;
			for (struct outcome outcome; under_way > limit_of_window; under_way--) {
				outcome = OUTCOME(&side, side.tx);
				IS(outcome.err == 0);
			}
		}
		for (; under_way; under_way--)
			IS(OUTCOME(&side, side.tx).err == 0);
		printf("%u operations in %.3f s\n", posted, now() - begun);
		put(0, posted);
	} else {
		struct timespec second = { 1, 200000000 };

		nanosleep(&second, NULL);
	}
	meet(&side);
	IS(told(0) > 0);
	for (unsigned n = 0; n < TYPES * OPS * FORMS && me == 1; n++) {
		const struct type *type = &types[n / (OPS * FORMS)];
		int op = (int)(n / FORMS % OPS), form = (int)(n % FORMS);
		uint8_t operand[32], want[32] = { 0 }, none[32] = { 0 };

		if (!is_defined(type, op, form) || !supported(&side, type, op, form))
			continue;
		type->value(operand, n);
		type->apply((enum fi_op)op, want, operand, form == COMPARE ? none : NULL);
		UNTIL(type->equal(memory + n * 32, want), progress(&side));
	}
	finish(&side);
}

static void stopped(void)
{
	static const struct { int op, form; } ops[] = { { FI_SUM, BASE }, { FI_SUM, FETCH }, { FI_CSWAP, COMPARE }, { FI_ATOMIC_READ, FETCH } };
	struct side side;
	uint64_t one = 1, fetched, expected = 0;

	begin(&side, CAPS_ATOMIC);
	memset(memory, 0, AREA);
	meet(&side);
	if (me == 0) {
		POST(&side, fi_atomic(side.ep, &one, 1, NULL, side.peer, there.addr, there.key, FI_UINT64, FI_SUM, &one));
		DONE(&side, &one, CHANGED);
		expected++;
		pause_ms(20);
		stop_process(1);
		for (unsigned i = 0; i < 400; i++) {
			uint64_t operand = ops[i % 4].op == FI_CSWAP ? expected + 5 : 3, compare = expected;
			const struct type *type = NULL;

			for (unsigned t = 0; t < TYPES; t++)
				if (types[t].type == FI_UINT64)
					type = &types[t];
			struct call c = { type, ops[i % 4].op, ops[i % 4].form, i / 4 % 3 == 2 && ops[i % 4].form == BASE ? INJECT : SINGLE, 1, (uint8_t *)&operand, (uint8_t *)&compare, (uint8_t *)&fetched, there.addr, there.key, side.peer, &c };
			POST(&side, post_call(&side, &c));
			if (c.way != INJECT)
				CALL_DONE(&side, &c);
			if (c.way == INJECT) {
				uint64_t seen = expected;

				UNTIL((peek(1, &seen, there.bytes, 8), seen == expected + 3), progress(&side));
			}
			if (c.form != BASE)
				IS(fetched == expected);
			expected = c.op == FI_SUM ? expected + 3 : c.op == FI_CSWAP ? operand : expected;
		}
		peek(1, &fetched, there.bytes, 8);
		IS(fetched == expected);
		IS(kill(others[1], SIGCONT) == 0 && kill(others[1], SIGUSR1) == 0);
	} else {
		sigset_t set;
		int sig;

		/* makes progress while the initiator connects */
		sigemptyset(&set);
		sigaddset(&set, SIGUSR1);
		for (struct timespec none = { 0, 1000000 }; (sig = sigtimedwait(&set, NULL, &none)) != SIGUSR1;)
			progress(&side);
	}
	finish(&side);
}

/* One operation that must fail at the target, and leaves 32 bytes there unchanged. */
static void must_fail(int line, struct side *side, struct call c)
{
	ssize_t result;
	double limit = now() + SECONDS;

	while ((result = post_call(side, &c)) == -FI_EAGAIN && now() < limit)
		progress(side);
	if (result == 0)
		refused_at(line, side, c.context);
	else if (result == -FI_EAGAIN)
		die("line %d: -FI_EAGAIN for %d s", line, SECONDS);
	/* later operations succeed */
	c.addr = there.addr;
	c.key = there.key;
	c.operand = operands;
	POST(side, post_call(side, &c));
	CALL_DONE(side, &c);
}

static void refused_operations(void)
{
	struct side side;
	struct region readable, writable;
	int context;

	begin(&side, CAPS_ATOMIC);
	readable = region_of(&side, memory + 8192, 4096, FI_REMOTE_READ, 70);
	writable = region_of(&side, memory + 12288, 4096, FI_REMOTE_WRITE, 71);
	show(&side, &readable, 1);
	show(&side, &writable, 2);
	memset(memory, 0, AREA);
	memset(memory + 4096, 0x5a, AREA - 4096);
	meet(&side);
	struct shown at_readable = region_at(&side, 1 - me, 1), at_writable = region_at(&side, 1 - me, 2);
	memset(operands, 1, 64);
	memset(compares, 0x5a, 64);
	for (unsigned t = 0; t < TYPES && me == 0; t++)
		for (int form = 0; form < FORMS; form++) {
			const struct type *type = &types[t];
			int op = form == COMPARE ? FI_CSWAP : FI_ATOMIC_WRITE;
			struct call c = { type, op, form, SINGLE, 1, operands, compares, results, there.addr + 8192, there.key, side.peer, &context };

			if (!supported(&side, type, op, form))
				continue;
			c.key = there.key + 1000;
			must_fail(__LINE__, &side, c);
			c.key = there.key;
			c.addr = there.addr + AREA;
			must_fail(__LINE__, &side, c);
			c.addr = there.addr + AREA - type->size;
			c.count = 2;
			if (supported(&side, type, op, form) >= 2)
				must_fail(__LINE__, &side, c);
			c.count = 1;
			if (type->kind == INTEGER && type->size > 1) {
				c.addr = there.addr + 8192 + type->size / 2;
				must_fail(__LINE__, &side, c);
			}
			c.addr = at_readable.addr;
			c.key = at_readable.key;
			must_fail(__LINE__, &side, c);
			if (form != BASE) {
				c.addr = at_writable.addr;
				c.key = at_writable.key;
				must_fail(__LINE__, &side, c);
			}
		}
	meet(&side);
	for (size_t i = 4096; i < AREA && me == 1; i++)
		IS(memory[i] == 0x5a);
	close_region(&readable);
	close_region(&writable);
	finish(&side);
}

/* fi_mr(3): without FI_MR_VIRT_ADDR "the target address that is specified is a byte offset into the registered
 * region". The initiator does not know where the region begins. */
static void offsets(void)
{
	struct side side;
	struct region odd;

	needed.mr_mode = 0;
	wanted.caps = CAPS_ATOMIC;
	begin(&side, CAPS_ATOMIC);
	odd = region_of(&side, memory + 8193, 4096, ALL_REMOTE, 72);
	show(&side, &odd, 1);
	memset(memory, 0, AREA);
	memset(operands, 1, 64);
	meet(&side);
	there = region_at(&side, 1 - me, 1);
	for (unsigned t = 0, cell = 1; t < TYPES; t++, cell++)
		for (unsigned shift = 0; shift < types[t].size; shift++) {
			const struct type *type = &types[t];
			uint64_t at = cell * 128 + shift;

			if (type->kind != INTEGER || !supported(&side, type, FI_SUM, FETCH))
				break;
			if (me == 0) {
				memset(results, 0xff, 64);
				for (unsigned k = 0; k < 3; k++) {
					POST(&side, fi_fetch_atomic(side.ep, operands, 1, NULL, results, NULL, side.peer, there.addr + at, there.key, type->type, FI_SUM, &side));
					IS(OUTCOME(&side, side.tx).err == 0);
				}
				for (unsigned i = 0; i < type->size; i++)
					IS(results[i] == 2);
			}
			meet(&side);
			for (unsigned i = 0; i < 128 && me == 1; i++)
				IS(memory[8193 + cell * 128 + i] == (i >= shift && i < shift + type->size ? 3 : 0));
			memset(memory + 8193, 0, 4096);
			meet(&side);
		}
	close_region(&odd);
	finish(&side);
}

static void order(void)
{
	enum { TIMES = 300 };
	static uint64_t values[TIMES], got[TIMES];
	uint64_t bits = FI_ORDER_ATOMIC_WAW | FI_ORDER_ATOMIC_RAW | FI_ORDER_ATOMIC_RAR;
	struct side side;

	needed.msg_order = bits;
	wanted.caps = CAPS_ATOMIC;
	if (!offers("the order of atomic operations")) {
		not_offered = true;
		return;
	}
	begin(&side, CAPS_ATOMIC);
	if (side.info->ep_attr->max_order_waw_size < 9 || side.info->ep_attr->max_order_raw_size < 9)
		not_offered = true;
	memset(memory, 0, AREA);
	meet(&side);
	for (unsigned i = 0, completed = 0; i < TIMES && me == 0 && !not_offered; i++) {
		values[i] = i + 1;
		POST(&side, fi_atomic(side.ep, &values[i], 1, NULL, side.peer, there.addr, there.key, FI_UINT64, FI_ATOMIC_WRITE, &side));
		POST(&side, fi_fetch_atomic(side.ep, &values[i], 1, NULL, &got[i], NULL, side.peer, there.addr, there.key, FI_UINT64, i % 2 ? FI_ATOMIC_READ : FI_SUM, &side));
		for (; completed + 20 < 2 * i || (i + 1 == TIMES && completed < 2 * TIMES); completed++)
			IS(OUTCOME(&side, side.tx).err == 0);
	}
	for (unsigned i = 0; i < TIMES && me == 0 && !not_offered; i++)
		IS(got[i] == i + 1);
	if (not_offered && me == 0)
		printf("not offered: max_order_waw_size or max_order_raw_size is below 9\n");
	finish(&side);
}

static void counters(void)
{
	enum { COUNT = 200 };
	struct side side;
	struct counters c = { 0 };
	bool events;
	uint64_t one = 1, fetched, found, zero = 0;

	needed.op_flags = FI_DELIVERY_COMPLETE;
	wanted.caps = CAPS_ATOMIC | FI_RMA_EVENT;
	events = offers("FI_RMA_EVENT");
	if (!events)
		wanted.caps = CAPS_ATOMIC;
	open_queues(&side);
	c.write = counter(&side);
	c.read = counter(&side);
	if (events) {
		c.remote_write = counter(&side);
		c.remote_read = counter(&side);
	}
	side.ep = endpoint_with(&side, FI_SELECTIVE_COMPLETION, &c);
	publish(side.ep, (int)me);
	side.peer = address(&side, 1 - (int)me);
	open_memory(&side);
	memset(memory, 0, 4096);
	meet(&side);
	there = region_at(&side, 1 - me, 0);
	if (me == 0) {
		for (unsigned i = 0; i < COUNT; i++) {
			POST(&side, fi_atomic(side.ep, &one, 1, NULL, side.peer, there.addr, there.key, FI_UINT64, FI_SUM, NULL));
			POST(&side, fi_inject_atomic(side.ep, &one, 1, side.peer, there.addr, there.key, FI_UINT32, FI_SUM));
			POST(&side, fi_fetch_atomic(side.ep, &one, 1, NULL, &fetched, NULL, side.peer, there.addr + 8, there.key, FI_UINT64, FI_SUM, NULL));
			POST(&side, fi_compare_atomic(side.ep, &one, 1, NULL, &zero, NULL, &found, NULL, side.peer, there.addr + 16, there.key, FI_UINT64, FI_CSWAP, NULL));
		}
		UNTIL(fi_cntr_read(c.write) == 2 * COUNT && fi_cntr_read(c.read) == 2 * COUNT, );
		must_be_empty(&side);
	} else if (events) {
		UNTIL(fi_cntr_read(c.remote_write) == 2 * COUNT && fi_cntr_read(c.remote_read) == 2 * COUNT, );
	}
	meet(&side);
	if (me == 1) {
		uint64_t seen[3];

		memcpy(seen, memory, sizeof seen);
		IS(seen[0] == 2 * COUNT && seen[1] == COUNT && seen[2] == 1);
		IS(!events || (fi_cntr_read(c.remote_write) == 2 * COUNT && fi_cntr_read(c.remote_read) == 2 * COUNT));
	}
	MUST(fi_close(&side.ep->fid));
	side.ep = NULL;
	MUST(fi_close(&c.write->fid));
	MUST(fi_close(&c.read->fid));
	if (events) {
		MUST(fi_close(&c.remote_write->fid));
		MUST(fi_close(&c.remote_read->fid));
	}
	close_region(&region);
	close_side(&side);
}

static void to_itself(void)
{
	struct side side;
	struct name own;

	wanted.caps = CAPS_ATOMIC;
	needed.op_flags = FI_DELIVERY_COMPLETE;
	open_memory_side(&side);
	own = name_of(side.ep);
	side.peer = insert(&side, &own);
	open_memory(&side);
	there = region_at(&side, 0, 0);
	for (unsigned n = 0; n < TYPES * OPS * FORMS; n++) {
		const struct type *type = &types[n / (OPS * FORMS)];
		struct call c = { type, (int)(n / FORMS % OPS), (int)(n % FORMS), SINGLE, 1, operands, compares, results, there.addr + 64, there.key, side.peer, &c };
		uint8_t before[32], after[32];

		if (!is_defined(type, c.op, c.form) || !supported(&side, type, c.op, c.form))
			continue;
		clear(memory + 64, type->size);
		set_values(type, n, 1, before, operands, compares);
		memcpy(memory + 64, before, type->size);
		memcpy(after, before, type->size);
		type->apply((enum fi_op)c.op, after, operands, c.form == COMPARE ? compares : NULL);
		POST(&side, post_call(&side, &c));
		CALL_DONE(&side, &c);
		UNTIL(type->equal(memory + 64, after), progress(&side));
		IS(guarded(memory + 64, type->size));
		if (c.form != BASE && !type->equal(results, before))
			describe_and_die(&c, "the result", results, before);
	}
	finish(&side);
}

int main(int argc, char **argv)
{
	static const struct memory_mode modes[] = {
		{ "all", all, 1 },
		{ "each", each, 2 },
		{ "most", most, 2 },
		{ "neighbours", neighbours, 2 },
		{ "sum", sum, 3 },
		{ "silent", silent, 2 },
		{ "stopped", stopped, 2 },
		{ "refused", refused_operations, 2 },
		{ "offsets", offsets, 2 },
		{ "order", order, 2 },
		{ "counters", counters, 2 },
		{ "self", to_itself, 1 },
	};
	sigset_t set;

	/* for sigtimedwait(); inherited by the threads of the provider */
	sigemptyset(&set);
	sigaddset(&set, SIGUSR1);
	sigprocmask(SIG_BLOCK, &set, NULL);
	if (argc > 5)
		sum_count = strtoul(argv[5], NULL, 0);
	seen = mmap(NULL, sum_count * 2, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	IS(seen != MAP_FAILED);
	return run_memory_mode(modes, sizeof modes / sizeof *modes, argc, argv);
}
