"""Names of all objects in the store. A key is made once and never reused; nothing else builds or parses keys. No I/O.

::

    owners/<number>.json                                                    owner of the bucket: the last one
    topics/<topic id>/<inverted version>-<version>.json                     topic descriptor
    topics/<topic id>.deleted                                               deletion marker
    coordinators/<topic name>/<partition>/<order>-<owner>-<epoch>-<offset>.state       state of a coordinator
    segments/<topic id>/<partition>/<base offset>-<epoch>-<random>.segment
    segments/<topic id>/<partition>/<base offset>-<epoch>-<random>.key      wrapped data key of an encrypted segment
    pages/<topic id>/<partition>/<base offset>-<level>-<random>.page        sealed manifest index page
    removed/<topic id>/<partition>/<number>-<random>.removed                list of removed objects
    tree/<topic id>/<partition>/<first leaf>-<level>-<random>.tree          page of the partition's Merkle tree
    manifests/<topic id>/<partition>/<inverted version>-<version>.version   manifest that was stored after its commit
    manifests/<topic id>/<partition>/<inverted version>-<version>-<random>.manifest    one that was stored before
    manifests/<topic id>/<partition>/<inverted version>-<version>-<random>.committed   marker of its commit
    probe/<random>                                                          object of a running probe of the store

Topic ids are 32 hex digits, so a re-created topic shares nothing with its predecessor. Numbers are padded, so listings are in
offset order. Versions are inverted (2**64 - 1 - version, 16 hex digits), so a listing begins with the newest. The
random part prevents that two workers that race for the same offsets or version write the same key. A version object needs none:
only the winner of the race for a version writes it. It is its own commit marker.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple
from uuid import UUID

OWNERS_PREFIX: Final = "owners/"
TOPICS_PREFIX: Final = "topics/"
LEASES_PREFIX: Final = "leases/"
COORDINATORS_PREFIX: Final = "coordinators/"
PROBE_PREFIX: Final = "probe/"
_VERSION_MAX: Final = 2**64 - 1
_EPOCH_MAX: Final = 2**32 - 1
_MANIFEST: Final = ".manifest"
_COMMITTED: Final = ".committed"
_VERSION: Final = ".version"
_DELETED: Final = ".deleted"
_SEGMENT: Final = ".segment"
_DATA_KEY: Final = ".key"
_SEGMENT_PATTERN: Final = re.compile(r"segments/([0-9a-f]{32})/(\d+)/(\d{20})-(\d{10})-([0-9a-f]{16})\.segment")
_MANIFEST_PATTERN: Final = re.compile(
    r"manifests/([0-9a-f]{32})/(\d+)/[0-9a-f]{16}-(\d+)(?:-[0-9a-f]{16}\.(manifest|committed)|\.version)"
)
_BUCKET_OWNER_PATTERN: Final = re.compile(r"owners/(\d{20})\.json")
_OWNER_PATTERN: Final = re.compile(r"(?:segments|pages|removed|tree|manifests)/([0-9a-f]{32})/(\d{1,9})/")
_DELETED_PATTERN: Final = re.compile(r"topics/([0-9a-f]{32})\.deleted")
_TOPIC_PATTERN: Final = re.compile(r"topics/([0-9a-f]{32})/[0-9a-f]{16}-(\d{1,20})\.json")
_STATE_PATTERN: Final = re.compile(r"coordinators/([A-Za-z0-9_.-]{1,200})/(\d{1,9})/[0-9a-f]{32}-(\d+)-(\d+)-(\d+)\.state")


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentKey:
    """The parts of a segment's key."""

    topic_id: UUID
    partition: int
    base_offset: int
    leader_epoch: int
    random_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicKey:
    """The parts of the key of a topic descriptor."""

    topic_id: UUID
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestKey:
    """The parts of the key of a manifest or of its commit marker. A version object is both, and counts as a marker."""

    topic_id: UUID
    partition: int
    version: int
    is_marker: bool


class StateKey(NamedTuple):
    """The parts of the key of a coordinator's state, in the order of age: of one log's states the greatest is the newest."""

    topic: str
    partition: int
    owner_number: int
    leader_epoch: int
    offset: int


def probe_key(random_id: int) -> str:
    return f"{PROBE_PREFIX}{random_id:016x}"


