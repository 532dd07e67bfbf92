"""A Spark driver that copies a topic by a stream, then by a replay. It is killed, and started again until it has ended.

``python -m integration.exactly_once_driver SPEC``: a JSON object with the fields of `Spec`. Prints the phase that begins.
"""

from __future__ import annotations

import os
import sys

import msgspec
from pyspark.sql import SparkSession

from stratalog_pipeline.jobs.replay import ReplayTarget, replay

PHASES = ("stream", "replay", "done")


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """Names the source and both copies, made ``batch_offsets`` at a time. ``work`` holds both checkpoints."""

    bootstrap: str
    store: str
    source: str
    by_stream: str
    by_replay: str
    work: str
    batch_offsets: int
    rows_per_s: float


def main(spec: Spec) -> None:
    """Go on with both copies."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    # A task that fails is run again, up to four times in all.
    builder = SparkSession.builder.master("local[2,4]").config("spark.ui.enabled", "false")
    session = builder.config("spark.driver.bindAddress", "127.0.0.1").config("spark.driver.host", "127.0.0.1").getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    servers = {"kafka.bootstrap.servers": spec.bootstrap}
    print("stream", flush=True)
    source = session.readStream.format("stratalog").options(**servers, subscribe=spec.source, startingOffsets="earliest")
    rows = source.options(maxOffsetsPerTrigger=spec.batch_offsets, minPartitions=2).load(spec.store)
    sink = rows.select("key", "value", "partition").writeStream.format("stratalog").options(**servers, topic=spec.by_stream)
    sink.options(rowsPerSecond=spec.rows_per_s, checkpointLocation=f"{spec.work}/stream")
    query = sink.trigger(availableNow=True).start()
    query.awaitTermination()
    print("replay", flush=True)
    target = ReplayTarget(bootstrap=spec.bootstrap, topic=spec.by_replay, keeps_partitions=True, rows_per_s=2 * spec.rows_per_s)
    from_source = {**servers, "store": spec.store, "subscribe": spec.source}
    replay(session, from_source, target, checkpoint=f"{spec.work}/replay", window_offsets=spec.batch_offsets)
    print("done", flush=True)


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=Spec))
