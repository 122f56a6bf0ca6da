"""Trace files: every format loads, every broken file is one sentence."""

from __future__ import annotations

import json

import pytest
from prompt_models import call, make_tokenizer

from memdecay.errors import TraceError
from memdecay.prompt import Conversation, label_trace, load_trace

MESSAGES = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": None, "tool_calls": [call("search", "{}")]},
    {"role": "tool", "tool_call_id": "abc123xyz", "content": "r"},
]
TOOLS = [{"type": "function", "function": {"name": "search", "parameters": {}}}]


def write(tmp_path, value, name="t.json"):
    path = tmp_path / name
    path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
    return path


def regions(trace):
    """Return (role, regions of its spans) of every message."""
    result = Conversation(make_tokenizer("smol")).append(trace.messages)
    out = [(m["role"], []) for m in trace.messages]
    for span in result.spans:
        out[span.message][1].append(span.region)
    return out


def test_openai(tmp_path):
    listed = load_trace(write(tmp_path, MESSAGES))
    assert (listed.id, listed.format, listed.tools) == ("t", "openai", [])
    assert [m["role"] for m in listed.messages] == ["system", "user", "assistant", "tool"]
    full = load_trace(
        write(
            tmp_path,
            {"id": "x", "source": "s", "messages": MESSAGES, "tools": TOOLS, "meta": {"a": 1}},
        )
    )
    assert full.messages == listed.messages
    assert (full.id, full.source, full.tools, full.meta) == ("x", "s", TOOLS, {"meta": {"a": 1}})


def test_a_byte_order_mark_and_one_message(tmp_path):
    path = tmp_path / "t.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(MESSAGES[1]).encode())
    assert load_trace(path).messages == [MESSAGES[1]]


def test_jsonl_of_messages(tmp_path):
    lines = "\n\n".join(json.dumps(m) for m in MESSAGES)
    trace = load_trace(write(tmp_path, lines, "t.jsonl"))
    assert trace.format == "openai-jsonl"
    assert len(trace.messages) == 4
    assert trace.notes == []


def test_jsonl_of_conversations(tmp_path):
    lines = "\n".join(
        json.dumps({"messages": [{"role": "user", "content": text}]}) for text in "abc"
    )
    path = write(tmp_path, lines, "t.jsonl")
    assert load_trace(path).messages[0]["content"] == "a"
    assert load_trace(path, index=2).messages[0]["content"] == "c"
    assert load_trace(path, index=2).notes == ["The file holds 3 conversations; this is number 2."]
    for index in (3, -1):
        with pytest.raises(TraceError, match=f"index is {index}, but .* 3 conversations"):
            load_trace(path, index=index)
    with pytest.raises(TraceError, match="must be an integer"):
        load_trace(path, index="1")


def test_tau_bench(tmp_path):
    results = [
        {"task_id": i, "reward": 0.0, "info": {}, "traj": MESSAGES, "trial": 3} for i in (7, 8)
    ]
    trace = load_trace(write(tmp_path, results, "gpt.json"), index=1)
    assert (trace.id, trace.format) == ("gpt_8_t3", "tau-bench")
    assert trace.meta["reward"] == 0.0
    assert regions(trace)[-1] == ("tool", ["tool_out"])


SWE_TEXT = {
    "environment": "swe_main",
    "history": [
        {"role": "system", "content": "SETTING", "agent": "primary"},
        {"role": "user", "content": "a demo", "is_demo": True, "agent": "primary"},
        {"role": "user", "content": "the issue", "agent": "primary"},
        {
            "role": "assistant",
            "content": "Look around.\n```\nls\n```",
            "thought": "Look around.\n",
            "action": "ls\n",
            "agent": "primary",
        },
        {"role": "user", "content": "a.py\nbash-$", "agent": "primary"},
        {"role": "assistant", "content": "ok", "thought": "ok", "action": "", "agent": "primary"},
        {"role": "user", "content": "carry on"},
    ],
    "trajectory": [],
    "info": {"exit_status": "submitted"},
}


