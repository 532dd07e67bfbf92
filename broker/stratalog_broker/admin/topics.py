"""Creates, grows, configures and deletes topics by commands to the metadata quorum, guarded by the versions they are based on.

A new topic's partitions have no owner yet: the controller assigns them as soon as the command is committed, and the calls
here return when this broker's view shows owners. Deletion leaves a ``DeletedTopic``, from which the topic can be restored for a
while (``deleted_topics.py``); data is not deleted here. Replica assignments set the number of copies and the brokers preferred
as owners; copies are on bookies.

Refusals are errors of ``admin/errors.py``, or ``NotFound``; failures of the quorum are errors of the common tree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final
from uuid import UUID

import msgspec

from stratalog_broker.admin.deleted_topics import delete_for_good
from stratalog_broker.admin.errors import (
    InvalidAssignment,
    InvalidConfig,
    InvalidPartitions,
    InvalidReplicationFactor,
    InvalidTopic,
    NotServedYet,
    Protected,
    TopicExists,
)
from stratalog_broker.admin.locked_history import require_unlocked
from stratalog_broker.admin.retention_changes import log_shortened
from stratalog_broker.admin.topic_limits import check_cluster, check_request
from stratalog_broker.admin.topic_names import check_topic_name
from stratalog_broker.admin.view_waiting import wait_until
from stratalog_broker.configs.settings import BrokerSettings
from stratalog_broker.partitions.internal_topics import COPIES_SETTINGS, INTERNAL_TOPICS
from stratalog_core.errors import Conflict, Invalid, NotEnoughBookies, NotFound
from stratalog_core.ports import Clock, Random
from stratalog_metadata.client.api import MetadataClient, MetadataView
from stratalog_metadata.client.guarded_updates import decide_again, propose_guarded
from stratalog_metadata.client.protection import is_protected
from stratalog_metadata.client.topic_defaults import topic_defaults
from stratalog_metadata.client.topic_deletion import delete_topic, never_existed
from stratalog_metadata.records import (
    REPLICATION_FACTOR_MAX,
    Bookie,
    Broker,
    Log,
    ManifestPointer,
    Partition,
    Topic,
    configs_in_force,
    deleted_topic_key,
    is_hot_only,
    manifest_pointer_key,
    partition_key,
    topic_key,
)
from stratalog_metadata.state.commands import ABSENT, Command, Put, Update, VersionIs
from stratalog_metadata.state.guarded_update import GONE, Superseded
from stratalog_metadata.topic_rules.topic_configs import STORAGE_ENABLE, check_topic_configs
from stratalog_metadata.topic_rules.topic_names import NAME_CHARACTERS_MAX

PARTITIONS_MAX: Final = 10_000
BROKER_DEFAULT: Final = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class NewTopic:
    """The topic to create; ``BROKER_DEFAULT`` leaves a number to the broker's settings. A config needs a value."""

    name: str
    partition_count: int = BROKER_DEFAULT
    replication_factor: int = BROKER_DEFAULT
    configs: Mapping[str, str | None] = field(default_factory=dict)
    internal: bool = False
    assigned: Sequence[tuple[int, tuple[int, ...]]] = ()
    """Index of each partition and its brokers, the preferred owner first. It gives both numbers. Empty: any brokers."""


EditConfigs = Callable[[dict[str, str]], Mapping[str, str]]


