/* Messages of endpoints with many peers, from fi_msg(3), fi_tagged(3), fi_cq(3) and fi_endpoint(3),
 * between two processes:
 *
 *   rdm variants PROV NODE     each call that sends and each that receives, untagged and tagged,
 *                              with lengths up to 1 MiB
 *   rdm inject PROV NODE       injected buffers can be reused at once; lengths up to inject_size
 *   rdm unexpected PROV NODE   messages that arrive before their receives, in their order, and by
 *                              tag
 *   rdm tags PROV NODE         ignored bits; the first receive that matches, the first message that
 *                              matches
 *   rdm directed PROV NODE     receives from one of two endpoints
 *   rdm source PROV NODE       fi_cq_readfrom: the sender's fi_addr_t, or FI_ADDR_NOTAVAIL
 *   rdm multi PROV NODE        a multi-receive buffer, until less than FI_OPT_MIN_MULTI_RECV is
 *                              left
 *   rdm search PROV NODE       FI_PEEK, FI_CLAIM, FI_DISCARD
 *   rdm cancel PROV NODE       fi_cancel of receives
 *   rdm truncated PROV NODE    a message that is longer than its receive
 *   rdm selective PROV NODE    FI_SELECTIVE_COMPLETION
 *   rdm counters PROV NODE     an endpoint with counters alone
 *   rdm asleep PROV NODE       fi_cntr_wait sleeps until a message arrives, without and with
 *                              completion queues
 *   rdm readerr PROV NODE      an application that calls fi_cq_readerr alone
 *   rdm levels PROV NODE       completion levels, FI_FENCE, FI_MORE
 *   rdm parting PROV NODE      a receiver closes its endpoint after the last FI_DELIVERY_COMPLETE
 *                              message
 *   rdm regions PROV NODE      buffers with descriptors of regions, and more buffers than iov_limit
 *   rdm self PROV NODE         messages to the endpoint itself
 *   rdm both PROV NODE         both sides send at once, before either knows of the other
 *   rdm many PROV NODE         both sides post 5,000 receives, then as many sends
 *   rdm dead PROV NODE         an address at which nothing listens, while another peer is used
 *   rdm removed PROV NODE      fi_av_remove
 *   rdm objects PROV NODE      binding, enabling, names, options, default flags, aliases, closing
 *   rdm flood PROV NODE        more messages than fit, to a receiver that posts late
 *
 * A further argument `auto` requests FI_PROGRESS_AUTO. Ends with 0, or says what went wrong.
 * WEFT_TEST_SLOW=1: in an emulated machine, six times longer limits. Plain libfabric 1.17. */
#define _GNU_SOURCE
#include <stdlib.h>
#define SLOWNESS (getenv("WEFT_TEST_SLOW") ? 6 : 1)
#define SECONDS (30 * SLOWNESS)
#include "rdm_pair.h"

#include <sys/resource.h>

#define LARGEST (1UL << 20)

static uint8_t *out, *in;		/* LARGEST bytes each */

/* ---- objects ---- */

static void open_domain_for(struct side *side, uint64_t caps)
{
	wanted.caps = caps;
	open_domain_of(side);
}

static struct fid_cntr *counter(struct side *side) { return counter_of(side, FI_WAIT_NONE); }

/* An enabled endpoint with its own queues. `selective`: FI_SELECTIVE_COMPLETION or 0. */
static void open_ep(struct side *side, uint64_t selective)
{
	side->tx = queue(side, 0);
	side->rx = queue(side, 0);
	side->ep = endpoint_on(side, selective);
}

static struct name exchange(const struct name *own)
{
	struct name other;

	tell(to_other[1], own, sizeof *own);
	hear(to_this[0], &other, sizeof other);
	return other;
}

static void open_pair(struct side *side, uint64_t caps, uint64_t selective)
{
	open_domain_for(side, caps);
	open_ep(side, selective);
	struct name own = name_of(side->ep), other = exchange(&own);
	side->peer = insert(side, &other);
}

/* ---- progress and completions ---- */

/* A read of no completions: 0, with a completion in the queue; -FI_EAVAIL, with an error. */
static void read_nothing(struct fid_cq *cq)
{
	ssize_t got = fi_cq_read(cq, NULL, 0);

	if (got && got != -FI_EAGAIN && got != -FI_EAVAIL)
		die("fi_cq_read of nothing: %zd", got);
}

static void progress(struct side *side)
{
	if (side->tx)
		read_nothing(side->tx);
	if (side->rx)
		read_nothing(side->rx);
	if (side->sent)
		(void)fi_cntr_read(side->sent);
	if (side->received)
		(void)fi_cntr_read(side->received);
}

/* The next completion; the source of a receive if `from` is not NULL. */
static struct fi_cq_tagged_entry next_from(struct side *side, struct fid_cq *cq, fi_addr_t *from)
{
	struct fi_cq_tagged_entry entry;
	struct fi_cq_err_entry error = { 0 };
	struct fid_cq *other = cq == side->tx ? side->rx : side->tx;
	double limit = now() + SECONDS;

	for (;;) {
		ssize_t got = from ? fi_cq_readfrom(cq, &entry, 1, from) : fi_cq_read(cq, &entry, 1);

		if (got == 1)
			return entry;
		if (got == -FI_EAVAIL) {
			MUST(fi_cq_readerr(cq, &error, 0));
			die("a completion in error: %s", fi_strerror(error.err));
		}
		if (got != -FI_EAGAIN)
			die("fi_cq_read: %zd", got);
		if (other)
			read_nothing(other);
		if (now() > limit)
			die("no completion within %d s", SECONDS);
	}
}

static struct fi_cq_tagged_entry next(struct side *side, struct fid_cq *cq) { return next_from(side, cq, NULL); }

/* The next completion, which is an error, in an entry that the caller has initialized. */
static struct fi_cq_err_entry next_error_in(struct side *side, struct fid_cq *cq, struct fi_cq_err_entry error)
{
	struct fi_cq_tagged_entry entry;
	size_t room = error.err_data_size;
	double limit = now() + SECONDS;

	for (;;) {
		ssize_t got = fi_cq_read(cq, &entry, 1);

		if (got == -FI_EAVAIL) {
			if (!room)
				error.err_data = &entry; /* ignored */
			RETURNS(fi_cq_readerr(cq, &error, 0), 1);
			/* without a buffer of the caller: that of the provider, with the device's code if it has one */
			IS(room || (error.err_data && error.err_data != &entry));
			IS(room || error.err_data_size == 0 || error.err_data_size == sizeof(uint32_t));
			return error;
		}
		if (got != -FI_EAGAIN)
			die("%zd where an error was to come", got);
		progress(side);
		if (now() > limit)
			die("no error within %d s", SECONDS);
	}
}

static struct fi_cq_err_entry next_error(struct side *side, struct fid_cq *cq)
{
	return next_error_in(side, cq, (struct fi_cq_err_entry){ 0 });
}

static void must_be_empty(struct fid_cq *cq)
{
	struct fi_cq_tagged_entry entry;

	for (int i = 0; i < 100; i++)
		RETURNS(fi_cq_read(cq, &entry, 1), -FI_EAGAIN);
}

static void fill(uint8_t *bytes, size_t len, unsigned seed)
{
	for (size_t i = 0; i < len; i++)
		bytes[i] = (uint8_t)(seed * 31 + i * 7 + (i >> 8));
}

static void must_be(const uint8_t *bytes, size_t len, unsigned seed)
{
	for (size_t i = 0; i < len; i++)
		if (bytes[i] != (uint8_t)(seed * 31 + i * 7 + (i >> 8)))
			die("byte %zu of %zu of message %u", i, len, seed);
}

/* ---- calls in all variants ---- */

enum { SEND, SENDV, SENDMSG, SENDDATA, SENDMSGDATA, INJECT, INJECTDATA, SENDS };
enum { RECV, RECVV, RECVMSG, RECVS };

static int has_data(int variant) { return variant == SENDDATA || variant == SENDMSGDATA || variant == INJECTDATA; }
static int is_injected(int variant) { return variant == INJECT || variant == INJECTDATA; }

/* Up to 4 buffers with the same bytes. */
static size_t parts(struct iovec *iov, uint8_t *bytes, size_t len, size_t count)
{
	size_t used = 0;

	for (size_t i = 0; i < count; i++) {
		size_t part = i + 1 == count ? len - used : len / count;

		iov[i] = (struct iovec){ bytes + used, part };
		used += part;
	}
	return count;
}

