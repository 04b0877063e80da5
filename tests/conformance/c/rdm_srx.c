/* Shared receive contexts of endpoints of type FI_EP_RDM, from fi_endpoint(3) "Shared contexts", fi_msg(3) and
 * fi_tagged(3). Two endpoints of one process, each with queues of its own, have the context; the
 * other process has four endpoints that send to them.
 *
 *   rdm_srx messages PROV NODE   both endpoints' messages take the same receives, posted before and after their
 *                                arrival, untagged and tagged, short and long; the entries are in the queue of the
 *                                endpoint, have the sender, and move its counter
 *   rdm_srx directed PROV NODE   receives from one sender, to whichever endpoint it sends, before and after its
 *                                first message, and before its address is inserted
 *   rdm_srx search PROV NODE     FI_PEEK, FI_CLAIM, FI_DISCARD
 *   rdm_srx multi PROV NODE      a multi-receive buffer with messages of both endpoints
 *   rdm_srx objects PROV NODE    attributes, binding, the size, cancel, the order of closing
 *   rdm_srx closed PROV NODE     an endpoint is closed while it has stored messages; the other one continues
 *   rdm_srx threads PROV NODE    threads that post to the context while others read the queues
 *
 * The next argument is `auto` for FI_PROGRESS_AUTO, or `manual`. A last argument is the number of messages of
 * `threads`. Ends with 0, or says what went wrong. Plain libfabric 1.17; link with -pthread. */
#include "rdm_processes.h"

#include <pthread.h>
#include <sched.h>

static uint64_t count_wanted; /* 0: the mode's own */

/* Words of the board */
enum { STAGE, ENDED, TURN };

enum { EPS = 2, SENDERS = 4, FIRST_SENDER = 10, LONG = 100000 };

/* The process with the context. Endpoint i has the name i on the board. */
static struct side side;
static struct fid_ep *srx, *eps[EPS];
static struct fid_cq *rx[EPS];
static struct fid_cntr *received[EPS];
static fi_addr_t senders[SENDERS];

/* ---- the process with the context ---- */

static void open_receiver(uint64_t insert)
{
	wanted.caps = FI_MSG | FI_TAGGED | FI_SOURCE | FI_DIRECTED_RECV | FI_MULTI_RECV;
	open_domain_of(&side);
	IS(side.info->domain_attr->max_ep_srx_ctx > 0);
	side.info->ep_attr->rx_ctx_cnt = FI_SHARED_CONTEXT;
	MUST(fi_srx_context(side.domain, side.info->rx_attr, &srx, NULL));
	side.tx = queue(&side, 0);
	for (int i = 0; i < EPS; i++) {
		rx[i] = queue(&side, 0);
		received[i] = counter(&side);
		MUST(fi_endpoint(side.domain, side.info, &eps[i], NULL));
		MUST(fi_ep_bind(eps[i], &side.av->fid, 0));
		MUST(fi_ep_bind(eps[i], &srx->fid, 0));
		MUST(fi_ep_bind(eps[i], &side.tx->fid, FI_TRANSMIT));
		MUST(fi_ep_bind(eps[i], &rx[i]->fid, FI_RECV));
		MUST(fi_ep_bind(eps[i], &received[i]->fid, FI_RECV));
		MUST(fi_enable(eps[i]));
		publish(eps[i], i);
	}
	for (int i = 0; i < SENDERS; i++)
		senders[i] = insert ? address(&side, FIRST_SENDER + i) : FI_ADDR_NOTAVAIL;
}

static void close_receiver(void)
{
	put(ENDED, 1);
	for (int i = 0; i < EPS; i++) {
		RETURNS(fi_close(&srx->fid), -FI_EBUSY);
		if (eps[i])
			MUST(fi_close(&eps[i]->fid));
		MUST(fi_close(&rx[i]->fid));
		MUST(fi_close(&received[i]->fid));
	}
	MUST(fi_close(&srx->fid));
	close_side(&side);
}

