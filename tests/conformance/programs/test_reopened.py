"""Objects that are opened and closed again and again: tests/conformance/c/reopened.c."""

from lib import programs

from . import common


class Reopened(common.CProgram):
    SOURCE = "reopened"
    OPTIONS = ("-D_GNU_SOURCE",)

    def test_regions(self):
        self.succeeds(programs.SYSTEM, "regions", "manual", "10000", "50000")

    def test_queues_and_address_vectors(self):
        # the memory of the last 1,024 closed objects is not used again
        self.succeeds(programs.SYSTEM, "queues", "manual", "2000", "4000")

    def test_endpoints(self):
        # a process keeps the memory of 512 queue pairs or receive queues
        self.succeeds(programs.SYSTEM, "endpoints", "manual", "1200", "800")
        self.succeeds(programs.SYSTEM, "endpoints", "auto", "1200", "800")
