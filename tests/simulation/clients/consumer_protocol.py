"""Members of a group of the consumer protocol (KIP-848): they send heartbeats, poll what they own, and commit by member epoch.

A member revokes a partition that left its assignment before its next heartbeat, and polls and commits it until then. After an
unknown outcome it repeats everything that it knows. Sometimes it stops for longer than its session, and commits before it
notices that its partitions have gone to others.

Checked: a member gets no partition that another still owns, unless that one may have been removed for its silence; a member
commits no offset once another owns the partition; the next owner never starts below an acknowledged commit; and at the end the
group has polled every acknowledged record.
"""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import UUID

from kio.schema.types import GroupId, TopicName

from simulation.checkers.audit import Audit
from simulation.clients.kafka import FIND_COORDINATOR, NONE, OFFSET_COMMIT, OFFSET_FETCH, VERSIONS, KafkaClient, NotServed
from simulation.world.machine import Machine, Ports, World
from stratalog_core.batches.records import Record

GROUP: Final = "balanced"
MEMBERS: Final = 3
SESSION_S: Final = 3.0
"""``group_consumer_session_timeout_ms`` of the brokers."""
SHORTEST_SESSION_S: Final = 0.8 * SESSION_S
"""By the clock of a broker that runs fast."""
HEARTBEAT_S: Final = 0.3
STALL_CHANCE: Final = 0.06
STALL_S: Final = 1.5 * SESSION_S
REBALANCE: Final = datetime.timedelta(seconds=60)
HEARTBEAT: Final = 68
FENCED: Final = frozenset({25, 110, 113})
"""Unknown member, fenced or stale member epoch."""
RETRIED: Final = frozenset({14, 15, 16, 56, 69})
"""Coordinator loading, unavailable or moved; storage; no such group (it may have been removed while it was empty)."""
MEMBER_VERSIONS: Final = {**VERSIONS, OFFSET_COMMIT: 9, OFFSET_FETCH: 8, HEARTBEAT: 1}


class Retry(Exception):
    """The coordinator has to be found again, and everything repeated."""


class Rejoin(Exception):
    """The member has lost its partitions and joins again."""


