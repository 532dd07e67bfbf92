"""Load processes: starts them, starts their loads at the same time, follows their progress, and collects their counts."""

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


class WorkerProcess:
    """One load process and its last report."""

    def __init__(self, load: Load) -> None:
        command = [sys.executable, "-m", "stratalog_loadgen.processes.worker"]
        # In its own process group: Ctrl-C in the terminal reaches the command only, which ends its processes itself.
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0)
        self._partial = b""
        self.load = load
        self.ready = False
        self.records = 0
        self.assigned = 0
        self.rebalanced = False
        self.steady_partitions = 0
        self.counted: Counted | None = None
        self.send(msgspec.json.encode(load) + b"\n")

    @property
    def output(self) -> IO[bytes]:
        return cast(IO[bytes], self._process.stdout)

    def send(self, line: bytes) -> None:
        """Send one line. Ignored if the process has ended."""
        pipe = cast(IO[bytes], self._process.stdin)
        with contextlib.suppress(BrokenPipeError):
            pipe.write(line)
            pipe.flush()

    def receive(self) -> None:
        """Read its reports. Raises ``Invalid`` if its settings are wrong, ``Unavailable`` if it failed or exited."""
        content = os.read(self.output.fileno(), 1 << 20)
        if not content:
            raise Unavailable(f"a load process exited with code {self._process.wait()} and without a result")
        *lines, self._partial = (self._partial + content).split(b"\n")
        for line in lines:
            self._note(msgspec.json.decode(line, type=Report))

    def end(self) -> None:
        """Kill the process and close its pipes."""
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
            self.rebalanced, self.steady_partitions = report.rebalanced, report.steady_partitions
        else:
            self.counted = report


class Workers:
    """Load processes that run at the same time. A context manager: all are ready inside, and all have ended after it."""

    def __init__(self, loads: Sequence[Load], on_progress: OnProgress = lambda records: None) -> None:
        self._loads = loads
        self._on_progress = on_progress
        self._processes: list[WorkerProcess] = []

    def __enter__(self) -> Workers:
        try:
            self._processes.extend(map(WorkerProcess, self._loads))
            self.follow_until(lambda: all(process.ready for process in self._processes), _READY_TIMEOUT_S, "get ready")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None) -> None:
        self._end()

    def begin(self, kind: type[Load]) -> None:
        """Start the loads of this kind."""
        self._send_all(kind, GO)

    def measure(self, kind: type[Load]) -> None:
        """Signal the end of the warm-up."""
        self._send_all(kind, MEASURE)

    def leave(self, kind: type[Load]) -> None:
        """Make consumers of the first process leave their group. Signal it to the others, which time the rebalance."""
        first, *others = self._of(kind)
        first.send(LEAVE)
        for process in others:
            process.send(LEFT)

    def stop(self, kind: type[Load]) -> None:
        """Signal the loads of this kind to end and to report."""
        self._send_all(kind, STOP)

    def records(self, kind: type[Load]) -> int:
        """Return the records that loads of this kind have sent or read so far."""
        return sum(process.records for process in self._of(kind))

    def assigned(self, kind: type[Load]) -> int:
        """Return how many partitions are assigned to consumers now."""
        return sum(process.assigned for process in self._of(kind))

    def steady_partitions(self, kind: type[Load]) -> int:
        """Return how many partitions acknowledge in time."""
        return sum(process.steady_partitions for process in self._of(kind))

    def rebalanced(self, kind: type[Load]) -> bool:
        """Whether any assignment changed after consumers left."""
        return any(process.rebalanced for process in self._of(kind))

    def finish(self, kind: type[Load], timeout_s: float) -> list[Counted]:
        """Wait for the counts. Raises ``Unavailable`` after ``timeout_s`` and a grace period for work in progress."""
        wanted = self._of(kind)
        self.follow_until(lambda: all(process.counted for process in wanted), timeout_s + _END_GRACE_S, "end")
        return [cast(Counted, process.counted) for process in wanted]

    def follow_for(self, duration_s: float) -> None:
        """Process reports for ``duration_s``, or until all processes have ended."""
        until = time.monotonic() + duration_s
        self.follow_until(
            lambda: time.monotonic() >= until or all(process.counted for process in self._processes),
            duration_s + 60,
            "keep running",
        )

    def follow_until(self, done: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Process reports until ``done``. Raises ``Unavailable`` that names ``what`` after ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        with _selector(self._processes) as selector:
            while not done():
                if time.monotonic() >= deadline:
                    raise Unavailable(f"the load processes did not {what} within {timeout_s:.0f} s")
                for key, _ in selector.select(_TURN_S):
                    process: WorkerProcess = key.data
                    process.receive()
                    if process.counted:
                        selector.unregister(key.fileobj)
                self._on_progress(sum(process.records for process in self._processes))

    def _of(self, kind: type[Load]) -> list[WorkerProcess]:
        return [process for process in self._processes if isinstance(process.load, kind)]

    def _send_all(self, kind: type[Load], line: bytes) -> None:
        for process in self._of(kind):
            process.send(line)

    def _end(self) -> None:
        for process in self._processes:
            process.end()


@contextlib.contextmanager
def _selector(processes: Sequence[WorkerProcess]) -> Iterator[selectors.BaseSelector]:
    with selectors.DefaultSelector() as selector:
        for process in processes:
            if process.counted is None:
                selector.register(process.output, selectors.EVENT_READ, process)
        yield selector
