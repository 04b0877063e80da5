#!/usr/bin/env python3
"""Registers memory from Python, through the fi_mr_* symbols of libweft-fi.so, without a C compiler.

`symbols.py LIBRARY`; FI_PROVIDER names the provider. Exits with 0, or with an exception.
"""

import ctypes as c
import sys

EINVAL, ETOOSMALL = 22, 257
EP_MSG = 1
KEY_NOTAVAIL = 2**64 - 1
ACCESS = 0x3F << 8  # read, write, receive, send, remote read, remote write

CLOSE = c.CFUNCTYPE(c.c_int, c.c_void_p)
OPEN_DOMAIN = c.CFUNCTYPE(c.c_int, c.c_void_p, c.c_void_p, c.POINTER(c.c_void_p), c.c_void_p)


class FidOps(c.Structure):
    _fields_ = [("size", c.c_size_t), ("close", CLOSE)]


class Fid(c.Structure):
    _fields_ = [("fclass", c.c_size_t), ("context", c.c_void_p), ("ops", c.POINTER(FidOps))]


class FabricOps(c.Structure):
    _fields_ = [("size", c.c_size_t), ("domain", OPEN_DOMAIN)]


class Fabric(c.Structure):
    _fields_ = [("fid", Fid), ("ops", c.POINTER(FabricOps))]


class Info(c.Structure):
    _fields_ = [
        ("next", c.c_void_p),
        ("caps", c.c_uint64),
        ("mode", c.c_uint64),
        ("addr_format", c.c_uint32),
        ("src_addrlen", c.c_size_t),
        ("dest_addrlen", c.c_size_t),
        *((name, c.c_void_p) for name in ("src_addr", "dest_addr", "handle", "tx", "rx", "ep", "domain", "fabric", "nic")),
    ]


class Iovec(c.Structure):
    _fields_ = [("base", c.c_void_p), ("len", c.c_size_t)]


def check(what, answer, wanted=0):
    if answer != wanted:
        raise AssertionError(f"{what}: {answer}, wanted {wanted}")


def close(handle):
    fid = c.cast(handle, c.POINTER(Fid)).contents
    check("fi_close", fid.ops.contents.close(handle))


def main(path):
    fabric_library, weft = c.CDLL("libfabric.so.1"), c.CDLL(path)
    weft.fi_mr_key.restype = c.c_uint64
    weft.fi_mr_desc.restype = c.c_void_p
    u64, pointer = c.c_uint64, c.c_void_p
    weft.fi_mr_reg.argtypes = [pointer, pointer, c.c_size_t, u64, u64, u64, u64, pointer, pointer]
    weft.fi_mr_regv.argtypes = weft.fi_mr_reg.argtypes
    weft.fi_mr_raw_attr.argtypes = [pointer, pointer, pointer, pointer, u64]
    weft.fi_mr_map_raw.argtypes = [pointer, u64, pointer, c.c_size_t, pointer, u64]
    weft.fi_mr_unmap_key.argtypes = [pointer, u64]
    for name in ("fi_mr_key", "fi_mr_desc", "fi_mr_enable"):
        getattr(weft, name).argtypes = [pointer]

    info_list = c.POINTER(Info)()
    check("fi_getinfo", fabric_library.fi_getinfo(1 << 16 | 17, None, None, c.c_uint64(0), None, c.byref(info_list)))
    info = info_list
    # layers above the provider have other types of endpoints
    while c.cast(info.contents.ep, c.POINTER(c.c_uint32))[0] != EP_MSG:
        info = c.cast(info.contents.next, c.POINTER(Info))
    fabric, domain, mr = pointer(), pointer(), pointer()
    check("fi_fabric", fabric_library.fi_fabric(pointer(info.contents.fabric), c.byref(fabric), None))
    ops = c.cast(fabric, c.POINTER(Fabric)).contents.ops.contents
    check("fi_domain", ops.domain(fabric, c.cast(info, pointer), c.byref(domain), None))

    memory = c.create_string_buffer(4096)
    at = c.addressof(memory)
    out = c.byref(mr)
    check("no bytes", weft.fi_mr_reg(domain, at, 0, ACCESS, 0, 0, 0, out, None), -EINVAL)
    check("fi_mr_reg", weft.fi_mr_reg(domain, at, 4096, ACCESS, 0, 0, 0, out, None))
    if weft.fi_mr_key(mr) == KEY_NOTAVAIL or not weft.fi_mr_desc(mr):
        raise AssertionError("no key or no descriptor")
    base, key, size = u64(), u64(), c.c_size_t(0)
    check("no room", weft.fi_mr_raw_attr(mr, c.byref(base), None, c.byref(size), 0), -ETOOSMALL)
    raw = c.create_string_buffer(size.value)
    check("fi_mr_raw_attr", weft.fi_mr_raw_attr(mr, c.byref(base), raw, c.byref(size), 0))
    check("the base of a raw key", base.value, at)
    check("fi_mr_map_raw", weft.fi_mr_map_raw(domain, base, raw, size, c.byref(key), 0))
    check("fi_mr_unmap_key", weft.fi_mr_unmap_key(domain, key))
    check("unmapped twice", weft.fi_mr_unmap_key(domain, key), -EINVAL)
    close(mr)
    parts = (Iovec * 2)(Iovec(at, 100), Iovec(at + 1000, 8))
    check("fi_mr_regv", weft.fi_mr_regv(domain, parts, 2, ACCESS, 0, 0, 0, out, None))
    close(mr)
    close(domain)
    close(fabric)
    fabric_library.fi_freeinfo(info_list)
    print("registered from Python")


if __name__ == "__main__":
    main(sys.argv[1])
