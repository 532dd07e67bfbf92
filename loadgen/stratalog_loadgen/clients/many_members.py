"""Ten thousand members of classic groups in one event loop, which only join, send heartbeats and leave.

They read nothing: they measure how a coordinator holds connections and rebalances groups. So that one core suffices, requests
are encoded by hand, and a coordinator's address is looked up once per group. Otherwise each is a client of its own: a
connection, a heartbeat every three seconds, eager assignment by range by the group's leader, and after a lost connection or a
coordinator's error a FindCoordinator request and a retry.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final

from stratalog import kafka_connection as wire
from stratalog.kafka_connection import Connection, NotAnswered
from stratalog_core.rpc.addresses import split_address
from stratalog_loadgen.clients.group_members import REBALANCE_MS, SESSION_MS, assigned_partitions, range_assignments

HEARTBEAT_S: Final = 3.0
_CONNECTING_AT_ONCE: Final = 64
_CONNECT_TIMEOUT_S: Final = 30.0
_RETRY_S: Final = (0.3, 1.0)
_POLL_S: Final = 0.05
_PARTITIONS: Final = tuple(range(100))
"""The leader of each group assigns them; nothing reads them."""
_MEMBER_ID_REQUIRED, _REBALANCE, _UNKNOWN_MEMBER, _ILLEGAL_GENERATION = 79, 27, 25, 22
_JOIN_VERSION, _SYNC_VERSION, _HEARTBEAT_VERSION, _LEAVE_VERSION = 5, 3, 3, 2
_ERROR_AT: Final = 8
"""After the correlation id and the throttle time."""
_PROTOCOL: Final = "range"
_METADATA: Final = struct.pack(">hii", 0, 0, -1)


class GroupsFailed(Exception):
    """Groups did not become stable in time."""


class _Link(Connection):
    """A connection with an event that is set when it is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.on_lost = asyncio.Event()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.on_lost.set()


@dataclass(slots=True)
class Group:
    """One group: its members in this process, and the address of its coordinator as they know it."""

    name: str
    members: list[Member] = field(default_factory=list)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    coordinator: str = ""

    @property
    def generation(self) -> int:
        return max((member.generation for member in self.members), default=-1)

    def is_stable(self, after_generation: int) -> bool:
        """Whether all members are in one generation after this one, and together have all partitions."""
        generation = self.generation
        if generation <= after_generation or any(not each.is_settled or each.generation != generation for each in self.members):
            return False
        return sorted(partition for each in self.members for partition in each.partitions) == [*_PARTITIONS]


