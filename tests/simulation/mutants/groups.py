"""Planted faults of the state that the next owner finds: internal topics' ledgers, checkpoints, group state, producers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
from kio.schema.errors import ErrorCode

from stratalog_broker.coordination.coordinator_partition import CoordinatorPartition
from stratalog_broker.coordination.groups.core import coordinator, migration
from stratalog_broker.coordination.groups.core.consumer import reconciliation
from stratalog_broker.coordination.groups.core.consumer.groups import ConsumerGroups
from stratalog_broker.coordination.groups.core.store import GroupStore
from stratalog_broker.coordination.locator import Coordinators
from stratalog_broker.coordination.record_writer import RecordWriter
from stratalog_broker.coordination.replay import Replay
from stratalog_broker.partitions import takeover
from stratalog_broker.partitions.internal_topics import CONSUMER_OFFSETS
from stratalog_broker.partitions.ledger_trimming import LedgerTrimming
from stratalog_broker.partitions.log import PartitionLog
from stratalog_broker.partitions.replayed_batches import ReplayedBatches
from stratalog_broker.partitions.takeover import Takeover
from stratalog_core.batches.checkpoint import Checkpoint
from stratalog_core.partition_state.producer_states import ProducerStates
from stratalog_metadata.records import Topic
from stratalog_tiering.offload.coordinator_states import CoordinatorStates


def _swap(owner: object, name: str, new: object) -> Any:
    """Replace the attribute with ``new``; return the old value."""
    old = getattr(owner, name)
    setattr(owner, name, new)
    return old


# -- ledgers


def internal_ledgers_go_at_the_opening() -> None:
    """Older ledgers leave the log when a new one is opened, before its checkpoint is durable."""

    def opened(self: LedgerTrimming, writer: Any, checkpoint_parts: int) -> None:
        self._trimming = asyncio.get_running_loop().create_task(self._trim(writer.ledger.ledger_id))

    _swap(LedgerTrimming, "opened", opened)


def internal_ledgers_go_after_the_first_part() -> None:
    """A checkpoint counts as complete after its first entry."""
    opened: Callable[..., None] = LedgerTrimming.opened
    _swap(LedgerTrimming, "opened", lambda self, writer, checkpoint: opened(self, writer, checkpoint[:1]))


def internal_ledgers_stay() -> None:
    """No ledger leaves the log of an internal topic."""
    _swap(LedgerTrimming, "confirmed", lambda self, lac: None)


def takeover_trusts_the_newest_ledger() -> None:
    """A takeover looks for a checkpoint in the newest ledger only, and starts empty if it has none."""
    back: Callable[..., Any] = Takeover._back_to_checkpoint

    async def newest(self: Takeover, refs: Sequence[Any], recovered: Any, replay: Any) -> Any:
        return await back(self, refs[-1:], recovered, replay)

    _swap(Takeover, "_back_to_checkpoint", newest)
    _swap(takeover, "_require_whole", lambda partition, replay, begin: None)


# -- state


def batches_after_the_checkpoint_are_not_replayed() -> None:
    """A takeover of an internal topic loads its checkpoint and no batches after it."""
    init: Callable[..., None] = ReplayedBatches.__init__
    _swap(ReplayedBatches, "__init__", lambda self, ledgers, runs, piece_bytes: init(self, ledgers, (), piece_bytes))


def replay_ends_after_the_first_piece() -> None:
    """A takeover of an internal topic replays only as much of a ledger as one read returns."""
    read_next: Callable[..., Any] = ReplayedBatches._read_next

    async def once(self: ReplayedBatches, bytes_max: int) -> None:
        runs = len(self._runs)
        await read_next(self, bytes_max)
        if len(self._runs) == runs:
            self._runs.popleft()

    _swap(ReplayedBatches, "_read_next", once)


def group_state_is_not_handed_over() -> None:
    """A handover checkpoint omits the application's state."""
    handover_checkpoint: Callable[..., bytes] = PartitionLog.handover_checkpoint

    def without(self: PartitionLog) -> bytes:
        application, self.application = self.application, None
        try:
            return handover_checkpoint(self)
        finally:
            self.application = application

    _swap(PartitionLog, "handover_checkpoint", without)


def _snapshot_without(name: str) -> None:
    snapshot: Callable[..., bytes] = GroupStore.snapshot

    def without(self: GroupStore) -> bytes:
        content = getattr(self, name)
        setattr(self, name, {})
        try:
            return snapshot(self)
        finally:
            setattr(self, name, content)

    _swap(GroupStore, "snapshot", without)


