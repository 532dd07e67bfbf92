"""Consumer groups in the simulation: members join, poll their assigned partitions, and commit the polled offsets.

The classic protocol (KIP-62) as a client uses it: JoinGroup and SyncGroup with the coordinator, the leader assigns the
partitions, and members commit offsets after polling their records. After any unknown outcome a member rejoins, so that its
earlier requests no longer count.

Checked: no partition has two owners in one generation; a member never starts below the offset that the coordinator had
acknowledged before it was asked; a generation's commits never go back; no offset beyond polled records is committed; and at the
end each group has polled every acknowledged record. ``committers.py`` has groups without members.
"""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kio.schema.types import GroupId, TopicName

from simulation.checkers.audit import Audit
from simulation.clients.committers import Committer
from simulation.clients.kafka import (
    FIND_COORDINATOR,
    HEARTBEAT,
    JOIN_GROUP,
    NONE,
    OFFSET_COMMIT,
    OFFSET_FETCH,
    SYNC_GROUP,
    KafkaClient,
    NotServed,
    request_struct,
)
from simulation.world.machine import Machine, Ports, World
from stratalog_core.batches.records import Record

MEMBERS: Final = {"readers": 3, "tailers": 1}
"""The number of members in each group."""
SESSION_S: Final = 3.0
REBALANCE_S: Final = 2.0
POLL_S: Final = 0.4
MEMBER_ID_REQUIRED: Final = 79
GROUP_ERRORS: Final = frozenset({14, 15, 16, 22, 25, 27, 56})
"""Errors a member may get: coordinator loading, unavailable, moved; unknown generation or member; rebalance; storage."""


class Rejoin(Exception):
    """The member's generation is over, or the member cannot know whether it is."""


@dataclass(slots=True)
class GroupTruth:
    """Everything that a group's coordinators have told its members."""

    name: str
    audit: Audit
    polled: set[tuple[int, int]] = field(default_factory=set)
    committed: dict[int, int] = field(default_factory=dict)
    """By partition: the minimum offset from which the next member must start."""
    started: dict[int, int] = field(default_factory=dict)
    """By partition: the latest generation whose owner has fetched its start offset."""
    within: dict[tuple[int, int], int] = field(default_factory=dict)
    """The last acknowledged commit of each generation and partition."""
    owners: dict[tuple[int, int], str] = field(default_factory=dict)
    commits: int = 0
    generations: set[int] = field(default_factory=set)

    def __str__(self) -> str:
        return f"{self.commits} commits in {len(self.generations)} generations"

    def assigned(self, generation: int, member_id: str, partitions: Iterable[int]) -> None:
        self.generations.add(generation)
        for partition in partitions:
            owner = self.owners.setdefault((generation, partition), member_id)
            self.audit.require(
                owner == member_id, f"partition {partition} belongs to {owner} and {member_id} in generation {generation}"
            )

    def acknowledged(self, generation: int, offsets: dict[int, int]) -> None:
        self.commits += 1
        for partition, offset in offsets.items():
            known = self.within.get((generation, partition), 0)
            self.audit.require(
                offset >= known, f"{offset} was committed for partition {partition} after {known} in generation {generation}"
            )
            self.within[generation, partition] = offset
            # A commit in flight when its generation ended may be answered after the next owner has started below it.
            if generation >= self.started.get(partition, -1):
                self.committed[partition] = offset

    def found(self, generation: int, partition: int, offset: int, committed_before: int) -> None:
        """Check a start offset. ``committed_before`` had been acknowledged when the request was sent."""
        self.audit.require(
            offset >= committed_before,
            f"group {self.name} is at {offset} of partition {partition}, {committed_before} had been acknowledged before",
        )
        if generation > self.started.get(partition, -1):
            self.started[partition], self.committed[partition] = generation, offset
        missing = [at for at in range(offset) if (partition, at) not in self.polled]
        self.audit.require(not missing, f"{offset} is committed for partition {partition}, nobody polled {missing[:3]}")


