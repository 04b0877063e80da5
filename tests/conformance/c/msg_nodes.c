/* Connected endpoints with shared receive contexts of processes on two emulated nodes, three on each: each process is
 * connected to each one of the other node. From fi_endpoint(3) "Shared contexts", fi_cm(3), fi_eq(3) and fi_msg(3).
 * WEFT_TEST_XRC=1 requests XRC.
 *
 *   msg_nodes all PROV NODE       messages in both directions of each connection; the connections are made one by one
 *   msg_nodes quiet PROV NODE     then a process that all have connected to first is killed while no message is under
 *                                 way: its peers see the end of their connections to it within 1 s, and no other; the
 *                                 others exchange messages; another process listens at its port, and all connect to it
 *   msg_nodes closes PROV NODE    the same, and the process closes its objects instead
 *   msg_nodes busy PROV NODE      as quiet, while messages to it are under way: connections may end that have not to do
 *                                 with it, at both sides, and are made again
 *   msg_nodes fails PROV NODE     a request with a wrong key ends connections: both sides of each see it, while no
 *                                 endpoint is closed, and make them again
 *   msg_nodes local PROV NODE     the same with a buffer that is not registered, which the peer's device does not see
 *
 * NODE is ignored: process n is at 127.0.0.(n / 3 + 1). Ends with 0, or says what went wrong. Plain libfabric 1.17. */
#include "rdm_processes.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <rdma/fi_cm.h>

enum { EACH = 3, PROCESSES = 2 * EACH, VICTIM = EACH };
enum { SLOTS = 128, LENGTH = 512, WINDOW = 8, MESSAGES = 200, WRITE = 1 << 20 };

/* Words of the board. TURN: a connection to be made, 256 * from + to + 65536 * number. ROUND: messages to be exchanged.
 * LEAVE: 1 + the process that closes its objects. */
enum { TURN, ROUND, FLOOD, STOP, DONE, SHUTS, LEAVE, READY, WRONG, MADE };

enum state { NONE, CONNECTING, CONNECTED, SHUT };

static struct {
	struct fi_info *info, *active; /* of the passive endpoint; of endpoints that connect */
	struct fid_fabric *fabric;
	struct fid_eq *eq;
	struct fid_domain *domain;
	struct fid_cq *cq;
	struct fid_ep *srx;
	struct fid_mr *mr;
	struct fid_pep *pep;
	uint8_t *in, *out;
	int own;
	/* by process */
	struct fid_ep *ep[PROCESSES];
	enum state state[PROCESSES];
	int to_send[PROCESSES], posted[PROCESSES], sent[PROCESSES], next[PROCESSES], taken[PROCESSES], want[PROCESSES];
	int round, round_of[PROCESSES];
	unsigned life[PROCESSES]; /* of the endpoint: late completions of an earlier one do not count */
	bool floods;
	bool exact; /* no error completion is permitted */
} own;

/* All of 127.0.0.0/8 is the loopback interface, which has one address of them. */
static void at_node(struct fi_info *info)
{
	((struct sockaddr_in *)info->src_addr)->sin_addr.s_addr = htonl(INADDR_LOOPBACK + (uint32_t)(own.own / EACH));
}

static void query(const char *service)
{
	struct fi_info *hints = fi_allocinfo();

	hints->caps = FI_MSG | FI_RMA;
	hints->mode = FI_CONTEXT | FI_CONTEXT2 | FI_RX_CQ_DATA;
	hints->ep_attr->type = FI_EP_MSG;
	hints->ep_attr->protocol = asked_protocol();
	hints->ep_attr->rx_ctx_cnt = FI_SHARED_CONTEXT;
	hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
	hints->domain_attr->threading = FI_THREAD_SAFE;
	hints->fabric_attr->prov_name = strdup(provider);
	MUST(fi_getinfo(FI_VERSION(1, 17), "127.0.0.1", service, FI_SOURCE, hints, &own.info));
	at_node(own.info);
	own.active = fi_dupinfo(own.info);
	((struct sockaddr_in *)own.active->src_addr)->sin_port = 0;
	fi_freeinfo(hints);
}

