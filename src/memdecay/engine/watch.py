"""A few attention heads watched at every query: the most that each of them gave to each token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from memdecay.engine.logits import LOWEST, capped
from memdecay.errors import ProfileError

if TYPE_CHECKING:
    from memdecay.engine.support import Layout

_AT_ONCE = 64


class Watch:
    """The heads that a policy wants watched.

    Args:
        heads: (layer, query head) each.
        layout: of the model.

    Raises:
        ProfileError: the model has no such layer or head.
    """

    def __init__(self, heads: Sequence[tuple[int, int]], layout: Layout) -> None:
        self.heads = tuple(heads)
        self.by_layer: dict[int, list[tuple[int, int]]] = {}
        check_heads(self.heads, layout)
        for rank, (layer, head) in enumerate(self.heads):
            self.by_layer.setdefault(layer, []).append((rank, head))

    def __len__(self) -> int:
        return len(self.heads)


def check_heads(heads: Iterable[tuple[int, int]], layout: Layout) -> None:
    """Refuse (layer, query head) pairs that a model does not have.

    Raises:
        ProfileError: the first of them is named.
    """
    for layer, head in heads:
        if layer >= len(layout.windows) or head >= layout.num_heads:
            raise ProfileError(
                f"The profile watches head {head} of layer {layer}, but this model has "
                f"{len(layout.windows)} layers of {layout.num_heads} heads; calibrate for it."
            )


@torch.no_grad()
def peak_attention(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    *,
    own: Tensor | None = None,
    real: Tensor | None = None,
) -> Tensor:
    """Return `(batch, width)`, the most attention that a query of one head gave to each key.

    What a token gives to itself does not count, and neither do queries that are padding.

    Args:
        query: `(batch, count, head_dim)`, of the head.
        key: `(batch, width, head_dim)`, what its KV head keeps, the forward's own tokens too.
        mask: `(batch, 1, count, width)` bool; None where the last `count` keys are the queries'
            own, in order, and all others come before them.
        scale: factor of the logits.
        softcap: tanh cap of the logits.
        own: `(batch, count)` int64, the key of each query's own token, with a mask.
        real: `(batch, count)` bool, False for padding; None if all are real.
    """
    batch, count, _ = query.shape
    width = key.shape[1]
    past = width - count
    keys = key.transpose(1, 2)
    if own is None:
        own = torch.arange(past, width, device=query.device).expand(batch, count)
    if query.dtype == torch.float32:
        query, scale = query * scale, 1.0
    most = torch.zeros(batch, width, device=query.device)
    for start in range(0, count, _AT_ONCE):
        stop = min(start + _AT_ONCE, count)
        seen = past + stop if mask is None else width
        logits = torch.matmul(query[:, start:stop], keys[..., :seen]).float()
        logits = capped(logits if scale == 1 else logits.mul_(scale), softcap)
        if mask is not None:
            logits.masked_fill_(~mask[:, 0, start:stop], LOWEST)
        else:
            future = torch.ones(stop - start, stop - start, device=query.device).triu_(1) > 0
            logits[..., past + start :].masked_fill_(future, LOWEST)
        shares = torch.softmax(logits, -1)
        shares.scatter_(2, own[:, start:stop, None], 0)
        if real is not None:
            shares.masked_fill_(~real[:, start:stop, None], 0)
        most[:, :seen] = torch.maximum(most[:, :seen], shares.amax(1))
    return most
