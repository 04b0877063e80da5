"""The calls of an OpenSHMEM library on endpoints with many peers:
tests/conformance/c/rdm_shmem.c.
"""

from lib import programs

from . import common


class RdmShmem(common.CProgram):
    SOURCE = "rdm_shmem"

    def succeeds(self, mode):
        for progress in ("manual", "auto"):
            with self.subTest(progress=progress):
                super().succeeds(programs.SYSTEM, mode, progress)

    def test_without_events(self):
        self.succeeds("plain")

    def test_events(self):
        self.succeeds("event")

    def test_events_of_bound_regions(self):
        self.succeeds("bits")

    def test_virtual_addresses(self):
        self.succeeds("virtual")

    def test_counters_of_an_enabled_endpoint(self):
        self.succeeds("late")


class RdmShmemOnXrc(RdmShmem):
    XRC = True
