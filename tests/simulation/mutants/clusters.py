"""Planted faults of brokers, tiering and metadata's rules, in ``log``, ``ownership-changes`` and ``fencing-races``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from stratalog_bookies.client import Recovered
from stratalog_bookies.node.collector import Collector
from stratalog_broker.partitions.core import PartitionCore
from stratalog_broker.partitions.ledger_opening import LedgerOpening
from stratalog_broker.partitions.log import PartitionLog
from stratalog_broker.partitions.ownership import Partitions
from stratalog_broker.partitions.takeover import Takeover
from stratalog_core.errors import OutcomeUnknown, StratalogError
from stratalog_core.partition_state import producer_states
from stratalog_core.partition_state.producer_states import ProducerStates
from stratalog_core.partition_state.replay_state import ReplayState
from stratalog_metadata.client import guarded_updates
from stratalog_metadata.client.api import MetadataClient
from stratalog_metadata.client.sessions import SessionKeeper
from stratalog_metadata.controller.leases import LeaseTable
from stratalog_metadata.records import Ledger, LedgerState, Log, Partition, Topic, Versioned, ledger_key, log_key
from stratalog_metadata.state import machine as state_machine
from stratalog_metadata.state.commands import Command, EpochIs
from stratalog_metadata.state.guarded_update import GuardedUpdate, Superseded
from stratalog_tiering.core import commands, garbage, partition, planning
from stratalog_tiering.core.garbage import Garbage
from stratalog_tiering.core.partition import PartitionSnapshot, StoredLedger
from stratalog_tiering.maintenance import orphans
from stratalog_tiering.offload import commit, offloading


def _swap(owner: object, name: str, new: object) -> Any:
    """Replace the attribute with ``new``; return the old value."""
    old = getattr(owner, name)
    setattr(owner, name, new)
    return old


# -- owners


def epochs_are_not_checked() -> None:
    """The state machine accepts commands of owners of earlier epochs. The check of the log's version still guards it."""
    _swap(state_machine, "_check_epoch", lambda records, requirement: None)


def versions_and_epochs_are_not_checked() -> None:
    """The state machine accepts every command."""
    _swap(state_machine, "_check", lambda records, requirement: None)


def versions_are_not_checked() -> None:
    """Compare-and-set always sets."""
    _swap(state_machine, "_check_version", lambda records, requirement: None)


def broker_ignores_the_end_of_its_session() -> None:
    """A broker that lost its session continues to serve. Fencing still rejects its appends; its reads are stale."""
    _swap(Partitions, "suspend", lambda self: None)


def lease_is_measured_by_the_wall_clock() -> None:
    """A session holder measures its lease with a clock that jumps."""

    class Wall:
        def __init__(self, clock: Any) -> None:
            self._clock = clock

        def monotonic(self) -> float:
            return float(self._clock.wall_ms()) / 1000

    make: Callable[..., None] = SessionKeeper.__init__

    def made(self: SessionKeeper, addresses: Sequence[str], transport: Any, clock: Any, *others: Any) -> None:
        make(self, addresses, transport, Wall(clock), *others)

    _swap(SessionKeeper, "__init__", made)
    hold: Callable[..., None] = SessionKeeper.hold

    def holding(self: SessionKeeper, session_id: int, lease_s: float, sent_at: float, on_expired: Any, *grace: float) -> None:
        hold(self, session_id, lease_s, self._clock.monotonic(), on_expired, *grace)

    _swap(SessionKeeper, "hold", holding)


def quorum_ends_sessions_early() -> None:
    """The leader ends a session after half its lease, while the holder still relies on it."""
    opened: Callable[..., None] = LeaseTable.opened
    _swap(LeaseTable, "opened", lambda self, session_id, lease_s, *more: opened(self, session_id, lease_s / 2, *more))


def _recover_at_takeover(choose: Callable[[list[Ledger]], list[Ledger]]) -> None:
    """Make a new owner recover only the ledgers that ``choose`` returns."""

    async def recover(self: Takeover, partition: Partition, topic: Topic) -> dict[int, Recovered]:
        view = self._view
        log = view.find(Log, log_key(partition.topic_id, partition.index))
        found = [view.find(Ledger, ledger_key(ref.ledger_id)) for ref in (log.ledgers if log is not None else ())]
        waiting = [ledger.ledger_id for ledger in choose([ledger for ledger in found if ledger is not None])]
        if waiting:
            requirement = EpochIs(key=partition.key(), owner=partition.owner, leader_epoch=partition.leader_epoch)
            await self._ledgers.recover(waiting, requirements=(requirement,))
        return {}

    _swap(Takeover, "recover", recover)


def takeover_recovers_only_the_last_ledger() -> None:
    """A new owner seals only the log's last ledger. Only one is ever open: opening waits for the seal."""
    _recover_at_takeover(lambda ledgers: [ledger for ledger in ledgers[-1:] if ledger.state is not LedgerState.CLOSED])


