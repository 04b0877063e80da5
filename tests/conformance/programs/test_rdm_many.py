"""Many endpoints in one process: tests/conformance/c/rdm_many.c.

With WEFT_RDM_LONG=1 a process has 1,000 of them.
"""

import os

from lib import programs

from . import common

COUNT = 1000 if os.environ.get("WEFT_RDM_LONG") == "1" else 300


class Many(common.CProgram):
    SOURCE = "rdm_many"
    OPTIONS = ("-D_GNU_SOURCE", "-pthread")

    def succeeds(self, mode, *count):
        for progress in ("manual", "auto"):
            with self.subTest(progress=progress):
                counts = [str(number) for number in count]
                super().succeeds(programs.SYSTEM, mode, progress, *counts)

    def test_a_message_wakes_the_thread_of_its_endpoint(self):
        self.succeeds("queues", COUNT)

    def test_a_thread_sleeps_for_all_endpoints(self):
        self.succeeds("shared", COUNT)

    def test_a_thread_sleeps_on_a_queue_that_another_one_has_polled(self):
        self.succeeds("polled")
