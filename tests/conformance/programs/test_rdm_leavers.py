"""Peers that are killed or stopped before this side has decided about their messages, and calls that wait:
tests/conformance/c/rdm_leavers.c."""

import functools
import itertools

from lib import programs

from . import common


class RdmLeavers(common.CProgram):
    SOURCE = "rdm_leavers"
    OPTIONS = ("-pthread",)

    def succeeds(self, mode, limit=1):
        """`limit`: how many of the runs may be made at once."""
        run = functools.partial(super().succeeds, programs.SYSTEM, mode)
        forms = itertools.product(("manual", "auto"), ("1", "0"))
        runs = [
            ({"progress": progress, "rings": rings}, functools.partial(run, progress, SOFTVERBS_RING=rings))
            for progress, rings in forms
        ]
        common.at_once(self, runs, limit)

    def test_a_peek_has_found_a_message(self):
        self.succeeds("peeked")

    def test_a_claimed_message(self):
        self.succeeds("claimed")

    def test_a_claimed_message_that_is_discarded(self):
        self.succeeds("discarded")

    def test_multi_receive_buffers(self):
        self.succeeds("multi")

    def test_first_contact_with_a_stopped_process(self):
        # two processes poll, and one sleeps, for 2 s
        self.succeeds("contact", limit=2)

    def test_signals_and_timeouts(self):
        self.succeeds("signalled", limit=2)

    def test_thresholds(self):
        self.succeeds("threshold", limit=2)

    def test_endpoints_on_xrc(self):
        run = functools.partial(super().succeeds, programs.SYSTEM, WEFT_TEST_XRC="1")
        modes = ["peeked", "claimed", "discarded", "multi", "contact", "signalled", "threshold"]
        forms = zip(modes, itertools.cycle(["manual", "auto"]))
        runs = [({"mode": mode, "progress": progress}, functools.partial(run, mode, progress)) for mode, progress in forms]
        common.at_once(self, runs, 2)
