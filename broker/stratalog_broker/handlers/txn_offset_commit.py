"""TxnOffsetCommit, versions 0–5: commits offsets of a group within a transaction, whose marker makes them effective (KIP-447).

Before v5 the producer has added the group to the transaction (AddOffsetsToTxn), which is verified; v5 adds it itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from kio.schema.errors import ErrorCode

from stratalog_broker.coordination.group_topics import TopicName, refuse_topics, resolve_topic
from stratalog_broker.coordination.groups.application import CommittingMember
from stratalog_broker.coordination.groups.core.messages import NO_GENERATION, NO_MEMBER
from stratalog_broker.coordination.groups.core.offset_rows import Commit
from stratalog_broker.coordination.groups.service import GroupService
from stratalog_broker.coordination.offset_transactions import OffsetTransactions
from stratalog_broker.coordination.transaction_verification import Transaction
from stratalog_broker.partitions.ownership import Partitions
from stratalog_broker.protocol.errors import KafkaError
from stratalog_broker.requests.access import Access, Operation, Resource
from stratalog_broker.requests.context import RequestContext
from stratalog_broker.requests.handler_info import HandlerInfo
from stratalog_broker.requests.permissions import READ_TOPIC, Permissions
from stratalog_metadata.client.api import MetadataView

_ACCESS: Final = Access(Operation.WRITE, Resource.TRANSACTIONAL_ID)
_GROUP_ACCESS: Final = Access(Operation.READ, Resource.GROUP)
_ADDS_SINCE: Final = 5
_ABORTABLE_SINCE: Final = 4


async def handle(
    context: RequestContext,
    request: Any,
    *,
    view: MetadataView,
    partitions: Partitions,
    groups: GroupService,
    transactions: OffsetTransactions,
    permissions: Permissions,
) -> Any:
    topics = [resolve_topic(view, partitions, topic, by_id=False) for topic in request.topics]
    denied = permissions.denied(context, READ_TOPIC, (topic.name for topic in topics if topic.name))
    topics = refuse_topics(topics, denied)
    commits = list(_commits(request, topics))
    try:
        permissions.check_transactional_id(context, _ACCESS, request.transactional_id)
        permissions.check_group(context, _GROUP_ACCESS, request.group_id)
        errors = await _commit(context, request, groups, transactions, commits) if commits else []
    except KafkaError as refused:
        errors = [_code_for(refused.code, context.api_version)] * len(commits)
    return _response(context, request, topics, iter(errors))


async def _commit(
    context: RequestContext,
    request: Any,
    groups: GroupService,
    transactions: OffsetTransactions,
    commits: Sequence[Commit],
) -> list[ErrorCode]:
    """Commit once the transaction's coordinator has the group. Raises ``KafkaError``."""
    groups.coordinator_of(request.group_id)
    transaction = Transaction(
        request.transactional_id, request.producer_id, request.producer_epoch, context.api_version >= _ADDS_SINCE
    )
    member = CommittingMember(
        getattr(request, "member_id", NO_MEMBER),
        getattr(request, "group_instance_id", None),
        getattr(request, "generation_id", NO_GENERATION),
    )
    admitted = await transactions.admit(transaction, request.group_id)
    application = groups.coordinator_of(request.group_id)
    return await application.commit_in_transaction(
        request.group_id, member, transactions.producer_of(transaction), commits, admitted
    )


def _code_for(code: ErrorCode, version: int) -> ErrorCode:
    """Return the code that clients of this version expect."""
    if code is ErrorCode.concurrent_transactions and version < _ADDS_SINCE:
        return ErrorCode.coordinator_load_in_progress
    if code is ErrorCode.transaction_abortable and version < _ABORTABLE_SINCE:
        return ErrorCode.invalid_txn_state
    return ErrorCode.invalid_producer_epoch if code is ErrorCode.producer_fenced else code


def _commits(request: Any, topics: Sequence[TopicName]) -> Iterator[Commit]:
    for topic, resolved in zip(request.topics, topics, strict=True):
        for row in topic.partitions:
            if resolved.error_of(row.partition_index) is ErrorCode.none:
                epoch = getattr(row, "committed_leader_epoch", -1)
                metadata = row.committed_metadata or ""
                yield Commit(resolved.name, row.partition_index, row.committed_offset, epoch, metadata, resolved.topic_id)


def _response(
    context: RequestContext,
    request: Any,
    topics: Sequence[TopicName],
    errors: Iterator[ErrorCode],
) -> Any:
    rows = []
    for topic, resolved in zip(request.topics, topics, strict=True):
        refusals = [resolved.error_of(row.partition_index) for row in topic.partitions]
        partitions = tuple(
            context.new(
                "TxnOffsetCommitResponsePartition",
                partition_index=row.partition_index,
                error_code=next(errors) if refusal is ErrorCode.none else refusal,
            )
            for row, refusal in zip(topic.partitions, refusals, strict=True)
        )
        rows.append(context.new("TxnOffsetCommitResponseTopic", name=resolved.name or topic.name, partitions=partitions))
    return context.new("TxnOffsetCommitResponse", topics=tuple(rows))


API: Final = HandlerInfo(key=28, min_version=0, max_version=5, handle=handle, access=_ACCESS)
