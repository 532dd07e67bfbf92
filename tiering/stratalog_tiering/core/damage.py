"""The kinds of damage that history in a store can have, how they are told apart, and what can be done about each.

Bytes and references in, findings out; ``cold/verifier.py`` reads a partition, ``cold/bucket_scrub.py`` a whole bucket. No I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from stratalog_core.errors import Corrupt, Invalid
from stratalog_core.ports import Buffer
from stratalog_tiering.core.forks import manifest_keys
from stratalog_tiering.format.commit_marker import decode_marker, decode_topic
from stratalog_tiering.format.descriptor import OwnerDescriptor, TopicDescriptor, decode_descriptor
from stratalog_tiering.format.lookup import live_segments
from stratalog_tiering.format.manifest import (
    Manifest,
    ManifestPage,
    PageRef,
    SegmentEntry,
    decode_manifest,
    decode_page,
    parse_manifest,
    parse_page,
)
from stratalog_tiering.format.object_keys import (
    is_version_object,
    marked_manifest,
    marker_key,
    newest_committed,
    owner_key,
)
from stratalog_tiering.store.base import ObjectInfo


class Damage(StrEnum):
    """A kind of damage. The values are printed and never change."""

    MARKER_MISSING = "marker-missing"
    MARKER_ALTERED = "marker-altered"
    MANIFEST_MISSING = "manifest-missing"
    MANIFEST_ALTERED = "manifest-altered"
    MANIFEST_DIGEST = "manifest-digest-mismatch"
    """The manifest matches its own CRC, but not the digest that its marker or pointer contains: one of them was replaced."""
    MANIFEST_INCONSISTENT = "manifest-inconsistent"
    CHAIN_BROKEN = "chain-broken"
    PAGE_MISSING = "page-missing"
    PAGE_ALTERED = "page-altered"
    REMOVED_LIST_MISSING = "removed-list-missing"
    REMOVED_LIST_ALTERED = "removed-list-altered"
    TREE_PAGE_MISSING = "tree-page-missing"
    TREE_PAGE_ALTERED = "tree-page-altered"
    TREE_HEAD = "tree-head-mismatch"
    """The head of the partition's Merkle tree is not that of its spans."""
    TREE_LEAVES = "tree-leaves-mismatch"
    """A segment's batches are intact, but not the leaves of the partition's Merkle tree."""
    GAP = "gap"
    OVERLAP = "overlap"
    SEGMENT_MISSING = "segment-missing"
    SEGMENT_SIZE = "segment-size-mismatch"
    SEGMENT_DATA = "segment-data-altered"
    SEGMENT_SECTION = "segment-section-altered"
    DATA_KEY_MISSING = "data-key-missing"
    DATA_KEY_ALTERED = "data-key-altered"
    """The object with a segment's data key cannot be read, or was wrapped for another partition or by another key."""
    SEGMENT_FOOTER = "segment-footer-altered"
    SEGMENT_DIGEST = "segment-digest-mismatch"
    DESCRIPTOR_MISSING = "descriptor-missing"
    DESCRIPTOR_ALTERED = "descriptor-altered"
    ORPHAN = "orphan"
    UNKNOWN_FORMAT = "unknown-format"


