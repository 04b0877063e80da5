"""One running guest: QEMU under software emulation, and the agent in it over virtio ports."""

import ctypes
import os
import pathlib
import queue
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

from . import image as images

PROJECT = images.HERE.parent.parent

# From power-on to the agent's "ready": 6 s on an idle host, so only a hanging guest exceeds this.
BOOT_SECONDS = 180
# How long the host waits after a command's own time limit before it ends the whole guest.
GRACE_SECONDS = 20
TIMED_OUT = 124

KERNEL_LINE = (
    "console=ttyS0 quiet panic=-1 mitigations=off "
    # emulation on a busy host stalls virtual CPUs for seconds; these warnings are about the host,
    # not rxe
    "watchdog_thresh=60 rcupdate.rcu_cpu_stall_timeout=120 "
    # On a busy host the kernel marks the emulated TSC unstable in the middle of the boot, and then
    # patches its own code while the other virtual CPU runs it, which QEMU's emulation does not
    # always survive (Linux 7.2.13, QEMU 7.2: an int3 oops in sched_clock_idle_wakeup_event). A TSC
    # marked unstable from the start avoids the patching.
    "tsc=unstable "
    # The kernel counts timer interrupts during a busy wait of 10 ms, and panics ("IO-APIC + timer
    # doesn't work") if a busy host delivers none meanwhile.
    "no_timer_check "
    # an oops stops the run, and its text stays visible
    "oops=panic"
)


class GuestDied(Exception):
    """The guest did not boot, panicked or stopped answering; the text contains its console."""


class EmulatorFault(GuestDied):
    """The boot ended in a stray int3: QEMU executed code that the kernel had already patched back
    (see KERNEL_LINE). About one boot in 50 ends so on a busy host, before any program of weft runs.
    """


class Stream:
    """Reads one output port without pause, since an unread one stalls a virtual CPU; finds end
    markers.
    """

    def __init__(self, sock, sink):
        self.sock, self.sink = sock, sink
        self.ends = queue.Queue()
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self):
        buffered = b""
        while True:
            try:
                data = self.sock.recv(65536)
            except OSError:
                data = b""
            if not data:
                break
            buffered += data
            while (at := buffered.find(b"\0weft-vm-end ")) >= 0:
                end = buffered.find(b"\0", at + 1)
                if end < 0:
                    break
                self.sink(buffered[:at])
                self.ends.put(int(buffered[at + 13:end]))
                buffered = buffered[end + 1:]
            keep = buffered.rfind(b"\0")
            if keep < 0 or len(buffered) - keep > 40:
                keep = len(buffered)
            self.sink(buffered[:keep])
            buffered = buffered[keep:]
        self.sink(buffered)
        self.ends.put(None)

    def wait_end(self, ident, seconds):
        deadline = time.monotonic() + seconds
        while True:
            try:
                got = self.ends.get(timeout=max(0.01, deadline - time.monotonic()))
            except queue.Empty:
                return False
            if got is None or got == ident:
                return got == ident


def file_sink(file):
    def write(data):
        if data:
            try:
                file.write(data)
                file.flush()
            except (OSError, ValueError):
                pass  # the reader has ended; the guest must not stall because of it
    return write


