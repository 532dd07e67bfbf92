"""The Merkle tree of a partition (RFC 9162): one leaf per record batch, in offset order, for as long as the partition exists.

The tree is append-only. Each offload appends the leaves of its segment; merging, retention and erasure do not change it. The
tree keeps a :class:`TreeSpan` of each offloaded segment: the hashes of the largest aligned subtrees of its leaves. The spans
alone give the head of every tree that was ever committed, a consistency proof between any two of them, and, with the leaves of
one segment, an inclusion proof of each of its batches.

The newest spans are in the manifest root, the others in tree pages, which are immutable objects. This module computes, checks
and packs; ``tree_edit.py`` appends. No I/O. Format: ``docs/reference/formats/manifest.md``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple
from uuid import UUID

import msgspec

from stratalog_core.errors import Corrupt, Invalid
from stratalog_core.ports import Buffer
from stratalog_tiering.format.merkle import HASH_BYTES, node_hash, root_hash, root_of_peaks, split_hashes, split_point
from stratalog_tiering.format.object_frame import frame, unframe

TREE_MAGIC: Final = b"SLMFTREE"


class TreeSpan(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The leaves that one offload appended. ``hashes`` are those of the subtrees in :func:`aligned_subtrees`, in order."""

    leaf_count: int
    hashes: bytes