class ManyMembers:
    """All groups of one process. ``bootstrap`` is HOST:PORT,…; the caller must ``close`` it."""

    def __init__(self, bootstrap: str, groups: Sequence[str], members: int, heartbeat_s: float = HEARTBEAT_S) -> None:
        self.groups = [Group(name) for name in groups]
        self.heartbeat_s = heartbeat_s
        self.random = Random(1)
        self.joins = 0
        """JoinGroup requests so far, including those that only return a member id."""
        self.failure = ""
        """The last error of a broker or a connection, for error messages."""
        self._bootstrap = bootstrap.split(",")
        self._connecting = asyncio.Semaphore(_CONNECTING_AT_ONCE)
        self._tasks: dict[Member, asyncio.Task[None]] = {}
        for group in self.groups:
            group.members = [Member(self, group) for _ in range(members)]

    def start(self) -> None:
        """Let all members connect and join."""
        for member in (member for group in self.groups for member in group.members):
            self._tasks[member] = asyncio.create_task(member.run())

    async def leave(self, count: int) -> None:
        """Let ``count`` members of each group leave it."""
        leaving = [member for group in self.groups for member in group.members[:count]]
        for group in self.groups:
            del group.members[:count]
        for member in leaving:
            self._tasks.pop(member).cancel()
        await asyncio.gather(*(member.leave() for member in leaving))

    async def stable(self, after: Sequence[int], timeout_s: float) -> None:
        """Return when each group is stable in a generation after its number in ``after``. Raises ``GroupsFailed``."""
        until = time.monotonic() + timeout_s
        while not all(group.is_stable(last) for group, last in zip(self.groups, after, strict=True)):
            for task in self._tasks.values():
                if task.done():
                    task.result()
            if time.monotonic() > until:
                unsettled = sum(not member.is_settled for group in self.groups for member in group.members)
                raise GroupsFailed(
                    f"{unsettled} members are not stable after {timeout_s:.0f} s; the last error: {self.failure}"
                )
            await asyncio.sleep(_POLL_S)

    @property
    def generations(self) -> list[int]:
        return [group.generation for group in self.groups]

    @property
    def connected(self) -> int:
        return sum(member.is_connected for group in self.groups for member in group.members)

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        for member in self._tasks:
            member.disconnect()

    async def connect(self, address: str) -> _Link:
        """Open a connection. Raises ``NotAnswered``."""
        host, port = split_address(address)
        async with self._connecting:
            try:
                async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                    _, link = await asyncio.get_running_loop().create_connection(_Link, host, port)
            except (OSError, TimeoutError) as failure:
                raise NotAnswered(f"{address}: {failure or type(failure).__name__}") from failure
        return link

    async def coordinator_of(self, group: Group) -> str:
        """Return the address of the group's coordinator; asks a broker unless it is known. Raises ``NotAnswered``."""
        async with group.lock:
            if not group.coordinator:
                link = await self.connect(self.random.choice(self._bootstrap))
                try:
                    found = await link.ask(wire.FIND_COORDINATOR, key=group.name, key_type=0)
                finally:
                    link.close()
                if found.error_code:
                    raise NotAnswered(f"a broker does not know the coordinator: error {found.error_code}")
                group.coordinator = f"{found.host}:{found.port}"
            return group.coordinator


