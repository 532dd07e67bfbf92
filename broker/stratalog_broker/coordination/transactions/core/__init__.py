"""The state of transactions, their transitions, and the markers to write. Does no I/O."""
