"""The player sees what a session sees that reads the same conversation: same steps, same masses."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from engine.sessions import assistant, saying, session, system, talk, tiny, user
from memdecay.calibration.player import Player, Script

FAMILIES = ("llama", "qwen2", "gpt2", "gemma3", "qwen2_sliding")

# Two prompts in a row, prompts longer than a chunk and than the window, short ones, three answers.
STAGES = (
    (system(150), user(20, 3)),
    (user(4, 4), assistant(6, 5)),
    (user(30, 6), user(3, 7)),
    (assistant(5, 8), user(1, 9), assistant(2, 10)),
)
LONG = (STAGES[0], (user(140, 11), assistant(140, 12)), STAGES[1])


def seen_by_session(made, messages_by_stage):
    """What a session's policy observes: (clock, mass) in order."""
    seen = []
    made.cache.on_observe = lambda row, mass, refreshed: seen.append(
        (made.cache.steps, mass.clone())
    )
    for stage in messages_by_stage:
        made.append(list(stage), score=True)
    return seen


def played(name, stages, *, template="chatml", closing="", burst=0, **options):
    seen = []
    script = Script("t", "t", stages, closing)
    player = Player(*tiny(name, template), script, listen=seen.append, **options)
    player.play()
    written = player.burst(burst) if burst else []
    return player, seen, written


def same(player_saw, session_saw):
    assert [one.now for one in player_saw] == [now for now, _ in session_saw]
    for one, (_, mass) in zip(player_saw, session_saw, strict=True):
        assert one.mass.shape == mass.shape
        assert float((one.mass - mass).abs().max()) <= 1e-5


@pytest.mark.parametrize("stages", [STAGES, LONG], ids=["stages", "long"])
@pytest.mark.parametrize("name", FAMILIES)
def test_it_observes_what_a_session_observes(name, stages):
    made = session(name, prefill_chunk=7)
    there = seen_by_session(made, stages)
    player, here, _ = played(name, stages)
    same(here, there)
    count = made.cache.seen
    ledger = made.cache.ledgers[0]
    names = made.cache.profile.names
    assert player.tape.ids[:count] == made._ids
    assert player.tape.inserted_at[:count] == ledger["inserted_at"].int().tolist()
    assert player.tape.regions[:count] == [names[region] for region in ledger["region"].tolist()]
    assert player.tape.spans[:count] == ledger["span"].tolist()
    assert [one.decoding for one in here].count(True) == made.cache.steps > 20


def test_prompts_and_steps_alternate_as_they_happened():
    player, seen, _ = played("llama", STAGES)
    kinds = "".join("s" if one.decoding else "p" for one in seen)
    assert kinds.count("p") == 3  # nothing follows what opens the last answer
    assert kinds.startswith("ps") and "pp" not in kinds
    steps = [one for one in seen if one.decoding]
    assert [one.now for one in steps] == list(range(1, len(steps) + 1))
    for before, prompt in pairwise(seen):
        assert prompt.decoding or prompt.now == before.now
    for one in seen:
        assert float(one.mass.sum()) == pytest.approx(1, abs=1e-4)
        if one.decoding:  # the query's own token is the last, and as old as the clock
            assert player.tape.inserted_at[len(one.mass) - 1] == one.now


@pytest.mark.parametrize("window", [1, 3, 40])
def test_the_window_at_the_end_of_a_prompt_is_the_sessions(window):
    there = seen_by_session(session("llama", prefill_chunk=5, window=window), STAGES)
    _, here, _ = played("llama", STAGES, window=window)
    same(here, there)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_last_answer_is_one_that_a_session_writes(name):
    closing, stages = "Plan: search, then", STAGES[:2]
    player, here, written = played(name, stages, closing=closing, burst=9)
    made = session(name)
    there = seen_by_session(made, stages)
    ids = player.tape.ids[player.answer_from :]
    assert ids[-9:] == written and made.tokenizer.decode(ids[:-9]) == closing
    options = saying(made, closing)
    options["logits_processor"][0]._ids = ids
    options["max_new_tokens"] = len(ids)
    made.generate(eos_token_id=9999, **options)
    # transformers' generate reads the last token of the prompt as its first decode step, so the
    # session's clock is one ahead, and it does not read the last token that it writes.
    said = {len(mass): (now - 1, mass) for now, mass in there}
    answer = [one for one in here if one.decoding and len(one.mass) > player.answer_from]
    assert len(answer) == len(ids)
    same(answer[:-1], [said[len(one.mass)] for one in answer[:-1]])
    assert player.tape.regions[player.answer_from :] == ["scratchpad"] * len(ids)


def test_a_burst_is_greedy_and_never_ends_a_turn():
    _, _, free = played("llama", STAGES[:2], burst=12)
    model, tokenizer = tiny("llama")
    model.generation_config.eos_token_id = [free[0], free[5]]  # what it would like to write
    player = Player(model, tokenizer, Script("t", "t", STAGES[:2]))
    player.play()
    written = player.burst(12)
    assert {free[0], free[5], tokenizer.eos_token_id} <= set(player.ends)
    ids = player.tape.ids
    logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
    logits[:, player.ends] = -torch.inf
    assert logits[-13:-1].argmax(-1).tolist() == written == ids[-12:]
    assert not set(written) & set(player.ends)


def test_a_burst_in_pieces_is_the_same_burst():
    _, whole, once = played("llama", STAGES[:2], burst=10)
    seen = []
    player = Player(*tiny("llama"), Script("t", "t", STAGES[:2]), listen=seen.append)
    player.play()
    assert [*player.burst(3), *player.burst(1), *player.burst(6)] == once
    assert [one.now for one in seen] == [one.now for one in whole]
    for one, other in zip(seen, whole, strict=True):
        assert torch.allclose(one.mass, other.mass, atol=1e-6)


@pytest.mark.parametrize("template", ["chatml", "smol", "qwen"])
def test_tool_calls_are_decode_steps_and_results_are_not(template):
    stages = tuple((message,) for message in talk())
    player, seen, _ = played("llama", stages, template=template)
    made = session("llama", template)
    same(seen, seen_by_session(made, stages))
    tape = player.tape
    arrivals = {name: [] for name in tape.regions}
    for name, arrival in zip(tape.regions, tape.inserted_at, strict=True):
        arrivals[name].append(arrival)
    assert len(set(arrivals["tool_out"])) <= 2
    assert len(set(arrivals["plan"])) > 3


def test_it_stops_at_the_limit():
    player, _, _ = played("llama", STAGES, max_tokens=100)
    assert player.truncated and 100 < len(player.tape.ids) < 120
