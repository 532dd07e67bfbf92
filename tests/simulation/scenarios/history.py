"""Scenario: a long history in the object store, and metadata that is restored from an old copy.

Workers offload, merge and expire topics while they crash, stop and lose answers, and while an operator changes the topics'
policies. Then metadata goes back to a moment that the seed draws, while the store stays. Checked: a topic whose copying is
disabled gets no new segments and loses no record that retention keeps; nothing is committed or deleted for a partition whose
history has forked until an operator decides, and objects of the rejected history are deleted no sooner than a grace period
later; no object is deleted within the grace period; no record is written more than three times, or can be read for longer than
retention allows; each manifest changes something. Then retention by size is set and changed, with hot ledgers and without, and
a topic sets the size of its segments while its ledgers pile up; checked: retention leaves as many bytes as it must and removes
what it can, and no segment is larger than its topic allows. Then the history is copied to a second store, damaged and repaired
(``second_copy.py``), the kept history is read back, and nothing else remains. At the end topics are attached, detached,
deleted and locked (``attachments.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple
from uuid import UUID

import msgspec

from simulation.checkers.audit import Audit
from simulation.checkers.coverage import (
    DELETED_HOT,
    DELETIONS_REFUSED,
    EXPIRED,
    EXPIRED_BY_SIZE,
    EXPIRED_HOT,
    EXPIRED_HOT_BY_SIZE,
    EXPIRED_HOT_WITHOUT_WRITES,
    FORKED,
    MERGED,
    RESUMED,
    SEGMENT_SIZED,
)
from simulation.checkers.final_checks import FinalChecks
from simulation.checkers.kept_sizes import excess, kept_sizes, too_large
from simulation.clients.policy_operator import PolicyOperator, set_policy
from simulation.clients.sealed_ledgers import LedgersOfProcess, append_sealed, end_of
from simulation.faults.nemesis import Nemesis, NemesisPlan
from simulation.scenarios.attachments import AttachmentStep
from simulation.scenarios.checker_machine import run_in_checker
from simulation.scenarios.second_copy import COPY_GRACE_S, SecondCopyStep
from simulation.world import roles
from simulation.world.clock import SimulatedClock
from simulation.world.machine import Machine, Ports, World
from simulation.world.object_store import Bucket, SimulatedStore, StoreFaults, WriteFault
from stratalog_core.batches.batch import read_header
from stratalog_core.batches.checkpoint import Checkpoint, encode_checkpoint
from stratalog_core.batches.records import Record, build_batch
from stratalog_core.errors import Conflict, OutcomeUnknown, Refused, Unavailable
from stratalog_metadata.client.quorum_client import QuorumClient
from stratalog_metadata.records import (
    KEEP_METADATA,
    KEEP_STORE,
    ForkDecision,
    Ledger,
    Log,
    ManifestPointer,
    TierStatus,
    Topic,
    log_key,
    manifest_pointer_key,
    tier_status_key,
)
from stratalog_metadata.records import Record as MetadataRecord
from stratalog_metadata.state.changes import Change
from stratalog_metadata.state.commands import Command, Delete, Put, Update, VersionIs
from stratalog_tiering.cold.block_source import ColdReaderSettings
from stratalog_tiering.cold.manifest_source import ManifestSource
from stratalog_tiering.cold.reader import ColdReader
from stratalog_tiering.config import TieringSettings
from stratalog_tiering.core.policy import SEGMENT_BYTES, tier_policy
from stratalog_tiering.format.manifest import Manifest, SegmentEntry, SegmentKind, decode_manifest, encode_manifest, pointer_to
from stratalog_tiering.format.manifest_writers import WRITER_VERSION
from stratalog_tiering.format.merkle import batch_leaf, root_hash
from stratalog_tiering.format.object_frame import object_sha256
from stratalog_tiering.format.object_keys import manifest_key, manifests_prefix, marker_key
from stratalog_tiering.maintenance.fork_resolution import read_lines
from stratalog_tiering.offload.commit_markers import mark_committed
from stratalog_tiering.store import Locked, ObjectStore
from stratalog_tiering.worker.worker import TieringWorker

GRACE_S: Final = 4.0
SEGMENT_MS: Final = 400
RETENTION_MS: Final = 10_000
EXPIRING: Final = Topic(
    name="expiring", topic_id=UUID(int=0xE), partition_count=1, replication_factor=1,
    configs={"retention.ms": str(RETENTION_MS), "segment.ms": str(SEGMENT_MS)},
)  # fmt: skip
KEPT: Final = Topic(
    name="kept", topic_id=UUID(int=0xF), partition_count=2, replication_factor=1,
    configs={"retention.ms": "-1", "stratalog.tier.compression": "zstd", "stratalog.tier.encryption.key": "k1"},
)  # fmt: skip
PARTITIONS: Final = tuple((topic, index) for topic in (EXPIRING, KEPT) for index in range(topic.partition_count))
FAULTS_S: Final = 12.0
CALM_S: Final = 20.5
"""Before the checks of ages begin it is calm for longer than a request waits whose answer was lost (10 s), and a retry."""
LOST_MAX_S: Final = 8.0
REFUSED_S: Final = 2.5 * GRACE_S
LATE_S: Final = 5.0
"""Longer than a delayed write, and than the lag of a listing."""
STORE_AWAY_S: Final = RETENTION_MS / 1000 + 6.0
MORE_ATTEMPTS: Final = 6
"""Longer than any cold history is kept, so that hot ledgers expire, too."""
DECIDED_S: Final = 30.0
NEWER_S: Final = 3.0
EDITED_S: Final = 20.0
"""Within this time the simulated bookies have answered a worker again, and it has offloaded a ledger."""
PAUSED: Final = {"remote.log.copy.disable": "true"}
SIZE_STEPS: Final[Sequence[tuple[tuple[int, int], Mapping[str, str], tuple[int, int] | None]]] = (
    ((4_000, 8_000), {"local.retention.ms": "-1"}, None),
    ((500, 1_000), PAUSED, None),
    ((2_000, 4_000), {}, (350, 700)),
)
"""The range of ``retention.bytes`` and the other policy of EXPIRING, and the range of KEPT's segment size, if it is copied."""
SIZE_STEP_S: Final = 5.0
KEPT_BY: Final = (Locked, Refused)
"""How a store refuses deletions: under a lock that no worker asked for, by a policy that allows none."""
FINISH_S: Final = 60.0
LOOK_S: Final = 0.25
LATE_RETENTION_MS: Final = 4_000
"""Allowance for the check, clocks that differ, and a worker that sweeps, then pauses because bookies do not answer."""
WRITES_MAX: Final = 3


