"""Repairs what a scrub finds, in place: from a second copy of the bucket, from the cluster's metadata, or from the hot copy.

An object is replaced by the bytes that were committed under its key, which a digest in the history identifies, and by nothing
else. Other damage is left as it is, and the result says why. Nothing is deleted. Each repair is read back
before it is reported as one. A repaired manifest or page can show more damage behind it, so the partition is checked again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Protocol
from uuid import UUID

from stratalog_core.errors import (
    Conflict,
    Corrupt,
    Fenced,
    Invalid,
    NoSuchObject,
    NotFound,
    OutcomeUnknown,
    Refused,
    StorageFailed,
    StratalogError,
    Unavailable,
)
from stratalog_core.object_lock import in_force
from stratalog_metadata.records import ManifestPointer
from stratalog_tiering.cold.archive import read_marker, read_version
from stratalog_tiering.cold.bucket_scrub import BucketScrub, FoundTopic
from stratalog_tiering.cold.manifest_source import ManifestSource
from stratalog_tiering.cold.segment_check import require_sound
from stratalog_tiering.cold.verifier import READS_AT_ONCE, PartitionReport
from stratalog_tiering.copies.copying import CopyLimits, copy_object, has_object
from stratalog_tiering.copies.data_keys import data_key_in_copy
from stratalog_tiering.copies.descriptors import content_or_nothing, put_checked, put_unstored
from stratalog_tiering.core.damage import Damage, Finding, judge_marker, judge_topic, newest_marker
from stratalog_tiering.core.references import Reference, segment_object, side_objects
from stratalog_tiering.format.descriptor import (
    CommitMarker,
    OwnerDescriptor,
    TopicDescriptor,
    decode_descriptor,
    encode_descriptor,
)
from stratalog_tiering.format.locks import manifest_lock
from stratalog_tiering.format.manifest import Manifest, SegmentEntry, decode_manifest
from stratalog_tiering.format.manifest_writers import check_writer
from stratalog_tiering.format.object_keys import (
    is_marker,
    is_version_object,
    manifests_prefix,
    marked_manifest,
    marker_key,
    owner_key,
    parse_manifest_key,
    parse_segment_key,
    parse_topic_key,
    topic_key,
    topic_prefix,
)
from stratalog_tiering.store import ObjectStore

ROUNDS_MAX: Final = 5
"""Each round may show what the one before hid: a marker its manifest, that its pages, those their segments."""
_SEGMENT: Final = frozenset(kind for kind in Damage if kind.startswith(("segment-", "data-key-")))
_SIDE: Final = frozenset(kind for kind in Damage if kind.startswith(("page-", "removed-list-", "tree-page-")))
_VERSION: Final = frozenset(
    {
        Damage.MARKER_MISSING, Damage.MARKER_ALTERED, Damage.MANIFEST_MISSING, Damage.MANIFEST_ALTERED, Damage.MANIFEST_DIGEST,
    }
)  # fmt: skip
_NOT_REPAIRED: Final = (Conflict, Corrupt, Fenced, Invalid, NoSuchObject, NotFound, OutcomeUnknown, Refused, StorageFailed)


class RepairedFrom(StrEnum):
    """Where the right bytes came from. The values are printed and never change."""

    COPY = "second-copy"
    HOT = "hot-copy"
    METADATA = "metadata"


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """The result of one repair. ``source`` is None if it was not repaired; ``problem`` then says why."""

    source: RepairedFrom | None
    problem: str = ""


Repairs = Mapping[tuple[Damage, str], Repair]
"""By the kind and the key of the finding."""


class HotCopies(Protocol):
    """Writes segments again from their hot copies."""

    async def rewrite(self, topic_id: UUID, partition: int, key: str) -> str:
        """Replace the segment at ``key`` in the committed history; returns the new one's key. Raises as `repair_from_hot`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairSources:
    """Where the right bytes may come from; without any, nothing can be repaired.

    ``pointers`` are those of metadata by topic and partition, ``topics`` its topics by id. With ``has_metadata`` a version that
    has no pointer was not committed.
    """

    copy: ObjectStore | None = None
    hot: HotCopies | None = None
    pointers: Mapping[tuple[UUID, int], ManifestPointer] = field(default_factory=dict)
    topics: Mapping[UUID, TopicDescriptor] = field(default_factory=dict)
    has_metadata: bool = False


