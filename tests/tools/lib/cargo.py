"""Runs cargo's tests and counts them: by cargo-nextest if it is installed, else by `cargo test`."""

import os
import re
import shutil
import subprocess

from .programs import TOP
from .total import Total

CARGO = os.environ.get("CARGO", "cargo")
NEXTEST = re.compile(r"Summary \[.*\] +\d+ tests? run: (\d+) passed(?: \([^)]*\))?(?:, (\d+) failed)?(?:, (\d+) timed out)?(?:, (\d+) skipped)?")
LIBTEST = re.compile(r"^test result: \w+\. (\d+) passed; (\d+) failed; (\d+) ignored")
# The tests that take longest wait for processes that are stopped or have ended, without a processor.
THREADS = str(2 * (os.cpu_count() or 1))
ANSI = re.compile(r"\x1b\[[0-9;]*m")


def stream(argv, env=None):
    """Runs a step and passes its output on; returns status and lines. `env`: its environment, by
    default the caller's."""
    lines = []
    process = subprocess.Popen(
        argv, cwd=TOP, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    with process.stdout:
        for line in process.stdout:
            lines.append(ANSI.sub("", line.rstrip("\n")))
            print(line, end="", flush=True)
    return process.wait(), lines


def count(status, lines):
    """The total of a run of tests. A run that failed without a failed test, for instance to build,
    counts as one failure."""
    total = Total()
    for line in lines:
        if match := NEXTEST.search(line):
            passed, failed, late, skipped = (int(part or 0) for part in match.groups())
            total += Total(passed, failed + late, skipped)
        elif match := LIBTEST.match(line):
            total += Total(*map(int, match.groups()))
    if status != 0 and not total.failed:
        total += Total(failed=1)
    return total


def run(name, *argv, env=None):
    print(f"-- {name}", flush=True)
    status, lines = stream(argv, env)
    total = count(status, lines)
    print(f"{'ok    ' if status == 0 else 'FAILED'} {name}: {total}", flush=True)
    return total


def tests(name, *packages, skip=(), env=None):
    """Runs the tests of packages (`-p NAME`, `--workspace`, ...); `skip`: parts of the names of
    tests that are not run."""
    # not an option: test programs with a runner of their own take it for a name
    env = dict(os.environ if env is None else env, NEXTEST_TEST_THREADS=THREADS, RUST_TEST_THREADS=THREADS)
    if shutil.which("cargo-nextest"):
        options = ["--no-fail-fast", "--status-level", "fail", "--cargo-quiet"]
        wanted = ["-E", "not (" + " or ".join(f"test({part})" for part in skip) + ")"] if skip else []
        total = run(name, CARGO, "nextest", "run", *packages, "--locked", *options, *wanted, env=env)
        # nextest counts tests that the filter excludes as skipped
        return total + Total(skipped=-len(skip)) if skip else total
    left_out = [word for part in skip for word in ("--skip", part)]
    return run(name, CARGO, "test", "-q", *packages, "--locked", "--no-fail-fast", "--", *left_out, env=env)
