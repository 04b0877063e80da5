/* Calls that must fail. A line on the standard error stream before each names the call and the
 * errno that it must return.
 *
 *   refused PROV NODE
 *
 * The test that starts this program reads the provider's log lines between two of these lines. The
 * target, a process of its own, makes no wrong calls. */
#include "end.h"

#include <rdma/fi_atomic.h>
#include <sys/socket.h>

#define SIZE 64

struct peer {
	struct sockaddr_storage name;
	uint64_t addr, key;
};

static struct fi_info *info;
static struct end end;
static struct peer peer;
static int failures;

static void open_side(const char *service, uint64_t source)
{
	struct fi_info *hints = fi_allocinfo();
	struct fi_cq_attr attr = { .format = FI_CQ_FORMAT_MSG, .wait_obj = FI_WAIT_NONE };
	struct fi_eq_attr eq_attr = { .wait_obj = FI_WAIT_UNSPEC };

	hints->caps = FI_MSG | FI_RMA | FI_ATOMIC;
	hints->ep_attr->type = FI_EP_MSG;
	hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
	hints->fabric_attr->prov_name = strdup(provider);
	MUST(fi_getinfo(FI_VERSION(1, 17), node, service, source, hints, &info));
	fi_freeinfo(hints);
	MUST(fi_fabric(info->fabric_attr, &end.fabric, NULL));
	MUST(fi_eq_open(end.fabric, &eq_attr, &end.eq, NULL));
	MUST(fi_domain(end.fabric, info, &end.domain, NULL));
	MUST(fi_cq_open(end.domain, &attr, &end.cq, NULL));
	end.memory = aligned_alloc(4096, 8192);
	memset(end.memory, 0, 8192);
	MUST(fi_mr_reg(end.domain, end.memory, 8192, FI_SEND | FI_RECV | FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE, 0, 1, 0,
		       &end.mr, NULL));
}

static void target(int fd)
{
	struct fi_info *request;
	struct fid_pep *pep;
	size_t length = sizeof peer.name;

	role = "target";
	/* the log lines of the target are not counted */
	unsetenv("FI_LOG_LEVEL");
	open_side("0", FI_SOURCE);
	MUST(fi_passive_ep(end.fabric, info, &pep, NULL));
	MUST(fi_pep_bind(pep, &end.eq->fid, 0));
	MUST(fi_listen(pep));
	MUST(fi_getname(&pep->fid, &peer.name, &length));
	peer.addr = (uintptr_t)end.memory;
	peer.key = fi_mr_key(end.mr);
	tell(fd, &peer, sizeof peer);
	expect(&end, FI_CONNREQ, &request);
	bind_endpoint(&end, request);
	MUST(fi_accept(end.ep, NULL, 0));
	expect(&end, FI_CONNECTED, NULL);
	expect(&end, FI_SHUTDOWN, NULL);
}

/* `call` must return -`errno`; `name` is for the test that reads the output. */
#define REFUSED(name, number, call)                                                                                  \
	do {                                                                                                         \
		long answer;                                                                                         \
                                                                                                                     \
		fprintf(stderr, "== %s\n", name);                                                                    \
		answer = (long)(call);                                                                               \
		fprintf(stderr, "== end\n");                                                                         \
		if (answer != -(number)) {                                                                           \
			fprintf(stderr, "%s: %ld (%s)\n", name, answer, fi_strerror((int)-answer));                  \
			failures++;                                                                                  \
		}                                                                                                    \
	} while (0)

