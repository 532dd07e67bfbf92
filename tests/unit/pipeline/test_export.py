"""Export's plan, journal and files, without Spark."""

from __future__ import annotations

import asyncio
import gc
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING
from unittest.mock import AsyncMock

import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest

from stratalog_core.batches.records import Record, build_batch
from stratalog_core.errors import Conflict, Corrupt, Invalid, NoSuchObject, NotFound, Refused
from stratalog_pipeline.bucket import Bucket
from stratalog_pipeline.jobs import export_files
from stratalog_pipeline.jobs.export import (
    check_same_options,
    conflict_if_finished,
    export_tasks,
    finish_run,
    plan_export,
    write_tasks,
)
from stratalog_pipeline.jobs.export_files import FileTask, write_file
from stratalog_pipeline.jobs.export_journal import Journal, Plan, WrittenFile
from stratalog_pipeline.options import ReadOptions, parse_options
from stratalog_tiering.cold.manifest_source import ManifestSource
from stratalog_tiering.format.object_keys import manifests_prefix

if TYPE_CHECKING:
    from unit.pipeline.conftest import ColdBucket


def record(offset: int) -> Record:
    return Record(
        offset=offset,
        timestamp_ms=1_700_000_000_000 + offset,
        key=None if offset % 3 == 0 else f"k{offset}".encode(),
        value=None if offset % 5 == 0 else Random(offset).randbytes(offset % 50),
        headers=(("number", str(offset).encode()), ("none", None)) if offset % 4 == 0 else (),
    )


def batches(first: int, count: int) -> list[bytes]:
    return [bytes(build_batch([record(o) for o in range(base, base + 5)])) for base in range(first, first + count, 5)]


def options_for(bucket: ColdBucket, **more: str) -> ReadOptions:
    return parse_options({"path": bucket.url, "subscribe": "flights", "splitBytes": "1500", **more})


class Exporter:
    """Exports in this process, as the tasks do."""

    def __init__(self, bucket: ColdBucket, target: Path, options: ReadOptions) -> None:
        target.mkdir(exist_ok=True)
        self._stack = ExitStack()
        self.bucket = self._stack.enter_context(Bucket(bucket.url))
        self.out = self._stack.enter_context(Bucket(str(target)))
        self.options = options

    def plan(self, *, allow_gaps: bool = False) -> tuple[Journal, Plan]:
        journal = Journal(self.out)
        plan = plan_export(self.bucket, self.options, journal, allow_gaps=allow_gaps)
        return journal, plan

    def tasks(self, plan: Plan, *, verify: bool = False) -> list[FileTask]:
        return export_tasks(self.bucket, plan, verify=verify, allow_gaps=False)

    def write(self, tasks: list[FileTask]) -> list[WrittenFile]:
        return [write_file(self.bucket, self.out, task) for task in tasks]

    def run(self) -> list[WrittenFile]:
        journal, plan = self.plan()
        journal.begin(plan)
        written = self.write(self.tasks(plan))
        finish_run(self.out, journal, written)
        return written

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def exporter(cold_bucket: ColdBucket, target: Path) -> Iterator[Exporter]:
    cold_bucket.add_topic("flights", [[batches(0, 60), batches(60, 40)], [batches(0, 30)], []], block_bytes=600)
    made = Exporter(cold_bucket, target, options_for(cold_bucket, includeHeaders="true"))
    yield made
    made.close()


def offsets(target: Path) -> dict[int, list[int]]:
    """Return the exported offsets by partition, as pyarrow reads them."""
    table = pyarrow.dataset.dataset(str(target), format="parquet", partitioning="hive").to_table()
    found: dict[int, list[int]] = {}
    for row in table.select(["partition", "offset"]).to_pylist():
        found.setdefault(row["partition"], []).append(row["offset"])
    return {partition: sorted(listed) for partition, listed in found.items()}


