"""Markers of committed versions: beside the manifest, or the manifest itself."""

from __future__ import annotations

from uuid import UUID

import msgspec
import pytest

from stratalog_core.errors import Corrupt
from stratalog_tiering.format.commit_marker import decode_marker
from stratalog_tiering.format.descriptor import CommitMarker, encode_descriptor
from stratalog_tiering.format.manifest import empty_manifest, encode_manifest
from stratalog_tiering.format.object_frame import object_sha256
from stratalog_tiering.format.object_keys import manifest_key, marker_key, version_key

TOPIC = UUID(int=7)
CONTENT = encode_manifest(msgspec.structs.replace(empty_manifest(TOPIC, "t", 3, 0), version=12))


def test_a_version_object_marks_itself() -> None:
    key = version_key(TOPIC, 3, 12)
    marker = decode_marker(CONTENT, key)
    assert marker == CommitMarker(manifest_key=key, manifest_version=12, sha256=object_sha256(CONTENT).hex())


@pytest.mark.parametrize("key", [version_key(TOPIC, 3, 13), version_key(TOPIC, 4, 12), version_key(UUID(int=8), 3, 12)])
def test_a_version_object_under_another_key_is_refused(key: str) -> None:
    with pytest.raises(Corrupt, match="not the one in its own key"):
        decode_marker(CONTENT, key)


def test_an_altered_version_object_is_refused() -> None:
    with pytest.raises(Corrupt, match="CRC"):
        decode_marker(CONTENT[:-1] + bytes([CONTENT[-1] ^ 1]), version_key(TOPIC, 3, 12))


def test_a_marker_of_another_manifest_is_refused() -> None:
    manifest = manifest_key(TOPIC, 3, 12, 5)
    marker = CommitMarker(manifest_key=manifest, manifest_version=12, sha256="ab" * 32)
    assert decode_marker(encode_descriptor(marker), marker_key(manifest)) == marker
    with pytest.raises(Corrupt, match="not the one in its own key"):
        decode_marker(encode_descriptor(marker), marker_key(manifest_key(TOPIC, 3, 12, 6)))
