"""Runs a command in new namespaces: processes, a network with loopback only, an empty /dev/shm.

The command cannot see or signal other processes, finds no used port, and leaves no files or
processes.
"""

import os
import re
import subprocess
import sys
import tempfile

if __package__:
    from . import install
else:  # run as a program, inside the namespaces
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))
    from lib import install

# An address that is not loopback, for programs that treat loopback as a special case.
VETH = "10.77.0.1"


class NoNamespaces(Exception):
    """The kernel does not permit this user to create namespaces."""


def command(argv, veth=False, hide=(), nodes=1):
    """The command line that runs `argv` in the namespaces. `hide`: files that it must not see.
    `nodes`: addresses of the loopback interface, from 127.0.0.1 on.
    """
    unshare = [install.find("unshare"), "-pfnm", "--mount-proc", "--kill-child"]
    if os.geteuid() != 0:
        unshare.insert(1, "-Ur")
    options = (["--veth"] if veth else []) + [f"--hide={path}" for path in hide] + [f"--nodes={nodes}"]
    return [*unshare, sys.executable, "-B", os.path.realpath(__file__), *options, "--", *map(str, argv)]


def with_device(argv, name):
    """The command line that runs `argv` with a character device /dev/infiniband/`name` that acts as
    /dev/null.

    Only inside the namespaces of `command`: this creates a new mount namespace and keeps all
    others.
    """
    return [install.find("unshare"), "-m", sys.executable, "-B", os.path.realpath(__file__), f"--device={name}", "--",
            *map(str, argv)]


def with_quick_start(argv):
    """The command line that runs `argv` where programs on Debian's libfabric 1.17 start without
    waiting.

    Each of them waits 0.16 s before main(): it is linked to libpsm_infinipath, whose libinfinipath
    measures the processor's clock when it is loaded. In each fi_getinfo() the providers `verbs` and
    `efa` read all of /proc/kallsyms, which takes 0.1 s, for the kernel's support of peer memory.
    Inside, that library is a stub with which the provider `psm` finds no device, as without the
    hardware, and /proc/kallsyms is empty. Only if root may mount: another user would need a user
    namespace, which changes what some tests examine.
    """
    unshare = [install.find("unshare"), "-m"]
    if os.geteuid() != 0 or subprocess.run([*unshare, "true"], stderr=subprocess.DEVNULL).returncode != 0:
        return list(map(str, argv))
    return [*unshare, sys.executable, "-B", os.path.realpath(__file__), "--quick-start", "--", *map(str, argv)]


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


def _replace(path, by):
    _do("mount", "--bind", by, path)


PSM = """
int psm_init(int *major, int *minor) { (void)major; (void)minor; return 0; }
int psm_ep_num_devunits(unsigned *count) { *count = 0; return 0; }
const char *psm_error_get_string(int error) { (void)error; return "no device"; }
"""


def _quick_start(folder):
    """The stub and the empty file may be removed when they are mounted."""
    empty = os.path.join(folder, "empty")
    open(empty, "w").close()
    _replace("/proc/kallsyms", empty)
    shown = subprocess.run(["/sbin/ldconfig", "-p"], stdout=subprocess.PIPE, text=True, check=True).stdout
    for library in re.findall(r"=> (\S*/libpsm_infinipath\.so\.1)$", shown, re.M):
        symbols = subprocess.run(["nm", "-D", "--defined-only", library], stdout=subprocess.PIPE, text=True, check=True).stdout
        names = re.findall(r" [TW] (psm_\w+)$", symbols, re.M)
        stub = os.path.join(folder, "stub.so")
        # there are 0 devices; other calls fail with PSM_PARAM_ERR
        source = PSM + "".join(f"int {name}(void) {{ return 3; }}\n" for name in names if f"{name}(" not in PSM)
        argv = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libpsm_infinipath.so.1", "-o", stub, "-x", "c", "-"]
        subprocess.run(argv, input=source, text=True, check=True)
        _replace(os.path.realpath(library), stub)


def _inside(arguments):
    options, argv = arguments[: arguments.index("--")], arguments[arguments.index("--") + 1 :]
    if "--quick-start" in options:
        try:
            with tempfile.TemporaryDirectory() as folder:
                _quick_start(folder)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"weft: programs on the system's libfabric start slowly: {error}", flush=True)
        os.execvp(argv[0], argv)
    device = [option.split("=", 1)[1] for option in options if option.startswith("--device=")]
    if device:
        _make_device(device[0])
        os.execvp(argv[0], argv)
    ip = install.find("ip")
    _do(ip, "link", "set", "lo", "up")
    _do("mount", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", "/dev/shm")
    for node in range(1, max(int(option.split("=", 1)[1]) for option in options if option.startswith("--nodes="))):
        _do(ip, "address", "add", f"127.0.0.{node + 1}/8", "dev", "lo")
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
