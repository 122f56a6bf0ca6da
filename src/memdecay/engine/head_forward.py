"""One forward over keep sets that differ by KV head.

All that a head kept from before is older than every query of the forward, and the forward's own
tokens are its last entries, in order. So who sees whom is one causal triangle at the end of each
head's entries, whatever was evicted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from memdecay.engine.forward import Forward, _future
from memdecay.engine.heads import HeadPool
from memdecay.engine.logits import LOWEST, capped, scale_of
from memdecay.engine.watch import peak_attention

if TYPE_CHECKING:
    from memdecay.engine.head_cache import HeadCache


class HeadForward(Forward):
    """A forward of a `HeadCache`; see `Forward`."""

    cache: HeadCache
    _mass: Tensor | None = None
    _hidden: Tensor | None = None

    @property
    def observes_all(self) -> bool:
        """Return False: each head's probabilities live as long as it attends."""
        return False

    def mask(self, **_: Any) -> None:
        """Return None: `attention` knows who may see whom."""

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
        """Attend, every query head to what its KV head keeps, and record the mass.

        Args:
            module: the attention module.
            query: `(1, num_heads, count, head_dim)`.
            key: `(1, num_kv_heads, count, head_dim)`, of the new tokens, which are stored already.
            value: like `key`.
            attention_mask: None, from `mask`.
            scaling: factor of the logits, 1/sqrt(head_dim) by default.
            softcap: tanh cap of the logits (Gemma 2).
            kwargs: passed on to the model's own attention where that runs.

        Returns:
            `(1, count, num_heads, head_dim)`, and None for the weights.
        """
        scale = scale_of(module, query, scaling, kwargs)
        pool = self.cache.pool_of(self.layer)
        _, self.num_heads, count, head_dim = query.shape
        # The query heads of a KV head, which read the same keys, are rows of one matrix.
        packed = query.reshape(len(pool.lengths), -1, count, head_dim)
        if count > 1 and self.observing:
            self._observe(packed, pool, scale, softcap)
        self._watch(query, pool, scale, softcap)
        if count > 1 and softcap is None and set(pool.lengths) == {count}:
            out, _ = sdpa_attention_forward(
                module, query, key, value, None, scaling=scaling, **kwargs
            )
            return out, None
        rows = packed.flatten(1, 2)
        if softcap is None and (count > 1 or not self.observing):
            mixed = self._fused(rows, pool, scale)
        else:
            mixed = self._weighted(rows, pool, scale, softcap)
        return mixed.reshape(1, self.num_heads, count, -1).transpose(1, 2), None

    def _fused(self, rows: Tensor, pool: HeadPool, scale: float) -> Tensor:
        """Attend with fused kernels; `rows` and the result are `(num_kv_heads, rows, head_dim)`."""
        if pool.even:
            mask = self._visible(rows, pool.lengths[0])
            keys, values = pool.block()
            return sdpa(rows[None], keys[None], values[None], attn_mask=mask, scale=scale)[0]
        mixed = []
        for head, length in enumerate(pool.lengths):
            keys, values, _ = pool.head(head)
            mask = self._visible(rows, length)
            one, keys, values = rows[head, None, None], keys[None, None], values[None, None]
            mixed.append(sdpa(one, keys, values, attn_mask=mask, scale=scale)[0, 0])
        return torch.stack(mixed)

    def _weighted(
        self, rows: Tensor, pool: HeadPool, scale: float, softcap: float | None
    ) -> Tensor:
        """Attend in steps, for softcaps, and for decode steps whose softmax is observed."""
        mixed = []
        for head, length in enumerate(pool.lengths):
            keys, values, slots = pool.head(head)
            logits = _logits(rows[head], keys, scale, softcap)
            visible = self._visible(rows, length)
            if visible is not None:
                logits = logits.masked_fill(~visible, LOWEST)
            weights = torch.softmax(logits, -1)
            if self.observing and self.count == 1:
                self._seen(1).index_add_(1, slots, weights.detach().sum(0)[None])
            mixed.append(weights.to(values.dtype) @ values)
        return torch.stack(mixed)

    def _visible(self, rows: Tensor, length: int) -> Tensor | None:
        """Return `(rows, length)` bool, what each row of a head sees; None for all."""
        if self.count == 1:
            return None
        if self._hidden is None or self._hidden.shape[1] < length:
            longest = max(max(pool.lengths) for pool in self.cache.head_pools()) + self.count
            future = _future(self.count, longest, rows.device)
            self._hidden = ~future.repeat(rows.shape[1] // self.count, 1)
        return self._hidden[:, self._hidden.shape[1] - length :]

    # Observation

    @torch.no_grad()
    def _observe(self, packed: Tensor, pool: HeadPool, scale: float, softcap: float | None) -> None:
        """Add this layer's mass of the last queries of a prompt."""
        last = min(self.cache.window, self.count)
        seen = self._seen(last)
        for head, length in enumerate(pool.lengths):
            keys, _, slots = pool.head(head)
            logits = _logits(packed[head, :, -last:], keys, scale, softcap)
            hidden = _future(last, length, keys.device)
            logits = logits.masked_fill(hidden, LOWEST)
            seen.index_add_(1, slots, torch.softmax(logits, -1).sum(0))

    @torch.no_grad()
    def _watch(self, query: Tensor, pool: HeadPool, scale: float, softcap: float | None) -> None:
        """Note what the watched heads of this layer gave most, 0 to what they do not hold."""
        main = self.cache.main
        for rank, head in self.cache.watch.by_layer.get(self.layer, ()):
            keys, _, slots = pool.head(head * len(pool.lengths) // self.num_heads)
            peak = peak_attention(query[:, head], keys[None], None, scale, softcap)
            everywhere = peak.new_zeros(1, main.width)
            self._note_peak(rank, everywhere.index_copy_(1, slots, peak))

    def _seen(self, queries: int) -> Tensor:
        """Return `(queries, kv_len)` float32, the mass of all layers and heads so far."""
        if self._mass is None:
            self._mass = torch.zeros(
                queries, self.cache.main.width, device=self.cache.layout.device
            )
        return self._mass

    def masses(self) -> list[Tensor]:
        """Return `(kv_len, queries)`, the mass of each of the last queries, in a list of one.

        A head that does not hold a token gives it nothing.
        """
        mass = self._seen(1) / (len(self.cache.layers) * self.num_heads)
        return [mass.t()]


def _logits(query: Tensor, keys: Tensor, scale: float, softcap: float | None) -> Tensor:
    return capped((query @ keys.t()).float().mul(scale), softcap)
