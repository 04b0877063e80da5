"""Keys of the directory that are revoked while peers hold them: tests/conformance/c/revoked.c."""

import re
import unittest

from lib import programs

from . import common

# the mr_mode that the programs offer; with FI_MR_PROV_KEY alone, keys are handles of the directory
ALLOCATED, PROV_KEY, MMU_NOTIFY = 1 << 5, 1 << 6, 1 << 7
FORMS = {"application's keys": 0, "handles": PROV_KEY}
PINNED = {"SOFTVERBS_ODP": "0"}


class Revoked(common.CProgram):
    SOURCE = "revoked"

    def revoked(self, mode, bits, how="0", libfabric=programs.SYSTEM, **more):
        ended = self.succeeds(libfabric, mode, str(bits), how, **more)
        for line in re.findall(r"^.*: median .*$", ended.out, re.M):
            print(f"     {mode} {how}: {line}", flush=True)
        return ended

    @common.per_release
    def test_idle_initiators_are_not_waited_for(self, libfabric):
        for how in ("poll", "sleep", "compute", "send"):
            for form, bits in FORMS.items():
                with self.subTest(how=how, form=form):
                    self.revoked("idle", bits, how, libfabric)

    def test_idle_initiators_while_a_region_is_refreshed(self):
        for how in ("poll", "sleep", "compute", "send"):
            with self.subTest(how=how):
                self.revoked("refresh", MMU_NOTIFY, how, **PINNED)

    @common.per_release
    def test_closing_regions_that_are_written_to(self, libfabric):
        for form, bits in FORMS.items():
            with self.subTest(form=form):
                self.revoked("writing", bits, libfabric=libfabric)

    def test_a_stopped_initiator(self):
        for form, bits in FORMS.items():
            with self.subTest(form=form):
                self.revoked("stopped", bits, "100")

    def test_a_stopped_initiator_that_holds_too_many_keys(self):
        """More closed regions than the limit of pending ones: the connection is ended, and both
        sides have their events.
        """
        ended = self.revoked("stopped", 0, "4200")
        self.assertIn("the connection has ended", ended.out, ended)

    def test_memory_of_closed_regions_is_not_locked(self):
        """A stopped initiator has not acknowledged: with only keys to revoke, the connection need
        not end.
        """
        # An initiator that is stopped between its look-up of the key and the end of the copy loses
        # its connection: 1 of about 1,000 runs on a quiet machine, 4 of 600 beside 29 others, and
        # two in a row were seen. A device that always ends the connection fails each of 5 runs.
        runs = (self.revoked("pinned", ALLOCATED, SOFTVERBS_MEMLOCK="1", **PINNED) for _ in range(5))
        self.assertTrue(any("the connection goes on" in ended.out for ended in runs))


if __name__ == "__main__":
    unittest.main()
