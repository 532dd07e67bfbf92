"""The client instances that push metrics to this broker: their subscriptions, and when they may ask and push again. Sans-IO.

A client keeps its instance id for its lifetime and may change the broker at any time, so an unknown id is a new instance here.
Instances are bounded in number, least recently used first, and expire when they have not been heard of for three intervals.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final
from uuid import UUID

from crc32c import crc32c

from stratalog_broker.telemetry.subscriptions import Asked, Subscriptions
from stratalog_core.ports import Random

INSTANCES_MAX: Final = 16_384
EXPIRY_MS_MIN: Final = 60_000
_EXPIRY_INTERVALS: Final = 3
_NEVER: Final = -(10**15)


class Refusal(Enum):
    """Why a request of a client is refused."""

    TOO_EARLY = "before the interval is over"
    TERMINATED = "after the client's last push"
    UNKNOWN_SUBSCRIPTION = "the subscription has changed"


class TelemetryRefused(Exception):
    """A request is refused; ``refusal`` says why."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.value)
        self.refusal = refusal


@dataclass(slots=True, kw_only=True)
class ClientInstance:
    """One instance. Times are monotonic milliseconds."""

    instance_id: UUID
    asked: Asked
    version: int
    subscription_id: int
    got_at_ms: int = _NEVER
    pushed_at_ms: int = _NEVER
    heard_at_ms: int = 0
    is_terminating: bool = False
    may_get_early: bool = False

    def expires_at_ms(self) -> int:
        return self.heard_at_ms + max(EXPIRY_MS_MIN, _EXPIRY_INTERVALS * self.asked.interval_ms)


class ClientInstances:
    """All instances, the one that was heard of last at the end."""

    def __init__(self, subscriptions: Subscriptions, random: Random) -> None:
        self._subscriptions = subscriptions
        self._random = random
        self._instances: dict[UUID, ClientInstance] = {}

    def __len__(self) -> int:
        return len(self._instances)

    def __contains__(self, instance_id: UUID) -> bool:
        return instance_id in self._instances

    def get(self, instance_id: UUID | None, client: Mapping[str, str], now_ms: int) -> ClientInstance:
        """Return the instance that asks for its subscription; a new one without an id. Raises ``TelemetryRefused``."""
        instance = self._found(instance_id or self._new_id(), client, now_ms)
        is_due = now_ms - max(instance.got_at_ms, instance.pushed_at_ms) >= instance.asked.interval_ms
        if not is_due and not instance.may_get_early:
            raise TelemetryRefused(Refusal.TOO_EARLY)
        if is_due:
            instance.got_at_ms = now_ms
        instance.may_get_early = False
        return instance

    def push(
        self, instance_id: UUID, subscription_id: int, client: Mapping[str, str], now_ms: int, *, is_last: bool
    ) -> ClientInstance:
        """Return the instance that pushes its metrics. Raises ``TelemetryRefused``."""
        instance = self._found(instance_id, client, now_ms)
        was_terminating, instance.is_terminating = instance.is_terminating, is_last
        if was_terminating:
            raise TelemetryRefused(Refusal.TERMINATED)
        is_due = instance.got_at_ms > instance.pushed_at_ms or now_ms - instance.pushed_at_ms >= instance.asked.interval_ms
        if is_due:
            instance.pushed_at_ms = now_ms
        elif not is_last:
            raise TelemetryRefused(Refusal.TOO_EARLY)
        if subscription_id != instance.subscription_id:
            instance.may_get_early = True
            raise TelemetryRefused(Refusal.UNKNOWN_SUBSCRIPTION)
        return instance

    def expire(self, now_ms: int) -> None:
        """Remove instances that were not heard of for too long."""
        self._instances = {key: one for key, one in self._instances.items() if one.expires_at_ms() > now_ms}

    def _found(self, instance_id: UUID, client: Mapping[str, str], now_ms: int) -> ClientInstance:
        known = self._instances.pop(instance_id, None)
        if known is None or known.version != self._subscriptions.version:
            known = self._new(instance_id, client)
            if len(self._instances) >= INSTANCES_MAX:
                del self._instances[next(iter(self._instances))]
        known.heard_at_ms = now_ms
        self._instances[instance_id] = known
        return known

    def _new(self, instance_id: UUID, client: Mapping[str, str]) -> ClientInstance:
        asked = self._subscriptions.asked_of({"client_instance_id": str(instance_id), **client})
        identity = crc32c(f"{asked}".encode()) ^ (instance_id.int & 0xFFFFFFFF)
        subscription_id = identity - 2**32 if identity >= 2**31 else identity
        return ClientInstance(
            instance_id=instance_id, asked=asked, version=self._subscriptions.version, subscription_id=subscription_id
        )

    def _new_id(self) -> UUID:
        return UUID(int=self._random.getrandbits(128), version=4)
