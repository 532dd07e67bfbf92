"""Consumers with incremental fetch sessions (KIP-227), as Java's consumer and librdkafka fetch.

A consumer has a session with each broker that leads some of its partitions. It sends what changed since its last request:
positions, partitions that moved to the broker or were resumed, and those that moved away or were paused. It asks for a
partition's leader again only after an error or a broken connection, so what a session leaves out is lost to it.

Checked: each record is read once, in order; a response has only partitions of its session, all that the session does not know
yet, and all whose last result was an error; what it leaves out has not changed, so what it said of the high watermark still
includes everything that was acknowledged before the request; and at the end each consumer has read everything.
"""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from simulation.checkers.audit import Audit
from simulation.checkers.coverage import (
    ERROR_REPEATED,
    SESSION_LOST,
    SESSION_REFUSED,
    SESSION_REJOINED,
    Coverage,
)
from simulation.checkers.log_truth import Truth
from simulation.clients.kafka import FETCH, NONE, KafkaClient, NotServed, records_of
from simulation.world.machine import Machine, Ports, World

WAIT: Final = datetime.timedelta(milliseconds=200)
RESPONSE_BYTES: Final = 2_048
PARTITION_BYTES: Final = 512
IDLE_S: Final = 0.1
BACKOFF_S: Final = 0.1
PAUSE_CHANCE: Final = 0.05
SEEK_CHANCE: Final = 0.03
CLOSE_CHANCE: Final = 0.02
STALL_CHANCE: Final = 0.02
STALL_S: Final = 2.0
"""How long a consumer may leave a session alone: long enough for its eviction."""
ANEW_CHANCE: Final = 0.3
"""How often a consumer that starts again reads from the beginning."""
DECISION_FETCHES: Final = 20
FINAL_EPOCH: Final = -1
SESSION_ID_NOT_FOUND: Final = 70
PARTITION_ERRORS: Final = frozenset({3, 5, 6, 56, 74, 75, 100})
"""Unknown topic, no leader, not the leader, storage, fenced and unknown leader epoch, unknown topic id: clients retry them."""


class Asked(NamedTuple):
    """The position and the leader epoch with which a session asks for a partition."""

    offset: int
    leader_epoch: int


@dataclass(slots=True)
class Session:
    """One consumer's session with one broker, as the consumer knows it. ``epoch`` 0: the next request begins one."""

    broker: str
    audit: Audit
    coverage: Coverage
    session_id: int = 0
    epoch: int = 0
    partitions: dict[int, Asked] = field(default_factory=dict)
    owed: set[int] = field(default_factory=set)
    """Partitions that the next response must have."""
    failed: set[int] = field(default_factory=set)
    """Those whose last result was an error."""
    watermarks: dict[int, int] = field(default_factory=dict)
    """The last high watermark that the session told of each partition without an error."""
    left: set[int] = field(default_factory=set)

    def update(self, wanted: Mapping[int, Asked]) -> tuple[dict[int, Asked], list[int]]:
        """Ask for ``wanted`` from now on; return the partitions that the request has, and those that it forgets."""
        if self.epoch <= 0:
            self.partitions, self.owed, self.failed = dict(wanted), set(wanted), set()
            self.watermarks.clear()
            self.left.clear()
            return dict(wanted), []
        changed = {partition: asked for partition, asked in wanted.items() if self.partitions.get(partition) != asked}
        forgotten = [partition for partition in self.partitions if partition not in wanted]
        added = changed.keys() - self.partitions.keys()
        self.coverage.meet(SESSION_REJOINED, len(self.left & added))
        self.left = (self.left | set(forgotten)) - added
        self.owed = (self.owed | added).difference(forgotten)
        self.failed.difference_update(forgotten)
        for partition in forgotten:
            del self.partitions[partition]
            self.watermarks.pop(partition, None)
        self.partitions.update(changed)
        return changed, forgotten

    def received(self, session_id: int, rows: Mapping[int, Any]) -> None:
        """Check which partitions a response has, and go on to the next epoch."""
        where = f"session {self.session_id} with {self.broker}, epoch {self.epoch}"
        unknown, silent = rows.keys() - self.partitions.keys(), self.owed - rows.keys()
        self.audit.require(not unknown, f"{where}: the response has {sorted(unknown)}, which the session has not")
        self.audit.require(not silent, f"{where}: the response says nothing of {sorted(silent)}")
        failed = {partition for partition, row in rows.items() if row.error_code != NONE}
        self.coverage.meet(ERROR_REPEATED, len(failed & self.failed))
        self.owed, self.failed = set(failed), failed
        for partition, row in rows.items():
            if partition in failed:
                self.watermarks.pop(partition, None)
            else:
                self.watermarks[partition] = row.high_watermark
        if self.epoch > 0:
            self.audit.require(session_id == self.session_id, f"{where}: the response is of session {session_id}")
            self.epoch += 1
            return
        self.coverage.meet(SESSION_REFUSED, self.epoch == 0 and session_id == 0)
        self.session_id, self.epoch = session_id, int(session_id != 0)

    def begin_again(self) -> None:
        """Let the next request end this session and begin another."""
        self.epoch = 0

    def close(self) -> None:
        """Let the next request end this session."""
        self.epoch = FINAL_EPOCH if self.session_id else 0

    def lost(self) -> None:
        """Note that the broker does not know the session."""
        self.session_id, self.epoch = 0, 0


