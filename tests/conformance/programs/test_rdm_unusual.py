"""Arguments that are legal and rare: tests/conformance/c/rdm_unusual.c."""

import unittest

from . import common


class RdmUnusual(common.CProgram):
    SOURCE = "rdm_unusual"

    def test_transfers_without_bytes(self):
        self.both("empty")

    def test_vectors_with_empty_elements(self):
        self.both("vectors")

    def test_which_calls_leave_an_entry(self):
        self.both("selective")

    def test_what_is_left(self):
        self.both("left")

    def test_cancellation(self):
        self.both("cancel")

    def test_counters(self):
        self.both("counters")

    def test_fields_of_errors(self):
        self.both("errors")

    def test_queries_of_atomics(self):
        self.both("query")

    def test_a_signal_without_a_waiting_thread(self):
        self.both("signal", limit=2)

    def test_buffers_at_null(self):
        self.both("null")


if __name__ == "__main__":
    unittest.main()
