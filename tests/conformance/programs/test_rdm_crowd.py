"""Processes that use endpoints to all others without a pause, with fewer connections than peers:
tests/conformance/c/rdm_crowd.c.

With WEFT_RDM_LONG=1 each run takes 20 s.
"""

import os
import re

from lib import programs

from . import common

SECONDS = "20" if os.environ.get("WEFT_RDM_LONG") == "1" else "3"


class Form(common.CProgram):
    SOURCE = "rdm_crowd"
    OPTIONS = ("-D_GNU_SOURCE",)

    def succeeds(self, mode, links, progress="manual", **more):
        # without turns operations fail after this time
        more.setdefault("FI_WEFT_CONNECT_TIMEOUT", "10" if SECONDS == "20" else "2")
        return super().succeeds(programs.SYSTEM, mode, progress, SECONDS, FI_WEFT_MAX_LINKS=links, **more)


class Crowd(Form):
    def test_messages(self):
        self.succeeds("messages", "3")

    def test_messages_without_rings(self):
        self.succeeds("messages", "3", SOFTVERBS_RING="0")

    def test_messages_in_one_direction_with_automatic_progress(self):
        self.succeeds("oneway", "2", "auto")

    def test_writes_reads_and_atomics(self):
        self.succeeds("memory", "3")

    def test_writes_reads_and_atomics_of_the_processor(self):
        self.succeeds("memory", "3", SOFTVERBS_ATOMICS="0")


class CrowdOnXrc(Form):
    """Each node of the peers has a place, and each peer. All processes are on one node, or with
    FI_WEFT_XRCD_PATH=private each on its own.
    """

    XRC = True

    def test_messages(self):
        self.succeeds("messages", "3")

    def test_messages_between_nodes(self):
        self.succeeds("messages", "4", FI_WEFT_XRCD_PATH="private")

    def test_messages_in_one_direction_with_automatic_progress(self):
        self.succeeds("oneway", "3", "auto")

    def test_writes_reads_and_atomics(self):
        ended = self.succeeds("memory", "3", FI_LOG_LEVEL="info", FI_LOG_PROV="weft")
        # turns break no circuit: 24 to 32 were broken by keys that were returned to a link's end
        failed = [int(count) for count in re.findall(r'"circuits_failed": (\d+)', ended.text)]
        self.assertEqual(len(failed), 6, ended)
        self.assertLess(sum(failed), 4, ended)

    def test_writes_reads_and_atomics_between_nodes(self):
        self.succeeds("memory", "6", FI_WEFT_XRCD_PATH="private")
