"""A broker that died is named for a while longer, and never beside one that has its id or its address."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from unit.broker.hand_fed_view import HandFedView

from stratalog_broker.cluster.advertised_brokers import DEAD_ADVERTISED_S, RECENTLY_DEAD_MAX, AdvertisedBrokers
from stratalog_metadata.records import Broker, broker_key


class Cluster:
    """A view and its clock, both moved by hand."""

    def __init__(self) -> None:
        self.now = 0.0
        self.view = HandFedView()
        self.named = AdvertisedBrokers(self.view, self)

    def monotonic(self) -> float:
        return self.now

    def wall_ms(self) -> int:
        return int(self.now * 1000)

    def come(self, broker_id: int, port: int, session_id: int = 1) -> None:
        self.view.put(Broker(broker_id=broker_id, host="h", port=port, session_id=session_id))

    def go(self, broker_id: int) -> None:
        self.view.remove(broker_key(broker_id))

    def names(self) -> list[tuple[int, int]]:
        return [(broker.broker_id, broker.port) for broker in self.named.with_recently_dead(self.named.live())]


def test_a_dead_broker_is_named_for_a_while_and_lives_no_more() -> None:
    cluster = Cluster()
    cluster.come(1, 9001)
    cluster.come(2, 9002)
    cluster.go(1)
    assert cluster.names() == [(1, 9001), (2, 9002)]
    assert [broker.broker_id for broker in cluster.named.live()] == [2]
    cluster.now = DEAD_ADVERTISED_S - 0.001
    assert cluster.names() == [(1, 9001), (2, 9002)]
    cluster.now = DEAD_ADVERTISED_S
    assert cluster.names() == [(2, 9002)]


def test_who_comes_back_elsewhere_is_named_there_alone() -> None:
    cluster = Cluster()
    cluster.come(1, 9001)
    cluster.go(1)
    cluster.come(1, 9009, session_id=2)
    assert cluster.names() == [(1, 9009)]


def test_a_broker_that_sees_no_live_one_names_itself_and_no_other_by_its_id() -> None:
    cluster = Cluster()
    cluster.come(1, 9009)
    cluster.go(1)
    assert [broker.broker_id for broker in cluster.named.live()] == []
    cluster.named.answering(Broker(broker_id=1, host="h", port=9001, session_id=0))
    assert [broker.port for broker in cluster.named.live()] == [9001]
    assert cluster.names() == [(1, 9001)]
    cluster.come(2, 9002)
    assert [broker.broker_id for broker in cluster.named.live()] == [2]


def test_an_address_that_another_broker_has_now_is_named_once() -> None:
    cluster = Cluster()
    cluster.come(1, 9001)
    cluster.go(1)
    cluster.come(7, 9001)
    assert cluster.names() == [(7, 9001)]


def test_brokers_that_come_and_go_without_end_are_bounded() -> None:
    cluster = Cluster()
    for broker_id in range(RECENTLY_DEAD_MAX + 5):
        cluster.come(broker_id, 9000 + broker_id)
        cluster.go(broker_id)
    assert [broker_id for broker_id, _ in cluster.names()] == list(range(5, RECENTLY_DEAD_MAX + 5))


@given(st.lists(st.tuples(st.sampled_from(["come", "go", "wait"]), st.integers(0, 3), st.integers(9000, 9003)), max_size=30))
def test_who_lives_is_named_as_he_lives_and_nobody_and_no_place_twice(steps: Sequence[tuple[str, int, int]]) -> None:
    cluster, live = Cluster(), dict[int, int]()
    for what, broker_id, port in steps:
        if what == "come" and port not in live.values():
            cluster.come(broker_id, port)
            live[broker_id] = port
        elif what == "go" and live.pop(broker_id, None) is not None:
            cluster.go(broker_id)
        elif what == "wait":
            cluster.now += DEAD_ADVERTISED_S / 3
        names = cluster.names()
        assert names == sorted(names)
        assert live.items() <= dict(names).items()
        assert len({port for _, port in names}) == len({broker_id for broker_id, _ in names}) == len(names)
