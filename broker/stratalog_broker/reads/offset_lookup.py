"""Finds an offset of an owned partition by name (earliest, latest …) or by time."""

from __future__ import annotations

from enum import IntEnum

from stratalog_broker.partitions.log import PartitionLog
from stratalog_broker.reads.log_reader import LogReader
from stratalog_broker.reads.time_searches import Found, TimeSearches


class NamedOffset(IntEnum):
    """Numbers are ListOffsets' special timestamps."""

    LATEST = -1
    EARLIEST = -2
    GREATEST_TIMESTAMP = -3
    """The record with the greatest timestamp (KIP-734)."""
    EARLIEST_LOCAL = -4
    """The first offset on bookies (KIP-405)."""
    LATEST_TIERED = -5
    """The last offset in the object store (KIP-1005)."""
    EARLIEST_PENDING_UPLOAD = -6
    """The first offset that is not in the object store yet (KIP-1023)."""


class OffsetLookup:
    """One instance per broker. ``wanted`` is a ``NamedOffset`` or a time in milliseconds, which is not negative.

    ``is_committed``: for readers of committed transactions only, for whom the log ends at the last stable offset.
    """

    def __init__(self, reader: LogReader, searches: TimeSearches) -> None:
        self._reader = reader
        self._searches = searches

    def at_once(self, log: PartitionLog, wanted: int, *, is_committed: bool) -> Found | None:
        """Return an offset that needs no read; None if ``wanted`` is a time or the greatest timestamp: see ``find``."""
        if wanted >= 0 or wanted == NamedOffset.GREATEST_TIMESTAMP:
            return None
        offset = self._named(log, NamedOffset(wanted), is_committed=is_committed)
        return Found(offset, -1, log.core.epoch_at(offset))

    async def find(self, log: PartitionLog, wanted: int, *, is_committed: bool) -> Found | None:
        """Return the first record that is not earlier than a time, or the one with the greatest timestamp; None without one.

        Raises what reading raises.
        """
        if wanted == NamedOffset.GREATEST_TIMESTAMP:
            found = await self._searches.find_greatest(log)
        else:
            found = await self._searches.find_time(log, wanted)
        is_hidden = found is not None and is_committed and found.offset >= log.core.last_stable_offset
        return None if is_hidden else found

    def _named(self, log: PartitionLog, name: NamedOffset, *, is_committed: bool) -> int:
        core = log.core
        if name is NamedOffset.LATEST:
            return core.last_stable_offset if is_committed else core.high_watermark
        if name is NamedOffset.EARLIEST:
            return core.log_start_offset
        if name is NamedOffset.EARLIEST_LOCAL:
            return self._reader.hot_start_offset(log)
        pointer = self._reader.manifest_pointer(log)
        cold_end = pointer.end_offset if pointer is not None else 0
        if name is NamedOffset.LATEST_TIERED:
            return cold_end - 1 if cold_end > core.log_start_offset else -1
        assert name is NamedOffset.EARLIEST_PENDING_UPLOAD, "no other name is at once"
        return max(cold_end, core.log_start_offset)
