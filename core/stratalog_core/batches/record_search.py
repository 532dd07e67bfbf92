"""Searches the records of one batch in bounded memory: decompresses piece by piece and keeps no record.

A batch of 4 KB can expand to 128 MiB and to millions of records, so searches run outside the event loop
(``search_pool.py``). Only the head of each record is read: its length, the deltas of its timestamp and offset, and the length
of its key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from stratalog_core.batches.batch import HEADER_BYTES, BatchHeader
from stratalog_core.batches.compression import DECOMPRESSED_BYTES_MAX, decompress_pieces, decompression_bytes
from stratalog_core.batches.records import decode_varint
from stratalog_core.errors import Corrupt, Unavailable
from stratalog_core.ports import Buffer

_HEAD_BYTES_MAX: Final = 41
"""A record's length, attributes, timestamp delta, offset delta and key length, each number of ten bytes at most."""
_NO_TIMESTAMP: Final = -1
IsWanted = Callable[[], bool]
"""Whether a caller still waits for the search."""


class FoundInBatch(NamedTuple):
    offset: int
    timestamp_ms: int


class RecordRules(NamedTuple):
    """Rules for each record of a produced batch. Times are wall times in ms; None: any time."""

    needs_key: bool
    earliest_ms: int | None = None
    latest_ms: int | None = None

    def allows_time(self, timestamp_ms: int) -> bool:
        """Whether a record may have this timestamp. A record without one (-1) may be in any batch, as in Kafka."""
        if timestamp_ms == _NO_TIMESTAMP:
            return True
        if self.earliest_ms is not None and timestamp_ms < self.earliest_ms:
            return False
        return self.latest_ms is None or timestamp_ms <= self.latest_ms


def search_bytes(batch: Buffer, header: BatchHeader) -> int:
    """Return the bytes of memory that a search of this batch needs, without the batch itself."""
    return decompression_bytes(header.compression, memoryview(batch)[HEADER_BYTES : header.size_bytes])


def first_reaching(
    batch: Buffer,
    header: BatchHeader,
    timestamp_ms: int,
    from_offset: int,
    *,
    is_wanted: IsWanted = lambda: True,
    memory_bytes: int = DECOMPRESSED_BYTES_MAX,
) -> FoundInBatch | None:
    """Return the first record at or beyond ``from_offset`` whose timestamp is ``timestamp_ms`` or later; None if none is.

    A batch whose codec claims more memory than ``memory_bytes`` may not expand beyond ``memory_bytes``. Raises ``Corrupt`` for
    malformed records or output beyond the limit, and ``Unavailable`` once ``is_wanted`` returns False.
    """
    return _searched(_TimeSearch(header, timestamp_ms, from_offset), batch, header, is_wanted, memory_bytes)


def first_refused(
    batch: Buffer,
    header: BatchHeader,
    rules: RecordRules,
    *,
    is_wanted: IsWanted = lambda: True,
    memory_bytes: int = DECOMPRESSED_BYTES_MAX,
) -> FoundInBatch | None:
    """Return the first record that ``rules`` do not allow; None if all are allowed. Raises as :func:`first_reaching` does."""
    return _searched(_RuleSearch(header, rules), batch, header, is_wanted, memory_bytes)


def _searched(
    search: _Search, batch: Buffer, header: BatchHeader, is_wanted: IsWanted, memory_bytes: int
) -> FoundInBatch | None:
    content = memoryview(batch)[HEADER_BYTES : header.size_bytes]
    limit_bytes = DECOMPRESSED_BYTES_MAX if search_bytes(batch, header) <= memory_bytes else memory_bytes
    for piece in decompress_pieces(header.compression, content, limit_bytes):
        if not is_wanted():
            raise Unavailable("no client waits for this search any longer")
        search.read(piece)
        if search.found is not None or search.is_over():
            return search.found
    search.end()
    return search.found