def lease_key(random_id: int) -> str:
    return f"{LEASES_PREFIX}{random_id:016x}.json"


def owner_key(number: int) -> str:
    """Key of the bucket's owner of this number; the first owner has number 0."""
    return f"{OWNERS_PREFIX}{number:020d}.json"


def parse_owner_key(key: str) -> int | None:
    """Inverse of :func:`owner_key`; None for any other key."""
    match = _BUCKET_OWNER_PATTERN.fullmatch(key)
    return None if match is None else int(match.group(1))


def topic_prefix(topic_id: UUID) -> str:
    """Prefix of all descriptors of a topic."""
    return f"{TOPICS_PREFIX}{topic_id.hex}/"


def topic_key(topic_id: UUID, version: int) -> str:
    return f"{topic_prefix(topic_id)}{_VERSION_MAX - version:016x}-{version}.json"


def states_prefix(topic: str, partition: int) -> str:
    """Prefix of the states of a coordinator partition."""
    return f"{COORDINATORS_PREFIX}{topic}/{partition}/"


def state_key(parts: StateKey) -> str:
    """Key of a coordinator's state. A listing begins with the newest."""
    topic, partition, owner, epoch, offset = parts
    order = f"{_EPOCH_MAX - owner:08x}{_EPOCH_MAX - epoch:08x}{_VERSION_MAX - offset:016x}"
    return f"{states_prefix(topic, partition)}{order}-{owner}-{epoch}-{offset}.state"


def parse_state_key(key: str) -> StateKey | None:
    """Inverse of :func:`state_key`; None for any other key."""
    match = _STATE_PATTERN.fullmatch(key)
    if match is None:
        return None
    topic, *numbers = match.groups()
    parts = StateKey(topic, *map(int, numbers))
    return parts if state_key(parts) == key else None


def deletion_marker_key(topic_id: UUID) -> str:
    """Key of the marker of a deleted topic; it overrides the topic's descriptor."""
    return f"{TOPICS_PREFIX}{topic_id.hex}{_DELETED}"


def deleted_topic_of(key: str) -> UUID | None:
    """Inverse of :func:`deletion_marker_key`; None for any other key."""
    match = _DELETED_PATTERN.fullmatch(key)
    return None if match is None else UUID(match.group(1))


def segments_prefix(topic_id: UUID, partition: int) -> str:
    return f"segments/{topic_id.hex}/{partition}/"


def pages_prefix(topic_id: UUID, partition: int) -> str:
    return f"pages/{topic_id.hex}/{partition}/"


def removed_prefix(topic_id: UUID, partition: int) -> str:
    return f"removed/{topic_id.hex}/{partition}/"


def tree_prefix(topic_id: UUID, partition: int) -> str:
    return f"tree/{topic_id.hex}/{partition}/"


def manifests_prefix(topic_id: UUID, partition: int) -> str:
    return f"manifests/{topic_id.hex}/{partition}/"


DATA_PREFIXES: Final = (segments_prefix, pages_prefix, removed_prefix, tree_prefix)
"""Make the prefixes of the objects that a partition's manifests refer to."""


def partition_prefixes(topic_id: UUID, partition: int) -> tuple[str, ...]:
    """Prefixes that together hold every object of a partition."""
    make_prefixes = (*DATA_PREFIXES, manifests_prefix)
    return tuple(make_prefix(topic_id, partition) for make_prefix in make_prefixes)


def topic_prefixes(topic_id: UUID) -> tuple[str, ...]:
    """Prefixes that together hold every object of a topic but its descriptor; manifests last, because they lead to the rest."""
    return tuple(f"{kind}/{topic_id.hex}/" for kind in ("segments", "pages", "removed", "tree", "manifests"))


def segment_key(topic_id: UUID, partition: int, base_offset: int, leader_epoch: int, random_id: int) -> str:
    return f"{segments_prefix(topic_id, partition)}{base_offset:020d}-{leader_epoch:010d}-{random_id:016x}.segment"


def data_key_key(segment: str) -> str:
    """Key of the object that holds the wrapped data key of the segment at this key, if that is encrypted."""
    return segment.removesuffix(_SEGMENT) + _DATA_KEY


