"""``stratalog job …``: jobs over a bucket's history, on Spark: local here, or a cluster. Also a script for spark-submit."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click

from stratalog.exit_codes import ExitCode
from stratalog.output import json_option, print_json, print_rows, progress_bar
from stratalog_core.errors import Invalid, StratalogError

if TYPE_CHECKING:
    from stratalog_pipeline.jobs.report import Report
    from stratalog_pipeline.options import ReadOptions

Command = TypeVar("Command", bound=Callable[..., Any])
_INSTALL = "jobs need Spark and what draws their pages: pip install 'stratalog[jobs]'"
_SUBMIT_PORT = "PYSPARK_GATEWAY_PORT"
"""Set by spark-submit, which then decides the master."""


@click.group()
def job() -> None:
    """Run jobs over a bucket's history on Spark, without a broker.

    Local by default; `--master spark://…` runs on a cluster, and so does spark-submit with this module as its script.
    Credentials for S3 come from the AWS environment variables, of the driver and of the executors.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class _Where:
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
        chosen = {"subscribe": ",".join(self.topics)} if self.topics else {"subscribePattern": self.pattern or ".*"}
        return {"store": self.store, "topicIds": ",".join(self.topic_ids), "missingTail": "ignore", **chosen, **more}


def _job_options(command: Command) -> Command:
    for option in (
        click.option(
            "--html", type=click.Path(dir_okay=False, path_type=Path), help="Also write the report as one HTML page with plots."
        ),
        json_option,
        click.option("--master", help="Spark's master (default: local[*], or what spark-submit says)."),
        click.option("--topic-id", "topic_ids", multiple=True, help="Chooses between topics of the same name; repeatable."),
        click.option("--pattern", help="All topics whose whole name matches this regular expression."),
        click.option("--store", envvar="STRATALOG_STORE", required=True, help="The bucket: a directory or s3:// URL."),
        click.argument("topics", nargs=-1, metavar="[TOPIC]…"),
    ):
        command = option(command)
    return command


@job.command()
@_job_options
@click.option("--bootstrap", help="Also compare with these brokers (HOST:PORT).")
def audit(bootstrap: str | None, **given: Any) -> None:
    """Check that every offset is present once and unaltered: all topics, or the named ones.

    Reads every byte of every segment: block and batch checksums, offsets, manifests and their chain, and the Merkle tree of
    each partition, whose head is the digest. Reports records by day, late records and repeated batches, too.
    Exit code 7: there are problems.
    """
    where = _Where(**given)
    options = where.source(**({"kafka.bootstrap.servers": bootstrap} if bootstrap else {}))
    with _modules():
        from stratalog_pipeline.jobs.audit import audit as run_audit
        from stratalog_pipeline.jobs.report import audit_report
        from stratalog_pipeline.jobs.session import job_session
    parsed = _parsed(options)
    with job_session("audit", _master(where)) as spark, _progress("segments read") as on_progress:
        found = run_audit(spark, parsed, on_progress)
    report = audit_report(found)
    _print(where, report)
    if report.problems:
        click.get_current_context().exit(ExitCode.FINDINGS)


@job.command()
@_job_options
@click.option(
    "--depth",
    type=click.Choice(["blocks", "batches", "records"]),
    default="blocks",
    show_default=True,
    help="blocks: read indexes only; batches: headers too, for producers and compression; records: everything, for keys.",
)
@click.option(
    "--top", "heaviest", type=click.IntRange(1, 10_000), default=20, show_default=True, help="Producers and keys listed."
)
def usage(depth: Literal["blocks", "batches", "records"], heaviest: int, **given: Any) -> None:
    """Show what takes how much space: by topic, partition and day; by compression and producer; and which keys are heavy."""
    where = _Where(**given)
    with _modules():
        from stratalog_pipeline.jobs.report import usage_report
        from stratalog_pipeline.jobs.session import job_session
        from stratalog_pipeline.jobs.usage import usage as run_usage
    _parsed(where.source())
    with job_session("usage", _master(where)) as spark:
        found = run_usage(spark, where.source(), depth, heaviest)
    _print(where, usage_report(found))


