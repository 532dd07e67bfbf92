"""Detects that a partition's committed history in the store is not the one that metadata knows. See ADR 84.

A commit marker is written only after its commit is certain. A marker above metadata's version, another marker of the same
version, or two markers of one earlier version prove that metadata was restored from an old copy or created anew, and that the
history forked there. Only an operator can decide which line to keep, so nothing is committed or deleted before that decision.

No I/O; ``refuse_fork`` in ``offload/commit.py`` lists the markers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from stratalog_core.errors import Corrupt
from stratalog_tiering.format.object_keys import ManifestKey, marked_manifest, parse_manifest_key
from stratalog_tiering.store.base import ObjectInfo


class Forked(Corrupt):
    """The store holds a committed version that metadata's history does not contain. An operator must decide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """The newest version of each line. Metadata's version is 0 and its key is empty if metadata knows no version."""

    metadata_version: int
    metadata_key: str
    store_version: int
    store_key: str

    @property
    def newest_version(self) -> int:
        return max(self.metadata_version, self.store_version)


def find_fork(listed: Iterable[ObjectInfo], known: Mapping[int, str], settled_version: int = 0) -> Fork | None:
    """The fork that the commit markers among ``listed`` prove.

    ``known`` maps versions of metadata's line to manifest keys; it contains the newest version and was read after the listing.
    Forks at or below ``settled_version`` are resolved.
    """
    current_version = max(known)
    line, strangers = dict(known), dict[int, str]()
    for info, key in manifest_keys(listed):
        if key.is_marker and key.version > settled_version:
            manifest = marked_manifest(info.key)
            if key.version > current_version or line.setdefault(key.version, manifest) != manifest:
                strangers.setdefault(key.version, manifest)
    if not strangers:
        return None
    newest = max(strangers)
    return Fork(
        metadata_version=current_version, metadata_key=known[current_version],
        store_version=newest, store_key=strangers[newest],
    )  # fmt: skip


def manifest_keys(listed: Iterable[ObjectInfo]) -> Iterator[tuple[ObjectInfo, ManifestKey]]:
    """The manifests and markers among ``listed``, with their parsed keys."""
    for info in listed:
        key = parse_manifest_key(info.key)
        if key is not None:
            yield info, key


def fork_error(fork: Fork, topic: str, partition: int) -> Forked:
    """The error that describes the fork and names the command that resolves it."""
    return Forked(
        f"history of {topic}-{partition} has forked: manifest version {fork.store_version} ({fork.store_key}) is committed in"
        f" the store, metadata has version {fork.metadata_version} ({fork.metadata_key or 'none'}). Metadata has lost history;"
        " nothing is committed or deleted until an operator decides which history to keep:"
        f" stratalog tier resolve-fork {topic} {partition} --keep metadata|store"
    )
