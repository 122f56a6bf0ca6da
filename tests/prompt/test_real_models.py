"""The real tokenizers and templates of SmolLM2 and Qwen2.5-Coder, where they are on disk."""

from __future__ import annotations

import pytest
from prompt_models import one_shot

from memdecay.prompt import Conversation, load_trace
from memdecay.prompt.prepare import parsed_arguments

DIALOGUE = [
    {"role": "user", "content": "  Find a flight, naïve 日本 👋🏽\n\n"},
    {"role": "assistant", "content": "Take flight 12."},
    {"role": "user", "content": "thanks"},
]


def with_mappings(messages):
    """Return messages as transformers wants them: text contents, call arguments as mappings."""
    out = []
    for message in messages:
        message = {**message, "content": message["content"] or ""}
        if message.get("tool_calls"):
            message["tool_calls"] = [
                {
                    **c,
                    "function": {
                        "name": c["function"]["name"],
                        "arguments": parsed_arguments(c["function"]["arguments"]),
                    },
                }
                for c in message["tool_calls"]
            ]
        out.append(message)
    return out


@pytest.mark.parametrize("model", ["smollm2", "qwen_coder"])
def test_a_dialogue(model, request):
    tokenizer = request.getfixturevalue(model)
    conversation = Conversation(tokenizer)
    parts = [conversation.append([m]) for m in DIALOGUE] + [conversation.generation_prompt()]
    want = one_shot(tokenizer, DIALOGUE, add_generation_prompt=True)
    assert "".join(p.text for p in parts) == want
    ids = [i for p in parts for i in p.ids]
    assert ids == tokenizer(want, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == want
    assert parts[0].regions[0] == "system" and parts[0].regions[-1] == "user"


def test_traces_in_qwen_are_what_transformers_renders(qwen_coder, traces):
    for path in traces:
        trace = load_trace(path)
        if path.stat().st_size > 60_000:
            continue
        whole = Conversation(qwen_coder, tools=trace.tools or None).append(trace.messages)
        assert whole.text == one_shot(
            qwen_coder, with_mappings(trace.messages), tools=trace.tools or None
        )


@pytest.mark.parametrize("model", ["smollm2", "qwen_coder"])
def test_traces_turn_by_turn(model, request, traces):
    """A turn ends with an assistant message, so that parallel tool results stay together."""
    tokenizer = request.getfixturevalue(model)
    for path in traces:
        trace = load_trace(path)
        if path.stat().st_size > 60_000:
            continue
        whole = Conversation(tokenizer, tools=trace.tools or None).append(trace.messages)
        growing = Conversation(tokenizer, tools=trace.tools or None)
        ids, labels, chunk = [], [], []
        for place, message in enumerate(trace.messages):
            chunk.append(message)
            last = place + 1 == len(trace.messages)
            if message["role"] == "assistant" or last:
                result = growing.append(chunk)
                ids += result.ids
                labels += result.regions
                chunk = []
        assert ids == whole.ids
        assert labels == whole.regions
        assert not any("rewrites" in note for note in growing.notes)


def test_smollm2_gets_calls_as_text(smollm2, traces):
    path = next(p for p in traces if p.stem == "agentdojo_slack_user_task_20")
    trace = load_trace(path)
    result = Conversation(smollm2, tools=trace.tools).append(trace.messages)
    assert result.text.count("<tool_call>") == sum(
        len(m.get("tool_calls", ())) for m in trace.messages
    )
    assert any("ignores tool_calls" in n for n in result.notes)
    assert any("ignores tool schemas" in n for n in result.notes)


def test_qwen_answers_with_a_call(qwen_coder):
    conversation = Conversation(qwen_coder, retrievers=["search"])
    conversation.append(DIALOGUE)
    text = 'Sure.\n<tool_call>\n{"name": "search", "arguments": {"q": "x"}}\n</tool_call><|im_end|>'
    ids = qwen_coder(text, add_special_tokens=False)["input_ids"]
    message, tokens = conversation.record_generated(ids)
    assert message["tool_calls"][0]["function"]["name"] == "search"
    assert [s.region for s in tokens.spans] == ["scratchpad", "tool_in"]
    after = conversation.append([{"role": "tool", "content": "r"}])
    assert after.text == "\n<|im_start|>user\n<tool_response>\nr\n</tool_response><|im_end|>\n"
