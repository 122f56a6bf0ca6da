"""`model.generate(cache=...)`: token for token as with DynamicCache, and exact under a budget."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.families import CONFIGS, make, oracle, tokens
from engine.helpers import Record, close
from memdecay.engine.cache import MemDecayCache

MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "beams": {"do_sample": False, "num_beams": 3},
    "lookup": {"do_sample": False, "prompt_lookup_num_tokens": 4},
    "sampling": {"do_sample": True, "top_k": 20},
    "beam_sampling": {"do_sample": True, "num_beams": 2, "num_return_sequences": 2},
    "chunked": {"do_sample": False, "prefill_chunk_size": 16},
}


def repetitive(length: int) -> Tensor:
    """Ids in which prompt lookup finds something to propose."""
    return tokens(length // 3 + 1).repeat(1, 3)[:, :length]


def padded(lengths: tuple[int, ...]) -> dict[str, Tensor]:
    ids = tokens(max(lengths), len(lengths), seed=3)
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths):
        mask[row, : ids.shape[1] - length] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


def generate(model: PreTrainedModel, inputs: dict[str, Tensor], **options: Any) -> Any:
    torch.manual_seed(7)
    return model.generate(**inputs, max_new_tokens=options.pop("max_new_tokens", 24), **options)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CONFIGS)
def test_without_eviction_it_is_dynamic_cache_token_for_token(name: str, mode: str) -> None:
    model = make(name)
    inputs = {"input_ids": repetitive(40)}
    expected = generate(model, inputs, **{**MODES[mode], "prefill_chunk_size": None})
    cache = MemDecayCache(model, budget=None)
    assert torch.equal(generate(model, inputs, cache=cache, **MODES[mode]), expected)
    assert cache.get_seq_length() == expected.shape[1] - 1
    assert cache.observations > 0


@pytest.mark.parametrize("mode", ["greedy", "beams", "sampling"])
@pytest.mark.parametrize("name", CONFIGS)
def test_padded_batches_are_dynamic_cache_token_for_token(name: str, mode: str) -> None:
    model = make(name)
    inputs = padded((40, 7, 29))
    expected = generate(model, inputs, max_new_tokens=12, **MODES[mode])
    cache = MemDecayCache(model, budget=None)
    actual = generate(model, inputs, cache=cache, max_new_tokens=12, **MODES[mode])
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("name", CONFIGS)
def test_several_turns_on_one_cache(name: str) -> None:
    model = make(name)
    cache = MemDecayCache(model, budget=None)
    ids = repetitive(30)
    turns: list[dict[str, Any]] = [
        {},
        {},  # full ids
        {"new_only": True},  # new ids with a mask of everything seen
        {"prefill_chunk_size": 8},
        {"prompt_lookup_num_tokens": 3},
    ]
    for number, options in enumerate(turns):
        seen = cache.get_seq_length()
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        expected = generate(model, inputs, do_sample=False, max_new_tokens=9)
        new_only = options.pop("new_only", False)
        if new_only:
            inputs["input_ids"] = ids[:, seen:]
        out = generate(model, inputs, cache=cache, do_sample=False, max_new_tokens=9, **options)
        out = torch.cat([ids[:, :seen], out], 1) if new_only else out
        assert torch.equal(out, expected), f"turn {number}"
        ids = torch.cat([expected, tokens(21, seed=number)], 1)


@pytest.mark.parametrize("mode", ["greedy", "sampling", "lookup"])
@pytest.mark.parametrize("name", CONFIGS)
def test_under_a_budget_the_logits_are_the_oracle_s(name: str, mode: str) -> None:
    model = make(name)
    cache = MemDecayCache(model, budget=48, page_size=4)
    record = Record(model, cache)
    ids = repetitive(40)
    for turn in range(3):
        out = generate(
            model,
            {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
            cache=cache,
            max_new_tokens=20,
            return_dict_in_generate=True,
            output_logits=True,
            **MODES[mode],
            **({} if mode == "lookup" else {"prefill_chunk_size": 16}),
        )
        said = torch.cat(out.logits)
        expected = oracle(model, out.sequences, record.events[0])[ids.shape[1] - 1 : -1]
        assert close(said, expected[: len(said)]), f"turn {turn}"
        if mode == "lookup":
            assert len(said) == 20
        assert cache.kept() <= cache.peak_tokens <= 48
        ids = torch.cat([out.sequences, tokens(12, seed=turn)], 1)
    assert cache.evicted_tokens > 60
    full = oracle(model, out.sequences, [])[-20:]
    assert not close(full[: len(said)], expected[: len(said)], 1e-2), "evictions must matter"


@pytest.mark.parametrize("budget", [None, 20])
@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral_sliding", "gpt2"])
def test_beam_search_keeps_a_set_for_every_hypothesis(name: str, budget: int | None) -> None:
    model = make(name)
    cache = MemDecayCache(model, budget=budget, policy="tova" if budget else "full", page_size=1)
    record = Record(model, cache)
    generate(
        model,
        {"input_ids": tokens(33, seed=2)},
        cache=cache,
        do_sample=False,
        num_beams=3,
        max_new_tokens=40,
        prefill_chunk_size=11,
    )
    assert record.rows_differed == (budget is not None), "keep sets must differ and be reordered"
    for row in range(3):
        assert record.worst(row) < 1e-4
        if budget is not None:
            assert cache.kept(row) <= budget
            assert record.events[row], "something must be evicted"


@pytest.mark.parametrize("name", ["llama", "gemma2", "opt"])
def test_beam_search_over_a_padded_batch_under_a_budget(name: str) -> None:
    model = make(name)
    cache = MemDecayCache(model, budget=32, page_size=4)
    record = Record(model, cache)
    generate(
        model,
        padded((30, 11)),
        cache=cache,
        do_sample=False,
        num_beams=2,
        max_new_tokens=30,
        prefill_chunk_size=10,
    )
    for row in range(4):
        assert record.worst(row) < 1e-4
        assert record.events[row]


def test_greedy_batch_under_a_budget_equals_each_row_alone() -> None:
    model = make("llama")
    inputs = padded((40, 17, 29))
    cache = MemDecayCache(model, budget=48, page_size=4)
    together = generate(model, inputs, cache=cache, do_sample=False, max_new_tokens=40)
    for row in range(3):
        ids = inputs["input_ids"][row][inputs["attention_mask"][row] == 1][None]
        one = MemDecayCache(model, budget=48, page_size=4)
        alone = generate(model, {"input_ids": ids}, cache=one, do_sample=False, max_new_tokens=40)
        assert torch.equal(alone[0, ids.shape[1] :], together[row, 40:])
        assert one.evicted_tokens > 0


def test_assisted_decoding_counts_one_step_a_forward_and_none_for_the_prompt() -> None:
    model = make("llama")
    cache = MemDecayCache(model, budget=None)
    forwards = []
    hook = model.register_forward_hook(lambda *_: forwards.append(1))
    for ids in (repetitive(40), repetitive(120)):
        before, steps = len(forwards), cache.steps
        generate(model, {"input_ids": ids}, cache=cache, max_new_tokens=30, **MODES["lookup"])
        assert cache.steps - steps == len(forwards) - before - 1
    hook.remove()
    assert len(forwards) < 60, "some proposals must have been accepted"
    assert cache.observations == len(forwards)


def test_new_ids_without_a_mask_of_everything_are_refused() -> None:
    model = make("llama")
    cache = MemDecayCache(model, budget=None)
    model(input_ids=tokens(20), cache=cache)
    ids = tokens(5)
    with pytest.raises(ValueError, match=r"attention_mask has shape \(1, 5\).*\(1, 25\)"):
        model(input_ids=ids, attention_mask=torch.ones_like(ids), cache=cache)
    with pytest.raises(ValueError, match="only a 2D mask"):
        model(input_ids=ids, attention_mask=torch.ones(1, 1, 5, 25), cache=cache)
    assert cache.get_seq_length() == 20
