"""Builds the drop-in libibverbs and librdmacm for a release of rdma-core, and the programs of
tests/verbs/c that are linked to them."""

import glob
import os
import subprocess

from . import cache

TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__)))))
CRATE = os.path.join(TOP, "crates", "softverbs-dropin")
SOURCES = os.path.join(TOP, "tests", "verbs", "c")
# Programs on librdmacm.
CM_PROGRAMS = ("cm_calls", "cm_death", "cm_hostile", "cm_limits")
NO_ARCHIVE = "librdmacm's static library is missing (Debian: librdmacm-dev)"
OUTPUT = os.path.join(TOP, "build", "lib", "softverbs")


def find(root, name):
    """A library of the release in `root`, or None."""
    return next(iter(sorted(glob.glob(os.path.join(root, f"usr/lib/*-linux-gnu/{name}")))), None)


def build(dropin=OUTPUT, release=False, root="/", output=None):
    """Builds both libraries and the programs into the directory `dropin`.

    `output`: where the commands print what they made, as in subprocess.

    Returns why there is no librdmacm, or "". Without it the programs are not built either.
    """
    def like(name):
        if root == "/":
            return []
        if not find(root, name):
            raise cache.CannotMake(f"{root} has no {name}")
        return [f"--like={find(root, name)}"]

    ibverbs, rdmacm = f"{dropin}/libibverbs.so.1", f"{dropin}/librdmacm.so.1"
    optimised = ["--release"] if release else []
    subprocess.run([f"{CRATE}/build-dropin", *like("libibverbs.so.1"), *optimised, ibverbs], stdout=output, check=True)
    archive = find(root, "librdmacm.a")
    if not archive or not os.path.exists("/usr/include/rdma/rdma_cma.h"):
        # Those of an earlier build may not match the new libibverbs.
        for name in ("librdmacm.so.1", *CM_PROGRAMS):
            if os.path.exists(f"{dropin}/{name}"):
                os.remove(f"{dropin}/{name}")
        return NO_ARCHIVE
    subprocess.run([f"{CRATE}/build-rdmacm", f"--objects={archive}", *like("librdmacm.so.1"), rdmacm],
                   stdout=output, check=True)
    for name in CM_PROGRAMS:
        # The programs have no name of a later version than the oldest release's.
        subprocess.run(["cc", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-O1", "-g", "-pthread",
                        "-o", f"{dropin}/{name}", f"{SOURCES}/{name}.c", rdmacm, ibverbs], check=True)
    return ""
