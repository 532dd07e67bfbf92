"""Fetches of one partition sent by hand to its owner and to a replica in another rack (KIP-392), and their answers.

Broker 1 owns the partition and is in rack-1; broker 2 is its replica, in rack-2.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from typing import Any, Final
from unittest import mock

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic
from integration.process_cluster import ProcessCluster
from kio.schema.errors import ErrorCode
from unit.broker.raw_client import RawClient, fetch, request

from stratalog_core.batches.batch import read_header

OWNER, REPLICA = 1, 2
VALUES: Final = tuple(f"{number}-".ljust(1000, "x") for number in range(200))
"""The records of the partition, each in a batch of its own."""
_METADATA: Final = 3
_TIMEOUT_S: Final = 120.0

_ONLY_HISTORY: Final = "brokers hold no data: a replica serves what is in the object store, and the owner everything else"
_NEEDS_EPOCH: Final = (
    "a client that sends the leader epoch knows the owner; one that takes a replica for it would fail at the history's end"
)
REASONS: Final[Mapping[str, str]] = {
    "the owner, beyond the end": "the answer also has the start and the end of the log",
    "the owner, no epoch": _NEEDS_EPOCH,
    "the replica, no rack": "a fetch without a rack is one for the owner, which this broker is not",
    "the replica, no epoch": _NEEDS_EPOCH,
    "the replica, at the end": _ONLY_HISTORY,
    "the replica, beyond the end": _ONLY_HISTORY,
}
"""Why an answer differs from Apache Kafka's, by the fetch."""


def rack(broker_id: int) -> str:
    return f"rack-{broker_id}"


def offload_and_restart(cluster: ProcessCluster, topic: str) -> None:
    """Offload the topic and restart the brokers, each in its rack, so that only the object store has the records.

    An owner sends nobody to a replica for what its tail cache still has.
    """
    cluster.run("tier", "offload", topic, "--wait", "--delete-hot")
    for broker_id in (OWNER, REPLICA):
        with mock.patch.dict(os.environ, {"STRATALOG_BROKER_RACK": rack(broker_id)}):
            cluster.restart(f"broker-{broker_id}")


def create_topic(bootstrap: str, topic: str) -> None:
    """Create the topic and fill its partition; return when all records are acknowledged."""
    admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
    for future in admin.create_topics([NewTopic(topic, num_partitions=1, replica_assignment=[[OWNER, REPLICA]])]).values():
        future.result(_TIMEOUT_S)
    producer = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True, "batch.num.messages": 1})
    for value in VALUES:
        producer.produce(topic, value, partition=0)
    assert producer.flush(_TIMEOUT_S) == 0


def run_fetches(bootstrap: str, topic: str) -> dict[str, str]:
    """Send each fetch; return the answers by what is fetched. The topic is that of ``create_topic``."""
    return asyncio.run(_run(bootstrap, topic))


async def _run(bootstrap: str, topic: str) -> dict[str, str]:
    addresses, epoch = await _owned(bootstrap, topic)
    owner, replica = [await RawClient.connect(addresses[broker_id]) for broker_id in (OWNER, REPLICA)]
    near, end = {"rack": rack(REPLICA), "leader_epoch": epoch}, len(VALUES)
    fetches: list[tuple[str, RawClient, int, dict[str, Any]]] = [
        ("the owner, the replica's rack", owner, 0, near),
        ("the owner, its own rack", owner, 0, {**near, "rack": rack(OWNER)}),
        ("the owner, an unknown rack", owner, 0, {**near, "rack": "rack-9"}),
        ("the owner, no rack", owner, 0, {**near, "rack": ""}),
        ("the owner, no epoch", owner, 0, {**near, "leader_epoch": -1}),
        ("the owner, a later epoch", owner, 0, {**near, "leader_epoch": epoch + 1}),
        ("the owner, beyond the end", owner, end + 5, near),
        ("the replica", replica, 0, near),
        ("the replica, in the middle", replica, end // 2, near),
        ("the replica, no rack", replica, 0, {**near, "rack": ""}),
        ("the replica, no epoch", replica, 0, {**near, "leader_epoch": -1}),
        ("the replica, a later epoch", replica, 0, {**near, "leader_epoch": epoch + 1}),
        ("the replica, at the end", replica, end, {**near, "max_wait_ms": 500}),
        ("the replica, beyond the end", replica, end + 5, near),
    ]
    try:
        for client, where in ((owner, ""), (replica, rack(REPLICA))):
            await _until_caught_up(client, topic, {**near, "rack": where})
        # Each waits for its records, however long a read from the object store takes.
        return {
            what: _text(await fetch(client, topic, offset, **{"max_wait_ms": 10_000, **options}))
            for what, client, offset, options in fetches
        }
    finally:
        for client in (owner, replica):
            await client.close()


async def _owned(bootstrap: str, topic: str) -> tuple[dict[int, str], int]:
    """Wait until broker 1 is the owner; return the brokers' addresses and the leader epoch."""
    client = await RawClient.connect(bootstrap.split(",")[0])
    wanted = request(_METADATA, 7, "MetadataRequestTopic", name=topic)
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            while True:
                answer = await client.call(
                    _METADATA, 7, request(_METADATA, 7, "MetadataRequest", topics=(wanted,), allow_auto_topic_creation=False)
                )
                partitions = answer.topics[0].partitions
                if partitions and partitions[0].leader_id == OWNER:
                    break
                await asyncio.sleep(0.1)
    finally:
        await client.close()
    return {broker.node_id: f"{broker.host}:{broker.port}" for broker in answer.brokers}, partitions[0].leader_epoch


async def _until_caught_up(client: RawClient, topic: str, options: dict[str, Any]) -> None:
    """Wait until the broker knows the high watermark: a follower of Kafka learns it by its next fetch."""
    deadline = time.monotonic() + _TIMEOUT_S
    found = None
    while found is None or (found.error_code is not ErrorCode.none or found.high_watermark < len(VALUES)):
        assert time.monotonic() < deadline, found
        found = await fetch(client, topic, 0, max_wait_ms=500, **options)


def _text(found: Any) -> str:
    """Return the fields of an answer as text."""
    records = f"records from {read_header(found.records, 0).base_offset}" if found.records else "no records"
    return (
        f"{found.error_code.name}, preferred replica {found.preferred_read_replica}, high watermark {found.high_watermark},"
        f" last stable offset {found.last_stable_offset}, log start {found.log_start_offset}, {records}"
    )
