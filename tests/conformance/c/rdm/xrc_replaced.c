/* Endpoints of type FI_EP_RDM on XRC in several processes of several emulated nodes. All exchange
 * checked messages while processes are killed and replaced at their addresses: each process once,
 * in random order, and so each creator of target queue pairs.
 *
 *   xrc_replaced xrc PROV NODE NODES PROCESSES SEED [KILLS [PAUSE]]
 *   xrc_replaced rc PROV NODE NODES PROCESSES SEED [KILLS [PAUSE]]    the same on RC
 *
 * KILLS: how often a process is killed, by default as many as there are. PAUSE: the longest time
 * between kills in milliseconds, 300 by default. The receiver of a message echoes its number. An
 * echo of a present life shows that the sender has a session with that life.
 *
 * - From then until that life is killed, no operation to it fails, and each message is echoed. No
 *   operation to a process fails before the process is killed for the first time.
 * - No message arrives twice, or with other bytes.
 * - No message that was posted to a life with which its sender had a session, and before it was
 *   killed, arrives at a successor.
 * - At the end each process exchanges messages with each other one.
 *
 * Ends with 0, or says what went wrong. */
#define _GNU_SOURCE
#define SECONDS 60
#include "../rdm_processes.h"

#include <arpa/inet.h>
#include <netinet/in.h>

enum { MOST = 32, LIVES = 64, NUMBERS = 1 << 15 };
enum { RECEIVES = 48, SENDS = 8, ECHOES = 128, LARGEST = 1 << 16, LATE = 64 };
enum { BUSY, LAST, CLOSE };
enum { MESSAGE = 0x5e4d, ECHO };

static const size_t sizes[] = { 64, 64, 64, 200, 4096, 8192, 20000, LARGEST };
enum { SIZES = sizeof sizes / sizeof *sizes };

/* What the processes share besides the board. */
static struct {
	_Atomic int phase;
	_Atomic int life[MOST];	 /* that which runs, or is to be started; from 1 */
	_Atomic int dying[MOST]; /* it is killed, or was killed and not replaced yet */
	_Atomic int quiet[MOST]; /* the life that has done all */
	/* messages of a process that were posted when the life in them was being killed */
	_Atomic uint64_t late[MOST][LATE];
	_Atomic unsigned lates[MOST];
	_Atomic uint64_t messages, echoes, failures;
} *all;

struct words {
	uint32_t kind, number;
	int from, from_life, to;
	int session; /* the life of the receiver with which the sender has a session, or 0 */
	uint32_t size;
};

struct send {
	int busy;
	/* when it was posted: the life with which there was a session, or 1 if the process has had no
	 * other life, or 0 */
	int session;
	struct words words;
	uint8_t bytes[LARGEST];
};

/* Messages to one process. */
struct peer {
	fi_addr_t addr;
	int session;	 /* the life that has echoed a message */
	uint32_t number; /* of the next message */
	uint32_t echoed; /* number of echoes of the session's life */
	uint32_t sent;	 /* messages posted in the session, that have not failed */
	double since;	 /* the last echo, or the begin of waiting */
	bool last;	 /* an echo has arrived in the phase LAST */
};

/* What has arrived from a life of a process. */
static uint8_t *arrived[MOST][LIVES];

static bool on_rc;
static int nodes, each, count, kills, most_pause;
static uint64_t seed;
static int own, own_life;
static struct peer peers[MOST];
static struct send sends[SENDS], echoes[ECHOES];
static uint8_t receives[RECEIVES][LARGEST];
static struct words waiting[4096]; /* echoes that wait for an entry */
static unsigned first_waiting, last_waiting;

static uint64_t random_below(uint64_t bound)
{
	seed += 0x9e3779b97f4a7c15ULL;
	return mixed(seed) % bound;
}

static uint64_t bytes_of(const struct words *words)
{
	return ((uint64_t)words->from << 40 | (uint64_t)words->from_life << 32 | words->number) * MOST + (uint64_t)words->to;
}

static uint64_t id_of(const struct words *words)
{
	return (uint64_t)words->from_life << 48 | (uint64_t)words->to << 32 | words->number;
}

/* Whether a message was posted when the life in it was being killed. Its sender may not have stated
 * it yet, and may have been killed before. */
