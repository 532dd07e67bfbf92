"""``broker list|drain|undrain``: rows, refusals and waiting, on a real quorum and its controller."""

from __future__ import annotations

import asyncio
import json
from uuid import UUID

import pytest
from click.testing import CliRunner
from support.embedded_quorum import EmbeddedQuorum

from stratalog.app import stratalog
from stratalog.brokers.draining import drain, owned, undrain, wait_until_drained
from stratalog.brokers.report import broker_rows
from stratalog_core.errors import Invalid, NotFound, Unavailable
from stratalog_metadata.client.quorum_client import QuorumClient
from stratalog_metadata.protocol.broker_loads import BrokerLoad
from stratalog_metadata.records import TOPIC_DEFAULTS_KEY, Broker, DynamicConfig, Partition
from stratalog_metadata.state.commands import Command, Put

TOPIC = UUID(int=7)
LEASE_MS = 60_000


async def register(client: QuorumClient, broker_id: int, partitions: int) -> None:
    """A broker that owns some partitions and hands nothing over by itself."""
    load = BrokerLoad(broker_id=broker_id, partitions=partitions, bytes_in_per_s=1000 * broker_id, bytes_out_per_s=0)
    session_id = await client.open_session(f"broker {broker_id}", LEASE_MS, lambda: None, load=lambda: load)
    broker = Broker(broker_id=broker_id, host="h", port=9000 + broker_id, session_id=session_id, rack="r")
    owned = [
        Partition(topic_id=TOPIC, index=100 * broker_id + number, owner=broker_id, leader_epoch=1, owner_session=session_id)
        for number in range(partitions)
    ]
    await client.propose(Command(updates=(Put(record=broker), *(Put(record=partition) for partition in owned))))


async def test_rows_show_state_partitions_and_load(quorum: EmbeddedQuorum) -> None:
    client = quorum.client
    await register(client, 1, 3)
    await register(client, 2, 2)
    await drain(client, 1)
    rows = broker_rows(
        client.view, [BrokerLoad(broker_id=2, partitions=2, bytes_in_per_s=7, bytes_out_per_s=8, unreadable_records=3)]
    )
    assert rows == [
        {"broker": 1, "state": "draining", "rack": "r", "address": "h:9001", "partitions": 3,
         "in_bytes_per_s": None, "out_bytes_per_s": None, "unreadable_records": None},
        {"broker": 2, "state": "live", "rack": "r", "address": "h:9002", "partitions": 2,
         "in_bytes_per_s": 7, "out_bytes_per_s": 8, "unreadable_records": 3},
    ]  # fmt: skip


async def test_draining_waits_until_the_broker_owns_nothing(quorum: EmbeddedQuorum) -> None:
    client = quorum.client
    await register(client, 1, 2)
    await register(client, 2, 0)
    await drain(client, 1)
    left: list[int] = []
    with pytest.raises(Unavailable, match="still owns 2"):
        await wait_until_drained(client, 1, 0.01, left.append)
    waiting = asyncio.ensure_future(wait_until_drained(client, 1, 60, left.append))
    moved = [Partition(topic_id=TOPIC, index=100 + number, owner=2, leader_epoch=2) for number in range(2)]
    await client.propose(Command(updates=tuple(Put(record=partition) for partition in moved)))
    await waiting
    assert owned(client.view, 1) == 0
    assert left[0] == 2
    await undrain(client, 1)
    with pytest.raises(NotFound, match="not drained"):
        await undrain(client, 1)


async def test_the_last_broker_that_takes_partitions_is_not_drained(quorum: EmbeddedQuorum) -> None:
    client = quorum.client
    await register(client, 1, 1)
    with pytest.raises(Unavailable, match="start another"):
        await drain(client, 1)
    with pytest.raises(NotFound, match="no broker 9"):
        await drain(client, 9)
    await register(client, 2, 0)
    await drain(client, 1)
    with pytest.raises(Unavailable, match="start another"):
        await drain(client, 2)


async def test_the_command_asks_the_quorum(quorum: EmbeddedQuorum) -> None:
    await register(quorum.client, 1, 1)
    await register(quorum.client, 2, 1)
    where = ["--metadata", ",".join(quorum.addresses)]

    async def call(*words: str) -> str:
        result = await asyncio.to_thread(CliRunner().invoke, stratalog, ["broker", *words, *where])
        assert result.exit_code == 0, result.output
        return result.output

    await call("drain", "1", "--no-wait")
    rows = json.loads(await call("list", "--json"))["brokers"]
    assert [(row["broker"], row["state"], row["partitions"]) for row in rows] == [(1, "draining", 1), (2, "live", 1)]
    await call("undrain", "1")


async def test_defaults_of_topics_are_shown_and_changed(quorum: EmbeddedQuorum) -> None:
    where = ["--metadata", ",".join(quorum.addresses), "--json"]

    async def defaults(*words: str, expect: int = 0) -> str:
        result = await asyncio.to_thread(CliRunner().invoke, stratalog, ["broker", "defaults", *words, *where])
        assert (result.exit_code == 0) == (expect == 0), result.output
        return str(result.exception.message) if isinstance(result.exception, Invalid) else result.output

    async def stored() -> dict[str, str]:
        (found,) = await quorum.client.read([TOPIC_DEFAULTS_KEY])
        assert found is not None
        assert isinstance(found.record, DynamicConfig)
        return found.record.configs

    async def value(name: str) -> tuple[str, bool]:
        rows = {row["config"]: row for row in json.loads(await defaults())["defaults"]}
        return rows[name]["value"], rows[name]["changed"]

    assert await value("retention.ms") == ("604800000", False)
    await defaults("--set", "log.retention.ms=5000", "--set", "segment.ms=700")
    assert await stored() == {"retention.ms": "5000", "segment.ms": "700"}
    assert await value("retention.ms") == ("5000", True)
    await defaults("--unset", "log.roll.ms")
    assert await stored() == {"retention.ms": "5000"}
    assert await defaults("--set", "segment.ms=1", expect=1) == "segment.ms is 1; minimum is 100"
    assert await defaults("--set", "segment.ms", expect=1) == "'segment.ms' is not NAME=VALUE"
