"""Further kernels for the guests, beside that of the sid root. Data only: the cache of each is keyed
by this file's bytes."""

# name -> (suite of the rest, suite of the kernel)
KERNELS = {
    "trixie-backports": ("trixie", "trixie-backports"),
    "bookworm-backports": ("bookworm", "bookworm-backports"),
}

PACKAGE = "linux-image-amd64"
