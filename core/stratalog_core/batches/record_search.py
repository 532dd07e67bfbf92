"""Searches the records of one batch in bounded memory: decompresses piece by piece and keeps no record.

A batch of 4 KB can expand to 128 MiB and to millions of records, so searches run outside the event loop
(``search_pool.py``). A search by time reads only the head of each record: its length, the deltas of its timestamp and offset,
and the length of its key. A search by rules examines what is to be stored, so it also checks the lengths of all fields, as
Kafka does; the fields themselves it skips.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from stratalog_core.batches.batch import HEADER_BYTES, BatchHeader
from stratalog_core.batches.compression import DECOMPRESSED_BYTES_MAX, decompress_pieces, decompression_bytes
from stratalog_core.batches.records import VARINT_BYTES_MAX, decode_varint
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
        self._base_offset, self._last_offset = header.base_offset, header.last_offset
        self._base_timestamp_ms = header.base_timestamp_ms
        self._append_ms = header.max_timestamp_ms if header.is_log_append_time else None
        self._rest = b""
        self._skip = 0
        self._earlier = header.base_offset - 1
        self._is_inside = False
        """Whether the fields of a record are being read that the last piece began."""
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
        if self.records_left or self._skip or self._is_inside:
            raise Corrupt(f"{self.records_left} records are missing in the batch at {self._header.base_offset}")
        self.is_over()

    def is_over(self) -> bool:
        """Whether nothing that follows can matter. Raises ``Corrupt`` if something follows that may not."""
        return not self.records_left

    def _walk(self, content: bytes, ahead_bytes: int) -> None:
        position, size = self._continue_record(content), len(content)
        while self.records_left and size - position >= ahead_bytes and not self._is_inside:
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
            self._see(timestamp_delta, offset_delta, key_bytes)
            if self.found is not None:
                return
            position = self._after_head(content, position, end, key_bytes)
        self._skip = max(position - size, 0)
        self._rest = content[position:]

    def _continue_record(self, content: bytes) -> int:
        """Read on in the record that the last piece began; return the position at which this search continues."""
        del content
        return 0

    def _after_head(self, content: bytes, position: int, end: int, key_bytes: int) -> int:
        """Read on after the length of a record's key; return the position at which this search continues."""
        del content, position, key_bytes
        return end

    def _see(self, timestamp_delta: int, offset_delta: int, key_bytes: int) -> None:
        offset = self._base_offset + offset_delta
        if not self._earlier < offset <= self._last_offset:
            raise Corrupt(f"record offset {offset} is not above {self._earlier} and at most {self._last_offset}")
        self._earlier = offset
        self.records_left -= 1
        timestamp_ms = self._base_timestamp_ms + timestamp_delta if self._append_ms is None else self._append_ms
        if self._is_sought(offset, timestamp_ms, key_bytes):
            self.found = FoundInBatch(offset, timestamp_ms)

    def _is_sought(self, offset: int, timestamp_ms: int, key_bytes: int) -> bool:
        """Whether this record is the one."""
        raise NotImplementedError


class _TimeSearch(_Search):
    def __init__(self, header: BatchHeader, timestamp_ms: int, from_offset: int) -> None:
        super().__init__(header)
        self._timestamp_ms = timestamp_ms
        self._from_offset = from_offset

    def _is_sought(self, offset: int, timestamp_ms: int, key_bytes: int) -> bool:
        return timestamp_ms >= self._timestamp_ms and offset >= self._from_offset


class _RuleSearch(_Search):
    """Requires that the fields of each record fill it, and that nothing follows the last record."""

    def __init__(self, header: BatchHeader, rules: RecordRules) -> None:
        super().__init__(header)
        self._rules = rules
        self._room = 0
        """Bytes of the record from the present position on."""
        self._fields = 0
        """Fields before the next number that is none: the value before the number of headers; name and value of each header."""
        self._has_count = False

    def is_over(self) -> bool:
        if not self.records_left and self._rest and not self._is_inside:
            raise Corrupt(f"bytes follow the last record of the batch at {self._header.base_offset}")
        return False

    def _is_sought(self, offset: int, timestamp_ms: int, key_bytes: int) -> bool:
        return (key_bytes < 0 and self._rules.needs_key) or not self._rules.allows_time(timestamp_ms)

    def _after_head(self, content: bytes, position: int, end: int, key_bytes: int) -> int:
        # Most records end in this piece: 1 us, where reading on piece by piece takes 3, and 2 more for a header.
        if end <= len(content) and _fills(content, position + max(key_bytes, 0), end):
            return end
        self._room = end - position
        self._fields, self._has_count, self._is_inside = 1, False, True
        return self._read_fields(content, self._skipped(position, key_bytes))

    def _continue_record(self, content: bytes) -> int:
        return self._read_fields(content, 0) if self._is_inside else 0

    def _skipped(self, position: int, field_bytes: int) -> int:
        if field_bytes > self._room:
            raise Corrupt(f"field of {field_bytes} bytes in {self._room} of the record at {self._earlier}")
        if field_bytes <= 0:
            return position
        self._room -= field_bytes
        return position + field_bytes

    def _read_fields(self, content: bytes, position: int) -> int:
        """Read the lengths of the fields that are left, as far as the content goes."""
        size = len(content)
        while self._fields or not self._has_count:
            if size - position < min(self._room, VARINT_BYTES_MAX):
                return position
            number, after = decode_varint(content, position)
            self._room -= after - position
            if self._fields:
                if number < 0 and self._has_count and self._fields % 2 == 0:
                    raise Corrupt(f"a header of the record at {self._earlier} has no name")
                position = self._skipped(after, number)
                self._fields -= 1
            elif 0 <= number <= self._room:
                position, self._fields, self._has_count = after, 2 * number, True
            else:
                raise Corrupt(f"the record at {self._earlier} claims {number} headers in {self._room} bytes")
        if self._room:
            raise Corrupt(f"{self._room} bytes follow the last field of the record at {self._earlier}")
        self._is_inside = False
        return position


def _fills(content: bytes, position: int, end: int) -> bool:
    """Whether value and headers are sound and end at ``end``. False also if that would take longer to find out."""
    if end - position < 2 or ((first := content[position]) >= 0x80 and content[position + 1] >= 0x80):
        return False
    if first >= 0x80:
        position += 2 + ((first & 0x7F) >> 1) + (content[position + 1] << 6)
    else:
        position += 1 + (0 if first == 1 else first >> 1)
    if (first & 1 and first != 1) or position >= end:
        return False
    count = content[position]
    position += 1
    if count & 0x81:
        return False
    for is_value in (False, True) * (count >> 1):
        if position >= end or (first := content[position]) >= 0x80:
            return False
        position += 1
        if not first & 1:
            position += first >> 1
        elif first != 1 or not is_value:
            return False
    return position == end
