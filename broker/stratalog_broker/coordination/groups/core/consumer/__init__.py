"""Groups of the consumer protocol (KIP-848), in which the coordinator computes the assignment. Does no I/O."""