def test_swe_agent_history_in_text_mode(tmp_path):
    trace = load_trace(write(tmp_path, SWE_TEXT, "x.traj"))
    assert trace.format == "swe-agent-history"
    assert trace.meta["info"] == {"exit_status": "submitted"}
    assert regions(trace) == [
        ("system", ["system"]),
        ("user", ["user"]),
        ("user", ["user"]),
        ("assistant", ["scratchpad", "tool_in"]),
        ("user", ["tool_out"]),
        ("assistant", ["user"]),
        ("user", ["user"]),
    ]
    parts = trace.messages[3]["content"]
    assert [p["text"] for p in parts] == ["Look around.\n", "```\nls\n```"]
    assert all("agent" not in m and "thought" not in m for m in trace.messages)


def test_swe_agent_history_with_calls_and_thinking(tmp_path):
    history = [
        {"role": "system", "content": "S", "message_type": "system_prompt"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "issue", "cache_control": {"type": "ephemeral"}}],
            "message_type": "observation",
        },
        {
            "role": "assistant",
            "content": "Look.",
            "thought": "Look.",
            "action": "ls",
            "message_type": "action",
            "tool_calls": [call("bash", {"command": "ls"}, "call_1")],
            "thinking_blocks": [{"type": "thinking", "thinking": "hm"}],
        },
        {
            "role": "tool",
            "content": "a.py",
            "message_type": "observation",
            "tool_call_ids": ["call_1"],
        },
    ]
    trace = load_trace(write(tmp_path, {"history": history, "trajectory": []}, "x.traj"))
    assert trace.messages[2]["reasoning_content"] == "hm"
    assert trace.messages[3]["tool_call_id"] == "call_1"
    assert [r for _, r in regions(trace)] == [
        ["system"],
        ["user"],
        ["scratchpad", "tool_in"],
        ["tool_out"],
    ]


@pytest.mark.parametrize("field", ["query", "messages"])
def test_swe_agent_steps(tmp_path, field):
    steps = [
        {
            "action": "ls",
            "observation": "a.py",
            "response": "Look.\n```\nls\n```",
            "thought": "Look.\n",
            field: [
                {"role": "system", "content": "S", "agent": "main"},
                {"role": "user", "content": "issue", "message_type": "observation"},
            ],
        },
        {
            "action": "cat a.py",
            "observation": "x = 1",
            "thought": "Read.",
            "response": "Read.",
            "tool_calls": [call("bash", '{"command": "cat a.py"}', "c2")],
            "tool_call_ids": ["c2"],
        },
        {"action": "submit", "thought": "Done.", "observation": ""},
    ]
    trace = load_trace(write(tmp_path, {"trajectory": steps}, "x.traj"))
    assert trace.format == "swe-agent-trajectory"
    assert regions(trace) == [
        ("system", ["system"]),
        ("user", ["user"]),
        ("assistant", ["scratchpad", "tool_in"]),
        ("user", ["tool_out"]),
        ("assistant", ["scratchpad", "tool_in"]),
        ("tool", ["tool_out"]),
        ("assistant", ["scratchpad", "tool_in"]),
    ]


def test_mini_swe_agent(tmp_path):
    value = {
        "trajectory_format": "mini-swe-agent-1.1",
        "info": {},
        "messages": [
            {"role": "user", "content": "q", "extra": {"x": 1}},
            {"role": "exit", "content": "done", "extra": {}},
        ],
    }
    trace = load_trace(write(tmp_path, value, "x.traj.json"))
    assert trace.messages == [{"role": "user", "content": "q"}]
    assert trace.format == "mini-swe-agent"
    assert "exit record" in trace.notes[0]


