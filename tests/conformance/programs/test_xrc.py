"""Endpoints on XRC: tests/conformance/c/xrc_offered.c, msg_xrc.c for connected ones, and
rdm/xrc_messages.c, xrc_nodes.c and xrc_replaced.c for those with many peers.

With WEFT_RDM_LONG=1 processes are killed and replaced in 40 runs instead of one.
"""

import json
import os
import re
import tempfile
import unittest

from lib import programs

from . import common

SKIPPED = 77
LONG = os.environ.get("WEFT_RDM_LONG") == "1"


class XrcMessages(common.CProgram):
    SOURCE = "rdm/xrc_messages"

    def test_processes_exchange_messages_of_each_length(self):
        for mode in ["all", "pair"]:
            for more in [[], ["auto"]]:
                with self.subTest(mode=mode, more=more):
                    self.succeeds(programs.SYSTEM, mode, *more)


class MsgXrc(common.CProgram):
    """Connected endpoints on XRC, in two and three processes."""

    SOURCE = "msg_xrc"

    @common.per_release
    def test_messages_rma_and_atomics(self, libfabric):
        self.succeeds(libfabric, "messages")
        self.succeeds(libfabric, "node")

    def test_the_death_of_a_peer(self):
        self.succeeds(programs.SYSTEM, "killed")
        self.succeeds(programs.SYSTEM, "idle")

    def test_the_end_of_single_connections(self):
        self.succeeds(programs.SYSTEM, "shutdown")
        self.succeeds(programs.SYSTEM, "broken")

    def test_rejections(self):
        self.succeeds(programs.SYSTEM, "reject")

    def test_a_domain_of_the_application(self):
        self.succeeds(programs.SYSTEM, "bound")

    def test_rc_and_xrc_refuse_each_other_with_a_line_at_both_sides(self):
        """The side that has requested the connection, and the one that has refused it."""
        for mode, own, peer in [("rc", "XRC", "RC"), ("to_rc", "RC", "XRC")]:
            ended = self.succeeds(programs.SYSTEM, mode, FI_LOG_LEVEL="warn")
            named = {"RC": r"RC \(FI_PROTO_RDMA_CM_IB_RC\)", "XRC": r"XRC \(FI_PROTO_RDMA_CM_IB_XRC\)"}
            refuses = rf"a request of 127\.0\.0\.1:\d+ is refused: the endpoint there is on {named[peer]}, this one on {named[own]}"
            refused = rf"127\.0\.0\.1:\d+ refuses a connection: the endpoint there is on {named[own]}, this one on {named[peer]}"
            self.assertEqual(len(re.findall(refuses, ended.text)), 1, ended)
            self.assertEqual(len(re.findall(refused, ended.text)), 1, ended)


class XrcOffered(common.CProgram):
    SOURCE = "xrc_offered"

    @common.per_release
    def test_rc_comes_first_unless_the_parameter_or_the_protocol_decides(self, libfabric):
        self.succeeds(libfabric, "both")
        self.succeeds(libfabric, "first", FI_WEFT_XRC="1")
        self.succeeds(libfabric, "without", FI_WEFT_XRC="0")

    @common.per_release
    def test_a_device_without_xrc_says_so_once(self, libfabric):
        for xrc in ["0", "1"]:
            ended = self.succeeds(libfabric, "missing", SOFTVERBS_SRQ="0", FI_WEFT_DEVICE="soft0", FI_WEFT_XRC=xrc, FI_LOG_LEVEL="warn")
            reason = "FI_PROTO_RDMA_CM_IB_XRC is not offered: soft0: the device reports no XRC"
            self.assertEqual(ended.text.count(reason), 1, ended)


