"""Endpoints that are closed and opened again in the same process: tests/conformance/c/rdm_reopen.c."""

import unittest

from lib import programs

from . import common


class RdmReopen(common.CProgram):
    SOURCE = "rdm_reopen"

    def all_forms(self, mode, count):
        for xrc in ("0", "1"):
            for progress in ("manual", "auto"):
                with self.subTest(mode=mode, xrc=xrc, progress=progress):
                    self.succeeds(programs.SYSTEM, mode, progress, count, WEFT_TEST_XRC=xrc)

    def test_an_endpoint_for_each_message(self):
        self.all_forms("brief", "8")

    def test_one_side(self):
        self.all_forms("same", "6")

    def test_both_sides(self):
        self.all_forms("both", "6")


if __name__ == "__main__":
    unittest.main()