/* Progress of all endpoints. */
static void turn_over(void)
{
	for (int i = 0; i < EPS; i++)
		if (eps[i])
			(void)fi_cq_read(rx[i], NULL, 0);
	(void)fi_cq_read(side.tx, NULL, 0);
}

struct got {
	struct fi_cq_tagged_entry entry;
	struct fi_cq_err_entry error; /* err is 0 if there is none */
	fi_addr_t from;
};

/* The next entry of an endpoint's queue; `error` fields are set for an error entry. */
static struct got get(int at)
{
	struct got got = { .from = FI_ADDR_NOTAVAIL };
	ssize_t count;

	UNTIL((count = fi_cq_readfrom(rx[at], &got.entry, 1, &got.from)) != -FI_EAGAIN, turn_over());
	if (count == -FI_EAVAIL)
		MUST(fi_cq_readerr(rx[at], &got.error, 0));
	else
		IS(count == 1);
	return got;
}

static void is_empty(int at)
{
	struct fi_cq_tagged_entry entry;

	turn_over();
	RETURNS(fi_cq_read(rx[at], &entry, 1), -FI_EAGAIN);
}

/* ---- the process with the senders ---- */

/* A command: sender `who` sends message `number` of `len` bytes to endpoint `to`. */
struct command {
	int who, to, tagged, count;
	uint64_t number;
	size_t len;
};

static struct command *command(void) { return (struct command *)&board->words[16]; }

static void send_commands(int unused)
{
	struct fid_ep *own[SENDERS];
	fi_addr_t to[EPS];
	uint64_t done = 0;
	uint8_t *bytes = malloc(LONG);

	(void)unused;
	open_domain_of(&side);
	side.tx = side.rx = queue(&side, 0);
	for (int i = 0; i < SENDERS; i++) {
		own[i] = endpoint_on(&side, 0);
		publish(own[i], FIRST_SENDER + i);
	}
	for (int i = 0; i < EPS; i++)
		to[i] = address(&side, i);
	while (!told(ENDED)) {
		progress(&side);
		if (told(TURN) == done)
			continue;
		done++;
		struct command what = *command();

		for (int i = 0; i < what.count; i++, what.number++) {
			fill(bytes, what.len, what.number);
			if (what.tagged)
				POST(&side, fi_tsenddata(own[what.who], bytes, what.len, NULL, what.number * 3, to[what.to], what.number, bytes));
			else
				POST(&side, fi_senddata(own[what.who], bytes, what.len, NULL, what.number * 3, to[what.to], bytes));
			/* a message to a closed endpoint fails */
			struct fi_cq_tagged_entry entry;
			struct fi_cq_err_entry error = { 0 };
			ssize_t got;

			UNTIL((got = fi_cq_read(side.tx, &entry, 1)) != -FI_EAGAIN, if (told(ENDED)) break);
			if (got == -FI_EAVAIL)
				MUST(fi_cq_readerr(side.tx, &error, 0));
		}
		add(STAGE);
	}
	for (int i = 0; i < SENDERS; i++)
		MUST(fi_close(&own[i]->fid));
	close_side(&side);
}

static uint64_t turns;

static void begin_send(int who, int to, int tagged, uint64_t number, size_t len)
{
	*command() = (struct command){ .who = who, .to = to, .tagged = tagged, .count = 1, .number = number, .len = len };
	put(TURN, ++turns);
}

/* A message of which the sender has its completion; a long one only with a receive. */
static void sent(int who, int to, int tagged, uint64_t number, size_t len)
{
	begin_send(who, to, tagged, number, len);
	UNTIL(told(STAGE) >= turns, turn_over());
}

static void run(void (*receiver)(int))
{
	pid_t pids[] = { start("receiver", receiver, 0), start("senders", send_commands, 1) };
	int failed = 0;

	for (int i = 0; i < 2; i++)
		failed |= status_of(pids[i], i ? "senders" : "receiver");
	if (failed)
		exit(1);
}

