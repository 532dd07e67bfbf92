"""One module per Kafka API; this table is what is served, and what ApiVersions answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from stratalog_broker.handlers import (
    alter_configs,
    create_partitions,
    create_topics,
    delete_groups,
    delete_records,
    delete_topics,
    describe_cluster,
    describe_configs,
    describe_groups,
    describe_topic_partitions,
    find_coordinator,
    heartbeat,
    incremental_alter_configs,
    join_group,
    leave_group,
    list_groups,
    offset_commit,
    offset_delete,
    offset_fetch,
    sync_group,
)
from stratalog_broker.handlers.info import HandlerInfo

_GROUPS: Final = (
    delete_groups.API, describe_groups.API, find_coordinator.API, heartbeat.API, join_group.API, leave_group.API,
    list_groups.API, offset_commit.API, offset_delete.API, offset_fetch.API, sync_group.API,
)  # fmt: skip
_ADMINISTRATION: Final = (
    alter_configs.API, create_partitions.API, create_topics.API, delete_records.API, delete_topics.API, describe_cluster.API,
    describe_configs.API, describe_topic_partitions.API, incremental_alter_configs.API,
)  # fmt: skip
_ALL: Final[tuple[HandlerInfo, ...]] = (*_GROUPS, *_ADMINISTRATION)

HANDLERS: Final[Mapping[int, HandlerInfo]] = {info.key: info for info in _ALL}
