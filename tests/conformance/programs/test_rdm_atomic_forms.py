"""Atomic operations of endpoints with many peers, in all forms:
tests/conformance/c/rdm_atomic_forms.c.

With WEFT_RDM_LONG=1 the initiators count to 1,000,000 each.
"""

import os

from lib import programs

from . import common

COUNT = 1000000 if os.environ.get("WEFT_RDM_LONG") == "1" else 200000


class RdmAtomicForms(common.CProgram):
    SOURCE = "rdm_atomic_forms"

    def succeeds(self, mode, *count, libfabric=programs.SYSTEM, packets=True):
        # executed by the device; by the target's processor
        for device in ("1", "0") if packets else ("1",):
            for progress in ("manual", "auto"):
                with self.subTest(progress=progress, device=device):
                    counts = [str(number) for number in count]
                    super().succeeds(libfabric, mode, progress, *counts, SOFTVERBS_ATOMICS=device)

    @common.per_release
    def test_what_is_supported(self, libfabric):
        self.succeeds("all", libfabric=libfabric)

    @common.per_release
    def test_each_operation(self, libfabric):
        self.succeeds("each", libfabric=libfabric)

    def test_as_many_operands_as_possible(self):
        self.succeeds("most")

    def test_bytes_beside_an_operand(self):
        self.succeeds("neighbours")

    def test_initiators_that_count(self):
        self.succeeds("sum", COUNT)

    def test_a_target_that_calls_nothing(self):
        self.succeeds("silent")

    def test_a_target_that_is_stopped(self):
        self.succeeds("stopped", packets=False)

    def test_refused_operations(self):
        self.succeeds("refused")

    def test_offsets(self):
        self.succeeds("offsets")

    def test_order(self):
        self.succeeds("order")

    def test_counters(self):
        self.succeeds("counters")

    def test_the_endpoint_itself(self):
        self.succeeds("self")


class RdmAtomicFormsOnXrc(RdmAtomicForms):
    XRC = True
