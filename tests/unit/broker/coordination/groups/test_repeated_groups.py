"""OffsetFetch that names a group many times: its response must not be many times the group's offsets."""

from __future__ import annotations

import asyncio

from kio.schema.errors import ErrorCode as E
from unit.broker.coordination.groups.test_large_commits import FIND, GROUP, coordinator
from unit.broker.mini_cluster import WAIT_S, MiniCluster
from unit.broker.wire_client import connect, part

from stratalog_broker.coordination.groups.core.records import CommittedOffset, OffsetKey

FETCH = 9
OFFSETS = 1_000
TIMES = 100


async def test_all_offsets_of_a_group_are_sent_once(flights: MiniCluster) -> None:
    async with asyncio.timeout(WAIT_S), connect(flights.bootstrap) as client:
        while (await client.send(FIND, 3, key=GROUP, key_type=0)).error_code is not E.none:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        store = (await coordinator(flights))._store
        for index in range(OFFSETS):
            committed = CommittedOffset(offset=index, leader_epoch=-1, metadata="", committed_at_ms=0)
            store.put(OffsetKey(GROUP, "elsewhere", index), committed)
        groups = tuple(
            part(FETCH, 9, "OffsetFetchRequestGroup", group_id=GROUP, member_id=None, member_epoch=-1 - time_, topics=None)
            for time_ in range(TIMES)
        )
        answer = await client.send(FETCH, 9, groups=groups, require_stable=False)
        rows = sum(len(topic.partitions) for group in answer.groups for topic in group.topics)
        assert rows == OFFSETS
