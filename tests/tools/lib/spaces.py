"""Runs a command in new namespaces: processes, a network with loopback only, an empty /dev/shm.

The command cannot see or signal other processes, finds no used port, and leaves no files or
processes.
"""

import os
import subprocess
import sys

if __package__:
    from . import install
else:  # run as a program, inside the namespaces
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))
    from lib import install

# An address that is not loopback, for programs that treat loopback as a special case.
VETH = "10.77.0.1"


class NoNamespaces(Exception):
    """The kernel does not permit this user to create namespaces."""


def command(argv, veth=False, hide=()):
    """The command line that runs `argv` in the namespaces. `hide`: files that it must not see."""
    unshare = [install.find("unshare"), "-pfnm", "--mount-proc", "--kill-child"]
    if os.geteuid() != 0:
        unshare.insert(1, "-Ur")
    options = (["--veth"] if veth else []) + [f"--hide={path}" for path in hide]
    return [*unshare, sys.executable, "-B", os.path.realpath(__file__), *options, "--", *map(str, argv)]


def with_device(argv, name):
    """The command line that runs `argv` with a character device /dev/infiniband/`name` that acts as
    /dev/null.

    Only inside the namespaces of `command`: this creates a new mount namespace and keeps all
    others.
    """
    return [install.find("unshare"), "-m", sys.executable, "-B", os.path.realpath(__file__), f"--device={name}", "--",
            *map(str, argv)]


def check():
    """Raises NoNamespaces, with the system's message, if they are not available."""
    done = subprocess.run(command(["true"]), stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        raise NoNamespaces(done.stderr.strip() or f"unshare ended with status {done.returncode}")


def check_device():
    """As `check`, for `with_device`."""
    done = subprocess.run(with_device(["true"], "none"), stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        raise NoNamespaces(done.stderr.strip() or f"unshare ended with status {done.returncode}")


def _do(*argv):
    subprocess.run(argv, check=True, stdin=subprocess.DEVNULL)


def _hide(path):
    """Hides a file: mounts over its directory a directory of links to all other files."""
    directory, name = os.path.split(path)
    directory = os.path.realpath(directory)
    there = f"/run/weft-hidden{directory}"
    if not os.path.ismount(there):
        os.makedirs(there, exist_ok=True)
        _do("mount", "--bind", directory, there)
        _do("mount", "-t", "tmpfs", "tmpfs", directory)
        for entry in os.listdir(there):
            os.symlink(os.path.join(there, entry), os.path.join(directory, entry))
    link = os.path.join(directory, name)
    if os.path.lexists(link):
        os.unlink(link)


def _make_device(name):
    """Mounts a /dev with that device and links to all other files, because a user namespace cannot
    create devices."""
    _do("mount", "-t", "tmpfs", "tmpfs", "/run")
    there = "/run/weft-dev"
    os.mkdir(there)
    _do("mount", "--rbind", "/dev", there)
    _do("mount", "-t", "tmpfs", "tmpfs", "/dev")
    for entry in os.listdir(there):
        if entry != "infiniband":
            os.symlink(os.path.join(there, entry), os.path.join("/dev", entry))
    os.mkdir("/dev/infiniband")
    device = os.path.join("/dev/infiniband", name)
    with open(device, "w"):
        pass
    _do("mount", "--bind", os.path.join(there, "null"), device)


def _inside(arguments):
    options, argv = arguments[: arguments.index("--")], arguments[arguments.index("--") + 1 :]
    device = [option.split("=", 1)[1] for option in options if option.startswith("--device=")]
    if device:
        _make_device(device[0])
        os.execvp(argv[0], argv)
    ip = install.find("ip")
    _do(ip, "link", "set", "lo", "up")
    _do("mount", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", "/dev/shm")
    if "--veth" in options:
        _do(ip, "link", "add", "veth0", "type", "veth", "peer", "name", "veth1")
        _do(ip, "address", "add", f"{VETH}/24", "dev", "veth0")
        _do(ip, "link", "set", "veth0", "up")
        _do(ip, "link", "set", "veth1", "up")
    hidden = [option.split("=", 1)[1] for option in options if option.startswith("--hide=")]
    if hidden:
        _do("mount", "-t", "tmpfs", "tmpfs", "/run")
        for path in hidden:
            _hide(path)
    os.execvp(argv[0], argv)


if __name__ == "__main__":
    _inside(sys.argv[1:])
