/* The fi_mr_* symbols of libweft-fi.so, resolved by dlsym, as a program without a C compiler calls
 * them.
 *
 *   symbols LIBRARY PROV
 *
 * Each call is made twice on objects of the provider: by the symbol, and by the inline function of
 * libfabric's headers. Both must return the same, errors included, on any provider's objects. Exits
 * with 0, or prints the failure. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>

#include <rdma/fabric.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>

#define ACCESS (FI_SEND | FI_RECV | FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE)
#define SIZE 4096

static int failed, compared, weft;

static void same(const char *what, int64_t symbol, int64_t inlined)
{
	compared++;
	if (symbol != inlined) {
		fprintf(stderr, "%s: %lld by the symbol, %lld by the inline function\n", what, (long long)symbol,
			(long long)inlined);
		failed = 1;
	}
}

static void must(const char *what, int64_t answer, int64_t wanted)
{
	compared++;
	if (answer != wanted) {
		fprintf(stderr, "%s: %lld, wanted %lld\n", what, (long long)answer, (long long)wanted);
		failed = 1;
	}
}

/* The symbols, with exactly the signatures of fi_mr(3). */
static __typeof__(fi_mr_reg) *sym_reg;
static __typeof__(fi_mr_regv) *sym_regv;
static __typeof__(fi_mr_regattr) *sym_regattr;
static __typeof__(fi_mr_desc) *sym_desc;
static __typeof__(fi_mr_key) *sym_key;
static __typeof__(fi_mr_raw_attr) *sym_raw_attr;
static __typeof__(fi_mr_map_raw) *sym_map_raw;
static __typeof__(fi_mr_unmap_key) *sym_unmap_key;
static __typeof__(fi_mr_bind) *sym_bind;
static __typeof__(fi_mr_refresh) *sym_refresh;
static __typeof__(fi_mr_enable) *sym_enable;

static void *find(void *library, const char *name)
{
	void *symbol = dlsym(library, name);

	if (!symbol) {
		fprintf(stderr, "%s\n", dlerror());
		exit(1);
	}
	return symbol;
}

static void load(const char *path)
{
	void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);

	if (!library) {
		fprintf(stderr, "%s\n", dlerror());
		exit(1);
	}
	*(void **)&sym_reg = find(library, "fi_mr_reg");
	*(void **)&sym_regv = find(library, "fi_mr_regv");
	*(void **)&sym_regattr = find(library, "fi_mr_regattr");
	*(void **)&sym_desc = find(library, "fi_mr_desc");
	*(void **)&sym_key = find(library, "fi_mr_key");
	*(void **)&sym_raw_attr = find(library, "fi_mr_raw_attr");
	*(void **)&sym_map_raw = find(library, "fi_mr_map_raw");
	*(void **)&sym_unmap_key = find(library, "fi_mr_unmap_key");
	*(void **)&sym_bind = find(library, "fi_mr_bind");
	*(void **)&sym_refresh = find(library, "fi_mr_refresh");
	*(void **)&sym_enable = find(library, "fi_mr_enable");
}

/* Compares a region made by the symbol with one made by the inline function. */
static void pair(const char *what, int symbol, int inlined, struct fid_mr **mrs)
{
	same(what, symbol, inlined);
	if (symbol || inlined)
		return;
	same("a descriptor by fi_mr_desc", (intptr_t)sym_desc(mrs[0]), (intptr_t)fi_mr_desc(mrs[0]));
	same("a key by fi_mr_key", (int64_t)sym_key(mrs[1]), (int64_t)fi_mr_key(mrs[1]));
}

static void close_both(struct fid_mr **mrs)
{
	for (int i = 0; i < 2; i++) {
		if (mrs[i])
			must("fi_close of a region", fi_close(&mrs[i]->fid), 0);
		mrs[i] = NULL;
	}
}

static void registering(struct fid_domain *domain, uint8_t *memory)
{
	struct iovec iov[2] = { { memory, 64 }, { memory + 64, 100 } };
	struct fi_mr_attr attr;
	struct fid_mr *mrs[2] = { NULL, NULL };

	for (size_t len = 0; len <= SIZE; len += SIZE) {
		pair("fi_mr_reg", sym_reg(domain, memory, len, ACCESS, 0, 1, 0, &mrs[0], memory),
		     fi_mr_reg(domain, memory, len, ACCESS, 0, 2, 0, &mrs[1], memory), mrs);
		if (mrs[0] && mrs[0]->fid.context != memory)
			must("the context of a region", 0, 1);
		close_both(mrs);
	}
	same("fi_mr_reg with a flag that no provider has",
	     sym_reg(domain, memory, SIZE, ACCESS, 0, 1, 1ull << 3, &mrs[0], NULL),
	     fi_mr_reg(domain, memory, SIZE, ACCESS, 0, 2, 1ull << 3, &mrs[1], NULL));
	close_both(mrs);
	for (size_t count = 1; count <= 2; count++) {
		pair("fi_mr_regv", sym_regv(domain, iov, count, ACCESS, 0, 1, 0, &mrs[0], NULL),
		     fi_mr_regv(domain, iov, count, ACCESS, 0, 2, 0, &mrs[1], NULL), mrs);
		close_both(mrs);
	}
	memset(&attr, 0, sizeof attr);
	attr.mr_iov = iov;
	attr.iov_count = 1;
	attr.access = ACCESS;
	attr.requested_key = 1;
	int symbol = sym_regattr(domain, &attr, 0, &mrs[0]);
	attr.requested_key = 2;
	pair("fi_mr_regattr", symbol, fi_mr_regattr(domain, &attr, 0, &mrs[1]), mrs);
	close_both(mrs);
}

