"""Scenario: a bucket is restored into a new installation while the old one still runs, or comes back.

An installation is a metadata node, an owner that seals ledgers, and two tiering workers that offload, merge, expire and sweep
over a store that fails; an operator collects garbage beside them. The workers and the node crash, stop and lose answers. Then
one or two others restore the bucket by the restore of production, which crashes at any step and is repeated, and which may race
the other one; in some runs up to a point in time, in some first one topic, while the
descriptors of the others are damaged or not, and then all. One topic has transactions, which span
segments in most runs, and a group has committed offsets in all topics. In some runs the first installation deletes a topic
before, and in some of these it restores that topic, and reports it as restored. The old installations go on all the time.
``checkers/incarnations.py`` says and checks what they may still do and what a restore finds, ``checkers/restored_offsets.py``
the committed offsets after it.

At the end the last owner of the bucket has every record that was offloaded when the bucket was taken over, as it was written,
and its own; if an old worker's manifest came late, the history has forked, and an operator keeps the owner's line first. The
deleted topic is restored if the bucket did not say so yet, or its restore was reported; else nothing of it is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final
from uuid import UUID

import msgspec

from simulation.checkers.coverage import (
    BUCKET_TAKEN_OVER,
    COLLECTED,
    EARLIER_DELETION,
    FORKED,
    MERGED,
    REFUSED_AFTER_TAKEOVER,
    RESTORE_REPEATED,
    RESTORED_BESIDE_DAMAGED,
    RESTORED_IN_STEPS,
    RESTORED_TO_A_POINT,
    TAKEN_OVER_AGAIN,
    UNDELETED_BEFORE,
)
from simulation.checkers.final_checks import FinalChecks
from simulation.checkers.incarnations import GRACE_S, Incarnation, Incarnations, RestoreAudit, WatchedStore
from simulation.checkers.observers import ChangeObserver
from simulation.checkers.restored_offsets import stored_offsets, wrong_offsets
from simulation.clients.ledgers_with_transactions import next_batch, undecided_from
from simulation.clients.sealed_ledgers import LedgersOfProcess, append_sealed, end_of
from simulation.faults.nemesis import Nemesis, NemesisPlan
from simulation.scenarios.checker_machine import in_time, run_in_checker
from simulation.scenarios.history import Batch, Ledgers
from simulation.world import roles
from simulation.world.clock import SimulatedClock
from simulation.world.loop import CURRENT
from simulation.world.machine import Machine, Ports, World
from simulation.world.object_store import Bucket, SimulatedStore, StoreFaults
from stratalog.restored_groups import bucket_topics, restore_groups
from stratalog_broker.admin.deleted_topics import undelete, until_in_bucket
from stratalog_core.batches.records import Record, build_batch
from stratalog_core.errors import Conflict, Corrupt, Invalid, NotFound, StratalogError
from stratalog_metadata.client.quorum_client import QuorumClient
from stratalog_metadata.client.topic_deletion import delete_topic
from stratalog_metadata.node.server import MetadataServer
from stratalog_metadata.records import (
    KEEP_METADATA,
    NONE_UNDECIDED,
    ForkDecision,
    Log,
    ManifestPointer,
    Partition,
    TierStatus,
    Topic,
    deleted_topic_key,
    log_key,
    manifest_pointer_key,
    partition_key,
    tier_status_key,
)
from stratalog_metadata.state.commands import Command, Put, VersionIs
from stratalog_metadata.storage.state_store import SnapshotFileStore
from stratalog_tiering.cold.archive import read_owner
from stratalog_tiering.cold.block_source import ColdReaderSettings
from stratalog_tiering.cold.lease import HeldLease, held
from stratalog_tiering.cold.manifest_source import ManifestSource
from stratalog_tiering.cold.reader import ColdReader
from stratalog_tiering.config import TieringSettings
from stratalog_tiering.core import leases
from stratalog_tiering.format.coordinator_state import encode_state
from stratalog_tiering.format.object_keys import (
    deletion_marker_key,
    manifests_prefix,
    parse_segment_key,
    parse_topic_key,
    state_key,
    topic_prefix,
    topic_prefixes,
)
from stratalog_tiering.maintenance.cutting import CutPoint, CutPorts
from stratalog_tiering.maintenance.earlier_deletions import confirm_deletion, earlier_deletions
from stratalog_tiering.maintenance.fork_resolution import read_lines
from stratalog_tiering.maintenance.restoring import RestoredTopics, restore_topics, wanted_topics
from stratalog_tiering.offload.locks import KnownLocks
from stratalog_tiering.offload.ownership import cluster_id_in
from stratalog_tiering.worker import session
from stratalog_tiering.worker.collection import CollectorPorts, delete_due, find_all
from stratalog_tiering.worker.worker import TieringWorker

KEPT: Final = Topic(
    name="kept", topic_id=UUID(int=0xF), partition_count=1, replication_factor=1, configs={"retention.ms": "-1"}
)
EXPIRING: Final = Topic(
    name="expiring", topic_id=UUID(int=0xE), partition_count=1, replication_factor=1,
    configs={"retention.ms": "5000", "segment.ms": "400"},
)  # fmt: skip
DELETED: Final = Topic(
    name="deleted", topic_id=UUID(int=0xD), partition_count=1, replication_factor=1, configs={"retention.ms": "-1"}
)
"""The first installation deletes it in some runs."""
TOPICS: Final = (KEPT, EXPIRING, DELETED)
PARTITIONS: Final = tuple((topic, index) for topic in TOPICS for index in range(topic.partition_count))
RESTORABLE_MS_MAX: Final = 15_000
"""Beyond the takeover in about half of the runs: nothing goes within about eight seconds after it anyway."""
UNDELETED_LATEST_S: Final = 1.0
BUCKET_INTERVAL_S: Final = 2.0
BEFORE_S: Final = 7.0
RIVAL_LATEST_S: Final = 5.0
AFTER_S: Final = 7.0
LEASE_MS: Final = 6_000
"""A restore that crashed leaves its lease, and nothing is deleted before it has expired."""
QUIET_S: Final = 11.0
"""Without faults: longer than late writes, the grace period and a sweep."""
FINISH_S: Final = 60.0
LOOK_S: Final = 0.25
CONFIG_CHANGE_CHANCE: Final = 0.1
CRASHES_MAX: Final = 3
CALLBACKS_MAX: Final = 150
"""About the number of callbacks of one restore."""
REPEAT_S: Final = 0.5
STEPS_APART_S: Final = 3.0
SEGMENT_BYTES: Final = 64 * 1024
BATCH_BYTES: Final = 150
"""A segment for each ledger or two, so that transactions span segments."""


@contextlib.contextmanager
def _times_of_a_short_run() -> Iterator[None]:
    """Let leases end on time while the context lasts, and workers look at the whole bucket: both take longer than a run."""
    apart_ms, interval_s = leases.CLOCKS_APART_MS, session.BUCKET_INTERVAL_S
    setattr(leases, "CLOCKS_APART_MS", 100)  # noqa: B010 - it is a constant to the type checker
    setattr(session, "BUCKET_INTERVAL_S", BUCKET_INTERVAL_S)  # noqa: B010
    try:
        yield
    finally:
        setattr(leases, "CLOCKS_APART_MS", apart_ms)  # noqa: B010
        setattr(session, "BUCKET_INTERVAL_S", interval_s)  # noqa: B010


class StoppedMachine(Machine):
    """A machine that notes when it is stopped."""

    def __init__(self, world: World, name: str, main: Callable[[Machine, Ports], Any], stops: list[tuple[str, float]]) -> None:
        super().__init__(world, name, main)
        self._stops = stops

    def stop(self) -> None:
        self._stops.append((self.name, self.world.loop.time()))
        super().stop()

    def go_on(self) -> None:
        self._stops.append((self.name, self.world.loop.time()))
        super().go_on()


class Installation:
    """One cluster over the bucket, and the restore that makes it the bucket's owner; the first one needs none."""

    def __init__(self, world: World, bucket: Bucket, incarnations: Incarnations, name: str) -> None:
        self.world = world
        self.name = name
        self.bucket = bucket
        self._incarnations = incarnations
        self.ledgers = Ledgers()
        self.audit = RestoreAudit(world, bucket, incarnations, self.ledgers)
        self.incarnation = incarnations.add(Incarnation(f"{name}-installation-".ljust(22, "0"), self.audit))
        self.is_restored = False
        self.is_refused = False
        """Another cluster has taken the bucket over, and the operator does not take it back."""
        self.stop = False
        self.restores = 0
        self.point: CutPoint | None = None
        self.is_restored_in_steps = False
        """Whether one topic is restored before all."""
        self.are_others_damaged = False
        """Whether that is done because the descriptors of the others are read altered."""
        self.segment_bytes = SEGMENT_BYTES
        self._changes = ChangeObserver(world.coverage)
        self.metadata = Machine(world, f"{name}-metadata-1", self._run_node)
        stops = self.incarnation.stops
        self.tiering = [StoppedMachine(world, f"{name}-tiering-{number}", self._run_worker, stops) for number in (1, 2)]
        self.owner = Machine(world, f"{name}-owner-0", self._run_owner)
        self.restore = Machine(world, f"{name}-restore-0", self._run_restore)
        self.collector = Machine(world, f"{name}-collector-0", self._run_collector)
        for machine in [*self.tiering, self.owner, self.restore, self.collector]:
            machine.clock = SimulatedClock(world.loop)  # grace periods are compared

    @property
    def machines(self) -> Sequence[Machine]:
        return [self.metadata, *self.tiering, self.owner, self.restore, self.collector]

    def boot(self) -> None:
        for machine in [*self.tiering, self.owner, self.collector]:
            machine.boot()

    async def connect(self, ports: Ports) -> QuorumClient:
        client = QuorumClient([f"{self.metadata.name}:{roles.METADATA_PORT}"], ports.transport, ports.clock, ports.random)
        process = CURRENT.get()
        assert process is not None
        self.audit.promise_checker.holds_sessions(process, ports.clock, client._sessions)
        await client.start(timeout_s=roles.START_TIMEOUT_S)
        return client

    def _store(self, machine: Machine, ports: Ports) -> WatchedStore:
        return WatchedStore(self.bucket, ports, machine, self.incarnation, self._incarnations)

    async def _run_node(self, machine: Machine, ports: Ports) -> None:
        settings = roles.metadata_settings(
            machine, peers=(f"1={machine.name}:{roles.METADATA_PORT}",), cluster_id=self.incarnation.cluster_id
        )
        server = MetadataServer(
            settings, ports.transport, machine.files, ports.clock, ports.random, ports.background,
            SnapshotFileStore(machine.files),
        )  # fmt: skip
        await server.start()
        await server.until_takes_part()
        assert server._node is not None
        self.audit.watch(machine.name, server._node.replica)
        self.audit.on_committed = self._changes.committed
        while server.failure is None:  # noqa: ASYNC110 - the server has no event for it, and needs none
            await asyncio.sleep(0.5)
        raise server.failure

    async def _run_worker(self, machine: Machine, ports: Ports) -> None:
        metadata = await self.connect(ports)
        settings = TieringSettings(
            worker_id=f"{machine.name}-{machine.starts}", session_lease_ms=2_000, deletion_lag_ms=300, block_bytes=4096,
            segment_bytes=self.segment_bytes, grace_ms=int(GRACE_S * 1000), retention_interval_ms=500,
            sweep_interval_ms=1_000, retry_ms_max=1_000,
        )  # fmt: skip
        source = LedgersOfProcess(self.ledgers.entries, ports.random)
        worker = TieringWorker(
            settings, metadata, self._store(machine, ports), source, ports.clock, ports.random, ports.background
        )
        try:
            await worker.start()
        except Invalid as refused:
            is_owner = self.incarnation.is_owner
            self.audit.require(not is_owner, f"{machine.name} was refused although it owns the bucket: {refused}")
            self.world.coverage.meet(REFUSED_AFTER_TAKEOVER)
            return
        await asyncio.Event().wait()

    async def _run_collector(self, machine: Machine, ports: Ports) -> None:
        """Run ``stratalog tier gc`` again and again, until it is refused."""
        client, store = await self.connect(ports), self._store(machine, ports)
        collector = CollectorPorts(metadata=client, store=store, source=ManifestSource(store), locks=KnownLocks(store))
        while not self.stop:
            await asyncio.sleep(ports.random.uniform(0.1, 0.6))
            topics = [*client.view.all(Topic)]
            try:
                found = await find_all(collector, topics, int(GRACE_S * 1000), ports.clock.wall_ms())
                await delete_due(client, store, found)
            except StratalogError as failure:
                self.world.note(f"  {machine.name}: {failure!r}")
                if isinstance(failure, Invalid) and not self.incarnation.is_owner:
                    return
            else:
                self.world.coverage.meet(COLLECTED, sum(len(each.due) for each in found))

    # -- the owner of the partitions

    async def create_topics(self, machine: Machine, ports: Ports) -> None:
        client = await self.connect(ports)
        updates: list[Put] = [Put(record=topic) for topic in TOPICS]
        for topic, index in PARTITIONS:
            updates.append(Put(record=Partition(topic_id=topic.topic_id, index=index, leader_epoch=7)))
            updates.append(Put(record=Log(topic_id=topic.topic_id, index=index)))
        await client.propose(Command(updates=tuple(updates)))

    async def delete_topic(self, machine: Machine, ports: Ports) -> None:
        """Delete a topic, and end when the cluster knows it."""
        client, restorable_ms = await self.connect(ports), ports.random.randint(0, RESTORABLE_MS_MAX)
        while (found := client.view.get(DELETED.key())) is not None:
            assert isinstance(found.record, Topic)
            command = delete_topic(client.view, found.record, found.version, ports.clock.wall_ms(), restorable_ms)
            with contextlib.suppress(StratalogError):
                await client.propose(command)
            await asyncio.sleep(LOOK_S)

    async def undelete_topic(self, machine: Machine, ports: Ports) -> None:
        """Restore the deleted topic; end when that is reported, or cannot be any more."""
        client = await self.connect(ports)
        while self.incarnation.is_owner and not self.stop:
            try:
                topic = await undelete(client, str(DELETED.topic_id), timeout_s=REPEAT_S)
                is_shown = await until_in_bucket(client, topic, REPEAT_S)
            except NotFound as final:
                self.world.note(f"{DELETED.name} is not restored: {final}")
                return
            except StratalogError as failure:
                self.world.note(f"{DELETED.name} is not reported as restored yet: {failure!r}")
            else:
                if not is_shown:  # Nothing was offloaded, and no worker runs: the command says so.
                    await asyncio.sleep(REPEAT_S)
                    continue
                if self.incarnation.is_owner:
                    self._incarnations.report_undeleted(DELETED.topic_id)
                    self.world.note(f"{DELETED.name} is reported as restored")
                return

    async def _run_owner(self, machine: Machine, ports: Ports) -> None:
        client = await self.connect(ports)
        while True:
            await asyncio.sleep(ports.random.uniform(0.2, 0.4))
            for topic, index in PARTITIONS:
                await self._append(client, ports, topic, index)
            if not self.stop and ports.random.random() < CONFIG_CHANGE_CHANCE:
                await self._change_config(client, ports)

    async def _change_config(self, client: QuorumClient, ports: Ports) -> None:
        """Give a topic other configs, which tiering workers describe in the bucket while it is their own."""
        found = client.view.get(KEPT.key())
        if found is not None and isinstance(found.record, Topic):
            configs = {**found.record.configs, "segment.ms": str(ports.random.randint(300, 900))}
            changed = msgspec.structs.replace(found.record, configs=configs)
            unchanged = VersionIs(key=KEPT.key(), version=found.version)
            with contextlib.suppress(StratalogError):
                await client.propose(Command(updates=(Put(record=changed),), requirements=(unchanged,)))

    async def _append(self, client: QuorumClient, ports: Ports, topic: Topic, index: int) -> None:
        """Append a sealed ledger of one batch; of ``KEPT``, some with batches and markers of transactions."""
        found, partition = (
            client.view.get(log_key(topic.topic_id, index)),
            client.view.find(Partition, partition_key(topic.topic_id, index)),
        )
        if found is None or partition is None or not isinstance(found.record, Log):
            return
        base, now_ms, epoch = self._end(client, found.record), ports.clock.wall_ms(), partition.leader_epoch
        count = ports.random.randint(1, 3)
        records = [
            Record(offset=base + n, timestamp_ms=now_ms, key=None, value=f"{self.name} {base + n} {now_ms}".encode())
            for n in range(count)
        ]
        made: Batch | None = Batch(base, base + count, now_ms, bytes(build_batch(records, leader_epoch=epoch)))
        undecided = NONE_UNDECIDED
        if topic is KEPT:
            line = self.audit.lines[found.record.key()]
            made = next_batch(line, records, epoch, now_ms, ports.random, is_ending=self.stop)
            undecided = undecided_from(made, NONE_UNDECIDED) if made is not None else NONE_UNDECIDED
        elif self.stop:
            made = None
        if made is not None:
            ledger_id, offsets = self.ledgers.add(made), range(made.base_offset, made.end_offset)
            await append_sealed(
                client, found.record, found.version, ledger_id, [made.content], offsets, now_ms, partition, undecided
            )

    def _end(self, client: QuorumClient, log: Log) -> int:
        return max(end_of(client.view, log), log.log_start_offset)

    # -- the restore

    async def _run_restore(self, machine: Machine, ports: Ports) -> None:
        client, store = await self.connect(ports), self._store(machine, ports)
        while not (self.is_restored or self.is_refused):
            self.restores += 1
            try:
                await self._restore(client, store, ports)
            except Conflict as lost:
                self.world.note(f"{machine.name} gives up: {lost}")
                self.is_refused = True
            except StratalogError as failure:
                self.world.note(f"{machine.name} is repeated after {type(failure).__name__}: {failure}")
                await asyncio.sleep(REPEAT_S)

    async def _restore(self, client: QuorumClient, store: WatchedStore, ports: Ports) -> None:
        """Do what ``stratalog restore`` does, and what its operator does if another cluster has been faster."""
        await self._give_up_if_overtaken(store)
        await wanted_topics(store, ())
        lease = HeldLease(store, ports.clock, ports.random.getrandbits(64), "restore", (), LEASE_MS)
        async with held(lease):
            cut = CutPorts(
                store=store, clock=ports.clock, background=ports.background,
                random_id=lambda: ports.random.getrandbits(64), cluster_id=cluster_id_in(client),
            )  # fmt: skip
            if self.is_restored_in_steps:
                await self._restore_one(client, cut, store)
                await asyncio.sleep(ports.random.uniform(0.0, STEPS_APART_S))
                await self._give_up_if_overtaken(store)
            restored = await restore_topics(client, cut, (), points=self.point)
            await self._restore_groups(client, cut, restored)
        for history, is_done in restored.topics:
            for found in history.partitions if is_done else ():
                key = manifest_pointer_key(history.descriptor.topic_id, found.index)
                is_right = self.audit.records.get(key) == found.pointer
                self.audit.require(is_right, f"the restore reports {found.pointer} of {key}, and has restored another one")
        wrong = wrong_offsets(self.audit.records, self.bucket.objects, TOPICS)
        self.audit.require(not wrong, wrong)
        self.world.note(f"{self.name} is restored")
        self.is_restored = True

    async def _give_up_if_overtaken(self, store: WatchedStore) -> None:
        """Take no bucket back from a later owner: the history of a topic that was restored here would fork."""
        owner = await read_owner(store)
        if owner is not None and owner.cluster_id != self.incarnation.cluster_id and self.incarnation.was_owner:
            raise Conflict(f"{owner.cluster_id} has taken the bucket over since")

    async def _restore_one(self, client: QuorumClient, cut: CutPorts, store: WatchedStore) -> None:
        """Restore one topic, as an operator does who needs it first, if the bucket has it."""
        is_in_bucket = any(parsed.topic_id == KEPT.topic_id for parsed in map(parse_topic_key, self.bucket.objects) if parsed)
        store.is_altered = lambda key: self.are_others_damaged and is_descriptor_of_other(key)
        try:
            restored = await restore_topics(client, cut, (KEPT.name,), points=self.point)
            await self._restore_groups(client, cut, restored)
        except NotFound as missing:
            self.world.note(f"{KEPT.name} is not restored alone: {missing}")
            return
        except Corrupt as damaged:
            if parse_segment_key(damaged.detail.get("key", "")) is not None:
                raise  # The store has truncated the segment that the cut has just written.
            self.audit.require(not is_in_bucket, f"{KEPT.name} is not restored: {damaged}")
            return
        finally:
            store.is_altered = lambda key: False
        self.world.coverage.meet(RESTORED_IN_STEPS)
        self.world.coverage.meet(RESTORED_BESIDE_DAMAGED, self.are_others_damaged)

    async def _restore_groups(self, client: QuorumClient, cut: CutPorts, restored: RestoredTopics) -> None:
        await client.refresh(FINISH_S)
        found, now_ms = await bucket_topics(client.view, cut.store), cut.clock.wall_ms()
        await restore_groups(client, cut.store, found, None, restored.owner.number, cut.cluster_id, now_ms)


