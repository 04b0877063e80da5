"""A peer that is stopped, or killed: tests/conformance/c/peers.c and early.c on each release of libfabric."""

import os
import random
import subprocess
import tempfile
import unittest

from lib import programs

from . import common

SOURCE = programs.TOP / "tests" / "conformance" / "c" / "peers.c"
EARLY = SOURCE.with_name("early.c")


class Peers(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.program = os.path.join(cls.folder.name, "peers")
        cls.early = os.path.join(cls.folder.name, "early")
        for program, source in ((cls.program, SOURCE), (cls.early, EARLY)):
            subprocess.run(["gcc", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-o", program, source, "-lfabric"], check=True)

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def peers(self, libfabric, mode, provider="weft", node="127.0.0.1"):
        return programs.run([self.program, mode, provider, node], libfabric.env(), seconds=90)

    @common.per_release
    def test_one_sided_operations_while_the_target_is_stopped(self, libfabric):
        ended = self.peers(libfabric, "stopped")
        self.assertEqual(ended.status, 0, ended)

    def test_that_one_can_fail(self):
        """A provider whose target has to take part can't do it, and the test says so."""
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

    @common.per_release
    def test_clients_killed_while_they_connect(self, libfabric):
        ended = programs.run([self.early, "weft", "127.0.0.1", "40", str(random.randrange(10**6))], libfabric.env(), seconds=120)
        self.assertEqual(ended.status, 0, ended)

    def test_over_ipv6(self):
        ended = self.peers(programs.SYSTEM, "stopped", node="::1")
        self.assertEqual(ended.status, 0, ended)
