"""One connection to a peer: the shell of :class:`~stratalog_broker.peers.core.PeerCore` over asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, cast

from stratalog_broker.peers.core import Connect, Drop, Instruction, PeerCore, Send
from stratalog_core.errors import StratalogError
from stratalog_core.ports import Clock

CONNECT_TIMEOUT_S: Final = 2.0


class PeerChannel:
    """Requests to one address. A connection is opened for the first request and again after it has broken."""

    def __init__(self, peer: str, address: tuple[str, int], clock: Clock) -> None:
        self.address = address
        self._clock = clock
        self._core = PeerCore(peer)
        self._answers: dict[int, asyncio.Future[bytes]] = {}
        self._next_ticket = 0
        self._connecting: asyncio.Task[None] | None = None
        self._connection: _PeerConnection | None = None

    async def exchange(self, frame: bytes, timeout_s: float) -> bytes:
        """Send a request frame; return the response frame without its length.

        Raises ``Unavailable``, ``Overloaded`` or ``OutcomeUnknown``: see the module of the core.
        """
        loop = asyncio.get_running_loop()
        self._next_ticket += 1
        ticket = self._next_ticket
        answer: asyncio.Future[bytes] = loop.create_future()
        self._answers[ticket] = answer
        deadline = loop.call_later(timeout_s, self._expired, ticket)
        self._act(self._core.request(ticket, frame, self._clock.monotonic()))
        try:
            return await answer
        finally:
            deadline.cancel()
            self._answers.pop(ticket, None)

    def _expired(self, ticket: int) -> None:
        self._act(self._core.expired(ticket))

    def _act(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, Connect):
                self._connecting = asyncio.get_running_loop().create_task(self._connect())
            elif isinstance(instruction, Send):
                assert self._connection is not None
                self._connection.write(instruction.frame)
            elif isinstance(instruction, Drop):
                self._drop()
            else:
                self._settle(instruction.ticket, instruction.outcome)

    def _settle(self, ticket: int, outcome: bytes | StratalogError) -> None:
        answer = self._answers.get(ticket)
        if answer is None or answer.done():
            return
        if isinstance(outcome, StratalogError):
            answer.set_exception(outcome)
        else:
            answer.set_result(outcome)

    async def _connect(self) -> None:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await asyncio.get_running_loop().create_connection(lambda: _PeerConnection(self), *self.address)
        except (OSError, TimeoutError, ValueError) as failure:
            # ``ValueError``: the host cannot be looked up at all, because of its length or its characters.
            self._act(self._core.connect_failed(f"{failure or type(failure).__name__}", self._clock.monotonic()))
            return
        self._connection = connection
        self._act(self._core.connected())

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()
        if self._connecting is not None:
            self._connecting.cancel()

    def data_received_on(self, connection: _PeerConnection, data: bytes) -> None:
        """Take bytes that arrived; those of a connection that was given up are ignored."""
        if connection is self._connection:
            self._act(self._core.received(data))

    def lost(self, connection: _PeerConnection, reason: str) -> None:
        """Note that a connection has ended."""
        if connection is self._connection:
            self._connection = None
            self._act(self._core.lost(reason))

    def close(self, reason: str) -> None:
        """Give up all requests and the connection; requests that were written fail with ``OutcomeUnknown``."""
        self._act(self._core.close(reason))


class _PeerConnection(asyncio.Protocol):
    def __init__(self, channel: PeerChannel) -> None:
        self._channel = channel
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._channel.data_received_on(self, data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._channel.lost(self, f"{exc}" if exc is not None else "it was closed")

    def write(self, frame: bytes) -> None:
        assert self._transport is not None
        self._transport.write(frame)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()
