"""Passive endpoints: tests/conformance/c/passive.c."""

import unittest

from . import common


class Passive(common.CProgram):
    SOURCE = "passive"

    @common.per_release
    def test_each_mode(self, libfabric):
        for mode in ["setname", "reserved", "renamed", "active", "refused", "older"]:
            with self.subTest(mode=mode):
                self.succeeds(libfabric, mode)


if __name__ == "__main__":
    unittest.main()
