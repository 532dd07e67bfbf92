"""Finds the topics that earlier owners of the bucket deleted, and has them collected like the cluster's own.

Only a deletion marker of another cluster counts, of a topic that metadata does not have in any state, and none that was written
late, after the topic had been restored and detached. A topic whose history went on after its marker was written is left to the
operator: it may have been restored just before that cluster was lost.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import Final
from uuid import UUID

import msgspec

from stratalog_core.bounded_map import bounded_map
from stratalog_core.errors import Corrupt, Invalid, NoSuchObject, NotFound
from stratalog_core.moments import utc_text
from stratalog_metadata.client.api import MetadataClient
from stratalog_metadata.records import DeletedTopic, deleted_topic_key, partition_key, pending_topic_key, restored_topic_key
from stratalog_metadata.state.commands import ABSENT, Command, Put, Requirement, VersionIs
from stratalog_tiering.cold.archive import is_hidden, newest_descriptor_key, read_topic
from stratalog_tiering.copies.deletions import known_topics
from stratalog_tiering.core.commands import Guards
from stratalog_tiering.core.deletion_markers import earlier_deletion, is_of_earlier_owner
from stratalog_tiering.format.descriptor import DeletionMarker, OwnerDescriptor, decode_descriptor, encode_descriptor
from stratalog_tiering.format.object_keys import TOPICS_PREFIX, deleted_topic_of, deletion_marker_key, topic_prefixes
from stratalog_tiering.offload.ports import WorkerPorts
from stratalog_tiering.store import ObjectStore

_READS_AT_ONCE: Final = 16
_TIMEOUT_S: Final = 30.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierDeletion:
    """``deleted`` is the record for the topic; ``refused`` says why it may not be collected; empty: it may."""

    deleted: DeletedTopic
    refused: str = ""


async def learn_earlier_deletions(ports: WorkerPorts, guards: Guards) -> None:
    """Record in metadata what earlier owners of the bucket deleted, so that workers collect it.

    Raises ``Conflict`` if a topic became known meanwhile, ``Invalid`` if the bucket is another cluster's, ``Unavailable``,
    ``OutcomeUnknown``.
    """
    await ports.bucket.confirm()
    for each in await earlier_deletions(ports.store, ports.metadata, ports.bucket.owner):
        topic_id, name = each.deleted.topic_id, each.deleted.name
        if each.refused:
            _log.warning("deleted topic %s (%s) of an earlier owner of the bucket stays: %s", name, topic_id, each.refused)
            continue
        kept_until = utc_text(each.deleted.deleted_at_ms)
        _log.info("topic %s (%s) was deleted by an earlier owner; its grace period begins at %s", name, topic_id, kept_until)
        requirements = (*guards, *_is_unknown(topic_id))
        await ports.metadata.propose(Command(updates=(Put(record=each.deleted),), requirements=requirements))


async def earlier_deletions(store: ObjectStore, metadata: MetadataClient, owner: OwnerDescriptor) -> list[EarlierDeletion]:
    """The deleted topics of earlier owners that metadata does not have in any state. Raises ``Unavailable``."""
    if not owner.number:
        return []
    marked = [topic_id async for key in store.list_keys(TOPICS_PREFIX) if (topic_id := deleted_topic_of(key))]
    # After the listing: the record of a deletion goes after its marker, so what is unknown now has no marker, or is nobody's.
    await metadata.refresh(_TIMEOUT_S)
    known = known_topics(metadata.view)
    unknown = [topic_id for topic_id in marked if topic_id not in known]
    found = await bounded_map(partial(_find, store, owner), unknown, _READS_AT_ONCE)
    return [each for each in found if each is not None]


async def confirm_deletion(
    store: ObjectStore, metadata: MetadataClient, owner: OwnerDescriptor, topic_id: UUID, now_ms: int
) -> EarlierDeletion:
    """Have a topic collected whose history went on after its deletion: its operator has decided that it is not needed.

    Its marker is written anew, so that its periods begin again, after the end of its history. Raises ``NotFound`` if there is
    nothing to decide, ``Corrupt`` if the marker or the topic's descriptor cannot be read, ``Unavailable``, ``OutcomeUnknown``.
    """
    found = [each for each in await earlier_deletions(store, metadata, owner) if each.deleted.topic_id == topic_id]
    if not found or not found[0].refused:
        raise NotFound(f"no topic {topic_id} of an earlier owner of {store.url} waits for a decision: see `stratalog tier gc`")
    key = deletion_marker_key(topic_id)
    marker = decode_descriptor(await store.get(key), DeletionMarker, key)
    await _check_descriptor(store, topic_id)
    again: DeletionMarker = msgspec.structs.replace(marker, deleted_at_ms=max(marker.deleted_at_ms, now_ms))
    await store.put(key, [encode_descriptor(again)], if_absent=False)
    return EarlierDeletion(deleted=found[0].deleted)


async def _find(store: ObjectStore, owner: OwnerDescriptor, topic_id: UUID) -> EarlierDeletion | None:
    key = deletion_marker_key(topic_id)
    try:
        marker = decode_descriptor(await store.get(key), DeletionMarker, key)
        written_ms = (await store.head(key)).last_modified_ms
        await _check_descriptor(store, topic_id)
    except NoSuchObject:
        return None
    except (Corrupt, Invalid) as unreadable:
        deleted = DeletedTopic(topic_id=topic_id, name=await _name(store, topic_id), deleted_at_ms=0)
        return EarlierDeletion(deleted=deleted, refused=unreadable.message)
    if not is_of_earlier_owner(marker, owner) or not await is_hidden(store, topic_id):
        return None
    deleted = earlier_deletion(marker, written_ms, await _name(store, topic_id), owner)
    committed_ms = [info.last_modified_ms async for info in store.list(_manifests_of(topic_id))]
    if max(committed_ms, default=0) <= written_ms:
        return EarlierDeletion(deleted=deleted)
    return EarlierDeletion(
        deleted=deleted,
        refused="its history went on after its deletion, which may have been undone: look at it with `stratalog serve-archive"
        f" --deleted`; to keep it, delete {key} and restore the topic; if it is not needed, run `stratalog tier gc --deleted"
        f" {topic_id}`",
    )


async def _check_descriptor(store: ObjectStore, topic_id: UUID) -> None:
    """Raise ``Corrupt`` if it cannot be told whether the topic was restored and detached, so that its marker does not count."""
    key = await newest_descriptor_key(store, topic_id)
    try:
        if key is not None:
            await read_topic(store, key)
    except Corrupt as damaged:
        raise Corrupt(
            f"{damaged.message}; it may say that the topic was detached after its deletion: restore it from a copy of the"
            " bucket, or delete it if the topic is not needed"
        ) from damaged


def _manifests_of(topic_id: UUID) -> str:
    *_, manifests = topic_prefixes(topic_id)
    return manifests


async def _name(store: ObjectStore, topic_id: UUID) -> str:
    """The topic's name in its newest descriptor; its id if there is none."""
    try:
        key = await newest_descriptor_key(store, topic_id)
        return (await read_topic(store, key)).name if key is not None else str(topic_id)
    except (Corrupt, Invalid, NoSuchObject):
        return str(topic_id)


def _is_unknown(topic_id: UUID) -> tuple[Requirement, ...]:
    """Require that metadata does not have the topic in any state. A live topic has a first partition."""
    keys = (deleted_topic_key(topic_id), pending_topic_key(topic_id), restored_topic_key(topic_id), partition_key(topic_id, 0))
    return tuple(VersionIs(key=key, version=ABSENT) for key in keys)
