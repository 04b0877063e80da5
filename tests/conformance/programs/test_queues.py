"""Queues that nobody reads, that are full, or that several threads read: tests/conformance/c/queues.c."""

import os
import subprocess
import tempfile
import unittest

from lib import programs

from . import common

SOURCE = programs.TOP / "tests" / "conformance" / "c" / "queues.c"


class Queues(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.program = os.path.join(cls.folder.name, "queues")
        command = ["gcc", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread", f"-I{programs.TOP / 'include'}", "-o", cls.program, SOURCE, "-lfabric"]
        subprocess.run(command, check=True)

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def queues(self, libfabric, mode):
        ended = programs.run([self.program, mode, "weft", "127.0.0.1"], libfabric.env(), seconds=90)
        self.assertEqual(ended.status, 0, ended)

    @common.per_release
    def test_no_completion_is_lost_when_an_endpoint_with_a_full_queue_is_closed(self, libfabric):
        self.queues(libfabric, "closed")

    @common.per_release
    def test_no_completion_is_lost_when_the_peer_ends_the_connection(self, libfabric):
        self.queues(libfabric, "ended")

    @common.per_release
    def test_a_key_is_looked_up_while_the_queue_is_full(self, libfabric):
        self.queues(libfabric, "key")

    @common.per_release
    def test_regions_are_closed_while_the_queue_is_full(self, libfabric):
        self.queues(libfabric, "revoked")

    @common.per_release
    def test_the_queue_of_an_endpoint_that_only_receives_has_room_for_revocations(self, libfabric):
        self.queues(libfabric, "reserved")

    @common.per_release
    def test_several_threads_read_an_event_queue(self, libfabric):
        self.queues(libfabric, "readers")

    @common.per_release
    def test_a_failed_queue_returns_what_was_polled_before(self, libfabric):
        self.queues(libfabric, "failed")

    @common.per_release
    def test_a_read_of_no_completions_drives_progress(self, libfabric):
        self.queues(libfabric, "nothing")
