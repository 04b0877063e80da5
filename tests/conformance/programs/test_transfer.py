"""fi_pingpong between two processes, with checked contents."""

import re
import threading
import unittest

from lib import programs

from . import common

SIZES = ["64", "256", "1k", "4k", "64k", "1m"]


class Transfer(unittest.TestCase):
    def moved(self, server, client):
        self.assertIsNotNone(client, f"the server ended before it listened: {server}")
        both = f"server: {server}\nclient: {client}"
        self.assertEqual((server.status, client.status), (0, 0), both)
        for size in SIZES:
            self.assertRegex(client.out, rf"(?m)^{size} +\d", both)
        self.assertNotRegex(client.text + server.text, re.compile(r"data check|integrity|error", re.I), both)

    @common.per_release
    def test_msg_over_ipv4(self, libfabric):
        self.moved(*programs.pingpong(libfabric, "weft", "msg", "127.0.0.1", ["-c", "-I", "100"]))

    @common.per_release
    def test_msg_over_ipv6(self, libfabric):
        self.moved(*programs.pingpong(libfabric, "weft", "msg", "::1", ["-c", "-I", "100"]))

    @common.per_release
    def test_rdm(self, libfabric):
        # without ofi_rxm the endpoint is weft's own
        env = libfabric.env(FI_PROVIDER="^ofi_rxm")
        self.moved(*programs.pingpong(libfabric, "weft", "rdm", "127.0.0.1", ["-c", "-I", "100"], env))

    @common.per_release
    def test_rdm_over_ofi_rxm(self, libfabric):
        self.moved(*programs.pingpong(libfabric, "weft;ofi_rxm", "rdm", "127.0.0.1", ["-c", "-I", "100"]))

    def test_two_releases_of_libfabric_talk_to_each_other(self):
        """Both use one protocol: the server runs on the oldest release, the client on the newest.
        """
        old, new = common.system(), common.libfabric_2_5()
        port = programs.free_port()
        common_options = ["-p", "weft", "-e", "msg", "-c", "-I", "100"]
        with programs.started([old.program("fi_pingpong"), *common_options, "-B", port], old.env()) as server:
            self.assertTrue(programs.wait_listening(port, server))
            client = programs.run([new.program("fi_pingpong"), *common_options, "-P", port, "127.0.0.1"], new.env())
            self.moved(server.finish(10), client)

    def test_again_and_again(self):
        """A run leaves nothing that affects the next run."""
        for _ in range(5):
            self.moved(*programs.pingpong(common.system(), "weft", "msg", options=["-c", "-I", "10"]))

    def test_four_pairs_at_once(self):
        results = []

        def one():
            results.append(programs.pingpong(common.system(), "weft", "msg", options=["-c", "-I", "100"]))

        threads = [threading.Thread(target=one) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(len(results), 4)
        for server, client in results:
            self.moved(server, client)

    def test_a_killed_peer_ends_the_other_one(self):
        """The survivor gets an error and does not hang, and the next run starts clean."""
        for victim in ("server", "client"):
            with self.subTest(killed=victim):
                killed = {}

                def watch(server, client):
                    # loading and connecting take a small part of this time: the transfer is running
                    busy = client.wait_busy(1.0) and server.wait_busy(1.0)
                    process = server if victim == "server" else client
                    killed["running"] = busy and process.popen.poll() is None
                    process.kill()

                # enough iterations that the transfer is running when the process is killed
                server, client = programs.pingpong(common.system(), "weft", "msg", options=["-I", "10000000", "-S", "64"], seconds=15, watch=watch)
                self.assertTrue(killed.get("running"), f"{server}\n{client}")
                survivor = client if victim == "server" else server
                self.assertFalse(survivor.late, f"still waiting for a dead peer: {survivor}")
                # fi_pingpong itself may end by SIGPIPE on its control connection, after the
                # transfer has failed
                self.assertNotEqual(survivor.status, 0, survivor)
        self.moved(*programs.pingpong(common.system(), "weft", "msg", options=["-c", "-I", "10"]))
