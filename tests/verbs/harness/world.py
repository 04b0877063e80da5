"""The releases of rdma-core whose programs run: the installed one, and that of a newer Debian.

The newer one is unpacked into a directory of the cache, not installed, and its programs run there
by chroot. Each release has a drop-in of its own, made with the version data of its libibverbs.
"""
import copy
import gzip
import os
import re
import shutil
import subprocess
import sys
import time

from lib import cache, debian, dropin as dropins, install

HERE = os.path.dirname(os.path.realpath(__file__))
TOP = os.path.dirname(os.path.dirname(os.path.dirname(HERE)))
TESTS = "/usr/share/doc/rdma-core/tests"
STAND_INS = os.path.join(os.path.dirname(HERE), "bin")
BASE, NEWER, NEWEST = "bookworm", "trixie", "sid"
PACKAGES = ["python3-pyverbs", "ibverbs-utils", "perftest", "python3-minimal", "coreutils", "dash", "iproute2",
            "rdmacm-utils", "librdmacm-dev"]
# Where the host's directories are mounted in a chroot.
SEEN = "/mnt"


class World:
    """One release of rdma-core with its programs, its drop-in and its tests.

    `name` is "" for BASE; a result of another is named `[name] ...`. `problem`: why there are no
    tests of rdma-core; `no_cm`: why there is no drop-in librdmacm.
    """

    def __init__(self, name, root, dropin, tests, problem, no_cm=""):
        self.name, self.root, self.problem, self.no_cm = name, root, problem, no_cm
        self.prefix = []
        self.host = {"dropin": dropin, "tests": tests, "harness": HERE, "bin": STAND_INS}
        at = (lambda part: f"{SEEN}/{part}") if root else self.host.get
        self.tests = at("tests") if tests else None
        self.worker = at("harness") + "/worker.py"
        self.programs = at("dropin")
        env = {k: v for k, v in os.environ.items() if not k.startswith(("LD_", "PYTHON", "SOFTVERBS_", "VIRTUAL_ENV"))}
        env["LD_LIBRARY_PATH"] = at("dropin")
        env["PATH"] = at("bin") + ":/usr/sbin:/usr/bin:/sbin:/bin"
        env["LC_ALL"] = "C"
        self.env = env

    def pack(self):
        return [self.name, self.root, self.host["dropin"], self.host["tests"], self.problem, self.no_cm]

    def title(self, name):
        words = [self.name] * bool(self.name) + ["refused"] * bool(self.prefix)
        return f"[{' '.join(words)}] {name}" if words else name

    def command(self, argv):
        return [*self.prefix, *([install.find("chroot"), self.root] if self.root else []), *argv]

    def lines(self, argv):
        """The command of a program whose output is read: written line by line, so that it is not
        lost when the program is killed."""
        return self.command(["stdbuf", "-oL", *argv])

    def refused(self):
        """The same release, where the kernel refuses copies between processes."""
        other = copy.copy(self)
        other.prefix = [sys.executable, os.path.join(TOP, "tests/tools/refuse")]
        return other

    def mount(self):
        """Mounts the host's directories inside the root. Only in a mount namespace of its own."""
        if not self.root:
            return
        inside = lambda path: self.root + path  # noqa: E731
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", inside(SEEN)], check=True)
        for part, path in self.host.items():
            if path:
                os.mkdir(f"{inside(SEEN)}/{part}")
                subprocess.run(["mount", "--bind", path, f"{inside(SEEN)}/{part}"], check=True)
        for path in ("/dev", "/proc", "/sys", "/tmp"):
            subprocess.run(["mount", "--rbind", path, inside(path)], check=True)


