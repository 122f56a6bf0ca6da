"""Play a conversation into a session turn by turn, and compare two such plays."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from memdecay.engine import AppendResult, Session

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Turn:
    """Messages up to and including one of the assistant's, or what is left after the last one.

    Args:
        index: its number, from 0.
        first: index of its first message.
        messages: its messages.
        label: what it brings, in a few words.
    """

    index: int
    first: int
    messages: tuple[Message, ...]
    label: str


@dataclass(frozen=True)
class PlayedTurn:
    """What one session did in one turn.

    Args:
        turn: the turn.
        start: tokens seen before it.
        end: tokens seen after it.
        kept: region -> tokens in the cache after it.
        position: true position of every scored token.
        region: region of every scored token.
        nll: negative log-likelihood of every scored token, in nats.
        top1: the most likely id at every scored token.
        target: the recorded id.
    """

    turn: Turn
    start: int
    end: int
    kept: Mapping[str, int]
    position: Sequence[int] = ()
    region: Sequence[str] = ()
    nll: Sequence[float] = ()
    top1: Sequence[int] = ()
    target: Sequence[int] = ()


@dataclass(frozen=True)
class Play:
    """A whole conversation in one session."""

    turns: tuple[PlayedTurn, ...]
    notes: tuple[str, ...] = ()


@dataclass
class _Cost:
    """Sums over scored tokens, and what they amount to."""

    tokens: int = 0
    delta: float = 0.0
    agree: int = 0

    def to_dict(self) -> dict[str, Any]:
        return {
            "scored_tokens": self.tokens,
            "delta_nll_per_token": self.delta / self.tokens if self.tokens else None,
            "top1_agreement": self.agree / self.tokens if self.tokens else None,
        }


@dataclass
class Comparison:
    """What eviction cost against the full cache: by turn, by region of the scored token, in all."""

    turns: list[dict[str, Any]] = field(default_factory=list)
    regions: dict[str, dict[str, Any]] = field(default_factory=dict)
    total: dict[str, Any] = field(default_factory=dict)


def split_turns(messages: Sequence[Message]) -> list[Turn]:
    """Cut a conversation after every assistant message."""
    turns: list[Turn] = []
    first = 0
    for i, message in enumerate(messages):
        if message.get("role") == "assistant" or i == len(messages) - 1:
            part = tuple(messages[first : i + 1])
            turns.append(Turn(len(turns), first, part, _label(part)))
            first = i + 1
    return turns


def play(
    session: Session, turns: Sequence[Turn], *, done: Callable[[int], None] = lambda seen: None
) -> Play:
    """Append every turn, the assistant's tokens teacher-forced and scored.

    Args:
        session: a fresh session; it is changed.
        turns: the turns, in order.
        done: called with the tokens seen after each turn.
    """
    played: list[PlayedTurn] = []
    notes: list[str] = []
    for turn in turns:
        start = session.report().seen_tokens
        result = session.append(turn.messages, score=True)
        report = session.report()
        notes += [note for note in result.notes if note not in notes]
        played.append(_played(turn, start, result, report.seen_tokens, report.kept_by_region))
        done(report.seen_tokens)
    return Play(tuple(played), tuple(notes))


def compare(run: Play, full: Play) -> Comparison:
    """Compare a play with the same one on the full cache, token by token.

    Raises:
        RuntimeError: the two did not score the same tokens, which is our own mistake.
    """
    found = Comparison()
    total = _Cost()
    regions: dict[str, _Cost] = {}
    for mine, reference in zip(run.turns, full.turns, strict=True):
        same = (mine.position, mine.target) == (reference.position, reference.target)
        if not same:
            raise RuntimeError(f"turn {mine.turn.index} was scored on different tokens")
        cost = _Cost()
        for i, region in enumerate(mine.region):
            for sums in (cost, total, regions.setdefault(region, _Cost())):
                sums.tokens += 1
                sums.delta += mine.nll[i] - reference.nll[i]
                sums.agree += mine.top1[i] == reference.top1[i]
        found.turns.append(
            {
                "index": mine.turn.index,
                "label": mine.turn.label,
                "messages": [mine.turn.first, mine.turn.first + len(mine.turn.messages)],
                "seen_tokens": mine.end,
                "kept_tokens": dict(mine.kept),
                "kept_total": sum(mine.kept.values()),
                **cost.to_dict(),
            }
        )
    found.total = total.to_dict()
    found.regions = {name: sums.to_dict() for name, sums in regions.items()}
    return found


@contextlib.contextmanager
def count_tokens(model: nn.Module, advance: Callable[[int], None]) -> Iterator[None]:
    """Call `advance` with the tokens of every forward of `model` while the context lasts.

    One turn may read twenty thousand tokens; only the model knows how far it is.
    """

    def after(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        if ids is not None:
            advance(int(ids.shape[-1]))

    hook = model.register_forward_hook(after, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def _played(
    turn: Turn, start: int, result: AppendResult, end: int, kept: Mapping[str, int]
) -> PlayedTurn:
    scores = result.scores
    if scores is None:
        return PlayedTurn(turn, start, end, dict(kept))
    position = scores.position.tolist()
    return PlayedTurn(
        turn,
        start,
        end,
        dict(kept),
        position=position,
        region=_regions(result, start, position),
        nll=scores.nll.tolist(),
        top1=scores.top1.tolist(),
        target=scores.target.tolist(),
    )


def _regions(result: AppendResult, start: int, position: Sequence[int]) -> list[str]:
    """Return the region of every scored token; spans count from the first token of the append."""
    of: dict[int, str] = {}
    for span in result.spans:
        of.update(dict.fromkeys(range(start + span.start, start + span.end), span.region))
    return [of.get(at, "unlabelled") for at in position]


def _label(messages: Sequence[Message]) -> str:
    """Name what a turn brings: its tools, or the roles that speak in it."""
    names: list[str] = []
    for message in messages:
        role = str(message.get("role"))
        name = str(message.get("name") or role) if role == "tool" else role
        if name not in names and (role != "assistant" or len(messages) == 1):
            names.append(name)
    return " + ".join(names)
