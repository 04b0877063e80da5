/* One side of a connection is killed by SIGKILL in each state of rdma_cm(7); the other side, the
 * survivor, must have the event that rdma_get_cm_event(3) promises within a second, complete all
 * posted work requests, keep nothing of the dead process, and make a new connection.
 *
 *     cm_death KILLS SEED [NAME]            all kills, or those of one state
 *     cm_death friend                       (for the former) a process that lives
 *     cm_death victim STATE PORT BARE EARLY (for the former) the process that is killed
 */
#include <dirent.h>
#include <malloc.h>
#include <signal.h>
#include <sys/wait.h>

#include "cm_side.h"

/* milliseconds from the death to the survivor's last event, and for a connection with others */
enum { LIMIT = 1000 };
/* rounds of kills before the first count; bytes by which the heap may grow, in all and for each
 * process that is seen for the first time: its entry in the table of the device's processes */
enum { WARM = 2, ROOM = 16384, ROOM_EACH = 64 };

/* The last step of the victim. SILENT: it listens and reads no event. */
enum step { RESOLVES, SILENT, ASKS, ACCEPTS, CONNECTED, DISCONNECTS };

static const struct state {
	const char *name;
	int passive; /* the victim listens */
	enum rdma_port_space ps;
	enum step step;
	int hesitate; /* the survivor: 1 reads the request and accepts it after the death, 2 reads it then */
} states[] = {
	{ "client resolves", 0, RDMA_PS_TCP, RESOLVES, 0 },
	{ "client's request is not read", 0, RDMA_PS_TCP, ASKS, 2 },
	{ "client's request is read", 0, RDMA_PS_TCP, ASKS, 1 },
	{ "client is accepted", 0, RDMA_PS_TCP, ASKS, 0 },
	{ "client is connected", 0, RDMA_PS_TCP, CONNECTED, 0 },
	{ "client disconnects", 0, RDMA_PS_TCP, DISCONNECTS, 0 },
	{ "server listens", 1, RDMA_PS_TCP, RESOLVES, 0 },
	{ "server reads no request", 1, RDMA_PS_TCP, SILENT, 0 },
	{ "server has read the request", 1, RDMA_PS_TCP, ASKS, 0 },
	{ "server has accepted", 1, RDMA_PS_TCP, ACCEPTS, 0 },
	{ "server is connected", 1, RDMA_PS_TCP, CONNECTED, 0 },
	{ "server disconnects", 1, RDMA_PS_TCP, DISCONNECTS, 0 },
	{ "datagrams: client resolves", 0, RDMA_PS_UDP, RESOLVES, 0 },
	{ "datagrams: client's request is not read", 0, RDMA_PS_UDP, ASKS, 2 },
	{ "datagrams: client's request is read", 0, RDMA_PS_UDP, ASKS, 1 },
	{ "datagrams: client is accepted", 0, RDMA_PS_UDP, ASKS, 0 },
	{ "datagrams: server listens", 1, RDMA_PS_UDP, RESOLVES, 0 },
	{ "datagrams: server reads no request", 1, RDMA_PS_UDP, SILENT, 0 },
	{ "datagrams: server has read the request", 1, RDMA_PS_UDP, ASKS, 0 },
	{ "datagrams: server has accepted", 1, RDMA_PS_UDP, ACCEPTS, 0 },
};
enum { STATES = sizeof states / sizeof *states };

/* How often each last event came, per state, and the longest time until it. */
static struct { int kills, seen[RDMA_CM_EVENT_TIMEWAIT_EXIT + 1]; double longest; } results[STATES];

static unsigned long long seed;

static unsigned int pick(unsigned int below)
{
	seed ^= seed << 13;
	seed ^= seed >> 7;
	seed ^= seed << 17;
	return seed % below;
}

/* ---- the process that is killed ---- */

static void tell(char what)
{
	CHECK(write(STDOUT_FILENO, &what, 1) == 1);
}

static void __attribute__((noreturn)) rest(void)
{
	for (;;)
		pause();
}

