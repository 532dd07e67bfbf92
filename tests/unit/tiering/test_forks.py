"""Metadata that was rolled back commits and deletes nothing: markers in the store prove the history that it forgot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratalog_metadata.commands import Command, Put
from stratalog_metadata.records import Log, ManifestPointer, TierRequest
from stratalog_tiering.forks import find_fork
from stratalog_tiering.object_keys import manifest_key, marker_key
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
def test_any_rollback_is_a_fork_however_much_was_committed_since(current: int, lost: int, since: int) -> None:
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


def test_a_version_that_lost_its_race_is_no_fork() -> None:
    losers = [info for info in listing([(5, 9), (6, 9)]) if info.key.endswith(".manifest")]
    assert find_fork([*losers, *listing([(4, 1), (5, 1)])], line_of(1, 5)) is None


def test_the_line_of_metadata_is_told_from_the_other_by_what_is_known_of_it() -> None:
    both = listing([(3, 1), (4, 1), (4, 2), (5, 2)])
    fork = find_fork(both, line_of(2, 4, 5))
    assert fork is not None
    assert fork.store_key == manifest_key(TOPIC, 0, 4, 1)


def files_in(directory: Path) -> set[str]:
    return {path.name for path in directory.rglob("*") if path.is_file()}


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
    assert cluster.pointer() == restored
    assert history == files_in(store_directory), "neither is anything written before the fork is noticed"


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
