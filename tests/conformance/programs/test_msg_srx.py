"""Connected endpoints with shared receive contexts, on RC and on XRC: tests/conformance/c/msg_srx.c."""

import os
import unittest

from lib import programs

from . import common


class MsgSrx(common.CProgram):
    SOURCE = "msg_srx"
    OPTIONS = ("-pthread",)

    def test_messages_in_both_directions(self):
        self.both("flow", "small")

    def test_calls_that_wait(self):
        self.both("sread", "fd")

    def test_a_killed_process(self):
        self.both("killed")

    def test_processes_that_are_stopped_or_call_nothing(self):
        self.both("stopped", "missed", "idle", limit=2)

    def test_endpoints_that_come_and_leave(self):
        self.both("left")

    def test_endpoints_and_contexts_that_leave_end_no_other_connection(self):
        self.both("orderly", "behind")
        for mode in ["orderly", "behind"]:
            with self.subTest(mode=mode, domain="common"):
                home = self.folder.name
                self.succeeds(programs.SYSTEM, mode, WEFT_TEST_XRC="1", XDG_RUNTIME_DIR=home, FI_WEFT_XRCD_PATH="shared")

    def test_truncation(self):
        self.both("truncated")

    def test_selective_completion_and_counters(self):
        self.both("selective")

    def test_a_context_without_receives_does_not_delay_another(self):
        self.both("waits")

    def test_the_end_of_a_connection_with_undelivered_messages(self):
        self.both("undelivered")

    def test_events_of_connections(self):
        self.both("events")

    def test_256_endpoints(self):
        self.both("many")

    def test_threads(self):
        self.both("threads")

    def test_a_forked_child_closes_the_endpoints_of_its_parent(self):
        self.both("forked")

    def test_applications_that_share_an_xrc_domain(self):
        path = os.path.join(self.folder.name, "xrcd")
        for mode in ["flow", "waits", "missed"]:
            with self.subTest(mode=mode):
                self.succeeds(programs.SYSTEM, mode, WEFT_TEST_XRC="1", WEFT_TEST_XRCD=path)


if __name__ == "__main__":
    unittest.main()
