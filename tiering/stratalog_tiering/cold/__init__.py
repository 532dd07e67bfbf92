"""Reads history from the object store: manifests, segments, blocks, their verification, and whole buckets without metadata."""
