/* A server whose clients come and go, from fi_endpoint(3), fi_av(3), fi_cq(3), fi_msg(3), fi_rma(3) and
 * fi_atomic(3). Messages, writes, reads and atomics are under way in both directions when a client ends:
 * by fi_close, by exit(3) without it, or by SIGKILL. The next client has the same address. Another client
 * stays, and is not disturbed.
 *
 *   rdm_churn keep PROV NODE    the server keeps the addresses in its address vector
 *   rdm_churn remove PROV NODE  it removes an address when the client has ended and nothing is pending
 *   rdm_churn early PROV NODE   it removes the address while operations to it are pending
 *   rdm_churn swift PROV NODE   as `keep`, and the next client begins at once
 *
 * Each operation of the server completes exactly once, with success or in error. A message whose send has
 * completed with FI_DELIVERY_COMPLETE is received, none is received twice, and those of one client come in
 * order and without gaps. The next argument is `auto` for FI_PROGRESS_AUTO, or `manual`; then the number of
 * generations and a seed. Ends with 0, or says what went wrong. Plain libfabric 1.17. */
#define _GNU_SOURCE
#define SECONDS 25
#include "rdm_memory.h"

#include <arpa/inet.h>
#include <dirent.h>

#define CAPS_ALL (FI_MSG | FI_TAGGED | FI_RMA | FI_ATOMIC)
#define ALL_REMOTE (FI_REMOTE_READ | FI_REMOTE_WRITE)
#define PAINT_LEN 65536UL
#define AREA (3 * PAINT_LEN)
enum { SLOTS = 4, STAYS = SLOTS, GENERATIONS = 400, LONGEST = 150000, SHORT = 2000, WINDOW = 4, RECEIVES = 24, PENDING = 6 };

enum kind { DRAIN_CLOSE, DRAIN_EXIT, EXIT, CLOSE, KILL, STOP_KILL, KINDS };
static const char *const kind_names[] = { "closes when all is done", "exits when all is done", "exits", "closes", "is killed", "is stopped and killed" };

enum state { FREE, STARTED, READY, ENDING, ENDED };

struct client {
	_Atomic int state, generation, kind;
	struct name name;
	uint64_t addr, key;
	_Atomic uint64_t got; /* messages that it has received */
};

enum { RING = 1024 };
struct record { /* of one client of one generation */
	_Atomic uint64_t posted, done;	     /* its sends */
	_Atomic uint64_t adds_posted, adds_done; /* its additions of 1 */
	int kind;
	uint32_t lens[RING]; /* of message n at n % RING */
};

static struct common {
	struct name server;
	_Atomic int server_ready, over, server_done, stays_done;
	uint64_t addr, key;
	struct client clients[SLOTS + 1];
	struct record records[SLOTS + 1][GENERATIONS];
	_Atomic uint64_t rounds; /* of the client that stays */
} *common;

struct header {
	uint32_t slot, generation;
	uint64_t sequence, len;
};

/* The messages of one sender, whose receives may complete in any order, match receives in the order in which
 * these were posted. */
struct order {
	uint64_t count, most; /* messages, and the greatest sequence number + 1 */
	uint64_t sequence[RING], receive[RING]; /* sequence + 1 and the number of the receive */
};

static void check_neighbours(struct order *order, uint64_t sequence, uint64_t receive, unsigned slot, unsigned generation)
{
	uint64_t *at = &order->sequence[sequence % RING];

	*at = sequence + 1;
	order->receive[sequence % RING] = receive;
	if (sequence && order->sequence[(sequence - 1) % RING] == sequence && order->receive[(sequence - 1) % RING] > receive)
		die("message %llu of client %u, generation %u, takes a later receive than the next one", (unsigned long long)sequence - 1, slot, generation);
	if (order->sequence[(sequence + 1) % RING] == sequence + 2 && order->receive[(sequence + 1) % RING] < receive)
		die("message %llu of client %u, generation %u, takes a later receive than the next one", (unsigned long long)sequence, slot, generation);
}

static void order_of(struct order *order, uint64_t sequence, uint64_t receive, unsigned slot, unsigned generation)
{
	if (order->sequence[sequence % RING] == sequence + 1)
		die("message %llu of client %u, generation %u, comes twice", (unsigned long long)sequence, slot, generation);
	check_neighbours(order, sequence, receive, slot, generation);
	order->count++;
	if (sequence + 1 > order->most)
		order->most = sequence + 1;
	if (order->most > order->count + RECEIVES)
		die("message %llu of client %u, generation %u, after %llu messages", (unsigned long long)sequence, slot, generation, (unsigned long long)order->count - 1);
}

