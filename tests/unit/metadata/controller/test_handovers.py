"""The controller's handover orders: which brokers get them, how many at once, and when an order is withdrawn."""

from __future__ import annotations

from collections import Counter

import msgspec
from unit.metadata.controller.test_controller import TOPIC, Quorum

from stratalog_metadata.controller.controller import Controller
from stratalog_metadata.controller.handovers import AT_ONCE_MAX, OVERDUE_S, BalanceRules
from stratalog_metadata.protocol.broker_loads import BrokerLoad, PartitionLoad
from stratalog_metadata.records import (
    NO_OWNER,
    Broker,
    DrainedBroker,
    DynamicConfig,
    Partition,
    Topic,
    broker_key,
    drained_broker_key,
)
from stratalog_metadata.state.commands import Delete, Put

RULES = BalanceRules(interval_s=5.0, moves_max=4)


class Balanced(Quorum):
    """Owners that hand over what they are asked to, when ``obey`` is called."""

    def __init__(self, rules: BalanceRules = RULES) -> None:
        super().__init__()
        self.controller = Controller(self.records, self.now, rules)

    @property
    def ordered(self) -> list[Partition]:
        return [partition for partition in self.owned if partition.next_owner != NO_OWNER]

    def session_of(self, broker_id: int) -> int:
        stored = self.records.get(broker_key(broker_id))
        assert stored is not None
        assert isinstance(stored.record, Broker)
        return stored.record.session_id

    def obey(self) -> int:
        """Carry out all orders and return their number."""
        handed = [
            msgspec.structs.replace(
                order, owner=order.next_owner, owner_session=self.session_of(order.next_owner),
                leader_epoch=order.leader_epoch + 1, next_owner=NO_OWNER,
            )
            for order in self.ordered
        ]  # fmt: skip
        self.propose(*(Put(record=partition) for partition in handed))
        return len(handed)

    def pass_time_for_all(self, seconds: float) -> None:
        sessions = [self.session_of(stored.record.broker_id) for stored in self.records.of_kind("broker")
                    if isinstance(stored.record, Broker)]  # fmt: skip
        self.pass_time(seconds, *sessions)


def test_a_drained_broker_hands_over_everything_and_gets_nothing() -> None:
    quorum = Balanced()
    quorum.broker(1)
    quorum.broker(2)
    quorum.partitions(10)
    quorum.propose(Put(record=DrainedBroker(broker_id=1)))
    assert {(order.owner, order.next_owner) for order in quorum.ordered} == {(1, 2)}
    assert quorum.counts == {1: 5, 2: 5}, "an owner that lives is asked, nothing is taken from it"
    assert quorum.obey() == 5
    quorum.propose(Put(record=Partition(topic_id=TOPIC, index=10)))
    assert quorum.counts == {2: 11}
    quorum.propose(Delete(key=drained_broker_key(1)))
    for _ in range(10):
        quorum.pass_time_for_all(6.0)
        assert quorum.obey() <= RULES.moves_max
    assert quorum.counts == {1: 5, 2: 6}, "afterwards it gets its share again"


def test_many_orders_are_given_a_few_at_a_time() -> None:
    quorum = Balanced()
    quorum.broker(1)
    quorum.partitions(3 * AT_ONCE_MAX)
    quorum.broker(2)
    quorum.propose(Put(record=DrainedBroker(broker_id=1)))
    given = []
    while quorum.ordered:
        given.append(len(quorum.ordered))
        assert given[-1] <= AT_ONCE_MAX
        quorum.obey()
    assert quorum.counts == {2: 3 * AT_ONCE_MAX}


def test_a_stopping_broker_hands_over_its_partitions() -> None:
    quorum = Balanced()
    session_id = quorum.broker(1)
    quorum.broker(2)
    quorum.partitions(4)
    quorum.propose(Put(record=Broker(broker_id=1, host="h", port=1, session_id=session_id, stopping=True)))
    assert quorum.obey() == 2
    assert quorum.counts == {2: 4}


def test_partitions_stay_if_all_brokers_are_leaving() -> None:
    quorum = Balanced()
    quorum.broker(1)
    quorum.propose(Put(record=DrainedBroker(broker_id=1)))
    quorum.partitions(3)
    assert quorum.counts == {1: 3}
    assert not quorum.ordered


def test_an_order_to_a_dead_target_is_replaced() -> None:
    quorum = Balanced()
    staying, _, third = quorum.broker(1), quorum.broker(2), quorum.broker(3)
    quorum.partitions(3)
    quorum.propose(Put(record=DrainedBroker(broker_id=1)))
    (order,) = quorum.ordered
    gone = order.next_owner
    keep = [staying, third if gone == 2 else quorum.session_of(2)]
    quorum.pass_time(4.0, *keep)
    assert quorum.records.get(broker_key(gone)) is None
    assert {order.next_owner for order in quorum.ordered} == {5 - gone}


