"""The follower's side of forwarded requests: those of a client whose link to the leader is cut.

It passes the request to the leader and the answer back, and decides nothing: a request that certainly had no effect is
reported so, and one that may have had an effect stays unknown. One hop at most. A follower that does not hear its leader
forwards nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec

from stratalog_core.errors import Invalid, NotLeader, OutcomeUnknown, Overloaded, StratalogError, Unavailable
from stratalog_core.ports import Buffer, Connection, Request, Transport
from stratalog_metadata.node.peers import Peers
from stratalog_metadata.protocol import messages
from stratalog_metadata.protocol.messages import ForwardRequest
from stratalog_metadata.raft import Raft

FORWARDED: Final = frozenset(
    (messages.PROPOSE, messages.READ, messages.SCAN, messages.RENEW, messages.LOADS, messages.CHANGE_MEMBERS)
)
"""Methods that only the leader answers."""
FORWARDED_MAX: Final = 1_000
TIMEOUT_S_MAX: Final = 60.0


class ForwardedRequest:
    """A request that a client sent through another node; see :class:`stratalog_core.ports.Request`. Its connection is the
    other node's.
    """

    __slots__ = ("_carrier", "body", "method")

    def __init__(self, carrier: Request, wanted: ForwardRequest) -> None:
        self.method = wanted.method
        self.body = memoryview(wanted.body)
        self._carrier = carrier

    @property
    def connection(self) -> Connection:
        return self._carrier.connection

    def reply(self, *parts: Buffer) -> None:
        self._carrier.reply(*parts)

    def fail(self, error: StratalogError) -> None:
        self._carrier.fail(error)


@dataclass(eq=False, slots=True)
class _HandedOn:
    request: Request
    leader: int
    is_answered: bool = False

    def answered(self, answer: memoryview | StratalogError) -> None:
        if self.is_answered:
            return
        self.is_answered = True
        if isinstance(answer, Unavailable):
            # It certainly had no effect. NotLeader also shows the client that this node answers.
            self.request.fail(NotLeader(f"the leader did not accept it: {answer.message}", leader=""))
        elif isinstance(answer, OutcomeUnknown):
            self.request.fail(OutcomeUnknown(answer.message, forwarded=True))
        elif isinstance(answer, StratalogError):
            self.request.fail(answer)
        else:
            self.request.reply(answer)


class Forwarder:
    def __init__(self, core: Raft, peers: Peers, transport: Transport) -> None:
        self._core = core
        self._peers = peers
        self._transport = transport
        self._waiting: dict[_HandedOn, None] = {}
        """In the order of their arrival."""

    def forward(self, request: Request, wanted: ForwardRequest) -> None:
        """Forward a request and answer it when the leader does. Raises ``NotLeader`` (no leader is known), ``Overloaded``
        or ``Invalid``.
        """
        leader, address = self._core.leader, self._peers.address(self._core.leader)
        if wanted.hops or not self._core.in_touch or not address or leader == self._core.node_id:
            raise NotLeader(f"metadata node {self._core.node_id} is not the leader and knows of none", leader="")
        if len(self._waiting) >= FORWARDED_MAX:
            raise Overloaded(f"{FORWARDED_MAX} requests are waiting for the leader, which is the maximum: retry later")
        if wanted.timeout_ms <= 0:
            raise Invalid(f"timeout_ms is {wanted.timeout_ms}: it must be positive")
        handed_on = _HandedOn(request, leader)
        self._waiting[handed_on] = None

        def answered(answer: memoryview | StratalogError) -> None:
            self._waiting.pop(handed_on, None)
            handed_on.answered(answer)

        body = messages.encode(msgspec.structs.replace(wanted, hops=1))
        timeout_s = min(wanted.timeout_ms / 1000, TIMEOUT_S_MAX)
        self._transport.channel(address).send(messages.FORWARD, (body,), answered, timeout_s)

    def follow(self) -> None:
        """Fail the requests that went to a former leader: it may never answer."""
        for handed_on in [each for each in self._waiting if self._core.leader not in (0, each.leader)]:
            del self._waiting[handed_on]
            handed_on.answered(OutcomeUnknown(f"node {handed_on.leader} did not answer, and another one leads now"))

    def close(self, reason: StratalogError) -> None:
        """Fail all requests in progress."""
        for handed_on in self._waiting:
            handed_on.answered(OutcomeUnknown(reason.message))
        self._waiting.clear()
