"""Checks that a broker has one coordinator of a partition at a time: each has resigned when the next one is made.

One that goes on writes from its old state into the log of the next, and nobody who asks the brokers sees that there are two.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from simulation.checkers.audit import Audit
from stratalog_broker.coordination.locator import Coordinators


@contextlib.contextmanager
def one_coordinator_at_a_time(audit: Audit) -> Iterator[None]:
    """Check every coordinator that a broker makes, while the context lasts."""
    inner = Coordinators._make

    def made(self: Coordinators[Any, Any], index: int) -> Any:
        last = self._owned.get(index)
        has_resigned = last is None or last.application is None
        audit.require(has_resigned, f"broker {self._broker_id} has two coordinators of {self.kind.topic}-{index}")
        return inner(self, index)

    setattr(Coordinators, "_make", made)  # noqa: B010 - it is a method to the type checker
    try:
        yield
    finally:
        setattr(Coordinators, "_make", inner)  # noqa: B010
