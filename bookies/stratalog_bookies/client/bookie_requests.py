"""All requests to bookies except adds, batched by bookie.

Requests to one bookie from one event-loop turn are sent as one, so that the recovery of a thousand ledgers costs a few requests
per bookie. Items that an answer left out for its byte bound are requested again, together with newer ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Generic, TypeVar

from stratalog_bookies.client.directory import BookieDirectory
from stratalog_bookies.protocol import messages
from stratalog_bookies.protocol.messages import LedgerTail, Range, RangeAnswer, Status
from stratalog_core.errors import Corrupt, Invalid, StratalogError, Unavailable
from stratalog_core.ports import Buffer

Item = TypeVar("Item")
Answer = TypeVar("Answer")

_ITEMS_MAX: Final = 4096
"""Maximum ledgers or ranges in one batched request."""
_RECOVERY_READ_BYTES_MAX: Final = 8 * 1024 * 1024
_READ_TOGETHER_BYTES_MAX: Final = 8 * 1024 * 1024


class Batcher(Generic[Item, Answer]):
    """Collects questions of one kind per bookie until the end of the turn and distributes the answer.

    ``is_left_out`` tells whether a part of the answer is empty only because other parts used up the bound: then it is asked
    again.
    """

    def __init__(
        self,
        directory: BookieDirectory,
        method: int,
        encode: Callable[[list[Item]], Sequence[Buffer]],
        decode: Callable[[memoryview], Sequence[Answer]],
        timeout_s: float,
        is_left_out: Callable[[Item, Answer], bool] = lambda item, answer: False,
    ) -> None:
        self._is_left_out = is_left_out
        self._directory = directory
        self._method = method
        self._encode = encode
        self._decode = decode
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[str, list[tuple[Item, asyncio.Future[Answer]]]] = {}

    def ask(self, bookie: str, item: Item) -> asyncio.Future[Answer]:
        """Ask ``bookie``. The future raises what the channel or the bookie answers, ``Unavailable`` for an
        unregistered bookie.
        """
        future: asyncio.Future[Answer] = self._loop.create_future()
        self._asked_of(bookie).append((item, future))
        return future

    def _asked_of(self, bookie: str) -> list[tuple[Item, asyncio.Future[Answer]]]:
        """Send what was collected for ``bookie`` in this turn."""
        if not self._waiting:
            self._loop.call_soon(self._flush)
        return self._waiting.setdefault(bookie, [])

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for bookie, asked in waiting.items():
            channel = self._directory.channel(bookie)
            for first in range(0, len(asked), _ITEMS_MAX):
                chunk = asked[first : first + _ITEMS_MAX]
                if channel is None:
                    futures = [future for _, future in chunk]
                    self._loop.call_soon(_fail_all, futures, Unavailable(f"bookie {bookie} is not registered"))
                else:
                    on_reply = partial(self._on_reply, bookie, chunk)
                    channel.send(self._method, self._encode([item for item, _ in chunk]), on_reply, self._timeout_s)

    def _on_reply(
        self, bookie: str, asked: list[tuple[Item, asyncio.Future[Answer]]], answer: memoryview | StratalogError
    ) -> None:
        futures = [future for _, future in asked]
        if isinstance(answer, StratalogError):
            _fail_all(futures, answer)
            return
        try:
            parts = self._decode(answer)
        except Invalid as malformed:
            _fail_all(futures, Corrupt(malformed.message))
            return
        if len(parts) != len(futures):
            _fail_all(futures, Corrupt(f"the answer has {len(parts)} parts for {len(futures)} questions"))
            return
        left_out = [self._is_left_out(item, part) for (item, _), part in zip(asked, parts, strict=True)]
        may_ask_again = not all(left_out)
        for question, part, again in zip(asked, parts, left_out, strict=True):
            if question[1].done():
                continue
            if again and may_ask_again:
                self._asked_of(bookie).append(question)
            else:
                question[1].set_result(part)


def _fail_all(futures: Sequence[asyncio.Future[Answer]], error: StratalogError) -> None:
    for future in futures:
        if not future.done():
            future.set_exception(error)


class BookieRequests:
    """The requests of one client. Answers are futures; if an answer is lost the future raises, and the outcome is unknown."""

    def __init__(self, directory: BookieDirectory, timeout_s: float) -> None:
        self._directory = directory
        self._timeout_s = timeout_s
        self._fences = Batcher(directory, messages.FENCE, _encode_ledger_ids, _decode_tails, timeout_s)
        self._lacs = Batcher(directory, messages.LAC, _encode_ledger_ids, _decode_tails, timeout_s)
        self._recovery_reads = Batcher(
            directory, messages.READ, _encode_recovery_read, messages.decode_read_answer, timeout_s, _is_left_out
        )  # fmt: skip
        self._reads = Batcher(
            directory, messages.READ, _encode_read_together, messages.decode_read_answer, timeout_s, _is_left_out
        )  # fmt: skip
        self._heads: dict[int, Batcher[Range, RangeAnswer]] = {}

    def fence(self, bookie: str, ledger_id: int) -> asyncio.Future[LedgerTail]:
        return self._fences.ask(bookie, ledger_id)

    def lac(self, bookie: str, ledger_id: int) -> asyncio.Future[LedgerTail]:
        return self._lacs.ask(bookie, ledger_id)

    def recovery_read(self, bookie: str, asked: Range) -> asyncio.Future[RangeAnswer]:
        """A read that fences first. The byte bound of the batch may cut the answer short, but not to nothing."""
        return self._recovery_reads.ask(bookie, asked)

    def heads(self, bookie: str, asked: Range, head_bytes: int) -> asyncio.Future[RangeAnswer]:
        """Sizes and first ``head_bytes`` of payloads. The bound of the batch may cut the answer short, but not to nothing."""
        batcher = self._heads.get(head_bytes)
        if batcher is None:
            encode = partial(_encode_heads, head_bytes=head_bytes)
            decode = partial(messages.decode_read_answer, head_bytes=head_bytes)
            batcher = Batcher(self._directory, messages.READ_HEADERS, encode, decode, self._timeout_s, _is_left_out)
            self._heads[head_bytes] = batcher
        return batcher.ask(bookie, asked)

    def read(self, bookie: str, ranges: Sequence[Range], bytes_max: int) -> asyncio.Future[list[RangeAnswer]]:
        """One read, not batched: the byte bound is its own."""
        return self._ask(bookie, messages.READ, messages.encode_read(ranges, bytes_max), messages.decode_read_answer)

    def read_together(self, bookie: str, asked: Range) -> asyncio.Future[RangeAnswer]:
        """A read batched with those of other ledgers, for few and small entries.

        The byte bound of the batch may cut the answer short, but not to nothing.
        """
        return self._reads.ask(bookie, asked)

    def held(self, bookie: str, asked: Range) -> asyncio.Future[list[RangeAnswer]]:
        """Which entries of the range ``bookie`` has durably: headers without payloads."""
        parts = messages.encode_read_headers((asked,), 0)
        return self._ask(bookie, messages.READ_HEADERS, parts, partial(messages.decode_read_answer, head_bytes=0))

    def add(self, bookie: str, headers: Sequence[bytes], payloads: Sequence[Buffer]) -> asyncio.Future[bytes]:
        """One ADD beside those of writers; a status per entry."""
        return self._ask(bookie, messages.ADD, messages.encode_add(headers, payloads), messages.decode_statuses)

    def write_lacs(self, bookie: str, lacs: Sequence[tuple[int, int]]) -> asyncio.Future[bytes]:
        body = messages.encode(messages.ExplicitLacs(lacs=tuple(lacs)))
        return self._ask(bookie, messages.WRITE_LAC, (body,), messages.decode_statuses)

    def await_lac(self, bookie: str, ledger_id: int, above: int, max_wait_s: float) -> asyncio.Future[LedgerTail]:
        """The ledger's tail, as soon as its LAC there is greater than ``above``, it is fenced, or the time is up."""
        wanted = messages.AwaitLac(ledger_id=ledger_id, above=above, max_wait_ms=round(max_wait_s * 1000))
        return self._ask(
            bookie, messages.AWAIT_LAC, (messages.encode(wanted),), partial(messages.decode, LedgerTail), waits_s=max_wait_s
        )  # fmt: skip

    def delete(self, bookie: str, ledger_ids: Sequence[int]) -> asyncio.Future[bytes]:
        body = messages.encode(messages.LedgerIds(ledger_ids=tuple(ledger_ids)))
        return self._ask(bookie, messages.DELETE, (body,), messages.decode_statuses)

    def _ask(
        self,
        bookie: str,
        method: int,
        parts: Sequence[Buffer],
        decode: Callable[[memoryview], Answer],
        waits_s: float = 0.0,
    ) -> asyncio.Future[Answer]:
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        channel = self._directory.channel(bookie)
        if channel is None:
            future.set_exception(Unavailable(f"bookie {bookie} is not registered"))
        else:
            channel.send(method, parts, partial(_settle, future, decode), self._timeout_s + waits_s)
        return future


