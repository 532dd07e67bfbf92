"""The Spark source's reader over a topic of which the bucket holds a part and the brokers the rest."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic
from integration.process_cluster import KEPT_FOR_EVER, ProcessCluster, until_all_know

from stratalog_core.errors import Invalid, NotFound, Unavailable
from stratalog_pipeline.arrow.schema import COLUMNS_WITH_HEADERS
from stratalog_pipeline.options import parse_options
from stratalog_pipeline.planning import BrokerSplit
from stratalog_pipeline.spark.metadata_reader import MetadataReader
from stratalog_pipeline.spark.reader import StratalogReader, TaskPartition
from stratalog_pipeline.spark.stream_reader import StratalogStreamReader

pytestmark = pytest.mark.integration
PARTITIONS = 3
COLD, HOT = 900, 600
"""Records in the bucket, and records after them."""
FIRST_MS = 1_700_000_000_000


def reader(
    cluster: ProcessCluster, topic: str, options: Mapping[str, str] | None = None, *, brokers: bool = True
) -> StratalogReader:
    servers = {"kafka.bootstrap.servers": cluster.bootstrap} if brokers else {}
    parsed = parse_options({"path": str(cluster.data / "store"), "subscribe": topic, **servers, **(options or {})})
    return StratalogReader(parsed, COLUMNS_WITH_HEADERS)


def rows(of: StratalogReader) -> list[dict[str, Any]]:
    return [row for split in of.partitions() for batch in of.read(split) for row in batch.to_pylist()]


def fields(number: int) -> dict[str, Any]:
    return {
        "key": None if number % 7 == 0 else f"key-{number}".encode(),
        "value": None if number % 11 == 0 else str(number).encode(),
        "headers": [("number", str(number).encode()), ("empty", None)] if number % 3 == 0 else [],
        "timestamp": FIRST_MS + number,
    }


def produce(cluster: ProcessCluster, topic: str, numbers: range) -> None:
    producer = Producer(
        {"bootstrap.servers": cluster.bootstrap, "compression.type": "zstd", "linger.ms": 5, "enable.idempotence": True}
    )
    for number in numbers:
        producer.produce(topic, partition=number % PARTITIONS, **fields(number))
    assert producer.flush(60) == 0


def expected(number: int) -> tuple[object, ...]:
    sent = fields(number)
    headers = [{"key": key, "value": value} for key, value in sent["headers"]] or None
    return (number % PARTITIONS, number // PARTITIONS, sent["timestamp"], sent["key"], sent["value"], headers)


def seen(found: Sequence[dict[str, Any]]) -> list[tuple[object, ...]]:
    names = ("partition", "offset", "timestamp", "key", "value", "headers")
    at_ms = [{**row, "timestamp": round(row["timestamp"].timestamp() * 1000)} for row in found]
    return [tuple(row[name] for name in names) for row in at_ms]


def wanted(numbers: range) -> list[tuple[object, ...]]:
    return sorted(map(expected, numbers), key=lambda row: row[:2])


def ordered(found: Sequence[dict[str, Any]]) -> list[tuple[object, ...]]:
    return sorted(seen(found), key=lambda row: row[:2])


@pytest.fixture(scope="module")
def half_cold(cluster: ProcessCluster) -> str:
    """A topic whose first records are in the bucket only and whose last are with the brokers only."""
    topic = cluster.new_topic(PARTITIONS, KEPT_FOR_EVER)
    produce(cluster, topic, range(COLD))
    cluster.run("tier", "offload", topic, "--wait")
    cluster.keep_hot(topic)
    produce(cluster, topic, range(COLD, COLD + HOT))
    return topic


def test_bucket_and_brokers_are_one_range_of_offsets(cluster: ProcessCluster, half_cold: str) -> None:
    whole = reader(cluster, half_cold)
    splits = [split for task in whole.partitions() if isinstance(task, TaskPartition) for split in task.splits]
    hot = [split for split in splits if isinstance(split, BrokerSplit)]
    assert sum(split.offsets.end - split.offsets.first for split in hot) == HOT, "history is read from the bucket"
    assert ordered(rows(whole)) == wanted(range(COLD + HOT))


@pytest.mark.parametrize(("first", "end"), [(10, 290), (290, 310), (310, 450), (0, 500), (450, 500)])
def test_bounds_by_offset_on_either_side_of_the_border(cluster: ProcessCluster, half_cold: str, first: int, end: int) -> None:
    bounds = {
        "startingOffsets": json.dumps({half_cold: {str(number): first for number in range(PARTITIONS)}}),
        "endingOffsets": json.dumps({half_cold: {str(number): end for number in range(PARTITIONS)}}),
    }
    assert ordered(rows(reader(cluster, half_cold, bounds))) == wanted(range(first * PARTITIONS, end * PARTITIONS))


@pytest.mark.parametrize(("first", "end"), [(30, 870), (870, 930), (930, 1500), (0, 5000)])
def test_bounds_by_time_on_either_side_of_the_border(cluster: ProcessCluster, half_cold: str, first: int, end: int) -> None:
    bounds = {"startingTimestamp": str(FIRST_MS + first), "endingTimestamp": str(FIRST_MS + end)}
    assert ordered(rows(reader(cluster, half_cold, bounds))) == wanted(range(first, min(end, COLD + HOT)))


def test_offsets_beyond_the_end_are_refused(cluster: ProcessCluster, half_cold: str) -> None:
    bounds = {"endingOffsets": json.dumps({half_cold: dict.fromkeys(map(str, range(PARTITIONS)), 501)})}
    with pytest.raises(Invalid, match=r"the topic holds 0\.\.500.*nothing is committed"):
        reader(cluster, half_cold, bounds).partitions()


def test_without_brokers_the_missing_tail_is_reported(
    cluster: ProcessCluster, half_cold: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert ordered(rows(reader(cluster, half_cold, brokers=False))) == wanted(range(COLD))
    assert f"the bucket is read, which ends at {half_cold}-0 offset 300 (manifest of 20" in caplog.text
    with pytest.raises(Invalid, match="newer records are not read"):
        reader(cluster, half_cold, {"missingTail": "fail"}, brokers=False).partitions()
    caplog.clear()
    rows(reader(cluster, half_cold, {"missingTail": "ignore"}, brokers=False))
    ends = {"endingOffsets": json.dumps({half_cold: dict.fromkeys(map(str, range(PARTITIONS)), 100)})}
    rows(reader(cluster, half_cold, ends, brokers=False))
    assert caplog.text == "", "a read with an end of its own misses nothing"


def test_a_topic_that_is_not_offloaded_yet(cluster: ProcessCluster) -> None:
    topic = cluster.new_topic(PARTITIONS, KEPT_FOR_EVER)
    produce(cluster, topic, range(30))
    assert ordered(rows(reader(cluster, topic))) == wanted(range(30))
    with pytest.raises((NotFound, Invalid), match=r"not in this bucket|no history in the bucket"):
        reader(cluster, topic, brokers=False).partitions()


def test_the_table_of_tails_tells_what_only_brokers_have(cluster: ProcessCluster, half_cold: str) -> None:
    options = parse_options(
        {
            "path": str(cluster.data / "store"),
            "subscribe": half_cold,
            "table": "tail",
            "kafka.bootstrap.servers": cluster.bootstrap,
        }
    )
    tail = MetadataReader(options, ("partition", "log_start_offset", "log_end_offset", "cold_end_offset", "hot_offsets"))
    found = [tuple(row.values()) for task in tail.partitions() for batch in tail.read(task) for row in batch.to_pylist()]
    assert found == [(number, 0, 500, 300, 200) for number in range(PARTITIONS)]


def test_every_scan_is_whole_while_offload_goes_on(cluster: ProcessCluster) -> None:
    topic = cluster.new_topic(PARTITIONS, KEPT_FOR_EVER)
    produce(cluster, topic, range(300))
    acknowledged = [300]

    def go_on() -> None:
        for round_number in range(1, 5):
            produce(cluster, topic, range(300 * round_number, 300 * (round_number + 1)))
            acknowledged.append(300 * (round_number + 1))
            cluster.run("tier", "offload", topic, "--wait")

    writing = threading.Thread(target=go_on)
    writing.start()
    try:
        while writing.is_alive():
            least = acknowledged[-1]
            found = ordered(rows(reader(cluster, topic)))
            by_partition = [[row[1] for row in found if row[0] == number] for number in range(PARTITIONS)]
            assert all(offsets == list(range(len(offsets))) for offsets in by_partition)
            assert len(found) >= least
    finally:
        writing.join()
    assert ordered(rows(reader(cluster, topic))) == wanted(range(1500))


def test_a_stream_catches_up_from_the_bucket_and_follows_the_tail(cluster: ProcessCluster) -> None:
    topic = cluster.new_topic(PARTITIONS, KEPT_FOR_EVER)
    produce(cluster, topic, range(300))
    cluster.run("tier", "offload", topic, "--wait")
    options = {"path": str(cluster.data / "store"), "subscribe": topic, "kafka.bootstrap.servers": cluster.bootstrap}
    parsed = parse_options({**options, "startingOffsets": "earliest", "maxOffsetsPerTrigger": "70"}, "stream")
    stream = StratalogStreamReader(parsed, COLUMNS_WITH_HEADERS)
    produced = [300]

    def go_on() -> None:
        for round_number in range(1, 4):
            produce(cluster, topic, range(300 * round_number, 300 * (round_number + 1)))
            produced.append(300 * (round_number + 1))
            cluster.run("tier", "offload", topic, "--wait")

    writing = threading.Thread(target=go_on)
    writing.start()
    found: list[dict[str, Any]] = []
    position, batch_count = stream.initialOffset(), 0
    try:
        while writing.is_alive() or len(found) < produced[-1]:
            end = stream.latestOffset(position, stream.getDefaultReadLimit())
            if end == position:
                continue
            batch = [
                row for split in stream.partitions(position, end) for part in stream.read(split) for row in part.to_pylist()
            ]
            assert len(batch) <= 70 + PARTITIONS
            # Spark plans a batch again after a failure.
            assert len(stream.partitions(position, end)) > 0
            found, position, batch_count = found + batch, end, batch_count + 1
    finally:
        writing.join()
    assert ordered(found) == wanted(range(1200))
    assert position == {topic: {str(number): 400 for number in range(PARTITIONS)}}
    assert batch_count > 1200 // (70 + PARTITIONS)


def test_a_topic_that_is_created_again_is_not_taken_for_the_old_one(cluster: ProcessCluster) -> None:
    topic = cluster.new_topic(PARTITIONS, KEPT_FOR_EVER)
    produce(cluster, topic, range(30))
    planned = reader(cluster, topic)
    splits = planned.partitions()
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap, "log_level": 0})
    admin.delete_topics([topic])[topic].result(60)
    admin.create_topics([NewTopic(topic, PARTITIONS, 3)])[topic].result(60)
    until_all_know(cluster.bootstrap, topic)
    produce(cluster, topic, range(30))
    with pytest.raises(NotFound, match="was deleted after the query began"):
        [row for split in splits for batch in planned.read(split) for row in batch.to_pylist()]


def test_options_that_the_client_does_not_know_are_named(cluster: ProcessCluster, half_cold: str) -> None:
    with pytest.raises(Invalid, match=r"options kafka\.\*: .*\"no\.such\""):
        reader(cluster, half_cold, {"kafka.no.such": "x"}).partitions()


def test_brokers_that_are_away_are_said_to_be(cluster: ProcessCluster, half_cold: str) -> None:
    away = {"kafka.bootstrap.servers": "127.0.0.1:1", "kafkaConsumer.pollTimeoutMs": "1000"}
    with pytest.raises(Unavailable):
        reader(cluster, half_cold, away, brokers=False).partitions()
