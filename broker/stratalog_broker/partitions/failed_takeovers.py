"""Takeovers that failed: when each partition is tried again, and which of the failures are logged.

The pause doubles with each failure of an epoch. While the object store is away, thousands of partitions without ledgers may
fail, and their takeovers run on the event loop that has to renew the broker's session. A new record of the partition ends the
pause, and a new epoch begins with the shortest one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from stratalog_broker.partitions.takeover import failure_text, identity_of
from stratalog_core.errors import Fenced, StratalogError
from stratalog_core.ports import Clock
from stratalog_metadata.records import Partition, Topic, TopicPartition

_log = logging.getLogger(__name__)
RETRY_S: Final = 0.2
RETRY_MAX_S: Final = 5.0
UNEXPECTED_RETRY_S: Final = 5.0
REMIND_S: Final = 300.0
"""A partition's failures of one kind are logged that often."""


@dataclass(slots=True)
class _Failures:
    """Those of one partition in one epoch. ``paused``: its record during a pause."""

    leader_epoch: int
    count: int = 0
    kind: type[Exception] | None = None
    logged_s: float = 0.0
    paused: Partition | None = None
    timer: asyncio.TimerHandle | None = None

    def end_pause(self) -> None:
        self.paused = None
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class FailedTakeovers:
    """Calls ``again`` with the identity of a partition whose pause is over."""

    def __init__(self, clock: Clock, again: Callable[[TopicPartition], None]) -> None:
        self._clock = clock
        self._again = again
        self._failures: dict[TopicPartition, _Failures] = {}

    def is_paused(self, partition: Partition) -> bool:
        """Whether the takeover of this very record has failed and its pause is not over."""
        failures = self._failures.get(identity_of(partition))
        return failures is not None and failures.paused is partition

    def failed(self, partition: Partition, failure: Exception, topic: Topic | None) -> None:
        """Log the failure, if it is news, and begin a pause."""
        identity, defect = identity_of(partition), not isinstance(failure, StratalogError)
        failures = self._failures.get(identity)
        if failures is None or failures.leader_epoch != partition.leader_epoch:
            self.forget(identity)
            failures = self._failures[identity] = _Failures(partition.leader_epoch)
        failures.end_pause()
        failures.count += 1
        self._report(failures, partition, failure, topic, defect=defect)
        pause_s = UNEXPECTED_RETRY_S if defect else min(RETRY_S * 2.0 ** min(failures.count - 1, 10), RETRY_MAX_S)
        failures.paused = partition
        failures.timer = asyncio.get_running_loop().call_later(pause_s, self._pause_ended, identity)

    def _report(
        self, failures: _Failures, partition: Partition, failure: Exception, topic: Topic | None, *, defect: bool
    ) -> None:
        now_s = self._clock.monotonic()
        is_news = failures.kind is not type(failure) or failures.logged_s + REMIND_S <= now_s
        level = logging.ERROR if defect else logging.DEBUG if isinstance(failure, Fenced) or not is_news else logging.WARNING
        if is_news:
            failures.kind, failures.logged_s = type(failure), now_s
        _log.log(
            level, "taking over %s at epoch %d, attempt %d: %s",
            identity_of(partition), partition.leader_epoch, failures.count, failure_text(failure, topic), exc_info=defect,
        )  # fmt: skip

    def _pause_ended(self, identity: TopicPartition) -> None:
        self._failures[identity].end_pause()
        self._again(identity)

    def forget(self, identity: TopicPartition) -> None:
        """Forget the partition's failures: it was taken over, or is not wanted any more."""
        failures = self._failures.pop(identity, None)
        if failures is not None:
            failures.end_pause()

    def forget_all(self) -> None:
        """Forget all failures: this broker has no session."""
        for identity in list(self._failures):
            self.forget(identity)
