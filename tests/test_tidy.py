"""House rules that linters do not know."""

from __future__ import annotations

import ast
import dataclasses
import functools
import graphlib
import inspect
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grimp
import pytest

from stratalog.reference import METRIC_GROUPS, SECTIONS
from stratalog_core.metrics.groups import MetricGroup, definitions
from stratalog_metadata.topic_rules.topic_configs import TOPIC_CONFIG_KEYS, TopicConfigs

pytestmark = pytest.mark.computes
ROOT = Path(__file__).parents[1]
PACKAGES = [
    "core/stratalog_core",
    "metadata/stratalog_metadata",
    "bookies/stratalog_bookies",
    "tiering/stratalog_tiering",
    "broker/stratalog_broker",
    "pipeline/stratalog_pipeline",
    "cli/stratalog",
    "loadgen/stratalog_loadgen",
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


@pytest.mark.parametrize("package", [Path(package).name for package in PACKAGES])
def test_no_package_has_an_import_cycle(package: str) -> None:
    """Imports that only type checkers see count as imports."""
    graph = grimp.build_graph(package, exclude_type_checking_imports=False, cache_dir=None)
    imported = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    sorter = graphlib.TopologicalSorter(imported)
    try:
        sorter.prepare()
    except graphlib.CycleError as cycle:
        pytest.fail(f"import cycle: {' <- '.join(cycle.args[1])}")


def test_the_project_names_no_place_but_its_own() -> None:
    patterns = ("*.py", "*.md", "*.toml", "*.yml", "Makefile", "Dockerfile", "*.txt", "*.sh")
    folders = [entry for entry in ROOT.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
    below = [path for pattern in patterns for folder in folders for path in folder.rglob(pattern)]
    texts = [
        path
        for path in (*below, *(path for pattern in patterns for path in ROOT.glob(pattern)))
        if not any(part.startswith(".") for part in path.relative_to(ROOT).parts) and path != Path(__file__)
    ]
    assert [_name(path) for path in texts if _WORKPLACE.search(path.read_text())] == []


@pytest.mark.parametrize("module", sorted((ROOT / "tests").rglob("*.py")), ids=_name)
def test_importing_a_test_module_changes_no_other_module(module: Path) -> None:
    """Pytest imports all test modules into one process: what one of them patches on import is patched for all tests."""
    statements = ast.parse(module.read_text()).body
    imports = [statement for statement in statements if isinstance(statement, ast.Import | ast.ImportFrom)]
    imported = {(alias.asname or alias.name).split(".")[0] for statement in imports for alias in statement.names}
    for statement in statements:
        changed = statement.targets if isinstance(statement, ast.Assign) else []
        if isinstance(statement, ast.Expr) and isinstance(call := statement.value, ast.Call):
            changed = call.args[:1] if _last_name(call) == "setattr" else []
        names = {node.id for target in changed for node in ast.walk(target) if isinstance(node, ast.Name)}
        assert not names & imported, ast.unparse(statement)


@functools.cache
def _reads() -> dict[str, set[tuple[str, Path]]]:
    """By attribute: the names of the objects that it is read from, and the modules."""
    found = defaultdict(set)
    for module in MODULES:
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                found[node.attr].add((_last_name(node.value), module))
    return found


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Call):
        return _last_name(node.func)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


_SETTINGS = [(section, kind, field) for section, kind in SECTIONS for field in dataclasses.fields(kind)]


@pytest.mark.parametrize(("section", "kind", "field"), _SETTINGS, ids=[f"{section}.{f.name}" for section, _, f in _SETTINGS])
def test_every_setting_is_read(section: str, kind: type[Any], field: dataclasses.Field[Any]) -> None:
    """A setting that is accepted and read by nobody deceives whoever sets it."""
    own = Path(str(sys.modules[kind.__module__].__file__))
    read = {
        name
        for name, module in _reads()[field.name]
        if "settings" in name.lower() or name in _ASIDE or (name == "self" and module == own)
    }
    assert read, f"[{section}] {field.name} is read by nobody: give it an effect, or delete it"


def test_every_metric_group_is_documented() -> None:
    """A group that is in no table of the reference is found by nobody."""
    declared = {
        f"{'.'.join(module.relative_to(ROOT).with_suffix('').parts[1:])}.{node.name}"
        for module in MODULES
        for node in ast.walk(ast.parse(module.read_text()))
        if isinstance(node, ast.ClassDef) and "MetricGroup" in {_last_name(base) for base in node.bases}
    }
    assert {f"{group.__module__}.{group.__qualname__}" for _, groups in METRIC_GROUPS for group in groups} == declared


def test_metric_names_end_with_their_unit_and_are_unique() -> None:
    metrics = [metric for _, groups in METRIC_GROUPS for group in groups for metric in definitions(group)]
    names = [metric.name for metric in metrics]
    assert len(set(names)) == len(names)
    for metric in metrics:
        if metric.unit in ("bytes", "seconds"):
            assert metric.name.removesuffix("_total").endswith(f"_{metric.unit}")
        assert metric.meaning[0].isupper()


_GROUPS = [group for _, groups in METRIC_GROUPS for group in groups]


@functools.cache
def _metrics_set() -> set[tuple[str, str]]:
    """``(group, field)`` for each keyword of a constructor; ``("", field)`` for attributes that are changed or observed."""
    names = {group.__name__ for group in _GROUPS}
    found = set()
    for module in MODULES:
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(("", node.attr))
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
                found.update((node.func.id, keyword.arg or "") for keyword in node.keywords)
            elif isinstance(node, ast.Attribute) and node.attr == "observe" and isinstance(node.value, ast.Attribute):
                found.add(("", node.value.attr))
    return found


@pytest.mark.parametrize("group", _GROUPS, ids=lambda group: group.__name__)
def test_every_metric_is_set(group: type[MetricGroup]) -> None:
    """A metric that nobody counts is always 0, and deceives whoever watches it."""
    fields = {metric.field for metric in definitions(group)}
    assert {field for field in fields if not {("", field), (group.__name__, field)} & _metrics_set()} == set()


_ASIDE = {"_rules", "section"}
"""Under which names settings are passed on, besides ``settings``."""


def test_every_topic_config_has_an_effect_or_one_value() -> None:
    """The broker reads its parsed form, other components the name itself; what nobody reads takes no value but the true one."""
    tables = ROOT / "broker" / "stratalog_broker" / "configs" / "topic_configs.py"
    fields = {field.name for field in dataclasses.fields(TopicConfigs)}
    unread = {field for field in fields if not any(module != tables for _, module in _reads()[field])}
    assert unread == set()
    literals = {
        node.value
        for module in MODULES
        if module != tables
        for node in ast.walk(ast.parse(module.read_text()))
        if isinstance(node, ast.Constant)
    }
    parsed = {field.replace("_", ".") for field in fields} | {"message.timestamp.type"}
    names = {name for name, key in TOPIC_CONFIG_KEYS.items() if not key.is_fixed and name not in literals}
    assert {name for name in names if name.removeprefix("stratalog.") not in parsed} == set()


_PLAIN = (
    "core/stratalog_core",
    "broker/stratalog_broker",
    "metadata/stratalog_metadata",
    "bookies/stratalog_bookies",
    "tiering/stratalog_tiering",
    "pipeline/stratalog_pipeline",
    "pipeline/pyspark_stratalog",
    "cli/stratalog",
    "loadgen/stratalog_loadgen",
    "demo/stratalog_demo",
    "tests/simulation",
    "tests/chaos",
    "tests/integration",
)
_RIDDLE = re.compile(r"(?:\A|[.:;!?]\s+|\n\n)(?:Who|What|Whoever)\b")


def _docstrings(module: Path) -> Iterator[str]:
    """Docstrings of modules, classes and functions, and the strings behind attributes."""
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield inspect.cleandoc(node.value.value)


@pytest.mark.parametrize("package", _PLAIN)
def test_no_docstring_sentence_begins_with_who_or_what(package: str) -> None:
    """A sentence says its subject: "Return the offsets that …", not "What the group has committed"."""
    found = [(_name(module), text) for module in sorted((ROOT / package).rglob("*.py")) for text in _docstrings(module)]
    assert found
    assert [each for each in found if _RIDDLE.search(each[1])] == []


def test_background_loops_outlive_unexpected_errors() -> None:
    """An endless loop that is started as a task catches ``Exception`` itself, or is started through ``restarting``.

    Nobody awaits such a task before its role stops, so the error that ended it would be silent until then. The load generator's
    clients are awaited.
    """
    silent = []
    for module in (each for each in MODULES if "loadgen" not in each.parts):
        tree = ast.parse(module.read_text())
        endless = {node.name for node in ast.walk(tree) if isinstance(node, ast.AsyncFunctionDef) and _is_fragile(node)}
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            if ast.unparse(call.func).rpartition(".")[2] not in ("create_task", "ensure_future"):
                continue
            started = call.args[0]
            if isinstance(started, ast.Call) and ast.unparse(started.func).rpartition(".")[2] in endless:
                silent.append(f"{_name(module)}:{call.lineno}")
    assert silent == []


def _is_fragile(function: ast.AsyncFunctionDef) -> bool:
    """Whether it ends with an endless loop that an ``Exception`` can end, and nothing else."""
    last = function.body[-1]
    is_endless = isinstance(last, ast.While) and isinstance(last.test, ast.Constant)
    return (
        is_endless
        and not any(isinstance(node, ast.Return) for node in ast.walk(last))
        and not any(
            isinstance(node, ast.ExceptHandler) and node.type is not None and ast.unparse(node.type) == "Exception"
            for node in ast.walk(last)
        )
    )
