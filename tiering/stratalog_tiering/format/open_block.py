"""The block of a segment that is being filled: its index entry grows with each batch. No I/O."""

from __future__ import annotations

from crc32c import crc32c

from stratalog_core.batches.batch import BatchHeader
from stratalog_core.ports import Buffer
from stratalog_tiering.format.footer import BlockEntry, lowest
from stratalog_tiering.format.merkle import TreeFrontier


class OpenBlock:
    """The block that is being filled. Checksums advance with each batch, so no byte is read twice."""

    __slots__ = (
        "_base_offset", "_crc", "_last_offset", "_leaves", "_max_ms", "_min_ms", "_position", "_records", "length"
    )  # fmt: skip

    def __init__(self, position: int, base_offset: int) -> None:
        self._position = position
        self._base_offset = base_offset
        self._last_offset = base_offset - 1
        self._min_ms: int | None = None
        self._max_ms = -1
        self._records = 0
        self._crc = 0
        self._leaves = TreeFrontier()
        self.length = 0

    def add(self, batch: Buffer, header: BatchHeader, leaf: bytes) -> None:
        self._min_ms = header.min_timestamp_ms if not self.length else lowest((self._min_ms, header.min_timestamp_ms))
        self._max_ms = max(self._max_ms, header.max_timestamp_ms)
        self._crc = crc32c(batch, self._crc)
        self._leaves.append(leaf)
        self._last_offset = header.last_offset
        self._records += header.record_count
        self.length += len(batch)

    def entry(self) -> BlockEntry:
        return BlockEntry(
            base_offset=self._base_offset,
            last_offset=self._last_offset,
            min_timestamp_ms=self._min_ms,
            max_timestamp_ms=self._max_ms,
            position=self._position,
            length=self.length,
            crc=self._crc,
            record_count=self._records,
            batch_count=self._leaves.size,
            leaves_root=self._leaves.root(),
            plain_length=self.length,
        )
