"""How many copies acks=all waits for, and the error a producer gets when too few bookies are live."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kio.schema.errors import ErrorCode
from unit.broker.mini_cluster import WAIT_S, MiniCluster, run_cluster, until_served
from unit.broker.raw_client import RawClient, batch, produce_request

from stratalog_broker.admin.topics import NewTopic
from stratalog_broker.partitions import quorum_admission
from stratalog_broker.partitions.log import PartitionLog
from stratalog_broker.requests.deadlines import Deadlines
from stratalog_metadata.records import Bookie, Ledger


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[MiniCluster]:
    async with run_cluster(tmp_path, bookies=3) as made:
        yield made


async def create(cluster: MiniCluster, name: str, factor: int = 3, **configs: str) -> PartitionLog:
    """The served partition 0 of a new topic."""
    named = {key.replace("_", "."): value for key, value in configs.items()}
    new = NewTopic(name=name, partition_count=1, replication_factor=factor, configs=named)
    topic = await cluster.broker.topic_commands.create(new, WAIT_S)
    await until_served(cluster.broker, topic.topic_id)
    log = cluster.broker.partitions.find_by_id(topic.topic_id.bytes, 0)
    assert log is not None
    return log


async def send(client: RawClient, topic: str, *, acks: int = -1, timeout_s: float = WAIT_S, sequence: int = -1) -> Any:
    producer = {"producer_id": 9, "producer_epoch": 0, "base_sequence": sequence} if sequence >= 0 else {}
    request = produce_request(topic, 0, batch(b"value", **producer), acks=acks)
    answer = await client.call(0, 9, replace(request, timeout=datetime.timedelta(seconds=timeout_s)))
    return answer.responses[0].partition_responses[0]


async def stop_bookies(cluster: MiniCluster, *names: str) -> None:
    for name in names:
        await cluster.bookies[name].close()
    view = cluster.broker.metadata.view
    await until(lambda: not any(each.session_id for each in view.all(Bookie) if each.bookie_id in names))


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("factor", "configs", "expected"),
    [
        (3, {}, 2),
        (3, {"min_insync_replicas": "1"}, 2),
        (3, {"min_insync_replicas": "3"}, 3),
        (2, {"min_insync_replicas": "1"}, 2),
        (1, {}, 1),
        (3, {"stratalog_ack_quorum": "1"}, 1),
        (3, {"stratalog_ack_quorum": "1", "min_insync_replicas": "2"}, 2),
        (3, {"min_insync_replicas": "4"}, 3),
    ],
)
async def test_ledgers_have_the_ack_quorum_of_their_topic(
    cluster: MiniCluster, factor: int, configs: dict[str, str], expected: int
) -> None:
    await create(cluster, "flights", factor, **configs)
    client = await cluster.connect()
    assert (await send(client, "flights", acks=1)).error_code is ErrorCode.none
    (ledger,) = cluster.broker.metadata.view.all(Ledger)
    assert (ledger.write_quorum, ledger.ack_quorum) == (factor, expected)


async def test_more_replicas_than_there_are_copies_refuse_acks_all_and_nothing_else(cluster: MiniCluster) -> None:
    log = await create(cluster, "flights", min_insync_replicas="4")
    client = await cluster.connect()
    for _ in range(2):
        assert (await send(client, "flights")).error_code is ErrorCode.not_enough_replicas
        assert (await send(client, "flights", acks=1)).error_code is ErrorCode.none
    assert log.core.next_offset == 2


async def test_too_few_bookies_before_anything_was_sent(cluster: MiniCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quorum_admission, "SETTLING_S", 3600.0)
    log = await create(cluster, "flights")
    client = await cluster.connect()
    await stop_bookies(cluster, "bookie-1", "bookie-2")
    for acks in (-1, 1):
        assert (await send(client, "flights", acks=acks)).error_code is ErrorCode.not_enough_replicas
    assert log.core.next_offset == 0
    log.admission._settled_at_s = 0.0
    assert (await send(client, "flights", sequence=0)).error_code is ErrorCode.not_enough_replicas
    assert log.admission.is_settling, "what follows a refused batch is not out of order: it is refused, and sent again"
    await cluster.start_bookie("bookie-1")
    async with asyncio.timeout(WAIT_S):
        while (await send(client, "flights", sequence=0)).error_code is not ErrorCode.none:  # noqa: ASYNC110 - as clients do
            await asyncio.sleep(0.02)
    assert log.core.high_watermark == 1


async def test_too_few_bookies_after_a_batch_was_sent(cluster: MiniCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """One copy is not a majority: the batch may be there or not, and later ones are refused before they are sent."""
    log = await create(cluster, "flights", min_insync_replicas="1")
    client = await cluster.connect()
    assert (await send(client, "flights")).base_offset == 0
    await stop_bookies(cluster, "bookie-1", "bookie-2")
    time_outs = list[Callable[[], None]]()
    monkeypatch.setattr(Deadlines, "add", lambda _, timeout_s, on_due: time_outs.append(on_due))
    sending = asyncio.create_task(send(client, "flights"))
    await until(lambda: time_outs and log.lacks_quorum)
    monkeypatch.undo()
    time_outs[0]()
    answer = await sending
    assert answer.error_code is ErrorCode.not_enough_replicas_after_append
    assert (await send(client, "flights")).error_code is ErrorCode.not_enough_replicas
    assert (await send(client, "flights", acks=1)).error_code is ErrorCode.none, "one bookie has it on disk"
    assert (log.core.high_watermark, log.core.next_offset) == (1, 3)
    await cluster.start_bookie("bookie-1")
    await until(lambda: log.core.high_watermark == 3)
    assert (await send(client, "flights")).base_offset == 3


async def test_too_few_bookies_for_the_ledger_that_a_batch_is_queued_for(cluster: MiniCluster) -> None:
    """The batch was admitted and is written when there are enough bookies again, so it counts as appended."""
    log = await create(cluster, "flights")
    client, retrying = await cluster.connect(), await cluster.connect()
    log.hold(lambda: None)
    sending = asyncio.create_task(send(client, "flights", sequence=0, timeout_s=WAIT_S))
    await until(lambda: log.core.queue)
    await stop_bookies(cluster, "bookie-1", "bookie-2")
    log.go_on()
    answer = await send(retrying, "flights", sequence=0, timeout_s=0.1)
    assert answer.error_code is ErrorCode.not_enough_replicas_after_append
    await cluster.start_bookie("bookie-1")
    assert (await sending).base_offset == 0
    assert log.core.high_watermark == 1


async def test_a_smaller_ack_quorum_goes_on_with_one_bookie(cluster: MiniCluster) -> None:
    await create(cluster, "flights", stratalog_ack_quorum="1")
    client = await cluster.connect()
    await stop_bookies(cluster, "bookie-1", "bookie-2")
    assert (await send(client, "flights")).base_offset == 0
