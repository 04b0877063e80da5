"""Endpoints with many peers under load, without calls, and with processes that end:
tests/conformance/c/rdm_overload.c, rdm_progress.c and rdm_death.c.

With WEFT_RDM_LONG=1 the counts are those of `make check-long`.
"""

import contextlib
import functools
import itertools
import os
import subprocess
import sys
import unittest

from lib import programs

from . import common

LONG = os.environ.get("WEFT_RDM_LONG") == "1"


class Load(common.CProgram):
    OPTIONS = ("-D_GNU_SOURCE", "-pthread")

    def succeeds(self, mode, count=None, progress=("manual", "auto"), long=None, waits=False, **more):
        """Runs a mode with manual and automatic progress, at the same time if its processes `wait`;
        `long` is its count in the long form.
        """
        if LONG and long is not None:
            count = long
        counts = [] if count is None else [str(count)]

        def run(model):
            argv = [self.program, mode, "weft", "127.0.0.1", model, *counts]
            env = programs.SYSTEM.env(**more)
            ended = programs.run(argv, env, seconds=1800 if LONG else 100)
            self.assertEqual(ended.status, 0, ended)

        runs = [({"progress": model}, functools.partial(run, model)) for model in progress]
        common.at_once(self, runs, len(runs) if waits else 1)


class Overload(Load):
    SOURCE = "rdm_overload"

    def test_a_receiver_that_posts_nothing(self):
        self.succeeds("unread", 20000, long=10**7)

    def test_a_receiver_that_calls_nothing(self):
        self.succeeds("deaf", 20000, long=10**6)

    def test_a_receiver_that_posts_nothing_without_rings(self):
        self.succeeds("unread", 20000, long=10**7, SOFTVERBS_RING="0")

    def test_two_processes_that_post_nothing(self):
        self.succeeds("mutual", 20000, long=10**6)

    def test_a_message_behind_many_without_receives(self):
        self.succeeds("behind")

    def test_waiting_for_sends_with_a_full_receive_queue(self):
        self.succeeds("full")

    def test_readerr_alone(self):
        self.succeeds("readerr", 20000, long=10**6)

    def test_reading_the_transmit_queue_alone(self):
        self.succeeds("transmit")

    def test_waiting_for_counters_alone(self):
        self.succeeds("counters")

    def test_waiting_in_sread(self):
        self.succeeds("sread")

    def test_waiting_in_poll(self):
        self.succeeds("poll")

    def test_a_new_peer_beside_many_idle_ones(self):
        self.succeeds("idle", 300, long=1002)

    def test_a_new_peer_beside_many_idle_ones_on_xrc(self):
        self.succeeds("idle", 240, long=1002, FI_WEFT_XRC="1")

    def test_both_sides_dial(self):
        self.succeeds("dial", 40, long=1000)

    def test_many_peers_in_turn(self):
        self.succeeds("round")

    def test_endpoints_with_one_queue(self):
        self.succeeds("shared")

    def test_threads_with_one_endpoint(self):
        self.succeeds("threads", 5000, long=10**6)

    def test_endpoints_on_xrc(self):
        counts = {"unread": 1000, "deaf": 1000, "readerr": 1000, "dial": 5, "threads": 200}
        modes = ["unread", "deaf", "full", "readerr", "counters", "sread", "poll", "dial", "shared", "threads"]
        for mode, progress in zip(modes, itertools.cycle(["manual", "auto"])):
            self.succeeds(mode, counts.get(mode), [progress], WEFT_TEST_XRC="1")


@contextlib.contextmanager
def busy_processors():
    """Two processes for each processor that run all the time."""
    count = 2 * len(os.sched_getaffinity(0))
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


class Progress(Load):
    SOURCE = "rdm_progress"

    def test_connecting_on_a_busy_machine(self):
        # processes that spin kept the threads that connect them from the processors for seconds
        with busy_processors():
            self.succeeds("computes", 4000)

    def test_a_process_that_calls_nothing(self):
        self.succeeds("computes", 4000, long=5000)

    def test_a_sender_that_calls_nothing(self):
        self.succeeds("sender", progress=["auto"], long=5000)

    def test_a_receiver_that_calls_nothing(self):
        self.succeeds("receiver", progress=["auto"], long=5000)

    def test_sleeping_processes(self):
        self.succeeds("asleep", long=10000, waits=True)

    def test_sleeping_processes_with_many_peers(self):
        self.succeeds("crowd", 5000, long=10000, waits=True)

    def test_processes_that_sleep_in_sread(self):
        self.succeeds("sread", long=10000, waits=True)


class Death(Load):
    SOURCE = "rdm_death"

    def test_killed_processes(self):
        self.succeeds("killed", 1, long=100)

    def test_a_stopped_process(self):
        self.succeeds("stopped", 3000, long=15000)

    def test_a_process_at_the_address_of_another(self):
        self.succeeds("again", 4, long=100)

    def test_processes_that_end_after_an_inject(self):
        self.succeeds("exits")

    def test_closing_with_operations_under_way(self):
        # a send to the endpoint that was closed waits as long for a connection
        self.succeeds("closes", 15, long=1000, FI_WEFT_CONNECT_TIMEOUT="3")

    def test_fork(self):
        self.succeeds("forks")

    def test_endpoints_on_xrc(self):
        self.succeeds("killed", 1, ["manual"], WEFT_TEST_XRC="1")
        self.succeeds("again", 1, ["auto"], WEFT_TEST_XRC="1")
        self.succeeds("closes", 3, ["manual"], FI_WEFT_CONNECT_TIMEOUT="3", WEFT_TEST_XRC="1")
