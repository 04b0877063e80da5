/* The flags of the calls that take flags, as fi_msg(3), fi_rma(3) and fi_atomic(3) list them.
 *
 *   flags PROV NODE FILE
 *
 * The initiator operates on the memory of the target, which is a persistent mapping of FILE
 * (FI_RMA_PMEM). Each call is made once with each flag: the flags that its page lists complete, the
 * others are -FI_EBADFLAGS. The bytes written with FI_COMMIT_COMPLETE are read back from FILE. Then
 * endpoints without FI_RMA or FI_ATOMIC, or with one direction of it: the other calls are -FI_EOPNOTSUPP
 * (fi_getinfo(3), "Capabilities"), also before there is a connection. */
#include "end.h"

#include <fcntl.h>
#include <rdma/fi_atomic.h>
#include <sys/mman.h>
#include <sys/socket.h>

#define LENGTH 8192
#define SIZE 64
#define RECEIVES 64

struct peer {
	struct sockaddr_storage name;
	uint64_t addr, key;
};

static const struct {
	uint64_t bit;
	const char *name;
} flags[] = {
	{ 0, "none" },
	{ FI_COMPLETION, "FI_COMPLETION" },
	{ FI_MORE, "FI_MORE" },
	{ FI_FENCE, "FI_FENCE" },
	{ FI_INJECT, "FI_INJECT" },
	{ FI_REMOTE_CQ_DATA, "FI_REMOTE_CQ_DATA" },
	{ FI_INJECT_COMPLETE, "FI_INJECT_COMPLETE" },
	{ FI_TRANSMIT_COMPLETE, "FI_TRANSMIT_COMPLETE" },
	{ FI_DELIVERY_COMPLETE, "FI_DELIVERY_COMPLETE" },
	{ FI_MATCH_COMPLETE, "FI_MATCH_COMPLETE" },
	{ FI_COMMIT_COMPLETE, "FI_COMMIT_COMPLETE" },
	{ FI_MULTI_RECV, "FI_MULTI_RECV" },
	{ 1ULL << 55, "a flag that no page has" },
};
#define LEVELS (FI_INJECT_COMPLETE | FI_TRANSMIT_COMPLETE | FI_DELIVERY_COMPLETE)
#define ALL (FI_COMPLETION | FI_MORE | FI_FENCE | LEVELS)

static struct fi_info *info;
static struct end end;
static struct peer peer;
static uint64_t caps = FI_MSG | FI_RMA | FI_ATOMIC | FI_FENCE | FI_RMA_PMEM;

static void open_side(const char *service, uint64_t source, const char *file)
{
	struct fi_info *hints = fi_allocinfo();
	struct fi_cq_attr attr = { .format = FI_CQ_FORMAT_MSG, .wait_obj = FI_WAIT_NONE };
	struct fi_eq_attr eq_attr = { .wait_obj = FI_WAIT_UNSPEC };
	uint64_t access = FI_SEND | FI_RECV | FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE;
	int fd = -1;

	hints->caps = caps;
	hints->mode = FI_CONTEXT | FI_CONTEXT2 | FI_RX_CQ_DATA;
	hints->ep_attr->type = FI_EP_MSG;
	hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
	hints->fabric_attr->prov_name = strdup(provider);
	MUST(fi_getinfo(FI_VERSION(1, 17), node, service, source, hints, &info));
	fi_freeinfo(hints);
	MUST(fi_fabric(info->fabric_attr, &end.fabric, NULL));
	MUST(fi_eq_open(end.fabric, &eq_attr, &end.eq, NULL));
	MUST(fi_domain(end.fabric, info, &end.domain, NULL));
	MUST(fi_cq_open(end.domain, &attr, &end.cq, NULL));
	if (file && ((fd = open(file, O_RDWR | O_CREAT, 0600)) < 0 || ftruncate(fd, LENGTH)))
		die("%s: %s", file, strerror(errno));
	end.memory = mmap(NULL, LENGTH, PROT_READ | PROT_WRITE, file ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS, fd, 0);
	if (end.memory == MAP_FAILED)
		die("mmap: %s", strerror(errno));
	MUST(fi_mr_reg(end.domain, end.memory, LENGTH, access, 0, 1, file ? FI_RMA_PMEM : 0, &end.mr, NULL));
}

