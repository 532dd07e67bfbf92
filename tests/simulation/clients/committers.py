"""Groups without members: one client commits offsets for several groups and reads its commits back.

Each group and partition is a register with one writer. Once a commit is acknowledged, every later read returns it, or a later
one of unknown outcome. Long commit metadata makes checkpoints large, so that they have several parts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kio.schema.types import GroupId, TopicName

from simulation.checkers.audit import Audit
from simulation.clients.kafka import FIND_COORDINATOR, NONE, OFFSET_COMMIT, OFFSET_FETCH, KafkaClient, NotServed, request_struct
from simulation.world.machine import Machine, Ports, World

GROUPS: Final = tuple(f"direct-{number}" for number in range(6))
"""Enough groups that each partition of ``__consumer_offsets`` has some of them."""
PAUSE_MEAN_S: Final = 0.06
READ_CHANCE: Final = 0.3
CHUNK: Final = 20
"""The number of steps in one decision."""
METADATA_BYTES: Final = 60
REFUSALS: Final = frozenset({3, 7, 14, 15, 16})
"""The coordinator does not know the new topic yet, is loading, unavailable or elsewhere, or the request took too long."""


@dataclass(slots=True)
class Register:
    """One group's offset in one partition: the last acknowledged commit (-1: none) and later ones of unknown outcome."""

    acknowledged: int = -1
    unknown: set[int] = field(default_factory=set)


class Committer:
    """Commits and reads until ``stop``; then each group commits and reads once more, and ``stopped`` is set."""

    def __init__(
        self, world: World, audit: Audit, topic: str, partitions: int, bootstrap: Sequence[str], suffix: str = ""
    ) -> None:
        self._world = world
        self._audit = audit
        self._topic = TopicName(topic)
        self._bootstrap = list(bootstrap)
        self._groups = [f"{group}{suffix}" for group in GROUPS]
        self._registers = {(group, partition): Register() for group in self._groups for partition in range(partitions)}
        self._coordinators: dict[str, str] = {}
        self.commits = 0
        self.stop = False
        self.stopped = asyncio.Event()

    async def run(self, machine: Machine, ports: Ports) -> None:
        client = KafkaClient(self._world, ports, machine.name, self._bootstrap)
        step = 0
        while not self.stop:
            step += 1
            await asyncio.sleep(ports.random.expovariate(1 / PAUSE_MEAN_S))
            if not self._world.decides(f"committer/{step // CHUNK}"):
                continue
            group, partition = ports.random.choice(list(self._registers))
            if ports.random.random() < READ_CHANCE:
                await self._read(client, group)
            else:
                await self._commit(client, group, partition, step)
        for group in self._groups:
            while not (await self._commit(client, group, 0, step := step + 1) and await self._read(client, group)):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        self.stopped.set()

    async def _commit(self, client: KafkaClient, group: str, partition: int, offset: int) -> bool:
        """Commit an offset. Returns whether the commit was acknowledged."""
        register = self._registers[group, partition]
        register.unknown.add(offset)
        row = request_struct(OFFSET_COMMIT, "OffsetCommitRequestPartition")(
            partition_index=partition, committed_offset=offset, committed_metadata=_metadata(group, offset)
        )
        topic = request_struct(OFFSET_COMMIT, "OffsetCommitRequestTopic")(name=self._topic, partitions=(row,))
        answer = await self._ask(
            client,
            group,
            OFFSET_COMMIT,
            generation_id_or_member_epoch=-1,
            member_id="",
            group_instance_id=None,
            topics=(topic,),
        )
        if answer is None or not self._is_served(group, answer.topics[0].partitions[0].error_code):
            return False
        register.acknowledged = offset
        register.unknown.discard(offset)
        self.commits += 1
        return True

    async def _read(self, client: KafkaClient, group: str) -> bool:
        """Check the group's offsets at the coordinator. Returns False if they could not be read."""
        asked = {partition: register.acknowledged for (of, partition), register in self._registers.items() if of == group}
        wanted = request_struct(OFFSET_FETCH, "OffsetFetchRequestTopic")(name=self._topic, partition_indexes=tuple(asked))
        answer = await self._ask(client, group, OFFSET_FETCH, topics=(wanted,), require_stable=False)
        if answer is None or not self._is_served(group, answer.error_code):
            return False
        for row in answer.topics[0].partitions:
            if not self._is_served(group, row.error_code):
                return False
            self._check(group, row)
        return True

    def stored(self, group: str, partition: int, offset: int) -> None:
        """Note that a commit is in a state that a broker has stored: the group never loses it."""
        register = self._registers.get((group, partition))
        if register is None:
            return
        known = offset <= register.acknowledged or offset in register.unknown
        self._audit.require(
            known, f"group {group}, partition {partition}: {offset} is in a stored state, and was not committed"
        )
        if offset > register.acknowledged:
            register.acknowledged = offset

    def check_restored(self, positions: Mapping[tuple[str, int], int]) -> bool:
        """Whether the last stored states have every acknowledged commit, or a later one."""
        return all(
            register.acknowledged < 0 or positions.get(name) == register.acknowledged or positions.get(name) in register.unknown
            for name, register in self._registers.items()
        )

    def _check(self, group: str, row: Any) -> None:
        register = self._registers[group, row.partition_index]
        found, where = row.committed_offset, f"group {group}, partition {row.partition_index}"
        holds = found == register.acknowledged or found in register.unknown
        self._audit.require(holds, f"{where}: {found} is committed after {register.acknowledged} had been acknowledged")
        known = found < 0 or row.metadata == _metadata(group, found)
        self._audit.require(known, f"{where}: metadata {row.metadata!r} belongs to another commit than {found}")

    async def _ask(self, client: KafkaClient, group: str, api: int, **fields: Any) -> Any | None:
        """Return the coordinator's answer; None if there is none, with the outcome unknown."""
        try:
            if group not in self._coordinators:
                found = await client.any_broker(FIND_COORDINATOR, key=GroupId(group), key_type=0)
                if not self._is_served(group, found.error_code):
                    return None
                self._coordinators[group] = f"{found.host}:{found.port}"
            return await client.request(self._coordinators[group], api, group_id=GroupId(group), **fields)
        except NotServed:
            self._coordinators.pop(group, None)
            return None

    def _is_served(self, group: str, error: int) -> bool:
        if error != NONE:
            self._audit.require(error in REFUSALS, f"group {group} was told error {error}")
            self._coordinators.pop(group, None)
        return error == NONE


def _metadata(group: str, offset: int) -> str:
    return f"{group}/{offset}/".ljust(METADATA_BYTES, ".")
