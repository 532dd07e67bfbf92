"""The turns of one group, one after the other: the next begins when the records of the last are in the log. Does no I/O.

If a write fails, its outcome may be unknown: the log may still confirm the records, and the answers were never sent. So
nothing is decided before a *barrier* has been written, a record without effect. Once that is in the log, nothing older can get
there any more, and the group is rebuilt from the stored state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kio.schema.errors import ErrorCode

from stratalog_broker.coordination.groups.core.consumer.group import ConsumerGroup
from stratalog_broker.coordination.groups.core.consumer.records import ConsumerKey, ConsumerRecord, encode_key
from stratalog_broker.coordination.groups.core.consumer.requests import HeartbeatAnswer, HeartbeatRequest
from stratalog_broker.coordination.groups.core.consumer.settings import ConsumerLimits
from stratalog_broker.coordination.groups.core.messages import Answer
from stratalog_broker.coordination.replay import CoordinatorRecord
from stratalog_broker.coordination.wake_times import NEVER_MS, Instant

WAITING_PER_MEMBER: Final = 2
WAITING_MIN: Final = 100
RETRY_MS: Final = 1_000
"""After a failed write, the barrier is written with the next heartbeat, or after this time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Instructs the caller to send answers, and to write records (if any) as one batch and report the outcome."""

    answers: Sequence[Answer] = ()
    records: Sequence[CoordinatorRecord] = ()


class GroupTurns:
    """``rebuild`` returns the group from the stored state."""

    def __init__(self, rebuild: Callable[[Instant], ConsumerGroup], limits: ConsumerLimits, now: Instant) -> None:
        self._rebuild = rebuild
        self._limits = limits
        self.group = rebuild(now)
        self._waiting: deque[HeartbeatRequest] = deque()
        self._answers: Sequence[Answer] = ()
        """They are sent when the records that are being written are in the log."""
        self._is_writing = False
        self._is_uncertain = False
        self._retry_at_ms = NEVER_MS

    @property
    def wake_at_ms(self) -> int:
        """When ``tick`` may have something to do."""
        if self._is_writing:
            return NEVER_MS
        return self._retry_at_ms if self._is_uncertain else self.group.wake_at_ms

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being written and no request waits."""
        return not (self._is_writing or self._waiting or self._is_uncertain)

    def add(self, request: HeartbeatRequest, now: Instant) -> Step:
        """Handle a heartbeat, now or in the next turn."""
        waiting_max = max(WAITING_PER_MEMBER * len(self.group.state.members), WAITING_MIN) + self._limits.turn_requests_max
        if len(self._waiting) >= waiting_max:
            return Step(answers=(_refusal(request.ticket, ErrorCode.coordinator_not_available),))
        self._waiting.append(request)
        return self._go_on(now)

    def tick(self, now: Instant) -> Step:
        """Handle deadlines that have passed; call it at ``wake_at_ms`` or at any other time."""
        return self._go_on(now)

    def on_written(self, error: ErrorCode, now: Instant) -> Step:
        """Report the outcome of the records of the last step: ``none`` if they are in the log, else failed or unknown."""
        assert self._is_writing, "an outcome is reported once"
        self._is_writing = False
        answers, self._answers = self._answers, ()
        if error is not ErrorCode.none:
            self._is_uncertain = True
            self._retry_at_ms = now.monotonic_ms + RETRY_MS
            failed = [*(answer.ticket for answer in answers), *(request.ticket for request in self._waiting)]
            self._waiting.clear()
            return Step(answers=[_refusal(ticket, error) for ticket in failed])
        if self._is_uncertain:
            self._is_uncertain = False
            self.group = self._rebuild(now)
        following = self._go_on(now) if self._waiting or self.group.wake_at_ms <= now.monotonic_ms else Step()
        return Step(answers=(*answers, *following.answers), records=following.records)

    def _go_on(self, now: Instant) -> Step:
        if self._is_writing:
            return Step()
        if self._is_uncertain:
            return self._write((), [barrier(self.group.group_id)])
        done = list[Answer]()
        while True:
            turn = self.group.turn(self._next_requests(), now)
            if turn.records:
                return Step(answers=done, records=self._write(turn.answers, turn.records).records)
            done += turn.answers
            if not self._waiting:
                return Step(answers=done)

    def _next_requests(self) -> list[HeartbeatRequest]:
        requests, size_bytes = list[HeartbeatRequest](), 0
        while self._waiting and len(requests) < self._limits.turn_requests_max and size_bytes < self._limits.turn_bytes_max:
            requests.append(self._waiting.popleft())
            size_bytes += requests[-1].subscription_bytes
        return requests

    def _write(self, answers: Sequence[Answer], records: Sequence[CoordinatorRecord]) -> Step:
        self._is_writing = True
        self._answers = answers
        return Step(records=records)


def barrier(group_id: str) -> CoordinatorRecord:
    """Return a record without effect: it deletes the assignment of a member whose id no member can have."""
    return CoordinatorRecord(encode_key(ConsumerKey(ConsumerRecord.CURRENT, group_id, "")), None)


def _refusal(ticket: int, error: ErrorCode) -> Answer:
    return Answer(ticket=ticket, value=HeartbeatAnswer(error=error))
