"""Planted faults of compaction, run in ``compaction``; where the check before the commit would stop one, it is off."""

from __future__ import annotations

from typing import Any, Final

from stratalog_core.batches.record_expiry import expiry_ms
from stratalog_tiering.core import compaction as core
from stratalog_tiering.core.compaction import BatchFilter, MapBuilder, TransactionFilter
from stratalog_tiering.maintenance import compaction


def _unchecked() -> None:
    async def trusting(ports: Any, entry: Any, fingerprint: int) -> None:
        """Read nothing back."""

    compaction._require_survivors = trusting


def tombstones_go_in_their_first_compaction() -> None:
    """A tombstone has done its work when older records are gone: consumers that read those keep them."""
    keeps = BatchFilter._keeps
    BatchFilter._keeps = lambda self, header, span: span.has_value and keeps(self, header, span)  # type: ignore[method-assign]
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

    def keeps_older(self: Any, header: Any, span: Any) -> bool:
        newest = self._offsets.newest(span.key) if span.key is not None else -1
        return keeps(self, header, span) and newest != header.base_offset + span.offset_delta

    BatchFilter._keeps = keeps_older  # type: ignore[method-assign]
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
    put = core.OffsetMap.put

    def forgetful(self: Any, key: bytes, offset: int) -> bool:
        if not put(self, key, offset):
            self._offsets.pop(next(iter(self._offsets)))
            put(self, key, offset)
        return True

    core.OffsetMap.put = forgetful  # type: ignore[method-assign]


def records_expire_as_soon_as_they_name_a_time() -> None:
    """The time in the header is not compared with the clock."""

    def expired(self: Any, body: Any, span: Any) -> Any:
        is_named = expiry_ms(body, span, self._expiry_header) is not None
        return span._replace(has_value=False) if is_named else span

    BatchFilter._expired = expired  # type: ignore[method-assign]


def expired_records_go_at_once() -> None:
    """An expired record does not wait for the delete horizon, as if no consumer could still have the older record."""
    keeps, expired, keys = BatchFilter._keeps, BatchFilter._expired, set[bytes | None]()

    def noted(self: Any, body: Any, span: Any) -> Any:
        found = expired(self, body, span)
        if found.has_value != span.has_value:
            keys.add(span.key)
        return found

    def without_horizon(self: Any, header: Any, span: Any) -> bool:
        return keeps(self, header, span) and (span.has_value or span.key not in keys)

    BatchFilter._expired = noted  # type: ignore[method-assign]
    BatchFilter._keeps = without_horizon  # type: ignore[method-assign]
    _unchecked()


IN_COMPACTION: Final = (
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
