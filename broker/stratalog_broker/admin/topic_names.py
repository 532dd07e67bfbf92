"""Refusal of topic names by administrative commands."""

from __future__ import annotations

from stratalog_broker.admin.errors import InvalidTopic
from stratalog_core.errors import Invalid
from stratalog_metadata.topic_rules import topic_names


def check_topic_name(name: str) -> None:
    """Raise ``InvalidTopic`` if ``name`` breaks Kafka's rule."""
    try:
        topic_names.check_topic_name(name)
    except Invalid as refused:
        raise InvalidTopic(refused.message) from refused