static bool is_late(const struct words *words)
{
	for (double until = now() + 2; now() < until; pause_ms(1)) {
		for (int i = 0; i < LATE; i++)
			if (atomic_load(&all->late[words->from][i]) == id_of(words))
				return true;
		if (atomic_load(&all->life[words->from]) != words->from_life || atomic_load(&all->dying[words->from]))
			return true;
	}
	return false;
}

static struct fi_info *info_at(const struct name *name)
{
	struct fi_info *hints = fi_allocinfo(), *info;

	hints->caps = CAPS;
	hints->ep_attr->type = FI_EP_RDM;
	hints->ep_attr->protocol = on_rc ? FI_PROTO_IB_RDM : FI_PROTO_RDMA_CM_IB_XRC;
	hints->domain_attr->data_progress = FI_PROGRESS_MANUAL;
	hints->fabric_attr->prov_name = strdup(provider);
	MUST(fi_getinfo(FI_VERSION(1, 17), node, NULL, FI_SOURCE, hints, &info));
	fi_freeinfo(hints);
	/* all of 127.0.0.0/8 is the loopback interface, which has one address of them */
	IS(info->src_addrlen == sizeof(struct sockaddr_in));
	if (name) {
		IS(name->len == info->src_addrlen);
		memcpy(info->src_addr, name->bytes, name->len);
	} else {
		((struct sockaddr_in *)info->src_addr)->sin_addr.s_addr = htonl(INADDR_LOOPBACK + (uint32_t)(own / each));
	}
	return info;
}

static void receive(struct side *side, uint8_t *bytes)
{
	POST(side, fi_recv(side->ep, bytes, LARGEST, NULL, FI_ADDR_UNSPEC, bytes));
}

/* Whether the life of a process runs and will not be killed before this call. */
static bool lives(int of, int life) { return atomic_load(&all->life[of]) == life && !atomic_load(&all->dying[of]); }

static int session_with(int to) { return lives(to, peers[to].session) ? peers[to].session : 0; }

static bool post(struct side *side, struct send *send, const struct words *words)
{
	int session = session_with(words->to);
	long posted;

	send->words = *words;
	memcpy(send->bytes, words, sizeof *words);
	fill(send->bytes + sizeof *words, words->size - sizeof *words, bytes_of(words));
	posted = fi_send(side->ep, send->bytes, words->size, NULL, peers[words->to].addr, send);
	if (posted == -FI_EAGAIN)
		return false;
	if (posted)
		die("fi_send: %s", fi_strerror((int)-posted));
	send->busy = 1;
	/* the process may have been replaced before the post */
	send->session = lives(words->to, session) ? session : lives(words->to, 1);
	return true;
}

/* Posts a message to a process, if an entry is free. */
static void post_message(struct side *side, int to)
{
	struct peer *peer = &peers[to];
	struct send *send = sends;
	/* a message that is posted later is meant for the process that has the address */
	struct words words = { MESSAGE, peer->number, own, own_life, to, session_with(to), (uint32_t)sizes[random_below(SIZES)] };

	while (send < sends + SENDS && send->busy)
		send++;
	if (send == sends + SENDS || !post(side, send, &words))
		return;
	peer->number++;
	if (words.session && send->session != words.session) {
		unsigned at = atomic_load(&all->lates[own]);

		atomic_store(&all->late[own][at % LATE], id_of(&words));
		atomic_store(&all->lates[own], at + 1);
	}
	if (words.session && send->session == words.session) {
		if (peer->sent == peer->echoed)
			peer->since = now();
		peer->sent++;
	}
	atomic_fetch_add(&all->messages, 1);
}

static void post_echoes(struct side *side)
{
	while (first_waiting != last_waiting) {
		struct send *send = echoes;

		while (send < echoes + ECHOES && send->busy)
			send++;
		if (send == echoes + ECHOES || !post(side, send, &waiting[first_waiting % 4096]))
			return;
		first_waiting++;
	}
}

