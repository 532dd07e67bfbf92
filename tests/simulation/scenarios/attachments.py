"""The end of the ``history`` scenario: topics that are attached, detached, deleted and locked while processes crash.

An operator attaches new topics from elsewhere, also what was detached before, lets them grow, detaches them and deletes them;
its process and the workers crash at any step, and the store fails. Some topics are locked by the store, and some get another
partition after it was decided to detach them. Checked: an attached topic is whole and has its source's offsets, at the moment
at which it exists; what is being attached is hidden; objects are locked as their topics want, merged ones no longer than their
sources, and nobody even tries to delete what is locked; nothing of a detached or reserved topic is deleted; an attachment that
died leaves nothing. At the end readers of the bucket find the topics, detached ones included, and every record. Then metadata
goes back to when one of them was being attached: nothing of it may be deleted. The deletion marker of one of these comes late
(:mod:`.late_markers`). A second copy gets all of what was detached.

Randomness is drawn from a stream of its own, so that nothing before this step depends on it.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

import msgspec

from simulation.checkers.coverage import (
    ATTACHED,
    ATTACHMENT_DIED,
    DETACHED,
    LOCKED_DELETED,
    LOCKED_EXPIRED,
    LOCKED_MERGED,
)
from simulation.faults.nemesis import Nemesis, NemesisPlan
from simulation.scenarios.late_markers import LateMarker
from simulation.world import roles
from simulation.world.clock import SimulatedClock
from simulation.world.machine import Machine, Ports
from simulation.world.object_store import Bucket, SimulatedStore, StoreFaults
from stratalog_broker.admin.locked_history import require_unlocked
from stratalog_core.batches.records import Record, build_batch
from stratalog_core.errors import StratalogError
from stratalog_core.object_lock import LOCK_MS_MIN, joined
from stratalog_core.ports import Buffer
from stratalog_metadata.client.quorum_client import QuorumClient
from stratalog_metadata.client.topic_deletion import delete_topic
from stratalog_metadata.records import (
    DeletedTopic,
    Log,
    ManifestPointer,
    Partition,
    PendingTopic,
    RestoredTopic,
    Topic,
    log_key,
    manifest_pointer_key,
)
from stratalog_metadata.records import Record as MetadataRecord
from stratalog_metadata.state.changes import Change
from stratalog_metadata.state.commands import Command, Put, VersionIs
from stratalog_tiering.attach.attachment import AttachPorts, attach
from stratalog_tiering.attach.bucket import stored_topic
from stratalog_tiering.attach.detachment import detach
from stratalog_tiering.attach.source import PartitionSource, TopicSource
from stratalog_tiering.cold.archive import Archive
from stratalog_tiering.cold.block_source import ColdReaderSettings
from stratalog_tiering.cold.reader import ColdReader
from stratalog_tiering.config import TieringSettings
from stratalog_tiering.core.policy import tier_policy
from stratalog_tiering.format.locks import entry_lock
from stratalog_tiering.format.manifest import Manifest, SegmentKind, decode_manifest
from stratalog_tiering.format.object_keys import deletion_marker_key, marker_key, topic_prefix

if TYPE_CHECKING:
    from simulation.scenarios.history import Scenario

EXPIRY_MS: Final = 3_000
LONG_LOCK_EVERY: Final = 3
LONGER_MS: Final = 5_000
"""One lock of three is longer by this: it ends after the grace period of a segment that is merged at once."""
TIMEOUT_S: Final = 5.0
FAULTS_S: Final = 8.0
ENDED_S: Final = 60.0
LISTING_LAG_S: Final = 1.0
LOOK_S: Final = 0.25
LATE_SHARE: Final = 0.15
"""Share of attachments whose descriptor is written so late that it comes shortly before its deletion."""
GROWN_SHARE: Final = 0.3
"""Share of detachments of which somebody adds a partition to the topic after they were decided."""
TOPICS_MAX: Final = 6
PARTITIONS_MAX: Final = 3
_TOPIC_ID: Final = re.compile(r"/([0-9a-f]{32})[/.]")


@dataclass(frozen=True, slots=True, kw_only=True)
class MadePartition:
    """A partition elsewhere: batches that follow one another."""

    base_offset: int
    log_start_offset: int
    contents: Sequence[bytes]

    @property
    def stored_bytes(self) -> int:
        return sum(map(len, self.contents))

    async def batches(self) -> AsyncIterator[Sequence[Buffer]]:
        for first in range(0, len(self.contents), 2):
            await asyncio.sleep(0.005)
            yield self.contents[first : first + 2]


class AttachmentStep:
    """One run of the step."""

    def __init__(self, history: Scenario) -> None:
        self._history = history
        self._world, self._audit, self._bucket = history.world, history.audit, history.bucket
        self._operator = Machine(self._world, "operator-0", self._operate)
        self._operator.clock = SimulatedClock(self._world.loop)
        self._second = Bucket()
        self._turns = 0
        self._stop = False
        self._sources: dict[UUID, TopicSource] = {}
        """The source of each topic, whether it was attached or not."""
        self._detached: dict[UUID, tuple[Topic, list[ManifestPointer], frozenset[str]]] = {}
        """The topics that the bucket keeps by itself, with all objects that they need."""
        self._last_topics: dict[UUID, Topic] = {}
        """The last record of each topic: the pointers of a deleted topic may change until its final deletion removes them."""
        self._reserved_again: UUID | None = None
        """The detached topic whose reservation has come back with an old copy of metadata."""
        self._manifests: dict[str, Manifest] = {}
        """By pointer key: the newest committed manifest."""

    async def run(self) -> None:
        self._bucket.has_locks = True
        self._history.second = self._second
        self._second.has_locks = True
        self._second.on_deleted = self._deleting(lambda keys: None, self._second)
        self._history.on_look = self._look
        former, self._bucket.on_deleted = self._bucket.on_deleted, self._deleting(self._bucket.on_deleted, self._bucket)
        noted = self._audit.on_committed

        def committed(entry: Any, changes: Sequence[Change], records: Mapping[str, MetadataRecord]) -> None:
            noted(entry, changes, records)
            self._committed(changes, records)

        self._audit.on_committed = committed
        for machine in self._history.tiering:
            machine.crash()
            machine.boot()
        with roles.merges_of_few_segments(), roles.deletions_in_steps():
            await self._under_faults()
            await self._until_ended()
            if self._world.decides("marked after it was detached"):
                await self._history.in_checker(LateMarker(self._world, self._bucket, self._audit.records).run)
        if self._detached and self._world.decides("reserved again"):
            await self._history.in_checker(self._reserve_again)
            await self._until_ended()
        await self._until_copied()
        # Listings show the last writes, too.
        await self._history.pass_time(LISTING_LAG_S)
        await self._history.in_checker(self._bucket_is_right)
        self._bucket.on_deleted = former

    async def _under_faults(self) -> None:
        plan = NemesisPlan(crash=0.5, stop=0.2, partition=0.05, one_way=0, lossy=0, clock_jump=0, pause_mean_s=0.9)
        nemesis = Nemesis(self._world, [self._operator, *self._history.tiering], plan, name="attachments")
        self._operator.boot()
        task = asyncio.get_running_loop().create_task(nemesis.run())
        if self._world.decides("attachments-store"):
            for bucket in (self._bucket, self._second):
                bucket.faults = StoreFaults(
                    unavailable=0.02,
                    answer_lost=0.02,
                    damaged=0.02,
                    truncated=0.02,
                    happens_later=0.01,
                    listing_lag_s=LISTING_LAG_S,
                )
        await self._history.pass_time(FAULTS_S)
        self._bucket.faults = self._second.faults = StoreFaults()
        nemesis.stop()
        task.cancel()
        self._stop = True
        for machine in self._history.tiering:
            machine.boot()
        async with asyncio.timeout(ENDED_S):
            await self._operator.ended.wait()
        if (failure := self._operator.failure) is not None:
            raise AssertionError(f"{self._operator.name} failed: {failure!r}") from failure

    async def _until_ended(self) -> None:
        """Wait until workers have shown, given up and deleted what there is to show, to give up and to delete."""
        until = self._world.loop.time() + ENDED_S
        kinds = (PendingTopic, DeletedTopic, RestoredTopic)
        while waiting := [each for each in self._audit.records.values() if isinstance(each, kinds)]:
            assert self._world.loop.time() < until, f"{waiting[0]} is still there"
            await self._history.pass_time(LOOK_S)

    async def _reserve_again(self, machine: Machine, ports: Ports) -> None:
        """Restore what metadata had of a detached topic while it was being attached: a reservation, which has expired since."""
        topic, _, _ = self._world.random("attachments/reserved again").choice(list(self._detached.values()))
        self._reserved_again = topic.topic_id
        client = await roles.connect_metadata(ports)
        reserved = PendingTopic(topic_id=topic.topic_id, name=topic.name, expires_at_ms=1)
        await client.propose(Command(updates=(Put(record=reserved),)), TIMEOUT_S)

    async def _until_copied(self) -> None:
        """Wait until the second copy has all of what was detached."""
        until = self._world.loop.time() + ENDED_S
        while lacking := self._not_copied():
            assert self._world.loop.time() < until, f"{lacking[0]} is not in the second copy, and its topic is detached"
            await self._history.pass_time(LOOK_S)

    def _not_copied(self) -> list[str]:
        wanted = [key for _, _, objects in self._detached.values() for key in objects]
        wanted += [marker_key(each.object_key) for _, pointers, _ in self._detached.values() for each in pointers]
        for topic_id in self._detached:
            wanted += [key for key in self._bucket.objects if key.startswith(topic_prefix(topic_id))]
        return sorted(key for key in wanted if key not in self._second.objects)

    # -- the operator

    async def _operate(self, machine: Machine, ports: Ports) -> None:
        client = await roles.connect_metadata(ports)
        acts = (self._attach, self._attach_again, self._append, self._detach, self._delete)
        while not self._stop:
            self._turns += 1
            chance = self._world.random(f"attachments/{self._turns}")
            (act,) = chance.choices(acts, (5, 1, 4, 3, 2))
            if self._world.decides(f"attachments#{self._turns}"):
                try:
                    await act(client, ports, chance)
                except StratalogError as failure:
                    self._world.note(f"  {act.__name__}: {failure!r}")
            await asyncio.sleep(chance.uniform(0.0, 0.2))

    async def _attach(self, client: QuorumClient, ports: Ports, chance: random.Random) -> None:
        if len(self._topics(client)) >= TOPICS_MAX:
            return
        configs = {
            "retention.ms": chance.choice(["-1", "9000"]),
            **chance.choice([{}, {"stratalog.tier.compression": "zstd"}, {"stratalog.tier.encryption.key": "k1"}]),
            **chance.choice([{}, {"stratalog.tier.segment.bytes": "250"}]),
        }
        if chance.random() < 0.6:
            mode, lock_ms = chance.choice(["governance", "compliance"]), chance.randint(3_000, 5_000)
            if lock_ms % LONG_LOCK_EVERY == 0:
                lock_ms += LONGER_MS
            configs |= {"stratalog.tier.lock.mode": mode, "stratalog.tier.lock.ms": str(lock_ms)}
            # By their size segments expire while they are locked.
            configs |= chance.choice([{}, {"retention.bytes": "300"}])
        topic = Topic(
            name=f"attached-{self._turns}", topic_id=UUID(int=chance.getrandbits(128)), partition_count=chance.randint(1, 2),
            replication_factor=1, configs=configs,
        )  # fmt: skip
        now_ms = ports.clock.wall_ms()
        found = {index: _made(chance, now_ms) for index in range(topic.partition_count) if chance.random() < 0.9}
        for index, partition in found.items():
            self._note_line(topic, index, partition.base_offset, [(content, now_ms) for content in partition.contents])
        partitions: dict[int, PartitionSource] = dict(found.items())
        await self._attach_from(
            client, ports, topic, TopicSource(name="source", partition_count=topic.partition_count, partitions=partitions)
        )

    async def _attach_again(self, client: QuorumClient, ports: Ports, chance: random.Random) -> None:
        """Attach what was detached before, as another topic."""
        if not self._detached or len(self._topics(client)) >= TOPICS_MAX:
            return
        topic, _, _ = chance.choice(list(self._detached.values()))
        # Attaching from a bucket trusts its listing: supported stores list every completed write, and this one may lag.
        await asyncio.sleep(LISTING_LAG_S)
        source = await stored_topic(self._store(ports), str(topic.topic_id), ports.background)
        new = Topic(
            name=f"again-{self._turns}", topic_id=UUID(int=chance.getrandbits(128)), partition_count=source.partition_count,
            replication_factor=1, configs=topic.configs,
        )  # fmt: skip
        for index, partition in source.partitions.items():
            line = self._audit.lines[log_key(topic.topic_id, index)]
            batches = [self._history.ledgers.batches[line[base]] for base in sorted(line) if base >= partition.base_offset]
            self._note_line(new, index, partition.base_offset, [(each.content, each.timestamp_ms) for each in batches])
        await self._attach_from(client, ports, new, source)

    async def _attach_from(self, client: QuorumClient, ports: Ports, topic: Topic, source: TopicSource) -> None:
        self._sources[topic.topic_id] = source
        settings = TieringSettings(worker_id="attach", block_bytes=200)
        attach_ports = AttachPorts(
            metadata=client, store=self._store(ports), clock=ports.clock, random=ports.random, background=ports.background,
            settings=settings,
        )  # fmt: skip
        self._world.note(f"attaching {topic.name} ({topic.topic_id.hex}): {topic.configs}")
        is_late = self._world.random(f"attachments/{self._turns}/late").random() < LATE_SHARE
        if is_late and self._world.decides(f"late descriptor#{self._turns}"):
            self._bucket.faults.is_late = lambda key: key.startswith(topic_prefix(topic.topic_id))
        await attach(attach_ports, topic, source, expiry_ms=EXPIRY_MS)
        self._world.note(f"{topic.name} is attached")

    def _note_line(self, topic: Topic, index: int, base_offset: int, batches: Sequence[tuple[bytes, int]]) -> None:
        """Let the audit know the batches, each with its time, as if they had been in ledgers."""
        line = self._audit.lines.setdefault(log_key(topic.topic_id, index), {})
        offset = base_offset
        for content, timestamp_ms in batches:
            line[offset], offset = self._history.note_batch(offset, content, timestamp_ms)

    async def _append(self, client: QuorumClient, ports: Ports, chance: random.Random) -> None:
        for topic in self._topics(client):
            for index in range(topic.partition_count):
                await self._history.owner.append(client, ports, topic, index)

    async def _detach(self, client: QuorumClient, ports: Ports, chance: random.Random) -> None:
        if not (topics := self._topics(client)):
            return
        topic = chance.choice(topics)
        if self._world.random(f"attachments/{self._turns}/grown").random() < GROWN_SHARE:
            await self._grow(client, ports, topic)
        await detach(client, self._store(ports), ports.clock, topic, TIMEOUT_S)

    async def _grow(self, client: QuorumClient, ports: Ports, topic: Topic) -> None:
        """Add a partition with records to a topic whose detachment was decided before."""
        if topic.partition_count >= PARTITIONS_MAX:
            return
        index, found = topic.partition_count, client.view.get(topic.key())
        assert found is not None
        grown = msgspec.structs.replace(topic, partition_count=index + 1)
        added = (Partition(topic_id=topic.topic_id, index=index), Log(topic_id=topic.topic_id, index=index))
        unchanged = VersionIs(key=topic.key(), version=found.version)
        updates = tuple(Put(record=record) for record in (grown, *added))
        await client.propose(Command(updates=updates, requirements=(unchanged,)), TIMEOUT_S)
        await self._history.owner.append(client, ports, grown, index)
        self._world.note(f"{topic.name} has {grown.partition_count} partitions")

    async def _delete(self, client: QuorumClient, ports: Ports, chance: random.Random) -> None:
        if not (topics := self._topics(client)):
            return
        topic, now_ms = chance.choice(topics), ports.clock.wall_ms()
        found = client.view.get(topic.key())
        assert found is not None
        unchanged = require_unlocked(topic, client.view, now_ms)
        restorable_ms = chance.choice([0, 1_000])
        await client.propose(delete_topic(client.view, topic, found.version, now_ms, restorable_ms, unchanged), TIMEOUT_S)
        self._world.note(f"{topic.name} is deleted")

    def _topics(self, client: QuorumClient) -> list[Topic]:
        return sorted((each for each in client.view.all(Topic) if each.topic_id in self._sources), key=lambda each: each.name)

    def _store(self, ports: Ports) -> SimulatedStore:
        return SimulatedStore(self._bucket, ports.loop, ports.random)

    # -- while it runs

    def _committed(self, changes: Sequence[Change], records: Mapping[str, MetadataRecord]) -> None:
        after = {change.key: change.after.record for change in changes if change.after is not None}
        before = {change.key: change.before.record for change in changes if change.before is not None}
        self._last_topics.update({each.topic_id: each for each in after.values() if isinstance(each, Topic)})
        for record in after.values():
            if isinstance(record, ManifestPointer) and record.topic_id in self._sources:
                self._check_locks(record)
        for key in before.keys() - after.keys():
            gone = before[key]
            if isinstance(gone, PendingTopic):
                self._reservation_ended(gone, after)
            elif isinstance(gone, Topic) and not any(isinstance(each, DeletedTopic) for each in after.values()):
                self._topic_detached(gone, records)

    def _reservation_ended(self, pending: PendingTopic, after: Mapping[str, MetadataRecord]) -> None:
        """Require that the topic that was attached is whole."""
        topic = next((each for each in after.values() if isinstance(each, Topic)), None)
        if topic is None:
            self._world.coverage.meet(ATTACHMENT_DIED)
            return
        self._world.coverage.meet(ATTACHED)
        source = self._sources[topic.topic_id]
        for index in range(topic.partition_count):
            log, pointer = (after.get(key(topic.topic_id, index)) for key in (log_key, manifest_pointer_key))
            partition = source.partitions.get(index)
            start = partition.log_start_offset if partition is not None else 0
            self._audit.require(
                isinstance(log, Log) and log.log_start_offset == start, f"{topic.name}-{index} does not begin at {start}: {log}"
            )
            line = self._audit.lines.get(log_key(topic.topic_id, index), {})
            end = max((self._history.ledgers.batches[each].end_offset for each in line.values()), default=0)
            found = (pointer.start_offset, pointer.end_offset) if isinstance(pointer, ManifestPointer) else (0, 0)
            wanted = (partition.base_offset, end) if partition is not None and line else (0, 0)
            self._audit.require(found == wanted, f"{topic.name}-{index} was attached from {found}, its source is {wanted}")

    def _topic_detached(self, topic: Topic, records: Mapping[str, MetadataRecord]) -> None:
        """Require that all of the topic is in the bucket."""
        pointers = []
        for index in range(topic.partition_count):
            pointer = records.get(manifest_pointer_key(topic.topic_id, index))
            line = self._audit.lines.get(log_key(topic.topic_id, index), {})
            end = max((self._history.ledgers.batches[each].end_offset for each in line.values()), default=0)
            if isinstance(pointer, ManifestPointer):
                pointers.append(pointer)
            cold_end = pointer.end_offset if isinstance(pointer, ManifestPointer) else 0
            self._audit.require(cold_end == end, f"{topic.name}-{index} was detached at {end}, and is cold up to {cold_end}")
        objects = frozenset().union(*(self._audit.referenced_by(pointer) for pointer in pointers))
        self._detached[topic.topic_id] = (topic, pointers, objects)
        self._world.coverage.meet(DETACHED)

    def _check_locks(self, pointer: ManifestPointer) -> None:
        """Require that each object of the history is locked as the topic wants it."""
        if not pointer.content and pointer.object_key not in self._bucket.objects:
            return  # the audit says so
        manifest, former = decode_manifest(self._bucket.manifest_content(pointer)), self._manifests.get(pointer.key())
        self._manifests[pointer.key()] = manifest
        policy = tier_policy(self._last_topics[pointer.topic_id].configs)
        known = {entry.key: entry for entry in former.segments} if former is not None else {}
        now_ms = self._operator.clock.wall_ms()
        for entry in known.values():
            left_ms = entry.options.lock_until_ms - now_ms
            is_expired = entry.end_offset <= manifest.start_offset
            self._audit.require(not is_expired or left_ms <= 0, f"{entry.key} expired, and is locked for {left_ms} ms")
            if is_expired and entry.options.lock_until_ms:
                self._world.coverage.meet(LOCKED_EXPIRED)
        for entry in manifest.segments:
            lock = entry_lock(entry)
            self._audit.require(self._bucket.lock_of(entry.key) == lock, f"{entry.key} is not locked as its entry says: {lock}")
            if entry.key in known:
                continue
            sources = [each for each in known.values() if entry.base_offset <= each.base_offset < entry.end_offset]
            if entry.kind is SegmentKind.RAW and not sources:
                self._audit.require((policy.lock_mode is None) == (lock is None), f"{entry.key} has the lock {lock}: {policy}")
                continue
            last = joined(map(entry_lock, sources))
            ends_ms = (0 if each is None else each.until_ms for each in (last, lock))
            allowed_ms, until_ms = ends_ms
            self._world.coverage.meet(LOCKED_MERGED, until_ms > now_ms)
            is_right = until_ms == allowed_ms or (until_ms == 0 and allowed_ms < now_ms + LOCK_MS_MIN)
            self._audit.require(is_right, f"{entry.key} is locked until {until_ms}, what it replaced until {allowed_ms}")
        self._audit.require(pointer.lock_until_ms == manifest.lock_until_ms, f"{pointer.key()} does not tell its lock")
        lasts_ms = max((entry.options.lock_until_ms for entry in manifest.segments), default=0)
        if lasts_ms < now_ms + LOCK_MS_MIN:
            return
        stored = [] if pointer.content else [pointer.object_key]
        own = [*stored, *(ref.key for ref in manifest.pages), *(ref.key for ref in manifest.tree.pages)]
        for key in own:
            held = self._bucket.lock_of(key)
            self._audit.require(held is not None and held.until_ms >= lasts_ms, f"{key} is locked by {held}, not {lasts_ms}")
        self._audit.require(manifest.lock_until_ms >= lasts_ms, f"{pointer.key()} is locked until {manifest.lock_until_ms}")

    def _deleting(self, check: Callable[[Sequence[str]], None], bucket: Bucket) -> Callable[[Sequence[str]], None]:
        """Check each deletion from ``bucket`` before it takes effect, by ``check`` first."""

        def deleting(keys: Sequence[str]) -> None:
            check(keys)
            now_ms = self._operator.clock.wall_ms()
            reserved = {each.topic_id.hex for each in self._audit.records.values() if isinstance(each, PendingTopic)}
            # A topic that is only reserved again may still have a marker from the step before, which nobody needs.
            shown = deletion_marker_key(self._reserved_again) if self._reserved_again is not None else ""
            kept = {key: topic.name for topic, _, objects in self._detached.values() for key in objects}
            for key in keys:
                until_ms = bucket.locked_until_ms(key, now_ms)
                self._audit.require(not until_ms, f"{key} was to be deleted, and is locked for {until_ms - now_ms} ms")
                self._audit.require(key not in kept, f"{key} of the detached topic {kept.get(key)} was deleted")
                found = _TOPIC_ID.search(key)
                is_reserved = found is not None and found.group(1) in reserved and key != shown
                self._audit.require(not is_reserved, f"{key} was deleted while its topic was being attached")
                if bucket.lock_of(key) is not None:
                    self._world.coverage.meet(LOCKED_DELETED)

        return deleting

    def _look(self) -> None:
        """Require that a topic that is being attached is hidden from readers of the bucket."""
        for pending in [each for each in self._audit.records.values() if isinstance(each, PendingTopic)]:
            is_described = any(key.startswith(topic_prefix(pending.topic_id)) for key in self._bucket.objects)
            is_hidden = deletion_marker_key(pending.topic_id) in self._bucket.objects
            may_be_shown = not is_described or pending.topic_id == self._reserved_again
            self._audit.require(is_hidden or may_be_shown, f"{pending.name} is being attached, and readers see it")

    # -- at the end

    async def _bucket_is_right(self, machine: Machine, ports: Ports) -> None:
        records = self._audit.records.values()
        live = {each.topic_id: each for each in records if isinstance(each, Topic)}
        known = {topic_id.hex for topic_id in (*live, *self._detached)}
        for key in self._bucket.objects:
            found = _TOPIC_ID.search(key)
            assert found is None or found.group(1) in known, f"{key} is in the bucket, and its topic is gone"
        archive = Archive(self._store(ports))
        seen = {each.topic_id for each in await archive.topics()}
        attached = {topic_id for topic_id in live if topic_id in self._sources}
        assert attached | self._detached.keys() <= seen, f"readers of the bucket find {seen}, not {attached} {self._detached}"
        assert seen <= live.keys() | self._detached.keys(), f"readers of the bucket find a topic that was deleted: {seen}"
        reader = ColdReader(self._store(ports), ColdReaderSettings(), ports.clock)
        for topic_id in attached:
            for index in range(live[topic_id].partition_count):
                pointer = self._audit.records.get(manifest_pointer_key(topic_id, index))
                if isinstance(pointer, ManifestPointer):
                    await self._history.read_partition(reader, live[topic_id].name, pointer)
        for topic, pointers, _ in self._detached.values():
            descriptor = await archive.topic(str(topic.topic_id))
            for committed in pointers:
                marked = await archive.pointer(descriptor, committed.index)
                assert marked == committed, f"readers of the bucket find {marked}, the topic was detached at {committed}"
                await self._history.read_partition(reader, topic.name, committed)
        await reader.close()


def _made(chance: random.Random, now_ms: int) -> MadePartition:
    """A partition elsewhere, whose readers may begin within it."""
    base = offset = chance.choice([0, 0, 7])
    contents, starts = [], []
    for _ in range(chance.randint(1, 6)):
        count = chance.randint(1, 3)
        records = [Record(offset=offset + n, timestamp_ms=now_ms, key=None, value=b"%d" % (offset + n)) for n in range(count)]
        contents.append(bytes(build_batch(records)))
        starts.append(offset)
        offset += count
    return MadePartition(base_offset=base, log_start_offset=chance.choice([base, base, starts[-1]]), contents=contents)