class Guest:
    def __init__(self, image, root="sid", pair="", link=None, memory=2048, cpus=2, exchange=None, out=None, err=None, pmem=0):
        self.name = f"guest {pair}" if pair else "guest"
        self.scratch = pathlib.Path(tempfile.mkdtemp(prefix="weft-vm-"))
        self.own_exchange = exchange is None
        self.exchange = pathlib.Path(exchange) if exchange else self.scratch / "xchg"
        self.exchange.mkdir(parents=True, exist_ok=True)
        self.console = self.scratch / "console"
        self.next_id = os.getpid() * 1000 + (500 if pair == "b" else 0)
        self.out_sink = out or file_sink(sys.stdout.buffer)
        self.err_sink = err or file_sink(sys.stderr.buffer)
        self._control = b""
        self.used = 0.0
        self._start(image, root, pair, link, memory, cpus, pmem)

    def _start(self, image, root, pair, link, memory, cpus, pmem):
        here, there = zip(*(socket.socketpair() for _ in range(3)))
        argv = base_argv(image, root, memory, cpus, self.exchange)
        argv += ["-display", "none", "-monitor", "none", "-serial", f"file:{self.console}", "-device", "virtio-serial-pci"]
        for name, sock in zip(("cmd", "out", "err"), there):
            argv += ["-chardev", f"socket,id={name},fd={sock.fileno()}", "-device", f"virtserialport,chardev={name},name={name}"]
        argv += nic_argv(pair, link) + pmem_argv(memory, pmem)
        argv += ["-append", f"{KERNEL_LINE} weft.project={PROJECT} weft.mode=run weft.pair={pair}"]
        fds = [sock.fileno() for sock in there] + ([link.fileno()] if link else [])
        with open(self.scratch / "qemu", "wb") as log:
            # a process group of its own: Ctrl-C ends this program, which then ends the guest
            self.qemu = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=fds,
                                         process_group=0, preexec_fn=end_with_parent)
        for sock in there:
            sock.close()
        if link:
            link.close()
        self.cmd = here[0]
        self.out = Stream(here[1], lambda data: self.out_sink(data))
        self.err = Stream(here[2], lambda data: self.err_sink(data))

    def wait_ready(self):
        line = self._read_line(BOOT_SECONDS)
        if line != "ready":
            kind = EmulatorFault if "Oops: int3" in self.console_text() else GuestDied
            raise kind(self.story("did not boot"))

    def _read_line(self, seconds):
        deadline = time.monotonic() + seconds
        while b"\n" not in self._control:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.cmd], [], [], left)[0]:
                return None
            try:
                data = self.cmd.recv(4096)
            except OSError:
                data = b""
            if not data:
                return ""
            self._control += data
        line, _, self._control = self._control.partition(b"\n")
        return line.decode(errors="replace").strip()

    def start(self, command, seconds=300, memlock="unlimited"):
        """Sends a command; `finish` returns its exit status. One command at a time."""
        self.next_id += 1
        (self.exchange / f"cmd-{self.next_id}").write_text(command + "\n")
        self.deadline = time.monotonic() + seconds + GRACE_SECONDS if seconds else None
        try:
            self.cmd.sendall(f"run {self.next_id} {seconds} {memlock}\n".encode())
        except OSError:
            pass  # `finish` reports a dead guest

    def finish(self):
        left = self.deadline - time.monotonic() if self.deadline else 10**9
        line = self._read_line(left)
        if line is None:
            raise GuestDied(self.story("stopped answering"))
        if not line.startswith(f"done {self.next_id} "):
            raise GuestDied(self.story("died"))
        for stream in (self.out, self.err):
            stream.wait_end(self.next_id, GRACE_SECONDS)
        (self.exchange / f"cmd-{self.next_id}").unlink(missing_ok=True)
        return int(line.split()[2])

    def run(self, command, seconds=300, memlock="unlimited"):
        self.start(command, seconds, memlock)
        return self.finish()

    def console_text(self):
        try:
            return self.console.read_text(errors="replace").replace("\r", "")
        except OSError:
            return ""

    def story(self, what):
        qemu = (self.scratch / "qemu").read_text(errors="replace").strip()
        text = f"{self.name} {what}; its console:\n" + "\n".join("  | " + l for l in self.console_text().splitlines()[-120:])
        return text + (f"\nqemu said: {qemu}" if qemu else "")

    def processor_seconds(self):
        """What the emulator has used of the host's processors, up to its end."""
        if self.qemu.poll() is None:
            fields = pathlib.Path(f"/proc/{self.qemu.pid}/stat").read_text().rpartition(")")[2].split()
            self.used = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return self.used

    def kill(self):
        """Powers the guest off, without notice to its kernel and programs."""
        self.processor_seconds()
        if self.qemu.poll() is None:
            self.qemu.send_signal(signal.SIGKILL)
        self.qemu.wait()

    def close(self):
        if self.qemu.poll() is None:
            try:
                self.cmd.sendall(b"off\n")
                self.qemu.wait(timeout=8)
            except (OSError, subprocess.TimeoutExpired):
                self.kill()
        self.cmd.close()
        for stream in (self.out, self.err):
            stream.thread.join(timeout=2)
            stream.sock.close()
        shutil.rmtree(self.scratch, ignore_errors=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if sys.exc_info()[0] is not None:
            self.kill()
        self.close()


def end_with_parent():
    """Called in the child: the kernel kills the guest when this program ends, for any reason."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def base_argv(image, root, memory, cpus, exchange):
    # /dev/kvm is not used even where it exists: nested KVM often fails, and the tier makes no claim
    # about times
    modules = image.modules()
    more = ["-virtfs", f"local,path={modules},mount_tag=modules,security_model=none,readonly=on,multidevs=remap"] if modules else []
    return [
        images.find_tool("qemu-system-x86_64"), "-nodefaults", "-no-user-config", "-no-reboot",
        "-machine", "q35", "-accel", "tcg,thread=multi", "-cpu", "max", "-smp", str(cpus), "-m", str(memory),
        "-kernel", str(image.kernel), "-initrd", str(image.initramfs()),
        "-drive", f"file={image.root(root)},if=none,id=root,format=raw,readonly=on,cache=unsafe",
        "-device", "virtio-blk-pci,drive=root", "-device", "virtio-rng-pci",
        "-virtfs", f"local,path={PROJECT},mount_tag=project,security_model=none,readonly=on,multidevs=remap",
        "-virtfs", f"local,path={exchange},mount_tag=exchange,security_model=none,multidevs=remap",
        *more,
    ]


def nic_argv(pair, link):
    if not link:
        return []
    mac = "52:54:00:77:00:0" + ("1" if pair == "a" else "2")
    return ["-netdev", f"socket,id=net0,fd={link.fileno()}", "-device", f"virtio-net-pci,netdev=net0,mac={mac}"]


def pmem_argv(memory, pmem):
    """An NVDIMM of `pmem` MiB, which the guest's kernel takes for persistent memory; none if 0."""
    if not pmem:
        return []
    return [
        "-machine", "nvdimm=on", "-m", f"{memory},slots=1,maxmem={memory + 2 * pmem}M",
        "-object", f"memory-backend-ram,id=pmem,size={pmem}M", "-device", "nvdimm,id=nvdimm0,memdev=pmem",
    ]


# After this many emulator faults in a row, report the last one.
BOOTS = 3


def boot_again(boot):
    """Calls `boot`, again after an emulator fault, BOOTS times at most."""
    for _ in range(BOOTS - 1):
        try:
            return boot()
        except EmulatorFault as fault:
            print(f"vm: booting again, the emulator failed: {str(fault).splitlines()[0]}", file=sys.stderr, flush=True)
    return boot()


def one_guest(image, *arguments, **options):
    """One guest, already booted."""
    def boot():
        guest = Guest(image, *arguments, **options)
        try:
            guest.wait_ready()
        except BaseException:
            guest.kill()
            guest.close()
            raise
        return guest
    return boot_again(boot)


def pair_of_guests(image, **options):
    """Two guests on one virtual cable, booted in parallel. Only the cable connects them."""
    return boot_again(lambda: _pair_of_guests(image, **options))


def _pair_of_guests(image, **options):
    # Datagrams, so that packets to a guest that has been powered off are lost, as on a cable. With a
    # stream, QEMU keeps those that it could not pass on, and the interface of the guest stops for
    # good.
    end_a, end_b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    options = dict(options)
    sinks = options.pop("sinks", {"a": (None, None), "b": (None, None)})
    exchanges = options.pop("exchanges", {"a": None, "b": None})
    made = []
    try:
        for name, end in (("a", end_a), ("b", end_b)):
            made.append(Guest(image, pair=name, link=end, out=sinks[name][0], err=sinks[name][1], exchange=exchanges[name], **options))
        for guest in made:
            guest.wait_ready()
    except BaseException:
        for guest in made:
            guest.kill()
            guest.close()
        raise
    return made
