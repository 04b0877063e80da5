/* Endpoints with many peers whose peers are killed or stopped while this side has not yet decided
 * about their messages, and calls that wait, from fi_msg(3), fi_tagged(3) and fi_cq(3).
 * A third process sends afterwards in each of the first modes, and is not disturbed.
 *
 *   rdm_leavers peeked PROV NODE     FI_PEEK has found a message; its sender is killed
 *   rdm_leavers claimed PROV NODE    the same with FI_CLAIM, before the claimed message is received
 *   rdm_leavers discarded PROV NODE  the same, before the claimed message is discarded
 *   rdm_leavers multi PROV NODE      messages into a multi-receive buffer, one of a killed sender
 *   rdm_leavers contact PROV NODE    the first message to a process that is stopped for 2 s
 *   rdm_leavers signalled PROV NODE  fi_cq_signal and messages end fi_cq_sread; its timeout
 *   rdm_leavers threshold PROV NODE  FI_CQ_COND_THRESHOLD; fi_cq_sreadfrom
 *
 * A further argument `auto` requests FI_PROGRESS_AUTO. Ends with 0, or says what went wrong. Plain
 * libfabric 1.17; link with -pthread. */
#include "rdm_processes.h"

#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>

enum { MIDDLE, LEAVER, OTHER };		     /* places on the board */
enum { SENT, GO, DONE, LIMIT = 12, LONG = 1 << 20 }; /* words; seconds until a killed peer is noticed */

static int untagged; /* FI_MULTI_RECV is a flag of fi_recvmsg alone */

static ssize_t send_to(struct side *side, const void *bytes, size_t len, fi_addr_t to, void *context)
{
	if (untagged)
		return fi_send(side->ep, bytes, len, NULL, to, context);
	return fi_tsend(side->ep, bytes, len, NULL, to, 1, context);
}

static uint8_t *large(void)
{
	uint8_t *bytes = malloc(LONG);

	if (!bytes)
		die("malloc");
	return bytes;
}

/* Sends a message of LONG bytes with the tag 1, and does not end by itself. */
static void leaver(int len)
{
	struct side side;
	uint8_t *bytes = large();

	open_side(&side, LEAVER);
	fi_addr_t to = address(&side, MIDDLE);
	fill(bytes, (size_t)len, 1);
	POST(&side, send_to(&side, bytes, (size_t)len, to, NULL));
	put(SENT, 1);
	for (;;)
		progress(&side);
}

/* Sends three messages of LONG, 8 and LONG bytes with the tag 1, when it is told to. */
static void other(int unused)
{
	static const size_t lengths[] = { LONG, 8, LONG };
	struct side side;
	uint8_t *bytes = large();

	(void)unused;
	open_side(&side, OTHER);
	fi_addr_t to = address(&side, MIDDLE);
	UNTIL(told(GO), progress(&side));
	for (int i = 0; i < 3; i++) {
		fill(bytes, lengths[i], 10 + (uint64_t)i);
		POST(&side, send_to(&side, bytes, lengths[i], to, NULL));
		(void)next(&side, side.tx);
	}
	UNTIL(told(DONE), progress(&side));
	close_side(&side);
}

static ssize_t receive(struct side *side, void *bytes, size_t len, void *context, uint64_t flags)
{
	struct iovec iov = { .iov_base = bytes, .iov_len = len };
	struct fi_msg_tagged tagged = { .msg_iov = &iov, .iov_count = len ? 1 : 0, .addr = FI_ADDR_UNSPEC, .tag = 1, .context = context };
	struct fi_msg msg = { .msg_iov = &iov, .iov_count = len ? 1 : 0, .addr = FI_ADDR_UNSPEC, .context = context };
	ssize_t ret;

	while ((ret = untagged ? fi_recvmsg(side->ep, &msg, flags) : fi_trecvmsg(side->ep, &tagged, flags)) == -FI_EAGAIN)
		progress(side);
	return ret;
}

/* The next entry: its error, or 0. */
static int entry_of(struct side *side, struct fi_cq_tagged_entry *entry, struct fi_cq_err_entry *error, double limit)
{
	ssize_t got = -FI_EAGAIN;

	UNTIL_WITHIN(limit, (got = fi_cq_read(side->rx, entry, 1)) != -FI_EAGAIN, (void)fi_cq_read(side->tx, NULL, 0));
	if (got == 1)
		return 0;
	RETURNS(got, -FI_EAVAIL);
	memset(error, 0, sizeof *error);
	RETURNS(fi_cq_readerr(side->rx, error, 0), 1);
	IS(error->err > 0);
	return error->err;
}

