/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */
/* What libweft-fi.so exports. Generated from provider/src/exports: `make header`. */

#ifndef WEFT_H
#define WEFT_H

#include <stddef.h>
#include <stdint.h>

#ifndef WEFT_STANDALONE
#include <rdma/fi_domain.h>
#include <rdma/providers/fi_prov.h>
#else
struct fi_provider;
struct fid;
struct fid_domain;
struct fid_mr;
struct fi_mr_attr;
struct iovec;
#endif
struct fid_mem_monitor; /* of rdma/fi_ext.h */

/* The name of struct weft_mr_ops for fi_open_ops(3). */
#define WEFT_MR_OPS "weft_mr_ops"
/* Whether a table from fi_open_ops has a member. */
#define WEFT_HAS_OP(ops, member) \
  ((ops)->size > offsetof(struct weft_mr_ops, member) && (ops)->member)

/*
 Advice of weft_mr_ops.advise: make pages present for reading.
 */
#define WEFT_ADVISE_PREFETCH 0

/*
 Advice of weft_mr_ops.advise: make pages present for writing.
 */
#define WEFT_ADVISE_PREFETCH_WRITE 1

/*
 Advice of weft_mr_ops.advise: map pages that are present in the device, without page faults.
 */
#define WEFT_ADVISE_PREFETCH_NO_FAULT 2

/*
 Flag of weft_mr_ops.advise: return after the advice has taken effect, with its errors.
 */
#define WEFT_ADVISE_FLUSH 1

/*
 Flag of weft_mr_attr.map_flags: fail unless the memory can be mapped at addr.
 */
#define WEFT_MAP_FIXED 1

/*
 Length in bytes of a handle from weft_mr_ops.mr_export. Later releases may have longer handles.
 */
#define WEFT_MR_HANDLE_SIZE 48

/*
 A range of bytes of a region.
 */
struct weft_mr_range {
  /*
   The region: open, and of the same device.
   */
  struct fid_mr *mr;
  /*
   Virtual address of the first byte, also if the domain is without FI_MR_VIRT_ADDR.
   */
  uint64_t addr;
  /*
   Length in bytes.
   */
  size_t len;
};

/*
 Attributes of memory that the provider allocates or imports: its mapping and its registration.
 */
struct weft_mr_attr {
  /*
   Size of this structure in bytes; the caller sets it.
   */
  size_t size;
  /*
   Access rights, as for fi_mr_reg(3).
   */
  uint64_t access;
  /*
   Requested key, as for fi_mr_reg(3).
   */
  uint64_t requested_key;
  /*
   Flags, as for fi_mr_reg(3).
   */
  uint64_t flags;
  /*
   NULL, or a hint for the address of the memory: any address in its first page. With
   WEFT_MAP_FIXED the address of a page.
   */
  void *addr;
  /*
   WEFT_MAP_FIXED, or 0.
   */
  uint64_t map_flags;
  /*
   Context of the region.
   */
  void *context;
};

/*
 Operations beyond fi_mr(3), from fi_open_ops(&domain->fid, WEFT_MR_OPS, 0, (void **) &ops,
 NULL). The table serves every domain and is valid while the provider is loaded. All operations
 are thread safe and return 0 or a negative errno of fi_errno(3). Outputs are written on success
 only, except for size of mr_export. Later releases append members: see WEFT_HAS_OP.
 */
