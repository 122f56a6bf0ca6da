"""What stays of a page outside so that later queries can find it: the keys of a few telling heads.

A page outside is worth bringing back if a new query would look at it, and which pages that are a
few heads tell: those that calibration saw find what questions ask for. So of each page their keys
are kept, at 8 bits, and new queries of these heads are held against all of them at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
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
_LANES = 16
"""Queries that take as long as one more."""
_ALL_UP_TO = 2048
"""Pages that are all held against all heads."""
_LEFT = 256
"""Of more pages, how many at least are."""
_SAMPLE = 256
"""Of more pages, about how many stand for all."""


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
def rank(queries: Tensor, summaries: Summaries, best: int | None = None) -> Tensor:
    """Say of each page outside how much these queries would look at it.

    For head h, query i and page p, s_hip = max over the page's tokens t of q_i · k_t, by keys and
    queries at 8 bits; `policy.recall.claim` says what follows from these.

    Of more than 2,048 pages, if only the `best` are asked for, one head after the other, the most
    telling first, leaves a third of them, until those left are eight times as many, or 256. What
    the later heads claim is then standardised by a sample of about 256 pages.

    Args:
        queries: (heads, n, head_dim) in the order of `summaries.heads`, rotated as they were in
            their forward; n at least 1.
        summaries: of the pages.
        best: how many pages are asked for; None for all.

    Returns:
        (num_pages,) float32, in the order of `summaries.pages`, higher for what to bring back; -inf
        of a page that was left out.

    Raises:
        MemDecayError: the queries are of other heads.
    """
    heads, count, head_dim = len(summaries.heads), queries.shape[1], summaries.head_dim
    if queries.shape != (heads, count, head_dim) or not count:
        raise MemDecayError(
            f"queries has shape {tuple(queries.shape)}, but it must be ({heads}, n, {head_dim}) "
            f"with n at least 1."
        )
    pages = len(summaries)
    if not pages:
        return torch.zeros(0)
    asked = _Asked(queries.cpu().float(), summaries)
    left = pages if best is None else max(_LEFT, 8 * best)
    if pages <= max(_ALL_UP_TO, left + _SAMPLE):
        return asked.claims(range(heads)).div_(heads)
    among = torch.arange(pages)
    sample = among[:: pages // _SAMPLE]
    worth, done = asked.claims([0]), 1
    while done < heads:
        third = max(left, len(among) // 3)
        kept = worth.topk(third, sorted=False).indices.sort().values
        among, worth = among[kept], worth[kept]
        several = range(done, heads if third == left else done + 1)
        claims = asked.claims(several, torch.cat([sample, among]), len(sample))
        worth += claims[len(sample) :]
        done = several.stop
    return torch.full((pages,), -torch.inf).index_copy_(0, among, worth.div_(heads))


class _Asked:
    """Queries at 8 bits, to be held against pages.

    Args:
        queries: (heads, n, head_dim) float32.
        summaries: of the pages.
    """

    def __init__(self, queries: Tensor, summaries: Summaries) -> None:
        self._summaries, self._kv_of = summaries, summaries._kv_of
        self._count = queries.shape[1]
        self._always = (queries @ summaries._mean[self._kv_of, 0].transpose(1, 2))[..., 0]
        deviation = summaries._deviation[self._kv_of, 0]
        self._codes, self._size = _coded(queries * deviation, (-2, -1))

    def claims(
        self, heads: Iterable[int], numbers: Tensor | None = None, sample: int | None = None
    ) -> Tensor:
        """Return (num_pages,) float32, the sum of what each of these heads claims.

        Args:
            heads: which.
            numbers: (num_pages,) int64, places in `Summaries.pages`; None for all.
            sample: the first so many of the pages stand for all; None if all do.
        """
        pages = len(self._summaries) if numbers is None else len(numbers)
        parts = [*self._parts(numbers)]
        total = torch.zeros(pages)
        products = torch.empty(pages, self._count)
        by_kv_head: dict[int, list[int]] = {}
        for head in heads:
            by_kv_head.setdefault(self._kv_of[head], []).append(head)
        for kv_head, mine in by_kv_head.items():
            asked = _filled(self._codes[mine].flatten(0, 1))
            found = []
            for place, runs, at in parts:
                codes, scale = runs["codes"][kv_head], runs["scale"][kv_head].index_select(0, at)
                # Of all pages it is faster to leave out afterwards those that are gone.
                if numbers is None:
                    most = _most(asked, codes).index_select(0, at)
                else:
                    most = _most(asked, codes.index_select(0, at))
                found.append((place, most, scale.unsqueeze(1)))
            for number, head in enumerate(mine):
                columns = slice(number * self._count, (number + 1) * self._count)
                for place, most, scale in found:
                    scaled = scale * self._size[head, 0]
                    if isinstance(place, slice):
                        torch.mul(most[:, columns], scaled, out=products[place])
                    else:
                        products[place] = most[:, columns] * scaled
                products += self._always[head]
                total += claim(products.T.unsqueeze(0), slice(sample))
        return total

    def _parts(self, numbers: Tensor | None) -> Iterator[tuple[Tensor | slice, Runs, Tensor]]:
        """Yield the runs of each length: where their pages go, and which of the runs these are."""
        start = 0
        for runs in self._summaries._by_length.values():
            end = start + len(runs)
            if numbers is None:
                yield slice(start, end), runs, runs.at()
            else:
                place = ((numbers >= start) & (numbers < end)).nonzero().flatten()
                at = runs.at()[numbers[place] - start]
                if len(place) == len(numbers):
                    yield slice(0, len(numbers)), runs, at
                elif len(place):
                    yield place, runs, at
            start = end


def _filled(asked: Tensor) -> Tensor:
    """Return more than one query filled up to a multiple of 16, for which products are fastest."""
    lacking = -len(asked) % _LANES if len(asked) > 1 else 0
    return torch.cat([asked, asked.new_zeros(lacking, asked.shape[1])]) if lacking else asked


def _most(asked: Tensor, codes: Tensor) -> Tensor:
    """Return (pages, n) int32, the greatest product of (n, head_dim) with each page's tokens."""
    count, (pages, tokens, head_dim) = len(asked), codes.shape
    most = asked.new_empty(pages, count, dtype=torch.int32)
    step = min(pages, max(1, _AT_ONCE // (count * tokens)))
    room = asked.new_empty(step * tokens, count, dtype=torch.int32)
    for start in range(0, pages, step):
        some, out = codes[start : start + step], most[start : start + step]
        products = torch._int_mm(some.view(-1, head_dim), asked.T, out=room[: len(some) * tokens])
        if count % (2 * _LANES) == _LANES and tokens % 2 == 0:
            # The greatest of 32 numbers at once is found faster than of 16.
            both = products.view(-1, tokens // 2, 2 * count).amax(1)
            torch.maximum(both[:, :count], both[:, count:], out=out)
        else:
            torch.amax(products.view(-1, tokens, count), 1, out=out)
    return most


def _coded(numbers: Tensor, axes: int | tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return numbers that share a scale along some axes as int8, and the scales."""
    scale = numbers.abs().amax(axes, keepdim=True) / _TOP
    codes = (numbers / scale.masked_fill(scale == 0, 1)).round_().to(torch.int8)
    return codes, scale
