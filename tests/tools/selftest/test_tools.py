"""Tests of the tiers' scripts: results that they must not lose, hide or accept."""

import importlib.machinery
import importlib.util
import json
import os
import pathlib
import stat
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from unittest import mock

TOOLS = pathlib.Path(os.path.realpath(__file__)).parent.parent
sys.path.insert(0, str(TOOLS))
sys.path.insert(0, str(TOOLS.parent / "conformance"))

from lib import cache, cargo, cases, commands, programs, spaces, total  # noqa: E402


def script(path):
    """A script without the suffix .py, as a module."""
    name = path.name.replace("-", "_")
    loader = importlib.machinery.SourceFileLoader(name, str(path))
    spec = importlib.util.spec_from_loader(name, loader)
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


class Totals(unittest.TestCase):
    def command(self, body):
        with tempfile.NamedTemporaryFile("w", suffix=".sh") as file:
            file.write(body)
            file.flush()
            with mock.patch("builtins.print"):
                return total.of_command(["sh", file.name])

    def test_a_total_is_taken(self):
        self.assertEqual(self.command("echo x; echo 3 passed, 0 failed, 1 skipped"), total.Total(3, 0, 1))

    def test_failures_are_taken(self):
        self.assertEqual(self.command("echo 3 passed, 2 failed, 1 skipped; exit 1"), total.Total(3, 2, 1))

    def test_no_total_is_a_failure(self):
        for body in ("true", "echo fine", "exit 1", "echo 3 passed, 0 failed, 0 skipped; echo more", "kill -9 $$"):
            self.assertEqual(self.command(body), total.Total(0, 1, 0), body)

    def test_a_status_that_contradicts_is_a_failure(self):
        self.assertEqual(self.command("echo 3 passed, 0 failed, 0 skipped; exit 1"), total.Total(3, 1, 0))
        self.assertEqual(self.command("echo 3 passed, 1 failed, 0 skipped"), total.Total(3, 2, 0))

    def test_each_line_is_passed_on(self):
        lines = []
        with mock.patch("builtins.print"):
            total.of_command(["sh", "-c", "echo FAILED x; echo 0 passed, 1 failed, 0 skipped; exit 1"], each=lines.append)
        self.assertEqual(lines, ["FAILED x", "0 passed, 1 failed, 0 skipped"])
        failure = script(TOOLS / "tiers").FAILURE
        named = ("FAIL  11-weft  2 s", "FAILED    x.py (0.1 s)", "        FAIL [   0.6s] ( 9/13) weft a::b")
        self.assertTrue(all(map(failure.match, named)))
        self.assertFalse(any(map(failure.match, ("ok   FAILED x", "FAILURES", "FAILED", "pass  fi_rdm"))))

    def test_a_tier_that_is_not_there_is_a_failure(self):
        with mock.patch("builtins.print"):
            self.assertEqual(total.of_command(["/does/not/exist"]), total.Total(0, 1, 0))


class Tiers(unittest.TestCase):
    def run_tiers(self, tiers):
        module = script(TOOLS / "tiers")
        with tempfile.TemporaryDirectory() as folder:
            for name, body in tiers.items():
                path = pathlib.Path(folder) / name
                path.write_text(f"#!/bin/sh\n{body}\n")
                path.chmod(path.stat().st_mode | stat.S_IXUSR)
            module.command = lambda name: os.path.join(folder, name)
            with mock.patch("builtins.print") as shown:
                status = module.main(list(tiers))
            return status, [call.args[0] for call in shown.call_args_list if call.args and "nothing ran" not in str(call.args[0])][-1]

    def test_totals_are_added_up(self):
        status, last = self.run_tiers({"a": "echo 1 passed, 0 failed, 2 skipped", "b": "echo 4 passed, 0 failed, 0 skipped"})
        self.assertEqual((status, str(last)), (0, "5 passed, 0 failed, 2 skipped"))

    def test_one_failure_fails_all(self):
        status, last = self.run_tiers({"a": "echo 1 passed, 1 failed, 0 skipped; exit 1", "b": "echo 4 passed, 0 failed, 0 skipped"})
        self.assertEqual((status, str(last)), (1, "5 passed, 1 failed, 0 skipped"))

    def test_nothing_run_is_no_success(self):
        status, _ = self.run_tiers({"a": "echo 0 passed, 0 failed, 9 skipped"})
        self.assertEqual(status, 1)


