"""The reference page of Kafka APIs, from the handler table."""

from __future__ import annotations

from stratalog_broker.handlers import HANDLERS, READ_ONLY_HANDLERS
from stratalog_broker.requests.handler_info import HandlerInfo

_HEAD = """# Kafka APIs

This is what ApiVersions returns. A client that asks for an API that is not in this table gets UNSUPPORTED_VERSION.
[Kafka's tools](kafka-tools.md) shows the same from a user's side. Generated from the code by `make reference`.

The server of [an archive](../how-to/serve-an-archive.md) returns those of the last column. It refuses every Produce with
POLICY_VIOLATION.

| key | API | versions | of an archive |
| --- | --- | --- | --- |
"""


def kafka_apis_page() -> str:
    """The page's text."""
    return _HEAD + "".join(_row(key, info) for key, info in sorted(HANDLERS.items()) if info.is_advertised)


def _row(key: int, info: HandlerInfo) -> str:
    return f"| {key} | {info.name} | {info.min_version}–{info.max_version} | {'yes' if key in READ_ONLY_HANDLERS else ''} |\n"