/* Exchanges messages without an end, or until `most` of each direction. */
static void talk(struct side *side, unsigned long most)
{
	side->wanted = most;
	while (side->phase == UP && (side->sent < most || side->received < most || !most)) {
		side_events(side, 0);
		side->wanted = most ? most : side->sent + SENDS;
		side_traffic(side);
		if (side->bare)
			return;
	}
}

static int victim(const struct state *state, int port, int bare, int early)
{
	struct side side = { .channel = channel(), .bare = bare };
	int datagrams = state->ps == RDMA_PS_UDP;

	if (state->passive) {
		CHECK(listen_at(side.channel, state->ps, port, 4));
		tell('l');
		if (state->step == RESOLVES || state->step == SILENT)
			rest();
		side.hesitate = 1;
		while (side.phase == NONE)
			side_events(&side, now_ms() + 1000);
		if (early || state->step == ASKS)
			tell('x');
		if (state->step == ASKS)
			rest();
		side_accept(&side);
	} else {
		if (early && state->step == RESOLVES)
			tell('x');
		side_resolve(&side, state->ps, port);
		if (!early && state->step == RESOLVES)
			tell('x');
		if (state->step == RESOLVES)
			rest();
		if (early && state->step == ASKS)
			tell('x');
		side_connect(&side, 'V', 0);
		if (!early && state->step == ASKS) {
			tell('x');
			rest();
		}
		if (early && state->step == CONNECTED)
			tell('x');
	}
	if (state->step == ACCEPTS && !early) {
		tell('x');
		rest();
	}
	while (side.phase < UP)
		side_events(&side, now_ms() + 1000);
	if (datagrams || side.phase != UP)
		rest();
	if (state->step != DISCONNECTS && !early)
		tell('x');
	if (state->step == DISCONNECTS) {
		talk(&side, 10);
		if (early)
			tell('x');
		rdma_disconnect(side.id);
		if (!early)
			tell('x');
		rest();
	}
	talk(&side, 0);
	rest();
}

/* ---- the process that lives ---- */

static int port_of(struct rdma_cm_id *id)
{
	return ntohs(rdma_get_src_port(id));
}

/* Handles the events of the victim's connection, and the request of the friend that follows it. */
static void both_events(struct side *dead, struct side *living, double deadline)
{
	struct rdma_cm_event *event;
	struct greeting greeting;

	while ((event = next_until(living->channel, deadline))) {
		if (!dead) {
			side_event(living, event);
		} else if (event->event == RDMA_CM_EVENT_CONNECT_REQUEST) {
			memcpy(&greeting, event->id->qp_type == IBV_QPT_UD ? event->param.ud.private_data : event->param.conn.private_data,
			       sizeof greeting);
			CHECK(greeting.sender == 'V' || greeting.sender == 'F');
			side_event(greeting.sender == 'V' ? dead : living, event);
		} else {
			side_event(event->id == dead->id ? dead : living, event);
		}
		deadline = 0;
	}
}

/* Connects, exchanges 3 messages of each direction, and disconnects; or only asks for the queue
 * pair of a datagram service. `active`: this side asks. `dead`, if any, has events in the same
 * channel. */
static void whole(struct side *side, struct side *dead, enum rdma_port_space ps, int port, char name, int active)
{
	double deadline = now_ms() + 10000;

	if (active) {
		side_resolve(side, ps, port);
		side_connect(side, name, 7);
	}
	while (side->phase < UP) {
		CHECK(now_ms() < deadline);
		if (side->phase == ASKED && !active)
			side_accept(side);
		both_events(dead, side, now_ms() + 100);
	}
	CHECK(side->phase == UP);
	side->wanted = 3;
	while (ps == RDMA_PS_TCP && (side->sent < 3 || side->received < 3 || side->posted_sends)) {
		CHECK(now_ms() < deadline && side->phase == UP);
		both_events(dead, side, 0);
		side_traffic(side);
	}
	if (ps == RDMA_PS_TCP) {
		/* the passive side ends after the other one */
		if (active)
			CHECK(rdma_disconnect(side->id) == 0);
		while (side->phase == UP) {
			CHECK(now_ms() < deadline);
			both_events(dead, side, now_ms() + 100);
		}
		while (side->last != RDMA_CM_EVENT_TIMEWAIT_EXIT) {
			CHECK(now_ms() < deadline);
			both_events(dead, side, now_ms() + 100);
		}
	}
	side_end(side);
}

