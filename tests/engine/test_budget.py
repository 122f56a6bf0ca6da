"""The budget holds at every moment, pins stay, pages go whole, and the bytes are what is said."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from engine.families import make, oracle, tokens
from engine.helpers import Record, chunks, close, kept, same, snapshot
from memdecay.engine.cache import Evicted, MemDecayCache
from memdecay.engine.slots import KVPool
from memdecay.errors import BudgetError
from memdecay.regions import REGIONS

POLICIES = ["memdecay-paper", "h2o", "tova", "snapkv", "streaming", "random", "observation_masking"]


@torch.no_grad()
def test_the_budget_holds_inside_every_layer_of_a_long_prefill(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    length, budget = 20_000, 1_024
    config = LlamaConfig(
        vocab_size=211,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32_768,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    cache = MemDecayCache(model, budget=budget)
    held: list[int] = []
    write = KVPool.write

    def watched(pool: KVPool, where: Any, keys: Any, values: Any) -> None:
        write(pool, where, keys, values)
        assert pool.kv.shape[3] <= budget
        held.append(max(cache.main.width, where.start + where.count))

    monkeypatch.setattr(KVPool, "write", watched)
    regions = random.Random(1).choices(REGIONS[1:], k=length - 100)
    cache.label(["system"] * 100 + regions)
    ids = tokens(length)
    cache.prefilling = True
    for start, end in chunks(length, [256, 511, 64, 256]):
        model(input_ids=ids[:, start:end], cache=cache, logits_to_keep=1)
    assert len(held) == 2 * len(chunks(length, [256, 511, 64, 256]))
    assert max(held) == cache.peak_tokens == budget
    assert cache.get_seq_length() == length
    assert cache.evicted_tokens == length - cache.kept()
    assert kept(cache)[:100] == list(range(100)), "the system text is pinned"
    assert cache.nbytes == 2 * 2 * budget * 32 * 4


@pytest.mark.parametrize("align", [None, "region"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("policy", POLICIES)
@torch.no_grad()
def test_whole_pages_go_and_pins_and_the_open_page_stay(
    policy: str, page_size: int, align: str | None
) -> None:
    model = make("llama_one_layer")
    budget, prompt, steps = 80, 90, 60
    cache = MemDecayCache(model, budget=budget, policy=policy, page_size=page_size, align=align)
    labelled = "labels" in cache.policy.needs
    regions = ["system"] * 10 + [r for r in REGIONS[1:] for _ in range(14)]
    cache.label(regions[:20])
    cache.label(regions[20:25], pinned=True)
    cache.label(regions[25:prompt])
    pins = set(range(20, 25)) | (set(range(10)) if labelled else set())
    page_of: dict[int, int] = {}
    gone: dict[int, int] = {}

    def evicted(what: Evicted) -> None:
        ledger = cache.ledgers[0]
        for position, page in zip(what.position.tolist(), what.page.tolist(), strict=True):
            assert page_of[position] == page, "a page is for life"
            gone[position] = page
        left = set(ledger["page"].tolist())
        assert not left & set(what.page.tolist()), "only whole pages go"
        if ledger.filled % page_size:
            assert ledger.next_page - 1 not in what.page.tolist(), "the page being filled stays"

    cache.on_evict = evicted
    ids = tokens(prompt + steps)
    for start, end in chunks(prompt + steps, [30, 17, 13, 15, 15, 1]):
        cache.prefilling = end <= prompt
        model(input_ids=ids[:, start:end], cache=cache)
        ledger = cache.ledgers[0]
        page_of.update(zip(ledger["position"].tolist(), ledger["page"].tolist(), strict=True))
        assert cache.kept() <= budget
        assert pins <= set(kept(cache))
        assert set(kept(cache)) == set(range(end)) - set(gone)
    assert len(gone) == cache.evicted_tokens > 60
    assert len(set(gone.values())) == cache.evicted_pages
    if align is None:
        assert all(page == position // page_size for position, page in page_of.items())
    else:
        names = {p: regions[p] if p < prompt else "scratchpad" for p in page_of}
        for page in set(page_of.values()):
            members = [position for position, at in page_of.items() if at == page]
            assert len(members) <= page_size
            assert len({names[position] for position in members}) == 1


@pytest.mark.parametrize("budget", [0, -1, True, 2.5, "64", 15])
def test_a_budget_that_is_none_is_refused(budget: Any) -> None:
    with pytest.raises(BudgetError, match=f"budget is {budget!r}"):
        MemDecayCache(make("llama_one_layer"), budget=budget, page_size=16)


def test_a_budget_for_a_policy_that_never_evicts_is_refused() -> None:
    with pytest.raises(BudgetError, match="never evicts"):
        MemDecayCache(make("llama_one_layer"), budget=64, policy="full")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("page_size", 0),
        ("page_size", 1.0),
        ("observe_every", -1),
        ("window", 0),
        ("align", "page"),
        ("clock", "seconds"),
        ("policy", None),
    ],
)
def test_other_arguments_are_refused_by_name(option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{option} is {value!r}"):
        MemDecayCache(make("llama_one_layer"), budget=None, **{option: value})


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize("policy", POLICIES)
@torch.no_grad()
def test_a_budget_that_does_not_bind_changes_nothing(name: str, policy: str) -> None:
    model = make(name)
    ids = tokens(60)
    cache = MemDecayCache(model, budget=200, policy=policy)
    logits = [model(input_ids=ids[:, a:b], cache=cache).logits[0] for a, b in chunks(60, [50, 1])]
    assert close(torch.cat(logits), oracle(model, ids, []))
    assert kept(cache) == list(range(60))
    assert cache.evicted_tokens == 0


@pytest.mark.parametrize("first", [True, False])
@torch.no_grad()
def test_a_forward_that_cannot_fit_changes_nothing(first: bool) -> None:
    model = make("llama")
    ids = tokens(90)
    cache = MemDecayCache(model, budget=64, page_size=4)
    cache.label(["system"] * 30 + ["user"] * 60)
    record = Record(model, cache)
    cache.prefilling = True
    if not first:
        model(input_ids=ids[:, :30], cache=cache)
        model(input_ids=ids[:, 30:57], cache=cache)
    seen = cache.get_seq_length()
    before = snapshot(cache)
    with pytest.raises(BudgetError, match=r"new tokens do not fit budget=64.*run at most \d+"):
        model(input_ids=ids[:, seen:][:, :65], cache=cache)
    if not first:
        with pytest.raises(BudgetError, match="pins hold 32 and the page being filled 1 more"):
            model(input_ids=ids[:, 57:89], cache=cache)
    assert same(snapshot(cache), before)
    assert model.config._attn_implementation == "sdpa"
    for start in range(seen, 90, 31):
        model(input_ids=ids[:, start : start + 31], cache=cache)
    assert cache.ledgers[0].seen == 90
    assert record.worst(0) < 1e-4
    assert (cache.ledgers[0]["region"] == cache.profile.id("system")).sum() == 30, "labels are kept"


@torch.no_grad()
def test_shrink_to_what_the_pins_do_not_leave() -> None:
    model = make("llama")
    cache = MemDecayCache(model, budget=None, page_size=4)
    cache.label(["system"] * 30)
    model(input_ids=tokens(50), cache=cache)
    before = snapshot(cache)
    with pytest.raises(BudgetError, match="budget is 20, but pins hold 32 tokens"):
        cache.shrink(20)
    with pytest.raises(BudgetError, match="budget is 0"):
        cache.shrink(0)
    assert same(snapshot(cache), before)
    cache.shrink(36)
    assert cache.kept() <= 36


MEASURE = """
import json, os, sys
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from memdecay.engine.cache import MemDecayCache

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

