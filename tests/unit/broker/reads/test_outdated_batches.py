"""Batches that were read so long ago that compactions may have removed the names of transactions aborted in them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from stratalog_broker.reads.pending_reads import PendingReads
from stratalog_broker.reads.replay_pace import ReplayPace
from stratalog_broker.requests.fetch_reads import FetchReads
from stratalog_core.batches.batch import TRANSACTIONAL_BIT
from stratalog_core.batches.batch_run import BatchRun, empty_run
from stratalog_core.batches.records import Record, build_batch
from stratalog_core.metrics.groups import Histogram

BATCH = build_batch(
    [Record(offset=0, timestamp_ms=0, key=b"key", value=b"aborted")], producer_id=7, producer_epoch=0, base_sequence=0,
    attributes=TRANSACTIONAL_BIT,
)  # fmt: skip


class _Aborted:
    """Finds nothing: two compactions have removed the transaction's name."""

    def __init__(self, *, at_once: bool) -> None:
        self._at_once = at_once
        self.version = 3

    def version_of(self, log: Any) -> int:
        return self.version

    def at_once(self, *_: Any) -> list[Any] | None:
        return [] if self._at_once else None

    async def find(self, *_: Any) -> list[Any]:
        return []


class _Sink:
    def __init__(self) -> None:
        self.responses: list[Sequence[Any]] = []
        self.bytes_found = 0

    def found(self, line: int, one: Any, log: Any, batches: Any, aborted: Any) -> None:
        self.responses.append(batches[0])
        self.bytes_found += batches[1]

    def failed(self, line: int, one: Any, failure: Any) -> None:
        raise failure


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize(("commits", "served"), [(0, 1), (1, 1), (2, 0)])
async def test_batches_older_than_the_version_before_are_read_again(commits: int, served: int, at_once: bool) -> None:
    aborted, sink = _Aborted(at_once=at_once), _Sink()
    core = SimpleNamespace(last_stable_offset=2, high_watermark=2, has_no_aborted_from=lambda offset: False)
    log: Any = SimpleNamespace(core=core, topic_partition="keyed-0")
    reading: Any = SimpleNamespace(version=aborted.version)

    async def read() -> BatchRun:
        aborted.version += commits
        return empty_run(0)._replace(batches=[BATCH])

    reading.start = lambda *_: asyncio.ensure_future(read())
    reading.taken = lambda *_: ([BATCH], len(BATCH))
    reading.is_kept_for_the_next = lambda *_: False
    reading.version_of = lambda task: 3
    clock: Any = SimpleNamespace(monotonic=lambda: 0.0)
    reads = FetchReads(reading, aborted, clock, sink, is_committed=True)  # type: ignore[arg-type]
    wanted: Any = SimpleNamespace(offset=0, bytes_max=1_000)
    reads.read_later(0, wanted, log, 2)
    await reads.run(1_000, 1, 60.0)
    assert len(sink.responses) == served


async def test_a_read_is_of_the_version_at_its_start() -> None:
    versions = iter([4, 5])

    async def read(*_: Any) -> BatchRun:
        return empty_run(0)

    reader: Any = SimpleNamespace(history_version=lambda log: next(versions), is_cold=lambda log, offset: True, read=read)
    clock: Any = SimpleNamespace(monotonic=lambda: 0.0)
    pace = ReplayPace(clock, lambda: Histogram(()), percent=100)
    pending = PendingReads(reader, clock, pace, hot_reads_max=2, cold_reads_max=2, bytes_max=1 << 24)
    log: Any = _Log()
    task = pending.start(log, 0, 2, 100)
    assert pending.start(log, 0, 2, 100) is task
    await task
    assert pending.version_of(task) == 4
    await pending.close()


class _Log:
    tail = SimpleNamespace(erased_version=0)
