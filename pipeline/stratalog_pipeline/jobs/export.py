"""Export: writes cold history to Parquet files, each record exactly once. Each run adds what was offloaded since the last.

A run's plan cuts partitions into offset ranges, one file each, and is recorded before the first file is written
(``export_journal.py``). A file appears whole or not at all, under a name that its range determines, so a task that is retried
and a run that is resumed write nothing twice. An interrupted run shows only complete files.

Files are stored in ``topic=NAME/partition=N/``, as Spark, pyarrow and DuckDB expect, without columns topic and partition.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final
from uuid import UUID

from pyspark.sql import SparkSession

from stratalog_core.bounded_map import bounded_map
from stratalog_core.errors import Conflict, Invalid, NotFound, StratalogError
from stratalog_pipeline.bucket import Bucket
from stratalog_pipeline.catalog import History, load_history, load_segments
from stratalog_pipeline.jobs.export_files import FileTask, typed_columns, write_file
from stratalog_pipeline.jobs.export_journal import (
    REQUESTS_MAX,
    Journal,
    Plan,
    PlannedFile,
    PlannedHistory,
    WrittenFile,
    is_file_key,
)
from stratalog_pipeline.jobs.lease import reader_lease
from stratalog_pipeline.jobs.session import OnProgress, make_directory, run_tasks
from stratalog_pipeline.options import ReadOptions
from stratalog_pipeline.planning import Cut, OffsetRange, PartitionName, SegmentSlice, Split, grouped, plan_splits
from stratalog_pipeline.scan_plan import wanted_partitions
from stratalog_pipeline.value_formats.values import Values, check_same_values, resolve
from stratalog_tiering.cold.proofs import prove_growth
from stratalog_tiering.format.manifest import Manifest, SegmentEntry
from stratalog_tiering.store import Upload

FILES_PER_TASK: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportResult:
    """``files`` are those of the last run and, if it ``was_resumed``, of the interrupted one that was finished before it."""

    run: int
    files: tuple[WrittenFile, ...] = field(default=())
    was_resumed: bool = False

    @property
    def records(self) -> int:
        return sum(file.records for file in self.files)

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


def export(
    spark: SparkSession,
    options: ReadOptions,
    target: str,
    *,
    verify: bool = False,
    allow_gaps: bool = False,
    has_place: bool = False,
    on_progress: OnProgress = lambda done, total: None,
) -> ExportResult:
    """Export what is in the bucket and not in ``target`` yet, a URL like the store's. An interrupted run is finished first.

    ``has_place``: files have topic and partition as columns, too, as a table of Iceberg needs. Raises ``NotFound`` if retention
    has removed records before they were exported, unless ``allow_gaps`` leaves them out; ``Invalid`` if the target holds an
    export with other options, of another topic of the same name, or of records that the bucket's history never had;
    ``Conflict`` if another export runs; ``Corrupt``, ``Unavailable``.
    """
    make_directory(target)

    def next_run() -> ExportResult:
        return _export_run(
            spark, options, target, verify=verify, allow_gaps=allow_gaps, has_place=has_place, on_progress=on_progress
        )

    done = next_run()
    if not done.was_resumed:
        return done
    more = next_run()
    return ExportResult(run=more.run, files=(*done.files, *more.files), was_resumed=True)


def _export_run(
    spark: SparkSession,
    options: ReadOptions,
    target: str,
    *,
    verify: bool,
    allow_gaps: bool,
    has_place: bool,
    on_progress: OnProgress,
) -> ExportResult:
    """Finish an interrupted run, which may be of other topics, or else plan one and do it."""
    with Bucket(options.store) as bucket, Bucket(target) as out, ExitStack() as leased:
        journal = Journal(out)
        check_same_options(journal, options, has_place=has_place)
        plan = journal.unfinished()
        was_resumed = plan is not None
        leased.enter_context(reader_lease(bucket, options, "export", {file.topic_id for file in plan.files} if plan else ()))
        if plan is None:
            plan = plan_export(bucket, options, journal, allow_gaps=allow_gaps, has_place=has_place)
            if not plan.files:
                return ExportResult(run=journal.last_run)
            journal.begin(plan)
        present = out.run(_present(out, plan)) if was_resumed else ()
        tasks = export_tasks(bucket, plan, verify=verify, allow_gaps=allow_gaps, present=present)
        with conflict_if_finished(out, journal.last_run):
            written = run_tasks(
                spark, options.store, write_tasks(tasks, options.split_bytes), partial(_write_all, target), on_progress
            )
        files = [file for group in written for file in group]
        finish_run(out, journal, files)
        return ExportResult(run=journal.last_run, files=tuple(files), was_resumed=was_resumed)


def check_same_options(journal: Journal, options: ReadOptions, *, has_place: bool = False) -> None:
    """Raise ``Invalid`` unless the target's first run had the same options that decide what is in a file."""
    earlier = journal.first_plan()
    if earlier is None:
        return
    if (earlier.include_headers, earlier.read_committed) != (options.include_headers, options.read_committed):
        raise Invalid(
            f"the target was begun with headers {'in' if earlier.include_headers else 'ex'}cluded and isolation level "
            f"{'read_committed' if earlier.read_committed else 'read_uncommitted'}; use the same, or another target"
        )
    if earlier.has_place != has_place:
        raise Invalid(
            "the target was begun for Iceberg: name its table again" if earlier.has_place else
            "the target was begun without a table of Iceberg, and its files lack columns for one; use another target"
        )  # fmt: skip

    check_same_values(earlier.values, options)


