"""Offload of sealed ledgers: megabytes for each second of one core that the tiering worker uses."""

from __future__ import annotations

from typing import Final

from benchmarks.cold import store_work
from benchmarks.cold.figures import Figure
from benchmarks.cold.replays import Replays
from benchmarks.cold.stage import Stage, say
from benchmarks.cold.store_work import Plan

_PARTITIONS: Final = 4


def offload_mb_per_core_s(stage: Stage, replays: Replays) -> list[Figure]:
    """The worker reads from bookies, hashes, uploads, reads back and verifies; the control uploads and reads back only."""
    found, raw = [], []
    for _ in range(stage.options.rounds):
        # Nothing rolls while it is written, so that nothing is offloaded before the offload is asked for.
        topic = stage.filled_topic(_PARTITIONS, stage.options.offload_mb, segment_mb=stage.options.offload_mb)
        before = stage.system.cpu_s()["tiering"]
        stage.system.make_cold(topic)
        cpu_s = stage.system.cpu_s()["tiering"] - before
        size = stage.stored_bytes(topic)
        control = store_work.run(Plan(store=stage.store(), kind="write", size=size), stage.credentials)
        found.append(size / 1e6 / cpu_s)
        raw.append(control.size / 1e6 / control.cpu_s)
        say(f"offload: {found[-1]:.0f} MB per core second, {raw[-1]:.0f} without hashing and checks")
    return [
        Figure(name="offload_mb_per_core_s", values=tuple(found)),
        Figure(name="raw_put_mb_per_core_s", values=tuple(raw)),
    ]
