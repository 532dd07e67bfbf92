"""A process's response by path, and how rarely it computes one."""

from __future__ import annotations

import asyncio

import pytest

from stratalog_core.errors import Unavailable
from stratalog_core.http.endpoints import FRESH_S, Endpoints
from stratalog_core.metrics.registry import Registry


class _Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def wall_ms(self) -> int:
        return int(self.now * 1000)


class _Role:
    """Counts how often it is asked whether it serves."""

    def __init__(self) -> None:
        self.asked = 0
        self.failure: Exception | None = None

    async def ready(self, timeout_s: float) -> str:
        self.asked += 1
        await asyncio.sleep(0)
        if self.failure is not None:
            raise self.failure
        return "role 1 serves"


@pytest.mark.parametrize(
    ("failure", "status", "text"),
    [
        (None, 200, b"role 1 serves\n"),
        (Unavailable("no session"), 503, b"no session\n"),
        (ConnectionRefusedError("refused"), 503, b"refused\n"),
        (TimeoutError(), 503, b"no answer within 3.0 s\n"),
    ],
)
async def test_readiness_is_what_the_role_says(failure: Exception | None, status: int, text: bytes) -> None:
    role = _Role()
    role.failure = failure
    answer = await Endpoints(Registry(), role.ready, _Clock()).answer("/readyz")
    assert (answer.status, answer.body) == (status, text)


async def test_many_at_once_and_soon_after_are_one_question() -> None:
    role, clock = _Role(), _Clock()
    endpoints = Endpoints(Registry(), role.ready, clock)
    answers = await asyncio.gather(*(endpoints.answer("/readyz") for _ in range(100)))
    answers.append(await endpoints.answer("/readyz"))
    assert {answer.status for answer in answers} == {200}
    assert role.asked == 1
    clock.now += FRESH_S
    await endpoints.answer("/readyz")
    assert role.asked == 2


async def test_metrics_are_rendered_once_a_second() -> None:
    clock = _Clock()
    endpoints = Endpoints(Registry(), _Role().ready, clock)
    texts = [(await endpoints.answer("/metrics")).body for _ in range(5)]
    clock.now += FRESH_S
    texts.append((await endpoints.answer("/metrics")).body)
    scrapes = [line for text in texts for line in text.splitlines() if line.startswith(b"stratalog_metrics_scrapes_total")]
    assert scrapes == [b"stratalog_metrics_scrapes_total 1.0"] * 5 + [b"stratalog_metrics_scrapes_total 2.0"]


async def test_it_lives_whatever_the_role_says() -> None:
    role = _Role()
    role.failure = Unavailable("starting")
    endpoints = Endpoints(Registry(), role.ready, _Clock())
    assert (await endpoints.answer("/healthz")).status == 200
    assert (await endpoints.answer("/")).status == 404
    assert role.asked == 0