class Long(unittest.TestCase):
    def setUp(self):
        self.long = script(TOOLS / "long")
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.kept, self.page = pathlib.Path(folder.name, "check-long"), pathlib.Path(folder.name, "testing.md")
        self.page.write_text("# Tests\n\n```\ncheck-long: 2001-01-01 0123456789ab 1 passed, 0 failed, 0 skipped, 9 min\n```\n\nEnd\n")

    def run_steps(self, whole, *totals):
        self.long.KEPT = self.kept
        self.long.commit = lambda: "abcdef012345"
        steps = [self.long.Step(f"step{number}", 1, "planted", lambda one=one: one or 1 / 0) for number, one in enumerate(totals)]
        with mock.patch("builtins.print") as shown:
            status = self.long.run(steps, whole)
        return status, [str(call.args[0]) for call in shown.call_args_list]

    def test_every_step_has_its_minutes_and_the_total_is_last(self):
        status, lines = self.run_steps(True, total.Total(1, 0, 2), total.Total(4, 0, 0))
        self.assertEqual((status, lines[-1]), (0, "5 passed, 0 failed, 2 skipped"))
        for want in (r"== step1: 0\.0 min: 4 passed", r"step1 +0\.0 +1\.0   4 passed", r"all +0\.0 +2\.0   5 passed", self.long.LINE):
            self.assertRegex("\n".join(lines), want)
        self.assertRegex(self.kept.read_text(), r"^check-long: \d{4}-\d\d-\d\d abcdef012345 5 passed, 0 failed, 2 skipped, 0 min\n$")

    def test_one_failure_fails_all_and_the_steps_behind_it_run(self):
        status, lines = self.run_steps(True, total.Total(1, 1, 0), total.Total(4, 0, 0))
        self.assertEqual((status, lines[-1]), (1, "5 passed, 1 failed, 0 skipped"))

    def test_a_step_that_can_t_run_is_a_failure_and_the_next_one_runs(self):
        self.assertEqual(self.run_steps(True, None, total.Total(4, 0, 0))[1][-1], "4 passed, 1 failed, 0 skipped")

    def test_nothing_run_is_no_success(self):
        self.assertEqual(self.run_steps(True, total.Total(skipped=3))[0], 1)

    def test_a_part_is_not_kept_for_the_record(self):
        self.run_steps(False, total.Total(1, 0, 0))
        self.assertFalse(self.kept.exists())

    def test_a_pass_is_recorded_in_the_place_of_the_last(self):
        line = "check-long: 2026-11-22 abcdef012345 5 passed, 0 failed, 2 skipped, 51 min"
        self.kept.write_text(line + "\n")
        self.assertIsNone(self.long.record(self.kept, self.page))
        self.assertEqual(self.page.read_text(), f"# Tests\n\n```\n{line}\n```\n\nEnd\n")

    def test_no_other_run_is_recorded(self):
        before = self.page.read_text()
        for line in (
            None,
            "check-long: 2026-11-22 abcdef012345 5 passed, 1 failed, 2 skipped, 51 min",
            "check-long: 2026-11-22 abcdef012345+changes 5 passed, 0 failed, 2 skipped, 51 min",
            "check-long: 2026-11-22 abcdef012345 5 passed, 0 failed, 2 skipped, 51 min; only deny",
        ):
            if line:
                self.kept.write_text(line + "\n")
            self.assertTrue(self.long.record(self.kept, self.page), line)
            self.assertEqual(self.page.read_text(), before)

    def test_the_page_has_a_place_for_the_record(self):
        self.assertEqual(len(self.long.PLACE.findall(self.long.PAGE.read_text())), 1)

    def test_the_whole_is_expected_within_its_bound(self):
        self.assertLessEqual(sum(step.minutes for step in self.long.STEPS), 110)


