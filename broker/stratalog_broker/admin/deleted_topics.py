"""Restores deleted topics, or makes their deletion final before its time.

Both need the metadata quorum only. The commands are in ``stratalog_metadata.client.topic_deletion``. A restored topic is safe
from the loss of the cluster once a tiering worker has removed its deletion marker from the bucket: ``until_in_bucket``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, TypeVar
from uuid import UUID

import msgspec

from stratalog_broker.admin.errors import InvalidTopic
from stratalog_broker.admin.topic_names import check_topic_name
from stratalog_broker.admin.view_waiting import wait_until
from stratalog_broker.partitions.internal_topics import INTERNAL_TOPICS
from stratalog_core.errors import Conflict, Invalid, NotFound, OutcomeUnknown
from stratalog_metadata.client.api import MetadataClient, MetadataView
from stratalog_metadata.client.guarded_updates import decide_again, propose_guarded
from stratalog_metadata.client.topic_deletion import finish_deletion, restorable_topics, restore_topic
from stratalog_metadata.records import (
    DeletedTopic,
    ManifestPointer,
    TieringWorker,
    Topic,
    deleted_topic_key,
    manifest_pointer_key,
    restored_topic_key,
    topic_key,
)
from stratalog_metadata.state.guarded_update import GONE, Superseded

TIMEOUT_S: Final = 10.0
_Named = TypeVar("_Named", bound=DeletedTopic | Topic)


def deleted_topic(view: MetadataView, wanted: str) -> DeletedTopic:
    """Return the restorable topic that had the name ``wanted``, or has it as its id.

    Raises ``NotFound``, and ``Invalid`` if several deleted topics had the name.
    """
    found = _meant(restorable_topics(view), wanted)
    if not found:
        raise NotFound(f"no deleted topic {wanted!r} can be restored: see `stratalog topic list --deleted`")
    if len(found) > 1:
        ids = ", ".join(str(each.topic_id) for each in found)
        raise Invalid(f"{len(found)} deleted topics were named {wanted!r}: give the id of one of them ({ids})")
    return found[0]


def _meant(topics: Iterable[_Named], wanted: str) -> list[_Named]:
    """Those of ``topics`` whose name is ``wanted``; if there is none, the one whose id it is."""
    known = [*topics]
    named = [each for each in known if each.name == wanted]
    return named or [each for each in known if wanted in (str(each.topic_id), each.topic_id.hex)]


async def undelete(metadata: MetadataClient, wanted: str, new_name: str | None = None, timeout_s: float = TIMEOUT_S) -> Topic:
    """Restore the deleted topic of name or id ``wanted``, under ``new_name`` if given; return its record.

    Call it again after an error: a topic that is restored, and whose deletion marker may still be in the bucket, is returned as
    it is. Raises ``NotFound``, ``Invalid``, ``Conflict`` (the name is taken), ``Unavailable``, ``OutcomeUnknown`` (it may be
    restored).
    """
    try:
        found = deleted_topic(metadata.view, wanted)
    except NotFound:
        for topic in _meant(metadata.view.all(Topic), wanted):
            if new_name in (None, topic.name) and metadata.view.get(restored_topic_key(topic.topic_id)) is not None:
                return topic
        raise
    name, topic_id = new_name or found.name, found.topic_id
    check_topic_name(name)
    if name in INTERNAL_TOPICS:
        raise InvalidTopic(f"topic {name!r} is internal: choose another name with --as")

    async def attempt() -> Topic | None:
        deleted, version = await _read(metadata, topic_id, timeout_s)
        if deleted.topic is None:
            raise NotFound(f"topic {deleted.name!r} can no longer be restored: its deletion is final")
        (taken,) = await metadata.read([topic_key(name)], timeout_s)
        if taken is not None:
            return None
        version = await propose_guarded(metadata, restore_topic(deleted, version, name), deleted.key(), timeout_s)
        restored: Topic = msgspec.structs.replace(deleted.topic, name=name)
        topic = metadata.view.find(Topic, topic_key(name)) if version == GONE else restored
        if topic is None or topic.topic_id != topic_id:
            raise NotFound(f"topic {deleted.name!r} was restored or deleted for good by somebody else meanwhile")
        return restored

    restored = await decide_again(f"deleted topic {wanted!r}", attempt)
    if restored is None:
        raise Conflict(f"the name {name!r} is taken: choose another one with --as")
    return restored


async def until_in_bucket(metadata: MetadataClient, topic: Topic, timeout_s: float, event: str = "restored") -> bool:
    """Return True once the bucket no longer says that ``topic`` is deleted; ``event`` says what was done to the topic.

    False, at once: nothing of the topic was offloaded, and no tiering worker runs that could have written the marker. Raises
    ``Conflict`` if the topic was deleted again meanwhile, ``OutcomeUnknown`` if the marker may still be there after
    ``timeout_s``, ``Unavailable``.
    """
    await metadata.refresh(TIMEOUT_S)  # A view from before the restore has no record of it.
    view, marker = metadata.view, restored_topic_key(topic.topic_id)

    def is_deleted() -> bool:
        return view.get(deleted_topic_key(topic.topic_id)) is not None

    pointers = (manifest_pointer_key(topic.topic_id, index) for index in range(topic.partition_count))
    is_offloaded = any(view.find(ManifestPointer, key) is not None for key in pointers)
    if not is_offloaded and next(iter(view.all(TieringWorker)), None) is None:
        return False
    is_shown = await wait_until(view, lambda: is_deleted() or view.get(marker) is None, timeout_s)
    if is_deleted():
        raise Conflict(f"topic {topic.name!r} was {event}, and has been deleted again")
    if not is_shown:
        raise OutcomeUnknown(
            f"topic {topic.name!r} is {event}, but after {timeout_s:.0f} s the bucket may still say that it is deleted, and a"
            f" restore from the bucket would leave it out: is a tiering worker up? To wait again, run `stratalog topic undelete"
            f" {topic.topic_id}`"
        )
    return True


async def delete_for_good(metadata: MetadataClient, topic_id: UUID, timeout_s: float = TIMEOUT_S) -> None:
    """Make a topic's deletion final, or finish one that is; each of its commands may take ``timeout_s``.

    Returns early if somebody else, such as a tiering worker, goes on with a final deletion. Raises ``NotFound``,
    ``Unavailable``, ``OutcomeUnknown``.
    """

    async def attempt() -> None:
        deleted, version = await _read(metadata, topic_id, timeout_s)
        await metadata.refresh(timeout_s)
        is_final = deleted.is_final
        for part in finish_deletion(metadata.view, deleted):
            try:
                version = await propose_guarded(metadata, part.command(version), deleted.key(), timeout_s)
            except (Conflict, Superseded):
                if is_final:
                    return
                raise
            is_final = True

    await decide_again(f"deleted topic {topic_id}", attempt)


async def _read(metadata: MetadataClient, topic_id: UUID, timeout_s: float) -> tuple[DeletedTopic, int]:
    (found,) = await metadata.read([deleted_topic_key(topic_id)], timeout_s)
    if found is None or not isinstance(found.record, DeletedTopic):
        raise NotFound(f"topic {topic_id} is not deleted, or its objects are gone")
    return found.record, found.version
