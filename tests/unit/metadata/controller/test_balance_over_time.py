"""Balance over time: brokers report at different times, loads start and end, and hardly anything moves."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from unit.metadata.controller.test_controller import TOPIC
from unit.metadata.controller.test_handovers import Balanced

from stratalog_metadata.controller.handovers import BalanceRules
from stratalog_metadata.protocol.broker_loads import HEAVIEST_MAX, BrokerLoad, PartitionLoad

MB = 1_000_000
STEP_S = 0.5
REPORT_STEPS = 10
PHASES = st.lists(st.integers(0, REPORT_STEPS - 1), min_size=2, max_size=2)


class Trafficked(Balanced):
    """Brokers 1 and 2 from the beginning on, with even shares. ``phases``: when they report, in steps."""

    def __init__(self, partitions: int, phases: list[int], interval_s: float = 10.0) -> None:
        super().__init__(BalanceRules(interval_s=interval_s))
        self.handed = 0
        self.steps = 0
        self.phases: dict[int, int] = {}
        self.carried: dict[int, Counter[int]] = {}
        for broker_id, phase in enumerate(phases, start=1):
            self.join(broker_id, phase)
        self.partitions(partitions)

    def join(self, broker_id: int, phase: int) -> None:
        self.broker(broker_id)
        self.phases[broker_id] = phase
        self.carried[broker_id] = Counter()

    def of(self, broker_id: int) -> list[int]:
        return [partition.index for partition in self.owned if partition.owner == broker_id]

    def run(self, seconds: float, rates: dict[int, int]) -> int:
        """``rates``: bytes per second by partition; the others are idle. Says how many were handed over."""
        before = self.handed
        for _ in range(round(seconds / STEP_S)):
            self.steps += 1
            counts, owners = self.counts, {partition.index: partition.owner for partition in self.owned}
            for index, rate in rates.items():
                self.carried[owners[index]][index] += round(rate * STEP_S)
            for broker_id, phase in self.phases.items():
                if self.steps % REPORT_STEPS == phase:
                    self._report(broker_id, counts[broker_id])
            self.pass_time_for_all(STEP_S)
            self.handed += self.obey() if self.ordered else 0
        return self.handed - before

    def _report(self, broker_id: int, partitions: int) -> None:
        period_s = REPORT_STEPS * STEP_S
        carried, self.carried[broker_id] = self.carried[broker_id], Counter()
        load = BrokerLoad(
            broker_id=broker_id, partitions=partitions, bytes_in_per_s=round(carried.total() / period_s), bytes_out_per_s=0,
            heaviest=[PartitionLoad(TOPIC.bytes, index, round(taken / period_s))
                      for index, taken in carried.most_common(HEAVIEST_MAX)],
        )  # fmt: skip
        self.controller.loads.reported(load, self.now)


def test_a_hot_partition_that_starts_or_stops_moves_nothing() -> None:
    quorum = Trafficked(376, [0, 3])
    assert quorum.run(30, {}) == 0
    assert quorum.run(120, {quorum.of(1)[0]: 100 * MB}) == 0
    assert quorum.run(120, {}) == 0
    assert quorum.counts == {1: 188, 2: 188}


@settings(max_examples=25)
@given(PHASES, st.integers(0, 40), st.sampled_from([1.0, 10.0]))
def test_an_even_load_moves_nothing_whenever_brokers_report(phases: list[int], before: int, interval_s: float) -> None:
    quorum = Trafficked(8, phases, interval_s)
    quorum.run(20 + before * STEP_S, {})
    rates = dict.fromkeys(range(8), 20 * MB)
    assert quorum.run(80, rates) == 0
    assert quorum.run(40, {}) == 0


@settings(max_examples=25)
@given(PHASES, st.integers(0, 40), st.integers(1, 30), st.integers(1, 4), st.sampled_from([1.0, 10.0]))
def test_a_short_load_moves_nothing_however_uneven_it_is(
    phases: list[int], before: int, steps: int, busy: int, interval_s: float
) -> None:
    """Loads last up to fifteen seconds."""
    quorum = Trafficked(8, phases, interval_s)
    quorum.run(20 + before * STEP_S, {})
    rates = dict.fromkeys(quorum.of(1)[:busy], 20 * MB)
    assert quorum.run(steps * STEP_S, rates) == 0
    assert quorum.run(80, {}) == 0


def test_an_uneven_load_that_lasts_is_levelled_once() -> None:
    quorum = Trafficked(20, [0, 7])
    first, second, *_ = quorum.of(1)
    rates = {first: 50 * MB, second: 50 * MB}
    assert quorum.run(30, rates) == 0
    assert quorum.run(60, rates) == 1, "as long as it lasts nothing else is worth while"
    assert {first, second} & set(quorum.of(2))
    assert quorum.run(200, rates) == 0
    assert quorum.run(200, {}) == 0, "and nothing moves back"


def test_a_broker_that_joins_under_load_gets_its_share() -> None:
    quorum = Trafficked(30, [0, 7])
    rates = dict.fromkeys(range(30), 2 * MB)
    quorum.run(70, rates)
    quorum.join(3, 4)
    assert 8 <= quorum.run(120, rates) <= 10, "no partition moves twice"
    assert 8 <= quorum.counts[3] <= 10
    assert quorum.run(200, rates) == 0
