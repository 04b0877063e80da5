"""Progress by fi_poll(3) alone, on RC and on XRC: tests/conformance/c/rdm_poll.c."""

import unittest

from lib import programs

from . import common


class RdmPoll(common.CProgram):
    SOURCE = "rdm_poll"

    def test_messages(self):
        self.both("all", "small")

    def test_processes_that_call_nothing_for_a_while(self):
        self.both("idle", "stopped", limit=2)

    def test_counters(self):
        self.both("counters")

    def test_a_receiver_without_receives(self):
        self.both("flood")

    def test_rma(self):
        self.both("rma")

    def test_a_killed_process(self):
        self.both("killed", FI_WEFT_CONNECT_TIMEOUT="2")

    def test_calls_without_room(self):
        self.both("unasked")

    def test_the_set(self):
        self.both("set")

    @common.for_releases_at_once
    def test_another_provider(self, libfabric):
        """The program keeps to the manual pages: it runs on a provider of libfabric too."""
        ended = programs.run([self.program, "counters", "tcp;ofi_rxm", "127.0.0.1"], libfabric.env())
        self.assertEqual(ended.status, 0, ended)


if __name__ == "__main__":
    unittest.main()
