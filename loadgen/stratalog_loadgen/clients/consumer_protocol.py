"""Members of groups of the consumer protocol (KIP-848) without librdkafka, for groups of hundreds.

Unlike those in ``group_members.py``, they get their partitions from the coordinator, uniformly, in the responses to heartbeats
(every five seconds by default, as in Apache Kafka). When its partitions have changed, a member sends the next heartbeat at
once, as Java's client does.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import time
from typing import Any
from uuid import UUID, uuid4

from kio.schema.types import GroupId, TopicName

from stratalog import kafka_connection as wire
from stratalog.kafka_connection import NotAnswered
from stratalog_loadgen.clients.group_members import COMMIT_S, REBALANCE_MS, Member

_LEAVE_EPOCH = -1
_UNCHANGED = datetime.timedelta(milliseconds=-1)


class ConsumerProtocolMember(Member):
    """``_generation`` holds the member epoch."""

    commit_version = 9
    """Kafka refuses earlier versions from members of the consumer protocol."""
    _topic_id: UUID | None = None
    _heartbeat_s = 0.0

    async def leave(self) -> None:
        """Commit, leave the group, and close the connections."""
        with contextlib.suppress(NotAnswered):
            await self._commit()
            self._generation = _LEAVE_EPOCH
            await self._beat()
        self._close()

    async def _join(self) -> None:
        await self._find_coordinator()
        self._id, self._generation = self._id or str(uuid4()), 0
        await self._follow(await self._beat(full=True))

    async def _work(self) -> None:
        """Read, and start again whenever the partitions have changed, until the member must rejoin."""
        while True:
            await super()._work()

    async def _stay(self, readers: list[asyncio.Task[None]]) -> None:
        commits_at = time.monotonic() + COMMIT_S
        while True:
            await self._wait(readers, self._heartbeat_s)
            if await self._follow(await self._beat()):
                return
            if time.monotonic() >= commits_at:
                await self._commit()
                commits_at += COMMIT_S

    async def _follow(self, answer: Any) -> bool:
        """Revoke and add partitions until the coordinator reports no changes. Return whether there were any."""
        changed = False
        while (wanted := self._wanted(answer)) is not None and wanted != self.positions.keys():
            changed = True
            if self.positions.keys() - wanted:
                await self._commit()
            new = await self._begins(sorted(wanted - self.positions.keys()))
            self._assign({partition: at for partition, at in self.positions.items() if partition in wanted} | new)
            answer = await self._beat()
        return changed

    def _wanted(self, answer: Any) -> set[int] | None:
        """Return the assignment in a response; None if it is unchanged."""
        if answer.assignment is None:
            return None
        for topic in answer.assignment.topic_partitions:
            self._topic_id = topic.topic_id
        return {index for topic in answer.assignment.topic_partitions for index in topic.partitions}

    async def _beat(self, *, full: bool = False) -> Any:
        part: Any = wire.request_part(wire.CONSUMER_GROUP_HEARTBEAT, "TopicPartitions")
        owned = (part(topic_id=self._topic_id, partitions=tuple(sorted(self.positions))),) if self.positions else ()
        answer = await self._ask(
            wire.CONSUMER_GROUP_HEARTBEAT,
            group_id=GroupId(self.group),
            member_id=self._id,
            member_epoch=self._generation,
            instance_id=None,
            rack_id=None,
            rebalance_timeout=datetime.timedelta(milliseconds=REBALANCE_MS) if full else _UNCHANGED,
            subscribed_topic_names=(TopicName(self._topic),) if full else None,
            subscribed_topic_regex=None,
            server_assignor="uniform" if full else None,
            topic_partitions=owned,
        )
        self._require(answer.error_code)
        self._generation = answer.member_epoch
        self._heartbeat_s = answer.heartbeat_interval.total_seconds()
        return answer
