"""Registers the ``stratalog`` format with Spark: it looks into modules named ``pyspark_…`` for a ``DefaultSource``."""

from stratalog_pipeline.source import StratalogDataSource


class DefaultSource(StratalogDataSource):
    """``spark.read.format("stratalog")``."""


__all__ = ["DefaultSource"]
