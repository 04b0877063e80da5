"""Passive endpoints: tests/conformance/c/passive.c."""

import unittest

from . import common


class Passive(common.CProgram):
    SOURCE = "passive"

    @common.per_release
    def test_each_mode(self, libfabric):
        for mode in ["setname", "reserved", "renamed", "active", "refused", "options", "older"]:
            with self.subTest(mode=mode):
                self.succeeds(libfabric, mode)

    def test_options_of_a_small_inject_size(self):
        for size in "05":
            with self.subTest(size=size):
                self.succeeds(common.programs.SYSTEM, "options", FI_WEFT_INLINE_SIZE=size)


if __name__ == "__main__":
    unittest.main()