static void operations(void)
{
	void *desc = fi_mr_desc(end.mr), *descs[32] = { desc, NULL }, *all[32];
	struct iovec iov[32];
	struct fi_rma_iov remote[2] = { { .addr = peer.addr, .len = SIZE, .key = peer.key } };
	struct fi_ioc operand = { .addr = end.memory, .count = 2 };
	struct fi_rma_ioc there = { .addr = peer.addr, .count = 1, .key = peer.key };
	struct fi_msg msg = { .msg_iov = iov, .desc = all, .iov_count = 1 };
	struct fi_msg_rma rma = { .msg_iov = iov, .desc = all, .iov_count = 1, .rma_iov = remote, .rma_iov_count = 1 };
	struct fi_msg_atomic atomic = { .msg_iov = &operand, .desc = &desc, .iov_count = 1, .rma_iov = &there, .rma_iov_count = 1,
					.datatype = FI_UINT64, .op = FI_SUM };
	size_t max = info->ep_attr->max_msg_size, inject = info->tx_attr->inject_size;
	/* larger than the inline limit: the device reads the buffer */
	size_t large = 4096;

	for (int i = 0; i < 32; i++) {
		iov[i] = (struct iovec){ .iov_base = end.memory, .iov_len = i < 2 ? large : 8 };
		all[i] = desc;
	}
	REFUSED("no descriptor", FI_EINVAL, fi_send(end.ep, end.memory, large, NULL, 0, NULL));
	REFUSED("second descriptor missing", FI_EINVAL, fi_sendv(end.ep, iov, descs, 2, 0, NULL));
	REFUSED("foreign descriptor", FI_EINVAL, fi_send(end.ep, end.memory, large, end.memory, 0, NULL));
	REFUSED("receive without descriptor", FI_EINVAL, fi_recv(end.ep, end.memory, large, NULL, 0, NULL));
	REFUSED("too many buffers", FI_EINVAL, fi_sendv(end.ep, iov, all, info->tx_attr->iov_limit + 1, 0, NULL));
	REFUSED("too many receive buffers", FI_EINVAL, fi_recvv(end.ep, iov, all, info->rx_attr->iov_limit + 1, 0, NULL));
	REFUSED("vector at NULL", FI_EINVAL, fi_sendv(end.ep, NULL, NULL, 1, 0, NULL));
	REFUSED("message too long", FI_EMSGSIZE, fi_send(end.ep, end.memory, max + 1, desc, 0, NULL));
	REFUSED("receive too long", FI_EMSGSIZE, fi_recv(end.ep, end.memory, max + 1, desc, 0, NULL));
	REFUSED("inject too long", FI_EMSGSIZE, fi_inject(end.ep, end.memory, inject + 1, 0));
	REFUSED("flags of a send", FI_EBADFLAGS, fi_sendmsg(end.ep, &msg, FI_MULTI_RECV));
	REFUSED("flags of a receive", FI_EBADFLAGS, fi_recvmsg(end.ep, &msg, FI_MULTI_RECV));
	REFUSED("message at NULL", FI_EINVAL, fi_sendmsg(end.ep, NULL, 0));
	REFUSED("lengths differ", FI_EINVAL, fi_writemsg(end.ep, &rma, 0));
	rma.rma_iov_count = 2;
	REFUSED("two remote ranges", FI_EINVAL, fi_writemsg(end.ep, &rma, 0));
	rma.rma_iov_count = 1;
	remote[0].len = large;
	REFUSED("commit without FI_RMA_PMEM", FI_EBADFLAGS, fi_writemsg(end.ep, &rma, FI_COMMIT_COMPLETE));
	REFUSED("remote data without FI_RX_CQ_DATA", FI_EOPNOTSUPP, fi_writedata(end.ep, end.memory, 8, desc, 1, 0, peer.addr, peer.key, NULL));
	REFUSED("bad key", FI_EKEYREJECTED, fi_write(end.ep, end.memory, 8, desc, 0, peer.addr, 1ULL << 40, NULL));
	REFUSED("two elements", FI_EMSGSIZE, fi_atomicmsg(end.ep, &atomic, 0));
	REFUSED("unaligned target", FI_EINVAL, fi_atomic(end.ep, end.memory, 1, desc, 0, peer.addr + 1, peer.key, FI_UINT64, FI_SUM, NULL));
	REFUSED("unsupported atomic", FI_EOPNOTSUPP, fi_atomic(end.ep, end.memory, 1, desc, 0, peer.addr, peer.key, FI_UINT32, FI_SUM, NULL));
	REFUSED("operand at NULL", FI_EINVAL, fi_atomic(end.ep, NULL, 1, desc, 0, peer.addr, peer.key, FI_UINT64, FI_SUM, NULL));
	REFUSED("result at NULL", FI_EINVAL,
		fi_fetch_atomic(end.ep, end.memory, 1, desc, NULL, NULL, 0, peer.addr, peer.key, FI_UINT64, FI_SUM, NULL));
}

