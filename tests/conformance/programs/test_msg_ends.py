"""Connected endpoints, of which others end while they are being connected: tests/conformance/c/msg_ends.c."""

import unittest

from lib import programs

from . import common


class MsgEnds(common.CProgram):
    SOURCE = "msg_ends"

    def on_a_common_domain(self, mode):
        common_domain = {"XDG_RUNTIME_DIR": self.folder.name, "FI_WEFT_XRCD_PATH": "shared"}
        self.succeeds(programs.SYSTEM, mode, WEFT_TEST_XRC="1", **common_domain)

    def test_processes_that_are_killed_disturb_no_request_of_others(self):
        self.both("others")

    def test_an_endpoint_that_is_closed_after_it_has_accepted(self):
        self.both("abandoned")

    def test_a_server_that_is_killed_after_it_has_accepted(self):
        self.both("killed")
        self.on_a_common_domain("killed")

    def test_a_server_that_is_killed_beside_another_process_of_its_host(self):
        self.both("beside")
        self.on_a_common_domain("beside")

    def test_a_client_that_is_killed_before_it_is_redirected(self):
        self.both("redirected")

    def test_a_client_that_exits_as_soon_as_it_is_connected(self):
        self.both("exits")
        self.on_a_common_domain("exits")

    def test_a_client_that_is_killed_before_it_is_accepted(self):
        self.both("unanswered")

    def test_the_addresses_of_both_sides(self):
        self.both("names")


if __name__ == "__main__":
    unittest.main()
