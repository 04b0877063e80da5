/* Endpoints of type FI_EP_RDM on XRC: a process is killed at a point of the handshake of circuits
 * and links, and the others go on.
 *
 *   xrc_endpoints all PROV NODE VICTIMS SEED [PATH]   VICTIMS processes on each path
 *
 * Two processes, `first` and `second`, are on one emulated node for the whole run and exchange
 * messages. In each round two others are on a node of their own: `beside`, which survives, and the
 * victim. The paths differ in what the victim does between two marks:
 *
 *   make      opens an endpoint, as the first process of its node
 *   join      opens an endpoint, beside another process
 *   dial      dials the first circuit between the nodes. The target of the answer is its own
 *   accept    creates the target of the first circuits to its node, while `beside` is dialled too
 *   further   dials a link on its circuit
 *   opens     opens the target, whose creator is `beside`, for a link request, and answers
 *   traffic   exchanges messages, as the creator of the targets that `beside` receives through
 *   close     closes its endpoint, as the creator
 *
 * The first victim of a path reaches the second mark. Each other one is killed at a random system
 * call of its threads, before or after its effect, or a random number of instructions behind it
 * (below 4,000; of `traffic`, which makes few system calls, below 16,000), to which all its threads
 * are single-stepped. Then:
 *
 * - each two living processes exchange further messages within LIMIT seconds;
 * - no operation between living processes fails; every message arrives once, with its bytes;
 * - every operation to the victim ends, at the latest 3 s after the connect timeout;
 * - `beside` closes its endpoint and ends with 0.
 *
 * At the end the first two have no more descriptors than before the first round, and close their
 * endpoints. Prints a line for each path. Plain libfabric 1.17. */
#include "../../conformance/c/rdm_processes.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <netinet/in.h>
#include <sys/ptrace.h>
#include <sys/wait.h>

enum { FIRST, SECOND, BESIDE, VICTIM, ROLES };
enum { SENDS = 96, RECEIVES = 32, LARGEST = 40000, UNDER_WAY = 4, NUMBERS = 1 << 22, LIVES = 4 };
enum { THREADS = 64, STEPS = 4000 };
enum { CONNECT_TIMEOUT = 5 };
/* Seconds: the longest time without a message between two living processes. */
#define LIMIT 3.0

static const char *names[ROLES] = { "first", "second", "beside", "the victim" };
static const size_t sizes[] = { 64, 64, 200, 5000, LARGEST };

enum path { MAKE, JOIN, DIAL, ACCEPT, FURTHER, OPENS, TRAFFIC, CLOSE, PATHS };
static const char *paths[PATHS] = { "make", "join", "dial", "accept", "further", "opens", "traffic", "close" };

/* What the processes share besides the board. A life is the number of the round of `beside` and the
 * victim, and 1 for the others. */
static struct {
	_Atomic int on[ROLES][ROLES]; /* the life of the receiver to which the sender sends, or 0 */
	_Atomic int born[ROLES];      /* the life whose name is on the board */
	_Atomic int ready;	      /* the victim waits until it is traced */
	_Atomic int traced;	      /* the life of the victim that is traced */
	_Atomic int may_fail;	      /* operations to this life of the victim may fail */
	_Atomic int dying;	      /* this life of the victim is being killed, or has been */
	_Atomic int stop[ROLES];      /* the life that closes its endpoint */
	_Atomic int calm, calms[ROLES];
	_Atomic int count_fds, fds[ROLES];
	_Atomic int pending[ROLES]; /* operations to victims that have ended */
	_Atomic uint64_t sent[ROLES][ROLES], arrived[ROLES][ROLES], done[ROLES][ROLES];
	_Atomic uint64_t errors;
} *all;

struct words {
	int from, from_life, to, to_life;
	uint32_t number, size;
};

struct send {
	int busy;
	double died; /* when this process has seen that the receiver was dead */
	struct words words;
	uint8_t bytes[LARGEST];
};

struct peer {
	int life;
	fi_addr_t addr;
	uint32_t number;
	int under_way;
	double last;
};

static int own, own_life;
static struct peer peers[ROLES];
static struct send sends[SENDS];
static uint8_t receives[RECEIVES][LARGEST];
static uint8_t seen[ROLES][LIVES][NUMBERS / 8]; /* a bit for each number */
static int seen_life[ROLES][LIVES];
static uint64_t seed;
static enum path path;
static int round_number = 1;

