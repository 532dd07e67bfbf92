"""The tiering worker process: its session, its leases, and the work on each partition."""