@job.command()
@_job_options
@click.option("--to", "target", required=True, help="Where the Parquet files go: a directory or s3:// URL.")
@click.option("--headers", is_flag=True, help="Export headers, too.")
@click.option(
    "--isolation",
    type=click.Choice(["read_committed", "read_uncommitted"]),
    default="read_committed",
    show_default=True,
    help="read_committed leaves aborted transactions out.",
)
@click.option(
    "--file-mib", type=click.IntRange(1, 4096), default=128, show_default=True, help="Stored MiB of history per file."
)
@click.option("--verify", is_flag=True, help="Read each file back and compare it with the bucket, record by record.")
@click.option("--allow-gaps", is_flag=True, help="Go on if retention removed records before they were exported.")
def export(
    target: str, headers: bool, isolation: str, file_mib: int, verify: bool, allow_gaps: bool, **given: Any
) -> None:  # fmt: skip
    """Export history to Parquet, each record exactly once.

    Run it again to add what was offloaded since, or to finish a run that was interrupted: nothing is written twice. Files lie
    in topic=NAME/partition=N/ below the target.
    """
    where = _Where(**given)
    more = {"includeHeaders": str(headers).lower(), "isolationLevel": isolation, "splitBytes": str(file_mib * 1024 * 1024)}
    with _modules():
        from stratalog_pipeline.jobs.export import export as run_export
        from stratalog_pipeline.jobs.report import export_report
        from stratalog_pipeline.jobs.session import job_session
    parsed = _parsed(where.source(**more))
    with job_session("export", _master(where)) as spark, _progress("files written") as on_progress:
        result = run_export(spark, parsed, target, verify=verify, allow_gaps=allow_gaps, on_progress=on_progress)
    if not result.files:
        click.echo("nothing to export: the target has all that was offloaded", err=True)
    _print(where, export_report(result, target), tables=1)


@contextmanager
def _modules() -> Iterator[None]:
    """Turn a missing package into an error that names the extra."""
    try:
        yield
    except ModuleNotFoundError as missing:
        raise click.UsageError(f"{_INSTALL} (no module {missing.name})", click.get_current_context()) from None


def _parsed(options: dict[str, str]) -> ReadOptions:
    """Check the options before Spark starts, which takes seconds. Raises ``Invalid``."""
    from stratalog_pipeline.options import parse_options

    return parse_options(options)


def _master(where: _Where) -> str | None:
    if _SUBMIT_PORT in os.environ:
        return where.master
    # Spark's Python workers must find this environment, whatever `python3` is.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    return where.master or "local[*]"


@contextmanager
def _progress(unit: str) -> Iterator[Callable[[int, int], None]]:
    with progress_bar() as progress:
        task = progress.add_task(f"starting Spark; tasks with {unit}", total=None)

        def update(done: int, total: int) -> None:
            progress.update(task, description=f"tasks with {unit}", completed=done, total=total)

        yield update


def _print(where: _Where, report: Report, tables: int | None = None) -> None:
    """Print the report and write its page. ``tables``: how many are printed for people; the page has all."""
    if where.html is not None:
        with _modules():
            from stratalog_pipeline.jobs.page import render_page
        made_at = datetime.now(UTC).isoformat(" ", timespec="seconds")
        where.html.write_text(render_page(report, f"stratalog job {report.title.lower()}", made_at), encoding="utf-8")
    if where.as_json:
        print_json(report.document)
        return
    for table in report.tables[:tables]:
        if table.rows:
            print_rows(table.rows, table.columns, title=table.title if len(report.tables) > 1 else "")
    for problem in report.problems:
        click.echo(problem, err=True)
    click.echo(", ".join(f"{name.replace('_', ' ')}: {value}" for name, value in report.facts.items()), err=True)


if __name__ == "__main__":
    try:
        job()
    except StratalogError as failure:
        click.echo(f"stratalog: {failure.message}", err=True)
        sys.exit(ExitCode.FAILED)
