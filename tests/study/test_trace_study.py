"""Traces × policies × budgets: what a row says, what goes on where, what is refused, the report."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from torch import Tensor

from engine.sessions import assistant, system, user, words
from memdecay.calibration.player import Script
from memdecay.engine import Session, known
from memdecay.engine.known import Known, shape_of
from memdecay.errors import StudyError
from memdecay.evidence import READ, EvidenceHead
from memdecay.policy import Policy, get_policy
from memdecay.policy.base import Tokens
from memdecay.regions import Profile
from memdecay.study import trace_play, workers
from memdecay.study.rows import write_rows
from memdecay.study.run import Advance
from memdecay.study.trace_play import TraceRun, TraceTask
from memdecay.study.trace_report import FIELDS, cells, cells_json, document, gather
from memdecay.study.traces import TRACE_SCHEMA, run_traces
from memdecay.study.workers import Here
from study.study_tiny import small

MODEL = "llama"
RUN = TraceRun(model="tiny", model_name="tiny", dtype="float32", score_chunk=4)
POLICIES = (get_policy("streaming"), get_policy("h2o"))
BUDGETS = (0.5, 0.25)
PINNED_USER = Profile.default().with_region("user", Profile.default().regions["system"])


def tool(count: int, seed: int) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "a", "content": words(count, seed)}


def calling(seed: int) -> dict[str, Any]:
    call = {"name": "search", "arguments": '{"query": "Oslo"}'}
    asks = {"id": "a", "type": "function", "function": call}
    return {**assistant(9, seed), "tool_calls": [asks]}


def script(name: str, seed: int) -> Script:
    """A trace of four turns: an answer, a call, its result with an answer, one more."""
    stages = (
        (system(3), user(40, seed), assistant(12, seed + 1)),
        (user(9, seed + 2), calling(seed + 3)),
        (tool(50, seed + 4), assistant(15, seed + 5)),
        (user(20, seed + 6), assistant(20, seed + 7)),
    )
    return Script(name=name, cluster=name, stages=stages)


SCRIPTS = (script("mill", 10), script("ferry", 30))


@pytest.fixture(scope="module", autouse=True)
def tiny_model() -> Iterator[None]:
    """A tiny model for every name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "_model", lambda name, dtype: small(MODEL))
        yield


class StoppedError(BaseException):
    """What ends a run in these tests; as a Ctrl-C, it is no Exception."""


class Counted(Here):
    """Notes tasks, and is interrupted after some of them."""

    def __init__(self, until: int | None = None) -> None:
        self.until, self.tasks = until, []

    def results(
        self, tasks: Sequence[TraceTask], advance: Advance
    ) -> Iterator[tuple[TraceTask, Any]]:
        for task in tasks:
            if task.kind == "trace" and len(self.done) == self.until:
                raise StoppedError
            self.tasks.append(task)
            yield from super().results([task], advance)

    @property
    def done(self) -> list[tuple[str, str, float]]:
        told = [task for task in self.tasks if task.kind == "trace"]
        return [(task.script.name, task.policy.name, task.share) for task in told]


