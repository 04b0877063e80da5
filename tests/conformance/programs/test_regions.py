"""Sentences of fi_mr(3) that need a peer, through the C calls: tests/conformance/c/regions.c."""

import os
import subprocess
import tempfile
import unittest

from lib import programs

from . import common

SOURCES = programs.TOP / "tests" / "conformance" / "c"
LOCAL, RAW, VIRT_ADDR, ALLOCATED, PROV_KEY, RMA_EVENT = (1 << bit for bit in (2, 3, 4, 5, 6, 8))
NATIVE = LOCAL | VIRT_ADDR | ALLOCATED | PROV_KEY
BASIC, SCALABLE = 1, 2
# the peer's rkey, records of both kinds, handles, application keys
FORMS = [NATIVE, NATIVE | RAW, LOCAL | RAW, LOCAL | PROV_KEY, LOCAL, 0]


class Regions(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.program = os.path.join(cls.folder.name, "regions")
        command = ["gcc", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-o", cls.program, SOURCES / "regions.c", "-lfabric"]
        subprocess.run(command, check=True)

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def in_forms(self, libfabric, mode, forms, *arguments):
        for form in forms:
            with self.subTest(form=f"{form:#x}"):
                command = [self.program, mode, "weft", "127.0.0.1", f"{form:x}", *arguments]
                ended = programs.run(command, libfabric.env(), seconds=150)
                self.assertEqual(ended.status, 0, ended)

    @common.per_release
    def test_raw_keys_of_every_form(self, libfabric):
        self.in_forms(libfabric, "raw", [*FORMS, BASIC, SCALABLE])

    @common.per_release
    def test_unmapped_keys_are_refused(self, libfabric):
        self.in_forms(libfabric, "unmap", FORMS, "5000")

    def test_nothing_is_left_of_500000_mapped_keys(self):
        self.in_forms(programs.SYSTEM, "unmap", [0, NATIVE, LOCAL | RAW], "500000")

    @common.per_release
    def test_what_atomics_need_of_the_access(self, libfabric):
        self.in_forms(libfabric, "rights", FORMS)

    @common.per_release
    def test_what_counts_as_a_modification(self, libfabric):
        self.in_forms(libfabric, "events", [*FORMS, NATIVE | RMA_EVENT, LOCAL | RMA_EVENT])
