"""Planted faults of bookies and of the ledger client, run in ``ledgers``, ``fencing-races`` and ``lost-disks``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from stratalog_bookies.client import bookie_requests
from stratalog_bookies.client.core import recovery, writer
from stratalog_bookies.client.core.recovery import Instruction, LedgerRecovery
from stratalog_bookies.client.core.writer import LedgerWriterCore
from stratalog_bookies.client.ledger_writer import LedgerWriter
from stratalog_bookies.disk.core import cookie
from stratalog_bookies.disk.core.checkpoint import LedgerState, State
from stratalog_bookies.disk.core.contents import Contents
from stratalog_bookies.disk.core.disk_core import DiskCore
from stratalog_bookies.disk.core.log import Write
from stratalog_bookies.disk.log_files import STATE, LogFiles
from stratalog_bookies.protocol import messages
from stratalog_bookies.protocol.messages import EntryState, LedgerTail, Range, ReadEntry
from stratalog_bookies.repair.copier import Copier
from stratalog_bookies.repair.core.shares import Share
from stratalog_core.files import open_files as files
from stratalog_core.files.kernel_io import PAGE_BYTES
from stratalog_core.files.open_files import DirectFile
from stratalog_core.ports import Buffer, Extent, Files, OnRead, OnWritten
from stratalog_metadata.records import Fragment, Ledger


def _swap(owner: object, name: str, new: object) -> Any:
    """Replace the attribute with ``new``; return the old value."""
    old = getattr(owner, name)
    setattr(owner, name, new)
    return old


def _through_the_page_cache() -> None:
    """Open logs as with ``direct_io`` off."""
    begin: Any = LogFiles.__init__

    def through(self: LogFiles, files: Files, cookie: bytes, file_bytes: int, *, direct: bool = True) -> None:
        begin(self, files, cookie, file_bytes, direct=False)

    _swap(LogFiles, "__init__", through)


def bookie_acknowledges_before_sync() -> None:
    """The log is written through the page cache and not synced before adds are acknowledged."""
    _through_the_page_cache()

    def write(self: LogFiles, group: Write) -> None:
        self._writing[group.generation].pwritev(group.buffers, group.position)

    _swap(LogFiles, "write", write)


def bookie_syncs_another_file() -> None:
    """After a group is written through the page cache, the state file is synced instead of the log."""
    _through_the_page_cache()

    def write(self: LogFiles, group: Write) -> None:
        self._writing[group.generation].pwritev(group.buffers, group.position)
        self._files.open(STATE).datasync()

    _swap(LogFiles, "write", write)


def direct_writes_end_when_they_begin() -> None:
    """A write around the page cache is reported as durable while it is in flight."""
    begin: Any = DirectFile.begin_write

    def begin_write(self: DirectFile, buffers: Sequence[Buffer], position: int, done: OnWritten) -> bool:
        if not begin(self, buffers, position, lambda failure: None):
            return False
        asyncio.get_running_loop().call_soon(done, None)
        return True

    _swap(DirectFile, "begin_write", begin_write)


def direct_writes_forget_what_their_first_page_holds() -> None:
    """A write that begins in the middle of a page overwrites what is before it with zeros."""
    ended: Any = DirectFile._ended

    def forget(self: DirectFile, *arguments: Any) -> None:
        ended(self, *arguments)
        self._page_content = bytes(len(self._page_content))

    _swap(DirectFile, "_ended", forget)


def direct_writes_do_not_look_at_their_end() -> None:
    """A failed write around the page cache is reported as durable."""

    def succeed(self: DirectFile, gathered: Any, start: int, filled: int, last: bytes, done: OnWritten, result: int) -> None:
        files._gathered_kept.append(gathered)
        self._page_at, self._page_content = start + filled - PAGE_BYTES, last
        done(None)

    _swap(DirectFile, "_ended", succeed)


def direct_reads_come_from_the_next_page() -> None:
    """Reads around the page cache return the bytes of the next page."""
    begin: Any = DirectFile.begin_reads

    def begin_reads(self: DirectFile, extents: Sequence[Extent], done: OnRead) -> bool:
        shifted = [Extent(each.position + PAGE_BYTES, each.length) for each in extents]
        return bool(begin(self, shifted, done))

    _swap(DirectFile, "begin_reads", begin_reads)


def fence_is_in_memory_only() -> None:
    """A fence is acknowledged but not written to the log: a restart forgets it."""

    def fence(self: DiskCore, ledger_ids: Iterable[int]) -> int:
        for ledger_id in ledger_ids:
            if ledger_id not in self.contents.tombstones:
                self.contents.ledger(ledger_id).fenced = True
        return self.log.sequence

    _swap(DiskCore, "fence", fence)


def fence_is_answered_and_not_kept() -> None:
    """A bookie reports the ledger as fenced but still accepts the old writer's adds."""

    def fence(self: DiskCore, ledger_ids: Iterable[int]) -> int:
        for ledger_id in ledger_ids:
            if ledger_id not in self.contents.tombstones:
                self.contents.ledger(ledger_id)
        return self.log.sequence

    _swap(DiskCore, "fence", fence)


