"""libfabric's provider `verbs` on softverbs as a peer: its libraries, and the namespaces in which
it has a device.

The provider skips loopback, so everything that is compared with it runs in a network namespace with
another address.
"""

import os
import pathlib
import subprocess

from lib import cache, dropin, spaces

TOP = pathlib.Path(os.path.realpath(__file__)).parent.parent
DROPIN = TOP / "build" / "lib" / "softverbs-release"


class NotHere(Exception):
    """This machine cannot run it; the message is the reason."""


def build_dropin():
    """Builds the drop-in libraries in release mode."""
    problem = dropin.build(str(DROPIN), release=True, output=subprocess.DEVNULL)
    if problem:
        raise NotHere(problem)


def check_spaces():
    try:
        spaces.check()
    except spaces.NoNamespaces as error:
        raise NotHere(f"no namespaces: {error}") from error


def command(argv):
    """The command line that runs `argv` where the provider has a device."""
    return spaces.command(argv, veth=True)


def peers(env):
    """The environment of weft-bench with the provider as a peer of weft."""
    made = subprocess.run([TOP / "tests/tools/peers", "libfabric-2.1-verbs"], stdout=subprocess.PIPE, text=True)
    if made.returncode == cache.CANNOT_DOWNLOAD:
        raise NotHere("libfabric 2.1 cannot be downloaded")
    if made.returncode != 0:
        raise cache.CannotMake("libfabric 2.1 with its provider verbs cannot be built")
    check_spaces()
    build_dropin()
    return dict(env, WEFT_VERBS_LIBFABRIC=f"{made.stdout.strip()}/lib/libfabric.so.1", WEFT_VERBS_DROPIN=str(DROPIN),
                WEFT_BENCH_ADDRESS=spaces.VETH)


def alone(env):
    """From the result of `peers`: the environment of a process with this provider only."""
    env = dict(env, WEFT_LIBFABRIC=env["WEFT_VERBS_LIBFABRIC"], LD_LIBRARY_PATH=env["WEFT_VERBS_DROPIN"])
    del env["FI_PROVIDER_PATH"]
    return env
