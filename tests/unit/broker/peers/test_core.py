"""Requests to one peer: each gets exactly one outcome, and certain failures are distinguished from unknown outcomes."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratalog_broker.peers.core import (
    BACKOFF_MIN_S,
    BYTES_MAX,
    REQUESTS_MAX,
    RESPONSE_BYTES_MAX,
    Connect,
    Drop,
    Instruction,
    PeerCore,
    Send,
    Settle,
)
from stratalog_core.errors import OutcomeUnknown, Overloaded, Unavailable


def _framed(content: bytes) -> bytes:
    return struct.pack(">i", len(content)) + content


def _outcomes(instructions: object) -> dict[int, object]:
    assert isinstance(instructions, list | tuple)
    return {each.ticket: each.outcome for each in instructions if isinstance(each, Settle)}


def test_the_first_request_connects_and_is_written_once_connected() -> None:
    core = PeerCore("broker 2")
    assert core.request(1, b"a", 0.0) == (Connect(),)
    assert core.request(2, b"b", 0.0) == ()
    assert core.connected() == [Send(b"a"), Send(b"b")]
    assert core.request(3, b"c", 0.0) == (Send(b"c"),)


def test_responses_belong_to_requests_in_order_whatever_the_pieces() -> None:
    core = PeerCore("broker 2")
    core.request(1, b"a", 0.0)
    core.connected()
    core.request(2, b"b", 0.0)
    data = _framed(b"first") + _framed(b"second")
    settled = [each for index in range(len(data)) for each in core.received(data[index : index + 1])]
    assert settled == [Settle(1, b"first"), Settle(2, b"second")]
    assert len(core) == 0


def test_a_request_that_was_written_has_an_unknown_outcome_when_the_connection_breaks() -> None:
    core = PeerCore("broker 2")
    core.request(1, b"a", 0.0)
    core.connected()
    (lost,) = _outcomes(core.lost("reset")).values()
    assert isinstance(lost, OutcomeUnknown)
    assert core.request(2, b"b", 0.0) == (Connect(),), "a broken connection does not back off"


def test_a_request_that_was_not_written_certainly_took_no_effect() -> None:
    core = PeerCore("broker 2")
    core.request(1, b"a", 0.0)
    (refused,) = _outcomes(core.connect_failed("refused", 0.0)).values()
    assert isinstance(refused, Unavailable)
    (early,) = _outcomes(core.request(2, b"b", BACKOFF_MIN_S / 2)).values()
    assert isinstance(early, Unavailable)
    assert core.request(3, b"c", BACKOFF_MIN_S) == (Connect(),)


def test_a_deadline_ends_the_connection_and_all_its_requests() -> None:
    core = PeerCore("broker 2")
    core.request(1, b"a", 0.0)
    core.connected()
    core.request(2, b"b", 0.0)
    instructions = core.expired(1)
    assert instructions[0] == Drop()
    assert {ticket: type(outcome) for ticket, outcome in _outcomes(instructions).items()} == {
        1: OutcomeUnknown,
        2: OutcomeUnknown,
    }


def test_a_deadline_before_the_connection_affects_only_its_request() -> None:
    core = PeerCore("broker 2")
    core.request(1, b"a", 0.0)
    core.request(2, b"b", 0.0)
    assert {ticket: type(outcome) for ticket, outcome in _outcomes(core.expired(1)).items()} == {1: Unavailable}
    assert core.connected() == [Send(b"b")]


@pytest.mark.parametrize("frame_bytes", [1, BYTES_MAX])
def test_requests_are_bounded_in_number_and_bytes(frame_bytes: int) -> None:
    core = PeerCore("broker 2")
    accepted = 0
    while not (outcomes := _outcomes(core.request(accepted, bytes(frame_bytes), 0.0))):
        accepted += 1
        core.validate_state()
    (refused,) = outcomes.values()
    assert isinstance(refused, Overloaded)
    assert accepted == (REQUESTS_MAX if frame_bytes == 1 else 1)


@pytest.mark.parametrize("size", [-1, 0, RESPONSE_BYTES_MAX + 1])
def test_a_response_of_an_impossible_size_ends_the_connection(size: int) -> None:
    core = PeerCore("broker 2")
    core.request(1, b"a", 0.0)
    core.connected()
    instructions = core.received(struct.pack(">i", size))
    assert instructions[0] == Drop()
    assert isinstance(_outcomes(instructions)[1], OutcomeUnknown)


class _Shell:
    """Delivers the events that a real shell can deliver: a connection opens only after ``Connect``."""

    def __init__(self) -> None:
        self.core = PeerCore("broker 2")
        self.now_s = 0.0
        self.tickets = 0
        self.is_connecting = False
        self.is_connected = False
        self.outcomes: dict[int, object] = {}
        self.written: list[int] = []

    def request(self) -> None:
        self.now_s += 0.3
        self.tickets += 1
        self._note(self.core.request(self.tickets, b"%d" % self.tickets, self.now_s))

    def connected(self) -> None:
        if self.is_connecting:
            self.is_connecting, self.is_connected = False, True
            self._note(self.core.connected())

    def failed(self) -> None:
        if self.is_connecting:
            self.is_connecting = False
            self._note(self.core.connect_failed("refused", self.now_s))

    def answer(self) -> None:
        unanswered = [ticket for ticket in self.written if ticket not in self.outcomes]
        if self.is_connected and unanswered:
            self._note(self.core.received(_framed(b"%d" % unanswered[0])))
            assert self.outcomes[unanswered[0]] == b"%d" % unanswered[0]

    def lost(self) -> None:
        if self.is_connected:
            self.is_connected = False
            self._note(self.core.lost("reset"))

    def expired(self) -> None:
        self._note(self.core.expired(self.tickets))

    def close(self) -> None:
        self._note(self.core.close("stopping"))

    def _note(self, instructions: Sequence[Instruction]) -> None:
        for each in instructions:
            if isinstance(each, Connect):
                assert (self.is_connecting, self.is_connected) == (False, False)
                self.is_connecting = True
            elif isinstance(each, Send):
                assert self.is_connected
                self.written.append(int(each.frame))
            elif isinstance(each, Drop):
                self.is_connecting = self.is_connected = False
            else:
                self._settled(each)

    def _settled(self, settle: Settle) -> None:
        assert settle.ticket not in self.outcomes
        self.outcomes[settle.ticket] = settle.outcome
        is_certain = isinstance(settle.outcome, Unavailable | Overloaded)
        assert is_certain == (settle.ticket not in self.written)


@given(st.lists(st.sampled_from(["request", "connected", "failed", "answer", "lost", "expired", "close"]), max_size=60))
def test_every_request_gets_exactly_one_outcome(events: list[str]) -> None:
    shell = _Shell()
    for event in [*events, "close"]:
        getattr(shell, event)()
        shell.core.validate_state()
    assert set(shell.outcomes) == set(range(1, shell.tickets + 1))