class Conformance(unittest.TestCase):
    def setUp(self):
        self.check = script(TOOLS.parent / "conformance" / "check")
        self.groups = [self.check.INSIDE, self.check.BESIDE, self.check.LAST]

    def run_groups(self, names):
        ran = []

        def run(_folder, _top, wanted):
            ran.append([name for name in names if wanted(f"programs.{name}")])
            return total.Total(passed=1)

        with mock.patch.object(self.check.cases, "run", run), mock.patch("builtins.print"):
            return [self.check.main([group]) for group in self.groups], ran

    def test_each_case_is_in_one_group(self):
        others = {"test_x.X.test_y"}
        statuses, ran = self.run_groups(sorted(self.check.SLEEPING | self.check.ALONE | others))
        self.assertEqual(statuses, [0, 0, 0])
        self.assertEqual(list(map(set, ran)), [others, self.check.SLEEPING, self.check.ALONE])

    def test_a_name_without_a_case_is_a_failure(self):
        self.assertEqual(self.run_groups([])[0], [0, 1, 1])

    def test_what_is_to_be_alone_begins_when_all_others_have_ended(self):
        running, seen = set(), {}

        def programs(words):
            running.add(words[0])
            time.sleep(0.05)
            seen[words[0]] = set(running)
            running.discard(words[0])
            return total.Total(passed=1)

        self.check.programs = programs
        self.assertEqual(self.check.all_programs(), total.Total(passed=3))
        self.assertEqual(set(seen), set(self.groups))
        self.assertEqual(seen[self.check.LAST], {self.check.LAST})


class Sanitize(unittest.TestCase):
    def setUp(self):
        self.check = script(TOOLS.parent / "sanitize" / "check")

    def test_what_fabtests_are_given_does_not_reach_the_steps_behind_them(self):
        options = {"LD_PRELOAD": "/libasan.so", "ASAN_OPTIONS": "detect_leaks=1", "LSAN_OPTIONS": "suppressions=leaks.supp"}
        tool = self.check.Tool("asan", pathlib.Path("/there/libweft-fi.so"), (), options, 1)
        given = []

        def of_command(argv, env):
            given.append((list(map(str, argv)), env))
            return total.Total(passed=1)

        before = dict(os.environ)
        with (
            mock.patch.object(self.check, "made", lambda *_: (tool, total.Total())),
            mock.patch.object(self.check, "over", lambda *_: total.Total()),
            mock.patch.object(self.check, "plants", lambda *_: total.Total()),
            mock.patch.object(self.check.install, "ensure"),
            mock.patch.object(self.check.totals, "of_command", of_command),
            mock.patch.object(self.check.cargo, "tests", lambda *_, **__: total.Total()),
            mock.patch("builtins.print"),
        ):
            self.assertEqual(self.check.main(["--long"]), 0)
        self.assertEqual(dict(os.environ), before)
        ((argv, env),) = given
        self.assertEqual((env["WEFT_ENV_LD_PRELOAD"], env["WEFT_PROVIDER"]), ("/libasan.so", "/there/libweft-fi.so"))
        self.assertIn("check-fabtests", argv[0])

    def test_a_part_is_run_alone(self):
        ran = []
        with (
            mock.patch.object(self.check, "fabtests", lambda: ran.append("fabtests") or total.Total()),
            mock.patch.object(self.check, "over", lambda name, *_: ran.append(name) or total.Total()),
            mock.patch.object(self.check, "plants", lambda *_: ran.append("planted") or total.Total()),
            mock.patch.object(self.check, "unit_tests", lambda: ran.append("units") or total.Total()),
            mock.patch.object(self.check.install, "ensure"),
            mock.patch("builtins.print"),
        ):
            for argv, want in [
                ([], ["asan"]),
                (["--long"], ["asan", "fabtests", "valgrind", "units", "planted"]),
                (["--planted"], ["planted"]),
                (["--part", "fabtests", "--part", "valgrind"], ["fabtests", "valgrind"]),
            ]:
                ran.clear()
                self.check.main(argv)
                self.assertEqual(ran, want, argv)


