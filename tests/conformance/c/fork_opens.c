/* A forked child opens its own objects, whatever its parent has open, and so does a child of it.
 * Each of the two exchanges messages and RMA with a process that it has not forked, over an endpoint
 * with many peers and over a connection, and closes all.
 *
 *   fork_opens MODE PROV NODE
 *
 * info: the parent has called fi_getinfo(3) only.
 *
 * closed: the parent has used and closed all its objects.
 *
 * open: the parent has an enabled endpoint, a passive endpoint and a region. It uses them after the
 * children have ended.
 *
 * live: the same, and the parent exchanges messages while its children live. They close its endpoint,
 * which has no effect on the parent.
 *
 * Exits with 0, or prints the failure. Needs only libfabric 1.17. */
#define MEMORY (1UL << 20)
#include "rdm_processes.h"

enum { CHILD, GRANDCHILD, PARENT, PAIRS };
enum { LEN = 4096, ROUNDS = 50, LAST = WORDS - 1 /* word: the seed of the last exchange of the parent */, FORMS = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY };

/* One of the two processes of a pair. */
struct user {
	struct side side;
	struct fid_mr *mr;
	uint8_t *memory; /* sent from the first quarter, received in the second, RMA in the others */
	int me, peer;	 /* places on the board */
};

static void open_user(struct user *user, int pair, int second)
{
	uint64_t access = FI_SEND | FI_RECV | FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE;

	wanted.caps = FI_MSG | FI_RMA;
	wanted.mr_mode = FORMS;
	user->me = 2 * pair + second;
	user->peer = 2 * pair + !second;
	user->memory = aligned_alloc(4096, MEMORY);
	memset(user->memory, 0, MEMORY);
	open_domain_of(&user->side);
	user->side.tx = user->side.rx = queue(&user->side, 0);
	MUST(fi_mr_reg(user->side.domain, user->memory, MEMORY, access, 0, (uint64_t)user->me + 1, 0, &user->mr, NULL));
	user->side.ep = endpoint_on(&user->side, 0);
	put(2 * user->me, (uint64_t)(uintptr_t)user->memory);
	put(2 * user->me + 1, fi_mr_key(user->mr));
	publish(user->side.ep, user->me);
}

static void find_peer(struct user *user) { user->side.peer = address(&user->side, user->peer); }

static void close_user(struct user *user)
{
	MUST(fi_close(&user->side.ep->fid));
	user->side.ep = NULL;
	MUST(fi_close(&user->mr->fid));
	close_side(&user->side);
	free(user->memory);
}

static void await(struct user *user, uint64_t flag)
{
	struct fi_cq_tagged_entry entry = next(&user->side, user->side.rx);

	IS(entry.flags & flag);
}

static void post_recv(struct user *user)
{
	POST(&user->side, fi_recv(user->side.ep, user->memory + MEMORY / 4, MEMORY / 4, fi_mr_desc(user->mr), FI_ADDR_UNSPEC, NULL));
}

static void send_of(struct user *user, size_t len, uint64_t seed)
{
	fill(user->memory, len, seed);
	POST(&user->side, fi_send(user->side.ep, user->memory, len, fi_mr_desc(user->mr), user->side.peer, NULL));
}

/* One message there and one back. */
static void exchange(struct user *user, bool begins, size_t len, uint64_t seed)
{
	uint8_t *in = user->memory + MEMORY / 4;
	bool sent = false, got = false;

	post_recv(user);
	if (begins)
		send_of(user, len, seed);
	while (!sent || !got) {
		struct fi_cq_tagged_entry entry = next(&user->side, user->side.rx);

		if (entry.flags & FI_SEND) {
			sent = true;
			continue;
		}
		IS(entry.flags & FI_RECV && entry.len == len);
		got = true;
		if (begins)
			must_be(in, len, seed + 1);
		else
			send_of(user, len, seed + 1);
	}
	if (!begins)
		must_be(in, len, seed);
}

