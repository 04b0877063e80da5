"""Connections of endpoints with many peers: tests/conformance/c/rdm_links.c."""

from lib import programs

from . import common


class RdmLinks(common.CProgram):
    SOURCE = "rdm_links"

    def succeeds(self, mode, **more):
        super().succeeds(programs.SYSTEM, mode, **more)

    def test_all_connect_to_all_at_once(self):
        self.succeeds("all")

    def test_all_connect_without_rings(self):
        self.succeeds("all", SOFTVERBS_RING="0")

    def test_idle_peers_keep_no_other_out(self):
        self.succeeds("idle", FI_WEFT_MAX_LINKS="4")

    def test_an_endpoint_is_reached_at_each_address(self):
        self.succeeds("anywhere")

    def test_children_do_not_disturb_their_parent(self):
        self.succeeds("forked")

    def test_aliases(self):
        self.succeeds("alias")
