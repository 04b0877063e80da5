/* Authorization keys of endpoints with many peers and of their regions, from fi_endpoint(3),
 * fi_domain(3) and fi_mr(3): "only peer endpoints that are programmed to use the same authorization
 * key may communicate", and may access a region. The key of an endpoint or a region without one is
 * that of its domain. Two processes have the same endpoints, in domains with and without a key; each
 * endpoint of one sends to each of the other, and reads the regions of the endpoint like itself.
 *
 *   rdm_auth messages PROV NODE   messages of 8 and of 100,000 bytes
 *   rdm_auth regions PROV NODE    reads, with keys that the application has chosen
 *
 * A further argument `auto` requests FI_PROGRESS_AUTO. Ends with 0, or says what went wrong. Plain
 * libfabric 1.17. */
#define SECONDS 40
#include "rdm_processes.h"

enum { ENDS = 6, REGIONS = 3, LONG = 100000, REGION = 4096 };
enum { ARRIVED = 0, DONE = 1 };

/* The endpoints: the key of their domain, and their own. */
static const struct {
	const char *domain, *own;
} keys[ENDS] = { { NULL, NULL }, { NULL, "one" }, { "one", NULL }, { "one", "two" }, { "two", NULL }, { "onf", NULL } };
/* The keys of the regions of each domain: that of the domain, and two others. */
static const char *const region_keys[REGIONS] = { NULL, "one", "two" };

static struct side sides[ENDS];
static struct fid_mr *regions[ENDS][REGIONS];
static uint8_t memory[ENDS][REGIONS][REGION];
static uint8_t messages[ENDS][ENDS][LONG];
static bool reads; /* the mode */

static const char *key_of(int end) { return keys[end].own ? keys[end].own : keys[end].domain; }

static const char *key_of_region(int end, int region) { return region_keys[region] ? region_keys[region] : keys[end].domain; }

static bool same(const char *a, const char *b) { return a && b ? !strcmp(a, b) : a == b; }

static size_t length(int from, int to) { return (from + to) % 2 ? LONG : 8; }

static uint64_t seed(int from, int to) { return (uint64_t)(from * ENDS + to); }

static uint8_t *key_bytes(const char *key) { return key ? (uint8_t *)strdup(key) : NULL; }

static size_t key_size(const char *key) { return key ? strlen(key) : 0; }

static void open_end_of(int end, int place)
{
	struct side *side = &sides[end];
	struct fi_info *info = offered();

	IS(info->domain_attr->auth_key_size == 0 && info->ep_attr->auth_key_size == 0);
	info->domain_attr->auth_key = key_bytes(keys[end].domain);
	info->domain_attr->auth_key_size = key_size(keys[end].domain);
	info->ep_attr->auth_key = key_bytes(keys[end].own);
	info->ep_attr->auth_key_size = key_size(keys[end].own);
	open_domain_with(side, info);
	side->tx = queue(side, 0);
	side->rx = queue(side, 0);
	side->ep = endpoint_on(side, 0);
	for (int i = 0; i < REGIONS; i++) {
		struct iovec iov = { memory[end][i], REGION };
		struct fi_mr_attr attr = { .mr_iov = &iov, .iov_count = 1, .access = FI_REMOTE_READ, .requested_key = (uint64_t)i, .auth_key = key_bytes(region_keys[i]), .auth_key_size = key_size(region_keys[i]) };

		memset(memory[end][i], 16 * end + i + 1, REGION);
		MUST(fi_mr_regattr(side->domain, &attr, 0, &regions[end][i]));
		free(attr.auth_key);
	}
	publish(side->ep, place + end);
}

static void progress_all(void)
{
	for (int end = 0; end < ENDS; end++)
		progress(&sides[end]);
}

static void close_all(void)
{
	for (int end = 0; end < ENDS; end++) {
		MUST(fi_close(&sides[end].ep->fid));
		sides[end].ep = NULL;
		for (int i = 0; i < REGIONS; i++)
			MUST(fi_close(&regions[end][i]->fid));
		close_side(&sides[end]);
	}
}