static void must_have(struct got got, void *context, int who, int tagged, uint64_t number, size_t len, const uint8_t *bytes)
{
	IS(got.error.err == 0);
	IS(got.entry.op_context == context);
	IS(got.entry.len == len);
	IS((got.entry.flags & (FI_RECV | FI_MSG | FI_TAGGED | FI_REMOTE_CQ_DATA)) == (FI_RECV | FI_REMOTE_CQ_DATA | (tagged ? FI_TAGGED : FI_MSG)));
	IS(got.entry.data == number * 3);
	if (tagged)
		IS(got.entry.tag == number);
	IS(got.from == senders[who]);
	must_be(bytes, len, number);
}

/* ---- modes ---- */

static void messages(int unused)
{
	static uint8_t in[4][LONG];
	static const size_t lengths[] = { 0, 8, 5000, LONG };
	uint64_t number = 100, counted[EPS] = { 0 };

	(void)unused;
	open_receiver(1);
	for (size_t l = 0; l < 4; l++)
		for (int tagged = 0; tagged < 2; tagged++)
			for (int first = 0; first < 2; first++) /* receives are posted first */
				for (int turn = 0; turn < 8; turn++, number += 2) {
					int at = turn % 2, who[2] = { turn % SENDERS, (turn + 1 + turn / 4) % SENDERS };
					size_t len = lengths[l];

					/* one message to each endpoint; the receives match in the order of arrival */
					for (int i = 0; i < 2 && first; i++)
						MUST(tagged ? fi_trecv(srx, in[i], LONG, NULL, FI_ADDR_UNSPEC, 0, ~0ULL, in[i])
							    : fi_recv(srx, in[i], LONG, NULL, FI_ADDR_UNSPEC, in[i]));
					for (int i = 0; i < 2; i++) {
						int to = i ? !at : at;

						begin_send(who[i], to, tagged, number + (uint64_t)i, len);
						if (!first && len < 1000) /* longer ones may need a receive */
							UNTIL(told(STAGE) >= turns, turn_over());
						if (!first) {
							pause_ms(len < 1000 ? 0 : 5);
							turn_over();
							MUST(tagged ? fi_trecv(srx, in[i], LONG, NULL, FI_ADDR_UNSPEC, number + (uint64_t)i, 0, in[i])
								    : fi_recv(srx, in[i], LONG, NULL, FI_ADDR_UNSPEC, in[i]));
						}
						must_have(get(to), in[i], who[i], tagged, number + (uint64_t)i, len, in[i]);
						IS(fi_cntr_read(received[to]) == ++counted[to]);
						UNTIL(told(STAGE) >= turns, turn_over());
					}
					is_empty(0);
					is_empty(1);
				}
	/* by tag, in another order than that of arrival */
	for (uint64_t i = 0; i < 4; i++)
		sent((int)i, (int)(i % 2), 1, 7 + i, 64);
	for (uint64_t i = 4; i-- > 0;) {
		MUST(fi_trecv(srx, in[0], LONG, NULL, FI_ADDR_UNSPEC, 7 + i, 0, in[0]));
		must_have(get((int)(i % 2)), in[0], (int)i, 1, 7 + i, 64, in[0]);
	}
	/* truncated */
	sent(0, 1, 1, 5, 64);
	MUST(fi_trecv(srx, in[0], 60, NULL, FI_ADDR_UNSPEC, 5, 0, in[0]));
	struct got got = get(1);
	IS(got.error.err == FI_ETRUNC && got.error.olen == 4 && got.error.len == 60 && got.error.op_context == in[0]);
	close_receiver();
}

