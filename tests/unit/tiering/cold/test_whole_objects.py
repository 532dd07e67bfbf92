"""Small segments that are read at once, and objects that are longer or shorter than the history says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stratalog_core.errors import Corrupt
from stratalog_tiering.cold.manifest_source import ManifestSource
from stratalog_tiering.cold.whole_objects import ends_object, has_own_object, read_whole

Store = Any  # the FaultyStore of conftest.py, which cannot be imported
Writer = Any
Batches = Callable[..., list[bytes]]


async def test_a_segment_is_read_once_and_then_from_memory(store: Store, writer: Writer, make_batches: Batches) -> None:
    pointer, _ = await writer.append(0, make_batches(0, [3, 4]))
    (entry,) = (await ManifestSource(store).manifest(pointer)).segments
    assert has_own_object(entry)
    assert ends_object(entry)
    store.calls.clear()
    read = await read_whole(store, [entry])
    source = ManifestSource(read)
    footer = await source.footer(entry)
    blocks = [await read.get_range(entry.key, block.position, block.length) for block in footer.blocks]
    assert sum(map(len, blocks)) == entry.data_bytes
    assert await source.producers(entry) == ()
    assert [name for name, _ in store.calls] == ["get_range"]


@pytest.mark.parametrize(("change", "found"), [(-1, ""), (1, "at least "), (5000, "at least ")])
async def test_an_object_of_another_size_is_damage(
    store: Store, store_directory: Path, writer: Writer, make_batches: Batches, change: int, found: str
) -> None:
    pointer, _ = await writer.append(0, make_batches(0, [3, 4]))
    (entry,) = (await ManifestSource(store).manifest(pointer)).segments
    path = store_directory / entry.key
    content = path.read_bytes()
    path.write_bytes(content[:change] if change < 0 else content + bytes(change))
    size = len(content) + min(change, 1)
    for read in (read_whole(store, [entry]), ManifestSource(store).read_tail(entry)):
        with pytest.raises(Corrupt, match=f"has {found}{size} bytes, not {len(content)}") as raised:
            await read
        assert raised.value.detail["damage"] == "segment-size-mismatch"


async def test_a_missing_object_is_damage(store: Store, store_directory: Path, writer: Writer, make_batches: Batches) -> None:
    pointer, _ = await writer.append(0, make_batches(0, [3, 4]))
    (entry,) = (await ManifestSource(store).manifest(pointer)).segments
    (store_directory / entry.key).unlink()
    with pytest.raises(Corrupt, match="is missing"):
        await read_whole(store, [entry])
