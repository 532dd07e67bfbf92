"""A client that runs in a thread of its own until it is told to stop, comes back after errors, and reports what ended it."""

from __future__ import annotations

import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Sequence

from chaos.history import Recorder


class Client(ABC):
    """``run_session`` is called again and again, each time with a fresh connection, until ``stop``."""

    def __init__(self, name: str, recorder: Recorder) -> None:
        self.name = name
        self.recorder = recorder
        self.stopping = threading.Event()
        self.sessions_given_up = 0
        """Sessions that the client ended because nothing came of them any more."""
        self.failure = ""
        """Traceback of what ended the client before its time: a fault of the test, or of the client library."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def final_problems(self, bootstrap: str) -> Sequence[str]:
        """What the client finds wrong once it has stopped and all faults are over."""
        return ()

    @abstractmethod
    def run_session(self) -> None:
        """Work until ``stopping`` is set, or return for a new session."""

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ask the client to end; ``join`` waits for it."""
        self.stopping.set()

    def join(self, timeout_s: float) -> bool:
        """Whether the client has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self.stopping.is_set():
                self.run_session()
        except Exception:
            self.failure = traceback.format_exc()
