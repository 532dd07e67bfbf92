"""Real servers outlive every client: they answer or hang up, serve on, keep nothing, and start again on what they stored."""

from __future__ import annotations

import gc

import psutil
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from fuzz.mutation import corrupt
from fuzz.target import MIB, Target
from fuzz.targets.ports import CLOSE, TARGETS

EXAMPLES = 80
GROWTH_BYTES_MAX = 300 * MIB


def resident_bytes() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: str(target.name))
def test_hostile_clients(target: Target) -> None:
    inputs = target.inputs()

    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(corrupt(inputs, target.input_bytes_max))
    def attack(content: bytes) -> None:
        target.execute(content)

    before = resident_bytes()
    try:
        for content in inputs:
            target.execute(content)
        attack()
    finally:
        CLOSE[target.name]()
    assert resident_bytes() - before < GROWTH_BYTES_MAX, "what hostile clients sent is not kept"
