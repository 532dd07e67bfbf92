"""Backfill: writes a data frame, files, or a topic of another Kafka cluster as a new topic, directly to the bucket.

The bulk sink writes the segments. It needs all rows of a partition in one task, so rows are sorted by partition, then by time;
a copied topic keeps its partitions and its order. The topic appears as a whole at the end.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import pyarrow as pa
from pyspark.sql import Column, DataFrame, Observation, SparkSession
from pyspark.sql import functions as sql
from pyspark.sql.types import IntegerType, NumericType

from stratalog_core.errors import Invalid
from stratalog_pipeline.arrow.encode import partitions_of
from stratalog_pipeline.jobs.backfill_sources import KafkaRange, avro_rows, kafka_rows
from stratalog_pipeline.jobs.session import OnProgress, translated_errors, watched

FORMATS: Final = ("parquet", "orc", "json", "csv", "avro")
_COLUMNS: Final = {
    "key": "",
    "value": "",
    "headers": "array<struct<key:string,value:binary>>",
    "timestamp": "timestamp",
    "partition": "int",
}
"""Columns of a record, and the types that they are cast to. Keys and values may be bytes or text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkTarget:
    """The topic to make: in the bucket ``store``, known to the cluster of the ``metadata`` nodes (HOST:PORT,…)."""

    topic: str
    partitions: int
    store: str = field(repr=False)
    metadata: str
    compression: str = "zstd"
    configs: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackfillResult:
    """The number of records of the new topic, and the time that it took."""

    topic: str
    partitions: int
    records: int
    seconds: float


def backfill(frame: DataFrame, target: BulkTarget) -> None:
    """Write the rows of ``frame`` as a new topic, directly to its bucket. Raises what a Spark write raises.

    Columns are those of Spark's Kafka sink, and ``timestamp``. Rows go to the partitions in column ``partition``; without it
    where Java's client would send their keys, rows without a key by their values. Within a partition they are in the order of
    ``timestamp``, if there is that column.
    """
    placed = frame if "partition" in frame.columns else frame.withColumn("partition", _partition(frame, target.partitions))
    # A task has one partition, so only the time is left to sort by: one column is sorted by its bits, without comparing rows.
    apart = placed.repartitionById(target.partitions, sql.col("partition"))
    _write(apart.sortWithinPartitions("timestamp") if "timestamp" in placed.columns else apart, target)


def _write(arranged: DataFrame, target: BulkTarget, first_offsets: Sequence[int] = ()) -> None:
    writer = arranged.write.format("stratalog").mode("append").option("store", target.store).option("topic", target.topic)
    writer = writer.option("metadata", target.metadata).option("partitions", target.partitions)
    writer = writer.option("compression", target.compression)
    for name, value in target.configs.items():
        writer = writer.option(f"config.{name}", value)
    if first_offsets:
        writer = writer.option("firstOffsets", str(list(first_offsets)))
    writer.save()


def backfill_files(
    spark: SparkSession,
    paths: Sequence[str],
    file_format: str,
    expressions: Mapping[str, str],
    target: BulkTarget,
    on_progress: OnProgress = lambda done, total: None,
    *,
    avro_schema: str | None = None,
) -> BackfillResult:
    """Write the rows of files as a new topic. ``avro_schema`` is the JSON of the schema to read Avro files by.

    ``expressions`` are SQL for the columns of a record, over those of the files; without one, a column of that name is taken,
    and as ``value`` the whole row as JSON. Raises ``Invalid`` for a bad expression or a topic that is there, and the errors of
    store and metadata.
    """
    began, counted = time.monotonic(), Observation()
    with translated_errors(), watched(spark, on_progress):
        rows = _file_rows(spark, paths, file_format, avro_schema)
        chosen = [_expression(rows, name, expressions.get(name)) for name in _COLUMNS]
        records = rows.select(*(column for column in chosen if column is not None))
        backfill(records.observe(counted, sql.count(sql.lit(1)).alias("records")), target)
        count = int(counted.get["records"])
    return BackfillResult(topic=target.topic, partitions=target.partitions, records=count, seconds=time.monotonic() - began)


def _file_rows(spark: SparkSession, paths: Sequence[str], file_format: str, avro_schema: str | None) -> DataFrame:
    if file_format == "avro":
        return avro_rows(spark, paths, avro_schema)
    reader = spark.read.option("header", "true") if file_format == "csv" else spark.read
    return reader.format(file_format).load(list(paths))


def backfill_kafka(
    spark: SparkSession,
    found: KafkaRange,
    target: BulkTarget,
    on_progress: OnProgress = lambda done, total: None,
    *,
    keeps_offsets: bool = False,
) -> BackfillResult:
    """Write the records that ``found`` names as a new topic: keys, values, headers, timestamps, partitions and order are kept.

    Offsets begin at 0, or are those of the source. Raises ``Invalid`` for other partitions than the source's, for a topic that
    is there, and at a gap in offsets that are to be kept; ``NotFound`` if records have been deleted; and the errors of
    brokers, store and metadata.
    """
    began, counted = time.monotonic(), Observation()
    if target.partitions != len(found.splits):
        raise Invalid(f"the source has {len(found.splits)} partitions, so the new topic has as many, not {target.partitions}")
    firsts = [split.offsets.first for split in found.splits] if keeps_offsets else ()
    with translated_errors(), watched(spark, on_progress):
        rows = kafka_rows(spark, found, keeps_offsets=keeps_offsets)
        _write(rows.observe(counted, sql.count(sql.lit(1)).alias("records")), target, firsts)
        count = int(counted.get["records"])
    return BackfillResult(topic=target.topic, partitions=target.partitions, records=count, seconds=time.monotonic() - began)


def _expression(rows: DataFrame, name: str, expression: str | None) -> Column | None:
    """The column ``name`` of the records; None if there is none. Raises ``Invalid`` for a timestamp that is a number."""
    if expression is not None:
        column = sql.expr(expression)
    elif name in rows.columns:
        column = sql.col(name)
    elif name == "value":
        column = sql.to_json(sql.struct("*"))
    else:
        return None
    found = rows.select(column).schema[0].dataType
    if name == "timestamp" and isinstance(found, NumericType):
        raise Invalid(
            f"the timestamp is {found.simpleString()}, which Spark takes for seconds: name its unit, such as"
            f" timestamp_millis({expression or name})"
        )
    if _COLUMNS[name]:
        return column.cast(_COLUMNS[name]).alias(name)
    kind = found.simpleString()
    if kind not in ("binary", "string"):
        # Numbers become their digits: casting one to bytes gives what only Spark reads.
        column = sql.to_json(column) if "<" in kind else column.cast("string")
    return column.alias(name)


def _partition(frame: DataFrame, count: int) -> Column:
    if count < 1:
        raise Invalid(f"a topic has at least one partition, not {count}")
    by_value = sql.pmod(sql.xxhash64(sql.col("value")), sql.lit(count)).cast("int")
    if "key" not in frame.columns:
        return by_value

    def place(keys: pa.Array) -> pa.Array:
        return partitions_of(keys, count)

    by_key = sql.arrow_udf(place, IntegerType())(sql.col("key"))  # type: ignore[attr-defined]
    return sql.coalesce(by_key, by_value)