static void directed(int unused)
{
	static uint8_t in[4][64];

	(void)unused;
	open_receiver(0);
	/* from senders that are not in the vector yet; 0 to both endpoints */
	sent(0, 0, 1, 1, 64);
	sent(1, 0, 1, 1, 64);
	sent(1, 1, 1, 1, 64);
	sent(0, 1, 1, 1, 64);
	for (int i = 0; i < SENDERS; i++)
		senders[i] = address(&side, FIRST_SENDER + i);
	MUST(fi_trecv(srx, in[0], 64, NULL, senders[1], 0, ~0ULL, in[0]));
	must_have(get(0), in[0], 1, 1, 1, 64, in[0]);
	MUST(fi_trecv(srx, in[0], 64, NULL, senders[1], 0, ~0ULL, in[0]));
	must_have(get(1), in[0], 1, 1, 1, 64, in[0]);
	MUST(fi_trecv(srx, in[1], 64, NULL, senders[0], 1, 0, in[1]));
	must_have(get(0), in[1], 0, 1, 1, 64, in[1]);
	MUST(fi_trecv(srx, in[1], 64, NULL, senders[0], 1, 0, in[1]));
	must_have(get(1), in[1], 0, 1, 1, 64, in[1]);
	/* from a sender that no endpoint knows yet, and one that an endpoint knows */
	MUST(fi_trecv(srx, in[2], 64, NULL, senders[2], 2, 0, in[2]));
	MUST(fi_recv(srx, in[3], 64, NULL, senders[2], in[3]));
	MUST(fi_trecv(srx, in[0], 64, NULL, senders[0], 2, 0, in[0]));
	sent(3, 0, 1, 2, 64);
	is_empty(0);
	is_empty(1);
	sent(2, 1, 0, 2, 64);
	must_have(get(1), in[3], 2, 0, 2, 64, in[3]);
	sent(2, 0, 1, 2, 64);
	must_have(get(0), in[2], 2, 1, 2, 64, in[2]);
	sent(0, 1, 1, 2, 64);
	must_have(get(1), in[0], 0, 1, 2, 64, in[0]);
	MUST(fi_trecv(srx, in[3], 64, NULL, FI_ADDR_UNSPEC, 2, 0, in[3]));
	must_have(get(0), in[3], 3, 1, 2, 64, in[3]);
	/* an address that is not in the vector */
	RETURNS(fi_trecv(srx, in[0], 64, NULL, 77, 2, 0, in[0]), -FI_EINVAL);
	close_receiver();
}

static ssize_t search(struct fi_context *context, uint64_t tag, uint8_t *bytes, uint64_t flags)
{
	struct iovec iov = { .iov_base = bytes, .iov_len = bytes ? 64 : 0 };
	struct fi_msg_tagged msg = { .msg_iov = &iov, .iov_count = bytes ? 1 : 0, .addr = FI_ADDR_UNSPEC, .tag = tag, .context = context };

	return fi_trecvmsg(srx, &msg, flags);
}

static void searches(int unused)
{
	struct fi_context one, two;
	uint8_t in[64];
	struct got got;

	(void)unused;
	open_receiver(1);
	/* nothing there: in the queue of the first endpoint */
	MUST(search(&one, 9, NULL, FI_PEEK));
	got = get(0);
	IS(got.error.err == FI_ENOMSG && got.error.op_context == &one && got.error.tag == 9);
	for (int at = 0; at < EPS; at++) {
		for (uint64_t i = 0; i < 4; i++)
			sent((int)i, at, 1, 10 + i, 64);
		MUST(search(&one, 10, NULL, FI_PEEK));
		got = get(at);
		IS(got.error.err == 0 && got.entry.op_context == &one && got.entry.len == 64 && got.entry.tag == 10);
		IS(got.from == senders[0] && got.entry.data == 30);
		MUST(search(&one, 11, NULL, FI_PEEK | FI_CLAIM));
		IS(get(at).entry.len == 64);
		MUST(search(&two, 12, NULL, FI_PEEK | FI_CLAIM));
		IS(get(at).entry.len == 64);
		/* claimed messages match nothing */
		MUST(search(NULL, 11, NULL, FI_PEEK));
		IS(get(0).error.err == FI_ENOMSG);
		MUST(search(NULL, 13, NULL, FI_PEEK | FI_DISCARD));
		IS(get(at).entry.len == 64);
		MUST(search(NULL, 13, NULL, FI_PEEK));
		IS(get(0).error.err == FI_ENOMSG);
		MUST(search(&one, 11, in, FI_CLAIM));
		must_have(get(at), &one, 1, 1, 11, 64, in);
		MUST(search(&two, 12, NULL, FI_CLAIM | FI_DISCARD));
		IS(get(at).entry.op_context == &two);
		MUST(fi_trecv(srx, in, 64, NULL, FI_ADDR_UNSPEC, 10, 0, in));
		must_have(get(at), in, 0, 1, 10, 64, in);
	}
	close_receiver();
}