def takeover_skips_ledgers_in_recovery() -> None:
    """A new owner seals OPEN ledgers and skips those whose recovery an earlier owner had started."""
    _recover_at_takeover(lambda ledgers: [ledger for ledger in ledgers if ledger.state is LedgerState.OPEN])


def takeover_and_opening_recover_only_the_last_ledger() -> None:
    """Takeover seals only the last ledger, and opening seals no leftovers: each fault alone is masked by the other defence."""
    takeover_recovers_only_the_last_ledger()

    async def seal_leftovers(self: LedgerOpening, log: Log) -> tuple[Ledger, ...]:
        return ()

    _swap(LedgerOpening, "_seal_leftovers", seal_leftovers)


def takeover_does_not_recover() -> None:
    """A new owner takes the log as metadata shows it, without recovery."""

    async def recover(self: Takeover, partition: Partition, topic: Topic) -> dict[int, Recovered]:
        return {}

    _swap(Takeover, "recover", recover)


def producers_are_forgotten_at_takeover() -> None:
    """A new owner forgets the producers' earlier batches."""
    _swap(ProducerStates, "load", lambda self, entries: None)
    replay: Callable[..., None] = ReplayState.replay

    def replayed(self: ReplayState, header: Any, batch: Any) -> None:
        replay(self, header, batch)
        self.producers = ProducerStates(1000)

    _swap(ReplayState, "replay", replayed)


def checkpoints_without_producers() -> None:
    """A ledger's checkpoint omits the producers' earlier batches."""
    _swap(ProducerStates, "snapshot", lambda self, unconfirmed=(): ())


def repeated_batches_are_appended() -> None:
    """A batch that was appended already gets an offset again."""

    def judge(self: ProducerStates, header: Any) -> Any:
        return producer_states.Verdict.APPEND, None

    _swap(ProducerStates, "judge", judge)


def takeover_begins_at_the_last_ledgers_base() -> None:
    """A takeover starts at the last ledger's base offset instead of its end."""
    taken_over: Callable[..., Any] = Takeover._taken_over

    def at_the_base(self: Takeover, partition: Partition, log: Any, replay: Any, *others: Any, **more: Any) -> Any:
        replay.state.next_offset = log.ledgers[-1].base_offset if log is not None and log.ledgers else replay.state.next_offset
        return taken_over(self, partition, log, replay, *others, **more)

    _swap(Takeover, "_taken_over", at_the_base)


def acknowledged_at_the_first_copy() -> None:
    """Producers with acks=all are answered at the first copy."""

    def first_copy(self: PartitionLog, entry_id: int) -> None:
        for pending in self.core.pending:
            if pending.entry_id <= entry_id and pending.on_done is not None:
                on_done, pending.on_done = pending.on_done, None
                on_done(pending.base_offset)

    _swap(PartitionLog, "first_copy", first_copy)


def lost_writer_is_answered_as_done() -> None:
    """When its writer fails, a broker acknowledges batches of unknown outcome."""
    resign: Callable[..., Any] = PartitionCore.resign

    def resigning(self: PartitionCore) -> Any:
        for pending in self.pending:
            if pending.on_done is not None:
                on_done, pending.on_done = pending.on_done, None
                on_done(pending.base_offset)
        return resign(self)

    _swap(PartitionCore, "resign", resigning)


def what_was_held_is_answered_as_done() -> None:
    """An owner that has handed its partition over acknowledges the batches that it held and never wrote."""
    resign: Callable[..., Any] = PartitionCore.resign

    def resigning(self: PartitionCore) -> Any:
        for pending in self.queue if self.is_held else ():
            pending.settle(pending.base_offset)
        return resign(self)

    _swap(PartitionCore, "resign", resigning)


# -- tiering


def hot_copies_go_before_the_commit() -> None:
    """A sealed ledger counts as cold once any manifest is committed, and its hot copy is dropped without a check."""

    def is_cold(state: PartitionSnapshot, ledger: Ledger) -> bool:
        return state.pointer is not None and partition.is_sealed(ledger)

    async def cold_since(ports: Any, state: PartitionSnapshot) -> Mapping[int, int]:
        return {stored.ledger.ledger_id: 0 for stored in state.ledgers}

    from stratalog_tiering.worker import partition_work

    for module in (partition, planning, partition_work):
        _swap(module, "is_cold", is_cold)
    _swap(partition_work, "cold_since", cold_since)
    _swap(partition_work, "drop_hot", offloading.drop)


