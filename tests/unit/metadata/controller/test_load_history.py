"""The load history: the load of partitions, from reports that list only the heaviest."""

from __future__ import annotations

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratalog_metadata.controller.balance import IDLE, WINDOWS, Rates
from stratalog_metadata.controller.load_history import FRESH_S, REPORTS_MAX, WINDOW_S, LoadHistory
from stratalog_metadata.protocol.broker_loads import BrokerLoad, PartitionLoad
from stratalog_metadata.records import Partition

TOPIC = UUID(int=3)
MB = 1_000_000
REPORT_S = 5.0


def partition(index: int, owner: int) -> Partition:
    return Partition(topic_id=TOPIC, index=index, owner=owner)


def load(broker_id: int, partitions: int, named: dict[int, int], others: int = 0) -> BrokerLoad:
    heaviest = [PartitionLoad(TOPIC.bytes, index, rate) for index, rate in named.items()]
    return BrokerLoad(
        broker_id=broker_id, partitions=partitions, heaviest=heaviest,
        bytes_in_per_s=sum(named.values()) + others, bytes_out_per_s=0,
    )  # fmt: skip


def history(*loads: BrokerLoad, seconds: float = WINDOWS * WINDOW_S) -> LoadHistory:
    """The same reports for so long, up to now, which is 0."""
    made = LoadHistory()
    for number in reversed(range(int(seconds / REPORT_S))):
        for each in loads:
            made.reported(each, -number * REPORT_S - 0.1)
    return made


def steady(rate: float) -> Rates:
    return (rate,) * WINDOWS


def close(rates: list[Rates], wanted: list[Rates]) -> bool:
    return all(one == pytest.approx(other) for one, other in zip(rates, wanted, strict=True))


def test_reported_partitions_get_their_rate_and_the_others_share_the_rest() -> None:
    loads = history(load(1, 4, {0: 8 * MB, 1: 2 * MB}, others=3 * MB), load(2, 1, {}))
    rates = loads.rates([*(partition(index, 1) for index in range(4)), partition(4, 2)], 0.0)
    assert close(rates, [steady(8 * MB), steady(2 * MB), steady(1.5 * MB), steady(1.5 * MB), IDLE])


def test_the_lightest_partitions_count_as_idle() -> None:
    loads = history(load(1, 103, {0: 100 * MB, 1: 8 * MB} | dict.fromkeys(range(2, 90), 10_000), others=10_000))
    rates = loads.rates([partition(index, 1) for index in range(103)], 0.0)
    assert close(rates[:2], [steady(100 * MB), steady(8 * MB)])
    assert set(rates[2:]) == {IDLE}
    equal = history(load(1, 100, {}, others=100 * MB)).rates([partition(index, 1) for index in range(100)], 0.0)
    assert close(equal, [steady(1 * MB)] * 100), "equal ones carry something, or none does"


def test_all_are_idle_without_traffic_or_report() -> None:
    assert history(load(1, 1, {0: 1000})).rates([partition(0, 1)], 0.0) == [IDLE]
    busy = history(load(1, 1, {0: 10 * MB}))
    assert close(busy.rates([partition(0, 1)], 0.0), [steady(10 * MB)])
    assert busy.rates([partition(0, 1), partition(1, 2)], 0.0) == [IDLE, IDLE]
    assert busy.rates([partition(0, 1)], FRESH_S) == [IDLE]


def test_a_new_load_is_only_in_the_last_windows() -> None:
    rates = history(load(1, 1, {0: 10 * MB}), seconds=2 * WINDOW_S).rates([partition(0, 1)], 0.0)
    assert close(rates, [(0.0, 10 * MB, 10 * MB)])


def test_a_moved_partition_keeps_its_rate() -> None:
    loads = LoadHistory()
    for number in range(12):
        named = {0: 10 * MB}
        loads.reported(load(1, 9, named if number < 7 else {}, others=MB), number * REPORT_S)
        loads.reported(load(2, 9, {} if number < 7 else named, others=MB), number * REPORT_S)
    (rates,) = loads.rates([partition(0, 2)], 55.0)
    assert rates == pytest.approx(steady(10 * MB), rel=0.02)


@given(
    st.lists(
        st.tuples(st.dictionaries(st.integers(0, 9), st.integers(1, 100 * MB), max_size=10), st.integers(0, 100 * MB)),
        min_size=1, max_size=4,
    )
)  # fmt: skip
def test_the_rates_add_up_to_the_reported_traffic(brokers: list[tuple[dict[int, int], int]]) -> None:
    """The rates of all partitions add up to the reported traffic, except for negligible ones."""
    reports = [
        load(broker_id, 12, {100 * broker_id + index: rate for index, rate in named.items()}, others)
        for broker_id, (named, others) in enumerate(brokers)
    ]
    partitions = [partition(100 * broker_id + index, broker_id) for broker_id in range(len(brokers)) for index in range(12)]
    total = sum(report.bytes_in_per_s for report in reports)
    for window in zip(*history(*reports).rates(partitions, 0.0), strict=True):
        assert sum(window) <= total * (1 + 1e-9)
        assert sum(window) >= total * 0.94 - 1024 * 1024


def test_the_history_stays_small() -> None:
    loads = LoadHistory()
    for number in range(1000):
        loads.reported(load(number % 10, 1, {}), number * 0.01)
    assert sum(len(reports) for reports in loads._reports.values()) == 10 * REPORTS_MAX
    loads.reported(load(77, 1, {}), 1000.0)
    assert loads._reports.keys() == {77}, "who has been silent is forgotten when somebody new reports"
