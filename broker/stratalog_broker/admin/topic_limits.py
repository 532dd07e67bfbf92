"""Limits on the numbers of topics and partitions of a cluster; every node keeps a record of each in memory.

Numbers are counted in this broker's view: concurrent requests to several brokers may together exceed a limit.
"""

from __future__ import annotations

from stratalog_broker.admin.errors import LimitExceeded
from stratalog_broker.configs.settings import BrokerSettings
from stratalog_metadata.client.api import MetadataView
from stratalog_metadata.records import DeletedTopic, Topic


def check_request(settings: BrokerSettings, partitions: int) -> None:
    """Raise ``LimitExceeded`` if one request may not create ``partitions`` partitions."""
    most = settings.request_partitions_max
    if partitions > most:
        text = f"the request creates {partitions} partitions; request_partitions_max is {most}: use several requests"
        raise LimitExceeded(text)


def check_cluster(settings: BrokerSettings, view: MetadataView, topics: int, partitions: int) -> None:
    """Raise ``LimitExceeded`` if the cluster may not have this many more.

    Deleted topics count as long as metadata has records of their partitions. Internal topics do not.
    """
    deleted = [each.partitions_kept for each in view.all(DeletedTopic) if each.partitions_kept]
    found = [*deleted, *(topic.partition_count for topic in view.all(Topic) if not topic.internal)]
    advice = "delete some, or raise it"
    if deleted:
        advice = f"{len(deleted)} deleted topics count: delete them for good with `stratalog topic delete --now`, or raise it"
    if topics and len(found) + topics > settings.topics_max:
        text = f"there would be {len(found) + topics} topics; topics_max is {settings.topics_max}: {advice}"
        raise LimitExceeded(text)
    total = sum(found) + partitions
    if total > settings.partitions_max:
        text = f"there would be {total} partitions; partitions_max is {settings.partitions_max}: {advice}"
        raise LimitExceeded(text)
