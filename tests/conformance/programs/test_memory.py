"""Local buffers that the application did not register, on a device without on-demand paging: the
sources of notifications when their memory changes.
"""

import ctypes
import os
import subprocess
import tempfile
import unittest

from lib import programs

from . import common

SOURCES = programs.TOP / "tests" / "conformance" / "c"
REFUSED = "userfaultfd is not available"
# the number of userfaultfd(2) by machine, and its flag UFFD_USER_MODE_ONLY
USERFAULTFD = {"x86_64": 323, "aarch64": 282}
USER_MODE_ONLY = 1


def allowed():
    """Whether the kernel permits userfaultfd(2), called without weft."""
    fd = ctypes.CDLL(None, use_errno=True).syscall(USERFAULTFD[os.uname().machine], os.O_CLOEXEC | USER_MODE_ONLY)
    if fd >= 0:
        os.close(fd)
    return fd >= 0


class Memory(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        for name in ("monitor", "uncached"):
            command = ["gcc", "-O1", "-g", "-Wall", "-Wextra", "-Werror", f"-I{programs.TOP / 'include'}"]
            command += ["-o", os.path.join(cls.folder.name, name), SOURCES / f"{name}.c", "-lfabric", "-pthread"]
            subprocess.run(command, check=True)

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def run_program(self, libfabric, name, *arguments):
        env = libfabric.env(SOFTVERBS_ODP="0", FI_LOG_LEVEL="warn")
        ended = programs.run([os.path.join(self.folder.name, name), "weft", "127.0.0.1", *arguments], env, seconds=150)
        self.assertEqual(ended.status, 0, ended)
        return ended

    @common.per_release
    def test_a_monitor_of_the_program(self, libfabric):
        ended = self.run_program(libfabric, "monitor")
        # the application's monitor is used instead of the kernel
        self.assertNotIn(REFUSED, ended.err, ended)

    @common.per_release
    def test_a_refusal_is_said_once(self, libfabric):
        for how in ("SECCOMP", "UNPRIVILEGED"):
            ended = self.run_program(libfabric, "uncached", how)
            self.assertEqual(ended.err.count(REFUSED), 1, ended)

    def test_that_nothing_is_said_where_it_is_allowed(self):
        if not allowed():
            self.skipTest("the kernel refuses userfaultfd(2) here")
        ended = self.run_program(programs.SYSTEM, "uncached", "ALLOWED")
        self.assertNotIn(REFUSED, ended.err, ended)