class TopicCommands:
    """Commands on topics. Holds no state."""

    def __init__(self, settings: BrokerSettings, metadata: MetadataClient, clock: Clock, random: Random) -> None:
        self._settings = settings
        self._metadata = metadata
        self._clock = clock
        self._random = random

    @property
    def _view(self) -> MetadataView:
        return self._metadata.view

    # -- create

    async def create(self, new: NewTopic, timeout_s: float, *, validate_only: bool = False) -> Topic:
        """Create a topic and wait until its partitions have owners; ``NotServedYet`` after ``timeout_s``."""
        configs, assigned = _given_configs(new), _given_assignment(new)
        topic = self._plan(new, configs, assigned)
        if validate_only:
            return topic
        updates = (Put(record=topic), *_partition_updates(topic, 0, assigned))
        requirements = (VersionIs(key=topic.key(), version=ABSENT), *never_existed(topic.topic_id))
        try:
            command = Command(updates=updates, requirements=requirements)
            await propose_guarded(self._metadata, command, topic.key(), timeout_s)
        except Superseded:
            raise TopicExists(f"topic {new.name!r} already exists") from None
        except Conflict:
            raise NotServedYet(f"topic {new.name!r} was created, and deleted before its creation was answered") from None
        await self._wait_for_owners(topic, timeout_s)
        return topic

    def check_limits(self, new: Sequence[NewTopic]) -> None:
        """Raise ``LimitExceeded`` if the topics of one request together exceed a limit."""
        default = self._settings.default_partitions
        partitions = sum(
            len(topic.assigned)
            or (default if topic.partition_count == BROKER_DEFAULT else min(max(topic.partition_count, 0), PARTITIONS_MAX))
            for topic in new
        )
        check_request(self._settings, partitions)
        if len(new) > 1:  # a single topic is checked together with its other properties
            check_cluster(self._settings, self._view, len(new), partitions)

    def _plan(self, new: NewTopic, configs: dict[str, str], assigned: Sequence[tuple[int, ...]]) -> Topic:
        """Return the record to write. Raises an error of ``admin/errors.py`` if the request is invalid."""
        check_topic_name(new.name)
        if new.name in INTERNAL_TOPICS and not new.internal:
            raise InvalidTopic(f"topic {new.name!r} is internal: it is created on demand")
        if self._view.get(topic_key(new.name)) is not None:
            raise TopicExists(f"topic {new.name!r} already exists")
        topic = Topic(
            name=new.name, topic_id=UUID(int=self._random.getrandbits(128), version=4),
            partition_count=self._partition_count(len(assigned) or new.partition_count),
            replication_factor=self._replication_factor(len(assigned[0]) if assigned else new.replication_factor),
            configs=configs, internal=new.internal,
        )  # fmt: skip
        _check_configs(topic, self._view)
        self._check_assigned(assigned)
        if not topic.internal:
            check_cluster(self._settings, self._view, 1, topic.partition_count)
        return topic

    def _check_assigned(self, assigned: Sequence[tuple[int, ...]]) -> None:
        living = {broker.broker_id for broker in self._view.all(Broker)}
        for brokers in assigned:
            if len(set(brokers)) != len(brokers):
                raise InvalidAssignment(f"replica assignment {brokers} lists a broker twice")
            unknown = sorted(set(brokers) - living)
            if unknown:
                text = f"replica assignment {brokers} lists broker {unknown[0]}; live brokers are {sorted(living)}"
                raise InvalidAssignment(text)

    def _partition_count(self, wanted: int) -> int:
        count = self._settings.default_partitions if wanted == BROKER_DEFAULT else wanted
        if not 1 <= count <= PARTITIONS_MAX:
            raise InvalidPartitions(f"number of partitions is {count}; choose 1 to {PARTITIONS_MAX}, or -1 for the default")
        return count

    def _replication_factor(self, wanted: int) -> int:
        factor = self._settings.default_replication_factor if wanted == BROKER_DEFAULT else wanted
        most = min(self.registered_bookies(), REPLICATION_FACTOR_MAX)
        if not 1 <= factor <= most:
            text = f"replication factor is {factor}; choose 1 to {most}, or -1; registered bookies: {self.registered_bookies()}"
            raise InvalidReplicationFactor(text)
        return factor

    def registered_bookies(self) -> int:
        """Return the number of registered bookies, live or not: a short outage must not limit the copies of a new topic."""
        return sum(1 for _ in self._view.all(Bookie))

    async def ensure_internal(self, name: str, partition_count: int, replication_factor: int, timeout_s: float) -> Topic:
        """Return the internal topic; create it if needed. ``NotEnoughBookies`` while there are too few of them."""
        found = self._view.find(Topic, topic_key(name))
        if found is not None:
            return found
        if self.registered_bookies() < replication_factor:
            text = f"{name} needs {replication_factor} bookies; registered: {self.registered_bookies()}: start more, or lower"
            raise NotEnoughBookies(f"{text} [broker] {COPIES_SETTINGS[name]}")
        new = NewTopic(
            name=name, partition_count=partition_count, replication_factor=replication_factor, internal=True,
            configs={"cleanup.policy": "compact"},
        )  # fmt: skip
        try:
            return await self.create(new, timeout_s)
        except TopicExists:
            return await self._wait_for_topic(name, timeout_s)

    # -- grow, configure

    def added_partitions(self, name: str, partition_count: int) -> int:
        """Return how many partitions ``grow`` would create; 0 for a topic that does not exist."""
        topic = self._view.find(Topic, topic_key(name))
        return max(min(partition_count, PARTITIONS_MAX) - topic.partition_count, 0) if topic is not None else 0

    async def grow(
        self,
        name: str,
        partition_count: int,
        timeout_s: float,
        *,
        assigned: Sequence[tuple[int, ...]] | None = None,
        request_partitions: int | None = None,
        validate_only: bool = False,
    ) -> Topic:
        """Increase the number of partitions and wait until the new ones have owners.

        ``assigned``: the brokers of each new partition, the preferred owner first; None: any brokers. ``request_partitions``:
        how many partitions the request creates with this command and those before it; None: this is its only command.
        """
        added = self.added_partitions(name, partition_count)
        check_request(self._settings, added if request_partitions is None else request_partitions)

        def plan(topic: Topic) -> Topic:
            if assigned is not None:
                _check_fits(assigned, topic, partition_count - topic.partition_count)
                self._check_assigned(assigned)
            if topic.internal:
                text = (
                    f"topic {name!r} is internal: its number of partitions determines each group's partition and cannot change"
                )
                raise InvalidTopic(text)
            if not topic.partition_count < partition_count <= PARTITIONS_MAX:
                text = f"topic {name!r} has {topic.partition_count} partitions: choose more, up to {PARTITIONS_MAX}"
                raise InvalidPartitions(text)
            check_cluster(self._settings, self._view, 0, partition_count - topic.partition_count)
            return msgspec.structs.replace(topic, partition_count=partition_count)

        topic = await self._edit(name, plan, timeout_s, assigned=assigned or (), validate_only=validate_only)
        if not validate_only:
            await self._wait_for_owners(topic, timeout_s)
        return topic

    async def configure(self, name: str, edit: EditConfigs, timeout_s: float, *, validate_only: bool = False) -> Topic:
        """Replace a topic's configs by the result of ``edit``. Raises ``InvalidConfig``.

        A change that shortens retention is logged as a warning, because it deletes records.
        """
        defaults = topic_defaults(self._view)
        before: Mapping[str, str] = {}

        def plan(topic: Topic) -> Topic:
            nonlocal before
            before = configs_in_force(topic, defaults)
            changed = msgspec.structs.replace(topic, configs=dict(edit(dict(topic.configs))))
            _check_configs(changed, self._view)
            if is_hot_only(changed.configs) and not is_hot_only(topic.configs):
                _require_no_cold_records(topic, self._view)
            return changed

        topic = await self._edit(name, plan, timeout_s, validate_only=validate_only)
        if not validate_only:
            log_shortened(f"topic {name!r}", before, configs_in_force(topic, defaults))
        return topic

    async def _edit(
        self,
        name: str,
        plan: Callable[[Topic], Topic],
        timeout_s: float,
        *,
        assigned: Sequence[tuple[int, ...]] = (),
        validate_only: bool,
    ) -> Topic:
        """Compare and set a topic; calls ``plan`` again after a conflict, but never for the next topic of the name."""
        meant: Topic | None = None

        async def attempt() -> Topic:
            nonlocal meant
            topic, version = await self._find(name, timeout_s)
            meant = meant or topic
            if topic.topic_id != meant.topic_id:
                raise _no_topic(name)
            changed = plan(topic)
            if validate_only:
                return changed
            updates = (Put(record=changed), *_partition_updates(changed, topic.partition_count, assigned))
            requirements = (VersionIs(key=topic.key(), version=version),)
            command = Command(updates=updates, requirements=requirements)
            await propose_guarded(self._metadata, command, topic.key(), timeout_s)
            return changed

        return await decide_again(f"topic {name!r}", attempt)

    # -- delete

    async def delete(self, name: str, timeout_s: float) -> Topic:
        """Delete a topic. It can be restored for ``undelete_window_ms``; if that is 0 the deletion is final at once."""
        meant: Topic | None = None

        async def attempt() -> Topic:
            nonlocal meant
            topic, version = await self._find(name, timeout_s)
            meant = meant or topic
            if topic.topic_id != meant.topic_id:
                return self._deleted(meant)  # Perhaps by the attempt before; this is the next topic of the name.
            if topic.internal:
                raise InvalidTopic(f"topic {name!r} is internal and cannot be deleted")
            if is_protected(topic, self._view):
                raise Protected(name)
            now_ms, window_ms = self._clock.wall_ms(), self._settings.undelete_window_ms
            command = delete_topic(self._view, topic, version, now_ms, window_ms, require_unlocked(topic, self._view, now_ms))
            version = await propose_guarded(self._metadata, command, topic.key(), timeout_s)
            return self._deleted(topic) if version == GONE else topic

        topic = await decide_again(f"topic {name!r}", attempt)  # a partition that changes its owner causes a conflict
        if self._settings.undelete_window_ms == 0:
            await delete_for_good(self._metadata, topic.topic_id, timeout_s)
        return topic

    def _deleted(self, topic: Topic) -> Topic:
        """Return ``topic``, which is gone. Raises ``NotFound`` if it was detached: its objects stay."""
        if self._view.get(deleted_topic_key(topic.topic_id)) is None:
            raise _no_topic(topic.name)
        return topic

    # -- waiting for the view

    async def refresh(self, timeout_s: float) -> None:
        """Wait until the view has all topics that exist now. Raises ``Unavailable``."""
        await self._metadata.refresh(timeout_s)

    async def _find(self, name: str, timeout_s: float) -> tuple[Topic, int]:
        """Return a topic and its version. If the view lacks it, another broker may have just created it: refresh the view."""
        if self._view.get(topic_key(name)) is None:
            await self.refresh(timeout_s)
        stored = self._view.get(topic_key(name))
        topic = _topic_of(name, stored.record if stored is not None else None)
        return topic, stored.version if stored is not None else ABSENT

    async def _wait_for_owners(self, topic: Topic, timeout_s: float) -> None:
        def owned() -> bool:
            keys = (partition_key(topic.topic_id, index) for index in range(topic.partition_count))
            partitions = (self._view.find(Partition, key) for key in keys)
            return all(partition is not None and partition.owner >= 0 for partition in partitions)

        await self._wait_until(owned, timeout_s, f"partitions of topic {topic.name!r} have no owner yet")

    async def _wait_for_topic(self, name: str, timeout_s: float) -> Topic:
        await self._wait_until(
            lambda: self._view.get(topic_key(name)) is not None, timeout_s, f"topic {name!r} is not known to this broker yet"
        )
        return _topic_of(name, self._view.find(Topic, topic_key(name)))

    async def _wait_until(self, condition: Callable[[], bool], timeout_s: float, otherwise: str) -> None:
        if not await wait_until(self._view, condition, timeout_s):
            raise NotServedYet(otherwise)


