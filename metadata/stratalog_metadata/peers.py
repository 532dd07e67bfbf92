"""Raft messages on their way to the other nodes: gathered per receiver, cut to size, one way.

Lost messages are not repeated here: the core is told that the peer cannot be reached, and goes on by its own rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

from stratalog_core.errors import Invalid, StratalogError
from stratalog_core.malformed import MALFORMED
from stratalog_core.ports import Buffer, Channel, Transport
from stratalog_metadata import messages
from stratalog_metadata.messages import RaftEnvelope
from stratalog_metadata.raft import Message
from stratalog_metadata.raft.messages import Append, SnapshotChunk

ENVELOPE_BYTES_MAX: Final = 8 * 1024 * 1024
ANSWER_TIMEOUT_S: Final = 2.0
NUMBER_MAX: Final = 2**62
"""Of terms, indexes and node ids; far beyond what is ever reached, and far enough below what a file can hold."""
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Message])


class Peers:
    """``on_lost`` is called with a node id when an envelope to it was not answered."""

    def __init__(self, addresses: Mapping[int, str], transport: Transport, on_lost: Callable[[int], None]) -> None:
        self._addresses = dict(addresses)
        self._transport = transport
        self._on_lost = on_lost
        self._channels: dict[int, Channel] = {}
        self.cluster_id = ""

    def address(self, node_id: int) -> str:
        """Empty if unknown."""
        return self._addresses.get(node_id, "")

    def send(self, outgoing: Sequence[Message]) -> None:
        by_receiver: dict[int, list[Message]] = {}
        for message in outgoing:
            by_receiver.setdefault(message.receiver, []).append(message)
        for receiver, for_receiver in by_receiver.items():
            for piece in _cut(for_receiver):
                self._send_envelope(receiver, piece)

    def _send_envelope(self, receiver: int, piece: Sequence[Message]) -> None:
        envelope = RaftEnvelope(cluster_id=self.cluster_id, messages=msgspec.Raw(_encoder.encode(piece)))

        def answered(answer: memoryview | StratalogError) -> None:
            if isinstance(answer, StratalogError):
                self._on_lost(receiver)

        self._channel(receiver).send(messages.RAFT, (messages.encode(envelope),), answered, ANSWER_TIMEOUT_S)

    def _channel(self, receiver: int) -> Channel:
        channel = self._channels.get(receiver)
        if channel is None:
            channel = self._channels[receiver] = self._transport.channel(self._addresses[receiver])
        return channel


def decode_messages(encoded: Buffer) -> list[Message]:
    """Raises ``Invalid`` for what no node of any version sends."""
    try:
        arrived = _decoder.decode(encoded)
    except MALFORMED as malformed:
        raise Invalid(f"malformed raft messages: {malformed}") from malformed
    for message in arrived:
        _check(message)
    return arrived


def _check(message: Message) -> None:
    """Numbers within their bounds, entries that follow each other. Raises ``Invalid``."""
    numbers = [value for name in message.__struct_fields__ if type(value := getattr(message, name)) is int]
    if not all(0 <= number <= NUMBER_MAX for number in numbers):
        raise Invalid(f"a raft message has a number outside 0..{NUMBER_MAX}")
    if isinstance(message, Append):
        index, term = message.previous_index, message.previous_term
        for entry in message.entries:
            if entry.index != index + 1 or not term <= entry.term <= message.term:
                raise Invalid(
                    f"raft entry ({entry.index}, {entry.term}) cannot follow ({index}, {term}) in term {message.term}"
                )
            index, term = entry.index, entry.term


def _cut(outgoing: Sequence[Message]) -> list[list[Message]]:
    """Consecutive pieces of about ``ENVELOPE_BYTES_MAX``."""
    pieces: list[list[Message]] = [[]]
    size = 0
    for message in outgoing:
        message_bytes = _payload_bytes(message)
        if pieces[-1] and size + message_bytes > ENVELOPE_BYTES_MAX:
            pieces.append([])
            size = 0
        pieces[-1].append(message)
        size += message_bytes
    return pieces


def _payload_bytes(message: Message) -> int:
    match message:
        case Append():
            return sum(len(entry.payload) for entry in message.entries)
        case SnapshotChunk():
            return len(message.content)
        case _:
            return 0
