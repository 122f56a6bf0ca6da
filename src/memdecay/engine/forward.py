"""One forward of the model: its exact masks, its attention, and what the attention said.

In a decode step the softmax that makes the output is the observation. In a prompt only the last
`window` queries are computed once more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from memdecay.engine.attach import AttachedForward
from memdecay.engine.logits import LOWEST, capped, scale_of
from memdecay.engine.watch import peak_attention

if TYPE_CHECKING:
    from memdecay.engine.cache import MemDecayCache
    from memdecay.engine.slots import SlotTable, Write


class Forward(AttachedForward):
    """What one forward needs to know and collects; it lives from `begin` to `end` of the cache.

    Args:
        cache: the cache that serves it.
        count: tokens of the forward, padding included.
        new: for each row how many of them are real.
        first_index: sequence index of the first of them.
        real: `(rows, count)` bool, False for padding; None if all are real.
        writes: for each slot table, where the new tokens go.
        decoding: whether this is a decode step, not part of a prompt.
        observing: whether attention is recorded.
    """

    cache: MemDecayCache

    def __init__(
        self,
        cache: MemDecayCache,
        *,
        count: int,
        new: list[int],
        first_index: int,
        real: Tensor | None,
        writes: dict[int | None, Write],
        decoding: bool,
        observing: bool,
    ) -> None:
        self.cache = cache
        self.count = count
        self.new = new
        self.first_index = first_index
        self.real = real
        self.writes = writes
        self.decoding = decoding
        self.observing = observing
        self.mask_layer = 0
        self.layer = 0
        self.num_heads = 0
        self.sums: dict[int | None, Tensor] = {}
        self._window_rows: Tensor | None = None
        self._peaks: dict[int | None, Tensor] = {}
        self._queries: dict[int, Tensor] = {}

    # Masks

    def mask(
        self,
        *,
        batch_size: int,
        q_length: int,
        q_offset: int,
        mask_function: Callable[..., Tensor],
        allow_is_causal_skip: bool = True,
        device: torch.device | str = "cpu",
        **_: Any,
    ) -> Tensor | None:
        """Return who may see whom, `(batch, 1, q_length, width)` bool, or None for plain causal.

        The model's own mask function is evaluated at the true positions of the kept tokens.
        """
        table = self.cache.table_of(self.mask_layer)
        if allow_is_causal_skip and self.plain(table):
            return None
        query = torch.arange(q_length, device=device) + q_offset
        key = table.index[:, : table.width]
        row = torch.arange(batch_size, device=device)[:, None, None, None]
        head = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=device)
        visible = mask_function(
            row, head, query[None, None, :, None], key.clamp(min=0)[:, None, None, :]
        )
        visible = visible & (key >= 0)[:, None, None, :]
        if self.real is not None:
            # A padding query sees nothing; softmax over nothing is NaN, so it sees everything.
            visible = visible | ~self.real[:, None, :, None]
        return visible.expand(batch_size, 1, q_length, table.width)

    def plain(self, table: SlotTable) -> bool:
        """Whether no query of this forward needs a mask beyond what `is_causal` says."""
        if self.real is not None or table.ragged:
            return False
        if self.count == 1:
            return table.window is None or self.first_index < table.window
        only_new = table.width == self.count
        return only_new and (table.window is None or self.count <= table.window)

    # Attention

    def attention(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        scaling: float | None = None,
        softcap: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Attend, and record how much mass each kept token got.

        Args:
            module: the attention module.
            query: `(batch, num_heads, count, head_dim)`.
            key: `(batch, num_kv_heads, width, head_dim)`.
            value: like `key`.
            attention_mask: from `mask`.
            scaling: factor of the logits, 1/sqrt(head_dim) by default.
            softcap: tanh cap of the logits (Gemma 2).
            kwargs: passed on to the model's own attention where that runs.

        Returns:
            `(batch, count, num_heads, head_dim)`, and None for the weights.
        """
        scale = scale_of(module, query, scaling, kwargs)
        self.num_heads = query.shape[1]
        if query.shape[2] == 1:
            out = self._decode(query, key, value, attention_mask, scale, softcap)
        elif softcap is not None:
            out = _softcapped(query, key, value, attention_mask, scale, softcap)
        elif attention_mask is not None:
            out = _packed_sdpa(query, key, value, attention_mask, scale)
        else:
            out, _ = sdpa_attention_forward(
                module, query, key, value, None, scaling=scaling, **kwargs
            )
        if self.observing and query.shape[2] > 1:
            self._observe_window(query, key, attention_mask, scale, softcap)
        watched = {} if self.observes_all else self.cache.watch.by_layer
        for rank, head in watched.get(self.layer, ()):
            keys = key[:, head * key.shape[1] // self.num_heads]
            own = None if attention_mask is None else self._own_slots()
            mask, real = attention_mask, self.real
            peak = peak_attention(query[:, head], keys, mask, scale, softcap, own=own, real=real)
            self._note_peak(rank, peak)
        for rank, head in self.cache.listened.by_layer.get(self.layer, ()):
            self._queries[rank] = query[:, head].detach().clone()
        return out, None

    @property
    def observes_all(self) -> bool:
        """Whether what every head gave is in the slabs, so that watched ones need no other look."""
        return self.observing and self.count == 1

    def _own_slots(self) -> Tensor:
        """Return `(rows, count)` int64, the slots of this layer's new tokens; 0 for padding."""
        table = self.cache.table_of(self.layer)
        write = self.writes[table.window]
        if write.slot is None:
            slots = torch.arange(self.count, device=table.index.device) + write.start
            return slots.expand(table.rows, self.count)
        slots = torch.zeros(table.rows, self.count, dtype=torch.int64, device=table.index.device)
        slots[write.source_row, write.source_column] = write.slot
        return slots

    def _note_peak(self, rank: int, peak: Tensor) -> None:
        """Note `(batch, width)`, what a watched head of this layer gave most."""
        window = self.cache.table_of(self.layer).window
        if window not in self._peaks:
            shape = (len(peak), len(self.cache.watch), peak.shape[1])
            self._peaks[window] = peak.new_zeros(shape)
        self._peaks[window][:, rank] = peak

    @torch.no_grad()
    def _decode(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scale: float,
        softcap: float | None,
    ) -> Tensor:
        """One query a row, with the query heads of each KV head packed as its rows."""
        batch, heads, _, head_dim = query.shape
        kv_heads, width = key.shape[1], key.shape[2]
        group = heads // kv_heads
        packed = query.reshape(batch, kv_heads, group, head_dim)
        if not self.observing and softcap is None:
            out = torch.nn.functional.scaled_dot_product_attention(
                packed, key, value, attn_mask=mask, scale=scale
            )
            return out.reshape(batch, 1, heads, -1)
        table = self.cache.table_of(self.layer)
        probability = self.cache.slab(table, batch * heads, width)[self.cache.rank_of(self.layer)]
        probability = probability.view(batch * kv_heads, group, width)
        rows = packed.reshape(batch * kv_heads, group, head_dim)
        keys, values = key.flatten(0, 1), value.flatten(0, 1)
        if query.dtype == torch.float32 or query.device.type != "cpu":
            zero = self.cache.zero(query)
            logits = torch.baddbmm(zero, rows, keys.transpose(1, 2), beta=0, alpha=scale).float()
        else:
            # On CPU a bf16 bmm copies the strided keys; one mm a head does not.
            by_head = [row @ head.t() for row, head in zip(rows, keys, strict=True)]
            logits = torch.stack(by_head).float().mul_(scale)
        logits = capped(logits, softcap)
        if mask is not None:
            hidden = ~mask.reshape(batch, 1, 1, width)
            logits.view(batch, kv_heads, group, width).masked_fill_(hidden, LOWEST)
        weights = torch.softmax(logits, -1, out=probability).to(query.dtype)
        out = torch.bmm(weights, values)
        return out.reshape(batch, 1, heads, -1)

    # Observation

    @torch.no_grad()
    def _observe_window(
        self,
        query: Tensor,
        key: Tensor,
        mask: Tensor | None,
        scale: float,
        softcap: float | None,
    ) -> None:
        """Add this layer's mass of the last queries, `(batch, queries, width)`, to its table's."""
        batch, heads, count, head_dim = query.shape
        kv_heads, width = key.shape[1], key.shape[2]
        group = heads // kv_heads
        last = min(self.cache.window, count)
        if self.real is None:
            query = query[:, :, -last:]
            mask = mask[:, :, -last:] if mask is not None else None
        else:
            rows = self._last_real(last)
            query = query.gather(2, rows[:, None, :, None].expand(-1, heads, -1, head_dim))
            assert mask is not None
            mask = mask.gather(2, rows[:, None, :, None].expand(-1, 1, -1, width))
        total = query.new_zeros(batch, last, width, dtype=torch.float32)
        hidden = ~mask if mask is not None else _future(last, width, query.device)
        packed = query.reshape(batch, kv_heads, group, last, head_dim)
        for head in range(kv_heads):
            logits = torch.matmul(packed[:, head], key[:, head, None].transpose(-1, -2))
            logits = capped(logits.float().mul_(scale), softcap)
            logits.masked_fill_(hidden, LOWEST)
            total += torch.softmax(logits, -1).sum(1)
        window = self.cache.table_of(self.layer).window
        if window in self.sums:
            self.sums[window] += total
        else:
            self.sums[window] = total

    def _last_real(self, last: int) -> Tensor:
        """Return `(rows, last)`, the columns of each row's last real queries, at the end."""
        if self._window_rows is None:
            assert self.real is not None
            order = torch.argsort(self.real.to(torch.int8), dim=1, stable=True)
            self._window_rows = order[:, -last:]
        return self._window_rows

    def masses(self) -> list[Tensor]:
        """Return for each row `(kv_len, queries)`, the mass of each of its last real queries."""
        sums = self.sums or {
            table.window: self.cache.slab_sum(table, self.num_heads)[:, None]
            for table in self.cache.tables
        }
        masses = self._combine(sums)
        queries = masses.shape[1]
        return [
            masses[row, max(0, queries - new) :, :length].t()
            for row, (new, length) in enumerate(zip(self.new, self.cache.main.lengths, strict=True))
        ]

    def queries(self) -> list[Tensor]:
        """Return for each row `(heads, new, head_dim)`, of the heads listened to; [] if none."""
        if not self._queries:
            return []
        by_head = torch.stack([self._queries[rank] for rank in range(len(self._queries))], 1)
        if self.real is None:
            return list(by_head)
        return [row[:, mine] for row, mine in zip(by_head, self.real, strict=True)]

    def peaks(self) -> list[Tensor]:
        """Return for each row `(heads, kv_len)`, what each watched head gave most; [] if none."""
        main = self.cache.main
        if self.observes_all and self.cache.watch.heads:
            self._peaks = {table.window: self._given(table) for table in self.cache.tables}
        if not self._peaks:
            return []
        batch, heads, _ = next(iter(self._peaks.values())).shape
        total = torch.zeros(batch, heads, main.width, device=main.index.device)
        for table in self.cache.tables:
            if table.window in self._peaks:
                total = total + self._in_main(self._peaks[table.window], table)
        return [total[row, :, :length] for row, length in enumerate(main.lengths)]

    def _given(self, table: SlotTable) -> Tensor:
        """Return `(rows, heads, width)`: what the watched heads gave in this decode step."""
        watch, rows, width = self.cache.watch, self.cache.rows, table.width
        index = table.index[:, :width]
        given = torch.zeros(rows, len(watch), width, device=index.device)
        mine = [
            (rank, self.cache.rank_of(layer), head)
            for layer, watched in watch.by_layer.items()
            if self.cache.table_of(layer) is table
            for rank, head in watched
        ]
        if not mine:
            return given
        ranks, layers, heads = zip(*mine, strict=True)
        slab = self.cache.slab(table, rows * self.num_heads, width)
        shares = slab.view(-1, rows, self.num_heads, width)[layers, :, heads]
        given[:, ranks] = shares.transpose(0, 1)
        given.masked_fill_((index == self.first_index)[:, None], 0)
        if self.real is not None:
            given.masked_fill_(~self.real[:, None], 0)
        return given

    def _combine(self, sums: dict[int | None, Tensor]) -> Tensor:
        """Average over all heads and layers, in the slots of the main table."""
        total = sum(self._in_main(sums[table.window], table) for table in self.cache.tables)
        return torch.as_tensor(total) / (len(self.cache.layers) * self.num_heads)

    def _in_main(self, shares: Tensor, table: SlotTable) -> Tensor:
        """Return `(rows, n, main width)`: the `(rows, n, width)` of a table in the main slots."""
        main = self.cache.main
        if table is main:
            return shares
        # A spare column takes the tokens that the main table does not keep.
        total = shares.new_zeros(*shares.shape[:2], main.width + 1)
        slot = self._main_slots(table)[:, None].expand_as(shares)
        return total.scatter_add_(2, slot, shares)[:, :, :-1]

    def _main_slots(self, table: SlotTable) -> Tensor:
        """Return `(rows, width)`: where a sliding table's tokens are in the main table.

        Only indices that some query's window can reach are looked up; the others have no mass.
        """
        main = self.cache.main
        first = self.cache.seen - self.count - (table.window or 0)
        reach = self.cache.seen - first
        here, there = main.index[:, : main.width] - first, table.index[:, : table.width] - first
        slots = torch.arange(main.width, device=here.device).expand_as(here)
        slot_of = torch.full((main.rows, reach + 1), main.width, device=here.device)
        slot_of.scatter_(1, torch.where(here >= 0, here, reach), slots)
        slot_of[:, reach] = main.width
        return slot_of.gather(1, torch.where(there >= 0, there, reach))


def _future(queries: int, width: int, device: torch.device) -> Tensor:
    """Return `(queries, width)` bool: keys after each of the last queries."""
    return torch.ones(queries, width, dtype=torch.bool, device=device).triu_(width - queries + 1)


def _packed_sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attend with the query heads of a KV head as rows, so that keys are never repeated."""
    batch, heads, count, head_dim = query.shape
    kv_heads = key.shape[1]
    group = heads // kv_heads
    packed = query.reshape(batch, kv_heads, group * count, head_dim)
    if group > 1:
        mask = mask.expand(batch, 1, count, -1).repeat(1, 1, group, 1)
    out = torch.nn.functional.scaled_dot_product_attention(
        packed, key, value, attn_mask=mask, scale=scale
    )
    return out.reshape(batch, heads, count, -1).transpose(1, 2)


def _softcapped(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, softcap: float
) -> Tensor:
    """Attend with capped logits, which no fused kernel does."""
    batch, heads, count, head_dim = query.shape
    kv_heads, width = key.shape[1], key.shape[2]
    packed = query.reshape(batch, kv_heads, heads // kv_heads, count, head_dim)
    logits = capped(torch.matmul(packed, key[:, :, None].transpose(-1, -2)) * scale, softcap)
    hidden = ~mask[:, :, None] if mask is not None else _future(count, width, query.device)
    logits = logits.masked_fill(hidden, torch.finfo(logits.dtype).min)
    weights = torch.softmax(logits, -1, dtype=torch.float32).to(query.dtype)
    out = torch.matmul(weights, value[:, :, None])
    return out.reshape(batch, heads, count, -1).transpose(1, 2)
