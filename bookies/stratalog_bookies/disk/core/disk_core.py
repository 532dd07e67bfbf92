"""The rules of one disk of a bookie: which adds are accepted, what a fence blocks, when an entry is durable.

A request goes in; statuses and the sequence number of a group come out. The shell answers when that group is durable
(``written``). ``log`` decides where bytes go, ``contents`` records what exists. Invariants:

- An entry is written once. The same payload again is OK (and waits until the first copy is durable); another payload is
  CONFLICT.
- Once a fence is durable, only recovery adds are accepted. Adds accepted earlier precede the fence in the log.
- A deleted ledger accepts nothing. Fencing an unknown ledger creates it.
- Only durable entries are read. The answer to a fence waits for everything placed before it, and so do the reads after it.
- After a failed write or sync (``fail``) nothing is accepted or acknowledged. Durable entries remain readable.
- While the disk hangs (``stall``) nothing is accepted. Groups in progress may become durable, and are acknowledged then.

It does no I/O, keeps no time, and does not limit the bytes in flight.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from crc32c import crc32c

from stratalog_bookies.disk.core import log_format
from stratalog_bookies.disk.core.contents import Contents
from stratalog_bookies.disk.core.index import ROW, SMALL_BYTES_MAX, Row, Run
from stratalog_bookies.disk.core.log import Log, Write
from stratalog_bookies.disk.core.log_format import ControlItem
from stratalog_bookies.protocol import messages
from stratalog_bookies.protocol.messages import (
    CHECKED_BYTES,
    ENTRY_HEADER_BYTES,
    HEAD_BYTES_MAX,
    RECOVERY_ADD,
    LedgerSummary,
    LedgerTail,
    Status,
)
from stratalog_core.ports import Buffer

Header = tuple[int, int, int, int, int, int]
"""An entry header as ``messages.decode_add`` returns it."""

CONTROL_RESERVE_BYTES: Final = 1024 * 1024
"""Space in the last file of a full disk that adds leave free for fences and deletions."""
CONTROL_ITEMS_MAX: Final = 1024
"""Fences, LACs or tombstones of one frame, and so of one call."""
_ITEM_FRAME_BYTES_MAX: Final = 64


class Added(NamedTuple):
    """``statuses`` hold once group ``sequence`` is durable. An entry in ``deferred`` waits for its run to be loaded."""

    statuses: bytearray
    sequence: int
    deferred: list[tuple[int, Run]]


class DiskCore:
    """The state of one disk: its log and its contents."""

    def __init__(
        self, contents: Contents, log: Log, *, ledgers_max: int, control_reserve_bytes: int = CONTROL_RESERVE_BYTES
    ) -> None:
        self.contents = contents
        self.log = log
        self.failure = ""
        self.stall = ""
        self.read_only = ""
        self._ledgers_max = ledgers_max
        self._control_reserve_bytes = control_reserve_bytes
        contents.open_file(log.generation)

    # -- admission

    def takes(self, placed_bytes: int, *, reserve: bool = True) -> bool:
        """Whether frames of ``placed_bytes`` fit now. With ``reserve``, they also leave the space that fences and deletions
        need.
        """
        return self.log.takes(placed_bytes + (self._control_reserve_bytes if reserve else 0))

    @property
    def refusal(self) -> Status | None:
        """The status of every add while the disk accepts none; else None."""
        if self.failure:
            return Status.STORAGE_FAILED
        return Status.READ_ONLY if self.stall or self.read_only else None

    # -- adds

    def add(self, headers: Sequence[Header], body: memoryview, header_at: int, payload_at: int) -> Added:
        """Add entries whose headers and payloads are contiguous in ``body``. The caller has checked ``takes``.

        The common entry (new, in order, ledger known and not fenced) costs one short pass, and a run of such entries becomes
        one frame without a copy. ``_decide_one`` decides every other entry alone.
        """
        refusal = self.refusal
        if refusal is not None:
            return self._add_nothing(refusal, headers, body, header_at, payload_at)
        ledgers = self.contents.ledgers
        statuses = bytearray(len(headers))
        deferred: list[tuple[int, Run]] = []
        first, first_header_at, first_payload_at = 0, header_at, payload_at
        for index, (ledger_id, entry_id, lac, payload_bytes, crc, _) in enumerate(headers):
            payload_end = payload_at + payload_bytes
            header_end = header_at + ENTRY_HEADER_BYTES
            ledger = ledgers.get(ledger_id)
            if (
                ledger is not None
                and entry_id > ledger.last_entry
                and not ledger.fenced
                and crc32c(body[payload_at:payload_end], crc32c(body[header_at : header_at + CHECKED_BYTES])) == crc
            ):
                ledger.last_entry = entry_id
                if lac > ledger.lac:
                    ledger.lac = lac
            else:
                self._store(headers[first:index], body[first_header_at:header_at], body[first_payload_at:payload_at])
                first, first_header_at, first_payload_at = index + 1, header_end, payload_end
                decided = self._decide_one(headers[index], body[header_at:header_end], body[payload_at:payload_end])
                if isinstance(decided, Run):
                    deferred.append((index, decided))
                else:
                    statuses[index] = decided
            header_at, payload_at = header_end, payload_end
        self._store(headers[first:], body[first_header_at:header_at], body[first_payload_at:payload_at])
        return Added(statuses, self.log.sequence, deferred)

    def _add_nothing(
        self, refusal: Status, headers: Sequence[Header], body: memoryview, header_at: int, payload_at: int
    ) -> Added:
        """Refuse entries. While the disk is only full, answer recovery adds of entries that it has: they need no room, and a
        ledger whose other bookies are full, too, could not be recovered without them.
        """
        statuses = bytearray((refusal,)) * len(headers)
        deferred: list[tuple[int, Run]] = []
        if self.failure or self.stall:
            return Added(statuses, 0, deferred)
        for index, header in enumerate(headers):
            header_end, payload_end = header_at + ENTRY_HEADER_BYTES, payload_at + header[3]
            decided = self._decide_stored(header, body[header_at:header_end], body[payload_at:payload_end])
            if isinstance(decided, Run):
                deferred.append((index, decided))
            elif decided is not None:
                statuses[index] = decided
            header_at, payload_at = header_end, payload_end
        return Added(statuses, self.log.sequence, deferred)

    def _decide_stored(self, header: Header, packed: memoryview, payload: memoryview) -> Status | Run | None:
        """Decide a recovery add of an entry that exists: its status, or the run to load first. None for any other add."""
        ledger_id, entry_id, _, _, crc, flags = header
        ledger = self.contents.ledgers.get(ledger_id)
        if ledger is None or not flags & RECOVERY_ADD:
            return None
        if crc32c(payload, crc32c(packed[:CHECKED_BYTES])) != crc:
            return Status.BAD_CRC
        found = self.contents.find(ledger, entry_id)
        if found is None or isinstance(found, Run):
            return found
        return Status.OK if same_payload(header, found) else Status.CONFLICT

    def move(self, ledger_id: int, row: Row, payload: Buffer, from_generation: int) -> None:
        """Rewrite an entry of an older file, so that the file can be freed. Does nothing if a newer copy exists or the ledger
        is deleted.
        """
        ledger = self.contents.ledgers.get(ledger_id)
        if ledger is None or any(
            run.generation > from_generation and run.find(row.entry_id) for run in ledger.runs if run.rows is not None
        ):
            return
        header = (ledger_id, row.entry_id, row.lac, row.payload_bytes, row.crc, RECOVERY_ADD)
        self._store([header], messages.ENTRY_HEADER.pack(*header), payload)

    def _decide_one(self, header: Header, packed: memoryview, payload: memoryview) -> Status | Run:
        """Decide one entry that is not simply new and in order: its status, or the run to load first."""
        ledger_id, entry_id, lac, _, crc, flags = header
        if crc32c(payload, crc32c(packed[:CHECKED_BYTES])) != crc:
            return Status.BAD_CRC
        if ledger_id in self.contents.tombstones:
            return Status.NO_SUCH_LEDGER
        if ledger_id not in self.contents.ledgers and len(self.contents.ledgers) >= self._ledgers_max:
            return Status.OVERLOADED
        ledger = self.contents.ledger(ledger_id)
        if ledger.fenced and not flags & RECOVERY_ADD:
            return Status.FENCED
        found = self.contents.find(ledger, entry_id)
        if isinstance(found, Run):
            return found
        if found is not None:
            return Status.OK if same_payload(header, found) else Status.CONFLICT
        ledger.lac = max(ledger.lac, lac)
        ledger.last_entry = max(ledger.last_entry, entry_id)
        self._store([header], packed, payload)
        return Status.OK

    def _store(self, headers: Sequence[Header], packed: Buffer, payloads: Buffer) -> None:
        """Place entries in the log and index them; continue in the next file when this one is full."""
        if not headers:
            return
        room = self.log.room
        if log_format.frame_size(len(packed), len(payloads)) > room:
            fitting, payload_bytes = _fitting(headers, room)
            head_bytes = fitting * ENTRY_HEADER_BYTES
            self._store(headers[:fitting], packed[:head_bytes], payloads[:payload_bytes])
            self.roll()
            headers, packed, payloads = headers[fitting:], packed[head_bytes:], payloads[payload_bytes:]
        position = self.log.append(log_format.ENTRIES, len(headers), packed, (payloads,), len(payloads))
        generation = self.log.generation
        ledgers, open_run = self.contents.ledgers, self.contents.open_run
        head_at = 0
        for ledger_id, entry_id, lac, payload_bytes, crc, _ in headers:
            ledger = ledgers[ledger_id]
            run = ledger.active
            if run is None or run.generation != generation:
                run = open_run(ledger, generation)
            head_crc = crc32c(payloads[head_at : head_at + HEAD_BYTES_MAX]) if payload_bytes > SMALL_BYTES_MAX else 0
            row = ROW.pack(entry_id, position, payload_bytes, crc, lac, head_crc)
            # Nearly all entries append. Inlined: a third cheaper than the call (measured).
            if entry_id > run.last and run.count:
                run.rows += row  # type: ignore[operator]
                run.last = entry_id
                run.count += 1
            else:
                run.add(entry_id, row)
            run.payload_bytes += payload_bytes
            position += payload_bytes
            head_at += payload_bytes

    def roll(self) -> None:
        """Continue in the next file, which must be prepared."""
        self.contents.end_file(self.log.generation, self.log.tail)
        self.log.roll()
        self.contents.open_file(self.log.generation)

    # -- fences, LACs, deletions

    def fence(self, ledger_ids: Iterable[int]) -> int:
        """Fence ledgers. Returns the group to wait for; then answer with ``tails``."""
        contents = self.contents
        items = []
        for ledger_id in dict.fromkeys(ledger_ids):
            if ledger_id not in contents.tombstones and not self._is_fenced(ledger_id):
                contents.ledger(ledger_id).fenced = True
                items.append(ControlItem(log_format.FENCE, ledger_id, 0))
        return self._record(items)

    def write_lacs(self, lacs: Sequence[tuple[int, int]]) -> tuple[bytearray, int]:
        """Record explicit LACs. Returns their statuses and the group to wait for."""
        statuses = bytearray()
        items = []
        for ledger_id, lac in lacs:
            ledger = self.contents.ledgers.get(ledger_id)
            if ledger is None:
                statuses.append(Status.NO_SUCH_LEDGER)
                continue
            statuses.append(Status.FENCED if ledger.fenced else Status.OK)
            if not ledger.fenced and lac > ledger.lac:
                ledger.lac = lac
                items.append(ControlItem(log_format.EXPLICIT_LAC, ledger_id, lac))
        return statuses, self._record(items)

    def delete(self, ledger_ids: Iterable[int]) -> int:
        """Delete ledgers permanently. Returns the group that makes the tombstones durable."""
        items = []
        for ledger_id in dict.fromkeys(ledger_ids):
            if ledger_id not in self.contents.tombstones:
                self.contents.delete(ledger_id)
                items.append(ControlItem(log_format.TOMBSTONE, ledger_id, 0))
        return self._record(items)

    def tails(self, ledger_ids: Iterable[int]) -> list[LedgerTail]:
        """Last entry, LAC and fence of each ledger."""
        return [self._tail(ledger_id) for ledger_id in ledger_ids]

    def _tail(self, ledger_id: int) -> LedgerTail:
        ledger = self.contents.ledgers.get(ledger_id)
        if ledger is None:
            is_deleted = ledger_id in self.contents.tombstones
            return LedgerTail(ledger_id=ledger_id, status=Status.NO_SUCH_LEDGER, deleted=is_deleted)
        return LedgerTail(ledger_id=ledger_id, last_entry=ledger.last_entry, lac=ledger.lac, fenced=ledger.fenced)

    def summary(self, ledger_id: int) -> LedgerSummary:
        """Summary of one ledger on this disk, entries that are not durable yet included. The ledger must exist."""
        ledger = self.contents.ledgers[ledger_id]
        return LedgerSummary(
            ledger_id=ledger_id,
            entries=sum([run.count for run in ledger.runs]),
            payload_bytes=sum([run.payload_bytes for run in ledger.runs]),
            last_entry=ledger.last_entry,
            lac=ledger.lac,
            fenced=ledger.fenced,
        )

    def _is_fenced(self, ledger_id: int) -> bool:
        ledger = self.contents.ledgers.get(ledger_id)
        return ledger is not None and ledger.fenced

    def _record(self, items: Sequence[ControlItem]) -> int:
        """Place control items in a frame. Returns the sequence of the last group placed so far."""
        assert len(items) <= CONTROL_ITEMS_MAX, "the caller has room for one frame"
        if items:
            if control_room(len(items)) > self.log.room:
                self.roll()
            self.log.append_control(tuple(items))
        return self.log.sequence

    def prove_tail(self) -> None:
        """Place an empty control frame. Once durable, it proves that everything before it was durable.

        Without it, recovery cannot tell corruption of the last group from a torn write (``log_format.scan``).
        """
        if control_room(1) <= self.log.room and not self.failure:
            self.log.append_control((ControlItem(log_format.PROOF, 0, 0),))

    # -- durability

    def take(self) -> Write | None:
        """The next group to write and sync; None if one is being written or there is none."""
        return None if self.failure else self.log.take()

    def written(self, sequence: int) -> None:
        """Mark a group as durable."""
        assert not self.failure, "nothing is durable on a failed disk"
        self.log.written(sequence)

    def fail(self, reason: str) -> None:
        """Mark the disk as failed, permanently: nothing more is accepted or acknowledged."""
        self.failure = self.failure or reason

    def next_to_close(self) -> int | None:
        """Generation of the oldest file that is full and durable but has no checkpoint yet."""
        for generation in sorted(self.contents.files):
            file = self.contents.files[generation]
            if not file.closed:
                return generation if generation < self.log.durable_generation else None
        return None

    def is_visible(self, run: Run, row: Row) -> bool:
        """Whether an entry is durable and may be read."""
        return self.log.is_durable(run.generation, row.position)

    def validate_state(self) -> None:
        """Assert the invariants. O(runs of the disk): for start-up and tests."""
        self.contents.validate_state()
        self.log.validate_state()
        assert self.log.generation in self.contents.files, "the open file exists"


def control_room(items: int) -> int:
    """Maximum space that a frame of this many control items takes."""
    return items * log_format.ITEM_BYTES + _ITEM_FRAME_BYTES_MAX


def add_room(entries: int, add_bytes: int) -> int:
    """Maximum space of ``entries`` with ``add_bytes`` of headers and payloads: each may get a frame of its own."""
    return add_bytes + entries * (log_format.FRAME_BYTES + log_format.ALIGNMENT)


def _fitting(headers: Sequence[Header], room: int) -> tuple[int, int]:
    """How many of the entries fit into ``room`` as one frame, and their payload bytes."""
    payload_bytes = 0
    for count, header in enumerate(headers):
        if log_format.frame_size((count + 1) * ENTRY_HEADER_BYTES, payload_bytes + header[3]) > room:
            return count, payload_bytes
        payload_bytes += header[3]
    return len(headers), payload_bytes


def same_payload(header: Header, row: Row) -> bool:
    """Whether a repeated entry has the payload that is stored; their LACs may differ.

    CRC32C is linear: the CRC of header and payload is the header's CRC, advanced over as many zero bytes as the payload has,
    xor the payload's CRC. If the payloads are equal, the two CRCs differ exactly by the difference of the headers' CRCs,
    advanced.
    """
    ledger_id, entry_id, lac, payload_bytes, crc, _ = header
    if payload_bytes != row.payload_bytes:
        return False
    if lac == row.lac:
        return crc == row.crc
    ours = messages.entry_crc(ledger_id, entry_id, lac, (), payload_bytes)
    theirs = messages.entry_crc(ledger_id, entry_id, row.lac, (), payload_bytes)
    zeros = bytes(payload_bytes)
    return crc ^ row.crc == crc32c(zeros, ours) ^ crc32c(zeros, theirs)