static void end(pid_t pid, int killed)
{
	int status;

	IS(waitpid(pid, &status, 0) == pid);
	if (killed ? !WIFSIGNALED(status) : status != 0)
		die("the status of a process is %x", (unsigned)status);
}

/* A peek finds the message, which has not been read from its sender. */
static void peek(struct side *side, void *context, uint64_t flags)
{
	struct fi_cq_err_entry error;
	struct fi_cq_tagged_entry entry;

	for (;;) {
		MUST(receive(side, NULL, 0, context, FI_PEEK | flags));
		int err = entry_of(side, &entry, &error, SECONDS);
		if (err == 0)
			break;
		IS(err == FI_ENOMSG && error.op_context == context);
	}
	IS(entry.op_context == context && entry.tag == 1 && entry.len == LONG);
}

/* The third process's messages are received, in their order. */
static void finish(struct side *side, pid_t pid, uint8_t *bytes, int first)
{
	static const size_t lengths[] = { LONG, 8, LONG };
	struct fi_cq_tagged_entry entry;
	struct fi_cq_err_entry error;

	put(GO, 1);
	for (int i = 0; i < 3; i++) {
		if (i >= first)
			MUST(receive(side, bytes, LONG, &entry, 0));
		if (entry_of(side, &entry, &error, SECONDS))
			die("a message of the other process: %s", fi_strerror(error.err));
		IS(entry.len == lengths[i]);
		must_be(bytes, lengths[i], 10 + (uint64_t)i);
	}
	put(DONE, 1);
	end(pid, 0);
	close_side(side);
}

static void undecided(uint64_t claim, uint64_t then)
{
	pid_t leaves = start("leaver", leaver, LONG), stays = start("other", other, 0);
	struct fi_context2 context = { { 0 } };
	struct fi_cq_tagged_entry entry;
	struct fi_cq_err_entry error = { 0 };
	struct side side;
	uint8_t *bytes = large();
	int err;

	open_side(&side, MIDDLE);
	(void)address(&side, LEAVER);
	(void)address(&side, OTHER);
	peek(&side, &context, claim);
	kill(leaves, SIGKILL);
	end(leaves, 1);
	if (then) {
		ssize_t ret = receive(&side, bytes, then & FI_DISCARD ? 0 : LONG, &context, then);
		/* the message may have gone with its sender already */
		if (ret != -FI_EINVAL && ret != -FI_ENOMSG) {
			MUST(ret);
			err = entry_of(&side, &entry, &error, LIMIT);
			printf("the claimed message: %d (%s)\n", err, fi_strerror(err));
			if (!(then & FI_DISCARD))
				IS(err != 0);
			IS((err ? error.op_context : entry.op_context) == &context);
		} else {
			printf("the claim returns %zd\n", ret);
		}
		finish(&side, stays, bytes, 0);
		return;
	}
	/* this receive takes the message, which fails, or the next one */
	MUST(receive(&side, bytes, LONG, &context, 0));
	put(GO, 1);
	err = entry_of(&side, &entry, &error, LIMIT);
	printf("the receive: %d (%s)\n", err, fi_strerror(err));
	IS((err ? error.op_context : entry.op_context) == &context);
	if (err) {
		finish(&side, stays, bytes, 0);
	} else {
		/* it was the first message of the other process */
		IS(entry.len == LONG);
		must_be(bytes, LONG, 10);
		MUST(receive(&side, bytes, LONG, &context, 0));
		IS(entry_of(&side, &entry, &error, SECONDS) == 0 && entry.len == 8);
		MUST(receive(&side, bytes, LONG, &context, 0));
		IS(entry_of(&side, &entry, &error, SECONDS) == 0 && entry.len == LONG);
		put(DONE, 1);
		end(stays, 0);
		close_side(&side);
	}
}

static void check_peeked(void) { undecided(0, 0); }
static void check_claimed(void) { undecided(FI_CLAIM, FI_CLAIM); }
static void check_discarded(void) { undecided(FI_CLAIM, FI_CLAIM | FI_DISCARD); }

/* Each byte of the buffer is in at most one message, its release is reported once, and a message of
 * a killed sender is reported once too, as an error. */
