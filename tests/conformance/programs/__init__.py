"""Programs of other projects, and the shared object as it is installed."""
