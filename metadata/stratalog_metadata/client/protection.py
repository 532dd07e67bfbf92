"""The protection of topics against deletion, by topic config or for all topics by the cluster-wide default."""

from __future__ import annotations

from typing import Final

from stratalog_metadata.client.api import MetadataView
from stratalog_metadata.client.topic_defaults import topic_defaults
from stratalog_metadata.records import Topic, configs_in_force

PROTECTION: Final = "stratalog.deletion.protection"


def is_protected(topic: Topic, view: MetadataView) -> bool:
    """Return whether DeleteTopics, DeleteRecords and the erasure of records are refused for the topic."""
    return configs_in_force(topic, topic_defaults(view)).get(PROTECTION, "false").lower() == "true"
