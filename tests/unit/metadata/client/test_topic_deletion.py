"""A deletion becomes final by bounded commands, and goes on wherever it was interrupted."""

from __future__ import annotations

from typing import Final
from uuid import UUID

import pytest

from stratalog_core.errors import Conflict
from stratalog_metadata.client import topic_deletion
from stratalog_metadata.client.topic_deletion import (
    PART_RECORDS_MAX,
    delete_topic,
    finish_deletion,
    is_finished,
    restore_topic,
)
from stratalog_metadata.client.view import LocalView
from stratalog_metadata.protocol.messages import KeyChange
from stratalog_metadata.records import (
    DeferredMarker,
    DeletedTopic,
    ForkDecision,
    Fragment,
    Ledger,
    Log,
    ManifestPointer,
    Partition,
    Record,
    TierStatus,
    Topic,
    deleted_topic_key,
    topic_key,
)
from stratalog_metadata.state.commands import Command, Put, VersionIs
from stratalog_metadata.state.machine import COMMAND_UPDATES_MAX, apply
from stratalog_metadata.state.record_map import RecordMap

FLIGHTS: Final = UUID(int=1)
OTHER: Final = UUID(int=2)
Kept = Log | Ledger | ManifestPointer | TierStatus | ForkDecision


class Quorum:
    """Records and a view of them, without nodes."""

    def __init__(self) -> None:
        self.view = LocalView()
        self._records = RecordMap()
        self._index = 0

    def propose(self, command: Command) -> int:
        """Return the command's index, which is the version of what it put. Raises its refusal."""
        self._index += 1
        outcome = apply(self._records, self._index, command)
        if isinstance(outcome.result, Exception):
            raise outcome.result
        self._records.install(outcome.changes)
        self.view.follow(self._index, [[KeyChange(change.key, change.after) for change in outcome.changes]])
        return self._index

    def deleted(self) -> tuple[DeletedTopic, int]:
        found = self.view.get(deleted_topic_key(FLIGHTS))
        assert found is not None
        assert isinstance(found.record, DeletedTopic)
        return found.record, found.version

    def kept(self) -> list[Kept]:
        """All that metadata has of partitions but their owners."""
        view = self.view
        return [
            *view.all(Log), *view.all(Ledger), *view.all(ManifestPointer), *view.all(TierStatus), *view.all(ForkDecision),
        ]  # fmt: skip

    def keys(self) -> set[str]:
        return {record.key() for record in self.kept()}

    def topics(self) -> set[UUID]:
        return {record.topic_id for record in self.kept()}


def records_of(topic_id: UUID, partitions: int, ledgers: int) -> list[Record]:
    """All that metadata keeps of a topic's partitions, with so many ledgers in each partition."""
    found: list[Record] = []
    for index in range(partitions):
        found += [
            Partition(topic_id=topic_id, index=index, owner=1, leader_epoch=1),
            Log(topic_id=topic_id, index=index),
            ManifestPointer(
                topic_id=topic_id,
                index=index,
                manifest_version=1,
                object_key="m",
                sha256="0",
                start_offset=0,
                end_offset=3,
                cold_bytes=1,
            ),
            TierStatus(topic_id=topic_id, index=index, worker_id="worker-1"),
        ]
        first = topic_id.int * 10_000 + index * ledgers
        found += [
            Ledger(
                ledger_id=ledger_id, topic_id=topic_id, partition=index, base_offset=0, leader_epoch=1, write_quorum=1,
                ack_quorum=1, fragments=(Fragment(first_entry=0, bookies=("b1",)),),
            )
            for ledger_id in range(first, first + ledgers)
        ]  # fmt: skip
    return found


@pytest.fixture
def quorum() -> Quorum:
    """A deleted topic that can be restored, beside one that lives."""
    made = Quorum()
    for name, topic_id in (("flights", FLIGHTS), ("other", OTHER)):
        topic = Topic(name=name, topic_id=topic_id, partition_count=5, replication_factor=1)
        made.propose(Command(updates=tuple(Put(record=each) for each in (topic, *records_of(topic_id, 5, 7)))))
    found = made.view.get(topic_key("flights"))
    assert found is not None
    assert isinstance(found.record, Topic)
    made.propose(delete_topic(made.view, found.record, found.version, 1, 1_000))
    return made


def finish(quorum: Quorum, steps: int | None = None) -> int:
    """Carry out so many steps of the deletion, or all; return how many there were."""
    deleted, version = quorum.deleted()
    done = 0
    for part in finish_deletion(quorum.view, deleted):
        if done == steps:
            break
        version = quorum.propose(part.command(version))
        done += 1
    return done


