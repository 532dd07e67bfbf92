"""The messages between bookies and their clients. A core: no I/O."""
