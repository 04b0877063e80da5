"""UCX and Open MPI on the drop-in: Debian's ucx-utils, an MPI program of this tier, and mpi4py's
tests.

UCX checks for the character device of a verbs device, /dev/infiniband/softverbs0, before it opens
the device by libibverbs, and ignores a device without one. The file is never opened. The programs
run in a mount namespace that has it.
"""
import os
import re
import subprocess
import sys
import tarfile
import time

from lib import cache, install, spaces

from . import process

HERE = os.path.dirname(os.path.realpath(__file__))
PROGRAM = os.path.join(os.path.dirname(HERE), "mpi", "exchange.c")
NODE = "softverbs0"
DEVICE = "soft0:1"
PORT = 18520
# For each verbs transport, the list of UCX's transports that it may use: no others.
TRANSPORTS = {"rc": "rc_v,self", "ud": "ud_v,self"}

# The measured times are not checked; the iterations are few, since two polling processes share a
# core on a small machine.
PERFTEST = [
    "tag_lat", "tag_lat -s 1000000", "tag_bw", "tag_bw -s 65536", "tag_sync_lat", "tag_lat -D iov -s 64,1000", "tag_lat -U",
    "stream_lat", "stream_bw", "ucp_put_lat", "ucp_put_bw -s 65536", "ucp_get", "ucp_get -s 65536",
    "ucp_add", "ucp_fadd", "ucp_swap", "ucp_cswap", "ucp_am_lat", "ucp_am_bw -s 65536", "tag_lat -M multi -T 2",
    # a process sleeps between messages, on its completion channel
    "tag_lat -E sleep", "tag_lat -s 100000 -E sleep", "tag_bw -E sleep", "stream_lat -E sleep",
]
DATAGRAM_PERFTEST = ["tag_lat", "tag_bw -s 65536", "ucp_put_lat", "ucp_get", "ucp_fadd", "ucp_am_bw -s 4096", "stream_bw"]
# The tests of UCX's lower layer, UCT, without UCP's protocols.
DIRECT_PERFTEST = [
    "am_lat -x rc_verbs", "am_bw -x rc_verbs -D zcopy -s 4096", "put_lat -x rc_verbs", "put_bw -x rc_verbs -D bcopy -s 2048",
    "get -x rc_verbs -D zcopy -s 65536", "fadd -x rc_verbs", "swap -x rc_verbs", "cswap -x rc_verbs", "add_mr -x rc_verbs",
    "am_lat -x ud_verbs", "am_bw -x ud_verbs -D bcopy -s 4000",
]
MPI = ["rc -np 2", "rc -np 4", "ud -np 2", "ud -np 4"]
# The tests of mpi4py that transfer data, and fit into `make check`; `--whole-mpi4py` runs all.
MPI4PY = {"short": "test_p2p_buf test_p2p_obj test_cco_buf test_rma test_msgspec", "whole": ""}
# Tests that start processes: they test Open MPI's launcher, not the device.
NOT_MPI4PY = "spawn dynproc"
MPI4PY_VERSION = "3.1.4"
MPI4PY_LIMIT = {"short": 100, "whole": 1500}


def names():
    ucx = ["ucx_info -d", "ucx_info without the character device"]
    ucx += [f"ucx_perftest {kind} -t {test}" for kind, tests in (
        ("rc", PERFTEST), ("ud", DATAGRAM_PERFTEST), ("direct", DIRECT_PERFTEST)) for test in tests]
    return ucx + [f"mpi {name}" for name in MPI]


def mpi4py_names(whole):
    return ["mpi4py whole" if whole else "mpi4py short"]


def prepare():
    """Installs UCX and Open MPI, and downloads mpi4py's tests.

    Returns the directory of the tests, or None and the reason.
    """
    install.ensure(
        {"ucx_perftest": "ucx-utils", "mpirun": "openmpi-bin", "mpicc": "libopenmpi-dev", "gcc": "gcc"},
        {"/usr/lib/python3/dist-packages/mpi4py": "python3-mpi4py", "/usr/lib/python3/dist-packages/numpy": "python3-numpy"})

    def fetch(home):
        install.ensure_pip()
        with cache.scratch() as scratch:
            # The source archive has the tests; Debian's package does not.
            cache.download([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", "mpi4py",
                            "--dest", str(scratch), f"mpi4py=={MPI4PY_VERSION}"])
            (archive,) = scratch.glob("mpi4py-*.tar.gz")
            with tarfile.open(archive) as tar:
                tar.extractall(home, [m for m in tar.getmembers() if re.match(r"[^/]+/test/", m.name)])

    try:
        home = cache.ensure(f"mpi4py-tests-{MPI4PY_VERSION}", "1", fetch)
        return str(home / f"mpi4py-{MPI4PY_VERSION}" / "test"), ""
    except (cache.CannotDownload, cache.CannotMake) as error:
        return None, f"mpi4py's tests cannot be downloaded: {str(error).strip().splitlines()[-1]}"


