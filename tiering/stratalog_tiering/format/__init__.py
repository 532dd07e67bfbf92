"""Stored formats of the object store: segments, manifests, descriptors and object keys. Bytes in, bytes out; no I/O."""
