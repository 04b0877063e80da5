"""The fabtests of FI_EP_MSG: libfabric's unit tests that apply to it, and every test of message
endpoints.
"""

import errno
import os
import pathlib
import re
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass

SERVER_STARTS = 60.0  # at most, in seconds, until the server listens; an earlier client is refused
SERVER_ENDS = 15.0
# The server of fi_multi_ep releases its client, through a socket of their own, before it listens:
# the client's connection request can be refused.
MAY_COME_EARLY = re.compile("multi_ep")
REFUSED = f"eq_readerr {errno.ECONNREFUSED} "
# rxe completes a receive before it acknowledges it (drivers/infiniband/sw/rxe/rxe_resp.c): a server
# that has its last message and closes at once can suppress the acknowledgement, if the emulated
# processor pauses between the two.
LOST_ACK = "transport retry counter exceeded"
TRIES = 5
REQUESTS = pathlib.Path(__file__).parent / "fabtests"


@dataclass(frozen=True)
class Test:
    command: str
    # pair: server and client; unit: one process; negative: one process that must report ENODATA;
    # ranks: processes that connect all to all; service: a client with a file of requests, whose
    # server need not end
    kind: str = "pair"
    env: tuple = ()
    # of a service: further options of server and client, and the file in fabtests/
    server: str = ""
    client: str = ""
    requests: str = ""
    # an expression, and how often the output has it
    expected: tuple = ()
    # further options in the short form of the list; the long form runs the command alone
    short: str = ""


RANKS = 3


# Unit tests that request no endpoint type get the provider's first one, which is RDM if the provider
# or ofi_rxm has it.
def unit(*commands):
    return [Test(command, "unit", (("FI_PROVIDER", "^ofi_rxm"), ("FI_WEFT_RDM", "0"))) for command in commands]


def pair(*commands):
    return [Test(command) for command in commands]


# ADDRESS is replaced by the address of the run.
TESTS = [
    *unit(
        "fi_getinfo_test -s ADDRESS ADDRESS",
        "fi_dom_test -n 2",
        "fi_eq_test",
        "fi_cq_test",
        "fi_mr_test",
        "fi_cntr_test",
        "fi_setopt_test",
    ),
    *[Test(f"{name} g00n13s", "negative") for name in ("fi_msg", "fi_rdm", "fi_dgram")],
    *pair(
        "fi_msg",
        "fi_msg_epoll",
        "fi_msg_sockets",
        "fi_cm_data",
        "fi_cq_data -e msg -o senddata",
        "fi_cq_data -e msg -o writedata",
        "fi_shared_ctx -e msg --no-tx-shared-ctx",
        "fi_multi_mr -e msg -V",
        "fi_multi_mr -e msg -v -c 20",
        # in no suite of libfabric's; each iteration unmaps its buffers and registers others.
        # (fi_mr_cache_evict does not apply: it needs explicit regions to be cached, and a closed
        # region's key to stay valid.)
        "fi_unmap_mem -e msg -I 20",
    ),
    *pair(*[f"fi_multi_ep -e msg -v{flags}{threads}" for threads in ("", " --threading completion") for flags in (" -A", " -Q", " -A -Q", "")]),
    *pair(
        "fi_unexpected_msg -e msg -I 10 -v",
        "fi_flood -e msg -v -T 1",
        "fi_msg_pingpong -I 5",
        "fi_msg_pingpong -I 5 -v",
        "fi_msg_pingpong",
        "fi_msg_pingpong -v",
        "fi_msg_bw -I 5",
        "fi_msg_bw -I 5 -v",
        "fi_msg_bw",
        "fi_msg_bw -v",
    ),
    *pair(*[f"fi_rma_bw -e msg -o {what}{flags}" for what in ("write", "read", "writedata") for flags in (" -I 5", " -I 5 -v", "", " -v")]),
]


def run(test, binaries, prov, address, env, seconds, more=()):
    """Outcome (pass, fail, notrun, late) and the output of the test's processes. `more`: further
    options."""
    words = test.command.replace("ADDRESS", address).split()
    argv = [str(binaries / words[0]), *words[1:], *more]
    env = env | dict(test.env if ";" not in prov else ())
    if test.kind == "service":
        return _service(test, argv, prov, address, env, seconds)
    argv += ["-p", prov]
    if test.kind == "ranks":
        return _ranks([*argv, "-n", str(RANKS), "-s", address], env, seconds)
    if test.kind != "pair":
        status, text = _wait(_start(argv, env), seconds)
        if test.kind == "negative":
            status = 0 if status == errno.ENODATA else status or errno.EINVAL
        return _outcome([status]), text
    for _ in range(TRIES):
        statuses, text = _pair(argv, address, env, seconds)
        early = MAY_COME_EARLY.search(test.command) and REFUSED in text
        lost = env.get("FI_WEFT_DEVICE") == "rxe0" and statuses[0] == 0 and LOST_ACK in text
        if not early and not lost:
            break
        print(f"repeated  {test.command}: {'the client came too early' if early else 'an acknowledgement was lost'}", flush=True)
    return _outcome(statuses), text


