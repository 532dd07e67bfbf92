"""What a partition's owner must know at an offset: leader epochs, idempotent producers, transactions. Pure: no I/O."""
