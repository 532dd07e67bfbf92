"""All connections of a port together stay within its bound; frames that have begun end; slow clients go, fast ones stay."""

from __future__ import annotations

import asyncio

import pytest
from unit.core.rpc.test_tcp import HOLD, frame, serving, until

from stratalog_core.connections.port_memory import PortMemory
from stratalog_core.ports import Request
from stratalog_core.rpc import tcp as rpc
from stratalog_core.rpc.addresses import split_address


class Connection:
    def __init__(self, unsent_bytes: int = 0) -> None:
        self.unsent_bytes = unsent_bytes
        self.regulated = 0
        self.is_closed = False

    def regulate(self) -> None:
        self.regulated += 1

    def close(self, reason: str) -> None:
        self.is_closed = True


def test_all_are_told_once_when_it_is_full_and_once_when_there_is_room() -> None:
    connections = [Connection() for _ in range(3)]
    memory = PortMemory(connections, 100)
    for _ in range(3):
        memory.hold(60)
    assert (memory.is_full, [each.regulated for each in connections]) == (True, [1, 1, 1])
    memory.release(60)
    memory.release(40)
    assert memory.is_full, "80 of 100 are not room enough to tell everybody"
    memory.release(10)
    assert (memory.is_full, [each.regulated for each in connections]) == (False, [2, 2, 2])


def test_the_client_that_took_least_is_dropped() -> None:
    connections = [Connection(30), Connection(60), Connection(50)]
    PortMemory(connections, 90).bound_replies()
    assert [each.is_closed for each in connections] == [False, True, False]


async def test_clients_together_are_read_no_further_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "PORT_BYTES_MAX", 100_000)
    held: list[Request] = []
    clients, count, body = 8, 40, bytes(10_000)
    async with serving(held.append) as address:
        streams = [await asyncio.open_connection(*split_address(address)) for _ in range(clients)]

        async def send(writer: asyncio.StreamWriter) -> None:
            for number in range(count):
                writer.write(frame(number, body))
                await writer.drain()

        sending = [asyncio.ensure_future(send(writer)) for _, writer in streams]
        for _ in range(clients * count):
            await until(lambda: bool(held))
            # The bound, and what one read of a socket brought along.
            assert len(held) <= 10 + rpc.SERVER_READ_BYTES // 10_000 + 1
            held.pop(0).reply(b"")
        await asyncio.gather(*sending)
        for _, writer in streams:
            writer.close()


async def test_what_a_lost_client_left_unanswered_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "PORT_BYTES_MAX", 100_000)
    held: list[Request] = []
    async with serving(held.append) as address:
        _, lost = await asyncio.open_connection(*split_address(address))
        lost.write(frame(1, bytes(90_000)) + frame(2, bytes(3_000_000))[:2_000_000])
        await until(lambda: len(held) == 1)
        memory = held[0].connection._memory  # type: ignore[attr-defined]
        await until(lambda: memory.bytes_held > 3_000_000)
        lost.close()
        await until(lambda: memory.bytes_held == 0)
        assert not memory.is_full
        held[0].reply(b"late")
        assert memory.bytes_held == 0
        _, other = await asyncio.open_connection(*split_address(address))
        other.write(frame(HOLD, bytes(3_000_000)))
        await until(lambda: len(held) == 2)
        held[1].reply(b"")
        assert memory.bytes_held == 0
        other.close()
