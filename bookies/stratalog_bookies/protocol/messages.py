"""Messages to and from a bookie: methods 0x0201 to 0x020b; ``docs/reference/formats/bookie-messages.md`` specifies every byte.

Bulk bodies (ADD, READ, READ_HEADERS) are packed by hand and carry payloads without a copy. The other bodies are msgpack, one
struct per method. Every list and id is bounded, and a malformed body raises ``Invalid``. Absence is explicit: a read answer
says for each range how far it decides (``decided_to``) and what could not be read. Only a decided id that is not listed is
absent. No I/O.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Final, NamedTuple, TypeVar

import msgspec
from crc32c import crc32c

from stratalog_bookies.protocol.ids import EntryId, LedgerId, check_ids
from stratalog_core.errors import Invalid
from stratalog_core.malformed import MALFORMED
from stratalog_core.ports import Buffer

ADD: Final = 0x0201
READ: Final = 0x0202
READ_HEADERS: Final = 0x0203
FENCE: Final = 0x0204
LAC: Final = 0x0205
WRITE_LAC: Final = 0x0206
DELETE: Final = 0x0207
LIST: Final = 0x0208
INFO: Final = 0x0209
SCRUB: Final = 0x020A
AWAIT_LAC: Final = 0x020B

ENTRIES_MAX: Final = 65_536
"""Entries in one ADD, and in one answer to READ or READ_HEADERS."""
RANGES_MAX: Final = 65_536
"""Ranges in one READ or READ_HEADERS."""
LEDGERS_MAX: Final = 65_536
"""Ledgers in one FENCE, LAC, WRITE_LAC, DELETE or page of LIST."""
HEAD_BYTES_MAX: Final = 61  # The header of a record batch: this much of a payload is read and checked without the rest.
"""Maximum payload bytes of each entry that READ_HEADERS returns."""

RECOVERY_ADD: Final = 1
"""Entry flag of ADD: allowed on a fenced ledger. Set by the recovery that fenced it, and by re-replication."""
FENCE_FIRST: Final = 1
"""Flag of READ: fence the ledgers durably first, then answer with their content at that time."""


class Status(IntEnum):
    """Answer for one entry, range or ledger. Numbers are permanent."""

    OK = 0
    FENCED = 1
    NO_SUCH_LEDGER = 2
    """Never seen here, or deleted: every entry of it is explicitly absent."""
    READ_ONLY = 3
    BAD_CRC = 4
    STORAGE_FAILED = 5
    CONFLICT = 6
    """The entry id exists with another payload; entries are written once."""
    OVERLOADED = 7


class EntryState(IntEnum):
    """Meaning of an entry's flags byte in an answer. Numbers are permanent."""

    PRESENT = 0
    UNREADABLE = 2
    """The entry exists but could not be read, or does not match its CRC: neither content nor absence."""


class EntryHeader(NamedTuple):
    """The 33 bytes before each payload (in answers: separate from it), in wire order."""

    ledger_id: int
    entry_id: int
    lac: int
    payload_bytes: int
    crc: int
    flags: int


class Range(NamedTuple):
    """Entries ``first`` to ``last``, inclusive, of one ledger."""

    ledger_id: int
    first: int
    last: int


class ReadEntry(NamedTuple):
    """An entry in an answer. ``payload`` is a view of the answer: the whole payload for READ, its head for READ_HEADERS."""

    entry_id: int
    lac: int
    payload_bytes: int
    crc: int
    state: int
    payload: memoryview


class RangeAnswer(NamedTuple):
    """Entries in ascending order. Ids from the range's first to ``decided_to`` that are not listed do not exist here.

    ``decided_to`` is below the range's last if a bound cut the answer: ask again from there. It is below the range's first if
    nothing is decided: ``status`` says why, or earlier ranges used up the bound.
    """

    status: Status
    decided_to: int
    entries: list[ReadEntry]


ENTRY_HEADER: Final = struct.Struct(">QQqIIB")
ENTRY_HEADER_BYTES: Final = ENTRY_HEADER.size
_CHECKED = struct.Struct(">QQqI")
CHECKED_BYTES: Final = _CHECKED.size
"""Leading bytes of an entry header that the entry's CRC covers."""
_COUNT = struct.Struct(">I")
COUNT_BYTES: Final = _COUNT.size
_READ_HEAD = struct.Struct(">IIB")
_HEADERS_HEAD = struct.Struct(">IHI")
_RANGE = struct.Struct(">QQQ")
_RANGE_ANSWER = struct.Struct(">BqI")


