"""Scenario: commands that edit history or delete objects beside running workers.

Workers offload, merge, expire, sweep and scrub while they crash and stop under a faulty store. Beside them run the cores of
``stratalog job erase`` (which rewrites segments and commits), of ``stratalog scrub --repair`` (which writes damaged segments
again from their hot copies) and of ``stratalog tier gc``, with the workers' own short grace period. Commands crash, and stop
for longer than their leases last and than the grace period, between any two of their steps.

Checked: a committed manifest refers only to objects that exist, and no object that it refers to is deleted. At the end the
history has every record but those that an erasure was asked to erase, in batches with their offsets; a last erasure leaves none
of its records; and nothing is left of segments, or of their data keys, that were written and never committed. Then
objects are lost and damaged (``damage_beside_workers.py``).

A damaged segment whose hot copy is dropped before its repair is restored at the end, as from a second copy.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Final
from uuid import UUID

from simulation.checkers.audit import Audit
from simulation.checkers.coverage import COLLECTED, COMMAND_EXPIRED, ERASED, MERGED, REPAIRED_FROM_HOT
from simulation.checkers.final_checks import EVENTUALLY_S, FinalChecks
from simulation.clients.sealed_ledgers import LedgersOfProcess, append_sealed, end_of
from simulation.faults.nemesis import Nemesis, NemesisPlan
from simulation.scenarios.checker_machine import in_time, run_in_checker
from simulation.scenarios.damage_beside_workers import DamageStep
from simulation.scenarios.history import GRACE_S, Batch, HistoryAudit
from simulation.world import roles
from simulation.world.clock import SimulatedClock
from simulation.world.loop import CURRENT
from simulation.world.machine import Machine, Ports, World
from simulation.world.object_store import Bucket, SimulatedStore, StoreFaults
from stratalog_core.batches.batch import read_header
from stratalog_core.batches.records import Record, build_batch, iterate_records
from stratalog_core.errors import Conflict, StratalogError, Unavailable
from stratalog_metadata.client.quorum_client import QuorumClient
from stratalog_metadata.records import (
    Ledger,
    Log,
    ManifestPointer,
    TierStatus,
    Topic,
    log_key,
    manifest_pointer_key,
    tier_status_key,
)
from stratalog_metadata.state.commands import Command, Put
from stratalog_tiering.cold.block_source import ColdReaderSettings
from stratalog_tiering.cold.bucket_scrub import BucketScrub, FoundTopic
from stratalog_tiering.cold.lease import LeaseExpired
from stratalog_tiering.cold.manifest_source import ManifestSource
from stratalog_tiering.cold.reader import ColdReader
from stratalog_tiering.cold.segment_check import unlimited
from stratalog_tiering.config import TieringSettings
from stratalog_tiering.copies.copying import CopyLimits
from stratalog_tiering.copies.hot_repair import HotLedgers
from stratalog_tiering.copies.repair import RepairedFrom, Repairer, RepairSources
from stratalog_tiering.core import leases
from stratalog_tiering.core.erasure import Selection
from stratalog_tiering.format import manifest_edit
from stratalog_tiering.format.manifest import SegmentKind, decode_manifest
from stratalog_tiering.format.manifest_limits import ManifestLimits
from stratalog_tiering.format.object_keys import data_key_key, is_data_key, parse_segment_key, with_data_keys
from stratalog_tiering.maintenance.erasure import Erased, erase_range
from stratalog_tiering.offload import beside_workers
from stratalog_tiering.offload.locks import KnownLocks
from stratalog_tiering.offload.ports import WorkerPorts, worker_ports
from stratalog_tiering.worker import collection
from stratalog_tiering.worker.collection import CollectorPorts, delete_due, find_all
from stratalog_tiering.worker.worker import TieringWorker

KEPT: Final = Topic(
    name="kept", topic_id=UUID(int=0xF), partition_count=1, replication_factor=1,
    configs={"retention.ms": "-1", "local.retention.ms": "1500", "stratalog.tier.encryption.key": "k1"},
)  # fmt: skip
EXPIRING: Final = Topic(
    name="expiring", topic_id=UUID(int=0xE), partition_count=1, replication_factor=1,
    configs={"retention.ms": "9000", "segment.ms": "400"},
)  # fmt: skip
QUIET: Final = Topic(
    name="quiet", topic_id=UUID(int=0x10), partition_count=3, replication_factor=1, configs={"retention.ms": "-1"}
)
"""Written at first only: then no worker commits anything that would make the commit of a stopped command fail."""
TOPICS: Final = (KEPT, EXPIRING, QUIET)
LIVE: Final = ((KEPT, 0), (EXPIRING, 0))
UNCHANGED: Final = tuple((QUIET, index) for index in range(QUIET.partition_count))
PARTITIONS: Final = (*LIVE, *UNCHANGED)
QUIET_FROM_S: Final = 1.5
SETTLED_S: Final = 8.0
"""From then on nothing is merged any more of what is not written, and no merged segment is left to be deleted."""
KEYS: Final = tuple(b"key-%d" % number for number in range(8))
LEASE_MS: Final = 3_000
"""Of a command that has crashed, too, so that what it has written is swept within the run."""
FAULTS_S: Final = 20.0
CALM_S: Final = 2.0
FINISH_S: Final = 60.0
LOOK_S: Final = 0.25
STOP_SHARE: Final = 0.5
"""Share of segments that a command writes after which it is stopped, before or after its commit."""
STOP_S: Final = (0.05, 0.13)
STOPPED_S: Final = (4.0, 7.0)
"""Up to longer than the lease, the grace period and a sweep."""
ASKED_LAST: Final = 2
"""A commit of a machine's last erasures may be under way: of the present one, and of one that crashed before."""
DAMAGE_SHARE: Final = 0.5
"""Share of scrubs before which a segment is damaged that has a hot copy."""


