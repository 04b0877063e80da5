"""Runs libfabric's own programs with the provider: alone, or as server and client."""

import contextlib
import os
import pathlib
import random
import signal
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass

TOP = pathlib.Path(os.path.realpath(__file__)).parent.parent.parent.parent
# the path of another build of the provider, for instance a debug build; its name ends in `fi.so`
PROVIDER = pathlib.Path(os.environ.get("WEFT_PROVIDER") or TOP / "build" / "lib" / "libfabric" / "libweft-fi.so")


@dataclass
class Libfabric:
    """One release of libfabric: the directory of its library, and the programs that use it."""

    name: str
    library: str | None = None  # directory for LD_LIBRARY_PATH; None: the system's
    programs: str = "/usr/bin"

    def env(self, provider_path=None, **more):
        env = {key: value for key, value in os.environ.items() if not key.startswith(("FI_", "LD_", "SOFTVERBS_"))}
        env["FI_PROVIDER_PATH"] = str(provider_path or PROVIDER.parent)
        env["LC_ALL"] = "C"
        # variables that a tier sets for the programs, not for the scripts that start them, such as
        # LD_PRELOAD
        env.update({key.removeprefix("WEFT_ENV_"): value for key, value in os.environ.items() if key.startswith("WEFT_ENV_")})
        if self.library:
            env["LD_LIBRARY_PATH"] = self.library
        env.update(more)
        return env

    def program(self, name):
        return os.path.join(self.programs, name)


SYSTEM = Libfabric("the system's")


@dataclass
class Result:
    status: int  # as in subprocess: negative for a signal
    out: str
    err: str
    late: bool = False

    @property
    def text(self):
        return self.out + self.err

    def __str__(self):
        return f"status {self.status}{' (killed: too slow)' if self.late else ''}\n{self.out}{self.err}"


def run(argv, env, seconds=60):
    with started(argv, env) as process:
        return process.finish(seconds)


class Process:
    """A program in its own process group. Its output goes to files, so that it never waits for a
    reader."""

    def __init__(self, argv, env, cwd=None):
        self.out, self.err = tempfile.TemporaryFile(), tempfile.TemporaryFile()
        self.popen = subprocess.Popen(
            [str(part) for part in argv], env=env, cwd=cwd, stdin=subprocess.DEVNULL, stdout=self.out, stderr=self.err, start_new_session=True
        )

    def finish(self, seconds):
        late = False
        try:
            self.popen.wait(seconds)
        except subprocess.TimeoutExpired:
            late = True
            self.kill()
        return Result(self.popen.returncode, self._text(self.out), self._text(self.err), late)

    def cpu_seconds(self):
        """The processor time it has used; a program that polls for completions uses time once its
        transfer has begun."""
        fields = pathlib.Path(f"/proc/{self.popen.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def wait_busy(self, seconds, limit=30):
        """Waits until it has used that much processor time; returns whether it has."""
        end = time.monotonic() + limit
        while self.popen.poll() is None and time.monotonic() < end:
            if self.cpu_seconds() >= seconds:
                return True
            time.sleep(0.05)
        return False

    def kill(self):
        if self.popen.poll() is None:
            os.killpg(self.popen.pid, signal.SIGKILL)
            self.popen.wait()

    @staticmethod
    def _text(file):
        file.seek(0)
        return file.read().decode(errors="replace")


@contextlib.contextmanager
def started(argv, env):
    process = Process(argv, env)
    with process.out, process.err:
        try:
            yield process
        finally:
            process.kill()


def free_port():
    """An unused port, below the range from which the kernel assigns ports."""
    while True:
        port = random.randrange(20000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def listening(port):
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError), open(table) as rows:
            for row in list(rows)[1:]:
                fields = row.split()
                if fields[3] == "0A" and int(fields[1].rsplit(":", 1)[1], 16) == port:
                    return True
    return False


def wait_listening(port, server, seconds=20):
    """Whether the server listens. Does not connect: the server would take this for its client."""
    limit = time.monotonic() + seconds
    while not listening(port):
        if server.popen.poll() is not None or time.monotonic() > limit:
            return False
        time.sleep(0.02)
    return True


def pingpong(libfabric, provider, endpoint, address="127.0.0.1", options=(), env=None, seconds=120, watch=None):
    """fi_pingpong between two processes; returns the server's and the client's Result.

    `watch(server, client)` is called while they run.
    """
    env = env or libfabric.env()
    port = free_port()
    common = [libfabric.program("fi_pingpong"), "-p", provider, "-e", endpoint, *options]
    if ":" in address:
        common.append("-6")
    with started([*common, "-B", port], env) as server:
        if not wait_listening(port, server):
            return server.finish(0.1), None
        with started([*common, "-P", port, address], env) as client:
            if watch:
                watch(server, client)
            ended = client.finish(seconds)
            # the client has ended, so the server ends too
            return server.finish(10), ended
