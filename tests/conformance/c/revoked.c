/* A target closes regions, or refreshes one, while its peer holds keys of the directory.
 *
 *   revoked MODE PROV NODE BITS [HOW]
 *
 *   idle     the peer has written once and then polls, sleeps, computes or sends messages (HOW);
 *            the target closes 5,000 regions
 *   refresh  the same with 5,000 calls of fi_mr_refresh
 *   writing  the peer writes to a region without a pause until it is closed, in 200 rounds, or HOW
 *   stopped  the peer is stopped (SIGSTOP) while it writes; HOW is the number of regions that are
 *            closed meanwhile
 *   pinned   the peer is stopped, and RLIMIT_MEMLOCK has room for 8 of the 64 regions that are
 *            closed meanwhile
 *
 * BITS is the mr_mode that the programs offer. Exits with 0, or prints the failure. */
#define MEMORY (64UL << 10)
#include "end.h"

#include <fcntl.h>
#include <linux/capability.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>

#define CLOSES 5000
#define ROUNDS 200
#define WINDOW 16
#define LENGTH 4096
#define PAGE 4096
/* Limits of calls in seconds: of each one, less than the second for which a close waits for a peer
 * that does not acknowledge it; of 99 of 100, since a machine under load can stop a process for longer;
 * of a close while the peer is stopped. WEFT_TEST_SLOW=1: in an emulated machine. */
#define EACH 0.9
#define MOST (getenv("WEFT_TEST_SLOW") ? EACH : 0.1)
#define STOPPED 1.5
#define EVENT_SECONDS 4

static int bits;
static const char *how;

/* of `writing`; CLOSES at most */
static int rounds(void)
{
	int count = atoi(how);

	return count ? count : ROUNDS;
}

static struct fi_info *info_of(const char *service, uint64_t flags)
{
	struct fi_info *hints = fi_allocinfo(), *info;

	hints->caps = FI_MSG | FI_RMA;
	hints->mode = FI_CONTEXT | FI_CONTEXT2 | FI_RX_CQ_DATA;
	hints->ep_attr->type = FI_EP_MSG;
	hints->domain_attr->mr_mode = bits;
	hints->fabric_attr->prov_name = strdup(provider);
	MUST(fi_getinfo(FI_VERSION(1, 17), node, service, flags, hints, &info));
	fi_freeinfo(hints);
	return info;
}

static struct fid_mr *region(struct end *end, void *at, size_t len, uint64_t key)
{
	struct fid_mr *mr;

	MUST(fi_mr_reg(end->domain, at, len, FI_REMOTE_READ | FI_REMOTE_WRITE, 0, key, 0, &mr, NULL));
	return mr;
}

static struct remote remote_of(struct end *end, struct fid_mr *mr, void *at)
{
	int virtual = !!(end->info->domain_attr->mr_mode & FI_MR_VIRT_ADDR);
	struct remote remote = { .addr = virtual ? (uint64_t)(uintptr_t)at : 0, .key = fi_mr_key(mr) };

	return remote;
}

static int readable(int fd)
{
	struct pollfd entry = { .fd = fd, .events = POLLIN };

	return poll(&entry, 1, 0) > 0;
}

/* ---- duration of calls ---- */

static double took[CLOSES];

static int by_size(const void *a, const void *b)
{
	double left = *(const double *)a, right = *(const double *)b;

	return left < right ? -1 : left > right;
}

static void report(const char *what, size_t count)
{
	double most, worst;

	qsort(took, count, sizeof *took, by_size);
	most = took[count - 1 - count / 100];
	worst = took[count - 1];
	printf("%zu %s: median %.1f us, 99 of 100 %.3f ms, worst %.3f ms\n", count, what, took[count / 2] * 1e6, most * 1e3, worst * 1e3);
	if (worst > EACH)
		die("%s took %.3f s, more than %.3f", what, worst, EACH);
	if (most > MOST)
		die("more than one in 100 of %s took %.3f s, more than %.3f", what, most, MOST);
}

/* ---- the initiator ---- */

