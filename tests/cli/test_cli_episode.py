from __future__ import annotations

import pytest

from memdecay.cli._episode import find_gold, load_episode


@pytest.mark.parametrize(
    ("answer", "gold", "found"),
    [
        ("It is Marta Vance.", "Marta Vance", "Marta Vance"),
        ("it is MARTA  vance", "Marta Vance", "MARTA  vance"),
        ("Marta\nVance", "Marta Vance", "Marta\nVance"),
        ("Marta Vancelot", "Marta Vance", None),
        ("Samarta Vance", "Marta Vance", None),
        ("Marta or Vance", "Marta Vance", None),
        ("", "Marta Vance", None),
        ("the level is 2.31.", "2.31", "2.31"),
        ("2.31 m", "2.31", "2.31"),
        ("(2.31)", "2.31", "2.31"),
        ("12.31", "2.31", None),
        ("2.315", "2.31", None),
        ("2x31", "2.31", None),
        ("2.31.4", "2.31", None),
        ("1,2.31", "2.31", None),
        ("2.31, unchanged", "2.31", "2.31"),
    ],
)
def test_gold_is_found_as_whole_words(answer: str, gold: str, found: str | None) -> None:
    at = find_gold(answer, gold)
    assert (answer[at[0] : at[1]] if at else None) == found


def text_of(message: dict[str, object]) -> str:
    content = message["content"]
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content)  # type: ignore[attr-defined]


def test_every_fact_is_planted_once_and_where_the_probe_says() -> None:
    episode = load_episode()
    roles = {
        "system text": ("system", 0),
        "first user turn": ("user", 1),
        "tool output": ("tool", 3),
        "retrieved document": ("tool", 5),
        "the agent's last answer": ("assistant", len(episode.messages) - 1),
    }
    assert {probe.where for probe in episode.probes} == set(roles)
    for probe in episode.probes:
        role, index = roles[probe.where]
        assert episode.messages[index]["role"] == role
        assert find_gold(text_of(dict(episode.messages[index])), probe.gold)
        assert not find_gold(probe.question, probe.gold)
    # Wednesday stands in the forecast too: the last answer draws on it.
    for probe in episode.probes[:-1]:
        holding = [m for m in episode.messages if find_gold(text_of(dict(m)), probe.gold)]
        assert len(holding) == 1, probe.gold


def test_the_document_comes_from_a_declared_retriever() -> None:
    episode = load_episode()
    assert episode.messages[5]["name"] in episode.retrievers


def test_the_text_does_not_repeat_itself() -> None:
    words = " ".join(text_of(dict(m)) for m in load_episode().messages).split()
    runs = [tuple(words[i : i + 7]) for i in range(len(words) - 6)]
    assert len(runs) == len(set(runs))
    assert 550 < len(words) < 900
