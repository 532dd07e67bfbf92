"""Requests of the command line to one Kafka broker, by an address as users write it."""

from __future__ import annotations

import asyncio

import pytest

from stratalog.kafka_connection import METADATA, NotAnswered, connect
from stratalog.kafka_requests import ask_any
from stratalog_core.errors import Invalid


async def test_a_host_in_brackets_is_connected_to() -> None:
    async with await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0) as server:
        _, port = server.sockets[0].getsockname()
        (await connect(f"[127.0.0.1]:{port}")).close()


async def test_an_address_without_a_port_is_invalid() -> None:
    with pytest.raises(Invalid, match="is not HOST:PORT"):
        await connect("127.0.0.1")


async def test_a_bootstrap_address_without_a_port_has_the_default_one() -> None:
    # TCP cannot connect to a broadcast address: this is refused at once.
    with pytest.raises(NotAnswered, match=r"^255\.255\.255\.255:9092: "):
        await ask_any("255.255.255.255", METADATA)
