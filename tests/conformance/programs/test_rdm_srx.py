"""Shared receive contexts of endpoints with many peers: tests/conformance/c/rdm_srx.c.

With WEFT_RDM_LONG=1 the threads receive more messages.
"""

import itertools
import os

from lib import programs

from . import common

COUNT = 400000 if os.environ.get("WEFT_RDM_LONG") == "1" else 4000


class SharedReceives(common.CProgram):
    SOURCE = "rdm_srx"
    OPTIONS = ("-pthread",)

    def succeeds(self, mode, *count):
        for progress in ("manual", "auto"):
            with self.subTest(progress=progress):
                counts = [str(number) for number in count]
                super().succeeds(programs.SYSTEM, mode, progress, *counts)

    def test_messages(self):
        self.succeeds("messages")

    def test_directed_receives(self):
        self.succeeds("directed")

    def test_searches(self):
        self.succeeds("search")

    def test_multi_receive_buffers(self):
        self.succeeds("multi")

    def test_objects(self):
        self.succeeds("objects")

    def test_an_endpoint_that_is_closed(self):
        self.succeeds("closed")

    def test_threads(self):
        self.succeeds("threads", COUNT)

    def test_endpoints_on_xrc(self):
        modes = ["messages", "directed", "search", "multi", "objects", "closed", "threads"]
        for mode, progress in zip(modes, itertools.cycle(["manual", "auto"])):
            with self.subTest(mode=mode, progress=progress):
                counts = ["1000"] if mode == "threads" else []
                super().succeeds(programs.SYSTEM, mode, progress, *counts, WEFT_TEST_XRC="1")
