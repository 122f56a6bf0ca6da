"""Which attention heads foretell what will be asked: chosen on episodes whose answers are known.

A head's say on a token is the log of the most attention that the token got there, from any other
token. Heads are added one by one, each time the one with which the sum ranks the needed tokens
best above the others, by the area under the ROC curve.
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
        among = self.needed[self.counted]
        return bool(among.any()) and not bool(among.all())


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

    Raises:
        StudyError: there is no episode, or one has no needed tokens among those that count, or no
            others.
    """
    _check(episodes)
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
