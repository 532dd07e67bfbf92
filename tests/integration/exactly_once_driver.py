"""A Spark driver that copies a topic by a stream and a replay, writes rows to brokers and to the bucket, and exports the topic.

It is killed, and started again until it has ended. ``python -m integration.exactly_once_driver SPEC``: a JSON object with the
fields of `Spec`. Prints each job when it begins, and ``done`` at the end. A job that an earlier driver has done is done again:
that must change nothing.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import msgspec
import pyarrow as pa
from confluent_kafka.admin import AdminClient
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sql

from stratalog_pipeline.jobs.backfill import BulkTarget, backfill
from stratalog_pipeline.jobs.export import export
from stratalog_pipeline.jobs.replay import ReplayTarget, replay
from stratalog_pipeline.options import parse_options

DONE: Final = "done"
TASKS: Final = 6
BULK_PARTITIONS: Final = 4
FIRST_MS: Final = 1_700_000_000_000
PACED_ROWS: Final = 20
EXPORT_SPLIT_BYTES: Final = 1500


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """The ``jobs`` to do, in order, and the names of what they make.

    ``targets``: by job a topic, for the export a directory. ``work`` holds the checkpoints. Streams and replays take
    ``batch_offsets`` at a time. ``rows`` are written by the sinks, ``rows_per_s`` by a task.
    """

    bootstrap: str
    store: str
    metadata: str
    source: str
    jobs: tuple[str, ...]
    targets: dict[str, str]
    work: str
    batch_offsets: int
    rows: int
    rows_per_s: float

    @property
    def servers(self) -> dict[str, str]:
        return {"kafka.bootstrap.servers": self.bootstrap}


def stream(session: SparkSession, spec: Spec) -> None:
    source = session.readStream.format("stratalog").options(**spec.servers, subscribe=spec.source, startingOffsets="earliest")
    rows = source.options(maxOffsetsPerTrigger=spec.batch_offsets, minPartitions=2).load(spec.store)
    sink = rows.select("key", "value", "partition").writeStream.format("stratalog").options(**spec.servers)
    sink.options(topic=spec.targets["stream"], rowsPerSecond=spec.rows_per_s, checkpointLocation=f"{spec.work}/stream")
    sink.trigger(availableNow=True).start().awaitTermination()


def replayed(session: SparkSession, spec: Spec) -> None:
    target = ReplayTarget(
        bootstrap=spec.bootstrap, topic=spec.targets["replay"], keeps_partitions=True, rows_per_s=2 * spec.rows_per_s
    )
    source = {**spec.servers, "store": spec.store, "subscribe": spec.source}
    replay(session, source, target, checkpoint=f"{spec.work}/replay", window_offsets=spec.batch_offsets)


def batch(session: SparkSession, spec: Spec) -> None:
    topic = spec.targets["batch"]
    writer = rows_of(session, spec).select("value").write.format("stratalog").options(**spec.servers, topic=topic)
    writer.options(writeId=topic, rowsPerSecond=spec.rows_per_s).mode("append").save()


def bulk(session: SparkSession, spec: Spec) -> None:
    topic = spec.targets["bulk"]
    # The driver may have died between the commit and its answer: the topic is there then, as a whole.
    if topic in AdminClient({"bootstrap.servers": spec.bootstrap}).list_topics(timeout=120).topics:
        return
    target = BulkTarget(topic=topic, partitions=BULK_PARTITIONS, store=spec.store, metadata=spec.metadata)
    rate = spec.rows_per_s

    def paced(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for rows in batches:
            for first in range(0, rows.num_rows, PACED_ROWS):
                time.sleep(PACED_ROWS / rate)
                yield rows.slice(first, PACED_ROWS)

    rows = rows_of(session, spec)
    backfill(rows.mapInArrow(paced, rows.schema), target)


def exported(session: SparkSession, spec: Spec) -> None:
    options = parse_options({"path": spec.store, "subscribe": spec.source, "splitBytes": str(EXPORT_SPLIT_BYTES)})
    export(session, options, spec.targets["export"])


def rows_of(session: SparkSession, spec: Spec) -> DataFrame:
    """The rows that the sinks write: the same in the same tasks, whenever they are asked for."""
    number = sql.col("id")
    return session.range(spec.rows, numPartitions=TASKS).select(
        sql.concat(sql.lit("row-"), number).alias("value"),
        sql.timestamp_millis(sql.lit(FIRST_MS) + number).alias("timestamp"),
        (number % BULK_PARTITIONS).cast("int").alias("partition"),
    )


JOBS: Final[Mapping[str, Callable[[SparkSession, Spec], None]]] = {
    "stream": stream,
    "replay": replayed,
    "batch": batch,
    "bulk": bulk,
    "export": exported,
}


def main(spec: Spec) -> None:
    """Do the jobs, or go on with them."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    # A task that fails is run again, up to four times in all.
    builder = SparkSession.builder.master("local[2,4]").config("spark.ui.enabled", "false")
    session = builder.config("spark.driver.bindAddress", "127.0.0.1").config("spark.driver.host", "127.0.0.1").getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    for job in spec.jobs:
        print(job, flush=True)
        JOBS[job](session, spec)
    print(DONE, flush=True)


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=Spec))
