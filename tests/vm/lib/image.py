"""Makes the guests once: root images, kernel and initramfs, in a cache outside the tree."""

import contextlib
import fcntl
import hashlib
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from . import kernels, recipe

HERE = pathlib.Path(__file__).resolve().parent.parent

# Host commands and the Debian package of each.
HOST_TOOLS = {
    "qemu-system-x86_64": "qemu-system-x86",
    "mmdebstrap": "mmdebstrap",
    "genext2fs": "genext2fs",
    "busybox": "busybox-static",
    "cpio": "cpio",
    "xz": "xz-utils",
}
# no service may start and no initramfs is needed; both would only take time
KERNEL_HOOKS = [
    '--essential-hook=mkdir -p "$1/etc/initramfs-tools" && echo MODULES=dep > "$1/etc/initramfs-tools/initramfs.conf"',
    # bookworm's dpkg would ask whether to keep that file
    "--dpkgopt=force-confold",
]
# the hook of bookworm's initramfs-tools makes none then; with MODULES=dep it fails in a chroot
KERNEL_ENV = ["env", "INITRD=No"]
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"

DOWNLOAD_TRIES = 3

# Messages of apt and mmdebstrap about the network or the mirror. Any other failure is the recipe's.
DOWNLOAD_TROUBLE = re.compile(
    r"Failed to fetch|Could not (connect|resolve)|Temporary failure|Connection (failed|refused|timed out)"
    r"|Unable to connect|Hash Sum mismatch|File has unexpected size|50[0-9] +\w|Some index files failed to download"
    r"|Network is unreachable|Release file .* is not valid yet|unable to download",
    re.I,
)


class CannotDownload(Exception):
    """The mirror could not be reached after retries: the tier is skipped, and prints why."""


class CannotMake(Exception):
    """An error of this host or of the recipe: the tier fails."""


def say(text):
    print(f"vm: {text}", file=sys.stderr, flush=True)


def cache_dir(data=recipe, prefix="vm"):
    base = os.environ.get("WEFT_CACHE") or os.path.join(os.path.expanduser("~"), ".cache", "weft")
    digest = hashlib.sha256(pathlib.Path(data.__file__).read_bytes()).hexdigest()[:12]
    return pathlib.Path(base) / f"{prefix}-{digest}"


def run_download(argv, what, log):
    """Runs a command that downloads, DOWNLOAD_TRIES times at most.

    Raises CannotDownload or CannotMake.
    """
    for attempt in range(1, DOWNLOAD_TRIES + 1):
        with open(log, "w") as out:
            # a process group of its own: mmdebstrap signals its whole group when it fails
            child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, process_group=0)
            try:
                status = child.wait()
            except BaseException:
                os.killpg(child.pid, signal.SIGTERM)
                child.wait()
                raise
        if status == 0:
            return
        text = pathlib.Path(log).read_text(errors="replace")
        tail = "\n".join(text.splitlines()[-15:])
        if not DOWNLOAD_TROUBLE.search(text):
            raise CannotMake(f"{what} failed with status {status}:\n{tail}")
        say(f"{what}: download failed, try {attempt} of {DOWNLOAD_TRIES}")
        if attempt < DOWNLOAD_TRIES:
            time.sleep(5 * attempt)
    raise CannotDownload(f"{what}:\n{tail}")


def ensure_host_tools(scratch):
    missing = sorted({pkg for tool, pkg in HOST_TOOLS.items() if not find_tool(tool)})
    if not os.path.exists(KEYRING):
        missing.append("debian-archive-keyring")
    if not missing:
        return
    sudo = [] if os.geteuid() == 0 else ["sudo", "-n"]
    install = sudo + ["env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-y", "-q"]
    by_hand = "apt-get install " + " ".join(missing)
    if sudo and subprocess.run(["sudo", "-n", "true"], capture_output=True).returncode != 0:
        raise CannotMake(f"these are missing and there is no right to install them; do: sudo {by_hand}")
    say(f"installing {' '.join(missing)}")
    log = scratch / "apt.log"
    run_download(install + ["update"], "apt-get update", log)
    run_download(install + ["install", "--no-install-recommends"] + missing, by_hand, log)


