"""Partitions are found by the name that their topic has now: an archive's topics get other names while they are served."""

from __future__ import annotations

import msgspec
from kio.schema.errors import ErrorCode
from unit.broker.mini_cluster import MiniCluster
from unit.broker.partitions.test_ack_quorums import create
from unit.broker.raw_client import RawClient, batch, list_offset, produce

from stratalog_metadata.records import Topic, topic_key
from stratalog_metadata.state.commands import Command, Delete, Put, Update


async def end_of(client: RawClient, topic: str) -> tuple[ErrorCode, int]:
    """Return the topic's end, or why it is not told."""
    found = await list_offset(client, topic, -1)
    return found.error_code, found.offset


async def test_a_topic_gives_its_name_to_another_one(mini_cluster: MiniCluster) -> None:
    """As a topic that is deleted while an archive serves it, and another one of the name that is live then. Clients that named
    the first were sent to other brokers for good, and the second lost its name with the end of the first.
    """
    client = await mini_cluster.connect()
    for name, records in (("flights", 1), ("trains", 2)):
        await create(mini_cluster, name, 1)
        for _ in range(records):
            assert (await produce(client, name, batch(b"x"))).error_code == 0
    view = mini_cluster.broker.metadata.view
    first, second = (view.find(Topic, topic_key(name)) for name in ("flights", "trains"))
    assert first is not None
    assert second is not None
    renamed = [msgspec.structs.replace(topic, name=name) for topic, name in ((second, "flights"), (first, "old"))]
    updates: list[Update] = [*(Put(record=topic) for topic in renamed), Delete(key=topic_key("trains"))]
    await mini_cluster.broker.metadata.propose(Command(updates=tuple(updates)))

    assert await end_of(client, "flights") == (ErrorCode.none, 2)
    assert await end_of(client, "old") == (ErrorCode.none, 1)
    assert await end_of(client, "trains") == (ErrorCode.unknown_topic_or_partition, -1)
    mini_cluster.broker.partitions.suspend()
    assert mini_cluster.broker.partitions.find_by_name(b"flights", 0) is None
