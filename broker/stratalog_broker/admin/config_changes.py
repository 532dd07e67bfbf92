"""Changes the configs of one resource of a request: a topic, or the cluster-wide defaults of topics."""

from __future__ import annotations

from typing import Any, Final

from kio.schema.errors import ErrorCode

from stratalog_broker.admin.topic_defaults import configure_defaults
from stratalog_broker.admin.topics import EditConfigs, TopicCommands
from stratalog_broker.configs.topic_configs import topic_config_name
from stratalog_broker.protocol.errors import KafkaError, error_code_of
from stratalog_core.errors import StratalogError
from stratalog_metadata.client.api import MetadataClient

TOPIC: Final = 2
BROKER: Final = 4
TIMEOUT_S: Final = 10.0


def stored_name(resource: Any, name: str) -> str:
    """Return the name under which a config of the resource is stored: defaults may be given under Kafka's broker names."""
    return topic_config_name(name) if resource.resource_type == BROKER else name


class ConfigChanges:
    """Holds no state."""

    def __init__(self, topic_commands: TopicCommands, metadata: MetadataClient) -> None:
        self._topic_commands = topic_commands
        self._metadata = metadata

    async def apply(self, resource: Any, edit: EditConfigs, *, validate_only: bool) -> dict[str, Any]:
        """Apply ``edit`` to the configs of one resource; return the fields of its row in the response."""
        error, message = ErrorCode.none, None
        try:
            await self._apply(resource, edit, validate_only=validate_only)
        except KafkaError as refused:
            error, message = refused.code, refused.message
        except StratalogError as failure:
            error, message = error_code_of(failure), failure.message
        return {
            "error_code": error, "error_message": message,
            "resource_type": resource.resource_type, "resource_name": resource.resource_name,
        }  # fmt: skip

    async def _apply(self, resource: Any, edit: EditConfigs, *, validate_only: bool) -> None:
        names = [stored_name(resource, row.name) for row in resource.configs]
        if len(set(names)) != len(names):
            raise KafkaError(ErrorCode.invalid_request, "a config is named twice")
        kind, name = resource.resource_type, resource.resource_name
        if kind == TOPIC:
            await self._topic_commands.configure(name, edit, TIMEOUT_S, validate_only=validate_only)
        elif kind == BROKER and not name:
            await configure_defaults(self._metadata, edit, TIMEOUT_S, validate_only=validate_only)
        elif kind == BROKER:
            text = (
                f"settings of broker {name[:20]} are given when it starts; alter the cluster's defaults (an empty name) instead"
            )
            raise KafkaError(ErrorCode.invalid_request, text)
        else:
            text = f"configs of resource type {kind} are not served; 2 (topic) and 4 (broker) are"
            raise KafkaError(ErrorCode.invalid_request, text)
