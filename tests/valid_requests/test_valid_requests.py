"""A broker takes whatever makes sense, serves on, and hands over what it serves."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from valid_requests.session import CONNECTIONS, REQUESTS, run_seed

BATCHES = 4
FRESH = secrets.randbits(31)


@pytest.mark.parametrize("seed", [1, 2, FRESH], ids=["1", "2", f"fresh-{FRESH}"])
async def test_requests_that_make_sense_break_nothing(tmp_path: Path, seed: int) -> None:
    assert await run_seed(tmp_path, seed, BATCHES) == BATCHES * CONNECTIONS * REQUESTS