static enum { KEEP, REMOVE, EARLY, SWIFT } mode;
static unsigned generations = 40;
static uint64_t random_state = 1;

static unsigned pick(unsigned n)
{
	random_state = mixed(random_state + 0x9e3779b97f4a7c15ULL);
	return (unsigned)(random_state % n);
}

static size_t some_length(void)
{
	static const unsigned limits[] = { 64, 64, 64, 2000, 9000, LONGEST };
	return sizeof(struct header) + pick(limits[pick(6)] - (unsigned)sizeof(struct header));
}

static uint64_t seed_of(const struct header *header) { return ((uint64_t)header->slot << 56) + ((uint64_t)header->generation << 40) + header->sequence; }

static void write_message(uint8_t *bytes, unsigned slot, unsigned generation, uint64_t sequence, size_t len)
{
	struct header header = { slot, generation, sequence, len };

	paint(bytes, len, seed_of(&header));
	memcpy(bytes, &header, sizeof header);
}

static struct header read_message(const uint8_t *bytes, size_t len)
{
	struct header header;
	uint8_t *whole = malloc(LONGEST);

	IS(len >= sizeof header);
	memcpy(&header, bytes, sizeof header);
	if (header.len != len)
		die("a message of %zu bytes says that it has %llu", len, (unsigned long long)header.len);
	write_message(whole, header.slot, header.generation, header.sequence, len);
	if (memcmp(bytes, whole, len))
		die("contents of message %llu of client %u", (unsigned long long)header.sequence, header.slot);
	free(whole);
	return header;
}

static void open_one(struct side *side)
{
	struct fi_info *info = NULL;

	wanted.caps = CAPS_ALL;
	needed.op_flags = FI_DELIVERY_COMPLETE;
	MUST(find_info(&info));
	if (wanted.service && info->src_addr) {
		/* the port of this client */
		uint16_t port = htons((uint16_t)atoi(wanted.service));

		IS(info->addr_format == FI_SOCKADDR_IN || info->addr_format == FI_SOCKADDR_IN6);
		memcpy((uint8_t *)info->src_addr + 2, &port, 2);
	}
	open_domain_with(side, info);
	side->tx = queue(side, 0);
	side->rx = queue(side, 0);
	side->ep = endpoint_with(side, 0, NULL);
}

/* ---- a client ---- */

struct using {
	struct side side;
	unsigned slot, generation;
	struct record *record;
	uint8_t *memory, *out[WINDOW], *in[RECEIVES], *scratch;
	struct region region;
	bool busy[WINDOW], writing, reading, adding;
	uint64_t write_seed, operand, result, rounds;
	uint64_t numbers[RECEIVES], posts;
	struct order order;
};

static void repost(struct using *u, unsigned i)
{
	u->numbers[i] = u->posts++;
	POST(&u->side, fi_trecv(u->side.ep, u->in[i], LONGEST, NULL, FI_ADDR_UNSPEC, 0, ~0ULL, (void *)(uintptr_t)(1000 + i)));
}

static void client_entries(struct using *u)
{
	struct outcome got;

	for (unsigned n = 0; n < 16 && poll_outcome(u->side.tx, &got); n++) {
		size_t number = (size_t)got.entry.op_context;

		if (got.err)
			die("client %u, generation %u: operation %zu fails: %s", u->slot, u->generation, number, fi_strerror(got.err));
		if (number < WINDOW) {
			IS(u->busy[number]);
			u->busy[number] = false;
			atomic_fetch_add(&u->record->done, 1);
		} else if (number == 100) {
			IS(u->writing);
			u->writing = false;
			memset(u->scratch, 0, PAINT_LEN);
			u->reading = true;
			POST(&u->side, fi_read(u->side.ep, u->scratch, PAINT_LEN, NULL, u->side.peer, common->addr + u->slot * AREA, common->key, (void *)101));
		} else if (number == 101) {
			IS(u->reading);
			u->reading = false;
			PAINTED(u->scratch, PAINT_LEN, u->write_seed);
			u->rounds++;
		} else {
			IS(number == 102 && u->adding);
			u->adding = false;
			atomic_fetch_add(&u->record->adds_done, 1);
		}
	}
	for (unsigned n = 0; n < 16 && poll_outcome(u->side.rx, &got); n++) {
		unsigned i = (unsigned)(size_t)got.entry.op_context - 1000;
		struct header header;

		IS(i < RECEIVES);
		if (got.err)
			die("client %u: a receive fails: %s", u->slot, fi_strerror(got.err));
		header = read_message(u->in[i], got.entry.len);
		IS(header.slot == 100 + u->slot);
		if (u->order.sequence[header.sequence % RING] == header.sequence + 1)
			die("client %u: message %llu comes twice", u->slot, (unsigned long long)header.sequence);
		check_neighbours(&u->order, header.sequence, u->numbers[i], u->slot, u->generation);
		atomic_fetch_add(&common->clients[u->slot].got, 1);
		repost(u, i);
	}
}

