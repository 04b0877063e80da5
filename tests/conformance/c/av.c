/* Address vectors, from fi_av(3):
 *
 *   av open PROV NODE        attributes: types, hints, and those that are refused
 *   av indices PROV NODE     the lowest unused index is assigned, in both types, with and without
 *                            an array of results
 *   av formats PROV NODE     each addr_format: insertion, fi_av_lookup, fi_av_straddr
 *   av service PROV NODE     fi_av_insertsvc: numbers, names, address strings, and what is refused
 *   av symmetric PROV NODE   fi_av_insertsym: services before nodes, and ranges that do not exist
 *   av failed PROV NODE      addresses that fail: FI_ADDR_NOTAVAIL, FI_SYNC_ERR, the returned
 *                            number
 *   av events PROV NODE      FI_EVENT: -FI_ENOEQ, one error for each address, then one event
 *   av duplicates PROV NODE  one address twice: two indices, removed one by one
 *   av lengths PROV NODE     buffers that are too short: a part, and the length of the whole
 *   av removed PROV NODE     removed addresses are in no vector, and their indices are assigned
 *                            again
 *   av closed PROV NODE      closing: the domain after its vectors, the event queue after those
 *                            bound to it
 *   av connected PROV NODE   a domain of connected endpoints has no address vectors
 *
 * Ends with 0, or says what went wrong. Plain libfabric 1.17. */
#include "end.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#define COUNT 40

struct object {
	struct fi_info *info;
	struct fid_fabric *fabric;
	struct fid_domain *domain;
	struct fid_eq *eq;
};

