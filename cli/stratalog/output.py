"""The output of commands: a table for people, JSON for programs, progress on stderr. Results alone go to stdout.

Rich is loaded where it prints: it takes a quarter of the time in which most commands load.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from rich.progress import Progress

Command = TypeVar("Command", bound=Callable[..., Any])
_PIPE_WIDTH = 100_000
_FOLDED_MIN = 24
"""Width to which a column may be folded; one that is narrower everywhere is not folded."""
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_HEADINGS = {
    "damaged": "corrupt",
    "healed": "repaired",
    "unhealable": "unrepairable",
    "broken_files": "corrupt files",
    "lacking": "missing copies",
}
"""Table headings of columns whose names in JSON are older than the terms."""


def json_option(command: Command) -> Command:
    """Add ``--json``, which every command has that lists or changes something."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


def print_done(document: Mapping[str, Any], sentence: str, *, as_json: bool) -> None:
    """Print what a command changed: a JSON document on stdout, or a sentence on stderr."""
    if as_json:
        print_json(document)
    else:
        click.echo(sentence, err=True)


def print_json(document: object) -> None:
    """Print one JSON document on stdout."""
    click.echo(json.dumps(document, indent=2, default=str))


def print_rows(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], *, title: str = "") -> None:
    """Print a table of the named columns. A heading is the column's name with spaces, or its term in ``_HEADINGS``.

    A column that is empty in every row is left out. Cells are not markup: clients choose the names and keys in them.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    table = Table(title=escape(_shown(title)) or None, title_justify="left", box=None, pad_edge=False, header_style="bold")
    shown = [column for column in columns if not rows or any(row.get(column) != "" for row in rows)]
    lines = [[_shown(_cell(column, row.get(column))) for column in shown] for row in rows]
    width = 0
    for number, column in enumerate(shown):
        numeric = all(isinstance(row.get(column), int | float) for row in rows) and bool(rows)
        heading = _HEADINGS.get(column, column.replace("_", " "))
        longest = max([len(heading), *(len(cells[number]) for cells in lines)])
        width += min(longest, _FOLDED_MIN) + 2
        is_folded = longest > _FOLDED_MIN
        table.add_column(heading, justify="right" if numeric else "left", overflow="fold", no_wrap=not is_folded)
    for cells in lines:
        table.add_row(*map(Text, cells))
    if sys.stdout.isatty():
        console = Console(file=sys.stdout, highlight=False)
        if width - 2 <= console.width:
            console.print(table)
            return
    # Lines to a file or a pipe, or that do not fit a terminal, are neither folded at its width nor padded to the longest.
    console = Console(highlight=False, width=_PIPE_WIDTH)
    with console.capture() as captured:
        console.print(table)
    click.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))


def print_listing(
    name: str, rows: Sequence[Mapping[str, Any]], columns: Sequence[str], *, as_json: bool, title: str = ""
) -> None:
    """Print rows as a table, or as the JSON document ``{name: rows}``."""
    if as_json:
        print_json({name: list(rows)})
    else:
        print_rows(rows, columns, title=title)


def progress_bar() -> Progress:
    """Return a progress bar on stderr, which is shown only on a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    # Not the console's opinion: FORCE_COLOR, which many CI systems set, makes it call a file a terminal.
    is_shown = sys.stderr.isatty()
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        disable=not is_shown,
        transient=True,
    )


def human_bytes(count: float) -> str:
    """``1536`` → ``1.5 KiB``."""
    for unit in _UNITS:
        if count < 1024 or unit == _UNITS[-1]:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable: the last unit takes everything")


def _shown(text: str) -> str:
    """Return text with escapes for what would control a terminal."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each == "\n" else ascii(each)[1:-1] for each in text)


def _cell(column: str, value: Any) -> str:
    if value is None:
        return "-"
    if column.endswith("bytes") and isinstance(value, int):
        return human_bytes(value)
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return str(value)
