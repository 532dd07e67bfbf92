"""Commits of members of a group that does not exist, in each version of OffsetCommit."""

from __future__ import annotations

import asyncio

from kio.schema.errors import ErrorCode as E
from unit.broker.conftest import FLIGHTS
from unit.broker.coordination.groups.test_large_commits import FIND, GROUP, coordinator
from unit.broker.mini_cluster import WAIT_S, MiniCluster
from unit.broker.transactional import partition_of
from unit.broker.wire_client import connect, part

COMMIT = 8


async def test_a_member_of_no_group_is_told_so_in_the_way_of_its_version(flights: MiniCluster) -> None:
    async with asyncio.timeout(WAIT_S), connect(flights.bootstrap) as client:
        while (await client.send(FIND, 3, key=GROUP, key_type=0)).error_code is not E.none:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        await coordinator(flights)
        for version in range(2, 11):
            row = part(
                COMMIT, version, "OffsetCommitRequestPartition", partition_index=0, committed_offset=1,
                committed_leader_epoch=-1, committed_metadata="",
            )  # fmt: skip
            topic_id = partition_of(flights, FLIGHTS).topic_id
            topic = part(COMMIT, version, "OffsetCommitRequestTopic", name=FLIGHTS, topic_id=topic_id, partitions=(row,))
            answer = await client.send(
                COMMIT, version, group_id=GROUP, generation_id_or_member_epoch=3, member_id="a", group_instance_id=None,
                topics=(topic,),
            )  # fmt: skip
            expected = E.group_id_not_found if version >= 9 else E.illegal_generation
            assert answer.topics[0].partitions[0].error_code is expected, version
