"""A client that runs in its own thread until it is stopped, restarts its session after errors, and reports fatal failures."""

from __future__ import annotations

import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Sequence

from chaos.history import Recorder


class Client(ABC):
    """``run_session`` is called repeatedly, each time with a fresh connection, until ``stop``."""

    def __init__(self, name: str, recorder: Recorder) -> None:
        self.name = name
        self.recorder = recorder
        self.stopping = threading.Event()
        self.sessions_given_up = 0
        """Sessions that the client ended because they made no progress."""
        self.failure = ""
        """Traceback of the error that ended the client early: a fault of the test, or of the client library."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def final_problems(self, bootstrap: str) -> Sequence[str]:
        """Return the problems that the client finds after it has stopped and all faults are over."""
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
        """Wait for the client; return whether it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self.stopping.is_set():
                self.run_session()
        except Exception:
            self.failure = traceback.format_exc()
