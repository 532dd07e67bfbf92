"""Finds superseded records in cold history: the part of ``stratalog job compact`` that runs on Spark.

Spark reads keys and offsets of committed records through the data source, and compares whole keys, not their hashes. The result
is a bit for each offset of the partitions. The segments are replaced by ``stratalog_tiering.maintenance.superseded``, in the
command. Blocks that are damaged, and batches that cannot be read, supersede nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pyspark.sql import SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812 - Spark's convention

from stratalog_pipeline.jobs.session import OnProgress, translated_errors, watched
from stratalog_pipeline.planning import PartitionName
from stratalog_tiering.core.superseded import CHUNK_BITS, CHUNK_OFFSETS, OffsetSet

_COLUMNS = "topic string, partition int, offset bigint, key binary"


def find_superseded(
    spark: SparkSession,
    options: Mapping[str, str],
    ends: Mapping[PartitionName, int],
    on_progress: OnProgress = lambda done, total: None,
) -> dict[PartitionName, OffsetSet]:
    """Return the offsets of the superseded records below the end of each partition in ``ends``.

    ``options`` are the data source's, and select at least these topics. Raises its errors.
    """
    found = {name: OffsetSet() for name in ends}
    names = {(name.topic, name.partition): name for name in ends}
    if not names:
        return found
    with translated_errors(), watched(spark, on_progress):
        for row in _chunks(spark, options, ends):
            found[names[row.topic, row.partition]].add(row.chunk, row.places)
    return found


def _chunks(spark: SparkSession, options: Mapping[str, str], ends: Mapping[PartitionName, int]) -> Iterable[Any]:
    reader = spark.read.format("stratalog").options(**options).option("isolationLevel", "read_committed")
    records = reader.option("onCorruptBatch", "skip").schema(_COLUMNS).load()
    rows = [(name.topic, name.partition, end) for name, end in ends.items()]
    limits = spark.createDataFrame(rows, "topic string, partition int, end bigint")
    of_key = Window.partitionBy("topic", "partition", "key")
    superseded = (
        records.join(F.broadcast(limits), ["topic", "partition"])
        .where("key is not null and offset < end")
        .withColumn("newest", F.max("offset").over(of_key))
        .where("offset < newest")
    )
    chunk = F.shiftright("offset", CHUNK_BITS).alias("chunk")
    place = F.col("offset").bitwiseAND(F.lit(CHUNK_OFFSETS - 1)).cast("int")
    chunks = superseded.groupBy("topic", "partition", chunk).agg(F.collect_list(place).alias("places"))
    return chunks.toLocalIterator()
