"""The state that a coordinator's records make up, and its replay from the log. Does no I/O.

A coordinator's state changes only by records that the ack quorum has, in offset order. It is the whole content of the
checkpoints' ``application_state``, so a handover, a new ledger and a takeover all use the same snapshot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from stratalog_core.batches.batch import NO_PRODUCER_ID, BatchHeader, read_header
from stratalog_core.batches.records import Header, Record, iterate_records
from stratalog_core.errors import Corrupt
from stratalog_core.malformed import MALFORMED
from stratalog_core.partition_state.transactions import ABORT, COMMIT, read_marker
from stratalog_core.ports import Buffer


class CoordinatorRecord(NamedTuple):
    """A record to write; ``value`` None deletes the key."""

    key: bytes
    value: bytes | None
    headers: tuple[Header, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Approximate size: key and value without framing and headers."""
        return len(self.key) + len(self.value or b"")


ApplyRecord = Callable[[bytes, bytes | None, Sequence[Header]], None]
"""Applies a record's key, value and headers to the state. Raises ``Corrupt``, without a change, for an unreadable record."""


class CoordinatorState(Protocol):
    """The durable state of one coordinator partition."""

    def begin_batch(self, producer_id: int = NO_PRODUCER_ID) -> ApplyRecord:
        """Return the function that applies the records of one batch. It may cache what records of a batch share.

        ``producer_id``: the producer of a transactional batch, whose records take effect when its transaction commits;
        ``NO_PRODUCER_ID`` for any other batch.
        """
        ...

    def transaction_ended(self, producer_id: int, *, commit: bool) -> None:
        """Apply a marker: the producer's transaction has ended in this partition."""
        ...

    def snapshot(self) -> bytes:
        """Return the whole state."""
        ...


class Snapshot(Protocol):
    """The snapshot format of a kind of coordinator."""

    @property
    def version(self) -> int: ...


SnapshotT = TypeVar("SnapshotT", bound=Snapshot)


def decode_snapshot(decoder: msgspec.msgpack.Decoder[SnapshotT], content: bytes, version: int, what: str) -> SnapshotT:
    """Return the decoded snapshot. Raises ``Corrupt`` for malformed content and for versions other than ``version``."""
    try:
        snapshot = decoder.decode(content)
    except MALFORMED as malformed:
        raise Corrupt(f"snapshot of {what} is malformed: {malformed}") from malformed
    if snapshot.version != version:
        raise Corrupt(f"snapshot of {what} has version {snapshot.version}; this release reads {version}")
    return snapshot


class Replay:
    """Applies batches to a state. An unreadable record is skipped and counted, because the others are still valid."""

    def __init__(self, state: CoordinatorState) -> None:
        self._state = state
        self.unreadable = 0
        """Number of skipped records; the remainder of a batch with broken record framing counts as one."""
        self.first_unreadable = ""

    def apply(self, batch: Buffer) -> None:
        """Apply one batch; a record without a key has no meaning and is passed over."""
        header = read_header(batch)
        try:
            if header.is_control:
                self._apply_marker(batch, header)
                return
            apply = self._state.begin_batch(header.producer_id if header.is_transactional else NO_PRODUCER_ID)
            for record in iterate_records(batch, header):
                if record.key is not None:
                    self._apply_readable(apply, record.key, record)
        except Corrupt as damaged:
            self._skip(header.base_offset, damaged)

    def _apply_marker(self, batch: Buffer, header: BatchHeader) -> None:
        kind = read_marker(batch, header).kind
        if kind in (ABORT, COMMIT):
            self._state.transaction_ended(header.producer_id, commit=kind == COMMIT)

    def _apply_readable(self, apply: ApplyRecord, key: bytes, record: Record) -> None:
        try:
            apply(key, record.value, record.headers)
        except Corrupt as damaged:
            self._skip(record.offset, damaged)

    def _skip(self, offset: int, damaged: Corrupt) -> None:
        self.unreadable += 1
        self.first_unreadable = self.first_unreadable or f"offset {offset}: {damaged.message}"
