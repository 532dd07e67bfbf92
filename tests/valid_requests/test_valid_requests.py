"""A broker takes whatever makes sense, serves on, and hands over what it serves."""

from __future__ import annotations

from pathlib import Path

import pytest

from valid_requests.session import CONNECTIONS, REQUESTS, run_seed

BATCHES = 4


@pytest.mark.parametrize("seed", [1, 2, None], ids=["1", "2", "fresh"])
async def test_requests_that_make_sense_break_nothing(tmp_path: Path, seed: int | None, fresh_seed: int) -> None:
    assert await run_seed(tmp_path, fresh_seed if seed is None else seed, BATCHES) == BATCHES * CONNECTIONS * REQUESTS
