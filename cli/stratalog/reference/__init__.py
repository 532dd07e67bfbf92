"""Reference pages generated from the code: settings, topic configs, Kafka APIs, commands, errors, metrics.

`make reference` writes them to ``docs/reference/``; a test compares the files with what this package returns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from stratalog.reference.cli import cli_page
from stratalog.reference.errors import errors_page
from stratalog.reference.group_configs import group_configs_page
from stratalog.reference.kafka_apis import kafka_apis_page
from stratalog.reference.metrics import METRIC_GROUPS, metrics_page
from stratalog.reference.settings import SECTIONS, settings_page
from stratalog.reference.topic_configs import topic_configs_page

__all__ = ["METRIC_GROUPS", "PAGES", "SECTIONS"]

PAGES: Final[Mapping[str, Callable[[], str]]] = {
    "cli.md": cli_page,
    "errors.md": errors_page,
    "group-configs.md": group_configs_page,
    "kafka-apis.md": kafka_apis_page,
    "metrics.md": metrics_page,
    "settings.md": settings_page,
    "topic-configs.md": topic_configs_page,
}
"""Functions that return the text of a page, by the page's file name."""
