"""Decodes record batches into Arrow columns with compiled kernels. Imports no Spark and does no I/O."""