struct weft_mr_ops {
  /*
   Size of this table in bytes.
   */
  size_t size;
  /*
   ibv_advise_mr(3) with the advice, the flags and the ranges as given. Ranges of more than 1
   GiB are passed to the device as several. May block until the pages have been read from
   storage.

   -FI_EINVAL: no open domain or region, a region of another device, an unknown flag, or no
   range.
   -FI_EOPBADSTATE: a region that is not enabled, or not registered yet.
   -FI_EOPNOTSUPP: an unknown advice, or a device without this verb or without on-demand
   paging.
   -FI_ENOENT: a region that is not on demand.
   -FI_EPERM: WEFT_ADVISE_PREFETCH_WRITE for a region without write access, or a region of
   another domain.
   -FI_EFAULT: a range outside its region; with WEFT_ADVISE_FLUSH, memory that is not mapped.
   These are the errors of most drivers; other errors of the device are returned unchanged.
   */
  int (*advise)(struct fid_domain *domain,
                uint32_t advice,
                uint32_t flags,
                const struct weft_mr_range *ranges,
                size_t count);
  /*
   Allocates memory that processes can share, and registers it as fi_mr_reg(3) does. The memory
   is zeros with all pages present, huge ones if the kernel permits them for shared memory. It
   is mapped writable for every access. Blocks while the kernel clears the pages.

   -FI_EINVAL: no open domain, len is 0, addr or mr is NULL, or an invalid attribute.
   -FI_EBADFLAGS: an unknown bit in flags or map_flags.
   -FI_EADDRINUSE: WEFT_MAP_FIXED, and memory is mapped at the address.
   -FI_ENOMEM: among others, len exceeds the memory that is available. -FI_EMFILE; and those
   of fi_mr_reg(3).
   */
  int (*mr_alloc)(struct fid_domain *domain,
                  size_t len,
                  const struct weft_mr_attr *attr,
                  void **addr,
                  struct fid_mr **mr);
  /*
   Closes a region of mr_alloc or mr_import, as fi_close(3) does, which may be called instead.
   Unmaps the memory in this process; it is freed when no process has it mapped.

   -FI_EINVAL: not an open region of mr_alloc or mr_import.
   -FI_EBUSY: the region has sub-regions, and nothing has changed; or an access of a peer or an
   operation of this process is under way, and the call can be repeated.
   */
  int (*mr_free)(struct fid_mr *mr);
  /*
   Makes a handle with which processes of the same user can import the memory with this access
   or less, until the region is closed. size is the length of the buffer, and is set to the
   length of the handle. Equal access returns the same handle.

   -FI_ETOOSMALL: the buffer is too small; size is set.
   -FI_EINVAL: no open region, unknown access, or handle or size is NULL.
   -FI_EACCES: access that the region does not have.
   -FI_EOPNOTSUPP: not a region of mr_alloc or mr_import. -FI_EMFILE, -FI_ENOMEM.
   */
  int (*mr_export)(struct fid_mr *mr, uint64_t access, void *handle, size_t *size);
  /*
   Maps the memory of a handle, of this or another process, and registers it. The access must
   have been granted by mr_export; the memory is mapped writable if it contains FI_RECV,
   FI_READ or FI_REMOTE_WRITE. len, unless NULL, is set to the length of the memory in bytes.

   -FI_EINVAL: no open domain, not a handle (truncated or changed), addr or mr is NULL, or an
   invalid attribute.
   -FI_EBADFLAGS: an unknown bit in flags or map_flags.
   -FI_ENOENT: the exported region is closed, its process has ended, or the handle is forged.
   -FI_EACCES: access that was not granted, or a process whose files this one may not open.
   -FI_EADDRINUSE: WEFT_MAP_FIXED, and memory is mapped at the address.
   -FI_ENOMEM, -FI_EMFILE; and those of fi_mr_reg(3).
   */
  int (*mr_import)(struct fid_domain *domain,
                   const void *handle,
                   size_t size,
                   const struct weft_mr_attr *attr,
                   void **addr,
                   size_t *len,
                   struct fid_mr **mr);
  /*
   Opens an XRC domain (ibv_open_xrcd(3)): of the file at path; with path NULL, of the file
   that the descriptor fd refers to; with fd negative too, a private one. All processes that
   open the same file on a device get the same domain, which exists until the last of them has
   closed it. oflags: O_CREAT creates the domain, and the file at path, if it does not exist;
   O_EXCL refuses an existing domain.

   -FI_EOPNOTSUPP: the device has no XRC.
   -FI_EAGAIN: no process has the domain open, and O_CREAT is not given.
   -FI_EINVAL: a process has the domain open, and O_EXCL is given; other flags; both path and
   fd; xrcd is NULL; or no open domain.
   -FI_EBADF: fd is not a descriptor. -FI_EBUSY: soft0 could not get the lock of its XRC
   domains for 5 s.
   -FI_ENOENT and others of open(2). -FI_ENOMEM.
   */
  int (*xrcd_open)(struct fid_domain *domain,
                   const char *path,
                   int fd,
                   int oflags,
                   struct fid **xrcd,
                   void *context);
  /*
   Closes an XRC domain, as fi_close(3) does. -FI_EINVAL: not open. -FI_EBUSY: this process has
   a queue pair or shared receive queue in it.
   */
  int (*xrcd_close)(struct fid *xrcd);
  /*
   The device's number of pages of a region that advise and fi_mr_refresh(3) have prefetched
   since it was enabled. Each request counts each page, also one that was present. Pages that a
   transfer has faulted in are not counted.

   -FI_EINVAL: no open region, or pages is NULL.
   -FI_EOPBADSTATE: a region that is not enabled, or not registered yet.
   -FI_EOPNOTSUPP: a region that is not on demand, or a device without a count that verbs can
   read: only soft0 has one. mlx5 has it as page_prefetch of `rdma statistic show mr`.
   */
  int (*mr_prefetched)(struct fid_mr *mr, uint64_t *pages);
  /*
   Uses a memory monitor of the program, instead of userfaultfd(2), to detect changes of memory
   for the domain's cache of local registrations. The monitor is libfabric's (rdma/fi_ext.h):
   fid.fclass is FI_CLASS_MEM_MONITOR, export_ops has all five functions, import_ops is NULL
   for the first domain, and fid.ops is set if it is NULL. Must be called before an
   endpoint of the domain is enabled. Several domains may have the same monitor.

   On success import_ops->notify is set, and stays valid after the last domain is closed. Any
   thread may call it at any time and for any range, also from the functions of export_ops, but
   not from a signal handler. No operation that is posted after its return uses a cached
   registration that overlaps the range. fi_close(&monitor->fid) returns -FI_EBUSY while a
   domain has the monitor, and has no other effect.

   start is called with the first domain, and stop when the last one is closed; after stop the
   monitor may be freed. subscribe and unsubscribe get whole pages. Each subscription is
   unsubscribed once, at the latest when the domain is closed; a range can be subscribed again
   before that, so the monitor must count. valid gets a range as it was subscribed, before each
   use of its registration, and must not block or allocate. These three are called with an
   endpoint's lock held: they must not wait for another thread that uses the domain, and must
   not call libfabric. A range that cannot be subscribed is registered for each operation. In a
   forked child no function is called and no registration is cached.

   -FI_EINVAL: no open domain, not such a monitor, or a function is missing.
   -FI_EBUSY: the domain has a monitor, or an endpoint of it has been enabled, or a shared
   receive context for FI_EP_MSG opened; or another library has imported the monitor.
   -FI_EAGAIN: another thread is starting or stopping the monitor.
   -FI_EOPNOTSUPP: the domain caches no registrations: it has FI_MR_LOCAL, the device needs no
   registrations, or the parameters give the cache no room. FI_MR_CACHE_MONITOR=disabled is
   about the provider's own monitor, and permits this call.
   -FI_ENOSYS: forks cannot be detected. -FI_ENOSPC: the process has 64 caches. Those of start.
   */
  int (*monitor_import)(struct fid_domain *domain, struct fid_mem_monitor *monitor);
};

