"""Takeover of partitions: fence and recover their ledgers, read batch headers, rebuild the state. Many run concurrently.

For each partition, every ledger that is not CLOSED is fenced, recovered and sealed (an owner leaves at most two: the one it
was sealing and the next); requests of all partitions are sent together. Then the newest ledger with a complete checkpoint is
found. Its checkpoint and the headers of all later batches give the partition's state and the index. Transaction markers, and
all batches of internal topics, are read whole, the latter as they are replayed. A partition without hot ledgers gets its state
from its cold history; one of an internal topic that was restored gets it from the object that the restore has stored. If the
records go on beyond the end of that state, as in a log whose newest records have expired before a later ledger held their
state, producers are forgotten.

After a handover, the previous owner's state is in the partition's record or, if it is large, in the entry after the last
batch. Then no headers are read, and the index is built when a reader needs it.

Recovery passes on what it has read of a ledger, so that nothing is read twice.

A takeover writes nothing but seals. It does not retry: the caller does.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

from stratalog_bookies.client import EntryHead, LedgerClient, Recovered
from stratalog_broker.partitions.index_cache import IndexCache, check_end, index_batch
from stratalog_broker.partitions.ledger_index import EntryRun, LedgerIndex
from stratalog_broker.partitions.replayed_batches import ReplayedBatches
from stratalog_core.batches.checkpoint import (
    Checkpoint,
    EpochStart,
    ProducerEntry,
    decode_checkpoint,
    is_checkpoint,
    part_position,
)
from stratalog_core.errors import Corrupt, NoSuchLedger, NotFound, Unavailable
from stratalog_core.partition_state.replay_state import ReplayState
from stratalog_metadata.client.api import MetadataView
from stratalog_metadata.records import (
    LEDGER_IDS,
    Counter,
    Ledger,
    LedgerRef,
    LedgerState,
    Log,
    ManifestPointer,
    Partition,
    Topic,
    TopicPartition,
    counter_key,
    ledger_key,
    log_key,
    manifest_pointer_key,
)
from stratalog_metadata.state.commands import EpochIs
from stratalog_tiering.cold.reader import ColdReader

FIRST_HEADS: Final = 64
"""Headers of a ledger that are read to find its checkpoint; a thousand takeovers hold as many at once."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenOver:
    """State of a partition at its end after recovery. ``batches`` has those after the checkpoint, for internal topics only."""

    partition: Partition
    log_start_offset: int
    state: ReplayState
    application_state: bytes | None
    batches: ReplayedBatches
    more_is_coming: bool
    """Producers were active at the handover."""


class _ReadLedger(NamedTuple):
    """A sealed ledger of the partition with its first headers."""

    ledger: Ledger
    ref: LedgerRef
    heads: list[EntryHead]


