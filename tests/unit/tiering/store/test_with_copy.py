"""Readers get what they ask for while either store has it undamaged; damage in both is the first store's error."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.planted_damage import History, small_batch, write_history

from stratalog_core.errors import Corrupt, NoSuchObject, Refused, Unavailable
from stratalog_core.system import SystemClock, ThreadBackground
from stratalog_tiering.cold.archive import Archive
from stratalog_tiering.cold.reader import ColdReader, ColdReaderSettings
from stratalog_tiering.metrics import ColdReadMetrics
from stratalog_tiering.store import ObjectStore, StoreWithCopy, open_store
from stratalog_tiering.store.with_copy import AWAY_S

Store = Any  # the FaultyStore of conftest.py, which cannot be imported


class SteppedClock(SystemClock):
    """A monotonic clock that a test moves."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> History:
    return write_history(tmp_path_factory.mktemp("written") / "store")


@pytest.fixture
def history(written: History, store_directory: Path) -> History:
    return written.copied_to(store_directory)


@pytest.fixture
def second(written: History, tmp_path: Path) -> History:
    return written.copied_to(tmp_path / "second")


@pytest.fixture
def second_store(second: History, background: ThreadBackground) -> ObjectStore:
    return open_store(str(second.directory), background=background, clock=SystemClock(), random=random.Random(4))


async def read_all(store: ObjectStore) -> tuple[bytes, int]:
    """All records, found as a reader without metadata finds them, and the reads that the second copy answered."""
    archive = Archive(store)
    pointer = await archive.pointer(await archive.topic("flights"), 0)
    assert pointer is not None
    reader = ColdReader(store, ColdReaderSettings(), SystemClock())
    try:
        content, offset = b"", pointer.start_offset
        while offset < pointer.end_offset:
            run = await reader.fetch(pointer, offset, 2**30, 10)
            content, offset = content + b"".join(run.batches), run.end_offset
        (metrics,) = (group for group in reader.metrics() if isinstance(group, ColdReadMetrics))
        return content, metrics.second_copy_reads
    finally:
        await reader.close()


EXPECTED = b"".join(small_batch(index * 24 + 3 * number) for index in range(12) for number in range(8))
DAMAGE: list[tuple[str, Callable[[History], object]]] = [
    ("block altered", lambda each: each.flip(each.segment(3), 100)),
    ("segment missing", lambda each: each.remove(each.segment(3))),
    ("segment cut", lambda each: each.cut(each.segment(3))),
    ("footer altered", lambda each: each.flip(each.segment(3), -60)),
    ("page missing", lambda each: each.remove(each.directory / each.manifest.pages[0].key)),
    ("page altered", lambda each: each.flip(each.directory / each.manifest.pages[0].key, 60)),
    ("manifest altered", lambda each: each.flip(each.manifest_path, 60)),
    ("manifest missing", lambda each: each.remove(each.manifest_path)),
]


@pytest.mark.parametrize("plant", [plant for _, plant in DAMAGE], ids=[name for name, _ in DAMAGE])
async def test_readers_see_no_damage_while_the_second_copy_is_sound(
    history: History, store: Store, second_store: ObjectStore, plant: Callable[[History], object]
) -> None:
    plant(history)
    with pytest.raises(Corrupt):
        await read_all(store)
    content, second_reads = await read_all(StoreWithCopy(store, second_store, SystemClock()))
    assert content == EXPECTED
    assert second_reads > 0


async def test_a_sound_first_store_is_read_alone(history: History, store: Store, second_store: ObjectStore) -> None:
    assert await read_all(StoreWithCopy(store, second_store, SystemClock())) == (EXPECTED, 0)


async def test_damage_in_both_is_the_first_stores_error(
    history: History, second: History, store: Store, second_store: ObjectStore
) -> None:
    history.flip(history.segment(3), 100)
    second.remove(second.segment(3))
    with pytest.raises(Corrupt, match="block 0"):
        await read_all(StoreWithCopy(store, second_store, SystemClock()))


async def test_a_store_that_refuses_reads_is_read_from_its_second_copy(
    history: History, store: Store, second_store: ObjectStore
) -> None:
    both = StoreWithCopy(store, second_store, SteppedClock())
    store.before = lambda name, key: Refused("access denied") if name in ("get", "get_range", "list", "head") else None
    assert (await read_all(both))[0] == EXPECTED


async def test_a_store_that_is_away_is_asked_again_after_a_while(
    history: History, store: Store, second_store: ObjectStore
) -> None:
    clock = SteppedClock()
    both = StoreWithCopy(store, second_store, clock)
    store.before = lambda name, key: Unavailable("away") if name in ("get", "get_range", "list", "head") else None
    assert (await read_all(both))[0] == EXPECTED
    assert len(store.calls) == 1, "each read would wait for the first store's timeouts"
    store.before = lambda name, key: None
    clock.now = AWAY_S - 1
    before = both.second_reads
    await read_all(both)
    assert both.second_reads > before
    clock.now = AWAY_S + 1
    after = both.second_reads
    await read_all(both)
    assert both.second_reads == after


async def test_damage_of_the_second_copy_is_not_returned_while_the_first_store_was_away(
    history: History, second: History, store: Store, second_store: ObjectStore
) -> None:
    second.flip(second.segment(3), 100)
    both = StoreWithCopy(store, second_store, SteppedClock())
    failures = iter([Unavailable("away")])
    store.before = lambda name, key: next(failures, None)
    assert (await read_all(both))[0] == EXPECTED


async def test_the_whole_first_bucket_may_be_lost(
    history: History, store: Store, second_store: ObjectStore, store_directory: Path
) -> None:
    shutil.rmtree(store_directory)
    both = StoreWithCopy(store, second_store, SystemClock())
    key = history.entries[0].key
    assert await both.get(key) == await second_store.get(key)
    assert (await both.head(key)).key == key
    with pytest.raises(NoSuchObject):
        await both.get("segments/none")


async def test_writes_go_to_the_first_store_alone(history: History, store: Store, second_store: ObjectStore) -> None:
    both = StoreWithCopy(store, second_store, SystemClock())
    await both.put("probe/1", [b"x"])
    assert await store.get("probe/1") == b"x"
    with pytest.raises(NoSuchObject):
        await second_store.get("probe/1")
    await both.delete(["probe/1"])
    assert [key async for key in both.list_keys("probe/")] == []
