"""Longest time without an acknowledgement, per partition."""

from __future__ import annotations

from stratalog_loadgen.processes.loads import Gap

_Partition = tuple[str, int]


class Gaps:
    """Keeps three numbers per partition, whatever the length of the run."""

    def __init__(self) -> None:
        self._first_ns: dict[_Partition, int] = {}
        self._last_ns: dict[_Partition, int] = {}
        self._longest_ns: dict[_Partition, int] = {}

    def acknowledged(self, topic: str, partition: int, at_ns: int) -> None:
        """Note an acknowledgement. Times of one partition never decrease."""
        place = topic, partition
        self._first_ns.setdefault(place, at_ns)
        gap_ns = at_ns - self._last_ns.get(place, at_ns)
        self._longest_ns[place] = max(self._longest_ns.get(place, 0), gap_ns)
        self._last_ns[place] = at_ns

    def begin_anew(self) -> None:
        """Forget the gaps that have ended. A gap in progress counts in full."""
        self._longest_ns.clear()

    def longest(self) -> list[Gap]:
        """Return the gaps by topic and partition. A partition with a single acknowledgement has a gap of 0."""
        return [
            Gap(topic=place[0], partition=place[1], longest_s=gap_ns / 1e9, first_at=self._first_ns[place] / 1e9)
            for place, gap_ns in sorted(self._longest_ns.items())
        ]
