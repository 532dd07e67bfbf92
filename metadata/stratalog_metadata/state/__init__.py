"""The replicated state machine: commands, records in memory, snapshots and digests. No I/O."""
