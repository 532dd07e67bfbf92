"""The data pipeline on Spark against controls in the same run: ``make bench-spark``.

One topic of four partitions, records of 1 KB that are all different, zstd batches of about 1 MB, a local directory, local[2],
Unix sockets between Python and the JVM. Prints one figure per line, ``name value``, for scripts; the best of several runs
counts, after one that starts workers and warms caches.

| name | ours | control |
| --- | --- | --- |
| ``spark_scan_ratio`` | every column to a noop sink | the same rows in zstd Parquet through Spark's own reader |
| ``spark_scan_limit_ratio`` | the same | blocks fetched and decompressed, then ready Arrow batches sent in their place |
| ``stream_catchup_ratio`` | ``CATCH_UP_COPIES`` times as many rows by a stream of what is there | a batch scan of these |
| ``stream_start_s`` | seconds that a stream takes longer than a batch scan of the first rows | |
| ``bulk_sink_ratio`` | rows to a new topic in the bucket | the same rows by the Kafka sink to one broker, one copy |
| ``spark_kafka_ratio`` | a new topic of the bulk sink, every column to a noop sink | Spark's Kafka connector on Apache Kafka |
| ``spark_kafka_own_ratio`` | the same | Spark's Kafka connector on our brokers, which have the rows in their caches |
| ``metadata_table_count_s`` | seconds to count 10 M records by the table ``segments`` | |
| ``audit_gb_per_core_s`` | GB of record batches audited per second by one process | |
"""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import cramjam
import pyarrow as pa
import pyspark
from confluent_kafka.admin import AdminClient, NewTopic
from pyarrow import parquet
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from benchmarks.kafka_control import KafkaCluster
from benchmarks.kernels import BATCH_BYTES, value
from benchmarks.systems import Stratalog
from stratalog_core.batches.batch import HEADER_BYTES, assign_offset, iterate_headers
from stratalog_core.batches.compression import ZSTD
from stratalog_core.batches.records import Record, build_batch
from stratalog_loadgen.java_tools import spark_connector
from stratalog_pipeline.arrow.schema import COLUMNS, SPARK_DDL
from stratalog_pipeline.bucket import Bucket
from stratalog_pipeline.jobs.audit import audit_segments, audit_tasks, plan_audit
from stratalog_pipeline.jobs.backfill import BulkTarget, backfill
from stratalog_pipeline.options import parse_options
from stratalog_pipeline.planning import Split
from stratalog_pipeline.scan import scan_split
from stratalog_pipeline.scan_plan import plan_scan
from stratalog_pipeline.segments import read_blocks, wanted_blocks

RECORD_BYTES = 1000
RECORDS_PER_BATCH = BATCH_BYTES // RECORD_BYTES
PARTITIONS = 4
BATCHES_PER_SEGMENT = 200
RUNS = 3
CATCH_UP_COPIES = 4
"""Spark starts a Python process for each stream, which takes a second. A stream that catches up has work for longer."""
CATCH_UP_RUNS = 2
VISIBLE_S = 120
COUNTED_RECORDS = 10_000_000
"""Records of the topic whose metadata are counted."""
SINK_CLUSTER = ("--metadata", "1", "--bookies", "1", "--brokers", "1", "--tiering", "1")
FIRST_MS = time.time_ns() // 1_000_000 - 86_400_000
"""Timestamp of the first record. Records older than ``retention.ms``, a week, would be deleted while they are read."""


def segments(batches: int, seed: int) -> Iterator[list[bytes]]:
    source = random.Random(seed)
    for first in range(0, batches, BATCHES_PER_SEGMENT):
        numbers = range(first, min(first + BATCHES_PER_SEGMENT, batches))
        yield [batch(number * RECORDS_PER_BATCH, source) for number in numbers]


def batch(first: int, source: random.Random) -> bytes:
    offsets = range(first, first + RECORDS_PER_BATCH)
    records = [
        Record(offset=offset, timestamp_ms=FIRST_MS + offset, key=b"k%010d" % offset, value=value(RECORD_BYTES, source))
        for offset in offsets
    ]
    return bytes(build_batch(records, compression=ZSTD))


