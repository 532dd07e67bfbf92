"""An owner whose core finds a broken invariant resigns the partition and takes it over again, whichever event finds it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kio.schema.errors import ErrorCode
from unit.broker.mini_cluster import WAIT_S, MiniCluster, run_cluster
from unit.broker.partitions.test_ack_quorums import create, send, until
from unit.broker.raw_client import batch, produce_request

from stratalog_broker.partitions import ownership
from stratalog_broker.partitions.core import PartitionCore
from stratalog_broker.partitions.deferred_markers import write_deferred_markers
from stratalog_broker.partitions.ledger_index import LedgerIndex
from stratalog_broker.partitions.log import PartitionLog
from stratalog_broker.partitions.memory import follow_log
from stratalog_core.errors import NotLeader


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[MiniCluster]:
    async with run_cluster(tmp_path, bookies=3) as made:
        yield made


def fail(monkeypatch: pytest.MonkeyPatch, log: PartitionLog, event: str, *, before: bool = False) -> None:
    """Let the log's core find a broken invariant at an event: ``before`` it changes anything, or after it."""
    intact: Any = getattr(PartitionCore, event)

    def fails(core: PartitionCore, *args: Any, **kwargs: Any) -> Any:
        assert core is not log.core or not before, "a defect"
        result = intact(core, *args, **kwargs)
        assert core is not log.core, "a defect"
        return result

    monkeypatch.setattr(PartitionCore, event, fails)


async def require_served_again(cluster: MiniCluster, log: PartitionLog) -> None:
    """Wait until the partition of ``log``, which was lost, accepts a batch from another client."""
    await until(lambda: not log.is_serving)
    client = await cluster.connect()
    async with asyncio.timeout(WAIT_S):
        while (await send(client, "flights")).error_code is not ErrorCode.none:  # noqa: ASYNC110 - as clients do
            await asyncio.sleep(0.02)
    found = cluster.broker.partitions.find_by_id(log.topic.topic_id.bytes, 0)
    assert found is not None
    assert found is not log


@pytest.mark.parametrize(
    ("event", "before"),
    [
        *((event, before) for event in ("commit", "opened", "written", "_instructions") for before in (False, True)),
        ("_enter", False),
        ("confirmed", True),
    ],
)
async def test_a_broken_invariant_resigns_the_partition_and_answers_its_batches(
    cluster: MiniCluster, monkeypatch: pytest.MonkeyPatch, event: str, before: bool
) -> None:
    log = await create(cluster, "flights")
    fail(monkeypatch, log, event, before=before)
    answer = await asyncio.wait_for(send(await cluster.connect(), "flights"), WAIT_S)
    assert answer.error_code is ErrorCode.not_leader_or_follower
    await require_served_again(cluster, log)


async def test_the_other_partitions_of_the_request_are_answered_as_they_are(
    cluster: MiniCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch that was lost while it was added ended the request: the others were answered as late, and its bytes were
    released twice.
    """
    log = await create(cluster, "flights")
    await create(cluster, "airports")
    client = await cluster.connect()
    fail(monkeypatch, log, "commit")
    first, second = (produce_request(topic, 0, batch(b"x")) for topic in ("flights", "airports"))
    both = replace(first, topic_data=(*first.topic_data, *second.topic_data))
    answer = await asyncio.wait_for(client.call(0, 9, both), WAIT_S)
    codes = [topic.partition_responses[0].error_code for topic in answer.responses]
    assert codes == [ErrorCode.not_leader_or_follower, ErrorCode.none]
    await until(lambda: not cluster.broker.connections.bytes_held)
    await require_served_again(cluster, log)


@pytest.mark.parametrize("first", [False, True])
async def test_a_batch_that_the_index_does_not_take_is_answered(
    cluster: MiniCluster, monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    """The first batch is queued for a ledger; the second is added to the open one."""
    log = await create(cluster, "flights")
    client = await cluster.connect()
    if not first:
        assert (await send(client, "flights")).error_code is ErrorCode.none

    def refuse(*args: int) -> int:
        raise AssertionError("a defect")

    with monkeypatch.context() as patched:
        patched.setattr(LedgerIndex, "append", refuse)
        answer = await asyncio.wait_for(send(client, "flights"), WAIT_S)
    assert answer.error_code is ErrorCode.not_leader_or_follower
    await require_served_again(cluster, log)


async def test_a_broken_invariant_found_after_batches_were_confirmed_answers_them(
    cluster: MiniCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = await create(cluster, "flights")
    client = await cluster.connect()
    assert (await send(client, "flights")).error_code is ErrorCode.none
    confirmed = PartitionCore.confirmed

    def drained(core: PartitionCore, entry_id: int) -> Any:
        if core is log.core:
            core.seal_now()
            fail(monkeypatch, log, "_instructions")
        return confirmed(core, entry_id)

    monkeypatch.setattr(PartitionCore, "confirmed", drained)
    answer = await asyncio.wait_for(send(client, "flights"), WAIT_S)
    assert answer.error_code is ErrorCode.not_leader_or_follower
    await require_served_again(cluster, log)


@pytest.mark.parametrize("event", ["seal_now", "tick", "room", "open_ahead", "go_on"])
async def test_a_broken_invariant_that_another_event_finds_resigns_the_partition(
    cluster: MiniCluster, monkeypatch: pytest.MonkeyPatch, event: str
) -> None:
    log = await create(cluster, "flights")
    assert (await send(await cluster.connect(), "flights")).error_code is ErrorCode.none
    fail(monkeypatch, log, event)
    events = {"seal_now": log.roll, "tick": log.tick, "room": log._room_retry, "open_ahead": log.open_ahead, "go_on": log.go_on}
    events[event]()
    assert not log.is_serving
    await require_served_again(cluster, log)


async def test_nobody_waits_for_the_seal_of_a_partition_that_was_lost(
    cluster: MiniCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = await create(cluster, "flights")
    assert (await send(await cluster.connect(), "flights")).error_code is ErrorCode.none
    fail(monkeypatch, log, "seal_now")
    with pytest.raises(NotLeader):
        await log.seal_all()
    await require_served_again(cluster, log)


async def test_changed_defaults_reach_all_partitions_although_one_is_lost(
    cluster: MiniCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = await create(cluster, "flights")
    other = await create(cluster, "airports")
    updated = list[PartitionLog]()

    def update(self: PartitionLog, topic: Any) -> None:
        updated.append(self)
        if self is log:
            self._lose_inconsistent(AssertionError("a defect"))

    with monkeypatch.context() as patched:
        patched.setattr(PartitionLog, "update_topic", update)
        cluster.broker.partitions._defaults_changed()
    assert {log, other} <= set(updated)
    await require_served_again(cluster, log)


@pytest.mark.parametrize("step", [write_deferred_markers, follow_log])
async def test_a_partition_that_is_lost_while_it_begins_to_be_served_is_taken_over_again(
    cluster: MiniCluster, monkeypatch: pytest.MonkeyPatch, step: Callable[..., None]
) -> None:
    """As by a defect that its first marker meets, before the partition can be found, or the view's ledgers, after that."""
    lost = list[PartitionLog]()

    def lose_the_first(*arguments: Any) -> None:
        log = next((one for one in arguments if isinstance(one, PartitionLog)), None)
        if log is not None and log.topic.name == "flights" and not lost:
            lost.append(log)
            log._lose_inconsistent(AssertionError("a defect"))
        else:
            step(*arguments)

    monkeypatch.setattr(ownership, step.__name__, lose_the_first)
    log = await create(cluster, "flights")
    assert log not in lost
    assert (await send(await cluster.connect(), "flights")).error_code is ErrorCode.none
