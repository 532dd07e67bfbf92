"""Damage in history that the continuous scrub found and could not repair, as the partitions' statuses in metadata record it.

A status has the keys of the damaged objects. A key tells the kind of object; only a scrub tells what is wrong with it.
Pure: a view in, values out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from stratalog_metadata.client.api import MetadataView
from stratalog_metadata.records import TierStatus, Topic, tier_status_key
from stratalog_tiering.format import object_keys


@dataclass(frozen=True, slots=True, kw_only=True)
class UnrepairedDamage:
    """One partition, and the keys of its damaged objects: at least one."""

    topic: Topic
    partition: int
    keys: tuple[str, ...]

    @property
    def sentence(self) -> str:
        """The partition, the damaged objects by kind, and the key of the first."""
        kinds = Counter(_kind_of(key, self.topic, self.partition) for key in self.keys)
        counted = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        return f"{self.topic.name}-{self.partition}: damage that is not repaired: {counted}, such as {self.keys[0]}"

    @property
    def remedy(self) -> str:
        """The command to run next."""
        command = f"stratalog tier scrub --topic {self.topic.name} --partition {self.partition} --repair"
        return f"`{command}` tries again, and names what is wrong with each object and the remedy"


def unrepaired_damage(view: MetadataView, topics: Iterable[Topic]) -> list[UnrepairedDamage]:
    """Return the damaged partitions of ``topics``, in order."""
    return [
        UnrepairedDamage(topic=topic, partition=index, keys=status.unrepaired)
        for topic in topics
        for index in range(topic.partition_count)
        if (status := view.find(TierStatus, tier_status_key(topic.topic_id, index))) is not None and status.unrepaired
    ]


def _kind_of(key: str, topic: Topic, partition: int) -> str:
    manifest = object_keys.parse_manifest_key(key)
    if manifest is not None:
        return "commit marker" if manifest.is_marker and not object_keys.is_version_object(key) else "manifest"
    if object_keys.parse_segment_key(key) is not None:
        return "segment"
    if object_keys.is_data_key(key):
        return "data key"
    prefixes = {
        object_keys.pages_prefix: "index page",
        object_keys.removed_prefix: "list of removed objects",
        object_keys.tree_prefix: "Merkle tree page",
    }
    return next((kind for prefix, kind in prefixes.items() if key.startswith(prefix(topic.topic_id, partition))), "object")