@contextmanager
def conflict_if_finished(out: Bucket, run: int) -> Iterator[None]:
    """Raise ``Conflict`` instead of an error of the run if another process has finished it, which ends our uploads.

    A run that another process writes cannot be told from one that was interrupted, so both write it.
    """
    try:
        yield
    except StratalogError as failure:
        if run in Journal(out).finished_runs():
            raise Conflict(
                f"another export to the same target has finished run {run}, which this one was writing, too; run this again"
            ) from failure
        raise


def finish_run(out: Bucket, journal: Journal, files: list[WrittenFile]) -> None:
    """Record that the run is complete. All of its files are complete, so an open upload belongs to an attempt that died."""
    _abort_uploads(out, journal.last_run)
    journal.finish(files)


async def _present(out: Bucket, plan: Plan) -> set[str]:
    """Return the keys of the plan's files that are written."""
    return {file.key for file in plan.files} & {info.key async for info in out.store.list("topic=")}


def _abort_uploads(out: Bucket, run: int) -> None:
    """Abort the uploads that an interrupted run, or tasks that died, left behind.

    Not before the run is complete: an upload may be one of another process that writes the run, too. Others below the target
    are not ours, such as those of a job that maintains the table of Iceberg there, or of a later run, if another process has
    finished this one.
    """
    uploads = out.run(_uploads_of_files(out))
    if uploads:
        # After the listing: a run has a plan before it has uploads.
        later = Journal(out).keys_after(run)
        out.run(bounded_map(out.store.abort_upload, [each for each in uploads if each.key not in later], REQUESTS_MAX))


async def _uploads_of_files(out: Bucket) -> list[Upload]:
    return [upload async for upload in out.store.list_uploads() if is_file_key(upload.key)]


def plan_export(bucket: Bucket, options: ReadOptions, journal: Journal, *, allow_gaps: bool, has_place: bool = False) -> Plan:
    """Plan the next run: what was offloaded after the ranges in the journal. Raises as :func:`export`."""
    names = wanted_partitions(bucket, replace(options, client={}))
    known = journal.topic_ids()
    for name in names:
        if known.get(name.topic, name.topic_id) != name.topic_id:
            raise Invalid(
                f"the target holds topic {name.topic!r} with the id {known[name.topic]}, the bucket has one with the id "
                f"{name.topic_id}; export it to another target"
            )
    ends = journal.ends()
    # A partition that had no history, or did not exist, when its topic was exported: nothing of it was.
    known_ids = {topic_id for topic_id, _ in journal.histories()}
    ends |= {
        place: 0 for name in names if (place := (name.topic_id, name.partition)) not in ends and name.topic_id in known_ids
    }
    histories = bucket.run(bounded_map(partial(load_history, bucket), names, REQUESTS_MAX))
    before = journal.histories()
    planned = bucket.run(bounded_map(partial(_same_history, bucket, before), histories, REQUESTS_MAX))
    wanted = [(history, _next_range(history, ends, allow_gaps=allow_gaps)) for history in histories]
    cut = Cut(split_bytes=options.split_bytes, records_max=options.records_per_split_max)
    splits = plan_splits(bucket.run(bounded_map(partial(_with_segments, bucket), wanted, REQUESTS_MAX)), cut)
    return Plan(
        include_headers=options.include_headers,
        read_committed=options.read_committed,
        files=tuple(_planned(split) for split in splits),
        has_place=has_place,
        manifest_versions=_versions(histories),
        values=_values(journal, options),
        histories=tuple(each for each in planned if each is not None and not _is_known(each, before)),
    )


