"""Metrics of a broker and its ledger client, scraped after requests of a real client."""

from __future__ import annotations

import asyncio
from pathlib import Path

import confluent_kafka
from confluent_kafka.admin import AdminClient, NewTopic
from unit.broker.mini_cluster import MiniCluster, in_thread, run_cluster

from stratalog_broker.metrics import RequestMetrics
from stratalog_core.metrics.groups import Histogram
from stratalog_core.metrics.registry import Registry, Value

RECORDS = 200


def _work(bootstrap: str) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    (created,) = admin.create_topics([NewTopic("measured", 3, 1)]).values()
    created.result(60)
    producer = confluent_kafka.Producer({"bootstrap.servers": bootstrap, "acks": "all", "linger.ms": 1})
    for number in range(RECORDS):
        producer.produce("measured", b"x" * 100, partition=number % 3)
        producer.poll(0)
    assert producer.flush(60) == 0


def _scraped(cluster: MiniCluster) -> dict[str, dict[tuple[str, ...], Value]]:
    registry = Registry()
    registry.add_source(cluster.broker.metrics)
    registry.add_source(cluster.brokers[1].ledgers.metrics)
    return {family.definition.name: {one.labels: one.value for one in family.samples} for family in registry.collect()}


async def test_requests_partitions_memory_and_traffic(tmp_path: Path) -> None:
    async with run_cluster(tmp_path) as cluster:
        await in_thread(lambda: _work(cluster.bootstrap))
        async with asyncio.timeout(60):
            while "stratalog_broker_topic_in_bytes_total" not in (found := _scraped(cluster)):
                await asyncio.sleep(0.05)
                cluster.broker.load.report()
    requests = found["stratalog_broker_requests_total"]
    assert requests["CreateTopics",] == 1
    produced, seconds = requests["Produce",], found["stratalog_broker_request_seconds"]["Produce",]
    assert isinstance(produced, int)
    assert isinstance(seconds, Histogram)
    assert sum(seconds.counts) == produced >= 3
    assert 0 < seconds.sum < 60 * produced, "in seconds"
    assert found["stratalog_broker_partitions"] == found["stratalog_broker_takeovers_total"] == {(): 3}
    assert found["stratalog_broker_takeovers_waiting"] == {(): 0}
    used, limits = found["stratalog_broker_memory_used_bytes"], found["stratalog_broker_memory_limit_bytes"]
    tail = used["tail",]
    assert isinstance(tail, int)
    assert tail > RECORDS * 100
    assert used.keys() == limits.keys()
    in_bytes = found["stratalog_broker_topic_in_bytes_total"]["measured",]
    assert isinstance(in_bytes, int)
    assert in_bytes > RECORDS * 100
    assert found["stratalog_ledger_client_in_flight_adds"] == {("bookie-1",): 0}


def test_only_used_apis_are_reported_busiest_first() -> None:
    requests = RequestMetrics({0: "Produce", 1: "Fetch", 3: "Metadata"})
    for api_key in (3, 0, 0, 0):
        requests.seconds[api_key].observe(0.001)
    assert [(one.api, one.requests) for one in requests.metrics()] == [("Produce", 3), ("Metadata", 1)]
