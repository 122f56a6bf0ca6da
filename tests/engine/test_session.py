"""Sessions: labelled, exact, within the budget, turn after turn."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import textwrap
import threading

import pytest
import torch

from engine.families import CONFIGS
from engine.helpers import Record, kept, same, snapshot
from engine.sessions import (
    NEVER,
    assistant,
    full_logits,
    saying,
    session,
    stock_answer,
    system,
    talk,
    tiny,
    user,
    words,
)
from memdecay import Profile, RegionPolicy, Session, SessionError, TraceError
from memdecay.policy import DEFAULT_POLICY, available, get_policy, policy_config

TEMPLATES = ("chatml", "smol", "qwen", "thinking", "llama3", "mistral", "gemma", "phi", "deepseek")
REGIONS = ("scratchpad", "tool_in")
NO_PROMPT = ("mistral", "parts", "by_index")


# Exact


@pytest.mark.parametrize("chunk", [1, 7, 256])
@pytest.mark.parametrize("name", CONFIGS)
def test_without_eviction_logits_and_text_are_those_of_stock_transformers(name, chunk):
    made = session(name, prefill_chunk=chunk)
    record = Record(made.model, made.cache)
    made.append([system(), user(12)])
    for turn in range(3):
        expected = stock_answer(made, 9)
        assert made.generate(max_new_tokens=9).ids == expected
        made.append([user(7, seed=turn), assistant(5, turn), user(3, turn)])
    assert record.worst(0) < 1e-4
    assert record.ids[0] == made._ids and len(made._ids) == made.cache.seen
    assert made.report().evicted_tokens == 0 or name == "mistral_sliding"  # left all windows


@pytest.mark.parametrize("align", [None, "region"])
@pytest.mark.parametrize("name", CONFIGS)
def test_with_evictions_logits_are_those_of_the_masked_oracle(name, align):
    made = session(name, budget=56, align=align, prefill_chunk=11)
    record = Record(made.model, made.cache)
    made.append([system(3), user(30)])
    for turn in range(3):
        made.generate(max_new_tokens=10)
        made.append([user(9, seed=turn), assistant(15, turn), user(3, turn)])
    assert made.report().evicted_tokens > 100
    assert record.worst(0) < 1e-4
    assert record.ids[0] == made._ids


@pytest.mark.parametrize("policy", [name for name in available() if name != "full"])
def test_every_policy_is_exact_and_within_the_budget(policy):
    made = session(budget=48, policy=policy, clock="tokens", observe_every=3)
    record = Record(made.model, made.cache)
    made.append([system(3), user(30)])
    for turn in range(3):
        made.generate(max_new_tokens=10)
        made.append([user(9, seed=turn)])
    assert record.worst(0) < 1e-4
    assert 0 < made.report().kept_tokens <= made.report().peak_resident_tokens <= 48


@pytest.mark.parametrize("template", NO_PROMPT)
def test_templates_without_a_generation_prompt_answer_as_stock_transformers(template):
    made = session(template=template)
    twin = session(template=template, budget=None, observe_every=0)
    for turn in range(3):
        for one in (made, twin):
            one.append([user(9, seed=turn)])
        assert made.conversation.generation_prompt().ids == []
        steps = made.cache.steps
        expected = stock_answer(made, 6)
        written = made.generate(max_new_tokens=6).ids
        assert written == twin.generate(max_new_tokens=6).ids == expected
        assert made.cache.steps == steps + 1 + len(written)
    logits = full_logits(made.model, made._ids)
    assert torch.allclose(logits[-1], made._last_logits, atol=1e-4)


def test_a_session_continues_where_a_closed_answer_ended():
    made = session()
    made.append([user()])
    made.generate(**saying(made, "Oslo"))  # cut off: the model did not end its turn
    written = made.append([user(3)])
    text = made.tokenizer.decode(made._ids)
    assert "assistant\nOslo<|im_end|>\n<|im_start|>user" in text
    assert [span.message for span in written.spans] == [1, 2]


def test_sampling_lookup_and_stop_strings_pass_through():
    made = session()
    made.append([user(20)])
    twin = made.fork()
    torch.manual_seed(3)
    one = made.generate(max_new_tokens=12, do_sample=True, top_k=9)
    torch.manual_seed(3)
    assert twin.generate(max_new_tokens=12, do_sample=True, top_k=9).ids == one.ids
    made.append([user(2)])
    greedy = stock_answer(made, 12)
    assert made.generate(max_new_tokens=12, prompt_lookup_num_tokens=3).ids == greedy
    assert len(made._ids) == made.cache.seen
    assert torch.allclose(full_logits(made.model, made._ids)[-1], made._last_logits, atol=1e-4)
    made.append([user(2)])
    forced = {**saying(made, "book it. Then search"), "max_new_tokens": 5}
    stopped = made.generate(stop="it.", **forced)
    assert stopped.text == "book it." and stopped.finish_reason == "stop"


def test_the_answer_ends_where_the_template_ends_a_turn():
    made = session()
    made.append([user()])
    answer = made.generate(**{**saying(made, "Oslo<|im_end|>\n\n"), "max_new_tokens": 9})
    assert answer.text == "Oslo" and answer.finish_reason == "stop"
    assert made.tokenizer.decode(answer.ids) == "Oslo<|im_end|>"
    made.append([user()])
    cut = made.generate(max_new_tokens=1)
    assert cut.finish_reason == "length" or cut.ids[-1] in made._ends()


def test_own_end_tokens_and_stopping_criteria():
    made = session()
    made.append([user()])
    end = made.tokenizer(".", add_special_tokens=False)["input_ids"][0]
    forced = {**saying(made, "Oslo. Then"), "max_new_tokens": 6}
    assert made.generate(eos_token_id=end, **forced).text == "Oslo."
    made.append([user()])
    stop = lambda ids, scores, **_: torch.tensor([True])  # noqa: E731
    assert len(made.generate(max_new_tokens=9, stopping_criteria=[stop]).ids) == 1


# Labels


def test_labels_follow_the_messages():
    made = session("llama", "qwen")
    result = made.append(talk())
    report = made.report()
    expected: dict[str, int] = dict.fromkeys(made.cache.profile.names, 0)
    for span in result.spans:
        expected[span.region] += span.end - span.start
    assert report.seen_by_region == report.kept_by_region == expected
    assert all(expected[name] for name in ("system", "plan", "user", "tool_in", "tool_out"))
    assert result.tokens == report.seen_tokens == sum(expected.values())


def test_generated_text_is_relabelled_once_it_is_known_what_it_is():
    made = session("llama", "qwen")
    made.append([user()])
    before = made.report().seen_by_region
    text = 'Let me see.<tool_call>{"name": "search", "arguments": {"query": "Oslo"}}</tool_call>'
    answer = made.generate(**saying(made, text))
    assert answer.message["tool_calls"][0]["function"]["name"] == "search"
    report = made.report()
    assert report.seen_by_region["tool_in"] > 5 and report.seen_by_region["scratchpad"] > 5
    assert report.seen_by_region == report.kept_by_region
    assert report.seen_by_region["user"] == before["user"]
    made.append([{"role": "tool", "tool_call_id": "call00001", "content": words(9)}])
    made.generate(**saying(made, "It is Oslo."))
    assert made.report().seen_by_region["user"] > before["user"]
    spans = made.cache.ledgers[0]["span"]
    order = made.cache.ledgers[0]["position"].argsort()
    assert bool((spans[order].diff() >= 0).all())
    assert made.pin(message=1) == sum(made.report().kept_by_region.values()) - int(
        (~torch.isin(spans, torch.tensor(made._spans_of[1]))).sum()
    )


@pytest.mark.parametrize("template", ["qwen", "parts"])
def test_each_part_of_an_answer_is_a_span_of_its_own(template):
    made = session(template=template)
    made.append([user()])
    question = made.cache.seen
    text = 'So.<tool_call>{"name": "search", "arguments": {}}</tool_call>'
    made.generate(**saying(made, text))
    ledger = made.cache.ledgers[0]
    asked, answered = ledger["span"][:question], ledger["span"][question:]
    assert int(answered.min()) > int(asked.max())
    said, called = (ledger["region"][question:] == made.cache.profile.id(name) for name in REGIONS)
    assert not set(answered[said].tolist()) & set(answered[called].tolist())
    assert made.pin(message=0) == question


def test_the_end_of_an_answer_belongs_to_it_when_another_follows():
    made = session(template="qwen")
    made.append([user()])
    made.generate(**saying(made, "Oslo"))
    before, start = made.report().seen_by_region, made.cache.seen
    made.generate(**saying(made, '<tool_call>{"name": "f", "arguments": {}}</tool_call>'))
    closing = made.tokenizer("<|im_end|>\n", add_special_tokens=False)["input_ids"]
    assert made._ids[start : start + len(closing)] == closing
    after = made.report().seen_by_region
    assert after["user"] - before["user"] == len(closing)
    assert set(made._spans_of[1]) & set(made.cache.ledgers[0]["span"][start:].tolist())


def test_every_token_keeps_its_label_whatever_is_evicted():
    free, tight = session("llama", "qwen"), session("llama", "qwen", budget=60)
    for made in (free, tight):
        made.append(talk())
        made.generate(**saying(made, "Plan: book it."))
        made.append([user(12, 3)])
    known, found = (
        {
            position: (region, span)
            for position, region, span in zip(
                *(made.cache.ledgers[0][name].tolist() for name in ("position", "region", "span")),
                strict=True,
            )
        }
        for made in (free, tight)
    )
    assert len(found) < len(known)
    assert found.items() <= known.items()
    assert tight.report().seen_by_region == free.report().seen_by_region


def test_explicit_regions_and_the_users_own():
    profile = Profile.default().with_region("policy_text", RegionPolicy(0.9, 0.01))
    made = session(profile=profile)
    made.append([user(9, region="policy_text"), user(4)])
    seen = made.report().seen_by_region
    assert seen["policy_text"] > seen["user"] > 0


def test_parallel_tool_results_in_one_append():
    for template in ("qwen", "chatml", "deepseek"):
        made = session("llama", template)
        calls = [
            {"id": f"abc12{n}xyz", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            for n in range(2)
        ]
        made.append([user(), {"role": "assistant", "content": None, "tool_calls": calls}])
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": f"result number {n}"}
            for n, call in enumerate(calls)
        ]
        done = made.append(results)
        assert {span.message for span in done.spans if span.region == "tool_out"} == {2, 3}
        text = made.tokenizer.decode(made._ids)
        assert text.index("number 0") < text.index("number 1")
        made.generate(max_new_tokens=3)


# The budget


def test_the_budget_holds_in_a_long_conversation():
    made = session(budget=96, page_size=8, align="region", record_timeline=True)
    rng = random.Random(5)
    most = []
    made.model.get_decoder().register_forward_hook(lambda *_: most.append(made.cache.kept()))
    made.append([system()])
    for turn in range(40):
        made.append([user(rng.randint(1, 60), turn)])
        if rng.random() < 0.5:
            made.generate(max_new_tokens=rng.randint(1, 20))
        elif rng.random() < 0.5:
            made.append([assistant(rng.randint(1, 30), turn)], score=True)
        report = made.report()
        assert report.kept_tokens <= report.peak_resident_tokens <= 96
        assert sum(report.seen_by_region.values()) == report.seen_tokens == len(made._ids)
        assert sum(report.kept_by_region.values()) == report.kept_tokens
        assert report.kept_by_region["system"] == report.seen_by_region["system"]
        assert report.seen_tokens - report.kept_tokens == report.evicted_tokens
    assert max(most) <= 96 and made.cache.seen > 1500
    bytes_per_token = 4 * 2 * 2 * 16 * 4  # layers, keys and values, KV heads, head_dim, float32
    assert report.kv_bytes == 96 * bytes_per_token == report.peak_kv_bytes


def test_a_pinned_system_text_survives_a_prompt_of_twenty_budgets():
    made = session(budget=64, page_size=8)
    made.append([system(10)])
    system_tokens = made.report().seen_tokens
    made.append([user(900)])
    report = made.report()
    assert report.seen_tokens > 20 * 64 and report.peak_resident_tokens <= 64
    assert report.kept_by_region["system"] == system_tokens
    assert set(range(system_tokens)) <= set(kept(made.cache))


def test_nothing_grows_but_the_conversation():
    made = session(budget=64)

    def sizes():
        cache = made.cache
        tensors = [
            t for ledger in cache.ledgers for t in (*ledger.columns.values(), ledger.queries)
        ]
        tensors += [table.index for table in cache.tables] + [pool.kv for pool in cache.pools]
        tensors += [*cache._slabs.values(), made._last_logits]
        lists = [cache._labels, cache._padding, *cache._labels, *cache._padding]
        lists += [ledger.starts for ledger in cache.ledgers]
        return sum(t.numel() for t in tensors), sum(map(len, lists))

    def turn(number):
        made.append([user(20, number)])
        made.generate(max_new_tokens=4)

    for number in range(4):
        turn(number)
    before = sizes()
    for number in range(30):
        turn(number)
    assert sizes() == before
    grows = {
        name
        for name, value in vars(made).items()
        if isinstance(value, (list, dict, set)) and len(value) > 20
    }
    assert grows <= {"_ids", "_spans_of", "_empty"}


# Asking, forking, resetting


def test_ask_leaves_no_trace():
    made = session(budget=64)
    made.append([system(), user(40)])
    made.generate(max_new_tokens=5)
    before, report = snapshot(made.cache), made.report()
    messages = made.conversation.state_dict()
    first = made.ask(words(30, 9), max_new_tokens=8)
    assert made.ask(words(30, 9), max_new_tokens=8) == first
    assert same(before, snapshot(made.cache)) and made.report() == report
    assert made.conversation.state_dict() == messages


def test_a_fork_and_its_origin_go_separate_ways():
    made = session(budget=64, record_timeline=True)
    made.append([system(), user(40)])
    other, alone = made.fork(), made.fork()
    made.append([user(30, 7)])
    made.generate(max_new_tokens=6)
    assert other.report() == alone.report() != made.report()
    other.append([user(5, 8)])
    alone.append([user(5, 8)])
    assert other.generate(max_new_tokens=9) == alone.generate(max_new_tokens=9)
    assert same(snapshot(other.cache), snapshot(alone.cache))
    with pytest.raises(SessionError, match="timeline was not recorded"):
        other.timeline()


def test_reset_makes_a_session_as_new():
    made, fresh = (session(budget=64, record_timeline=True) for _ in range(2))
    made.append([system(), user(40)])
    made.generate(max_new_tokens=5)
    made.pin(region="tool_out")
    made.reset()
    assert made.cache.nbytes == 0 and made.conversation.messages == []
    for one in (made, fresh):
        one.append([system(4), user(50, 2)])
        one.generate(max_new_tokens=6)
    assert same(snapshot(made.cache), snapshot(fresh.cache))
    assert made.report() == fresh.report() and made.timeline() == fresh.timeline()


def test_the_context_manager_frees_the_cache_and_leaves_the_model_alone():
    model, tokenizer = tiny()
    own = model.config._attn_implementation
    with Session(model, tokenizer, budget=64, page_size=4) as made:
        made.append([user(40)])
        assert made.cache.nbytes > 0
    assert made.cache.nbytes == 0 and made.cache.seen == 0
    assert model.config._attn_implementation == own
    with pytest.raises(RuntimeError, match="mine"), Session(model, tokenizer, budget=64) as made:
        raise RuntimeError("mine")


# Streams, interleaved sessions, threads


def test_a_stream_writes_what_generate_writes():
    made = session(budget=64)
    made.append([user(30)])
    twin = made.fork()
    pieces = list(made.stream(max_new_tokens=12))
    answer = twin.generate(max_new_tokens=12)
    assert "".join(pieces) == answer.text and len(pieces) > 1
    assert same(snapshot(made.cache), snapshot(twin.cache))
    assert made.conversation.messages == twin.conversation.messages


def test_a_stream_closed_early_keeps_what_was_written():
    made = session()
    made.append([user(30)])
    stream = made.stream(max_new_tokens=400, eos_token_id=NEVER)
    next(stream)
    stream.close()
    answer = made.conversation.messages[-1]
    assert answer["role"] == "assistant" and made.report().seen_tokens < 400
    assert len(made._ids) == made.cache.seen
    made.append([user()])
    assert torch.allclose(full_logits(made.model, made._ids)[-1], made._last_logits, atol=1e-4)


def test_a_session_with_an_open_stream_can_do_nothing_else():
    made = session()
    made.append([user()])
    stream = made.stream(max_new_tokens=200, eos_token_id=NEVER)
    next(stream)
    for use in (
        lambda: made.append([user()]),
        lambda: made.generate(max_new_tokens=1),
        lambda: next(made.stream(max_new_tokens=1)),
        lambda: made.ask("x"),
        lambda: made.pin(region="user"),
        lambda: made.release(region="user"),
        made.report,
        made.fork,
        made.reset,
        lambda: made.save("nowhere"),
    ):
        with pytest.raises(SessionError, match="session is in use"):
            use()
    stream.close()
    made.report()
    stream = made.stream(max_new_tokens=2000, eos_token_id=NEVER)
    next(stream)
    made.close()
    assert made.cache.nbytes == 0


def test_two_sessions_interleaved_by_token_equal_each_alone():
    model, tokenizer = tiny()

    def start(seed):
        made = Session(model, tokenizer, budget=64, page_size=4)
        made.append([system(), user(40 + seed, seed)])
        return made

    alone = [start(seed) for seed in (1, 2)]
    expected = ["".join(one.stream(max_new_tokens=20)) for one in alone]
    pair = [start(seed) for seed in (1, 2)]
    streams = [one.stream(max_new_tokens=20) for one in pair]
    texts = ["", ""]
    for _ in range(30):
        for number, stream in enumerate(streams):
            texts[number] += next(stream, "")
    assert texts == expected
    for one, other in zip(alone, pair, strict=True):
        assert same(snapshot(one.cache), snapshot(other.cache)) and one.report() == other.report()


def test_two_sessions_in_two_threads_equal_each_alone():
    model, tokenizer = tiny("gemma3")

    def run(seed, out):
        made = Session(model, tokenizer, budget=64, page_size=4)
        for turn in range(4):
            made.append([user(30 + seed, seed + turn)])
            out.append(made.generate(max_new_tokens=8).ids)
        out.append(kept(made.cache))

    expected, actual = [[], []], [[], []]
    for seed in range(2):
        run(seed, expected[seed])
    threads = [threading.Thread(target=run, args=(seed, actual[seed])) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert actual == expected


# Bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"max_new_tokens": True}, "max_new_tokens is True"),
        ({"max_new_tokens": 2.0}, "max_new_tokens is 2.0"),
        ({"stop": ""}, "stop is ''"),
        ({"stop": ["a", 3]}, "stop is"),
        ({"num_beams": 2}, "num_beams is 2"),
        ({"num_return_sequences": 3}, "num_return_sequences is 3"),
        ({"past_key_values": None}, "past_key_values is set by the session"),
        ({"attention_mask": None}, "attention_mask is set by the session"),
        ({"return_dict_in_generate": True}, "return_dict_in_generate is set by the session"),
    ],
)
def test_options_that_a_session_refuses(options, message):
    made = session()
    made.append([user()])
    before = made.report()
    for use in (made.generate, made.stream):
        with pytest.raises(SessionError, match=message):
            use(**options)
    assert made.report() == before


@pytest.mark.parametrize("chunk", [0, -1, 1.5, True, None])
def test_prefill_chunk_is_checked(chunk):
    with pytest.raises(SessionError, match="prefill_chunk is"):
        session(prefill_chunk=chunk)


def test_answering_nothing_is_refused():
    for template in ("chatml", "mistral"):
        made = session(template=template)
        with pytest.raises(TraceError, match="no message yet"):
            made.generate()
        with pytest.raises(TraceError, match="no message yet"):
            next(made.stream())
        made.append([user()])


def test_a_refusing_template_changes_nothing():
    made = session(template="mistral")
    made.append([user(9)])
    before, messages = snapshot(made.cache), made.conversation.messages
    with pytest.raises(TraceError, match="must alternate"):
        made.append([user(3)])
    with pytest.raises(TraceError, match="has role"):
        made.append([assistant(), {"role": "nobody", "content": "x"}])
    assert same(before, snapshot(made.cache)) and made.conversation.messages == messages
    made.append([assistant(), user()])


# The package


def test_the_report_is_plain_json():
    made = session(budget=64)
    made.append([user(40)])
    said = made.report().to_dict()
    assert json.loads(json.dumps(said)) == said
    assert said["model"] == "LlamaForCausalLM"
    assert said["policy"] == policy_config(get_policy(DEFAULT_POLICY))
    assert made.report().notes == []


def test_positions_beyond_the_training_are_said_aloud():
    made = session(budget=64)
    made.append([user(700)])
    assert made.cache.seen > 1024
    assert any("trained for positions up to 1024" in note for note in made.report().notes)


def test_importing_memdecay_loads_neither_transformers_nor_a_server():
    code = """
        import sys, memdecay
        heavy = {"transformers", "fastapi", "uvicorn", "starlette", "flask", "aiohttp", "typer"}
        print(sorted(heavy & set(sys.modules)), memdecay.Session.__name__,
              sorted(set(memdecay.__all__) - set(dir(memdecay))))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split("]")[0] == "["
    assert "Session" in done.stdout


def test_the_example_in_the_docstring_runs(capsys):
    model, tokenizer = tiny()
    block = (Session.__doc__ or "").split("\n\n")[1]
    code = textwrap.dedent(block).replace("max_new_tokens=64", "max_new_tokens=4")
    names = {"Session": Session, "model": model, "tokenizer": tokenizer}
    exec(code, names)
    assert len(names["session"].conversation.messages) == 3
    assert capsys.readouterr().out == names["session"].conversation.messages[-1]["content"] + "\n"


def test_a_policy_object_is_taken_as_it_is():
    policy = get_policy("random", seed=7)
    made = session(budget=48, policy=policy)
    made.append([user(40)])
    assert made.cache.policy is policy
    assert made.report().policy.items() >= {"name": "random", "seed": 7}.items()
