"""``stratalog job compact``: removes superseded records from the cold history of compacted topics."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import click

from stratalog.commands.spark_jobs import (
    given_options,
    job_options,
    master_of,
    modules,
    options_and_topics,
    print_report,
    shown_progress,
)
from stratalog.exit_codes import ExitCode
from stratalog.output import progress_bar
from stratalog.target import metadata_of, metadata_option
from stratalog_core.errors import Invalid
from stratalog_core.system import SystemClock


@click.command()
@job_options
@click.option("--dry-run", is_flag=True, help="Only count the superseded records and show the segments that have some.")
@metadata_option
def compact(dry_run: bool, data: Path | None, metadata: str | None, **given: Any) -> None:
    """Remove superseded records from the cold history of compacted topics: those whose key has a later committed record.

    Spark's executors find them by whole keys, however many keys there are. Each segment that has such records is rewritten
    without them, as by a worker's compaction, read back, verified and committed, while workers continue. The newest record of
    each key stays, tombstone or not: workers delete tombstones. If the job is interrupted, run it again to continue.

    It does not examine records that have hot copies or are younger than min.compaction.lag.ms, nor any records after them.

    Exits with 7 if superseded records remain: those in locked segments and in batches that cannot be read, or if the history
    was altered meanwhile by an erasure or a restore. Run it again when the locks have expired, or at once.
    """
    where = given_options(data, **given)
    addresses = metadata_of(data, metadata)
    if not where.topics and where.pattern is None:
        raise Invalid("name the topics to compact, or give --pattern")
    with modules():
        from stratalog_pipeline.jobs.compact import find_superseded
        from stratalog_pipeline.jobs.report_compaction import compaction_report
        from stratalog_pipeline.jobs.session import job_session
    from stratalog.tier.compacting import Removal, histories_to_read, remove_found

    source = where.source()
    topics = where.topics or options_and_topics(source)[1]
    read = asyncio.run(histories_to_read(addresses, where.store, topics))
    ends = {name: history.end_offset for name, history in read.items() if history.segments}
    # Only what has history in the bucket and, of topics with the same name, the cluster's.
    source.pop("subscribePattern", None)
    source["subscribe"] = ",".join(sorted({name.topic for name in ends}))
    source["topicIds"] = ",".join(sorted({str(name.topic_id) for name in ends}))
    with job_session("compact", master_of(where)) as spark, shown_progress("tasks that find superseded records") as on_progress:
        superseded = find_superseded(spark, source, ends, on_progress)
    read = {name: read[name] for name in ends}
    done = Removal()
    if not dry_run:
        segments = [
            superseded[name].count(each.base_offset, each.end_offset) > 0 for name in ends for each in read[name].segments
        ]
        with progress_bar() as bar:
            task = bar.add_task("rewriting segments", total=sum(segments))
            done = asyncio.run(remove_found(addresses, where.store, read, superseded, lambda: bar.advance(task)))
    report = compaction_report(
        read, superseded, done.compacted, done.refused, now_ms=SystemClock().wall_ms(), is_dry_run=dry_run
    )  # fmt: skip
    print_report(where, report)
    if report.problems:
        click.get_current_context().exit(ExitCode.FINDINGS)