def test_an_owner_that_ignores_an_order_is_asked_again() -> None:
    quorum = Balanced()
    quorum.broker(1)
    quorum.broker(2)
    quorum.partitions(2)
    quorum.propose(Put(record=DrainedBroker(broker_id=1)))
    commands = len(quorum.commands)
    quorum.pass_time_for_all(OVERDUE_S + 1)
    assert quorum.counts == {1: 1, 2: 1}
    assert len(quorum.commands) == commands + 2, "withdrawn once, ordered once"
    assert len(quorum.ordered) == 1


def test_the_death_of_the_owner_removes_its_orders() -> None:
    quorum = Balanced()
    quorum.broker(1)
    living = quorum.broker(2)
    quorum.partitions(2)
    quorum.propose(Put(record=DrainedBroker(broker_id=1)))
    quorum.pass_time(4.0, living)
    assert quorum.counts == {2: 2}
    assert not quorum.ordered


def test_a_joining_broker_gets_its_share_in_small_rounds() -> None:
    quorum = Balanced()
    quorum.broker(1)
    quorum.partitions(20)
    quorum.broker(2)
    quorum.pass_time_for_all(4.5)
    assert not quorum.ordered, "not at once: it may be one of many"
    rounds = []
    for _ in range(20):
        quorum.pass_time_for_all(1.0)
        rounds.append(quorum.obey())
    assert 9 <= quorum.counts[2] <= 10
    assert max(rounds) <= RULES.moves_max
    assert sum(rounds) == quorum.counts[2], "no partition moves twice"


def test_without_an_interval_nothing_is_balanced() -> None:
    quorum = Balanced(BalanceRules(interval_s=0))
    quorum.broker(1)
    quorum.partitions(6)
    quorum.broker(2)
    quorum.pass_time_for_all(60)
    assert quorum.counts == {1: 6}


def test_topics_are_led_from_their_preferred_rack() -> None:
    quorum = Balanced()
    for broker_id, rack in ((1, "west"), (2, "east"), (3, "east")):
        session_id = quorum.broker(broker_id)
        quorum.propose(Put(record=Broker(broker_id=broker_id, host="h", port=1, session_id=session_id, rack=rack)))
    configs = {"preferred.leader.rack": "east"}
    quorum.propose(
        Put(record=Topic(name="t", topic_id=TOPIC, partition_count=6, replication_factor=1, configs=configs)),
        *(Put(record=Partition(topic_id=TOPIC, index=index)) for index in range(6)),
    )
    assert quorum.counts == {2: 3, 3: 3}
    quorum.propose(Put(record=Topic(name="t", topic_id=TOPIC, partition_count=6, replication_factor=1,
                                    configs={"preferred.leader.rack": "west"})))  # fmt: skip
    for _ in range(4):
        quorum.pass_time_for_all(6.0)
        quorum.obey()
    assert quorum.counts == {1: 6}


def test_the_preferred_rack_may_be_a_cluster_default() -> None:
    quorum = Balanced()
    for broker_id, rack in ((1, "west"), (2, "east")):
        session_id = quorum.broker(broker_id)
        quorum.propose(Put(record=Broker(broker_id=broker_id, host="h", port=1, session_id=session_id, rack=rack)))
    quorum.propose(Put(record=DynamicConfig(resource="", configs={"preferred.leader.rack": "east"})))
    quorum.propose(
        Put(record=Topic(name="t", topic_id=TOPIC, partition_count=4, replication_factor=1)),
        *(Put(record=Partition(topic_id=TOPIC, index=index)) for index in range(4)),
    )
    assert quorum.counts == {2: 4}
    quorum.propose(Put(record=DynamicConfig(resource="", configs={"preferred.leader.rack": "west"})))
    for _ in range(4):
        quorum.pass_time_for_all(6.0)
        quorum.obey()
    assert quorum.counts == {1: 4}


def test_balance_uses_the_reported_load() -> None:
    """Three busy partitions on one broker and three idle ones on the other: equal counts, unequal load."""
    quorum = Balanced()
    quorum.broker(1)
    quorum.broker(2)
    quorum.partitions(6)
    busy = [partition for partition in quorum.owned if partition.owner == 1]

    def report() -> None:
        now = {(one.index, one.owner) for one in quorum.owned}
        for broker_id in (1, 2):
            heavy = [PartitionLoad(TOPIC.bytes, one.index, 10_000_000) for one in busy if (one.index, broker_id) in now]
            load = BrokerLoad(broker_id=broker_id, partitions=3, bytes_in_per_s=10_000_000 * len(heavy), bytes_out_per_s=0,
                              heaviest=heavy)  # fmt: skip
            quorum.controller.loads.reported(load, quorum.now)

    for _ in range(12):
        report()
        quorum.pass_time_for_all(6.0)
        quorum.obey()
    owners = Counter(partition.owner for partition in quorum.owned if partition.index in {one.index for one in busy})
    assert sorted(owners.values()) == [1, 2]
    epochs = sum(partition.leader_epoch for partition in quorum.owned)
    assert epochs - 6 <= 2, "one or two moves are enough"
