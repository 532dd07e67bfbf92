"""The reference page of Kafka APIs, from the handler table."""

from __future__ import annotations

from stratalog_broker.handlers import HANDLERS, READ_ONLY_HANDLERS
from stratalog_broker.requests.handler_info import HandlerInfo

_HEAD = """# Kafka APIs

The APIs that a broker lists in ApiVersions. A request for any other API or version closes the connection, as in Apache Kafka;
only ApiVersions of an unknown version is answered, with UNSUPPORTED_VERSION and the list.
[Kafka's tools](kafka-tools.md) shows which tools these APIs serve.

The last column marks the APIs that [a server of an archive](../how-to/serve-an-archive.md) lists. It lists Produce because
librdkafka 2.x fetches only from brokers that do, and refuses each Produce with POLICY_VIOLATION. Generated from the code by
`make reference`.

| key | API | versions | archive |
| --- | --- | --- | --- |
"""


def kafka_apis_page() -> str:
    """The page's text."""
    return _HEAD + "".join(_row(key, info) for key, info in sorted(HANDLERS.items()) if info.is_advertised)


def _row(key: int, info: HandlerInfo) -> str:
    return f"| {key} | {info.name} | {info.min_version}–{info.max_version} | {'yes' if key in READ_ONLY_HANDLERS else ''} |\n"
