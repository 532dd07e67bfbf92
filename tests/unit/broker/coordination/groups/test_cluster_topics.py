"""The topics that match the patterns of consumer groups, within a bound on memory."""

from __future__ import annotations

from uuid import UUID
from zlib import crc32

import pytest
from unit.broker.hand_fed_view import HandFedView

from stratalog_broker.coordination.groups import topics as topics_module
from stratalog_broker.coordination.groups.topics import ClusterTopics
from stratalog_metadata.records import Topic, topic_key

TOPICS = 50


def _topic(name: str) -> Topic:
    return Topic(topic_id=UUID(int=crc32(name.encode())), name=name, partition_count=1, replication_factor=1)


@pytest.fixture
def view() -> HandFedView:
    made = HandFedView()
    made.put(*(_topic(f"team{number}.events") for number in range(TOPICS)))
    return made


def test_a_pattern_matches_topics_that_come_and_go(view: HandFedView) -> None:
    topics = ClusterTopics(view)
    assert topics.matching("team1.*") == {"team1.events", *(f"team1{digit}.events" for digit in range(10))}
    view.put(_topic("team1.other"))
    view.remove(topic_key("team1.events"))
    assert topics.matching("team1[.].*") == {"team1.other"}
    assert topics.matching("team1.*") == {"team1.other", *(f"team1{digit}.events" for digit in range(10))}


def test_patterns_of_any_kind_stay_within_their_memory(view: HandFedView, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topics_module, "PATTERN_BYTES_MAX", 4 << 20)
    topics = ClusterTopics(view)
    greedy = "|".join(f"{letter}{'x' * 30}" for letter in "abcdefghijklmnopqrstuvwxyz" * 4)
    for number in range(300):
        everything = topics.matching(f"team.*|{number}")
        assert len(everything) == TOPICS
        assert topics.matching(f"{greedy}|{number}") == frozenset()
        assert topics.pattern_bytes <= 4 << 20
    view.put(*(_topic(f"team.more{number}") for number in range(2_000)))
    assert topics.pattern_bytes <= 4 << 20
    assert len(topics.matching("team.*|299")) == len(topics.matching("team.*|0")) == TOPICS + 2_000
    view.remove(*(topic_key(f"team.more{number}") for number in range(2_000)))
    assert len(topics.matching("team.*|299")) == len(topics.matching("team.*|0")) == TOPICS
