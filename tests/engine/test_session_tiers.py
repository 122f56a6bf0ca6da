"""A session with tiers: what the budget evicts comes back for what asks for it, exactly."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.families import oracle
from engine.helpers import kept, same
from engine.sessions import (
    NEVER,
    assistant,
    content,
    failing,
    saying,
    session,
    system,
    user,
)
from memdecay import (
    BudgetError,
    MemDecayError,
    Profile,
    ProfileError,
    Session,
    SessionError,
    Tiers,
)
from memdecay.engine.cache import Evicted
from memdecay.engine.moving import Moved
from memdecay.evidence import EvidenceHead

HEADS = ((1, 0), (2, 3), (3, 1))
PROFILE = Profile.default().with_evidence(
    {"read": [EvidenceHead(layer, head, "read", 1.0, -4.0, 2.0) for layer, head in HEADS]}
)
ERRORS = (RuntimeError, KeyboardInterrupt)


def tiered(name: str = "llama", *, budget: int | None = 64, **options: Any) -> Session:
    """A session with tiers on a tiny model."""
    settings = {"page_size": 4, "every": 4, **options.pop("tiers", {})}
    options = {"prefill_chunk": 8, "profile": PROFILE, **options}
    return session(name, budget=budget, tiers=Tiers(**settings), **options)


def outside(made: Session) -> Any:
    memory: Any = made._memory
    return memory.outside


class Watched:
    """A session, who could see whom in it, and everything that it said of each position."""

    def __init__(self, made: Session) -> None:
        self.made, cache = made, made.cache
        self.events: list[tuple[int, list[int], int]] = []
        self.out: dict[int, int] = {}
        self.logits: dict[int, Tensor] = {}
        self.returns = 0
        rolled_back, put_back = cache.on_rollback, cache.put_back
        assert rolled_back is not None

        def back(moved: Moved) -> None:
            put_back(moved)
            self.returns += len(moved)
            for at in moved.positions.tolist():
                self.events.append((self.out.pop(at), [at], cache.seen))

        def rollback(seen: int) -> None:
            rolled_back(seen)
            self.out = {at: min(when, seen) for at, when in self.out.items() if at < seen}
            self.events = [(min(a, seen), at, min(b, seen)) for a, at, b in self.events]
            self.events = [event for event in self.events if event[1][0] < seen]
            self.logits = {at: said for at, said in self.logits.items() if at < seen}
            for at in kept(cache):  # a window that slid in a look slides back
                self.out.pop(at, None)

        cache.on_evict = self._evicted
        cache.on_rollback = rollback
        cache.put_back = back  # type: ignore[method-assign]
        made.model.register_forward_hook(self._ran, with_kwargs=True)

    def _evicted(self, what: Evicted) -> None:
        seen = self.made.cache.seen
        self.out.update(dict.fromkeys(what.position.tolist(), seen))

    def _ran(self, model: Any, args: Any, kwargs: Any, out: Any) -> None:
        if kwargs.get("cache") is self.made.cache:
            self.logits[self.made.cache.seen - 1] = out.logits[0, -1].clone()

    def worst(self, *, returned: bool = True) -> float:
        ids, length = torch.tensor([self.made._ids]), len(self.made._ids)
        events: list[Any] = [(a, at, b if returned else length) for a, at, b in self.events]
        events += [(when, [at]) for at, when in self.out.items()]
        expected = oracle(self.made.model, ids, events)
        return max(
            float((said - expected[at]).abs().max())
            for at, said in self.logits.items()
            if at < length
        )


@contextlib.contextmanager
def watched_budget(made: Session) -> Iterator[list[int]]:
    """Look inside every layer call how much is kept."""
    found: list[int] = []
    update = made.cache._store

    def store(*args: Any) -> Any:
        found.append(max(table.width for table in made.cache.tables))
        found.append(made.cache.kept())
        return update(*args)

    made.cache._store = store  # type: ignore[method-assign]
    yield found
    del made.cache._store  # type: ignore[method-assign]


def turns(made: Session, seed: int, count: int) -> None:
    """Random turns of every kind."""
    rng = random.Random(seed)

    def some() -> None:
        made.append([user(rng.randrange(2, 20), rng.randrange(99))])

    def scored() -> None:
        messages = [user(5, rng.randrange(99)), assistant(rng.randrange(3, 12), rng.randrange(99))]
        made.append(messages, score=True, score_chunk=rng.choice([1, 3]))

    def read() -> None:
        made.append([assistant(7, rng.randrange(99)), user(30, rng.randrange(99))])

    def written() -> None:
        some()
        made.generate(max_new_tokens=rng.randrange(1, 13), eos_token_id=NEVER)

    for _ in range(count):
        rng.choice([some, scored, read, written, written])()


SETTINGS: list[dict[str, Any]] = [
    {},
    {"policy": "memdecay-paper", "align": "region", "tiers": {"host": 0, "disk": None}},
    {"policy": "streaming", "page_size": 1, "tiers": {"pages": 3, "page_size": 3}},
    {"clock": "tokens", "tiers": {"host": 40, "disk": 30, "every": 1}},
]


@pytest.mark.parametrize("setting", range(4))
@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "gpt2"])
def test_any_turns_equal_a_forward_that_hides_what_is_outside(
    name: str, setting: int, tmp_path: Path
) -> None:
    made = tiered(name, **SETTINGS[setting])
    made.append([system(4)])
    watched = Watched(made)
    with watched_budget(made) as sizes:
        turns(made, setting, 9)
    assert watched.worst() < 1e-4
    assert watched.returns >= 20
    assert watched.worst(returned=False) > 1e-3, "what came back must matter"
    assert made.cache.peak_tokens <= 64
    assert max(sizes[1::2]) <= 64
    if made.cache.main.window is None:
        assert max(sizes) <= 64
    report = made.report()
    tiers = report.tiers
    assert tiers is not None and tiers.came_back > 0 and tiers.moved_down > 0
    assert report.evicted_tokens == report.seen_tokens - report.kept_tokens
    where = tiers.tokens
    assert where["resident"] == report.kept_tokens
    if tiers.lost == 0:
        assert where["host"] + where["disk"] == report.evicted_tokens
    limits = SETTINGS[setting].get("tiers", {})
    for tier, default in (("host", None), ("disk", 0)):
        limit = limits.get(tier, default)
        assert limit is None or where[tier] <= limit
    assert report.to_dict()["tiers"]["tokens"] == dict(where)


def test_without_tiers_there_is_nothing_to_say() -> None:
    made = session(budget=64)
    assert made.report().tiers is None and made.report().to_dict()["tiers"] is None


def test_a_look_leaves_the_session_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    made = tiered(record_timeline=True)
    made.append([system(4), user(50)])
    memory: Any = made._memory
    seen: list[tuple[Any, ...]] = []
    look = memory.look

    def state() -> tuple[Any, ...]:
        logits = made._last_logits
        return [*made._ids], logits, made.cache.seen, made.cache.steps, made._peak_bytes

    def looked(run: Any, count: int) -> Tensor:
        before = state()
        queries = look(run, count)
        seen.append((before, count, queries.shape))
        return queries

    def exchange(queries: Tensor, *, room: int) -> None:
        before = seen[-1][0]
        after = state()
        assert before[0] == after[0] and torch.equal(before[1], after[1])
        assert before[2:] == after[2:] and room == seen[-1][1]

    monkeypatch.setattr(memory, "look", looked)
    monkeypatch.setattr(memory, "exchange", exchange)
    probe = made.fork()
    rendered = probe.conversation.append([user(7, 3)])
    opening = probe.conversation.generation_prompt()
    made.append([user(7, 3)])
    assert len(seen) == 1
    assert seen[0][1] == len(rendered) + len(opening) and seen[0][2][1] == seen[0][1]


def test_what_an_assistant_wrote_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    made = tiered()
    made.append([system(4), user(50)])
    memory: Any = made._memory
    looks: list[list[int]] = []
    look = memory.look

    def looked(run: Any, count: int) -> Tensor:
        start = made.cache.seen
        queries: Tensor = look(lambda: (run(), looks.append(made._ids[start:])), count)
        return queries

    monkeypatch.setattr(memory, "look", looked)
    turn = [user(7, 3), assistant(9, 4), user(8, 5)]
    rendered = made.fork().conversation.append(turn)
    made.append(turn, score=True)
    text = [made.tokenizer.decode(ids) for ids in looks]
    assert len(text) == 2
    assert text[0].endswith("assistant\n") and text[1].endswith("assistant\n")
    assert turn[0]["content"] in text[0] and turn[2]["content"] in text[1]
    assert not any(turn[1]["content"] in one for one in text)
    assert made._ids[-len(rendered) :] == rendered.ids
    looks.clear()
    made.append([assistant(9, 4)], score=True)
    assert not looks


def test_an_answer_brings_pages_back_every_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    made = tiered(tiers={"every": 5})
    made.append([system(4), user(70)])
    calls: list[tuple[int, int]] = []
    best = outside(made).best

    def asked(queries: Tensor, count: int) -> list[int]:
        calls.append((made.cache.seen, queries.shape[1]))
        found: list[int] = best(queries, count)
        return found

    monkeypatch.setattr(outside(made), "best", asked)
    start = made.cache.seen + len(made.conversation.generation_prompt())
    made.generate(max_new_tokens=16, eos_token_id=NEVER)
    decoded = start - 1  # the prompt's last token is a step of its own
    assert calls == [(decoded + 5, 5), (decoded + 10, 5), (decoded + 15, 5)]
    calls.clear()
    made.append([user(3, 4), assistant(14, 5)], score=True, score_chunk=4)
    steps = [count for _, count in calls[1:]]
    assert steps and all(count == 5 for count in steps)
    never = tiered(tiers={"every": 0})
    assert never.cache.on_step is None and never.cache.on_queries is None


def test_what_a_turn_brought_back_stays_while_it_is_answered() -> None:
    made = tiered(tiers={"every": 4, "pages": 4})
    made.append([system(4), user(70)])
    made.append([user(4, 9)])
    memory: Any = made._memory
    assert len(memory._stay) == 4
    came = {at for at in kept(made.cache) if at // 4 in memory._stay}
    made.generate(max_new_tokens=20, eos_token_id=NEVER)
    assert len(came) >= 12 and came <= set(kept(made.cache))


def held(made: Session) -> dict[str, Any]:
    """All that is outside, and all that finds it."""
    memory: Any = made._memory
    plain, tensors = memory.state()
    return {"plain": plain, **{name: tensor.clone() for name, tensor in tensors.items()}}


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(value, other[name]) if isinstance(value, Tensor) else value == other[name]
        for name, value in one.items()
    )


def goes_on(made: Session, twin: Session) -> None:
    """Two sessions do the same from now on."""
    for one in (made, twin):
        turns(one, 7, 5)
    assert made._ids == twin._ids and same(content(made), content(twin))
    assert equal(held(made), held(twin))
    assert torch.equal(made._last_logits, twin._last_logits)  # type: ignore[arg-type]


@pytest.mark.parametrize("disk", [False, True])
def test_a_question_leaves_the_session_as_if_it_was_not_asked(disk: bool, tmp_path: Path) -> None:
    tiers = {"host": 0, "disk": None, "disk_folder": tmp_path} if disk else {}
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
        assert (made.cache.seen, made._ids) == (seen, ids) and memory._stay == stay
        assert torch.equal(made._last_logits, logits)  # type: ignore[arg-type]
        after = {*kept(made.cache)}, {*outside_positions(made)}
        assert after[0] <= before[0] and before[1] <= after[1]
        assert after[0] | after[1] == before[0] | before[1] and not after[0] & after[1]
        assert sum(map(len, made.cache._labels)) == 0
    run()
    turns(made, 6, 3)
    assert made.cache.peak_tokens <= 80


def outside_positions(made: Session) -> list[int]:
    found: list[int] = []
    for page in outside(made).pages:
        found += outside(made).store.get(page).positions.tolist()
    assert len(found) == outside(made).tokens == outside(made).store.tokens
    return found


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
    tiers = {"host": 40, "disk": "1GB", "disk_folder": disk} if limited else {}
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


def test_memory_then_disk_then_nothing(tmp_path: Path) -> None:
    made = tiered(tiers={"host": 24, "disk": 12, "disk_folder": tmp_path, "every": 0})
    made.append([user(100)])
    report = made.report().tiers
    assert report is not None
    pages = sorted(outside(made).pages)
    levels = outside(made).store
    assert [*levels.disk, *levels.host] == pages, "what went last is in memory"
    assert report.tokens == {"resident": made.cache.kept(), "host": 24, "disk": 12}
    assert report.bytes["disk"] == 12 * report.bytes["host"] // 24 == levels.disk.bytes
    gone = report.lost
    assert gone > 0
    missing = set(range(made.cache.seen)) - {*kept(made.cache), *outside_positions(made)}
    assert len(missing) == 4 * gone


def test_a_region_that_must_not_be_written_stays_in_memory(tmp_path: Path) -> None:
    tiers = {"host": 12, "disk": None, "disk_folder": tmp_path, "every": 0}
    made = tiered(tiers={**tiers, "no_disk": ["plan"]}, align="region", policy="streaming")
    made.append([user(6, region="plan"), user(120, 4)])
    plan = made.cache.profile.id("plan")
    levels = outside(made).store
    regions = [levels.disk.get(page).columns["region"] for page in levels.disk]
    assert len(regions) > 5 and not bool((torch.cat(regions) == plan).any())
    in_memory = [levels.host.get(page).columns["region"] for page in levels.host]
    assert bool((torch.cat(in_memory) == plan).any())
    no_memory = tiered(
        tiers={**tiers, "host": 0, "no_disk": ["plan"]}, align="region", policy="streaming"
    )
    no_memory.append([user(6, region="plan"), user(120, 4)])
    report = no_memory.report()
    assert report.tiers is not None and report.tiers.lost > 0
    assert report.kept_by_region["plan"] + 4 * report.tiers.lost >= report.seen_by_region["plan"]


def test_reset_and_close_free_everything(tmp_path: Path) -> None:
    made = tiered(tiers={"host": 20, "disk": None, "disk_folder": tmp_path})
    turns(made, 3, 6)
    disk = outside(made).store.disk
    assert disk.file_bytes > 0
    made.reset()
    report = made.report().tiers
    assert report is not None
    assert disk.file_bytes == 0 and not outside(made).pages
    assert {*report.tokens.values()} == {0} and report.bytes["summaries"] == 0
    assert (report.moved_down, report.came_back, report.lost) == (0, 0, 0)
    twin = tiered(tiers={"host": 20, "disk": None, "disk_folder": tmp_path})
    goes_on(made, twin)
    made.close()
    assert disk._shared.file.closed and not outside(made).pages


def test_a_thousand_turns_leave_nothing_behind(tmp_path: Path) -> None:
    made = tiered(tiers={"host": 60, "disk": 60, "disk_folder": tmp_path})
    made.append([system(4), user(150)])
    memory, levels = outside(made), outside(made).store
    rng, nbytes = random.Random(2), made.cache.nbytes
    for _ in range(1000):
        memory.recall(rng.sample([*memory.pages], 2), room=rng.choice([0, 4]))
        assert made.cache.kept() <= 64
        assert levels.host.tokens <= 60 and levels.disk.tokens <= 60
    assert memory.tokens == levels.tokens == sum(memory.pages.values())
    assert levels.disk.file_bytes <= 4 * levels.disk.bytes
    assert made.cache.nbytes == nbytes and made.cache.peak_tokens <= 64
    assert memory.summary_bytes <= 4 * memory.tokens * 3 * (16 + 4) + 3 * 16 * 8


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"host": -1}, "host is -1, but it must be a number of tokens of at least 0, a size such"),
        ({"host": "many"}, "host is 'many', but it must be"),
        ({"disk": 2.5}, "disk is 2.5, but it must be"),
        ({"disk": True}, "disk is True, but it must be"),
        ({"disk": "0MB"}, "disk is '0MB', but it must be"),
        ({"host": 0}, "host and disk are both 0, but at least one"),
        ({"disk_folder": "/tmp"}, "disk_folder is '/tmp', but disk is 0"),
        ({"disk": 9, "disk_folder": 3}, "disk_folder is 3, but it must be the path"),
        ({"page_size": 0}, "page_size is 0, but it must be an integer of at least 1"),
        ({"pages": 0}, "pages is 0, but it must be an integer of at least 1, or None"),
        ({"every": -1}, "every is -1, but"),
        ({"no_disk": "plan"}, "no_disk is 'plan', but it must be a list"),
        ({"no_disk": [1]}, r"no_disk is \[1\], but it must hold only names"),
        ({"words": 1}, "words is 1, but"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(MemDecayError, match=says):
        Tiers(**settings)


def test_sizes_are_read() -> None:
    made = tiered(tiers={"host": "1.5KiB", "disk": "2 mb"})
    levels = outside(made).store
    assert levels.host.max_bytes == 1536 and levels.disk.max_bytes == 2_000_000
    assert levels.host.max_tokens is None


def test_what_tiers_do_not_serve_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SessionError, match=r"tiers is 5, but it must be memdecay\.Tiers"):
        session(budget=64, tiers=5)
    with pytest.raises(SessionError, match=r"must be memdecay\.Tiers"):
        session(budget=64, tiers=Tiers)
    with pytest.raises(MemDecayError, match="'memdecay-heads', by which heads keep their own"):
        tiered(policy="memdecay-heads")
    with pytest.raises(MemDecayError, match="none are known for this model"):
        tiered(profile=Profile.default())
    with pytest.raises(ProfileError, match="nonsense"):
        tiered(tiers={"no_disk": ["nonsense"]})
    with pytest.raises(MemDecayError, match="no file can be made there"):
        tiered(tiers={"disk": 9, "disk_folder": tmp_path / "missing"})
    made = tiered()
    made.append([user(9)])
    with pytest.raises(MemDecayError, match="but tiers are for a cache that is new"):
        Tiers().open(made.cache)


def test_pins_that_leave_no_room_are_refused_and_nothing_comes_back() -> None:
    made = tiered(budget=48)
    made.append([user(60)])
    made.append([user(10, 3)], pin=True)
    with pytest.raises(BudgetError):
        made.append([user(40, 4)], pin=True)
    made.append([user(10, 5)])
    made.generate(max_new_tokens=9, eos_token_id=NEVER)
    assert made.cache.peak_tokens <= 48


def test_without_a_budget_nothing_goes_out() -> None:
    made = tiered(budget=None)
    turns(made, 2, 3)
    made.generate(**saying(made, "the boat"))
    report = made.report().tiers
    assert report is not None and report.moved_down == 0 and report.tokens["host"] == 0


def test_a_stream_is_written_as_an_answer_is() -> None:
    made, twin = tiered(), tiered()
    for one in (made, twin):
        one.append([system(4), user(70)])
    list(made.stream(max_new_tokens=12, eos_token_id=NEVER))
    twin.generate(max_new_tokens=12, eos_token_id=NEVER)
    goes_on(made, twin)


def where(made: Session) -> dict[int, str]:
    """The tier of the first token of each page of the cache, by the stores themselves."""
    memory, levels = outside(made), outside(made).store
    here = set(made.cache.ledgers[0]["page"].tolist())
    found = {}
    for page in range(-(-made.cache.seen // made.cache.page_size)):
        number = page * made.cache.page_size // memory.page_size
        tier = levels.tier_of(number)
        found[page] = "resident" if page in here else tier or "lost"
    return found


@pytest.mark.parametrize("size", [1, 4])
def test_the_timeline_tells_where_every_page_is_and_was(size: int, tmp_path: Path) -> None:
    tiers = {"host": 60, "disk": 40, "disk_folder": tmp_path}
    made = tiered(record_timeline=True, page_size=size, tiers=tiers)
    told: list[tuple[int, dict[int, str]]] = []
    for turn in range(6):
        turns(made, turn, 1)
        told.append((len(made.timeline()["events"]), where(made)))
    with failing(made.model, 9, RuntimeError), pytest.raises(RuntimeError):
        made.append([user(60, 8)])
    told.append((len(made.timeline()["events"]), where(made)))
    turns(made, 9, 2)
    timeline = made.timeline()
    lives = {life["page"]: life for life in timeline["pages"]}
    told.append((len(timeline["events"]), where(made)))
    for count, expected in told:
        for page, tier in expected.items():
            moves = [move for move in lives[page]["moves"] if move[0] < count]
            assert tier == (moves[-1][1] if moves else "resident")
    kinds = [event["kind"] for event in timeline["events"]]
    seen = set()
    for life in lives.values():
        events = [event for event, _ in life["moves"]]
        assert events == sorted(set(events)) and all(event < len(kinds) for event in events)
        before = "resident"
        for _, tier in life["moves"]:
            assert tier != before
            before = tier
            seen.add(tier)
        assert (life["evicted"] is None) == (before == "resident")
        assert life["evicted"] is None or life["evicted"] in events
    assert seen == {"resident", "host", "disk", "lost"} and "recall" in kinds
    assert all("moves" not in life for life in session_timeline()["pages"])


def session_timeline() -> dict[str, Any]:
    made = session(budget=64, record_timeline=True)
    made.append([user(80)])
    return made.timeline()


def test_a_timeline_changes_nothing_of_what_moves() -> None:
    plain, told = tiered(), tiered(record_timeline=True)
    goes_on(plain, told)
    assert plain.report() == told.report()
