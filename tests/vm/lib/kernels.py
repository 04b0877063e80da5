"""Further kernels for the guests, beside that of the sid root. Data only: the cache of each is keyed
by this file's bytes."""

# name -> (suite of the rest, suite of the kernel)
KERNELS = {
    "trixie-backports": ("trixie", "trixie-backports"),
    "bookworm-backports": ("bookworm", "bookworm-backports"),
}

PACKAGE = "linux-image-amd64"

# Those that cases load, in addition to those of the initramfs. The sid root has all of its kernel.
MODULES = ["sch_netem", "sch_prio", "cls_u32", "nfit", "nd_pmem", "dax_pmem", "device_dax"]
