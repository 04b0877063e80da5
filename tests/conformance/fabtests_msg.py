"""The fabtests of FI_EP_MSG: libfabric's unit tests that apply to it, and every test of message endpoints."""

import errno
import subprocess
import time
from dataclasses import dataclass

SERVER_STARTS = 1.0  # seconds, as runfabtests.sh has it: nothing tells when a server listens
SERVER_ENDS = 15.0


@dataclass(frozen=True)
class Test:
    command: str
    kind: str = "pair"  # pair: server and client; unit: one process; negative: one process that must say ENODATA
    env: tuple = ()


# The unit tests that don't say which type of endpoint they want get an RDM one of ofi_rxm over the provider, which answers first.
def unit(*commands):
    return [Test(command, "unit", (("FI_PROVIDER", "^ofi_rxm"),)) for command in commands]


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


def run(test, binaries, prov, address, env, seconds):
    """Outcome (pass, fail, notrun, late) and the output of the test's processes."""
    words = test.command.replace("ADDRESS", address).split()
    argv = [str(binaries / words[0]), *words[1:], "-p", prov]
    env = env | dict(test.env if ";" not in prov else ())
    if test.kind != "pair":
        status, text = _wait(_start(argv, env), seconds)
        if test.kind == "negative":
            status = 0 if status == errno.ENODATA else status or errno.EINVAL
        return _outcome([status]), text
    server = _start([*argv, "-s", address], env)
    time.sleep(SERVER_STARTS)
    client = _start([*argv, "-s", address, address], env)
    client_status, client_text = _wait(client, seconds)
    # after a client that failed the server is not waited for at length
    server_status, server_text = _wait(server, SERVER_ENDS if client_status == 0 else 2)
    text = f"server: status {server_status}\n{server_text}\nclient: status {client_status}\n{client_text}"
    return _outcome([server_status, client_status]), text


def _start(argv, env):
    return subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")


def _wait(process, seconds):
    """Status, None for one that had to be killed, and output."""
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
