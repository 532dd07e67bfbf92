"""Requests that name one group, id, resource or partition many times: each is answered in full once."""

from __future__ import annotations

import asyncio
from typing import Any

from kio.schema.errors import ErrorCode as E
from unit.broker.conftest import FLIGHTS
from unit.broker.coordination.groups.test_large_commits import FIND, GROUP, coordinator
from unit.broker.mini_cluster import WAIT_S, MiniCluster
from unit.broker.raw_client import RawClient, batch, produce
from unit.broker.transactional import partition_of
from unit.broker.wire_client import WireClient, connect, part

from stratalog_broker.coordination.groups.core.records import CommittedOffset, OffsetKey
from stratalog_broker.requests.repeated_names import first_or_repeated, repeated_names

TRANSACTIONAL_ID = "a transaction"
TIMES = 3
ONCE = [E.none, E.invalid_request, E.invalid_request]


def test_names() -> None:
    assert list(first_or_repeated("abca")) == [("a", False), ("b", False), ("c", False), ("a", True)]
    assert repeated_names("abca") == {"a"}
    assert repeated_names("abc") == frozenset()


async def found(client: WireClient, key: str, key_type: int) -> None:
    async with asyncio.timeout(WAIT_S):
        while (await client.send(FIND, 3, key=key, key_type=key_type)).error_code is not E.none:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_groups(flights: MiniCluster) -> None:
    async with connect(flights.bootstrap) as client:
        await found(client, GROUP, 0)
        store = (await coordinator(flights))._store
        committed = CommittedOffset(offset=1, leader_epoch=-1, metadata="", committed_at_ms=0)
        store.put(OffsetKey(GROUP, "elsewhere", 0), committed)
        classic = await client.send(15, 6, groups=(GROUP,) * TIMES, include_authorized_operations=False)
        assert [row.error_code for row in classic.groups] == ONCE
        consumer = await client.send(69, 1, group_ids=(GROUP,) * TIMES, include_authorized_operations=False)
        assert [row.error_code for row in consumer.groups] == [E.group_id_not_found, *ONCE[1:]]


async def test_metadata_of_an_offset_is_sent_once(flights: MiniCluster) -> None:
    async with connect(flights.bootstrap) as client:
        await found(client, GROUP, 0)
        store = (await coordinator(flights))._store
        for index, metadata in enumerate(("", "m" * 4_000)):
            committed = CommittedOffset(offset=7, leader_epoch=-1, metadata=metadata, committed_at_ms=0)
            store.put(OffsetKey(GROUP, "elsewhere", index), committed)
        topic = part(9, 7, "OffsetFetchRequestTopic", name="elsewhere", partition_indexes=(0, 1) * 2)
        answer = await client.send(9, 7, group_id=GROUP, topics=(topic, topic), require_stable=False)
        rows = [row for one in answer.topics for row in one.partitions]
        assert [row.committed_offset for row in rows] == [7, 7, 7, -1, 7, -1, 7, -1]
        assert [row.error_code for row in rows if row.partition_index == 1] == [*ONCE, E.invalid_request]
        assert sum(len(row.metadata) for row in rows) == 4_000


async def test_transactions_and_producers(flights: MiniCluster, client: RawClient) -> None:
    async with connect(flights.bootstrap) as wire:
        await found(wire, TRANSACTIONAL_ID, 1)
        while True:
            answer = await wire.send(65, 0, transactional_ids=(TRANSACTIONAL_ID,) * TIMES)
            codes = [row.error_code for row in answer.transaction_states]
            if codes[0] is not E.coordinator_load_in_progress:
                break
            await asyncio.sleep(0.02)
        assert codes == [E.transactional_id_not_found, *ONCE[1:]]
        await produce(client, FLIGHTS, batch(b"a", producer_id=5, producer_epoch=1, base_sequence=0))
        topic = part(61, 0, "TopicRequest", name=FLIGHTS, partition_indexes=(0,) * TIMES)
        described = await wire.send(61, 0, topics=(topic, topic))
        rows = [row for one in described.topics for row in one.partitions]
        assert [row.error_code for row in rows] == [*ONCE, *[E.invalid_request] * TIMES]
        assert [len(row.active_producers) for row in rows] == [1, 0, 0, 0, 0, 0]


async def test_configs(flights: MiniCluster) -> None:
    resource = part(32, 4, "DescribeConfigsResource", resource_type=2, resource_name=FLIGHTS, configuration_keys=None)
    async with connect(flights.bootstrap) as client:
        answer = await client.send(32, 4, resources=(resource,) * TIMES, include_synonyms=True, include_documentation=True)
    assert [row.error_code for row in answer.results] == ONCE
    assert [bool(row.configs) for row in answer.results] == [True, False, False]


async def test_topics_in_metadata(flights: MiniCluster) -> None:
    topic_id = partition_of(flights, FLIGHTS).topic_id
    named = [
        part(3, 12, "MetadataRequestTopic", name=name, topic_id=each)
        for name, each in ((FLIGHTS, None), (None, topic_id), (FLIGHTS, None), (None, topic_id))
    ]
    async with connect(flights.bootstrap) as client:
        answer = await client.send(
            3, 12, topics=tuple(named), allow_auto_topic_creation=False, include_topic_authorized_operations=False
        )
    assert [(row.name, row.error_code) for row in answer.topics] == [(FLIGHTS, E.none)] * 2, "once by name, once by id"


async def test_offsets_of_a_repeated_partition_are_not_listed(flights: MiniCluster) -> None:
    def wanted(index: int) -> Any:
        return part(2, 7, "ListOffsetsPartition", partition_index=index, current_leader_epoch=-1, timestamp=-2)

    def topic(*indexes: int) -> Any:
        return part(2, 7, "ListOffsetsTopic", name=FLIGHTS, partitions=tuple(map(wanted, indexes)))

    async with connect(flights.bootstrap) as client:
        once = await client.send(2, 7, replica_id=-1, isolation_level=0, topics=(topic(0, 9),))
        assert [row.error_code for row in once.topics[0].partitions] == [E.none, E.unknown_topic_or_partition]
        twice = await client.send(2, 7, replica_id=-1, isolation_level=0, topics=(topic(0, 9), topic(0)))
    rows = [row for one in twice.topics for row in one.partitions]
    assert [row.error_code for row in rows] == [E.invalid_request, E.unknown_topic_or_partition, E.invalid_request]
    assert [row.offset for row in rows] == [-1] * 3