@dataclass(slots=True)
class Ownership:
    """The owner of each partition as far as members know, and until when it may be removed only for its silence."""

    audit: Audit
    now: Callable[[], float]
    owners: dict[int, ConsumerMember] = field(default_factory=dict)
    committed: dict[int, int] = field(default_factory=dict)
    polled: set[tuple[int, int]] = field(default_factory=set)
    commits: int = 0
    handovers: int = 0
    switches: int = 0
    """How often a member stopped and started again with the other protocol."""
    accepted_at_s: dict[str, float] = field(default_factory=dict)
    """When a coordinator that had loaded the group last accepted a member's heartbeat of the classic protocol."""

    def gained(self, member: ConsumerMember, partition: int) -> None:
        owner = self.owners.get(partition)
        if owner is not None and owner is not member:
            self.handovers += 1
            self.audit.require(
                partition not in owner.positions or self.now() > owner.heard_at_s + SHORTEST_SESSION_S,
                f"partition {partition} is given to {member.member_id} while {owner.member_id} owns it",
            )
        self.owners[partition] = member

    def unseen(self, acknowledged: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the acknowledged records that no member has polled."""
        return sorted(set(acknowledged) - self.polled)

    def found(self, partition: int, offset: int, committed_before: int) -> None:
        self.audit.require(
            offset >= committed_before,
            f"group {GROUP} is at {offset} of partition {partition}, {committed_before} had been acknowledged before",
        )
        missing = [at for at in range(offset) if (partition, at) not in self.polled]
        self.audit.require(not missing, f"{offset} is committed for partition {partition}, no member polled {missing[:3]}")

    def acknowledged(self, member: ConsumerMember, owned_by_others: set[int], offsets: dict[int, int]) -> None:
        """Check an acknowledged commit. ``owned_by_others``: partitions that others had got before it was sent."""
        taken = owned_by_others & offsets.keys()
        self.audit.require(not taken, f"{member.member_id} committed offsets of {sorted(taken)}, which others own")
        self.commits += 1
        for partition, offset in offsets.items():
            if self.owners.get(partition) is member:
                self.committed[partition] = offset


class ConsumerMember:
    """One consumer. ``see`` is called with the partition and record for each record that it polls."""

    def __init__(
        self,
        world: World,
        ownership: Ownership,
        name: str,
        topic: str,
        partitions: int,
        bootstrap: Sequence[str],
        see: Callable[[int, Record], None],
    ) -> None:
        self.member_id = name
        self.positions: dict[int, int] = {}
        """The next offset of each partition that the member owns."""
        self.heard_at_s = 0.0
        """When the last heartbeat was sent that the coordinator has answered."""
        self._world = world
        self._ownership = ownership
        self._topic = TopicName(topic)
        self._partitions = partitions
        self._bootstrap = list(bootstrap)
        self._see = see
        self._epoch = 0
        self._topic_id: UUID | None = None
        self._coordinator = ""
        self._repeats = True
        self._committed: dict[int, int] = {}
        self._wanted: set[int] = set()

    async def run(self, machine: Machine, ports: Ports) -> None:
        client = KafkaClient(self._world, ports, machine.name, self._bootstrap, MEMBER_VERSIONS)
        self._give_up()
        while True:
            try:
                await self._heartbeat(client)
                await self._start(client)
                await self._poll(client)
                if ports.random.random() < STALL_CHANCE:
                    await asyncio.sleep(STALL_S)
                await self._commit(client)
                await asyncio.sleep(HEARTBEAT_S * (0.5 + ports.random.random()))
            except Rejoin:
                self._give_up()
            except (Retry, NotServed):
                self._coordinator, self._repeats = "", True
                await asyncio.sleep(0.1 + 0.2 * ports.random.random())

    def _give_up(self) -> None:
        self._epoch, self._repeats = 0, True
        self.positions.clear()
        self._wanted.clear()

    async def _ask(self, client: KafkaClient, api: int, **fields: Any) -> Any:
        if not self._coordinator:
            found = await client.any_broker(FIND_COORDINATOR, key=GroupId(GROUP), key_type=0)
            self._require(found.error_code)
            self._coordinator = f"{found.host}:{found.port}"
        return await client.request(self._coordinator, api, **fields)

    def _require(self, error: int) -> None:
        if error in FENCED:
            raise Rejoin
        if error != NONE:
            self._ownership.audit.require(error in RETRIED, f"a member of {GROUP} was told error {error}")
            raise Retry

    async def _say(self, client: KafkaClient, *, epoch: int, full: bool) -> Any:
        owned = client.struct(HEARTBEAT, "TopicPartitions")
        rows = (owned(topic_id=self._topic_id, partitions=tuple(sorted(self.positions))),) if self.positions else ()
        return await self._ask(
            client, HEARTBEAT, group_id=GroupId(GROUP), member_id=self.member_id, member_epoch=epoch, instance_id=None,
            rack_id=None, rebalance_timeout=REBALANCE if full else datetime.timedelta(milliseconds=-1),
            subscribed_topic_names=(self._topic,) if full else None, subscribed_topic_regex=None, server_assignor=None,
            topic_partitions=rows,
        )  # fmt: skip

    async def _heartbeat(self, client: KafkaClient) -> None:
        for partition in self.positions.keys() - self._wanted:
            del self.positions[partition]
        sent_at_s = self._ownership.now()
        answer = await self._say(client, epoch=self._epoch, full=self._repeats)
        if answer.error_code == 69 and self._epoch:
            raise Rejoin
        self._require(answer.error_code)
        self._ownership.audit.require(
            answer.member_epoch >= self._epoch,
            f"the epoch of {self.member_id} goes from {self._epoch} to {answer.member_epoch}",
        )
        self.heard_at_s, self._epoch, self._repeats = sent_at_s, answer.member_epoch, False
        if answer.assignment is not None:
            assigned = {index for topic in answer.assignment.topic_partitions for index in topic.partitions}
            for topic in answer.assignment.topic_partitions:
                self._topic_id = topic.topic_id
            self._wanted = assigned

    async def _start(self, client: KafkaClient) -> None:
        """Begin with new partitions at their committed offsets."""
        new = self._wanted - self.positions.keys()
        if not new:
            return
        for partition in new:
            self._ownership.gained(self, partition)
            self.positions[partition] = self._committed[partition] = 0
        before = dict(self._ownership.committed)
        topic = client.struct(OFFSET_FETCH, "OffsetFetchRequestTopics")(name=self._topic, partition_indexes=tuple(sorted(new)))
        group = client.struct(OFFSET_FETCH, "OffsetFetchRequestGroup")(group_id=GroupId(GROUP), topics=(topic,))
        try:
            answer = (await self._ask(client, OFFSET_FETCH, groups=(group,), require_stable=False)).groups[0]
            self._require(answer.error_code)
        except (Retry, NotServed):
            for partition in new:
                del self.positions[partition]
            raise
        for row in answer.topics[0].partitions:
            self._require(row.error_code)
            offset = max(row.committed_offset, 0)
            self._ownership.found(row.partition_index, offset, before.get(row.partition_index, 0))
            self.positions[row.partition_index] = self._committed[row.partition_index] = offset

    async def _poll(self, client: KafkaClient) -> None:
        for partition, position in sorted(self.positions.items()):
            try:
                error, _, records = await client.fetch(self._topic, partition, position, wait_ms=20)
            except NotServed:
                error, records = -1, []
            if error != NONE:
                client.forget(self._topic, partition)
            for record in records:
                self._see(partition, record)
                self._ownership.polled.add((partition, record.offset))
                self.positions[partition] = record.offset + 1

    async def _commit(self, client: KafkaClient) -> None:
        news = {partition: offset for partition, offset in self.positions.items() if offset > self._committed[partition]}
        if not news:
            return
        others = {partition for partition in news if self._ownership.owners.get(partition) is not self}
        row = client.struct(OFFSET_COMMIT, "OffsetCommitRequestPartition")
        rows = tuple(
            row(partition_index=index, committed_offset=offset, committed_metadata="") for index, offset in news.items()
        )
        topic = client.struct(OFFSET_COMMIT, "OffsetCommitRequestTopic")(name=self._topic, partitions=rows)
        answer = await self._ask(
            client, OFFSET_COMMIT, group_id=GroupId(GROUP), member_id=self.member_id, group_instance_id=None,
            generation_id_or_member_epoch=self._epoch, topics=(topic,),
        )  # fmt: skip
        for result in answer.topics[0].partitions:
            self._require(result.error_code)
        self._ownership.acknowledged(self, others, news)
        self._committed.update(news)
