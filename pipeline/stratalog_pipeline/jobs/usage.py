"""Usage: the space that history takes, by topic, partition, day, codec and producer, and the keys with the most records.

``blocks`` reads only the indexes of segments, ``batches`` the headers of all batches, ``records`` decodes everything. All three
are queries of the data source, so they take its options and run wherever Spark does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from typing import Any, Final, Literal, TypeAlias, get_args

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's convention

from stratalog_core.moments import utc_text
from stratalog_pipeline.jobs.batch_statistics import DAY_MS
from stratalog_pipeline.jobs.session import translated_errors

Depth: TypeAlias = Literal["blocks", "batches", "records"]
DEPTHS: Final[tuple[Depth, ...]] = get_args(Depth)
"""The depths in order: each reads more."""
HEAVIEST: Final = 20
"""Default number of producers and of keys to list."""
_EPOCH: Final = date(1970, 1, 1)

Row: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """The report. Lists of rows; ``producers`` and ``codecs`` are empty at depth ``blocks``, ``keys`` below ``records``.

    ``keys`` are the heaviest, with ``key`` as text where it is UTF-8 and in hex otherwise, None for records without one.
    ``key_counts``: for each topic the number of different keys and the share of the heaviest.
    """

    depth: Depth
    partitions: list[Row] = field(default_factory=list)
    days: list[Row] = field(default_factory=list)
    codecs: list[Row] = field(default_factory=list)
    producers: list[Row] = field(default_factory=list)
    keys: list[Row] = field(default_factory=list)
    key_counts: list[Row] = field(default_factory=list)


def usage(spark: SparkSession, options: Mapping[str, str], depth: Depth = "blocks", heaviest: int = HEAVIEST) -> Usage:
    """Compute the report; ``options`` are the data source's. Raises its errors."""
    reader = spark.read.format("stratalog").options(**options)
    with translated_errors():
        blocks = reader.option("table", "blocks").load()
        partitions = _partitions(blocks)
        if depth == "blocks":
            days = _by_day(blocks, "max_timestamp", F.sum("stored_bytes"))
            return Usage(depth=depth, partitions=partitions, days=days)
        batches = reader.option("table", "batches").load().where("not is_control").cache()
        try:
            found = Usage(
                depth=depth,
                partitions=partitions,
                days=_by_day(batches, "max_timestamp", F.sum("size_bytes")),
                codecs=_grouped(batches, ["topic", "compression"], F.sum("size_bytes"), None),
                producers=_grouped(batches, ["topic", "producer_id"], F.sum("size_bytes"), heaviest),
            )
        finally:
            batches.unpersist()
        if depth == "records":
            records = spark.read.format("stratalog").options(**options).schema("topic string, key binary, value binary").load()
            _add_keys(found, records, heaviest)
        return found


def _partitions(blocks: DataFrame) -> list[Row]:
    # Null if the minimum of any block is: headers of batches do not tell it.
    earliest = F.when(F.bool_and(F.col("min_timestamp").isNotNull()), F.min("min_timestamp"))
    grouped = blocks.groupBy("topic", "partition").agg(
        F.min("base_offset").alias("start_offset"),
        F.max("end_offset").alias("end_offset"),
        F.sum("record_count").alias("records"),
        F.sum("batch_count").alias("batches"),
        F.sum("stored_bytes").alias("stored_bytes"),
        F.sum("plain_bytes").alias("batch_bytes"),
        F.countDistinct("key").alias("segments"),
        F.unix_millis(earliest).alias("min_timestamp"),
        F.unix_millis(F.max("max_timestamp")).alias("max_timestamp"),
    )
    rows = _rows(grouped.orderBy("topic", "partition"))
    return [row | {name: _moment(row[name]) for name in ("min_timestamp", "max_timestamp")} for row in rows]


def _moment(time_ms: int | None) -> str | None:
    """Return ISO 8601 in UTC, in whatever time zone the session is; None without a time, which Kafka stores as -1.

    Producers may send times that ISO 8601 cannot express.
    """
    if time_ms is None or time_ms < 0:
        return None
    try:
        return utc_text(time_ms, "milliseconds")
    except OverflowError:
        return f"{time_ms} ms"


def _by_day(frame: DataFrame, time: str, size: Column) -> list[Row]:
    """Count each batch, or block, on the UTC day of its newest record, in any time zone of the session; null without one."""
    time_ms = F.unix_millis(time)
    number = F.floor(time_ms / DAY_MS).cast("int")
    day = F.when(time_ms >= 0, F.date_add(F.lit(_EPOCH), number).cast("string"))
    grouped = frame.groupBy("topic", day.alias("day")).agg(F.sum("record_count").alias("records"), size.alias("bytes"))
    return _rows(grouped.orderBy("topic", "day"))


def _grouped(frame: DataFrame, by: list[str], size: Column, limit: int | None) -> list[Row]:
    grouped = frame.groupBy(*by).agg(
        F.sum("record_count").alias("records"), F.count(F.lit(1)).alias("batches"), size.alias("bytes")
    )
    ordered = grouped.orderBy(F.desc("bytes"), *by)
    return _rows(ordered if limit is None else ordered.limit(limit))


def _add_keys(found: Usage, records: DataFrame, heaviest: int) -> None:
    size = F.coalesce(F.length("key"), F.lit(0)) + F.coalesce(F.length("value"), F.lit(0))
    by_key = records.groupBy("topic", "key").agg(F.count(F.lit(1)).alias("records"), F.sum(size).alias("bytes")).cache()
    try:
        total = F.sum("records")
        counts = by_key.groupBy("topic").agg(
            F.count("key").alias("keys"),
            total.alias("records"),
            (F.max(F.when(F.col("key").isNotNull(), F.col("records"))) / total).alias("heaviest_share"),
        )
        found.key_counts.extend(_rows(counts.orderBy("topic")))
        top = _rows(by_key.orderBy(F.desc("records"), F.desc("bytes"), "topic", "key").limit(heaviest))
    finally:
        by_key.unpersist()
    found.keys.extend({**row, "key": _text(row["key"])} for row in top)


def _text(key: bytearray | None) -> str | None:
    if key is None:
        return None
    try:
        return bytes(key).decode()
    except UnicodeDecodeError:
        return key.hex()


def _rows(frame: DataFrame) -> list[Row]:
    return [row.asDict() for row in frame.collect()]