def build_bucket(root: Path, records: int) -> str:
    """Make a bucket with a topic of ``records``, and one that has these ``CATCH_UP_COPIES`` times, each at its own offsets."""
    sys.path.insert(0, "tests")
    from unit.pipeline.conftest import ColdBucket

    bucket = ColdBucket(root)
    batches = records // RECORDS_PER_BATCH // PARTITIONS
    partitions = [list(segments(batches, seed)) for seed in range(PARTITIONS)]
    bucket.add_topic("bench", partitions, block_bytes=1024 * 1024)
    bucket.add_topic("catch-up", [repeated(each) for each in partitions], block_bytes=1024 * 1024)
    return bucket.url


def repeated(written: Sequence[Sequence[bytes]]) -> list[list[bytes]]:
    """Return the segments ``CATCH_UP_COPIES`` times, one copy of their batches after the other."""
    numbers = itertools.count()

    def copy(batch: bytes) -> bytes:
        moved = bytearray(batch)
        assign_offset(moved, next(numbers) * RECORDS_PER_BATCH, 0)
        return bytes(moved)

    return [[copy(each) for each in segment] for _ in range(CATCH_UP_COPIES) for segment in written]


def build_long_history(root: Path) -> str:
    """Make a bucket with a topic of ``COUNTED_RECORDS``, in segments of as many batches and records as the other topic's.

    Metadata tables read no payload, so the records are small and each batch is a copy of the first, at its own offsets.
    """
    sys.path.insert(0, "tests")
    from unit.pipeline.conftest import ColdBucket

    records = [
        Record(offset=offset, timestamp_ms=FIRST_MS + offset, key=None, value=b"value") for offset in range(RECORDS_PER_BATCH)
    ]
    first = build_batch(records, compression=ZSTD)
    batches = COUNTED_RECORDS // RECORDS_PER_BATCH // PARTITIONS

    def copies() -> Iterator[list[bytes]]:
        for begin in range(0, batches, BATCHES_PER_SEGMENT):
            segment = [bytearray(first) for _ in range(begin, min(begin + BATCHES_PER_SEGMENT, batches))]
            for number, copy in enumerate(segment, begin):
                assign_offset(copy, number * RECORDS_PER_BATCH, 0)
            yield [bytes(copy) for copy in segment]

    bucket = ColdBucket(root)
    bucket.add_topic("bench", [list(copies()) for _ in range(PARTITIONS)])
    return bucket.url


def write_parquet(url: str, directory: Path) -> None:
    """Write the same rows as Parquet, a file per split."""
    options = parse_options({"path": url, "subscribe": "bench"})
    with Bucket(url) as bucket:
        for number, split in enumerate(plan_scan(bucket, options).splits):
            rows = pa.Table.from_batches(scan_split(bucket, split, COLUMNS, read_committed=True))
            parquet.write_table(rows, directory / f"{number:04d}.parquet", compression="zstd")


class _Task(InputPartition):
    def __init__(self, split: Split, ready: bytes, rows: int) -> None:
        self.split, self.ready, self.rows = split, ready, rows


class ReadyBatches(DataSource):
    """The limit: fetches, checks and decompresses blocks as a scan does, then sends ready Arrow batches of as many rows."""

    @classmethod
    def name(cls) -> str:
        return "ready-batches"

    def schema(self) -> str:
        return ", ".join(f"{name} {SPARK_DDL[name]}" for name in COLUMNS)

    def reader(self, schema: StructType) -> DataSourceReader:
        return _ReadyReader(self.options["path"])


class _ReadyReader(DataSourceReader):
    def __init__(self, url: str) -> None:
        self._url = url

    def partitions(self) -> list[InputPartition]:
        options = parse_options({"path": self._url, "subscribe": "bench"})
        with Bucket(self._url) as bucket:
            splits = plan_scan(bucket, options).splits
            first = next(scan_split(bucket, splits[0], COLUMNS, read_committed=True))
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, first.schema) as writer:
            writer.write_batch(first)
        return [_Task(split, sink.getvalue().to_pybytes(), first.num_rows) for split in splits]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, _Task)
        (ready,) = pa.ipc.open_stream(partition.ready)
        rows = 0
        with Bucket(self._url) as bucket:
            for piece in partition.split.slices:
                footer = bucket.run(bucket.source.footer(piece.segment))
                blocks = wanted_blocks(footer, piece, partition.split.offsets)
                for _, content in read_blocks(bucket, piece.segment, footer, blocks):
                    for position, header in iterate_headers(content):
                        cramjam.zstd.decompress(content[position + HEADER_BYTES : position + header.size_bytes])
                        rows += header.record_count
                    while rows >= ready.num_rows:
                        rows -= ready.num_rows
                        yield ready
        if rows:
            yield ready.slice(0, rows)


