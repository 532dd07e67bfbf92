"""Planted damage is repaired from a second copy: the bucket is then byte for byte what it was. Nothing else is ever changed."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from support.planted_damage import DAY_S, PLANTED, History, Planted, write_history

from stratalog_core.errors import OutcomeUnknown, Unavailable
from stratalog_core.system import SystemClock, ThreadBackground
from stratalog_tiering.cold.bucket_scrub import BucketScrub
from stratalog_tiering.copies.copying import CopyLimits
from stratalog_tiering.copies.repair import Repair, RepairedFrom, Repairer, RepairSources
from stratalog_tiering.core.damage import Damage, Finding
from stratalog_tiering.format.descriptor import OwnerDescriptor, TopicDescriptor, encode_descriptor
from stratalog_tiering.format.manifest import pointer_to
from stratalog_tiering.format.object_frame import object_sha256
from stratalog_tiering.format.object_keys import owner_key
from stratalog_tiering.store import ObjectStore, open_store

Store = Any
COMMITTED = {
    Damage.MANIFEST_INCONSISTENT, Damage.TREE_HEAD, Damage.TREE_LEAVES, Damage.GAP, Damage.OVERLAP, Damage.SEGMENT_DIGEST,
    Damage.ORPHAN,
}  # fmt: skip
"""Kinds that these tests plant by a commit, so that the digests in the history are those of the damage."""
REPAIRABLE = [each for each in PLANTED if each.kind not in COMMITTED]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> History:
    made = write_history(tmp_path_factory.mktemp("written") / "store")
    made.plant(owner_key(0), encode_descriptor(OwnerDescriptor(cluster_id="c", number=0, taken_at_ms=1)))
    return made


@pytest.fixture
def history(written: History, store_directory: Path) -> History:
    return written.copied_to(store_directory)


@pytest.fixture
def second(written: History, tmp_path: Path) -> History:
    return written.copied_to(tmp_path / "second")


@pytest.fixture
def copy(second: History, background: ThreadBackground) -> ObjectStore:
    return open_store(str(second.directory), background=background, clock=SystemClock(), random=random.Random(4))


def contents(history: History) -> dict[str, bytes]:
    return {history.key(path): path.read_bytes() for path in history.directory.rglob("*") if path.is_file()}


async def unlimited(_: int) -> None:
    pass


async def repair(
    store: Store, background: ThreadBackground, sources: RepairSources
) -> dict[tuple[Damage, str], tuple[Finding, Repair]]:
    clock = SystemClock()
    scrub = BucketScrub(store, background, before_ms=clock.wall_ms() - 1000 * DAY_S)
    repairer = Repairer(scrub, store, sources, CopyLimits(background=background, clock=clock, take=unlimited))
    inventory = await scrub.inventory()
    findings, repairs = list(inventory.findings), dict(await repairer.bucket(inventory.findings))
    cluster_ids = set()
    for topic in inventory.topics:
        for index in range(topic.partition_count):
            report, made = await repairer.partition(topic, index)
            findings += report.findings
            repairs.update(made)
            cluster_ids |= {report.progress.cluster_id} - {""}
    of_owners = await scrub.owners(frozenset(cluster_ids))
    repairs.update(await repairer.bucket(of_owners))
    findings += of_owners
    return {(each.kind, each.key): (each, repairs[each.kind, each.key]) for each in findings}


@pytest.mark.parametrize("planted", REPAIRABLE, ids=lambda each: each.kind.value)
async def test_planted_damage_is_repaired_from_the_second_copy(
    written: History, history: History, store: Store, copy: ObjectStore, background: ThreadBackground, planted: Planted
) -> None:
    key = planted.plant(history)
    history.age_everything()
    found = await repair(store, background, RepairSources(copy=copy))
    assert [*found] == [(planted.kind, key)]
    (_, made) = found[planted.kind, key]
    assert made == Repair(source=RepairedFrom.COPY)
    assert contents(history) == contents(written)
    assert store.count("delete") == 0
    assert await repair(store, background, RepairSources(copy=copy)) == {}


def test_twelve_kinds_and_more_are_repaired() -> None:
    assert len({each.kind for each in REPAIRABLE}) >= 16


@pytest.mark.parametrize("planted", PLANTED, ids=lambda each: each.kind.value)
async def test_without_a_source_nothing_is_changed(
    history: History, store: Store, background: ThreadBackground, planted: Planted
) -> None:
    planted.plant(history)
    history.age_everything()
    before = contents(history)
    found = await repair(store, background, RepairSources())
    assert all(made.source is None and made.problem for _, made in found.values())
    assert contents(history) == before


@pytest.mark.parametrize("planted", [each for each in PLANTED if each.kind in COMMITTED], ids=lambda each: each.kind.value)
async def test_damage_that_was_committed_is_left_and_says_so(
    history: History, store: Store, copy: ObjectStore, background: ThreadBackground, planted: Planted
) -> None:
    planted.plant(history)
    history.age_everything()
    before = contents(history)
    found = await repair(store, background, RepairSources(copy=copy))
    assert all(made.source is None and made.problem for _, made in found.values())
    assert contents(history) == before


async def test_a_damaged_second_copy_repairs_nothing(
    history: History, second: History, store: Store, copy: ObjectStore, background: ThreadBackground
) -> None:
    """The verification before the upload is what keeps damage from being copied."""
    history.remove(history.segment(3))
    key = second.flip(second.segment(3), 100)
    before = contents(history)
    found = await repair(store, background, RepairSources(copy=copy))
    assert [*found] == [(Damage.SEGMENT_MISSING, key)]
    (_, made) = found[Damage.SEGMENT_MISSING, key]
    assert made.source is None
    assert "is not the committed object: its SHA-256 differs" in made.problem
    assert contents(history) == before


async def test_damage_behind_damage_is_repaired_in_one_run(
    written: History, history: History, store: Store, copy: ObjectStore, background: ThreadBackground
) -> None:
    manifest = history.manifest
    page = manifest.pages[0]
    history.flip(history.directory / page.key, 60)
    history.flip(history.segment(0), 100)
    history.remove(history.path("manifests/*/*/*.committed"))
    history.remove(history.manifest_path)
    found = await repair(store, background, RepairSources(copy=copy))
    kinds = {kind for kind, _ in found}
    assert kinds >= {Damage.MARKER_MISSING, Damage.PAGE_ALTERED, Damage.SEGMENT_DATA}
    assert all(made.source is RepairedFrom.COPY for _, made in found.values())
    assert contents(history) == contents(written)


async def test_a_marker_is_written_again_by_what_metadata_says(
    written: History, history: History, store: Store, background: ThreadBackground
) -> None:
    content = history.manifest_path.read_bytes()
    pointer = pointer_to(history.manifest, history.key(history.manifest_path), object_sha256(content))
    key = history.marker_with_another_digest()
    sources = RepairSources(pointers={(history.topic.topic_id, 0): pointer}, has_metadata=True)
    found = await repair(store, background, sources)
    assert [(name, made) for name, (_, made) in found.items()] == [
        ((Damage.MANIFEST_DIGEST, key), Repair(source=RepairedFrom.METADATA))
    ]
    assert contents(history) == contents(written)


async def test_a_version_that_metadata_does_not_know_is_not_marked(
    history: History, store: Store, copy: ObjectStore, background: ThreadBackground
) -> None:
    """Metadata was restored from an old copy, or the version lost its race: an operator decides about a fork."""
    history.remove(history.path("manifests/*/*/*.committed"))
    before = contents(history)
    found = await repair(store, background, RepairSources(copy=copy, has_metadata=True))
    assert all(made.source is None and "has forked" in made.problem for _, made in found.values())
    assert found
    assert contents(history) == before


async def test_a_descriptor_is_written_again_from_metadata(
    history: History, store: Store, background: ThreadBackground
) -> None:
    key = history.flip(history.path("topics/*/*.json"), 0)
    topic = history.topic
    known = TopicDescriptor(topic_id=topic.topic_id, name="flights", partition_count=2, replication_factor=1)
    found = await repair(store, background, RepairSources(topics={topic.topic_id: known}))
    assert found[Damage.DESCRIPTOR_ALTERED, key][1] == Repair(source=RepairedFrom.METADATA)
    assert json.loads((history.directory / key).read_bytes())["name"] == "flights"
    assert await repair(store, background, RepairSources()) == {}


@pytest.fixture
def altered(history: History) -> str:
    return history.flip(history.segment(3), 100)


async def test_an_unknown_outcome_is_no_repair(
    altered: str, store: Store, copy: ObjectStore, background: ThreadBackground
) -> None:
    store.after = lambda name, key: OutcomeUnknown("lost") if name == "put" else None
    found = await repair(store, background, RepairSources(copy=copy))
    assert found[Damage.SEGMENT_DATA, altered][1] == Repair(source=None, problem="lost")


async def test_a_store_that_does_not_answer_ends_the_run(
    altered: str, store: Store, copy: ObjectStore, background: ThreadBackground
) -> None:
    store.before = lambda name, key: Unavailable("away") if name == "put" else None
    with pytest.raises(Unavailable):
        await repair(store, background, RepairSources(copy=copy))
