"""What fi_getinfo lists: tests/conformance/c/offered.c, and fi_info."""

import os
import subprocess
import tempfile
import unittest

from lib import programs

from . import common

LAYERED = "weft;ofi_rxm"


class Offered(common.CProgram):
    SOURCE = "offered"

    @common.per_release
    def test_attributes(self, libfabric):
        self.succeeds(libfabric, "attributes")

    @common.per_release
    def test_hints(self, libfabric):
        self.succeeds(libfabric, "hints")

    @common.per_release
    def test_order(self, libfabric):
        self.succeeds(libfabric, "order")

    @common.per_release
    def test_objects(self, libfabric):
        self.succeeds(libfabric, "objects")

    @common.per_release
    def test_the_address_of_a_passive_endpoint(self, libfabric):
        self.succeeds(libfabric, "passive")

    @common.per_release
    def test_open_fabrics_and_domains(self, libfabric):
        self.succeeds(libfabric, "opened")

    @common.per_release
    def test_none_if_the_parameter_disables_them(self, libfabric):
        self.succeeds(libfabric, "none", FI_WEFT_RDM="0", FI_WEFT_DEVICE="soft0")

    @common.per_release
    def test_none_of_a_device_without_shared_receive_queues(self, libfabric):
        self.succeeds(libfabric, "none", SOFTVERBS_SRQ="0", FI_WEFT_DEVICE="soft0")


class Newer(unittest.TestCase):
    """Hints that 1.17 does not have: tests/conformance/c/newer.c, built with the headers of 2.1."""

    def test_hints_of_later_releases(self):
        home = os.path.dirname(common.libfabric_2_1().library)
        with tempfile.TemporaryDirectory() as folder:
            program = os.path.join(folder, "newer")
            source = programs.TOP / "tests" / "conformance" / "c" / "newer.c"
            # no warnings: these headers mark enumerators of end.h as deprecated
            options = ["-O1", "-w", f"-I{home}/include", f"-L{home}/lib"]
            subprocess.run(["gcc", *options, "-o", program, source, "-lfabric"], check=True)
            for release in (common.libfabric_2_1, common.libfabric_2_5):
                with self.subTest(libfabric=release.__name__):
                    ended = programs.run([program, "newer", "weft", "127.0.0.1"], release().env())
                    self.assertEqual(ended.status, 0, ended)


class Layers(unittest.TestCase):
    """Endpoints of this provider come first, and layered ones only if they are named."""

    def listed(self, libfabric, *options, **env):
        """The providers and types of the entries, in their order, each once."""
        shown = programs.run([libfabric.program("fi_info"), *options], libfabric.env(**env))
        self.assertEqual(shown.status, 0, shown)
        return list(dict.fromkeys((entry["provider"], entry["type"]) for entry in common.infos(shown.out)))

    @common.per_release
    def test_a_device_without_native_endpoints_has_layered_ones(self, libfabric):
        env = {"FI_WEFT_DEVICE": "soft0", "SOFTVERBS_SRQ": "0"}
        layered = self.listed(libfabric, "-p", "weft", FI_WEFT_RDM="0", **env)
        self.assertIn((LAYERED, "FI_EP_RDM"), layered)
        self.assertEqual(self.listed(libfabric, "-p", "weft", **env), layered)
        named = self.listed(libfabric, "-p", LAYERED, **env)
        self.assertEqual(named, [(LAYERED, "FI_EP_RDM")])

    @common.per_release
    def test_native_endpoints_come_alone(self, libfabric):
        ours = [("weft", "FI_EP_RDM"), ("weft", "FI_EP_MSG")]
        for env in ({}, {"FI_PROVIDER": "weft"}, {"FI_WEFT_RDM": "1"}):
            self.assertEqual(self.listed(libfabric, "-p", "weft", **env), ours)
            self.assertEqual(self.listed(libfabric, "-p", "weft", "-t", "FI_EP_RDM", **env), ours[:1])
            self.assertEqual(self.listed(libfabric, "-p", LAYERED, **env), [(LAYERED, "FI_EP_RDM")])
        env = {"FI_PROVIDER": "weft"}
        self.assertEqual(self.listed(libfabric, **env), ours)
        self.assertEqual(self.listed(libfabric, "-t", "FI_EP_RDM", **env), ours[:1])

    @common.per_release
    def test_among_all_providers_nothing_is_layered_over_it(self, libfabric):
        listed = self.listed(libfabric, "-t", "FI_EP_RDM")
        self.assertEqual([name for name, _ in listed if "weft" in name], ["weft"])

    @common.per_release
    def test_they_are_layered_if_the_parameter_disables_them(self, libfabric):
        listed = self.listed(libfabric, "-p", "weft", "-t", "FI_EP_RDM", FI_WEFT_RDM="0")
        self.assertEqual(listed, [(LAYERED, "FI_EP_RDM")])
