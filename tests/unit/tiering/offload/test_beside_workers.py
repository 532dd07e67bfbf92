"""What a command sees that edits history beside running workers."""

from __future__ import annotations

import random
from typing import Any
from uuid import UUID

import pytest

from stratalog_core.errors import NotFound
from stratalog_core.system import SystemClock
from stratalog_tiering.config import TieringSettings
from stratalog_tiering.offload.beside_workers import current_partition
from stratalog_tiering.offload.ports import worker_ports

Cluster = Any


async def test_an_unknown_partition_is_named(cluster: Cluster) -> None:
    ports = worker_ports(
        TieringSettings(worker_id="command"), cluster.metadata, cluster.store, cluster.ledgers, SystemClock(),
        random.Random(1), cluster.background,
    )  # fmt: skip
    found = await current_partition(ports, cluster.topic.topic_id, 1)
    assert (found.state.topic, found.state.log.index) == (cluster.topic, 1)
    for topic_id, index in ((UUID(int=9), 0), (cluster.topic.topic_id, 7)):
        with pytest.raises(NotFound, match=f"partition {index} of topic {topic_id}"):
            await current_partition(ports, topic_id, index)
