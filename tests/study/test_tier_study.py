"""Tiers on the study's episodes: what is asked of whom, what a row says, what goes on where."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from memdecay.engine import Session
from memdecay.errors import StudyError
from memdecay.evidence import ASK, EvidenceHead
from memdecay.regions import Profile
from memdecay.study import answers, tier_play, workers
from memdecay.study.recording import Recording, question_mass
from memdecay.study.run import Advance
from memdecay.study.settings import Setting
from memdecay.study.tier_play import TierCondition, TierTask, tier_conditions
from memdecay.study.tier_run import TIER_SCHEMA, rows_path, run_tiers
from memdecay.study.workers import Here
from memdecay.tiers import Tiers
from study.study_tiny import recorded, small, two_scenarios

HEADS = (EvidenceHead(0, 1, ASK), EvidenceHead(1, 2, ASK))
PROFILE = Profile.default().with_evidence({"recall": HEADS})
TIERS = TierCondition("memdecay-tiers", 0.25, tiers={"page_size": 8})


@pytest.fixture(autouse=True)
def tiny_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model for every name, and answers of two tokens."""
    monkeypatch.setattr(workers, "_model", lambda name, dtype: small("llama"))
    monkeypatch.setattr(answers, "MAX_NEW_TOKENS", 2)


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    scenarios = two_scenarios(tmp_path)
    return Setting("own", "m", "m", "short", "float32", scenarios=scenarios, variants=(0,))


def profiles(folder: Path, profile: Profile = PROFILE) -> Path:
    """The folder of runs, with profiles of both scenarios in it."""
    for name in ("mill", "ferry"):
        path = folder / "runs" / "own" / "profiles" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        profile.save(path)
    return folder / "runs"


class Counted(Here):
    """Notes what it is given, and stops after some tasks."""

    def __init__(self, until: int | None = None) -> None:
        self.until, self.tasks = until, []

    def results(
        self, tasks: Sequence[TierTask], advance: Advance
    ) -> Iterator[tuple[TierTask, Any]]:
        for task in tasks:
            if len(self.tasks) == self.until:
                raise KeyboardInterrupt
            self.tasks.append(task)
            yield from super().results([task], advance)


