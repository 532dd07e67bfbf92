"""The documentation says what is: links lead somewhere, commands and make targets exist, generated pages are fresh."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from stratalog.app import stratalog
from stratalog.reference import PAGES as REFERENCE

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    page
    for page in ROOT.rglob("*.md")
    if not any(part.startswith(".") or part == "data" for part in page.relative_to(ROOT).parts)
)
_LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")
_FENCE = re.compile(r"```sh\n(.*?)```", re.DOTALL)
_COMPONENTS = ["core", "metadata", "bookies", "tiering", "broker", "pipeline", "cli", "minio", "demo", "benchmarks"]


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_lead_somewhere(page: Path) -> None:
    broken = [link for link in _LINK.findall(page.read_text()) if not (page.parent / link).exists()]
    assert broken == []


@pytest.mark.parametrize("component", _COMPONENTS)
def test_every_component_explains_itself(component: str) -> None:
    assert (ROOT / component / "README.md").read_text().startswith("# ")


def _shell_lines(page: Path) -> Iterator[str]:
    for block in _FENCE.findall(page.read_text()):
        for line in block.replace("\\\n", " ").splitlines():
            yield from (part.strip() for part in re.split(r"&&|\|", line.split(" #")[0]))


def _commands() -> list[tuple[str, list[str]]]:
    return [
        (_name(page), shlex.split(line)[1:])
        for page in PAGES
        for line in _shell_lines(page)
        if line.startswith("stratalog ") and "…" not in line
    ]


@pytest.mark.parametrize(("page", "words"), _commands())
def test_commands_in_the_docs_parse(page: str, words: list[str]) -> None:
    """Every ``stratalog`` line of a shell block has a command that exists and options that it takes."""
    group: click.Command = stratalog
    while isinstance(group, click.Group):
        name = words.pop(0)
        command = group.get_command(click.Context(group), name)
        assert command is not None, f"{page}: no command {name!r}"
        group = command
    group.make_context(str(group.name), words, resilient_parsing=True)
    known = {option for parameter in group.params for option in [*parameter.opts, *parameter.secondary_opts]}
    assert {word.split("=")[0] for word in words if word.startswith("--")} <= known, f"{page}: {words}"


def test_make_targets_in_the_docs_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {target for page in PAGES for line in _shell_lines(page) for target in re.findall(r"^make ([a-z-]+)", line)}
    assert named <= targets


@pytest.mark.parametrize("name", REFERENCE)
def test_generated_reference_pages_are_fresh(name: str) -> None:
    assert (ROOT / "docs" / "reference" / name).read_text() == REFERENCE[name](), "run: make reference"
