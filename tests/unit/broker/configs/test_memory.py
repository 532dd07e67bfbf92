"""Shares of the memory budget, and when free memory is returned."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from stratalog_bookies.client import LedgerClient
from stratalog_broker.configs.memory import FreeMemory, MemoryShares, within_memory
from stratalog_broker.configs.settings import BrokerSettings
from stratalog_broker.partitions.ledger_index import LedgerIndex
from stratalog_broker.partitions.memory import PartitionMemory

MIB = 1024 * 1024


@given(st.integers(MIB, 1 << 40), st.integers(0, 100_000))
def test_shares_add_up_to_the_budget(memory_bytes: int, partitions: int) -> None:
    shares = MemoryShares.of(memory_bytes)
    assert memory_bytes - 64 < sum(dataclasses.astuple(shares)) <= memory_bytes
    assert shares.tail // 8 <= shares.tail_beside(partitions) <= shares.tail


def test_one_request_and_one_response_fit_into_their_shares() -> None:
    settings = within_memory(BrokerSettings(broker_id=1, memory_bytes=64 * MIB))
    assert (settings.frame_bytes_max, settings.response_bytes_max) == (15 * MIB, 8 * MIB)
    settings = BrokerSettings(broker_id=1)
    assert within_memory(settings) == settings, "the defaults fit"


def test_free_memory_is_returned_until_that_has_helped() -> None:
    free = FreeMemory(80, resident=100)
    assert not free.should_return(resident=150, held=50)
    assert not free.should_return(resident=150, held=41)
    assert free.should_return(resident=150, held=40)
    assert not free.should_return(resident=141, held=40), "less than an eighth is free"
    assert free.should_return(resident=150, held=40)


def test_free_memory_is_seen_although_nobody_looked_during_the_peak() -> None:
    free = FreeMemory(80, resident=100)
    assert not free.should_return(resident=110, held=10)
    assert free.should_return(resident=120, held=10)
    assert not free.should_return(resident=109, held=10)
    assert not free.should_return(resident=128, held=20), "what is held is not free"
    assert free.should_return(resident=128, held=10)


def test_free_memory_is_seen_although_the_peak_ended_before_anybody_looked() -> None:
    """The first look set the minimum: what a peak in the first five seconds of a broker left was never returned."""
    assert FreeMemory(80, resident=100).should_return(resident=170, held=0)


def test_a_peak_right_after_a_release_leaves_nothing() -> None:
    """The minimum was measured again after a release: with a peak by then, the memory that the peak left stayed for ever."""
    free = FreeMemory(80, resident=100)
    assert free.should_return(resident=110, held=0)
    assert [free.should_return(resident=170, held=0) for _ in range(2)] == [True, False]
    assert free.should_return(resident=170, held=0)


def test_releases_in_vain_are_rarer_and_rarer_until_the_memory_is_taken_to_be_in_use() -> None:
    free = FreeMemory(80, resident=100)
    asked = [call for call in range(1000) if free.should_return(resident=150, held=0)]
    assert asked[:6] == [0, 1, 3, 7, 15, 27], "twice as long each time, up to twelve calls"
    assert asked[-1] < 200, "memory that stays is not free"
    assert not free.should_return(resident=159, held=0)
    assert free.should_return(resident=160, held=0), "more than that is"


class Partition:
    def __init__(self, batches: int) -> None:
        self.rolled = 0
        index = LedgerIndex(0)
        for number in range(batches):
            index.append(number, number, number + 1, 0, 100)
        self.core = SimpleNamespace(open=SimpleNamespace(index=index))

    def roll(self) -> None:
        self.rolled += 1
        self.core.open = None


def test_the_largest_open_ledgers_are_rolled_when_indexes_fill_half_of_their_share() -> None:
    shares = MemoryShares.of(16 * MIB)
    memory = PartitionMemory(cast(LedgerClient, None), shares)
    small = [Partition(100) for _ in range(10)]
    large = [Partition(shares.indexes // 20 // 5) for _ in range(3)]
    partitions: Any = [*small, *large]
    memory.bound(partitions)
    assert [each.rolled for each in large] == [1, 1, 0] or sum(each.rolled for each in large) == 2
    assert not any(each.rolled for each in small)
    memory.bound(partitions)
    assert sum(each.rolled for each in large) == 2, "what is left may stay open"


def test_partitions_and_open_indexes_are_taken_from_the_caches() -> None:
    shares = MemoryShares.of(16 * MIB)
    memory = PartitionMemory(cast(LedgerClient, None), shares)
    partitions: Any = [Partition(1000) for _ in range(50)]
    memory.bound(partitions)
    assert memory.tails.bytes_max == shares.tail - 50 * 12 * 1024
    assert memory.bytes_held > 50 * 1000 * 20