class SessionConsumer:
    """Reads all partitions until ``stop`` is set. ``versions``: see ``KafkaClient``."""

    def __init__(
        self,
        world: World,
        truth: Truth,
        topic: str,
        partitions: int,
        bootstrap: list[str],
        versions: Mapping[int, int],
    ) -> None:
        assert world.audit is not None
        self._world = world
        self._audit = world.audit
        self._truth = truth
        self._topic = topic
        self._bootstrap = bootstrap
        self._versions = versions
        self._positions = dict.fromkeys(range(partitions), 0)
        self._paused = set[int]()
        self.catches_up = False
        """Whether it only goes on: it pauses nothing and goes back no more."""
        self.stop = False

    def unread(self) -> list[tuple[int, int]]:
        """Return the partitions of which it has not reached the acknowledged end."""
        return [(partition, end) for partition, end in self._truth.ends.items() if self._positions[partition] < end]

    async def run(self, machine: Machine, ports: Ports) -> None:
        client = KafkaClient(self._world, ports, machine.name, self._bootstrap, self._versions)
        self._paused.clear()
        if ports.random.random() < ANEW_CHANCE and not self.catches_up:
            self._positions = dict.fromkeys(self._positions, 0)
        await asyncio.gather(*(self._fetch_from(address, machine.name, client, ports) for address in self._bootstrap))

    async def _fetch_from(self, address: str, name: str, client: KafkaClient, ports: Ports) -> None:
        session, turn = Session(address, self._audit, self._world.coverage), 0
        while not self.stop:
            turn += 1
            if self._world.decides(f"{name}/{address}/{turn // DECISION_FETCHES}"):
                self._change(session, ports)
                if ports.random.random() < STALL_CHANCE and not self.catches_up:
                    await asyncio.sleep(STALL_S)
            try:
                wanted = await self._led_by(address, client)
                is_well = bool(wanted) and await self._fetch(client, session, wanted)
            except NotServed:
                is_well = False
                session.begin_again()
                for partition in session.partitions:
                    client.forget(self._topic, partition)
            if not is_well:
                await asyncio.sleep(IDLE_S * (0.5 + ports.random.random()))

    def _change(self, session: Session, ports: Ports) -> None:
        """Pause, resume or go back in a partition, or close the session, now and then."""
        if self.catches_up:
            self._paused.clear()
            return
        partition = ports.random.choice(list(self._positions))
        if ports.random.random() < PAUSE_CHANCE:
            self._paused ^= {partition}
        if ports.random.random() < SEEK_CHANCE:
            self._positions[partition] = ports.random.randrange(self._positions[partition] + 1)
        if ports.random.random() < CLOSE_CHANCE:
            session.close()

    async def _led_by(self, address: str, client: KafkaClient) -> dict[int, Asked]:
        """Return what to ask of a broker. Raises ``NotServed``."""
        leaders = {partition: await client.leader(self._topic, partition) for partition in self._positions}
        return {
            partition: Asked(self._positions[partition], client.leader_epoch(self._topic, partition))
            for partition, leader in leaders.items()
            if leader == address and partition not in self._paused
        }

    async def _fetch(self, client: KafkaClient, session: Session, wanted: Mapping[int, Asked]) -> bool:
        """Fetch once; return False if the next fetch is to wait. Raises ``NotServed``."""
        session_id, epoch = session.session_id, session.epoch
        changed, forgotten = session.update(wanted)
        acknowledged = dict(self._truth.ends)
        answer = await client.request(
            session.broker, FETCH, max_wait=WAIT, min_bytes=1, max_bytes=RESPONSE_BYTES, session_id=session_id,
            session_epoch=epoch, topics=self._topics(client, changed), forgotten_topics_data=self._forgotten(client, forgotten),
        )  # fmt: skip
        if answer.error_code != NONE:
            is_lost = answer.error_code == SESSION_ID_NOT_FOUND and epoch > 0
            self._audit.require(is_lost, f"session {session_id}, epoch {epoch}: {session.broker} answers {answer.error_code}")
            self._world.coverage.meet(SESSION_LOST)
            session.lost()
            return True
        rows = {row.partition_index: row for topic in answer.responses for row in topic.partitions}
        session.received(answer.session_id, rows)
        for partition, watermark in session.watermarks.items():
            self._truth.serves(partition, watermark, acknowledged.get(partition, 0))
        for partition in sorted(rows.keys() & wanted.keys()):
            self._take(client, partition, wanted[partition].offset, rows[partition])
        return not session.failed

    def _take(self, client: KafkaClient, partition: int, offset: int, row: Any) -> None:
        """Take a partition's result for the fetch from ``offset`` on."""
        if row.error_code != NONE:
            is_known = row.error_code in PARTITION_ERRORS
            self._audit.require(is_known, f"a fetch from {partition}@{offset} is answered with {row.error_code}")
            client.forget(self._topic, partition)
            return
        if self._positions[partition] != offset:
            return  # It went on or back meanwhile, from another broker or by itself.
        found = records_of(row.records or b"")
        for record in found:
            if record.offset >= offset:
                position = self._positions[partition]
                self._audit.require(record.offset == position, f"{partition}@{position} is followed by {record.offset}")
                self._truth.see(partition, record)
                self._positions[partition] = record.offset + 1
        goes_on = not found or self._positions[partition] > offset
        self._audit.require(goes_on, f"a fetch from {partition}@{offset} gets records that end before it")

    def _topics(self, client: KafkaClient, partitions: Mapping[int, Asked]) -> tuple[Any, ...]:
        if not partitions:
            return ()
        row = client.struct(FETCH, "FetchPartition")
        rows = tuple(
            row(
                partition=partition, current_leader_epoch=asked.leader_epoch, fetch_offset=asked.offset,
                partition_max_bytes=PARTITION_BYTES,
            )
            for partition, asked in partitions.items()
        )  # fmt: skip
        return (client.struct(FETCH, "FetchTopic")(**client.topic_key(self._topic), partitions=rows),)

    def _forgotten(self, client: KafkaClient, partitions: list[int]) -> tuple[Any, ...]:
        if not partitions:
            return ()
        return (client.struct(FETCH, "ForgottenTopic")(**client.topic_key(self._topic), partitions=tuple(partitions)),)
