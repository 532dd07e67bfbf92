"""Registers a temporary SQL view for each topic of a bucket."""

from __future__ import annotations

import re
from collections.abc import Mapping

from pyspark.sql import SparkSession

from stratalog_core.errors import Conflict
from stratalog_pipeline.bucket import Bucket
from stratalog_pipeline.options import parse_options
from stratalog_pipeline.scan_plan import wanted_partitions


def register_views(
    spark: SparkSession,
    store: str,
    *,
    pattern: str = ".*",
    prefix: str = "",
    options: Mapping[str, str] | None = None,
    values: Mapping[str, Mapping[str, str]] | None = None,
) -> dict[str, str]:
    """Register a view for each topic whose whole name matches ``pattern``; return the views' names by topic.

    A view is named as its topic, with ``_`` for what is no letter, digit or underscore, after ``prefix``. Internal topics have
    none. ``options`` are those of every read; ``values`` has more for some topics, such as their ``value_format``. Spark plans
    a view once, so it keeps showing what was offloaded when it was first queried: call this again for newer records and topics.
    Raises ``Conflict`` if two topics would share a name, but for its case, and what a read raises.
    """
    given = {"missingTail": "ignore", **(options or {}), "store": store}
    with Bucket(store, given.get("secondStore", "")) as bucket:
        wanted = wanted_partitions(bucket, parse_options({**given, "subscribePattern": pattern}))
    topics = sorted({each.topic for each in wanted if not each.topic.startswith("__")})
    names: dict[str, str] = {}
    for topic in topics:
        name = prefix + re.sub(r"\W", "_", topic, flags=re.ASCII)
        # Spark does not distinguish names by case.
        other = next((each for each, taken in names.items() if taken.lower() == name.lower()), None)
        if other is not None:
            raise Conflict(
                f"topics {other!r} and {topic!r} would both be view {name}: choose by pattern, with a prefix for one"
            )
        names[topic] = name
    for topic, name in names.items():
        reader = spark.read.format("stratalog").options(**given).options(**(values or {}).get(topic, {}))
        reader.option("subscribe", topic).load().createOrReplaceTempView(f"`{name}`")
    return names
