"""Checkpoint entries: the partition's state at a ledger's base offset, written before the ledger's first batch.

Each ledger begins with one checkpoint in one or more parts (entries 0, 1, …). So a takeover reads no further back than the
newest complete checkpoint, and tiering reads producers and transactions without asking the owner. An owner that hands its
partition over may write one more checkpoint, of a single part, after the last batch for the next owner. A part is::

    0  4s  magic b"SLCK"      no record batch begins with it: its base offset would exceed 2**62
    4  u8  format version (1)
    5  u8  reserved, 0
    6  u16 part               0, 1 … parts - 1
    8  u16 parts
    10 ..  the part's share of the msgpack body, split at any byte

The body is the msgpack map of :class:`Checkpoint`; unknown fields are skipped, so that fields can be added.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

import msgspec

from stratalog_core.errors import Corrupt
from stratalog_core.malformed import MALFORMED
from stratalog_core.ports import Buffer

MAGIC: Final = b"SLCK"
FORMAT_VERSION: Final = 1
PART_BYTES_MAX: Final = 1024 * 1024
PARTS_MAX: Final = 0xFFFF
_PART: Final = struct.Struct(">4sBBHH")
PART_HEADER_BYTES: Final = _PART.size
NO_COORDINATOR_EPOCH: Final = -1


class SequencedBatch(msgspec.Struct, frozen=True, array_like=True):
    """An appended batch of an idempotent producer, kept to recognise its retry."""

    base_sequence: int
    last_sequence: int
    last_offset: int
    timestamp_ms: int

    @property
    def base_offset(self) -> int:
        return self.last_offset - ((self.last_sequence - self.base_sequence) & 0x7FFF_FFFF)


class ProducerEntry(msgspec.Struct, frozen=True, array_like=True):
    """State of one producer id: its current epoch and up to five last batches, oldest first.

    ``coordinator_epoch`` is that of its last transaction marker, -1 if there was none.
    """

    producer_id: int
    producer_epoch: int
    batches: tuple[SequencedBatch, ...] = ()
    coordinator_epoch: int = NO_COORDINATOR_EPOCH


class EpochStart(msgspec.Struct, frozen=True, array_like=True):
    """Leader epoch ``epoch`` wrote from ``start_offset`` on."""

    epoch: int
    start_offset: int


class OngoingTransaction(msgspec.Struct, frozen=True, array_like=True):
    """An open transaction; its first offset bounds the last stable offset."""

    producer_id: int
    first_offset: int


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """State after all batches below ``offset`` and no others."""

    offset: int
    leader_epochs: tuple[EpochStart, ...] = ()
    producers: tuple[ProducerEntry, ...] = ()
    transactions: tuple[OngoingTransaction, ...] = ()
    application_state: bytes | None = None
    more_is_coming: bool = False
    """Set in a handover checkpoint if producers were writing at the handover."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Checkpoint)


def is_checkpoint(payload: Buffer) -> bool:
    """Whether an entry (or at least its first four bytes) is a checkpoint part and not a record batch."""
    return bytes(payload[:4]) == MAGIC


def part_position(payload: Buffer) -> tuple[int, int]:
    """Return ``(part, parts)`` of a checkpoint part; its first ten bytes are enough. Raises ``Corrupt``."""
    if len(payload) < PART_HEADER_BYTES:
        raise Corrupt(f"checkpoint part of {len(payload)} bytes is cut short")
    magic, version, _, part, parts = _PART.unpack_from(payload)
    if magic != MAGIC or part >= parts:
        raise Corrupt(f"checkpoint part {part} of {parts} is malformed")
    if version != FORMAT_VERSION:
        raise Corrupt(f"checkpoint has format version {version}; this release reads {FORMAT_VERSION}")
    return part, parts


def encode_checkpoint(checkpoint: Checkpoint, part_bytes_max: int = PART_BYTES_MAX) -> list[bytes]:
    """Split a checkpoint into parts, in entry order. Parts exceed ``part_bytes_max`` if there would be more than
    ``PARTS_MAX``.
    """
    body = _encoder.encode(checkpoint)
    part_bytes = max(part_bytes_max, -(-len(body) // PARTS_MAX))
    chunks = [body[start : start + part_bytes] for start in range(0, len(body), part_bytes)]
    return [_PART.pack(MAGIC, FORMAT_VERSION, 0, part, len(chunks)) + chunk for part, chunk in enumerate(chunks)]


def decode_checkpoint(parts: Sequence[Buffer]) -> Checkpoint:
    """Decode a checkpoint from all its parts in order. Raises ``Corrupt`` for a missing part or an unknown format version."""
    for index, payload in enumerate(parts):
        if part_position(payload) != (index, len(parts)):
            raise Corrupt(f"checkpoint part {part_position(payload)} stands where ({index}, {len(parts)}) belongs")
    body = b"".join(bytes(payload[PART_HEADER_BYTES:]) for payload in parts)
    try:
        return _decoder.decode(body)
    except MALFORMED as malformed:
        raise Corrupt(f"checkpoint is malformed: {malformed}") from malformed
