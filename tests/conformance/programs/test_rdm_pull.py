"""Messages that the receiver reads from the memory of the sender: tests/conformance/c/rdm_pull.c."""

import functools
import itertools

from lib import programs

from . import common


class RdmPull(common.CProgram):
    SOURCE = "rdm_pull"

    def succeeds(self, mode, limit=1):
        """`limit`: how many of the runs may be made at once."""
        run = functools.partial(super().succeeds, programs.SYSTEM, mode)
        # without on-demand paging sources use the registration cache
        forms = itertools.product(("manual", "auto"), ("1", "0"))
        runs = [
            ({"progress": progress, "paging": paging}, functools.partial(run, progress, SOFTVERBS_ODP=paging))
            for progress, paging in forms
        ]
        common.at_once(self, runs, limit)

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
        # a process polls for 3 s, without a peer
        self.succeeds("killed", limit=2)


class RdmPullOnXrc(RdmPull):
    XRC = True