def is_data_key(key: str) -> bool:
    """Whether the object at ``key`` holds a wrapped data key."""
    return key.endswith(_DATA_KEY)


def with_data_keys(keys: Iterable[str]) -> frozenset[str]:
    """``keys``, and those of the data keys that the segments among them may have."""
    found = frozenset(keys)
    return found.union(data_key_key(key) for key in found if key.endswith(_SEGMENT))


def page_key(topic_id: UUID, partition: int, base_offset: int, level: int, random_id: int) -> str:
    return f"{pages_prefix(topic_id, partition)}{base_offset:020d}-{level}-{random_id:016x}.page"


def removed_list_key(topic_id: UUID, partition: int, number: int, random_id: int) -> str:
    return f"{removed_prefix(topic_id, partition)}{number:020d}-{random_id:016x}.removed"


def tree_page_key(topic_id: UUID, partition: int, first_leaf: int, level: int, random_id: int) -> str:
    return f"{tree_prefix(topic_id, partition)}{first_leaf:020d}-{level}-{random_id:016x}.tree"


def manifest_key(topic_id: UUID, partition: int, version: int, random_id: int) -> str:
    return f"{manifests_prefix(topic_id, partition)}{_VERSION_MAX - version:016x}-{version}-{random_id:016x}{_MANIFEST}"


def version_key(topic_id: UUID, partition: int, version: int) -> str:
    """Key of the manifest of a version that is committed before its object is stored."""
    return f"{manifests_prefix(topic_id, partition)}{_VERSION_MAX - version:016x}-{version}{_VERSION}"


def is_version_object(key: str) -> bool:
    """Whether the object at ``key`` is a manifest that was stored after its commit, and so its own marker."""
    return key.endswith(_VERSION)


def marker_key(manifest: str) -> str:
    """Key of the object that says that the manifest at this key is committed."""
    return manifest if is_version_object(manifest) else manifest.removesuffix(_MANIFEST) + _COMMITTED


def marked_manifest(marker: str) -> str:
    """Inverse of :func:`marker_key`."""
    return marker if is_version_object(marker) else marker.removesuffix(_COMMITTED) + _MANIFEST


def is_marker(key: str) -> bool:
    """Whether the object at ``key`` says that a version is committed."""
    return key.endswith(_COMMITTED) or is_version_object(key)


def newest_committed(keys: Iterable[str]) -> str | None:
    """Key of the newest committed manifest among a partition's listed manifest keys, in any order; None without a marker."""
    markers = [key for key in keys if is_marker(key) and _MANIFEST_PATTERN.fullmatch(key)]
    return marked_manifest(min(markers)) if markers else None


def parse_segment_key(key: str) -> SegmentKey | None:
    """The parts of a segment's key; None for any other key."""
    match = _SEGMENT_PATTERN.fullmatch(key)
    if match is None:
        return None
    topic, partition, base, epoch, random_id = match.groups()
    return SegmentKey(
        topic_id=UUID(topic), partition=int(partition), base_offset=int(base), leader_epoch=int(epoch),
        random_id=int(random_id, 16),
    )  # fmt: skip


def object_owner(key: str) -> tuple[UUID, int] | None:
    """Topic and partition of an object of a partition; None for any other key."""
    match = _OWNER_PATTERN.match(key)
    return None if match is None else (UUID(match.group(1)), int(match.group(2)))


def is_upload_key(key: str) -> bool:
    """Whether multipart uploads are made to the key: a segment's or a probe's."""
    return key.startswith(PROBE_PREFIX) or parse_segment_key(key) is not None


def parse_manifest_key(key: str) -> ManifestKey | None:
    """The parts of the key of a manifest or a marker; None for any other key."""
    match = _MANIFEST_PATTERN.fullmatch(key)
    if match is None:
        return None
    topic, partition, version, kind = match.groups()
    return ManifestKey(topic_id=UUID(topic), partition=int(partition), version=int(version), is_marker=kind != "manifest")


def parse_topic_key(key: str) -> TopicKey | None:
    """The parts of a descriptor's key; None for any other key."""
    match = _TOPIC_PATTERN.fullmatch(key)
    return None if match is None else TopicKey(topic_id=UUID(match.group(1)), version=int(match.group(2)))
