"""Requests and answers over real sockets: sizes, order, failures by what is known of them, and back-pressure."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Callable

import psutil
import pytest

from stratalog_core.connections import framing
from stratalog_core.connections.silent_clients import FRAME_LOOKS_MAX, IDLE_S, LOOK_S
from stratalog_core.errors import (
    Conflict,
    Invalid,
    OutcomeUnknown,
    Overloaded,
    StratalogError,
    Unavailable,
)
from stratalog_core.ports import Handler, Request
from stratalog_core.rpc import bound_sockets
from stratalog_core.rpc import tcp as rpc
from stratalog_core.rpc.addresses import split_address
from stratalog_core.rpc.tcp import TcpTransport

ECHO, HOLD = 1, 2
Serve = Callable[[Handler], "contextlib.AbstractAsyncContextManager[str]"]


@contextlib.asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[str]:
    async with serving_listener(handler) as listener:
        yield listener.address


@contextlib.asynccontextmanager
async def serving_listener(handler: Handler) -> AsyncIterator[rpc._TcpListener]:
    transport = TcpTransport()
    listener = await (await transport.bind("127.0.0.1:0")).listen(handler)
    try:
        yield listener
    finally:
        await listener.close()
        await transport.close()


@pytest.fixture
async def transport() -> AsyncIterator[TcpTransport]:
    made = TcpTransport()
    yield made
    await made.close()


def echo(request: Request) -> None:
    request.reply(request.body)


async def until(condition: Callable[[], bool]) -> None:
    """Turn the loop until something is so."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - what is waited for happens in the code under test, which sets no event
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("size", [0, 1, 32_750, 32_752, 32_768, 65_520, 65_536, 200_000, 9_000_000])
async def test_bodies_of_every_size_come_back(transport: TcpTransport, size: int) -> None:
    body = bytes(range(256)) * (size // 256) + bytes(size % 256)
    async with serving(echo) as address:
        channel = transport.channel(address)
        answers = await asyncio.gather(*(channel.call(ECHO, (body[: size // 3], body[size // 3 :]), 30) for _ in range(3)))
        assert [bytes(answer) for answer in answers] == [body] * 3


async def test_many_small_requests_are_answered_each_with_its_own(transport: TcpTransport) -> None:
    async with serving(echo) as address:
        channel = transport.channel(address)
        bodies = [f"request {number} ".encode() * (number % 50) for number in range(5000)]
        answers = await asyncio.gather(*(channel.call(ECHO, (body,), 30) for body in bodies))
        assert [bytes(answer) for answer in answers] == bodies
        assert transport.channel(address) is channel


async def test_answers_may_come_in_any_order(transport: TcpTransport) -> None:
    held: list[Request] = []
    async with serving(held.append) as address:
        channel = transport.channel(address)
        first, second = (asyncio.ensure_future(channel.call(HOLD, (body,), 30)) for body in (b"first", b"second"))
        await until(lambda: len(held) == 2)
        for request in reversed(held):
            request.reply(b"re: ", request.body)
        assert [bytes(await answer) for answer in (first, second)] == [b"re: first", b"re: second"]


async def test_a_requests_body_stays_while_others_come(transport: TcpTransport) -> None:
    held: list[Request] = []
    async with serving(held.append) as address:
        calls = [asyncio.ensure_future(transport.channel(address).call(HOLD, (b"%06d" % n * 100,), 30)) for n in range(500)]
        await until(lambda: len(held) == 500)
        assert [bytes(request.body) for request in held] == [b"%06d" % n * 100 for n in range(500)]
        for request in held:
            request.reply()
        await asyncio.gather(*calls)


async def test_errors_travel_with_class_message_and_detail(transport: TcpTransport) -> None:
    def refuse(request: Request) -> None:
        request.fail(Conflict("version 3 expected", expected=3, found=4))

    async with serving(refuse) as address:
        with pytest.raises(Conflict, match="version 3 expected") as refused:
            await transport.channel(address).call(ECHO, (), 30)
        assert refused.value.detail == {"expected": 3, "found": 4}


async def test_no_answer_in_time_is_an_unknown_outcome_and_a_late_one_is_dropped(transport: TcpTransport) -> None:
    held: list[Request] = []

    def serve(request: Request) -> None:
        held.append(request) if request.method == HOLD else request.reply(request.body)

    async with serving(serve) as address:
        channel = transport.channel(address)
        await channel.call(ECHO, (), 30)  # To connect may take longer than the answer may.
        with pytest.raises(OutcomeUnknown, match="in time"):
            await channel.call(HOLD, (b"x",), 0.01)
        await until(lambda: len(held) == 1)
        held[0].reply(b"late")
        assert bytes(await channel.call(ECHO, (b"second",), 30)) == b"second"


async def test_a_refused_connection_is_unavailable_and_the_next_call_tries_again(transport: TcpTransport) -> None:
    async with serving(echo) as address:
        pass
    channel = transport.channel(address)
    with pytest.raises(Unavailable, match="cannot connect"):
        await channel.call(ECHO, (b"x",), 30)
    own = TcpTransport()
    listener = await (await own.bind(address)).listen(echo)
    assert bytes(await channel.call(ECHO, (b"again",), 30)) == b"again"
    await listener.close()
    await own.close()


async def test_a_broken_connection_is_an_unknown_outcome_and_is_made_anew(transport: TcpTransport) -> None:
    held: list[Request] = []
    async with serving(held.append) as address:
        call = asyncio.ensure_future(transport.channel(address).call(HOLD, (b"x",), 30))
        await until(lambda: len(held) == 1)
    with pytest.raises(OutcomeUnknown, match="was lost before the answer"):
        await call
    held[0].reply(b"into the void")
    with pytest.raises(Unavailable):
        await transport.channel(address).call(ECHO, (b"x",), 30)


async def test_closing_a_channel_tells_what_left_from_what_did_not() -> None:
    held: list[Request] = []
    async with serving(held.append) as address:
        transport = TcpTransport()
        channel = transport.channel(address)
        left = asyncio.ensure_future(channel.call(HOLD, (b"x",), 30))
        await until(lambda: len(held) == 1)
        unconnected = transport.channel(address.replace("127.0.0.1", "127.0.0.2"))
        waiting = asyncio.ensure_future(unconnected.call(HOLD, (b"x",), 30))
        await asyncio.sleep(0)
        await transport.close()
        with pytest.raises(OutcomeUnknown):
            await left
        with pytest.raises(Unavailable):
            await waiting
        with pytest.raises(Unavailable, match="is closed"):
            await channel.call(ECHO, (), 30)


async def test_no_connection_in_time_is_unavailable(transport: TcpTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    never = asyncio.Event()

    async def connect(*_: object, **__: object) -> None:
        await never.wait()

    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", connect, raising=False)
    with pytest.raises(Unavailable, match="no connection"):
        await transport.channel("127.0.0.1:9").call(ECHO, (b"x",), 0.01)


async def test_callbacks_never_run_within_send(transport: TcpTransport) -> None:
    answers: list[memoryview | StratalogError] = []
    channel = transport.channel("127.0.0.1:1")
    await channel.close()
    channel.send(ECHO, (), answers.append, 30)
    assert answers == []
    await until(lambda: len(answers) == 1)
    assert isinstance(answers[0], Unavailable)


async def test_what_exceeds_the_bounds_is_refused(transport: TcpTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "IN_FLIGHT_BYTES_MAX", 1000)
    monkeypatch.setattr(framing, "FRAME_BYTES_MAX", 5000)
    held: list[Request] = []
    async with serving(held.append) as address:
        channel = transport.channel(address)
        with pytest.raises(Invalid, match="5001 bytes exceeds the frame limit"):
            await channel.call(HOLD, (bytes(5001),), 30)
        first = asyncio.ensure_future(channel.call(HOLD, (bytes(600),), 30))
        await until(lambda: len(held) == 1)
        with pytest.raises(Overloaded, match="600 bytes are unanswered"):
            await channel.call(HOLD, (bytes(401),), 30)
        held[0].reply(bytes(5001))
        with pytest.raises(Invalid, match="answer of 5001 bytes"):
            await first
        second = asyncio.ensure_future(channel.call(HOLD, (bytes(1000),), 30))
        await until(lambda: len(held) == 2)
        held[1].reply(b"ok")
        assert bytes(await second) == b"ok"


def frame(correlation: int, body: bytes) -> bytes:
    return framing.pack_header(framing.REQUEST, HOLD, correlation, len(body)) + body


async def test_a_server_stops_reading_a_client_whose_requests_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "IN_FLIGHT_BYTES_MAX", 100_000)
    held: list[Request] = []
    count, body = 2000, bytes(10_000)
    async with serving(held.append) as address:
        reader, writer = await asyncio.open_connection(*split_address(address))

        async def send() -> None:
            for number in range(count):
                writer.write(frame(number, body))
                await writer.drain()

        sending = asyncio.ensure_future(send())
        await until(lambda: len(held) > 10)
        await asyncio.sleep(0.05)
        # The bound, and what one read of the socket brought along.
        assert len(held) <= 10 + rpc.SERVER_READ_BYTES // 10_000 + 1
        assert not sending.done()
        answered = 0
        while answered < count:
            await until(lambda: bool(held))
            held.pop().reply(b"ok")
            answered += 1
        await sending
        answers = await reader.readexactly(count * (framing.HEADER_BYTES + 2))
        assert answers.count(b"ok") == count
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize(
    "bad",
    [
        b"\xff\xff\xff\xff" + bytes(12),
        b"\x00\x00\x00\x02" + bytes(12),
        framing.pack_header(framing.REPLY, 1, 1, 0),
        framing.pack_header(7, 1, 1, 0),
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
async def test_nonsense_closes_the_connection_and_no_other(
    transport: TcpTransport, bad: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(echo) as address:
        assert bytes(await transport.channel(address).call(ECHO, (b"before",), 30)) == b"before"
        reader, writer = await asyncio.open_connection(*split_address(address))
        writer.write(bad)
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            await writer.wait_closed()
        assert bytes(await transport.channel(address).call(ECHO, (b"after",), 30)) == b"after"
    assert [entry.levelno for entry in caplog.records if entry.name == "stratalog_core.rpc.frame_protocol"] == [logging.WARNING]


async def test_frames_cut_anywhere_by_the_network_are_put_together() -> None:
    bodies = [b"", b"a" * 10, b"b" * 40_000, b"c" * 3]
    stream = b"".join(frame(number, body) for number, body in enumerate(bodies))
    held: list[Request] = []
    async with serving(held.append) as address:
        _, writer = await asyncio.open_connection(*split_address(address))
        for start in range(0, len(stream), 7919):
            for piece in (stream[start : start + 5], stream[start + 5 : start + 7919]):
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
        await until(lambda: len(held) == len(bodies))
        assert [bytes(request.body) for request in held] == bodies
        writer.close()
        await writer.wait_closed()


HALF_FRAMES = [
    b"\x00",
    frame(1, b"body")[:9],
    frame(1, bytes(1000))[:500],
    framing.HEADER.pack(framing.FRAME_BYTES_MAX, 0, 1, 1, 1),
]


@pytest.mark.parametrize("half", HALF_FRAMES, ids=len)
async def test_half_a_frame_is_given_up_and_holds_nobody_else_up(transport: TcpTransport, half: bytes) -> None:
    async with serving_listener(echo) as listener:
        resident = psutil.Process().memory_info().rss
        reader, writer = await asyncio.open_connection(*split_address(listener.address))
        writer.write(half)
        await until(lambda: any(each.partial_bytes == len(half) for each in listener._connections))
        assert psutil.Process().memory_info().rss - resident < framing.FRAME_BYTES_MAX // 2, "announced bytes take no memory"
        for _ in range(FRAME_LOOKS_MAX):
            listener._silent.look()
            assert bytes(await transport.channel(listener.address).call(ECHO, (b"another",), 30)) == b"another"
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def test_an_idle_connection_is_closed_and_made_anew_and_one_that_waits_is_not(transport: TcpTransport) -> None:
    held: list[Request] = []
    async with serving_listener(held.append) as listener:
        channel = transport.channel(listener.address)
        lost = asyncio.Event()
        channel.on_lost(lost.set)
        waiting = asyncio.ensure_future(channel.call(HOLD, (), 30))
        await until(lambda: len(held) == 1)
        for _ in range(round(2 * IDLE_S / LOOK_S)):
            listener._silent.look()
        held.pop().reply(b"late")
        assert bytes(await waiting) == b"late"
        for _ in range(round(IDLE_S / LOOK_S) + 1):
            listener._silent.look()
        # The client learns of it later than the server, and a call in between would be sent over the closed connection.
        await asyncio.wait_for(lost.wait(), 60)
        again = asyncio.ensure_future(channel.call(HOLD, (), 30))
        await until(lambda: len(held) == 1)
        held.pop().reply(b"anew")
        assert bytes(await again) == b"anew"


async def test_the_connections_of_one_server_are_bounded(transport: TcpTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "CONNECTIONS_MAX", 1)
    async with serving_listener(echo) as listener:
        assert bytes(await transport.channel(listener.address).call(ECHO, (b"one",), 30)) == b"one"
        reader, writer = await asyncio.open_connection(*split_address(listener.address))
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        assert bytes(await transport.channel(listener.address).call(ECHO, (b"two",), 30)) == b"two"


@pytest.mark.parametrize("address", ["", "host", "host:", ":9", "host:x", "host:65536", "host:-1"])
async def test_addresses_that_are_none_are_refused_at_once(transport: TcpTransport, address: str) -> None:
    with pytest.raises(Invalid, match="not HOST:PORT"):
        transport.channel(address)


@pytest.mark.parametrize("host", ["a..b", "x" * 64, ".a"])
async def test_hosts_without_a_valid_name_are_refused_at_once(transport: TcpTransport, host: str) -> None:
    with pytest.raises(Invalid, match="has no valid host name"):
        transport.channel(f"{host}:9000")


async def test_a_host_that_cannot_be_looked_up_is_unavailable_at_each_call(transport: TcpTransport) -> None:
    channel = transport.channel("a\0b:9000")
    for _ in range(2):
        with pytest.raises(Unavailable, match="cannot connect"):
            await channel.call(ECHO, (b"x",), 60)


def test_addresses() -> None:
    assert split_address("[::1]:80") == ("::1", 80)
    assert split_address("host:0") == ("host", 0)


async def test_both_ends_learn_that_a_connection_has_broken(transport: TcpTransport) -> None:
    ended: list[str] = []
    connections = set()

    def handle(request: Request) -> None:
        if request.connection not in connections:
            connections.add(request.connection)
            request.connection.on_lost(lambda connection: ended.append("server"))
            request.connection.on_lost(lambda connection: ended.append("nobody"))()
        request.reply()

    async with serving(handle) as address:
        channel = transport.channel(address)
        stop = channel.on_lost(lambda: ended.append("client"))
        await asyncio.gather(*(channel.call(ECHO, (), 30) for _ in range(3)))
        assert len(connections) == 1
        assert channel._connection is not None
        channel._connection.abort()
        await until(lambda: sorted(ended) == ["client", "server"])
        stop()
        await channel.call(ECHO, (), 30)
        assert len(connections) == 2
        await channel.close()
        await until(lambda: ended.count("server") == 2)
        assert ended.count("client") == 1


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the system cannot give up such connections")
async def test_a_connection_whose_peer_takes_nothing_is_given_up_and_made_anew(
    transport: TcpTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the peer's machine lost power or has another address now: nothing tells that the connection is dead.

    Here the peer accepts no more bytes, because the loss of packets cannot be arranged on every machine.
    """
    monkeypatch.setattr(bound_sockets, "UNTAKEN_MS_MAX", 300)
    accepted: list[asyncio.StreamWriter] = []

    def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Not at once: in Python 3.11.2 a transport begins to read after this, paused or not.
        asyncio.get_running_loop().call_soon(writer.transport.pause_reading)  # type: ignore[attr-defined]
        accepted.append(writer)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    channel = transport.channel(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
    for connections in (1, 2):
        with pytest.raises(OutcomeUnknown, match="was lost before the answer"):
            await channel.call(ECHO, (bytes(32 * 1024 * 1024),), 300)
        await until(lambda expected=connections: len(accepted) == expected)  # type: ignore[misc]
    server.close()
    for writer in accepted:
        writer.transport.abort()
    await server.wait_closed()


async def test_a_bound_port_is_taken_and_answers_nobody_until_it_listens(transport: TcpTransport) -> None:
    bound = await transport.bind("127.0.0.1:0")
    channel = transport.channel(bound.address)
    with pytest.raises(Unavailable, match="cannot connect"):
        await channel.call(ECHO, (b"early",), 30)
    listener = await bound.listen(echo)
    assert bytes(await channel.call(ECHO, (b"x",), 30)) == b"x"
    with pytest.raises(Conflict, match=f"{bound.address} is in use by another process"):
        await transport.bind(bound.address)
    bound.close()
    assert bytes(await channel.call(ECHO, (b"y",), 30)) == b"y", "the listener owns the port"
    await listener.close()


async def test_of_two_that_bound_one_port_the_second_cannot_listen(transport: TcpTransport) -> None:
    first = await transport.bind("127.0.0.1:0")
    second = await transport.bind(first.address)
    listener = await first.listen(echo)
    with pytest.raises(Conflict, match="is in use by another process"):
        await second.listen(echo)
    second.close()
    assert bytes(await transport.channel(first.address).call(ECHO, (b"x",), 30)) == b"x"
    await listener.close()
