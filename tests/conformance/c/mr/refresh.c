/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */
/* fi_mr_refresh(3) of regions that their owner uses as local buffers: the call "has the effect of
 * disabling and re-enabling access", so operations that were posted before it complete. */
#include "mr.h"

#include <linux/capability.h>
#include <sys/resource.h>
#include <sys/syscall.h>

enum { COUNT = 64 };

static int local_form(void) { return form_bits() | FI_MR_LOCAL; }

static void is_filled(const uint8_t *at, size_t len, int with)
{
	for (size_t i = 0; i < len; i++)
		if (at[i] != with) {
			HOLDS(false, "byte %zu at %p is %d, not %d", i, (const void *)at, at[i], with);
			return;
		}
}

static int do_send(struct end *end, void *from, size_t len, struct fid_mr *mr)
{
	return DO(end, fi_send(end->ep, from, len, fi_mr_desc(mr), 0, NULL));
}

static void post_recv(struct fid_ep *ep, void *to, size_t len, struct fid_mr *mr)
{
	MUST(fi_recv(ep, to, len, fi_mr_desc(mr), 0, NULL));
}

static void refresh(struct fid_mr *mr, void *from, size_t len)
{
	struct iovec part = { from, len };

	IS(fi_mr_refresh(mr, &part, 1, 0), 0);
}

static void finish(struct end *end, struct fid_mr *mr)
{
	IS(next_event(end, 0.1, NULL), -1);
	meet();
	MUST(fi_close(&mr->fid));
	close_end(end);
}

/* Sends messages of one page, each filled with its number. */
static void sender(struct end *end, int count)
{
	uint8_t *from = pages(PAGE, true);
	struct fid_mr *mr = reg(end, from, PAGE, FI_SEND, 9);

	for (int i = 0; i < count; i++) {
		meet();
		memset(from, i + 1, PAGE);
		IS(do_send(end, from, PAGE, mr), 0);
	}
	finish(end, mr);
}

/* Receives them, one in each page. */
static void receiver(struct end *end, uint8_t *buffer, int count)
{
	for (int i = 0; i < count; i++) {
		meet();
		IS(completion(end, SECONDS), 0);
		is_filled(buffer + (size_t)i * PAGE, PAGE, i + 1);
	}
}

/* Receives are posted; then the region is refreshed, though none of its pages has changed. They
 * complete, and the connection stays. */
static void posted_receives_stay(void)
{
	struct end end = { 0 };
	uint8_t *buffer = pages(COUNT * PAGE, true);
	struct fid_mr *mr;

	if (!connected(&end, local_form())) {
		sender(&end, 8);
		return;
	}
	mr = reg(&end, buffer, COUNT * PAGE, ALL_ACCESS, 1);
	for (size_t i = 0; i < 8; i++) {
		post_recv(end.ep, buffer + i * PAGE, PAGE, mr);
		if (i % 2)
			refresh(mr, buffer + i * PAGE, PAGE);
		else
			IS(fi_mr_refresh(mr, NULL, 0, 0), 0);
	}
	IS(fi_mr_refresh(mr, NULL, 0, 0), 0);
	receiver(&end, buffer, 8);
	finish(&end, mr);
}

/* The same with receives that are posted before the connection exists; `shared`: to a shared receive
 * context. */
static void receives_before_the_connection(bool shared)
{
	struct end end = { 0 };
	uint8_t *buffer = pages(COUNT * PAGE, true), name[128] = { 0 };
	size_t size = sizeof name;
	struct fi_info *request;
	struct fid_ep *srx = NULL;
	struct fid_mr *mr;

	if (!split()) {
		open_end(&end, local_form());
		end.ep = connect_more(&end, false);
		sender(&end, 4);
		return;
	}
	open_end(&end, local_form());
	mr = reg(&end, buffer, COUNT * PAGE, ALL_ACCESS, 1);
	listen_end(&end);
	MUST(fi_getname(&end.pep->fid, name, &size));
	tell(name, sizeof name);
	expect(&end, FI_CONNREQ, &request);
	if (shared) {
		request->ep_attr->rx_ctx_cnt = FI_SHARED_CONTEXT;
		MUST(fi_srx_context(end.domain, request->rx_attr, &srx, NULL));
		post_recv(srx, buffer, PAGE, mr);
		IS(fi_mr_refresh(mr, NULL, 0, 0), 0);
	}
	MUST(fi_endpoint(end.domain, request, &end.ep, NULL));
	MUST(fi_ep_bind(end.ep, &end.eq->fid, 0));
	MUST(fi_ep_bind(end.ep, &end.cq->fid, FI_TRANSMIT | FI_RECV));
	if (shared)
		MUST(fi_ep_bind(end.ep, &srx->fid, 0));
	MUST(fi_enable(end.ep));
	for (size_t i = shared; i < 3; i++) {
		post_recv(shared ? srx : end.ep, buffer + i * PAGE, PAGE, mr);
		IS(fi_mr_refresh(mr, NULL, 0, 0), 0);
	}
	MUST(fi_accept(end.ep, NULL, 0));
	fi_freeinfo(request);
	expect(&end, FI_CONNECTED, NULL);
	meet();
	post_recv(shared ? srx : end.ep, buffer + 3 * PAGE, PAGE, mr);
	IS(fi_mr_refresh(mr, NULL, 0, 0), 0);
	receiver(&end, buffer, 4);
	if (shared) {
		IS(next_event(&end, 0.1, NULL), -1);
		meet();
		MUST(fi_close(&end.ep->fid));
		end.ep = NULL;
		MUST(fi_close(&srx->fid));
		MUST(fi_close(&mr->fid));
		close_end(&end);
		return;
	}
	finish(&end, mr);
}

