"""What ``tier status`` says of hot and cold, and how ``tier offload`` waits; on a real metadata node."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import UUID

import msgspec
import pytest

from stratalog.tier.offload import Waiting, request_compaction, request_offload, wait_for_offload
from stratalog.tier.report import open_requests, tier_report, topics_named
from stratalog_core.errors import Invalid, NotFound, Unavailable
from stratalog_core.rpc.tcp import TcpTransport
from stratalog_core.system import SystemClock, SystemFiles, ThreadBackground
from stratalog_metadata.client.quorum_client import QuorumClient
from stratalog_metadata.node.config import MetadataSettings
from stratalog_metadata.node.server import MetadataServer
from stratalog_metadata.records import (
    Fragment,
    Ledger,
    LedgerRef,
    LedgerState,
    Log,
    ManifestPointer,
    Record,
    TierRequest,
    TierStatus,
    Topic,
    tier_request_key,
)
from stratalog_metadata.state.commands import Applied, Command, Delete, Put

TOPIC = Topic(name="flights", topic_id=UUID(int=7), partition_count=2, replication_factor=1)


@pytest.fixture
async def metadata(tmp_path: Path) -> AsyncIterator[QuorumClient]:
    transport, background = TcpTransport(), ThreadBackground(2, "metadata")
    settings = MetadataSettings(data_dir=str(tmp_path), listen="127.0.0.1:0")
    server = MetadataServer(settings, transport, SystemFiles(tmp_path), SystemClock(), random.Random(1), background)
    await server.start()
    client = QuorumClient([server.address], transport, SystemClock(), random.Random(2))
    await client.start()
    yield client
    await client.close()
    await server.close()
    await transport.close()
    background.close()


async def _put(metadata: QuorumClient, *records: Record) -> None:
    await metadata.propose(Command(updates=tuple(Put(record=record) for record in records)))


def _ledger(number: int, first: int, end: int, state: LedgerState) -> Ledger:
    return Ledger(
        ledger_id=number, topic_id=TOPIC.topic_id, partition=0, base_offset=first, leader_epoch=1, write_quorum=1, ack_quorum=1,
        fragments=(Fragment(first_entry=0, bookies=("b",)),), state=state, payload_bytes=1000, end_offset=end,
    )  # fmt: skip


async def test_a_row_adds_up_what_is_hot_and_cold(metadata: QuorumClient) -> None:
    refs = tuple(LedgerRef(ledger_id=number, base_offset=100 * number, leader_epoch=1) for number in (1, 2, 3))
    await _put(
        metadata,
        TOPIC,
        Log(topic_id=TOPIC.topic_id, index=0, ledgers=refs),
        _ledger(1, 100, 200, LedgerState.CLOSED),
        _ledger(2, 200, 300, LedgerState.CLOSED),
        _ledger(3, 300, -1, LedgerState.OPEN),
        ManifestPointer(
            topic_id=TOPIC.topic_id, index=0, manifest_version=4, object_key="k", sha256="", start_offset=0, end_offset=200,
            cold_bytes=5000,
        ),
        TierStatus(topic_id=TOPIC.topic_id, index=0, worker_id="w", last_error="no space"),
    )  # fmt: skip
    first, second = tier_report(metadata.view, topics_named(metadata.view, ["flights"]))
    assert (first.hot_ledgers, first.open_ledgers, first.hot_bytes) == (3, 1, 2000)
    assert (first.cold_start_offset, first.cold_end_offset, first.cold_bytes) == (0, 200, 5000)
    assert (first.lag_records, first.last_error, first.requested) == (100, "no space", False)
    assert (second.hot_ledgers, second.cold_end_offset, second.lag_records) == (0, 0, 0)


async def test_internal_topics_are_shown_only_by_name(metadata: QuorumClient) -> None:
    internal = Topic(name="__internal", topic_id=UUID(int=8), partition_count=1, replication_factor=1, internal=True)
    await _put(metadata, TOPIC, internal)
    assert [topic.name for topic in topics_named(metadata.view, [])] == ["flights"]
    assert [topic.name for topic in topics_named(metadata.view, ["__internal"])] == ["__internal"]
    with pytest.raises(NotFound, match="no topic 'nothing'"):
        topics_named(metadata.view, ["nothing"])


async def test_waiting_ends_when_every_request_is_fulfilled(metadata: QuorumClient) -> None:
    await _put(metadata, TOPIC)
    await request_offload(metadata, TOPIC, delete_hot=True)
    assert [request.delete_hot for request in open_requests(metadata.view, TOPIC)] == [True, True]
    done: list[int] = []
    waiting = asyncio.create_task(wait_for_offload(metadata, TOPIC, Waiting(timeout_s=60, on_progress=done.append)))
    for index in range(2):
        await metadata.propose(Command(updates=(Delete(key=tier_request_key(TOPIC.topic_id, index)),)))
    await waiting
    assert done[-1] == 2


async def test_a_request_asks_for_what_an_open_one_does_too(metadata: QuorumClient) -> None:
    """Whoever made that waits for its record to go, and reports a compaction then."""
    compacted = msgspec.structs.replace(TOPIC, configs={"cleanup.policy": "compact"})
    await _put(metadata, compacted)
    await request_compaction(metadata, compacted, [1])
    await request_offload(metadata, compacted, delete_hot=False)
    requests = open_requests(metadata.view, TOPIC)
    assert [(each.index, each.delete_hot, each.compact) for each in requests] == [(0, False, False), (1, True, True)]
    await request_offload(metadata, compacted, delete_hot=True)
    await request_offload(metadata, compacted, delete_hot=False)
    assert [(each.delete_hot, each.compact) for each in open_requests(metadata.view, TOPIC)] == [(True, False), (True, True)]


async def test_an_open_request_is_not_replaced_that_came_during_the_decision(
    metadata: QuorumClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await _put(metadata, TOPIC)
    propose, asked = QuorumClient.propose, TierRequest(topic_id=TOPIC.topic_id, index=1, delete_hot=True, compact=True)

    async def overtaken(client: QuorumClient, command: Command) -> Applied:
        monkeypatch.undo()
        await _put(metadata, asked)
        return await propose(client, command)

    monkeypatch.setattr(QuorumClient, "propose", overtaken)
    await request_offload(metadata, TOPIC, delete_hot=False)
    assert [each.compact for each in open_requests(metadata.view, TOPIC)] == [False, True]


async def test_the_offload_of_all_partitions_is_requested_of_the_topic_as_it_is_now(metadata: QuorumClient) -> None:
    grown = msgspec.structs.replace(TOPIC, partition_count=3)
    await _put(metadata, grown)
    await request_offload(metadata, TOPIC, delete_hot=True)
    assert [each.index for each in open_requests(metadata.view, TOPIC)] == [0, 1, 2]
    await _put(metadata, msgspec.structs.replace(TOPIC, configs={"remote.log.copy.disable": "true"}))
    with pytest.raises(Invalid, match="keeps it out of the object store"):
        await request_offload(metadata, TOPIC, delete_hot=True)


async def test_a_topic_that_goes_is_not_reported_as_done(metadata: QuorumClient) -> None:
    await _put(metadata, TOPIC)
    await request_offload(metadata, TOPIC, delete_hot=True)
    waiting = asyncio.create_task(wait_for_offload(metadata, TOPIC, Waiting(timeout_s=60, on_progress=lambda _: None)))
    gone = (TOPIC.key(), *(tier_request_key(TOPIC.topic_id, index) for index in range(2)))
    await metadata.propose(Command(updates=tuple(Delete(key=key) for key in gone)))
    with pytest.raises(NotFound, match="topic 'flights' is gone: it was deleted or detached meanwhile"):
        await waiting


async def test_nothing_is_requested_of_a_topic_that_is_gone(metadata: QuorumClient) -> None:
    """Its request would stay in metadata, and begin to count when the topic is restored."""
    compacted = msgspec.structs.replace(TOPIC, configs={"cleanup.policy": "compact,delete"})
    with pytest.raises(NotFound, match="topic 'flights' is gone"):
        await request_offload(metadata, TOPIC, delete_hot=True)
    with pytest.raises(NotFound, match="topic 'flights' is gone"):
        await request_compaction(metadata, compacted, [0])
    assert open_requests(metadata.view, TOPIC) == []


async def test_a_compaction_is_requested_of_compacted_topics_only(metadata: QuorumClient) -> None:
    await _put(metadata, TOPIC)
    with pytest.raises(Invalid, match=r"topic flights is not compacted; set cleanup\.policy=compact"):
        await request_compaction(metadata, TOPIC, [0])
    compacted = msgspec.structs.replace(TOPIC, configs={"cleanup.policy": "compact,delete"})
    await _put(metadata, compacted)
    with pytest.raises(NotFound, match="topic flights has no partition 2; it has 2"):
        await request_compaction(metadata, compacted, [2])
    assert open_requests(metadata.view, TOPIC) == []
    await request_compaction(metadata, compacted, [1])
    (request,) = open_requests(metadata.view, TOPIC)
    assert (request.index, request.delete_hot, request.compact) == (1, True, True)
    with pytest.raises(Unavailable, match="1 of 2 partitions of flights are not compacted after 0 s"):
        await wait_for_offload(metadata, TOPIC, Waiting(timeout_s=0.1, on_progress=lambda _: None))


@pytest.mark.parametrize("config", ["remote.log.copy.disable=true", "remote.storage.enable=false"])
async def test_a_topic_that_stays_out_of_the_store_is_not_requested(metadata: QuorumClient, config: str) -> None:
    name, value = config.split("=")
    topic = msgspec.structs.replace(TOPIC, configs={name: value})
    await _put(metadata, topic)
    with pytest.raises(Invalid, match=f"the policy of topic flights keeps it out of the object store; set {name}="):
        await request_offload(metadata, topic, delete_hot=True)
    assert open_requests(metadata.view, topic) == []


async def test_the_offload_and_the_compaction_of_an_internal_topic_are_refused(metadata: QuorumClient) -> None:
    """No worker tiers it: the request would stay, and a wait for it would time out."""
    internal = msgspec.structs.replace(TOPIC, name="__consumer_offsets", internal=True)
    await _put(metadata, internal)
    with pytest.raises(Invalid, match="topic __consumer_offsets is internal: it is never offloaded"):
        await request_offload(metadata, internal, delete_hot=True)
    compacted = msgspec.structs.replace(internal, configs={"cleanup.policy": "compact"})
    with pytest.raises(Invalid, match="topic __consumer_offsets is internal"):
        await request_compaction(metadata, compacted, [0])
    assert open_requests(metadata.view, internal) == []


async def test_waiting_in_vain_says_why(metadata: QuorumClient) -> None:
    failed = TierStatus(topic_id=TOPIC.topic_id, index=1, worker_id="w", last_error="bucket is gone")
    await _put(metadata, TOPIC, failed)
    await request_offload(metadata, TOPIC, delete_hot=False)
    with pytest.raises(Unavailable, match=r"2 of 2 partitions .* is every broker running\?; last error: bucket is gone"):
        await wait_for_offload(metadata, TOPIC, Waiting(timeout_s=0.1, on_progress=lambda _: None))
