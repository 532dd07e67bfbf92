"""The outcome of a guarded update: a command that requires the version of a record and puts or deletes that record. Pure.

Versions never repeat, so a guarded update takes effect at most once, however often it is proposed; once it has been refused, no
earlier proposal of it can take effect any more. Only absence can repeat: an update that creates a record needs another
requirement, which no longer holds once others have deleted that record. Therefore a lost answer is not a dead end::

    propose ─┬ applied ───────────────────→ done
             ├ unknown, or not sent ──────→ propose again until the time is over
             ├ refused ──→ read the record ─┬ as the update leaves it → done: an earlier proposal took effect
             │                              ├ gone, as a deletion leaves it → done if a proposal's outcome is unknown: GONE
             │                              ├ at the required version → the refusal: another requirement does not hold
             │                              └ at another version ─────→ Superseded
             └ any other error ───────────→ raised

``Superseded`` is certain only if no proposal had an unknown outcome. Otherwise the update may have taken effect before another
writer changed the record, and that writer may have built on it: nothing that the update refers to may be deleted.

A record has no trace of who deleted it. After ``GONE``, what else the update changes tells whether it took effect.
"""

from __future__ import annotations

from typing import Final

from stratalog_core.errors import Conflict, Fenced, OutcomeUnknown, Retriable, StratalogError
from stratalog_metadata.records import Versioned
from stratalog_metadata.state.commands import Command, Delete, Put, VersionIs

GONE: Final = 0
"""Instead of a version: the record is gone, by this update's deletion or another writer's."""


class Superseded(StratalogError):
    """The record is at another version than the update requires. ``found`` is the record now.

    ``is_certain``: the update has not taken effect and never will.
    """

    code = "superseded"

    def __init__(self, key: str, found: Versioned | None, *, is_certain: bool) -> None:
        super().__init__(f"{key} was changed by another writer", key=key)
        self.found = found
        self.is_certain = is_certain


class GuardedUpdate:
    """One update in progress. ``command`` requires the version of the record at ``key``, and puts or deletes it.

    ``may_have_applied``: the command was proposed before, with an unknown outcome.
    """

    def __init__(self, command: Command, key: str, *, may_have_applied: bool = False) -> None:
        self.command = command
        self.key = key
        self._version = next(each.version for each in command.requirements if isinstance(each, VersionIs) and each.key == key)
        self._after = next(
            update.record if isinstance(update, Put) else None
            for update in command.updates
            if (isinstance(update, Put) and update.record.key() == key) or (isinstance(update, Delete) and update.key == key)
        )
        self._is_unsure = may_have_applied
        self._failure: StratalogError = OutcomeUnknown(f"the change of {key} was not answered")

    def failed(self, failure: StratalogError) -> bool:
        """Proposing raised ``failure``. Returns whether the record must be read; otherwise the command is proposed again.

        Raises every failure that neither refuses the command nor leaves its outcome open.
        """
        self._failure = failure
        if isinstance(failure, OutcomeUnknown):
            self._is_unsure = True
            return False
        if isinstance(failure, Conflict | Fenced):
            return True
        if isinstance(failure, Retriable):
            return False
        raise failure

    def read(self, found: Versioned | None) -> int:
        """The record was read after a refusal. Returns its version if the update took effect, ``GONE`` if it may have.

        Raises ``Superseded``, or the refusal if another requirement does not hold.
        """
        version = found.version if found is not None else 0
        if version == self._version:
            raise self._failure
        if found is None and self._after is None and self._is_unsure:
            return GONE
        if found is not None and found.record == self._after:
            return version
        raise Superseded(self.key, found, is_certain=not self._is_unsure)

    def not_read(self, failure: StratalogError) -> OutcomeUnknown:
        """Return the error for a record that could not be read after a refusal."""
        return OutcomeUnknown(f"the change of {self.key} was refused, and the record cannot be read: {failure.message}")

    def timed_out(self) -> StratalogError:
        """Return the error for a change that ran out of time to propose again."""
        if self._is_unsure and not isinstance(self._failure, OutcomeUnknown):
            return OutcomeUnknown(f"the change of {self.key} was not answered in time: {self._failure.message}")
        return self._failure
