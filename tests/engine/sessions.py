"""What the tests of sessions share: small models that can talk, forced answers, failures."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from engine import families
from engine.helpers import snapshot
from memdecay.engine import Session
from prompt.prompt_models import CORPUS, make_tokenizer

NEVER = 9999
"""An id that no model writes, to be the only one that ends an answer."""

_WORDS = " ".join(CORPUS).split()

Message = dict[str, Any]


def tiny(name: str = "llama", template: str = "chatml") -> tuple[PreTrainedModel, Any]:
    """A tiny random model of a family, and a tokenizer with a chat template, both always new."""
    tokenizer = make_tokenizer(template)
    config = copy.deepcopy(families.CONFIGS[name])
    config.vocab_size = len(tokenizer)
    with patch.dict(families.CONFIGS, {name: config}):
        return families.make(name), tokenizer


def session(name: str = "llama", template: str = "chatml", **options: Any) -> Session:
    """A session on a tiny model; no budget and small pages unless asked for."""
    return Session(*tiny(name, template), **{"budget": None, "page_size": 4, **options})


def words(count: int, seed: int = 0) -> str:
    """Some text, always the same for a seed."""
    rng = random.Random(seed)
    return " ".join(rng.choice(_WORDS) for _ in range(count))


def user(count: int = 8, seed: int = 0, **fields: Any) -> Message:
    """A user message."""
    return {"role": "user", "content": words(count, seed), **fields}


def assistant(count: int = 6, seed: int = 1, **fields: Any) -> Message:
    """An assistant message."""
    return {"role": "assistant", "content": words(count, seed), **fields}


def system(count: int = 6, seed: int = 2) -> Message:
    """A system message."""
    return {"role": "system", "content": words(count, seed)}


class _Forced(LogitsProcessor):
    def __init__(self, ids: Sequence[int]) -> None:
        self._ids, self._start = list(ids), None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self._start is None:
            self._start = input_ids.shape[1]
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self._ids[input_ids.shape[1] - self._start]] = 0
        return forced


def saying(made: Session, text: str) -> dict[str, Any]:
    """Options of `generate` that make any model write this text."""
    ids = made.tokenizer(text, add_special_tokens=False)["input_ids"]
    return {"logits_processor": LogitsProcessorList([_Forced(ids)]), "max_new_tokens": len(ids)}


@contextmanager
def failing(model: PreTrainedModel, at: int, error: type[BaseException]) -> Iterator[None]:
    """Let the model raise in its second layer, in the forward with number `at` from now."""
    decoder = model.get_decoder()
    layers = next(
        module
        for module in decoder.modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) > 1
    )
    left = [at]

    def check(*_: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise error("on purpose")

    handle = layers[1].register_forward_pre_hook(check)
    try:
        yield
    finally:
        handle.remove()


def content(made: Session) -> dict[str, Tensor]:
    """All of a cache that decides what comes: not what lies in its free slots."""
    state = snapshot(made.cache)
    for layer, pool in enumerate(made.cache.pools):
        table = made.cache.table_of(layer)
        for end, tensor in pool.saved(table.width).items():
            state[f"pool{layer}{end}"] = tensor.clone()
        state[f"index{layer}"] = table.index[:, : table.width].clone()
        state[f"floor{layer}"] = torch.tensor(table.floor)
    return state


@torch.no_grad()
def full_logits(model: PreTrainedModel, ids: Sequence[int]) -> Tensor:
    """What the model says without any cache, `(length, vocab)`."""
    return model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0].float()


def stock_answer(made: Session, count: int, **options: Any) -> list[int]:
    """What transformers' own greedy generation answers to what the session has read."""
    ids = [*made._ids, *made.conversation.generation_prompt().ids]
    out = made.model.generate(
        torch.tensor([ids]),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=made._ends(),
        pad_token_id=0,
        **options,
    )
    return out[0, len(ids) :].tolist()


@functools.cache
def talk() -> tuple[Message, ...]:
    """A conversation of every role."""
    call = {"name": "search", "arguments": '{"query": "flights to Oslo"}'}
    return (
        system(),
        user(10, 3),
        {
            "role": "assistant",
            "content": "Plan: search, then book it.",
            "tool_calls": [{"id": "abc123xyz", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "abc123xyz", "content": words(20, 4)},
        assistant(6, 5),
        user(6, 6),
    )
