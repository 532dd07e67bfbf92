"""Codecs of the checkpoints that save a restart from reading the whole log; ``docs/reference/formats/bookie-checkpoint.md``.

- An index file per closed log file: the runs of its entries. Immutable. Its table is read at start, rows when needed.
- The state file, replaced as a whole when a log file is closed: the closed files, and fences, LACs and tombstones at that time.
  The log files from ``next_generation`` on are replayed over it.

Everything in a log file is durable before the state file lists it as closed, and the state file is durable before a log file
that it no longer lists is recycled. It does no I/O.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec
from crc32c import crc32c

from stratalog_bookies.disk.core.index import ROW_BYTES, Run
from stratalog_bookies.protocol.ids import ID_MAX
from stratalog_core.errors import Corrupt
from stratalog_core.malformed import MALFORMED
from stratalog_core.ports import Buffer

VERSION: Final = 1
INDEX_VERSION: Final = 2
_STATE_MAGIC: Final = b"SLST"
_INDEX_MAGIC: Final = b"SLIX"
_STATE_FIELDS = struct.Struct(">4sHHI")
_INDEX_FIELDS = struct.Struct(">4sHHQI")
_CRC = struct.Struct(">I")
_STATE_HEADER_BYTES: Final = _STATE_FIELDS.size + _CRC.size
INDEX_HEADER_BYTES: Final = _INDEX_FIELDS.size + _CRC.size
_TABLE_ROW = struct.Struct(">QQQIQQI")
_LEDGER = struct.Struct(">QqqB")
_TOMBSTONE = struct.Struct(">Q")


class ClosedFile(msgspec.Struct, frozen=True, kw_only=True):
    """A log file that takes no more frames. Everything below ``end`` is durable and indexed."""

    generation: int
    end: int


class LedgerState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a ledger that index files do not record."""

    ledger_id: int
    lac: int
    last_entry: int
    fenced: bool


class State(msgspec.Struct, frozen=True, kw_only=True):
    """Content of the state file. ``pack_ledgers`` and ``pack_tombstones`` define the two packed tables.

    ``greatest_ledger_id`` covers all ledgers that the disk has ever held or deleted, those without a tombstone included
    (-1: none).
    """

    next_generation: int
    closed: tuple[ClosedFile, ...] = ()
    ledgers: bytes = b""
    tombstones: bytes = b""
    greatest_ledger_id: int = -1


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(State)


def pack_ledgers(ledgers: Iterable[LedgerState]) -> bytes:
    return b"".join([_LEDGER.pack(each.ledger_id, each.lac, each.last_entry, each.fenced) for each in ledgers])


def unpack_ledgers(packed: bytes) -> list[LedgerState]:
    return [
        LedgerState(ledger_id=ledger_id, lac=lac, last_entry=last_entry, fenced=bool(fenced))
        for ledger_id, lac, last_entry, fenced in _LEDGER.iter_unpack(packed)
    ]


def pack_tombstones(ledger_ids: Iterable[int]) -> bytes:
    return b"".join([_TOMBSTONE.pack(ledger_id) for ledger_id in ledger_ids])


def unpack_tombstones(packed: bytes) -> list[int]:
    return [ledger_id for (ledger_id,) in _TOMBSTONE.iter_unpack(packed)]


def encode_state(state: State) -> bytes:
    body = _encoder.encode(state)
    fields = _STATE_FIELDS.pack(_STATE_MAGIC, VERSION, 0, len(body))
    return fields + _CRC.pack(crc32c(body, crc32c(fields))) + body


def decode_state(content: bytes) -> State:
    """Decode a state file. Raises ``Corrupt``: a bookie does not start from a state file that it cannot trust."""
    if len(content) < _STATE_HEADER_BYTES:
        raise Corrupt(f"state file of {len(content)} bytes is cut short")
    fields, body = content[: _STATE_FIELDS.size], content[_STATE_HEADER_BYTES:]
    magic, version, _, length = _STATE_FIELDS.unpack(fields)
    if magic != _STATE_MAGIC or version != VERSION:
        raise Corrupt(f"state file has format {magic!r} version {version}; this bookie reads version {VERSION}")
    if len(body) != length or crc32c(body, crc32c(fields)) != _CRC.unpack_from(content, _STATE_FIELDS.size)[0]:
        raise Corrupt("state file does not match its CRC")
    try:
        state = _decoder.decode(body)
    except MALFORMED as malformed:
        raise Corrupt(f"malformed state file: {malformed}") from malformed
    _check_state(state)
    return state