class Batch(NamedTuple):
    """The content of a ledger in this scenario."""

    base_offset: int
    end_offset: int
    timestamp_ms: int
    content: bytes
    checkpoint: Checkpoint | None = None
    """The state before it; None: nothing but the offset."""


class Ledgers:
    """Sealed ledgers that every process can read. They outlive their records, as on bookies after a restore."""

    def __init__(self) -> None:
        self.batches: dict[int, Batch] = {}

    def add(self, batch: Batch) -> int:
        self.batches[len(self.batches) + 1] = batch
        return len(self.batches)

    def entries(self, ledger_id: int) -> list[bytes]:
        batch = self.batches[ledger_id]
        return [*encode_checkpoint(batch.checkpoint or Checkpoint(offset=batch.base_offset)), batch.content]


class HistoryAudit(Audit):
    """Also checks how long objects stay, how often records are written, and that a forked history is not touched."""

    def __init__(self, world: World, bucket: Bucket) -> None:
        super().__init__(world.note, bucket)
        self._world = world
        self._stored = bucket
        self.lines: dict[str, dict[int, int]] = {}
        """By log key: ledger id by base offset, for every ledger that the log ever had in its present history."""
        self.forked: dict[str, frozenset[str]] = {}
        """By pointer key: the partition's objects when its history forked; none of them may be deleted."""
        self.kept_lines: dict[str, dict[int, int]] = {}
        """The same for histories in the store that the operator decides to keep."""
        self.is_restoring = False
        self.merges = self.drops = self.expired_hot = 0
        self.ledgers = Ledgers()
        self._clock = SimulatedClock(world.loop)
        self._left_at: dict[str, float] = {}
        self._writes: dict[tuple[str, int], int] = {}
        self._segments: dict[str, frozenset[str]] = {}
        self._leaves: dict[str, list[bytes]] = {}
        """By manifest key: the Merkle leaves of every batch that the partition ever had in the store."""
        self.newer_writer: dict[str, int] = {}
        """By pointer key: the version that a newer release has committed; workers of this one must not replace it."""
        self.by_newer: dict[str, bool] = {}
        """By object key: the newer release's manifests, and whether they require it."""
        self.sized = 0
        """The number of segments of several ledgers of topics that set the size of their segments."""
        self._paused: set[str] = set()
        """Pointer keys of partitions whose topic was not to be copied at some time since their last segment."""
        self.resumed = 0
        self.deleted_below: dict[str, int] = {}
        """By log key: the offset below which a client has deleted the records."""

    def _check(self, change: Change) -> None:
        before = change.before.record if change.before is not None else None
        after = change.after.record if change.after is not None else None
        if isinstance(after, Log) and not self.is_restoring:
            if self._is_decided_now and after.key() in self.kept_lines:
                self.lines[after.key()] = self.kept_lines.pop(after.key())
            line = self.lines.setdefault(after.key(), {})
            line.update((ref.base_offset, ref.ledger_id) for ref in after.ledgers)
        if isinstance(after, Topic) and not tier_policy(after.configs).is_copied:
            self._paused.update(manifest_pointer_key(after.topic_id, index) for index in range(after.partition_count))
        if self.is_restoring:
            if isinstance(after, ManifestPointer) and is_another_version(before, after):
                self._referenced[after.key()] = frozenset()
            return
        super()._check(change)

    def _ledger_removed(self, ledger: Ledger) -> None:
        pointer = manifest_pointer_key(ledger.topic_id, ledger.partition)
        self.require(pointer not in self.forked, f"ledger {ledger.ledger_id} was removed: the history of {pointer} has forked")
        if not self._is_decided_now:
            super()._ledger_removed(ledger)

    @property
    def _is_decided_now(self) -> bool:
        return any(key.startswith("fork_decision/") for key in self._leaving)

    def _log_changed(self, before: Log, after: Log) -> None:
        """Check the log's start and retention. Epochs are not checked: this scenario has a single owner."""
        self.require(after.log_start_offset >= before.log_start_offset, f"the start of {after.key()} went back")
        if self._is_decided_now or after.log_start_offset <= self.deleted_below.get(after.key(), 0):
            return
        pointer = self.records.get(manifest_pointer_key(after.topic_id, after.index))
        cold_end = pointer.end_offset if isinstance(pointer, ManifestPointer) else 0
        self.expired_hot += after.log_start_offset > max(cold_end, before.log_start_offset)
        for base, ledger_id in self.lines[after.key()].items():
            if before.log_start_offset <= base < after.log_start_offset:
                age_ms = self._clock.wall_ms() - self.ledgers.batches[ledger_id].timestamp_ms
                self._require_expired(after, base, age_ms)

    def _require_expired(self, log: Log, base_offset: int, age_ms: int) -> None:
        """Require that a record of this age was past its topic's retention, by its age or by the bytes that are left."""
        configs = self.topic(log.topic_id).configs
        retention_ms, retention_bytes = int(configs["retention.ms"]), int(configs.get("retention.bytes", "-1"))
        left_bytes = sum(self.kept_sizes(log)) if retention_bytes >= 0 else 0
        self.require(
            0 <= retention_ms < age_ms or 0 <= retention_bytes <= left_bytes,
            f"offset {base_offset} of {log.key()} was removed {age_ms} ms after it was written; {left_bytes} bytes are left of"
            f" retention.bytes={retention_bytes}",
        )

    def topic(self, topic_id: UUID) -> Topic:
        (found,) = (each for each in self.records.values() if isinstance(each, Topic) and each.topic_id == topic_id)
        return found

    def kept_sizes(self, log: Log) -> list[int]:
        return kept_sizes(log, self.records, self._stored)

    def _pointer_changed(self, before: ManifestPointer | None, after: ManifestPointer) -> None:
        key = after.key()
        self.require(key not in self.forked, f"{key} was committed although its history has forked")
        self._check_writer(after)
        self._check_tree(after)
        if before is None or after.end_offset > before.end_offset:
            self._copied(after)
        former = self._referenced.get(key, frozenset())
        if before is None or after.manifest_version == before.manifest_version + 1:
            super()._pointer_changed(before, after)
            self._compare(before, after)
        else:
            self._check_manifest(key, after, self._stored)
        for name in former - self._referenced[key]:
            self._left_at[name] = self._world.loop.time()

    def _check_writer(self, after: ManifestPointer) -> None:
        """Require that no worker of this release replaces a manifest that requires a newer one."""
        key = after.key()
        if after.object_key not in self.by_newer:
            is_older = after.manifest_version > self.newer_writer.get(key, after.manifest_version)
            self.require(not is_older, f"{key} was committed although its manifest requires a newer writer")
        elif self.by_newer[after.object_key]:
            self.newer_writer[key] = after.manifest_version
        else:
            self.newer_writer.pop(key, None)

    def _copied(self, pointer: ManifestPointer) -> None:
        """Require that the topic is to be copied at the moment at which its history gets longer."""
        is_copied = tier_policy(self.topic(pointer.topic_id).configs).is_copied
        self.require(is_copied, f"{pointer.key()} got a segment up to {pointer.end_offset} while copying was disabled")
        self.resumed += pointer.key() in self._paused
        self._paused.discard(pointer.key())

    def _check_tree(self, pointer: ManifestPointer) -> None:
        """Require that the tree's head is the root over all batches that were ever offloaded, in order."""
        manifest = self._manifest(pointer)
        if manifest is None:
            return
        leaves = list(self._leaves.get(manifest.previous_key, []))
        line = self.lines[log_key(pointer.topic_id, pointer.index)]
        for entry in manifest.segments:
            if entry.kind is SegmentKind.RAW and entry.first_leaf >= len(leaves):
                bases = sorted(base for base in line if entry.base_offset <= base < entry.end_offset)
                leaves += [batch_leaf(self.ledgers.batches[line[base]].content) for base in bases]
        self._leaves[pointer.object_key] = leaves
        is_right = (manifest.tree.size, manifest.tree.head) == (len(leaves), root_hash(leaves))
        self.require(is_right, f"the head of {pointer.key()} is not that of its {len(leaves)} batches")

    def _compare(self, before: ManifestPointer | None, after: ManifestPointer) -> None:
        old, new = self._manifest(before), self._manifest(after)
        if new is None:
            return
        if old is not None:
            self.require(_content(old) != _content(new), f"{after.key()} was committed without a change")
            self.drops += new.start_offset > old.start_offset
        known = self._segments.get(after.key(), frozenset())
        self._segments[after.key()] = frozenset(entry.key for entry in new.segments)
        for entry in new.segments:
            if entry.key not in known:
                self.merges += entry.end_offset - entry.base_offset > 1 and entry.merge_count > 0
                self._count_writes(after.key(), entry.base_offset, entry.end_offset)
                self._check_size(after, entry)

    def _check_size(self, pointer: ManifestPointer, entry: SegmentEntry) -> None:
        configs = self.topic(pointer.topic_id).configs
        line = self.lines[log_key(pointer.topic_id, pointer.index)]
        inside = [line[base] for base in sorted(line) if entry.base_offset <= base < entry.end_offset]
        problem = too_large(entry, [len(self.ledgers.batches[ledger_id].content) for ledger_id in inside], configs)
        self.require(not problem, f"{pointer.key()}: {problem}")
        self.sized += SEGMENT_BYTES in configs and len(inside) > 1

    def _count_writes(self, key: str, base_offset: int, end_offset: int) -> None:
        for offset in range(base_offset, end_offset):
            writes = self._writes[key, offset] = self._writes.get((key, offset), 0) + 1
            self.require(writes <= WRITES_MAX, f"offset {offset} of {key} was written {writes} times")

    def _manifest(self, pointer: ManifestPointer | None) -> Manifest | None:
        if pointer is None or not (pointer.content or pointer.object_key in self._stored.objects):
            return None
        return decode_manifest(self._stored.manifest_content(pointer))

    def deleted(self, keys: Iterable[str]) -> None:
        gone = list(keys)
        super().deleted(gone)
        for key in gone:
            for pointer, protected in self.forked.items():
                self.require(key not in protected, f"{key} was deleted although the history of {pointer} has forked")
            stayed_s = self._world.loop.time() - self._left_at.get(key, float("-inf"))
            self.require(stayed_s >= 0.9 * GRACE_S, f"{key} was deleted {stayed_s:.1f} s after it stopped counting")

    def objects_of(self, topic: Topic, index: int) -> frozenset[str]:
        return frozenset(key for key in self._stored.objects if f"/{topic.topic_id.hex}/{index}/" in key)

    def referenced_by(self, pointer: ManifestPointer) -> frozenset[str]:
        """Return the keys that the committed manifest of this pointer refers to."""
        return self._referenced.get(pointer.key(), frozenset())

    def fork(self, topic: Topic, index: int) -> None:
        """Note that this partition's history has forked: nothing of it may be deleted or changed until an operator decides."""
        self.forked[manifest_pointer_key(topic.topic_id, index)] = self.objects_of(topic, index)

    def uncommit(self, topic: Topic, index: int) -> None:
        """Note that the newest version was committed and forgotten before the store showed it: its objects are orphans."""
        for key in self.objects_of(topic, index):
            self._left_at.pop(key, None)

    def decide(self, topic: Topic, index: int) -> None:
        """Note the operator's decision: from now on all stored objects count as just removed."""
        now = self._world.loop.time()
        for key in self.forked.pop(manifest_pointer_key(topic.topic_id, index)):
            self._left_at[key] = max(now, self._left_at.get(key, now))

    def restored(self) -> None:
        self._writes.clear()


