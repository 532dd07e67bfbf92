"""A reader's lease is in force only as long as both clocks say so."""

from __future__ import annotations

from typing import Any

import pytest

from stratalog_core.system import SystemClock
from stratalog_tiering.cold.lease import HeldLease, LeaseExpired

Store = Any  # the FaultyStore of conftest.py, which cannot be imported


class SetClock(SystemClock):
    """Clocks that a test sets."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s, self.wall_s = 0.0, 0.0

    def monotonic(self) -> float:
        return self.now_s

    def wall_ms(self) -> int:
        return int(self.wall_s * 1000)


@pytest.mark.parametrize(
    ("now_s", "wall_s"),
    [
        pytest.param(60.0, 60.0, id="later"),
        pytest.param(1.0, 61.0, id="the machine slept"),
        pytest.param(60.0, -3600.0, id="the wall clock was set back"),
    ],
)
async def test_a_lease_that_was_not_renewed_in_time_has_expired(store: Store, now_s: float, wall_s: float) -> None:
    clock = SetClock()
    lease = HeldLease(store, clock, 1, "reader", (), 60_000)
    await lease.acquire()
    clock.now_s = clock.wall_s = 59.0
    lease.check()
    clock.now_s, clock.wall_s = now_s, wall_s
    with pytest.raises(LeaseExpired):
        lease.check()
    with pytest.raises(LeaseExpired):
        await lease.renew()
