"""Kafka's error codes, and the one mapping of our error tree to them.

Clients treat codes differently per API: an unexpected code in a Fetch answer makes the Java consumer give up, one in a
Produce answer decides whether the producer retries. Hence one general mapping and two with exceptions from it.
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
    """The code that an answer carries for ``error``; the nearest class in its ancestry decides."""
    return _look_up(error, _GENERAL)


def produce_error_code_of(error: errors.StratalogError) -> ErrorCode:
    """The same for Produce: everything that a retry can mend is a code that producers retry."""
    return _look_up(error, {**_GENERAL, **_PRODUCE})


def fetch_error_code_of(error: errors.StratalogError) -> ErrorCode:
    """The same for Fetch: only codes that every consumer knows in a Fetch answer."""
    return _look_up(error, {**_GENERAL, **_FETCH})


def _look_up(error: errors.StratalogError, table: Mapping[type[errors.StratalogError], ErrorCode]) -> ErrorCode:
    for ancestor in type(error).__mro__:
        code = table.get(ancestor)
        if code is not None:
            return code
    return ErrorCode.unknown_server_error


class KafkaError(Exception):
    """A handler's early exit with a code of Kafka's, where the answer has one place for it."""

    def __init__(self, code: ErrorCode, message: str = "") -> None:
        super().__init__(message or code.name)
        self.code = code
        self.message = message or code.name