static void write_to(struct end *end, const struct remote *remote, size_t len, void *context)
{
	ssize_t posted;

	while ((posted = fi_write(end->ep, end->memory, len, fi_mr_desc(end->mr), 0, remote->addr, remote->key, context)) == -FI_EAGAIN) {
		struct fi_cq_entry entry;

		if (fi_cq_read(end->cq, &entry, 1) == 1)
			die("a completion that was not counted");
	}
	MUST(posted);
}

static void expect_write(struct end *end, const struct remote *remote)
{
	int error;

	write_to(end, remote, LENGTH, NULL);
	error = completion(end, SETUP_SECONDS);
	if (error)
		die("a write to an open region: %s", fi_strerror(error));
}

static void idle(struct end *end, int in)
{
	struct fi_cq_entry entry;
	uint64_t sent = 0, done = 0;
	volatile uint64_t work = 1;

	for (unsigned turn = 0;; turn++) {
		if (!strcmp(how, "sleep") || (turn % 1024 == 0 && readable(in)))
			break;
		if (!strcmp(how, "compute")) {
			for (int i = 0; i < 1000; i++)
				work = work * 3 + 1;
		} else if (!strcmp(how, "poll")) {
			if (fi_cq_read(end->cq, &entry, 1) != -FI_EAGAIN)
				die("a completion of nothing");
		} else if (sent < done + WINDOW && fi_send(end->ep, end->memory, 64, fi_mr_desc(end->mr), 0, NULL) == 0) {
			sent++;
		} else {
			ssize_t got = fi_cq_read(end->cq, &entry, 1);

			if (got == 1)
				done++;
			else if (got != -FI_EAGAIN)
				die("message %llu failed", (unsigned long long)done);
		}
	}
	while (done < sent) {
		if (completion(end, SETUP_SECONDS))
			die("a message failed");
		done++;
	}
	if (sent)
		fprintf(stderr, "%llu messages\n", (unsigned long long)sent);
}

/* Writes until a write fails, with `pause` after each, and waits for all completions. Returns 0, or
 * the errno of a write that failed for another reason than its key. */
static int write_until_refused(struct end *end, const struct remote *remote, useconds_t pause)
{
	unsigned under_way = 0, refused = 0;
	double limit = now() + SETUP_SECONDS, last = now();
	int broken = 0;

	while (!refused || under_way) {
		struct fi_cq_entry entry;
		struct fi_cq_err_entry error = { 0 };
		ssize_t got;

		/* the time during which the process was stopped does not count */
		if (now() - last > 0.5)
			limit += now() - last;
		last = now();
		if (!refused && under_way < WINDOW) {
			ssize_t posted = fi_write(end->ep, end->memory, LENGTH, fi_mr_desc(end->mr), 0, remote->addr, remote->key, NULL);

			if (posted == 0)
				under_way++;
			else if (posted != -FI_EAGAIN)
				return (int)-posted;
			if (pause)
				usleep(pause);
		}
		got = fi_cq_read(end->cq, &entry, 1);
		if (got == 1)
			under_way--;
		if (got == -FI_EAVAIL) {
			MUST(fi_cq_readerr(end->cq, &error, 0));
			under_way--;
			refused++;
			if (error.err != FI_EKEYREJECTED)
				broken = error.err;
		}
		if (now() > limit)
			die("%u writes are lost", under_way);
	}
	return broken;
}

/* Receives the first message of the target, after which the connection works both ways. */
static void hear_a_message(struct end *end)
{
	int error = completion(end, SETUP_SECONDS);

	if (error)
		die("the target's message: %s", fi_strerror(error));
}

static void no_event(struct end *end)
{
	int got = event(end, 0, NULL);

	if (got != -1)
		die("event %d of a connection that was to stay", got);
}

static void expect_end(struct end *end)
{
	int got = event(end, EVENT_SECONDS, NULL);

	if (got != FI_SHUTDOWN)
		die("event %d, expected FI_SHUTDOWN", got);
}

