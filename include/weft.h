/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */
/* What libweft-fi.so exports. Generated from provider/src/exports: `make header`. */

#ifndef WEFT_H
#define WEFT_H

#include <stdint.h>
#include <rdma/fabric.h>
#include <rdma/providers/fi_prov.h>

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

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* WEFT_H */
