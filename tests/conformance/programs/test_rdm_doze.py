"""Processes that sleep between messages, by each wait object: tests/conformance/c/rdm_doze.c."""

import os
import unittest

from lib import programs

from . import common

# sleeps of each process
COUNT = "2000" if os.environ.get("WEFT_RDM_LONG") == "1" else "40"


class RdmDoze(common.CProgram):
    SOURCE = "rdm_doze"
    OPTIONS = ("-pthread",)

    def sleepers(self, *modes, objects=("fd",)):
        for mode in modes:
            for wait in objects:
                for xrc in ("0", "1"):
                    for progress in ("manual", "auto"):
                        with self.subTest(mode=mode, wait=wait, xrc=xrc, progress=progress):
                            self.succeeds(programs.SYSTEM, mode, wait, progress, COUNT, "2", WEFT_TEST_XRC=xrc)

    def test_waiting_calls(self):
        self.sleepers("sread", "one", "counter", objects=("unspec", "fd", "yield"))

    def test_two_threads(self):
        self.sleepers("two")

    def test_descriptors(self):
        self.sleepers("poll", "epoll", "edge")


if __name__ == "__main__":
    unittest.main()
