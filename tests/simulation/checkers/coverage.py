"""Counts the states that a run reached, and how much the cluster did.

A passing simulation proves nothing if its faults never hit their targets. Each run counts the states of ``STATES`` and must
reach the amounts in ``PROGRESS``; a suite fails if none of its runs met one of the states.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

ACKNOWLEDGED: Final = "records acknowledged"
ENTRIES: Final = "entries confirmed"
SEALED: Final = "ledgers sealed with records"
OFFLOADED: Final = "offsets offloaded"
COMMITTED: Final = "group commits acknowledged"
HANDED_OVER: Final = "partition handed over to its next owner"
TAKEN_OVER: Final = "partition taken over without a handover"

OPEN_AT_TAKEOVER: Final = "takeover of an open ledger"
RECOVERY_AT_TAKEOVER: Final = "takeover of a ledger in recovery"
RECOVERY_INTERRUPTED: Final = "recovery interrupted by a crash"
HANDOVER_BY_SEAL: Final = "handover in the command that seals"
REPEATED_TO_NEXT_OWNER: Final = "acknowledged batch repeated to another owner"
RETRIED_AT_NEXT_OWNER: Final = "unanswered batch retried at another owner"
PARTS: Final = "checkpoint of several parts"
SEVERAL_IN_FLIGHT: Final = "several batches of a partition in flight"
FROM_TAIL: Final = "fetch from the tail cache"
FROM_BOOKIES: Final = "fetch from bookies"
FROM_STORE: Final = "fetch from the object store"
FROM_REPLICA: Final = "fetch from a replica that does not own the partition"
HELD_BACK: Final = "fetch of history held back for producers"
INSTEAD_OF_BOOKIES: Final = "fetch from the object store because the bookies failed"
ENSEMBLE_CHANGE: Final = "ensemble change"
CHANGE_AT_SEAL: Final = "ensemble change during a seal"
CHANGE_IN_RECOVERY: Final = "ensemble change in a recovery"
COPIES_MOVED: Final = "copies of a sealed ledger moved"
HOT_DROPPED: Final = "hot copy dropped after its offload"
UNKNOWN_OPENING: Final = "outcome unknown: opening of a ledger"
UNKNOWN_SEAL: Final = "outcome unknown: close of a ledger"
UNKNOWN_CHANGE: Final = "outcome unknown: change of a ledger's record"
UNKNOWN_MANIFEST: Final = "outcome unknown: commit of a manifest"
UNKNOWN_DROP: Final = "outcome unknown: drop of hot copies"
UNKNOWN_OWNER: Final = "outcome unknown: change of an owner"
UNKNOWN_OBJECT: Final = "outcome unknown: write of an object"
LATE_OPENING: Final = "late opening took effect"
LATE_INTERNAL_OPENING: Final = "late opening of an internal topic took effect"
UNFINISHED_IN_A_ROW: Final = "opening after two without a durable checkpoint"
TOPIC_DELETED: Final = "topic deleted"
TOPIC_RESTORED: Final = "topic restored"
HANDED_OVER_UNNOTICED: Final = "reads from an owner that does not know of its handover"
MARKED_LATE: Final = "deletion markers written after the restore"
PARTITIONS_ADDED: Final = "partitions added"
RECORDS_DELETED: Final = "records deleted by a client"
START_MOVED: Final = "start of a log moved"
START_AT_TAKEOVER: Final = "start of a log moved during its takeover"
MERGED: Final = "segments merged"
COMPACTED: Final = "segments compacted"
TOMBSTONE_DELETED: Final = "tombstones deleted by a compaction"
EXPIRED_DELETED: Final = "expired records deleted by a compaction"
SUPERSEDED_REMOVED: Final = "superseded records removed beside workers that compact"
COMPACTED_AWAY: Final = "superseded records that readers did not find any more"
READ_IN_A_GAP: Final = "fetch from an offset that compaction removed"
READ_OVERTAKEN: Final = "history removed by retention while a replica read it"
MARKER_GONE: Final = "aborted transaction not reported because compaction removed its marker"
EXPIRED: Final = "segments removed by retention"
EXPIRED_HOT: Final = "hot ledgers removed by retention while the store was away"
EXPIRED_HOT_WITHOUT_WRITES: Final = "hot ledgers removed by retention while the store carried out no write"
READ_WITHOUT_WRITES: Final = "records acknowledged and read while the store carried out no write"
DELETIONS_REFUSED: Final = "retention while the store refused deletions"
EXPIRED_BY_SIZE: Final = "segments removed by retention.bytes"
EXPIRED_HOT_BY_SIZE: Final = "hot ledgers removed by retention.bytes while copying was disabled"
DELETED_HOT: Final = "hot ledgers of deleted records removed while copying was disabled"
SEGMENT_SIZED: Final = "segment of several ledgers under its topic's size"
RESUMED: Final = "topic copied again after a pause"
FORKED: Final = "history of a partition forked"
COPIED: Final = "objects of a second copy"
REPAIRED: Final = "objects repaired from the other copy"
LEASED: Final = "objects that left the history under a reader's lease"
ERASED: Final = "segments without their erased records"
REPAIRED_FROM_HOT: Final = "segments written again from their hot copies"
PART_DAMAGED: Final = "parts of manifests damaged beside workers"
COLLECTED: Final = "objects that a command collected as garbage"
COMMAND_EXPIRED: Final = "command refused because its lease had expired"
ATTACHED: Final = "topic attached"
ATTACHMENT_DIED: Final = "attachment given up"
DETACHED: Final = "topic detached"
DETACHED_BEFORE_MARKED: Final = "deletion marker written after its topic was restored and detached"
LOCKED_DELETED: Final = "objects deleted after their lock"
LOCKED_MERGED: Final = "merged segments that took over a lock"
LOCKED_EXPIRED: Final = "segments removed by retention after their lock"
DRAINED: Final = "broker drained"
CONTROLLED_SHUTDOWN: Final = "controlled shutdown of a broker"
NEW_LEADER: Final = "new leader of the metadata quorum"
SEVERAL_OF_A_TRANSACTION: Final = "several batches of a transaction in flight"
TRANSACTIONS_COMMITTED: Final = "transactions committed"
TRANSACTIONS_ABORTED: Final = "transactions aborted by their producers"
TRANSACTIONS_TIMED_OUT: Final = "transactions aborted after their timeout"
TIMED_OUT_ABORTED: Final = "transactions aborted by their producers after their timeout"
TRANSACTIONS_CONTINUED: Final = "decided transactions continued by the next coordinator"
MARKER_DEFERRED: Final = "marker deferred because its topic was deleted"
ZOMBIES_REFUSED: Final = "requests of fenced producers refused"
EPOCHS_EXHAUSTED: Final = "producers given another id because their epochs were exhausted"
EMPTY_ABORTED: Final = "empty transactions aborted"
LATE_BATCHES_REFUSED: Final = "batches of an earlier transaction's epoch refused"
SESSION_LOST: Final = "fetch session lost with its broker, or evicted"
SESSION_REFUSED: Final = "fetch session refused because there are too many"
SESSION_REJOINED: Final = "partition back in a fetch session that it had left"
ERROR_REPEATED: Final = "error of a partition repeated in a fetch session"
GROUP_DELETED: Final = "group deleted by an administrator"
GROUP_SUCCEEDED: Final = "deleted group joined again at once"
OFFSETS_DELETED: Final = "offsets of a group deleted by an administrator"
MEMBER_KEPT: Final = "member of a group known to the next coordinator"
COMPACTED_RECORDS_DELETED: Final = "records of a compacted topic deleted by a client"
COMPACTED_RECORDS_KEPT: Final = "deletion of records refused because their topic is only compacted"
FENCED_WRITER: Final = "writer fenced by a recovery"
GROUP_UPGRADED: Final = "classic group with members upgraded"
GROUP_DOWNGRADED: Final = "consumer group with members downgraded"

BUCKET_TAKEN_OVER: Final = "bucket taken over by a restore"
TAKEN_OVER_AGAIN: Final = "bucket taken over again by another restore"
RESTORE_REPEATED: Final = "restore repeated after it was interrupted"
RESTORED_TO_A_POINT: Final = "bucket restored up to a point in time"
RESTORED_IN_STEPS: Final = "one topic restored before the others"
RESTORED_BESIDE_DAMAGED: Final = "one topic restored while the descriptors of the others are damaged"
CUT_BEFORE_TRANSACTION: Final = "history cut before a transaction that was open at the point"
EARLIER_DELETION: Final = "topic that an earlier owner of the bucket deleted collected"
UNDELETED_BEFORE: Final = "deleted topic restored before the bucket was taken over"
METADATA_RESTORED: Final = "metadata restored from an old copy"
COORDINATOR_RESTORED: Final = "coordinator restored because its ledgers were gone"
REFUSED_AFTER_TAKEOVER: Final = "worker of an earlier owner of the bucket refused"

ALWAYS: Final = (ACKNOWLEDGED, ENTRIES, SEALED, OFFLOADED, COMMITTED)
"""Counted in amounts; the others in occurrences."""
STATES: Final = (
    *ALWAYS, HANDED_OVER, TAKEN_OVER, SEVERAL_IN_FLIGHT, OPEN_AT_TAKEOVER, RECOVERY_AT_TAKEOVER, RECOVERY_INTERRUPTED,
    HANDOVER_BY_SEAL, REPEATED_TO_NEXT_OWNER, RETRIED_AT_NEXT_OWNER, PARTS, FROM_TAIL, FROM_BOOKIES, FROM_STORE,
    INSTEAD_OF_BOOKIES, FROM_REPLICA, HELD_BACK,
    ENSEMBLE_CHANGE, CHANGE_AT_SEAL, CHANGE_IN_RECOVERY, COPIES_MOVED, HOT_DROPPED, UNKNOWN_OPENING, UNKNOWN_SEAL,
    UNKNOWN_CHANGE, UNKNOWN_MANIFEST, UNKNOWN_DROP, UNKNOWN_OWNER, UNKNOWN_OBJECT, LATE_OPENING, LATE_INTERNAL_OPENING,
    UNFINISHED_IN_A_ROW, SEVERAL_OF_A_TRANSACTION, TRANSACTIONS_COMMITTED, TRANSACTIONS_ABORTED, TRANSACTIONS_TIMED_OUT,
    TRANSACTIONS_CONTINUED, TIMED_OUT_ABORTED, MARKER_DEFERRED,
    ZOMBIES_REFUSED, EMPTY_ABORTED, EPOCHS_EXHAUSTED,
    LATE_BATCHES_REFUSED, NEW_LEADER, FENCED_WRITER, TOPIC_DELETED, TOPIC_RESTORED, MARKED_LATE,
    HANDED_OVER_UNNOTICED,
    PARTITIONS_ADDED,
    RECORDS_DELETED, START_MOVED, START_AT_TAKEOVER, MERGED, COMPACTED, TOMBSTONE_DELETED, EXPIRED_DELETED,
    COMPACTED_AWAY, SUPERSEDED_REMOVED, READ_IN_A_GAP, MARKER_GONE, READ_OVERTAKEN, EXPIRED, EXPIRED_HOT,
    EXPIRED_HOT_WITHOUT_WRITES, READ_WITHOUT_WRITES, DELETIONS_REFUSED,
    EXPIRED_BY_SIZE, EXPIRED_HOT_BY_SIZE, DELETED_HOT, SEGMENT_SIZED, RESUMED, FORKED, COPIED, REPAIRED, LEASED, ATTACHED,
    ERASED, REPAIRED_FROM_HOT, PART_DAMAGED, COLLECTED, COMMAND_EXPIRED,
    ATTACHMENT_DIED, DETACHED, DETACHED_BEFORE_MARKED, LOCKED_DELETED, LOCKED_MERGED, LOCKED_EXPIRED, DRAINED,
    CONTROLLED_SHUTDOWN, GROUP_UPGRADED,
    GROUP_DOWNGRADED, SESSION_LOST, SESSION_REFUSED, SESSION_REJOINED, ERROR_REPEATED, GROUP_DELETED, GROUP_SUCCEEDED,
    OFFSETS_DELETED, MEMBER_KEPT, COMPACTED_RECORDS_DELETED, COMPACTED_RECORDS_KEPT, BUCKET_TAKEN_OVER, TAKEN_OVER_AGAIN,
    RESTORE_REPEATED, RESTORED_TO_A_POINT, RESTORED_IN_STEPS, CUT_BEFORE_TRANSACTION, REFUSED_AFTER_TAKEOVER,
    EARLIER_DELETION, UNDELETED_BEFORE, RESTORED_BESIDE_DAMAGED, METADATA_RESTORED, COORDINATOR_RESTORED,
)  # fmt: skip
PROGRESS: Final[Mapping[str, Mapping[str, int]]] = {
    "ledgers": {ENTRIES: 2, SEALED: 1},
    "fencing-races": {ENTRIES: 20, SEALED: 2},
    "lost-disks": {ENTRIES: 100, SEALED: 5, COPIES_MOVED: 5},
    "ownership-changes": {ACKNOWLEDGED: 10, SEALED: 2, OFFLOADED: 10, COMMITTED: 2},
    "compaction": {COMPACTED: 3},
    "commands": {OFFLOADED: 20, ERASED: 1},
    "restores": {BUCKET_TAKEN_OVER: 1, OFFLOADED: 20},
    "compacted-topics": {ACKNOWLEDGED: 5, SEALED: 2, OFFLOADED: 10},
    "outages": {ACKNOWLEDGED: 150, SEALED: 3, OFFLOADED: 200, COMMITTED: 5},
    "everything": {ACKNOWLEDGED: 20, SEALED: 2, OFFLOADED: 10},
    "transactions": {TRANSACTIONS_COMMITTED: 1},
    "consumers": {ACKNOWLEDGED: 10, SEALED: 2, OFFLOADED: 10, COMMITTED: 2},
    "old-metadata": {ACKNOWLEDGED: 30, METADATA_RESTORED: 1},
    "log": {ACKNOWLEDGED: 30, SEALED: 2, OFFLOADED: 30, COMMITTED: 1},
}
"""Minimum amounts for each run of a scenario, about a tenth of the minimum that 50 runs reached.

