"""Requests between brokers over real sockets: to a broker, to one that does not answer, and to one that is gone."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from kio.index import load_request_schema
from unit.broker.hand_fed_view import HandFedView
from unit.broker.mini_cluster import MiniCluster

from stratalog_broker.peers.peers import Peers
from stratalog_core.errors import OutcomeUnknown, Unavailable
from stratalog_core.system import SystemClock
from stratalog_metadata.records import Broker, broker_key

API_VERSIONS, VERSION = 18, 3


def _request() -> Any:
    schema: Any = load_request_schema(API_VERSIONS, VERSION)
    return schema(client_software_name="peer", client_software_version="1")


def _broker(port: int) -> Broker:
    return Broker(broker_id=7, host="127.0.0.1", port=port, session_id=1)


@asynccontextmanager
async def _silent_server() -> AsyncIterator[tuple[int, asyncio.Event]]:
    """A server that reads and never answers: its port, and an event that is set when it has received something."""
    received = asyncio.Event()
    serving = set[asyncio.Task[None]]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.read(1)
            received.set()
            await reader.read()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.add(asyncio.ensure_future(serve(reader, writer)))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], received
    finally:
        server.close()
        await asyncio.gather(*serving)


async def test_a_broker_answers_requests_of_other_brokers_and_its_own(mini_cluster: MiniCluster) -> None:
    server = mini_cluster.broker
    peers = Peers(mini_cluster.metadata.view, SystemClock())
    calls = (peers.call(server.settings.broker_id, API_VERSIONS, VERSION, _request(), 60.0) for _ in range(20))
    answers = await asyncio.gather(*calls)
    assert {len(answer.api_keys) for answer in answers} == {len(answers[0].api_keys)}
    assert answers[0].api_keys
    peers.close()


async def test_a_broker_without_a_session_gets_no_request() -> None:
    peers = Peers(HandFedView(), SystemClock())
    with pytest.raises(Unavailable):
        await peers.call(7, API_VERSIONS, VERSION, _request(), 10.0)


async def test_a_broker_that_does_not_listen_is_unavailable() -> None:
    view = HandFedView()
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        view.put(_broker(bound.getsockname()[1]))
        peers = Peers(view, SystemClock())
        with pytest.raises(Unavailable):
            await peers.call(7, API_VERSIONS, VERSION, _request(), 60.0)
        peers.close()


async def test_a_broker_whose_host_cannot_be_looked_up_is_unavailable() -> None:
    view = HandFedView()
    view.put(Broker(broker_id=7, host="a..b", port=9092, session_id=1))
    peers = Peers(view, SystemClock())
    with pytest.raises(Unavailable):
        await peers.call(7, API_VERSIONS, VERSION, _request(), 60.0)
    peers.close()


async def test_a_broker_that_does_not_answer_in_time_leaves_the_outcome_unknown() -> None:
    view = HandFedView()
    async with _silent_server() as (port, received):
        view.put(_broker(port))
        peers = Peers(view, SystemClock())
        # The second request is written at once, to the connection that the first one has opened.
        first = asyncio.ensure_future(peers.call(7, API_VERSIONS, VERSION, _request(), 60.0))
        await received.wait()
        with pytest.raises(OutcomeUnknown):
            await peers.call(7, API_VERSIONS, VERSION, _request(), 0.2)
        with pytest.raises(OutcomeUnknown):
            await first
        peers.close()


async def test_requests_end_at_once_when_the_session_of_their_broker_ends() -> None:
    view = HandFedView()
    async with _silent_server() as (port, received):
        view.put(_broker(port))
        peers = Peers(view, SystemClock())
        call = asyncio.ensure_future(peers.call(7, API_VERSIONS, VERSION, _request(), 60.0))
        await received.wait()
        view.remove(broker_key(7))
        with pytest.raises(OutcomeUnknown):
            await call
        peers.close()


async def test_a_broker_that_registers_at_another_address_is_reached_there() -> None:
    view = HandFedView()
    async with _silent_server() as (old_port, old_received), _silent_server() as (new_port, new_received):
        view.put(_broker(old_port))
        peers = Peers(view, SystemClock())
        first = asyncio.ensure_future(peers.call(7, API_VERSIONS, VERSION, _request(), 60.0))
        await old_received.wait()
        view.put(_broker(new_port))
        second = asyncio.ensure_future(peers.call(7, API_VERSIONS, VERSION, _request(), 60.0))
        await new_received.wait()
        with pytest.raises(OutcomeUnknown):
            await first
        peers.close()
        with pytest.raises(OutcomeUnknown):
            await second
