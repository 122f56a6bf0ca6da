"""Scenarios: agent conversations with planted facts, written as data, checked when read."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    StringConstraints,
    ValidationError,
)
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from memdecay.errors import StudyError
from memdecay.prompt import Message

VARIANTS = 3
"""Value variants of a scenario; each has its blocks in another order (section IV-A)."""
FACT_REGIONS = ("system", "user", "tool_out", "retrieval")
"""The regions that hold a fact, in the order in which tables name them."""
KINDS = ("code", "natural")
TIERS = ("short", "long")

_ASKED = "{question} Answer with the value only."
_PLACE = re.compile(r"<<([^<>\n]*)>>")

Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]


@dataclass(frozen=True)
class Fact:
    """A planted fact and the question about it.

    Args:
        region: where it stands.
        kind: "code" (an arbitrary value) or "natural" (a name, a date, a place, a plain word).
        value: the gold value.
        question: what the user asks, as it is sent.
    """

    region: str
    kind: str
    value: str
    question: str


@dataclass(frozen=True)
class Episode:
    """One variant of a scenario in one tier.

    Args:
        scenario: its name; statistics cluster by it.
        variant: 0, 1 or 2.
        tier: "short" or "long".
        stages: the messages of each stage; the first holds system text, request and plan.
        closing: how the last thought of the agent begins; the observation burst continues it.
        facts: one for each of `FACT_REGIONS`.
    """

    scenario: str
    variant: int
    tier: str
    stages: tuple[tuple[Message, ...], ...]
    closing: str
    facts: tuple[Fact, ...]

    @property
    def name(self) -> str:
        """Scenario and variant, such as `orchard-1`."""
        return f"{self.scenario}-{self.variant}"

    @property
    def messages(self) -> list[Message]:
        """The messages of all stages."""
        return [message for stage in self.stages for message in stage]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Fact(_Model):
    kind: Literal["code", "natural"]
    question: Text
    values: Annotated[list[Text], Field(min_length=VARIANTS, max_length=VARIANTS)]


class _Call(_Model):
    tool: Text
    arguments: dict[str, JsonValue] = {}


class _Item(_Model):
    """One message, by the region that it belongs to."""

    system: Text | None = None
    user: Text | None = None
    plan: Text | None = None
    thought: Text | None = None
    call: _Call | None = None
    result: Text | None = None
    document: Text | None = None
    tool: Text | None = None


class _Tier(_Model):
    opening: list[_Item]
    blocks: dict[str, list[_Item]]
    closing: Text
    orders: Annotated[list[list[str]], Field(min_length=VARIANTS, max_length=VARIANTS)]


class _Facts(_Model):
    system: _Fact
    user: _Fact
    tool_out: _Fact
    retrieval: _Fact


class _Scenario(_Model):
    name: Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]*$")]
    trade: Text
    facts: _Facts
    values: dict[str, Annotated[list[Text], Field(min_length=VARIANTS, max_length=VARIANTS)]] = {}
    short: _Tier | None = None
    long: _Tier | None = None


def builtin_scenarios() -> list[str]:
    """Return the names of the scenarios that ship with the package."""
    folder = resources.files("memdecay.study").joinpath("scenarios")
    return sorted(
        file.name.removesuffix(".yaml") for file in folder.iterdir() if file.name.endswith(".yaml")
    )


def load_scenario(source: str | Path) -> list[Episode]:
    """Read a scenario and return its episodes: three variants of each tier that it has.

    Args:
        source: the name of a scenario that ships with the package, or a YAML file
            (docs/scenarios.md says how to write one).

    Raises:
        StudyError: it cannot be read, or it is not a fair test: a value that is missing from its
            region, stands in another one, or is the value of two facts.
    """
    name = str(source)
    if name in builtin_scenarios():
        folder = resources.files("memdecay.study").joinpath("scenarios")
        text = folder.joinpath(f"{name}.yaml").read_text("utf-8")
    else:
        try:
            text = Path(source).expanduser().read_text("utf-8")
        except (OSError, UnicodeDecodeError, RuntimeError) as error:  # RuntimeError: ~nobody
            text = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else str(error)
            reason = (getattr(error, "strerror", None) or text).rstrip(".")
            raise StudyError(
                f"scenario is {name!r}, which cannot be read ({reason}); it must be a YAML file or "
                f"one of {', '.join(builtin_scenarios())}."
            ) from None
    scenario = _parse(text, name)
    return [
        _episode(scenario, tier, variant, name)
        for tier in TIERS
        if getattr(scenario, tier) is not None
        for variant in range(VARIANTS)
    ]


def load_episodes(tier: str, sources: Sequence[str | Path] | None = None) -> list[Episode]:
    """Return the episodes of a tier.

    Args:
        tier: "short" or "long".
        sources: scenarios, those of the package if None.

    Raises:
        StudyError: as `load_scenario`; also two scenarios of one name, or one without this tier.
    """
    if tier not in TIERS:
        raise StudyError(f"tier is {tier!r}, but it must be one of {', '.join(TIERS)}.")
    episodes: dict[str, list[Episode]] = {}
    for source in builtin_scenarios() if sources is None else sources:
        found = [episode for episode in load_scenario(source) if episode.tier == tier]
        if not found:
            raise StudyError(f"scenario is {str(source)!r}, but it has no {tier} tier.")
        if found[0].scenario in episodes:
            raise StudyError(f"Two scenarios are named {found[0].scenario!r}; names must differ.")
        episodes[found[0].scenario] = found
    return [episode for found in episodes.values() for episode in found]


def find_gold(answer: str, gold: str) -> tuple[int, int] | None:
    """Return where `gold` stands in `answer` as whole words, (start, end) in characters, or None.

    Case and the width of white space do not count. "2.31" is found in "it is 2.31." and neither
    in "12.31" nor in "2.315" nor in "2.31.4".
    """
    words = r"\s+".join(re.escape(word) for word in gold.split())
    found = re.search(rf"(?<!\w)(?<!\d[.,]){words}(?!\w)(?![.,]\d)", answer, re.IGNORECASE)
    return found.span() if found else None


# Reading


def _parse(text: str, source: str) -> _Scenario:
    try:
        data = YAML(typ="safe", pure=True).load(text)
    except YAMLError as error:
        mark = error.problem_mark if isinstance(error, MarkedYAMLError) else None
        where = f" at line {mark.line + 1}" if mark is not None else ""
        raise StudyError(f"The scenario {source!r} is not YAML{where}.") from None
    try:
        return _Scenario.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise StudyError(
            f"The scenario {source!r} is not usable: {where}: {first['msg'].rstrip('.')}."
        ) from None


def _episode(scenario: _Scenario, tier: str, variant: int, source: str) -> Episode:
    """Fill a variant's values in and check it.

    Raises:
        StudyError: naming the file, the tier, the variant and the fact.
    """
    where = f"The scenario {source!r} ({tier} tier, variant {variant})"
    written: _Tier = getattr(scenario, tier)
    facts = [
        Fact(
            region=region,
            kind=fact.kind,
            value=fact.values[variant],
            question=_ASKED.format(question=fact.question),
        )
        for region, fact in ((region, getattr(scenario.facts, region)) for region in FACT_REGIONS)
    ]
    words = {fact.region: fact.value for fact in facts}
    words.update({name: values[variant] for name, values in scenario.values.items()})
    order = written.orders[variant]
    if sorted(order) != sorted(written.blocks):
        raise StudyError(
            f"{where} has the order {', '.join(order)}, but it must name each of its blocks once: "
            f"{', '.join(written.blocks)}."
        )
    numbers = itertools.count(1)
    parts = [written.opening, *(written.blocks[name] for name in order)]
    stages = tuple(tuple(_messages(part, words, where, numbers)) for part in parts)
    closing = _filled(written.closing, words, where)
    facts = [
        Fact(fact.region, fact.kind, fact.value, _filled(fact.question, words, where, asked=True))
        for fact in facts
    ]
    episode = Episode(scenario.name, variant, tier, stages, closing, tuple(facts))
    _check_facts(episode, where)
    return episode


def _messages(
    items: Sequence[_Item], words: Mapping[str, str], where: str, numbers: Iterator[int]
) -> Iterator[Message]:
    call = ""
    for item in items:
        given = {name: value for name in _Item.model_fields if (value := getattr(item, name))}
        kind = next((name for name in _KINDS if set(given) in _KINDS[name]), None)
        if kind is None:
            raise StudyError(
                f"{where} has a message with {', '.join(given) or 'nothing'}, but one message has "
                f"system, user, plan, thought, call (with a thought or without), or result or "
                f"document (each with the tool it came from)."
            )
        if kind == "call":
            call = f"call_{next(numbers)}"
        yield _message(kind, given, words, where, call)


_KINDS: dict[str, tuple[set[str], ...]] = {
    "system": ({"system"},),
    "user": ({"user"},),
    "plan": ({"plan"},),
    "call": ({"call"}, {"call", "thought"}),
    "thought": ({"thought"},),
    "result": ({"result", "tool"},),
    "document": ({"document", "tool"},),
}


def _message(
    kind: str, given: Mapping[str, Any], words: Mapping[str, str], where: str, call: str
) -> Message:
    text = given.get(kind) if kind != "call" else given.get("thought", "")
    content = _filled(str(text), words, where)
    if kind in ("system", "user"):
        return {"role": kind, "content": content}
    if kind == "plan":
        return {"role": "assistant", "content": content, "region": "plan"}
    if kind == "thought":
        return {"role": "assistant", "content": content, "region": "scratchpad"}
    if kind == "call":
        arguments = _filled_in(given["call"].arguments, words, where)
        function = {"name": given["call"].tool, "arguments": arguments}
        calls = [{"id": call, "type": "function", "function": function}]
        return {"role": "assistant", "content": content, "tool_calls": calls}
    region = "tool_out" if kind == "result" else "retrieval"
    message = {"role": "tool", "name": given["tool"], "content": content, "region": region}
    return {**message, "tool_call_id": call} if call else message


def _filled(text: str, words: Mapping[str, str], where: str, *, asked: bool = False) -> str:
    def word(found: re.Match[str]) -> str:
        name = found[1]
        if name not in words or (asked and name in FACT_REGIONS):
            allowed = ", ".join(name for name in words if not asked or name not in FACT_REGIONS)
            place = "a question" if asked else "its text"
            raise StudyError(
                f"{where} has <<{name}>> in {place}, but it must be one of {allowed or 'none'}."
            )
        return words[name]

    return _PLACE.sub(word, text)


def _filled_in(value: Any, words: Mapping[str, str], where: str) -> Any:
    if isinstance(value, str):
        return _filled(value, words, where)
    if isinstance(value, dict):
        return {key: _filled_in(item, words, where) for key, item in value.items()}
    if isinstance(value, list):
        return [_filled_in(item, words, where) for item in value]
    return value


def _check_facts(episode: Episode, where: str) -> None:
    """Refuse facts that a right answer would not show, or that several places give away."""
    for one, other in itertools.combinations(episode.facts, 2):
        if find_gold(one.value, other.value) or find_gold(other.value, one.value):
            raise StudyError(
                f"{where} has the value {one.value!r} for {one.region} and {other.value!r} for "
                f"{other.region}, but no value may be or contain another one."
            )
    texts = list(_texts(episode))
    for fact in episode.facts:
        hits = [region for region, text in texts for _ in range(_count(text, fact.value))]
        if hits != [fact.region]:
            found = f"it is in {' and '.join(hits)}" if hits else "it is missing from the text"
            raise StudyError(
                f"{where} must have the value {fact.value!r} once, in its {fact.region} text, but "
                f"{found}."
            )


def _texts(episode: Episode) -> Iterator[tuple[str, str]]:
    for message in episode.messages:
        region = message.get("region") or message["role"]
        if region == "assistant":
            region = "scratchpad"
        yield region, message["content"]
        for call in message.get("tool_calls", ()):
            yield "tool_in", str(call["function"]["arguments"])
    yield "closing", episode.closing
    for fact in episode.facts:
        yield f"the question about {fact.region}", fact.question


def _count(text: str, value: str) -> int:
    count = 0
    while found := find_gold(text, value):
        count += 1
        text = text[found[1] :]
    return count
