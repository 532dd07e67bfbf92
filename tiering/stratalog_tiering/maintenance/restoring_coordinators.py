"""Restores internal topics: the states of their coordinators, from the bucket into the metadata of a cluster that has none.

The restored state is stored as an object of the bucket's new owner, and the partition's log names it. The partition's first
owner reads it there, and writes it into the checkpoint of its first ledger. Only the coordinator knows the content of a state:
the caller passes a function that adapts it to the topics that were restored.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from stratalog_core.bounded_map import bounded_map
from stratalog_core.errors import Conflict, Corrupt, NoSuchObject, Unavailable
from stratalog_metadata.client.api import MetadataClient, MetadataView
from stratalog_metadata.client.guarded_updates import propose_guarded
from stratalog_metadata.records import NO_OWNER, Log, Partition, Topic, log_key, partition_key, topic_key
from stratalog_metadata.state.commands import ABSENT, Command, Put, VersionIs
from stratalog_tiering.core.restoring import restore_epoch
from stratalog_tiering.format.coordinator_state import CoordinatorState, decode_state, encode_state
from stratalog_tiering.format.object_keys import COORDINATORS_PREFIX, StateKey, parse_state_key, state_key
from stratalog_tiering.store import ObjectStore

_READS_AT_ONCE: Final = 16
_TIMEOUT_S: Final = 60.0
_ATTEMPTS_MAX: Final = 1000
"""Restores into one cluster that failed before metadata knew of them; each has left a state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InternalTopic:
    """An internal topic in the bucket: the newest readable state of each partition that has any, in order of partitions.

    ``damaged``: what is wrong with newer states that could not be read. There are no ``states`` if none could be.
    """

    topic: str
    states: tuple[CoordinatorState, ...]
    damaged: tuple[str, ...] = ()

    @property
    def newest(self) -> CoordinatorState:
        """The state that was stored last, of one at least. It tells what the topic is like."""
        return max(self.states, key=lambda state: (state.owner_number, state.taken_at_ms))


async def read_internal_topics(store: ObjectStore, owner_number: int) -> list[InternalTopic]:
    """The internal topics of the bucket's owners before ``owner_number``.

    Brokers of the last owner may still store states and delete older ones. Raises ``Invalid`` for a newer format,
    ``Unavailable``.
    """
    listed = [parse_state_key(info.key) async for info in store.list(COORDINATORS_PREFIX)]
    by_partition: dict[tuple[str, int], list[StateKey]] = defaultdict(list)
    for place in sorted((each for each in listed if each is not None and each.owner_number < owner_number), reverse=True):
        by_partition[place.topic, place.partition].append(place)
    damaged: dict[str, list[str]] = defaultdict(list)

    async def newest(places: list[StateKey]) -> CoordinatorState | None:
        for place in places:
            try:
                return decode_state(await store.get(state_key(place)), place)
            except (Corrupt, NoSuchObject) as failure:
                damaged[place.topic].append(f"{state_key(place)}: {failure.message}")
        return None

    read = await bounded_map(newest, list(by_partition.values()), _READS_AT_ONCE)
    found: dict[str, list[CoordinatorState]] = defaultdict(list)
    for state in read:
        if state is not None:
            found[state.topic].append(state)
    return [_of_one_topic(name, found[name], damaged[name]) for name in sorted({*found, *damaged})]


def _of_one_topic(name: str, states: Iterable[CoordinatorState], damaged: Iterable[str]) -> InternalTopic:
    """Leave out the states of a topic of the same name that an earlier owner of the bucket had."""
    whole = InternalTopic(topic=name, states=tuple(states), damaged=tuple(damaged))
    if not whole.states:
        return whole
    newest = whole.newest
    of_topic = sorted((state for state in whole.states if state.topic_id == newest.topic_id), key=lambda state: state.partition)
    return InternalTopic(topic=name, states=tuple(of_topic), damaged=whole.damaged)