/* Messages and RMA of a pair over its endpoints with many peers. */
static void messages(struct user *user, bool begins, uint64_t seed)
{
	uint8_t *written = user->memory + MEMORY / 2, *read = user->memory + MEMORY / 4 * 3;
	uint64_t there, key;

	for (uint64_t i = 0; i < ROUNDS; i++)
		exchange(user, begins, i % 10 == 9 ? MEMORY / 4 : i % 2 ? 64 : LEN, seed + 2 * i);
	there = told(2 * user->peer);
	key = told(2 * user->peer + 1);
	fill(user->memory, LEN, seed + 7);
	POST(&user->side, fi_write(user->side.ep, user->memory, LEN, fi_mr_desc(user->mr), user->side.peer, there + MEMORY / 2, key, NULL));
	await(user, FI_WRITE);
	POST(&user->side, fi_read(user->side.ep, read, LEN, fi_mr_desc(user->mr), user->side.peer, there + MEMORY / 2, key, NULL));
	await(user, FI_READ);
	must_be(read, LEN, seed + 7);
	exchange(user, begins, 8, seed);
	must_be(written, LEN, seed + 7);
	exchange(user, begins, 8, seed);
}

/* ---- connections ---- */

static void both_ways(struct end *end, uint64_t seed)
{
	void *desc = fi_mr_desc(end->mr);
	struct remote mine = { (uint64_t)(uintptr_t)end->memory, fi_mr_key(end->mr) }, *there;

	/* sent from the beginning, received at LEN, written at 2 LEN, read to 3 LEN */
	MUST(fi_recv(end->ep, end->memory + LEN, LEN, desc, 0, NULL));
	expect(end, FI_CONNECTED, NULL);
	memcpy(end->memory, &mine, sizeof mine);
	MUST(fi_send(end->ep, end->memory, sizeof mine, desc, 0, NULL));
	IS(!completion(end, SECONDS) && !completion(end, SECONDS));
	there = (struct remote *)(end->memory + LEN);
	fill(end->memory + 4 * LEN, LEN, seed);
	MUST(fi_write(end->ep, end->memory + 4 * LEN, LEN, desc, 0, there->addr + 2 * LEN, there->key, NULL));
	IS(!completion(end, SECONDS));
	MUST(fi_read(end->ep, end->memory + 3 * LEN, LEN, desc, 0, there->addr + 2 * LEN, there->key, NULL));
	IS(!completion(end, SECONDS));
	must_be(end->memory + 3 * LEN, LEN, seed);
	/* the peer has written and read before its second message */
	MUST(fi_recv(end->ep, end->memory + LEN, LEN, desc, 0, NULL));
	MUST(fi_send(end->ep, end->memory, 8, desc, 0, NULL));
}

static struct fid_pep *listen_at(struct end *end, int place)
{
	struct fid_pep *pep;
	struct name name = { .len = sizeof name.bytes };

	MUST(fi_passive_ep(end->fabric, end->info, &pep, NULL));
	MUST(fi_pep_bind(pep, &end->eq->fid, 0));
	MUST(fi_listen(pep));
	MUST(fi_getname(&pep->fid, name.bytes, &name.len));
	board->names[place] = name;
	atomic_store(&board->named[place], 1);
	return pep;
}

/* A connection of a pair, to its second process. */
static void connection(int pair, bool begins, uint64_t seed)
{
	int place = 2 * PAIRS + pair;
	struct end end = { 0 };
	struct fid_pep *pep = NULL;
	struct fi_info *request = NULL;

	end.info = begins ? getinfo(NULL, 0) : getinfo("0", FI_SOURCE);
	open_fabric(&end);
	if (begins) {
		UNTIL(atomic_load(&board->named[place]), pause_ms(1));
		open_endpoint(&end, end.info);
		MUST(fi_connect(end.ep, board->names[place].bytes, NULL, 0));
	} else {
		pep = listen_at(&end, place);
		expect(&end, FI_CONNREQ, &request);
		open_endpoint(&end, request);
		MUST(fi_accept(end.ep, NULL, 0));
	}
	both_ways(&end, seed);
	IS(!completion(&end, SECONDS) && !completion(&end, SECONDS));
	must_be(end.memory + 2 * LEN, LEN, seed);
	if (begins)
		MUST(fi_shutdown(end.ep, 0));
	expect(&end, FI_SHUTDOWN, NULL);
	MUST(fi_close(&end.ep->fid));
	MUST(fi_close(&end.mr->fid));
	MUST(fi_close(&end.cq->fid));
	MUST(fi_close(&end.domain->fid));
	if (pep) {
		MUST(fi_close(&pep->fid));
		fi_freeinfo(request);
	}
	MUST(fi_close(&end.eq->fid));
	MUST(fi_close(&end.fabric->fid));
	fi_freeinfo(end.info);
	free(end.memory);
}

/* ---- processes ---- */