def _check_state(state: State) -> None:
    """Raise ``Corrupt`` unless the packed tables are whole, no ledger is both held and deleted, and files are listed once."""
    if len(state.ledgers) % _LEDGER.size or len(state.tombstones) % _TOMBSTONE.size:
        raise Corrupt(
            f"state file has tables of {len(state.ledgers)} and {len(state.tombstones)} bytes, not a multiple of the row size"
        )
    held = {ledger.ledger_id for ledger in unpack_ledgers(state.ledgers)}
    gone = unpack_tombstones(state.tombstones)
    if not held.isdisjoint(gone) or any(ledger_id > ID_MAX for ledger_id in (*held, *gone, state.greatest_ledger_id)):
        raise Corrupt("state file lists a ledger as both held and deleted, or an impossible ledger id")
    closed = {file.generation for file in state.closed}
    if len(closed) < len(state.closed) or not all(0 < generation < state.next_generation for generation in closed):
        raise Corrupt(f"state file lists closed log files {sorted(closed)} and {state.next_generation} as the next")


def encode_index(generation: int, runs: Sequence[Run]) -> bytes:
    """The index file of a closed log file. Sets ``stored_at`` and ``stored_crc`` of its runs."""
    at = INDEX_HEADER_BYTES + len(runs) * _TABLE_ROW.size
    table = []
    pieces = []
    for run in runs:
        assert run.rows is not None, "the rows of an open file are in memory"
        rows = bytes(run.rows)
        assert len(rows) == run.count * ROW_BYTES, "a run has as many rows as entries"
        assert run.generation == generation, "the index of a file has its own runs"
        run.stored_at, run.stored_crc = at, crc32c(rows)
        table.append(
            _TABLE_ROW.pack(run.ledger_id, run.first, run.last, run.count, run.payload_bytes, run.stored_at, run.stored_crc)
        )
        pieces.append(rows)
        at += len(rows)
    packed = b"".join(table)
    fields = _INDEX_FIELDS.pack(_INDEX_MAGIC, INDEX_VERSION, 0, generation, len(runs))
    return b"".join([fields, _CRC.pack(crc32c(packed, crc32c(fields))), packed, *pieces])


def index_table_bytes(header: Buffer, generation: int) -> int:
    """Length of the table after an index file's header. Raises ``Corrupt``."""
    if len(header) < INDEX_HEADER_BYTES:
        raise Corrupt(f"index of log file {generation:016x} is cut short")
    magic, version, _, found, runs = _INDEX_FIELDS.unpack_from(header)
    if magic != _INDEX_MAGIC or version != INDEX_VERSION or found != generation:
        raise Corrupt(f"index of log file {generation:016x} has format {magic!r} version {version}, file {found:016x}")
    return int(runs) * _TABLE_ROW.size


def decode_index_table(header: Buffer, table: Buffer, generation: int) -> list[Run]:
    """Runs without their rows. Raises ``Corrupt``."""
    (crc,) = _CRC.unpack_from(header, _INDEX_FIELDS.size)
    if len(table) != index_table_bytes(header, generation) or crc32c(table, crc32c(header[: _INDEX_FIELDS.size])) != crc:
        raise Corrupt(f"index of log file {generation:016x} does not match its CRC")
    runs = []
    for ledger_id, first, last, count, payload_bytes, stored_at, stored_crc in _TABLE_ROW.iter_unpack(table):
        if ledger_id > ID_MAX or not first <= last <= ID_MAX or not 1 <= count <= last - first + 1:
            raise Corrupt(f"index of log file {generation:016x} has {count} entries {first}..{last} of ledger {ledger_id}")
        run = Run(ledger_id, generation)
        run.rows = None
        run.first, run.last, run.count, run.payload_bytes = first, last, count, payload_bytes
        run.stored_at, run.stored_crc = stored_at, stored_crc
        runs.append(run)
    if len({run.ledger_id for run in runs}) < len(runs):
        raise Corrupt(f"index of log file {generation:016x} lists a ledger twice")
    return runs


def check_rows(run: Run, rows: bytes) -> bytes:
    """Check the rows of a stored run as they were read from its index file. Raises ``Corrupt``."""
    if len(rows) != run.count * ROW_BYTES or crc32c(rows) != run.stored_crc:
        raise Corrupt(f"index rows of ledger {run.ledger_id} in log file {run.generation:016x} do not match their CRC")
    return rows
