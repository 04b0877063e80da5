"""Endpoints on XRC: tests/conformance/c/xrc_offered.c, and rdm/xrc_messages.c for those with many
peers.
"""

from lib import programs

from . import common


class XrcMessages(common.CProgram):
    SOURCE = "rdm/xrc_messages"

    def test_processes_exchange_messages_of_each_length(self):
        for mode in ["all", "pair"]:
            for more in [[], ["auto"]]:
                with self.subTest(mode=mode, more=more):
                    self.succeeds(programs.SYSTEM, mode, *more)


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
