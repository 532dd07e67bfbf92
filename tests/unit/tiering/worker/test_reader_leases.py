"""The collector deletes nothing that a reader's lease protects, and all of it after the lease has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from unit.tiering.worker.test_collection import ports
from unit.tiering.worker.test_deleted_topics import delete
from unit.tiering.worker.test_worker import Batches, Cluster, segments_in

from stratalog_core.errors import Unavailable
from stratalog_core.ports import Clock
from stratalog_core.system import SystemClock
from stratalog_metadata.records import DeletedTopic, Topic, deleted_topic_key, topic_key
from stratalog_metadata.state.commands import Command, Put
from stratalog_tiering.cold.lease import HeldLease, LeaseExpired
from stratalog_tiering.format.object_keys import LEASES_PREFIX
from stratalog_tiering.worker.collection import find_all

HOUR_MS = 3_600_000


def lease(cluster: Cluster, duration_ms: int = HOUR_MS, clock: Clock | None = None) -> HeldLease:
    return HeldLease(cluster.store, clock or SystemClock(), 1, "audit by me", [cluster.topic.topic_id], duration_ms)


async def leases_are_read(cluster: Cluster, times: int) -> None:
    """Wait until collectors have asked for readers' leases so many more times, and have acted on all of these but the last."""
    before = cluster.store.calls.count(("list", LEASES_PREFIX))
    await until(lambda: cluster.store.calls.count(("list", LEASES_PREFIX)) >= before + times)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - stores tell nobody
            await asyncio.sleep(0.02)


async def expire(cluster: Cluster) -> None:
    """Let all segments leave the history."""
    stored = cluster.metadata.view.get(topic_key("flights"))
    shorter: Topic = msgspec.structs.replace(stored.record, configs={"retention.ms": "0"})
    await cluster.metadata.propose(Command(updates=(Put(record=shorter),)))
    await cluster.until(lambda: cluster.pointer().start_offset == cluster.pointer().end_offset)


class MovedClock(SystemClock):
    """The system's clocks, moved ahead."""

    def __init__(self) -> None:
        super().__init__()
        self.ahead_s = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead_s

    def wall_ms(self) -> int:
        return super().wall_ms() + int(1000 * self.ahead_s)


async def test_segments_that_expire_under_a_lease_stay_until_it_is_released(
    cluster: Cluster, make_batches: Batches, store_directory: Path
) -> None:
    await cluster.add_ledger(make_batches(0, [10]), 0)
    await cluster.start_worker(grace_ms=0)
    await cluster.until(lambda: not cluster.log().ledgers)
    held = lease(cluster)
    await held.acquire()
    (segment,) = segments_in(store_directory)
    await expire(cluster)
    await leases_are_read(cluster, 3)
    assert segments_in(store_directory) == [segment]
    found = await find_all(ports(cluster), [cluster.topic], 0, SystemClock().wall_ms())
    waiting = {garbage.key.rpartition("/")[2]: garbage for each in found for garbage in each.waiting}
    assert waiting[segment].lease == "audit by me"
    assert waiting[segment].due_ms > SystemClock().wall_ms()
    await held.release()
    await until(lambda: segments_in(store_directory) == [])


async def test_a_deleted_topic_stays_while_it_is_read(cluster: Cluster, make_batches: Batches, store_directory: Path) -> None:
    await cluster.add_ledger(make_batches(0, [10]), 0)
    await cluster.start_worker(grace_ms=0)
    await cluster.until(lambda: not cluster.log().ledgers)
    held = lease(cluster)
    await held.acquire()
    await delete(cluster, 0)
    await asyncio.sleep(0.3)
    assert len(segments_in(store_directory)) == 1
    assert cluster.metadata.view.find(DeletedTopic, deleted_topic_key(cluster.topic.topic_id)) is not None


async def test_nothing_is_deleted_if_the_leases_cannot_be_listed(
    cluster: Cluster, make_batches: Batches, store_directory: Path
) -> None:
    await cluster.add_ledger(make_batches(0, [10]), 0)
    await cluster.start_worker(grace_ms=0)
    await cluster.until(lambda: not cluster.log().ledgers)
    cluster.store.before = lambda name, key: Unavailable("away") if (name, key) == ("list", LEASES_PREFIX) else None
    await expire(cluster)
    await leases_are_read(cluster, 3)
    assert len(segments_in(store_directory)) == 1
    cluster.store.before = lambda name, key: None
    await until(lambda: segments_in(store_directory) == [])


async def test_a_lease_that_was_not_renewed_in_time_is_an_error_of_its_own(cluster: Cluster) -> None:
    clock = MovedClock()
    held = lease(cluster, clock=clock)
    await held.acquire()
    held.check()
    await held.renew()
    clock.ahead_s = HOUR_MS / 1000
    with pytest.raises(LeaseExpired, match="audit by me"):
        held.check()
    with pytest.raises(LeaseExpired):
        await held.renew()