static uint64_t random_below(uint64_t bound)
{
	seed += 0x9e3779b97f4a7c15ULL;
	return mixed(seed) % bound;
}

static uint64_t bytes_of(const struct words *words)
{
	return (uint64_t)words->from_life << 40 ^ (uint64_t)words->number << 8 ^ (uint64_t)words->from << 4 ^ (uint64_t)words->to;
}

/* ---- a process with an endpoint ---- */

static int descriptors(void)
{
	DIR *folder = opendir("/proc/self/fd");
	int count = 0;

	while (folder && readdir(folder))
		count++;
	closedir(folder);
	return count;
}

static void receive(struct side *side, uint8_t *bytes)
{
	POST(side, fi_recv(side->ep, bytes, LARGEST, NULL, FI_ADDR_UNSPEC, bytes));
}

static void arrive(const uint8_t *bytes, size_t len)
{
	struct words words;
	int at;

	IS(len >= sizeof words);
	memcpy(&words, bytes, sizeof words);
	IS(words.from >= 0 && words.from < ROLES && words.number < NUMBERS && words.size == len);
	IS(words.to == own && words.to_life == own_life);
	must_be(bytes + sizeof words, len - sizeof words, bytes_of(&words));
	at = words.from_life % LIVES;
	if (seen_life[words.from][at] != words.from_life) {
		IS(seen_life[words.from][at] < words.from_life);
		memset(seen[words.from][at], 0, NUMBERS / 8);
		seen_life[words.from][at] = words.from_life;
	}
	if (seen[words.from][at][words.number / 8] & 1 << words.number % 8)
		die("message %u of %s (life %d) has arrived twice", words.number, names[words.from], words.from_life);
	seen[words.from][at][words.number / 8] |= (uint8_t)(1 << words.number % 8);
	atomic_fetch_add(&all->arrived[words.from][own], 1);
}

static void complete(struct send *send, int error)
{
	int to = send->words.to;

	IS(send->busy);
	send->busy = 0;
	if (send->words.to_life == peers[to].life)
		peers[to].under_way--;
	if (!error) {
		atomic_fetch_add(&all->done[own][to], 1);
		return;
	}
	atomic_fetch_add(&all->errors, 1);
	if (to != VICTIM || atomic_load(&all->may_fail) < send->words.to_life)
		die("message %u to %s (life %d), of %u bytes, has failed: %s", send->words.number, names[to], send->words.to_life,
		    send->words.size, fi_strerror(error));
}

/* Takes completions, for which it waits at most `ms` milliseconds. */
static void take_completions(struct side *side, int ms)
{
	struct fi_cq_tagged_entry entries[8];
	struct fi_cq_err_entry error = { 0 };
	ssize_t got = fi_cq_sread(side->rx, entries, 8, NULL, ms);

	if (got == -FI_EAVAIL) {
		RETURNS(fi_cq_readerr(side->rx, &error, 0), 1);
		entries[0].op_context = error.op_context;
		entries[0].len = error.len;
		got = 1;
	}
	if (got != -FI_EAGAIN && got != -FI_EINTR)
		MUST(got);
	for (ssize_t i = 0; i < got; i++) {
		uint8_t *at = entries[i].op_context;

		if (at < receives[0] || at >= receives[RECEIVES]) {
			complete(entries[i].op_context, error.err);
			continue;
		}
		/* the sender may have been killed */
		if (!error.err)
			arrive(at, entries[i].len);
		receive(side, at);
	}
}

static void post_to(struct side *side, int to)
{
	int life = atomic_load(&all->on[own][to]);
	struct peer *peer = &peers[to];
	struct send *send = sends;
	struct words words;
	ssize_t posted;

	if (!life || (to == VICTIM && atomic_load(&all->dying) >= life))
		return;
	if (peer->life != life) {
		*peer = (struct peer){ .life = life };
		peer->addr = insert(side, &board->names[to]);
	}
	while (send < sends + SENDS && send->busy)
		send++;
	/* an answer: the other side dials */
	if (own == VICTIM && (path == ACCEPT || path == OPENS) && !atomic_load(&all->arrived[to][own]))
		return;
	if (send == sends + SENDS || peer->under_way == UNDER_WAY || now() < peer->last + 0.002 || peer->number == NUMBERS)
		return;
	words = (struct words){ own, own_life, to, life, peer->number, (uint32_t)sizes[random_below(sizeof sizes / sizeof *sizes)] };
	memcpy(send->bytes, &words, sizeof words);
	fill(send->bytes + sizeof words, words.size - sizeof words, bytes_of(&words));
	posted = fi_send(side->ep, send->bytes, words.size, NULL, peer->addr, send);
	if (posted == -FI_EAGAIN)
		return;
	MUST(posted);
	send->busy = 1;
	send->died = 0;
	send->words = words;
	peer->under_way++;
	peer->number++;
	peer->last = now();
	atomic_fetch_add(&all->sent[own][to], 1);
}

