"""Reads descriptors whose keys say what they describe: a topic's, and what says that a manifest version is committed.

That is a marker beside the manifest, or a version object, which is the manifest itself. No I/O. Formats:
``docs/reference/formats/object-keys.md``, ``docs/reference/formats/manifest.md``.
"""

from __future__ import annotations

from stratalog_core.errors import Corrupt
from stratalog_core.ports import Buffer
from stratalog_tiering.format.descriptor import CommitMarker, TopicDescriptor, decode_descriptor
from stratalog_tiering.format.manifest import parse_manifest
from stratalog_tiering.format.object_frame import object_sha256
from stratalog_tiering.format.object_keys import is_version_object, marked_manifest, parse_manifest_key, parse_topic_key


def decode_topic(content: Buffer, key: str) -> TopicDescriptor:
    """The topic descriptor at ``key``. Raises as :func:`decode_marker`, ``Corrupt`` if it describes another topic."""
    topic, named = decode_descriptor(content, TopicDescriptor, key), parse_topic_key(key)
    if named is None or named.topic_id != topic.topic_id:
        raise Corrupt(f"{key} describes topic {topic.topic_id}, which is not the one in its key", key=key)
    return topic


def decode_marker(content: Buffer, key: str) -> CommitMarker:
    """The commit marker at ``key``. A version object has only its own checksum, so the digest is that of the bytes found.

    Raises ``Corrupt``, also if it does not belong to this key, and ``Invalid`` for an unknown format version.
    """
    named = parse_manifest_key(key)
    if is_version_object(key):
        manifest = parse_manifest(content, None)
        if named is None or (manifest.topic_id, manifest.partition, manifest.version) != (
            named.topic_id, named.partition, named.version
        ):  # fmt: skip
            raise Corrupt(
                f"manifest {key} is version {manifest.version} of {manifest.topic_id}-{manifest.partition}, which is not the"
                " one in its own key",
                key=key,
            )
        return CommitMarker(manifest_key=key, manifest_version=manifest.version, sha256=object_sha256(content).hex())
    found = decode_descriptor(content, CommitMarker, key)
    if named is None or (found.manifest_key, found.manifest_version) != (marked_manifest(key), named.version):
        raise Corrupt(
            f"{key} names version {found.manifest_version} at {found.manifest_key}, which is not the one in its own key",
            key=key,
        )
    return found
