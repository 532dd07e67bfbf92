"""Puts the statuses of one request together when its entries are decided in parts: on several disks, or one after the other."""

from __future__ import annotations

from collections.abc import Callable

OnStatuses = Callable[[bytearray], None]


class StatusGather:
    """Calls ``done`` with all statuses when every part has come."""

    def __init__(self, statuses: bytearray, parts: int, done: OnStatuses) -> None:
        self._statuses = statuses
        self._missing = parts
        self._done = done

    def part(self, first: int) -> OnStatuses:
        """Receiver of the statuses from position ``first`` on."""

        def receive(statuses: bytearray) -> None:
            self._statuses[first : first + len(statuses)] = statuses
            self._missing -= 1
            if not self._missing:
                self._done(self._statuses)

        return receive
