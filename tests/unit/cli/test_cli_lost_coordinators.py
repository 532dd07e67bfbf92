"""``tier restore-coordinators``: groups work again after a restore of metadata that knows only ledgers that are deleted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

from click.testing import CliRunner
from unit.broker.mini_cluster import WAIT_S, MiniCluster, in_thread, run_cluster
from unit.broker.partitions.test_internal_topics import Offsets, restart

from stratalog.app import stratalog
from stratalog.health.coordinators import check_coordinators
from stratalog.health.finding import Verdict
from stratalog.hot.session import ledger_client
from stratalog.tier.lost_coordinators import LostPartitions, find_lost
from stratalog_broker.partitions.internal_topics import CONSUMER_OFFSETS
from stratalog_broker.partitions.state_uploads import StateUploads
from stratalog_core.system import SystemClock
from stratalog_metadata.records import Ledger, Topic, ledger_key
from stratalog_metadata.state.commands import Command, Put
from stratalog_tiering.offload.coordinator_states import CoordinatorStates
from stratalog_tiering.offload.ownership import claim_bucket, cluster_id_in

EXIT_FINDINGS = 7
FLIGHTS = Topic(name="flights", topic_id=UUID(int=7), partition_count=2, replication_factor=1)
INTERVAL_MS = 300_000
OLD_EPOCH_S = 120.0


class Run:
    """The command on a cluster."""

    def __init__(self, cluster: MiniCluster) -> None:
        self._cluster = cluster

    async def __call__(self, *options: str, expect: int = 0) -> dict[str, Any]:
        where = ["--metadata", ",".join(self._cluster.addresses), "--store", str(self._cluster.path / "store")]
        command = ["tier", "restore-coordinators", *where, "--json", *options]
        done = await in_thread(lambda: CliRunner().invoke(stratalog, command))
        assert done.exit_code == expect, done.output
        document = json.loads(done.stdout)
        assert isinstance(document, dict)
        return document


async def lost_in(cluster: MiniCluster) -> LostPartitions:
    await cluster.refresh()
    async with ledger_client(cluster.metadata) as ledgers:
        return await find_lost(cluster.metadata.view, ledgers)


async def store_states(cluster: MiniCluster) -> None:
    """Store the coordinators' states in the bucket, as the broker does every few minutes."""
    await claim_bucket(cluster.store, cluster_id_in(cluster.metadata), SystemClock().wall_ms())
    (broker,) = cluster.brokers.values()
    states = CoordinatorStates(cluster.store, broker.metadata, SystemClock())
    await StateUploads(broker.server.partitions.all, states, SystemClock(), INTERVAL_MS).run_round()


@asynccontextmanager
async def restored_from_an_old_copy(path: Path, *, stores: bool) -> AsyncIterator[tuple[MiniCluster, Offsets]]:
    """A cluster whose metadata names a ledger of the group's partition that was deleted since. No broker runs.

    Committed were 41 for partition 0 of ``flights``, then 42 for partition 1.
    """
    async with run_cluster(path, bookies=3, brokers=1) as cluster:
        offsets = Offsets(cluster)
        await cluster.metadata.propose(Command(updates=(Put(record=FLIGHTS),)))
        await offsets.commit(0, 0)
        old_log = offsets.log
        (ref,) = old_log.ledgers
        old = cluster.metadata.view.find(Ledger, ledger_key(ref.ledger_id))
        assert old is not None
        await restart(cluster)
        await offsets.commit(1, 42)
        await offsets.until_trimmed()
        if stores:
            await store_states(cluster)
        async with asyncio.timeout(WAIT_S):
            while any(ref.ledger_id in disk.core.contents.ledgers for each in cluster.bookies.values() for disk in each._disks):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        ((broker_id, broker),) = cluster.brokers.items()
        del cluster.brokers[broker_id]
        await broker.kill()
        await cluster.metadata.propose(Command(updates=(Put(record=old_log), Put(record=old))))
        await cluster.start_broker(broker_id + 1)
        yield cluster, offsets


