/* One of many processes with an endpoint of type FI_EP_RDM, on any provider, for
 * tests/tools/lib/scale.py. The parent process gives commands, one a line on stdin; each has one
 * line as its answer:
 *
 *   open              opens the endpoint; answers with the microseconds of wall and processor time
 *                     since the program began, and the name in hexadecimal digits
 *   insert COUNT OWN FILE
 *                     inserts the COUNT names of the file, one a line; this process is number OWN
 *   run SIZE COUNT TO FROM
 *                     sends COUNT messages of SIZE bytes to each process of TO and receives as many
 *                     from each of FROM: `all`, `none`, a number, or FIRST-LAST. The process itself
 *                     is left out. Answers when all have arrived, and all of its own have completed
 *   rest              answers when the process sleeps. Between `run` and `rest` it makes progress
 *   close             closes the endpoint, and ends
 *   av COUNT          inserts addresses up to this number, one with each call; answers with the
 *                     nanoseconds of processor time of each and the growth of the private memory
 *
 *   scale PROV NODE manual|auto [xrc]
 *
 * NODE may be `-`. The answers of `insert` and `run` are microseconds of wall and of processor
 * time, and the number of messages that have arrived. A process that waits sleeps in fi_cq_sread,
 * if the provider has it. */
#define _GNU_SOURCE
#include "../rdm_side.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/resource.h>

/* Empty reads of the completion queue before the process sleeps. */
enum { POLLS = 20 };
enum { LIMIT = 300 }; /* seconds of a run */
enum { SENDS = 8, RECEIVES = 32, MOST = 64, LONGEST = 64 << 10, NAME = 256 };

/* A tag names the run, the sender, and the number of the message. */
#define TAG_OF(run, from, number) ((uint64_t)(run) << 40 | (uint64_t)(from) << 16 | (uint64_t)(number))
#define TAG_RUN(tag) ((tag) >> 40)
#define TAG_FROM(tag) ((tag) >> 16 & 0xffffff)
#define TAG_NUMBER(tag) ((tag) & 0xffff)

struct range {
	int first, end; /* end is not contained */
};

static struct side side;
static struct name_of_any {
	size_t len;
	uint8_t bytes[NAME];
} own_name;
static fi_addr_t *peers;
static int count, own;
static uint64_t run_number;
static uint8_t *out[SENDS], *in[RECEIVES];
static int idle[SENDS], idles;
static bool no_sread;

