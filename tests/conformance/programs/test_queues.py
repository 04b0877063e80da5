"""Queues that the application does not read, that are full, or that several threads read:
tests/conformance/c/queues.c.
"""

from . import common


class Queues(common.CProgram):
    SOURCE = "queues"
    OPTIONS = ("-pthread",)

    @common.per_release
    def test_no_completion_is_lost_when_an_endpoint_with_a_full_queue_is_closed(self, libfabric):
        self.succeeds(libfabric, "closed")

    @common.per_release
    def test_no_completion_is_lost_when_the_peer_ends_the_connection(self, libfabric):
        self.succeeds(libfabric, "ended")

    @common.per_release
    def test_a_key_is_looked_up_while_the_queue_is_full(self, libfabric):
        self.succeeds(libfabric, "key")

    @common.per_release
    def test_regions_are_closed_while_the_queue_is_full(self, libfabric):
        self.succeeds(libfabric, "revoked")

    @common.per_release
    def test_the_queue_of_an_endpoint_that_only_receives_has_room_for_revocations(self, libfabric):
        self.succeeds(libfabric, "reserved")

    @common.per_release
    def test_several_threads_read_an_event_queue(self, libfabric):
        self.succeeds(libfabric, "readers")

    @common.per_release
    def test_a_failed_queue_returns_what_was_polled_before(self, libfabric):
        self.succeeds(libfabric, "failed")

    @common.per_release
    def test_a_read_of_no_completions_drives_progress(self, libfabric):
        self.succeeds(libfabric, "nothing")

    @common.per_release
    def test_a_descriptor_without_an_event_is_not_readable(self, libfabric):
        self.succeeds(libfabric, "quiet")
