"""The content of a deletion marker, and when it tells the bucket's next owner to collect a topic that its metadata never had.

A restore leaves out the topics that the bucket says are deleted. Their objects are nobody's then: the owner that deleted them
no longer writes to the bucket, and the next one has no record of them. No I/O.
"""

from __future__ import annotations

from stratalog_metadata.records import DeletedTopic
from stratalog_tiering.format.descriptor import DeletionMarker, OwnerDescriptor, TopicDescriptor


def deletion_marker(deleted: DeletedTopic, now_ms: int, cluster_id: str, version: int = 0) -> DeletionMarker:
    """The marker of a topic that the cluster deletes. ``version`` is that of the record ``deleted``, if that is in metadata."""
    return DeletionMarker(
        topic_id=deleted.topic_id, deleted_at_ms=max(deleted.deleted_at_ms, now_ms), deletion_version=version,
        cluster_id=cluster_id, restorable_ms=deleted.restorable_ms,
    )  # fmt: skip


def was_undone(marker: DeletionMarker, topic: TopicDescriptor) -> bool:
    """Whether the deletion was undone before the topic was detached: the marker was written late, and hides nothing.

    No worker removes it, because the cluster no longer knows the topic. The marker of an attachment has version 0.
    """
    detached = topic.detached
    if not detached:
        return False
    return marker.cluster_id == detached.cluster_id and marker.deletion_version < detached.topic_version


def is_of_earlier_owner(marker: DeletionMarker, owner: OwnerDescriptor) -> bool:
    """Whether a cluster that had the bucket before ``owner`` deleted the topic.

    The present owner's markers are not judged: its metadata has the deletion, or is an old copy that does not know the topic.
    """
    if marker.cluster_id:
        return marker.cluster_id != owner.cluster_id
    return owner.number > 0 and marker.deleted_at_ms < owner.taken_at_ms


def earlier_deletion(marker: DeletionMarker, written_ms: int, name: str, owner: OwnerDescriptor) -> DeletedTopic:
    """The record by which ``owner`` collects the topic. ``written_ms`` is when the store got the marker.

    The grace period begins when the topic could no longer be restored, and at the takeover at the earliest.
    """
    kept_until_ms = max(marker.deleted_at_ms, written_ms) + marker.restorable_ms
    return DeletedTopic(topic_id=marker.topic_id, name=name, deleted_at_ms=max(kept_until_ms, owner.taken_at_ms))
