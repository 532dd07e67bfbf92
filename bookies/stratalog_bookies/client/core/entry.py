"""Entries in the client: pending adds, and entries that were read.

An entry's 33-byte header, with the CRC32C over ids, LAC, length and payload, is built once, at the append. However often and to
whichever bookie the entry is sent, its bytes are the same: bookies refuse a second content for one entry id. No I/O.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from crc32c import crc32c

from stratalog_core.ports import Buffer

_CHECKED: Final = struct.Struct(">QQqI")
_REST: Final = struct.Struct(">IB")


class Entry(NamedTuple):
    """A whole entry that matched its CRC; ``payload`` is a view of the answer."""

    entry_id: int
    payload: memoryview


class EntryHead(NamedTuple):
    """Size and first bytes (61 at most) of an entry's payload."""

    entry_id: int
    payload_bytes: int
    head: bytes


class AddSink(Protocol):
    """Receives the answers to an entry's adds."""

    def on_added(self, entry: PendingEntry, bookie: str, /) -> bool:
        """``bookie`` has stored the entry durably. Returns whether ``deliver`` has something to report."""
        ...

    def on_refused(self, entry: PendingEntry, bookie: str, status: int, /) -> bool:
        """``bookie`` refused the entry. Returns whether to resend it shortly."""
        ...

    def deliver(self) -> None:
        """All answers of one reply were passed in: notify the listener."""
        ...


@dataclass(slots=True, eq=False)
class PendingEntry:
    """One unsettled entry. Mutable, owned by its writer's core; senders only read ``header`` and ``payload``.

    The masks have one bit per position of the current ensemble: the write set (``write_mask``), the bookies whose answers are
    awaited (``awaiting``) and those that have the entry durably (``acked``).
    """

    entry_id: int
    header: bytes
    payload: tuple[Buffer, ...]
    payload_bytes: int
    write_mask: int
    awaiting: int
    sink: AddSink
    acked: int = 0

    def digest_matches(self) -> bool:
        """Whether the payload is unchanged since the append."""
        return self.header[: len(self.header) - 1] == pack_header(*self._ids(), self.payload, self.payload_bytes, 0)[:-1]

    def _ids(self) -> tuple[int, int, int]:
        ledger_id, entry_id, lac, _ = _CHECKED.unpack_from(self.header)
        return ledger_id, entry_id, lac


def pack_header(ledger_id: int, entry_id: int, lac: int, payload: tuple[Buffer, ...], payload_bytes: int, flags: int) -> bytes:
    """Header of an ADD's entry: the bytes of ``messages.pack_entry``, but packs the ids once (0.4 µs less, measured)."""
    checked = _CHECKED.pack(ledger_id, entry_id, lac, payload_bytes)
    crc = crc32c(checked)
    for part in payload:
        crc = crc32c(part, crc)
    return checked + _REST.pack(crc, flags)
