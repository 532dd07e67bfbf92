"""Topics: live, being attached, deleted until their objects are gone, restored. Cluster-wide configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final
from uuid import UUID

from stratalog_metadata.records.base import RecordBase

REPLICATION_FACTOR_MAX: Final = 15


class Topic(RecordBase, frozen=True, kw_only=True, tag="topic"):
    """``configs`` has only the configs that were set, under Kafka's names."""

    name: str
    topic_id: UUID
    partition_count: int
    replication_factor: int
    configs: dict[str, str] = {}
    internal: bool = False

    def key(self) -> str:
        return topic_key(self.name)


class DeletedTopic(RecordBase, frozen=True, kw_only=True, tag="deleted_topic"):
    """Written when a topic is deleted; removed when its objects have been deleted after the grace period.

    For ``restorable_ms`` the topic can be restored: ``topic`` is its record, ``leader_epochs`` and ``replicas`` are those of
    its partitions, and its logs, ledgers and manifest pointers stay. Then the deletion becomes final, and ``topic`` is None.
    Only the partitions below ``partitions_left`` still have such records then; they go in several commands.
    """

    topic_id: UUID
    name: str
    deleted_at_ms: int
    restorable_ms: int = 0
    topic: Topic | None = None
    leader_epochs: tuple[int, ...] = ()
    replicas: tuple[tuple[int, ...], ...] = ()
    partitions_left: int = 0

    @property
    def is_final(self) -> bool:
        """Whether the topic can no longer be restored."""
        return self.topic is None

    @property
    def partitions_kept(self) -> int:
        """How many partitions may have logs, ledgers and manifest pointers in metadata."""
        return self.topic.partition_count if self.topic is not None else self.partitions_left

    @property
    def restorable_until_ms(self) -> int:
        """When the deletion may become final, by the clock of the broker that deleted the topic."""
        return self.deleted_at_ms + self.restorable_ms

    def key(self) -> str:
        return deleted_topic_key(self.topic_id)


class RestoredTopic(RecordBase, frozen=True, kw_only=True, tag="restored_topic"):
    """Written when a deleted topic is restored; removed when the bucket has no longer the marker of that deletion.

    The topic may have been deleted again meanwhile.
    """

    topic_id: UUID

    def key(self) -> str:
        return restored_topic_key(self.topic_id)


class DeferredMarker(RecordBase, frozen=True, kw_only=True, tag="deferred_marker"):
    """The marker that ends a transaction in a partition whose topic was deleted when the transaction ended.

    Written only while the topic can be restored. The partition's owner writes the marker after a restore, before any other
    batch, and then removes the record. ``leader_epoch`` is the partition's last one before the deletion: a transaction that
    began in a later epoch is another one.
    """

    topic_id: UUID
    index: int
    leader_epoch: int
    producer_id: int
    producer_epoch: int
    coordinator_epoch: int
    is_commit: bool = False

    def key(self) -> str:
        return f"{deferred_markers_prefix(self.topic_id, self.index)}{self.leader_epoch}/{self.producer_id}"


class PendingTopic(RecordBase, frozen=True, kw_only=True, tag="pending_topic"):
    """A topic whose history is being written to the bucket, to be attached to the cluster by one command.

    Its writer postpones ``expires_at_ms`` (wall time) while it works. After that a tiering worker turns the record into a
    ``DeletedTopic``, so that what was written is deleted.
    """

    topic_id: UUID
    name: str
    expires_at_ms: int

    def key(self) -> str:
        return pending_topic_key(self.topic_id)


class DynamicConfig(RecordBase, frozen=True, kw_only=True, tag="dynamic_config"):
    """Configuration that was changed at run time, under Kafka's names.

    ``resource`` is empty for the defaults of all topics, ``FEATURES``, or a prefix below and a name.
    """

    resource: str
    configs: dict[str, str] = {}

    def key(self) -> str:
        return dynamic_config_key(self.resource)


def dynamic_config_key(resource: str) -> str:
    return f"dynamic_config/{resource}"


def topic_key(name: str) -> str:
    return f"topic/{name}"


def deleted_topic_key(topic_id: UUID) -> str:
    return f"deleted_topic/{topic_id.hex}"


def pending_topic_key(topic_id: UUID) -> str:
    return f"pending_topic/{topic_id.hex}"


def restored_topic_key(topic_id: UUID) -> str:
    return f"restored_topic/{topic_id.hex}"


DEFERRED_MARKERS: Final = "deferred_marker/"
"""The beginning of the keys of all deferred markers."""


def deferred_markers_prefix(topic_id: UUID, index: int | None = None) -> str:
    """The beginning of the keys of the deferred markers of a topic, or of one of its partitions."""
    of_topic = f"{DEFERRED_MARKERS}{topic_id.hex}/"
    return of_topic if index is None else f"{of_topic}{index}/"


TOPIC_DEFAULTS_KEY: Final = DynamicConfig(resource="").key()
"""Key of the record that holds the cluster-wide defaults of topic configs."""
GROUP_CONFIGS: Final = "group/"
"""Prefix of ``DynamicConfig.resource`` for the configs of a consumer group; the group's name follows."""
FEATURES: Final = "features"
"""``DynamicConfig.resource`` of the finalized levels of Kafka's features, by name."""
FEATURES_KEY: Final = DynamicConfig(resource=FEATURES).key()
CLIENT_METRICS_CONFIGS: Final = "client_metrics/"
"""Prefix for a client metrics subscription; its name follows."""


def is_hot_only(configs: Mapping[str, str]) -> bool:
    """Whether a topic with these configs is never offloaded. The config has no cluster-wide default."""
    return configs.get("remote.storage.enable", "true").lower() == "false"


def configs_in_force(topic: Topic, defaults: Mapping[str, str]) -> Mapping[str, str]:
    """The configs that are set, by the topic or by the cluster-wide ``defaults``. All others have their built-in value.

    Internal topics follow no default, because their coordinators rely on their durability.
    """
    return {**defaults, **topic.configs} if defaults and not topic.internal else topic.configs