static void client_posts(struct using *u)
{
	for (unsigned i = 0; i < WINDOW; i++) {
		size_t len;

		if (u->busy[i])
			continue;
		len = some_length();
		write_message(u->out[i], u->slot, u->generation, atomic_load(&u->record->posted), len);
		u->record->lens[atomic_load(&u->record->posted) % RING] = (uint32_t)len;
		/* counted before: the process may end within the call */
		atomic_fetch_add(&u->record->posted, 1);
		POST(&u->side, fi_tsend(u->side.ep, u->out[i], len, NULL, u->side.peer, u->slot, (void *)(uintptr_t)i));
		u->busy[i] = true;
	}
	if (!u->writing && !u->reading) {
		u->write_seed = seed_of(&(struct header){ .slot = u->slot, .generation = u->generation, .sequence = u->rounds });
		paint(u->scratch, PAINT_LEN, u->write_seed);
		u->writing = true;
		POST(&u->side, fi_write(u->side.ep, u->scratch, PAINT_LEN, NULL, u->side.peer, common->addr + u->slot * AREA, common->key, (void *)100));
	}
	if (!u->adding) {
		u->adding = true;
		u->operand = 1;
		atomic_fetch_add(&u->record->adds_posted, 1);
		POST(&u->side, fi_fetch_atomic(u->side.ep, &u->operand, 1, NULL, &u->result, NULL, u->side.peer, common->addr + u->slot * AREA + 2 * PAINT_LEN, common->key, FI_UINT64, FI_SUM, (void *)102));
	}
}

static bool idle(const struct using *u)
{
	for (unsigned i = 0; i < WINDOW; i++)
		if (u->busy[i])
			return false;
	return !u->writing && !u->reading && !u->adding;
}

static void client(int slot)
{
	struct client *self = &common->clients[slot];
	struct using *u = calloc(1, sizeof *u);
	char port[16];
	bool stays = slot == STAYS;
	double limit;

	u->slot = (unsigned)slot;
	u->generation = (unsigned)atomic_load(&self->generation);
	u->record = &common->records[slot][u->generation];
	random_state = mixed(seed_of(&(struct header){ .slot = u->slot, .generation = u->generation }) + random_state);
	snprintf(port, sizeof port, "%llu", (unsigned long long)told(slot));
	wanted.service = port;
	open_one(&u->side);
	u->memory = pages(AREA);
	u->scratch = pages(PAINT_LEN);
	paint(u->memory, PAINT_LEN, seed_of(&(struct header){ .slot = u->slot, .generation = u->generation, .sequence = 7 }));
	u->region = region_of(&u->side, u->memory, AREA, ALL_REMOTE, 1);
	for (unsigned i = 0; i < WINDOW; i++)
		u->out[i] = pages(LONGEST);
	for (unsigned i = 0; i < RECEIVES; i++) {
		u->in[i] = pages(LONGEST);
		repost(u, i);
	}
	u->side.peer = insert(&u->side, &common->server);
	self->name = name_of(u->side.ep);
	self->addr = mr_mode(&u->side) & FI_MR_VIRT_ADDR ? (uint64_t)(uintptr_t)u->memory : 0;
	self->key = fi_mr_key(u->region.mr);
	atomic_store(&self->state, READY);
	limit = now() + 60;
	while (stays ? !atomic_load(&common->over) : atomic_load(&self->state) != ENDING || atomic_load(&self->kind) >= KILL) {
		client_entries(u);
		client_posts(u);
		if (stays)
			atomic_store(&common->rounds, u->rounds);
		if (!stays && now() > limit)
			die("client %d: nobody ends it", slot);
	}
	if (stays || self->kind == DRAIN_CLOSE || self->kind == DRAIN_EXIT)
		UNTIL(idle(u), client_entries(u));
	if (stays) { /* the server may have operations to this one */
		atomic_store(&common->stays_done, 1);
		UNTIL(atomic_load(&common->server_done), client_entries(u));
	}
	if (stays || self->kind == DRAIN_CLOSE || self->kind == CLOSE) {
		double began = now();

		MUST(fi_close(&u->side.ep->fid));
		u->side.ep = NULL;
		if (now() - began > 4)
			printf("client %d, generation %u, which %s: fi_close takes %.1f s\n", slot, u->generation, kind_names[self->kind], now() - began);
		close_region(&u->region);
		close_side(&u->side);
	}
	exit(0);
}