static ssize_t transmit(struct side *side, int tagged, int variant, uint8_t *bytes, size_t len, uint64_t tag, uint64_t data, void *context)
{
	struct iovec iov[4];
	size_t count = parts(iov, bytes, len, variant == SENDMSG ? 3 : 4);
	struct fi_msg msg = { .msg_iov = iov, .iov_count = count, .addr = side->peer, .context = context, .data = data };
	struct fi_msg_tagged tmsg = { .msg_iov = iov, .iov_count = count, .addr = side->peer, .tag = tag, .context = context, .data = data };
	uint64_t flags = FI_COMPLETION | (variant == SENDMSGDATA ? FI_REMOTE_CQ_DATA : 0);
	struct fid_ep *ep = side->ep;
	fi_addr_t to = side->peer;

	switch (variant) {
	case SEND:
		return tagged ? fi_tsend(ep, bytes, len, NULL, to, tag, context) : fi_send(ep, bytes, len, NULL, to, context);
	case SENDV:
		return tagged ? fi_tsendv(ep, iov, NULL, count, to, tag, context) : fi_sendv(ep, iov, NULL, count, to, context);
	case SENDMSG:
	case SENDMSGDATA:
		return tagged ? fi_tsendmsg(ep, &tmsg, flags) : fi_sendmsg(ep, &msg, flags);
	case SENDDATA:
		return tagged ? fi_tsenddata(ep, bytes, len, NULL, data, to, tag, context) : fi_senddata(ep, bytes, len, NULL, data, to, context);
	case INJECT:
		return tagged ? fi_tinject(ep, bytes, len, to, tag) : fi_inject(ep, bytes, len, to);
	default:
		return tagged ? fi_tinjectdata(ep, bytes, len, data, to, tag) : fi_injectdata(ep, bytes, len, data, to);
	}
}

static ssize_t receive(struct side *side, int tagged, int variant, uint8_t *bytes, size_t len, uint64_t tag, uint64_t ignore, void *context)
{
	struct iovec iov[4];
	size_t count = parts(iov, bytes, len, variant == RECVMSG ? 2 : 4);
	struct fi_msg msg = { .msg_iov = iov, .iov_count = count, .addr = FI_ADDR_UNSPEC, .context = context };
	struct fi_msg_tagged tmsg = { .msg_iov = iov, .iov_count = count, .addr = FI_ADDR_UNSPEC, .tag = tag, .ignore = ignore, .context = context };
	struct fid_ep *ep = side->ep;
	fi_addr_t any = FI_ADDR_UNSPEC;

	switch (variant) {
	case RECV:
		return tagged ? fi_trecv(ep, bytes, len, NULL, any, tag, ignore, context) : fi_recv(ep, bytes, len, NULL, any, context);
	case RECVV:
		return tagged ? fi_trecvv(ep, iov, NULL, count, any, tag, ignore, context) : fi_recvv(ep, iov, NULL, count, any, context);
	default:
		return tagged ? fi_trecvmsg(ep, &tmsg, FI_COMPLETION) : fi_recvmsg(ep, &msg, FI_COMPLETION);
	}
}

static void check_sent(struct fi_cq_tagged_entry entry, int tagged, void *context)
{
	IS(entry.op_context == context);
	IS((entry.flags & (FI_SEND | FI_RECV)) == FI_SEND);
	IS((entry.flags & (FI_MSG | FI_TAGGED)) == (tagged ? FI_TAGGED : FI_MSG));
}

static void check_received(struct fi_cq_tagged_entry entry, int tagged, size_t len, uint64_t tag, void *context)
{
	IS(entry.op_context == context);
	IS((entry.flags & (FI_SEND | FI_RECV)) == FI_RECV);
	IS((entry.flags & (FI_MSG | FI_TAGGED)) == (tagged ? FI_TAGGED : FI_MSG));
	IS(entry.len == len);
	if (tagged)
		IS(entry.tag == tag);
}

/* ---- modes: each is called in both processes ---- */

static void check_variants(void)
{
	static const size_t lengths[] = { 0, 1, 8, 64, 1000, 4096, 4097, 8192, 8193, 65536, 300001, LARGEST };
	struct side side;
	unsigned seed = 0;

	open_pair(&side, CAPS, 0);
	for (int direction = 0; direction < 2; direction++)
		for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++)
			for (int how = 0; how < SENDS * RECVS * 2; how++) {
				int tagged = how % 2, sends = how / 2 % SENDS, recvs = how / 2 / SENDS;
				size_t len = lengths[i];
				uint64_t tag = 0xfedcba9800000000ULL + seed, data = 0x0123456789abcdefULL * (seed + 1);

				if (is_injected(sends) && len > side.info->tx_attr->inject_size)
					continue;
				seed++;
				if (first == direction) {
					memset(in, 0xee, len + 1);
					POST(&side, receive(&side, tagged, recvs, in, len, tag, 0, &in[how]));
					struct fi_cq_tagged_entry got = next(&side, side.rx);
					check_received(got, tagged, len, tag, &in[how]);
					IS(!!(got.flags & FI_REMOTE_CQ_DATA) == has_data(sends));
					if (has_data(sends))
						IS(got.data == data);
					must_be(in, len, seed);
					IS(len == LARGEST || in[len] == 0xee);
				} else {
					fill(out, len, seed);
					POST(&side, transmit(&side, tagged, sends, out, len, tag, data, &out[how]));
					if (is_injected(sends))
						memset(out, 0, len);
					else
						check_sent(next(&side, side.tx), tagged, &out[how]);
				}
			}
	barrier(&side);
	must_be_empty(side.tx);
	must_be_empty(side.rx);
	close_side(&side);
}

/* A buffer at NULL has no bytes to send. */
static void refuses_null(struct side *side)
{
	struct iovec with_null[2] = { { out, 8 }, { NULL, 8 } };

	RETURNS(fi_inject(side->ep, NULL, 8, side->peer), -FI_EINVAL);
	RETURNS(fi_send(side->ep, NULL, 8, NULL, side->peer, NULL), -FI_EINVAL);
	RETURNS(fi_tsend(side->ep, NULL, 1 << 20, NULL, side->peer, 7, NULL), -FI_EINVAL);
	RETURNS(fi_sendv(side->ep, with_null, NULL, 2, side->peer, NULL), -FI_EINVAL);
}

static void check_inject(void)
{
	struct side side;
	size_t most;

	open_pair(&side, CAPS, 0);
	most = side.info->tx_attr->inject_size;
	if (first) {
		struct fi_msg msg = { .addr = side.peer, .context = out };

		RETURNS(fi_inject(side.ep, out, most + 1, side.peer), -FI_EMSGSIZE);
		RETURNS(fi_tinject(side.ep, out, most + 1, side.peer, 7), -FI_EMSGSIZE);
		refuses_null(&side); /* without a connection */
		for (unsigned i = 0; i < 200; i++) {
			size_t len = i * most / 199;

			fill(out, len, i);
			if (i % 3 == 2) {
				struct iovec iov = { out, len };

				msg.msg_iov = &iov;
				msg.iov_count = 1;
				POST(&side, fi_sendmsg(side.ep, &msg, FI_INJECT | FI_COMPLETION));
			} else {
				POST(&side, fi_inject(side.ep, out, len, side.peer));
			}
			memset(out, 0xdd, len); /* at once */
		}
		for (unsigned i = 2; i < 200; i += 3)
			check_sent(next(&side, side.tx), 0, out);
		refuses_null(&side);
		must_be_empty(side.tx);
	} else {
		for (unsigned i = 0; i < 200; i++) {
			size_t len = i * most / 199;

			POST(&side, fi_recv(side.ep, in, LARGEST, NULL, FI_ADDR_UNSPEC, in));
			check_received(next(&side, side.rx), 0, len, 0, in);
			must_be(in, len, i);
		}
	}
	barrier(&side);
	close_side(&side);
}

static void check_unexpected(void)
{
	enum { COUNT = 51, ROOM = 20000 };
	struct side side;

	open_pair(&side, CAPS, 0);
	if (first) {
		/* of the three groups each is received in its order */
		for (unsigned i = 0; i < COUNT; i++) {
			size_t len = i % 5 == 4 ? ROOM : 100 + i;

			fill(out + i * ROOM, len, i);
			if (i % 3 == 0)
				POST(&side, fi_send(side.ep, out + i * ROOM, len, NULL, side.peer, NULL));
			else
				POST(&side, fi_tsend(side.ep, out + i * ROOM, len, NULL, side.peer, i % 3, NULL));
		}
		barrier(&side);
		for (unsigned i = 0; i < COUNT; i++)
			next(&side, side.tx);
	} else {
		barrier(&side);
		for (int group = 2; group >= 0; group--)
			for (unsigned i = group; i < COUNT; i += 3) {
				size_t len = i % 5 == 4 ? ROOM : 100 + i;

				if (group)
					POST(&side, fi_trecv(side.ep, in, LARGEST, NULL, FI_ADDR_UNSPEC, group, 0, in));
				else
					POST(&side, fi_recv(side.ep, in, LARGEST, NULL, FI_ADDR_UNSPEC, in));
				check_received(next(&side, side.rx), group != 0, len, group, in);
				must_be(in, len, i);
			}
	}
	barrier(&side);
	close_side(&side);
}