def find_tool(tool):
    # qemu, mmdebstrap and other tools may be in sbin, which is not on every user's PATH
    return shutil.which(tool, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin:/usr/bin:/bin")


def make_root(name, into, scratch):
    suite, packages = recipe.ROOTS[name]
    say(f"making the {name} root from Debian {suite} ({len(packages)} packages and their dependencies)")
    image = into / recipe.IMAGE.format(name=name)
    argv = [find_tool("mmdebstrap"), "--variant=minbase", f"--include={','.join(packages)}", f"--keyring={KEYRING}"]
    argv += [f"--aptopt={option}" for option in recipe.APT_OPTIONS]
    argv += KERNEL_HOOKS + [
        "--dpkgopt=path-exclude=/usr/share/man/*",
        "--dpkgopt=path-exclude=/usr/share/locale/*",
        "--dpkgopt=path-exclude=/usr/share/doc/*",
        # versions are read once, on the host, from dpkg's own database
        f"--customize-hook=copy-out /var/lib/dpkg/status {scratch}",
    ]
    if name == recipe.KERNEL_FROM:
        argv += sync_kernel(scratch)
        # the initramfs has the modules; the image stays small without them
        argv += ['--customize-hook=rm -rf "$1"/usr/lib/modules/*/kernel/drivers/gpu "$1"/boot/initrd*']
    argv += ["--format=ext2", suite, str(image), os.environ.get("WEFT_DEBIAN_MIRROR", recipe.MIRROR)]
    run_download(argv, f"mmdebstrap {suite}", scratch / f"mmdebstrap-{name}.log")
    status = (scratch / "status").read_text(errors="replace")
    return package_versions(status)


def package_versions(status):
    found = {}
    for block in status.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line and not line.startswith(" "))
        if fields.get("Package") in ("libibverbs1", "librdmacm1", "libfabric1", "rdma-core"):
            found[fields["Package"]] = fields["Version"]
    return found


def module_order(modules_dir, names=recipe.MODULES):
    """The files of these modules in the order of insertion, each after its dependencies (modules.dep lists
    the dependencies of a module, nearest first).
    """
    needs, by_name = {}, {}
    for line in (modules_dir / "modules.dep").read_text().splitlines():
        path, _, rest = line.partition(":")
        needs[path] = rest.split()
        by_name[re.sub(r"\.ko.*$", "", os.path.basename(path)).replace("-", "_")] = path
    builtin = {
        re.sub(r"\.ko.*$", "", os.path.basename(line)).replace("-", "_")
        for line in (modules_dir / "modules.builtin").read_text().splitlines()
    }
    order = []
    for name in names:
        if name in builtin:
            continue
        if name not in by_name:
            # newer kernels have built-in modules that they do not list; the boot fails if one is
            # really missing
            say(f"the guest's kernel has no module {name}")
            continue
        for path in list(reversed(needs[by_name[name]])) + [by_name[name]]:
            if path not in order:
                order.append(path)
    # the kernel requests these by alias when a checksum is first used, when no loader is available
    for name in ("crc32c_generic", "crc32_generic", "crc32c_intel"):
        if name in by_name and by_name[name] not in order:
            order.insert(0, by_name[name])
    return order


def read_module(path):
    data = path.read_bytes()
    return subprocess.run(["xz", "-dc"], input=data, capture_output=True, check=True).stdout if path.suffix == ".xz" else data


def pack_initramfs(modules_dir, out):
    with tempfile.TemporaryDirectory() as tmp:
        top = pathlib.Path(tmp)
        for sub in ("bin", "modules", "proc", "sys", "dev", "root"):
            (top / sub).mkdir()
        shutil.copy(find_tool("busybox"), top / "bin" / "busybox")
        shutil.copy(HERE / "guest" / "init", top / "init")
        os.chmod(top / "init", 0o755)
        names = []
        for index, path in enumerate(module_order(modules_dir)):
            data = read_module(modules_dir / path)
            name = f"{index:02d}-" + re.sub(r"\.ko.*$", ".ko", os.path.basename(path))
            (top / "modules" / name).write_bytes(data)
            names.append(name)
        (top / "modules" / "order").write_text("".join(f"{n}\n" for n in names))
        listing = "\0".join(sorted(str(p.relative_to(top)) for p in top.rglob("*"))) + "\0"
        part = out.with_suffix(".part")
        with open(part, "wb") as f:
            subprocess.run(["cpio", "--null", "-o", "--format=newc", "--quiet", "-R", "0:0"], cwd=top,
                           input=listing.encode(), stdout=f, check=True)
        part.rename(out)


