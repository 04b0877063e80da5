"""Many processes with one RDM endpoint each, on several emulated nodes, and many peers with few
descriptors: tests/conformance/c/rdm/scale.c.

Contents are checked by the processes. With WEFT_RDM_LONG=1 there are 64 processes on 8 nodes, and
the 500 peers are processes of both progress modes; benches/scale has the figures.
"""

import json
import os
import sys
import tempfile
import unittest

from lib import programs, scale, spaces

if __name__ != "__main__":
    from . import common

LONG = os.environ.get("WEFT_RDM_LONG") == "1"
NODES, PROCESSES = (8, 64) if LONG else (4, 16)
PEERS, LIMIT = 500, 1024
# Bytes of memory for each connected peer that is a process of its own. The ring between the two
# has 132 KiB (docs/softverbs.md, "Rings"), 160 KiB with all that belongs to it.
PRIVATE, SHARED = 16 << 10, 160 << 10


def subjects():
    return [scale.Subject("RC", "weft"), scale.Subject("XRC", "weft", xrc=True)]


class Scale(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        try:
            spaces.check()
        except spaces.NoNamespaces as error:
            raise unittest.SkipTest(f"no namespaces, so no address for each node: {error}") from error
        cls.folder = tempfile.TemporaryDirectory()
        cls.program = os.path.join(cls.folder.name, "scale")
        scale.compile_to(cls.program)

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def measured(self, *words):
        """What this file prints when it runs with these words in namespaces of its own."""
        # programs on the system's libfabric start slowly
        library = common.libfabric_2_1().library
        argv = [sys.executable, "-B", os.path.realpath(__file__), self.program, library, *words]
        env = dict(os.environ, PYTHONPATH=str(programs.TOP / "tests" / "tools"))
        ended = programs.run(spaces.command(argv, nodes=NODES), env, seconds=600)
        self.assertEqual(ended.status, 0, ended)
        return json.loads(ended.out)

    def test_all_to_all_and_all_to_one(self):
        for subject in subjects():
            with self.subTest(subject=subject.name):
                got = self.measured(subject.name)
                for usage in got["usages"]:
                    # one or two connections for each peer: both sides may dial
                    if subject.name == "RC":
                        self.assertLessEqual(PROCESSES - 1, usage["sockets"] - got["sockets"])
                        self.assertLessEqual(usage["sockets"] - got["sockets"], 2 * (PROCESSES - 1))
                    self.assertLess(usage["private"], (4 << 20) + PRIVATE * PROCESSES)
                    self.assertLess(usage["shared"], (4 << 20) + SHARED * PROCESSES)

    def test_500_peers_with_1024_descriptors(self):
        for progress in ("manual", "auto") if LONG else ("manual",):
            with self.subTest(progress=progress):
                got = self.measured("star", progress)
                # the others are for connections that both sides dial
                self.assertLess(got["used"]["descriptors"], LIMIT * 7 // 8)
                self.assertGreaterEqual(got["used"]["sockets"], PEERS)
                # The last peer was not watched, and its end was noticed: the ring from it is freed.
                self.assertGreater(got["used"]["shared"] - got["after"]["shared"], 100 << 10)


def main(program, library, name, progress="manual"):
    """Inside the namespaces."""
    env = programs.Libfabric("2.1", library).env(FI_WEFT_CONNECT_TIMEOUT="60")
    if name == "star":
        star = scale.star(subjects()[0], program, PEERS, progress, LIMIT, env)
        print(json.dumps({"used": vars(star.used), "after": vars(star.after)}))
        return
    subject = next(subject for subject in subjects() if subject.name == name)
    with scale.Group(subject, program, PROCESSES, NODES, env) as group:
        group.open_all()
        alone = group.usages()
        group.all_to_all(8, 1)
        usages = group.usages()
        for size, each in ((8, 16), (64 << 10, 2)):
            group.all_to_all(size, each)
            group.incast(size, each)
        group.close_all()
    print(json.dumps({"usages": [vars(usage) for usage in usages], "sockets": alone[0].sockets}))


if __name__ == "__main__":
    main(*sys.argv[1:])