static void check_tags(void)
{
	/* receives in their order: tag, ignored bits; and the message that each gets */
	static const struct {
		uint64_t tag, ignore;
		int message;
	} receives[] = {
		{ 0x10, 0, 1 }, { 0xff00, 0xff, 2 }, { 0x0, ~0ULL, 0 }, { 0xff01, 0, 3 }, { 0x10, 0xf, 4 },
	};
	static const uint64_t tags[] = { 0x777, 0x10, 0xff05, 0xff01, 0x1a };
	enum { COUNT = 5 };
	struct side side;

	open_pair(&side, CAPS, 0);
	for (int early = 0; early < 2; early++) {
		if (first) {
			if (early)
				barrier(&side); /* the receives are posted */
			for (int i = 0; i < COUNT; i++) {
				fill(out + i * 8, 8, i);
				POST(&side, fi_tinject(side.ep, out + i * 8, 8, side.peer, tags[i]));
			}
			barrier(&side);
			barrier(&side);
		} else {
			if (!early)
				barrier(&side); /* the messages are sent */
			for (int i = 0; i < COUNT; i++)
				POST(&side, fi_trecv(side.ep, in + i * 8, 8, NULL, FI_ADDR_UNSPEC, receives[i].tag, receives[i].ignore, in + i * 8));
			if (early) {
				barrier(&side);
				barrier(&side);
			}
			for (int i = 0; i < COUNT; i++) {
				struct fi_cq_tagged_entry got = next(&side, side.rx);
				int at = (int)(((uint8_t *)got.op_context - in) / 8);

				IS(at >= 0 && at < COUNT);
				IS(got.tag == tags[receives[at].message]);
				must_be(in + at * 8, 8, receives[at].message);
			}
			barrier(&side);
		}
	}
	close_side(&side);
}

/* The first process has one endpoint, the second one has two. */
static void check_directed(void)
{
	struct side side, second;

	open_pair(&side, CAPS | FI_DIRECTED_RECV | FI_SOURCE, 0);
	if (first) {
		struct name name;
		fi_addr_t other;

		hear(to_this[0], &name, sizeof name);
		other = insert(&side, &name);
		for (int round = 0; round < 2; round++) {
			int tagged = round;

			/* against the order of sending */
			for (int i = 0; i < 2; i++) {
				fi_addr_t from = i ? side.peer : other;

				if (tagged)
					POST(&side, fi_trecv(side.ep, in + i * 8, 8, NULL, from, 5, 0, in + i * 8));
				else
					POST(&side, fi_recv(side.ep, in + i * 8, 8, NULL, from, in + i * 8));
			}
			barrier(&side);
			for (int i = 0; i < 2; i++) {
				fi_addr_t from;
				struct fi_cq_tagged_entry got = next_from(&side, side.rx, &from);
				int at = got.op_context == in + 8;

				IS(from == (at ? side.peer : other));
				must_be(in + at * 8, 8, at ? 1 : 2);
			}
			barrier(&side);
		}
		/* of messages that have arrived, that of the named endpoint */
		barrier(&side);
		POST(&side, fi_recv(side.ep, in, 8, NULL, other, in));
		check_received(next(&side, side.rx), 0, 8, 0, in);
		must_be(in, 8, 2);
		POST(&side, fi_recv(side.ep, in, 8, NULL, FI_ADDR_UNSPEC, in));
		check_received(next(&side, side.rx), 0, 8, 0, in);
		must_be(in, 8, 1);
		/* an index that is not in use */
		RETURNS(fi_recv(side.ep, in, 8, NULL, 77, in), -FI_EINVAL);
		barrier(&side);
	} else {
		struct name own;

		second = side;
		second.tx = second.rx = NULL;
		open_ep(&second, 0);
		own = name_of(second.ep);
		tell(to_other[1], &own, sizeof own);
		fill(out, 8, 1);
		fill(out + 8, 8, 2);
		for (int round = 0; round < 3; round++) {
			if (round < 2)
				barrier(&side);
			for (int i = 0; i < 2; i++) {
				struct side *from = i ? &second : &side;

				if (round == 1)
					POST(from, fi_tsend(from->ep, out + i * 8, 8, NULL, side.peer, 5, NULL));
				else
					POST(from, fi_send(from->ep, out + i * 8, 8, NULL, side.peer, NULL));
				next(from, from->tx);
			}
			barrier(&side);
		}
		barrier(&side);
		MUST(fi_close(&second.ep->fid));
		MUST(fi_close(&second.tx->fid));
		MUST(fi_close(&second.rx->fid));
	}
	close_side(&side);
}

static void check_source(void)
{
	struct side side;

	open_domain_for(&side, CAPS | FI_SOURCE);
	open_ep(&side, 0);
	struct name own = name_of(side.ep), other = exchange(&own);
	fi_addr_t from = 7;

	if (first) {
		/* a sender that is in no address vector, and then is */
		POST(&side, fi_recv(side.ep, in, 8, NULL, FI_ADDR_UNSPEC, in));
		next_from(&side, side.rx, &from);
		IS(from == FI_ADDR_NOTAVAIL);
		struct name none = other;
		none.bytes[2] ^= 0x55; /* another port */
		fi_addr_t a = insert(&side, &none), b = insert(&side, &other), c = insert(&side, &other);
		barrier(&side);
		POST(&side, fi_trecv(side.ep, in, 8, NULL, FI_ADDR_UNSPEC, 1, 0, in));
		next_from(&side, side.rx, &from);
		IS(from == b);
		/* of duplicates the first one that is left */
		MUST(fi_av_remove(side.av, &b, 1, 0));
		MUST(fi_av_remove(side.av, &a, 1, 0));
		barrier(&side);
		POST(&side, fi_trecv(side.ep, in, 8, NULL, FI_ADDR_UNSPEC, 1, 0, in));
		next_from(&side, side.rx, &from);
		IS(from == c);
		/* the sender can be answered */
		POST(&side, fi_inject(side.ep, out, 8, c));
	} else {
		side.peer = insert(&side, &other);
		POST(&side, fi_send(side.ep, out, 8, NULL, side.peer, NULL));
		next_from(&side, side.tx, &from);
		for (int i = 0; i < 2; i++) {
			barrier(&side);
			POST(&side, fi_tsend(side.ep, out, 8, NULL, side.peer, 1, NULL));
			next(&side, side.tx);
		}
		POST(&side, fi_recv(side.ep, in, 8, NULL, FI_ADDR_UNSPEC, in));
		next_from(&side, side.rx, &from);
		IS(from == side.peer);
	}
	barrier(&side);
	close_side(&side);
}

static void check_multi(void)
{
	enum { LENGTH = 100, ROOM = 1000, LEAST = 150 };
	struct side side;
	size_t least = LEAST;

	open_pair(&side, FI_MSG | FI_MULTI_RECV, 0);
	if (first) {
		barrier(&side);
		for (unsigned i = 0; i < 20; i++) {
			fill(out + i * LENGTH, LENGTH, i);
			POST(&side, fi_send(side.ep, out + i * LENGTH, LENGTH, NULL, side.peer, NULL));
		}
		for (unsigned i = 0; i < 20; i++)
			next(&side, side.tx);
	} else {
		/* two buffers: of 1,000 bytes 900 are used, because after nine messages less
		 * than 150 are left */
		MUST(fi_setopt(&side.ep->fid, FI_OPT_ENDPOINT, FI_OPT_MIN_MULTI_RECV, &least, sizeof least));
		for (int i = 0; i < 3; i++) {
			struct iovec iov = { in + i * ROOM, ROOM };
			struct fi_msg msg = { .msg_iov = &iov, .iov_count = 1, .addr = FI_ADDR_UNSPEC, .context = in + i * ROOM };

			MUST(fi_recvmsg(side.ep, &msg, FI_MULTI_RECV | FI_COMPLETION));
		}
		barrier(&side);
		for (unsigned i = 0; i < 20; i++) {
			unsigned buffer = i / 9, place = i % 9;
			struct fi_cq_tagged_entry got = next(&side, side.rx);

			IS(got.op_context == in + buffer * ROOM);
			IS(got.buf == in + buffer * ROOM + place * LENGTH);
			IS(got.len == LENGTH);
			IS(!!(got.flags & FI_MULTI_RECV) == (place == 8));
			must_be(got.buf, LENGTH, i);
		}
		must_be_empty(side.rx);
		/* the third one is still posted */
		MUST(fi_cancel(&side.ep->fid, in + 2 * ROOM));
		struct fi_cq_err_entry error = next_error(&side, side.rx);
		IS(error.err == FI_ECANCELED && error.op_context == in + 2 * ROOM);
		/* its release is reported by this entry, as of a buffer with messages under way */
		IS(error.flags == (FI_MSG | FI_RECV | FI_MULTI_RECV));
	}
	barrier(&side);
	close_side(&side);
}

/* fi_trecvmsg of a search, and its context. */
static void search(struct side *side, uint64_t flags, uint64_t tag, uint64_t ignore, uint8_t *bytes, size_t len, struct fi_context *context)
{
	struct iovec iov = { bytes, len };
	struct fi_msg_tagged msg = {
		.msg_iov = &iov, .iov_count = bytes ? 1 : 0, .addr = FI_ADDR_UNSPEC, .tag = tag, .ignore = ignore, .context = context,
	};

	POST(side, fi_trecvmsg(side->ep, &msg, flags | FI_COMPLETION));
}

/* A peek that is repeated until the message has arrived. */
static struct fi_cq_tagged_entry find(struct side *side, uint64_t flags, uint64_t tag, uint64_t ignore, struct fi_context *context)
{
	struct fi_cq_err_entry error;
	struct fi_cq_tagged_entry got;
	double limit = now() + SECONDS;

