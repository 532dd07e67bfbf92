"""The history: the operations of all clients with their results, one per line. The checker judges this record.

Terms are those of Jepsen's Kafka workload: an operation is invoked and completes as ``ok`` (took effect), ``fail`` (certainly
did not) or ``info`` (unknown). A *process* does one operation at a time; after an unknown send it is never used again. A *key*
stands for one partition of one topic, a *value* is a number that is sent once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

Type = Literal["invoke", "ok", "fail", "info"]
Function = Literal["send", "poll", "assign", "subscribe", "rebalance", "commit", "epoch", "fault"]
Pair = tuple[int, int]
"""Offset and value, as polled."""
CORRUPT = -1
"""Value of a record whose bytes differ from those sent."""
NEMESIS = -1


class Operation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line. ``time_ns`` counts from the start of the run; ``index`` rises by one and is the order of real time."""

    index: int
    time_ns: int
    process: int
    type: Type
    f: Function
    """Beyond Jepsen's: ``epoch`` (an idempotent producer started one), ``rebalance`` (partitions were assigned), ``commit``."""
    client: str = ""
    """Name of the client: after an unknown outcome a client continues under a new process number with the same name."""
    group: str = ""
    idempotent: bool = False
    key: int | None = None
    value: int | None = None
    offset: int | None = None
    keys: tuple[int, ...] = ()
    """For assign, subscribe and rebalance: the keys that are read from now on."""
    from_beginning: bool = False
    polled: Mapping[int, Sequence[Pair]] | None = None
    committed: Mapping[int, int] | None = None
    """For commit: the next offset of each key."""
    error: str = ""


class Recorder:
    """Writes operations to a file in order of time; all clients' threads share one recorder."""

    def __init__(self, path: Path, listeners: Sequence[Callable[[Operation], None]] = ()) -> None:
        self._encoder = msgspec.json.Encoder()
        self._stream = path.open("wb", buffering=256 * 1024)
        self._listeners = tuple(listeners)
        self._lock = threading.Lock()
        self._began_ns = time.monotonic_ns()
        self._index = 0
        self._processes = 0

    def new_process(self) -> int:
        """Return a process number that was never used."""
        with self._lock:
            self._processes += 1
            return self._processes - 1

    def now_ns(self) -> int:
        return time.monotonic_ns() - self._began_ns

    def record(self, process: int, type: Type, f: Function, **fields: object) -> Operation:
        """Write one operation; the fields are those of :class:`Operation`."""
        with self._lock:
            operation = Operation(index=self._index, time_ns=self.now_ns(), process=process, type=type, f=f, **fields)  # type: ignore[arg-type]
            self._index += 1
            self._stream.write(self._encoder.encode(operation) + b"\n")
            for listener in self._listeners:
                listener(operation)
        return operation

    def close(self) -> None:
        with self._lock:
            self._stream.close()


def read_history(path: Path) -> Iterator[Operation]:
    """Yield the operations of a file, in order."""
    decoder = msgspec.json.Decoder(Operation)
    with path.open("rb") as stream:
        for line in stream:
            yield decoder.decode(line)