def is_another_version(before: MetadataRecord | None, after: MetadataRecord | None) -> bool:
    """Whether the pointers name different manifests. A pointer may contain its manifest or not; that is the same version."""
    if not (isinstance(before, ManifestPointer) and isinstance(after, ManifestPointer)):
        return before != after
    return (before.object_key, before.sha256) != (after.object_key, after.sha256)


def _content(manifest: Manifest) -> Manifest:
    return msgspec.structs.replace(
        manifest, version=0, previous_key="", previous_sha256=b"", created_at_ms=0, writer="", removed_lists_made=0
    )  # fmt: skip


class Owner:
    """Appends a sealed ledger of one batch to the partitions in turn."""

    def __init__(self, ledgers: Ledgers) -> None:
        self._ledgers = ledgers
        self.stop = False

    async def run(self, machine: Machine, ports: Ports) -> None:
        client = await roles.connect_metadata(ports)
        while True:
            await asyncio.sleep(ports.random.uniform(0.2, 0.5))
            if not self.stop:
                for topic, index in PARTITIONS:
                    await self.append(client, ports, topic, index)

    async def append(self, client: QuorumClient, ports: Ports, topic: Topic, index: int) -> None:
        """Append a sealed ledger to a partition, if it exists."""
        found = client.view.get(log_key(topic.topic_id, index))
        if found is None or not isinstance(found.record, Log):
            return
        base, now_ms = end_of(client.view, found.record), ports.clock.wall_ms()
        count = ports.random.randint(1, 3)
        records = [
            Record(offset=base + n, timestamp_ms=now_ms, key=None, value=b"%d/%d" % (base + n, now_ms)) for n in range(count)
        ]
        batch = Batch(base, base + count, now_ms, bytes(build_batch(records)))
        offsets = range(batch.base_offset, batch.end_offset)
        await append_sealed(client, found.record, found.version, self._ledgers.add(batch), [batch.content], offsets, now_ms)


