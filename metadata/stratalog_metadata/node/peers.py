"""Sends Raft messages to the other nodes: batched per receiver, bounded in size, one way.

Lost messages are not repeated: the core is told that the peer is unreachable and decides what to do. A member is tried at the
address of its last message, the one in the configuration, and the one in this process's settings in turn until it answers;
each may be outdated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

from stratalog_core.errors import Fenced, Invalid, StratalogError
from stratalog_core.malformed import MALFORMED
from stratalog_core.ports import Buffer, Transport
from stratalog_core.rpc.addresses import split_address
from stratalog_metadata.protocol import messages
from stratalog_metadata.protocol.messages import RaftEnvelope
from stratalog_metadata.raft import Membership, Message
from stratalog_metadata.raft.messages import Append, SnapshotChunk
from stratalog_metadata.storage.identity import Identity

ENVELOPE_BYTES_MAX: Final = 8 * 1024 * 1024
ANSWER_TIMEOUT_S: Final = 2.0
HEARD_MAX: Final = 64
"""Maximum of remembered addresses; the oldest is dropped first."""
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Message])


class Peers:
    """``on_lost`` is called with a node id when an envelope to it was not answered, ``on_removed`` with a leader's answer
    to a node that is no longer a member. ``addresses`` are those of the settings, this node's included.
    """

    def __init__(
        self,
        identity: Identity,
        addresses: Mapping[int, str],
        transport: Transport,
        on_lost: Callable[[int], None],
        on_removed: Callable[[Fenced], None],
    ) -> None:
        self.cluster_id = identity.cluster_id
        self.node_id = identity.node_id
        self.identity = identity.identity
        self.own_address = addresses[identity.node_id]
        self._settings = dict(addresses)
        self._configured: dict[int, tuple[str, str]] = {}
        self._heard: dict[int, tuple[str, str]] = {}
        self._tried: dict[int, int] = {}
        self._moved: tuple[int, str] | None = None
        self._transport = transport
        self._on_lost = on_lost
        self._on_removed = on_removed

    def follow(self, membership: Membership) -> None:
        """Adopt the members of a configuration."""
        self._configured = {member.node_id: (member.identity, member.address) for member in membership.members}
        self._tried.clear()
        self._moved = self._find_moved()

    def heard(self, node_id: int, identity: str, address: str) -> None:
        """Record a node's current address. It is used even if this node's log does not know the node yet.

        Raises ``Invalid`` for what is no address: it would stop each node that sends to it.
        """
        if address and self._heard.get(node_id) != (identity, address):
            split_address(address)
            self._heard.pop(node_id, None)
            self._heard[node_id] = (identity, address)
            self._tried.pop(node_id, None)
            if len(self._heard) > HEARD_MAX:
                del self._heard[next(iter(self._heard))]
            self._moved = self._find_moved()

    def moved(self) -> tuple[int, str] | None:
        """A member whose address differs from the configuration's, and the address; None if there is none."""
        return self._moved

    def _find_moved(self) -> tuple[int, str] | None:
        now = self._heard | {self.node_id: (self.identity, self.own_address)}
        for node_id, (identity, address) in now.items():
            known = self._configured.get(node_id)
            if known is not None and known[0] == identity and known[1] != address:
                return node_id, address
        return None

    def address(self, node_id: int) -> str:
        """The address to try next; empty if unknown."""
        if node_id == self.node_id:
            return self.own_address
        tried = self._tried.get(node_id, 0)
        heard = self._heard.get(node_id, ("", ""))[1]
        if heard and not tried:
            return heard
        known = (heard, self._configured.get(node_id, ("", ""))[1], self._settings.get(node_id))
        candidates = list(dict.fromkeys(address for address in known if address))
        return candidates[tried % len(candidates)] if candidates else ""

    def send(self, outgoing: Sequence[Message]) -> None:
        by_receiver: dict[int, list[Message]] = {}
        for message in outgoing:
            by_receiver.setdefault(message.receiver, []).append(message)
        for receiver, for_receiver in by_receiver.items():
            for piece in _cut(for_receiver):
                self._send_envelope(receiver, piece)

    def _send_envelope(self, receiver: int, piece: Sequence[Message]) -> None:
        address = self.address(receiver)
        if not address:
            # A candidate or leader that this node's log does not know yet: its next message has the address.
            return
        envelope = RaftEnvelope(
            cluster_id=self.cluster_id,
            messages=msgspec.Raw(_encoder.encode(piece)),
            node_id=self.node_id,
            identity=self.identity,
            address=self.own_address,
        )

        def answered(answer: memoryview | StratalogError) -> None:
            if isinstance(answer, Fenced):
                self._on_removed(answer)
            elif isinstance(answer, StratalogError):
                if self.address(receiver) == address:
                    self._tried[receiver] = self._tried.get(receiver, 0) + 1
                self._on_lost(receiver)

        self._transport.channel(address).send(messages.RAFT, (messages.encode(envelope),), answered, ANSWER_TIMEOUT_S)


def decode_messages(encoded: Buffer) -> list[Message]:
    """Decode an envelope's messages. Raises ``Invalid``. The core checks their content."""
    try:
        return _decoder.decode(encoded)
    except MALFORMED as malformed:
        raise Invalid(f"malformed raft messages: {malformed}") from malformed


def _cut(outgoing: Sequence[Message]) -> list[list[Message]]:
    """Split messages into consecutive envelopes of about ``ENVELOPE_BYTES_MAX``."""
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
