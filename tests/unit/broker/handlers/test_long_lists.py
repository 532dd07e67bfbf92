"""Lists of all groups and transactions of a broker are made in pieces: a coordinator has up to a hundred thousand of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest_asyncio
from kio.index import load_payload_module
from kio.schema.errors import ErrorCode
from kio.serial import entity_reader
from kio.static.constants import EntityType
from unit.broker.handlers.test_fetch_waits import Connection
from unit.broker.mini_cluster import WAIT_S, MiniCluster, run_cluster
from unit.broker.raw_client import request
from unit.broker.wire_client import connect

from stratalog_broker.cluster.partition_rows import PIECE_ROWS
from stratalog_broker.coordination.transactions.core.transaction import Transaction
from stratalog_broker.coordination.transactions.service import TransactionService
from stratalog_broker.requests.context import RequestContext

GROUPS, TRANSACTIONS = 16, 66
ROWS = 20 * PIECE_ROWS
PRODUCER_ID = 1_000


@pytest_asyncio.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[MiniCluster]:
    """A cluster whose broker coordinates many groups that have only offsets, and as many transactional ids."""
    async with run_cluster(tmp_path) as running, connect(running.bootstrap) as client, asyncio.timeout(WAIT_S):
        for kind in range(2):
            await client.send(10, 3, key="any", key_type=kind)
        broker, service = running.broker, transactions_of(running)
        while broker.groups.is_loading or service.is_loading:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.01)
        group_store = next(broker.groups.coordinators()).coordinator.table.store
        transactions = next(service.coordinators())._store.transactions
        for name in names():
            group_store.offsets[name] = {}
            transactions[name] = Transaction(
                transactional_id=name, producer_id=PRODUCER_ID, producer_epoch=0, timeout_ms=1, updated_at_ms=0
            )
        yield running


def transactions_of(cluster: MiniCluster) -> TransactionService:
    service = cluster.broker.transactions
    assert service is not None
    return service


def names() -> list[str]:
    return [f"name-{number:05}" for number in range(ROWS)]


class Listing:
    """One request with its answer, and how often the event loop ran until then."""

    def __init__(self, cluster: MiniCluster, key: int, version: int, kind: str, **filters: Any) -> None:
        self._key, self._version = key, version
        self.turns = 0
        handle: Any = cluster.broker.apis.by_key[key].handle
        context = RequestContext(
            Connection(), api_key=key, api_version=version, correlation_id=1, client_id="", request_bytes=7
        )
        self.task = asyncio.ensure_future(handle(context, request(key, version, kind, **filters)))

    async def answer(self) -> Any:
        while not self.task.done():
            self.turns += 1
            await asyncio.sleep(0)
        module: Any = load_payload_module(self._key, self._version, EntityType.response)
        read: Any = entity_reader(getattr(module, "ListGroupsResponse", None) or module.ListTransactionsResponse)
        encoded = self.task.result()
        answer, size = read(encoded, 0)
        assert (size, answer.error_code) == (len(encoded), ErrorCode.none)
        return answer


async def test_the_event_loop_runs_while_all_groups_are_listed(cluster: MiniCluster) -> None:
    listing = Listing(cluster, GROUPS, 5, "ListGroupsRequest", states_filter=(), types_filter=())
    assert [row.group_id for row in (await listing.answer()).groups] == names()
    assert listing.turns >= ROWS // PIECE_ROWS
    older = Listing(cluster, GROUPS, 2, "ListGroupsRequest")
    assert [row.group_id for row in (await older.answer()).groups] == names()
    none = Listing(cluster, GROUPS, 5, "ListGroupsRequest", states_filter=("stable",), types_filter=())
    assert not (await none.answer()).groups
    assert none.turns >= ROWS // PIECE_ROWS


async def test_a_group_that_is_deleted_while_groups_are_listed_is_left_out(cluster: MiniCluster) -> None:
    listing = Listing(cluster, GROUPS, 5, "ListGroupsRequest", states_filter=(), types_filter=())
    await asyncio.sleep(0)
    deleted = names()[-1]
    del next(cluster.broker.groups.coordinators()).coordinator.table.store.offsets[deleted]
    assert [row.group_id for row in (await listing.answer()).groups] == names()[:-1]


async def test_the_event_loop_runs_while_all_transactions_are_listed(cluster: MiniCluster) -> None:
    filters = {"state_filters": ("Empty", "none"), "producer_id_filters": (PRODUCER_ID,)}
    listing = Listing(cluster, TRANSACTIONS, 0, "ListTransactionsRequest", **filters)
    next(transactions_of(cluster).coordinators())._store.transactions.pop(names()[0])
    answer = await listing.answer()
    assert [row.transactional_id for row in answer.transaction_states] == names()[1:]
    assert answer.unknown_state_filters == ("none",)
    assert listing.turns >= ROWS // PIECE_ROWS
