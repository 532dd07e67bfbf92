"""Policies of a topic, changed while a worker runs: copying paused and resumed, topics that are only hot, storage classes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from stratalog_core.system import SystemClock
from stratalog_metadata.records import Bookie, DynamicConfig, Topic
from stratalog_metadata.state.commands import Command, Put, VersionIs
from stratalog_tiering.cold.manifest_source import ManifestSource
from stratalog_tiering.cold.reader import ColdReader, ColdReaderSettings
from stratalog_tiering.maintenance.merging import FAN_IN

Cluster = Any  # the TestCluster of conftest.py, which cannot be imported
Batches = Callable[..., list[bytes]]
HOUR_MS = 3_600_000


async def set_configs(cluster: Cluster, configs: dict[str, str]) -> None:
    topic: Topic = msgspec.structs.replace(cluster.topic, configs=configs)
    await cluster.metadata.propose(Command(updates=(Put(record=topic),)))


async def read_cold(cluster: Cluster) -> bytes:
    reader = ColdReader(cluster.store, ColdReaderSettings(), SystemClock())
    pointer = cluster.pointer()
    content = (await reader.fetch(pointer, pointer.start_offset, 2**30, 10)).batches
    await reader.close()
    return b"".join(content)


async def until_copied(cluster: Cluster, partition: int, end_offset: int) -> None:
    await cluster.until(lambda: (p := cluster.pointer(partition)) is not None and p.end_offset == end_offset)


async def test_a_pause_of_copying_leaves_no_gap(cluster: Cluster, make_batches: Batches) -> None:
    """The verified copy of the first ledger is dropped meanwhile; copying goes on where the manifest ends."""
    first, second, third = make_batches(0, [3]), make_batches(3, [3]), make_batches(6, [4])
    await cluster.add_ledger(first, 0)
    await cluster.start_worker()
    await until_copied(cluster, 0, 3)
    await set_configs(cluster, {"retention.ms": "-1", "remote.log.copy.disable": "true"})
    for base, batches in ((3, second), (6, third)):
        await cluster.add_ledger(batches, base)
        await cluster.add_ledger(batches, base, partition=1)
    await cluster.until(lambda: len(cluster.log().ledgers) == 2)
    assert cluster.pointer().end_offset == 3
    assert cluster.pointer(1) is None
    await set_configs(cluster, {"retention.ms": "-1"})
    await until_copied(cluster, 0, 10)
    await until_copied(cluster, 1, 10)
    assert cluster.pointer(1).start_offset == 3
    assert await read_cold(cluster) == b"".join([*first, *second, *third])
    await cluster.until(lambda: not cluster.log().ledgers)


async def test_a_default_for_all_topics_pauses_copying(cluster: Cluster, make_batches: Batches) -> None:
    """A topic's own value goes before it; the topic's records are copied although all others are paused."""
    paused, resumed = (DynamicConfig(resource="", configs={"remote.log.copy.disable": value}) for value in ("true", "false"))
    await cluster.metadata.propose(Command(updates=(Put(record=paused),)))
    await cluster.start_worker()
    await cluster.add_ledger(make_batches(0, [3]), 0)
    await set_configs(cluster, {"retention.ms": "-1", "remote.log.copy.disable": "false"})
    await until_copied(cluster, 0, 3)
    await set_configs(cluster, {"retention.ms": "-1"})
    await cluster.add_ledger(make_batches(3, [3]), 3)
    await cluster.until(lambda: [ref.base_offset for ref in cluster.log().ledgers] == [3])
    assert cluster.pointer().end_offset == 3
    await cluster.metadata.propose(Command(updates=(Put(record=resumed),)))
    await until_copied(cluster, 0, 6)


@pytest.mark.parametrize("config", [("remote.log.copy.disable", "true"), ("remote.storage.enable", "false")])
async def test_while_nothing_is_copied_only_the_topics_own_retention_removes_records(
    cluster: Cluster, make_batches: Batches, config: tuple[str, str]
) -> None:
    """One ledger is cold, two are past retention, one holds a record that is not; a local retention of 0 has no say."""
    policy = {"retention.ms": "300", "local.retention.ms": "0", **dict([config])}
    soon_ms = SystemClock().wall_ms() + HOUR_MS
    await set_configs(cluster, policy)
    await cluster.start_worker()
    for base in (0, 3):
        await cluster.add_ledger(make_batches(base, [3]), base)
    young = await cluster.add_ledger(make_batches(6, [3], timestamps=[5, soon_ms, 5]), 6)
    later = [await cluster.add_ledger(make_batches(base, [3]), base) for base in (9, 12)]
    await cluster.until(lambda: cluster.log().log_start_offset == 6)
    assert [ref.ledger_id for ref in cluster.log().ledgers] == [each.ledger_id for each in (young, *later)]
    assert cluster.pointer() is None
    assert cluster.last_error() == ""
    await set_configs(cluster, {"retention.ms": "-1"})
    await until_copied(cluster, 0, 15)
    assert (cluster.pointer().start_offset, cluster.log().log_start_offset) == (6, 6)


NOT_COPIED = {"retention.ms": "100", "remote.storage.enable": "false"}


async def test_records_expire_only_once_a_later_ledger_has_some(cluster: Cluster, make_batches: Batches) -> None:
    """The last ledger of a crashed owner is empty, and may lack the state of producers; the one before must still have it."""
    await set_configs(cluster, NOT_COPIED)
    first, second = [await cluster.add_ledger(make_batches(base, [3]), base) for base in (0, 3)]
    empty = await cluster.add_ledger([], 6)
    await cluster.start_worker(retention_interval_ms=20)
    await cluster.until(lambda: set(cluster.ledgers.deleted) == {first.ledger_id})
    await asyncio.sleep(0.3)
    assert [ref.ledger_id for ref in cluster.log().ledgers] == [second.ledger_id, empty.ledger_id]
    await cluster.add_ledger(make_batches(6, [3]), 6)
    await cluster.until(lambda: cluster.log().log_start_offset == 6)


async def test_records_expire_only_once_the_open_ledger_has_confirmed_ones(cluster: Cluster, make_batches: Batches) -> None:
    await set_configs(cluster, NOT_COPIED)
    sealed = await cluster.add_ledger(make_batches(0, [3]), 0)
    opened = await cluster.add_ledger([], 3, closed=False)
    await cluster.start_worker(retention_interval_ms=20)
    await asyncio.sleep(0.4)
    assert [ref.ledger_id for ref in cluster.log().ledgers] == [sealed.ledger_id, opened.ledger_id]
    cluster.ledgers.entries[opened.ledger_id] += make_batches(3, [3])
    await cluster.until(lambda: cluster.log().log_start_offset == 3)


async def test_retention_during_a_pause_reaches_cold_records_first_and_then_hot_ones(
    cluster: Cluster, make_batches: Batches
) -> None:
    now_ms = SystemClock().wall_ms()
    await cluster.start_worker()
    await cluster.add_ledger(make_batches(0, [3], timestamps=[now_ms] * 3), 0)
    await until_copied(cluster, 0, 3)
    await set_configs(cluster, {"retention.ms": str(2 * HOUR_MS), "remote.log.copy.disable": "true"})
    for base in (3, 6, 9):
        await cluster.add_ledger(make_batches(base, [3]), base)
    await set_configs(cluster, {"retention.ms": "200", "remote.log.copy.disable": "true"})
    await cluster.until(lambda: cluster.log().log_start_offset == 9)
    await cluster.until(lambda: cluster.pointer().start_offset == cluster.pointer().end_offset == 3)
    await set_configs(cluster, {"retention.ms": "-1"})
    await until_copied(cluster, 0, 12)
    assert cluster.pointer().start_offset == 9


async def test_retention_by_size_holds_while_nothing_is_copied(cluster: Cluster, make_batches: Batches) -> None:
    await set_configs(cluster, {"retention.ms": "-1", "remote.storage.enable": "false"})
    await cluster.start_worker()
    ledgers = [await cluster.add_ledger(make_batches(base, [10]), base) for base in range(0, 50, 10)]
    size = ledgers[-1].payload_bytes
    await set_configs(cluster, {"retention.ms": "-1", "remote.storage.enable": "false", "retention.bytes": str(2 * size)})
    await cluster.until(lambda: cluster.log().log_start_offset == 30)
    assert [ref.base_offset for ref in cluster.log().ledgers] == [30, 40]
    assert not [key for name, key in cluster.store.calls if name == "put" and key.startswith("segments/")]


async def test_deleted_records_leave_the_bookies_while_nothing_is_copied(cluster: Cluster, make_batches: Batches) -> None:
    """As those of a topic that a stream processor purges: it has no retention of its own."""
    await set_configs(cluster, {"retention.ms": "-1", "remote.storage.enable": "false"})
    await cluster.start_worker()
    for base in range(0, 40, 10):
        await cluster.add_ledger(make_batches(base, [10]), base)
    stored = cluster.metadata.view.get(cluster.log().key())
    start = Put(record=msgspec.structs.replace(cluster.log(), log_start_offset=25))
    await cluster.metadata.propose(
        Command(updates=(start,), requirements=(VersionIs(key=stored.record.key(), version=stored.version),))
    )
    await cluster.until(lambda: [ref.base_offset for ref in cluster.log().ledgers] == [20, 30], 5)
    assert cluster.log().log_start_offset == 25


async def test_a_bookie_that_runs_low_on_space_gets_rid_of_what_is_cold(cluster: Cluster, make_batches: Batches) -> None:
    """The worker acts when the bookie's record changes, and the records stay readable."""
    batches = make_batches(0, [3])
    await set_configs(cluster, {"retention.ms": "-1", "local.retention.ms": "-1"})
    await cluster.start_worker()
    stored = await cluster.add_ledger(batches, 0)
    await until_copied(cluster, 0, 3)
    assert len(cluster.log().ledgers) == 1
    bookie = Bookie(bookie_id=stored.fragments[0].bookies[0], address="h:1", cookie="c")
    for record in (bookie, msgspec.structs.replace(bookie, low_on_space=True)):
        await cluster.metadata.propose(Command(updates=(Put(record=record),)))
    await cluster.until(lambda: not cluster.log().ledgers)
    assert await read_cold(cluster) == b"".join(batches)


