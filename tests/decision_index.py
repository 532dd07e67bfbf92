"""The index of decisions by part of the system, and that of the lab's notes: ``python -m decision_index`` writes both.

A decision is a page of ``docs/adr/`` whose number has no gap before it, and whose third line has status, date and part.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[1]
DECISIONS: Final = ROOT / "docs" / "adr"
NOTES: Final = ROOT / "docs" / "lab" / "notes"
PARTS: Final = ("Broker", "Bookies and ledgers", "Metadata quorum", "Tiering", "Spark", "Processes and operation")
_HEAD: Final = re.compile(r"# (\d+)\. (.+)\n\nStatus: (accepted|superseded)\. Date: (\d{4}-\d{2}-\d{2})\. Part: ([^.]+)\.\n")

_DECISIONS_HEAD: Final = """# Decisions

One page for each decision that had alternatives: status, date, context, decision, rejected options. A page is corrected when
names or numbers change; a later page supersedes a decision. `make reference` writes this index.
"""

_NOTES_HEAD: Final = """# Notes on tests and benchmarks

Why the simulator, the checkers, the load generation and the benchmark are as they are. `make reference` writes this index.

"""


class Decision(NamedTuple):
    """The index's entry for one page."""

    number: int
    title: str
    status: str
    date: str
    part: str
    file: str


def read_decision(page: Path) -> Decision:
    """The head of a page. Raises ``ValueError`` if it is not as it should be."""
    found = _HEAD.match(page.read_text())
    if found is None or found[5] not in PARTS:
        raise ValueError(
            f"{page.name} does not begin with '# N. Title', then 'Status: accepted. Date: YYYY-MM-DD. Part: P.', P of {PARTS}"
        )
    return Decision(int(found[1]), found[2], found[3], found[4], found[5], page.name)


def read_decisions() -> list[Decision]:
    """All of them, by number."""
    return [read_decision(page) for page in sorted(DECISIONS.glob("[0-9]*.md"))]


def decisions_page(decisions: Sequence[Decision]) -> str:
    """The text of ``docs/adr/index.md``."""
    return _DECISIONS_HEAD + "".join(line for part in PARTS for line in _section(part, decisions))


def _section(part: str, decisions: Sequence[Decision]) -> Iterator[str]:
    yield f"\n## {part}\n\n| | decision | status | date |\n| --- | --- | --- | --- |\n"
    for each in decisions:
        if each.part == part:
            yield f"| {each.number} | [{each.title}]({each.file}) | {each.status} | {each.date} |\n"


def notes_page() -> str:
    """The text of ``docs/lab/notes/index.md``."""
    pages = sorted(page for page in NOTES.glob("*.md") if page.name != "index.md")
    titles = [(page.read_text().split("\n", 1)[0].removeprefix("# "), page.name) for page in pages]
    return _NOTES_HEAD + "".join(f"- [{title}]({name})\n" for title, name in titles)


if __name__ == "__main__":
    (DECISIONS / "index.md").write_text(decisions_page(read_decisions()))
    (NOTES / "index.md").write_text(notes_page())