/* Reads `c PS PORT` (connect) or `l PS` (be connected) and answers `k`. */
static int friend_main(void)
{
	struct side tcp = { .channel = channel() }, udp = { .channel = channel() };
	struct rdma_cm_id *one = listen_at(tcp.channel, RDMA_PS_TCP, 0, 8), *two = listen_at(udp.channel, RDMA_PS_UDP, 0, 8);
	int order[3], ports[2] = { port_of(one), port_of(two) };

	CHECK(write(STDOUT_FILENO, ports, sizeof ports) == sizeof ports);
	while (read(STDIN_FILENO, order, sizeof order) == sizeof order) {
		whole(order[1] == RDMA_PS_TCP ? &tcp : &udp, NULL, order[1], order[2], 'F', order[0] == 'c');
		tell('k');
	}
	return 0;
}

/* ---- the survivor ---- */

struct child {
	pid_t pid;
	int in, out;
};

static struct child start(char *const *words)
{
	struct child child;
	int in[2], out[2];

	CHECK(pipe2(in, O_CLOEXEC) == 0 && pipe2(out, O_CLOEXEC) == 0);
	CHECK((child.pid = fork()) >= 0);
	if (!child.pid) {
		dup2(in[0], STDIN_FILENO);
		dup2(out[1], STDOUT_FILENO);
		execv("/proc/self/exe", words);
		_exit(127);
	}
	close(in[0]);
	close(out[1]);
	child.in = in[1];
	child.out = out[0];
	return child;
}

/* Prints what a child printed instead of the expected byte. */
static void __attribute__((noreturn)) complain(struct child *child, char first)
{
	char text[400] = { first };
	ssize_t count = read(child->out, text + 1, sizeof text - 2);

	die("the other process: %.*s", (int)(count > 0 ? count + 1 : 1), text);
}

static void expect(struct child *child, char wanted)
{
	char byte = 0;

	CHECK(read(child->out, &byte, 1) == 1);
	if (byte != wanted)
		complain(child, byte);
}

static int readable(struct child *child)
{
	struct pollfd ready = { .fd = child->out, .events = POLLIN };

	return poll(&ready, 1, 0) == 1;
}

static struct rdma_cm_id *servers[2];
/* by port space: TCP, UDP */
static struct rdma_event_channel *passive[2], *active[2], *others[2];
static struct child other;
static int friend_ports[2], victim_ports[2];

static struct child begin(const struct state *state, int bare, int early)
{
	char number[16], port[16], flag[2][2] = { { '0' + bare }, { '0' + early } };
	char *words[] = { "cm_death", "victim", number, port, flag[0], flag[1], NULL };
	int udp = state->ps == RDMA_PS_UDP;

	snprintf(number, sizeof number, "%d", (int)(state - states));
	snprintf(port, sizeof port, "%d", state->passive ? victim_ports[udp] : port_of(servers[udp]));
	return start(words);
}

/* Handles events and messages until the victim is in its state. */
static void until_ready(struct side *side, struct child *child, int listening)
{
	double deadline = now_ms() + 10000;

	while (!readable(child)) {
		CHECK(now_ms() < deadline);
		if (listening)
			side_events(side, now_ms() + 1);
		else
			poll(NULL, 0, 1);
		side->wanted = side->sent + SENDS;
		side_traffic(side);
	}
	expect(child, 'x');
}

static void order(int what, enum rdma_port_space ps, int port)
{
	int words[3] = { what, ps, port };

	CHECK(write(other.in, words, sizeof words) == sizeof words);
}