class XrcNodes(common.CProgram):
    SOURCE = "rdm/xrc_nodes"

    def setUp(self):
        self.place = tempfile.TemporaryDirectory()
        self.addCleanup(self.place.cleanup)
        # the second user appends to the file too
        os.chmod(self.place.name, 0o755)
        self.counts = os.path.join(self.place.name, "counts")
        with open(self.counts, "w") as file:
            os.chmod(file.fileno(), 0o666)
        self.home = os.path.join(self.place.name, "home")
        os.mkdir(self.home, 0o700)

    def lines(self, mode, *arguments, home=True, seconds=90, **more):
        """Runs a mode, with a runtime directory or without. Returns what its endpoints have
        counted.
        """
        if home:
            more["XDG_RUNTIME_DIR"] = self.home
        argv = [self.program, mode, "weft", "127.0.0.1", *map(str, arguments)]
        env = programs.SYSTEM.env(FI_WEFT_COUNTS=self.counts, **more)
        ended = programs.run(argv, env, seconds=seconds)
        if ended.status == SKIPPED:
            self.skipTest(f"{mode}: the user may not mount file systems, or is not root")
        self.assertEqual(ended.status, 0, ended)
        with open(self.counts) as file:
            return [json.loads(line) for line in file]

    def at_rest(self, lines, nodes):
        """What must hold when no link is being set up, whatever has failed before: at most one
        initiator for each node, and one target in a node for each process.
        """
        self.show(lines, nodes)
        targets = {}
        for line in lines:
            self.assertLessEqual(line["circuits_at_end"], nodes, line)
            self.assertLessEqual(line["circuits_most"], 2 * nodes, line)
            targets.setdefault(line["node"], set()).update(line["targets_at_end"])
        for numbers in targets.values():
            self.assertLessEqual(len(numbers), len(lines))

    def show(self, lines, nodes):
        """Prints the sums, and returns the numbers of the targets of each node."""
        targets = {}
        for line in lines:
            targets.setdefault(line["node"], set()).update(line["targets"])
        messages = sum(3 * line["circuit_requests"] + 2 * line["link_requests"] for line in lines)
        pairs = len(lines) * (len(lines) - 1) / 2
        print(
            f"\n{nodes} nodes x {len(lines) // nodes} processes:"
            f" initiators per process {max(line['circuits_most'] for line in lines)},"
            f" targets per node {max(map(len, targets.values()))},"
            f" links per process {max(line['links_most'] for line in lines)},"
            f" connection messages per pair {messages / pairs:.2f}"
        )
        return targets

    def check(self, lines, nodes, processes, most_initiators):
        count = nodes * processes
        self.assertEqual(len(lines), count)
        targets = self.show(lines, nodes)
        self.assertEqual(len(targets), nodes)
        # one for each process that sends to the node, its own processes included
        for numbers in targets.values():
            self.assertLessEqual(len(numbers), count)
        for line in lines:
            with self.subTest(line=line):
                self.assertLessEqual(line["circuits_most"], most_initiators)
                # a second one is asked for if a peer gets no processor for 100 ms
                self.assertLessEqual(line["circuit_requests"], line["circuits"] + line["second_requests"])
                self.assertLessEqual(line["link_replies"], count - 1)
                for failure in ["circuits_failed", "targets_failed", "unknown_tags"]:
                    self.assertEqual(line[failure], 0)
        return targets

    def test_processes_share_circuits_and_targets(self):
        nodes, processes = 2, 3
        lines = self.lines("all", nodes, processes)
        # at most one to each other node, and one to the own one
        self.check(lines, nodes, processes, nodes)
        for line in lines:
            self.assertEqual(line["nodes"], 0, line)
        self.assertEqual(os.listdir(os.path.join(self.home, "weft")), [], "the file is left")

    def test_64_processes_on_8_nodes(self):
        # each of the 2,016 pairs connects while few processes have a processor
        lines = self.lines("all", 8, 8, FI_WEFT_CONNECT_TIMEOUT="60", seconds=170)
        self.assertEqual(len(lines), 64)
        self.at_rest(lines, 8)

    def test_nodes_at_one_address_are_found(self):
        nodes, processes = 3, 2
        lines = self.lines("one", nodes, processes)
        self.check(lines, nodes, processes, nodes)

    def test_a_domain_of_the_application_is_used(self):
        path = os.path.join(self.place.name, "own")
        lines = self.lines("bound", 2, 2, path)
        self.check(lines, 2, 2, 2)

    def test_processes_with_different_file_systems_are_different_nodes(self):
        lines = self.lines("spaces", self.home)
        self.check(lines, 2, 1, 2)

    def test_a_process_without_a_safe_directory_is_a_node_of_its_own(self):
        lines = self.lines("nowhere", home=False)
        self.check(lines, 2, 1, 2)

    def test_an_unsafe_path_is_refused(self):
        path = os.path.join(self.place.name, "wrong")
        with open(path + ".rdm", "w") as file:
            os.chmod(file.fileno(), 0o644)
        self.lines("unsafe", FI_WEFT_XRCD_PATH=path)
        # a path that is safe is used
        os.chmod(path + ".rdm", 0o600)
        os.truncate(self.counts, 0)
        lines = self.lines("all", 1, 2, FI_WEFT_XRCD_PATH=path)
        self.check(lines, 1, 2, 1)
        self.assertFalse(os.path.exists(path + ".rdm"))

    def test_a_second_user_is_not_in_the_way_of_the_first(self):
        if not all(os.access(part, os.X_OK) and os.stat(part).st_mode & 1 for part in programs.TOP.parents):
            self.skipTest("other users cannot read this directory")
        os.chmod(self.folder.name, 0o755)
        lines = self.lines("users")
        # two nodes of two processes, which do not see each other
        self.assertEqual(len(lines), 4)
        nodes = [line["node"] for line in lines]
        self.assertEqual(sorted(map(nodes.count, set(nodes))), [2, 2])
        for line in lines:
            self.assertEqual((line["circuits_most"], line["links_accepted"] > 2), (1, False))

    def test_the_connections_of_rc_are_counted(self):
        lines = self.lines("rc", 2, 2)
        for line in lines:
            self.assertEqual(line["protocol"], "rc")
            self.assertGreaterEqual(line["links_most"], 3)


class XrcReplaced(common.CProgram):
    SOURCE = "rdm/xrc_replaced"

    def test_processes_are_killed_and_replaced(self):
        """4 nodes of 4 processes, each of which is killed once; the long form also kills 48 within
        1.5 s, so that peers that recover are killed too.
        """
        forms = [["16", "300"]] * 20 + [["48", "60"]] * 20 if LONG else [["16", "300"]]
        for seed, form in enumerate(forms):
            with self.subTest(seed=seed, form=form), tempfile.TemporaryDirectory() as home:
                argv = [self.program, "xrc", "weft", "127.0.0.1", "4", "4", str(seed), *form]
                ended = programs.run(argv, programs.SYSTEM.env(XDG_RUNTIME_DIR=home), seconds=150)
                self.assertEqual(ended.status, 0, ended)
                print(f"\n{ended.text.strip()}")
                self.assertEqual(os.listdir(os.path.join(home, "weft")), [], "the file of a domain is left")


if __name__ == "__main__":
    unittest.main()
