"""The mapping of Stratalog's error tree to Kafka's error codes.

Clients treat codes differently per API: an unexpected code in a Fetch response makes the Java consumer fail, and the code in a
Produce response decides whether the producer retries. Hence a general mapping, and exceptions from it for these two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kio.schema.errors import ErrorCode

from stratalog_core import errors

_GENERAL: Final[Mapping[type[errors.StratalogError], ErrorCode]] = {
    errors.NotLeader: ErrorCode.not_leader_or_follower,
    errors.Overloaded: ErrorCode.request_timed_out,
    errors.NotEnoughBookies: ErrorCode.not_enough_replicas,
    errors.Unavailable: ErrorCode.request_timed_out,
    errors.Retriable: ErrorCode.request_timed_out,
    errors.OutcomeUnknown: ErrorCode.request_timed_out,
    errors.Conflict: ErrorCode.request_timed_out,
    errors.Fenced: ErrorCode.not_leader_or_follower,
    errors.NotFound: ErrorCode.unknown_topic_or_partition,
    errors.Corrupt: ErrorCode.corrupt_message,
    errors.Invalid: ErrorCode.invalid_request,
    errors.Refused: ErrorCode.kafka_storage_error,
    errors.StorageFailed: ErrorCode.kafka_storage_error,
}
_PRODUCE: Final[Mapping[type[errors.StratalogError], ErrorCode]] = {
    errors.Unavailable: ErrorCode.not_enough_replicas,
    errors.OutcomeUnknown: ErrorCode.not_enough_replicas_after_append,
}
_FETCH: Final[Mapping[type[errors.StratalogError], ErrorCode]] = {
    errors.Overloaded: ErrorCode.kafka_storage_error,
    errors.NotEnoughBookies: ErrorCode.kafka_storage_error,
    errors.Unavailable: ErrorCode.kafka_storage_error,
    errors.Retriable: ErrorCode.kafka_storage_error,
    errors.OutcomeUnknown: ErrorCode.kafka_storage_error,
    errors.Conflict: ErrorCode.kafka_storage_error,
    errors.NotFound: ErrorCode.kafka_storage_error,
}


def error_code_of(error: errors.StratalogError) -> ErrorCode:
    """Return the code for ``error``: that of its class, or else of its nearest parent class."""
    return _look_up(error, _GENERAL)


def produce_error_code_of(error: errors.StratalogError) -> ErrorCode:
    """Return the code for ``error`` in a Produce response: errors that a retry may resolve get codes that producers retry."""
    return _look_up(error, {**_GENERAL, **_PRODUCE})


def fetch_error_code_of(error: errors.StratalogError) -> ErrorCode:
    """Return the code for ``error`` in a Fetch response: only codes that every consumer handles there."""
    return _look_up(error, {**_GENERAL, **_FETCH})


def _look_up(error: errors.StratalogError, table: Mapping[type[errors.StratalogError], ErrorCode]) -> ErrorCode:
    for ancestor in type(error).__mro__:
        code = table.get(ancestor)
        if code is not None:
            return code
    return ErrorCode.unknown_server_error


class KafkaError(Exception):
    """Ends a handler early with one of Kafka's codes, where the response has a single field for it."""

    def __init__(self, code: ErrorCode, message: str = "") -> None:
        super().__init__(message or code.name)
        self.code = code
        self.message = message or code.name
