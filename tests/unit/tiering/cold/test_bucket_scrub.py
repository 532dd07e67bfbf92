"""A scrub finds and names every kind of damage that is planted in a bucket, and nothing in a sound one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.planted_damage import DAY_S, PLANTED, SEGMENTS, History, Planted, write_history

from stratalog_core.system import SystemClock, ThreadBackground
from stratalog_tiering.cold.bucket_scrub import BucketScrub
from stratalog_tiering.core.damage import MISSING, REMEDIES, Damage, Finding
from stratalog_tiering.format.descriptor import OwnerDescriptor, encode_descriptor
from stratalog_tiering.format.manifest import decode_manifest
from stratalog_tiering.format.object_keys import owner_key, segments_prefix

Store = Any


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> History:
    """A history that tests copy before they damage it."""
    return write_history(tmp_path_factory.mktemp("written") / "store")


@pytest.fixture
def history(written: History, store_directory: Path) -> History:
    return written.copied_to(store_directory)


async def scrub(store: Store, background: ThreadBackground) -> list[Finding]:
    clock = SystemClock()
    made = BucketScrub(store, background, before_ms=clock.wall_ms() - 1000 * DAY_S)
    inventory = await made.inventory()
    findings = list(inventory.findings)
    cluster_ids = set()
    for topic in inventory.topics:
        for index in range(topic.partition_count):
            report = await made.partition(topic, index)
            findings += report.findings
            cluster_ids |= {report.progress.cluster_id} - {""}
    findings += await made.owners(frozenset(cluster_ids))
    return [*findings, *[found async for found in made.strangers(inventory)]]


async def test_a_sound_bucket_has_no_findings(history: History, store: Store, background: ThreadBackground) -> None:
    history.plant(owner_key(0), encode_descriptor(OwnerDescriptor(cluster_id="c", number=0, taken_at_ms=1)))
    assert len(history.manifest.pages) > 1
    assert history.manifest.tree.pages
    assert await scrub(store, background) == []


@pytest.mark.parametrize("planted", PLANTED, ids=lambda each: each.kind.value)
async def test_planted_damage_is_found_and_named(
    history: History, store: Store, background: ThreadBackground, planted: Planted
) -> None:
    key = planted.plant(history)
    history.age_everything()
    findings = await scrub(store, background)
    assert [(found.kind, found.key) for found in findings] == [(planted.kind, key)]
    assert REMEDIES[planted.kind]


async def test_damage_behind_a_damaged_page_is_found_too(history: History, store: Store, background: ThreadBackground) -> None:
    page = history.remove(history.directory / history.manifest.pages[0].key)
    segment = history.remove(history.segment(SEGMENTS - 1))
    findings = await scrub(store, background)
    assert [(found.kind, found.key) for found in findings] == [
        (Damage.PAGE_MISSING, page),
        (Damage.SEGMENT_MISSING, segment),
    ]
    entry = history.entries[-1]
    assert (findings[1].base_offset, findings[1].end_offset) == (entry.base_offset, entry.end_offset)


async def test_a_young_object_without_reference_is_no_finding(
    history: History, store: Store, background: ThreadBackground
) -> None:
    path = history.directory / history.plant(segments_prefix(history.topic.topic_id, 0) + "unknown.segment", b"x")
    history.age(path, -3 * DAY_S)
    assert await scrub(store, background) == []


async def test_what_a_worker_deletes_during_the_scrub_is_no_finding(
    history: History, store: Store, background: ThreadBackground
) -> None:
    """The newest version is committed while the one before it is checked, and it no longer refers to one of its pages."""
    versions = sorted(history.directory.glob("manifests/*/*/*.manifest"))
    pages = [{ref.key for ref in decode_manifest(path.read_bytes()).pages} for path in versions]
    newest = next(index for index in range(len(versions)) if pages[index + 1] - pages[index])
    (gone, *_) = sorted(pages[newest + 1] - pages[newest])
    for path in versions[:newest]:
        path.unlink()
        path.with_suffix(".committed").unlink()
    later = [versions[newest], versions[newest].with_suffix(".committed")]
    for path in later:
        path.rename(history.directory / path.name)

    def commit_and_delete(name: str, key: str) -> None:
        if name == "get" and key == gone and (history.directory / gone).exists():
            for path in later:
                (history.directory / path.name).rename(path)
            (history.directory / gone).unlink()

    store.before = commit_and_delete
    findings = await scrub(store, background)
    assert not (history.directory / gone).exists()
    assert MISSING & {found.kind for found in findings} == set()


async def test_every_read_takes_its_bytes_from_the_rate(history: History, store: Store, background: ThreadBackground) -> None:
    taken: list[int] = []

    async def take(count: int) -> None:
        taken.append(count)

    made = BucketScrub(store, background, before_ms=0, take=take)
    (topic,) = (await made.inventory()).topics
    await made.partition(topic, 0)
    stored = sum(path.stat().st_size for path in history.directory.glob("segments/*/*/*"))
    manifest = history.manifest
    keys = [
        *(ref.key for ref in manifest.pages), *(ref.key for ref in manifest.tree.pages),
        *(ref.key for ref in manifest.removed_lists),
    ]  # fmt: skip
    pages = [history.directory / key for key in keys]
    manifests = history.directory.glob("manifests/*/*/*.manifest")
    assert sum(taken) == stored + sum(path.stat().st_size for path in [*pages, *manifests])
