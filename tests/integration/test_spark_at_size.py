"""Every job of the pipeline over many flight events, each result compared with a computation that does not use the pipeline.

The demo's events, repeated with shifted times, become a topic by the bulk sink. A plain consumer reads it back; audit, usage,
search for erasure, export and replay run over it. ``make spark-at-size GB=5`` writes that many bytes of keys and values; here
it is a sample. Expected results come from the events themselves, by numpy.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from confluent_kafka import Consumer, KafkaError, TopicPartition
from integration.process_cluster import KEPT_FOR_EVER, ProcessCluster
from pyspark.sql import SparkSession
from pyspark.sql import functions as sql
from stratalog_demo.flights import Event, events, load_table

from stratalog_pipeline.jobs.audit import audit
from stratalog_pipeline.jobs.backfill import BulkTarget, backfill
from stratalog_pipeline.jobs.erase import search
from stratalog_pipeline.jobs.export import export
from stratalog_pipeline.jobs.replay import ReplayTarget, replay
from stratalog_pipeline.jobs.usage import usage
from stratalog_pipeline.options import parse_options
from stratalog_tiering.core.erasure import Selection

pytestmark = [pytest.mark.integration, pytest.mark.spark, pytest.mark.timeout(3600)]
GB = float(os.environ.get("STRATALOG_SPARK_GB", "0"))
SAMPLE_EVENTS = 4000
PARTITIONS = 4
DAY_MS = 86_400_000
SHIFT_MS = 366 * DAY_MS
"""Between two repetitions: more than a year, so that they do not overlap."""
REPLAY_SHIFT_MS = 3_600_000
IDLE_S = 120.0
SHUFFLED = 64 if GB else 4
"""Tasks of a shuffle. Spark's 200 are too many for the sample."""
Hashes = npt.NDArray[np.uint64]
Times = npt.NDArray[np.int64]


class Digest(NamedTuple):
    """Of records in any order: their number, and the sum of the hashes of content and time, modulo 2**64."""

    records: int
    total: int


def digest_of(hashes: Hashes, times_ms: Times) -> Digest:
    mixed = _mixed(hashes ^ _mixed(times_ms.astype(np.uint64)))
    return Digest(len(hashes), int(mixed.sum(dtype=np.uint64)))