/* A connection to the process that lives. */
static void meet(const struct state *state)
{
	int udp = state->ps == RDMA_PS_UDP;
	struct side side = { .channel = others[udp], .bank = 1 };
	double begin = now_ms();

	order('l', state->ps, 0);
	whole(&side, NULL, state->ps, friend_ports[udp], 'S', 1);
	expect(&other, 'k');
	if (now_ms() - begin > LIMIT)
		die("a connection with another process takes %.0f ms", now_ms() - begin);
}

/* Kills the victim. `stopped`: it is stopped before, and connections with others are made meanwhile. */
static double murder(const struct state *state, struct child *child, int early, int stopped)
{
	double at;
	int status;

	if (early) {
		at = now_ms() + pick(400) / 1000.0;
		while (now_ms() < at)
			;
	}
	if (stopped) {
		kill(child->pid, SIGSTOP);
		meet(state);
	}
	at = now_ms();
	kill(child->pid, SIGKILL);
	CHECK(waitpid(child->pid, &status, 0) == child->pid);
	if (!WIFSIGNALED(status))
		complain(child, ' ');
	close(child->in);
	close(child->out);
	return at;
}

/* A datagram to a dead process must complete. */
static void send_datagram(struct side *side)
{
	double begin = now_ms();

	if (side->bare)
		return;
	CHECK(side->ah && side->qkey == RDMA_UDP_QKEY);
	CHECK(rdma_post_ud_send(side->id, NULL, buffer(side, 0), 100, side->mr, IBV_SEND_SIGNALED, side->ah, 7) == 0);
	for (side->posted_sends = 1; side->posted_sends; side_traffic(side))
		if (now_ms() - begin > LIMIT)
			die("a datagram does not complete");
}

static double longer(double one, double two)
{
	return one > two ? one : two;
}

/* Handles events and messages until the last event, which must come in time. */
static void until_end(struct side *dead, struct side *living, double death)
{
	while (dead->phase < REFUSED) {
		dead->wanted = dead->sent + 1;
		side_traffic(dead);
		both_events(dead, living, now_ms() + 1);
		if (dead->phase < REFUSED && now_ms() - longer(dead->at, death) > LIMIT)
			die("no event within %d ms in phase %d", LIMIT, dead->phase);
	}
}

static void count_result(const struct state *state, struct side *side, double death)
{
	int index = state - states;

	results[index].kills++;
	results[index].seen[side->last]++;
	if (side->phase != NONE)
		results[index].longest = longer(results[index].longest, side->at - death);
}

/* The victim connects to this process. */
static void kill_client(const struct state *state, int bare, int early, int stopped)
{
	int udp = state->ps == RDMA_PS_UDP;
	struct side dead = { .channel = passive[udp], .bare = bare, .hesitate = state->hesitate };
	struct side living = { .channel = passive[udp], .hesitate = 1 };
	struct child child;
	double death, wait;

	child = begin(state, bare, early);
	until_ready(&dead, &child, state->hesitate < 2);
	while (!early && state->step == ASKS && dead.phase < (state->hesitate ? ASKED : ANSWERED) && state->hesitate < 2)
		side_events(&dead, now_ms() + 1000);
	death = murder(state, &child, early, stopped);
	order('c', state->ps, port_of(servers[udp]));
	for (wait = now_ms() + 10000; living.phase == NONE; both_events(&dead, &living, now_ms() + 100))
		CHECK(now_ms() < wait);
	/* The listener has the requests in their order, so the victim has sent none if there is none. */
	if (dead.phase == NONE)
		CHECK(early || state->step == RESOLVES || state->hesitate == 2);
	else
		CHECK(state->step != RESOLVES);
	if (dead.phase == ASKED)
		side_accept(&dead);
	if (udp)
		CHECK(dead.phase == NONE || dead.phase == UP || dead.phase == REFUSED);
	else if (dead.phase != NONE)
		until_end(&dead, &living, death);
	if (!early && state->step >= CONNECTED)
		CHECK(dead.phase == CLOSED);
	while (dead.phase == CLOSED && dead.last != RDMA_CM_EVENT_TIMEWAIT_EXIT) {
		CHECK(now_ms() - dead.at < LIMIT);
		both_events(&dead, &living, now_ms() + 10);
	}
	count_result(state, &dead, death);
	side_end(&dead);
	if (living.phase == ASKED)
		side_accept(&living);
	whole(&living, &dead, state->ps, 0, 0, 0);
	expect(&other, 'k');
}

