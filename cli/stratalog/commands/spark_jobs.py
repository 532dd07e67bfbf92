"""The options that jobs on Spark have in common, and how a job starts Spark, shows its progress and prints its report."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from stratalog.output import json_option, print_json, print_rows, progress_bar
from stratalog.target import store_of, store_options
from stratalog_core.errors import Invalid, NotFound

if TYPE_CHECKING:
    from stratalog_pipeline.jobs.report import Report
    from stratalog_pipeline.options import ReadOptions

Command = TypeVar("Command", bound=Callable[..., Any])
_INSTALL = "jobs need Spark and the packages that render reports: pip install 'stratalog[jobs]'"
EVERY_TOPIC = ".*"
_LOCAL = "local[*,4]"
"""All cores, and four attempts of a task as on a cluster. `local[*]` has only one."""
_SUBMIT_PORT = "PYSPARK_GATEWAY_PORT"
"""Set by spark-submit, which then decides the master."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """Options of every job."""

    store: str
    topics: tuple[str, ...]
    pattern: str | None
    topic_ids: tuple[str, ...]
    master: str | None
    as_json: bool
    html: Path | None

    def source(self, **more: str) -> dict[str, str]:
        """Return the data source's options. Raises ``Invalid`` for two ways to choose topics."""
        if self.topics and self.pattern is not None:
            raise Invalid("name topics, or give --pattern, not both")
        chosen = {"subscribe": ",".join(self.topics)} if self.topics else {"subscribePattern": self.pattern or EVERY_TOPIC}
        return {"store": self.store, "topicIds": ",".join(self.topic_ids), "missingTail": "ignore", **chosen, **more}


def job_options(command: Command) -> Command:
    for option in (
        click.option(
            "--html", type=click.Path(dir_okay=False, path_type=Path), help="Also write the report as one HTML page with plots."
        ),
        json_option,
        click.option("--master", help="Spark master (default: local[*,4], or the one of spark-submit)."),
        click.option(
            "--topic-id",
            "topic_ids",
            multiple=True,
            help="Select the topic with this id if several have the same name; repeatable.",
        ),
        click.option("--pattern", metavar="REGEX", help="Select the topics whose whole name matches this regular expression."),
        store_options,
        click.argument("topics", nargs=-1, metavar="[TOPIC]…"),
    ):
        command = option(command)
    return command


def given_options(data: Path | None, store: str | None, **given: Any) -> JobOptions:
    """Return the options of ``job_options``. The default store is the cluster's.

    Raises as :func:`store_of`, and ``Invalid`` for a page that cannot be written when the job has ended.
    """
    options = JobOptions(store=store_of(data, store), **given)
    if options.html is not None and not options.html.parent.is_dir():
        raise Invalid(f"--html {options.html}: there is no directory {options.html.parent}")
    return options


def value_options(command: Command) -> Command:
    """Options that decode values, named as those of the data source."""
    for option in (
        click.option(
            "--value-mode", type=click.Choice(["FAILFAST", "PERMISSIVE"]),
            help="A value that cannot be decoded: FAILFAST fails the job; PERMISSIVE writes null, and the bytes to column"
            " _corrupt_record (default: FAILFAST).",
        ),
        click.option("--value-message", help="Full name of the Protobuf message (default: the first in the file)."),
        click.option("--value-subject", help="Subject of the schema in the registry (default: TOPIC-value)."),
        click.option("--value-registry", help="URL of a schema registry; each value starts with the id of its schema."),
        click.option("--value-schema-file", help="File with the schema."),
        click.option("--value-schema", help="The schema: SQL column definitions, JSON Schema or Avro JSON."),
        click.option(
            "--value-format", type=click.Choice(["json", "avro", "protobuf"]),
            help="Decode values into columns, with the schema that one of the next options names.",
        ),
    ):  # fmt: skip
        command = option(command)
    return command


@contextmanager
def modules(remedy: str = _INSTALL) -> Iterator[None]:
    """Turn a missing package into an error that names the extra."""
    try:
        yield
    except ModuleNotFoundError as missing:
        raise click.UsageError(f"{remedy} (no module {missing.name})", click.get_current_context()) from None


def read_options(options: dict[str, str]) -> ReadOptions:
    """Check the options and their topics before Spark starts, which takes seconds.

    Raises ``Invalid``, ``NotFound``, ``Unavailable``.
    """
    return options_and_topics(options)[0]


def options_and_topics(options: dict[str, str]) -> tuple[ReadOptions, list[str]]:
    """Return the options, and the topics that they select. Raises as :func:`read_options`."""
    from stratalog_pipeline.options import parse_options
    from stratalog_pipeline.scan_plan import wanted_topics

    parsed = parse_options(options)
    topics = wanted_topics(parsed)
    if not topics and options.get("subscribePattern", EVERY_TOPIC) != EVERY_TOPIC:
        raise NotFound(f"no topic in the bucket matches --pattern {options['subscribePattern']!r}")
    return parsed, topics


def master_of(where: JobOptions) -> str | None:
    return spark_master(where.master)


def spark_master(given: str | None) -> str | None:
    if _SUBMIT_PORT in os.environ:
        return given
    # Spark's Python workers must find this environment, whatever `python3` is.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    return given or _LOCAL


@contextmanager
def shown_progress(what: str) -> Iterator[Callable[[int, int], None]]:
    with progress_bar() as progress:
        task = progress.add_task("starting Spark", total=None)

        def update(done: int, total: int) -> None:
            progress.update(task, description=what, completed=done, total=total or None)

        yield update


def print_report(where: JobOptions, report: Report, tables: int | None = None) -> None:
    """Print the report and write its page. ``tables``: how many are printed for people; the page has all."""
    if where.as_json:
        print_json(report.document)
    else:
        for table in report.tables[:tables]:
            if table.rows:
                print_rows(table.rows, table.columns, title=table.title if len(report.tables) > 1 else "")
        for problem in report.problems:
            click.echo(problem, err=True)
        click.echo(", ".join(f"{name.replace('_', ' ')}: {value}" for name, value in report.facts.items()), err=True)
    # Last, because it may fail, and an erasure cannot be reported again.
    if where.html is not None:
        with modules():
            from stratalog_pipeline.jobs.page import render_page
        made_at = datetime.now(UTC).isoformat(" ", timespec="seconds")
        where.html.write_text(render_page(report, f"stratalog job {report.title.lower()}", made_at), encoding="utf-8")
