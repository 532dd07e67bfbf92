"""Errors that are no fault of the client get codes that clients repeat."""

from __future__ import annotations

import pytest
from kio.schema.errors import ErrorCode

from stratalog_broker.protocol.errors import error_code_of, fetch_error_code_of, produce_error_code_of
from stratalog_core.errors import Invalid, Refused, StorageFailed


@pytest.mark.parametrize("code_of", [error_code_of, fetch_error_code_of, produce_error_code_of])
def test_a_refusal_by_the_object_store_is_no_invalid_request(code_of: type) -> None:
    """Java's consumer ends with an exception when a Fetch is answered with INVALID_REQUEST."""
    assert code_of(Refused("expired")) is code_of(StorageFailed("full")) is ErrorCode.kafka_storage_error
    assert code_of(Invalid("wrong")) is ErrorCode.invalid_request
