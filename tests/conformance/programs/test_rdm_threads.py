"""Many threads on one endpoint: tests/conformance/c/rdm_threads.c."""

import unittest

from lib import programs

from . import common


class RdmThreads(common.CProgram):
    SOURCE = "rdm_threads"
    OPTIONS = ("-pthread",)

    def threads(self, mode):
        for xrc in ("0", "1"):
            for progress in ("manual", "auto"):
                with self.subTest(mode=mode, xrc=xrc, progress=progress):
                    self.succeeds(programs.SYSTEM, mode, progress, "300", WEFT_TEST_XRC=xrc)

    def test_a_thread_that_polls(self):
        self.threads("polls")

    def test_threads_that_sleep(self):
        self.threads("sleeps")

    def test_four_threads_that_read(self):
        self.threads("several")


if __name__ == "__main__":
    unittest.main()
