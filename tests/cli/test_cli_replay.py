from __future__ import annotations

import pytest
import torch

from memdecay.cli._replay import Play, PlayedTurn, Turn, compare, count_tokens, split_turns


def test_a_turn_ends_with_the_assistant() -> None:
    roles = ["system", "user", "assistant", "tool", "assistant", "assistant", "user"]
    messages = [{"role": role, "content": "x"} for role in roles]
    messages[3]["name"] = "weather"
    turns = split_turns(messages)
    assert [[m["role"] for m in turn.messages] for turn in turns] == [
        ["system", "user", "assistant"],
        ["tool", "assistant"],
        ["assistant"],
        ["user"],
    ]
    assert [turn.first for turn in turns] == [0, 3, 5, 6]
    assert [turn.index for turn in turns] == [0, 1, 2, 3]
    assert [turn.label for turn in turns] == ["system + user", "weather", "assistant", "user"]


def test_no_messages_are_no_turns() -> None:
    assert split_turns([]) == []


def played(index: int, nll: list[float], top1: list[int], region: list[str]) -> PlayedTurn:
    return PlayedTurn(
        Turn(index, index, ({"role": "assistant"},), "assistant"),
        start=10 * index,
        end=10 * index + 10,
        kept={"user": 4, "system": 2},
        position=list(range(10 * index, 10 * index + len(nll))),
        region=region,
        nll=nll,
        top1=top1,
        target=[1] * len(nll),
    )


def test_cost_is_the_mean_over_tokens_not_over_turns() -> None:
    full = Play(
        (played(0, [1.0], [1], ["user"]), played(1, [1.0, 2.0, 3.0], [1, 2, 3], ["plan"] * 3))
    )
    mine = Play(
        (played(0, [3.0], [9], ["user"]), played(1, [1.0, 2.5, 3.0], [1, 2, 9], ["plan"] * 3))
    )
    cost = compare(mine, full)
    assert [turn["delta_nll_per_token"] for turn in cost.turns] == [2.0, pytest.approx(0.5 / 3)]
    assert [turn["top1_agreement"] for turn in cost.turns] == [0.0, pytest.approx(2 / 3)]
    assert cost.total == {
        "scored_tokens": 4,
        "delta_nll_per_token": pytest.approx(2.5 / 4),
        "top1_agreement": 0.5,
    }
    assert cost.regions["user"]["delta_nll_per_token"] == 2.0
    assert cost.regions["plan"]["scored_tokens"] == 3
    assert cost.turns[0]["kept_tokens"] == {"user": 4, "system": 2}
    assert cost.turns[0]["kept_total"] == 6


def test_a_turn_without_scored_tokens_has_no_cost() -> None:
    empty = Play((played(0, [], [], []),))
    cost = compare(empty, empty)
    assert cost.turns[0]["delta_nll_per_token"] is None
    assert cost.total["top1_agreement"] is None


def test_different_tokens_are_never_compared() -> None:
    with pytest.raises(RuntimeError, match="turn 0 was scored on different tokens"):
        compare(Play((played(0, [1.0], [1], ["user"]),)), Play((played(0, [], [], []),)))


def test_forwards_are_counted_and_the_hook_goes_away() -> None:
    class Model(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return input_ids

    model, seen = Model(), []
    with pytest.raises(KeyError), count_tokens(model, seen.append):
        model(input_ids=torch.zeros(1, 7, dtype=torch.long))
        model(torch.zeros(1, 2, dtype=torch.long))
        raise KeyError
    model(torch.zeros(1, 5, dtype=torch.long))
    assert seen == [7, 2]
    assert not model._forward_hooks
