"""Several threads wait on one counter or queue: tests/conformance/c/waiters.c."""

from . import common


class Waiters(common.CProgram):
    SOURCE = "waiters"
    OPTIONS = ("-rdynamic", "-pthread")

    @common.per_release
    def test_a_thread_whose_threshold_is_reached_returns(self, libfabric):
        self.succeeds(libfabric, "counter")

    @common.per_release
    def test_failures_end_the_wait_of_a_thread_although_another_begins_to_wait(self, libfabric):
        self.succeeds(libfabric, "failures")

    @common.per_release
    def test_a_thread_reads_what_another_has_polled(self, libfabric):
        for mode in ("sread", "trywait"):
            with self.subTest(mode=mode):
                self.succeeds(libfabric, mode)

    @common.per_release
    def test_a_thread_that_is_refused_for_one_object_waits_for_no_counter(self, libfabric):
        self.succeeds(libfabric, "list")

    @common.per_release
    def test_a_signal_ends_the_waits_of_all_threads(self, libfabric):
        self.succeeds(libfabric, "signal")

    @common.per_release
    def test_a_read_of_no_completions_waits_for_one(self, libfabric):
        self.succeeds(libfabric, "nothing")

    @common.per_release
    def test_a_queue_that_cannot_be_added_to_a_counter_wakes_its_threads(self, libfabric):
        for mode in ("channel", "timer"):
            with self.subTest(mode=mode):
                self.succeeds(libfabric, mode)
