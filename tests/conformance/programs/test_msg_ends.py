"""Connected endpoints, of which others end while they are being connected: tests/conformance/c/msg_ends.c."""

import unittest

from . import common


class MsgEnds(common.CProgram):
    SOURCE = "msg_ends"

    def test_processes_that_are_killed_disturb_no_request_of_others(self):
        self.both("others")

    def test_an_endpoint_that_is_closed_after_it_has_accepted(self):
        self.both("abandoned")


if __name__ == "__main__":
    unittest.main()
