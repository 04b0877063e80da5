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
 Advice of weft_mr_ops.advise: make pages present, for reading.
 */
#define WEFT_ADVISE_PREFETCH 0

/*
 Advice: make pages present, for writing.
 */
#define WEFT_ADVISE_PREFETCH_WRITE 1

/*
 Advice: tell the device of pages that are present, and fault none in.
 */
#define WEFT_ADVISE_PREFETCH_NO_FAULT 2

/*
 Flag of weft_mr_ops.advise: return when it is done, with the errors of doing it.
 */
#define WEFT_ADVISE_FLUSH 1

/*
 Flag of weft_mr_attr.map_flags: the memory is at addr, or the call fails.
 */
#define WEFT_MAP_FIXED 1

/*
 Bytes of a handle that weft_mr_ops.mr_export gives. Later releases may have longer ones.
 */
#define WEFT_MR_HANDLE_SIZE 48

/*
 Bytes of a region.
 */
struct weft_mr_range {
  /*
   The region: open, and of the same device.
   */
  struct fid_mr *mr;
  /*
   The virtual address of the first byte, whatever the form of the domain's regions.
   */
  uint64_t addr;
  /*
   Bytes.
   */
  size_t len;
};

/*
 How memory of the provider is mapped and registered.
 */
struct weft_mr_attr {
  /*
   Bytes of this structure.
   */
  size_t size;
  /*
   The access of the region, as for fi_mr_reg(3).
   */
  uint64_t access;
  /*
   The key, as for fi_mr_reg(3).
   */
  uint64_t requested_key;
  /*
   The flags of fi_mr_reg(3).
   */
  uint64_t flags;
  /*
   Where the memory should begin, or NULL for anywhere: a hint, of which the page counts. With WEFT_MAP_FIXED a page.
   */
  void *addr;
  /*
   WEFT_MAP_FIXED, or 0.
   */
  uint64_t map_flags;
  /*
   The context of the region.
   */
  void *context;
};

/*
 Calls beside those of fi_mr(3), from fi_open_ops(&domain->fid, WEFT_MR_OPS, 0, (void **) &ops, NULL). The table lives
 as long as the provider is loaded and serves every domain. All calls are thread safe and return 0 or a negative errno
 of fi_errno(3); outputs are written on success only. Later releases append members: see WEFT_HAS_OP.
 */
