from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from memdecay.cli._timeline import Timeline
from memdecay.errors import SessionError

GOOD: dict[str, Any] = {
    "page_size": 16,
    "regions": ["system", "user"],
    "pages": [
        {"page": 0, "region": "system", "tokens": 16, "born": 0, "evicted": None, "pinned": True},
        {
            "page": 1,
            "region": "user",
            "tokens": 9,
            "born": 0,
            "evicted": 2,
            "pinned": False,
            "moves": [[2, "quantized"], [2, "disk"]],
        },
    ],
    "events": [
        {"index": 0, "step": 0.0, "seen": 25, "kept": 25, "turn": 0, "kind": "prefill"},
        {"index": 1, "step": 1, "seen": 26, "kept": 26, "turn": 0, "kind": "decode"},
        {"index": 2, "step": 1, "seen": 26, "kept": 17, "turn": 0, "kind": "evict"},
    ],
    "scores": [{"event": 1, "page_scores": {0: 1.0, 1: 0.25}, "refreshed": [1]}],
}


def test_a_timeline_is_read_the_same_from_a_session_and_from_its_json() -> None:
    timeline = Timeline.parse(GOOD)
    assert timeline == Timeline.parse(json.loads(json.dumps(GOOD)))
    assert timeline.pages[1].evicted == 2 and timeline.pages[0].evicted is None
    assert timeline.pages[0].moves == () and timeline.pages[1].moves[1] == (2, "disk")
    assert timeline.scores[0].page_scores == {0: 1.0, 1: 0.25}
    assert [event.kind for event in timeline.events] == ["prefill", "decode", "evict"]


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (("page_size",), 0, "timeline.page_size"),
        (("page_size",), True, "timeline.page_size"),
        (("regions",), None, "timeline.regions"),
        (("events", 1, "kind"), "sleep", "timeline.events[1].kind"),
        (("events", 1, "index"), 7, "timeline.events[1].index"),
        (("events", 0, "step"), float("nan"), "timeline.events[0].step"),
        (("events", 0), [], "timeline.events[0]"),
        (("pages", 1, "born"), 3, "timeline.pages[1].born"),
        (("pages", 1, "born"), -1, "timeline.pages[1].born"),
        (("pages", 1, "evicted"), 99, "timeline.pages[1].evicted"),
        (("pages", 0, "region"), "plan", "timeline.pages[0].region"),
        (("pages", 0, "tokens"), "16", "timeline.pages[0].tokens"),
        (("pages", 1, "moves"), 3, "timeline.pages[1].moves"),
        (("pages", 1, "moves", 1), [2, "cellar"], "timeline.pages[1].moves[1]"),
        (("pages", 1, "moves", 1), [1, "disk"], "timeline.pages[1].moves[1].event"),
        (("pages", 1, "moves", 0), [3, "host"], "timeline.pages[1].moves[0].event"),
        (("scores", 0, "event"), 3, "timeline.scores[0].event"),
        (("scores", 0, "page_scores"), {"x": 0.5}, "timeline.scores[0].page_scores"),
        (("scores", 0, "page_scores"), {0: 1.5}, "timeline.scores[0].page_scores[0]"),
        (("scores", 0, "page_scores"), {0: float("nan")}, "timeline.scores[0].page_scores[0]"),
        (("scores", 0, "refreshed"), [None], "timeline.scores[0].refreshed"),
    ],
)
def test_a_wrong_field_is_named_with_its_place(path: Any, value: Any, named: str) -> None:
    broken = copy.deepcopy(GOOD)
    target: Any = broken
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    with pytest.raises(SessionError) as caught:
        Timeline.parse(broken)
    assert str(caught.value).startswith(named + " is ")


def test_a_page_evicted_before_it_came_is_refused() -> None:
    broken = copy.deepcopy(GOOD)
    broken["pages"][1] |= {"born": 2, "evicted": 1}
    with pytest.raises(SessionError, match=r"pages\[1\].evicted is 1"):
        Timeline.parse(broken)


def test_score_samples_must_be_in_order() -> None:
    broken = copy.deepcopy(GOOD)
    broken["scores"].append({"event": 0, "page_scores": {}, "refreshed": []})
    with pytest.raises(SessionError, match=r"scores\[1\].event is 0"):
        Timeline.parse(broken)
