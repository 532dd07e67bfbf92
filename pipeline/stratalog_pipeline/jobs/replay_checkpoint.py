"""The checkpoint of a replay: its plan, and the position after each window, as numbered objects of a store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeVar
from uuid import UUID

import msgspec

from stratalog_core.errors import Conflict, Corrupt, Invalid
from stratalog_core.malformed import MALFORMED
from stratalog_pipeline.bucket import Bucket
from stratalog_pipeline.jobs.replay_gaps import Gap
from stratalog_pipeline.options import Subscribed, Wanted
from stratalog_pipeline.planning import OffsetRange
from stratalog_pipeline.stream_plan import Available, Offsets

_DIGITS: Final = 10
_Stored = TypeVar("_Stored")


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The first object of a checkpoint: what is replayed, in windows of how many offsets, by how many tasks.

    ``bounds``: how the range was given. ``first_batch``: the number of the first window's batch to the sink; the batch before
    it was begun when the replay was planned. Checkpoints of earlier releases lack these (None and 0) and ``topic_ids``.
    """

    write_id: str
    start: Offsets
    end: Offsets
    target: str
    window_offsets: int
    tasks: int
    bounds: str | None = None
    topic_ids: dict[str, UUID] = {}
    first_batch: int = 0

    @property
    def ranges(self) -> Available:
        return {
            (topic, number): OffsetRange(first=self.start[topic][number], end=end)
            for topic, numbers in self.end.items()
            for number, end in numbers.items()
        }


class _Position(msgspec.Struct, frozen=True, kw_only=True):
    """The position after a window if there were gaps before it: all of them until then. Without gaps, only the offsets."""

    position: Offsets
    gaps: list[Gap]


class Checkpoint:
    """Numbered objects: the first is the plan, each later one the position after a window. Created only if absent."""

    def __init__(self, opened: Bucket) -> None:
        self._opened = opened
        self._keys = sorted(opened.run(_keys(opened)))
        self.position: Offsets | None = None
        self.gaps: list[Gap] = []
        if len(self._keys) > 1:
            last = self._position(self._keys[-1])
            self.position, self.gaps = last.position, last.gaps

    @property
    def windows(self) -> int:
        """The number of windows that are written."""
        return len(self._keys) - 1

    def begun(self, target: str, wanted: Wanted, bounds: str) -> Plan | None:
        """Return the recorded plan, or None. Raises ``Invalid`` if it is the plan of another replay."""
        if not self._keys:
            return None
        key = self._keys[0]
        begun = self._decoded(key, self._content(key), Plan)
        if begun.target != target:
            raise Invalid(f"the checkpoint belongs to a replay to {begun.target}; use another checkpoint for {target}")
        # A pattern may match other topics now.
        if isinstance(wanted, Subscribed) and set(wanted.topics) != begun.start.keys():
            topics, others = ", ".join(sorted(begun.start)), ", ".join(sorted(wanted.topics))
            raise Invalid(f"the checkpoint belongs to a replay of {topics}; use another checkpoint for {others}")
        if begun.bounds not in (None, bounds):
            raise Invalid(
                f"the checkpoint belongs to a replay of {begun.bounds or 'everything'}; use another checkpoint for "
                f"{bounds or 'everything'}"
            )
        return begun

    def begin(self, plan: Plan) -> Plan:
        self._put(plan)
        return plan

    def record(self, position: Offsets, gaps: Sequence[Gap] = ()) -> None:
        """Record the position after a window, and all gaps before it."""
        self._put(_Position(position=position, gaps=[*gaps]) if gaps else position)

    def _put(self, content: object) -> None:
        key = f"{len(self._keys):0{_DIGITS}}.json"
        try:
            self._opened.run(self._opened.store.put(key, [msgspec.json.encode(content)]))
        except Conflict:
            raise Conflict("another replay with the same checkpoint is running") from None
        self._keys.append(key)

    def _position(self, key: str) -> _Position:
        content = self._content(key)
        try:
            # Unlike the offsets of topics with these names, its gaps are an array.
            return msgspec.json.decode(content, type=_Position)
        except MALFORMED:
            return _Position(position=self._decoded(key, content, dict[str, dict[str, int]]), gaps=[])

    def _content(self, key: str) -> bytes:
        return self._opened.run(self._opened.store.get(key))

    def _decoded(self, key: str, content: bytes, kind: type[_Stored]) -> _Stored:
        try:
            return msgspec.json.decode(content, type=kind)
        except MALFORMED as malformed:
            raise Corrupt(f"{key} is not an object of a replay's checkpoint: {malformed}", key=key) from malformed


async def _keys(opened: Bucket) -> list[str]:
    return [info.key async for info in opened.store.list("")]
