"""Ratios of the engine: decode steps, prefill, eviction; measured interleaved, in one run.

The models have the shapes of SmolLM2-135M and Qwen2.5-0.5B and random weights, which cost the same
time as trained ones.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
)

from memdecay.engine import MemDecayCache
from memdecay.engine.known import known_models
from memdecay.regions import Profile

PAPER = "memdecay-paper"

KNOWN = {"SmolLM2-135M": "smollm2-135m", "Qwen2.5-0.5B": "qwen2.5-coder-0.5b"}
"""Whose evidence heads are watched in a model of each shape."""

SHAPES: dict[str, PretrainedConfig] = {
    "SmolLM2-135M": LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=65536,
        tie_word_embeddings=True,
    ),
    "Qwen2.5-0.5B": Qwen2Config(
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=65536,
        tie_word_embeddings=True,
    ),
}


@dataclass(frozen=True)
class Row:
    """One measured number beside what it should reach.

    Args:
        what: the quantity.
        model: whose shape.
        value: measured.
        target: to reach.
        unit: "ratio" or "ms".
        at_least: whether more is better.
        detail: medians behind it.
    """

    what: str
    model: str
    value: float
    target: float
    unit: str = "ratio"
    at_least: bool = False
    detail: str = ""

    @property
    def reached(self) -> bool:
        """Whether the value is on the right side of the target."""
        return self.value >= self.target if self.at_least else self.value <= self.target


def make(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return a model of this shape with random weights."""
    model = AutoModelForCausalLM.from_config(SHAPES[name], dtype=dtype, attn_implementation="sdpa")
    model.generation_config.eos_token_id = None
    return model.eval()


def ours(
    model: PreTrainedModel, name: str, policy: str, budget: int, *, every: int = 1
) -> MemDecayCache:
    """Return a cache of ours, its policy told the evidence heads of the model with this shape."""
    evidence = {known.name: known.evidence for known in known_models()}[KNOWN[name]]
    profile = Profile.default().with_evidence(evidence)
    return MemDecayCache(model, budget=budget, policy=policy, profile=profile, observe_every=every)


def fill(cache: DynamicCache | MemDecayCache, model: PreTrainedModel, count: int) -> None:
    """Put random keys and values of `count` tokens into a cache, without running the model."""
    config = model.config
    head_dim = config.hidden_size // config.num_attention_heads
    shape = (1, config.num_key_value_heads, count, head_dim)
    forward = cache.begin(1, count, None) if isinstance(cache, MemDecayCache) else None
    for layer in range(config.num_hidden_layers):
        key, value = torch.randn(2, *shape).to(model.dtype)
        cache.update(key, value, layer)
    if forward is not None:
        forward.observing = False
        cache.end(forward)


def interleave(runs: Mapping[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Time every run once a round, in turn, after one round that does not count, in ms."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if number:
                times[name].append((time.perf_counter() - start) * 1e3)
    return times


def ratio(times: Mapping[str, list[float]], above: str, below: str) -> float:
    """Return the median over rounds of the ratio within a round."""
    pairs = zip(times[above], times[below], strict=True)
    return statistics.median(one / other for one, other in pairs)


def medians(times: Mapping[str, list[float]]) -> str:
    """Return the medians in words."""
    return ", ".join(f"{name} {statistics.median(ms):.2f} ms" for name, ms in times.items())


@torch.no_grad()
def decode_steps(
    name: str, dtype: torch.dtype, count: int, rounds: int, policy: str = PAPER
) -> dict[str, list[float]]:
    """Time one decode step at `count` tokens: stock, ours unscored, ours scored at every step.

    Unscored is the paper's policy that observes nothing, whatever `policy` is.
    """
    model = make(name, dtype)
    token = torch.tensor([[5]])
    stock = DynamicCache(config=model.config)
    caches = {
        "unscored": ours(model, name, PAPER, count + 64, every=0),
        "scored": ours(model, name, policy, count + 64),
    }
    for cache in (stock, *caches.values()):
        fill(cache, model, count)

    def step(cache: DynamicCache | MemDecayCache) -> Callable[[], None]:
        def run() -> None:
            model(input_ids=token, cache=cache)

        return run

    runs = {kind: step(cache) for kind, cache in {"stock": stock, **caches}.items()}
    times: dict[str, list[float]] = {kind: [] for kind in runs}
    for _ in range(rounds):
        for kind, ms in interleave(runs, 2).items():
            times[kind] += ms
        for cache in (stock, *caches.values()):
            cache.crop(-3)
    return times


@torch.no_grad()
def budgeted_decode(name: str, count: int, steps: int, policy: str = PAPER) -> tuple[float, str]:
    """Return how much faster decoding in a quarter of `count` tokens is, evictions included."""
    model = make(name)
    token = torch.tensor([[5]])
    stock = DynamicCache(config=model.config)
    quarter = ours(model, name, policy, count // 4)
    fill(stock, model, count)
    fill(quarter, model, count // 4)

    def block(cache: DynamicCache | MemDecayCache) -> Callable[[], None]:
        def run() -> None:
            for _ in range(16):
                model(input_ids=token, cache=cache)

        return run

    times = interleave({"full": block(stock), "quarter": block(quarter)}, steps // 16)
    detail = ", ".join(
        f"{kind} {16e3 / statistics.median(ms):.1f} tokens/s" for kind, ms in times.items()
    )
    return ratio(times, "full", "quarter"), detail


@torch.no_grad()
def prefill(name: str, count: int, rounds: int, policy: str = PAPER) -> tuple[float, str]:
    """Return the cost of a prompt with all that a policy observes, over a plain one."""
    model = make(name)
    ids = torch.randint(3, 1000, (1, count))

    def stock() -> None:
        model(input_ids=ids, cache=DynamicCache(config=model.config), logits_to_keep=1)

    def observed() -> None:
        model(input_ids=ids, cache=ours(model, name, policy, count), logits_to_keep=1)

    times = interleave({"stock": stock, "observed": observed}, rounds)
    return ratio(times, "observed", "stock"), medians(times)


@torch.no_grad()
def replay(name: str, count: int, rounds: int) -> tuple[float, str]:
    """Return the cost of repeating what is kept, over reading it in the first place."""
    model = make(name)
    ids = torch.randint(3, 1000, (1, count))
    piece, prompt = 256, torch.randint(3, 1000, (16,))

    def read() -> None:
        model(input_ids=ids, cache=ours(model, name, PAPER, count), logits_to_keep=1)

    cache = ours(model, name, "memdecay-replay", count + piece + len(prompt))
    model(input_ids=ids, cache=cache, logits_to_keep=1)

    def repeat() -> None:
        for start in range(0, count, piece):
            where = torch.arange(start, min(start + piece, count))
            cache.replay(ids[0, where], where, prompt)

    times = interleave({"read": read, "repeated": repeat}, rounds)
    return ratio(times, "repeated", "read"), medians(times)


def eviction(name: str, count: int, rounds: int, policy: str) -> tuple[float, str]:
    """Return the median ms of choosing and evicting 32 tokens, in its pages, in all layers."""
    model = make(name)
    times = []
    for _ in range(rounds):
        cache = ours(model, name, policy, count + 64)
        fill(cache, model, count)
        start = time.perf_counter()
        cache.shrink(count - 32)
        times.append((time.perf_counter() - start) * 1e3)
        assert cache.kept() == count - 32
        del cache
        gc.collect()
    return statistics.median(times), f"{rounds} evictions, median"
