"""Runs programs of rdma-core and perftest on the drop-in and judges their output."""
