"""Endpoints with many peers: tests/conformance/c/rdm.c."""

import itertools

from lib import programs

from . import common


class Rdm(common.CProgram):
    SOURCE = "rdm"

    def succeeds(self, libfabric, mode, **more):
        for progress, rings in (("manual", "1"), ("auto", "1"), ("manual", "0")):
            with self.subTest(progress=progress, rings=rings):
                env = {"SOFTVERBS_RING": rings, **more}
                super().succeeds(libfabric, mode, progress, **env)

    @common.per_release
    def test_each_call(self, libfabric):
        self.succeeds(libfabric, "variants")

    def test_inject(self):
        self.succeeds(programs.SYSTEM, "inject")

    def test_messages_that_arrive_before_their_receives(self):
        self.succeeds(programs.SYSTEM, "unexpected")

    def test_tags(self):
        self.succeeds(programs.SYSTEM, "tags")

    def test_directed_receives(self):
        self.succeeds(programs.SYSTEM, "directed")

    def test_sources(self):
        self.succeeds(programs.SYSTEM, "source")

    def test_multi_receive_buffers(self):
        self.succeeds(programs.SYSTEM, "multi")

    def test_peek_claim_and_discard(self):
        self.succeeds(programs.SYSTEM, "search")

    def test_cancel(self):
        self.succeeds(programs.SYSTEM, "cancel")

    def test_truncated_messages(self):
        self.succeeds(programs.SYSTEM, "truncated")

    def test_selective_completion(self):
        # one of its sends fails when the time to connect has passed
        self.succeeds(programs.SYSTEM, "selective", FI_WEFT_CONNECT_TIMEOUT="2")

    def test_counters_alone(self):
        self.succeeds(programs.SYSTEM, "counters")

    def test_a_thread_that_waits_for_a_counter_sleeps(self):
        self.succeeds(programs.SYSTEM, "asleep")

    def test_readerr_alone_drives_progress(self):
        self.succeeds(programs.SYSTEM, "readerr")

    def test_completion_levels(self):
        self.succeeds(programs.SYSTEM, "levels")

    def test_buffers_in_regions(self):
        self.succeeds(programs.SYSTEM, "regions")
        self.succeeds(programs.SYSTEM, "regions", SOFTVERBS_ODP="0")

    def test_messages_to_the_endpoint_itself(self):
        self.succeeds(programs.SYSTEM, "self")

    def test_both_sides_send_at_once(self):
        self.succeeds(programs.SYSTEM, "both")

    def test_a_receiver_that_closes_after_the_last_message(self):
        self.succeeds(programs.SYSTEM, "parting")

    def test_as_many_receives_as_mpi_posts(self):
        self.succeeds(programs.SYSTEM, "many")

    def test_an_address_at_which_nothing_listens(self):
        self.succeeds(programs.SYSTEM, "dead", FI_WEFT_CONNECT_TIMEOUT="2")

    def test_an_address_at_which_nothing_listens_with_the_default_timeout(self):
        common.CProgram.succeeds(self, programs.SYSTEM, "dead", "manual")

    def test_removed_addresses(self):
        self.succeeds(programs.SYSTEM, "removed")

    @common.per_release
    def test_objects(self, libfabric):
        self.succeeds(libfabric, "objects")

    def test_a_receiver_that_posts_late(self):
        self.succeeds(programs.SYSTEM, "flood")

    def test_endpoints_on_xrc(self):
        modes = [
            *["variants", "inject", "unexpected", "tags", "directed", "source", "multi", "search", "cancel", "truncated", "selective"],
            *["counters", "asleep", "readerr", "levels", "regions", "self", "both", "parting", "many", "dead", "removed", "objects"],
        ]
        for mode, progress in zip(modes, itertools.cycle(["manual", "auto"])):
            with self.subTest(mode=mode, progress=progress):
                common.CProgram.succeeds(self, programs.SYSTEM, mode, progress, WEFT_TEST_XRC="1", FI_WEFT_CONNECT_TIMEOUT="2")
