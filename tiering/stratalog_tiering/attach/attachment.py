"""Attaches a topic's history from elsewhere to a cluster, as a new topic: all of it by one command, or nothing.

The order is: reserve the topic in metadata (a ``PendingTopic``), hide it from readers of the bucket, write its segments and
read each of them back, write manifests and their commit markers, create the topic in metadata. A tiering worker then shows it
to readers of the bucket. If the process dies before the command, its reservation expires, and a worker deletes what was written
as it does for a deleted topic. The topic has a new id, so nothing of another topic can be touched.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import msgspec

from stratalog_core.bounded_map import bounded_map
from stratalog_core.errors import Conflict, OutcomeUnknown, StratalogError
from stratalog_core.ports import Background, Buffer, Clock, Random
from stratalog_metadata.client.api import MetadataClient
from stratalog_metadata.client.guarded_updates import propose_guarded
from stratalog_metadata.records import DeletedTopic, PendingTopic, Topic
from stratalog_metadata.state.commands import ABSENT, Command, Put, VersionIs
from stratalog_metadata.state.guarded_update import Superseded
from stratalog_tiering.attach.source import PartitionSource, TopicSource
from stratalog_tiering.cold.manifest_source import ManifestSource
from stratalog_tiering.cold.segment_check import require_sound
from stratalog_tiering.config import TieringSettings
from stratalog_tiering.core.attach_job import AttachJob, MadeSegment, SegmentSizes
from stratalog_tiering.core.locks import new_lock
from stratalog_tiering.core.policy import tier_policy
from stratalog_tiering.core.restoring import PartitionHistory, TopicHistory, attach_from_bucket, expire_pending_topic
from stratalog_tiering.format.manifest import empty_manifest
from stratalog_tiering.format.manifest_edit import ManifestEdit, Previous
from stratalog_tiering.maintenance.deletion import mark_deleted
from stratalog_tiering.offload.commit import store_manifest
from stratalog_tiering.offload.commit_markers import mark_committed
from stratalog_tiering.offload.data_keys import new_encryption
from stratalog_tiering.offload.locks import locked_entry
from stratalog_tiering.offload.ownership import BucketOwnership, check_claim, cluster_id_in
from stratalog_tiering.offload.topic_descriptors import describe_topic, descriptor_of
from stratalog_tiering.offload.upload import StreamedUpload, abort_quietly
from stratalog_tiering.store import ObjectStore

EXPIRY_MS: Final = 24 * 3_600_000
"""Time without a sign of life after which an attachment is given up."""
RENEWAL_MS: Final = 3_600_000
"""Time between two signs of life, at least."""
_TIMEOUT_S: Final = 60.0
_PARTITIONS_AT_ONCE: Final = 2
_WRITER: Final = "attach"
OnBytes = Callable[[int], None]
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachPorts:
    """The cluster, its bucket, and the limits of uploads, which are those of a tiering worker."""

    metadata: MetadataClient
    store: ObjectStore
    clock: Clock
    random: Random
    background: Background
    settings: TieringSettings

    def random_id(self) -> int:
        return self.random.getrandbits(64)


async def attach(ports: AttachPorts, topic: Topic, source: TopicSource, on_bytes: OnBytes = lambda _: None) -> TopicHistory:
    """Write the history of ``source`` to the bucket and create ``topic``, which has a new id; returns what was attached.

    ``on_bytes`` receives the number of bytes of batches read. Raises ``Conflict`` if the name is taken, ``Invalid`` or
    ``Corrupt`` if the source cannot be attached as a whole, and what the store and metadata raise. After ``OutcomeUnknown`` the
    topic may exist; after any other error it does not, and a worker deletes what was written.
    """
    cluster_id = cluster_id_in(ports.metadata)
    owner = await check_claim(ports.store, cluster_id)
    reservation = await _reserve(ports, topic)
    try:
        hidden = DeletedTopic(topic_id=topic.topic_id, name=topic.name, deleted_at_ms=ports.clock.wall_ms())
        await mark_deleted(ports.store, hidden, ports.clock.wall_ms())
        await describe_topic(ports.store, topic)
        writer = _Writer(ports, topic, cluster_id, reservation, on_bytes)

        async def partition(index: int) -> PartitionHistory:
            found = source.partitions.get(index)
            return PartitionHistory(index=index) if found is None else await writer.write(index, found)

        partitions = await bounded_map(partition, range(topic.partition_count), _PARTITIONS_AT_ONCE)
        history = TopicHistory(descriptor=descriptor_of(topic), partitions=tuple(partitions))
        await BucketOwnership(ports.store, ports.metadata, ports.clock, ports.settings.grace_ms, _trust).confirm()
        command = attach_from_bucket(topic, history, owner.number, reservation.pending, reservation.version)
        # Known by the topic: that the reservation is gone does not prove that this command ended it.
        await propose_guarded(ports.metadata, command, topic.key(), _TIMEOUT_S)
    except OutcomeUnknown:
        raise
    except BaseException:
        await reservation.give_up()
        raise
    return history


async def _trust() -> None:
    """The bucket's workers have checked the store."""


async def _reserve(ports: AttachPorts, topic: Topic) -> _Reservation:
    """Reserve the topic's id. Raises ``Conflict`` if the name is taken, which the last command checks again."""
    await ports.metadata.refresh(_TIMEOUT_S)
    if ports.metadata.view.get(topic.key()) is not None:
        raise Conflict(f"the cluster has a topic {topic.name!r}: choose another name")
    pending = PendingTopic(topic_id=topic.topic_id, name=topic.name, expires_at_ms=ports.clock.wall_ms() + EXPIRY_MS)
    command = Command(updates=(Put(record=pending),), requirements=(VersionIs(key=pending.key(), version=ABSENT),))
    version = await propose_guarded(ports.metadata, command, pending.key(), _TIMEOUT_S)
    return _Reservation(ports, pending, version)


