"""A load process's side of the conversation with the one that started it: begin, stop, progress. Two pipes and one thread."""

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
    """``wait_for_go`` once, then ``running`` in every turn of a load's loop; ``clock`` zero is the moment of the word."""

    def __init__(self, commands: BinaryIO, reports: BinaryIO) -> None:
        self._commands = commands
        self._reports = reports
        self._stopped = threading.Event()
        self._told = {word: threading.Event() for word in (MEASURE, LEAVE, LEFT)}
        self._reported_at = 0.0
        self.began = 0.0

    def wait_for_go(self) -> None:
        """Report that all is set up; return when told to begin."""
        self.report(Ready())
        if self._commands.readline() != GO:
            raise SystemExit(1)
        self.began = time.monotonic()
        threading.Thread(target=self._watch, daemon=True).start()

    def running(self, records: int, assigned: int = 0, *, rebalanced: bool = False, heard: int = 0) -> bool:
        """False once the other side said stop or is gone; reports progress now and then."""
        now = time.monotonic()
        if now - self._reported_at >= _PROGRESS_INTERVAL_S:
            self._reported_at = now
            self.report(Progress(records=records, assigned=assigned, rebalanced=rebalanced, heard=heard))
        return not self._stopped.is_set()

    def told(self, word: bytes) -> bool:
        """True once after the other side said ``word``, that is ``MEASURE``, ``LEAVE`` or ``LEFT``."""
        if not self._told[word].is_set():
            return False
        self._told[word].clear()
        return True

    def elapsed_s(self) -> float:
        return time.monotonic() - self.began

    def report(self, report: Report) -> None:
        self._reports.write(msgspec.json.encode(report) + b"\n")
        self._reports.flush()

    def _watch(self) -> None:
        while (word := self._commands.readline()) in self._told:
            self._told[word].set()
        # The end of the pipe stops it, too: a load never outlives who wanted it.
        self._stopped.set()


def cpu_s() -> float:
    """CPU time of this process so far, with all of its threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def resident_bytes() -> int:
    return int(psutil.Process(os.getpid()).memory_info().rss)


def standard_control() -> Control:
    """On this process's standard input and output."""
    return Control(sys.stdin.buffer, sys.stdout.buffer)
