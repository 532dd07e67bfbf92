"""Raft messages on their way to the other nodes: gathered per receiver, cut to size, one way.

Lost messages are not repeated here: the core is told that the peer cannot be reached, and goes on by its own rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

from stratalog_core.errors import StratalogError
from stratalog_core.ports import Buffer, Channel, Transport
from stratalog_metadata import messages
from stratalog_metadata.messages import RaftEnvelope
from stratalog_metadata.raft import Message
from stratalog_metadata.raft.messages import Append, SnapshotChunk

ENVELOPE_BYTES_MAX: Final = 8 * 1024 * 1024
ANSWER_TIMEOUT_S: Final = 2.0
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
    """Raises one of ``MALFORMED``."""
    return _decoder.decode(encoded)


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