static void multi(int unused)
{
	static uint8_t in[300];
	struct iovec iov = { .iov_base = in, .iov_len = sizeof in };
	struct fi_msg msg = { .msg_iov = &iov, .iov_count = 1, .addr = FI_ADDR_UNSPEC, .context = &iov };
	size_t min = 100, size = sizeof min;
	struct got got;

	(void)unused;
	open_receiver(1);
	MUST(fi_setopt(&srx->fid, FI_OPT_ENDPOINT, FI_OPT_MIN_MULTI_RECV, &min, sizeof min));
	min = 0;
	MUST(fi_getopt(&srx->fid, FI_OPT_ENDPOINT, FI_OPT_MIN_MULTI_RECV, &min, &size));
	IS(min == 100);
	for (int turn = 0; turn < 2; turn++) {
		/* the first message arrives before the buffer is posted, at the second turn two do */
		sent(0, 0, 0, 1, 64);
		if (turn)
			sent(1, 1, 0, 2, 80);
		MUST(fi_recvmsg(srx, &msg, FI_MULTI_RECV));
		got = get(0);
		IS(got.entry.buf == in && !(got.entry.flags & FI_MULTI_RECV));
		must_have(got, &iov, 0, 0, 1, 64, got.entry.buf);
		if (!turn)
			sent(1, 1, 0, 2, 80);
		got = get(1);
		IS(got.entry.buf == in + 64 && !(got.entry.flags & FI_MULTI_RECV));
		must_have(got, &iov, 1, 0, 2, 80, got.entry.buf);
		/* 156 bytes are left; after this one fewer than 100 */
		sent(2, 0, 0, 3, 70);
		got = get(0);
		IS(got.entry.buf == in + 144 && (got.entry.flags & FI_MULTI_RECV));
		must_have(got, &iov, 2, 0, 3, 70, got.entry.buf);
	}
	MUST(fi_recvmsg(srx, &msg, FI_MULTI_RECV));
	MUST(fi_cancel(&srx->fid, &iov));
	got = get(0);
	IS(got.error.err == FI_ECANCELED && got.error.op_context == &iov);
	close_receiver();
}