#define REFUSED(call, errno)                                                                                         \
	do {                                                                                                         \
		long returned = (long)(call);                                                                        \
		if (returned != -(errno))                                                                            \
			die("%s: %ld where -%d (%s) was to come", #call, returned, errno, fi_strerror(errno));       \
	} while (0)

#define EQUAL(left, right)                                                                                           \
	do {                                                                                                         \
		long long is_ = (long long)(left), want_ = (long long)(right);                                       \
		if (is_ != want_)                                                                                    \
			die("line %d: %s is %lld, and %s is %lld", __LINE__, #left, is_, #right, want_);             \
	} while (0)

static void open_domain_of(struct object *all, enum fi_ep_type type, uint32_t format)
{
	struct fi_eq_attr attr = { .wait_obj = FI_WAIT_UNSPEC };
	struct fi_info *hints = fi_allocinfo();

	hints->caps = FI_MSG;
	hints->mode = ~0ULL;
	hints->addr_format = format;
	hints->ep_attr->type = type;
	hints->domain_attr->mr_mode = ~(FI_MR_BASIC | FI_MR_SCALABLE);
	hints->fabric_attr->prov_name = strdup(provider);
	MUST(fi_getinfo(FI_VERSION(1, 17), NULL, NULL, 0, hints, &all->info));
	fi_freeinfo(hints);
	if (strcmp(all->info->fabric_attr->prov_name, provider))
		die("the provider is %s", all->info->fabric_attr->prov_name);
	MUST(fi_fabric(all->info->fabric_attr, &all->fabric, NULL));
	MUST(fi_eq_open(all->fabric, &attr, &all->eq, NULL));
	MUST(fi_domain(all->fabric, all->info, &all->domain, NULL));
}

static void open_all(struct object *all, uint32_t format) { open_domain_of(all, FI_EP_RDM, format); }

static void close_all(struct object *all)
{
	MUST(fi_close(&all->domain->fid));
	MUST(fi_close(&all->eq->fid));
	MUST(fi_close(&all->fabric->fid));
	fi_freeinfo(all->info);
}

static struct fid_av *vector(struct object *all, enum fi_av_type type, uint64_t flags)
{
	struct fi_av_attr attr = { .type = type, .count = 4, .flags = flags };
	struct fid_av *av;

	MUST(fi_av_open(all->domain, &attr, &av, all));
	return av;
}

static struct sockaddr_in in(const char *ip, uint16_t port)
{
	struct sockaddr_in addr = { .sin_family = AF_INET, .sin_port = htons(port) };

	if (inet_pton(AF_INET, ip, &addr.sin_addr) != 1)
		die("no address: %s", ip);
	return addr;
}

static struct sockaddr_in6 in6(const char *ip, uint16_t port)
{
	struct sockaddr_in6 addr = { .sin6_family = AF_INET6, .sin6_port = htons(port) };

	if (inet_pton(AF_INET6, ip, &addr.sin6_addr) != 1)
		die("no address: %s", ip);
	return addr;
}

/* The vector has this address at this place. */
static void has(struct fid_av *av, fi_addr_t at, const void *addr, size_t size)
{
	uint8_t found[128];
	size_t len = sizeof found;

	MUST(fi_av_lookup(av, at, found, &len));
	EQUAL(len, size);
	if (memcmp(found, addr, size))
		die("another address at %llu", (unsigned long long)at);
}

static void has_in(struct fid_av *av, fi_addr_t at, const char *ip, uint16_t port)
{
	struct sockaddr_in addr = in(ip, port);

	has(av, at, &addr, sizeof addr);
}

static void has_not(struct fid_av *av, fi_addr_t at)
{
	uint8_t found[128];
	size_t len = sizeof found;

	REFUSED(fi_av_lookup(av, at, found, &len), FI_EINVAL);
}

/* ---- modes ---- */

static void check_open(void)
{
	static const enum fi_av_type types[] = { FI_AV_MAP, FI_AV_TABLE, FI_AV_UNSPEC };
	struct object all;
	struct fid_av *av, *none = NULL;

	open_all(&all, FI_SOCKADDR_IN);
	for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
		struct fi_av_attr attr = { .type = types[i], .count = SIZE_MAX, .ep_per_node = 7, .flags = FI_SYMMETRIC };

		MUST(fi_av_open(all.domain, &attr, &av, &all));
		EQUAL(av->fid.fclass, FI_CLASS_AV);
		if (av->fid.context != &all)
			die("another context");
		if (types[i] == FI_AV_UNSPEC && attr.type == FI_AV_UNSPEC)
			die("the type that was chosen is not returned");
		if (types[i] != FI_AV_UNSPEC)
			EQUAL(attr.type, types[i]);
		MUST(fi_close(&av->fid));
	}
	struct fi_av_attr wrong[] = {
		{ .type = 9 },
		{ .type = FI_AV_TABLE, .flags = FI_READ },
	};
	for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
		REFUSED(fi_av_open(all.domain, &wrong[i], &none, NULL), FI_EINVAL);
	struct fi_av_attr missing[] = {
		{ .type = FI_AV_TABLE, .name = "shared" },
		{ .type = FI_AV_TABLE, .name = "shared", .flags = FI_READ },
		{ .type = FI_AV_TABLE, .rx_ctx_bits = 2 },
	};
	for (size_t i = 0; i < sizeof missing / sizeof *missing; i++)
		REFUSED(fi_av_open(all.domain, &missing[i], &none, NULL), FI_ENOSYS);
	struct fi_av_attr flags = { .type = FI_AV_TABLE, .flags = FI_WRITE };
	REFUSED(fi_av_open(all.domain, &flags, &none, NULL), FI_EBADFLAGS);
	REFUSED(fi_av_open(all.domain, NULL, &none, NULL), FI_EINVAL);
	if (none)
		die("a refused call has an output");
	close_all(&all);
}

static void check_indices(void)
{
	struct object all;

	open_all(&all, FI_SOCKADDR_IN);
	for (int type = FI_AV_MAP; type <= FI_AV_TABLE; type++) {
		struct fid_av *av = vector(&all, type, 0);
		struct sockaddr_in addrs[COUNT];
		fi_addr_t results[COUNT];

		for (int i = 0; i < COUNT; i++)
			addrs[i] = in("10.0.0.1", 1000 + i);
		memset(results, 0xee, sizeof results);
		EQUAL(fi_av_insert(av, addrs, 0, results, 0, NULL), 0);
		EQUAL(fi_av_insert(av, NULL, 0, NULL, 0, NULL), 0);
		EQUAL(fi_av_insert(av, addrs, 10, results, FI_MORE, NULL), 10);
		EQUAL(fi_av_insert(av, addrs + 10, 10, NULL, 0, NULL), 10);
		EQUAL(fi_av_insert(av, addrs + 20, COUNT - 20, results + 20, 0, NULL), COUNT - 20);
		for (int i = 0; i < COUNT; i++) {
			if (i < 10 || i >= 20)
				EQUAL(results[i], i);
			has(av, i, &addrs[i], sizeof addrs[i]);
		}
		has_not(av, COUNT);
		MUST(fi_close(&av->fid));
	}
	close_all(&all);
}

/* Inserts addresses of a format, of which one takes `stride` bytes, and compares texts. */
static void check_format(uint32_t format, const void *addrs, size_t count, const size_t *sizes, const char *const *texts)
{
	struct object all;
	struct fid_av *av;
	fi_addr_t results[4];
	const uint8_t *next = addrs;
	char text[128];

	open_all(&all, format);
	EQUAL(all.info->addr_format, format);
	av = vector(&all, FI_AV_TABLE, 0);
	EQUAL(fi_av_insert(av, addrs, count, results, 0, NULL), count);
	for (size_t i = 0; i < count; i++) {
		const void *addr = format == FI_ADDR_STR ? ((const char *const *)addrs)[i] : (const void *)next;
		size_t len = sizeof text;

		EQUAL(results[i], i);
		has(av, i, addr, sizes[i]);
		if (fi_av_straddr(av, addr, text, &len) != text)
			die("fi_av_straddr returns another buffer");
		if (strcmp(text, texts[i]))
			die("%s where %s was to come", text, texts[i]);
		EQUAL(len, strlen(text) + 1);
		next += sizes[i];
	}
	MUST(fi_close(&av->fid));
	close_all(&all);
}

static void check_formats(void)
{
	static const char *const texts[] = { "fi_sockaddr_in://10.1.2.3:7471", "fi_sockaddr_in://10.1.2.4:65535" };
	static const char *const texts6[] = { "fi_sockaddr_in6://[2001:db8::1]:7471", "fi_sockaddr_in6://[2001:db8::2]:1" };
	static const size_t sizes[] = { sizeof(struct sockaddr_in), sizeof(struct sockaddr_in) };
	static const size_t sizes6[] = { sizeof(struct sockaddr_in6), sizeof(struct sockaddr_in6) };
	struct sockaddr_in four[] = { in("10.1.2.3", 7471), in("10.1.2.4", 65535) };
	struct sockaddr_in6 six[] = { in6("2001:db8::1", 7471), in6("2001:db8::2", 1) };
	const size_t lengths[] = { strlen(texts[0]) + 1, strlen(texts6[1]) + 1 };
	const char *strings[] = { texts[0], texts6[1] };
	struct object all;
	struct fid_av *av;
	fi_addr_t result;

	check_format(FI_SOCKADDR_IN, four, 2, sizes, texts);
	check_format(FI_SOCKADDR, four, 2, sizes, texts);
	check_format(FI_SOCKADDR_IN6, six, 2, sizes6, texts6);
	check_format(FI_SOCKADDR, six, 2, sizes6, texts6);
	check_format(FI_ADDR_STR, strings, 2, lengths, strings);
	/* an address of another family than that of the format */
	open_all(&all, FI_SOCKADDR_IN);
	av = vector(&all, FI_AV_TABLE, 0);
	EQUAL(fi_av_insert(av, six, 1, &result, 0, NULL), 0);
	EQUAL(result, FI_ADDR_NOTAVAIL);
	MUST(fi_close(&av->fid));
	close_all(&all);
}

static void check_service(void)
{
	struct object all;
	struct fid_av *av;
	fi_addr_t result = 77;
	int error = 77;

	open_all(&all, FI_SOCKADDR_IN);
	av = vector(&all, FI_AV_TABLE, 0);
	EQUAL(fi_av_insertsvc(av, "10.0.0.9", "7471", &result, 0, NULL), 1);
	EQUAL(result, 0);
	has_in(av, 0, "10.0.0.9", 7471);
	EQUAL(fi_av_insertsvc(av, "localhost", "5000", NULL, 0, NULL), 1);
	has_in(av, 1, "127.0.0.1", 5000);
	EQUAL(fi_av_insertsvc(av, "fi_sockaddr_in://10.0.0.8:9", NULL, &result, 0, NULL), 1);
	EQUAL(result, 2);
	has_in(av, 2, "10.0.0.8", 9);
	EQUAL(fi_av_insertsvc(av, "no-such-host.invalid", "1", &result, FI_SYNC_ERR, &error), 0);
	EQUAL(result, FI_ADDR_NOTAVAIL);
	if (error <= 0)
		die("error %d", error);
	EQUAL(fi_av_insertsvc(av, "::1", "1", &result, 0, NULL), 0); /* not in the vector's format */
	result = 77;
	REFUSED(fi_av_insertsvc(av, NULL, "1", &result, 0, NULL), FI_EINVAL);
	REFUSED(fi_av_insertsvc(av, "10.0.0.9", NULL, &result, 0, NULL), FI_EINVAL);
	REFUSED(fi_av_insertsvc(av, "10.0.0.9", "65536", &result, 0, NULL), FI_EINVAL);
	REFUSED(fi_av_insertsvc(av, "fi_sockaddr_in://10.0.0.8:9", "9", &result, 0, NULL), FI_EINVAL);
	EQUAL(result, 77);
	has_not(av, 3);
	MUST(fi_close(&av->fid));
	close_all(&all);
}

static void check_symmetric(void)
{
	struct object all;
	struct fid_av *av;
	fi_addr_t results[4];
	int errors[4];

	open_all(&all, FI_SOCKADDR_IN);
	av = vector(&all, FI_AV_TABLE, FI_SYMMETRIC);
	/* the example of the manual page */
	EQUAL(fi_av_insertsym(av, "10.1.1.1", 2, "5000", 2, results, 0, NULL), 4);
	for (int i = 0; i < 4; i++) {
		EQUAL(results[i], i);
		has_in(av, i, i < 2 ? "10.1.1.1" : "10.1.1.2", 5000 + i % 2);
	}
	EQUAL(fi_av_insertsym(av, "10.1.1.1", 0, "5000", 2, NULL, 0, NULL), 0);
	EQUAL(fi_av_insertsym(av, "10.1.1.255", 2, "7", 1, NULL, 0, NULL), 2);
	has_in(av, 5, "10.1.2.0", 7);
	/* "the fi_addr buffer associated with a failed or aborted insertion will be set to
	 * FI_ADDR_NOTAVAIL" */
	memset(results, 0xee, sizeof results);
	memset(errors, 0xee, sizeof errors);
	EQUAL(fi_av_insertsym(av, "10.1.1.8", 2, "65535", 2, results, FI_SYNC_ERR, errors), 2);
	for (int i = 0; i < 4; i++) {
		EQUAL(errors[i], i % 2 ? FI_EINVAL : 0);
		if (i % 2)
			EQUAL(results[i], FI_ADDR_NOTAVAIL);
		else
			has_in(av, results[i], i ? "10.1.1.9" : "10.1.1.8", 65535);
	}
	EQUAL(fi_av_insertsym(av, "255.255.255.254", 3, "1", 1, results, FI_SYNC_ERR, errors), 2);
	EQUAL(results[2], FI_ADDR_NOTAVAIL);
	EQUAL(errors[2], FI_EINVAL);
	REFUSED(fi_av_insertsym(av, "host", 2, "1", 1, NULL, 0, NULL), FI_EINVAL);
	REFUSED(fi_av_insertsym(av, NULL, 1, "1", 1, NULL, 0, NULL), FI_EINVAL);
	MUST(fi_close(&av->fid));
	close_all(&all);
}

static void check_failed(void)
{
	struct sockaddr_in addrs[5];
	fi_addr_t results[5];
	int errors[5];
	struct object all;
	struct fid_av *av;

	open_all(&all, FI_SOCKADDR_IN);
	for (int i = 0; i < 5; i++)
		addrs[i] = in("10.0.0.1", 100 + i);
	addrs[1] = in("0.0.0.0", 7);
	addrs[2].sin_port = 0;
	addrs[4].sin_family = AF_UNIX;
	/* with results */
	av = vector(&all, FI_AV_MAP, 0);
	EQUAL(fi_av_insert(av, addrs, 5, results, 0, NULL), 2);
	for (int i = 0; i < 5; i++)
		if (i == 0 || i == 3)
			has(av, results[i], &addrs[i], sizeof addrs[i]);
		else
			EQUAL(results[i], FI_ADDR_NOTAVAIL);
	MUST(fi_close(&av->fid));
	/* without: the failed ones are those that the vector has not, at the indices that they
	 * would have had */
	av = vector(&all, FI_AV_TABLE, 0);
	EQUAL(fi_av_insert(av, addrs, 5, NULL, 0, NULL), 2);
	for (int i = 0; i < 5; i++)
		if (i == 0 || i == 3)
			has(av, i, &addrs[i], sizeof addrs[i]);
		else
			has_not(av, i);
	MUST(fi_close(&av->fid));
	/* the errors */
	av = vector(&all, FI_AV_TABLE, 0);
	memset(errors, 0xee, sizeof errors);
	EQUAL(fi_av_insert(av, addrs, 5, results, FI_SYNC_ERR, errors), 2);
	for (int i = 0; i < 5; i++)
		if (i == 0 || i == 3)
			EQUAL(errors[i], 0);
		else if (errors[i] <= 0)
			die("error %d of address %d", errors[i], i);
	EQUAL(errors[1], FI_EADDRNOTAVAIL);
	EQUAL(errors[2], FI_EADDRNOTAVAIL);
	EQUAL(errors[4], FI_EINVAL);
	/* calls that are refused change nothing */
	memset(results, 0xee, sizeof results);
	REFUSED(fi_av_insert(av, addrs, 5, results, FI_SYNC_ERR, NULL), FI_EINVAL);
	REFUSED(fi_av_insert(av, NULL, 5, results, 0, NULL), FI_EINVAL);
	REFUSED(fi_av_insert(av, addrs, 5, results, FI_PEEK, NULL), FI_EBADFLAGS);
#ifdef FI_AV_USER_ID
	REFUSED(fi_av_insert(av, addrs, 5, results, FI_AV_USER_ID, NULL), FI_ENOSYS);
#endif
	for (int i = 0; i < 5; i++)
		EQUAL(results[i], 0xeeeeeeeeeeeeeeeeULL);
	MUST(fi_close(&av->fid));
	close_all(&all);
}

static void must_be_empty(struct object *all)
{
	struct fi_eq_entry entry;
	uint32_t event;

	REFUSED(fi_eq_read(all->eq, &event, &entry, sizeof entry, 0), FI_EAGAIN);
}

/* The event of an insertion of `count` addresses. */
static void expect_insertion(struct object *all, struct fid_av *av, void *context, uint64_t count)
{
	struct fi_eq_entry entry = { 0 };
	uint32_t event = 0;

	EQUAL(fi_eq_sread(all->eq, &event, &entry, sizeof entry, SETUP_SECONDS * 1000, 0), sizeof entry);
	EQUAL(event, FI_AV_COMPLETE);
	if (entry.fid != &av->fid || entry.context != context)
		die("the event of another object or call");
	EQUAL(entry.data, count);
}

static void expect_error(struct object *all, struct fid_av *av, void *context, uint64_t at, int errno_of_it)
{
	struct fi_eq_err_entry error = { 0 };
	struct fi_eq_entry entry;
	uint32_t event;

	REFUSED(fi_eq_sread(all->eq, &event, &entry, sizeof entry, SETUP_SECONDS * 1000, 0), FI_EAVAIL);
	EQUAL(fi_eq_readerr(all->eq, &error, 0), sizeof error);
	if (error.fid != &av->fid || error.context != context)
		die("the error of another object or call");
	EQUAL(error.data, at);
	EQUAL(error.err, errno_of_it);
	if (!strcmp(fi_eq_strerror(all->eq, error.prov_errno, error.err_data, NULL, 0), strerror(0)))
		die("the text of an error is that of success");
}

static void check_events(void)
{
	struct sockaddr_in addrs[4];
	fi_addr_t results[4] = { 7, 7, 7, 7 };
	int errors[4], first, second;
	struct object all;
	struct fid_av *av, *other;

	open_all(&all, FI_SOCKADDR_IN);
	for (int i = 0; i < 4; i++)
		addrs[i] = in("10.0.0.1", 100 + i);
	addrs[0].sin_port = 0;
	addrs[2].sin_family = AF_UNIX;
	av = vector(&all, FI_AV_TABLE, FI_EVENT);
	REFUSED(fi_av_insert(av, addrs, 4, results, 0, &first), FI_ENOEQ);
	REFUSED(fi_av_insertsvc(av, "10.0.0.1", "1", results, 0, &first), FI_ENOEQ);
	EQUAL(results[1], 7);
	REFUSED(fi_av_bind(av, &all.domain->fid, 0), FI_EINVAL);
	REFUSED(fi_av_bind(av, &all.eq->fid, FI_SEND), FI_EBADFLAGS);
	MUST(fi_av_bind(av, &all.eq->fid, 0));
	REFUSED(fi_av_bind(av, &all.eq->fid, 0), FI_EINVAL);

	EQUAL(fi_av_insert(av, addrs, 4, results, 0, &first), 0);
	EQUAL(fi_av_insertsym(av, "10.0.0.2", 1, "50", 3, NULL, 0, &second), 0);
	EQUAL(fi_av_insert(av, addrs, 0, NULL, 0, NULL), 0);
	expect_error(&all, av, &first, 0, FI_EADDRNOTAVAIL);
	expect_error(&all, av, &first, 2, FI_EINVAL);
	expect_insertion(&all, av, &first, 2);
	EQUAL(results[0], FI_ADDR_NOTAVAIL);
	EQUAL(results[1], 1);
	EQUAL(results[2], FI_ADDR_NOTAVAIL);
	EQUAL(results[3], 3);
	expect_insertion(&all, av, &second, 3);
	expect_insertion(&all, av, NULL, 0);
	must_be_empty(&all);
	has_in(av, 0, "10.0.0.2", 50); /* the lowest unused index */
	has_in(av, 2, "10.0.0.2", 51);
	has_in(av, 4, "10.0.0.2", 52);
	/* of an insertion that fails as a whole there is an event too */
	EQUAL(fi_av_insertsvc(av, "no-such-host.invalid", "1", results, 0, &first), 0);
	struct fi_eq_err_entry error = { 0 };
	struct fi_eq_entry entry;
	uint32_t event;
	REFUSED(fi_eq_sread(all.eq, &event, &entry, sizeof entry, SETUP_SECONDS * 1000, 0), FI_EAVAIL);
	EQUAL(fi_eq_readerr(all.eq, &error, 0), sizeof error);
	expect_insertion(&all, av, &first, 0);
	/* the flag is for insertions without events */
	REFUSED(fi_av_insert(av, addrs, 4, results, FI_SYNC_ERR, errors), FI_EBADFLAGS);
	must_be_empty(&all);
	/* and events are for vectors that were opened for them */
	other = vector(&all, FI_AV_TABLE, 0);
	REFUSED(fi_av_bind(other, &all.eq->fid, 0), FI_EINVAL);
	MUST(fi_close(&other->fid));
	/* events that were not read are left untouched */
	EQUAL(fi_av_insert(av, addrs, 2, NULL, 0, &second), 0);
	MUST(fi_close(&av->fid));
	expect_error(&all, av, &second, 0, FI_EADDRNOTAVAIL);
	expect_insertion(&all, av, &second, 1);
	close_all(&all);
}

static void check_duplicates(void)
{
	struct sockaddr_in addrs[3] = { in("10.0.0.1", 5), in("10.0.0.1", 6), in("10.0.0.1", 5) };
	fi_addr_t results[3], first;
	struct object all;
	struct fid_av *av;

	open_all(&all, FI_SOCKADDR_IN);
	av = vector(&all, FI_AV_TABLE, 0);
	EQUAL(fi_av_insert(av, addrs, 3, results, 0, NULL), 3);
	for (int i = 0; i < 3; i++)
		EQUAL(results[i], i);
	first = 0;
	MUST(fi_av_remove(av, &first, 1, 0));
	has_not(av, 0);
	has(av, 2, &addrs[2], sizeof addrs[2]);
	EQUAL(fi_av_insert(av, addrs, 1, results, 0, NULL), 1);
	EQUAL(results[0], 0);
	has(av, 0, &addrs[0], sizeof addrs[0]);
	MUST(fi_close(&av->fid));
	close_all(&all);
}

static void check_lengths(void)
{
	static const char text[] = "fi_sockaddr_in://10.0.0.1:5", longer[] = "fi_sockaddr_in://10.0.0.1:50";
	struct sockaddr_in addr = in("10.0.0.1", 5);
	uint8_t found[64], other = AF_UNIX;
	char buf[64];
	struct object all;
	struct fid_av *av;
	size_t len;

	open_all(&all, FI_SOCKADDR_IN);
	av = vector(&all, FI_AV_TABLE, 0);
	EQUAL(fi_av_insert(av, &addr, 1, NULL, 0, NULL), 1);
	for (size_t size = 0; size <= sizeof addr + 1; size++) {
		size_t part = size < sizeof addr ? size : sizeof addr;

		memset(found, 0xee, sizeof found);
		len = size;
		MUST(fi_av_lookup(av, 0, found, &len));
		EQUAL(len, sizeof addr);
		if (memcmp(found, &addr, part))
			die("another address in %zu bytes", size);
		EQUAL(found[part], 0xee);
	}
	len = 0;
	MUST(fi_av_lookup(av, 0, NULL, &len));
	EQUAL(len, sizeof addr);
	REFUSED(fi_av_lookup(av, 0, found, NULL), FI_EINVAL);
	len = sizeof found;
	REFUSED(fi_av_lookup(av, FI_ADDR_NOTAVAIL, found, &len), FI_EINVAL);
	EQUAL(len, sizeof found);
	for (size_t size = 0; size <= sizeof text + 1; size++) {
		size_t part = size < sizeof text ? size : sizeof text;

		memset(buf, 0x7e, sizeof buf);
		len = size;
		if (fi_av_straddr(av, &addr, buf, &len) != buf)
			die("fi_av_straddr returns another buffer");
		EQUAL(len, sizeof text);
		EQUAL(buf[part], 0x7e);
		if (size && (memcmp(buf, text, part - 1) || buf[part - 1]))
			die("another text in %zu bytes", size);
	}
	/* an address that was not inserted */
	addr = in("10.0.0.1", 50);
	len = sizeof buf;
	if (fi_av_straddr(av, &addr, buf, &len) != buf || strcmp(buf, longer))
		die("an address that was not inserted");
	if (fi_av_straddr(av, &addr, buf, NULL))
		die("fi_av_straddr without a length");
	addr.sin_family = other;
	if (fi_av_straddr(av, &addr, buf, &len))
		die("fi_av_straddr of another family");
	MUST(fi_close(&av->fid));
	close_all(&all);

	/* strings */
	const char *strings[] = { text };
	open_all(&all, FI_ADDR_STR);
	av = vector(&all, FI_AV_MAP, 0);
	EQUAL(fi_av_insert(av, strings, 1, NULL, 0, NULL), 1);
	for (size_t size = 0; size <= sizeof text; size++) {
		memset(buf, 0x7e, sizeof buf);
		len = size;
		MUST(fi_av_lookup(av, 0, buf, &len));
		EQUAL(len, sizeof text);
		EQUAL(buf[size], 0x7e);
		if (size && (memcmp(buf, text, size - 1) || buf[size - 1]))
			die("another string in %zu bytes", size);
	}
	MUST(fi_close(&av->fid));
	close_all(&all);
}

static void check_removed(void)
{
	struct sockaddr_in addrs[6];
	fi_addr_t results[6], some[3] = { 4, 1, 2 }, twice[3] = { 0, 1, 3 };
	struct object all;
	struct fid_av *av;

	open_all(&all, FI_SOCKADDR_IN);
	for (int i = 0; i < 6; i++)
		addrs[i] = in("10.0.0.1", 100 + i);
	av = vector(&all, FI_AV_TABLE, 0);
	EQUAL(fi_av_insert(av, addrs, 6, results, 0, NULL), 6);
	MUST(fi_av_remove(av, NULL, 0, 0));
	REFUSED(fi_av_remove(av, NULL, 1, 0), FI_EINVAL);
	REFUSED(fi_av_remove(av, some, 3, FI_MORE), FI_EBADFLAGS);
	MUST(fi_av_remove(av, some, 3, 0));
	for (int i = 0; i < 3; i++)
		has_not(av, some[i]);
	has(av, 3, &addrs[3], sizeof addrs[3]);
	REFUSED(fi_av_remove(av, twice, 3, 0), FI_EINVAL); /* the second one is gone, the others are removed */
	has_not(av, 0);
	has_not(av, 3);
	/* all but 5 are unused */
	EQUAL(fi_av_insert(av, addrs, 6, results, 0, NULL), 6);
	for (int i = 0; i < 6; i++) {
		EQUAL(results[i], i < 5 ? i : 6);
		has(av, results[i], &addrs[i], sizeof addrs[i]);
	}
	MUST(fi_close(&av->fid));
	close_all(&all);
}

static void check_closed(void)
{
	struct object all;
	struct fid_av *av, *other;
	struct fid_cq *cq;
	struct fi_cq_attr attr = { .format = FI_CQ_FORMAT_CONTEXT };

	open_all(&all, FI_SOCKADDR_IN);
	av = vector(&all, FI_AV_TABLE, FI_EVENT);
	other = vector(&all, FI_AV_TABLE, 0);
	MUST(fi_av_bind(av, &all.eq->fid, 0));
	REFUSED(fi_close(&all.domain->fid), FI_EBUSY);
	REFUSED(fi_close(&all.eq->fid), FI_EBUSY);
	MUST(fi_close(&av->fid));
	REFUSED(fi_close(&av->fid), FI_EINVAL);
	REFUSED(fi_close(&all.domain->fid), FI_EBUSY);
	MUST(fi_close(&other->fid));
	/* a handle of another class */
	MUST(fi_cq_open(all.domain, &attr, &cq, NULL));
	av = vector(&all, FI_AV_TABLE, FI_EVENT);
	REFUSED(fi_av_bind(av, &cq->fid, 0), FI_EINVAL);
	MUST(fi_close(&cq->fid));
	MUST(fi_close(&av->fid));
	close_all(&all);
}

static void check_connected(void)
{
	struct fi_av_attr attr = { .type = FI_AV_TABLE };
	struct fid_av *av;
	struct object all;

	open_domain_of(&all, FI_EP_MSG, FI_SOCKADDR_IN);
	REFUSED(fi_av_open(all.domain, &attr, &av, NULL), FI_ENOSYS);
	close_all(&all);
}

int main(int argc, char **argv)
{
	static const struct {
		const char *name;
		void (*check)(void);
	} modes[] = {
		{ "open", check_open },
		{ "indices", check_indices },
		{ "formats", check_formats },
		{ "service", check_service },
		{ "symmetric", check_symmetric },
		{ "failed", check_failed },
		{ "events", check_events },
		{ "duplicates", check_duplicates },
		{ "lengths", check_lengths },
		{ "removed", check_removed },
		{ "closed", check_closed },
		{ "connected", check_connected },
	};

	if (argc != 4)
		die("usage: av MODE PROV NODE");
	role = argv[1];
	provider = argv[2];
	node = argv[3];
	for (size_t i = 0; i < sizeof modes / sizeof *modes; i++)
		if (!strcmp(argv[1], modes[i].name)) {
			modes[i].check();
			return 0;
		}
	die("no such mode");
}
