"""Restores deleted topics, or makes their deletion final before its time.

Both need the metadata quorum only. The commands are in ``stratalog_metadata.client.topic_deletion``.
"""

from __future__ import annotations

from typing import Final
from uuid import UUID

import msgspec

from stratalog_broker.admin.errors import InvalidTopic
from stratalog_broker.admin.topic_names import check_topic_name
from stratalog_broker.partitions.internal_topics import INTERNAL_TOPICS
from stratalog_core.errors import Conflict, Invalid, NotFound
from stratalog_metadata.client.api import MetadataClient, MetadataView
from stratalog_metadata.client.guarded_updates import decide_again, propose_guarded
from stratalog_metadata.client.topic_deletion import finish_deletion, restorable_topics, restore_topic
from stratalog_metadata.records import DeletedTopic, Topic, deleted_topic_key, topic_key
from stratalog_metadata.state.guarded_update import Superseded

TIMEOUT_S: Final = 10.0


def deleted_topic(view: MetadataView, wanted: str) -> DeletedTopic:
    """Return the restorable topic that had the name ``wanted``, or has it as its id.

    Raises ``NotFound``, and ``Invalid`` if several deleted topics had the name.
    """
    deleted = restorable_topics(view)
    named = [each for each in deleted if each.name == wanted]
    found = named or [each for each in deleted if wanted in (str(each.topic_id), each.topic_id.hex)]
    if not found:
        raise NotFound(f"no deleted topic {wanted!r} can be restored: see `stratalog topic list --deleted`")
    if len(found) > 1:
        ids = ", ".join(str(each.topic_id) for each in found)
        raise Invalid(f"{len(found)} deleted topics were named {wanted!r}: give the id of one of them ({ids})")
    return found[0]


async def undelete(metadata: MetadataClient, wanted: str, new_name: str | None = None, timeout_s: float = TIMEOUT_S) -> Topic:
    """Restore the deleted topic of name or id ``wanted``, under ``new_name`` if given; return its record.

    Raises ``NotFound``, ``Invalid``, ``Conflict`` (the name is taken), ``Unavailable``, ``OutcomeUnknown`` (the topic may be
    restored).
    """
    found = deleted_topic(metadata.view, wanted)
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
        await propose_guarded(metadata, restore_topic(deleted, version, name), deleted.key(), timeout_s)
        restored: Topic = msgspec.structs.replace(deleted.topic, name=name)
        return restored

    restored = await decide_again(f"deleted topic {wanted!r}", attempt)
    if restored is None:
        raise Conflict(f"the name {name!r} is taken: choose another one with --as")
    return restored


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
