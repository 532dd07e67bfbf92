"""A role may open as many files as the system lets it, and lets in no more clients than there is room for."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from stratalog.roles.open_files import OWN_FILES, connections_within

_RAISED = """
import resource
from stratalog.roles.open_files import raise_open_files
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
assert raise_open_files() >= resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 256 or hard == 256
"""


def test_the_soft_limit_is_raised_to_the_hard_one() -> None:
    subprocess.run([sys.executable, "-c", _RAISED], check=True, timeout=60)


def test_clients_leave_room_for_what_the_broker_itself_opens(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert connections_within(10_000, 20_000) == 10_000
        assert not caplog.records
        assert connections_within(10_000, 4096) == 4096 - OWN_FILES
        assert connections_within(10_000, 256) == 128
    assert ["raise the limit" in record.getMessage() for record in caplog.records] == [True, True]