struct weft_mr_ops {
  /*
   Bytes of this table.
   */
  size_t size;
  /*
   ibv_advise_mr(3) with the advice, the flags and the ranges as they are. Ranges of more than 1 GiB go to the device in
   parts. May block for as long as reading the pages takes.

   -FI_EINVAL: no open domain or region, a region of another device, an unknown flag; no ranges.
   -FI_EOPBADSTATE: a region that is not enabled, or not registered yet.
   -FI_EOPNOTSUPP: an unknown advice; the device has no such call, or no on-demand paging.
   -FI_ENOENT: a region that is not on demand.
   -FI_EPERM: WEFT_ADVISE_PREFETCH_WRITE of a region that nobody may write to; a region of another domain.
   -FI_EFAULT: a range outside its region; with WEFT_ADVISE_FLUSH, memory that is not there.
   These are what most drivers answer; the device's own errors are returned as they are.
   */
  int (*advise)(struct fid_domain *domain,
                uint32_t advice,
                uint32_t flags,
                const struct weft_mr_range *ranges,
                size_t count);
  /*
   Allocates memory that processes can share, zeros with all pages, huge ones where the kernel has them for shared memory, and
   registers it as fi_mr_reg(3) does. It is mapped writable, whatever the access.

   -FI_EINVAL: no open domain, no bytes, an attribute that is not as described.
   -FI_EADDRINUSE: WEFT_MAP_FIXED, and something is at the address.
   -FI_ENOMEM, -FI_EMFILE; and those of fi_mr_reg(3).
   */
  int (*mr_alloc)(struct fid_domain *domain,
                  size_t len,
                  const struct weft_mr_attr *attr,
                  void **addr,
                  struct fid_mr **mr);
  /*
   Closes a region of mr_alloc or mr_import as fi_close(3) does, which may be called as well. The memory is unmapped here, and
   ends when no process has it.

   -FI_EINVAL: any other region. -FI_EBUSY: there are parts of it, nothing has changed; or somebody is in the middle of an
   access, and the call can be repeated.
   */
  int (*mr_free)(struct fid_mr *mr);
  /*
   Makes a handle by which processes of the same user import the memory with this access or less, until the region is
   closed. size says how much room there is, and is set to the bytes of the handle. The same access has the same handle.

   -FI_ETOOSMALL: there is less room; size is set.
   -FI_EINVAL: no open region, unknown access. -FI_EACCES: access that the region does not have.
   -FI_EOPNOTSUPP: memory that is not of mr_alloc or mr_import. -FI_EMFILE, -FI_ENOMEM.
   */
  int (*mr_export)(struct fid_mr *mr, uint64_t access, void *handle, size_t *size);
  /*
   Maps the memory of another process's handle, or one's own, and registers it. The access is checked against what was
   granted; the memory is mapped writable if it has FI_RECV, FI_READ or FI_REMOTE_WRITE. len, unless NULL, is set to its bytes.

   -FI_EINVAL: no open domain, no handle (truncated or changed), an attribute that is not as described.
   -FI_ENOENT: the handle's region is closed, its process has ended, or nobody made it.
   -FI_EACCES: access that was not granted, or a process that this one may not look into.
   -FI_EADDRINUSE: WEFT_MAP_FIXED, and something is at the address.
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
   Opens an XRC domain (ibv_open_xrcd(3)): by the path of a file, or by a descriptor with path NULL; with fd -1 too it is one that
   nobody else finds. All processes that open the same file on a device get the same domain, which lives until the last one has
   closed it. oflags: O_CREAT makes it, and the file of a path, where there is none; O_EXCL refuses one that is there.

   -FI_EOPNOTSUPP: the device has no XRC. -FI_EAGAIN: nobody has it open, and O_CREAT is not given.
   -FI_EINVAL: somebody has it open, and O_EXCL is given; other flags; a path and a descriptor; no open domain.
   -FI_EBADF: no descriptor. -FI_ENOENT and others of open(2). -FI_ENOMEM, -FI_EBUSY.
   */
  int (*xrcd_open)(struct fid_domain *domain,
                   const char *path,
                   int fd,
                   int oflags,
                   struct fid **xrcd,
                   void *context);
  /*
   Closes it, as fi_close(3) does. -FI_EINVAL: not open. -FI_EBUSY: something of this process is in it.
   */
  int (*xrcd_close)(struct fid *xrcd);
  /*
   The device's count of pages of a region that advise and fi_mr_refresh(3) have made present since it was enabled: each time
   that they were asked for, whether or not they were there. Pages that a transfer touches first are not among them.

   -FI_EINVAL: no open region, pages is NULL. -FI_EOPBADSTATE: a region that is not enabled, or not registered yet.
   -FI_EOPNOTSUPP: a region that is not on demand; a device whose counts verbs can't read, all but soft0. mlx5 has them as
   page_prefetch of `rdma statistic show mr`.
   */
  int (*mr_prefetched)(struct fid_mr *mr, uint64_t *pages);
  /*
   Lets a memory monitor of the program say when memory changes, for the registrations that the domain keeps of local buffers,
   instead of userfaultfd(2). The monitor is libfabric's (rdma/fi_ext.h): fid.fclass is FI_CLASS_MEM_MONITOR, export_ops has
   all five calls; import_ops and fid.ops are NULL the first time. To be called before the domain has an endpoint or a
   shared receive context. Several domains may have the same monitor.

   On success import_ops->notify is there, and stays valid when nothing is imported any more. It may be called by any thread at any
   time, but not by a signal handler, for any range; also by the calls of export_ops. What overlaps the range is used by no
   operation that is posted after it returns. fi_close(&monitor->fid) is -FI_EBUSY while a domain has the monitor, and does
   nothing else.

   start is called with the first domain, stop when the last one is closed; then the monitor may be freed. subscribe and
   unsubscribe have whole pages; each range is unsubscribed from once, the last ones when the domain is closed. A range can be
   subscribed to again before that, so they count. valid has a range as it was subscribed to, before each use of its
   registration; it must neither block nor allocate. These three are called with an endpoint's lock held: they must not wait
   for another thread that uses the domain, nor call libfabric. A range that can't be subscribed to is registered for each
   operation. In a forked child nothing is called and nothing is kept.

   -FI_EINVAL: no open domain, no such monitor, a call is missing. -FI_EBUSY: the domain watches memory already, or somebody
   else has imported the monitor. -FI_EAGAIN: another thread is starting or stopping it.
   -FI_EOPNOTSUPP: nothing is kept in this domain: it has FI_MR_LOCAL, the device needs no registrations, or the parameters
   say so. -FI_ENOSYS, -FI_ENOSPC; and what start returns.
   */
  int (*monitor_import)(struct fid_domain *domain, struct fid_mem_monitor *monitor);
};