def test_a_small_topic_goes_in_one_command(quorum: Quorum) -> None:
    others = {record.key() for record in quorum.kept() if record.topic_id == OTHER}
    assert finish(quorum) == 1
    assert quorum.deleted()[0] == DeletedTopic(topic_id=FLIGHTS, name="flights", deleted_at_ms=1)
    assert quorum.keys() == others
    assert finish(quorum) == 0


def test_a_deletion_that_is_interrupted_after_any_step_goes_on(quorum: Quorum, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topic_deletion, "PART_RECORDS_MAX", 3)
    steps, before = 0, quorum.keys()
    while finish(quorum, steps=1):
        steps += 1
        deleted, after = quorum.deleted()[0], quorum.keys()
        assert deleted.is_final
        assert after < before
        logs = {log.index for log in quorum.view.all(Log) if log.topic_id == FLIGHTS}
        assert logs == set(range(deleted.partitions_left))
        before = after
    assert steps >= 15
    assert quorum.deleted()[0].partitions_left == 0
    assert quorum.topics() == {OTHER}
    assert len(before) == 5 * (7 + 3)


def test_markers_that_were_deferred_go_with_the_topic(quorum: Quorum, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that is deferred just before the deletion becomes final, and after its command was made."""
    monkeypatch.setattr(topic_deletion, "PART_RECORDS_MAX", 100)
    markers = [
        DeferredMarker(
            topic_id=topic_id, index=0, leader_epoch=1, producer_id=producer_id, producer_epoch=0, coordinator_epoch=0
        )
        for topic_id in (FLIGHTS, OTHER)
        for producer_id in range(150)
    ]
    deleted, version = quorum.deleted()
    parts = finish_deletion(quorum.view, deleted)
    first = next(parts)
    quorum.propose(Command(updates=tuple(Put(record=each) for each in markers)))
    version = quorum.propose(first.command(version))
    assert not is_finished(quorum.view, quorum.deleted()[0])
    for part in parts:
        version = quorum.propose(part.command(version))
    assert is_finished(quorum.view, quorum.deleted()[0])
    assert {each.topic_id for each in quorum.view.all(DeferredMarker)} == {OTHER}


def test_two_who_finish_a_deletion_do_not_disturb_each_other(quorum: Quorum, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topic_deletion, "PART_RECORDS_MAX", 3)
    deleted, version = quorum.deleted()
    (first, second, *_) = finish_deletion(quorum.view, deleted)
    after_first = quorum.propose(first.command(version))
    with pytest.raises(Conflict):
        quorum.propose(first.command(version))
    quorum.propose(second.command(after_first))
    with pytest.raises(Conflict):
        quorum.propose(second.command(after_first))
    finish(quorum)
    assert quorum.topics() == {OTHER}


def test_a_topic_is_restored_or_its_deletion_is_final(quorum: Quorum, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topic_deletion, "PART_RECORDS_MAX", 3)
    deleted, version = quorum.deleted()
    (first, *_) = finish_deletion(quorum.view, deleted)
    quorum.propose(first.command(version))
    with pytest.raises(Conflict):
        quorum.propose(restore_topic(deleted, version, "flights"))


def test_no_step_is_taken_once_the_topic_is_restored(quorum: Quorum) -> None:
    deleted, version = quorum.deleted()
    (part,) = finish_deletion(quorum.view, deleted)
    quorum.propose(restore_topic(deleted, version, "flights"))
    before = quorum.keys()
    with pytest.raises(Conflict):
        quorum.propose(part.command(version))
    assert quorum.keys() == before


def test_guards_are_required_by_every_step(quorum: Quorum, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topic_deletion, "PART_RECORDS_MAX", 3)
    deleted, _ = quorum.deleted()
    guard = VersionIs(key="lease/x", version=7)
    assert all(guard in part.command(1, (guard,)).requirements for part in finish_deletion(quorum.view, deleted))


def test_no_command_grows_with_the_number_of_partitions() -> None:
    """The records of this topic are more than one command may remove."""
    count = 60_000
    topic = Topic(name="flights", topic_id=FLIGHTS, partition_count=count, replication_factor=1)
    deleted = DeletedTopic(topic_id=FLIGHTS, name="flights", deleted_at_ms=1, restorable_ms=1, topic=topic)
    sizes = [len(part.keys) for part in finish_deletion(LocalView(), deleted)]
    assert sum(sizes) == 4 * count > COMMAND_UPDATES_MAX
    assert max(sizes) < PART_RECORDS_MAX + 4
