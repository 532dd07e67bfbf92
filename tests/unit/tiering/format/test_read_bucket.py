"""The example reader, written from the documents alone, reads every golden file and whole buckets, and refuses damage."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.archive_writer import ArchiveWriter

from stratalog_core.batches.batch import crc_matches, iterate_headers
from stratalog_core.batches.checkpoint import ProducerEntry
from stratalog_tiering.format.footer import parse_footer, parse_signatures
from stratalog_tiering.format.segment import plain_block

ROOT = Path(__file__).parents[4]
GOLDEN = ROOT / "tests/golden/tiering"
EXAMPLE = ROOT / "docs/examples/read_bucket.py"
Batches = Callable[..., list[bytes]]


def load_example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("read_bucket", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


example = load_example()


def read(content: bytes) -> dict[str, Any]:
    """Any stored object, by what it begins with."""
    if content[:1] == b"{":
        return dict(json.loads(content))
    if content[:8] in example.FRAMES:
        return dict(example.read_framed(content))
    footer = example.read_footer(content)
    return dict(footer) | {"batches": list(example.read_segment(content, footer))}


def golden(pattern: str) -> list[Any]:
    return [pytest.param(path.read_bytes(), id=path.stem) for path in sorted(GOLDEN.glob(pattern))]


def test_it_is_short_and_uses_nothing_of_ours() -> None:
    source = EXAMPLE.read_text()
    assert len(source.splitlines()) < 300
    assert "import stratalog" not in source
    assert "from stratalog" not in source


REFUSED = ("pre_", "segment_encrypted")


@pytest.mark.parametrize("content", [one for one in golden("*.bin") + golden("*.json") if not str(one.id).startswith(REFUSED)])
def test_every_golden_file_is_read(content: bytes) -> None:
    assert read(content)


@pytest.mark.parametrize("content", golden("pre_release_*.bin"))
def test_layouts_from_before_the_first_release_are_refused(content: bytes) -> None:
    with pytest.raises(example.Unsupported, match="version"):
        read(content)


def test_an_encrypted_segment_is_refused_by_name() -> None:
    with pytest.raises(example.Unsupported, match="aes-256-gcm"):
        read((GOLDEN / "segment_encrypted.bin").read_bytes())


@pytest.mark.parametrize("content", [one for one in golden("segment*.bin") if not str(one.id).startswith(REFUSED)])
def test_it_reads_the_same_segment_as_the_product(content: bytes) -> None:
    footer, found = parse_footer(content, len(content)), read(content)
    plain = b"".join(plain_block(content[block.position : block.end_position], block) for block in footer.blocks)
    assert b"".join(found["batches"]) == plain
    assert [len(batch) for batch in found["batches"]] == [header.size_bytes for _, header in iterate_headers(plain)]
    assert all(crc_matches(plain[at : at + header.size_bytes], header) for at, header in iterate_headers(plain))
    assert found["cluster_id"] == footer.cluster_id
    assert found["min_timestamp_ms"] == footer.min_timestamp_ms
    signatures = parse_signatures(content, len(content))
    assert [tuple(one) for one in found["signatures"]] == [(one.algorithm, one.key_id, one.value) for one in signatures]


FLIPPED = ["segment_producers.bin", "segment_zstd.bin", "manifest.bin", "page.bin"]


@given(st.integers(0, 2**16), st.integers(0, 7), st.sampled_from(FLIPPED))
def test_any_flipped_bit_is_refused(position: int, bit: int, name: str) -> None:
    content = bytearray((GOLDEN / name).read_bytes())
    content[position % len(content)] ^= 1 << bit
    with pytest.raises((example.Damaged, example.Unsupported)):
        read(bytes(content))


def pages_in(store_directory: Path) -> list[Path]:
    return list(store_directory.glob("pages/*/*/*"))


@pytest.mark.parametrize(("zstd_level", "version_objects"), [(None, True), (3, False)])
async def test_it_prints_the_records_of_a_whole_bucket(
    new_writer: Callable[..., ArchiveWriter],
    store_directory: Path,
    make_batches: Batches,
    capsys: pytest.CaptureFixture[str],
    zstd_level: int | None,
    version_objects: bool,
) -> None:
    writer = new_writer(zstd_level=zstd_level, version_objects=version_objects)
    for index in range(12):
        await writer.append(0, make_batches(index * 24, [3] * 8), producers=[ProducerEntry(7, 1)])
    assert pages_in(store_directory)
    example.main(str(store_directory), "flights")
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["offset"] for record in printed] == list(range(288))
    assert {(record["topic"], record["partition"]) for record in printed} == {("flights", 0)}
    example.main(str(store_directory), "another")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("deletion", "is_listed"),
    [
        ({"cluster_id": "c1", "deletion_version": 4}, True),
        ({"cluster_id": "c1", "deletion_version": 6}, False),
        ({"cluster_id": "c2", "deletion_version": 4}, False),
        ({}, False),
    ],
)
def test_a_late_marker_does_not_hide_a_topic_that_was_detached(
    tmp_path: Path, deletion: dict[str, Any], is_listed: bool
) -> None:
    """As object-keys.md says: only a deletion that its cluster had undone before the topic was detached is ignored."""
    detached = {"name": "flights", "detached": {"cluster_id": "c1", "topic_version": 5}}
    for topic, descriptor in (("aa", detached), ("bb", {"name": "clicks"}), ("cc", {"name": "kept"})):
        (tmp_path / "topics" / topic).mkdir(parents=True)
        (tmp_path / "topics" / topic / "ff-1.json").write_text(json.dumps(descriptor))
    for topic in ("aa", "bb"):
        (tmp_path / "topics" / f"{topic}.deleted").write_text(json.dumps(deletion))
    names = [topic["name"] for topic in example.topics(tmp_path)]
    assert names == (["flights", "kept"] if is_listed else ["kept"])
