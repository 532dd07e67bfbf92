"""Long polls of watching clients: parked until a command is applied or their time is over. Bounded in number."""

from __future__ import annotations

import asyncio
from typing import Final

from stratalog_core.errors import Overloaded, StratalogError
from stratalog_core.ports import Request
from stratalog_metadata.node.recent_changes import RecentChanges
from stratalog_metadata.protocol import messages
from stratalog_metadata.protocol.messages import WatchRequest

WATCHERS_MAX: Final = 10_000
WAIT_MS_MAX: Final = 30_000


class Watchers:
    """Equal answers are encoded once."""

    def __init__(self, recent: RecentChanges) -> None:
        self._recent = recent
        self._parked: dict[Request, tuple[int, asyncio.TimerHandle]] = {}
        self._told = recent.index
        self._encoded: tuple[int, int, bytes] = (-1, -1, b"")
        self._loop = asyncio.get_running_loop()

    def __len__(self) -> int:
        return len(self._parked)

    def watch(self, request: Request, wanted: WatchRequest) -> None:
        if wanted.index < self._recent.index:
            request.reply(self._answer(wanted.index))
        elif len(self._parked) >= WATCHERS_MAX:
            request.fail(Overloaded(f"{WATCHERS_MAX} watchers wait on this node, which is the maximum: ask another node"))
        else:
            wait_s = min(max(wanted.wait_ms, 0), WAIT_MS_MAX) / 1000
            timer = self._loop.call_later(wait_s, self._time_out, request)
            self._parked[request] = (wanted.index, timer)

    def tell(self) -> None:
        """Answer the watchers for which something has changed since the last call."""
        if self._told == self._recent.index:
            return
        self._told = self._recent.index
        for request, (index, timer) in list(self._parked.items()):
            if index < self._recent.index:
                del self._parked[request]
                timer.cancel()
                request.reply(self._answer(index))

    def close(self, reason: StratalogError) -> None:
        for request, (_, timer) in self._parked.items():
            timer.cancel()
            request.fail(reason)
        self._parked.clear()

    def _time_out(self, request: Request) -> None:
        index, _ = self._parked.pop(request)
        request.reply(self._answer(index))

    def _answer(self, index: int) -> bytes:
        if self._encoded[:2] != (index, self._recent.index):
            answer = self._recent.since(index)
            if index >= self._recent.index:
                answer = messages.WatchAnswerParts(index=index)
            self._encoded = (index, self._recent.index, messages.encode(answer))
        return self._encoded[2]
