"""The built-in episode of the demo: a conversation, and questions about facts planted in it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from memdecay.study.scenario import find_gold


@dataclass(frozen=True)
class Probe:
    """A question about one planted fact.

    Args:
        region: the region the fact stands in.
        where: the same in words, for people.
        short: the same in one word.
        question: what the user asks.
        gold: the value a right answer contains.
    """

    region: str
    where: str
    short: str
    question: str
    gold: str


@dataclass(frozen=True)
class Answer:
    """What a policy's session answered to a probe."""

    policy: str
    probe: Probe
    text: str

    @property
    def at(self) -> tuple[int, int] | None:
        """Where the gold value stands in the answer, in characters, or None."""
        return find_gold(self.text, self.probe.gold)

    @property
    def correct(self) -> bool:
        """Whether the gold value stands in the answer as whole words."""
        return self.at is not None

    def to_dict(self) -> dict[str, Any]:
        """Return the answer as `demo --json` prints it."""
        return {
            "policy": self.policy,
            "region": self.probe.region,
            "where": self.probe.where,
            "question": self.probe.question,
            "gold": self.probe.gold,
            "answer": self.text,
            "correct": self.correct,
        }


@dataclass(frozen=True)
class Episode:
    """A conversation with its retrievers and its probes."""

    id: str
    messages: tuple[Mapping[str, Any], ...]
    retrievers: tuple[str, ...]
    probes: tuple[Probe, ...]


def load_episode() -> Episode:
    """Return the episode that ships with the package."""
    text = resources.files("memdecay.cli").joinpath("data/episode.json").read_text("utf-8")
    data = json.loads(text)
    return Episode(
        id=data["id"],
        messages=tuple(data["messages"]),
        retrievers=tuple(data["retrievers"]),
        probes=tuple(Probe(**probe) for probe in data["probes"]),
    )
