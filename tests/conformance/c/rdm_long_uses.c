/* Long messages as applications use them, from fi_msg(3), fi_tagged(3), fi_cq(3), fi_poll(3), fi_rma(3) and
 * fi_endpoint(3).
 *
 *   rdm_long_uses fd PROV NODE         both processes sleep in poll(2) on the descriptors of their queues
 *   rdm_long_uses self PROV NODE       an endpoint sends to itself, and to another one of its process
 *   rdm_long_uses signals PROV NODE    a signal handler runs 2,000 times a second in both processes
 *   rdm_long_uses huge PROV NODE       69 MiB; WEFT_RDM_LONG=1: more than 4 GiB
 *   rdm_long_uses delivered PROV NODE  FI_DELIVERY_COMPLETE: the bytes are in the receive that was there
 *   rdm_long_uses restarted PROV NODE  a process is killed, and another one listens at its address
 *   rdm_long_uses rma PROV NODE        messages after RMA writes, of the same memory
 *   rdm_long_uses unsent PROV NODE     fi_cancel of sends
 *   rdm_long_uses claimed PROV NODE    messages that were claimed before their sender was killed
 *   rdm_long_uses many PROV NODE       1,024 unexpected messages
 *   rdm_long_uses mixed PROV NODE      injected, short and long messages without tags match in their order
 *
 * A further argument `auto` requests FI_PROGRESS_AUTO. Ends with 0, or says what went wrong. Plain
 * libfabric 1.17. */
#define _GNU_SOURCE
#include "rdm_long.h"

#include <sys/time.h>

enum { CALLED = WORD_2, LIFE, ALIVE, ADDRESS, KEY = ADDRESS + 2 }; /* words of the board */

static void good(const struct op *op)
{
	IS(op->done == 1);
	if (op->err)
		die("%s", fi_strerror(op->err));
}

static void tsend(struct side *side, const void *bytes, size_t len, uint64_t tag, struct op *op)
{
	PUT(side, fi_tsend(side->ep, bytes, len, NULL, side->peer, tag, op));
}

static void trecv(struct side *side, void *bytes, size_t len, uint64_t tag, struct op *op)
{
	PUT(side, fi_trecv(side->ep, bytes, len, NULL, FI_ADDR_UNSPEC, tag, 0, op));
}

/* ---- poll(2) ---- */

static void sleep_until(struct side *side, struct op *op)
{
	struct fid *fids[2] = { &side->tx->fid, &side->rx->fid };
	struct pollfd fds[2] = { { .events = POLLIN }, { .events = POLLIN } };
	double start = now();

	MUST(fi_control(fids[0], FI_GETWAIT, &fds[0].fd));
	MUST(fi_control(fids[1], FI_GETWAIT, &fds[1].fd));
	while (!op->done) {
		int result = fi_trywait(side->fabric, fids, 2);

		if (result == 0)
			poll(fds, 2, 3000);
		else
			IS(result == -FI_EAGAIN);
		take_all(side);
		if (now() - start > 2.5)
			die("no completion within 2.5 s of sleeping");
	}
	good(op);
}

static void fd_of(int me)
{
	struct side side;
	uint8_t *out = memory(3 * MIB), *in = memory(3 * MIB);

	wanted.wait = FI_WAIT_FD;
	open_one_of_two(&side, me);
	for (uint64_t i = 0; i < 60; i++) {
		size_t len = i * 50021 % (3 * MIB);
		struct op ops[2] = { 0 };

		fill(out, len, i + (uint64_t)me * 1000);
		if (i % 3 == (uint64_t)me)
			usleep(2000);
		trecv(&side, in, len, i, &ops[1]);
		if (i % 3 == 2)
			usleep(1000 * (unsigned)me);
		tsend(&side, out, len, i, &ops[0]);
		sleep_until(&side, &ops[i % 2]);
		sleep_until(&side, &ops[1 - i % 2]);
		must_be(in, len, i + (uint64_t)(1 - me) * 1000);
	}
	close_one_of_two(&side);
}

/* ---- one process ---- */

