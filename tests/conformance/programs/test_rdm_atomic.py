"""Atomics of endpoints with many peers: tests/conformance/c/rdm_atomic.c."""

import os

from lib import programs

from . import common

LONG = os.environ.get("WEFT_RDM_LONG") == "1"


class RdmAtomic(common.CProgram):
    SOURCE = "rdm_atomic"

    def succeeds(self, mode, *count):
        for progress in ("manual", "auto"):
            # with and without rings; executed by the device, by the target's processor
            for ring, device in (("1", "1"), ("0", "1"), ("1", "0"), ("0", "0")):
                with self.subTest(progress=progress, ring=ring, device=device):
                    more = {"SOFTVERBS_RING": ring, "SOFTVERBS_ATOMICS": device}
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

    def test_one_process_without_atomics_of_the_device(self):
        """Packets to the target, or from one initiator, exclude the others."""
        for process in ("target", "initiator"):
            for mode, *count in (("sums", "100000" if LONG else "20000"), ("counted",), ("values",), ("fence",)):
                with self.subTest(process=process, mode=mode):
                    more = {"WITHOUT_DEVICE_ATOMICS": process}
                    common.CProgram.succeeds(self, programs.SYSTEM, mode, "manual", *count, **more)
