"""A few attention heads watched at every query: the most that each of them gave to each token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from memdecay.engine.logits import LOWEST, capped
from memdecay.errors import ProfileError

if TYPE_CHECKING:
    from memdecay.engine.forward import Forward
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
    forward: Forward,
    query: Tensor,
    key: Tensor,
    index: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Return `(batch, width)`, the most attention that a query of one head gave to each key.

    What a token gives to itself does not count, and neither do queries that are padding.

    Args:
        forward: that is running.
        query: `(batch, count, head_dim)`, of the head.
        key: `(batch, width, head_dim)`, what its KV head keeps, the forward's own tokens too.
        index: `(batch, width)` int64, which token of the sequence each key is of.
        mask: `(batch, 1, count, width)` bool, or None where plain causal attention needs none.
        scale: factor of the logits.
        softcap: tanh cap of the logits.
    """
    count = query.shape[1]
    keys = key.transpose(1, 2)
    most = torch.zeros(index.shape, device=query.device)
    for start in range(0, count, _AT_ONCE):
        stop = min(start + _AT_ONCE, count)
        logits = torch.matmul(query[:, start:stop], keys).float().mul_(scale)
        logits = capped(logits, softcap)
        own = torch.arange(start, stop, device=query.device) + forward.first_index
        if mask is not None:
            hidden = ~mask[:, 0, start:stop]
        else:
            hidden = index[:, None, :] > own[None, :, None]
        logits.masked_fill_(hidden, LOWEST)
        shares = torch.softmax(logits, -1)
        shares.masked_fill_(index[:, None, :] == own[None, :, None], 0)
        if forward.real is not None:
            shares.masked_fill_(~forward.real[:, start:stop, None], 0)
        most = torch.maximum(most, shares.amax(1))
    return most
