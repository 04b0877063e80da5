"""The programs of Debian's ibverbs-utils and perftest, and the output that they must print."""
import re
import time

from . import process

DEVICE = "soft0"
PORT = 18515

# One line is one run, between two processes unless the program runs alone. The limit is in seconds;
# the programs take about 1 s on an idle machine with two cores.
PINGPONG = [
    "ibv_rc_pingpong", "ibv_rc_pingpong -c", "ibv_rc_pingpong -c -e", "ibv_rc_pingpong -c -N",
    "ibv_rc_pingpong -c -N -e", "ibv_rc_pingpong -c -t", "ibv_rc_pingpong -c -s 1",
    "ibv_rc_pingpong -c -s 65536 -m 4096", "ibv_rc_pingpong -c -s 1048576 -n 200",
    "ibv_rc_pingpong -c -e -s 1048576 -n 200", "ibv_rc_pingpong -c -r 2 -n 200",
    "ibv_rc_pingpong -c -j", "ibv_rc_pingpong -c -o", "ibv_rc_pingpong -c -o -P",
    "ibv_rc_pingpong -c -O",
    "ibv_uc_pingpong", "ibv_uc_pingpong -c", "ibv_uc_pingpong -c -e", "ibv_uc_pingpong -c -s 1",
    "ibv_uc_pingpong -c -s 65536",
    "ibv_ud_pingpong", "ibv_ud_pingpong -c", "ibv_ud_pingpong -c -e", "ibv_ud_pingpong -c -s 1",
    "ibv_ud_pingpong -c -s 1024",
    "ibv_srq_pingpong", "ibv_srq_pingpong -c", "ibv_srq_pingpong -c -e",
    "ibv_srq_pingpong -c -q 1 -s 1", "ibv_srq_pingpong -c -q 64 -n 100 -r 300",
    "ibv_srq_pingpong -c -s 65536 -n 200",
    "ibv_xsrq_pingpong", "ibv_xsrq_pingpong -e", "ibv_xsrq_pingpong -o", "ibv_xsrq_pingpong -s 65536 -n 100",
    # All clients share one XRC domain with their server.
    "ibv_xsrq_pingpong -c 4 -n 100", "ibv_xsrq_pingpong -c 4 -n 100 -e",
]

PERFTEST = [
    "ib_send_lat", "ib_send_lat -e", "ib_send_lat -a -n 10", "ib_send_lat -I 64 -s 64",
    "ib_send_lat --use_old_post_send", "ib_send_lat -c UC", "ib_send_lat -c UD",
    "ib_send_lat --use-srq", "ib_send_lat -c XRC", "ib_send_lat -c XRC -e", "ib_send_lat -c XRC -a -n 10",
    "ib_send_bw", "ib_send_bw -e", "ib_send_bw -a -n 10", "ib_send_bw -b", "ib_send_bw -q 8 -n 500",
    "ib_send_bw --use_old_post_send", "ib_send_bw -c UC", "ib_send_bw -c UD -s 1024", "ib_send_bw -c UD -q 16 -s 1024 -n 500",
    "ib_send_bw --use-srq -q 4 -n 500", "ib_send_bw -c XRC", "ib_send_bw -c XRC -b -q 4 -n 500", "ib_send_bw -s 8 -n 5000", "ib_send_bw -r 8 -t 8 -n 500",
    "ib_write_lat", "ib_write_lat -I 64 -s 64", "ib_write_lat -c UC", "ib_write_lat -c XRC",
    "ib_write_bw", "ib_write_bw -a -n 10", "ib_write_bw -b", "ib_write_bw -c UC", "ib_write_bw -c XRC",
    "ib_write_bw -q 8 -n 500", "ib_write_bw -l 16 -n 1600",
    "ib_read_lat", "ib_read_lat -e", "ib_read_lat -c XRC", "ib_read_bw -c XRC -b",
    "ib_read_bw", "ib_read_bw -a -n 10", "ib_read_bw -b", "ib_read_bw -q 8 -n 500",
    "ib_atomic_lat", "ib_atomic_lat -c XRC", "ib_atomic_bw -c XRC -b", "ib_atomic_lat -A CMP_AND_SWAP", "ib_atomic_lat -e",
    "ib_atomic_bw", "ib_atomic_bw -A CMP_AND_SWAP", "ib_atomic_bw -b", "ib_atomic_bw -q 8 -n 500",
]

