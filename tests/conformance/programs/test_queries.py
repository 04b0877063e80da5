"""fi_getinfo as applications call it: that nothing is listed twice."""

import re
import unittest

from lib import programs

from . import common


class Twice(unittest.TestCase):
    """No two entries of ours, or of a layer over us, are alike in every field."""

    QUERIES = (
        [],
        ["-p", "weft"],
        ["-p", "weft;ofi_rxm"],
        ["-t", "FI_EP_RDM"],
        ["-t", "FI_EP_MSG"],
        ["-c", "FI_MSG|FI_RMA", "-p", "weft"],
        ["-c", "FI_TAGGED"],
        ["-n", "127.0.0.1"],
    )

    def entries(self, libfabric, options, **env):
        """The text of each entry, of `weft` and of layers over it."""
        shown = programs.run([libfabric.program("fi_info"), "-v", *options], libfabric.env(**env))
        self.assertEqual(shown.status, 0, shown)
        found = re.split(r"(?m)^(?=fi_info:$)", shown.out)[1:]
        return [entry for entry in found if re.search(r"(?m)^ *prov_name: weft\b", entry)]

    @common.per_release
    def test_no_entry_is_listed_twice(self, libfabric):
        for odp in "10":
            for options in self.QUERIES:
                with self.subTest(options=options, odp=odp):
                    found = self.entries(libfabric, options, SOFTVERBS_ODP=odp)
                    self.assertTrue(found)
                    self.assertEqual(len(found) - len(set(found)), 0, f"of {len(found)} entries")

    @common.per_release
    def test_a_layer_lists_what_it_lists_when_it_is_named(self, libfabric):
        """Leaving out what is there already must not leave out anything else."""
        named = set(self.entries(libfabric, ["-p", "weft;ofi_rxm"]))
        every = {entry for entry in self.entries(libfabric, []) if "prov_name: weft;ofi_rxm" in entry}
        addresses = {re.search(r"src_addr: (\S+)", entry)[1] for entry in named}
        self.assertEqual({re.search(r"src_addr: (\S+)", entry)[1] for entry in every}, addresses)
        forms = lambda entries: {re.search(r"(?m)^ *mr_mode: (.*)$", entry)[1] for entry in entries}
        self.assertEqual(forms(every), forms(named))
        collective = lambda entries: {"FI_COLLECTIVE" in entry for entry in entries}
        self.assertEqual(collective(every), collective(named))
        self.assertEqual(len(every), len(named))


if __name__ == "__main__":
    unittest.main()
