"""Contract suites run on the event loop of brokers, uvloop: their transports differ from those of asyncio's own loop.

Spark's workers use asyncio's own loop: the unit tests of ``pipeline`` cover it, and those of ``tiering/store`` run on both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest

from stratalog_core.event_loop import ServerLoop


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": ServerLoop}
