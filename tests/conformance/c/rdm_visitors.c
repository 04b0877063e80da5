/* Short-lived clients of one server, from fi_endpoint(3), fi_av(3), fi_cm(3) and fi_close(3). The
 * memory of the server does not grow with the number of clients that have come and gone. Each client
 * opens an endpoint, sends a message, waits until the server has it, and ends.
 *
 *   rdm_visitors received PROV NODE   the server never has an address of a client
 *   rdm_visitors answered PROV NODE   the server inserts the address of the client, answers, and
 *                                     removes the address
 *   rdm_visitors inserted PROV NODE   the same without the answer
 *   rdm_visitors killed PROV NODE     as received; the counted clients end by SIGKILL, each in a
 *                                     process of its own
 *   rdm_visitors left PROV NODE       as killed, and the server has sent its answer
 *   rdm_visitors connected PROV NODE  clients of a passive endpoint of type FI_EP_MSG
 *
 * The next argument is `auto` for FI_PROGRESS_AUTO, or `manual`. Then follow the number of clients
 * that come first, which may fill what the provider keeps for later ones, the number of those that
 * are counted, and the bytes by which the server's heap may grow for each of these. Ends with 0 and
 * prints heap, resident shared memory, mappings and descriptors of the server before and after the
 * counted clients, or says what went wrong. Plain libfabric 1.17. */
#include "rdm_processes.h"

#include <dirent.h>
#include <malloc.h>
#include <rdma/fi_cm.h>
#include <signal.h>
#include <sys/wait.h>

enum { AT_ONCE = 8, LIVES = 100 }; /* processes of clients at a time; most clients of one of them */
enum { MEASURE, MEASURED, DONE };  /* words of the board; those from DONE on are of the processes */
enum { HELLO = 7, ANSWER = 8, SPARE = 4, LINKS_END = 20 };
/* The resident shared memory may grow by this for each counted client and in all. */
enum { SHARED_EACH = 2560, SHARED = 64 << 10 };

struct hello {
	struct name name;
	uint64_t number, process;
};

struct usage {
	uint64_t heap, shared;
	int maps, files;
};

static int first_clients, counted, allowed;
static bool answers, inserts, kills;

/* ---- measuring ---- */

static int lines_of(const char *path, const char *name, uint64_t *kilobytes)
{
	char line[512], format[64];
	int lines = 0;
	unsigned long value;
	FILE *file = fopen(path, "r");

	if (!file)
		die("%s", path);
	snprintf(format, sizeof format, "%s %%lu", name);
	for (; fgets(line, sizeof line, file); lines++)
		if (kilobytes && sscanf(line, format, &value) == 1)
			*kilobytes = value;
	fclose(file);
	return lines;
}

/* The heap of the server has one arena (M_ARENA_MAX). */
static struct usage used(void)
{
	struct mallinfo2 heap = mallinfo2();
	struct usage usage = { .heap = heap.uordblks + heap.hblkhd };
	DIR *files = opendir("/proc/self/fd");

	usage.maps = lines_of("/proc/self/maps", "", NULL);
	lines_of("/proc/self/status", "RssShmem:", &usage.shared);
	while (readdir(files))
		usage.files++;
	closedir(files);
	return usage;
}

static void print(const char *when, const struct usage *usage)
{
	printf("%s: %llu B of heap, %llu KiB shared, %d mappings, %d files\n", when, (unsigned long long)usage->heap,
	       (unsigned long long)usage->shared, usage->maps, usage->files);
	fflush(stdout);
}

/* What has grown too much; NULL for nothing. */
static const char *grown(const struct usage *before, const struct usage *after)
{
	if (after->heap > before->heap + (uint64_t)allowed * (uint64_t)counted)
		return "the heap has grown";
	if (after->shared << 10 > (before->shared << 10) + SHARED + (uint64_t)SHARED_EACH * (uint64_t)counted)
		return "the shared memory has grown";
	if (after->maps > before->maps + SPARE || after->files > before->files + SPARE)
		return "mappings or descriptors were left";
	return NULL;
}

static void progress_for(struct side *side, double seconds)
{
	for (double until = now() + seconds; now() < until; usleep(1000))
		if (side)
			progress(side);
}

/* Measures when the parent wants it, after the links of clients that have ended are gone, which takes
 * longer under load: what has grown is measured again for LINKS_END seconds. Returns false after the
 * last time. */
