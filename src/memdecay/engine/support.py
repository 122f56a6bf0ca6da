"""Which models are served exactly, and how their layers are laid out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from memdecay.errors import ModelError

FAMILIES = {
    "llama": "Llama",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3",
    "mistral": "Mistral",
    "phi": "Phi",
    "gpt_neox": "GPT-NeoX",
    "gpt2": "GPT-2",
    "opt": "OPT",
}
"""`model_type` -> name, of the families whose logits are tested against the oracle."""

_LAYERS = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class Layout:
    """How the layers of a model share slot tables.

    Args:
        windows: for each layer its sliding window, None for full attention.
        table: for each layer the number of its table.
        rank: for each layer how many earlier layers have the same table.
        table_windows: for each table its window; full attention comes first if there is any.
        num_heads: query heads of a layer.
        device: of the model.
        num_kv_heads: KV heads of a layer.
        trained_positions: positions the model was trained for, if its config says.
        hard_limit: positions that exist at all, for learned position embeddings.
    """

    windows: tuple[int | None, ...]
    table: tuple[int, ...]
    rank: tuple[int, ...]
    table_windows: tuple[int | None, ...]
    num_heads: int
    device: torch.device
    num_kv_heads: int
    trained_positions: int | None
    hard_limit: int | None


def check_supported(model: PreTrainedModel) -> Layout:
    """Return the layout of a model that can be served exactly.

    Raises:
        ModelError: it cannot, named with the reason and what is supported.
    """
    if not isinstance(model, PreTrainedModel):
        raise ModelError(
            f"model is a {type(model).__name__}, but it must be a transformers model "
            f"(PreTrainedModel)."
        )
    reason = unsupported(model)
    config = model.config
    if reason:
        raise ModelError(
            f"Model {type(model).__name__} ({config.model_type}) is not supported: {reason}; "
            f"supported are {', '.join(FAMILIES.values())}."
        )
    types, kwargs = get_layer_types_and_kwargs(config)
    windows = tuple(
        kw.get("sliding_window") if kind == "sliding_attention" else None
        for kind, kw in zip(types, kwargs, strict=True)
    )
    table_windows = tuple(sorted(set(windows), key=lambda window: (window is not None, window)))
    table = tuple(table_windows.index(window) for window in windows)
    rank = tuple(table[:layer].count(number) for layer, number in enumerate(table))
    positions = getattr(config, "max_position_embeddings", None)
    learned = config.model_type in ("gpt2", "opt")
    return Layout(
        windows=windows,
        table=table,
        rank=rank,
        table_windows=table_windows,
        num_heads=config.num_attention_heads,
        device=model.device,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        trained_positions=positions,
        hard_limit=positions if learned else None,
    )


def unsupported(model: PreTrainedModel) -> str | None:
    """Return why a model cannot be served exactly, or None if it can."""
    config = model.config
    if config.model_type not in FAMILIES:
        return "its family is not among those whose logits are verified"
    if getattr(config, "is_encoder_decoder", False):
        return "it has an encoder"
    if getattr(config, "add_cross_attention", False):
        return "it attends to an encoder"
    if not model._can_set_attn_implementation():
        return "its attention implementation cannot be set"
    if not getattr(config, "is_causal", True):
        return "its attention is not causal"
    if getattr(config, "use_bidirectional_attention", False):
        return "its attention is not causal"
    other = set(get_layer_types_and_kwargs(config)[0]) - set(_LAYERS)
    if other:
        return f"it has layers of type {', '.join(sorted(other))}"
    if len({str(parameter.device) for parameter in model.parameters()}) > 1:
        return "it is spread over several devices"
    return None
