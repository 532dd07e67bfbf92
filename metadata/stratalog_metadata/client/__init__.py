"""Clients of the metadata quorum: proposals, linearizable reads, sessions and a view that follows the log."""
