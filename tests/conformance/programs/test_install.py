"""make install and make uninstall, and the conventions that the commands keep."""

import os
import pathlib
import re
import subprocess
import tempfile
import unittest

from lib import programs

from . import common


def make(*words):
    # variables of the calling make must not reach the make under test
    env = {key: value for key, value in os.environ.items() if key not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    done = subprocess.run(["make", "--no-print-directory", "-C", programs.TOP, *words], env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    return programs.Result(done.returncode, done.stdout, done.stderr)


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in pathlib.Path(folder).rglob("*") if path.is_file())


class Install(unittest.TestCase):
    def test_for_debian(self):
        triplet = subprocess.run(["gcc", "-print-multiarch"], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
        library = f"usr/lib/{triplet}/libfabric/libweft-fi.so" if triplet else "usr/lib/libfabric/libweft-fi.so"
        self.installs("/usr", library, "usr/include/weft.h", "usr/share/man/man7/fi_weft.7")

    def test_elsewhere(self):
        self.installs("/opt/weft", "opt/weft/lib/libfabric/libweft-fi.so", "opt/weft/include/weft.h", "opt/weft/share/man/man7/fi_weft.7")

    def installs(self, prefix, library, header, page):
        with tempfile.TemporaryDirectory() as folder:
            done = make("install", f"DESTDIR={folder}", f"PREFIX={prefix}")
            self.assertEqual(done.status, 0, done)
            self.assertEqual(files(folder), sorted([library, header, page]))
            directory = os.path.dirname(os.path.join(folder, library))
            shown = programs.run(["fi_info", "-p", "weft"], programs.SYSTEM.env(provider_path=directory))
            self.assertIn("soft0", {entry["domain"] for entry in common.infos(shown.out)}, shown)
            server, client = programs.pingpong(programs.SYSTEM, "weft", "msg", options=["-c"], env=programs.SYSTEM.env(provider_path=directory))
            self.assertEqual((server.status, client and client.status), (0, 0), f"{server}\n{client}")
            self.compiles(os.path.join(folder, header))
            self.is_a_page(os.path.join(folder, page))
            self.assertEqual(make("uninstall", f"DESTDIR={folder}", f"PREFIX={prefix}").status, 0)
            self.assertEqual(files(folder), [])

    def compiles(self, header):
        for language in ("c", "c++"):
            source = f'#include "{header}"\nint main(void) {{ return 0; }}\n'
            argv = ["gcc", "-x", language, "-Wall", "-Werror", "-fsyntax-only", "-"]
            done = subprocess.run(argv, input=source, capture_output=True, text=True)
            self.assertEqual(done.returncode, 0, done.stderr)

    def is_a_page(self, page):
        text = pathlib.Path(page).read_text()
        self.assertRegex(text, r'(?m)^\.TH "?fi_weft"? "?7"?')
        # the sections of libfabric's own provider pages, for example fi_verbs(7)
        for section in ("NAME", "OVERVIEW", "SUPPORTED FEATURES", "RUNTIME PARAMETERS"):
            self.assertRegex(text, rf"(?m)^\.SH {section}")
        self.assertNotRegex(text, r"(?m)^#+ |```", "what is left of the page's own marks")


class Manners(unittest.TestCase):
    def test_make_help_lists_every_target(self):
        text = (programs.TOP / "Makefile").read_text()
        targets = set(re.findall(r"(?m)^([a-z][a-z-]*):(?!=)", text))
        shown = {line.split()[0] for line in make("help").out.splitlines() if line.strip()}
        self.assertEqual(targets, shown)

    def test_deps_is_quiet_when_all_is_there(self):
        first = make("deps")
        self.assertEqual(first.status, 0, first)
        self.assertEqual(make("deps").text, "")

    def test_each_command_says_in_one_line_what_it_does(self):
        with tempfile.TemporaryDirectory() as folder:
            for words in (["install", f"DESTDIR={folder}"], ["uninstall", f"DESTDIR={folder}"]):
                said = [line for line in make(*words).out.splitlines() if line.startswith("weft: ")]
                self.assertTrue(said, words)


class Object(unittest.TestCase):
    """The shared object itself."""

    def dynamic(self):
        return subprocess.run(["readelf", "-dW", programs.PROVIDER], stdout=subprocess.PIPE, text=True, check=True).stdout

    def symbols(self, defined):
        shown = subprocess.run(["readelf", "--dyn-syms", "-W", programs.PROVIDER], stdout=subprocess.PIPE, text=True, check=True).stdout
        rows = [line.split() for line in shown.splitlines() if re.match(r"\s*\d+:", line)]
        return {row[7].split("@")[0] for row in rows if len(row) > 7 and (row[6] != "UND") == defined}

    def test_stays_loaded(self):
        """libfabric closes it at exit, when thread-local destructors of weft may still be pending.
        """
        self.assertRegex(self.dynamic(), r"FLAGS_1.*NODELETE")

    def test_needs_neither_libfabric_nor_rdma_core(self):
        needed = re.findall(r"NEEDED.*\[(.*)\]", self.dynamic())
        self.assertTrue(needed)
        self.assertEqual([name for name in needed if re.search("fabric|verbs|rdma", name)], [])

    def test_binds_no_symbol_of_libfabric(self):
        self.assertEqual([name for name in self.symbols(defined=False) if name.startswith(("fi_", "ofi_", "ibv_", "rdma_"))], [])

    def test_exports_the_entry_point_and_our_own_names_only(self):
        exported = self.symbols(defined=True)
        self.assertIn("fi_prov_ini", exported)
        self.assertEqual([name for name in exported if name != "fi_prov_ini" and not name.startswith(("fi_mr_", "weft_"))], [])
