/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */
/* Cases on sentences of fi_mr(3), written against libfabric's C calls alone.
 *
 *   PROGRAM --list         prints "CASE FORM" for each run
 *   PROGRAM CASE FORM      runs one; exits with 0 if the sentence holds, with 77 if it does not
 *                          apply (the reason is on stdout), else with 1
 *
 * A form is a set of mr_mode bits that the application offers. Each case takes the result of
 * fi_getinfo(3) and uses addresses, keys and raw keys as the returned bits demand. Cases with a
 * peer run in two processes: split() returns true in the target, the parent, and false in the
 * initiator. */
#ifndef MR_H
#define MR_H

#define _GNU_SOURCE

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <libgen.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <rdma/fabric.h>
#include <rdma/fi_atomic.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>

#define PAGE 4096UL
#define NATIVE (FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY)
#define ALL_ACCESS (FI_SEND | FI_RECV | FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE)
#define REMOTE (FI_REMOTE_READ | FI_REMOTE_WRITE)
#define SECONDS 20
#define SKIPPED 77

static const char *role = "one";
static int failures;

/* ---- reports of failures ---- */

static inline void die(const char *format, ...)
{
	va_list args;

	va_start(args, format);
	fprintf(stderr, "%s: ", role);
	vfprintf(stderr, format, args);
	fprintf(stderr, "\n");
	exit(1);
}

static inline void skip(const char *why)
{
	printf("%s\n", why);
	exit(SKIPPED);
}

#define MUST(call)                                                                                 \
	do {                                                                                       \
		long result_ = (long)(call);                                                       \
		if (result_ < 0)                                                                   \
			die("line %d: %s: %ld (%s)", __LINE__, #call, result_,                     \
			    fi_strerror((int)-result_));                                           \
	} while (0)

/* Continues after a failure, so that one run shows all of them. */
#define IS(expression, want)                                                                       \
	do {                                                                                       \
		long is_ = (long)(expression), want_ = (long)(want);                               \
		if (is_ != want_) {                                                                \
			fprintf(stderr, "%s: line %d: %s is %ld, not %ld\n", role, __LINE__,       \
				#expression, is_, want_);                                          \
			failures++;                                                                \
		}                                                                                  \
	} while (0)

#define HOLDS(condition, ...)                                                                      \
	do {                                                                                       \
		if (!(condition)) {                                                                \
			fprintf(stderr, "%s: line %d: ", role, __LINE__);                          \
			fprintf(stderr, __VA_ARGS__);                                              \
			fprintf(stderr, "\n");                                                     \
			failures++;                                                                \
		}                                                                                  \
	} while (0)

static inline double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* Times of calls that must not wait for a peer: neither the second after which fi_close(3) gives up a
 * peer that does not acknowledge it, nor, each time, for a timer. A machine under load can stop a
 * process for some tenths of a second, so one call in 100 may take longer than LATE. */
#define ACKNOWLEDGED 0.9
#define LATE 0.2

struct times {
	double longest;
	int count, late;
};

static inline void add_time(struct times *times, double seconds)
{
	times->count++;
	times->late += seconds > LATE;
	if (seconds > times->longest)
		times->longest = seconds;
}

#define MUST_BE_SHORT(times, what)                                                                                   \
	do {                                                                                                         \
		HOLDS((times).longest < ACKNOWLEDGED, what " took %.3f s", (times).longest);                         \
		HOLDS((times).late <= (times).count / 100, "%d of %d times " what " took more than %.1f s",         \
		      (times).late, (times).count, LATE);                                                            \
	} while (0)

static inline void nap(double seconds)
{
	struct timespec t = { (time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9) };

	nanosleep(&t, NULL);
}

/* ---- two processes ---- */

static int wire = -1;
static pid_t initiator_pid;

static inline bool split(void)
{
	int ends[2];

	if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends))
		die("socketpair");
	initiator_pid = fork();
	role = initiator_pid ? "target" : "initiator";
	wire = ends[!initiator_pid];
	close(ends[!!initiator_pid]);
	if (!initiator_pid)
		prctl(PR_SET_PDEATHSIG, SIGKILL);
	return initiator_pid != 0;
}

