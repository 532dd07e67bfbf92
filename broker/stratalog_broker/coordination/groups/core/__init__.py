"""The groups of one coordinator partition: rules, live groups, stored state. A core: no I/O, no clock, no randomness."""