class _Reservation:
    """A ``PendingTopic`` and its version."""

    def __init__(self, ports: AttachPorts, pending: PendingTopic, version: int) -> None:
        self._ports = ports
        self._turn = asyncio.Lock()
        self.pending = pending
        self.version = version

    async def renew(self) -> None:
        """Postpone the expiry if it is not almost a day away. Raises ``Conflict`` if the reservation has expired."""
        async with self._turn:
            expires_at_ms = self._ports.clock.wall_ms() + EXPIRY_MS
            if expires_at_ms - self.pending.expires_at_ms < RENEWAL_MS:
                return
            renewed = msgspec.structs.replace(self.pending, expires_at_ms=expires_at_ms)
            unchanged = VersionIs(key=renewed.key(), version=self.version)
            command = Command(updates=(Put(record=renewed),), requirements=(unchanged,))
            try:
                self.version = await propose_guarded(self._ports.metadata, command, renewed.key(), _TIMEOUT_S)
            except Superseded as gone:
                raise Conflict(f"the attachment of {renewed.name!r} was given up after {EXPIRY_MS // 3_600_000} h") from gone
            self.pending = renewed

    async def give_up(self) -> None:
        """Have a worker delete what was written."""
        command = expire_pending_topic(self.pending, self.version, self._ports.clock.wall_ms())
        try:
            await propose_guarded(self._ports.metadata, command, self.pending.key(), _TIMEOUT_S)
        except StratalogError as failure:
            _log.warning("what was written of topic %s is deleted when its reservation expires: %s", self.pending.name, failure)


class _Writer:
    """Writes the partitions of one attachment."""

    def __init__(self, ports: AttachPorts, topic: Topic, cluster_id: str, reservation: _Reservation, on_bytes: OnBytes) -> None:
        self._ports = ports
        self._topic = topic
        self._cluster_id = cluster_id
        self._reservation = reservation
        self._on_bytes = on_bytes
        self._policy = tier_policy(topic.configs)
        self._source = ManifestSource(ports.store, background=ports.background)

    async def write(self, index: int, source: PartitionSource) -> PartitionHistory:
        """Write a partition's segments, manifest and commit marker. Raises as ``attach`` does."""
        settings, topic = self._ports.settings, self._topic
        sizes = SegmentSizes(
            block_bytes=settings.block_bytes, segment_bytes=self._policy.segment_bytes_max(settings.segment_bytes)
        )
        job = AttachJob(self._cluster_id, topic, index, source.base_offset, self._policy, sizes)
        first = empty_manifest(topic.topic_id, topic.name, index, source.base_offset, self._cluster_id)
        edit = ManifestEdit(Previous(manifest=first), writer=_WRITER, random_id=self._ports.random_id)
        batches = _Batches(source.batches())
        while not await batches.are_over():
            made = await self._write_segment(job, index, batches)
            await require_sound(
                self._ports.store, self._source, made.entry, self._ports.background, reads_at_once=settings.verify_reads_at_once
            )
            await self._ports.background.run(partial(edit.append, made.entry, made.leaves))
            edit.move_to_pages()
            await self._reservation.renew()
        if job.next_offset == source.base_offset:
            return PartitionHistory(index=index, log_start_offset=source.base_offset)
        new = edit.finish(created_at_ms=self._ports.clock.wall_ms())
        pointer = await store_manifest(self._ports.store, self._source, new)
        await mark_committed(self._ports.store, pointer, self._ports.clock.wall_ms())
        return PartitionHistory(
            index=index, pointer=pointer, log_start_offset=source.log_start_offset, record_count=new.manifest.record_count,
            leader_epoch=job.last_epoch,
        )  # fmt: skip

    async def _write_segment(self, job: AttachJob, index: int, batches: _Batches) -> MadeSegment:
        ports, settings = self._ports, self._ports.settings
        key = job.next_key(ports.random_id())
        encryption = await new_encryption(ports.store, self._topic.topic_id, index, key, self._policy.encryption_key)
        job.begin(key, encryption)
        lock = new_lock(self._policy, ports.clock.wall_ms())
        upload = StreamedUpload(
            ports.store, key, part_bytes=settings.upload_part_bytes, parts_at_once=settings.upload_parts_at_once,
            storage_class=self._policy.storage_class, lock=lock,
        )  # fmt: skip
        try:
            while not job.is_complete and not await batches.are_over():
                taken = await ports.background.run(partial(job.add, batches.waiting))
                self._on_bytes(batches.take(taken))
                await upload.write(job.take_parts())
            made, parts = await ports.background.run(partial(job.finish, ports.clock.wall_ms()))
            await upload.write(parts)
            await upload.finish()
        except BaseException:
            await abort_quietly(upload)
            raise
        return replace(made, entry=await locked_entry(ports.store, made.entry, lock))


class _Batches:
    """A partition's batches, of which a segment takes as many as fit."""

    def __init__(self, chunks: AsyncIterator[Sequence[Buffer]]) -> None:
        self._chunks = chunks
        self.waiting: Sequence[Buffer] = ()

    async def are_over(self) -> bool:
        """Whether no batch is left; else ``waiting`` has the next ones."""
        while not self.waiting:
            chunk = await anext(self._chunks, None)
            if chunk is None:
                return True
            self.waiting = chunk
        return False

    def take(self, count: int) -> int:
        """Remove the first ``count`` batches; returns their size in bytes."""
        taken, self.waiting = self.waiting[:count], self.waiting[count:]
        return sum(map(len, taken))
