"""Applies the faults of a step and repairs them."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from chaos.cluster import ChaosCluster
from chaos.faulty_files import clear_fault, set_fault
from chaos.history import NEMESIS, Recorder
from chaos.jumping_clock import set_clock
from chaos.schedule import RESTART_AFTER, Fault
from stratalog.exit_codes import ExitCode

_READY_S: Final = 30.0
_UNDO_S: Final = 180.0
_RETRY_S: Final = 0.5
_ROT_KEPT: Final = 2
"""A bookie's newest log files, which do not rot: a bookie rightly refuses to start on a damaged tail."""

Act = Callable[[Fault], None]


class Nemesis:
    """Acts on one cluster, from the thread that started it; records its actions in the history.

    ``problem`` is called if an operator's command could not be undone, or a process ignored SIGTERM.
    """

    def __init__(self, cluster: ChaosCluster, recorder: Recorder, problem: Callable[[str], None], seed: int) -> None:
        self._cluster = cluster
        self._recorder = recorder
        self._problem = problem
        self._random = random.Random(seed)
        self._begin: dict[str, Act] = {
            "link": lambda fault: cluster.proxy.set_mode(fault.mode, fault.links),
            "disk": lambda fault: self._each(fault, lambda name: set_fault(cluster.control(name), fault.disk)),
            "kill": lambda fault: self._each(fault, cluster.kill),
            "stop": lambda fault: self._each(fault, self._stop),
            "pause": lambda fault: self._each(fault, cluster.pause),
            "clock": lambda fault: self._each(fault, lambda name: set_clock(cluster.clock_control(name), fault.offset_ms)),
            "roll": lambda fault: self._each(fault, self._restart),
            "rot": lambda fault: self._each(fault, self._rot),
            "drain": lambda fault: self._each(fault, lambda name: self._try("broker", "drain", _number(name), "--no-wait")),
            "decommission": lambda fault: self._each(fault, lambda name: self._try("bookie", "decommission", name)),
            "replace": lambda fault: self._each(
                fault, lambda name: self._try("metadata", "remove", _number(name), "--timeout", "20", "--yes")
            ),
        }
        self._end: dict[str, Act] = {
            "link": lambda fault: cluster.proxy.set_mode("pass", fault.links),
            "disk": self._repair_disks,
            "pause": lambda fault: self._each(fault, cluster.resume),
            "clock": lambda fault: self._each(fault, lambda name: set_clock(cluster.clock_control(name), 0)),
            "drain": lambda fault: self._each(fault, lambda name: self._undo("broker", "undrain", _number(name))),
            "decommission": lambda fault: self._each(
                fault, lambda name: self._undo("bookie", "decommission", name, "--cancel")
            ),
            "replace": lambda fault: self._each(fault, self._replace),
        }  # fmt: skip

    def begin(self, fault: Fault) -> None:
        """Start the fault."""
        self._recorder.record(NEMESIS, "info", "fault", error=f"begin {fault}")
        self._begin[fault.action](fault)

    def end(self, fault: Fault) -> None:
        """Repair the fault. Processes that come back are started when this returns, but may not serve yet."""
        repair = self._end.get(fault.action)
        if repair is not None:
            repair(fault)
        self._each(fault, self._cluster.launch)
        self._recorder.record(NEMESIS, "info", "fault", error=f"end {fault}")

    def _each(self, fault: Fault, act: Callable[[str], None]) -> None:
        for name in fault.processes:
            act(name)

    # -- processes

    def _stop(self, name: str) -> None:
        if not self._cluster.stop(name):
            self._problem(f"{name} ignored SIGTERM and was killed; see its log")

    def _restart(self, name: str) -> None:
        self._stop(name)
        self._cluster.launch(name)
        deadline = time.monotonic() + _READY_S
        while not self._cluster.is_ready(name) and time.monotonic() < deadline:
            time.sleep(_RETRY_S)

    # -- disks

    def _repair_disks(self, fault: Fault) -> None:
        for name in fault.processes:
            clear_fault(self._cluster.control(name))
            if any(trouble in fault.kind for trouble in RESTART_AFTER):
                self._cluster.kill(name)

    def _rot(self, name: str) -> None:
        """Flip one bit in one of a bookie's older log files."""
        files = sorted((self._cluster.data / name).rglob("*.log"), key=lambda path: path.stat().st_mtime_ns)[:-_ROT_KEPT]
        if files:
            flip_bit(self._random.choice(files), self._random)

    # -- operators' commands

    def _try(self, *words: str) -> None:
        """Run a command that may fail during other faults; a refusal changes nothing."""
        self._cluster.command(*words)

    def _undo(self, *words: str) -> None:
        """Repeat a command until it succeeds or finds nothing to do; report a problem if it takes too long."""
        deadline = time.monotonic() + _UNDO_S
        while (code := self._cluster.command(*words)[0]) not in (ExitCode.OK, ExitCode.NOT_FOUND):
            if time.monotonic() > deadline:
                self._problem(f"`stratalog {' '.join(words)}` still ends with {code} after {_UNDO_S:.0f} s")
                return
            time.sleep(_RETRY_S)

    def _replace(self, name: str) -> None:
        """Remove the metadata node for sure, and add it again, on an empty disk.

        A removal that failed may still take effect later: then the node would end by itself, and could not start again.
        """
        self._undo("metadata", "remove", _number(name), "--yes")
        self._cluster.kill(name)
        shutil.rmtree(self._cluster.data / name)
        self._cluster.launch(name)
        self._undo("metadata", "add", f"{_number(name)}={self._cluster.address(name)}")


def flip_bit(path: Path, draw: random.Random) -> None:
    """Flip one bit anywhere in the file."""
    with path.open("r+b") as file:
        position = draw.randrange(path.stat().st_size)
        file.seek(position)
        (byte,) = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ (1 << draw.randrange(8))]))


def _number(name: str) -> str:
    return name.rpartition("-")[2]
