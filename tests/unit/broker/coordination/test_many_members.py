"""The load generator's members of many groups: stable, and again after members have left or a broker has died."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from unit.broker.mini_cluster import WAIT_S, MiniCluster, run_cluster

from stratalog_loadgen.clients.many_members import GroupsFailed, ManyMembers

GROUPS = [f"group-{number}" for number in range(6)]


async def test_groups_are_stable_again_after_one_of_each_has_left(mini_cluster: MiniCluster) -> None:
    clients = ManyMembers(mini_cluster.bootstrap, GROUPS, 3, heartbeat_s=0.05)
    try:
        clients.start()
        await clients.stable([-1] * len(GROUPS), WAIT_S)
        assert clients.connected == 3 * len(GROUPS)
        before = clients.generations
        await clients.leave(1)
        await clients.stable(before, WAIT_S)
        assert clients.connected == 2 * len(GROUPS)
        assert all(now > then for now, then in zip(clients.generations, before, strict=True))
        with pytest.raises(GroupsFailed, match="0 members are not stable after 0 s"):
            await clients.stable(clients.generations, 0.0)
    finally:
        await clients.close()


async def test_members_find_the_next_coordinator_and_keep_their_generation(tmp_path: Path) -> None:
    async with run_cluster(tmp_path, brokers=2) as cluster:
        clients = ManyMembers(cluster.bootstrap, GROUPS, 3, heartbeat_s=0.05)
        try:
            clients.start()
            await clients.stable([-1] * len(GROUPS), WAIT_S)
            before, joins = clients.generations, clients.joins
            coordinator, members = clients.groups[0].coordinator, [each for group in clients.groups for each in group.members]
            dying = next(number for number, each in cluster.brokers.items() if each.server.kafka_address == coordinator)
            await cluster.brokers.pop(dying).kill()
            async with asyncio.timeout(WAIT_S):
                while any(each.is_connected and each._address == coordinator for each in members):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            await clients.stable([generation - 1 for generation in before], WAIT_S)
            assert (clients.generations, clients.joins) == (before, joins)
            await clients.leave(1)
            await clients.stable(before, WAIT_S)
        finally:
            await clients.close()