class Takeover:
    """The two steps of taking over one partition, ``recover`` and ``rebuild``. One object serves all partitions.

    ``replayed_bytes``: how much of an internal topic's log is read at once.
    """

    def __init__(
        self,
        view: MetadataView,
        ledgers: LedgerClient,
        cold: ColdReader,
        indexes: IndexCache,
        producers_max: int,
        replayed_bytes: int,
    ) -> None:
        self._view = view
        self._ledgers = ledgers
        self._cold = cold
        self._indexes = indexes
        self._producers_max = producers_max
        self._replayed_bytes = replayed_bytes

    async def recover(self, partition: Partition, topic: Topic) -> Mapping[int, Recovered]:
        """Fence and seal every ledger that is not closed; return what was read of them, by ledger id.

        Calls made in one turn of the event loop are sent together. A closed last ledger proves that none is open: opening one
        changes the ``Log`` record, which requires the current epoch.

        Metadata that was restored from an old copy may name a ledger that bookies have deleted since: empty, expired, or cold.
        A log ends before such a ledger unless the bucket has more history than metadata knows. For an internal topic that is
        an error, also of a sealed ledger, because what is left would be an older state of its coordinator.

        Raises ``StaleEpoch`` if the owner has changed, ``NoSuchLedger``, ``Forked``, ``Unavailable``, ``OutcomeUnknown``,
        ``Corrupt``.
        """
        view = self._view
        log = view.find(Log, log_key(partition.topic_id, partition.index))
        records = [view.find(Ledger, ledger_key(ref.ledger_id)) for ref in (log.ledgers if log is not None else ())]
        ledger_ids = [record.ledger_id for record in records if record is not None and record.state is not LedgerState.CLOSED]
        if topic.internal:
            await self._refuse_deleted([record for record in records if record is not None])
        if not ledger_ids:
            return {}
        requirement = EpochIs(key=partition.key(), owner=partition.owner, leader_epoch=partition.leader_epoch)
        recover = partial(self._ledgers.recover_reading, ledger_ids, requirements=(requirement,))
        try:
            found = await recover()
        except NoSuchLedger as deleted:
            if topic.internal:
                raise
            pointer = view.find(ManifestPointer, manifest_pointer_key(partition.topic_id, partition.index))
            await self._cold.refuse_fork(topic, partition.index, pointer)
            _log.warning("%s ends before a deleted ledger: %s", partition.key(), deleted)
            found = await recover(may_be_deleted=True)
        return {recovered.ledger.ledger_id: recovered for recovered in found}

    async def _refuse_deleted(self, ledgers: Sequence[Ledger]) -> None:
        """Raise ``NoSuchLedger`` if a bookie has deleted the newest ledger with entries: a later one, which is lost, had its
        state. Recovery finds out the same of one that is not sealed.
        """
        held = [ledger for ledger in ledgers if ledger.state is not LedgerState.CLOSED or ledger.last_entry >= 0]
        if held and held[-1].state is LedgerState.CLOSED and self._may_be_deleted(held[-1]):
            await self._ledgers.refuse_deleted(held[-1])

    async def rebuild(
        self, partition: Partition, topic: Topic, recovered: Mapping[int, Recovered], *, wants_batches: bool
    ) -> TakenOver:
        """Return the state of one partition; ``recovered`` is what ``recover`` returned. Raises what reading raises.

        If the bookies cannot return the data and all of it is also cold, the state is that at the end of the cold history. If
        it was deleted after a copy was made from which metadata was restored, nothing is known of producers.
        """
        try:
            return await self._rebuild_hot(partition, recovered, wants_batches=wants_batches)
        except (Unavailable, Corrupt, NotFound) as failure:
            log = self._view.find(Log, log_key(partition.topic_id, partition.index))
            last = self._view.find(Ledger, ledger_key(log.ledgers[-1].ledger_id)) if log is not None and log.ledgers else None
            if recovered or wants_batches or last is None or last.state is not LedgerState.CLOSED:
                raise
            pointer = self._view.find(ManifestPointer, manifest_pointer_key(partition.topic_id, partition.index))
            is_cold = pointer is not None and pointer.end_offset == last.end_offset
            if not is_cold and not (isinstance(failure, NotFound) and self._may_be_deleted(last)):
                raise
            if not is_cold:
                await self._cold.refuse_fork(topic, partition.index, pointer)
            _log.warning("%s is taken over without its hot ledgers: %s", partition.key(), failure)
        replay = _Replay(self._producers_max)
        await self._load_cold(partition, replay)
        replay.continue_at(partition, last.end_offset)
        return self._taken_over(partition, log, replay)

    def _may_be_deleted(self, ledger: Ledger) -> bool:
        """Whether metadata was restored from a copy that knew the ledger, which may have been deleted since."""
        counter = self._view.find(Counter, counter_key(LEDGER_IDS))
        return counter is not None and ledger.ledger_id < counter.lost_below

    async def _rebuild_hot(self, partition: Partition, recovered: Mapping[int, Recovered], *, wants_batches: bool) -> TakenOver:
        log = self._view.find(Log, log_key(partition.topic_id, partition.index))
        log_start_offset = log.log_start_offset if log is not None else 0
        replay = _Replay(self._producers_max)
        refs = log.ledgers if log is not None else ()
        ending = await self._ending(partition, log) if log is not None and not recovered else None
        ledgers: list[_ReadLedger] = []
        if ending is not None:
            replay.load(ending)
        else:
            ledgers = await self._back_to_checkpoint(refs, recovered, replay)
            if not replay.is_loaded and log is not None and log.restored_from:
                replay.load(await self._cold.restored_state(log.restored_from))
            elif not replay.is_loaded:
                await self._load_cold(partition, replay)
            if wants_batches:
                _require_whole(partition, replay, ledgers[-1].ref.base_offset if ledgers else log_start_offset)
        runs: list[tuple[Ledger, EntryRun]] = []
        for ledger, ref, heads in reversed(ledgers):
            replay.continue_at(partition, ref.base_offset)
            index = await self._replay(replay, ledger, ref, heads)
            self._indexes.put(ledger.ledger_id, index)
            if wants_batches and len(index):
                runs.append((ledger, EntryRun(index.first_entry, index.last_entry())))
        more_is_coming = ending is not None and ending.more_is_coming
        taken = self._taken_over(partition, log, replay, runs, more_is_coming=more_is_coming)
        await taken.batches.read_first()
        return taken

    async def _back_to_checkpoint(
        self, refs: Sequence[LedgerRef], recovered: Mapping[int, Recovered], replay: _Replay
    ) -> list[_ReadLedger]:
        """Load the newest complete checkpoint; return the ledgers from the newest back to its own (all if there is none)."""
        ledgers: list[_ReadLedger] = []
        for ref in reversed(refs):
            ledger = self._closed(ref)
            read = recovered.get(ref.ledger_id)
            heads = read.heads if read is not None and read.heads else await self._first_heads(ledger)
            ledgers.append(_ReadLedger(ledger, ref, heads))
            payloads = [entry.payload for entry in read.entries] if read is not None else []
            checkpoint = await self._indexes.heads.checkpoint(ledger, heads, payloads)
            if checkpoint is not None:
                replay.load(checkpoint)
                break
        return ledgers

    async def _first_heads(self, ledger: Ledger) -> list[EntryHead]:
        last = min(FIRST_HEADS - 1, ledger.last_entry)
        return await self._ledgers.read_headers(ledger, 0, last) if last >= 0 else []

    async def _replay(self, replay: _Replay, ledger: Ledger, ref: LedgerRef, heads: list[EntryHead]) -> LedgerIndex:
        """Replay a ledger, beginning with its first headers ``heads``, and return its index.

        Raises ``Corrupt`` if offsets have a gap or do not end where the ledger's record says.
        """
        index = LedgerIndex(ref.base_offset)
        control_batches = self._indexes.heads.control_batches
        replay.heads(index, heads, await control_batches(ledger, heads))
        next_entry = len(heads)
        while next_entry <= ledger.last_entry:
            async with self._indexes.heads.read(ledger, next_entry) as run:
                replay.heads(index, run, await control_batches(ledger, run))
                next_entry += len(run)
        check_end(index, ledger)
        index.transactions = replay.state.transactions.since(ref.base_offset)
        return index

    def _closed(self, ref: LedgerRef) -> Ledger:
        ledger = self._view.find(Ledger, ledger_key(ref.ledger_id))
        if ledger is None or ledger.state is not LedgerState.CLOSED:
            raise Corrupt(f"ledger {ref.ledger_id} is referenced by its log and was not sealed by recovery")
        return ledger

    async def _ending(self, partition: Partition, log: Log) -> Checkpoint | None:
        """Return the last owner's handover checkpoint, from the partition's record or after the last batch; None if none.

        The record's is used without ledgers, too: retention may have removed the cold history that had the same state.
        """
        ledger = self._closed(log.ledgers[-1]) if log.ledgers else None
        if partition.handed:
            checkpoint = decode_checkpoint([partition.handed])
            if checkpoint.offset == (ledger.end_offset if ledger is not None else self._end_without_ledgers(log)):
                return checkpoint
        last = ledger.last_entry if ledger is not None else -1
        if ledger is None or last < 1:
            return None
        (head,) = await self._ledgers.read_headers(ledger, last, last)
        if not is_checkpoint(head.head) or part_position(head.head) != (0, 1):
            return None
        (entry,) = await self._ledgers.read_together(ledger, last, last)
        checkpoint = decode_checkpoint([entry.payload])
        if checkpoint.offset != ledger.end_offset:
            raise Corrupt(
                f"ledger {ledger.ledger_id} ends at {ledger.end_offset}, its last checkpoint is of {checkpoint.offset}"
            )
        return checkpoint

    def _end_without_ledgers(self, log: Log) -> int:
        pointer = self._view.find(ManifestPointer, manifest_pointer_key(log.topic_id, log.index))
        return max(log.log_start_offset, pointer.end_offset if pointer is not None else 0)

    async def _load_cold(self, partition: Partition, replay: _Replay) -> None:
        key = manifest_pointer_key(partition.topic_id, partition.index)
        pointer = self._view.find(ManifestPointer, key)
        if pointer is None:
            return
        epochs = await self._cold.leader_epochs(pointer)
        producers: Sequence[ProducerEntry] = await self._cold.producer_snapshot(pointer)
        replay.load(
            Checkpoint(
                offset=pointer.end_offset,
                leader_epochs=tuple(EpochStart(epoch, start) for epoch, start in epochs),
                producers=tuple(producers),
            )
        )

    def _taken_over(
        self,
        partition: Partition,
        log: Log | None,
        replay: _Replay,
        runs: Sequence[tuple[Ledger, EntryRun]] = (),
        *,
        more_is_coming: bool = False,
    ) -> TakenOver:
        log_start_offset = log.log_start_offset if log is not None else 0
        replay.continue_at(partition, log_start_offset)
        return TakenOver(
            partition=partition,
            log_start_offset=log_start_offset,
            state=replay.state,
            application_state=replay.application_state,
            batches=ReplayedBatches(self._ledgers, runs, self._replayed_bytes),
            more_is_coming=more_is_coming,
        )


