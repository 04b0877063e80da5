"""Lists of operations with FI_MORE on few addresses: tests/conformance/c/rdm_lists.c.

With WEFT_RDM_LONG=1 each run has 2,000 rounds from a random seed, which a failure prints.
"""

import os
import random

from lib import programs

from . import common

LONG = os.environ.get("WEFT_RDM_LONG") == "1"
ROUNDS = "2000" if LONG else "150"


class Lists(common.CProgram):
    SOURCE = "rdm_lists"
    OPTIONS = ("-D_GNU_SOURCE",)

    def succeeds(self, mode):
        for atomics in ("1", "0"):
            for ring, progress in (("1", "manual"), ("0", "auto")):
                seed = str(random.getrandbits(32)) if LONG else "20"
                with self.subTest(atomics=atomics, ring=ring, progress=progress, seed=seed):
                    more = {"SOFTVERBS_ATOMICS": atomics, "SOFTVERBS_RING": ring}
                    super().succeeds(programs.SYSTEM, mode, progress, ROUNDS, seed, **more)

    def test_at_processes_that_make_no_call(self):
        self.succeeds("silent")

    def test_between_all_processes(self):
        self.succeeds("busy")

    def test_selective_completion(self):
        self.succeeds("selective")


class ListsOnXrc(Lists):
    XRC = True