/* Operations to victims that have ended; each ends in time. */
static int to_the_dead(void)
{
	int count = 0;

	for (struct send *send = sends; send < sends + SENDS; send++) {
		if (!send->busy || send->words.to != VICTIM || atomic_load(&all->dying) < send->words.to_life)
			continue;
		count++;
		if (send->died == 0)
			send->died = now();
		if (now() - send->died > CONNECT_TIMEOUT + 3)
			die("message %u to the victim (life %d), of %u bytes, does not end", send->words.number, send->words.to_life,
			    send->words.size);
	}
	return count;
}

static void work(struct side *side, int ms)
{
	int calm = atomic_load(&all->calm);
	bool quiet = true;

	take_completions(side, ms);
	for (int to = 0; to < ROLES; to++) {
		post_to(side, to);
		quiet &= !atomic_load(&all->on[own][to]) && (to == VICTIM || peers[to].under_way == 0);
	}
	atomic_store(&all->pending[own], to_the_dead());
	if (quiet)
		atomic_store(&all->calms[own], calm);
	if (atomic_load(&all->count_fds))
		atomic_store(&all->fds[own], descriptors());
}

static void enter(struct side *side)
{
	side->ep = endpoint_on(side, 0);
	for (int i = 0; i < RECEIVES; i++)
		receive(side, receives[i]);
	publish(side->ep, own);
	atomic_store(&all->born[own], own_life);
}

/* The objects of an endpoint at the address of its node. */
static void open_objects(struct side *side)
{
	int number = own == BESIDE || own == VICTIM ? 1 + own_life % 4000 : 0;
	struct fi_info *info;
	char text[16];

	snprintf(text, sizeof text, "%d", number);
	setenv("SOFTVERBS_NODE", text, 1);
	setenv("WEFT_TEST_XRC", "1", 1);
	wants_auto = own == FIRST || (own != SECOND && own_life % 2);
	wanted.manual = !wants_auto;
	wanted.wait = FI_WAIT_UNSPEC;
	info = offered();
	/* all of 127.0.0.0/8 is the loopback interface, which has one address of them */
	IS(info->src_addrlen == sizeof(struct sockaddr_in));
	((struct sockaddr_in *)info->src_addr)->sin_addr.s_addr = htonl(INADDR_LOOPBACK + (uint32_t)number);
	/* libfabric's other providers make 20,000 system calls before */
	if (own == VICTIM)
		atomic_store(&all->ready, 1);
	UNTIL(own != VICTIM || atomic_load(&all->traced) == own_life, pause_ms(1));
	open_domain_with(side, info);
	side->tx = side->rx = queue(side, 4096);
}

static void begin_life(int role, int life)
{
	sigset_t none;

	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
	own = role;
	own_life = life;
	seed += (uint64_t)(own_life * ROLES + own) << 32;
}

static void survivor(int role)
{
	struct side side;

	begin_life(role, role == BESIDE ? round_number : 1);
	open_objects(&side);
	enter(&side);
	while (atomic_load(&all->stop[own]) != own_life)
		work(&side, 2);
	close_side(&side);
}

static bool has_exchanged(int with) { return atomic_load(&all->arrived[with][own]) && atomic_load(&all->done[own][with]); }

static void victim(int life)
{
	struct side side;

	begin_life(VICTIM, life);
	open_objects(&side);
	if (path == MAKE || path == JOIN) {
		raise(SIGUSR1);
		enter(&side);
		raise(SIGUSR2);
		die("the victim lives");
	}
	enter(&side);
	/* what precedes the mark */
	if (path == FURTHER)
		UNTIL(has_exchanged(SECOND), work(&side, 50));
	if (path == TRAFFIC || path == CLOSE)
		UNTIL(has_exchanged(FIRST) && has_exchanged(SECOND) && has_exchanged(BESIDE), work(&side, 50));
	raise(SIGUSR1);
	switch (path) {
	case DIAL:
	case FURTHER:
	case OPENS:
		UNTIL(has_exchanged(FIRST), work(&side, 50));
		break;
	case ACCEPT:
		UNTIL(has_exchanged(FIRST) && has_exchanged(SECOND), work(&side, 50));
		break;
	case TRAFFIC:
		for (uint64_t until = atomic_load(&all->arrived[FIRST][own]) + 10; atomic_load(&all->arrived[FIRST][own]) < until;)
			work(&side, 50);
		break;
	default:
		MUST(fi_close(&side.ep->fid));
	}
	raise(SIGUSR2);
	die("the victim lives");
}

