"""The libfabric releases that every test of this directory runs on."""

import concurrent.futures
import functools
import os
import re
import subprocess
import tempfile
import unittest

from lib import cache, programs

PEERS = programs.TOP / "tests" / "tools" / "peers"


@functools.cache
def peer(name):
    made = subprocess.run([PEERS, name], stdout=subprocess.PIPE, text=True)
    if made.returncode == cache.CANNOT_DOWNLOAD:
        raise unittest.SkipTest(f"{name} could not be downloaded")
    if made.returncode != 0:
        raise RuntimeError(f"{name} could not be made: status {made.returncode}")
    return made.stdout.strip()


def system():
    return programs.SYSTEM


def libfabric_2_1():
    home = peer("libfabric-2.1")
    return programs.Libfabric("2.1", f"{home}/lib", f"{home}/bin")


def libfabric_2_5():
    # MPICH's wheel has no programs; Debian's run on its library
    return programs.Libfabric("2.5", f"{peer('libfabric-2.5')}/lib")


RELEASES = [system, libfabric_2_1, libfabric_2_5]


def version(libfabric):
    shown = programs.run([libfabric.program("fi_info"), "--version"], libfabric.env())
    match = re.search(r"^libfabric: (\d+)\.(\d+)", shown.out, re.M)
    return (int(match[1]), int(match[2])) if match else None


def per_release(test):
    """Runs a test on each release of libfabric, each as a subtest."""

    @functools.wraps(test)
    def each(self):
        for release in RELEASES:
            with self.subTest(libfabric=release.__name__):
                test(self, release())

    return each


def for_releases_at_once(test):
    """As `per_release`, on all releases at the same time (`at_once`)."""

    @functools.wraps(test)
    def each(self):
        at_once(self, [({"libfabric": release.__name__}, lambda release=release: test(self, release())) for release in RELEASES])

    return each


def at_once(test, runs, limit=4):
    """Runs functions at the same time, at most `limit` of them, each as a subtest: pairs of its
    parameters and the function.

    For programs that wait most of their time. Programs that compute or poll would only take the
    processors from each other.
    """
    runs = list(runs)
    with concurrent.futures.ThreadPoolExecutor(limit) as pool:
        ended = [(parameters, pool.submit(run)) for parameters, run in runs]
    for parameters, future in ended:
        with test.subTest(**parameters):
            future.result()


class CProgram(unittest.TestCase):
    """Tests that run one program of tests/conformance/c, which is compiled once per class."""

    SOURCE = None  # its path there, without .c
    XRC = False  # whether its endpoints with many peers are on XRC
    OPTIONS = ()  # further options of gcc

    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.program = os.path.join(cls.folder.name, os.path.basename(cls.SOURCE))
        source = programs.TOP / "tests" / "conformance" / "c" / f"{cls.SOURCE}.c"
        options = ["-O1", "-g", "-Wall", "-Wextra", "-Werror", f"-I{programs.TOP / 'include'}", *cls.OPTIONS]
        subprocess.run(["gcc", *options, "-o", cls.program, source, "-lfabric"], check=True)

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def succeeds(self, libfabric, mode, *arguments, **more):
        """Runs a mode of the program on weft, with further environment variables. Returns its
        result.
        """
        if self.XRC:
            more["WEFT_TEST_XRC"] = "1"
        ended = programs.run([self.program, mode, "weft", "127.0.0.1", *arguments], libfabric.env(**more), seconds=90)
        self.assertEqual(ended.status, 0, ended)
        return ended

    def both(self, *modes, limit=1, **more):
        """Runs modes on RC and on XRC. `limit`: how many of the runs may be made at once."""
        run = functools.partial(self.succeeds, programs.SYSTEM, **more)
        forms = [(mode, xrc) for mode in modes for xrc in ("0", "1")]
        runs = [({"mode": mode, "xrc": xrc}, functools.partial(run, mode, WEFT_TEST_XRC=xrc)) for mode, xrc in forms]
        at_once(self, runs, limit)


def infos(text):
    """The output of fi_info, one dictionary for each entry."""
    entries = []
    for line in text.splitlines():
        key, _, value = line.strip().partition(": ")
        if key == "provider":
            entries.append({})
        if entries:
            entries[-1].setdefault(key, value)
    return entries


def rdma_libraries():
    """The paths of rdma-core's two libraries on this machine."""
    found = subprocess.run(["/sbin/ldconfig", "-p"], stdout=subprocess.PIPE, text=True, check=True).stdout
    paths = re.findall(r"=> (\S*/lib(?:ibverbs|rdmacm)\.so\.1)$", found, re.M)
    return sorted({os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path)) for path in paths})
