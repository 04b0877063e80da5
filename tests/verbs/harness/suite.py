"""rdma-core's own Python tests, run by the Python that pyverbs was built for."""
import json
import os
import select
import signal
import tempfile
import time

from . import process

WORKER = os.path.join(os.path.dirname(os.path.realpath(__file__)), "worker.py")

class Worker:
    def __init__(self, world, names=None):
        self.reader, writer = os.pipe()
        os.set_inheritable(writer, True)
        # A distribution builds pyverbs for its own Python.
        command = world.command(["/usr/bin/python3", "-B", world.worker, world.tests, str(writer)])
        source = tempfile.TemporaryFile("w+")
        source.write("\n".join(names or []))
        source.seek(0)
        if names is None:
            command.append("--list")
        self.program = process.Program(command, world.env, pass_fds=(writer,), stdin=source)
        os.close(writer)
        self.buffer = b""

    def event(self, limit):
        """The next event; None at the end; TimeoutError after `limit` seconds without one."""
        deadline = time.monotonic() + limit
        while b"\n" not in self.buffer:
            if not select.select([self.reader], [], [], min(0.5, max(0.0, deadline - time.monotonic())))[0]:
                if time.monotonic() >= deadline:
                    raise TimeoutError
                # Children of a crashed worker may still have the pipe open.
                if self.program.process.poll() is not None:
                    return None
                continue
            data = os.read(self.reader, 65536)
            if not data:
                return None
            self.buffer += data
        line, self.buffer = self.buffer.split(b"\n", 1)
        return json.loads(line)

    def close(self):
        self.program.kill()
        os.close(self.reader)


def names(world):
    worker = Worker(world)
    try:
        event = worker.event(60)
        if event is None:
            raise SystemExit("the tests of rdma-core do not load:\n" + worker.program.text())
        return event["list"]
    finally:
        worker.close()


def connects(name):
    """Whether a test uses librdmacm."""
    return name.startswith(("tests.test_rdmacm.", "tests.test_mlx5_rdmacm."))


def run_tests(world, wanted, limit, report):
    """Runs `wanted`, calling report(name, outcome, why, output, seconds) for each."""
    left = list(wanted)
    while left:
        worker = Worker(world, left)
        current, started, holder, done = None, time.monotonic(), "", False
        try:
            while True:
                try:
                    event = worker.event(limit)
                except TimeoutError:
                    os.kill(worker.program.process.pid, signal.SIGUSR1)
                    time.sleep(0.5)
                    why, text = f"hung for {limit} s", worker.program.where() + "\n" + worker.program.text()
                    break
                if event is None or "done" in event:
                    done = event is not None
                    worker.program.wait(time.monotonic() + 5)
                    code = worker.program.process.poll()
                    why, text = f"worker: {process.explain(code)}", worker.program.text()
                    break
                if "holder" in event:
                    holder = f"{event['holder']}: {event['why']}"
                elif "start" in event:
                    current, started = event["start"], time.monotonic()
                elif "end" in event and event["end"] in left:
                    left.remove(event["end"])
                    current = None
                    report(event["end"], event["outcome"], event["why"], event["trace"], time.monotonic() - started)
        finally:
            worker.close()
        if done:
            for name in left:
                report(name, "fail", f"did not run: {holder}", "", None)
            return
        # The test that ran when the worker died or hung has failed; the others get a new worker.
        culprit = current or left[0]
        left.remove(culprit)
        report(culprit, "fail", why, text, time.monotonic() - started)
