"""After loading, the first request of a version imports nothing. Loading is a sequence of small calls."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

from stratalog_broker.handlers import HANDLERS
from stratalog_broker.network.message_loading import load_messages
from stratalog_broker.protocol.entities import decode_request, response_factory
from stratalog_broker.protocol.frame import is_flexible
from stratalog_core.errors import Corrupt

Result = TypeVar("Result")


class _CountingBackground:
    """Runs each call at once and counts the calls."""

    def __init__(self) -> None:
        self.calls = 0

    def run(self, call: Callable[[], Result]) -> Awaitable[Result]:
        self.calls += 1
        made: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        made.set_result(call())
        return made

    def close(self) -> None:
        """Nothing to close."""


async def test_each_version_is_loaded_by_its_own_call_and_requests_import_nothing() -> None:
    served = [(info.key, version) for info in HANDLERS.values() for version in range(info.min_version, info.max_version + 1)]
    background = _CountingBackground()
    await load_messages(background, pause_s=0)
    assert background.calls == len(served)
    before = set(sys.modules)
    for api_key, version in served:
        is_flexible(api_key, version)
        with suppress(Corrupt):
            decode_request(api_key, version, memoryview(b""))
        response_factory(api_key, version)
    assert set(sys.modules) == before
