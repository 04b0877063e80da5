"""Operations of a connected endpoint that fail or are ended: tests/conformance/c/msg_operations.c."""

import unittest

from . import common


class MsgOperations(common.CProgram):
    SOURCE = "msg_operations"

    def test_each_mode(self):
        for mode in ["injected", "shutdown", "closed", "early", "more"]:
            with self.subTest(mode=mode):
                self.succeeds(common.programs.SYSTEM, mode)


if __name__ == "__main__":
    unittest.main()
