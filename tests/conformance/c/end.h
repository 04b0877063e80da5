/* One end of a connection, for the programs in this directory. Each program includes this file once
 * and defines MEMORY, the size of an end's region. */
#ifndef END_H
#define END_H

#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>

#ifndef MEMORY
#define MEMORY (4UL << 20)
#endif
#define SETUP_SECONDS 10
/* of a process; WEFT_TEST_SLOW=1: in an emulated machine */
#define LIMIT_SECONDS (getenv("WEFT_TEST_SLOW") ? 360U : 60U)

struct end {
	struct fi_info *info;
	struct fid_fabric *fabric;
	struct fid_domain *domain;
	struct fid_eq *eq;
	struct fid_cq *cq;
	struct fid_mr *mr;
	struct fid_ep *ep;
	/* the shared receive context; NULL if the endpoint has receives of its own */
	struct fid_ep *srx;
	uint8_t *memory;
};

struct remote {
	uint64_t addr, key;
};

static const char *provider, *node, *role = "?";

static inline void die(const char *format, ...)
{
	va_list args;

	va_start(args, format);
	fprintf(stderr, "%s: ", role);
	vfprintf(stderr, format, args);
	fprintf(stderr, "\n");
	exit(1);
}

#define MUST(call)                                                                                                   \
	do {                                                                                                         \
		long result = (long)(call);                                                                          \
		if (result < 0)                                                                                      \
			die("%s: %ld (%s)", #call, result, fi_strerror((int)-result));                               \
	} while (0)

static inline double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static inline void tell(int fd, const void *data, size_t size)
{
	if (write(fd, data, size) != (ssize_t)size)
		die("pipe: %s", strerror(errno));
}

static inline void hear(int fd, void *data, size_t size)
{
	if (read(fd, data, size) != (ssize_t)size)
		die("the other process ended early");
}

/* The mr_mode bits of a program's hints. WEFT_TEST_PINS=1: the device pins memory, so fi_getinfo
 * returns no entry without FI_MR_ALLOCATED or FI_MR_MMU_NOTIFY. */
static inline int offered_bits(int bits)
{
	const char *pins = getenv("WEFT_TEST_PINS");
	int enough = FI_MR_ALLOCATED | FI_MR_MMU_NOTIFY | FI_MR_BASIC | FI_MR_SCALABLE;

	return pins && !strcmp(pins, "1") && !(bits & enough) ? bits | FI_MR_ALLOCATED : bits;
}

/* `rx_contexts`: FI_SHARED_CONTEXT for receives of a shared context, else 0. */
static inline struct fi_info *getinfo_of(const char *service, uint64_t flags, size_t rx_contexts)
{
	struct fi_info *hints = fi_allocinfo(), *info;

	hints->caps = FI_MSG | FI_RMA;
	hints->mode = FI_CONTEXT | FI_CONTEXT2 | FI_RX_CQ_DATA;
	hints->ep_attr->type = FI_EP_MSG;
	hints->ep_attr->rx_ctx_cnt = rx_contexts;
	hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
	hints->fabric_attr->prov_name = strdup(provider);
	MUST(fi_getinfo(FI_VERSION(1, 17), node, service, flags, hints, &info));
	fi_freeinfo(hints);
	return info;
}

static inline struct fi_info *getinfo(const char *service, uint64_t flags) { return getinfo_of(service, flags, 0); }

static inline void open_fabric(struct end *end)
{
	struct fi_eq_attr attr = { .wait_obj = FI_WAIT_UNSPEC };

	MUST(fi_fabric(end->info->fabric_attr, &end->fabric, NULL));
	MUST(fi_eq_open(end->fabric, &attr, &end->eq, NULL));
}

static inline void open_domain(struct end *end, struct fi_info *info)
{
	struct fi_cq_attr attr = { .format = FI_CQ_FORMAT_CONTEXT, .wait_obj = FI_WAIT_NONE };
	uint64_t access = FI_SEND | FI_RECV | FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE;

	MUST(fi_domain(end->fabric, info, &end->domain, NULL));
	MUST(fi_cq_open(end->domain, &attr, &end->cq, NULL));
	end->memory = aligned_alloc(4096, MEMORY);
	memset(end->memory, 0, MEMORY);
	MUST(fi_mr_reg(end->domain, end->memory, MEMORY, access, 0, 1, 0, &end->mr, NULL));
}

static inline void bind_endpoint(struct end *end, struct fi_info *info)
{
	MUST(fi_endpoint(end->domain, info, &end->ep, NULL));
	MUST(fi_ep_bind(end->ep, &end->eq->fid, 0));
	MUST(fi_ep_bind(end->ep, &end->cq->fid, FI_TRANSMIT | FI_RECV));
	if (end->srx)
		MUST(fi_ep_bind(end->ep, &end->srx->fid, 0));
	MUST(fi_enable(end->ep));
}

static inline void open_endpoint(struct end *end, struct fi_info *info)
{
	open_domain(end, info);
	bind_endpoint(end, info);
}

static inline void close_end(struct end *end)
{
	fi_close(&end->ep->fid);
	fi_close(&end->mr->fid);
	fi_close(&end->cq->fid);
	fi_close(&end->domain->fid);
	fi_close(&end->eq->fid);
	fi_close(&end->fabric->fid);
}

/* The next event, or -1 if none comes in time. Of a connection request, the info is left in
 * *info. */
static inline int event(struct end *end, double seconds, struct fi_info **info)
{
	struct fi_eq_cm_entry entry;
	struct fi_eq_err_entry error = { 0 };
	uint32_t kind = 0;
	ssize_t got;

	/* SIGSTOP and SIGCONT interrupt the call: repeat it */
	while ((got = fi_eq_sread(end->eq, &kind, &entry, sizeof entry, (int)(seconds * 1000), 0)) == -FI_EINTR)
		;
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
	int got = event(end, SETUP_SECONDS, info);

	if (got != want)
		die("event %d, expected %d", got, want);
}

/* 0 for a completion, else the errno of an error completion. Exits with 1 if none comes in time. */
static inline int completion(struct end *end, double seconds)
{
	struct fi_cq_entry entry;
	struct fi_cq_err_entry error = { 0 };
	double limit = now() + seconds;

	for (;;) {
		ssize_t got = fi_cq_read(end->cq, &entry, 1);

		if (got == 1)
			return 0;
		if (got == -FI_EAVAIL) {
			MUST(fi_cq_readerr(end->cq, &error, 0));
			return error.err ? error.err : FI_EOTHER;
		}
		if (got != -FI_EAGAIN)
			MUST(got);
		if (now() > limit)
			die("no completion within %.0f s", seconds);
	}
}

static inline int status_of(pid_t pid, const char *who)
{
	int status;

	if (waitpid(pid, &status, 0) != pid)
		die("waitpid: %s", strerror(errno));
	if (WIFSIGNALED(status))
		fprintf(stderr, "%s: signal %d\n", who, WTERMSIG(status));
	return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}

static inline pid_t child(const char *name)
{
	pid_t pid = fork();

	if (pid == 0) {
		role = name;
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		alarm(LIMIT_SECONDS);
	}
	return pid;
}

#endif