async def test_a_ledger_that_one_bookie_has_deleted_is_lost(tmp_path: Path) -> None:
    """The other bookies have an older state than the lost history had. Nobody could take the partition over either."""
    async with restored_from_an_old_copy(tmp_path, stores=False) as (cluster, _):
        found = await lost_in(cluster)
        (lost,) = found.lost
        (ref,) = lost.log.ledgers
        holder, *_ = cluster.bookies.values()
        holder._disks[0].core.contents.tombstones.pop(ref.ledger_id)
        holder._disks[0].core.contents.ledger(ref.ledger_id).last_entry = 3
        assert [each.name for each in (await lost_in(cluster)).lost] == [lost.name]


async def test_groups_continue_with_the_state_in_the_bucket(tmp_path: Path) -> None:
    async with restored_from_an_old_copy(tmp_path, stores=True) as (cluster, offsets):
        run = Run(cluster)
        (lost,) = (await lost_in(cluster)).lost
        assert (lost.topic.name, lost.partition.index) == (CONSUMER_OFFSETS, offsets.identity.partition)
        finding = await check_coordinators(cluster.metadata)
        assert finding.verdict is Verdict.FAIL
        assert lost.name in finding.detail
        assert "stratalog tier restore-coordinators" in finding.remedy

        planned = await run("--dry-run")
        assert [row["state"] for row in planned["partitions"]] == ["can be restored"]
        assert (await lost_in(cluster)).lost == [lost], "a dry run changes nothing"

        restored = await run("--yes")
        (row,) = restored["partitions"]
        assert (row["topic"], row["partition"], row["state"]) == (CONSUMER_OFFSETS, offsets.identity.partition, "restored")
        assert row["ledgers"] == [ref.ledger_id for ref in lost.log.ledgers]
        groups = restored["groups"]
        assert groups == planned["groups"]
        assert groups["groups"] == ["readers"]
        assert groups["moved"] == [
            {"group_id": "readers", "topic": "flights", "partition": 1, "committed": 42, "restored": 0}
        ], "no record has this offset: the next ones must not be skipped"

        async with asyncio.timeout(OLD_EPOCH_S):
            assert await offsets.committed() == {0: 0, 1: 0}
            await offsets.commit(0, 43)
        await restart(cluster)
        assert await offsets.committed() == {0: 43, 1: 0}
        assert (await check_coordinators(cluster.metadata)).verdict is Verdict.OK
        assert (await run("--yes"))["partitions"] == []


async def test_without_a_state_a_partition_begins_empty_on_demand_only(tmp_path: Path) -> None:
    async with restored_from_an_old_copy(tmp_path, stores=False) as (cluster, offsets):
        run = Run(cluster)
        left = await run("--yes", expect=EXIT_FINDINGS)
        assert [row["state"] for row in left["partitions"]] == ["no state in the bucket"]
        assert len((await lost_in(cluster)).lost) == 1
        emptied = await run("--empty", "--yes")
        assert [row["state"] for row in emptied["partitions"]] == ["begins empty"]
        async with asyncio.timeout(OLD_EPOCH_S):
            await offsets.commit(0, 43)
        assert await offsets.committed() == {0: 43}


async def test_nothing_is_decided_while_a_bookie_does_not_answer(tmp_path: Path) -> None:
    async with restored_from_an_old_copy(tmp_path, stores=False) as (cluster, offsets):
        await cluster.bookies["bookie-2"].close()
        left = await Run(cluster)("--empty", "--yes", expect=EXIT_FINDINGS)
        assert (left["partitions"], left["undecided"]) == (
            [],
            {f"{CONSUMER_OFFSETS}-{offsets.identity.partition}": ["bookie-2"]},
        )
        emptied = await Run(cluster)("--empty", "--yes", "--lost-bookie", "bookie-2")
        assert [row["state"] for row in emptied["partitions"]] == ["begins empty"]


async def test_a_partition_whose_ledgers_some_bookie_has_is_left_alone(tmp_path: Path) -> None:
    """Also one that nobody has written to, and one whose owner has just changed."""
    async with run_cluster(tmp_path, bookies=3, brokers=1) as cluster:
        offsets = Offsets(cluster)
        await offsets.commit(0, 41)
        await restart(cluster)
        assert await lost_in(cluster) == LostPartitions()
        for name in ("bookie-1", "bookie-2"):
            await cluster.bookies[name].close()
        assert await lost_in(cluster) == LostPartitions(), "one copy is enough"
