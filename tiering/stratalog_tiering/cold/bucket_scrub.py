"""Checks a whole bucket without metadata: descriptors, commit markers, each partition's history, and what nothing refers to.

``Verifier`` checks a partition from its manifest; this module finds the manifests, and reports the objects that no manifest
explains. Running workers may commit and delete meanwhile: an object that is gone is reported only if the newest manifest refers
to it. Memory is bounded by the objects of one partition and the number of topics. Writes nothing and repairs nothing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass, replace
from uuid import UUID

from stratalog_core.errors import Corrupt, Invalid, NoSuchObject, NotFound
from stratalog_core.ports import Background
from stratalog_tiering.cold.archive import is_hidden, read_version
from stratalog_tiering.cold.manifest_source import ManifestSource
from stratalog_tiering.cold.segment_check import Take, unlimited
from stratalog_tiering.cold.verifier import OnProgress, PartitionReport, Progress, Verifier
from stratalog_tiering.core.damage import (
    HIDES_REFERENCES,
    MISSING,
    Damage,
    Finding,
    judge_marker,
    judge_owners,
    judge_topic,
    lost_manifests,
    newest_marker,
    orphan_finding,
    unmarked_manifests,
)
from stratalog_tiering.core.garbage import live_keys, orphans
from stratalog_tiering.format.manifest_writers import check_writer
from stratalog_tiering.format.object_keys import (
    DATA_PREFIXES,
    OWNERS_PREFIX,
    TOPICS_PREFIX,
    deletion_marker_key,
    manifests_prefix,
    marked_manifest,
    object_owner,
    parse_topic_key,
    topic_prefix,
    with_data_keys,
)
from stratalog_tiering.store import ObjectInfo, ObjectStore


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundTopic:
    """A topic of the bucket. Without a readable descriptor its name is its id."""

    topic_id: UUID
    name: str
    partition_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """The topics that are not deleted, sorted by name, the ids of those that are, and what is wrong with their descriptors."""

    topics: tuple[FoundTopic, ...]
    deleted: frozenset[UUID]
    findings: tuple[Finding, ...]

    def selected(self, names: Collection[str]) -> tuple[FoundTopic, ...]:
        """The topics with these names or ids, all if there are none. Raises ``NotFound`` that lists the names."""
        unknown = sorted(set(names) - {each for topic in self.topics for each in (topic.name, str(topic.topic_id))})
        if unknown:
            known = ", ".join(topic.name for topic in self.topics) or "none"
            raise NotFound(f"the bucket contains no topic {unknown[0]!r}; it contains {known}")
        return tuple(topic for topic in self.topics if not names or {topic.name, str(topic.topic_id)} & set(names))


class BucketScrub:
    """One pass over a bucket. Objects written after ``before_ms`` may be part of a commit that is not finished."""

    def __init__(
        self,
        store: ObjectStore,
        background: Background,
        *,
        before_ms: int,
        take: Take = unlimited,
        on_progress: OnProgress = lambda _: None,
    ) -> None:
        self._store = store
        self._source = ManifestSource(store)
        self._verifier = Verifier(store, background, take=take, on_progress=on_progress)
        self._before_ms = before_ms

    async def inventory(self) -> Inventory:
        """Find all topics, by their manifests and by their descriptors. Raises ``Unavailable``."""
        # Descriptors are listed after manifests: a topic's descriptor is written before its first manifest.
        counts: dict[UUID, int] = {}
        async for info in self._store.list("manifests/"):
            owner = object_owner(info.key)
            if owner is not None:
                counts[owner[0]] = max(counts.get(owner[0], 0), owner[1] + 1)
        keys = [info.key async for info in self._store.list(TOPICS_PREFIX)]
        described = {parsed.topic_id for key in keys if (parsed := parse_topic_key(key)) is not None}
        marked = [each for each in {*described, *counts} if deletion_marker_key(each) in keys]
        deleted = frozenset([each for each in marked if await is_hidden(self._store, each)])
        topics: list[FoundTopic] = []
        findings: list[Finding] = []
        for topic_id in sorted({*described, *counts} - deleted):
            versions = [key for key in keys if key.startswith(topic_prefix(topic_id))]
            topic, found = await self._topic(topic_id, versions, counts.get(topic_id, 0))
            topics.append(topic)
            findings += found
        topics.sort(key=lambda topic: (topic.name, topic.topic_id))
        return Inventory(topics=tuple(topics), deleted=deleted, findings=tuple(findings))

    async def _topic(self, topic_id: UUID, keys: list[str], partition_count: int) -> tuple[FoundTopic, list[Finding]]:
        """The topic by the newest descriptor that can be read; ``keys`` are those of its descriptors, newest first."""
        found = FoundTopic(topic_id=topic_id, name=str(topic_id), partition_count=partition_count)
        findings: list[Finding] = []
        is_named = False
        for key in keys:
            topic, wrong = judge_topic(await self._store.get(key), key)
            findings += wrong
            if topic is None or is_named:
                continue
            is_named = True
            if topic.partition_count < partition_count:
                problem = f"it says {topic.partition_count} partitions; there is history of partition {partition_count - 1}"
                findings.append(Finding(kind=Damage.DESCRIPTOR_ALTERED, key=key, problem=problem))
            found = replace(found, name=topic.name, partition_count=max(topic.partition_count, partition_count))
        if not keys:
            problem = f"topic {topic_id} has history and no descriptor"
            findings.append(Finding(kind=Damage.DESCRIPTOR_MISSING, key=topic_prefix(topic_id), problem=problem))
        return found, findings

    async def owners(self, cluster_ids: frozenset[str]) -> list[Finding]:
        """Check the bucket's owners against the clusters that its manifests name. Raises ``Unavailable``."""
        keys = [info.key async for info in self._store.list(OWNERS_PREFIX)]
        return judge_owners({key: await self._store.get(key) for key in keys}, cluster_ids)

    async def strangers(self, inventory: Inventory) -> AsyncIterator[Finding]:
        """Yield the objects of no partition of any topic. Raises ``Unavailable``."""
        counts = {topic.topic_id: topic.partition_count for topic in inventory.topics}
        for prefix in ("segments/", "pages/", "removed/", "tree/", "manifests/"):
            async for info in self._store.list(prefix):
                owner = object_owner(info.key)
                is_known = owner is not None and (owner[0] in inventory.deleted or owner[1] < counts.get(owner[0], 0))
                if not is_known and info.last_modified_ms < self._before_ms:
                    yield orphan_finding(info.key)

    async def partition(self, topic: FoundTopic, index: int) -> PartitionReport:
        """Check one partition: marker, manifest, history and orphans. Raises ``Unavailable``."""
        # The store is listed before the manifest is read, so that an object that a commit refers to is no orphan.
        aged: list[ObjectInfo] = []
        for make_prefix in DATA_PREFIXES:
            listed = self._store.list(make_prefix(topic.topic_id, index))
            aged += [info async for info in listed if info.last_modified_ms < self._before_ms]
        manifests = [info async for info in self._store.list(manifests_prefix(topic.topic_id, index))]
        findings = unmarked_manifests(manifests, self._before_ms)
        marker = newest_marker(manifests)
        if marker is None:
            progress = Progress(topic=topic.name, partition=index)
            unreferenced = [] if manifests else [orphan_finding(info.key) for info in aged]
            return PartitionReport(progress=progress, findings=(*findings, *unreferenced))
        try:
            sha256, wrong = judge_marker(await self._store.get(marker), marker)
        except NoSuchObject:
            sha256, wrong = None, []
        report = await self._verifier.version(topic.name, index, marked_manifest(marker), sha256)
        findings += [*wrong, *report.findings]
        findings = await self._confirmed(topic.topic_id, index, marker, findings)
        if not HIDES_REFERENCES & {found.kind for found in findings}:
            findings += [orphan_finding(key) for key in await self._orphans(marker, aged, manifests)]
        return replace(report, findings=tuple(findings))

    async def _orphans(self, marker: str, aged: list[ObjectInfo], manifests: list[ObjectInfo]) -> list[str]:
        """Keys of the partition's orphans, by the same rule as the sweep. None are named if this release cannot judge that."""
        referenced = await self._referenced(marker, with_removed=True)
        if referenced is None:
            return []
        unreferenced = [garbage.key for garbage in orphans(aged, referenced, 0)]
        return [*unreferenced, *lost_manifests(manifests, self._before_ms)]

    async def _confirmed(self, topic_id: UUID, index: int, marker: str, findings: list[Finding]) -> list[Finding]:
        """``findings`` without the objects that were deleted as intended since ``marker`` was read."""
        if not MISSING & {found.kind for found in findings}:
            return findings
        if await is_hidden(self._store, topic_id):
            return []
        newest = newest_marker([info async for info in self._store.list(manifests_prefix(topic_id, index))])
        if newest is None or newest == marker:
            return findings
        referenced = await self._referenced(newest, with_removed=False)
        if referenced is None:
            return findings
        return [found for found in findings if found.kind not in MISSING or found.key in {*referenced, marked_manifest(newest)}]

    async def _referenced(self, marker: str, *, with_removed: bool) -> frozenset[str] | None:
        """Keys of all objects that a committed version refers to; None if that cannot be told."""
        try:
            _, manifest = await read_version(self._store, self._source, marker)
            check_writer(manifest)
            live = [entry.key async for entry in self._source.segments(manifest)]
            removed = [each.key async for each in self._source.removed(manifest)] if with_removed else []
            return with_data_keys(live_keys(manifest, live).union(removed))
        except (Corrupt, Invalid, NoSuchObject):
            return None
