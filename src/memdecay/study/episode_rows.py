"""The rows of one episode: what each condition keeps, and what is answered from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from memdecay.errors import BudgetError, StudyError
from memdecay.regions import Profile
from memdecay.study.answers import Ask, Reply, answer
from memdecay.study.conditions import Condition
from memdecay.study.keeping import Seen, budget_tokens, digest, keep_sets, kept_count, oracle
from memdecay.study.recording import Probe, Recording, question_mass
from memdecay.study.scenario import Episode, find_gold
from memdecay.study.settings import Setting

_Job = tuple[Condition, float, Probe, Tensor]


def episode_rows(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    recording: Recording,
    chosen: Sequence[Condition],
    profiles: Mapping[str, Profile],
    setting: Setting,
    provenance: Mapping[str, str],
    *,
    rows: int = 48,
    advance: Callable[[float], None] = lambda share: None,
) -> list[dict[str, Any]]:
    """Return one row for each condition, budget and probe of an episode.

    Conditions that keep the same tokens are asked once: their answers are the same.

    Args:
        model: the model that read the episode.
        tokenizer: its tokenizer.
        recording: the episode.
        chosen: what to compare.
        profiles: the profile for each of "calibrated" and "default" rates.
        setting: for the rows' names.
        provenance: the rows' `versions`, `commit` and `date`.
        rows: most questions of one batch.
        advance: is told which share of the work was done since the last time.

    Raises:
        StudyError: what is pinned does not fit a budget.
    """
    jobs = [
        (condition, share, probe, kept)
        for condition in chosen
        for share, probe, kept in _kept(model, recording, condition, profiles)
    ]
    asks: dict[tuple[str, str], Ask] = {}
    for _, _, probe, kept in jobs:
        key = (digest(kept), probe.fact.region)
        asks.setdefault(key, Ask(kept, probe.question, probe.gold))
    replies = answer(
        model,
        recording.cache,
        list(asks.values()),
        ends=recording.ends,
        rows=rows,
        advance=lambda count: advance(count / len(asks)),
    )
    replied = dict(zip(asks, replies, strict=True))
    return [
        {
            **_row(tokenizer, recording, job, replied[digest(job[3]), job[2].fact.region], setting),
            **provenance,
        }
        for job in jobs
    ]


def _kept(
    model: PreTrainedModel,
    recording: Recording,
    condition: Condition,
    profiles: Mapping[str, Profile],
) -> list[tuple[float, Probe, Tensor]]:
    shares = condition.budgets
    budgets = [budget_tokens(share, recording.seq_len) for share in shares]
    if condition.policy == "oracle":
        masses = {
            probe.fact.region: question_mass(model, recording, probe) for probe in recording.probes
        }
        return [
            (share, probe, oracle(masses[probe.fact.region], probe.where, budget))
            for share, budget in zip(shares, budgets, strict=True)
            for probe in recording.probes
        ]
    profile = profiles[condition.rates]
    try:
        sets = keep_sets(
            recording.tape,
            recording.observations,
            condition,
            profile,
            budgets,
            _seen(recording),
        )
    except BudgetError as error:
        raise StudyError(
            f"Episode {recording.episode.name!r} cannot be evicted to {min(budgets)} tokens by "
            f"{condition.name}: {error}"
        ) from None
    return [
        (share, probe, kept)
        for share, kept in zip(shares, sets, strict=True)
        for probe in recording.probes
    ]


def _seen(recording: Recording) -> Seen | None:
    if recording.peaks is None:
        return None
    layout = recording.cache.layout
    shape = (len(layout.windows), layout.num_kv_heads)
    return Seen(recording.heads, recording.peaks, recording.replay, shape)


def asked(setting: Setting, episode: Episode, probe: Probe) -> dict[str, Any]:
    """Return what a row says of its question, whatever was kept for it."""
    about = {"region": probe.fact.region, "fact_kind": probe.fact.kind}
    return {**_read(setting, episode), **about}


def _read(setting: Setting, episode: Episode) -> dict[str, Any]:
    return {
        "setting": setting.name,
        "model": setting.model_name,
        "tier": setting.tier,
        "dtype": setting.dtype,
        "scenario": episode.scenario,
        "variant": episode.variant,
    }


def _row(
    tokenizer: PreTrainedTokenizerBase,
    recording: Recording,
    job: _Job,
    reply: Reply,
    setting: Setting,
) -> dict[str, Any]:
    condition, share, probe, kept = job
    text = str(tokenizer.decode(reply.ids, skip_special_tokens=True))
    return {
        **asked(setting, recording.episode, probe),
        "group": condition.group,
        "policy": condition.name,
        "condition": condition.to_json(),
        "seed": condition.seed,
        "budget": share,
        "budget_tokens": budget_tokens(share, recording.seq_len),
        "seq_len": recording.seq_len,
        "kept_tokens": kept_count(kept),
        "recall": find_gold(text, probe.fact.value) is not None,
        "answer": text,
        "gold": probe.fact.value,
        "gold_logprob": reply.gold_logprob,
        "gold_tokens": len(probe.gold),
        "keep_digest": digest(kept),
        "engine": "memdecay",
    }


def exported(recording: Recording, setting: Setting) -> dict[str, Any]:
    """Return what a peer needs to be asked the same, as JSON values (docs/peers.md)."""
    return {
        **_read(setting, recording.episode),
        "context_ids": recording.tape.ids,
        "budgets": {str(share): budget_tokens(share, recording.seq_len) for share in (0.5, 0.25)},
        "probes": [
            {
                "region": probe.fact.region,
                "fact_kind": probe.fact.kind,
                "question_ids": probe.question,
                "gold": probe.fact.value,
                "gold_ids": probe.gold,
            }
            for probe in recording.probes
        ],
        "end_ids": recording.ends,
    }


def straddle_share(regions: Sequence[str], page_size: int = 16) -> float:
    """Return the share of pages that hold tokens of more than one region (section III-D)."""
    pages = [set(regions[at : at + page_size]) for at in range(0, len(regions), page_size)]
    return sum(len(page) > 1 for page in pages) / len(pages)
