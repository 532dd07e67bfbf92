"""Small JSON objects that let a bucket explain itself: whose it is, what its topics are, which manifests were committed.

JSON, because people open these by hand. A reader ignores members it does not know; ``format_version`` rises only when
an old reader would go wrong. Formats: ``docs/reference/formats/object-keys.md``.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias, TypeVar
from uuid import UUID

import msgspec

from stratalog_core.errors import Corrupt, Invalid
from stratalog_core.malformed import MALFORMED
from stratalog_core.ports import Buffer

FORMAT_VERSION: Final = 1
PARTITIONS_MAX: Final = 1_000_000
"""More than any broker creates; readers look at each."""


class ClusterDescriptor(msgspec.Struct, frozen=True, kw_only=True):
    """The one cluster that writes to this bucket (or prefix)."""

    cluster_id: str
    format_version: int = FORMAT_VERSION


class TopicDescriptor(msgspec.Struct, frozen=True, kw_only=True):
    """A topic as it was when last written. It is rewritten by each offload, so it cannot say that the topic is deleted."""

    topic_id: UUID
    name: str
    partition_count: Annotated[int, msgspec.Meta(ge=0, le=PARTITIONS_MAX)]
    replication_factor: int
    configs: dict[str, str] = {}
    format_version: int = FORMAT_VERSION


class DeletionMarker(msgspec.Struct, frozen=True, kw_only=True):
    """A topic is deleted. Written once; readers go by its key, so an offload that describes the topic late changes nothing."""

    topic_id: UUID
    deleted_at_ms: int
    format_version: int = FORMAT_VERSION


class CommitMarker(msgspec.Struct, frozen=True, kw_only=True):
    """Written after a manifest version was committed, never before; so the newest marker names committed history.

    ``sha256`` is the manifest object's digest in hex.
    """

    manifest_key: str
    manifest_version: int
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    format_version: int = FORMAT_VERSION


Descriptor: TypeAlias = ClusterDescriptor | TopicDescriptor | DeletionMarker | CommitMarker
_Kind = TypeVar("_Kind", bound=Descriptor)


def encode_descriptor(descriptor: Descriptor) -> bytes:
    return msgspec.json.format(msgspec.json.encode(descriptor), indent=2) + b"\n"


def decode_descriptor(content: Buffer, kind: type[_Kind], key: str) -> _Kind:
    """Raises ``Corrupt`` naming ``key``, or ``Invalid`` for a newer format version."""
    try:
        descriptor = msgspec.json.decode(content, type=kind)
    except MALFORMED as bad:
        raise Corrupt(f"object {key} is no {kind.__name__}: {bad}", key=key) from bad
    if descriptor.format_version > FORMAT_VERSION:
        raise Invalid(
            f"object {key} has format version {descriptor.format_version}; this release reads {FORMAT_VERSION}: upgrade it"
        )
    return descriptor
