"""The record of the last run of each suite on both clusters, and the page that is made from it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from ecosystem.clusters import KAFKA, OWN
from ecosystem.suites import SUITES, Outcomes

from stratalog_loadgen.java_tools import KAFKA_VERSION

RECORD: Final = Path(__file__).parent / "record.json"
PAGE: Final = Path(__file__).parents[2] / "docs" / "reference" / "ecosystem.md"


def recorded() -> dict[str, Any]:
    """Return by suite the version, the commit and the outcomes on both clusters."""
    content: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    return content


def keep(suite: str, commit: str, outcomes: Mapping[str, Outcomes]) -> None:
    """Put the outcomes of a suite, by cluster, in place of its last ones."""
    run = {"version": SUITES[suite].version, "commit": commit, **outcomes}
    content = recorded() | {suite: run}
    RECORD.write_text(json.dumps({name: content[name] for name in SUITES if name in content}, indent=1) + "\n")


def differences(suite: str) -> dict[str, tuple[str, str]]:
    """Return the outcomes (Kafka's, ours) that differ, by step."""
    run = recorded()[suite]
    kafka, own = run[KAFKA], run[OWN]
    names = dict.fromkeys([*kafka, *own])
    pairs = {name: (kafka.get(name, "absent"), own.get(name, "absent")) for name in names}
    return {name: (theirs, ours) for name, (theirs, ours) in pairs.items() if theirs != ours}


_HEAD: Final = f"""# Tested clients and tools

Unmodified software from the package registries does the same on Stratalog as on Apache Kafka {KAFKA_VERSION}: each
suite runs on both, step by step, and a step with another outcome is listed with its reason. `make ecosystem` runs them all and
writes this page (`ONLY=kafkajs,sarama` runs some).

| software | version | same outcome | at commit |
| --- | --- | --- | --- |"""
_STEPS: Final = """
## Steps

The outcome of each step on Stratalog. All client libraries do the same steps, as far as they support them; other programs
have their own. An error can be the right outcome: the steps that provoke one name it, and two of kafka-python's tests
expect a broker 0 or sessions of three seconds, so they fail on Apache Kafka, too.
"""
_DIFFERENCES: Final = """
## Differences

| software | step | Apache Kafka | Stratalog | why |
| --- | --- | --- | --- | --- |"""


def page() -> str:
    """Return ``docs/reference/ecosystem.md``."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    runs = recorded()
    yield _HEAD
    for name, run in runs.items():
        same = len(run[KAFKA]) - len(differences(name))
        yield f"| {SUITES[name].software} | {run['version']} | {same} of {len(run[KAFKA])} | {run['commit']} |"
    yield _STEPS
    for name, run in runs.items():
        yield from _steps(SUITES[name].software, run[OWN])
    different = [(name, step, *pair) for name in runs for step, pair in differences(name).items()]
    if different:
        yield _DIFFERENCES
    for name, step, kafka, own in different:
        yield f"| {SUITES[name].software} | {step} | {kafka} | {own} | {SUITES[name].reasons.get(step, '')} |"


def _steps(software: str, outcomes: Outcomes) -> Iterator[str]:
    yield f"### {software}\n\n| step | outcome |\n| --- | --- |"
    for step, outcome in outcomes.items():
        yield f"| {step} | {outcome} |"
    yield ""
