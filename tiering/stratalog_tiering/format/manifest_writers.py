"""Writer versions of manifests: which release may edit one, because it knows all that the manifest may hold.

A writer drops members that it does not know, so a manifest names the oldest version that may edit it.
"""

from __future__ import annotations

from typing import Final

from stratalog_core.errors import Invalid
from stratalog_tiering.format.manifest import Manifest

WRITER_VERSION: Final = 4
"""This release's writer version. It rises when a manifest may hold something that earlier writers would drop or misuse."""
OLDEST_WRITER: Final = 4
"""The oldest writer that may edit what this release writes: the first that knows manifests that are stored after their commit.
An earlier one would not see that they are committed, and so not notice a fork. Writer 2 was the first to know locks, 3 the
first to know compacted segments, 4 the first to know erased ones: an earlier one would merge them and lose their leaves."""


def check_writer(manifest: Manifest) -> None:
    """Raise ``Invalid`` if this release is too old to edit ``manifest``, or to judge which objects it refers to."""
    if manifest.oldest_writer > WRITER_VERSION:
        raise Invalid(
            f"manifest version {manifest.version} of {manifest.topic_name}-{manifest.partition} may be edited by writers from"
            f" version {manifest.oldest_writer} on; this release is writer version {WRITER_VERSION}: upgrade it"
        )
