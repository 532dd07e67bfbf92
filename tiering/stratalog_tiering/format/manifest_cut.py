"""A manifest that ends earlier: what is left of pages, segments and the partition's Merkle tree, and what is not. No I/O.

The tree is append-only but for this: a history that is restored up to a point has the tree that it had when its last segment
was appended. So proofs for what is kept hold, and heads beyond the point belong to records that are no part of it any more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from stratalog_core.errors import Corrupt, Invalid
from stratalog_tiering.format.lookup import live_segments
from stratalog_tiering.format.manifest import Manifest, ManifestPage, PageRef, SegmentEntry
from stratalog_tiering.format.partition_tree import (
    PartitionTree,
    TreePageRef,
    TreePages,
    TreeSpan,
    grow_by_spans,
    page_peaks,
    peaks_root,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CutManifest:
    """``kept`` is the manifest without ``segments`` and ``pages``, which it does not refer to any more. It is not stored."""

    kept: Manifest
    segments: tuple[SegmentEntry, ...]
    pages: tuple[PageRef | TreePageRef, ...]

    @property
    def record_count(self) -> int:
        return sum(entry.record_count for entry in self.segments)


def pages_for_cut(manifest: Manifest, end_offset: int) -> tuple[PageRef, ...]:
    """The pages that :func:`cut_manifest` needs."""
    return tuple(ref for ref in manifest.pages if ref.end_offset > end_offset)


def cut_manifest(manifest: Manifest, end_offset: int, pages: Mapping[str, ManifestPage], tree_pages: TreePages) -> CutManifest:
    """The manifest up to ``end_offset``, where a segment must begin. ``tree_pages`` must hold every page of the tree.

    Raises ``Invalid`` if no segment begins there, ``Corrupt`` if the tree has no boundary there.
    """
    cut_refs = pages_for_cut(manifest, end_offset)
    loaded = [entry for ref in cut_refs for entry in live_segments(manifest, pages[ref.key])]
    inline = [*loaded, *manifest.segments]
    kept, gone = _split(inline, end_offset)
    if not gone or gone[0].base_offset != end_offset:
        raise Invalid(f"no segment of {manifest.topic_name}-{manifest.partition} begins at offset {end_offset}")
    tree, cut_tree_refs = _cut_tree(manifest.tree, gone[0].first_leaf, tree_pages)
    made: Manifest = msgspec.structs.replace(
        manifest,
        end_offset=end_offset,
        pages=tuple(ref for ref in manifest.pages if ref not in cut_refs),
        segments=tuple(kept),
        record_count=manifest.record_count - sum(entry.record_count for entry in gone),
        cold_bytes=manifest.cold_bytes - sum(entry.stored_bytes for entry in gone),
        tree=tree,
        signatures=(),
    )
    return CutManifest(kept=made, segments=tuple(gone), pages=(*cut_refs, *cut_tree_refs))


def _split(entries: Sequence[SegmentEntry], end_offset: int) -> tuple[list[SegmentEntry], list[SegmentEntry]]:
    kept = [entry for entry in entries if entry.end_offset <= end_offset]
    return kept, list(entries[len(kept) :])


def _cut_tree(tree: PartitionTree, size: int, pages: TreePages) -> tuple[PartitionTree, tuple[TreePageRef, ...]]:
    """The tree of the first ``size`` leaves, and the pages that it does not refer to any more."""
    kept_refs: list[TreePageRef] = []
    leaves = 0
    for ref in tree.pages:
        if leaves + ref.leaf_count > size:
            break
        kept_refs.append(ref)
        leaves += ref.leaf_count
    cut_refs = tree.pages[len(kept_refs) :]
    later = [*(span for ref in cut_refs for span in pages[ref.key].spans), *tree.spans]
    spans: list[TreeSpan] = []
    end = leaves
    for span in later:
        if end == size:
            break
        spans.append(span)
        end += span.leaf_count
    if end != size:
        raise Corrupt(f"no span of the partition's tree ends at leaf {size}")
    peaks = page_peaks(tree)
    if cut_refs:
        peaks = grow_by_spans((), 0, [span for ref in kept_refs for span in pages[ref.key].spans])
    head = peaks_root(grow_by_spans(peaks, leaves, spans))
    cut = PartitionTree(
        size=size, head=head, peaks=b"".join(peak.hash for peak in peaks), spans=tuple(spans), pages=tuple(kept_refs)
    )
    return cut, tuple(cut_refs)