static void post(size_t slot)
{
	MUST(fi_recv(own.srx, own.in + slot * LENGTH, LENGTH, fi_mr_desc(own.mr), FI_ADDR_UNSPEC, (void *)slot));
}

static void open_all(void)
{
	struct fi_cq_attr attr = { .format = FI_CQ_FORMAT_DATA, .wait_obj = FI_WAIT_NONE };
	struct fi_eq_attr eq_attr = { .wait_obj = FI_WAIT_UNSPEC };
	uint64_t access = FI_SEND | FI_RECV | FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE;
	size_t bytes = (SLOTS + PROCESSES * WINDOW) * LENGTH;
	struct name *name = &board->names[own.own];
	char service[16] = "0";

	/* a successor has the port of its predecessor */
	if (atomic_load(&board->named[own.own]))
		snprintf(service, sizeof service, "%d", ntohs(((struct sockaddr_in *)name->bytes)->sin_port));
	query(service);
	MUST(fi_fabric(own.info->fabric_attr, &own.fabric, NULL));
	MUST(fi_eq_open(own.fabric, &eq_attr, &own.eq, NULL));
	MUST(fi_domain(own.fabric, own.info, &own.domain, NULL));
	MUST(fi_cq_open(own.domain, &attr, &own.cq, NULL));
	MUST(fi_srx_context(own.domain, own.info->rx_attr, &own.srx, NULL));
	own.in = aligned_alloc(4096, (bytes + 4095) & ~4095UL);
	own.out = own.in + SLOTS * LENGTH;
	MUST(fi_mr_reg(own.domain, own.in, bytes, access, 0, 1, 0, &own.mr, NULL));
	for (size_t slot = 0; slot < SLOTS; slot++)
		post(slot);
	MUST(fi_passive_ep(own.fabric, own.info, &own.pep, NULL));
	MUST(fi_pep_bind(own.pep, &own.eq->fid, 0));
	MUST(fi_listen(own.pep));
	name->len = sizeof name->bytes;
	MUST(fi_getname(&own.pep->fid, name->bytes, &name->len));
	atomic_store(&board->named[own.own], 1);
	add(READY);
}

static void close_ep(int peer)
{
	if (own.ep[peer])
		MUST(fi_close(&own.ep[peer]->fid));
	own.ep[peer] = NULL;
	own.state[peer] = NONE;
}

static void close_all(void)
{
	for (int peer = 0; peer < PROCESSES; peer++)
		close_ep(peer);
	MUST(fi_close(&own.pep->fid));
	MUST(fi_close(&own.srx->fid));
	MUST(fi_close(&own.mr->fid));
	MUST(fi_close(&own.cq->fid));
	MUST(fi_close(&own.domain->fid));
	MUST(fi_close(&own.eq->fid));
	MUST(fi_close(&own.fabric->fid));
	fi_freeinfo(own.info);
	fi_freeinfo(own.active);
}

static void open_ep(int peer, struct fi_info *info)
{
	close_ep(peer);
	MUST(fi_endpoint(own.domain, info, &own.ep[peer], (void *)(uintptr_t)(peer + 1)));
	MUST(fi_ep_bind(own.ep[peer], &own.eq->fid, 0));
	MUST(fi_ep_bind(own.ep[peer], &own.cq->fid, FI_TRANSMIT | FI_RECV));
	MUST(fi_ep_bind(own.ep[peer], &own.srx->fid, 0));
	MUST(fi_enable(own.ep[peer]));
	own.state[peer] = CONNECTING;
	own.life[peer]++;
	own.posted[peer] = own.sent[peer] = own.to_send[peer] = 0;
}

