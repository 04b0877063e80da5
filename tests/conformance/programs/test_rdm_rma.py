"""RMA of endpoints with many peers: tests/conformance/c/rdm_rma.c, rdm_rma_peers.c and rdm_own.c."""

from lib import programs

from . import common


class Rma(common.CProgram):
    OPTIONS = ("-pthread",)

    def succeeds(self, mode):
        for progress in ("manual", "auto"):
            with self.subTest(progress=progress):
                super().succeeds(programs.SYSTEM, mode, progress)


class RdmRma(Rma):
    SOURCE = "rdm_rma"

    def test_lengths(self):
        self.succeeds("lengths")

    def test_each_call(self):
        self.succeeds("calls")

    def test_remote_cq_data(self):
        self.succeeds("data")

    def test_completion_levels(self):
        self.succeeds("levels")

    def test_fenced_operations(self):
        self.succeeds("fence")

    def test_order(self):
        self.succeeds("order")

    def test_selective_completion(self):
        self.succeeds("selective")

    def test_counters_alone(self):
        self.succeeds("counters")

    def test_each_call_as_the_first(self):
        self.succeeds("first")

    def test_a_full_queue(self):
        self.succeeds("full")

    def test_lists_of_operations(self):
        self.succeeds("more")


class RdmRmaPeers(Rma):
    SOURCE = "rdm_rma_peers"

    def test_a_target_that_sleeps(self):
        self.succeeds("idle")

    def test_a_target_that_is_stopped(self):
        self.succeeds("stopped")

    def test_injected_writes(self):
        self.succeeds("injected")

    def test_writes_reads_and_messages(self):
        self.succeeds("mixed")

    def test_wrong_keys(self):
        self.succeeds("key")

    def test_addresses_outside_of_a_region(self):
        self.succeeds("bounds")

    def test_rights(self):
        self.succeeds("rights")

    def test_a_closed_region(self):
        self.succeeds("closed")

    def test_two_initiators(self):
        self.succeeds("two")

    def test_the_endpoint_itself(self):
        self.succeeds("self")

    def test_threads(self):
        self.succeeds("threads")


class RdmOwn(Rma):
    SOURCE = "rdm_own"

    def test_forms_of_regions(self):
        self.succeeds("forms")

    def test_rights_and_bounds(self):
        self.succeeds("rights")

    def test_counters(self):
        self.succeeds("counters")

    def test_fence_behind_a_message(self):
        self.succeeds("fence")


class RdmRmaOnXrc(RdmRma):
    XRC = True


class RdmRmaPeersOnXrc(RdmRmaPeers):
    XRC = True


class RdmOwnOnXrc(RdmOwn):
    XRC = True
