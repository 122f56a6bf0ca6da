"""Traces under a policy with tiers: its rows, what is left of the rise in NLL, refusals."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from memdecay.engine import Session
from memdecay.errors import StudyError
from memdecay.evidence import ASK, EvidenceHead
from memdecay.policy import get_policy
from memdecay.regions import Profile
from memdecay.study import workers
from memdecay.study.trace_play import ENDINGS, TieredPolicy, config_of, plain_name, with_tiers
from memdecay.study.trace_report import document, gather, rises
from memdecay.study.traces import run_traces
from memdecay.study.workers import Here
from memdecay.tiers import Tiers
from study.study_tiny import small
from study.test_trace_study import MODEL, RUN, SCRIPTS, rows_like, written

HEADS = (EvidenceHead(0, 1, ASK), EvidenceHead(1, 2, ASK))
PROFILE = Profile.default().with_evidence({"recall": HEADS})
PLAIN = get_policy("streaming")
TIERED = TieredPolicy(PLAIN, {"page_size": 4})


@pytest.fixture(autouse=True)
def tiny_model(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A tiny model for every name."""
    monkeypatch.setattr(workers, "_model", lambda name, dtype: small(MODEL))
    yield


def test_a_row_is_what_a_session_with_tiers_says(tmp_path: Path) -> None:
    run = replace(RUN, profile=PROFILE)
    run_traces(run, SCRIPTS, [PLAIN, TIERED], [0.5], tmp_path, Here())
    rows = gather(tmp_path).set_index(["policy", "trace"])
    assert {name for name, _ in rows.index} == {"full", "streaming", "streaming-tiers"}
    row = rows.loc["streaming-tiers", "mill"]
    assert json.loads(row["policy_config"]) == {
        "name": "streaming-tiers",
        "sinks": 4,
        "tiers": {"page_size": 4},
    }
    session = Session(
        *small(MODEL),
        budget=int(row["budget_tokens"]),
        policy=PLAIN,
        profile=PROFILE,
        tiers=Tiers(page_size=4),
    )
    with session:
        found = [session.append(one, score=True, score_chunk=4) for one in SCRIPTS[0].stages]
        came_back = session.report().tiers.came_back  # type: ignore[union-attr]
    nll = [float(value) for one in found if one.scores for value in one.scores.nll]
    assert row["nll"] == pytest.approx(sum(nll) / len(nll), abs=1e-6)
    assert came_back > 0 and row["nll"] != rows.loc["streaming", "mill"]["nll"]
    assert row["peak_resident_tokens"] <= row["budget_tokens"]
    again = run_traces(run, SCRIPTS, [PLAIN, TIERED], [0.5], tmp_path, Here())
    assert again == [] and len(gather(tmp_path)) == 2 * 3
    [left] = rises(gather(tmp_path))
    assert (left["policy"], left["n"]) == ("streaming-tiers", 2)
    assert "What tiers leave of it" in document("x", gather(tmp_path))


def test_bits_are_part_of_a_name(tmp_path: Path) -> None:
    endings = ("-tiers", "-tiers-graded", "-tiers-int4")
    assert sorted(ENDINGS) == sorted(endings)
    policies = [PLAIN, *(with_tiers(PLAIN, ending) for ending in endings)]
    assert [one.name for one in policies[1:]] == [f"streaming{ending}" for ending in endings]
    assert {plain_name(one.name) for one in policies} == {"streaming"}
    run_traces(replace(RUN, profile=PROFILE), SCRIPTS, policies, [0.3], tmp_path, Here())
    rows = gather(tmp_path).set_index(["policy", "trace"])
    graded = json.loads(rows.loc["streaming-tiers-graded", "mill"]["policy_config"])
    assert (graded["tiers"], graded["quantized"]) == ({"bits": 4}, 1.0)
    # What rows without bits said of themselves they still say.
    assert config_of(TieredPolicy(PLAIN)) == json.dumps(
        {"name": "streaming-tiers", "sinks": 4, "tiers": {}}
    )
    for name, trace in rows.index:
        row = rows.loc[name, trace]
        if name != "full":
            assert 0 < row["peak_resident_tokens"] <= row["budget_tokens"]  # at full precision
        if name.endswith("-int4"):
            assert row["evicted_tokens"] == 0
    # Each is another way to read.
    assert rows.xs("mill", level="trace")["nll"].nunique() == 5
    left = rises(gather(tmp_path))
    assert [(one["policy"], one["n"]) for one in left] == [
        (f"streaming{ending}", 2) for ending in endings
    ]
    assert len({one["delta_nll_without"] for one in left}) == 1
    assert "-tiers-graded keeps as many again at 4 bits" in document("x", gather(tmp_path))


def test_as_many_at_fewer_bits_as_the_budget() -> None:
    graded = with_tiers(PLAIN, "-tiers-graded")
    assert graded.settings(50) == Tiers(bits=4, quantized=50) and graded.recalls
    coded = with_tiers(PLAIN, "-tiers-int4")
    assert coded.settings(50) == Tiers(bits=4, quantized=None, host=0) and not coded.recalls


def test_without_recall_no_heads_are_needed(tmp_path: Path) -> None:
    coded = with_tiers(PLAIN, "-tiers-int4")
    run_traces(RUN, SCRIPTS[:1], [coded], [0.5], tmp_path, Here())
    assert set(gather(tmp_path)["policy"]) == {"full", "streaming-tiers-int4"}


def test_the_share_of_the_rise_is_a_ratio_of_sums(tmp_path: Path) -> None:
    deltas = {
        ("full", 1.0): [0.0, 0.0, 0.0],
        ("h2o", 0.25): [0.4, 0.5, 0.6],
        ("h2o-tiers", 0.25): [0.02, 0.05, 0.08],
        ("tova", 0.25): [0.1, 0.2, -0.5],
        ("tova-tiers", 0.25): [0.1, 0.1, 0.1],
    }
    rows = rows_like(deltas)
    for row in rows:
        if row["policy"].endswith("-tiers"):
            row["policy_config"] = json.dumps({"name": row["policy"], "tiers": {}})
    # A trace on which pins did not fit counts for neither.
    rows.append({**rows[3], "trace": "t9", "trace_digest": "d9", "refused": "pins"})
    found = {line["policy"]: line for line in rises(written(tmp_path, rows))}
    assert [*found] == ["h2o-tiers", "tova-tiers"]
    one = found["h2o-tiers"]
    assert one["n"] == 3 and one["share"] == pytest.approx(0.15 / 1.5)
    assert one["delta_nll"] == pytest.approx(0.05) and one["delta_nll_without"] == pytest.approx(
        0.5
    )
    # Resampling traces, the share is between that of the best and that of the worst.
    assert 0.05 <= one["low"] < one["share"] < one["high"] <= 0.08 / 0.6 + 1e-9
    # What did not rise leaves no share.
    assert found["tova-tiers"]["share"] is None and found["tova-tiers"]["low"] is None
    assert math.isclose(found["tova-tiers"]["delta_nll"], 0.1)


def test_what_cannot_have_tiers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match="'full-tiers', but full never evicts; tiers need"):
        TieredPolicy(get_policy("full"))
    with pytest.raises(StudyError, match="memdecay-heads evicts other tokens in every head"):
        TieredPolicy(get_policy("memdecay-heads"))
    with pytest.raises(StudyError, match="'streaming-tiers', but the profile has no evidence"):
        run_traces(RUN, SCRIPTS, [TIERED], [0.5], tmp_path, Here())
    assert not any(tmp_path.iterdir())
