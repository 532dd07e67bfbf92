"""The documentation is true: links and anchors resolve; commands, make targets and files exist; generated pages are fresh."""

from __future__ import annotations

import ast
import functools
import re
import shlex
import subprocess
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import click
import decision_index
import pytest

from stratalog.app import stratalog
from stratalog.reference import PAGES as REFERENCE

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    page
    for page in ROOT.rglob("*.md")
    if not any(part.startswith(".") or part in {"data", "site"} for part in page.relative_to(ROOT).parts)
)
_LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
_FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
_SHELL = re.compile(r"^ *```(?:sh|console)(?: [^\n]*)?\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
_FILE = re.compile(r"[\w.*/-]+\.(?:py|md)")
_COMPONENTS = ["core", "metadata", "bookies", "tiering", "broker", "pipeline", "cli", "loadgen", "minio", "demo", "benchmarks"]
_HISTORY = ("docs/adr/", "docs/lab/", "CHANGELOG.md")
"""Pages that tell what was at their date: files that they name may have gone since."""


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@functools.cache
def _anchors(page: Path) -> set[str]:
    """The anchors of the page's headings, as GitHub and the site make them."""
    found: set[str] = set()
    for heading in _HEADING.findall(_FENCE.sub("", page.read_text())):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower().replace(" ", "-")
        slug = "".join(letter for letter in text if letter.isalnum() or letter in "-_")
        found.add(slug if slug not in found else f"{slug}_1")
    return found


def _is_broken(page: Path, link: str, anchor: str) -> bool:
    target = page.parent / link if link else page
    return not target.exists() or bool(anchor and target.suffix == ".md" and anchor not in _anchors(target))


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_and_anchors_lead_somewhere(page: Path) -> None:
    broken = [(link, anchor) for link, anchor in _LINK.findall(page.read_text()) if _is_broken(page, link, anchor)]
    assert broken == []


def test_pages_of_the_site_link_to_pages_of_the_site() -> None:
    """``docs/`` is built as a site: a link to a file outside of it would lead nowhere. Name such a file in backticks."""
    docs = ROOT / "docs"
    outside = [
        f"{_name(page)}: {link}"
        for page in PAGES
        if page.is_relative_to(docs)
        for link, _ in _LINK.findall(page.read_text())
        if link and not (page.parent / link).resolve().is_relative_to(docs)
    ]
    assert outside == []


@pytest.mark.parametrize("component", _COMPONENTS)
def test_every_component_explains_itself(component: str) -> None:
    assert (ROOT / component / "README.md").read_text().startswith("# ")


@functools.cache
def _tracked() -> frozenset[str]:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    files = [Path(line) for line in listed.stdout.splitlines() if (ROOT / line).exists()]
    return frozenset(str(path) for file in files for path in (file, *file.parents))


def _exists(name: str) -> bool:
    """Whether ``name`` is a path from the root or the end of one; stars and "…" stand for anything."""
    pattern = re.sub(r"^(\.\.?/)+", "", name).rstrip("/").replace("…", "*")
    if "*" not in pattern:
        return pattern in _path_ends()
    return any(fnmatch(path, pattern) or fnmatch(path, f"*/{pattern}") for path in _tracked())


@functools.cache
def _path_ends() -> frozenset[str]:
    parts = [path.split("/") for path in _tracked()]
    return frozenset("/".join(each[first:]) for each in parts for first in range(len(each)))


def _files_named(page: Path) -> Iterator[str]:
    top = {path for path in _tracked() if "/" not in path}
    for text in _CODE.findall(_FENCE.sub("", page.read_text())):
        for word in (each for each in text.split() if not each.rsplit("/", 1)[-1].isupper()):
            if _FILE.fullmatch(word.replace("…", "*")) or (
                "/" in word and word.split("/")[0] in top and _FILE.fullmatch(f"{word}.py")
            ):
                yield word


@pytest.mark.parametrize("page", [page for page in PAGES if not _name(page).startswith(_HISTORY)], ids=_name)
def test_files_that_are_named_exist(page: Path) -> None:
    assert [name for name in _files_named(page) if not _exists(name)] == []


def _shell_lines(page: Path) -> Iterator[str]:
    for block in _SHELL.findall(page.read_text()):
        for line in block.replace("\\\n", " ").splitlines():
            yield from (part.strip() for part in re.split(r"&&|\|", line.split(" #")[0]))


def _commands() -> list[tuple[str, list[str]]]:
    """All lines of shell blocks, and what stands in backticks, that begin with ``stratalog``."""
    found = []
    for page in PAGES:
        quoted = [] if _name(page).startswith(_HISTORY) else _CODE.findall(_FENCE.sub("", page.read_text()))
        lines = [*_shell_lines(page), *(text for text in quoted if not set(text) & set("|…[<$"))]
        found += [
            (_name(page), shlex.split(line)[1:]) for line in lines if re.match(r"stratalog [a-z]", line) and "…" not in line
        ]
    return found


def test_commands_in_the_docs_exist_with_their_options() -> None:
    wrong = [f"{page}: stratalog {' '.join(words)}: {fault}" for page, words in _commands() if (fault := _fault(list(words)))]
    assert wrong == []


def _fault(words: list[str]) -> str:
    """Return what is wrong with a command line, without running it; empty if nothing is."""
    group: click.Command = stratalog
    while isinstance(group, click.Group):
        if not words or words[0].startswith("-"):
            return ""
        name = words.pop(0)
        command = group.get_command(click.Context(group), name)
        if command is None:
            return f"no command {name!r}"
        group = command
    known = {option for parameter in group.params for option in [*parameter.opts, *parameter.secondary_opts, "--help"]}
    unknown = {word.split("=")[0] for word in words if word.startswith("--")} - known
    return f"no options {sorted(unknown)}" if unknown else ""


def test_the_spark_tutorial_shows_its_program_cell_by_cell() -> None:
    _, *cells = (ROOT / "docs/examples/spark_tutorial.py").read_text().split("# %%\n")
    shown = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs/tutorial/spark.md").read_text(), re.M | re.S)
    assert [cell.strip() for cell in cells] == [block.strip() for block in shown]


def test_tests_that_are_named_exist() -> None:
    page = ROOT / "docs" / "explanation" / "what-can-delete-a-record.md"
    named = set(re.findall(r"`(test_\w+)`", page.read_text()))
    sources = [ROOT / name for name in _tracked() if name.startswith("tests/") and "/test_" in name and name.endswith(".py")]
    defined = {name for source in sources for name in re.findall(r"def (test_\w+)", source.read_text())}
    assert named
    assert named - defined == set()


def test_make_targets_in_the_docs_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    quoted = (text for page in PAGES if not _name(page).startswith(_HISTORY) for text in _CODE.findall(page.read_text()))
    lines = [*(line for page in PAGES for line in _shell_lines(page)), *quoted]
    named = {target for line in lines for target in re.findall(r"^make ([a-z-]+)", line)}
    assert named <= targets


@pytest.mark.parametrize("name", REFERENCE)
def test_generated_reference_pages_are_fresh(name: str) -> None:
    assert (ROOT / "docs" / "reference" / name).read_text() == REFERENCE[name](), "run: make reference"


def _defined(tree: ast.Module, module: str) -> Iterator[str]:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    for node in tree.body:
        if isinstance(node, functions):
            yield f"{module}.{node.name}"
        elif isinstance(node, ast.ClassDef):
            yield from (f"{node.name}.{each.name}" for each in node.body if isinstance(each, functions))


def test_the_tour_names_each_function_once_and_all_exist() -> None:
    named = re.findall(r"^\| `(\w+\.\w+)` \| (\w+) \|", (ROOT / "docs/explanation/tour.md").read_text(), re.MULTILINE)
    found = {
        (name, component)
        for component in _COMPONENTS
        for module in (ROOT / component).rglob("*.py")
        for name in _defined(ast.parse(module.read_text()), module.stem)
    }
    assert [each for each in named if each not in found] == []
    assert len(named) == len(set(named)) > 30


def test_decisions_are_numbered_without_gaps_and_indexed() -> None:
    decisions = decision_index.read_decisions()
    assert (
        [each.number for each in decisions] == [int(each.file[:4]) for each in decisions] == list(range(1, len(decisions) + 1))
    )
    assert (decision_index.DECISIONS / "index.md").read_text() == decision_index.decisions_page(decisions), (
        "run: make reference"
    )
    assert (decision_index.NOTES / "index.md").read_text() == decision_index.notes_page(), "run: make reference"