def run(name, world, limit, tests=None):
    """Runs one by its line. Returns (reason of the failure or None, output, seconds)."""
    start = time.monotonic()
    words = name.split()
    kind = words[1]
    env = dict(world.env, UCX_TLS=TRANSPORTS.get(kind, TRANSPORTS["rc"]), UCX_WARN_UNUSED_ENV_VARS="n")
    if words[0] == "ucx_info":
        argv = ["ucx_info", "-d"]
        there = kind == "-d"
        why, output = process.run_one(spaces.with_device(argv, NODE) if there else argv, env, limit)
        why = why or listed(output, there)
    elif words[0] == "ucx_perftest":
        if kind == "direct":
            del env["UCX_TLS"]
        argv = ["ucx_perftest", "-p", str(PORT), "-f", "-n", "200", "-w", "20", *words[2:]]
        argv += ["-d", DEVICE] if kind == "direct" else []
        argv = spaces.with_device(argv, NODE)
        why, server, client = process.run_pair(argv, PORT, env, limit)
        output = f"server:\n{server}\nclient:\n{client}"
        why = why or measured(client) or complained(server + client)
    elif words[0] == "mpi":
        why, output = exchange(world, env, words[2:], limit)
    else:
        why, output = mpi4py(env, kind, tests)
    return why, output, time.monotonic() - start


def listed(output, there):
    """Whether the list has both transports of the device (`there`), or neither."""
    for transport in ("rc_verbs", "ud_verbs"):
        found = re.search(rf"Transport: {transport}\n#\s+Device: {re.escape(DEVICE)}\n", output)
        if bool(found) != there:
            return f"{transport} on {DEVICE} is {'not ' if there else ''}listed"
    return None


def measured(output):
    """Whether the client has completed all its iterations."""
    found = re.search(r"^(?:Final:|\[thread 0\])?\s+(\d+)\s+\S+\s+\S+\s+\S+", output, re.MULTILINE)
    return None if found and int(found[1]) >= 200 else "no result"


def complained(output):
    """UCX exits with 0 after certain errors."""
    lines = [line for line in output.splitlines() if re.search(r"\bUCX +(ERROR|WARN|FATAL)\b", line)]
    return lines[0].strip() if lines else None


def mpirun(env, osc, *argv):
    """A command that permits UCX alone for messages, and `osc` for one-sided operations."""
    options = ["--oversubscribe", "--mca", "pml", "ucx", "--mca", "osc", osc, "--mca", "btl", "self",
               "--mca", "mpi_yield_when_idle", "1", "--mca", "plm_rsh_agent", "false"]
    for name in ("LD_LIBRARY_PATH", "UCX_TLS", "UCX_WARN_UNUSED_ENV_VARS"):
        options += ["-x", f"{name}={env[name]}"]
    env.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1", OMPI_MCA_orte_tmpdir_base="/tmp")
    return spaces.with_device(["mpirun", *options, *argv], NODE)


def exchange(world, env, count, limit):
    program = os.path.join(os.path.dirname(world.host["dropin"]), "verbs-mpi-exchange")
    made = subprocess.run(["mpicc", "-O1", "-Wall", "-Wextra", "-Werror", "-o", program, PROGRAM], capture_output=True, text=True)
    if made.returncode != 0:
        return "it does not compile", made.stdout + made.stderr
    why, output = process.run_one(mpirun(env, "ucx", *count, program), env, limit)
    ranks = int(count[1])
    good = len(re.findall(r"^rank \d+ of \d+: all right$", output, re.MULTILINE))
    if not why and good != ranks:
        why = f"{good} of {ranks} ranks are all right"
    return why or complained(output), output


def mpi4py(env, kind, tests):
    argv = ["/usr/bin/python3", "-B", os.path.join(tests, "runtests.py"), "--no-builddir", "-q"]
    argv += [f"--exclude={name}" for name in NOT_MPI4PY.split()]
    argv += [f"--include={name}" for name in MPI4PY[kind].split()]
    # Open MPI 4.1.4 crashes in MPI_Win_free of a dynamic window on UCX, over TCP as well: its other
    # components do the one-sided operations here.
    why, output = process.run_one(mpirun(env, "^ucx", "-np", "2", *argv), env, MPI4PY_LIMIT[kind])
    # Each rank runs all tests and prints their number.
    ran = [int(n) for n in re.findall(r"^Ran (\d+) tests? in", output, re.MULTILINE)]
    if not why and (len(ran) != 2 or min(ran) < (100 if kind == "short" else 1000)):
        why = f"tests that ran on each rank: {ran}"
    return why or complained(output), output
