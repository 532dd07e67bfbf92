"""Silent producers are forgotten in time, active ones and those with an open transaction are not."""

from __future__ import annotations

import pytest
from unit.broker.partitions.test_core import Ledgers, core
from unit.broker.transactional import transactional

from stratalog_broker.partitions.producer_expiry import PERIOD_MS_MAX, ProducerExpiry
from stratalog_core.batches.batch import read_header
from stratalog_core.batches.records import Record, build_batch


@pytest.mark.parametrize("expiration_ms", [1000, PERIOD_MS_MAX, 3 * PERIOD_MS_MAX + 1])
def test_a_silent_producer_is_forgotten_after_its_time_and_before_another_period(expiration_ms: int) -> None:
    partition = core()
    ledgers = Ledgers(partition)
    plain = build_batch(
        [Record(offset=0, timestamp_ms=0, key=None, value=b"")], producer_id=1, producer_epoch=0, base_sequence=0
    )
    ledgers.append_batch(memoryview(plain), read_header(plain))
    begun = transactional(2, 0, b"")
    ledgers.append_batch(memoryview(begun), read_header(begun))
    ledgers.finish_opening()
    ledgers.confirm(2)
    expiry, forgotten_at_ms = ProducerExpiry(expiration_ms), 0
    step_ms = max(1, min(expiration_ms, PERIOD_MS_MAX) // 10)
    for now_ms in range(0, 3 * expiration_ms + 3 * PERIOD_MS_MAX, step_ms):
        expiry.run([partition], now_ms)
        if partition.producers.epoch_of(1) < 0 and not forgotten_at_ms:
            forgotten_at_ms = now_ms
    assert expiration_ms <= forgotten_at_ms <= expiration_ms + 2 * min(expiration_ms, PERIOD_MS_MAX) + step_ms
    assert partition.producers.epoch_of(2) == 0


def test_a_producer_that_sends_is_kept() -> None:
    partition = core()
    ledgers = Ledgers(partition)
    expiry = ProducerExpiry(1000)
    for second in range(10):
        ledgers.append(1, 10)
        expiry.run([partition], second * 1000)
    assert partition.producers.epoch_of(1) == 0


def test_a_guard_goes_if_its_producer_does_not_ask_again() -> None:
    partition = core()
    transactions, expiry = partition.appended_transactions, ProducerExpiry(1000)
    silent, active = (read_header(transactional(producer_id, 0, b"")) for producer_id in (1, 2))
    guards = [transactions.guard(each) for each in (silent, active)]
    for second in range(4):
        expiry.run([partition], second * 1000)
        transactions.guard(active)
    assert not transactions.is_standing(1, guards[0])
    assert transactions.is_standing(2, guards[1])
