"""Checks the plumbing around kvpress in float32 on a small random model; a few seconds.

`make peers` runs it. It prints one line a check and ends with an error at the first that fails.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from asking import Answer, Kept, ask
from common import Probe
from presses import _MADE, KVZIP, NAMES, NONE, OBSERVED, compress, opening, ratio
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    DynamicCache,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

LENGTH = 150
BUDGETS = {0.5: 75, 0.25: 37}
ENDS = frozenset({3})
TEMPLATE = (
    "{% if messages[0].role == 'user' %}<s>system\nbe good</s>{% endif %}"
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def main() -> None:
    """Run all checks."""
    with tempfile.TemporaryDirectory() as folder:
        model, tokenizer = _small(Path(folder))
        opened = tokenizer("<s>system\n", add_special_tokens=False)["input_ids"]
        noise = torch.randint(10, 250, (LENGTH - len(opened),)).tolist()
        context = [*opened, *noise]
        probes = [
            Probe("user", "code", tuple(torch.randint(10, 250, (q,)).tolist()), "x", tuple(gold))
            for q, gold in ((9, [11, 12, 13]), (14, [40]), (5, [60, 61, 62, 63, 64]))
        ]
        found = compress(model, tokenizer, NAMES, context, BUDGETS)
        _says(
            "the opening is found where the template of a user message has a default system text",
            opening(tokenizer, context) == len(opened),
        )
        _says(
            "every press keeps its budget exactly",
            all(
                abs(kept.tokens - BUDGETS.get(key[1], LENGTH)) < 1e-6 for key, kept in found.items()
            ),
        )
        plain = [_plain(model, context, probe) for probe in probes]
        _says(
            "no press equals a plain forward",
            _same(_asked(model, [found[NONE, 1.0]], probes), [plain]),
        )
        one_by_one = {
            key: [_asked(model, [kept], [probe])[0][0] for probe in probes]
            for key, kept in found.items()
        }
        together = _asked(model, list(found.values()), probes)
        _says("all rows at once equal one at a time", _same(together, list(one_by_one.values())))
        for name in NAMES[1:]:
            for budget, tokens in BUDGETS.items():
                alone = [
                    _alone(model, name, tokens, context, probe, len(opened)) for probe in probes
                ]
                _says(
                    f"{name} at {budget:g} equals kvpress by itself",
                    _same([one_by_one[name, budget]], [alone]),
                )


def _says(what: str, holds: bool) -> None:
    if not holds:
        raise SystemExit(f"Failed: {what}.")
    print(f"ok: {what}")


def _same(found: list[list[Answer]], wanted: list[list[Answer]]) -> bool:
    return all(
        one.ids == other.ids and abs(one.gold_logprob - other.gold_logprob) < 1e-3
        for some, others in zip(found, wanted, strict=True)
        for one, other in zip(some, others, strict=True)
    )


def _asked(model: PreTrainedModel, kept: list[Kept], probes: list[Probe]) -> list[list[Answer]]:
    return ask(model, kept, probes, seq_len=LENGTH, ends=ENDS)


@torch.no_grad()
def _plain(model: PreTrainedModel, context: list[int], probe: Probe) -> Answer:
    """Answer without any cache."""
    start = [*context, *probe.question_ids]
    logits = model(torch.tensor([[*start, *probe.gold_ids]]), use_cache=False).logits[0]
    scores = logits[len(start) - 1 : -1].log_softmax(-1)
    gold = sum(float(scores[n, token]) for n, token in enumerate(probe.gold_ids))
    ids: list[int] = []
    while len(ids) < 16:
        token = int(model(torch.tensor([[*start, *ids]]), use_cache=False).logits[0, -1].argmax())
        if token in ENDS:
            break
        ids.append(token)
    return Answer(ids, gold)


@torch.no_grad()
def _alone(
    model: PreTrainedModel, name: str, tokens: int, context: list[int], probe: Probe, opened: int
) -> Answer:
    """Answer with kvpress's own hooks, cache and masking, one prefill a press, budget and probe."""
    press = _MADE[name]()
    press.compression_ratio = ratio(tokens, LENGTH)
    if name == KVZIP:
        press.compression_ratio = 1 - tokens / LENGTH + 1e-9
    cache = DynamicCache()
    for layer in model.model.layers:
        layer.self_attn.masked_key_indices = None
    with _eager(model) if name == OBSERVED else contextlib.nullcontext(), press(model):
        model.model(input_ids=torch.tensor([context]), past_key_values=cache)
        if name == KVZIP:
            press.prefix_length = opened
    keys = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]

    def restored() -> DynamicCache:
        again = DynamicCache()
        for index, (key, value) in enumerate(keys):
            again.update(key.clone(), value.clone(), index)
        return again

    def read(cache: DynamicCache, ids: list[int], at: int) -> Tensor:
        """Token by token: with many queries at once kvpress may find no key that hides."""
        places = [torch.tensor([[place]]) for place in range(at, at + len(ids))]
        return torch.cat(
            [
                model(torch.tensor([[token]]), position_ids=place, past_key_values=cache).logits[0]
                for token, place in zip(ids, places, strict=True)
            ]
        )

    question = list(probe.question_ids)
    logits = read(restored(), [*question, *probe.gold_ids], LENGTH)
    scores = logits[len(question) - 1 : -1].log_softmax(-1)
    gold = sum(float(scores[n, token]) for n, token in enumerate(probe.gold_ids))
    cache, ids = restored(), []
    logits = read(cache, question, LENGTH)
    while (token := int(logits[-1].argmax())) not in ENDS and len(ids) < 16:
        ids.append(token)
        logits = read(cache, [token], LENGTH + len(question) + len(ids) - 1)
    for layer in model.model.layers:
        layer.self_attn.masked_key_indices = None
    return Answer(ids, gold)


@contextlib.contextmanager
def _eager(model: PreTrainedModel) -> Iterator[None]:
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation("sdpa")


def _small(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Return a random model whose attention is sharp enough to depend on what is kept."""
    torch.manual_seed(0)
    vocabulary = {char: n + 4 for n, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary |= {"<pad>": 0, "<unk>": 1, "<s>": 2, "</s>": 3}
    inner = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<pad>", "<unk>", "<s>", "</s>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", pad_token="<pad>")
    tokenizer.chat_template = TEMPLATE
    config = Qwen2Config(
        vocab_size=len(vocabulary),
        hidden_size=128,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.3,
        eos_token_id=3,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    model = Qwen2ForCausalLM.from_pretrained(folder, attn_implementation="sdpa").eval()
    return model, tokenizer


if __name__ == "__main__":
    main()
