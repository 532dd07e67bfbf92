"""Descriptors: small JSON objects that say which cluster owns a bucket, what its topics are, which manifests are committed, and
which key protects a segment's data key.

They are JSON because people open them by hand. A reader ignores unknown members; ``format_version`` changes only if an old
reader would misread the object. No I/O. Formats: ``docs/reference/formats/object-keys.md``.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, TypeAlias, TypeVar
from uuid import UUID

import msgspec

from stratalog_core.errors import Corrupt, Invalid
from stratalog_core.malformed import MALFORMED
from stratalog_core.ports import Buffer

FORMAT_VERSION: Final = 1
_VERSION: Final = "format_version"
LEASE_MS_MAX: Final = 24 * 3_600_000
"""A holder that died keeps nothing for longer."""
RESTORABLE_MS_UNKNOWN: Final = 24 * 3_600_000
"""Assumed of a deletion marker that does not say it: what a broker promises unless it is configured otherwise."""
PARTITIONS_MAX: Final = 1_000_000
"""More than a broker creates. Readers visit every partition, so a damaged count must not keep them busy."""


class OwnerDescriptor(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster that writes to this bucket (or prefix), until an owner with the next ``number`` takes it over.

    ``taken_at_ms`` is wall time; ``previous_cluster_id`` is empty for the first owner.
    """

    cluster_id: str
    number: Annotated[int, msgspec.Meta(ge=0)]
    taken_at_ms: int
    previous_cluster_id: str = ""
    format_version: int = FORMAT_VERSION


class Detachment(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster has detached a topic whose record in metadata had ``topic_version``: deletions before that had been undone."""

    cluster_id: str
    topic_version: int


class TopicDescriptor(msgspec.Struct, frozen=True, kw_only=True):
    """A topic at its last offload. Every offload rewrites it, so it cannot record that the topic is deleted.

    ``detached`` is its last detachment, absent if there was none.
    """

    topic_id: UUID
    name: str
    partition_count: Annotated[int, msgspec.Meta(ge=0, le=PARTITIONS_MAX)]
    replication_factor: int
    configs: dict[str, str] = {}
    detached: Detachment | msgspec.UnsetType = msgspec.UNSET
    format_version: int = FORMAT_VERSION


class DeletionMarker(msgspec.Struct, frozen=True, kw_only=True):
    """Marks a deleted topic. Readers check for its key, so an offload that rewrites the descriptor later changes nothing.

    One that was undone before the topic was detached does not count (``core/deletion_markers.py``).

    ``deletion_version`` is the version of the deletion's record in metadata; 0 if it is not known. ``cluster_id`` is the
    cluster that deleted the topic; empty if it is not known. ``restorable_ms`` is for how long it promised to keep the topic.
    """

    topic_id: UUID
    deleted_at_ms: int
    deletion_version: int = 0
    cluster_id: str = ""
    restorable_ms: int = RESTORABLE_MS_UNKNOWN
    format_version: int = FORMAT_VERSION


class CommitMarker(msgspec.Struct, frozen=True, kw_only=True):
    """Marks a committed manifest version. It is written only after the commit, so the newest marker names committed history.

    ``sha256`` is the manifest object's digest in hex.
    """

    manifest_key: str
    manifest_version: int
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    format_version: int = FORMAT_VERSION


class WrappedDataKey(msgspec.Struct, frozen=True, kw_only=True):
    """A segment's data key, encrypted by the key ``key_name`` of a key ring. Rotation of that key rewrites this object.

    ``wrapped`` is base64 in the object; what it holds is up to the ring. For a ring of files: nonce, ciphertext and tag of
    AES-256-GCM, with topic and partition authenticated.
    """

    topic_id: UUID
    partition: Annotated[int, msgspec.Meta(ge=0)]
    key_name: str
    wrapped: bytes
    format_version: int = FORMAT_VERSION


class ReaderLease(msgspec.Struct, frozen=True, kw_only=True):
    """Keeps what a reader reads from being deleted: objects of these topics that left the history at ``began_at_ms`` or later.

    No topics: all of the bucket. It is in force for ``duration_ms`` after it was written last, by the store's clock; its holder
    writes it again before. ``began_at_ms`` is the holder's wall time.
    """

    holder: str
    topic_ids: tuple[UUID, ...] = ()
    began_at_ms: int
    duration_ms: Annotated[int, msgspec.Meta(gt=0, le=LEASE_MS_MAX)]
    format_version: int = FORMAT_VERSION


Descriptor: TypeAlias = OwnerDescriptor | TopicDescriptor | DeletionMarker | CommitMarker | WrappedDataKey | ReaderLease
_Kind = TypeVar("_Kind", bound=Descriptor)


def encode_descriptor(descriptor: Descriptor) -> bytes:
    return msgspec.json.format(msgspec.json.encode(descriptor), indent=2) + b"\n"


def decode_descriptor(content: Buffer, kind: type[_Kind], key: str) -> _Kind:
    """Decode a descriptor. Raises ``Corrupt`` that names ``key``, or ``Invalid`` for a newer format version."""
    try:
        descriptor = msgspec.json.decode(content, type=kind)
    except MALFORMED as bad:
        raise Corrupt(f"object {key} is not a {kind.__name__}: {bad}", key=key) from bad
    if descriptor.format_version < 1:
        raise Corrupt(f"object {key} has format version {descriptor.format_version}; minimum is 1", key=key)
    if descriptor.format_version > FORMAT_VERSION:
        raise Invalid(
            f"object {key} has format version {descriptor.format_version}; this release reads {FORMAT_VERSION}: upgrade it"
        )
    return descriptor


def is_of_later_release(content: Buffer, known: Buffer) -> bool:
    """Whether ``content`` has a later format version, and differs from ``known`` in more than that.

    If it differs in nothing else, its format version is altered: a later one would say something else.
    """
    try:
        found, expected = (msgspec.json.decode(each, type=dict[str, Any]) for each in (content, known))
    except MALFORMED:
        return False
    version = found.pop(_VERSION, None)
    expected.pop(_VERSION, None)
    return isinstance(version, int) and version > FORMAT_VERSION and found != expected