def rows_per_second(run: Callable[[], None], records: int, runs: int = RUNS) -> float:
    """Return the best of several runs after one that does not count."""
    run()
    best = 0.0
    for _ in range(runs):
        start = time.perf_counter()
        run()
        best = max(best, records / (time.perf_counter() - start))
    return best


def scan(frame: Callable[[], DataFrame]) -> Callable[[], None]:
    return lambda: frame().write.format("noop").mode("overwrite").save()


def catch_up(session: SparkSession, url: str, topic: str) -> Callable[[], None]:
    def run() -> None:
        options = {"subscribe": topic, "startingOffsets": "earliest", "missingTail": "ignore"}
        frame = session.readStream.format("stratalog").options(**options).load(url)
        with tempfile.TemporaryDirectory() as checkpoint:
            writer = frame.writeStream.format("noop").option("checkpointLocation", checkpoint)
            writer.trigger(availableNow=True).start().awaitTermination()

    return run


def audit_gb_per_second(url: str) -> float:
    """Return GB of record batches that this process audits in a second."""
    options = parse_options({"path": url, "subscribe": "bench"})
    best = 0.0
    for _ in range(RUNS):
        with Bucket(url) as bucket:
            start = time.process_time()
            plans = plan_audit(bucket, options)
            results = [found for task in audit_tasks(plans, options.split_bytes) for found in audit_segments(bucket, task)]
            assert not any(found.problems for found in results)
            best = max(best, sum(found.statistics.batch_bytes for found in results) / 1e9 / (time.process_time() - start))
    return best


def count_seconds(session: SparkSession, url: str, records: int) -> float:
    def count() -> None:
        rows = session.read.format("stratalog").options(subscribe="bench", table="segments").load(url)
        assert rows.agg({"record_count": "sum"}).collect()[0][0] == records

    return 1 / rows_per_second(count, 1)


def sink_rates(session: SparkSession, frame: DataFrame, records: int) -> dict[str, float]:
    """Return the rows per second of the bulk sink and of the Kafka sink, each run to a new topic; and those of reading these.

    Topics are read from the bucket, and by Spark's Kafka connector from our brokers.
    """
    with tempfile.TemporaryDirectory() as directory:
        cluster = Stratalog(Path(directory) / "cluster")
        cluster.run("cluster", "start", *SINK_CLUSTER)
        try:
            state = json.loads((Path(directory) / "cluster" / "cluster.json").read_text())
            numbers = itertools.count()

            def bulk() -> None:
                target = BulkTarget(
                    topic=f"bulk-{next(numbers)}", partitions=PARTITIONS, store=state["store"], metadata=state["metadata"]
                )
                backfill(frame, target)

            def kafka() -> None:
                topic = f"kafka-{next(numbers)}"
                cluster.run("topic", "create", topic, "--partitions", str(PARTITIONS), "--replication-factor", "1")
                options = {"kafka.bootstrap.servers": state["bootstrap"], "topic": topic}
                frame.write.format("stratalog").mode("append").options(**options).save()

            rates = {"bulk_sink": rows_per_second(bulk, records)}
            last = f"bulk-{next(numbers) - 1}"
            wait_for_topic(state["store"], last)
            bucket = session.read.format("stratalog").options(subscribe=last, missingTail="ignore")
            rates["bulk_scan"] = scan_rate(lambda: bucket.load(state["store"]), records)
            rates["kafka_sink"] = rows_per_second(kafka, records)
            rates["connector_own"] = connector_rate(session, state["bootstrap"], f"kafka-{next(numbers) - 1}", records)
            return rates
        finally:
            cluster.run("cluster", "stop")


def wait_for_topic(store: str, topic: str) -> None:
    """Wait until a reader of the bucket finds a new topic: a tiering worker removes the marker that hid it."""
    deadline = time.monotonic() + VISIBLE_S
    with Bucket(store) as bucket:
        while topic not in {each.name for each in bucket.topics()}:
            assert time.monotonic() < deadline, f"topic {topic} is not in the bucket after {VISIBLE_S} s"
            time.sleep(0.1)


