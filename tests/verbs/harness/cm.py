"""Programs that connect by librdmacm: Debian's rdmacm-utils and perftest with `-R`, and programs of
this repository for calls that they do not use, and for peers that die, are silent or hostile."""
import re
import time

from . import process, programs

PORT = 18516
# udaddy has no option for another one.
UDADDY_PORT = 7174
HOSTS = ("127.0.0.1", "::1")

# One line is one run between two processes, with each address of HOSTS unless it names one.
RPING = ["rping -V -v -C 20", "rping -V -v -C 20 -S 1", "rping -V -v -C 20 -S 65535", "rping -V -v -C 10 -q"]
TRANSFER = [
    "ucmatose", "ucmatose -c 50 -C 10", "ucmatose -c 4 -C 500 -S 8192", "ucmatose -t 8", "ucmatose -m",
    "udaddy", "udaddy -c 20 -C 50", "udaddy -S 1024", "udaddy -C 0 -c 50",
]
OTHERS = ["rdma_server", "rdma_xserver -c r", "rdma_xserver -c x", "cmtime -c 100"]
SOCKETS = ["rstream", "riostream"]
PERFTEST = [
    "ib_send_lat -R", "ib_send_lat -R -e", "ib_send_lat -R -c UD", "ib_send_lat -R -z", "ib_send_bw -R",
    "ib_send_bw -R -b -q 4 -n 500", "ib_send_bw -R --use-srq -q 4 -n 500", "ib_write_lat -R", "ib_write_bw -R -q 8 -n 500",
    "ib_read_lat -R", "ib_read_bw -R -b", "ib_atomic_lat -R", "ib_atomic_bw -R -q 8 -n 500",
]
MULTICAST = "mckey -m 239.1.1.1"
# Programs of this repository, which need no second one. That of deaths is in tests/fault.
OWN = ["cm_calls", "cm_hostile", "cm_limits"]


# perftest's sides shake hands, and then the server makes its listener while the client connects.
# The client repeats a request that was rejected because the listener was not there yet (8: invalid
# service ID). Releases before 26.04 crash there: they use the ids that they have destroyed. Such a
# run says nothing about the device, and is made again. The memory of an id that was freed has other
# content: the address in it may be no address of a process (SIGBUS from the stack segment).
CRASHES = ["client killed by SIGSEGV", "client killed by SIGBUS"]
TOO_EARLY = "Event: RDMA_CM_EVENT_REJECTED; error: 8."
TRIES = 5


def too_early(argv, why, client_text):
    """Whether perftest has crashed because its client was the first."""
    crashed = any(crash in (why or "") for crash in CRASHES)
    return argv[0].startswith("ib_") and crashed and TOO_EARLY in client_text


def names():
    both = [f"{line} {host}" for line in RPING + TRANSFER for host in HOSTS]
    return both + OTHERS + ["rdma_server ::1"] + PERFTEST + [MULTICAST] + SOCKETS + OWN


def listens(port):
    """Whether a connection manager of softverbs listens on a port, in any port space."""
    with open("/proc/net/unix") as file:
        for line in file:
            field = line.split()
            if len(field) == 8 and field[3] == "00010000" and re.fullmatch(rf"@softverbs/.*/{port}", field[7]):
                return True
    return False


def run(name, world, limit):
    """Runs a line of `names`. Returns (reason of the failure or None, output, seconds)."""
    start = time.monotonic()
    if name == MULTICAST or name in OWN:
        argv = name.split() + ["-b", "127.0.0.1"] if name == MULTICAST else [f"{world.programs}/{name}"]
        why, output = process.run_one(world.command(argv), world.env, limit)
        why = refused(why, output) if name == MULTICAST else why
        return why, output, time.monotonic() - start
    port = UDADDY_PORT if name.startswith("udaddy") else PORT
    server, client, check, endless = commands(name.split())
    again = ""
    for _ in range(TRIES):
        why, server_text, client_text = process.run_service(
            world.lines(server), lambda: listens(port), world.env, limit, [world.lines(client)], endless)
        output = f"{again}server:\n{server_text}\nclient:\n{client_text}"
        if not too_early(client, why, client_text):
            break
        again = "run again: perftest crashed because its client connected before its server listened\n"
    why = why or (None if endless else check(server, server_text, "server")) or check(client, client_text, "client")
    return why, output, time.monotonic() - start


def commands(argv):
    """The command lines of server and client, the check of an output, and whether the server does not
    end by itself."""
    host = argv.pop() if argv[-1] in HOSTS else HOSTS[0]
    program, port = argv[0], ["-p", str(PORT)]
    argv = argv + (port if program != "udaddy" else [])
    if program == "rping":
        return argv + ["-s", "-a", host], argv + ["-c", "-a", host], pinged, False
    if program in ("ucmatose", "udaddy"):
        return argv + ["-b", host, "-f", "ip"], argv + ["-s", host, "-f", "ip"], transferred, False
    if program == "rdma_server":
        return argv + ["-s", host], ["rdma_client", "-s", host, *port], ended, False
    if program == "rdma_xserver":
        return argv, ["rdma_xclient", *argv[1:], "-s", host], ended, False
    if program == "cmtime":
        return argv + ["-b", host], argv + ["-s", host], timed, True
    if program in SOCKETS:
        return argv, argv + ["-s", host], lambda *_: None, False
    return argv + ["-F"], argv + ["-F", host], programs.measured, False


def pinged(argv, output, side):
    """Whether rping printed the text of each message; with `-V` the client has compared it."""
    count = int(argv[argv.index("-C") + 1])
    start = "server ping data: " if side == "server" else "ping data: "
    lines = [line for line in output.splitlines() if line.startswith(start)]
    # The text is `rdma-ping-0: ABC...`. The first message begins with A, the next one with B.
    if "-S" in argv and argv[argv.index("-S") + 1] == "1":
        return None if len(lines) == count else f"{side} has {len(lines)} messages of {count}"
    wanted = [f"{start}rdma-ping-{number}: {chr(ord('A') + number % 58)}" for number in range(count)]
    wrong = [text for text, line in zip(wanted, lines) if not line.startswith(text)]
    if len(lines) != count or wrong:
        return f"{side} has {len(lines)} messages of {count}, not {wrong[:1]}"
    return None


def transferred(argv, output, side):
    for text in ("data transfers complete",) * ("0" not in argv) + ("test complete", "return status 0"):
        if text not in output:
            return f"{side} does not print `{text}`"
    return None


def ended(argv, output, side):
    return None if re.search(r": end 0$", output, re.MULTILINE) else f"{side} does not end with 0"


def timed(argv, output, side):
    """Whether cmtime printed a positive time of each step."""
    for step in ("create id", "resolve addr", "resolve route", "create qp", "connect", "disconnect", "destroy"):
        if not re.search(rf"^{step} *: +\d+\.\d+ ", output, re.MULTILINE):
            return f"{side} has no time of `{step}`"
    event = re.search(r"^event: .*", output, re.MULTILINE)
    return event and f"{side}: {event[0]}"


def refused(why, output):
    """Whether a multicast address was refused by an event or an errno, and the program ended."""
    if why and why.startswith("exit ") and re.search(r"ADDR_ERROR|failure joining|MULTICAST_ERROR", output):
        return None
    return f"not a refusal: {why}"
