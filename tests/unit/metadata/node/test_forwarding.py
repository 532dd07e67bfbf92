"""Requests forwarded by a follower: when a client asks for it, and how the follower treats the answers."""

from __future__ import annotations

import random
from typing import Any, cast

import pytest

from stratalog_core.errors import Conflict, Invalid, NotLeader, OutcomeUnknown, StratalogError, Unavailable
from stratalog_core.ports import Request, Transport
from stratalog_metadata.client.routing import Router
from stratalog_metadata.client.unreachable_peers import UnreachablePeers
from stratalog_metadata.controller.leases import LeaseTable
from stratalog_metadata.node.forwarding import Forwarder
from stratalog_metadata.node.peers import Peers
from stratalog_metadata.protocol import messages
from stratalog_metadata.protocol.messages import ForwardRequest
from stratalog_metadata.raft import Raft

NODES = ["a:1", "b:1", "c:1"]


class Network:
    """Collects requests; a test answers them."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, int, bytes, Any]] = []
        self._address = ""

    def channel(self, address: str) -> Any:
        self._address = address
        return self

    def send(self, method: int, parts: Any, on_reply: Any, timeout_s: float) -> None:
        self.sent.append((self._address, method, b"".join(parts), on_reply))

    def answer(self, answer: object) -> None:
        self.sent.pop(0)[3](answer)


# --- the client ------------------------------------------------------------------------------------------------------


@pytest.fixture
async def network() -> Network:
    return Network()


@pytest.fixture
async def cuts(network: Network) -> UnreachablePeers:
    return UnreachablePeers(cast(Transport, network))


def router(cuts: UnreachablePeers) -> Router:
    made = Router(NODES, random.Random(1), cuts)
    made.succeeded()
    return made


async def test_an_unreachable_leader_is_asked_through_a_follower(cuts: UnreachablePeers, network: Network) -> None:
    asked = router(cuts)
    asked.failed(OutcomeUnknown())
    assert asked.address == "b:1"
    assert asked.addressed(messages.RENEW, b"body", 1.0) == (messages.RENEW, b"body")
    assert asked.failed(NotLeader("", leader="a:1")) == 0.0
    assert (asked.address, asked.leader) == ("b:1", "")
    method, body = asked.addressed(messages.RENEW, b"body", 0.5)
    assert method == messages.FORWARD
    assert messages.decode(body, ForwardRequest) == ForwardRequest(method=messages.RENEW, body=b"body", timeout_ms=500)
    asked.succeeded()
    assert asked.forwards
    network.answer(memoryview(b"there again"))
    assert not asked.forwards
    assert asked.address == "a:1"


async def test_a_node_that_cannot_forward_is_replaced_by_another(cuts: UnreachablePeers) -> None:
    asked = router(cuts)
    asked.failed(OutcomeUnknown())
    asked.failed(NotLeader("", leader="a:1"))
    asked.failed(NotLeader("", leader=""))
    assert asked.address == "c:1", "not the one that is cut off"
    asked.failed(NotLeader("", leader="a:1"))
    assert (asked.address, asked.forwards) == ("c:1", True)


async def test_an_unknown_outcome_does_not_mark_the_forwarding_node_unreachable(cuts: UnreachablePeers) -> None:
    asked = router(cuts)
    asked.failed(OutcomeUnknown("", forwarded=True))
    assert "a:1" not in cuts
    cuts.close()


async def test_all_nodes_are_asked_in_turn_if_none_answers(cuts: UnreachablePeers) -> None:
    asked = router(cuts)
    seen = []
    for _ in range(6):
        seen.append(asked.address)
        asked.failed(Unavailable())
    assert set(seen[3:]) == set(NODES)
    cuts.close()


# --- the follower ----------------------------------------------------------------------------------------------------


class Follower:
    """The state of a follower that a forwarder reads."""

    node_id = 2
    leader = 1
    in_touch = True

    def address(self, node_id: int) -> str:
        return NODES[node_id - 1] if node_id else ""


class Asked:
    def __init__(self) -> None:
        self.answers: list[object] = []

    def reply(self, *parts: bytes) -> None:
        self.answers.append(b"".join(parts))

    def fail(self, error: StratalogError) -> None:
        self.answers.append(error)


WANTED = ForwardRequest(method=messages.PROPOSE, body=b"commands", timeout_ms=1_000)


def forwarding(network: Network, follower: Follower) -> Forwarder:
    return Forwarder(cast(Raft, follower), cast(Peers, follower), cast(Transport, network))


def answered(network: Network, answer: object) -> object:
    asked = Asked()
    forwarding(network, Follower()).forward(cast(Request, asked), WANTED)
    network.answer(answer)
    (found,) = asked.answers
    return found


def test_a_request_is_forwarded_once_and_its_answer_returned() -> None:
    network, asked = Network(), Asked()
    forwarding(network, Follower()).forward(cast(Request, asked), WANTED)
    address, method, body, _ = network.sent[0]
    assert (address, method) == ("a:1", messages.FORWARD)
    assert messages.decode(body, ForwardRequest).hops == 1
    network.answer(b"applied")
    assert asked.answers == [b"applied"]


def test_certain_failures_and_unknown_outcomes_are_distinguished() -> None:
    not_leader = answered(Network(), Unavailable("refused"))
    assert isinstance(not_leader, NotLeader)
    assert not_leader.detail == {"leader": ""}
    unknown = answered(Network(), OutcomeUnknown("no answer"))
    assert isinstance(unknown, OutcomeUnknown)
    assert unknown.detail == {"forwarded": True}
    assert isinstance(answered(Network(), Conflict("taken")), Conflict)


def test_requests_to_a_former_leader_are_answered_once() -> None:
    network, asked, follower = Network(), Asked(), Follower()
    forwarder = forwarding(network, follower)
    forwarder.forward(cast(Request, asked), WANTED)
    forwarder.follow()
    follower.leader = 0
    forwarder.follow()
    assert asked.answers == []
    follower.leader = 3
    forwarder.follow()
    network.answer(b"late")
    assert [type(answer) for answer in asked.answers] == [OutcomeUnknown]


def test_requests_to_a_former_leader_fail_in_the_order_of_their_arrival() -> None:
    network, follower, failed = Network(), Follower(), list[int]()
    forwarder = forwarding(network, follower)
    for number in range(20):
        asked = Asked()
        asked.fail = lambda error, number=number: failed.append(number)  # type: ignore[method-assign, misc]
        forwarder.forward(cast(Request, asked), WANTED)
    follower.leader = 3
    forwarder.follow()
    assert failed == list(range(20))


def test_requests_are_forwarded_one_hop_and_only_to_a_live_leader() -> None:
    asked, follower = cast(Request, Asked()), Follower()
    with pytest.raises(NotLeader):
        forwarding(Network(), follower).forward(asked, ForwardRequest(method=1, body=b"", timeout_ms=1, hops=1))
    with pytest.raises(Invalid, match="timeout_ms"):
        forwarding(Network(), follower).forward(asked, ForwardRequest(method=1, body=b"", timeout_ms=0))
    follower.in_touch = False
    with pytest.raises(NotLeader):
        forwarding(Network(), follower).forward(asked, WANTED)


# --- the leader ------------------------------------------------------------------------------------------------------


def test_a_session_that_is_renewed_through_another_node_ends_with_its_lease_only() -> None:
    leases, connection = LeaseTable([(1, 3.0, 0.3), (2, 3.0, 0.3)], 1.0), object()
    for session_id in (1, 2):
        leases.renew(session_id, 1.0, connection)
    leases.renew(1, 1.1)
    assert leases.carrier_lost(connection, 1.1) == [2]
    leases.renew(2, 1.1, connection)
    for tenth in range(11, 42):
        assert 1 not in leases.tick(tenth / 10), "its last renewal came in at 1.1"
    leases.tick(4.2)
    assert 1 in leases.tick(4.3)
