"""Breaks what a step says and mends it again."""

from __future__ import annotations

from collections.abc import Callable

from chaos.cluster import ChaosCluster
from chaos.faulty_files import clear_fault, set_fault
from chaos.history import NEMESIS, Recorder
from chaos.schedule import RESTART_AFTER, Fault


class Nemesis:
    """Acts on one cluster, from the thread that started it; writes what it does into the history."""

    def __init__(self, cluster: ChaosCluster, recorder: Recorder) -> None:
        self._cluster = cluster
        self._recorder = recorder

    def begin(self, fault: Fault) -> None:
        """Break it."""
        self._recorder.record(NEMESIS, "info", "fault", error=f"begin {fault}")
        if fault.action == "link":
            self._cluster.proxy.set_mode(fault.mode, fault.links)
        elif fault.action == "disk":
            for name in fault.processes:
                set_fault(self._cluster.control(name), fault.disk)
        else:
            act: Callable[[str], None] = self._cluster.kill if fault.action == "kill" else self._cluster.pause
            for name in fault.processes:
                act(name)

    def end(self, fault: Fault) -> None:
        """Mend it; a process that comes back has been started when this returns, and may not serve yet."""
        if fault.action == "link":
            self._cluster.proxy.set_mode("pass", fault.links)
        elif fault.action == "disk":
            for name in fault.processes:
                clear_fault(self._cluster.control(name))
                if any(trouble in fault.kind for trouble in RESTART_AFTER):
                    self._cluster.kill(name)
        elif fault.action == "pause":
            for name in fault.processes:
                self._cluster.resume(name)
        for name in fault.processes:
            self._cluster.launch(name)
        self._recorder.record(NEMESIS, "info", "fault", error=f"end {fault}")
