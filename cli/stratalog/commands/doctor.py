"""``stratalog doctor``: finds problems and names their remedies."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import click

from stratalog.exit_codes import ExitCode
from stratalog.health.cluster import check_metadata, check_processes, check_store
from stratalog.health.finding import Finding, Verdict, warn
from stratalog.health.machine import check_machine
from stratalog.health.metadata_files import check_metadata_files
from stratalog.local.state import load_state, state_path
from stratalog.output import json_option, print_json, print_rows
from stratalog.target import DEFAULT_DATA, found_data, metadata_of, metadata_options, store_of
from stratalog_core.errors import NotFound


@click.command()
@metadata_options
@click.option("--spark", "master", metavar="MASTER", help="Check Spark instead: local[2], spark://HOST:7077, yarn, …")
@json_option
@click.pass_context
def doctor(
    context: click.Context, data: Path | None, metadata: str | None, store: str | None, master: str | None, as_json: bool
) -> None:
    """Check this machine, a cluster (default: the one in ./data) and its store. Exits with 1 if a check fails.

    For a local cluster it also checks the files of stopped metadata nodes, read-only. With --spark it runs a task in every slot
    of Spark's executors and reports what is missing there; with --store, also whether they can read the store.
    """
    if master is not None:
        from stratalog.health.spark import check_spark

        _report(context, check_spark(master, store), as_json=as_json)
        return
    if not (metadata or store):
        data = found_data(data)
    if data and not data.is_dir():
        raise NotFound(f"{data} is not a directory: name the directory of a cluster")
    findings = list(check_machine(data or Path()))
    if data:
        findings += check_metadata_files(data, load_state(data) if state_path(data).exists() else None)
    if not (data or metadata or store):
        detail = f"./{DEFAULT_DATA} holds none: only this machine is checked"
        findings.append(warn("cluster", detail, "name one with --data, --metadata or --store"))
    findings += asyncio.run(_check_cluster(data if data and state_path(data).exists() else None, metadata, store))
    _report(context, findings, as_json=as_json)


def _report(context: click.Context, findings: Sequence[Finding], *, as_json: bool) -> None:
    rows = [dataclasses.asdict(finding) for finding in findings]
    if as_json:
        print_json({"findings": rows})
    else:
        print_rows(rows, ("check", "verdict", "detail", "remedy"))
        counts = Counter(finding.verdict for finding in findings)
        click.echo(f"{counts[Verdict.OK]} ok, {counts[Verdict.WARN]} warnings, {counts[Verdict.FAIL]} failures", err=True)
    if any(finding.verdict is Verdict.FAIL for finding in findings):
        context.exit(ExitCode.FAILED)


async def _check_cluster(data: Path | None, metadata: str | None, store: str | None) -> list[Finding]:
    findings = [check_processes(data, load_state(data))] if data else []
    if data or metadata:
        findings += await check_metadata(metadata_of(data, metadata))
    if data or store:
        findings.append(await check_store(store or store_of(data, None)))
    return findings
