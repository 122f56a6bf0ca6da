"""Malformed messages: one sentence that names the message, the field and what is allowed."""

from __future__ import annotations

import pytest
from prompt_models import call, make_tokenizer

from memdecay.errors import TraceError
from memdecay.prompt import Conversation, validate_messages

GOOD = {"role": "user", "content": "q"}


def deep(levels):
    value = {}
    for _ in range(levels):
        value = {"a": value}
    return value


BAD = {
    "not a list": ("hello", "messages is 'hello'"),
    "a mapping": (GOOD, "must be a list"),
    "None": (None, "messages is None"),
    "empty": ([], "messages is empty"),
    "not a mapping": ([GOOD, 3], "Message 1 is 3"),
    "no role": ([GOOD, {"content": "x"}], "Message 1 has role None"),
    "wrong role": ([{"role": "robot", "content": "x"}], "Message 0 has role 'robot'"),
    "unhashable role": ([{"role": ["user"], "content": "x"}], "Message 0 has role ['user']"),
    "neither": ([GOOD, {"role": "user"}], "neither content nor tool_calls"),
    "neither, calls empty": ([{"role": "assistant", "tool_calls": []}], "neither content"),
    "no parts": ([{"role": "user", "content": []}], "neither content nor tool_calls"),
    "number": ([{"role": "user", "content": 3}], "Message 0 has content 3"),
    "picture": (
        [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
        "content part 0 has type 'image_url'",
    ),
    "part without text": ([{"role": "user", "content": [{"type": "text"}]}], "has text None"),
    "part is text": ([{"role": "user", "content": ["x"]}], "content part 0 is 'x'"),
    "calls no list": ([{"role": "assistant", "tool_calls": "x"}], "has tool_calls 'x'"),
    "call no mapping": ([{"role": "assistant", "tool_calls": ["x"]}], "tool call 0 is 'x'"),
    "call without name": (
        [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}],
        "tool call 0 has name None",
    ),
    "arguments a list": (
        [{"role": "assistant", "tool_calls": [call("f", [1])]}],
        "has arguments [1]",
    ),
    "arguments deep": (
        [{"role": "assistant", "tool_calls": [call("f", deep(100_000))]}],
        "must be plain JSON",
    ),
    "call of a user": (
        [{"role": "user", "content": "x", "tool_calls": [call("f", "{}")]}],
        "only an assistant message may",
    ),
    "id a number": ([{"role": "tool", "content": "x", "tool_call_id": 3}], "has tool_call_id 3"),
    "reasoning a list": (
        [{"role": "assistant", "content": "x", "reasoning_content": ["r"]}],
        "has reasoning_content ['r']",
    ),
    "reasoning of a user": (
        [{"role": "user", "content": "x", "reasoning_content": "r"}],
        "only an assistant message may",
    ),
    "surrogate": ([{"role": "user", "content": "a\ud800"}], "lone surrogate '\\ud800'"),
    "not JSON": ([{"role": "user", "content": "x", "extra": {1j}}], "must be plain JSON"),
}


@pytest.mark.parametrize(("messages", "says"), BAD.values(), ids=BAD.keys())
def test_bad_messages(messages, says):
    with pytest.raises(TraceError) as caught:
        validate_messages(messages)
    text = str(caught.value)
    assert says in text
    assert text.endswith(".") and "\n" not in text and len(text) < 250


def test_unknown_region_lists_the_known_ones():
    with pytest.raises(TraceError, match=r"Message 4 has region 'sys'.*one of user, plan\."):
        validate_messages([{**GOOD, "region": "sys"}], regions=("user", "plan"), start=4)
    part = {"type": "text", "text": "x", "region": 3}
    with pytest.raises(TraceError, match="content part 0 has region 3"):
        validate_messages([{"role": "user", "content": [part]}])


def test_numbers_in_messages_go_on_counting():
    conversation = Conversation(make_tokenizer("chatml"))
    conversation.append([GOOD, {"role": "assistant", "content": "a"}])
    with pytest.raises(TraceError, match="Message 3 has role 'x'"):
        conversation.append([GOOD, {"role": "x", "content": "y"}])


def test_one_form():
    given = [
        {"role": "function", "name": "f", "content": "r"},
        {"role": "assistant", "content": None, "thinking": "t", "tool_calls": None, "refusal": None,
         "function_call": {"name": "f", "arguments": {"a": 1}}},
    ]  # fmt: skip
    assert validate_messages(given) == [
        {"role": "tool", "name": "f", "content": "r"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "t",
            "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
        },
    ]
    assert given[0]["role"] == "function"


def test_odd_but_allowed():
    texts = ["", "\x00\x07 \u200b", "x" * 300_000, "\U0001f600"]
    assert [
        m["content"] for m in validate_messages([{**GOOD, "content": t} for t in texts])
    ] == texts
