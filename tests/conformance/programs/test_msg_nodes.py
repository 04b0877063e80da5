"""Connected endpoints of processes on two emulated nodes, on RC and on XRC: tests/conformance/c/msg_nodes.c."""

import json
import os
import tempfile
import unittest

from lib import programs

from . import common

EACH = 3  # processes of a node


class MsgNodes(common.CProgram):
    SOURCE = "msg_nodes"

    def setUp(self):
        self.home = tempfile.TemporaryDirectory()
        self.addCleanup(self.home.cleanup)

    def counted(self, mode, **more):
        """Runs a mode on XRC, with a runtime directory of its own. Returns what its domains have counted."""
        counts = os.path.join(self.home.name, "counts")
        self.succeeds(programs.SYSTEM, mode, WEFT_TEST_XRC="1", XDG_RUNTIME_DIR=self.home.name, FI_WEFT_COUNTS=counts, **more)
        with open(counts) as file:
            return [json.loads(line) for line in file]

    def files(self):
        return os.listdir(os.path.join(self.home.name, "weft"))

    def test_a_process_has_one_circuit_to_a_node_and_a_node_one_target_for_a_process(self):
        lines = self.counted("all", FI_WEFT_XRCD_PATH="shared")
        self.assertEqual([line["msg_circuits"] for line in lines], [1] * 2 * EACH, lines)
        # of each node, one for each process of the other one
        self.assertEqual(sum(line["msg_targets_created"] for line in lines), 2 * EACH, lines)
        # one end of each connection for each of the others
        self.assertEqual(sum(line["msg_targets_opened"] for line in lines), 2 * EACH * (EACH - 1), lines)
        self.assertEqual(self.files(), [])

    def test_processes_with_private_domains_share_nothing(self):
        lines = self.counted("all")
        self.assertEqual([line["msg_circuits"] for line in lines], [EACH] * 2 * EACH, lines)
        self.assertEqual(sum(line["msg_targets_opened"] for line in lines), 0, lines)

    def test_each_mode(self):
        self.both("all", "quiet", "closes", "busy", "fails", "local", FI_WEFT_XRCD_PATH="shared")

    def test_each_mode_with_private_domains(self):
        for mode in ["quiet", "busy", "fails"]:
            with self.subTest(mode=mode):
                self.succeeds(programs.SYSTEM, mode, WEFT_TEST_XRC="1")


if __name__ == "__main__":
    unittest.main()