/* The target: connects twice, and serves the initiator until that process ends. */
static void target(int fd, const char *file)
{
	struct fi_info *request;
	struct fid_pep *pep;
	size_t length = sizeof peer.name;

	role = "target";
	open_side("0", FI_SOURCE, file);
	MUST(fi_passive_ep(end.fabric, info, &pep, NULL));
	MUST(fi_pep_bind(pep, &end.eq->fid, 0));
	MUST(fi_listen(pep));
	MUST(fi_getname(&pep->fid, &peer.name, &length));
	peer.addr = (uintptr_t)end.memory;
	peer.key = fi_mr_key(end.mr);
	tell(fd, &peer, sizeof peer);
	for (int i = 0; i < 2; i++) {
		expect(&end, FI_CONNREQ, &request);
		bind_endpoint(&end, request);
		for (int j = 0; j < RECEIVES; j++)
			MUST(fi_recv(end.ep, end.memory + 4096, SIZE, fi_mr_desc(end.mr), 0, &end));
		MUST(fi_accept(end.ep, NULL, 0));
		expect(&end, FI_CONNECTED, NULL);
		expect(&end, FI_SHUTDOWN, NULL);
		MUST(fi_close(&end.ep->fid));
	}
}

static void take_completion(const char *call, const char *flag)
{
	struct fi_cq_msg_entry entry;
	struct fi_cq_err_entry error = { 0 };
	double limit = now() + SETUP_SECONDS;
	ssize_t got;

	while ((got = fi_cq_read(end.cq, &entry, 1)) == -FI_EAGAIN)
		if (now() > limit)
			die("%s with %s: no completion", call, flag);
	if (got == -FI_EAVAIL) {
		MUST(fi_cq_readerr(end.cq, &error, 0));
		die("%s with %s: %s", call, flag, fi_strerror(error.err));
	}
	MUST(got);
}

static int failures;

static void judge(const char *call, int which, uint64_t allowed, ssize_t got, int completes)
{
	int ok = !(flags[which].bit & ~allowed);

	if (got != (ok ? 0 : -FI_EBADFLAGS)) {
		fprintf(stderr, "%s with %s: %ld (%s)\n", call, flags[which].name, (long)got, fi_strerror((int)-got));
		failures++;
	}
	if (!got && completes)
		take_completion(call, flags[which].name);
}

static void every_call(void)
{
	void *desc = fi_mr_desc(end.mr);
	struct iovec iov = { .iov_base = end.memory, .iov_len = SIZE };
	struct fi_rma_iov remote = { .addr = peer.addr, .len = SIZE, .key = peer.key };
	struct fi_ioc operand = { .addr = end.memory, .count = 1 }, result = { .addr = end.memory + 64, .count = 1 };
	struct fi_rma_ioc there = { .addr = peer.addr + 1024, .count = 1, .key = peer.key };
	struct fi_msg msg = { .msg_iov = &iov, .desc = &desc, .iov_count = 1, .data = 7 };
	struct fi_msg_rma rma = { .msg_iov = &iov, .desc = &desc, .iov_count = 1, .rma_iov = &remote, .rma_iov_count = 1, .data = 7 };
	struct fi_msg_atomic atomic = { .msg_iov = &operand, .desc = &desc, .iov_count = 1, .rma_iov = &there, .rma_iov_count = 1,
					.datatype = FI_UINT64, .op = FI_SUM };
	uint64_t commit = caps & FI_RMA_PMEM ? FI_COMMIT_COMPLETE : 0;
	const int count = sizeof flags / sizeof flags[0];

	for (int i = 0; i < count; i++) {
		uint64_t bit = flags[i].bit;

		judge("fi_sendmsg", i, ALL | FI_INJECT | FI_REMOTE_CQ_DATA | FI_MATCH_COMPLETE, fi_sendmsg(end.ep, &msg, bit), 1);
		judge("fi_writemsg", i, ALL | FI_INJECT | FI_REMOTE_CQ_DATA | commit, fi_writemsg(end.ep, &rma, bit), 1);
		judge("fi_readmsg", i, ALL, fi_readmsg(end.ep, &rma, bit), 1);
		judge("fi_atomicmsg", i, ALL | FI_INJECT, fi_atomicmsg(end.ep, &atomic, bit), 1);
		judge("fi_fetch_atomicmsg", i, ALL | FI_INJECT, fi_fetch_atomicmsg(end.ep, &atomic, &result, &desc, 1, bit), 1);
		atomic.op = FI_CSWAP;
		judge("fi_compare_atomicmsg", i, ALL | FI_INJECT,
		      fi_compare_atomicmsg(end.ep, &atomic, &operand, &desc, 1, &result, &desc, 1, bit), 1);
		atomic.op = FI_SUM;
		judge("fi_recvmsg", i, FI_COMPLETION | FI_MORE | FI_TRANSMIT_COMPLETE, fi_recvmsg(end.ep, &msg, bit), 0);
	}
}