def test_files_hold_the_records(exporter: Exporter, target: Path) -> None:
    written = exporter.run()
    assert offsets(target) == {0: list(range(100)), 1: list(range(30))}
    assert sum(file.records for file in written) == 130
    assert len(written) > 4
    rows = pq.read_table(target / written[0].key, partitioning=None).to_pylist()
    for row in rows:
        made = record(row["offset"])
        assert (row["key"], row["value"], row["timestampType"]) == (made.key, made.value, 0)
        assert int(row["timestamp"].timestamp() * 1000 + 0.5) == made.timestamp_ms
        assert [(header["key"], header["value"]) for header in row["headers"] or ()] == list(made.headers)
    about = pq.read_schema(target / written[0].key).metadata
    assert (about[b"stratalog.first"], about[b"stratalog.end"]) == (b"0", str(written[0].end).encode())


def test_a_large_file_has_several_row_groups(cold_bucket: ColdBucket, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_files, "ROW_GROUP_BYTES", 1)
    many = [bytes(build_batch([record(o) for o in range(base, base + 1000)])) for base in range(0, 25_000, 1000)]
    cold_bucket.add_topic("flights", [[many]])
    exporter = Exporter(cold_bucket, target, options_for(cold_bucket, splitBytes="100000000"))
    journal, plan = exporter.plan()
    journal.begin(plan)
    (written,) = exporter.write(exporter.tasks(plan, verify=True))
    exporter.close()
    assert written.records == 25_000
    assert pq.ParquetFile(target / written.key).num_row_groups > 1
    assert offsets(target) == {0: list(range(25_000))}


def test_the_next_run_exports_only_what_came_since(cold_bucket: ColdBucket, exporter: Exporter, target: Path) -> None:
    exporter.run()
    _, nothing = exporter.plan()
    assert nothing.files == ()
    cold_bucket.extend("flights", 0, batches(100, 20))
    _, more = exporter.plan()
    assert [(each.partition, each.end) for each in more.histories] == [(0, 120)]
    assert {(file.first, file.end) for file in exporter.run()} <= {
        (first, end) for first in range(100, 120) for end in range(121)
    }
    assert offsets(target)[0] == list(range(120))


def test_an_interrupted_run_is_finished_and_nothing_is_there_twice(exporter: Exporter, target: Path) -> None:
    journal, plan = exporter.plan()
    journal.begin(plan)
    exporter.write(exporter.tasks(plan)[::2])
    again = Journal(exporter.out)
    assert again.unfinished() == plan
    written = exporter.write(exporter.tasks(plan))
    again.finish(written)
    assert offsets(target) == {0: list(range(100)), 1: list(range(30))}
    assert [file.key for file in written] == [file.key for file in plan.files]
    assert Journal(exporter.out).unfinished() is None


def test_the_upload_of_a_task_that_died_is_not_left_behind(exporter: Exporter, target: Path) -> None:
    """Spark runs the task again, so the run itself goes on, and nobody else would abort the upload."""
    _, plan = exporter.plan()
    store, ours = exporter.out.store, plan.files[0].key
    others = {"data/part-0.parquet", f"nested/{ours}"}

    async def begin_and_die() -> None:
        for key in (ours, *others):
            upload = await store.create_upload(key, export_files.PART_BYTES)
            await store.put_part(upload, 1, [b"PAR1"])

    async def open_uploads() -> set[str]:
        return {upload.key async for upload in store.list_uploads()}

    exporter.out.run(begin_and_die())
    assert exporter.out.run(open_uploads()) == {ours, *others}
    exporter.run()
    assert exporter.out.run(open_uploads()) == others, "those of other writers go on"
    assert offsets(target) == {0: list(range(100)), 1: list(range(30))}


def test_the_uploads_of_the_next_run_are_not_those_of_this_one(
    cold_bucket: ColdBucket, exporter: Exporter, target: Path
) -> None:
    """Two processes write a run. One finishes it, and the next run has begun when the other one is as far."""
    journal, plan = exporter.plan()
    journal.begin(plan)
    slower = Journal(exporter.out)
    finish_run(exporter.out, journal, exporter.write(exporter.tasks(plan)))
    cold_bucket.extend("flights", 0, batches(100, 20))
    journal, more = exporter.plan()
    journal.begin(more)
    store, ours = exporter.out.store, more.files[0].key
    upload = exporter.out.run(store.create_upload(ours, export_files.PART_BYTES))
    died = exporter.out.run(store.create_upload(plan.files[0].key, export_files.PART_BYTES))
    part = exporter.out.run(store.put_part(upload, 1, [b"PAR1"]))
    finish_run(exporter.out, slower, exporter.write(exporter.tasks(plan)))
    assert exporter.out.run(store.complete_upload(upload, [part])) is not None
    with pytest.raises(NoSuchObject):
        exporter.out.run(store.put_part(died, 1, [b"PAR1"]))