/* Handles an event, if there is one. */
static void events(void)
{
	struct {
		struct fi_eq_cm_entry entry;
		uint32_t data;
	} got;
	struct fi_eq_err_entry error = { 0 };
	uint32_t kind = 0, data = (uint32_t)own.own;
	ssize_t len = fi_eq_read(own.eq, &kind, &got, sizeof got.entry + 4, 0);

	if (len == -FI_EAGAIN)
		return;
	if (len == -FI_EAVAIL) {
		MUST(fi_eq_readerr(own.eq, &error, 0));
		die("event queue: error %d (%s)", error.err, fi_strerror(error.err));
	}
	MUST(len);
	if (kind == FI_CONNREQ) {
		uint32_t peer;

		memcpy(&peer, (uint8_t *)&got + sizeof got.entry, 4);
		IS(peer < PROCESSES && got.entry.fid == &own.pep->fid);
		/* the peer has seen the end of an earlier connection */
		open_ep((int)peer, got.entry.info);
		MUST(fi_accept(own.ep[peer], &data, 4));
		fi_freeinfo(got.entry.info);
		return;
	}
	int peer = (int)(uintptr_t)got.entry.fid->context - 1;
	IS(peer >= 0 && peer < PROCESSES && own.ep[peer] && &own.ep[peer]->fid == got.entry.fid);
	if (kind == FI_CONNECTED) {
		IS(own.state[peer] == CONNECTING);
		own.state[peer] = CONNECTED;
		add(MADE);
	} else {
		IS(kind == FI_SHUTDOWN && own.state[peer] == CONNECTED);
		own.state[peer] = SHUT;
		add(SHUTS);
	}
}

/* The immediate data of message `seq` of a round. Messages outside of rounds have round 255. */
static uint64_t data_of(int from, int round, int seq)
{
	return (uint64_t)from << 28 | (uint64_t)(round & 255) << 20 | (uint64_t)(seq & 0xfffff);
}

static size_t length_of(uint64_t data) { return mixed(data) % (LENGTH + 1); }

/* The context of a send: from 1024 on, with the endpoint's life. */
static uintptr_t context_of(int peer) { return 1024 + (own.life[peer] & 1023) * 8 + (uintptr_t)peer; }

static void count_sent(size_t context)
{
	int peer = (int)(context % 8);

	if (context == context_of(peer))
		own.sent[peer]++;
}

static void send_some(int peer)
{
	bool flood = own.floods;

	while (own.state[peer] == CONNECTED && own.posted[peer] - own.sent[peer] < WINDOW &&
	       (flood || own.posted[peer] < own.to_send[peer])) {
		int seq = own.posted[peer];
		uint64_t data = data_of(own.own, flood ? 255 : own.round, seq);
		uint8_t *out = own.out + (size_t)(peer * WINDOW + seq % WINDOW) * LENGTH;
		size_t len = length_of(data);

		fill(out, len, data);
		ssize_t posted = fi_senddata(own.ep[peer], out, len, fi_mr_desc(own.mr), data, 0, (void *)context_of(peer));
		if (posted == -FI_EAGAIN || posted == -FI_ESHUTDOWN || posted == -FI_ENOTCONN)
			return;
		MUST(posted);
		own.posted[peer]++;
	}
}

static void take_some(void)
{
	struct fi_cq_data_entry entries[16];
	struct fi_cq_err_entry error = { 0 };
	ssize_t got = fi_cq_read(own.cq, entries, 16);

	if (got == -FI_EAVAIL) {
		MUST(fi_cq_readerr(own.cq, &error, 0));
		size_t context = (size_t)(uintptr_t)error.op_context;
		if (own.exact || context < 1024)
			die("an error completion: %s, flags %llx, context %zu", fi_strerror(error.err),
			    (unsigned long long)error.flags, context);
		if (context != WRITE)
			count_sent(context);
		return;
	}
	if (got == -FI_EAGAIN)
		return;
	MUST(got);
	for (int i = 0; i < got; i++) {
		size_t context = (size_t)(uintptr_t)entries[i].op_context;
		uint64_t data = entries[i].data;
		int from = (int)(data >> 28), round = (int)(data >> 20 & 255), seq = (int)(data & 0xfffff);

		if (context >= 1024) {
			IS(entries[i].flags & FI_SEND);
			count_sent(context);
			continue;
		}
		IS(entries[i].flags & FI_RECV && entries[i].flags & FI_REMOTE_CQ_DATA && context < SLOTS && from < PROCESSES);
		if (entries[i].len != length_of(data))
			die("length %zu of message %llx", entries[i].len, (unsigned long long)data);
		must_be(own.in + context * LENGTH, entries[i].len, data);
		if (round != own.round_of[from]) {
			IS(round == 255 || own.round_of[from] == 255 || round > own.round_of[from]);
			own.round_of[from] = round;
			own.next[from] = 0;
			own.taken[from] = 0;
		}
		/* none is lost or comes twice; outside of rounds a connection can be made again */
		if (seq != own.next[from] && !(round == 255 && seq == 0))
			die("message %d of process %d in round %d, expected %d", seq, from, round, own.next[from]);
		own.next[from] = seq + 1;
		own.taken[from]++;
		post(context);
	}
}

