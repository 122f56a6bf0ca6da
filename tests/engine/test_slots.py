"""Tables, pools and ledgers stay aligned through anything, compared with plain dictionaries."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from engine.families import make
from engine.helpers import same, snapshot
from memdecay.engine.cache import Evicted, MemDecayCache
from memdecay.engine.ledger import Labels, Ledger
from memdecay.engine.slots import KVPool, Move, SlotTable
from memdecay.errors import BudgetError, MemDecayError
from memdecay.policy import get_policy
from memdecay.regions import REGIONS, Profile

CPU = torch.device("cpu")


def test_a_row_is_packed_by_moving_its_tail_into_the_holes() -> None:
    table = SlotTable(1, 8, None, CPU)
    table.append(0, 6, None)
    move = table.drop(0, torch.tensor([False, True, False, True, False, False]))
    assert table.index[0].tolist() == [0, 4, 2, 5, -1, -1, -1, -1]
    assert move is not None and move.order is None
    assert (move.holes.tolist(), move.movers.tolist(), move.length) == ([1, 3], [4, 5], 4)
    assert table.drop(0, torch.zeros(4, dtype=torch.bool)) is None


def test_a_sliding_row_keeps_its_order() -> None:
    table = SlotTable(1, 8, 4, CPU)
    table.append(0, 6, None)
    move = table.drop(0, torch.tensor([True, True, False, True, False, False]), ordered=True)
    assert table.index[0].tolist() == [2, 4, 5, -1, -1, -1, -1, -1]
    assert move is not None and move.order.tolist() == [2, 4, 5]


def test_padding_gets_no_slot() -> None:
    table = SlotTable(2, 8, None, CPU)
    write = table.append(0, 3, torch.tensor([[False, True, True], [False, False, False]]))
    assert (table.lengths, table.width, table.ragged) == ([2, 0], 2, True)
    assert table.index[:, :2].tolist() == [[1, 2], [-1, -1]]
    pool = KVPool(2, 1, 8, 1, torch.float32, CPU)
    keys = torch.arange(6.0).view(2, 1, 3, 1)
    pool.write(write, keys, -keys)
    assert pool.keys(2).flatten().tolist() == [1, 2, 0, 0]
    assert pool.values(2).flatten().tolist() == [-1, -2, 0, 0]


def test_a_pool_grows_moves_and_copies() -> None:
    pool = KVPool(1, 2, 4, 3, torch.float32, CPU)
    keys = torch.randn(1, 2, 4, 3)
    table = SlotTable(1, 4, None, CPU)
    pool.write(table.append(0, 4, None), keys, keys + 1)
    copied = pool.copy()
    pool.move(Move(0, 2, holes=torch.tensor([0]), movers=torch.tensor([3])))
    pool.grow(8, 2)
    assert pool.kv.shape == (2, 1, 2, 8, 3)
    assert torch.equal(pool.keys(2), keys[:, :, [3, 1]])
    assert torch.equal(pool.values(2), keys[:, :, [3, 1]] + 1)
    assert torch.equal(copied.keys(4), keys)
    assert pool.nbytes == 2 * copied.nbytes == 2 * 2 * 8 * 3 * 4


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("spread", [1, 3])
def test_many_single_holes_are_closed_in_the_right_row_only(rows: int, spread: int) -> None:
    """Holes side by side go by slices, scattered ones by index; what comes out is the same."""
    table, pool = SlotTable(rows, 64, None, CPU), KVPool(rows, 2, 64, 3, torch.float32, CPU)
    keys = torch.randn(rows, 2, 60, 3)
    pool.write(table.append(0, 60, None), keys, keys + 1)
    before = pool.copy()
    gone = torch.zeros(60, dtype=torch.bool)
    gone[torch.arange(15) * spread] = True
    move = table.drop(rows - 1, gone)
    assert move is not None and (len(move.runs) > 8) == (spread == 3)
    pool.move(move)
    kept = table.index[rows - 1, :45]
    assert sorted(kept.tolist()) == (~gone).nonzero().flatten().tolist()
    for now, then in ((pool.keys(60), before.keys(60)), (pool.values(60), before.values(60))):
        assert torch.equal(now[rows - 1, :, :45], then[rows - 1][:, kept])
        assert torch.equal(now[: rows - 1], then[: rows - 1])


def new_ledger(align: str | None = None) -> Ledger:
    return Ledger(
        get_policy("memdecay-paper"),
        Profile.default(),
        capacity=64,
        page_size=4,
        align=align,
        window=4,
        device=CPU,
    )


def append(ledger: Ledger, regions: list[int], now: float = 0.0) -> None:
    region = torch.tensor(regions)
    ledger.append(Labels(region, torch.zeros_like(region)), now, now)


def test_region_aligned_pages_go_on_where_a_rollback_ends() -> None:
    ledger = new_ledger("region")
    append(ledger, [1, 1, 1, 1, 1, 2, 2, 1])
    assert ledger["page"].tolist() == [0, 0, 0, 0, 1, 2, 2, 3]
    ledger.move(Move(0, 2, order=torch.tensor([0, 1])))  # all but the first two are gone
    ledger.rewind(2)  # back to six tokens seen; the sixth was evicted, and its page is open
    append(ledger, [2, 2, 2, 2])
    assert ledger["position"].tolist() == [0, 1, 6, 7, 8, 9]
    assert ledger["page"].tolist() == [0, 0, 2, 2, 2, 3]


def test_only_the_last_queries_of_a_prompt_are_held() -> None:
    ledger = new_ledger()
    append(ledger, [1] * 6)
    columns = torch.arange(36.0).view(6, 6)
    for start, end in [(0, 1), (1, 3), (3, 6)]:
        ledger.hold_queries(columns[:, start:end])
    assert torch.equal(ledger.release_queries(), columns[:, 2:].mean(1))
    ledger.hold_queries(columns)
    ledger.rewind(1)
    assert torch.equal(ledger.queries[:6, :3], columns[:, 2:5])
    assert ledger.num_queries == 3


def test_tokens_refreshed_by_an_observation_are_named() -> None:
    ledger = new_ledger()
    append(ledger, [1] * 4)
    refreshed = ledger.observe(torch.tensor([0.7, 0.1, 0.1, 0.1]), now=3.0)
    assert refreshed.tolist() == [True, False, False, False]
    assert ledger["num_observed"].tolist() == [1] * 4


@dataclass
class Token:
    name: float
    index: int
    region: int
    page: int
    kept: bool = True


@dataclass
class Row:
    tokens: list[Token] = field(default_factory=list)  # by position


class Machine(RuleBasedStateMachine):
    """A cache of stand-in keys, each the name of its token, and dictionaries of what it holds."""

    @initialize(
        name=st.sampled_from(["llama", "gemma3", "mistral_sliding"]),
        align=st.sampled_from([None, "region"]),
        rows=st.integers(1, 3),
    )
    def start(self, name: str, align: str | None, rows: int) -> None:
        self.align = align
        self.model = make(name)
        self.cache = MemDecayCache(
            self.model, budget=None, page_size=4, align=align, observe_every=0
        )
        self.cache.on_evict = self._evicted
        self.rows = [Row() for _ in range(rows)]
        self.seen = 0
        self.names = 0.0

    def _evicted(self, what: Evicted) -> None:
        for position, page, region in zip(
            what.position.tolist(), what.page.tolist(), what.region.tolist(), strict=True
        ):
            token = self.rows[what.row].tokens[position]
            assert token.kept and (token.page, token.region) == (page, region)
            token.kept = False

    def _page(self, tokens: list[Token], region: int) -> int:
        if self.align is None:
            return len(tokens) // 4
        if not tokens:
            return 0
        last = tokens[-1]
        full = sum(token.page == last.page for token in tokens) == 4
        return last.page + (full or region != last.region)

    def _mask(self, data: st.DataObject, count: int) -> Tensor | None:
        if not data.draw(st.booleans(), "padding"):
            return None
        flags = st.lists(st.booleans(), min_size=count, max_size=count)
        new = torch.tensor([data.draw(flags) for _ in self.rows])
        return torch.cat([torch.ones(len(self.rows), self.seen, dtype=torch.bool), new], 1)

    @rule(data=st.data(), count=st.integers(1, 40), fails=st.booleans())
    def forward(self, data: st.DataObject, count: int, fails: bool) -> None:
        mask = self._mask(data, count)
        real = torch.ones(len(self.rows), count, dtype=torch.bool)
        real = real if mask is None else mask[:, self.seen :]
        regions = [
            data.draw(st.lists(st.integers(0, 6), min_size=n, max_size=n))
            for n in real.sum(1).tolist()
        ]
        for row, numbers in enumerate(regions):
            self.cache.label([REGIONS[number] for number in numbers], row=row)
        before = snapshot(self.cache)
        names = torch.full(real.shape, -1.0)
        if fails:
            forward = self.cache.begin(len(self.rows), count, mask)
            self._write(names, layers=2)
            self.cache.abort(forward)
            if self.seen and self.model.config.model_type != "mistral":  # there, some slid away
                assert same(self._columns(snapshot(self.cache)), self._columns(before))
            self.check()
        forward = self.cache.begin(len(self.rows), count, mask)
        for row, (state, numbers) in enumerate(zip(self.rows, regions, strict=True)):
            left = iter(numbers)
            for column in range(count):
                if not real[row, column]:
                    continue
                region = next(left)
                self.names += 1
                names[row, column] = self.names
                page = self._page(state.tokens, region)
                state.tokens.append(Token(self.names, self.seen + column, region, page))
        self._write(names, layers=4)
        self.cache.end(forward)
        self.seen += count

    @staticmethod
    def _columns(state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: column for name, column in state.items() if not name.startswith("pool")}

    def _write(self, names: Tensor, layers: int) -> None:
        for layer in range(layers):
            keys = names[:, None, :, None].expand(-1, 2, -1, 16)
            self.cache.update(keys + layer / 8, -keys, layer)

    @precondition(lambda self: self.seen)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        row = data.draw(st.integers(0, len(self.rows) - 1))
        state = self.rows[row]
        some = st.sets(st.integers(0, max(0, len(state.tokens) - 1)))
        wanted = data.draw(some)
        there = [p for p in wanted if p < len(state.tokens) and state.tokens[p].kept]
        assert self.cache.evict(sorted(wanted), row=row) == len(there)
        assert not any(state.tokens[position].kept for position in there)

    @precondition(lambda self: self.seen)
    @rule(budget=st.integers(1, 60))
    def shrink(self, budget: int) -> None:
        try:
            self.cache.shrink(budget)
        except BudgetError:
            return
        assert all(self.cache.kept(row) <= budget for row in range(len(self.rows)))

    @precondition(lambda self: self.seen)
    @rule(data=st.data())
    def crop(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, min(self.seen, 50)))
        floor = max(table.floor for table in self.cache.tables)
        if count and self.seen - count < floor:
            with pytest.raises(MemDecayError, match="can go back only"):
                self.cache.crop(-count)
            return
        self.cache.crop(-count)
        self.seen -= count
        for state in self.rows:
            state.tokens = [token for token in state.tokens if token.index < self.seen]

    @precondition(lambda self: self.seen)
    @rule(data=st.data())
    def reorder(self, data: st.DataObject) -> None:
        kind = data.draw(st.sampled_from(["beams", "repeat", "select"]))
        if kind == "repeat" and len(self.rows) <= 2:
            self.cache.batch_repeat_interleave(2)
            rows = [row for row in range(len(self.rows)) for _ in range(2)]
        else:
            numbers = st.integers(0, len(self.rows) - 1)
            size = len(self.rows) if kind == "beams" else data.draw(st.integers(1, 3))
            rows = data.draw(st.lists(numbers, min_size=size, max_size=size))
            if kind == "beams":
                self.cache.reorder_cache(torch.tensor(rows))
            else:
                self.cache.batch_select_indices(torch.tensor(rows))
        self.rows = [Row([Token(**vars(token)) for token in self.rows[row].tokens]) for row in rows]

    @precondition(lambda self: self.seen)
    @rule()
    def go_on_with_a_copy(self) -> None:
        copied = self.cache.copy()
        for pool in self.cache.pools:
            pool.kv.fill_(float("nan"))
        for ledger in self.cache.ledgers:
            ledger.starts.clear()
            ledger.columns["position"].fill_(-7)
        for table in self.cache.tables:
            table.index.fill_(-7)
        self.cache = copied
        self.cache.on_evict = self._evicted

    @invariant()
    def check(self) -> None:
        cache = self.cache
        assert cache.get_seq_length() == self.seen
        if not self.seen:
            return
        for row, state in enumerate(self.rows):
            ledger = cache.ledgers[row]
            kept = {token.index: token for token in state.tokens if token.kept}
            position = {token.index: at for at, token in enumerate(state.tokens)}
            assert ledger.seen == len(state.tokens)
            index = cache.main.index[row, : cache.main.lengths[row]].tolist()
            assert ledger.length == len(index) == len(set(index))
            assert set(index) == set(kept)
            assert ledger["position"].tolist() == [position[at] for at in index]
            assert ledger["region"].tolist() == [kept[at].region for at in index]
            assert ledger["page"].tolist() == [kept[at].page for at in index]
            pages = sorted({token.page for token in kept.values()})
            assert ledger.num_pages == len(pages)
            assert ledger["page_index"].tolist() == [pages.index(kept[at].page) for at in index]
            self._check_open_page(ledger, state, pages)
            for layer, pool in enumerate(cache.pools):
                table = cache.table_of(layer)
                slots = table.index[row, : table.lengths[row]].tolist()
                assert (table.index[row, table.lengths[row] :] == -1).all()
                assert set(slots) <= set(kept)
                visible = {at for at in kept if not table.window or at > self.seen - table.window}
                assert visible <= set(slots)
                names = torch.tensor([kept[at].name for at in slots])
                assert torch.equal(pool.keys(len(slots))[row, 1, :, 3], names + layer / 8)
                assert torch.equal(pool.values(len(slots))[row, 0, :, 0], -names)

    def _check_open_page(self, ledger: Ledger, state: Row, pages: list[int]) -> None:
        expected = None
        if state.tokens:
            last = state.tokens[-1].page
            filled = sum(token.page == last for token in state.tokens)
            if filled < 4 and last in pages:
                expected = pages.index(last)
        assert ledger.open_page == expected


Machine.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=20,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
test_everything_stays_aligned = Machine.TestCase