torch.set_num_threads(1)
config = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=16, num_hidden_layers=16,
    num_attention_heads=1, num_key_value_heads=1, head_dim=256, max_position_embeddings=65536)
model = AutoModelForCausalLM.from_config(config).eval()
ids = torch.randint(0, 64, (1, 8192))
budget = 4096
with torch.no_grad():
    warm = MemDecayCache(model, budget=512)
    for start in range(0, 1024, 128):
        model(input_ids=ids[:, start:start + 128], cache=warm, logits_to_keep=1)
    del warm
    before = resident()
    cache = MemDecayCache(model, budget=budget)
    for start in range(0, 5120, 128):
        model(input_ids=ids[:, start:start + 128], cache=cache, logits_to_keep=1)
print(json.dumps({"grown": resident() - before, "nbytes": cache.nbytes, "kept": cache.kept(),
    "pools": sum(pool.kv.numel() * 4 for pool in cache.pools)}))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_bytes_reported_are_the_bytes_resident() -> None:
    # Blocks of more than 64 KiB go back to the system once freed, so that what the allocator keeps
    # for later is not counted as the cache's.
    strict = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    run = subprocess.run(
        [sys.executable, "-c", MEASURE],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **strict},
    )
    result = json.loads(run.stdout)
    assert result["kept"] > 4096 - 16
    assert result["nbytes"] == result["pools"] == 16 * 2 * 4096 * 256 * 4
    assert abs(result["grown"] / result["nbytes"] - 1) < 0.05, result
