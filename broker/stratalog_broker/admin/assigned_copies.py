"""Assignments that name another number of brokers than a topic has copies change its replication factor, as in Kafka.

The factor belongs to the topic, so the assignments must cover all of its partitions with equally many brokers. In a cluster
with fewer brokers than copies, as many brokers as there are mean the present factor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from stratalog_broker.admin.errors import InvalidReplicationFactor
from stratalog_broker.admin.replication_factor import change_replication_factor
from stratalog_core.errors import Invalid, NotFound, StratalogError
from stratalog_metadata.client.api import MetadataClient, MetadataView
from stratalog_metadata.records import Broker, Topic, topic_key

Assignments = Mapping[int, tuple[int, ...]]
"""Brokers by partition index."""


def assigned_factor(view: MetadataView, topic: Topic, assignments: Assignments) -> int | None:
    """Return the replication factor that the assignments ask for; None: the present one.

    Raises ``InvalidReplicationFactor``.
    """
    present = {topic.replication_factor, min(topic.replication_factor, sum(1 for _ in view.all(Broker)))}
    counts = {len(brokers) for brokers in assignments.values()}
    if counts <= present:
        return None
    if len(counts) == 1 and assignments.keys() == set(range(topic.partition_count)):
        return counts.pop()
    raise InvalidReplicationFactor(
        f"topic {topic.name!r} has {topic.replication_factor} copies; name as many brokers, or assign all"
        f" {topic.partition_count} partitions another number, the same for each"
    )


async def fit_copies(
    metadata: MetadataClient, wanted: Sequence[tuple[str, int, tuple[int, ...]]], *, may_change: bool
) -> dict[str, StratalogError]:
    """Change the replication factors that the assignments (topic, index, brokers) ask for; return the failures by topic."""
    by_topic: defaultdict[str, dict[int, tuple[int, ...]]] = defaultdict(dict)
    for name, index, brokers in wanted:
        by_topic[name][index] = brokers
    failures: dict[str, StratalogError] = {}
    for name, assignments in by_topic.items():
        topic = metadata.view.find(Topic, topic_key(name))
        try:
            factor = assigned_factor(metadata.view, topic, assignments) if topic is not None else None
            if factor is not None:
                await _change(metadata, name, factor, may_change=may_change)
        except StratalogError as failure:
            failures[name] = failure
    return failures


async def _change(metadata: MetadataClient, name: str, factor: int, *, may_change: bool) -> None:
    if not may_change:
        raise InvalidReplicationFactor(f"the request must not change the replication factor of topic {name!r} to {factor}")
    try:
        await change_replication_factor(metadata, name, factor)
    except NotFound:
        raise
    except Invalid as refused:
        raise InvalidReplicationFactor(refused.message) from refused
