/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */
/* Counters and endpoints that regions are bound to; which operations count; enabling; registration
 * in the background. */
#include "mr.h"

#define COUNTED (FI_MSG | FI_RMA | FI_ATOMIC | FI_RMA_EVENT)

static struct fid_cntr *counter(struct end *end)
{
	struct fi_cntr_attr attr = { .events = FI_CNTR_EVENTS_COMP };
	struct fid_cntr *cntr;

	MUST(fi_cntr_open(end->domain, &attr, &cntr, NULL));
	return cntr;
}

static uint64_t reads(struct fid_cntr *cntr, uint64_t want)
{
	double limit = now() + 2;

	while (fi_cntr_read(cntr) < want && now() < limit)
		;
	return fi_cntr_read(cntr);
}

/* The mr_mode of counted regions: the bits of the form, and FI_MR_RMA_EVENT. */
static int with_events(void) { return form_bits() | FI_MR_RMA_EVENT; }

static struct fid_mr *counted(struct end *end, void *buf, size_t len, struct fid_cntr **cntr, const uint64_t *flags,
			      size_t count)
{
	struct fid_mr *mr;

	MUST(fi_mr_reg(end->domain, buf, len, ALL_ACCESS, 0, 3, FI_RMA_EVENT, &mr, NULL));
	for (size_t i = 0; i < count; i++)
		MUST(fi_mr_bind(mr, &cntr[i]->fid, flags[i]));
	if (end->mode & FI_MR_RMA_EVENT)
		MUST(fi_mr_enable(mr));
	return mr;
}

/* "-FI_ENOSYS: Returned by fi_mr_bind if the provider does not support reporting events based on
 * access to registered memory regions"; "-FI_EBADFLAGS: Returned if the specified flags are not
 * supported". */
static void binding_without_events(void)
{
	struct end end = { 0 };
	uint8_t *buffer = pages(PAGE, true);
	struct fid_cntr *cntr;
	struct fid_mr *mr;

	open_end(&end, form_bits());
	cntr = counter(&end);
	mr = reg(&end, buffer, PAGE, ALL_ACCESS, 3);
	IS(fi_mr_bind(mr, &cntr->fid, FI_REMOTE_WRITE), -FI_ENOSYS);
	MUST(fi_close(&cntr->fid));
	MUST(fi_close(&mr->fid));
	IS(fi_mr_reg(end.domain, buffer, PAGE, ALL_ACCESS, 0, 4, FI_RMA_EVENT, &mr, NULL), -FI_EBADFLAGS);
	close_end(&end);
}

/* "Generates an event whenever a remote RMA write or atomic operation modifies the memory
 * region." */
static void what_modifies_is_counted(bool with_bit)
{
	struct end end = { .caps = COUNTED };
	uint64_t *buffer = (uint64_t *)pages(PAGE, true), value = 5, old;

	if (connected(&end, with_bit ? with_events() : form_bits())) {
		struct fid_cntr *cntr = counter(&end);
		struct fid_mr *mr = counted(&end, buffer, PAGE, &cntr, &(uint64_t){ FI_REMOTE_WRITE }, 1);
		/* how much each step adds to the counter; the steps are below */
		static const uint64_t adds[] = { 1, 1, 1, 1, 0, 0, 1, 0, 1 };
		uint64_t sum = 0;

		tell_region(&end, mr, buffer);
		for (size_t i = 0; i < sizeof adds / sizeof *adds; i++) {
			uint64_t got;

			meet();
			sum += adds[i];
			nap(0.02);
			got = reads(cntr, sum);
			HOLDS(got == sum, "step %zu: %" PRIu64 " events, not %" PRIu64, i, got, sum);
			sum = got;
			meet();
		}
		IS(fi_cntr_readerr(cntr), 0);
		MUST(fi_close(&mr->fid));
		MUST(fi_close(&cntr->fid));
	} else {
		struct remote to = hear_region(&end);

		for (int step = 0; step < 9; step++) {
			switch (step) {
			case 0: IS(do_write(&end, &value, 8, &to, 0), 0); break;
			case 1: IS(do_add(&end, 1, &to, 0), 0); break; /* the word becomes 6 */
			/* the word becomes 7 */
			case 2: IS(do_fetch_add(&end, 1, &old, &to, 0), 0); break;
			/* the word becomes 9 */
			case 3: IS(do_swap_if(&end, 9, 7, &old, &to, 0), 0); break;
			case 4: /* a read: no modification */
				IS(do_fetch(&end, &old, &to, 0), 0);
				IS(old, 9);
				break;
			case 5: /* a fetch: no modification */
				IS(do_swap_if(&end, 11, 7, &old, &to, 0), 0);
				IS(old, 9);
				break;
			case 6:
				IS(fi_inject_write(end.ep, &value, 8, 0, to.addr + 8, to.key), 0);
				IS(do_read(&end, &old, 8, &to, 0), 0);
				break;
			case 7: IS(do_read(&end, &old, 8, &to, 0), 0); break;
			case 8: IS(do_write(&end, &value, 8, &to, 16), 0); break;
			}
			meet();
			meet();
		}
		forget_region(&end, &to);
	}
	close_end(&end);
}

