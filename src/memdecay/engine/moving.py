"""Kept tokens on their way out of a cache, and back into it, to the bit what they were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from memdecay.errors import BudgetError, MemDecayError, SessionError

if TYPE_CHECKING:
    from memdecay.engine.cache import MemDecayCache
    from memdecay.engine.ledger import Ledger
    from memdecay.engine.slots import SlotTable

_NAMED = 6


@dataclass(frozen=True, eq=False)
class Moved:
    """Kept tokens that have left a cache, with all that brings them back as they were.

    Args:
        positions: `(n,)` int64, their true positions, ascending.
        keys: `(num_layers, num_kv_heads, n, head_dim)`, rotated as they were in the pool. Zeros
            where a sliding layer had let go of a token already.
        values: like `keys`.
        columns: every ledger column of these tokens, `(n,)` each; beside those, for each sliding
            window W of a model with full attention too, `window.W`: `(n,)` bool, the tokens that
            the layers of this window still had.

    Raises:
        MemDecayError: the shapes do not fit each other.
    """

    positions: Tensor
    keys: Tensor
    values: Tensor
    columns: Mapping[str, Tensor]

    def __post_init__(self) -> None:
        """Refuse tensors that are not of the same tokens."""
        count = self.positions.shape
        fits = self.keys.ndim == 4 and self.keys.shape[2:3] == count
        if not fits or self.keys.shape != self.values.shape:
            raise MemDecayError(
                f"keys has shape {tuple(self.keys.shape)} and values {tuple(self.values.shape)}, "
                f"but both must be (num_layers, num_kv_heads, n, head_dim) for the "
                f"{tuple(count)} positions."
            )
        for name, column in self.columns.items():
            if column.shape != count:
                raise MemDecayError(
                    f"column {name!r} has shape {tuple(column.shape)}, but it must be "
                    f"{tuple(count)}, one entry a position."
                )

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        parts = (self.positions, self.keys, self.values, *self.columns.values())
        return sum(part.numel() * part.element_size() for part in parts)

    def to(self, device: torch.device | str) -> Moved:
        """Return the same on a device; what is there already is not copied."""
        return Moved(
            self.positions.to(device),
            self.keys.to(device),
            self.values.to(device),
            {name: column.to(device) for name, column in self.columns.items()},
        )

    def select(self, chosen: Tensor) -> Moved:
        """Return a copy of some of the tokens, given as ascending indices or as a bool mask."""
        slots = chosen.nonzero().flatten() if chosen.dtype == torch.bool else chosen
        return Moved(
            self.positions.index_select(0, slots),
            self.keys.index_select(2, slots),
            self.values.index_select(2, slots),
            {name: column.index_select(0, slots) for name, column in self.columns.items()},
        )

    @staticmethod
    def joined(parts: Sequence[Moved]) -> Moved:
        """Return the tokens of all the parts, of which there is at least one, by position."""
        if len(parts) == 1:
            return parts[0]
        # Pages that do not overlap are in order at once, and need no second copy.
        parts = sorted(parts, key=lambda part: int(part.positions[0]) if len(part) else -1)
        whole = Moved(
            torch.cat([part.positions for part in parts]),
            torch.cat([part.keys for part in parts], 2),
            torch.cat([part.values for part in parts], 2),
            {name: torch.cat([part.columns[name] for part in parts]) for name in parts[0].columns},
        )
        if bool((whole.positions.diff() > 0).all()):
            return whole
        return whole.select(whole.positions.argsort())


def movable(cache: MemDecayCache) -> Ledger:
    """Return the ledger of the one sequence of a cache whose tokens may move out and back.

    Raises:
        SessionError: a forward is running.
        MemDecayError: its heads keep their own tokens, or it does not hold exactly one sequence
            without padding.
    """
    if cache.by_head:
        raise MemDecayError(
            f"policy {cache.policy.name!r} lets heads keep their own tokens, but tokens move out "
            f"and back only where all heads keep the same."
        )
    if cache._running is not None:
        raise SessionError("A forward is running, but tokens move out and back only between two.")
    if cache.rows != 1:
        raise MemDecayError(
            f"The cache holds {cache.rows} sequences, but tokens move out and back only in a "
            f"cache of one."
        )
    ledger = cache.ledgers[0]
    if ledger.seen != cache.seen:
        raise MemDecayError(
            f"The sequence has {cache.seen - ledger.seen} tokens of padding, but tokens move out "
            f"and back only in one without."
        )
    return ledger


def copy_out(cache: MemDecayCache, gone: Tensor) -> Moved:
    """Return a copy of kept tokens, `(kv_len,)` bool; nothing changes but for late surprisal."""
    ledger = cache.ledgers[0]
    slots = gone.nonzero().flatten()
    slots = slots[ledger["position"].index_select(0, slots).argsort()]
    columns = {name: ledger[name].index_select(0, slots) for name in ledger.columns}
    positions = columns["position"].clone()
    _, _, heads, _, head_dim = cache.pools[0].kv.shape
    shape = (len(cache.pools), heads, len(slots), head_dim)
    keys, values = (cache.pools[0].kv.new_zeros(shape) for _ in range(2))
    for number, table in enumerate(cache.tables):
        to = None
        if number:
            slots = table.find(0, positions)
            columns[_window(table)] = slots >= 0
            to = (slots >= 0).nonzero().flatten()
            slots = slots.index_select(0, to)
        for layer, pool in enumerate(cache.pools):
            if cache.layout.table[layer] == number:
                for into, kept in ((keys[layer], pool.kv[0, 0]), (values[layer], pool.kv[1, 0])):
                    if to is None:
                        torch.index_select(kept, 1, slots, out=into)
                    else:
                        into.index_copy_(1, to, kept.index_select(1, slots))
    return Moved(positions, keys, values, columns)


def check_taken(ledger: Ledger, positions: Tensor) -> Tensor:
    """Return which tokens `(kv_len,)` bool `take` is to take.

    Raises:
        MemDecayError: a position is not kept, or a pin keeps it.
    """
    gone = torch.isin(ledger["position"], positions)
    if int(gone.sum()) != len(positions):
        missing = positions[~torch.isin(positions, ledger["position"])]
        raise MemDecayError(f"positions has {_some(missing)}, but each must be of a kept token.")
    pinned = gone & ledger.held()
    if bool(pinned.any()):
        raise MemDecayError(
            f"positions has {_some(ledger['position'][pinned].sort().values)}, but what a pin "
            f"keeps must stay."
        )
    return gone


def check_back(cache: MemDecayCache, moved: object) -> Moved:
    """Return what `put_back` is to put back, on the device of the cache but for its KV.

    Raises:
        MemDecayError: it is not of this cache, kept already, or not seen yet; or a sliding layer
            would see a token that it had let go of.
        BudgetError: there is no room.
    """
    ledger, device = movable(cache), cache.layout.device
    if not isinstance(moved, Moved):
        raise MemDecayError(f"moved is a {type(moved).__name__}, but it must be a Moved.")
    if not len(moved):
        return moved
    like = cache.pools[0].kv
    shape = (len(cache.pools), like.shape[2], len(moved), like.shape[4])
    if moved.keys.shape != shape or {moved.keys.dtype, moved.values.dtype} != {like.dtype}:
        raise MemDecayError(
            f"moved has keys of shape {tuple(moved.keys.shape)} and {moved.keys.dtype} and values "
            f"of {moved.values.dtype}, but this model's must be {shape} and {like.dtype}."
        )
    kinds = {name: column.dtype for name, column in ledger.columns.items()}
    kinds |= {_window(table): torch.bool for table in cache.tables[1:]}
    given = {name: column.dtype for name, column in moved.columns.items()}
    if given != kinds:
        different = sorted(name for name in {*kinds, *given} if kinds.get(name) != given.get(name))
        raise MemDecayError(
            f"moved differs in the columns {', '.join(different)} from this cache, but it must "
            f"come from a cache with the same policy and model."
        )
    positions = moved.positions.to(device)
    if positions.dtype != torch.int64 or not bool((positions.diff() > 0).all()):
        raise MemDecayError(
            f"positions of moved are {_some(positions)}, but they must be ascending int64."
        )
    columns = {name: column.to(device) for name, column in moved.columns.items()}
    if not torch.equal(columns["position"], positions):
        raise MemDecayError(
            f"positions of moved are {_some(positions)}, but its column of positions says "
            f"{_some(columns['position'])}."
        )
    if int(positions[0]) < 0 or int(positions[-1]) >= ledger.seen:
        raise MemDecayError(
            f"positions of moved go from {int(positions[0])} to {int(positions[-1])}, but only "
            f"{ledger.seen} tokens were seen."
        )
    kept = torch.isin(positions, ledger["position"])
    if bool(kept.any()):
        raise MemDecayError(
            f"positions of moved has {_some(positions[kept])}, but each must be of a token that "
            f"is not kept."
        )
    lost = slid_away(cache, moved).to(device)
    if bool(lost.any()):
        raise MemDecayError(
            f"positions of moved has {_some(positions[lost])}, which the sliding layers let "
            f"go of, but the next token would see it there."
        )
    if cache.budget is not None and ledger.over(cache.budget, len(moved)) > 0:
        raise BudgetError(
            f"{len(moved)} tokens do not fit back into budget={cache.budget}, of which "
            f"{ledger.length} are kept; evict {ledger.over(cache.budget, len(moved))} first."
        )
    return Moved(positions, moved.keys, moved.values, columns)


def slid_away(cache: MemDecayCache, moved: Moved) -> Tensor:
    """Return which tokens `(n,)` bool the next token would see where a sliding layer has none.

    They were evicted when the window was beyond them, before a rollback. When it is there again
    they can come back.
    """
    lost = torch.zeros(len(moved), dtype=torch.bool, device=moved.positions.device)
    for table in cache.tables[1:]:
        assert table.window is not None
        lost |= ~moved.columns[_window(table)] & (moved.positions > cache.seen - table.window)
    return lost


def put_in(cache: MemDecayCache, moved: Moved) -> None:
    """Enter tokens that `check_back` let through (mutates the cache)."""
    ledger, positions = cache.ledgers[0], moved.positions
    chosen = []
    for number, table in enumerate(cache.tables):
        if table.window is not None:
            cache._slide(number, table, len(moved))
        which = None
        if number:
            assert table.window is not None
            had = moved.columns[_window(table)]
            reachable = positions > table.floor - table.window
            lost = positions[reachable & ~had]
            if len(lost):  # a rollback must not go back to where they would be seen
                table.floor = max(table.floor, int(lost.max()) + table.window)
            which = (reachable & had).nonzero().flatten()
        cache._fit_table(number, table, table.width + (len(moved) if which is None else len(which)))
        chosen.append(which)
    pages = ledger.num_pages
    for number, (table, which) in enumerate(zip(cache.tables, chosen, strict=True)):
        start = table.put_back(0, positions if which is None else positions[which])
        for layer, pool in enumerate(cache.pools):
            if cache.layout.table[layer] == number:
                keys, values = moved.keys[layer], moved.values[layer]
                if which is not None:
                    there = which.to(keys.device)
                    keys, values = keys.index_select(1, there), values.index_select(1, there)
                pool.put_back(start, keys, values)
    ledger.put_back({name: moved.columns[name] for name in ledger.columns})
    cache.evicted_tokens -= len(moved)
    cache.evicted_pages -= ledger.num_pages - pages
    cache.peak_tokens = max(cache.peak_tokens, cache.kept())


def _window(table: SlotTable) -> str:
    return f"window.{table.window}"


def _some(positions: Tensor) -> str:
    """Name the first of some positions."""
    first = ", ".join(map(str, positions[:_NAMED].tolist()))
    return first if len(positions) <= _NAMED else f"{first} and {len(positions) - _NAMED} more"
