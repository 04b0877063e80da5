"""fi_getinfo: the warning about a refused mr_mode; and no entry is listed twice."""

import os
import re
import subprocess
import tempfile
import unittest

from lib import programs

from . import common

SOURCE = programs.TOP / "tests" / "conformance" / "c" / "queries.c"
ENODATA = -61
PINS = "this device pins memory: offer FI_MR_ALLOCATED or FI_MR_MMU_NOTIFY"


class Refused(unittest.TestCase):
    """An mr_mode without a bit that the device needs: one line at `warn`, libfabric's default
    level.
    """

    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.program = os.path.join(cls.folder.name, "queries")
        subprocess.run(["gcc", "-O1", "-Wall", "-Wextra", "-Werror", "-o", cls.program, SOURCE, "-lfabric"], check=True)

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def ask(self, libfabric, *names, **env):
        """The return value of each query, and the lines that weft logged."""
        settings = {"SOFTVERBS_ODP": "0", "FI_LOG_LEVEL": "warn", "FI_WEFT_DEVICE": "soft0", **env}
        ended = programs.run([self.program, *names], libfabric.env(**settings))
        self.assertEqual(ended.status, 0, ended)
        returned = [line.split() for line in ended.out.splitlines()]
        self.assertEqual([name for name, _, _ in returned], list(names), ended)
        logged = [line for line in ended.err.splitlines() if re.search(r":weft(?::|\b)", line)]
        return [int(value) for _, value, _ in returned], [line for line in logged if "mr_mode" in line], ended

    @common.per_release
    def test_the_missing_bit_is_named_once(self, libfabric):
        for names in (["named"], ["any"], ["layered"], ["named", "named", "layered", "any"]):
            returned, logged, ended = self.ask(libfabric, *names)
            if names != ["any"]:
                self.assertEqual(returned[0], ENODATA, ended)
            self.assertEqual(len(logged), 1, ended)
            self.assertIn(PINS, logged[0], ended)
            self.assertIn("soft0", logged[0], ended)

    @common.per_release
    def test_nothing_is_said_of_a_query_that_fails_for_other_reasons_too(self, libfabric):
        for name in ("tagged", "endpoint", "domain", "node"):
            returned, logged, ended = self.ask(libfabric, name)
            self.assertEqual((returned, logged), ([ENODATA], []), ended)

    @common.per_release
    def test_nothing_is_said_of_a_query_that_is_answered(self, libfabric):
        returned, logged, ended = self.ask(libfabric, "allocated", "notified", "none")
        self.assertEqual((returned, logged), ([0, 0, 0], []), ended)
        returned, logged, ended = self.ask(libfabric, "named", "layered", "scalable", SOFTVERBS_ODP="1")
        self.assertEqual((returned, logged), ([0, 0, 0], []), ended)

    @common.per_release
    def test_nothing_is_said_when_only_a_layer_asks(self, libfabric):
        """The application asked for RDM endpoints of any provider; the query may have succeeded."""
        _, logged, ended = self.ask(libfabric, "probed", "none", FI_WEFT_RDM="0")
        self.assertEqual(logged, [], ended)

    @common.per_release
    def test_a_query_for_rdm_endpoints_of_any_provider(self, libfabric):
        """With RDM endpoints of its own weft is asked itself, as for message endpoints."""
        for names in (["probed"], ["any"]):
            _, logged, ended = self.ask(libfabric, *names)
            self.assertEqual(len(logged), 1, ended)
            self.assertIn(PINS, logged[0], ended)

    @common.per_release
    def test_a_probe_of_a_layer_does_not_use_up_the_one_line(self, libfabric):
        _, logged, ended = self.ask(libfabric, "probed", "named", FI_WEFT_RDM="0")
        self.assertEqual(len(logged), 1, ended)

    @common.per_release
    def test_a_call_has_as_many_entries_as_the_same_call_before(self, libfabric):
        names = ["none", "none", "probed", "none", "layered", "named", "none", "none"]
        _, _, ended = self.ask(libfabric, *names, SOFTVERBS_ODP="1")
        entries = [int(line.split()[2]) for line in ended.out.splitlines()]
        alone = {}
        for name in set(names):
            alone[name] = int(self.ask(libfabric, name, SOFTVERBS_ODP="1")[2].out.split()[2])
        self.assertEqual(entries, [alone[name] for name in names], ended)
        self.assertTrue(all(entries), ended)

    @common.per_release
    def test_old_forms_are_told_what_to_offer(self, libfabric):
        for name, advice in (("scalable", PINS), ("old", "this device pins memory: offer FI_MR_BASIC")):
            returned, logged, ended = self.ask(libfabric, name)
            self.assertEqual((returned, len(logged)), ([ENODATA], 1), ended)
            self.assertIn(advice, logged[0], ended)

    @common.per_release
    def test_bits_that_exclude_each_other(self, libfabric):
        returned, logged, ended = self.ask(libfabric, "pair", SOFTVERBS_ODP="1")
        self.assertEqual((returned, len(logged)), ([ENODATA], 1), ended)
        self.assertIn("FI_MR_SCALABLE", logged[0], ended)

    @common.per_release
    def test_a_form_that_a_parameter_wants(self, libfabric):
        returned, logged, ended = self.ask(libfabric, "allocated", FI_WEFT_MR_MODE="basic")
        self.assertEqual((returned, len(logged)), ([ENODATA], 1), ended)
        self.assertRegex(logged[0], r"FI_WEFT_MR_MODE requires more bits: offer FI_MR_VIRT_ADDR\|FI_MR_PROV_KEY$", ended)
        returned, logged, ended = self.ask(libfabric, "allocated", FI_WEFT_MR_MODE="none")
        self.assertEqual((returned, len(logged)), ([ENODATA], 1), ended)
        self.assertIn("FI_WEFT_MR_MODE permits 0 only", logged[0], ended)


class Twice(unittest.TestCase):
    """No two entries of weft, alone or under a layer, are equal in every field."""

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
                for rdm in "10":
                    with self.subTest(options=options, odp=odp, rdm=rdm):
                        found = self.entries(libfabric, options, SOFTVERBS_ODP=odp, FI_WEFT_RDM=rdm)
                        self.assertTrue(found)
                        self.assertEqual(len(found) - len(set(found)), 0, f"of {len(found)} entries")

    @common.per_release
    def test_a_layer_lists_what_it_lists_when_it_is_named(self, libfabric):
        """Leaving out duplicates must not leave out any other entry."""
        named = set(self.entries(libfabric, ["-p", "weft;ofi_rxm"]))
        listed = self.entries(libfabric, [], FI_WEFT_RDM="0")
        every = {entry for entry in listed if "prov_name: weft;ofi_rxm" in entry}
        addresses = {re.search(r"src_addr: (\S+)", entry)[1] for entry in named}
        self.assertEqual({re.search(r"src_addr: (\S+)", entry)[1] for entry in every}, addresses)
        forms = lambda entries: {re.search(r"(?m)^ *mr_mode: (.*)$", entry)[1] for entry in entries}
        self.assertEqual(forms(every), forms(named))
        collective = lambda entries: {"FI_COLLECTIVE" in entry for entry in entries}
        self.assertEqual(collective(every), collective(named))
        self.assertEqual(len(every), len(named))


if __name__ == "__main__":
    unittest.main()