static void what_modifies_is_counted_enabled(void) { what_modifies_is_counted(true); }
static void what_modifies_is_counted_at_once(void) { what_modifies_is_counted(false); }

/* "must be associated with all completion counters prior to being enabled": several counters, each
 * of which counts. */
static void several_counters(void)
{
	struct end end = { .caps = COUNTED };
	uint64_t *buffer = (uint64_t *)pages(PAGE, true), value = 5;

	if (connected(&end, with_events())) {
		struct fid_cntr *cntrs[2] = { counter(&end), counter(&end) };
		struct fid_mr *mr, *other;

		mr = counted(&end, buffer, PAGE / 2, cntrs, (uint64_t[]){ FI_REMOTE_WRITE, FI_REMOTE_READ }, 2);
		/* one counter bound to two regions */
		MUST(fi_mr_reg(end.domain, buffer + 256, PAGE / 2, ALL_ACCESS, 0, 4, FI_RMA_EVENT, &other, NULL));
		MUST(fi_mr_bind(other, &cntrs[0]->fid, FI_REMOTE_WRITE));
		if (end.mode & FI_MR_RMA_EVENT) {
			IS(fi_mr_enable(other), 0);
			/* "After calling fi_mr_enable(), no further resource bindings may be
			 * made" */
			HOLDS(fi_mr_bind(other, &cntrs[1]->fid, FI_REMOTE_READ) < 0, "bound behind fi_mr_enable");
		}
		tell_region(&end, mr, buffer);
		tell_region(&end, other, buffer + 256);
		meet();
		IS(reads(cntrs[0], 5), 5);
		IS(reads(cntrs[1], 4), 4);
		MUST(fi_close(&mr->fid));
		MUST(fi_close(&other->fid));
		MUST(fi_close(&cntrs[0]->fid));
		MUST(fi_close(&cntrs[1]->fid));
	} else {
		struct remote to = hear_region(&end), other = hear_region(&end);

		for (int i = 0; i < 3; i++)
			IS(do_write(&end, &value, 8, &to, 0), 0);
		for (int i = 0; i < 4; i++)
			IS(do_read(&end, &value, 8, &to, 0), 0);
		for (int i = 0; i < 2; i++)
			IS(do_write(&end, &value, 8, &other, 0), 0);
		meet();
		forget_region(&end, &to);
		forget_region(&end, &other);
	}
	close_end(&end);
}

/* "Memory regions created in the disabled state must be explicitly enabled": before that, a peer's
 * access fails. */
static void disabled_until_enabled(int bit)
{
	struct end end = { .caps = COUNTED };
	uint64_t *buffer = (uint64_t *)pages(PAGE, true), value = 5;

	if (connected(&end, form_bits() | bit)) {
		struct fid_cntr *cntr = counter(&end);
		struct fid_mr *mr;
		struct remote guess;

		if (!(end.mode & bit))
			die("mr_mode 0x%x", end.mode);
		MUST(fi_mr_reg(end.domain, buffer, PAGE, ALL_ACCESS, 0, 3, bit == FI_MR_RMA_EVENT ? FI_RMA_EVENT : 0, &mr, NULL));
		/* the peer uses the requested key before fi_mr_enable */
		guess = (struct remote){ .addr = end.mode & FI_MR_VIRT_ADDR ? (uintptr_t)buffer : 0, .key = 3 };
		tell(&guess, sizeof guess);
		meet();
		IS(buffer[0], 0);
		if (bit == FI_MR_ENDPOINT)
			MUST(fi_mr_bind(mr, &end.ep->fid, 0));
		else
			MUST(fi_mr_bind(mr, &cntr->fid, FI_REMOTE_WRITE));
		meet();
		meet();
		IS(buffer[0], 0);
		MUST(fi_mr_enable(mr));
		HOLDS(fi_mr_enable(mr) < 0, "enabled twice");
		tell_region(&end, mr, buffer);
		meet();
		IS(buffer[0], 5);
		if (bit == FI_MR_RMA_EVENT)
			IS(reads(cntr, 1), 1);
		MUST(fi_close(&mr->fid));
		MUST(fi_close(&cntr->fid));
	} else {
		struct remote to;

		hear(&to, sizeof to);
		if (!(end.mode & FI_MR_PROV_KEY))
			HOLDS(do_write(&end, &value, 8, &to, 0) > 0, "a disabled region is written to");
		meet();
		meet();
		if (!(end.mode & FI_MR_PROV_KEY))
			HOLDS(do_write(&end, &value, 8, &to, 0) > 0, "a bound, disabled region is written to");
		meet();
		to = hear_region(&end);
		IS(do_write(&end, &value, 8, &to, 0), 0);
		meet();
		forget_region(&end, &to);
	}
	close_end(&end);
}

