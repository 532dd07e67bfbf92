"""The storage of one disk: its log, group commit, reads, checkpoints, recovery and compaction."""