	for (;;) {
		ssize_t read;

		search(side, FI_PEEK | flags, tag, ignore, NULL, 0, context);
		while ((read = fi_cq_read(side->rx, &got, 1)) == -FI_EAGAIN)
			if (now() > limit)
				die("a search without a result");
		if (read == 1)
			break;
		IS(read == -FI_EAVAIL);
		memset(&error, 0, sizeof error);
		RETURNS(fi_cq_readerr(side->rx, &error, 0), 1);
		IS(error.err == FI_ENOMSG && error.op_context == context);
		if (now() > limit)
			die("message %llu does not come", (unsigned long long)tag);
	}
	IS(got.op_context == context);
	return got;
}

static void must_find_nothing(struct side *side, uint64_t flags, uint64_t tag)
{
	struct fi_cq_err_entry error;
	struct fi_context context;

	/* an entry that the application has not initialized: a search that fails has no error
	 * data */
	memset(&error, 0x55, sizeof error);
	search(side, flags, tag, 0, NULL, 0, &context);
	error = next_error_in(side, side->rx, error);
	IS(error.err == FI_ENOMSG && error.op_context == &context);
}

static void check_search(void)
{
	struct side side;
	struct fi_context contexts[2];
	size_t lengths[] = { 100, 3000, 200000, 40 };

	open_pair(&side, CAPS, 0);
	if (first) {
		for (int i = 0; i < 4; i++) {
			fill(out + i * 200000, lengths[i], i);
			POST(&side, fi_tsenddata(side.ep, out + i * 200000, lengths[i], NULL, 900 + i, side.peer, 10 + i, NULL));
		}
		barrier(&side);
		for (int i = 0; i < 4; i++)
			next(&side, side.tx);
		/* messages of another tag, of which the first one is discarded */
		for (int i = 0; i < 2; i++) {
			fill(out, 64, i);
			POST(&side, fi_tinject(side.ep, out, 64, side.peer, 50));
		}
		barrier(&side);
	} else {
		struct fi_cq_tagged_entry got;

		must_find_nothing(&side, FI_PEEK, 99);
		barrier(&side);
		must_find_nothing(&side, FI_PEEK, 99);
		must_find_nothing(&side, FI_PEEK | FI_CLAIM, 99);
		must_find_nothing(&side, FI_PEEK | FI_DISCARD, 99);
		/* a peek leaves the message, and has what is known of it */
		for (int i = 0; i < 2; i++) {
			got = find(&side, 0, 11, 0, &contexts[0]);
			IS(got.len == lengths[1] && got.tag == 11);
			IS(got.flags & FI_REMOTE_CQ_DATA && got.data == 901);
		}
		/* two claims; other receives do not find the messages */
		got = find(&side, FI_CLAIM, 10, 1, &contexts[0]);
		IS(got.len == lengths[0] && got.tag == 10);
		got = find(&side, FI_CLAIM, 12, 0, &contexts[1]);
		IS(got.len == lengths[2] && got.tag == 12);
		must_find_nothing(&side, FI_PEEK, 10);
		must_find_nothing(&side, FI_PEEK, 12);
		search(&side, FI_CLAIM, 12, 0, in, lengths[2], &contexts[1]);
		check_received(next(&side, side.rx), 1, lengths[2], 12, &contexts[1]);
		must_be(in, lengths[2], 2);
		/* "the input buffer(s) and length parameters are ignored" */
		struct fi_msg_tagged discarded = {
			.msg_iov = (void *)8, .desc = (void *)8, .iov_count = 3, .addr = FI_ADDR_UNSPEC, .tag = 10, .context = &contexts[0],
		};
		POST(&side, fi_trecvmsg(side.ep, &discarded, FI_CLAIM | FI_DISCARD | FI_COMPLETION));
		got = next(&side, side.rx);
		IS(got.op_context == &contexts[0]);
		must_find_nothing(&side, FI_PEEK, 10);
		/* a claim that is used again, and one that never was */
		struct fi_msg_tagged msg = { .addr = FI_ADDR_UNSPEC, .context = &contexts[1] };
		RETURNS(fi_trecvmsg(side.ep, &msg, FI_CLAIM), -FI_EINVAL);
		msg.context = NULL;
		RETURNS(fi_trecvmsg(side.ep, &msg, FI_CLAIM), -FI_EINVAL);
		RETURNS(fi_trecvmsg(side.ep, &msg, FI_DISCARD), -FI_EINVAL);
		/* the others are received as usual */
		POST(&side, fi_trecv(side.ep, in, LARGEST, NULL, FI_ADDR_UNSPEC, 11, 0, in));
		check_received(next(&side, side.rx), 1, lengths[1], 11, in);
		must_be(in, lengths[1], 1);
		POST(&side, fi_trecv(side.ep, in, LARGEST, NULL, FI_ADDR_UNSPEC, 13, 0, in));
		check_received(next(&side, side.rx), 1, lengths[3], 13, in);
		must_be(in, lengths[3], 3);
		barrier(&side);
		find(&side, 0, 50, 0, &contexts[0]);
		discarded = (struct fi_msg_tagged){ .iov_count = 1000, .addr = FI_ADDR_UNSPEC, .tag = 50, .context = &contexts[0] };
		POST(&side, fi_trecvmsg(side.ep, &discarded, FI_PEEK | FI_DISCARD | FI_COMPLETION));
		got = next(&side, side.rx);
		IS(got.len == 64 && got.tag == 50);
		POST(&side, fi_trecv(side.ep, in, 64, NULL, FI_ADDR_UNSPEC, 50, 0, in));
		next(&side, side.rx);
		must_be(in, 64, 1);
	}
	barrier(&side);
	close_side(&side);
}

static void check_cancel(void)
{
	struct side side;
	struct fi_cq_err_entry error;

	open_pair(&side, CAPS, 0);
	if (first) {
		barrier(&side);
		POST(&side, fi_inject(side.ep, out, 8, side.peer));
		POST(&side, fi_tinject(side.ep, out, 8, side.peer, 3));
	} else {
		for (int i = 0; i < 3; i++) {
			MUST(fi_recv(side.ep, in + i, 8, NULL, FI_ADDR_UNSPEC, in + i));
			MUST(fi_trecv(side.ep, in + 8 + i, 8, NULL, FI_ADDR_UNSPEC, 3, 0, in + 8 + i));
		}
		for (int tagged = 0; tagged < 2; tagged++) {
			uint8_t *context = in + tagged * 8;

			for (int i = 0; i < 2; i++) {
				RETURNS(fi_cancel(&side.ep->fid, context + i), 0);
				error = next_error(&side, side.rx);
				IS(error.err == FI_ECANCELED && error.op_context == context + i);
				IS((error.flags & (FI_MSG | FI_TAGGED)) == (tagged ? FI_TAGGED : FI_MSG));
			}
		}
		RETURNS(fi_cancel(&side.ep->fid, in), -FI_ENOENT);
		barrier(&side);
		/* the messages match those that are left */
		for (int i = 0; i < 2; i++) {
			struct fi_cq_tagged_entry got = next(&side, side.rx);

			IS(got.op_context == in + 2 || got.op_context == in + 10);
		}
	}
	barrier(&side);
	close_side(&side);
}

static void check_truncated(void)
{
	static const size_t lengths[] = { 100, 5000, 300000 };
	struct side side;

	open_pair(&side, CAPS, 0);
	for (int i = 0; i < 3; i++)
		for (int tagged = 0; tagged < 2; tagged++)
			for (int early = 0; early < 2; early++) {
				size_t room = lengths[i] / 2;

				if (first) {
					if (early)
						barrier(&side);
					fill(out, lengths[i], i);
					POST(&side, transmit(&side, tagged, SEND, out, lengths[i], 4, 0, out));
					if (!early)
						barrier(&side);
					next(&side, side.tx);
				} else {
					if (!early)
						barrier(&side);
					memset(in, 0xee, lengths[i]);
					POST(&side, receive(&side, tagged, RECV, in, room, 4, 0, in));
					if (early)
						barrier(&side);
					struct fi_cq_err_entry error = next_error(&side, side.rx);
					IS(error.err == FI_ETRUNC && error.op_context == in);
					IS(error.len == room && error.olen == lengths[i] - room);
					IS(!tagged || error.tag == 4);
					must_be(in, room, i);
					IS(in[room] == 0xee);
				}
			}
	barrier(&side);
	/* and the endpoint still works */
	if (first) {
		POST(&side, fi_inject(side.ep, out, 8, side.peer));
	} else {
		POST(&side, fi_recv(side.ep, in, 8, NULL, FI_ADDR_UNSPEC, in));
		next(&side, side.rx);
	}
	barrier(&side);
	close_side(&side);
}