def checkpoints_without_offsets() -> None:
    """A checkpoint of ``__consumer_offsets`` has groups but no offsets."""
    _snapshot_without("offsets")


def checkpoints_without_groups() -> None:
    """A checkpoint of ``__consumer_offsets`` has offsets but no members and generations."""
    _snapshot_without("images")


def commits_are_acknowledged_before_they_are_written() -> None:
    """A commit is acknowledged when it is queued."""

    async def written(self: RecordWriter, records: Sequence[Any]) -> ErrorCode:
        self.write(records, lambda error: None)
        return ErrorCode.none

    _swap(RecordWriter, "written", written)


def coordinators_serve_on_after_their_partition_is_lost() -> None:
    """A coordinator keeps its state after it lost its partition and serves while the broker's view calls it the owner."""
    _swap(CoordinatorPartition, "resigned", lambda self: None)
    asked: Callable[..., Any] = Coordinators._at

    def at(self: Coordinators[Any, Any], topic: Topic, index: int) -> Any:
        found, owned = asked(self, topic, index), self._owned.get(index)
        is_refused = found is ErrorCode.coordinator_load_in_progress
        return owned.application if is_refused and owned is not None and owned.application is not None else found

    _swap(Coordinators, "_at", at)


# -- states in the bucket


def stored_states_hold_unconfirmed_commits() -> None:
    """A state that is stored includes commits that the quorum does not have yet."""
    completed: Callable[..., Checkpoint] = PartitionLog.completed

    def ahead(self: PartitionLog, checkpoint: Checkpoint) -> Checkpoint:
        found = completed(self, checkpoint)
        if self.topic.name != CONSUMER_OFFSETS:
            return found
        replay = Replay(store := GroupStore.from_snapshot(found.application_state))
        for pending in self.core.pending:
            replay.apply(pending.batch)
        return msgspec.structs.replace(found, application_state=store.snapshot())

    _swap(PartitionLog, "completed", ahead)


def a_replaced_owner_hides_newer_states() -> None:
    """Keys order states by when they are stored, not by the leader epoch of the log that they are of."""
    put: Callable[..., Any] = CoordinatorStates.put

    async def on_top(self: CoordinatorStates, state: Any, stored: Sequence[Any]) -> Any:
        newest = max((place.leader_epoch for place in await self.stored(state.topic, state.partition)), default=0)
        epoch = max(newest, state.leader_epoch) + 1
        return await put(self, msgspec.structs.replace(state, leader_epoch=epoch), stored)

    _swap(CoordinatorStates, "put", on_top)


# -- the consumer protocol


def member_epochs_are_not_checked_in_commits() -> None:
    """A member may commit offsets whatever its epoch, also when it has been removed."""
    _swap(ConsumerGroups, "check_commit", lambda self, group_id, member_id, epoch, commits: ErrorCode.none)


def partitions_are_handed_over_before_they_are_revoked() -> None:
    """A partition is free for others as soon as it has left its owner's target."""
    _swap(reconciliation, "_still_owns", lambda revoking, reported: False)


def upgrades_forget_who_reads_what() -> None:
    """A classic group becomes a consumer group whose members own nothing, although its classic members still read."""

    def without(*arguments: Any) -> Any:
        state = migration.upgraded(*arguments)
        state.current, state.targets = {}, {}
        return state

    _swap(coordinator, "upgraded", without)


# -- producers


def checkpoints_hold_unconfirmed_batches() -> None:
    """A checkpoint includes batches that are not confirmed yet."""
    snapshot: Callable[..., Any] = ProducerStates.snapshot
    _swap(ProducerStates, "snapshot", lambda self, unconfirmed=(): snapshot(self))


IN_TRANSACTIONS: Final = (
    member_epochs_are_not_checked_in_commits,
    partitions_are_handed_over_before_they_are_revoked,
    upgrades_forget_who_reads_what,
)
IN_LOG: Final = (
    stored_states_hold_unconfirmed_commits,
    a_replaced_owner_hides_newer_states,
)
IN_OWNERSHIP_CHANGES: Final = (
    checkpoints_hold_unconfirmed_batches,
    internal_ledgers_go_at_the_opening,
    internal_ledgers_go_after_the_first_part,
    internal_ledgers_stay,
    takeover_trusts_the_newest_ledger,
    batches_after_the_checkpoint_are_not_replayed,
    replay_ends_after_the_first_piece,
    group_state_is_not_handed_over,
    checkpoints_without_offsets,
    checkpoints_without_groups,
    commits_are_acknowledged_before_they_are_written,
    coordinators_serve_on_after_their_partition_is_lost,
)
