"""``stratalog job erase``: erases the records of a data-protection request from cold history."""

from __future__ import annotations

import asyncio
import dataclasses
from codecs import BOM_UTF8
from pathlib import Path
from typing import Any

import click

from stratalog.commands.spark_jobs import (
    given_options,
    job_options,
    master_of,
    modules,
    print_report,
    read_options,
    shown_progress,
)
from stratalog.deletion import confirm, yes_option
from stratalog.exit_codes import ExitCode
from stratalog.output import progress_bar
from stratalog.parameters import Integer, argument_bytes
from stratalog.target import metadata_of, metadata_option
from stratalog_core.errors import Invalid
from stratalog_tiering.config import TieringSettings
from stratalog_tiering.core.erasure import Selection

GRACE_MS = next(field.default for field in dataclasses.fields(TieringSettings) if field.name == "grace_ms")


@click.command()
@job_options
@click.option("--key", "keys", multiple=True, metavar="TEXT", help="Erase the records with this key, as UTF-8; repeatable.")
@click.option(
    "--key-hex", "hex_keys", multiple=True, metavar="HEX", help="Erase the records with this key, in hexadecimal; repeatable."
)
@click.option(
    "--keys-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File with one key per line, as UTF-8.",
)
@click.option(
    "--header", "headers", multiple=True, metavar="NAME=VALUE", help="Erase the records with this header; repeatable."
)
@click.option("--dry-run", is_flag=True, help="Only count the records and show where they are; needs no cluster.")
@click.option(
    "--delete-now",
    is_flag=True,
    help="Delete the replaced objects at once instead of after the grace period, except those under a reader's lease. Readers"
    " without a lease may fail.",
)
@click.option(
    "--grace-ms", type=Integer(min=0), default=GRACE_MS, show_default=True,
    help="The workers' [tiering] grace_ms, to report when the replaced objects are deleted.",
)  # fmt: skip
@yes_option
@metadata_option
def erase(
    keys: tuple[str, ...],
    hex_keys: tuple[str, ...],
    keys_file: Path | None,
    headers: tuple[str, ...],
    dry_run: bool,
    delete_now: bool,
    grace_ms: int,
    yes: bool,
    data: Path | None,
    metadata: str | None,
    **given: Any,
) -> None:
    """Erase the records with the given keys or headers from cold history. All other records and all offsets are kept.

    Spark's executors search the history. Each segment that has such records is rewritten without them, read back, verified and
    committed. All other batches stay byte-identical, which the partition's Merkle tree proves. If the job is interrupted, run
    it again to continue.

    Exits with 7 if some records remain: those with hot copies, and those in locked segments. Run it again when they are cold
    or the locks have expired. It also exits with 7 if a client wrote a batch whose records cannot be decoded: that batch is
    not changed and may contain matching records. So it does if a restore or the decision on a fork has changed the history
    since the search: run it again.
    """
    where = given_options(data, **given)
    selection = _selection(keys, hex_keys, keys_file, headers)
    addresses = [] if dry_run else metadata_of(data, metadata)
    if not where.topics and where.pattern is None:
        raise Invalid("name the topics to erase from, or give --pattern")
    with modules():
        from stratalog_pipeline.jobs.erase import ranges_of, search
        from stratalog_pipeline.jobs.report_erasure import erasure_report
        from stratalog_pipeline.jobs.session import job_session
    from stratalog.tier.erasing import EraseFrom, Erasure, erase_found

    options = read_options(where.source())
    with job_session("erase", master_of(where)) as spark, shown_progress("tasks that search segments") as on_progress:
        found = search(spark, options, selection, on_progress)
    done = Erasure()
    if not dry_run:
        records = sum(each.records for each in found.found)
        if found.found:
            confirm(f"Erase {records} records in {len(found.found)} segments? They cannot be restored.", yes=yes)
        origin = EraseFrom(addresses=addresses, store=where.store, grace_ms=grace_ms, deletes_now=delete_now)
        with progress_bar() as bar:
            task = bar.add_task("rewriting segments", total=len(found.found))
            done = asyncio.run(
                erase_found(
                    origin, options.wanted, found.histories, ranges_of(found.found), selection, lambda: bar.advance(task)
                )
            )
    report = erasure_report(
        found, done.erased, done.refused, done.objects, done.hot, done.unlisted, done.changed, is_dry_run=dry_run
    )  # fmt: skip
    print_report(where, report)
    if report.problems:
        click.get_current_context().exit(ExitCode.FINDINGS)


def _selection(keys: tuple[str, ...], hex_keys: tuple[str, ...], keys_file: Path | None, headers: tuple[str, ...]) -> Selection:
    """Return the keys and headers to erase. Raises ``Invalid`` if there is none, or one is malformed."""
    wanted = [argument_bytes(key) for key in keys]
    try:
        wanted += [bytes.fromhex(text) for text in hex_keys]
    except ValueError as malformed:
        raise Invalid(f"--key-hex must be hexadecimal digits: {malformed}") from malformed
    if keys_file is not None:
        wanted += [line for line in keys_file.read_bytes().removeprefix(BOM_UTF8).splitlines() if line]
    pairs = {_header(text) for text in headers}
    if not wanted and not pairs:
        raise Invalid("nothing to erase is named: give --key, --key-hex, --keys-file or --header")
    return Selection(keys=frozenset(wanted), headers=frozenset(pairs))


def _header(text: str) -> tuple[bytes, bytes]:
    """Return name and value of ``NAME=VALUE``; a header's name may be empty. Raises ``Invalid``."""
    name, equals, value = text.partition("=")
    if not equals:
        raise Invalid(f"header {text!r} is not NAME=VALUE")
    return argument_bytes(name), argument_bytes(value)
