"""The data source ``stratalog`` as Spark's Python API wants it."""