class Member:
    """One member of one group."""

    def __init__(self, owner: ManyMembers, group: Group) -> None:
        self.generation = -1
        self.partitions: list[int] = []
        self.is_ready = False
        """Whether it has its partitions, and no response since then has revoked them."""
        self._owner = owner
        self._group = group
        self._link: _Link | None = None
        self._address = ""
        self._id = ""

    @property
    def is_connected(self) -> bool:
        return self._link is not None and not self._link.lost

    @property
    def is_settled(self) -> bool:
        return self.is_ready and self.is_connected

    async def run(self) -> None:
        """Join and send heartbeats until cancelled."""
        while True:
            try:
                if self.generation < 0:
                    await self._join()
                await self._stay()
            except NotAnswered as failure:
                self._owner.failure = str(failure)
                self.is_ready = False
                self.disconnect()
                await asyncio.sleep(self._owner.random.uniform(*_RETRY_S))

    async def leave(self) -> None:
        """Leave the group, and close the connection. Raises ``NotAnswered``."""
        left = await self._ask(_frame(wire.LEAVE_GROUP, _LEAVE_VERSION, _string(self._group.name) + _string(self._id)))
        _error(left)
        self.disconnect()

    def disconnect(self) -> None:
        """Close the connection. The next one looks the coordinator up again."""
        if self._link is not None:
            self._link.close()
            self._link = None
        if self._group.coordinator == self._address:
            self._group.coordinator = ""

    async def _ask(self, frame: bytes) -> bytes:
        if self._link is None or self._link.lost:
            self._address = await self._owner.coordinator_of(self._group)
            self._link = await self._owner.connect(self._address)
        return await self._link.exchange(frame)

    async def _join(self) -> None:
        """Join until a generation has started, and get the assignment. Raises ``NotAnswered``."""
        while self.generation < 0:
            self._owner.joins += 1
            answer = await self._ask(self._join_frame())
            joined = _Joined.read(answer)
            if joined.error == _MEMBER_ID_REQUIRED:
                self._id = joined.member_id
            elif joined.error == _UNKNOWN_MEMBER:
                self._id = ""
            elif joined.error == 0:
                self._id, self.generation = joined.member_id, joined.generation
                try:
                    await self._sync(joined.members)
                except NotAnswered:
                    self.generation = -1
                    raise
            elif joined.error != _REBALANCE:
                raise NotAnswered(f"JoinGroup: error {joined.error}")

    async def _sync(self, members: Sequence[str]) -> None:
        """Send SyncGroup. ``members`` is empty unless this member is the leader."""
        assignments = range_assignments(sorted(members), [*_PARTITIONS]) if members else {}
        parts = b"".join(_string(member) + _bytes(content) for member, content in assignments.items())
        answer = await self._ask(
            _frame(wire.SYNC_GROUP, _SYNC_VERSION, self._identity() + struct.pack(">i", len(assignments)) + parts)
        )
        if self._stays(_error(answer), "SyncGroup"):
            (size,) = struct.unpack_from(">i", answer, _ERROR_AT + 2)
            self.partitions = assigned_partitions(answer[_ERROR_AT + 6 : _ERROR_AT + 6 + size])
            self.is_ready = True

    async def _stay(self) -> None:
        """Send heartbeats until the generation ends. Raises ``NotAnswered``."""
        frame = _frame(wire.HEARTBEAT, _HEARTBEAT_VERSION, self._identity())
        while self.generation >= 0:
            if self._stays(_error(await self._ask(frame)), "Heartbeat"):
                self.is_ready = True
                await self._pause()

    async def _pause(self) -> None:
        """Wait for the next heartbeat, or for the loss of the connection. Raises ``NotAnswered``."""
        assert self._link is not None
        try:
            async with asyncio.timeout(self._owner.heartbeat_s):
                await self._link.on_lost.wait()
        except TimeoutError:
            return
        raise NotAnswered("the connection was lost")

    def _stays(self, error: int, request: str) -> bool:
        """Return whether the generation continues. Raises ``NotAnswered`` if the coordinator may have moved."""
        if error == 0:
            return True
        self.is_ready = False
        if error not in (_REBALANCE, _UNKNOWN_MEMBER, _ILLEGAL_GENERATION):
            raise NotAnswered(f"{request}: error {error}")
        if error == _UNKNOWN_MEMBER:
            self._id = ""
        self.generation, self.partitions = -1, []
        return False

    def _identity(self) -> bytes:
        return _string(self._group.name) + struct.pack(">i", self.generation) + _string(self._id) + _string(None)

    def _join_frame(self) -> bytes:
        body = (
            _string(self._group.name), struct.pack(">ii", SESSION_MS, REBALANCE_MS), _string(self._id), _string(None),
            _string("consumer"), struct.pack(">i", 1), _string(_PROTOCOL), _bytes(_METADATA),
        )  # fmt: skip
        return _frame(wire.JOIN_GROUP, _JOIN_VERSION, b"".join(body))


@dataclass(frozen=True, slots=True)
class _Joined:
    """A JoinGroup response of version 5. ``members`` are the ids of all members, for the leader only."""

    error: int
    generation: int
    member_id: str
    members: tuple[str, ...]

    @classmethod
    def read(cls, answer: bytes) -> _Joined:
        error, generation = struct.unpack_from(">hi", answer, _ERROR_AT)
        at = _ERROR_AT + 6
        _, at = _read(answer, at)
        _, at = _read(answer, at)
        member_id, at = _read(answer, at)
        (count,) = struct.unpack_from(">i", answer, at)
        at += 4
        members = []
        for _ in range(count):
            name, at = _read(answer, at)
            _, at = _read(answer, at)
            (size,) = struct.unpack_from(">i", answer, at)
            at += 4 + max(size, 0)
            members.append(name)
        return cls(error, generation, member_id, tuple(members))


def _error(answer: bytes) -> int:
    (error,) = struct.unpack_from(">h", answer, _ERROR_AT)
    return int(error)


def _read(answer: bytes, at: int) -> tuple[str, int]:
    (size,) = struct.unpack_from(">h", answer, at)
    end = at + 2 + max(size, 0)
    return answer[at + 2 : end].decode(), end


def _string(text: str | None) -> bytes:
    content = b"" if text is None else text.encode()
    return struct.pack(">h", -1 if text is None else len(content)) + content


def _bytes(content: bytes) -> bytes:
    return struct.pack(">i", len(content)) + content


def _frame(api: int, version: int, body: bytes) -> bytes:
    return struct.pack(">hhi", api, version, 0) + _string("stratalog") + body
