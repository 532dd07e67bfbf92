"""Load processes: start them, let all begin at one moment, follow their progress, collect what they counted."""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import IO, cast

import msgspec

from stratalog_core.errors import Invalid, Unavailable
from stratalog_loadgen.processes.control import GO, LEAVE, LEFT, MEASURE, STOP
from stratalog_loadgen.processes.loads import Counted, Failed, Load, Progress, Ready, Report

_READY_TIMEOUT_S = 300.0
_END_GRACE_S = 180.0
_TURN_S = 0.2

OnProgress = Callable[[int], None]


class LoadProcess:
    """One of them, and the last it said."""

    def __init__(self, load: Load) -> None:
        command = [sys.executable, "-m", "stratalog_loadgen.processes.worker"]
        # In a group of its own: a terminal's Ctrl-C is for the command, which ends its processes itself.
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0)
        self._partial = b""
        self.load = load
        self.ready = False
        self.records = 0
        self.assigned = 0
        self.rebalanced = False
        self.heard = 0
        self.counted: Counted | None = None
        self.say(msgspec.json.encode(load) + b"\n")

    @property
    def output(self) -> IO[bytes]:
        return cast(IO[bytes], self._process.stdout)

    def say(self, line: bytes) -> None:
        """One line; a process that has ended does not mind."""
        pipe = cast(IO[bytes], self._process.stdin)
        with contextlib.suppress(BrokenPipeError):
            pipe.write(line)
            pipe.flush()

    def receive(self) -> None:
        """Take in what it wrote. Raises ``Invalid`` if its settings are wrong, ``Unavailable`` if it failed or just ended."""
        content = os.read(self.output.fileno(), 1 << 20)
        if not content:
            raise Unavailable(f"a load process exited with code {self._process.wait()} and without a result")
        *lines, self._partial = (self._partial + content).split(b"\n")
        for line in lines:
            self._note(msgspec.json.decode(line, type=Report))

    def end(self) -> None:
        """End it, whatever it does, and close its pipes."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):
                cast(IO[bytes], pipe).close()

    def _note(self, report: Report) -> None:
        if isinstance(report, Failed):
            raise Invalid(report.message) if report.wrong else Unavailable(f"a load process failed: {report.message}")
        if isinstance(report, Ready):
            self.ready = True
        elif isinstance(report, Progress):
            self.records, self.assigned = report.records, report.assigned
            self.rebalanced, self.heard = report.rebalanced, report.heard
        else:
            self.counted = report


class Crew:
    """Processes that work at the same time. A context: within it all are ready, at its end none is left."""

    def __init__(self, loads: Sequence[Load], on_progress: OnProgress = lambda records: None) -> None:
        self._loads = loads
        self._on_progress = on_progress
        self._processes: list[LoadProcess] = []

    def __enter__(self) -> Crew:
        try:
            self._processes.extend(map(LoadProcess, self._loads))
            self.follow_until(lambda: all(process.ready for process in self._processes), _READY_TIMEOUT_S, "get ready")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None) -> None:
        self._end()

    def begin(self, kind: type[Load]) -> None:
        """Let the processes with that kind of load start to work."""
        self._say(kind, GO)

    def measure(self, kind: type[Load]) -> None:
        """Tell them that the warm-up is over."""
        self._say(kind, MEASURE)

    def leave(self, kind: type[Load]) -> None:
        """Have consumers of the first process of that kind leave their group; the others learn of it, to time what follows."""
        first, *others = self._of(kind)
        first.say(LEAVE)
        for process in others:
            process.say(LEFT)

    def stop(self, kind: type[Load]) -> None:
        """Ask them to end and to report."""
        self._say(kind, STOP)

    def records(self, kind: type[Load]) -> int:
        """Return the records that all of that kind have sent or read so far."""
        return sum(process.records for process in self._of(kind))

    def assigned(self, kind: type[Load]) -> int:
        """Partitions that consumers hold now."""
        return sum(process.assigned for process in self._of(kind))

    def heard(self, kind: type[Load]) -> int:
        """Partitions that acknowledge in time."""
        return sum(process.heard for process in self._of(kind))

    def rebalanced(self, kind: type[Load]) -> bool:
        """Whether any assignment changed after consumers left."""
        return any(process.rebalanced for process in self._of(kind))

    def finish(self, kind: type[Load], timeout_s: float) -> list[Counted]:
        """Wait for their results. Raises ``Unavailable`` after ``timeout_s`` and a grace period for what is under way."""
        wanted = self._of(kind)
        self.follow_until(lambda: all(process.counted for process in wanted), timeout_s + _END_GRACE_S, "end")
        return [cast(Counted, process.counted) for process in wanted]

    def follow_for(self, duration_s: float) -> None:
        """Let them work for a while, or until all have ended."""
        until = time.monotonic() + duration_s
        self.follow_until(
            lambda: time.monotonic() >= until or all(process.counted for process in self._processes), duration_s + 60, "go on"
        )

    def follow_until(self, done: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Take in reports until ``done``. Raises ``Unavailable`` after ``timeout_s``, saying that they did not do ``what``."""
        deadline = time.monotonic() + timeout_s
        with _selector(self._processes) as selector:
            while not done():
                if time.monotonic() >= deadline:
                    raise Unavailable(f"the load processes did not {what} within {timeout_s:.0f} s")
                for key, _ in selector.select(_TURN_S):
                    process: LoadProcess = key.data
                    process.receive()
                    if process.counted:
                        selector.unregister(key.fileobj)
                self._on_progress(sum(process.records for process in self._processes))

    def _of(self, kind: type[Load]) -> list[LoadProcess]:
        return [process for process in self._processes if isinstance(process.load, kind)]

    def _say(self, kind: type[Load], line: bytes) -> None:
        for process in self._of(kind):
            process.say(line)

    def _end(self) -> None:
        for process in self._processes:
            process.end()


@contextlib.contextmanager
def _selector(processes: Sequence[LoadProcess]) -> Iterator[selectors.BaseSelector]:
    with selectors.DefaultSelector() as selector:
        for process in processes:
            if process.counted is None:
                selector.register(process.output, selectors.EVENT_READ, process)
        yield selector