class Scenario:
    """One run."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.bucket = Bucket()
        self.audit = HistoryAudit(world, self.bucket)
        world.audit = self.audit
        self.bucket.on_deleted = self.audit.deleted
        self.ledgers = self.audit.ledgers
        self.owner = Owner(self.ledgers)
        self.second: Bucket | None = None
        """The bucket of the second copy, in the last step."""
        self.on_look: Callable[[], None] = lambda: None
        self._random = world.random("history")
        self.metadata = [Machine(world, f"metadata-{number}", roles.run_metadata_node) for number in range(1, 4)]
        self.tiering = [Machine(world, f"tiering-{number}", self._run_worker) for number in (1, 2)]
        self.owners = [Machine(world, "owner-0", self.owner.run)]
        self.operator = Machine(world, "policies-0", PolicyOperator((EXPIRING, KEPT)).run)
        for machine in [*self.tiering, *self.owners]:
            machine.clock = SimulatedClock(world.loop)  # grace periods and ages are compared over minutes

    def simulate(self) -> None:
        self.world.loop.run_until_complete(self._run())

    async def _run_worker(self, machine: Machine, ports: Ports) -> None:
        metadata = await roles.connect_metadata(ports)
        settings = TieringSettings(
            worker_id=f"{machine.name}-{machine.starts}", session_lease_ms=2_000, deletion_lag_ms=300, block_bytes=4096,
            grace_ms=int(GRACE_S * 1000), retention_interval_ms=500, sweep_interval_ms=2_000, retry_ms_max=1_000,
            copy_grace_ms=int(COPY_GRACE_S * 1000),
        )  # fmt: skip
        store = SimulatedStore(self.bucket, ports.loop, ports.random)
        source = LedgersOfProcess(self.ledgers.entries, ports.random)
        second = SimulatedStore(self.second, ports.loop, ports.random) if self.second is not None else None
        await TieringWorker(
            settings, metadata, store, source, ports.clock, ports.random, ports.background, second=second
        ).start()
        await asyncio.Event().wait()

    async def _run(self) -> None:
        for machine in self.metadata:
            machine.boot()
        await self.in_checker(self._create_topics)
        for machine in [*self.tiering, *self.owners]:
            machine.boot()
        self.operator.boot()
        await self._faults()
        self.operator.crash()
        await self._set_policies((EXPIRING, {}), (KEPT, {}))
        ends: dict[str, int] = {}
        if self._random.random() < 0.5 and self.world.decides("outage"):
            ends = await self._store_away()
        await self.pass_time(CALM_S - LOST_MAX_S)
        await self._copied(ends)
        await self.pass_time(self._random.uniform(0.0, LOST_MAX_S - 1.5), self._check_ages)
        saved = self._copy()
        lines = {key: dict(line) for key, line in self.audit.lines.items()}
        await self.pass_time(self._random.uniform(1.5, LOST_MAX_S), self._check_ages)
        self.world.coverage.meet(MERGED, self.audit.merges)
        self.audit.require(self.audit.drops > 0, "retention removed nothing")
        self.world.coverage.meet(EXPIRED, self.audit.drops)
        self.world.coverage.meet(RESUMED, self.audit.resumed)
        forked = await self._restore(saved, lines)
        self.world.coverage.meet(FORKED, len(forked))
        await self.pass_time(REFUSED_S)
        for topic, index, store_line in forked:
            await self._decide(topic, index, store_line)
        await self.pass_time(2 * GRACE_S)
        await self.pass_time(GRACE_S, self._check_ages)
        await self._newer_writer()
        await self._change_sizes()
        await SecondCopyStep(self, PARTITIONS, self._grow).run()
        self.owner.stop = True
        await self.pass_time(1.0)
        await self.in_checker(FinalChecks(self.audit, self.bucket, [], len(PARTITIONS)).run)
        await self.in_checker(self._read_everything)
        await AttachmentStep(self).run()
        self.world.note(
            f"{len(self.ledgers.batches)} ledgers, {self.audit.merges} merges, {self.audit.drops} times retention,"
            f" {len(forked)} forks, {len(self.bucket.objects)} objects"
        )

    async def _create_topics(self, machine: Machine, ports: Ports) -> None:
        client = await roles.connect_metadata(ports)
        logs = (Log(topic_id=topic.topic_id, index=index) for topic, index in PARTITIONS)
        await client.propose(Command(updates=(Put(record=EXPIRING), Put(record=KEPT), *(Put(record=log) for log in logs))))

    async def _set_policies(self, *policies: tuple[Topic, Mapping[str, str]]) -> None:
        """Set each topic's configs to those that it was created with and its policy."""

        async def set_policies(machine: Machine, ports: Ports) -> None:
            client = await roles.connect_metadata(ports)
            for topic, policy in policies:
                wanted = msgspec.structs.replace(topic, configs={**topic.configs, **policy})
                while client.view.find(Topic, topic.key()) != wanted:
                    with contextlib.suppress(Conflict, OutcomeUnknown, Unavailable):
                        await set_policy(client, topic, policy)
                    await asyncio.sleep(LOOK_S)

        await self.in_checker(set_policies)

    async def _faults(self) -> None:
        plan = NemesisPlan(crash=0.3, stop=0.3, partition=0.1, one_way=0, lossy=0, clock_jump=0, pause_mean_s=1.2)
        nemesis = Nemesis(self.world, self.tiering, plan, name="tiering", everyone=[*self.metadata, *self.tiering])
        task = asyncio.get_running_loop().create_task(nemesis.run())
        if self.world.decides("store"):
            self.bucket.faults = StoreFaults(
                unavailable=0.05, answer_lost=0.05, damaged=0.03, truncated=0.03, slow=0.02, happens_later=0.02,
                listing_lag_s=3.0,
            )  # fmt: skip
        await self.pass_time(FAULTS_S)
        self.bucket.faults = StoreFaults()
        nemesis.stop()
        task.cancel()
        for machine in self.tiering:
            machine.boot()

    async def _store_away(self) -> dict[str, int]:
        """Keep the store, or only its writes, away for longer than retention, and restart the workers without it.

        Hot ledgers must expire anyway. Returns where each log ends then, by its key.
        """
        fault = self.world.random("outage").choice([None, None, *WriteFault])
        self.world.note(f"the store {'is away' if fault is None else fault.value}")
        self.bucket.faults = StoreFaults(unavailable=1.0) if fault is None else StoreFaults(writes=fault)
        for machine in self.tiering:
            machine.crash()
        await self.pass_time(0.5)
        for machine in self.tiering:
            machine.boot()
        before = self.audit.expired_hot
        await self.pass_time(STORE_AWAY_S)
        # Bookies do not answer each time, and while writes hang, a worker comes back to a partition after five seconds only.
        for _ in range(MORE_ATTEMPTS):
            if self.audit.expired_hot == before:
                await self.pass_time(RETENTION_MS / 1000)
        self.audit.require(self.audit.expired_hot > before, "hot ledgers past retention stay while the store is away")
        self.world.coverage.meet(EXPIRED_HOT, self.audit.expired_hot - before)
        self.world.coverage.meet(EXPIRED_HOT_WITHOUT_WRITES, self.audit.expired_hot - before if fault is not None else 0)
        self.bucket.faults = StoreFaults()
        return {key: max(line, default=0) for key, line in self.audit.lines.items()}

    async def _copied(self, bases: Mapping[str, int]) -> None:
        """Wait until the ledgers that began at these offsets of their logs are cold, or have expired."""
        until = self.world.loop.time() + FINISH_S
        while left := [key for key, base in bases.items() if not self._is_past(key, base)]:
            assert self.world.loop.time() < until, f"{left[0]} was not offloaded up to offset {bases[left[0]]} after the outage"
            await self.pass_time(LOOK_S)

    def _is_past(self, key: str, base_offset: int) -> bool:
        log = self.audit.records[key]
        assert isinstance(log, Log)
        pointer = self.audit.records.get(manifest_pointer_key(log.topic_id, log.index))
        cold_end = pointer.end_offset if isinstance(pointer, ManifestPointer) else 0
        return max(cold_end, log.log_start_offset) > base_offset

    # -- metadata goes back

    def _copy(self) -> dict[str, MetadataRecord]:
        kinds = (Log, Ledger, ManifestPointer)
        return {key: record for key, record in self.audit.records.items() if isinstance(record, kinds)}

    async def _restore(
        self, saved: dict[str, MetadataRecord], lines: dict[str, dict[int, int]]
    ) -> list[tuple[Topic, int, dict[int, int]]]:
        """Restore metadata to ``saved``. Return the partitions that have forked, with their history in the store."""
        for machine in [*self.tiering, *self.owners]:
            machine.crash()
        await self.pass_time(LATE_S)
        current = self._copy()
        store_lines = self.audit.lines
        updates: list[Update] = [Put(record=record) for key, record in saved.items() if record != current.get(key)]
        updates += [Delete(key=key) for key in current.keys() - saved.keys()]
        self.audit.is_restoring = True

        async def restore(machine: Machine, ports: Ports) -> None:
            client = await roles.connect_metadata(ports)
            versions = {key: found.version for key in saved if (found := client.view.get(key)) is not None}
            unchanged = tuple(VersionIs(key=key, version=version) for key, version in versions.items())
            await client.propose(Command(updates=tuple(updates), requirements=unchanged))

        await self.in_checker(restore)
        self.audit.is_restoring = False
        self.audit.lines = lines
        self.audit.restored()
        forked = []
        for topic, index in PARTITIONS:
            key = manifest_pointer_key(topic.topic_id, index)
            before, after = current.get(key), saved.get(key)
            if isinstance(before, ManifestPointer) and is_another_version(before, after):
                known = after.manifest_version if isinstance(after, ManifestPointer) else 0
                if before.manifest_version == known + 1 and marker_key(before.object_key) not in self.bucket.objects:
                    # The worker ended between the commit and its marker. The store does not show the version, and what it
                    # copied is still hot, because no hot copy goes before the marker is written.
                    self.audit.uncommit(topic, index)
                    continue
                self.world.note(f"{key} went back from version {before.manifest_version} to {known}")
                self.audit.fork(topic, index)
                forked.append((topic, index, dict(store_lines.get(log_key(topic.topic_id, index), {}))))
        self.audit.require(bool(forked), "no history has forked")
        for machine in [*self.tiering, *self.owners]:
            machine.boot()
        return forked

    async def _decide(self, topic: Topic, index: int, store_line: dict[int, int]) -> None:
        status = self.audit.records.get(tier_status_key(topic.topic_id, index))
        told = isinstance(status, TierStatus) and status.last_error.startswith("Forked")
        self.audit.require(told, f"{topic.name}-{index} does not say that its history has forked: {status}")
        self.audit.decide(topic, index)
        choice = self._random.choice([KEEP_METADATA, KEEP_STORE])

        async def person(machine: Machine, ports: Ports) -> None:
            client = await roles.connect_metadata(ports)
            store = SimulatedStore(self.bucket, ports.loop, ports.random)
            pointer = client.view.find(ManifestPointer, manifest_pointer_key(topic.topic_id, index))
            lines = await read_lines(store, manifests_prefix(topic.topic_id, index), pointer)
            assert lines is not None, f"{topic.name}-{index} has not forked"
            # The history that metadata went back to may be gone: the store's history removed it a grace period before.
            keep = choice if self._is_whole(lines.metadata) else KEEP_STORE
            decision = ForkDecision(
                topic_id=topic.topic_id, index=index, keep=keep, metadata_key=lines.fork.metadata_key,
                store_key=lines.fork.store_key, discard_hot=True,
            )  # fmt: skip
            end_offset = lines.store.manifest.end_offset
            if keep == KEEP_STORE:
                self.audit.kept_lines[log_key(topic.topic_id, index)] = {
                    base: ledger_id for base, ledger_id in store_line.items() if base < end_offset
                }
            await client.propose(Command(updates=(Put(record=decision),)))
            while (waiting := client.view.find(ForkDecision, decision.key())) is not None:
                assert not waiting.refused, waiting.refused
                await asyncio.sleep(LOOK_S)

            ignored = log_key(topic.topic_id, index) in self.audit.kept_lines
            assert not ignored, f"{topic.name}-{index} does not keep the store's line, for which somebody decided"
            self.world.note(f"{topic.name}-{index} keeps {keep}")

        await self.in_checker(person)

    def _is_whole(self, manifest: Manifest | None) -> bool:
        if manifest is None:
            return False
        return all(entry.key in self.bucket.objects for entry in manifest.segments)

    # -- a newer release

    async def _newer_writer(self) -> None:
        """A newer release edits a manifest so that older ones must not, then one so that they may again."""
        topic, index = self._random.choice([each for each in PARTITIONS if each[0] is KEPT])
        key = manifest_pointer_key(topic.topic_id, index)
        versions = []
        for oldest_writer in (WRITER_VERSION + 1, WRITER_VERSION):

            async def commit(machine: Machine, ports: Ports, oldest_writer: int = oldest_writer) -> None:
                client = await roles.connect_metadata(ports)
                versions.append(await self._commit_as_newer(client, ports, key, oldest_writer))

            await self.in_checker(commit)
            await self.pass_time(NEWER_S)
        again = False
        for _ in range(int(EDITED_S)):
            pointer = self.audit.records[key]
            assert isinstance(pointer, ManifestPointer)
            again = pointer.manifest_version > versions[-1]
            if again:
                break
            await self.pass_time(1.0)
        self.audit.require(again, f"{key} was not edited again although its manifest allows it")

    async def _commit_as_newer(self, client: QuorumClient, ports: Ports, key: str, oldest_writer: int) -> int:
        """Commit the manifest again with another ``oldest_writer``; returns its version."""
        store = SimulatedStore(self.bucket, ports.loop, ports.random)
        while True:
            found = (await client.read([key]))[0]
            assert found is not None, f"{key} has no committed manifest"
            pointer = found.record
            assert isinstance(pointer, ManifestPointer)
            manifest = await ManifestSource(store).manifest(pointer)
            made = msgspec.structs.replace(
                manifest, version=manifest.version + 1, previous_key=pointer.object_key,
                previous_sha256=bytes.fromhex(pointer.sha256), oldest_writer=oldest_writer, writer="newer",
            )  # fmt: skip
            content = encode_manifest(made)
            name = manifest_key(pointer.topic_id, pointer.index, made.version, ports.random.getrandbits(64))
            await store.put(name, [content])
            new = pointer_to(made, name, object_sha256(content))
            self.audit.by_newer[name] = oldest_writer > WRITER_VERSION
            try:
                await client.propose(
                    Command(updates=(Put(record=new),), requirements=(VersionIs(key=key, version=found.version),))
                )
            except Conflict:
                await store.delete([name])
                continue
            await mark_committed(store, new, 0)
            return int(made.version)

    # -- sizes

    async def _change_sizes(self) -> None:
        """Bound EXPIRING by size instead of age, and change the bound; let KEPT's ledgers pile up, and limit its segments.

        Randomness is drawn from a stream of its own, so that nothing before this step depends on it.
        """
        chance = self.world.random("sizes")
        drops, expired_hot = self.audit.drops, self.audit.expired_hot
        for number, (kept_range, policy, segment_range) in enumerate(SIZE_STEPS):
            kept_bytes = chance.randint(*kept_range)
            by_size = {"retention.ms": "-1", "retention.bytes": str(kept_bytes), **policy}
            kept = self.world.random(f"kept/{number}").choice((None, *KEPT_BY))
            self.bucket.faults = StoreFaults(kept=kept)
            segments = PAUSED if segment_range is None else {SEGMENT_BYTES: str(chance.randint(*segment_range))}
            await self._set_policies((EXPIRING, by_size), (KEPT, segments))
            restarted, after_s = chance.choice(self.tiering), chance.uniform(0.0, SIZE_STEP_S)
            self.owner.stop = False
            await self.pass_time(after_s)
            if self.world.decides(f"sizes#{number}"):
                restarted.crash()
                restarted.boot()
            await self.pass_time(SIZE_STEP_S - after_s)
            self.owner.stop = True
            await self._settle_sizes(kept_bytes, is_copied=segment_range is not None)
            if segment_range is None:
                await self._delete_records()
            self.world.coverage.meet(DELETIONS_REFUSED, kept is not None)
        self.bucket.faults = StoreFaults()
        self.audit.require(self.audit.sized > 0, f"{SEGMENT_BYTES} has no effect: no segment is made of several ledgers")
        self.world.coverage.meet(SEGMENT_SIZED, self.audit.sized)
        self.world.coverage.meet(EXPIRED_BY_SIZE, self.audit.drops - drops)
        self.world.coverage.meet(EXPIRED_HOT_BY_SIZE, self.audit.expired_hot - expired_hot)

    async def _settle_sizes(self, kept_bytes: int, *, is_copied: bool) -> None:
        """Wait until retention has nothing more to remove from EXPIRING, and KEPT is cold if it is copied."""
        until = self.world.loop.time() + FINISH_S
        while problem := self._unsettled(kept_bytes, is_copied=is_copied):
            if self.world.loop.time() >= until:
                raise AssertionError(problem)
            await self.pass_time(LOOK_S)

    def _unsettled(self, kept_bytes: int, *, is_copied: bool) -> str:
        log = self.audit.records[log_key(EXPIRING.topic_id, 0)]
        assert isinstance(log, Log)
        for index in range(KEPT.partition_count if is_copied else 0):
            pointer = self.audit.records.get(manifest_pointer_key(KEPT.topic_id, index))
            end_offset = max(self.audit.lines[log_key(KEPT.topic_id, index)])
            if not isinstance(pointer, ManifestPointer) or pointer.end_offset <= end_offset:
                return f"{KEPT.name}-{index} is not copied up to offset {end_offset}"
        return excess(self.audit.kept_sizes(log), kept_bytes)

    async def _delete_records(self) -> None:
        """Delete records of KEPT as a client does, and require that their ledgers go although nothing is copied."""
        key = log_key(KEPT.topic_id, 0)
        log = self.audit.records[key]
        assert isinstance(log, Log)
        start = self.audit.deleted_below[key] = log.ledgers[len(log.ledgers) // 2].base_offset

        async def delete(machine: Machine, ports: Ports) -> None:
            client = await roles.connect_metadata(ports)
            while True:
                found = client.view.get(key)
                if found is None or not isinstance(found.record, Log) or found.record.log_start_offset >= start:
                    return
                put = Put(record=msgspec.structs.replace(found.record, log_start_offset=start))
                with contextlib.suppress(Conflict, OutcomeUnknown, Unavailable):
                    await client.propose(Command(updates=(put,), requirements=(VersionIs(key=key, version=found.version),)))

        await self.in_checker(delete)
        until = self.world.loop.time() + FINISH_S
        while isinstance(log := self.audit.records[key], Log) and (left := log.ledgers[0].base_offset) < start:
            assert self.world.loop.time() < until, f"records of {key} are deleted up to {start}; its ledgers begin at {left}"
            await self.pass_time(LOOK_S)
        self.world.coverage.meet(DELETED_HOT)

    async def _grow(self, seconds: float) -> None:
        """Let the owner append for so long; return when all of it is cold and retention has nothing more to remove."""
        self.owner.stop = False
        await self.pass_time(seconds)
        self.owner.stop = True
        log = self.audit.records[log_key(EXPIRING.topic_id, 0)]
        assert isinstance(log, Log)
        await self._settle_sizes(int(self.audit.topic(EXPIRING.topic_id).configs["retention.bytes"]), is_copied=True)

    # -- checks

    def _check_ages(self) -> None:
        """Check the oldest readable record's age: at most retention, an eighth of it, and the allowance for the check."""
        log = self.audit.records.get(log_key(EXPIRING.topic_id, 0))
        assert isinstance(log, Log)
        line = self.audit.lines[log.key()]
        bases = [base for base in line if self.ledgers.batches[line[base]].end_offset > log.log_start_offset]
        if bases:
            oldest = self.ledgers.batches[line[min(bases)]]
            age_ms = self.owners[0].clock.wall_ms() - oldest.timestamp_ms
            allowed_ms = RETENTION_MS + max(SEGMENT_MS, RETENTION_MS // 8) + LATE_RETENTION_MS
            self.audit.require(
                age_ms <= allowed_ms, f"offset {oldest.base_offset} can be read {age_ms} ms after it was written"
            )
        self._check()

    async def _read_everything(self, machine: Machine, ports: Ports) -> None:
        await self.read_everything(SimulatedStore(self.bucket, ports.loop, ports.random), ports)

    async def read_everything(self, store: ObjectStore, ports: Ports) -> None:
        """Check that cold history equals the log's content in the kept history."""
        reader = ColdReader(store, ColdReaderSettings(), ports.clock)
        for topic, index in PARTITIONS:
            pointer = self.audit.records.get(manifest_pointer_key(topic.topic_id, index))
            assert isinstance(pointer, ManifestPointer)
            await self.read_partition(reader, topic.name, pointer)
        await reader.close()

    async def read_partition(self, reader: ColdReader, name: str, pointer: ManifestPointer) -> None:
        line = self.audit.lines[log_key(pointer.topic_id, pointer.index)]
        offset = pointer.start_offset
        while offset < pointer.end_offset:
            content = b"".join((await reader.fetch(pointer, offset, 2**20, 10.0)).batches)
            while content:
                batch = self.ledgers.batches[line[offset]]
                found, content = content[: len(batch.content)], content[len(batch.content) :]
                assert found == batch.content, f"{name}-{pointer.index}@{offset} is not what the log held"
                offset = batch.end_offset

    def note_batch(self, base_offset: int, content: bytes, timestamp_ms: int) -> tuple[int, int]:
        """Add a batch that never was in a ledger; return its number, as that of a ledger, and its end offset."""
        end_offset = base_offset + read_header(content).record_count
        return self.ledgers.add(Batch(base_offset, end_offset, timestamp_ms, content)), end_offset

    async def in_checker(self, work: Callable[[Machine, Ports], Any]) -> None:
        await run_in_checker(self.world, work, FINISH_S)

    async def pass_time(self, seconds: float, check: Callable[[], None] = lambda: None) -> None:
        until = self.world.loop.time() + seconds
        while self.world.loop.time() < until:
            await asyncio.sleep(min(LOOK_S, max(0.001, until - self.world.loop.time())))
            check()
            self.on_look()
            self._check()

    def _check(self) -> None:
        assert not self.audit.broken, self.audit.broken[0]
        for machine in [*self.metadata, *self.tiering, *self.owners, self.operator]:
            if machine.failure is not None:
                raise AssertionError(f"{machine.name} failed: {machine.failure!r}") from machine.failure
