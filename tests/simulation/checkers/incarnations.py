"""Checks which installation does what to a bucket that restores take over, and that no restore misses what was offloaded.

The owner object of a restore takes effect at one moment: the takeover. From then on the installation before it may do this, and
nothing else:

- a deletion only if the store answered the question for another owner, before the takeover, in the same instant in which the
  deletion was sent (it may take effect later, as any request);
- a manifest of a version, a marker or a descriptor of a topic only if the store answered that question before the takeover and
  at most a second ago, or the process stood still since;
- new segments and their parts, which are orphans, and are deleted by the owner after the grace period; it overwrites nothing.

The owner of a bucket deletes what it has not written itself only when the grace period after its takeover is over, and never an
object to which one of its committed manifests refers, or the newest one in the bucket. Nothing of a topic that an earlier owner
deleted goes before the grace period after the time for which that owner could have restored it.

The history that a restore finds ends no earlier than the newest manifest that was in the bucket at the takeover, or at the
last offset before the point up to which it restores at which no transaction is open, or at that of the owner before, if that
one had committed its cut before the takeover and the marker came later; it was committed, and its leader epochs are new.

A deleted topic whose restore was reported is not marked as deleted, so that the next owner has it. Only a write that got no
answer, or whose process stood still, may mark it later.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Final
from uuid import UUID

from simulation.checkers.audit import Audit
from simulation.checkers.coverage import CUT_BEFORE_TRANSACTION
from simulation.checkers.newest_manifest import needed_for_a_restore, newest_manifest
from simulation.clients.ledgers_with_transactions import last_end
from simulation.scenarios.history import Batch, Ledgers
from simulation.world.clock import EPOCH_MS
from simulation.world.machine import Machine, Ports, World
from simulation.world.object_store import Bucket, SimulatedStore
from stratalog_core.errors import NoSuchObject
from stratalog_core.object_lock import ObjectLock
from stratalog_core.ports import Buffer
from stratalog_metadata.records import (
    Ledger,
    Log,
    ManifestPointer,
    Partition,
    Topic,
    log_key,
    manifest_pointer_key,
    partition_key,
)
from stratalog_metadata.state.changes import Change
from stratalog_tiering.format.descriptor import DeletionMarker, OwnerDescriptor, decode_descriptor
from stratalog_tiering.format.manifest import decode_manifest
from stratalog_tiering.format.object_keys import (
    LEASES_PREFIX,
    OWNERS_PREFIX,
    TOPICS_PREFIX,
    deleted_topic_of,
    deletion_marker_key,
    is_marker,
    manifests_prefix,
    object_owner,
)
from stratalog_tiering.offload.ownership import COMMITS_SHARE_S
from stratalog_tiering.store import ObjectInfo
from stratalog_tiering.store.base import Upload

GRACE_S: Final = 3.0
CLOCK_MARGIN_S: Final = 0.05
Line = dict[int, Batch]
"""The batches of a partition by their base offsets."""


class Incarnation:
    """One installation as the bucket sees it."""

    def __init__(self, cluster_id: str, audit: RestoreAudit) -> None:
        self.cluster_id = cluster_id
        self.audit = audit
        self.number = -1
        self.taken_at_ms = 0
        self.is_owner = False
        self.written: set[str] = set()
        self.stops: list[tuple[str, float]] = []
        """When which machine was stopped."""
        self.point_ms: int | None = None

    @property
    def was_owner(self) -> bool:
        return self.number >= 0


class Incarnations:
    """All installations over one bucket; the last of ``owners`` has it."""

    def __init__(self, world: World, bucket: Bucket, partitions: Sequence[tuple[Topic, int]]) -> None:
        self.world = world
        self.owners: list[Incarnation] = []
        self._bucket = bucket
        self._partitions = partitions
        self._all: list[Incarnation] = []
        self._committed: dict[tuple[str, str], Line] = {}
        """By pointer key and digest of the manifest: the records up to its end."""
        self._offloaded: dict[str, int] = {}
        """By pointer key: the end of the history in the bucket at the last takeover."""
        self._cut: dict[str, str] = {}
        """By pointer key: the digest of the manifest in the metadata of the owner before, if it restored up to a point."""
        self._excused: set[str] = set()
        """Keys of manifests and markers that were sent by a process that stood still before."""
        self.undeleted: set[UUID] = set()
        """The topics whose restore was reported to the one who deleted them, unless a late marker hides them again."""
        self.kept_until_ms: dict[UUID, float] = {}
        """By topic: until when the cluster that deleted it could have restored it, by the marker in the bucket."""
        bucket.on_written = self._written
        bucket.on_deleted = self._deleted

    def add(self, incarnation: Incarnation) -> Incarnation:
        self._all.append(incarnation)
        return incarnation

    def of(self, audit: RestoreAudit) -> Incarnation:
        return next(each for each in self._all if each.audit is audit)

    # -- the bucket

    def _written(self, key: str, content: bytes) -> None:
        if (topic_id := deleted_topic_of(key)) is not None:
            marker = decode_descriptor(content, DeletionMarker, key)
            marked_ms = max(marker.deleted_at_ms, self._now_ms())
            self.kept_until_ms[topic_id] = marked_ms + marker.restorable_ms
            if topic_id in self.undeleted:
                self.undeleted.remove(topic_id)
                what = f"{key} is written after the restore of the topic was reported, and not late"
                self._all[0].audit.require(self._is_late(key), what)
        if not key.startswith(OWNERS_PREFIX):
            return
        owner = decode_descriptor(content, OwnerDescriptor, key)
        (made,) = (each for each in self._all if each.cluster_id == owner.cluster_id)
        self.world.note(f"{owner.cluster_id} owns the bucket, number {owner.number}")
        for each in self._all:
            each.is_owner = each is made
        made.number, made.taken_at_ms = owner.number, owner.taken_at_ms
        self._cut = self._cut_by(self.owners[-1]) if self.owners else {}
        self.owners.append(made)
        self._offloaded = {
            manifest_pointer_key(topic.topic_id, index): self._newest_end(topic.topic_id, index)
            for topic, index in self._partitions
        }

    def _cut_by(self, owner: Incarnation) -> dict[str, str]:
        if owner.point_ms is None:
            return {}
        pointers = [record for record in owner.audit.records.values() if isinstance(record, ManifestPointer)]
        return {pointer.key(): pointer.sha256 for pointer in pointers}

    def _newest_end(self, topic_id: UUID, index: int) -> int:
        newest = newest_manifest(self._bucket, topic_id, index)
        return newest.end_offset if newest is not None else 0

    def report_undeleted(self, topic_id: UUID) -> None:
        """Note that a restore is reported: the bucket must not say that the topic is deleted."""
        key = deletion_marker_key(topic_id)
        if key not in self._bucket.objects:
            self.undeleted.add(topic_id)
            self.kept_until_ms.pop(topic_id, None)
        else:
            self._all[0].audit.require(self._is_late(key), f"{key} is in the bucket when the restore of the topic is reported")

    def _is_late(self, key: str) -> bool:
        return key in self._bucket.late_keys or key in self._excused

    def _deleted(self, keys: Sequence[str]) -> None:
        if self.owners:
            self.owners[-1].audit.deleted(keys)

    def require_late_manifest(self, topic_id: UUID, index: int) -> None:
        """Require that a history which has forked did so because of a write that was late, or whose process stood still."""
        prefix = manifests_prefix(topic_id, index)
        late = [key for key in (*self._bucket.late_keys, *self._excused) if key.startswith(prefix)]
        what = f"the history of {topic_id}-{index} has forked, and no manifest of an earlier owner was late"
        self.owners[-1].audit.require(bool(late), what)

    # -- histories

    def committed(self, pointer: ManifestPointer, line: Line) -> None:
        """Note what the records of a committed manifest are."""
        kept = {base: batch for base, batch in line.items() if base < pointer.end_offset}
        self._committed[pointer.key(), pointer.sha256] = kept

    def _restored(self, audit: RestoreAudit, pointer: ManifestPointer) -> Line:
        """Check the history that a restore commits; returns its records."""
        key, point_ms = pointer.key(), self.of(audit).point_ms
        line = self._committed.get((key, pointer.sha256))
        found_sha256 = pointer.sha256
        if line is not None:
            end_offset = pointer.end_offset
        else:
            manifest = decode_manifest(self._bucket.manifest_content(pointer))
            found_sha256 = manifest.previous_sha256.hex()
            line = self._committed.get((key, found_sha256))
            audit.require(line is not None, f"{key} is restored from a manifest that was never committed")
            line = line or {}
            end_offset = max((batch.end_offset for batch in line.values()), default=0)
        if self.of(audit).is_owner:
            if found_sha256 == self._cut.get(key):
                self._offloaded[key] = min(self._offloaded[key], end_offset)
            offloaded = self._offloaded[key]
            audit.require(end_offset >= offloaded, f"{key} is restored up to {end_offset}, and {offloaded} were in the bucket")
        beyond = [base for base, batch in line.items() if point_ms is not None and batch.timestamp_ms >= point_ms]
        wanted = min([end_offset, *beyond])
        if wanted < end_offset:
            self.world.coverage.meet(CUT_BEFORE_TRANSACTION, last_end(line, wanted) < wanted)
            wanted = max(last_end(line, wanted), pointer.start_offset)
        audit.require(pointer.end_offset == wanted, f"{key} is restored up to {pointer.end_offset} instead of {wanted}")
        return {base: batch for base, batch in line.items() if base < pointer.end_offset}

    def new_partition(self, audit: RestoreAudit, partition: Partition) -> None:
        """Check a partition that is created: all of them but those of the first installation are restored.

        It begins above every leader epoch that another installation has used.
        """
        if self.of(audit) is self._all[0]:
            return
        key = manifest_pointer_key(partition.topic_id, partition.index)
        pointer = audit.records.get(key)
        if isinstance(pointer, ManifestPointer):
            audit.lines[log_key(partition.topic_id, partition.index)].update(self._restored(audit, pointer))
        elif self.of(audit).is_owner:
            audit.require(not self._offloaded[key], f"{key} is restored without the history that is in the bucket")
        others = [each.audit.epochs.get(partition.key(), -1) for each in self._all if each.audit is not audit]
        what = f"{partition.key()} is restored in epoch {partition.leader_epoch}, and {max(others)} was used"
        audit.require(partition.leader_epoch > max(others), what)

    # -- requests

    def changes(self, made_by: Incarnation, key: str, machine: str, looked_s: float, *, overwrites: bool) -> None:
        """Check a write that is sent now; ``looked_s``: when the store last told the process that the bucket is its own."""
        made_by.written.add(key)
        if made_by.is_owner or not made_by.was_owner or key.startswith(LEASES_PREFIX):
            return
        made_by.audit.require(not overwrites, f"{machine} overwrites {key} after its bucket was taken over")
        is_shown = key.startswith(TOPICS_PREFIX) or is_marker(key)
        now = self.world.loop.time()
        if is_shown and now - looked_s > COMMITS_SHARE_S + CLOCK_MARGIN_S:
            self._excused.add(key)
            stood_still = any(name == machine and looked_s <= at <= now for name, at in made_by.stops)
            what = f"{machine} writes {key} after its bucket was taken over; it last looked {now - looked_s:.1f} s ago"
            made_by.audit.require(stood_still, what)

    def deletes(self, made_by: Incarnation, keys: Sequence[str], machine: str, looked_s: float) -> None:
        """Check a deletion that is sent now."""
        keys = [key for key in keys if not key.startswith(LEASES_PREFIX)]
        if not keys:
            return
        now = self.world.loop.time()
        made_by.audit.require(
            now == looked_s, f"{machine} deletes {keys[0]} without a look whether the bucket is still its own"
        )
        if made_by.is_owner:
            needed = needed_for_a_restore(self._bucket, keys)
            made_by.audit.require(not needed, f"{machine} deletes {needed}, to which the newest manifest in the bucket refers")
        foreign = [key for key in keys if key not in made_by.written]
        if made_by.number > 0 and foreign:
            since_s = (EPOCH_MS + now * 1000 - made_by.taken_at_ms) / 1000
            what = f"{machine} deletes {foreign[0]}, which it has not written, {since_s:.1f} s after its takeover"
            made_by.audit.require(since_s >= GRACE_S - CLOCK_MARGIN_S, what)
            self._require_not_restorable(made_by, foreign, machine)

    def _require_not_restorable(self, made_by: Incarnation, keys: Sequence[str], machine: str) -> None:
        """Require that nothing goes of a topic that another cluster deleted and could have restored."""
        for topic_id, index in {owner for key in keys if (owner := object_owner(key)) is not None}:
            kept_until_ms = self.kept_until_ms.get(topic_id)
            if kept_until_ms is None or partition_key(topic_id, index) in made_by.audit.records:
                continue
            since_s = (self._now_ms() - kept_until_ms) / 1000
            what = f"{machine} deletes objects of {topic_id}, {since_s:.1f} s after the topic could have been restored"
            made_by.audit.require(since_s >= GRACE_S - CLOCK_MARGIN_S, what)

    def _now_ms(self) -> float:
        return EPOCH_MS + self.world.loop.time() * 1000

    def check_end(self, last: Incarnation) -> None:
        """Require that the owner at the end has at least what was in the bucket when it took it over."""
        for key, end_offset in self._offloaded.items():
            pointer = last.audit.records.get(key)
            is_whole = isinstance(pointer, ManifestPointer) and pointer.end_offset >= end_offset
            is_cut = last.point_ms is not None and pointer is not None
            is_deleted = pointer is None and any(key == manifest_pointer_key(each, 0) for each in self.kept_until_ms)
            assert is_whole or is_cut or is_deleted or not end_offset, f"{key} ends before {end_offset}: {pointer}"


class RestoreAudit(Audit):
    """The audit of one installation's metadata. The bucket's checks end when the bucket is taken over from it."""

    def __init__(self, world: World, bucket: Bucket, incarnations: Incarnations, ledgers: Ledgers) -> None:
        super().__init__(world.note, bucket)
        self.lines: defaultdict[str, Line] = defaultdict(dict)
        """By log key: every batch that the installation has."""
        self.epochs: dict[str, int] = {}
        """By partition key: the greatest leader epoch of a ledger."""
        self.merges = 0
        self._stored = bucket
        self._incarnations = incarnations
        self._ledgers = ledgers

    @property
    def _is_replaced(self) -> bool:
        own = self._incarnations.of(self)
        return own.was_owner and not own.is_owner

    def _check(self, change: Change) -> None:
        before = change.before.record if change.before is not None else None
        after = change.after.record if change.after is not None else None
        if isinstance(after, Log):
            self.lines[after.key()].update((ref.base_offset, self._ledgers.batches[ref.ledger_id]) for ref in after.ledgers)
        elif isinstance(after, Ledger):
            key = Partition(topic_id=after.topic_id, index=after.partition).key()
            self.epochs[key] = max(self.epochs.get(key, 0), after.leader_epoch)
        elif isinstance(after, Partition) and before is None and not self._is_internal(after.topic_id):
            self._incarnations.new_partition(self, after)
        super()._check(change)
        if isinstance(after, ManifestPointer):
            self._incarnations.committed(after, self.lines[log_key(after.topic_id, after.index)])

    def _pointer_changed(self, before: ManifestPointer | None, after: ManifestPointer) -> None:
        super()._pointer_changed(before, after)
        if not self._is_replaced and (after.content or after.object_key in self._stored.objects):
            manifest = decode_manifest(self._stored.manifest_content(after))
            self.merges += any(entry.merge_count > 0 for entry in manifest.segments)

    def _manifest_stored(self, before: ManifestPointer, after: ManifestPointer) -> None:
        if not self._is_replaced:
            super()._manifest_stored(before, after)

    def _check_manifest(self, key: str, pointer: ManifestPointer, bucket: Bucket) -> None:
        if not self._is_replaced:
            super()._check_manifest(key, pointer, bucket)


class WatchedStore(SimulatedStore):
    """A process's access to the bucket; every change that it asks for is checked when it is sent."""

    def __init__(
        self, bucket: Bucket, ports: Ports, machine: Machine, made_by: Incarnation, incarnations: Incarnations
    ) -> None:
        super().__init__(bucket, ports.loop, ports.random)
        self._made_by = made_by
        self._machine = machine.name
        self._incarnations = incarnations
        self._looked_s = float("-inf")
        self._looks: dict[object, float] = {}
        self.is_altered: Callable[[str], bool] = lambda key: False
        """Objects that are read altered."""

    async def head(self, key: str) -> ObjectInfo:
        with self._looking(key):
            return await super().head(key)

    async def get(self, key: str) -> bytes:
        with self._looking(key):
            content = await super().get(key)
        return b"?" + content if self.is_altered(key) else content

    @contextlib.contextmanager
    def _looking(self, key: str) -> Iterator[None]:
        """Note the look if the store says that there is no next owner."""
        try:
            yield
        except NoSuchObject:
            if key.startswith(OWNERS_PREFIX):
                self._looked_s = self._looks[asyncio.current_task()] = self._loop.time()
            raise

    async def put(
        self,
        key: str,
        parts: Sequence[Buffer],
        *,
        if_absent: bool = True,
        storage_class: str = "",
        lock: ObjectLock | None = None,
    ) -> None:
        self._incarnations.changes(self._made_by, key, self._machine, self._looked_s, overwrites=not if_absent)
        await super().put(key, parts, if_absent=if_absent, storage_class=storage_class, lock=lock)

    async def create_upload(
        self,
        key: str,
        part_bytes: int,
        storage_class: str = "",
        lock: ObjectLock | None = None,
        *,
        if_absent: bool = True,
    ) -> Upload:
        self._incarnations.changes(self._made_by, key, self._machine, self._looked_s, overwrites=not if_absent)
        return await super().create_upload(key, part_bytes, storage_class, lock, if_absent=if_absent)

    async def delete(self, keys: Sequence[str]) -> None:
        looked_s = self._looks.pop(asyncio.current_task(), float("-inf"))
        self._incarnations.deletes(self._made_by, keys, self._machine, looked_s)
        await super().delete(keys)
