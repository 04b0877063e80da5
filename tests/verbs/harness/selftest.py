"""Whether this harness detects failures. It runs first, and is short."""
import contextlib
import io
import tempfile
import types

from . import cm, process, programs, suite
from .expected import Expected, Tally

LIST = """# a comment
fail | known | owner | reason
skip | device.* | none | reason
fail | [new] one | owner | reason
may | gpu | none | reason
"""


def judged(*results):
    """The totals of results judged by LIST; the printed lines are discarded."""
    with tempfile.NamedTemporaryFile("w+", suffix=".list") as file, contextlib.redirect_stdout(io.StringIO()):
        file.write(LIST)
        file.flush()
        tally = Tally(Expected(file.name), False)
        for name, outcome in results:
            tally.result(name, outcome, "why")
        return tally.passed, tally.failed, tally.skipped + tally.known


def run():
    """Raises AssertionError if a failure is not detected."""
    assert judged(("a", "pass"), ("known", "fail"), ("device.x", "skip")) == (1, 0, 2)
    assert judged(("a", "fail"), ("b", "skip"), ("known", "pass"), ("known", "skip")) == (0, 4, 0)
    assert judged(("gpu", "pass"), ("gpu", "skip"), ("gpu", "fail")) == (1, 1, 1)
    assert judged(("device.x", "pass"), ("device.x", "fail")) == (0, 2, 0)
    assert judged(("[new] one", "fail"), ("one", "fail"), ("[new] known", "fail")) == (0, 1, 2)

    env = {"PATH": "/usr/bin:/bin"}
    assert process.run_one(["false"], env, 5)[0] == "exit 1"
    assert process.run_one(["sh", "-c", "kill -SEGV $$"], env, 5)[0] == "killed by SIGSEGV"
    why, text = process.run_one(["sh", "-c", "echo before; exec sleep 60"], env, 0.3)
    assert why.startswith("hung") and "before" in text

    assert programs.exchanged(["ibv_rc_pingpong"], "  local address", "client")
    assert programs.exchanged(["ibv_rc_pingpong"], "invalid data in page 3\n8192 bytes in 0.01 seconds", "client")
    assert programs.exchanged(["ibv_rc_pingpong"], "8192 bytes in 0.01 seconds = 1", "client") is None
    assert programs.measured(["ib_send_bw"], " #bytes  #iterations  BW peak\n", "client")
    assert programs.measured(["ib_send_bw"], " 65536  0  0.00  0.00  0.0\n", "client")
    assert programs.measured(["ib_send_bw", "-a"], " 65536  1000  1.00  1.00  0.0\n", "client")
    assert programs.measured(["ib_send_bw"], " 65536  1000  10.00  9.00  0.0\nFailed to x", "client")
    assert programs.measured(["ib_send_bw"], " 65536  1000  10.00  9.00  0.0\n", "client") is None
    assert programs.measured(["ib_read_lat"], " 2  1000  inf  inf  inf\n", "client") is None

    crash = "server still running, client killed by SIGSEGV"
    assert cm.too_early(["ib_send_lat", "-R"], crash, f"RDMA CM event error:\n{cm.TOO_EARLY}\n")
    assert cm.too_early(["ib_send_lat", "-R"], crash.replace("SIGSEGV", "SIGBUS"), cm.TOO_EARLY)
    assert not cm.too_early(["ib_send_lat", "-R"], crash, "")
    assert not cm.too_early(["ib_send_lat", "-R"], "client exit 1", cm.TOO_EARLY)
    assert not cm.too_early(["rping"], crash, cm.TOO_EARLY)

    tests_that_misbehave()


TESTS = """
import os, time, unittest
class T(unittest.TestCase):
    def test_a_passes(self): pass
    def test_b_dies(self): os.abort()
    def test_c_fails(self): self.assertEqual(1, 2)
    def test_d_hangs(self): time.sleep(60)
    def test_e_skips(self): self.skipTest("because")
    def test_f_passes(self): pass
"""


def tests_that_misbehave():
    """A test that dies or hangs affects no other test."""
    with tempfile.TemporaryDirectory() as folder:
        with open(f"{folder}/args_parser.py", "w") as file:
            file.write("class parser:\n    parse_args = staticmethod(lambda: None)\n")
        with open(f"{folder}/__init__.py", "w") as file:
            file.write(TESTS)
        world = types.SimpleNamespace(
            command=lambda argv: argv, env={"PATH": "/usr/bin:/bin"}, tests=folder, worker=suite.WORKER)
        found = []
        suite.run_tests(world, suite.names(world), 1.5, lambda name, outcome, *_: found.append((name, outcome)))
        outcomes = [outcome for _, outcome in sorted(found)]
        assert outcomes == ["pass", "fail", "fail", "fail", "skip", "pass"], found