/* ---- the tracer ---- */

static pid_t pids[ROLES];
static pid_t threads[THREADS];
static int thread_count;
static bool begun, ended;
static uint64_t calls, steps, kill_call, kill_step;
static bool stepping;
static double last_stop;

static void kill_victim(int life)
{
	int status;

	atomic_store(&all->may_fail, life);
	atomic_store(&all->dying, life);
	kill(pids[VICTIM], SIGKILL);
	/* the leader ends last, also behind threads that were not seen yet */
	for (;;) {
		pid_t got = waitpid(-1, &status, __WALL);

		for (int i = 0; i < VICTIM; i++)
			if (got == pids[i])
				die("%s has ended: %#x", names[i], status);
		if (got == pids[VICTIM] && !WIFSTOPPED(status))
			break;
		IS(got > 0);
	}
	pids[VICTIM] = 0;
	thread_count = 0;
}

/* One stop of a thread of the victim. Returns whether it is to be killed now. */
static bool stopped(pid_t thread, int status)
{
	int event = status >> 16, got = WSTOPSIG(status), deliver = 0;

	last_stop = now();
	if (event == PTRACE_EVENT_CLONE) {
		unsigned long added;

		ptrace(PTRACE_GETEVENTMSG, thread, NULL, &added);
		IS(thread_count < THREADS);
		threads[thread_count++] = (pid_t)added;
	} else if (event == PTRACE_EVENT_STOP) {
		/* a new thread */
	} else if (got == SIGUSR1) {
		begun = true;
	} else if (got == SIGUSR2) {
		ended = true;
		return true;
	} else if (got == (SIGTRAP | 0x80)) {
		calls += begun;
		stepping |= begun && calls > kill_call;
	} else if (got == SIGTRAP) {
		steps += stepping;
	} else {
		deliver = got;
	}
	if (stepping && steps >= kill_step)
		return true;
	/* fails if the thread is being killed with its process */
	ptrace(stepping ? PTRACE_SINGLESTEP : PTRACE_SYSCALL, thread, NULL, deliver);
	return false;
}

/* Lets the victim run, for one stop of each thread or a millisecond. Returns whether it is to be
 * killed now. */
static bool trace(void)
{
	static const struct timespec most = { .tv_nsec = 1000000 };
	bool idle = true;
	int status;

	for (int i = 0; i < thread_count; i++) {
		if (waitpid(threads[i], &status, __WALL | WNOHANG) != threads[i])
			continue;
		idle = false;
		if (WIFSTOPPED(status)) {
			bool had_begun = begun;

			if (stopped(threads[i], status))
				return true;
			/* a caller that waits for the mark does not expect what follows it */
			if (begun && !had_begun)
				return false;
			continue;
		}
		if (threads[i] == pids[VICTIM])
			die("the victim has ended: %#x", status);
		threads[i--] = threads[--thread_count];
	}
	if (idle) {
		sigset_t set;

		sigemptyset(&set);
		sigaddset(&set, SIGCHLD);
		sigtimedwait(&set, NULL, &most);
		/* all its threads sleep */
		if (stepping && now() - last_stop > 0.05)
			return true;
	}
	return false;
}

/* No survivor has ended by itself. */
static void look(void)
{
	int status;

	for (int i = 0; i < VICTIM; i++)
		if (pids[i] && waitpid(pids[i], &status, WNOHANG) == pids[i]) {
			pids[i] = 0;
			die("%s has ended: %#x", names[i], status);
		}
}

/* Waits for a condition, while the victim, if there is one, runs up to its mark. */
#define WAIT(condition)                                                                                              \
	UNTIL(condition, {                                                                                           \
		if (pids[VICTIM])                                                                                    \
			IS(!trace());                                                                                \
		else                                                                                                 \
			pause_ms(1);                                                                                 \
		look();                                                                                              \
	})

