"""Which attention heads foretell what will be asked: chosen on episodes whose answers are known.

A head's say on a token is the log of the most attention that the token got there, from any other
token. Some heads look at what will be needed, others at what will not, so that a weight may be
below 0. Heads are added one by one, each time the one with which a ridge regression of what is
needed leaves least unexplained (orthogonal matching pursuit); their weights are that regression's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memdecay.calibration import recall
from memdecay.errors import StudyError
from memdecay.evidence import FLOOR, READ, REPLAY, EvidenceHead
from memdecay.policy.evidence import CLIP, REACH, evidence, shared
from memdecay.policy.memdecay import MemDecay
from memdecay.policy.memdecay_replay import MemDecayReplay

COUNTS = {policy.use: policy.most_heads for policy in (MemDecay, MemDecayReplay)}
"""How many heads each set takes; the first of those for replay are for reading."""
RIDGE = 0.3
"""λ of the regression, in mean variances of a head's say."""
BEFORE, AFTER = 2, 1
"""Tokens before and after a needed one that are needed too: a question finds a value by them."""


@dataclass(frozen=True)
class Watched:
    """What every head gave to the tokens of one episode.

    Args:
        cluster: of the episode, such as its scenario.
        peaks: (2, num_layers, num_heads, n), the most attention that each token got from another
            one while it was read, and while it was repeated.
        needed: (n,) bool, tokens that a question will ask for.
        counted: (n,) bool, tokens to tell apart; not the newest, which nothing has read yet.
        asked: what every head claimed at each question, for heads of recall.
    """

    cluster: str
    peaks: Tensor
    needed: Tensor
    counted: Tensor
    asked: tuple[recall.Asked, ...] = ()

    @property
    def usable(self) -> bool:
        """Whether there are tokens to tell apart: needed ones, and others."""
        wide = around(self.needed)[self.counted]
        return bool(self.needed[self.counted].any()) and not bool(wide.all())


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
        The heads, the one that was chosen first in front, their weights scaled to a sum of 1 in
        absolute value, and the mean over episodes of the AUC of their evidence on these episodes.

    Raises:
        StudyError: there is no episode, or one has no needed tokens among those that count, or no
            others, or no head tells any tokens apart.
    """
    _check(episodes)
    times = (READ,) if use == "read" else (READ, REPLAY)
    shape = (len(times), *episodes[0].peaks.shape[1:3])
    logs = [(one.peaks[: len(times)].float() + FLOOR).log().flatten(0, 2) for one in episodes]
    counted = [one[:, e.counted] for one, e in zip(logs, episodes, strict=True)]
    mean = torch.stack([one.mean(1) for one in counted]).mean(0)
    std = torch.stack([one.std(1) for one in counted]).mean(0).clamp(min=1e-3)
    if not bool((std > 1e-3).any()):
        raise StudyError("No head gave one token more than another, so none can be chosen.")
    covariance, with_target = _moments(logs, episodes, mean, std)
    chosen: list[int] = []
    reading = len(mean) // len(times)
    for allowed, most in (
        (range(reading), COUNTS["read"]),
        (range(reading, len(mean)), COUNTS["replay"]),
    )[: len(times)]:
        chosen, weights = pursue(covariance, with_target, most, chosen, allowed)
    weights = weights / weights.abs().sum().clamp(min=1e-12)
    heads = []
    for number, weight in zip(chosen, weights.tolist(), strict=True):
        when, layer, head = (int(n) for n in torch.unravel_index(torch.tensor(number), shape))
        rounded = (round(float(one[number]), 4) for one in (mean, std))
        if weight := round(weight, 5):
            heads.append(EvidenceHead(layer, head, times[when], weight, *rounded))
    reached = [told(one, heads) for one in episodes]
    return tuple(heads), sum(reached) / len(reached)


def _moments(
    logs: Sequence[Tensor], episodes: Sequence[Watched], mean: Tensor, std: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the heads' covariance (n, n) and that with what is needed (n,), float64.

    Every episode counts alike, and in it what is needed as much as all other tokens.
    """
    count = len(mean)
    products, with_needed = torch.zeros(count, count).double(), torch.zeros(count).double()
    total, needed_share = torch.zeros(count).double(), 0.0
    for one, episode in zip(logs, episodes, strict=True):
        said = smooth(((one - mean[:, None]) / std[:, None]).clamp(-CLIP, CLIP))
        said = said[:, episode.counted].double()
        needed = around(episode.needed)[episode.counted].double()
        share = needed.mean()
        weight = torch.where(needed > 0, 1 / share, 1 / (1 - share)) / (2 * len(needed))
        weight = weight / (weight.sum() * len(episodes))
        products += (said * weight) @ said.t()
        with_needed += said @ (weight * needed)
        total += said @ weight
        needed_share += float(weight @ needed)
    return products - torch.outer(total, total), with_needed - total * needed_share


