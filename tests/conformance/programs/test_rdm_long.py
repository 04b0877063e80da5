"""Long messages: tests/conformance/c/rdm_long.c, rdm_long_ends.c, rdm_long_death.c, rdm_long_calls.c,
rdm_long_uses.c and rdm_long_forked.c.

Each mode runs in some of the forms of `FORMS`. With WEFT_RDM_LONG=1 it runs in all of them, with more
lengths and rounds.
"""

import functools
import itertools
import os

from lib import programs

from . import common

LONG = os.environ.get("WEFT_RDM_LONG") == "1"
# progress, and variables of the environment
FORMS = [
    ("manual", {}),
    ("auto", {"WEFT_TEST_XRC": "1", "SOFTVERBS_RING": "0"}),
    ("manual", {"SOFTVERBS_RING": "0", "LONG_MR_LOCAL": "1"}),
    ("auto", {"SOFTVERBS_ODP": "0"}),
    ("manual", {"WEFT_TEST_XRC": "1"}),
    ("auto", {}),
]


class LongMessages(common.CProgram):
    """A mode runs in two forms; the first one is another one for the next mode."""

    turns = itertools.count()

    def runs(self, *modes, **more):
        for mode in modes:
            turn = next(LongMessages.turns)
            forms = FORMS if LONG else [FORMS[turn % len(FORMS)], FORMS[(turn + 3) % len(FORMS)]]
            run = functools.partial(super().succeeds, programs.SYSTEM, mode)
            runs = [
                ({"mode": mode, "progress": progress, **form}, functools.partial(run, progress, **form, **more))
                for progress, form in forms
            ]
            common.at_once(self, runs, limit=2)


class RdmLong(LongMessages):
    SOURCE = "rdm_long"

    def test_lengths(self):
        self.runs("sizes", "vectors", "levels")

    def test_order_of_receives(self):
        self.runs("reversed")

    def test_truncated_messages(self):
        self.runs("truncated")

    def test_memory(self):
        self.runs("adjacent", "remapped", "mappings")


class RdmLongEnds(LongMessages):
    SOURCE = "rdm_long_ends"

    def test_progress(self):
        self.runs("computes", "sleeps", "waits")

    def test_endpoints_that_close(self):
        self.runs("leaves", "abandons", "closes", FI_WEFT_CONNECT_TIMEOUT="1")

    def test_cancelled_receives(self):
        self.runs("cancels")


class RdmLongDeath(LongMessages):
    SOURCE = "rdm_long_death"

    def test_processes_that_are_killed(self):
        self.runs("sender", "receiver", FI_WEFT_CONNECT_TIMEOUT="1")

    def test_processes_that_are_stopped(self):
        self.runs("stopped")


class RdmLongCalls(LongMessages):
    SOURCE = "rdm_long_calls"

    def test_threads_and_endpoints(self):
        self.runs("threads", "endpoints")

    def test_counters(self):
        self.runs("counters", "selective")

    def test_searches(self):
        self.runs("peek")

    def test_multi_receive_buffers(self):
        self.runs("multi")


class RdmLongUses(LongMessages):
    SOURCE = "rdm_long_uses"

    def test_waiting(self):
        self.runs("fd", "signals")

    def test_one_process(self):
        self.runs("self")

    def test_completion_levels_and_order(self):
        self.runs("delivered", "mixed", "rma")

    def test_many_and_huge(self):
        self.runs("many", "huge")

    def test_cancelled_sends(self):
        self.runs("unsent")

    def test_processes_at_one_address(self):
        self.runs("restarted")

    def test_claims_of_a_killed_sender(self):
        self.runs("claimed")


class RdmLongForked(common.CProgram):
    SOURCE = "rdm_long_forked"

    def test_forks_between_post_and_completion(self):
        for progress, form in (("manual", {}), ("auto", {"SOFTVERBS_ODP": "0"}), ("manual", {"WEFT_TEST_XRC": "1"})):
            for mode in ("posted", "pages"):
                with self.subTest(mode=mode, progress=progress, **form):
                    self.succeeds(programs.SYSTEM, mode, progress, **form)