def objects_are_deleted_after_an_unknown_outcome() -> None:
    """A commit of unknown outcome counts as failed, and its objects are deleted."""
    read: Callable[..., int] = GuardedUpdate.read
    timed_out: Callable[..., StratalogError] = GuardedUpdate.timed_out

    def guessing(self: GuardedUpdate, found: Versioned | None) -> int:
        try:
            return read(self, found)
        except Superseded as superseded:
            superseded.is_certain = True
            raise

    def given_up(self: GuardedUpdate) -> StratalogError:
        failure = timed_out(self)
        return Superseded(self.key, None, is_certain=True) if isinstance(failure, OutcomeUnknown) else failure

    _swap(GuardedUpdate, "read", guessing)
    _swap(GuardedUpdate, "timed_out", given_up)
    _swap(guarded_updates, "ATTEMPT_S", 0.2)
    _swap(commit, "COMMIT_TIMEOUT_S", 0.0)


def copies_are_not_read_back() -> None:
    """A segment is committed once the store acknowledges it, without being read back."""

    async def verify_new(*args: Any) -> None:
        pass

    _swap(offloading, "verify_new", verify_new)
    from stratalog_tiering.maintenance import merging

    _swap(merging, "verify_new", verify_new)


def commits_do_not_look_at_the_manifest() -> None:
    """A commit requires nothing: neither the lease nor the manifest version that it was made from."""

    async def propose_unguarded(metadata: MetadataClient, command: Command, key: str, timeout_s: float) -> int:
        return (await metadata.propose(msgspec.structs.replace(command, requirements=()), timeout_s)).index

    _swap(commit, "propose_guarded", propose_unguarded)


def drops_do_not_look_at_the_log() -> None:
    """Hot ledgers leave the log without a check that the log is unchanged since the worker read it."""
    drop: Callable[..., Command] = commands.drop_ledgers

    def drop_ledgers(*args: Any) -> Command:
        return msgspec.structs.replace(drop(*args), requirements=())

    _swap(offloading, "drop_ledgers", drop_ledgers)


def sweep_does_not_look_at_the_manifest() -> None:
    """Everything older than the grace period is swept."""

    found: Callable[..., list[Garbage]] = garbage.orphans
    _swap(orphans, "orphans", lambda listed, referenced, grace_ms: found(listed, frozenset(), grace_ms))


def nothing_is_swept() -> None:
    """Objects of failed attempts are never deleted."""
    _swap(orphans, "orphans", lambda listed, referenced, grace_ms: [])


def hot_copies_stay() -> None:
    """Cold ledgers never leave metadata and bookies."""
    _swap(planning, "_expired_hot", lambda *args: ((), None))


def pointer_claims_more_than_the_manifest() -> None:
    """The pointer in metadata ends one offset beyond the manifest."""
    pointer: Callable[..., Command] = commands.commit_segment

    def commit_segment(state: PartitionSnapshot, new: Any, ledgers: Sequence[StoredLedger], guards: Any) -> Command:
        return pointer(state, msgspec.structs.replace(new, end_offset=new.end_offset + 1), ledgers, guards)

    _swap(offloading, "commit_segment", commit_segment)


# -- bookies' garbage collection


def collector_lists_after_the_scan() -> None:
    """A bookie lists its ledgers after it scanned metadata: a ledger created in between is deleted."""

    async def collect(self: Collector) -> int:
        known = {found.record.ledger_id for found in await self._metadata.scan("ledger/") if isinstance(found.record, Ledger)}
        held = [set(disk.core.contents.ledgers) for disk in self._disks]
        return sum([len(await self._delete(disk, ids - known)) for disk, ids in zip(self._disks, held, strict=True)])

    _swap(Collector, "collect", collect)


def nothing_is_collected() -> None:
    """Bookies keep deleted ledgers whose deletion they missed."""

    async def collect(self: Collector) -> int:
        return 0

    _swap(Collector, "collect", collect)


MUTANTS: Final = (
    versions_are_not_checked,
    versions_and_epochs_are_not_checked,
    broker_ignores_the_end_of_its_session,
    takeover_does_not_recover,
    producers_are_forgotten_at_takeover,
    repeated_batches_are_appended,
    takeover_begins_at_the_last_ledgers_base,
    acknowledged_at_the_first_copy,
    lost_writer_is_answered_as_done,
    hot_copies_go_before_the_commit,
    copies_are_not_read_back,
    drops_do_not_look_at_the_log,
    sweep_does_not_look_at_the_manifest,
    nothing_is_swept,
    hot_copies_stay,
    pointer_claims_more_than_the_manifest,
    nothing_is_collected,
)

IN_OWNERSHIP_CHANGES: Final = (
    takeover_skips_ledgers_in_recovery,
    objects_are_deleted_after_an_unknown_outcome,
    epochs_are_not_checked,
    lease_is_measured_by_the_wall_clock,
    quorum_ends_sessions_early,
    checkpoints_without_producers,
    commits_do_not_look_at_the_manifest,
    takeover_and_opening_recover_only_the_last_ledger,
    what_was_held_is_answered_as_done,
)

IN_FENCING_RACES: Final = (collector_lists_after_the_scan,)
