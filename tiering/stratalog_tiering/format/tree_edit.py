"""One edit of a partition's Merkle tree: leaves are appended, and spans move to tree pages.

When the root would hold more than ``inline_spans_max`` spans, all of them become a page of level 0; ``page_fan_in`` neighbours
of one level become a page of the next. Nothing ever leaves the tree. No I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from uuid import UUID

from stratalog_tiering.format.manifest_limits import ManifestLimits
from stratalog_tiering.format.merkle import split_hashes
from stratalog_tiering.format.object_frame import object_sha256
from stratalog_tiering.format.object_keys import tree_page_key
from stratalog_tiering.format.partition_tree import (
    PartitionTree,
    Subtree,
    TreePage,
    TreePageRef,
    TreePages,
    TreeSpan,
    encode_tree_page,
    grow_by_spans,
    page_peaks,
    peaks_root,
    tree_span,
)


class TreeEdit:
    """Starts from the tree of the committed version."""

    def __init__(
        self, base: PartitionTree, topic_id: UUID, partition: int, random_id: Callable[[], int], limits: ManifestLimits
    ) -> None:
        self._topic_id = topic_id
        self._partition = partition
        self._random_id = random_id
        self._limits = limits
        self.size = base.size
        self._refs = list(base.pages)
        self._spans = list(base.spans)
        self._page_peaks = page_peaks(base)
        self._new: dict[str, bytes] = {}

    def append(self, leaves: bytes) -> None:
        """Append leaves, given as the concatenation of their hashes."""
        span = tree_span(self.size, list(split_hashes(leaves)))
        self._spans.append(span)
        self.size += span.leaf_count

    def pages_to_merge(self, without: Set[str] = frozenset()) -> tuple[TreePageRef, ...]:
        """The first neighbouring pages of one level that :meth:`move_to_pages` can merge, ``without`` these keys.

        Empty if there are none.
        """
        fan_in = self._limits.page_fan_in
        for first in range(len(self._refs) - fan_in + 1):
            run = self._refs[first : first + fan_in]
            if len({ref.level for ref in run}) == 1 and without.isdisjoint(ref.key for ref in run):
                return tuple(run)
        return ()

    def move_to_pages(self, pages: TreePages) -> tuple[TreePageRef, ...]:
        """Merge ``pages``, which are those of :meth:`pages_to_merge` or none, and move spans to a page if there are too many.

        Returns the references to the pages that were merged.
        """
        run = tuple(ref for ref in self._refs if ref.key in pages)
        if run:
            place = self._refs.index(run[0])
            assert tuple(self._refs[place : place + len(run)]) == run, "only neighbouring pages are merged"
            spans = [span for ref in run for span in pages[ref.key].spans]
            self._refs[place : place + len(run)] = [self._new_page(self._first_leaf(place), spans, run[0].level + 1)]
        if len(self._spans) > self._limits.inline_spans_max:
            self._page_peaks = self._grown()
            self._refs.append(self._new_page(self._first_leaf(len(self._refs)), self._spans, 0))
            self._spans.clear()
        return run

    def new_pages(self) -> tuple[tuple[str, bytes], ...]:
        """Keys and contents of the pages that this edit has made."""
        return tuple(self._new.items())

    def finish(self) -> PartitionTree:
        """The tree of the next version."""
        peaks = b"".join(peak.hash for peak in self._page_peaks)
        head = peaks_root(self._grown())
        return PartitionTree(size=self.size, head=head, peaks=peaks, spans=tuple(self._spans), pages=tuple(self._refs))

    def _first_leaf(self, place: int) -> int:
        return sum(ref.leaf_count for ref in self._refs[:place])

    def _grown(self) -> list[Subtree]:
        return grow_by_spans(self._page_peaks, self._first_leaf(len(self._refs)), self._spans)

    def _new_page(self, first_leaf: int, spans: Sequence[TreeSpan], level: int) -> TreePageRef:
        page = TreePage(topic_id=self._topic_id, partition=self._partition, first_leaf=first_leaf, spans=tuple(spans))
        content = encode_tree_page(page)
        key = tree_page_key(self._topic_id, self._partition, first_leaf, level, self._random_id())
        self._new[key] = content
        return TreePageRef(
            key=key, sha256=object_sha256(content), object_bytes=len(content), level=level,
            leaf_count=sum(span.leaf_count for span in spans),
        )  # fmt: skip
