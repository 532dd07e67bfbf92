"""A restore of a bucket whose former owner had committed a cut and did not see its marker stored."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import UUID

import msgspec
import pytest

from simulation.checkers.incarnations import Incarnation, Incarnations, RestoreAudit
from simulation.scenarios.history import Ledgers
from simulation.world.machine import World
from simulation.world.object_store import Bucket
from stratalog_metadata.records import ManifestPointer, Partition, Topic
from stratalog_tiering.format.descriptor import OwnerDescriptor, encode_descriptor
from stratalog_tiering.format.manifest import empty_manifest, encode_manifest, pointer_to
from stratalog_tiering.format.object_frame import object_sha256
from stratalog_tiering.format.object_keys import owner_key, version_key

TOPIC = Topic(name="flights", topic_id=UUID(int=0xE), partition_count=1, replication_factor=1, configs={})
WHOLE_END = 18
CUT_END = 12
POINT_MS = 1_000


class Installations:
    """The first installation has offloaded up to ``WHOLE_END``; the second one restores up to a point, the third does not."""

    def __init__(self, world: World) -> None:
        self._bucket = Bucket()
        self._incarnations = Incarnations(world, self._bucket, [(TOPIC, 0)])
        self.first, self.cutting, self.last = (
            self._incarnations.add(Incarnation(name, self._audit(world))) for name in ("first", "cutting", "last")
        )
        self.cutting.point_ms = POINT_MS
        self.take_over(self.first)
        self.whole = self.manifest(11, WHOLE_END)
        self.commit(self.first, self.whole)

    def _audit(self, world: World) -> RestoreAudit:
        return RestoreAudit(world, self._bucket, self._incarnations, Ledgers())

    def take_over(self, incarnation: Incarnation) -> None:
        number = len(self._incarnations.owners)
        owner = OwnerDescriptor(cluster_id=incarnation.cluster_id, number=number, taken_at_ms=number)
        self._bucket.on_written(owner_key(number), encode_descriptor(owner))

    def manifest(self, version: int, end_offset: int) -> ManifestPointer:
        """Store a version, which is its own marker."""
        made = msgspec.structs.replace(empty_manifest(TOPIC.topic_id, TOPIC.name, 0, end_offset), version=version)
        key, content = version_key(TOPIC.topic_id, 0, version), encode_manifest(made)
        self._bucket.objects[key] = (content, version, 0)
        return pointer_to(made, key, object_sha256(content))

    def commit(self, incarnation: Incarnation, pointer: ManifestPointer) -> None:
        incarnation.audit.records[pointer.key()] = pointer
        self._incarnations.committed(pointer, {})

    def cut(self) -> ManifestPointer:
        """Commit a cut whose marker is not in the bucket yet."""
        pointer = self.manifest(12, CUT_END)
        del self._bucket.objects[pointer.object_key]
        self.commit(self.cutting, pointer)
        return pointer

    def restore_last(self, pointer: ManifestPointer) -> list[str]:
        """Restore the manifest into the last installation; return what the checker says."""
        self.last.audit.records[pointer.key()] = pointer
        self._incarnations.new_partition(self.last.audit, Partition(topic_id=TOPIC.topic_id, index=0, leader_epoch=1))
        return self.last.audit.broken


@pytest.fixture
def installations() -> Iterator[Installations]:
    world = World(1)
    yield Installations(world)
    world.loop.close()


def test_a_cut_that_was_committed_before_the_takeover_may_be_found(installations: Installations) -> None:
    installations.take_over(installations.cutting)
    cut = installations.cut()
    installations.take_over(installations.last)

    assert installations.restore_last(cut) == []
    installations._incarnations.check_end(installations.last)


def test_the_history_before_the_cut_may_be_found_too_and_must_then_be_kept(installations: Installations) -> None:
    installations.take_over(installations.cutting)
    cut = installations.cut()
    installations.take_over(installations.last)

    assert installations.restore_last(installations.whole) == []
    installations.last.audit.records[cut.key()] = cut
    with pytest.raises(AssertionError, match=f"ends before {WHOLE_END}"):
        installations._incarnations.check_end(installations.last)


def test_a_cut_that_was_committed_after_the_takeover_loses_records(installations: Installations) -> None:
    installations.take_over(installations.cutting)
    installations.take_over(installations.last)
    cut = installations.cut()

    (broken,) = installations.restore_last(cut)
    assert f"is restored up to {CUT_END}, and {WHOLE_END} were in the bucket" in broken


def test_a_shorter_history_of_an_owner_that_did_not_cut_loses_records(installations: Installations) -> None:
    installations.cutting.point_ms = None
    installations.take_over(installations.cutting)
    shorter = installations.cut()
    installations.take_over(installations.last)

    (broken,) = installations.restore_last(shorter)
    assert f"is restored up to {CUT_END}, and {WHOLE_END} were in the bucket" in broken
