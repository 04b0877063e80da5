"""Short-lived clients of one server, whose memory does not grow with their number:
tests/conformance/c/rdm_visitors.c."""

from lib import programs

from . import common

# A process keeps the memory of 512 queue pairs; the clients before the counted ones fill it. Where a
# client takes longer, the memory of its queue pairs is in the bound.
KEPT = 600


class Visitors(common.CProgram):
    SOURCE = "rdm_visitors"
    OPTIONS = ("-D_GNU_SOURCE",)

    def clients(self, *runs, **more):
        """Runs of a mode, a form of progress, and the numbers of clients and bytes."""

        def run(mode, *arguments):
            return lambda: self.succeeds(programs.SYSTEM, mode, *map(str, arguments), **more)

        common.at_once(self, [({"mode": each[0]}, run(*each)) for each in runs], 3)

    def test_clients_that_close_their_endpoints(self):
        # a list that grows by doubling may do it among the counted clients: 120 KiB
        self.clients(
            ("received", "manual", KEPT, 300, 500),
            ("answered", "auto", KEPT, 300, 500),
            ("inserted", "manual", KEPT, 300, 500),
        )

    def test_clients_that_are_killed(self):
        # the bounds of the heap have the memory of two queue pairs of each
        self.clients(("killed", "manual", 200, 60, 5000), ("left", "auto", 200, 60, 5000))

    def test_clients_on_xrc(self):
        self.clients(
            ("received", "manual", 32, 16, 6000),
            ("answered", "auto", 32, 16, 6000),
            ("killed", "auto", 32, 24, 7000),
            WEFT_TEST_XRC="1",
        )

    def test_clients_of_a_passive_endpoint(self):
        self.clients(("connected", "manual", KEPT, 300, 48))