static void initiator(const char *mode, int in, int out)
{
	struct end end = { 0 };
	uint8_t name[128];
	struct remote open, remote;
	char byte;

	hear(in, name, sizeof name);
	end.info = info_of(NULL, 0);
	open_fabric(&end);
	open_endpoint(&end, end.info);
	memset(end.memory, 0x5a, MEMORY);
	MUST(fi_recv(end.ep, end.memory + LENGTH, LENGTH, fi_mr_desc(end.mr), 0, NULL));
	MUST(fi_connect(end.ep, name, NULL, 0));
	expect(&end, FI_CONNECTED, NULL);
	hear(in, &open, sizeof open);
	expect_write(&end, &open);
	tell(out, "w", 1);
	if (!strcmp(mode, "writing")) {
		for (int i = 0; i < rounds(); i++) {
			int error;

			hear(in, &remote, sizeof remote);
			error = write_until_refused(&end, &remote, 0);
			if (error)
				die("round %d: %s", i, fi_strerror(error));
			expect_write(&end, &open);
			tell(out, "r", 1);
		}
	} else if (!strcmp(mode, "stopped") || !strcmp(mode, "pinned")) {
		for (;;) {
			int error, got;

			hear(in, &remote, sizeof remote);
			if (!remote.key)
				break;
			error = write_until_refused(&end, &remote, 200);
			got = event(&end, error ? EVENT_SECONDS : 0.5, NULL);
			if (got != FI_SHUTDOWN && (error || got != -1))
				die("%s, and event %d", fi_strerror(error), got);
			tell(out, got == FI_SHUTDOWN ? "b" : "a", 1);
			if (got == FI_SHUTDOWN)
				exit(0);
		}
	} else {
		idle(&end, in);
	}
	hear(in, &byte, 1);
	expect_write(&end, &open);
	tell(out, "o", 1);
	hear_a_message(&end);
	no_event(&end);
	hear(in, &byte, 1);
	exit(0);
}

/* ---- the target ---- */

static struct end end;
static uint8_t *page; /* the memory of the regions */
static int in, out;
static pid_t peer;

/* Reads receive completions and posts the receives again. */
static void take_messages(void)
{
	struct fi_cq_entry entry;
	ssize_t got;

	while ((got = fi_cq_read(end.cq, &entry, 1)) == 1)
		MUST(fi_recv(end.ep, end.memory + MEMORY / 2, 64, fi_mr_desc(end.mr), 0, NULL));
	if (got == -FI_EAVAIL)
		die("a receive failed: the connection has ended");
	if (got != -FI_EAGAIN)
		MUST(got);
}

static void close_region(struct fid_mr *mr, double *seconds)
{
	double start = now();

	MUST(fi_close(&mr->fid));
	if (seconds)
		*seconds = now() - start;
}

/* `messages`: the peer may send messages meanwhile. */
static void close_many(size_t count, int messages)
{
	for (size_t i = 0; i < count; i++) {
		close_region(region(&end, page, PAGE, 100 + i), &took[i]);
		if (took[i] > STOPPED)
			die("close %zu took %.3f s", i, took[i]);
		if (messages)
			take_messages();
	}
}

static void refresh_many(void)
{
	struct fid_mr *mr = region(&end, page, PAGE, 100);
	struct iovec iov = { .iov_base = page, .iov_len = PAGE };

	for (int i = 0; i < CLOSES; i++) {
		double start = now();

		MUST(fi_mr_refresh(mr, &iov, 1, 0));
		took[i] = now() - start;
	}
	close_region(mr, NULL);
}

static void await_bytes(void)
{
	double limit = now() + SETUP_SECONDS;

	while (!((volatile uint8_t *)page)[0])
		if (now() > limit)
			die("the peer does not write");
}

static void nothing_came(void)
{
	for (int i = 0; i < PAGE; i++)
		if (page[i])
			die("byte %d was written after fi_close had returned", i);
}

