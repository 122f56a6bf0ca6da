"""A study is run to its end, goes on where it was ended, and says what is wrong with its folder."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from memdecay.calibration.curves import load_curves
from memdecay.calibration.fit import fit
from memdecay.errors import StudyError
from memdecay.regions import Profile
from memdecay.study import answers, overhead, workers
from memdecay.study.conditions import conditions
from memdecay.study.overhead import measure_overhead
from memdecay.study.rows import read_rows
from memdecay.study.run import Advance, Task, episodes_of, export, run_setting, with_changes
from memdecay.study.scenario import find_gold
from memdecay.study.settings import Setting
from memdecay.study.workers import Here, Processes, check_jobs, default_jobs
from study.study_tiny import recorded, small, two_scenarios

MODEL = "llama_one_layer"


@pytest.fixture(scope="module", autouse=True)
def tiny_model() -> Iterator[None]:
    """A tiny model for every name, short answers, and no stop watch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "_model", lambda name, dtype: small(MODEL))
        patch.setattr(overhead, "measure_overhead", lambda *_: {"scored_step_ms": 1.0})
        patch.setattr(answers, "MAX_NEW_TOKENS", 4)
        yield


@pytest.fixture(scope="module")
def scenarios(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return two_scenarios(tmp_path_factory.mktemp("scenarios"))


@pytest.fixture(scope="module")
def setting(scenarios: tuple[str, str]) -> Setting:
    return Setting(
        name="tiny-short",
        model="tiny",
        model_name="tiny",
        tier="short",
        dtype="float32",
        groups=("paper",),
        scenarios=scenarios,
        variants=(0, 1),
        burst=4,
        calibration_burst=24,
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, setting: Setting) -> Path:
    """The folder of a run that nobody interrupted; tests do not write to it."""
    return run_setting(setting, tmp_path_factory.mktemp("whole"), Here())


class StoppedError(BaseException):
    """What ends a run in these tests; as a Ctrl-C, it is no Exception."""


class Counted(Here):
    """Counts tasks, and is interrupted after some of them, or in the middle of one."""

    def __init__(self, until: int | None = None) -> None:
        self.until, self.tasks = until, []

    def results(self, tasks: Sequence[Task], advance: Advance) -> Iterator[tuple[Task, Any]]:
        for task in tasks:
            if len(self.tasks) == self.until:
                raise StoppedError
            self.tasks.append(task)
            yield from super().results([task], advance)


def run_until(setting: Setting, runs: Path, until: int) -> None:
    with pytest.raises(StoppedError):
        run_setting(setting, runs, Counted(until))


def same_rows(one: Path, other: Path) -> None:
    drop = ["commit", "date"]
    pd.testing.assert_frame_equal(
        read_rows(one).drop(columns=drop), read_rows(other).drop(columns=drop)
    )


class TestToItsEnd:
    def test_one_row_for_each_condition_budget_and_probe(self, whole: Path) -> None:
        rows = read_rows(whole)
        assert len(rows) == 4 * 4 * 13  # episodes, probes, cells
        counts = rows.groupby(["policy", "budget"]).size()
        assert counts.to_dict() == {
            ("full", 1.0): 16, ("random", 0.25): 48, ("random", 0.5): 48,
            ("streaming", 0.25): 16, ("streaming", 0.5): 16, ("h2o", 0.25): 16, ("h2o", 0.5): 16,
            ("memdecay-paper", 0.25): 16, ("memdecay-paper", 0.5): 16,
        }  # fmt: skip
        key = ["scenario", "variant", "region", "policy", "condition", "seed", "budget"]
        assert not rows.duplicated(key).any()

    def test_what_a_row_says(self, whole: Path, setting: Setting) -> None:
        rows = read_rows(whole)
        assert set(rows["setting"]) == {"tiny-short"} and set(rows["dtype"]) == {"float32"}
        assert set(rows["model"]) == {"tiny"} and set(rows["engine"]) == {"memdecay"}
        assert set(rows["scenario"]) == {"mill", "ferry"} and set(rows["variant"]) == {0, 1}
        gold = {
            (one.scenario, one.variant, fact.region): (fact.value, fact.kind)
            for one in episodes_of(setting)
            for fact in one.facts
        }
        names = {one.to_json(): one.name for one in conditions(("paper",))}
        for row in rows.to_dict("records"):
            place = (row["scenario"], row["variant"], row["region"])
            assert gold[place] == (row["gold"], row["fact_kind"])
            assert row["recall"] == (find_gold(row["answer"], row["gold"]) is not None)
            assert names[row["condition"]] == row["policy"]
            assert row["budget_tokens"] == int(row["budget"] * row["seq_len"])
            assert 0 < row["kept_tokens"] <= row["budget_tokens"]
            assert row["gold_logprob"] < 0 and row["gold_tokens"] >= 4
            assert "torch" in json.loads(row["versions"]) and len(row["date"]) == 10
        full = rows[rows["policy"] == "full"]
        assert (full["kept_tokens"] == full["seq_len"]).all()

    def test_equal_keep_sets_have_equal_answers_and_others_do_not(self, whole: Path) -> None:
        rows = read_rows(whole)
        found = rows.groupby(["scenario", "variant", "region", "keep_digest"])
        assert (found["gold_logprob"].nunique() == 1).all()
        assert (found["answer"].nunique() == 1).all()
        probes = rows.groupby(["scenario", "variant", "region"])
        assert (probes["gold_logprob"].nunique() > 8).all()

    def test_what_else_is_in_the_folder(self, whole: Path, setting: Setting) -> None:
        episodes = {"mill-0", "mill-1", "ferry-0", "ferry-1"}
        for part in ("curves", "rows"):
            assert {path.name for path in (whole / part).iterdir()} == {
                f"{name}.parquet" for name in episodes
            }
        told = json.loads((whole / "setting.json").read_text())
        assert set(told["episodes"]) == episodes and told["calibration_burst"] == 24
        assert json.loads((whole / "overhead.json").read_text()) == {"scored_step_ms": 1.0}
        assert sorted(os.listdir(whole)) == [
            "curves", "overhead.json", "profiles", "rows", "setting.json",
        ]  # fmt: skip

    def test_progress_adds_up(self, tmp_path: Path, setting: Setting) -> None:
        told: dict[str, float] = {}

        def advance(kind: str, share: float) -> None:
            told[kind] = told.get(kind, 0.0) + share

        one = with_changes(setting, variants=(0,))
        for _ in range(2):  # done, and already done
            told.clear()
            run_setting(one, tmp_path, Here(), advance=advance)
            assert told == pytest.approx({"measure": 2, "watch": 2, "ask": 2, "overhead": 1})


class TestGoingOn:
    @pytest.mark.parametrize("until", [1, 6])  # while measuring, and while asking
    def test_an_interrupted_run_ends_as_any_other(
        self, tmp_path: Path, setting: Setting, whole: Path, until: int
    ) -> None:
        run_until(setting, tmp_path, until)
        folder = tmp_path / setting.name
        for part in ("curves", "rows"):  # what a kill in the middle of a write leaves
            (folder / part).mkdir(exist_ok=True)
            (folder / part / ".abc.part").write_bytes(b"PAR1 half")
        rest = Counted()
        run_setting(setting, tmp_path, rest)
        assert len(rest.tasks) == 10 - until  # four to measure, four to ask, pages, times
        same_rows(folder, whole)

    def test_a_run_that_is_done_does_nothing(self, whole: Path, setting: Setting) -> None:
        before = {path: path.stat().st_mtime_ns for path in whole.glob("rows/*")}
        nobody = Counted(0)
        run_setting(setting, whole.parent, nobody)
        assert nobody.tasks == []
        assert before == {path: path.stat().st_mtime_ns for path in whole.glob("rows/*")}

    def test_more_groups_add_their_rows_only(self, tmp_path: Path, setting: Setting) -> None:
        first = with_changes(setting, variants=(0,))
        folder = run_setting(first, tmp_path, Here())
        paper = read_rows(folder)
        more = Counted()
        run_setting(with_changes(first, groups=("ablation", "paper")), tmp_path, more)
        assert [task.kind for task in more.tasks] == ["ask", "ask"]
        assert {one.group for task in more.tasks for one in task.conditions} == {"ablation"}
        both = read_rows(folder)
        pd.testing.assert_frame_equal(both[both["group"] == "paper"].reset_index(drop=True), paper)
        assert len(both) == len(paper) + 2 * 4 * 3 * 2

    def test_a_damaged_file_of_rows_is_named(self, tmp_path: Path, setting: Setting) -> None:
        run_until(setting, tmp_path, 5)
        [path] = (tmp_path / setting.name / "rows").glob("*.parquet")
        path.write_bytes(b"PAR1 no")
        with pytest.raises(StudyError, match=r"-0.parquet' is damaged; remove it"):
            run_setting(setting, tmp_path, Here())


class TestLeaveOneOut:
    def test_a_scenario_is_evicted_with_the_rates_of_the_others(
        self, tmp_path: Path, setting: Setting
    ) -> None:
        counted = Counted(8)
        with contextlib.suppress(StoppedError):
            run_setting(setting, tmp_path, counted)
        folder = tmp_path / setting.name
        curves = load_curves(folder / "curves")
        assert {one.cluster for one in curves} == {"mill", "ferry"}
        rates = {}
        for left_out, other in (("mill", "ferry"), ("ferry", "mill")):
            expected = fit([one for one in curves if one.cluster == other], resamples=10)
            saved = Profile.load(folder / "profiles" / f"{left_out}.yaml")
            assert saved.provenance["left_out"] == left_out and saved.provenance["traces"] == 2
            measured = [name for name, one in expected.items() if one.measured]
            assert len(measured) >= 3
            for name in measured:
                half_life = saved.regions[name].half_life
                assert half_life == pytest.approx(expected[name].half_life, rel=1e-3)
            rates[left_out] = saved.decay_rate
            asked = [
                task.profiles["calibrated"]
                for task in counted.tasks
                if task.kind == "ask" and task.episode.scenario == left_out
            ]
            assert len(asked) == 2
            for plain in asked:
                assert Profile.from_dict(plain).decay_rate == saved.decay_rate
        assert rates["mill"] != rates["ferry"]

    def test_one_scenario_alone_keeps_the_defaults(self, tmp_path: Path, setting: Setting) -> None:
        alone = with_changes(setting, scenarios=setting.scenarios[:1], variants=(0,))
        counted = Counted(1)
        with contextlib.suppress(StoppedError):
            run_setting(alone, tmp_path, counted)
        saved = Profile.load(tmp_path / setting.name / "profiles" / "mill.yaml")
        assert saved.decay_rate == Profile.default().decay_rate
        assert saved.provenance["traces"] == 0


class TestAnotherFolder:
    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"model_name": "other"}, "with model 'tiny', not 'other'"),
            ({"dtype": "bfloat16"}, "with dtype 'float32', not 'bfloat16'"),
            ({"burst": 9}, "with burst 4, not 9"),
            ({"calibration_burst": 9}, "with calibration_burst 24, not 9"),
        ],
    )
    def test_a_run_of_something_else_is_refused(
        self, whole: Path, setting: Setting, changes: dict[str, Any], said: str
    ) -> None:
        before = (whole / "setting.json").read_text()
        with pytest.raises(StudyError) as caught:
            run_setting(replace(setting, **changes), whole.parent, Counted(0))
        assert said in str(caught.value) and "use another --out, or remove it." in str(caught.value)
        assert (whole / "setting.json").read_text() == before

    def test_another_text_of_an_episode_is_refused(
        self, tmp_path: Path, whole: Path, setting: Setting
    ) -> None:
        text = Path(setting.scenarios[0]).read_text().replace("Be brief", "Be short")
        (tmp_path / "mill.yaml").write_text(text)
        other = with_changes(setting, scenarios=(str(tmp_path / "mill.yaml"), setting.scenarios[1]))
        with pytest.raises(StudyError, match="a run of another text of episode 'mill-0'; use"):
            run_setting(other, whole.parent, Counted(0))

    @pytest.mark.parametrize("content", ["", "[]", "{}", '{"episodes": 3}', '{"episodes": "x"}'])
    def test_a_damaged_note_is_named(self, tmp_path: Path, setting: Setting, content: str) -> None:
        (tmp_path / setting.name / "rows").mkdir(parents=True)
        (tmp_path / setting.name / "rows" / "mill-0.parquet").write_text("")
        (tmp_path / setting.name / "setting.json").write_text(content)
        with pytest.raises(StudyError, match=r"setting.json' is damaged; remove it"):
            run_setting(setting, tmp_path, Counted(0))

    def test_a_claim_without_any_work_is_no_claim(self, tmp_path: Path, setting: Setting) -> None:
        """As a mistyped model leaves it."""
        with pytest.raises(StoppedError):
            run_setting(with_changes(setting, model_name="typo"), tmp_path, Counted(0))
        run_setting(with_changes(setting, variants=(0,)), tmp_path, Here())
        told = json.loads((tmp_path / setting.name / "setting.json").read_text())
        assert told["model"] == "tiny"

    def test_rows_with_rates_of_fewer_episodes_are_not_extended(
        self, tmp_path: Path, setting: Setting
    ) -> None:
        run_setting(with_changes(setting, variants=(0,)), tmp_path, Here())
        with pytest.raises(StudyError, match=r"rates were measured without 'mill-1'"):
            run_setting(setting, tmp_path, Counted(0))

    def test_two_models_under_one_name_are_refused(
        self, tmp_path: Path, setting: Setting, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with pytest.raises(StoppedError):
            run_setting(with_changes(setting, variants=(0,)), tmp_path, Counted(1))
        monkeypatch.setattr(workers, "_model", lambda name, dtype: small("gpt2"))
        with pytest.raises(StudyError, match="holds curves of two models"):
            run_setting(with_changes(setting, variants=(0,)), tmp_path, Here())

    def test_a_file_in_the_place_of_the_folder(self, tmp_path: Path, setting: Setting) -> None:
        (tmp_path / "runs").write_text("")
        with pytest.raises(StudyError, match=r"^'setting.json' cannot be written"):
            run_setting(setting, tmp_path / "runs", Counted(0))


def test_the_first_variants_come_first(setting: Setting) -> None:
    assert [one.name for one in episodes_of(setting)] == ["mill-0", "ferry-0", "mill-1", "ferry-1"]
    assert [one.name for one in episodes_of(with_changes(setting, variants=(1,)))] == [
        "mill-1", "ferry-1",
    ]  # fmt: skip


def test_an_export_says_what_peers_need(setting: Setting, whole: Path) -> None:
    made = export(with_changes(setting, variants=(0,)), Here())
    rows = read_rows(whole)
    assert [(one["scenario"], one["variant"]) for one in made] == [("mill", 0), ("ferry", 0)]
    _, tokenizer = small(MODEL)
    for one in json.loads(json.dumps(made)):
        own = rows[(rows["scenario"] == one["scenario"]) & (rows["variant"] == 0)]
        assert {len(one["context_ids"])} == set(own["seq_len"])
        assert {(float(k), v) for k, v in one["budgets"].items()} == set(
            own.loc[own["budget"] < 1, ["budget", "budget_tokens"]].itertuples(
                index=False, name=None
            )
        )
        assert [probe["region"] for probe in one["probes"]] == [
            "system", "user", "tool_out", "retrieval",
        ]  # fmt: skip
        for probe in one["probes"]:
            assert tokenizer.decode(probe["gold_ids"]) == probe["gold"]
            asked = tokenizer.decode(probe["question_ids"])
            assert "Answer with the value only." in asked and probe["gold"] not in asked
            assert asked.endswith("<|im_start|>assistant\n")
        assert one["end_ids"]


def test_probes_know_where_their_fact_stands(tmp_path: Path) -> None:
    _, tokenizer = small("llama")
    made = recorded(tmp_path)
    assert len(made.probes) == 4 and made.seq_len == made.cache.kept()
    for probe in made.probes:
        start, end = probe.where
        assert find_gold(tokenizer.decode(made.tape.ids[start:end]), probe.fact.value)
        for inner in ((start + 1, end), (start, end - 1)):
            text = tokenizer.decode(made.tape.ids[slice(*inner)])
            assert not find_gold(text, probe.fact.value)
        assert probe.fact.region in made.tape.regions[start:end]


def test_overhead_is_ratios_and_batches_agree(tmp_path: Path) -> None:
    made = recorded(tmp_path)
    before = made.cache.steps, made.cache.seen
    told = measure_overhead(*small("llama"), made)
    assert told["cache_tokens"] == made.seq_len + 24
    assert told["scored_over_unscored"] == pytest.approx(
        told["scored_step_ms"] / told["unscored_step_ms"], rel=0.01
    )
    assert told["batch_agreement"] == "24 of 24 answers equal"
    assert told["batch_largest_logprob_difference"] <= 1e-3
    assert told["batch_speedup"] > 1
    assert (made.cache.steps, made.cache.seen) == before
    json.dumps(told, allow_nan=False)


class TestJobs:
    @pytest.mark.parametrize("jobs", [0, -1, True, 1.5])
    def test_less_than_one_is_refused(self, jobs: Any) -> None:
        for refuse in (check_jobs, Processes):
            with pytest.raises(StudyError, match=rf"^jobs is {jobs}, but it must be at least 1\.$"):
                refuse(jobs)

    def test_one_a_core_but_no_more_than_tasks(self) -> None:
        cores = len(os.sched_getaffinity(0))
        assert default_jobs(1) == 1 and default_jobs(1000) in (1, cores) and default_jobs(0) == 1


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on(
    tmp_path: Path, setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes, kill -9 once some rows are there; the rest here. Needs seconds to import."""
    model, tokenizer = small(MODEL)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    command = [
        *(sys.executable, "-m", "memdecay.cli.main", "study", "run", "--setting", "tiny-short"),
        *("--model", "model", "--tier", "short", "--dtype", "float32", "--groups", "paper"),
        *(part for name in setting.scenarios for part in ("--scenario", name)),
        *("--variant", "0", "--variant", "1", "--jobs", "2", "--out", "killed"),
    ]
    said = tmp_path / "said"
    with said.open("wb") as stream:
        running = subprocess.Popen(command, cwd=tmp_path, stderr=stream)
    rows = tmp_path / "killed" / "tiny-short" / "rows"
    try:
        ends = time.monotonic() + 240
        while not list(rows.glob("*.parquet")):
            assert running.poll() is None, said.read_text()
            assert time.monotonic() < ends
            time.sleep(0.01)
        children = _children(running.pid)
        assert len(children) >= 2
    finally:
        running.send_signal(signal.SIGKILL)
        running.wait()
    done = len(list(rows.glob("*.parquet")))
    assert 1 <= done < 4
    ends = time.monotonic() + 20
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < ends, "workers outlive the run that started them"
        time.sleep(0.1)
    monkeypatch.setattr(answers, "MAX_NEW_TOKENS", 16)
    own = replace(setting, model_name="model", burst=8, calibration_burst=48)
    rest = Counted()
    run_setting(own, tmp_path / "killed", rest)
    assert sum(task.kind == "ask" for task in rest.tasks) == 4 - done
    run_setting(own, tmp_path / "whole", Here())
    same_rows(tmp_path / "killed" / "tiny-short", tmp_path / "whole" / "tiny-short")


def _children(pid: int) -> list[int]:
    """Processes that a process started, and those that they did."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    own = [int(child) for child in text.split()]
    return [*own, *(inner for child in own for inner in _children(child))]
