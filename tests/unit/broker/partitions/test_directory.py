"""Topics are found by id as the view has them, also after the view has missed changes and learns of all of them at once."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from unit.broker.hand_fed_view import HandFedView

from stratalog_broker.partitions.directory import PartitionDirectory
from stratalog_metadata.records import Topic, Versioned
from stratalog_metadata.state.changes import Change
from stratalog_metadata.state.snapshot import StateImage

FIRST = Topic(name="orders", topic_id=UUID(int=1), partition_count=1, replication_factor=1)
NEXT = Topic(name="orders", topic_id=UUID(int=2), partition_count=1, replication_factor=1)


def test_a_topic_that_was_deleted_and_created_again_behind_the_view_is_not_found_by_its_old_id() -> None:
    """The view learns of both in one change of the name's record. The old id led to the name, and DeleteTopics by it deleted
    the new topic.
    """
    view = HandFedView()
    directory = PartitionDirectory(view)

    def follow(changes: Sequence[Change]) -> None:
        for change in changes:
            if change.after is not None and isinstance(change.after.record, Topic):
                directory.put(change.after.record)

    view.subscribe(follow)
    view.put(FIRST)
    assert directory.topic_by_id(FIRST.topic_id.bytes) == FIRST

    view.jump(StateImage(index=9, term=1, records=[Versioned(version=8, record=NEXT)]))

    assert directory.topic_by_id(FIRST.topic_id.bytes) is None
    assert directory.topic_by_id(NEXT.topic_id.bytes) == NEXT
