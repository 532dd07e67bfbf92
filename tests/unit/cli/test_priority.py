"""A process that gives way does so as a session where that is what counts; short turns change nothing but turns."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from stratalog.roles.embedded import embedded_overrides
from stratalog.roles.runtime import Configuration
from stratalog_tiering.config import TieringSettings

_AUTOGROUP = Path("/proc/self/autogroup")
_GIVE_WAY = """
import os
from pathlib import Path
from stratalog.roles.priority import give_way
give_way(7)
group = Path("/proc/self/autogroup")
print(os.getpriority(os.PRIO_PROCESS, 0), *group.read_text().split()[-1:])
"""


def _lower_by(steps: int) -> str:
    """The niceness of who gives way so far here, where these tests may give way already."""
    return str(min(os.getpriority(os.PRIO_PROCESS, 0) + steps, 19))


def _given_way(*, own_session: bool) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", _GIVE_WAY], check=True, timeout=60, capture_output=True, text=True, start_new_session=own_session
    )
    return done.stdout.split()


@pytest.mark.skipif(not _AUTOGROUP.exists(), reason="this system does not share the CPU among sessions")
def test_a_process_with_a_session_of_its_own_gives_way_as_a_session() -> None:
    assert _given_way(own_session=True) == [_lower_by(7), "7"]


@pytest.mark.skipif(not _AUTOGROUP.exists(), reason="this system does not share the CPU among sessions")
def test_a_process_in_a_session_of_others_gives_way_alone() -> None:
    ours = _AUTOGROUP.read_text().split()[-1:]  # Nothing where no session was begun since the system was started.
    assert _given_way(own_session=False) == [_lower_by(7), *ours]


def test_without_niceness_nothing_changes() -> None:
    text = "import os; from stratalog.roles.priority import give_way; was = os.nice(0); give_way(0); assert os.nice(0) == was"
    subprocess.run([sys.executable, "-c", text], check=True, timeout=60)


_TAKE_TURNS = """
import os, threading
from pathlib import Path
from stratalog.roles.priority import take_turns
os.nice(3)
def turn(thread="self"):
    lines = Path(f"/proc/{thread}/sched").read_text().splitlines()
    return next((line.split()[-1] for line in lines if line.startswith("se.slice")), "")
before = turn()
take_turns(100)
inherited = []
thread = threading.Thread(target=lambda: inherited.append(turn("thread-self")))
thread.start(); thread.join()
print(before or "-", turn() or "-", inherited[0] or "-", os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0))
"""


def _lets_threads_choose() -> bool:
    """Whether the kernel takes the length of turns from threads, and tells of it."""
    major, minor = (int(part) for part in platform.release().split(".")[:2])
    told = Path("/proc/self/sched")
    return platform.system() == "Linux" and (major, minor) >= (6, 12) and told.exists() and "se.slice" in told.read_text()


@pytest.mark.skipif(platform.system() != "Linux", reason="other systems know no such turns")
def test_short_turns_change_neither_niceness_nor_policy_and_threads_inherit_them() -> None:
    done = subprocess.run([sys.executable, "-c", _TAKE_TURNS], check=True, timeout=60, capture_output=True, text=True)
    before, turn_ns, inherited_ns, niceness, policy = done.stdout.split()
    assert (niceness, policy) == (_lower_by(3), str(os.SCHED_OTHER))
    if _lets_threads_choose():
        assert turn_ns == inherited_ns == "100000" != before


@pytest.mark.skipif(platform.system() != "Linux", reason="other systems know no policies")
def test_a_policy_that_somebody_chose_stays() -> None:
    text = (
        "import os; from stratalog.roles.priority import take_turns;"
        "os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0)); take_turns(100);"
        "assert os.sched_getscheduler(0) == os.SCHED_BATCH"
    )
    subprocess.run([sys.executable, "-c", text], check=True, timeout=60)


def test_the_embedded_node_gives_way_to_nobody(tmp_path: Path) -> None:
    file = tmp_path / "stratalog.toml"
    file.write_text("[tiering]\nniceness = 12\n")
    configuration = Configuration(file=file, overrides=embedded_overrides(tmp_path, kafka="127.0.0.1:0", store=None))
    assert configuration.section(TieringSettings, "tiering").niceness == 0