def checkpoint_forgets_fences() -> None:
    """The state file omits which ledgers are fenced."""

    def states(self: Contents) -> Iterable[LedgerState]:
        for ledger in self.ledgers.values():
            yield LedgerState(ledger_id=ledger.ledger_id, lac=ledger.lac, last_entry=ledger.last_entry, fenced=False)

    _swap(Contents, "_ledger_states", states)


def checkpoint_claims_the_open_file() -> None:
    """The state file says that the open log file needs no replay."""
    state: Callable[..., State] = Contents.state

    def claiming(self: Contents, next_generation: int, without: frozenset[int] = frozenset()) -> State:
        return msgspec.structs.replace(state(self, next_generation, without), next_generation=max(self.files) + 1)

    _swap(Contents, "state", claiming)


def unreadable_copy_counts_as_absence() -> None:
    """Recovery treats a copy that the bookie cannot read, or that fails its CRC, as "no such entry"."""
    note: Callable[..., None] = LedgerRecovery._note

    def noting(self: LedgerRecovery, bookie: str, entry_id: int, entry: ReadEntry | None) -> None:
        sound = entry is not None and entry.state == EntryState.PRESENT
        note(self, bookie, entry_id, entry if sound else None)

    _swap(LedgerRecovery, "_note", noting)


def recovery_reads_do_not_fence() -> None:
    """Only the fence request fences; recovery's reads do not, so that a bookie may still accept the old writer's adds."""

    def encode(ranges: list[Range]) -> Sequence[Buffer]:
        return messages.encode_read(ranges, 8 << 20, 0)

    _swap(bookie_requests, "_encode_recovery_read", encode)


def lost_read_counts_as_absence() -> None:
    """Recovery treats an error or timeout of a read as "no such entry"."""

    def on_read_failed(self: LedgerRecovery, bookie: str) -> list[Instruction]:
        if self._reading is not None:
            self._lacking.setdefault(self._reading.first, set()).add(bookie)
        self._reading = None
        return self._decide()

    _swap(LedgerRecovery, "on_read_failed", on_read_failed)


def lost_fence_counts_as_fenced() -> None:
    """Recovery treats an unanswered fence as the answer of a bookie that has nothing."""

    def on_fence_failed(self: LedgerRecovery, bookie: str) -> list[Instruction]:
        return self.on_fenced(bookie, -1, -1)

    _swap(LedgerRecovery, "on_fence_failed", on_fence_failed)


def one_negative_proves_absence() -> None:
    """Recovery closes before the first entry that a single bookie lacks."""
    _swap(recovery, "absence_proved", lambda write_quorum, ack_quorum, negatives: negatives >= 1)


def one_fence_is_enough() -> None:
    """Recovery continues when one bookie is fenced; Qa others may still confirm entries for the old writer."""
    _swap(recovery, "fencing_complete", lambda ensemble, write_quorum, ack_quorum, fenced: len(fenced) >= 1)


def one_fence_and_reads_that_do_not_fence() -> None:
    """One fence is enough, and reads do not fence: each fault alone is masked by the other defence."""
    one_fence_is_enough()
    recovery_reads_do_not_fence()


def recovery_believes_fresh_bookies() -> None:
    """Recovery starts after the LAC it got, even -1, not at the last fragment; a change then may reach back."""
    make: Callable[..., None] = LedgerRecovery.__init__

    def made(self: LedgerRecovery, ledger: Ledger, *strays: Any) -> None:
        make(self, ledger, *strays)
        self.lac = -1

    def replaced(ledger: Ledger, first_entry: int, replacements: Mapping[int, str]) -> Ledger:
        bookies = tuple(replacements.get(position, name) for position, name in enumerate(ledger.fragments[-1].bookies))
        return msgspec.structs.replace(
            ledger, fragments=(*ledger.fragments, Fragment(first_entry=first_entry, bookies=bookies))
        )

    _swap(LedgerRecovery, "__init__", made)
    _swap(writer, "with_replacements", replaced)


def recovery_closes_at_the_lac() -> None:
    """Recovery does not read beyond the greatest LAC that it got."""

    def decide(self: LedgerRecovery) -> list[Instruction]:
        if self.is_fenced and self.end is None:
            self._finish(self.lac)
        return []

    _swap(LedgerRecovery, "_decide", decide)


def confirmed_at_one_copy() -> None:
    """The writer confirms an entry when one bookie has it."""
    make: Callable[..., None] = LedgerWriterCore.__init__

    def made(self: LedgerWriterCore, *args: Any, **keywords: Any) -> None:
        make(self, *args, **keywords)
        self._ack_quorum = 1

    _swap(LedgerWriterCore, "__init__", made)