static inline void tell(const void *data, size_t size)
{
	if (send(wire, data, size, MSG_NOSIGNAL) != (ssize_t)size)
		die("the other process does not listen");
}

static inline void hear(void *data, size_t size)
{
	if (recv(wire, data, size, MSG_WAITALL) != (ssize_t)size)
		die("the other process ended early");
}

/* Returns when both processes have called it. */
static inline void meet(void)
{
	char c = 0;

	tell(&c, 1);
	hear(&c, 1);
}

/* Whether the other process has sent a byte; the byte is not read. */
static inline bool called(void)
{
	char c;

	return recv(wire, &c, 1, MSG_PEEK | MSG_DONTWAIT) == 1;
}

/* ---- one end ---- */

struct end {
	struct fi_info *info;
	struct fid_fabric *fabric;
	struct fid_domain *domain;
	struct fid_eq *eq;
	struct fid_cq *cq;
	struct fid_ep *ep;
	struct fid_pep *pep;
	int mode; /* the mr_mode bits that were returned */
	/* requested by the test; 0 for the defaults */
	uint32_t version;
	uint64_t caps, op_flags, info_mode;
};

static inline const char *provider(void) { return getenv("WEFT_TEST_PROV") ?: "weft"; }

/* An address of the device under test. */
static inline const char *node(void) { return getenv("WEFT_TEST_NODE") ?: "127.0.0.1"; }

/* Whether the device pins registered memory. WEFT_TEST_PINS: a device of the kernel that does. */
static inline bool pins(void)
{
	const char *odp = getenv("SOFTVERBS_ODP");

	return getenv("WEFT_TEST_PINS") || (odp && !strcmp(odp, "0"));
}

static const struct form {
	const char *name;
	int bits, pinned; /* the bits for a device with on-demand paging, and for one without */
} forms[] = {
	{ "native", NATIVE, NATIVE },
	{ "keys", 0, FI_MR_ALLOCATED },
	{ "handles", FI_MR_PROV_KEY, FI_MR_PROV_KEY | FI_MR_ALLOCATED },
	{ "virtual", FI_MR_VIRT_ADDR, FI_MR_VIRT_ADDR | FI_MR_ALLOCATED },
	{ "raw", FI_MR_RAW | NATIVE, FI_MR_RAW | NATIVE },
	{ "rawkeys", FI_MR_RAW, FI_MR_RAW | FI_MR_ALLOCATED },
	{ "notify", FI_MR_MMU_NOTIFY, FI_MR_MMU_NOTIFY },
	{ "any", 0, FI_MR_ALLOCATED },
};
static const struct form *form;

static inline int form_bits(void) { return pins() ? form->pinned : form->bits; }

static inline int getinfo_of(struct end *end, int mr_mode, uint64_t flags, struct fi_info **info)
{
	struct fi_info *hints = fi_allocinfo();
	int ret;

	hints->caps = end->caps ?: FI_MSG | FI_RMA;
	hints->mode = FI_CONTEXT | FI_CONTEXT2 | FI_RX_CQ_DATA | end->info_mode;
	hints->ep_attr->type = FI_EP_MSG;
	hints->domain_attr->mr_mode = mr_mode;
	/* when an operation has completed, its data is in the target's memory */
	hints->tx_attr->op_flags = end->op_flags ?: FI_DELIVERY_COMPLETE;
	hints->fabric_attr->prov_name = strdup(provider());
	ret = fi_getinfo(end->version ?: FI_VERSION(1, 17), node(), flags ? "0" : NULL, flags, hints,
			 info);
	fi_freeinfo(hints);
	return ret;
}

/* The entry that has all the offered bits, or the first one if there is none. */
static inline struct fi_info *with_bits(struct fi_info *list, int mr_mode)
{
	for (struct fi_info *info = list; info; info = info->next)
		if (info->domain_attr->mr_mode == mr_mode)
			return fi_dupinfo(info);
	return fi_dupinfo(list);
}