def _mixed(values: Hashes) -> Hashes:
    """The finalizer of SplitMix64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    found: Hashes = values ^ (values >> np.uint64(31))
    return found


def content_hash(key: bytes | None, value: bytes, headers: Iterable[tuple[str, bytes]] = ()) -> int:
    parts = [b"-" if key is None else b"%d:" % len(key), key or b"", b"%d:" % len(value), value]
    for name, content in headers:
        parts += [b"%d:" % len(name), name.encode(), b"%d:" % len(content), content]
    return int.from_bytes(hashlib.blake2b(b"".join(parts), digest_size=8).digest(), "big")


def added(digests: Iterable[Digest]) -> Digest:
    found = list(digests)
    return Digest(sum(each.records for each in found), sum(each.total for each in found) % 2**64)


@dataclass(frozen=True)
class Flights:
    """The events, ``repeats`` times. Everything here is computed from the events alone."""

    originals: Sequence[Event]
    repeats: int

    @property
    def records(self) -> int:
        return len(self.originals) * self.repeats

    @cached_property
    def times_ms(self) -> Times:
        return np.array([event.timestamp_ms for event in self.originals], np.int64)

    def digest(self, repetitions: Iterable[int], *, with_headers: bool, shift_ms: int = 0) -> Digest:
        hashes = np.array(
            [content_hash(each.key, each.value, each.headers if with_headers else ()) for each in self.originals], np.uint64
        )
        return added(digest_of(hashes, self.times_ms + number * SHIFT_MS + shift_ms) for number in repetitions)

    def records_by_day(self) -> dict[int, int]:
        days = np.concatenate([(self.times_ms + number * SHIFT_MS) // DAY_MS for number in range(self.repeats)])
        numbers, counts = np.unique(days, return_counts=True)
        return dict(zip(numbers.tolist(), counts.tolist(), strict=True))

    def by_key(self) -> dict[str | None, tuple[int, int]]:
        """Records and bytes of each key."""
        records: Counter[str | None] = Counter()
        sizes: Counter[str | None] = Counter()
        for event in self.originals:
            key = None if event.key is None else event.key.decode()
            records[key] += self.repeats
            sizes[key] += self.repeats * (len(event.key or b"") + len(event.value))
        return {key: (count, sizes[key]) for key, count in records.items()}

    def write(self, path: Path) -> None:
        """Write the events once, as Parquet."""
        headers = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
        columns = {
            "key": pa.array([event.key for event in self.originals], pa.binary()),
            "value": pa.array([event.value for event in self.originals], pa.binary()),
            "headers": pa.array([[{"key": n, "value": v} for n, v in event.headers] for event in self.originals], headers),
            "time_ms": pa.array(self.times_ms),
        }
        pq.write_table(pa.table(columns), path, compression="zstd")


@pytest.fixture(scope="module")
def flights() -> Flights:
    table = load_table()
    if not GB:
        return Flights(events(table.slice(0, SAMPLE_EVENTS)), 2)
    originals = events(table)
    once = sum(len(event.key or b"") + len(event.value) for event in originals)
    return Flights(originals, max(2, math.ceil(GB * 1e9 / once)))


@pytest.fixture(scope="module")
def topic(
    cluster: ProcessCluster, spark: SparkSession, flights: Flights, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """A topic with all events, in the order of time within each partition."""
    spark.conf.set("spark.sql.shuffle.partitions", SHUFFLED)
    path, name = tmp_path_factory.mktemp("flights") / "flights.parquet", f"flights-{time.time_ns()}"
    flights.write(path)
    once = spark.read.parquet(str(path))
    repeated = once.crossJoin(spark.range(flights.repeats, numPartitions=flights.repeats).withColumnRenamed("id", "number"))
    shifted = sql.timestamp_millis(sql.col("time_ms") + sql.col("number") * SHIFT_MS).alias("timestamp")
    target = BulkTarget(topic=name, partitions=PARTITIONS, store=cluster.store, metadata=cluster.metadata)
    backfill(repeated.select("key", "value", "headers", shifted), target)
    yield name
    spark.conf.unset("spark.sql.shuffle.partitions")


def consumed(bootstrap: str, topic: str) -> Digest:
    """Read a topic as a plain consumer. Fail unless the records of each partition are in the order of time."""
    return added(_consumed(bootstrap, topic, partition) for partition in range(PARTITIONS))


def _consumed(bootstrap: str, topic: str, partition: int) -> Digest:
    options = {"bootstrap.servers": bootstrap, "group.id": "reader", "isolation.level": "read_committed", "log_level": 0}
    consumer = Consumer({**options, "enable.partition.eof": True})
    consumer.assign([TopicPartition(topic, partition, 0)])
    hashes: list[int] = []
    times_ms: list[int] = []
    deadline = time.monotonic() + IDLE_S
    try:
        while time.monotonic() < deadline:
            for message in consumer.consume(1000, 0.2):
                failure, value, key = message.error(), message.value(), message.key()
                if failure is not None:
                    assert failure.code() == KafkaError._PARTITION_EOF, failure
                    assert times_ms == sorted(times_ms)
                    return digest_of(np.array(hashes, np.uint64), np.array(times_ms, np.int64))
                deadline = time.monotonic() + IDLE_S
                headers = message.headers() or []
                assert isinstance(headers, list)
                assert isinstance(value, bytes)
                assert key is None or isinstance(key, bytes)
                hashes.append(content_hash(key, value, ((name, as_bytes(content)) for name, content in headers)))
                times_ms.append(message.timestamp()[1])
    finally:
        consumer.close()
    raise AssertionError(f"{topic}-{partition} has no end after {len(times_ms)} records")


def as_bytes(content: str | bytes | None) -> bytes:
    assert isinstance(content, bytes)
    return content


def source_of(cluster: ProcessCluster, topic: str) -> dict[str, str]:
    return {"kafka.bootstrap.servers": cluster.bootstrap, "store": cluster.store, "subscribe": topic}


def test_a_backfilled_topic_holds_every_event_once_in_order(cluster: ProcessCluster, topic: str, flights: Flights) -> None:
    assert consumed(cluster.bootstrap, topic) == flights.digest(range(flights.repeats), with_headers=True)


def test_audit_and_usage_count_what_was_written(
    cluster: ProcessCluster, spark: SparkSession, topic: str, flights: Flights
) -> None:
    verdicts = audit(spark, parse_options(source_of(cluster, topic)))
    assert [problem for each in verdicts for problem in each.problems] == []
    assert sum(each.records for each in verdicts) == flights.records
    assert all(each.digest and each.start_offset == 0 and each.end_offset == each.records for each in verdicts)
    found = usage(spark, {"store": cluster.store, "subscribe": topic, "missingTail": "ignore"}, "records")
    held = {(row["partition"], row["records"], row["end_offset"]) for row in found.partitions}
    assert held == {(each.partition, each.records, each.end_offset) for each in verdicts}
    last = int(flights.times_ms.max()) + (flights.repeats - 1) * SHIFT_MS
    assert max(row["max_timestamp"] for row in found.partitions) == f"{np.datetime64(last, 'ms')}Z"
    assert sum(row["bytes"] for row in found.codecs) == sum(each.batch_bytes for each in verdicts)
    by_key = flights.by_key()
    assert [(row["keys"], row["records"]) for row in found.key_counts] == [(len(by_key.keys() - {None}), flights.records)]
    assert {row["key"]: (row["records"], row["bytes"]) for row in found.keys}.items() <= by_key.items()
    assert [row["records"] for row in found.keys] == sorted((count for count, _ in by_key.values()), reverse=True)[
        : len(found.keys)
    ]


def test_a_search_for_erasure_finds_the_records_of_its_keys(
    cluster: ProcessCluster, spark: SparkSession, topic: str, flights: Flights
) -> None:
    by_key = flights.by_key()
    keys = sorted(key for key in by_key if key is not None)[:: max(1, len(by_key) // 7)]
    options = parse_options({"store": cluster.store, "subscribe": topic, "missingTail": "ignore"})
    found = search(spark, options, Selection(keys=frozenset(key.encode() for key in keys)))
    assert sum(each.records for each in found.found) == sum(by_key[key][0] for key in keys)


def test_an_export_holds_every_event_once(
    cluster: ProcessCluster, spark: SparkSession, topic: str, flights: Flights, tmp_path: Path
) -> None:
    target = tmp_path / "exported"
    options = parse_options({"store": cluster.store, "subscribe": topic, "missingTail": "ignore"})
    written = export(spark, options, str(target))
    assert written.records == flights.records
    digests: list[Digest] = []
    days: Counter[int] = Counter()
    for file in written.files:
        rows = pq.read_table(target / file.key, partitioning=None, columns=["key", "value", "timestamp", "offset"])
        assert rows["offset"].to_pylist() == list(range(file.first, file.end))
        times_ms = rows["timestamp"].cast(pa.timestamp("ms", tz="UTC")).cast(pa.int64()).to_numpy()
        pairs = zip(rows["key"].to_pylist(), rows["value"].to_pylist(), strict=True)
        digests.append(digest_of(np.array([content_hash(key, value) for key, value in pairs], np.uint64), times_ms))
        numbers, counts = np.unique(times_ms // DAY_MS, return_counts=True)
        days.update(dict(zip(numbers.tolist(), counts.tolist(), strict=True)))
    assert added(digests) == flights.digest(range(flights.repeats), with_headers=False)
    assert dict(days) == flights.records_by_day()


def test_a_replay_of_a_repetition_sends_its_events_once_in_order(
    cluster: ProcessCluster, spark: SparkSession, topic: str, flights: Flights
) -> None:
    copy = cluster.new_topic(PARTITIONS, KEPT_FOR_EVER, copies=1)
    target = ReplayTarget(bootstrap=cluster.bootstrap, topic=copy, keeps_partitions=True, shift_ms=REPLAY_SHIFT_MS)
    first_ms = int(flights.times_ms.min()) + SHIFT_MS
    window = {"startingTimestamp": str(first_ms), "endingTimestamp": str(first_ms + SHIFT_MS)}
    sent = replay(spark, {**source_of(cluster, topic), **window, "startingOffsetsByTimestampStrategy": "latest"}, target)
    assert sent.records == len(flights.originals)
    assert consumed(cluster.bootstrap, copy) == flights.digest([1], with_headers=True, shift_ms=REPLAY_SHIFT_MS)
