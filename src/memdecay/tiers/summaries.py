"""What stays of a page outside so that later queries can find it: the keys of a few telling heads.

A page outside is worth bringing back if a new query would look at it, and which pages that are a
few heads tell: those of the profile's evidence. So of each page their keys are kept, at 8 bits,
and new queries of these heads are held against all of them at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from memdecay.errors import MemDecayError
from memdecay.policy.evidence import standardised
from memdecay.tiers.runs import Paged, Runs

_TOP = 127
_AT_ONCE = 1 << 18
"""Dot products that are held at once; they fit into a core's cache."""
_FIT_UP_TO = 8192
"""Tokens from which on the channels' means and deviations stay as they are."""


class Summaries(Paged):
    """The keys of some heads for each page outside, at 8 bits, as one array over all pages.

    A key is head_dim codes and one scale of its own, so it takes head_dim + 4 bytes. The codes are
    of the distance to the channel's mean in its deviations, as some models' keys have channels
    that lie a hundred deviations off, which would leave the others a few codes. Both are found
    anew whenever the tokens have doubled, up to 8,192. Query heads that share a KV head share its
    keys. Not for several threads at once.

    Args:
        heads: (layer, query head) each, such as those of the profile's evidence.
        heads_per_kv: query heads that share a KV head.
        head_dim: of the model.

    Raises:
        MemDecayError: there are no heads.
    """

    def __init__(
        self, heads: Sequence[tuple[int, int]], *, heads_per_kv: int, head_dim: int
    ) -> None:
        if not heads:
            raise MemDecayError("heads is empty, but pages outside are found by at least one head.")
        self.heads = tuple(heads)
        kv_heads = [(layer, head // heads_per_kv) for layer, head in heads]
        self.kv_heads = tuple(dict.fromkeys(kv_heads))
        self._kv_of = [self.kv_heads.index(one) for one in kv_heads]
        layers, numbers = zip(*self.kv_heads, strict=True)
        self._layers, self._numbers = torch.tensor(layers), torch.tensor(numbers)
        count = len(self.kv_heads)
        self._runs = Runs(
            codes=torch.empty(count, 0, head_dim, dtype=torch.int8), scale=torch.empty(count, 0)
        )
        self._mean = torch.zeros(count, 1, head_dim)
        self._deviation = torch.ones(count, 1, head_dim)
        self._fitted = 0

    @property
    def bytes(self) -> int:
        """All that is allocated, at most 1.5 times what the pages that are there need.

        Beside that it is 8 bytes for each channel of each KV head.
        """
        return self._runs.bytes + self._mean.nbytes + self._deviation.nbytes

    def add(self, page_id: int, keys: Tensor) -> None:
        """Add a page that is not there (mutates).

        Args:
            page_id: its number.
            keys: (num_layers, num_kv_heads, n, head_dim), all keys of the page, n at least 1.
        """
        watched = keys[self._layers.to(keys.device), self._numbers.to(keys.device)].cpu().float()
        if not self._fitted:
            self._fit(watched)
        self._runs.add(page_id, **self._as_codes(watched))
        if 2 * self._fitted <= self._runs["scale"].shape[1] <= _FIT_UP_TO:
            codes, scale = self._runs["codes"], self._runs["scale"]
            exact = codes * scale.unsqueeze(-1) * self._deviation + self._mean
            self._fit(exact)
            for name, column in self._as_codes(exact).items():
                self._runs[name].copy_(column)

    def remove(self, page_id: int) -> None:
        """Remove a page that is there (mutates)."""
        self._runs.remove(page_id)

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return all that is kept, as plain JSON values and as tensors; for `restore`."""
        plain, tensors = self._runs.state()
        return {**plain, "fitted": self._fitted}, {
            **tensors,
            "mean": self._mean,
            "deviation": self._deviation,
        }

    def restore(self, plain: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Keep what others of the same heads and model kept (mutates).

        Args:
            plain: of `state`.
            tensors: likewise; they are taken over.
        """
        self._runs.restore(plain, tensors)
        self._fitted = plain["fitted"]
        self._mean, self._deviation = tensors["mean"], tensors["deviation"]

    def _fit(self, keys: Tensor) -> None:
        """Take the means and deviations of the channels from some keys (mutates)."""
        self._fitted = keys.shape[1]
        self._mean = keys.mean(1, keepdim=True)
        deviation = keys.std(1, keepdim=True, correction=0)
        # Of few tokens a channel may show none by chance.
        deviation = deviation.maximum(deviation.mean(-1, keepdim=True) / 100)
        self._deviation = deviation.masked_fill_(deviation == 0, 1)

    def _as_codes(self, keys: Tensor) -> dict[str, Tensor]:
        codes, scale = _coded((keys - self._mean) / self._deviation, -1)
        return {"codes": codes, "scale": scale.squeeze(-1)}


@torch.no_grad()
def rank(queries: Tensor, summaries: Summaries) -> Tensor:
    """Say of each page outside how much these queries would look at it.

    For head h and page p, m_h,p = max over the queries i and the page's tokens t of q_i · k_t; the
    pages of a head are standardised, so the factor of its logits does not matter; a page gets the
    mean of its heads. The queries of a head are held against the keys at 8 bits as well.

    Args:
        queries: (heads, n, head_dim) in the order of `summaries.heads`, rotated as they were in
            their forward; n at least 1.
        summaries: of the pages.

    Returns:
        (num_pages,) float32, in the order of `summaries.pages`, higher for what to bring back.

    Raises:
        MemDecayError: the queries are of other heads.
    """
    runs = summaries._runs
    codes, scale = runs["codes"], runs["scale"]
    heads, count, head_dim = len(summaries.heads), queries.shape[1], codes.shape[2]
    if queries.shape != (heads, count, head_dim) or not count:
        raise MemDecayError(
            f"queries has shape {tuple(queries.shape)}, but it must be ({heads}, n, {head_dim}) "
            f"with n at least 1."
        )
    if not len(summaries):
        return torch.zeros(0)
    queries = queries.cpu().float()
    mean, deviation = (one[summaries._kv_of] for one in (summaries._mean, summaries._deviation))
    always = queries @ mean.transpose(1, 2)
    asked, size = _coded(queries * deviation, (-2, -1))
    most = torch.empty(heads, codes.shape[1])
    step = max(1, _AT_ONCE // count)
    for head, kv_head in enumerate(summaries._kv_of):
        for start in range(0, codes.shape[1], step):
            part = slice(start, start + step)
            products = torch._int_mm(asked[head], codes[kv_head, part].T)
            exact = products.float().mul_(scale[kv_head, part] * size[head]).add_(always[head])
            most[head, part] = exact.amax(0)
    by_page = runs.most(most)
    return torch.stack([standardised(one) for one in by_page]).mean(0)


def _coded(numbers: Tensor, axes: int | tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return numbers that share a scale along some axes as int8, and the scales."""
    scale = numbers.abs().amax(axes, keepdim=True) / _TOP
    codes = (numbers / scale.masked_fill(scale == 0, 1)).round_().to(torch.int8)
    return codes, scale