static void self_of(int me)
{
	static const size_t lens[] = { 1, 4096, 20000, 64 * KIB + 1, MIB, 5 * MIB };
	struct side side;
	struct fid_ep *ends[2];
	fi_addr_t peers[2];
	uint8_t *out = memory(8 * MIB), *in = memory(8 * MIB);

	(void)me;
	open_long(&side, 0);
	ends[0] = side.ep;
	peers[0] = address(&side, 0);
	ends[1] = endpoint_on(&side, 0);
	publish(ends[1], 1);
	peers[1] = address(&side, 1);
	for (unsigned i = 0; i < 6 * 32; i += all_forms() ? 1 : 5) {
		size_t len = lens[i % 6], room = i / 48 == 3 ? len / 2 : len;
		int from = i / 6 % 2, to = i / 12 % 2;
		bool late = i / 24 % 2;
		struct op send = { 0 }, receive = { 0 };

		fill(out, len, i);
		memset(in, GUARD, len + 1);
		if (!late)
			PUT(&side, fi_trecv(ends[to], in, room, NULL, peers[from], i, 0, &receive));
		PUT(&side, fi_tsend(ends[from], out, len, NULL, peers[to], i, &send));
		if (late) {
			linger(&side, 0.002);
			PUT(&side, fi_trecv(ends[to], in, room, NULL, peers[from], i, 0, &receive));
		}
		await(&side, &send);
		memset(out, REUSED, len);
		await(&side, &receive);
		good(&send);
		if (room < len) {
			IS(receive.err == FI_ETRUNC && receive.error.olen == len - room);
		} else {
			good(&receive);
			IS(receive.entry.len == len && receive.source == peers[from]);
		}
		must_be(in, room, i); /* of the bytes that came */
		IS(in[room] == GUARD);
	}
	/* a long send to itself that nobody receives ends with the endpoint */
	struct op last = { 0 };
	PUT(&side, fi_tsend(ends[1], out, 4 * MIB, NULL, peers[1], 77, &last));
	linger(&side, 0.01);
	MUST(fi_close(&ends[1]->fid));
	close_side(&side);
}

/* ---- signals ---- */

static volatile sig_atomic_t ticks;

static void tick(int number)
{
	(void)number;
	ticks++;
}

static void signals_of(int me)
{
	struct sigaction action = { .sa_handler = tick };
	struct itimerval every = { { 0, 500 }, { 0, 500 } };
	struct message list[40];
	struct side side;

	IS(sigaction(SIGALRM, &action, NULL) == 0);
	open_one_of_two(&side, me);
	IS(setitimer(ITIMER_REAL, &every, NULL) == 0);
	for (int round = 0; round < (all_forms() ? 6 : 2); round++) {
		for (unsigned i = 0; i < 40; i++)
			list[i] = (struct message){ .len = i * 30011 + 1, .room = i * 30011 + 1, .seed = i + 1, .tag = i, .tagged = true };
		transfer_all(&side, me, list, 40, (struct batch){ .both = true, .late = round % 2, .reversed = round % 3 == 0 });
	}
	memset(&every, 0, sizeof every);
	IS(setitimer(ITIMER_REAL, &every, NULL) == 0 && ticks > 10);
	close_one_of_two(&side);
}

/* ---- more than 4 GiB ---- */

/* Address space in which each WINDOW is the same memory. */
#define WINDOW (32 * MIB)

