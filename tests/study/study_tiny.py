"""Small scenarios and a tiny model, so that a whole study runs in a second."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.sessions import tiny
from memdecay.study.recording import Recording, record
from memdecay.study.scenario import Episode, load_episodes

SCENARIO = """\
name: mill
trade: a saw mill
facts:
  system: {kind: code, question: "Which key starts the saw?", values: [K7-41, P2-88, M9-03]}
  user: {kind: natural, question: "Who fetches the planks?", values: [Ines, Bruno, Oskar]}
  tool_out: {kind: code, question: "Which lot is the oak?", values: [4471B, 9920F, 3018C]}
  retrieval: {kind: natural, question: "Which town has the dryer?", values: [Lorca, Braga, Teruel]}
values:
  day: [Monday, Friday, Sunday]
short:
  opening:
    - system: "You help in a mill. The key of the saw is <<system>>. Be brief, and count twice."
    - user: "We need planks by <<day>>. My cousin <<user>> fetches them, not me."
    - plan: "Plan: 1. look at the stock. 2. read the notes."
  blocks:
    tool_a:
      - {thought: "First the stock.", call: {tool: stock, arguments: {shelf: oak}}}
      - {result: "oak 25, lot <<tool_out>>, dry; pine 10, wet", tool: stock}
    followup:
      - user: "And no knots, please."
      - thought: "No knots, then; I say so to the yard."
    document:
      - {call: {tool: search_notes, arguments: {query: dry planks}}}
      - {document: "Dry planks. The dryer stands in <<retrieval>>. Two weeks.", tool: search_notes}
  closing: "So far I know that"
  orders:
    - [tool_a, followup, document]
    - [document, tool_a, followup]
    - [followup, document, tool_a]
"""
"""Three episodes of about 400 tokens of the tiny tokenizer."""

_OTHER = {
    "name: mill": "name: ferry",
    "K7-41, P2-88, M9-03": "T3-17, W5-60, Z8-29",
    "Ines, Bruno, Oskar": "Nadia, Petra, Ulf",
    "4471B, 9920F, 3018C": "5582D, 1103H, 7746K",
    "Lorca, Braga, Teruel": "Split, Hania, Rovin",
    "First the stock.": "First I look at what there is in the shed.",
    "And no knots, please.": "And no splinters, please, as the last ones had many of them.",
}


def changed(changes: Mapping[str, str], text: str = SCENARIO) -> str:
    """The scenario with some of its text replaced; each text must be in it."""
    for old, new in changes.items():
        assert old in text, old
        text = text.replace(old, new)
    return text


def write_scenario(path: Path, changes: Mapping[str, str] | None = None) -> str:
    """Write the scenario, or another one, to a file and return its path."""
    path.write_text(changed(changes or {}), encoding="utf-8")
    return str(path)


def two_scenarios(folder: Path) -> tuple[str, str]:
    """Write two scenarios of different names and facts, and return their paths."""
    return (
        write_scenario(folder / "mill.yaml"),
        write_scenario(folder / "ferry.yaml", _OTHER),
    )


@functools.cache
def small(name: str) -> tuple[Any, Any]:
    """A tiny random model of a family and its tokenizer, shared: no test may change them."""
    return tiny(name)


def episodes(folder: Path) -> list[Episode]:
    """The three episodes of the scenario."""
    return load_episodes("short", [write_scenario(folder / "mill.yaml")])


def recorded(folder: Path, variant: int = 0, name: str = "llama") -> Recording:
    """An episode read by the tiny model; tests must not change it."""
    if (name, variant) not in _recorded:
        _recorded[name, variant] = record(*small(name), episodes(folder)[variant])
    return _recorded[name, variant]


_recorded: dict[tuple[str, int], Recording] = {}
