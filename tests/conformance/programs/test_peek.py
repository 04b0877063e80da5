"""A thread peeks at an event queue that another thread reads: tests/conformance/c/peek.c."""

import os
import subprocess
import tempfile
import unittest

from lib import programs

from . import common

SOURCE = programs.TOP / "tests" / "conformance" / "c" / "peek.c"


class Peek(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.program = os.path.join(cls.folder.name, "peek")
        command = ["gcc", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-rdynamic", "-pthread", f"-I{programs.TOP / 'include'}", "-o", cls.program, SOURCE, "-lfabric"]
        subprocess.run(command, check=True)

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def peek(self, libfabric, mode):
        ended = programs.run([self.program, mode, "weft", "127.0.0.1"], libfabric.env(), seconds=90)
        self.assertEqual(ended.status, 0, ended)

    @common.per_release
    def test_a_connection_request_is_read_once_with_the_info_of_the_peek(self, libfabric):
        for mode in ("read", "wait", "two"):
            with self.subTest(mode=mode):
                self.peek(libfabric, mode)
