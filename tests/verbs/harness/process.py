"""Starts programs of other projects, with a time limit and a report of hangs."""
import ctypes
import os
import signal
import subprocess
import tempfile
import time

from lib.programs import listening


def die_with_parent():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class Program:
    """A running program with its output in a file, killed with all its children at the end."""

    def __init__(self, argv, env, **options):
        self.argv = argv
        self.output = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            argv, env=env, stdin=options.pop("stdin", subprocess.DEVNULL), stdout=self.output,
            stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=die_with_parent, **options)

    def text(self):
        self.output.seek(0)
        return self.output.read().decode(errors="replace")

    def wait(self, deadline):
        """The exit code, or None at the time limit."""
        try:
            return self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return None

    def where(self):
        """The stack of each thread, for the report of a hang."""
        lines = []
        base = f"/proc/{self.process.pid}/task"
        try:
            for task in os.listdir(base):
                with open(f"{base}/{task}/stat") as f:
                    state = f.read().rpartition(")")[2].split()
                with open(f"{base}/{task}/wchan") as f:
                    wchan = f.read()
                lines.append(f"thread {task}: state {state[0]}, cpu {int(state[11]) + int(state[12])} ticks, in {wchan}")
        except OSError:
            pass
        return "\n".join(lines)

    def kill(self):
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()


def explain(code):
    if code is None:
        return "still running"
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit {code}"


def run_one(argv, env, limit):
    """Runs one program. Returns (reason of the failure or None, output)."""
    program = Program(argv, env)
    code = program.wait(time.monotonic() + limit)
    where = program.where() if code is None else ""
    program.kill()
    text = program.text() + where
    if code == 0:
        return None, text
    return (f"hung for {limit} s" if code is None else explain(code)), text


def run_pair(argv, port, env, limit, others=None, clients=1):
    """Runs `argv` as a server and, once it listens on `port`, `others` (default: `argv`) as
    `clients` clients. The result is that of `run_service`."""
    return run_service(argv, lambda: listening(port), env, limit, [(others or argv) + ["127.0.0.1"]] * clients)


def run_service(server_argv, ready, env, limit, clients, endless=False):
    """Runs a server and, once `ready()`, the clients. `endless`: the server does not end by itself.

    Returns (reason of the failure or None, server's output, clients' output).
    """
    deadline = time.monotonic() + limit
    server = Program(server_argv, env)
    try:
        while not ready():
            if server.process.poll() is not None:
                return f"server before it listened: {explain(server.process.returncode)}", server.text(), ""
            if time.monotonic() > deadline:
                return f"server did not listen within {limit} s", server.text() + server.where(), ""
            time.sleep(0.02)
        started = [Program(argv, env) for argv in clients]
        try:
            codes = [client.wait(deadline) for client in started]
            # The first client that failed determines the result.
            client_code = next((code for code in codes if code != 0), 0)
            if endless:
                server_code = server.process.poll() or 0
            else:
                # A client that failed leaves its server waiting: the server has 2 s to end.
                server_code = server.wait(deadline if client_code == 0 else time.monotonic() + 2)
            why = None
            if (server_code, client_code) != (0, 0):
                hung = "hung: " if time.monotonic() >= deadline else ""
                why = f"{hung}server {explain(server_code)}, client {explain(client_code)}"
            server_text = server.text() + (server.where() if server_code is None else "")
            client_text = "".join(
                client.text() + (client.where() if code is None else "") for client, code in zip(started, codes))
            return why, server_text, client_text
        finally:
            for client in started:
                client.kill()
    finally:
        server.kill()