/* ---- the server ---- */

struct operation {
	bool pending;
	int kind;
	unsigned slot, generation;
	double posted;
	uint8_t *bytes;
	uint64_t operand, result;
	size_t len;
};

struct serving {
	bool inserted, removed, settled;
	unsigned generation;
	fi_addr_t addr;
	uint64_t sequence;
	struct order *orders[GENERATIONS];
	struct operation operations[PENDING];
	double quiet; /* since when nothing has come of a client that has ended */
	bool seen;
};

static struct {
	struct side side;
	uint8_t *memory, *in[RECEIVES];
	uint64_t numbers[RECEIVES], receives;
	struct serving slots[SLOTS + 1];
	uint64_t ok, failed, failed_receives, posts;
	double slowest;
	unsigned ended;
} server;

static void server_receive(unsigned i)
{
	server.numbers[i] = server.receives++;
	POST(&server.side, fi_trecv(server.side.ep, server.in[i], LONGEST, NULL, FI_ADDR_UNSPEC, 0, ~0ULL, (void *)(uintptr_t)(1 + i)));
}

static void server_entries(void)
{
	struct outcome got;

	for (unsigned n = 0; n < 32 && poll_outcome(server.side.rx, &got); n++) {
		unsigned i = (unsigned)(size_t)got.entry.op_context - 1;
		struct header header;
		struct serving *slot;

		IS(i < RECEIVES);
		if (got.err) {
			server.failed_receives++;
		} else {
			header = read_message(server.in[i], got.entry.len);
			IS(header.slot <= SLOTS && header.generation < GENERATIONS && got.entry.tag == header.slot);
			slot = &server.slots[header.slot];
			if (!slot->orders[header.generation])
				slot->orders[header.generation] = calloc(1, sizeof(struct order));
			order_of(slot->orders[header.generation], header.sequence, server.numbers[i], header.slot, header.generation);
			slot->quiet = now();
		}
		server_receive(i);
	}
	for (unsigned n = 0; n < 32 && poll_outcome(server.side.tx, &got); n++) {
		size_t number = (size_t)got.entry.op_context - 1;
		struct serving *slot = &server.slots[number / PENDING];
		struct operation *op = &slot->operations[number % PENDING];

		IS(number < PENDING * (SLOTS + 1));
		if (!op->pending)
			die("operation %zu completes twice", number);
		op->pending = false;
		slot->quiet = now();
		if (now() - op->posted > server.slowest)
			server.slowest = now() - op->posted;
		if (got.err) {
			server.failed++;
			if (number / PENDING == STAYS)
				die("an operation %d to the client that stays fails: %s", op->kind, fi_strerror(got.err));
			continue;
		}
		server.ok++;
		if (op->kind == 3) { /* a read: bytes of this client or, if another one has begun, of that one */
			size_t at = 0;
			unsigned generation;

			for (generation = op->generation; generation < op->generation + (mode == SWIFT ? 3 : 1); generation++) {
				at = differs(op->bytes, PAINT_LEN, seed_of(&(struct header){ .slot = op->slot, .generation = generation, .sequence = 7 }));
				if (at == PAINT_LEN)
					break;
			}
			if (at != PAINT_LEN)
				die("byte %zu of a read of client %u, generation %u", at, op->slot, op->generation);
		}
	}
}

