"""A small conversation under a budget: which pages every policy keeps, written down.

`python tests/golden/test_kept_pages.py` writes the file again after an intended change.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from memdecay.policy import Tokens, available, get_policy
from memdecay.policy.pages import plan_eviction
from memdecay.regions import Profile

HERE = Path(__file__).parent
TRACE = json.loads((HERE / "trace.json").read_text())
KEPT = HERE / "kept_pages.json"
TOTAL = sum(part["tokens"] for part in TRACE["parts"])


def kept_pages(name: str, budget: int, **params: object) -> list[int]:
    """Replay the trace without eviction, evict once at the end, return the pages that stay."""
    policy, profile = get_policy(name, **params), Profile.default()
    size = [part["tokens"] for part in TRACE["parts"]]
    span = torch.repeat_interleave(torch.arange(len(size)), torch.tensor(size))
    steps = torch.tensor([float(part["step"]) for part in TRACE["parts"]])
    regions = torch.tensor([profile.id(part["region"]) for part in TRACE["parts"]])
    everything = Tokens(
        position=torch.arange(TOTAL),
        region=regions[span],
        span=span,
        inserted_at=steps[span],
        num_observed=torch.zeros(TOTAL, dtype=torch.int32),
        now=0.0,
        seq_len=TOTAL,
        state={column: torch.full((TOTAL,), value) for column, value in policy.columns.items()},
        page_size=TRACE["page_size"],
    )
    state = {**everything.state, **policy.on_insert(everything)}
    observed = everything.num_observed
    for observation in TRACE["mass"]:
        here = steps[span] <= observation["step"]  # the tokens that have arrived
        newest = int(span[here].max())
        share = {int(part): mass for part, mass in observation["parts"].items()}
        share[newest] = share.get(newest, 0.0) + 1 - sum(share.values())
        mass = torch.tensor([share.get(int(part), 0.0) / size[int(part)] for part in span[here]])
        columns = policy.observe(
            Tokens(
                position=everything.position[here],
                region=everything.region[here],
                span=span[here],
                inserted_at=everything.inserted_at[here],
                num_observed=observed[here],
                now=float(observation["step"]),
                seq_len=int(here.sum()),
                state={column: value[here] for column, value in state.items()},
            ),
            mass,
            profile,
        )
        for column, value in columns.items():
            state[column] = state[column].masked_scatter(here, value)
        observed = observed + here.int()
    tokens = dataclasses.replace(everything, state=state, num_observed=observed, now=64.0)
    page = tokens.position // TRACE["page_size"]
    evicted = plan_eviction(
        tokens,
        policy,
        profile,
        page_index=page,
        num_pages=int(page.max()) + 1,
        pinned=torch.zeros(TOTAL, dtype=torch.bool),
        excess=TOTAL - budget,
        open_page=int(page.max()),
    )
    return sorted(set(page[~evicted].tolist()))


WITHOUT_HEADS = {"usage_offset": 0.5, "prior_weight": 0.1, "sinks": 4, "recent": 16}
"""The trace tells nothing of heads, so usage and the prior are all that these policies have."""
PARAMS: dict[str, dict[str, object]] = {
    "h2o": {},
    "memdecay": WITHOUT_HEADS,
    "memdecay-paper": {},
    "memdecay-replay": WITHOUT_HEADS,
    "observation_masking": {},
    "random": {},
    "snapkv": {},
    "streaming": {},
    "tova": {},
}
CASES = [(name, budget) for name in available() if name in PARAMS for budget in (24, 48)]


@pytest.mark.parametrize(("name", "budget"), CASES)
def test_kept_pages_are_those_written_down(name: str, budget: int) -> None:
    assert (
        kept_pages(name, budget, **PARAMS[name]) == json.loads(KEPT.read_text())[f"{name} {budget}"]
    )


def test_what_can_be_said_without_running_it() -> None:
    """The same trace, judged by hand: pages 0-23, system 0-1, document 13-15, newest 23."""
    assert TOTAL == 96
    assert kept_pages("streaming", 24) == [0, 19, 20, 21, 22, 23]
    # Pinned 0 and 1, open 23; then user 21 (0.7 after 4 steps: 0.68), plan 4 (0.8 after 60: 0.57)
    # and the document, 0.5 because it was just attended to; of its tied pages the older go first.
    assert kept_pages("memdecay-paper", 24) == [0, 1, 4, 15, 21, 23]
    # Without attention the document has aged 34 steps (0.23), less than the newest tool output
    # (0.5 after 24: 0.29), the first user turn (0.7 after 64: 0.40) and scratchpad 22.
    structure = kept_pages("memdecay-paper", 48, refresh_threshold=1.0, attention_weight=0.0)
    assert structure == [0, 1, 2, 3, 4, 17, 18, 19, 20, 21, 22, 23]
    # Nine pages are tool output only; the three oldest others go after them.
    masking = kept_pages("observation_masking", 48, keep_newest=0)
    assert masking == [0, 1, 5, 11, 12, 13, 14, 15, 16, 21, 22, 23]


if __name__ == "__main__":
    lines = ",\n".join(
        f'  "{name} {budget}": {json.dumps(kept_pages(name, budget, **PARAMS[name]))}'
        for name, budget in CASES
    )
    KEPT.write_text("{\n" + lines + "\n}\n")
