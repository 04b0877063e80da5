"""fabtests over libfabric's own provider `verbs` on softverbs: the lists of message and RDM endpoints.

The programs and the library are those of tests/tools/peers, with the drop-in libibverbs and
librdmacm. tests/conformance/exclude/ has the tests that do not run, each with its reason.
"""
import os
import re
import subprocess
import sys
import time

from harness import process
from lib import cache, spaces

TOP = os.path.realpath(os.path.join(os.path.dirname(__file__), "../../.."))
PROVIDERS = {"msg": "verbs", "rdm": "verbs;ofi_rxm"}
# The short form leaves out the tests with 1,000 iterations, slow ones, and variants of others.
SHORT = {
    "msg": r"^(?!fi_msg_(pingpong|bw)( -v)?$)(?!fi_rma_bw -e msg -o \w+( -v)?$)(?!fi_multi_ep .*(--threading|-v( -A| -Q)?$))",
    "rdm": r"^(?!fi_rdm_(tagged_)?(pingpong|bw) -v$)(?!fi_rdm_cntr_pingpong$)(?!.* -U)(?!fi_recv_cancel)(?!fi_inject_test -N)"
           r"(?!fi_resmgmt_test -e rdm -[tjA]$)(?!fi_rdm_atomic -I 3 -o all$)(?!fi_rdm_tagged_\w+ -I 5$)",
}
# For a whole list.
LIMIT = 600


def prepare():
    """Makes the programs and the library. Returns their directories, and None or the reason why
    they could not be downloaded."""
    made = []
    for name in ("fabtests", "libfabric-2.1-verbs"):
        done = subprocess.run([os.path.join(TOP, "tests/tools/peers"), name], stdout=subprocess.PIPE, text=True)
        if done.returncode == cache.CANNOT_DOWNLOAD:
            return None, f"{name} could not be downloaded"
        if done.returncode != 0:
            raise cache.CannotMake(f"{name} could not be made")
        made.append(done.stdout.strip())
    return made, None


def names(whole):
    form = "whole" if whole else "short"
    return [f"fabtests {form} {suite} {provider}" for suite, provider in PROVIDERS.items()]


def run(name, world, made):
    """Runs a line of `names`. Returns (reason of the failure or None, output, seconds)."""
    start = time.monotonic()
    programs, library = made
    _, form, suite, provider = name.split()
    argv = [sys.executable, "-B", os.path.join(TOP, "tests/conformance/check-fabtests"), "--here", "--node", "veth",
            "--suite", suite, "--prov", provider, "--fabtests", programs,
            "--env", f"LD_LIBRARY_PATH={library}/lib:{world.env['LD_LIBRARY_PATH']}"]
    if form == "short":
        argv += ["--only", SHORT[suite]]
    why, output = process.run_one(spaces.command(argv, veth=True), world.env, LIMIT)
    failed = re.findall(r"^(?:fail|late|notrun) +(.*?) \([\d.]+ s\)$", output, re.MULTILINE)
    total = re.search(r"^(\d+) passed, 0 failed, \d+ skipped$", output, re.MULTILINE)
    # each list has more than 20 tests, also in its short form
    if not why and (not total or int(total[1]) < 20):
        why = "not all tests ran"
    return why and "; ".join(failed) or why, output, time.monotonic() - start
