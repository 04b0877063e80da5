"""What is refused leaves one line in the log, with its reason and the place in the source."""

import os
import re
import subprocess
import tempfile
import unittest

from lib import programs

from . import common

SOURCES = programs.TOP / "tests" / "conformance" / "c"

# each call of c/refused.c, and the reason that its line gives
REASONS = {
    "no descriptor": r"-FI_EINVAL: the buffer of 4096 bytes at 0x\w+ has no descriptor, which FI_MR_LOCAL demands",
    "second descriptor missing": r"-FI_EINVAL: the buffer of 4096 bytes at 0x\w+ has no descriptor, which FI_MR_LOCAL demands",
    "foreign descriptor": r"-FI_EINVAL: 0x\w+ is not the descriptor of an open region",
    "receive without descriptor": r"-FI_EINVAL: the buffer of 4096 bytes at 0x\w+ has no descriptor, which FI_MR_LOCAL demands",
    "too many buffers": r"-FI_EINVAL: 17 buffers, and iov_limit is 16",
    "too many receive buffers": r"-FI_EINVAL: 17 buffers, and iov_limit is 16",
    "vector at NULL": r"-FI_EINVAL: a vector at NULL of 1 buffers",
    "message too long": r"-FI_EMSGSIZE: 1073741825 bytes, and an operation has at most 1073741824",
    "receive too long": r"-FI_EMSGSIZE: 1073741825 bytes, and an operation has at most 1073741824",
    "inject too long": r"-FI_EMSGSIZE: 65 bytes, and inject_size is 64",
    "flags of a send": r"-FI_EBADFLAGS: flags 0x10000 are not flags of this operation",
    "flags of a receive": r"-FI_EBADFLAGS: flags 0x10000 are not flags of this operation",
    "message at NULL": r"-FI_EINVAL: msg is NULL",
    "lengths differ": r"-FI_EINVAL: 4096 bytes of local buffers, and 64 bytes of the peer's memory",
    "two remote ranges": r"-FI_EINVAL: 2 ranges of the peer's memory, and rma_iov_limit is 1",
    "commit without FI_RMA_PMEM": r"-FI_EBADFLAGS: FI_COMMIT_COMPLETE, and the endpoint was opened without FI_RMA_PMEM",
    "remote data without FI_RX_CQ_DATA": r"-FI_EOPNOTSUPP: a write with remote data, and .* without the mode FI_RX_CQ_DATA",
    "bad key": r"-FI_EKEYREJECTED: 0x10000000000 is neither an rkey nor a handle, and the peer has no other keys",
    "two elements": r"-FI_EMSGSIZE: an atomic on 2 elements, and the limit is 1",
    "unaligned target": r"-FI_EINVAL: the target of an atomic, 0x\w+1, is not a multiple of 8",
    "unsupported atomic": r"-FI_EOPNOTSUPP: fi_atomic has no operation \d+ on datatype \d+; fi_query_atomic tells which it has",
    "operand at NULL": r"-FI_EINVAL: the operand of an atomic is NULL",
    "result at NULL": r"-FI_EINVAL: the result of an atomic is NULL",
    "region of no bytes": r"-FI_EINVAL: the buffer of 0 bytes at 0x\w+ is empty, or goes past the last address",
    "access that there is not": r"-FI_EINVAL: 0x1000000000000000 has bits that are no access",
    "offset": r"-FI_EINVAL: offset is reserved, and must be 0",
    "flags of a region": r"-FI_EBADFLAGS: flags 0x40000 are not flags of a registration",
    "events without FI_RMA_EVENT": r"-FI_EBADFLAGS: FI_RMA_EVENT, and the domain was opened without it",
    "persistent without FI_RMA_PMEM": r"-FI_EBADFLAGS: FI_RMA_PMEM, and the domain was opened without it",
    "buffers of a region": r"-FI_EINVAL: 9 buffers at 0x\w+, and mr_iov_limit is 8",
    "enabled twice": r"-FI_EOPBADSTATE: the region is not one that was made disabled",
    "bound to NULL": r"-FI_EINVAL: the object to bind is NULL",
    "bound to a queue": r"-FI_EINVAL: only counters and endpoints are bound to a region",
    "refreshed elsewhere": r"-FI_EINVAL: a range is empty, or does not lie in a buffer of the region",
    "room for a raw key": r"-FI_ETOOSMALL: 0 bytes, and the raw key has 8",
    "no raw key": r"-FI_EINVAL: these 7 bytes are no raw key: truncated, changed, or of another version",
    "key that is not mapped": r"-FI_EINVAL: 0x5 is not mapped",
    "domain in use": r"fi_close of FI_CLASS_DOMAIN: -FI_EBUSY: 3 open objects use it",
    "queue in use": r"fi_close of FI_CLASS_CQ: -FI_EBUSY: 1 open objects use it",
    "closed twice": r"-FI_EINVAL: a call on a closed object",
    "refreshed when closed": r"-FI_EINVAL: a call on a closed object",
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
            # the function behind its type or module, and its line
            self.assertRegex(line, r":weft:\w+:\w+::\w+\(\):[1-9]\d*<\w+> ")

    def test_that_there_are_none_below_that_level(self):
        parts, _ = self.refusals(programs.SYSTEM, "warn")
        for name, text in parts:
            self.assertNotIn(":weft:", text, name)
