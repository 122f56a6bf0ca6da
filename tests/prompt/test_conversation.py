"""A conversation that grows: only new tokens come out, and rewrites are noticed."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prompt_models import TEMPLATES, call, make_tokenizer, one_shot

from memdecay.errors import SessionError, TraceError
from memdecay.prompt import Conversation
from memdecay.regions import Profile

SYSTEM = {"role": "system", "content": "Be kind."}
USER = {"role": "user", "content": "Find a flight"}
ACTION = {"role": "assistant", "content": "", "tool_calls": [call("search", {"query": "Oslo"})]}
RESULT = {"role": "tool", "tool_call_id": "abc123xyz", "content": "Flight 12"}
ANSWER = {"role": "assistant", "content": "Take flight 12."}
THANKS = {"role": "user", "content": "thanks, now the hotel"}
TOOLS = [{"type": "function", "function": {"name": "search", "description": "d", "parameters": {}}}]


def grow(conversation, *chunks):
    """Append chunk by chunk; return ids, text, (message, region) per token, and the notes."""
    ids, text, labels, notes = [], "", [], []
    for chunk in chunks:
        result = conversation.append(chunk)
        ids += result.ids
        text += result.text
        labels += [(result.spans[i].message, result.spans[i].region) for i in result.span_index]
        notes += result.notes
    return ids, text, labels, notes


def rewrites(notes):
    return [note for note in notes if "rewrites what was rendered" in note]


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_pieces_together_are_the_whole(name, kind):
    """System texts that Mistral moves to the last user turn have a test of their own."""
    tokenizer = make_tokenizer(name, kind)
    start = [USER] if name == "mistral" else [SYSTEM, USER]
    chunks = [start, [ACTION], [RESULT], [ANSWER], [THANKS], [ANSWER]]
    whole = Conversation(tokenizer).append([m for chunk in chunks for m in chunk])
    ids, text, labels, notes = grow(Conversation(tokenizer), *chunks)
    assert text == whole.text
    assert ids == whole.ids
    assert labels == [(whole.spans[i].message, whole.spans[i].region) for i in whole.span_index]
    assert rewrites(notes) == []


CHUNKED = st.lists(
    st.tuples(
        st.sampled_from(["a b", " x ", "\n", "", "Plan: go", "é日", "c.", "é"]), st.booleans()
    ),
    min_size=1,
    max_size=7,
)


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
@pytest.mark.parametrize("name", ["smol", "qwen", "llama3", "mistral", "gemma", "phi"])
def test_any_cut_says_the_same(name, kind):
    tokenizer = make_tokenizer(name, kind)

    @settings(max_examples=25, deadline=None, derandomize=True)
    @given(CHUNKED)
    def run(parts):
        messages = [
            {"role": ("user", "assistant")[i % 2], "content": text}
            for i, (text, _) in enumerate(parts)
        ]
        chunks = [[]]
        for message, (_, cut) in zip(messages, parts, strict=True):
            chunks[-1].append(message)
            if cut:
                chunks.append([])
        whole = Conversation(tokenizer).append(messages)
        ids, text, _, notes = grow(Conversation(tokenizer), *[c for c in chunks if c])
        assert text == whole.text
        assert tokenizer.decode(ids) == tokenizer.decode(whole.ids) == whole.text
        assert rewrites(notes) == []

    run()


def test_a_system_message_alone():
    for name in ("chatml", "qwen", "gemma", "mistral", "llama3"):
        tokenizer = make_tokenizer(name)
        _, text, labels, _ = grow(Conversation(tokenizer), [SYSTEM], [USER])
        assert text == one_shot(tokenizer, [SYSTEM, USER])
        assert (0, "system") in labels and (1, "user") in labels


# Rewrites.


def test_old_thinking_dropped():
    tokenizer = make_tokenizer("thinking")
    thinker = {**ANSWER, "reasoning_content": "I think so."}
    conversation = Conversation(tokenizer)
    first = conversation.append([USER, thinker])
    assert "<think>" in first.text
    second = conversation.append([THANKS])
    assert second.text == "<|im_start|>user\nthanks, now the hotel<|im_end|>\n"
    assert [s.message for s in second.spans] == [2]
    (note,) = second.notes
    assert "before message 2, from message 1 on" in note and "I think so." in note
    assert note in conversation.notes
    third = conversation.append([ANSWER])
    assert third.text == "<|im_start|>assistant\nTake flight 12.<|im_end|>\n"
    assert third.notes == []


def test_schemas_and_system_text_that_move():
    tokenizer = make_tokenizer("mistral")
    conversation = Conversation(tokenizer, tools=TOOLS)
    first = conversation.append([SYSTEM, USER])
    assert "[TOOLS]" in first.text and "Be kind." in first.text
    second = conversation.append([ANSWER])
    assert second.text == " Take flight 12.</s>"
    third = conversation.append([THANKS])
    assert len(rewrites(second.notes)) == len(rewrites(third.notes)) == 1
    where = [(s.message, s.region, tokenizer.decode(third.ids[s.start : s.end]))
             for s in third.spans]  # fmt: skip
    assert where[0][:2] == (3, "system") and where[0][2].startswith("[TOOLS]")
    assert (0, "system", "Be kind.") in where
    assert where[-1] == (3, "user", "thanks, now the hotel[/INST]")


def test_a_default_system_prompt_that_goes_away():
    conversation = Conversation(make_tokenizer("smol"))
    conversation.append([USER])
    result = conversation.append([SYSTEM, THANKS])
    assert result.notes == []  # the default stays where it was: the first message is no system one
    assert result.text.startswith("<|im_start|>system\nBe kind.")


def test_a_template_that_trims_only_what_is_past():
    source = (
        "{% for m in messages %}[{{ m.content if loop.last else m.content | trim }}]{% endfor %}"
    )
    conversation = Conversation(make_tokenizer(source))
    assert conversation.append([{"role": "user", "content": "a "}]).text == "[a ]"
    result = conversation.append([{"role": "user", "content": "b "}])
    assert result.text == "[b ]"
    assert len(rewrites(result.notes)) == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen", "<|im_start|>user\n<tool_response>\nFlight 13\n</tool_response><|im_end|>\n"),
        (
            "gemma",
            "<start_of_turn>user\n<tool_response>\nFlight 13\n</tool_response><end_of_turn>\n",
        ),
    ],
)
def test_tool_results_one_by_one_open_turns_of_their_own(name, text):
    conversation = Conversation(make_tokenizer(name))
    conversation.append([USER, ACTION, RESULT])
    result = conversation.append([{"role": "tool", "content": "Flight 13"}])
    assert result.text == text
    assert [(s.message, s.region) for s in result.spans] == [(3, "tool_out")]
    assert len(rewrites(result.notes)) == 1
    answer = conversation.append([ANSWER])
    assert "Take flight 12." in answer.text
    assert "Flight" not in answer.text
    assert answer.notes == []


def test_an_ending_is_left_out_and_said():
    tokenizer = make_tokenizer("phi")
    conversation = Conversation(tokenizer)
    result = conversation.append([USER])
    assert result.text == "<|user|>\nFind a flight<|end|>\n"
    assert any("ends a conversation with '</s>'" in note for note in result.notes)


# Answers of the model.


def answer(conversation, tokenizer, text):
    prompt = conversation.generation_prompt()
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return prompt, conversation.record_generated(ids)


ENDS = {
    "chatml": "<|im_end|>",
    "smol": "<|im_end|>",
    "qwen": "<|im_end|>",
    "llama3": "<|eot|>",
    "mistral": "</s>",
    "gemma": "<end_of_turn>",
    "phi": "<|end|>",
}


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
@pytest.mark.parametrize("stops", [True, False])
@pytest.mark.parametrize("name", ENDS)
def test_what_comes_after_an_answer(name, stops, kind):
    """Prompt, answer and next turn together are what a recorded answer would have given."""
    tokenizer = make_tokenizer(name, kind)
    conversation = Conversation(tokenizer)
    first = conversation.append([USER])
    lead = " " if name == "mistral" else ""
    text = lead + "Take flight 12." + (ENDS[name] if stops else "")
    prompt, recorded = answer(conversation, tokenizer, text)
    second = conversation.append([THANKS])
    whole = Conversation(tokenizer).append([USER, ANSWER, THANKS])
    assert first.text + prompt.text + text + second.text == whole.text
    assert second.notes == []
    assert recorded.message["role"] == "assistant"
    assert recorded.message["content"].strip() == "Take flight 12."
    assert recorded.rendered.regions == ["user"] * len(recorded.rendered.ids)
    pending = [s for s in second.spans if s.message == 1]
    assert bool(pending) == (not stops or ENDS[name] + "\n" in whole.text)


def test_a_call_that_the_model_wrote():
    tokenizer = make_tokenizer("qwen")
    conversation = Conversation(tokenizer, retrievers=["search"])
    conversation.append([USER])
    text = (
        '<think>\nhm\n</think>\nI look.\n<tool_call>\n{"name":"search","arguments":{"q":"é日"}}\n'
        "</tool_call><|im_end|>"
    )
    _, (message, tokens) = answer(conversation, tokenizer, text)
    assert message["content"] == "I look."
    assert message["reasoning_content"] == "hm"
    assert message["tool_calls"][0]["function"] == {"name": "search", "arguments": {"q": "é日"}}
    assert len(message["tool_calls"][0]["id"]) == 9
    assert [
        (s.region, tokenizer.decode(tokens.ids[s.start : s.end]), s.message) for s in tokens.spans
    ] == [
        ("scratchpad", "<think>\nhm\n</think>", 1),
        ("scratchpad", "\nI look.\n", 1),
        ("tool_in", text[text.index("<tool_call>") :], 1),
    ]
    assert any("differently from how it was generated" in n for n in tokens.notes)
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "doc"}
    after = conversation.append([result])
    assert after.text == "\n<|im_start|>user\n<tool_response>\ndoc\n</tool_response><|im_end|>\n"
    assert [(s.message, s.region) for s in after.spans] == [(1, "tool_in"), (2, "retrieval")]


@pytest.mark.parametrize(
    ("text", "regions", "fields"),
    [
        ("Plan: go", ["plan"], {"content": "Plan: go"}),
        ("<think>cut off", ["scratchpad"], {"content": "", "reasoning_content": "cut off"}),
        ("<tool_call>{oops", ["tool_in"], {"content": "<tool_call>{oops"}),
        (" spaces kept ", ["user"], {"content": " spaces kept "}),
        ("<|im_end|>", ["user"], {"content": ""}),
        ("<think>a</think>b", ["scratchpad", "user"], {"content": "b", "reasoning_content": "a"}),
    ],
)
def test_odd_answers(text, regions, fields):
    tokenizer = make_tokenizer("chatml")
    conversation = Conversation(tokenizer)
    conversation.append([USER])
    _, (message, tokens) = answer(conversation, tokenizer, text)
    assert [s.region for s in tokens.spans] == regions
    assert "".join(tokenizer.decode(tokens.ids[s.start : s.end]) for s in tokens.spans) == text
    assert {k: message.get(k) for k in fields} == fields
    assert "tool_calls" not in message
    assert conversation.append([THANKS]).text.endswith("the hotel<|im_end|>\n")


def test_a_broken_call_is_flagged():
    tokenizer = make_tokenizer("chatml")
    conversation = Conversation(tokenizer)
    conversation.append([USER])
    _, (_, tokens) = answer(conversation, tokenizer, "<tool_call>{oops</tool_call>")
    assert tokens.spans[0].ambiguous and "not complete JSON" in tokens.spans[0].note


def test_a_prompt_that_opens_the_thinking():
    source = TEMPLATES["chatml"].replace(
        "'<|im_start|>assistant\\n'", "'<|im_start|>assistant\\n<think>\\n'"
    )
    tokenizer = make_tokenizer(source)
    conversation = Conversation(tokenizer)
    conversation.append([USER])
    prompt, (message, tokens) = answer(conversation, tokenizer, "hm\n</think>\nNo.<|im_end|>")
    assert prompt.text.endswith("<think>\n")
    assert message == {"role": "assistant", "content": "No.", "reasoning_content": "hm"}
    assert [s.region for s in tokens.spans] == ["scratchpad", "user"]


def test_thinking_that_the_template_drops_from_a_generated_answer():
    tokenizer = make_tokenizer("thinking")
    conversation = Conversation(tokenizer)
    conversation.append([USER])
    text = "<think>\nhm\n</think>\n\nNo.<|im_end|>"
    _, (message, tokens) = answer(conversation, tokenizer, text)
    assert message["reasoning_content"] == "hm"
    assert tokens.notes == []  # the template writes the newest answer as it was generated
    after = conversation.append([THANKS])
    assert after.text == "\n<|im_start|>user\nthanks, now the hotel<|im_end|>\n"
    assert [(s.message, s.region) for s in after.spans] == [(1, "user"), (2, "user")]
    assert len(rewrites(after.notes)) == 1


def test_ids_that_are_not_those_of_the_text():
    """A model may write a text with other tokens than the tokenizer would use."""
    tokenizer = make_tokenizer("qwen")
    conversation = Conversation(tokenizer)
    conversation.append([USER])
    text = "the é<tool_call>{}</tool_call>"
    ids = [i for c in "the é" for i in tokenizer(c, add_special_tokens=False)["input_ids"]]
    ids += tokenizer(text[5:], add_special_tokens=False)["input_ids"]
    assert ids != tokenizer(text, add_special_tokens=False)["input_ids"]
    tokens = conversation.record_generated(ids).rendered
    assert [tokenizer.decode(ids[s.start : s.end]) for s in tokens.spans] == ["the é", text[5:]]


def test_the_generation_prompt_changes_nothing():
    conversation = Conversation(make_tokenizer("qwen"))
    conversation.append([USER])
    before = conversation.state_dict()
    first, second = conversation.generation_prompt(), conversation.generation_prompt()
    assert first == second
    assert first.text == "<|im_start|>assistant\n"
    assert [(s.message, s.region, s.source) for s in first.spans] == [(1, "scratchpad", "template")]
    assert conversation.state_dict() == before


def test_two_answers_in_a_row():
    tokenizer = make_tokenizer("chatml")
    conversation = Conversation(tokenizer)
    conversation.append([USER])
    answer(conversation, tokenizer, "One.<|im_end|>")
    prompt, recorded = answer(conversation, tokenizer, "Two.")
    assert prompt.text == "\n<|im_start|>assistant\n"
    assert [s.message for s in prompt.spans] == [1, 2]
    assert prompt.generation_prompt == len(prompt.ids)
    assert recorded.rendered.spans[0].message == 2
    assert [m["content"] for m in conversation.messages[1:]] == ["One.", "Two."]


def test_nothing_to_answer_and_nothing_written():
    conversation = Conversation(make_tokenizer("chatml"))
    with pytest.raises(TraceError, match="There is no message yet"):
        conversation.generation_prompt()
    conversation.append([USER])
    with pytest.raises(TraceError, match=r"ids is .*at least one"):
        conversation.record_generated([])


def test_an_answer_that_the_template_refuses_changes_nothing():
    tokenizer = make_tokenizer("gemma")
    conversation = Conversation(tokenizer)
    conversation.append([USER, ANSWER])
    before = conversation.state_dict()
    with pytest.raises(TraceError, match="must alternate"):
        conversation.record_generated(tokenizer("hi", add_special_tokens=False)["input_ids"])
    assert conversation.state_dict() == before


# State.


def test_a_bad_message_changes_nothing():
    conversation = Conversation(make_tokenizer("qwen"))
    conversation.append([USER])
    before = conversation.state_dict()
    for bad in ([], [THANKS, {"role": "x", "content": "y"}], [{**THANKS, "region": "nowhere"}]):
        with pytest.raises(TraceError):
            conversation.append(bad)
    assert conversation.state_dict() == before
    assert conversation.append([ANSWER]).spans[0].message == 1


def test_messages_are_copies():
    conversation = Conversation(make_tokenizer("qwen"))
    message = {"role": "user", "content": [{"type": "text", "text": "a"}]}
    conversation.append([message])
    message["content"][0]["text"] = "b"
    conversation.messages.append("x")
    assert conversation.messages[0]["content"][0]["text"] == "a"
    assert len(conversation.messages) == 1


@pytest.mark.parametrize("name", ["qwen", "thinking", "mistral"])
def test_saved_and_loaded_goes_on_the_same(name):
    tokenizer = make_tokenizer(name)
    one = Conversation(tokenizer, tools=TOOLS, retrievers=["search"])
    one.append([USER])
    answer(one, tokenizer, "<think>\nhm</think>Yes.")
    state = json.loads(json.dumps(one.state_dict()))
    two = Conversation.from_state(tokenizer, state)
    three = Conversation.from_state(tokenizer, state)
    assert two.state_dict() == state
    rest = [THANKS, ACTION, RESULT]
    assert one.append(rest) == two.append(rest) == three.append(rest)
    assert one.generation_prompt() == two.generation_prompt()
    assert one.state_dict() == two.state_dict() == three.state_dict()
    assert (one.messages, one.notes) == (two.messages, two.notes)


def test_an_empty_conversation_can_be_saved():
    tokenizer = make_tokenizer("qwen")
    loaded = Conversation.from_state(tokenizer, Conversation(tokenizer).state_dict())
    assert loaded.messages == []
    assert loaded.append([USER]) == Conversation(tokenizer).append([USER])


def test_damaged_states():
    tokenizer = make_tokenizer("qwen")
    conversation = Conversation(tokenizer)
    conversation.append([USER])
    state = conversation.state_dict()
    for bad, says in [
        ("x", "state is a str"),
        ({**state, "messages": 3}, "has messages 3"),
        ({**state, "version": 99}, "version 99"),
        ({**state, "messages": [{"role": "x"}]}, "is damaged: Message 0 has role"),
        ({k: v for k, v in state.items() if k != "tail"}, "has tail None"),
    ]:
        with pytest.raises(SessionError, match=says):
            Conversation.from_state(tokenizer, bad)
    with pytest.raises(SessionError, match="another chat template"):
        Conversation.from_state(make_tokenizer("smol"), state)


def test_regions_of_an_own_profile():
    from memdecay.regions import RegionPolicy

    profile = Profile.default().with_region("memory", RegionPolicy(0.9, 0.001))
    conversation = Conversation(make_tokenizer("qwen"), profile=profile)
    result = conversation.append([{**USER, "region": "memory"}])
    assert "memory" in result.regions
    with pytest.raises(TraceError, match=r"region 'memory'.*one of system, plan"):
        Conversation(make_tokenizer("qwen")).append([{**USER, "region": "memory"}])