static void check_selective(void)
{
	struct side side;
	struct iovec iov[2] = { { out, 8 }, { in, 8 } };

	open_pair(&side, CAPS, FI_SELECTIVE_COMPLETION);
	struct fi_msg_tagged sent = { .msg_iov = &iov[0], .iov_count = 1, .addr = side.peer, .tag = 2, .context = out };
	struct fi_msg_tagged got = { .msg_iov = &iov[1], .iov_count = 1, .addr = FI_ADDR_UNSPEC, .tag = 2, .context = in };

	if (first) {
		for (int i = 0; i < 10; i++)
			POST(&side, fi_tsend(side.ep, out, 8, NULL, side.peer, 1, out + 1));
		POST(&side, fi_tsendmsg(side.ep, &sent, 0));
		POST(&side, fi_tsendmsg(side.ep, &sent, FI_COMPLETION));
		check_sent(next(&side, side.tx), 1, out);
		barrier(&side);
		must_be_empty(side.tx);
		/* a default flag */
		uint64_t flags = FI_TRANSMIT | FI_COMPLETION;
		MUST(fi_control(&side.ep->fid, FI_SETOPSFLAG, &flags));
		POST(&side, fi_tsend(side.ep, out, 8, NULL, side.peer, 3, out + 3));
		check_sent(next(&side, side.tx), 1, out + 3);
		/* errors are reported in any case */
		struct name none = name_of(side.ep);
		none.bytes[2] ^= 0x55;
		sent.addr = insert(&side, &none);
		POST(&side, fi_tsendmsg(side.ep, &sent, 0));
		IS(next_error(&side, side.tx).op_context == out);
	} else {
		for (int i = 0; i < 10; i++)
			POST(&side, fi_trecv(side.ep, in, 8, NULL, FI_ADDR_UNSPEC, 1, 0, in));
		POST(&side, fi_trecvmsg(side.ep, &got, 0));
		POST(&side, fi_trecvmsg(side.ep, &got, FI_COMPLETION));
		check_received(next(&side, side.rx), 1, 8, 2, in);
		must_be_empty(side.rx);
		barrier(&side);
		got.tag = 3;
		POST(&side, fi_trecvmsg(side.ep, &got, FI_COMPLETION));
		next(&side, side.rx);
		/* a receive without a completion that is cancelled has one */
		POST(&side, fi_trecv(side.ep, in, 8, NULL, FI_ADDR_UNSPEC, 1, 0, in + 1));
		MUST(fi_cancel(&side.ep->fid, in + 1));
		IS(next_error(&side, side.rx).err == FI_ECANCELED);
	}
	barrier(&side);
	close_side(&side);
}

static void wait_counter(struct side *side, struct fid_cntr *cntr, uint64_t value)
{
	double limit = now() + SECONDS;

	while (fi_cntr_read(cntr) < value) {
		progress(side);
		if (now() > limit)
			die("a counter is %llu instead of %llu", (unsigned long long)fi_cntr_read(cntr), (unsigned long long)value);
	}
	IS(fi_cntr_read(cntr) == value);
	IS(fi_cntr_readerr(cntr) == 0);
}

static void check_counters(void)
{
	static const size_t lengths[] = { 8, 5000, 300000 };
	enum { ROUNDS = 30 };
	struct side side;

	open_domain_for(&side, CAPS);
	side.sent = counter(&side);
	side.received = counter(&side);
	side.ep = endpoint_on(&side, 0);
	struct name own = name_of(side.ep), other = exchange(&own);
	side.peer = insert(&side, &other);
	for (unsigned i = 0; i < ROUNDS; i++) {
		size_t len = lengths[i % 3];
		int tagged = i % 2;

		if (first == (int)(i / 3 % 2)) {
			fill(out, len, i);
			uint64_t before = fi_cntr_read(side.sent);

			/* the sends of the last round are complete */
			POST(&side, transmit(&side, tagged, len == 8 ? INJECT : SEND, out, len, i, 0, NULL));
			wait_counter(&side, side.sent, before + 1);
		} else {
			uint64_t before = fi_cntr_read(side.received);

			POST(&side, receive(&side, tagged, RECV, in, len, i, 0, NULL));
			wait_counter(&side, side.received, before + 1);
			must_be(in, len, i);
		}
		barrier(&side);
	}
	wait_counter(&side, side.sent, ROUNDS / 2);
	wait_counter(&side, side.received, ROUNDS / 2);
	barrier(&side);
	close_side(&side);
}

/* Sends or receives one message; the thread sleeps until the counter shows it. */
static void pass_asleep(struct side *side, bool sends, size_t len, unsigned seed)
{
	struct fid_cntr *counter = sends ? side->sent : side->received;
	uint64_t before = fi_cntr_read(counter);

	if (sends) {
		fill(out, len, seed);
		POST(side, transmit(side, 1, SEND, out, len, seed, 0, NULL));
	} else {
		POST(side, receive(side, 1, RECV, in, len, seed, 0, NULL));
	}
	RETURNS(fi_cntr_wait(counter, before + 1, SECONDS * 1000), 0);
	if (!sends)
		must_be(in, len, seed);
}

static long sleeps(void)
{
	struct rusage usage;

	RETURNS(getrusage(RUSAGE_THREAD, &usage), 0);
	return usage.ru_nvcsw;
}

static void check_asleep(void)
{
	enum { ROUNDS = 60, IDLE_MS = 300 };

	for (int queues = 0; queues < 2; queues++) {
		struct side side;

		open_domain_for(&side, CAPS);
		side.sent = counter_of(&side, FI_WAIT_UNSPEC);
		side.received = counter_of(&side, FI_WAIT_UNSPEC);
		if (queues) {
			side.tx = queue(&side, 0);
			side.rx = queue(&side, 0);
		}
		side.ep = endpoint_on(&side, FI_SELECTIVE_COMPLETION);
		struct name own = name_of(side.ep), other = exchange(&own);
		char byte = 0;

		side.peer = insert(&side, &other);
		for (unsigned i = 0; i < ROUNDS; i++)
			pass_asleep(&side, first == (int)(i % 2), i % 3 == 2 ? 300000 : 8, i);
		barrier(&side);
		if (first) {
			long before = sleeps();

			RETURNS(fi_cntr_wait(side.received, ROUNDS, IDLE_MS), -FI_ETIMEDOUT);
			if (sleeps() - before > IDLE_MS / 10)
				die("the thread woke %ld times within %d ms", sleeps() - before, IDLE_MS);
			tell(to_other[1], &byte, 1);
		} else {
			hear(to_this[0], &byte, 1);
		}
		barrier(&side);
		close_side(&side);
	}
}

static void check_readerr(void)
{
	struct side side;

	open_pair(&side, CAPS, FI_SELECTIVE_COMPLETION);
	double limit = now() + SECONDS;
	if (first) {
		/* the other process receives long messages, and calls nothing but fi_cq_readerr */
		struct iovec iov = { out, 300000 };
		struct fi_msg msg = { .msg_iov = &iov, .iov_count = 1, .addr = side.peer, .context = out };

		for (unsigned i = 0; i < 5; i++) {
			fill(out, 300000, i);
			POST(&side, fi_sendmsg(side.ep, &msg, FI_COMPLETION));
			next(&side, side.tx);
		}
	} else {
		volatile uint8_t *last = in + 5 * 200000 - 1;
		struct fi_cq_err_entry error;
		uint8_t want;

		/* of each message 200,000 bytes: the receive fails, which is what the loop waits
		 * for */
		for (unsigned i = 0; i < 5; i++)
			POST(&side, fi_recv(side.ep, in + i * 200000, 200000, NULL, FI_ADDR_UNSPEC, in));
		for (unsigned i = 0; i < 5;) {
			ssize_t got = fi_cq_readerr(side.rx, memset(&error, 0, sizeof error), 0);

			if (got == 1) {
				IS(error.err == FI_ETRUNC);
				i++;
			} else if (got != -FI_EAGAIN) {
				die("fi_cq_readerr: %zd", got);
			}
			if (now() > limit)
				die("%u of 5 errors within %d s", i, SECONDS);
		}
		fill(&want, 1, 0);
		must_be(in, 200000, 0);
		(void)last;
	}
	barrier(&side);
	close_side(&side);
}

