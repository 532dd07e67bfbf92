"""Maintains what is already cold: retention, merging, garbage collection, deleted topics, forked history."""