static void check_multi(void)
{
	pid_t leaves, stays;
	struct fi_context2 context = { { 0 } };
	struct fi_cq_tagged_entry entry;
	struct fi_cq_err_entry error;
	size_t min = LONG, size = 3 * LONG + 100;
	uint8_t *buffer = malloc(size), *bytes = large();
	int released = 0, good = 0, failed = 0;
	struct side side;

	untagged = 1;
	leaves = start("leaver", leaver, LONG);
	stays = start("other", other, 0);
	open_side(&side, MIDDLE);
	MUST(fi_setopt(&side.ep->fid, FI_OPT_ENDPOINT, FI_OPT_MIN_MULTI_RECV, &min, sizeof min));
	(void)address(&side, LEAVER);
	(void)address(&side, OTHER);
	UNTIL(told(SENT), progress(&side));
	kill(leaves, SIGSTOP);
	MUST(receive(&side, buffer, size, &context, FI_MULTI_RECV));
	kill(leaves, SIGKILL);
	end(leaves, 1);
	put(GO, 1);
	while (good < 3) {
		int err = entry_of(&side, &entry, &error, SECONDS);
		uint64_t flags = err ? error.flags : entry.flags;

		if (err) {
			failed++;
			IS(error.op_context == &context);
		} else if (entry.op_context == &context && entry.buf && entry.len) {
			uint8_t *at = entry.buf;

			IS(at >= buffer && at + entry.len <= buffer + size);
			/* the killed process's message may have arrived as a whole */
			if (entry.len == LONG && !memcmp(at, (fill(bytes, LONG, 1), bytes), LONG))
				printf("the killed process's message has arrived\n");
			else
				must_be(at, entry.len, 10 + (uint64_t)good++);
		} else if (entry.len) {
			must_be(bytes, entry.len, 10 + (uint64_t)good++);
		}
		if (flags & FI_MULTI_RECV) {
			IS(!released++);
			if (good < 3)
				MUST(receive(&side, buffer, size, &context, FI_MULTI_RECV));
			if (good < 3)
				released = 0;
		}
	}
	printf("%d failed, released %d\n", failed, released);
	IS(failed <= 1);
	put(DONE, 1);
	end(stays, 0);
	close_side(&side);
}

/* ---- a stopped target ---- */

static void waits(int unused)
{
	struct side side;
	uint64_t in = 0;

	(void)unused;
	open_side(&side, LEAVER);
	(void)address(&side, MIDDLE);
	POST(&side, fi_trecv(side.ep, &in, 8, NULL, FI_ADDR_UNSPEC, 1, 0, &in));
	put(SENT, 1);
	(void)next(&side, side.rx);
	IS(in == 77);
	put(DONE, 1);
	UNTIL(told(GO), progress(&side));
	close_side(&side);
}

static void check_contact(void)
{
	pid_t pid = start("target", waits, 0);
	struct side side;
	uint64_t out = 77;
	double began;
	int continued = 0;

	open_side(&side, MIDDLE);
	fi_addr_t to = address(&side, LEAVER);
	UNTIL(told(SENT), progress(&side));
	kill(pid, SIGSTOP);
	began = now();
	POST(&side, fi_tsend(side.ep, &out, 8, NULL, to, 1, &out));
	/* the call does not wait for the target, which is stopped for 2 s */
	IS(now() - began < 1.8);
	UNTIL(told(DONE), {
		progress(&side);
		if (!continued && now() - began > 2) {
			continued = 1;
			kill(pid, SIGCONT);
		}
	});
	IS(continued);
	(void)next(&side, side.tx);
	put(GO, 1);
	end(pid, 0);
	close_side(&side);
}

/* ---- waits ---- */

struct wait {
	struct side *side;
	int timeout;
	size_t count;
	const void *cond;
	ssize_t result;
	double took;
	struct fi_cq_tagged_entry entries[8];
};

static void *sread(void *argument)
{
	struct wait *wait = argument;
	double began = now();

	wait->result = fi_cq_sread(wait->side->rx, wait->entries, wait->count, wait->cond, wait->timeout);
	wait->took = now() - began;
	return NULL;
}

/* Sends as many messages of 8 bytes as it is told, each 50 ms after the last one. */
static void sends(int unused)
{
	struct side side;
	uint64_t sent = 0;

	(void)unused;
	open_side(&side, OTHER);
	fi_addr_t to = address(&side, MIDDLE);
	while (!told(DONE)) {
		if (sent == told(GO)) {
			progress(&side);
			continue;
		}
		pause_ms(50);
		POST(&side, fi_tsend(side.ep, &sent, 8, NULL, to, 1, NULL));
		(void)next(&side, side.tx);
		sent++;
	}
	close_side(&side);
}