static void close_while_written(void)
{
	for (int i = 0; i < rounds(); i++) {
		struct fid_mr *mr;
		struct remote remote;
		char byte;

		memset(page, 0, PAGE);
		mr = region(&end, page, PAGE, 100 + (uint64_t)i);
		remote = remote_of(&end, mr, page);
		tell(out, &remote, sizeof remote);
		await_bytes();
		usleep((useconds_t)(rand() % 300));
		close_region(mr, &took[i]);
		memset(page, 0, PAGE);
		hear(in, &byte, 1);
		nothing_came();
		no_event(&end);
	}
	report("closes of a region that is written to", (size_t)rounds());
}

/* When this returns, the peer does not run. */
static void stop_peer(void)
{
	int status;

	kill(peer, SIGSTOP);
	if (waitpid(peer, &status, WUNTRACED) != peer || !WIFSTOPPED(status))
		die("the peer did not stop");
}

/* Stops the peer while it writes to a region, and closes that region. Returns 0 if the peer was
 * stopped in the middle of a copy (soft0) and has been continued, else 1. */
static int try_to_close(void)
{
	struct fid_mr *mr;
	struct remote remote;
	double start;
	char byte;
	int closed;

	memset(page, 0, PAGE);
	mr = region(&end, page, PAGE, 99);
	remote = remote_of(&end, mr, page);
	tell(out, &remote, sizeof remote);
	await_bytes();
	usleep((useconds_t)(rand() % 300));
	stop_peer();
	start = now();
	closed = fi_close(&mr->fid);
	if (closed == -FI_EBUSY) {
		kill(peer, SIGCONT);
		while ((closed = fi_close(&mr->fid)) == -FI_EBUSY)
			;
		MUST(closed);
		hear(in, &byte, 1);
		if (byte != 'a')
			die("the connection has ended although the close was refused");
		return 0;
	}
	MUST(closed);
	printf("a close while the peer is stopped: %.3f s\n", now() - start);
	if (now() - start > STOPPED)
		die("it took %.3f s, more than %.1f", now() - start, STOPPED);
	return 1;
}

static void close_of_stopped(void)
{
	for (int i = 0; i < 5; i++)
		if (try_to_close())
			return;
	die("the peer is always stopped in the middle of a copy");
}

/* Continues the peer. The connection has then ended on both sides (1), or works on both (0). */
static int go_on(int must_end)
{
	char byte;

	memset(page, 0, PAGE);
	kill(peer, SIGCONT);
	hear(in, &byte, 1);
	nothing_came();
	printf("the connection %s\n", byte == 'b' ? "has ended" : "goes on");
	if (byte != 'b') {
		if (must_end)
			die("only the initiator still has the connection");
		return 0;
	}
	expect_end(&end);
	/* the posted receives are flushed */
	if (completion(&end, EVENT_SECONDS) != FI_ECANCELED)
		die("a receive that is not flushed");
	return 1;
}

static void close_while_stopped(size_t count)
{
	double start;

	close_of_stopped();
	start = now();
	close_many(count, 0);
	printf("%zu more: %.3f s\n", count, now() - start);
	report("closes while the peer is stopped", count);
}

/* Limits locked memory to `size` bytes, as for a user without privileges. */
static void limit_locked(size_t size)
{
	struct rlimit limit = { .rlim_cur = size, .rlim_max = size };
	struct __user_cap_header_struct header = { .version = _LINUX_CAPABILITY_VERSION_3 };
	struct __user_cap_data_struct data[2];

	if (syscall(SYS_capget, &header, data))
		die("capget: %s", strerror(errno));
	data[0].effective &= ~(1U << CAP_IPC_LOCK);
	if (syscall(SYS_capset, &header, data) || setrlimit(RLIMIT_MEMLOCK, &limit))
		die("setting limits: %s", strerror(errno));
}

#define LOCKED (256UL << 10)

