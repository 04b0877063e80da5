"""Address vectors: tests/conformance/c/av.c."""

from . import common


class AddressVectors(common.CProgram):
    SOURCE = "av"

    def succeeds(self, libfabric, mode):
        return super().succeeds(libfabric, mode)

    @common.per_release
    def test_attributes(self, libfabric):
        self.succeeds(libfabric, "open")

    @common.per_release
    def test_the_lowest_unused_index_is_assigned(self, libfabric):
        self.succeeds(libfabric, "indices")

    @common.per_release
    def test_each_format_of_addresses(self, libfabric):
        self.succeeds(libfabric, "formats")

    @common.per_release
    def test_insertsvc(self, libfabric):
        self.succeeds(libfabric, "service")

    @common.per_release
    def test_insertsym(self, libfabric):
        self.succeeds(libfabric, "symmetric")

    @common.per_release
    def test_addresses_that_fail(self, libfabric):
        self.succeeds(libfabric, "failed")

    @common.per_release
    def test_events(self, libfabric):
        self.succeeds(libfabric, "events")

    @common.per_release
    def test_duplicates(self, libfabric):
        self.succeeds(libfabric, "duplicates")

    @common.per_release
    def test_buffers_that_are_too_short(self, libfabric):
        self.succeeds(libfabric, "lengths")

    @common.per_release
    def test_removed_addresses(self, libfabric):
        self.succeeds(libfabric, "removed")

    @common.per_release
    def test_close(self, libfabric):
        self.succeeds(libfabric, "closed")

    @common.per_release
    def test_a_domain_of_connected_endpoints_has_none(self, libfabric):
        self.succeeds(libfabric, "connected")
