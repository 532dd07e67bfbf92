"""The rules and stored formats of one disk. A core: no I/O, no clock, no randomness."""