async def test_new_and_merged_segments_have_the_storage_class_of_the_topic(cluster: Cluster, make_batches: Batches) -> None:
    """A directory refuses classes, so the store here drops them. The hot copy stays while they are refused."""
    classes: list[tuple[str, str]] = []
    put = cluster.store.put

    async def put_anywhere(key: str, parts: Any, *, if_absent: bool = True, storage_class: str = "", lock: Any = None) -> None:
        if key.endswith(".segment"):
            classes.append((key, storage_class))
        await put(key, parts, if_absent=if_absent)

    await set_configs(cluster, {"retention.ms": "-1", "stratalog.tier.storage.class": "STANDARD_IA"})
    await cluster.start_worker("worker-1", segment_bytes=1)
    await cluster.add_ledger(make_batches(0, [3]), 0)
    await cluster.until(lambda: "has no storage classes such as 'STANDARD_IA'" in cluster.last_error())
    assert len(cluster.log().ledgers) == 1
    cluster.store.put = put_anywhere
    await until_copied(cluster, 0, 3)
    await set_configs(cluster, {"retention.ms": "-1", "stratalog.tier.storage.class": "STANDARD"})
    for base in range(3, 3 * FAN_IN, 3):
        await cluster.add_ledger(make_batches(base, [3]), base)
    await until_copied(cluster, 0, 3 * FAN_IN)
    manifest = await ManifestSource(cluster.store).manifest(cluster.pointer())
    assert [entry.options.storage_class for entry in manifest.segments] == ["STANDARD_IA", *[""] * (FAN_IN - 1)]
    assert [given for _, given in classes] == ["STANDARD_IA", *[""] * (FAN_IN - 1)]
    await set_configs(cluster, {"retention.ms": "-1", "stratalog.tier.storage.class": "ONEZONE_IA"})
    await cluster.close()
    version = cluster.pointer().manifest_version
    await cluster.start_worker("worker-2")
    await cluster.until(lambda: cluster.pointer().manifest_version > version)
    (entry,) = (await ManifestSource(cluster.store).manifest(cluster.pointer())).segments
    assert (entry.options.storage_class, classes[-1]) == ("ONEZONE_IA", (entry.key, "ONEZONE_IA"))
