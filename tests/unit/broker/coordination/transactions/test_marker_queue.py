"""The markers of decided transactions: each is sent until it is written, to whichever broker owns its partition."""

from __future__ import annotations

from uuid import UUID

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from stratalog_broker.coordination.transactions.core.marker_queue import (
    REQUEST_MARKERS_MAX,
    Decision,
    Marker,
    MarkerQueue,
)
from stratalog_broker.coordination.transactions.core.transaction import MarkedPartition

ANOTHER = UUID(int=1)
NAMES = [MarkedPartition("topic", index) for index in range(4)]


def decision(number: int, coordinator: int = 1) -> Decision:
    return Decision(coordinator, f"copier-{number}", number, 0, True, 5, 0)


def test_markers_of_several_transactions_share_a_request() -> None:
    queue = MarkerQueue(lambda name: name[1] % 2)
    queue.add(decision(1), NAMES)
    queue.add(decision(2), NAMES[:1])
    requests = dict(queue.next_requests())
    assert {broker: len(markers) for broker, markers in requests.items()} == {0: 3, 1: 2}
    assert queue.answered(0, requests[0]) == [decision(2)]
    assert queue.answered(1, requests[1]) == [decision(1)]
    assert (len(queue), queue.decisions) == (0, 0)


def test_a_broker_has_one_request_at_a_time() -> None:
    queue = MarkerQueue(lambda _: 7)
    queue.add(decision(1), NAMES[:1])
    ((_, first),) = queue.next_requests()
    queue.add(decision(2), NAMES[:1])
    assert list(queue.next_requests()) == []
    queue.answered(7, first)
    assert [markers for _, markers in queue.next_requests()] == [[Marker(decision(2), NAMES[0])]]


def test_a_request_is_bounded() -> None:
    queue = MarkerQueue(lambda _: 7)
    queue.add(decision(1), [MarkedPartition("topic", index) for index in range(REQUEST_MARKERS_MAX + 1)])
    ((_, first),) = queue.next_requests()
    assert len(first) == REQUEST_MARKERS_MAX
    assert queue.answered(7, first) == []
    ((_, second),) = queue.next_requests()
    assert queue.answered(7, second) == [decision(1)]


def test_a_failed_marker_goes_to_the_next_owner() -> None:
    owners = {NAMES[0]: 7}
    queue = MarkerQueue(owners.get)
    queue.add(decision(1), NAMES[:1])
    list(queue.next_requests())
    queue.answered(7, ())
    del owners[NAMES[0]]
    queue.retry()
    assert list(queue.next_requests()) == []
    assert queue.has_held
    owners[NAMES[0]] = 8
    queue.retry()
    assert [broker for broker, _ in queue.next_requests()] == [8]


def test_the_markers_of_a_coordinator_that_resigned_are_forgotten() -> None:
    queue = MarkerQueue(lambda _: 7)
    queue.add(decision(1, coordinator=1), NAMES)
    queue.add(decision(1, coordinator=2), NAMES)
    queue.forget(1)
    ((_, markers),) = queue.next_requests()
    assert {marker.decision.coordinator for marker in markers} == {2}


def test_a_deleted_topic_needs_no_marker() -> None:
    queue = MarkerQueue(lambda _: None)
    queue.add(decision(1), NAMES[:2])
    assert queue.drop(Marker(decision(1), NAMES[0])) is None
    assert queue.drop(Marker(decision(1), NAMES[1])) == decision(1)


def test_another_topic_of_the_name_gets_the_marker_of_a_deleted_one() -> None:
    queue = MarkerQueue(lambda partition: 7 if partition.topic_id == ANOTHER else None)
    another = NAMES[0]._replace(topic_id=ANOTHER)
    queue.add(decision(1), NAMES[:1])
    assert queue.drop(Marker(decision(1), NAMES[0]), another) is None
    ((broker, markers),) = queue.next_requests()
    assert markers == [Marker(decision(1), another)]
    assert queue.answered(broker, markers) == [decision(1)]
    assert queue.drop(Marker(decision(1), NAMES[0]), another) is None


class Sending(RuleBasedStateMachine):
    """Owners move, requests fail or succeed in part; at the end every marker of a live coordinator has been written."""

    def __init__(self) -> None:
        super().__init__()
        self.owners: dict[MarkedPartition, int] = {}
        self.queue = MarkerQueue(self.owners.get)
        self.open: dict[Decision, set[MarkedPartition]] = {}
        self.complete: list[Decision] = []
        self.under_way: dict[int, list[Marker]] = {}
        self.number = 0

    @rule(names=st.sets(st.sampled_from(NAMES), min_size=1), coordinator=st.integers(1, 2))
    def decide(self, names: set[MarkedPartition], coordinator: int) -> None:
        self.number += 1
        self.open[decision(self.number, coordinator)] = set(names)
        self.queue.add(decision(self.number, coordinator), names)

    @rule(name=st.sampled_from(NAMES), broker=st.integers(1, 3))
    def move(self, name: MarkedPartition, broker: int) -> None:
        self.owners[name] = broker

    @rule(name=st.sampled_from(NAMES))
    def lose(self, name: MarkedPartition) -> None:
        self.owners.pop(name, None)

    @rule()
    def send(self) -> None:
        for broker, markers in self.queue.next_requests():
            assert broker not in self.under_way
            self.under_way[broker] = markers

    @rule(broker=st.integers(1, 3), share=st.integers(0, 4))
    def answer(self, broker: int, share: int) -> None:
        if broker in self.under_way:
            self._write(broker, self.under_way[broker][:share])

    def _write(self, broker: int, written: list[Marker]) -> None:
        del self.under_way[broker]
        for marker in written:
            self.open.get(marker.decision, set()).discard(marker.partition)
        done = [each for each, rest in self.open.items() if not rest]
        for each in done:
            del self.open[each]
        assert sorted(self.queue.answered(broker, written)) == sorted(done)

    @rule()
    def retry(self) -> None:
        self.queue.retry()

    @rule(coordinator=st.integers(1, 2))
    def resign(self, coordinator: int) -> None:
        self.queue.forget(coordinator)
        self.open = {each: rest for each, rest in self.open.items() if each.coordinator != coordinator}

    @invariant()
    def every_marker_is_somewhere(self) -> None:
        self.queue.validate_state()
        assert len(self.queue) == sum(map(len, self.open.values()))

    def teardown(self) -> None:
        self.owners.update((name, 1) for name in NAMES)
        for _ in range(100):
            self.queue.retry()
            self.send()
            for broker in list(self.under_way):
                self._write(broker, self.under_way[broker])
        assert self.open == {}


TestSending = Sending.TestCase
TestSending.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
