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

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

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
}  // extern "C"
#endif  // __cplusplus

#endif  /* WEFT_H */