static void objects(int unused)
{
	struct fi_rx_attr attr;
	struct fid_ep *other, *ep, *own;
	struct fid_av *av;
	struct fi_av_attr av_attr = { .type = FI_AV_TABLE };
	struct fi_info *info;
	uint8_t in[64];
	int context[5];

	(void)unused;
	open_receiver(1);
	attr = *side.info->rx_attr;
	attr.size = 4;
	MUST(fi_srx_context(side.domain, &attr, &other, NULL));
	for (int i = 0; i < 4; i++)
		MUST(fi_recv(other, in, 64, NULL, FI_ADDR_UNSPEC, &context[i]));
	RETURNS(fi_recv(other, in, 64, NULL, FI_ADDR_UNSPEC, NULL), -FI_EAGAIN);
	RETURNS(fi_trecv(other, in, 64, NULL, FI_ADDR_UNSPEC, 0, 0, NULL), -FI_EAGAIN);
	/* without an endpoint a cancelled receive has no entry */
	MUST(fi_cancel(&other->fid, &context[0]));
	RETURNS(fi_cancel(&other->fid, &context[0]), -FI_ENOENT);
	MUST(fi_trecv(other, in, 64, NULL, FI_ADDR_UNSPEC, 1, 0, &context[4]));
	MUST(fi_close(&other->fid));
	MUST(fi_srx_context(side.domain, NULL, &other, NULL));
	MUST(fi_close(&other->fid));
	attr.op_flags = FI_TRANSMIT_COMPLETE;
	RETURNS(fi_srx_context(side.domain, &attr, &other, NULL), -FI_EINVAL);

	/* an endpoint needs its context, and the same vector */
	MUST(fi_endpoint(side.domain, side.info, &ep, NULL));
	MUST(fi_av_open(side.domain, &av_attr, &av, NULL));
	MUST(fi_ep_bind(ep, &av->fid, 0));
	MUST(fi_ep_bind(ep, &side.tx->fid, FI_TRANSMIT | FI_RECV));
	RETURNS(fi_enable(ep), -FI_EOPBADSTATE);
	MUST(fi_ep_bind(ep, &srx->fid, 0));
	RETURNS(fi_ep_bind(ep, &srx->fid, 0), -FI_EINVAL);
	RETURNS(fi_enable(ep), -FI_EINVAL);
	MUST(fi_close(&ep->fid));
	MUST(fi_close(&av->fid));
	/* an endpoint with receives of its own has no context */
	info = fi_dupinfo(side.info);
	info->ep_attr->rx_ctx_cnt = 1;
	MUST(fi_endpoint(side.domain, info, &own, NULL));
	RETURNS(fi_ep_bind(own, &srx->fid, 0), -FI_EINVAL);
	MUST(fi_close(&own->fid));
	fi_freeinfo(info);
	/* receives are posted to the context, not to the endpoint */
	RETURNS(fi_recv(eps[0], in, 64, NULL, FI_ADDR_UNSPEC, NULL), -FI_EOPBADSTATE);
	RETURNS(fi_ep_bind(eps[0], &srx->fid, 0), -FI_EOPBADSTATE);

	MUST(fi_recv(srx, in, 64, NULL, FI_ADDR_UNSPEC, &context[0]));
	MUST(fi_trecv(srx, in, 64, NULL, FI_ADDR_UNSPEC, 1, 0, &context[1]));
	MUST(fi_cancel(&srx->fid, &context[1]));
	MUST(fi_cancel(&srx->fid, &context[0]));
	for (int i = 2; i-- > 0;) {
		struct got got = get(0);

		IS(got.error.err == FI_ECANCELED && got.error.op_context == &context[i]);
	}
	is_empty(0);
	close_receiver();
}

static void closed(int unused)
{
	uint8_t in[64];

	(void)unused;
	open_receiver(1);
	for (uint64_t i = 0; i < 8; i++)
		sent((int)(i % SENDERS), (int)(i % 2), 1, i, 64);
	MUST(fi_close(&eps[0]->fid));
	eps[0] = NULL;
	/* what arrived at the first endpoint has gone with it */
	MUST(fi_trecv(srx, in, 64, NULL, FI_ADDR_UNSPEC, 0, 0, in));
	MUST(fi_cancel(&srx->fid, in));
	struct got got = get(1);
	IS(got.error.err == FI_ECANCELED);
	for (uint64_t i = 1; i < 8; i += 2) {
		MUST(fi_trecv(srx, in, 64, NULL, FI_ADDR_UNSPEC, 0, ~0ULL, in));
		must_have(get(1), in, (int)(i % SENDERS), 1, i, 64, in);
	}
	MUST(fi_trecv(srx, in, 64, NULL, FI_ADDR_UNSPEC, 0, ~0ULL, in));
	sent(2, 1, 1, 50, 64);
	must_have(get(1), in, 2, 1, 50, 64, in);
	close_receiver();
}