static void server_posts(unsigned number)
{
	struct client *peer = &common->clients[number];
	struct serving *slot = &server.slots[number];

	for (unsigned i = 0; i < PENDING; i++) {
		struct operation *op = &slot->operations[i];
		void *context = (void *)(uintptr_t)(1 + number * PENDING + i);
		struct fid_ep *ep = server.side.ep;
		ssize_t result;

		if (op->pending)
			continue;
		op->kind = (int)(i < 5 ? i : pick(5));
		op->slot = number;
		op->generation = slot->generation;
		op->posted = now();
		op->operand = 1;
		switch (op->kind) {
		case 0:
		case 1:
			op->len = some_length();
			write_message(op->bytes, 100 + number, slot->generation, slot->sequence, op->len);
			result = fi_tsend(ep, op->bytes, op->len, NULL, slot->addr, 1, context);
			break;
		case 2:
			result = fi_write(ep, op->bytes, PAINT_LEN, NULL, slot->addr, peer->addr + PAINT_LEN, peer->key, context);
			break;
		case 3:
			memset(op->bytes, 0, PAINT_LEN);
			result = fi_read(ep, op->bytes, PAINT_LEN, NULL, slot->addr, peer->addr, peer->key, context);
			break;
		default:
			result = fi_fetch_atomic(ep, &op->operand, 1, NULL, &op->result, NULL, slot->addr, peer->addr + 2 * PAINT_LEN, peer->key, FI_UINT64, FI_SUM, context);
			break;
		}
		if (result == -FI_EAGAIN)
			return;
		if (result)
			die("a post of kind %d to client %u: %zd", op->kind, number, result);
		if (op->kind <= 1)
			slot->sequence++;
		op->pending = true;
		server.posts++;
	}
}

static unsigned pending(const struct serving *slot)
{
	unsigned count = 0;

	for (unsigned i = 0; i < PENDING; i++)
		count += slot->operations[i].pending;
	return count;
}

static uint64_t missing;

static void judge(unsigned slot, unsigned generation)
{
	struct record *record = &common->records[slot][generation];
	struct order *order = server.slots[slot].orders[generation];
	uint64_t received = order ? order->count : 0, posted = record->posted, done = record->done;

	/* a long message of a client that has ended in the middle may be missing, and a later one has come */
	for (uint64_t i = order && order->most > RING ? order->most - RING : 0; order && i < order->most; i++)
		if (order->sequence[i % RING] != i + 1) {
			if (record->kind == DRAIN_CLOSE || record->kind == DRAIN_EXIT || record->lens[i % RING] <= SHORT)
				die("client %u, generation %u, which %s: message %llu of %llu, %u bytes, is missing", slot, generation, kind_names[record->kind], (unsigned long long)i, (unsigned long long)order->most, record->lens[i % RING]);
			missing++;
		}
	if (received < done || received > posted)
		die("client %u, generation %u, which %s: %llu messages posted, %llu completed, %llu received", slot, generation, kind_names[record->kind], (unsigned long long)posted, (unsigned long long)done, (unsigned long long)received);
	if ((record->kind == DRAIN_CLOSE || record->kind == DRAIN_EXIT) && received != posted)
		die("client %u, generation %u, which %s: %llu of %llu messages", slot, generation, kind_names[record->kind], (unsigned long long)received, (unsigned long long)posted);
}

static void judge_adds(unsigned slot)
{
	uint64_t posted = 0, done = 0, value;

	for (unsigned i = 0; i < GENERATIONS; i++)
		posted += common->records[slot][i].adds_posted, done += common->records[slot][i].adds_done;
	memcpy(&value, server.memory + slot * AREA + 2 * PAINT_LEN, 8);
	if (value < done || value > posted)
		die("client %u has added %llu to %llu times, and the sum is %llu", slot, (unsigned long long)done, (unsigned long long)posted, (unsigned long long)value);
}

static unsigned descriptors(void)
{
	DIR *dir = opendir("/proc/self/fd");
	unsigned count = 0;

	while (readdir(dir))
		count++;
	closedir(dir);
	return count;
}