def around(needed: Tensor, before: int = BEFORE, after: int = AFTER) -> Tensor:
    """Return (n,) bool: needed tokens, `before` tokens before each, and `after` after it."""
    wide = needed.clone()
    for distance in range(1, before + 1):
        wide[:-distance] |= needed[distance:]
    for distance in range(1, after + 1):
        wide[distance:] |= needed[:-distance]
    return wide


def pursue(
    covariance: Tensor,
    with_target: Tensor,
    count: int,
    before: Sequence[int] = (),
    among: Sequence[int] | None = None,
) -> tuple[list[int], Tensor]:
    """Choose variables of a ridge regression one by one, each the one that explains most then.

    Args:
        covariance: (n, n) float64 of the variables.
        with_target: (n,) float64, their covariance with what is to be explained.
        count: how many to have in the end; fewer if there are no more.
        before: those that were chosen before.
        among: those to choose from; all if None.

    Returns:
        The variables in the order of their choice, and (chosen,) float64, their weights together.
    """
    ridge = RIDGE * covariance.diagonal().mean().clamp(min=1e-12)
    penalised = covariance + ridge * torch.eye(len(covariance), dtype=covariance.dtype)
    chosen = list(before)
    free = torch.ones(len(covariance), dtype=torch.bool)
    if among is not None:
        free = torch.zeros_like(free)
        free[list(among)] = True
    free[chosen] = False
    weights = torch.linalg.solve(penalised[chosen][:, chosen], with_target[chosen])
    while len(chosen) < count and bool(free.any()):
        across = covariance[:, chosen]
        explained = torch.linalg.solve(penalised[chosen][:, chosen], across.t())
        unexplained = with_target - across @ weights
        own = penalised.diagonal() - (across * explained.t()).sum(1)
        gain = (unexplained.square() / own).masked_fill(~free, -1)
        best = int(gain.argmax())
        chosen.append(best)
        free[best] = False
        weights = torch.linalg.solve(penalised[chosen][:, chosen], with_target[chosen])
    return chosen, weights


def told(episode: Watched, heads: Sequence[EvidenceHead]) -> float:
    """Return the AUC that heads of a profile have on an episode, as a policy would use them.

    Args:
        episode: usable.
        heads: at least one.
    """
    peaks = [episode.peaks[(READ, REPLAY).index(h.when), h.layer, h.head].float() for h in heads]
    said = shared(evidence(peaks, heads), torch.arange(len(episode.needed)))
    return float(auc(said[episode.counted], episode.needed[episode.counted]))


def held_out(episodes: Sequence[Watched], use: str) -> float | None:
    """Return the AUC on episodes that had no part in the choice: heads of the other clusters.

    Args:
        episodes: as for `choose`.
        use: likewise.

    Returns:
        The mean over the episodes; None if all are of one cluster.

    Raises:
        StudyError: as `choose`.
    """
    clusters = dict.fromkeys(one.cluster for one in episodes)
    if len(clusters) < 2:
        return None
    reached = []
    for cluster in clusters:
        heads, _ = choose([one for one in episodes if one.cluster != cluster], use)
        reached += [told(one, heads) for one in episodes if one.cluster == cluster]
    return sum(reached) / len(reached)


def measured(
    episodes: Sequence[Watched],
) -> tuple[dict[str, tuple[EvidenceHead, ...]], dict[str, Any]]:
    """Choose the heads of every set, and say how good they are.

    Returns:
        The heads, and what a profile's provenance says of them under `evidence`: how many
        episodes, of which clusters, and for each set the AUC on these episodes ("auc") and on
        episodes of clusters that had no part in the choice ("auc_held_out", see `held_out`). For
        heads of recall, if there are questions, the mean reciprocal rank of the page with the
        answer ("mrr", "mrr_held_out").

    Raises:
        StudyError: as `choose`.
    """
    found = {use: choose(episodes, use) for use in COUNTS}
    apart = {use: held_out(episodes, use) for use in COUNTS}
    about = {
        "episodes": len(episodes),
        "clusters": list(dict.fromkeys(one.cluster for one in episodes)),
        "auc": {use: round(reached, 4) for use, (_, reached) in found.items()},
        "auc_held_out": {
            use: None if reached is None else round(reached, 4) for use, reached in apart.items()
        },
    }
    chosen = {use: heads for use, (heads, _) in found.items()}
    asked = [question for one in episodes for question in one.asked]
    if asked:
        chosen["recall"], early, early_apart = recall.measured(asked)
        about["questions"] = len(asked)
        about["mrr"] = round(early, 4)
        about["mrr_held_out"] = None if early_apart is None else round(early_apart, 4)
    return chosen, about


def _check(episodes: Sequence[Watched]) -> None:
    if not episodes:
        raise StudyError("There is no episode to choose evidence heads on; at least one is needed.")
    for one in episodes:
        if not one.usable:
            raise StudyError(
                f"An episode of {one.cluster!r} has {int(one.needed[one.counted].sum())} needed "
                f"tokens among the {int(one.counted.sum())} that count, so no head can tell them "
                f"from others; leave it out."
            )