/* Registers regions up to the limit; returns their number, and closes them. */
static int regions_that_fit(void)
{
	struct fid_mr *mr[64];
	uint8_t *memory = mmap(NULL, 64 * LOCKED, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	int count = 0;

	while (count < 64 && fi_mr_reg(end.domain, memory + (size_t)count * LOCKED, LOCKED, FI_REMOTE_WRITE, 0, 1000 + (uint64_t)count, 0, &mr[count], NULL) == 0)
		count++;
	for (int i = 0; i < count; i++)
		close_region(mr[i], NULL);
	munmap(memory, 64 * LOCKED);
	return count;
}

static void close_while_limited(void)
{
	int fit;

	limit_locked(8 * LOCKED + LOCKED / 2);
	fit = regions_that_fit();
	printf("%d regions fit\n", fit);
	if (fit < 6 || fit > 8)
		die("the device does not count locked memory: %d regions fit", fit);
	close_of_stopped();
	for (int i = 0; i < 64; i++) {
		uint8_t *memory = mmap(NULL, LOCKED, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

		close_region(region(&end, memory, LOCKED, 2000 + (uint64_t)i), NULL);
		munmap(memory, LOCKED);
	}
}

static void target(const char *mode)
{
	struct fi_info *request;
	struct fid_pep *pep;
	uint8_t name[128] = { 0 };
	size_t size = sizeof name;
	struct remote open;
	int over = 0;
	char byte;

	end.info = info_of("0", FI_SOURCE);
	open_fabric(&end);
	MUST(fi_passive_ep(end.fabric, end.info, &pep, NULL));
	MUST(fi_pep_bind(pep, &end.eq->fid, 0));
	MUST(fi_listen(pep));
	MUST(fi_getname(&pep->fid, name, &size));
	tell(out, name, sizeof name);
	expect(&end, FI_CONNREQ, &request);
	open_endpoint(&end, request);
	for (int i = 0; i < 4 * WINDOW; i++)
		MUST(fi_recv(end.ep, end.memory + MEMORY / 2, 64, fi_mr_desc(end.mr), 0, NULL));
	MUST(fi_accept(end.ep, NULL, 0));
	expect(&end, FI_CONNECTED, NULL);
	page = aligned_alloc(PAGE, PAGE);
	memset(page, 0, PAGE);
	open = remote_of(&end, end.mr, end.memory);
	tell(out, &open, sizeof open);
	hear(in, &byte, 1);
	if (!strcmp(mode, "idle")) {
		close_many(CLOSES, 1);
		report("closes", CLOSES);
	} else if (!strcmp(mode, "refresh")) {
		refresh_many();
		report("refreshes", CLOSES);
	} else if (!strcmp(mode, "writing")) {
		close_while_written();
	} else if (!strcmp(mode, "stopped")) {
		size_t count = (size_t)atoi(how);

		close_while_stopped(count);
		over = go_on(count > 4096);
	} else if (!strcmp(mode, "pinned")) {
		close_while_limited();
		/* a device that can revoke keys alone need not end the connection */
		over = go_on(0);
	} else {
		die("no mode %s", mode);
	}
	if (over)
		exit(status_of(peer, "initiator"));
	if (!strcmp(mode, "stopped") || !strcmp(mode, "pinned"))
		tell(out, &(struct remote){ 0 }, sizeof(struct remote));
	tell(out, "g", 1);
	do
		take_messages();
	while (!readable(in));
	hear(in, &byte, 1);
	take_messages();
	MUST(fi_send(end.ep, end.memory, 64, fi_mr_desc(end.mr), 0, NULL));
	if (completion(&end, SETUP_SECONDS))
		die("a message to the peer failed");
	no_event(&end);
	tell(out, "g", 1);
	exit(status_of(peer, "initiator"));
}

int main(int argc, char **argv)
{
	int down[2], up[2];

	if (argc < 5)
		die("usage: revoked MODE PROV NODE BITS [HOW]");
	provider = argv[2];
	node = argv[3];
	bits = (int)strtol(argv[4], NULL, 0);
	how = argc > 5 ? argv[5] : "0";
	setvbuf(stdout, NULL, _IONBF, 0);
	if (pipe(down) || pipe(up))
		die("pipe: %s", strerror(errno));
	if (!(peer = child("initiator"))) {
		close(down[1]);
		close(up[0]);
		initiator(argv[1], down[0], up[1]);
	}
	role = "target";
	alarm(LIMIT_SECONDS);
	close(down[0]);
	close(up[1]);
	in = up[0];
	out = down[1];
	target(argv[1]);
}