@contextlib.contextmanager
def locked(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        yield


class Image:
    """Paths and versions of the guests in the cache. `kernel_top`: the directory of another kernel than
    that of the sid root.
    """

    def __init__(self, top, kernel_top=None):
        self.top = top
        self.kernel_top = kernel_top or top
        self.kernel = self.kernel_top / "vmlinuz"
        self.versions = read_versions(top) | read_versions(self.kernel_top)

    def root(self, name):
        return self.top / recipe.IMAGE.format(name=name)

    def modules(self):
        """The modules of a kernel that is not that of the sid root, for the guest's modprobe; None: the
        root has them.
        """
        return self.kernel_top / "modules" if self.kernel_top != self.top else None

    def initramfs(self):
        """Packed again after each change of guest/init; cheap, so not part of the digest."""
        digest = hashlib.sha256((HERE / "guest" / "init").read_bytes()).hexdigest()[:12]
        top = self.kernel_top
        path = top / f"initramfs-{digest}.cpio"
        with locked(top / "lock"):
            if not path.exists():
                for old in top.glob("initramfs-*.cpio"):
                    old.unlink()
                release = self.versions["kernel"]
                pack_initramfs(top / "modules" / release, path)
        return path

    def describe(self):
        v = self.versions
        return (f"kernel {v['kernel']}; guest sid: rdma-core {v['sid.libibverbs1']}, libfabric {v['sid.libfabric1']}; "
                f"guest old: rdma-core {v['old.libibverbs1']}, libfabric {v['old.libfabric1']}")


def read_versions(top):
    return dict(line.split(" ", 1) for line in (top / "versions").read_text().splitlines())


def ensure(kernel=None):
    """Returns the Image, and makes it if the cache has none for this recipe. `kernel`: a name of
    kernels.KERNELS.
    """
    image = ensure_roots()
    return Image(image.top, ensure_kernel(kernel)) if kernel else image


def ensure_kernel(name):
    """Returns the directory of a further kernel, and makes it if the cache has none."""
    rest, suite = kernels.KERNELS[name]
    top = cache_dir(kernels, f"kernel-{name}")
    with locked(top.parent / f"{top.name}.lock"):
        if (top / "versions").exists():
            return top
        scratch = pathlib.Path(tempfile.mkdtemp(prefix="weft-vm-", dir=os.environ.get("TMPDIR", "/var/tmp")))
        scratch.chmod(0o755)
        part = top.with_name(top.name + ".part")
        try:
            say(f"downloading the kernel of Debian {suite}")
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            mirror = os.environ.get("WEFT_DEBIAN_MIRROR", recipe.MIRROR)
            argv = KERNEL_ENV + [find_tool("mmdebstrap"), "--variant=minbase", f"--include={kernels.PACKAGE}/{suite}", f"--keyring={KEYRING}"]
            argv += [f"--aptopt={option}" for option in recipe.APT_OPTIONS]
            argv += KERNEL_HOOKS + sync_kernel(scratch) + ["--format=null", rest, "-"]
            argv += [f"deb {mirror} {rest} main", f"deb {mirror} {suite} main"]
            run_download(argv, f"mmdebstrap {suite}", scratch / "mmdebstrap.log")
            (part / "versions").write_text(f"kernel {keep_kernel(scratch, part, kernels.MODULES)}\n")
            shutil.rmtree(top, ignore_errors=True)
            part.rename(top)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
            shutil.rmtree(part, ignore_errors=True)
    return top


def ensure_roots():
    top = cache_dir()
    with locked(top.parent / f"{top.name}.lock"):
        if (top / "versions").exists():
            if not find_tool("qemu-system-x86_64"):
                with tempfile.TemporaryDirectory() as tmp:
                    ensure_host_tools(pathlib.Path(tmp))
            return Image(top)
        scratch = pathlib.Path(tempfile.mkdtemp(prefix="weft-vm-", dir=os.environ.get("TMPDIR", "/var/tmp")))
        # in mmdebstrap's unshare mode another uid writes to this directory
        scratch.chmod(0o755)
        part = top.with_name(top.name + ".part")
        try:
            started = time.monotonic()
            ensure_host_tools(scratch)
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            lines = []
            for name in recipe.ROOTS:
                for package, version in sorted(make_root(name, part, scratch).items()):
                    lines.append(f"{name}.{package} {version}")
            lines.append(f"kernel {keep_kernel(scratch, part)}")
            (part / "versions").write_text("".join(f"{line}\n" for line in lines))
            shutil.rmtree(top, ignore_errors=True)
            part.rename(top)
            image = Image(top)
            say(f"made in {time.monotonic() - started:.0f} s: {image.describe()}")
            return image
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
            shutil.rmtree(part, ignore_errors=True)


def sync_kernel(scratch):
    """Options of mmdebstrap that copy the kernel to `scratch`."""
    (scratch / "boot").mkdir()
    (scratch / "modules").mkdir()
    return [f"--customize-hook=sync-out {source} {scratch}/{name}" for source, name in (("/boot", "boot"), ("/usr/lib/modules", "modules"))]


def keep_kernel(scratch, part, names=()):
    """Moves what sync_kernel has copied to `part`; returns the kernel's release. `names`: modules that
    are kept in addition to those of the initramfs.
    """
    found = sorted((scratch / "boot").glob("vmlinuz-*"))
    if not found:
        raise CannotMake("the root has no kernel in /boot")
    release = found[-1].name.removeprefix("vmlinuz-")
    shutil.copy(found[-1], part / "vmlinuz")
    keep_modules(scratch / "modules" / release, part / "modules" / release, names)
    return release


def keep_modules(source, target, names):
    """Copies the module index, the modules of the initramfs, and those with these names."""
    target.mkdir(parents=True)
    for index in source.glob("modules.*"):
        shutil.copy(index, target / index.name)
    for path in dict.fromkeys(module_order(source) + module_order(source, names)):
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source / path, target / path)
