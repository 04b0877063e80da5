"""Endpoints with many peers on XRC: tests/conformance/c/rdm/xrc_messages.c."""

from lib import programs

from . import common


class XrcMessages(common.CProgram):
    SOURCE = "rdm/xrc_messages"

    def test_processes_exchange_messages_of_each_length(self):
        for mode in ["all", "pair"]:
            for more in [[], ["auto"]]:
                with self.subTest(mode=mode, more=more):
                    self.succeeds(programs.SYSTEM, mode, *more)
