"""A load process's side of the protocol with its parent: start, stop, progress. Two pipes and one thread."""

from __future__ import annotations

import os
import resource
import sys
import threading
import time
from typing import BinaryIO

import msgspec
import psutil

from stratalog_loadgen.processes.loads import Progress, Ready, Report

GO, MEASURE, LEAVE, LEFT, STOP = b"go\n", b"measure\n", b"leave\n", b"left\n", b"stop\n"
_PROGRESS_INTERVAL_S = 0.5


class Control:
    """Call ``wait_for_go`` once, then ``running`` in every iteration. ``began`` is the time of the start signal."""

    def __init__(self, commands: BinaryIO, reports: BinaryIO) -> None:
        self._commands = commands
        self._reports = reports
        self._stopped = threading.Event()
        self._words = {word: threading.Event() for word in (MEASURE, LEAVE, LEFT)}
        self._reported_at = 0.0
        self.began = 0.0

    def wait_for_go(self) -> None:
        """Report that the set-up is done; return at the start signal."""
        self.report(Ready())
        if self._commands.readline() != GO:
            raise SystemExit(1)
        self.began = time.monotonic()
        threading.Thread(target=self._watch, daemon=True).start()

    def running(self, records: int, assigned: int = 0, *, rebalanced: bool = False, steady_partitions: int = 0) -> bool:
        """Return False after a stop signal or the parent's end. Reports progress at intervals."""
        now = time.monotonic()
        if now - self._reported_at >= _PROGRESS_INTERVAL_S:
            self._reported_at = now
            self.report(
                Progress(records=records, assigned=assigned, rebalanced=rebalanced, steady_partitions=steady_partitions)
            )
        return not self._stopped.is_set()

    def received(self, word: bytes) -> bool:
        """Return True once after the parent has sent ``word``: ``MEASURE``, ``LEAVE`` or ``LEFT``."""
        if not self._words[word].is_set():
            return False
        self._words[word].clear()
        return True

    def elapsed_s(self) -> float:
        return time.monotonic() - self.began

    def report(self, report: Report) -> None:
        self._reports.write(msgspec.json.encode(report) + b"\n")
        self._reports.flush()

    def _watch(self) -> None:
        while (word := self._commands.readline()) in self._words:
            self._words[word].set()
        # The end of the pipe stops the load, too, so it never outlives its parent.
        self._stopped.set()


def cpu_s() -> float:
    """Return the CPU time of this process and all of its threads so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def resident_bytes() -> int:
    return int(psutil.Process(os.getpid()).memory_info().rss)


def standard_control() -> Control:
    """Return a control on this process's standard input and output."""
    return Control(sys.stdin.buffer, sys.stdout.buffer)