def _pair(argv, address, env, seconds):
    server = _start([*argv, "-s", address], env)
    _wait_listening(server)
    client = _start([*argv, "-s", address, address], env)
    client_status, client_text = _wait(client, seconds)
    # a client that failed leaves its server waiting: the server has 2 s to end
    server_status, server_text = _wait(server, SERVER_ENDS if client_status == 0 else 2)
    text = f"server: status {server_status}\n{server_text}\nclient: status {client_status}\n{client_text}"
    return [server_status, client_status], text


def _ranks(argv, env, seconds):
    first = _start(argv, env)
    _wait_listening(first)
    processes = [first, *[_start(argv, env) for _ in range(1, RANKS)]]
    ended = [_wait(process, seconds) for process in processes]
    return _outcome([status for status, _ in ended]), "\n".join(text for _, text in ended)


def _service(test, argv, prov, address, env, seconds):
    more = lambda options: options.replace("ADDRESS", address).replace("PROV", prov).split()
    # a device of the kernel pins memory, which is offered as FI_MR_ALLOCATED alone
    pins = env.get("FI_WEFT_DEVICE", "soft0") != "soft0"
    mode = " mr_mode: [ FI_MR_ALLOCATED, ]," if pins else ""
    text = (REQUESTS / test.requests).read_text().replace("PROV,", f"{prov},{mode}")
    with tempfile.NamedTemporaryFile("w", prefix="weft-fabtests-") as requests:
        requests.write(text)
        requests.flush()
        server = _start([*argv, *more(test.server)], env)
        _wait_listening(server)
        client_status, text = _wait(_start([*argv, *more(test.client), "-u", requests.name, address], env), seconds)
    if server.poll() is None and "-x" not in test.server:
        server.terminate()  # it serves for ever
    server_status, server_text = _wait(server, SERVER_ENDS if client_status == 0 else 2)
    expression, count = test.expected
    found = len(re.findall(expression, text))
    done = client_status == 0 and server_status in (0, -signal.SIGTERM) and found == count
    shown = f"server: status {server_status}\n{server_text}\nclient: status {client_status}\n{text}"
    return "pass" if done else "fail", f"{shown}\n{found} times {expression}, expected {count}"


def _start(argv, env):
    return subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")


def _wait_listening(server):
    """Returns when the server listens, in any of the ways that providers have, when it has ended,
    or after SERVER_STARTS.
    """
    late = time.monotonic() + SERVER_STARTS
    while time.monotonic() < late and server.poll() is None and not (_listens_on_socket(server.pid) or _listens_on_rdma(server.pid)):
        time.sleep(0.05)


def _listens_on_socket(pid):
    """The listening sockets of the server: TCP ones, and those of softverbs' connection manager,
    which have names of this form.
    """
    mine = set()
    try:
        for fd in pathlib.Path(f"/proc/{pid}/fd").iterdir():
            mine.update(re.findall(r"^socket:\[(\d+)\]$", os.readlink(fd)))
    except OSError:
        return False  # the process ends, or a descriptor was closed meanwhile
    listening = set()
    for family in ("tcp", "tcp6"):
        lines = map(str.split, pathlib.Path(f"/proc/net/{family}").read_text().splitlines()[1:])
        listening.update(fields[9] for fields in lines if fields[3] == "0A")
    for line in pathlib.Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if int(fields[3], 16) & 0x10000 and len(fields) == 8 and fields[7].startswith("@softverbs/"):
            listening.add(fields[6])
    return bool(mine & listening)


def _listens_on_rdma(pid):
    if not shutil.which("rdma"):
        return False
    shown = subprocess.run(["rdma", "resource", "show", "cm_id"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
    return any(re.search(rf"\bstate LISTEN\b.*\bpid {pid}\b", line) for line in shown.splitlines())


def _wait(process, seconds):
    """Exit status (None for a process that had to be killed) and output."""
    try:
        text, _ = process.communicate(timeout=seconds)
        return process.returncode, text
    except subprocess.TimeoutExpired:
        process.kill()
        text, _ = process.communicate()
        return None, text


def _outcome(statuses):
    if all(status == 0 for status in statuses):
        return "pass"
    if None in statuses and all(status in (0, None) for status in statuses):
        return "late"
    if all(status == errno.ENODATA for status in statuses) or all(status == errno.ENOSYS for status in statuses):
        return "notrun"
    return "fail"
