"""What stays of a page outside so that later queries can find it: the keys of a few telling heads.

A page outside is worth bringing back if a new query would look at it, and which pages that are a
few heads tell: those that calibration saw find what questions ask for. So of each page their keys
are kept, at 8 bits, and new queries of these heads are held against all of them at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from memdecay.errors import MemDecayError
from memdecay.policy.recall import claim
from memdecay.tiers.runs import Runs

_TOP = 127
_AT_ONCE = 1 << 18
"""Dot products that are held at once; they fit into a core's cache."""
_FIT_UP_TO = 8192
"""Tokens from which on the channels' means and deviations stay as they are."""


class Summaries:
    """The keys of some heads for each page outside, at 8 bits, worked on all at once.

    A page takes head_dim bytes a token and KV head, and 4 bytes for its scale. The codes are of the
    distance to the channel's mean in its deviations, as some models' keys have channels that lie a
    hundred deviations off, which would leave the others a few codes. Both are found anew whenever
    the tokens have doubled, up to 8,192. Query heads that share a KV head share its keys. Pages of
    one length lie together, so that none has to be filled up. Not for several threads at once.

    Args:
        heads: (layer, query head) each, such as those of the profile that calibration found.
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
        self.head_dim = head_dim
        kv_heads = [(layer, head // heads_per_kv) for layer, head in heads]
        self.kv_heads = tuple(dict.fromkeys(kv_heads))
        self._kv_of = [self.kv_heads.index(one) for one in kv_heads]
        layers, numbers = zip(*self.kv_heads, strict=True)
        self._layers, self._numbers = torch.tensor(layers), torch.tensor(numbers)
        self._by_length: dict[int, Runs] = {}
        self._length: dict[int, int] = {}
        self._mean = torch.zeros(len(self.kv_heads), 1, 1, head_dim)
        self._deviation = torch.ones_like(self._mean)
        self._fitted = self._tokens = 0

    def __len__(self) -> int:
        return len(self._length)

    def __contains__(self, page_id: int) -> bool:
        return page_id in self._length

    @property
    def pages(self) -> list[int]:
        """The pages that are there, in the order of their rank."""
        return [page for runs in self._by_length.values() for page in runs.pages]

    @property
    def bytes(self) -> int:
        """All that is allocated, at most 1.5 times what the pages that are there need.

        Beside that it is 8 bytes for each channel of each KV head.
        """
        runs = sum(runs.bytes for runs in self._by_length.values())
        return runs + self._mean.nbytes + self._deviation.nbytes

    def add(self, page_id: int, keys: Tensor) -> None:
        """Add a page that is not there (mutates).

        Args:
            page_id: its number.
            keys: (num_layers, num_kv_heads, n, head_dim), all keys of the page, n at least 1.
        """
        watched = keys[self._layers.to(keys.device), self._numbers.to(keys.device)].cpu().float()
        watched = watched.unsqueeze(1)  # (kv_heads, 1 page, n, head_dim)
        count = watched.shape[2]
        if not self._fitted:
            self._fit(watched)
        if count not in self._by_length:
            codes = watched.new_empty(len(watched), 0, count, self.head_dim, dtype=torch.int8)
            self._by_length[count] = Runs(codes=codes, scale=watched.new_empty(len(watched), 0))
        self._by_length[count].add(page_id, **self._as_codes(watched))
        self._length[page_id] = count
        self._tokens += count
        if 2 * self._fitted <= self._tokens <= _FIT_UP_TO:
            self._fit_again()

    def remove(self, page_id: int) -> None:
        """Remove a page that is there (mutates)."""
        count = self._length.pop(page_id)
        self._tokens -= count
        self._by_length[count].remove(page_id)
        if not len(self._by_length[count]):
            del self._by_length[count]

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return all that is kept, as plain JSON values and as tensors; for `restore`."""
        tensors = {"mean": self._mean, "deviation": self._deviation}
        lengths = {}
        for count, runs in self._by_length.items():
            lengths[str(count)], columns = runs.state()
            tensors |= {f"{count}.{name}": column for name, column in columns.items()}
        return {"lengths": lengths, "fitted": self._fitted}, tensors

    def restore(self, plain: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Keep what others of the same heads and model kept (mutates).

        Args:
            plain: of `state`.
            tensors: likewise; they are taken over.
        """
        for count, runs in plain["lengths"].items():
            columns = {name: tensors[f"{count}.{name}"] for name in ("codes", "scale")}
            self._by_length[int(count)] = kept = Runs(**columns)
            kept.restore(runs, columns)
            self._length |= dict.fromkeys(kept.pages, int(count))
        self._tokens = sum(self._length.values())
        self._fitted = plain["fitted"]
        self._mean, self._deviation = tensors["mean"], tensors["deviation"]

    def _fit(self, keys: Tensor) -> None:
        """Take the channels' means and deviations from (kv_heads, ..., head_dim) (mutates)."""
        flat = keys.flatten(1, -2)
        self._fitted = flat.shape[1]
        self._mean = flat.mean(1).view_as(self._mean)
        deviation = flat.std(1, correction=0).view_as(self._mean)
        # Of few tokens a channel may show none by chance.
        deviation = deviation.maximum(deviation.mean(-1, keepdim=True) / 100)
        self._deviation = deviation.masked_fill_(deviation == 0, 1)

    def _fit_again(self) -> None:
        """Take the means and deviations from all pages, and code these anew (mutates)."""
        exact = {
            count: runs["codes"] * runs["scale"][..., None, None] * self._deviation + self._mean
            for count, runs in self._by_length.items()
        }
        self._fit(torch.cat([one.flatten(1, 2) for one in exact.values()], 1))
        for count, keys in exact.items():
            for name, column in self._as_codes(keys).items():
                self._by_length[count][name].copy_(column)

    def _as_codes(self, keys: Tensor) -> dict[str, Tensor]:
        codes, scale = _coded((keys - self._mean) / self._deviation, (-2, -1))
        return {"codes": codes, "scale": scale[..., 0, 0]}


@torch.no_grad()
def rank(queries: Tensor, summaries: Summaries) -> Tensor:
    """Say of each page outside how much these queries would look at it.

    For head h, query i and page p, s_hip = max over the page's tokens t of q_i · k_t, by keys and
    queries at 8 bits; `policy.recall.claim` says what follows from these.

    Args:
        queries: (heads, n, head_dim) in the order of `summaries.heads`, rotated as they were in
            their forward; n at least 1.
        summaries: of the pages.

    Returns:
        (num_pages,) float32, in the order of `summaries.pages`, higher for what to bring back.

    Raises:
        MemDecayError: the queries are of other heads.
    """
    heads, count, head_dim = len(summaries.heads), queries.shape[1], summaries.head_dim
    if queries.shape != (heads, count, head_dim) or not count:
        raise MemDecayError(
            f"queries has shape {tuple(queries.shape)}, but it must be ({heads}, n, {head_dim}) "
            f"with n at least 1."
        )
    if not len(summaries):
        return torch.zeros(0)
    queries = queries.cpu().float()
    mean = summaries._mean[summaries._kv_of, 0]
    deviation = summaries._deviation[summaries._kv_of, 0]
    always = queries @ mean.transpose(1, 2)
    asked, size = _coded(queries * deviation, (-2, -1))
    found = []
    for runs in summaries._by_length.values():
        products = torch.empty(heads, len(runs), count)
        for kv_head, codes in enumerate(runs["codes"]):
            mine = [head for head, of in enumerate(summaries._kv_of) if of == kv_head]
            most = runs.live(_most(asked[mine].flatten(0, 1), codes)).unflatten(1, (-1, count))
            scale = runs.live(runs["scale"][kv_head]).unsqueeze(-1)
            for number, head in enumerate(mine):
                torch.mul(most[:, number], scale * size[head], out=products[head])
        found.append(products)
    products = torch.cat(found, 1).transpose(1, 2)
    return claim(products + always)


def _most(asked: Tensor, codes: Tensor) -> Tensor:
    """Return (pages, n) int32, the greatest product of (n, head_dim) with each page's tokens."""
    pages, tokens, head_dim = codes.shape
    most = asked.new_empty(pages, len(asked), dtype=torch.int32)
    step = max(1, _AT_ONCE // (len(asked) * tokens))
    for start in range(0, pages, step):
        flat = codes[start : start + step].view(-1, head_dim)
        products = torch._int_mm(flat, asked.T)
        torch.amax(products.view(-1, tokens, len(asked)), 1, out=most[start : start + step])
    return most


def _coded(numbers: Tensor, axes: int | tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return numbers that share a scale along some axes as int8, and the scales."""
    scale = numbers.abs().amax(axes, keepdim=True) / _TOP
    codes = (numbers / scale.masked_fill(scale == 0, 1)).round_().to(torch.int8)
    return codes, scale
