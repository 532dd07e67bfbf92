"""A process that gives way does so as a session where that is what counts, and takes nobody else's session with it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_AUTOGROUP = Path("/proc/self/autogroup")
_GIVE_WAY = """
import os
from pathlib import Path
from stratalog.roles.priority import give_way
give_way(7)
group = Path("/proc/self/autogroup")
print(os.getpriority(os.PRIO_PROCESS, 0), *group.read_text().split()[-1:])
"""


def _given_way(*, own_session: bool) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", _GIVE_WAY], check=True, timeout=60, capture_output=True, text=True, start_new_session=own_session
    )
    return done.stdout.split()


@pytest.mark.skipif(not _AUTOGROUP.exists(), reason="this system does not share the CPU among sessions")
def test_a_process_with_a_session_of_its_own_gives_way_as_a_session() -> None:
    assert _given_way(own_session=True) == ["7", "7"]


@pytest.mark.skipif(not _AUTOGROUP.exists(), reason="this system does not share the CPU among sessions")
def test_a_process_in_a_session_of_others_gives_way_alone() -> None:
    ours = _AUTOGROUP.read_text().split()[-1:]  # Nothing where no session was begun since the system was started.
    assert _given_way(own_session=False) == ["7", *ours]


def test_without_niceness_nothing_changes() -> None:
    text = "import os; from stratalog.roles.priority import give_way; was = os.nice(0); give_way(0); assert os.nice(0) == was"
    subprocess.run([sys.executable, "-c", text], check=True, timeout=60)
