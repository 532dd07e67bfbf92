"""House rules that linters do not know."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = [
    "core/stratalog_core",
    "metadata/stratalog_metadata",
    "bookies/stratalog_bookies",
    "tiering/stratalog_tiering",
    "broker/stratalog_broker",
    "pipeline/stratalog_pipeline",
    "cli/stratalog",
    "demo/stratalog_demo",
]
MODULES = sorted(module for package in PACKAGES for module in (ROOT / package).rglob("*.py"))
FILE_LINES_MAX = 420
FUNCTION_LINES_MAX = 70
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "manager", "misc"}
_WORKPLACE = re.compile(r"/work/|/root/|\.\./shared")


def _name(module: Path) -> str:
    return str(module.relative_to(ROOT))


@pytest.mark.parametrize("module", MODULES, ids=_name)
def test_module_is_tidy(module: Path) -> None:
    """It says what it is, is not long, has no endless function, and its name means something."""
    source = module.read_text()
    tree = ast.parse(source)
    assert ast.get_docstring(tree), "a module begins by saying what it is"
    assert module.stem not in VAGUE_NAMES
    assert len(source.splitlines()) <= FILE_LINES_MAX
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    endless = [node.name for node in functions if (node.end_lineno or 0) - node.lineno > FUNCTION_LINES_MAX]
    assert endless == []


def test_the_project_names_no_place_but_its_own() -> None:
    texts = [
        path
        for pattern in ("*.py", "*.md", "*.toml", "*.yml", "Makefile", "Dockerfile", "*.txt", "*.sh")
        for path in ROOT.rglob(pattern)
        if not any(part.startswith(".") for part in path.relative_to(ROOT).parts) and path != Path(__file__)
    ]
    assert [_name(path) for path in texts if _WORKPLACE.search(path.read_text())] == []
