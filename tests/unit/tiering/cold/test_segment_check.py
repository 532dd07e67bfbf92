"""The read-back before a commit refuses every object that is not exactly what was written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
from support.archive_writer import ArchiveWriter

from stratalog_core.errors import Corrupt
from stratalog_core.system import ThreadBackground
from stratalog_tiering.cold import segment_check
from stratalog_tiering.cold.manifest_source import ManifestSource
from stratalog_tiering.cold.segment_check import require_sound

Batches = Callable[..., list[bytes]]
CHANGES: Final[dict[str, Callable[[bytes], bytes]]] = {
    "shorter": lambda content: content[:-1],
    "longer": lambda content: content + b"x",
    "altered": lambda content: content[:100] + bytes([content[100] ^ 1]) + content[101:],
    "empty": lambda _: b"",
}


@pytest.mark.parametrize("whole_bytes_max", [0, segment_check.WHOLE_BYTES_MAX], ids=["by blocks", "whole"])
@pytest.mark.parametrize("change", CHANGES)
async def test_a_changed_object_is_refused(
    change: str,
    whole_bytes_max: int,
    writer: ArchiveWriter,
    store: Any,
    background: ThreadBackground,
    store_directory: Path,
    make_batches: Batches,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(segment_check, "WHOLE_BYTES_MAX", whole_bytes_max)
    _, entry = await writer.append(0, make_batches(0, [3] * 8))

    async def check() -> None:
        await require_sound(store, ManifestSource(store, background=background), entry, background, reads_at_once=4)

    await check()
    path = store_directory / entry.key
    content = CHANGES[change](path.read_bytes())
    path.chmod(0o644)
    path.write_bytes(content)
    with pytest.raises(Corrupt):
        await check()


@pytest.mark.parametrize("whole_bytes_max", [0, segment_check.WHOLE_BYTES_MAX], ids=["by blocks", "whole"])
async def test_every_byte_that_is_read_back_counts_against_the_rate(
    whole_bytes_max: int, writer: ArchiveWriter, store: Any, background: ThreadBackground, make_batches: Batches,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(segment_check, "WHOLE_BYTES_MAX", whole_bytes_max)
    _, entry = await writer.append(0, make_batches(0, [3] * 8))
    taken: list[int] = []

    async def take(length: int) -> None:
        taken.append(length)

    source = ManifestSource(store, background=background)
    await require_sound(store, source, entry, background, reads_at_once=4, take=take)
    assert sum(taken) == entry.object_bytes