#ifdef __cplusplus
extern "C" {
#endif /* __cplusplus */

/*
 Called by libfabric when it has loaded the library: finds the libfabric that called, by the return
 address, and returns the provider. NULL if no libfabric is there, or if a second, different one
 calls in the same process.
 */
struct fi_provider *fi_prov_ini(void);

/*
 The version of the provider as libfabric writes versions: the major number shifted left by 16, or'ed
 with the minor one.
 */
uint32_t weft_version(void);

/*
 fi_mr_reg(3): registers one buffer.

 # Safety
 As the C function of this name.
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
 As the C function of this name.
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
 fi_mr_regattr(3): registers what the attributes say. They have the layout of the API version that the
 fabric was opened with.

 # Safety
 As the C function of this name.
 */
int fi_mr_regattr(struct fid_domain *domain,
                  const struct fi_mr_attr *attr,
                  uint64_t flags,
                  struct fid_mr **mr);

/*
 fi_mr_desc(3): the descriptor for local operations.

 # Safety
 As the C function of this name.
 */
void *fi_mr_desc(struct fid_mr *mr);

/*
 fi_mr_key(3): the key for peers; FI_KEY_NOTAVAIL where there is none.

 # Safety
 As the C function of this name.
 */
uint64_t fi_mr_key(struct fid_mr *mr);

/*
 fi_mr_raw_attr(3): the raw key, and the address that it begins at.

 # Safety
 As the C function of this name.
 */
int fi_mr_raw_attr(struct fid_mr *mr,
                   uint64_t *base_addr,
                   uint8_t *raw_key,
                   size_t *key_size,
                   uint64_t flags);

/*
 fi_mr_map_raw(3): makes a key for operations of a peer's raw key.

 # Safety
 As the C function of this name.
 */
int fi_mr_map_raw(struct fid_domain *domain,
                  uint64_t base_addr,
                  uint8_t *raw_key,
                  size_t key_size,
                  uint64_t *key,
                  uint64_t flags);

/*
 fi_mr_unmap_key(3): undoes fi_mr_map_raw.

 # Safety
 As the C function of this name.
 */
int fi_mr_unmap_key(struct fid_domain *domain, uint64_t key);

/*
 fi_mr_bind(3): binds a counter or an endpoint to a region.

 # Safety
 As the C function of this name.
 */
int fi_mr_bind(struct fid_mr *mr, struct fid *bfid, uint64_t flags);

/*
 fi_mr_refresh(3): tells that pages of a region have changed.

 # Safety
 As the C function of this name.
 */
int fi_mr_refresh(struct fid_mr *mr, const struct iovec *iov, size_t count, uint64_t flags);

/*
 fi_mr_enable(3): makes a region that was made disabled accessible.

 # Safety
 As the C function of this name.
 */
int fi_mr_enable(struct fid_mr *mr);

#ifdef __cplusplus
}  /* extern "C" */
#endif  /* __cplusplus */

#endif  /* WEFT_H */
