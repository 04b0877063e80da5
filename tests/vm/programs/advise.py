"""The results of ibv_advise_mr(3) on rxe for on-demand regions, without weft: every advice, flag
and error, and the resident pages. weft passes these results on, but has no on-demand regions here:
see cases/18-weft-table.sh.

Pinned regions are left out: rxe takes them for on-demand ones, and Linux 7.2 panics.
"""

import ctypes
import mmap
import sys

from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.pyverbs_error import PyverbsRDMAError
from pyverbs.wr import SGE

EFAULT, EINVAL, EOPNOTSUPP = 14, 22, 95
LOCAL_WRITE, ON_DEMAND = 1, 1 << 6
PREFETCH, PREFETCH_WRITE, NO_FAULT, UNKNOWN = range(4)
FLUSH = 1
PAGE = 4096

libc = ctypes.CDLL(None, use_errno=True)


class Pages:
    def __init__(self, count):
        self.map = mmap.mmap(-1, count * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.map.madvise(mmap.MADV_NOHUGEPAGE)
        self.addr = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.count = count

    def resident(self):
        there = (ctypes.c_ubyte * self.count)()
        assert libc.mincore(ctypes.c_void_p(self.addr), ctypes.c_size_t(self.count * PAGE), there) == 0
        return sum(page & 1 for page in there)


def region(pd, pages, access=ON_DEMAND | LOCAL_WRITE):
    return MR(pd, pages.count * PAGE, access, address=pages.addr)


def advise(pd, advice, flags, *pieces):
    try:
        pd.advise_mr(advice, flags, [SGE(*piece) for piece in pieces])
    except PyverbsRDMAError as error:
        return error.error_code
    return 0


def main():
    context = Context(name="rxe0")
    pd, other = PD(context), PD(context)
    wrong = []

    def expect(what, got, wanted):
        print(f"{what}: {got}", flush=True)
        if got != wanted:
            wrong.append(f"{what}: {got}, not {wanted}")

    for flags in (0, FLUSH):
        for advice, fresh in ((PREFETCH, 4), (PREFETCH_WRITE, 4), (NO_FAULT, 0)):
            pages = Pages(16)
            mr = region(pd, pages)
            expect(f"advice {advice} flags {flags} before", pages.resident(), 0)
            expect(f"advice {advice} flags {flags}", advise(pd, advice, flags, (pages.addr + 2 * PAGE + 5, 3 * PAGE, mr.lkey)), 0)
            if flags:  # otherwise a kernel worker does it later
                expect(f"advice {advice} flags {flags} pages", pages.resident(), fresh)
            mr.close()
        pages = Pages(4)
        mr, read_only = region(pd, pages), region(pd, pages, ON_DEMAND)
        key = (pages.addr, 8)
        expect(f"unknown advice flags {flags}", advise(pd, UNKNOWN, flags, (*key, mr.lkey)), EOPNOTSUPP)
        expect(f"no pieces flags {flags}", advise(pd, PREFETCH, flags), EINVAL)
        expect(f"unknown key flags {flags}", advise(pd, PREFETCH, flags, (*key, mr.lkey ^ 1)), EINVAL)
        expect(f"another domain flags {flags}", advise(other, PREFETCH, flags, (*key, mr.lkey)), EINVAL)
        expect(f"write, read-only flags {flags}", advise(pd, PREFETCH_WRITE, flags, (*key, read_only.lkey)), EINVAL)
        expect(f"beyond flags {flags}", advise(pd, PREFETCH, flags, (pages.addr + 4 * PAGE, 8, mr.lkey)), EFAULT if flags else 0)
        mr.close()
        read_only.close()
    pages = Pages(1)
    mr = region(pd, pages)
    expect("unknown flag", advise(pd, PREFETCH, 2, (pages.addr, 8, mr.lkey)), EINVAL)
    mr.close()
    for line in wrong:
        print(f"FAILED {line}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
