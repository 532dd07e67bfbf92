"""Consumer groups of one broker: the coordinators of groups, and the removal of offsets whose topics are deleted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from typing import Final
from uuid import UUID

from kio.schema.errors import ErrorCode

from stratalog_broker.configs.features import GROUP_VERSION, finalized_features
from stratalog_broker.configs.group_configs import GroupConfigs, group_config_defaults
from stratalog_broker.configs.settings import BrokerSettings
from stratalog_broker.coordination.groups.application import GroupApplication, group_kind
from stratalog_broker.coordination.groups.core.consumer.assignors import ASSIGNORS
from stratalog_broker.coordination.groups.core.consumer.settings import ConsumerLimits, MigrationPolicy, Timeouts
from stratalog_broker.coordination.groups.core.group_table import CoordinatorLimits
from stratalog_broker.coordination.groups.core.messages import GroupLimits
from stratalog_broker.coordination.groups.topics import ClusterTopics
from stratalog_broker.coordination.locator import CoordinatorLocator
from stratalog_broker.protocol.errors import KafkaError
from stratalog_core.errors import Invalid, StratalogError
from stratalog_core.ports import Clock
from stratalog_core.restarting import restarting
from stratalog_metadata.client.api import MetadataClient, MetadataView
from stratalog_metadata.client.named_configs import configs_of
from stratalog_metadata.client.topic_deletion import restorable_topics
from stratalog_metadata.records import GROUP_CONFIGS, DeletedTopic, Topic, deleted_topic_key, topic_key
from stratalog_metadata.state.changes import Change

SWEEP_INTERVAL_S: Final = 600.0
_log = logging.getLogger(__name__)


def limits_of(settings: BrokerSettings, view: MetadataView) -> CoordinatorLimits:
    """Return the bounds of groups from the broker's settings, and from the configs of groups in the view."""
    defaults = group_config_defaults(settings)
    for name in settings.group_consumer_assignors:
        if name not in ASSIGNORS:
            raise Invalid(f"group_consumer_assignors names {name!r}; choose {' or '.join(ASSIGNORS)}")
    if not settings.group_consumer_assignors:
        raise Invalid("group_consumer_assignors is empty; name at least one assignor")
    policy = settings.group_consumer_migration_policy.lower()
    if policy not in set(MigrationPolicy):
        raise Invalid(f"group_consumer_migration_policy is {policy!r}; choose {' or '.join(MigrationPolicy)}")

    def timeouts_of(group_id: str) -> Timeouts:
        configs = GroupConfigs.of({**defaults, **configs_of(view, GROUP_CONFIGS, group_id)})
        return Timeouts(configs.session_timeout_ms, configs.heartbeat_interval_ms, configs.assignment_interval_ms)

    return CoordinatorLimits(
        group=GroupLimits(
            members_max=settings.group_members_max,
            session_timeout_ms_min=settings.group_session_timeout_min_ms,
            session_timeout_ms_max=settings.group_session_timeout_max_ms,
            initial_rebalance_delay_ms=settings.group_initial_rebalance_delay_ms,
        ),
        consumer=ConsumerLimits(
            members_max=settings.group_consumer_members_max,
            classic_members_max=settings.group_members_max,
            migration=MigrationPolicy(policy),
            assignors=settings.group_consumer_assignors,
            timeouts_of=timeouts_of,
        ),
        groups_max=settings.groups_max,
        offsets_max=settings.group_offsets_max,
        offsets_retention_ms=settings.offsets_retention_ms,
    )


def check_group_version(view: MetadataView) -> None:
    """Raise ``KafkaError`` UNSUPPORTED_VERSION if the consumer protocol is disabled by the feature ``group.version``."""
    if finalized_features(view).level_of(GROUP_VERSION) < 1:
        raise KafkaError(ErrorCode.unsupported_version)


class GroupService:
    """One per broker. Adds groups to the locator, and removes offsets of deleted topics."""

    def __init__(self, settings: BrokerSettings, metadata: MetadataClient, clock: Clock, locator: CoordinatorLocator) -> None:
        self._metadata = metadata
        self._topics = ClusterTopics(metadata.view)
        kind = group_kind(
            limits_of(settings, metadata.view),
            self._topics,
            clock,
            partition_count=settings.offsets_topic_partitions,
            copies=settings.offsets_topic_replication_factor,
        )
        self._coordinators = locator.add(kind)
        self._unsubscribe = metadata.view.subscribe(self._on_changes)
        self._sweeping: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start a periodic search for offsets of topics that were deleted while the group had no coordinator."""
        self._sweeping = asyncio.get_running_loop().create_task(
            restarting(self._sweep_for_ever, "the search for offsets of deleted topics")
        )

    def close(self) -> None:
        self._unsubscribe()
        self._topics.close()
        if self._sweeping is not None:
            self._sweeping.cancel()

    def coordinator_of(self, group_id: str) -> GroupApplication:
        """Return the group's coordinator, if that is this broker. Raises as ``Coordinators.coordinator_of`` does."""
        return self._coordinators.coordinator_of(group_id)

    def coordinators(self) -> Iterator[GroupApplication]:
        """Yield the loaded coordinators of this broker."""
        return self._coordinators.loaded()

    @property
    def unreadable_records(self) -> int:
        """Number of unreadable records of ``__consumer_offsets`` that this broker's coordinators skipped."""
        return self._coordinators.unreadable_records

    @property
    def is_loading(self) -> bool:
        """Whether this broker owns a coordinator partition that it does not serve yet."""
        return self._coordinators.is_loading

    async def _sweep_for_ever(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            try:
                await self.sweep()
            except StratalogError as failure:
                _log.info("could not search for offsets of deleted topics: %s", failure)

    async def sweep(self) -> None:
        """Remove offsets of topics that neither exist nor can be restored.

        By a linearizable read, because the view may be stale. Only names and ids that had offsets before the read are checked:
        a topic may be created, and offsets committed for it, after the read.
        """
        committed = {application: application.topics() for application in self.coordinators()}
        found = {each for topics in committed.values() for each in topics}
        keys = sorted(
            {topic_key(name) for name, _ in found} | {deleted_topic_key(each) for _, each in found if each is not None}
        )
        stored = [each.record for each in await self._metadata.read(keys) if each is not None] if keys else []
        kept: set[tuple[str, UUID | None]] = {(each.name, each.topic_id) for each in stored if isinstance(each, Topic)}
        kept |= {(each.name, each.topic_id) for each in stored if isinstance(each, DeletedTopic) and not each.is_final}
        kept |= {(each.name, each.topic_id) for each in restorable_topics(self._metadata.view)}
        kept |= {(name, None) for name, _ in kept}
        for application, found_here in committed.items():
            for name, topic_id in found_here:
                if (name, topic_id) not in kept:
                    application.forget_topic(name, (topic_id,))

    def _on_changes(self, changes: Sequence[Change]) -> None:
        for change in changes:
            before = change.before.record if change.before is not None else None
            deleted = change.after.record if change.after is not None else None
            if isinstance(before, DeletedTopic) and before.is_final:
                continue  # another command of a deletion that is final already
            if isinstance(deleted, DeletedTopic) and deleted.is_final:
                for application in self.coordinators():
                    application.forget_topic(deleted.name, (deleted.topic_id,))
