"""Clients that make progress, however slowly, and clients that wait for a response stay connected; others are closed."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from stratalog_core.connections.silent_clients import FRAME_BYTES_PER_LOOK, FRAME_LOOKS_MAX, LOOK_S, SilentClients

IDLE_LOOKS = 20
LONG = 10 * IDLE_LOOKS


@dataclass(eq=False)
class Client:
    progress: int = 0
    partial_bytes: int = 0
    is_owed: bool = False
    closed: list[str] = field(default_factory=list)

    def close(self, reason: str) -> None:
        self.closed.append(reason)


def looks_until_closed(client: Client, *, progress: int = 0, partial_bytes: int = 0, looks_max: int = LONG) -> int:
    """How many looks the client survives, if it does so much from one to the next."""
    silent = SilentClients([client], IDLE_LOOKS * LOOK_S)
    for look in range(looks_max):
        silent.look()
        if client.closed:
            return look
        client.progress += progress
        client.partial_bytes += partial_bytes
    return looks_max


def test_a_silent_client_is_closed_after_the_idle_time() -> None:
    assert looks_until_closed(Client()) == IDLE_LOOKS - 1


@pytest.mark.parametrize("bytes_per_look", [0, 1, FRAME_BYTES_PER_LOOK - 1])
def test_a_client_that_stops_within_a_frame_or_trickles_is_closed_early(bytes_per_look: int) -> None:
    assert looks_until_closed(Client(partial_bytes=1), partial_bytes=bytes_per_look) == FRAME_LOOKS_MAX - 1


def test_a_client_that_gets_on_stays() -> None:
    assert looks_until_closed(Client(), progress=1) == LONG
    assert looks_until_closed(Client(partial_bytes=7), progress=1) == LONG, "each look sees another frame half sent"
    assert looks_until_closed(Client(partial_bytes=1), partial_bytes=FRAME_BYTES_PER_LOOK) == LONG


def test_a_client_that_waits_for_its_answer_stays() -> None:
    assert looks_until_closed(Client(is_owed=True)) == LONG
    assert looks_until_closed(Client(is_owed=True, partial_bytes=9)) == FRAME_LOOKS_MAX - 1


def test_patience_begins_anew_with_whatever_a_client_does() -> None:
    client = Client()
    silent = SilentClients([client], IDLE_LOOKS * LOOK_S)
    for _ in range(10):
        client.progress += 1
        for _ in range(IDLE_LOOKS - 1):
            silent.look()
    assert not client.closed


def test_clients_that_went_are_forgotten() -> None:
    clients = [Client() for _ in range(100)]
    silent = SilentClients(clients)
    silent.look()
    clients.clear()
    silent.look()
    assert not silent._seen
