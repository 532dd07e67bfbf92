"""Requests to other brokers by broker id, as transaction coordinators and partition owners send them to each other.

Each API has its own connection to a peer, because a broker handles the requests of a connection one after the other: a marker
that waits for its quorum must not delay others' requests. For the same reason a caller may divide its requests among *lanes*,
each with a connection of its own. A broker may send requests to itself. When a broker's session ends, its requests fail at
once, so that they can be sent to the partitions' next owners.
"""

from __future__ import annotations

import io
import itertools
import struct
from collections.abc import Sequence
from typing import Any, Final

from kio.index import load_request_schema, load_response_schema
from kio.serial import entity_reader, entity_writer
from kio.serial.errors import SerialError

from stratalog_broker.peers.channel import PeerChannel
from stratalog_core.errors import OutcomeUnknown, Unavailable
from stratalog_core.ports import Clock
from stratalog_metadata.client.api import MetadataView
from stratalog_metadata.records import Broker, broker_key
from stratalog_metadata.state.changes import Change

CLIENT_ID: Final = "stratalog-broker"
_LENGTH: Final = struct.Struct(">i")


class Peers:
    """The connections of one broker to others. Follows the view from construction until ``close``."""

    def __init__(self, view: MetadataView, clock: Clock) -> None:
        self._view = view
        self._clock = clock
        self._channels: dict[tuple[int, int, int], PeerChannel] = {}
        """By broker id, API key and lane."""
        self._correlation_ids = itertools.cycle(range(1 << 31))
        self._unsubscribe = view.subscribe(self._on_changes)

    async def call(
        self, broker_id: int, api_key: int, api_version: int, request: Any, timeout_s: float, *, lane: int = 0
    ) -> Any:
        """Send a kio request entity to a broker; return the response entity.

        Raises ``Unavailable`` or ``Overloaded`` if the request was not sent, ``OutcomeUnknown`` if no response to it arrived.
        """
        channel = self._channel(broker_id, api_key, lane)
        correlation_id = next(self._correlation_ids)
        frame = _request_frame(api_key, api_version, correlation_id, request)
        return _response(api_key, api_version, correlation_id, await channel.exchange(frame, timeout_s))

    def _channel(self, broker_id: int, api_key: int, lane: int) -> PeerChannel:
        broker = self._view.find(Broker, broker_key(broker_id))
        if broker is None:
            raise Unavailable(f"broker {broker_id} has no session: retry later")
        address = (broker.host, broker.port)
        channel = self._channels.get((broker_id, api_key, lane))
        if channel is None or channel.address != address:
            if channel is not None:
                channel.close(f"broker {broker_id} has another address now")
            channel = self._channels[broker_id, api_key, lane] = PeerChannel(f"broker {broker_id}", address, self._clock)
        return channel

    def _on_changes(self, changes: Sequence[Change]) -> None:
        for change in changes:
            if change.after is None and change.before is not None and isinstance(change.before.record, Broker):
                self._forget(change.before.record.broker_id)

    def _forget(self, broker_id: int) -> None:
        for key in [key for key in self._channels if key[0] == broker_id]:
            self._channels.pop(key).close(f"the session of broker {broker_id} has ended")

    def close(self) -> None:
        """Give up all requests."""
        self._unsubscribe()
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            channel.close("this broker is stopping")


def _request_frame(api_key: int, api_version: int, correlation_id: int, request: Any) -> bytes:
    header_kind: Any = load_request_schema(api_key, api_version).__header_schema__
    header = header_kind(
        request_api_key=api_key, request_api_version=api_version, correlation_id=correlation_id, client_id=CLIENT_ID
    )
    with io.BytesIO() as body:
        entity_writer(header_kind)(body, header)
        entity_writer(type(request))(body, request)
        content = body.getvalue()
    return _LENGTH.pack(len(content)) + content


def _response(api_key: int, api_version: int, correlation_id: int, frame: bytes) -> Any:
    """Return the response entity. A malformed response says nothing about the outcome: raises ``OutcomeUnknown``."""
    kind: Any = load_response_schema(api_key, api_version)
    content = memoryview(frame).toreadonly()
    try:
        header, position = entity_reader(kind.__header_schema__)(content, 0)
        response, _ = entity_reader(kind)(content, position)
    except (SerialError, ValueError, OverflowError) as malformed:
        raise OutcomeUnknown(f"a response of API {api_key} v{api_version} is malformed: {malformed}") from malformed
    if header.correlation_id != correlation_id:
        raise OutcomeUnknown(f"a response has correlation id {header.correlation_id} instead of {correlation_id}")
    return response