static bool measured(struct side *side)
{
	static struct usage before;
	struct usage after;
	const char *wrong;

	if (told(MEASURE) == told(MEASURED))
		return true;
	/* a second more for peers that have said nothing */
	progress_for(side, kills ? 2 : 1);
	after = used();
	if (told(MEASURE) == 1) {
		before = after;
		put(MEASURED, 1);
		return true;
	}
	for (double until = now() + LINKS_END; (wrong = grown(&before, &after)) && now() < until; after = used())
		progress_for(side, 0.5);
	print("before", &before);
	print("after", &after);
	printf("%d clients, %.1f B each\n", counted, ((double)after.heap - (double)before.heap) / counted);
	if (wrong)
		die("%s", wrong);
	put(MEASURED, 2);
	return false;
}

/* ---- endpoints that need no connection ---- */

static struct fi_cq_tagged_entry arrived(struct side *side, struct fid_cq *cq)
{
	struct fi_cq_tagged_entry entry;

	UNTIL(take(cq, &entry, 1), (progress(side), usleep(20)));
	return entry;
}

static void visit(struct side *side, int process, int number)
{
	struct hello hello = { .number = (uint64_t)number, .process = (uint64_t)process };
	uint64_t answer = 0;
	int contexts[2];
	fi_addr_t server;

	side->tx = queue(side, 16);
	side->rx = queue(side, 16);
	side->ep = endpoint_on(side, 0);
	hello.name = name_of(side->ep);
	server = address(side, 0);
	if (answers)
		POST(side, fi_trecv(side->ep, &answer, sizeof answer, NULL, FI_ADDR_UNSPEC, ANSWER, 0, &contexts[0]));
	POST(side, fi_tsend(side->ep, &hello, sizeof hello, NULL, server, HELLO, &contexts[1]));
	(void)arrived(side, side->tx);
	if (answers) {
		(void)arrived(side, side->rx);
		IS(answer == mixed(hello.number));
	}
	UNTIL(told(DONE + process) == hello.number + 1, (progress(side), usleep(20)));
	if (kills && number >= first_clients)
		raise(SIGKILL);
	MUST(fi_close(&side->ep->fid));
	MUST(fi_close(&side->tx->fid));
	MUST(fi_close(&side->rx->fid));
	MUST(fi_av_remove(side->av, &server, 1, 0));
	side->ep = NULL;
	side->tx = side->rx = NULL;
}

static void server(int unused)
{
	struct fi_cq_tagged_entry entry;
	struct side side = { 0 };
	struct hello hello;
	int contexts[2];

	(void)unused;
	mallopt(M_ARENA_MAX, 1);
	open_side(&side, 0);
	for (;;) {
		POST(&side, fi_trecv(side.ep, &hello, sizeof hello, NULL, FI_ADDR_UNSPEC, HELLO, 0, &contexts[0]));
		while (!take(side.rx, &entry, 1)) {
			if (!measured(&side)) {
				close_side(&side);
				return;
			}
			progress(&side);
			usleep(20);
		}
		if (answers || inserts) {
			fi_addr_t addr = insert(&side, &hello.name);
			uint64_t answer = mixed(hello.number);

			if (answers) {
				POST(&side, fi_tsend(side.ep, &answer, sizeof answer, NULL, addr, ANSWER, &contexts[1]));
				(void)arrived(&side, side.tx);
			}
			MUST(fi_av_remove(side.av, &addr, 1, 0));
		}
		put(DONE + (int)hello.process, hello.number + 1);
	}
}

/* ---- connected endpoints ---- */

static void connect_and_send(struct end *end, int process, int number)
{
	struct hello hello = { .number = (uint64_t)number, .process = (uint64_t)process };
	void *desc = fi_mr_desc(end->mr);

	bind_endpoint(end, end->info);
	MUST(fi_connect(end->ep, board->names[0].bytes, NULL, 0));
	expect(end, FI_CONNECTED, NULL);
	memcpy(end->memory, &hello, sizeof hello);
	MUST(fi_send(end->ep, end->memory, sizeof hello, desc, 0, NULL));
	IS(completion(end, SECONDS) == 0);
	UNTIL(told(DONE + process) == hello.number + 1, usleep(20));
	MUST(fi_close(&end->ep->fid));
	end->ep = NULL;
	/* FI_SHUTDOWN of the server may have come */
	while (event(end, 0, NULL) >= 0)
		;
}

