"""Refuses deletions while what they would delete is locked in the object store (``stratalog.tier.lock.mode``).

A partition's manifest pointer says until when any object of it may be locked. A deletion requires that the pointers do not
change, because a commit may add locked objects.
"""

from __future__ import annotations

from stratalog_broker.admin.errors import ObjectsLocked
from stratalog_metadata.client.api import MetadataView
from stratalog_metadata.records import ManifestPointer, Topic, manifest_pointer_key
from stratalog_metadata.state.commands import ABSENT, VersionIs
from stratalog_tiering.cold.reader import ColdReader


def require_unlocked(topic: Topic, view: MetadataView, now_ms: int) -> tuple[VersionIs, ...]:
    """The requirements that no partition's history changes. Raises ``ObjectsLocked`` if any of it is locked at ``now_ms``."""
    found = [view.get(manifest_pointer_key(topic.topic_id, index)) for index in range(topic.partition_count)]
    pointers = [each.record for each in found if each is not None and isinstance(each.record, ManifestPointer)]
    last = max(pointers, key=lambda pointer: pointer.lock_until_ms, default=None)
    if last is not None and last.lock_until_ms > now_ms:
        raise ObjectsLocked(f"records of topic {topic.name!r} are locked", last.lock_mode, last.lock_until_ms)
    return tuple(
        VersionIs(
            key=manifest_pointer_key(topic.topic_id, index), version=each.version if each is not None else ABSENT
        )
        for index, each in enumerate(found)
    )  # fmt: skip


async def require_unlocked_below(
    topic: Topic, index: int, offset: int, view: MetadataView, cold: ColdReader, now_ms: int
) -> VersionIs:
    """The requirement that the partition's history does not change.

    Raises ``ObjectsLocked`` if a segment with records below ``offset`` is locked at the wall time ``now_ms``. Asks the store
    only while any object of the partition may be locked, and raises ``Unavailable`` if it does not answer.
    """
    found = view.get(manifest_pointer_key(topic.topic_id, index))
    pointer = found.record if found is not None else None
    if isinstance(pointer, ManifestPointer) and pointer.lock_until_ms > now_ms:
        until_ms = await cold.locked_until_ms(pointer, offset)
        if until_ms > now_ms:
            what = f"records of {topic.name!r}-{index} below offset {offset} are locked"
            raise ObjectsLocked(what, pointer.lock_mode, until_ms)
    version = found.version if found is not None else ABSENT
    return VersionIs(key=manifest_pointer_key(topic.topic_id, index), version=version)
