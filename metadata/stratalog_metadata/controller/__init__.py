"""The controller, which runs on the quorum's leader: live owners for all partitions, balance, leases. No I/O."""
