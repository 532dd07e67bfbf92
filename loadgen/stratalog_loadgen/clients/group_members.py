"""Members of consumer groups without librdkafka, for groups of hundreds: all in one thread of one process.

A librdkafka consumer has four or five threads. On few cores, the five thousand threads of a thousand members starve each other
and the cluster until sessions expire, so the group never becomes stable, and the client is measured instead of the cluster.
Each member here speaks the classic protocol like a client of its own: a connection to the coordinator and one to every leader,
a heartbeat every three seconds, eager assignment by range, a commit every five seconds, fetches of half a second without a
session. One difference: a process asks for metadata once for all of its members.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import struct
import time
from collections.abc import Mapping
from typing import Any

from kio.schema.types import GroupId, TopicName

from stratalog import kafka_connection as wire
from stratalog.kafka_connection import Connection, NotAnswered, connect
from stratalog_loadgen.clients.assignment_timer import AssignmentTimer
from stratalog_loadgen.clients.fetching import fetch, records_of
from stratalog_loadgen.clients.received_records import ReceivedRecords
from stratalog_loadgen.processes.control import LEAVE, LEFT, MEASURE, Control
from stratalog_loadgen.processes.loads import ConsumerLoad, Counted

SESSION_MS, REBALANCE_MS = 45_000, 300_000
COMMIT_S = 5.0
_HEARTBEAT_S, _TURN_S, _RETRY_S = 3.0, 0.1, 0.2
_MEMBER_ID_REQUIRED, _UNKNOWN_MEMBER, _ILLEGAL_GENERATION = 79, 25, 22
_NO_COORDINATOR = (14, 15, 16)  # COORDINATOR_LOAD_IN_PROGRESS, COORDINATOR_NOT_AVAILABLE, NOT_COORDINATOR
_CONNECTING_AT_ONCE = 64

Leaders = Mapping[int, str]
"""Address by partition."""


class Rejoin(NotAnswered):
    """The member's generation has ended; it must join again."""


def run_members(kind: type[Member], load: ConsumerLoad, control: Control) -> Counted:
    """Like ``run_consumers``, with members of one kind, which read one new topic from its beginning."""
    control.wait_for_go()
    return asyncio.run(_Members(kind, load, control).run())


