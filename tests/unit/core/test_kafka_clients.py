"""Errors of confluent-kafka's clients that pass are retried; others are raised at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from confluent_kafka import KafkaError, KafkaException

from stratalog_core.errors import Conflict, Unavailable
from stratalog_core.kafka_clients import retried

LONG_S = 60.0


def failing(*codes: int) -> Callable[[], str]:
    """Return a call that raises these errors, one each time, and then succeeds."""
    left = list(codes)

    def call() -> str:
        if left:
            raise KafkaException(KafkaError(left.pop(0)))
        return "done"

    return call


@pytest.mark.parametrize(
    "code",
    [
        KafkaError.NOT_COORDINATOR,
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError._TRANSPORT,
    ],
)
def test_what_passes_is_retried(code: int) -> None:
    assert retried(failing(code, code), LONG_S) == "done"


def test_the_last_error_is_raised_after_the_time() -> None:
    with pytest.raises(Unavailable, match="Not coordinator"):
        retried(failing(KafkaError.NOT_COORDINATOR), 0.0)


def test_what_does_not_pass_is_raised_at_once() -> None:
    with pytest.raises(Conflict):
        retried(failing(KafkaError.NON_EMPTY_GROUP), LONG_S)