@contextlib.contextmanager
def _times_of_a_short_run() -> Iterator[None]:
    """Let the leases of commands end on time while the context lasts: an hour is longer than a run. Make parts small."""
    uncommitted_ms = collection.UNCOMMITTED_MS
    setattr(collection, "UNCOMMITTED_MS", 0)  # noqa: B010
    lease_ms, apart_ms = beside_workers.DURATION_MS, leases.CLOCKS_APART_MS  # type: ignore[attr-defined]
    setattr(beside_workers, "DURATION_MS", LEASE_MS)  # noqa: B010 - it is a constant to the type checker
    setattr(leases, "CLOCKS_APART_MS", 100)  # noqa: B010
    small = partial(ManifestLimits, page_fan_in=2, inline_removed_max=8, inline_spans_max=2)
    setattr(manifest_edit, "ManifestLimits", small)  # noqa: B010
    try:
        yield
    finally:
        setattr(beside_workers, "DURATION_MS", lease_ms)  # noqa: B010
        setattr(collection, "UNCOMMITTED_MS", uncommitted_ms)  # noqa: B010
        setattr(leases, "CLOCKS_APART_MS", apart_ms)  # noqa: B010
        setattr(manifest_edit, "ManifestLimits", ManifestLimits)  # noqa: B010


