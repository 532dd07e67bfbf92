"""Damage of pages, tree pages and lists of removed objects that offloads and retention do not need stops neither."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from unit.tiering.maintenance.test_forks import decide, outcome

from stratalog_metadata.records import KEEP_METADATA, KEEP_STORE, ManifestPointer
from stratalog_metadata.state.commands import Command, Put
from stratalog_tiering.format import manifest_edit
from stratalog_tiering.format.manifest_limits import ManifestLimits

Cluster = Any  # the TestCluster of conftest.py, which cannot be imported
Batches = Callable[..., list[bytes]]
WEEK_MS = 7 * 86_400_000


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = partial(
        ManifestLimits, inline_segments_max=2, page_segments=1, page_fan_in=2, inline_removed_max=4, inline_spans_max=1
    )
    monkeypatch.setattr(manifest_edit, "ManifestLimits", limits)


async def configure(cluster: Cluster, **configs: str) -> None:
    topic = msgspec.structs.replace(cluster.topic, configs={"retention.ms": "-1", **configs})
    await cluster.metadata.propose(Command(updates=(Put(record=topic),)))


def is_cold(cluster: Cluster, end_offset: int) -> bool:
    pointer = cluster.pointer()
    return pointer is not None and bool(pointer.end_offset == end_offset)


def is_settled(cluster: Cluster, start_offset: int, end_offset: int) -> bool:
    """Whether the partition is cold, what is past retention has gone, and the manifest is in the store."""
    return is_cold(cluster, end_offset) and cluster.log().log_start_offset == start_offset and not cluster.pointer().content


@pytest.mark.parametrize(
    ("kind", "configs"),
    [
        ("removed", {"retention.bytes": "1"}),
        ("tree", {}),
        ("pages", {}),
        ("pages", {"local.retention.ms": "-1"}),
    ],
)
async def test_a_partition_with_a_damaged_part_is_offloaded_and_expires(
    cluster: Cluster, make_batches: Batches, store_directory: Path, kind: str, configs: dict[str, str]
) -> None:
    await configure(cluster, **configs)
    end, parts, expires = 0, list[Path](), "retention.bytes" in configs
    while not parts:
        worker = await cluster.start_worker(segment_bytes=1, sweep_interval_ms=WEEK_MS)
        await cluster.add_ledger(make_batches(end, [1]), end)
        end += 1
        await cluster.until(partial(is_settled, cluster, end - 1 if expires else 0, end))
        await worker.close()
        parts = [*store_directory.glob(f"{kind}/*/0/*")]  # noqa: ASYNC240 - a test
    for path in parts:
        path.write_bytes(b"damaged")
    await cluster.start_worker("worker-2", segment_bytes=1, sweep_interval_ms=WEEK_MS)
    for _ in range(10):
        await cluster.add_ledger(make_batches(end, [1]), end)
        end += 1
        await cluster.until(partial(is_cold, cluster, end), 10)
    if expires:
        await cluster.until(lambda: cluster.log().log_start_offset == end - 1, 10)


@pytest.mark.parametrize("keep", [KEEP_METADATA, KEEP_STORE])
async def test_a_fork_is_resolved_although_a_page_of_the_tree_is_damaged(
    cluster: Cluster, make_batches: Batches, store_directory: Path, keep: str
) -> None:
    """The page would be merged with others, and was left as it is by each commit before."""
    await configure(cluster)
    pointers, pages = list[ManifestPointer](), list[Path]()
    worker = await cluster.start_worker(segment_bytes=1, sweep_interval_ms=WEEK_MS)
    for end in range(1, 6):
        await cluster.add_ledger(make_batches(end - 1, [1]), end - 1)
        await cluster.until(partial(is_settled, cluster, 0, end))
        pointers.append(cluster.pointer())
        if not pages:
            pages = [*store_directory.glob("tree/*/0/*")]  # noqa: ASYNC240 - a test
            for path in pages:
                path.write_bytes(bytes(path.stat().st_size))
    await cluster.until(lambda: not cluster.log().ledgers)
    await worker.close()
    assert pages
    log = msgspec.structs.replace(cluster.log(), ledgers=())
    await cluster.metadata.propose(Command(updates=(Put(record=pointers[-2]), Put(record=log))))
    await cluster.start_worker("worker-2", segment_bytes=1, sweep_interval_ms=WEEK_MS)
    await decide(cluster, keep)
    await cluster.until(lambda: cluster.pointer().manifest_version > pointers[-1].manifest_version, 10)
    assert outcome(cluster) == ""
    assert cluster.pointer().end_offset == (5 if keep == KEEP_STORE else 4)
