"""The report: what it says of a made-up study whose truth is known, and what it refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from memdecay.errors import StudyError
from memdecay.study import figures, tables, verdict
from memdecay.study.document import Cell, Section, Table, html_text, inline, interval, markdown
from memdecay.study.document import number as shown
from memdecay.study.findings import Findings, base_value, parameters, weigh
from memdecay.study.report import build, find_runs, sections
from study.study_rows import condition_rows, full, made_curves, newest, ours, study, write_run


@pytest.fixture(scope="module")
def findings() -> Findings:
    return weigh(study(), curves=made_curves(), overhead={"evict_ms": 1.25, "threads": 1})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "toy-short"
    write_run(folder, study())
    (folder / "curves").mkdir()
    for curve in made_curves():
        curve.save(folder / "curves" / f"{curve.name}.parquet")
    return folder


@pytest.fixture(scope="module")
def files(run: Path) -> dict[str, str]:
    return build([run])[1]


def texts(table: Table, first: str) -> list[str]:
    """Return the texts of the row that starts with this."""
    found = [[c.text if isinstance(c, Cell) else c for c in row] for row in table.rows]
    (row,) = [row for row in found if row[0] == first]
    return row


class TestVerdict:
    def test_wins_ties_and_losses_are_those_of_the_rules(self, findings: Findings) -> None:
        summary, half, quarter = verdict.paragraphs(findings)
        assert "0.22 [0.22, 0.22] of the probes outside the system region" in summary
        assert "24 of 24 in it" in summary and "(the full cache: 1.00)" in summary
        assert "0 wins, 0 ties, 2 losses outside" in summary
        assert "behind `kvpress:kvzip` (−0.78 [−0.78, −0.78]) and `kvpress:snapkv`" in half
        assert "ahead of `h2o` (+0.50 [" in half  # in the system region
        assert "Of 2 peers it is level with `kvpress:kvzip` and `kvpress:snapkv`; by the" in half
        assert "ahead of `kvpress:snapkv`" not in half and "level with `random`" not in quarter
        assert "**`retrieval` facts at 50%:** 0.67 [0.67, 0.67]. 4 wins, 0 ties, 2 losses" in half

    def test_a_tie_is_an_interval_with_zero_in_it(self) -> None:
        rows = pd.concat(
            [
                condition_rows("memdecay-paper", lambda i, v, r, b, s: i % 2 == 0),
                condition_rows("h2o", lambda i, v, r, b, s: i % 2 == 1),
                condition_rows("streaming", lambda i, v, r, b, s: False),
                # better in three and in four of eight scenarios, worse in none
                condition_rows("kvpress:three", lambda i, v, r, b, s: i != 3, group="peer"),
                condition_rows("kvpress:four", full, group="peer"),
            ]
        )
        one = weigh(rows)
        results = {
            name: tables.outcome(one.difference(name, 0.5, "non_system"))
            for name in ("h2o", "streaming", "kvpress:three", "kvpress:four")
        }
        assert list(results.values()) == ["tie", "win", "tie", "loss"]

    def test_log_probabilities_are_counted_beside_recall(self) -> None:
        rows = pd.concat(
            [
                condition_rows("memdecay-paper", newest, gold_logprob=-2.0),
                condition_rows("kvpress:a", newest, group="peer", gold_logprob=-1.0),
                condition_rows("kvpress:b", newest, group="peer", gold_logprob=-3.0),
                condition_rows("openvino:c", newest, group="peer", gold_logprob=float("nan")),
            ]
        )
        one = weigh(rows)
        _, half, _ = verdict.paragraphs(one)
        assert "Of 3 peers it is level with `kvpress:a`, `kvpress:b` and `openvino:c`" in half
        assert "by the log-probability of the gold answer, 1 win, 0 ties, 1 loss." in half
        assert verdict.counts([one], "peer").rows[0][3] == Cell("0 / 3 / 0", 0)
        assert verdict.counts([one], "peer", "logprob").rows[0][3] == Cell("1 / 0 / 1", 0)

    def test_one_scenario_says_that_it_has_no_interval(self) -> None:
        parts = [
            condition_rows(name, rule, scenarios=("clinic",))
            for name, rule in (("memdecay-paper", newest), ("h2o", full))
        ]
        summary, half, _ = verdict.paragraphs(weigh(pd.concat(parts)))
        assert "One scenario has no interval" in summary and "level with `h2o`" in half

    def test_checks_and_those_who_saw_the_question_are_no_rivals(self) -> None:
        rows = pd.concat(
            [
                condition_rows("memdecay-paper", ours),
                condition_rows("kvpress:none", full, group="peer", budgets=(1.0,)),
                condition_rows("openvino:question_seen", full, group="peer"),
                condition_rows("kvpress:knorm", newest, group="peer"),
            ]
        )
        assert verdict.rivals(weigh(rows), "peer") == ["kvpress:knorm"]

    def test_the_counts_of_all_settings(self, findings: Findings) -> None:
        _, standing, counted, lines = verdict.headline([findings, findings])
        assert "2 settings" in counted
        assert (
            "outside the instructions: at 50% 0.22 [0.22, 0.22], instructions 24 of 24;" in standing
        )
        assert "**Against 2 peers:** at 50% 0 wins, 0 ties, 4 losses outside" in lines
        half, quarter = verdict.counts([findings], "paper").rows
        # outside at a half: behind random and h2o (both a third), ahead of streaming (a ninth)
        assert [c.text[0::4] for c in half[3:]] == ["102", "300", "012", "012", "300"]
        assert [c.text[0::4] for c in quarter[3:]] == ["012", "300", "012", "021", "021"]

    def test_without_the_policy_there_is_nothing_to_say(self) -> None:
        one = weigh(condition_rows("h2o", ours))
        assert "no rows of `memdecay-paper`" in verdict.paragraphs(one)[0]
        assert "nothing yet" in verdict.headline([one])[-1]
        assert sections(one)

    def test_where_the_full_cache_cannot_answer_nothing_is_counted(self) -> None:
        rows = pd.concat(
            [
                condition_rows("full", newest, budgets=(1.0,)),
                condition_rows("memdecay-paper", ours),
                condition_rows("h2o", newest),
            ]
        )
        one = weigh(rows)
        assert not verdict.answerable(one)
        assert "recall says little here" in verdict.paragraphs(one)[0]
        said = verdict.headline([one])
        assert "toy-short" in said[2] and "nothing yet" in said[-1]

    def test_groups_that_were_not_run_are_named(self, findings: Findings) -> None:
        assert tables.groups_not_run(findings) == ""
        bare = weigh(condition_rows("memdecay-paper", ours))
        assert tables.groups_not_run(bare).startswith("No conditions were run of: policy, control")


class TestTables:
    def test_recall_by_region(self, findings: Findings) -> None:
        table = tables.recall(findings, 0.5, ("paper",), "Recall")
        assert [row[0] for row in table.rows] == [
            f"`{name}`" for name in ("full", "memdecay-paper", "h2o", "random", "streaming")
        ]
        row = texts(table, "`memdecay-paper`")
        assert row[1] == "50.0%" and row[4:8] == [
            "1.00 [1.00, 1.00]",
            "0.00 [0.00, 0.00]",
            "0.00 [0.00, 0.00]",
            "0.67 [0.67, 0.67]",
        ]
        assert row[-1] == "96" and table.strong == {1}
        assert texts(table, "`random`")[3].startswith("0.33")

    def test_peers_stand_below_the_full_cache_and_ours(self, findings: Findings) -> None:
        table = tables.recall(findings, 0.25, ("peer",), "Peers")
        assert [row[0] for row in table.rows][:2] == ["`full`", "`memdecay-paper`"]
        assert texts(table, "`kvpress:kvzip`")[1] == "35.0%"

    def test_signs_by_scenario(self, findings: Findings) -> None:
        table = tables.signs(findings, 0.5, "system", ("paper",))
        row = texts(table, "`h2o`")
        assert row[2] == "+4 / −0 / 4" and row[3] == "0.125" and row[6] == "24"
        assert texts(table, "`full`")[1] == "0.00 [0.00, 0.00]"

    def test_the_ablation_counts_rows_that_differ(self, findings: Findings) -> None:
        blocks = next(part for part in sections(findings) if part.title == "Ablation").blocks
        # without pins it loses 24 system probes a budget; at the half one 16 retrieval, and gains 8
        assert "Of 576 rows, 0 differ" in blocks[0] and "72 in the outcome" in blocks[0]
        table = blocks[1]
        assert isinstance(table, Table)
        half, quarter = [row for row in table.rows if row[0] == "`memdecay-paper[pinned=no]`"]
        assert [c.text for c in half[-2:]] == ["0 of 96", "48 of 96"]
        assert [c.text for c in quarter[-2:]] == ["0 of 96", "24 of 96"]

    def test_counts_are_the_papers(self, findings: Findings) -> None:
        table = tables.counting(findings)
        assert texts(table, "paper")[3:] == ["1,248", "1,248"]
        assert texts(table, "ablation")[3:] == ["576", "576"]

    def test_what_is_missing_is_named(self) -> None:
        rows = pd.concat(
            [
                condition_rows("memdecay-paper", ours),
                condition_rows("h2o", ours, scenarios=("bakery", "clinic"), variants=(0, 1)),
                condition_rows("kvpress:kvzip", ours, group="peer", budgets=(0.5,)),
            ]
        )
        rows = rows[(rows["scenario"] != "theatre") | (rows["variant"] != 2)]
        lines = tables.missing(weigh(rows))
        assert lines[0] == "Not run: theatre-2."
        assert lines[1].startswith("`h2o` at 25%; `h2o` at 50%: without 19 episodes (archive-0,")
        assert len(lines) == 2
        told = tables.missing(weigh(rows, about={"episodes": {"theatre-1": "", "zoo-0": ""}}))
        assert told[0] == "Not run: theatre-2, zoo-0."
        assert tables.missing(weigh(condition_rows("memdecay-paper", ours))) == []

    def test_the_packages_own_scenarios_are_all_expected(self) -> None:
        rows = condition_rows("memdecay-paper", ours, scenarios=("bakery", "clinic"), variants=(0,))
        (line,) = tables.missing(weigh(rows))
        assert line.startswith("Not run: 22 episodes (archive-0, archive-1, ")

    def test_probes_without_all_seeds_are_named(self) -> None:
        rows = condition_rows("random", ours, seeds=(0, 1, 2))
        (line,) = tables.missing(weigh(rows.iloc[1:]))
        assert line == "Not every probe has all seeds: `random` at 25%."

    def test_times_have_units(self) -> None:
        overhead = {
            "scored_step_ms": 12.345,
            "scored_over_unscored": 1.02,
            "batched_rows_per_second": 1234.5,
            "prefill_seconds": 2.0,
            "cache_tokens": 466,
            "batch_agreement": "96 of 96 answers equal",
            "nested": {"evict_ms": 1},
            "left_out": [1, 2],
        }
        table = tables.overhead(weigh(condition_rows("memdecay-paper", ours), overhead=overhead))
        assert [[c for c in row] for row in table.rows] == [
            ["scored step", "12.35", "milliseconds"],
            ["scored over unscored", "1.02", "times"],
            ["batched rows", "1234", "per second"],
            ["prefill", "2.00", "seconds"],
            ["cache tokens", "466", "tokens"],
            ["batch agreement", "96 of 96 answers equal", ""],
            ["nested: evict", "1", "milliseconds"],
        ]

    def test_half_lives(self, findings: Findings) -> None:
        table = tables.half_lives(findings)
        assert texts(table, "`system`")[1].startswith("100 [")
        assert texts(table, "`scratchpad`")[1].startswith("15.0 [")
        assert "does not occur" in texts(table, "`plan`")[-1]


class TestNames:
    def test_parameters_of_a_display_name(self) -> None:
        assert parameters("memdecay-paper[page_size=8]") == {"page_size": 8}
        assert parameters("x[a=0.5, b=yes]") == {"a": 0.5, "b": "yes"}
        assert parameters("kvpress:snapkv") == {}

    def test_the_policys_own_values(self, findings: Findings) -> None:
        names = ("page_size", "attention_weight", "refresh_threshold", "align", "pinned")
        values = [base_value(findings, name) for name in names]
        assert values == [16, 0.5, "2x", "none", "yes"]
        assert base_value(findings, "label_noise") == 0

    def test_the_order_of_a_table(self, findings: Findings) -> None:
        assert findings.members("sweep") == [
            f"memdecay-paper[{name}]"
            for name in ("clock=tokens", "observe_every=4", "page_size=8", "page_size=32")
        ]


class TestDocument:
    def test_numbers(self) -> None:
        assert shown(-0.001) == "0.00" and shown(-0.5) == "−0.50"
        assert shown(0.5, signed=True) == "+0.50" and shown(-0.0, signed=True) == "0.00"
        assert shown(float("nan")) == "–" and shown(float("inf")) == "∞"
        assert interval(0.5, float("nan"), float("nan")) == "0.50"

    def test_text_of_strangers_stays_text(self) -> None:
        assert inline("<b>`a<i>`</b>") == "&lt;b&gt;<code>a&lt;i&gt;</code>&lt;/b&gt;"
        assert html_text("- a\n- **b**") == "<ul><li>a</li><li><b>b</b></li></ul>"
        table = Table("t", ("a", "#b"), [["x|y", Cell("1", mark="loss")]])
        assert "| x\\|y | ▼ 1 |" in markdown("T", [Section("S", [table])])


class TestFiles:
    def test_a_setting_has_markdown_cells_and_a_place_on_the_page(
        self, files: dict[str, str]
    ) -> None:
        assert set(files) == {"toy-short.md", "toy-short.json", "study.html"}
        assert len(json.loads(files["toy-short.json"])) > 100
        for title in ("The answer", "Recall", "Ablation", "Sweeps", "Label noise", "Controls"):
            assert f"\n## {title}\n" in files["toy-short.md"]
            assert title == "The answer" or f">{title}</h3>" in files["study.html"]

    def test_the_same_rows_give_the_same_bytes(self, tmp_path: Path) -> None:
        rows = study()
        rows = rows[rows["scenario"].isin(["archive", "clinic"]) & (rows["group"] != "sweep")]
        write_run(tmp_path / "one", rows)
        write_run(tmp_path / "other", rows.sample(frac=1.0, random_state=1))
        assert build([tmp_path / "one"])[1] == build([tmp_path / "other"])[1]

    def test_the_page_is_whole_and_loads_nothing(self, files: dict[str, str]) -> None:
        page = files["study.html"]
        check = _Page()
        check.feed(page)
        assert check.open == []
        assert len(check.ids) == len(set(check.ids))
        assert not [link for link in check.links if not link.startswith(("#", "data:"))]
        assert {link[1:] for link in check.links if link.startswith("#")} <= set(check.ids)
        assert "@@" not in page and "@import" not in page and "url(http" not in page
        assert page.count("<svg") >= 6

    def test_pictures_take_their_ink_from_the_page(self, findings: Findings) -> None:
        for svg in (
            figures.trajectories(),
            figures.measured(findings),
            figures.recall(findings, ("paper", "peer")),
            figures.sweeps(findings) or "",
        ):
            assert "currentColor" in svg and "#010203" not in svg
            assert "#000000" not in svg and "#ffffff" not in svg
            assert "<style" not in svg and "<metadata" not in svg
        assert figures.sweeps(weigh(condition_rows("memdecay-paper", ours))) is None

    def test_the_second_figure_is_equation_four(self) -> None:
        scores = figures._scores("tool_out", 40)
        assert scores[0] == pytest.approx(0.5 + 0.5 * 0.5 / 500, abs=1e-6)
        assert scores[30] == pytest.approx(0.25 + 0.5 * 0.5 / 500, abs=1e-6)
        # four times the uniform share: (4 - 0.5) / 500 a tenth of which is new, α of 0.5
        assert scores[40] == pytest.approx(0.5 + 0.5 * (0.5 + 0.35) / 500, abs=1e-6)
        assert scores[70] == pytest.approx(0.25, abs=2e-3)


class TestFolders:
    def test_settings_are_found_and_chosen(self, run: Path, tmp_path: Path) -> None:
        assert find_runs([run]) == find_runs([run.parent]) == find_runs([run, run.parent]) == [run]
        assert find_runs([run.parent], ["toy-short"]) == [run]
        with pytest.raises(StudyError, match=r"--setting is 'toy-long', but .* one of toy-short"):
            find_runs([run.parent], ["toy-long"])
        for empty in (tmp_path, tmp_path / "nowhere"):
            with pytest.raises(StudyError, match="there are no rows in it"):
                find_runs([run, empty])

    def test_short_comes_before_long_and_small_before_large(self, tmp_path: Path) -> None:
        rows = condition_rows("memdecay-paper", ours, scenarios=("clinic",))
        names = ["qwen0.5b-short", "qwen0.5b-long", "qwen1.5b-short", "smollm2-short"]
        for name in reversed(names):
            write_run(tmp_path / name, rows)
        assert [folder.name for folder in find_runs([tmp_path])] == names

    def test_two_folders_of_one_setting_are_refused(self, run: Path, tmp_path: Path) -> None:
        rows = condition_rows("memdecay-paper", ours, scenarios=("clinic",))
        write_run(tmp_path / "toy-short", rows)
        with pytest.raises(StudyError, match="The setting 'toy-short' is in"):
            find_runs([run, tmp_path])
        write_run(tmp_path / "copy", rows)
        with pytest.raises(StudyError, match="Two folders hold rows of the setting 'toy-short'"):
            build(find_runs([tmp_path]))

    @pytest.mark.parametrize("damage", ["columns", "types", "bytes", "overhead"])
    def test_damaged_folders_are_one_sentence(self, tmp_path: Path, damage: str) -> None:
        rows = condition_rows("memdecay-paper", ours, scenarios=("clinic",), variants=(0,))
        write_run(tmp_path, rows)
        (file,) = tmp_path.glob("rows/*.parquet")
        table = pq.read_table(file)
        if damage == "columns":
            pq.write_table(table.drop_columns(["gold"]), file)
        elif damage == "types":
            index = table.column_names.index("recall")
            words = pa.array(["perhaps"] * len(table))
            pq.write_table(table.set_column(index, "recall", words), file)
        elif damage == "bytes":
            file.write_bytes(b"PAR1 but not really")
        else:
            (tmp_path / "overhead.json").write_text("{")
        with pytest.raises(StudyError) as caught:
            build([tmp_path])
        assert re.fullmatch(r"[^\n]+\.", str(caught.value))


class _Page(HTMLParser):
    """Collects ids and links, and what was opened and not closed."""

    void = frozenset({"meta", "link", "path", "rect", "use", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._attributes(attrs)
        if tag not in self.void:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._attributes(attrs)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.void:
            assert self.open.pop() == tag

    def _attributes(self, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id":
                self.ids.append(str(value))
            elif name in ("href", "src", "xlink:href"):
                self.links.append(str(value))
            else:
                self.links += _urls(str(value))


def _urls(value: str) -> Iterator[str]:
    return (found[1] for found in re.finditer(r"url\(([^)]*)\)", value))