# Where the kernel refuses copies between processes: transfers larger than a ring, on-demand
# regions (`-o`), and one-sided operations.
REFUSED = [
    "ibv_rc_pingpong", "ibv_rc_pingpong -e", "ibv_rc_pingpong -c -o", "ibv_rc_pingpong -c -s 1048576 -n 50",
    "ibv_uc_pingpong -s 65536", "ibv_ud_pingpong", "ibv_srq_pingpong -c -s 65536 -n 200",
    "ibv_xsrq_pingpong", "ibv_xsrq_pingpong -s 65536 -n 100", "ibv_xsrq_pingpong -c 4 -n 100 -e", "ib_send_bw -c XRC -b -q 4 -n 500",
    "ib_write_bw -c XRC", "ib_read_bw -c XRC -b", "ib_atomic_bw -c XRC -b",
    "ib_send_lat -a -n 10", "ib_send_bw -a -n 10", "ib_send_bw --use-srq -q 4 -n 500",
    "ib_write_lat", "ib_write_lat -c UC", "ib_write_bw -a -n 10", "ib_write_bw -b", "ib_write_bw -q 8 -n 500",
    "ib_read_lat -e", "ib_read_bw -a -n 10", "ib_read_bw -q 8 -n 500",
    "ib_atomic_lat", "ib_atomic_lat -A CMP_AND_SWAP", "ib_atomic_lat -e", "ib_atomic_bw -q 8 -n 500",
]

# perftest exits with 0 after certain errors.
COMPLAINT = re.compile(r"couldn't|can't|unable to|failed|failure|error|mismatch", re.IGNORECASE)


def names():
    return ["ibv_devices", "ibv_devinfo", "ibv_devinfo -v"] + PINGPONG + PERFTEST


def run(name, world, limit):
    """Runs a program by its line. Returns (reason of the failure or None, output, seconds)."""
    argv = name.split()
    start = time.monotonic()
    if argv[0] in ("ibv_devices", "ibv_devinfo"):
        why, output = process.run_one(world.command(argv), world.env, limit)
        why = why or listed(argv, output)
    else:
        pingpong = argv[0].endswith("_pingpong")
        options = ["-d", DEVICE, "-p", str(PORT)] + (["-g", "0"] if pingpong else ["-F", "-x", "0"])
        others, clients = world.lines(argv + options), 1
        if argv[0] == "ibv_xsrq_pingpong" and "-c" in argv:
            at = argv.index("-c")
            clients = int(argv[at + 1])
            # Only the server takes the number of clients.
            others = world.lines(argv[:at] + argv[at + 2:] + options)
        command = world.lines(argv + options)
        why, server, client = process.run_pair(command, PORT, world.env, limit, others, clients)
        output = f"server:\n{server}\nclient:\n{client}"
        check = exchanged if pingpong else measured
        why = why or check(argv, server, "server") or check(argv, client, "client")
    return why, output, time.monotonic() - start


def listed(argv, output):
    """Whether the device is in the output of a program that lists devices."""
    wanted = [rf"\b{DEVICE}\b"]
    if argv[0] == "ibv_devinfo":
        wanted = [rf"hca_id:\s*{DEVICE}\b", r"state:\s*PORT_ACTIVE \(4\)", r"max_mtu:\s*4096 \(5\)"]
    if "-v" in argv:
        wanted += [r"max_qp:\s*[1-9]", r"max_srq:\s*[1-9]", r"atomic_cap:\s*ATOMIC_(HCA|GLOB)", r"GID\[ *0\]:"]
    for pattern in wanted:
        if not re.search(pattern, output):
            return f"nothing in the output matches {pattern}"
    return None


def exchanged(argv, output, side):
    """Whether a ping-pong reports that it transferred all its bytes."""
    if argv[0] == "ibv_xsrq_pingpong":
        ends = len(re.findall(r"^success$", output, re.MULTILINE))
        wanted = int(argv[argv.index("-c") + 1]) if "-c" in argv and side == "client" else 1
        return None if ends == wanted else f"{ends} of {wanted} {side}s had success"
    found = re.search(r"^(\d+) bytes in [\d.]+ seconds", output, re.MULTILINE)
    if not found or int(found[1]) == 0:
        return f"{side} gives no result"
    if "invalid data" in output:
        return f"{side} found wrong contents"
    return None


def measured(argv, output, side):
    """Whether perftest printed a row for each size: it does so when every iteration completed.

    The figures are not checked: on a busy machine its calibration of the clock fails, and they are
    0 or inf.
    """
    complaint = [line for line in output.splitlines() if COMPLAINT.search(line)]
    if complaint:
        return f"{side}: {complaint[0].strip()}"
    rows = re.findall(r"^ *(\d+) +(\d+) +(?:[\d.]+|-?inf|-?nan)\s+(?:[\d.]+|-?inf|-?nan)\b", output, re.MULTILINE)
    # The passive side of one-sided bandwidth tests measures nothing.
    passive = side == "server" and argv[0].split("_")[1] in ("write", "read", "atomic")
    if passive and "-b" not in argv:
        return None
    if any(int(row[0]) == 0 or int(row[1]) == 0 for row in rows):
        return f"{side} exchanged nothing"
    sizes = 23 if "-a" in argv and "UD" not in argv else 1
    return None if len(rows) >= sizes else f"{side} has {len(rows)} sizes of {sizes}"