static void regions(void)
{
	struct fid_mr *mr = NULL;
	struct iovec iov[16];
	uint8_t raw[16] = { 0 };
	uint64_t key;
	size_t size = 0;

	for (int i = 0; i < 16; i++)
		iov[i] = (struct iovec){ .iov_base = end.memory, .iov_len = 8 };
	REFUSED("region of no bytes", FI_EINVAL, fi_mr_reg(end.domain, end.memory, 0, FI_SEND, 0, 2, 0, &mr, NULL));
	REFUSED("access that there is not", FI_EINVAL, fi_mr_reg(end.domain, end.memory, 8, 1ULL << 60, 0, 2, 0, &mr, NULL));
	REFUSED("offset", FI_EINVAL, fi_mr_reg(end.domain, end.memory, 8, FI_SEND, 1, 2, 0, &mr, NULL));
	REFUSED("flags of a region", FI_EBADFLAGS, fi_mr_reg(end.domain, end.memory, 8, FI_SEND, 0, 2, FI_MORE, &mr, NULL));
	REFUSED("events without FI_RMA_EVENT", FI_EBADFLAGS, fi_mr_reg(end.domain, end.memory, 8, FI_SEND, 0, 2, FI_RMA_EVENT, &mr, NULL));
	REFUSED("persistent without FI_RMA_PMEM", FI_EBADFLAGS, fi_mr_reg(end.domain, end.memory, 8, FI_SEND, 0, 2, FI_RMA_PMEM, &mr, NULL));
	REFUSED("buffers of a region", FI_EINVAL, fi_mr_regv(end.domain, iov, info->domain_attr->mr_iov_limit + 1, FI_SEND, 0, 2, 0, &mr, NULL));
	REFUSED("enabled twice", FI_EOPBADSTATE, fi_mr_enable(end.mr));
	REFUSED("bound to NULL", FI_EINVAL, fi_mr_bind(end.mr, NULL, 0));
	REFUSED("bound to a queue", FI_EINVAL, fi_mr_bind(end.mr, &end.cq->fid, 0));
	REFUSED("refreshed elsewhere", FI_EINVAL,
		fi_mr_refresh(end.mr, &(struct iovec){ .iov_base = end.memory + 65536, .iov_len = 8 }, 1, 0));
	REFUSED("room for a raw key", FI_ETOOSMALL, fi_mr_raw_attr(end.mr, &key, NULL, &size, 0));
	REFUSED("no raw key", FI_EINVAL, fi_mr_map_raw(end.domain, 0, raw, 7, &key, 0));
	REFUSED("key that is not mapped", FI_EINVAL, fi_mr_unmap_key(end.domain, 5));
	REFUSED("domain in use", FI_EBUSY, fi_close(&end.domain->fid));
	REFUSED("queue in use", FI_EBUSY, fi_close(&end.cq->fid));
	MUST(fi_mr_reg(end.domain, end.memory, 8, FI_SEND, 0, 2, 0, &mr, NULL));
	MUST(fi_close(&mr->fid));
	REFUSED("closed twice", FI_EINVAL, fi_close(&mr->fid));
	REFUSED("refreshed when closed", FI_EINVAL, fi_mr_refresh(mr, iov, 1, 0));
}

int main(int argc, char **argv)
{
	int pipes[2];
	pid_t pid;

	if (argc != 3)
		die("usage: refused PROV NODE");
	provider = argv[1];
	node = argv[2];
	if (pipe(pipes))
		die("pipe: %s", strerror(errno));
	pid = child("target");
	if (pid == 0) {
		target(pipes[1]);
		return 0;
	}
	close(pipes[1]);
	role = "initiator";
	alarm(60);
	hear(pipes[0], &peer, sizeof peer);
	open_side(NULL, 0);
	bind_endpoint(&end, info);
	MUST(fi_connect(end.ep, &peer.name, NULL, 0));
	expect(&end, FI_CONNECTED, NULL);
	operations();
	regions();
	MUST(fi_close(&end.ep->fid));
	if (status_of(pid, "target") || failures)
		return 1;
	printf("every call was refused\n");
	return 0;
}
