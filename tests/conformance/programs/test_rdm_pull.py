"""Messages that the receiver reads from the memory of the sender: tests/conformance/c/rdm_pull.c."""

from lib import programs

from . import common


class RdmPull(common.CProgram):
    SOURCE = "rdm_pull"

    def succeeds(self, mode):
        for progress in ("manual", "auto"):
            # without on-demand paging sources use the registration cache
            for paging in ("1", "0"):
                with self.subTest(progress=progress, paging=paging):
                    super().succeeds(programs.SYSTEM, mode, progress, SOFTVERBS_ODP=paging)

    def test_the_sender_computes(self):
        self.succeeds("computes")

    def test_lengths_and_buffers(self):
        self.succeeds("lengths")

    def test_other_memory_at_the_same_addresses(self):
        self.succeeds("remapped")

    def test_memory_that_is_unmapped_after_the_completion(self):
        self.succeeds("unmapped")

    def test_buffers_in_regions(self):
        self.succeeds("regions")

    def test_multi_receive_buffers(self):
        self.succeeds("multi")

    def test_both_directions_at_once(self):
        self.succeeds("both")

    def test_truncated_messages(self):
        self.succeeds("truncated")

    def test_discarded_messages_and_cancelled_receives(self):
        self.succeeds("discarded")

    def test_a_sender_that_is_killed(self):
        self.succeeds("killed")