static void listener(int unused)
{
	struct fi_info *info;
	struct end end = { 0 };
	struct fid_pep *pep;

	(void)unused;
	mallopt(M_ARENA_MAX, 1);
	end.info = getinfo("0", FI_SOURCE);
	open_fabric(&end);
	open_domain(&end, end.info);
	MUST(fi_passive_ep(end.fabric, end.info, &pep, NULL));
	MUST(fi_pep_bind(pep, &end.eq->fid, 0));
	MUST(fi_listen(pep));
	board->names[0].len = sizeof board->names[0].bytes;
	MUST(fi_getname(&pep->fid, board->names[0].bytes, &board->names[0].len));
	atomic_store(&board->named[0], 1);
	for (;;) {
		struct hello hello;
		int got;

		while ((got = event(&end, 0.01, &info)) != FI_CONNREQ) {
			IS(got == -1);
			if (!measured(NULL))
				return;
		}
		bind_endpoint(&end, info);
		MUST(fi_recv(end.ep, end.memory, sizeof hello, fi_mr_desc(end.mr), 0, NULL));
		MUST(fi_accept(end.ep, NULL, 0));
		fi_freeinfo(info);
		expect(&end, FI_CONNECTED, NULL);
		IS(completion(&end, SECONDS) == 0);
		memcpy(&hello, end.memory, sizeof hello);
		put(DONE + (int)hello.process, hello.number + 1);
		expect(&end, FI_SHUTDOWN, NULL);
		MUST(fi_close(&end.ep->fid));
	}
}

/* ---- the clients ---- */

static bool connects;
static int lives;

/* `task`: the process's number, and that of its first client, times AT_ONCE. */
static void client(int task)
{
	int process = task % AT_ONCE, first = task / AT_ONCE;

	if (connects) {
		struct end end = { 0 };

		UNTIL(atomic_load(&board->named[0]), pause_ms(1));
		end.info = getinfo(NULL, 0);
		open_fabric(&end);
		open_domain(&end, end.info);
		for (int number = first; number < first + lives; number++)
			connect_and_send(&end, process, number);
	} else {
		struct side side = { 0 };

		open_domain_of(&side);
		for (int number = first; number < first + lives; number++)
			visit(&side, process, number);
		close_side(&side);
	}
}

static void clients(int from, int count, int of_process, bool killed)
{
	pid_t running[AT_ONCE] = { 0 };
	int status, at_once = connects ? 1 : AT_ONCE;

	if (of_process > (count + at_once - 1) / at_once)
		of_process = (count + at_once - 1) / at_once;
	for (int place = 0, left = count; left > 0 || running[place];) {
		if (running[place]) {
			IS(waitpid(running[place], &status, 0) == running[place]);
			IS(killed ? WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL : status == 0);
			running[place] = 0;
		}
		if (left > 0) {
			lives = left < of_process ? left : of_process;
			running[place] = start("client", client, from * AT_ONCE + place);
			from += lives;
			left -= lives;
		}
		place = (place + 1) % at_once;
	}
	for (int place = 0; place < at_once; place++)
		if (running[place])
			IS(waitpid(running[place], &status, 0) == running[place] && (killed || status == 0));
}

static void measure(int time)
{
	put(MEASURE, (uint64_t)time);
	UNTIL(told(MEASURED) == (uint64_t)time, pause_ms(5));
}

static void all_are_served(void (*main)(int))
{
	pid_t serves = start("server", main, 0);
	int status;

	clients(0, first_clients, LIVES, false);
	measure(1);
	clients(first_clients, counted, kills ? 1 : LIVES, kills);
	put(MEASURE, 2);
	IS(waitpid(serves, &status, 0) == serves && status == 0);
}

static void received(void) { all_are_served(server); }

static void answered(void)
{
	answers = true;
	all_are_served(server);
}

static void inserted(void)
{
	inserts = true;
	all_are_served(server);
}

static void killed(void)
{
	kills = true;
	all_are_served(server);
}

static void left(void)
{
	answers = kills = true;
	all_are_served(server);
}

static void connected(void)
{
	connects = true;
	all_are_served(listener);
}

int main(int argc, char **argv)
{
	static const struct mode modes[] = {
		{ "received", received }, { "answered", answered }, { "inserted", inserted },
		{ "killed", killed },     { "left", left },	    { "connected", connected },
	};

	if (argc != 8)
		die("usage: %s MODE PROV NODE auto|manual FIRST COUNTED BYTES", argv[0]);
	first_clients = atoi(argv[5]);
	counted = atoi(argv[6]);
	allowed = atoi(argv[7]);
	return run_mode(modes, sizeof modes / sizeof *modes, argc, argv);
}