def _values(journal: Journal, options: ReadOptions) -> Values | None:
    """How values are decoded: as in the first run, so that all files have the same columns."""
    earlier = journal.first_plan()
    if earlier is not None:
        return earlier.values
    return resolve(options) if options.values is not None else None


def _versions(histories: Iterable[History]) -> dict[str, dict[int, int]]:
    versions: dict[str, dict[int, int]] = {}
    for history in histories:
        if history.pointer is not None:
            versions.setdefault(history.name.topic, {})[history.name.partition] = history.pointer.manifest_version
    return versions


async def _same_history(
    bucket: Bucket, before: Mapping[tuple[UUID, int], PlannedHistory], history: History
) -> PlannedHistory | None:
    """Return what a plan records of a history. Raises ``Invalid`` if it does not begin with the one that was planned before.

    Only an operator makes it another one, by the decision on a fork or a restore up to a point. It may have come to be as long
    as before, with other records at the same offsets.
    """
    name = history.name
    if history.pointer is None:
        return None
    manifest = await bucket.source.manifest(history.pointer)
    earlier = before.get((name.topic_id, name.partition))
    if earlier is not None and manifest.settled_version >= earlier.version and not await _grew(bucket, manifest, earlier):
        raise Invalid(
            f"{name}: offsets up to {earlier.end} were exported, and an operator has set the history back since, so that they "
            "have other records now; export to another target",
            topic=name.topic,
            partition=name.partition,
        )
    return PlannedHistory(
        topic_id=name.topic_id,
        partition=name.partition,
        end=manifest.end_offset,
        version=manifest.version,
        tree_size=manifest.tree.size,
        tree_head=manifest.tree.head.hex(),
    )


def _is_known(each: PlannedHistory, before: Mapping[tuple[UUID, int], PlannedHistory]) -> bool:
    """Whether an earlier plan has all of the history. There may be many plans, and partitions without new records."""
    earlier = before.get((each.topic_id, each.partition))
    return earlier is not None and (earlier.end, earlier.tree_head) == (each.end, each.tree_head)


async def _grew(bucket: Bucket, manifest: Manifest, earlier: PlannedHistory) -> bool:
    """Whether the history begins with the earlier one."""
    if not earlier.tree_size:
        return True
    try:
        growth = await prove_growth(bucket.source, manifest, earlier.tree_size)
    except Invalid:
        return False  # It never had so many batches, or is shorter.
    return growth.holds(bytes.fromhex(earlier.tree_head))


def _next_range(history: History, ends: Mapping[tuple[UUID, int], int], *, allow_gaps: bool) -> OffsetRange:
    name, held = history.name, history.offsets
    exported = ends.get((name.topic_id, name.partition))
    if exported is None:
        return held
    _check_end(history, exported)
    if held.first > exported and not allow_gaps:
        raise _gap(name, OffsetRange(first=exported, end=held.first))
    first = max(held.first, exported)
    return OffsetRange(first=first, end=max(first, held.end))


def _check_end(history: History, exported: int) -> None:
    """Raise ``Invalid`` if the history ends before ``exported``: offsets may come to have other records than the files."""
    name, end = history.name, history.offsets.end
    if end < exported:
        raise Invalid(
            f"{name}: offsets up to {exported} were exported, and the bucket ends at {end}: it was restored to an earlier "
            "time; export to another target",
            topic=name.topic,
            partition=name.partition,
        )


def _gap(name: PartitionName, lost: OffsetRange) -> NotFound:
    return NotFound(
        f"{name}: offsets {lost.first}..{lost.end} were not exported yet, and retention or a deletion has removed them; allow "
        "gaps to leave them out",
        topic=name.topic,
        partition=name.partition,
    )