/* The process that neither is a child of the others nor has one. */
static void second(int pair)
{
	struct user user;

	open_user(&user, pair, 1);
	find_peer(&user);
	if (pair == PARENT) {
		for (uint64_t seed = 2; !told(LAST) || seed <= told(LAST); seed += 2)
			exchange(&user, false, LEN, seed);
		close_user(&user);
		return;
	}
	messages(&user, false, 1000);
	connection(pair, false, 2000);
	messages(&user, false, 3000);
	close_user(&user);
}

/* The objects of the parent. */
static struct user above;
static struct end listener;
static struct fid_pep *passive;
static bool is_live;

/* The parent's objects are unknown, and to close its endpoint has no effect. */
static void leave_parent(void)
{
	struct fi_info *hints = fi_dupinfo(above.side.info), *info;

	hints->domain_attr->domain = above.side.domain;
	RETURNS(fi_getinfo(FI_VERSION(1, 17), node, NULL, FI_SOURCE, hints, &info), -FI_ENODATA);
	hints->domain_attr->domain = NULL;
	fi_freeinfo(hints);
	(void)fi_close(&above.side.ep->fid);
}

static void first(int pair)
{
	struct user user;

	open_user(&user, pair, 0);
	find_peer(&user);
	messages(&user, true, 1000);
	connection(pair, true, 2000);
	if (pair == CHILD) {
		pid_t pid = child("grandchild");

		if (pid == 0) {
			first(GRANDCHILD);
			exit(0);
		}
		if (status_of(pid, "grandchild"))
			die("the grandchild has failed");
	}
	messages(&user, true, 3000);
	if (is_live)
		leave_parent();
	close_user(&user);
}

static int with_children(bool opens, bool closes, bool live)
{
	pid_t seconds[PAIRS], pid;
	uint64_t seed = 2;
	int status = 0;

	for (int pair = 0; pair < PAIRS; pair++)
		if (pair != PARENT || opens)
			seconds[pair] = start("second process", second, pair);
	is_live = live;
	listener.info = getinfo("0", FI_SOURCE);
	wanted.caps = FI_MSG | FI_RMA;
	wanted.mr_mode = FORMS;
	if (opens) {
		open_user(&above, PARENT, 0);
		find_peer(&above);
		open_fabric(&listener);
		passive = listen_at(&listener, 3 * PAIRS);
		for (; seed < 100; seed += 2)
			exchange(&above, true, LEN, seed);
	} else {
		fi_freeinfo(offered());
	}
	if (closes) {
		put(LAST, seed);
		exchange(&above, true, LEN, seed);
		close_user(&above);
		MUST(fi_close(&passive->fid));
		MUST(fi_close(&listener.eq->fid));
		MUST(fi_close(&listener.fabric->fid));
		status |= status_of(seconds[PARENT], "second process of the parent");
	}
	if ((pid = child("child")) == 0) {
		first(CHILD);
		exit(0);
	}
	for (; live && waitpid(pid, &status, WNOHANG) == 0; seed += 2)
		exchange(&above, true, LEN, seed);
	if (live && status)
		die("the child has failed");
	if (!live)
		status |= status_of(pid, "child");
	status |= status_of(seconds[CHILD], "second process of the child");
	status |= status_of(seconds[GRANDCHILD], "second process of the grandchild");
	if (opens && !closes) {
		for (uint64_t end = seed + 100; seed < end; seed += 2)
			exchange(&above, true, LEN, seed);
		put(LAST, seed);
		exchange(&above, true, LEN, seed);
		close_user(&above);
		MUST(fi_close(&passive->fid));
		MUST(fi_close(&listener.eq->fid));
		MUST(fi_close(&listener.fabric->fid));
		status |= status_of(seconds[PARENT], "second process of the parent");
	}
	return status;
}

static void fails_if(int status)
{
	if (status)
		die("a process has failed");
}

static void check_info(void) { fails_if(with_children(false, false, false)); }
static void check_closed(void) { fails_if(with_children(true, true, false)); }
static void check_open(void) { fails_if(with_children(true, false, false)); }
static void check_live(void) { fails_if(with_children(true, false, true)); }

int main(int argc, char **argv)
{
	static const struct mode modes[] = {
		{ "info", check_info }, { "closed", check_closed }, { "open", check_open }, { "live", check_live }
	};

	return run_mode(modes, sizeof modes / sizeof *modes, argc, argv);
}
