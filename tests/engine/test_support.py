"""What is served, and that everything else is refused by name, in one sentence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BartConfig,
    BloomConfig,
    FalconConfig,
    Gemma3TextConfig,
    GPT2Config,
    JambaConfig,
    MambaConfig,
    MptConfig,
    PretrainedConfig,
    T5Config,
)

from engine.families import CONFIGS, make, tokens
from memdecay.engine.cache import MemDecayCache
from memdecay.engine.support import FAMILIES, check_supported
from memdecay.errors import ModelError

_TINY: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
_ATTENTION = {**_TINY, "intermediate_size": 32}
REFUSED: dict[str, PretrainedConfig] = {
    "BloomForCausalLM (bloom)": BloomConfig(vocab_size=32, hidden_size=32, n_layer=2, n_head=2),
    "MambaForCausalLM (mamba)": MambaConfig(vocab_size=32, hidden_size=32, num_hidden_layers=2),
    "JambaForCausalLM (jamba)": JambaConfig(
        **_ATTENTION,
        num_key_value_heads=2,
        attn_layer_period=2,
        attn_layer_offset=1,
        num_experts=2,
        use_mamba_kernels=False,
    ),
    "FalconForCausalLM (falcon)": FalconConfig(**_TINY, alibi=True),
    "MptForCausalLM (mpt)": MptConfig(vocab_size=32, d_model=32, n_layers=2, n_heads=2),
}
ENCODERS: dict[str, PretrainedConfig] = {
    "T5ForConditionalGeneration (t5)": T5Config(
        vocab_size=32, d_model=32, d_kv=16, d_ff=32, num_layers=2, num_heads=2
    ),
    "BartForConditionalGeneration (bart)": BartConfig(
        vocab_size=32,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
    ),
}


def refuses(model: torch.nn.Module, *words: str) -> None:
    with pytest.raises(ModelError) as caught:
        MemDecayCache(model, budget=None)
    message = str(caught.value)
    for word in words:
        assert word in message
    assert message.endswith(".")
    assert message.count(". ") == 0 and "\n" not in message, "one sentence"


@pytest.mark.parametrize("name", REFUSED)
def test_other_decoders_are_refused_by_name(name: str) -> None:
    refuses(AutoModelForCausalLM.from_config(REFUSED[name]), name, "not supported", "Llama", "OPT")


@pytest.mark.parametrize("name", ENCODERS)
def test_encoder_decoders_are_refused_by_name(name: str) -> None:
    refuses(AutoModelForSeq2SeqLM.from_config(ENCODERS[name]), name, "not supported")


def test_what_is_not_a_transformers_model_is_refused_by_name() -> None:
    refuses(torch.nn.Linear(2, 2), "model is a Linear", "PreTrainedModel")


def test_families_in_forms_that_are_not_served_are_refused() -> None:
    small = {"vocab_size": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}
    cross = AutoModelForCausalLM.from_config(GPT2Config(**small, add_cross_attention=True))
    refuses(cross, "GPT2LMHeadModel", "attends to an encoder")
    both_ways = Gemma3TextConfig(
        **_ATTENTION, num_key_value_heads=1, head_dim=16, use_bidirectional_attention=True
    )
    refuses(AutoModelForCausalLM.from_config(both_ways), "attention is not causal")
    chunked = make("llama")
    chunked.config.layer_types = ["chunked_attention"] * 4
    chunked.config.attention_chunk_size = 8
    refuses(chunked, "layers of type chunked_attention")


def test_a_model_spread_over_devices_is_refused() -> None:
    model = make("llama")
    model.lm_head.to("meta")
    refuses(model, "spread over several devices")


@torch.no_grad()
def test_a_model_that_moved_since_the_cache_was_made_is_refused() -> None:
    model = make("llama")
    cache = MemDecayCache(model, budget=None)
    cache._make_tables(1)
    keys = torch.zeros(1, 2, 1, 16, device="meta")
    with pytest.raises(ModelError, match="is on meta, but it was on cpu"):
        cache._make_pool(keys, keys, 0)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_is_laid_out(name: str) -> None:
    model = make(name)
    layout = check_supported(model)
    layers = model.config.num_hidden_layers
    assert len(layout.windows) == len(layout.table) == len(layout.rank) == layers
    assert [layout.table_windows[number] for number in layout.table] == list(layout.windows)
    for number in range(len(layout.table_windows)):
        ranks = [r for r, t in zip(layout.rank, layout.table, strict=True) if t == number]
        assert ranks == list(range(len(ranks)))
    assert None not in layout.table_windows[1:], "full attention comes first"
    assert layout.hard_limit == (1024 if name in ("gpt2", "opt") else None)


def test_every_family_has_a_config_here() -> None:
    assert {config.model_type for config in CONFIGS.values()} == set(FAMILIES)


@torch.no_grad()
def test_a_model_without_a_head_is_served() -> None:
    model = AutoModel.from_config(CONFIGS["llama"]).eval()
    ids = tokens(30)
    cache = MemDecayCache(model, budget=None)
    expected = model(input_ids=ids).last_hidden_state
    model(input_ids=ids[:, :20], cache=cache)
    actual = model(input_ids=ids[:, 20:], cache=cache).last_hidden_state
    assert torch.allclose(actual, expected[:, 20:], atol=1e-5)


@torch.no_grad()
def test_scaled_attention_of_gpt2_is_served() -> None:
    config = GPT2Config(
        vocab_size=211, n_embd=64, n_layer=3, n_head=4, scale_attn_by_inverse_layer_idx=True
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = tokens(30)
    cache = MemDecayCache(model, budget=None)
    expected = model(input_ids=ids).logits
    logits = [model(input_ids=ids[:, a:b], cache=cache).logits for a, b in [(0, 20), (20, 21)]]
    assert torch.allclose(torch.cat(logits, 1), expected[:, :21], atol=1e-5)


@torch.no_grad()
def test_embeddings_instead_of_ids_are_served() -> None:
    model = make("llama")
    ids = tokens(30)
    cache = MemDecayCache(model, budget=None)
    expected = model(input_ids=ids).logits
    embedded = model.get_input_embeddings()(ids)
    model(inputs_embeds=embedded[:, :20], cache=cache)
    actual = model(inputs_embeds=embedded[:, 20:], cache=cache).logits
    assert torch.allclose(actual, expected[:, 20:], atol=1e-4)