static void start_victim(int life)
{
	begun = ended = stepping = false;
	calls = steps = 0;
	atomic_store(&all->ready, 0);
	pids[VICTIM] = start(names[VICTIM], victim, life);
	UNTIL(atomic_load(&all->ready), (look(), pause_ms(1)));
	if (ptrace(PTRACE_SEIZE, pids[VICTIM], NULL, PTRACE_O_TRACECLONE | PTRACE_O_TRACESYSGOOD | PTRACE_O_EXITKILL))
		die("PTRACE_SEIZE: %s", strerror(errno));
	threads[0] = pids[VICTIM];
	thread_count = 1;
	/* from here on it stops at each system call */
	ptrace(PTRACE_INTERRUPT, pids[VICTIM], NULL, NULL);
	atomic_store(&all->traced, life);
}

static void turn(int from, int to, int life_from, int life_to)
{
	atomic_store(&all->on[from][to], life_to);
	atomic_store(&all->on[to][from], life_from);
}

/* ---- the rounds ---- */

static double longest;
static int kills_ended;
static const char *longest_path = "";

static void start_beside(int life)
{
	pids[BESIDE] = start(names[BESIDE], survivor, BESIDE);
	WAIT(atomic_load(&all->born[BESIDE]) == life);
}

static void connect_beside(int life)
{
	turn(FIRST, BESIDE, 1, life);
	turn(SECOND, BESIDE, 1, life);
}

/* Each two living processes exchange `count` further messages in each direction. */
static double exchange(uint64_t count, const char *when)
{
	uint64_t before[VICTIM][VICTIM];
	double since = now();

	for (int from = 0; from < VICTIM; from++)
		for (int to = 0; to < VICTIM; to++)
			before[from][to] = atomic_load(&all->arrived[from][to]);
	for (int from = 0; from < VICTIM; from++)
		for (int to = 0; to < VICTIM; to++) {
			if (!atomic_load(&all->on[from][to]))
				continue;
			while (atomic_load(&all->arrived[from][to]) < before[from][to] + count) {
				if (now() - since > LIMIT)
					die("%s: %llu messages from %s to %s within %.0f s", when,
					    (unsigned long long)(atomic_load(&all->arrived[from][to]) - before[from][to]), names[from],
					    names[to], LIMIT);
				look();
				pause_ms(1);
			}
		}
	return now() - since;
}

/* Nothing is under way between living processes, and nothing was lost. */
static void calm(void)
{
	int token = atomic_load(&all->calm) + 1;

	for (int from = 0; from < ROLES; from++)
		for (int to = 0; to < ROLES; to++)
			atomic_store(&all->on[from][to], 0);
	atomic_store(&all->calm, token);
	for (int of = 0; of < VICTIM; of++)
		if (pids[of])
			WAIT(atomic_load(&all->calms[of]) == token);
	for (int from = 0; from < VICTIM; from++)
		for (int to = 0; to < VICTIM; to++)
			UNTIL(atomic_load(&all->arrived[from][to]) == atomic_load(&all->sent[from][to]), (look(), pause_ms(1)));
}

static void stop(int role, int life)
{
	int status = 1;

	atomic_store(&all->stop[role], life);
	UNTIL(waitpid(pids[role], &status, WNOHANG) == pids[role], pause_ms(1));
	if (status)
		die("%s has ended: %#x", names[role], status);
	pids[role] = 0;
}

