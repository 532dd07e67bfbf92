"""Copying goes on although objects of either bucket that it does not need are damaged or lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.directory_store import object_contents
from unit.tiering.worker.test_copying import counters, findings, is_copied, segments_of, until
from unit.tiering.worker.test_worker import Batches, Cluster

from stratalog_core.errors import Refused, StratalogError, Unavailable
from stratalog_tiering.format.descriptor import OwnerDescriptor, encode_descriptor
from stratalog_tiering.format.object_keys import owner_key
from stratalog_tiering.offload.ownership import cluster_id_in, take_over
from stratalog_tiering.store import ObjectStore


@pytest.mark.parametrize("is_segment_lost", [False, True])
async def test_the_next_version_is_copied_although_the_newest_one_in_the_copy_is_damaged(
    cluster: Cluster, make_batches: Batches, second: ObjectStore, second_directory: Path, is_segment_lost: bool
) -> None:
    await cluster.add_ledger(make_batches(0, [3]), 0)
    worker = await cluster.start_worker(second=second)
    await until(lambda: is_copied(cluster, second_directory))
    await worker.close()
    (second_directory / cluster.pointer().object_key).write_bytes(b"damaged")
    if is_segment_lost:
        segments_of(second_directory)[0].unlink()
    again = await cluster.start_worker("worker-2", second=second, copy_grace_ms=0)
    await cluster.add_ledger(make_batches(3, [3]), 3)
    await cluster.until(lambda: cluster.pointer().end_offset == 6)
    await until(lambda: is_copied(cluster, second_directory))
    await until(lambda: len([key for key in object_contents(second_directory) if key.startswith("manifests/")]) == 1)
    await again.close()
    assert await findings(second, cluster.background) == []


@pytest.mark.parametrize("failure", [Refused("archived"), Unavailable("no read quorum")])
async def test_a_segment_that_the_first_store_does_not_return_does_not_keep_the_others_from_being_copied(
    cluster: Cluster,
    make_batches: Batches,
    store_directory: Path,
    second: ObjectStore,
    second_directory: Path,
    failure: StratalogError,
) -> None:
    for base in (0, 10, 20):
        await cluster.add_ledger(make_batches(base, [10]), base)
    writer = await cluster.start_worker(segment_bytes=1)
    await cluster.until(lambda: cluster.pointer() is not None and cluster.pointer().end_offset == 30)
    await writer.close()
    unread, *others = [path.name for path in segments_of(store_directory)]
    cluster.store.before = lambda name, key: failure if Path(key).name == unread else None
    await cluster.start_worker("copier", second=second)
    await until(lambda: [path.name for path in segments_of(second_directory)] == others)
    assert not is_copied(cluster, second_directory)
    cluster.store.before = lambda name, key: None
    await until(lambda: is_copied(cluster, second_directory))


async def test_no_segment_is_read_again_and_again_while_the_second_store_refuses_copies(
    cluster: Cluster, make_batches: Batches, second: ObjectStore, second_directory: Path
) -> None:
    for base in (0, 10, 20):
        await cluster.add_ledger(make_batches(base, [10]), base)
    writer = await cluster.start_worker(segment_bytes=1)
    await cluster.until(lambda: cluster.pointer() is not None and cluster.pointer().end_offset == 30)
    await writer.close()
    full = type(cluster.store)(second)
    full.before = lambda name, key: Refused("quota") if name == "put" and key.startswith("segments/") else None
    worker = await cluster.start_worker("copier", second=full)
    await until(lambda: counters(worker).failures > 2)
    assert len({key for name, key in full.calls if name == "put" and key.startswith("segments/")}) == 1
    full.before = lambda name, key: None
    await until(lambda: is_copied(cluster, second_directory))


@pytest.mark.parametrize("is_copied_first", [False, True])
@pytest.mark.parametrize("content", [None, b"{"])
async def test_the_owners_are_copied_although_an_earlier_one_is_lost_or_damaged(
    cluster: Cluster,
    make_batches: Batches,
    second: ObjectStore,
    second_directory: Path,
    content: bytes | None,
    is_copied_first: bool,
) -> None:
    """The cluster owns the bucket after two others. The copy has the second of them if they copied it."""
    if content is not None:
        await cluster.store.put(owner_key(0), [content])
    other = encode_descriptor(OwnerDescriptor(cluster_id="other", number=1, taken_at_ms=1))
    for store in [cluster.store, second] if is_copied_first else [cluster.store]:
        await store.put(owner_key(1), [other])
    await take_over(cluster.store, cluster_id_in(cluster.metadata), 2)
    await cluster.add_ledger(make_batches(0, [1]), 0)
    await cluster.start_worker(second=second)
    await until(lambda: is_copied(cluster, second_directory))
    copied = {key: content for key, content in object_contents(second_directory).items() if key.startswith("owners/")}
    assert copied == {key: await cluster.store.get(key) for key in (owner_key(1), owner_key(2))}
