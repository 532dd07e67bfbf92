"""The owner's part of a request to offload a partition now: seal the open ledger and record its end (see ``TierRequest``)."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

import msgspec

from stratalog_broker.partitions.log import PartitionLog
from stratalog_core.errors import OutcomeUnknown, Retriable, StratalogError
from stratalog_metadata.client.api import MetadataClient
from stratalog_metadata.client.guarded_updates import propose_guarded
from stratalog_metadata.records import TierRequest, Versioned
from stratalog_metadata.state.commands import Command, Put, VersionIs

_log = logging.getLogger(__name__)
_ATTEMPTS_MAX: Final = 20
_RETRY_S: Final = 0.2
_TIMEOUT_S: Final = 10.0


async def answer_tier_request(metadata: MetadataClient, log: PartitionLog, versioned: Versioned) -> None:
    """Answer one request; returns when it is answered or has changed, or the partition is lost (its next owner continues)."""
    request = versioned.record
    assert isinstance(request, TierRequest)
    for _ in range(_ATTEMPTS_MAX):
        try:
            end_offset = await log.seal_all()
            answered = msgspec.structs.replace(request, end_offset=end_offset)
            requirements = (log.requirement, VersionIs(key=request.key(), version=versioned.version))
            command = Command(updates=(Put(record=answered),), requirements=requirements)
            await propose_guarded(metadata, command, request.key(), _TIMEOUT_S)
        except (Retriable, OutcomeUnknown) as again:
            if not log.is_serving:
                return
            _log.info("answering the tier request of %s: %s", log.topic_partition, again)
            await asyncio.sleep(_RETRY_S)
        except StratalogError:
            # Another process has changed the request or taken over the partition, and is responsible for the answer.
            return
        else:
            return