def _given_configs(new: NewTopic) -> dict[str, str]:
    unset = [name for name, value in new.configs.items() if value is None]
    if unset:
        raise InvalidConfig(f"config {unset[0]} has no value")
    return {name: value for name, value in new.configs.items() if value is not None}


def _given_assignment(new: NewTopic) -> tuple[tuple[int, ...], ...]:
    """Return the brokers of each partition in order; empty if any will do."""
    if not new.assigned:
        return ()
    if (new.partition_count, new.replication_factor) != (BROKER_DEFAULT, BROKER_DEFAULT):
        raise Invalid("give either a replica assignment or numbers of partitions and replicas, not both")
    rows = dict(new.assigned)
    factors = {len(brokers) for brokers in rows.values()}
    if sorted(rows) != list(range(len(new.assigned))) or len(factors) != 1:
        text = "replica assignment: number the partitions from 0 without gaps, with equally many replicas each"
        raise InvalidAssignment(text)
    return tuple(rows[index] for index in range(len(rows)))


def _check_fits(assigned: Sequence[tuple[int, ...]], topic: Topic, added: int) -> None:
    copies = topic.replication_factor
    if len(assigned) != added or any(len(brokers) != copies for brokers in assigned):
        text = f"{len(assigned)} assignments for {added} new partitions of {copies} replicas: give one for each"
        raise InvalidAssignment(text)