def _settle(
    future: asyncio.Future[Answer], decode: Callable[[memoryview], Answer], answer: memoryview | StratalogError
) -> None:
    if future.done():
        return
    if isinstance(answer, StratalogError):
        future.set_exception(answer)
        return
    try:
        future.set_result(decode(answer))
    except Invalid as malformed:
        future.set_exception(Corrupt(malformed.message))


def _encode_ledger_ids(ledger_ids: list[int]) -> Sequence[Buffer]:
    return (messages.encode(messages.LedgerIds(ledger_ids=tuple(ledger_ids))),)


def _decode_tails(body: memoryview) -> Sequence[LedgerTail]:
    return messages.decode(messages.LedgerTails, body).ledgers


def _encode_recovery_read(ranges: list[Range]) -> Sequence[Buffer]:
    return messages.encode_read(ranges, _RECOVERY_READ_BYTES_MAX, messages.FENCE_FIRST)


def _encode_read_together(ranges: list[Range]) -> Sequence[Buffer]:
    return messages.encode_read(ranges, _READ_TOGETHER_BYTES_MAX)


def _is_left_out(asked: Range, answer: RangeAnswer) -> bool:
    """Whether earlier ranges used up the bound: this one lists nothing and decides nothing, without an error."""
    return answer.status == Status.OK and not answer.entries and answer.decided_to < asked.first


def _encode_heads(ranges: list[Range], head_bytes: int) -> Sequence[Buffer]:
    return messages.encode_read_headers(ranges, head_bytes)