/* The peer: the receive at `to` with tag `from` is for the message of that endpoint. */
static void be_peer(int unused)
{
	(void)unused;
	for (int to = 0; to < ENDS; to++) {
		open_end_of(to, ENDS);
		for (int from = 0; from < ENDS && !reads; from++)
			MUST(fi_trecv(sides[to].ep, messages[to][from], LONG, NULL, FI_ADDR_UNSPEC, (uint64_t)from, 0, messages[to][from]));
	}
	while (!told(DONE))
		for (int to = 0; to < ENDS; to++) {
			struct fi_cq_tagged_entry entry;

			progress(&sides[to]);
			if (!take(sides[to].rx, &entry, 1))
				continue;
			IS(entry.tag < ENDS && entry.op_context == messages[to][entry.tag]);
			if (!same(key_of((int)entry.tag), key_of(to)))
				die("endpoint %d has received a message of endpoint %d", to, (int)entry.tag);
			IS(entry.len == length((int)entry.tag, to));
			must_be(messages[to][entry.tag], entry.len, seed((int)entry.tag, to));
			add(ARRIVED);
		}
	close_all();
}

/* The entry of an operation: 0, or the error. */
static int entry_of(struct side *side, void *context)
{
	struct fi_cq_tagged_entry entry;
	struct fi_cq_err_entry error = { 0 };
	ssize_t got;

	UNTIL((got = fi_cq_read(side->tx, &entry, 1)) != -FI_EAGAIN, progress_all());
	if (got == -FI_EAVAIL) {
		RETURNS(fi_cq_readerr(side->tx, &error, 0), 1);
		IS(error.op_context == context && error.err > 0);
		return error.err;
	}
	IS(got == 1 && entry.op_context == context);
	return 0;
}

static void send_all(void)
{
	uint64_t delivered = 0;

	for (int from = 0; from < ENDS; from++)
		for (int to = 0; to < ENDS; to++) {
			struct side *side = &sides[from];
			uint8_t *bytes = messages[from][to];
			fi_addr_t peer = address(side, ENDS + to);

			fill(bytes, length(from, to), seed(from, to));
			POST(side, fi_tsend(side->ep, bytes, length(from, to), NULL, peer, (uint64_t)from, bytes));
			int error = entry_of(side, bytes);
			bool expected = same(key_of(from), key_of(to));
			if (error != (expected ? 0 : FI_EACCES))
				die("a message of endpoint %d to endpoint %d: %d (%s)", from, to, error, fi_strerror(error));
			delivered += expected;
		}
	IS(delivered == 10);
	UNTIL(told(ARRIVED) == delivered, progress_all());
}

static void read_all(void)
{
	int allowed = 0;

	for (int end = 0; end < ENDS; end++) {
		struct side *side = &sides[end];
		fi_addr_t peer = address(side, ENDS + end);

		for (int i = 0; i < REGIONS; i++) {
			uint8_t *bytes = messages[end][i];

			memset(bytes, 0, REGION);
			POST(side, fi_read(side->ep, bytes, REGION, NULL, peer, 0, (uint64_t)i, bytes));
			int error = entry_of(side, bytes);
			bool expected = same(key_of(end), key_of_region(end, i));
			if ((error == 0) != expected)
				die("a read of region %d through endpoint %d: %d (%s)", i, end, error, fi_strerror(error));
			for (int at = 0; at < REGION; at++)
				IS(bytes[at] == (expected ? 16 * end + i + 1 : 0));
			allowed += expected;
		}
	}
	IS(allowed == 8);
}

int main(int count, char **arguments)
{
	if (count < 4)
		die("usage: rdm_auth MODE PROV NODE [auto]");
	role = arguments[1];
	provider = arguments[2];
	node = arguments[3];
	wants_auto = count > 4 && !strcmp(arguments[4], "auto");
	wanted.manual = !wants_auto;
	reads = !strcmp(role, "regions");
	wanted.caps = reads ? CAPS | FI_RMA : CAPS;
	alarm(LIMIT_SECONDS);
	make_board();
	pid_t peer = start("peer", be_peer, 0);
	int status;

	for (int end = 0; end < ENDS; end++)
		open_end_of(end, 0);
	if (reads)
		read_all();
	else
		send_all();
	put(DONE, 1);
	UNTIL(waitpid(peer, &status, WNOHANG) == peer, progress_all());
	if (!WIFEXITED(status) || WEXITSTATUS(status))
		die("the peer has ended with %x", status);
	close_all();
	return 0;
}