class CommandsAudit(HistoryAudit):
    """Also notes what each commit may have erased. Does not count how often a record is written: commands write it again."""

    def __init__(self, world: World, bucket: Bucket) -> None:
        super().__init__(world, bucket)
        self._asked: dict[str, list[frozenset[bytes]]] = {}
        """By machine: the keys of each erasure."""
        self._erased: dict[tuple[str, int], set[bytes]] = {}
        """By pointer key and offset: the keys of which a record there may be gone."""

    def ask(self, keys: Iterable[bytes]) -> None:
        """Note that this process begins an erasure of the records with these keys."""
        process = CURRENT.get()
        assert process is not None
        self._asked.setdefault(process.name.partition("#")[0], []).append(frozenset(keys))

    def may_be_gone(self, pointer_key: str, record: Record) -> bool:
        return record.key in self._erased.get((pointer_key, record.offset), ())

    def _compare(self, before: ManifestPointer | None, after: ManifestPointer) -> None:
        known = self._segments.get(after.key(), frozenset())
        super()._compare(before, after)
        manifest = self._manifest(after)
        for entry in manifest.segments if manifest is not None else ():
            if entry.kind is SegmentKind.ERASED and entry.key not in known:
                keys = frozenset[bytes]().union(*(each for asked in self._asked.values() for each in asked[-ASKED_LAST:]))
                for offset in range(entry.base_offset, entry.end_offset):
                    self._erased.setdefault((after.key(), offset), set()).update(keys)

    def _ledger_removed(self, ledger: Ledger) -> None:
        """Require that a cold copy of the ledger can be decrypted."""
        super()._ledger_removed(ledger)
        pointer = self.records.get(manifest_pointer_key(ledger.topic_id, ledger.partition))
        key = self.data_key_at(pointer, ledger.base_offset) if isinstance(pointer, ManifestPointer) else ""
        is_kept = not key or key in self._stored.objects
        self.require(is_kept, f"ledger {ledger.ledger_id} was removed, and {key}, by which its cold copy is read, is lost")
        if isinstance(pointer, ManifestPointer):
            self._require_unknown_damage(ledger, pointer)

    def _require_unknown_damage(self, ledger: Ledger, pointer: ManifestPointer) -> None:
        """Require that no cold copy of the ledger is known to be damaged, unless its records are deleted."""
        log = self.records[log_key(ledger.topic_id, ledger.partition)]
        status = self.records.get(tier_status_key(ledger.topic_id, ledger.partition))
        assert isinstance(log, Log)
        if not isinstance(status, TierStatus) or not status.unrepaired or ledger.end_offset <= log.log_start_offset:
            return
        manifest = self._manifest(pointer)
        for entry in manifest.segments if manifest is not None else ():
            is_copy = entry.base_offset < ledger.end_offset and ledger.base_offset < entry.end_offset
            is_damaged = is_copy and entry.key in status.unrepaired
            self.require(not is_damaged, f"ledger {ledger.ledger_id} was removed, and {entry.key} was known to be damaged")

    def data_key_at(self, pointer: ManifestPointer, offset: int) -> str:
        """The data key of the segment that holds ``offset``; empty if there is none, or it is not encrypted."""
        manifest, configs = self._manifest(pointer), self.topic(pointer.topic_id).configs
        if manifest is None or "stratalog.tier.encryption.key" not in configs:
            return ""
        found = (each for each in manifest.segments if each.base_offset <= offset < each.end_offset)
        return next((data_key_key(each.key) for each in found), "")

    def deleted(self, keys: Iterable[str]) -> None:
        """Require that no manifest refers to what is deleted, for however short a time that has been so.

        The grace period begins when a version is made, and a process may be stopped before it commits that version.
        """
        Audit.deleted(self, keys)

    def _count_writes(self, key: str, base_offset: int, end_offset: int) -> None:
        pass


