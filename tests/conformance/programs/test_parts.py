"""Regions whose memory is mapped page by page (FI_MR_MMU_NOTIFY), on a device without on-demand
paging.
"""

import os
import re
import subprocess
import tempfile
import unittest

from lib import programs

from . import common

SOURCE = programs.TOP / "tests" / "conformance" / "c" / "parts.c"
PARTS = 65536


class Parts(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.program = os.path.join(cls.folder.name, "parts")
        command = ["gcc", "-O1", "-g", "-Wall", "-Wextra", "-Werror", f"-I{programs.TOP / 'include'}"]
        subprocess.run([*command, "-o", cls.program, SOURCE, "-lfabric", "-pthread"], check=True)

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def run_program(self, libfabric, pages, how):
        env = libfabric.env(SOFTVERBS_ODP="0", FI_LOG_LEVEL="warn")
        command = [self.program, "weft", "127.0.0.1", str(pages), how]
        ended = programs.run(command, env, seconds=300)
        self.assertEqual(ended.status, 0, ended)
        print(ended.out, end="", flush=True)
        return ended

    @common.per_release
    def test_64_pages(self, libfabric):
        for how in ("each", "few"):
            self.run_program(libfabric, 64, how)

    def test_that_parts_are_as_many_as_memory_has(self):
        for how in ("each", "few"):
            ended = self.run_program(programs.SYSTEM, PARTS, how)
        # A change takes the same time with 32,768 parts as with 1: otherwise the second half takes
        # three times as long as the first.
        for first, second in re.findall(r"([\d.]+) us each in the first half, ([\d.]+) us in the second", ended.out):
            self.assertLess(float(second), 2.5 * float(first), ended)