BROKEN = {
    "empty": ("", "is empty"),
    "blank": (" \n", "is empty"),
    "no JSON": ("hello", "is not JSON"),
    "cut off": ('[{"role": "user"', "is not JSON"),
    "line 2": ('{"role": "user", "content": "x"}\n{oops', "line 2 is not JSON"),
    "number": ("3", "3 is no trace"),
    "empty list": ("[]", "messages is empty"),
    "empty messages": ('{"messages": []}', "messages is empty"),
    "empty mapping": ("{}", "no fields"),
    "other mapping": ('{"a": 1, "b": 2}', "a mapping with a, b is no trace"),
    "numbers": ("[1, 2]", "Message 0 is 1"),
    "wrong role": ('[{"role": "robot", "content": "x"}]', "Message 0 has role 'robot'"),
    "neither": ('[{"role": "user"}]', "neither content nor tool_calls"),
    "history of numbers": ('{"history": [1]}', "Message 0 is 1"),
    "steps of numbers": ('{"trajectory": [1]}', "step 0 of trajectory is 1"),
    "no steps": ('{"trajectory": []}', "messages is empty"),
    "tools no list": ('{"messages": [{"role": "user", "content": "x"}], "tools": 3}', "tools is a"),
    "surrogate": ('[{"role": "user", "content": "\\ud800"}]', "lone surrogate"),
    "deep": ("[" * 100_000 + "]" * 100_000, "nested too deeply"),
    "deep line": ('{"role": "user", "content": "x"}\n' + "[" * 100_000, "nested too deeply"),
}


@pytest.mark.parametrize(("text", "says"), BROKEN.values(), ids=BROKEN.keys())
def test_broken_files(tmp_path, text, says):
    path = write(tmp_path, text)
    with pytest.raises(TraceError) as caught:
        load_trace(path)
    message = str(caught.value)
    assert says in message
    assert message.startswith(str(path)) and message.endswith(".") and "\n" not in message


def test_files_that_cannot_be_read(tmp_path):
    binary = tmp_path / "b.json"
    binary.write_bytes(bytes(range(256)))
    for path, says in [
        (tmp_path / "missing.json", "cannot be read"),
        (tmp_path, "cannot be read"),
        (binary, "is not text"),
        ("a\0b", "cannot be read"),
    ]:
        with pytest.raises(TraceError, match=says):
            load_trace(path)


# Reports.


def test_report(tmp_path):
    trace = load_trace(write(tmp_path, {"id": "x", "messages": MESSAGES, "tools": TOOLS}))
    tokenizer = make_tokenizer("qwen")
    report = label_trace(trace, tokenizer, retrievers=["search"])
    whole = Conversation(tokenizer, tools=TOOLS, retrievers=["search"]).append(MESSAGES)
    assert report.total == sum(s.tokens for s in report.spans) == len(whole.ids)
    assert report.tokens["retrieval"] == whole.regions.count("retrieval") > 0
    assert sum(report.share.values()) == pytest.approx(1)
    assert [(s.message, s.role, s.region) for s in report.spans] == [
        (0, "system", "system"),
        (0, "system", "system"),
        (1, "user", "user"),
        (2, "assistant", "tool_in"),
        (3, "tool", "retrieval"),
    ]
    assert report.spans[2].preview == "<|im_start|>user q<|im_end|>"
    plain = json.loads(json.dumps(report.to_dict()))
    assert {"message", "region", "tokens", "source"} <= set(plain["spans"][0])
    assert plain["tokens"] == report.tokens
    assert plain["ambiguous"] == 0


def test_all_shared_traces_load_and_label(traces):
    assert len(traces) == 20
    tokenizers = [make_tokenizer(name) for name in ("qwen", "smol", "thinking")]
    for path in traces:
        trace = load_trace(path)
        assert trace.id == path.stem
        assert trace.messages and trace.source
        for tokenizer in tokenizers:
            report = label_trace(trace, tokenizer, retrievers=["search", "Search", "visit"])
            assert {s.message for s in report.spans} == set(range(len(trace.messages)))
            by_role = {(s.role, s.region) for s in report.spans}
            assert by_role <= {
                ("system", "system"),
                ("user", "system"),
                ("user", "user"),
                ("assistant", "tool_in"),
                ("assistant", "scratchpad"),
                ("assistant", "user"),
                ("assistant", "plan"),
                ("tool", "tool_out"),
                ("tool", "retrieval"),
            }
            if trace.id == "intercode_bash_plan_027":
                assert report.tokens["plan"] > 100
            if trace.id.startswith("webdancer"):
                assert report.tokens["retrieval"] > report.total / 2
            if any(m.get("tool_calls") for m in trace.messages):
                assert report.tokens["tool_in"] > 0