def entry_crc(ledger_id: int, entry_id: int, lac: int, payload: Sequence[Buffer], payload_bytes: int) -> int:
    """CRC32C over the packed ids, LAC and length, then the payload, which may be in several buffers."""
    crc = crc32c(_CHECKED.pack(ledger_id, entry_id, lac, payload_bytes))
    for part in payload:
        crc = crc32c(part, crc)
    return crc


def pack_entry(ledger_id: int, entry_id: int, lac: int, payload: Sequence[Buffer], flags: int = 0) -> bytes:
    """Header of an entry, its CRC computed."""
    payload_bytes = sum(map(len, payload))
    crc = entry_crc(ledger_id, entry_id, lac, payload, payload_bytes)
    return ENTRY_HEADER.pack(ledger_id, entry_id, lac, payload_bytes, crc, flags)


def encode_add(headers: Sequence[bytes], payloads: Iterable[Buffer]) -> list[Buffer]:
    """Parts of an ADD: ``headers`` made by ``pack_entry``; ``payloads`` in the same order, each in any number of buffers."""
    return [_COUNT.pack(len(headers)) + b"".join(headers), *payloads]


def decode_add(body: memoryview) -> list[tuple[int, int, int, int, int, int]]:
    """Headers of an ADD as plain tuples in the order of ``EntryHeader``; payloads begin at ``payloads_start``.

    Raises ``Invalid`` if counts and lengths do not add up to the body.
    """
    count = _count(body, ENTRIES_MAX, "entries")
    start = payloads_start(count)
    if start > len(body):
        raise Invalid(f"ADD of {count} entries is cut short at {len(body)} bytes")
    headers = list(ENTRY_HEADER.iter_unpack(body[COUNT_BYTES:start]))
    check_ids([header[0] | header[1] for header in headers], "ADD")
    payload_bytes = sum([header[3] for header in headers])
    if start + payload_bytes != len(body):
        raise Invalid(f"ADD has {len(body) - start} payload bytes; its entries claim {payload_bytes}")
    return headers


def payloads_start(count: int) -> int:
    """Position of the first payload in an ADD of ``count`` entries."""
    return COUNT_BYTES + count * ENTRY_HEADER_BYTES


def encode_statuses(statuses: Sequence[int]) -> bytes:
    """Answer to ADD, WRITE_LAC and DELETE: one status each, in the order of the request."""
    return _COUNT.pack(len(statuses)) + bytes(statuses)


def decode_statuses(body: memoryview) -> bytes:
    """One ``Status`` number each. Raises ``Invalid``."""
    count = _count(body, ENTRIES_MAX, "statuses")
    if len(body) != COUNT_BYTES + count:
        raise Invalid(f"the answer has {len(body) - COUNT_BYTES} statuses and announces {count}")
    return bytes(body[COUNT_BYTES:])


def encode_read(ranges: Sequence[Range], max_bytes: int, flags: int = 0) -> list[Buffer]:
    """A READ. ``max_bytes`` bounds the payloads of the whole answer; the first entry found is returned even if it is larger."""
    return [_READ_HEAD.pack(len(ranges), max_bytes, flags) + b"".join([_RANGE.pack(*each) for each in ranges])]


def decode_read(body: memoryview) -> tuple[list[Range], int, int]:
    """``(ranges, max_bytes, flags)``. Raises ``Invalid``."""
    if len(body) < _READ_HEAD.size:
        raise Invalid(f"READ of {len(body)} bytes is cut short")
    count, max_bytes, flags = _READ_HEAD.unpack_from(body)
    return _ranges(body[_READ_HEAD.size :], count), max_bytes, flags


def encode_read_headers(ranges: Sequence[Range], head_bytes: int, entries_max: int = ENTRIES_MAX) -> list[Buffer]:
    """A READ_HEADERS for the first ``head_bytes`` payload bytes of at most ``entries_max`` entries."""
    return [_HEADERS_HEAD.pack(len(ranges), head_bytes, entries_max) + b"".join([_RANGE.pack(*each) for each in ranges])]


