"""State of a partition at an offset: leader epochs, idempotent producers, transactions. Pure: no I/O."""
