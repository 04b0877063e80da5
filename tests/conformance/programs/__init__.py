"""Whole programs that other people wrote, and the shared object as it is installed."""
