"""Attaches a topic's history from elsewhere to a cluster, as a new topic: all of it by one command, or nothing.

The order is: reserve the topic in metadata (a ``PendingTopic``), hide it from readers of the bucket, write its segments and
read each of them back, write manifests and their commit markers, create the topic in metadata. A tiering worker then shows it
to readers of the bucket. If the process dies before the command, its reservation expires, and a worker deletes what was written
as it does for a deleted topic. The topic has a new id, so nothing of another topic can be touched.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import msgspec

from stratalog_core.bounded_map import bounded_map
from stratalog_core.errors import Conflict, OutcomeUnknown, StratalogError, Unavailable
from stratalog_core.ports import Background, Buffer, Clock, Random
from stratalog_metadata.client.api import MetadataClient, MetadataView
from stratalog_metadata.client.guarded_updates import propose_guarded
from stratalog_metadata.client.topic_defaults import topic_defaults
from stratalog_metadata.client.topic_deletion import never_deleted
from stratalog_metadata.records import Bookie, DeletedTopic, PendingTopic, Topic, configs_in_force, partition_key
from stratalog_metadata.state.commands import ABSENT, Command, Put, VersionIs
from stratalog_metadata.state.guarded_update import Superseded
from stratalog_metadata.topic_rules.topic_configs import check_topic_configs
from stratalog_metadata.topic_rules.topic_names import check_topic_name
from stratalog_tiering.attach.source import TopicSource
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
from stratalog_tiering.offload.ownership import check_claim, cluster_id_in
from stratalog_tiering.offload.topic_descriptors import describe_topic, descriptor_of
from stratalog_tiering.offload.upload import StreamedUpload, finishing
from stratalog_tiering.store import ObjectStore

EXPIRY_MS: Final = 24 * 3_600_000
"""Time without a sign of life after which an attachment is given up."""
RENEWAL_SHARE: Final = 1 / 24
"""Share of the expiry that is between two signs of life, at least."""
COPIES: Final = 3
_UNLIMITED_RETENTION: Final = {"retention.ms": "-1"}
_TIMEOUT_S: Final = 60.0
_PARTITIONS_AT_ONCE: Final = 2
_WRITER: Final = "attach"
OnBytes = Callable[[int], None]
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentPorts:
    """The bucket, and the limits of uploads, which are those of a tiering worker."""

    store: ObjectStore
    clock: Clock
    random: Random
    background: Background
    settings: TieringSettings

    def random_id(self) -> int:
        return self.random.getrandbits(64)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachPorts(SegmentPorts):
    """The same, and the cluster."""

    metadata: MetadataClient


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved:
    """A topic that is being attached; plain values, for several processes that write it.

    ``configs`` are those in force, of the topic and of the cluster. ``version`` is that of ``pending``.
    """

    topic: Topic
    configs: dict[str, str]
    cluster_id: str
    owner_number: int
    pending: PendingTopic
    version: int


def new_topic(
    view: MetadataView, name: str, partition_count: int, configs: Mapping[str, str], replication_factor: int | None
) -> Topic:
    """A topic with a new id, to be attached; by default with three copies of new records, or as many as there are bookies.

    Records may be older than the default retention, which would remove them at once: it is unlimited unless ``configs`` say
    otherwise. Raises ``Invalid`` for a name or configs that brokers would refuse.
    """
    check_topic_name(name)
    bookies = sum(1 for _ in view.all(Bookie))
    topic = Topic(
        name=name,
        topic_id=uuid.uuid4(),
        partition_count=partition_count,
        replication_factor=replication_factor or min(COPIES, max(1, bookies)),
        configs={**_UNLIMITED_RETENTION, **configs},
    )
    check_topic_configs(topic.configs, topic.replication_factor, defaults=topic_defaults(view))
    return topic


async def attach(
    ports: AttachPorts,
    topic: Topic,
    source: TopicSource,
    on_bytes: OnBytes = lambda _: None,
    *,
    expiry_ms: int = EXPIRY_MS,
) -> TopicHistory:
    """Write the history of ``source`` to the bucket and create ``topic``, which has a new id; returns what was attached.

    ``on_bytes`` receives the number of bytes of batches read. Without a sign of life for ``expiry_ms`` the attachment is given
    up. Raises ``Conflict`` if the name is taken, ``Invalid`` or ``Corrupt`` if the source cannot be attached as a whole, and
    what the store and metadata raise. After ``OutcomeUnknown`` the topic may exist; after any other error it does not, and a
    worker deletes what was written.
    """
    reservation = _Reservation(ports, await reserve(ports, topic, expiry_ms), expiry_ms)
    writer = SegmentsWriter(ports, reservation.reserved)

    async def partition(index: int) -> PartitionHistory:
        found = source.partitions.get(index)
        if found is None:
            return PartitionHistory(index=index)
        segments = writer.segments(index, found.base_offset, _counted(found.batches(), on_bytes))
        made = [each async for each in reservation.renewed_after_each(segments)]
        return await writer.finish(index, found.base_offset, made, found.log_start_offset)

    async with _given_up_on_failure(ports, lambda: reservation.reserved):
        partitions = await bounded_map(partition, range(topic.partition_count), _PARTITIONS_AT_ONCE)
    try:
        return await finish(ports, reservation.reserved, partitions)
    except OutcomeUnknown:
        raise
    except BaseException:
        await give_up(ports, reservation.reserved)
        raise


@asynccontextmanager
async def _given_up_on_failure(ports: AttachPorts, reserved: Callable[[], Reserved]) -> AsyncIterator[None]:
    """Give the attachment up if writing its objects fails.

    Raises ``Unavailable`` for the ``OutcomeUnknown`` of an object: the object is in doubt, the topic is not.
    """
    try:
        yield
    except BaseException as failure:
        await give_up(ports, reserved())
        if isinstance(failure, OutcomeUnknown):
            raise Unavailable(f"topic {reserved().topic.name!r} is not attached: {failure.message}") from failure
        raise


async def _counted(chunks: AsyncIterator[Sequence[Buffer]], on_bytes: OnBytes) -> AsyncIterator[Sequence[Buffer]]:
    async for chunk in chunks:
        yield chunk
        on_bytes(sum(map(len, chunk)))


async def reserve(ports: AttachPorts, topic: Topic, expiry_ms: int) -> Reserved:
    """Reserve the topic's id for ``expiry_ms``, and hide what will be written under it.

    Raises ``Conflict`` if the name is taken, which ``finish`` checks again, and ``Invalid`` if the bucket is not the cluster's.
    """
    cluster_id = cluster_id_in(ports.metadata)
    owner = await check_claim(ports.store, cluster_id)
    await ports.metadata.refresh(_TIMEOUT_S)
    if ports.metadata.view.get(topic.key()) is not None:
        raise Conflict(f"the cluster has a topic {topic.name!r}: choose another name")
    now_ms = ports.clock.wall_ms()
    pending = PendingTopic(topic_id=topic.topic_id, name=topic.name, expires_at_ms=now_ms + expiry_ms)
    # An attempt without an answer may take effect after the topic was attached: its reservation would expire, and the topic
    # would be deleted.
    absent = (VersionIs(key=key, version=ABSENT) for key in (pending.key(), partition_key(topic.topic_id, 0)))
    command = Command(updates=(Put(record=pending),), requirements=(*absent, never_deleted(topic.topic_id)))
    version = await propose_guarded(ports.metadata, command, pending.key(), _TIMEOUT_S)
    configs = dict(configs_in_force(topic, topic_defaults(ports.metadata.view)))
    reserved = Reserved(
        topic=topic, configs=configs, cluster_id=cluster_id, owner_number=owner.number, pending=pending, version=version
    )
    async with _given_up_on_failure(ports, lambda: reserved):
        hidden = DeletedTopic(topic_id=topic.topic_id, name=topic.name, deleted_at_ms=now_ms)
        await mark_deleted(ports.store, hidden, now_ms, cluster_id)
        # With the configs in force: if this is given up, they say whether the store is to be asked for locks.
        described: Topic = msgspec.structs.replace(topic, configs=configs)
        await describe_topic(ports.store, described)
    return reserved


async def finish(ports: AttachPorts, reserved: Reserved, partitions: Sequence[PartitionHistory]) -> TopicHistory:
    """Create the topic with the history of all of its partitions.

    Raises ``Conflict``, ``Invalid`` if another cluster has taken the bucket over, ``Unavailable``, ``OutcomeUnknown``.
    """
    topic = reserved.topic
    history = TopicHistory(descriptor=descriptor_of(topic), partitions=tuple(partitions))
    await check_claim(ports.store, reserved.cluster_id)
    command = attach_from_bucket(topic, history, reserved.owner_number, reserved.pending, reserved.version)
    # Known by the topic: that the reservation is gone does not prove that this command ended it.
    await propose_guarded(ports.metadata, command, topic.key(), _TIMEOUT_S)
    return history


async def give_up(ports: AttachPorts, reserved: Reserved) -> None:
    """Have a worker delete what was written. A failure is only logged: the reservation expires."""
    command = expire_pending_topic(reserved.pending, reserved.version, ports.clock.wall_ms())
    try:
        await propose_guarded(ports.metadata, command, reserved.pending.key(), _TIMEOUT_S)
    except StratalogError as failure:
        name = reserved.pending.name
        _log.warning("what was written of topic %s is deleted when its reservation expires: %s", name, failure)


class _Reservation:
    """A reservation that is renewed by the process that writes everything."""

    def __init__(self, ports: AttachPorts, reserved: Reserved, expiry_ms: int) -> None:
        self._ports = ports
        self._expiry_ms = expiry_ms
        self._turn = asyncio.Lock()
        self.reserved = reserved

    async def renewed_after_each(self, segments: AsyncIterator[MadeSegment]) -> AsyncIterator[MadeSegment]:
        """Yield ``segments``. Raises ``Conflict`` if the reservation has expired."""
        async for made in segments:
            async with self._turn:
                await self._renew()
            yield made

    async def _renew(self) -> None:
        """Postpone the expiry if it is not almost as far away as it can be."""
        before = self.reserved
        expires_at_ms = self._ports.clock.wall_ms() + self._expiry_ms
        if expires_at_ms - before.pending.expires_at_ms < RENEWAL_SHARE * self._expiry_ms:
            return
        renewed = msgspec.structs.replace(before.pending, expires_at_ms=expires_at_ms)
        unchanged = VersionIs(key=renewed.key(), version=before.version)
        command = Command(updates=(Put(record=renewed),), requirements=(unchanged,))
        try:
            version = await propose_guarded(self._ports.metadata, command, renewed.key(), _TIMEOUT_S)
        except Superseded as gone:
            raise Conflict(f"the attachment of {renewed.name!r} was given up after {self._expiry_ms / 3_600_000:g} h") from gone
        self.reserved = replace(before, pending=renewed, version=version)


class SegmentsWriter:
    """Writes the segments and the first manifests of a topic that is being attached."""

    def __init__(self, ports: SegmentPorts, reserved: Reserved) -> None:
        self._ports = ports
        self._topic = reserved.topic
        self._cluster_id = reserved.cluster_id
        self._policy = tier_policy(reserved.configs)
        self._source = ManifestSource(ports.store, background=ports.background)

    async def segments(
        self, index: int, base_offset: int, chunks: AsyncIterator[Sequence[Buffer]]
    ) -> AsyncIterator[MadeSegment]:
        """Write the batches of a partition, and yield each segment once it was read back. Raises as ``attach`` does."""
        settings = self._ports.settings
        sizes = SegmentSizes(
            block_bytes=settings.block_bytes, segment_bytes=self._policy.segment_bytes_max(settings.segment_bytes)
        )
        job = AttachJob(self._cluster_id, self._topic, index, base_offset, self._policy, sizes)
        batches = _Batches(chunks)
        while not await batches.are_over():
            made = await self._segment(job, index, batches)
            await require_sound(
                self._ports.store, self._source, made.entry, self._ports.background, reads_at_once=settings.verify_reads_at_once
            )
            yield made

    async def finish(
        self, index: int, base_offset: int, segments: Sequence[MadeSegment], log_start_offset: int = 0
    ) -> PartitionHistory:
        """Write the manifest of all segments of a partition, and its commit marker.

        Without segments, it tells where the partition goes on, unless that is at offset 0.
        """
        if not segments and not base_offset:
            return PartitionHistory(index=index)
        topic = self._topic
        first = empty_manifest(topic.topic_id, topic.name, index, base_offset, self._cluster_id)
        edit = ManifestEdit(Previous(manifest=first), writer=_WRITER, random_id=self._ports.random_id)
        for made in segments:
            await self._ports.background.run(partial(edit.append, made.entry, made.leaves))
            edit.move_to_pages()
        new = edit.finish(created_at_ms=self._ports.clock.wall_ms())
        pointer = await store_manifest(self._ports.store, self._source, new)
        await mark_committed(self._ports.store, pointer, self._ports.clock.wall_ms())
        return PartitionHistory(
            index=index, pointer=pointer, log_start_offset=log_start_offset, record_count=new.manifest.record_count,
            leader_epoch=segments[-1].entry.leader_epochs[-1].epoch if segments else 0,
        )  # fmt: skip

    async def _segment(self, job: AttachJob, index: int, batches: _Batches) -> MadeSegment:
        ports, settings = self._ports, self._ports.settings
        key = job.next_key(ports.random_id())
        encryption = await new_encryption(ports.store, self._topic.topic_id, index, key, self._policy.encryption_key)
        job.begin(key, encryption)
        lock = new_lock(self._policy, ports.clock.wall_ms())
        upload = StreamedUpload(
            ports.store, key, part_bytes=settings.upload_part_bytes, parts_at_once=settings.upload_parts_at_once,
            storage_class=self._policy.storage_class, lock=lock,
        )  # fmt: skip
        async with finishing(upload):
            while not job.is_complete and not await batches.are_over():
                batches.take(await ports.background.run(partial(job.add, batches.waiting)))
                await upload.write(job.take_parts())
            made, parts = await ports.background.run(partial(job.finish, ports.clock.wall_ms()))
            await upload.write(parts)
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

    def take(self, count: int) -> None:
        """Remove the first ``count`` batches."""
        self.waiting = self.waiting[count:]