class Cargo(unittest.TestCase):
    def test_the_counts_of_both_runners_are_read(self):
        for line, want in [
            ("     Summary [   0.012s] 12 tests run: 11 passed (1 slow), 1 failed, 2 skipped", total.Total(11, 1, 2)),
            ("     Summary [   0.1s] 1 test run: 1 passed, 0 skipped", total.Total(1, 0, 0)),
            ("     Summary [   9.1s] 3 tests run: 1 passed, 1 failed, 1 timed out, 4 skipped", total.Total(1, 2, 4)),
            ("test result: FAILED. 3 passed; 2 failed; 1 ignored; 0 measured; 0 filtered out", total.Total(3, 2, 1)),
        ]:
            self.assertEqual(cargo.count(1 if want.failed else 0, [line]), want)

    def test_a_build_that_fails_is_a_failure(self):
        self.assertEqual(cargo.count(101, ["error: could not compile"]), total.Total(0, 1, 0))


class Cases(unittest.TestCase):
    def test_every_outcome_is_counted_once(self):
        source = (
            "import unittest\n"
            "class T(unittest.TestCase):\n"
            "    def test_good(self): pass\n"
            "    def test_bad(self): self.fail('planted')\n"
            "    def test_error(self): 1 / 0\n"
            "    def test_skipped(self): self.skipTest('why')\n"
            "    def test_parts(self):\n"
            "        for n in range(3):\n"
            "            with self.subTest(n=n): self.assertNotEqual(n, 1)\n"
        )
        with tempfile.TemporaryDirectory() as folder:
            (pathlib.Path(folder) / "test_planted.py").write_text(source)
            (pathlib.Path(folder) / "test_unreadable.py").write_text("def (")
            with mock.patch("builtins.print"):
                counted = cases.run(folder, folder)
                some = cases.run(folder, folder, wanted=lambda name: name.endswith(("test_good", "test_bad")))
        self.assertEqual(counted, total.Total(passed=1, failed=4, skipped=1))
        self.assertEqual(some, total.Total(passed=1, failed=1))


class AtOnce(unittest.TestCase):
    def test_each_run_is_a_subtest(self):
        source = (
            "import unittest\n"
            "from programs import common\n"
            "def skips(): raise unittest.SkipTest('why')\n"
            "class T(unittest.TestCase):\n"
            "    def test_all(self):\n"
            "        runs = [('good', lambda: None), ('bad', lambda: self.fail('planted')), ('error', lambda: 1 / 0), ('skipped', skips)]\n"
            "        common.at_once(self, [({'run': name}, run) for name, run in runs])\n"
        )
        with tempfile.TemporaryDirectory() as folder:
            (pathlib.Path(folder) / "test_at_once.py").write_text(source)
            with mock.patch("builtins.print"):
                self.assertEqual(cases.run(folder, folder), total.Total(failed=2, skipped=1))

    def test_no_more_than_the_limit(self):
        from programs import common

        for limit in (1, 3):
            running, most, lock = [0], [0], threading.Lock()

            def run():
                with lock:
                    running[0] += 1
                    most[0] = max(most[0], running[0])
                time.sleep(0.05)
                with lock:
                    running[0] -= 1

            common.at_once(self, [({"number": number}, run) for number in range(4)], limit)
            self.assertEqual(most[0], limit)


class QuickStart(unittest.TestCase):
    def test_only_root_has_it(self):
        with mock.patch.object(os, "geteuid", return_value=1000):
            self.assertEqual(spaces.with_quick_start(["a", pathlib.Path("b")]), ["a", "b"])

    def test_not_if_it_may_not_mount(self):
        with mock.patch.object(os, "geteuid", return_value=0), mock.patch.object(subprocess, "run", return_value=mock.Mock(returncode=1)):
            self.assertEqual(spaces.with_quick_start(["a"]), ["a"])

    def test_there_are_no_symbols_inside(self):
        argv = spaces.with_quick_start(["cat", "/proc/kallsyms"])
        if argv[0] == "cat":
            self.skipTest("this user may not mount")
        self.assertEqual(subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True).stdout, "")