static void arrive(const uint8_t *bytes, size_t len)
{
	struct words words;
	uint8_t *seen;

	IS(len >= sizeof words);
	memcpy(&words, bytes, sizeof words);
	IS(words.from >= 0 && words.from < count && words.from_life > 0 && words.from_life < LIVES);
	IS(words.to == own && words.size == len && words.from_life <= atomic_load(&all->life[words.from]));
	if (words.kind == ECHO) {
		struct peer *peer = &peers[words.from];

		/* `session`: the life that has posted the message */
		if (words.session != own_life || words.from_life < peer->session)
			return;
		if (words.from_life > peer->session) {
			peer->session = words.from_life;
			peer->sent = peer->echoed = 0;
		} else if (words.size == sizeof words + 1) {
			/* of a message in the session */
			peer->echoed++;
		}
		peer->since = now();
		peer->last |= atomic_load(&all->phase) >= LAST;
		atomic_fetch_add(&all->echoes, 1);
		return;
	}
	IS(words.kind == MESSAGE && words.number < NUMBERS);
	must_be(bytes + sizeof words, len - sizeof words, bytes_of(&words));
	if (words.session && words.session != own_life && !is_late(&words))
		die("message %u of %d (life %d) to life %d has arrived at life %d", words.number, words.from, words.from_life, words.session, own_life);
	seen = arrived[words.from][words.from_life];
	if (!seen)
		seen = arrived[words.from][words.from_life] = calloc(1, NUMBERS);
	if (seen[words.number]++)
		die("message %u of %d (life %d) has arrived twice", words.number, words.from, words.from_life);
	IS(last_waiting - first_waiting < 4096);
	waiting[last_waiting++ % 4096] = (struct words){ ECHO,	    words.number,	 own, own_life, words.from, words.from_life,
							 (uint32_t)(sizeof words + (words.session == own_life)) };
}

static void fail(const struct send *send, const struct fi_cq_err_entry *error)
{
	const struct words *words = &send->words;

	atomic_fetch_add(&all->failures, 1);
	if (send->session && lives(words->to, send->session))
		die("%.6f: %s %u to %d (life %d), of %u bytes, has failed: %s", now(), words->kind == ECHO ? "echo" : "message", words->number,
		    words->to, send->session, words->size, fi_strerror(error->err));
}

static void poll_queue(struct side *side)
{
	struct fi_cq_tagged_entry entry;
	struct fi_cq_err_entry error;

	for (int i = 0; i < 16; i++) {
		ssize_t got = fi_cq_read(side->tx, &entry, 1);
		uint8_t *at;

		if (got == -FI_EAGAIN)
			break;
		memset(&error, 0, sizeof error);
		if (got == -FI_EAVAIL) {
			RETURNS(fi_cq_readerr(side->tx, &error, 0), 1);
			entry.op_context = error.op_context;
		} else {
			IS(got == 1);
		}
		at = entry.op_context;
		if (at >= receives[0] && at < receives[RECEIVES]) {
			/* the process that has sent it may have been killed */
			if (!error.err)
				arrive(at, entry.len);
			receive(side, at);
		} else {
			struct send *send = entry.op_context;

			IS(send->busy);
			send->busy = 0;
			if (error.err)
				fail(send, &error);
		}
	}
}

/* Every message to a life with which there is a session is echoed. */
static bool has_all_echoes(void)
{
	bool has = true;

	for (int to = 0; to < count; to++) {
		struct peer *peer = &peers[to];

		if (to == own || peer->sent == peer->echoed || !lives(to, peer->session))
			continue;
		has = false;
		if (now() - peer->since > 30)
			die("%u messages to %d (life %d) and %u echoes", peer->sent, to, peer->session, peer->echoed);
	}
	return has;
}

static bool has_last(void)
{
	for (int to = 0; to < count; to++)
		if (to != own && !peers[to].last)
			return false;
	return true;
}

static bool is_idle(void)
{
	for (int i = 0; i < SENDS; i++)
		if (sends[i].busy)
			return false;
	for (int i = 0; i < ECHOES; i++)
		if (echoes[i].busy)
			return false;
	return first_waiting == last_waiting;
}

