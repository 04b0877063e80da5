"""Peers that are stopped, or killed, and processes that fork: the programs in tests/conformance/c.
"""

import functools
import os
import random
import subprocess
import tempfile
import unittest

from lib import programs

from . import common

SOURCES = programs.TOP / "tests" / "conformance" / "c"
PROGRAMS = ["peers", "early", "killed", "shared", "answer", "flags", "forked"]


class Peers(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        for name in PROGRAMS:
            program, source = os.path.join(cls.folder.name, name), SOURCES / f"{name}.c"
            subprocess.run(["gcc", "-O1", "-g", "-Wall", "-Wextra", "-Werror", f"-I{programs.TOP / 'include'}", "-o", program, source, "-lfabric"], check=True)

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def run_program(self, libfabric, name, *arguments):
        return programs.run([os.path.join(self.folder.name, name), *arguments], libfabric.env(), seconds=150)

    def peers(self, libfabric, mode, provider="weft", node="127.0.0.1"):
        return self.run_program(libfabric, "peers", mode, provider, node)

    @common.per_release
    def test_one_sided_operations_while_the_target_is_stopped(self, libfabric):
        ended = self.peers(libfabric, "stopped")
        self.assertEqual(ended.status, 0, ended)

    def test_that_one_can_fail(self):
        """A provider whose target must make progress itself fails this, and the test reports it."""
        ended = self.peers(programs.SYSTEM, "stopped", provider="tcp")
        self.assertNotEqual(ended.status, 0, ended)
        self.assertIn("no completion within", ended.err, ended)

    @common.per_release
    def test_a_peer_killed_while_idle(self, libfabric):
        ended = self.peers(libfabric, "idle")
        self.assertEqual(ended.status, 0, ended)

    @common.per_release
    def test_a_peer_killed_in_the_middle_of_writes(self, libfabric):
        ended = self.peers(libfabric, "busy")
        self.assertEqual(ended.status, 0, ended)

    @common.for_releases_at_once
    def test_clients_killed_while_they_connect(self, libfabric):
        ended = self.run_program(libfabric, "early", "weft", "127.0.0.1", "40", str(random.randrange(10**6)))
        self.assertEqual(ended.status, 0, ended)

    def test_peers_killed_in_the_middle_of_large_transfers(self):
        for mode in ("send", "recv", "write", "read"):
            with self.subTest(survivor=mode):
                ended = self.run_program(programs.SYSTEM, "killed", mode, "weft", "127.0.0.1", "5")
                self.assertEqual(ended.status, 0, ended)
                self.assertEqual(ended.out.count("then FI_SHUTDOWN"), 5, ended)

    def test_a_sender_into_a_shared_context_is_killed(self):
        ended = self.run_program(programs.SYSTEM, "shared", "weft", "127.0.0.1", "16")
        self.assertEqual(ended.status, 0, ended)

    def answered(self, libfabric, mode, count, form):
        ended = self.run_program(libfabric, "answer", mode, "weft", "127.0.0.1", str(count), form)
        self.assertEqual(ended.status, 0, ended)

    @common.per_release
    def test_the_first_message_is_answered_before_the_event_queue_is_read(self, libfabric):
        for form in ("native", "none"):
            for mode in ("passive", "active"):
                with self.subTest(form=form, mode=mode):
                    self.answered(libfabric, mode, 1000, form)

    @common.per_release
    def test_the_first_message_is_answered_before_the_event_queue_is_read_for_a_second(self, libfabric):
        common.at_once(self, [({"form": form}, functools.partial(self.answered, libfabric, "late", 3, form)) for form in ("native", "none")])

    @common.per_release
    def test_each_call_takes_the_flags_of_its_page(self, libfabric):
        # a file on a disk: a file of tmpfs does not survive a power loss
        with tempfile.TemporaryDirectory(dir=programs.TOP / "build") as folder:
            ended = self.run_program(libfabric, "flags", "weft", "127.0.0.1", os.path.join(folder, "persistent"))
            self.assertEqual(ended.status, 0, ended)

    @common.per_release
    def test_fork_with_endpoints_open(self, libfabric):
        ended = self.run_program(libfabric, "forked", "weft", "127.0.0.1")
        self.assertEqual(ended.status, 0, ended)

    def test_over_ipv6(self):
        ended = self.peers(programs.SYSTEM, "stopped", node="::1")
        self.assertEqual(ended.status, 0, ended)
