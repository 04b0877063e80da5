"""What the guests are made of. Data only: the cache is keyed by this file's bytes,
so any change here makes new guests, and changes elsewhere do not."""

# Debian's archive; the roots are made from it and from nothing else.
MIRROR = "http://deb.debian.org/debian"

# name -> (suite, packages). `sid` also supplies the kernel of both guests: kernel 6.16 or newer has
# ODP, advise and flush in rdma_rxe, rdma-core 61 or newer uses them.
# `old` is Debian 12's user space with rdma-core 44, whose rxe library has neither advise nor flush.
ROOTS = {
    "sid": (
        "sid",
        [
            "rdma-core", "ibverbs-providers", "ibverbs-utils", "librdmacm1", "rdmacm-utils",
            "libfabric1", "libfabric-bin", "perftest", "python3-pyverbs",
            "iproute2", "kmod", "procps", "strace", "linux-image-amd64",
        ],
    ),
    "old": (
        "bookworm",
        [
            "rdma-core", "ibverbs-providers", "ibverbs-utils", "librdmacm1", "rdmacm-utils",
            "libfabric1", "libfabric-bin", "iproute2", "kmod", "procps",
        ],
    ),
}
KERNEL_FROM = "sid"

# The mirror at times serves an expired Release file of sid.
APT_OPTIONS = ['Acquire::Check-Valid-Until "false"', "Acquire::Retries 3"]

# Inserted by the initramfs, each after what it depends on.
MODULES = [
    "virtio_pci", "virtio_blk", "ext4", "overlay", "virtio_console", "virtio_net", "virtio_rng",
    "9pnet_virtio", "9p", "veth", "ib_uverbs", "rdma_rxe", "rdma_ucm", "ib_umad",
]

# Read-only image of each root; bytes that are free in it do not matter, an overlay on tmpfs takes writes.
IMAGE = "{name}.ext2"
