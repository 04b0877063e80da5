"""Runs programs of rdma-core and perftest on the drop-in and judges what they say."""
