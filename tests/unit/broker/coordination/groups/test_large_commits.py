"""Commits of offsets whose records do not fit into one entry of a ledger."""

from __future__ import annotations

import asyncio

from kio.schema.errors import ErrorCode as E
from unit.broker.conftest import FLIGHTS
from unit.broker.mini_cluster import WAIT_S, MiniCluster
from unit.broker.wire_client import connect, part

from stratalog_bookies.client.ledger_writer import ENTRY_BYTES_MAX
from stratalog_broker.coordination.groups.application import GroupApplication
from stratalog_broker.protocol.errors import KafkaError

FIND, COMMIT = 10, 8
GROUP = "g"
METADATA = "m" * 4_000


async def test_a_commit_that_is_too_large_leaves_the_groups_with_their_coordinator(flights: MiniCluster) -> None:
    async with asyncio.timeout(WAIT_S), connect(flights.bootstrap) as client:
        while (await client.send(FIND, 3, key=GROUP, key_type=0)).error_code is not E.none:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        loaded = await coordinator(flights)
        row = part(
            COMMIT, 7, "OffsetCommitRequestPartition", partition_index=0, committed_offset=1, committed_leader_epoch=-1,
            committed_metadata=METADATA,
        )  # fmt: skip
        rows = (row,) * (ENTRY_BYTES_MAX // (len(METADATA) + 60))
        topic = part(COMMIT, 7, "OffsetCommitRequestTopic", name=FLIGHTS, partitions=rows)
        answer = await client.send(
            COMMIT, 7, group_id=GROUP, generation_id_or_member_epoch=-1, member_id="", group_instance_id=None, topics=(topic,)
        )
        codes = {one.error_code for one in answer.topics[0].partitions}
        assert await coordinator(flights) is loaded, f"answered {codes}, and the partition was taken over again"
        assert codes == {E.invalid_commit_offset_size}


async def coordinator(cluster: MiniCluster) -> GroupApplication:
    """The group's coordinator, once it is loaded."""
    while True:
        try:
            return cluster.broker.groups.coordinator_of(GROUP)
        except KafkaError:
            await asyncio.sleep(0.02)
