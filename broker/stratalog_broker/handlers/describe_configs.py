"""DescribeConfigs, versions 1–4: topics (resource type 2), and brokers (type 4).

A broker named by its id returns its settings, which are read-only, and the topic defaults in force. The empty name returns
the cluster-wide defaults that were set. Difference from Apache Kafka: other resource types return INVALID_REQUEST.
"""

from __future__ import annotations

from typing import Any, Final

from kio.schema.errors import ErrorCode

from stratalog_broker.admin.config_rows import ConfigRow, broker_config_rows, default_config_rows, topic_config_rows
from stratalog_broker.admin.topics import check_topic_name
from stratalog_broker.configs.settings import BrokerSettings
from stratalog_broker.protocol.errors import KafkaError
from stratalog_broker.requests.access import Access, Operation, Resource
from stratalog_broker.requests.context import RequestContext
from stratalog_broker.requests.handler_info import HandlerInfo
from stratalog_metadata.client.api import MetadataView
from stratalog_metadata.client.topic_defaults import topic_defaults
from stratalog_metadata.records import Topic, topic_key

TOPIC: Final = 2
BROKER: Final = 4


async def handle(context: RequestContext, request: Any, *, view: MetadataView, settings: BrokerSettings) -> Any:
    documented = getattr(request, "include_documentation", False)
    results = tuple(
        _describe(context, view, settings, resource, synonyms=request.include_synonyms, documented=documented)
        for resource in request.resources
    )
    return context.new("DescribeConfigsResponse", results=results)


def _describe(
    context: RequestContext, view: MetadataView, settings: BrokerSettings, resource: Any, *, synonyms: bool, documented: bool
) -> Any:
    error, message, rows = ErrorCode.none, None, list[ConfigRow]()
    try:
        rows = _rows(context, view, settings, resource.resource_type, resource.resource_name)
    except KafkaError as refused:
        error, message = refused.code, refused.message
    wanted = resource.configuration_keys
    configs = tuple(
        _config(context, row, synonyms=synonyms, documented=documented) for row in rows if wanted is None or row.name in wanted
    )
    return context.new(
        "DescribeConfigsResult",
        error_code=error, error_message=message, resource_type=resource.resource_type,
        resource_name=resource.resource_name, configs=configs,
    )  # fmt: skip


def _rows(context: RequestContext, view: MetadataView, settings: BrokerSettings, kind: int, name: str) -> list[ConfigRow]:
    if kind == TOPIC:
        return _topic_rows(view, name)
    if kind == BROKER:
        return _broker_rows(view, settings, name)
    raise KafkaError(ErrorCode.invalid_request, f"configs of resource type {kind} are not served; 2 (topic) and 4 (broker) are")


def _topic_rows(view: MetadataView, name: str) -> list[ConfigRow]:
    check_topic_name(name)
    topic = view.find(Topic, topic_key(name))
    if topic is None:
        raise KafkaError(ErrorCode.unknown_topic_or_partition, f"there is no topic {name!r}")
    return topic_config_rows(topic, topic_defaults(view))


def _broker_rows(view: MetadataView, settings: BrokerSettings, name: str) -> list[ConfigRow]:
    defaults = topic_defaults(view)
    if not name:
        return default_config_rows(settings, defaults)
    if name != str(settings.broker_id):
        text = f"this is broker {settings.broker_id}: ask broker {name[:20]} itself"
        raise KafkaError(ErrorCode.invalid_request, text)
    return broker_config_rows(settings, defaults)


def _config(context: RequestContext, row: ConfigRow, *, synonyms: bool, documented: bool) -> Any:
    shown = row.synonyms if synonyms else ()
    return context.new(
        "DescribeConfigsResourceResult",
        name=row.name, value=row.value, read_only=row.read_only, config_source=row.source, is_sensitive=False,
        synonyms=tuple(
            context.new("DescribeConfigsSynonym", name=one.name, value=one.value, source=one.source) for one in shown
        ),
        config_type=row.kind, documentation=row.documentation if documented else None,
    )  # fmt: skip


API: Final = HandlerInfo(
    key=32, min_version=1, max_version=4, handle=handle, access=Access(Operation.DESCRIBE_CONFIGS, Resource.TOPIC)
)