def confirmed_out_of_order() -> None:
    """An entry is confirmed when it has its copies, even if an earlier one does not."""
    added: Callable[..., bool] = LedgerWriterCore.on_added

    def on_added(self: LedgerWriterCore, entry: Any, bookie: str) -> bool:
        rose = added(self, entry, bookie)
        if entry.acked.bit_count() >= self._ack_quorum and entry.entry_id > self.lac and self.error is None:
            self.lac = entry.entry_id
            self.first_copied = max(self.first_copied, self.lac)
            rose = True
        return rose

    _swap(LedgerWriterCore, "on_added", on_added)


def ensemble_change_is_not_committed() -> None:
    """The writer continues with a replacement bookie that the ledger's record does not name."""

    async def commit(self: LedgerWriter, proposed: Ledger) -> None:
        pass

    _swap(LedgerWriter, "_commit", commit)


def replaced_bookie_still_counts() -> None:
    """Acknowledgements from the replaced bookie alone count for entries of the new fragment."""
    begin: Callable[..., Ledger] = LedgerWriterCore.begin_change
    commit: Callable[..., Any] = LedgerWriterCore.commit_change

    def begin_change(self: LedgerWriterCore, replacements: Mapping[int, str]) -> Ledger:
        proposed = begin(self, replacements)
        self._left, self._leaving = self._leaving, 0  # type: ignore[attr-defined]
        return proposed

    def commit_change(self: LedgerWriterCore) -> Any:
        acked = {entry_id: entry.acked for entry_id, entry in self._entries.items()}
        self._leaving = self._left  # type: ignore[attr-defined]
        sends = commit(self)
        for entry_id, entry in self._entries.items():
            entry.acked |= acked[entry_id]
        return sends

    LedgerWriterCore._left = 0  # type: ignore[attr-defined]
    _swap(LedgerWriterCore, "begin_change", begin_change)
    _swap(LedgerWriterCore, "commit_change", commit_change)


def new_fragment_reaches_too_far_back() -> None:
    """An ensemble change names the replacement for confirmed entries that nobody sends to it."""

    def first_changed(self: LedgerWriterCore, leaving: int) -> int:
        return self.ledger.fragments[-1].first_entry

    _swap(LedgerWriterCore, "_first_changed", first_changed)


def closed_without_fragments_of_the_rewrite() -> None:
    """Recovery copies to replacements but closes the ledger with the old ensemble. Only redundancy suffers, not reads."""
    from stratalog_bookies.client import ledger_recovery

    def result(self: Any) -> Ledger:
        ledger: Ledger = msgspec.structs.replace(self._ledger, last_entry=self._protocol.end)
        return ledger

    _swap(ledger_recovery._OpenRecovery, "result", result)


def bookie_tells_a_last_entry_too_low() -> None:
    """The reply to a fence reports the last entry one too low."""
    tail: Callable[..., LedgerTail] = DiskCore._tail

    def low(self: DiskCore, ledger_id: int) -> LedgerTail:
        told = tail(self, ledger_id)
        return msgspec.structs.replace(told, last_entry=max(told.last_entry - 1, -1))

    _swap(DiskCore, "_tail", low)


def sealed_before_all_is_confirmed() -> None:
    """The writer closes its ledger at the last entry that it has sent."""

    async def confirm_all(self: LedgerWriter) -> None:
        self._core.lac = self._core.next_entry_id - 1

    _swap(LedgerWriter, "_confirm_all", confirm_all)


def auditor_names_bookies_that_have_nothing() -> None:
    """The auditor moves copies in the record only."""

    async def complete(self: Copier, ledger: Ledger, share: Share, bookie: str) -> int:
        return 0

    _swap(Copier, "complete", complete)


def empty_disks_are_welcome() -> None:
    """The bookie starts under its old name with any disk, whatever its cookie, or without one."""
    _swap(cookie, "_check_known", lambda *args: None)


MUTANTS: Final = (
    bookie_acknowledges_before_sync,
    bookie_syncs_another_file,
    direct_writes_end_when_they_begin,
    direct_writes_forget_what_their_first_page_holds,
    direct_writes_do_not_look_at_their_end,
    direct_reads_come_from_the_next_page,
    fence_is_in_memory_only,
    fence_is_answered_and_not_kept,
    checkpoint_forgets_fences,
    checkpoint_claims_the_open_file,
    lost_fence_counts_as_fenced,
    one_negative_proves_absence,
    recovery_closes_at_the_lac,
    confirmed_at_one_copy,
    confirmed_out_of_order,
    ensemble_change_is_not_committed,
    new_fragment_reaches_too_far_back,
    bookie_tells_a_last_entry_too_low,
    sealed_before_all_is_confirmed,
)

IN_FENCING_RACES: Final = (
    lost_read_counts_as_absence,
    unreadable_copy_counts_as_absence,
    recovery_reads_do_not_fence,
    one_fence_and_reads_that_do_not_fence,
    recovery_believes_fresh_bookies,
    replaced_bookie_still_counts,
    closed_without_fragments_of_the_rewrite,
)

IN_LOST_DISKS: Final = (
    auditor_names_bookies_that_have_nothing,
    empty_disks_are_welcome,
)