class TreePageRef(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A reference to a tree page, whose leaves follow those of the reference before it."""

    key: str
    sha256: bytes
    object_bytes: int
    level: int
    leaf_count: int


class TreePage(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a tree page: neighbouring spans in leaf order."""

    topic_id: UUID
    partition: int
    first_leaf: int
    spans: tuple[TreeSpan, ...]


class PartitionTree(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The tree of one manifest version: the leaves in ``pages``, then those in ``spans``.

    ``head`` is the RFC 9162 root over all ``size`` leaves. ``peaks`` are the hashes of the perfect subtrees of the pages'
    leaves, largest first, so that the head is computed without reading a page.
    """

    size: int = 0
    head: bytes = root_hash(())
    peaks: bytes = b""
    spans: tuple[TreeSpan, ...] = ()
    pages: tuple[TreePageRef, ...] = ()


EMPTY_TREE: Final = PartitionTree()
TreePages = Mapping[str, TreePage]
"""Tree pages by object key."""


class Subtree(NamedTuple):
    """A perfect subtree over the leaves from ``first`` on; ``first`` is a multiple of ``size``, a power of two."""

    first: int
    size: int
    hash: bytes


def aligned_subtrees(first: int, end: int) -> Iterator[tuple[int, int]]:
    """``(first leaf, size)`` of the largest perfect subtrees that make up the leaves ``first`` to ``end``, in order."""
    while first < end:
        size = first & -first or 1 << (end.bit_length() - 1)
        while first + size > end:
            size >>= 1
        yield first, size
        first += size


def tree_span(first: int, leaves: Sequence[bytes]) -> TreeSpan:
    """The span of ``leaves``, which are appended to a tree of ``first`` leaves."""
    hashes = (
        root_hash(leaves[start - first : start - first + size]) for start, size in aligned_subtrees(first, first + len(leaves))
    )
    return TreeSpan(leaf_count=len(leaves), hashes=b"".join(hashes))


def span_subtrees(first: int, span: TreeSpan) -> list[Subtree]:
    """The subtrees of a span whose first leaf is ``first``. Raises ``Corrupt`` if it does not have one hash for each."""
    if min(first, span.leaf_count) < 0:
        raise Corrupt(f"span of {span.leaf_count} leaves from leaf {first} on")
    places = list(aligned_subtrees(first, first + span.leaf_count))
    if len(span.hashes) != len(places) * HASH_BYTES:
        raise Corrupt(f"span of {span.leaf_count} leaves from leaf {first} on has {len(span.hashes)} bytes of hashes")
    return [Subtree(start, size, each) for (start, size), each in zip(places, split_hashes(span.hashes), strict=True)]


def grow(peaks: Sequence[Subtree], subtrees: Iterable[Subtree]) -> list[Subtree]:
    """The perfect subtrees, largest first, of a tree with ``peaks`` to which ``subtrees`` are appended."""
    grown = list(peaks)
    for added in subtrees:
        while grown and grown[-1].size == added.size:
            left = grown.pop()
            added = Subtree(left.first, 2 * left.size, node_hash(left.hash, added.hash))
        grown.append(added)
    return grown


def peaks_root(peaks: Sequence[Subtree]) -> bytes:
    """The RFC 9162 root of the leaves under ``peaks``."""
    return root_of_peaks([peak.hash for peak in peaks])


def grow_by_spans(peaks: Sequence[Subtree], size: int, spans: Iterable[TreeSpan]) -> list[Subtree]:
    """The perfect subtrees of a tree of ``size`` leaves with ``peaks`` to which ``spans`` are appended. Raises ``Corrupt``."""
    grown = list(peaks)
    for span in spans:
        grown = grow(grown, span_subtrees(size, span))
        size += span.leaf_count
    return grown


def page_peaks(tree: PartitionTree) -> list[Subtree]:
    """The perfect subtrees of the leaves in the tree's pages. Raises ``Corrupt``."""
    return span_subtrees(0, TreeSpan(leaf_count=sum(ref.leaf_count for ref in tree.pages), hashes=tree.peaks))


def check_tree(tree: PartitionTree) -> None:
    """Raise ``Corrupt`` unless size and head are those of the tree's peaks and spans. Reads no page."""
    in_pages = sum(ref.leaf_count for ref in tree.pages)
    peaks, size = grow_by_spans(page_peaks(tree), in_pages, tree.spans), in_pages + sum(span.leaf_count for span in tree.spans)
    if size != tree.size or peaks_root(peaks) != tree.head:
        raise Corrupt(f"the tree's head is not that of its {size} leaves")


def encode_tree_page(page: TreePage) -> bytes:
    return frame(TREE_MAGIC, page)


def decode_tree_page(content: Buffer, sha256: bytes) -> TreePage:
    """Decode and check. Raises ``Corrupt``, or ``Invalid`` for an unknown format version or flag."""
    return unframe(content, TREE_MAGIC, TreePage, "tree page", sha256, {"spans": TreeSpan})


class TreeProofs:
    """Makes proofs against the tree heads of a partition, from all of its spans."""

    def __init__(self, tree: PartitionTree, pages: TreePages) -> None:
        """``pages`` must hold every page of the tree. Raises ``Corrupt`` if the spans do not give the tree's head."""
        self._size = tree.size
        self._subtrees: list[Subtree] = []
        spans = [span for ref in tree.pages for span in pages[ref.key].spans] + list(tree.spans)
        first = 0
        for span in spans:
            self._subtrees += span_subtrees(first, span)
            first += span.leaf_count
        if first != tree.size or self.head(first) != tree.head:
            raise Corrupt(f"the tree's head is not that of the {first} leaves of its spans")

    def head(self, size: int) -> bytes:
        """The head when the tree had ``size`` leaves. Raises ``Invalid`` if it was never committed with so many."""
        return self._range_hash(0, size)

    def check(self, first: int, leaves: Sequence[bytes]) -> None:
        """Raise ``Corrupt`` unless the tree has these leaves from ``first`` on. They must be those of whole segments."""
        end = first + len(leaves)
        found = self._subtrees[self._place(first) : self._place(end)]
        # The same leaves at the same places have the same subtrees, whether one segment or several brought them.
        computed = [root_hash(leaves[each.first - first : each.first - first + each.size]) for each in found]
        is_whole = sum(each.size for each in found) == len(leaves)
        if not is_whole or computed != [each.hash for each in found]:
            raise Corrupt(f"leaves {first}..{end - 1} are not those of the partition's tree")

    def check_span(self, first: int, span: TreeSpan) -> None:
        """Raise ``Corrupt`` unless the tree has the span's leaves from ``first`` on. They must be those of whole segments."""
        for each in span_subtrees(first, span):
            end = each.first + each.size
            if end > self._size or self._range_hash(each.first, end) != each.hash:
                raise Corrupt(f"leaves {each.first}..{end - 1} are not those of the partition's tree")

    def replace(self, first: int, leaves: Sequence[bytes]) -> None:
        """Use a segment's leaves, from ``first`` on, for proofs of its batches. Raises as :meth:`check`."""
        self.check(first, leaves)
        low, high = self._place(first), self._place(first + len(leaves))
        self._subtrees[low:high] = [Subtree(first + index, 1, leaf) for index, leaf in enumerate(leaves)]

    def inclusion(self, index: int, size: int) -> tuple[bytes, ...]:
        """Proof of leaf ``index`` against the head at ``size`` (RFC 9162, section 2.1.3.1), after :meth:`replace`.

        Raises ``Invalid`` if the leaf or the size is unknown.
        """
        if not 0 <= index < size:
            raise Invalid(f"leaf {index} is not in a tree of {size} leaves")
        self._range_hash(index, index + 1)
        path: list[bytes] = []
        first, end = 0, size
        while end - first > 1:
            middle = first + split_point(end - first)
            if index < middle:
                path.append(self._range_hash(middle, end))
                end = middle
            else:
                path.append(self._range_hash(first, middle))
                first = middle
        return tuple(reversed(path))

    def consistency(self, older: int, newer: int) -> tuple[bytes, ...]:
        """Proof that the tree of ``newer`` leaves extends that of ``older`` (RFC 9162, section 2.1.4.1). Raises ``Invalid``."""
        if not 0 < older <= newer <= self._size:
            raise Invalid(f"no proof between {older} and {newer} leaves; the tree has {self._size}")
        path: list[bytes] = []
        first, end, is_known = 0, newer, True
        while end != older:
            middle = first + split_point(end - first)
            if older <= middle:
                path.append(self._range_hash(middle, end))
                end = middle
            else:
                path.append(self._range_hash(first, middle))
                first, is_known = middle, False
        if not is_known:
            path.append(self._range_hash(first, older))
        return tuple(reversed(path))

    def _place(self, leaf: int) -> int:
        return bisect_left(self._subtrees, leaf, key=lambda each: each.first)

    def _range_hash(self, first: int, end: int) -> bytes:
        within = self._subtrees[self._place(first) : self._place(end)]
        if sum(each.size for each in within) != end - first or (within and within[0].first != first):
            raise Invalid(f"the hashes of leaves {first}..{end - 1} are not known; load their segment's leaves")
        return peaks_root(grow((), within))


def consistency_holds(older: int, older_head: bytes, newer: int, newer_head: bytes, proof: Sequence[bytes]) -> bool:
    """Whether ``proof`` shows that the tree of ``newer`` leaves extends that of ``older`` (RFC 9162, section 2.1.4.2)."""
    if older == newer:
        return older_head == newer_head and not proof
    if not 0 < older < newer:
        return False
    hashes = [older_head, *proof] if older & (older - 1) == 0 else list(proof)
    if not hashes:
        return False
    position, last = older - 1, newer - 1
    while position & 1:
        position, last = position >> 1, last >> 1
    old, new = hashes[0], hashes[0]
    for each in hashes[1:]:
        if last == 0:
            return False
        if position & 1 or position == last:
            old, new = node_hash(each, old), node_hash(each, new)
            while position and not position & 1:
                position, last = position >> 1, last >> 1
        else:
            new = node_hash(new, each)
        position, last = position >> 1, last >> 1
    return last == 0 and old == older_head and new == newer_head
