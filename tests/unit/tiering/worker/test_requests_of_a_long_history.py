"""The requests that ``stratalog cost`` derives from a listing, against those that a worker made."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
import pytest_asyncio

from stratalog.cost.reading import PricedTopic, topic_usage
from stratalog_core.batches.records import Record, build_batch
from stratalog_core.system import SystemClock, ThreadBackground
from stratalog_metadata.state.commands import Command, Put
from stratalog_tiering.format.object_keys import OWNERS_PREFIX
from stratalog_tiering.store import open_store
from stratalog_tiering.store.key_ring import create_key

Cluster = Any  # the TestCluster of conftest.py, which cannot be imported
Store = Any
DAY_MS: Final = 86_400_000
WINDOW_S: Final = 86_400
LEDGERS: Final = 64
MERGES: Final = 4
"""Sixteen neighbours become one."""
PUTS: Final = {"put", "create_upload", "put_part", "complete_upload", "list"}
GETS: Final = {"get", "get_range", "head"}


@pytest_asyncio.fixture
async def store(store: Store, store_directory: Path, tmp_path: Path, background: ThreadBackground) -> Store:
    """The store of the ``cluster``, which counts calls, with a key for encrypted history."""
    create_key(tmp_path / "keys", "k1")
    url = f"{store_directory}?keys={tmp_path / 'keys'}"
    return type(store)(open_store(url, background=background, clock=SystemClock(), random=random.Random(3)))


@pytest.mark.parametrize("encryption_key", ["", "k1"])
async def test_requests_derived_from_a_listing_are_those_that_were_made(
    cluster: Cluster, store: Store, encryption_key: str
) -> None:
    """64 segments of one partition, and their merges: within five per cent, for writes and listings and for reads.

    What a worker reads and lists when it starts is not derived.
    """
    encrypted = {"stratalog.tier.encryption.key": encryption_key} if encryption_key else {}
    topic = msgspec.structs.replace(cluster.topic, configs={**cluster.topic.configs, **encrypted})
    await cluster.metadata.propose(Command(updates=(Put(record=topic),)))
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
    assert derived.puts == pytest.approx(sum(made[name] for name in PUTS), rel=0.05)
    assert usage.removed.total() == LEDGERS
    # Commits of one second share a look for another owner; one that takes longer looks again.
    looks = sum(name == "head" and key.startswith(OWNERS_PREFIX) for name, key in store.calls)
    assert 0 < looks <= 2 * usage.activity.commits
    derived_without_looks = derived.gets - len(usage.activity.commit_seconds)
    assert derived_without_looks == pytest.approx(sum(made[name] for name in GETS) - looks, rel=0.05)


def _is_cold(cluster: Cluster, offset: int) -> bool:
    pointer = cluster.pointer(0)
    return pointer is not None and pointer.end_offset == offset and not cluster.log(0).ledgers


def _is_merged(cluster: Cluster) -> bool:
    """All merges are committed, and in the store."""
    pointer = cluster.pointer(0)
    return bool(pointer.manifest_version >= LEDGERS + MERGES) and not pointer.content