/* One victim, killed behind this many stops at system calls and then instructions. */
static void kill_one(int life)
{
	double took;

	for (int of = 0; of < ROLES; of++) {
		atomic_store(&all->arrived[VICTIM][of], 0);
		atomic_store(&all->arrived[of][VICTIM], 0);
		atomic_store(&all->done[VICTIM][of], 0);
	}
	turn(FIRST, SECOND, 1, 1);
	if (path == DIAL || path == ACCEPT)
		start_beside(life);
	if (path == JOIN || path == FURTHER || path == OPENS) {
		start_beside(life);
		connect_beside(life);
		exchange(1, "before the victim");
	}
	start_victim(life);
	if (path != MAKE && path != JOIN)
		WAIT(atomic_load(&all->born[VICTIM]) == life);
	if (path == FURTHER)
		turn(SECOND, VICTIM, 1, life);
	if (path == TRAFFIC || path == CLOSE) {
		/* the victim is dialled: it creates the targets */
		turn(FIRST, VICTIM, 1, life);
		turn(SECOND, VICTIM, 1, life);
		WAIT(atomic_load(&all->arrived[FIRST][VICTIM]) && atomic_load(&all->arrived[SECOND][VICTIM]));
		start_beside(life);
		connect_beside(life);
		turn(BESIDE, VICTIM, life, life);
	}
	WAIT(begun);
	if (path == DIAL || path == FURTHER || path == OPENS)
		turn(FIRST, VICTIM, 1, life);
	if (path == ACCEPT) {
		turn(FIRST, VICTIM, 1, life);
		turn(SECOND, VICTIM, 1, life);
	}
	if (path == DIAL || path == ACCEPT)
		connect_beside(life);
	if (path == CLOSE)
		atomic_store(&all->may_fail, life);
	UNTIL(trace(), look());
	kill_victim(life);
	kills_ended += ended;
	if (path == MAKE) {
		start_beside(life);
		connect_beside(life);
	}
	took = exchange(5, "after the death");
	if (took > longest) {
		longest = took;
		longest_path = paths[path];
	}
	calm();
	stop(BESIDE, life);
}

/* Descriptors of the first two processes. */
static void count_descriptors(int counts[2])
{
	for (int of = FIRST; of <= SECOND; of++) {
		atomic_store(&all->fds[of], 0);
		atomic_store(&all->count_fds, 1);
		UNTIL(atomic_load(&all->fds[of]), (look(), pause_ms(1)));
		atomic_store(&all->count_fds, 0);
		counts[of] = atomic_load(&all->fds[of]);
	}
}

static int victims;
static const char *only;

static void check(void)
{
	int early[2], late[2];
	sigset_t set;

	sigemptyset(&set);
	sigaddset(&set, SIGCHLD);
	sigprocmask(SIG_BLOCK, &set, NULL);
	all = mmap(NULL, sizeof *all, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (all == MAP_FAILED)
		die("mmap: %s", strerror(errno));
	pids[FIRST] = start(names[FIRST], survivor, FIRST);
	pids[SECOND] = start(names[SECOND], survivor, SECOND);
	WAIT(atomic_load(&all->born[FIRST]) && atomic_load(&all->born[SECOND]));
	turn(FIRST, SECOND, 1, 1);
	exchange(1, "before all victims");
	count_descriptors(early);
	for (path = 0; path < PATHS; path++) {
		uint64_t total = 0, all_steps = 0;
		double begin = now();

		if (only && strcmp(only, paths[path]))
			continue;
		kills_ended = 0;
		for (int i = 0; i < victims; i++) {
			kill_call = i == 0 ? UINT64_MAX : random_below(total + 1);
			/* messages need few system calls */
			kill_step = random_below(3) ? random_below(path == TRAFFIC ? 4 * STEPS : STEPS) : 0;
			kill_one(++round_number);
			/* less if its threads had to wait less often */
			if (ended && (i == 0 || calls < total))
				total = calls;
			all_steps += steps;
		}
		printf("%-8s %d victims, %llu stops at system calls, %llu instructions behind them, %d at the end (%.1f s)\n", paths[path],
		       victims, (unsigned long long)total, (unsigned long long)all_steps, kills_ended, now() - begin);
		fflush(stdout);
	}
	UNTIL(atomic_load(&all->pending[FIRST]) == 0 && atomic_load(&all->pending[SECOND]) == 0, (look(), pause_ms(1)));
	/* what belongs to a dead process is released within seconds */
	UNTIL_WITHIN(10, (count_descriptors(late), late[FIRST] <= early[FIRST] && late[SECOND] <= early[SECOND]), pause_ms(100));
	printf("%llu errors of operations to victims; longest time until the others have exchanged messages %.3f s (%s)\n",
	       (unsigned long long)atomic_load(&all->errors), longest, longest_path);
	stop(FIRST, 1);
	stop(SECOND, 1);
}

int main(int argc, char **argv)
{
	static const struct mode modes[] = { { "all", check } };

	if (argc < 6)
		die("usage: %s all PROV NODE VICTIMS SEED [PATH]", argv[0]);
	victims = atoi(argv[4]);
	seed = strtoull(argv[5], NULL, 0);
	only = argc > 6 ? argv[6] : NULL;
	IS(victims >= 3);
	setenv("FI_WEFT_CONNECT_TIMEOUT", "5", 1);
	return run_mode(modes, 1, argc, argv);
}
