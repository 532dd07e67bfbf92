"""Settings of a process's HTTP endpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from stratalog_core.config import setting
from stratalog_core.metrics.registry import LABEL_SETS_MAX

SECTION: Final = "http"
AUTO: Final = "auto"
OFF: Final = "off"
DEFAULT_PORTS: Final = {"stratalog": 9640, "metadata": 9641, "bookie": 9642, "broker": 9643, "tiering": 9644}
"""Default port by role; ``stratalog`` is the single process of ``stratalog up``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings:
    """The table ``[http]`` of a configuration file, or ``STRATALOG_HTTP_…``."""

    listen: str = setting(
        AUTO,
        help="HOST:PORT of /metrics, /healthz and /readyz; port 0 takes any free port; `off`: none; `auto`: 127.0.0.1 and the "
        "role's port (`stratalog up` 9640, metadata 9641, bookie 9642, broker 9643, tiering 9644), none if that port is taken",
    )
    label_sets_max: int = setting(
        LABEL_SETS_MAX,
        help="maximum number of label sets (such as topics) of one metric in a scrape; the largest values are kept",
        minimum=1,
        maximum=100_000,
    )