static void disabled_until_enabled_counted(void) { disabled_until_enabled(FI_MR_RMA_EVENT); }
static void disabled_until_enabled_of_an_endpoint(void) { disabled_until_enabled(FI_MR_ENDPOINT); }

/* FI_MR_ENDPOINT: "bound to an endpoint"; an access through another endpoint of the domain
 * fails. */
static void regions_of_one_endpoint(void)
{
	struct end end = { 0 };
	uint64_t *buffer = (uint64_t *)pages(PAGE, true), value = 5;

	if (connected(&end, form_bits() | FI_MR_ENDPOINT)) {
		struct fid_ep *second = connect_more(&end, true);
		struct fid_mr *mr = reg(&end, buffer, PAGE, ALL_ACCESS, 3);

		if (!(end.mode & FI_MR_ENDPOINT))
			die("mr_mode 0x%x", end.mode);
		HOLDS(fi_mr_enable(mr) < 0, "enabled before it is bound");
		HOLDS(fi_mr_bind(mr, &end.ep->fid, FI_REMOTE_WRITE) < 0, "\"flags should be 0\"");
		MUST(fi_mr_bind(mr, &end.ep->fid, 0));
		MUST(fi_mr_enable(mr));
		HOLDS(fi_mr_bind(mr, &second->fid, 0) < 0, "bound behind fi_mr_enable");
		tell_region(&end, mr, buffer);
		meet();
		IS(buffer[0], 5);
		IS(buffer[1], 0);
		/* "the MR must be closed before the endpoint" */
		IS(fi_close(&end.ep->fid), -FI_EBUSY);
		MUST(fi_close(&mr->fid));
		MUST(fi_close(&second->fid));
	} else {
		struct fid_ep *first = end.ep, *second = connect_more(&end, false);
		struct remote to = hear_region(&end);

		IS(do_write(&end, &value, 8, &to, 0), 0);
		end.ep = second;
		HOLDS(do_write(&end, &value, 8, &to, 8) > 0, "reached through another endpoint");
		end.ep = first;
		meet();
		forget_region(&end, &to);
		MUST(fi_close(&second->fid));
	}
	close_end(&end);
}

/* "there must be no opened endpoints or counters associated with the MR. If resources are still
 * associated with the MR when attempting to close, the call will return -FI_EBUSY": read together
 * with the current page, the counter cannot be closed before the region. */
static void what_is_bound_stays(void)
{
	struct end end = { .caps = COUNTED };
	uint64_t *buffer = (uint64_t *)pages(PAGE, true);
	struct fid_cntr *cntr;
	struct fid_mr *mr;

	open_end(&end, with_events());
	cntr = counter(&end);
	mr = counted(&end, buffer, PAGE, &cntr, &(uint64_t){ FI_REMOTE_WRITE }, 1);
	IS(fi_close(&cntr->fid), -FI_EBUSY);
	IS(fi_cntr_read(cntr), 0);
	IS(fi_close(&end.domain->fid), -FI_EBUSY);
	MUST(fi_close(&mr->fid));
	MUST(fi_close(&cntr->fid));
	close_end(&end);
}

/* Background registration: the variable is written before the event can be read; the event has
 * context and region; a call that fails has no event. A region closed before its event was read has
 * none either. */