class _Members:
    def __init__(self, kind: type[Member], load: ConsumerLoad, control: Control) -> None:
        self._load = load
        self._control = control
        self._kind = kind
        self._received = ReceivedRecords(load)
        self._members: list[Member] = []
        self._partitions = 0
        self._assignment_timer = AssignmentTimer(control, self._changed_at)

    async def run(self) -> Counted:
        bootstrap = str(self._load.client["bootstrap.servers"]).split(",")
        places = await _leaders(bootstrap, self._load.topics[0])
        self._partitions = len(places)
        gate = asyncio.Semaphore(_CONNECTING_AT_ONCE)
        self._members = [
            self._kind(self._load, group, self._received, bootstrap[number % len(bootstrap)], places, gate)
            for group in self._load.groups
            for number in range(self._load.consumers)
        ]
        tasks = [asyncio.create_task(member.run()) for member in self._members]
        while self._running():
            await self._listen(tasks)
            await asyncio.sleep(_TURN_S)
        self._received.end()
        self._assignment_timer.note_assignments()
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        for failure in ended:
            if isinstance(failure, Exception):
                raise failure
        return self._received.counted(self._assigned(), self._assignment_timer.settled_s, self._assignment_timer.rebalance_s)

    def _running(self) -> bool:
        assigned = sum(self._assigned().values())
        running = self._control.running(self._received.all_records, assigned, rebalanced=self._assignment_timer.is_rebalanced)
        return running and self._control.elapsed_s() < self._load.duration_s

    async def _listen(self, tasks: list[asyncio.Task[None]]) -> None:
        if self._control.received(MEASURE):
            self._received.count_anew()
        if self._control.received(LEAVE):
            self._assignment_timer.note_leaving()
            count = self._load.leavers
            for task in tasks[:count]:
                task.cancel()
            await asyncio.wait(tasks[:count])
            await asyncio.gather(*(member.leave() for member in self._members[:count]))
        if self._control.received(LEFT):
            self._assignment_timer.note_leaving()
        for task in tasks:
            if task.done() and not task.cancelled():
                task.result()

    def _changed_at(self) -> float:
        return max((member.changed_at for member in self._members), default=0.0)

    def _assigned(self) -> dict[str, int]:
        """Return the partitions of each group that have been assigned, of each member only as many as an equal share.

        In the consumer protocol the first member gets all partitions, and the others wait until it has revoked them.
        """
        members = max(self._load.members - self._load.leavers * self._assignment_timer.has_left, 1)
        share = -(-self._partitions // members)
        assigned = dict.fromkeys(self._load.groups, 0)
        for member in self._members:
            assigned[member.group] += min(len(member.positions), share)
        return assigned


class Member:
    """A member of a group of the classic protocol."""

    commit_version: int | None = None

    def __init__(
        self,
        load: ConsumerLoad,
        group: str,
        received: ReceivedRecords,
        bootstrap: str,
        leaders: Leaders,
        gate: asyncio.Semaphore,
    ) -> None:
        self.group = group
        self.positions: dict[int, int] = {}
        self.changed_at = 0.0
        self._topic = load.topics[0]
        self._received = received
        self._bootstrap = bootstrap
        self._leaders = leaders
        self._gate = gate
        self._connections: dict[str, Connection] = {}
        self._coordinator = ""
        self._id = ""
        self._generation = -1
        self._committed: dict[int, int] = {}

    async def run(self) -> None:
        """Join and read until cancelled."""
        while True:
            try:
                await self._join()
                await self._work()
            except NotAnswered as failure:
                if not isinstance(failure, Rejoin):
                    self._received.failure = str(failure)
                    self._coordinator = ""
                    await asyncio.sleep(_RETRY_S)
                self._assign({})

    async def leave(self) -> None:
        """Commit, leave the group, and close the connections."""
        with contextlib.suppress(NotAnswered):
            await self._commit()
            await self._ask(wire.LEAVE_GROUP, group_id=GroupId(self.group), member_id=self._id)
        self._close()

    def _close(self) -> None:
        self.positions = {}
        for connection in self._connections.values():
            connection.close()

    def _assign(self, positions: dict[int, int]) -> None:
        if positions or self.positions:
            self.changed_at = time.monotonic()
        self._committed = {partition: self._committed.get(partition, at) for partition, at in positions.items()}
        self.positions = positions

    async def _connection(self, address: str) -> Connection:
        known = self._connections.get(address)
        if known is None or known.lost:
            async with self._gate:
                known = self._connections[address] = await connect(address)
        return known

    async def _ask(self, api: int, api_version: int | None = None, **fields: Any) -> Any:
        return await (await self._connection(self._coordinator)).ask(api, api_version, **fields)

    async def _find_coordinator(self) -> None:
        if not self._coordinator:
            found = await (await self._connection(self._bootstrap)).ask(wire.FIND_COORDINATOR, key=self.group, key_type=0)
            _require(found.error_code)
            self._coordinator = f"{found.host}:{found.port}"

    async def _join(self) -> None:
        await self._find_coordinator()
        joined = await self._joined()
        if joined.error_code == _MEMBER_ID_REQUIRED:
            self._id = joined.member_id
            joined = await self._joined()
        self._require(joined.error_code)
        self._id, self._generation = joined.member_id, joined.generation_id
        assignments: dict[str, bytes] = {}
        if joined.leader == joined.member_id:
            assignments = range_assignments(sorted(member.member_id for member in joined.members), sorted(self._leaders))
        part: Any = wire.request_part(wire.SYNC_GROUP, "SyncGroupRequestAssignment")
        parts = tuple(part(member_id=member, assignment=content) for member, content in assignments.items())
        synced = await self._ask(wire.SYNC_GROUP, **self._identity(), generation_id=self._generation, assignments=parts)
        self._require(synced.error_code)
        self._assign(await self._begins(assigned_partitions(bytes(synced.assignment))))

    async def _joined(self) -> Any:
        protocol: Any = wire.request_part(wire.JOIN_GROUP, "JoinGroupRequestProtocol")
        return await self._ask(
            wire.JOIN_GROUP,
            **self._identity(),
            session_timeout=datetime.timedelta(milliseconds=SESSION_MS),
            rebalance_timeout=datetime.timedelta(milliseconds=REBALANCE_MS),
            protocol_type="consumer",
            protocols=(protocol(name="range", metadata=_subscription(self._topic)),),
        )

    def _identity(self) -> dict[str, Any]:
        return {"group_id": GroupId(self.group), "member_id": self._id, "group_instance_id": None}

    async def _begins(self, partitions: list[int]) -> dict[int, int]:
        """Return the group's committed offsets; 0 where there is none."""
        if not partitions:
            return {}
        part: Any = wire.request_part(wire.OFFSET_FETCH, "OffsetFetchRequestTopic")
        wanted = part(name=TopicName(self._topic), partition_indexes=tuple(partitions))
        answer = await self._ask(wire.OFFSET_FETCH, group_id=GroupId(self.group), topics=(wanted,))
        self._require(answer.error_code)
        rows = answer.topics[0].partitions
        for row in rows:
            self._require(row.error_code)
        return {row.partition_index: max(0, row.committed_offset) for row in rows}

    async def _work(self) -> None:
        """Read from every leader, until a heartbeat says that the generation has ended."""
        by_leader: dict[str, list[int]] = {}
        for partition in self.positions:
            by_leader.setdefault(self._leaders[partition], []).append(partition)
        readers = [asyncio.create_task(self._read(address, mine)) for address, mine in by_leader.items()]
        try:
            await self._stay(readers)
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)

    async def _stay(self, readers: list[asyncio.Task[None]]) -> None:
        commits_at = time.monotonic() + COMMIT_S
        while True:
            await self._wait(readers, _HEARTBEAT_S)
            beat = await self._ask(wire.HEARTBEAT, **self._identity(), generation_id=self._generation)
            if beat.error_code:
                await self._commit()
            self._require(beat.error_code)
            if time.monotonic() >= commits_at:
                await self._commit()
                commits_at += COMMIT_S

    async def _wait(self, readers: list[asyncio.Task[None]], timeout_s: float) -> None:
        """Let the readers run for ``timeout_s``. Raises the error of one that failed."""
        if readers:
            done, _ = await asyncio.wait(readers, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
            for reader in done:
                reader.result()
        else:
            await asyncio.sleep(timeout_s)

    async def _commit(self) -> None:
        news = {partition: at for partition, at in self.positions.items() if at > self._committed.get(partition, 0)}
        if not news:
            return
        row: Any = wire.request_part(wire.OFFSET_COMMIT, "OffsetCommitRequestPartition", self.commit_version)
        topic: Any = wire.request_part(wire.OFFSET_COMMIT, "OffsetCommitRequestTopic", self.commit_version)
        rows = tuple(
            row(partition_index=partition, committed_offset=at, committed_metadata="") for partition, at in news.items()
        )
        answer = await self._ask(
            wire.OFFSET_COMMIT,
            self.commit_version,
            **self._identity(),
            generation_id_or_member_epoch=self._generation,
            topics=(topic(name=TopicName(self._topic), partitions=rows),),
        )
        for result in answer.topics[0].partitions:
            self._require(result.error_code)
        self._committed.update(news)

    async def _read(self, address: str, partitions: list[int]) -> None:
        connection = await self._connection(address)
        while True:
            wanted = {partition: self.positions[partition] for partition in partitions if partition in self.positions}
            if not wanted:
                return  # they were revoked
            for fetched in await fetch(connection, self._topic, wanted):
                _require(fetched.error)
                records = list(records_of(fetched.records, wanted[fetched.partition]))
                if records and fetched.partition in self.positions:
                    self.positions[fetched.partition] = records[-1].offset + 1
                    values = [record.value or b"" for record in records]
                    self._received.take(self.group, len(values), sum(map(len, values)), values)

    def _require(self, error: int) -> None:
        if error in (_UNKNOWN_MEMBER, _ILLEGAL_GENERATION):
            self._id = ""
        if error in _NO_COORDINATOR:
            raise NotAnswered(f"the coordinator answered with error {error}")
        if error:
            raise Rejoin(f"the coordinator answered with error {error}")


async def _leaders(bootstrap: list[str], topic: str) -> Leaders:
    """Return the leaders of all partitions. Raises ``NotAnswered``."""
    connection = await connect(bootstrap[0])
    part: Any = wire.request_part(wire.METADATA, "MetadataRequestTopic")
    found = await connection.ask(
        wire.METADATA,
        topics=(part(name=TopicName(topic)),),
        allow_auto_topic_creation=False,
        include_cluster_authorized_operations=False,
        include_topic_authorized_operations=False,
    )
    connection.close()
    brokers = {broker.node_id: f"{broker.host}:{broker.port}" for broker in found.brokers}
    _require(found.topics[0].error_code)
    return {place.partition_index: brokers[place.leader_id] for place in found.topics[0].partitions}


def range_assignments(members: list[str], partitions: list[int]) -> dict[str, bytes]:
    """Return each member's encoded assignment by range, as Kafka's default assignor: shares differ by one at most."""
    share, more = divmod(len(partitions), len(members))
    assignments, at = {}, 0
    for number, member in enumerate(members):
        count = share + (number < more)
        assignments[member] = struct.pack(f">{count}i", *partitions[at : at + count])
        at += count
    return assignments


def assigned_partitions(content: bytes) -> list[int]:
    """Decode an assignment of ``range_assignments``."""
    return list(struct.unpack(f">{len(content) // 4}i", content))


def _subscription(topic: str) -> bytes:
    """Return a subscription of version 0: one topic, no user data."""
    name = topic.encode()
    return struct.pack(f">hih{len(name)}si", 0, 1, len(name), name, -1)


def _require(error: int) -> None:
    if error:
        raise NotAnswered(f"a broker answered with error {error}")
