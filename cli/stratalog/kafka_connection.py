"""A connection to one Kafka broker, for requests that confluent-kafka has no call for. kio encodes them.

Brokers of the last years serve the versions used here. Only FindCoordinator and Metadata need tagged fields.
"""

from __future__ import annotations

import asyncio
import functools
import io
import struct
import sys
from collections import deque
from collections.abc import Iterator
from typing import Any, Final, cast

from kio.index import load_request_schema, load_response_schema
from kio.serial import entity_reader, entity_writer

from stratalog_core.errors import StratalogError
from stratalog_core.rpc.addresses import split_address

FETCH, METADATA, OFFSET_COMMIT, OFFSET_FETCH, FIND_COORDINATOR = 1, 3, 8, 9, 10
JOIN_GROUP, HEARTBEAT, LEAVE_GROUP, SYNC_GROUP, OFFSET_DELETE, CONSUMER_GROUP_HEARTBEAT = 11, 12, 13, 14, 47, 68
WRITE_TXN_MARKERS, DESCRIBE_PRODUCERS, DESCRIBE_TRANSACTIONS, LIST_TRANSACTIONS = 27, 61, 65, 66
_VERSIONS: Final = {
    FETCH: 11, METADATA: 9, OFFSET_COMMIT: 7, OFFSET_FETCH: 5, FIND_COORDINATOR: 3, JOIN_GROUP: 5, HEARTBEAT: 3, LEAVE_GROUP: 2,
    SYNC_GROUP: 3, OFFSET_DELETE: 0, WRITE_TXN_MARKERS: 1, DESCRIBE_PRODUCERS: 0, DESCRIBE_TRANSACTIONS: 0,
    LIST_TRANSACTIONS: 0, CONSUMER_GROUP_HEARTBEAT: 1,
}  # fmt: skip
CLIENT: Final = "stratalog"
_ANSWER_TIMEOUT_S: Final = 330.0
_CONNECT_TIMEOUT_S: Final = 30.0


class NotAnswered(StratalogError):
    """No response, or the connection was lost. Whether the request took effect is unknown."""


@functools.cache
def request_schema(api: int, version: int | None = None) -> type[Any]:
    return load_request_schema(api, _VERSIONS[api] if version is None else version)


def request_part(api: int, name: str, version: int | None = None) -> type[Any]:
    """Return the class of a part of a request, by kio's name for it."""
    return cast(type[Any], getattr(sys.modules[request_schema(api, version).__module__], name))


def taken_frames(received: bytearray) -> Iterator[bytes]:
    """Yield complete responses without their size prefix, and remove them from ``received``."""
    while len(received) >= 4:
        (size,) = struct.unpack_from(">i", received)
        if len(received) < 4 + size:
            return
        frame = bytes(received[4 : 4 + size])
        del received[: 4 + size]
        yield frame


class Connection(asyncio.Protocol):
    """A connection to one broker. Responses arrive in the order of the requests."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._waiting: deque[asyncio.Future[bytes]] = deque()
        self._transport: asyncio.Transport | None = None
        self._lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        for frame in taken_frames(self._received):
            waiting = self._waiting.popleft()
            if not waiting.done():
                waiting.set_result(frame)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_exception(NotAnswered("the connection was lost"))

    @property
    def lost(self) -> bool:
        return self._lost

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    async def ask(self, api: int, api_version: int | None = None, **fields: Any) -> Any:
        """Send one request, of another version if given, and return its response as a kio entity. Raises ``NotAnswered``."""
        version = _VERSIONS[api] if api_version is None else api_version
        schema = request_schema(api, version)
        header_kind: Any = schema.__header_schema__
        with io.BytesIO() as body:
            header = header_kind(request_api_key=api, request_api_version=version, correlation_id=0, client_id=CLIENT)
            entity_writer(header_kind)(body, header)
            entity_writer(schema)(body, schema(**fields))
            frame = body.getvalue()
        content = memoryview(await self.exchange(frame)).toreadonly()
        response: Any = load_response_schema(api, version)
        _, at = entity_reader(response.__header_schema__)(content, 0)
        return entity_reader(response)(content, at)[0]

    async def exchange(self, frame: bytes) -> bytes:
        """Send a request frame and return the response frame. Raises ``NotAnswered``."""
        if self._lost or self._transport is None:
            raise NotAnswered("the connection was lost")
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting.append(answer)
        self._transport.write(struct.pack(">i", len(frame)) + frame)
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                return await answer
        except TimeoutError:
            self.close()
            raise NotAnswered(f"no answer within {_ANSWER_TIMEOUT_S:.0f} s") from None


async def connect(address: str) -> Connection:
    """Open a connection to HOST:PORT. Raises ``NotAnswered``, ``Invalid``."""
    host, port = split_address(address)
    try:
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            _, connection = await asyncio.get_running_loop().create_connection(Connection, host, port)
    except (OSError, TimeoutError) as failure:
        raise NotAnswered(f"{address}: {failure or type(failure).__name__}") from failure
    return connection