static void check_signalled(void)
{
	pid_t pid = start("sender", sends, 0);
	struct side side;
	struct wait wait = { .side = &side, .timeout = -1, .count = 1 };
	pthread_t thread;
	uint64_t in;

	wanted.wait = FI_WAIT_UNSPEC;
	open_side(&side, MIDDLE);
	(void)address(&side, OTHER);
	for (int round = 0; round < 20; round++) {
		POST(&side, fi_trecv(side.ep, &in, 8, NULL, FI_ADDR_UNSPEC, 1, 0, &in));
		IS(!pthread_create(&thread, NULL, sread, &wait));
		pause_ms(20);
		MUST(fi_cq_signal(side.rx));
		pthread_join(thread, NULL);
		if (wait.result != -FI_EAGAIN && wait.result != 0)
			die("a signalled fi_cq_sread returns %zd", wait.result);
		wait.timeout = 30;
		sread(&wait);
		if (wait.result != -FI_EAGAIN && wait.result != -FI_ETIMEDOUT)
			die("fi_cq_sread returns %zd after its timeout", wait.result);
		IS(wait.took > 0.025 && wait.took < 5);
		wait.timeout = -1;
		IS(!pthread_create(&thread, NULL, sread, &wait));
		add(GO);
		pthread_join(thread, NULL);
		if (wait.result != 1 || in != (uint64_t)round)
			die("fi_cq_sread returns %zd", wait.result);
		if (wait.took > 5)
			die("fi_cq_sread took %.3f s", wait.took);
	}
	put(DONE, 1);
	end(pid, 0);
	close_side(&side);
}

static void check_threshold(void)
{
	struct fi_cq_attr attr = { .format = FI_CQ_FORMAT_TAGGED, .wait_obj = FI_WAIT_UNSPEC, .wait_cond = FI_CQ_COND_THRESHOLD };
	pid_t pid = start("sender", sends, 0);
	struct side side;
	struct wait wait = { .side = &side, .timeout = 20000, .count = 8, .cond = (void *)(uintptr_t)3 };
	struct fi_cq_tagged_entry entry;
	fi_addr_t from = FI_ADDR_NOTAVAIL, peer;
	uint64_t in[8];

	wanted.wait = FI_WAIT_UNSPEC;
	open_domain_of(&side);
	side.tx = queue(&side, 0);
	MUST(fi_cq_open(side.domain, &attr, &side.rx, NULL));
	side.ep = endpoint_on(&side, 0);
	publish(side.ep, MIDDLE);
	peer = address(&side, OTHER);
	for (int i = 0; i < 8; i++)
		POST(&side, fi_trecv(side.ep, &in[i], 8, NULL, FI_ADDR_UNSPEC, 1, 0, &in[i]));
	put(GO, 4);
	sread(&wait);
	if (wait.result < 3 || wait.result > 4)
		die("fi_cq_sread with a threshold of 3 returns %zd", wait.result);
	if (wait.result == 3)
		(void)next(&side, side.rx);
	/* fewer after the timeout */
	put(GO, 5);
	wait.timeout = 1000;
	sread(&wait);
	if (wait.result != 1 && wait.result != -FI_EAGAIN)
		die("fi_cq_sread with one entry of 3 returns %zd", wait.result);
	IS(wait.took > 0.9 && wait.took < 5);
	if (wait.result != 1)
		(void)next(&side, side.rx);
	put(GO, 6);
	RETURNS(fi_cq_sreadfrom(side.rx, &entry, 1, &from, NULL, 20000), 1);
	if (side.info->caps & FI_SOURCE)
		IS(from == peer);
	RETURNS(fi_cq_sreadfrom(side.rx, &entry, 1, &from, NULL, 0), -FI_EAGAIN);
	put(DONE, 1);
	end(pid, 0);
	close_side(&side);
}

int main(int argc, char **argv)
{
	static const struct mode modes[] = {
		{ "peeked", check_peeked }, { "claimed", check_claimed },   { "discarded", check_discarded }, { "multi", check_multi },
		{ "contact", check_contact }, { "signalled", check_signalled },	{ "threshold", check_threshold },
	};

	alarm(90);
	return run_mode(modes, sizeof modes / sizeof *modes, argc, argv);
}