static uint8_t *repeated(size_t len)
{
	int fd = memfd_create("rdm_long_uses", 0);
	size_t size = (len + WINDOW - 1) / WINDOW * WINDOW;
	uint8_t *bytes = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	IS(fd >= 0 && ftruncate(fd, WINDOW) == 0 && bytes != MAP_FAILED);
	for (size_t at = 0; at < size; at += WINDOW)
		IS(mmap(bytes + at, WINDOW, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == bytes + at);
	return bytes;
}

static void huge_of(int me)
{
	size_t most = all_forms() ? 4UL << 30 : 64 * MIB, len = most + 5 * MIB + 7;
	struct side side;
	uint8_t *bytes = repeated(len);

	open_one_of_two(&side, me);
	for (uint64_t i = 0; i < 3; i++) {
		size_t room = i == 2 ? most - 3 : len;
		struct op op = { 0 };

		fill(bytes, WINDOW, i + (me == 0));
		if (me == 1 && i != 1)
			trecv(&side, bytes, room, i, &op);
		meet(&side, 2);
		if (me == 0)
			tsend(&side, bytes, len, i, &op);
		if (me == 1 && i == 1) {
			linger(&side, 0.01);
			trecv(&side, bytes, room, i, &op);
		}
		await(&side, &op);
		if (me == 1 && room < len) {
			IS(op.err == FI_ETRUNC && op.error.olen == len - room && op.error.len == room);
		} else {
			good(&op);
			IS(me == 0 || op.entry.len == len);
		}
		if (me == 1)
			must_be(bytes, WINDOW - 8, i + 1);
		meet(&side, 2);
	}
	close_one_of_two(&side);
}

/* ---- FI_DELIVERY_COMPLETE ---- */

static uint8_t *seen; /* memory that both processes see */

static void delivered_of(int me)
{
	struct side side;

	open_one_of_two(&side, me);
	for (uint64_t i = 0; i < 60; i++) {
		size_t len = i * 40009 + 1;
		struct op op = { 0 };
		uint8_t *in = seen + 3, *out = seen + 4 * MIB;

		if (me == 1) {
			memset(in, GUARD, len);
			trecv(&side, in, len, i, &op);
		} else {
			fill(out, len, i);
		}
		meet(&side, 2);
		if (me == 0) {
			struct iovec iov = { out, len };
			struct fi_msg_tagged msg = { .msg_iov = &iov, .iov_count = 1, .addr = side.peer, .tag = i, .context = &op };

			PUT(&side, fi_tsendmsg(side.ep, &msg, FI_DELIVERY_COMPLETE));
			await(&side, &op);
			must_be(in, len, i);
		} else {
			await(&side, &op);
		}
		good(&op);
		meet(&side, 2);
	}
	close_one_of_two(&side);
}

/* ---- an address of several processes ---- */

enum { LIVES = 4 };

static char service[8]; /* a port, which no other program of this time has */

static void mortal(int life)
{
	struct side side;
	uint8_t *bytes = memory(8 * MIB);

	wanted.service = service;
	open_long(&side, 1 + life);
	side.peer = address(&side, 0);
	for (uint64_t i = 0;; i++) {
		struct op ops[2] = { 0 };
		size_t len = mixed(i) % (2 * MIB);

		fill(bytes, len, i + (uint64_t)life * 1000);
		trecv(&side, bytes + 4 * MIB, 2 * MIB, i, &ops[1]);
		tsend(&side, bytes, len, i, &ops[0]);
		for (int j = 0; j < 2; j++) {
			UNTIL_WITHIN(60, ops[j].done, take_all(&side));
			good(&ops[j]);
		}
		must_be(bytes + 4 * MIB, ops[1].entry.len, i + (uint64_t)life * 1000 + 500);
		if (i == 20)
			break;
		if (life + 1 < LIVES && i == 5 + (uint64_t)life) {
			tsend(&side, bytes, 2 * MIB, 999, &ops[0]); /* the process is killed while it is there */
			linger(&side, life * 0.001);
			kill(getpid(), SIGKILL);
		}
	}
	MUST(fi_close(&side.ep->fid));
}

static void survivor(int ignored)
{
	struct side side;
	uint8_t *bytes = memory(8 * MIB);
	fi_addr_t to = FI_ADDR_UNSPEC;

	(void)ignored;
	open_long(&side, 0);
	for (int life = 0; life < LIVES; life++) {
		unsigned errors = 0;
		double start = now();

		add(LIFE);
		UNTIL(atomic_load(&board->named[1 + life]), usleep(1000));
		if (life == 0)
			to = address(&side, 1);
		else if (memcmp(board->names[1].bytes, board->names[1 + life].bytes, board->names[1].len))
			die("the name is another one");
		side.peer = to;
		for (uint64_t i = 0; i <= 20; i++) {
			struct op ops[2] = { 0 };
			size_t len = mixed(i + 7) % (2 * MIB);

			fill(bytes, len, i + (uint64_t)life * 1000 + 500);
			trecv(&side, bytes + 4 * MIB, 2 * MIB, i, &ops[1]);
			/* the connection may be that to the process before */
			for (;;) {
				memset(&ops[0], 0, sizeof ops[0]);
				tsend(&side, bytes, len, i, &ops[0]);
				UNTIL_WITHIN(BOUND, ops[0].done, take_all(&side));
				if (!ops[0].err || i > 0)
					break;
				if (++errors > 100)
					die("life %d: 100 sends failed: %s", life, fi_strerror(ops[0].err));
				usleep(1000);
			}
			good(&ops[0]);
			UNTIL_WITHIN(BOUND, ops[1].done, take_all(&side));
			good(&ops[1]);
			must_be(bytes + 4 * MIB, ops[1].entry.len, i + (uint64_t)life * 1000);
			IS(ops[1].source == to);
			if (life + 1 < LIVES && i == 5 + (uint64_t)life)
				break;
		}
		fprintf(stderr, "life %d: %u sends failed, %.2f s\n", life, errors, now() - start);
		UNTIL_WITHIN(BOUND, told(ALIVE) > (uint64_t)life, take_all(&side));
	}
	close_side(&side);
}

static void restarted(void)
{
	int status;
	pid_t other;

	snprintf(service, sizeof service, "%d", 20000 + getpid() % 10000);
	other = start("survivor", survivor, 0);

	for (int life = 0; life < LIVES; life++) {
		pid_t pid;

		UNTIL(told(LIFE) > (uint64_t)life, usleep(1000));
		pid = start("mortal", mortal, life);
		IS(waitpid(pid, &status, 0) == pid);
		IS(life + 1 < LIVES ? WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL : status == 0);
		add(ALIVE);
	}
	IS(waitpid(other, &status, 0) == other && status == 0);
}

/* ---- RMA ---- */

static void rma_of(int me)
{
	struct side side;
	uint8_t *bytes = memory(8 * MIB), *to = memory(8 * MIB);
	struct fid_mr *mr, *from_mr;
	void *desc, *from;

	wanted.caps = FI_MSG | FI_TAGGED | FI_SOURCE | FI_DIRECTED_RECV | FI_RMA;
	open_one_of_two(&side, me);
	IS(side.info->tx_attr->msg_order & FI_ORDER_SAW);
	MUST(fi_mr_reg(side.domain, to, 8 * MIB, FI_RECV | FI_SEND | FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE, 0, 5, 0, &mr, NULL));
	desc = fi_mr_desc(mr);
	MUST(fi_mr_reg(side.domain, bytes, 8 * MIB, FI_RECV | FI_SEND | FI_READ | FI_WRITE, 0, 6, 0, &from_mr, NULL));
	from = fi_mr_desc(from_mr);
	put(ADDRESS + me, side.info->domain_attr->mr_mode & FI_MR_VIRT_ADDR ? (uint64_t)to : 0);
	put(KEY + me, fi_mr_key(mr));
	meet(&side, 2);
	for (uint64_t i = 0; i < 40; i++) {
		size_t len = mixed(i) % (3 * MIB);
		struct op write = { 0 }, send = { 0 }, receive = { 0 }, read = { 0 };
		uint64_t own = (uint64_t)me * 1000, other = (uint64_t)(1 - me) * 1000;

		/* a write into the first half, and a message that is received into the second one */
		fill(bytes, len, own + i);
		fill(bytes + 4 * MIB, len, own + i + 500);
		if (i % 2)
			PUT(&side, fi_trecv(side.ep, to + 4 * MIB, len, desc, FI_ADDR_UNSPEC, i, 0, &receive));
		meet(&side, 2);
		PUT(&side, fi_write(side.ep, bytes, len, from, side.peer, told(ADDRESS + 1 - me), told(KEY + 1 - me), &write));
		PUT(&side, fi_tsend(side.ep, bytes + 4 * MIB, len, from, side.peer, i, &send));
		if (i % 2 == 0)
			PUT(&side, fi_trecv(side.ep, to + 4 * MIB, len, desc, FI_ADDR_UNSPEC, i, 0, &receive));
		await(&side, &receive);
		good(&receive);
		must_be(to, len, other + i);
		must_be(to + 4 * MIB, len, other + i + 500);
		await(&side, &write);
		good(&write);
		await(&side, &send);
		good(&send);
		meet(&side, 2);
		/* what the other one has received is read back */
		PUT(&side, fi_read(side.ep, bytes, len, from, side.peer, told(ADDRESS + 1 - me) + 4 * MIB, told(KEY + 1 - me), &read));
		await(&side, &read);
		good(&read);
		must_be(bytes, len, own + i + 500);
		meet(&side, 2);
	}
	MUST(fi_close(&mr->fid));
	MUST(fi_close(&from_mr->fid));
	close_one_of_two(&side);
}

/* ---- fi_cancel of sends ---- */

static void unsent_of(int me)
{
	enum { TIMES = 48 };
	static struct op ops[TIMES], marks[TIMES];
	size_t len = 3 * MIB;
	uint8_t *bytes = memory(len), nothing = 0;
	unsigned cancelled = 0, came = 0, bad = 0, refused = 0;
	struct side side;

	open_one_of_two(&side, me);
	for (unsigned i = 0; i < TIMES; i++) {
		if (me == 1 && i % 2)
			trecv(&side, bytes, len, i, &ops[i]);
		meet(&side, 2);
		if (me == 0) {
			fill(bytes, len, i);
			tsend(&side, bytes, len, i, &ops[i]);
			linger(&side, i / 4 % 4 * 0.0004);
			refused += fi_cancel(&side.ep->fid, &ops[i]) != 0;
			if (i % 2 == 0)
				linger(&side, 0.005);
			add(CALLED);
			await(&side, &ops[i]);
			memset(bytes, REUSED, len);
			if (ops[i].err) {
				IS(ops[i].err == FI_ECANCELED);
				cancelled++;
			}
			tsend(&side, &nothing, 1, 1000 + i, &marks[i]); /* the queue goes on */
			await(&side, &marks[i]);
			good(&marks[i]);
		} else {
			UNTIL(told(CALLED) > i, take_all(&side));
			if (i % 2 == 0)
				trecv(&side, bytes, len, i, &ops[i]);
			trecv(&side, &nothing, 1, 1000 + i, &marks[i]);
			await(&side, &marks[i]);
			good(&marks[i]);
			linger(&side, 0.005);
			if (!ops[i].done)
				(void)fi_cancel(&side.ep->fid, &ops[i]);
			await(&side, &ops[i]);
			if (ops[i].err == 0) {
				IS(ops[i].entry.len == len);
				must_be(bytes, len, i);
				came++;
			} else {
				bad++;
			}
		}
		meet(&side, 2);
	}
	if (me == 0)
		fprintf(stderr, "%u of %u sends cancelled, %u calls refused\n", cancelled, TIMES, refused);
	else
		fprintf(stderr, "%u came, %u did not\n", came, bad);
	close_one_of_two(&side);
}

/* ---- claims ---- */

static void claimed_sender(int ignored)
{
	static struct op ops[8];
	struct side side;
	size_t len = 2 * MIB;
	uint8_t *bytes = memory(8 * len);

	(void)ignored;
	open_long(&side, 1);
	side.peer = address(&side, 0);
	for (uint64_t i = 0; i < 8; i++) {
		fill(bytes + i * len, len, i);
		tsend(&side, bytes + i * len, len, i, &ops[i]);
	}
	for (;;)
		take_all(&side);
}

static int peek(struct side *side, uint64_t tag, uint64_t flags, struct op *op, uint8_t *bytes, size_t len)
{
	struct iovec iov = { bytes, len };
	struct fi_msg_tagged msg = { .msg_iov = &iov, .iov_count = bytes ? 1 : 0, .addr = FI_ADDR_UNSPEC, .tag = tag, .context = op };

	memset(&op->done, 0, sizeof op->done);
	PUT(side, fi_trecvmsg(side->ep, &msg, flags));
	UNTIL_WITHIN(BOUND, op->done, take_all(side));
	return op->err;
}

static void claimed(void)
{
	static struct op claims[8], last;
	struct side side;
	pid_t pid = start("sender", claimed_sender, 0);
	size_t len = 2 * MIB;
	uint8_t *bytes = memory(len);
	int status;

	open_long(&side, 0);
	address(&side, 1);
	UNTIL(peek(&side, 7, FI_PEEK, &last, NULL, 0) == 0, usleep(100));
	for (uint64_t i = 0; i < 4; i++)
		IS(peek(&side, i, FI_PEEK | FI_CLAIM, &claims[i], NULL, 0) == 0 && claims[i].entry.len == len);
	kill(pid, SIGKILL);
	IS(waitpid(pid, &status, 0) == pid);
	linger(&side, 0.3);
	for (uint64_t i = 0; i < 3; i++) {
		/* the bytes may have come before */
		if (peek(&side, i, FI_CLAIM, &claims[i], bytes, len) == 0)
			must_be(bytes, len, i);
		else
			IS(claims[i].err == FI_ECONNABORTED && claims[i].error.tag == i);
		IS(claims[i].done == 1);
	}
	IS(peek(&side, 3, FI_CLAIM | FI_DISCARD, &claims[3], NULL, 0) == 0);
	for (uint64_t i = 4; i < 8; i++) {
		memset(&last, 0, sizeof last);
		trecv(&side, bytes, len, i, &last);
		linger(&side, 0.02);
		if (!last.done)
			MUST(fi_cancel(&side.ep->fid, &last));
		UNTIL_WITHIN(BOUND, last.done, take_all(&side));
		if (!last.err)
			must_be(bytes, len, i);
	}
	close_side(&side);
}

/* ---- many ---- */

static void many_of(int me)
{
	enum { COUNT = 1024 };
	static struct op ops[COUNT];
	size_t len = 70001;
	struct side side;
	uint8_t *bytes = memory(COUNT * len);

	open_one_of_two(&side, me);
	for (int round = 0; round < 2; round++) {
		uint64_t before;

		memset(ops, 0, sizeof ops);
		for (uint64_t i = 0; i < COUNT; i++)
			if (me == 0)
				fill(bytes + i * len, len, i);
			else
				memset(bytes + i * len, GUARD, len);
		before = resident();
		meet(&side, 2);
		if (me == 0)
			for (uint64_t i = 0; i < COUNT; i++)
				tsend(&side, bytes + i * len, len, i, &ops[i]);
		add(SENT);
		UNTIL(told(SENT) >= 2 * (uint64_t)(round + 1), take_all(&side));
		linger(&side, 0.1);
		if (me == 1)
			fprintf(stderr, "%u unexpected messages: %lld KiB more\n", COUNT, (long long)(resident() - before) / 1024);
		for (uint64_t i = 0; me == 1 && i < COUNT; i++) {
			uint64_t which = round ? i : COUNT - 1 - i;

			trecv(&side, bytes + which * len, len, which, &ops[which]);
		}
		for (uint64_t i = 0; i < COUNT; i++) {
			await(&side, &ops[i]);
			good(&ops[i]);
			must_be(bytes + i * len, len, i);
		}
		meet(&side, 2);
	}
	close_one_of_two(&side);
}

/* ---- order ---- */

static void mixed_of(int me)
{
	enum { COUNT = 900, WIDTH = 16 };
	static struct op ops[COUNT];
	static const size_t lens[] = { 0, 64, 4096, 4097, 16 * KIB, 40000, 70001, 300000 };
	size_t room = 300000;
	uint8_t *bytes = memory(COUNT * room);
	struct side side;

	open_one_of_two(&side, me);
	meet(&side, 2);
	for (uint64_t i = 0; i < COUNT; i++) {
		size_t len = lens[mixed(i) % 8];
		uint8_t *place = bytes + i * room;

		if (me == 0) {
			fill(place, len, i);
			if (len <= 4096 && i % 2) {
				PUT(&side, fi_injectdata(side.ep, place, len, i, side.peer));
				memset(place, REUSED, len);
				ops[i].done = 1;
			} else {
				PUT(&side, fi_senddata(side.ep, place, len, NULL, i, side.peer, &ops[i]));
			}
		} else {
			PUT(&side, fi_recv(side.ep, place, room, NULL, FI_ADDR_UNSPEC, &ops[i]));
			if (i % 50 == 0)
				linger(&side, 0.002);
		}
	}
	for (uint64_t i = 0; i < COUNT; i++) {
		await(&side, &ops[i]);
		good(&ops[i]);
		if (me == 1) {
			IS(ops[i].entry.data == i && ops[i].entry.len == lens[mixed(i) % 8]);
			must_be(bytes + i * room, ops[i].entry.len, i);
		}
	}
	close_one_of_two(&side);
}

static void one_process(void (*main)(int))
{
	IS(status_of(start("process", main, 0), "process") == 0);
}

static void fd(void) { run_two(fd_of); }
static void self(void) { one_process(self_of); }
static void signals(void) { run_two(signals_of); }
static void huge(void) { run_two(huge_of); }
static void delivered(void)
{
	seen = mmap(NULL, 8 * MIB, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	IS(seen != MAP_FAILED);
	run_two(delivered_of);
}
static void rma(void) { run_two(rma_of); }
static void unsent(void) { run_two(unsent_of); }
static void many(void) { run_two(many_of); }
static void mixture(void) { run_two(mixed_of); }

int main(int argc, char **argv)
{
	static const struct mode modes[] = {
		{ "fd", fd },		    { "self", self }, { "signals", signals }, { "huge", huge },	  { "delivered", delivered },
		{ "restarted", restarted }, { "rma", rma },   { "unsent", unsent },   { "many", many }, { "mixed", mixture },
		{ "claimed", claimed },
	};

	return run_mode(modes, sizeof modes / sizeof *modes, argc, argv);
}
