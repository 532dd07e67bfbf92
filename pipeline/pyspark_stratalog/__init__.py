"""Registers the ``stratalog`` format: Spark looks for a ``DefaultSource`` in modules whose names begin with ``pyspark_``."""

from stratalog_pipeline.spark.source import StratalogDataSource


class DefaultSource(StratalogDataSource):
    """``spark.read.format("stratalog")``."""


__all__ = ["DefaultSource"]