def is_descriptor_of_other(key: str) -> bool:
    """Whether the object describes another topic than the one that is restored first."""
    parsed = parse_topic_key(key)
    return parsed is not None and parsed.topic_id != KEPT.topic_id


async def _decided(client: QuorumClient, decision: ForkDecision) -> None:
    while (waiting := client.view.find(ForkDecision, decision.key())) is not None and not waiting.refused:  # noqa: ASYNC110
        await asyncio.sleep(LOOK_S)


class Scenario:
    """One run."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.bucket = Bucket()
        self.incarnations = Incarnations(world, self.bucket, PARTITIONS)
        self.old = Installation(world, self.bucket, self.incarnations, "old")
        if world.random("restores/segments").random() < 0.7:
            self.old.segment_bytes = BATCH_BYTES
        self.new = [Installation(world, self.bucket, self.incarnations, name) for name in ("new", "rival")]
        self._random = world.random("restores")
        if not (self._random.random() < 0.65 and world.decides("rival")):
            self.new.pop()
        if self._random.random() < 0.6 and world.decides("point"):
            self.new[0].point = CutPoint(timestamp_ms=0)
        for each in self.new:
            each.is_restored_in_steps = world.random(f"restores/steps/{each.name}").random() < 0.5
            each.are_others_damaged = world.random(f"restores/damaged/{each.name}").random() < 0.5
        world.network.connections.on_broken = self._connection_broke

    @property
    def installations(self) -> list[Installation]:
        return [self.old, *self.new]

    def _connection_broke(self, process: Any) -> None:
        for each in self.installations:
            each.audit.promise_checker.connection_broke(process)

    def simulate(self) -> None:
        with roles.merges_of_few_segments(), _times_of_a_short_run():
            self.world.loop.run_until_complete(self._run())

    async def _run(self) -> None:
        self.old.metadata.boot()
        await self._in_checker(self.old.create_topics)
        state = stored_offsets(self.old.incarnation.cluster_id, TOPICS)
        await self._in_checker(
            lambda machine, ports: SimulatedStore(self.bucket, ports.loop, ports.random).put(
                state_key(state.place), [encode_state(state)]
            )
        )
        self.old.boot()
        everyone = [self.old.metadata, *self.old.tiering]
        nemesis = self._nemesis("old", everyone)
        if self.world.decides("store"):
            # Listings do not lag: no store that is supported lists late, and a restore trusts the listing of manifests.
            self.bucket.faults = StoreFaults(
                unavailable=0.03, answer_lost=0.03, damaged=0.02, truncated=0.02, happens_later=0.08
            )
        deletion = asyncio.get_running_loop().create_task(self._delete_topic())
        await self._pass_time(self._random.uniform(0.5, 1.0) * BEFORE_S)
        restores = [asyncio.get_running_loop().create_task(self._restores(each)) for each in self.new]
        await self._pass_time(AFTER_S, restores)
        # After each failure the operator repeats the whole command: it may not come to its end while every tenth request fails.
        faults, self.bucket.faults = self.bucket.faults, StoreFaults()
        for task in restores:
            await in_time(task, "a restore did not come to its end", FINISH_S)
        self.bucket.faults = faults
        await self._pass_time(AFTER_S)
        self.bucket.faults = StoreFaults()
        winner = await self._winner()
        nemesis()
        await in_time(deletion, "the deletion of a topic did not come to its end", FINISH_S)
        await self._quiet(winner)
        takeovers = len(self.incarnations.owners) - 1
        self.world.coverage.meet(BUCKET_TAKEN_OVER, takeovers)
        self.world.coverage.meet(TAKEN_OVER_AGAIN, max(takeovers - 1, 0))
        self.world.coverage.meet(UNDELETED_BEFORE, len(self.incarnations.undeleted))
        self.world.coverage.meet(MERGED, sum(each.audit.merges for each in self.installations))
        self.world.note(f"{winner.name} owns the bucket at the end, {len(self.bucket.objects)} objects")

    async def _delete_topic(self) -> None:
        chance = self.world.random("restores/deletions")
        is_undone = chance.random() < 0.6
        if chance.random() < 0.85 and self.world.decides("deletion"):
            await asyncio.sleep((chance.uniform(0.1, 0.5) if is_undone else chance.uniform(0.2, 1.0)) * BEFORE_S)
            await self._in_checker(self.old.delete_topic)
            if is_undone and self.world.decides("undeletion"):
                await asyncio.sleep(chance.uniform(0.0, UNDELETED_LATEST_S))
                await self._in_checker(self.old.undelete_topic)

    def _nemesis(self, name: str, machines: Sequence[Machine]) -> Callable[[], None]:
        """Start to inject faults into an installation; returns the function that ends it."""
        plan = NemesisPlan(crash=0.3, stop=0.4, partition=0.1, one_way=0, lossy=0, clock_jump=0, pause_mean_s=0.8)
        nemesis = Nemesis(self.world, machines, plan, name=name)
        task = asyncio.get_running_loop().create_task(nemesis.run())

        def end() -> None:
            task.cancel()
            nemesis.stop()

        return end

    async def _winner(self) -> Installation:
        """Return the owner of the bucket. Its takeover may have arrived after its operator gave up: then restore again."""
        (winner,) = (each for each in self.new if each.incarnation.is_owner)
        if not winner.is_restored:
            assert winner.is_refused, f"{winner.name} owns the bucket, and its restore has not ended"
            winner.is_refused = False
            winner.restore.crash()
            winner.restore.ended.clear()
            winner.restore.boot()
            await in_time(winner.restore.ended.wait(), "the restore of a late takeover did not come to its end", FINISH_S)
            assert winner.is_restored, f"{winner.name} owns the bucket, and its restore was refused"
            winner.boot()
            await self._pass_time(AFTER_S)
        return winner

    async def _restores(self, installation: Installation) -> None:
        """Restore into an installation, with crashes, and then let it work."""
        chance = self.world.random(f"restores/{installation.name}")
        if installation is not self.new[0]:
            await asyncio.sleep(chance.uniform(0.0, RIVAL_LATEST_S))
        if installation.point is not None:
            installation.point = CutPoint(timestamp_ms=installation.restore.clock.wall_ms() - chance.randint(500, 4_000))
            installation.incarnation.point_ms = installation.point.timestamp_ms
        installation.metadata.boot()
        pause = asyncio.get_running_loop().create_task(self._pause_metadata(installation.name, chance))
        for number in range(CRASHES_MAX):
            installation.restore.boot()
            if chance.random() < 0.6 and self.world.decides(f"{installation.name}-crash#{number}"):
                within = chance.randint(1, CALLBACKS_MAX) if chance.random() < 0.7 else 2 * CALLBACKS_MAX
                installation.restore.crash_within(within)
            while installation.restore.is_up and not installation.restore.ended.is_set():  # noqa: ASYNC110 - a crash sets none
                await asyncio.sleep(0.05)
            if installation.restore.ended.is_set():
                break
            await asyncio.sleep(chance.uniform(0.0, 0.5))
        else:
            installation.restore.boot()
            await installation.restore.ended.wait()
        await pause
        self.world.coverage.meet(RESTORE_REPEATED, installation.restores - 1)
        if installation.is_restored:
            self.world.coverage.meet(RESTORED_TO_A_POINT, installation.point is not None)
            installation.boot()

    async def _pause_metadata(self, name: str, chance: random.Random) -> None:
        """Stop the old metadata node about when the bucket is taken over, so that commits wait after their look."""
        after_s, for_s = chance.uniform(0.0, 0.3), chance.uniform(1.5, 4.0)
        if chance.random() < 0.6 and self.world.decides(f"{name}-pause"):
            await asyncio.sleep(after_s)
            self.old.metadata.stop()
            await asyncio.sleep(for_s)
            self.old.metadata.go_on()

    async def _quiet(self, winner: Installation) -> None:
        """Without faults, let the owner of the bucket resolve its forks and collect its garbage; check what is left."""
        for each in self.installations:
            each.restore.crash()
            if each is not winner:
                each.stop = True
        until = self.world.loop.time() + QUIET_S
        while self.world.loop.time() < until:
            await self._pass_time(1.0)
            for topic, index in PARTITIONS:
                if self._has_forked(winner, topic, index):
                    await self._decide(winner, topic, index)
                    until = max(until, self.world.loop.time() + QUIET_S)
        await self._in_checker(lambda machine, ports: self._decide_on_deletions(winner, ports))
        winner.stop = True
        await self._pass_time(2.0)
        await self._in_checker(FinalChecks(winner.audit, self.bucket, [], len(PARTITIONS)).run)
        await self._in_checker(lambda machine, ports: self._read_everything(winner, ports))
        self.incarnations.check_end(winner.incarnation)
        await self._in_checker(lambda machine, ports: self._until_nothing_is_left(winner))

    async def _decide_on_deletions(self, winner: Installation, ports: Ports) -> None:
        """Let go of a topic whose history went on after its deletion, as an operator does who has looked at it."""
        client, store = await winner.connect(ports), SimulatedStore(self.bucket, ports.loop, ports.random)
        owner = await read_owner(store)
        assert owner is not None
        for each in await earlier_deletions(store, client, owner):
            if each.refused:
                self.world.note(f"{each.deleted.name}: {each.refused}")
                await confirm_deletion(store, client, owner, each.deleted.topic_id, ports.clock.wall_ms())

    async def _until_nothing_is_left(self, winner: Installation) -> None:
        """Return when no object is left of the deleted topic.

        Objects stay if the bucket was taken over before the topic was marked: it was restored, or was new to the bucket.
        """
        prefixes = (*topic_prefixes(DELETED.topic_id), topic_prefix(DELETED.topic_id), deletion_marker_key(DELETED.topic_id))
        was_marked = DELETED.topic_id in self.incarnations.kept_until_ms
        while was_marked and partition_key(DELETED.topic_id, 0) not in winner.audit.records:
            left = [key for key in self.bucket.objects if key.startswith(prefixes)]
            if not left and deleted_topic_key(DELETED.topic_id) not in winner.audit.records:
                self.world.coverage.meet(EARLIER_DELETION)
                return
            await asyncio.sleep(LOOK_S)

    def _has_forked(self, installation: Installation, topic: Topic, index: int) -> bool:
        status = installation.audit.records.get(tier_status_key(topic.topic_id, index))
        return isinstance(status, TierStatus) and status.last_error.startswith("Forked")

    async def _decide(self, winner: Installation, topic: Topic, index: int) -> None:
        """Keep the line of the bucket's owner, as the operator does who has restored it."""
        self.world.coverage.meet(FORKED)
        self.incarnations.require_late_manifest(topic.topic_id, index)

        async def person(machine: Machine, ports: Ports) -> None:
            client = await winner.connect(ports)
            store = SimulatedStore(self.bucket, ports.loop, ports.random)
            pointer = client.view.find(ManifestPointer, manifest_pointer_key(topic.topic_id, index))
            lines = await read_lines(store, manifests_prefix(topic.topic_id, index), pointer)
            if lines is None:
                return
            decision = ForkDecision(
                topic_id=topic.topic_id, index=index, keep=KEEP_METADATA, metadata_key=lines.fork.metadata_key,
                store_key=lines.fork.store_key, discard_hot=True,
            )  # fmt: skip
            await client.propose(Command(updates=(Put(record=decision),)))
            await in_time(_decided(client, decision), "a decision did not come to its end", FINISH_S)

        await self._in_checker(person)

    async def _read_everything(self, winner: Installation, ports: Ports) -> None:
        reader = ColdReader(SimulatedStore(self.bucket, ports.loop, ports.random), ColdReaderSettings(), ports.clock)
        for topic, index in PARTITIONS:
            key = manifest_pointer_key(topic.topic_id, index)
            pointer, log = winner.audit.records.get(key), winner.audit.records.get(log_key(topic.topic_id, index))
            if pointer is None or log is None:
                continue  # The topic was new: nothing of it was in the bucket at the takeover (`check_end`).
            assert isinstance(pointer, ManifestPointer)
            assert isinstance(log, Log)
            assert not log.ledgers, f"{log.key()} still has hot ledgers: {log.ledgers}"
            line, offset = winner.audit.lines[log.key()], pointer.start_offset
            assert topic is not KEPT or offset == 0, f"the history of {key} begins at offset {offset}"
            while offset < pointer.end_offset:
                content = b"".join((await reader.fetch(pointer, offset, 2**20, 10.0)).batches)
                while content:
                    batch = line[offset]
                    found, content = content[: len(batch.content)], content[len(batch.content) :]
                    assert found == batch.content, f"{key}@{offset} is not what was written"
                    offset = batch.end_offset
        await reader.close()

    # -- time

    async def _in_checker(self, work: Callable[[Machine, Ports], Any]) -> None:
        await run_in_checker(self.world, work, FINISH_S)

    async def _pass_time(self, seconds: float, unless_done: Any = ()) -> None:
        until = self.world.loop.time() + seconds
        while self.world.loop.time() < until and not (unless_done and all(task.done() for task in unless_done)):
            await asyncio.sleep(min(LOOK_S, max(0.001, until - self.world.loop.time())))
            self._check()

    def _check(self) -> None:
        for each in self.installations:
            assert not each.audit.broken, each.audit.broken[0]
            for machine in each.machines:
                if machine.failure is not None:
                    raise AssertionError(f"{machine.name} failed: {machine.failure!r}") from machine.failure
