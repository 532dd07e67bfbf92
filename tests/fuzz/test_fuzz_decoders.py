"""Every decoder takes any bytes and says one of our errors, within its bounds on memory: the kept corpus, and new damage."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from fuzz.mutation import corrupt
from fuzz.registry import PURE
from fuzz.target import Target

pytestmark = pytest.mark.computes
EXAMPLES = 60
SLOW = {"metadata-sqlite", "spark-batch"}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Damage is reported by the thousand here."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("target", PURE.values(), ids=PURE)
def test_the_kept_corpus(target: Target) -> None:
    for content in target.inputs():  # loads and compiles what is needed, unmeasured: measuring makes it ten times slower
        target.execute(content)
    accepted = [target.execute_measured(content) for content in target.inputs()]
    assert any(accepted), "at least one input is sound: else nothing behind the first check is reached"


@pytest.mark.parametrize("target", PURE.values(), ids=PURE)
def test_damaged_inputs(target: Target) -> None:
    inputs = target.inputs()

    @settings(
        max_examples=EXAMPLES // 3 if target.name in SLOW else EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(corrupt(inputs, target.input_bytes_max) | st.binary(max_size=200))
    def run(content: bytes) -> None:
        target.execute_measured(content)

    run()