static void check_levels(void)
{
	static const uint64_t levels[] = {
		0, FI_INJECT_COMPLETE, FI_TRANSMIT_COMPLETE, FI_DELIVERY_COMPLETE, FI_FENCE, FI_MORE, FI_FENCE | FI_DELIVERY_COMPLETE,
	};
	static const size_t lengths[] = { 8, 5000, 300000 };
	struct side side;
	unsigned seed = 0;

	open_pair(&side, CAPS, 0);
	for (size_t level = 0; level < sizeof levels / sizeof *levels; level++)
		for (int i = 0; i < 3; i++) {
			struct iovec iov = { out, lengths[i] };
			struct fi_msg msg = { .msg_iov = &iov, .iov_count = 1, .addr = side.peer, .context = out };
			struct fi_msg_tagged tmsg = { .msg_iov = &iov, .iov_count = 1, .addr = side.peer, .tag = seed, .context = out };

			seed++;
			if (first) {
				fill(out, lengths[i], seed);
				POST(&side, fi_sendmsg(side.ep, &msg, levels[level] | FI_COMPLETION));
				check_sent(next(&side, side.tx), 0, out);
				POST(&side, fi_tsendmsg(side.ep, &tmsg, levels[level] | FI_COMPLETION));
				check_sent(next(&side, side.tx), 1, out);
			} else {
				POST(&side, fi_recv(side.ep, in, lengths[i], NULL, FI_ADDR_UNSPEC, in));
				check_received(next(&side, side.rx), 0, lengths[i], 0, in);
				must_be(in, lengths[i], seed);
				POST(&side, fi_trecv(side.ep, in, lengths[i], NULL, FI_ADDR_UNSPEC, seed - 1, 0, in));
				check_received(next(&side, side.rx), 1, lengths[i], seed - 1, in);
				must_be(in, lengths[i], seed);
			}
		}
	if (first) {
		struct iovec iov = { out, 8 };
		struct fi_msg msg = { .msg_iov = &iov, .iov_count = 1, .addr = side.peer };

		RETURNS(fi_sendmsg(side.ep, &msg, FI_PEEK), -FI_EBADFLAGS);
		RETURNS(fi_sendmsg(side.ep, NULL, 0), -FI_EINVAL);
		RETURNS(fi_recvmsg(side.ep, &msg, FI_FENCE), -FI_EBADFLAGS);
	}
	barrier(&side);
	close_side(&side);
}

static void check_regions(void)
{
	static const size_t lengths[] = { 8, 5000, 300000 };
	struct iovec iov[5];
	void *descs[5];
	struct fid_mr *mr[2];
	struct side side;

	open_pair(&side, CAPS, 0);
	for (int i = 0; i < 2; i++)
		MUST(fi_mr_reg(side.domain, i ? in : out, LARGEST, FI_SEND | FI_RECV, 0, 100 + i, 0, &mr[i], NULL));
	for (int i = 0; i < 3; i++)
		for (size_t count = 1; count <= 4; count++) {
			unsigned seed = i * 10 + (unsigned)count;

			for (int at = 0; at < 4; at++)
				descs[at] = fi_mr_desc(mr[first ? 0 : 1]);
			parts(iov, first ? out : in, lengths[i], count);
			if (first) {
				fill(out, lengths[i], seed);
				POST(&side, fi_tsendv(side.ep, iov, descs, count, side.peer, seed, out));
				check_sent(next(&side, side.tx), 1, out);
			} else {
				memset(in, 0, lengths[i]);
				POST(&side, fi_trecvv(side.ep, iov, descs, count, FI_ADDR_UNSPEC, seed, 0, in));
				check_received(next(&side, side.rx), 1, lengths[i], seed, in);
				must_be(in, lengths[i], seed);
			}
		}
	parts(iov, in, 500, 5);
	RETURNS(fi_sendv(side.ep, iov, NULL, 5, side.peer, NULL), -FI_EINVAL);
	RETURNS(fi_trecvv(side.ep, iov, NULL, 5, FI_ADDR_UNSPEC, 1, 0, NULL), -FI_EINVAL);
	RETURNS(fi_sendv(side.ep, NULL, NULL, 1, side.peer, NULL), -FI_EINVAL);
	barrier(&side);
	for (int i = 0; i < 2; i++)
		MUST(fi_close(&mr[i]->fid));
	close_side(&side);
}

static void check_self(void)
{
	static const size_t lengths[] = { 0, 8, 4096, 5000, LARGEST };
	struct side side;

	open_domain_for(&side, CAPS | FI_SOURCE);
	open_ep(&side, 0);
	struct name own = name_of(side.ep);
	side.peer = insert(&side, &own);
	for (unsigned i = 0; i < 20; i++) {
		size_t len = lengths[i / 4];
		int tagged = i % 2, early = i / 2 % 2;
		fi_addr_t from;

		fill(out, len, i);
		memset(in, 0, len);
		if (early)
			POST(&side, receive(&side, tagged, RECV, in, len, i, 0, in));
		POST(&side, transmit(&side, tagged, SENDDATA, out, len, i, i, out));
		if (!early)
			POST(&side, receive(&side, tagged, RECV, in, len, i, 0, in));
		struct fi_cq_tagged_entry got = next_from(&side, side.rx, &from);
		check_received(got, tagged, len, i, in);
		IS(got.data == i && from == side.peer);
		must_be(in, len, i);
		check_sent(next(&side, side.tx), tagged, out);
	}
	barrier(&side);
	close_side(&side);
}

static void check_both(void)
{
	enum { COUNT = 500 };
	struct side side;

	open_pair(&side, CAPS, 0);
	barrier(&side); /* so that both dial at the same time */
	for (unsigned i = 0; i < COUNT; i++)
		POST(&side, fi_trecv(side.ep, in + i * 64, 64, NULL, FI_ADDR_UNSPEC, 0, ~0ULL, in + i * 64));
	for (unsigned i = 0; i < COUNT; i++) {
		fill(out + i * 64, 64, i);
		POST(&side, fi_tsend(side.ep, out + i * 64, 64, NULL, side.peer, i, out));
	}
	for (unsigned i = 0; i < COUNT; i++) {
		struct fi_cq_tagged_entry got = next(&side, side.rx);

		/* each once, and in their order */
		check_received(got, 1, 64, i, in + i * 64);
		must_be(in + i * 64, 64, i);
	}
	for (unsigned i = 0; i < COUNT; i++)
		check_sent(next(&side, side.tx), 1, out);
	must_be_empty(side.rx);
	barrier(&side);
	close_side(&side);
}

static void check_parting(void)
{
	enum { ROUNDS = 20 };

	for (unsigned round = 0; round < ROUNDS; round++) {
		struct side side;
		char byte = 0;

		open_pair(&side, CAPS, 0);
		if (first) {
			struct iovec iov = { out, 64 };
			struct fi_msg msg = { .msg_iov = &iov, .iov_count = 1, .addr = side.peer, .context = out };

			fill(out, 64, round);
			/* the receiver's answer to the first message is not read when the second
			 * one is posted */
			for (int i = 0; i < 2; i++) {
				POST(&side, fi_sendmsg(side.ep, &msg, FI_COMPLETION | FI_DELIVERY_COMPLETE));
				hear(to_this[0], &byte, 1);
			}
			for (int i = 0; i < 2; i++)
				check_sent(next(&side, side.tx), 0, out);
		} else {
			for (int i = 0; i < 2; i++) {
				POST(&side, fi_recv(side.ep, in, 64, NULL, FI_ADDR_UNSPEC, in));
				check_received(next(&side, side.rx), 0, 64, 0, in);
				must_be(in, 64, round);
				tell(to_other[1], &byte, 1);
			}
		}
		close_side(&side);
	}
}

static void check_many(void)
{
	enum { COUNT = 5000, LEN = 16 };
	struct side side;

	open_pair(&side, CAPS, 0);
	/* no receive may wait for a message: MPI_Irecv returns before the peer sends */
	for (unsigned i = 0; i < COUNT; i++)
		RETURNS(fi_trecv(side.ep, in + i * LEN, LEN, NULL, FI_ADDR_UNSPEC, i % 100, 1ULL << 63, in + i * LEN), 0);
	barrier(&side);
	unsigned sent = 0, received = 0, posted = 0;
	double limit = now() + SECONDS;

	while (sent < COUNT || received < COUNT) {
		struct fi_cq_tagged_entry entry;

		if (posted < COUNT) {
			fill(out + posted * LEN, LEN, posted);
			ssize_t ret = fi_tsend(side.ep, out + posted * LEN, LEN, NULL, side.peer, posted % 100, out + posted * LEN);

			if (!ret)
				posted++;
			else if (ret != -FI_EAGAIN)
				MUST(ret);
		}
		sent += fi_cq_read(side.tx, &entry, 1) == 1;
		received += fi_cq_read(side.rx, &entry, 1) == 1;
		if (now() > limit)
			die("%u sent, %u received", sent, received);
	}
	for (unsigned i = 0; i < COUNT; i++)
		must_be(in + i * LEN, LEN, i);
	must_be_empty(side.rx);
	must_be_empty(side.tx);
	barrier(&side);
	close_side(&side);
}

static void check_dead(void)
{
	struct side side;

	open_pair(&side, CAPS, 0);
	if (first) {
		struct name none = name_of(side.ep);
		const char *timeout = getenv("FI_WEFT_CONNECT_TIMEOUT");
		double began = now(), limit = began + (timeout ? atof(timeout) : 10);

		none.bytes[2] ^= 0x55; /* another port */
		fi_addr_t dead = insert(&side, &none);
		for (int i = 0; i < 3; i++)
			POST(&side, fi_send(side.ep, out, 8, NULL, dead, out + i));
		POST(&side, fi_send(side.ep, out, LARGEST, NULL, dead, out + 3));
		/* the other peer is not disturbed */
		for (unsigned i = 0; i < 50; i++) {
			POST(&side, fi_send(side.ep, out, 64, NULL, side.peer, out + 100));
			for (;;) {
				struct fi_cq_tagged_entry got;
				ssize_t read = fi_cq_read(side.tx, &got, 1);

				if (read == 1) {
					IS(got.op_context == out + 100);
					break;
				}
				IS(read == -FI_EAGAIN);
				IS(now() < began + 5);
			}
		}
		for (int i = 0; i < 4; i++) {
			struct fi_cq_err_entry error = next_error(&side, side.tx);

			IS(error.op_context == out + i);
			IS(error.err != 0 && error.flags & FI_SEND);
		}
		IS(now() > limit - 1 && now() < limit + 5);
	} else {
		for (unsigned i = 0; i < 50; i++) {
			POST(&side, fi_recv(side.ep, in, 64, NULL, FI_ADDR_UNSPEC, in));
			next(&side, side.rx);
		}
	}
	barrier(&side);
	close_side(&side);
}