def decode_read_headers(body: memoryview) -> tuple[list[Range], int, int]:
    """``(ranges, head_bytes, entries_max)``. Raises ``Invalid``."""
    if len(body) < _HEADERS_HEAD.size:
        raise Invalid(f"READ_HEADERS of {len(body)} bytes is cut short")
    count, head_bytes, entries_max = _HEADERS_HEAD.unpack_from(body)
    if head_bytes > HEAD_BYTES_MAX:
        raise Invalid(f"head_bytes is {head_bytes}; maximum is {HEAD_BYTES_MAX}")
    return _ranges(body[_HEADERS_HEAD.size :], count), head_bytes, min(entries_max, ENTRIES_MAX)


def encode_read_answer(
    ranges: Sequence[tuple[int, int, int]], headers: Sequence[bytes], payloads: Iterable[Buffer]
) -> list[Buffer]:
    """Answer to READ and READ_HEADERS: ``ranges`` are ``(status, decided_to, entries)``, ``headers`` packed entry headers."""
    table = b"".join([_RANGE_ANSWER.pack(*each) for each in ranges])
    return [_COUNT.pack(len(ranges)) + table + b"".join(headers), *payloads]


def decode_read_answer(body: memoryview, head_bytes: int | None = None) -> list[RangeAnswer]:
    """Answers in the order of the requested ranges; ``head_bytes`` as in READ_HEADERS, None for READ. Raises ``Invalid``."""
    count = _count(body, RANGES_MAX, "ranges")
    headers_start = COUNT_BYTES + count * _RANGE_ANSWER.size
    if headers_start > len(body):
        raise Invalid(f"read answer of {count} ranges is cut short at {len(body)} bytes")
    table = list(_RANGE_ANSWER.iter_unpack(body[COUNT_BYTES:headers_start]))
    payload_start = headers_start + sum([entries for _, _, entries in table]) * ENTRY_HEADER_BYTES
    if payload_start > len(body):
        raise Invalid(f"read answer is cut short at {len(body)} bytes")
    headers = ENTRY_HEADER.iter_unpack(body[headers_start:payload_start])
    answers = []
    for status, decided_to, entries in table:
        if status >= len(Status):
            raise Invalid(f"read answer has status {status}, which this version does not know")
        listed = []
        for _, header in zip(range(entries), headers, strict=False):
            _, entry_id, lac, payload_bytes, crc, state = header
            carried = 0 if state else payload_bytes if head_bytes is None else min(payload_bytes, head_bytes)
            payload = body[payload_start : payload_start + carried]
            payload_start += carried
            listed.append(ReadEntry(entry_id, lac, payload_bytes, crc, state, payload))
        answers.append(RangeAnswer(Status(status), decided_to, listed))
    if payload_start != len(body):
        raise Invalid(f"read answer has {len(body)} bytes; its entries claim {payload_start}")
    return answers


def entry_matches(ledger_id: int, entry: ReadEntry) -> bool:
    """Whether a whole payload matches its entry's CRC."""
    return entry_crc(ledger_id, entry.entry_id, entry.lac, (entry.payload,), entry.payload_bytes) == entry.crc


