"""RMA of endpoints with many peers: tests/conformance/c/rdm_writes.c."""

from lib import programs

from . import common


class RdmWrites(common.CProgram):
    SOURCE = "rdm_writes"

    def succeeds(self, test):
        for keys in ("native", "keys"):
            for progress in ("manual", "auto"):
                with self.subTest(keys=keys, progress=progress):
                    super().succeeds(programs.SYSTEM, test, keys, progress)

    def test_all_calls(self):
        self.succeeds("forms")

    def test_remote_cq_data(self):
        self.succeeds("data")

    def test_an_injected_write_lands_without_further_calls(self):
        self.succeeds("inject")

    def test_wrong_keys(self):
        self.succeeds("wrong")

    def test_fences(self):
        self.succeeds("fence")

    def test_messages_behind_writes(self):
        self.succeeds("order")


class RdmWritesOnXrc(RdmWrites):
    XRC = True
