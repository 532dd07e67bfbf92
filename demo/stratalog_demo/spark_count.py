"""Spark queries over the bucket: flights and mean departure delay per carrier, with no broker running."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stratalog_demo.flights import CarrierDelay

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def delays_by_carrier(session: SparkSession, store: str, topic: str) -> list[CarrierDelay]:
    """Read the topic's cold history from ``store`` and aggregate it by carrier."""
    from pyspark.sql import functions as f

    records = session.read.format("stratalog").option("store", store).option("subscribe", topic).load()
    flight = f.from_json(records.value.cast("string"), "carrier string, dep_delay double")
    rows = (
        records.select(flight.alias("flight"))
        .groupBy("flight.carrier")
        .agg(f.count("*").alias("flights"), f.avg("flight.dep_delay").alias("mean_delay"))
        .orderBy("carrier")
        .collect()
    )
    return [CarrierDelay(row["carrier"], row["flights"], row["mean_delay"]) for row in rows]


def count_records(session: SparkSession, store: str, topic: str) -> int:
    """Count the records of the topic's cold history; every byte is read and every checksum checked."""
    return session.read.format("stratalog").option("store", store).option("subscribe", topic).load().count()
