"""What a bookie counts, for INFO. Numbers only rise, from 0 at the start of the process."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(slots=True)
class Counters:
    """Bytes are payload and headers as received, but for ``log_bytes`` (everything written), ``read_bytes`` and
    ``audit_copied_bytes`` (payload).
    """

    add_requests: int = 0
    add_entries: int = 0
    add_bytes: int = 0
    adds_overloaded: int = 0
    log_groups: int = 0
    log_bytes: int = 0
    read_requests: int = 0
    direct_reads: int = 0
    read_entries: int = 0
    read_bytes: int = 0
    unreadable_entries: int = 0
    fences: int = 0
    ledgers_deleted: int = 0
    files_recycled: int = 0
    compacted_bytes: int = 0
    scrubbed_bytes: int = 0
    scrub_errors: int = 0
    damaged_entries: int = 0
    healed_entries: int = 0
    mended_files: int = 0
    audit_copied_entries: int = 0
    audit_copied_bytes: int = 0
    audit_moves: int = 0

    def as_dict(self) -> dict[str, int]:
        return {field.name: getattr(self, field.name) for field in fields(self)}
