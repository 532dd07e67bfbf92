"""New segments that are verified by the checksum that the store keeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
import pytest_asyncio

from stratalog_tiering.store import ObjectInfo
from stratalog_tiering.store.checksums import crc_text

Cluster = Any  # the TestCluster of conftest.py, which cannot be imported
Store = Any  # the FaultyStore of conftest.py
Batches = Callable[..., list[bytes]]
HOUR_MS: Final = 3_600_000


@pytest_asyncio.fixture
async def reported(
    store: Store, store_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Callable[[str], str]], None]:
    """Make ``head`` report, of each object, what a function makes of the checksum of its bytes."""
    head = store.head

    def report(change: Callable[[str], str]) -> None:
        async def head_with_checksum(key: str) -> ObjectInfo:
            found: ObjectInfo = await head(key)
            return replace(found, crc32c=change(crc_text([(store_directory / key).read_bytes()])))

        monkeypatch.setattr(store, "head", head_with_checksum)

    return report


def segment_reads(store: Store) -> list[str]:
    return [name for name, key in store.calls if key.startswith("segments/") and name in ("get", "get_range", "head")]


def is_committed(cluster: Cluster) -> bool:
    pointer = cluster.pointer()
    return pointer is not None and pointer.end_offset == 3 and not pointer.content


async def test_a_segment_whose_checksum_the_store_reports_is_not_read_back(
    cluster: Cluster, store: Store, make_batches: Batches, reported: Callable[[Callable[[str], str]], None]
) -> None:
    reported(lambda crc: crc)
    await cluster.add_ledger(make_batches(0, [3]), 0)
    await cluster.start_worker(verify="checksum", deletion_lag_ms=HOUR_MS, sweep_interval_ms=24 * HOUR_MS)
    await cluster.until(lambda: is_committed(cluster))
    assert segment_reads(store) == ["head"]


@pytest.mark.parametrize("report", [lambda crc: "", lambda crc: f"{crc}-2"])
async def test_a_segment_of_unknown_checksum_is_read_back(
    cluster: Cluster,
    store: Store,
    make_batches: Batches,
    reported: Callable[[Callable[[str], str]], None],
    report: Callable[[str], str],
) -> None:
    reported(report)
    await cluster.add_ledger(make_batches(0, [3]), 0)
    await cluster.start_worker(verify="checksum", deletion_lag_ms=HOUR_MS, sweep_interval_ms=24 * HOUR_MS)
    await cluster.until(lambda: is_committed(cluster))
    assert segment_reads(store) == ["head", "get_range"]


async def test_a_segment_with_another_checksum_is_not_committed(
    cluster: Cluster, make_batches: Batches, reported: Callable[[Callable[[str], str]], None]
) -> None:
    reported(lambda crc: crc_text([b"other bytes"]))
    await cluster.add_ledger(make_batches(0, [3]), 0)
    await cluster.start_worker(verify="checksum", deletion_lag_ms=0, retry_ms_max=100)
    await cluster.until(lambda: f"has CRC32C {crc_text([b'other bytes'])}" in cluster.last_error())
    assert cluster.pointer() is None
    assert len(cluster.log().ledgers) == 1, "the hot copy stays"


async def test_a_truncated_segment_is_not_committed(
    cluster: Cluster,
    store: Store,
    store_directory: Path,
    make_batches: Batches,
    reported: Callable[[Callable[[str], str]], None],
) -> None:
    def cut(name: str, key: str) -> None:
        if name == "put" and key.startswith("segments/"):
            path = store_directory / key
            path.write_bytes(path.read_bytes()[:-1])

    reported(lambda crc: crc)
    store.after = cut
    await cluster.add_ledger(make_batches(0, [3]), 0)
    await cluster.start_worker(verify="checksum", deletion_lag_ms=0, retry_ms_max=100)
    await cluster.until(lambda: "Corrupt" in cluster.last_error())
    assert cluster.pointer() is None
