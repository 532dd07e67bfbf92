"""Members of a group that change between the consumer and the classic protocol, as clients do in a rolling upgrade (KIP-848).

A member stops, with or without leaving the group, and starts again as a new one of the other protocol, in no order. So the
group is upgraded and downgraded, by any coordinator at any step, while others go on. Checked is what ``consumer_protocol.py``
checks, whatever the protocols of the two owners of a partition are.
"""

from __future__ import annotations

import contextlib
import datetime
import struct
from collections.abc import Iterator
from random import Random
from typing import Any, Final

from kio.schema.errors import ErrorCode
from kio.schema.types import GroupId

from simulation.clients.consumer_protocol import GROUP, REBALANCE, SESSION_S, ConsumerMember, Ownership, Rejoin, Retry
from simulation.clients.kafka import HEARTBEAT, JOIN_GROUP, LEAVE_GROUP, SYNC_GROUP, KafkaClient, NotServed
from simulation.world.machine import Machine, Ports
from stratalog_broker.coordination.groups.core.coordinator import GroupCoordinator
from stratalog_broker.coordination.wake_times import Instant

SWITCH_CHANCE: Final = 0.03
LEAVE_CHANCE: Final = 0.7
MEMBER_ID_REQUIRED: Final = 79
OUTDATED: Final = frozenset({22, 27})
"""Another generation, a rebalance."""


@contextlib.contextmanager
def observed_heartbeats(ownership: Ownership) -> Iterator[None]:
    """Note which heartbeats of the classic protocol extend a session, while the context lasts.

    A coordinator that is still loading the group accepts all of them, as Kafka's does, even of members that it has removed.
    """
    inner = GroupCoordinator.heartbeat

    def observed(
        self: GroupCoordinator, group_id: str, member_id: str, group_instance_id: str | None, generation: int, now: Instant
    ) -> ErrorCode:
        error = inner(self, group_id, member_id, group_instance_id, generation, now)
        if error is ErrorCode.none:
            ownership.accepted_at_s[member_id] = ownership.now()
        return error

    setattr(GroupCoordinator, "heartbeat", observed)  # noqa: B010 - it is a method to the type checker
    try:
        yield
    finally:
        setattr(GroupCoordinator, "heartbeat", inner)  # noqa: B010


class MigratingMember(ConsumerMember):
    """Begins in the consumer protocol. With the classic one it gives up all partitions before it joins (*eager*)."""

    _random: Random
    _is_classic = False
    _has_joined = False
    _starts = 0

    async def run(self, machine: Machine, ports: Ports) -> None:
        self._random = ports.random
        self._name = self.member_id
        await super().run(machine, ports)

    def _give_up(self) -> None:
        super()._give_up()
        self._has_joined = False
        if self._is_classic:
            self.member_id = ""

    def _require(self, error: int) -> None:
        if self._is_classic and error in OUTDATED:
            raise Rejoin
        super()._require(error)

    async def _heartbeat(self, client: KafkaClient) -> None:
        if self._random.random() < SWITCH_CHANCE:
            await self._switch(client)
        if not self._is_classic:
            await super()._heartbeat(client)
        elif self._has_joined:
            await self._beat(client)
        else:
            await self._join(client)

    async def _switch(self, client: KafkaClient) -> None:
        """Stop reading, leave the group or not, and become another member."""
        self.positions.clear()
        if self._random.random() < LEAVE_CHANCE:
            with contextlib.suppress(Retry, Rejoin, NotServed):
                await self._leave(client)
        self._is_classic = not self._is_classic
        self._starts += 1
        self._give_up()
        self.member_id = "" if self._is_classic else f"{self._name}-{self._starts}"
        self._ownership.switches += 1

    async def _leave(self, client: KafkaClient) -> None:
        if self._is_classic:
            identity = client.struct(LEAVE_GROUP, "MemberIdentity")(member_id=self.member_id, group_instance_id=None)
            await self._ask(client, LEAVE_GROUP, group_id=GroupId(GROUP), members=(identity,))
        else:
            await self._say(client, epoch=-1, full=False)

    # -- the classic protocol

    async def _join(self, client: KafkaClient) -> None:
        self.positions.clear()
        self._wanted.clear()
        joined = await self._ask_to_join(client)
        if joined.error_code == MEMBER_ID_REQUIRED:
            self.member_id = joined.member_id
            joined = await self._ask_to_join(client)
        self._require(joined.error_code)
        self.member_id, self._epoch = joined.member_id, joined.generation_id
        sent_at_s = self._ownership.now()
        synced = await self._ask(
            client, SYNC_GROUP, **self._identity(), assignments=self._dealt(client, joined)
        )  # fmt: skip
        self._require(synced.error_code)
        self.heard_at_s, self._has_joined = sent_at_s, True
        self._wanted = _assigned(bytes(synced.assignment))

    async def _ask_to_join(self, client: KafkaClient) -> Any:
        topic = self._topic.encode()
        subscription = struct.pack(f">hih{len(topic)}si", 0, 1, len(topic), topic, -1)
        protocol = client.struct(JOIN_GROUP, "JoinGroupRequestProtocol")(name="range", metadata=subscription)
        return await self._ask(
            client, JOIN_GROUP, group_id=GroupId(GROUP), session_timeout=datetime.timedelta(seconds=SESSION_S),
            rebalance_timeout=REBALANCE, member_id=self.member_id, group_instance_id=None, protocol_type="consumer",
            protocols=(protocol,),
        )  # fmt: skip

    def _dealt(self, client: KafkaClient, joined: Any) -> tuple[Any, ...]:
        """As leader of a classic group, assign the partitions in turn."""
        members = sorted(member.member_id for member in joined.members)
        row = client.struct(SYNC_GROUP, "SyncGroupRequestAssignment")
        return tuple(
            row(member_id=member, assignment=_assignment(self._topic, range(place, self._partitions, len(members))))
            for place, member in enumerate(members)
        )

    def _identity(self) -> dict[str, Any]:
        return {
            "group_id": GroupId(GROUP), "generation_id": self._epoch, "member_id": self.member_id, "group_instance_id": None,
        }  # fmt: skip

    async def _beat(self, client: KafkaClient) -> None:
        sent_at_s = self._ownership.now()
        answer = await self._ask(client, HEARTBEAT, **self._identity())
        if answer.error_code == 27:
            self._has_joined = False
            await self._commit(client)
            await self._join(client)
            return
        self._require(answer.error_code)
        if self._ownership.accepted_at_s.get(self.member_id, -1.0) >= sent_at_s:
            self.heard_at_s = sent_at_s


def _assignment(topic: str, indexes: range) -> bytes:
    """Return a ``ConsumerProtocolAssignment`` of version 0."""
    name = topic.encode()
    return struct.pack(f">hih{len(name)}si{len(indexes)}ii", 0, 1, len(name), name, len(indexes), *indexes, -1)


def _assigned(content: bytes) -> set[int]:
    """Return the partitions of the one topic in a ``ConsumerProtocolAssignment``."""
    topics = struct.unpack_from(">i", content, 2)[0] if content else 0
    if not topics:
        return set()
    (length,) = struct.unpack_from(">h", content, 6)
    (count,) = struct.unpack_from(">i", content, 8 + length)
    return set(struct.unpack_from(f">{count}i", content, 12 + length))
