"""Capabilities of endpoints with many peers: tests/conformance/c/rdm_caps.c."""

from lib import programs

from . import common


class RdmCaps(common.CProgram):
    SOURCE = "rdm_caps"

    def test_each_call(self):
        for libfabric in common.RELEASES:
            with self.subTest(libfabric=libfabric.__name__):
                self.succeeds(libfabric(), "calls")

    def test_operations_of_peers(self):
        # with and without rings; executed by the device, by the target's processor
        for ring, device in (("1", "1"), ("0", "1"), ("1", "0"), ("0", "0")):
            with self.subTest(ring=ring, device=device):
                self.succeeds(programs.SYSTEM, "target", SOFTVERBS_RING=ring, SOFTVERBS_ATOMICS=device)


class RdmCapsOnXrc(RdmCaps):
    XRC = True