async def _with_segments(
    bucket: Bucket, wanted: tuple[History, OffsetRange]
) -> tuple[PartitionName, OffsetRange, list[SegmentEntry]]:
    history, offsets = wanted
    return history.name, offsets, await load_segments(bucket, history, offsets)


def _planned(split: Split) -> PlannedFile:
    """Return the file of a split. Splits own blocks; a file owns offsets, so that a merge moves no border."""
    return PlannedFile(
        topic=split.name.topic,
        topic_id=split.name.topic_id,
        partition=split.name.partition,
        first=max(split.offsets.first, split.slices[0].blocks_from),
        end=min(split.offsets.end, split.slices[-1].blocks_end),
    )


def export_tasks(
    bucket: Bucket, plan: Plan, *, verify: bool, allow_gaps: bool, present: Collection[str] = ()
) -> list[FileTask]:
    """Return what is to be read for each file, from the newest manifests: since the plan was made, segments may have merged.

    ``present``: keys of files that are written. Raises ``NotFound`` for a range of another file that retention has removed,
    unless ``allow_gaps``, and ``Invalid`` if the history ends before the files do.
    """
    by_partition: defaultdict[PartitionName, list[PlannedFile]] = defaultdict(list)
    for file in plan.files:
        by_partition[file.name].append(file)
    columns = tuple(name for name in typed_columns(plan.values) if plan.has_place or name not in ("topic", "partition"))
    if not plan.include_headers:
        columns = tuple(name for name in columns if name != "headers")

    planned = {(each.topic_id, each.partition): each for each in plan.histories}

    async def tasks_of(name: PartitionName) -> list[FileTask]:
        history, files = await load_history(bucket, name), by_partition[name]
        await _same_history(bucket, planned, history)
        _check_held(history, files, present=present, allow_gaps=allow_gaps)
        segments = await load_segments(bucket, history, OffsetRange(first=files[0].first, end=files[-1].end))
        return [
            FileTask(
                file=file,
                split=_split(file, segments),
                columns=columns,
                read_committed=plan.read_committed,
                verify=verify,
                values=plan.values,
            )
            for file in files
        ]

    return [task for tasks in bucket.run(bounded_map(tasks_of, list(by_partition), REQUESTS_MAX)) for task in tasks]


def _check_held(history: History, files: Sequence[PlannedFile], *, present: Collection[str], allow_gaps: bool) -> None:
    """Raise ``NotFound`` or ``Invalid``, as :func:`export_tasks`, if the bucket lacks what the files need."""
    if history.pointer is None:
        # The topic was deleted, and its grace period is over.
        start = files[-1].end
    else:
        start = history.offsets.first
        _check_end(history, files[-1].end)
    lost = [file for file in files if file.first < start and file.key not in present]
    if lost and not allow_gaps:
        raise _gap(history.name, OffsetRange(first=lost[0].first, end=min(lost[-1].end, start)))


def _split(file: PlannedFile, segments: Iterable[SegmentEntry]) -> Split:
    """Return the split with exactly the records of the file. Blocks at its borders are read for the adjacent files, too."""
    slices = tuple(
        SegmentSlice(segment=entry, blocks_from=entry.base_offset, blocks_end=entry.end_offset)
        for entry in segments
        if entry.base_offset < file.end and entry.end_offset > file.first
    )
    return Split(name=file.name, offsets=file.offsets, slices=slices)


def write_tasks(files: Sequence[FileTask], task_bytes: int) -> list[tuple[FileTask, ...]]:
    """Join small files into tasks of about ``task_bytes``, so that a thousand quiet partitions are not a thousand tasks."""
    sized = ((each, sum(_share(piece.segment, each.file) for piece in each.split.slices), 1) for each in files)
    return grouped(sized, task_bytes, FILES_PER_TASK)


def _share(entry: SegmentEntry, file: PlannedFile) -> int:
    inside = min(entry.end_offset, file.end) - max(entry.base_offset, file.first)
    return entry.data_bytes * inside // (entry.end_offset - entry.base_offset)


def _write_all(target: str, bucket: Bucket, tasks: Sequence[FileTask]) -> list[WrittenFile]:
    with Bucket(target) as out:
        return [write_file(bucket, out, task) for task in tasks]
