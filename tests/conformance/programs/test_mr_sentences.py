"""Sentences of fi_mr(3) and related pages, each tested by a case of the C programs in
tests/conformance/c/mr.

docs/conformance.md lists the case for each sentence. Every case runs in each form of regions that
it lists, on a device with on-demand paging and on one that pins (SOFTVERBS_ODP).
"""

import concurrent.futures
import os
import subprocess
import tempfile
import unittest

from lib import programs

from . import common

SOURCES = programs.TOP / "tests" / "conformance" / "c" / "mr"
# Runs at the same time. They wait for four fifths of their time; those of `close` for two thirds,
# and they bound the time of a call, which allows for some load.
AT_ONCE = {"close": 2}
OTHERS_AT_ONCE = 4
# these programs need libfabric 2.1: libfabric 1.17 lacks the features
OF_2_1 = {"parts"}
DOES_NOT_APPLY = 77


class Sentences(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def build(self, name, libfabric):
        program = os.path.join(self.folder.name, name)
        command = ["gcc", "-O1", "-g", "-Wall", "-Wextra", "-Werror", f"-I{programs.TOP / 'include'}"]
        link = ["-lfabric"]
        if libfabric.library:
            command.append(f"-I{os.path.join(os.path.dirname(libfabric.library), 'include')}")
            link.insert(0, f"-L{libfabric.library}")
        subprocess.run([*command, "-o", program, SOURCES / f"{name}.c", *link], check=True)
        return program

    def cases(self, name):
        libfabric = common.libfabric_2_1() if name in OF_2_1 else programs.SYSTEM
        program = self.build(name, libfabric)
        listed = programs.run([program, "--list"], libfabric.env())
        runs = [(*line.split(), odp) for line in listed.out.splitlines() for odp in "10"]
        self.assertTrue(runs, listed)

        def run(case, form, odp):
            return programs.run([program, case, form], libfabric.env(SOFTVERBS_ODP=odp), seconds=150)

        with concurrent.futures.ThreadPoolExecutor(AT_ONCE.get(name, OTHERS_AT_ONCE)) as pool:
            results = list(pool.map(lambda one: run(*one), runs))
        for (case, form, odp), ended in zip(runs, results, strict=True):
            with self.subTest(case=case, form=form, odp=odp):
                if ended.status == DOES_NOT_APPLY:
                    self.assertTrue(ended.out.strip(), "a case that does not apply says why")
                else:
                    self.assertEqual(ended.status, 0, ended)
        applied = {case for (case, _, _), ended in zip(runs, results, strict=True) if ended.status != DOES_NOT_APPLY}
        self.assertEqual({case for case, _, _ in runs} - applied, set(), "cases that apply nowhere")


def add(name):
    setattr(Sentences, f"test_{name}", lambda self: self.cases(name))


for source in sorted(SOURCES.glob("*.c")):
    add(source.stem)
