/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */
/* Local buffers that the application did not register, and the parameters of registration caches
 * that fi_mr(3) names. */
#include "mr.h"

#define LENGTH (16 * PAGE)

/* The pages of both buffers are replaced between transfers; each transfer moves the bytes of the
 * present pages. */
static void transfers(int rounds)
{
	struct end end = { 0 };
	uint8_t *from = pages(LENGTH, true), *to = pages(LENGTH, true), *into = pages(LENGTH, true);

	if (connected(&end, form_bits())) {
		struct fid_mr *mr = reg(&end, to, LENGTH, REMOTE, 1);

		tell_region(&end, mr, to);
		for (int i = 0; i < rounds; i++) {
			if (i % 3 == 1)
				map_at(into, LENGTH, 0);
			MUST(fi_recv(end.ep, into, LENGTH, NULL, 0, NULL));
			meet();
			IS(completion(&end, SECONDS), 0);
			meet();
			for (size_t n = 0; n < LENGTH && !failures; n++)
				HOLDS(into[n] == (uint8_t)(i + 1) && to[n] == (uint8_t)(i + 1), "round %d, byte %zu: %d, %d", i, n, into[n],
				      to[n]);
			meet();
		}
		MUST(fi_close(&mr->fid));
	} else {
		struct remote remote = hear_region(&end);

		for (int i = 0; i < rounds; i++) {
			if (i % 3 == 2)
				map_at(from, LENGTH, 0);
			memset(from, i + 1, LENGTH);
			meet();
			IS(DO(&end, fi_send(end.ep, from, LENGTH, NULL, 0, NULL)), 0);
			IS(do_write(&end, from, LENGTH, &remote, 0), 0);
			map_at(from, LENGTH, 0);
			IS(do_read(&end, from, LENGTH, &remote, 0), 0);
			HOLDS(from[LENGTH - 1] == (uint8_t)(i + 1), "round %d: read %d", i, from[LENGTH - 1]);
			meet();
			meet();
		}
		forget_region(&end, &remote);
	}
	close_end(&end);
}

static void exchanged_pages(void) { transfers(60); }

/* "Valid monitor options are: userfaultfd, memhooks, [kdreg2] and disabled". */
static void monitor(const char *name)
{
	setenv("FI_MR_CACHE_MONITOR", name, 1);
	transfers(30);
}

static void monitor_userfaultfd(void) { monitor("userfaultfd"); }
static void monitor_memhooks(void) { monitor("memhooks"); }
static void monitor_kdreg2(void) { monitor("kdreg2"); }
static void monitor_disabled(void) { monitor("disabled"); }

/* "Setting this to zero will disable registration caching." */
static void no_registrations_are_kept(void)
{
	setenv("FI_MR_CACHE_MAX_COUNT", "0", 1);
	transfers(30);
}

/* FI_MR_CACHE_MAX_SIZE, FI_MR_CACHE_MAX_COUNT: less than the transfers need. */
static void a_cache_that_is_too_small(void)
{
	setenv("FI_MR_CACHE_MAX_SIZE", "4096", 1);
	setenv("FI_MR_CACHE_MAX_COUNT", "1", 1);
	transfers(30);
}

static const struct test tests[] = {
	CASE(exchanged_pages, "keys native"),
	CASE(monitor_userfaultfd, "native"),
	CASE(monitor_memhooks, "native"),
	CASE(monitor_kdreg2, "native"),
	CASE(monitor_disabled, "native"),
	CASE(no_registrations_are_kept, "native"),
	CASE(a_cache_that_is_too_small, "native"),
	{ 0 },
};
