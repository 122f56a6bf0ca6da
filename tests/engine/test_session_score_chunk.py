"""Scored tokens that are read several by one forward: exact logits, the clock and observations."""

from __future__ import annotations

import pytest
import torch

from engine.families import CONFIGS, oracle
from engine.helpers import same
from engine.sessions import assistant, content, failing, session, system, user
from engine.test_session_failures import goes_on, state
from engine.test_session_scores import check
from memdecay import SessionError
from memdecay.engine.report import Scores

TALK = (system(), user(9, 1), assistant(23, 2), user(3, 3), assistant(40, 4))


def scored(made, chunk) -> Scores:
    scores = made.append(TALK, score=True, score_chunk=chunk).scores
    assert scores is not None
    return scores


def forwards(made):
    """The number of tokens of every forward from now on."""
    counts = []

    def ran(module, args, kwargs, out):
        if kwargs.get("cache") is made.cache:
            counts.append(kwargs["input_ids"].shape[1])

    made.model.register_forward_hook(ran, with_kwargs=True)
    return counts


@pytest.mark.parametrize("chunk", [2, 7, 32])
@pytest.mark.parametrize("name", CONFIGS)
def test_with_nothing_evicted_scores_are_those_of_decode_steps(name, chunk):
    made, one = session(name, policy="h2o"), session(name, policy="h2o")
    counts = forwards(made)
    scores, expected = scored(made, chunk), scored(one, 1)
    for field in ("position", "message", "target", "top1"):
        assert torch.equal(getattr(scores, field), getattr(expected, field))
    assert torch.allclose(scores.nll, expected.nll, atol=1e-4)
    check(made, scores)
    targets = len(scores.position)
    assert sum(counts) == made.cache.seen and chunk in counts and len(counts) < targets
    assert made.report().steps == one.report().steps == targets
    least = min(made.cache.kept(), one.cache.kept())  # sliding layers let go of old ones in runs
    for column in ("position", "inserted_at", "page", "region"):
        of = [session.cache.ledgers[0][column][-least:] for session in (made, one)]
        assert torch.equal(*of)


def test_one_by_one_is_what_it_was():
    made, plain = session(budget=48, policy="h2o"), session(budget=48, policy="h2o")
    counts = forwards(made)
    made.append(TALK, score=True, score_chunk=1)
    plain.append(TALK, score=True)
    assert same(content(made), content(plain)) and set(counts) >= {1}
    other = session(budget=48, policy="h2o")
    other.append(TALK, score=True, score_chunk=8)
    assert not same(content(made), content(other))


@pytest.mark.parametrize("chunk", [4, 24])
def test_a_chunk_is_one_observation_of_its_last_queries_after_its_steps(chunk):
    seen = {}
    for count in (1, chunk):
        made = session(policy="h2o", window=8)
        seen[count] = []
        made.cache.on_observe = lambda row, mass, _, one=made, to=seen[count]: to.append(
            (one.cache.now, mass.clone())
        )
        made.append([system(), user(9, 1), assistant(60, 2)], score=True, score_chunk=count)
    prompt, *steps = seen[1]
    first, *chunks = seen[chunk]
    assert prompt[0] == first[0] == 0.0 and torch.allclose(prompt[1], first[1], atol=1e-6)
    # What is left at the end is shorter: as long as it has two tokens it is a chunk too.
    whole = len(steps) // chunk
    assert [now for now, _ in chunks[:whole]] == [float(chunk * (n + 1)) for n in range(whole)]
    assert chunks[-1][0] == float(len(steps))
    for number, (_, mass) in enumerate(chunks[:whole]):
        part = steps[chunk * number : chunk * (number + 1)][-8:]
        padded = [torch.nn.functional.pad(one, (0, len(mass) - len(one))) for _, one in part]
        assert torch.allclose(mass, torch.stack(padded).mean(0), atol=1e-6)


@pytest.mark.parametrize("policy", ["memdecay-paper", "h2o", "streaming"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral_sliding"])
def test_the_budget_holds_inside_every_forward_and_scores_are_the_oracle_s(name, policy):
    made = session(name, budget=64, policy=policy)
    events, inside = [], []
    made.cache.on_evict = lambda what: events.append((made.cache.seen, what.position.tolist()))
    for layer in made.model.get_decoder().layers:
        layer.register_forward_pre_hook(lambda *_: inside.append(made.cache.kept()))
    scores = scored(made, 16)
    assert events and max(inside) <= 64 and made.report().peak_resident_tokens <= 64
    said = torch.log_softmax(oracle(made.model, torch.tensor([made._ids]), events), -1)
    said = said[scores.position - 1]
    assert torch.allclose(scores.nll, -said.gather(1, scores.target[:, None])[:, 0], atol=1e-4)


def test_a_chunk_is_no_larger_than_what_pins_leave():
    made = session(budget=32, policy="streaming")
    made.append([user(9)], pin=True)
    held = made.report().pinned_tokens
    counts = forwards(made)
    made.append([assistant(60, 2)], score=True, score_chunk=32)
    assert made.report().peak_resident_tokens <= 32
    assert held > 8 and max(counts) <= 32 - held


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize(
    "options",
    [{}, {"align": "region", "clock": "tokens"}, {"budget": 400, "record_timeline": True}],
    ids=["free", "aligned", "budget"],
)
def test_a_failure_in_any_chunk_never_happened(options, error):
    made = session(**options)
    made.append([system(), user(20)])
    made.append([assistant(9, 3), user(5)], score=True, score_chunk=8)
    twin, before, cache = made.fork(), state(made), content(made)
    timeline = made.timeline() if options.get("record_timeline") else None
    for at in (0, 1, 2, 5):
        with failing(made.model, at, error), pytest.raises(error, match="on purpose"):
            made.append([assistant(60, 4)], score=True, score_chunk=8)
        assert state(made) == before and same(cache, content(made))
        if timeline is not None:
            assert made.timeline() == timeline
    goes_on(made, twin)


def test_the_timeline_has_one_decode_a_chunk():
    made = session(policy="h2o", record_timeline=True)
    scores = scored(made, 16)
    kinds = [event["kind"] for event in made.timeline()["events"]]
    runs = [int((scores.message == message).sum()) for message in scores.message.unique()]
    assert kinds.count("decode") == sum(-(-count // 16) for count in runs)


def test_a_chunk_leaves_no_trace_on_later_forwards():
    made = session(template="llama3")  # which writes nothing after the end of an answer
    made.append(TALK, score=True, score_chunk=8)
    assert not made.cache.stepping and not made.cache.prefilling
    with failing(made.model, 2, RuntimeError), pytest.raises(RuntimeError):
        made.append([assistant(40, 5)], score=True, score_chunk=8)
    assert not made.cache.stepping and not made.cache.prefilling


@pytest.mark.parametrize("chunk", [0, -1, True, 2.0, "4", None])
def test_what_is_no_chunk_is_refused(chunk):
    made = session()
    before = state(made)
    with pytest.raises(SessionError, match=r"score_chunk is .* must be an integer of at least 1"):
        made.append(TALK, score=True, score_chunk=chunk)
    assert state(made) == before
