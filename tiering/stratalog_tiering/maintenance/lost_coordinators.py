"""Restores partitions of internal topics whose ledgers are gone, from the states that brokers stored in the bucket.

Ledgers of internal topics are deleted as soon as a later one has a checkpoint (ADR 70). So metadata that was restored from a
copy may know only ledgers that no bookie has any more. The caller proves that: this module reads no ledger. Nothing is
restored without an operator's command, because commits after the stored state are lost.

As after a restore from the bucket, the state is stored once more, and the partition's log names it until a broker has written
it into the checkpoint of its first ledger.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from stratalog_core.errors import Conflict, Corrupt, Invalid, NoSuchObject
from stratalog_metadata.client.api import MetadataClient, MetadataView
from stratalog_metadata.client.guarded_updates import decide_again, propose_guarded
from stratalog_metadata.records import NO_OWNER, Log, Partition, Topic, ledger_key, log_key, partition_key
from stratalog_metadata.state.commands import Command, Delete, Put, VersionIs
from stratalog_tiering.cold.archive import read_owner
from stratalog_tiering.format.coordinator_state import CoordinatorState, decode_state
from stratalog_tiering.format.object_keys import parse_state_key, state_key, states_prefix
from stratalog_tiering.maintenance.restoring_coordinators import store_at_next_epoch
from stratalog_tiering.store import ObjectStore

_TIMEOUT_S: Final = 60.0


class _Changed(Exception):
    """The log has changed since the partition was found lost, or the partition is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LostPartition:
    """A partition of an internal topic whose ledgers are gone.

    That holds as long as its log has the version ``log_version``: an owner that opens a ledger changes the log.
    """

    topic: Topic
    partition: Partition
    log: Log
    log_version: int

    @property
    def name(self) -> str:
        return f"{self.topic.name}-{self.partition.index}"


def seen_in(view: MetadataView, topic: Topic, index: int) -> LostPartition | None:
    """The partition as the view has it, for a caller that finds its ledgers gone; None if it has none."""
    partition = view.find(Partition, partition_key(topic.topic_id, index))
    found = view.get(log_key(topic.topic_id, index))
    if partition is None or found is None or not isinstance(found.record, Log) or not found.record.ledgers:
        return None
    return LostPartition(topic=topic, partition=partition, log=found.record, log_version=found.version)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredState:
    """The newest readable state of a partition in the bucket; ``damaged`` says what is wrong with newer ones.

    ``greatest_epoch``: of all its states in the bucket, readable or not; -1 if there are none.
    """

    state: CoordinatorState | None = None
    damaged: tuple[str, ...] = ()
    greatest_epoch: int = -1


async def owner_number_of(store: ObjectStore, cluster_id: str) -> int:
    """The cluster's number among the bucket's owners. Raises ``Invalid`` if the bucket is another cluster's."""
    owner = await read_owner(store)
    if owner is not None and owner.cluster_id != cluster_id:
        raise Invalid(f"{store.url} belongs to cluster {owner.cluster_id}; this is {cluster_id}: name this cluster's own store")
    return owner.number if owner is not None else 0


async def read_state(store: ObjectStore, lost: LostPartition) -> StoredState:
    """Raises ``Invalid`` for a newer format, ``Unavailable``."""
    prefix = states_prefix(lost.topic.name, lost.partition.index)
    listed = [parse_state_key(info.key) async for info in store.list(prefix)]
    places = sorted((place for place in listed if place is not None), reverse=True)
    greatest = max((place.leader_epoch for place in places), default=-1)
    damaged: list[str] = []
    for place in places:
        try:
            state = decode_state(await store.get(state_key(place)), place)
        except (Corrupt, NoSuchObject) as failure:
            damaged.append(f"{state_key(place)}: {failure.message}")
            continue
        if state.topic_id == lost.topic.topic_id:
            return StoredState(state=state, damaged=tuple(damaged), greatest_epoch=greatest)
        damaged.append(f"{state_key(place)}: it is of topic {state.topic_id}; this is {lost.topic.topic_id}")
    return StoredState(damaged=tuple(damaged), greatest_epoch=greatest)


async def restore_partition(
    metadata: MetadataClient,
    store: ObjectStore,
    lost: LostPartition,
    found: StoredState,
    owner_number: int,
    cluster_id: str,
    now_ms: int,
    adapt: Callable[[bytes | None], bytes | None],
) -> None:
    """Have the partition begin with the state that was found, or empty if there is none. Its ledgers' records are removed.

    The leader epoch rises, so its owner takes it over again. ``adapt`` returns what the coordinator's state becomes. Raises
    ``Conflict`` if the log has changed since the partition was found lost, ``Unavailable``, ``OutcomeUnknown``.
    """
    epoch, log = max(lost.partition.leader_epoch, found.greatest_epoch) + 1, replace(lost.log, ledgers=(), log_start_offset=0)
    if found.state is not None:
        checkpoint = replace(found.state.checkpoint, application_state=adapt(found.state.checkpoint.application_state))
        changed = replace(
            found.state, cluster_id=cluster_id, owner_number=owner_number, taken_at_ms=now_ms, checkpoint=checkpoint,
            leader_epoch=epoch,
        )  # fmt: skip
        stored = await store_at_next_epoch(store, changed)
        epoch = stored.leader_epoch
        log = replace(log, log_start_offset=checkpoint.offset, restored_from=state_key(stored.place))
    ledgers: Sequence[Delete] = [Delete(key=ledger_key(ref.ledger_id)) for ref in lost.log.ledgers]
    key, same_log = lost.partition.key(), VersionIs(key=log.key(), version=lost.log_version)

    async def attempt() -> None:
        current, unchanged = await metadata.read([key, log.key()], _TIMEOUT_S)
        known = unchanged.record if unchanged is not None else None
        if isinstance(known, Log) and known.restored_from == log.restored_from != "":
            return  # An earlier attempt took effect.
        is_same = unchanged is not None and unchanged.version == lost.log_version
        if not is_same or current is None or not isinstance(current.record, Partition):
            raise _Changed
        # Its owner may have changed since.
        after = max(epoch, current.record.leader_epoch + 1)
        partition: Partition = replace(current.record, leader_epoch=after, handed=b"", next_owner=NO_OWNER)
        command = Command(
            updates=(Put(record=partition), Put(record=log), *ledgers),
            requirements=(VersionIs(key=key, version=current.version), same_log),
        )
        await propose_guarded(metadata, command, log.key(), _TIMEOUT_S)

    try:
        await decide_again(f"the log of {lost.name}", attempt)
    except _Changed:
        if log.restored_from:
            # Nothing refers to it, and it would count as the newest state.
            await store.delete([log.restored_from])
        raise Conflict(f"the log of {lost.name} has changed since it was found lost: repeat the command") from None
