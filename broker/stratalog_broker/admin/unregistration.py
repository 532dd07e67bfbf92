"""Unregisters brokers. A broker's registration ends with its session, so only the record that it is drained can be left."""

from __future__ import annotations

from stratalog_broker.admin.errors import BrokerNotRegistered
from stratalog_core.errors import Invalid
from stratalog_metadata.client.api import MetadataClient
from stratalog_metadata.client.guarded_updates import decide_again, propose_guarded
from stratalog_metadata.records import Broker, broker_key, drained_broker_key
from stratalog_metadata.state.commands import Command, Delete, VersionIs


async def unregister_broker(metadata: MetadataClient, broker_id: int, timeout_s: float = 10.0) -> None:
    """Remove what the metadata has of a broker that is not live.

    Raises ``BrokerNotRegistered``, ``Invalid`` if the broker is live, and failures of the quorum.
    """

    async def attempt() -> None:
        await metadata.refresh(timeout_s)
        if metadata.view.find(Broker, broker_key(broker_id)) is not None:
            raise Invalid(f"broker {broker_id} is live: stop it first")
        drained = metadata.view.get(drained_broker_key(broker_id))
        if drained is None:
            raise BrokerNotRegistered(f"broker {broker_id} is not registered: a broker's registration ends when it stops")
        key = drained_broker_key(broker_id)
        command = Command(updates=(Delete(key=key),), requirements=(VersionIs(key=key, version=drained.version),))
        await propose_guarded(metadata, command, key, timeout_s)

    await decide_again(f"broker {broker_id}", attempt)