static void controlling(struct fid_domain *domain, struct fid_cntr *cntr, uint8_t *memory)
{
	struct iovec iov = { memory, SIZE };
	struct fid_mr *mr;
	uint64_t base[2] = { 0, 0 }, key[2] = { 0, 0 };
	uint8_t raw[2][512];
	size_t size[2];

	if (fi_mr_reg(domain, memory, SIZE, ACCESS, 0, 3, 0, &mr, NULL)) {
		must("registering", 0, 1);
		return;
	}
	memset(raw, 0, sizeof raw);
	for (int round = 0; round < 3; round++) {
		/* too little room for any key, enough room, and an undefined flag */
		size[0] = size[1] = round ? sizeof raw[0] : 1;
		uint64_t flags = round == 2 ? 1 : 0;
		same("fi_mr_raw_attr", sym_raw_attr(mr, &base[0], raw[0], &size[0], flags),
		     fi_mr_raw_attr(mr, &base[1], raw[1], &size[1], flags));
		same("the size of a raw key", size[0], size[1]);
		same("the base of a raw key", base[0], base[1]);
		same("the bytes of a raw key", memcmp(raw[0], raw[1], sizeof raw[0]), 0);
	}
	int symbol = sym_map_raw(domain, base[0], raw[0], size[0], &key[0], 0);
	int inlined = fi_mr_map_raw(domain, base[0], raw[0], size[0], &key[1], 0);
	same("fi_mr_map_raw", symbol, inlined);
	if (weft)
		must("fi_mr_map_raw on weft", symbol, 0);
	if (!symbol && !inlined)
		same("fi_mr_unmap_key", sym_unmap_key(domain, key[1]), fi_mr_unmap_key(domain, key[0]));
	same("fi_mr_unmap_key of no key", sym_unmap_key(domain, 0x123456), fi_mr_unmap_key(domain, 0x123456));
	if (cntr)
		same("fi_mr_bind", sym_bind(mr, &cntr->fid, FI_SEND), fi_mr_bind(mr, &cntr->fid, FI_SEND));
	same("fi_mr_refresh", sym_refresh(mr, &iov, 1, 0), fi_mr_refresh(mr, &iov, 1, 0));
	same("fi_mr_enable", sym_enable(mr), fi_mr_enable(mr));
	must("fi_close", fi_close(&mr->fid), 0);
}

/* Arguments with which the inline functions would crash. */
static void nothing(void)
{
	struct fid_mr *mr = NULL;

	must("fi_mr_reg of no domain", sym_reg(NULL, &mr, 8, ACCESS, 0, 0, 0, &mr, NULL), -FI_EINVAL);
	must("fi_mr_regv of no domain", sym_regv(NULL, NULL, 0, 0, 0, 0, 0, &mr, NULL), -FI_EINVAL);
	must("fi_mr_regattr of no domain", sym_regattr(NULL, NULL, 0, &mr), -FI_EINVAL);
	must("fi_mr_desc of no region", (intptr_t)sym_desc(NULL), 0);
	must("fi_mr_key of no region", (int64_t)sym_key(NULL), (int64_t)FI_KEY_NOTAVAIL);
	must("fi_mr_raw_attr of no region", sym_raw_attr(NULL, NULL, NULL, NULL, 0), -FI_EINVAL);
	must("fi_mr_map_raw of no domain", sym_map_raw(NULL, 0, NULL, 0, NULL, 0), -FI_EINVAL);
	must("fi_mr_unmap_key of no domain", sym_unmap_key(NULL, 0), -FI_EINVAL);
	must("fi_mr_bind of no region", sym_bind(NULL, NULL, 0), -FI_EINVAL);
	must("fi_mr_refresh of no region", sym_refresh(NULL, NULL, 0, 0), -FI_EINVAL);
	must("fi_mr_enable of no region", sym_enable(NULL), -FI_EINVAL);
}

int main(int argc, char **argv)
{
	static uint8_t memory[SIZE];
	struct fi_info *hints = fi_allocinfo(), *list = NULL, *info;
	struct fid_fabric *fabric;
	struct fid_domain *domain;
	struct fid_cntr *cntr = NULL;
	struct fi_cntr_attr attr = { .events = FI_CNTR_EVENTS_COMP, .wait_obj = FI_WAIT_NONE };

	if (argc != 3 || !hints)
		return 2;
	weft = !strcmp(argv[2], "weft");
	load(argv[1]);
	hints->caps = FI_MSG | FI_RMA;
	hints->mode = ~0ull;
	hints->domain_attr->mr_mode = ~(FI_MR_BASIC | FI_MR_SCALABLE);
	hints->fabric_attr->prov_name = strdup(argv[2]);
	fi_getinfo(FI_VERSION(1, 17), NULL, NULL, 0, hints, &list);
	/* an entry of the provider itself, without a layer: a layer's domain is not the
	 * provider's */
	for (info = list; info && strcmp(info->fabric_attr->prov_name, argv[2]); info = info->next)
		;
	if (!info || fi_fabric(info->fabric_attr, &fabric, NULL) || fi_domain(fabric, info, &domain, NULL)) {
		fprintf(stderr, "no domain of %s\n", argv[2]);
		return 1;
	}
	if (fi_cntr_open(domain, &attr, &cntr, NULL))
		cntr = NULL;
	registering(domain, memory);
	controlling(domain, cntr, memory);
	nothing();
	if (cntr)
		must("fi_close of the counter", fi_close(&cntr->fid), 0);
	must("fi_close of the domain", fi_close(&domain->fid), 0);
	must("fi_close of the fabric", fi_close(&fabric->fid), 0);
	fi_freeinfo(list);
	fi_freeinfo(hints);
	printf("%d answers compared on %s\n", compared, argv[2]);
	return failed;
}