/* This process connects to the victim. */
static void kill_server(const struct state *state, int bare, int early, int stopped)
{
	int udp = state->ps == RDMA_PS_UDP;
	struct side made = { .channel = active[udp], .bare = bare }, *side = &made;
	struct child child = begin(state, bare, early);
	double death = 0;

	expect(&child, 'l');
	side_resolve(side, state->ps, victim_ports[udp]);
	if (state->step == RESOLVES)
		death = murder(state, &child, early, stopped);
	side_connect(side, 'S', 0);
	if (state->step == SILENT) {
		death = murder(state, &child, early, stopped);
	} else if (state->step != RESOLVES) {
		until_ready(side, &child, early || state->step >= CONNECTED);
		death = murder(state, &child, early, stopped);
	}
	if (udp && state->step == ACCEPTS) {
		/* a datagram service has no end */
		while (side->phase != UP && side->phase != REFUSED) {
			CHECK(now_ms() - death < LIMIT);
			side_events(side, now_ms() + 1);
		}
		CHECK(early || side->phase == UP);
		if (side->phase == UP)
			send_datagram(side);
	} else {
		until_end(side, side, death);
		if (state->step < ACCEPTS)
			CHECK(side->phase == REFUSED && side->last == (udp ? RDMA_CM_EVENT_UNREACHABLE : RDMA_CM_EVENT_REJECTED));
		else if (!early && state->step >= CONNECTED)
			CHECK(side->phase == CLOSED);
	}
	while (side->phase == CLOSED && side->last != RDMA_CM_EVENT_TIMEWAIT_EXIT) {
		CHECK(now_ms() - side->at < LIMIT);
		side_events(side, now_ms() + 10);
	}
	count_result(state, side, death);
	side_end(side);
	meet(state);
}

/* ---- what must not grow ---- */

struct held {
	int descriptors, mappings, files;
	size_t heap;
};

static int entries(const char *path, const char *prefix)
{
	DIR *folder = opendir(path);
	struct dirent *entry;
	int count = 0;

	if (!folder)
		return 0;
	while ((entry = readdir(folder)))
		count += strncmp(entry->d_name, prefix, strlen(prefix)) == 0;
	closedir(folder);
	return count;
}

static struct held held(void)
{
	struct held now = { .descriptors = entries("/proc/self/fd", ""), .heap = mallinfo2().uordblks };
	FILE *maps = fopen("/proc/self/maps", "r");
	char line[512];

	CHECK(maps);
	while (fgets(line, sizeof line, maps))
		now.mappings += strstr(line, "softverbs") != NULL;
	fclose(maps);
	/* the device's directories, by its documentation */
	now.files = entries("/dev/shm", "softverbs") + entries("/tmp", "softverbs");
	return now;
}

static void compare(struct held was, struct held is, size_t room, const char *when)
{
	if (is.descriptors > was.descriptors || is.mappings > was.mappings || is.files > was.files || is.heap > was.heap + room)
		die("%s: %d descriptors, %d mappings, %d files, %zu bytes; before: %d, %d, %d, %zu", when, is.descriptors,
		    is.mappings, is.files, is.heap, was.descriptors, was.mappings, was.files, was.heap);
}

/* The device keeps the memory of destroyed queues and regions, and reuses it late: the memory that
 * remains is used once, so that what grows later is a leak. */
