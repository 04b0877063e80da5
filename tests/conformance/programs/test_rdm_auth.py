"""Authorization keys of endpoints with many peers: tests/conformance/c/rdm_auth.c."""

from lib import programs

from . import common


class RdmAuth(common.CProgram):
    SOURCE = "rdm_auth"

    @common.per_release
    def test_messages(self, libfabric):
        for progress in ("manual", "auto"):
            with self.subTest(progress=progress):
                self.succeeds(libfabric, "messages", progress)

    @common.per_release
    def test_regions(self, libfabric):
        self.succeeds(libfabric, "regions", "manual")


class RdmAuthOnXrc(RdmAuth):
    XRC = True
