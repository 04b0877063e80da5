"""UCX's ucx_perftest over rc_verbs on softverbs, beside the same operations of weft's RDM endpoints.

In each round both run once for each operation and length, one after the other. UCX looks for the
device file of a verbs device before it opens the device by libibverbs, so everything runs in a
mount namespace that has such a file. As a program: runs inside the namespaces.
"""

import os
import pathlib
import re
import statistics
import subprocess
import sys
import time

if __name__ == "__main__":
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(pathlib.Path(os.path.realpath(__file__)).parent.parent / "tests" / "tools"))

from lib import install, spaces  # noqa: E402
from lib.programs import listening  # noqa: E402

NODE = "softverbs0"
PORT = 18530
ROUNDS = 7
SIZES = (8, 64, 512, 4 << 10, 64 << 10, 1 << 20, 4 << 20)
# An operation of UCX, its options, and the operation of weft. UCX has 128 sends under way in a
# stream, as weft has.
OPERATIONS = [
    ("tag_lat", [], "rdm/pingpong", SIZES),
    ("tag_bw", ["-O", "128"], "rdm/stream", SIZES),
    ("ucp_put_lat", [], "rdm/write-pingpong", SIZES),
    ("ucp_get", ["-O", "1"], "rdm/read", SIZES),
    ("ucp_fadd", ["-O", "1"], "rdm/fetch-add", (8,)),
]
# UCX's short name for rc_verbs, with ud_verbs only for connecting; no other transport is used.
# Without the last variable ucx_perftest has huge pages from 2 MiB on, which the kernel copies three
# times as fast; weft-bench has pages of 4 KiB.
ENVIRONMENT = {
    "UCX_TLS": "rc_v,self",
    "UCX_NET_DEVICES": "soft0:1",
    "UCX_WARN_UNUSED_ENV_VARS": "n",
    "UCX_ALLOC_PRIO": "mmap,heap",
}
LIMIT = 60


class Failed(Exception):
    """A program did not end with a result; the message has its output."""


def command(program):
    """The command line that measures with this weft-bench, inside the namespaces."""
    inside = [sys.executable, "-B", os.path.realpath(__file__), program]
    return spaces.command(spaces.with_device(inside, NODE))


def prepare():
    install.ensure({"ucx_perftest": "ucx-utils", "taskset": "util-linux"})


def iterations(size):
    """As many as weft-bench runs (`Op::count`), at least."""
    return next((count for least, count in ((100_001, 300), (8_193, 1_600), (513, 8_000)) if size >= least), 20_000)


def ucx(test, options, size, env):
    """The time of one operation in nanoseconds."""
    count = iterations(size)
    argv = ["ucx_perftest", "-p", str(PORT), "-t", test, "-s", str(size), "-n", str(count), "-w", str(count // 10), "-f", "-v", *options]
    kwargs = {"env": env, "stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(["taskset", "-c", "1", *argv], **kwargs) as server:
        try:
            end = time.monotonic() + LIMIT
            while not listening(PORT) and server.poll() is None and time.monotonic() < end:
                time.sleep(0.01)
            ran = subprocess.run(["taskset", "-c", "0", *argv, "127.0.0.1"], timeout=LIMIT, check=False, **kwargs)
            text, _ = server.communicate(timeout=LIMIT)
        finally:
            server.kill()
    # iterations; latency: percentile, average, overall; bandwidth and message rate: average, overall
    row = re.search(rf"^ *{count}((?:,[\d.]+){{7}})$", ran.stdout, re.MULTILINE)
    if ran.returncode != 0 or not row or re.search(r"\bUCX +(ERROR|FATAL)\b", ran.stdout + text):
        raise Failed(f"{' '.join(argv)}\nclient:\n{ran.stdout}\nserver:\n{text}")
    fields = [float(field) for field in row[1].split(",")[1:]]
    return 1e9 / fields[6] if test == "tag_bw" else fields[2] * 1e3


def weft(program, case):
    """The time of one operation of weft in nanoseconds, and the name of the case."""
    ran = subprocess.run([program, "--tsv", "--no-peers", "--rounds", "1", case], stdout=subprocess.PIPE, text=True, check=True)
    name, _, nanoseconds = ran.stdout.split("\n")[0].split("\t")
    if name != case:
        raise Failed(f"weft-bench ran {name} instead of {case}")
    return float(nanoseconds)


def quartiles(values):
    return statistics.quantiles(values, n=4, method="inclusive")


def main(program):
    # variables of weft's processes are not those of UCX's
    env = {name: value for name, value in os.environ.items() if not name.startswith(("FI_", "WEFT_"))}
    env.update(ENVIRONMENT, LD_LIBRARY_PATH=os.environ["WEFT_VERBS_DROPIN"])
    print(f"UCX over rc_verbs on soft0 beside weft's RDM endpoints, medians of {ROUNDS} interleaved rounds;"
          " ratio: weft / UCX, with its quartiles")
    for test, options, case, sizes in OPERATIONS:
        for size in sizes:
            times = []
            for _ in range(ROUNDS):
                times.append((weft(program, f"{case}/{size}"), ucx(test, options, size, env)))
            ours, theirs = (statistics.median(column) for column in zip(*times))
            low, ratio, high = quartiles([a / b for a, b in times])
            verdict = "met" if ratio <= 1 else "MISSED"
            print(f"{case + '/' + str(size):28} {ours:11.1f} ns   {test:12} {theirs:11.1f} ns   {ratio:5.2f} ({low:.2f} - {high:.2f})"
                  f"  <= 1: {verdict}", flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except (Failed, subprocess.SubprocessError) as error:
        sys.exit(f"bench: {error}")