/* Opens all objects except the endpoint. */
static inline void open_end(struct end *end, int mr_mode)
{
	struct fi_eq_attr eq_attr = { .wait_obj = FI_WAIT_UNSPEC };
	struct fi_cq_attr cq_attr = { .format = FI_CQ_FORMAT_DATA, .wait_obj = FI_WAIT_NONE };

	struct fi_info *list;

	MUST(getinfo_of(end, mr_mode, FI_SOURCE, &list));
	end->info = with_bits(list, mr_mode);
	fi_freeinfo(list);
	end->mode = end->info->domain_attr->mr_mode;
	if (end->version >= FI_VERSION(1, 5) || !end->version)
		HOLDS(!(end->mode & ~mr_mode), "a bit that was not offered: 0x%x of 0x%x", end->mode, mr_mode);
	MUST(fi_fabric(end->info->fabric_attr, &end->fabric, NULL));
	MUST(fi_eq_open(end->fabric, &eq_attr, &end->eq, NULL));
	MUST(fi_domain(end->fabric, end->info, &end->domain, NULL));
	MUST(fi_cq_open(end->domain, &cq_attr, &end->cq, NULL));
}

static inline int next_event(struct end *end, double seconds, struct fi_info **info)
{
	struct fi_eq_cm_entry entry = { 0 };
	struct fi_eq_err_entry error = { 0 };
	uint32_t kind = 0;
	ssize_t got = fi_eq_sread(end->eq, &kind, &entry, sizeof entry, (int)(seconds * 1000), 0);

	if (got == -FI_EAGAIN || got == -FI_ETIMEDOUT)
		return -1;
	if (got == -FI_EAVAIL) {
		MUST(fi_eq_readerr(end->eq, &error, 0));
		die("event queue: error %d (%s)", error.err, fi_strerror(error.err));
	}
	MUST(got);
	if (info)
		*info = entry.info;
	return (int)kind;
}

static inline void expect(struct end *end, int want, struct fi_info **info)
{
	int got = next_event(end, SECONDS, info);

	if (got != want)
		die("event %d, expected %d", got, want);
}

static inline struct fid_ep *make_endpoint(struct end *end, struct fi_info *info)
{
	struct fid_ep *ep;

	MUST(fi_endpoint(end->domain, info, &ep, NULL));
	MUST(fi_ep_bind(ep, &end->eq->fid, 0));
	MUST(fi_ep_bind(ep, &end->cq->fid, FI_TRANSMIT | FI_RECV));
	MUST(fi_enable(ep));
	return ep;
}

static inline void listen_end(struct end *end)
{
	MUST(fi_passive_ep(end->fabric, end->info, &end->pep, NULL));
	MUST(fi_pep_bind(end->pep, &end->eq->fid, 0));
	MUST(fi_listen(end->pep));
}

/* Connects one more pair of endpoints; both sides call it. */
static inline struct fid_ep *connect_more(struct end *end, bool target)
{
	uint8_t name[128] = { 0 };
	size_t size = sizeof name;
	struct fi_info *request;
	struct fid_ep *ep;

	if (target) {
		if (!end->pep)
			listen_end(end);
		MUST(fi_getname(&end->pep->fid, name, &size));
		tell(name, sizeof name);
		expect(end, FI_CONNREQ, &request);
		ep = make_endpoint(end, request);
		MUST(fi_accept(ep, NULL, 0));
		fi_freeinfo(request);
	} else {
		hear(name, sizeof name);
		ep = make_endpoint(end, end->info);
		MUST(fi_connect(ep, name, NULL, 0));
	}
	expect(end, FI_CONNECTED, NULL);
	meet();
	return ep;
}

/* Forks, and connects the two processes; returns true in the target. */
static inline bool connected(struct end *end, int mr_mode)
{
	bool target = split();

	open_end(end, mr_mode);
	end->ep = connect_more(end, target);
	return target;
}

static inline void close_end(struct end *end)
{
	if (end->ep)
		IS(fi_close(&end->ep->fid), 0);
	if (end->pep)
		IS(fi_close(&end->pep->fid), 0);
	IS(fi_close(&end->cq->fid), 0);
	IS(fi_close(&end->domain->fid), 0);
	IS(fi_close(&end->eq->fid), 0);
	IS(fi_close(&end->fabric->fid), 0);
	fi_freeinfo(end->info);
}

