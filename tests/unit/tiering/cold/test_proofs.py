"""Proofs of batches: they hold for the batch and no other bytes, and still hold after merging, expiry and more offloads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.archive_writer import ArchiveWriter

from stratalog_core.batches.batch import assign_offset, read_header
from stratalog_core.errors import Corrupt, NotFound
from stratalog_core.system import ThreadBackground
from stratalog_metadata.state.commands import Command, Put
from stratalog_tiering.cold.manifest_source import ManifestSource
from stratalog_tiering.cold.proofs import BatchProof, prove_batch, prove_growth
from stratalog_tiering.cold.verifier import Verifier
from stratalog_tiering.format.manifest import Manifest, SegmentKind
from stratalog_tiering.maintenance.merging import FAN_IN

Cluster = Any
Store = Any
Batches = Callable[..., list[bytes]]


async def proved(
    store: Store, background: ThreadBackground, manifest: Manifest, batches: list[bytes]
) -> list[tuple[bytes, BatchProof]]:
    source = ManifestSource(store)
    live = [batch for batch in batches if read_header(batch).base_offset >= manifest.start_offset]
    return [(batch, await prove_batch(store, source, background, manifest, read_header(batch).last_offset)) for batch in live]


async def test_every_batch_is_proved(
    writer: ArchiveWriter, store: Store, background: ThreadBackground, make_batches: Batches
) -> None:
    batches: list[bytes] = []
    for index in range(9):
        added = make_batches(index * 24, [3] * 8)
        pointer, _ = await writer.append(0, added)
        batches += added
    manifest = await ManifestSource(store).manifest(pointer)
    proofs = await proved(store, background, manifest, batches)
    assert [proof.leaf_index for _, proof in proofs] == list(range(72))
    assert {(proof.tree_size, proof.tree_head) for _, proof in proofs} == {(72, manifest.tree.head)}
    for (batch, proof), (other, _) in zip(proofs, [*proofs[1:], proofs[0]], strict=True):
        assert proof.holds(batch)
        assert not proof.holds(other)
        moved = bytearray(batch)
        assign_offset(moved, read_header(batch).base_offset, 7)
        assert not proof.holds(moved), "the leader epoch is proved, too"
    with pytest.raises(NotFound, match="offset 216 is not in the history"):
        await prove_batch(store, ManifestSource(store), background, manifest, 216)


async def test_a_proof_still_holds_after_merging_expiry_and_more_offloads(
    cluster: Cluster, make_batches: Batches, background: ThreadBackground
) -> None:
    batches: list[bytes] = []

    async def add(count: int) -> None:
        for _ in range(count):
            base = read_header(batches[-1]).next_offset if batches else 0
            batches.extend(make_batches(base, [2, 1, 1]))
            await cluster.add_ledger(batches[-3:], base)
        await cluster.until(lambda: cluster.pointer() is not None and not cluster.log().ledgers)

    await cluster.start_worker("worker-1", segment_bytes=1)
    await add(FAN_IN)
    await cluster.close()
    today = await ManifestSource(cluster.store).manifest(cluster.pointer())
    proofs = await proved(cluster.store, background, today, batches)
    assert all(proof.holds(batch) for batch, proof in proofs)
    await cluster.start_worker("worker-2")
    await cluster.until(lambda: cluster.pointer().manifest_version > today.version)
    await add(3)
    merged = await ManifestSource(cluster.store).manifest(cluster.pointer())
    assert merged.segments[0].kind is SegmentKind.MERGED
    assert [source.base_offset for source in merged.segments[0].sources] == [entry.base_offset for entry in today.segments]
    assert all(proof.holds(batch) for batch, proof in await proved(cluster.store, background, merged, batches))
    log = msgspec.structs.replace(cluster.log(), log_start_offset=merged.segments[0].end_offset)
    await cluster.metadata.propose(Command(updates=(Put(record=log),)))
    await cluster.until(lambda: cluster.pointer().start_offset >= merged.segments[0].end_offset)
    expired = await ManifestSource(cluster.store).manifest(cluster.pointer())
    source = ManifestSource(cluster.store)
    for newer in (merged, expired):
        for older in (today, merged):
            growth = await prove_growth(source, newer, older.tree.size)
            assert growth.newer_head == newer.tree.head
            assert growth.holds(older.tree.head)
            assert not growth.holds(bytes(32))
    assert all(proof.holds(batch) for batch, proof in await proved(cluster.store, background, expired, batches))
    removed = {(each.reason, each.policy, each.actor) for each in expired.removed if each.key == merged.segments[0].key}
    assert removed == {("log-start", f"log start {merged.segments[0].end_offset}", "worker-2")}
    assert (await Verifier(cluster.store, background).partition("flights", cluster.pointer())).findings == ()


async def test_segments_that_changed_places_are_found(
    writer: ArchiveWriter, store: Store, background: ThreadBackground, make_batches: Batches, store_directory: Path
) -> None:
    """Each segment is sound by itself, and its entry says that its batches are other leaves of the tree."""
    await writer.append(0, make_batches(0, [3]))
    pointer, _ = await writer.append(0, make_batches(3, [3]))
    source = ManifestSource(store)
    manifest = await source.manifest(pointer)
    first, second = manifest.segments
    wrong = msgspec.structs.replace(
        manifest, segments=(msgspec.structs.replace(first, first_leaf=1), msgspec.structs.replace(second, first_leaf=0))
    )
    with pytest.raises(Corrupt, match=r"leaves 1\.\.1 are not those of the partition's tree"):
        await prove_batch(store, source, background, wrong, 0)
