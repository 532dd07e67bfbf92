"""Which histories fork when the scenario ``history`` restores metadata from an older copy."""

from __future__ import annotations

from uuid import UUID

import msgspec

from simulation.scenarios.history import is_another_version
from stratalog_metadata.records import ManifestPointer

COMMITTED = ManifestPointer(
    topic_id=UUID(int=0xF), index=0, manifest_version=41, object_key="manifests/41.version", sha256="ab", start_offset=0,
    end_offset=163, cold_bytes=8116, content=b"the manifest",
)  # fmt: skip


def test_metadata_that_goes_back_to_before_its_manifest_was_stored_knows_the_same_version() -> None:
    stored = msgspec.structs.replace(COMMITTED, content=b"")

    assert not is_another_version(stored, COMMITTED)


def test_metadata_that_goes_back_to_an_earlier_version_or_to_none_forks() -> None:
    earlier = msgspec.structs.replace(COMMITTED, manifest_version=40, object_key="manifests/40.version", sha256="cd")
    of_another_line = msgspec.structs.replace(COMMITTED, sha256="ef")

    assert is_another_version(COMMITTED, earlier)
    assert is_another_version(COMMITTED, of_another_line)
    assert is_another_version(COMMITTED, None)
    assert not is_another_version(None, None)
