"""Moves sealed ledgers to the object store: upload, commit of the manifest, deletion of the hot copy."""
