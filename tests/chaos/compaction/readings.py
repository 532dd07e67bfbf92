"""Readings of compacted topics: every record that readers got, with its offset, and the offsets that they passed over."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from chaos.compaction.sends import NUMBER, Place

if TYPE_CHECKING:
    from confluent_kafka import Message

_PROBLEMS_MAX: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A record as a reader got it. ``number`` is -1 if it has none."""

    offset: int
    number: int
    key: bytes | None
    value: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """A reader got ``after`` next after ``before``, at ``moment_s``."""

    place: Place
    before: int
    after: int
    moment_s: float


class Readings:
    """The records and gaps of all readers. Threads share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._records: dict[tuple[Place, int], Seen] = {}
        self._gaps: dict[tuple[Place, int, int], Gap] = {}
        self._problems: list[str] = []

    def begin(self) -> Scan:
        """Begin to read from offset 0."""
        return Scan(self)

    def note(self, place: Place, before: int, seen: Seen, moment_s: float) -> None:
        """Take a record that a reader got after offset ``before``, at ``moment_s``."""
        name = f"{place[0]}-{place[1]}"
        with self._lock:
            known = self._records.setdefault((place, seen.offset), seen)
            if known != seen:
                self._add_problem(f"{name}@{seen.offset} was record {known.number} and is record {seen.number}")
            if seen.offset <= before:
                self._add_problem(f"{name}: a reader went back from {before} to {seen.offset}")
        if seen.offset > before + 1:
            self.note_gap(Gap(place=place, before=before, after=seen.offset, moment_s=moment_s))

    def note_gap(self, gap: Gap) -> None:
        with self._lock:
            # The earliest of equal gaps has the strictest check.
            self._gaps.setdefault((gap.place, gap.before, gap.after), gap)

    def _add_problem(self, text: str) -> None:
        if len(self._problems) < _PROBLEMS_MAX:
            self._problems.append(text)

    def records(self) -> Mapping[tuple[Place, int], Seen]:
        with self._lock:
            return dict(self._records)

    def gaps(self) -> Sequence[Gap]:
        with self._lock:
            return list(self._gaps.values())

    def problems(self) -> Sequence[str]:
        with self._lock:
            return list(self._problems)


@dataclass(slots=True)
class Scan:
    """One reader's way through all partitions."""

    _readings: Readings
    _last: dict[Place, int] = field(default_factory=dict)
    records: dict[Place, list[Seen]] = field(default_factory=dict)

    def add(self, message: Message) -> None:
        """Take the next record."""
        place = (message.topic() or "", message.partition() or 0)
        seen = seen_in(message)
        self._readings.note(place, self._last.get(place, -1), seen, time.monotonic())
        self._last[place] = seen.offset
        self.records.setdefault(place, []).append(seen)


def seen_in(message: Message) -> Seen:
    headers = dict(message.headers() or ())
    number = headers.get(NUMBER) or b""
    text = number.decode(errors="replace") if isinstance(number, bytes) else number
    key, value = message.key(), message.value()
    return Seen(
        offset=message.offset() or 0,
        number=int(text) if text.isdecimal() else -1,
        key=key.encode() if isinstance(key, str) else key,
        value=value.encode() if isinstance(value, str) else value,
    )
