"""The fi_mr_* symbols that the provider exports: from C by dlsym, and from Python by ctypes."""

import os
import subprocess
import sys
import tempfile
import unittest

from lib import programs

from . import common

HERE = programs.TOP / "tests" / "conformance"
SOURCE = HERE / "c" / "symbols.c"
PYTHON = HERE / "c" / "symbols.py"


class Symbols(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.program = os.path.join(cls.folder.name, "symbols")
        flags = ["-O1", "-g", "-Wall", "-Wextra", "-Werror"]
        subprocess.run(["gcc", *flags, "-o", cls.program, SOURCE, "-lfabric", "-ldl"], check=True)

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def test_the_header_is_c89_and_cpp(self):
        header = str(programs.TOP / "include" / "weft.h")
        for compiler in (["gcc", "-x", "c", "-std=c89"], ["g++", "-x", "c++", "-std=c++11"]):
            for standalone in ([], ["-DWEFT_STANDALONE"]):
                # libfabric's own headers are newer than C89
                if compiler[2] == "c" and not standalone:
                    continue
                flags = ["-pedantic-errors", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
                subprocess.run([*compiler, *flags, *standalone, header], check=True)

    def compare(self, libfabric, provider):
        ended = programs.run([self.program, str(programs.PROVIDER), provider], libfabric.env())
        self.assertEqual(ended.status, 0, ended)
        self.assertIn(f"compared on {provider}", ended.out, ended)

    @common.per_release
    def test_by_dlsym_on_our_objects(self, libfabric):
        self.compare(libfabric, "weft")

    def test_by_dlsym_on_other_providers_objects(self):
        for provider in ("tcp", "shm"):
            with self.subTest(provider):
                self.compare(programs.SYSTEM, provider)

    @common.per_release
    def test_by_ctypes(self, libfabric):
        env = libfabric.env(FI_PROVIDER="weft")
        ended = programs.run([sys.executable, str(PYTHON), str(programs.PROVIDER)], env)
        self.assertEqual(ended.status, 0, ended)
        self.assertIn("registered from Python", ended.out, ended)
