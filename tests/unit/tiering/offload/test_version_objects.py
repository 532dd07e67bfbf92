"""Manifests that are committed before they are stored, and forks that show when they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, cast
from uuid import UUID

import msgspec
import pytest

from stratalog_core.errors import OutcomeUnknown, StratalogError, Unavailable
from stratalog_core.system import SystemClock
from stratalog_metadata.records import KEEP_METADATA, ForkDecision, Lease, ManifestPointer, fork_decision_key, lease_key
from stratalog_metadata.state.commands import Command, Put
from stratalog_tiering.cold.manifest_source import ManifestSource
from stratalog_tiering.format.manifest import Manifest, encode_manifest
from stratalog_tiering.format.object_keys import is_version_object, manifest_key, manifests_prefix, version_key
from stratalog_tiering.maintenance.fork_resolution import read_lines
from stratalog_tiering.offload.commit_markers import RecentCommits
from stratalog_tiering.store import ObjectStore
from stratalog_tiering.worker.leases import partition_lease, preferred_worker

Cluster = Any  # the TestCluster of conftest.py, which cannot be imported
Batches = Callable[..., list[bytes]]
HOUR_MS: Final = 3_600_000


def is_manifest(name: str, key: str) -> bool:
    return name == "put" and is_version_object(key)


def failing(failure: StratalogError) -> Callable[[str, str], StratalogError | None]:
    """Fail each write of a manifest."""
    return lambda name, key: failure if is_manifest(name, key) else None


def is_cold(cluster: Cluster, offset: int) -> Callable[[], bool]:
    return lambda: cluster.pointer() is not None and cluster.pointer().end_offset == offset and not cluster.pointer().content


async def manifest_of(cluster: Cluster) -> Manifest:
    return await ManifestSource(cluster.store).manifest(cluster.pointer())


async def plant_successor(cluster: Cluster) -> str:
    """Store the next version as another worker would have, of which metadata knows nothing; returns its key."""
    manifest = await manifest_of(cluster)
    key = version_key(manifest.topic_id, manifest.partition, manifest.version + 1)
    lost = msgspec.structs.replace(manifest, version=manifest.version + 1, writer="forgotten", previous_key="x")
    await cluster.store.put(key, [encode_manifest(lost)])
    return key


async def test_a_manifest_is_in_metadata_until_it_is_in_the_store(
    cluster: Cluster, make_batches: Batches, store_directory: Path
) -> None:
    cluster.store.before = failing(Unavailable("the store is away"))
    await cluster.add_ledger(make_batches(0, [3]), 0)
    await cluster.start_worker(deletion_lag_ms=0, retry_ms_max=100)
    await cluster.until(lambda: "the store is away" in cluster.last_error())
    pointer = cluster.pointer()
    assert pointer.end_offset == 3
    assert not (store_directory / pointer.object_key).exists()
    assert [entry.end_offset for entry in (await manifest_of(cluster)).segments] == [3], "readers with metadata see it"
    assert len(cluster.log().ledgers) == 1, "the hot copy stays"
    cluster.store.before = lambda name, key: None
    await cluster.until(lambda: not cluster.log().ledgers)
    assert (store_directory / pointer.object_key).read_bytes() == pointer.content
    assert cluster.pointer() == msgspec.structs.replace(pointer, content=b"")


@pytest.mark.parametrize("has_effect", [True, False])
async def test_a_manifest_whose_write_was_not_answered_is_stored_once(
    cluster: Cluster, make_batches: Batches, has_effect: bool
) -> None:
    lost: list[str] = []

    def once(name: str, key: str) -> StratalogError | None:
        if not is_manifest(name, key) or lost:
            return None
        lost.append(key)
        return OutcomeUnknown("no answer")

    setattr(cluster.store, "after" if has_effect else "before", once)
    await cluster.add_ledger(make_batches(0, [3]), 0)
    await cluster.start_worker(deletion_lag_ms=0, retry_ms_max=100)
    await cluster.until(lambda: not cluster.log().ledgers)
    assert is_cold(cluster, 3)()
    assert cluster.pointer().manifest_version == 1
    assert lost == [cluster.pointer().object_key]


async def test_the_next_worker_stores_the_manifest_of_one_that_ended(cluster: Cluster, make_batches: Batches) -> None:
    cluster.store.before = failing(Unavailable("the store is away"))
    await cluster.add_ledger(make_batches(0, [3]), 0)
    worker = await cluster.start_worker("worker-1", deletion_lag_ms=HOUR_MS)
    await cluster.until(lambda: cluster.pointer() is not None)
    await worker.close()
    cluster.store.before = lambda name, key: None
    await cluster.start_worker("worker-2", deletion_lag_ms=0)
    await cluster.until(lambda: not cluster.log().ledgers)
    assert is_cold(cluster, 3)()


async def test_a_forgotten_version_is_found_when_the_next_one_is_stored(cluster: Cluster, make_batches: Batches) -> None:
    """The worker committed the newest version that metadata knows, so it does not list; what another committed is lost."""
    await cluster.add_ledger(make_batches(0, [3]), 0)
    await cluster.start_worker(deletion_lag_ms=HOUR_MS, retry_ms_max=100, sweep_interval_ms=24 * HOUR_MS)
    await cluster.until(is_cold(cluster, 3))
    planted = await plant_successor(cluster)
    content = await cluster.store.get(planted)
    cluster.store.calls.clear()
    await cluster.add_ledger(make_batches(3, [3]), 3)
    await cluster.until(lambda: "has forked" in cluster.last_error())
    ours = cluster.pointer()
    assert (ours.manifest_version, ours.end_offset) == (2, 6)
    assert ours.object_key != planted
    assert await cluster.store.get(planted) == content
    assert len(cluster.log().ledgers) == 2, "the hot copies stay"
    assert not [key for name, key in cluster.store.calls if name == "delete"]
    lines = await read_lines(cluster.store, manifests_prefix(ours.topic_id, 0), ours)
    assert lines is not None
    assert (lines.fork.metadata_key, lines.fork.store_key) == (ours.object_key, planted)
    assert lines.metadata is not None
    assert (lines.metadata.end_offset, lines.store.manifest.end_offset) == (6, 3)
    decision = ForkDecision(
        topic_id=ours.topic_id, index=0, keep=KEEP_METADATA, metadata_key=ours.object_key, store_key=planted, discard_hot=False
    )
    await cluster.metadata.propose(Command(updates=(Put(record=decision),)))
    await cluster.until(lambda: cluster.metadata.view.find(ForkDecision, fork_decision_key(ours.topic_id, 0)) is None)
    await cluster.add_ledger(make_batches(6, [3]), 6)
    await cluster.until(is_cold(cluster, 9))


async def test_a_forgotten_version_keeps_the_hot_copy(cluster: Cluster, make_batches: Batches) -> None:
    """The worker committed the version, but another one had the partition meanwhile; what that one committed is lost."""
    clock = WallClock()
    await cluster.add_ledger(make_batches(0, [3]), 0)
    lease = lease_key(partition_lease(cluster.topic.topic_id, 0))
    names = ["worker-1", "worker-2"]
    second = preferred_worker(partition_lease(cluster.topic.topic_id, 0), names)
    first = next(name for name in names if name != second)
    await cluster.start_worker(first, deletion_lag_ms=HOUR_MS, sweep_interval_ms=24 * HOUR_MS, clock=clock)
    await cluster.until(is_cold(cluster, 3))
    held = cluster.metadata.view.find(Lease, lease)
    other = await cluster.start_worker(second, deletion_lag_ms=24 * HOUR_MS, sweep_interval_ms=24 * HOUR_MS)
    await cluster.until(lambda: cluster.metadata.view.find(Lease, lease) not in (None, held))
    planted = await plant_successor(cluster)
    clock.ahead_ms = 2 * HOUR_MS  # Now the hot copy may be dropped, and not while the version is being planted.
    await other.close()
    await cluster.until(lambda: ("head", planted) in cluster.store.calls and "has forked" in cluster.last_error())
    assert len(cluster.log().ledgers) == 1


async def test_a_worker_does_not_look_for_a_successor_to_its_own_version(cluster: Cluster, make_batches: Batches) -> None:
    await cluster.add_ledger(make_batches(0, [3]), 0)
    await cluster.start_worker(deletion_lag_ms=100, sweep_interval_ms=24 * HOUR_MS)
    await cluster.until(lambda: not cluster.log().ledgers)
    assert is_cold(cluster, 3)()
    assert not [key for name, key in cluster.store.calls if name == "head" and is_version_object(key)]


async def test_an_object_that_is_not_what_was_written_is_damage(cluster: Cluster, make_batches: Batches) -> None:
    await cluster.add_ledger(make_batches(0, [3]), 0)
    await cluster.start_worker(deletion_lag_ms=HOUR_MS, retry_ms_max=100, sweep_interval_ms=24 * HOUR_MS)
    await cluster.until(is_cold(cluster, 3))
    key = version_key(cluster.topic.topic_id, 0, 2)
    await cluster.store.put(key, [b"other bytes"])
    await cluster.add_ledger(make_batches(3, [3]), 3)
    await cluster.until(lambda: f"{key} is not what was written" in cluster.last_error())
    assert cluster.pointer().content
    assert len(cluster.log().ledgers) == 2


def test_a_version_is_remembered_as_the_newest_for_half_of_the_grace_period() -> None:
    clock = MonotonicClock()
    commits = RecentCommits(cast(ObjectStore, None), clock, grace_ms=60_000)
    pointer = pointer_at(version_key(UUID(int=1), 0, 2))
    commits.committed(pointer)
    clock.now_s += 29
    assert commits.was_newest(pointer)
    assert not commits.was_newest(msgspec.structs.replace(pointer, sha256="cd" * 32)), "another history's version"
    clock.now_s += 2
    assert not commits.was_newest(pointer)
    commits.found_newest(pointer, clock.now_s)
    commits.forget(pointer)
    assert not commits.was_newest(pointer)


def test_a_version_is_the_workers_own_until_it_releases_the_partition() -> None:
    clock = MonotonicClock()
    commits = RecentCommits(cast(ObjectStore, None), clock, grace_ms=60_000)
    pointer = pointer_at(version_key(UUID(int=1), 0, 2))
    commits.found_newest(pointer, clock.now_s)
    assert not commits.is_own_newest(pointer), "another worker's"
    commits.committed(pointer)
    assert commits.is_own_newest(pointer)
    assert not commits.is_own_newest(msgspec.structs.replace(pointer, sha256="cd" * 32)), "another history's version"
    commits.released(pointer.key())
    assert commits.was_newest(pointer)
    assert not commits.is_own_newest(pointer)
    commits.committed(pointer)
    clock.now_s += 31
    assert not commits.is_own_newest(pointer)
    commits.found_newest(pointer, clock.now_s)
    commits.forget(pointer)
    commits.found_newest(pointer, clock.now_s)
    assert not commits.is_own_newest(pointer)


def test_a_manifest_with_a_marker_is_never_remembered_as_the_newest() -> None:
    """An earlier release may have committed a version after it, whose key does not follow from its number."""
    commits = RecentCommits(cast(ObjectStore, None), MonotonicClock(), grace_ms=60_000)
    pointer = pointer_at(manifest_key(UUID(int=1), 0, 2, 7))
    commits.committed(pointer)
    assert not commits.was_newest(pointer)


class MonotonicClock(SystemClock):
    """A monotonic clock that a test moves."""

    now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


class WallClock(SystemClock):
    """The wall clock, moved ahead."""

    ahead_ms = 0

    def wall_ms(self) -> int:
        return super().wall_ms() + self.ahead_ms


def pointer_at(key: str) -> ManifestPointer:
    return ManifestPointer(
        topic_id=UUID(int=1), index=0, manifest_version=2, object_key=key, sha256="ab" * 32, start_offset=0, end_offset=1,
        cold_bytes=1,
    )  # fmt: skip
