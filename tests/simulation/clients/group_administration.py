"""An administrator of consumer groups: deletes groups and offsets, and begins new groups of the same names at once.

One client does everything in its groups, one request after the other: it commits with and without membership, joins and leaves,
deletes offsets (OffsetDelete) and groups (DeleteGroups). A group with a request whose outcome it must not guess is left alone
from then on, and another takes its place.

Checked, also at the next coordinator: a group's offset is the last acknowledged commit, or a later one of unknown outcome; what
was deleted stays deleted, with the group; a group is found while it has offsets or a member; a group with a member is not
deleted; and a member that has got its assignment keeps its membership.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Final

from kio.schema.types import GroupId, TopicName

from simulation.checkers.audit import Audit
from simulation.checkers.coverage import COMMITTED, GROUP_DELETED, GROUP_SUCCEEDED, MEMBER_KEPT, OFFSETS_DELETED
from simulation.clients.committers import REFUSALS
from simulation.clients.kafka import (
    DELETE_GROUPS,
    DESCRIBE_GROUPS,
    FIND_COORDINATOR,
    HEARTBEAT,
    JOIN_GROUP,
    LEAVE_GROUP,
    NONE,
    OFFSET_COMMIT,
    OFFSET_DELETE,
    OFFSET_FETCH,
    SYNC_GROUP,
    KafkaClient,
    NotServed,
    request_struct,
)
from simulation.faults.coordinator_faults import CoordinatorFaults
from simulation.world.machine import Machine, Ports, World

GROUPS: Final = 2
PAUSE_MEAN_S: Final = 0.08
RETRY_S: Final = 0.1
DECISION_STEPS: Final = 10
SYNC_CHANCE: Final = 0.5
"""How often a member that leaves soon asks for its assignment before."""
SESSION: Final = datetime.timedelta(minutes=10)
"""Longer than any run: no member is removed for its silence."""
REBALANCE: Final = datetime.timedelta(seconds=2)
ILLEGAL_GENERATION, UNKNOWN_MEMBER_ID, REBALANCE_IN_PROGRESS = 22, 25, 27
NON_EMPTY_GROUP, GROUP_ID_NOT_FOUND, MEMBER_ID_REQUIRED = 68, 69, 79
STRANGER: Final = frozenset({ILLEGAL_GENERATION, UNKNOWN_MEMBER_ID, REBALANCE_IN_PROGRESS})
"""The answers to whoever is not a member of the present generation."""
NOBODY: Final = "", -1
DEAD: Final = "Dead"
AHEAD_S: Final = 0.02
"""How long before the next member a deletion is sent: it usually arrives first."""
LOOK_S: Final = 0.5
"""How soon after its deletion a group is looked for: what was in flight has been written by then, or has not."""
NO_OFFSET: Final = -1


class Abandoned(Exception):
    """The group's state cannot be known any more."""


@dataclass(slots=True)
class AdministeredGroup:
    """One group, as far as its administrator knows it."""

    name: str
    offsets: dict[int, int] = field(default_factory=dict)
    """By partition: the last acknowledged commit."""
    unknown: dict[int, set[int]] = field(default_factory=dict)
    """By partition: commits of unknown outcome."""
    member: tuple[str, int] = NOBODY
    """Member id and generation of the member that has got its assignment."""
    assigned_by: str = ""
    has_image: bool = False
    """Whether a generation of the group is in the log: an empty group exists, too."""
    had_members: bool = False
    """Whether a member may have left: that is not in the log when it is answered, so the member may be back."""

    @property
    def exists(self) -> bool:
        return self.has_image or bool(self.offsets)

    @property
    def may_exist(self) -> bool:
        return self.exists or self.had_members or any(self.unknown.values())


Act = Callable[[KafkaClient, Ports, AdministeredGroup], Coroutine[Any, Any, None]]


