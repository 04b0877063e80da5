"""Runs mpi4py's tests in one rank of an MPI program, and writes the outcome of each to a file.

usage: rank.py TESTS RESULTS SECONDS [options of mpi4py's test/main.py]

The file RESULTS/RANK has a line of JSON for the begin and for the end of each test. A test that
takes longer than SECONDS ends the rank: the interpreter's stacks are then in RESULTS/RANK.stacks.
"""

import faulthandler
import json
import pathlib
import sys
import time
import unittest


class Outcomes(unittest.TestResult):
    def __init__(self, results, seconds):
        super().__init__()
        from mpi4py import MPI  # not before main.py has set the level of threads

        rank = MPI.COMM_WORLD.Get_rank()
        self.seconds = seconds
        self.file = open(results / str(rank), "w", buffering=1)
        self.stacks = open(results / f"{rank}.stacks", "w")

    def line(self, test, outcome, text=""):
        took = time.monotonic() - self.start if hasattr(self, "start") else 0
        entry = {"test": test.id(), "outcome": outcome, "seconds": round(took, 3), "text": text}
        self.file.write(json.dumps(entry) + "\n")

    def startTest(self, test):
        super().startTest(test)
        self.start = time.monotonic()
        self.line(test, "begun")
        faulthandler.dump_traceback_later(self.seconds, exit=True, file=self.stacks)

    def stopTest(self, test):
        super().stopTest(test)
        faulthandler.cancel_dump_traceback_later()

    def addSuccess(self, test):
        super().addSuccess(test)
        self.line(test, "passed")

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        self.line(test, "skipped", reason)

    def addExpectedFailure(self, test, error):
        super().addExpectedFailure(test, error)
        self.line(test, "skipped", "fails as mpi4py expects")

    def addUnexpectedSuccess(self, test):
        super().addUnexpectedSuccess(test)
        self.line(test, "failed", "passed, though mpi4py expects a failure")

    def addFailure(self, test, error):
        super().addFailure(test, error)
        self.line(test, "failed", self._exc_info_to_string(error, test))

    addError = addFailure

    def addSubTest(self, test, subtest, error):
        super().addSubTest(test, subtest, error)
        if error is not None:
            self.line(test, "failed", self._exc_info_to_string(error, subtest))


class Runner:
    def __init__(self, results, seconds):
        self.results, self.seconds, self.done = results, seconds, False

    def run(self, tests):
        outcomes = Outcomes(self.results, self.seconds)
        tests.run(outcomes)
        with open(outcomes.file.name + ".done", "w"):
            self.done = True
        return outcomes


def run(tests, results, seconds, options):
    sys.path.insert(0, tests)
    sys.dont_write_bytecode = True
    import main  # mpi4py's

    runner = Runner(pathlib.Path(results), seconds)
    try:
        # without a search for a build of mpi4py beside the tests, which imports setuptools
        main.main(module=None, argv=["main.py", "-q", "--no-builddir", *options], testRunner=runner)
    except SystemExit:
        # the files have the outcome of the tests: the status is that of the end of the MPI
        if not runner.done:
            raise


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2], float(sys.argv[3]), sys.argv[4:])