static double cpu(void)
{
	struct rusage usage;

	MUST(getrusage(RUSAGE_SELF, &usage));
	return (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
	       (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) * 1e-6;
}

/* Seconds since the process was started. */
static double age(void)
{
	static double begun; /* of the process, on the clock since boot */
	struct timespec t;

	if (begun == 0) {
		unsigned long long ticks;
		FILE *stat = fopen("/proc/self/stat", "r");

		/* the name has no blanks */
		if (!stat || fscanf(stat, "%*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %llu", &ticks) != 1)
			die("/proc/self/stat");
		fclose(stat);
		begun = (double)ticks / (double)sysconf(_SC_CLK_TCK);
	}
	clock_gettime(CLOCK_BOOTTIME, &t);
	return (double)t.tv_sec + (double)t.tv_nsec * 1e-9 - begun;
}

/* ---- contents ---- */

static uint64_t mixed(uint64_t seed)
{
	seed = (seed ^ seed >> 30) * 0xbf58476d1ce4e5b9ULL;
	seed = (seed ^ seed >> 27) * 0x94d049bb133111ebULL;
	return seed ^ seed >> 31;
}

/* Word `i` of a message. */
static uint64_t word_of(uint64_t tag, int to, size_t i) { return mixed(tag * 1000003 + (uint64_t)to + 1) + i * 0x0101010101010101ULL; }

static void fill(uint8_t *bytes, size_t len, uint64_t tag, int to)
{
	uint64_t first = word_of(tag, to, 0);

	for (size_t i = 0; i < len / 8; i++) {
		uint64_t word = first + i * 0x0101010101010101ULL;
		memcpy(bytes + i * 8, &word, 8);
	}
}

static void check(const uint8_t *bytes, size_t len, uint64_t tag)
{
	uint64_t first = word_of(tag, own, 0);

	for (size_t i = 0; i < len / 8; i++) {
		uint64_t word = first + i * 0x0101010101010101ULL;

		if (memcmp(bytes + i * 8, &word, 8))
			die("word %zu of message %llu of run %llu from %llu", i, (unsigned long long)TAG_NUMBER(tag),
			    (unsigned long long)TAG_RUN(tag), (unsigned long long)TAG_FROM(tag));
	}
}

/* ---- progress ---- */

/* Completions, at most `most`. With `sleeps` the process waits for one, at most 0.1 s. */
static size_t take(struct fi_cq_tagged_entry *entries, size_t most, bool sleeps)
{
	struct fi_cq_err_entry error = { 0 };
	ssize_t got = sleeps && !no_sread ? fi_cq_sread(side.tx, entries, most, NULL, 100) : fi_cq_read(side.tx, entries, most);

	if (got == -FI_ENOSYS || got == -FI_ENOCQ) {
		no_sread = true;
		got = -FI_EAGAIN;
	}
	if (sleeps && no_sread && got == -FI_EAGAIN)
		usleep(1000);
	if (got == -FI_EAVAIL) {
		MUST(fi_cq_readerr(side.tx, &error, 0));
		die("a completion in error: %s, tag %llx", fi_strerror(error.err), (unsigned long long)error.tag);
	}
	if (got != -FI_EAGAIN && got != -FI_ETIMEDOUT && got != -FI_EINTR && got != -FI_ECANCELED)
		MUST(got);
	return got > 0 ? (size_t)got : 0;
}

static void progress(struct side *this)
{
	(void)fi_cq_read(this->tx, NULL, 0);
}

/* ---- commands ---- */

static void open_one(const char *mode, bool xrc)
{
	struct fi_info *hints = fi_allocinfo(), *info;

	hints->caps = FI_MSG | FI_TAGGED;
	hints->ep_attr->type = FI_EP_RDM;
	if (xrc)
		hints->ep_attr->protocol = FI_PROTO_RDMA_CM_IB_XRC;
	hints->domain_attr->data_progress = !strcmp(mode, "auto") ? FI_PROGRESS_AUTO : FI_PROGRESS_MANUAL;
	hints->domain_attr->threading = FI_THREAD_DOMAIN;
	hints->fabric_attr->prov_name = strdup(provider);
	MUST(fi_getinfo(FI_VERSION(1, 17), node, NULL, node ? FI_SOURCE : 0, hints, &info));
	fi_freeinfo(hints);
	if (strcmp(info->fabric_attr->prov_name, provider))
		die("the provider is %s", info->fabric_attr->prov_name);
	if (xrc && info->ep_attr->protocol != FI_PROTO_RDMA_CM_IB_XRC)
		die("not XRC");
	wanted.wait = FI_WAIT_UNSPEC;
	open_domain_with(&side, info);
	side.tx = side.rx = queue(&side, 0);
	side.ep = endpoint_on(&side, 0);
	own_name.len = sizeof own_name.bytes;
	MUST(fi_getname(&side.ep->fid, own_name.bytes, &own_name.len));
	for (int i = 0; i < SENDS; i++) {
		out[i] = malloc(LONGEST);
		idle[idles++] = i;
	}
	for (int i = 0; i < RECEIVES; i++)
		in[i] = malloc(LONGEST);
	printf("%.0f %.0f ", age() * 1e6, cpu() * 1e6);
	for (size_t i = 0; i < own_name.len; i++)
		printf("%02x", own_name.bytes[i]);
	printf("\n");
}

static void insert_all(const char *path)
{
	FILE *file = fopen(path, "r");
	double wall = now(), used = cpu();
	char line[2 * NAME + 2];

	if (!file)
		die("%s: %s", path, strerror(errno));
	peers = calloc((size_t)count, sizeof *peers);
	for (int i = 0; i < count; i++) {
		uint8_t name[NAME];

		if (!fgets(line, sizeof line, file))
			die("%s: %d names", path, i);
		for (size_t b = 0; b < own_name.len; b++) {
			unsigned byte;

			if (sscanf(line + 2 * b, "%2x", &byte) != 1)
				die("%s: name %d", path, i);
			name[b] = (uint8_t)byte;
		}
		RETURNS(fi_av_insert(side.av, name, 1, &peers[i], 0, NULL), 1);
	}
	fclose(file);
	printf("%.0f %.0f 0\n", (now() - wall) * 1e6, (cpu() - used) * 1e6);
}

static struct range range_of(const char *text)
{
	struct range range = { 0, count };

	if (!strcmp(text, "none"))
		range.end = 0;
	else if (strcmp(text, "all")) {
		int got = sscanf(text, "%d-%d", &range.first, &range.end);

		if (got < 1)
			die("a range: %s", text);
		range.end = got == 1 ? range.first + 1 : range.end + 1;
	}
	return range;
}

static int number_of(struct range range)
{
	return range.end - range.first - (own >= range.first && own < range.end);
}

/* One message at a time to each process of `to`, beginning behind this one. */
static void run(size_t size, int each, struct range to, struct range from)
{
	uint64_t *arrived = calloc((size_t)count, sizeof *arrived);
	uint64_t sends = (uint64_t)number_of(to) * (uint64_t)each, receives = (uint64_t)number_of(from) * (uint64_t)each;
	uint64_t sent = 0, completed = 0, posted = 0, received = 0;
	int next = own, number = 0, width = to.end - to.first;
	double wall = now(), used = cpu();
	bool chosen = false;
	unsigned empty = 0;

	if (each > MOST || size > LONGEST)
		die("at most %d messages of %d bytes", MOST, LONGEST);
	run_number++;
	while (posted < receives && posted < RECEIVES) {
		uint8_t *buffer = in[posted++];

		POST(&side, fi_trecv(side.ep, buffer, LONGEST, NULL, FI_ADDR_UNSPEC, run_number << 40, 0xffffffffffULL, buffer));
	}
	while (completed < sends || received < receives) {
		struct fi_cq_tagged_entry entries[16];
		size_t got;

		while (sent < sends && idles) {
			uint64_t tag = TAG_OF(run_number, own, number);
			int slot = idle[idles - 1];
			ssize_t ret;

			if (!chosen) {
				do /* the process behind the last one, in a circle */
					next = to.first + (next + 1 - to.first + width) % width;
				while (next == own);
				chosen = true;
			}
			fill(out[slot], size, tag, next);
			ret = fi_tsend(side.ep, out[slot], size, NULL, peers[next], tag, (void *)(intptr_t)slot);
			if (ret == -FI_EAGAIN)
				break;
			MUST(ret);
			chosen = false;
			idles--;
			empty = 0;
			if (++sent % (uint64_t)number_of(to) == 0)
				number++;
		}
		got = take(entries, 16, empty >= POLLS);
		empty = got ? 0 : empty + 1;
		for (size_t i = 0; i < got; i++) {
			if (entries[i].flags & FI_SEND) {
				idle[idles++] = (int)(intptr_t)entries[i].op_context;
				completed++;
				continue;
			}

			uint64_t tag = entries[i].tag, sender = TAG_FROM(tag), bit = 1ULL << TAG_NUMBER(tag);
			uint8_t *buffer = entries[i].op_context;

			IS(TAG_RUN(tag) == run_number && TAG_NUMBER(tag) < (uint64_t)each);
			IS((int)sender >= from.first && (int)sender < from.end && (int)sender != own);
			IS(!(arrived[sender] & bit));
			IS(entries[i].len == size);
			arrived[sender] |= bit;
			check(buffer, size, tag);
			received++;
			if (posted < receives) {
				posted++;
				POST(&side, fi_trecv(side.ep, buffer, LONGEST, NULL, FI_ADDR_UNSPEC, run_number << 40,
						     0xffffffffffULL, buffer));
			}
		}
		if (now() - wall > LIMIT)
			die("run %llu: sent %llu of %llu, received %llu of %llu", (unsigned long long)run_number,
			    (unsigned long long)completed, (unsigned long long)sends, (unsigned long long)received,
			    (unsigned long long)receives);
	}
	free(arrived);
	printf("%.0f %.0f %llu\n", (now() - wall) * 1e6, (cpu() - used) * 1e6, (unsigned long long)received);
}

/* Private memory of this process in bytes. */
static uint64_t private_bytes(void)
{
	FILE *file = fopen("/proc/self/smaps_rollup", "r");
	uint64_t sum = 0;
	char line[256];

	if (!file)
		die("/proc/self/smaps_rollup: %s", strerror(errno));
	while (fgets(line, sizeof line, file)) {
		unsigned long kib;

		if (sscanf(line, "Private_Clean: %lu", &kib) == 1 || sscanf(line, "Private_Dirty: %lu", &kib) == 1)
			sum += kib << 10;
	}
	fclose(file);
	return sum;
}

static void insert_up_to(uint32_t wanted_count)
{
	static uint32_t there;
	uint64_t before = private_bytes();
	uint32_t begun = there;
	double used = cpu();

	for (; there < wanted_count; there++) {
		struct sockaddr_in name = { .sin_family = AF_INET, .sin_port = htons((uint16_t)(1024 + there % 128)) };

		/* 128 processes on each node */
		name.sin_addr.s_addr = htonl(0x0a000001 + there / 128);
		RETURNS(fi_av_insert(side.av, &name, 1, NULL, 0, NULL), 1);
	}
	used = cpu() - used;
	printf("%.1f %lld\n", used * 1e9 / (wanted_count - begun), (long long)(private_bytes() - before));
}

int main(int argc, char **argv)
{
	char line[4096], first[32], second[32];
	bool makes_progress = false, is_auto;
	int timeout = 1;

	if (argc < 4)
		die("usage: %s PROV NODE manual|auto [xrc]", argv[0]);
	provider = argv[1];
	node = strcmp(argv[2], "-") ? argv[2] : NULL;
	is_auto = !strcmp(argv[3], "auto");
	role = argv[2];
	setvbuf(stdout, NULL, _IOLBF, 0);
	for (;;) {
		struct pollfd input = { .fd = 0, .events = POLLIN };
		unsigned size;
		int each;

		if (makes_progress && !is_auto && poll(&input, 1, timeout) == 0) {
			progress(&side);
			timeout = timeout < 50 ? timeout * 2 : timeout;
			continue;
		}
		/* unbuffered, so that poll() sees each line */
		size_t len = 0;
		while (len + 1 < sizeof line) {
			if (read(0, line + len, 1) != 1)
				return 1; /* the parent has ended */
			if (line[len++] == '\n')
				break;
		}
		line[len] = 0;
		if (!strcmp(line, "open\n"))
			open_one(argv[3], argc > 4 && !strcmp(argv[4], "xrc"));
		else if (sscanf(line, "insert %d %d %4000s", &count, &own, line) == 3)
			insert_all(line);
		else if (sscanf(line, "run %u %d %31s %31s", &size, &each, first, second) == 4) {
			run(size, each, range_of(first), range_of(second));
			makes_progress = true;
			timeout = 1;
		} else if (!strcmp(line, "rest\n")) {
			makes_progress = false;
			printf("0\n");
		} else if (sscanf(line, "av %u", &size) == 1)
			insert_up_to(size);
		else if (!strcmp(line, "close\n")) {
			double wall = now(), used = cpu();

			close_side(&side);
			printf("%.0f %.0f\n", (now() - wall) * 1e6, (cpu() - used) * 1e6);
			return 0;
		} else
			die("a command: %s", line);
	}
}