class GroupAdministrator:
    """Works until ``stop``; then it checks each group once more, and ``stopped`` is set."""

    def __init__(
        self,
        world: World,
        name: str,
        topic: str,
        partitions: int,
        bootstrap: list[str],
        faults: CoordinatorFaults,
    ) -> None:
        assert world.audit is not None
        self._world = world
        self._audit: Audit = world.audit
        self._topic = TopicName(topic)
        self._partitions = range(partitions)
        self._bootstrap = bootstrap
        self._faults = faults
        self._name = name
        self._begun = 0
        self._groups = [self._begin() for _ in range(GROUPS)]
        self._coordinators: dict[str, str] = {}
        self._offset = 0
        self.stop = False
        self.stopped = asyncio.Event()

    async def run(self, machine: Machine, ports: Ports) -> None:
        client = KafkaClient(self._world, ports, machine.name, self._bootstrap)
        step = 0
        while not self.stop:
            step += 1
            await asyncio.sleep(ports.random.expovariate(1 / PAUSE_MEAN_S))
            if self._world.decides(f"{machine.name}/{step // DECISION_STEPS}"):
                await self._step(client, ports)
        for group in self._groups:
            with contextlib.suppress(Abandoned):
                for check in (self._read, self._describe, self._stay):
                    await self._until_served(client, ports, group, check)
        self.stopped.set()

    def _begin(self) -> AdministeredGroup:
        self._begun += 1
        return AdministeredGroup(f"{self._name}/{self._begun}")

    async def _step(self, client: KafkaClient, ports: Ports) -> None:
        group = ports.random.choice(self._groups)
        acts: list[Act] = [*3 * [self._commit], *3 * [self._read], self._describe, self._stay]
        acts += [self._delete_offset, self._delete, self._leave_and_delete, self._replace, self._replace]
        try:
            await ports.random.choice(acts)(client, ports, group)
        except NotServed:
            self._coordinators.pop(group.name, None)
        except Abandoned:
            self._groups.remove(group)
            self._groups.append(self._begin())

    async def _until_served(self, client: KafkaClient, ports: Ports, group: AdministeredGroup, act: Act) -> None:
        while True:
            try:
                await act(client, ports, group)
            except NotServed:
                self._coordinators.pop(group.name, None)
                await asyncio.sleep(RETRY_S)
            else:
                return

    # -- offsets

    async def _commit(self, client: KafkaClient, ports: Ports, group: AdministeredGroup) -> None:
        partition = ports.random.choice(self._partitions)
        self._offset = offset = self._offset + 1
        group.unknown.setdefault(partition, set()).add(offset)
        row = request_struct(OFFSET_COMMIT, "OffsetCommitRequestPartition")(
            partition_index=partition, committed_offset=offset, committed_metadata=""
        )
        topic = request_struct(OFFSET_COMMIT, "OffsetCommitRequestTopic")(name=self._topic, partitions=(row,))
        member_id, generation = group.member
        answer = await self._ask(
            client, group, OFFSET_COMMIT, member_id=member_id, generation_id_or_member_epoch=generation,
            group_instance_id=None, topics=(topic,),
        )  # fmt: skip
        error = answer.topics[0].partitions[0].error_code
        self._check_served(group, error, STRANGER)
        if error != NONE:
            self._check_stranger(group, error, "a commit")
        group.unknown[partition].discard(offset)
        group.offsets[partition] = offset
        self._world.coverage.meet(COMMITTED)

    async def _read(self, client: KafkaClient, ports: Ports, group: AdministeredGroup) -> None:
        wanted = request_struct(OFFSET_FETCH, "OffsetFetchRequestTopic")(
            name=self._topic, partition_indexes=tuple(self._partitions)
        )
        answer = await self._ask(client, group, OFFSET_FETCH, topics=(wanted,), require_stable=False)
        self._check_served(group, answer.error_code)
        for row in answer.topics[0].partitions:
            self._check_served(group, row.error_code)
            known = group.offsets.get(row.partition_index, NO_OFFSET)
            is_right = row.committed_offset in {known, *group.unknown.get(row.partition_index, ())}
            what = f"{row.partition_index}@{row.committed_offset}"
            self._audit.require(is_right, f"group {group.name} is at {what}, {known} was acknowledged last")

    async def _delete_offset(self, client: KafkaClient, ports: Ports, group: AdministeredGroup) -> None:
        partition = ports.random.choice(self._partitions)
        row = request_struct(OFFSET_DELETE, "OffsetDeleteRequestPartition")(partition_index=partition)
        topic = request_struct(OFFSET_DELETE, "OffsetDeleteRequestTopic")(name=self._topic, partitions=(row,))
        self._faults.lose_writes(await self._coordinator(client, group))
        answer = await self._ask_to_change(client, group, OFFSET_DELETE, topics=(topic,))
        if answer.error_code == GROUP_ID_NOT_FOUND:
            self._check_missing(group, "OffsetDelete")
            return
        self._check_changed(answer.error_code)
        error = answer.topics[0].partitions[0].error_code
        self._check_changed(error)
        group.offsets.pop(partition, None)
        self._world.coverage.meet(OFFSETS_DELETED)
        self._faults.answered(self._coordinators[group.name])
        await self._until_served(client, ports, group, self._read)

    # -- groups

    async def _delete(self, client: KafkaClient, ports: Ports, group: AdministeredGroup) -> None:
        """Delete the group, if it has no member, and look for it; raise ``Abandoned`` if it may be there after that."""
        self._faults.lose_writes(await self._coordinator(client, group))
        answer = await self._ask_to_change(client, group, DELETE_GROUPS)
        error = answer.results[0].error_code
        if error == GROUP_ID_NOT_FOUND:
            self._check_missing(group, "DeleteGroups")
            return
        if error == NON_EMPTY_GROUP:
            self._audit.require(group.had_members, f"group {group.name} never had a member, and is not deleted for that")
            if group.member == NOBODY:
                raise Abandoned
            return
        self._check_changed(error)
        self._audit.require(group.member == NOBODY, f"group {group.name} was deleted in spite of its member")
        group.offsets.clear()
        group.has_image = group.had_members = False
        self._world.coverage.meet(GROUP_DELETED)
        self._faults.answered(self._coordinators[group.name])
        await self._until_served(client, ports, group, self._read)
        await asyncio.sleep(ports.random.uniform(0, LOOK_S))
        await self._until_served(client, ports, group, self._describe)

    async def _describe(self, client: KafkaClient, ports: Ports, group: AdministeredGroup) -> None:
        answer = await self._ask(client, group, DESCRIBE_GROUPS, include_authorized_operations=False)
        (found,) = answer.groups
        self._check_served(group, found.error_code)
        is_dead = found.group_state == DEAD
        self._audit.require(not (group.exists and is_dead), f"group {group.name} is gone")
        self._audit.require(group.may_exist or is_dead, f"group {group.name}, which was deleted, is {found.group_state}")

    async def _visit(self, client: KafkaClient, ports: Ports, group: AdministeredGroup) -> None:
        """Let a member come and leave, while its coordinator's writes are slow."""
        if group.member == NOBODY:
            self._faults.slow_down(await self._coordinator(client, group))
            await self._join(client, group, gets_assignment=ports.random.random() < SYNC_CHANCE)
        await self._leave(client, group)

    async def _leave_and_delete(self, client: KafkaClient, ports: Ports, group: AdministeredGroup) -> None:
        """Delete a group whose last member has just left."""
        await self._visit(client, ports, group)
        await self._delete(client, ports, group)

    async def _replace(self, client: KafkaClient, ports: Ports, group: AdministeredGroup) -> None:
        """Delete a group whose last member has just left, and join it again before that is answered."""
        if group.exists:
            await self._leave_and_delete(client, ports, group)
        await self._visit(client, ports, group)
        coordinator = await self._coordinator(client, group)
        self._faults.lose_writes(coordinator)
        deletion = asyncio.get_running_loop().create_task(self._delete_once(ports, coordinator, group))
        await asyncio.sleep(AHEAD_S)
        await self._join(client, group, gets_assignment=True)
        self._faults.answered(group.assigned_by)
        await deletion
        self._world.coverage.meet(GROUP_SUCCEEDED)
        for act in (self._commit, self._stay, self._read):
            await self._until_served(client, ports, group, act)

    async def _delete_once(self, ports: Ports, coordinator: str, group: AdministeredGroup) -> None:
        """Delete a group without offsets, as another client does. The outcome does not matter once somebody has joined."""
        other = KafkaClient(self._world, ports, self._name, [coordinator])
        with contextlib.suppress(NotServed):
            await other.request(coordinator, DELETE_GROUPS, groups_names=(GroupId(group.name),))

    # -- members

    async def _join(self, client: KafkaClient, group: AdministeredGroup, *, gets_assignment: bool) -> None:
        group.had_members = True
        joined = await self._join_once(client, group, "")
        if joined.error_code != MEMBER_ID_REQUIRED:
            raise Abandoned
        joined = await self._join_once(client, group, joined.member_id)
        self._check_changed(joined.error_code)
        if joined.leader != joined.member_id or len(joined.members) != 1:
            raise Abandoned  # An earlier member is back.
        group.member = joined.member_id, joined.generation_id
        if not gets_assignment:
            return
        assignment = f"{group.name}/{joined.generation_id}".encode()
        row = request_struct(SYNC_GROUP, "SyncGroupRequestAssignment")(member_id=joined.member_id, assignment=assignment)
        synced = await self._ask_to_change(client, group, SYNC_GROUP, **self._identity(group), assignments=(row,))
        self._check_changed(synced.error_code)
        self._audit.require(bytes(synced.assignment) == assignment, f"{group.name} got {bytes(synced.assignment)!r}")
        group.has_image, group.assigned_by = True, self._coordinators[group.name]

    async def _join_once(self, client: KafkaClient, group: AdministeredGroup, member_id: str) -> Any:
        protocol = request_struct(JOIN_GROUP, "JoinGroupRequestProtocol")(name="dealt", metadata=b"")
        return await self._ask_to_change(
            client, group, JOIN_GROUP, session_timeout=SESSION, rebalance_timeout=REBALANCE, member_id=member_id,
            group_instance_id=None, protocol_type="consumer", protocols=(protocol,),
        )  # fmt: skip

    async def _leave(self, client: KafkaClient, group: AdministeredGroup) -> None:
        member_id, _ = group.member
        group.member = NOBODY
        member = request_struct(LEAVE_GROUP, "MemberIdentity")(member_id=member_id, group_instance_id=None)
        answer = await self._ask_to_change(client, group, LEAVE_GROUP, members=(member,))
        self._check_changed(answer.error_code)
        self._check_changed(answer.members[0].error_code)

    async def _stay(self, client: KafkaClient, ports: Ports, group: AdministeredGroup) -> None:
        if group.member == NOBODY:
            return
        answer = await self._ask(client, group, HEARTBEAT, **self._identity(group))
        self._check_served(group, answer.error_code, STRANGER)
        if answer.error_code != NONE:
            self._check_stranger(group, answer.error_code, "a heartbeat")
        self._world.coverage.meet(MEMBER_KEPT, self._coordinators[group.name] != group.assigned_by)

    def _identity(self, group: AdministeredGroup) -> dict[str, Any]:
        member_id, generation = group.member
        return {"member_id": member_id, "generation_id": generation, "group_instance_id": None}

    # -- answers

    def _check_stranger(self, group: AdministeredGroup, error: int, what: str) -> None:
        """Raise ``Abandoned`` if a member that left may be back; a member that has its assignment is known."""
        is_explained = group.member == NOBODY and group.had_members
        self._audit.require(is_explained, f"{what} of {group.member} in group {group.name} is answered with {error}")
        raise Abandoned

    def _check_missing(self, group: AdministeredGroup, what: str) -> None:
        self._audit.require(not group.exists, f"{what} does not find group {group.name}")

    def _check_served(self, group: AdministeredGroup, error: int, known: frozenset[int] = frozenset()) -> None:
        """Raise ``NotServed`` if the coordinator refuses to answer."""
        if error in REFUSALS:
            raise NotServed(f"error {error}")
        self._audit.require(error == NONE or error in known, f"group {group.name} was told error {error}")

    def _check_changed(self, error: int) -> None:
        """Raise ``Abandoned`` unless a change was acknowledged."""
        if error != NONE:
            raise Abandoned

    async def _ask_to_change(self, client: KafkaClient, group: AdministeredGroup, api: int, **fields: Any) -> Any:
        """Return the coordinator's answer; raise ``Abandoned`` if there is none."""
        await self._coordinator(client, group)
        try:
            return await self._ask(client, group, api, **fields)
        except NotServed:
            raise Abandoned from None

    async def _ask(self, client: KafkaClient, group: AdministeredGroup, api: int, **fields: Any) -> Any:
        """Return the coordinator's answer. Raises ``NotServed``."""
        names = {DELETE_GROUPS: {"groups_names": (GroupId(group.name),)}, DESCRIBE_GROUPS: {"groups": (GroupId(group.name),)}}
        of_group = names.get(api, {"group_id": GroupId(group.name)})
        return await client.request(await self._coordinator(client, group), api, **of_group, **fields)

    async def _coordinator(self, client: KafkaClient, group: AdministeredGroup) -> str:
        """Return the address of the group's coordinator. Raises ``NotServed``."""
        if group.name not in self._coordinators:
            found = await client.any_broker(FIND_COORDINATOR, key=GroupId(group.name), key_type=0)
            self._check_served(group, found.error_code)
            self._coordinators[group.name] = f"{found.host}:{found.port}"
        return self._coordinators[group.name]