class Cache(unittest.TestCase):
    def test_an_interrupted_recipe_is_made_again(self):
        with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, WEFT_CACHE=folder):
            made = []

            def recipe(path):
                made.append(path)
                (path / "half").touch()
                if len(made) == 1:
                    raise cache.CannotMake("planted")
                self.assertEqual(len(list(path.iterdir())), 1, "the half-made directory was not cleared")

            with self.assertRaises(cache.CannotMake):
                cache.ensure("thing", "0" * 12, recipe)
            path = cache.ensure("thing", "0" * 12, recipe)
            self.assertEqual(cache.ensure("thing", "0" * 12, recipe), path)
            self.assertEqual(len(made), 2)
            other = cache.ensure("thing", "1" * 12, lambda path: None)
            self.assertTrue(other.exists() and not path.exists(), "the old recipe's result was left")

    def test_only_trouble_of_the_network_counts_as_such(self):
        with mock.patch.object(cache.time, "sleep"), mock.patch.object(cache, "say"):
            with self.assertRaises(cache.CannotMake):
                cache.download(["sh", "-c", "echo E: Unable to locate package x; exit 100"])
            with self.assertRaises(cache.CannotDownload):
                cache.download(["sh", "-c", "echo E: Failed to fetch http://x; exit 100"])


class Fabtests(unittest.TestCase):
    def setUp(self):
        self.check = script(TOOLS.parent / "conformance" / "check-fabtests")

    def test_an_exclusion_without_a_reason_is_refused(self):
        self.assertEqual(self.check.parse_exclude("# head\n\n-e rdm # later\n", "x"), {"-e rdm": "later"})
        for text in ("-e rdm\n", "-e rdm # \n"):
            with self.assertRaises(self.check.BadExclude):
                self.check.parse_exclude(text, "x")

    def test_the_exclude_files_are_well_formed(self):
        for file in (TOOLS.parent / "conformance" / "exclude").iterdir():
            self.check.parse_exclude(file.read_text(), file.name)

    def test_outcomes(self):
        from fabtests_msg import _outcome

        for statuses, want in [([0, 0], "pass"), ([0, None], "late"), ([61, 61], "notrun"), ([38, 38], "notrun"), ([0, 61], "fail"), ([None, 5], "fail"), ([-11, 0], "fail")]:
            self.assertEqual(_outcome(statuses), want, statuses)

    def test_settings_for_some_tests_reach_no_others(self):
        args = mock.Mock(env=["A=1"], env_for=["^fi_multi_ep=A=x=y:z=1", "^fi_multi_ep=B=2"])
        env = self.check.environment(args, "fi_multi_ep -e msg")
        self.assertEqual((env["A"], env["B"]), ("x=y:z=1", "2"))
        env = self.check.environment(args, "fi_msg")
        self.assertEqual((env["A"], env.get("B")), ("1", None))

    def test_the_long_form_has_no_further_options(self):
        test = self.check.fabtests_rdm.Test("fi_x -x rma", "pair", short="-I 100")
        for long, want in ((False, ["-A", "-I", "100"]), (True, ["-A"])):
            args = mock.Mock(suite="rdm", only=None, env=[], env_for=[], more=["^fi_x=-A"], expect=None, long=long)
            with mock.patch.dict(self.check.LISTS, rdm=[test]), mock.patch.object(self.check.fabtests_msg, "run", return_value=("pass", "")) as run:
                with mock.patch("builtins.print"):
                    self.assertEqual(self.check.run_list(args, pathlib.Path("/x"), None), total.Total(passed=1))
            self.assertEqual(run.call_args.args[-1], want)

    def test_a_report_that_ends_early_is_a_failure(self):
        process = mock.Mock(stdout=["- name:   fi_msg\n", "  result: Pass\n"], returncode=137)
        with mock.patch("builtins.print"):
            self.assertEqual(self.check.follow(process), total.Total(1, 1, 0))


