"""The simulated idempotent producer keeps to what a broker can recognise as retries."""

from __future__ import annotations

from simulation.clients.producers import Pipeline
from stratalog_core.partition_state.producer_states import BATCHES_REMEMBERED


def test_a_batch_acknowledged_before_its_predecessors_makes_no_room() -> None:
    pipeline = Pipeline()
    first, *_, fifth = [pipeline.add([b"%d" % number], 0, (1, 0)) for number in range(BATCHES_REMEMBERED)]

    pipeline.acknowledge(fifth)

    assert not pipeline.has_room(BATCHES_REMEMBERED)

    pipeline.acknowledge(first)

    assert pipeline.has_room(BATCHES_REMEMBERED)
