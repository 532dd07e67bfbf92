"""Commands that move partitions to other owners: reassignments, their cancellation, and elections of preferred leaders.

All of them write an order (``Partition.next_owner``), which the owner carries out by a handover; no record is copied. Each
requires the partition's record to be unchanged, so a command and a handover exclude each other.

The commands of one request are proposed together and answered one by one: an outcome is None, or the error. They are decided
on what was committed before the request: the view is refreshed first, and a lagging view would find nothing to change.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from stratalog_broker.admin.assigned_copies import fit_copies
from stratalog_broker.admin.errors import (
    ElectionNotNeeded,
    InvalidAssignment,
    NoEligibleLeader,
    NoReassignment,
    NotServedYet,
    PreferredLeaderUnavailable,
)
from stratalog_broker.admin.view_waiting import wait_until
from stratalog_broker.partitions.handover import takes_partitions
from stratalog_core.errors import NotFound, StratalogError
from stratalog_metadata.client.api import MetadataClient, MetadataView
from stratalog_metadata.client.guarded_updates import SharedGuardedUpdates, decide_again
from stratalog_metadata.records import NO_OWNER, Broker, Partition, Topic, broker_key, partition_key, topic_key
from stratalog_metadata.state.commands import Command, Put, Requirement, SessionAlive, VersionIs

_AT_ONCE: Final = 1000
"""Maximum of commands of one request that are in flight."""


class NamedPartition(NamedTuple):
    """A partition as a request names it."""

    topic: str
    partition: int


class Reassignment(NamedTuple):
    """A reassignment that has not moved the partition yet."""

    name: NamedPartition
    replicas: tuple[int, ...]
    before: tuple[int, ...]


Replicas = tuple[int, ...]
Outcome = StratalogError | None
_Plan = Callable[[Partition], Partition]


class OwnershipOrders:
    """Holds no state: an order is in the partition's record."""

    def __init__(self, metadata: MetadataClient) -> None:
        self._metadata = metadata

    @property
    def _view(self) -> MetadataView:
        return self._metadata.view

    def find(self, wanted: NamedPartition) -> tuple[Topic, Partition] | None:
        """Return the partition's records; None if it does not exist."""
        topic = self._view.find(Topic, topic_key(wanted.topic))
        partition = self._view.find(Partition, partition_key(topic.topic_id, wanted.partition)) if topic is not None else None
        return (topic, partition) if topic is not None and partition is not None else None

    def reassignments(self, wanted: Collection[NamedPartition] | None) -> Iterator[Reassignment]:
        """Yield the reassignments in progress, of the ``wanted`` partitions or of all."""
        for name in self._all() if wanted is None else wanted:
            found = self.find(name)
            if found is not None and found[1].reassigned_from is not None:
                yield Reassignment(name, found[1].replicas, found[1].reassigned_from)

    def _all(self) -> Iterator[NamedPartition]:
        for topic in self._view.all(Topic):
            yield from (NamedPartition(topic.name, index) for index in range(topic.partition_count))

    async def reassign(
        self, wanted: Mapping[NamedPartition, Replicas | None], timeout_s: float, *, may_change_factor: bool
    ) -> dict[NamedPartition, Outcome]:
        """Assign brokers to partitions, the first of them as owner; None instead of brokers cancels a reassignment.

        Raises ``Unavailable`` before anything is changed if the view cannot be refreshed within ``timeout_s``.
        """
        await self._metadata.refresh(timeout_s)
        outcomes = {name: self._fault(name, replicas) for name, replicas in wanted.items()}
        sound = {name: replicas for name, replicas in wanted.items() if outcomes[name] is None}
        assigned = [(name.topic, name.partition, replicas) for name, replicas in sound.items() if replicas is not None]
        unfit = await fit_copies(self._metadata, assigned, may_change=may_change_factor)
        outcomes |= {name: unfit[name.topic] for name, replicas in sound.items() if replicas and name.topic in unfit}
        plans = [(name, self._plan_of(replicas)) for name, replicas in sound.items() if outcomes[name] is None]
        changed = await self._change_all(plans, timeout_s)
        return outcomes | dict(zip((name for name, _ in plans), changed, strict=True))

    def _plan_of(self, replicas: Replicas | None) -> _Plan:
        return _cancelled if replicas is None else lambda partition: _reassigned(partition, replicas)

    def _fault(self, name: NamedPartition, replicas: Replicas | None) -> Outcome:
        if self.find(name) is None:
            return _no_partition(name)
        if replicas is None:
            return None
        if not replicas or len(set(replicas)) != len(replicas):
            return InvalidAssignment(f"replicas are {list(replicas)[:20]}: name at least one broker, and each once")
        unknown = next((one for one in replicas if self._view.find(Broker, broker_key(one)) is None), None)
        if unknown is not None:
            return InvalidAssignment(f"replicas are {list(replicas)[:20]}: no live broker has the id {unknown}")
        return None

    async def elect_preferred(self, wanted: Sequence[NamedPartition] | None, timeout_s: float) -> dict[NamedPartition, Outcome]:
        """Move partitions to their preferred owners; return when they have moved. None: all that are not there.

        Raises ``Unavailable`` before anything is changed if the view cannot be refreshed within ``timeout_s``.
        """
        await self._metadata.refresh(timeout_s)
        names = [name for name in self._all() if self._is_misplaced(name)] if wanted is None else list(wanted)
        outcomes = dict(zip(names, await self._change_all([(n, self._elected) for n in names], timeout_s), strict=True))
        ordered = [name for name, outcome in outcomes.items() if outcome is None]
        await wait_until(self._view, lambda: not any(map(self._is_ordered, ordered)), timeout_s)
        return {name: self._after_election(name) if outcome is None else outcome for name, outcome in outcomes.items()}

    def refuse_unclean(self, wanted: Iterable[NamedPartition]) -> dict[NamedPartition, Outcome]:
        """Return for each partition why an unclean election does not take place."""
        return {name: self._unclean(name) for name in wanted}

    def _unclean(self, name: NamedPartition) -> StratalogError:
        found = self.find(name)
        if found is None:
            return _no_partition(name)
        if self._view.find(Broker, broker_key(found[1].owner)) is None:
            return NoEligibleLeader("no broker is live; the first one that starts becomes the leader, and no record is lost")
        return ElectionNotNeeded(f"broker {found[1].owner} leads the partition")

    def _is_misplaced(self, name: NamedPartition) -> bool:
        found = self.find(name)
        return found is not None and bool(found[1].replicas) and found[1].owner != found[1].replicas[0]

    def _is_ordered(self, name: NamedPartition) -> bool:
        found = self.find(name)
        return found is not None and found[1].next_owner != NO_OWNER

    def _elected(self, partition: Partition) -> Partition:
        if not partition.replicas or partition.owner == partition.replicas[0]:
            raise ElectionNotNeeded(f"broker {partition.owner} is the preferred leader and leads the partition")
        preferred = self._view.find(Broker, broker_key(partition.replicas[0]))
        if preferred is None or not takes_partitions(self._view, preferred) or partition.owner == NO_OWNER:
            raise PreferredLeaderUnavailable(f"broker {partition.replicas[0]}, the preferred leader, takes no partitions now")
        return msgspec.structs.replace(partition, next_owner=preferred.broker_id)

    def _after_election(self, name: NamedPartition) -> Outcome:
        if self._is_ordered(name):
            return NotServedYet(f"partition {name.partition} of topic {name.topic!r} is still being handed over")
        if self._is_misplaced(name):
            return PreferredLeaderUnavailable(f"partition {name.partition} of topic {name.topic!r} could not be handed over")
        return None

    async def _change_all(self, plans: Sequence[tuple[NamedPartition, _Plan]], timeout_s: float) -> list[Outcome]:
        updates = SharedGuardedUpdates(self._metadata)
        outcomes: list[Outcome] = []
        try:
            for first in range(0, len(plans), _AT_ONCE):
                changes = (self._change(updates, name, plan, timeout_s) for name, plan in plans[first : first + _AT_ONCE])
                outcomes += await asyncio.gather(*map(_outcome_of, changes))
        finally:
            await updates.close()
        return outcomes

    async def _change(self, updates: SharedGuardedUpdates, name: NamedPartition, plan: _Plan, timeout_s: float) -> None:
        async def attempt() -> None:
            found = self.find(name)
            stored = self._view.get(found[1].key()) if found is not None else None
            if stored is None or not isinstance(stored.record, Partition):
                raise _no_partition(name)
            changed = plan(stored.record)
            if changed != stored.record:
                requirements: list[Requirement] = [VersionIs(key=changed.key(), version=stored.version)]
                target = self._view.find(Broker, broker_key(changed.next_owner))
                if target is not None:
                    requirements.append(SessionAlive(session_id=target.session_id))
                command = Command(updates=(Put(record=changed),), requirements=tuple(requirements))
                await updates.propose(command, changed.key(), timeout_s)

        await decide_again(f"partition {name.partition} of topic {name.topic!r}", attempt)


def _no_partition(name: NamedPartition) -> NotFound:
    return NotFound(f"topic {name.topic[:60]!r} has no partition {name.partition}")


def _reassigned(partition: Partition, replicas: Replicas) -> Partition:
    if partition.owner in (replicas[0], NO_OWNER):
        return msgspec.structs.replace(partition, replicas=replicas, next_owner=NO_OWNER, reassigned_from=None)
    before = partition.replicas if partition.reassigned_from is None else partition.reassigned_from
    return msgspec.structs.replace(partition, replicas=replicas, next_owner=replicas[0], reassigned_from=before)


def _cancelled(partition: Partition) -> Partition:
    if partition.reassigned_from is None:
        raise NoReassignment("no reassignment of this partition is in progress")
    return msgspec.structs.replace(partition, replicas=partition.reassigned_from, next_owner=NO_OWNER, reassigned_from=None)


async def _outcome_of(change: Awaitable[None]) -> Outcome:
    try:
        await change
    except StratalogError as failure:
        return failure
    return None