static void connect_here(void)
{
	bind_endpoint(&end, info);
	MUST(fi_connect(end.ep, &peer.name, NULL, 0));
	expect(&end, FI_CONNECTED, NULL);
}

/* The bytes of a durable write are in the file when the write completes. */
static void durable_write(const char *file)
{
	uint8_t bytes[SIZE];
	void *desc = fi_mr_desc(end.mr);
	struct iovec iov = { .iov_base = end.memory, .iov_len = SIZE };
	struct fi_rma_iov remote = { .addr = peer.addr + 2048, .len = SIZE, .key = peer.key };
	struct fi_msg_rma rma = { .msg_iov = &iov, .desc = &desc, .iov_count = 1, .rma_iov = &remote, .rma_iov_count = 1 };
	int fd = open(file, O_RDONLY);

	memset(end.memory, 0x5a, SIZE);
	MUST(fi_writemsg(end.ep, &rma, FI_COMMIT_COMPLETE));
	take_completion("fi_writemsg", "FI_COMMIT_COMPLETE");
	if (fd < 0 || pread(fd, bytes, SIZE, 2048) != SIZE || memcmp(bytes, end.memory, SIZE))
		die("the file has something else than was written");
	close(fd);
}

static void only(uint64_t rights, int reads, int writes)
{
	struct iovec iov = { .iov_base = NULL };
	struct fi_rma_iov remote = { .addr = 0 };
	struct fi_msg_rma rma = { .msg_iov = &iov, .iov_count = 1, .rma_iov = &remote, .rma_iov_count = 1 };

	memset(&end, 0, sizeof end);
	caps = FI_MSG | rights;
	open_side(NULL, 0, NULL);
	bind_endpoint(&end, info);

	const struct {
		const char *call;
		ssize_t got;
		int permitted;
	} calls[] = {
		{ "fi_read", fi_read(end.ep, end.memory, SIZE, fi_mr_desc(end.mr), 0, 0, 0, NULL), reads },
		{ "fi_readmsg", fi_readmsg(end.ep, &rma, 0), reads },
		{ "fi_write", fi_write(end.ep, end.memory, SIZE, fi_mr_desc(end.mr), 0, 0, 0, NULL), writes },
		{ "fi_writemsg", fi_writemsg(end.ep, &rma, 0), writes },
		{ "fi_inject_write", fi_inject_write(end.ep, end.memory, SIZE, 0, 0, 0), writes },
	};

	for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
		/* what is permitted fails because nothing is connected */
		if (calls[i].got >= 0 || (calls[i].got != -FI_EOPNOTSUPP) != calls[i].permitted) {
			fprintf(stderr, "%s with the capabilities %#lx: %ld\n", calls[i].call, (long)caps, (long)calls[i].got);
			failures++;
		}
	}
	MUST(fi_close(&end.ep->fid));
}