/* ---- memory ---- */

/* Reserves pages of the address space; nothing else is ever mapped there or next to them. `backed`:
 * the pages are mapped, and zero. */
static inline uint8_t *pages(size_t len, bool backed)
{
	static uintptr_t next = 1ULL << 44;
	uint8_t *at = (uint8_t *)next;

	next += len + 16 * PAGE;
	if (backed && mmap(at, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0) != at)
		die("mmap: %s", strerror(errno));
	if (backed)
		memset(at, 0, len);
	return at;
}

static inline void map_at(void *at, size_t len, int fill)
{
	if (mmap(at, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != at)
		die("mmap: %s", strerror(errno));
	memset(at, fill, len);
}

static inline struct fid_mr *reg(struct end *end, void *buf, size_t len, uint64_t access, uint64_t key)
{
	struct fid_mr *mr;

	MUST(fi_mr_reg(end->domain, buf, len, access, 0, key, 0, &mr, NULL));
	return mr;
}

/* The address and key that a peer needs to access a region. */
struct remote {
	uint64_t addr, key, base, raw_size;
	uint8_t raw[512];
};

static inline struct remote expose(struct end *end, struct fid_mr *mr, const void *buf)
{
	struct remote remote = { .raw_size = sizeof remote.raw };
	size_t size = sizeof remote.raw;

	remote.addr = end->mode & FI_MR_VIRT_ADDR ? (uintptr_t)buf : 0;
	if (end->mode & FI_MR_RAW) {
		MUST(fi_mr_raw_attr(mr, &remote.base, remote.raw, &size, 0));
		remote.raw_size = size;
	} else {
		remote.key = fi_mr_key(mr);
		HOLDS(remote.key != FI_KEY_NOTAVAIL, "no key");
	}
	return remote;
}

static inline void tell_region(struct end *end, struct fid_mr *mr, const void *buf)
{
	struct remote remote = expose(end, mr, buf);

	tell(&remote, sizeof remote);
}

static inline struct remote hear_region(struct end *end)
{
	struct remote remote;

	hear(&remote, sizeof remote);
	if (end->mode & FI_MR_RAW)
		MUST(fi_mr_map_raw(end->domain, remote.base, remote.raw, remote.raw_size, &remote.key, 0));
	return remote;
}

static inline void forget_region(struct end *end, struct remote *remote)
{
	if (end->mode & FI_MR_RAW)
		IS(fi_mr_unmap_key(end->domain, remote->key), 0);
}

/* Whether the keys are the device's own: an access violation then ends the connection. */
static inline bool native(struct end *end) { return end->mode & FI_MR_PROV_KEY && end->mode & FI_MR_VIRT_ADDR; }

/* ---- transfers ---- */

/* 0 for a completion; a positive errno for a completion in error; -FI_EAGAIN if there is none. */
static inline int poll_one(struct end *end, void **context)
{
	struct fi_cq_data_entry entry;
	struct fi_cq_err_entry error = { 0 };
	ssize_t got = fi_cq_read(end->cq, &entry, 1);

	if (got == 1) {
		if (context)
			*context = entry.op_context;
		return 0;
	}
	if (got == -FI_EAVAIL) {
		MUST(fi_cq_readerr(end->cq, &error, 0));
		if (context)
			*context = error.op_context;
		return error.err ? error.err : FI_EOTHER;
	}
	if (got != -FI_EAGAIN)
		MUST(got);
	return -FI_EAGAIN;
}

static inline int completion(struct end *end, double seconds)
{
	double limit = now() + seconds;

	for (;;) {
		int got = poll_one(end, NULL);

		if (got != -FI_EAGAIN)
			return got;
		if (now() > limit)
			die("no completion within %.0f s", seconds);
	}
}

/* Posts, repeats on -FI_EAGAIN, and waits for the completion. Returns 0, the positive errno of the
 * completion, or the negative errno of the post. */
#define DO(end, call)                                                                              \
	({                                                                                         \
		double limit_ = now() + SECONDS;                                                   \
		ssize_t posted_;                                                                   \
		while ((posted_ = (call)) == -FI_EAGAIN && now() < limit_)                         \
			if (poll_one(end, NULL) != -FI_EAGAIN)                                     \
				die("a completion of nothing");                                    \
		posted_ ? (int)posted_ : completion(end, SECONDS);                                 \
	})

static inline int do_write(struct end *end, const void *from, size_t len, struct remote *to, uint64_t at)
{
	return DO(end, fi_write(end->ep, from, len, NULL, 0, to->addr + at, to->key, NULL));
}

static inline int do_read(struct end *end, void *to, size_t len, struct remote *from, uint64_t at)
{
	return DO(end, fi_read(end->ep, to, len, NULL, 0, from->addr + at, from->key, NULL));
}

static inline int do_add(struct end *end, uint64_t value, struct remote *to, uint64_t at)
{
	return DO(end, fi_atomic(end->ep, &value, 1, NULL, 0, to->addr + at, to->key, FI_UINT64, FI_SUM, NULL));
}

static inline int do_fetch_add(struct end *end, uint64_t value, uint64_t *old, struct remote *to, uint64_t at)
{
	return DO(end, fi_fetch_atomic(end->ep, &value, 1, NULL, old, NULL, 0, to->addr + at, to->key,
				       FI_UINT64, FI_SUM, NULL));
}

static inline int do_fetch(struct end *end, uint64_t *old, struct remote *to, uint64_t at)
{
	return DO(end, fi_fetch_atomic(end->ep, NULL, 1, NULL, old, NULL, 0, to->addr + at, to->key,
				       FI_UINT64, FI_ATOMIC_READ, NULL));
}

static inline int do_swap_if(struct end *end, uint64_t value, uint64_t compare, uint64_t *old, struct remote *to,
			     uint64_t at)
{
	return DO(end, fi_compare_atomic(end->ep, &value, 1, NULL, &compare, NULL, old, NULL, 0, to->addr + at,
					 to->key, FI_UINT64, FI_CSWAP, NULL));
}

/* Whether `got` is an error of the peer's region that leaves the connection intact, or, where keys
 * are the device's own, any error. */
static inline bool refused(struct end *end, int got)
{
	return got > 0 && (got == FI_EKEYREJECTED || got == FI_EACCES || native(end));
}

/* ---- running ---- */

struct test {
	const char *name;
	void (*run)(void);
	const char *forms;
};

static const struct test tests[];

#define CASE(name, forms) { #name, name, forms }

static inline bool has_word(const char *words, const char *word)
{
	size_t len = strlen(word);

	for (const char *at = words; (at = strstr(at, word)); at += len)
		if ((at == words || at[-1] == ' ') && (at[len] == ' ' || !at[len]))
			return true;
	return false;
}

int main(int argc, char **argv)
{
	size_t count = sizeof forms / sizeof *forms;

	signal(SIGPIPE, SIG_IGN);
	/* a library that libfabric loads writes a file into the working directory when a process
	 * crashes */
	if (chdir(dirname(strdup(argv[0]))))
		die("chdir: %s", strerror(errno));
	if (argc == 2 && !strcmp(argv[1], "--list")) {
		for (const struct test *test = tests; test->name; test++)
			for (size_t i = 0; i < count; i++)
				if (has_word(test->forms, forms[i].name))
					printf("%s %s\n", test->name, forms[i].name);
		return 0;
	}
	if (argc != 3)
		die("usage: %s --list | CASE FORM", argv[0]);
	for (size_t i = 0; i < count; i++)
		if (!strcmp(forms[i].name, argv[2]))
			form = &forms[i];
	for (const struct test *test = tests; test->name; test++) {
		int status = 0;

		if (!form || strcmp(test->name, argv[1]))
			continue;
		alarm(140);
		test->run();
		if (initiator_pid && waitpid(initiator_pid, &status, 0) != initiator_pid)
			die("waitpid");
		if (WIFSIGNALED(status))
			die("the initiator ended by signal %d", WTERMSIG(status));
		return failures || (WEXITSTATUS(status) && WEXITSTATUS(status) != SKIPPED);
	}
	die("no such case or form: %s %s", argv[1], argv[2]);
}

#endif
