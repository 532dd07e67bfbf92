"""Behind ``stratalog job compact``: which history may be compacted, and the removal of the records that were found."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from stratalog.hot.session import ledger_session
from stratalog.tier.session import store_session
from stratalog_core.errors import NotFound
from stratalog_core.system import SystemClock, ThreadBackground
from stratalog_metadata.records import Topic
from stratalog_pipeline.planning import PartitionName
from stratalog_tiering.config import TieringSettings
from stratalog_tiering.core.superseded import OffsetSet
from stratalog_tiering.maintenance.erasure import Refused
from stratalog_tiering.maintenance.superseded import Compacted, HistoryRead, history_to_read, remove_superseded
from stratalog_tiering.offload.ownership import check_claim, cluster_id_in
from stratalog_tiering.offload.ports import WorkerPorts, worker_ports

WRITER = "job-compact"
"""The writer's name in manifests that the job commits."""
_CHECKSUM_THREADS = 2


@dataclass(slots=True, kw_only=True)
class Removal:
    """The result, in the order of the commits."""

    compacted: list[tuple[PartitionName, Compacted]] = field(default_factory=list)
    refused: list[tuple[PartitionName, Refused]] = field(default_factory=list)


async def histories_to_read(addresses: Sequence[str], store: str, topics: Sequence[str]) -> dict[PartitionName, HistoryRead]:
    """The part of each partition of ``topics`` that may be compacted.

    Raises ``Invalid`` if ``store`` is not the bucket of the cluster or a topic is not compacted, ``NotFound``, ``Unavailable``.
    """
    async with _ports(addresses, store) as ports:
        await ports.metadata.refresh()
        known = {topic.name: topic for topic in ports.metadata.view.all(Topic)}
        found: dict[PartitionName, HistoryRead] = {}
        for name in topics:
            if name not in known:
                raise NotFound(f"the cluster has no topic {name!r}")
            topic = known[name]
            for partition in range(topic.partition_count):
                read = await history_to_read(ports, topic.topic_id, partition)
                found[PartitionName(topic=name, topic_id=topic.topic_id, partition=partition)] = read
        return found


async def remove_found(
    addresses: Sequence[str],
    store: str,
    read: Mapping[PartitionName, HistoryRead],
    superseded: Mapping[PartitionName, OffsetSet],
    on_segment: Callable[[], None] = lambda: None,
) -> Removal:
    """Remove the superseded records. Raises as `remove_superseded`, when some segments may be replaced already; it can be
    called again."""
    done = Removal()
    async with _ports(addresses, store) as ports:
        for name, history in read.items():
            async for each in remove_superseded(ports, name.topic_id, name.partition, history, superseded[name]):
                if isinstance(each, Compacted):
                    done.compacted.append((name, each))
                else:
                    done.refused.append((name, each))
                on_segment()
    return done


@asynccontextmanager
async def _ports(addresses: Sequence[str], store_url: str) -> AsyncIterator[WorkerPorts]:
    background = ThreadBackground(_CHECKSUM_THREADS, "checksums")
    try:
        async with ledger_session(addresses) as (metadata, ledgers), store_session(store_url) as store:
            await check_claim(store, cluster_id_in(metadata))
            settings = TieringSettings(worker_id=WRITER)
            yield worker_ports(settings, metadata, store, ledgers, SystemClock(), random.SystemRandom(), background)
    finally:
        background.close()
