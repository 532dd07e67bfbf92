"""The cluster's identity, written once when it is created."""

from __future__ import annotations

from stratalog_metadata.records.base import RecordBase


class Cluster(RecordBase, frozen=True, kw_only=True, tag="cluster"):
    """Every node checks ``cluster_id`` (22 characters, as Kafka's) before it takes part."""

    cluster_id: str
    format_version: int = 1

    def key(self) -> str:
        return CLUSTER_KEY


CLUSTER_KEY = "cluster/"
