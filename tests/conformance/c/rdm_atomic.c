/* Atomics of fi_atomic(3) between endpoints with many peers in two or more processes.
 * The target's memory is shared with the initiators, which compare it directly; the target itself
 * sleeps, so nothing here needs a call of its application.
 *
 *   rdm_atomic values PROV NODE [auto]         each operation on each datatype that C has, arrays, all
 *                                              three families; the bytes beside the elements
 *   rdm_atomic forms PROV NODE [auto]          vectors, messages, injected ones, counters and entries
 *   rdm_atomic sums PROV NODE [auto] [COUNT]   two initiators with mixed operations on the same
 *                                              elements: everything adds up
 *   rdm_atomic neighbours PROV NODE [auto]     a processor increments the bytes beside elements of 1, 2
 *                                              and 4 bytes meanwhile: no increment is lost
 *   rdm_atomic refused PROV NODE [auto]        arguments, keys and bounds that are refused, and
 *                                              operations that succeed afterwards
 *   rdm_atomic counted PROV NODE [auto]        counters of the target's region
 *   rdm_atomic fence PROV NODE [auto]          FI_FENCE between atomics and RMA, both ways
 *
 * Ends with 0, or says what went wrong. Plain libfabric 1.17. */
#include "rdm_processes.h"

#include <complex.h>
#include <rdma/fi_atomic.h>

enum { KEY = 7, LENGTH = 1 << 14, TARGET = 0, INITIATOR = 1, DONE = 0, READY = 1 };

static uint8_t *memory; /* the target's region, LENGTH bytes, mapped by all processes */
static uint64_t count;

/* ---- processes ---- */

static void open_atomic(struct side *side, int place)
{
	wanted.caps = FI_MSG | FI_ATOMIC;
	open_side(side, place);
}

/* The target registers the memory and calls nothing until all initiators have ended. */
static void target(int initiators)
{
	struct side side;
	struct fid_mr *mr;

	wanted.caps = FI_MSG | FI_ATOMIC;
	open_domain_of(&side);
	side.tx = queue(&side, 0);
	side.rx = queue(&side, 0);
	side.ep = endpoint_on(&side, 0);
	MUST(fi_mr_reg(side.domain, memory, LENGTH, FI_REMOTE_READ | FI_REMOTE_WRITE, 0, KEY, 0, &mr, NULL));
	IS(fi_mr_key(mr) == KEY);
	publish(side.ep, TARGET);
	UNTIL_WITHIN(100, told(DONE) == (uint64_t)initiators, pause_ms(5));
	MUST(fi_close(&mr->fid));
	close_side(&side);
}

