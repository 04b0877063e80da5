"""A failed call leaves one line in the log, with its reason and the place in the source."""

import os
import re
import subprocess
import tempfile
import unittest

from lib import programs

from . import common

SOURCES = programs.TOP / "tests" / "conformance" / "c"

# each call of c/refused.c, and the reason in its log line
REASONS = {
    "no descriptor": r"-FI_EINVAL: the buffer of 4096 bytes at 0x\w+ has no descriptor; FI_MR_LOCAL requires one",
    "second descriptor missing": r"-FI_EINVAL: the buffer of 4096 bytes at 0x\w+ has no descriptor; FI_MR_LOCAL requires one",
    "foreign descriptor": r"-FI_EINVAL: 0x\w+ is not the descriptor of an open region",
    "receive without descriptor": r"-FI_EINVAL: the buffer of 4096 bytes at 0x\w+ has no descriptor; FI_MR_LOCAL requires one",
    "too many buffers": r"-FI_EINVAL: the operation has 17 buffers; iov_limit is 16",
    "too many receive buffers": r"-FI_EINVAL: the operation has 17 buffers; iov_limit is 16",
    "vector at NULL": r"-FI_EINVAL: iov is NULL and its count is 1",
    "message too long": r"-FI_EMSGSIZE: the operation has 1073741825 bytes; the maximum is 1073741824",
    "receive too long": r"-FI_EMSGSIZE: the operation has 1073741825 bytes; the maximum is 1073741824",
    "inject too long": r"-FI_EMSGSIZE: the operation has 65 bytes; inject_size is 64",
    "flags of a send": r"-FI_EBADFLAGS: the operation does not support all of the flags 0x10000",
    "flags of a receive": r"-FI_EBADFLAGS: the operation does not support all of the flags 0x10000",
    "message at NULL": r"-FI_EINVAL: msg is NULL",
    "lengths differ": r"-FI_EINVAL: the local buffers have 4096 bytes, the remote range has 64 bytes",
    "two remote ranges": r"-FI_EINVAL: the operation has 2 remote ranges; rma_iov_limit is 1",
    "commit without FI_RMA_PMEM": r"-FI_EBADFLAGS: FI_COMMIT_COMPLETE requires an endpoint that was opened with FI_RMA_PMEM",
    "remote data without FI_RX_CQ_DATA": r"-FI_EOPNOTSUPP: remote CQ data of a write requires .* mode FI_RX_CQ_DATA",
    "bad key": r"-FI_EKEYREJECTED: key 0x10000000000 is not an rkey, and the peer's directory has no keys of this form",
    "two elements": r"-FI_EMSGSIZE: the atomic has 2 elements; the maximum is 1",
    "unaligned target": r"-FI_EINVAL: the remote address 0x\w+1 of the atomic is not a multiple of 8",
    "unsupported atomic": r"-FI_EOPNOTSUPP: fi_atomic does not support fi_op \d+ on fi_datatype \d+; call fi_query_atomic first",
    "operand at NULL": r"-FI_EINVAL: the operand of the atomic is NULL",
    "result at NULL": r"-FI_EINVAL: the result of the atomic is NULL",
    "region of no bytes": r"-FI_EINVAL: the buffer of 0 bytes at 0x\w+ is empty, or exceeds the address space",
    "access that there is not": r"-FI_EINVAL: access 0x1000000000000000 has bits that are not access flags",
    "offset": r"-FI_EINVAL: offset 0x\w+ is reserved, and must be 0",
    "flags of a region": r"-FI_EBADFLAGS: fi_mr_reg does not support the flags 0x40000",
    "events without FI_RMA_EVENT": r"-FI_EBADFLAGS: FI_RMA_EVENT requires a domain that was opened with it",
    "persistent without FI_RMA_PMEM": r"-FI_EBADFLAGS: FI_RMA_PMEM requires a domain that was opened with it",
    "buffers of a region": r"-FI_EINVAL: iov is 0x\w+ and its count 9; the count can be 1 to 8",
    "enabled twice": r"-FI_EOPBADSTATE: the region was not created disabled",
    "bound to NULL": r"-FI_EINVAL: the object to bind is NULL",
    "bound to a queue": r"-FI_EINVAL: only a counter or an endpoint can be bound to a region",
    "refreshed elsewhere": r"-FI_EINVAL: the range of \d+ bytes at 0x\w+ is empty, or no buffer of the region contains it",
    "room for a raw key": r"-FI_ETOOSMALL: key_size is 0; the raw key has 8 bytes",
    "no raw key": r"-FI_EINVAL: the 7 bytes are not a raw key of this version, or are damaged",
    "key that is not mapped": r"-FI_EINVAL: key 0x5 is not mapped",
    "domain in use": r"fi_close of FI_CLASS_DOMAIN: -FI_EBUSY: 3 open objects use it",
    "queue in use": r"fi_close of FI_CLASS_CQ: -FI_EBUSY: 1 open objects use it",
    "closed twice": r"-FI_EINVAL: the object is closed",
    "refreshed when closed": r"-FI_EINVAL: the object is closed",
}


class Refused(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.program = os.path.join(cls.folder.name, "refused")
        subprocess.run(["gcc", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-o", cls.program, SOURCES / "refused.c", "-lfabric"], check=True)

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def refusals(self, libfabric, level):
        ended = programs.run([self.program, "weft", "127.0.0.1"], libfabric.env(FI_LOG_LEVEL=level), seconds=60)
        self.assertEqual(ended.status, 0, ended)
        parts = re.findall(r"^== (?!end$)(.*)\n((?s:.*?))^== end$", ended.err, re.M)
        self.assertEqual({name for name, _ in parts}, set(REASONS), ended)
        return parts, ended

    @common.per_release
    def test_each_refusal_leaves_one_line_with_its_reason(self, libfabric):
        parts, ended = self.refusals(libfabric, "info")
        for name, text in parts:
            with self.subTest(call=name):
                lines = [line for line in text.splitlines() if ":weft:" in line]
                self.assertEqual(len(lines), 1, text)
                self.assertRegex(lines[0], rf"<info> .*{REASONS[name]}$")
        # libfabric itself logs the provider's parameters
        of_weft = [line for line in ended.err.splitlines() if ":weft:" in line and ":fi_param_" not in line]
        self.assertGreater(len(of_weft), len(REASONS))
        for line in of_weft:
            # the function, after its type or module, and the line number
            self.assertRegex(line, r":weft:\w+:\w+::\w+\(\):[1-9]\d*<\w+> ")

    def test_that_there_are_none_below_that_level(self):
        parts, _ = self.refusals(programs.SYSTEM, "warn")
        for name, text in parts:
            self.assertNotIn(":weft:", text, name)