#ifdef __cplusplus
extern "C" {
#endif /* __cplusplus */

/*
 fi_provider(3): libfabric calls this when it has loaded the library. Finds the calling libfabric
 by the return address, and returns the provider. NULL: the caller is no libfabric, or a second,
 different libfabric in the same process.
 */
struct fi_provider *fi_prov_ini(void);

/*
 The version of the provider in libfabric's encoding (FI_VERSION): the major number shifted left
 by 16 bits, plus the minor number.
 */
uint32_t weft_version(void);

/*
 fi_mr_reg(3): registers one buffer.

 # Safety
 The arguments are as fi_mr(3) requires.
 */
int fi_mr_reg(struct fid_domain *domain,
              const void *buf,
              size_t len,
              uint64_t access,
              uint64_t offset,
              uint64_t requested_key,
              uint64_t flags,
              struct fid_mr **mr,
              void *context);

/*
 fi_mr_regv(3): registers several buffers as one region.

 # Safety
 The arguments are as fi_mr(3) requires.
 */
int fi_mr_regv(struct fid_domain *domain,
               const struct iovec *iov,
               size_t count,
               uint64_t access,
               uint64_t offset,
               uint64_t requested_key,
               uint64_t flags,
               struct fid_mr **mr,
               void *context);

/*
 fi_mr_regattr(3): registers by attributes. Their layout is that of the API version with which
 the fabric was opened.

 # Safety
 The arguments are as fi_mr(3) requires.
 */
int fi_mr_regattr(struct fid_domain *domain,
                  const struct fi_mr_attr *attr,
                  uint64_t flags,
                  struct fid_mr **mr);

/*
 fi_mr_desc(3): the descriptor of a region for local operations.

 # Safety
 The region is NULL or open, as fi_mr(3) requires.
 */
void *fi_mr_desc(struct fid_mr *mr);

/*
 fi_mr_key(3): the key of a region for peers; FI_KEY_NOTAVAIL if it has none.

 # Safety
 The region is NULL or open, as fi_mr(3) requires.
 */
uint64_t fi_mr_key(struct fid_mr *mr);

/*
 fi_mr_raw_attr(3): the raw key of a region and its base address.

 # Safety
 The arguments are as fi_mr(3) requires.
 */
int fi_mr_raw_attr(struct fid_mr *mr,
                   uint64_t *base_addr,
                   uint8_t *raw_key,
                   size_t *key_size,
                   uint64_t flags);

/*
 fi_mr_map_raw(3): maps a peer's raw key to a key for operations.

 # Safety
 The arguments are as fi_mr(3) requires.
 */
int fi_mr_map_raw(struct fid_domain *domain,
                  uint64_t base_addr,
                  uint8_t *raw_key,
                  size_t key_size,
                  uint64_t *key,
                  uint64_t flags);

/*
 fi_mr_unmap_key(3): unmaps a key of fi_mr_map_raw.

 # Safety
 The arguments are as fi_mr(3) requires.
 */
int fi_mr_unmap_key(struct fid_domain *domain, uint64_t key);

/*
 fi_mr_bind(3): binds a counter or an endpoint to a region.

 # Safety
 The arguments are as fi_mr(3) requires.
 */
int fi_mr_bind(struct fid_mr *mr, struct fid *bfid, uint64_t flags);

/*
 fi_mr_refresh(3): reports that pages of a region have changed.

 # Safety
 The arguments are as fi_mr(3) requires.
 */
int fi_mr_refresh(struct fid_mr *mr, const struct iovec *iov, size_t count, uint64_t flags);

/*
 fi_mr_enable(3): enables a region that was created disabled.

 # Safety
 The arguments are as fi_mr(3) requires.
 */
int fi_mr_enable(struct fid_mr *mr);

#ifdef __cplusplus
}  /* extern "C" */
#endif  /* __cplusplus */

#endif  /* WEFT_H */