A run may have bad luck: half of 52 runs of ``ledgers`` confirmed over 760 entries; one, whose bookies crashed 60 times, 22.
"""


class Coverage:
    """The states that one run met, and how often."""

    def __init__(self) -> None:
        self.met: Counter[str] = Counter()

    def meet(self, state: str, times: int = 1) -> None:
        """Count one of ``STATES``."""
        assert state in STATES, f"{state!r} is not in coverage.STATES"
        if times:
            self.met[state] += times

    def require_progress(self, scenario: str) -> None:
        """Raise ``AssertionError`` if the run did less than every run of its scenario must."""
        for what, least in PROGRESS.get(scenario, {}).items():
            assert self.met[what] >= least, f"no progress: {self.met[what]} {what}; at least {least} are expected"


def table(runs: Iterable[tuple[str, Mapping[str, int]]]) -> list[str]:
    """Return lines of a Markdown table: for each state how many runs met it, how often, and in which scenarios."""
    rows = list(runs)
    lines = ["| state | runs | times | scenarios |", "| --- | --- | --- | --- |"]
    for state in STATES:
        meeting = [(scenario, met[state]) for scenario, met in rows if met.get(state)]
        scenarios = ", ".join(sorted({f"`{scenario}`" for scenario, _ in meeting}))
        lines.append(f"| {state} | {len(meeting)} of {len(rows)} | {sum(times for _, times in meeting)} | {scenarios} |")
    return lines


def never_met(runs: Sequence[Mapping[str, int]]) -> list[str]:
    """Return the states that none of the runs met."""
    return [state for state in STATES if not any(met.get(state) for met in runs)]
