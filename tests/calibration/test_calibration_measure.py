"""Measuring: what is played is what is summed, and a run that was ended goes on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.sessions import assistant, session, system, tiny, user
from memdecay.calibration import measure as measuring
from memdecay.calibration.curves import Curves
from memdecay.calibration.fit import fit
from memdecay.calibration.measure import check_labels, count_tokens, measure, settings, work
from memdecay.calibration.player import Script
from memdecay.errors import StudyError
from memdecay.regions import REGIONS


def script(name, seed=0, cluster="c"):
    stages = (
        (system(12, seed), user(9, seed + 1)),
        (assistant(8, seed + 2), user(5, seed + 3)),
        (assistant(7, seed + 4),),
    )
    return Script(name, cluster, stages, "Plan: search")


SCRIPTS = [script("a", 1), script("b", 2), script("d", 3, "e")]


@pytest.fixture(scope="module")
def small():
    return tiny("llama")


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_sums_are_those_of_what_a_session_observes(small, tmp_path):
    one = replace(SCRIPTS[0], closing="")
    [curves] = measure(*small, [one], folder=tmp_path, burst=0)
    made = session("llama")
    total = np.zeros((len(REGIONS), 99))
    count = np.zeros((len(REGIONS), 99), int)

    def observe(row, mass, refreshed):
        ledger, now = made.cache.ledgers[0], made.cache.steps
        if int(ledger["inserted_at"][-1]) != now or not made.cache._running:
            return  # the end of a prompt
        for i, share in enumerate(mass.tolist()):
            age = now - int(ledger["inserted_at"][i])
            if age:
                total[int(ledger["region"][i]), (age - 1) // 4] += share
                count[int(ledger["region"][i]), (age - 1) // 4] += 1

    made.cache.on_observe = observe
    for stage in one.stages:
        made.append(list(stage), score=True)
    width = curves.total.shape[1]
    assert np.array_equal(curves.count, count[:, :width]) and not count[:, width:].any()
    assert np.allclose(curves.total, total[:, :width], atol=1e-4)
    assert curves.steps == made.cache.steps > 10


def test_a_run_that_was_ended_goes_on_to_the_same_files(small, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    once = measure(*small, SCRIPTS, folder=whole, burst=10)
    left = work(small[1], SCRIPTS[0], 10) + 20

    def until(done):
        nonlocal left
        left -= done
        if left < 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(*small, SCRIPTS, folder=parts, burst=10, progress=until)
    assert set(contents(parts)) == {"a.parquet"}
    before = (parts / "a.parquet").stat().st_mtime_ns
    again = measure(*small, SCRIPTS, folder=parts, burst=10)
    assert (parts / "a.parquet").stat().st_mtime_ns == before
    assert contents(parts) == contents(whole)
    assert fit(again) == fit(once)
    assert [one.name for one in again] == ["a", "b", "d"]
    assert [one.cluster for one in again] == ["c", "c", "e"]


def test_what_is_there_is_not_played_again(small, tmp_path, monkeypatch):
    once = measure(*small, SCRIPTS[:2], folder=tmp_path, burst=3)

    def play(*args, **options):
        raise AssertionError("played again")

    monkeypatch.setattr(measuring, "play", play)
    again = measure(*small, SCRIPTS[:2], folder=tmp_path, burst=3)
    for one, other in zip(once, again, strict=True):
        assert np.array_equal(one.total, other.total)


def test_progress_adds_up_to_the_work(small, tmp_path):
    done = []
    for _ in range(2):  # played, and found
        done.clear()
        measure(*small, SCRIPTS, folder=tmp_path, burst=11, progress=done.append)
        assert sum(done) == sum(work(small[1], one, 11) for one in SCRIPTS)


def other_weights(small):
    model, tokenizer = tiny("llama")
    with torch.no_grad():
        next(model.parameters()).add_(0.25)
    return model, tokenizer


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("burst", "was measured with burst 4, not 5"),
        ("bucket", "was measured with bucket 4, not 2"),
        ("weights", "was measured with another model"),
        ("tokenizer", "was measured with another tokenizer"),
        ("trace", "was measured with another trace"),
    ],
)
def test_files_of_another_measurement_are_refused_before_any_work(
    small, tmp_path, what, sentence, monkeypatch
):
    measure(*small, SCRIPTS[1:2], folder=tmp_path, burst=4)
    before = contents(tmp_path)
    model, tokenizer = small
    scripts, options = SCRIPTS, {"burst": 4}
    if what in ("burst", "bucket"):
        options[what] = {"burst": 5, "bucket": 2}[what]
    elif what == "weights":
        model = other_weights(small)[0]
    elif what == "tokenizer":
        tokenizer = tiny("llama")[1]
        tokenizer.add_tokens(["<new>"])
    else:
        scripts = [SCRIPTS[0], script("b", 7)]
    with pytest.raises(StudyError, match=sentence) as caught:
        measure(model, tokenizer, scripts, folder=tmp_path, **options)
    assert "b.parquet" in str(caught.value) and str(caught.value).count(".") <= 3
    assert contents(tmp_path) == before


def test_a_model_by_another_path_is_the_same_model(small, tmp_path):
    model, tokenizer = small
    once = measure(model, tokenizer, SCRIPTS[:1], folder=tmp_path, burst=2)
    moved, _ = tiny("llama")
    moved.config.name_or_path = "elsewhere"
    again = measure(moved, tokenizer, SCRIPTS[:1], folder=tmp_path, burst=2)
    assert again[0].meta == once[0].meta


def test_a_damaged_file_is_one_sentence(small, tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"half a file")
    with pytest.raises(StudyError, match="is not a file of measured curves"):
        measure(*small, SCRIPTS[:1], folder=tmp_path, burst=2)


def test_a_file_says_how_it_was_measured(small, tmp_path):
    measure(*small, SCRIPTS[:1], folder=tmp_path, burst=2, provenance={"commit": "abc"})
    meta = Curves.load(tmp_path / "a.parquet").meta
    assert meta["settings"] == settings(*small, burst=2)
    assert meta["settings"]["clock"] == "steps" and meta["settings"]["dtype"] == "float32"
    assert meta["commit"] == "abc"


def test_a_model_that_forgets_the_start_is_refused(tmp_path):
    small = tiny("mistral_sliding")
    count = count_tokens(small[1], SCRIPTS[0]) + 2
    with pytest.raises(StudyError, match=f"'a' has {count} tokens with its burst, but this model"):
        measure(*small, SCRIPTS[:1], folder=tmp_path, burst=2)
    assert not list(tmp_path.iterdir())
    measure(*tiny("qwen2_sliding"), SCRIPTS[:1], folder=tmp_path, burst=2)


def test_a_folder_that_cannot_be_made_is_one_sentence(small, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StudyError, match="file', but it cannot be made"):
        measure(*small, SCRIPTS[:1], folder=tmp_path / "file")


def test_a_trace_without_labels_is_refused():
    silent = Script("t", "t", ((user(3), user(4)),))
    with pytest.raises(
        StudyError, match="'t' has no labels: all of its text is of the region user"
    ):
        check_labels(silent)
    check_labels(Script("t", "t", ((user(3), user(4, region="retrieval")),)))
    unspoken = Script("t", "t", ((system(3), user(4)),))
    check_labels(unspoken, burst=1)
    with pytest.raises(StudyError, match="has no assistant message and burst is 0"):
        check_labels(unspoken, burst=0)
    check_labels(replace(unspoken, closing="so"), burst=0)
    check_labels(Script("t", "t", ((user(3),), (assistant(2, region="plan"),))), burst=0)
