"""The requests that ``stratalog cost`` derives from a listing, against those that a worker made."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any, Final

import pytest

from stratalog.cost.reading import PricedTopic, topic_usage
from stratalog_core.batches.records import Record, build_batch
from stratalog_core.system import SystemClock

Cluster = Any  # the TestCluster of conftest.py, which cannot be imported
Store = Any
DAY_MS: Final = 86_400_000
WINDOW_S: Final = 86_400
LEDGERS: Final = 64
MERGES: Final = 4
"""Sixteen neighbours become one."""
PUTS: Final = {"put", "create_upload", "put_part", "complete_upload", "list"}
GETS: Final = {"get", "get_range", "head"}


async def test_requests_derived_from_a_listing_are_those_that_were_made(cluster: Cluster, store: Store) -> None:
    """64 segments of one partition, and their merges: within two per cent, for writes and listings and for reads."""
    await cluster.start_worker(sweep_interval_ms=DAY_MS, retention_interval_ms=10, block_bytes=1024 * 1024)
    for number in range(LEDGERS):
        batch = bytes(build_batch([Record(offset=number, timestamp_ms=number, key=None, value=b"v" * 100)], leader_epoch=0))
        await cluster.add_ledger([batch], number, partition=0)
        await cluster.until(partial(_is_cold, cluster, number + 1), 60)
    await cluster.until(partial(_is_merged, cluster), 60)
    made = Counter(name for name, _ in store.calls)
    priced = PricedTopic(name=cluster.topic.name, topic_id=cluster.topic.topic_id, partitions=2)
    usage = await topic_usage(store, priced, window_s=WINDOW_S, now_ms=SystemClock().wall_ms())
    assert (usage.activity.offloads, usage.activity.merges) == (LEDGERS, MERGES)
    derived = usage.activity.requests
    assert derived.puts == pytest.approx(sum(made[name] for name in PUTS), rel=0.02)
    assert derived.gets == pytest.approx(sum(made[name] for name in GETS), rel=0.02)


def _is_cold(cluster: Cluster, offset: int) -> bool:
    pointer = cluster.pointer(0)
    return pointer is not None and pointer.end_offset == offset and not cluster.log(0).ledgers


def _is_merged(cluster: Cluster) -> bool:
    return bool(cluster.pointer(0).manifest_version >= LEDGERS + MERGES)
