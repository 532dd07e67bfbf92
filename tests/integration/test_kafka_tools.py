"""Every command-line tool of Apache Kafka, unmodified: it works, or is refused with an error that names the missing API."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import threading
import time
import zipfile
from pathlib import Path

import pytest
from integration.kafka_tools import FILES, KAFKA_TOOLS, NOT_FOR_CLUSTERS, Result, Step, Tool, page
from integration.process_cluster import ProcessCluster

from stratalog_loadgen import java_tools

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 120
QUICK_START = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")
_MAIN = (b"\x01\x00\x04main", b"\x01\x00\x16([Ljava/lang/String;)V")
"""Name and type of a ``main`` as constants of a class file."""


@pytest.fixture(scope="module")
def shared_classes(cluster: ProcessCluster, java_tools: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Options that let each Java process load its classes from an archive, in half the time; none if there is no archive."""
    archive = tmp_path_factory.mktemp("java") / "classes.jsa"
    step = Step(what="list groups", arguments="--bootstrap-server {bootstrap} --list", prints="")
    main_class = "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand"
    run(main_class, step, {"bootstrap": cluster.bootstrap}, (f"-XX:ArchiveClassesAtExit={archive}",))
    return (f"-XX:SharedArchiveFile={archive}",) if archive.exists() else ()


@pytest.mark.integration
@pytest.mark.parametrize("tool", KAFKA_TOOLS, ids=lambda tool: tool.script)
def test_the_tool_works_or_is_refused_by_name(
    cluster: ProcessCluster, tool: Tool, shared_classes: tuple[str, ...], tmp_path: Path
) -> None:
    topic, group = cluster.new_topic(), cluster.new_group()
    cluster.fill(topic, "k", "l", "m")
    places = {"bootstrap": cluster.bootstrap, "topic": topic, "group": group, "dir": str(tmp_path)}
    for name, content in FILES.items():
        (tmp_path / name).write_text(content.format(**places))
    for step in tool.steps:
        expected = step.prints.format(**places) if step.result is Result.WORKS else re.escape(step.prints)
        deadline = time.monotonic() + TIMEOUT_S
        output, exit_code = run(step.main_class or tool.main_class, step, places, shared_classes)
        while step.is_late and not re.search(expected, output) and time.monotonic() < deadline:
            output, exit_code = run(step.main_class or tool.main_class, step, places, shared_classes)
        assert "NullPointerException" not in output, f"{step.what}:\n{output}"
        assert re.search(expected, output), f"{step.what} does not print {expected!r}:\n{output}"
        assert exit_code == step.exit_code, f"{step.what} ends with {exit_code}:\n{output}"


def run(main_class: str, step: Step, places: dict[str, str], options: tuple[str, ...]) -> tuple[str, int]:
    """Run the tool; return its output and its exit code."""
    program, *arguments = java_tools.java(main_class, *shlex.split(step.arguments.format(**places)), heap="256m")
    with subprocess.Popen(
        [program, *QUICK_START, *options, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            if step.is_endless:
                return _until_printed(process, step.prints.format(**places)), process.wait()
            output, _ = process.communicate(step.stdin, timeout=TIMEOUT_S)
            return output, process.returncode
        finally:
            process.kill()


def _until_printed(process: subprocess.Popen[str], expected: str) -> str:
    """Return the tool's output until it matches; then kill the tool."""
    overdue = threading.Timer(TIMEOUT_S, process.kill)
    overdue.start()
    printed = ""
    assert process.stdout is not None
    while not re.search(expected, printed) and (part := os.read(process.stdout.fileno(), 1 << 16)):
        printed += part.decode(errors="replace")
    overdue.cancel()
    process.kill()
    return printed


@pytest.mark.integration
@pytest.mark.usefixtures("java_tools")
def test_every_tool_of_the_distribution_is_in_the_table() -> None:
    jars = Path(java_tools.class_path()).parent
    programs = set()
    for jar in [*jars.glob("kafka-tools-4*.jar"), *jars.glob("kafka_2.13-*.jar")]:
        with zipfile.ZipFile(jar) as content:
            for name in content.namelist():
                if name.endswith(".class") and "$" not in name and all(mark in content.read(name) for mark in _MAIN):
                    programs.add(name.removesuffix(".class").replace("/", "."))
    assert programs == {tool.main_class for tool in KAFKA_TOOLS} | NOT_FOR_CLUSTERS.keys()


def test_the_page_of_kafkas_tools_is_fresh() -> None:
    command = "PYTHONPATH=tests python -m integration.kafka_tools > docs/reference/kafka-tools.md"
    assert (ROOT / "docs" / "reference" / "kafka-tools.md").read_text() == page(), f"run: {command}"
