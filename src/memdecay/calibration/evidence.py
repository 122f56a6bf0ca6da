"""Which attention heads foretell what will be asked: chosen on episodes whose answers are known.

A head's say on a token is the log of the most attention that the token got there, from any other
token. Heads are added one by one, each time the one with which the sum ranks the needed tokens
best above the others, by the area under the ROC curve.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from memdecay.evidence import FLOOR, READ, REPLAY, EvidenceHead
from memdecay.policy.evidence import CLIP, REACH

POOL = 40
"""Heads that are considered: the best ones, each alone."""
AGAIN = 0.005
"""What a head that was chosen before must add more than another one."""
COUNTS = {"read": 8, "replay": 12}
"""How many heads each set takes, a head that is taken twice counted twice."""


@dataclass(frozen=True)
class Watched:
    """What every head gave to the tokens of one episode.

    Args:
        cluster: of the episode, such as its scenario.
        peaks: (2, num_layers, num_heads, n), the most attention that each token got from another
            one while it was read, and while it was repeated.
        needed: (n,) bool, tokens that a question will ask for.
        counted: (n,) bool, tokens to tell apart; not the newest, which nothing has read yet.
    """

    cluster: str
    peaks: Tensor
    needed: Tensor
    counted: Tensor


def smooth(values: Tensor, reach: int = REACH) -> Tensor:
    """Average (..., n) over neighbours at most `reach` positions away; ends have fewer."""
    return torch.nn.functional.avg_pool1d(
        values.flatten(0, -2)[None], 2 * reach + 1, 1, reach, count_include_pad=False
    )[0].view_as(values)


def auc(values: Tensor, needed: Tensor) -> Tensor:
    """Return (...,), the chance that a needed token has a higher value than another one.

    Of equal values the later one counts as higher, as good as at random among many values.

    Args:
        values: (..., n).
        needed: (n,) bool, some of them true and some false.
    """
    rank = values.argsort(stable=True, dim=-1).argsort(-1).double() + 1
    count = int(needed.sum())
    others = len(needed) - count
    return (rank[..., needed].sum(-1) - count * (count + 1) / 2) / (count * others)


def choose(episodes: Sequence[Watched], use: str) -> tuple[tuple[EvidenceHead, ...], float]:
    """Choose the heads of one set, and return them with the AUC that they reach together.

    Args:
        episodes: at least one, with needed tokens.
        use: "read" for heads watched while reading, "replay" for both kinds.

    Returns:
        The heads, and the mean over episodes of the AUC of their evidence on these episodes.
    """
    times = (READ,) if use == "read" else (READ, REPLAY)
    logs = [(one.peaks[: len(times)].float() + FLOOR).log() for one in episodes]
    shape = logs[0].shape[:3]
    logs = [one.flatten(0, 2) for one in logs]
    means = [one[:, e.counted].mean(1) for one, e in zip(logs, episodes, strict=True)]
    stds = [one[:, e.counted].std(1).clamp(min=1e-3) for one, e in zip(logs, episodes, strict=True)]
    said = []
    for one, mean, std in zip(logs, means, stds, strict=True):
        said.append(smooth(((one - mean[:, None]) / std[:, None]).clamp(-CLIP, CLIP)))

    def score(values: Sequence[Tensor]) -> Tensor:
        each = [
            auc(value[..., e.counted], e.needed[e.counted])
            for value, e in zip(values, episodes, strict=True)
        ]
        return torch.stack(each).mean(0)

    pool = score(said).topk(min(POOL, len(said[0]))).indices
    candidates = [one[pool] for one in said]
    weights = torch.zeros(len(pool))
    for _ in range(COUNTS[use]):
        with_each = score([(weights @ one)[None] + one for one in candidates])
        weights[(with_each - AGAIN * (weights > 0)).argmax()] += 1
    reached = float(score([(weights @ one)[None] for one in candidates])[0])
    mean, std = torch.stack(means).mean(0), torch.stack(stds).mean(0)
    heads = []
    for place in weights.nonzero().flatten().tolist():
        number = int(pool[place])
        when, layer, head = (int(one) for one in torch.unravel_index(pool[place], shape))
        heads.append(
            EvidenceHead(
                layer,
                head,
                times[when],
                float(weights[place]),
                round(float(mean[number]), 4),
                round(float(std[number]), 4),
            )
        )
    return tuple(heads), reached
