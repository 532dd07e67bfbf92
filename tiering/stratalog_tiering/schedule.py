"""When which piece of work is due, by name. Pure: time is passed in, changes of metadata are handed in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


class Schedule:
    """Names with the monotonic time at which they are due; a name that is at work keeps what became due meanwhile."""

    def __init__(self) -> None:
        self._due: dict[str, float] = {}
        self._at_work: set[str] = set()

    @property
    def at_work_count(self) -> int:
        return len(self._at_work)

    def set_due(self, name: str, at: float) -> None:
        """Due at ``at``, or earlier if it was."""
        self._due[name] = min(at, self._due.get(name, at))

    def set_all_due(self, names: Iterable[str], at: float) -> None:
        for name in names:
            self.set_due(name, at)

    def take_due(self, now: float, at_once_max: int) -> Iterator[str]:
        """Names to begin with now, the longest due first; each is at work until :meth:`ended`."""
        due = sorted((at, name) for name, at in self._due.items() if at <= now and name not in self._at_work)
        for _, name in due[: max(0, at_once_max - len(self._at_work))]:
            del self._due[name]
            self._at_work.add(name)
            yield name

    def ended(self, name: str, again_at: float | None) -> None:
        """The work is done for now; None: it becomes due by a change only."""
        self._at_work.discard(name)
        if again_at is not None:
            self.set_due(name, again_at)

    def next_at(self) -> float | None:
        """When something that is not at work is due next."""
        return min((at for name, at in self._due.items() if name not in self._at_work), default=None)
