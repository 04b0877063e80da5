"""A server whose clients come and go: tests/conformance/c/rdm_churn.c."""

import random
import unittest

from lib import programs

from . import common


class RdmChurn(common.CProgram):
    SOURCE = "rdm_churn"

    def clients_of(self, mode):
        for xrc in ("0", "1"):
            for progress in ("manual", "auto"):
                seed = str(random.randrange(10**6))
                with self.subTest(mode=mode, xrc=xrc, progress=progress, seed=seed):
                    self.succeeds(programs.SYSTEM, mode, progress, "3", seed, WEFT_TEST_XRC=xrc, FI_WEFT_CONNECT_TIMEOUT="4")

    def test_addresses_stay(self):
        self.clients_of("keep")

    def test_addresses_are_removed_afterwards(self):
        self.clients_of("remove")

    def test_addresses_are_removed_while_operations_are_pending(self):
        self.clients_of("early")

    def test_the_next_client_begins_at_once(self):
        self.clients_of("swift")


if __name__ == "__main__":
    unittest.main()
