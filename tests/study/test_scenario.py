"""Scenarios: what a file may say, what is refused and how, and that the built-in ones are fair."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest

from memdecay.errors import StudyError
from memdecay.prompt import Conversation
from memdecay.study.recording import _find
from memdecay.study.scenario import (
    FACT_REGIONS,
    Episode,
    builtin_scenarios,
    find_gold,
    load_episodes,
    load_scenario,
)
from prompt.prompt_models import real_tokenizer
from study.study_tiny import SCENARIO, changed, two_scenarios, write_scenario

DRYER = "The dryer stands in <<retrieval>>."


class TestReading:
    def test_three_variants_of_each_tier(self, tmp_path: Path) -> None:
        text = changed({}) + SCENARIO[SCENARIO.index("short:") :].replace("short:", "long:", 1)
        (tmp_path / "both.yaml").write_text(text)
        found = load_scenario(tmp_path / "both.yaml")
        assert [(one.tier, one.variant) for one in found] == [
            (tier, variant) for tier in ("short", "long") for variant in range(3)
        ]

    def test_blocks_are_stages_in_the_variants_order(self, tmp_path: Path) -> None:
        for episode, order in zip(
            load_scenario(write_scenario(tmp_path / "mill.yaml")),
            (("oak", "knots", "Dry"), ("Dry", "oak", "knots"), ("knots", "Dry", "oak")),
            strict=True,
        ):
            assert len(episode.stages) == 4
            assert [message["role"] for message in episode.stages[0]] == [
                "system", "user", "assistant",
            ]  # fmt: skip
            for stage, word in zip(episode.stages[1:], order, strict=True):
                assert any(word in message["content"] for message in stage)
            assert episode.closing == "So far I know that"

    def test_values_are_filled_in_everywhere(self, tmp_path: Path) -> None:
        changes = {
            "shelf: oak": 'shelf: "<<day>>", deep: [{on: "<<day>>"}, 3]',
            "So far I know": "On <<day>> I know",
            "Who fetches the planks?": "Who fetches the planks on <<day>>?",
        }
        friday = load_scenario(write_scenario(tmp_path / "m.yaml", changes))[1]
        [call] = [
            call
            for message in friday.messages
            for call in message.get("tool_calls", ())
            if call["function"]["name"] == "stock"
        ]
        assert call["function"]["arguments"] == {"shelf": "Friday", "deep": [{"on": "Friday"}, 3]}
        assert friday.closing.startswith("On Friday I know")
        assert "We need planks by Friday." in friday.messages[1]["content"]
        assert friday.facts[1].question == (
            "Who fetches the planks on Friday? Answer with the value only."
        )
        assert [fact.value for fact in friday.facts] == ["P2-88", "Bruno", "9920F", "Braga"]

    def test_regions_and_calls(self, tmp_path: Path) -> None:
        episode = load_scenario(write_scenario(tmp_path / "mill.yaml"))[0]
        regions = [message.get("region") for message in episode.messages]
        assert regions == [
            None, None, "plan", None, "tool_out", None, "scratchpad", None, "retrieval",
        ]  # fmt: skip
        ids = [m["tool_call_id"] for m in episode.messages if m["role"] == "tool"]
        calls = [c["id"] for m in episode.messages for c in m.get("tool_calls", ())]
        assert ids == calls and len(set(ids)) == 2


@pytest.mark.parametrize(
    ("answer", "gold", "found"),
    [
        ("It is K7-41.", "K7-41", True),
        ("it is k7-41", "K7-41", True),
        ("the  old\nmill road", "old mill", True),
        ("XK7-41", "K7-41", False),
        ("K7-410", "K7-41", False),
        ("it is 2.31.", "2.31", True),
        ("12.31", "2.31", False),
        ("2.315", "2.31", False),
        ("2.31.4", "2.31", False),
        ("1,200", "200", False),
        ("200,5", "200", False),
        ("(200)", "200", True),
        ("Inessa", "Ines", False),
        ("", "Ines", False),
    ],
)
def test_gold_is_found_as_whole_words(answer: str, gold: str, found: bool) -> None:
    span = find_gold(answer, gold)
    assert (span is not None) == found
    if span is not None:
        assert " ".join(answer[slice(*span)].split()).lower() == gold.lower()


# Every one is one sentence that names the file, and where it can the tier, variant and fact.
WHERE = "(short tier, variant {})"
MISTAKES = {
    "the value is missing": (
        {"My cousin <<user>> fetches": "My cousin fetches"},
        (WHERE.format(0), "'Ines' once, in its user text, but it is missing from the text"),
    ),
    "it is in another region": (
        {DRYER: "It is far.", "And no knots": "The dryer is in <<retrieval>>. No knots"},
        (WHERE.format(0), "'Lorca' once, in its retrieval text, but it is in user"),
    ),
    "it is there twice": (
        {DRYER: DRYER + " Yes, <<retrieval>>!"},
        (WHERE.format(0), "'Lorca' once, in its retrieval text, but it is in retrieval and retr"),
    ),
    "the closing gives it away": (
        {"So far I know that": "So far I know <<tool_out>>"},
        (WHERE.format(0), "'4471B' once, in its tool_out text, but it is in tool_out and closing"),
    ),
    "a call gives it away": (
        {"shelf: oak": 'shelf: "<<tool_out>>"'},
        (WHERE.format(0), "'4471B' once, in its tool_out text, but it is in tool_in and tool_out"),
    ),
    "a question gives it away in one variant": (
        {"Which lot is the oak?": "Which lot did Bruno see?"},
        (WHERE.format(1), "'Bruno' once", "and the question about tool_out"),
    ),
    "two facts have one value": (
        {"[Lorca, Braga, Teruel]": "[Lorca, BRUNO, Teruel]"},
        (WHERE.format(1), "'Bruno' for user and 'BRUNO' for retrieval"),
    ),
    "one value contains another": (
        {"[Lorca, Braga, Teruel]": "[Lorca, Braga, Saint Oskar]"},
        (WHERE.format(2), "'Oskar' for user and 'Saint Oskar' for retrieval"),
    ),
    "an unknown placeholder": (
        {"no knots, please": "no knots by <<daay>>"},
        (WHERE.format(0), "<<daay>> in its text", "system, user, tool_out, retrieval, day"),
    ),
    "a placeholder with a space": (
        {"no knots, please": "no knots by << day>>"},
        (WHERE.format(0), "<< day>> in its text"),
    ),
    "a question with a fact's placeholder": (
        {"Who fetches the planks?": "Who fetches lot <<tool_out>>?"},
        (WHERE.format(0), "<<tool_out>> in a question", "must be one of day"),
    ),
    "an order that leaves a block out": (
        {"[document, tool_a, followup]": "[document, tool_a]"},
        (WHERE.format(1), "the order document, tool_a, but", "tool_a, followup, document"),
    ),
    "an order with a block twice": (
        {"[document, tool_a, followup]": "[document, tool_a, tool_a]"},
        (WHERE.format(1), "the order document, tool_a, tool_a, but"),
    ),
    "two orders only": (
        {"    - [followup, document, tool_a]\n": ""},
        ("short.orders", "at least 3 items"),
    ),
    "two values only": (
        {"[Ines, Bruno, Oskar]": "[Ines, Bruno]"},
        ("facts.user.values", "at least 3 items"),
    ),
    "a value that YAML reads as a number": (
        {"[4471B, 9920F, 3018C]": "[4471, 9920, 3018]"},
        ("facts.tool_out.values.0", "valid string"),
    ),
    "an argument that is not JSON": (
        {"shelf: oak": "shelf: oak, since: 2024-05-01"},
        ("arguments", "valid"),
    ),
    "an unknown key": ({"trade: a saw mill": "trade: a mill\nregion: 3"}, ("region", "not perm")),
    "an unknown kind": ({"kind: code": "kind: number"}, ("facts.system.kind", "'code' or 'nat")),
    "a name with a slash": ({"name: mill": "name: ../mill"}, ("name", "pattern")),
    "no facts": ({"facts:": "fact:"}, ("facts", "required")),
    "two kinds in one message": (
        {'- user: "And no knots, please."': '- {user: "No knots.", thought: "None."}'},
        (WHERE.format(0), "a message with user, thought, but one message has system, user"),
    ),
    "a result of no tool": (
        {"dry; pine 10, wet\", tool: stock}": "dry\"}"},
        (WHERE.format(0), "a message with result, but"),
    ),
    "an empty message": ({'- user: "And no knots, please."': "- {}"}, ("a message with nothing",)),
    "not YAML": ({"  blocks:": "  blocks: ]["}, ("is not YAML at line 15",)),
    "the same key twice": ({"trade:": "name: other\ntrade:"}, ("is not YAML at line 2",)),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence(tmp_path: Path, mistake: str) -> None:
    changes, parts = MISTAKES[mistake]
    path = write_scenario(tmp_path / "wrong.yaml", changes)
    with pytest.raises(StudyError) as caught:
        load_scenario(path)
    said = str(caught.value)
    for part in (path, *parts):
        assert part in said
    assert said.endswith(".") and "\n" not in said and ". " not in said.replace(path, "")


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("none.yaml", None, "it must be a YAML file or one of archive, bakery"),
        ("folder.yaml", "", "Is a directory"),
        ("~nosuchuser/mill.yaml", None, "it must be a YAML file or one of"),
        ("empty.yaml", b"", "the file: Input should be a valid dictionary"),
        ("list.yaml", b"- 1\n", "the file: Input should be a valid dictionary"),
        ("latin.yaml", b"name: \xe9t\xe9\n", "it is not UTF-8 text"),
        ("zero.yaml", b"name: \x00\n", "is not YAML"),
        ("mil", None, "it must be a YAML file or one of"),
    ],
)
def test_a_file_that_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes | None, part: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if name == "folder.yaml":
        Path(name).mkdir()
    elif content is not None:
        Path(name).write_bytes(content)
    with pytest.raises(StudyError) as caught:
        load_scenario(name)
    assert part in str(caught.value) and name in str(caught.value)
    assert str(caught.value).count("\n") == 0


class TestEpisodes:
    def test_a_tier_that_is_not_there(self, tmp_path: Path) -> None:
        path = write_scenario(tmp_path / "mill.yaml")
        with pytest.raises(StudyError, match="but it has no long tier"):
            load_episodes("long", [path])
        with pytest.raises(StudyError, match="tier is 'middle', but it must be one of short, long"):
            load_episodes("middle", [path])

    def test_two_scenarios_of_one_name(self, tmp_path: Path) -> None:
        mill, ferry = two_scenarios(tmp_path)
        again = write_scenario(tmp_path / "again.yaml")
        assert len(load_episodes("short", [mill, ferry])) == 6
        with pytest.raises(StudyError, match="Two scenarios are named 'mill'"):
            load_episodes("short", [mill, ferry, again])


@pytest.mark.parametrize(("tier", "stages"), [("short", 5), ("long", 8)])
class TestBuiltIn:
    def test_eight_trades_in_three_variants(self, tier: str, stages: int) -> None:
        found = load_episodes(tier)
        assert len(builtin_scenarios()) == 8 and len(found) == 24
        assert [one.name for one in found] == [
            f"{name}-{variant}" for name in builtin_scenarios() for variant in range(3)
        ]
        assert {len(one.stages) for one in found} == {stages}

    def test_half_of_the_facts_of_each_region_are_codes(self, tier: str, stages: int) -> None:
        found = load_episodes(tier)[::3]
        for number, region in enumerate(FACT_REGIONS):
            kinds = [one.facts[number].kind for one in found]
            assert {one.facts[number].region for one in found} == {region}
            assert sorted(kinds) == ["code"] * 4 + ["natural"] * 4

    def test_orders_differ_between_variants(self, tier: str, stages: int) -> None:
        found = load_episodes(tier)
        for start in range(0, 24, 3):
            for one, other in combinations(found[start : start + 3], 2):
                assert _order(one) != _order(other), one.name
                assert [_shape(stage) for stage in one.stages[:1]] == [
                    _shape(stage) for stage in other.stages[:1]
                ]

    def test_values_are_the_same_in_both_tiers_and_differ_between_variants(
        self, tier: str, stages: int
    ) -> None:
        here, there = load_episodes(tier), load_episodes("long" if tier == "short" else "short")
        for one, other in zip(here, there, strict=True):
            assert one.facts == other.facts
        for start in range(0, 24, 3):
            for number in range(4):
                assert len({one.facts[number].value for one in here[start : start + 3]}) == 3

    def test_tokens_are_those_of_the_paper(self, tier: str, stages: int) -> None:
        tokenizer = real_tokenizer("qwen2.5-coder-0.5b")
        if tokenizer is None:
            pytest.skip("Qwen2.5-Coder is not on this machine")
        low, high = {"short": (405, 507), "long": (1656, 1723)}[tier]
        for episode in load_episodes(tier):
            conversation = Conversation(tokenizer)
            read = [conversation.append(stage) for stage in episode.stages]
            read.append(conversation.generation_prompt())
            ids = [token for part in read for token in part.ids]
            regions = [name for part in read for name in part.regions]
            seed = tokenizer(episode.closing, add_special_tokens=False)["input_ids"]
            ids, regions = ids + seed, regions + ["scratchpad"] * len(seed)
            assert low <= len(ids) <= high, (episode.name, len(ids))
            for fact in episode.facts:
                start, end = _find(tokenizer, ids, fact.value)
                assert fact.region in regions[start:end], (episode.name, fact.value)
                assert find_gold(tokenizer.decode(ids[start:end]), fact.value)
                assert end - start <= 12


def _shape(stage: tuple[dict[str, object], ...]) -> list[object]:
    return [(message["role"], message.get("region")) for message in stage]


def _order(episode: Episode) -> list[str]:
    """Which block is where, by what does not depend on the values."""
    return [
        "|".join(
            f"{message['role']}:{[c['function']['name'] for c in message.get('tool_calls', ())]}"
            for message in stage
        )
        for stage in episode.stages
    ]