def _partition_updates(topic: Topic, first: int, assigned: Sequence[tuple[int, ...]]) -> tuple[Update, ...]:
    """Return updates for ownerless partitions with empty logs from index ``first`` on; ``assigned``: one each, or empty."""
    indexes = range(first, topic.partition_count)
    partitions = [
        Put(record=Partition(topic_id=topic.topic_id, index=index, replicas=assigned[index - first] if assigned else ()))
        for index in indexes
    ]
    return (*partitions, *(Put(record=Log(topic_id=topic.topic_id, index=index)) for index in indexes))


def _topic_of(name: str, record: object) -> Topic:
    if not isinstance(record, Topic):
        raise _no_topic(name)
    return record


def _no_topic(name: str) -> NotFound:
    return NotFound(f"topic {name[:NAME_CHARACTERS_MAX]!r} does not exist")


def _check_configs(topic: Topic, view: MetadataView) -> None:
    defaults = topic_defaults(view)
    try:
        check_topic_configs(topic.configs, topic.replication_factor, internal=topic.internal, defaults=defaults)
    except Invalid as refused:
        raise InvalidConfig(refused.message) from refused


def _require_no_cold_records(topic: Topic, view: MetadataView) -> None:
    """Raise ``InvalidConfig`` if the store has records of the topic: they would have to be deleted, or moved back."""
    keys = (manifest_pointer_key(topic.topic_id, index) for index in range(topic.partition_count))
    pointers = [pointer for key in keys if (pointer := view.find(ManifestPointer, key)) is not None]
    if any(pointer.start_offset < pointer.end_offset for pointer in pointers):
        raise InvalidConfig(
            f"{STORAGE_ENABLE} is false, but topic {topic.name!r} has records in the object store, which would be lost;"
            " set remote.log.copy.disable=true to copy no more of them"
        )