static void map_memory(void)
{
	memory = mmap(NULL, LENGTH, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	IS(memory != MAP_FAILED);
}

static void one_ends(void)
{
	int status;

	IS(waitpid(-1, &status, 0) > 0);
	if (status)
		die("a process has ended with status %d", status);
}

static void with_target(void (*initiator)(int), int initiators)
{
	if (!memory)
		map_memory();
	start("target", target, initiators);
	for (int i = 1; i <= initiators; i++)
		start(i == 1 ? "initiator" : "further initiator", initiator, i);
	for (int i = 0; i <= initiators; i++)
		one_ends();
}

/* Waits for the completion of one operation with these flags. */
static void completes(struct side *side, uint64_t flags, void *context)
{
	struct fi_cq_tagged_entry entry = next(side, side->tx);

	IS(entry.op_context == context);
	IS((entry.flags & (FI_ATOMIC | FI_READ | FI_WRITE)) == (FI_ATOMIC | flags));
}

/* ---- values ---- */

#define ELEMENTS 3

typedef float complex float_complex;
typedef double complex double_complex;
typedef long double long_double;
typedef long double complex long_double_complex;
typedef __int128 int128;
typedef unsigned __int128 uint128;

struct values {
	struct side *side;
	fi_addr_t to;
	unsigned seed;
	unsigned done;
};

/* Executes one operation at `at` of the memory and compares. `size`: bytes of an element; `used`:
 * those that have a value. */
static void one(struct values *v, int family, enum fi_op op, enum fi_datatype type, size_t size, size_t used,
		const void *before, const void *operand, const void *compare, const void *after)
{
	uint8_t result[ELEMENTS * 32], canary = (uint8_t)(0x80 + v->seed++);
	size_t len = ELEMENTS * size, at = 64 + 32 * (v->seed % 100), most = 0;
	struct fid_ep *ep = v->side->ep;
	struct fi_atomic_attr attr;
	int context;
	uint64_t flags = family == 0 ? 0 : family == 1 ? FI_FETCH_ATOMIC : FI_COMPARE_ATOMIC;

	MUST(fi_query_atomic(v->side->domain, type, op, &attr, flags));
	IS(attr.size == size && attr.count >= ELEMENTS);
	memset(memory, canary, LENGTH);
	memset(result, canary, sizeof result);
	memcpy(memory + at, before, len);
	if (family == 0) {
		MUST(fi_atomicvalid(ep, type, op, &most));
		POST(v->side, fi_atomic(ep, operand, ELEMENTS, NULL, v->to, at, KEY, type, op, &context));
	} else if (family == 1) {
		MUST(fi_fetch_atomicvalid(ep, type, op, &most));
		POST(v->side, fi_fetch_atomic(ep, operand, ELEMENTS, NULL, result, NULL, v->to, at, KEY, type, op, &context));
	} else {
		MUST(fi_compare_atomicvalid(ep, type, op, &most));
		POST(v->side, fi_compare_atomic(ep, operand, ELEMENTS, NULL, compare, NULL, result, NULL, v->to, at, KEY, type, op,
						&context));
	}
	IS(most == attr.count);
	completes(v->side, family ? FI_READ : FI_WRITE, &context);
	for (size_t i = 0; i < len; i++) {
		size_t part = size == 32 ? i % 16 : i % size;

		if (part >= used)
			continue; /* padding */
		if (memory[at + i] != ((const uint8_t *)after)[i])
			die("op %d on datatype %d, family %d: byte %zu is %02x, not %02x", op, type, family, i, memory[at + i],
			    ((const uint8_t *)after)[i]);
		IS(!family || result[i] == ((const uint8_t *)before)[i]);
	}
	for (size_t i = 0; i < LENGTH; i++)
		if ((i < at || i >= at + len) && memory[i] != canary)
			die("op %d on datatype %d has changed byte %zd beside the elements", op, type, (ssize_t)i - (ssize_t)at);
	for (size_t i = family ? len : 0; i < sizeof result; i++)
		IS(result[i] == canary);
	v->done++;
}

static void invalid(struct values *v, int family, enum fi_op op, enum fi_datatype type)
{
	struct fi_atomic_attr attr;
	uint8_t bytes[128] = { 0 };
	size_t most;

	RETURNS(fi_query_atomic(v->side->domain, type, op, &attr, family == 0 ? 0 : family == 1 ? FI_FETCH_ATOMIC : FI_COMPARE_ATOMIC),
		-FI_EOPNOTSUPP);
	RETURNS(family == 0 ? fi_atomicvalid(v->side->ep, type, op, &most) :
		family == 1 ? fi_fetch_atomicvalid(v->side->ep, type, op, &most) :
			      fi_compare_atomicvalid(v->side->ep, type, op, &most),
		-FI_EOPNOTSUPP);
	if (family == 0)
		RETURNS(fi_atomic(v->side->ep, bytes, 1, NULL, v->to, 0, KEY, type, op, NULL), -FI_EOPNOTSUPP);
}

/* Checks an operation whose new value is `expression` of t, x and c. */
#define EACH(family, op, expression)                                                                                 \
	do {                                                                                                         \
		for (int i = 0; i < ELEMENTS; i++) {                                                                 \
			t = before[i], x = operand[i], c = compare[i];                                               \
			after[i] = (expression);                                                                     \
		}                                                                                                    \
		one(v, family, op, type, sizeof t, used, before, operand, compare, after);                           \
	} while (0)
#define BOTH(op, expression)                                                                                         \
	do {                                                                                                         \
		EACH(0, op, expression);                                                                             \
		EACH(1, op, expression);                                                                             \
	} while (0)

#define PREPARE(type_of, made)                                                                                       \
	type_of before[ELEMENTS], operand[ELEMENTS], compare[ELEMENTS], after[ELEMENTS], t, x, c;                    \
	memset(before, 0, sizeof before), memset(operand, 0, sizeof operand);                                        \
	memset(compare, 0, sizeof compare), memset(after, 0, sizeof after);                                          \
	for (int i = 0; i < ELEMENTS; i++) {                                                                         \
		uint64_t r = mixed(v->seed * 3 + (unsigned)i);                                                       \
		before[i] = (type_of)(made), r >>= 16;                                                               \
		operand[i] = (type_of)(made), r >>= 16;                                                              \
		compare[i] = i == 1 ? before[i] : (type_of)(made);                                                   \
	}

#define ARITHMETIC()                                                                                                 \
	BOTH(FI_SUM, t + x);                                                                                         \
	BOTH(FI_PROD, t *x);                                                                                         \
	BOTH(FI_LOR, t != 0 || x != 0);                                                                              \
	BOTH(FI_LAND, t != 0 && x != 0);                                                                             \
	BOTH(FI_LXOR, (t != 0) != (x != 0));                                                                         \
	BOTH(FI_ATOMIC_WRITE, x);                                                                                    \
	EACH(1, FI_ATOMIC_READ, t);                                                                                  \
	EACH(2, FI_CSWAP, c == t ? x : t);                                                                           \
	EACH(2, FI_CSWAP_NE, c != t ? x : t);                                                                        \
	invalid(v, 0, FI_ATOMIC_READ, type);                                                                         \
	invalid(v, 0, FI_CSWAP, type);                                                                               \
	invalid(v, 2, FI_SUM, type)
#define ORDERED()                                                                                                    \
	BOTH(FI_MIN, x < t ? x : t);                                                                                 \
	BOTH(FI_MAX, x > t ? x : t);                                                                                 \
	EACH(2, FI_CSWAP_LE, c <= t ? x : t);                                                                        \
	EACH(2, FI_CSWAP_LT, c < t ? x : t);                                                                         \
	EACH(2, FI_CSWAP_GE, c >= t ? x : t);                                                                        \
	EACH(2, FI_CSWAP_GT, c > t ? x : t)
#define BITS()                                                                                                       \
	BOTH(FI_BOR, t | x);                                                                                         \
	BOTH(FI_BAND, t &x);                                                                                         \
	BOTH(FI_BXOR, t ^ x);                                                                                        \
	EACH(2, FI_MSWAP, (x & c) | (t & ~c))
#define NO_BITS()                                                                                                    \
	invalid(v, 0, FI_BOR, type);                                                                                 \
	invalid(v, 1, FI_BXOR, type);                                                                                \
	invalid(v, 2, FI_MSWAP, type)
#define NO_ORDER()                                                                                                   \
	invalid(v, 0, FI_MIN, type);                                                                                 \
	invalid(v, 1, FI_MAX, type);                                                                                 \
	invalid(v, 2, FI_CSWAP_LE, type)

#define INTEGER(type_of, number)                                                                                     \
	static void number##_values(struct values *v)                                                                \
	{                                                                                                            \
		enum fi_datatype type = number;                                                                      \
		size_t used = sizeof(type_of);                                                                       \
		PREPARE(type_of, r)                                                                                  \
		ARITHMETIC();                                                                                        \
		ORDERED();                                                                                           \
		BITS();                                                                                              \
	}
#define REAL(type_of, number, bytes)                                                                                 \
	static void number##_values(struct values *v)                                                                \
	{                                                                                                            \
		enum fi_datatype type = number;                                                                      \
		size_t used = (bytes);                                                                               \
		PREPARE(type_of, ((int16_t)r) / (type_of)16)                                                         \
		ARITHMETIC();                                                                                        \
		ORDERED();                                                                                           \
		NO_BITS();                                                                                           \
	}
#define COMPLEX(type_of, number, bytes)                                                                              \
	static void number##_values(struct values *v)                                                                \
	{                                                                                                            \
		enum fi_datatype type = number;                                                                      \
		size_t used = (bytes);                                                                               \
		PREPARE(type_of, (int8_t)r + (int8_t)(r >> 8) * (type_of)I)                                          \
		ARITHMETIC();                                                                                        \
		NO_ORDER();                                                                                          \
		NO_BITS();                                                                                           \
	}

INTEGER(int8_t, FI_INT8)
INTEGER(uint8_t, FI_UINT8)
INTEGER(int16_t, FI_INT16)
INTEGER(uint16_t, FI_UINT16)
INTEGER(uint32_t, FI_UINT32)
INTEGER(uint64_t, FI_UINT64)
INTEGER(uint128, FI_UINT128)
REAL(float, FI_FLOAT, sizeof(float))
REAL(double, FI_DOUBLE, sizeof(double))
REAL(long_double, FI_LONG_DOUBLE, 10)
COMPLEX(float_complex, FI_FLOAT_COMPLEX, sizeof(float_complex))
COMPLEX(double_complex, FI_DOUBLE_COMPLEX, sizeof(double_complex))
COMPLEX(long_double_complex, FI_LONG_DOUBLE_COMPLEX, 10)
/* without overflow, which C leaves undefined */
#define SMALL(type_of, number)                                                                                       \
	static void number##_values(struct values *v)                                                                \
	{                                                                                                            \
		enum fi_datatype type = number;                                                                      \
		size_t used = sizeof(type_of);                                                                       \
		PREPARE(type_of, (int16_t)r / 2)                                                                     \
		ARITHMETIC();                                                                                        \
		ORDERED();                                                                                           \
		BITS();                                                                                              \
	}
SMALL(int32_t, FI_INT32)
SMALL(int64_t, FI_INT64)
SMALL(int128, FI_INT128)

static void compute(int place)
{
	struct side side;
	struct values v = { .side = &side };

	open_atomic(&side, place);
	v.to = address(&side, TARGET);
	for (int round = 0; round < 8; round++) {
		FI_INT8_values(&v);
		FI_UINT8_values(&v);
		FI_INT16_values(&v);
		FI_UINT16_values(&v);
		FI_INT32_values(&v);
		FI_UINT32_values(&v);
		FI_INT64_values(&v);
		FI_UINT64_values(&v);
		FI_INT128_values(&v);
		FI_UINT128_values(&v);
		FI_FLOAT_values(&v);
		FI_DOUBLE_values(&v);
		FI_LONG_DOUBLE_values(&v);
		FI_FLOAT_COMPLEX_values(&v);
		FI_DOUBLE_COMPLEX_values(&v);
		FI_LONG_DOUBLE_COMPLEX_values(&v);
	}
	IS(v.done > 2000);
	add(DONE);
	close_side(&side);
}

static void values(void) { with_target(compute, 1); }

/* ---- forms ---- */

static uint32_t *words(void) { return (uint32_t *)(void *)memory; }

static void fails(struct side *side, int error)
{
	struct fi_cq_err_entry entry = { 0 };
	struct fi_cq_tagged_entry none;
	ssize_t got;

	UNTIL((got = fi_cq_read(side->tx, &none, 1)) != -FI_EAGAIN, (void)0);
	IS(got == -FI_EAVAIL);
	IS(fi_cq_readerr(side->tx, &entry, 0) == 1);
	if (entry.err != error)
		die("the error is %s", fi_strerror(entry.err));
	IS(entry.flags & FI_ATOMIC);
}

/* Ranges in several places: one entry for each call. The members of the operands, the results and
 * the target divide the elements in different ways. */
static void in_places(struct side *side, const struct fi_msg_atomic *of, struct fid_cntr *wrote, struct fid_cntr *read)
{
	enum { FIRST = 1024, SECOND = 2001, LAST = 40 }; /* words; the third range is before the first */
	static const size_t at[6] = { FIRST, FIRST + 1, SECOND, LAST, LAST + 1, LAST + 2 };
	uint32_t operand[6] = { 1, 2, 3, 4, 5, 6 }, compare[6], result[6] = { 0 };
	struct fi_ioc iov[2] = { { operand, 4 }, { operand + 4, 2 } }, into[3] = { { result, 1 }, { result + 1, 3 }, { result + 4, 2 } };
	struct fi_ioc with[2] = { { compare, 5 }, { compare + 5, 1 } };
	struct fi_rma_ioc there[4] = { { 4 * FIRST, 2, KEY }, { 4 * SECOND, 1, KEY }, { 0, 0, 0 }, { 4 * LAST, 3, KEY } };
	struct fi_msg_atomic msg = *of;
	uint64_t counted[2] = { fi_cntr_read(wrote), fi_cntr_read(read) };

	msg.msg_iov = iov;
	msg.iov_count = 2;
	msg.rma_iov = there;
	msg.rma_iov_count = 4;
	msg.op = FI_SUM;
	POST(side, fi_atomicmsg(side->ep, &msg, FI_COMPLETION));
	completes(side, FI_WRITE, msg.context);
	for (uint32_t i = 0; i < 6; i++)
		IS(words()[at[i]] == i + 1);
	POST(side, fi_fetch_atomicmsg(side->ep, &msg, into, NULL, 3, FI_COMPLETION));
	completes(side, FI_READ, msg.context);
	for (uint32_t i = 0; i < 6; i++) {
		IS(result[i] == i + 1 && words()[at[i]] == 2 * (i + 1));
		compare[i] = i % 2 ? 99 : 2 * (i + 1);
	}
	msg.op = FI_CSWAP;
	POST(side, fi_compare_atomicmsg(side->ep, &msg, with, NULL, 2, into, NULL, 3, FI_COMPLETION));
	completes(side, FI_READ, msg.context);
	for (uint32_t i = 0; i < 6; i++)
		IS(result[i] == 2 * (i + 1) && words()[at[i]] == (i % 2 ? 2 * (i + 1) : i + 1));
	IS(words()[FIRST - 1] == 0 && words()[FIRST + 2] == 0 && words()[SECOND - 1] == 0 && words()[SECOND + 1] == 0);
	IS(words()[LAST - 1] == 0 && words()[LAST + 3] == 0);
	/* each call counts once; no entry is left */
	UNTIL(fi_cntr_read(wrote) == counted[0] + 1 && fi_cntr_read(read) == counted[1] + 2, progress(side));
	IS(fi_cq_read(side->tx, NULL, 0) == -FI_EAGAIN);
	/* one range is refused: one error entry */
	msg.op = FI_SUM;
	for (int bad = 0; bad < 4; bad++) {
		struct fi_rma_ioc wrong[4];

		if (bad == 2)
			continue; /* has no elements */
		memcpy(wrong, there, sizeof wrong);
		wrong[bad].addr = LENGTH - 2;
		POST(side, fi_atomicmsg(side->ep, &(struct fi_msg_atomic){ .msg_iov = iov, .iov_count = 2, .addr = msg.addr, .rma_iov = wrong,
			.rma_iov_count = 4, .datatype = FI_UINT32, .op = FI_SUM, .context = msg.context }, FI_COMPLETION));
		fails(side, FI_EACCES);
	}
	IS(fi_cq_read(side->tx, NULL, 0) == -FI_EAGAIN);
	IS(fi_cntr_readerr(wrote) == 3 && fi_cntr_read(wrote) == counted[0] + 1);
}

static void each_form(int place)
{
	struct side side;
	uint32_t operand[5] = { 1, 2, 3, 4, 5 }, compare[5] = { 0 }, result[5] = { 0 };
	struct fi_ioc iov[2] = { { operand, 2 }, { operand + 2, 3 } }, into[3] = { { result, 1 }, { result + 1, 0 }, { result + 1, 4 } };
	struct fi_ioc with[2] = { { compare, 4 }, { compare + 4, 1 } };
	struct fi_rma_ioc there = { .addr = 4, .count = 5, .key = KEY }, parts[3] = { { 4, 2, KEY }, { 0, 0, 0 }, { 12, 3, KEY } };
	struct fi_msg_atomic msg = { .msg_iov = iov, .iov_count = 2, .rma_iov = &there, .rma_iov_count = 1,
				     .datatype = FI_UINT32, .op = FI_SUM, .context = &msg };
	struct fid_cntr *wrote, *read;
	void *bytes = NULL;

	wanted.caps = FI_MSG | FI_ATOMIC;
	open_domain_of(&side);
	side.tx = queue(&side, 0);
	side.rx = queue(&side, 0);
	wrote = counter(&side);
	read = counter(&side);
	MUST(fi_endpoint(side.domain, side.info, &side.ep, NULL));
	MUST(fi_ep_bind(side.ep, &side.av->fid, 0));
	MUST(fi_ep_bind(side.ep, &side.tx->fid, FI_TRANSMIT));
	MUST(fi_ep_bind(side.ep, &side.rx->fid, FI_RECV));
	MUST(fi_ep_bind(side.ep, &wrote->fid, FI_WRITE));
	MUST(fi_ep_bind(side.ep, &read->fid, FI_READ));
	MUST(fi_enable(side.ep));
	publish(side.ep, place);
	msg.addr = address(&side, TARGET);

	POST(&side, fi_atomicv(side.ep, iov, NULL, 2, msg.addr, 4, KEY, FI_UINT32, FI_SUM, &msg));
	completes(&side, FI_WRITE, &msg);
	for (uint32_t i = 0; i < 5; i++)
		IS(words()[1 + i] == i + 1);
	POST(&side, fi_atomicmsg(side.ep, &msg, FI_COMPLETION | FI_DELIVERY_COMPLETE));
	completes(&side, FI_WRITE, &msg);
	for (uint32_t i = 0; i < 5; i++)
		IS(words()[1 + i] == 2 * (i + 1));
	POST(&side, fi_fetch_atomicv(side.ep, iov, NULL, 2, into, NULL, 3, msg.addr, 4, KEY, FI_UINT32, FI_SUM, &msg));
	completes(&side, FI_READ, &msg);
	for (uint32_t i = 0; i < 5; i++)
		IS(result[i] == 2 * (i + 1) && words()[1 + i] == 3 * (i + 1));
	/* ranges that follow each other */
	msg.rma_iov = parts;
	msg.rma_iov_count = 3;
	POST(&side, fi_fetch_atomicmsg(side.ep, &msg, into, NULL, 3, 0));
	completes(&side, FI_READ, &msg);
	for (uint32_t i = 0; i < 5; i++)
		IS(result[i] == 3 * (i + 1) && words()[1 + i] == 4 * (i + 1));
	for (uint32_t i = 0; i < 5; i++)
		compare[i] = i == 1 ? 99 : 4 * (i + 1);
	in_places(&side, &msg, wrote, read);
	msg.rma_iov = &there;
	msg.rma_iov_count = 1;
	POST(&side, fi_compare_atomicv(side.ep, iov, NULL, 2, with, NULL, 2, into, NULL, 3, msg.addr, 4, KEY, FI_UINT32, FI_CSWAP, &msg));
	completes(&side, FI_READ, &msg);
	for (uint32_t i = 0; i < 5; i++)
		IS(result[i] == 4 * (i + 1) && words()[1 + i] == (i == 1 ? 8 : i + 1));
	msg.op = FI_CSWAP_NE;
	POST(&side, fi_compare_atomicmsg(side.ep, &msg, with, NULL, 2, into, NULL, 3, FI_INJECT));
	completes(&side, FI_READ, &msg);
	for (uint32_t i = 0; i < 5; i++)
		IS(words()[1 + i] == i + 1);
	/* a read has no operands; a fetch can have none of a descriptor */
	POST(&side, fi_fetch_atomic(side.ep, bytes, 5, NULL, result, NULL, msg.addr, 4, KEY, FI_UINT32, FI_ATOMIC_READ, &msg));
	completes(&side, FI_READ, &msg);
	IS(result[4] == 5);
	/* without an entry; the operand can be changed at once */
	POST(&side, fi_inject_atomic(side.ep, operand, 5, msg.addr, 4, KEY, FI_UINT32, FI_PROD));
	memset(operand, 0, sizeof operand);
	UNTIL(words()[5] == 25 && words()[1] == 1, IS(fi_cq_read(side.tx, NULL, 0) == -FI_EAGAIN));
	IS(words()[0] == 0 && words()[6] == 0);
	UNTIL(fi_cntr_read(wrote) == 4, progress(&side));
	IS(fi_cntr_read(read) == 7);
	MUST(fi_close(&side.ep->fid));
	side.ep = NULL;
	MUST(fi_close(&wrote->fid));
	MUST(fi_close(&read->fid));
	add(DONE);
	close_side(&side);
}

static void forms(void) { with_target(each_form, 1); }

/* ---- sums ---- */

enum { WORD8 = 8, WORD1 = 17, WORD4 = 20, WORD16 = 32, WORD_CAS = 64, WORD_FLOAT = 80 };

/* Posts `count` operations of each kind, of which 32 are under way. */
static void adds_up(int place)
{
	static uint64_t old[64];
	struct side side;
	struct fi_cq_tagged_entry entries[16];
	uint64_t one8 = 1, posted = 0, finished = 0;
	uint8_t one1 = 1;
	uint32_t one4 = 1;
	unsigned __int128 one16 = (unsigned __int128)1 << 60;
	double one_float = 1;
	fi_addr_t to;

	open_atomic(&side, place);
	to = address(&side, TARGET);
	while (finished < 5 * count) {
		if (posted < 5 * count && posted - finished < 32) {
			struct fid_ep *ep = side.ep;
			void *into = &old[posted % 64];
			long done = 0;

			switch (posted % 5) {
			case 0: /* every second one fetches */
				done = posted % 2 ? fi_fetch_atomic(ep, &one8, 1, NULL, into, NULL, to, WORD8, KEY, FI_UINT64, FI_SUM, NULL) :
						    fi_atomic(ep, &one8, 1, NULL, to, WORD8, KEY, FI_INT64, FI_SUM, NULL);
				break;
			case 1:
				done = fi_atomic(ep, &one1, 1, NULL, to, WORD1, KEY, FI_UINT8, FI_SUM, NULL);
				break;
			case 2:
				done = fi_atomic(ep, &one4, 1, NULL, to, WORD4, KEY, FI_INT32, FI_SUM, NULL);
				break;
			case 3:
				done = fi_atomic(ep, &one16, 1, NULL, to, WORD16, KEY, FI_UINT128, FI_SUM, NULL);
				break;
			default:
				done = fi_atomic(ep, &one_float, 1, NULL, to, WORD_FLOAT, KEY, FI_DOUBLE, FI_SUM, NULL);
			}
			if (done == 0)
				posted++;
			else
				IS(done == -FI_EAGAIN);
		}
		finished += take(side.tx, entries, 16);
	}
	/* a loop of compare and swap, by all initiators on the same element */
	for (uint64_t i = 0, seen = 0; i < count / 10; i++)
		for (;;) {
			uint64_t next_value = seen + 1, found;

			POST(&side, fi_compare_atomic(side.ep, &next_value, 1, NULL, &seen, NULL, &found, NULL, to, WORD_CAS, KEY, FI_UINT64,
						      FI_CSWAP, &found));
			completes(&side, FI_READ, &found);
			if (found == seen)
				break;
			seen = found;
		}
	add(DONE);
	close_side(&side);
}

static void sums(void)
{
	uint64_t all;
	unsigned __int128 sum16;
	double sum_float;

	if (!count)
		count = 2000;
	with_target(adds_up, 2);
	memcpy(&all, memory + WORD8, 8);
	IS(all == 2 * count);
	IS(memory[WORD1] == (uint8_t)(2 * count) && memory[WORD1 + 1] == 0 && memory[WORD1 - 1] == 0);
	IS(words()[WORD4 / 4] == (uint32_t)(2 * count));
	memcpy(&sum16, memory + WORD16, 16);
	IS(sum16 == ((unsigned __int128)(2 * count)) << 60);
	memcpy(&sum_float, memory + WORD_FLOAT, 8);
	IS(sum_float == (double)(2 * count));
	memcpy(&all, memory + WORD_CAS, 8);
	IS(all == 2 * (count / 10));
}

/* ---- neighbours ---- */

/* Elements of 1, 2 and 4 bytes; the last 4 bytes of the region. The byte before and behind each of
 * them is the processor's. */
static const size_t places[] = { 101, 110, 120, LENGTH - 4 };
static const size_t sizes[] = { 1, 2, 4, 4 };

static void increment(int argument)
{
	volatile uint8_t *bytes = memory;
	uint8_t expected = 0;

	(void)argument;
	while (!told(DONE)) {
		for (size_t i = 0; i < 4; i++) {
			bytes[places[i] - 1]++;
			if (places[i] + sizes[i] < LENGTH)
				bytes[places[i] + sizes[i]]++;
		}
		expected++;
		for (size_t i = 0; i < 4; i++) {
			IS(bytes[places[i] - 1] == expected);
			IS(places[i] + sizes[i] == LENGTH || bytes[places[i] + sizes[i]] == expected);
		}
	}
	add(READY);
}

static void beside(int place)
{
	static const enum fi_datatype types[] = { FI_UINT8, FI_UINT16, FI_UINT32, FI_UINT32 };
	struct side side;
	uint32_t one_more = 1, old;
	fi_addr_t to;

	open_atomic(&side, place);
	to = address(&side, TARGET);
	for (uint32_t i = 0; i < count; i++)
		for (size_t j = 0; j < 4; j++) {
			old = 0;
			POST(&side, fi_fetch_atomic(side.ep, &one_more, 1, NULL, &old, NULL, to, places[j], KEY, types[j], FI_SUM, &old));
			completes(&side, FI_READ, &old);
			IS(old == (sizes[j] == 4 ? i : i & ((1u << 8 * sizes[j]) - 1)));
		}
	add(DONE);
	close_side(&side);
}

static void neighbours(void)
{
	if (!count)
		count = 3000;
	map_memory();
	start("processor", increment, 0);
	with_target(beside, 1);
	one_ends();
	IS(told(READY));
}

/* ---- refused ---- */

static void ask(int place)
{
	struct side side;
	uint64_t operand[300] = { 1 }, result[300];
	struct fi_rma_ioc five[5] = { { 0, 1, KEY }, { 16, 0, KEY }, { 32, 0, KEY }, { 48, 0, KEY }, { 64, 1, KEY } };
	struct fi_ioc iov = { operand, 2 };
	struct fi_msg_atomic msg = { .msg_iov = &iov, .iov_count = 1, .rma_iov = five, .rma_iov_count = 5, .datatype = FI_UINT64, .op = FI_SUM };
	struct fi_atomic_attr attr;
	struct fid_ep *ep;
	fi_addr_t to;

	open_atomic(&side, place);
	ep = side.ep;
	to = address(&side, TARGET);
	MUST(fi_query_atomic(side.domain, FI_UINT64, FI_SUM, &attr, 0));
	IS(attr.count < 300);
	size_t longest, len = sizeof longest;
	MUST(fi_getopt(&ep->fid, FI_OPT_ENDPOINT, 15 /* FI_OPT_MAX_ATOMIC_SIZE */, &longest, &len));
	IS(longest == attr.count * attr.size);
	MUST(fi_getopt(&ep->fid, FI_OPT_ENDPOINT, 19 /* FI_OPT_INJECT_ATOMIC_SIZE */, &longest, &len));
	IS(longest == attr.count * attr.size);
	RETURNS(fi_atomic(ep, operand, attr.count + 1, NULL, to, 0, KEY, FI_UINT64, FI_SUM, NULL), -FI_EMSGSIZE);
	RETURNS(fi_atomic(ep, operand, 0, NULL, to, 0, KEY, FI_UINT64, FI_SUM, NULL), -FI_EINVAL);
	RETURNS(fi_atomic(ep, NULL, 1, NULL, to, 0, KEY, FI_UINT64, FI_SUM, NULL), -FI_EINVAL);
	RETURNS(fi_fetch_atomic(ep, operand, 1, NULL, NULL, NULL, to, 0, KEY, FI_UINT64, FI_SUM, NULL), -FI_EINVAL);
	RETURNS(fi_atomic(ep, operand, 1, NULL, to + 5, 0, KEY, FI_UINT64, FI_SUM, NULL), -FI_EINVAL);
	msg.addr = to;
	RETURNS(fi_atomicmsg(ep, &msg, 0), -FI_EINVAL); /* more members than rma_iov_limit */
	msg.rma_iov_count = 4;
	RETURNS(fi_atomicmsg(ep, &msg, 0), -FI_EINVAL); /* fewer elements than operands */
	RETURNS(fi_atomicmsg(ep, &msg, FI_REMOTE_CQ_DATA), -FI_EBADFLAGS);
	RETURNS(fi_query_atomic(side.domain, FI_UINT64, FI_SUM, &attr, FI_TAGGED), -FI_EOPNOTSUPP);
	/* libfabric 2.0 has names for these numbers, 1.17, for which the domain is opened, has none */
	for (int datatype = FI_UINT128 + 1; datatype < FI_UINT128 + 5; datatype++) {
		RETURNS(fi_query_atomic(side.domain, (enum fi_datatype)datatype, FI_SUM, &attr, 0), -FI_EOPNOTSUPP);
		RETURNS(fi_atomicvalid(ep, (enum fi_datatype)datatype, FI_SUM, &attr.count), -FI_EOPNOTSUPP);
		RETURNS(fi_atomic(ep, operand, 1, NULL, to, 0, KEY, (enum fi_datatype)datatype, FI_SUM, NULL), -FI_EOPNOTSUPP);
	}
	RETURNS(fi_query_atomic(side.domain, FI_UINT64, (enum fi_op)(FI_MSWAP + 1), &attr, 0), -FI_EOPNOTSUPP);
	MUST(fi_query_atomic(side.domain, FI_UINT128, FI_SUM, &attr, 0));
	/* the target refuses these, and the link is as before */
	for (int round = 0; round < 3; round++) {
		POST(&side, fi_atomic(ep, operand, 1, NULL, to, 0, KEY + 1, FI_UINT64, FI_SUM, NULL));
		fails(&side, FI_EKEYREJECTED);
		POST(&side, fi_atomic(ep, operand, 2, NULL, to, LENGTH - 8, KEY, FI_UINT64, FI_SUM, NULL));
		fails(&side, FI_EACCES);
		POST(&side, fi_fetch_atomic(ep, operand, 1, NULL, result, NULL, to, -8, KEY, FI_UINT64, FI_SUM, NULL));
		fails(&side, FI_EACCES);
		POST(&side, fi_inject_atomic(ep, operand, 1, to, LENGTH, KEY, FI_UINT64, FI_SUM));
		fails(&side, FI_EACCES);
		/* the last bytes of the region */
		POST(&side, fi_fetch_atomic(ep, operand, 1, NULL, result, NULL, to, LENGTH - 4, KEY, FI_UINT32, FI_SUM, &side));
		completes(&side, FI_READ, &side);
		IS((uint32_t)result[0] == (uint32_t)round);
		IS(words()[LENGTH / 4 - 1] == (uint32_t)round + 1 && words()[0] == 0);
	}
	add(DONE);
	close_side(&side);
}

static void refused(void) { with_target(ask, 1); }

/* ---- counted ---- */

/* Counters of the region: a write modifies it, a read does not. */
static void counting_target(int initiators)
{
	struct side side;
	struct fid_mr *mr;
	struct fid_cntr *written, *read;

	wanted.caps = FI_MSG | FI_ATOMIC | FI_RMA_EVENT;
	open_domain_of(&side);
	side.tx = queue(&side, 0);
	side.rx = queue(&side, 0);
	side.ep = endpoint_on(&side, 0);
	written = counter(&side);
	read = counter(&side);
	MUST(fi_mr_reg(side.domain, memory, LENGTH, FI_REMOTE_READ | FI_REMOTE_WRITE, 0, KEY, 0, &mr, NULL));
	MUST(fi_mr_bind(mr, &written->fid, FI_REMOTE_WRITE));
	MUST(fi_mr_bind(mr, &read->fid, FI_REMOTE_READ));
	publish(side.ep, TARGET);
	UNTIL(told(DONE) == (uint64_t)initiators, progress(&side));
	/* counted before the initiators have the results */
	IS(fi_cntr_read(written) == 5 && fi_cntr_read(read) == 3);
	MUST(fi_close(&mr->fid));
	MUST(fi_close(&written->fid));
	MUST(fi_close(&read->fid));
	close_side(&side);
}

static void is_counted(int place)
{
	struct side side;
	uint64_t operand = 1, zero = 0, result, ones[2] = { 1, 1 };
	struct fi_ioc iov = { ones, 2 };
	struct fi_rma_ioc two[2] = { { 64, 1, KEY }, { 128, 1, KEY } };
	struct fi_msg_atomic msg = { .msg_iov = &iov, .iov_count = 1, .rma_iov = two, .rma_iov_count = 2, .datatype = FI_UINT64, .op = FI_SUM };
	fi_addr_t to;

	open_atomic(&side, place);
	to = address(&side, TARGET);
	POST(&side, fi_atomic(side.ep, &operand, 1, NULL, to, 0, KEY, FI_UINT64, FI_SUM, NULL));
	POST(&side, fi_atomic(side.ep, &zero, 1, NULL, to, 0, KEY, FI_UINT64, FI_SUM, NULL));
	POST(&side, fi_fetch_atomic(side.ep, &operand, 1, NULL, &result, NULL, to, 0, KEY, FI_UINT64, FI_SUM, NULL));
	POST(&side, fi_fetch_atomic(side.ep, NULL, 1, NULL, &result, NULL, to, 0, KEY, FI_UINT64, FI_ATOMIC_READ, NULL));
	POST(&side, fi_compare_atomic(side.ep, &operand, 1, NULL, &zero, NULL, &result, NULL, to, 0, KEY, FI_UINT64, FI_CSWAP, NULL));
	operand = 2;
	POST(&side, fi_atomic(side.ep, &operand, 1, NULL, to, 0, KEY, FI_UINT64, FI_ATOMIC_WRITE, NULL));
	/* counters of regions count each range of an atomic, because each may change its elements or
	 * not; those of endpoints count the call */
	msg.addr = to;
	POST(&side, fi_atomicmsg(side.ep, &msg, FI_COMPLETION));
	for (int done = 0; done < 7; done++)
		next(&side, side.tx);
	IS(result == 2);
	add(DONE);
	close_side(&side);
}

static void counted(void)
{
	map_memory();
	start("target", counting_target, 1);
	start("initiator", is_counted, INITIATOR);
	one_ends();
	one_ends();
}

/* ---- fence ---- */

enum { FENCED_LENGTH = 1 << 20, FENCED_KEY = 8, ROUNDS = 50, STEPS = 40 };

static uint8_t *large; /* the target's second region */

/* As `target`, with a region for RMA. */
static void rma_target(int initiators)
{
	struct side side;
	struct fid_mr *mr, *second;

	wanted.caps = FI_MSG | FI_RMA | FI_ATOMIC | FI_FENCE;
	open_domain_of(&side);
	side.tx = queue(&side, 0);
	side.rx = queue(&side, 0);
	side.ep = endpoint_on(&side, 0);
	MUST(fi_mr_reg(side.domain, memory, LENGTH, FI_REMOTE_READ | FI_REMOTE_WRITE, 0, KEY, 0, &mr, NULL));
	MUST(fi_mr_reg(side.domain, large, FENCED_LENGTH, FI_REMOTE_READ | FI_REMOTE_WRITE, 0, FENCED_KEY, 0, &second, NULL));
	publish(side.ep, TARGET);
	UNTIL_WITHIN(100, told(DONE) == (uint64_t)initiators, progress(&side));
	MUST(fi_close(&mr->fid));
	MUST(fi_close(&second->fid));
	close_side(&side);
}

static void take_all(struct side *side, size_t entries)
{
	struct fi_cq_tagged_entry entry[16];

	while (entries) {
		size_t got = 0;

		UNTIL((got = take(side->tx, entry, 16)), (void)0);
		IS(got <= entries);
		entries -= got;
	}
}

static void fences(int place)
{
	static uint8_t bytes[FENCED_LENGTH];
	struct side side;
	uint64_t got, one = 1, last = FENCED_LENGTH - 8;
	fi_addr_t to;

	wanted.caps = FI_MSG | FI_RMA | FI_ATOMIC | FI_FENCE;
	open_side(&side, place);
	to = address(&side, TARGET);
	for (uint64_t round = 1; round <= ROUNDS; round++) {
		struct fi_ioc operand = { &one, 1 }, result = { &got, 1 };
		struct fi_rma_ioc there = { last, 1, FENCED_KEY };
		struct fi_msg_atomic atomic = { .msg_iov = &operand, .iov_count = 1, .addr = to, .rma_iov = &there,
						.rma_iov_count = 1, .datatype = FI_UINT64, .op = FI_ATOMIC_READ };
		struct iovec from = { bytes, 8 };
		struct fi_rma_iov word = { 0, 8, KEY };
		struct fi_msg_rma rma = { .msg_iov = &from, .iov_count = 1, .addr = to, .rma_iov = &word, .rma_iov_count = 1 };
		uint64_t value = round << 32;

		/* an atomic sees the last word of an earlier write */
		memcpy(bytes + last, &round, 8);
		POST(&side, fi_write(side.ep, bytes, FENCED_LENGTH, NULL, to, 0, FENCED_KEY, NULL));
		POST(&side, fi_fetch_atomicmsg(side.ep, &atomic, &result, NULL, 1, FI_FENCE | FI_COMPLETION));
		take_all(&side, 2);
		if (got != round)
			die("round %llu: the fenced read is %llu", (unsigned long long)round, (unsigned long long)got);
		/* one that changes it; operations behind the fence follow: a write, and an atomic */
		memset(bytes + last, 0, 8);
		POST(&side, fi_write(side.ep, bytes, FENCED_LENGTH, NULL, to, 0, FENCED_KEY, NULL));
		atomic.op = FI_SUM;
		POST(&side, fi_atomicmsg(side.ep, &atomic, FI_FENCE | FI_COMPLETION));
		POST(&side, fi_read(side.ep, bytes + last, 8, NULL, to, last, FENCED_KEY, NULL));
		POST(&side, fi_fetch_atomic(side.ep, &one, 1, NULL, &got, NULL, to, last, FENCED_KEY, FI_UINT64, FI_ATOMIC_READ, NULL));
		take_all(&side, 4);
		memcpy(&value, bytes + last, 8);
		IS(value == 1 && got == 1);
		/* a fenced write follows earlier atomics, and an atomic behind it follows the write */
		value = round << 32;
		memcpy(bytes, &value, 8);
		for (int i = 0; i < STEPS; i++)
			POST(&side, fi_atomic(side.ep, &one, 1, NULL, to, 0, KEY, FI_UINT64, FI_SUM, NULL));
		POST(&side, fi_writemsg(side.ep, &rma, FI_FENCE | FI_COMPLETION));
		take_all(&side, STEPS + 1);
		memcpy(&got, memory, 8);
		if (got != value)
			die("round %llu: the word is %llx", (unsigned long long)round, (unsigned long long)got);
		POST(&side, fi_atomic(side.ep, &one, 1, NULL, to, 0, KEY, FI_UINT64, FI_SUM, NULL));
		POST(&side, fi_writemsg(side.ep, &rma, FI_FENCE | FI_COMPLETION));
		there = (struct fi_rma_ioc){ 0, 1, KEY };
		atomic.op = FI_ATOMIC_READ;
		POST(&side, fi_fetch_atomicmsg(side.ep, &atomic, &result, NULL, 1, FI_FENCE | FI_COMPLETION));
		take_all(&side, 3);
		IS(got == value);
	}
	add(DONE);
	close_side(&side);
}

static void fence(void)
{
	map_memory();
	large = mmap(NULL, FENCED_LENGTH, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	IS(large != MAP_FAILED);
	start("target", rma_target, 1);
	start("initiator", fences, INITIATOR);
	one_ends();
	one_ends();
}

int main(int argc, char **argv)
{
	static const struct mode modes[] = { { "values", values }, { "forms", forms }, { "sums", sums }, { "neighbours", neighbours }, { "refused", refused }, { "counted", counted }, { "fence", fence } };

	alarm(300);
	if (argc > 1)
		count = strtoull(argv[argc - 1], NULL, 10);
	return run_mode(modes, sizeof modes / sizeof *modes, argc, argv);
}
