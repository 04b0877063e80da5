"""The programs in examples/: they build, and behave, as their comments state."""

import os
import subprocess
import tempfile
import unittest

from lib import cargo, programs

from . import common

EXAMPLES = programs.TOP / "examples"
FLAGS = ["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{programs.TOP / 'include'}"]


class Examples(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        for source in EXAMPLES.glob("*.c"):
            program = os.path.join(cls.folder.name, source.stem)
            subprocess.run(["gcc", *FLAGS, "-o", program, source, "-lfabric"], check=True)
        command = [cargo.CARGO, "build", "-q", "-p", "abi-tests", "--bin", "reader", "--locked"]
        subprocess.run(command, cwd=programs.TOP, check=True)
        target = os.environ.get("CARGO_TARGET_DIR", "target")
        cls.reader = str(programs.TOP / target / "debug" / "reader")

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def run_c(self, libfabric, name, *arguments, **env):
        return programs.run([os.path.join(self.folder.name, name), *arguments], libfabric.env(**env), seconds=150)

    @common.per_release
    def test_shared_table(self, libfabric):
        for arguments in ([], ["127.0.0.1", "both"]):
            ended = self.run_c(libfabric, "shared_table", *arguments)
            self.assertEqual(ended.status, 0, ended)
            self.assertIn("worker: 64 counters, all of them right", ended.out, ended)
            self.assertIn("owner: the worker has the table, and I go", ended.out, ended)

    @common.per_release
    def test_prefetch(self, libfabric):
        ended = self.run_c(libfabric, "prefetch")
        self.assertEqual(ended.status, 0, ended)
        self.assertIn("fetched 4096 pages", ended.out, ended)

    def test_prefetch_without_paging(self):
        ended = self.run_c(programs.SYSTEM, "prefetch", SOFTVERBS_ODP="0")
        self.assertEqual(ended.status, 77, ended)

    @common.per_release
    def test_reader(self, libfabric):
        ended = programs.run([self.reader], libfabric.env(), seconds=150)
        self.assertEqual(ended.status, 0, ended)
        self.assertIn("and not a right more", ended.out, ended)
