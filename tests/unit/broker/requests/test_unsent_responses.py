"""Clients that read no responses are closed, slowest first, before they exceed the responses' share of memory."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stratalog_broker.requests.unsent_responses import UnsentResponses


class Client:
    def __init__(self, responses: UnsentResponses) -> None:
        self.responses = responses
        self.unsent_bytes = 0
        self.retained = 0
        self.is_closed = False

    def send(self, size: int) -> None:
        self.unsent_bytes += size
        self.retained += size
        self.responses.hold(self, self.retained)

    def take(self, size: int) -> None:
        self.unsent_bytes = max(self.unsent_bytes - size, 0)

    def all_sent(self) -> None:
        self.retained = 0
        self.responses.release(self)

    def close(self, reason: str) -> None:
        self.is_closed = True


def test_the_client_that_read_nothing_for_longest_is_closed() -> None:
    responses = UnsentResponses(100)
    stuck, slow, taken, newest = (Client(responses) for _ in range(4))
    slow.send(30)
    stuck.send(30)
    taken.send(30)
    slow.take(10)
    taken.take(30)
    newest.send(50)
    assert [stuck.is_closed, slow.is_closed, newest.is_closed] == [True, False, False]
    assert responses.bytes_held == 80
    assert responses.closed == 1


def test_one_client_alone_is_never_closed() -> None:
    responses = UnsentResponses(100)
    client = Client(responses)
    client.send(500)
    assert not client.is_closed
    assert responses.bytes_held == 500


def test_waiting_fetches_stay_within_the_bound() -> None:
    responses = UnsentResponses(100)
    assert responses.may_wait(0)
    assert responses.may_wait(70)
    assert not responses.may_wait(31)
    responses.waited(70)
    assert responses.may_wait(100)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 40), st.booleans()), max_size=60))
def test_the_bound_holds_however_clients_read(steps: list[tuple[int, int, bool]]) -> None:
    responses = UnsentResponses(100)
    clients = [Client(responses) for _ in range(6)]
    for which, size, is_send in steps:
        client = clients[which]
        if client.is_closed:
            continue
        if not is_send:
            client.take(size)
            continue
        if not client.unsent_bytes:
            client.all_sent()
        client.send(size)
        assert responses.bytes_held <= max(100, client.retained)
        assert responses.bytes_held == sum(each.retained for each in clients if not each.is_closed)