MISSING: Final = frozenset(kind for kind in Damage if kind.endswith("-missing"))
HIDES_REFERENCES: Final = frozenset(
    kind for kind in Damage if kind.startswith(("marker-", "manifest-", "page-", "removed-list-", "tree-page-"))
) | {Damage.UNKNOWN_FORMAT}
"""Kinds with which the objects that a partition refers to are not all known."""
REMEMBERED_MAX: Final = 50
"""Damaged objects of a partition whose keys are kept in its status, for the worker that scrubs it next."""
_RESTORE: Final = "run the scrub with --repair and --copy, or restore the object's earlier version from the store's versions"
_REWRITE: Final = f"{_RESTORE}; while the hot copy exists, --repair with --data or --metadata writes the segment again"
_REPORT: Final = "keep the bucket as it is and report it: a writer committed this"
REMEDIES: Final[dict[Damage, str]] = {
    **dict.fromkeys(Damage, _RESTORE),
    Damage.MARKER_MISSING: "start a tiering worker: it writes the marker if metadata says that the version is committed;"
    " else the sweep deletes the manifest",
    Damage.SEGMENT_MISSING: _REWRITE,
    Damage.SEGMENT_SIZE: _REWRITE,
    Damage.SEGMENT_DATA: _REWRITE,
    Damage.SEGMENT_SECTION: _REWRITE,
    Damage.SEGMENT_FOOTER: _REWRITE,
    Damage.SEGMENT_DIGEST: _REWRITE,
    Damage.GAP: _REPORT,
    Damage.OVERLAP: _REPORT,
    Damage.MANIFEST_INCONSISTENT: _REPORT,
    Damage.TREE_HEAD: _REPORT,
    Damage.TREE_LEAVES: _REPORT,
    Damage.ORPHAN: "nothing is lost: a tiering worker of the cluster deletes it in its next sweep",
    Damage.DESCRIPTOR_MISSING: f"start a tiering worker, which writes descriptors when it offloads; or {_RESTORE}",
    Damage.DESCRIPTOR_ALTERED: f"start a tiering worker, which writes descriptors when it offloads; or {_RESTORE}",
    Damage.UNKNOWN_FORMAT: "upgrade this release, and repeat the command",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Damage found. ``block`` is None if it is not in a block. Offsets: base inclusive, end exclusive; equal if unknown."""

    kind: Damage
    key: str
    problem: str
    base_offset: int = 0
    end_offset: int = 0
    block: int | None = None

    def __str__(self) -> str:
        place = "" if self.block is None else f", block {self.block}"
        return f"{self.key}{place}, offsets {self.base_offset}..{self.end_offset - 1}: {self.problem}"


def remembered(damaged: Iterable[str]) -> tuple[str, ...]:
    """The keys that a partition's status keeps: of segments the newest, which most likely have hot copies."""
    return tuple(sorted(damaged)[-REMEMBERED_MAX:])


def may_be_damaged(key: str, known: Sequence[str]) -> bool:
    """Whether the object at ``key`` is among those that a status keeps, or may have been left out for lack of room."""
    return key in known or (len(known) >= REMEMBERED_MAX and key < known[0])


def judge_manifest(content: Buffer, sha256: bytes | None, key: str) -> tuple[Manifest | None, list[Finding]]:
    """The manifest at ``key`` as far as it can be read, and what is wrong with it."""
    try:
        return decode_manifest(content, sha256), []
    except Invalid as unknown:
        return None, [Finding(kind=Damage.UNKNOWN_FORMAT, key=key, problem=unknown.message)]
    except Corrupt as bad:
        problem = bad.message
    try:
        manifest = parse_manifest(content, sha256)
    except Corrupt:
        return _judge_without_digest(content, sha256, key, problem)
    spans: Sequence[PageRef | SegmentEntry] = (*manifest.pages, *manifest.segments)
    tiling = tiling_findings(spans, manifest.start_offset, manifest.end_offset, key)
    inconsistent = Finding(
        kind=Damage.MANIFEST_INCONSISTENT, key=key, problem=problem,
        base_offset=manifest.start_offset, end_offset=manifest.end_offset,
    )  # fmt: skip
    return manifest, tiling or [inconsistent]


def _judge_without_digest(
    content: Buffer, sha256: bytes | None, key: str, problem: str
) -> tuple[Manifest | None, list[Finding]]:
    manifest, findings = judge_manifest(content, None, key) if sha256 is not None else (None, [])
    if manifest is None:
        return None, [Finding(kind=Damage.MANIFEST_ALTERED, key=key, problem=problem)]
    return manifest, [
        Finding(
            kind=Damage.MANIFEST_DIGEST, key=key, problem=problem,
            base_offset=manifest.start_offset, end_offset=manifest.end_offset,
        ),
        *findings,
    ]  # fmt: skip


def judge_page(content: Buffer, ref: PageRef, manifest: Manifest) -> tuple[tuple[SegmentEntry, ...], list[Finding]]:
    """The live segments of a page, none if it cannot be read, and what is wrong with it."""
    try:
        page, problem = decode_page(content, ref.sha256), ""
    except Invalid as unknown:
        return (), [page_finding(Damage.UNKNOWN_FORMAT, ref, unknown.message)]
    except Corrupt as bad:
        parsed = _parsed_page(content, ref)
        if parsed is None:
            return (), [page_finding(Damage.PAGE_ALTERED, ref, bad.message)]
        page, problem = parsed, bad.message
    segments = live_segments(manifest, page)
    tiling = tiling_findings(segments, ref.base_offset, ref.end_offset, ref.key)
    return segments, tiling or ([page_finding(Damage.MANIFEST_INCONSISTENT, ref, problem)] if problem else [])


def _parsed_page(content: Buffer, ref: PageRef) -> ManifestPage | None:
    try:
        return parse_page(content, ref.sha256)
    except Corrupt:
        return None


def page_finding(kind: Damage, ref: PageRef, problem: str) -> Finding:
    """A finding about a page; its segments are not checked then."""
    return Finding(
        kind=kind, key=ref.key, problem=f"{problem}; its {ref.segment_count} segments are not checked",
        base_offset=ref.base_offset, end_offset=ref.end_offset,
    )  # fmt: skip


def segment_finding(entry: SegmentEntry, kind: Damage, problem: str) -> Finding:
    """A finding about a segment as a whole."""
    return Finding(kind=kind, key=entry.key, problem=problem, base_offset=entry.base_offset, end_offset=entry.end_offset)


def tiling_findings(spans: Sequence[PageRef | SegmentEntry], start: int, end: int, key: str) -> list[Finding]:
    """The gaps and overlaps of spans that must tile ``start`` to ``end``; ``key`` is the object that lists them.

    Retention and DeleteRecords move the start, so no removal explains a gap behind it.
    """
    findings, expected = [], start
    for span in spans:
        low, high = sorted((expected, span.base_offset))
        if span.base_offset > expected:
            problem = f"{span.key} begins at offset {span.base_offset}; expected {expected}: no segment holds what is between"
            findings.append(Finding(kind=Damage.GAP, key=key, problem=problem, base_offset=low, end_offset=high))
        elif span.base_offset < expected:
            problem = f"{span.key} begins at offset {span.base_offset}; expected {expected}: two segments hold what is between"
            findings.append(Finding(kind=Damage.OVERLAP, key=key, problem=problem, base_offset=low, end_offset=high))
        expected = max(expected, span.end_offset)
    if expected != end:
        kind = Damage.GAP if expected < end else Damage.MANIFEST_INCONSISTENT
        problem = f"the segments end at offset {expected}; {key} says {end}"
        low, high = sorted((expected, end))
        findings.append(Finding(kind=kind, key=key, problem=problem, base_offset=low, end_offset=high))
    return findings


def newest_marker(listed: Iterable[ObjectInfo]) -> str | None:
    """Key of the newest commit marker in a listing of a partition's manifests; None without any."""
    manifest = newest_committed(info.key for info in listed)
    return marker_key(manifest) if manifest is not None else None


def unmarked_manifests(listed: Sequence[ObjectInfo], before_ms: int) -> list[Finding]:
    """Manifests above the newest marker that were written before ``before_ms``: the marker is lost, or the commit failed."""
    marked = [key.version for _, key in manifest_keys(listed) if key.is_marker]
    version = max(marked, default=0)
    problem = f"the newest commit marker is of version {version}: this version's marker is missing, or its commit failed"
    return [
        Finding(kind=Damage.MARKER_MISSING, key=marker_key(info.key), problem=problem)
        for info, key in manifest_keys(listed)
        if not key.is_marker and key.version > version and info.last_modified_ms < before_ms
    ]


def lost_manifests(listed: Sequence[ObjectInfo], before_ms: int) -> list[str]:
    """Keys of manifests that were written before ``before_ms`` and of whose version another one was committed."""
    marked = {key.version: marked_manifest(info.key) for info, key in manifest_keys(listed) if key.is_marker}
    return [
        info.key
        for info, key in manifest_keys(listed)
        if not key.is_marker and marked.get(key.version, info.key) != info.key and info.last_modified_ms < before_ms
    ]


def orphan_finding(key: str) -> Finding:
    return Finding(kind=Damage.ORPHAN, key=key, problem="nothing refers to it")


def judge_marker(content: Buffer, key: str) -> tuple[bytes | None, list[Finding]]:
    """The digest in the commit marker at ``key``, None if it cannot be trusted, and what is wrong with the marker."""
    try:
        return bytes.fromhex(decode_marker(content, key).sha256), []
    except (Corrupt, Invalid) as bad:
        if is_version_object(key):
            return None, []  # The manifest itself, which is judged as one.
        kind = Damage.UNKNOWN_FORMAT if isinstance(bad, Invalid) else Damage.MARKER_ALTERED
        return None, [Finding(kind=kind, key=key, problem=bad.message)]


def judge_topic(content: Buffer, key: str) -> tuple[TopicDescriptor | None, list[Finding]]:
    """The topic descriptor at ``key``, None if it is damaged, and what is wrong with it. JSON has no checksum of its own."""
    try:
        return decode_topic(content, key), []
    except Invalid as unknown:
        return None, [Finding(kind=Damage.UNKNOWN_FORMAT, key=key, problem=unknown.message)]
    except Corrupt as bad:
        return None, [Finding(kind=Damage.DESCRIPTOR_ALTERED, key=key, problem=bad.message)]


def judge_owners(contents: Mapping[str, Buffer], cluster_ids: frozenset[str]) -> list[Finding]:
    """Findings about the bucket's owners, given by key; ``cluster_ids`` are those in the bucket's manifests."""
    findings, owners = [], set()
    for key, content in contents.items():
        try:
            owners.add(decode_descriptor(content, OwnerDescriptor, key).cluster_id)
        except Invalid as unknown:
            findings.append(Finding(kind=Damage.UNKNOWN_FORMAT, key=key, problem=unknown.message))
        except Corrupt as bad:
            findings.append(Finding(kind=Damage.DESCRIPTOR_ALTERED, key=key, problem=bad.message))
    missing = [key for number in range(len(contents)) if (key := owner_key(number)) not in contents]
    if cluster_ids and not contents:
        missing = [owner_key(0)]
    problem = "an owner of the bucket is missing"
    findings += [Finding(kind=Damage.DESCRIPTOR_MISSING, key=key, problem=problem) for key in missing]
    if not findings and not cluster_ids <= owners:
        strangers = ", ".join(sorted(cluster_ids - owners))
        problem = f"the history is also of cluster {strangers}, which never owned the bucket"
        findings.append(Finding(kind=Damage.DESCRIPTOR_ALTERED, key=owner_key(len(contents) - 1), problem=problem))
    return findings
