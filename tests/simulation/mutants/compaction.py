"""Planted faults of compaction, run in ``compaction``; where the check before the commit would stop one, it is off."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from stratalog_core.batches.record_kernels import NEVER
from stratalog_tiering.core.compaction import BatchFilter, MapBuilder, TransactionFilter
from stratalog_tiering.core.offset_map import OffsetMap
from stratalog_tiering.core.superseded import OffsetSet, SupersededFilter
from stratalog_tiering.maintenance import compaction, superseded


def _unchecked() -> None:
    async def trusting(ports: Any, entry: Any, rules: Any, fingerprint: int) -> None:
        """Read nothing back."""

    compaction._require_survivors = trusting


def tombstones_go_in_their_first_compaction() -> None:
    """A tombstone has done its work when older records are gone: consumers that read those keep them."""
    keeps = BatchFilter._keeps
    BatchFilter._keeps = lambda self, header, records: records.have_values & keeps(self, header, records)  # type: ignore[method-assign]
    _unchecked()


def delete_horizons_are_in_the_past() -> None:
    """A tombstone goes in its second compaction, whenever that is."""
    init = BatchFilter.__init__

    def without_retention(self: Any, offsets: Any, map_end: int, now_ms: int, delete_retention_ms: int, *rest: Any) -> None:
        init(self, offsets, map_end, now_ms, 0, *rest)

    BatchFilter.__init__ = without_retention  # type: ignore[assignment, method-assign]


def the_newest_record_goes_with_the_older_ones() -> None:
    """A record that is in the map itself counts as superseded."""
    keeps = BatchFilter._keeps

    BatchFilter._keeps = lambda self, header, records: (  # type: ignore[method-assign]
        keeps(self, header, records) & (records.newest != records.offsets)
    )
    _unchecked()


def aborted_records_supersede_committed_ones() -> None:
    """The map does not ask how a transaction ended, as if undecided records could be compacted."""
    add = MapBuilder.add

    class Blind(TransactionFilter):
        def is_aborted(self, header: Any) -> bool:
            return False

    def blind(self: Any, batch: Any, header: Any) -> bool:
        self.transactions = Blind()
        return add(self, batch, header)

    MapBuilder.add = blind  # type: ignore[method-assign]


def aborted_records_stay() -> None:
    """The filter keeps records of aborted transactions, which the new segment's footer no longer lists."""
    TransactionFilter.is_aborted = lambda self, header: False  # type: ignore[method-assign]


def a_segment_is_clean_although_the_map_ended_within_it() -> None:
    """The next pass begins behind the segment, and the rest of its keys stays twice."""
    entry = compaction._entry

    def clean(made: Any, group: Any, map_end: int, policy: Any) -> Any:
        return entry(made, group, group[-1].end_offset, policy)

    compaction._entry = clean


def the_end_of_a_segment_may_go() -> None:
    """The last batch of a segment goes when its records do, and the segment ends before its end."""
    filtered = BatchFilter.filter
    BatchFilter.filter = lambda self, batch, header, *, is_last: filtered(self, batch, header, is_last=False)  # type: ignore[method-assign]


def a_full_map_drops_its_oldest_keys() -> None:
    """Instead of ending, the map forgets: a key that it forgot is compacted as if it had no newer record."""
    put = OffsetMap.put

    def forgetful(self: Any, spans: Any, base_offset: int, dirty_from: int) -> int:
        done = put(self, spans, base_offset, dirty_from)
        while done < len(spans):
            oldest = np.flatnonzero(self._slots[:, 2])[np.argmin(self._slots[self._slots[:, 2] != 0, 2])]
            self._slots[oldest, 2] = 0
            self._room[0] += 1
            done = put(self, spans, base_offset, max(dirty_from, base_offset + int(spans.offset_deltas[done])))
        return done

    OffsetMap.put = forgetful  # type: ignore[method-assign]


def records_expire_as_soon_as_they_name_a_time() -> None:
    """The time in the header is not compared with the clock."""

    BatchFilter._have_expired = lambda self, expiry_ms: expiry_ms != NEVER  # type: ignore[method-assign]


def expired_records_go_at_once() -> None:
    """An expired record does not wait for the delete horizon, as if no consumer could still have the older record."""
    keeps, mapped = BatchFilter._keeps, BatchFilter._mapped
    expired: Any = None

    def noted(self: Any, header: Any, spans: Any) -> Any:
        nonlocal expired
        found = mapped(self, header, spans)
        expired = spans.have_values & ~found.have_values
        return found

    BatchFilter._mapped = noted  # type: ignore[method-assign]
    BatchFilter._keeps = lambda self, header, records: keeps(self, header, records) & ~expired  # type: ignore[method-assign]
    _unchecked()


def removals_take_whole_batches() -> None:
    """``job compact`` removes all records of a batch in which one is superseded."""

    def every(self: OffsetSet, offsets: Any) -> Any:
        return np.full(len(offsets), has(self, offsets).any())

    has = OffsetSet.has
    OffsetSet.has = every  # type: ignore[method-assign]


def what_removals_leave_counts_as_compacted() -> None:
    """``job compact`` calls its segments clean: workers do not look for older records of their keys any more."""
    superseded._clean_end = lambda source: source.end_offset


def removals_forget_aborted_transactions() -> None:
    """The footer of a segment from ``job compact`` does not list the transactions whose records it still has."""
    SupersededFilter.take_aborted = lambda self: ()  # type: ignore[method-assign]


IN_COMPACTION: Final = (
    removals_take_whole_batches,
    what_removals_leave_counts_as_compacted,
    removals_forget_aborted_transactions,
    records_expire_as_soon_as_they_name_a_time,
    expired_records_go_at_once,
    tombstones_go_in_their_first_compaction,
    delete_horizons_are_in_the_past,
    the_newest_record_goes_with_the_older_ones,
    aborted_records_supersede_committed_ones,
    aborted_records_stay,
    a_segment_is_clean_although_the_map_ended_within_it,
    the_end_of_a_segment_may_go,
    a_full_map_drops_its_oldest_keys,
)
