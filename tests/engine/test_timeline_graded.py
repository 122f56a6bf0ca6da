"""The timeline of a session whose tokens lose precision before they lose their place."""

from __future__ import annotations

from typing import Any

import pytest

from engine.graded_tiers import graded
from engine.sessions import system, user
from engine.tiered import turns
from memdecay.cli._timeline import Timeline

INSIDE = ("resident", "quantized")


def tier(page: dict[str, Any], event: int) -> str:
    """Where a page is after an event, by its moves."""
    return next((to for at, to in reversed(page["moves"]) if at <= event), "resident")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"page_size": 1},
        {"tiers": {"host": 0, "quantized": None}},
        {"tiers": {"exact": False, "host": 30, "disk": 40}},
    ],
)
def test_pages_are_at_fewer_bits_when_most_of_them_is(options: dict[str, Any]) -> None:
    made = graded(record_timeline=True, **options)
    cache = made.cache
    recorder: Any = made._recorder
    seen: dict[int, dict[int, bool]] = {}
    notice = recorder._event

    def event(kind: str) -> None:
        notice(kind)
        ledger, coded = cache.ledgers[0], cache.coded_tokens
        pages: dict[int, list[bool]] = {}
        for slot, page in enumerate(ledger["page"].tolist()):
            pages.setdefault(page, []).append(slot < coded)
        # A turn that fails takes its events back: others get their numbers.
        lower = {page: 2 * sum(codes) >= len(codes) for page, codes in pages.items()}
        seen[len(recorder._events) - 1] = lower

    recorder._event = event
    made.append([system(4), user(60)])
    turns(made, 3, 8)
    timeline = made.timeline()
    Timeline.parse(timeline)
    pages = {page["page"]: page for page in timeline["pages"]}
    checked = {True: 0, False: 0}
    last = len(timeline["events"]) - 1  # what moves after it is told with it
    for number in range(last):
        for page, lower in seen[number].items():
            assert tier(pages[page], number) == INSIDE[lower], (number, page)
            checked[lower] += 1
    assert min(checked.values()) > 100
    for page in pages.values():
        away = [at for at, to in page["moves"] if to not in INSIDE]
        gone = tier(page, last) not in INSIDE
        assert (page["evicted"] is not None) == gone and (not gone or page["evicted"] in away)
        assert all(a[1] != b[1] for a, b in zip(page["moves"], page["moves"][1:], strict=False))