class _Search:
    """Parses the heads of a batch's records from decompressed pieces of any size."""

    def __init__(self, header: BatchHeader) -> None:
        self._header = header
        self._rest = b""
        self._skip = 0
        self._earlier = header.base_offset - 1
        self.records_left = header.record_count
        self.found: FoundInBatch | None = None

    def read(self, piece: bytes) -> None:
        """Parse one more piece. A record head that is truncated at its end is kept for the next piece."""
        if self._skip >= len(piece):
            self._skip -= len(piece)
            return
        self._walk(self._rest + piece[self._skip :], _HEAD_BYTES_MAX)

    def end(self) -> None:
        """Finish after the last piece. Raises ``Corrupt`` if records are missing."""
        self._walk(self._rest, 1)
        if self.found is not None:
            return
        if self.records_left or self._skip:
            raise Corrupt(f"{self.records_left} records are missing in the batch at {self._header.base_offset}")
        self.is_over()

    def is_over(self) -> bool:
        """Whether nothing that follows can matter. Raises ``Corrupt`` if something follows that may not."""
        return not self.records_left

    def _walk(self, content: bytes, ahead_bytes: int) -> None:
        position, size = 0, len(content)
        while self.records_left and size - position >= ahead_bytes:
            start = position
            length, position = decode_varint(content, position)
            end = position + length
            if length < 1:
                raise Corrupt(f"record of {length} bytes in the batch at {self._header.base_offset}")
            timestamp_delta, position = decode_varint(content, position + 1)
            offset_delta, position = decode_varint(content, position)
            key_bytes, position = decode_varint(content, position)
            if position > end:
                raise Corrupt(f"record at byte {start} is too short for its head in the batch at {self._header.base_offset}")
            self._see(timestamp_delta, offset_delta, key_bytes, end - position)
            if self.found is not None:
                return
            position = end
        self._skip = max(position - size, 0)
        self._rest = content[position:]

    def _see(self, timestamp_delta: int, offset_delta: int, key_bytes: int, room_bytes: int) -> None:
        header = self._header
        offset = header.base_offset + offset_delta
        if not self._earlier < offset <= header.last_offset:
            raise Corrupt(f"record offset {offset} is not above {self._earlier} and at most {header.last_offset}")
        self._earlier = offset
        self.records_left -= 1
        timestamp_ms = header.max_timestamp_ms if header.is_log_append_time else header.base_timestamp_ms + timestamp_delta
        if self._is_sought(offset, timestamp_ms, key_bytes, room_bytes):
            self.found = FoundInBatch(offset, timestamp_ms)

    def _is_sought(self, offset: int, timestamp_ms: int, key_bytes: int, room_bytes: int) -> bool:
        """Whether this record is the one. ``room_bytes`` follow the length of its key in the record."""
        raise NotImplementedError


class _TimeSearch(_Search):
    def __init__(self, header: BatchHeader, timestamp_ms: int, from_offset: int) -> None:
        super().__init__(header)
        self._timestamp_ms = timestamp_ms
        self._from_offset = from_offset

    def _is_sought(self, offset: int, timestamp_ms: int, key_bytes: int, room_bytes: int) -> bool:
        return timestamp_ms >= self._timestamp_ms and offset >= self._from_offset


class _RuleSearch(_Search):
    """Examines what is to be stored, so it also requires that keys are within their records, and that nothing follows these."""

    def __init__(self, header: BatchHeader, rules: RecordRules) -> None:
        super().__init__(header)
        self._rules = rules

    def is_over(self) -> bool:
        if not self.records_left and self._rest:
            raise Corrupt(f"bytes follow the last record of the batch at {self._header.base_offset}")
        return False

    def _is_sought(self, offset: int, timestamp_ms: int, key_bytes: int, room_bytes: int) -> bool:
        if key_bytes > room_bytes:
            raise Corrupt(f"key of {key_bytes} bytes in {room_bytes} of the record at {offset}")
        return (key_bytes < 0 and self._rules.needs_key) or not self._rules.allows_time(timestamp_ms)
