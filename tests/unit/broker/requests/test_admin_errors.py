"""Every administration error has its Kafka error code."""

from __future__ import annotations

import pytest
from kio.schema.errors import ErrorCode

from stratalog_broker.admin import errors
from stratalog_broker.requests.admin_errors import admin_error_code_of, outcome_of
from stratalog_core.errors import NotFound, StratalogError

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and kind.__module__ == errors.__name__]


def test_refusals_have_distinct_codes() -> None:
    """Kafka has one code for all policies; every other refusal has its own."""
    arguments: dict[type, tuple[object, ...]] = {errors.ObjectsLocked: ("", "governance", 0)}
    codes = {kind.__name__: admin_error_code_of(kind(*arguments.get(kind, ("",)))) for kind in KINDS}
    of_policies = {"LimitExceeded", "ObjectsLocked", "OnlyCompacted", "Protected"}
    assert {codes[name] for name in of_policies} == {ErrorCode.policy_violation}
    assert len(set(codes.values())) == len(codes) - len(of_policies) + 1, codes
    assert not {ErrorCode.invalid_request, ErrorCode.unknown_server_error} & set(codes.values()), codes


async def _fail(failure: StratalogError) -> None:
    raise failure


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (errors.InvalidConfig("retention.ms is x"), ErrorCode.invalid_config),
        (NotFound("topic 'a' does not exist"), ErrorCode.unknown_topic_or_partition),
        (errors.NotServedYet("topic 'a' is not known to this broker yet"), ErrorCode.request_timed_out),
    ],
)
async def test_a_failed_command_gives_code_and_message(failure: StratalogError, code: ErrorCode) -> None:
    assert await outcome_of(_fail(failure)) == (code, failure.message)
