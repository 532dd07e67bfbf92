"""Reassignments and elections of preferred leaders, in every version over the wire, in a cluster of two brokers."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kio.schema.errors import ErrorCode
from unit.broker.handlers.test_every_version import versions
from unit.broker.mini_cluster import WAIT_S, MiniCluster, run_cluster, until_all_served
from unit.broker.raw_client import batch, fetch, produce
from unit.broker.wire_client import WireClient, connect, part
from unit.metadata.watching import until

from stratalog_broker.admin.topics import NewTopic
from stratalog_core.errors import Unavailable
from stratalog_metadata.records import NO_OWNER, Partition, Topic, partition_key, topic_key
from stratalog_metadata.state.commands import Command, Put

NONE, INVALID = ErrorCode.none, ErrorCode.invalid_replica_assignment
SECONDS = datetime.timedelta(seconds=60)
ALTER, LIST, ELECT = 45, 46, 43


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[MiniCluster]:
    """Two brokers, which own partitions of ``flights`` (two copies): 0 is broker 1's, 1 broker 2's."""
    async with run_cluster(tmp_path, brokers=2, bookies=2, balance_interval_s=0) as made:
        await made.broker.topic_commands.refresh(WAIT_S)
        assigned = ((0, (1, 2)), (1, (2, 1)))
        await made.broker.topic_commands.create(NewTopic(name="flights", assigned=assigned), WAIT_S)
        await until_all_served(made)
        yield made


def partition(cluster: MiniCluster, index: int = 0) -> Partition:
    view = cluster.broker.metadata.view
    topic = view.find(Topic, topic_key("flights"))
    assert topic is not None
    found = view.find(Partition, partition_key(topic.topic_id, index))
    assert found is not None
    return found


async def until_owned(cluster: MiniCluster, owner: int, index: int = 0) -> None:
    await until(cluster.brokers[1].metadata, lambda: partition(cluster, index).owner == owner, WAIT_S)


async def alter(
    client: WireClient, version: int, *rows: tuple[int, tuple[int, ...] | None], topic: str = "flights", factor: bool = True
) -> list[tuple[ErrorCode, str | None]]:
    partitions = tuple(part(ALTER, version, "ReassignablePartition", partition_index=i, replicas=r) for i, r in rows)
    wanted = part(ALTER, version, "ReassignableTopic", name=topic, partitions=partitions)
    answer = await client.send(ALTER, version, timeout=SECONDS, topics=(wanted,), allow_replication_factor_change=factor)
    assert answer.error_code is NONE
    return [(row.error_code, row.error_message) for row in answer.responses[0].partitions]


async def reassignments(client: WireClient, *indexes: int) -> dict[tuple[str, int], Any]:
    wanted = (part(LIST, 0, "ListPartitionReassignmentsTopics", name="flights", partition_indexes=indexes),)
    answer = await client.send(LIST, 0, timeout=SECONDS, topics=wanted if indexes else None)
    return {(topic.name, row.partition_index): row for topic in answer.topics for row in topic.partitions}


async def test_a_reassignment_moves_the_owner_and_no_record(cluster: MiniCluster) -> None:
    raw = await cluster.connect()
    assert (await produce(raw, "flights", batch(b"v"))).error_code is NONE
    async with connect(cluster.bootstrap) as client:
        for version in versions(ALTER):
            assert await alter(client, version, (0, (2, 1))) == [(NONE, None)]
            await until_owned(cluster, 2)
            assert partition(cluster).reassigned_from is None
            assert await alter(client, version, (0, (1, 2))) == [(NONE, None)]
            await until_owned(cluster, 1)
        assert await reassignments(client) == {}
        assert await alter(client, 1, (0, None)) == [
            (ErrorCode.no_reassignment_in_progress, "no reassignment of this partition is in progress")
        ]
    async with asyncio.timeout(WAIT_S):
        while (answer := await fetch(raw, "flights", 0)).error_code is not NONE:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert answer.high_watermark == 1


async def stall(cluster: MiniCluster, index: int = 0, **changes: Any) -> None:
    """Write a reassignment that its owner does not carry out, as if it were busy."""
    changed = msgspec.structs.replace(partition(cluster, index), **changes)
    await cluster.brokers[1].metadata.propose(Command(updates=(Put(record=changed),)))


async def test_a_reassignment_is_listed_until_it_is_over_and_can_be_cancelled(cluster: MiniCluster) -> None:
    await stall(cluster, replicas=(2, 1), reassigned_from=(1, 2))
    async with connect(cluster.bootstrap) as client:
        for found in (await reassignments(client), await reassignments(client, 0)):
            row = found.pop(("flights", 0))
            assert (row.replicas, row.adding_replicas, row.removing_replicas, found) == ((2, 1), (), (), {})
        assert await reassignments(client, 1) == {}
        assert await alter(client, 1, (0, None)) == [(NONE, None)]
        assert await reassignments(client) == {}
        restored = partition(cluster)
        assert (restored.owner, restored.replicas, restored.reassigned_from) == (1, (1, 2), None)
        await stall(cluster, replicas=(2,), reassigned_from=(1, 2))
        row = (await reassignments(client))[("flights", 0)]
        assert (row.replicas, row.adding_replicas, row.removing_replicas) == ((2, 1), (), (1,))


async def test_orders_of_a_broker_that_does_not_reach_the_metadata_fail_as_a_whole(
    cluster: MiniCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are decided on what was committed before the request, so a broker that cannot find out decides nothing."""

    async def refresh(timeout_s: float) -> int:
        raise Unavailable("no metadata node answered")

    for broker in cluster.brokers.values():
        monkeypatch.setattr(broker.metadata, "refresh", refresh)
    async with connect(cluster.bootstrap) as client:
        rows = (part(ALTER, 1, "ReassignablePartition", partition_index=0, replicas=(2, 1)),)
        wanted = (part(ALTER, 1, "ReassignableTopic", name="flights", partitions=rows),)
        altered = await client.send(ALTER, 1, timeout=SECONDS, topics=wanted, allow_replication_factor_change=True)
        elected = await client.send(ELECT, 2, election_type=0, topic_partitions=None, timeout=SECONDS)

    assert (altered.error_code, altered.error_message) == (ErrorCode.request_timed_out, "no metadata node answered")
    assert elected.error_code is ErrorCode.request_timed_out
    assert partition(cluster).next_owner == NO_OWNER


