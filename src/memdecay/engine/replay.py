"""What is kept, repeated by the model in idle time: what it attends to meanwhile matters (KVzip).

Nothing of it is stored. A piece is one forward of the decoder over a repeat prompt and the piece's
tokens; in each layer they see what is kept and, causally, themselves. Their own keys and values
live as long as that layer runs, so a piece of n tokens takes the room of n / num_layers kept ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from memdecay.engine.attach import AttachedForward
from memdecay.engine.heads import HeadPool
from memdecay.engine.logits import LOWEST, capped, scale_of

if TYPE_CHECKING:
    from memdecay.engine.cache import MemDecayCache

PIECE = 256
"""At most so many kept tokens are repeated at once."""

LEAST = 16
"""So many tokens of a piece are worth an eviction, if there is not even room for them."""

_FIRST = "\n\nRepeat the previous context exactly:"
_NEXT = "\n\nRepeat the part of the previous context that goes on exactly after:"
LEAD = 8
"""Tokens before a later piece that its prompt ends with."""


def repeat_prompts(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Return the ids of what is said before the first piece, and before a later one."""
    first, later = (
        tokenizer(text, add_special_tokens=False)["input_ids"] for text in (_FIRST, _NEXT)
    )
    return first, later


def repeat_prompt(prompts: tuple[list[int], list[int]], lead: Sequence[int]) -> list[int]:
    """Return what is said before a piece; `lead` are the ids of the kept tokens before it."""
    first, later = prompts
    return [*later, *lead] if lead else first


def repeat_next(
    cache: MemDecayCache, prompts: tuple[list[int], list[int]], ids: Sequence[int]
) -> tuple[int, Tensor | None]:
    """Let the model repeat the next kept tokens that it has not repeated yet.

    Args:
        cache: of one sequence, with a policy that needs replay.
        prompts: from `repeat_prompts`.
        ids: of all tokens seen.

    Returns:
        How many were repeated, 0 if there is no room, and what `MemDecayCache.replay` says then.
    """
    longest = max(len(repeat_prompt(prompts, range(LEAD))), len(repeat_prompt(prompts, ())))
    room = cache.replay_room(longest, len(cache.unreplayed()))
    kept = cache.ledgers[0]["position"].sort().values.tolist()
    chosen = cache.unreplayed()[:room]
    if not len(chosen):
        return 0, None
    lead = kept[: kept.index(int(chosen[0]))][-LEAD:]
    said = [ids[position] for position in chosen.tolist()]
    prompt = repeat_prompt(prompts, [ids[position] for position in lead])
    attention = cache.replay(torch.tensor(said), chosen, torch.tensor(prompt, dtype=torch.int64))
    return len(said), attention


def token_equivalents(count: int, num_layers: int, parts: int = 1) -> int:
    """Return how many kept tokens take the room of `count` tokens in one layer, rounded up.

    With `parts` it is so many parts of a token, as in `Ledger.parts`.
    """
    return -(-count * parts // num_layers)


def kept_by_head(cache: MemDecayCache, layer: int) -> list[tuple[Tensor, Tensor, Tensor | None]]:
    """Return for each KV head of a layer what it keeps: keys, values, and whose they are.

    Keys and values are `(n, head_dim)`; then `(n,)` int64, the tokens' slots in the ledger, or
    None if they are the ledger's own slots.
    """
    pool, table, main = cache.pools[layer], cache.table_of(layer), cache.main
    if isinstance(pool, HeadPool):
        return [pool.head(head) for head in range(len(pool.lengths))]
    slots = None
    if table is not main:
        index, order = main.index[0, : main.width].sort()
        slots = order[torch.searchsorted(index, table.index[0, : table.width])]
    kept = zip(pool.keys(table.width)[0], pool.values(table.width)[0], strict=True)
    return [(keys, values, slots) for keys, values in kept]


class ReplayForward(AttachedForward):
    """One piece being repeated.

    Args:
        cache: of one sequence.
        prompt: tokens of the repeat prompt, whose attention does not count.
        count: all tokens of the forward, the prompt's too.
    """

    cache: MemDecayCache

    def __init__(self, cache: MemDecayCache, *, prompt: int, count: int) -> None:
        self.cache = cache
        self.prompt = prompt
        self.count = count
        self.first_index = cache.seen
        self.kv_len = cache.ledgers[0].length
        self.mask_layer = 0
        self.layer = 0
        self._most: list[Tensor] = []

    def mask(
        self, *, q_length: int, q_offset: int, mask_function: Any, device: Any = "cpu", **_: Any
    ) -> Tensor:
        """Return who may see whom, `(1, 1, q_length, n + q_length)` bool.

        The first n columns are what a layer with a sliding window keeps. Elsewhere n is 0: what is
        kept there comes before the piece, whichever head keeps it, and every query sees it.
        """
        table = self.cache.table_of(self.mask_layer)
        query = torch.arange(q_length, device=device) + q_offset
        key = query
        if table.window is not None:
            key = torch.cat([table.index[0, : table.width], query])
        zero = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=device)
        visible: Tensor = mask_function(
            zero, zero, query[None, None, :, None], key[None, None, None, :]
        )
        return visible.expand(1, 1, q_length, len(key))

    @torch.no_grad()
    def attention(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor,
        *,
        scaling: float | None = None,
        softcap: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Attend to what is kept and to the piece itself, one KV head at a time.

        Args:
            module: the attention module.
            query: `(1, num_heads, count, head_dim)`.
            key: `(1, num_kv_heads, count, head_dim)`, of the piece alone.
            value: like `key`.
            attention_mask: from `mask`.
            scaling: factor of the logits, 1/sqrt(head_dim) by default.
            softcap: tanh cap of the logits (Gemma 2).
            kwargs: ignored, but for what memdecay cannot serve.

        Returns:
            `(1, count, num_heads, head_dim)`, and None for the weights.
        """
        scale = scale_of(module, query, scaling, kwargs)
        heads, count, head_dim = query.shape[1:]
        kv_heads = key.shape[1]
        packed = query[0].reshape(kv_heads, heads // kv_heads * count, head_dim)
        hidden = ~attention_mask[0, 0]
        slides = self.cache.layout.windows[self.layer] is not None
        out, most = [], []
        for head, (keys, values, slots) in enumerate(kept_by_head(self.cache, self.layer)):
            kept = len(keys)
            logits = torch.cat([packed[head] @ keys.t(), packed[head] @ key[0, head].t()], -1)
            logits = capped(logits.float().mul_(scale), softcap)
            by_query = logits.view(-1, count, kept + count)
            by_query[..., kept:].masked_fill_(hidden[:, -count:], LOWEST)
            if slides:
                by_query[..., :kept].masked_fill_(hidden[:, :-count], LOWEST)
            weights = torch.softmax(logits, -1)
            shares = weights.view(-1, count, kept + count)[:, self.prompt :, :kept].amax(1)
            if slots is not None:
                shares = shares.new_zeros(len(shares), self.kv_len).index_copy_(1, slots, shares)
            most.append(shares)
            weights = weights.to(query.dtype)
            mixed = weights[:, :kept] @ values + weights[:, kept:] @ value[0, head]
            out.append(mixed.view(-1, count, mixed.shape[-1]))
        self._most.append(torch.cat(most))
        return torch.cat(out)[None].transpose(1, 2), None

    def observed(self) -> Tensor:
        """Return `(num_layers, num_heads, kv_len)` float32, the most attention each got."""
        return torch.stack(self._most)
