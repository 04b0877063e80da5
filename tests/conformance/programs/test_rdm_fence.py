"""FI_FENCE of messages, also to the endpoint itself: tests/conformance/c/rdm_fence.c."""

import unittest

from . import common


class RdmFence(common.CProgram):
    SOURCE = "rdm_fence"

    def test_messages(self):
        self.both("self", "pair", "peer", limit=3)


if __name__ == "__main__":
    unittest.main()