class Mpi(unittest.TestCase):
    """tests/mpi/check: what the ranks have not shown is a failure."""

    def setUp(self):
        self.mpi = script(TOOLS.parent / "mpi" / "check")
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.results = pathlib.Path(folder.name)

    def read(self, *ranks, done=True):
        for rank, outcomes in enumerate(ranks):
            lines = [json.dumps({"test": test, "outcome": outcome, "seconds": 1, "text": "why"}) for test, outcome in outcomes]
            (self.results / str(rank)).write_text("".join(line + "\n" for line in lines))
            if done:
                (self.results / f"{rank}.done").touch()
        run = self.mpi.Run(len(ranks))
        run.read(self.results)
        return run

    def total(self, run, *rules):
        with mock.patch("builtins.print"):
            return self.mpi.report("openmpi", run, self.mpi.rules("\n".join(rules)), mock.Mock(slow=0))

    def test_a_test_counts_once(self):
        one = [("a", "begun"), ("a", "passed"), ("b", "begun"), ("b", "skipped")]
        self.assertEqual(self.total(self.read(one, one)), total.Total(1, 0, 1))

    def test_a_test_that_fails_on_one_rank_fails(self):
        run = self.read([("a", "passed"), ("b", "passed")], [("a", "failed"), ("b", "passed")])
        self.assertEqual(self.total(run), total.Total(1, 1, 0))

    def test_a_rank_that_does_not_end_fails_and_so_does_its_test(self):
        run = self.read([("a", "passed"), ("b", "begun")], [("a", "passed"), ("b", "passed")], done=False)
        self.assertIn("b", run.failed)
        self.assertEqual(self.total(run), total.Total(1, 3, 0))

    def test_no_rank_fails(self):
        self.assertGreater(self.total(self.mpi.Run(2)).failed, 0)

    def test_a_failure_is_excluded_by_name_and_mpi(self):
        run = self.read([("m.C.a", "failed"), ("m.C.b", "passed")])
        self.assertEqual(self.total(run, "fails openmpi m.*.a # x"), total.Total(1, 0, 1))
        self.assertEqual(self.total(run, "fails mpich m.*.a # x"), total.Total(1, 1, 0))

    def test_the_requests_of_all_queue_pairs_are_added_up(self):
        text = "writes 1 reads 0 atomics 2\nwrites 3 reads 4 atomics 0\n"
        self.assertEqual(self.mpi.executed(text), {"writes": 4, "reads": 4, "atomics": 2})

    def test_the_provider_s_own_requests_are_no_rma(self):
        few, many = {"writes": 16, "reads": 9, "atomics": 0}, {"writes": 900, "reads": 800, "atomics": 0}
        kinds = ("writes", "reads")
        self.assertIsNone(self.mpi.emulated(kinds, few, many))
        for native in (few, many | {"reads": 10}, many | {"writes": 20}):
            self.assertIsNotNone(self.mpi.emulated(kinds, few, native))
        self.assertIsNotNone(self.mpi.emulated((*kinds, "atomics"), few, many))
        self.assertIsNone(self.mpi.emulated((*kinds, "atomics"), few, many | {"atomics": 700}))

    def test_in_a_guest_the_ranks_have_the_caller_s_environment_and_programs(self):
        args = mock.Mock(here=pathlib.Path("/tests"), prov="weft", one_sided="", env=["A=1"])
        with (
            mock.patch.dict(os.environ, FI_WEFT_DEVICE="rxe0", FI_PROVIDER="tcp"),
            mock.patch.object(self.mpi, "peer", side_effect=AssertionError),
            mock.patch.object(self.mpi.programs, "run") as run,
        ):
            self.mpi.launch(self.mpi.MPIS["mpich"], args, 2, ["rank.py"], {}, 60)
        argv, env, _ = run.call_args.args
        self.assertEqual(argv, ["mpiexec", "-n", 2, "python3", "rank.py"])
        self.assertEqual([env[name] for name in ("FI_WEFT_DEVICE", "FI_PROVIDER", "A")], ["rxe0", "weft", "1"])

    def test_a_rule_has_a_reason(self):
        for line in ("fails openmpi m.C.a", "fails lam m.C.a # x", "m.C.a # x"):
            with self.assertRaises(self.mpi.BadList):
                self.mpi.rules(line)
        self.assertGreater(len(self.mpi.rules(self.mpi.EXCLUDED.read_text())), 0)

    def test_the_provider_is_that_of_each_rank(self):
        mpich, openmpi = self.mpi.MPIS["mpich"], self.mpi.MPIS["openmpi"]
        one = "x.c:343: mtl:ofi:provider: {}\n"
        self.assertIsNone(self.mpi.used(openmpi, one.format("weft") * 2, 2, "weft"))
        self.assertIsNone(self.mpi.used(mpich, "libfabric provider: weft - softverbs\n", 2, "weft"))
        for names in (["weft"], ["weft", "tcp"], ["weft;ofi_rxm"] * 2, []):
            self.assertIsNotNone(self.mpi.used(openmpi, "".join(map(one.format, names)), 2, "weft"), names)
        for name in ("weft;ofi_rxm", "tcp"):
            self.assertIsNotNone(self.mpi.used(mpich, f"libfabric provider: {name} - x\n", 2, "weft"))