static void check_removed(void)
{
	struct side side;

	open_pair(&side, CAPS | FI_DIRECTED_RECV, 0);
	if (first) {
		fi_addr_t again;
		struct name other;

		POST(&side, fi_send(side.ep, out, 8, NULL, side.peer, out));
		next(&side, side.tx);
		other.len = sizeof other.bytes;
		MUST(fi_av_lookup(side.av, side.peer, other.bytes, &other.len));
		MUST(fi_av_remove(side.av, &side.peer, 1, 0));
		RETURNS(fi_send(side.ep, out, 8, NULL, side.peer, out), -FI_EINVAL);
		RETURNS(fi_tinject(side.ep, out, 8, side.peer, 1), -FI_EINVAL);
		RETURNS(fi_recv(side.ep, in, 8, NULL, side.peer, in), -FI_EINVAL);
		RETURNS(fi_send(side.ep, out, 8, NULL, FI_ADDR_UNSPEC, out), -FI_EINVAL);
		RETURNS(fi_send(side.ep, out, 8, NULL, 12345, out), -FI_EINVAL);
		again = insert(&side, &other);
		IS(again == side.peer);
		POST(&side, fi_send(side.ep, out, 8, NULL, again, out));
		next(&side, side.tx);
	} else {
		for (int i = 0; i < 2; i++) {
			POST(&side, fi_recv(side.ep, in, 8, NULL, side.peer, in));
			next(&side, side.rx);
		}
	}
	barrier(&side);
	close_side(&side);
}

static void check_objects(void)
{
	struct side side, other;
	struct fid_ep *ep, *alias = NULL;
	struct fid_eq *eq;
	struct fi_eq_attr eq_attr = { .wait_obj = FI_WAIT_NONE };
	struct name name, same;
	size_t value, len;
	uint64_t flags;
	bool no = false;

	open_domain_for(&side, CAPS);
	open_domain_for(&other, CAPS);
	side.tx = queue(&side, 0);
	side.rx = queue(&side, 0);
	MUST(fi_eq_open(side.fabric, &eq_attr, &eq, NULL));
	MUST(fi_endpoint(side.domain, side.info, &side.ep, &side));
	ep = side.ep;
	IS(ep->fid.fclass == FI_CLASS_EP && ep->fid.context == &side);

	/* enabling needs an address vector, and a queue or a counter for each direction */
	RETURNS(fi_send(ep, out, 8, NULL, 0, NULL), -FI_EOPBADSTATE);
	RETURNS(fi_enable(ep), -FI_ENOCQ);
	RETURNS(fi_ep_bind(ep, &other.av->fid, 0), -FI_EDOMAIN);
	RETURNS(fi_ep_bind(ep, &side.tx->fid, 0), -FI_EINVAL);
	RETURNS(fi_ep_bind(ep, &side.tx->fid, FI_TRANSMIT | FI_PEEK), -FI_EBADFLAGS);
	MUST(fi_ep_bind(ep, &side.tx->fid, FI_TRANSMIT));
	RETURNS(fi_ep_bind(ep, &side.rx->fid, FI_TRANSMIT), -FI_EINVAL);
	RETURNS(fi_enable(ep), -FI_ENOCQ);
	MUST(fi_ep_bind(ep, &side.rx->fid, FI_RECV));
	RETURNS(fi_enable(ep), -FI_ENOAV);
	RETURNS(fi_ep_bind(ep, &side.av->fid, FI_SEND), -FI_EBADFLAGS);
	MUST(fi_ep_bind(ep, &side.av->fid, 0));
	RETURNS(fi_ep_bind(ep, &side.av->fid, 0), -FI_EINVAL);
	MUST(fi_ep_bind(ep, &eq->fid, 0));
	RETURNS(fi_ep_bind(ep, &eq->fid, 0), -FI_EINVAL);
	RETURNS(fi_ep_bind(ep, &side.domain->fid, 0), -FI_EINVAL);
	MUST(fi_enable(ep));
	RETURNS(fi_close(&side.av->fid), -FI_EBUSY);
	RETURNS(fi_close(&side.tx->fid), -FI_EBUSY);
	RETURNS(fi_close(&eq->fid), -FI_EBUSY);
	RETURNS(fi_close(&side.domain->fid), -FI_EBUSY);

	/* the name: of the requested host, with a port; short buffers */
	name = name_of(ep);
	IS(name.len == 16);
	len = 4;
	RETURNS(fi_getname(&ep->fid, name.bytes, &len), -FI_ETOOSMALL);
	IS(len == 16);
	RETURNS(fi_setname(&ep->fid, name.bytes, 16), -FI_EOPBADSTATE);
	/* another endpoint gets another name, or the one that it is given */
	other.tx = queue(&other, 0);
	other.rx = queue(&other, 0);
	MUST(fi_endpoint(other.domain, other.info, &other.ep, NULL));
	MUST(fi_ep_bind(other.ep, &other.av->fid, 0));
	MUST(fi_ep_bind(other.ep, &other.tx->fid, FI_TRANSMIT | FI_RECV));
	/* fi_cm(3), fi_setname: "If an address cannot be assigned, [...] an appropriate fabric error number is returned" */
	name = name_of(ep);
	RETURNS(fi_setname(&other.ep->fid, name.bytes, 16), -FI_EADDRINUSE);
	len = sizeof same.bytes;
	RETURNS(fi_getname(&other.ep->fid, same.bytes, &len), -FI_EOPBADSTATE);
	/* 203.0.113.1 is of no host: that of a kernel's device is -FI_ENODEV */
	struct name nowhere = name;
	memcpy(nowhere.bytes + 4, "\xcb\0\x71\1", 4);
	int foreign = fi_setname(&other.ep->fid, nowhere.bytes, 16);
	IS(foreign == -FI_EADDRNOTAVAIL || foreign == -FI_ENODEV);
	/* "If no service address is specified [...] the provider will allocate a service address" */
	memset(name.bytes + 2, 0, 2);
	MUST(fi_setname(&other.ep->fid, name.bytes, 16));
	same = name_of(other.ep);
	IS(memcmp(same.bytes + 2, name.bytes + 2, 2) && !memcmp(same.bytes + 4, name.bytes + 4, 4));
	IS(fi_setname(&other.ep->fid, nowhere.bytes, 16) == foreign);
	MUST(fi_enable(other.ep));
	name = name_of(other.ep);
	IS(!memcmp(same.bytes, name.bytes, 8));
	/* fi_close without fi_enable frees the address */
	MUST(fi_close(&other.ep->fid));
	MUST(fi_endpoint(other.domain, other.info, &other.ep, NULL));
	MUST(fi_setname(&other.ep->fid, name.bytes, 16));
	MUST(fi_close(&other.ep->fid));
	MUST(fi_endpoint(other.domain, other.info, &other.ep, NULL));
	MUST(fi_ep_bind(other.ep, &other.av->fid, 0));
	MUST(fi_ep_bind(other.ep, &other.tx->fid, FI_TRANSMIT | FI_RECV));
	name = name_of(ep);
	name.bytes[2] ^= 0x2a;
	MUST(fi_setname(&other.ep->fid, name.bytes, 16));
	MUST(fi_enable(other.ep));
	same = name_of(other.ep);
	IS(!memcmp(same.bytes, name.bytes, 8));

	/* what is for connected endpoints */
	RETURNS(fi_connect(ep, name.bytes, NULL, 0), -FI_ENOSYS);
	RETURNS(fi_accept(ep, NULL, 0), -FI_ENOSYS);
	RETURNS(fi_shutdown(ep, 0), -FI_ENOSYS);
	len = 16;
	RETURNS(fi_getpeer(ep, name.bytes, &len), -FI_ENOSYS);
	/* what the endpoint was not made for */
	RETURNS(fi_write(ep, out, 8, NULL, 0, 0, 0, NULL), -FI_EOPNOTSUPP);

	/* options */
	len = sizeof value;
	MUST(fi_getopt(&ep->fid, FI_OPT_ENDPOINT, FI_OPT_MIN_MULTI_RECV, &value, &len));
	value = 77;
	MUST(fi_setopt(&ep->fid, FI_OPT_ENDPOINT, FI_OPT_MIN_MULTI_RECV, &value, sizeof value));
	value = 0;
	MUST(fi_getopt(&ep->fid, FI_OPT_ENDPOINT, FI_OPT_MIN_MULTI_RECV, &value, &len));
	IS(value == 77 && len == sizeof value);
	RETURNS(fi_setopt(&ep->fid, FI_OPT_ENDPOINT, FI_OPT_MIN_MULTI_RECV, &value, 4), -FI_EINVAL);
	RETURNS(fi_getopt(&ep->fid, FI_OPT_ENDPOINT, FI_OPT_CM_DATA_SIZE, &value, &len), -FI_ENOPROTOOPT);
	RETURNS(fi_getopt(&ep->fid, FI_OPT_ENDPOINT, 9 /* FI_OPT_XPU_TRIGGER */, &value, &len), -FI_EOPNOTSUPP);
	/* there is no CUDA */
	RETURNS(fi_setopt(&ep->fid, FI_OPT_ENDPOINT, 10 /* FI_OPT_CUDA_API_PERMITTED */, &no, sizeof no), -FI_EINVAL);
	/* soft0 reaches its peers by shared memory alone */
	RETURNS(fi_setopt(&ep->fid, FI_OPT_ENDPOINT, 11 /* FI_OPT_SHARED_MEMORY_PERMITTED */, &no, sizeof no), -FI_EOPNOTSUPP);
	MUST(fi_getopt(&ep->fid, FI_OPT_ENDPOINT, 12 /* FI_OPT_MAX_MSG_SIZE */, &value, &len));
	IS(value == side.info->ep_attr->max_msg_size);
	MUST(fi_getopt(&ep->fid, FI_OPT_ENDPOINT, 17 /* FI_OPT_INJECT_TAGGED_SIZE */, &value, &len));
	IS(value == side.info->tx_attr->inject_size);
	MUST(fi_getopt(&ep->fid, FI_OPT_ENDPOINT, 14 /* FI_OPT_MAX_RMA_SIZE */, &value, &len));
	IS(value == side.info->ep_attr->max_msg_size);
	MUST(fi_getopt(&ep->fid, FI_OPT_ENDPOINT, 18 /* FI_OPT_INJECT_RMA_SIZE */, &value, &len));
	IS(value == side.info->tx_attr->inject_size);
	/* without FI_ATOMIC */
	RETURNS(fi_getopt(&ep->fid, FI_OPT_ENDPOINT, 15 /* FI_OPT_MAX_ATOMIC_SIZE */, &value, &len), -FI_ENOPROTOOPT);
	RETURNS(fi_getopt(&ep->fid, FI_OPT_ENDPOINT, 19 /* FI_OPT_INJECT_ATOMIC_SIZE */, &value, &len), -FI_ENOPROTOOPT);

	/* default flags, and those of an alias */
	flags = FI_TRANSMIT | FI_DELIVERY_COMPLETE;
	MUST(fi_control(&ep->fid, FI_SETOPSFLAG, &flags));
	flags = FI_RECV | FI_MULTI_RECV;
	MUST(fi_control(&ep->fid, FI_SETOPSFLAG, &flags));
	flags = FI_TRANSMIT | FI_PEEK;
	RETURNS(fi_control(&ep->fid, FI_SETOPSFLAG, &flags), -FI_EBADFLAGS);
	MUST(fi_ep_alias(ep, &alias, FI_TRANSMIT | FI_INJECT));
	flags = FI_TRANSMIT;
	MUST(fi_control(&alias->fid, FI_GETOPSFLAG, &flags));
	IS((flags & ~FI_TRANSMIT) == FI_INJECT);
	flags = FI_RECV;
	MUST(fi_control(&alias->fid, FI_GETOPSFLAG, &flags));
	IS((flags & ~FI_RECV) == FI_MULTI_RECV);
	flags = FI_TRANSMIT;
	MUST(fi_control(&ep->fid, FI_GETOPSFLAG, &flags));
	IS((flags & ~FI_TRANSMIT) == FI_DELIVERY_COMPLETE);
	flags = FI_RECV;
	MUST(fi_control(&ep->fid, FI_SETOPSFLAG, &flags));
	RETURNS(fi_close(&ep->fid), -FI_EBUSY);
	/* a message by the alias to the other endpoint */
	name = name_of(other.ep);
	side.peer = insert(&side, &name);
	MUST(fi_recv(other.ep, in, 8, NULL, FI_ADDR_UNSPEC, in));
	fill(out, 8, 5);
	POST(&side, fi_send(alias, out, 8, NULL, side.peer, out));
	memset(out, 0, 8); /* it was injected */
	check_sent(next(&side, side.tx), 0, out);
	struct side both = { .tx = side.tx, .rx = other.tx };
	next(&both, both.rx);
	must_be(in, 8, 5);
	MUST(fi_close(&alias->fid));
	MUST(fi_close(&ep->fid));
	RETURNS(fi_send(ep, out, 8, NULL, side.peer, out), -FI_EINVAL);
	MUST(fi_close(&eq->fid));
	MUST(fi_endpoint(side.domain, side.info, &side.ep, NULL)); /* one that is never enabled */
	close_side(&side);
	close_side(&other);
}

