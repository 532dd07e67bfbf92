"""Changes the cluster-wide defaults of topic configs. They are stored in one record, under the topic configs' names."""

from __future__ import annotations

from stratalog_broker.admin.errors import InvalidConfig
from stratalog_broker.admin.retention_changes import log_shortened
from stratalog_broker.admin.topics import EditConfigs
from stratalog_core.errors import Invalid
from stratalog_metadata.client.api import MetadataClient, MetadataView
from stratalog_metadata.client.guarded_updates import decide_again, propose_guarded
from stratalog_metadata.records import TOPIC_DEFAULTS_KEY, DynamicConfig, Topic, configs_in_force
from stratalog_metadata.state.commands import ABSENT, Command, Put, VersionIs
from stratalog_metadata.topic_rules.topic_configs import check_lock, check_topic_defaults


async def configure_defaults(metadata: MetadataClient, edit: EditConfigs, timeout_s: float, *, validate_only: bool) -> None:
    """Replace the defaults by the result of ``edit``. Raises ``InvalidConfig``. Logs a warning if retention gets shorter."""

    async def attempt() -> None:
        await metadata.refresh(timeout_s)
        stored = metadata.view.get(TOPIC_DEFAULTS_KEY)
        record = stored.record if stored is not None else None
        before = record.configs if isinstance(record, DynamicConfig) else {}
        after = dict(edit(dict(before)))
        _check(after, metadata.view)
        if validate_only or after == before:
            return
        version = ABSENT if stored is None else stored.version
        requirements = (VersionIs(key=TOPIC_DEFAULTS_KEY, version=version),)
        updates = (Put(record=DynamicConfig(resource="", configs=after)),)
        command = Command(updates=updates, requirements=requirements)
        await propose_guarded(metadata, command, TOPIC_DEFAULTS_KEY, timeout_s)
        log_shortened("topics without a value of their own", before, after)

    await decide_again("the cluster's defaults", attempt)


def _check(configs: dict[str, str], view: MetadataView) -> None:
    name = ""
    try:
        check_topic_defaults(configs)
        for topic in view.all(Topic):
            name = topic.name
            check_lock(configs_in_force(topic, configs))
    except Invalid as refused:
        raise InvalidConfig(f"topic {name!r}: {refused.message}" if name else refused.message) from refused