class Programs(unittest.TestCase):
    def test_a_program_that_hangs_is_killed_and_told_apart(self):
        ended = programs.run(["sleep", "60"], dict(os.environ), seconds=0.2)
        self.assertTrue(ended.late)
        self.assertEqual(ended.status, -9)

    def test_the_callers_own_settings_stay_outside(self):
        with mock.patch.dict(os.environ, FI_PROVIDER="tcp", LD_PRELOAD="x", SOFTVERBS_NODE="3"):
            env = programs.SYSTEM.env()
        self.assertFalse([key for key in env if key in ("FI_PROVIDER", "LD_PRELOAD", "SOFTVERBS_NODE")])


class Commands(unittest.TestCase):
    def texts(self, text):
        return [command.text for command in commands.of_text(text, "x")]

    def test_blocks_and_spans_are_found(self):
        page = "A `make demo`, `fi_mr_reg`, `tests/vm/check` and `FI_X=1 fi_info -e`.\n```sh\nmake    # builds\ngcc x.c\n```\n```\nmake no\n```\n"
        self.assertEqual(self.texts(page), ["make", "gcc x.c", "make demo", "FI_X=1 fi_info -e"])

    def test_lines_that_depend_on_each_other_stay_together(self):
        self.assertEqual(self.texts("```sh\nmake\nexport A=1\nrun\n```\n"), ["make ; export A=1 ; run"])
        self.assertEqual(self.texts("```sh\na  # on one terminal\nb  # on another\n```\n"), ["a ; b"])

    def test_help_is_read_with_its_settings(self):
        help = "vm: all ## run a command: CMD='fi_info -p weft'\nfuzz: ## one, TARGET=x, for SECONDS=60\nall: ## build\nX := 1\n"
        want = ["make vm", "make vm CMD='fi_info -p weft'", "make fuzz", "make fuzz TARGET=x SECONDS=60", "make all"]
        self.assertEqual([command.text for command in commands.of_makefile(help)], want)

    def test_each_listing_has_a_kind_and_a_reason_and_is_shown(self):
        shown = {command.text for command in commands.shown()}
        self.assertEqual(sorted(set(commands.listings()) - shown), [], "listed, but no page shows it")
        self.assertEqual(sorted(shown - set(commands.listings())), [], "not listed in tests/tools/commands")
        for text in ("make x\n", "make x  # later: y\n", "make x  # tier:\n", "make x # tier: y\nmake x # tier: y\n"):
            with self.assertRaises(commands.BadListing):
                commands.listings(text)

    def test_a_command_that_fails_or_prints_something_else_is_a_failure(self):
        documented = script(TOOLS / "documented")
        with mock.patch("builtins.print"):
            for result, expected, failed in [
                (programs.Result(0, "provider: weft", ""), "provider: weft", 0),
                (programs.Result(0, "provider: tcp", ""), "provider: weft", 1),
                (programs.Result(61, "provider: weft", ""), "", 1),
            ]:
                counted = documented.tell(commands.Command(("x",), "y"), result, expected)
                self.assertEqual(counted, total.Total(1 - failed, failed, 0))


class Man(unittest.TestCase):
    def test_the_marks_become_roff(self):
        man = script(TOOLS / "man")
        page = "---\nlayout: page\ntagline: x\n---\n# NAME\n\nfi_x - a *b* **c** `d-e` f_g_h\n\n*TERM*\n: what\n\n- item\n\n```\n.raw\n```\n"
        out = "\n".join(man.roff(page, "fi_x", "7"))
        for want in (".SH NAME", "\\fIb\\fP", "\\fBc\\fP", "\\fBd\\-e\\fP", "f_g_h", ".TP\n\\fITERM\\fP\nwhat", ".IP \\(bu 3\nitem", "\\&.raw"):
            self.assertIn(want, out)


if __name__ == "__main__":
    unittest.main()