static void serve_slot(unsigned number)
{
	struct client *peer = &common->clients[number];
	struct serving *slot = &server.slots[number];
	int state = atomic_load(&peer->state);

	if (state == FREE || state == STARTED)
		return;
	if (!slot->seen) {
		slot->seen = true;
		slot->generation = (unsigned)atomic_load(&peer->generation);
		slot->quiet = now();
		if (!slot->inserted || slot->removed) {
			slot->addr = insert(&server.side, &peer->name);
			slot->inserted = true;
			slot->removed = false;
		}
	}
	if (mode == SWIFT && slot->generation != (unsigned)atomic_load(&peer->generation)) {
		slot->generation = (unsigned)atomic_load(&peer->generation);
		if (number != STAYS)
			server.ended++;
	}
	if (state == READY || state == ENDING) {
		if (number == STAYS && atomic_load(&common->stays_done))
			return;
		if (!slot->removed)
			server_posts(number);
		if (mode == EARLY && number != STAYS && !slot->removed && pick(20000) == 0) {
			int result = fi_av_remove(server.side.av, &slot->addr, 1, 0);

			if (result)
				die("fi_av_remove: %d", result);
			slot->removed = true;
		}
		return;
	}
	if (mode == SWIFT)
		return;
	/* the client has ended: once more operations, which all fail */
	if (mode == EARLY && !slot->removed) {
		MUST(fi_av_remove(server.side.av, &slot->addr, 1, 0));
		slot->removed = true;
	}
	for (unsigned i = 0; i < PENDING; i++)
		if (slot->operations[i].pending && now() - slot->operations[i].posted > 20)
			die("client %u, generation %u, which %s: an operation %d has not completed after 20 s%s", number, slot->generation, kind_names[common->records[number][slot->generation].kind], slot->operations[i].kind, slot->removed ? " (address removed)" : "");
	if (pending(slot) == 0 && now() - slot->quiet > 0.1) {
		judge(number, slot->generation);
		judge_adds(number);
		if (mode == REMOVE) {
			MUST(fi_av_remove(server.side.av, &slot->addr, 1, 0));
			slot->removed = true;
		}
		slot->seen = false;
		server.ended++;
		atomic_store(&peer->state, FREE);
	}
}

static void serve(int unused)
{
	unsigned first_fds = 0;
	uint64_t first_memory = 0;

	(void)unused;
	open_one(&server.side);
	server.memory = pages(AREA * (SLOTS + 1));
	struct region region = region_of(&server.side, server.memory, AREA * (SLOTS + 1), ALL_REMOTE, 1);
	for (unsigned i = 0; i < RECEIVES; i++) {
		server.in[i] = pages(LONGEST);
		server_receive(i);
	}
	for (unsigned k = 0; k <= SLOTS; k++)
		for (unsigned i = 0; i < PENDING; i++)
			server.slots[k].operations[i].bytes = pages(LONGEST);
	common->server = name_of(server.side.ep);
	common->addr = mr_mode(&server.side) & FI_MR_VIRT_ADDR ? (uint64_t)(uintptr_t)server.memory : 0;
	common->key = fi_mr_key(region.mr);
	atomic_store(&common->server_ready, 1);
	while (!atomic_load(&common->stays_done)) {
		server_entries();
		for (unsigned i = 0; i <= SLOTS; i++)
			serve_slot(i);
		if (server.ended >= 2 * SLOTS && !first_fds) {
			first_fds = descriptors();
			first_memory = resident();
		}
	}
	double limit = now() + 25;
	for (unsigned i = 0; i <= SLOTS; i++)
		while (pending(&server.slots[i])) {
			server_entries();
			if (now() > limit)
				die("%u operations to client %u are pending", pending(&server.slots[i]), i);
		}
	double quiet = now();

	missing = 0;
	while (now() - quiet < 0.2)
		server_entries();
	for (unsigned i = 0; i <= SLOTS; i++) {
		judge_adds(i);
		for (unsigned g = 0; g < GENERATIONS; g++)
			judge(i, g);
	}
	if (first_fds && descriptors() > first_fds + 12)
		die("%u descriptors after the first clients, %u at the end", first_fds, descriptors());
	printf("%u clients, %llu operations of the server: %llu ok, %llu failed; %llu receives failed, %llu messages of clients that ended are missing; the slowest operation took %.2f s; %.1f to %.1f MiB, %u to %u descriptors; %llu rounds of the one that stays\n", server.ended,
	       (unsigned long long)server.posts, (unsigned long long)server.ok, (unsigned long long)server.failed, (unsigned long long)server.failed_receives, (unsigned long long)missing, server.slowest,
	       (double)first_memory / 1048576, (double)resident() / 1048576, first_fds, descriptors(), (unsigned long long)atomic_load(&common->rounds));
	IS(server.posts == server.ok + server.failed);
	atomic_store(&common->server_done, 1);
	MUST(fi_close(&server.side.ep->fid));
	server.side.ep = NULL;
	close_region(&region);
	close_side(&server.side);
	exit(0);
}

/* ---- the supervisor: it calls nothing of libfabric ---- */