def connector_rate(session: SparkSession, bootstrap: str, topic: str, records: int) -> float:
    """Return the rows per second of Spark's Kafka connector, every column to a noop sink."""
    reader = session.read.format("kafka").options(subscribe=topic, **{"kafka.bootstrap.servers": bootstrap})
    return scan_rate(reader.load, records)


def scan_rate(frame: Callable[[], DataFrame], records: int) -> float:
    """Return the rows per second of a scan of ``records`` rows, as many as there are before and after."""
    assert frame().count() == records
    rate = rows_per_second(scan(frame), records)
    assert frame().count() == records
    return rate


def kafka_rate(session: SparkSession, frame: DataFrame, records: int) -> float:
    """Return the rows per second of Spark's Kafka connector from one broker of Apache Kafka."""
    with tempfile.TemporaryDirectory() as directory, KafkaCluster(Path(directory), brokers=1) as cluster:
        admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
        admin.create_topics([NewTopic("bench", PARTITIONS, 1)])["bench"].result()
        options = {"kafka.bootstrap.servers": cluster.bootstrap, "topic": "bench"}
        frame.write.format("stratalog").mode("append").options(**options).save()
        return connector_rate(session, cluster.bootstrap, "bench", records)


def main() -> None:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    records = int(sys.argv[1]) if len(sys.argv) > 1 else 1_400_000
    records -= records % (RECORDS_PER_BATCH * PARTITIONS)
    session = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.memory", "3g")
        .config("spark.python.unix.domain.socket.enabled", "true")
    ).getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    session.dataSource.register(ReadyBatches)
    for jar in spark_connector(Path(pyspark.__file__).parent / "jars"):
        session.sql(f"ADD JAR '{jar}'")
    with tempfile.TemporaryDirectory() as directory:
        url = build_bucket(Path(directory) / "bucket", records)
        control = Path(directory) / "parquet"
        control.mkdir()
        write_parquet(url, control)
        reader = session.read.format("stratalog").options(subscribe="bench", missingTail="ignore")
        more = session.read.format("stratalog").options(subscribe="catch-up", missingTail="ignore")
        rates = {
            "parquet": rows_per_second(scan(lambda: session.read.parquet(str(control))), records),
            "limit": rows_per_second(scan(lambda: session.read.format("ready-batches").load(url)), records),
            "scan": rows_per_second(scan(lambda: reader.load(url)), records),
            "stream": rows_per_second(catch_up(session, url, "bench"), records),
            "scan_of_more": rows_per_second(scan(lambda: more.load(url)), CATCH_UP_COPIES * records, CATCH_UP_RUNS),
            "stream_of_more": rows_per_second(catch_up(session, url, "catch-up"), CATCH_UP_COPIES * records, CATCH_UP_RUNS),
        }
        for name, rate in rates.items():
            print(f"{name}_million_rows_per_s {rate / 1e6:.3f}")
        written = session.read.parquet(str(control)).select("key", "value", "partition", "timestamp")
        rates |= sink_rates(session, written, records) | {"connector_kafka": kafka_rate(session, written, records)}
        for name in ("bulk_sink", "kafka_sink", "bulk_scan", "connector_kafka", "connector_own"):
            print(f"{name}_thousand_rows_per_s {rates[name] / 1e3:.0f}")
        print(f"spark_kafka_ratio {rates['bulk_scan'] / rates['connector_kafka']:.2f}")
        print(f"spark_kafka_own_ratio {rates['bulk_scan'] / rates['connector_own']:.2f}")
        print(f"bulk_sink_ratio {rates['bulk_sink'] / rates['kafka_sink']:.2f}")
        print(f"spark_scan_ratio {rates['scan'] / rates['parquet']:.2f}")
        print(f"spark_scan_limit_ratio {rates['scan'] / rates['limit']:.2f}")
        print(f"stream_catchup_ratio {rates['stream_of_more'] / rates['scan_of_more']:.2f}")
        print(f"stream_start_s {records / rates['stream'] - records / rates['scan']:.2f}")
        long = build_long_history(Path(directory) / "long")
        print(f"metadata_table_count_s {count_seconds(session, long, COUNTED_RECORDS):.2f}")
        print(f"audit_gb_per_core_s {audit_gb_per_second(url):.2f}")
    session.stop()


if __name__ == "__main__":
    main()
