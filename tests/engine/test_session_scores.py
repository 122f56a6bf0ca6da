"""Teacher forcing: the scores of the assistant's tokens are those of a plain full forward."""

from __future__ import annotations

import pytest
import torch

from engine.families import CONFIGS
from engine.sessions import NEVER, assistant, full_logits, saying, session, system, user

TEMPLATES = ("chatml", "smol", "qwen", "thinking", "llama3", "gemma", "phi", "deepseek")


def check(made, scores, tolerance=1e-4):
    logits = full_logits(made.model, made._ids)
    said = torch.log_softmax(logits, -1)[scores.position - 1]
    ids = torch.tensor(made._ids)
    assert torch.equal(scores.target, ids[scores.position])
    assert torch.allclose(scores.nll, -said.gather(1, scores.target[:, None])[:, 0], atol=tolerance)
    assert torch.equal(scores.top1, said.argmax(-1))
    assert bool((scores.position.diff() > 0).all())


def written(made, scores, message):
    """The text of what was scored of one message."""
    return made.tokenizer.decode(scores.target[scores.message == message])


@pytest.mark.parametrize("chunk", [1, 7, 256])
@pytest.mark.parametrize("name", CONFIGS)
def test_scores_are_those_of_a_full_forward_whatever_the_chunk(name, chunk):
    made = session(name, prefill_chunk=chunk)
    scores = made.append(
        [user(9, 1), assistant(7, 2), user(3, 3), assistant(12, 4)], score=True
    ).scores
    check(made, scores)
    for message in (1, 3):
        said = made.conversation.messages[message]["content"]
        assert written(made, scores, message) == said + "<|im_end|>"
    assert set(scores.message.tolist()) == {1, 3}


@pytest.mark.parametrize("template", TEMPLATES)
def test_headers_are_skipped_and_ends_included(template):
    made = session(template=template)
    made.append([user(5)])
    header = made.conversation.generation_prompt().text
    start = made.cache.seen
    scores = made.append([{"role": "assistant", "content": "book it."}], score=True).scores
    check(made, scores)
    before = made._ids[start : int(scores.position[0])]
    assert made.tokenizer.decode(before) == header
    text = written(made, scores, len(made.conversation.messages) - 1)
    ends = {"llama3": "<|eot|>", "gemma": "<end_of_turn>", "phi": "<|end|>", "deepseek": "</s>"}
    assert text == "book it." + ends.get(template, "<|im_end|>")


@pytest.mark.parametrize("template", ["mistral", "parts"])
def test_the_first_token_after_an_earlier_append_is_scored(template):
    made = session(template=template)
    made.append([user(5)])
    start = made.cache.seen
    scores = made.append([assistant(5)], score=True).scores
    check(made, scores)
    assert int(scores.position[0]) == start
    made.append([user(3)])
    made.generate(**saying(made, "Oslo" if template == "parts" else "Oslo</s>"))
    made.append([user(3)])
    start = made.cache.seen
    scores = made.append([assistant(5)], score=True).scores
    assert int(scores.position[0]) == start
    check(made, scores)


def test_the_first_token_after_an_answer_is_scored():
    made = session(template="parts")
    made.append([user(5)])
    made.generate(**saying(made, "Oslo<|im_end|>\n"), eos_token_id=NEVER)
    start = made.cache.seen
    scores = made.append([assistant(5)], score=True).scores
    assert int(scores.position[0]) == start
    check(made, scores)


def test_what_the_model_itself_wrote_is_not_scored():
    made = session()
    made.append([user(5)])
    made.generate(max_new_tokens=2, eos_token_id=NEVER)
    assert made.append([user(2)], score=True).scores is None
    made.generate(max_new_tokens=2, eos_token_id=NEVER)
    scores = made.append([user(2), assistant(3)], score=True).scores
    assert set(scores.message.tolist()) == {5}
    check(made, scores)


def test_nothing_to_score():
    made = session()
    assert made.append([system(), user(5)], score=True).scores is None
    assert made.append([assistant(5)]).scores is None


def test_tool_calls_and_reasoning_are_scored():
    made = session(template="qwen")
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    message = {"role": "assistant", "content": "So", "tool_calls": [call]}
    scores = made.append([user(5), message], score=True).scores
    check(made, scores)
    assert written(made, scores, 1).startswith("So\n<tool_call>")
    assert written(made, scores, 1).endswith("</tool_call><|im_end|>")


def test_scores_under_a_budget_are_of_what_was_kept():
    free, tight = session(), session(budget=48)
    for made in (free, tight):
        made.append([user(100)])
    one, two = (m.append([assistant(20)], score=True).scores for m in (free, tight))
    assert torch.equal(one.position, two.position) and torch.equal(one.target, two.target)
    assert float((one.nll - two.nll).abs().max()) > 1e-3 and bool(torch.isfinite(two.nll).all())