static pid_t pids[SLOTS + 1], server_pid;
static double ends[SLOTS];

static void fail_with_children(void)
{
	int status;
	pid_t pid;

	while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
		bool expected = false;

		for (unsigned i = 0; i < SLOTS; i++)
			if (pids[i] == pid) {
				expected = WIFEXITED(status) ? WEXITSTATUS(status) == 0 : common->clients[i].kind >= KILL && WTERMSIG(status) == SIGKILL;
				if (expected) {
					pids[i] = 0;
					atomic_store(&common->clients[i].state, ENDED);
				}
			}
		if (!expected)
			die("process %d ends with status %x", pid, (unsigned)status);
	}
}

static void supervise(void)
{
	unsigned started = 0, stopped[SLOTS] = { 0 };
	uint64_t port = 20000 + random_state % 11000;
	double limit = now() + 80;

	common = mmap(NULL, sizeof *common, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	IS(common != MAP_FAILED);
	alarm(100);
	for (int i = 0; i <= SLOTS; i++)
		put(i, port + (uint64_t)i);
	server_pid = start("server", serve, 0);
	UNTIL(atomic_load(&common->server_ready), pause_ms(1); fail_with_children());
	atomic_store(&common->clients[STAYS].state, STARTED);
	pids[STAYS] = start("stays", client, STAYS);
	unsigned generation[SLOTS] = { 0 };
	for (;;) {
		bool all = true;

		fail_with_children();
		for (unsigned i = 0; i < SLOTS; i++) {
			struct client *peer = &common->clients[i];
			int state = atomic_load(&peer->state);

			if (state == FREE || (state == ENDED && mode == SWIFT)) {
				if (generation[i] >= generations / SLOTS || generation[i] >= GENERATIONS - 1)
					continue;
				all = false;
				atomic_store(&peer->kind, (int)pick(KINDS));
				atomic_store(&peer->generation, (int)generation[i]);
				common->records[i][generation[i]].kind = peer->kind;
				generation[i]++;
				atomic_store(&peer->state, STARTED);
				ends[i] = 0;
				stopped[i] = 0;
				started++;
				pids[i] = start("client", client, (int)i);
				continue;
			}
			all = false;
			if (state == READY && ends[i] == 0)
				ends[i] = now() + 0.001 * pick(1 + pick(300));
			if (state == READY && now() > ends[i]) {
				atomic_store(&peer->state, ENDING);
				if (peer->kind == KILL)
					kill(pids[i], SIGKILL);
				if (peer->kind == STOP_KILL)
					kill(pids[i], SIGSTOP);
			}
			if (state == ENDING && peer->kind == STOP_KILL && now() > ends[i] + 0.4 && !stopped[i]) {
				stopped[i] = 1;
				kill(pids[i], SIGKILL);
			}
		}
		if (all || now() > limit)
			break;
		pause_ms(1);
	}
	if (now() > limit) {
		for (unsigned i = 0; i < SLOTS; i++)
			fprintf(stderr, "client %u: state %d, generation %d, %s\n", i, common->clients[i].state, common->clients[i].generation, kind_names[common->clients[i].kind]);
		die("the clients do not end in time");
	}
	/* the one that stays has gone on, and goes on */
	uint64_t rounds = atomic_load(&common->rounds);
	UNTIL(atomic_load(&common->rounds) > rounds + 5, pause_ms(1); fail_with_children());
	atomic_store(&common->over, 1);
	if (status_of(pids[STAYS], "the client that stays") || status_of(server_pid, "the server"))
		exit(1);
}

int main(int argc, char **argv)
{
	static const char *const modes[] = { "keep", "remove", "early", "swift" };

	if (argc < 4)
		die("usage: %s MODE PROV NODE [auto|manual] [GENERATIONS] [SEED]", argv[0]);
	for (mode = KEEP; mode <= SWIFT && strcmp(argv[1], modes[mode]); mode++)
		;
	if (mode > SWIFT)
		die("no such mode");
	provider = argv[2];
	node = argv[3];
	wants_auto = argc > 4 && !strcmp(argv[4], "auto");
	wanted.manual = !wants_auto;
	if (argc > 5)
		generations = (unsigned)atoi(argv[5]);
	random_state = mixed(argc > 6 ? (uint64_t)atoll(argv[6]) : (uint64_t)getpid());
	role = "supervisor";
	make_board();
	supervise();
	return 0;
}
