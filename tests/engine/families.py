"""Tiny random models of every supported family, and the oracle that they are compared with."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PhiConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

VOCAB = 211
WINDOW = 24
_SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = {**_SMALL, "num_key_value_heads": 2}
_MIXED = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]

CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**_GROUPED),
    "llama_one_layer": LlamaConfig(**{**_GROUPED, "num_hidden_layers": 1}),
    "qwen2": Qwen2Config(**_GROUPED),
    "qwen2_sliding": Qwen2Config(
        **_GROUPED, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2
    ),
    "qwen3": Qwen3Config(**_GROUPED, head_dim=16),
    "gemma2": Gemma2Config(**_GROUPED, head_dim=16, sliding_window=WINDOW),
    "gemma3": Gemma3TextConfig(**_GROUPED, head_dim=16, sliding_window=WINDOW, layer_types=_MIXED),
    "mistral": MistralConfig(**_GROUPED, sliding_window=None),
    "mistral_sliding": MistralConfig(**_GROUPED, sliding_window=WINDOW),
    "phi": PhiConfig(**_GROUPED),
    "gpt_neox": GPTNeoXConfig(**_SMALL),
    "gpt2": GPT2Config(
        vocab_size=VOCAB,
        n_embd=64,
        n_layer=4,
        n_head=4,
        n_positions=1024,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "opt": OPTConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        ffn_dim=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=1024,
        word_embed_proj_dim=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    ),
}

Event = tuple[int, Sequence[int]] | tuple[int, Sequence[int], int]
"""(tokens seen when it happens, positions evicted then[, tokens seen when they come back])."""


def make(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A tiny random model, always the same for a name."""
    torch.manual_seed(1)
    attention = "eager" if name == "gemma2" else "sdpa"  # sdpa has no softcap
    model = AutoModelForCausalLM.from_config(
        copy.deepcopy(CONFIGS[name]), dtype=dtype, attn_implementation=attention
    )
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.15)
    model.generation_config.eos_token_id = None
    return model.eval()


def tokens(count: int, rows: int = 1, seed: int = 0) -> Tensor:
    """Random ids, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (rows, count), generator=generator)


def hiding_mask(length: int, events: Sequence[Event], window: int | None) -> Tensor:
    """Who sees whom in one sequence, when queries do not see what is out while it is out."""
    query, key = torch.arange(length)[:, None], torch.arange(length)[None]
    visible = key <= query
    if window is not None:
        visible = visible & (key > query - window)
    for when, evicted, *until in events:
        hidden = torch.zeros(length, dtype=torch.bool)
        hidden[torch.as_tensor(evicted, dtype=torch.int64)] = True
        end = until[0] if until else length
        visible = visible & ~((query >= when) & (query < end) & hidden)
    return visible[None, None]


def hiding_masks(
    model: PreTrainedModel, length: int, events: Sequence[Event]
) -> Tensor | dict[str, Tensor]:
    """What a model takes as attention_mask to see what a cache with these evictions shows it."""
    config = model.config
    window = getattr(config, "sliding_window", None)
    if config.model_type == "mistral":
        return hiding_mask(length, events, window)
    if "sliding_attention" in (getattr(config, "layer_types", None) or []):
        return {
            "full_attention": hiding_mask(length, events, None),
            "sliding_attention": hiding_mask(length, events, window),
        }
    return hiding_mask(length, events, None)


def additive(mask: Tensor) -> Tensor:
    """The same mask for eager attention, which adds it."""
    return torch.where(mask, 0.0, torch.finfo(torch.float32).min)


@torch.no_grad()
def oracle(
    model: PreTrainedModel, ids: Tensor, events: Sequence[Event], *, attention: bool = False
) -> Tensor:
    """What one forward with an explicit 4D mask says of one sequence.

    Returns:
        Logits, `(length, vocab)`; with `attention` who looks at whom, `(length, length)`, averaged
        over heads and layers.
    """
    length = ids.shape[1]
    mask = hiding_masks(model, length, events)
    own = model.config._attn_implementation
    if attention:
        model.set_attn_implementation("eager")
    if model.config._attn_implementation == "eager":
        many = isinstance(mask, dict)
        mask = {k: additive(m) for k, m in mask.items()} if many else additive(mask)
    positions = torch.arange(length)[None]
    out = model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=positions,
        use_cache=False,
        output_attentions=attention,
    )
    model.set_attn_implementation(own)
    return torch.stack(out.attentions).mean((0, 1, 2)) if attention else out.logits[0]


def choose(rng: random.Random, seen: int, gone: set[int], share: float) -> list[int]:
    """Positions to evict: scattered ones, and a run of recent ones."""
    kept = [position for position in range(1, seen - 3) if position not in gone]
    picked = set(rng.sample(kept, int(len(kept) * share))) | set(kept[-10:-4])
    gone |= picked
    return sorted(picked)
