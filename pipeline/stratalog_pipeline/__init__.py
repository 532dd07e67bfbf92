"""Spark data source and jobs that read a bucket's cold history without brokers.

``views`` registers a SQL view for each topic of a bucket (``spark/views.py``).
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    # Executors import this package without pyspark.
    if name == "views":
        from stratalog_pipeline.spark.views import register_views

        return register_views
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