static void early_receives_stay(void) { receives_before_the_connection(false); }

static void shared_receives_stay(void) { receives_before_the_connection(true); }

/* A message waits for a receive while its region is refreshed. */
static void a_send_under_way_stays(void)
{
	struct end end = { 0 };
	bool target = connected(&end, local_form());
	uint8_t *buffer = pages(COUNT * PAGE, true);
	struct fid_mr *mr = reg(&end, buffer, COUNT * PAGE, ALL_ACCESS, 1);

	if (target) {
		memset(buffer, 7, COUNT * PAGE);
		MUST(fi_send(end.ep, buffer, COUNT * PAGE, fi_mr_desc(mr), 0, NULL));
		for (size_t i = 0; i < 4; i++) {
			refresh(mr, buffer + i * 5 * PAGE, 3 * PAGE);
			IS(fi_mr_refresh(mr, NULL, 0, 0), 0);
		}
		meet();
		IS(completion(&end, SECONDS), 0);
	} else {
		meet();
		post_recv(end.ep, buffer, COUNT * PAGE, mr);
		IS(completion(&end, SECONDS), 0);
		is_filled(buffer, COUNT * PAGE, 7);
	}
	finish(&end, mr);
}

/* The page in the middle is replaced and refreshed, again and again, and each message of this page
 * and its neighbours has the new contents. The memory that the owner locks is limited to 16 times
 * the region, as for a user without privileges; `access`: that of the region. */
static void refreshes_and_messages(uint64_t access)
{
	enum { ROUNDS = 300 };
	struct rlimit limit = { 16 * COUNT * PAGE, 16 * COUNT * PAGE };
	struct __user_cap_header_struct header = { .version = _LINUX_CAPABILITY_VERSION_3 };
	struct __user_cap_data_struct data[2];
	struct end end = { 0 };
	uint8_t *buffer, *middle;
	struct fid_mr *mr;
	bool target;

	setenv("SOFTVERBS_MEMLOCK", "1", 1);
	if (syscall(SYS_capget, &header, data))
		die("capget: %s", strerror(errno));
	data[0].effective &= ~(1U << CAP_IPC_LOCK);
	if (syscall(SYS_capset, &header, data) || setrlimit(RLIMIT_MEMLOCK, &limit))
		die("setting limits: %s", strerror(errno));
	target = connected(&end, local_form());
	buffer = pages(COUNT * PAGE, true);
	middle = buffer + COUNT / 2 * PAGE;
	mr = reg(&end, buffer, COUNT * PAGE, access, 1);
	for (int i = 0; i < ROUNDS && !failures; i++) {
		if (target) {
			map_at(middle, PAGE, i % 100 + 1);
			refresh(mr, middle, PAGE);
			meet();
			IS(do_send(&end, middle - PAGE, 3 * PAGE, mr), 0);
		} else {
			post_recv(end.ep, buffer, 3 * PAGE, mr);
			meet();
			IS(completion(&end, SECONDS), 0);
			is_filled(buffer, PAGE, 0);
			is_filled(buffer + PAGE, PAGE, i % 100 + 1);
			is_filled(buffer + 2 * PAGE, PAGE, 0);
		}
	}
	finish(&end, mr);
}

static void changed_pages_are_sent(void) { refreshes_and_messages(ALL_ACCESS); }

static void changed_pages_of_local_regions_are_sent(void) { refreshes_and_messages(FI_SEND | FI_RECV); }

/* Each receive has a registration of its own, which a refresh replaces; so as many replaced
 * registrations stay as receives are posted. */
static void many_registrations_stay(void)
{
	enum { ROUNDS = 60 };
	struct end end = { 0 };
	uint8_t *buffer = pages(COUNT * PAGE, true);
	struct fid_mr *mr;

	if (!connected(&end, local_form())) {
		sender(&end, ROUNDS);
		return;
	}
	mr = reg(&end, buffer, COUNT * PAGE, ALL_ACCESS, 1);
	for (size_t i = 0; i < ROUNDS; i++) {
		refresh(mr, buffer + i * PAGE, PAGE);
		post_recv(end.ep, buffer + i * PAGE, PAGE, mr);
		refresh(mr, buffer + i * PAGE, PAGE);
	}
	receiver(&end, buffer, ROUNDS);
	finish(&end, mr);
}

static const struct test tests[] = {
	CASE(posted_receives_stay, "notify"),
	CASE(early_receives_stay, "notify"),
	CASE(shared_receives_stay, "notify"),
	CASE(a_send_under_way_stays, "notify"),
	CASE(changed_pages_are_sent, "notify"),
	CASE(changed_pages_of_local_regions_are_sent, "notify"),
	CASE(many_registrations_stay, "notify"),
	{ 0 },
};
