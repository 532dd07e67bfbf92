"""Incremental fetch sessions (KIP-227): a consumer sends its partitions once, then only the changes. Sans-IO.

Sessions, and the partitions of all sessions together, are bounded. A consumer without a session is served too, with a full
response each time. A session that was not used for two minutes may be evicted for a new one, as in Kafka.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from kio.schema.errors import ErrorCode

from stratalog_broker.protocol.fetch_request import FetchRequest, FetchWanted, PartitionKey
from stratalog_core.ports import Random

INITIAL_EPOCH: Final = 0
FINAL_EPOCH: Final = -1
NO_SESSION: Final = 0
EVICTABLE_AFTER_S: Final = 120.0
_EPOCH_MAX: Final = 2**31 - 1


class FetchSession:
    """One consumer's partitions, in the order in which the next response serves them."""

    __slots__ = ("epoch", "partitions", "session_id", "used_at_s")

    def __init__(self, session_id: int, wanted: Iterable[FetchWanted], now_s: float) -> None:
        self.session_id = session_id
        self.epoch = INITIAL_EPOCH + 1
        self.partitions = {(one.key, one.index): one for one in wanted}
        self.used_at_s = now_s

    def update(self, wanted: Iterable[FetchWanted], forgotten: Iterable[PartitionKey]) -> None:
        """Apply an incremental request."""
        for one in wanted:
            known = self.partitions.get((one.key, one.index))
            if known is not None:
                one.told = known.told
            self.partitions[(one.key, one.index)] = one
        for key in forgotten:
            self.partitions.pop(key, None)

    def served(self, key: PartitionKey) -> None:
        """Move a partition that got records to the end, so that the others come first next time."""
        one = self.partitions.pop(key, None)
        if one is not None:
            self.partitions[key] = one

    def __iter__(self) -> Iterator[FetchWanted]:
        return iter(self.partitions.values())


class SessionRefused(Exception):
    """The session is refused; the whole response carries ``code``."""

    def __init__(self, code: ErrorCode) -> None:
        super().__init__(code.name)
        self.code = code


class FetchSessions:
    """All sessions of a broker, least recently used first."""

    def __init__(self, sessions_max: int, partitions_max: int, random: Random) -> None:
        self._sessions_max = sessions_max
        self._partitions_max = partitions_max
        self._random = random
        self._sessions: dict[int, FetchSession] = {}
        self._partitions = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def of(self, request: FetchRequest, now_s: float) -> tuple[FetchSession | None, list[FetchWanted], bool]:
        """Return a request's session, if it has one, the partitions that it wants, and whether the session goes on.

        Raises ``SessionRefused``.
        """
        if request.session_epoch in (INITIAL_EPOCH, FINAL_EPOCH):
            self.end(request.session_id)
            is_first = request.session_epoch == INITIAL_EPOCH
            return self.begin(request.wanted, now_s) if is_first else None, request.wanted, False
        session = self.resume(request.session_id, request.session_epoch, request.wanted, request.forgotten, now_s)
        return session, list(session), True

    def begin(self, wanted: list[FetchWanted], now_s: float) -> FetchSession | None:
        """Return a new session, or None if there is no room for one."""
        if not 0 < len(wanted) <= self._partitions_max:
            return None
        while len(self._sessions) >= self._sessions_max or self._partitions + len(wanted) > self._partitions_max:
            if not self._evict(now_s):
                return None
        session_id = self._random.randrange(2**31 - 1) + 1
        while session_id in self._sessions:
            session_id = self._random.randrange(2**31 - 1) + 1
        session = self._sessions[session_id] = FetchSession(session_id, wanted, now_s)
        self._partitions += len(session.partitions)
        return session

    def resume(
        self, session_id: int, epoch: int, wanted: list[FetchWanted], forgotten: Iterable[PartitionKey], now_s: float
    ) -> FetchSession:
        """Apply an incremental request and return the session. Raises ``SessionRefused``."""
        session = self._sessions.pop(session_id, None)
        if session is None:
            raise SessionRefused(ErrorCode.fetch_session_id_not_found)
        self._sessions[session_id] = session
        if epoch != session.epoch:
            raise SessionRefused(ErrorCode.invalid_fetch_session_epoch)
        session.epoch = 1 if session.epoch == _EPOCH_MAX else session.epoch + 1
        session.used_at_s = now_s
        before = len(session.partitions)
        session.update(wanted, forgotten)
        self._partitions += len(session.partitions) - before
        while self._partitions > self._partitions_max and self._evict(now_s):
            pass
        if self._partitions > self._partitions_max:
            self.end(session_id)
            raise SessionRefused(ErrorCode.fetch_session_id_not_found)
        return session

    def end(self, session_id: int) -> None:
        """Remove a session; does nothing if it is unknown."""
        session = self._sessions.pop(session_id, None)
        if session is not None:
            self._partitions -= len(session.partitions)

    def _evict(self, now_s: float) -> bool:
        oldest = next(iter(self._sessions.values()), None)
        if oldest is None or now_s - oldest.used_at_s < EVICTABLE_AFTER_S:
            return False
        self.end(oldest.session_id)
        return True
