"""The turns of one group, one after the other: the next begins when the records of the last are in the log. Does no I/O.

If a write fails, its outcome may be unknown: the log may still confirm the records, and the answers were never sent. So
nothing is decided before a *barrier* has been written, a record without effect. Once that is in the log, nothing older can get
there any more, and the group is rebuilt from the stored state.

A turn may end the group, because it goes on in the classic protocol; or what is stored after a barrier is a classic group. Then
there are no more turns, and the requests that wait are handed to the group's new state machine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from kio.schema.errors import ErrorCode

from stratalog_broker.coordination.groups.core.consumer.group import ConsumerGroup, Turn
from stratalog_broker.coordination.groups.core.consumer.group_requests import GroupRequest, refusal
from stratalog_broker.coordination.groups.core.consumer.records import ConsumerKey, ConsumerRecord, encode_key
from stratalog_broker.coordination.groups.core.consumer.requests import HeartbeatRequest
from stratalog_broker.coordination.groups.core.consumer.settings import ConsumerLimits
from stratalog_broker.coordination.groups.core.messages import Answer, JoinAnswer, LeaveRequest
from stratalog_broker.coordination.replay import CoordinatorRecord
from stratalog_broker.coordination.wake_times import NEVER_MS, Instant

WAITING_PER_MEMBER: Final = 2
WAITING_MIN: Final = 100
RETRY_MS: Final = 1_000
"""After a failed write, the barrier is written with the next heartbeat, or after this time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Instructs the caller to send answers, to write records (if any) as one batch and report the outcome, and to handle
    requests again, with the group's new state machine if this one ``has_ended``. ``is_downgrade``: to add the classic group.
    """

    answers: Sequence[Answer] = ()
    records: Sequence[CoordinatorRecord] = ()
    is_downgrade: bool = False
    handed_on: Sequence[GroupRequest] = ()


class GroupTurns:
    """``rebuild`` returns the group from the stored state; None if it has a classic group."""

    def __init__(
        self, group: ConsumerGroup, rebuild: Callable[[Instant], ConsumerGroup | None], limits: ConsumerLimits
    ) -> None:
        self._rebuild = rebuild
        self._limits = limits
        self.group = group
        self.has_ended = False
        self._waiting: deque[GroupRequest] = deque()
        self._turn = Turn()
        """The one whose records are being written: its answers are sent when they are in the log."""
        self._requests: Sequence[GroupRequest] = ()
        """Those of that turn."""
        self._is_writing = False
        self._is_uncertain = False
        self._retry_at_ms = NEVER_MS

    @property
    def wake_at_ms(self) -> int:
        """When ``tick`` may have something to do."""
        if self._is_writing or self.has_ended:
            return NEVER_MS
        return self._retry_at_ms if self._is_uncertain else self.group.wake_at_ms

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being written and no request waits."""
        return not (self._is_writing or self._waiting or self._is_uncertain)

    @property
    def is_unused(self) -> bool:
        """Whether the group has never had a member."""
        return self.is_idle and not self.group.state.epoch

    def classic_heartbeat(self, member_id: str, instance_id: str | None, generation: int, now: Instant) -> ErrorCode:
        """Handle Heartbeat of the classic protocol; not while the state may contradict what is stored."""
        if self._is_uncertain:
            return ErrorCode.coordinator_not_available
        return self.group.classic_heartbeat(member_id, instance_id, generation, now)

    def add(self, request: GroupRequest, now: Instant) -> Step:
        """Handle a request, now or in the next turn."""
        waiting_max = max(WAITING_PER_MEMBER * len(self.group.state.members), WAITING_MIN) + self._limits.turn_requests_max
        if len(self._waiting) >= waiting_max:
            return Step(answers=(refusal(request, ErrorCode.coordinator_not_available),))
        self._waiting.append(request)
        return self._go_on(now)

    def tick(self, now: Instant) -> Step:
        """Handle deadlines that have passed; call it at ``wake_at_ms`` or at any other time."""
        return self._go_on(now)

    def on_written(self, error: ErrorCode, now: Instant) -> Step:
        """Report the outcome of the records of the last step: ``none`` if they are in the log, else failed or unknown."""
        assert self._is_writing, "an outcome is reported once"
        self._is_writing = False
        turn, self._turn = self._turn, Turn()
        requests, self._requests = self._requests, ()
        if error is not ErrorCode.none:
            self._is_uncertain = True
            self._retry_at_ms = now.monotonic_ms + RETRY_MS
            failed = [*requests, *self._waiting]
            self._waiting.clear()
            return Step(answers=[refusal(request, error) for request in failed])
        if self._is_uncertain or turn.is_downgrade:
            self._is_uncertain = False
            rebuilt = self._rebuild(now)
            if rebuilt is None:
                return self._end(turn)
            self.group = rebuilt
        self.group.answered(_staying(turn.answers, requests), now)
        following = self._go_on(now) if self._waiting or self.group.wake_at_ms <= now.monotonic_ms else Step()
        return Step(
            answers=(*turn.answers, *following.answers), records=following.records, is_downgrade=following.is_downgrade,
            handed_on=(*turn.postponed, *following.handed_on),
        )  # fmt: skip

    def _end(self, turn: Turn) -> Step:
        self.has_ended = True
        waiting, self._waiting = self._waiting, deque()
        return Step(answers=turn.answers, handed_on=(*turn.postponed, *waiting))

    def _go_on(self, now: Instant) -> Step:
        if self._is_writing:
            return Step()
        if self._is_uncertain:
            return self._write(Turn(records=[barrier(self.group.group_id)]), ())
        done = list[Answer]()
        while True:
            requests = self._next_requests()
            turn = self.group.turn(requests, now, self._waiting)
            if turn.records:
                self._write(turn, requests)
                return Step(answers=done, records=turn.records, is_downgrade=turn.is_downgrade)
            assert not turn.postponed, "requests are postponed only by what is written"
            done += turn.answers
            if not self._waiting:
                return Step(answers=done)

    def _next_requests(self) -> list[GroupRequest]:
        requests, size_bytes = list[GroupRequest](), 0
        while self._waiting and len(requests) < self._limits.turn_requests_max and size_bytes < self._limits.turn_bytes_max:
            requests.append(self._waiting.popleft())
            size_bytes += requests[-1].subscription_bytes
        return requests

    def _write(self, turn: Turn, requests: Sequence[GroupRequest]) -> Step:
        self._is_writing = True
        self._turn, self._requests = turn, requests
        return Step(records=turn.records)


def _staying(answers: Iterable[Answer], requests: Iterable[GroupRequest]) -> Iterator[str]:
    """Yield the ids of the members whose requests have succeeded and that did not ask to leave."""
    of_members = {each.ticket: each for each in requests if not isinstance(each, LeaveRequest)}
    for answer in answers:
        request = of_members.get(answer.ticket)
        if request is None or answer.value.error is not ErrorCode.none:
            continue
        if isinstance(answer.value, JoinAnswer):
            yield answer.value.member_id
        elif not (isinstance(request, HeartbeatRequest) and request.is_leaving):
            yield request.member_id


def barrier(group_id: str) -> CoordinatorRecord:
    """Return a record without effect: it deletes the assignment of a member whose id no member can have."""
    return CoordinatorRecord(encode_key(ConsumerKey(ConsumerRecord.CURRENT, group_id, "")), None)
