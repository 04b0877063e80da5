/* What fi_atomic(3) says about each datatype and operation, for rdm_atomic_forms.c. */
#ifndef RDM_ATOMIC_MODEL_H
#define RDM_ATOMIC_MODEL_H

#include "rdm_memory.h"

#include <complex.h>

enum kind { INTEGER, REAL, COMPLEX };

struct type {
	enum fi_datatype type;
	const char *name;
	size_t size;
	enum kind kind;
	/* does the operation at the target */
	void (*apply)(enum fi_op op, void *target, const void *operand, const void *compare);
	bool (*equal)(const void *a, const void *b);
	void (*value)(void *into, uint64_t random);
};

/* Integers wrap: `U` is the unsigned type in which they are computed. */
#define INTEGER_TYPE(name, T, U)                                                                                     \
	static inline void name##_apply(enum fi_op op, void *target, const void *operand, const void *compare)       \
	{                                                                                                            \
		T a, b, c = 0;                                                                                       \
		memcpy(&a, target, sizeof a);                                                                        \
		memcpy(&b, operand, sizeof b);                                                                       \
		if (compare)                                                                                         \
			memcpy(&c, compare, sizeof c);                                                               \
		switch (op) {                                                                                        \
		case FI_BOR: a = (T)(a | b); break;                                                                  \
		case FI_BAND: a = (T)(a & b); break;                                                                 \
		case FI_BXOR: a = (T)(a ^ b); break;                                                                 \
		case FI_MSWAP: a = (T)((b & c) | (a & ~c)); break;                                                   \
		case FI_SUM: a = (T)((U)a + (U)b); break;                                                            \
		case FI_PROD: a = (T)((U)a * (U)b); break;                                                           \
		ORDERED_CASES                                                                                        \
		COMMON_CASES(T)                                                                                      \
		}                                                                                                    \
		memcpy(target, &a, sizeof a);                                                                        \
	}                                                                                                            \
	static inline bool name##_equal(const void *a, const void *b) { return !memcmp(a, b, sizeof(T)); }           \
	static inline void name##_value(void *into, uint64_t random)                                                 \
	{                                                                                                            \
		uint64_t words[2] = { mixed(random), mixed(random + 1) };                                            \
		T value;                                                                                             \
		memcpy(&value, words, sizeof value);                                                                 \
		if (random % 3 == 0)                                                                                 \
			value = (T)(mixed(random) % 3);                                                              \
		memcpy(into, &value, sizeof value);                                                                  \
	}

#define ORDERED_CASES                                                                                                \
	case FI_MIN: a = b < a ? b : a; break;                                                                       \
	case FI_MAX: a = b > a ? b : a; break;                                                                       \
	case FI_CSWAP_LE: a = c <= a ? b : a; break;                                                                 \
	case FI_CSWAP_LT: a = c < a ? b : a; break;                                                                  \
	case FI_CSWAP_GE: a = c >= a ? b : a; break;                                                                 \
	case FI_CSWAP_GT: a = c > a ? b : a; break;

#define COMMON_CASES(T)                                                                                              \
	case FI_LOR: a = (T)(a != 0 || b != 0); break;                                                               \
	case FI_LAND: a = (T)(a != 0 && b != 0); break;                                                              \
	case FI_LXOR: a = (T)((a != 0) != (b != 0)); break;                                                          \
	case FI_ATOMIC_READ: break;                                                                                  \
	case FI_ATOMIC_WRITE: a = b; break;                                                                          \
	case FI_CSWAP: a = c == a ? b : a; break;                                                                    \
	case FI_CSWAP_NE: a = c != a ? b : a; break;                                                                 \
	default: die("operation %d is not defined for this datatype", op);

/* Values whose sums and products are exact. */
#define FLOATING_TYPE(name, T, CASES, IMAGINARY)                                                                     \
	static inline void name##_apply(enum fi_op op, void *target, const void *operand, const void *compare)       \
	{                                                                                                            \
		T a, b, c = 0;                                                                                       \
		memcpy(&a, target, sizeof a);                                                                        \
		memcpy(&b, operand, sizeof b);                                                                       \
		if (compare)                                                                                         \
			memcpy(&c, compare, sizeof c);                                                               \
		switch (op) {                                                                                        \
		case FI_SUM: a = a + b; break;                                                                       \
		case FI_PROD: a = a * b; break;                                                                      \
		CASES                                                                                                \
		COMMON_CASES(T)                                                                                      \
		}                                                                                                    \
		memcpy(target, &a, sizeof a);                                                                        \
	}                                                                                                            \
	static inline bool name##_equal(const void *left, const void *right)                                         \
	{                                                                                                            \
		T a, b;                                                                                              \
		memcpy(&a, left, sizeof a);                                                                          \
		memcpy(&b, right, sizeof b);                                                                         \
		return a == b;                                                                                       \
	}                                                                                                            \
	static inline void name##_value(void *into, uint64_t random)                                                 \
	{                                                                                                            \
		T value = (T)((int)(mixed(random) % 9) - 4) + (T)((int)(mixed(random + 1) % 9) - 4) * IMAGINARY;     \
		memcpy(into, &value, sizeof value);                                                                  \
	}