def test_a_file_that_differs_from_the_bucket_is_not_taken_for_the_export(exporter: Exporter, target: Path) -> None:
    journal, plan = exporter.plan()
    journal.begin(plan)
    tasks = exporter.tasks(plan)
    first = exporter.write(tasks[:1])[0]
    path = target / first.key
    table = pq.ParquetFile(path).read()
    pq.write_table(table.slice(1), path)
    with pytest.raises(Corrupt, match="does not hold the records"):
        exporter.write(tasks[:1])
    path.write_bytes(b"PAR1 something else")
    with pytest.raises(Corrupt, match="is not the export"):
        exporter.write(tasks[:1])


def test_a_merge_between_plan_and_run_changes_no_file(cold_bucket: ColdBucket, exporter: Exporter, target: Path) -> None:
    journal, plan = exporter.plan()
    journal.begin(plan)
    before = exporter.write(exporter.tasks(plan)[:2])
    cold_bucket.merge("flights", 0, batches(0, 100))
    written = exporter.write(exporter.tasks(plan))
    assert [file.records for file in written[:2]] == [file.records for file in before]
    assert offsets(target) == {0: list(range(100)), 1: list(range(30))}


def test_of_two_exports_at_once_one_fails(exporter: Exporter) -> None:
    first, plan = exporter.plan()
    second, same = exporter.plan()
    first.begin(plan)
    with pytest.raises(Conflict, match="another export"):
        second.begin(same)


def test_of_two_exports_that_finish_a_run_one_says_so(exporter: Exporter) -> None:
    journal, plan = exporter.plan()
    journal.begin(plan)
    with pytest.raises(Corrupt), conflict_if_finished(exporter.out, 1):
        raise Corrupt("a block is damaged")
    finish_run(exporter.out, Journal(exporter.out), exporter.write(exporter.tasks(plan)))
    is_done = "another export to the same target has finished run 1"
    with pytest.raises(Conflict, match=is_done), conflict_if_finished(exporter.out, 1):
        raise NotFound("the upload does not exist")


def test_records_that_retention_removed_before_their_export_are_an_error(cold_bucket: ColdBucket, exporter: Exporter) -> None:
    exporter.run()
    cold_bucket.extend("flights", 0, batches(100, 20), batches(120, 20), drop_below=120)
    with pytest.raises(NotFound, match=r"flights-0: offsets 100\.\.120 were not exported yet"):
        exporter.plan()
    _, plan = exporter.plan(allow_gaps=True)
    assert (plan.files[0].first, plan.files[-1].end) == (120, 140)


def test_a_bucket_that_ends_before_what_was_exported_is_refused(
    cold_bucket: ColdBucket, exporter: Exporter, tmp_path: Path
) -> None:
    journal, plan = exporter.plan()
    journal.begin(plan)
    exporter.write(exporter.tasks(plan)[:1])
    restored = type(cold_bucket)(tmp_path / "restored")
    topic_id = restored.add_topic("flights", [[batches(0, 60)], [batches(0, 30)], []])
    assert {topic_id} == set(journal.topic_ids().values())
    too_short = r"flights-0: offsets up to 100 were exported, and the bucket ends at 60"
    with Bucket(restored.url) as bucket:
        exporter.options = options_for(restored, includeHeaders="true")
        with pytest.raises(Invalid, match=too_short):
            export_tasks(bucket, plan, verify=False, allow_gaps=True)
        finish_run(exporter.out, journal, exporter.write(exporter.tasks(plan)))
        with pytest.raises(Invalid, match=too_short):
            plan_export(bucket, exporter.options, Journal(exporter.out), allow_gaps=True)
        restored.extend("flights", 0, batches(60, 50))
        more = plan_export(bucket, exporter.options, Journal(exporter.out), allow_gaps=True)
        assert [(file.first, file.end) for file in more.files] == [(100, 110)]