async def test_a_cancellation_and_a_handover_exclude_each_other(cluster: MiniCluster) -> None:
    """Whichever comes first: either the partition moves, or it keeps its owner and its order of brokers."""
    outcomes = set()
    async with connect(cluster.bootstrap) as client:
        for pause_s in (0.0, 0.0, 0.001, 0.002, 0.004, None):
            before = partition(cluster)
            wanted = before.replicas[::-1]
            assert await alter(client, 1, (0, wanted)) == [(NONE, None)]
            if pause_s is None:
                await until_owned(cluster, wanted[0])
            else:
                await asyncio.sleep(pause_s)
            ((code, _),) = await alter(client, 1, (0, None))
            after = partition(cluster)
            assert after.reassigned_from is None
            if code is NONE:
                assert (after.owner, after.replicas, after.leader_epoch) == (before.owner, before.replicas, before.leader_epoch)
            else:
                assert code is ErrorCode.no_reassignment_in_progress
                assert (after.owner, after.replicas) == (wanted[0], wanted)
            outcomes.add(code)
            await until_owned(cluster, after.replicas[0])
    assert ErrorCode.no_reassignment_in_progress in outcomes, "the last one was over"


async def test_a_dead_owner_ends_a_reassignment(cluster: MiniCluster) -> None:
    await stall(cluster, index=1, replicas=(1, 2), reassigned_from=(2, 1))
    await cluster.brokers.pop(2).stop()
    await until_owned(cluster, 1, index=1)
    assert partition(cluster, 1).reassigned_from is None


@pytest.mark.parametrize(
    ("replicas", "code", "complaint"),
    [
        ((), INVALID, "name at least one broker"),
        ((1, 1), INVALID, "each once"),
        ((1, 9), INVALID, "no live broker has the id 9"),
        ((1,), ErrorCode.invalid_replication_factor, "assign all 2 partitions another number"),
    ],
)
async def test_an_assignment_that_does_not_fit_is_refused(
    cluster: MiniCluster, replicas: tuple[int, ...], code: ErrorCode, complaint: str
) -> None:
    async with connect(cluster.bootstrap) as client:
        (refused, accepted) = await alter(client, 1, (0, replicas), (9, (1, 2)))
        assert (refused[0], complaint in str(refused[1])) == (code, True)
        assert accepted[0] is ErrorCode.unknown_topic_or_partition
        ((unknown, _),) = await alter(client, 1, (0, (1, 2)), topic="unknown")
        assert unknown is ErrorCode.unknown_topic_or_partition


async def test_an_assignment_of_all_partitions_changes_the_replication_factor_if_that_is_allowed(cluster: MiniCluster) -> None:
    rows = (0, (2,)), (1, (2,))
    async with connect(cluster.bootstrap) as client:
        refused = await alter(client, 1, *rows, factor=False)
        assert [code for code, _ in refused] == [ErrorCode.invalid_replication_factor] * 2
        assert [code for code, _ in await alter(client, 1, *rows)] == [NONE] * 2
        await until_owned(cluster, 2)
        topic = cluster.broker.metadata.view.find(Topic, topic_key("flights"))
        assert topic is not None
        assert topic.replication_factor == 1


async def elect(client: WireClient, version: int, *indexes: int, kind: int = 0, topic: str = "flights") -> dict[int, ErrorCode]:
    wanted = (part(ELECT, version, "TopicPartitions", topic=topic, partitions=indexes),) if indexes else None
    answer = await client.send(ELECT, version, election_type=kind, topic_partitions=wanted, timeout=SECONDS)
    return {row.partition_id: row.error_code for found in answer.replica_election_results for row in found.partition_result}


async def test_elections_move_partitions_to_their_preferred_owners(cluster: MiniCluster) -> None:
    not_needed = ErrorCode.election_not_needed
    async with connect(cluster.bootstrap) as client:
        for version in versions(ELECT):
            await stall(cluster, next_owner=2)
            await until_owned(cluster, 2)
            assert await elect(client, version, 0, 1, 9) == {0: NONE, 1: not_needed, 9: ErrorCode.unknown_topic_or_partition}
            assert partition(cluster).owner == 1
            await stall(cluster, next_owner=2)
            await until_owned(cluster, 2)
            assert await elect(client, version) == {0: NONE}
        assert await elect(client, 2, 0, kind=1) == {0: not_needed}
        assert await elect(client, 2, 0, kind=1, topic="unknown") == {0: ErrorCode.unknown_topic_or_partition}


async def test_a_preferred_leader_that_is_dead_is_not_elected(cluster: MiniCluster) -> None:
    await cluster.brokers.pop(2).stop()
    await until_owned(cluster, 1, index=1)
    async with connect(cluster.bootstrap) as client:
        assert await elect(client, 2, 1) == {1: ErrorCode.preferred_leader_not_available}
