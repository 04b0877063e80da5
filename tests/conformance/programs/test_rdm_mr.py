"""Forms of memory registration as targets of RMA of endpoints with many peers:
tests/conformance/c/rdm_mr.c.
"""

from lib import programs

from . import common


class RdmMr(common.CProgram):
    SOURCE = "rdm_mr"

    def succeeds(self, mode, libfabric=programs.SYSTEM, pinned=True):
        """`pinned`: the mode is offered without on-demand paging too, where hints without
        FI_MR_ALLOCATED and FI_MR_MMU_NOTIFY get no entry (docs/mr-modes.md)."""
        for progress in ("manual", "auto"):
            for paging in ("1", "0") if pinned else ("1",):
                with self.subTest(progress=progress, paging=paging):
                    super().succeeds(libfabric, mode, progress, SOFTVERBS_ODP=paging)

    @common.per_release
    def test_keys_of_the_application(self, libfabric):
        self.succeeds("scalable", libfabric, pinned=False)

    def test_virtual_addresses(self):
        self.succeeds("virtual", pinned=False)

    def test_keys_of_the_provider(self):
        self.succeeds("provider", pinned=False)

    def test_basic(self):
        self.succeeds("basic")

    def test_raw_keys(self):
        self.succeeds("raw", pinned=False)

    def test_regions_of_endpoints(self):
        self.succeeds("endpoint", pinned=False)

    def test_local_buffers(self):
        self.succeeds("local", pinned=False)

    def test_counters_of_regions(self):
        self.succeeds("event", pinned=False)

    def test_pages_that_change(self):
        self.succeeds("notify")

    def test_several_buffers(self):
        self.succeeds("several", pinned=False)

    def test_the_address_space(self):
        self.succeeds("space", pinned=False)

    def test_a_page_that_does_not_exist(self):
        self.succeeds("hole", pinned=False)

    def test_authorization_keys(self):
        self.succeeds("auth")

    def test_asynchronous_registration(self):
        self.succeeds("async")

    def test_many_regions(self):
        self.succeeds("many", pinned=False)

    def test_regions_closed_while_accessed(self):
        self.succeeds("inuse")


class RdmMrOnXrc(RdmMr):
    XRC = True

    def test_regions_of_endpoints(self):
        """Not offered: each peer of an XRC domain can name the receive queue of each endpoint."""
        ended = common.CProgram.succeeds(self, programs.SYSTEM, "endpoint", "manual")
        self.assertIn("FI_MR_ENDPOINT: mr_mode 0 of 200 is needed", ended.text)
