from __future__ import annotations

import html.parser
import json
import random
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from cli_fakes import FakeModel, FakeSession, FakeTokenizer

from memdecay.cli._episode import Answer, Probe
from memdecay.cli._page import (
    Page,
    PolicyView,
    TurnMark,
    build_page,
    page_sizes,
    script_json,
    token_texts,
)
from memdecay.cli._timeline import Timeline
from memdecay.policy import DEFAULT_POLICY

HOSTILE = (
    "</script><script>alert(1)</script><!-- <img src=x onerror=alert(2)> ]]> @@DATA@@ @@JS@@ "
    "&amp; \u2028 \u2029 \ud800 \x00 '\" `${1}` https://example.com/x.js"
)


class Reader(html.parser.HTMLParser):
    """Collects elements, as a browser would find them."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, list[str]] = {}
        self.inside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in ("script", "style", "title"):
            self.inside = [tag]

    def handle_endtag(self, tag: str) -> None:
        if tag in self.inside:
            self.inside = []

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.text.setdefault(self.inside[0], []).append(data)


def view(policy: str = "memdecay-paper", budget: int | None = 64, words: int = 300) -> PolicyView:
    session = FakeSession(FakeModel(), FakeTokenizer(), budget=budget, policy=policy)
    session.append([{"role": "system", "content": "stay " * 20}])
    session.append([{"role": "tool", "content": "word " * words}])
    return PolicyView(
        policy=policy,
        summary=HOSTILE,
        bounded=budget is not None,
        main=True,
        report=session.report().to_dict(),
        timeline=Timeline.parse(session.timeline()),
        answers=[Answer(policy, Probe("system", HOSTILE, HOSTILE, HOSTILE, HOSTILE), HOSTILE)],
    )


def page(*views: PolicyView) -> str:
    return build_page(
        Page(
            title=HOSTILE,
            headline=HOSTILE,
            standfirst=HOSTILE,
            facts=[(HOSTILE, HOSTILE)],
            turns=[TurnMark(0, HOSTILE, 0, 321)],
            views=views,
            notes=[HOSTILE],
            texts=[HOSTILE] * 21,
            footer=HOSTILE,
        )
    )


def read(document: str) -> tuple[Reader, dict[str, Any]]:
    reader = Reader()
    reader.feed(document)
    reader.close()
    data = next(text for text in reader.text["script"] if text.lstrip().startswith("{"))
    return reader, json.loads(data)


def test_text_of_strangers_cannot_leave_its_place() -> None:
    reader, data = read(page(view()))
    assert [tag for tag, _ in reader.tags].count("script") == 2
    assert not {"img", "iframe", "link", "object", "embed", "base"} & {t for t, _ in reader.tags}
    shown = HOSTILE.replace("\ud800", "?")
    assert "".join(reader.text["title"]) == shown
    assert data["headline"] == shown and data["texts"][0] == shown
    assert data["runs"][0]["answers"][0]["answer"] == shown


def test_the_page_loads_nothing() -> None:
    document = page(view("full", None), view())
    reader, data = read(document)
    for tag, attrs in reader.tags:
        assert not {"src", "href", "srcset", "action", "data", "poster"} & set(attrs), tag
        assert not any(name.startswith("on") for name in attrs), tag
    code = "".join(reader.text["style"]) + "".join(
        text for text in reader.text["script"] if not text.lstrip().startswith("{")
    )
    assert not re.search(r"https?:|//[a-z0-9]+\.|@import|url\(|fetch\(|XMLHttp|import\(", code)
    assert "innerHTML" not in code and "document.write" not in code and "eval(" not in code
    policy = next(a for t, a in reader.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert (policy["content"] or "").startswith("default-src 'none'")
    assert {run["policy"] for run in data["runs"]} == {"full", "memdecay-paper"}


def test_a_calm_page_names_no_address_at_all() -> None:
    calm = view()
    document = build_page(Page("t", "h", "s", [], [], [calm.__class__(
        DEFAULT_POLICY, "calm", True, True, calm.report, calm.timeline)]))  # fmt: skip
    assert "http://" not in document and "https://" not in document


@pytest.mark.parametrize("text", ["</script>", "<!--", "&lt;", "\u2028", "\ud83d"])
def test_script_json_is_safe_and_means_the_same(text: str) -> None:
    packed = script_json({"text": text})
    assert not set("<>&\u2028\u2029") & set(packed)
    assert json.loads(packed)["text"] == text


def test_packed_levels_follow_the_scores_within_two_hundredths() -> None:
    shown = view()
    _, data = read(page(shown))
    levels = data["runs"][0]["timeline"]["levels"]
    checked = 0
    for sample in shown.timeline.scores:
        for number, score in sample.page_scores.items():
            packed = levels[str(number)]
            pairs = list(zip(packed[::2], packed[1::2], strict=True))
            level = [value for event, value in pairs if event <= sample.event][-1]
            assert abs(level - 100 * score) <= 2
            checked += 1
    assert checked > 100
    assert len(json.dumps(levels)) < len(json.dumps([s.page_scores for s in shown.timeline.scores]))


def test_a_policy_that_never_evicts_does_not_fade() -> None:
    _, data = read(page(view("full", None)))
    run = data["runs"][0]
    assert run["timeline"]["levels"] == {} and run["budget_tokens"] is None
    assert all(evicted == -1 for *_, evicted in run["timeline"]["strips"])


def test_pages_keep_their_life_and_their_pin() -> None:
    shown = view()
    _, data = read(page(shown))
    pages = {p[0]: p for p in data["runs"][0]["timeline"]["strips"]}
    assert len(pages) == len(shown.timeline.pages) == 21
    for life in shown.timeline.pages:
        number, count, region, tokens, pinned, born, evicted = pages[life.page]
        assert (number, count, data["regions"][region], tokens, born) == (
            life.page, 1, life.region, life.tokens, life.born)  # fmt: skip
        assert evicted == (-1 if life.evicted is None else life.evicted)
        assert bool(pinned) == life.pinned
    assert any(p[4] for p in pages.values()) and any(p[6] >= 0 for p in pages.values())


def test_single_tokens_are_strips_that_lose_nothing() -> None:
    shown = view(DEFAULT_POLICY)
    _, data = read(page(shown))
    run = data["runs"][0]["timeline"]
    assert run["page_size"] == 1 and len(shown.timeline.pages) == 322
    lives = {}
    for first, count, region, tokens, pinned, born, evicted in run["strips"]:
        assert 1 <= count <= 16 and tokens == count
        assert first // 16 == (first + count - 1) // 16, "a strip crosses a line of 16"
        for at in range(count):
            lives[first + at] = (
                data["regions"][region],
                bool(pinned),
                born[at] if isinstance(born, list) else born,
                evicted[at] if isinstance(evicted, list) else evicted,
            )
    assert lives == {
        life.page: (
            life.region,
            life.pinned,
            life.born,
            -1 if life.evicted is None else life.evicted,
        )
        for life in shown.timeline.pages
    }
    # The score of a strip is the mean over those of its tokens that were there.
    last = shown.timeline.scores[-1]
    for first, count, *_ in run["strips"]:
        scores = [last.page_scores[p] for p in range(first, first + count) if p in last.page_scores]
        if scores:
            assert abs(run["levels"][str(first)][-1] - 100 * sum(scores) / len(scores)) <= 2


def test_the_size_of_a_page_is_said_by_policy_where_it_differs() -> None:
    assert (
        page_sizes([view("full", None)]) == page_sizes([view("full", None), view()]) == "16 tokens"
    )
    assert page_sizes([view(DEFAULT_POLICY)]) == "1 token"
    said = page_sizes([view("full", None), view(DEFAULT_POLICY), view(), view("streaming")])
    assert said == "1 token (memdecay), 16 tokens (memdecay-paper, streaming)"


class Bytes:
    """A tokenizer of bytes that drops a space at the start, as some do."""

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", "replace").removeprefix(" ")


@pytest.mark.parametrize("text", ["one two", "é – 漢字 🙂!", " b", ""])
def test_the_texts_of_tokens_are_the_text(text: str) -> None:
    ids = [*text.encode()]
    texts = token_texts(Bytes(), ids)
    assert len(texts) == len(ids) and "".join(texts) == text.removeprefix(" ")
    assert [len(one) for one in texts if one] == [1] * len(text.removeprefix(" "))


def test_bytes_that_are_no_text_have_a_text_too() -> None:
    assert len(token_texts(Bytes(), [255] * 20)) == 20


def test_a_long_run_of_single_tokens_stays_a_small_file() -> None:
    dice = random.Random(0)
    count, budget = 2600, 650
    pages, kept, scores = [], list(range(budget)), []
    gone: dict[int, int] = {}
    for event in range(budget, count):
        gone[kept.pop(dice.randrange(len(kept)))] = event
        kept.append(event)
        if event % 10 == 0:
            shares = {p: dice.random() for p in kept}
            scores.append({"event": event, "page_scores": shares, "refreshed": []})
    pages = [
        {"page": p, "region": "user", "tokens": 1, "born": p, "evicted": gone.get(p),
         "pinned": False}
        for p in range(count)
    ]  # fmt: skip
    events = [
        {"index": i, "step": i, "seen": i + 1, "kept": min(i + 1, budget), "turn": 0,
         "kind": "decode"}
        for i in range(count)
    ]  # fmt: skip
    timeline = Timeline.parse(
        {"page_size": 1, "regions": ["user"], "pages": pages, "events": events, "scores": scores}
    )
    document = page(PolicyView(DEFAULT_POLICY, "", True, True, view().report, timeline))
    assert len(document) < 400_000


def test_two_thousand_pages_stay_a_small_file() -> None:
    pages = [
        {"page": p, "region": "user", "tokens": 16, "born": p, "evicted": min(p + 500, 1999),
         "pinned": False}
        for p in range(2000)
    ]  # fmt: skip
    events = [
        {"index": i, "step": i, "seen": 16 * i + 16, "kept": 16, "turn": 0, "kind": "prefill"}
        for i in range(2000)
    ]
    scores = [
        {"event": e, "page_scores": {p: 0.5 ** ((e - p) / 200) for p in range(max(0, e - 500), e)},
         "refreshed": []}
        for e in range(0, 2000, 10)
    ]  # fmt: skip
    timeline = Timeline.parse(
        {"page_size": 16, "regions": ["user"], "pages": pages, "events": events, "scores": scores}
    )
    document = page(PolicyView(DEFAULT_POLICY, "", True, True, view().report, timeline))
    assert len(document) < 1_500_000


BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")


@pytest.mark.skipif(BROWSER is None, reason="no Chromium to draw the page")
def test_a_browser_draws_the_page_and_runs_nothing_of_a_stranger(tmp_path: Path) -> None:
    place = tmp_path / "page.html"
    place.write_text(
        page(view("full", None), view("streaming"), view(DEFAULT_POLICY)), encoding="utf-8"
    )
    done = subprocess.run(
        [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom",
         f"--user-data-dir={tmp_path / 'profile'}", place.as_uri()],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    reader = Reader()
    reader.feed(done.stdout)
    tags = [tag for tag, _ in reader.tags]
    assert "img" not in tags and tags.count("script") == 2
    classes = [attrs.get("class") for _, attrs in reader.tags]
    assert classes.count("card") + classes.count("card main") == 3
    # Two panels at first, three canvases each; drawn canvases have a size.
    canvases = [attrs for tag, attrs in reader.tags if tag == "canvas"]
    assert len(canvases) == 6 and all(int(c["height"] or 0) > 50 for c in canvases)
    assert classes.count("mark ok") + classes.count("mark no") == 3
    assert classes.count("track") == 6
