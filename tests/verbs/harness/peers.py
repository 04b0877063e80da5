"""libfabric's own provider `verbs` on softverbs, and weft beside it: pairs of fi_pingpong, and of
tests/conformance/c/xrc_peer.c on XRC.

The provider skips loopback, so each pair runs in a network namespace with another address. The
provider's process has the drop-in libraries, weft's process has not. As a program: runs one pair
inside such a namespace.
"""
import json
import os
import subprocess
import sys
import tempfile
import time

if __name__ == "__main__":
    sys.dont_write_bytecode = True
    HERE = os.path.dirname(os.path.realpath(__file__))
    sys.path[:0] = [os.path.dirname(HERE), os.path.join(os.path.dirname(os.path.dirname(HERE)), "tools")]

from harness import process  # noqa: E402
from lib import install, spaces  # noqa: E402
from lib.programs import listening  # noqa: E402

TOP = os.path.realpath(os.path.join(os.path.dirname(__file__), "../../.."))
# fi_pingpong's control port.
PORT = 47592
# Endpoint, server, client.
PAIRS = [(kind, server + layer, client + layer)
         for kind, layer in (("msg", ""), ("rdm", ";ofi_rxm"))
         for server, client in (("verbs", "verbs"), ("verbs", "weft"), ("weft", "verbs"))]
# With XRC the provider's device has another name, so that a run without XRC finds no provider.
XRC = [("verbs", "verbs"), ("verbs", "weft"), ("weft", "verbs")]
XRC_ENV = {"FI_VERBS_PREFER_XRC": "1", "FI_OFI_RXM_USE_SRX": "1", "FI_WEFT_XRC": "1"}
XRC_PORT = "7471"


def names():
    plain = [f"fi_pingpong {kind} {server} {client}" for kind, server, client in PAIRS]
    layered = [f"fi_pingpong xrc {server};ofi_rxm {client};ofi_rxm" for server, client in XRC]
    # two processes of libfabric's provider have at most two connections: docs/protocol-xrc.md
    return plain + layered + [f"xrc_peer xrc {server} {client}" for server, client in XRC[1:]]


def device(provider):
    return "soft0-xrc" if provider.startswith("verbs") else "soft0"


def run(name, world, limit):
    """Runs a line of `names`. Returns (reason of the failure or None, output, seconds)."""
    start = time.monotonic()
    install.ensure({"fi_pingpong": "libfabric-bin"})
    with tempfile.TemporaryDirectory(prefix="weft-peers-") as folder:
        source = os.path.join(TOP, "tests", "conformance", "c", "xrc_peer.c")
        built = os.path.join(folder, "xrc_peer")
        subprocess.run(["gcc", "-O1", "-g", "-o", built, source, "-lfabric"], check=True)
        inside = [sys.executable, "-B", os.path.realpath(__file__), name, json.dumps(world.env), str(limit), built]
        why, output = process.run_one(spaces.command(inside, veth=True), world.env, limit + 10)
    return why and output.splitlines()[0] if output else why, output, time.monotonic() - start


def environment(provider, env):
    """The environment of a process with this provider."""
    if not provider.startswith("weft"):
        return env
    env = {name: value for name, value in env.items() if name != "LD_LIBRARY_PATH"}
    return dict(env, FI_PROVIDER_PATH=os.path.join(TOP, "build", "lib", "libfabric"))


def xrc_peer(server, client, env, limit, program):
    """A pair of xrc_peer. Returns as `pair`."""
    env = dict(env, **XRC_ENV)
    argv = lambda role, provider: [program, role, provider, device(provider), spaces.VETH, XRC_PORT]  # noqa: E731
    deadline = time.monotonic() + limit
    one = process.Program(argv("server", server), environment(server, env))
    other = None
    # the server has no socket to wait for: a client that comes too early is refused
    while time.monotonic() < deadline:
        time.sleep(1)
        other = process.Program(argv("client", client), environment(client, env))
        if other.wait(deadline) == 0 or one.process.poll() is not None or "Connection refused" not in other.text():
            break
        other.kill()
    codes = [program.wait(deadline) for program in (other, one)]
    for program in (one, other):
        program.kill()
    output = f"server:\n{one.text()}\nclient:\n{other.text()}"
    for side, code in zip(("client", "server"), codes):
        if code != 0:
            return f"{side}: {process.explain(code)}", output
    return None, output


def pair(name, env, limit, program):
    """One pair. Returns the reason of the failure or None, and the output of both."""
    what, kind, server, client = name.split()
    if what == "xrc_peer":
        return xrc_peer(server, client, env, limit, program)
    options = lambda _: ["-e", kind]  # noqa: E731
    if kind == "xrc":
        options, env = lambda provider: ["-e", "rdm", "-d", device(provider)], dict(env, **XRC_ENV)  # noqa: E731
    # -c compares the received bytes
    argv = lambda provider: ["fi_pingpong", "-p", provider, *options(provider), "-I", "100", "-c"]  # noqa: E731
    deadline = time.monotonic() + limit
    one = process.Program(argv(server), environment(server, env))
    while not listening(PORT) and one.process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    other = process.Program([*argv(client), spaces.VETH], environment(client, env))
    codes = [program.wait(deadline) for program in (other, one)]
    for program in (one, other):
        program.kill()
    output = f"server:\n{one.text()}\nclient:\n{other.text()}"
    for side, code, text in zip(("client", "server"), codes, (other.text(), one.text())):
        if code != 0:
            return f"{side}: {process.explain(code)}", output
        # one row for each size from 64 B to 1 MiB
        if not all(f"\n{size} " in text for size in ("64", "4k", "1m")):
            return f"{side} has no row of each size", output
    return None, output


def main():
    why, output = pair(sys.argv[1], json.loads(sys.argv[2]), float(sys.argv[3]), sys.argv[4])
    if why:
        print(why)
    print(output)
    sys.exit(1 if why else 0)


if __name__ == "__main__":
    main()