def go(
    folder: Path,
    run: TraceRun = RUN,
    scripts: Sequence[Script] = SCRIPTS,
    policies: Sequence[Policy] = POLICIES,
    budgets: Sequence[float] = BUDGETS,
    until: int | None = None,
) -> Counted:
    counted = Counted(until)
    run_traces(run, scripts, policies, budgets, folder, counted)
    return counted


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nobody interrupted; tests do not write to it."""
    folder = tmp_path_factory.mktemp("whole")
    go(folder)
    return folder


def literal(one: Script, policy: Policy, budget: int | None) -> tuple[list[Any], int]:
    """The scores of a trace in a session, and its peak."""
    model, tokenizer = small(MODEL)
    with Session(model, tokenizer, budget=budget, policy=policy) as session:
        found = [session.append(part, score=True, score_chunk=4).scores for part in one.stages]
        return [scores for scores in found if scores], session.report().peak_resident_tokens


def joined(scores: Sequence[Any], name: str) -> np.ndarray[Any, Any]:
    return np.concatenate([getattr(one, name).numpy() for one in scores]).astype(float)


class TestRows:
    def test_one_row_a_trace_policy_and_budget_and_the_full_cache(self, whole: Path) -> None:
        rows = gather(whole)
        assert {path.stem for path in whole.glob("rows/*")} == {"mill", "ferry"}
        counts = rows.groupby(["policy", "budget"]).size().to_dict()
        cells_ = [(name, share) for name in ("streaming", "h2o") for share in BUDGETS]
        assert counts == {("full", 1.0): 2, **dict.fromkeys(cells_, 2)}

    def test_what_a_row_says(self, whole: Path) -> None:
        for row in gather(whole).to_dict("records"):
            one = next(one for one in SCRIPTS if one.name == row["trace"])
            full, seen = literal(one, get_policy("full"), None)
            budget = None if row["policy"] == "full" else math.floor(row["budget"] * seen)
            scores, peak = literal(one, get_policy(row["policy"]), budget)
            delta = joined(scores, "nll") - joined(full, "nll")
            assert row["tokens"] == seen and row["scored_tokens"] == len(delta) > 60
            assert row["nll"] == pytest.approx(joined(scores, "nll").mean(), abs=1e-6)
            assert row["full_nll"] == pytest.approx(joined(full, "nll").mean(), abs=1e-6)
            assert row["delta_nll"] == pytest.approx(delta.mean(), abs=1e-6)
            same = joined(scores, "top1") == joined(full, "top1")
            assert row["top1_agreement"] == pytest.approx(same.mean())
            assert row["peak_resident_tokens"] == peak
            if budget is not None:
                assert row["budget_tokens"] == budget and peak <= budget < seen
                assert row["delta_nll"] != 0 and row["evicted_tokens"] > 0
            assert (row["model"], row["dtype"], row["refused"]) == ("tiny", "float32", "")
            assert row["score_chunk"] == 4 and row["idle_s"] == 0 and row["past_trained"] == 0
            assert json.loads(row["settings"]) == RUN.settings()
            assert json.loads(row["policy_config"])["name"] == row["policy"]
            assert "torch" in json.loads(row["versions"]) and len(row["date"]) == 10

    def test_no_text_of_a_trace_is_written(self, whole: Path) -> None:
        said = {
            word
            for one in SCRIPTS
            for stage in one.stages
            for message in stage
            for word in message["content"].split()
            if len(word) > 5
        }
        texts = [path.read_text("utf-8") for path in whole.glob("*.json")]
        texts += [json.dumps(pq.read_table(path).to_pylist()) for path in whole.glob("rows/*")]
        assert len(texts) == 3 and len(said) > 10
        assert not [word for word in said for text in texts if word in text]

    def test_traces_are_cut_before_the_turn_that_passes_the_limit(
        self, whole: Path, tmp_path: Path
    ) -> None:
        ends = json.loads((whole / "traces.json").read_text("utf-8"))["traces"]["mill"]["turn_ends"]
        run = replace(RUN, max_tokens=ends[2] - 1)
        notes = run_traces(run, SCRIPTS[:1], POLICIES[:1], [0.5], tmp_path, Here())
        assert set(gather(tmp_path)["tokens"]) == {ends[1]}
        assert notes == [f"mill: only the first 2 of 4 turns, {ends[1]} tokens."]
        with pytest.raises(StudyError, match=f"first turn of 'mill' has {ends[0]} tokens"):
            run_traces(replace(RUN, max_tokens=9), SCRIPTS, POLICIES, [0.5], tmp_path / "x", Here())

    def test_pins_that_do_not_fit_are_a_row_that_says_so(self, tmp_path: Path) -> None:
        long = replace(SCRIPTS[0], stages=((system(150), user(3)), *SCRIPTS[0].stages[1:]))
        both = (get_policy("memdecay-paper"), get_policy("streaming"))
        go(tmp_path, scripts=(long, SCRIPTS[1]), policies=both, budgets=(0.25,))
        rows = gather(tmp_path).set_index(["trace", "policy"])
        row = rows.loc["mill", "memdecay-paper"]
        assert "tokens are pinned" in row["refused"] and math.isnan(row["delta_nll"])
        assert (rows.drop(index=("mill", "memdecay-paper"))["refused"] == "").all()
        found = {cell["policy"]: cell for cell in cells(gather(tmp_path))}
        assert (found["memdecay-paper"]["n"], found["memdecay-paper"]["refused"]) == (1, 1)
        assert found["streaming"]["against"]["memdecay-paper"]["n"] == 1
        assert "- mill, `memdecay-paper` at 25%: budget is" in document("x", gather(tmp_path))
        assert go(tmp_path, scripts=(long, SCRIPTS[1]), policies=both, budgets=(0.25,)).done == []


@dataclass(frozen=True)
class Waiting(Policy):
    """As streaming, with a use for the time in which tools work."""

    name: ClassVar[str] = "waiting"
    summary: ClassVar[str] = "waits"
    needs: ClassVar[frozenset[str]] = frozenset({"replay"})

    def score(self, tokens: Tokens, profile: Profile) -> Tensor:
        return tokens.position.float()

    def observe(
        self, tokens: Tokens, attention_mass: Tensor, profile: Profile
    ) -> Mapping[str, Tensor]:
        return {}


def test_idle_time_is_given_before_a_tool_s_output_to_who_uses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = []
    monkeypatch.setattr(
        Session, "idle", lambda self: waited.append(len(self.conversation.messages)), raising=False
    )
    go(tmp_path, scripts=SCRIPTS[:1], policies=(Waiting(), get_policy("streaming")), budgets=(0.5,))
    assert waited == [5]
    rows = gather(tmp_path).set_index("policy")
    assert rows.loc["waiting", "idle_s"] > 0 == rows.loc["streaming", "idle_s"]
    assert rows.loc["waiting", "delta_nll"] != rows.loc["full", "delta_nll"]


def test_a_policy_that_waits_runs_without_a_session_that_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Session, "idle", raising=False)
    go(tmp_path, scripts=SCRIPTS[:1], policies=(Waiting(),), budgets=(0.5,))
    assert set(gather(tmp_path)["idle_s"]) == {0.0}


class TestGoingOn:
    def test_a_run_that_was_ended_goes_on_and_says_the_same(
        self, tmp_path: Path, whole: Path
    ) -> None:
        first = Counted(3)
        with pytest.raises(StoppedError):
            run_traces(RUN, SCRIPTS, POLICIES, BUDGETS, tmp_path, first)
        assert len(gather(tmp_path)) == 3
        second = go(tmp_path)
        assert not set(first.done) & set(second.done)
        assert len(first.done) + len(second.done) == 2 * (1 + 2 * 2)
        assert {task.kind for task in second.tasks} == {"trace"}
        drop = ["seconds", "commit", "date"]
        pd.testing.assert_frame_equal(
            gather(tmp_path).drop(columns=drop), gather(whole).drop(columns=drop)
        )
        assert go(tmp_path).tasks == []

    def test_more_policies_budgets_and_traces_add_theirs(self, tmp_path: Path) -> None:
        go(tmp_path, scripts=SCRIPTS[:1], policies=POLICIES[:1], budgets=(0.5,))
        done = go(tmp_path, policies=POLICIES[:1]).done
        assert set(done) == {
            ("mill", "streaming", 0.25),
            ("ferry", "full", 1.0),
            ("ferry", "streaming", 0.5),
            ("ferry", "streaming", 0.25),
        }
        other = get_policy("streaming", sinks=8)
        assert len(go(tmp_path, policies=(other,)).done) == 4
        names = {cell["policy"] for cell in cells(gather(tmp_path))}
        assert names == {"full", "streaming(sinks=4)", "streaming(sinks=8)"}

    def test_the_full_cache_is_read_once_for_all_rows_of_a_trace(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        read, names = trace_play._read, []
        trace_play._reference.clear()

        def counted(*args: Any) -> Any:
            names.append((args[5] if len(args) > 5 else args[2].policy).name)
            return read(*args)

        monkeypatch.setattr(trace_play, "_read", counted)
        go(tmp_path)
        assert names.count("full") == 2 and len(names) == 2 * (1 + 2 * 2)

    def test_progress_is_in_tokens_and_comes_to_what_was_planned(self, tmp_path: Path) -> None:
        told, plans = {"size": 0.0, "trace": 0.0}, {}

        def advance(kind: str, count: float) -> None:
            told[kind] += count

        trace_play._reference.clear()
        run_traces(
            RUN,
            SCRIPTS,
            POLICIES,
            BUDGETS,
            tmp_path,
            Here(),
            advance=advance,
            planned=lambda kind, total: plans.update({kind: total}),
        )
        assert told == plans and plans["size"] == 2
        assert plans["trace"] == gather(tmp_path)["tokens"].sum()


class TestRefusals:
    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"score_chunk": 1}, "score_chunk 4, not 1"),
            ({"dtype": "bfloat16"}, "dtype 'float32', not 'bfloat16'"),
            ({"max_tokens": 5000}, "max_tokens None, not 5000"),
            ({"model_name": "other"}, "model 'tiny', not 'other'"),
            ({"seed": 1}, "seed 0, not 1"),
            ({"profile": PINNED_USER}, "profile "),
        ],
    )
    def test_a_folder_of_other_settings(self, whole: Path, change: Any, said: str) -> None:
        with pytest.raises(StudyError, match=f"holds a run with {said}"):
            go(whole, run=replace(RUN, **change))

    def test_a_folder_of_another_text(self, whole: Path) -> None:
        with pytest.raises(StudyError, match="another text of trace 'mill'"):
            go(whole, scripts=(replace(SCRIPTS[1], name="mill", cluster="mill"),))

    def test_damaged_files(self, tmp_path: Path) -> None:
        (tmp_path / "traces.json").write_text("{")
        with pytest.raises(StudyError, match=r"traces\.json' is damaged"):
            go(tmp_path)
        (tmp_path / "traces.json").unlink()
        (tmp_path / "rows").mkdir()
        (tmp_path / "rows" / "mill.parquet").write_bytes(b"x")
        with pytest.raises(StudyError, match="is damaged"):
            go(tmp_path)

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"scripts": ()}, "traces is empty"),
            ({"policies": ()}, "policies is empty"),
            ({"budgets": ()}, "budgets is empty"),
            ({"budgets": (0.5, 1.5)}, r"budget is 1\.5"),
            ({"budgets": (0,)}, "budget is 0"),
            ({"scripts": (SCRIPTS[0], SCRIPTS[0])}, "Two traces are named 'mill'"),
            ({"scripts": (replace(SCRIPTS[0], name="../x"),)}, "usable as a file name"),
        ],
    )
    def test_arguments(self, tmp_path: Path, change: Any, said: str) -> None:
        with pytest.raises(StudyError, match=said):
            go(tmp_path, **change)
        assert not any(tmp_path.iterdir())

    @pytest.mark.parametrize(
        "change", [{"score_chunk": 0}, {"max_tokens": 0}, {"score_chunk": 1.5}]
    )
    def test_settings(self, change: Any) -> None:
        with pytest.raises(StudyError, match="must be an integer of at least 1"):
            replace(RUN, **change)

    def test_a_trace_without_an_answer(self, tmp_path: Path) -> None:
        mute = Script("mute", "mute", ((user(40),),))
        with pytest.raises(StudyError, match="'mute' has no assistant tokens"):
            go(tmp_path, scripts=(mute,))


def rows_like(values: Mapping[tuple[str, float], Sequence[float]]) -> list[dict[str, Any]]:
    """Rows of made-up costs: (policy, budget) -> Δ NLL of trace 0, 1, 2..."""
    base = {name: "" for name in TRACE_SCHEMA.names} | {"versions": "{}", "settings": "{}"}
    made = []
    for (policy, share), deltas in values.items():
        for number, delta in enumerate(deltas):
            tokens = 1000 * (number + 1)
            made.append(
                {
                    **base,
                    "trace": f"t{number}",
                    "trace_digest": f"d{number}",
                    "policy": policy,
                    "policy_config": json.dumps({"name": policy}),
                    "settings": json.dumps({"max_tokens": None}),
                    "budget": share,
                    "budget_tokens": None if policy == "full" else int(share * tokens),
                    "tokens": tokens,
                    "past_trained": 0,
                    "scored_tokens": 100,
                    "nll": 2 + delta,
                    "full_nll": 2.0,
                    "delta_nll": delta,
                    "top1_agreement": 1 - delta,
                    "peak_resident_tokens": int(share * tokens),
                    "evicted_tokens": 0,
                    "observations": 0,
                    "idle_s": 0.0,
                    "seconds": 1.0,
                    "score_chunk": 32,
                    "seed": 0,
                    "commit": "abc",
                    "date": "2026-01-01",
                }
            )
    return made


def written(folder: Path, rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    for trace in {row["trace"] for row in rows}:
        mine = [row for row in rows if row["trace"] == trace]
        write_rows(folder / "rows" / f"{trace}.parquet", mine, TRACE_SCHEMA)
    return gather(folder)


MADE = {
    ("full", 1.0): [0.0, 0.0, 0.0, 0.0],
    ("h2o", 0.5): [0.1, 0.2, 0.3, 0.4],
    ("tova", 0.5): [0.2, 0.1, 0.5, 0.4],
}


class TestReport:
    def test_cells_are_means_over_traces_and_pairs(self, tmp_path: Path) -> None:
        found = cells(written(tmp_path, rows_like(MADE)))
        assert [(cell["policy"], cell["budget"]) for cell in found] == list(MADE)
        assert all(tuple(cell) == FIELDS for cell in found)
        _, h2o, tova = found
        assert h2o["n"] == 4 and h2o["scored_tokens"] == 400
        assert h2o["delta_nll"] == pytest.approx(0.25) and h2o["agreement"] == pytest.approx(0.75)
        # With four traces the bounds of all resamples are those of the least and the largest.
        assert 0.1 <= h2o["low"] < 0.2 and 0.3 < h2o["high"] <= 0.4
        assert h2o["agreement_low"] == pytest.approx(1 - h2o["high"])
        pair = h2o["against"]["tova"]
        assert (pair["wins"], pair["losses"], pair["n"]) == (2, 1, 4)
        assert pair["delta"] == pytest.approx(-0.05) and pair["low"] < -0.05 < pair["high"]
        back = tova["against"]["h2o"]
        assert (back["wins"], back["delta"]) == (1, pytest.approx(0.05))
        assert set(h2o["against"]) == {"tova"} and found[0]["against"] == {}
        assert json.loads(cells_json(gather(tmp_path))) == found

    def test_the_document(self, tmp_path: Path) -> None:
        text = document("x", written(tmp_path, rows_like(MADE)))
        assert "4 recorded traces (10,000 tokens, of which the assistant wrote 400)" in text
        assert "| `h2o` |  | 2 of 4 |" in text and "| `tova` | 1 of 4 |  |" in text
        assert "| t2 | 3,000 | 2.000 | +0.300 | +0.500 |" in text
        assert "What did not fit" not in text and "trained" not in text

    def test_what_does_not_belong_together(self, tmp_path: Path) -> None:
        rows = rows_like(MADE)
        for number, (name, value, said) in enumerate(
            [
                ("weights", "other", "2 values of 'weights'"),
                ("settings", '{"max_tokens": 1}', "2 values of 'settings'"),
                ("trace_digest", "other", "two texts of one trace"),
                ("scored_tokens", 99, "two texts of one trace"),
            ]
        ):
            changed = [*rows[:-1], {**rows[-1], name: value}]
            with pytest.raises(StudyError, match=said):
                written(tmp_path / str(number), changed)
        with pytest.raises(StudyError, match="twice"):
            written(tmp_path / "twice", [*rows, rows[-1]])

    def test_no_rows(self, tmp_path: Path) -> None:
        with pytest.raises(StudyError, match="there are no rows under it"):
            gather(tmp_path)
        (tmp_path / "rows").mkdir()
        (tmp_path / "rows" / "x.parquet").write_bytes(b"x")
        with pytest.raises(StudyError, match=r"'x\.parquet' is not a parquet file"):
            gather(tmp_path)

    def test_positions_past_those_trained(self, tmp_path: Path) -> None:
        rows = [
            {**row, "past_trained": 12 if row["trace"] == "t1" else 0} for row in rows_like(MADE)
        ]
        text = document("x", written(tmp_path, rows))
        assert "Of 1 trace the last 12 tokens are past the positions" in text and ": t1." in text


@pytest.mark.parametrize("given", [False, True])
def test_heads_are_those_of_the_profile_or_none(
    given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the package knows of a model would change rows that say the same of their making."""
    head = EvidenceHead(0, 1, READ, weight=1.0, mean=-3.0, std=1.0)
    model, tokenizer = small(MODEL)
    about = {"shape": shape_of(model.config)}
    found = Known("tiny", {"read": (head, head)}, about)
    monkeypatch.setattr(known, "known_models", lambda: (found,))
    profiles: list[Profile] = []

    class Spied(Session):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            profiles.append(self.cache.profile)

    monkeypatch.setattr(trace_play, "Session", Spied)
    profile = Profile.default().with_evidence({"read": (head,)}) if given else Profile.default()
    task = TraceTask(
        "trace", replace(RUN, profile=profile), script("one", 50), get_policy("memdecay"), 0.5, 240
    )
    row = trace_play.do_trace(model, tokenizer, task, lambda count: None)
    assert row["policy"] == "memdecay" and len(profiles) == 2  # it, and the full cache
    assert all(dict(one.evidence) == ({"read": (head,)} if given else {}) for one in profiles)
    assert Spied(model, tokenizer, budget=64, policy="memdecay").cache.profile.evidence