async def restore_internal_topic(
    metadata: MetadataClient,
    store: ObjectStore,
    found: InternalTopic,
    replication_factor: int | None,
    owner_number: int,
    cluster_id: str,
    now_ms: int,
    adapt: Callable[[bytes | None], bytes | None],
) -> bool:
    """Restore one internal topic, of which a state was read; False if the cluster has used a topic of its name, which stays.

    ``adapt`` returns what a coordinator's state becomes. If an earlier restore into the cluster has restored the topic, and no
    broker has owned a partition of it yet, it is restored anew, with the topics that the cluster has now. So call it again
    after an error. Raises ``Conflict``, ``Unavailable``, ``OutcomeUnknown``, and what ``adapt`` raises.
    """
    await metadata.refresh(_TIMEOUT_S)
    newest = found.newest
    unused = _unused(metadata.view, newest)
    if unused is None:
        return False
    stored: dict[int, CoordinatorState] = {}
    for state in found.states:
        checkpoint = replace(state.checkpoint, application_state=adapt(state.checkpoint.application_state))
        changed = replace(
            state, cluster_id=cluster_id, owner_number=owner_number, taken_at_ms=now_ms, checkpoint=checkpoint,
            leader_epoch=restore_epoch(state.leader_epoch, owner_number),
        )  # fmt: skip
        stored[state.partition] = await store_at_next_epoch(store, changed)
    command = _command(newest, stored, replication_factor or newest.replication_factor, owner_number, unused)
    await propose_guarded(metadata, command, topic_key(newest.topic), _TIMEOUT_S)
    return True


def _unused(view: MetadataView, newest: CoordinatorState) -> list[VersionIs] | None:
    """The requirements for restoring the internal topic, so that nothing is lost; None if the cluster has used it.

    It has not if it does not have the topic, or only as an earlier restore left it.
    """
    topic_id = newest.topic_id
    keys = [topic_key(newest.topic)]
    for index in range(newest.partition_count):
        keys += [partition_key(topic_id, index), log_key(topic_id, index)]
    found = {key: view.get(key) for key in keys}
    topic = found[topic_key(newest.topic)]
    if topic is not None:
        records = [each.record for each in found.values() if each is not None]
        logs = [record for record in records if isinstance(record, Log)]
        owners = {record.owner for record in records if isinstance(record, Partition)}
        is_restored = any(log.restored_from for log in logs) and not any(log.ledgers for log in logs)
        is_same = isinstance(topic.record, Topic) and topic.record.topic_id == topic_id
        if not is_same or owners != {NO_OWNER} or not is_restored:
            return None
    return [VersionIs(key=key, version=each.version if each is not None else ABSENT) for key, each in found.items()]


async def store_at_next_epoch(store: ObjectStore, state: CoordinatorState) -> CoordinatorState:
    """Store the state at the next free place; an earlier attempt, which may have restored less, has left its own.

    Returns it with the leader epoch of that place. Raises ``OutcomeUnknown``, ``Unavailable``.
    """
    for attempt in range(_ATTEMPTS_MAX):
        state = replace(state, leader_epoch=state.leader_epoch + bool(attempt))
        try:
            await store.put(state_key(state.place), [encode_state(state)])
        except Conflict:
            continue
        return state
    raise Unavailable(f"{store.url} has {_ATTEMPTS_MAX} states of {state.topic}-{state.partition} that a restore has left")


def _command(
    newest: CoordinatorState, stored: dict[int, CoordinatorState], factor: int, owner_number: int, unused: Sequence[VersionIs]
) -> Command:
    topic = Topic(
        name=newest.topic, topic_id=newest.topic_id, partition_count=newest.partition_count, replication_factor=factor,
        configs=newest.configs, internal=True,
    )  # fmt: skip
    updates: list[Put] = [Put(record=topic)]
    for index in range(topic.partition_count):
        state = stored.get(index)
        epoch = state.leader_epoch if state is not None else restore_epoch(0, owner_number)
        start_offset = state.checkpoint.offset if state is not None else 0
        place = state_key(state.place) if state is not None else ""
        updates.append(Put(record=Partition(topic_id=topic.topic_id, index=index, leader_epoch=epoch)))
        updates.append(
            Put(record=Log(topic_id=topic.topic_id, index=index, log_start_offset=start_offset, restored_from=place))
        )
    return Command(updates=tuple(updates), requirements=tuple(unused))