class Scenario:
    """One run."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.bucket = Bucket()
        self.audit = world.audit = CommandsAudit(world, self.bucket)
        self.bucket.on_deleted = self.audit.deleted
        self.ledgers = self.audit.ledgers
        self.metadata = [Machine(world, f"metadata-{number}", roles.run_metadata_node) for number in range(1, 4)]
        self.tiering = [Machine(world, f"tiering-{number}", self._run_worker) for number in (1, 2)]
        self.owner = Machine(world, "owner-0", self._run_owner)
        self.commands = [
            Machine(world, "erase-1", self._turns(partial(self._erase, LIVE))),
            Machine(world, "erase-2", self._turns(partial(self._erase, UNCHANGED))),
            Machine(world, "scrub-1", self._turns(self._scrub)),
            Machine(world, "gc-1", self._turns(self._collect)),
        ]
        for machine in [*self.tiering, self.owner, *self.commands]:
            machine.clock = SimulatedClock(world.loop)  # grace periods and leases are compared
        self._is_calm = self._is_over = False
        self._begun_s = 0.0
        self._stopping = world.random("stopping")
        self.bucket.on_written = self._written
        self._damaged: dict[str, tuple[bytes, bytes]] = {}
        """By object key: its content, and the damaged one."""

    def simulate(self) -> None:
        with _times_of_a_short_run(), roles.merges_of_few_segments():
            self.world.loop.run_until_complete(self._run())

    async def _run(self) -> None:
        for machine in self.metadata:
            machine.boot()
        await self._in_checker(self._create_topics)
        self._begun_s = self.world.loop.time()
        for machine in [*self.tiering, self.owner, *self.commands]:
            machine.boot()
        await self._faults()
        await self.pass_time(CALM_S)
        await DamageStep(self, KEPT, (KEPT, EXPIRING)).run()
        self._is_over = True
        for machine in self.commands:
            await in_time(machine.ended.wait(), f"{machine.name} did not come to its end", FINISH_S)
        self._restore_damaged()
        await self.until(self._all_is_cold)
        await self._in_checker(self._erase_the_rest)
        await self._in_checker(FinalChecks(self.audit, self.bucket, [], len(PARTITIONS)).run)
        await self.until(self._nothing_is_left, EVENTUALLY_S)
        await self._in_checker(self._read_everything)
        self.world.coverage.meet(MERGED, self.audit.merges)
        self.world.note(f"{len(self.ledgers.batches)} ledgers, {self.audit.merges} merges, {len(self.bucket.objects)} objects")

    async def _create_topics(self, machine: Machine, ports: Ports) -> None:
        client = await roles.connect_metadata(ports)
        logs = (Log(topic_id=topic.topic_id, index=index) for topic, index in PARTITIONS)
        await client.propose(Command(updates=(*(Put(record=each) for each in TOPICS), *(Put(record=log) for log in logs))))

    async def _faults(self) -> None:
        workers = NemesisPlan(crash=0.3, stop=0.2, partition=0.1, one_way=0, lossy=0, clock_jump=0, pause_mean_s=1.4)
        # Longer than the lease and the grace period at times.
        commands = NemesisPlan(
            crash=0.25, stop=0.3, partition=0.05, one_way=0, lossy=0, clock_jump=0, pause_mean_s=0.8, down_mean_s=2.5,
            down_at_once_max=2,
        )  # fmt: skip
        erase, _, scrub, gc = self.commands
        everyone = [*self.metadata, *self.tiering, *self.commands]
        nemeses = [
            Nemesis(self.world, self.tiering, workers, name="tiering", everyone=everyone),
            # The erasure of what does not change is stopped when it has written something, and seldom else.
            Nemesis(self.world, [erase, scrub, gc], commands, name="commands", everyone=everyone),
        ]
        tasks = [asyncio.get_running_loop().create_task(nemesis.run()) for nemesis in nemeses]
        if self.world.decides("store"):
            self.bucket.faults = StoreFaults(
                unavailable=0.02, answer_lost=0.02, truncated=0.02, happens_later=0.01, listing_lag_s=1.0
            )
        await self.pass_time(FAULTS_S)
        self.bucket.faults = StoreFaults()
        self._is_calm = True
        for nemesis, task in zip(nemeses, tasks, strict=True):
            nemesis.stop()
            task.cancel()

    def _written(self, key: str, content: bytes) -> None:
        """Stop a command that has written a segment, shortly after that and for long, in some cases."""
        process = CURRENT.get()
        name = process.name.partition("#")[0] if process is not None else ""
        machine = next((each for each in self.commands if each.name == name), None)
        if machine is None or self._is_calm or parse_segment_key(key) is None:
            return
        chance, after_s, stopped_s = (
            self._stopping.random(),
            self._stopping.uniform(*STOP_S),
            self._stopping.uniform(*STOPPED_S),
        )
        if chance < STOP_SHARE and self.world.decides(f"stop after {key}"):
            self.world.loop.call_later_as(None, after_s, self._stop, machine, stopped_s)

    def _stop(self, machine: Machine, seconds: float) -> None:
        if not self._is_calm and machine.is_up:
            self.world.note(f"{machine.name} is stopped for {seconds:.1f} s")
            machine.stop()
            self.world.loop.call_later_as(None, seconds, machine.go_on)

    # -- workers and the owner

    async def _run_worker(self, machine: Machine, ports: Ports) -> None:
        settings = TieringSettings(
            worker_id=f"{machine.name}-{machine.starts}", session_lease_ms=2_000, deletion_lag_ms=300, block_bytes=4096,
            grace_ms=int(GRACE_S * 1000), retention_interval_ms=500, sweep_interval_ms=1_500, retry_ms_max=1_000,
            scrub_interval_ms=8_000,
        )  # fmt: skip
        metadata = await roles.connect_metadata(ports)
        await TieringWorker(
            settings, metadata, self._store(ports), self._source(ports), ports.clock, ports.random, ports.background
        ).start()
        await asyncio.Event().wait()

    async def _run_owner(self, machine: Machine, ports: Ports) -> None:
        client = await roles.connect_metadata(ports)
        while not self._is_over:
            await asyncio.sleep(ports.random.uniform(0.2, 0.5))
            for topic, index in PARTITIONS if self.world.loop.time() < self._begun_s + QUIET_FROM_S else LIVE:
                await self._append(client, ports, topic, index)

    async def _append(self, client: QuorumClient, ports: Ports, topic: Topic, index: int) -> None:
        found = client.view.get(log_key(topic.topic_id, index))
        if found is None or not isinstance(found.record, Log):
            return
        base, now_ms, count = end_of(client.view, found.record), ports.clock.wall_ms(), ports.random.randint(1, 4)
        records = [
            Record(offset=base + n, timestamp_ms=now_ms, key=ports.random.choice(KEYS), value=b"%d/%d" % (base + n, now_ms))
            for n in range(count)
        ]
        batch = Batch(base, base + count, now_ms, bytes(build_batch(records)))
        offsets = range(batch.base_offset, batch.end_offset)
        await append_sealed(client, found.record, found.version, self.ledgers.add(batch), [batch.content], offsets, now_ms)

    def _store(self, ports: Ports) -> SimulatedStore:
        return SimulatedStore(self.bucket, ports.loop, ports.random)

    def _source(self, ports: Ports) -> LedgersOfProcess:
        return LedgersOfProcess(self.ledgers.entries, ports.random)

    # -- commands

    def _turns(self, command: Callable[[QuorumClient, Ports], Awaitable[None]]) -> roles.Main:
        """Run ``command`` again and again, as an operator does, also after a failure, until the faults are over."""

        async def run(machine: Machine, ports: Ports) -> None:
            client = await roles.connect_metadata(ports)
            while not self._is_over:
                await asyncio.sleep(ports.random.uniform(0.0, 0.6))
                try:
                    await command(client, ports)
                except LeaseExpired:
                    self.world.coverage.meet(COMMAND_EXPIRED)
                except StratalogError as failure:
                    self.world.note(f"  {machine.name}: {failure!r}")

        return run

    def _ports(self, client: QuorumClient, ports: Ports, name: str) -> WorkerPorts:
        settings = TieringSettings(worker_id=name)
        return worker_ports(
            settings, client, self._store(ports), self._source(ports), ports.clock, ports.random, ports.background
        )

    async def _erase(self, partitions: Sequence[tuple[Topic, int]], client: QuorumClient, ports: Ports) -> None:
        """Erase the records of one key from the cold history of a partition."""
        if partitions is UNCHANGED and self.world.loop.time() < self._begun_s + SETTLED_S:
            return
        (topic, index), key = ports.random.choice(partitions), ports.random.choice(KEYS)
        pointer = client.view.find(ManifestPointer, manifest_pointer_key(topic.topic_id, index))
        if pointer is not None:
            await self._erase_all(self._ports(client, ports, "job-erase"), pointer, [key])

    async def _erase_all(self, ports: WorkerPorts, pointer: ManifestPointer, keys: Sequence[bytes]) -> int:
        """Erase records from all segments; returns the number of segments that stay as they are."""
        self.audit.ask(keys)
        refused, selection, offsets = 0, Selection(keys=frozenset(keys)), (0, pointer.end_offset)
        async for each in erase_range(ports, pointer.topic_id, pointer.index, offsets, selection):
            self.world.coverage.meet(ERASED, isinstance(each, Erased))
            refused += not isinstance(each, Erased)
        return refused

    async def _scrub(self, client: QuorumClient, ports: Ports) -> None:
        """Check a partition and repair it from the hot copies; at times a segment of it is damaged before."""
        topic, _ = ports.random.choice(LIVE)
        if ports.random.random() < DAMAGE_SHARE:
            self._damage(topic, ports.random.randrange(1, 2**16))
        store = self._store(ports)
        scrub = BucketScrub(store, ports.background, before_ms=0)
        sources = RepairSources(
            hot=HotLedgers(self._ports(client, ports, "scrub")),
            pointers={(each.topic_id, each.index): each for each in client.view.all(ManifestPointer)},
            has_metadata=True,
        )
        limits = CopyLimits(background=ports.background, clock=ports.clock, take=unlimited)
        found = FoundTopic(topic_id=topic.topic_id, name=topic.name, partition_count=1)
        _, repairs = await Repairer(scrub, store, sources, limits).partition(found, 0)
        made = [each for each in repairs.values() if each.source is RepairedFrom.HOT]
        self.world.coverage.meet(REPAIRED_FROM_HOT, len(made))

    def _damage(self, topic: Topic, number: int) -> None:
        """Flip a bit of the newest segment if its records have a hot copy."""
        log = self.audit.records.get(log_key(topic.topic_id, 0))
        pointer = self.audit.records.get(manifest_pointer_key(topic.topic_id, 0))
        if not isinstance(log, Log) or not isinstance(pointer, ManifestPointer) or not log.ledgers:
            return
        if not pointer.content and pointer.object_key not in self.bucket.objects:
            return
        segments = decode_manifest(self.bucket.manifest_content(pointer)).segments
        hot = [each.key for each in segments if each.base_offset >= log.ledgers[0].base_offset]
        if not hot or hot[-1] in self._damaged or not self.world.decides(f"damage of {hot[-1]}"):
            return
        content, written, when = self.bucket.objects[hot[-1]]
        place = number % len(content)
        damaged = content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
        self._damaged[hot[-1]] = content, damaged
        self.bucket.objects[hot[-1]] = damaged, written, when
        self.world.note(f"{hot[-1]} is damaged")

    async def _collect(self, client: QuorumClient, ports: Ports) -> None:
        """Delete what is due, as ``tier gc`` does."""
        store = self._store(ports)
        collector = CollectorPorts(metadata=client, store=store, source=ManifestSource(store), locks=KnownLocks(store))
        found = await find_all(collector, TOPICS, int(GRACE_S * 1000), ports.clock.wall_ms())
        await delete_due(client, store, found)
        self.world.coverage.meet(COLLECTED, sum(len(each.due) for each in found))

    # -- at the end

    def _restore_damaged(self) -> None:
        for key, (content, damaged) in self._damaged.items():
            found = self.bucket.objects.get(key)
            if found is not None and found[0] == damaged:
                self.bucket.objects[key] = content, *found[1:]

    def _all_is_cold(self) -> str:
        """Return what is not cold yet, or has a hot copy; empty if all is cold."""
        for topic, index in PARTITIONS:
            log = self.audit.records[log_key(topic.topic_id, index)]
            assert isinstance(log, Log)
            pointer = self.audit.records.get(manifest_pointer_key(topic.topic_id, index))
            last = max(self.audit.lines.get(log.key(), {0: 0}))
            cold_end = pointer.end_offset if isinstance(pointer, ManifestPointer) else 0
            if log.ledgers or max(cold_end, log.log_start_offset) <= last:
                return f"{topic.name}-{index} is cold up to {cold_end}, and its ledgers are {log.ledgers}"
        return ""

    async def _erase_the_rest(self, machine: Machine, ports: Ports) -> None:
        """Erase two keys everywhere. Nothing is hot or locked, so no segment is left out."""
        client = await roles.connect_metadata(ports)
        await client.refresh()
        for topic, index in PARTITIONS:
            pointer = self._pointer(topic, index)
            refused = 1
            while refused:
                # Merges and retention may be faster several times in a row: the operator runs the command again.
                with contextlib.suppress(Conflict, Unavailable):
                    refused = await self._erase_all(self._ports(client, ports, "job-erase"), pointer, KEYS[:2])
                    break
            assert not refused, f"{refused} segments of {topic.name}-{index} were not erased, and nothing is hot"

    def _pointer(self, topic: Topic, index: int) -> ManifestPointer:
        pointer = self.audit.records[manifest_pointer_key(topic.topic_id, index)]
        assert isinstance(pointer, ManifestPointer)
        return pointer

    def _nothing_is_left(self) -> str:
        """Return which segments or data keys are in the bucket that no manifest refers to; empty if there are none."""
        needed = with_data_keys(self.audit.referenced)
        kept = [key for key in self.bucket.objects if parse_segment_key(key) is not None or is_data_key(key)]
        left = sorted(set(kept) - needed)
        return f"{len(left)} objects are left that nothing refers to: {left[0]}" if left else ""

    async def _read_everything(self, machine: Machine, ports: Ports) -> None:
        reader = ColdReader(self._store(ports), ColdReaderSettings(), ports.clock)
        for topic, index in PARTITIONS:
            pointer = self._pointer(topic, index)
            offset = pointer.start_offset
            while offset < pointer.end_offset:
                content = b"".join((await reader.fetch(pointer, offset, 2**20, 10.0)).batches)
                assert content, f"{topic.name}-{index}@{offset} cannot be read"
                while content:
                    size = read_header(content).size_bytes
                    offset = self._check_batch(pointer, offset, content[:size])
                    content = content[size:]
        await reader.close()

    def _check_batch(self, pointer: ManifestPointer, offset: int, content: bytes) -> int:
        """Require that a batch is as it was written but for what was to be erased; returns its end offset."""
        batch = self.ledgers.batches[self.audit.lines[log_key(pointer.topic_id, pointer.index)][offset]]
        header = read_header(content)
        where = f"{pointer.key()}@{offset}"
        assert (header.base_offset, header.next_offset) == (batch.base_offset, batch.end_offset), f"{where}: {header}"
        written = [*iterate_records(batch.content, read_header(batch.content))]
        found = [*iterate_records(content, header)]
        gone = [each for each in written if each not in found]
        assert [each for each in written if each in found] == found, f"{where} has records that were not written: {found}"
        for each in gone:
            assert self.audit.may_be_gone(pointer.key(), each), f"{where}: {each} is gone"
        left = [each for each in found if each.key in KEYS[:2]]
        assert not left, f"{where} still has {left[0]}, which was erased"
        return header.next_offset

    # -- time

    async def _in_checker(self, work: roles.Main) -> None:
        await run_in_checker(self.world, work, FINISH_S)

    async def until(self, problem: Callable[[], str], seconds: float = FINISH_S) -> None:
        until = self.world.loop.time() + seconds
        while found := problem():
            assert self.world.loop.time() < until, found
            await self.pass_time(LOOK_S)

    async def pass_time(self, seconds: float) -> None:
        until = self.world.loop.time() + seconds
        while (left_s := until - self.world.loop.time()) > 0:
            await asyncio.sleep(min(LOOK_S, left_s))
            assert not self.audit.broken, self.audit.broken[0]
            for machine in [*self.metadata, *self.tiering, self.owner, *self.commands]:
                if machine.failure is not None:
                    raise AssertionError(f"{machine.name} failed: {machine.failure!r}") from machine.failure
