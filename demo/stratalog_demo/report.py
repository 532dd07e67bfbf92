"""Steps of the demo with time, rate and checks, and a table of them at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from stratalog_demo.clients import DemoFailed


@dataclass(slots=True)
class Step:
    """One running step; ``check`` records a passed check, ``records`` is the count behind the rate."""

    title: str
    records: int = 0
    seconds: float = 0.0
    checks: list[str] = field(default_factory=list)

    @property
    def rate(self) -> str:
        return f"{self.records / self.seconds:,.0f} records/s" if self.records and self.seconds else ""

    def check(self, holds: bool, what: str) -> None:
        """Record ``what`` as checked if it holds, else raise ``DemoFailed``."""
        if not holds:
            raise DemoFailed(f"{self.title}: check failed: {what}")
        self.checks.append(what)


class Report:
    """Prints each step as it runs and keeps the steps for the closing table."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._steps: list[Step] = []

    @contextmanager
    def step(self, title: str) -> Iterator[Step]:
        step = Step(title)
        self._steps.append(step)
        self._console.print(f"[bold]{len(self._steps)}. {title}[/bold]")
        started = time.perf_counter()
        yield step
        step.seconds = time.perf_counter() - started
        for checked in step.checks:
            self._console.print(f"   [green]✓[/green] {checked}")
        self._console.print(f"   {step.seconds:.1f} s {step.rate}", highlight=False)

    @contextmanager
    def bar(self, title: str, total: int) -> Iterator[Callable[[int], None]]:
        """Show a progress bar and yield the function that sets its position."""
        columns = (TextColumn("   {task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=self._console, transient=True) as progress:
            task = progress.add_task(title, total=total)
            yield lambda done: progress.update(task, completed=done)

    def table(self) -> None:
        table = Table(title="What was done and checked", show_lines=True)
        for heading in ("step", "seconds", "rate", "checked"):
            table.add_column(heading, justify="right" if heading == "seconds" else "left")
        for number, step in enumerate(self._steps, 1):
            table.add_row(f"{number}. {step.title}", f"{step.seconds:.1f}", step.rate, "\n".join(step.checks))
        table.add_row("all", f"{sum(step.seconds for step in self._steps):.1f}", "", "")
        self._console.print(table)
