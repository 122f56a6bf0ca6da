"""The presses of kvpress, all applied to one prefill where that changes nothing."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from typing import Any

import torch
from asking import Kept
from common import PeerError
from kvpress import (
    AdaKVPress,
    BasePress,
    ExpectedAttentionPress,
    KeyDiffPress,
    KnormPress,
    KVzipPress,
    ObservedAttentionPress,
    SnapKVPress,
    StreamingLLMPress,
    TOVAPress,
)
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

logging.getLogger("kvpress.presses.kvzip_press").setLevel(logging.ERROR)

NONE = "none"
KVZIP = "kvzip"
OBSERVED = "observed_attention"

_MADE: dict[str, Any] = {
    "streaming_llm": StreamingLLMPress,
    "knorm": KnormPress,
    "tova": TOVAPress,
    "snapkv": SnapKVPress,
    OBSERVED: ObservedAttentionPress,
    "keydiff": KeyDiffPress,
    "expected_attention": ExpectedAttentionPress,
    "expected_attention_adakv": lambda: AdaKVPress(ExpectedAttentionPress()),
    KVZIP: KVzipPress,
}
NAMES = (NONE, *_MADE)
"""What can be asked for, the cheapest first."""

Key = tuple[str, float]
"""A press and a budget, as a fraction."""


def chosen(names: str) -> tuple[str, ...]:
    """Return the presses in a list separated by commas, all if it is empty.

    Raises:
        PeerError: one is unknown.
    """
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in NAMES:
            raise PeerError(f"--press has {name!r}, but it must be of {', '.join(NAMES)}.")
    return tuple(name for name in NAMES if not wanted or name in wanted)


def condition(name: str) -> dict[str, Any]:
    """Return what a press was made with, apart from its budget."""
    if name == NONE:
        return {"press": NONE}
    press = _MADE[name]()
    shown = {"press": type(press).__name__, **_fields(press)}
    return {**shown, "prefix_length": "chat opening"} if name == KVZIP else shown


def _fields(press: BasePress) -> dict[str, Any]:
    assert is_dataclass(press)
    found = asdict(press)
    found.pop("compression_ratio", None)
    inner = found.pop("press", None)
    if inner is not None:
        inner.pop("compression_ratio", None)
        found["of"] = {"press": type(press.press).__name__, **inner}
    return found


def ratio(tokens: int, length: int) -> float:
    """Return the compression ratio that leaves exactly `tokens` of `length`.

    The presses round down; half a token more keeps them from losing one to float arithmetic.
    """
    return max(0.0, 1 - (tokens + 0.5) / length)


@torch.no_grad()
def compress(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    names: Sequence[str],
    context_ids: Sequence[int],
    budgets: Mapping[float, int],
) -> dict[Key, Kept]:
    """Read a context and return what each press leaves of it in each budget.

    A press decides after its layer has attended to everything, so its decision cannot change
    what the next layer computes: one prefill serves them all. ObservedAttention has one of its
    own, as it needs eager attention.

    Args:
        model: with sdpa attention, which is what it has afterwards.
        tokenizer: its tokenizer.
        names: of presses.
        context_ids: the whole context; the question is not in it.
        budgets: fraction -> tokens that may stay.

    Returns:
        (name, fraction) -> what is left; `none` has the fraction 1.0.
    """
    ids = torch.tensor([list(context_ids)])
    found: dict[Key, Kept] = {}
    plain = [name for name in names if name not in (NONE, KVZIP, OBSERVED)]
    if set(names) - {OBSERVED}:
        every = _Every({name: _MADE[name]() for name in plain}, budgets)
        zip_press = _KVzip(budgets) if KVZIP in names else None
        cache = DynamicCache()
        with _forgotten(model), contextlib.ExitStack() as stack:
            if zip_press is not None:
                stack.enter_context(zip_press(model))
            with every(model):
                model.model(input_ids=ids, past_key_values=cache)
            if zip_press is not None:
                zip_press.prefix_length = opening(tokenizer, context_ids)
        found.update(every.kept())
        full = Kept(
            [layer.keys[0, :, : ids.shape[1]] for layer in cache.layers],
            [layer.values[0, :, : ids.shape[1]] for layer in cache.layers],
        )
        if NONE in names:
            found[NONE, 1.0] = full
        if zip_press is not None:
            for budget, masked in zip_press.masked.items():
                found[KVZIP, budget] = Kept(full.keys, full.values, masked)
    if OBSERVED in names:
        every = _Every({OBSERVED: _MADE[OBSERVED]()}, budgets)
        model.set_attn_implementation("eager")
        try:
            with _forgotten(model), every(model):
                model.model(input_ids=ids, past_key_values=DynamicCache())
        finally:
            model.set_attn_implementation("sdpa")
        found.update(every.kept())
    return found


def opening(tokenizer: PreTrainedTokenizerBase, context_ids: Sequence[int]) -> int:
    """Return how many tokens of the context the chat template writes before any content.

    KVzip does not score them. It takes them from the template of a lone user message, where the
    default system text of SmolLM2 and Qwen2.5 counts as well: of a conversation with a system
    message of its own, it would drop the first two dozen tokens unseen.
    """
    mark = "zqwxcontent"
    text = tokenizer.apply_chat_template([{"role": "system", "content": mark}], tokenize=False)
    before = tokenizer(text.split(mark)[0], add_special_tokens=False)["input_ids"]
    count = 0
    for one, other in zip(before, context_ids, strict=False):
        if one != other:
            break
        count += 1
    return count


@dataclass
class _Every(BasePress):
    """Lets every press compress a copy, in every budget, and leaves the cache as it is.

    Args:
        presses: name -> press.
        budgets: fraction -> tokens that may stay.
    """

    presses: Mapping[str, Any]
    budgets: Mapping[float, int]
    layers: dict[Key, list[tuple[Tensor, Tensor, Tensor | None]]] = field(default_factory=dict)

    def post_init_from_model(self, model: PreTrainedModel) -> None:
        """Let each press look at the model."""
        for press in self.presses.values():
            press.post_init_from_model(model)

    def compress(
        self,
        module: Any,
        hidden_states: Tensor,
        keys: Tensor,
        values: Tensor,
        attentions: Tensor,
        kwargs: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        """Note what each press would keep of this layer, and return everything."""
        for name, press in self.presses.items():
            for budget, tokens in self.budgets.items():
                press.compression_ratio = ratio(tokens, keys.shape[2])
                module.masked_key_indices = None
                left = press.compress(module, hidden_states, keys, values, attentions, kwargs)
                masked = _as_mask(module, keys)
                module.masked_key_indices = None
                self.layers.setdefault((name, budget), []).append((left[0][0], left[1][0], masked))
        return keys, values

    def kept(self) -> dict[Key, Kept]:
        """Return what each press kept in each budget."""
        return {
            key: Kept(
                [keys for keys, _, _ in layers],
                [values for _, values, _ in layers],
                [masked for _, _, masked in layers if masked is not None],
            )
            for key, layers in self.layers.items()
        }


class _KVzip(KVzipPress):
    """KVzip in several budgets: it scores once and chooses for each of them.

    Args:
        budgets: fraction -> tokens that may stay.
    """

    def __init__(self, budgets: Mapping[float, int]) -> None:
        super().__init__(compression_ratio=0.5)  # any but 0, which would end it before it scores
        self.budgets = budgets
        self.masked: dict[float, list[Tensor]] = {}

    def compress_post(self, model: PreTrainedModel) -> None:
        """Note what would be masked in each budget."""
        for budget, tokens in self.budgets.items():
            # it counts what goes, over all layers and heads at once, and rounds that down
            self.compression_ratio = 1 - tokens / self.context_length + 1e-9
            super().compress_post(model)
            self.masked[budget] = []
            for layer in model.model.layers:
                keys = self._cache.layers[layer.self_attn.layer_idx].keys
                mask = _as_mask(layer.self_attn, keys[:, :, : self.context_length])
                assert mask is not None
                self.masked[budget].append(mask)


def _as_mask(module: Any, keys: Tensor) -> Tensor | None:
    """Return what a press has masked in a layer, (kv_heads, m) bool, or None."""
    if module.masked_key_indices is None:
        return None
    _, heads, places = module.masked_key_indices
    mask = torch.zeros(keys.shape[1:3], dtype=torch.bool)
    mask[heads, places] = True
    return mask


@contextlib.contextmanager
def _forgotten(model: PreTrainedModel) -> Iterator[None]:
    """Leave no masked keys on the modules, before or after: they would apply to any context."""

    def forget() -> None:
        for layer in model.model.layers:
            layer.self_attn.masked_key_indices = None

    forget()
    try:
        yield
    finally:
        forget()
