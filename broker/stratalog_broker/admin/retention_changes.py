"""Which changes of configs shorten retention: those after which ``retention.ms`` or ``retention.bytes`` is lower.

Both are unlimited unless ``cleanup.policy`` includes ``delete``. A change to ``compact`` removes records, too, but by their
keys and not by their age, so it is not counted here. No I/O.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final, NamedTuple

from stratalog_core.errors import Invalid
from stratalog_metadata.topic_rules.cleanup_policy import DELETE, cleanup_policies
from stratalog_metadata.topic_rules.topic_configs import TOPIC_CONFIG_KEYS

RETENTION: Final = ("retention.ms", "retention.bytes")
_UNLIMITED: Final = -1
_log = logging.getLogger(__name__)


class Shortened(NamedTuple):
    """A config with its values in force before and after a change; -1: unlimited."""

    config: str
    before: int
    after: int


def shortened_retention(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[Shortened, ...]:
    """The configs by which retention gets shorter. ``before`` and ``after`` are the configs in force; others are the default.

    Raises ``Invalid`` for a value that is out of bounds.
    """
    changes = (Shortened(name, _limit(before, name), _limit(after, name)) for name in RETENTION)
    return tuple(change for change in changes if _is_shorter(change))


def _limit(configs: Mapping[str, str], name: str) -> int:
    key = TOPIC_CONFIG_KEYS[name]
    value = configs.get(name, key.default)
    key.check(value)
    return int(value) if DELETE in cleanup_policies(configs) else _UNLIMITED


def _is_shorter(change: Shortened) -> bool:
    return change.after != _UNLIMITED and (change.before == _UNLIMITED or change.after < change.before)


def log_shortened(whose: str, before: Mapping[str, str], after: Mapping[str, str]) -> None:
    """Warn if a change that was committed has shortened retention."""
    try:
        shortened = shortened_retention(before, after)
    except Invalid as unknown:  # a default that another release has set
        _log.warning("cannot tell whether retention of %s is shorter: %s", whose, unknown)
        return
    for change in shortened:
        _log.warning(
            "%s of %s was shortened from %d to %d: older records are deleted", change.config, whose, change.before, change.after
        )
