"""Forked children that open their own objects: tests/conformance/c/fork_opens.c."""

from lib import programs

from . import common


class ForkOpens(common.CProgram):
    SOURCE = "fork_opens"

    def opens(self, mode, **more):
        for progress in ((), ("auto",)):
            with self.subTest(progress=progress):
                self.succeeds(programs.SYSTEM, mode, *progress, **more)

    def test_after_the_parent_has_queried(self):
        self.opens("info")

    def test_after_the_parent_has_closed_all(self):
        self.opens("closed")

    def test_while_the_parent_has_objects(self):
        self.opens("open")

    def test_while_the_parent_exchanges_messages(self):
        self.opens("live")

    def test_on_xrc(self):
        self.opens("live", WEFT_TEST_XRC="1")

    def test_without_rings_and_paging(self):
        # the device stands for one that pins, so the parent has a registration cache
        self.opens("live", SOFTVERBS_RING="0", SOFTVERBS_ODP="0")