def table(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    return rows


class TestWhatIsCompared:
    def test_the_long_tier_has_an_eighth_too(self) -> None:
        for tier, shares in (("short", [0.25]), ("long", [0.25, 0.125])):
            found = tier_conditions(tier)
            assert [one.share for one in found if one.name == "memdecay-tiers"] == shares
            assert [one.share for one in found if one.name == "full"] == [1.0]
            randoms = [one.seed for one in found if one.name == "memdecay-tiers-random"]
            assert randoms == [0, 1, 2] * len(shares)

    def test_each_name_is_asked_once_at_a_budget(self) -> None:
        """Reports know a condition by its name and budget, and rows by all that decides."""
        for tier in ("short", "long"):
            found = tier_conditions(tier)
            assert len({(one.name, one.share, one.seed) for one in found}) == len(found)
            assert len({(one.to_json(), one.share) for one in found}) == len(found)
            graded = {one.name: one for one in found if one.tiers and "bits" in one.tiers}
            assert all("tiers" in name for name in graded) and len(graded) == 4
            assert {one.pins for name, one in graded.items() if "int4" in name} == {tier == "long"}

    @pytest.mark.parametrize(("tier", "bits"), [("short", 7.2), ("long", 6.0)])
    def test_the_ladder_at_equal_bytes_takes_a_quarter_of_the_full_cache(
        self, tier: str, bits: float
    ) -> None:
        """By the bits a number that were measured there."""
        [one] = [one for one in tier_conditions(tier) if one.name.endswith("-bytes")]
        assert one.quantized is not None
        assert 0.24 < one.share + one.quantized * bits / 16 <= 0.2501

    def test_tokens_at_fewer_bits_are_a_share_of_the_context(self) -> None:
        graded = TierCondition("g", 0.25, tiers={"bits": 4}, quantized=0.2)
        assert graded.settings(1234) == Tiers(bits=4, quantized=246)
        assert TIERS.settings(1234) == Tiers(page_size=8)
        assert TierCondition("memdecay", 0.25).settings(1234) is None
        # They read an episode in a session of their own.
        assert graded.reading != replace(graded, quantized=0.3).reading

    def test_rows_that_exist_stay_valid(self) -> None:
        """What committed rows say of their condition is what it says of itself now."""
        runs = Path(__file__).parents[2] / "docs" / "results" / "runs"
        keys = set()
        for path in sorted(runs.glob("*/tiers/*.parquet")):
            columns = ["tier", "policy", "condition", "budget"]
            for row in pq.read_table(path, columns=columns).to_pylist():
                if row["policy"] != "quantized-cache":  # a peer's
                    keys.add(tuple(row[name] for name in columns))
        assert len(keys) > 10
        for tier, name, condition, share in keys:
            known = [
                one
                for one in tier_conditions(tier)
                if (one.name, one.share) == (name, share)
                and condition in (one.to_json(), replace(one, pins=True).to_json())
            ]
            assert len(known) == 1, (tier, name, share, condition)


class TestARun:
    def test_rows_say_what_was_kept_and_where_the_rest_is(
        self, tmp_path: Path, setting: Setting
    ) -> None:
        told: list[float] = []
        chosen = [one for one in tier_conditions("short") if not one.seed]
        setting = replace(setting, scenarios=setting.scenarios[:1])  # type: ignore[index]
        folder, notes = run_tiers(
            setting,
            profiles(tmp_path),
            Here(),
            conditions=chosen,
            advance=lambda _, share: told.append(share),
        )
        assert (folder, notes) == (tmp_path / "runs" / "own" / "tiers", [])
        assert sum(told) == pytest.approx(1)
        assert [path.name for path in folder.iterdir()] == ["mill-0.parquet"]
        rows = table(folder / "mill-0.parquet")
        assert len(rows) == 4 * len(chosen) == 4 * 9
        assert [*rows[0]] == TIER_SCHEMA.names
        coded = [row for row in rows if "-int4" in row["policy"]]
        graded = [row for row in rows if "-graded" in row["policy"]]
        rows = [row for row in rows if row not in coded + graded]
        per_token = {row["resident_bytes"] / row["kept_tokens"] for row in rows}
        assert len(per_token) == 1  # keys and values of a token take what they take
        for row in rows:
            seq_len = row["seq_len"]
            assert row["budget_tokens"] == int(row["budget"] * seq_len)
            assert 0 < row["kept_tokens"] <= row["budget_tokens"]
            if row["policy"] == "full":
                assert row["kept_tokens"] == seq_len
            tiered = "tiers" in row["policy"]
            assert (row["outside_tokens"] > 0) == (row["outside_bytes"] > 0) == tiered
            assert (row["came_back"] > 0) == (row["summary_bytes"] > 0) == tiered
            assert row["gold_logprob"] < 0 and row["group"] == "tiers"
        [of_a_token] = per_token
        for row in coded:
            assert row["kept_tokens"] <= row["budget_tokens"] == row["seq_len"] // 8
            # Nothing is gone, and the rest takes much less than it would.
            assert row["kept_tokens"] + row["coded_tokens"] == row["seq_len"]
            if row["policy"] == "memdecay-tiers-int4":
                assert row["outside_tokens"] == row["came_back"] == 0
            share = row["resident_bytes"] / (of_a_token * row["seq_len"])
            assert 1 / 8 < share < 3 / 8
        assert {row["policy"] for row in graded} == {
            "memdecay-tiers-graded",
            "memdecay-tiers-graded-bytes",
        }
        for row in graded:
            seq_len, same_bytes = row["seq_len"], row["policy"].endswith("-bytes")
            more = int((0.13 if same_bytes else 0.25) * seq_len)
            assert 0 < row["kept_tokens"] <= row["budget_tokens"]
            assert row["coded_tokens"] > 0
            assert row["kept_tokens"] + row["coded_tokens"] <= row["budget_tokens"] + more
            assert row["outside_tokens"] > 0 and row["came_back"] > 0

    def test_a_run_goes_on_where_it_was_ended(self, tmp_path: Path, setting: Setting) -> None:
        runs, one = profiles(tmp_path), [TIERS]
        with pytest.raises(KeyboardInterrupt):
            run_tiers(setting, runs, Counted(1), conditions=one)
        first = rows_path(runs / "own", "mill-0").read_bytes()
        again = Counted()
        run_tiers(setting, runs, again, conditions=one)
        assert [task.episode.name for task in again.tasks] == ["ferry-0"]
        assert rows_path(runs / "own", "mill-0").read_bytes() == first
        more = Counted()
        run_tiers(setting, runs, more, conditions=[TIERS, TierCondition("memdecay", 0.25)])
        assert [[c.name for c in task.conditions] for task in more.tasks] == [["memdecay"]] * 2
        rows = table(rows_path(runs / "own", "mill-0"))
        assert [row["policy"] for row in rows] == ["memdecay-tiers"] * 4 + ["memdecay"] * 4
        nothing = Counted()
        run_tiers(setting, runs, nothing, conditions=one)
        assert nothing.tasks == []

    def test_pins_that_do_not_fit_are_a_note(self, tmp_path: Path, setting: Setting) -> None:
        tiny = TierCondition("memdecay", 0.01)
        folder, notes = run_tiers(setting, profiles(tmp_path), Here(), conditions=[tiny, TIERS])
        assert len(notes) == 2 and notes[0].startswith("mill-0 has no memdecay at 1.0%: ")
        assert {row["policy"] for row in table(folder / "mill-0.parquet")} == {"memdecay-tiers"}

    def test_profiles_must_be_there_with_heads(self, tmp_path: Path, setting: Setting) -> None:
        with pytest.raises(StudyError, match=r"mill.yaml' is missing, but tiers need a profile"):
            run_tiers(setting, tmp_path / "runs", Here())
        runs = profiles(tmp_path, Profile.default())
        with pytest.raises(StudyError, match=r"mill.yaml' has no evidence heads for recall"):
            run_tiers(setting, runs, Here())
        assert not (runs / "own" / "tiers").exists()

    def test_another_text_is_refused(self, tmp_path: Path, setting: Setting) -> None:
        runs = profiles(tmp_path)
        run_tiers(setting, runs, Here(), conditions=[TIERS])
        mill = Path(setting.scenarios[0])  # type: ignore[index]
        mill.write_text(mill.read_text("utf-8").replace("Be brief", "Be short"), "utf-8")
        with pytest.raises(StudyError, match="another text of episode 'mill-0'"):
            run_tiers(setting, runs, Here(), conditions=[TIERS])


class TestAQuestion:
    @pytest.fixture
    def recording(self, tmp_path: Path) -> Recording:
        return recorded(tmp_path)

    def session(self, recording: Recording, condition: TierCondition = TIERS) -> Session:
        return tier_play.read(*small("llama"), recording, condition, PROFILE, 8)

    @torch.no_grad()
    def test_the_whole_cache_answers_as_the_model_does(self, recording: Recording) -> None:
        """The log-probability is that of one forward over all that was read."""
        model, _ = small("llama")
        full = TierCondition("full", 1.0, policy="full")
        probe = recording.probes[1]
        with self.session(recording, full) as session:
            found = tier_play.ask(session, recording, probe, full, None)
            after = session.conversation.copy()
            asked = after.append([{"role": "user", "content": probe.fact.question}]).ids
            ids = [*session._ids, *asked, *after.generation_prompt().ids, *probe.gold]
        out = model(torch.tensor([ids])).logits[0, -len(probe.gold) - 1 : -1]
        gold = out.log_softmax(-1)[torch.arange(len(probe.gold)), probe.gold].sum()
        assert found["gold_logprob"] == pytest.approx(float(gold), abs=1e-3)
        assert found["kept_tokens"] == recording.seq_len
        # Greedy, and the context is the recording's, but for what closes its last thought.
        shared = recording.tape.ids[:-8]
        assert ids[: len(shared)] == shared

    def test_asking_changes_nothing(self, recording: Recording) -> None:
        with self.session(recording) as session:
            before = session.report()
            ones = [tier_play.ask(session, recording, one, TIERS, None) for one in recording.probes]
            assert session.report() == before
            again = [
                tier_play.ask(session, recording, one, TIERS, None) for one in recording.probes
            ]
            assert ones == again
            # The session reads within its budget from the first token.
            assert before.peak_resident_tokens <= before.budget_tokens == recording.seq_len // 4

    def test_an_oracle_brings_back_what_is_attended_to(self, recording: Recording) -> None:
        model, _ = small("llama")
        probe = recording.probes[2]
        oracle = replace(TIERS, name="memdecay-tiers-oracle", choice="oracle")
        masses = {probe.fact.region: question_mass(model, recording, probe)}
        order = tier_play._order(oracle, recording, probe, masses)
        assert order is not None
        pages = [*range(0, recording.seq_len // 8 + 3)]
        sums = [float(masses[probe.fact.region][8 * page : 8 * page + 8].sum()) for page in pages]
        got = [sums[page] for page in order(torch.zeros(0), pages)]
        assert got == sorted(sums, reverse=True)
        assert [*order(torch.zeros(0), [pages[-1], pages[0]])] == [pages[0], pages[-1]]

    def test_the_choice_decides_what_comes_back(self, recording: Recording) -> None:
        probe = recording.probes[0]
        with self.session(recording) as session:
            outside = session.report().tiers
            assert outside is not None and outside.tokens["host"] > 64
            kept = {}
            for seed in (0, 1):
                one = replace(TIERS, choice="random", seed=seed)
                order = tier_play._order(one, recording, probe, {})
                kept[seed] = tier_play.ask(session, recording, probe, one, order)["keep_digest"]
            asked = tier_play.ask(session, recording, probe, TIERS, None)["keep_digest"]
            assert len({asked, *kept.values()}) == 3
            # A copy's choice is its own.
            assert session._memory.outside.order is None  # type: ignore[union-attr]

    def test_context_never_takes_the_room_of_the_answer(
        self, recording: Recording, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A memory that leaves no room free is held to the budget all the same."""
        from memdecay.tiers.memory import TieredMemory

        exchange, kept = TieredMemory.exchange, tier_play._kept

        def greedy(self: TieredMemory, queries: Any, *, room: int, **more: Any) -> None:
            exchange(self, queries, room=0, **more)

        counts = []
        monkeypatch.setattr(TieredMemory, "exchange", greedy)
        monkeypatch.setattr(
            tier_play, "_kept", lambda *args: counts.append(len(kept(*args))) or kept(*args)
        )
        monkeypatch.setattr(answers, "MAX_NEW_TOKENS", 40)
        with self.session(recording) as session:
            for probe in recording.probes:
                found = tier_play.ask(session, recording, probe, TIERS, None)
                assert 0 < found["kept_tokens"] <= recording.seq_len // 4
            assert max(counts) > recording.seq_len // 4
