"""Atomics of endpoints with many peers: tests/conformance/c/rdm_atomic.c."""

import os

from lib import programs

from . import common

LONG = os.environ.get("WEFT_RDM_LONG") == "1"


class RdmAtomic(common.CProgram):
    SOURCE = "rdm_atomic"

    def succeeds(self, mode, *count):
        for progress in ("manual", "auto"):
            # with and without rings
            for ring in ("1", "0"):
                with self.subTest(progress=progress, ring=ring):
                    more = {"SOFTVERBS_RING": ring}
                    super().succeeds(programs.SYSTEM, mode, progress, *count, **more)

    def test_each_operation_on_each_datatype(self):
        self.succeeds("values")

    def test_each_form_of_a_call(self):
        self.succeeds("forms")

    def test_mixed_operations_add_up(self):
        self.succeeds("sums", "100000" if LONG else "2000")

    def test_bytes_beside_the_elements(self):
        self.succeeds("neighbours")

    def test_what_is_refused(self):
        self.succeeds("refused")

    def test_counters_of_a_region(self):
        self.succeeds("counted")

    def test_fences(self):
        self.succeeds("fence")