def installed(dropin, release):
    """The programs of this machine."""
    install.ensure(
        {"ibv_rc_pingpong": "ibverbs-utils", "ib_send_bw": "perftest", "readelf": "binutils", "ip": "iproute2"},
        {"/usr/lib/python3/dist-packages/pyverbs": "python3-pyverbs"})
    # A machine without these runs everything but the connection manager's programs.
    no_cm = ""
    try:
        install.ensure({"rping": "rdmacm-utils"}, {"/usr/include/rdma/rdma_cma.h": "librdmacm-dev"})
    except (cache.CannotMake, cache.CannotDownload) as error:
        no_cm = str(error).strip().splitlines()[-1]
    if dropin:
        if not os.path.exists(f"{dropin}/librdmacm.so.1"):
            no_cm = no_cm or f"{dropin} has no librdmacm.so.1"
    else:
        dropin = dropins.OUTPUT
        no_cm = dropins.build(dropin, release) or no_cm
    with open("/etc/os-release") as file:
        suite = re.search(r"^VERSION_CODENAME=(\S+)", file.read(), re.MULTILINE)[1]
    return World("" if suite == BASE else suite, None, dropin, *installed_tests(suite), no_cm)


def newer(suite, release):
    """The programs of a newer Debian. Those of NEWEST are downloaded again each month."""
    install.ensure({"mmdebstrap": "mmdebstrap"})
    key = "4" if suite != NEWEST else "4-" + time.strftime("%Y-%m")
    home = cache.ensure(f"rdma-{suite}", key, lambda home: unpack_debian(home, suite))
    root = str(home / "root")
    dropin = os.path.join(TOP, "build", "lib", f"softverbs-{suite}")
    no_cm = dropins.build(dropin, release, root)
    return World(suite, root, dropin, root + TESTS, "", no_cm)


def unpack_debian(home, suite):
    mirror = os.environ.get("WEFT_DEBIAN_MIRROR", debian.MIRROR)
    cache.download([
        # The leftovers of a failed attempt would make mmdebstrap fail.
        "sh", "-c", 'rm -rf "$0"; exec "$@"', str(home / "root"), install.find("mmdebstrap"),
        "--variant=extract", f"--include={','.join(PACKAGES)}",
        f"--keyring={debian.KEYRING}", '--aptopt=Acquire::Check-Valid-Until "false"',
        "--dpkgopt=path-exclude=/usr/share/doc/*", f"--dpkgopt=path-include={TESTS}/*",
        suite, str(home / "root"), mirror])
    # A package script makes the links of a merged /usr; it does not run in an extracted root.
    for folder in ("bin", "sbin", "lib", "lib64"):
        link = home / "root" / folder
        if not link.exists():
            link.symlink_to(f"usr/{folder}")
    for folder in ("mnt", "dev", "proc", "sys", "tmp"):
        (home / "root" / folder).mkdir(exist_ok=True)
    uncompress(home / "root" / TESTS.lstrip("/"))


def uncompress(folder):
    """Debian compresses long documents of a package: decompress them."""
    for packed in folder.rglob("*.gz"):
        with gzip.open(packed) as file:
            packed.with_suffix("").write_bytes(file.read())
        packed.unlink()
    if not (folder / "base.py").exists():
        raise cache.CannotMake(f"python3-pyverbs brings no tests in {TESTS}")


def installed_tests(suite):
    """The directory of the installed pyverbs' tests, or None and the reason.

    On a machine that installs packages without documentation, the tests are downloaded separately.
    """
    def ask(*command):
        return subprocess.run(["dpkg-query", *command, "python3-pyverbs"], check=True, stdout=subprocess.PIPE,
                              text=True).stdout

    version = ask("-W", "-f=${Version}")

    def fetch(home):
        with cache.scratch() as scratch:
            source = ""
            if not all(os.path.exists(path) for path in ask("-L").split() if path.startswith(TESTS)):
                debian.Suite(suite).packages([f"python3-pyverbs={version}"], scratch)
                source = str(scratch)
            shutil.copytree(source + TESTS, home / "tests")
        uncompress(home / "tests")

    try:
        return str(cache.ensure("rdma-core-tests-" + version, "2", fetch) / "tests"), ""
    except (cache.CannotDownload, cache.CannotMake) as error:
        last = str(error).strip().splitlines()[-1]
        return None, f"the tests of python3-pyverbs {version} cannot be downloaded: {last}"
