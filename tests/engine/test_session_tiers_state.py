"""Sessions with tiers that are asked, copied, interrupted, saved and freed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.helpers import kept, same
from engine.interrupted import interrupt_at
from engine.sessions import (
    NEVER,
    assistant,
    content,
    failing,
    session,
    system,
    user,
)
from engine.tiered import (
    equal,
    goes_on,
    held,
    outside,
    outside_positions,
    tiered,
    turns,
)
from memdecay import (
    Session,
)


@pytest.mark.parametrize("disk", [False, True])
def test_a_question_leaves_the_session_as_if_it_was_not_asked(disk: bool, tmp_path: Path) -> None:
    tiers = {"host": 0, "disk": None, "disk_folder": tmp_path, "wait": True} if disk else {}
    made, twin = tiered(tiers=tiers), tiered(tiers=tiers)
    for one in (made, twin):
        turns(one, 3, 6)
    before = held(made), content(made), made.report()
    assert made.ask("where is the boat", max_new_tokens=9)
    copy = made.fork()
    copy.append([user(60, 8)])
    del copy
    assert equal(before[0], held(made)) and same(before[1], content(made))
    assert made.report() == before[2]
    goes_on(made, twin)
    assert not any(tmp_path.iterdir())


def test_a_copy_shares_the_bytes_and_goes_its_own_way() -> None:
    made = tiered()
    turns(made, 3, 6)
    copy = made.fork()
    store, other = outside(made).store, outside(copy).store
    pages = [*outside(made).pages]
    assert pages == [*outside(copy).pages]
    for page in pages:
        assert store.get(page).keys.data_ptr() == other.get(page).keys.data_ptr()
    goes_on(made, copy)
    before = held(made)
    copy.append([user(60, 8)])
    copy.close()
    assert equal(before, held(made)) and not outside(copy).pages


ERRORS = (RuntimeError, KeyboardInterrupt)


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("operation", ["append", "generate"])
def test_a_failure_in_any_forward_never_happened(
    operation: str, error: type[BaseException]
) -> None:
    run = {
        "append": lambda: made.append([user(20, 3), assistant(12, 3)], score=True),
        "generate": lambda: made.generate(max_new_tokens=30, eos_token_id=NEVER),
    }[operation]
    made = tiered(budget=80)
    turns(made, 5, 4)
    for at in (0, 3, 6, 11, 17):
        seen, ids, logits = made.cache.seen, [*made._ids], made._last_logits
        before = {*kept(made.cache)}, {*outside_positions(made)}
        memory: Any = made._memory
        stay = memory._stay
        with failing(made.model, at, error), pytest.raises(error, match="on purpose"):
            run()
        assert (made.cache.seen, made._ids) == (seen, ids)
        assert torch.equal(memory._stay, stay)
        assert torch.equal(made._last_logits, logits)  # type: ignore[arg-type]
        after = {*kept(made.cache)}, {*outside_positions(made)}
        assert after[0] <= before[0] and before[1] <= after[1]
        assert after[0] | after[1] == before[0] | before[1] and not after[0] & after[1]
        assert sum(map(len, made.cache._labels)) == 0
    run()
    turns(made, 6, 3)
    assert made.cache.peak_tokens <= 80


def test_a_failing_recall_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made = tiered()
    turns(made, 5, 5)
    everything = {*kept(made.cache), *outside_positions(made)}
    monkeypatch.setattr(made.cache, "put_back", lambda moved: raises())
    with pytest.raises(OSError, match="on purpose"):
        made.append([user(5, 3)])
    assert {*kept(made.cache), *outside_positions(made)} == everything


def raises() -> None:
    raise OSError("on purpose")


@pytest.mark.parametrize("limited", [False, True])
def test_a_saved_session_goes_on_as_if_it_never_was(limited: bool, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    tiers = {"host": 40, "disk": "1GB", "disk_folder": disk, "wait": True} if limited else {}
    made = tiered(tiers={**tiers, "no_disk": ["user"]})
    turns(made, 3, 8)
    made.save(tmp_path / "saved")
    loaded = Session.load(tmp_path / "saved", made.model, made.tokenizer)
    assert loaded.tiers == made.tiers
    assert equal(held(made), held(loaded))
    one, other = made.report().to_dict(), loaded.report().to_dict()
    room = [report["tiers"]["bytes"].pop("summaries") for report in (one, other)]
    assert one == other and 0 < room[1] <= room[0], "there is no room for more yet"
    goes_on(made, loaded)


def test_a_session_without_tiers_is_saved_as_before(tmp_path: Path) -> None:
    made = session(budget=64)
    made.append([user(20)])
    made.save(tmp_path / "saved")
    assert '"format": 1' in (tmp_path / "saved" / "session.json").read_text()
    loaded = Session.load(tmp_path / "saved", made.model, made.tokenizer)
    assert loaded.tiers is None and loaded.report().tiers is None
    other = tiered()
    other.append([user(20)])
    other.save(tmp_path / "saved")
    assert '"format": 2' in (tmp_path / "saved" / "session.json").read_text()


def test_reset_and_close_free_everything(tmp_path: Path) -> None:
    tiers = {"host": 20, "disk": None, "disk_folder": tmp_path, "wait": True}
    made = tiered(tiers=tiers)
    turns(made, 3, 6)
    disk = outside(made).store.disk
    assert disk.file_bytes > 0
    made.reset()
    report = made.report().tiers
    assert report is not None
    assert disk.file_bytes == 0 and not outside(made).pages
    assert {*report.tokens.values()} == {0} and report.bytes["summaries"] == 0
    assert (report.moved_down, report.came_back, report.lost) == (0, 0, 0)
    twin = tiered(tiers=tiers)
    goes_on(made, twin)
    made.close()
    assert disk._shared.file.closed and not outside(made).pages


def test_a_stream_is_written_as_an_answer_is() -> None:
    made, twin = tiered(), tiered()
    for one in (made, twin):
        one.append([system(4), user(70)])
    list(made.stream(max_new_tokens=12, eos_token_id=NEVER))
    twin.generate(max_new_tokens=12, eos_token_id=NEVER)
    goes_on(made, twin)


def test_an_interrupt_at_any_line_loses_nothing() -> None:
    """A Ctrl-C at some of the lines of engine and tiers that a turn and its answer pass."""
    made = tiered("llama", budget=48, prefill_chunk=16)
    turns(made, 5, 4)
    interrupted = 0
    for at in range(100, 10**9, 907):
        copy = made.fork()
        before = {*kept(copy.cache), *outside_positions(copy)}
        seen = copy.cache.seen
        passed, _ = interrupt_at(at, lambda copy=copy: turn_and_answer(copy), ("engine", "tiers"))
        interrupted += copy.cache.seen == seen
        after = {*kept(copy.cache), *outside_positions(copy)}
        assert before <= after == set(range(copy.cache.seen))
        assert not {*kept(copy.cache)} & {*outside_positions(copy)}
        assert copy.cache.kept() <= 48 and not bool(copy.cache.ledgers[0]["pinned"].any())
        turn_and_answer(copy)
        if not passed:
            break
    assert interrupted > 5


def turn_and_answer(made: Session) -> None:
    made.append([user(6, 3)])
    made.generate(max_new_tokens=5, eos_token_id=NEVER)