class Control(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of msgpack bodies. Field names are permanent; unknown ones are ignored."""


class LedgerIds(Control, frozen=True, kw_only=True):
    """Request of FENCE, LAC and DELETE."""

    ledger_ids: tuple[LedgerId, ...]


class LedgerTail(Control, frozen=True, kw_only=True):
    """The last entry held here, and the greatest LAC known here (-1: none). A ``deleted`` ledger takes no entries any more."""

    ledger_id: LedgerId
    status: int = Status.OK
    last_entry: EntryId = -1
    lac: EntryId = -1
    fenced: bool = False
    deleted: bool = False


class LedgerTails(Control, frozen=True, kw_only=True):
    """Answer to FENCE (durable by then) and LAC, in the order of the request."""

    ledgers: tuple[LedgerTail, ...]


class AwaitLac(Control, frozen=True, kw_only=True):
    """Request of AWAIT_LAC. Answered with a ``LedgerTail`` as soon as its LAC is above ``above``, the ledger is fenced or
    deleted, or ``max_wait_ms`` (60,000 at most) have passed."""

    ledger_id: LedgerId
    above: EntryId = -1
    max_wait_ms: int = 0


class ExplicitLacs(Control, frozen=True, kw_only=True):
    """Request of WRITE_LAC: ``(ledger id, LAC)`` pairs. Answered with statuses."""

    lacs: tuple[tuple[LedgerId, EntryId], ...]


class ListLedgers(Control, frozen=True, kw_only=True):
    """Request of LIST: ledgers with ids greater than ``after``, ascending."""

    after: int = -1
    limit: int = 1000


class LedgerSummary(Control, frozen=True, kw_only=True):
    """Summary of one ledger on a bookie; bytes are of payloads."""

    ledger_id: LedgerId
    entries: int = 0
    payload_bytes: int = 0
    last_entry: EntryId = -1
    lac: EntryId = -1
    fenced: bool = False


class LedgerPage(Control, frozen=True, kw_only=True):
    """Answer to LIST. ``more``: ledgers with greater ids follow."""

    ledgers: tuple[LedgerSummary, ...]
    more: bool = False


class DiskInfo(Control, frozen=True, kw_only=True):
    """One disk. ``state`` is writable, read_only or failed; ``reason`` explains the last two. ``damaged_…`` count known,
    unrepaired corruption; ``sparse_files`` wait for compaction; ``unmovable_files`` cannot be compacted because of corruption.
    """

    position: int
    state: str
    reason: str = ""
    free_bytes: int = 0
    log_files: int = 0
    log_bytes: int = 0
    live_bytes: int = 0
    ledgers: int = 0
    damaged_entries: int = 0
    damaged_files: int = 0
    sparse_files: int = 0
    unmovable_files: int = 0


class BookieInfo(Control, frozen=True, kw_only=True):
    """Answer to INFO (empty body). Counters rise from the process's start. ``keeps_all``: why unknown ledgers are kept."""

    bookie_id: str
    read_only: bool
    free_bytes: int
    disks: tuple[DiskInfo, ...]
    counters: dict[str, int]
    keeps_all: str = ""


class ScrubDisks(Control, frozen=True, kw_only=True):
    """Request of SCRUB: start a scrub of every disk that is not being scrubbed, or only return the progress."""

    start: bool = False


class DiskScrub(Control, frozen=True, kw_only=True):
    """The running or last scrub of one disk; ``number`` counts scrubs since the process started.

    ``damaged_entries`` (corrupt) and ``healed_entries`` (repaired) count since the scrub began. ``waiting_entries`` are corrupt
    now, ``untried_entries`` of them without an attempt to repair; ``examples`` gives reasons, ``unchecked`` what was left out.
    """

    position: int
    number: int = 0
    running: bool = False
    total_bytes: int = 0
    checked_bytes: int = 0
    checked_entries: int = 0
    damaged_entries: int = 0
    healed_entries: int = 0
    waiting_entries: int = 0
    untried_entries: int = 0
    broken_files: int = 0
    repaired_files: int = 0
    examples: tuple[str, ...] = ()
    unchecked: str = ""


class ScrubStatus(Control, frozen=True, kw_only=True):
    """Answer to SCRUB. A failed disk is not scrubbed and not listed."""

    disks: tuple[DiskScrub, ...]


Body = TypeVar("Body", bound=Control)
_encoder = msgspec.msgpack.Encoder()
_decoders: dict[type[Control], msgspec.msgpack.Decoder[Control]] = {}


def encode(body: Control) -> bytes:
    return _encoder.encode(body)


def decode(kind: type[Body], body: Buffer) -> Body:
    """Decode a msgpack body of ``kind``. Raises ``Invalid``."""
    decoder = _decoders.get(kind) or _decoders.setdefault(kind, msgspec.msgpack.Decoder(kind))
    try:
        decoded = decoder.decode(body)
    except MALFORMED as malformed:
        raise Invalid(f"malformed {kind.__name__}: {malformed}") from malformed
    assert isinstance(decoded, kind)
    return decoded


def _count(body: memoryview, maximum: int, what: str) -> int:
    if len(body) < COUNT_BYTES:
        raise Invalid(f"body of {len(body)} bytes is cut short")
    count: int = _COUNT.unpack_from(body)[0]
    if count > maximum:
        raise Invalid(f"{count} {what} in one body; maximum is {maximum}")
    return count


def _ranges(table: memoryview, count: int) -> list[Range]:
    if count > RANGES_MAX:
        raise Invalid(f"{count} ranges in one request; maximum is {RANGES_MAX}")
    if len(table) != count * _RANGE.size:
        raise Invalid(f"the request announces {count} ranges and has {len(table)} bytes of them")
    check_ids([ledger_id | first | last for ledger_id, first, last in _RANGE.iter_unpack(table)], "a range")
    return [Range._make(each) for each in _RANGE.iter_unpack(table)]
