"""Apache Kafka's own client and tools, from its jars."""

from __future__ import annotations

import pytest
from integration.process_cluster import ProcessCluster

from stratalog_loadgen import java_tools as tools

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("java_tools")]


@pytest.mark.parametrize("codec", ["none", "lz4"])
def test_the_java_producer_and_consumer(cluster: ProcessCluster, codec: str) -> None:
    topic = cluster.new_topic(partitions=6)
    properties: dict[str, str | int] = {"acks": "all", "compression.type": codec, "batch.size": 131072, "linger.ms": 5}
    sent = tools.produce(cluster.bootstrap, topic, records=20_000, record_bytes=500, properties=properties)
    assert sent.records == 20_000
    received = tools.consume(cluster.bootstrap, topic, records=20_000)
    assert received.records == 20_000


def test_end_to_end_one_record_at_a_time(cluster: ProcessCluster) -> None:
    topic = cluster.new_topic()
    found = tools.end_to_end(cluster.bootstrap, topic, records=200, record_bytes=100)
    assert 0 <= found.p50_ms <= found.p99_ms <= found.p999_ms
    assert found.average_ms > 0
