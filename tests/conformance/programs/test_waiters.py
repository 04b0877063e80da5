"""Several threads wait on one counter or queue: tests/conformance/c/waiters.c."""

import os
import subprocess
import tempfile
import unittest

from lib import programs

from . import common

SOURCE = programs.TOP / "tests" / "conformance" / "c" / "waiters.c"


class Waiters(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.program = os.path.join(cls.folder.name, "waiters")
        command = ["gcc", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-rdynamic", "-pthread", f"-I{programs.TOP / 'include'}", "-o", cls.program, SOURCE, "-lfabric"]
        subprocess.run(command, check=True)

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def waiters(self, libfabric, mode):
        ended = programs.run([self.program, mode, "weft", "127.0.0.1"], libfabric.env(), seconds=90)
        self.assertEqual(ended.status, 0, ended)

    @common.per_release
    def test_a_thread_whose_threshold_is_reached_returns(self, libfabric):
        self.waiters(libfabric, "counter")

    @common.per_release
    def test_failures_end_the_wait_of_a_thread_although_another_begins_to_wait(self, libfabric):
        self.waiters(libfabric, "failures")

    @common.per_release
    def test_a_thread_reads_what_another_has_polled(self, libfabric):
        for mode in ("sread", "trywait"):
            with self.subTest(mode=mode):
                self.waiters(libfabric, mode)

    @common.per_release
    def test_a_signal_ends_the_waits_of_all_threads(self, libfabric):
        self.waiters(libfabric, "signal")

    @common.per_release
    def test_a_read_of_no_completions_waits_for_one(self, libfabric):
        self.waiters(libfabric, "nothing")

    @common.per_release
    def test_a_queue_that_cannot_be_added_to_a_counter_wakes_its_threads(self, libfabric):
        for mode in ("channel", "timer"):
            with self.subTest(mode=mode):
                self.waiters(libfabric, mode)