static void work(void)
{
	events();
	take_some();
	for (int peer = 0; peer < PROCESSES; peer++)
		send_some(peer);
}

static void connect_to(int peer)
{
	uint32_t data = (uint32_t)own.own;

	if (own.state[peer] == CONNECTED)
		return;
	UNTIL(atomic_load(&board->named[peer]), work());
	open_ep(peer, own.active);
	MUST(fi_connect(own.ep[peer], board->names[peer].bytes, &data, 4));
	UNTIL(own.state[peer] == CONNECTED, work());
}

/* A write with a key that the peer has not; if `local`, of memory outside of its region. */
static void fail(int peer, bool local)
{
	static uint8_t outside[20000];

	if (local) {
		MUST(fi_send(own.ep[peer], outside, sizeof outside, fi_mr_desc(own.mr), FI_ADDR_UNSPEC,
			     (void *)(uintptr_t)WRITE));
		return;
	}
	MUST(fi_write(own.ep[peer], own.out, 8, fi_mr_desc(own.mr), FI_ADDR_UNSPEC, 4096, 0x7ffffff7,
		      (void *)(uintptr_t)WRITE));
}

static bool round_is_over(void)
{
	for (int peer = 0; peer < PROCESSES; peer++)
		if (own.state[peer] == CONNECTED &&
		    (own.sent[peer] < own.to_send[peer] || own.round_of[peer] != (own.round & 255) ||
		     own.taken[peer] < MESSAGES))
			return false;
	return true;
}

static bool sends_are_complete(void)
{
	for (int peer = 0; peer < PROCESSES; peer++)
		if (own.state[peer] == CONNECTED && own.posted[peer] != own.sent[peer])
			return false;
	return true;
}

static void process(int number)
{
	uint64_t turn = told(TURN), flood = 0, wrong = told(WRONG);
	bool reported = true;
	char text[16];

	own.own = number;
	own.exact = told(READY) < PROCESSES && !getenv("MAY_FAIL");
	snprintf(text, sizeof text, "%d", number / EACH);
	setenv("SOFTVERBS_NODE", text, 1);
	open_all();
	own.round = (int)told(ROUND);
	while (!told(STOP) && told(LEAVE) != (uint64_t)number + 1) {
		work();
		if (told(TURN) != turn) {
			turn = told(TURN);
			if ((int)(turn >> 8 & 255) == number) {
				connect_to((int)(turn & 255));
				add(DONE);
			}
		}
		if (told(WRONG) != wrong) {
			wrong = told(WRONG);
			if (number == 0)
				fail(VICTIM, wrong == 2);
		}
		/* what was sent outside of rounds is complete before a round begins */
		if (told(FLOOD) != flood) {
			flood = told(FLOOD);
			own.floods = flood != 0;
			for (int peer = 0; peer < PROCESSES && flood; peer++)
				own.posted[peer] = own.sent[peer] = 0;
			if (!flood) {
				UNTIL(sends_are_complete(), work());
				add(DONE);
			}
		}
		if ((int)told(ROUND) != own.round) {
			own.round = (int)told(ROUND);
			for (int peer = 0; peer < PROCESSES; peer++) {
				own.to_send[peer] = MESSAGES;
				own.posted[peer] = own.sent[peer] = 0;
			}
			reported = false;
		}
		if (!reported && round_is_over()) {
			reported = true;
			add(DONE);
		}
		usleep(20);
	}
	close_all();
}

/* ---- the main process ---- */

static pid_t pids[PROCESSES];
static int living = PROCESSES;

static void await_done(int count)
{
	UNTIL(told(DONE) >= (uint64_t)count, pause_ms(1));
	put(DONE, 0);
}

