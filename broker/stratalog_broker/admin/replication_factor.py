"""Changes a topic's replication factor.

The factor applies to ledgers that are opened after the change. Owners roll their open ledgers as soon as their view has the
change; sealed ledgers keep their copies until they leave the bookies. An internal topic's state is written again at once, into
a ledger with the new factor: otherwise it would stay in the old ledger until the next group changes.
"""

from __future__ import annotations

from typing import Final

import msgspec

from stratalog_core.errors import Invalid, NotFound
from stratalog_metadata.client.api import MetadataClient, MetadataView
from stratalog_metadata.client.guarded_updates import decide_again, propose_guarded
from stratalog_metadata.client.topic_defaults import topic_defaults
from stratalog_metadata.records import REPLICATION_FACTOR_MAX, Bookie, Topic, topic_key
from stratalog_metadata.state.commands import Command, Put, VersionIs
from stratalog_metadata.topic_rules.topic_configs import check_topic_configs

_TIMEOUT_S: Final = 10.0


async def change_replication_factor(metadata: MetadataClient, name: str, factor: int) -> Topic:
    """Set the replication factor of topic ``name``; return the changed topic.

    Raises ``NotFound``, ``Invalid``, ``Conflict`` (the topic is changed concurrently), ``OutcomeUnknown`` (try again: the
    change is idempotent).
    """

    async def attempt() -> Topic:
        (found,) = await metadata.read([topic_key(name)], _TIMEOUT_S)
        if found is None or not isinstance(found.record, Topic):
            raise NotFound(f"no topic {name!r}: see `stratalog topic list`")
        topic = found.record
        if topic.replication_factor == factor:
            return topic
        _check(metadata.view, topic, factor)
        changed = msgspec.structs.replace(topic, replication_factor=factor)
        command = Command(updates=(Put(record=changed),), requirements=(VersionIs(key=topic.key(), version=found.version),))
        await propose_guarded(metadata, command, topic.key(), _TIMEOUT_S)
        return changed

    return await decide_again(f"topic {name!r}", attempt)


def _check(view: MetadataView, topic: Topic, factor: int) -> None:
    bookies = sum(not each.draining for each in view.all(Bookie))
    most = min(bookies, REPLICATION_FACTOR_MAX)
    if not 1 <= factor <= most:
        raise Invalid(f"replication factor is {factor}; maximum is {most}: {bookies} bookies accept ledgers; start more")
    check_topic_configs(topic.configs, factor, internal=topic.internal, defaults=topic_defaults(view))
