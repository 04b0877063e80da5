"""Runs tests of rdma-core in the Python that pyverbs was built for; started by suite.py.

    worker.py TESTS_DIRECTORY REPORT_FD [--list]

Reads names of tests from stdin (one on a line) and writes one JSON object per event to the
descriptor:

    {"list": [...]}
    {"start": name}
    {"end": name, "outcome": ..., "why": ..., "trace": ...}

A process of its own, so that a crash or a hang affects one test only.
"""
import faulthandler
import json
import multiprocessing
import os
import signal
import sys
import traceback
import unittest
from importlib.machinery import SourceFileLoader


def flatten(suite):
    for item in suite:
        if isinstance(item, unittest.TestSuite):
            yield from flatten(item)
        else:
            yield item


class Report(unittest.TestResult):
    def __init__(self, send):
        super().__init__()
        self.send, self.own, self.state = send, os.getpid(), None

    def startTest(self, test):
        super().startTest(test)
        self.state = ("pass", "", "")
        self.send(start=test.id())

    def stopTest(self, test):
        super().stopTest(test)
        # The children of a test that forks must not report it a second time.
        if os.getpid() == self.own:
            outcome, why, trace = self.state
            self.send(end=test.id(), outcome=outcome, why=why, trace=trace)

    def failure(self, test, err):
        why = traceback.format_exception_only(err[0], err[1])[-1].strip()
        self.state = ("fail", why, "".join(traceback.format_exception(*err)))
        if not isinstance(test, unittest.TestCase):
            # setUpClass or setUpModule failed: none of its tests starts.
            self.send(holder=test.id(), why=why)

    def addError(self, test, err):
        super().addError(test, err)
        self.failure(test, err)

    def addFailure(self, test, err):
        super().addFailure(test, err)
        self.failure(test, err)

    def addSubTest(self, test, subtest, err):
        super().addSubTest(test, subtest, err)
        if err is not None:
            self.failure(test, err)

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        self.state = ("skip", reason, "")

    def addUnexpectedSuccess(self, test):
        super().addUnexpectedSuccess(test)
        self.state = ("fail", "unexpected success", "")


def give_address():
    """The tests of the connection manager take their address from the network interface that the
    device has in sysfs. This device has every address of the host."""
    base = sys.modules.get("tests.base")
    if base:  # the tests of this harness have none
        base.RDMACMBaseTest._get_ip_mac = lambda self, dev, port, gid: self.args.append(
            [dev, port, gid, "127.0.0.1", None])


def main():
    # The tests were written for fork; Python 3.14 has another default.
    multiprocessing.set_start_method("fork")
    directory, fd = sys.argv[1], int(sys.argv[2])
    listing = "--list" in sys.argv
    sys.argv[1:] = []
    # A test blocked in a verb cannot run Python's signal handlers: this handler prints from C.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    faulthandler.enable()
    sys.path.insert(0, directory)
    from args_parser import parser
    parser.parse_args()
    tests = SourceFileLoader("tests", os.path.join(directory, "__init__.py")).load_module()
    give_address()
    known = {test.id(): test for test in flatten(unittest.defaultTestLoader.loadTestsFromModule(tests))}

    def send(**event):
        os.write(fd, (json.dumps(event) + "\n").encode())

    if listing:
        send(list=list(known))
        return
    wanted = [known[line.strip()] for line in sys.stdin if line.strip()]
    unittest.TestSuite(wanted).run(Report(send))
    send(done=True)


main()
