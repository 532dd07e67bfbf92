"""Proofs that a record batch is part of a partition's history, and that the history was only ever appended to.

A batch is proved against the head of the partition's Merkle tree (RFC 9162). The head is in every committed manifest. A proof
against an earlier head stays valid: :func:`prove_growth` shows that the earlier tree is a prefix of the current one, whatever
has been merged or has expired since. Reads the store; writes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stratalog_core.errors import Corrupt, NotFound
from stratalog_core.ports import Background, Buffer
from stratalog_tiering.cold.manifest_source import ManifestSource
from stratalog_tiering.cold.segment_check import block_leaves, check_segment
from stratalog_tiering.format.erased_leaves import restore_leaves
from stratalog_tiering.format.manifest import Manifest
from stratalog_tiering.format.merkle import batch_leaf, proof_holds, split_hashes
from stratalog_tiering.format.partition_tree import TreeProofs, consistency_holds
from stratalog_tiering.format.segment import iterate_block_batches
from stratalog_tiering.store import ObjectStore

_READS_AT_ONCE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchProof:
    """Proof that a batch is leaf ``leaf_index`` of the tree of ``tree_size`` leaves that has this head."""

    leaf_index: int
    tree_size: int
    tree_head: bytes
    path: tuple[bytes, ...]

    def holds(self, batch: Buffer) -> bool:
        """Whether the proof is one of these bytes, base offset and leader epoch included."""
        return proof_holds(self.tree_head, batch_leaf(batch), self.leaf_index, self.tree_size, self.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthProof:
    """Proof that the tree of ``newer_size`` leaves begins with that of ``older_size``."""

    older_size: int
    newer_size: int
    newer_head: bytes
    path: tuple[bytes, ...]

    def holds(self, older_head: bytes) -> bool:
        """Whether the older tree had this head."""
        return consistency_holds(self.older_size, older_head, self.newer_size, self.newer_head, self.path)


async def prove_batch(
    store: ObjectStore, source: ManifestSource, background: Background, manifest: Manifest, offset: int
) -> BatchProof:
    """Proof of the batch that holds ``offset`` against the manifest's tree head. Reads the whole segment of the offset.

    Raises ``NotFound`` outside the manifest, in a compacted segment, whose leaves cannot be computed, and for a batch of which
    records were erased; ``Corrupt`` if the segment is damaged or not that of the tree, ``Unavailable``.
    """
    entry = await source.segment_at(manifest, offset)
    if entry is None:
        raise NotFound(f"offset {offset} is not in the history of offsets {manifest.start_offset}..{manifest.end_offset}")
    if entry.is_compacted:
        raise NotFound(f"offset {offset} is in a compacted segment, {entry.key}: a batch of it cannot be proved")
    leaves, index = bytearray(), entry.first_leaf

    def collect(_: memoryview, blocks: Sequence[memoryview]) -> None:
        nonlocal index
        leaves.extend(block_leaves(blocks))
        index += sum(header.last_offset < offset for block in blocks for _, header in iterate_block_batches(block))

    check = check_segment(store, source, entry, background, reads_at_once=_READS_AT_ONCE, on_content=collect)
    async for finding in check:
        raise Corrupt(f"no proof of a damaged segment: {finding}", key=entry.key)
    erased = await source.erased_leaves(entry)
    if any(entry.first_leaf + each.index == index for each in erased):
        raise NotFound(f"records were erased from the batch of offset {offset}: what is left of it cannot be proved")
    restore_leaves(leaves, erased)
    proofs = await _proofs(source, manifest)
    tree = manifest.tree

    def prove() -> tuple[bytes, ...]:
        proofs.replace(entry.first_leaf, list(split_hashes(leaves)))
        return proofs.inclusion(index, tree.size)

    return BatchProof(leaf_index=index, tree_size=tree.size, tree_head=tree.head, path=await background.run(prove))


async def prove_growth(source: ManifestSource, manifest: Manifest, older_size: int) -> GrowthProof:
    """Proof that the manifest's tree begins with the committed tree of ``older_size`` leaves.

    Raises ``Invalid`` if no committed version had so many, ``Corrupt``, ``Unavailable``.
    """
    tree = manifest.tree
    path = (await _proofs(source, manifest)).consistency(older_size, tree.size)
    return GrowthProof(older_size=older_size, newer_size=tree.size, newer_head=tree.head, path=path)


async def _proofs(source: ManifestSource, manifest: Manifest) -> TreeProofs:
    return TreeProofs(manifest.tree, await source.tree_pages(manifest.tree.pages))