static void check_flood(void)
{
	enum { COUNT = 100000, LENGTH = 64 };
	struct side side;

	open_pair(&side, CAPS, 0);
	if (first) {
		unsigned posted = 0, done = 0;
		struct fi_cq_tagged_entry entries[16];
		double limit = now() + 2 * SECONDS;

		/* the receiver begins when no more can be posted, or all was */
		int waits = 1;
		while (done < COUNT) {
			ssize_t ret = -FI_EAGAIN;

			if (posted < COUNT) {
				fill(out + posted % 4096 * LENGTH, LENGTH, posted);
				ret = fi_tsend(side.ep, out + posted % 4096 * LENGTH, LENGTH, NULL, side.peer, posted, NULL);
			}
			if (ret == 0)
				posted++;
			else if (ret != -FI_EAGAIN)
				die("fi_tsend: %zd", ret);
			if (ret || posted - done >= 4096) {
				ssize_t got = fi_cq_read(side.tx, entries, 16);

				if (got > 0)
					done += (unsigned)got;
				else if (got != -FI_EAGAIN)
					die("fi_cq_read: %zd", got);
				else if (waits) {
					char byte = 0;

					tell(to_other[1], &byte, 1);
					waits = 0;
				}
			}
			if (now() > limit)
				die("%u posted, %u complete", posted, done);
		}
		if (waits) {
			char byte = 0;

			tell(to_other[1], &byte, 1);
		}
	} else {
		char byte;

		hear(to_this[0], &byte, 1); /* without progress */
		for (unsigned i = 0; i < COUNT; i++) {
			POST(&side, fi_trecv(side.ep, in, LENGTH, NULL, FI_ADDR_UNSPEC, 0, ~0ULL, in));
			check_received(next(&side, side.rx), 1, LENGTH, i, in);
			must_be(in, LENGTH, i);
		}
	}
	barrier(&side);
	close_side(&side);
}

int main(int argc, char **argv)
{
	static const struct {
		const char *name;
		void (*check)(void);
		int alone; /* needs no other process */
	} modes[] = {
		{ "variants", check_variants, 0 },
		{ "inject", check_inject, 0 },
		{ "unexpected", check_unexpected, 0 },
		{ "tags", check_tags, 0 },
		{ "directed", check_directed, 0 },
		{ "source", check_source, 0 },
		{ "multi", check_multi, 0 },
		{ "search", check_search, 0 },
		{ "cancel", check_cancel, 0 },
		{ "truncated", check_truncated, 0 },
		{ "selective", check_selective, 0 },
		{ "counters", check_counters, 0 },
		{ "asleep", check_asleep, 0 },
		{ "readerr", check_readerr, 0 },
		{ "levels", check_levels, 0 },
		{ "regions", check_regions, 0 },
		{ "self", check_self, 0 },
		{ "both", check_both, 0 },
		{ "parting", check_parting, 0 },
		{ "many", check_many, 0 },
		{ "dead", check_dead, 0 },
		{ "removed", check_removed, 0 },
		{ "objects", check_objects, 1 },
		{ "flood", check_flood, 0 },
	};
	int there[2], back[2];

	if (argc != 4 && argc != 5)
		die("usage: rdm MODE PROV NODE [auto]");
	provider = argv[2];
	node = argv[3];
	wants_auto = argc == 5 && !strcmp(argv[4], "auto");
	out = aligned_alloc(4096, LARGEST + 4096);
	in = aligned_alloc(4096, LARGEST + 4096);
	memset(out, 0, LARGEST + 4096);
	memset(in, 0, LARGEST + 4096);
	for (size_t i = 0; i < sizeof modes / sizeof *modes; i++) {
		if (strcmp(argv[1], modes[i].name))
			continue;
		alarm(90U * (unsigned)SLOWNESS);
		if (modes[i].alone) {
			first = 1;
			role = argv[1];
			modes[i].check();
			return 0;
		}
		if (pipe(there) || pipe(back))
			die("pipe: %s", strerror(errno));
		pid_t pid = child("second");
		first = pid != 0;
		memcpy(to_other, first ? there : back, sizeof there);
		memcpy(to_this, first ? back : there, sizeof there);
		/* the end of one process is seen by the other one */
		close(to_other[0]);
		close(to_this[1]);
		if (first)
			role = "first";
		modes[i].check();
		return first ? status_of(pid, "second") : 0;
	}
	die("no such mode");
}