class Repairer:
    """Checks partitions by ``scrub``, and repairs what it finds in ``store``."""

    def __init__(self, scrub: BucketScrub, store: ObjectStore, sources: RepairSources, limits: CopyLimits) -> None:
        self._scrub = scrub
        self._store = store
        self._sources = sources
        self._limits = limits

    async def partition(self, topic: FoundTopic, index: int) -> tuple[PartitionReport, Repairs]:
        """Check and repair one partition; returns all findings, and what was done about each. Raises ``Unavailable``."""
        report = await self._scrub.partition(topic, index)
        found = {_name(each): each for each in await self._with_lost_version(topic, index, report.findings)}
        all_findings = [*found.values()] if not report.findings else [*report.findings, *_without(found, report.findings)]
        repairs: dict[tuple[Damage, str], Repair] = {}
        for _ in range(ROUNDS_MAX):
            open_findings = [each for name, each in found.items() if name not in repairs]
            hiding = [each for each in open_findings if each.kind not in _SEGMENT]
            for each in hiding or open_findings:
                same = next((known for (_, key), known in repairs.items() if key == each.key and each.kind in _SEGMENT), None)
                repairs[_name(each)] = same or await self._repaired(topic, index, each)
            if not open_findings:
                break
            if any(repairs[_name(each)].source is not None for each in hiding):
                report = await self._scrub.partition(topic, index)
                new = {_name(each): each for each in report.findings if _name(each) not in found}
                all_findings += [each for each in report.findings if _name(each) in new]
                found.update(new)
        return PartitionReport(progress=report.progress, findings=tuple(all_findings)), repairs

    async def repair(self, topic: FoundTopic, index: int, findings: Iterable[Finding]) -> Repairs:
        """Repair what was found of one partition, without checking it again, as far as the sources answer."""
        repairs: dict[tuple[Damage, str], Repair] = {}
        for each in findings:
            if _name(each) in repairs:
                continue
            try:
                repairs[_name(each)] = await self._repaired(topic, index, each)
            except Unavailable as failure:
                repairs[_name(each)] = Repair(source=None, problem=failure.message)
        return repairs

    async def bucket(self, findings: Iterable[Finding]) -> Repairs:
        """Repair what was found of topics' descriptors and of the bucket's owners. Raises ``Unavailable``."""
        repairs: dict[tuple[Damage, str], Repair] = {}
        for each in findings:
            repairs[_name(each)] = await self._attempt(self._descriptor(each))
        return repairs

    async def _with_lost_version(self, topic: FoundTopic, index: int, findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
        """``findings``, and the newest committed version if the bucket has lost its manifest together with its marker."""
        if self._sources.copy is None:
            return findings
        prefix = manifests_prefix(topic.topic_id, index)
        theirs = newest_marker([info async for info in self._sources.copy.list(prefix)])
        listed = [info async for info in self._store.list(prefix)]
        if theirs is None or theirs in {info.key for info in listed}:
            return findings
        if any(each.key == theirs for each in findings) or _version(theirs) <= _version(newest_marker(listed)):
            return findings
        problem = "the second copy has this version of the history, which is newer than all that are here"
        return (*findings, Finding(kind=Damage.MARKER_MISSING, key=theirs, problem=problem))

    async def _repaired(self, topic: FoundTopic, index: int, finding: Finding) -> Repair:
        # Nothing in the bucket tells an altered format version of a version object, a marker or a data key from that of a
        # later release; their other copies do. All else is compared with a committed digest first.
        may_be_altered = finding.kind is Damage.UNKNOWN_FORMAT
        if finding.kind in _VERSION or (may_be_altered and parse_manifest_key(finding.key) is not None):
            return await self._attempt(self._version(topic.topic_id, index, finding.key))
        if may_be_altered and parse_segment_key(finding.key) is not None:
            return await self._attempt(self._segment_with_data_key(topic.topic_id, index, finding.key))
        if finding.kind in _SIDE:
            return await self._attempt(self._side_object(topic.topic_id, index, finding.key))
        if finding.kind in _SEGMENT:
            return await self._attempt(self._segment(topic.topic_id, index, finding))
        return Repair(source=None, problem="there is no repair for it, because a writer committed or left it so")

    async def _attempt(self, repair: Awaitable[RepairedFrom]) -> Repair:
        try:
            return Repair(source=await repair)
        except _NOT_REPAIRED as failure:
            return Repair(source=None, problem=failure.message)

    # --- versions: manifests with their markers

    async def _version(self, topic_id: UUID, index: int, key: str) -> RepairedFrom:
        manifest_key = marked_manifest(key) if is_marker(key) else key
        newest = newest_marker([info async for info in self._store.list(manifests_prefix(topic_id, index))])
        if newest is not None and _version(manifest_key) < _version(newest):
            await self._copy(await self._older_version(marked_manifest(newest), manifest_key))
            return RepairedFrom.COPY
        sha256, source = await self._committed_digest(topic_id, index, manifest_key)
        if source is RepairedFrom.METADATA:
            await put_unstored(self._store, self._sources.pointers[topic_id, index], self._limits.clock.wall_ms())
        wanted = await self._manifest_reference(manifest_key, sha256)
        if not await has_object(self._store, wanted, self._limits):
            await self._copy(wanted)
            source = RepairedFrom.COPY
        await self._put_marker(wanted)
        return source

    async def _older_version(self, newest: str, key: str) -> Reference:
        """The version at ``key``, which the chain from the version ``newest`` on leads to."""
        marker = await read_marker(self._store, marker_key(newest))
        manifest = decode_manifest(await self._store.get(newest), bytes.fromhex(marker.sha256))
        while manifest.previous_key and manifest.previous_key != key:
            manifest = decode_manifest(await self._store.get(manifest.previous_key), manifest.previous_sha256)
        if not manifest.previous_key:
            raise NotFound(f"the committed history does not lead to {key}")
        return await self._manifest_reference(key, manifest.previous_sha256)

    async def _committed_digest(self, topic_id: UUID, index: int, key: str) -> tuple[bytes, RepairedFrom]:
        """The digest of the version at ``key``, from metadata, or from its marker in the second copy.

        Raises ``NotFound`` if neither says that it was committed, ``Invalid`` if metadata contradicts.
        """
        pointer = self._sources.pointers.get((topic_id, index))
        if pointer is not None and pointer.object_key == key:
            return bytes.fromhex(pointer.sha256), RepairedFrom.METADATA
        if self._sources.has_metadata and (pointer is None or pointer.manifest_version <= _version(key)):
            known = f"version {pointer.manifest_version}" if pointer is not None else "no version"
            raise Invalid(f"metadata's history is at {known}: {key} was not committed, or the history has forked")
        copy = self._copy_of(key)
        try:
            sha256, findings = judge_marker(await copy.get(marker_key(key)), marker_key(key))
        except NoSuchObject as gone:
            raise NotFound(f"neither metadata nor the second copy says that {key} was committed") from gone
        if sha256 is None:
            problem = findings[0].problem if findings else "it cannot be read"
            raise Corrupt(f"the marker in the second copy is damaged, too: {problem}")
        return sha256, RepairedFrom.COPY

    async def _manifest_reference(self, key: str, sha256: bytes) -> Reference:
        """The manifest at ``key``, with the size that it has in the second copy, or here if there is no copy of it."""
        refusal = None
        for store in (self._sources.copy, self._store):
            try:
                content = await store.get(key) if store is not None else b""
                manifest = decode_manifest(content, sha256)
            except Refused as failure:
                refusal = failure
                continue
            except (Corrupt, Invalid, NoSuchObject):
                continue
            return Reference(key=key, sha256=sha256, object_bytes=len(content), lock=manifest_lock(manifest))
        raise refusal or NotFound(f"no copy of {key} with the committed digest is left")

    async def _put_marker(self, manifest: Reference) -> None:
        """Write the version's marker, locked as the manifest, unless it is right already, or the manifest is its own."""
        if is_version_object(manifest.key):
            return
        key = marker_key(manifest.key)
        marker = CommitMarker(manifest_key=manifest.key, manifest_version=_version(key), sha256=manifest.sha256.hex())
        await put_checked(self._store, key, encode_descriptor(marker), in_force(manifest.lock, self._limits.clock.wall_ms()))

    # --- what a manifest refers to

    async def _manifest(self, topic_id: UUID, index: int) -> tuple[ManifestSource, Manifest]:
        """The newest committed manifest, freshly read. Raises ``NotFound``, ``Corrupt``."""
        newest = newest_marker([info async for info in self._store.list(manifests_prefix(topic_id, index))])
        if newest is None:
            raise NotFound("the partition has no committed version")
        source = ManifestSource(self._store)
        _, manifest = await read_version(self._store, source, newest)
        check_writer(manifest)
        return source, manifest

    async def _side_object(self, topic_id: UUID, index: int, key: str) -> RepairedFrom:
        _, manifest = await self._manifest(topic_id, index)
        wanted = next((each for each in side_objects(manifest) if each.key == key), None)
        if wanted is None:
            raise NotFound(f"the committed manifest no longer refers to {key}")
        await self._copy(wanted)
        return RepairedFrom.COPY

    async def _entry(self, topic_id: UUID, index: int, key: str) -> SegmentEntry:
        source, manifest = await self._manifest(topic_id, index)
        entry = None
        async for each in source.segments(manifest):
            entry = each if each.key == key else entry
        if entry is None:
            raise NotFound(f"the committed manifest no longer refers to {key}")
        return entry

    async def _segment_with_data_key(self, topic_id: UUID, index: int, key: str) -> RepairedFrom:
        """Restore the data key of the segment at ``key``. The hot copy cannot tell whether it was altered."""
        await self._from_copy(await self._entry(topic_id, index, key), with_data_key=True)
        return RepairedFrom.COPY

    async def _segment(self, topic_id: UUID, index: int, finding: Finding) -> RepairedFrom:
        """Repair a segment from the second copy, else from the hot copy. Raises with both problems."""
        entry = await self._entry(topic_id, index, finding.key)
        try:
            await self._from_copy(entry, with_data_key=finding.kind in (Damage.DATA_KEY_MISSING, Damage.DATA_KEY_ALTERED))
            return RepairedFrom.COPY
        except (*_NOT_REPAIRED, Unavailable) as failure:
            if self._sources.hot is None:
                raise
            await self._from_hot(topic_id, index, entry, failure)
            return RepairedFrom.HOT

    async def _from_copy(self, entry: SegmentEntry, *, with_data_key: bool) -> None:
        """Copy a segment unless it is the committed object, and its data key if that is damaged or does not decrypt it."""
        wanted = segment_object(entry)
        if not await has_object(self._store, wanted, self._limits):
            await self._copy(wanted)
        if with_data_key:
            await self._data_key(entry)
        try:
            await self._require_sound(entry)
        except Corrupt:
            if with_data_key or not (await ManifestSource(self._store).footer(entry)).is_encrypted:
                raise
            await self._data_key(entry)
            await self._require_sound(entry)

    async def _from_hot(self, topic_id: UUID, index: int, entry: SegmentEntry, no_copy: StratalogError) -> None:
        assert self._sources.hot is not None
        try:
            await self._sources.hot.rewrite(topic_id, index, entry.key)
        except _NOT_REPAIRED as failure:
            if isinstance(no_copy, Unavailable):
                raise no_copy from failure
            raise NotFound(f"from the second copy: {no_copy.message}; from the hot copy: {failure.message}") from failure

    async def _data_key(self, entry: SegmentEntry) -> None:
        """Restore a segment's wrapped data key, if the copy's belongs to the partition and the key ring unwraps it."""
        footer = await ManifestSource(self._store).footer(entry)
        content = await data_key_in_copy(self._store, self._copy_of(footer.data_key), entry, footer, self._limits)
        await put_checked(self._store, footer.data_key, content)

    async def _require_sound(self, entry: SegmentEntry) -> None:
        await require_sound(
            self._store, ManifestSource(self._store), entry, self._limits.background, reads_at_once=READS_AT_ONCE
        )  # fmt: skip

    # --- descriptors

    async def _descriptor(self, finding: Finding) -> RepairedFrom:
        if finding.kind not in (Damage.DESCRIPTOR_MISSING, Damage.DESCRIPTOR_ALTERED, Damage.UNKNOWN_FORMAT):
            raise Invalid("there is no repair for it")
        if finding.key.startswith(owner_key(0).rpartition("/")[0]):
            content = await self._copy_of(finding.key).get(finding.key)
            decode_descriptor(content, OwnerDescriptor, finding.key)
            await put_checked(self._store, finding.key, content)
            return RepairedFrom.COPY
        topic_id, key = await self._topic_place(finding.key)
        newest = [info.key async for info in self._store.list(topic_prefix(topic_id))]
        known = self._sources.topics.get(topic_id)
        if known is not None and (not newest or key == newest[0]):
            await put_checked(self._store, key, encode_descriptor(known))
            return RepairedFrom.METADATA
        content = await self._copy_of(key).get(key)
        topic, wrong = judge_topic(content, key)
        if topic is None:
            raise Corrupt(f"the second copy is damaged, too: {wrong[0].problem}")
        if bytes(content) == await content_or_nothing(self._store, key):
            raise Corrupt("the second copy says the same")
        await put_checked(self._store, key, content)
        return RepairedFrom.COPY

    async def _topic_place(self, key: str) -> tuple[UUID, str]:
        """The topic of the descriptor at ``key``, and the key to write it to. ``key`` may be the prefix of all of them."""
        parsed = parse_topic_key(key)
        if parsed is not None:
            return parsed.topic_id, key
        topic_id = UUID(key.rstrip("/").rpartition("/")[2])
        if self._sources.copy is not None:
            async for info in self._sources.copy.list(topic_prefix(topic_id)):
                return topic_id, info.key
        return topic_id, topic_key(topic_id, 1)

    # --- writing

    def _copy_of(self, key: str) -> ObjectStore:
        if self._sources.copy is None:
            raise NotFound(f"there is no second copy of {key}")
        return self._sources.copy

    async def _copy(self, wanted: Reference) -> None:
        """Replace an object by that of the second copy. Raises ``NotFound`` if there is none."""
        copy = self._copy_of(wanted.key)
        try:
            await copy_object(copy, self._store, wanted, self._limits, replace=True)
        except NoSuchObject as gone:
            raise NotFound(f"the second copy does not have {wanted.key}") from gone


def _name(finding: Finding) -> tuple[Damage, str]:
    return finding.kind, finding.key


def _without(found: Mapping[tuple[Damage, str], Finding], findings: Iterable[Finding]) -> list[Finding]:
    known = {_name(each) for each in findings}
    return [each for name, each in found.items() if name not in known]


def _version(key: str | None) -> int:
    parsed = parse_manifest_key(key) if key is not None else None
    return parsed.version if parsed is not None else 0
