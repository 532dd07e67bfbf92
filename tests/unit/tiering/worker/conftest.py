"""The second copy of a worker's bucket, in a directory."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from stratalog_core.system import SystemClock, ThreadBackground
from stratalog_tiering.store import ObjectStore, open_store


@pytest.fixture
def second_directory(tmp_path: Path) -> Path:
    return tmp_path / "second"


@pytest.fixture
def second(second_directory: Path, background: ThreadBackground) -> ObjectStore:
    return open_store(str(second_directory), background=background, clock=SystemClock(), random=random.Random(4))