static void use_all_numbers(struct rdma_cm_id *id)
{
	struct side side = { .bank = 0 };
	struct ibv_mr *mr;
	int number;

	for (number = 0; number < 600; number++) {
		struct ibv_qp_init_attr attr = { .cap = { .max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 },
						 .qp_type = id->qp_type };

		CHECK(rdma_create_qp(id, NULL, &attr) == 0);
		rdma_destroy_qp(id);
	}
	for (number = 0; number < 6000; number++) {
		CHECK(mr = ibv_reg_mr(id->pd, buffer(&side, 0), SIZE, 0));
		CHECK(ibv_dereg_mr(mr) == 0);
	}
}

static void kill_one(int number)
{
	const struct state *state = &states[number];
	int bare = pick(4) == 0, early = pick(2), stopped = pick(4) == 0;

	snprintf(doing, sizeof doing, "%s, %s%s%s", state->name, early ? "at a random moment" : "when it waits",
		 bare ? ", without a queue pair" : "", stopped ? ", stopped before" : "");
	(state->passive ? kill_server : kill_client)(state, bare, early, stopped);
	doing[0] = 0;
}

static void report(int number)
{
	int kind;

	printf("%-40s %5d kills, longest %6.1f ms;", states[number].name, results[number].kills, results[number].longest);
	for (kind = 0; kind <= RDMA_CM_EVENT_TIMEWAIT_EXIT; kind++)
		if (results[number].seen[kind])
			printf(" %s %d", kind ? rdma_event_str(kind) + strlen("RDMA_CM_EVENT_") : "none", results[number].seen[kind]);
	printf("\n");
}

static int free_port(enum rdma_port_space ps)
{
	struct rdma_event_channel *in = channel();
	struct rdma_cm_id *id = listen_at(in, ps, 0, 1);
	int port = port_of(id);

	CHECK(rdma_destroy_id(id) == 0);
	rdma_destroy_event_channel(in);
	return port;
}

int main(int count, char **words)
{
	char *friend_words[] = { "cm_death", "friend", NULL };
	struct held first = { 0 }, again;
	int number, kills, round, only = -1;

	setvbuf(stdout, NULL, _IOLBF, 0);
	if (count == 2 && !strcmp(words[1], "friend"))
		return friend_main();
	if (count == 6 && !strcmp(words[1], "victim"))
		return victim(&states[atoi(words[2])], atoi(words[3]), atoi(words[4]), atoi(words[5]));
	CHECK(count >= 3);
	kills = atoi(words[1]);
	seed = strtoull(words[2], NULL, 10) * 2654435761u + 88172645463325252ull;
	for (number = 0; count > 3 && number < STATES; number++)
		if (!strcmp(words[3], states[number].name))
			only = number;
	CHECK(count == 3 || only >= 0);
	for (number = 0; number < 2; number++) {
		passive[number] = channel();
		active[number] = channel();
		others[number] = channel();
		servers[number] = listen_at(passive[number], number ? RDMA_PS_UDP : RDMA_PS_TCP, 0, 16);
		victim_ports[number] = free_port(number ? RDMA_PS_UDP : RDMA_PS_TCP);
	}
	use_all_numbers(servers[1]);
	other = start(friend_words);
	CHECK(read(other.out, friend_ports, sizeof friend_ports) == sizeof friend_ports);
	/* the first kills open what stays open */
	for (round = 0; round < WARM; round++)
		for (number = 0; number < STATES; number++)
			if (only < 0 || number == only)
				kill_one(number);
	first = held();
	for (round = 0; round < kills; round++) {
		kill_one(only < 0 ? round % STATES : only);
		if (round % STATES == STATES - 1) {
			again = held();
			compare(first, again, ROOM + round * ROOM_EACH, "after a round of kills");
		}
	}
	again = held();
	compare(first, again, ROOM + kills * ROOM_EACH, "at the end");
	close(other.in);
	for (number = 0; number < STATES; number++)
		if (results[number].kills)
			report(number);
	printf("%d kills; %d descriptors, %d mappings, %zu bytes of the heap (%zu before)\n", kills, again.descriptors,
	       again.mappings, again.heap, first.heap);
	return 0;
}
