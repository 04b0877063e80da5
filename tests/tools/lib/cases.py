"""Runs Python test cases as a tier does: prints a line for each, the reason of each failure, and
the total."""

import os
import sys
import time
import unittest

from .total import Total


def _processor_seconds():
    """Of this process and its children that have ended."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


class _Result(unittest.TestResult):
    def __init__(self):
        super().__init__()
        self.total = Total()

    def startTest(self, test):
        super().startTest(test)
        self._begin()
        self.bad = False

    def _begin(self):
        self.start, self.used = time.monotonic(), _processor_seconds()

    def _line(self, outcome, test, note=""):
        """With the seconds of the case, and those that processors computed for it: a case that
        sleeps can run beside others."""
        seconds, used = time.monotonic() - self.start, _processor_seconds() - self.used
        print(f"{outcome:9} {_name(test)} ({seconds:.1f} s, {used:.1f} s of processors){note}", flush=True)

    def _reason(self, error):
        text = str(error[1]) if issubclass(error[0], AssertionError) else self._exc_info_to_string(error, self._case)
        print("\n".join("    " + line for line in text.splitlines()[-60:]), flush=True)

    def addSubTest(self, test, subtest, error):
        super().addSubTest(test, subtest, error)
        if error is not None:
            self._bad(subtest, error)

    def _bad(self, test, error):
        self._case = test
        self.total += Total(failed=1)
        self.bad = True
        self._line("FAILED", test)
        self._reason(error)

    def addError(self, test, error):
        super().addError(test, error)
        if not hasattr(self, "start"):
            self._begin()
        self._bad(test, error)

    def addFailure(self, test, error):
        super().addFailure(test, error)
        self._bad(test, error)

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        self.total += Total(skipped=1)
        if not hasattr(self, "start"):
            self._begin()
        self._line("skipped", test, f": {reason}")

    def addSuccess(self, test):
        super().addSuccess(test)
        if not self.bad:
            self.total += Total(passed=1)
            self._line("ok", test)


def _name(test):
    return test.id() if hasattr(test, "id") else str(test)


def _cases(suite):
    for each in suite:
        if isinstance(each, unittest.TestSuite):
            yield from _cases(each)
        else:
            yield each


def run(folder, top, pattern="test_*.py", wanted=None):
    """Runs the cases of a folder and returns the total; the caller prints it. `wanted`: called with
    the name of each case, whether it is to run; by default all run."""
    sys.path.insert(0, str(top))
    suite = unittest.TestLoader().discover(str(folder), pattern=pattern, top_level_dir=str(top))
    if wanted:
        suite = unittest.TestSuite(case for case in _cases(suite) if wanted(_name(case)))
    result = _Result()
    suite.run(result)
    return result.total
