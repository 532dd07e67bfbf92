"""Detects the states of ``coverage.py`` during a run: in the quorum's commits, in messages, and in calls of the product.

Observers only count. They do not change the product's behaviour or timing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from simulation.checkers import coverage as states
from simulation.checkers.coverage import Coverage
from simulation.world.loop import CURRENT
from stratalog_bookies.client.ledger_recovery import LedgerRecoveries
from stratalog_bookies.client.ledger_writer import LedgerWriter
from stratalog_broker.coordination.groups.core import coordinator as group_coordinator
from stratalog_broker.coordination.groups.core.migration import downgraded, upgraded
from stratalog_broker.coordination.transactions import application as transaction_application
from stratalog_broker.coordination.transactions.core.coordinator import TransactionCoordinator
from stratalog_broker.coordination.transactions.core.transaction import PREPARED
from stratalog_broker.partitions import log as partition_log
from stratalog_broker.partitions.ownership import Partitions
from stratalog_broker.partitions.tail_cache import PartitionTail
from stratalog_broker.partitions.takeover import TakenOver
from stratalog_broker.partitions.writer_reports import WriterReports
from stratalog_broker.reads.aborted_transactions import runs_in
from stratalog_broker.reads.log_reader import LogReader
from stratalog_broker.requests import fetch_reads
from stratalog_broker.requests.held_fetch import HeldFetch
from stratalog_core.batches.checkpoint import encode_checkpoint
from stratalog_core.errors import LedgerFenced, OutcomeUnknown, StratalogError
from stratalog_metadata.protocol import messages
from stratalog_metadata.protocol.messages import ProposeRequest
from stratalog_metadata.raft import Entry
from stratalog_metadata.records import (
    NO_OWNER,
    DeferredMarker,
    Ledger,
    LedgerRef,
    LedgerState,
    Log,
    ManifestPointer,
    Partition,
    Record,
    Topic,
    ledger_key,
    log_key,
)
from stratalog_metadata.state.changes import Change
from stratalog_metadata.state.commands import Command, Delete, Put
from stratalog_tiering.maintenance.merging import merge_small
from stratalog_tiering.worker import partition_work

if TYPE_CHECKING:
    from simulation.world.loop import Process

_decode_command: Final = msgspec.msgpack.Decoder(Command).decode


class ChangeObserver:
    """Observes every change that the quorum commits. ``sealing`` holds ledgers whose writers are sealing them."""

    def __init__(self, coverage: Coverage) -> None:
        self._meet = coverage.meet
        self._term = 0
        self.sealing: set[int] = set()

    def committed(self, entry: Entry, changes: Sequence[Change], records: Mapping[str, Record]) -> None:
        """Count the states in these changes. ``records`` are those before the changes."""
        if entry.term > self._term:
            self._meet(states.NEW_LEADER, self._term > 0)
            self._term = entry.term
        closes = any(change.after is not None and _is_closed(change.after.record) for change in changes)
        for change in changes:
            before = change.before.record if change.before is not None else None
            after = change.after.record if change.after is not None else None
            match before, after:
                case Partition(), Partition() if before.owner >= 0 and after.leader_epoch > before.leader_epoch:
                    self._owner_changed(before, after, records, closes)
                case Ledger(), Ledger():
                    self._ledger_changed(before, after)
                case Ledger(), None if before.end_offset > before.base_offset:
                    self._meet(states.HOT_DROPPED)
                case Log(), Log() if after.log_start_offset > before.log_start_offset:
                    self._meet(states.START_MOVED)
                case _, ManifestPointer():
                    end_offset = before.end_offset if isinstance(before, ManifestPointer) else 0
                    self._meet(states.OFFLOADED, after.end_offset - end_offset)
                case _:
                    self._topic_changed(before, after)

    def _topic_changed(self, before: Record | None, after: Record | None) -> None:
        match before, after:
            case Topic(), None:
                self._meet(states.TOPIC_DELETED)
            case Topic(), Topic() if after.partition_count > before.partition_count:
                self._meet(states.PARTITIONS_ADDED)
            case None, DeferredMarker():
                self._meet(states.MARKER_DEFERRED)

    def _owner_changed(self, before: Partition, after: Partition, records: Mapping[str, Record], closes: bool) -> None:
        if after.owner != NO_OWNER and before.next_owner == after.owner:
            self._meet(states.HANDED_OVER)
            if closes:
                self._meet(states.HANDOVER_BY_SEAL)
            return
        if after.owner == NO_OWNER:
            return
        self._meet(states.TAKEN_OVER)
        log = records.get(log_key(after.topic_id, after.index))
        for ref in log.ledgers if isinstance(log, Log) else ():
            ledger = records.get(ledger_key(ref.ledger_id))
            if isinstance(ledger, Ledger) and ledger.state is LedgerState.OPEN:
                self._meet(states.OPEN_AT_TAKEOVER)
            if isinstance(ledger, Ledger) and ledger.state is LedgerState.IN_RECOVERY:
                self._meet(states.RECOVERY_AT_TAKEOVER)

    def _ledger_changed(self, before: Ledger, after: Ledger) -> None:
        if before.state is LedgerState.CLOSED:
            if before.fragments != after.fragments:
                self._meet(states.COPIES_MOVED)
            return
        if after.state is LedgerState.CLOSED and after.last_entry >= 0:
            self._meet(states.SEALED)
        if before.fragments == after.fragments:
            return
        if after.state is LedgerState.OPEN:
            self._meet(states.ENSEMBLE_CHANGE)
            if after.ledger_id in self.sealing:
                self._meet(states.CHANGE_AT_SEAL)
        else:
            self._meet(states.CHANGE_IN_RECOVERY)


def _is_closed(record: Record) -> bool:
    return isinstance(record, Ledger) and record.state is LedgerState.CLOSED


def observe_answers(coverage: Coverage) -> Callable[[int, memoryview, memoryview | StratalogError], None]:
    """Return a callback for ``Network.on_settled`` that counts commands whose sender does not learn their outcome."""

    def settled(method: int, body: memoryview, answer: memoryview | StratalogError) -> None:
        if method == messages.PROPOSE and isinstance(answer, OutcomeUnknown):
            for encoded in messages.decode(body, ProposeRequest).commands:
                for state in {_kind(update) for update in _decode_command(encoded).updates} - {""}:
                    coverage.meet(state)

    return settled


def _kind(update: object) -> str:
    match update:
        case Put(record=Partition()):
            return states.UNKNOWN_OWNER
        case Put(record=ManifestPointer()):
            return states.UNKNOWN_MANIFEST
        case Put(record=Ledger(state=LedgerState.CLOSED)):
            return states.UNKNOWN_SEAL
        case Put(record=Ledger(last_entry=-1, fragments=(_,))):
            return states.UNKNOWN_OPENING
        case Put(record=Ledger()):
            return states.UNKNOWN_CHANGE
        case Delete(key=key) if key.startswith("ledger/"):
            return states.UNKNOWN_DROP
    return ""


@contextlib.contextmanager
def observe_calls(coverage: Coverage, changes: ChangeObserver) -> Iterator[None]:
    """Wrap functions of the product to count states; restore them at the end."""
    recovering: list[Process] = []
    with contextlib.ExitStack() as stack:

        def wrap(owner: object, name: str, wrapper: Callable[[Any], Any]) -> None:
            inner = getattr(owner, name)
            setattr(owner, name, wrapper(inner))
            stack.callback(setattr, owner, name, inner)

        wrap(PartitionTail, "read", lambda inner: _counts_read(inner, coverage))
        wrap(LogReader, "_read_hot", lambda inner: _counts_async_read(inner, coverage, states.FROM_BOOKIES))
        wrap(LogReader, "_read_cold", lambda inner: _counts_async_read(inner, coverage, states.FROM_STORE))
        wrap(LogReader, "from_either", lambda inner: _counts_turned_reads(inner, coverage))
        wrap(HeldFetch, "_on_turn", lambda inner: _counts_calls(inner, coverage, states.HELD_BACK))
        wrap(fetch_reads, runs_in.__name__, lambda inner: _counts_unreported(inner, coverage))
        wrap(LedgerWriter, "seal", lambda inner: _marks_sealing(inner, changes.sealing))
        wrap(LedgerRecoveries, "_recover_open", lambda inner: _marks_recovering(inner, recovering))
        wrap(partition_work, merge_small.__name__, lambda inner: _counts_merges(inner, coverage))
        wrap(WriterReports, "on_failed", lambda inner: _counts_fenced(inner, coverage))
        wrap(transaction_application, TransactionCoordinator.__name__, lambda inner: _counts_continued(inner, coverage))
        wrap(group_coordinator, upgraded.__name__, lambda inner: _counts_calls(inner, coverage, states.GROUP_UPGRADED))
        wrap(group_coordinator, downgraded.__name__, lambda inner: _counts_calls(inner, coverage, states.GROUP_DOWNGRADED))
        wrap(Partitions, "_serve", lambda inner: _counts_moved_starts(inner, coverage))
        wrap(partition_log, encode_checkpoint.__name__, lambda inner: _counts_parts(inner, coverage))
        yield
        coverage.meet(states.RECOVERY_INTERRUPTED, sum(not process.alive for process in recovering))


def _counts_continued(inner: Callable[..., Any], coverage: Coverage) -> Callable[..., Any]:
    def start(limits: Any, store: Any, *others: Any) -> Any:
        decided = sum(transaction.state in PREPARED for transaction in store.transactions.values())
        coverage.meet(states.TRANSACTIONS_CONTINUED, decided)
        return inner(limits, store, *others)

    return start


def _counts_calls(inner: Callable[..., Any], coverage: Coverage, state: str) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        coverage.meet(state)
        return inner(*args)

    return call


def _counts_moved_starts(inner: Callable[..., Any], coverage: Coverage) -> Callable[..., Any]:
    def serve(self: Partitions, topic: Topic, taken: TakenOver, *others: Any) -> None:
        record = self._view.find(Log, log_key(taken.partition.topic_id, taken.partition.index))
        if record is not None and record.log_start_offset > taken.log_start_offset:
            coverage.meet(states.START_AT_TAKEOVER)
        inner(self, topic, taken, *others)

    return serve


def _counts_parts(inner: Callable[..., Any], coverage: Coverage) -> Callable[..., Any]:
    def encode(*args: Any) -> Any:
        parts = inner(*args)
        if len(parts) > 1:
            coverage.meet(states.PARTS)
        return parts

    return encode


def _counts_read(inner: Callable[..., Any], coverage: Coverage) -> Callable[..., Any]:
    def read(self: object, *args: Any) -> Any:
        found = inner(self, *args)
        if found is not None and found[0]:
            coverage.meet(states.FROM_TAIL)
        return found

    return read


def _counts_turned_reads(inner: Callable[..., Any], coverage: Coverage) -> Callable[..., Any]:
    async def read(self: LogReader, log: Any, ref: LedgerRef, *args: Any) -> Any:
        found = await inner(self, log, ref, *args)
        if self._is_unreadable(ref):
            coverage.meet(states.INSTEAD_OF_BOOKIES)
        return found

    return read


def _counts_async_read(inner: Callable[..., Any], coverage: Coverage, state: str) -> Callable[..., Any]:
    async def read(self: object, *args: Any) -> Any:
        found = await inner(self, *args)
        if found[0]:
            coverage.meet(state)
        return found

    return read


def _counts_unreported(inner: Callable[..., Any], coverage: Coverage) -> Callable[..., Any]:
    def runs(batches: Any, aborted: Any) -> Any:
        found = inner(batches, aborted)
        coverage.meet(states.MARKER_GONE, len(aborted) - len(found))
        return found

    return runs


def _marks_sealing(inner: Callable[..., Any], sealing: set[int]) -> Callable[..., Any]:
    async def seal(self: LedgerWriter, *args: Any, **kwargs: Any) -> Any:
        sealing.add(self.ledger.ledger_id)
        return await inner(self, *args, **kwargs)

    return seal


def _marks_recovering(inner: Callable[..., Any], recovering: list[Process]) -> Callable[..., Any]:
    async def recover(self: object, *args: Any, **named: Any) -> Any:
        process = CURRENT.get()
        assert process is not None
        recovering.append(process)
        try:
            return await inner(self, *args, **named)
        finally:
            recovering.remove(process)

    return recover


def _counts_merges(inner: Callable[..., Any], coverage: Coverage) -> Callable[..., Any]:
    async def merge(*args: Any) -> Any:
        merged = await inner(*args)
        coverage.meet(states.MERGED, int(merged))
        return merged

    return merge


def _counts_fenced(inner: Callable[..., Any], coverage: Coverage) -> Callable[..., Any]:
    def on_failed(self: object, error: StratalogError) -> None:
        if isinstance(error, LedgerFenced):
            coverage.meet(states.FENCED_WRITER)
        inner(self, error)

    return on_failed