static void connect_pair(int from, int to)
{
	static uint64_t number;

	put(DONE, 0);
	put(TURN, ++number << 16 | (uint64_t)from << 8 | (uint64_t)to);
	await_done(1);
}

/* All connections that do not exist. */
static void connect_all(void)
{
	for (int to = EACH; to < PROCESSES; to++)
		for (int from = 0; from < EACH; from++)
			connect_pair(from, to);
}

/* Each connection has this many messages in each direction. */
static void exchange(void)
{
	put(DONE, 0);
	put(ROUND, told(ROUND) + 1);
	await_done(living);
}

static void finish(void)
{
	int failed = 0;

	put(STOP, 1);
	for (int i = 0; i < PROCESSES; i++)
		if (pids[i])
			failed |= status_of(pids[i], "a process");
	if (failed)
		exit(1);
}

static void begin(void)
{
	for (int i = 0; i < PROCESSES; i++)
		pids[i] = start("process", process, i);
	UNTIL(told(READY) == PROCESSES, pause_ms(1));
	connect_all();
	UNTIL(told(MADE) == 2 * EACH * EACH, pause_ms(1));
	exchange();
}

static void check_all(void)
{
	begin();
	exchange();
	IS(told(SHUTS) == 0);
	finish();
}

static void end_victim(bool killed)
{
	if (killed) {
		kill(pids[VICTIM], SIGKILL);
		waitpid(pids[VICTIM], NULL, 0);
	} else {
		put(LEAVE, VICTIM + 1);
		IS(status_of(pids[VICTIM], "the process that leaves") == 0);
		put(LEAVE, 0);
	}
	pids[VICTIM] = 0;
	living--;
}

static void replace_victim(void)
{
	pids[VICTIM] = start("successor", process, VICTIM);
	living++;
	UNTIL(told(READY) == PROCESSES + 1, pause_ms(1));
	connect_all();
	exchange();
}

static void quiet(bool killed)
{
	begin();
	end_victim(killed);
	UNTIL_WITHIN(1, told(SHUTS) >= EACH, pause_ms(1));
	exchange();
	IS(told(SHUTS) == EACH);
	replace_victim();
	exchange();
	IS(told(SHUTS) == EACH);
	finish();
}

static void check_quiet(void) { quiet(true); }

static void check_closes(void) { quiet(false); }

static void check_busy(void)
{
	setenv("MAY_FAIL", "1", 1);
	begin();
	put(FLOOD, 1);
	pause_ms(300);
	end_victim(true);
	pause_ms(300);
	put(DONE, 0);
	put(FLOOD, 0);
	await_done(living);
	pause_ms(1500);
	/* the ends of connections have been seen, at both sides */
	IS(told(SHUTS) >= EACH && (told(SHUTS) - EACH) % 2 == 0);
	put(LEAVE, 0);
	for (int to = VICTIM + 1; to < PROCESSES; to++)
		for (int from = 0; from < EACH; from++)
			connect_pair(from, to);
	exchange();
	replace_victim();
	finish();
}

static void fails(uint64_t how)
{
	setenv("MAY_FAIL", "1", 1);
	begin();
	put(WRONG, how);
	/* at least the connection of the request; with a circuit all of its process, at both sides */
	UNTIL_WITHIN(2, told(SHUTS) >= 2, pause_ms(1));
	pause_ms(1500);
	IS(told(SHUTS) % 2 == 0 && told(SHUTS) <= 2 * EACH);
	connect_all();
	exchange();
	finish();
}

static void check_fails(void) { fails(1); }

static void check_local(void) { fails(2); }

int main(int argc, char **argv)
{
	struct {
		const char *name;
		void (*run)(void);
	} modes[] = { { "all", check_all },   { "quiet", check_quiet }, { "closes", check_closes },
		      { "busy", check_busy }, { "fails", check_fails }, { "local", check_local } };

	if (argc < 4)
		return 2;
	provider = argv[2];
	node = argv[3];
	alarm(80);
	make_board();
	for (size_t i = 0; i < sizeof modes / sizeof *modes; i++)
		if (!strcmp(argv[1], modes[i].name)) {
			modes[i].run();
			return 0;
		}
	return 2;
}