/* ---- threads ---- */

enum { POSTERS = 2, WINDOW = 32 };

static uint64_t each; /* messages to each endpoint */
static _Atomic uint64_t posted, taken;

static void *posts(void *argument)
{
	static uint8_t memory[POSTERS][WINDOW * 64];
	uint8_t *bytes = memory[(size_t)argument];

	for (uint64_t i = 0; atomic_load(&posted) < EPS * each; i++) {
		if (atomic_load(&posted) >= atomic_load(&taken) + WINDOW) {
			sched_yield();
			continue;
		}
		if (atomic_fetch_add(&posted, 1) >= EPS * each)
			break;
		uint8_t *to = bytes + i % WINDOW * 64;
		ssize_t ret;

		UNTIL((ret = fi_trecv(srx, to, 64, NULL, FI_ADDR_UNSPEC, 0, ~0ULL, NULL)) != -FI_EAGAIN, (void)0);
		MUST(ret);
	}
	return NULL;
}

static void *reads(void *argument)
{
	int at = (int)(size_t)argument;
	struct fi_cq_tagged_entry entry;
	uint8_t *seen = calloc(each * 2, 1);

	for (uint64_t count = 0; count < each;) {
		ssize_t got = fi_cq_read(rx[at], &entry, 1);

		if (got == -FI_EAGAIN) {
			sched_yield();
			continue;
		}
		IS(got == 1);
		/* each message once */
		IS(entry.tag / 1000000 == (uint64_t)at && entry.tag % 1000000 < each && !seen[entry.tag % 1000000]);
		seen[entry.tag % 1000000] = 1;
		count++;
		atomic_fetch_add(&taken, 1);
	}
	free(seen);
	return NULL;
}

static void threads(int unused)
{
	pthread_t all[POSTERS + EPS];

	(void)unused;
	each = (count_wanted ? count_wanted : 4000) / SENDERS * SENDERS;
	open_receiver(1);
	for (size_t i = 0; i < POSTERS; i++)
		IS(pthread_create(&all[i], NULL, posts, (void *)i) == 0);
	for (size_t i = 0; i < EPS; i++)
		IS(pthread_create(&all[POSTERS + i], NULL, reads, (void *)i) == 0);
	for (uint64_t block = 0; block < each; block += each / SENDERS)
		for (int at = 0; at < EPS; at++) {
			*command() = (struct command){ .who = (int)(block / (each / SENDERS)), .to = at, .tagged = 1, .count = (int)(each / SENDERS),
						       .number = (uint64_t)at * 1000000 + block, .len = 64 };
			put(TURN, ++turns);
			UNTIL(told(STAGE) >= turns, pause_ms(1));
		}
	for (int i = 0; i < POSTERS + EPS; i++)
		IS(pthread_join(all[i], NULL) == 0);
	close_receiver();
}

static void check_messages(void) { run(messages); }
static void check_directed(void) { run(directed); }
static void check_search(void) { run(searches); }
static void check_multi(void) { run(multi); }
static void check_objects(void) { run(objects); }
static void check_closed(void) { run(closed); }
static void check_threads(void) { run(threads); }

int main(int argc, char **argv)
{
	static const struct mode modes[] = {
		{ "messages", check_messages },
		{ "directed", check_directed },
		{ "search", check_search },
		{ "multi", check_multi },
		{ "objects", check_objects },
		{ "closed", check_closed },
		{ "threads", check_threads },
	};

	if (argc > 5)
		count_wanted = strtoull(argv[5], NULL, 10);
	return run_mode(modes, sizeof modes / sizeof *modes, argc, argv);
}