/* The result of a query in the form of a call that is permitted if it fails otherwise. */
static ssize_t valid(int ret)
{
	if (ret && ret != -FI_EOPNOTSUPP)
		die("a query of atomics: %d", ret);
	return ret ? ret : -FI_EAGAIN;
}

/* As `only`, for atomics. One that returns a value is a read, as in fi_cq(3) and fi_cntr(3). */
static void only_atomics(uint64_t rights, int reads, int writes)
{
	uint64_t *word;
	size_t most;
	void *desc;

	memset(&end, 0, sizeof end);
	caps = FI_MSG | rights;
	open_side(NULL, 0, NULL);
	bind_endpoint(&end, info);
	word = (uint64_t *)end.memory;
	desc = fi_mr_desc(end.mr);

	const struct {
		const char *call;
		ssize_t got;
		int permitted;
	} calls[] = {
		{ "fi_fetch_atomic", fi_fetch_atomic(end.ep, word, 1, desc, word + 1, desc, 0, 0, 0, FI_UINT64, FI_SUM, NULL), reads },
		{ "fi_compare_atomic",
		  fi_compare_atomic(end.ep, word, 1, desc, word + 1, desc, word + 2, desc, 0, 0, 0, FI_UINT64, FI_CSWAP, NULL), reads },
		{ "fi_atomic", fi_atomic(end.ep, word, 1, desc, 0, 0, 0, FI_UINT64, FI_SUM, NULL), writes },
		{ "fi_inject_atomic", fi_inject_atomic(end.ep, word, 1, 0, 0, 0, FI_UINT64, FI_SUM), writes },
		/* these need no connection */
		{ "fi_fetch_atomicvalid", valid(fi_fetch_atomicvalid(end.ep, FI_UINT64, FI_SUM, &most)), reads },
		{ "fi_compare_atomicvalid", valid(fi_compare_atomicvalid(end.ep, FI_UINT64, FI_CSWAP, &most)), reads },
		{ "fi_atomicvalid", valid(fi_atomicvalid(end.ep, FI_UINT64, FI_SUM, &most)), writes },
	};

	for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
		if (calls[i].got >= 0 || (calls[i].got != -FI_EOPNOTSUPP) != calls[i].permitted) {
			fprintf(stderr, "%s with the capabilities %#lx: %ld\n", calls[i].call, (long)caps, (long)calls[i].got);
			failures++;
		}
	}
	MUST(fi_close(&end.ep->fid));
}

int main(int argc, char **argv)
{
	int pipes[2];
	pid_t pid;

	if (argc != 4)
		die("usage: flags PROV NODE FILE");
	provider = argv[1];
	node = argv[2];
	if (pipe(pipes))
		die("pipe: %s", strerror(errno));
	pid = child("target");
	if (pid == 0) {
		target(pipes[1], argv[3]);
		return 0;
	}
	close(pipes[1]);
	role = "initiator";
	alarm(60);
	hear(pipes[0], &peer, sizeof peer);
	open_side(NULL, 0, NULL);
	connect_here();
	every_call();
	if (!failures)
		durable_write(argv[3]);
	MUST(fi_close(&end.ep->fid));
	/* an endpoint without FI_RMA_PMEM */
	memset(&end, 0, sizeof end);
	caps &= ~FI_RMA_PMEM;
	open_side(NULL, 0, NULL);
	connect_here();
	every_call();
	MUST(fi_close(&end.ep->fid));
	only_atomics(0, 0, 0);
	only_atomics(FI_ATOMIC | FI_READ | FI_SEND | FI_RECV, 1, 0);
	only_atomics(FI_ATOMIC | FI_WRITE, 0, 1);
	only_atomics(FI_ATOMIC, 1, 1);
	only(0, 0, 0);
	only(FI_RMA | FI_READ | FI_SEND | FI_RECV, 1, 0);
	only(FI_RMA | FI_WRITE | FI_SEND | FI_RECV, 0, 1);
	unlink(argv[3]);
	if (status_of(pid, "target") || failures)
		return 1;
	printf("every flag is as its page has it\n");
	return 0;
}
