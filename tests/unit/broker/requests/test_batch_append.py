"""Batches of transactions: which ones a partition takes, and with which codes it refuses the others."""

from __future__ import annotations

from typing import Any

import pytest
from kio.schema.errors import ErrorCode
from unit.broker.mini_cluster import MiniCluster
from unit.broker.raw_client import RawClient, batch, produce
from unit.broker.transactional import append, mark, read_committed, transactional

from stratalog_broker.partitions.quorum_admission import QuorumAdmission
from stratalog_core.batches.batch import CONTROL_BIT, TRANSACTIONAL_BIT
from stratalog_core.partition_state.transactions import ABORT, COMMIT, build_marker

TOPIC = "flights"


async def send(client: RawClient, sequence: int, value: bytes, **producer: int) -> Any:
    sent = transactional(producer.pop("producer_id", 1), sequence, value, **producer)
    return await produce(client, TOPIC, bytes(sent), transactional_id="accounts")


@pytest.fixture
def settling(monkeypatch: pytest.MonkeyPatch) -> None:
    """As within seconds of a takeover, for as long as the test lasts."""
    monkeypatch.setattr(QuorumAdmission, "is_settling", True)


@pytest.mark.usefixtures("settling")
async def test_a_begun_transaction_goes_on_without_its_coordinator(flights: MiniCluster, client: RawClient) -> None:
    await append(flights, TOPIC, transactional(1, 0, b"a"))
    assert [(await send(client, 1, b"b")).base_offset, (await send(client, 2, b"c")).base_offset] == [1, 2]
    assert (await send(client, 1, b"b")).base_offset == 1, "a retry"
    assert (await send(client, 9, b"later")).error_code is ErrorCode.not_leader_or_follower, "its predecessor may follow"
    assert await mark(client, TOPIC, 1, COMMIT) == 0
    assert (await send(client, 2, b"c")).base_offset == 2, "a retry after the end"
    assert await read_committed(client, TOPIC) == [b"a", b"b", b"c"]


@pytest.mark.usefixtures("settling")
async def test_an_unknown_producer_begins_with_its_first_batch_also_when_the_partition_has_settled_meanwhile(
    flights: MiniCluster, client: RawClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first two batches are refused because of a takeover; the third, in flight, arrives when that time has ended."""

    def plain(sequence: int) -> bytes:
        return batch(b"%d" % sequence, producer_id=5, producer_epoch=0, base_sequence=sequence)

    for sequence in (31, 32):
        assert (await produce(client, TOPIC, plain(sequence))).error_code is ErrorCode.not_leader_or_follower
    monkeypatch.setattr(QuorumAdmission, "is_settling", False)
    assert (await produce(client, TOPIC, plain(33))).error_code is ErrorCode.not_leader_or_follower
    assert [(await produce(client, TOPIC, plain(sequence))).base_offset for sequence in (31, 32, 33)] == [0, 1, 2]
    assert (await produce(client, TOPIC, batch(b"x", producer_id=6, producer_epoch=0, base_sequence=9))).error_code == 0


async def test_a_producer_whose_epoch_a_marker_has_raised_is_fenced(flights: MiniCluster, client: RawClient) -> None:
    await append(flights, TOPIC, transactional(1, 0, b"a"))
    assert await mark(client, TOPIC, 1, ABORT, epoch=1) == 0
    assert (await send(client, 1, b"b")).error_code is ErrorCode.invalid_producer_epoch
    assert (await send(client, 0, b"a")).error_code is ErrorCode.invalid_producer_epoch, "its batches are not its retries"


async def test_what_belongs_to_no_transaction_is_refused_while_one_is_open(flights: MiniCluster, client: RawClient) -> None:
    await append(flights, TOPIC, transactional(1, 0, b"a"))
    plain = batch(b"x", producer_id=1, producer_epoch=0, base_sequence=1)
    assert (await produce(client, TOPIC, plain)).error_code is ErrorCode.invalid_txn_state
    assert (await produce(client, TOPIC, batch(b"y"))).error_code == 0, "another producer's"
    assert await mark(client, TOPIC, 1, COMMIT) == 0
    assert (await produce(client, TOPIC, plain)).error_code == 0


async def test_a_transactional_batch_needs_a_transactional_id_and_a_producer(client: RawClient) -> None:
    refused = await produce(client, TOPIC, bytes(transactional(1, 0, b"a")))
    assert refused.error_code is ErrorCode.transactional_id_authorization_failed
    refused = await produce(client, TOPIC, batch(b"a", attributes=TRANSACTIONAL_BIT), transactional_id="accounts")
    assert (refused.error_code, refused.error_message) == (
        ErrorCode.invalid_record,
        "a transactional batch needs a producer id",
    )


async def test_clients_cannot_write_control_batches(client: RawClient) -> None:
    for sent in (bytes(build_marker(COMMIT, 1, 0, 0, 1)), batch(b"a", attributes=CONTROL_BIT)):
        refused = await produce(client, TOPIC, sent, transactional_id="accounts")
        assert (refused.error_code, refused.error_message) == (
            ErrorCode.invalid_record,
            "clients cannot write control records",
        )
