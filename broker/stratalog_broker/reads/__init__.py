"""Reads of partitions from the tail cache, the bookies and the object store, and searches by time."""
