"""A thread peeks at an event queue that another thread reads: tests/conformance/c/peek.c."""

from . import common


class Peek(common.CProgram):
    SOURCE = "peek"
    OPTIONS = ("-rdynamic", "-pthread")

    @common.per_release
    def test_a_connection_request_is_read_once_with_the_info_of_the_peek(self, libfabric):
        for mode in ("read", "wait", "two"):
            with self.subTest(mode=mode):
                self.succeeds(libfabric, mode)
