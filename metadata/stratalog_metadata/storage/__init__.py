"""A node's durable state: the Raft log, the vote, the applied records and the identity of the data directory."""