class _Replay:
    """State replayed from a checkpoint and the headers after it."""

    def __init__(self, producers_max: int) -> None:
        self.state = ReplayState(producers_max=producers_max)
        self.application_state: bytes | None = None
        self.is_loaded = False

    def load(self, checkpoint: Checkpoint) -> None:
        self.is_loaded = True
        self.state.load(checkpoint)
        self.application_state = checkpoint.application_state

    def continue_at(self, partition: Partition, offset: int) -> None:
        """Continue at ``offset``, where a ledger or the log begins; forget producers if records before it are not known."""
        known = self.state.next_offset
        if known < offset:
            _log.warning(
                "%s: the state after offsets %d..%d is lost: producers are forgotten, and may continue at any sequence",
                partition.key(), known, offset - 1,
            )  # fmt: skip
            self.state.restart_at(offset)

    def heads(self, index: LedgerIndex, heads: Sequence[EntryHead], control_batches: Mapping[int, memoryview]) -> None:
        """Replay the next entries of a ledger, except checkpoints."""
        for head in heads:
            header = index_batch(index, head.entry_id, head.head)
            if header is not None:
                self.state.replay(header, control_batches.get(head.entry_id, head.head))


def _require_whole(partition: Partition, replay: _Replay, begin: int) -> None:
    """Raise ``Corrupt`` unless an internal topic's checkpoint is of offset ``begin``, where its replay begins."""
    if replay.state.next_offset != begin:
        known = f"a checkpoint of offset {replay.state.next_offset}" if replay.is_loaded else "no complete checkpoint"
        raise Corrupt(f"the log of {identity_of(partition)} begins at offset {begin} and has {known}: its state is lost")


def failure_text(failure: Exception, topic: Topic | None) -> str:
    """Return why a takeover failed; of an internal topic also what to do if that does not end."""
    if topic is None or not topic.internal or not isinstance(failure, Unavailable | Corrupt | NotFound):
        return str(failure)
    return f"{failure}; if `stratalog doctor` finds ledgers of {topic.name} gone: `stratalog tier restore-coordinators`"


def identity_of(partition: Partition) -> TopicPartition:
    return TopicPartition(partition.topic_id, partition.index)