class Groups:
    """All groups of one life of a cluster; ``suffix`` is part of their names."""

    def __init__(
        self, world: World, audit: Audit, topic: str, partitions: int, bootstrap: Sequence[str], suffix: str = ""
    ) -> None:
        self._world = world
        self._topic = topic
        self._partitions = partitions
        self._bootstrap = bootstrap
        self.truths = [GroupTruth(f"{name}{suffix}", audit) for name in MEMBERS]
        self.committer = Committer(world, audit, topic, partitions, bootstrap, suffix)

    def members(self, see: Callable[[int, Record], None]) -> list[Member]:
        """Return the members; run each on its own machine."""
        return [
            Member(self._world, truth, self._topic, self._partitions, self._bootstrap, see)
            for truth, count in zip(self.truths, MEMBERS.values(), strict=True)
            for _ in range(count)
        ]

    @property
    def commits(self) -> int:
        """The number of acknowledged commits."""
        return sum(truth.commits for truth in self.truths) + self.committer.commits

    def __str__(self) -> str:
        by_members = ", ".join(f"{truth.name}: {truth}" for truth in self.truths)
        return f"{by_members}; {self.committer.commits} commits without members"

    def unseen(self, acknowledged: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the acknowledged records that some group has not polled."""
        records = set(acknowledged)
        return sorted({record for truth in self.truths for record in records - truth.polled})


class Member:
    """One consumer. ``see`` is called with the partition and record for each record that it polls."""

    def __init__(
        self,
        world: World,
        truth: GroupTruth,
        topic: str,
        partitions: int,
        bootstrap: Sequence[str],
        see: Callable[[int, Record], None],
    ) -> None:
        self._world = world
        self._truth = truth
        self._topic = topic
        self._partitions = partitions
        self._bootstrap = list(bootstrap)
        self._see = see

    async def run(self, machine: Machine, ports: Ports) -> None:
        session = _Session(KafkaClient(self._world, ports, machine.name, self._bootstrap), self._truth, self._topic)
        while True:
            try:
                positions = await session.join(self._partitions)
                while True:
                    await self._poll(session, positions)
                    await asyncio.sleep(POLL_S * (0.5 + ports.random.random()))
            except (Rejoin, NotServed):
                session.forget()
                await asyncio.sleep(0.1 + 0.2 * ports.random.random())

    async def _poll(self, session: _Session, positions: dict[int, int]) -> None:
        for partition, position in sorted(positions.items()):
            await session.heartbeat()
            try:
                error, _, records = await session.client.fetch(self._topic, partition, position, wait_ms=20)
            except NotServed:
                error, records = -1, []
            if error != NONE:
                session.client.forget(self._topic, partition)
            for record in records:
                self._see(partition, record)
                self._truth.polled.add((partition, record.offset))
                positions[partition] = record.offset + 1
        await session.commit(positions)


class _Session:
    """A member's session with its coordinator. Raises ``Rejoin`` and ``NotServed``."""

    def __init__(self, client: KafkaClient, truth: GroupTruth, topic: str) -> None:
        self.client = client
        self._truth = truth
        self._topic = TopicName(topic)
        self._group = GroupId(truth.name)
        self._member_id = ""
        self._generation = -1
        self._coordinator = ""
        self._committed: dict[int, int] = {}

    def forget(self) -> None:
        """Forget the coordinator; the member id stays, as in real clients."""
        self._coordinator = ""

    async def join(self, partitions: int) -> dict[int, int]:
        """Join the group; return the start offsets of the partitions that this member now owns."""
        found = await self.client.any_broker(FIND_COORDINATOR, key=self._group, key_type=0)
        self._require(found.error_code)
        self._coordinator = f"{found.host}:{found.port}"
        joined = await self._join()
        if joined.error_code == MEMBER_ID_REQUIRED:
            self._member_id = joined.member_id
            joined = await self._join()
        self._require(joined.error_code)
        self._member_id, self._generation = joined.member_id, joined.generation_id
        members = sorted(member.member_id for member in joined.members)
        deals = {member: bytes(range(index, partitions, len(members))) for index, member in enumerate(members)}
        owned = await self._sync(deals if joined.leader == joined.member_id else {})
        self._truth.assigned(self._generation, self._member_id, owned)
        return await self._positions(owned)

    async def _join(self) -> Any:
        protocol = request_struct(JOIN_GROUP, "JoinGroupRequestProtocol")(name="dealt", metadata=b"")
        return await self.client.request(
            self._coordinator, JOIN_GROUP, group_id=self._group, session_timeout=datetime.timedelta(seconds=SESSION_S),
            rebalance_timeout=datetime.timedelta(seconds=REBALANCE_S), member_id=self._member_id, group_instance_id=None,
            protocol_type="consumer", protocols=(protocol,),
        )  # fmt: skip

    async def _sync(self, deals: dict[str, bytes]) -> bytes:
        assignment = request_struct(SYNC_GROUP, "SyncGroupRequestAssignment")
        synced = await self.client.request(
            self._coordinator, SYNC_GROUP, **self._identity(), group_id=self._group, generation_id=self._generation,
            assignments=tuple(assignment(member_id=member, assignment=dealt) for member, dealt in deals.items()),
        )  # fmt: skip
        self._require(synced.error_code)
        return bytes(synced.assignment)

    def _identity(self) -> dict[str, Any]:
        return {"member_id": self._member_id, "group_instance_id": None}

    async def _positions(self, owned: bytes) -> dict[int, int]:
        if not owned:
            return {}
        wanted = request_struct(OFFSET_FETCH, "OffsetFetchRequestTopic")(name=self._topic, partition_indexes=tuple(owned))
        before = dict(self._truth.committed)
        answer = await self.client.request(
            self._coordinator, OFFSET_FETCH, group_id=self._group, topics=(wanted,), require_stable=False
        )
        self._require(answer.error_code)
        positions: dict[int, int] = {}
        for row in answer.topics[0].partitions:
            self._require(row.error_code)
            positions[row.partition_index] = max(row.committed_offset, 0)
            self._truth.found(
                self._generation, row.partition_index, positions[row.partition_index], before.get(row.partition_index, 0)
            )
        self._committed = dict(positions)
        return positions

    async def heartbeat(self) -> None:
        answer = await self.client.request(
            self._coordinator, HEARTBEAT, **self._identity(), group_id=self._group, generation_id=self._generation
        )
        self._require(answer.error_code)

    async def commit(self, positions: dict[int, int]) -> None:
        news = {partition: offset for partition, offset in positions.items() if offset > self._committed[partition]}
        if not news:
            return
        row = request_struct(OFFSET_COMMIT, "OffsetCommitRequestPartition")
        rows = tuple(
            row(partition_index=partition, committed_offset=offset, committed_metadata="") for partition, offset in news.items()
        )
        topic = request_struct(OFFSET_COMMIT, "OffsetCommitRequestTopic")(name=self._topic, partitions=rows)
        answer = await self.client.request(
            self._coordinator, OFFSET_COMMIT, **self._identity(), group_id=self._group,
            generation_id_or_member_epoch=self._generation, topics=(topic,),
        )  # fmt: skip
        for result in answer.topics[0].partitions:
            self._require(result.error_code)
        self._truth.acknowledged(self._generation, news)
        self._committed.update(news)

    def _require(self, error: int) -> None:
        if error == NONE:
            return
        self._truth.audit.require(error in GROUP_ERRORS, f"a member of the group was told error {error}")
        if error in (22, 25):
            self._member_id = ""
        raise Rejoin(f"error {error}")
