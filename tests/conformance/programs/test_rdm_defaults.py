"""Default flags, formats of completions, poll sets, and orders of closing: tests/conformance/c/rdm_defaults.c."""

import unittest

from . import common


class RdmDefaults(common.CProgram):
    SOURCE = "rdm_defaults"

    def test_flags(self):
        self.both("multi", "inject", "levels")

    def test_completions(self):
        self.both("formats", "source")

    def test_poll_sets(self):
        self.both("polled")

    def test_closing(self):
        self.both("closing", "pending")

    def test_states(self):
        self.both("states")


if __name__ == "__main__":
    unittest.main()
