"""Output for people: one live line on a terminal, elsewhere a line for each fault, and the summary."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from chaos.run import ChaosRun, Result

_REFRESH_S = 1.0


class Display:
    """Writes to standard output."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
        self._began = time.monotonic()

    def say(self, line: str) -> None:
        """Print a permanent line."""
        self._console.print(Text(f"{time.monotonic() - self._began:7.1f} s  {line}"), soft_wrap=True)

    @contextmanager
    def showing(self, run: ChaosRun) -> Iterator[None]:
        """Show a live line with the current fault and rates, on a terminal."""
        if not self._console.is_terminal:
            yield
            return
        ended = threading.Event()
        with Live(console=self._console, auto_refresh=False) as live:
            thread = threading.Thread(target=self._refresh, args=(run, live, ended), daemon=True)
            thread.start()
            try:
                yield
            finally:
                ended.set()
                thread.join()

    def _refresh(self, run: ChaosRun, live: Live, ended: threading.Event) -> None:
        before = run.progress.counts.copy()
        while not ended.wait(_REFRESH_S):
            now = run.progress.counts.copy()
            rates = {name: (now[name] - before[name]) / _REFRESH_S for name in ("ok", "info", "fail", "polled")}
            before = now
            text = (
                f"{time.monotonic() - self._began:7.1f} s  ok {rates['ok']:.0f}/s  unknown {rates['info']:.0f}/s  "
                f"failed {rates['fail']:.0f}/s  polled {rates['polled']:.0f}/s  {run.phase}"
            )
            live.update(Text(text), refresh=True)

    def summary(self, result: Result) -> None:
        """Print unavailability by fault, numbers, and all problems."""
        table = Table(title="Unavailability (seconds)")
        for name in ("fault", "times", "one partition, p50", "max", "all partitions, max", "recovery p50", "max"):
            table.add_column(name, justify="left" if name == "fault" else "right")
        for row in result.unavailability:
            gaps = [row.partition_gap_p50_s, row.partition_gap_max_s, row.cluster_gap_max_s]
            numbers = [f"{number:.1f}" for number in (*gaps, row.recovery_p50_s, row.recovery_max_s)]
            table.add_row(row.kind, str(row.times), *numbers)
        self._console.print(table)
        for name, value in result.numbers.items():
            self._print(f"{name}: {value}")
        self._wrong(result)

    def _wrong(self, result: Result) -> None:
        for line in result.ended:
            self._print(f"ended by itself: {line}")
        for line in result.problems:
            self._print(f"PROBLEM {line}", "red")
        assert result.verdict is not None
        for name, count in result.verdict.notes.items():
            self._print(f"{name}: {count}")
        for anomaly in result.verdict.examples:
            operations = f"operations {list(anomaly.operations)}"
            self._print(f"ANOMALY {anomaly.kind}, key {anomaly.key}: {anomaly.detail}; {operations}", "red")
        wrong = f"ANOMALIES {result.verdict.counts}, PROBLEMS {len(result.problems)}"
        self._print("no anomaly" if result.is_clean else wrong)

    def _print(self, line: str, style: str = "") -> None:
        self._console.print(Text(line, style=style), soft_wrap=True)