static void registration_in_the_background(void)
{
	enum { REGIONS = 200 };
	struct end end = { 0 };
	uint8_t *buffer = pages(REGIONS * PAGE, true);
	struct fi_eq_attr eq_attr = { .wait_obj = FI_WAIT_UNSPEC };
	struct fid_mr *mrs[REGIONS] = { NULL };
	struct fi_eq_entry entry;
	struct fid_eq *eq;
	uint32_t kind;
	int count = 0;

	open_end(&end, form_bits());
	MUST(fi_eq_open(end.fabric, &eq_attr, &eq, NULL));
	MUST(fi_domain_bind(end.domain, &eq->fid, FI_REG_MR));
	for (int i = 0; i < REGIONS; i++) {
		struct fid_mr *none = NULL;

		MUST(fi_mr_reg(end.domain, buffer + (size_t)i * PAGE, PAGE, ALL_ACCESS, 0, (uint64_t)i, 0, &mrs[i], &mrs[i]));
		/* wrong calls in between */
		HOLDS(fi_mr_reg(end.domain, buffer, 0, ALL_ACCESS, 0, 9999, 0, &none, &none) < 0, "no bytes");
		HOLDS(!none, "a call that failed wrote mr");
		if (i % 4 == 3) {
			MUST(fi_close(&mrs[i]->fid));
			mrs[i] = NULL;
		}
	}
	for (int left = REGIONS; left--;) {
		ssize_t got = fi_eq_sread(eq, &kind, &entry, sizeof entry, left < 60 ? 300 : 5000, 0);
		struct fid_mr **at = entry.context;

		if (got == -FI_EAGAIN)
			break;
		MUST(got);
		IS(kind, FI_MR_COMPLETE);
		if (at < mrs || at >= mrs + REGIONS)
			die("not the context of a registration");
		if (!*at)
			continue; /* closed above: its event is not counted */
		HOLDS(entry.fid == &(*at)->fid, "the event of another region");
		count++;
	}
	IS(count, REGIONS * 3 / 4);
	for (int i = 0; i < REGIONS; i++)
		if (mrs[i])
			MUST(fi_close(&mrs[i]->fid));
	MUST(fi_close(&end.cq->fid));
	MUST(fi_close(&end.domain->fid));
	MUST(fi_close(&eq->fid));
}

/* A background registration that fails after the call returned 0 is an error entry. */
static void failing_in_the_background(void)
{
	struct end end = { 0 };
	uint8_t *hole = pages(PAGE, false);
	struct fi_eq_attr eq_attr = { .wait_obj = FI_WAIT_UNSPEC };
	struct fi_eq_err_entry error = { 0 };
	struct fi_eq_entry entry;
	struct fid_mr *mr = NULL;
	struct fid_eq *eq;
	uint32_t kind;
	int ret;

	open_end(&end, form_bits());
	if (!(end.mode & FI_MR_ALLOCATED))
		skip("nothing fails here");
	MUST(fi_eq_open(end.fabric, &eq_attr, &eq, NULL));
	MUST(fi_domain_bind(end.domain, &eq->fid, FI_REG_MR));
	ret = fi_mr_reg(end.domain, hole, PAGE, ALL_ACCESS, 0, 1, 0, &mr, &mr);
	if (ret) {
		IS(fi_eq_sread(eq, &kind, &entry, sizeof entry, 300, 0), -FI_EAGAIN);
	} else {
		IS(fi_eq_sread(eq, &kind, &entry, sizeof entry, 5000, 0), -FI_EAVAIL);
		MUST(fi_eq_readerr(eq, &error, 0));
		HOLDS(error.context == &mr && error.fid == &mr->fid && error.err > 0, "the error entry");
		if (!(end.mode & FI_MR_RAW))
			HOLDS(fi_mr_key(mr) == FI_KEY_NOTAVAIL, "a key of a registration that failed");
		MUST(fi_close(&mr->fid));
	}
	MUST(fi_close(&end.cq->fid));
	MUST(fi_close(&end.domain->fid));
	MUST(fi_close(&eq->fid));
}

static const struct test tests[] = {
	CASE(binding_without_events, "keys native handles rawkeys"),
	CASE(what_modifies_is_counted_enabled, "keys handles native rawkeys"),
	CASE(what_modifies_is_counted_at_once, "keys handles virtual"),
	CASE(several_counters, "keys handles native rawkeys"),
	CASE(disabled_until_enabled_counted, "keys handles native rawkeys"),
	CASE(disabled_until_enabled_of_an_endpoint, "keys handles native"),
	CASE(regions_of_one_endpoint, "keys handles native"),
	CASE(what_is_bound_stays, "keys handles native"),
	CASE(registration_in_the_background, "keys handles native rawkeys"),
	CASE(failing_in_the_background, "keys native"),
	{ 0 },
};