def test_offsets_that_came_to_have_other_records_are_not_taken_for_exported_ones(
    cold_bucket: ColdBucket, exporter: Exporter
) -> None:
    journal, plan = exporter.plan()
    journal.begin(plan)
    cold_bucket.cut("flights", 0, 60)
    cold_bucket.extend("flights", 0, keyed(60, 80))
    set_back = r"flights-0: offsets up to 100 were exported, and an operator has set the history back since"
    with pytest.raises(Invalid, match=set_back):
        export_tasks(exporter.bucket, plan, verify=False, allow_gaps=True)
    finish_run(exporter.out, journal, [])
    with pytest.raises(Invalid, match=set_back):
        exporter.plan(allow_gaps=True)


def test_a_history_that_was_cut_beyond_what_was_exported_goes_on(
    cold_bucket: ColdBucket, exporter: Exporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter.run()
    cold_bucket.extend("flights", 0, batches(100, 20))
    cold_bucket.cut("flights", 0, 100)
    cold_bucket.extend("flights", 0, keyed(100, 40))
    cold_bucket.merge("flights", 0, [*batches(0, 100), *keyed(100, 40)])
    _, plan = exporter.plan()
    assert (plan.files[0].first, plan.files[-1].end) == (100, 140)
    monkeypatch.setattr(ManifestSource, "tree_pages", AsyncMock(side_effect=Refused("expired")))
    with pytest.raises(Refused, match="expired"):
        exporter.plan()


def test_what_retention_removed_of_a_partition_without_files_is_an_error(cold_bucket: ColdBucket, exporter: Exporter) -> None:
    cold_bucket.extend("flights", 1, batches(30, 10), drop_below=40)
    assert {file.partition for file in exporter.run()} == {0}
    cold_bucket.extend("flights", 1, batches(40, 10), batches(50, 10), drop_below=50)
    with pytest.raises(NotFound, match=r"flights-1: offsets 40\.\.50 were not exported yet"):
        exporter.plan()


def test_an_interrupted_run_ends_although_its_topic_was_deleted(
    cold_bucket: ColdBucket, exporter: Exporter, target: Path
) -> None:
    journal, plan = exporter.plan()
    journal.begin(plan)
    before = exporter.write(exporter.tasks(plan)[:2])
    present = {file.key for file in before}
    for number in range(2):
        shutil.rmtree(cold_bucket.root / manifests_prefix(plan.files[0].topic_id, number))
    with pytest.raises(NotFound, match=rf"flights-0: offsets {before[-1].end}\.\.100 were not exported yet"):
        export_tasks(exporter.bucket, plan, verify=False, allow_gaps=False, present=present)
    written = exporter.write(export_tasks(exporter.bucket, plan, verify=False, allow_gaps=True, present=present))
    assert written[:2] == before
    assert [file.records for file in written[2:]] == [0] * (len(plan.files) - 2)
    finish_run(exporter.out, journal, written)


def test_an_interrupted_run_ends_although_retention_retention_removed_its_first_files(
    cold_bucket: ColdBucket, exporter: Exporter
) -> None:
    journal, plan = exporter.plan()
    journal.begin(plan)
    cold_bucket.extend("flights", 0, batches(100, 20), batches(120, 20), drop_below=120)
    tasks = export_tasks(exporter.bucket, plan, verify=False, allow_gaps=True)
    assert not tasks[0].split.slices, "nothing is left of the first file"
    joined = write_tasks(tasks, exporter.options.split_bytes)
    assert [task for group in joined for task in group] == tasks
    written = exporter.write(tasks)
    assert all((file.records > 0) == (file.partition != 0) for file in written)
    finish_run(exporter.out, journal, written)
    assert Journal(exporter.out).unfinished() is None


def test_other_options_or_another_topic_of_the_name_are_refused(cold_bucket: ColdBucket, exporter: Exporter) -> None:
    exporter.run()
    with pytest.raises(Invalid, match="headers included"):
        check_same_options(Journal(exporter.out), options_for(cold_bucket))
    again = cold_bucket.add_topic("flights", [[batches(0, 10)]])
    exporter.options = options_for(cold_bucket, includeHeaders="true", topicIds=str(again))
    with pytest.raises(Invalid, match="export it to another target"):
        exporter.plan()


def test_a_journal_that_is_not_one_is_corrupt(exporter: Exporter, target: Path) -> None:
    exporter.run()
    (target / "_stratalog" / "00000001.plan.json").write_bytes(b"{}")
    with pytest.raises(Corrupt, match="not the journal"):
        Journal(exporter.out)


def test_nothing_that_is_read_is_left_in_arrows_memory(exporter: Exporter) -> None:
    journal, plan = exporter.plan()
    journal.begin(plan)
    gc.collect()  # What an earlier test left may go at any time.
    before = pa.total_allocated_bytes()
    exporter.write(exporter.tasks(plan))
    assert pa.total_allocated_bytes() == before


def keyed(first: int, count: int) -> list[bytes]:
    """Batches. Every tenth record has a key of its own; the others have seven keys, of which a compaction keeps the last."""
    records = [
        Record(offset=o, timestamp_ms=o, key=b"own%d" % o if o % 10 == 0 else b"k%d" % (o % 7), value=b"v%d" % o)
        for o in range(first, first + count)
    ]
    return [bytes(build_batch(records[at : at + 5])) for at in range(0, count, 5)]


def test_an_interrupted_run_keeps_files_whose_records_retention_has_removed(
    cold_bucket: ColdBucket, exporter: Exporter, target: Path
) -> None:
    journal, plan = exporter.plan()
    journal.begin(plan)
    tasks = exporter.tasks(plan)
    before = exporter.write([task for task in tasks if task.file.partition == 0 and task.file.end <= 60])
    assert before[-1].end == 60
    cold_bucket.extend("flights", 0, batches(100, 20), drop_below=60)
    present = {file.key for file in before}
    written = exporter.write(export_tasks(exporter.bucket, plan, verify=False, allow_gaps=False, present=present))
    assert written[: len(before)] == before
    finish_run(exporter.out, journal, written)
    assert offsets(target) == {0: list(range(100)), 1: list(range(30))}


def test_a_file_that_retention_came_before_is_a_gap_although_others_are_written(
    cold_bucket: ColdBucket, exporter: Exporter
) -> None:
    journal, plan = exporter.plan()
    journal.begin(plan)
    first = exporter.write(exporter.tasks(plan)[:1])[0]
    cold_bucket.extend("flights", 0, batches(100, 20), drop_below=60)
    with pytest.raises(NotFound, match=rf"flights-0: offsets {first.end}\.\.60 were not exported yet"):
        export_tasks(exporter.bucket, plan, verify=False, allow_gaps=False, present={first.key})


def test_an_interrupted_run_keeps_files_whose_history_was_compacted_since(cold_bucket: ColdBucket, target: Path) -> None:
    cold_bucket.add_topic("flights", [[keyed(0, 60), keyed(60, 40)]], block_bytes=600)
    exporter = Exporter(cold_bucket, target, options_for(cold_bucket))
    try:
        journal, plan = exporter.plan()
        journal.begin(plan)
        before = exporter.write(exporter.tasks(plan)[:1])[0]
        assert before.records == before.end > 10
        cold_bucket.compact("flights", 0)
        task = exporter.tasks(plan)[0]
        assert exporter.write([task]) == [before]
        path = target / before.key
        whole = pq.ParquetFile(path).read()
        for altered in (
            pa.concat_tables([whole.slice(0, 10), whole.slice(11)]),  # Offset 10 is in the bucket, and not in the file.
            whole.set_column(whole.schema.get_field_index("value"), "value", pa.array([b"x"] * len(whole), pa.binary())),
            pa.concat_tables([whole, whole.slice(0, 1)]),
        ):
            pq.write_table(altered.cast(whole.schema), path)
            with pytest.raises(Corrupt, match="does not hold the records"):
                exporter.write([task])
    finally:
        exporter.close()


def test_earlier_plans_are_read_side_by_side(exporter: Exporter, monkeypatch: pytest.MonkeyPatch) -> None:
    """An export that is kept current for a year has thousands."""
    runs, running, most = 20, 0, 0
    journal, plan = exporter.plan()
    for _ in range(runs):
        journal.begin(plan)
        journal.finish([])
    get = exporter.out.store.get

    async def counted(key: str) -> bytes:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return await get(key)

    monkeypatch.setattr(exporter.out.store, "get", counted)
    assert Journal(exporter.out).last_run == runs
    assert most == runs
