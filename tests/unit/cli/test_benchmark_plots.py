"""Plots of the benchmark pages: labels in words, figures as text, the same bytes for the same run."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from benchmarks import recorded
from benchmarks.charts import Bar, ratio_chart
from benchmarks.drawing import BETTER_COLOUR, WORSE_COLOUR
from benchmarks.heat_map import Panel, heat_map, strength
from benchmarks.labels import label_of
from benchmarks.main_figures import BEGIN, END, PAGE, PICTURE, write_main_figures


def _texts(document: str) -> list[str]:
    return [each.text or "" for each in ElementTree.fromstring(document).iter("{http://www.w3.org/2000/svg}text")]


@pytest.mark.parametrize(
    ("cell", "label"),
    [
        ("latency rate_share=0.1 linger_ms=5", "latency: 10 % of its maximum rate, 5 ms linger"),
        ("produce batch_bytes=131072 partitions=10000", "produce: 128 KiB batches, 10,000 partitions"),
        ("produce batch_bytes=1", "produce: one record a batch"),
        ("produce with Java batch_bytes=1000000", "produce with Java: 1 MB batches"),
        ("tail groups=1", "tail: 1 group"),
        ("latency", "latency: base load"),
        ("restart strange=7", "restart: strange 7"),
    ],
)
def test_cells_are_named_in_words(cell: str, label: str) -> None:
    assert label_of(cell) == label


def test_every_cell_of_the_recorded_runs_is_named_in_words() -> None:
    cells = {row.cell for run in recorded.read_runs().values() for row in run.rows}
    assert [label for label in map(label_of, cells) if "=" in label or "_" in label] == []


def test_bars_are_text_and_the_worse_one_has_another_colour() -> None:
    bars = [Bar(label="a < b", ratio=2.0, more_is_better=True, goal=1.5), Bar(label="c", ratio=0.5, more_is_better=True)]
    document = ratio_chart("Rate (right is better)", bars)
    assert {"a < b", "c", "2.00", "0.50", "Rate (right is better; mark: goal)"} <= set(_texts(document))
    assert BETTER_COLOUR in document
    assert WORSE_COLOUR in document
    assert document == ratio_chart("Rate (right is better)", bars)


def test_a_heat_map_leaves_out_what_was_not_measured() -> None:
    document = heat_map(
        "Title", [Panel(title="panel", values=[[2.0, None], [0.5, 1.0]])], rows=["r1", "r2"], columns=["c1", "c2"]
    )
    assert {"Title", "panel", "r1", "r2", "c1", "c2", "2.00", "0.50", "1.00"} == set(_texts(document))


@pytest.mark.parametrize(("ratio", "opacity"), [(1.0, 0.12), (8.0, 0.85), (1 / 8, 0.85), (100.0, 0.85), (0.0, 0.85)])
def test_colours_are_stronger_the_farther_a_ratio_is_from_one(ratio: float, opacity: float) -> None:
    assert strength(ratio) == pytest.approx(opacity)


def test_the_page_of_main_figures_is_what_its_run_says(tmp_path: Path) -> None:
    name = PAGE.read_text().split("Medians of run `")[1].split("`")[0]
    page, picture = tmp_path / "page.md", tmp_path / "picture.svg"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write_main_figures(name, recorded.read_runs()[name], "kafka", page=page, picture=picture)
    made = page.read_text()
    assert made.split(BEGIN)[1].split(END)[0] == PAGE.read_text().split(BEGIN)[1].split(END)[0]
    assert (made.startswith("before\n"), made.endswith("after\n")) == (True, True)
    assert _texts(picture.read_text()) == _texts(PICTURE.read_text())


def test_a_run_without_a_main_figure_leaves_the_page_alone(tmp_path: Path) -> None:
    run = recorded.read_runs()["2026-11-22-fsync"]
    page = tmp_path / "page.md"
    page.write_text(f"{BEGIN}\nold\n{END}\n")
    write_main_figures("fsync", run, "kafka-fsync", page=page, picture=tmp_path / "picture.svg")
    assert page.read_text() == f"{BEGIN}\nold\n{END}\n"
