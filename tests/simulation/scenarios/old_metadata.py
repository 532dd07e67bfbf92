"""Scenario: a cluster loses its metadata and continues from an old copy, as docs/how-to/back-up-metadata.md says.

The cluster of ``log`` runs under its faults. A node of the quorum stops for a copy of its disk. Later all disks of the quorum
are lost. An operator makes the copy the only member of a new quorum, adds the other nodes with empty disks, starts bookies,
then brokers and tiering workers, decides forks for the store's history, and restores coordinators whose ledgers are gone. Then
new clients write, read and commit under the same faults.

Checked, besides all that ``log`` checks of the new clients: every record that was acknowledged in a ledger that the copy knows,
or is in the history that was kept, is still at its offset; no ledger gets an id under which bookies have entries; bookies keep
the ledgers that the copy does not know, and delete the others; nothing that a manifest refers to is deleted; and every
partition is served.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from functools import partial
from typing import Final

from simulation.checkers.coordinator_states import StoredStates
from simulation.checkers.coverage import COORDINATOR_RESTORED, FORKED, METADATA_RESTORED
from simulation.faults.nemesis import NemesisPlan
from simulation.scenarios import log
from simulation.scenarios.checker_machine import in_time
from simulation.scenarios.cluster import FINISH_S, LOOK_S
from simulation.world import roles
from simulation.world.disk import Disk
from simulation.world.machine import Machine, Ports, World
from simulation.world.object_store import SimulatedStore
from stratalog.tier.lost_coordinators import find_lost, restore_lost
from stratalog_core.errors import Conflict
from stratalog_metadata.client.administration import QuorumAdministration
from stratalog_metadata.client.quorum_client import QuorumClient
from stratalog_metadata.records import (
    KEEP_STORE,
    Bookie,
    ForkDecision,
    Ledger,
    Log,
    ManifestPointer,
    Partition,
    Topic,
    log_key,
    manifest_pointer_key,
    topic_key,
)
from stratalog_metadata.state.commands import Command, Put
from stratalog_metadata.storage.node_storage import NodeStorage
from stratalog_metadata.storage.raft_log import SEGMENT_BYTES_MAX
from stratalog_metadata.storage.restored_copy import become_only_member
from stratalog_metadata.storage.state_store import SnapshotFileStore
from stratalog_tiering.format.object_keys import manifests_prefix
from stratalog_tiering.maintenance.fork_resolution import read_lines

COPY_AFTER_S: Final = (1.0, 7.0)
LISTED_S: Final = 3.5
"""The time after which listings show all writes."""
LOST_AFTER_S: Final = (0.0, 4.0)
RESTORE_STEPS_MAX: Final = 30
"""More changes of the disk than a restore of a copy makes."""
LATER: Final = 10
"""The number of the first machine of each kind of client after the restore."""


class Scenario(log.Scenario):
    """One run."""

    faults_s = 8.0

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._chance = world.random("old metadata")
        self._copied: Machine | None = None
        self._copy: dict[str, bytes] = {}

    def _plans(self) -> list[tuple[str, list[Machine], NemesisPlan]]:
        """Return the plans without rot: what a flipped bit costs together with the metadata is no defect."""
        return [(name, machines, replace(plan, rot=0.0)) for name, machines, plan in super()._plans()]

    async def _run(self) -> None:
        await self._begin()
        copying = asyncio.get_running_loop().create_task(self._back_up())
        await self._faults()
        await copying
        await asyncio.sleep(self._chance.uniform(*LOST_AFTER_S))
        lost = await self._restore()
        self._boot_clients()
        await self._faults()
        await self._end(lost)

    async def _back_up(self) -> None:
        await asyncio.sleep(self._chance.uniform(*COPY_AFTER_S))
        self._copied = self._chance.choice(self.metadata)
        self._copied.crash()
        self._copy = self._copied.disk.copy()
        self.world.note(f"the disk of {self._copied.name} is copied")
        self._copied.boot()

    # -- the restore

    async def _restore(self) -> set[int]:
        """Lose the metadata, and do what the guide says. Returns the ids of the ledgers that the copy does not know."""
        for machine in [*self._clients, *self.members, *self._operators, *self.servers]:
            machine.crash()
        self._put_copy_in_place()
        known = {record.ledger_id for record in self.audit.records.values() if isinstance(record, Ledger)}
        ends, lost = self._known_ends(), self.audit.opened - known
        self.audit.copies.kept = set(lost)
        self.world.coverage.meet(METADATA_RESTORED)
        self.world.note(f"metadata is restored; it knows the records up to {ends}")
        for machine in self.metadata:
            machine.boot()
        await self._in_checker(self._add_nodes)
        for machine in self.bookies:
            machine.boot()
        await self._in_checker(self._bookies_have_registered)
        # From here on the newest states are those of the new quorum, whatever the lost one stored.
        self.first_epoch = min(each.leader_epoch for each in self.audit.records.values() if isinstance(each, Partition))
        StoredStates(self.audit, self.bucket, log.TOPIC, lambda group, partition, offset: None, self.first_epoch)
        for machine in [*self.brokers, *self.tiering]:
            machine.boot()
        await self._in_checker(partial(self._decide_forks, ends))
        await self._in_checker(self._restore_coordinators)
        self.truth = self.truth.below(ends)
        self._make_clients(LATER, "-later")
        return lost

    def _put_copy_in_place(self) -> None:
        assert self._copied is not None
        for node in self.metadata:
            node.disk = Disk(node.name, self.world.random(f"{node.name}/new disk"))
        disk = self._copied.disk
        disk.put_back(self._copy)
        randomness = self.world.random("new identity")

        def restore() -> None:
            files = disk.mount()
            become_only_member(files, lambda: SnapshotFileStore(files), randomness)

        if self.world.decides("interrupted restore"):
            disk.cut_power_after(self._chance.randrange(RESTORE_STEPS_MAX), restore)
            disk.crash()
        restore()
        disk.crash()
        files = disk.mount()
        storage = NodeStorage(files, SnapshotFileStore(files), SEGMENT_BYTES_MAX, must_exist=True)
        self.audit.continue_from(storage.recovered.image.records)
        storage.close()

    def _known_ends(self) -> dict[int, float]:
        """By partition, the offset up to which the copy knows all records: infinite if its last ledger was the last one."""
        topic = self.audit.records[topic_key(log.TOPIC)]
        assert isinstance(topic, Topic)
        return {index: self._known_end(topic, index) for index in range(log.PARTITIONS)}

    def _known_end(self, topic: Topic, index: int) -> float:
        record = self.audit.records[log_key(topic.topic_id, index)]
        assert isinstance(record, Log)
        for ref in record.ledgers:
            if ref.ledger_id not in self.audit.opened:
                return ref.base_offset  # Opened by a command that only the copied node had, which was never committed.
        if record.ledgers:
            return self.audit.ends.get(record.ledgers[-1].ledger_id, math.inf)
        pointer = self.audit.records.get(manifest_pointer_key(topic.topic_id, index))
        return pointer.end_offset if isinstance(pointer, ManifestPointer) else record.log_start_offset

    async def _add_nodes(self, machine: Machine, ports: Ports) -> None:
        assert self._copied is not None
        address = f"{self._copied.name}:{roles.METADATA_PORT}"
        administration = QuorumAdministration([address], ports.transport, ports.clock, ports.random)
        for node in self.metadata:
            if node is not self._copied:
                await administration.add(roles.number_of(node), f"{node.name}:{roles.METADATA_PORT}", FINISH_S)

    async def _bookies_have_registered(self, machine: Machine, ports: Ports) -> None:
        client = await roles.connect_metadata(ports)
        while any(not bookie.session_id for bookie in client.view.all(Bookie)):  # noqa: ASYNC110 - the view tells nobody
            await asyncio.sleep(LOOK_S)

    async def _decide_forks(self, ends: dict[int, float], machine: Machine, ports: Ports) -> None:
        """Keep the store's history wherever metadata and store disagree."""
        await asyncio.sleep(LISTED_S)
        client = await roles.connect_metadata(ports)
        store = SimulatedStore(self.bucket, ports.loop, ports.random)
        topic = client.view.find(Topic, topic_key(log.TOPIC))
        assert topic is not None
        for index in range(log.PARTITIONS):
            end_offset = await in_time(self._decide(client, store, topic, index), f"{log.TOPIC}-{index} stays forked", FINISH_S)
            if end_offset >= 0:
                ends[index] = max(ends[index], end_offset)
                self.world.coverage.meet(FORKED)
                self.world.note(f"{log.TOPIC}-{index} keeps the store's history up to {end_offset}")

    async def _decide(self, client: QuorumClient, store: SimulatedStore, topic: Topic, index: int) -> int:
        """Return the end of the history that is kept; -1 if it has not forked."""
        discard_hot = False
        while True:
            pointer = client.view.find(ManifestPointer, manifest_pointer_key(topic.topic_id, index))
            lines = await read_lines(store, manifests_prefix(topic.topic_id, index), pointer)
            if lines is None:
                return -1
            decision = ForkDecision(
                topic_id=topic.topic_id, index=index, keep=KEEP_STORE, metadata_key=lines.fork.metadata_key,
                store_key=lines.fork.store_key, discard_hot=discard_hot,
            )  # fmt: skip
            await client.propose(Command(updates=(Put(record=decision),)))
            refused = await _refusal(client, decision)
            if not refused:
                return lines.store.manifest.end_offset
            # An empty ledger of the copy may have records that were never confirmed, or a listing lags behind.
            discard_hot = "--discard-hot" in refused
            assert discard_hot or "has changed since the decision" in refused, refused
            await asyncio.sleep(LOOK_S)

    async def _restore_coordinators(self, machine: Machine, ports: Ports) -> None:
        client = await roles.connect_metadata(ports)
        ledgers = roles.ledger_client(client, ports)
        store = SimulatedStore(self.bucket, ports.loop, ports.random)
        self.audit.may_begin_empty = True
        while True:
            found = await find_lost(client.view, ledgers)
            try:
                report = await restore_lost(client, store, found, ports.clock.wall_ms(), may_begin_empty=True, dry_run=False)
            except Conflict as changed:
                self.world.note(f"coordinators are looked for again: {changed}")
                continue
            self.world.coverage.meet(COORDINATOR_RESTORED, len(report.rows))
            for row in report.rows:
                self.world.note(f"{row['topic']}-{row['partition']}: {row['state']}")
            if report.is_complete:
                break
            await asyncio.sleep(LOOK_S)
        self.audit.may_begin_empty = False


async def _refusal(client: QuorumClient, decision: ForkDecision) -> str:
    """Wait until a decision is carried out or refused. Returns why it is refused; empty if it is not."""
    while (waiting := client.view.find(ForkDecision, decision.key())) is not None and not waiting.refused:  # noqa: ASYNC110
        await asyncio.sleep(LOOK_S)
    return waiting.refused if waiting is not None else ""
