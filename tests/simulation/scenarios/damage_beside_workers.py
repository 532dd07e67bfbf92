"""A step of the ``commands`` scenario: objects of the bucket are lost or damaged for a while, in one store without a copy.

Checked: a hot copy stays while the data key of its cold copy is lost (``CommandsAudit``). While the tree pages and the lists of
removed objects are damaged, partitions are offloaded and expire.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from simulation.checkers.coverage import PART_DAMAGED
from simulation.world.clock import SimulatedClock
from stratalog_metadata.records import Ledger, Log, ManifestPointer, Topic, ledger_key, log_key, manifest_pointer_key
from stratalog_tiering.format.manifest import decode_manifest

if TYPE_CHECKING:
    from simulation.scenarios.commands import Scenario

KEY_LOST_S: Final = 4.0
"""Longer than a hot copy stays, and a worker's pause after a failure."""
DUE_IN_MS_MIN: Final = 500
"""A hot copy that is to be dropped so much later is not being dropped yet."""
DAMAGED_S: Final = 6.0
"""Longer than the grace period, so that objects of the damaged lists are due, and several tree pages are made."""


class DamageStep:
    """One run of the step, without other faults. ``copied`` keeps hot copies for a while, ``live`` are written."""

    def __init__(self, scenario: Scenario, copied: Topic, live: Sequence[Topic]) -> None:
        self._scenario = scenario
        self._copied = copied
        self._live = live

    async def run(self) -> None:
        if self._scenario.world.decides("lost-data-key"):
            await self._lose_a_data_key()
        if self._scenario.world.decides("damaged-parts"):
            await self._damage_parts()

    async def _lose_a_data_key(self) -> None:
        """Remove the data key of a segment shortly before the hot copy of its records is to be dropped; put it back later."""
        missing = f"no hot copy of {self._copied.name} stays after its offload"
        await self._scenario.until(lambda: "" if self._data_key_of_hot() else missing)
        key, objects = self._data_key_of_hot(), self._scenario.bucket.objects
        content = objects.pop(key)
        self._scenario.world.note(f"{key} is lost")
        await self._scenario.pass_time(KEY_LOST_S)
        objects.setdefault(key, content)

    def _data_key_of_hot(self) -> str:
        """The data key of a segment whose hot copy is not to be dropped yet; empty if there is none."""
        audit, topic = self._scenario.audit, self._copied
        log = audit.records[log_key(topic.topic_id, 0)]
        assert isinstance(log, Log)
        for ref in reversed(log.ledgers):
            ledger = audit.records[ledger_key(ref.ledger_id)]
            assert isinstance(ledger, Ledger)
            due_ms = ledger.closed_at_ms + int(topic.configs["local.retention.ms"])
            if due_ms - SimulatedClock(self._scenario.world.loop).wall_ms() > DUE_IN_MS_MIN:
                key = audit.data_key_at(self._pointer(topic), ref.base_offset)
                if key in self._scenario.bucket.objects:
                    return key
        return ""

    async def _damage_parts(self) -> None:
        """Alter all tree pages and lists, and require that the history continues and expires; put them back later."""
        objects, altered = self._scenario.bucket.objects, dict[str, tuple[bytes, bytes]]()
        for topic in self._live:
            manifest = decode_manifest(self._scenario.bucket.manifest_content(self._pointer(topic)))
            for key in (*(ref.key for ref in manifest.tree.pages), *(ref.key for ref in manifest.removed_lists)):
                content, written, when = objects[key]
                altered[key] = content, content[:-1] + bytes([content[-1] ^ 1])
                objects[key] = altered[key][1], written, when
        self._scenario.world.coverage.meet(PART_DAMAGED, len(altered))
        self._scenario.world.note(f"{len(altered)} parts of manifests are damaged")
        await self._scenario.pass_time(DAMAGED_S)
        before = [self._pointer(topic) for topic in self._live]
        await self._scenario.until(lambda: self._stopped(before))
        for key, (content, damaged) in altered.items():
            if key in objects and objects[key][0] == damaged:
                objects[key] = content, *objects[key][1:]

    def _stopped(self, before: Sequence[ManifestPointer]) -> str:
        """The first partition that has not continued since ``before``; empty if all have."""
        for topic, earlier in zip(self._live, before, strict=True):
            now = self._pointer(topic)
            expires = topic.configs["retention.ms"] != "-1"
            if now.end_offset == earlier.end_offset or (expires and now.start_offset == earlier.start_offset):
                return f"while parts of its manifest are damaged, {topic.name} stays at {now.start_offset}..{now.end_offset}"
        return ""

    def _pointer(self, topic: Topic) -> ManifestPointer:
        pointer = self._scenario.audit.records[manifest_pointer_key(topic.topic_id, 0)]
        assert isinstance(pointer, ManifestPointer)
        return pointer