static void process(int number)
{
	static char name[32];
	struct side side;
	char text[16];
	double limit = 0;

	own = number;
	own_life = atomic_load(&all->life[own]);
	seed += (uint64_t)(own * LIVES + own_life) << 32;
	snprintf(name, sizeof name, "%d (life %d)", own, own_life);
	role = name;
	snprintf(text, sizeof text, "%d", own / each);
	setenv("SOFTVERBS_NODE", text, 1);
	memset(&side, 0, sizeof side);
	open_domain_with(&side, info_at(own_life > 1 ? &board->names[own] : NULL));
	side.tx = side.rx = queue(&side, 4096);
	side.ep = endpoint_on(&side, 0);
	for (int i = 0; i < RECEIVES; i++)
		receive(&side, receives[i]);
	if (own_life == 1)
		publish(side.ep, own);
	for (int peer = 0; peer < count; peer++)
		peers[peer].addr = address(&side, peer);
	while (atomic_load(&all->phase) != CLOSE) {
		int to = (int)random_below((uint64_t)count);
		int phase = atomic_load(&all->phase);

		poll_queue(&side);
		post_echoes(&side);
		if (phase == BUSY) {
			/* some numbers are left for the end */
			if (to != own && peers[to].number < NUMBERS - 1000 && peers[to].sent - peers[to].echoed < 64)
				post_message(&side, to);
			(void)has_all_echoes();
			continue;
		}
		if (phase != LAST)
			break;
		if (!limit)
			limit = now() + 40;
		/* the first operation to a successor may fail with the session of its predecessor */
		if (to != own && !peers[to].last && peers[to].number < NUMBERS)
			post_message(&side, to);
		if (has_last() && has_all_echoes() && is_idle())
			atomic_store(&all->quiet[own], own_life);
		if (now() > limit) {
			for (to = 0; to < count; to++)
				if (to != own && !peers[to].last)
					die("no echo of %d (life %d) at the end", to, atomic_load(&all->life[to]));
			die("operations do not end");
		}
	}
	close_side(&side);
}

static pid_t pids[MOST];

/* No process has ended by itself. */
static void look(void)
{
	for (int i = 0; i < count; i++) {
		int status;

		if (pids[i] && waitpid(pids[i], &status, WNOHANG) == pids[i])
			die("process %d (life %d) has ended: %#x", i, atomic_load(&all->life[i]), status);
	}
}

static void look_for(double seconds)
{
	for (double until = now() + seconds; now() < until; pause_ms(5))
		look();
}

static void replace(int of)
{
	int status;

	atomic_store(&all->dying[of], 1);
	if (kill(pids[of], SIGKILL) || waitpid(pids[of], &status, 0) != pids[of] || !WIFSIGNALED(status))
		die("process %d has ended before it was killed: %#x", of, status);
	pids[of] = 0;
	/* the peers find no process, or the next one */
	if (random_below(2))
		look_for((double)random_below(50) * 1e-3);
	atomic_fetch_add(&all->life[of], 1);
	atomic_store(&all->dying[of], 0);
	pids[of] = start("process", process, of);
}

static void run(void)
{
	int order[MOST];

	all = mmap(NULL, sizeof *all, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (all == MAP_FAILED)
		die("mmap: %s", strerror(errno));
	for (int i = 0; i < count; i++) {
		order[i] = i;
		atomic_store(&all->life[i], 1);
		pids[i] = start("process", process, i);
	}
	UNTIL(atomic_load(&all->echoes) > (uint64_t)(count * count), look_for(0.01));
	for (int i = 0; i < kills; i++) {
		int at = i % count, with = at + (int)random_below((uint64_t)(count - at));
		int of = order[with];

		order[with] = order[at];
		order[at] = of;
		replace(of);
		look_for((double)random_below((uint64_t)most_pause) * 1e-3);
	}
	look_for(1);
	atomic_store(&all->phase, LAST);
	for (int i = 0; i < count; i++)
		UNTIL(atomic_load(&all->quiet[i]) == atomic_load(&all->life[i]), look_for(0.01));
	atomic_store(&all->phase, CLOSE);
	for (int i = 0; i < count; i++)
		IS(status_of(pids[i], "process") == 0);
	printf("%d killed, %llu messages, %llu echoes, %llu errors\n", kills, (unsigned long long)atomic_load(&all->messages),
	       (unsigned long long)atomic_load(&all->echoes), (unsigned long long)atomic_load(&all->failures));
}

static void xrc(void) { run(); }

static void rc(void)
{
	on_rc = true;
	run();
}

int main(int argc, char **argv)
{
	static const struct mode modes[] = { { "xrc", xrc }, { "rc", rc } };

	if (argc < 7)
		die("usage: %s MODE PROV NODE NODES PROCESSES SEED [KILLS [PAUSE]]", argv[0]);
	nodes = atoi(argv[4]);
	each = atoi(argv[5]);
	count = nodes * each;
	seed = strtoull(argv[6], NULL, 0);
	kills = argc > 7 ? atoi(argv[7]) : count;
	most_pause = argc > 8 ? atoi(argv[8]) : 300;
	IS(most_pause > 0);
	IS(count > 1 && count <= MOST);
	return run_mode(modes, sizeof modes / sizeof *modes, argc, argv);
}