typedef __int128 int128;
typedef unsigned __int128 uint128;

INTEGER_TYPE(int8, int8_t, uint32_t)
INTEGER_TYPE(uint8, uint8_t, uint32_t)
INTEGER_TYPE(int16, int16_t, uint32_t)
INTEGER_TYPE(uint16, uint16_t, uint32_t)
INTEGER_TYPE(int32, int32_t, uint32_t)
INTEGER_TYPE(uint32, uint32_t, uint32_t)
INTEGER_TYPE(int64, int64_t, uint64_t)
INTEGER_TYPE(uint64, uint64_t, uint64_t)
INTEGER_TYPE(int128, int128, uint128)
INTEGER_TYPE(uint128, uint128, uint128)
FLOATING_TYPE(real32, float, ORDERED_CASES, 0.5f)
FLOATING_TYPE(real64, double, ORDERED_CASES, 0.5)
FLOATING_TYPE(real80, long double, ORDERED_CASES, 0.5L)
FLOATING_TYPE(complex32, float complex, , I)
FLOATING_TYPE(complex64, double complex, , I)
FLOATING_TYPE(complex80, long double complex, , I)

#define TYPE(constant, name, T, kind) { constant, #constant, sizeof(T), kind, name##_apply, name##_equal, name##_value }

static const struct type types[] = {
	TYPE(FI_INT8, int8, int8_t, INTEGER),
	TYPE(FI_UINT8, uint8, uint8_t, INTEGER),
	TYPE(FI_INT16, int16, int16_t, INTEGER),
	TYPE(FI_UINT16, uint16, uint16_t, INTEGER),
	TYPE(FI_INT32, int32, int32_t, INTEGER),
	TYPE(FI_UINT32, uint32, uint32_t, INTEGER),
	TYPE(FI_INT64, int64, int64_t, INTEGER),
	TYPE(FI_UINT64, uint64, uint64_t, INTEGER),
	TYPE(FI_INT128, int128, int128, INTEGER),
	TYPE(FI_UINT128, uint128, uint128, INTEGER),
	TYPE(FI_FLOAT, real32, float, REAL),
	TYPE(FI_DOUBLE, real64, double, REAL),
	TYPE(FI_LONG_DOUBLE, real80, long double, REAL),
	TYPE(FI_FLOAT_COMPLEX, complex32, float complex, COMPLEX),
	TYPE(FI_DOUBLE_COMPLEX, complex64, double complex, COMPLEX),
	TYPE(FI_LONG_DOUBLE_COMPLEX, complex80, long double complex, COMPLEX),
};

enum { TYPES = sizeof types / sizeof *types, BASE = 0, FETCH, COMPARE, FORMS, OPS = FI_MSWAP + 1 };

static const char *const form_names[] = { "base", "fetch", "compare" };
static const char *const op_names[OPS] = {
	[FI_MIN] = "FI_MIN", [FI_MAX] = "FI_MAX", [FI_SUM] = "FI_SUM", [FI_PROD] = "FI_PROD", [FI_LOR] = "FI_LOR", [FI_LAND] = "FI_LAND",
	[FI_BOR] = "FI_BOR", [FI_BAND] = "FI_BAND", [FI_LXOR] = "FI_LXOR", [FI_BXOR] = "FI_BXOR", [FI_ATOMIC_READ] = "FI_ATOMIC_READ",
	[FI_ATOMIC_WRITE] = "FI_ATOMIC_WRITE", [FI_CSWAP] = "FI_CSWAP", [FI_CSWAP_NE] = "FI_CSWAP_NE", [FI_CSWAP_LE] = "FI_CSWAP_LE",
	[FI_CSWAP_LT] = "FI_CSWAP_LT", [FI_CSWAP_GE] = "FI_CSWAP_GE", [FI_CSWAP_GT] = "FI_CSWAP_GT", [FI_MSWAP] = "FI_MSWAP",
};

/* Whether fi_atomic(3) lists the operation for this form, and defines it for this datatype. */
static inline bool is_defined(const struct type *type, int op, int form)
{
	bool bits = op == FI_BOR || op == FI_BAND || op == FI_BXOR || op == FI_MSWAP;
	bool ordered = op == FI_MIN || op == FI_MAX || (op > FI_CSWAP_NE && op < FI_MSWAP);

	if ((op >= FI_CSWAP) != (form == COMPARE) || (op == FI_ATOMIC_READ && form == BASE))
		return false;
	return !(bits && type->kind != INTEGER) && !(ordered && type->kind == COMPLEX);
}

#endif
