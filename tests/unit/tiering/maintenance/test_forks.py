"""With metadata that was rolled back, nothing is committed or deleted: markers in the store prove the lost history."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.archive_writer import ArchiveWriter
from support.directory_store import object_files

from stratalog_core.errors import Refused
from stratalog_core.system import SystemClock
from stratalog_metadata.records import (
    KEEP_METADATA,
    KEEP_STORE,
    ForkDecision,
    Log,
    ManifestPointer,
    Partition,
    TierRequest,
    Topic,
    fork_decision_key,
)
from stratalog_metadata.state.commands import Command, Delete, Put
from stratalog_tiering.cold.archive import Archive
from stratalog_tiering.cold.reader import ColdReader, ColdReaderSettings
from stratalog_tiering.core.forks import find_fork
from stratalog_tiering.format.object_keys import manifest_key, manifests_prefix, marker_key, segments_prefix
from stratalog_tiering.maintenance.fork_resolution import read_lines
from stratalog_tiering.store import ObjectInfo

Cluster = Any  # the TestCluster of conftest.py, which cannot be imported
Batches = Callable[..., list[bytes]]
TOPIC = UUID(int=1)


def listing(versions: Sequence[tuple[int, int]]) -> list[ObjectInfo]:
    """Manifests and markers of (version, line)."""
    keys = [manifest_key(TOPIC, 0, version, line) for version, line in versions]
    names = sorted([*keys, *map(marker_key, keys)])
    return [ObjectInfo(key=key, size_bytes=1, etag="", last_modified_ms=0) for key in names]


def line_of(line: int, *versions: int) -> dict[int, str]:
    return {version: manifest_key(TOPIC, 0, version, line) for version in versions}


@given(current=st.integers(1, 60), lost=st.integers(1, 50), since=st.integers(0, 50))
def test_any_rollback_is_detected_as_a_fork_after_any_number_of_commits(current: int, lost: int, since: int) -> None:
    """Metadata restored at ``current`` while the store was at ``current + lost``; then ``since`` commits of the new line."""
    former = [(version, 1) for version in range(1, current + lost + 1)]
    later = [(version, 2) for version in range(current + 1, current + since + 1)]
    own = line_of(2, current + since) if since else line_of(1, current)
    fork = find_fork(listing([*former, *later]), own)
    assert fork is not None
    assert fork.metadata_version == current + since
    assert fork.store_version >= current + min(lost, since)
    assert find_fork(listing(former), line_of(1, current + lost)) is None
    assert find_fork(listing([*former, *later]), {**own, fork.store_version: own.get(fork.store_version, "")}, 111) is None


def test_without_metadata_every_marker_is_a_fork() -> None:
    fork = find_fork(listing([(1, 1), (2, 1)]), {0: ""})
    assert fork is not None
    assert (fork.metadata_version, fork.store_version) == (0, 2)
    assert fork.store_key == manifest_key(TOPIC, 0, 2, 1)


def test_an_uncommitted_version_is_not_a_fork() -> None:
    losers = [info for info in listing([(5, 9), (6, 9)]) if info.key.endswith(".manifest")]
    assert find_fork([*losers, *listing([(4, 1), (5, 1)])], line_of(1, 5)) is None


def test_the_history_of_metadata_is_distinguished_from_the_other() -> None:
    both = listing([(3, 1), (4, 1), (4, 2), (5, 2)])
    fork = find_fork(both, line_of(2, 4, 5))
    assert fork is not None
    assert fork.store_key == manifest_key(TOPIC, 0, 4, 1)


def files_in(directory: Path) -> set[str]:
    return {path.name for path in object_files(directory)}


async def committed(cluster: Cluster, make_batches: Batches, base: int) -> ManifestPointer:
    await cluster.add_ledger(make_batches(base, [3]), base)
    await cluster.until(lambda: (p := cluster.pointer()) is not None and p.end_offset == base + 3 and not cluster.log().ledgers)
    pointer: ManifestPointer = cluster.pointer()
    return pointer


@pytest.mark.parametrize(("known", "lost"), [(3, 2), (1, 1), (2, 5)])
async def test_ordinary_commits_after_a_rollback_delete_nothing(
    cluster: Cluster, make_batches: Batches, store_directory: Path, known: int, lost: int
) -> None:
    worker = await cluster.start_worker()
    pointers = [await committed(cluster, make_batches, base) for base in range(0, 3 * (known + lost), 3)]
    await worker.close()
    history = files_in(store_directory)
    restored = pointers[known - 1]
    log: Log = msgspec.structs.replace(cluster.log(), ledgers=())
    await cluster.metadata.propose(Command(updates=(Put(record=restored), Put(record=log))))
    await cluster.start_worker("worker-2", grace_ms=0)
    for base in range(restored.end_offset, restored.end_offset + 9, 3):
        await cluster.add_ledger(make_batches(base, [3]), base)
    await cluster.until(lambda: cluster.last_error().startswith("Forked: history of flights-0 has forked"))
    assert f"manifest version {known + lost} " in cluster.last_error()
    assert "stratalog tier resolve-fork flights 0 --keep" in cluster.last_error()
    assert cluster.pointer() == restored
    assert history == files_in(store_directory), "neither is anything written before the fork is noticed"


async def forked(cluster: Cluster, make_batches: Batches, known: int, lost: int) -> None:
    """Metadata is restored ``lost`` versions back, and the log goes on from there."""
    worker = await cluster.start_worker()
    pointers = [await committed(cluster, make_batches, base) for base in range(0, 3 * (known + lost), 3)]
    await worker.close()
    restored = pointers[known - 1] if known else None
    log: Log = msgspec.structs.replace(cluster.log(), ledgers=())
    pointer = Put(record=restored) if restored is not None else Delete(key=pointers[0].key())
    await cluster.metadata.propose(Command(updates=(pointer, Put(record=log))))


async def decide(cluster: Cluster, keep: str, *, discard_hot: bool = False) -> ForkDecision:
    topic_id = cluster.topic.topic_id
    lines = await read_lines(cluster.store, manifests_prefix(topic_id, 0), cluster.pointer())
    assert lines is not None
    decision = ForkDecision(
        topic_id=topic_id, index=0, keep=keep, metadata_key=lines.fork.metadata_key, store_key=lines.fork.store_key,
        discard_hot=discard_hot,
    )  # fmt: skip
    await cluster.metadata.propose(Command(updates=(Put(record=decision),)))
    return decision


def outcome(cluster: Cluster) -> str | None:
    """Return why the decision was refused, an empty text if it was carried out, or None if it is pending."""
    decision = cluster.metadata.view.find(ForkDecision, fork_decision_key(cluster.topic.topic_id, 0))
    return "" if decision is None else decision.refused or None


@pytest.mark.parametrize(("known", "keep"), [(2, KEEP_METADATA), (2, KEEP_STORE), (0, KEEP_METADATA), (0, KEEP_STORE)])
async def test_a_decision_keeps_one_line_and_deletes_the_other_after_the_grace_period(
    cluster: Cluster, make_batches: Batches, store_directory: Path, known: int, keep: str
) -> None:
    await forked(cluster, make_batches, known, 3)
    both = files_in(store_directory)
    worker = await cluster.start_worker("worker-2")
    end = 3 * known if keep == KEEP_METADATA else 3 * (known + 3)
    await decide(cluster, keep)
    await cluster.until(lambda: outcome(cluster) == "" and cluster.last_error() == "")
    pointer = cluster.pointer()
    assert (pointer.manifest_version, pointer.end_offset) == (known + 4, end)
    await committed(cluster, make_batches, end)
    assert both <= files_in(store_directory), "nothing is deleted before the grace period has passed"
    reader = ColdReader(cluster.store, ColdReaderSettings(), SystemClock())
    found = await reader.fetch(cluster.pointer(), 0, 10**6, 10)
    assert b"".join(found.batches) == b"".join(make_batches(0, [3] * (end // 3 + 1)))
    await reader.close()
    assert (await cold_end(cluster)) == end + 3, "readers without metadata see the kept line"
    await worker.close()
    await cluster.start_worker("worker-3", grace_ms=0)
    wanted = 1 + end // 3
    async with asyncio.timeout(60):
        while segments_in(store_directory) > wanted or both & manifests_in(store_directory):
            cluster.store.deleted.clear()
            await cluster.store.deleted.wait()


def segments_in(directory: Path) -> int:
    return len(list(directory.glob("segments/*/*/*")))


def manifests_in(directory: Path) -> set[str]:
    return {path.name for path in directory.glob("manifests/*/*/*")}


async def cold_end(cluster: Cluster) -> int:
    archive = Archive(cluster.store)
    pointer = await archive.pointer(await archive.topic("flights"), 0)
    assert pointer is not None
    return pointer.end_offset


async def test_a_decision_of_another_fork_is_refused(cluster: Cluster, make_batches: Batches) -> None:
    await forked(cluster, make_batches, 1, 1)
    decision = await decide(cluster, KEEP_STORE)
    changed = msgspec.structs.replace(decision, metadata_key="another")
    await cluster.metadata.propose(Command(updates=(Put(record=changed),)))
    await cluster.start_worker("worker-2")
    await cluster.until(lambda: outcome(cluster) is not None)
    assert "inspect it and decide again" in (outcome(cluster) or "")
    assert cluster.pointer().manifest_version == 1


async def test_a_decision_waits_while_the_store_refuses_requests(cluster: Cluster, make_batches: Batches) -> None:
    await forked(cluster, make_batches, 1, 1)
    await decide(cluster, KEEP_STORE)
    segments = segments_prefix(cluster.topic.topic_id, 0)
    cluster.store.before = lambda *call: Refused("access was refused") if call == ("list", segments) else None
    await cluster.start_worker("worker-2")
    await cluster.until(lambda: "access was refused" in f"{cluster.last_error()}{outcome(cluster)}")
    assert outcome(cluster) is None, "the decision is still pending"
    cluster.store.before = lambda name, key: None
    await cluster.until(lambda: outcome(cluster) == "")
    assert cluster.pointer().end_offset == 6


async def test_hot_records_that_do_not_continue_the_kept_line_are_discarded_on_demand_only(
    cluster: Cluster, make_batches: Batches
) -> None:
    await forked(cluster, make_batches, 1, 2)
    owned = Partition(topic_id=cluster.topic.topic_id, index=0, owner=1, leader_epoch=4)
    await cluster.metadata.propose(Command(updates=(Put(record=owned),)))
    await cluster.add_ledger(make_batches(3, [2]), 3)
    await cluster.start_worker("worker-2")
    await decide(cluster, KEEP_STORE)
    await cluster.until(lambda: outcome(cluster) is not None)
    assert "do not continue the store's history, which ends at offset 9" in (outcome(cluster) or "")
    assert len(cluster.log().ledgers) == 1
    await decide(cluster, KEEP_STORE, discard_hot=True)
    await cluster.until(lambda: outcome(cluster) == "")
    assert cluster.pointer().end_offset == 9
    assert cluster.log().ledgers == ()
    taken = cluster.metadata.view.find(Partition, owned.key())
    assert (taken.owner, taken.leader_epoch) == (-1, 5), "its owner would go on at offset 5"


async def test_a_fork_keeps_the_hot_copies(cluster: Cluster, make_batches: Batches) -> None:
    worker = await cluster.start_worker(deletion_lag_ms=3_600_000)
    await cluster.add_ledger(make_batches(0, [3]), 0)
    await cluster.until(lambda: cluster.pointer() is not None)
    await worker.close()
    newer = manifest_key(cluster.topic.topic_id, 0, cluster.pointer().manifest_version + 1, 7)
    await cluster.store.put(marker_key(newer), [b"of a version that metadata has forgotten"])
    request = TierRequest(topic_id=cluster.topic.topic_id, index=0, end_offset=3, delete_hot=True)
    await cluster.metadata.propose(Command(updates=(Put(record=request),)))
    await cluster.start_worker("worker-2")
    await cluster.until(lambda: "has forked" in cluster.last_error())
    assert len(cluster.log().ledgers) == 1
    assert not cluster.ledgers.deleted


@pytest.mark.parametrize("seed", range(4))
async def test_of_two_markers_of_an_earlier_version_metadatas_is_found_by_its_chain(
    store: Any, topic: Topic, make_batches: Batches, seed: int
) -> None:
    lines: list[list[ManifestPointer]] = []
    for line, versions in enumerate((5, 3)):
        writer = ArchiveWriter(store, topic, SystemClock(), random.Random(10 * seed + line))
        lines.append([(await writer.append(0, make_batches(3 * n, [3])))[0] for n in range(versions)])
    (*_, metadata), (*_, other) = lines
    found = await read_lines(store, manifests_prefix(topic.topic_id, 0), metadata)
    assert found is not None
    assert (found.fork.store_key, found.store.manifest.end_offset) == (other.object_key, 9)
    assert found.metadata is not None
    assert found.metadata.end_offset == 15
